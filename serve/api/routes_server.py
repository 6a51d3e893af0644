"""Routes about the server itself: health, models, version, metrics, tokens, and the prefix cache of a test server."""

from __future__ import annotations

import ipaddress
from typing import Any
from urllib.parse import urlsplit

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.responses import Response

from serve import __version__
from serve.api.body import read_json
from serve.api.errors import ApiError, invalid, unavailable
from serve.api.generation import EngineError
from serve.api.metrics import metrics_page
from serve.api.openapi import BODY_REFUSALS, MODEL, MODELS, STATUS, TEXT, TOKENS, VERSION, body_schema, responses
from serve.api.prometheus import CONTENT_TYPE
from serve.api.schemas import DetokenizeRequest, TokenizeRequest, parse
from serve.api.sse import unless_disconnected
from serve.api.state import ServerState
from serve.api.unsupported import refuse_unsupported_chat
from serve.config import readable_path

router = APIRouter()
dev_router = APIRouter()

_FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip")


@router.head("/health", include_in_schema=False)
@router.get("/health", responses=responses(STATUS, (503,)))
async def health(http: Request) -> Response:
    """200 when a request would be answered, 503 with the reason when not."""
    state: ServerState = http.app.state.server
    reason = state.unavailable_reason()
    if reason is not None:
        raise unavailable(reason)
    return JSONResponse({"status": "ok"})


@router.head("/v1/models", include_in_schema=False)
@router.get("/v1/models", responses=responses(MODELS, (401, 503)))
async def models(http: Request) -> Response:
    """The one model, in OpenAI's list; ``root`` is its folder, ``max_model_len`` the context limit in tokens."""
    state: ServerState = http.app.state.server
    return JSONResponse({"object": "list", "data": [_model_entry(state)]})


@router.head("/v1/models/{name:path}", include_in_schema=False)
@router.get("/v1/models/{name:path}", responses=responses(MODEL, ("4XX", 503)))
async def model(http: Request, name: str) -> Response:
    """One entry of the list, or 404."""
    state: ServerState = http.app.state.server
    state.ready_model(name)
    return JSONResponse(_model_entry(state))


def _model_entry(state: ServerState) -> dict[str, object]:
    served = state.ready_model(None)
    return {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "foretoken",
        "root": readable_path(state.config.model_dir),
        "parent": None,
        "max_model_len": served.limits.context,
    }


@router.head("/version", include_in_schema=False)
@router.get("/version", responses=responses(VERSION, (401,)))
async def version(http: Request) -> Response:
    """The server's version and what the engine said about itself."""
    state: ServerState = http.app.state.server
    return JSONResponse({"version": __version__, "engine": state.engine.info})


@router.head("/metrics", include_in_schema=False)
@router.get("/metrics", response_class=PlainTextResponse, responses=responses(None, (401,), media="text/plain"))
async def metrics(http: Request) -> Response:
    """Prometheus text."""
    state: ServerState = http.app.state.server
    engine = state.engine
    page = metrics_page(
        state.model_name,
        {**engine.info, "prefix_cache": state.config.prefix_cache},
        engine.stats,
        state.metrics,
        rejected=engine.rejected,
        restarts=max(0, engine.starts - 1),
        up=state.unavailable_reason() is None,
    )
    return Response(page, headers={"content-type": CONTENT_TYPE})


@router.post("/tokenize", openapi_extra=body_schema(TokenizeRequest), responses=responses(TOKENS, BODY_REFUSALS))
async def tokenize(http: Request) -> Response:
    """Token ids of a prompt, or of messages as chat completions would see them."""
    state: ServerState = http.app.state.server
    request = await read_json(http, state.bodies, _read_tokenize)
    served = state.ready_model(request.model)
    context = served.limits.context
    if (request.prompt is None) == (request.messages is None):
        raise invalid("prompt", "exactly one of prompt and messages is needed")
    if request.messages is not None:
        served.text.refuse_settings(request.chat_template_kwargs)
        encoding = served.text.encode_chat(request.messages, context)
    else:
        special = request.add_special_tokens
        encoding = served.text.encode(request.prompt or "", context, add_special_tokens=special, field="prompt")
    ids = await unless_disconnected(http.receive, encoding)
    return JSONResponse({"count": len(ids), "max_model_len": context, "tokens": ids})


def _read_tokenize(body: dict[str, Any]) -> TokenizeRequest:
    if body.get("messages") is not None:
        refuse_unsupported_chat(body)
    return parse(TokenizeRequest, body)


@router.post("/detokenize", openapi_extra=body_schema(DetokenizeRequest), responses=responses(TEXT, BODY_REFUSALS))
async def detokenize(http: Request) -> Response:
    """The text of token ids, special tokens included."""
    state: ServerState = http.app.state.server
    request = await read_json(http, state.bodies, lambda body: parse(DetokenizeRequest, body))
    served = state.ready_model(request.model)
    served.limits.check_ids("tokens", request.tokens)
    return JSONResponse({"prompt": await served.text.decode(request.tokens, skip_special_tokens=False)})


@dev_router.post("/reset_prefix_cache")
async def reset_prefix_cache(http: Request) -> Response:
    """Forget every cached prefix; only for clients on this machine."""
    state: ServerState = http.app.state.server
    if not _is_loopback(http):
        raise ApiError(403, "only clients on this machine may do this", code="loopback_only")
    try:
        state.engine.reset_prefix_cache()
    except EngineError as error:
        raise unavailable(str(error)) from None
    return JSONResponse({"status": "ok"})


def _is_loopback(http: Request) -> bool:
    """Whether the client itself, not a proxy in front of it or a foreign page in its browser, is on this machine."""
    if http.client is None or any(name in http.headers for name in _FORWARDED):
        return False
    try:
        asked = urlsplit("//" + http.headers.get("host", "")).hostname
        origin = urlsplit(http.headers.get("origin", "http://localhost")).hostname
    except ValueError:
        return False
    return all(_is_here(name) for name in (http.client.host, asked, origin))


def _is_here(name: str | None) -> bool:
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name or "").is_loopback
    except ValueError:
        return False
