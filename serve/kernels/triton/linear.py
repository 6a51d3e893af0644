"""Linear layers on packed weights with the face of every other Linear, so that loaders and drafters need not know.

A ``TritonLinear`` called as a Linear takes and gives float32 rows; the Triton layers use its ``skinny`` matrix
directly. Knows formats, not what a matrix is for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from serve.kernels.linear import DENSE_DTYPES, Linear, LinearBuilder
from serve.kernels.quantize import Factors
from serve.kernels.row_policy import RowPolicy
from serve.kernels.triton.card import capability
from serve.kernels.triton.gemm import SkinnyLinear
from serve.kernels.triton.pack import PackedWeight, pack_as


class TritonLinear(Linear):
    """One matrix for the skinny GEMM: x [T, in_features] float32 -> [T, out_features] float32 when called."""

    def __init__(self, skinny: SkinnyLinear) -> None:
        weight = skinny.weight
        super().__init__(self._rows, RowPolicy(), f"triton {weight.kind}", (weight.rows, weight.depth), weight.nbytes)
        self.skinny = skinny

    def _rows(self, x: Tensor) -> Tensor:
        return self.skinny.linear(x.to(self.skinny.weight.compute_dtype), torch.float32)


class TritonLinearBuilder(LinearBuilder):
    """Makes TritonLinear layers of one weight format (``CARD_FORMATS`` but fp32) on one device."""

    gives_rows = True

    def __init__(self, weights: str, device: torch.device) -> None:
        super().__init__(weights, device)
        bf16 = capability(device) >= 80 and device.type == "cuda"
        self.activation_dtype = DENSE_DTYPES.get(weights, torch.bfloat16 if bf16 else torch.float16)
        self.packs_for = (str(self.activation_dtype), capability(device))

    def build(
        self, weight: Tensor, bias: Tensor | None = None, weights: str | None = None, factors: Factors | None = None
    ) -> TritonLinear:
        """weight [N, K] (any float dtype), bias [N] or None, in this builder's format or in ``weights``; factors:
        applied to the weight, a slice at a time."""
        weights = weights or self.weights
        dtype = DENSE_DTYPES.get(weights, self.activation_dtype)
        return self.build_packed(pack_as(weights, weight, self.device, dtype, factors), bias)

    def build_packed(self, packed: PackedWeight, bias: Tensor | None = None) -> TritonLinear:
        """A matrix that is packed already, on this builder's device."""
        linear = TritonLinear(SkinnyLinear.make(packed, None if bias is None else bias.to(self.device)))
        self.kinds[linear.kind] = linear.policy
        return linear

    def describe(self) -> str:
        return ", ".join(self.kinds)
