"""Device code on single rows: head norm with rotary and K/V write, embedding, gate. Knows no layers.

One program owns a row (or some heads of it), so a row's bits cannot depend on other rows.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from serve.kernels.triton.source.launch import admit_next, await_inputs
from serve.kernels.triton.source.widen import block_place


@triton.jit
def embed_rows(
    id_ptr, table_ptr, scale_ptr, out_ptr, width,
    SCALED: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Row id_ptr[row] of a table (BLOCKS: of int8, as ``block_place`` has it), times its scale where it is stored in
    integers, in float32. Grid: (rows, column blocks)."""
    await_inputs(PDL)
    # Not before: later kernels of a step read without a wait what is older than its embedding.
    admit_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    source = tl.load(id_ptr + row)
    place = block_place(source, column, width) if BLOCKS else source * width + column
    x = tl.load(table_ptr + place, mask=mask, other=0.0).to(tl.float32)
    if SCALED:
        x *= tl.load(scale_ptr + source)
    tl.store(out_ptr + row * width + column, x, mask=mask)


@triton.jit
def to_half(x, ptr):
    """x in the pointer's 16-bit type, held inside float16's range; what is not a number stays so."""
    if ptr.dtype.element_ty == tl.float16:
        x = tl.where(x > 65504.0, 65504.0, tl.where(x < -65504.0, -65504.0, x))
    return x.to(ptr.dtype.element_ty)


@triton.jit
def silu_times(gate, up):
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def gated(row_ptr, column, width, mask):
    """silu(gate) * up in float32 of some columns of a row of gate|up, zero where there are none."""
    gate = tl.load(row_ptr + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(row_ptr + width + column, mask=mask, other=0.0).to(tl.float32)
    return silu_times(gate, up)


@triton.jit
def silu_mul(gate_up_ptr, out_ptr, width, out_scale, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """silu(gate) * up * out_scale over gate|up rows of 2 * width. Grid: (rows, column blocks)."""
    admit_next(PDL)
    await_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    y = gated(gate_up_ptr + row * 2 * width, column, width, mask) * out_scale
    tl.store(out_ptr + row * width + column, to_half(y, out_ptr), mask=mask)


@triton.jit
def load_parts(ptr, place, stride, mask, SPLITS: tl.constexpr):
    """The sum, in order, of SPLITS parts that lie ``stride`` elements apart."""
    x = tl.load(ptr + place, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, SPLITS):
        x += tl.load(ptr + part * stride.to(tl.int64) + place, mask=mask, other=0.0).to(tl.float32)
    return x


@triton.jit
def norm_and_turn(x, norm_ptr, norm_place, turn_ptr, position, column, mask, eps,
                  HEAD_DIM: tl.constexpr, HAS_NORM: tl.constexpr):  # fmt: skip
    """x [heads, dims] -> normed and rotated by the position's turn: cosine and sine of pair (2i, 2i + 1) lie side by
    side in row ``position`` of the turn table."""
    HEADS: tl.constexpr = x.shape[0]
    PAIRS: tl.constexpr = x.shape[1] // 2
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / HEAD_DIM + eps)[:, None]
        x = x * scale * tl.load(norm_ptr + norm_place + column[None, :], mask=mask, other=0.0)
    turn = tl.load(turn_ptr + position * HEAD_DIM + column, mask=column < HEAD_DIM, other=0.0)
    cosine, sine = tl.split(tl.reshape(turn, (PAIRS, 2)))
    one, two = tl.split(tl.reshape(x, (HEADS, PAIRS, 2)))
    turned = tl.join(one * cosine[None, :] + two * (-sine)[None, :], two * cosine[None, :] + one * sine[None, :])
    return tl.reshape(turned, (HEADS, 2 * PAIRS))


@triton.jit
def qkv_write(
    qkv_ptr, norm_ptr, turn_ptr, position_ptr, slot_ptr, q_ptr, cache_ptr, scale_ptr,
    qkv_stride, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr,
    SPLITS: tl.constexpr, HAS_NORM: tl.constexpr, INT8: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_H of a row's packed q|k|v heads. q and k are normed (optional) and rotated; q goes to
    q_ptr [rows, HEADS, HEAD_DIM], k and v to their slot of cache [pages, KV_HEADS, 2, PAGE, HEAD_DIM]; INT8: as codes,
    whose steps go to scale_ptr [pages, KV_HEADS, 2, PAGE]."""
    admit_next(PDL)
    await_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    column = tl.arange(0, BLOCK_D)
    ALL: tl.constexpr = HEADS + 2 * KV_HEADS
    mask = (head < ALL)[:, None] & (column < HEAD_DIM)[None, :]
    turned = head < HEADS + KV_HEADS
    place = row * (ALL * HEAD_DIM) + head[:, None] * HEAD_DIM
    x = load_parts(qkv_ptr, place + column[None, :], qkv_stride, mask, SPLITS)
    position = tl.load(position_ptr + row)
    rotated = norm_and_turn(
        x, norm_ptr, head[:, None] * HEAD_DIM, turn_ptr, position, column, mask & turned[:, None], eps, HEAD_DIM,
        HAS_NORM,
    )  # fmt: skip
    x = tl.where(turned[:, None], rotated, x)
    q_place = (row * HEADS + head[:, None]) * HEAD_DIM + column[None, :]
    tl.store(q_ptr + q_place, x.to(q_ptr.dtype.element_ty), mask=mask & (head < HEADS)[:, None])
    slot = tl.load(slot_ptr + row)
    kv = head - HEADS
    half = kv // KV_HEADS
    line = (((slot // PAGE) * KV_HEADS + kv % KV_HEADS) * 2 + half) * PAGE + slot % PAGE
    if INT8:
        step = tl.max(tl.abs(x), axis=1) / 127.0
        tl.store(scale_ptr + line, step, mask=(head >= HEADS) & (head < ALL))
        x = tl.floor(x / tl.where(step == 0, 1.0, step)[:, None] + 0.5)
    stored = x.to(cache_ptr.dtype.element_ty)
    tl.store(cache_ptr + line[:, None] * HEAD_DIM + column[None, :], stored, mask=mask & (head >= HEADS)[:, None])


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
    position = tl.load(position_ptr + row)
    norm_place = layer * HEAD_DIM + 0 * head[:, None]
    rotated = norm_and_turn(
        x, norm_ptr, norm_place, turn_ptr, position, column, mask & turned[:, None], eps, HEAD_DIM, HAS_NORM
    )
    x = tl.where(turned[:, None], rotated, x).to(cache_ptr.dtype.element_ty)
    slot = tl.load(slot_ptr + row)
    line = (((slot // PAGE) * KV_HEADS + head % KV_HEADS) * 2 + head // KV_HEADS) * PAGE + slot % PAGE
    start = tl.load(layer_offset_ptr + layer)
    tl.store(cache_ptr + start + line[:, None] * HEAD_DIM + column[None, :], x, mask=mask)
