"""What /openapi.json says beyond what the framework can see: bodies are parsed by hand and replies built by hand.

``body_schema`` documents what a route reads, ``responses`` which statuses it answers with and what each holds. It does
not know how a route works.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}


def obj(required: dict[str, Schema], **optional: Schema) -> Schema:
    """An object with these fields; others may follow in later versions."""
    return {"type": "object", "required": list(required), "properties": {**required, **optional}}


def or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def array(items: Schema, **bounds: int) -> Schema:
    return {"type": "array", "items": items, **bounds}


ERROR = obj(
    {
        "error": obj(
            {"message": {**_TEXT, "minLength": 1}, "type": _TEXT, "param": or_null(_TEXT), "code": or_null(_TEXT)}
        )
    }
)
_REFUSALS: dict[int | str, str] = {
    400: "A field is wrong; the message names it and its limit",
    401: "An API key is needed",
    404: "Another model is served",
    408: "The body did not arrive in time",
    413: "The body is larger than --max-body-bytes",
    415: "The body is compressed",
    429: "The queue is full; see Retry-After",
    431: "The request line and headers are too large",
    500: "The request failed in the engine",
    503: "Loading, shutting down, or the engine is not available; see Retry-After",
    "4XX": "No such model, or no API key",
}
_EVERY_ROUTE = (431,)
"""Answered before any route is looked at."""
_READS_BODY: tuple[int | str, ...] = (400, 401, 404, 408, 413, 415, 503)


def responses(
    ok: Schema | None, refusals: tuple[int | str, ...], *, chunk: Schema | None = None, media: str | None = None
) -> Any:
    """``responses`` of a route: a 200 with ``ok`` as JSON (or ``media`` as text), and error objects.

    ``chunk``: the 200 may also be server-sent events, each with such an object, an error object or ``[DONE]``. Before
    OpenAPI 3.2 the schema of an event stream is read as that of each event.
    """
    content: dict[str, Any] = {media or "application/json": {"schema": ok or _TEXT}}
    if chunk is not None:
        content["text/event-stream"] = {"schema": _event(chunk)}
    found: dict[int | str, Any] = {200: {"description": "The answer", "content": content}}
    for status in (*refusals, *_EVERY_ROUTE):
        retry = {"Retry-After": {"schema": _TEXT}} if status in (429, 503) else {}
        found[status] = {
            "description": _REFUSALS[status],
            "content": {"application/json": {"schema": ERROR}},
            **({"headers": retry} if retry else {}),
        }
    return found


def _event(chunk: Schema) -> Schema:
    payload = {"anyOf": [chunk, ERROR]}
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": payload}
    return obj({"data": {"anyOf": [{"const": "[DONE]"}, data]}})


_USAGE = obj(
    {
        "prompt_tokens": _COUNT,
        "completion_tokens": _COUNT,
        "total_tokens": _COUNT,
        "prompt_tokens_details": obj({"cached_tokens": _COUNT}),
    }
)
_FINISH: Schema = {"enum": ["stop", "length"]}
_STOP_REASON: Schema = {"type": ["string", "integer", "null"]}
_NUMBER: Schema = {"type": "number", "maximum": 0}
_TOKEN = {"token": _TEXT, "logprob": _NUMBER, "bytes": array({"type": "integer", "minimum": 0, "maximum": 255})}


_IDS: dict[str, Schema] = {"token_ids": array(_COUNT), "prompt_token_ids": array(_COUNT)}


def _envelope(kind: str, choices: Schema) -> dict[str, Schema]:
    return {
        "id": _TEXT,
        "object": {"const": kind},
        "created": _COUNT,
        "model": _TEXT,
        "system_fingerprint": _TEXT,
        "choices": choices,
    }


_BESIDE: dict[str, Schema] = {
    "metrics": obj({"speculative_decoding": {"type": "object"}}),
    "prompt_token_ids": array(_COUNT),
}


def _reply(kind: str, choice: dict[str, Schema]) -> Schema:
    common = {"index": _COUNT, "finish_reason": _FINISH, "stop_reason": _STOP_REASON}
    choices = array(obj({**common, **choice}, **_IDS), minItems=1)
    return obj({**_envelope(kind, choices), "usage": _USAGE}, **_BESIDE)


def _chunk(kind: str, choice: dict[str, Schema]) -> Schema:
    """One choice, or none beside the usage at the end."""
    common = {"index": _COUNT, "finish_reason": or_null(_FINISH)}
    beside = {"stop_reason": _STOP_REASON, "provenance": array({"type": "object"}), **_IDS}
    choices = array(obj({**common, **choice}, **beside), maxItems=1)
    return obj(_envelope(kind, choices), usage=or_null(_USAGE), **_BESIDE)


_CHAT_LOGPROBS = or_null(obj({"content": array(obj({**_TOKEN, "top_logprobs": array(obj(_TOKEN), maxItems=20)}))}))
CHAT_REPLY = _reply(
    "chat.completion",
    {"message": obj({"role": {"const": "assistant"}, "content": _TEXT}), "logprobs": _CHAT_LOGPROBS},
)
CHAT_CHUNK = _chunk(
    "chat.completion.chunk",
    {"delta": obj({"content": _TEXT}, role={"const": "assistant"}), "logprobs": _CHAT_LOGPROBS},
)
_NUMBER_OR_NULL: Schema = {"type": ["number", "null"]}
_TEXT_LOGPROBS = or_null(
    obj(
        {
            "tokens": array(_TEXT),
            "token_logprobs": array(_NUMBER_OR_NULL),
            "top_logprobs": array(or_null({"type": "object", "additionalProperties": _NUMBER})),
            "text_offset": array(_COUNT),
        }
    )
)
COMPLETION_REPLY = _reply("text_completion", {"text": _TEXT, "logprobs": _TEXT_LOGPROBS})
COMPLETION_CHUNK = _chunk("text_completion", {"text": _TEXT, "logprobs": _TEXT_LOGPROBS})
MODEL = obj({"id": _TEXT, "object": {"const": "model"}, "created": _COUNT, "owned_by": _TEXT, "max_model_len": _COUNT})
MODELS = obj({"object": {"const": "list"}, "data": array(MODEL, minItems=1)})
TOKENS = obj({"count": _COUNT, "max_model_len": _COUNT, "tokens": array(_COUNT)})
TEXT = obj({"prompt": _TEXT})
STATUS = obj({"status": {"const": "ok"}})
VERSION = obj({"version": _TEXT, "engine": {"type": "object"}})

GENERATION_REFUSALS = (*_READS_BODY[:6], 429, 500, 503)
BODY_REFUSALS = _READS_BODY


def body_schema(kind: type[BaseModel]) -> dict[str, Any]:
    """``openapi_extra`` of a route whose body is a ``kind``; null is "not given", so optional fields may be null."""
    schema = kind.model_json_schema()
    inlined = _inline(schema, schema.pop("$defs", {}))
    required = inlined.get("required", [])
    fields = inlined["properties"]
    inlined["properties"] = {name: fields[name] if name in required else _nullable(fields[name]) for name in fields}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": inlined}}}}


def _nullable(schema: Schema) -> Schema:
    if {"type": "null"} in schema.get("anyOf", []):
        return schema
    kept: Schema = {name: schema[name] for name in ("title", "description", "default") if name in schema}
    return {**kept, **or_null({name: value for name, value in schema.items() if name not in kept})}


def _inline(node: Any, definitions: dict[str, Any]) -> Any:
    """Replace references by what they name: the schemas are small, not recursive, and used once."""
    if isinstance(node, dict):
        reference = node.get("$ref")
        if isinstance(reference, str):
            return _inline(definitions[reference.rsplit("/", 1)[1]], definitions)
        return {key: _inline(value, definitions) for key, value in node.items()}
    if isinstance(node, list):
        return [_inline(item, definitions) for item in node]
    return node
