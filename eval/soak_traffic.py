"""The requests of a soak: mixed lengths, routes and options; some are cancelled, some malformed, some asked again.

Everything follows from the seed. It knows request bodies and what must come back; it does not send anything.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

from eval.prompts import sentences

CANCELLED_SHARE = 0.05
MALFORMED_SHARE = 0.01
SENTINEL_SHARE = 0.04
SENTINELS = 6
CHAT_TOKENS = 60
"""What a chat template adds, at most."""

MALFORMED: tuple[tuple[str, bytes], ...] = (
    ("cut short", b'{"prompt": "Once upon'),
    ("not JSON", b"prompt=Once+upon&max_tokens=5"),
    ("not an object", b'["prompt"]'),
    ("empty", b""),
    ("not UTF-8", b'{"prompt": "\xff\xfe"}'),
    ("lone surrogate", b'{"prompt": "\\ud83d"}'),
    ("NaN", b'{"prompt": "x", "temperature": NaN}'),
    ("deep nesting", b'{"prompt": ' + b"[" * 20000 + b"]" * 20000 + b"}"),
    ("wrong type", b'{"prompt": "x", "max_tokens": "5"}'),
    ("out of range", b'{"prompt": "x", "temperature": -1}'),
    ("too many choices", b'{"prompt": "x", "n": 100000}'),
    ("foreign token id", b'{"prompt": [999999999]}'),
    ("over the context", b'{"prompt": "x", "max_tokens": 1000000}'),
    ("unsupported field", b'{"prompt": "x", "guided_regex": "(a+)+"}'),
)


@dataclass(frozen=True)
class Shot:
    """One request: ``kind`` is answer, cancel, malformed or sentinel.

    content: the body as bytes. stream: whether events come back. leave_after: pieces a cancelling client reads, 0 to
    leave before the first. key: what an answer is compared under (sentinels only).
    """

    kind: str
    route: str
    content: bytes
    stream: bool
    choices: int = 1
    leave_after: int = 0
    key: int = -1


class Traffic:
    """Draws shots.

    longest: most tokens of prompt and answer together that a request may ask for. word_tokens: tokens of a word of
    these texts at most, with the model's tokenizer.
    """

    def __init__(self, seed: int, longest: int, word_tokens: float = 2.0) -> None:
        self._rng = random.Random(seed)
        self._longest = longest
        self._most_words = int((longest - CHAT_TOKENS) / word_tokens)
        self._shared = [self._text(min(self._rng.randrange(40, 120), self._most_words // 3)) for _ in range(4)]

    def sentinels(self) -> list[Shot]:
        """Greedy requests whose text must be the same whenever they are asked."""
        shots = []
        for key in range(SENTINELS):
            rng = random.Random(1000 + key)
            source = sentences(rng)
            text = " ".join(next(source) for _ in range(1 + key)).split()
            prompt = " ".join(text[: self._most_words // 3])
            body = {"prompt": prompt, "temperature": 0, "max_tokens": 12 + 8 * key, "stream": key % 2 == 1}
            shots.append(_shot("sentinel", "/v1/completions", body, key=key))
        return shots

    def next(self) -> Shot:
        """The next request."""
        draw = self._rng.random()
        if draw < MALFORMED_SHARE:
            _, content = self._rng.choice(MALFORMED)
            return Shot("malformed", "/v1/completions", content, stream=False)
        if draw < MALFORMED_SHARE + CANCELLED_SHARE:
            route, body = self._body()
            body["stream"] = True
            return _shot("cancel", route, body, leave_after=self._rng.randrange(0, 6))
        if draw < MALFORMED_SHARE + CANCELLED_SHARE + SENTINEL_SHARE:
            return self._rng.choice(self.sentinels())
        return _shot("answer", *self._body())

    def _text(self, words: int) -> str:
        source = sentences(self._rng)
        text = ""
        while len(text.split()) < words:
            text += " " + next(source)
        return " ".join(text.split()[:words])

    def _body(self) -> tuple[str, dict[str, Any]]:
        """Lengths are spread evenly over their logarithm: many short ones, a few long ones."""
        rng = self._rng
        answer = min(int(2 ** rng.uniform(0, 7.5)), self._longest // 2)
        room = self._most_words * (self._longest - answer) // self._longest
        words = max(1, min(int(2 ** rng.uniform(0, 8.5)), room))
        text = self._text(words)
        if rng.random() < 0.25:
            text = " ".join(f"{rng.choice(self._shared)} {text}".split()[:room])
        body: dict[str, Any] = {"max_tokens": answer, "stream": rng.random() < 0.7}
        if rng.random() < 0.5:
            body |= {"temperature": 0}
        else:
            body |= {"temperature": rng.uniform(0.2, 1.2), "seed": rng.randrange(1 << 30), "top_p": 0.95}
        if rng.random() < 0.1:
            body |= {"n": 2}
        if rng.random() < 0.1:
            body |= {"stop": ["\n\n", "entry"]}
        if rng.random() < 0.1:
            body |= {"ignore_eos": True}
        if rng.random() < 0.5:
            if rng.random() < 0.1:
                body |= {"logprobs": True, "top_logprobs": 3}
            return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": text}]}
        if rng.random() < 0.1:
            body |= {"logprobs": 2, "echo": rng.random() < 0.5}
        return "/v1/completions", body | {"prompt": text}


def _shot(kind: str, route: str, body: dict[str, Any], *, leave_after: int = 0, key: int = -1) -> Shot:
    content = json.dumps(body).encode()
    return Shot(kind, route, content, bool(body.get("stream")), int(body.get("n", 1)), leave_after, key)
