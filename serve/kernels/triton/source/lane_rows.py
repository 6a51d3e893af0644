"""Device code of a row's heads of 128 dimensions, a warp a head: sum of the product's parts, head norm, rotary, K/V
write. Tensors have a last axis of one element a thread (see ``lanes``); lane l of a warp has dimensions 4 l .. 4 l + 3
of its head. Knows no attention.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from serve.kernels.triton.source.lane_combine import load_four, store_words
from serve.kernels.triton.source.launch import admit_next, await_inputs
from serve.kernels.triton.source.norm import squares
from serve.kernels.triton.source.widen import rounded


@triton.jit
def store_word(at, a, wanted, ASM: tl.constexpr):
    """An int32 word to each pointer that is wanted."""
    if ASM:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.global.b32 [$1], $2; mov.b32 $0, 0; }",
            "=r,l,r,r", [at.to(tl.int64), a, wanted], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.store(at, a, mask=wanted != 0)


@triton.jit
def over_warp(x, MAX: tl.constexpr, ASM: tl.constexpr):
    """The largest, or the sum, of x [1, 1, threads] over each warp."""
    if ASM:
        OP: tl.constexpr = "max.f32" if MAX else "add.f32"
        return tl.inline_asm_elementwise(
            "{ .reg .f32 a, b; shfl.sync.bfly.b32 a, $1, 16, 31, -1; " + OP + " a, a, $1; "
            "shfl.sync.bfly.b32 b, a, 8, 31, -1; " + OP + " a, a, b; "
            "shfl.sync.bfly.b32 b, a, 4, 31, -1; " + OP + " a, a, b; "
            "shfl.sync.bfly.b32 b, a, 2, 31, -1; " + OP + " a, a, b; "
            "shfl.sync.bfly.b32 b, a, 1, 31, -1; " + OP + " $0, a, b; }",
            "=f,f", [x], dtype=tl.float32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        WARPS: tl.constexpr = x.shape[2] // 32
        y = tl.reshape(x, (WARPS, 32))
        y = tl.max(y, axis=1, keep_dims=True) if MAX else tl.sum(y, axis=1, keep_dims=True)
        return tl.reshape(tl.broadcast_to(y, (WARPS, 32)), x.shape)


@triton.jit
def head_of(
    qkv_ptr, place, stride, wanted, turned, w0, w1, w2, w3, c0, s0, c1, s1, eps,
    PARTS: tl.constexpr, HAS_NORM: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Four dimensions of a head whose PARTS lie ``stride`` elements apart from ``place`` on; where ``turned``, normed
    by weights w and rotated by the cosines c and sines s of its two pairs."""
    x0, x1, x2, x3 = load_four(qkv_ptr + place, wanted, ASM)
    for part in tl.static_range(1, PARTS):
        a, b, c, d = load_four(qkv_ptr + (place + part * stride.to(tl.int64)), wanted, ASM)
        x0 += a
        x1 += b
        x2 += c
        x3 += d
    y0, y1, y2, y3 = x0, x1, x2, x3
    if HAS_NORM:
        scale = tl.rsqrt(tl.fma(over_warp(squares(x0, x1, x2, x3), False, ASM), 1 / 128, eps))
        y0 = x0 * scale * w0
        y1 = x1 * scale * w1
        y2 = x2 * scale * w2
        y3 = x3 * scale * w3
    z0 = tl.fma(y0, c0, -(y1 * s0))
    z1 = tl.fma(y1, c0, y0 * s0)
    z2 = tl.fma(y2, c1, -(y3 * s1))
    z3 = tl.fma(y3, c1, y2 * s1)
    return tl.where(turned, z0, x0), tl.where(turned, z1, x1), tl.where(turned, z2, x2), tl.where(turned, z3, x3)


@triton.jit
def coded(x0, x1, x2, x3, ASM: tl.constexpr):
    """A head as int8 codes: a word of four, and the head's step."""
    largest = tl.maximum(tl.maximum(tl.abs(x0), tl.abs(x1)), tl.maximum(tl.abs(x2), tl.abs(x3)))
    step = over_warp(largest, True, ASM) / 127.0
    by = tl.where(step == 0, 1.0, step)
    a = tl.floor(x0 / by + 0.5).to(tl.int32) & 0xFF
    b = tl.floor(x1 / by + 0.5).to(tl.int32) & 0xFF
    c = tl.floor(x2 / by + 0.5).to(tl.int32) & 0xFF
    d = tl.floor(x3 / by + 0.5).to(tl.int32) & 0xFF
    return a | (b << 8) | (c << 16) | (d << 24), step


@triton.jit
def store_kv(cache_ptr, scale_ptr, line, lane, x0, x1, x2, x3, wanted, INT8: tl.constexpr, ASM: tl.constexpr):
    """A head of K or V into row ``line`` of a layer's cache, in its dtype or as codes with a step."""
    if INT8:
        word, step = coded(x0, x1, x2, x3, ASM)
        store_word(cache_ptr.to(tl.pointer_type(tl.int32)) + line.to(tl.int64) * 32 + lane, word, wanted, ASM)
        bits = step.to(tl.int32, bitcast=True)
        store_word(scale_ptr.to(tl.pointer_type(tl.int32)) + line, bits, wanted * (lane == 0).to(tl.int32), ASM)
    else:
        DTYPE: tl.constexpr = cache_ptr.dtype.element_ty
        at = cache_ptr.to(tl.pointer_type(tl.int32)) + line.to(tl.int64) * 64 + 2 * lane
        store_words(at, rounded(x0, x1, DTYPE, ASM), rounded(x2, x3, DTYPE, ASM), wanted, ASM)


@triton.jit
def lane_write(
    qkv_ptr, norm_ptr, turn_ptr, position_ptr, slot_ptr, q_ptr, cache_ptr, scale_ptr,
    qkv_stride, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, PAGE: tl.constexpr, PARTS: tl.constexpr,
    HAS_NORM: tl.constexpr, INT8: tl.constexpr, WARPS: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As ``rows.qkv_write``: WARPS of a row's packed q|k|v heads of 128 dimensions. Grid: (rows, heads / WARPS)."""
    admit_next(PDL)
    ALL: tl.constexpr = HEADS + 2 * KV_HEADS
    thread = tl.arange(0, 32 * WARPS)[None, None, :]
    lane = thread % 32
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * WARPS + thread // 32
    inside = (head < ALL).to(tl.int32)
    turned = head < HEADS + KV_HEADS
    # Where a row stands is older than the step's embedding, and need not be waited for.
    position = tl.load(position_ptr + row, cache_modifier=".cg")
    slot = tl.load(slot_ptr + row, cache_modifier=".cg").to(tl.int32)
    c0, s0, c1, s1 = load_four(turn_ptr + (position * 128 + 4 * lane), inside, ASM)
    w0, w1, w2, w3 = c0, c0, c0, c0
    if HAS_NORM:
        w0, w1, w2, w3 = load_four(norm_ptr + head * 128 + 4 * lane, turned.to(tl.int32), ASM)
    await_inputs(PDL)
    place = (row * ALL + head) * 128 + 4 * lane
    x0, x1, x2, x3 = head_of(
        qkv_ptr, place, qkv_stride, inside, turned, w0, w1, w2, w3, c0, s0, c1, s1, eps, PARTS, HAS_NORM, ASM
    )
    DTYPE: tl.constexpr = q_ptr.dtype.element_ty
    at = q_ptr.to(tl.pointer_type(tl.int32)) + (row * HEADS + head) * 64 + 2 * lane
    low = rounded(x0, x1, DTYPE, ASM)
    store_words(at, low, rounded(x2, x3, DTYPE, ASM), (head < HEADS).to(tl.int32), ASM)
    kv = head - HEADS
    line = ((slot // PAGE * KV_HEADS + kv % KV_HEADS) * 2 + kv // KV_HEADS) * PAGE + slot % PAGE
    store_kv(cache_ptr, scale_ptr, line, lane, x0, x1, x2, x3, inside * (head >= HEADS).to(tl.int32), INT8, ASM)
