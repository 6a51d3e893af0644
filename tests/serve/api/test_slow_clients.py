"""Clients that send or read too slowly: they are let go, and what they held is freed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.requests import Request

from serve.api import body, sse
from serve.api.errors import ApiError, ClientGone


async def never(*_: Any) -> Any:
    await asyncio.Event().wait()


def test_a_body_that_does_not_arrive_is_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "READ_SECONDS", 0.05)
    request = Request({"type": "http", "headers": []}, never)
    with pytest.raises(ApiError) as refusal:
        asyncio.run(body.read_json(request, body.Bodies.up_to(100), dict))
    assert refusal.value.status == 408


def test_a_client_that_leaves_while_it_sends_is_gone() -> None:
    async def leave() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    with pytest.raises(ClientGone):
        asyncio.run(body.read_json(Request({"type": "http", "headers": []}, leave), body.Bodies.up_to(100), dict))


@pytest.mark.parametrize("reads", [True, False])
def test_a_stream_that_nobody_reads_is_closed_once(monkeypatch: pytest.MonkeyPatch, reads: bool) -> None:
    monkeypatch.setattr(sse, "STALLED_READER_SECONDS", 0.05)
    monkeypatch.setattr(sse, "_POLL_SECONDS", 0.02)
    closed: list[bool] = []
    sent: list[Any] = []

    async def events() -> AsyncIterator[bytes]:
        # Waiting for the engine is not the reader's fault, however long.
        await asyncio.sleep(0.15)
        yield b"data: 1\n\n"

    async def send(message: Any) -> None:
        sent.append(message)
        if not reads and message["type"] == "http.response.body":
            await never()

    async def run() -> None:
        await sse.EventStream(events(), lambda: closed.append(True))({}, never, send)

    if reads:
        asyncio.run(run())
        assert sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}
    else:
        with pytest.raises(ClientGone):
            asyncio.run(run())
    assert closed == [True]


def test_an_event_is_one_line_whatever_line_breaks_the_text_has() -> None:
    line = sse.frame({"text": "a\u2028b\x85c\nd\re\u00e9"})
    assert line.endswith(b"\n\n")
    assert len(line.decode("ascii").splitlines()) == 2
