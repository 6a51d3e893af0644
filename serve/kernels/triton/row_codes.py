"""Launches the kernels of integer products over many rows: rows into codes, the library's int8 product, and back.

Each call's eager twin has its name in ``serve.kernels.row_codes``. A row's bits are the same for every number of rows.
Knows packed matrices and rows, not layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from serve.kernels.row_codes import MAX_DEPTH, MULTIPLE, TOP, integer_product
from serve.kernels.triton.card import launch_options
from serve.kernels.triton.gemm import SkinnyLinear
from serve.kernels.triton.pack import PackedWeight
from serve.kernels.triton.source import row_codes as source
from serve.kernels.triton.tiles import CODE_BLOCK, CODE_WARPS, SILU_BLOCK


def plain_codes(weight: PackedWeight) -> Tensor | None:
    """The matrix's own codes [N, K] int8 where the library's product can take them: one scale a row, in row order; no
    second copy is made."""
    whole = weight.weight_format == "int8" and weight.data.dtype == torch.int8
    fits = weight.rows % MULTIPLE == 0 and weight.depth % MULTIPLE == 0 and weight.depth < MAX_DEPTH
    return weight.data if whole and fits and weight.data.shape == (weight.rows, weight.depth) else None


def code_rows(x: Tensor, halves: int = 1) -> tuple[Tensor, Tensor]:
    """x [T, K] (rows may be strided) -> codes [halves * T, K] int8, scale [T] float32."""
    rows, width = x.shape
    codes = x.new_empty(halves * rows, width, dtype=torch.int8)
    scale = x.new_empty(rows, dtype=torch.float32)
    source.code_rows[(rows,)](
        x,
        codes,
        scale,
        width,
        x.stride(0),
        rows * width,
        TOP=TOP[halves],
        HALVES=halves,
        BLOCK=CODE_BLOCK,
        **launch_options(x.device, CODE_WARPS),
    )
    return codes, scale


def product(linear: SkinnyLinear, x: Tensor) -> Tensor:
    """x [T, K] -> [T, N] float32, out_scale left out, from codes of one byte. ``plain_codes`` must be there."""
    codes, scale = code_rows(x)
    return scaled(_sums(linear, codes), scale, linear)


def gated_product(gate_up: SkinnyLinear, down: SkinnyLinear, x: Tensor) -> Tensor:
    """x [T, K] -> down(silu(gate) * up) [T, N] float32. The gated rows, which have outliers, are codes of two bytes;
    they are formed in float32, so that the shifts that float16 needs (the matrices' out_scale) are left out."""
    codes, scale = code_rows(x)
    sums = _sums(gate_up, codes)
    rows, width = sums.shape[0], sums.shape[1] // 2
    codes = x.new_empty(2 * rows, width, dtype=torch.int8)
    inner = torch.empty_like(scale)
    source.code_gated[(rows,)](
        sums,
        scale,
        gate_up.weight.scale,
        scale if gate_up.bias is None else gate_up.bias,
        codes,
        inner,
        width,
        rows * width,
        TOP=TOP[2],
        HAS_BIAS=gate_up.bias is not None,
        BLOCK=CODE_BLOCK,
        **launch_options(x.device, CODE_WARPS),
    )
    return scaled(_sums(down, codes), inner, down)


def scaled(sums: Tensor, scale: Tensor, linear: SkinnyLinear) -> Tensor:
    """sums [T or 2 T, N] int32, scale [T] -> [T, N] float32, times the matrix's own scales and with its bias."""
    rows, width = scale.shape[0], sums.shape[1]
    out = sums.new_empty(rows, width, dtype=torch.float32)
    source.scaled[(rows, -(-width // SILU_BLOCK))](
        sums,
        scale,
        linear.weight.scale,
        scale if linear.bias is None else linear.bias,
        out,
        width,
        rows * width,
        HALVES=sums.shape[0] // rows,
        HAS_BIAS=linear.bias is not None,
        BLOCK=SILU_BLOCK,
        **launch_options(sums.device, 4),
    )
    return out


def _sums(linear: SkinnyLinear, codes: Tensor) -> Tensor:
    weight = plain_codes(linear.weight)
    if weight is None:
        raise ValueError(f"a {linear.weight.weight_format} matrix has no codes for the library's integer product")
    return integer_product(codes, weight)
