"""The words that travel between the API process and the engine process.

One pipe (a socket pair), length-prefixed JSON objects, never pickle. This file defines what the objects mean; it does
not know HTTP, tensors or how either side schedules its work.

API -> engine, by ``type``:
    config     {"config": str}                                  first and once: ServeConfig.to_json()
    generate   {"id", "prompt_ids", "params", "cache_salt"}    pack_ids(ids), SamplingParams.to_json()
    cancel     {"id"}
    reset_prefix_cache {}
    shutdown   {}                                               finish nothing more, exit 0
engine -> API, by ``type``:
    ready      {"info": {...}, "stats": {...}}                  once; facts for the ready line, /version and metrics
    outputs    {"items": [Output.to_json(), ...], "stats": {...}}    stats: at a request's end, else now and then
    stats      {"stats": {...}}                                 heartbeat once a second, until a step counts as hung
    fatal      {"error": str}                                   the engine is about to exit

Each frame is a 4-byte big-endian length and that many bytes of UTF-8 JSON. A closed pipe means the other side is gone.
"""

from __future__ import annotations

import base64
import json
import struct
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

HEADER = struct.Struct(">I")
STEP_TOKEN_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
MAX_FRAME_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True)
class SamplingParams:
    """How one request wants its tokens chosen and where it ends. Already validated by the API.

    ``temperature == 0`` is greedy. ``top_k == 0`` and ``top_p == 1`` and ``min_p == 0`` switch that filter off.
    ``seed`` is always set (the API draws one when the client gave none); token t is drawn with the counter-based
    generator keyed by (seed, absolute position of t), so the draw does not depend on batch or block length.
    ``logprobs``: number of top alternatives to report per generated token (0 = only the chosen one), None = off.
    ``prompt_logprobs``: the same for prompt tokens (completions with ``echo``), None = off.
    ``speculation`` False decodes this request without drafts; ``provenance`` asks for ``Output.round`` and ``pieces``.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    speculation: bool = True
    provenance: bool = False

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))  # shallow: nothing in it changes

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> SamplingParams:
        data = dict(data)
        data["stop"] = tuple(data.get("stop", ()))
        data["stop_token_ids"] = tuple(data.get("stop_token_ids", ()))
        data["logit_bias"] = tuple((int(i), float(b)) for i, b in data.get("logit_bias", ()))
        return cls(**data)


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of one token under the target (log-softmax of the raw logits), with the top alternatives."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()

    @classmethod
    def from_json(cls, data: list[Any]) -> TokenLogprob:
        token_id, logprob, top = data
        return cls(int(token_id), float(logprob), tuple((int(i), float(p)) for i, p in top))

    def to_json(self) -> list[Any]:
        return [self.token_id, self.logprob, [list(pair) for pair in self.top]]


@dataclass(frozen=True)
class Output:
    """What one step adds to one request.

    ``text`` is safe to send at once: whole UTF-8, nothing that could still become a stop string.
    ``token_ids`` are the tokens committed in this step, trimmed at the end of the request. ``sources`` says where each
    came from: "target", "block" (accepted from the block drafter) or "lookup" (accepted from prompt lookup).
    ``finish_reason`` is None until the last item of a request: "stop", "length", "cancelled" or "error".
    ``stop_reason`` is the stop string or stop token id that ended it, None for an end token or another reason.
    ``final`` (on the last item) holds prompt_tokens, cached_tokens, completion_tokens, queue_seconds, prefill_seconds,
    decode_seconds and speculation (per round drafted and accepted counts).
    Only where provenance was asked for: ``round`` is (proposer or "", drafted, accepted) of the decoding round behind
    the tokens, None when they came out of a prompt pass; ``pieces`` are the parts of ``text`` by token, "" for a token
    whose text is still to come (half a character, what may become a stop string) or never shows (an end token).
    """

    id: str
    text: str = ""
    token_ids: tuple[int, ...] = ()
    sources: tuple[str, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    final: dict[str, Any] | None = None
    round: tuple[str, int, int] | None = None
    pieces: tuple[str, ...] | None = None

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {"id": self.id, "text": self.text, "token_ids": list(self.token_ids)}
        if self.sources:
            data["sources"] = list(self.sources)
        if self.logprobs is not None:
            data["logprobs"] = [entry.to_json() for entry in self.logprobs]
        if self.prompt_logprobs is not None:
            data["prompt_logprobs"] = [entry and entry.to_json() for entry in self.prompt_logprobs]
        for name in ("finish_reason", "stop_reason", "error", "final", "round", "pieces"):
            value = getattr(self, name)
            if value is not None:
                data[name] = value
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Output:
        data = dict(data)
        data["token_ids"] = tuple(data.get("token_ids", ()))
        data["sources"] = tuple(data.get("sources", ()))
        for name in ("round", "pieces"):
            if data.get(name) is not None:
                data[name] = tuple(data[name])
        if data.get("logprobs") is not None:
            data["logprobs"] = tuple(TokenLogprob.from_json(entry) for entry in data["logprobs"])
        if data.get("prompt_logprobs") is not None:
            data["prompt_logprobs"] = tuple(
                None if entry is None else TokenLogprob.from_json(entry) for entry in data["prompt_logprobs"]
            )
        return cls(**data)


@dataclass(frozen=True)
class EngineStats:
    """Gauges and cumulative counters of the engine, as sent with every ``outputs`` and ``stats`` message.

    Gauges: running, waiting (requests), kv_pages_total, kv_pages_free (free or only held by the prefix cache).
    Counters since start: everything else. ``accepted_per_position[i]`` counts rounds whose draft position i was kept.
    ``steps_by_tokens[i]`` counts steps of at most ``STEP_TOKEN_BOUNDS[i]`` token rows, the last one larger steps.
    """

    running: int = 0
    waiting: int = 0
    kv_pages_total: int = 0
    kv_pages_free: int = 0
    steps: int = 0
    step_tokens: int = 0
    steps_by_tokens: tuple[int, ...] = ()
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()
    block_lengths: dict[str, int] = field(default_factory=dict)
    drafter_faults: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))  # shallow: this is made once a step

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> EngineStats:
        data = dict(data)
        for name in ("accepted_per_position", "steps_by_tokens"):
            data[name] = tuple(data.get(name, ()))
        return cls(**data)


def pack_ids(ids: Sequence[int]) -> str:
    """Token ids (below 2 ** 31) as text: base64 of little-endian 32-bit numbers. As JSON numbers, thousands of them
    cost each side three times as long. OverflowError for a larger one."""
    packed = array("i", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return base64.b64encode(packed).decode("ascii")


def unpack_ids(packed: str) -> array[int]:
    """The ids of ``pack_ids``. ValueError for what is no such text."""
    ids = array("i", base64.b64decode(packed, validate=True))
    if sys.byteorder == "big":
        ids.byteswap()
    return ids


def encode_frame(message: dict[str, Any]) -> bytes:
    """One message as bytes for the pipe. NaN and infinities are refused (ValueError): they are not JSON."""
    body = json.dumps(message, separators=(",", ":"), allow_nan=False).encode("utf-8")
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"message of {len(body)} bytes exceeds the {MAX_FRAME_BYTES} byte frame limit")
    return HEADER.pack(len(body)) + body


class FrameDecoder:
    """Bytes in, whole messages out; keeps what is left of an unfinished frame."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        self._buffer += data
        while len(self._buffer) >= HEADER.size:
            (length,) = HEADER.unpack_from(self._buffer)
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"frame of {length} bytes exceeds the {MAX_FRAME_BYTES} byte limit")
            end = HEADER.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[HEADER.size : end])
            del self._buffer[:end]
            yield json.loads(body)
