"""Launches attention of a few query rows by threads that multiply for themselves (``source/lane_attention.py``).

Twin, to the bit: ``split_attention``. It relies on how Triton lays out a tensor and on what an instruction adds, so at
its first use on a card it is tried against it, and not used where bits differ. Knows no plans.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from serve.kernels.triton.card import capability, launch_options
from serve.kernels.triton.source import lane_attention as source
from serve.kernels.triton.tiles import (
    BLOCK_OCTETS,
    BLOCK_ROWS,
    KV_SPLIT,
    LANE_QUERIES,
    LANE_ROWS,
    attends_in_lanes,
    lane_programs,
)

log = logging.getLogger(__name__)

_BEFORE = 700
"""Positions before the rows of the sequence that the trial attends with."""
_TIMED_BEFORE, _LAUNCHES, _MILLISECONDS = 1024, 16, 5
"""The same of the sequence that it times a block of BLOCK_ROWS with; so many launches in a row, each over K/V of its
own, as each layer of a step has them; for how long."""

Split = Callable[[Tensor, Tensor, Tensor, Tensor, int, int, int, Tensor], tuple[Tensor, Tensor]]
"""q, cache, tables, spans, places, longest, splits, visible: as ``attend`` takes them."""


def octets_for(places: int, blocks: bool) -> int:
    """Times LANE_QUERIES that a program has in a pass of so many rows; 0 where tiles are quicker, as a program that has
    all registers of a processor keeps the next kernel out. blocks: sequences have several rows."""
    if places <= LANE_ROWS:
        return 1
    return BLOCK_OCTETS if blocks and places <= BLOCK_ROWS else 0


def fits(q: Tensor, cache: Tensor, places: int, blocks: bool = False) -> bool:
    """Whether the kernel is for K/V like these, and for so few rows."""
    _, kv_heads, _, page_size, head_dim = cache.shape
    return (
        octets_for(places, blocks) > 0
        and head_dim == 128
        and page_size % 16 == 0
        and cache.dtype == q.dtype
        and q.shape[1] // kv_heads <= LANE_QUERIES
        and attends_in_lanes(capability(q.device))
    )


def attend(
    q: Tensor,
    kv: Tensor,
    tables: Tensor,
    spans: Tensor,
    places: int,
    longest: int,
    splits: int,
    visible: Tensor,
    octets: int = 1,
) -> tuple[Tensor, Tensor]:
    """q [T, heads, 128], kv [pages, kv_heads, 2, page_size, 128] in its dtype, tables, spans and longest as in
    ``attention.Spans``, visible [T] int64 -> parts [places, heads, splits, 128] and stats [places, heads, splits, 2]
    float32. No row sees further than ``places`` positions past the first that this step writes. octets: as
    ``octets_for`` says."""
    _, heads, head_dim = q.shape
    kv_heads = kv.shape[1]
    row_tiles = -(-longest // (octets * (LANE_QUERIES // (heads // kv_heads))))
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
        OCTETS=octets,
        COUNTED=LANE_ROWS if octets == 1 else BLOCK_ROWS,
        ASM=q.is_cuda,
        **launch_options(q.device, 8),
    )
    return parts, stats


@cache
def taken(device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int], twin: Split, blocks: bool) -> bool:
    """Whether a card attends so: where the bits are ``twin``'s, and blocks where it takes less time as well. shape:
    heads, K/V heads, positions of a page."""
    own = partial(attend, octets=octets_for(BLOCK_ROWS, True)) if blocks else attend
    what = "blocks attend" if blocks else "few rows attend"
    try:
        if not _agrees(device, dtype, shape, own, twin):
            log.warning("%s in tiles: threads that multiply for themselves give other bits on this card", what)
            return False
        if not blocks:
            return True
        mine, other = (_seconds(device, dtype, shape, way) for way in (own, twin))
    except Exception as error:
        log.warning("%s in tiles: %s: %s", what, type(error).__name__, str(error)[:200])
        return False
    where = "by threads that multiply for themselves" if mine < other else "in tiles"
    log.info("%s %s: %.1f us a layer, the other way %.1f", what, where, *(1e6 * t for t in sorted((mine, other))))
    return mine < other


def _agrees(device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int], own: Split, twin: Split) -> bool:
    """Tries ``own`` against ``twin`` on a sequence over scattered pages."""
    heads, kv_heads, page_size = shape
    seen = _BEFORE + BLOCK_ROWS
    pages, splits = -(-seen // page_size), -(-seen // KV_SPLIT)
    generator = torch.Generator().manual_seed(0)
    kv = torch.randn(pages, kv_heads, 2, page_size, 128, generator=generator).to(device, dtype)
    q = torch.randn(BLOCK_ROWS, heads, 128, generator=generator).to(device, dtype)
    tables = torch.randperm(pages, generator=generator).int().to(device)[None]
    visible = torch.arange(_BEFORE + 1, seen + 1, device=device)

    def found(way: Split, rows: int) -> Tensor:
        spans = torch.tensor([[0, rows, 0]], dtype=torch.int32, device=device)
        there = torch.arange(splits, device=device)[None, :] * KV_SPLIT < visible[:rows, None]
        parts = way(q[:rows], kv, tables, spans, rows, rows, splits, visible[:rows])
        return torch.cat([part.transpose(1, 2)[there] for part in parts], -1)

    return all(torch.equal(found(own, rows), found(twin, rows)) for rows in (1, 7, BLOCK_ROWS))


def _seconds(device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int], way: Split) -> float:
    """Of one layer's block in a recorded graph, the least of some."""
    from triton.testing import do_bench_cudagraph

    heads, kv_heads, page_size = shape
    seen = _TIMED_BEFORE + BLOCK_ROWS
    pages, splits = -(-seen // page_size), -(-seen // KV_SPLIT)
    kv = torch.zeros(_LAUNCHES * pages, kv_heads, 2, page_size, 128, dtype=dtype, device=device)
    q = torch.zeros(BLOCK_ROWS, heads, 128, dtype=dtype, device=device)
    tables = torch.arange(_LAUNCHES * pages, dtype=torch.int32, device=device).view(_LAUNCHES, 1, pages)
    spans = torch.tensor([[0, BLOCK_ROWS, 0]], dtype=torch.int32, device=device)
    visible = torch.arange(_TIMED_BEFORE + 1, seen + 1, device=device)

    def work() -> None:
        for table in tables:
            way(q, kv, table, spans, BLOCK_ROWS, BLOCK_ROWS, splits, visible)

    # It launches on a stream of its own, which waits for none of what is above.
    torch.cuda.synchronize(device)
    return float(do_bench_cudagraph(work, rep=_MILLISECONDS, return_mode="min")) / 1e3 / _LAUNCHES
