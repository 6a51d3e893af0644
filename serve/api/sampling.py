"""From a checked request and the served model's limits to the SamplingParams of each choice.

It knows the context limit, the vocabulary and the model's own sampling defaults; it does not know HTTP or tokenisation.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serve.api.errors import invalid
from serve.api.schemas import LEAST_REPETITION_PENALTY, ChatRequest, CompletionRequest, GenerationRequest
from serve.json_file import JsonFileError, read_object, shown
from serve.protocol import SamplingParams

SEED_MASK = (1 << 63) - 1
# Below this a softmax is one-hot to double precision unless two logits are equal: treat it as what it means.
GREEDY_BELOW = 1e-4


class GenerationConfigError(Exception):
    """The model folder's generation_config.json cannot be used; the message names file, field and limit."""


@dataclass(frozen=True)
class SamplingDefaults:
    """What a request gets when it does not say: the model's generation_config.json over OpenAI's defaults."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def load(cls, model_dir: Path) -> SamplingDefaults:
        """From ``model_dir/generation_config.json``; a missing file or field leaves the default."""
        path = model_dir / "generation_config.json"
        try:
            data = read_object(path) or {}
        except JsonFileError as error:
            raise GenerationConfigError(str(error)) from None
        limits = {"temperature": 2.0, "top_p": 1.0, "top_k": float(1 << 31), "min_p": 1.0, "repetition_penalty": 2.0}
        found: dict[str, Any] = {}
        for name, high in limits.items():
            value = data.get(name)
            if value is None:
                continue
            if type(value) not in (int, float) or not math.isfinite(value) or not 0 <= value <= high:
                raise GenerationConfigError(
                    f"{path}: {name} must be a number between 0 and {high:g}, got {shown(value)}"
                )
            found[name] = int(value) if name == "top_k" else float(value)
        if found.get("top_p") == 0:
            raise GenerationConfigError(f"{path}: top_p must be above 0")
        if found.get("repetition_penalty", 1) < LEAST_REPETITION_PENALTY:
            raise GenerationConfigError(f"{path}: repetition_penalty must be at least {LEAST_REPETITION_PENALTY}")
        return cls(**found)


@dataclass(frozen=True)
class ModelLimits:
    """``context``: most tokens of prompt and answer together; ``vocab_size``: ids from 0 to it, exclusive."""

    context: int
    vocab_size: int

    def check_ids(self, field: str, ids: list[int] | tuple[int, ...]) -> None:
        """ApiError 400 unless every id is in the vocabulary."""
        if ids and not (min(ids) >= 0 and max(ids) < self.vocab_size):
            raise invalid(field, f"token ids must be between 0 and {self.vocab_size - 1}")

    def room(self, field: str, prompt_tokens: int) -> int:
        """Tokens that an answer to such a prompt may have; ApiError 400 when there is none."""
        if prompt_tokens < 1:
            raise invalid(field, "must not be empty: at least 1 token is needed")
        if prompt_tokens >= self.context:
            raise invalid(
                field,
                f"the prompt has {prompt_tokens} tokens; with room for an answer the context limit of {self.context} "
                f"tokens allows at most {self.context - 1}",
                "context_length_exceeded",
            )
        return self.context - prompt_tokens


def check_request(request: GenerationRequest, limits: ModelLimits) -> None:
    """What can be refused before any prompt is tokenised: fields that contradict each other or the vocabulary."""
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options", "only allowed with stream: true")
    limits.check_ids("stop_token_ids", request.stop_token_ids)
    limits.check_ids("logit_bias", [token_id for token_id, _ in request.logit_bias])
    if isinstance(request, ChatRequest):
        if request.top_logprobs and not request.logprobs:
            raise invalid("top_logprobs", "only allowed with logprobs: true")
    elif isinstance(request, CompletionRequest):
        if request.best_of not in (None, request.n):
            raise invalid("best_of", f"must be equal to n ({request.n}): ranking more candidates is not supported")
        if request.max_tokens == 0 and not request.echo:
            raise invalid("max_tokens", "must be at least 1; 0 is only allowed with echo: true")
    asked = _asked_tokens(request)
    if asked[1] is not None and request.min_tokens > max(asked[1], 1):
        raise invalid("min_tokens", f"must not exceed {asked[0]} ({asked[1]})")


def _asked_tokens(request: GenerationRequest) -> tuple[str, int | None]:
    if request.max_completion_tokens is not None:
        return "max_completion_tokens", request.max_completion_tokens
    assert isinstance(request, ChatRequest | CompletionRequest)
    return "max_tokens", request.max_tokens


def sampling_params(
    request: GenerationRequest, defaults: SamplingDefaults, limits: ModelLimits, field: str, prompt_tokens: int
) -> list[SamplingParams]:
    """One SamplingParams per choice for a prompt of that many tokens; ``field`` names the prompt in a refusal.

    A given seed gives choice i its own stream, the same whatever the other prompts of the request are.
    """
    room = limits.room(field, prompt_tokens)
    name, asked = _asked_tokens(request)
    if asked is not None and asked > room:
        raise invalid(
            name,
            f"{asked} asked, but the prompt has {prompt_tokens} tokens and the context limit is {limits.context}: "
            f"at most {room}",
            "context_length_exceeded",
        )
    if request.min_tokens > room:
        raise invalid("min_tokens", f"at most {room} tokens fit after a prompt of {prompt_tokens} tokens")
    temperature = defaults.temperature if request.temperature is None else request.temperature
    top_p = defaults.top_p if request.top_p is None else request.top_p
    top_k = max(0, defaults.top_k if request.top_k is None else request.top_k)
    logprobs, prompt_logprobs = _logprobs(request)
    shared = SamplingParams(
        # max_tokens 0 (echo only) is one discarded token: every pass of the engine ends in one.
        max_tokens=max(1, room if asked is None else asked),
        # A nucleus of no weight still holds the likeliest token: OpenAI's range of top_p begins at 0.
        temperature=0.0 if temperature < GREEDY_BELOW or top_p == 0 else temperature,
        top_p=top_p or 1.0,
        top_k=min(top_k, limits.vocab_size),
        min_p=defaults.min_p if request.min_p is None else request.min_p,
        stop=request.stop,
        stop_token_ids=tuple(dict.fromkeys(request.stop_token_ids)),
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=(
            defaults.repetition_penalty if request.repetition_penalty is None else request.repetition_penalty
        ),
        logit_bias=request.logit_bias,
        ignore_eos=request.ignore_eos,
        min_tokens=request.min_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        speculation=request.speculation,
        provenance=request.stream_options is not None and request.stream_options.include_provenance,
    )
    return [SamplingParams(**{**vars(shared), "seed": choice_seed(request.seed, i)}) for i in range(request.n)]


def _logprobs(request: GenerationRequest) -> tuple[int | None, int | None]:
    if isinstance(request, ChatRequest):
        return (request.top_logprobs or 0) if request.logprobs else None, None
    assert isinstance(request, CompletionRequest)
    return request.logprobs, request.logprobs if request.echo else None


def choice_seed(seed: int | None, index: int) -> int:
    """Seed of one choice in [0, 2^63): drawn without a client's, else that one for choice 0 and hashed for others."""
    if seed is None:
        return secrets.randbits(63)
    if index == 0:
        return seed & SEED_MASK
    digest = hashlib.sha256(f"{seed}:{index}".encode("ascii")).digest()
    return int.from_bytes(digest[:8], "big") & SEED_MASK
