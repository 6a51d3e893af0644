"""Device code of y = x W^T over 16-bit weights for few rows: weights and x through rings of asynchronous copies. Knows
fragments, not layers.

A unit is 64 positions of K: eight threads copy the 128 bytes that it takes of a row, sixteen bytes each, so memory sees
whole lines. Weights of a warp's 16 features come through a ring of its own and may be on their way before x is there; x
comes through one of all warps. Both are read back as the operands of m16n8k16. Sixteen-byte places are swizzled within
a row, so that threads meet in no bank on either way.

An instruction has sixteen positions of K that lie together, and instructions follow each other in the order of K. On
Ampere and Hopper that gives the bits of ``tl.dot``, also where that takes wgmma: every wider row tile has them too.
Axes are those of ``lanes.py``: [MT, NT, threads], all but the last registers. Without ASM (the interpreter) operands
are read from where they are, and plain arithmetic multiplies.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from serve.kernels.triton.source.lane_words import meet
from serve.kernels.triton.source.lanes import await_groups, close_group, multiply, ring_of, start_copy
from serve.kernels.triton.source.launch import admit_next_when, await_inputs

ROW_BYTES = tl.constexpr(128)
"""Of a row in a unit."""


@triton.jit
def await_units(LEFT: tl.constexpr):
    """Waits until all threads of the program see what all of them copied, but for the last LEFT groups of each."""
    await_groups(LEFT)
    meet()


@triton.jit
def weight_words(at):
    """The words of 16 features by 16 positions of K from the addresses of ``weight_place``."""
    a, b, c, d = tl.inline_asm_elementwise(
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];",
        "=r,=r,=r,=r,r", [at], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
    )  # fmt: skip
    return a, b, c, d


@triton.jit
def x_words(at):
    """The words of 16 positions of K by 8 rows of x from the addresses of ``x_place``."""
    a, b = tl.inline_asm_elementwise(
        "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {$0, $1}, [$2];",
        "=r,=r,r", [at], dtype=(tl.int32, tl.int32), is_pure=False, pack=1,
    )  # fmt: skip
    return a, b


@triton.jit
def copy_x(to, at, wanted):
    """Starts to copy sixteen bytes through the L1, where the next program of this processor finds them."""
    COPY: tl.constexpr = (
        "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p cp.async.ca.shared.global [$1], [$2], 16; mov.b32 $0, 0; }"
    )
    tl.inline_asm_elementwise(COPY, "=r,r,l,r", [to, at, wanted], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def swizzled(row, chunk):
    """Where the row's chunk of sixteen bytes is."""
    return row * ROW_BYTES + (chunk ^ (row % 8)) * 16


@triton.jit
def copy_rows(BLOCK_N: tl.constexpr, WARPS: tl.constexpr):
    """[MT, 4, threads]: rows of the program's tile of features that a thread copies sixteen bytes of."""
    m = tl.arange(0, BLOCK_N // (16 * WARPS))[:, None, None]
    thread = tl.arange(0, 32 * WARPS)[None, None, :]
    return (m * WARPS + thread // 32) * 16 + 4 * tl.arange(0, 4)[None, :, None] + thread % 32 // 8


@triton.jit
def copy_place(MT: tl.constexpr, WARPS: tl.constexpr):
    """[MT, 4, threads]: where in a slot of the ring they go: a warp's tiles lie together."""
    m = tl.arange(0, MT)[:, None, None]
    thread = tl.arange(0, 32 * WARPS)[None, None, :]
    row = 4 * tl.arange(0, 4)[None, :, None] + thread % 32 // 8
    return (thread // 32 * MT + m) * (16 * ROW_BYTES) + swizzled(row, thread % 8)


@triton.jit
def weight_place(MT: tl.constexpr, WARPS: tl.constexpr):
    """[MT, 1, threads]: where in a slot the row is that a thread has the address of, for the first sixteen positions
    of K; those of set s of the unit are at that, xor 32 s."""
    m = tl.arange(0, MT)[:, None, None]
    thread = tl.arange(0, 32 * WARPS)[None, None, :]
    return (thread // 32 * MT + m) * (16 * ROW_BYTES) + swizzled(thread % 16, thread % 32 // 16)


@triton.jit
def x_place(NT: tl.constexpr, WARPS: tl.constexpr):
    """[1, NT, threads]: as ``weight_place`` for x."""
    thread = tl.arange(0, 32 * WARPS)[None, None, :]
    return tl.arange(0, NT)[None, :, None] * (8 * ROW_BYTES) + swizzled(thread % 8, thread // 8 % 2)


@triton.jit
def start_weights(ring, at, count, MT: tl.constexpr, WARPS: tl.constexpr, RING: tl.constexpr):
    """Starts to copy the first RING - 1 units of weights. at [MT, 4, threads]: this thread's sixteen bytes of the
    first one."""
    to = ring + copy_place(MT, WARPS)
    for u in tl.static_range(RING - 1):
        start_copy(to + u * (MT * WARPS * 16 * ROW_BYTES), at + u * 64, (u < count).to(tl.int32), 16)
        close_group()


@triton.jit
def finish_stream(
    ring, at, x_ptr, first_row, rows, x_stride, begin, count,
    MT: tl.constexpr, NT: tl.constexpr, WARPS: tl.constexpr, RING: tl.constexpr, LEAD: tl.constexpr,
    DTYPE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The sums of this thread once all units have come; ``start_weights`` goes before, x is there."""
    THREADS: tl.constexpr = 32 * WARPS
    SLOT: tl.constexpr = MT * WARPS * 16 * ROW_BYTES
    X_SLOT: tl.constexpr = NT * 8 * ROW_BYTES
    thread = tl.arange(0, THREADS)[None, None, :]
    chunk = tl.arange(0, (NT * 64 + THREADS - 1) // THREADS)[None, :, None] * THREADS + thread
    row = chunk // 8
    # Columns of a row that is not there are whatever they are: nobody stores them.
    present = ((row < NT * 8) & (first_row + row < rows)).to(tl.int32)
    x_ring = ring + RING * SLOT
    x_to = x_ring + swizzled(row, chunk % 8)
    x_line = tl.minimum(first_row + row, rows - 1).to(tl.int64)
    x_at = x_ptr + x_line * x_stride + (begin * 64 + chunk % 8 * 8)
    for u in tl.static_range(RING - 1):
        copy_x(x_to + u * X_SLOT, x_at + u * 64, (u < count).to(tl.int32) & present)
        close_group()
    to = ring + copy_place(MT, WARPS)
    place = weight_place(MT, WARPS)
    w0 = ring + place
    w1 = ring + (place ^ 32)
    w2 = ring + (place ^ 64)
    w3 = ring + (place ^ 96)
    place = x_place(NT, WARPS)
    v0 = x_ring + place
    v1 = x_ring + (place ^ 32)
    v2 = x_ring + (place ^ 64)
    v3 = x_ring + (place ^ 96)
    s0 = tl.zeros((MT, NT, THREADS), dtype=tl.float32)
    s1 = s0
    s2 = s0
    s3 = s0
    slot = 0
    x_slot = 0
    for u in range(0, count):
        if LEAD > 0:
            admit_next_when(u == count - LEAD, PDL)
        await_units(RING - 2)
        # The slot before has been read by all threads, for they have met here since.
        coming = u + RING - 1
        wanted = (coming < count).to(tl.int32)
        start_copy(to + tl.where(slot == 0, (RING - 1) * SLOT, slot - SLOT), at + coming * 64, wanted, 16)
        x_last = tl.where(slot == 0, (RING - 1) * X_SLOT, x_slot - X_SLOT)
        copy_x(x_to + x_last, x_at + coming * 64, wanted & present)
        close_group()
        a0, a1, a2, a3 = weight_words(w0 + slot)
        x0, x1 = x_words(v0 + x_slot)
        b0, b1, b2, b3 = weight_words(w1 + slot)
        x2, x3 = x_words(v1 + x_slot)
        c0, c1, c2, c3 = weight_words(w2 + slot)
        x4, x5 = x_words(v2 + x_slot)
        d0, d1, d2, d3 = weight_words(w3 + slot)
        x6, x7 = x_words(v3 + x_slot)
        x_slot = tl.where(slot == (RING - 1) * SLOT, 0, x_slot + X_SLOT)
        slot = tl.where(slot == (RING - 1) * SLOT, 0, slot + SLOT)
        s0, s1, s2, s3 = multiply(a0, a1, a2, a3, x0, x1, s0, s1, s2, s3, DTYPE, True)
        s0, s1, s2, s3 = multiply(b0, b1, b2, b3, x2, x3, s0, s1, s2, s3, DTYPE, True)
        s0, s1, s2, s3 = multiply(c0, c1, c2, c3, x4, x5, s0, s1, s2, s3, DTYPE, True)
        s0, s1, s2, s3 = multiply(d0, d1, d2, d3, x6, x7, s0, s1, s2, s3, DTYPE, True)
    return s0, s1, s2, s3


@triton.jit
def plain_stream(
    x_ptr, w_ptr, low, high, first_row, rows, depth, x_stride, begin, count,
    MT: tl.constexpr, NT: tl.constexpr, WARPS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """As ``finish_stream`` with nothing on its way before (the interpreter). low, high: the weight's rows of
    ``lanes.tile_rows`` and of those eight further."""
    thread = tl.arange(0, 32 * WARPS)[None, None, :]
    first = begin * 32 + thread % 4
    words = w_ptr.to(tl.pointer_type(tl.int32))
    low_at = words + low.to(tl.int64) * (depth // 2) + first
    high_at = words + high.to(tl.int64) * (depth // 2) + first
    line = tl.minimum(first_row + 8 * tl.arange(0, NT)[None, :, None] + thread % 32 // 4, rows - 1)
    x_at = x_ptr.to(tl.pointer_type(tl.int32)) + line.to(tl.int64) * (x_stride // 2) + first
    s0 = tl.zeros((MT, NT, 32 * WARPS), dtype=tl.float32)
    s1 = s0
    s2 = s0
    s3 = s0
    for k in range(0, count * 32, 8):
        a0, a1 = tl.load(low_at + k), tl.load(high_at + k)
        a2, a3 = tl.load(low_at + k + 4), tl.load(high_at + k + 4)
        x0, x1 = tl.load(x_at + k), tl.load(x_at + k + 4)
        s0, s1, s2, s3 = multiply(a0, a1, a2, a3, x0, x1, s0, s1, s2, s3, DTYPE, False)
    return s0, s1, s2, s3


@triton.jit
def stream_product(
    x_ptr, w_ptr, lines, low, high, first_row, rows, depth, x_stride, begin, end,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, WARPS: tl.constexpr, RING: tl.constexpr, LEAD: tl.constexpr,
    ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A thread's float32 sums, as ``lanes.lane_product`` has them, over units begin .. end of K. lines: the weight's
    rows of ``copy_rows``; low, high: those of ``lanes.tile_rows`` and of those eight further. RING: units on their way,
    and one."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    MT: tl.constexpr = BLOCK_N // (16 * WARPS)
    NT: tl.constexpr = BLOCK_R // 8
    count = end - begin
    if ASM:
        thread = tl.arange(0, 32 * WARPS)[None, None, :]
        ring = ring_of(thread, RING * (BLOCK_N + BLOCK_R) * ROW_BYTES)
        at = w_ptr + lines.to(tl.int64) * depth + (begin * 64 + thread % 8 * 8)
        start_weights(ring, at, count, MT, WARPS, RING)
        await_inputs(PDL)
        s0, s1, s2, s3 = finish_stream(
            ring, at, x_ptr, first_row, rows, x_stride, begin, count, MT, NT, WARPS, RING, LEAD, DTYPE, PDL
        )
    else:
        s0, s1, s2, s3 = plain_stream(
            x_ptr, w_ptr, low, high, first_row, rows, depth, x_stride, begin, count, MT, NT, WARPS, DTYPE
        )
    return s0, s1, s2, s3
