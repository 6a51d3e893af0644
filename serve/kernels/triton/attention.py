"""Launches attention over pages: split over positions for sequences with few query rows, whole tiles for prefill
chunks.

Twin: ``serve.kernels.attention.PagedAttention``, which takes the same batch, cache and rows. Knows no projections.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from serve.kernels.triton import gathered, lane_attention
from serve.kernels.triton.card import capability, launch_options
from serve.kernels.triton.rows import power_of_two
from serve.kernels.triton.source.attention import combine_splits, prefill_attention, split_attention
from serve.kernels.triton.source.lane_combine import lane_combine
from serve.kernels.triton.tiles import (
    COMBINE_BLOCK,
    COMBINE_WARPS,
    COUNTED_SPANS,
    KV_SPLIT,
    QUERY_TILE,
    enough_programs,
    prefill_attention_tile,
    split_attention_tile,
    split_programs,
)
from serve.model.batch import FlatBatch

SPLIT_ROWS = 16
"""A sequence with more query rows than this is a prefill chunk."""
_APART = 32
"""int32 numbers that what is sent together starts apart by: kernels are compiled for aligned addresses."""


@dataclass(frozen=True)
class Spans:
    """Sequences that go through one kernel.

    tables [S, pages] int32; spans [S, 3] int32: first row, end row, place of the first row among this kernel's rows;
    rows [R] int64: the flat row at each place (prefill chunks have none); longest: most rows of one sequence; visible:
    most positions a row sees.
    """

    tables: Tensor
    spans: Tensor
    rows: Tensor
    longest: int
    visible: int


@dataclass(frozen=True)
class TritonPlan:
    """What all layers of one step share: sequences with few rows, prefill chunks, and visible [T] int64 of every
    row. ends: where the logits of chunks' last rows are all that is wanted, these rows, each a span of its own."""

    split: Spans | None
    prefill: Spans | None
    visible: Tensor
    ends: Spans | None = None

    @property
    def last(self) -> TritonPlan:
        """The plan of the last layer, behind which only wanted rows go on."""
        return self if self.ends is None else replace(self, prefill=self.ends)


def build_plan(batch: FlatBatch, page_size: int) -> TritonPlan:
    """Raises ValueError when a page table is shorter than what its sequence's rows attend to."""
    ends = batch.ends or _ends(batch)
    few: list[int] = []
    many: list[int] = []
    for sequence, table in enumerate(batch.page_tables):
        start, stop = batch.query_starts[sequence], batch.query_starts[sequence + 1]
        if start == stop:
            continue
        seen = ends[sequence]
        if seen > len(table) * page_size:
            raise ValueError(f"sequence {sequence} attends to {seen} positions but its table has {len(table)} pages")
        (few if stop - start <= SPLIT_ROWS else many).append(sequence)
    last = [] if few else _wanted(batch, many)
    groups = [_whole(batch, few), _whole(batch, many), last]
    split, prefill, chosen = _spans(batch, groups, ends)
    return TritonPlan(split, prefill, batch.visible, chosen)


def _ends(batch: FlatBatch) -> tuple[int, ...]:
    """Positions that each sequence's rows see at most, read from the device."""
    visible = batch.visible.tolist()
    return tuple(max(visible[start:stop], default=0) for start, stop in pairwise(batch.query_starts))


_Part = tuple[int, int, int]
"""A sequence, and the first and the end of its rows that are meant."""


def _whole(batch: FlatBatch, sequences: Sequence[int]) -> list[_Part]:
    return [(s, batch.query_starts[s], batch.query_starts[s + 1]) for s in sequences]


def _wanted(batch: FlatBatch, sequences: Sequence[int]) -> list[_Part]:
    """The rows whose logits are wanted, where that is one of a sequence at most and the host knows them."""
    if batch.host is None or len(batch.host[1]) > len(sequences):
        return []
    rows = batch.host[1].tolist()
    owners = [bisect_right(batch.query_starts, row) - 1 for row in rows]
    return [(s, row, row + 1) for s, row in zip(owners, rows, strict=True)]


def _spans(batch: FlatBatch, groups: Sequence[Sequence[_Part]], ends: tuple[int, ...]) -> list[Spans | None]:
    """Each group's Spans, the first one's with the places of its rows; all sent in one copy that waits for nothing."""
    arrays: list[NDArray[np.int32]] = []
    for index, group in enumerate(groups):
        lengths = [stop - start for _, start, stop in group]
        width = max((len(batch.page_tables[s]) for s, _, _ in group), default=0)
        tables = np.zeros((len(group), width), dtype=np.int32)
        for line, (s, _, _) in zip(tables, group, strict=True):
            line[: len(batch.page_tables[s])] = batch.page_tables[s]
        places = accumulate(lengths, initial=0)
        spans = [(start, stop, place) for (_, start, stop), place in zip(group, places, strict=False)]
        rows = [np.arange(start, stop) for _, start, stop in group] if index == 0 else []
        arrays += [
            tables,
            np.array(spans, dtype=np.int32).reshape(-1, 3),
            np.concatenate([np.empty(0, dtype=np.int64), *rows]).view(np.int32),
        ]
    sent = _sent(arrays, batch.visible.device)
    found: list[Spans | None] = []
    for index, group in enumerate(groups):
        tables_, spans_, rows_ = sent[3 * index : 3 * index + 3]
        longest = max((stop - start for _, start, stop in group), default=0)
        visible = max((ends[s] for s, _, _ in group), default=0)
        found.append(Spans(tables_, spans_, rows_.view(torch.int64), longest, visible) if group else None)
    return found


def _sent(arrays: Sequence[NDArray[np.int32]], device: torch.device) -> list[Tensor]:
    """The arrays on the device, parts of one tensor."""
    starts = [0, *accumulate(-(-array.size // _APART) * _APART for array in arrays)]
    host = torch.empty(starts[-1], dtype=torch.int32, pin_memory=device.type == "cuda")
    flat = host.numpy()
    for array, start in zip(arrays, starts, strict=False):
        flat[start : start + array.size] = array.reshape(-1)
    there = host.to(device, non_blocking=True)
    return [there[start : start + a.size].view(a.shape) for a, start in zip(arrays, starts, strict=False)]


def paged_attention(q: Tensor, cache: Tensor, plan: TritonPlan, scale: Tensor | None = None) -> Tensor:
    """q [T, heads, head_dim] contiguous, cache [pages, kv_heads, 2, page_size, head_dim] holding the step's own K/V
    (int8 with scale [pages, kv_heads, 2, page_size]) -> [T, heads * head_dim] in q's dtype. Raises ValueError for head
    geometries the tiles do not hold."""
    heads, kv_heads = q.shape[1], cache.shape[1]
    if heads % kv_heads or heads // kv_heads > QUERY_TILE:
        raise ValueError(f"{heads} query heads over {kv_heads} K/V heads: the ratio must be whole and <= {QUERY_TILE}")
    out = torch.empty_like(q)
    if plan.split is not None:
        _split(q, cache, scale, plan.split, plan.visible, out)
    if plan.prefill is not None:
        _prefill(q, cache, scale, plan.prefill, plan.visible, out)
    return out.flatten(1)


def _scale(head_dim: int) -> float:
    """Softmax scale for base-2 exponentials."""
    return math.log2(math.e) / math.sqrt(head_dim)


def _split(q: Tensor, cache: Tensor, scale: Tensor | None, spans: Spans, visible: Tensor, out: Tensor) -> None:
    splits = -(-spans.visible // KV_SPLIT)
    given = (q, cache, spans.tables, spans.spans, spans.rows.shape[0], spans.longest, splits, visible)
    lanes = in_lanes(q, cache, spans.rows.shape[0])
    parts, stats = lane_attention.attend(*given) if lanes else _split_in_tiles(*given, scale)
    _join(parts, stats, spans.rows, visible, out)


def in_lanes(q: Tensor, cache: Tensor, places: int) -> bool:
    """Whether threads multiply for themselves: for few rows, where that gives the bits of tiles."""
    shape = (q.shape[1], cache.shape[1], cache.shape[3])
    return lane_attention.fits(q, cache, places) and (
        not q.is_cuda or lane_attention.agrees(q.device, q.dtype, *shape, lane_attention.attend, _split_in_tiles)
    )


def _split_in_tiles(
    q: Tensor,
    cache: Tensor,
    tables: Tensor,
    spans: Tensor,
    places: int,
    longest: int,
    splits: int,
    visible: Tensor,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As ``lane_attention.attend``, of any heads, and of K/V in codes with a scale."""
    _, heads, head_dim = q.shape
    _, kv_heads, _, page_size, _ = cache.shape
    tile = split_attention_tile(capability(q.device))
    row_tiles = -(-longest // (QUERY_TILE // (heads // kv_heads)))
    parts = q.new_empty(places, heads, splits, head_dim, dtype=torch.float32)
    stats = q.new_empty(places, heads, splits, 2, dtype=torch.float32)
    split_attention[(kv_heads, split_programs(splits, len(spans) * row_tiles, kv_heads))](
        q,
        cache,
        cache if scale is None else scale,
        tables,
        spans,
        visible,
        parts,
        stats,
        len(spans),
        row_tiles,
        splits,
        tables.shape[1],
        _scale(head_dim),
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        PAGE=page_size,
        SPLIT=KV_SPLIT,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_D=power_of_two(head_dim),
        COUNTED=COUNTED_SPANS if len(spans) <= COUNTED_SPANS else 0,
        ENOUGH=enough_programs(kv_heads),
        INT8=scale is not None,
        ASM=q.is_cuda,
        **launch_options(q.device, tile.warps, tile.stages),
    )
    return parts, stats


def _join(parts: Tensor, stats: Tensor, rows: Tensor, visible: Tensor, out: Tensor) -> None:
    """parts [places, heads, splits, head_dim] and stats [places, heads, splits, 2] float32 into the rows of out."""
    places, heads, splits, head_dim = parts.shape
    given = (parts, stats, rows, visible, out, splits)
    if head_dim == 128:
        lane_combine[(places, -(-heads // COMBINE_WARPS))](
            *given,
            HEADS=heads,
            HEAD_DIM=head_dim,
            SPLIT=KV_SPLIT,
            BLOCK_S=COMBINE_BLOCK,
            WARPS=COMBINE_WARPS,
            ASM=out.is_cuda,
            **launch_options(out.device, COMBINE_WARPS),
        )
    else:
        combine_splits[(places, heads)](
            *given,
            HEADS=heads,
            HEAD_DIM=head_dim,
            SPLIT=KV_SPLIT,
            BLOCK_S=COMBINE_BLOCK,
            BLOCK_D=power_of_two(head_dim),
            **launch_options(out.device, 2),
        )


def _prefill(q: Tensor, cache: Tensor, scale: Tensor | None, spans: Spans, visible: Tensor, out: Tensor) -> None:
    heads, kv_heads, page_size = q.shape[1], cache.shape[1], cache.shape[3]
    given = (q, cache, spans.tables, spans.spans, visible, spans.longest, spans.visible, out)
    if (
        scale is None
        and gathered.fits(q, cache, len(spans.spans), spans.longest, spans.visible)
        and gathered.agrees(q.device, q.dtype, heads, kv_heads, page_size, _prefill_gathered, _prefill_by_pages)
    ):
        _prefill_gathered(*given)
    else:
        _prefill_by_pages(*given, scale)


def _prefill_gathered(
    q: Tensor, cache: Tensor, tables: Tensor, spans: Tensor, visible: Tensor, longest: int, seen: int, out: Tensor
) -> None:
    head_dim = q.shape[2]
    tile = prefill_attention_tile(capability(q.device), head_dim)
    gathered.launch(q, cache, tables, spans, visible, longest, seen, out, _scale(head_dim), tile)


def _prefill_by_pages(
    q: Tensor,
    cache: Tensor,
    tables: Tensor,
    spans: Tensor,
    visible: Tensor,
    longest: int,
    seen: int,
    out: Tensor,
    scale: Tensor | None = None,
) -> None:
    _, heads, head_dim = q.shape
    _, kv_heads, _, page_size, _ = cache.shape
    tile = prefill_attention_tile(capability(q.device), head_dim)
    prefill_attention[(heads, -(-longest // tile.block_m), spans.shape[0])](
        q,
        cache,
        cache if scale is None else scale,
        tables,
        spans,
        visible,
        out,
        tables.shape[1],
        _scale(head_dim),
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        PAGE=page_size,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_D=power_of_two(head_dim),
        UNMASKED=tile.unmasked,
        INT8=scale is not None,
        ASM=q.is_cuda,
        **launch_options(q.device, tile.warps, tile.stages),
    )
