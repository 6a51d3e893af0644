"""Device code of tensors whose last axis is one element a thread: what threads load, exchange and leave in shared
memory. Axes before the last are registers (see ``lanes``). Knows no attention.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def refill(at, wanted, a, b, c, d, ASM: tl.constexpr):
    """Four int32 words from each pointer that is wanted, in the place of a, b, c and d."""
    if ASM:
        # Not pure, so that they stay ahead of the wait for the inputs.
        a, b, c, d = tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $5, 0; @p ld.global.L1::no_allocate.v4.b32 {$0, $1, $2, $3}, [$4]; }",
            "=r,=r,=r,=r,l,r,0,1,2,3", [at, wanted, a, b, c, d],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip
        return a, b, c, d
    else:
        mask = wanted != 0
        return (
            tl.where(mask, tl.load(at, mask=mask, other=0), a),
            tl.where(mask, tl.load(at + 1, mask=mask, other=0), b),
            tl.where(mask, tl.load(at + 2, mask=mask, other=0), c),
            tl.where(mask, tl.load(at + 3, mask=mask, other=0), d),
        )


@triton.jit
def refill_run(row, wanted, v, ASM: tl.constexpr):
    """A thread's words of a row of V, [8, 1, threads], from each row [1, 1, threads] that is wanted, in the place of v:
    the first four and those 32 further. Eight elements are side by side in a thread's registers: one assembly statement
    has them all."""
    m = tl.arange(0, 8)[:, None, None]
    if ASM:
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $16, 0; @p ld.global.L1::no_allocate.v4.b32 {$0, $1, $2, $3}, [$8]; "
            "@p ld.global.L1::no_allocate.v4.b32 {$4, $5, $6, $7}, [$8 + 128]; }",
            "=r,=r,=r,=r,=r,=r,=r,=r,l,l,l,l,l,l,l,l,r,r,r,r,r,r,r,r,0,1,2,3,4,5,6,7",
            [row + 0 * m, wanted + 0 * m, v], dtype=tl.int32, is_pure=False, pack=8,
        )  # fmt: skip
    else:
        at = row + m % 4 + m // 4 * 32
        mask = (wanted + 0 * m) != 0
        return tl.where(mask, tl.load(at, mask=mask, other=0), v)


@triton.jit
def word_at(at, wanted, ASM: tl.constexpr):
    """The int32 word at each pointer, past the L1; zero where not wanted. A plain load would be given a layout of its
    own."""
    if ASM:
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b32 $0, 0; @p ld.global.cg.b32 $0, [$1]; }",
            "=&r,l,r", [at, wanted], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        return tl.load(at, mask=wanted != 0, other=0)


@triton.jit
def load_two(at, ASM: tl.constexpr):
    """Two int32 words from each pointer."""
    if ASM:
        a, b = tl.inline_asm_elementwise(
            "ld.global.v2.b32 {$0, $1}, [$2];", "=r,=r,l", [at], dtype=(tl.int32, tl.int32), is_pure=False, pack=1
        )
        return a, b
    else:
        return tl.load(at), tl.load(at + 1)


@triton.jit
def store_pair(at, a, b, wanted, ASM: tl.constexpr):
    """Two float32 side by side to each pointer that is wanted."""
    if ASM:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $4, 0; @p st.global.v2.f32 [$1], {$2, $3}; mov.b32 $0, 0; }",
            "=r,l,f,f,r", [at.to(tl.int64), a, b, wanted], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.store(at, a, mask=wanted != 0)
        tl.store(at + 1, b, mask=wanted != 0)


@triton.jit
def pick(x, index, PLACE: tl.constexpr, AXIS: tl.constexpr):
    """x at PLACE of a register axis, whose indices are ``index``: no instruction at all, as both are constants."""
    bits = x.to(tl.int32, bitcast=True) if x.dtype == tl.float32 else x
    bits = tl.expand_dims(tl.sum(tl.where(index == PLACE, bits, 0), axis=AXIS), AXIS)
    return bits.to(tl.float32, bitcast=True) if x.dtype == tl.float32 else bits


@triton.jit
def over_positions(x, ASM: tl.constexpr):
    """The largest of x [1, 1, threads] over the eight threads of a warp that have the same t."""
    if ASM:
        return tl.inline_asm_elementwise(
            "{ .reg .f32 a, b; shfl.sync.bfly.b32 a, $1, 4, 31, -1; max.f32 a, a, $1; "
            "shfl.sync.bfly.b32 b, a, 8, 31, -1; max.f32 a, a, b; "
            "shfl.sync.bfly.b32 b, a, 16, 31, -1; max.f32 $0, a, b; }",
            "=f,f", [x], dtype=tl.float32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        y = tl.reshape(x, (x.shape[1], x.shape[2] // 32, 8, 4))
        y = tl.max(y, axis=2, keep_dims=True)
        return tl.reshape(tl.broadcast_to(y, (x.shape[1], x.shape[2] // 32, 8, 4)), x.shape)


@triton.jit
def crossed(word, ASM: tl.constexpr):
    """Words of (row 2 t, row 2 t + 1) at position g -> words of (position 2 t, position 2 t + 1) of row g."""
    if ASM:
        return tl.inline_asm_elementwise(
            "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [word], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        TILES: tl.constexpr = word.shape[0] * word.shape[1] * word.shape[2] // 32
        halves = tl.join(word & 0xFFFF, (word >> 16) & 0xFFFF)
        halves = tl.permute(tl.reshape(halves, (TILES, 8, 8)), (0, 2, 1))
        low, high = tl.split(tl.reshape(halves, (TILES, 8, 4, 2)))
        return tl.reshape(low | (high << 16), word.shape)


@triton.jit
def of_other_pair(x, ASM: tl.constexpr):
    """The word that thread t ^ 2 of the same quad has."""
    if ASM:
        return tl.inline_asm_elementwise(
            "shfl.sync.bfly.b32 $0, $1, 2, 31, -1;", "=r,r", [x], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        y = tl.reshape(x, (x.shape[0], x.shape[1], x.shape[2] // 4, 2, 2))
        place = tl.arange(0, 2)[None, None, None, :, None]
        low = tl.sum(tl.where(place == 0, y, 0), axis=3, keep_dims=True)
        high = tl.sum(tl.where(place == 1, y, 0), axis=3, keep_dims=True)
        return tl.reshape(tl.where(place == 0, high, low), x.shape)


@triton.jit
def keep_sums(at, c0, c1, c2, c3):
    """Four numbers into each place of shared memory."""
    tl.inline_asm_elementwise(
        "st.shared.v4.f32 [$1], {$2, $3, $4, $5}; mov.b32 $0, 0;", "=r,r,f,f,f,f", [at, c0, c1, c2, c3],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def kept_sums(at):
    a, b, c, d = tl.inline_asm_elementwise(
        "ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];", "=f,=f,=f,=f,r", [at],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=False, pack=1,
    )  # fmt: skip
    return a, b, c, d


@triton.jit
def meet():
    """All threads of the program have come here, and see what the others left in shared memory."""
    tl.inline_asm_elementwise("bar.sync 0; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def meet_warp():
    """As ``meet``, of the threads of a warp alone."""
    tl.inline_asm_elementwise("bar.warp.sync -1; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
