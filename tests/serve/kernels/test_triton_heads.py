"""A row's heads made a warp each are those of the other kernel, and the same in any batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from serve.kernels.triton import heads, rows

if TYPE_CHECKING:
    from tests.serve.kernels.conftest import Place

PAGE, EPS, ERROR, CODE_ERROR = 16, 1e-6, 5e-3, 0.01


@pytest.mark.parametrize("codes", [False, True])
@pytest.mark.parametrize("parts", [1, 3])
def test_heads_are_those_of_the_other_kernel(
    parts: int, codes: bool, place: Place, relative_error: Callable[..., float]
) -> None:
    count, kv_heads, number = (32, 8, 40) if place.real else (6, 2, 3)
    qkv = place.randn(parts, number, (count + 2 * kv_heads) * 128, dtype=torch.float32)
    norm = place.randn(count + kv_heads, 128, dtype=torch.float32) if parts > 1 else None
    turns = place.randn(200 + number, 128, dtype=torch.float32)
    positions = torch.arange(200, 200 + number, device=place.device)
    slots = (torch.randperm(5 * PAGE, generator=torch.Generator().manual_seed(1))[:number]).to(place.device)

    def made(way: Callable[..., Tensor], first: int, stop: int) -> tuple[Tensor, Tensor, Tensor | None]:
        kv = place.randn(5, kv_heads, 2, PAGE, 128)
        scale = torch.zeros(kv.shape[:-1], device=place.device) if codes else None
        kv = torch.zeros_like(kv, dtype=torch.int8) if codes else torch.zeros_like(kv)
        some = qkv[:, first:stop].contiguous()
        q = way(some, norm, turns, positions[first:stop], slots[first:stop], kv, count, EPS, place.dtype, scale)
        return q, kv, scale

    q, kv, scale = made(heads.by_warps, 0, number)
    want, written, steps = made(rows.qkv_write, 0, number)
    assert relative_error(q, want) < ERROR
    if scale is None or steps is None:
        assert relative_error(kv, written) < ERROR
    else:
        assert relative_error(scale, steps) < ERROR
        assert relative_error(kv * scale[..., None], written * steps[..., None]) < CODE_ERROR
    alone, own, step = made(heads.by_warps, 1, 2)
    assert torch.equal(alone[0], q[1])
    page, place_in = int(slots[1]) // PAGE, int(slots[1]) % PAGE
    assert torch.equal(own[page, :, :, place_in], kv[page, :, :, place_in])
    assert scale is None or torch.equal(step[page, :, :, place_in], scale[page, :, :, place_in])  # type: ignore[index]


def _negated(*given: Any) -> Tensor:
    return -rows.qkv_write(*given)


def _keys_no_numbers(*given: Any) -> Tensor:
    q = rows.qkv_write(*given)
    given[5].fill_(float("nan"))
    return q


def _no_such_instruction(*given: Any) -> Tensor:
    raise RuntimeError("no such instruction")


@pytest.mark.parametrize("fault", [None, _negated, _keys_no_numbers, _no_such_instruction])
def test_a_way_that_gives_other_heads_is_not_taken(
    fault: Callable[..., Tensor] | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if fault is not None:
        monkeypatch.setattr(heads, "by_warps", fault)
    agree = heads.warps_agree.__wrapped__(torch.device("cpu"), torch.float16, 2, 1, PAGE, False)
    assert agree == (fault is None)
    assert caplog.text.count("heads are not made a warp each") == (fault is not None)
