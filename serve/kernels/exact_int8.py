"""A matrix product over int8 weights whose sums are whole numbers, so that no order of adding can change a bit.

Each row of activations is written as 16-bit codes times one scale of its own, split into a high and a low byte; both go
through one 8-bit integer product (VNNI and its like) as two rows and meet again as 256 * high + low. That keeps more of
the activations than bfloat16 does, runs at integer speed, and a row never sees another row's scale. Processors without
VNNI add byte products in pairs that saturate at 16 bits: there the codes are split into 7-bit halves, which cannot.

Splitting an operand into integer slices comes from Ozaki et al., "Error-free transformations of matrix multiplication"
(2012). This file knows one matrix.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from serve.kernels.quantize import quantize_int8

_MAX_IN_FEATURES = 1 << 16  # 2^16 * 128 * 127 still fits an int32 sum
_FEW_ROWS = 16  # from here on two bit operations are quicker than one strided byte copy
_SLOW_FACTOR = 8.0  # libraries fall back to reference loops a hundred times slower where they have no integer kernel


def exact_int8_op(weight: Tensor, bias: Tensor | None) -> tuple[Callable[[Tensor], Tensor], int]:
    """weight [N, K] float -> (op: x [T, K] float32 -> [T, N] float32, bits of a half: 8 or 7).

    Raises RuntimeError when this host has no exact or no quick integer product for the shape.
    """
    if weight.shape[1] > _MAX_IN_FEATURES:
        raise RuntimeError(f"in_features {weight.shape[1]} could overflow a 32-bit sum")
    codes, scale = quantize_int8(weight)
    packed = torch.ops.onednn.qlinear_prepack(codes, None)
    product = torch.ops.onednn.qlinear_pointwise.default
    no_zero = torch.zeros(codes.shape[0], dtype=torch.int32)

    def integer_product(halves: Tensor, middle: int, scales: Tensor) -> Tensor:
        y: Tensor = product(
            halves, 1.0, middle, packed, scales, no_zero, None, 1.0, 0, torch.float32, "none", [], ""
        )  # fmt: skip
        return y

    for bits in (8, 7):
        if _is_exact(integer_product, codes, bits):
            _refuse_slow(integer_product, weight, bits)
            return _make_op(integer_product, scale, bias, bits), bits
    raise RuntimeError("the integer product of this host is not exact")


def _make_op(
    integer_product: Callable[[Tensor, int, Tensor], Tensor], scale: Tensor, bias: Tensor | None, bits: int
) -> Callable[[Tensor], Tensor]:
    base = 1 << bits
    middle = base // 2
    # Codes lie in [-top, top]; with both halves' zero points added they stay inside 0 .. base^2 - 1.
    top = float(middle * (base - 2))
    numerator = torch.tensor(top)
    offset = torch.tensor(middle * base + middle + 0.5)  # the half turns truncation into rounding
    scales = scale / top

    def op(x: Tensor) -> Tensor:
        rows = x.shape[0]
        peak = x.abs().amax(-1, True)
        # A zero row divides by zero: its codes are garbage, but finite, and are multiplied by its peak, zero.
        codes = (x * (numerator / peak)).add_(offset).to(torch.int32)
        y = integer_product(_halves(codes, bits), middle, scales)
        y = y[:rows].add_(y[rows:], alpha=base).mul_(peak)
        return y if bias is None else y.add_(bias)

    return op


def _halves(codes: Tensor, bits: int) -> Tensor:
    """codes [T, K] int32 in 0 .. 4^bits - 1 -> [2 * T, K] uint8: low halves, then high (the bytes' own order)."""
    rows, columns = codes.shape
    if bits == 8 and rows <= _FEW_ROWS:
        return codes.view(torch.uint8).view(rows, columns, 4)[:, :, :2].permute(2, 0, 1).reshape(-1, columns)
    halves = torch.empty(2 * rows, columns, dtype=torch.uint8)
    torch.bitwise_right_shift(codes, bits, out=halves[rows:])
    torch.bitwise_and(codes, (1 << bits) - 1, out=halves[:rows])
    return halves


def _is_exact(integer_product: Callable[[Tensor, int, Tensor], Tensor], codes: Tensor, bits: int) -> bool:
    """Against 64-bit sums, on rows made to saturate: the largest code wherever some output's weight is positive (or
    negative), else the smallest."""
    top, middle = (1 << bits) - 1, 1 << (bits - 1)
    probe = codes[:: max(1, codes.shape[0] // 4)][:4]
    rows = torch.cat((probe > 0, probe < 0)).to(torch.uint8) * top
    got = integer_product(rows, middle, torch.ones(codes.shape[0]))
    want = (rows.double() - middle) @ codes.double().t()
    return torch.allclose(got.double(), want, rtol=1e-6, atol=1.0)


def _refuse_slow(integer_product: Callable[[Tensor, int, Tensor], Tensor], weight: Tensor, bits: int) -> None:
    rows = torch.zeros(4, weight.shape[1])
    halves = torch.zeros(4, weight.shape[1], dtype=torch.uint8)
    dense = weight.float()
    ones = torch.ones(weight.shape[0])
    quick = min(_seconds(lambda: integer_product(halves, 1 << (bits - 1), ones)) for _ in range(3))
    plain = min(_seconds(lambda: F.linear(rows, dense)) for _ in range(3))
    if quick > _SLOW_FACTOR * plain + 1e-4:
        raise RuntimeError(f"the integer product takes {quick / plain:.0f} times the float32 one")


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
