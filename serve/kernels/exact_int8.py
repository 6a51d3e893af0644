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
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from serve.kernels.quantize import quantize_int8

_MAX_IN_FEATURES = 1 << 16  # 2^16 * 128 * 127 still fits an int32 sum
_SLOW_FACTOR = 8.0  # libraries fall back to reference loops a hundred times slower where they have no integer kernel


# halves [rows, K] float32 whole numbers in -middle .. middle - 1, middle -> their products with the codes, times scales
Product = Callable[[Tensor, int], Tensor]


def exact_int8_op(weight: Tensor, bias: Tensor | None) -> ExactInt8:
    """weight [N, K] float -> its product with rows, in halves of 8 or 7 bits.

    Raises RuntimeError when this host has no exact or no quick integer product for the shape.
    """
    if weight.shape[1] > _MAX_IN_FEATURES:
        raise RuntimeError(f"in_features {weight.shape[1]} could overflow a 32-bit sum")
    codes, scale = quantize_int8(weight)
    reasons: list[str] = []
    for bits in (8, 7):
        for prepare in (_fbgemm, _onednn):
            try:
                check = prepare(codes, torch.ones_like(scale))
                if not _is_exact(check, codes, bits):
                    raise RuntimeError(f"not exact with {bits}-bit halves")
                _refuse_slow(check, weight, bits)
                top = float((1 << bits - 1) * ((1 << bits) - 2))
                return ExactInt8(prepare(codes, scale / top), bias, bits)
            except (RuntimeError, AttributeError, NotImplementedError) as error:
                reasons.append(f"{prepare.__name__}: {error}")
    raise RuntimeError("no integer product of this host serves: " + "; ".join(reasons))


def _fbgemm(codes: Tensor, scales: Tensor) -> Product:
    """The quickest one seen: small row counts too run at the speed of reading the weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # quantised tensors are announced to leave torch; then _onednn takes over
        quantised = torch._make_per_channel_quantized_tensor(
            codes, scales.double(), torch.zeros(codes.shape[0], dtype=torch.int64), 0
        )
        engine = torch.backends.quantized.engine
        torch.backends.quantized.engine = "fbgemm"  # which packing is made; raises where there is none
        try:
            packed = torch.ops.quantized.linear_prepack(quantised, None)
        finally:
            torch.backends.quantized.engine = engine
    overload = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default
    # The overload's own call looks through the packed matrix for traced objects: a tenth of a decode step.
    product = getattr(overload, "_op", overload)

    def integer_product(halves: Tensor, middle: int) -> Tensor:
        y: Tensor = product(halves, 1.0, middle, packed)
        return y

    return integer_product


def _onednn(codes: Tensor, scales: Tensor) -> Product:
    packed = torch.ops.onednn.qlinear_prepack(codes, None)
    product = torch.ops.onednn.qlinear_pointwise.default
    no_zero = torch.zeros(codes.shape[0], dtype=torch.int32)

    def integer_product(halves: Tensor, middle: int) -> Tensor:
        halves = (halves + middle).to(torch.uint8)
        y: Tensor = product(
            halves, 1.0, middle, packed, scales, no_zero, None, 1.0, 0, torch.float32, "none", [], ""
        )  # fmt: skip
        return y

    return integer_product


@dataclass(frozen=True)
class ExactInt8:
    """x [T, K] float32 -> [T, N] float32. ``product`` takes the low halves of all rows, then the high ones."""

    product: Product
    bias: Tensor | None
    bits: int  # of a half

    @property
    def middle(self) -> int:
        return 1 << self.bits - 1

    def __call__(self, x: Tensor) -> Tensor:
        # Codes lie in [-top, top] and are written as base * high + low, both halves in -base/2 .. base/2 - 1.
        base, middle = 1 << self.bits, self.middle
        top = float(middle * (base - 2))
        rows = x.shape[0]
        peak = x.abs().amax(-1, True)
        # A zero row divides by zero: its codes are NaN, become some finite byte, and are multiplied by its peak, zero.
        codes = (x * (top / peak)).round_()
        high = (codes + middle).mul_(1 / base).floor_()
        y = self.product(torch.cat((codes.sub_(high, alpha=base), high)), middle)
        y = y[:rows].add_(y[rows:], alpha=base).mul_(peak)
        return y if self.bias is None else y.add_(self.bias)


def _is_exact(integer_product: Product, codes: Tensor, bits: int) -> bool:
    """Against 64-bit sums, on rows made to saturate: the largest code wherever some output's weight is positive (or
    negative), else the smallest."""
    middle = 1 << (bits - 1)
    probe = codes[:: max(1, codes.shape[0] // 4)][:4]
    rows = torch.cat((probe > 0, probe < 0)).float() * (2 * middle - 1) - middle
    got = integer_product(rows, middle)
    want = rows.double() @ codes.double().t()
    return torch.allclose(got.double(), want, rtol=1e-6, atol=1.0)


def _refuse_slow(integer_product: Product, weight: Tensor, bits: int) -> None:
    """On one thread: on a busy machine a small product waits milliseconds for the other threads to be scheduled."""
    rows = torch.zeros(4, weight.shape[1])
    dense = weight.float()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        quick = min(_seconds(lambda: integer_product(rows, 1 << (bits - 1))) for _ in range(3))
        plain = min(_seconds(lambda: F.linear(rows, dense)) for _ in range(3))
    finally:
        torch.set_num_threads(threads)
    if quick > _SLOW_FACTOR * plain + 1e-4:
        raise RuntimeError(f"the integer product takes {quick / plain:.0f} times the float32 one")


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
