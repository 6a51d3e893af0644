"""Whether a prompt's bits depend on its company: K/V and logits of prompts alone, all together, and in parts.

Knows a model and its pages; no engine and no report.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from serve.kernels.kv_cache import KVCache
from serve.kernels.triton.attention import SPLIT_ROWS
from serve.model.batch import FlatBatch
from serve.model.triton_layers import TritonTargetModel

LENGTHS = (18, 40, 100, 129, 240, 257, 511, 700, 1000, 1337)
PART = 300
"""Rows that a prompt is cut into, the last part apart."""


def prompts(count: int, seed: int = 3) -> list[list[int]]:
    """``count`` random prompts of the LENGTHS in turn."""
    rng = random.Random(seed)
    return [[rng.randrange(1000, 40_000) for _ in range(LENGTHS[i % len(LENGTHS)])] for i in range(count)]


def equal_prompts(model: TritonTargetModel, cache: KVCache, tokens: Sequence[Sequence[int]]) -> dict[str, int]:
    """How many prompts have, to the bit, the K/V and the last logits that they have alone: "together" in one pass,
    "in parts" (PART rows at a time, all prompts beside each other)."""
    tables = _tables(cache, tokens)
    _wipe(cache, tables)
    alone = []
    for ids, table in zip(tokens, tables, strict=True):
        logits = _run(model, cache, [(ids, 0, len(ids))], [table])
        alone.append((logits[0].clone(), _pages(cache, table)))
    _wipe(cache, tables)
    together = _run(model, cache, [(ids, 0, len(ids)) for ids in tokens], tables)
    found = {"together": _count(cache, tables, alone, list(together))}
    _wipe(cache, tables)
    last: list[Tensor] = [torch.empty(0)] * len(tokens)
    for start in range(0, max(map(len, tokens)), PART):
        spans = [(i, start, _end(len(ids), start)) for i, ids in enumerate(tokens) if start < len(ids)]
        spans = [span for span in spans if span[2] > span[1]]
        if spans:
            rows = _run(model, cache, [(tokens[i], a, b) for i, a, b in spans], [tables[i] for i, _, _ in spans])
            for (i, _, _), logits in zip(spans, rows, strict=True):
                last[i] = logits
    found["in parts"] = _count(cache, tables, alone, last)
    return found


def run_whole(model: TritonTargetModel, cache: KVCache, tokens: Sequence[Sequence[int]]) -> Tensor:
    """The prompts in one pass; the logits of each last row."""
    return _run(model, cache, [(ids, 0, len(ids)) for ids in tokens], _tables(cache, tokens))


def _end(length: int, start: int) -> int:
    """End of the part that begins at ``start``: the last one takes a rest of fewer rows than a part of its own has."""
    if start and length - start <= SPLIT_ROWS:
        return start
    end = start + PART
    return length if length - end <= SPLIT_ROWS else end


def _tables(cache: KVCache, tokens: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    counts = [-(-len(ids) // cache.page_size) for ids in tokens]
    ends = list(accumulate(counts))
    if ends[-1] > cache.num_pages:
        raise ValueError(f"{ends[-1]} pages are needed, the cache has {cache.num_pages}")
    return [tuple(range(end - count, end)) for end, count in zip(ends, counts, strict=True)]


def _run(
    model: TritonTargetModel,
    cache: KVCache,
    spans: Sequence[tuple[Sequence[int], int, int]],
    tables: Sequence[tuple[int, ...]],
) -> Tensor:
    """Rows start .. end of each prompt in one pass; the logits of each last row."""
    size = cache.page_size
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    for (ids, start, end), table in zip(spans, tables, strict=True):
        token_ids += ids[start:end]
        positions += range(start, end)
        slots += [table[p // size] * size + p % size for p in range(start, end)]
    starts = (0, *accumulate(end - start for _, start, end in spans))

    def put(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=model.device)

    batch = FlatBatch(
        token_ids=put(token_ids),
        positions=put(positions),
        slots=put(slots),
        visible=put(positions) + 1,
        query_starts=starts,
        page_tables=tuple(tables),
        logit_rows=put([start - 1 for start in starts[1:]]),
        ends=tuple(end for _, _, end in spans),
    )
    return model.forward(batch, cache).logits


def _pages(cache: KVCache, table: Sequence[int]) -> list[Tensor]:
    return [layer[table[0] : table[-1] + 1].clone() for layer in cache.layers]


def _wipe(cache: KVCache, tables: Sequence[Sequence[int]]) -> None:
    for layer in cache.layers:
        layer[: tables[-1][-1] + 1].zero_()


def _count(
    cache: KVCache,
    tables: Sequence[Sequence[int]],
    alone: Sequence[tuple[Tensor, list[Tensor]]],
    logits: Sequence[Tensor],
) -> int:
    return sum(
        torch.equal(row, want) and all(torch.equal(a, b) for a, b in zip(pages, _pages(cache, table), strict=True))
        for row, (want, pages), table in zip(logits, alone, tables, strict=True)
    )
