"""Weight-only quantisation to int8 and int4, and back. Knows matrices of numbers, not what they are for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 32


@dataclass(frozen=True)
class Factors:
    """What a matrix [N, K] is multiplied by before it is rounded: each row and each column, or None for ones."""

    rows: Tensor | None = None
    columns: Tensor | None = None

    def applied(self, weight: Tensor, first: int = 0) -> Tensor:
        """Rows ``first`` .. of the matrix -> the same rows, scaled, in float32 on their own device; with no factors the
        very tensor."""
        if self.columns is not None:
            weight = weight * self.columns.to(weight.device, torch.float32)
        if self.rows is not None:
            rows = self.rows[first : first + weight.shape[0]].to(weight.device, torch.float32)
            weight = weight * rows[:, None]
        return weight


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [N, K] -> codes [N, K] int8, scale [N] float32: symmetric, one scale a row. w ~ codes * scale.

    The scale is rounded to bfloat16 (what the product uses) before the codes are chosen, so its rounding costs nothing.
    """
    weight = weight.float()
    scale = (weight.abs().amax(1) / 127).bfloat16().float()
    safe = torch.where(scale == 0, torch.ones_like(scale), scale)
    codes = (weight / safe[:, None]).round_().clamp_(-127, 127).to(torch.int8)
    return codes.contiguous(), scale


def quantize_int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [N, K], K a multiple of 32 -> codes [N, K] int32 in 0..15, scale_and_zero [K / 32, N, 2] bfloat16.

    w ~ (code - 8) * scale + zero over groups of 32 along K, from each group's own minimum and maximum: weights that
    were 4-bit with scale and minimum before (GGUF Q4_1) keep their codes.
    """
    rows, columns = weight.shape
    groups = weight.float().view(rows, columns // GROUP, GROUP)
    low, high = groups.amin(2), groups.amax(2)
    scale = (high - low) / 15
    safe = torch.where(scale == 0, torch.ones_like(scale), scale)
    codes = ((groups - low[..., None]) / safe[..., None]).round_().clamp_(0, 15).to(torch.int32)
    zero = low + 8 * scale
    scale_and_zero = torch.stack((scale, zero), 2).transpose(0, 1).bfloat16()
    return codes.view(rows, columns), scale_and_zero.contiguous()


def dequantize_int4(codes: Tensor, scale_and_zero: Tensor) -> Tensor:
    """The float32 matrix [N, K] that quantize_int4's result stands for."""
    rows, columns = codes.shape
    scale, zero = scale_and_zero.float().transpose(0, 1).unbind(2)
    groups = codes.view(rows, columns // GROUP, GROUP).float() - 8
    return (groups * scale[..., None] + zero[..., None]).view(rows, columns)
