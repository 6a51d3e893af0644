"""Device code of residual add with RMS norm: one program a row. Knows no layers.

A thread has up to three chunks of four numbers, a program's width apart. All loads of a row are on their way at once,
sixteen bytes each; the warps' sums of squares meet in shared memory at one barrier. Tensors have one element a thread;
plain loads and a plain sum would be given layouts of their own and be moved between them, so these are assembly.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from serve.kernels.triton.source.lane_combine import load_four, store_words
from serve.kernels.triton.source.launch import admit_next, await_inputs
from serve.kernels.triton.source.widen import pair_of, rounded


@triton.jit
def store_four(at, a, b, c, d, wanted):
    """Four float32 to each pointer that is wanted."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $6, 0; @p st.global.v4.f32 [$1], {$2, $3, $4, $5}; mov.b32 $0, 0; }",
        "=r,l,f,f,f,f,r", [at.to(tl.int64), a, b, c, d, wanted], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def load_elements(at, wanted):
    """Four elements from each pointer as float32, zeros where not wanted."""
    DTYPE: tl.constexpr = at.dtype.element_ty
    if at.dtype.element_ty == tl.float32:
        a, b, c, d = load_four(at, wanted, True)
        return a, b, c, d
    else:
        low, high = tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $3, 0; mov.b32 $0, 0; mov.b32 $1, 0; "
            "@p ld.global.v2.b32 {$0, $1}, [$2]; }",
            "=&r,=&r,l,r", [at.to(tl.int64), wanted], dtype=(tl.int32, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip
        a, b = pair_of(low, DTYPE)
        c, d = pair_of(high, DTYPE)
        return a.to(tl.float32), b.to(tl.float32), c.to(tl.float32), d.to(tl.float32)


@triton.jit
def store_elements(ptr, start, unit, a, b, c, d, wanted):
    """Four elements in the pointer's type, those of ``unit`` behind the even place ``start``."""
    DTYPE: tl.constexpr = ptr.dtype.element_ty
    if ptr.dtype.element_ty == tl.float32:
        store_four(ptr + (start + 4 * unit), a, b, c, d, wanted)
    else:
        at = ptr.to(tl.pointer_type(tl.int32)) + ((start >> 1) + 2 * unit)
        store_words(at, rounded(a, b, DTYPE, True), rounded(c, d, DTYPE, True), wanted, True)


def _sum_text(warps: int) -> str:
    """Assembly that adds so many float32 at [$1] in pairs into $0, once all warps have come there."""
    names = [f"s{i}" for i in range(warps // 4)]
    text = "{ .reg .f32 a, b, c, d, " + ", ".join(names) + "; bar.sync 0; "
    for i, name in enumerate(names):
        text += f"ld.shared.v4.f32 {{a, b, c, d}}, [$1+{16 * i}]; "
        text += f"add.f32 a, a, b; add.f32 c, c, d; add.f32 {name}, a, c; "
    while len(names) > 1:
        text += "".join(f"add.f32 {one}, {one}, {two}; " for one, two in zip(names[::2], names[1::2], strict=True))
        names = names[::2]
    return text + "mov.b32 $0, s0; }"


SUM_4, SUM_8, SUM_16, SUM_32 = (tl.constexpr(_sum_text(warps)) for warps in (4, 8, 16, 32))
SHARE = tl.constexpr(
    "{ .shared .align 16 .b8 room[128]; .reg .f32 a, b; .reg .b32 at, thread; .reg .pred p; mov.u32 $0, room; "
    "shfl.sync.bfly.b32 a, $1, 16, 31, -1; add.f32 a, a, $1; shfl.sync.bfly.b32 b, a, 8, 31, -1; add.f32 a, a, b; "
    "shfl.sync.bfly.b32 b, a, 4, 31, -1; add.f32 a, a, b; shfl.sync.bfly.b32 b, a, 2, 31, -1; add.f32 a, a, b; "
    "shfl.sync.bfly.b32 b, a, 1, 31, -1; add.f32 a, a, b; mov.u32 thread, %tid.x; shr.u32 at, thread, 5; "
    "mad.lo.u32 at, at, 4, $0; and.b32 thread, thread, 31; setp.eq.u32 p, thread, 0; @p st.shared.f32 [at], a; }"
)


@triton.jit
def share(x):
    """Leaves the sum of x over each warp in shared memory, whose address it returns."""
    return tl.inline_asm_elementwise(SHARE, "=&r,f", [x], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def sum_of(room, WARPS: tl.constexpr):
    """The sum of what all warps share, in a fixed order."""
    HOW: tl.constexpr = SUM_4 if WARPS == 4 else SUM_8 if WARPS == 8 else SUM_16 if WARPS == 16 else SUM_32
    return tl.inline_asm_elementwise(HOW, "=&f,r", [room], dtype=tl.float32, is_pure=False, pack=1)


@triton.jit
def new_residual(delta_ptr, residual_ptr, place, delta_stride, wanted, SPLITS: tl.constexpr):
    """residual + delta, whose SPLITS parts are added in order, at four places."""
    x0, x1, x2, x3 = load_four(residual_ptr + place, wanted, True)
    if SPLITS > 0:
        a0, a1, a2, a3 = load_elements(delta_ptr + place, wanted)
        for part in tl.static_range(1, SPLITS):
            b0, b1, b2, b3 = load_elements(delta_ptr + (place + part * delta_stride.to(tl.int64)), wanted)
            a0 += b0
            a1 += b1
            a2 += b2
            a3 += b3
        x0 += a0
        x1 += a1
        x2 += a2
        x3 += a3
    return x0, x1, x2, x3


@triton.jit
def keep_residual(
    residual_ptr, tap_ptr, start, tap, unit, x0, x1, x2, x3, wanted,
    SPLITS: tl.constexpr, HAS_TAP: tl.constexpr,
):  # fmt: skip
    if SPLITS > 0:
        store_elements(residual_ptr, start, unit, x0, x1, x2, x3, wanted)
        if HAS_TAP:
            store_elements(tap_ptr, tap, unit, x0, x1, x2, x3, wanted)


@triton.jit
def squares(x0, x1, x2, x3):
    return tl.fma(x3, x3, tl.fma(x2, x2, tl.fma(x1, x1, x0 * x0)))


@triton.jit
def chunk(weight_ptr, NUMBER: tl.constexpr, THREADS: tl.constexpr, WIDTH: tl.constexpr):
    """The unit of four numbers that a thread has in the chunk of that number, whether it is there, and its weights."""
    unit = NUMBER * THREADS + tl.arange(0, THREADS)
    if (NUMBER + 1) * THREADS * 4 <= WIDTH:
        there = tl.full((THREADS,), 1, tl.int32)
    else:
        there = (unit < WIDTH // 4).to(tl.int32)
    w0, w1, w2, w3 = load_four(weight_ptr + 4 * unit, there, True)
    return unit, there, w0, w1, w2, w3


@triton.jit
def norm_row(
    delta_ptr, residual_ptr, weight_ptr, normed_ptr, tap_ptr, row, delta_stride, tap_stride, eps,
    WIDTH: tl.constexpr, SPLITS: tl.constexpr, HAS_TAP: tl.constexpr, THREADS: tl.constexpr, CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One row; waits for the inputs."""
    ua, ia, a0, a1, a2, a3 = chunk(weight_ptr, 0, THREADS, WIDTH)
    if CHUNKS > 1:
        ub, ib, b0, b1, b2, b3 = chunk(weight_ptr, 1, THREADS, WIDTH)
    if CHUNKS > 2:
        uc, ic, c0, c1, c2, c3 = chunk(weight_ptr, 2, THREADS, WIDTH)
    start = row * WIDTH
    tap = row * tap_stride
    await_inputs(PDL)
    x0, x1, x2, x3 = new_residual(delta_ptr, residual_ptr, start + 4 * ua, delta_stride, ia, SPLITS)
    s = squares(x0, x1, x2, x3)
    if CHUNKS > 1:
        y0, y1, y2, y3 = new_residual(delta_ptr, residual_ptr, start + 4 * ub, delta_stride, ib, SPLITS)
        s += squares(y0, y1, y2, y3)
    if CHUNKS > 2:
        z0, z1, z2, z3 = new_residual(delta_ptr, residual_ptr, start + 4 * uc, delta_stride, ic, SPLITS)
        s += squares(z0, z1, z2, z3)
    room = share(s)
    keep_residual(residual_ptr, tap_ptr, start, tap, ua, x0, x1, x2, x3, ia, SPLITS, HAS_TAP)
    if CHUNKS > 1:
        keep_residual(residual_ptr, tap_ptr, start, tap, ub, y0, y1, y2, y3, ib, SPLITS, HAS_TAP)
    if CHUNKS > 2:
        keep_residual(residual_ptr, tap_ptr, start, tap, uc, z0, z1, z2, z3, ic, SPLITS, HAS_TAP)
    scale = tl.rsqrt(tl.fma(sum_of(room, THREADS // 32), 1 / WIDTH, eps))
    store_elements(normed_ptr, start, ua, x0 * scale * a0, x1 * scale * a1, x2 * scale * a2, x3 * scale * a3, ia)
    if CHUNKS > 1:
        store_elements(normed_ptr, start, ub, y0 * scale * b0, y1 * scale * b1, y2 * scale * b2, y3 * scale * b3, ib)
    if CHUNKS > 2:
        store_elements(normed_ptr, start, uc, z0 * scale * c0, z1 * scale * c1, z2 * scale * c2, z3 * scale * c3, ic)


@triton.jit
def plain_row(
    delta_ptr, residual_ptr, weight_ptr, normed_ptr, tap_ptr, row, delta_stride, tap_stride, eps,
    WIDTH: tl.constexpr, SPLITS: tl.constexpr, HAS_TAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """As ``norm_row`` for the interpreter."""
    column = tl.arange(0, BLOCK)
    mask = column < WIDTH
    x = tl.load(residual_ptr + row * WIDTH + column, mask=mask, other=0.0)
    if SPLITS > 0:
        delta = tl.load(delta_ptr + row * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
        for part in tl.static_range(1, SPLITS):
            place = part * delta_stride.to(tl.int64) + row * WIDTH
            delta += tl.load(delta_ptr + place + column, mask=mask, other=0.0).to(tl.float32)
        x += delta
        tl.store(residual_ptr + row * WIDTH + column, x, mask=mask)
        if HAS_TAP:
            tl.store(tap_ptr + row * tap_stride + column, x.to(tap_ptr.dtype.element_ty), mask=mask)
    x *= tl.rsqrt(tl.sum(x * x, axis=0) / WIDTH + eps) * tl.load(weight_ptr + column, mask=mask, other=0.0)
    tl.store(normed_ptr + row * WIDTH + column, x.to(normed_ptr.dtype.element_ty), mask=mask)


@triton.jit
def add_rms_norm(
    delta_ptr, residual_ptr, weight_ptr, normed_ptr, tap_ptr, delta_stride, tap_stride, eps,
    WIDTH: tl.constexpr, SPLITS: tl.constexpr, HAS_TAP: tl.constexpr, THREADS: tl.constexpr, CHUNKS: tl.constexpr,
    ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """residual[row] += delta summed over its SPLITS parts in order (0: no delta); normed = residual / rms * weight.
    Parts lie delta_stride elements apart. With HAS_TAP the new residual is also stored at tap_ptr + row *
    tap_stride. WIDTH: of a row, in CHUNKS of four for each of THREADS threads. ASM: not interpreted. Grid: (rows,)."""
    admit_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    if ASM:
        norm_row(
            delta_ptr, residual_ptr, weight_ptr, normed_ptr, tap_ptr, row, delta_stride, tap_stride, eps,
            WIDTH, SPLITS, HAS_TAP, THREADS, CHUNKS, PDL,
        )  # fmt: skip
    else:
        plain_row(
            delta_ptr, residual_ptr, weight_ptr, normed_ptr, tap_ptr, row, delta_stride, tap_stride, eps,
            WIDTH, SPLITS, HAS_TAP, 4 * THREADS,
        )  # fmt: skip
