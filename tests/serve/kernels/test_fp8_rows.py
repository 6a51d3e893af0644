"""Rows as 8-bit floats: what they stand for, the kernels against their eager twins, and products of such rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from serve.kernels import fp8_rows as eager
from serve.kernels.fp8_rows import TOP
from serve.kernels.triton import fp8_rows
from serve.kernels.triton.fp8_rows import Codes, Fp8Matrix
from serve.kernels.triton.tiles import FP8_CARD
from tests.serve.kernels.conftest import error

if TYPE_CHECKING:
    from tests.serve.kernels.conftest import Place

LEAST_CARD = FP8_CARD
STEP = 2**-4
"""Half of the largest relative distance between two neighbours with a mantissa of three bits."""


def test_codes_are_within_half_a_step() -> None:
    x = torch.randn(5, 400) * torch.tensor([1e-6, 1.0, 0.0, 1e4, 30.0])[:, None]
    codes, scale = eager.code_rows(x)
    wrong = (codes.float() * scale[:, None] - x).abs()
    # Near zero the format's numbers lie 2 ** -9 apart.
    assert bool((wrong <= torch.maximum(STEP * x.abs(), 2**-10 * scale[:, None]) * 1.001).all())
    assert scale[2] == 0
    assert not codes[2].float().any()


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_row_that_is_not_finite_stays_so_and_alone(value: float, place: Place) -> None:
    x = place.randn(3, 96)
    x[1, 5] = value
    finite = [True, False, True]
    for name in ("code_rows", "code_gated"):
        assert torch.isfinite(getattr(eager, name)(x)[1]).tolist() == finite
        assert torch.isfinite(getattr(fp8_rows, name)(x).scale).tolist() == finite
    matrix = Fp8Matrix(fp8_rows.code_rows(place.randn(32, 96)))
    assert torch.isfinite(matrix.product(fp8_rows.code_rows(x))).all(1).tolist() == finite
    assert torch.isfinite(fp8_rows.code_norm(x.float(), None, place.randn(96).float(), 1e-6).scale).tolist() == finite


def test_a_row_of_the_smallest_numbers_is_zeros(place: Place) -> None:
    x = torch.zeros(2, 96, device=place.device, dtype=torch.bfloat16)
    x[:, 3] = torch.tensor([1e-37, 1e-33], device=place.device)
    made = fp8_rows.code_rows(x)
    for codes, scale in (eager.code_rows(x), (made.codes, made.scale)):
        assert torch.isfinite(codes.float()).all()
        assert torch.isfinite(scale).all()
        assert not codes[0].float().any()


def same_codes(got: Codes, want: tuple[Tensor, Tensor]) -> None:
    """A card divides, and takes a power, by other means than the host: a code may then be the next one."""
    codes, scale = want
    assert torch.allclose(got.scale, scale, rtol=1e-5)
    apart = (got.codes.float() - codes.float()).abs()
    assert bool((apart <= (2.01 * STEP * codes.float().abs()).clamp_min(2**-9)).all())
    assert float((apart > 0).float().mean()) < 1e-3
    assert float(got.codes.float().abs().max()) == TOP


@pytest.mark.parametrize("name", ["code_rows", "code_gated"])
def test_the_kernel_codes_as_its_twin(name: str, place: Place) -> None:
    """Numbers of all sizes: many round up into the next power of two, some are below the format's least."""
    rows, width = (200, 9728) if place.real else (3, 1100)
    x = place.randn(rows, 2 * width) * 2.0 ** place.randn(rows, 2 * width, scale=2.0).clamp(-8, 8)
    if name == "code_rows":
        x = x[:, :width]
    same_codes(getattr(fp8_rows, name)(x), getattr(eager, name)(x))


@pytest.mark.parametrize("tapped", [False, True])
def test_the_norm_that_codes_is_the_norm_and_its_codes(tapped: bool, place: Place) -> None:
    rows, width = (200, 2560) if place.real else (3, 576)
    residual, weight = (place.randn(*shape, dtype=torch.float32) for shape in ((rows, width), (width,)))
    delta = place.randn(rows, width, dtype=torch.bfloat16)
    tap = torch.zeros(rows, 2 * width, device=place.device)[:, width:] if tapped else None
    summed = residual + delta.float()
    same_codes(fp8_rows.code_norm(residual, delta, weight, 1e-6, tap), eager.code_norm(summed, weight, 1e-6))
    assert torch.equal(residual, summed)
    assert tap is None or torch.equal(tap, summed)
    same_codes(fp8_rows.code_norm(residual, None, weight, 1e-6), eager.code_norm(summed, weight, 1e-6))
    with pytest.raises(ValueError, match="delta is in parts"):
        fp8_rows.code_norm(residual, delta[None], weight, 1e-6)


def test_products_are_near_those_of_the_rows_and_padding_changes_nothing(place: Place) -> None:
    rows, outputs, depth = (300, 2560, 2560) if place.real else (5, 48, 64)
    x, weight = place.randn(rows, depth), place.randn(outputs, depth)
    matrix = Fp8Matrix(fp8_rows.code_rows(weight))
    given = fp8_rows.code_rows(x)
    got = matrix.product(given)
    assert got.dtype == torch.bfloat16
    assert error(got, x.float() @ weight.float().t()) < 0.06
    meant, stored = (one.codes.float() * one.scale[:, None] for one in (given, matrix.rows))
    assert error(got, meant @ stored.t()) < 0.005
    assert torch.equal(Fp8Matrix(matrix.rows, least=rows + 20).product(given), got)


def test_a_card_with_such_products_is_told_from_one_without(monkeypatch: pytest.MonkeyPatch, place: Place) -> None:
    assert eager.fault(place.device) is None

    def refused(*_: object, **__: object) -> None:
        raise RuntimeError("rowwise scaling is not supported\nmore")

    monkeypatch.setattr(eager, "product", refused)
    assert eager.fault(place.device) == "RuntimeError: rowwise scaling is not supported"
    monkeypatch.setattr(eager, "product", lambda codes, *_: codes.float()[:, :32] * 2)
    assert eager.fault(place.device) == "its product of a small matrix is wrong"
