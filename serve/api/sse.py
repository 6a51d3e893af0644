"""Server-sent events: framing, and the response that sends them until it ends or the client leaves.

It does not know what the events mean.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serve.api.errors import ApiError, ClientGone

DONE = b"data: [DONE]\n\n"
STALLED_READER_SECONDS = 120.0
_POLL_SECONDS = 10.0

T = TypeVar("T")


def frame(event: dict[str, Any]) -> bytes:
    """One event. ASCII only: a raw U+2028 or U+0085 in the text would be a line break to many clients."""
    return b"data: " + json.dumps(event, separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n\n"


async def disconnected(receive: Receive) -> None:
    """Return when the client has hung up. The request body must have been read to its end."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``; ClientGone, and ``work`` is cancelled, when the client hangs up first."""
    worker = asyncio.ensure_future(work)
    leaver = asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait({worker, leaver}, return_when=asyncio.FIRST_COMPLETED)
        if worker.done():
            return worker.result()
        raise ClientGone
    finally:
        worker.cancel()
        leaver.cancel()
        await asyncio.gather(worker, leaver, return_exceptions=True)


class EventStream(Response):
    """Sends ``events`` as they come.

    Headers go out with the first event, so a failure before it is still a plain HTTP error. A failure after it is an
    error frame, then the stream ends without ``[DONE]``. ``on_close`` runs exactly once, however the response ends.
    """

    def __init__(self, events: AsyncIterator[bytes], on_close: Callable[[], None]) -> None:
        super().__init__(
            status_code=200,
            headers={
                "content-type": "text/event-stream; charset=utf-8",
                "cache-control": "no-cache",
                "x-accel-buffering": "no",
            },
        )
        del self.headers["content-length"]
        self._events = events
        self._on_close = on_close
        self._sending_since: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender = asyncio.ensure_future(self._send_events(send))
        leaver = asyncio.ensure_future(disconnected(receive))
        try:
            while not (sender.done() or leaver.done() or self._reader_stalled()):
                await asyncio.wait({sender, leaver}, timeout=_POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if sender.done():
                sender.result()
                return
            raise ClientGone
        finally:
            self._on_close()
            sender.cancel()
            leaver.cancel()
            await asyncio.gather(sender, leaver, return_exceptions=True)

    def _reader_stalled(self) -> bool:
        since = self._sending_since
        return since is not None and time.monotonic() - since > STALLED_READER_SECONDS

    async def _send_events(self, send: Send) -> None:
        started = False
        try:
            async for event in self._events:
                if not started:
                    started = True
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                await self._send(send, event)
        except ApiError as error:
            if not started:
                raise
            await self._send(send, frame(error.to_json()))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, data: bytes) -> None:
        self._sending_since = time.monotonic()
        await send({"type": "http.response.body", "body": data, "more_body": True})
        self._sending_since = None
