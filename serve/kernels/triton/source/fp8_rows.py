"""Device code that turns rows into 8-bit floats (e4m3) with a scale each. Knows no layers.

One program owns a row while it looks for the largest value, so a row's bits cannot depend on other rows. On a card the
conversion rounds and stays within the format's range by itself.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from serve.kernels.triton.source.launch import admit_next, await_inputs
from serve.kernels.triton.source.rows import gated


@triton.jit
def on_grid(x):
    """x rounded to the nearest number of e4m3 (ties to even): Triton's interpreter loses a carry into the exponent."""
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    # Below 2 ** -6 the numbers lie 2 ** -9 apart, as float32's do from here on.
    x = tl.where(tl.abs(x) < 0.015625, (x + 24576.0) - 24576.0, normal)
    return tl.where(x == x, x, 0.0)


@triton.jit
def scale_of(peak, spoilt, TOP: tl.constexpr):
    """A row's scale from the largest value and the sum of values times zero of each place: a largest number passes over
    a NaN, and what is not finite, times zero, is one."""
    return tl.max(peak, axis=0) / TOP + tl.sum(spoilt, axis=0)


@triton.jit
def store_codes(x, scale, code_ptr, place, mask, LEAST: tl.constexpr, CARD: tl.constexpr):
    """x / scale in the pointer's type; zeros where a scale is below LEAST."""
    code = x * (1.0 / tl.where(scale < LEAST, 1.0, scale))
    if not CARD:
        code = on_grid(code)
    tl.store(code_ptr + place, code.to(code_ptr.dtype.element_ty), mask=mask)


@triton.jit
def code_rows(
    x_ptr, code_ptr, scale_ptr, width, x_stride,
    TOP: tl.constexpr, LEAST: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr, CARD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A row of x, or with GATED silu(gate) * up of a row of gate|up (2 * width) -> its codes and scale. Grid:
    (rows,)."""
    admit_next(PDL)
    await_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    row_ptr = x_ptr + row * x_stride
    column = tl.arange(0, BLOCK)
    peak = tl.zeros((BLOCK,), tl.float32)
    spoilt = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        mask = start + column < width
        if GATED:
            x = gated(row_ptr, start + column, width, mask)
        else:
            x = tl.load(row_ptr + start + column, mask=mask, other=0.0).to(tl.float32)
        peak = tl.maximum(peak, tl.abs(x))
        spoilt += x * 0.0
    scale = scale_of(peak, spoilt, TOP)
    tl.store(scale_ptr + row, scale)
    for start in range(0, width, BLOCK):
        mask = start + column < width
        if GATED:
            x = gated(row_ptr, start + column, width, mask)
        else:
            x = tl.load(row_ptr + start + column, mask=mask, other=0.0).to(tl.float32)
        store_codes(x, scale, code_ptr, row * width + start + column, mask, LEAST, CARD)


@triton.jit
def code_norm(
    delta_ptr, residual_ptr, weight_ptr, code_ptr, scale_ptr, tap_ptr, width, tap_stride, eps,
    TOP: tl.constexpr, LEAST: tl.constexpr, HAS_DELTA: tl.constexpr, HAS_TAP: tl.constexpr, BLOCK: tl.constexpr,
    CARD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As ``rows.add_rms_norm`` of a delta that is whole, with the normed row's codes and scale in place of itself.
    Grid: (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < width
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0)
    admit_next(PDL)
    await_inputs(PDL)
    place = row * width + column
    x = tl.load(residual_ptr + place, mask=mask, other=0.0)
    if HAS_DELTA:
        x += tl.load(delta_ptr + place, mask=mask, other=0.0).to(tl.float32)
        tl.store(residual_ptr + place, x, mask=mask)
        if HAS_TAP:
            tl.store(tap_ptr + row * tap_stride + column, x.to(tap_ptr.dtype.element_ty), mask=mask)
    x = x * tl.rsqrt(tl.sum(x * x, axis=0) / width + eps) * weight
    scale = scale_of(tl.abs(x), x * 0.0, TOP)
    tl.store(scale_ptr + row, scale)
    store_codes(x, scale, code_ptr, place, mask, LEAST, CARD)
