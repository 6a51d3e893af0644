"""Bounds on connections before there is a request: how many, how large their headers, how long these may take.

uvicorn's h11 protocol, which is what the tests run and what every installation has, with a timer and a count. It knows
bytes on sockets; what a request asks for is the application's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import resource
from typing import Any

from starlette.types import Scope
from uvicorn.protocols.http.h11_impl import H11Protocol, h11  # type: ignore[attr-defined]  # the one it catches

from serve.api.errors import ApiError, invalid

MAX_CONNECTIONS = 4096
MAX_HEADER_BYTES = 32 * 1024
"""Of request line and headers together: h11 keeps to it while they are incomplete, ``check_headers`` afterwards."""
HEADER_SECONDS = 20.0
SMALL_CHUNK_BYTES = 64
MAX_SMALL_CHUNKS = 4096
"""Chunks of a body smaller than that on average which are taken: each costs far more than its bytes."""
_NO_REQUEST_YET = "IDLE"
"""h11's name for the state in which what has come is not yet a whole request line with its headers."""
_WANTED_DESCRIPTORS = 65536
_SPARE_DESCRIPTORS = 64
"""Open files that are no clients': the engine's pipe, logs, what is read for a moment."""
_FEWEST_CONNECTIONS = 16
_SAY_AGAIN_SECONDS = 60.0
_CLOSE = {"Connection": "close"}

log = logging.getLogger("serve.api")


class BoundedH11Protocol(H11Protocol):
    """One connection. It is closed when its headers take too long to come, when its body comes in crumbs, or when there
    are too many others."""

    _header_timer: asyncio.TimerHandle | None = None
    _crumbs = 0.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._next_event = self.conn.next_event
        self.conn.next_event = self._counted_event  # type: ignore[method-assign]

    def _counted_event(self) -> Any:
        """What h11 has read. A body in millions of chunks of a byte would keep this process from everything else."""
        event = self._next_event()
        if isinstance(event, h11.Data):
            self._crumbs = max(0.0, self._crumbs + 1 - len(event.data) / SMALL_CHUNK_BYTES)
            if self._crumbs > MAX_SMALL_CHUNKS:
                raise h11.RemoteProtocolError("the body comes in too many small chunks")
        elif isinstance(event, h11.Request):
            self._crumbs = 0.0
        return event

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        most = most_connections()
        if len(self.connections) > most:
            self._refuse(ApiError(503, f"more than {most} connections are open", code="unavailable"))
            return
        self._wait_for_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if repr(self.conn.their_state) == _NO_REQUEST_YET:
            self._wait_for_headers()
        else:
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """What is not HTTP, or has larger headers than allowed, gets an error object like everybody else."""
        self._stop_waiting()
        unread, _ = self.conn.trailing_data
        self._refuse(
            _headers_too_large() if len(unread) > MAX_HEADER_BYTES else invalid(None, "not a valid HTTP request")
        )

    def _wait_for_headers(self) -> None:
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _refuse(self, error: ApiError) -> None:
        body = json.dumps(error.to_json()).encode()
        reason = {400: b"Bad Request", 431: b"Request Header Fields Too Large", 503: b"Service Unavailable"}[
            error.status
        ]
        head: list[Any] = [
            b"HTTP/1.1 %d %s" % (error.status, reason),
            b"content-type: application/json",
            b"content-length: %d" % len(body),
            b"connection: close",
        ]
        self.transport.write(b"\r\n".join(head) + b"\r\n\r\n" + body)
        self.transport.close()


def check_headers(scope: Scope) -> None:
    """ApiError for headers that are whole and still wrong: 431 where they came in one piece and are larger than
    allowed, 400 where they say twice how long the body is, and for a version of HTTP that this is not."""
    line = len(scope["raw_path"]) + len(scope["query_string"])
    if line + sum(len(name) + len(value) + 4 for name, value in scope["headers"]) > MAX_HEADER_BYTES:
        raise _headers_too_large()
    if not scope["http_version"].startswith("1."):
        raise ApiError(400, "only HTTP/1.0 and HTTP/1.1 are spoken here", code="http_version", headers=_CLOSE)
    names = {name for name, _ in scope["headers"]}
    # A proxy that believes the other length sees other requests in these bytes than we do.
    if b"transfer-encoding" in names and (b"content-length" in names or scope["http_version"] == "1.0"):
        raise ApiError(
            400,
            "transfer-encoding: not together with content-length, nor in HTTP/1.0",
            "transfer-encoding",
            headers=_CLOSE,
        )


def _headers_too_large() -> ApiError:
    return ApiError(
        431, f"the request line and headers have more than {MAX_HEADER_BYTES} bytes", code="headers_too_large"
    )


class LoopFaults:
    """The event loop's exception handler. asyncio says for each of some thousand tries a second, with a traceback, that
    a connection cannot be accepted for want of open files; here it is one line a minute."""

    def __init__(self) -> None:
        self._said: float | None = None

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not (isinstance(error, OSError) and "accept" in context.get("message", "")):
            loop.default_exception_handler(context)
        elif self._said is None or loop.time() - self._said > _SAY_AGAIN_SECONDS:
            self._said = loop.time()
            log.error("connections wait, as none can be accepted: %s", error.strerror)


def most_connections() -> int:
    """Connections that may be open: ``MAX_CONNECTIONS``, or fewer where the system allows fewer open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return min(MAX_CONNECTIONS, max(_FEWEST_CONNECTIONS, soft - _SPARE_DESCRIPTORS))


def raise_descriptor_limit() -> None:
    """As many open files as connections may need, as far as the system lets us."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_WANTED_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
