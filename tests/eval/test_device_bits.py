"""Counting prompts whose bits are their own: a model that looks at its company is found out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from eval.device_bits import PART, equal_prompts, prompts
from serve.kernels.kv_cache import KVCache
from serve.model.batch import FlatBatch
from serve.model.target import ForwardOutput
from tests.serve.engine.hash_model import HashModel


class Sociable(HashModel):
    """Its logits say how many sequences are in the pass."""

    def forward(self, batch: FlatBatch, cache: KVCache, taps: Sequence[int] = ()) -> ForwardOutput:
        output = super().forward(batch, cache, taps)
        return replace(output, logits=output.logits + len(batch.page_tables))


def test_prompts_are_compared_alone_together_and_in_parts() -> None:
    tokens = [[token % 300 + 4 for token in ids[:350]] for ids in prompts(10)[5:8]]
    assert max(map(len, tokens)) > PART
    counts = []
    for kind in (HashModel, Sociable):
        model: Any = kind()
        cache = model.allocate_cache(64, 16)
        for layer in cache.layers:
            layer.copy_(torch.randn(layer.shape))  # what is there before does not count
        counts.append(equal_prompts(model, cache, tokens))
    assert counts[0] == {"together": 3, "in parts": 3}
    assert counts[1]["together"] == 0
