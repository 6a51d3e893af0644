"""Prompts of the measured shapes, written here and drawn by seed; two seeds never share their first words.

Distinct beginnings keep a server's prefix cache out of the numbers. Standard library only; lengths in tokens are
reached with the counter the caller hands in. It knows no server and no timing.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence

from eval.client import ChatRequest, TokenCounter, user_request

_PEOPLE = (
    "the harbour master",
    "a night nurse",
    "the beekeeper",
    "our cartographer",
    "a retired pilot",
    "the glazier",
    "a choir leader",
    "the ferry clerk",
    "a seed merchant",
    "the lighthouse crew",
    "a bridge inspector",
)
_ACTS = (
    "measured",
    "repaired",
    "described",
    "carried away",
    "photographed",
    "catalogued",
    "painted",
    "weighed",
    "forgot about",
    "traded",
    "inspected",
    "hid",
    "restored",
)
_THINGS = (
    "the copper kettle",
    "eleven wooden crates",
    "a torn map of the delta",
    "the tide tables",
    "a brass compass",
    "the winter ledger",
    "two barrels of salt",
    "the cracked bell",
    "a box of glass slides",
    "the old turbine",
)
_PLACES = (
    "behind the customs house",
    "near the northern lock",
    "under the railway arch",
    "in the drying shed",
    "at the edge of the salt marsh",
    "on the upper terrace",
    "beside the weather station",
    "below the dam",
)
_WHEN = (
    "Before the storm",
    "On a quiet Tuesday",
    "In the third week of March",
    "Just after noon",
    "Two winters ago",
    "During the long strike",
    "When the fog lifted",
    "At the end of the season",
)
_WHY = (
    "because nobody else would",
    "so that the inventory could be closed",
    "although the gate was locked",
    "while the others argued about the price",
    "and wrote a short note about it",
    "as the contract demanded",
)
_TOPICS = (
    "a lighthouse keeper who collects sounds",
    "a village that moves its clock tower",
    "the last paper mill on a river",
    "two rivals who repair the same bridge",
    "a librarian who maps the wind",
    "a baker who trades in weather reports",
    "an orchard planted on a rooftop",
    "a ferry that never leaves on time",
    "a school for lost tools",
    "a gardener who argues with the rain",
    "a clockmaker's apprentice in a mountain town",
    "a radio that only plays yesterday",
)

SWEEP_TEXTS = 32
SWEEP_HEAD, SWEEP_TAIL = "{} wrote:", "\n\nContinue this account at length."


def sentences(rng: random.Random) -> Iterator[str]:
    """An endless run of plain sentences; the same generator state gives the same sentences."""
    while True:
        yield (
            f"{rng.choice(_WHEN)}, {rng.choice(_PEOPLE)} {rng.choice(_ACTS)} {rng.choice(_THINGS)} "
            f"{rng.choice(_PLACES)} {rng.choice(_WHY)}, entry {rng.randrange(100, 10000)}."
        )


def tag(rng: random.Random) -> str:
    """A word no other seed is likely to begin with."""
    return "".join(rng.choice("bcdfghjklmnprstvwz") + rng.choice("aeiou") for _ in range(5)).capitalize()


def text_of(tokens: int, rng: random.Random, counter: TokenCounter, head: str = "", tail: str = "") -> str:
    """``head`` + sentences + ``tail``, cut so that the whole is ``tokens`` tokens or one or two fewer."""
    body = head
    source = sentences(rng)
    room = tokens - len(counter.ends(tail))
    if room < len(counter.ends(head)):
        raise ValueError(f"{tokens} tokens are too few for the fixed parts of the prompt")
    while True:
        for _ in range(max(1, (room - len(counter.ends(body))) // 40)):
            body += " " + next(source)
        ends = counter.ends(body)
        if len(ends) >= room:
            return body[: ends[room - 1]] + tail


def interactive(
    count: int, seed: int, counter: TokenCounter, tokens: int = 120, max_tokens: int = 256
) -> list[ChatRequest]:
    """Chats that ask for a long answer after a short note: the one-stream shape."""
    return _stories("interactive", count, seed, counter, tokens, max_tokens)


def burst(count: int, seed: int, counter: TokenCounter, tokens: int = 240, max_tokens: int = 128) -> list[ChatRequest]:
    """Many different chats to send at once."""
    return _stories("burst", count, seed, counter, tokens, max_tokens)


def _stories(
    category: str, count: int, seed: int, counter: TokenCounter, tokens: int, max_tokens: int
) -> list[ChatRequest]:
    requests = []
    for index in range(count):
        rng = random.Random(f"{category}/{seed}/{index}")
        head = f"{tag(rng)} is the title. These notes come first:"
        tail = f"\n\nNow write a long, detailed story of at least ten paragraphs about {rng.choice(_TOPICS)}."
        requests.append(user_request(text_of(tokens, rng, counter, head, tail), max_tokens, category=category))
    return requests


def long_prompt(
    count: int, seed: int, counter: TokenCounter, tokens: int = 4096, max_tokens: int = 16
) -> list[ChatRequest]:
    """Prompts of about ``tokens`` tokens with a short question at the end: the time-to-first-token shape."""
    requests = []
    for index in range(count):
        rng = random.Random(f"long/{seed}/{index}")
        head = f"{tag(rng)} kept this journal:"
        tail = "\n\nWhat is this journal about? Answer in one sentence."
        requests.append(user_request(text_of(tokens, rng, counter, head, tail), max_tokens, category="long_prompt"))
    return requests


def copy_heavy(count: int, seed: int, max_tokens: int = 160) -> list[ChatRequest]:
    """Tasks whose answer mostly repeats the prompt: repeat, correct one word, list, extract, reformat, edit code."""
    tasks: Sequence[Callable[[random.Random], str]] = (_repeat, _replace, _numbered, _extract, _table, _code)
    requests = []
    for index in range(count):
        rng = random.Random(f"copy/{seed}/{index}")
        prompt = tasks[index % len(tasks)](rng)
        requests.append(user_request(prompt, max_tokens, category="copy"))
    return requests


def _take(rng: random.Random, count: int) -> list[str]:
    source = sentences(rng)
    return [next(source) for _ in range(count)]


def _repeat(rng: random.Random) -> str:
    text = " ".join(_take(rng, 4))
    return f"{tag(rng)}. Repeat the following text exactly, word for word, and write nothing else.\n\n{text}"


def _replace(rng: random.Random) -> str:
    text = " ".join(_take(rng, 4))
    return f"{tag(rng)}. Copy the text below, but write 'record' instead of 'entry'. Change nothing else.\n\n{text}"


def _numbered(rng: random.Random) -> str:
    text = " ".join(_take(rng, 5))
    return f"{tag(rng)}. Write each sentence of the text below on its own numbered line, unchanged.\n\n{text}"


def _extract(rng: random.Random) -> str:
    facts = "\n".join(f"- {line}" for line in _take(rng, 5))
    return f"{tag(rng)}. Here is a list:\n{facts}\n\nWrite the full list again in the same order, unchanged."


def _table(rng: random.Random) -> str:
    rows = "\n".join(f"| {rng.choice(_THINGS)} | {rng.randrange(2, 90)} | {rng.choice(_PLACES)} |" for _ in range(7))
    return f"{tag(rng)}. Repeat this table exactly:\n\n| item | count | place |\n|---|---|---|\n{rows}"


def _code(rng: random.Random) -> str:
    names = [tag(rng).lower() for _ in range(4)]
    functions = "\n\n".join(
        f"def {name}(values):\n    total = 0\n    for value in values:\n        if value > {rng.randrange(1, 50)}:\n"
        f"            total += value * {rng.randrange(2, 9)}\n    return total"
        for name in names
    )
    return f"# {tag(rng)}\nCopy this Python file exactly as it is:\n\n```python\n{functions}\n```"


def sweep_requests(
    seed: int, counter: TokenCounter, tokens: int, max_tokens: int, options: dict[str, object]
) -> Iterator[ChatRequest]:
    """Endless requests of one shape for one sweep point; the seed keeps every point's prompts apart.

    The texts are made now, and used in turn: making one takes milliseconds, in which a client in the middle of a run
    would read no answers. A system line with its own first words makes every request new to a prefix cache from its
    first page on; the user's message too begins with a word of its own. Lengths differ by the tokens of those words.
    """
    room = len(counter.ends(SWEEP_TAIL)) + len(counter.ends(SWEEP_HEAD.format(tag(random.Random(seed)))))
    if tokens <= room:
        raise ValueError(f"{tokens} prompt tokens are too few: the fixed parts have {room}")
    bodies = [text_of(tokens - room, random.Random(f"sweep/{seed}/{index}"), counter) for index in range(SWEEP_TEXTS)]
    return _sweep_stream(seed, bodies, max_tokens, options)


def _sweep_stream(
    seed: int, bodies: Sequence[str], max_tokens: int, options: dict[str, object]
) -> Iterator[ChatRequest]:
    for index in itertools.count():
        rng = random.Random(f"sweep/{seed}/{index}/tags")
        yield ChatRequest(
            (
                {"role": "system", "content": f"{tag(rng)} {tag(rng)}: be thorough."},
                {"role": "user", "content": SWEEP_HEAD.format(tag(rng)) + bodies[index % len(bodies)] + SWEEP_TAIL},
            ),
            max_tokens,
            temperature=float(str(options.get("temperature", 0.0))),
            options=tuple((key, value) for key, value in options.items() if key != "temperature"),
            category="sweep",
        )
