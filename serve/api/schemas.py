"""What a request may hold: every field that acts, with its bounds.

Parsing turns a JSON object into one of these or into a 400 that names field and limit. Null means "not given". It does
not know the model: limits that depend on it (context, vocabulary) are checked in ``sampling``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, WithJsonSchema, model_validator

from serve.api.errors import invalid
from serve.api.messages import MESSAGES_SCHEMA, read_messages

MAX_CHOICES = 16
MAX_PROMPTS = 1024
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKEN_IDS = 256
MAX_DETOKENIZED = 1 << 18
MAX_BIASES = 300
MAX_TOP_LOGPROBS = 20
MAX_TEMPLATE_SETTINGS = 64
MAX_TOKEN_COUNT = (1 << 31) - 1
LEAST_REPETITION_PENALTY = 0.01
"""Logits are divided by it: what is nearer to zero would make them infinite."""

Prompt = str | list[int]
M = TypeVar("M", bound=BaseModel)


def _token_ids(value: list[Any], field: str) -> list[int]:
    if not set(map(type, value)) <= {int}:
        raise invalid(field, "must hold token ids (integers) only")
    return value


def _id_list(field: str, most: int) -> Callable[[Any], list[int]]:
    """A reader of token ids that ends at the first that is none, however many there are."""

    def read(value: Any) -> list[int]:
        if not isinstance(value, list):
            raise invalid(field, "must be a list of token ids")
        if len(value) > most:
            raise invalid(field, f"must hold at most {most} token ids, got {len(value)}")
        if not all(0 <= item <= MAX_TOKEN_COUNT for item in _token_ids(value, field)):
            raise invalid(field, f"token ids must be between 0 and {MAX_TOKEN_COUNT}")
        return value

    return read


def read_prompts(value: Any) -> list[Prompt]:
    """A completions prompt in any of its four forms, as a list of prompts. Empty ones are refused."""
    if isinstance(value, str) or (isinstance(value, list) and value and type(value[0]) is int):
        value = [value]
    if not isinstance(value, list):
        raise invalid("prompt", "must be a string, a list of strings, a list of token ids, or a list of such lists")
    if not 1 <= len(value) <= MAX_PROMPTS:
        raise invalid("prompt", f"must hold between 1 and {MAX_PROMPTS} prompts, got {len(value)}")
    for i, prompt in enumerate(value):
        field = "prompt" if len(value) == 1 else f"prompt[{i}]"
        if isinstance(prompt, list):
            _token_ids(prompt, field)
        elif not isinstance(prompt, str):
            raise invalid(field, "must be a string or a list of token ids")
        if not prompt:
            raise invalid(field, "must not be empty: at least 1 token is needed")
    return value


def _read_stop(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise invalid("stop", "must be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise invalid("stop", f"must hold at most {MAX_STOPS} strings, got {len(stops)}")
    if any(not 1 <= len(stop) <= MAX_STOP_CHARACTERS for stop in stops):
        raise invalid("stop", f"each string must have between 1 and {MAX_STOP_CHARACTERS} characters")
    return tuple(dict.fromkeys(stops))


def _read_logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, dict):
        raise invalid("logit_bias", "must be an object of token id to bias")
    if len(value) > MAX_BIASES:
        raise invalid("logit_bias", f"must hold at most {MAX_BIASES} entries, got {len(value)}")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise invalid("logit_bias", "each key must be a token id in decimal digits")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise invalid("logit_bias", "each bias must be a number between -100 and 100")
        biases[int(key)] = float(bias)
    return tuple(biases.items())


def _id_list_schema(most: int) -> dict[str, Any]:
    items = {"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_COUNT}
    return {"type": "array", "maxItems": most, "items": items}


Stop = Annotated[
    tuple[str, ...],
    PlainValidator(_read_stop),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS},
                {
                    "type": "array",
                    "maxItems": MAX_STOPS,
                    "items": {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS},
                },
            ]
        }
    ),
]
LogitBias = Annotated[
    tuple[tuple[int, float], ...],
    PlainValidator(_read_logit_bias),
    WithJsonSchema(
        {
            "type": "object",
            "maxProperties": MAX_BIASES,
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        }
    ),
]
_STRING = {"type": "string", "minLength": 1}
_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
StopTokenIds = Annotated[
    list[int],
    PlainValidator(_id_list("stop_token_ids", MAX_STOP_TOKEN_IDS)),
    WithJsonSchema(_id_list_schema(MAX_STOP_TOKEN_IDS)),
]
TokenIds = Annotated[
    list[int], PlainValidator(_id_list("tokens", MAX_DETOKENIZED)), WithJsonSchema(_id_list_schema(MAX_DETOKENIZED))
]
Prompts = Annotated[
    list[Prompt],
    PlainValidator(read_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                _STRING,
                _IDS,
                {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": {"anyOf": [_STRING, _IDS]}},
            ]
        }
    ),
]
Messages = Annotated[list[dict[str, str]], PlainValidator(read_messages), WithJsonSchema(MESSAGES_SCHEMA)]
TemplateSettings = Annotated[dict[str, Any], Field(max_length=MAX_TEMPLATE_SETTINGS)]
_INERT_SETTINGS = "only names that the model's chat template does not read"
Count = Annotated[int, Field(ge=1, le=MAX_TOKEN_COUNT)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


class _Body(BaseModel):
    """Strict types (no "5" for 5); unknown fields are ignored, and null is a field that was not given."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        return {name: item for name, item in value.items() if item is not None} if isinstance(value, dict) else value


class StreamOptions(_Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_provenance: bool = Field(default=False, description="where each token came from, see docs/api.md")


class GenerationRequest(_Body):
    """The fields that chat and text completions share. Ranges are inclusive; None is the model's own default."""

    model: str | None = Field(default=None, max_length=1024, description="the served model when absent")
    temperature: float | None = Field(default=None, ge=0, le=2, description="0 is greedy")
    top_p: float | None = Field(default=None, ge=0, le=1, description="0 is greedy")
    top_k: int | None = Field(default=None, ge=-1, le=MAX_TOKEN_COUNT, description="0 and -1 switch it off")
    min_p: float | None = Field(default=None, ge=0, le=1)
    seed: int | None = Field(default=None, ge=-(1 << 63), le=(1 << 63) - 1, description="drawn at random when absent")
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: Stop = ()
    stop_token_ids: StopTokenIds = Field(default_factory=list)
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: float | None = Field(default=None, ge=LEAST_REPETITION_PENALTY, le=2)
    logit_bias: LogitBias = ()
    ignore_eos: bool = False
    max_completion_tokens: Count | None = Field(default=None, description="wins over max_tokens")
    min_tokens: int = Field(default=0, ge=0, le=MAX_TOKEN_COUNT)
    speculation: bool = Field(default=True, description="false decodes without drafts; the text is the same")
    return_token_ids: bool = Field(default=False, description="token ids beside the text, the prompt's too")
    cache_salt: str = Field(default="", max_length=256, description="prefix pages are shared only under an equal salt")


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions. Without a cap, the answer may fill the rest of the context."""

    messages: Messages
    chat_template_kwargs: TemplateSettings = Field(default_factory=dict, description=_INERT_SETTINGS)
    max_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS, description="needs logprobs: true")


class CompletionRequest(GenerationRequest):
    """POST /v1/completions. Without a cap, the text may fill the rest of the context."""

    prompt: Prompts
    max_tokens: int | None = Field(default=None, ge=0, le=MAX_TOKEN_COUNT, description="0 only with echo")
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: bool = False
    best_of: int | None = Field(default=None, ge=1, le=MAX_CHOICES, description="only equal to n")
    add_special_tokens: bool = True


class TokenizeRequest(_Body):
    """POST /tokenize: either ``prompt`` or ``messages``."""

    model: str | None = Field(default=None, max_length=1024)
    prompt: str | None = None
    messages: Messages | None = None
    chat_template_kwargs: TemplateSettings = Field(default_factory=dict, description=_INERT_SETTINGS)
    add_special_tokens: bool = True


class DetokenizeRequest(_Body):
    """POST /detokenize."""

    model: str | None = Field(default=None, max_length=1024)
    tokens: TokenIds


def parse(kind: type[M], body: Mapping[str, Any]) -> M:
    """``body`` as a ``kind``; ApiError 400 names the first field that is wrong, its limit, and nothing of its value."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
        message = first["msg"][:1].lower() + first["msg"][1:]
        raise invalid(where or None, message) from None
