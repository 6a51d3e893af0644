"""Products over grouped codes: what the codes stand for, the same sums from every instruction set, rows apart."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from serve.kernels.native import build as build_module
from serve.kernels.native.build import NativeUnavailable, build
from serve.kernels.native.grouped import GroupedProduct
from serve.kernels.native.ops import NativeLibrary
from serve.kernels.native.pack import BLOCK, GROUP, is_exact, pack, quantize_grouped

HAS_COMPILER = any(shutil.which(name) for name in ("cc", "gcc", "clang"))


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def library_or_reason() -> NativeLibrary | None:
    if HAS_COMPILER:
        return NativeLibrary(build())
    with pytest.raises(NativeUnavailable, match="no C compiler"):
        build()
    return None


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), scale=st.sampled_from([1e-12, 1e-5, 1.0, 1e4, 1e12]), bits=st.sampled_from([4, 8]))
def test_codes_are_within_half_a_step_at_any_size_of_weights(seed: int, scale: float, bits: int) -> None:
    weight = random(16, 3 * GROUP, seed=seed) * scale
    groups = weight.view(16, 3, GROUP)
    spread = groups.amax(2) - groups.amin(2) if bits == 4 else 2 * groups.abs().amax(2)
    # Half a step, and what float16 steps and minima are off by.
    bound = spread * (0.5 / (15 if bits == 4 else 254) + 2**-10) + groups.abs().amax(2) * 2**-10
    error = (quantize_grouped(weight, bits).dequantize() - weight).view(16, 3, GROUP).abs().amax(2)
    assert bool((error <= bound).all())


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_that_were_codes_at_their_source_are_kept_exactly(bits: int) -> None:
    weight = quantize_grouped(random(32, 4 * GROUP), bits).dequantize()
    assert torch.equal(quantize_grouped(weight, bits).dequantize(), weight)
    assert is_exact(weight, bits)
    assert not is_exact(random(32, 4 * GROUP), bits)


def test_zero_and_constant_groups_survive() -> None:
    weight = torch.zeros(16, 64)
    weight[3] = 0.5
    assert torch.equal(quantize_grouped(weight, 4).dequantize(), weight)
    torch.testing.assert_close(quantize_grouped(weight, 8).dequantize(), weight, rtol=1e-3, atol=0)


@pytest.mark.parametrize(("columns", "bits"), [(48, 4), (33, 8), (64, 5)])
def test_what_does_not_fit_groups_is_refused(columns: int, bits: int) -> None:
    with pytest.raises(ValueError, match=f"{columns} columns"):
        quantize_grouped(torch.zeros(16, columns), bits)


def test_weights_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ValueError, match="NaN or an infinity"):
        quantize_grouped(torch.full((16, 32), float("inf")), 4)


def test_packed_sizes() -> None:
    assert pack(quantize_grouped(random(BLOCK + 1, 64), 4)).numel() == 2 * 2 * (4 * 64 + 64)
    assert pack(quantize_grouped(random(BLOCK, 64), 8)).numel() == 2 * (8 * 64 + 32)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("outputs", "width"), [(16, 32), (48, 96), (50, 64), (101, 288)])
def test_product_is_that_of_the_codes(outputs: int, width: int, bits: int) -> None:
    library = library_or_reason()
    if library is None:
        return
    weight, bias = random(outputs, width), random(outputs, seed=1)
    op = GroupedProduct(library, weight, bias, bits)
    for rows in (1, 2, 3, 4, 5, 6, 7, 13, 70):
        x = random(rows, width, seed=rows) * torch.logspace(-4, 4, rows)[:, None]
        want = (x.double() @ quantize_grouped(weight, bits).dequantize().double().t() + bias).float()
        got = op(x)
        # An activation is off by half of 1 / (128 * 254) of its row's largest.
        slack = x.abs().amax(1, True) * weight.abs().sum(1) * 1.7e-5 + 1e-5
        assert bool(((got - want).abs() <= slack).all())


@pytest.mark.parametrize("bits", [4, 8])
def test_guesses_round_activations_to_eight_bits_of_their_group(bits: int) -> None:
    library = library_or_reason()
    if library is None:
        return
    weight = random(50, 288)
    op = GroupedProduct(library, weight, None, bits)
    for rows in (1, 2, 6, 13):
        x = random(rows, 288, seed=rows) * torch.logspace(-4, 4, rows)[:, None]
        groups = x.view(rows, 9, GROUP)
        scale = groups.abs().amax(2, True) / 127
        rounded = ((groups / scale).round() * scale).view(rows, 288)
        want = rounded @ quantize_grouped(weight, bits).dequantize().t()
        torch.testing.assert_close(op.product(x, halves=1), want, rtol=1e-3, atol=1e-3 * float(x.abs().max()))


@pytest.mark.parametrize("bits", [4, 8])
def test_largest_codes_do_not_overflow(bits: int) -> None:
    library = library_or_reason()
    if library is None:
        return
    weight = torch.ones(16, 4096)
    weight[:, ::2] = -1.0 if bits == 8 else 0.5
    op = GroupedProduct(library, weight, None, bits)
    x = torch.where(weight[:1] > 0.7, 1.0, -1.0)
    torch.testing.assert_close(op(x), x @ quantize_grouped(weight, bits).dequantize().t(), rtol=1e-4, atol=0)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_has_the_same_bits_in_any_company(bits: int) -> None:
    library = library_or_reason()
    if library is None:
        return
    op = GroupedProduct(library, random(80, 320), random(80, seed=5), bits)
    x = random(40, 320, seed=2)
    whole = op(x)
    assert torch.equal(torch.cat([op(row[None]) for row in x]), whole)
    for start, stop in ((0, 2), (3, 7), (11, 39), (38, 40)):
        assert torch.equal(op(x[start:stop]), whole[start:stop])


def test_a_nan_stays_in_its_row_and_an_infinity_is_not_lost() -> None:
    library = library_or_reason()
    if library is None:
        return
    x = random(5, 64)
    x[1, 3], x[3, 3] = float("nan"), float("inf")
    y = GroupedProduct(library, random(16, 64), None, 4)(x)
    assert y.isfinite().all(1).tolist() == [True, False, True, False, True]


@pytest.mark.parametrize("processor", ["x86-64", "haswell", "skylake-avx512", "native"])
def test_every_instruction_set_gives_the_same_product(
    processor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that this host cannot run are only compiled."""
    library = library_or_reason()
    if library is None:
        return
    flags = tuple(f"-march={processor}" if flag.startswith("-march") else flag for flag in build_module._FLAGS)
    monkeypatch.setattr(build_module, "_FLAGS", flags)
    other = NativeLibrary(build({"PATH": os.environ["PATH"], "XDG_CACHE_HOME": str(tmp_path)}))
    features = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else []
    needed = {"haswell": "avx2", "skylake-avx512": "avx512bw"}.get(processor)
    if needed is not None and needed not in features:
        return
    x = random(7, 288, seed=4)
    for bits in (4, 8):
        want = GroupedProduct(library, random(50, 288), None, bits)(x)
        torch.testing.assert_close(GroupedProduct(other, random(50, 288), None, bits)(x), want, rtol=1e-5, atol=1e-4)
        guess = GroupedProduct(library, random(50, 288), None, bits).product(x, halves=1)
        got = GroupedProduct(other, random(50, 288), None, bits).product(x, halves=1)
        torch.testing.assert_close(got, guess, rtol=1e-5, atol=1e-4)
