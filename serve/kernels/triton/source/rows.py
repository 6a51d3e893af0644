"""Device code on single rows: residual add with RMS norm, head norm with rotary and K/V write. Knows no
layers.

One program owns a row (or some heads of it), so a row's bits cannot depend on other rows.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from serve.kernels.triton.source.launch import admit_next, await_inputs, fetch_share


@triton.jit
def add_rms_norm(
    delta_ptr, residual_ptr, weight_ptr, normed_ptr, tap_ptr,
    width, delta_stride, tap_stride, eps, next_ptr, next_bytes,
    SPLITS: tl.constexpr, HAS_TAP: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """residual[row] += delta summed over its SPLITS parts in order (0: no delta); normed = residual / rms * weight.
    Parts lie delta_stride elements apart. With HAS_TAP the new residual is also stored at tap_ptr + row *
    tap_stride. Grid: (rows, 1 and, with LANES, programs that fetch next_bytes from next_ptr on)."""
    if LANES:  # noqa: SIM102 - the outer one is settled at compile time
        if tl.program_id(1) > 0:
            share = tl.program_id(0) * (tl.num_programs(1) - 1) + tl.program_id(1) - 1
            fetch_share(next_ptr, next_bytes, share, tl.num_programs(0) * (tl.num_programs(1) - 1), LANES)
            return
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < width
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0)
    admit_next(PDL)
    await_inputs(PDL)
    x = tl.load(residual_ptr + row * width + column, mask=mask, other=0.0)
    if SPLITS > 0:
        delta = tl.load(delta_ptr + row * width + column, mask=mask, other=0.0).to(tl.float32)
        for part in tl.static_range(1, SPLITS):
            place = part * delta_stride.to(tl.int64) + row * width
            delta += tl.load(delta_ptr + place + column, mask=mask, other=0.0).to(tl.float32)
        x += delta
        tl.store(residual_ptr + row * width + column, x, mask=mask)
        if HAS_TAP:
            tl.store(tap_ptr + row * tap_stride + column, x.to(tap_ptr.dtype.element_ty), mask=mask)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / width + eps)
    tl.store(normed_ptr + row * width + column, (x * scale * weight).to(normed_ptr.dtype.element_ty), mask=mask)


@triton.jit
def to_half(x, ptr):
    """x in the pointer's 16-bit type, held inside float16's range; what is not a number stays so."""
    if ptr.dtype.element_ty == tl.float16:
        x = tl.where(x > 65504.0, 65504.0, tl.where(x < -65504.0, -65504.0, x))
    return x.to(ptr.dtype.element_ty)


@triton.jit
def silu_mul(gate_up_ptr, out_ptr, width, out_scale, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """silu(gate) * up * out_scale over gate|up rows of 2 * width. Grid: (rows, column blocks)."""
    admit_next(PDL)
    await_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    gate = tl.load(gate_up_ptr + row * 2 * width + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + (row * 2 + 1) * width + column, mask=mask, other=0.0).to(tl.float32)
    gated = gate / (1.0 + tl.exp(-gate)) * up * out_scale
    tl.store(out_ptr + row * width + column, to_half(gated, out_ptr), mask=mask)


@triton.jit
def load_parts(ptr, place, stride, mask, SPLITS: tl.constexpr):
    """The sum, in order, of SPLITS parts that lie ``stride`` elements apart."""
    x = tl.load(ptr + place, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, SPLITS):
        x += tl.load(ptr + part * stride.to(tl.int64) + place, mask=mask, other=0.0).to(tl.float32)
    return x


@triton.jit
def norm_and_turn(x, other, norm_ptr, norm_place, turn_ptr, position, column, mask, eps,
                  HEAD_DIM: tl.constexpr, HAS_NORM: tl.constexpr):  # fmt: skip
    """x [heads, dims] and ``other``, the same with each pair (2i, 2i + 1) swapped -> normed and rotated by the
    position's turn: cosine and sine of pair i lie side by side in row ``position`` of the turn table."""
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / HEAD_DIM + eps)[:, None]
        x = x * scale * tl.load(norm_ptr + norm_place + column[None, :], mask=mask, other=0.0)
        other = other * scale * tl.load(norm_ptr + norm_place + (column ^ 1)[None, :], mask=mask, other=0.0)
    inside = column < HEAD_DIM
    pair = turn_ptr + position * HEAD_DIM + (column // 2) * 2
    cosine = tl.load(pair, mask=inside, other=0.0)
    sine = tl.load(pair + 1, mask=inside, other=0.0)
    sine = tl.where(column % 2 == 0, -sine, sine)
    return x * cosine[None, :] + other * sine[None, :]


@triton.jit
def qkv_write(
    qkv_ptr, norm_ptr, turn_ptr, position_ptr, slot_ptr, q_ptr, cache_ptr,
    qkv_stride, eps, next_ptr, next_bytes, later_ptr, later_bytes,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr,
    SPLITS: tl.constexpr, HAS_NORM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, LANES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_H of a row's packed q|k|v heads. q and k are normed (optional) and rotated; q goes to
    q_ptr [rows, HEADS, HEAD_DIM], k and v to their slot of cache [pages, KV_HEADS, 2, PAGE, HEAD_DIM]. Grid: (rows,
    programs of heads and, with LANES, programs that fetch next_bytes from next_ptr on, then later_bytes)."""
    ALL: tl.constexpr = HEADS + 2 * KV_HEADS
    if LANES:
        OWN: tl.constexpr = (ALL + BLOCK_H - 1) // BLOCK_H
        if tl.program_id(1) >= OWN:
            shares = tl.num_programs(0) * (tl.num_programs(1) - OWN)
            share = tl.program_id(0) * (tl.num_programs(1) - OWN) + tl.program_id(1) - OWN
            fetch_share(next_ptr, next_bytes, share, shares, LANES)
            fetch_share(later_ptr, later_bytes, share, shares, LANES)
            return
    admit_next(PDL)
    await_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    column = tl.arange(0, BLOCK_D)
    mask = (head < ALL)[:, None] & (column < HEAD_DIM)[None, :]
    turned = head < HEADS + KV_HEADS
    place = row * (ALL * HEAD_DIM) + head[:, None] * HEAD_DIM
    x = load_parts(qkv_ptr, place + column[None, :], qkv_stride, mask, SPLITS)
    other = load_parts(qkv_ptr, place + (column ^ 1)[None, :], qkv_stride, mask, SPLITS)
    position = tl.load(position_ptr + row)
    rotated = norm_and_turn(
        x, other, norm_ptr, head[:, None] * HEAD_DIM, turn_ptr, position, column, mask & turned[:, None], eps,
        HEAD_DIM, HAS_NORM,
    )  # fmt: skip
    x = tl.where(turned[:, None], rotated, x).to(q_ptr.dtype.element_ty)
    q_place = (row * HEADS + head[:, None]) * HEAD_DIM + column[None, :]
    tl.store(q_ptr + q_place, x, mask=mask & (head < HEADS)[:, None])
    slot = tl.load(slot_ptr + row)
    kv = head - HEADS
    half = kv // KV_HEADS
    line = (((slot // PAGE) * KV_HEADS + kv % KV_HEADS) * 2 + half) * PAGE + slot % PAGE
    tl.store(cache_ptr + line[:, None] * HEAD_DIM + column[None, :], x, mask=mask & (head >= HEADS)[:, None])


@triton.jit
def context_write(
    kv_ptr, norm_ptr, turn_ptr, position_ptr, slot_ptr, cache_ptr, layer_offset_ptr,
    eps, LAYERS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr,
    HAS_NORM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: a row's k and v heads of one drafter layer, from kv [rows, LAYERS, 2, KV_HEADS, HEAD_DIM]. Keys are
    normed by the layer's own weight and rotated. Layer caches start layer_offset elements from cache_ptr."""
    admit_next(PDL)
    await_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1)
    head = tl.arange(0, BLOCK_H)
    column = tl.arange(0, BLOCK_D)
    mask = (head < 2 * KV_HEADS)[:, None] & (column < HEAD_DIM)[None, :]
    turned = head < KV_HEADS
    place = (row * LAYERS + layer) * (2 * KV_HEADS * HEAD_DIM) + head[:, None] * HEAD_DIM
    x = tl.load(kv_ptr + place + column[None, :], mask=mask, other=0.0).to(tl.float32)
    other = tl.load(kv_ptr + place + (column ^ 1)[None, :], mask=mask, other=0.0).to(tl.float32)
    position = tl.load(position_ptr + row)
    norm_place = layer * HEAD_DIM + 0 * head[:, None]
    rotated = norm_and_turn(
        x, other, norm_ptr, norm_place, turn_ptr, position, column, mask & turned[:, None], eps, HEAD_DIM, HAS_NORM
    )
    x = tl.where(turned[:, None], rotated, x).to(cache_ptr.dtype.element_ty)
    slot = tl.load(slot_ptr + row)
    line = (((slot // PAGE) * KV_HEADS + head % KV_HEADS) * 2 + head // KV_HEADS) * PAGE + slot % PAGE
    start = tl.load(layer_offset_ptr + layer)
    tl.store(cache_ptr + start + line[:, None] * HEAD_DIM + column[None, :], x, mask=mask)
