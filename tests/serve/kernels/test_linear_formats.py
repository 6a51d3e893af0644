"""Linear layers of every format: near the exact product, row by row the same bits, whole under every fallback."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from serve.kernels import linear
from serve.kernels.exact_int8 import exact_int8_op
from serve.kernels.linear import LinearBuilder
from serve.kernels.quantize import GROUP, dequantize_int4, quantize_int4, quantize_int8
from serve.kernels.row_policy import FIXED_ROWS, RowPolicy, find_row_policy

CPU = torch.device("cpu")
FORMATS = ["fp32", "int8", "int4"]


def weight_of(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows * columns))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(48, 64), (40, 72), (7, 5), (256, 96)])
@pytest.mark.parametrize("weights", FORMATS)
def test_product_is_right_and_rows_keep_their_bits(weights: str, shape: tuple[int, int], bias: bool) -> None:
    weight = weight_of(*shape)
    offset = torch.linspace(-1, 1, shape[0]) if bias else None
    layer = LinearBuilder(weights, CPU).build(weight, offset)
    x = torch.randn(67, shape[1])
    want = torch.nn.functional.linear(x, weight, offset)
    got = layer(x)
    assert got.dtype == torch.float32
    assert (got - want).norm() / want.norm() < {"fp32": 1e-6, "int8": 0.01, "int4": 0.15}[weights]
    assert torch.equal(torch.cat([layer(row[None]) for row in x]), got)
    for count in (2, 3, 5, 16, 33):
        assert torch.equal(layer(x[-count:]), got[-count:])


def test_shapes_an_operator_refuses_fall_back() -> None:
    builder = LinearBuilder("int4", CPU)
    assert "int4" in builder.build(weight_of(48, 64)).kind
    assert "fp32" in builder.build(weight_of(40, 64)).kind
    assert "fp32" in builder.build(weight_of(48, 40)).kind
    assert "int4" in builder.describe()
    assert "fp32" in builder.describe()


def test_without_private_operators_plain_products_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> object:
        raise AttributeError("no such operator")

    monkeypatch.setattr(linear, "_CPU_KERNELS", {"fp32": (missing,), "int8": (missing,), "int4": (missing,)})
    weight = weight_of(96, 64)
    for weights in ("fp32", "int8", "int4"):
        layer = LinearBuilder(weights, CPU).build(weight)
        x = torch.randn(37, 64)
        assert "dense" in layer.kind
        torch.testing.assert_close(layer(x), x @ weight.t(), atol=1e-4, rtol=1e-4)
        assert torch.equal(torch.cat([layer(row[None]) for row in x]), layer(x))


def test_a_product_that_depends_on_its_row_count_gets_a_fixed_one() -> None:
    def moody(x: Tensor) -> Tensor:
        return x * (1 + 1e-3 * x.shape[0])

    policy = find_row_policy(moody, 8)
    assert policy == RowPolicy(FIXED_ROWS, fixed=True)
    x = torch.randn(45, 8)
    assert torch.equal(policy.apply(moody, x)[40:], policy.apply(moody, x[40:]))
    assert torch.equal(torch.cat([policy.apply(moody, row[None]) for row in x]), policy.apply(moody, x))


def test_the_smallest_row_count_that_agrees_is_the_floor() -> None:
    def two_kernels(x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] >= 3 else x * 2.0001

    policy = find_row_policy(two_kernels, 8)
    assert policy == RowPolicy(3)
    assert torch.equal(policy.apply(two_kernels, torch.ones(1, 8)), torch.full((1, 8), 2.0))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), scale=st.floats(1e-4, 100), offset=st.floats(-2, 2))
def test_int4_error_is_at_most_half_a_step_and_rounding_of_the_step(seed: int, scale: float, offset: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(16, 2 * GROUP, generator=generator) + offset) * scale
    codes, scale_and_zero = quantize_int4(weight)
    assert 0 <= int(codes.min()) <= int(codes.max()) <= 15
    groups = weight.view(16, 2, GROUP)
    step = (groups.amax(2) - groups.amin(2)) / 15
    bound = step * 0.5 + (8 * step + groups.abs().amax(2) + 8 * step) * 2**-8
    error = (dequantize_int4(codes, scale_and_zero) - weight).view(16, 2, GROUP).abs().amax(2)
    assert bool((error <= bound).all())


def test_weights_that_were_four_bit_keep_their_codes() -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (32, 4, GROUP), generator=generator, dtype=torch.int32)
    codes[..., 0], codes[..., 1] = 0, 15
    step = torch.rand(32, 4, 1, generator=generator).half().float() + 0.01
    low = -7 * step + torch.rand(32, 4, 1, generator=generator) * 0.01
    found, _ = quantize_int4((codes * step + low).view(32, 4 * GROUP))
    assert torch.equal(found, codes.view(32, 4 * GROUP))


def test_constant_and_zero_groups_survive() -> None:
    weight = torch.zeros(16, 64)
    weight[3] = 0.5
    torch.testing.assert_close(dequantize_int4(*quantize_int4(weight)), weight)
    codes, scale = quantize_int8(weight)
    torch.testing.assert_close(codes * scale[:, None], weight, rtol=1e-2, atol=0)


def test_integer_product_keeps_more_of_the_activations_than_bf16() -> None:
    weight = weight_of(64, 256)
    op = exact_int8_op(weight, None)
    codes, scale = quantize_int8(weight)
    x = torch.randn(9, 256) * torch.logspace(-6, 6, 9)[:, None]
    want = x.double() @ (codes * scale[:, None]).double().t()
    error = (op(x) - want).norm(dim=1) / want.norm(dim=1)
    rounded = (x.bfloat16().double() @ (codes * scale[:, None]).double().t() - want).norm(dim=1) / want.norm(dim=1)
    assert op.bits in (7, 8)
    assert bool((error < rounded / 5).all())


def test_integer_product_of_a_zero_row_is_zero_and_of_nan_is_nan() -> None:
    op = exact_int8_op(weight_of(48, 64), None)
    x = torch.randn(3, 64)
    x[0] = 0
    x[1, 5] = float("nan")
    y = op(x)
    assert torch.equal(y[0], torch.zeros(48))
    assert bool(y[1].isnan().all())
    assert bool(y[2].isfinite().all())


def test_seven_bit_halves_give_nearly_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from serve.kernels import exact_int8

    real = exact_int8._is_exact
    monkeypatch.setattr(exact_int8, "_is_exact", lambda product, codes, bits: bits == 7 and real(product, codes, bits))
    weight, x = weight_of(64, 96), torch.randn(40, 96)
    seven = exact_int8_op(weight, None)
    assert seven.bits == 7
    codes, scale = quantize_int8(weight)
    want = x @ (codes * scale[:, None]).t()
    assert (seven(x) - want).norm() / want.norm() < 1e-3
    assert torch.equal(torch.cat([seven(row[None]) for row in x]), seven(x))


def test_a_product_that_saturates_is_not_called_exact() -> None:
    from serve.kernels.exact_int8 import _is_exact

    codes = torch.randint(-127, 128, (32, 64), dtype=torch.int8)

    def saturating(halves: Tensor, middle: int) -> Tensor:
        """Byte products are added in pairs at 16 bits, as processors without VNNI do."""
        products = (halves + middle)[:, None].int() * codes[None].int()
        pairs = products.view(*products.shape[:2], -1, 2).sum(-1).clamp(-32768, 32767).sum(-1)
        return (pairs - middle * codes.int().sum(1)).float()

    assert not _is_exact(saturating, codes, 8)
    assert _is_exact(saturating, codes, 7)
