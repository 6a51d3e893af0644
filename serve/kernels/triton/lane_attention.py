"""Launches attention of a few query rows by threads that multiply for themselves (``source/lane_attention.py``).

Twin, to the bit: ``split_attention``. It relies on how Triton lays out a tensor and on what an instruction adds, so at
its first use on a card it is tried against it, and not used where bits differ. Knows no plans.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from functools import cache

import torch
from torch import Tensor

from serve.kernels.triton.card import capability, launch_options
from serve.kernels.triton.source import lane_attention as source
from serve.kernels.triton.tiles import (
    KV_SPLIT,
    LANE_QUERIES,
    LANE_ROWS,
    attends_in_lanes,
    lane_programs,
)
from serve.kernels.triton.trial import same_bits

log = logging.getLogger(__name__)

_TRIED = (700, 7)
"""Positions before, and rows of, the sequence that the trial attends with."""

Split = Callable[[Tensor, Tensor, Tensor, Tensor, int, int, int, Tensor], tuple[Tensor, Tensor]]
"""q, cache, tables, spans, places, longest, splits, visible: as ``attend`` takes them."""


def fits(q: Tensor, cache: Tensor, places: int) -> bool:
    """Whether the kernel is for K/V like these, and for so few rows."""
    _, kv_heads, _, page_size, head_dim = cache.shape
    return (
        places <= LANE_ROWS
        and head_dim == 128
        and page_size % 16 == 0
        and cache.dtype == q.dtype
        and q.shape[1] // kv_heads <= LANE_QUERIES
        and attends_in_lanes(capability(q.device))
    )


def attend(
    q: Tensor, kv: Tensor, tables: Tensor, spans: Tensor, places: int, longest: int, splits: int, visible: Tensor
) -> tuple[Tensor, Tensor]:
    """q [T, heads, 128], kv [pages, kv_heads, 2, page_size, 128] in its dtype, tables, spans and longest as in
    ``attention.Spans``, visible [T] int64 -> parts [places, heads, splits, 128] and stats [places, heads, splits, 2]
    float32. No row sees further than ``places`` positions past the first that this step writes."""
    _, heads, head_dim = q.shape
    kv_heads = kv.shape[1]
    row_tiles = -(-longest // (LANE_QUERIES // (heads // kv_heads)))
    parts = q.new_empty(places, heads, splits, head_dim, dtype=torch.float32)
    stats = q.new_empty(places, heads, splits, 2, dtype=torch.float32)
    source.lane_attention[(kv_heads, lane_programs(splits, spans.shape[0] * row_tiles, kv_heads))](
        q,
        kv,
        tables,
        spans,
        visible,
        parts,
        stats,
        spans.shape[0],
        row_tiles,
        splits,
        tables.shape[1],
        places,
        math.log2(math.e) / math.sqrt(head_dim),
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        PAGE=kv.shape[3],
        COUNTED=LANE_ROWS,
        ASM=q.is_cuda,
        **launch_options(q.device, 8),
    )
    return parts, stats


@cache
def agrees(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, page_size: int, own: Split, twin: Split
) -> bool:
    """Tries ``own`` against ``twin`` on a sequence over scattered pages."""
    before, count = _TRIED
    seen = before + count
    pages, splits = -(-seen // page_size), -(-seen // KV_SPLIT)
    generator = torch.Generator().manual_seed(0)
    kv = torch.randn(pages, kv_heads, 2, page_size, 128, generator=generator).to(device, dtype)
    q = torch.randn(count, heads, 128, generator=generator).to(device, dtype)
    tables = torch.randperm(pages, generator=generator).int().to(device)[None]
    visible = torch.arange(before + 1, seen + 1, device=device)

    def found(way: Split, rows: int) -> Tensor:
        spans = torch.tensor([[0, rows, 0]], dtype=torch.int32, device=device)
        there = torch.arange(splits, device=device)[None, :] * KV_SPLIT < visible[:rows, None]
        parts = way(q[:rows], kv, tables, spans, rows, rows, splits, visible[:rows])
        return torch.cat([part.transpose(1, 2)[there] for part in parts], -1)

    def both() -> Iterator[tuple[Tensor, Tensor]]:
        for rows in (1, count):
            yield found(own, rows), found(twin, rows)

    return same_bits(log, "few rows attend in tiles", "threads that multiply for themselves give", both)
