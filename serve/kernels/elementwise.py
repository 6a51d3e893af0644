"""Operations on single rows: RMS norm, rotary rotation and the gated activation, each row the same bits in any batch.

Elementwise kernels compute the last few elements of a run with scalar code whose exp is not bit-equal to the vector
code's, and threads cut runs anywhere; so a row's bits could depend on where it lies. Operations with an exp go row by
row therefore, in pieces too small to be cut. This file knows no weights and no model.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# TensorIterator gives work below this many elements to one thread, so no thread border falls inside a row.
_UNSPLIT_ELEMENTS = 32768 - 1


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x [..., D] float32, weight [D] float32 or None for ones -> x / rms(x) * weight, [..., D] float32."""
    width = x.shape[-1]
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    y: Tensor = x * norm.mul_(norm).mul_(1 / width).add_(eps).rsqrt_()
    return y if weight is None else y.mul_(weight)


def rotate_(heads: Tensor, turn: Tensor) -> None:
    """Rotates heads [T, N, D] float32 in place by turn [T, 1, D/2] complex64.

    Neighbouring elements (2i, 2i + 1) form a pair: projections whose pairs lie half a head apart must have their rows
    permuted first (``interleave_halves``). One complex product then does the work of the usual five operations.
    """
    tokens, count, dim = heads.shape
    torch.view_as_complex(heads.view(tokens, count, dim // 2, 2)).mul_(turn)


def interleave_halves(rows: Tensor, head_dim: int) -> Tensor:
    """Reorders axis 0 (heads * head_dim rows of a projection, its bias, or one head's norm) from halves to pairs."""
    heads = rows.shape[0] // head_dim
    halves = rows.view(heads, 2, head_dim // 2, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape)


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2 * I] float32 (gate first) -> silu(gate) * up, [T, I]. Overwrites the gate half."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    gate, up = gate_up[:, :width], gate_up[:, width:]
    if gate_up.device.type != "cpu" or rows * width <= _UNSPLIT_ELEMENTS:
        F.silu(gate, inplace=True)
    else:
        step = max(1, _UNSPLIT_ELEMENTS // width)
        for start in range(0, rows, step):
            F.silu(gate[start : start + step], inplace=True)
    return gate * up
