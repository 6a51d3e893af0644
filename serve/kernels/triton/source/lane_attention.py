"""Device code of attention of a few query rows over K/V pages, a thread at a time. Knows no projections.

Every tensor here has a last axis of one element a thread (see ``lanes``); axes before it are registers. A program has
all positions of one split: a warp 32 of them, whose K and V its threads load straight into the registers that their
tensor-core instructions take. What is old (written by an earlier step) is on its way before the program waits for its
predecessor, and there is one softmax a warp, no running one: a program's time is that of its longest load. The numbers
are those of ``split_sums``, to the bit: a warp's positions are its block, and warps are joined in the same order.

Thread (g, t) of a warp, g = thread // 4 of eight and t = thread % 4, has of K positions g and g + 8 of each sixteen, of
V positions 2 t, 2 t + 1, 2 t + 8, 2 t + 9; scores and weights of (position, row) as [positions / 16, 1, threads]
four times: positions g and g + 8, rows 2 t and 2 t + 1. Within an instruction any order of its sixteen dimensions gives
the same bits: as sixteen bytes of K are eight dimensions of one instruction's sixteen or of the next one's, pairs of
threads exchange a half, and q has the same order. Which dimensions a thread has of V is free as long as the result says
so (``dim_of``).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from serve.kernels.triton.source.attention import count_spans
from serve.kernels.triton.source.lane_words import (
    crossed,
    keep_sums,
    kept_sums,
    load_two,
    meet,
    meet_warp,
    of_other_pair,
    over_positions,
    pick,
    refill,
    refill_run,
    store_pair,
    word_at,
)
from serve.kernels.triton.source.lanes import multiply, ring_of
from serve.kernels.triton.source.launch import admit_next, await_inputs
from serve.kernels.triton.source.split_sums import peaks_joined, weights_under
from serve.kernels.triton.source.widen import rounded

JOIN_BYTES = tl.constexpr(4096 + 64 + 512)
"""Of a warp's sums, of its peaks and totals, and of the factors that it joins all warps' sums by."""


@triton.jit
def sixteens_of(x0, x1, x2, x3, t, ASM: tl.constexpr):
    """Words of eight dimensions of the first sixteen (t < 2) or the second -> two words of the first and two of the
    second: four dimensions from 8 (t % 2) on of its own, the four behind those of the other."""
    y2 = of_other_pair(x2, ASM)
    y3 = of_other_pair(x3, ASM)
    own = t < 2
    return tl.where(own, x0, y2), tl.where(own, x1, y3), tl.where(own, y2, x0), tl.where(own, y3, x1)


@triton.jit
def pairs_of(p, q):
    """Words of two positions of V [8, 1, threads] -> the words of (p, q) of a thread's first and second dimension."""
    return (p & 0xFFFF) | (q << 16), ((p >> 16) & 0xFFFF) | (q & -65536)


@triton.jit
def dim_of(m, g):
    """The first of the two dimensions, side by side, that a thread has of tile m of the result."""
    return m // 4 * 64 + 8 * g + 2 * (m % 4)


@triton.jit
def join_warps(ring, thread, c0, c1, c2, c3, peak0, peak1, total0, total1, scale, WARPS: tl.constexpr):
    """Sums of each warp [8, 1, threads], peaks and totals of its rows [1, 1, threads] -> those of the program, each
    [1, 1, threads]: warp m has tile m of the sums. ring: shared memory of JOIN_BYTES a warp."""
    tl.static_assert(WARPS == 8, "a thread g of a warp finds the factors of warp g")
    m = tl.arange(0, 8)[:, None, None]
    warp = thread // 32
    lane = thread % 32
    g = lane // 4
    stats = ring + 4096 * WARPS + thread % 4 * 16
    factors = ring + (4096 + 64) * WARPS + warp * (64 * WARPS) + thread % 4 * 16
    # All eight threads with the same t leave the same numbers.
    keep_sums(stats + warp * 64, peak0, peak1, total0, total1)
    keep_sums(ring + warp * 4096 + m * 512 + lane * 16, c0, c1, c2, c3)
    meet()
    s0 = tl.zeros(thread.shape, dtype=tl.float32)
    s1, s2, s3, first, second = s0, s0, s0, s0, s0
    top0 = s0 - float("inf")
    top1, before0, before1 = top0, top0, top0
    for w in tl.static_range(WARPS):
        p0, p1, n0, n1 = kept_sums(stats + w * 64)
        before0 = tl.where(w == g, top0, before0)
        before1 = tl.where(w == g, top1, before1)
        top0 = tl.maximum(top0, p0)
        top1 = tl.maximum(top1, p1)
    # What all sums before a warp's shrink by, and its own, are found once in a warp: exponentials are slow.
    p0, p1, n0, n1 = kept_sums(stats + g * 64)
    p0, shrink0, grow0 = peaks_joined(before0, p0, scale)
    p1, shrink1, grow1 = peaks_joined(before1, p1, scale)
    keep_sums(factors + g * 64, shrink0, grow0, shrink1, grow1)
    meet_warp()
    for w in tl.static_range(WARPS):
        shrink0, grow0, shrink1, grow1 = kept_sums(factors + w * 64)
        p0, p1, n0, n1 = kept_sums(stats + w * 64)
        d0, d1, d2, d3 = kept_sums(ring + w * 4096 + warp * 512 + lane * 16)
        first = tl.fma(first, shrink0, n0 * grow0)
        second = tl.fma(second, shrink1, n1 * grow1)
        s0 = tl.fma(s0, shrink0, d0 * grow0)
        s1 = tl.fma(s1, shrink1, d1 * grow1)
        s2 = tl.fma(s2, shrink0, d2 * grow0)
        s3 = tl.fma(s3, shrink1, d3 * grow1)
    meet()
    return s0, s1, s2, s3, top0, top1, first, second


@triton.jit
def of_warp(x, w, WARPS: tl.constexpr):
    """x [any, 1, threads] of warp w, [any, 1, 32]; in the interpreter."""
    y = tl.reshape(x, (x.shape[0], WARPS, 32))
    return tl.sum(tl.where(tl.arange(0, WARPS)[None, :, None] == w, y, 0.0), axis=1, keep_dims=True)


@triton.jit
def join_in_order(c0, c1, c2, c3, peak0, peak1, total0, total1, scale, WARPS: tl.constexpr):
    """As ``join_warps``, in the interpreter."""
    s0 = tl.zeros((8, 1, 32), dtype=tl.float32)
    s1, s2, s3 = s0, s0, s0
    t0 = tl.zeros((1, 1, 32), dtype=tl.float32)
    t1 = t0
    p0 = t0 - float("inf")
    p1 = p0
    for w in tl.static_range(WARPS):
        p0, shrink0, grow0 = peaks_joined(p0, of_warp(peak0, w, WARPS), scale)
        p1, shrink1, grow1 = peaks_joined(p1, of_warp(peak1, w, WARPS), scale)
        t0 = t0 * shrink0 + of_warp(total0, w, WARPS) * grow0
        t1 = t1 * shrink1 + of_warp(total1, w, WARPS) * grow1
        s0 = s0 * shrink0 + of_warp(c0, w, WARPS) * grow0
        s1 = s1 * shrink1 + of_warp(c1, w, WARPS) * grow1
        s2 = s2 * shrink0 + of_warp(c2, w, WARPS) * grow0
        s3 = s3 * shrink1 + of_warp(c3, w, WARPS) * grow1
    return (
        tile_a_warp(s0), tile_a_warp(s1), tile_a_warp(s2), tile_a_warp(s3),
        of_all(p0, WARPS), of_all(p1, WARPS), of_all(t0, WARPS), of_all(t1, WARPS),
    )  # fmt: skip


@triton.jit
def tile_a_warp(x):
    """[8, 1, 32] -> [1, 1, threads], tile m with warp m."""
    return tl.reshape(x, (1, 1, 8 * 32))


@triton.jit
def of_all(x, WARPS: tl.constexpr):
    """[1, 1, 32] -> [1, 1, threads]."""
    return tl.reshape(tl.broadcast_to(x, (1, WARPS, 32)), (1, 1, WARPS * 32))


@triton.jit
def slots_of(table, base, width, kv_head, KV_HEADS: tl.constexpr, PAGE: tl.constexpr, ASM: tl.constexpr):
    """Where K of positions base, a multiple of 16, begins in a layer's cache, in rows; past the end of the table, which
    has ``width`` pages, somewhere."""
    page = word_at(table + tl.minimum(base // PAGE, width - 1), 1, ASM)
    return (page.to(tl.int64) * KV_HEADS + kv_head) * 2 * PAGE + base % PAGE


@triton.jit
def load_k(words, slot, base, begin, end, g, t, k0, k1, k2, k3, l0, l1, l2, l3, ASM: tl.constexpr):
    """A thread's words [2, 4, threads] of K of its positions from begin to end, in the place of those given: k of
    positions g, l of those eight further. slot and base [2, 1, threads]: of each sixteen positions."""
    i = tl.arange(0, 4)[None, :, None]
    at = words + (slot + g) * 64 + 4 * t + 16 * i
    place = base + g
    wanted = ((place >= begin) & (place < end)).to(tl.int32) + 0 * i
    k0, k1, k2, k3 = refill(at, wanted, k0, k1, k2, k3, ASM)
    wanted = ((place + 8 >= begin) & (place + 8 < end)).to(tl.int32) + 0 * i
    l0, l1, l2, l3 = refill(at + 8 * 64, wanted, l0, l1, l2, l3, ASM)
    return k0, k1, k2, k3, l0, l1, l2, l3


@triton.jit
def load_v(words, slot, base, HALF: tl.constexpr, begin, end, g, t, v0, v1, v2, v3, PAGE: tl.constexpr,
           ASM: tl.constexpr):  # fmt: skip
    """A thread's words [8, 1, threads] of V of its four of the first or second sixteen positions, as ``load_k``."""
    m = tl.arange(0, 2)[:, None, None]
    at = words + (pick(slot, m, HALF, 0) + PAGE + 2 * t) * 64 + 4 * g
    place = pick(base, m, HALF, 0) + 2 * t
    v0 = refill_run(at, ((place >= begin) & (place < end)).to(tl.int32), v0, ASM)
    place += 1
    v1 = refill_run(at + 64, ((place >= begin) & (place < end)).to(tl.int32), v1, ASM)
    place += 7
    v2 = refill_run(at + 8 * 64, ((place >= begin) & (place < end)).to(tl.int32), v2, ASM)
    place += 1
    v3 = refill_run(at + 9 * 64, ((place >= begin) & (place < end)).to(tl.int32), v3, ASM)
    return v0, v1, v2, v3


@triton.jit
def load_kv(words, slot, base, begin, end, g, t, kept, PAGE: tl.constexpr, ASM: tl.constexpr):
    """``load_k`` and ``load_v`` of both halves, in the place of ``kept``."""
    k0, k1, k2, k3, l0, l1, l2, l3, u0, u1, u2, u3, v0, v1, v2, v3 = kept
    k0, k1, k2, k3, l0, l1, l2, l3 = load_k(words, slot, base, begin, end, g, t, k0, k1, k2, k3, l0, l1, l2, l3, ASM)
    u0, u1, u2, u3 = load_v(words, slot, base, 0, begin, end, g, t, u0, u1, u2, u3, PAGE, ASM)
    v0, v1, v2, v3 = load_v(words, slot, base, 1, begin, end, g, t, v0, v1, v2, v3, PAGE, ASM)
    return k0, k1, k2, k3, l0, l1, l2, l3, u0, u1, u2, u3, v0, v1, v2, v3


@triton.jit
def add_values(s0, s1, s2, s3, v0, v1, v2, v3, w0, w1, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """s + sixteen positions of V times their weights, words of (position, position) of each row."""
    a, b = pairs_of(v0, v1)
    c, d = pairs_of(v2, v3)
    return multiply(a, b, c, d, w0, w1, s0, s1, s2, s3, DTYPE, ASM)


@triton.jit(do_not_specialize=["spans", "row_tiles", "splits", "table_stride", "new_rows"])
def lane_attention(
    q_ptr, cache_ptr, table_ptr, span_ptr, visible_ptr, out_ptr, stat_ptr,
    spans, row_tiles, splits, table_stride, new_rows, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr,
    COUNTED: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As ``split_attention``: one program has eight (query row, head of the group) pairs of a sequence, all heads of
    one K/V head, and every so many-th split of 256 positions. What a row sees further than new_rows positions from its
    end is an earlier step's. Grid as there."""
    WARPS: tl.constexpr = 8
    SPLIT: tl.constexpr = 32 * WARPS
    tl.static_assert(HEAD_DIM == 128 and PAGE % 16 == 0)
    MEMBERS: tl.constexpr = 8
    admit_next(PDL)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    QUERIES: tl.constexpr = MEMBERS // GROUP
    DTYPE: tl.constexpr = q_ptr.dtype.element_ty
    kv_head = tl.program_id(0)
    tiles = row_tiles
    if spans > 1:
        tiles *= tl.maximum(count_spans(span_ptr, spans, COUNTED), 1)
    share = tl.program_id(1) // tiles
    shares = tl.num_programs(1) // tiles
    tile = tl.program_id(1) % tiles
    sequence = tile // row_tiles
    # Who sees what, and where it lies, is older than the step's embedding and need not be waited for. Loads that need
    # no other come first, as each waits for memory.
    start = tl.load(span_ptr + sequence * 3, cache_modifier=".cg")
    last = tl.load(span_ptr + sequence * 3 + 1, cache_modifier=".cg")
    shift = tl.load(span_ptr + sequence * 3 + 2, cache_modifier=".cg") - start
    thread = tl.arange(0, 32 * WARPS)[None, None, :]
    g = thread % 32 // 4
    t = thread % 4
    m = tl.arange(0, 2)[:, None, None]
    mine = thread // 32 * 32 + 16 * m
    words = cache_ptr.to(tl.pointer_type(tl.int32))
    table = table_ptr + sequence.to(tl.int64) * table_stride
    base = share * SPLIT + mine
    slot = slots_of(table, base, table_stride, kv_head, KV_HEADS, PAGE, ASM)
    first = start + (tile % row_tiles) * QUERIES
    member = tl.arange(0, MEMBERS)
    row = first + member // GROUP
    used = (member < QUERIES * GROUP) & (row < last)
    sight = tl.load(visible_ptr + row, mask=used, other=0, cache_modifier=".cg").to(tl.int32)
    seen = tl.max(sight, axis=0)
    zero = tl.zeros((2, 4, 32 * WARPS), dtype=tl.int32)
    none = tl.zeros((8, 1, 32 * WARPS), dtype=tl.int32)
    empty = (zero, zero, zero, zero, zero, zero, zero, zero, none, none, none, none, none, none, none, none)
    kept = empty
    old = seen * 0
    if PDL:
        # What an earlier step wrote; the rest behind the wait.
        old = tl.maximum(seen - new_rows, 0)
        kept = load_kv(words, slot, base, 0, old, g, t, kept, PAGE, ASM)
    pair = 2 * t
    row0 = first + pair // GROUP
    row1 = first + (pair + 1) // GROUP
    used0 = ((pair < QUERIES * GROUP) & (row0 < last)).to(tl.int32)
    used1 = ((pair + 1 < QUERIES * GROUP) & (row1 < last)).to(tl.int32)
    # The low words of numbers of eight bytes.
    sights = visible_ptr.to(tl.pointer_type(tl.int32))
    seen0 = word_at(sights + 2 * row0, used0, ASM)
    seen1 = word_at(sights + 2 * row1, used1, ASM)
    count = tl.cdiv(seen, SPLIT)
    works = (share < shares) & (share < count)
    if works | (tl.program_id(0) + tl.program_id(1) == 0):
        # One program waits always: the kernel is done only after the one before it. The idle ones make room.
        await_inputs(PDL)
    if works:
        ring = thread
        if ASM:
            ring = ring_of(thread, JOIN_BYTES * WARPS)
        part0 = ((row0 + shift) * HEADS + kv_head * GROUP + pair % GROUP) * splits
        part1 = ((row1 + shift) * HEADS + kv_head * GROUP + (pair + 1) % GROUP) * splits
        asked = tl.minimum(first + g // GROUP, last - 1)
        j = tl.arange(0, 8)[:, None, None]
        i = tl.arange(0, 4)[None, :, None]
        q_at = (asked.to(tl.int64) * HEADS + kv_head * GROUP + g % GROUP) * (HEAD_DIM // 2)
        q_at = q_ptr.to(tl.pointer_type(tl.int32)) + q_at + 8 * j
        # As ``sixteens_of`` leaves those of K.
        q_at += 4 * (t % 2) + tl.where(j % 2 == t // 2, 0, 2)
        ONES: tl.constexpr = 0x3C003C00 if DTYPE == tl.float16 else 0x3F803F80  # noqa: SIM300
        one = tl.full((1, 1, 32 * WARPS), ONES, dtype=tl.int32)
        for split in range(share, count, shares):
            q0, q1 = load_two(q_at, ASM)
            base = split * SPLIT + mine
            slot = slots_of(table, base, table_stride, kv_head, KV_HEADS, PAGE, ASM)
            if old < tl.minimum(seen, split * SPLIT + SPLIT):
                kept = load_kv(words, slot, base, old, seen, g, t, kept, PAGE, ASM)
            k0, k1, k2, k3, l0, l1, l2, l3, u0, u1, u2, u3, v0, v1, v2, v3 = kept
            c0 = tl.zeros((2, 1, 32 * WARPS), dtype=tl.float32)
            c1 = c0
            c2 = c0
            c3 = c0
            for part in tl.static_range(4):
                a0, a1, b0, b1 = sixteens_of(
                    pick(k0, i, part, 1), pick(k1, i, part, 1), pick(k2, i, part, 1), pick(k3, i, part, 1), t, ASM
                )
                d0, d1, e0, e1 = sixteens_of(
                    pick(l0, i, part, 1), pick(l1, i, part, 1), pick(l2, i, part, 1), pick(l3, i, part, 1), t, ASM
                )
                c0, c1, c2, c3 = multiply(
                    a0, d0, a1, d1, pick(q0, j, 2 * part, 0), pick(q1, j, 2 * part, 0), c0, c1, c2, c3, DTYPE, ASM
                )
                c0, c1, c2, c3 = multiply(
                    b0, e0, b1, e1, pick(q0, j, 2 * part + 1, 0), pick(q1, j, 2 * part + 1, 0),
                    c0, c1, c2, c3, DTYPE, ASM,
                )  # fmt: skip
            low = base + g
            c0 = tl.where(low < seen0, c0, float("-inf"))
            c1 = tl.where(low < seen1, c1, float("-inf"))
            c2 = tl.where(low + 8 < seen0, c2, float("-inf"))
            c3 = tl.where(low + 8 < seen1, c3, float("-inf"))
            peak0 = over_positions(tl.max(tl.maximum(c0, c2), axis=0)[None, :, :], ASM)
            peak1 = over_positions(tl.max(tl.maximum(c1, c3), axis=0)[None, :, :], ASM)
            wide0 = tl.broadcast_to(peak0, c0.shape)
            wide1 = tl.broadcast_to(peak1, c0.shape)
            low0 = weights_under(c0, wide0, scale)
            low1 = weights_under(c1, wide1, scale)
            high0 = weights_under(c2, wide0, scale)
            high1 = weights_under(c3, wide1, scale)
            w0 = crossed(rounded(low0, low1, DTYPE, ASM), ASM)
            w1 = crossed(rounded(high0, high1, DTYPE, ASM), ASM)
            s0 = tl.zeros((8, 1, 32 * WARPS), dtype=tl.float32)
            s1 = s0
            s2 = s0
            s3 = s0
            total0 = tl.zeros((1, 1, 32 * WARPS), dtype=tl.float32)
            total1 = total0
            other0 = total0
            other1 = total0
            for half in tl.static_range(2):
                a = pick(w0, m, half, 0)
                b = pick(w1, m, half, 0)
                if half == 0:
                    s0, s1, s2, s3 = add_values(s0, s1, s2, s3, u0, u1, u2, u3, a, b, DTYPE, ASM)
                else:
                    s0, s1, s2, s3 = add_values(s0, s1, s2, s3, v0, v1, v2, v3, a, b, DTYPE, ASM)
                total0, total1, other0, other1 = multiply(
                    one, one, one, one, a, b, total0, total1, other0, other1, DTYPE, ASM
                )
            more = split + shares
            if more < count:
                # The next split's K and V, while this one's sums are joined.
                base = more * SPLIT + mine
                slot = slots_of(table, base, table_stride, kv_head, KV_HEADS, PAGE, ASM)
                kept = load_kv(words, slot, base, 0, seen, g, t, kept, PAGE, ASM)
            old = seen
            if ASM:
                s0, s1, s2, s3, peak0, peak1, total0, total1 = join_warps(
                    ring, thread, s0, s1, s2, s3, peak0, peak1, total0, total1, scale, WARPS
                )
            else:
                s0, s1, s2, s3, peak0, peak1, total0, total1 = join_in_order(
                    s0, s1, s2, s3, peak0, peak1, total0, total1, scale, WARPS
                )
            dim = dim_of(thread // 32, g)
            store_pair(out_ptr + (part0 + split).to(tl.int64) * HEAD_DIM + dim, s0, s2, used0, ASM)
            store_pair(out_ptr + (part1 + split).to(tl.int64) * HEAD_DIM + dim, s1, s3, used1, ASM)
            once = (thread < 4).to(tl.int32)
            store_pair(stat_ptr + (part0 + split) * 2, peak0 * scale, total0, used0 * once, ASM)
            store_pair(stat_ptr + (part1 + split) * 2, peak1 * scale, total1, used1 * once, ASM)
