"""Device code that turns rows into int8 codes with a scale each, and integer sums back into floats. Knows no layers.

One program owns a row while it looks for the largest value, so a row's bits cannot depend on other rows.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from serve.kernels.triton.source.launch import admit_next, await_inputs


@triton.jit
def store_codes(x, scale, code_ptr, place, low_offset, mask, TOP: tl.constexpr, HALVES: tl.constexpr):
    """x / scale rounded; with two halves high bytes go to ``place`` and low ones low_offset further."""
    code = tl.floor(x / tl.where(scale == 0, 1.0, scale) + 0.5)
    code = tl.minimum(tl.maximum(code, -TOP), TOP)
    code = tl.where(code == code, code, 0.0)
    if HALVES == 1:
        tl.store(code_ptr + place, code.to(tl.int8), mask=mask)
    else:
        high = tl.floor((code + 128.0) / 256.0)
        tl.store(code_ptr + place, high.to(tl.int8), mask=mask)
        tl.store(code_ptr + low_offset + place, (code - 256.0 * high).to(tl.int8), mask=mask)


@triton.jit
def code_rows(
    x_ptr, code_ptr, scale_ptr, width, x_stride, low_offset,
    TOP: tl.constexpr, HALVES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A row of x -> its codes and scale. Grid: (rows,)."""
    admit_next(PDL)
    await_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    peak = tl.zeros((BLOCK,), tl.float32)
    spoilt = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        mask = start + column < width
        x = tl.load(x_ptr + row * x_stride + start + column, mask=mask, other=0.0).to(tl.float32)
        peak = tl.maximum(peak, tl.abs(x))
        spoilt += x * 0.0
    # A largest number passes over a NaN; what is not finite, times zero, is one.
    scale = tl.max(peak, axis=0) / TOP + tl.sum(spoilt, axis=0)
    tl.store(scale_ptr + row, scale)
    for start in range(0, width, BLOCK):
        mask = start + column < width
        x = tl.load(x_ptr + row * x_stride + start + column, mask=mask, other=0.0).to(tl.float32)
        store_codes(x, scale, code_ptr, row * width + start + column, low_offset, mask, TOP, HALVES)


@triton.jit
def gated(sum_ptr, place, factor_ptr, bias_ptr, column, width, mask, scale, HAS_BIAS: tl.constexpr):
    """silu(gate) * up of integer sums times their scales."""
    gate = tl.load(sum_ptr + place, mask=mask, other=0).to(tl.float32) * scale
    up = tl.load(sum_ptr + place + width, mask=mask, other=0).to(tl.float32) * scale
    gate *= tl.load(factor_ptr + column, mask=mask, other=0.0)
    up *= tl.load(factor_ptr + width + column, mask=mask, other=0.0)
    if HAS_BIAS:
        gate += tl.load(bias_ptr + column, mask=mask, other=0.0)
        up += tl.load(bias_ptr + width + column, mask=mask, other=0.0)
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def code_gated(
    sum_ptr, in_scale_ptr, factor_ptr, bias_ptr, code_ptr, scale_ptr, width, low_offset,
    TOP: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A row of gate|up sums (2 * width) -> the codes, of two bytes, and the scale of its gated product. Grid:
    (rows,)."""
    admit_next(PDL)
    await_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    in_scale = tl.load(in_scale_ptr + row)
    peak = tl.zeros((BLOCK,), tl.float32)
    spoilt = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        mask = start + column < width
        place = row * 2 * width + start + column
        x = gated(sum_ptr, place, factor_ptr, bias_ptr, start + column, width, mask, in_scale, HAS_BIAS)
        x = tl.where(mask, x, 0.0)
        peak = tl.maximum(peak, tl.abs(x))
        spoilt += x * 0.0
    scale = tl.max(peak, axis=0) / TOP + tl.sum(spoilt, axis=0)
    tl.store(scale_ptr + row, scale)
    for start in range(0, width, BLOCK):
        mask = start + column < width
        place = row * 2 * width + start + column
        x = gated(sum_ptr, place, factor_ptr, bias_ptr, start + column, width, mask, in_scale, HAS_BIAS)
        store_codes(x, scale, code_ptr, row * width + start + column, low_offset, mask, TOP, 2)


@triton.jit
def scaled(
    sum_ptr, scale_ptr, factor_ptr, bias_ptr, out_ptr, width, low_offset,
    HALVES: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Integer sums times the row's and the column's scale, in float32. Grid: (rows, column blocks)."""
    admit_next(PDL)
    await_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    place = row * width + column
    x = tl.load(sum_ptr + place, mask=mask, other=0).to(tl.float32)
    if HALVES == 2:
        x = x * 256.0 + tl.load(sum_ptr + low_offset + place, mask=mask, other=0).to(tl.float32)
    x = x * tl.load(scale_ptr + row) * tl.load(factor_ptr + column, mask=mask, other=0.0)
    if HAS_BIAS:
        x += tl.load(bias_ptr + column, mask=mask, other=0.0)
    tl.store(out_ptr + place, x, mask=mask)
