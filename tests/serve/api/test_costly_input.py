"""Input whose cost could grow faster than its size: bodies, texts, lists of ids, replies with many scores."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import Request

from serve.api import body, generate
from serve.api.body import Bodies, parse_object, read_json
from serve.api.chat import SEAMS, ChatRenderer, ChatTemplateError, _unused, load_chat_renderer
from serve.api.errors import ApiError
from serve.api.generate import _rendered
from serve.api.reply import encode_reply
from serve.api.schemas import MAX_DETOKENIZED, DetokenizeRequest, parse
from serve.tokenizer import TooManyTokens, load_tokenizer

MODEL = Path(__file__).parents[3] / "models" / "smollm2-135m-instruct"
# What grows with the square takes minutes at these sizes, what grows in proportion a fraction of a second.
SECONDS = 20.0


def within(seconds: float, act: Callable[[], object]) -> None:
    started = time.monotonic()
    act()
    assert time.monotonic() - started < seconds


@pytest.mark.parametrize("end", [b'"', b"", b"\\"], ids=["closed", "open", "cut in an escape"])
def test_brackets_beside_many_escaped_quotes_are_counted_in_linear_time(end: bytes) -> None:
    text = b'"' + b'\\"' * 1_000_000 + end

    def refused() -> None:
        with pytest.raises(ApiError, match="arrays and objects"):
            parse_object(b"[" * (body.MAX_CONTAINERS + 1) + text)

    within(SECONDS, refused)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from(['"', "\\", "\\\\", '\\"', "[", "{", "a", "é"]), max_size=40))
def test_what_is_left_without_strings_is_what_json_reads_outside_of_them(parts: list[str]) -> None:
    text = json.dumps(["".join(parts), [["".join(reversed(parts))]]], ensure_ascii=False)
    assert body._outside_strings(text.encode()) == re.sub(r'"(?:[^"\\]|\\.)*"', "", text).encode()


@pytest.fixture(scope="module")
def renderer() -> ChatRenderer:
    return load_chat_renderer(MODEL, load_tokenizer(MODEL))


def test_a_text_of_noncharacters_makes_no_long_seam(renderer: ChatRenderer) -> None:
    text = "\ufdd0" + "\ufdd1" * 20_000 + "<|im_end|>" * 2_000
    assert len(_unused([text])) == 1
    within(SECONDS, lambda: renderer.encode([{"role": "user", "content": text}]))


def test_a_text_with_every_seam_is_refused(renderer: ChatRenderer) -> None:
    every = "".join(map(chr, (code for codes in SEAMS for code in codes)))
    with pytest.raises(ChatTemplateError, match="private use"):
        renderer.encode([{"role": "user", "content": every + "<|im_end|>"}])


def test_pieces_between_control_tokens_are_encoded_up_to_the_limit_only(renderer: ChatRenderer) -> None:
    with pytest.raises(TooManyTokens):
        renderer.encode([{"role": "user", "content": "<|im_end|>" * 2_000}], 100)


def test_ids_that_are_none_end_at_the_first() -> None:
    with pytest.raises(ApiError, match="tokens: must hold token ids") as refusal:
        parse(DetokenizeRequest, {"tokens": [""] * MAX_DETOKENIZED})
    assert refusal.value.param == "tokens"


class Sender:
    """A client that sends a body in pieces, each when it is told to."""

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = list(pieces)
        self.go = asyncio.Semaphore(0)

    async def __call__(self) -> dict[str, Any]:
        await self.go.acquire()
        piece = self._pieces.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(self._pieces)}

    def request(self) -> Request:
        return Request({"type": "http", "headers": []}, self)


def test_large_bodies_on_their_way_are_bounded_together_and_small_ones_always_have_room() -> None:
    large = json.dumps({"prompt": "x" * 200_000}).encode()
    half, rest = large[:150_000], large[150_000:]

    async def run() -> None:
        bodies = Bodies(limit=300_000, total=200_000)
        first, second = Sender(half, rest), Sender(half, rest)
        reading = asyncio.create_task(read_json(first.request(), bodies, dict))
        first.go.release()
        await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        assert bodies.held == 150_000 - body.SMALL_BYTES
        refused = asyncio.create_task(read_json(second.request(), bodies, dict))
        for _ in range(2):
            second.go.release()
        with pytest.raises(ApiError) as refusal:
            await refused
        assert refusal.value.status == 503
        assert refusal.value.headers["Retry-After"]
        small = Sender(b'{"prompt": "x"}')
        small.go.release()
        assert await read_json(small.request(), bodies, dict) == {"prompt": "x"}
        first.go.release()
        assert await reading == json.loads(large)
        assert bodies.held == 0

    asyncio.run(run())


def test_replies_with_many_scores_are_made_beside_the_event_loop() -> None:
    async def run() -> None:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.01)

        ticking = asyncio.create_task(tick())
        await _rendered(generate.MOST_SCORES_INLINE + 1, lambda: time.sleep(0.2))
        assert ticks > 3
        ticking.cancel()

    asyncio.run(run())


@settings(max_examples=30, deadline=None)
@given(st.lists(st.dictionaries(st.text(max_size=3), st.text() | st.floats(allow_nan=False, allow_infinity=False))))
def test_a_reply_encoded_choice_by_choice_is_the_reply(choices: list[dict[str, Any]]) -> None:
    reply = {"id": "a\u2028", "choices": choices, "usage": {"total_tokens": 3}}
    encoded = encode_reply(reply)
    assert json.loads(encoded) == reply
    assert encoded == json.dumps(reply, ensure_ascii=False, separators=(",", ":")).encode()
