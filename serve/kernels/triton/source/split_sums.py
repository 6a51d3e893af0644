"""Device code of one split of attention over K/V pages by ``tl.dot``, in an order of sums that threads which multiply
for themselves have too (``lane_attention``).

A block is 32 positions. Each has its own largest score, weights under it, and sums from zero; its total is the sum of
its weights as the product takes them, by the same instruction. Blocks are then joined one after the other. So a block's
numbers come from one warp as well as from a tile of many. Knows no programs.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from serve.kernels.triton.source.widen import widen_int8

BLOCK = tl.constexpr(32)


@triton.jit
def pages_of(table_ptr, begin, end, FROM: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The page of each of BLOCK_N positions from begin + FROM on; past the end the last page. Page ids are scalars
    where tiles and pages fit: only then can the K and V of several tiles be on their way at once."""
    if BLOCK_N % PAGE == 0:
        place = tl.arange(0, BLOCK_N) // PAGE
        page = tl.zeros((BLOCK_N,), dtype=tl.int32)
        for i in tl.static_range(BLOCK_N // PAGE):
            line = tl.minimum(begin // PAGE + (FROM // PAGE + i), (end - 1) // PAGE)
            page = tl.where(place == i, tl.load(table_ptr + line), page)
        return page
    elif PAGE % BLOCK_N == 0:
        return tl.full((BLOCK_N,), 0, dtype=tl.int32) + tl.load(table_ptr + tl.minimum(begin + FROM, end - 1) // PAGE)
    else:
        return tl.load(table_ptr + tl.minimum(begin + FROM + tl.arange(0, BLOCK_N), end - 1) // PAGE)


@triton.jit
def above(peak):
    """What stands in for the peak of a row that has seen nothing."""
    return tl.where(peak == float("-inf"), 0.0, peak)


@triton.jit
def weights_under(score, peak, scale):
    return tl.exp2(tl.fma(score, scale, -(above(peak) * scale)))


@triton.jit
def peaks_joined(peak, more, scale):
    """The larger of two peaks of scores, and what sums under each shrink by. A difference is multiplied, so that no
    compiler makes one operation of it in one kernel and two in another."""
    top = tl.maximum(peak, more)
    return top, tl.exp2((peak - above(top)) * scale), tl.exp2((more - above(top)) * scale)


@triton.jit
def sums_joined(x, shrink, y, grow):
    """x, y [rows, any], shrink, grow [rows]."""
    return tl.fma(x, tl.broadcast_to(shrink[:, None], x.shape), y * grow[:, None])


@triton.jit
def halves_of(x, BLOCK_N: tl.constexpr):
    """[rows, 2 or 1, any] -> both [rows, any], or the same twice; [rows, 2 or 1] likewise."""
    if BLOCK_N == 2 * BLOCK:
        a, b = tl.split(tl.permute(x, (0, 2, 1)) if len(x.shape) == 3 else x)
    else:
        a = tl.reshape(x, (x.shape[0], x.shape[2])) if len(x.shape) == 3 else tl.reshape(x, (x.shape[0],))
        b = a
    return a, b


@triton.jit
def load_v(cache_ptr, page, begin, end, FROM: tl.constexpr, kv_head, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
           PAGE: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """V of one block."""
    column = tl.arange(0, BLOCK_D)
    position = begin + (FROM + tl.arange(0, BLOCK))
    line = ((page.to(tl.int64) * KV_HEADS + kv_head) * 2 * PAGE + position % PAGE) * HEAD_DIM
    inside = (position < end)[:, None] & (column < HEAD_DIM)[None, :]
    return tl.load(cache_ptr + line[:, None] + PAGE * HEAD_DIM + column[None, :], mask=inside, other=0)


@triton.jit
def pages_of_tile(table, begin, end, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Of a tile, and of its first and last block."""
    whole = pages_of(table, begin, end, 0, PAGE, BLOCK_N)
    return whole, pages_of(table, begin, end, 0, PAGE, BLOCK), pages_of(table, begin, end, BLOCK_N - BLOCK, PAGE, BLOCK)


@triton.jit
def add_tile(acc, peak, total, q, visible, pages, begin, end, cache_ptr, step_ptr, kv_head, scale,
             KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
             INT8: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """One or two blocks of positions into unnormalised sums acc as q [rows, BLOCK_D], peak [rows] and total [rows, 1 or
    32], all float32: of 16-bit weights every column of total is the same. INT8: K and V are codes; the step of a
    position multiplies its score, and its weight."""
    BLOCK_M: tl.constexpr = q.shape[0]
    BLOCK_D: tl.constexpr = q.shape[1]
    BLOCKS: tl.constexpr = BLOCK_N // BLOCK
    tl.static_assert(BLOCKS * BLOCK == BLOCK_N and BLOCKS <= 2)
    page, v_page, u_page = pages
    column = tl.arange(0, BLOCK_D)
    position = begin + tl.arange(0, BLOCK_N)
    inside = position < end
    slot = (page.to(tl.int64) * KV_HEADS + kv_head) * 2 * PAGE + position % PAGE
    k_place = cache_ptr + (slot * HEAD_DIM)[None, :] + column[:, None]
    k = tl.load(k_place, mask=inside[None, :] & (column < HEAD_DIM)[:, None], other=0)
    v = load_v(cache_ptr, v_page, begin, end, 0, kv_head, KV_HEADS, HEAD_DIM, PAGE, BLOCK_D)
    if BLOCKS == 2:
        u = load_v(cache_ptr, u_page, begin, end, BLOCK, kv_head, KV_HEADS, HEAD_DIM, PAGE, BLOCK_D)
    if INT8:
        k = widen_int8(k, q.dtype, ASM)
        v = widen_int8(v, q.dtype, ASM)
        if BLOCKS == 2:
            u = widen_int8(u, q.dtype, ASM)
    score = tl.dot(q, k)
    if INT8:
        score *= tl.load(step_ptr + slot, mask=inside, other=0.0)[None, :]
    score = tl.where(position[None, :] < visible[:, None], score, float("-inf"))
    score = tl.reshape(score, (BLOCK_M, BLOCKS, BLOCK))
    tops = tl.max(score, axis=2)
    weight = weights_under(score, tl.broadcast_to(tops[:, :, None], score.shape), scale)
    top0, top1 = halves_of(tops, BLOCK_N)
    if INT8:
        sums = tl.sum(weight, axis=2)
        step = tl.load(step_ptr + slot + PAGE, mask=inside, other=0.0)
        weight *= tl.reshape(step, (1, BLOCKS, BLOCK))
    w0, w1 = halves_of(weight.to(q.dtype), BLOCK_N)
    if INT8:
        n0, n1 = halves_of(sums, BLOCK_N)
        n0 = n0[:, None]
        n1 = n1[:, None]
    else:
        ones = tl.full((BLOCK, total.shape[1]), 1.0, dtype=q.dtype)
        n0 = tl.dot(w0, ones)
        n1 = n0
        if BLOCKS == 2:
            n1 = tl.dot(w1, ones)
    sums0 = tl.dot(w0, v)
    if BLOCKS == 2:
        sums1 = tl.dot(w1, u)
    peak, shrink, grow = peaks_joined(peak, top0, scale)
    acc = sums_joined(acc, shrink, sums0, grow)
    total = sums_joined(total, shrink, n0, grow)
    if BLOCKS == 2:
        peak, shrink, grow = peaks_joined(peak, top1, scale)
        acc = sums_joined(acc, shrink, sums1, grow)
        total = sums_joined(total, shrink, n1, grow)
    return acc, peak, total
