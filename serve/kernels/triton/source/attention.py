"""Device code of attention over K/V pages: split over positions for a few query rows, whole for prefill chunks.

A row sees the first visible[row] positions of its sequence, which covers causal rows and a drafter's two-way block. A
row's bits depend on its own q, its K/V and the fixed tile and split sizes: a tile wholly past its visible end adds
exact zeros. Cache layout [pages, KV_HEADS, 2, PAGE, HEAD_DIM]; int8 codes have steps [pages, KV_HEADS, 2, PAGE].
Knows no projections and no rotary.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from serve.kernels.triton.source.launch import admit_next, await_inputs
from serve.kernels.triton.source.split_sums import BLOCK, add_tile, pages_of, pages_of_tile
from serve.kernels.triton.source.widen import widen_int8


@triton.jit
def soften(score, peak, total, visible, position, scale, MASKED: tl.constexpr):
    """A tile's scores into the running softmax: their weights, what earlier weights shrink by, new peak and total."""
    if MASKED:
        score = tl.where(position[None, :] < visible[:, None], score, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(score, axis=1) * scale)
    # A row that has seen nothing yet keeps a peak of -inf; zero stands in for it so that no -inf - -inf arises.
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak) if MASKED else new_peak
    weight = tl.exp2(score * scale - base[:, None])
    shrink = tl.exp2(peak - base)
    total = total * shrink + tl.sum(weight, axis=1)
    return weight, shrink, new_peak, total


@triton.jit
def attend_tile(acc, peak, total, q, visible, page, begin, end, cache_ptr, step_ptr, kv_head, scale,
                KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
                BLOCK_D: tl.constexpr, MASKED: tl.constexpr, INT8: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """One tile of positions into the running softmax: acc [rows, BLOCK_D], peak and total [rows], all float32. Without
    MASKED every row sees every position of the tile. INT8: K and V are codes; the step of a position multiplies its
    score, and its weight."""
    column = tl.arange(0, BLOCK_D)
    WIDE: tl.constexpr = BLOCK_D == HEAD_DIM
    position = begin + tl.arange(0, BLOCK_N)
    inside = position < end
    slot = (page.to(tl.int64) * KV_HEADS + kv_head) * 2 * PAGE + position % PAGE
    line = slot * HEAD_DIM
    k_place = cache_ptr + line[None, :] + column[:, None]
    v_place = cache_ptr + line[:, None] + PAGE * HEAD_DIM + column[None, :]
    if WIDE and not MASKED:
        k = tl.load(k_place)
    else:
        k = tl.load(k_place, mask=inside[None, :] & (column < HEAD_DIM)[:, None], other=0)
    if INT8:
        score = tl.dot(q, widen_int8(k, q.dtype, ASM)) * tl.load(step_ptr + slot, mask=inside, other=0.0)[None, :]
    else:
        score = tl.dot(q, k)
    weight, shrink, new_peak, total = soften(score, peak, total, visible, position, scale, MASKED)
    if WIDE and not MASKED:
        v = tl.load(v_place)
    else:
        v = tl.load(v_place, mask=inside[:, None] & (column < HEAD_DIM)[None, :], other=0)
    if INT8:
        weight *= tl.load(step_ptr + slot + PAGE, mask=inside, other=0.0)[None, :]
        v = widen_int8(v, q.dtype, ASM)
    acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None])
    return acc, new_peak, total


@triton.jit
def count_spans(span_ptr, spans, MOST: tl.constexpr):
    """How many spans, of at most MOST, have rows; those that have none come last."""
    i = tl.arange(0, MOST)
    start = tl.load(span_ptr + i * 3, mask=i < spans, other=0, cache_modifier=".cg")
    end = tl.load(span_ptr + i * 3 + 1, mask=i < spans, other=0, cache_modifier=".cg")
    return tl.sum((end > start).to(tl.int32), axis=0)


@triton.jit(do_not_specialize=["spans", "row_tiles", "splits", "table_stride"])
def split_attention(
    q_ptr, cache_ptr, step_ptr, table_ptr, span_ptr, visible_ptr, out_ptr, stat_ptr,
    spans, row_tiles, splits, table_stride, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, COUNTED: tl.constexpr,
    ENOUGH: tl.constexpr, INT8: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: some query rows of one span, all heads of one K/V head, every so many-th split of SPLIT positions.
    The tile's rows are (query row, head of the group) pairs. span [spans, 3] holds first row, end row and the first
    row's place in the output: the unnormalised sum in out [places, HEADS, splits, HEAD_DIM], peak and total in stat
    [places, HEADS, splits, 2]. Grid: (KV_HEADS, at least spans x row_tiles): a step that is recorded has room for many
    spans and splits. COUNTED: the most spans among which those that are there share all programs; 0: each has as many
    as any, where a program's time to count them would not be won back. ENOUGH: programs of a K/V head beyond which the
    tiles get no more."""
    admit_next(PDL)
    # Spans were sent before the step's first kernel: they need not be waited for.
    tiles = spans * row_tiles
    if COUNTED > 0:
        tiles = tl.maximum(count_spans(span_ptr, spans, COUNTED), 1) * row_tiles
    share = tl.program_id(1) // tiles
    shares = tl.minimum(tl.num_programs(1) // tiles, tl.cdiv(ENOUGH, tiles))
    if (share < shares) | (tl.program_id(0) + tl.program_id(1) == 0):
        # One program waits always, so that the kernel is done only after the one before it. The idle make room.
        await_inputs(PDL)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    QUERIES: tl.constexpr = BLOCK_M // GROUP
    tile = tl.program_id(1) % tiles
    sequence = tile // row_tiles
    kv_head = tl.program_id(0)
    start = tl.load(span_ptr + sequence * 3)
    first = start + (tile % row_tiles) * QUERIES
    last = tl.load(span_ptr + sequence * 3 + 1)
    shift = tl.load(span_ptr + sequence * 3 + 2) - start
    member = tl.arange(0, BLOCK_M)
    row = (first + member // GROUP).to(tl.int64)
    used = (member < QUERIES * GROUP) & (row < last)
    visible = tl.load(visible_ptr + row, mask=used, other=0).to(tl.int32)
    seen = tl.max(visible, axis=0)
    if (share < shares) & (share * SPLIT < seen):
        head = kv_head * GROUP + member % GROUP
        column = tl.arange(0, BLOCK_D)
        wide = used[:, None] & (column < HEAD_DIM)[None, :]
        place = row * HEADS + head
        q = tl.load(q_ptr + place[:, None] * HEAD_DIM + column[None, :], mask=wide, other=0.0)
        table = table_ptr + sequence.to(tl.int64) * table_stride
        acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
        peak = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((BLOCK_M, 1 if INT8 else BLOCK), dtype=tl.float32)
        TILES: tl.constexpr = SPLIT // BLOCK_N
        # One loop over the tiles of all splits, so that the next split's K and V are on their way at the end of one.
        last_split = share + (tl.cdiv(seen, SPLIT) - 1 - share) // shares * shares
        before = (last_split - share) // shares * TILES
        count = before + tl.cdiv(tl.minimum(seen - last_split * SPLIT, SPLIT), BLOCK_N)
        pages = pages_of_tile(table, share * SPLIT, seen, PAGE, BLOCK_N)
        for i in range(count):
            split = share + i // TILES * shares
            begin = split * SPLIT + i % TILES * BLOCK_N
            following = (share + (i + 1) // TILES * shares) * SPLIT + (i + 1) % TILES * BLOCK_N
            coming = pages_of_tile(table, following, seen, PAGE, BLOCK_N)
            # Sums of the split before shrink to nothing.
            peak = tl.where(i % TILES == 0, float("-inf"), peak)
            acc, peak, total = add_tile(
                acc, peak, total, q, visible, pages, begin, seen, cache_ptr, step_ptr, kv_head, scale,
                KV_HEADS, HEAD_DIM, PAGE, BLOCK_N, INT8, ASM,
            )  # fmt: skip
            pages = coming
            if (i % TILES == TILES - 1) | (i == count - 1):
                part = (place + shift * HEADS) * splits + split
                tl.store(out_ptr + part[:, None] * HEAD_DIM + column[None, :], acc, mask=wide)
                tl.store(stat_ptr + part * 2, peak * scale, mask=used)
                tl.store(stat_ptr + part * 2 + 1, tl.max(total, axis=1), mask=used)


@triton.jit(do_not_specialize=["splits"])
def combine_splits(
    part_ptr, stat_ptr, row_ptr, visible_ptr, out_ptr, splits,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, SPLIT: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program a (place, head): the parts of the splits that row row_ptr[place] sees, BLOCK_S at a time in
    order."""
    admit_next(PDL)
    await_inputs(PDL)
    row = tl.load(row_ptr + tl.program_id(0))
    place = tl.program_id(0).to(tl.int64) * HEADS + tl.program_id(1)
    target = row * HEADS + tl.program_id(1)
    count = tl.cdiv(tl.load(visible_ptr + row).to(tl.int32), SPLIT)
    column = tl.arange(0, BLOCK_D)
    acc = tl.zeros((BLOCK_D,), dtype=tl.float32)
    peak = tl.full((1,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((1,), dtype=tl.float32)
    for first in range(0, count, BLOCK_S):
        split = first + tl.arange(0, BLOCK_S)
        mask = split < count
        line = place * splits + split
        top = tl.load(stat_ptr + line * 2, mask=mask, other=float("-inf"))
        sums = tl.load(stat_ptr + line * 2 + 1, mask=mask, other=0.0)
        part = tl.load(
            part_ptr + line[:, None] * HEAD_DIM + column[None, :],
            mask=mask[:, None] & (column < HEAD_DIM)[None, :],
            other=0.0,
        )
        new_peak = tl.maximum(peak, tl.max(top, axis=0))
        weight = tl.exp2(top - new_peak)
        shrink = tl.exp2(peak - new_peak)
        acc = acc * shrink + tl.sum(part * weight[:, None], axis=0)
        total = total * shrink + tl.sum(sums * weight, axis=0)
        peak = new_peak
    acc = acc / tl.where(total == 0, 1.0, total)
    tl.store(out_ptr + target * HEAD_DIM + column, acc.to(out_ptr.dtype.element_ty), mask=column < HEAD_DIM)


@triton.jit(do_not_specialize=["table_stride"])
def prefill_attention(
    q_ptr, cache_ptr, step_ptr, table_ptr, span_ptr, visible_ptr, out_ptr,
    table_stride, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, UNMASKED: tl.constexpr, INT8: tl.constexpr,
    ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M query rows of one sequence and head over all the positions they see.
    Grid: (HEADS, row tiles of the longest chunk, sequences); late tiles of all heads first, as they see most: the last
    programs to run are short ones."""
    await_inputs(PDL)
    sequence = tl.program_id(2)
    head = tl.program_id(0)
    first = tl.load(span_ptr + sequence * 3) + (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M
    last = tl.load(span_ptr + sequence * 3 + 1)
    if first < last:
        row = (first + tl.arange(0, BLOCK_M)).to(tl.int64)
        used = row < last
        visible = tl.load(visible_ptr + row, mask=used, other=0).to(tl.int32)
        end = tl.max(visible, axis=0)
        column = tl.arange(0, BLOCK_D)
        wide = used[:, None] & (column < HEAD_DIM)[None, :]
        place = (row * HEADS + head) * HEAD_DIM
        q = tl.load(q_ptr + place[:, None] + column[None, :], mask=wide, other=0.0)
        acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
        peak = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((BLOCK_M,), dtype=tl.float32)
        table = table_ptr + sequence.to(tl.int64) * table_stride
        kv_head = head // (HEADS // KV_HEADS)
        # Tiles that all rows see whole need no mask (UNMASKED); rows past the chunk see nothing that matters.
        whole = tl.min(tl.where(used, visible, end), axis=0) // BLOCK_N * BLOCK_N if UNMASKED else 0
        page = pages_of(table, 0, end, 0, PAGE, BLOCK_N)
        for begin in range(0, whole, BLOCK_N):
            coming = pages_of(table, begin + BLOCK_N, end, 0, PAGE, BLOCK_N)
            acc, peak, total = attend_tile(
                acc, peak, total, q, visible, page, begin, end, cache_ptr, step_ptr, kv_head, scale,
                KV_HEADS, HEAD_DIM, PAGE, BLOCK_N, BLOCK_D, False, INT8, ASM,
            )  # fmt: skip
            page = coming
        page = pages_of(table, whole, end, 0, PAGE, BLOCK_N)
        for begin in range(whole, end, BLOCK_N):
            coming = pages_of(table, begin + BLOCK_N, end, 0, PAGE, BLOCK_N)
            acc, peak, total = attend_tile(
                acc, peak, total, q, visible, page, begin, end, cache_ptr, step_ptr, kv_head, scale,
                KV_HEADS, HEAD_DIM, PAGE, BLOCK_N, BLOCK_D, True, INT8, ASM,
            )  # fmt: skip
            page = coming
        out = acc / tl.where(total == 0, 1.0, total)[:, None]
        tl.store(out_ptr + place[:, None] + column[None, :], out.to(out_ptr.dtype.element_ty), mask=wide)
