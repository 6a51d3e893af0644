"""Request bodies: read up to a limit, then parsed as strict JSON.

Everything that makes a JSON body dangerous ends here with a 4xx: size, slowness, bad UTF-8, NaN, infinite and huge
numbers, deep nesting, lone surrogates; and with a 503 where others are sending too much already. Of a name that an
object has twice the last value counts, as with other servers. It does not know which fields a route has.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from serve.api.errors import ApiError, ClientGone, invalid, unavailable

READ_SECONDS = 60.0
MAX_NUMBER_CHARACTERS = 40
MAX_CONTAINERS = 100_000
"""Arrays and objects of a body. Millions of empty ones stop every other thread for seconds while they are made."""
_DISCARD_BYTES = 64 * 1024 * 1024
_DISCARD_SECONDS = 10.0
SMALL_BYTES = 64 * 1024
LARGE_BODIES = 16
"""The largest bodies that may be on their way at once."""
_LONG_DIGITS = b"0" * MAX_NUMBER_CHARACTERS
_AS_DIGITS = bytes.maketrans(b"123456789", b"0" * 9)
_STRING = re.compile(rb'"[^"]*"?')
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89abAB]|\\u[dD][cdefCDEF]")


T = TypeVar("T")


@dataclass
class Bodies:
    """The bounds on bodies: ``limit`` bytes of one, and ``total`` bytes of all that are being read or parsed.

    What is small always has room: clients who send much, or send it slowly, shut out nobody who sends little.
    """

    limit: int
    total: int
    held: int = 0

    @classmethod
    def up_to(cls, limit: int) -> Bodies:
        return cls(limit, LARGE_BODIES * limit)


class _Held:
    """What one body takes of the bytes of all."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._size = 0

    def grow(self, size: int) -> bool:
        """Take as much as a body of ``size`` bytes needs; False, and nothing taken, when there is no room."""
        more = max(0, size - SMALL_BYTES) - self._size
        if self._bodies.held + more > self._bodies.total:
            return False
        self._size += more
        self._bodies.held += more
        return True

    def release(self) -> None:
        self._bodies.held -= self._size
        self._size = 0


async def read_json(request: Request, bodies: Bodies, check: Callable[[dict[str, Any]], T]) -> T:
    """What ``check`` makes of the body, a JSON object; it runs in another thread when the body is large.

    Errors: 400 (not strict JSON, not an object, or ``check``'s own), 408, 413 (over the limit), 415, 503 (others send
    too much).
    """
    encodings = ",".join(request.headers.getlist("content-encoding")).lower().split(",")
    if {encoding.strip() for encoding in encodings} - {"", "identity"}:
        raise ApiError(415, "content-encoding: compressed bodies are not accepted, send plain JSON", "content-encoding")
    held = _Held(bodies)
    try:
        body = await asyncio.wait_for(_read(request, bodies.limit, held), READ_SECONDS)
        if len(body) <= SMALL_BYTES:
            return check(parse_object(body))
        # A megabyte of JSON takes tens of milliseconds, and so do a million token ids: off the event loop, where other
        # streams go on meanwhile.
        return await asyncio.to_thread(lambda: check(parse_object(body)))
    except asyncio.TimeoutError:
        raise ApiError(408, f"the body did not arrive within {READ_SECONDS:.0f} seconds") from None
    except ClientDisconnect:
        raise ClientGone from None
    finally:
        held.release()


async def _read(request: Request, limit: int, held: _Held) -> bytes:
    too_large = ApiError(413, f"the body is larger than the limit of {limit} bytes", code="body_too_large")
    declared = request.headers.get("content-length", "")
    refusal = too_large if declared.isdecimal() and len(declared) < 20 and int(declared) > limit else None
    chunks: list[bytes] = []
    size = 0
    started = time.monotonic()
    async for chunk in request.stream():
        size += len(chunk)
        if refusal is None and size > limit:
            refusal = too_large
        elif refusal is None and not held.grow(size):
            refusal = unavailable("more bytes of large bodies are on their way than this server holds at once")
        if refusal is None:
            chunks.append(chunk)
            continue
        chunks.clear()
        held.release()
        # Many clients only look for the answer once they have sent everything, so read on for a while, keeping nothing.
        if size > _DISCARD_BYTES or time.monotonic() - started > _DISCARD_SECONDS:
            break
    if refusal is not None:
        raise refusal
    return b"".join(chunks)


def parse_object(body: bytes) -> dict[str, Any]:
    """Strict JSON object from bytes; ApiError 400 says what is wrong, never quoting the body."""
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise invalid(None, f"the body is not valid UTF-8 (byte {error.start})", "invalid_json") from None
    if _brackets(body) > MAX_CONTAINERS and _brackets(_outside_strings(body)) > MAX_CONTAINERS:
        raise invalid(None, f"the body holds more than {MAX_CONTAINERS} arrays and objects", "invalid_json")
    try:
        # A call for every number is two thirds of the time that thousands of token ids take: none where none is long.
        integers = _bounded if _LONG_DIGITS in body.translate(_AS_DIGITS) else None
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite, parse_int=integers)
    except RecursionError:
        raise invalid(None, "the body nests arrays or objects too deeply", "invalid_json") from None
    except json.JSONDecodeError as error:
        raise invalid(
            None, f"the body is not valid JSON: {error.msg} at character {error.pos}", "invalid_json"
        ) from None
    if not isinstance(value, dict):
        raise invalid(None, "the body must be a JSON object", "invalid_json")
    if _SURROGATE_ESCAPE.search(body):
        _refuse_lone_surrogates(value)
    return value


def _brackets(body: bytes) -> int:
    return body.count(b"[") + body.count(b"{")


def _outside_strings(body: bytes) -> bytes:
    """``body`` without its strings, in time that only grows with its length, whatever quotes and escapes are in it."""
    return _STRING.sub(b"", body.replace(b"\\\\", b"").replace(b'\\"', b""))


def _refuse_constant(name: str) -> Any:
    raise invalid(None, f"the body holds {name}, which is not a JSON number", "invalid_json")


def _finite(digits: str) -> float:
    value = float(digits) if len(digits) <= 1024 else math.inf
    if not math.isfinite(value):
        raise invalid(None, "the body holds a number too large for a double", "invalid_json")
    return value


def _bounded(digits: str) -> int:
    if len(digits) > MAX_NUMBER_CHARACTERS:
        raise invalid(None, f"the body holds an integer of more than {MAX_NUMBER_CHARACTERS} digits", "invalid_json")
    return int(digits)


def _refuse_lone_surrogates(value: Any) -> None:
    """A ``\\ud83d`` without its other half is no character and has no UTF-8; no tokenizer or reply could carry it."""
    todo: list[Any] = [value]
    while todo:
        item = todo.pop()
        if isinstance(item, dict):
            todo.extend(item.keys())
            todo.extend(item.values())
        elif isinstance(item, list):
            todo.extend(item)
        elif isinstance(item, str):
            try:
                item.encode("utf-8")
            except UnicodeEncodeError:
                raise invalid(None, "the body holds a lone surrogate (half a \\u pair)", "invalid_json") from None
