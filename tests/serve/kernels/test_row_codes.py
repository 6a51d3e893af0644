"""Rows as int8 codes: what they stand for, whole-number products of them, and the kernels against the eager twins."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from serve.kernels import row_codes as eager
from serve.kernels.triton import row_codes
from serve.kernels.triton.gemm import SkinnyLinear
from serve.kernels.triton.pack import dequantize, pack_dense, pack_int4, pack_int8

if TYPE_CHECKING:
    from tests.serve.kernels.conftest import Place


def meant(codes: Tensor, scale: Tensor) -> Tensor:
    """What codes stand for."""
    rows = scale.shape[0]
    whole = codes.float() if len(codes) == rows else codes[:rows].float() * 256 + codes[rows:].float()
    return whole * scale[:, None]


@pytest.mark.parametrize("halves", [1, 2])
def test_codes_are_within_half_a_step(halves: int) -> None:
    x = torch.randn(5, 40) * torch.tensor([1e-6, 1.0, 0.0, 1e4, 30.0])[:, None]
    codes, scale = eager.code_rows(x, halves)
    assert codes.shape == (5 * halves, 40)
    assert bool(((meant(codes, scale) - x).abs() <= 0.5001 * scale[:, None]).all())
    assert scale[2] == 0
    assert int(codes.min()) >= -128


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("halves", [1, 2])
def test_a_row_that_is_not_finite_stays_so_and_alone(halves: int, value: float, place: Place) -> None:
    x = place.randn(3, 24)
    x[1, 5] = value
    for code in (eager.code_rows, row_codes.code_rows):
        _, scale = code(x, halves)
        assert torch.isfinite(scale).tolist() == [True, False, True]


@pytest.mark.parametrize("halves", [1, 2])
def test_the_kernel_codes_as_its_twin(halves: int, place: Place) -> None:
    rows, width = (200, 9728) if place.real else (3, 1100)
    x = place.randn(rows, 2 * width)[:, :width]
    got, got_scale = row_codes.code_rows(x, halves)
    want, want_scale = eager.code_rows(x, halves)
    # A card divides by other means than the host: a code may then be the next one, where a value lies between two.
    error = (meant(got, got_scale) - meant(want, want_scale)).abs()
    assert bool((error <= 1.01 * want_scale[:, None]).all())
    assert float((got != want).float().mean()) < (1e-3 if place.real else 1e-9)
    assert torch.allclose(got_scale, want_scale, rtol=1e-6)


@pytest.mark.parametrize("bias", [False, True])
def test_products_are_those_of_the_matrix_that_is_stored(bias: bool, place: Place) -> None:
    rows, outputs, depth = (100, 2560, 2560) if place.real else (5, 48, 64)
    linear = SkinnyLinear.make(
        pack_int8(place.randn(outputs, depth), place.dtype), place.randn(outputs) if bias else None
    )
    x = place.randn(rows, depth)
    want = x.float() @ dequantize(linear.weight).t() + (0 if linear.bias is None else linear.bias)
    got = row_codes.product(linear, x)
    assert float((got - want).norm() / want.norm()) < 0.02
    codes, scale = eager.code_rows(x)
    assert linear.weight.scale is not None
    twin = eager.scaled(eager.integer_product(codes, linear.weight.data), scale, linear.weight.scale, linear.bias)
    assert float((got - twin).norm() / twin.norm()) < (2e-3 if place.real else 1e-6)


@pytest.mark.parametrize("bias", [False, True])
def test_gated_products_keep_an_outlier_and_the_rest(bias: bool, place: Place) -> None:
    """One channel a thousand times the others': eight bits would leave nothing of those."""
    rows, inner, hidden = (100, 9728, 2560) if place.real else (4, 48, 40)
    weight = place.randn(2 * inner, hidden, dtype=torch.float32, scale=hidden**-0.5)
    weight[3] *= 30
    weight[inner + 3] *= 30
    down = place.randn(hidden, inner, dtype=torch.float32, scale=inner**-0.5)
    down[:, 3] = 0
    offset = place.randn(2 * inner, dtype=torch.float32) if bias else None
    gate_up = SkinnyLinear.make(pack_int8(weight, place.dtype), offset).as_gated(1 / 16)
    last = SkinnyLinear.make(pack_int8(down, place.dtype), out_scale=16.0)
    x = place.randn(rows, hidden)
    gate, up = (x.float() @ dequantize(gate_up.weight).t() + (0 if offset is None else offset)).chunk(2, 1)
    want = torch.nn.functional.silu(gate) * up @ dequantize(last.weight).t()
    assert float((row_codes.gated_product(gate_up, last, x) - want).norm() / want.norm()) < 0.03


def test_a_rows_bits_are_its_own(place: Place) -> None:
    hidden, inner = (2560, 9728) if place.real else (40, 48)
    gate_up = SkinnyLinear.make(pack_int8(place.randn(2 * inner, hidden), place.dtype)).as_gated(1.0)
    down = SkinnyLinear.make(pack_int8(place.randn(hidden, inner), place.dtype))
    x = place.randn(1300 if place.real else 70, hidden)
    whole = row_codes.product(gate_up, x), row_codes.gated_product(gate_up, down, x)
    for first, count in ((0, 17), (3, 33), (20, 50), (69, 1)):
        part = x[first : first + count]
        parts = row_codes.product(gate_up, part), row_codes.gated_product(gate_up, down, part)
        for got, want in zip(parts, whole, strict=True):
            assert torch.equal(got, want[first : first + count])


def test_sums_of_the_largest_codes_are_exact(place: Place) -> None:
    codes = torch.tensor([[127, 127], [-128, 127]], dtype=torch.int8, device=place.device).repeat(20, 128)
    weight = torch.tensor([[127, 127], [-128, -128]], dtype=torch.int8, device=place.device).repeat(16, 128)
    want = codes.double() @ weight.double().T
    assert torch.equal(eager.integer_product(codes, weight).double(), want)


def test_only_plain_codes_are_taken_and_nothing_is_copied() -> None:
    weight = torch.randn(32, 128)
    packed = pack_int8(weight, torch.float16)
    codes = row_codes.plain_codes(packed)
    assert codes is not None
    assert codes.data_ptr() == packed.data.data_ptr()
    others = [
        pack_int8(weight, torch.float16, 128),
        pack_int4(weight, torch.float16),
        pack_dense(weight, torch.float16),
        pack_int8(weight[:30], torch.float16),
    ]
    for other in others:
        assert row_codes.plain_codes(other) is None
    with pytest.raises(ValueError, match="a dense matrix has no codes"):
        row_codes.product(SkinnyLinear.make(others[2]), torch.randn(20, 128).half())
