"""Two-layer random models of each family written by transformers, and flat batches over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from serve.model.batch import FlatBatch

VOCAB = 192
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 1,
    "bos_token_id": 0,
}
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def write_random_model(folder: Path, family: str, *, shard: str | None = None, **fields: Any) -> PreTrainedModel:
    """Saves a model with random weights (norms and biases too) and returns transformers' own, in eval mode."""
    config_class, model_class = FAMILIES[family]
    config = config_class(**{**COMMON, **fields})
    config._attn_implementation = "eager"
    torch.manual_seed(hash_of(family, fields))
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.15)
    model.save_pretrained(folder, **({"max_shard_size": shard} if shard else {}))
    result: PreTrainedModel = model
    return result


def hash_of(family: str, fields: dict[str, Any]) -> int:
    """A seed that does not change from run to run."""
    return sum(ord(letter) for letter in family + repr(sorted(fields.items())))


def random_ids(count: int, seed: int = 0) -> Tensor:
    return torch.randint(2, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Span:
    """Rows start .. stop of a sequence whose pages are ``table``."""

    ids: Tensor
    start: int
    stop: int
    table: tuple[int, ...]


def flat_batch(spans: Sequence[Span], page_size: int = 16, logit_rows: Sequence[int] | None = None) -> FlatBatch:
    positions = torch.cat([torch.arange(span.start, span.stop) for span in spans])
    slots = [
        span.table[i // page_size] * page_size + i % page_size for span in spans for i in range(span.start, span.stop)
    ]
    starts = [0]
    for span in spans:
        starts.append(starts[-1] + span.stop - span.start)
    return FlatBatch(
        token_ids=torch.cat([span.ids[span.start : span.stop] for span in spans]),
        positions=positions,
        slots=torch.tensor(slots),
        visible=positions + 1,
        query_starts=tuple(starts),
        page_tables=tuple(span.table for span in spans),
        logit_rows=torch.arange(starts[-1]) if logit_rows is None else torch.tensor(logit_rows),
    )
