"""Device code of y = x W^T over stored integers for few rows, a thread at a time. Knows fragments, not layers.

Every tensor here has a last axis of one element a thread, so a thread loads what its tensor-core instruction takes:
sixteen bytes of two weight rows, sixteen of a row of x, straight into registers, with no shared memory and no move
between. The first weights are asked for before x is there, the next while the present ones are multiplied. Axes before
the last are registers: [MT, NT, threads] is MT tiles of 16 features by NT tiles of 8 rows of x. A program's warps are
PARTS of K, each of WARPS / PARTS tiles of features. Where many rows need the registers, weights come through a ring of
asynchronous copies in shared memory instead, of which a thread reads only what it copied itself, so again no barrier.

A unit is what one quad of threads loads of a weight row at once, 64 bytes: 64 codes of int8, 128 of int4. Thread t of
the quad has 16 bytes of it, and which K its codes are is free as long as x has the same: int8's are 16 t .. 16 t + 15;
of int4 the four bits at 4 p of each half word are K 32 p + 8 t .. + 7 of the unit, two to a word. A row's bits follow
from the order of K, the parts and the splits, none of which depends on the rows. Without ASM (the interpreter) plain
arithmetic does what the instructions do.

Weights lie row by row or (BLOCKS) in blocks of sixteen rows by one unit, so that what a warp loads at once lies side by
side: products then take some 6 % less.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from serve.kernels.triton.source.launch import admit_next_when, await_inputs
from serve.kernels.triton.source.widen import BLOCK_ROWS, codes_of, less_of, nibbles_of, pair_of, scale_of


@triton.jit
def load_words(at, wanted, ASM: tl.constexpr):
    """Four int32 words from each pointer, nothing useful where not wanted."""
    if ASM:
        # Not pure, so that they stay ahead of the wait for the inputs.
        a, b, c, d = tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $5, 0; @p ld.global.L1::no_allocate.v4.b32 {$0, $1, $2, $3}, [$4]; }",
            "=r,=r,=r,=r,l,r", [at, wanted], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip
        return a, b, c, d
    else:
        mask = wanted != 0
        return (
            tl.load(at, mask=mask, other=0),
            tl.load(at + 1, mask=mask, other=0),
            tl.load(at + 2, mask=mask, other=0),
            tl.load(at + 3, mask=mask, other=0),
        )


@triton.jit
def load_x(at, ASM: tl.constexpr):
    """Eight numbers of x as four int32 words."""
    if ASM:
        a, b, c, d = tl.inline_asm_elementwise(
            "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];",
            "=r,=r,=r,=r,l", [at], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip
        return a, b, c, d
    else:
        return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)


@triton.jit
def load_term(at, wanted, ASM: tl.constexpr):
    if ASM:
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p ld.global.b32 $0, [$1]; }",
            "=r,l,r", [at, wanted], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        return tl.load(at, mask=wanted != 0, other=0)


@triton.jit
def load_terms(at, stride, wanted, GROUP: tl.constexpr, ASM: tl.constexpr):
    """Scale and zero of the four quarters of an int4 unit; groups are 64 or whole units."""
    first = load_term(at, wanted, ASM)
    second = load_term(at + stride, wanted, ASM) if GROUP == 64 else first
    return first, first, second, second


@triton.jit
def ring_of(thread, BYTES: tl.constexpr):
    """Address of shared memory that this kernel has beside what Triton gives it; thread: any [1, 1, threads]."""
    tl.static_assert(BYTES <= 49152, "more shared memory than a kernel may name")
    SIZE: tl.constexpr = (
        "2048"
        if BYTES <= 2048
        else "3072"
        if BYTES <= 3072
        else "4096"
        if BYTES <= 4096
        else "6144"
        if BYTES <= 6144
        else "8192"
        if BYTES <= 8192
        else "9216"
        if BYTES <= 9216
        else "12288"
        if BYTES <= 12288
        else "16384"
        if BYTES <= 16384
        else "18432"
        if BYTES <= 18432
        else "20480"
        if BYTES <= 20480
        else "24576"
        if BYTES <= 24576
        else "28672"
        if BYTES <= 28672
        else "32768"
        if BYTES <= 32768
        else "36864"
        if BYTES <= 36864
        else "40960"
        if BYTES <= 40960
        else "46080"
        if BYTES <= 46080
        else "49152"
    )
    TAKE: tl.constexpr = "{ .shared .align 16 .b8 ring[" + SIZE + "]; mov.u32 $0, ring; }"
    return tl.inline_asm_elementwise(TAKE, "=r,r", [thread], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def start_copy(to, at, wanted, BYTES: tl.constexpr):
    """Starts to copy sixteen bytes, past the L1, or four from each pointer that is wanted."""
    HOW: tl.constexpr = "cg.shared.global [$1], [$2], 16" if BYTES == 16 else "ca.shared.global [$1], [$2], 4"
    COPY: tl.constexpr = "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p cp.async." + HOW + "; mov.b32 $0, 0; }"
    tl.inline_asm_elementwise(COPY, "=r,r,l,r", [to, at, wanted], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def close_group():
    """What was started since the last call is one group."""
    tl.inline_asm_elementwise("cp.async.commit_group; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def await_groups(LEFT: tl.constexpr):
    """Waits until at most the last LEFT groups of this thread are on their way."""
    COUNT: tl.constexpr = (
        "0" if LEFT == 0 else "1" if LEFT == 1 else "2" if LEFT == 2 else "3" if LEFT == 3 else "4" if LEFT == 4
        else "5" if LEFT == 5 else "6"
    )  # fmt: skip
    WAIT: tl.constexpr = "cp.async.wait_group " + COUNT + "; // $0"
    tl.inline_asm_elementwise(WAIT, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def copied_words(at):
    a, b, c, d = tl.inline_asm_elementwise(
        "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];",
        "=r,=r,=r,=r,r", [at], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
    )  # fmt: skip
    return a, b, c, d


@triton.jit
def start_unit(ring, low_at, high_at, terms_at, other_at, unit, count, stride,
               FORMAT: tl.constexpr, GROUP: tl.constexpr, STEP: tl.constexpr, SLOTS: tl.constexpr):  # fmt: skip
    """Starts to copy a unit of features g and g + 8, and of int4 their terms; nothing from ``count`` on. ring:
    [MT, 1, threads] where this thread's sixteen bytes of the unit's slot are; SLOTS: bytes to the next such place."""
    wanted = (unit < count).to(tl.int32)
    start_copy(ring, low_at + unit * STEP, wanted, 16)
    start_copy(ring + SLOTS, high_at + unit * STEP, wanted, 16)
    if FORMAT == "int4":
        PER: tl.constexpr = 128 // GROUP
        OTHER: tl.constexpr = 2 * SLOTS + 4 * PER
        for i in tl.static_range(PER):
            group = (unit * PER + i) * stride
            start_copy(ring + 2 * SLOTS + 4 * i, terms_at + group, wanted, 4)
            start_copy(ring + OTHER + 4 * i, other_at + group, wanted, 4)
    close_group()


@triton.jit
def read_unit(ring, FORMAT: tl.constexpr, GROUP: tl.constexpr, SLOTS: tl.constexpr):
    """The words of a unit that was copied, and of int4 the terms of its four quarters."""
    a0, a1, a2, a3 = copied_words(ring)
    b0, b1, b2, b3 = copied_words(ring + SLOTS)
    t0, t1, t2, t3 = 0, 0, 0, 0
    u0, u1, u2, u3 = 0, 0, 0, 0
    if FORMAT == "int4":
        if GROUP == 64:
            t0, t2, u0, u2 = copied_words(ring + 2 * SLOTS)
            t1, t3, u1, u3 = t0, t2, u0, u2
        else:
            t0, u0, t1, u1 = copied_words(ring + 2 * SLOTS)
            t1, t2, t3 = t0, t0, t0
            u1, u2, u3 = u0, u0, u0
    return a0, a1, a2, a3, b0, b1, b2, b3, t0, t1, t2, t3, u0, u1, u2, u3


@triton.jit
def multiply(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """c + a b of one instruction m16n8k16: a [MT, 1, threads] the words of 16 features by 16 K, b [1, NT, threads] of
    16 K by 8 rows of x, c [MT, NT, threads] float32."""
    if ASM:
        KIND: tl.constexpr = "f32.f16.f16.f32" if DTYPE == tl.float16 else "f32.bf16.bf16.f32"  # noqa: SIM300
        d0, d1, d2, d3 = tl.inline_asm_elementwise(
            "mma.sync.aligned.m16n8k16.row.col." + KIND
            + " {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
            "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", [a0, a1, a2, a3, b0, b1, c0, c1, c2, c3],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
        return d0, d1, d2, d3
    else:
        MT: tl.constexpr = c0.shape[0]
        NT: tl.constexpr = c0.shape[1]
        WARPS: tl.constexpr = c0.shape[2] // 32
        l0, h0 = pair_of(a0, DTYPE)
        l1, h1 = pair_of(a1, DTYPE)
        l2, h2 = pair_of(a2, DTYPE)
        l3, h3 = pair_of(a3, DTYPE)
        # [.., K within a pair, later K, later features] of threads [eight features, four K pairs]
        parts = tl.join(tl.join(tl.join(l0, h0), tl.join(l2, h2)), tl.join(tl.join(l1, h1), tl.join(l3, h3)))
        parts = tl.reshape(parts, (MT, 1, WARPS, 8, 4, 2, 2, 2))
        a = tl.reshape(tl.permute(parts, (0, 1, 2, 7, 3, 6, 4, 5)), (MT, 1, WARPS, 16, 16, 1))
        l0, h0 = pair_of(b0, DTYPE)
        l1, h1 = pair_of(b1, DTYPE)
        parts = tl.reshape(tl.join(tl.join(l0, h0), tl.join(l1, h1)), (1, NT, WARPS, 8, 4, 2, 2))
        b = tl.reshape(tl.permute(parts, (0, 1, 2, 6, 4, 5, 3)), (1, NT, WARPS, 1, 16, 8))
        d = tl.sum(a.to(tl.float32) * b.to(tl.float32), axis=4)
        d = tl.permute(tl.reshape(d, (MT, NT, WARPS, 2, 8, 4, 2)), (0, 1, 2, 4, 5, 3, 6))
        even, odd = tl.split(tl.reshape(d, (MT, NT, WARPS * 32, 2, 2)))
        d0, d2 = tl.split(even)
        d1, d3 = tl.split(odd)
        return c0 + d0, c1 + d1, c2 + d2, c3 + d3


@triton.jit
def add_int8(s0, s1, s2, s3, a0, a1, a2, a3, b0, b1, b2, b3, x_at, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """s + one unit of int8 codes. a, b: the words of features g and g + 8 of a tile."""
    x0, x1, x2, x3 = load_x(x_at, ASM)
    y0, y1, y2, y3 = load_x(x_at + 4, ASM)
    al, ah = codes_of(a0, DTYPE, ASM)
    bl, bh = codes_of(b0, DTYPE, ASM)
    s0, s1, s2, s3 = multiply(al, bl, ah, bh, x0, x1, s0, s1, s2, s3, DTYPE, ASM)
    al, ah = codes_of(a1, DTYPE, ASM)
    bl, bh = codes_of(b1, DTYPE, ASM)
    s0, s1, s2, s3 = multiply(al, bl, ah, bh, x2, x3, s0, s1, s2, s3, DTYPE, ASM)
    al, ah = codes_of(a2, DTYPE, ASM)
    bl, bh = codes_of(b2, DTYPE, ASM)
    s0, s1, s2, s3 = multiply(al, bl, ah, bh, y0, y1, s0, s1, s2, s3, DTYPE, ASM)
    al, ah = codes_of(a3, DTYPE, ASM)
    bl, bh = codes_of(b3, DTYPE, ASM)
    return multiply(al, bl, ah, bh, y2, y3, s0, s1, s2, s3, DTYPE, ASM)


@triton.jit
def add_int4(
    s0, s1, s2, s3, a0, a1, a2, a3, b0, b1, b2, b3, t0, t1, t2, t3, u0, u1, u2, u3, x_at,
    GROUP: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """s + one unit of int4 codes; t, u: the terms of features g and g + 8. A scale multiplies what its group added up
    to."""
    zero = tl.zeros(s0.shape, dtype=tl.float32)
    c0 = zero
    c1 = zero
    c2 = zero
    c3 = zero
    for part in tl.static_range(4):
        t = t0 if part == 0 else (t1 if part == 1 else (t2 if part == 2 else t3))
        u = u0 if part == 0 else (u1 if part == 1 else (u2 if part == 2 else u3))
        x0, x1, x2, x3 = load_x(x_at + 16 * part, ASM)
        less = less_of(t, part, DTYPE, ASM)
        more = less_of(u, part, DTYPE, ASM)
        p = nibbles_of(a0, less, part, DTYPE, ASM)
        q = nibbles_of(b0, more, part, DTYPE, ASM)
        r = nibbles_of(a1, less, part, DTYPE, ASM)
        s = nibbles_of(b1, more, part, DTYPE, ASM)
        c0, c1, c2, c3 = multiply(p, q, r, s, x0, x1, c0, c1, c2, c3, DTYPE, ASM)
        p = nibbles_of(a2, less, part, DTYPE, ASM)
        q = nibbles_of(b2, more, part, DTYPE, ASM)
        r = nibbles_of(a3, less, part, DTYPE, ASM)
        s = nibbles_of(b3, more, part, DTYPE, ASM)
        c0, c1, c2, c3 = multiply(p, q, r, s, x2, x3, c0, c1, c2, c3, DTYPE, ASM)
        if part == 3 or (part + 1) * 32 % GROUP == 0:
            scale = scale_of(t, DTYPE, ASM)
            other = scale_of(u, DTYPE, ASM)
            s0 += c0 * scale
            s1 += c1 * scale
            s2 += c2 * other
            s3 += c3 * other
            c0 = zero
            c1 = zero
            c2 = zero
            c3 = zero
    return s0, s1, s2, s3


@triton.jit
def load_unit(low_at, high_at, terms_at, other_at, unit, count, stride,
              FORMAT: tl.constexpr, GROUP: tl.constexpr, STEP: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """The words of a unit of features g and g + 8, and of int4 their terms; nothing from ``count`` on."""
    wanted = (unit < count).to(tl.int32)
    a0, a1, a2, a3 = load_words(low_at + unit * STEP, wanted, ASM)
    b0, b1, b2, b3 = load_words(high_at + unit * STEP, wanted, ASM)
    if FORMAT == "int4":
        skip = unit * (128 // GROUP) * stride
        t0, t1, t2, t3 = load_terms(terms_at + skip, stride, wanted, GROUP, ASM)
        u0, u1, u2, u3 = load_terms(other_at + skip, stride, wanted, GROUP, ASM)
    else:
        t0, t1, t2, t3 = 0, 0, 0, 0
        u0, u1, u2, u3 = 0, 0, 0, 0
    return a0, a1, a2, a3, b0, b1, b2, b3, t0, t1, t2, t3, u0, u1, u2, u3


@triton.jit
def add_unit(s0, s1, s2, s3, a0, a1, a2, a3, b0, b1, b2, b3, t0, t1, t2, t3, u0, u1, u2, u3, x_at,
             FORMAT: tl.constexpr, GROUP: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    if FORMAT == "int4":
        return add_int4(
            s0, s1, s2, s3, a0, a1, a2, a3, b0, b1, b2, b3, t0, t1, t2, t3, u0, u1, u2, u3, x_at, GROUP, DTYPE, ASM
        )
    else:
        return add_int8(s0, s1, s2, s3, a0, a1, a2, a3, b0, b1, b2, b3, x_at, DTYPE, ASM)


@triton.jit
def first_word(row, words, BLOCKS: tl.constexpr):
    """Where the weight's row begins, in words; a row has ``words`` of them."""
    if BLOCKS:
        return (row // BLOCK_ROWS).to(tl.int64) * (BLOCK_ROWS * words) + row % BLOCK_ROWS * 16
    else:
        return row.to(tl.int64) * words


@triton.jit
def tile_rows(thread, BLOCK_N: tl.constexpr, LINES: tl.constexpr):
    """[MT, 1, threads]: the first of the two rows of the program's tile of features that a thread [1, 1, threads] has,
    g; the other is g + 8. LINES: warps side by side."""
    m = tl.arange(0, BLOCK_N // (16 * LINES))[:, None, None]
    return (m * LINES + thread // 32 % LINES) * 16 + thread % 32 // 4


@triton.jit
def lane_product(
    x_ptr, w_ptr, scale_ptr, low, high, first_row, rows, depth, x_stride, stride, begin, end,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
    WARPS: tl.constexpr, PARTS: tl.constexpr, RING: tl.constexpr, SHARED: tl.constexpr, LEAD: tl.constexpr,
    ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A thread's float32 sums [MT, NT, threads] over its part of units begin .. end of K, a multiple of PARTS (one or
    two) of them: of feature g and rows 2 t and 2 t + 1, then of g + 8. low, high: the weight's rows of ``tile_rows``
    and of those eight further. RING: units on their way, two or four of them in registers, or in SHARED memory."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    tl.static_assert(PARTS <= 2)
    LINES: tl.constexpr = WARPS // PARTS
    MT: tl.constexpr = BLOCK_N // (16 * LINES)
    NT: tl.constexpr = BLOCK_R // 8
    CODES: tl.constexpr = 8 if FORMAT == "int4" else 4  # of a word
    thread = tl.arange(0, 32 * WARPS)[None, None, :]
    t = thread % 4
    count = (end - begin) // PARTS
    unit = begin + thread // (32 * LINES) * count
    # From a unit to the next: words of a row, or of the rows that lie together.
    STEP: tl.constexpr = 16 * BLOCK_ROWS if BLOCKS else 16
    words = w_ptr.to(tl.pointer_type(tl.int32)) + unit * STEP + 4 * t
    low_at = words + first_word(low, depth // CODES, BLOCKS)
    high_at = words + first_word(high, depth // CODES, BLOCKS)
    skip = unit * (128 // GROUP) * stride if FORMAT == "int4" else 0
    terms_at = scale_ptr + low + skip
    other_at = scale_ptr + high + skip
    # A slot has sixteen bytes of each thread for feature g, for g + 8 and for the terms of both, MT times.
    SLOTS: tl.constexpr = 512 * WARPS
    PLACES: tl.constexpr = 2 if FORMAT == "int8" else 3
    SLOT: tl.constexpr = MT * PLACES * SLOTS
    if SHARED:
        m = tl.arange(0, MT)[:, None, None]
        ring = ring_of(thread, RING * SLOT) + thread * 16 + m * (PLACES * SLOTS)
        for u in tl.static_range(RING - 1):
            start_unit(
                ring + u * SLOT, low_at, high_at, terms_at, other_at, u, count, stride, FORMAT, GROUP, STEP, SLOTS
            )
    else:
        a0, a1, a2, a3, a4, a5, a6, a7, at0, at1, at2, at3, at4, at5, at6, at7 = load_unit(
            low_at, high_at, terms_at, other_at, 0, count, stride, FORMAT, GROUP, STEP, ASM
        )
        b0, b1, b2, b3, b4, b5, b6, b7, bt0, bt1, bt2, bt3, bt4, bt5, bt6, bt7 = load_unit(
            low_at, high_at, terms_at, other_at, 1, count, stride, FORMAT, GROUP, STEP, ASM
        )
        if RING == 4:
            c0, c1, c2, c3, c4, c5, c6, c7, ct0, ct1, ct2, ct3, ct4, ct5, ct6, ct7 = load_unit(
                low_at, high_at, terms_at, other_at, 2, count, stride, FORMAT, GROUP, STEP, ASM
            )
            d0, d1, d2, d3, d4, d5, d6, d7, dt0, dt1, dt2, dt3, dt4, dt5, dt6, dt7 = load_unit(
                low_at, high_at, terms_at, other_at, 3, count, stride, FORMAT, GROUP, STEP, ASM
            )
    await_inputs(PDL)
    line = tl.minimum(first_row + 8 * tl.arange(0, NT)[None, :, None] + thread % 32 // 4, rows - 1)
    X: tl.constexpr = 8 * CODES  # words of x of a unit
    x_at = x_ptr.to(tl.pointer_type(tl.int32)) + line.to(tl.int64) * (x_stride // 2) + unit * X + 32 // CODES * t
    s0 = tl.zeros((MT, NT, 32 * WARPS), dtype=tl.float32)
    s1 = s0
    s2 = s0
    s3 = s0
    if SHARED:
        slot = 0
        for u in range(0, count):
            if LEAD > 0:
                admit_next_when(u == count - LEAD, PDL)
            await_groups(RING - 2)
            a0, a1, a2, a3, a4, a5, a6, a7, at0, at1, at2, at3, at4, at5, at6, at7 = read_unit(
                ring + slot, FORMAT, GROUP, SLOTS
            )
            last = tl.where(slot == 0, (RING - 1) * SLOT, slot - SLOT)
            start_unit(
                ring + last, low_at, high_at, terms_at, other_at, u + RING - 1, count, stride,
                FORMAT, GROUP, STEP, SLOTS,
            )  # fmt: skip
            slot = tl.where(slot == (RING - 1) * SLOT, 0, slot + SLOT)
            s0, s1, s2, s3 = add_unit(
                s0, s1, s2, s3, a0, a1, a2, a3, a4, a5, a6, a7, at0, at1, at2, at3, at4, at5, at6, at7, x_at + u * X,
                FORMAT, GROUP, DTYPE, ASM,
            )  # fmt: skip
    else:
        for u in range(0, count - (RING - 1), RING):
            if LEAD > 0:
                admit_next_when(u >= count - LEAD, PDL)
            s0, s1, s2, s3 = add_unit(
                s0, s1, s2, s3, a0, a1, a2, a3, a4, a5, a6, a7, at0, at1, at2, at3, at4, at5, at6, at7, x_at + u * X,
                FORMAT, GROUP, DTYPE, ASM,
            )  # fmt: skip
            a0, a1, a2, a3, a4, a5, a6, a7, at0, at1, at2, at3, at4, at5, at6, at7 = load_unit(
                low_at, high_at, terms_at, other_at, u + RING, count, stride, FORMAT, GROUP, STEP, ASM
            )
            s0, s1, s2, s3 = add_unit(
                s0, s1, s2, s3, b0, b1, b2, b3, b4, b5, b6, b7, bt0, bt1, bt2, bt3, bt4, bt5, bt6, bt7,
                x_at + (u + 1) * X, FORMAT, GROUP, DTYPE, ASM,
            )  # fmt: skip
            b0, b1, b2, b3, b4, b5, b6, b7, bt0, bt1, bt2, bt3, bt4, bt5, bt6, bt7 = load_unit(
                low_at, high_at, terms_at, other_at, u + RING + 1, count, stride, FORMAT, GROUP, STEP, ASM
            )
            if RING == 4:
                s0, s1, s2, s3 = add_unit(
                    s0, s1, s2, s3, c0, c1, c2, c3, c4, c5, c6, c7, ct0, ct1, ct2, ct3, ct4, ct5, ct6, ct7,
                    x_at + (u + 2) * X, FORMAT, GROUP, DTYPE, ASM,
                )  # fmt: skip
                c0, c1, c2, c3, c4, c5, c6, c7, ct0, ct1, ct2, ct3, ct4, ct5, ct6, ct7 = load_unit(
                    low_at, high_at, terms_at, other_at, u + 6, count, stride, FORMAT, GROUP, STEP, ASM
                )
                s0, s1, s2, s3 = add_unit(
                    s0, s1, s2, s3, d0, d1, d2, d3, d4, d5, d6, d7, dt0, dt1, dt2, dt3, dt4, dt5, dt6, dt7,
                    x_at + (u + 3) * X, FORMAT, GROUP, DTYPE, ASM,
                )  # fmt: skip
                d0, d1, d2, d3, d4, d5, d6, d7, dt0, dt1, dt2, dt3, dt4, dt5, dt6, dt7 = load_unit(
                    low_at, high_at, terms_at, other_at, u + 7, count, stride, FORMAT, GROUP, STEP, ASM
                )
        u = count - count % RING
        if u < count:
            s0, s1, s2, s3 = add_unit(
                s0, s1, s2, s3, a0, a1, a2, a3, a4, a5, a6, a7, at0, at1, at2, at3, at4, at5, at6, at7, x_at + u * X,
                FORMAT, GROUP, DTYPE, ASM,
            )  # fmt: skip
        if RING == 4:
            if u + 1 < count:
                s0, s1, s2, s3 = add_unit(
                    s0, s1, s2, s3, b0, b1, b2, b3, b4, b5, b6, b7, bt0, bt1, bt2, bt3, bt4, bt5, bt6, bt7,
                    x_at + (u + 1) * X, FORMAT, GROUP, DTYPE, ASM,
                )  # fmt: skip
            if u + 2 < count:
                s0, s1, s2, s3 = add_unit(
                    s0, s1, s2, s3, c0, c1, c2, c3, c4, c5, c6, c7, ct0, ct1, ct2, ct3, ct4, ct5, ct6, ct7,
                    x_at + (u + 2) * X, FORMAT, GROUP, DTYPE, ASM,
                )  # fmt: skip
    return s0, s1, s2, s3
