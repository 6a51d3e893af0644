"""Long prompts attended to over gathered pages: the bits of the page-by-page kernel, and refused where they differ."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from serve.kernels.triton import attention, gathered
from serve.kernels.triton.attention import Spans, TritonPlan, paged_attention
from serve.kernels.triton.card import capability

if TYPE_CHECKING:
    from tests.serve.kernels.conftest import Place

CPU = torch.device("cpu")


@pytest.mark.parametrize("page_size", [16, 32, 64])
def test_gathered_pages_give_a_row_the_same_bits(place: Place, page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if not place.real:
        monkeypatch.setattr(gathered, "_TRIED", (9, 70))
    heads = (32, 8) if place.real else (2, 1)
    if capability(place.device) != 90:  # no such copy engine there, and nobody asks for it
        assert not gathered.fits(place.randn(4096, 32, 128), place.randn(128, 8, 2, 32, 128), 1, 4096, 4096)
        return
    both = (attention._prefill_gathered, attention._prefill_by_pages)
    one, other = gathered._outcomes(place.device, place.dtype, *heads, page_size, *both)
    assert one.isfinite().all()
    assert torch.equal(one, other)


def zeros(
    q: Tensor, kv: Tensor, tables: Tensor, spans: Tensor, visible: Tensor, longest: int, seen: int, out: Tensor
) -> None:
    assert kv[int(tables[0, -1]), :, :, seen % kv.shape[3] :].isnan().all()
    out.zero_()


def ones(
    q: Tensor, kv: Tensor, tables: Tensor, spans: Tensor, visible: Tensor, longest: int, seen: int, out: Tensor
) -> None:
    out.fill_(1)


def broken(
    q: Tensor, kv: Tensor, tables: Tensor, spans: Tensor, visible: Tensor, longest: int, seen: int, out: Tensor
) -> None:
    raise RuntimeError("no such instruction")


def test_a_kernel_with_the_same_bits_is_taken() -> None:
    assert gathered.agrees(CPU, torch.float16, 2, 1, 32, zeros, zeros)


@pytest.mark.parametrize(("own", "reason"), [(ones, "other bits"), (broken, "no such instruction")])
def test_another_kernel_is_not_and_the_log_says_why(
    own: gathered.Prefill, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert not gathered.agrees(CPU, torch.float16, 2, 1, 32, own, zeros)
    assert reason in caplog.text


@pytest.mark.gpu
def test_a_long_chunk_takes_it_on_a_hopper_card_and_keeps_its_bits(place: Place) -> None:
    rows, before, page_size = 2500, 77, 32
    pages = -(-(before + rows) // page_size)
    q, kv = place.randn(rows, 32, 128), place.randn(pages, 8, 2, page_size, 128)
    assert gathered.fits(q, kv, 1, rows, before + rows) == (capability(place.device) == 90)
    assert not gathered.fits(q, kv, 2, rows, before + rows)
    assert not gathered.fits(q, kv, 1, rows, 3 * rows)
    tables = torch.arange(pages - 1, -1, -1, dtype=torch.int32, device=place.device)[None]
    spans = torch.tensor([[0, rows, 0]], dtype=torch.int32, device=place.device)
    visible = torch.arange(before + 1, before + rows + 1, device=place.device)
    want = torch.empty_like(q)
    attention._prefill_by_pages(q, kv, tables, spans, visible, rows, before + rows, want)
    plan = TritonPlan(None, Spans(tables, spans, visible[:0], rows, before + rows), visible)
    assert torch.equal(paged_attention(q, kv, plan), want.flatten(1))
