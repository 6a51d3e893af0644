"""From accepted jobs to an HTTP response: streamed or whole, ending early when the client leaves.

It knows the engine client and the two ways to answer; it does not know chat or completions fields.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from serve.api.errors import ApiError, invalid, unavailable
from serve.api.generation import EngineError, EngineFailed, Generation, QueueFull
from serve.api.metrics import RequestObserver
from serve.api.reply import Reply, ReplyHead, encode_reply
from serve.api.request_log import RequestRecord
from serve.api.schemas import GenerationRequest
from serve.api.sse import DONE, EventStream, frame, unless_disconnected
from serve.api.state import ServedModel, ServerState
from serve.protocol import Output, SamplingParams

RETRY_AFTER_SECONDS = "1"
MOST_SCORES_INLINE = 500
"""Log-probabilities of tokens, with all their alternatives, that become text without a thread of their own."""

T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """One prompt, and the parameters of each of its choices."""

    prompt_ids: list[int]
    choices: list[SamplingParams]


def open_generation(state: ServerState, field: str, count: int) -> Generation:
    """Take places for ``count`` choices before any work is done. ApiError 400 (can never fit), 429 or 503."""
    if count > state.engine.places:
        raise invalid(field, f"{count} choices asked, at most {state.engine.places} fit the queue of this server")
    try:
        return state.engine.open(count)
    except QueueFull as error:
        raise ApiError(429, str(error), code="queue_full", headers={"Retry-After": RETRY_AFTER_SECONDS}) from None
    except EngineError as error:
        raise unavailable(str(error)) from None


def reply_head(model: ServedModel, prefix: str) -> ReplyHead:
    return ReplyHead(
        id=f"{prefix}-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=model.name,
        system_fingerprint=model.fingerprint,
        block_length_max=model.block_length_max,
    )


async def respond(
    http: Request,
    state: ServerState,
    request: GenerationRequest,
    generation: Generation,
    jobs: list[Job],
    reply: Reply,
    reply_id: str,
    arrival: float,
) -> Response:
    """Run ``jobs`` and answer. The generation belongs to the response when this returns an EventStream."""
    flat = [(job.prompt_ids, params) for job in jobs for params in job.choices]
    metrics = RequestObserver(state.metrics, arrival, [len(ids) for ids, _ in flat], [params for _, params in flat])
    record = RequestRecord(
        reply_id, arrival, request.stream, len(flat), sum(len(job.prompt_ids) for job in jobs if job.choices)
    )
    http.scope["foretoken.record"] = record

    def observer(index: int, output: Output) -> None:
        metrics(index, output)
        record.take(output, of_first_choice=index % request.n == 0)

    state.metrics.observe("request_params_n", request.n)
    try:
        generation.start(reply_id, flat, cache_salt(http, request), observer)
    except EngineError as error:
        raise unavailable(str(error)) from None
    if request.stream:
        options = request.stream_options
        return EventStream(
            _events(
                generation,
                reply,
                include_usage=options is not None and options.include_usage,
                continuous_usage=options is not None and options.continuous_usage_stats,
            ),
            generation.close,
        )
    body = await unless_disconnected(http.receive, _collect(generation, reply))
    return Response(body, media_type="application/json")


def cache_salt(http: Request, request: GenerationRequest) -> str:
    """Prefix pages are shared only among requests of one API key that name the same salt."""
    return "/".join(part for part in (http.scope.get("foretoken.key", ""), request.cache_salt) if part)


async def _collect(generation: Generation, reply: Reply) -> bytes:
    try:
        while (event := await generation.next()) is not None:
            reply.take(*event)
    except EngineError as error:
        raise _failure(error) from None
    return await _rendered(reply.num_scores(), lambda: encode_reply(reply.body()))


async def _rendered(scores: int, render: Callable[[], T]) -> T:
    """What ``render`` makes of so many scores of tokens. Thousands take seconds, which others must not wait for."""
    return await asyncio.to_thread(render) if scores > MOST_SCORES_INLINE else render()


async def _events(
    generation: Generation, reply: Reply, *, include_usage: bool, continuous_usage: bool
) -> AsyncIterator[bytes]:
    try:
        while (event := await generation.next()) is not None:
            reply.take(*event)
            index = event[0]
            chunk = partial(reply.chunk, index, include_usage=include_usage, continuous_usage=continuous_usage)
            data = await _rendered(reply.num_scores(index), partial(_framed, chunk))
            if data is not None:
                yield data
    except EngineError as error:
        raise _failure(error) from None
    if include_usage:
        yield frame(reply.usage_chunk())
    yield DONE


def _framed(chunk: Callable[[], dict[str, Any] | None]) -> bytes | None:
    made = chunk()
    return None if made is None else frame(made)


def _failure(error: EngineError) -> ApiError:
    if isinstance(error, EngineFailed):
        return ApiError(500, f"the request failed in the engine: {error}", code="engine_error")
    return unavailable(str(error))
