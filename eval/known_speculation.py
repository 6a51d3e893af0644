"""Public bug reports about speculative decoding, tried at the size in which they were reported.

Each case starts real servers with the drafter and without, sends what the report says, and returns a line of figures; a
BrokenPromise says what was wrong. It knows the API, not the engine.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import httpx
import torch

from eval.chaos_client import Lab, check
from eval.prompts import copy_heavy, sentences
from eval.servers import ManagedServer, our_server

AT_ONCE = 32
BLOCK = 7
SEEDS = 2000

CAPITALS = (
    "France Spain Italy Japan China India Egypt Peru Cuba Iran Chile Kenya Norway Sweden Poland Greece Turkey Russia"
)
SUBJECTS = "snow coal grass blood milk the-sky a-lemon chocolate a-crow salt"
RELATIONS = "opposite plural past-tense synonym first-letter last-letter colour-of taste-of shape-of size-of"
WORDS = "hot cold big small fast slow up down light dark good bad rich poor young old wet dry"


def one_word_questions(count: int) -> list[str]:
    """Different questions that one word answers."""
    found = [f"What is the capital of {name}? Answer with one word." for name in CAPITALS.split()]
    found += [f"Which colour is {name.replace('-', ' ')}? One word only." for name in SUBJECTS.split()]
    for relation in RELATIONS.split():
        found += [f"One word: the {relation.replace('-', ' ')} of {word}?" for word in WORDS.split()]
    return found[:count]


def _server(lab: Lab, name: str, *extra: str) -> ManagedServer:
    return our_server(lab.model_dir, name, "--threads", str(lab.threads), "--max-num-seqs", str(AT_ONCE), *extra)


def drafting(lab: Lab, *extra: str) -> ManagedServer:
    """Every round verifies a draft."""
    return _server(lab, "drafting", "--drafter-dir", lab.drafter_dir, "--block-length", str(BLOCK), *extra)


def plain(lab: Lab, *extra: str) -> ManagedServer:
    return _server(lab, "plain", "--proposer", "none", *extra)


def ask(server: ManagedServer, route: str, bodies: Sequence[dict[str, Any]], at_once: int = AT_ONCE) -> list[Any]:
    """The replies to ``bodies`` in order, ``at_once`` of them in flight. BrokenPromise for one that is not a 200."""

    async def one(client: httpx.AsyncClient, gate: asyncio.Semaphore, body: dict[str, Any]) -> Any:
        async with gate:
            response = await client.post(f"/v1/{route}", json=body)
        check(response.status_code == 200, f"HTTP {response.status_code}: {response.text[:200]}")
        return response.json()

    async def everything() -> list[Any]:
        gate = asyncio.Semaphore(at_once)
        async with httpx.AsyncClient(base_url=server.url, timeout=1800, trust_env=False) as client:
            return list(await asyncio.gather(*(one(client, gate, body) for body in bodies)))

    return asyncio.run(everything())


def chat(text: str, max_tokens: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": max_tokens}


def facts(reply: Any) -> tuple[str, str, int]:
    """Text, finish reason and completion tokens of a chat."""
    choice = reply["choices"][0]
    return choice["message"]["content"], choice["finish_reason"], reply["usage"]["completion_tokens"]


def _both(lab: Lab, bodies: list[dict[str, Any]], *extra: str) -> tuple[list[Any], list[Any]]:
    with drafting(lab, *extra) as server:
        drafted = ask(server, "chat/completions", bodies)
    with plain(lab, *extra) as server:
        undrafted = ask(server, "chat/completions", bodies)
    return drafted, undrafted


def _acceptance(reply: Any) -> float:
    return float(reply["metrics"]["speculative_decoding"]["mean_acceptance_length"])


def ends_inside_blocks(lab: Lab) -> str:
    """B20: 200 one-word questions, greedy, at most 200 tokens, with the drafter and without."""
    questions = one_word_questions(200)
    check(len(set(questions)) == 200, len(set(questions)))
    drafted, undrafted = _both(lab, [chat(question, 200) for question in questions])
    different = sum(facts(a) != facts(b) for a, b in zip(drafted, undrafted, strict=True))
    check(different == 0, f"{different} of 200 answers differ in text, end or tokens")
    check(not any("<|" in facts(reply)[0] for reply in drafted), "a turn marker shows")
    reasons = Counter(facts(reply)[1] for reply in drafted)
    check(reasons["stop"] >= 150, reasons)
    mean = sum(_acceptance(reply) for reply in drafted if "metrics" in reply) / 200
    return f"200 of 200 equal in text, end and tokens; ends {dict(reasons)}; {mean:.2f} tokens a round"


def same_text(lab: Lab) -> str:
    """B23: 100 mixed prompts and one word 60 times, 256 tokens, greedy, float32, with the drafter and without."""
    rng = random.Random(23)
    source = sentences(rng)
    tasks = ("Continue:", "Write a story that begins like this:", "Translate into French:", "Explain:", "Write a poem:")
    prompts = [f"{tasks[i % len(tasks)]} {next(source)}" for i in range(60)]
    prompts += [request.messages[-1]["content"] for request in copy_heavy(40, 23)]
    prompts.append("lighthouse " * 60)
    drafted, undrafted = _both(lab, [chat(prompt, 256) for prompt in prompts], "--weights", "fp32")
    different = sum(facts(a) != facts(b) for a, b in zip(drafted, undrafted, strict=True))
    check(different == 0, f"{different} of {len(prompts)} answers differ")
    tokens = sum(facts(reply)[2] for reply in drafted)
    mean = sum(_acceptance(reply) for reply in drafted if "metrics" in reply) / len(prompts)
    return f"{len(prompts)} of {len(prompts)} token-identical, {tokens} tokens, {mean:.2f} tokens a round"


def own_words(lab: Lab) -> str:
    """B24: 32 requests at once, 16 that copy a word of their own and 16 open ones, first alone, then together."""
    rng = random.Random(24)
    words = ["".join(rng.choice("bcdfglmnprstvz") + rng.choice("aeiou") for _ in range(4)) for _ in range(16)]
    source = sentences(rng)
    bodies = [chat(f"Repeat this 20 times: {word}", 128) for word in words]
    bodies += [chat(f"What comes next? {next(source)}", 128) for _ in range(16)]
    with drafting(lab) as server:
        alone = ask(server, "chat/completions", bodies, at_once=1)
        together = ask(server, "chat/completions", bodies)
    different = sum(facts(a) != facts(b) for a, b in zip(alone, together, strict=True))
    check(different == 0, f"{different} of 32 answers are not what they are alone")
    for index, reply in enumerate(together):
        strangers = [word for i, word in enumerate(words) if i != index and word in facts(reply)[0]]
        check(not strangers, f"answer {index} holds words of others: {strangers}")
    own = sum(word in facts(reply)[0] for word, reply in zip(words, together[:16], strict=True))
    before, after = ([_acceptance(reply) for reply in replies] for replies in (alone, together))
    worst = max(abs(b / a - 1) for a, b in zip(before, after, strict=True))
    check(worst < 0.1, f"acceptance length of one request moved by {worst:.0%}")
    return f"32 of 32 equal alone and together; {own} of 16 copy their word; acceptance moved by {worst:.1%} at most"


def sampled(lab: Lab) -> str:
    """B29: one digit at temperature 1 with 2,000 seeds, with the drafter and without, and other seeds without."""

    def bodies(first: int) -> list[dict[str, Any]]:
        common = {"prompt": "Pick one digit from 0 to 9:", "temperature": 1, "max_tokens": 3}
        return [{**common, "seed": first + i} for i in range(SEEDS)]

    with drafting(lab) as server:
        drafted = [reply["choices"][0]["text"] for reply in ask(server, "completions", bodies(0))]
        again = [reply["choices"][0]["text"] for reply in ask(server, "completions", bodies(5)[:1] * 5, at_once=1)]
    with plain(lab) as server:
        same = [reply["choices"][0]["text"] for reply in ask(server, "completions", bodies(0))]
        others = [reply["choices"][0]["text"] for reply in ask(server, "completions", bodies(SEEDS))]
    check(set(again) == {drafted[5]}, f"seed 5 alone gives {set(again)}, beside others {drafted[5]!r}")
    different = sum(a != b for a, b in zip(drafted, same, strict=True))
    check(different == 0, f"{different} of {SEEDS} seeds give another text with the drafter")
    check(len(set(drafted)) > 100, f"only {len(set(drafted))} different texts")
    p = same_distribution(drafted, others)
    check(p > 0.01, f"chi-square p = {p:.4f}")
    return f"{SEEDS} of {SEEDS} seeds equal; {len(set(drafted))} texts; against {SEEDS} other seeds p = {p:.2f}"


def same_distribution(left: Sequence[str], right: Sequence[str]) -> float:
    """p of a chi-square test that both come from one distribution; texts seen less than ten times are one class."""
    counts = Counter(left) + Counter(right)
    classes = {text: text if count >= 10 else "" for text, count in counts.items()}
    table = [Counter(classes[text] for text in side) for side in (left, right)]
    names = sorted({name for side in table for name in side})
    if len(names) < 2:
        return 1.0
    total = len(left) + len(right)
    statistic = 0.0
    for side, size in zip(table, (len(left), len(right)), strict=True):
        for name in names:
            expected = size * (table[0][name] + table[1][name]) / total
            statistic += (side[name] - expected) ** 2 / expected
    degrees = torch.tensor((len(names) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(degrees, torch.tensor(statistic / 2, dtype=torch.float64)))
