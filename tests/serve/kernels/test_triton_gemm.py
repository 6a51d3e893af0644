"""The skinny GEMM against its eager twin, in every weight format and epilogue, and the same bits for any row count."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from serve.kernels.triton import gemm
from serve.kernels.triton.card import capability
from serve.kernels.triton.gemm import SkinnyLinear, streams_agree, widened
from serve.kernels.triton.pack import PackedWeight, dequantize, in_blocks, pack_dense, pack_int4, pack_int8, rows_of
from serve.kernels.triton.tiles import INT4_UNIT, INT8_UNIT, STREAM_UNIT, GemmPlan, GemmTile, lane_card, stream_card

if TYPE_CHECKING:
    from tests.serve.kernels.conftest import Place

FORMATS: dict[str, Callable[[Tensor, torch.dtype], PackedWeight]] = {
    "dense": pack_dense,
    "int8": pack_int8,
    "int8 g128": lambda weight, dtype: pack_int8(weight, dtype, 128),
    "int4 g32": lambda weight, dtype: pack_int4(weight, dtype, 32),
    "int4 g64": lambda weight, dtype: pack_int4(weight, dtype, 64),
    "int4 g128": lambda weight, dtype: pack_int4(weight, dtype, 128),
    "int8 blocks": lambda weight, dtype: in_blocks(pack_int8(weight, dtype)),
    "int4 g64 blocks": lambda weight, dtype: in_blocks(pack_int4(weight, dtype, 64)),
    "int4 g64 halves": lambda weight, dtype: pack_int4(weight, dtype, 64, halves=True),
}
HALF_ERROR = 6e-3
FLOAT_ERROR = 1e-4


@pytest.fixture(params=FORMATS)
def packed(request: pytest.FixtureRequest, place: Place) -> PackedWeight:
    """A matrix whose rows are no multiple of the tile; those in blocks are a multiple of these."""
    blocks = "blocks" in request.param
    rows, depth = (2 * 2600, 2560) if place.real else (2 * (24 if blocks else 20), 256)
    made = FORMATS[request.param](place.randn(rows, depth, dtype=torch.float32, scale=depth**-0.5), place.dtype)
    assert made.in_blocks == (blocks and lane_card(capability(place.device)))
    return made


def twin(packed: PackedWeight, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """int4_halves multiplies weights by their scale in 16 bits, all other formats sums by theirs in 32."""
    weight = dequantize(packed)
    if packed.weight_format == "int4_halves":
        weight = weight.to(packed.compute_dtype)
    return F.linear(x.double(), weight.double(), None if bias is None else bias.double())


def test_product_with_bias_and_scale(packed: PackedWeight, place: Place, relative_error: Callable[..., float]) -> None:
    x = place.randn(20, packed.depth)
    bias = place.randn(packed.rows, dtype=torch.float32)
    linear = SkinnyLinear.make(packed, bias, out_scale=4.0)
    want = 4 * twin(packed, x) + bias
    assert relative_error(linear.linear(x), want) < HALF_ERROR
    assert relative_error(linear.linear(x, torch.float32), want) < FLOAT_ERROR


def test_a_widened_matrix_is_the_dequantised_one(packed: PackedWeight) -> None:
    got = widened(packed)
    assert got.dtype == packed.compute_dtype
    assert torch.equal(got, dequantize(packed).to(packed.compute_dtype))


def test_the_library_product_of_many_rows(
    packed: PackedWeight, place: Place, relative_error: Callable[..., float]
) -> None:
    x = place.randn(70, packed.depth)
    bias = place.randn(packed.rows, dtype=torch.float32)
    got = SkinnyLinear.make(packed, bias, out_scale=4.0).by_library(x)
    assert relative_error(got, 4 * twin(packed, x) + bias) < HALF_ERROR


def test_split_parts_add_up_to_the_product(
    packed: PackedWeight, place: Place, relative_error: Callable[..., float]
) -> None:
    x = place.randn(5, packed.depth)
    bias = place.randn(packed.rows, dtype=torch.float32)
    whole = SkinnyLinear.make(packed, bias)
    depth = whole.plan.tile(1)[1].block_k * max(1, whole.plan.parts)
    splits = packed.depth // depth
    parts = replace(whole, plan=replace(whole.plan, split_depth=depth)).partial(x)
    assert parts.shape == (splits, 5, packed.rows)
    assert relative_error(parts.sum(0), twin(packed, x, bias)) < FLOAT_ERROR


@pytest.mark.parametrize(("parts", "warps", "rows"), [(1, 1, 5), (2, 4, 16)])
def test_threads_multiply_as_tiles_do(
    packed: PackedWeight, parts: int, warps: int, rows: int, place: Place, relative_error: Callable[..., float]
) -> None:
    if packed.weight_format not in ("int8", "int4"):
        return
    packed = packed if place.real else rows_of(packed, 0, 16 if packed.in_blocks else 20)
    whole = SkinnyLinear.make(packed)
    ring = 4 if packed.weight_format == "int8" else 2
    tile = GemmTile(16 * warps // parts, INT4_UNIT if packed.pack else INT8_UNIT, warps, 1, ring=ring)
    x = place.randn(rows, packed.depth)
    got = replace(whole, plan=GemmPlan(packed.depth, ((8 if rows < 9 else 16, tile),), parts)).partial(x)
    assert relative_error(got.sum(0), twin(packed, x)) < FLOAT_ERROR


@pytest.mark.parametrize(("warps", "rows"), [(1, 5), (4, 16)])
def test_streams_multiply_as_tiles_do(
    warps: int, rows: int, place: Place, relative_error: Callable[..., float]
) -> None:
    packed = pack_dense(place.randn(2 * 20, 4 * STREAM_UNIT, scale=0.1), place.dtype)
    tile = GemmTile(16 * warps, STREAM_UNIT, warps, 1, ring=3, stream=True)
    x = place.randn(rows, packed.depth)
    for gated in (False, True):
        whole = SkinnyLinear.make(packed, gated=gated)
        split = packed.depth if gated else 3 * STREAM_UNIT
        tiles = tuple((width, replace(tile, block_k=STREAM_UNIT, stream=False)) for width, tile in whole.plan.tiles)
        want, got = (
            one.gated_silu(x) if gated else one.partial(x)
            for one in (
                replace(whole, plan=GemmPlan(split, tiles)),
                replace(whole, plan=GemmPlan(split, ((8 if rows < 9 else 16, tile),))),
            )
        )
        exact = place.real and stream_card(capability(place.device))
        assert torch.equal(got, want) if exact else relative_error(got, want) < HALF_ERROR


@pytest.mark.parametrize("fault", ["", "bits", "crash"])
def test_streams_are_taken_where_they_give_the_bits_of_tiles(
    fault: str, place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def tried(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
        x = torch.ones(3)
        yield x, x
        if fault == "crash":
            raise RuntimeError("no such instruction")
        yield x, x + (fault == "bits")

    if fault or not place.real:
        monkeypatch.setattr(gemm, "_streamed_and_not", tried)
    agree = not fault and (not place.real or stream_card(capability(place.device)))
    assert streams_agree.__wrapped__(place.device, place.dtype) == agree
    assert ("16-bit weights are not streamed" in caplog.text) != agree


def test_residual_is_added_in_place(packed: PackedWeight, place: Place, relative_error: Callable[..., float]) -> None:
    x = place.randn(17, packed.depth)
    residual = place.randn(17, packed.rows, dtype=torch.float32)
    want = residual + twin(packed, x)
    SkinnyLinear.make(packed).add_to(x, residual)
    assert relative_error(residual, want) < FLOAT_ERROR


def test_gated_product(packed: PackedWeight, place: Place, relative_error: Callable[..., float]) -> None:
    x = place.randn(9, packed.depth)
    bias = place.randn(packed.rows, dtype=torch.float32)
    gate, up = twin(packed, x, bias).chunk(2, 1)
    got = SkinnyLinear.make(packed, bias, gated=True, out_scale=0.125).gated_silu(x)
    assert relative_error(got, F.silu(gate) * up / 8) < HALF_ERROR


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # exp(-gate) is infinity here, and right
def test_shift_keeps_a_huge_gated_product_finite(
    packed: PackedWeight, place: Place, relative_error: Callable[..., float]
) -> None:
    x = place.randn(2, packed.depth, scale=1e3)
    gate, up = twin(packed, x).chunk(2, 1)
    shift = 2.0**-16
    got = SkinnyLinear.make(packed, gated=True, out_scale=shift).gated_silu(x)
    want = F.silu(gate) * up * shift
    assert (want / shift).abs().max() > torch.finfo(torch.float16).max
    assert relative_error(got, want) < HALF_ERROR


def test_argmax_is_that_of_the_logits(packed: PackedWeight, place: Place) -> None:
    x = place.randn(18, packed.depth)
    linear = SkinnyLinear.make(packed)
    logits = linear.linear(x, torch.float32)
    ids, best = linear.argmax(x)
    assert torch.equal(ids, logits.argmax(1))
    assert torch.equal(best, logits.amax(1))


def test_argmax_ties_go_to_the_lowest_id(place: Place) -> None:
    rows = 3 * 64 + 5
    weight = torch.zeros(rows, 128)
    for equal in (40, 41, 130, rows - 1):
        weight[equal, 0] = 1.0
    linear = SkinnyLinear.make(pack_dense(weight.to(place.device), place.dtype))
    x = torch.eye(128, device=place.device, dtype=place.dtype)[:3]
    ids, best = linear.argmax(x)
    assert ids.tolist() == [40, 0, 0]
    assert best.tolist() == [1.0, 0.0, 0.0]


def test_a_row_has_the_same_bits_at_any_row_count_and_beside_any_rows(packed: PackedWeight, place: Place) -> None:
    counts = (1, 2, 5, 8, 9, 15, 16, 17, 31, 32, 33, 48, 63, 64, 100) if place.real else (5, 16)
    x = place.randn(counts[-1], packed.depth)
    linear = SkinnyLinear.make(packed)
    gated = SkinnyLinear.make(packed, gated=True)
    calls: tuple[Callable[[Tensor], Tensor], ...] = (
        linear.linear,
        lambda rows: linear.partial(rows).transpose(0, 1),
        gated.gated_silu,
    )
    for call in calls:
        want = call(x)
        for count in counts:
            assert torch.equal(call(x[:count]), want[:count])
            mates = x[:count] * 3 + 1
            mates[count // 2] = x[count // 2]
            assert torch.equal(call(mates)[count // 2], want[count // 2])


def test_depth_that_is_no_multiple_of_the_tile(place: Place, relative_error: Callable[..., float]) -> None:
    for pack in (pack_dense, pack_int8):
        packed = pack(place.randn(70, 80, dtype=torch.float32), place.dtype)
        x = place.randn(3, 80)
        assert relative_error(SkinnyLinear.make(packed).linear(x, torch.float32), twin(packed, x)) < FLOAT_ERROR


def test_rows_may_be_strided(place: Place, relative_error: Callable[..., float]) -> None:
    packed = pack_dense(place.randn(64, 64, dtype=torch.float32), place.dtype)
    x = place.randn(4, 192)[:, 64:128]
    assert relative_error(SkinnyLinear.make(packed).linear(x, torch.float32), twin(packed, x)) < FLOAT_ERROR


def test_wrong_rows_are_refused(place: Place) -> None:
    linear = SkinnyLinear.make(pack_dense(place.randn(64, 64, dtype=torch.float32), place.dtype))
    with pytest.raises(ValueError, match="rows of 64 contiguous"):
        linear.linear(place.randn(2, 32))
    with pytest.raises(ValueError, match="needed"):
        linear.linear(place.randn(2, 64, dtype=torch.float32))
    with pytest.raises(ValueError, match="no silu epilogue"):
        linear.gated_silu(place.randn(2, 64))
