"""POST /v1/chat/completions and /v1/completions: from a body to jobs for the engine and the reply's shape."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from serve.api.body import read_json
from serve.api.chat_reply import ChatReply
from serve.api.completion_reply import CompletionReply, EchoedPrompt
from serve.api.generate import Job, open_generation, reply_head, respond
from serve.api.openapi import (
    CHAT_CHUNK,
    CHAT_REPLY,
    COMPLETION_CHUNK,
    COMPLETION_REPLY,
    GENERATION_REFUSALS,
    body_schema,
    responses,
)
from serve.api.sampling import check_request, sampling_params
from serve.api.schemas import ChatRequest, CompletionRequest, Prompt, parse
from serve.api.sse import EventStream, unless_disconnected
from serve.api.state import ServedModel, ServerState
from serve.api.unsupported import refuse_unsupported_chat, refuse_unsupported_completion

router = APIRouter(prefix="/v1")


@router.post(
    "/chat/completions",
    openapi_extra=body_schema(ChatRequest),
    responses=responses(CHAT_REPLY, GENERATION_REFUSALS, chunk=CHAT_CHUNK),
)
async def chat_completions(http: Request) -> Response:
    """Answer a conversation."""
    arrival = time.monotonic()
    state: ServerState = http.app.state.server
    request = await read_json(http, state.bodies, _read_chat)
    model = state.ready_model(request.model)
    check_request(request, model.limits)
    generation = open_generation(state, "n", request.n)
    response: Response | None = None
    try:
        model.text.refuse_settings(request.chat_template_kwargs)
        encoding = model.text.encode_chat(request.messages, model.limits.context)
        ids = await unless_disconnected(http.receive, encoding)
        params = sampling_params(request, model.defaults, model.limits, "messages", len(ids))
        head = reply_head(model, "chatcmpl")
        top = (request.top_logprobs or 0) if request.logprobs else None
        reply = ChatReply(head, model.text.tokenizer, [len(ids)], request.n, top)
        if request.return_token_ids:
            reply.show_token_ids([ids])
        response = await respond(http, state, request, generation, [Job(ids, params)], reply, head.id, arrival)
        return response
    finally:
        if not isinstance(response, EventStream):
            generation.close()


@router.post(
    "/completions",
    openapi_extra=body_schema(CompletionRequest),
    responses=responses(COMPLETION_REPLY, GENERATION_REFUSALS, chunk=COMPLETION_CHUNK),
)
async def completions(http: Request) -> Response:
    """Continue each prompt."""
    arrival = time.monotonic()
    state: ServerState = http.app.state.server
    request = await read_json(http, state.bodies, _read_completion)
    model = state.ready_model(request.model)
    check_request(request, model.limits)
    generation = open_generation(state, "prompt", len(request.prompt) * request.n)
    response: Response | None = None
    try:
        prompts = _given_prompts(model, request)
        if prompts is None:
            prompts = await unless_disconnected(http.receive, _encode_prompts(model, request))
        jobs = [
            Job(prompt.ids, sampling_params(request, model.defaults, model.limits, _field(request, i), len(prompt.ids)))
            for i, prompt in enumerate(prompts)
        ]
        head = reply_head(model, "cmpl")
        reply = CompletionReply(
            head,
            model.text.tokenizer,
            prompts,
            request.n,
            request.logprobs,
            echo=request.echo,
            discard=request.max_tokens == 0 and request.max_completion_tokens is None,
        )
        if request.return_token_ids:
            reply.show_token_ids([prompt.ids for prompt in prompts])
        response = await respond(http, state, request, generation, jobs, reply, head.id, arrival)
        return response
    finally:
        if not isinstance(response, EventStream):
            generation.close()


def _read_chat(body: dict[str, Any]) -> ChatRequest:
    refuse_unsupported_chat(body)
    return parse(ChatRequest, body)


def _read_completion(body: dict[str, Any]) -> CompletionRequest:
    refuse_unsupported_completion(body)
    return parse(CompletionRequest, body)


def _field(request: CompletionRequest, index: int) -> str:
    return "prompt" if len(request.prompt) == 1 else f"prompt[{index}]"


def _given_prompts(model: ServedModel, request: CompletionRequest) -> list[EchoedPrompt] | None:
    """Prompts that are token ids already, or None. There is nothing to wait for then: of many requests at once, the
    first would wait until the last has come as far."""
    found = []
    for index, prompt in enumerate(request.prompt):
        if request.echo or isinstance(prompt, str):
            return None
        _check_ids(model, prompt, _field(request, index))
        found.append(EchoedPrompt("", prompt))
    return found


def _check_ids(model: ServedModel, ids: list[int], field: str) -> None:
    model.limits.room(field, len(ids))
    model.limits.check_ids(field, ids)


async def _encode_prompts(model: ServedModel, request: CompletionRequest) -> list[EchoedPrompt]:
    return [await _encode_prompt(model, request, prompt, _field(request, i)) for i, prompt in enumerate(request.prompt)]


async def _encode_prompt(model: ServedModel, request: CompletionRequest, prompt: Prompt, field: str) -> EchoedPrompt:
    if isinstance(prompt, str):
        ids = await model.text.encode(
            prompt, model.limits.context, add_special_tokens=request.add_special_tokens, field=field
        )
        model.limits.room(field, len(ids))
        return EchoedPrompt(prompt, ids)
    _check_ids(model, prompt, field)
    text = await model.text.decode(prompt, skip_special_tokens=False) if request.echo else ""
    return EchoedPrompt(text, prompt)
