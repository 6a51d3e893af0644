"""Rows of activations as int8 codes with a scale each, and products over them that add whole numbers.

The specification of ``serve.kernels.triton.row_codes``, and what runs on a CPU. A row's codes and scale follow from the
row alone, and sums of whole numbers have no rounding: a row's bits are the same in whatever company. One code a value
has 8 bits; two (256 * high + low) have 16, and lie below each other as rows of one product. Knows matrices, no layers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

TOP = {1: 127, 2: 127 * 256}
"""The largest code by how many bytes it has."""
LEAST_ROWS = 32
"""The library's integer product wants more than 16 rows."""
MULTIPLE = 8
"""... and depths and outputs that are multiples of this."""
MAX_DEPTH = 1 << 16
"""127 * 128 times this many fit an int32 sum."""


def code_rows(x: Tensor, halves: int = 1) -> tuple[Tensor, Tensor]:
    """x [T, K] float -> codes [halves * T, K] int8 (the high bytes of all rows, then the low ones), scale [T] float32:
    x ~ code * scale. The scale of a row with a value that is not finite is a NaN."""
    x = x.float()
    peak = x.abs().amax(1)
    scale = peak / TOP[halves] + (x * 0).sum(1)
    codes = torch.floor(x / torch.where(scale == 0, 1.0, scale)[:, None] + 0.5).clamp_(-TOP[halves], TOP[halves])
    codes = codes.nan_to_num_(0.0)
    if halves == 1:
        return codes.to(torch.int8), scale
    high = torch.floor((codes + 128) / 256)
    return torch.cat((high, codes - 256 * high)).to(torch.int8), scale


def code_gated(sums: Tensor, scale: Tensor, factor: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """What ``scaled`` gives as gate|up, silu(gate) * up of it in float32, and its codes of two bytes."""
    gate, up = scaled(sums, scale, factor, bias).chunk(2, 1)
    return code_rows(gate / (1 + torch.exp(-gate)) * up, 2)


def integer_product(codes: Tensor, weight: Tensor) -> Tensor:
    """codes [M, K] int8, weight [N, K] int8 (K and N multiples of MULTIPLE, K below MAX_DEPTH) -> [M, N] int32. On a
    CPU in float64, which has room for every sum: the library's integers stop at 16 bits on processors without VNNI."""
    rows = codes.shape[0]
    if not codes.is_cuda:
        return (codes.double() @ weight.double().t()).to(torch.int32)
    if rows < LEAST_ROWS:
        codes = F.pad(codes, (0, 0, 0, LEAST_ROWS - rows))
    return torch._int_mm(codes, weight.t())[:rows]


def scaled(sums: Tensor, scale: Tensor, factor: Tensor, bias: Tensor | None) -> Tensor:
    """sums [T or 2 T, N] int32 of ``integer_product``, scale [T], factor [N] (a weight row's scale), bias [N] or None
    -> [T, N] float32."""
    rows = scale.shape[0]
    whole = sums.float() if sums.shape[0] == rows else sums[:rows].float() * 256 + sums[rows:].float()
    y = whole * scale[:, None] * factor
    return y if bias is None else y + bias
