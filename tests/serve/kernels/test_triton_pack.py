"""Packed weights stand for the matrix they came from, within the step of their own scale."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from serve.kernels.triton import pack
from serve.kernels.triton.pack import (
    INT4_GROUPS,
    PackedWeight,
    dequantize,
    in_blocks,
    pack_dense,
    pack_int4,
    pack_int8,
    rows_of,
)


@settings(deadline=None, max_examples=25)
@given(st.sampled_from(INT4_GROUPS), st.integers(1, 3), st.integers(0, 1000), st.floats(1e-3, 10))
def test_int4_error_is_at_most_a_step(group: int, groups: int, seed: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    depth = max(64, group * groups // 64 * 64)
    depth += -depth % group
    weight = torch.randn(5, depth, generator=generator) * scale
    packed = pack_int4(weight, torch.float16, group)
    assert packed.scale is not None
    step = packed.scale.unsqueeze(2).view(torch.float16)[:, :, 0].float().t().repeat_interleave(group, 1)
    assert ((dequantize(packed) - weight).abs() <= step * 1.01).all()


@pytest.mark.parametrize("group", [0, 128])
def test_int8_error_is_at_most_half_a_step(group: int) -> None:
    weight = torch.randn(7, 256, generator=torch.Generator().manual_seed(1))
    packed = pack_int8(weight, torch.float16, group)
    assert packed.scale is not None
    step = packed.scale[:, None] if not group else packed.scale.t().repeat_interleave(group, 1)
    assert ((dequantize(packed) - weight).abs() <= step * 0.501).all()


def test_zero_rows_stay_zero() -> None:
    weight = torch.zeros(4, 128)
    for packed in (pack_int8(weight, torch.float16), pack_int4(weight, torch.float16, 32)):
        assert not dequantize(packed).any()


def test_bytes_read_by_one_pass() -> None:
    weight = torch.randn(64, 256)
    assert pack_dense(weight, torch.float16).nbytes == 64 * 256 * 2
    assert pack_int8(weight, torch.float16).nbytes == 64 * 256 + 64 * 4
    assert pack_int4(weight, torch.float16, 128).nbytes == 64 * 128 + 64 * 2 * 4


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="groups of 128 do not divide a depth of 192"):
        pack_int4(torch.zeros(4, 192), torch.float16, 128)
    with pytest.raises(ValueError, match="multiple of 64, got 96"):
        pack_int4(torch.zeros(4, 96), torch.float16, 32)
    with pytest.raises(ValueError, match="one of"):
        pack_int4(torch.zeros(4, 128), torch.float16, 16)
    with pytest.raises(ValueError, match="float16 or bfloat16"):
        pack_dense(torch.zeros(4, 64), torch.float32)


@pytest.mark.parametrize("one", [pack_dense, pack_int8, pack_int4])
def test_slices_are_packed_as_the_whole(one: Callable[..., PackedWeight], monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(71, 128, generator=torch.Generator().manual_seed(4))
    seen: list[int] = []

    def noted(part: Tensor) -> PackedWeight:
        seen.append(part.shape[0])
        return one(part, torch.bfloat16)

    monkeypatch.setattr(pack, "SLICE_BYTES", 20 * 128 * 4)
    sliced, whole = pack.pack_in_slices(weight, weight.device, noted), one(weight, torch.bfloat16)
    assert seen == [16, 16, 16, 16, 7]
    assert torch.equal(sliced.data, whole.data)
    assert (sliced.rows, sliced.depth, sliced.group) == (whole.rows, whole.depth, whole.group)
    if whole.scale is not None:
        assert sliced.scale is not None
        assert torch.equal(sliced.scale, whole.scale)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_blocks_are_packed_in_slices_and_hold_the_same_codes(weights: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(48, 256, generator=torch.Generator().manual_seed(5))
    rows = pack.pack_as(weights, weight, weight.device, torch.float16)
    monkeypatch.setattr(pack, "SLICE_BYTES", 20 * 256 * 4)
    blocks = pack.pack_as(weights, weight, weight.device, torch.float16, blocks=True)
    assert blocks.in_blocks
    assert not rows.in_blocks
    assert torch.equal(blocks.data, in_blocks(rows).data)
    assert blocks.nbytes == rows.nbytes
    assert torch.equal(dequantize(blocks), dequantize(rows))
    # Row 19 is the fourth of the second block; its bytes 64 .. 127 are those of its second unit.
    assert torch.equal(blocks.data[1, 1, 3], rows.data[19, 64:128])
    assert torch.equal(dequantize(rows_of(blocks, 16, 99)), dequantize(rows)[16:])
    with pytest.raises(ValueError, match=r"rows 8 \.\. 32 of a matrix in blocks of 16"):
        rows_of(blocks, 8, 32)


def test_what_threads_do_not_multiply_stays_row_by_row() -> None:
    for weight, weights in (
        (torch.zeros(20, 256), "int8"),
        (torch.zeros(32, 96), "int8"),
        (torch.zeros(32, 128), "int4"),
    ):
        assert not pack.pack_as(weights, weight, weight.device, torch.float16, blocks=True).in_blocks
