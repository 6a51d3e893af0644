"""A float matrix as the 4-bit or 8-bit codes that product.h multiplies, and what those codes stand for.

Groups of 32 weights along a row share a float16 step (and, with 4 bits, a float16 minimum), relative to one power of
two of the whole matrix. A matrix that was dequantised from GGUF's Q4_1 or Q8_0 keeps its codes, steps and minima
exactly. Knows one matrix, not what it is for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 32  # weights along K that share a step
BLOCK = 16  # outputs packed side by side
BITS = (4, 8)


@dataclass(frozen=True)
class GroupedWeight:
    """weight ~ unit * (step * (codes - middle) + low). codes [N, K] uint8; step, low [N, K / 32] float16."""

    codes: Tensor
    step: Tensor
    low: Tensor
    unit: float
    bits: int

    @property
    def middle(self) -> int:
        """What is taken from a code before it is scaled."""
        return 0 if self.bits == 4 else 128

    def dequantize(self) -> Tensor:
        """The matrix [N, K] float32 that the codes stand for."""
        groups = self.codes.view(*self.step.shape, GROUP).float() - self.middle
        values = groups * self.step.float()[..., None] + self.low.float()[..., None]
        return (values * self.unit).view(self.codes.shape)


def quantize_grouped(weight: Tensor, bits: int) -> GroupedWeight:
    """weight [N, K] float, K a multiple of 32, ``bits`` 4 (steps from each group's minimum) or 8 (symmetric).

    Codes are chosen for the step as it is stored, so that its rounding costs nothing. Raises ValueError for a width
    that is not a multiple of 32 and for weights that are not finite.
    """
    rows, columns = weight.shape
    if columns % GROUP or bits not in BITS:
        raise ValueError(f"{bits}-bit groups of {GROUP} do not fit {columns} columns")
    groups = weight.float().reshape(rows, columns // GROUP, GROUP)
    peak = float(groups.abs().max()) if groups.numel() else 0.0
    if not math.isfinite(peak):
        raise ValueError("the weights hold a NaN or an infinity")
    # A power of two: it changes no bit of a float16 step, only brings it into float16's range.
    unit = 2.0 ** (math.frexp(peak)[1] - 1) if peak > 0 else 1.0
    groups = groups / unit
    if bits == 4:
        minimum = groups.amin(2)
        step, low = ((groups.amax(2) - minimum) / 15).half(), minimum.half()
        top, middle = 15, 0
    else:
        step, low = (groups.abs().amax(2) / 127).half(), torch.zeros(rows, columns // GROUP, dtype=torch.float16)
        top, middle = 255, 128
    safe = torch.where(step == 0, torch.ones_like(step), step).float()
    codes = ((groups - low.float()[..., None]) / safe[..., None]).round_().add_(middle).clamp_(0, top)
    return GroupedWeight(codes.to(torch.uint8).view(rows, columns), step, low, unit, bits)


def is_exact(weight: Tensor, bits: int) -> bool:
    """Whether the codes stand for the very matrix, up to float32's rounding: so it was quantised at its source."""
    error = quantize_grouped(weight, bits).dequantize().sub_(weight.float()).abs_().max()
    return bool(error <= 1e-6 * weight.abs().max())


def pack(weight: GroupedWeight) -> Tensor:
    """The bytes that product.h reads, uint8: blocks of 16 outputs (the last one filled up with zeros), their groups one
    behind the other, each with its steps and, with 4 bits, minima."""
    rows, columns = weight.codes.shape
    fill = -rows % BLOCK
    groups = columns // GROUP
    codes, step, low = weight.codes, weight.step, weight.low
    if fill:
        codes = torch.cat((codes, codes.new_full((fill, columns), weight.middle)))
        step = torch.cat((step, step.new_zeros(fill, groups)))
        low = torch.cat((low, low.new_zeros(fill, groups)))
    blocks = (rows + fill) // BLOCK
    # [block, output, group, j, t] -> [block, group, j, output, t]
    chunks = codes.view(blocks, BLOCK, groups, GROUP // 4, 4).permute(0, 2, 3, 1, 4)
    if weight.bits == 4:
        chunks = chunks[:, :, :4] | (chunks[:, :, 4:] << 4)
    parts = [chunks.reshape(blocks, groups, -1), _by_group(step, blocks)]
    if weight.bits == 4:
        parts.append(_by_group(low, blocks))
    return torch.cat(parts, 2).flatten().contiguous()


def _by_group(halves: Tensor, blocks: int) -> Tensor:
    """[blocks * 16, groups] float16 -> [blocks, groups, 32] bytes."""
    return halves.view(blocks, BLOCK, -1).transpose(1, 2).contiguous().view(torch.uint8)
