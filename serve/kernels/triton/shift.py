"""How far silu(gate) * up of a layer must be scaled down so that float16 holds it, whatever the input.

A row of x that was RMS-normed has length sqrt(width), so |w . x| <= sqrt(width) * |w|, weights times the norm's: a
bound from the weights alone, with no calibration. The scale is a power of two, so scaling costs no bits. Knows
matrices, not layers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from serve.kernels.triton.pack import PackedWeight, dequantize, rows_of

MAX_SHIFT = 14
"""Beyond it small products would vanish; larger ones are then held at float16's end."""
_ROWS = 2048


def gated_shift(gate_up: PackedWeight, bias: Tensor | None, norm: Tensor) -> int:
    """Least power of two (0 .. MAX_SHIFT) by which every silu(gate) * up of RMS-normed rows must be divided to stay
    below float16's largest number. gate_up: gate rows, then up rows; norm [K] the norm's weight."""
    bounds = []
    for start in range(0, gate_up.rows, _ROWS):
        part = dequantize(rows_of(gate_up, start, start + _ROWS))
        bounds.append(part.mul_(norm).square_().sum(1).sqrt_())
    bound = torch.cat(bounds) * math.sqrt(gate_up.depth)
    if bias is not None:
        bound = bound + bias.abs()
    gate, up = bound.chunk(2)
    largest = float((gate * up).max())
    spare = largest / torch.finfo(torch.float16).max
    return min(MAX_SHIFT, max(0, math.ceil(math.log2(spare)))) if spare > 0 else 0
