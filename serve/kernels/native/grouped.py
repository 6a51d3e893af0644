"""A matrix product over codes in groups of 32, by layer.c: weights of 4 or 8 bits, activations of 16 or 8.

Sums inside a group are whole numbers, and a row's bits do not depend on the other rows (see product.h). The eager
specification is GroupedWeight.dequantize and a product with activations rounded to 16 bits of their row's largest.
Knows one matrix.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from serve.kernels.native.ops import Matrix, NativeLibrary, Operand, Step, pointer
from serve.kernels.native.pack import pack, quantize_grouped


class GroupedProduct:
    """x [T, K] float32 -> [T, N] float32. ``matrix`` is what other C calls take; it points into this object."""

    def __init__(self, library: NativeLibrary, weight: Tensor, bias: Tensor | None, bits: int) -> None:
        """weight [N, K] float, bias [N] float32 or None. Raises ValueError where the groups do not fit."""
        grouped = quantize_grouped(weight, bits)
        self.bits = bits
        self.outputs, self.width = weight.shape
        self._library = library
        self._data = pack(grouped)
        self._bias = bias
        self.matrix = Matrix(
            data=pointer(self._data, torch.uint8),
            bias=pointer(bias),
            outputs=self.outputs,
            width=self.width,
            bits=bits,
            unit=grouped.unit,
        )

    @property
    def nbytes(self) -> int:
        return self._data.numel()

    def __call__(self, x: Tensor) -> Tensor:
        return self.product(x)

    def product(self, x: Tensor, halves: int = 2) -> Tensor:
        """As a call; with one half activations have 8 bits in groups of 32, for guesses."""
        x = x.contiguous()
        rows = x.shape[0]
        y = torch.empty(rows, self.outputs)
        if not rows:
            return y
        operand = Operand(rows, self.width, halves)
        step = Step(
            rows=rows, threads=torch.get_num_threads(), fork=self._library.fork, x=pointer(x), y=pointer(y)
        )  # fmt: skip
        operand.fill(step)
        self._library.matrix(ctypes.byref(step), ctypes.byref(self.matrix))
        return y
