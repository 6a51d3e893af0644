"""Device code of prefill attention for a long chunk on Hopper: the pages of its sequence are copied side by side first,
so that the copy engine brings whole tiles, described by tensor descriptors; threads that copy scattered rows themselves
take a sixth of the time.

The sums of ``attention.prefill_attention``, in the same order: a row has the same bits. Knows 16-bit K/V and one
sequence.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from serve.kernels.triton.source.attention import soften
from serve.kernels.triton.source.launch import admit_next, await_inputs


@triton.jit(do_not_specialize=["end", "positions"])
def gather_pages(
    cache_ptr, table_ptr, out_ptr, end, positions,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: a page of K or V of one head into out [2, KV_HEADS, positions, HEAD_DIM]; zeros from ``end`` on, as
    what lies there may be anything. Grid: (positions / PAGE, KV_HEADS, 2)."""
    admit_next(PDL)
    await_inputs(PDL)
    place = tl.program_id(0)
    line = tl.program_id(1)
    half = tl.program_id(2)
    page = tl.load(table_ptr + tl.minimum(place, (end - 1) // PAGE)).to(tl.int64)
    row = tl.arange(0, PAGE)[:, None]
    column = tl.arange(0, HEAD_DIM)[None, :]
    source = cache_ptr + ((page * KV_HEADS + line) * 2 + half) * PAGE * HEAD_DIM + row * HEAD_DIM + column
    x = tl.load(source, mask=(place * PAGE + row < end) & (column < HEAD_DIM), other=0)
    first = ((half * KV_HEADS + line) * positions + place * PAGE).to(tl.int64)
    tl.store(out_ptr + (first + row) * HEAD_DIM + column, x)


@triton.jit
def attend_described(acc, peak, total, q, visible, begin, line, k_desc, v_desc, scale, BLOCK_N: tl.constexpr,
                     MASKED: tl.constexpr):  # fmt: skip
    """One tile of positions into the running softmax, as ``attention.attend_tile``."""
    k = k_desc.load([line + begin, 0])
    score = tl.dot(q, k.T)
    position = begin + tl.arange(0, BLOCK_N)
    weight, shrink, new_peak, total = soften(score, peak, total, visible, position, scale, MASKED)
    v = v_desc.load([line + begin, 0])
    acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None])
    return acc, new_peak, total


@triton.jit(do_not_specialize=["positions"])
def gathered_prefill(
    q_ptr, k_desc, v_desc, span_ptr, visible_ptr, out_ptr, positions, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M query rows of one head over all the positions they see, in K and V [KV_HEADS * positions,
    HEAD_DIM]. Grid: (HEADS, row tiles); late tiles of all heads first, as they see most."""
    await_inputs(PDL)
    head = tl.program_id(0)
    first = tl.load(span_ptr) + (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M
    last = tl.load(span_ptr + 1)
    row = (first + tl.arange(0, BLOCK_M)).to(tl.int64)
    used = row < last
    visible = tl.load(visible_ptr + row, mask=used, other=0).to(tl.int32)
    end = tl.max(visible, axis=0)
    place = (row * HEADS + head) * HEAD_DIM
    column = tl.arange(0, HEAD_DIM)
    q = tl.load(q_ptr + place[:, None] + column[None, :], mask=used[:, None], other=0.0)
    acc = tl.zeros((BLOCK_M, HEAD_DIM), dtype=tl.float32)
    peak = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    line = head // (HEADS // KV_HEADS) * positions
    # Tiles that all rows see whole need no mask; rows past the chunk see nothing that matters.
    whole = tl.min(tl.where(used, visible, end), axis=0) // BLOCK_N * BLOCK_N
    for begin in range(0, whole, BLOCK_N):
        acc, peak, total = attend_described(
            acc, peak, total, q, visible, begin, line, k_desc, v_desc, scale, BLOCK_N, False
        )
    for begin in range(whole, end, BLOCK_N):
        acc, peak, total = attend_described(
            acc, peak, total, q, visible, begin, line, k_desc, v_desc, scale, BLOCK_N, True
        )
    out = acc / tl.where(total == 0, 1.0, total)[:, None]
    tl.store(out_ptr + place[:, None] + column[None, :], out.to(out_ptr.dtype.element_ty), mask=used[:, None])
