"""What the routes of one server share: settings, engine, text tools, limits. Filled in when the model is ready.

It knows what is served; it does not know HTTP requests.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from serve.api.auth import ApiKeys
from serve.api.body import Bodies
from serve.api.engine_client import EngineClient
from serve.api.errors import ApiError, unavailable
from serve.api.generation import EngineError
from serve.api.metrics import ServerMetrics
from serve.api.model_names import shown_name
from serve.api.sampling import ModelLimits, SamplingDefaults
from serve.api.text import ModelText
from serve.config import ServeConfig


@dataclass(frozen=True)
class ServedModel:
    """The model behind the routes; exists once the engine is ready. ``created``: Unix time of that. ``names``: those
    that a client may ask for it by, ``name`` among them."""

    name: str
    names: frozenset[str]
    text: ModelText
    limits: ModelLimits
    defaults: SamplingDefaults
    fingerprint: str
    block_length_max: int
    created: int


@dataclass
class ServerState:
    """One server. ``model`` is None until it can answer."""

    config: ServeConfig
    engine: EngineClient
    keys: ApiKeys
    metrics: ServerMetrics = field(default_factory=ServerMetrics)
    model: ServedModel | None = None

    @cached_property
    def bodies(self) -> Bodies:
        return Bodies.up_to(self.config.max_body_bytes)

    @cached_property
    def model_name(self) -> str:
        return shown_name(self.config)

    def unavailable_reason(self) -> str | None:
        """Why a request would not be answered now, None when it would."""
        reason = self.engine.unavailable_reason()
        return "the model is loading" if reason is None and self.model is None else reason

    def ready_model(self, asked: str | None) -> ServedModel:
        """The served model. ApiError 404 when the client asked for another one, 503 while none can answer."""
        if self.model is not None and asked is not None and asked not in self.model.names:
            raise ApiError(
                404, f"model: no such model here; this server has {self.model_name!r}", "model", "model_not_found"
            )
        reason = self.unavailable_reason()
        if reason is not None or self.model is None:
            raise unavailable(reason or "the model is loading")
        return self.model

    def set_ready(
        self, info: dict[str, Any], text: ModelText, defaults: SamplingDefaults, names: frozenset[str], created: int
    ) -> None:
        """Open the server for requests. EngineError when the engine's facts make no sense."""
        try:
            max_model_len, vocab_size = int(info["max_model_len"]), int(info["vocab_size"])
            pool_tokens = int(info["kv_pages"]) * int(info["page_size"])
            block_length_max = int(info.get("block_length_max") or 0)
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(f"the engine's ready message lacks a fact: {error}") from None
        self.model = ServedModel(
            name=self.model_name,
            names=names,
            text=text,
            limits=ModelLimits(context=min(max_model_len, pool_tokens), vocab_size=vocab_size),
            defaults=defaults,
            fingerprint=_fingerprint(info, text.tokenizer.fingerprint),
            block_length_max=block_length_max,
            created=created,
        )


def _fingerprint(info: dict[str, Any], tokenizer: str) -> str:
    """Changes whenever the same request could give another text: model, weights, kernels, drafter."""
    names = ("model_dir", "weights", "kernel_path", "device", "drafter", "proposer")
    facts = {name: info.get(name) for name in names} | {"tokenizer": tokenizer}
    return "fp_" + hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:12]
