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
from serve.kernels.triton.pack import PackedWeight, dequantize, in_blocks, pack_as, pack_int4, pack_int8
from serve.kernels.triton.tiles import INT4_UNIT, lane_card

PRODUCT_ERROR = 0.02
"""Most that a product may be off, relative: several times what 16-bit scales cost, far below what a wrong one is."""


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

    def __init__(self, weights: str, device: torch.device, *, blocks: bool = True) -> None:
        """blocks: matrices lie as decoding reads them fastest (``pack.in_blocks``), where the library's integer product
        cannot take them."""
        super().__init__(weights, device)
        self._blocks = blocks
        self.activation_dtype = DENSE_DTYPES.get(weights, torch.float16)
        self.packs_for = (str(self.activation_dtype), capability(device), blocks)

    def build(
        self, weight: Tensor, bias: Tensor | None = None, weights: str | None = None, factors: Factors | None = None
    ) -> TritonLinear:
        """weight [N, K] (any float dtype), bias [N] or None, in this builder's format or in ``weights``; factors:
        applied to the weight, a slice at a time."""
        weights = weights or self.weights
        dtype = DENSE_DTYPES.get(weights, self.activation_dtype)
        return self.build_packed(pack_as(weights, weight, self.device, dtype, factors, blocks=self._blocks), bias)

    def build_packed(self, packed: PackedWeight, bias: Tensor | None = None) -> TritonLinear:
        """A matrix that is packed already, on this builder's device."""
        linear = TritonLinear(SkinnyLinear.make(packed, None if bias is None else bias.to(self.device)))
        self.kinds[linear.kind] = linear.policy
        return linear

    def check(self) -> None:
        """Multiplies a few rows by small integer matrices where threads do a tensor-core instruction's work themselves,
        which relies on how Triton lays out a tensor. ValueError where the products are wrong."""
        if not lane_card(capability(self.device)):
            return
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(128, 4 * INT4_UNIT, generator=generator).to(self.device)
        x = torch.randn(20, weight.shape[1], generator=generator).to(self.device, self.activation_dtype)
        in_rows = pack_int8(weight, self.activation_dtype), pack_int4(weight, self.activation_dtype, 64)
        for packed in (*in_rows, *map(in_blocks, in_rows)):
            want = x.float() @ dequantize(packed).t()
            for rows in (5, 20):
                got = SkinnyLinear.make(packed).linear(x[:rows], torch.float32)
                error = float((got - want[:rows]).norm() / want[:rows].norm())
                if not error < PRODUCT_ERROR:
                    raise ValueError(f"{packed.kind} products of {rows} rows are off by {error:.1e} with this Triton")

    def describe(self) -> str:
        return ", ".join(self.kinds)
