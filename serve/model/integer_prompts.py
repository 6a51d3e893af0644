"""Prompts through whole numbers (W8A8): which matrices can, and a layer's products of them.

Matrices that are int8 with a scale a row serve as they are stored for decoding, so nothing is held twice. Activations
become int8 codes with a scale a row, the MLP's gated rows 16-bit ones, since they have outliers. Sums are whole, so a
prompt's bits follow from its own tokens whatever stands beside it. Rows of decoding steps stay with the kernels of
decoding. Knows a layer's matrices; no scheduling.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from serve.kernels.triton.gemm import SkinnyLinear
from serve.kernels.triton.linear import TritonLinear
from serve.kernels.triton.row_codes import gated_product, plain_codes, product
from serve.model.target import DecoderLayer


def able_layers(layers: Iterable[DecoderLayer]) -> int:
    """How many layers have a matrix that serves prompts in whole numbers."""
    return sum(any(_able(one) for one in (layer.qkv, layer.output, layer.gate_up)) for layer in layers)


def _able(linear: object) -> bool:
    return isinstance(linear, TritonLinear) and plain_codes(linear.skinny.weight) is not None


def integer_product_of(linear: SkinnyLinear, x: Tensor) -> Tensor | None:
    """x [T, K] -> [T, N] float32, or None for a matrix that has no such codes."""
    return None if plain_codes(linear.weight) is None else product(linear, x)


def integer_mlp(gate_up: SkinnyLinear, down: SkinnyLinear, x: Tensor) -> Tensor | None:
    """Normed rows x [T, K] -> the MLP's output [T, N] float32, or None where one of its matrices has no such codes."""
    if plain_codes(gate_up.weight) is None or plain_codes(down.weight) is None:
        return None
    return gated_product(gate_up, down, x)
