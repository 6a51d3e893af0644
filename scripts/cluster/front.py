"""Where requests enter: the key, the body, a replica for it, and the answer passed through as it comes.

An ASGI application behind Ray's HTTP proxy. It asks Ray for replicas and knows none by name; everything that a request
means is the replica's affair.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, RayServeException
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from scripts.cluster.affinity import affinity_key
from scripts.cluster.pages import merge_pages
from scripts.cluster.replica import LOST, Head
from scripts.cluster.settings import ClusterSettings
from serve.api.app import OPEN_PATHS
from serve.api.auth import ApiKeys
from serve.api.body import READ_SECONDS
from serve.api.errors import ApiError, ClientGone, unavailable
from serve.api.prometheus import CONTENT_TYPE
from serve.api.server import StartError
from serve.api.sse import disconnected, frame
from serve.logs import set_up_logging

log = logging.getLogger("scripts.cluster")

SESSION_HEADER = "x-session-id"
_BROADCAST_SECONDS = 5.0
_DISCARD_BYTES = 64 * 1024 * 1024
# A replica whose engine has just died refuses until Ray has heard of it.
_TRIES = 6
_FIRST_PAUSE_SECONDS = 0.1
# A request that was with a replica when it or its engine died, and of which nothing has been sent, may go to another:
# it came in the moment before the death was known. Once only: it may be what kills engines.
_LOSSES = 1


class Front:
    """The ingress deployment: Ray builds its application in the process that serves it."""

    def __init__(self, settings_json: str, engines: Any) -> None:
        self._gateway = Gateway(ClusterSettings.from_json(settings_json), engines)

    def __serve_build_asgi_app__(self) -> Gateway:
        return self._gateway


class Gateway:
    """The ASGI application. ``engines`` is Ray's handle of the replicas."""

    def __init__(self, settings: ClusterSettings, engines: Any) -> None:
        self._settings = settings
        set_up_logging(self._settings.serve.log_json)
        self._keys = ApiKeys.load(self._settings.serve.api_key_file, os.environ)
        if self._settings.needs_key and not self._keys:
            raise StartError("this node has no API key; give --api-key-file, or set the variable before `ray start`")
        self._engines = engines

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        if scope["type"] != "http":
            return
        started = False

        async def send_marked(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._serve(scope, receive, send_marked)
        except ApiError as error:
            if started:
                raise
            await error.to_response()(scope, receive, send_marked)
        except ClientGone:
            log.info("the client left")

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        path = scope["path"]
        allowed = not self._keys or self._keys.match(headers.get("authorization")) is not None
        if path == "/metrics" and allowed and scope["method"] in ("GET", "HEAD"):
            await self._metrics(scope["method"], send)
            return
        if path == "/health" and scope["method"] in ("GET", "HEAD"):
            await self._health(scope["method"], send)
            return
        # Without a key the replica says 401, and nothing is read for it.
        body = await self._body(receive) if allowed or path in OPEN_PATHS else b""
        asked = {
            "method": scope["method"],
            "path": path,
            "raw_path": scope.get("raw_path") or path.encode(),
            "query_string": scope["query_string"],
            "headers": [(bytes(name), bytes(value)) for name, value in scope["headers"]],
            "client": tuple(scope["client"]) if scope.get("client") else None,
            "http_version": scope.get("http_version", "1.1"),
        }
        key = headers.get(SESSION_HEADER) or affinity_key(body)
        engines = self._engines.options(stream=True, session_id=key) if key else self._engines.options(stream=True)
        work = asyncio.ensure_future(self._pass_on(engines, asked, body, send))
        leaver = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait({work, leaver}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ClientGone
            work.result()
        finally:
            work.cancel()
            leaver.cancel()
            await asyncio.gather(work, leaver, return_exceptions=True)

    async def _pass_on(self, engines: Any, asked: dict[str, Any], body: bytes, send: Send) -> None:
        losses = 0
        for attempt in range(_TRIES):
            answer = engines.answer.remote(asked, body)
            last, begun = attempt == _TRIES - 1, False
            try:
                head = await _first(answer)
                lost = LOST in head[1]
                losses += lost
                # 503 comes before anything was begun, so the request may go to another replica.
                again = (head[0] == 503 or (lost and losses <= _LOSSES)) and not last
                if not again:
                    parts = _parts(head, answer)
                    if asked["http_version"] == "1.0":
                        # Ray's proxy would send chunks, which such a client does not know.
                        body = b"".join([part async for part in parts])
                        head = (head[0], [*_without(head, b"content-length"), (b"content-length", b"%d" % len(body))])
                        parts = _once(body)
                    begun = True
                    await _send_answer(head, parts, send)
                    return
            except BackPressureError:
                raise ApiError(429, "every replica is full", code="queue_full", headers={"Retry-After": "1"}) from None
            except (RayError, RayServeException) as error:
                losses += 1
                log.error("a request was lost with its replica: %s", type(error).__name__)
                if begun or last or losses > _LOSSES:
                    raise ApiError(500, "the replica that had this request was lost", code="replica_lost") from None
            finally:
                answer.cancel()
            await asyncio.sleep(_FIRST_PAUSE_SECONDS * 2**attempt)

    async def _body(self, receive: Receive) -> bytes:
        """The whole body, or so much of it that the replica sees that it is over the limit."""
        try:
            return await asyncio.wait_for(self._read(receive), READ_SECONDS)
        except asyncio.TimeoutError:
            raise ApiError(408, f"the body did not arrive within {READ_SECONDS:.0f} seconds") from None

    async def _read(self, receive: Receive) -> bytes:
        kept, size = bytearray(), 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            chunk = message.get("body", b"")
            size += len(chunk)
            kept += chunk[: max(0, self._settings.serve.max_body_bytes + 1 - len(kept))]
            if not message.get("more_body") or size > _DISCARD_BYTES:
                return bytes(kept)

    async def _health(self, method: str, send: Send) -> None:
        """200 when any replica would answer. Asked past the queues, so that a full cluster is not an ill one."""
        reasons = await self._every_replica("unavailable_reason")
        if None not in reasons:
            raise unavailable(next((str(reason) for reason in reasons), "no replica answers"))
        await _send_whole(method, b'{"status":"ok"}', b"application/json", send)

    async def _metrics(self, method: str, send: Send) -> None:
        pages = dict(sorted(await self._every_replica("metrics")))
        page = merge_pages({name: text.decode() for name, text in pages.items()})
        await _send_whole(method, page.encode(), CONTENT_TYPE.encode(), send)

    async def _every_replica(self, method: str) -> list[Any]:
        """What every replica says to ``method``, without those that fail; nothing when they take too long."""
        asked = self._engines.broadcast(method)
        try:
            found = await asked.results_async(timeout_s=_BROADCAST_SECONDS, return_exceptions=True)
        except (TimeoutError, asyncio.TimeoutError, RayError, RayServeException):
            return []
        return [item for item in found if not isinstance(item, BaseException)]


async def _send_whole(method: str, body: bytes, kind: bytes, send: Send) -> None:
    head = [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    await send({"type": "http.response.body", "body": b"" if method == "HEAD" else body})


async def _first(answer: AsyncIterator[Head | bytes]) -> Head:
    head = await answer.__anext__()
    assert isinstance(head, tuple)
    return head


async def _parts(head: Head, answer: AsyncIterator[Head | bytes]) -> AsyncIterator[bytes]:
    """The body as it comes. A replica lost in the middle of a stream of events leaves an error frame and no [DONE]."""
    stream = any(name.lower() == b"content-type" and value.startswith(b"text/event-stream") for name, value in head[1])
    try:
        async for part in answer:
            assert isinstance(part, bytes)
            yield part
    except (RayError, RayServeException) as error:
        log.error("an answer was lost with its replica: %s", type(error).__name__)
        if not stream:
            raise
        yield frame(ApiError(500, "the replica that had this request was lost", code="replica_lost").to_json())


async def _once(body: bytes) -> AsyncIterator[bytes]:
    yield body


def _without(head: Head, dropped: bytes) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in head[1] if name.lower() != dropped]


async def _send_answer(head: Head, parts: AsyncIterator[bytes], send: Send) -> None:
    # Ray's proxy writes the request's id itself, the same one.
    headers = [header for header in _without(head, b"x-request-id") if header != LOST]
    await send({"type": "http.response.start", "status": head[0], "headers": headers})
    async for part in parts:
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return
