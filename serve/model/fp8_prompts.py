"""Prompts through 8-bit floats: a second copy of a layer's matrices, and the products of prefill chunks with it.

The copy is made of what a matrix stands for, in whatever format decoding reads it. Rows of activations get a scale
each, so a prompt's bits follow from its own tokens; few rows are padded to as many as give them the bits of many (see
``library_rows``). Rows of decoding steps stay with the kernels of decoding. Knows matrices; no scheduling.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from serve.kernels import fp8_rows
from serve.kernels.triton.fp8_rows import Codes, Fp8Matrix, code_gated, code_rows
from serve.kernels.triton.gemm import SkinnyLinear, widened
from serve.model import library_rows
from serve.model.errors import ModelError


def copied(linears: Iterable[SkinnyLinear]) -> list[SkinnyLinear]:
    """The same matrices, each with its copy. Raises ModelError for a shape that the library's product does not take."""
    made = [(linear, code_rows(widened(_fitting(linear).weight))) for linear in linears]
    tried = library_rows.LibraryRows.tried((rows.codes for _, rows in made if rows.codes.is_cuda), _unscaled)
    return [
        replace(linear, fp8=Fp8Matrix(rows, tried.least.get((linear.weight.rows, linear.weight.depth), 0)))
        for linear, rows in made
    ]


def _fitting(linear: SkinnyLinear) -> SkinnyLinear:
    shape = [linear.weight.rows, linear.weight.depth]
    if any(size % fp8_rows.MULTIPLE for size in shape):
        raise ModelError(f"--prefill fp8 needs matrices of multiples of {fp8_rows.MULTIPLE}, one is {shape}")
    return linear


def _unscaled(codes: Tensor, weight: Tensor) -> Tensor:
    """The product of codes alone: scales are multiplied in behind the sums."""
    ones = torch.ones(max(codes.shape[0], weight.shape[0]), device=codes.device)
    return fp8_rows.product(codes, ones[: codes.shape[0]], weight, ones[: weight.shape[0]])


def fp8_product(linear: SkinnyLinear, x: Tensor | Codes) -> Tensor:
    """x [T, K] -> [T, N] bfloat16, out_scale left out. The copy must be there."""
    assert linear.fp8 is not None
    y = linear.fp8.product(x if isinstance(x, Codes) else code_rows(x))
    return y if linear.bias is None else y.add_(linear.bias)


def fp8_mlp(gate_up: SkinnyLinear, down: SkinnyLinear, x: Tensor | Codes) -> Tensor:
    """Normed rows x [T, K] -> the MLP's output [T, N]. The gated rows are formed in float32, so that the shifts that
    float16 needs (the matrices' out_scale) are left out."""
    return fp8_product(down, code_gated(fp8_product(gate_up, x)))
