"""The measuring client: one streamed chat request, timed at the arrival of every server-sent event.

Needs httpx and tokenizers only, so it imports in the grading image. Tokens are counted by tokenising the returned text
again; the server's ``usage`` is kept as a cross-check. It knows no scenario, no load pattern and no server internals.

Names: ``ttft`` is send -> first chunk with text (empty role chunks do not count). ``tpot`` is (last - first chunk) /
(tokens - 1). ``icl`` are the gaps between chunks with text. ``itl_amortised`` is each gap divided by the tokens of the
chunk that ended it. "ITL" alone is never printed: tools disagree on what it means.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import httpx
from tokenizers import Tokenizer

STEP_SECONDS = 0.25e-3
"""Less than a decode step of any served model takes; chunks held back by Nagle came 0.02 to 0.04 ms apart."""
TOKEN_SECONDS = 60e-6
"""Less than a token of one stream takes with drafts: sixteen of them every millisecond."""
BLOCK_TOKENS = 32
"""More than a step gives, drafts included."""


class TokenCounter(Protocol):
    """Counts the tokens of a text, and where in the text (character offset) each of them ends."""

    def ends(self, text: str) -> Sequence[int]: ...


class TokenizerCounter:
    """Counts with the model's own ``tokenizer.json``, special tokens not added."""

    def __init__(self, model_dir: str | Path) -> None:
        path = Path(model_dir) / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"no tokenizer.json in {model_dir}: the client counts tokens with it")
        self._tokenizer: Any = Tokenizer.from_file(str(path))

    def ends(self, text: str) -> Sequence[int]:
        return [end for _, end in self._tokenizer.encode(text, add_special_tokens=False).offsets]

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))


@dataclass(frozen=True)
class ChatRequest:
    """One request to send. ``options`` are further body fields (top_p, ignore_eos, ...), ``category`` a label."""

    messages: tuple[dict[str, str], ...]
    max_tokens: int
    temperature: float = 0.0
    options: tuple[tuple[str, Any], ...] = ()
    category: str = ""

    def body(self, model: str) -> dict[str, Any]:
        return {
            "model": model,
            "messages": list(self.messages),
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **dict(self.options),
        }


def user_request(prompt: str, max_tokens: int, **fields: Any) -> ChatRequest:
    """A chat of one user turn."""
    return ChatRequest(({"role": "user", "content": prompt},), max_tokens, **fields)


@dataclass(frozen=True)
class Record:
    """What came back, as it came. Times are seconds of ``time.perf_counter``; ``events`` are (arrival, data) pairs.

    ``planned_at`` is when the load pattern wanted the request to start; ``sent_at`` when it really was sent.
    """

    request: ChatRequest
    planned_at: float
    sent_at: float
    finished_at: float
    events: tuple[tuple[float, str], ...] = ()
    status: int | None = None
    error: str | None = None


@dataclass(frozen=True)
class Measurement:
    """One request in numbers (seconds, tokens). ``outcome`` is "ok", "empty" (no text at all) or "error".

    Latencies are None unless they exist: an error or an empty answer never becomes a latency of zero.
    ``token_times`` is the arrival of each token. ``latency`` runs from the send,
    ``latency_from_plan`` from the planned start (so waiting in the client shows).
    """

    outcome: str
    text: str = ""
    tokens: int = 0
    usage_tokens: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    client_wait: float = 0.0
    sent_at: float = 0.0
    finished_at: float = 0.0
    ttft: float | None = None
    tpot: float | None = None
    latency: float | None = None
    latency_from_plan: float | None = None
    icl: tuple[float, ...] = ()
    itl_amortised: tuple[float, ...] = ()
    token_times: tuple[float, ...] = ()
    speculation: dict[str, Any] = field(default_factory=dict)
    category: str = ""
    error: str | None = None


async def send(client: httpx.AsyncClient, model: str, request: ChatRequest, planned_at: float | None = None) -> Record:
    """Sends one request and stamps every event as its bytes arrive; parsing waits until the stream is over.

    Never raises for what the server or the network does: that is in ``error``.
    """
    body = request.body(model)
    events: list[tuple[float, str]] = []
    splitter = EventSplitter()
    status: int | None = None
    error: str | None = None
    # Making the request and finding a connection are the client's own work, in which requests of one moment wait for
    # each other: the clock starts where the first byte is written.
    prepared = client.build_request("POST", "/v1/chat/completions", json=body)
    began = time.perf_counter()
    written: list[float] = []

    async def note(event: str, info: object) -> None:
        if event.endswith("send_request_headers.started"):
            written.append(time.perf_counter())

    prepared.extensions["trace"] = note
    try:
        response = await client.send(prepared, stream=True)
        async with aclosing(response):
            status = response.status_code
            if status != 200:
                detail = (await response.aread()).decode("utf-8", "replace")
                error = f"HTTP {status}: {detail[:300]}"
            else:
                async for part in response.aiter_bytes():
                    arrival = time.perf_counter()
                    events.extend((arrival, data) for data in splitter.feed(part))
                if not any(data == "[DONE]" for _, data in events[-2:]):
                    error = "stream ended without [DONE]"
    except httpx.HTTPError as fault:
        error = f"{type(fault).__name__}: {fault}"
    sent_at = written[0] if written else began
    planned = began if planned_at is None else planned_at
    return Record(request, planned, sent_at, time.perf_counter(), tuple(events), status, error)


class EventSplitter:
    """Bytes in, the ``data`` of whole server-sent events out (fields other than ``data`` are not needed here)."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []

    def feed(self, part: bytes) -> list[str]:
        events: list[str] = []
        *lines, self._rest = (self._rest + part).split(b"\n")
        for line in lines:
            line = line.rstrip(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].lstrip(b" ").decode("utf-8", "replace"))
            elif not line and self._data:
                events.append("\n".join(self._data))
                self._data = []
        return events


def measure(record: Record, counter: TokenCounter) -> Measurement:
    """Turns what arrived into numbers. Tokens are those of the returned text, split over chunks by where they end."""
    pieces: list[tuple[float, str]] = []
    usage: dict[str, Any] = {}
    speculation: dict[str, Any] = {}
    finish_reason: str | None = None
    told: str | None = None
    for arrival, data in record.events:
        if data == "[DONE]":
            continue
        try:
            chunk = json.loads(data)
        except ValueError:
            told = told or f"event is not JSON: {data[:100]!r}"
            continue
        if not isinstance(chunk, dict):
            told = told or f"event is no JSON object: {data[:100]!r}"
            continue
        if chunk.get("error"):
            told = told or f"error frame: {str(chunk['error'])[:300]}"
        usage = chunk.get("usage") or usage
        speculation = (chunk.get("metrics") or {}).get("speculative_decoding") or speculation
        for choice in chunk.get("choices") or ():
            finish_reason = choice.get("finish_reason") or finish_reason
            piece = (choice.get("delta") or {}).get("content")
            if piece:
                pieces.append((arrival, piece))
    # A stream that fails has no [DONE] either; what its server said of the reason is worth more than that.
    error = told or record.error
    text = "".join(piece for _, piece in pieces)
    details = usage.get("prompt_tokens_details") or {}
    common: dict[str, Any] = {
        "text": text,
        "usage_tokens": usage.get("completion_tokens"),
        "prompt_tokens": usage.get("prompt_tokens"),
        "cached_tokens": details.get("cached_tokens"),
        "finish_reason": finish_reason,
        "client_wait": record.sent_at - record.planned_at,
        "sent_at": record.sent_at,
        "finished_at": record.finished_at,
        "speculation": speculation,
        "category": record.request.category,
    }
    if error is not None:
        return Measurement("error", error=error, **common)
    if not pieces:
        return Measurement("empty", **common)
    ends = counter.ends(text)
    first, last = pieces[0][0], pieces[-1][0]
    gaps, amortised, times = _gaps(pieces, ends)
    return Measurement(
        "ok",
        tokens=len(ends),
        ttft=first - record.sent_at,
        tpot=(last - first) / (len(ends) - 1) if len(ends) > 1 and len(pieces) > 1 else None,
        latency=record.finished_at - record.sent_at,
        latency_from_plan=record.finished_at - record.planned_at,
        icl=gaps,
        itl_amortised=amortised,
        token_times=times,
        **common,
    )


def bursts(item: Measurement) -> int:
    """In how many bursts the text came: chunks with less than ``STEP_SECONDS`` between them are one."""
    return 1 + sum(gap >= STEP_SECONDS for gap in item.icl)


def was_buffered(item: Measurement) -> bool:
    """Whether the answer was held back on its way, so that its ``tpot`` and gaps say nothing of the server.

    More tokens came at a time than any block of drafts holds, or faster than any server gives them. Drafts that are
    sent as several tokens an event, or as several events at once, are neither; an answer that one block could hold is
    never judged.
    """
    if item.outcome != "ok" or item.tokens <= BLOCK_TOKENS:
        return False
    if item.tokens > BLOCK_TOKENS * bursts(item):
        return True
    return item.tpot is not None and item.tpot < TOKEN_SECONDS


def _gaps(
    pieces: list[tuple[float, str]], ends: Sequence[int]
) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
    """Chunk gaps; per token its share of the gap before its chunk; per token its arrival (its chunk's)."""
    gaps: list[float] = []
    amortised: list[float] = []
    times: list[float] = []
    position, token, waiting = 0, 0, 0.0
    for index, (arrival, piece) in enumerate(pieces):
        position += len(piece)
        start = token
        while token < len(ends) and ends[token] <= position:
            token += 1
            times.append(arrival)
        if index:
            gap = arrival - pieces[index - 1][0]
            gaps.append(gap)
            # A chunk may hold only the beginning of a token: its gap goes to the chunk in which that token ends.
            waiting += gap
            if token > start:
                amortised.extend([waiting / (token - start)] * (token - start))
                waiting = 0.0
    return tuple(gaps), tuple(amortised), tuple(times)


def open_client(url: str, timeout: float | None = 600.0, connections: int = 512) -> httpx.AsyncClient:
    """An httpx client for one server that never waits in its own pool; ``timeout`` is the longest silence, seconds."""
    limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
    return httpx.AsyncClient(base_url=url.rstrip("/"), timeout=timeout, limits=limits, trust_env=False)


async def served_model(client: httpx.AsyncClient) -> str:
    """The id of the model the server offers, from /v1/models; ConnectionError where no server offers any."""
    try:
        response = await client.get("/v1/models")
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as fault:
        raise ConnectionError(f"no model at {client.base_url}/v1/models: {type(fault).__name__}: {fault}") from fault


async def reset_prefix_cache(client: httpx.AsyncClient) -> bool:
    """Asks the server to forget its prefix cache; False where it has no such route."""
    try:
        return (await client.post("/reset_prefix_cache")).status_code == 200
    except httpx.HTTPError:
        return False
