"""Attention over pages against its eager twin, and the same bits whatever else is in the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from serve.kernels.attention import PagedAttention
from serve.kernels.attention_plan import AttentionShape
from serve.kernels.kv_cache import dequantized, quantize_heads
from serve.kernels.triton import lane_attention, tiles
from serve.kernels.triton.attention import SPLIT_ROWS, build_plan, paged_attention
from serve.model.batch import FlatBatch

if TYPE_CHECKING:
    from tests.serve.kernels.conftest import Place

PAGE = 16
ERROR = 6e-3


@dataclass(frozen=True)
class Span:
    """Rows of one sequence: ``rows`` query rows after ``context`` positions; two_way rows all see to the end."""

    context: int
    rows: int
    two_way: bool = False


@dataclass(frozen=True)
class Case:
    batch: FlatBatch
    q: Tensor
    cache: Tensor
    scale: Tensor | None = None

    def in_int8(self) -> Case:
        """The same with K and V as codes."""
        codes, scale = quantize_heads(self.cache.view(-1, self.cache.shape[-1]))
        return replace(self, cache=codes.view(self.cache.shape), scale=scale.view(self.cache.shape[:-1]))


def make(place: Place, spans: list[Span], heads: int, kv_heads: int, head_dim: int) -> Case:
    """Sequences on interleaved pages; each draws its own values, so that a sequence alone is the same sequence."""
    visible: list[int] = []
    starts = [0]
    tables: list[tuple[int, ...]] = []
    pages = 0
    for span in spans:
        end = span.context + span.rows
        visible += [end if span.two_way else span.context + row + 1 for row in range(span.rows)]
        starts.append(starts[-1] + span.rows)
        count = -(-end // PAGE)
        tables.append(tuple(range(pages + count - 1, pages - 1, -1)))
        pages += count
    seen = torch.tensor(visible, device=place.device)
    batch = FlatBatch(seen, seen - 1, seen - 1, seen, tuple(starts), tuple(tables), seen[:0])
    cache = place.randn(pages, kv_heads, 2, PAGE, head_dim)
    return Case(batch, place.randn(starts[-1], heads, head_dim), cache)


def attend(case: Case) -> Tensor:
    return paged_attention(case.q, case.cache, build_plan(case.batch, PAGE), case.scale)


def twin(case: Case) -> Tensor:
    shape = AttentionShape(case.q.shape[1], case.cache.shape[1], case.q.shape[2], PAGE)
    eager = PagedAttention(shape)
    kept = case.cache.float() if case.scale is None else dequantized(case.cache, case.scale)
    return eager(case.q.float().flatten(1), kept, eager.plan(case.batch))


CASES = {
    "one decode row": [Span(20, 1)],
    "first token": [Span(0, 1)],
    "context over several splits": [Span(600, 2)],
    "a block of sixteen": [Span(37, 16)],
    "a two-way block": [Span(30, 8, two_way=True)],
    "mixed batch": [Span(250, 1), Span(0, 5), Span(300, 4, two_way=True), Span(17, 3)],
    "a prefill chunk": [Span(0, 70)],
    "a later chunk and decode rows": [Span(100, 1), Span(33, 40), Span(9, 2)],
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("geometry", [(4, 1, 16), (6, 2, 32), (2, 2, 16)], ids=str)
def test_rows_match_the_eager_attention(
    name: str, geometry: tuple[int, int, int], place: Place, relative_error: Callable[..., float]
) -> None:
    case = make(place, CASES[name], *geometry)
    assert relative_error(attend(case), twin(case)) < ERROR


@pytest.mark.parametrize("name", ["context over several splits", "mixed batch", "a later chunk and decode rows"])
def test_rows_over_codes_match_the_eager_attention(
    name: str, place: Place, relative_error: Callable[..., float]
) -> None:
    case = make(place, CASES[name], *((32, 8, 128) if place.real else (6, 2, 32)))
    got = attend(case.in_int8())
    assert relative_error(got, twin(case.in_int8())) < ERROR
    assert 0 < relative_error(got, twin(case)) < 0.02


@pytest.mark.gpu
@pytest.mark.parametrize("geometry", [(32, 8, 128), (9, 3, 64)], ids=str)
def test_rows_match_at_real_shapes(
    geometry: tuple[int, int, int], place: Place, relative_error: Callable[..., float]
) -> None:
    spans = [Span(1000, 16), Span(3000, 1), Span(0, 700), Span(555, 300), Span(63, 8, two_way=True)]
    case = make(place, spans, *geometry)
    assert relative_error(attend(case), twin(case)) < ERROR


@pytest.mark.parametrize("codes", [False, True])
def test_a_row_has_the_same_bits_in_any_batch(place: Place, codes: bool) -> None:
    geometry = (32, 8, 128) if place.real else (6, 2, 16)
    context = 2000 if place.real else 270
    case = make(place, [Span(context, SPLIT_ROWS), Span(3 * context, 2), Span(5, 3)], *geometry)
    case = case.in_int8() if codes else case
    want = attend(case)[:SPLIT_ROWS]
    for first, count in ((0, 1), (0, 5), (3, 13), (15, 1)):
        batch = case.batch
        seen = batch.visible[first : first + count]
        alone = FlatBatch(seen, seen - 1, seen - 1, seen, (0, count), batch.page_tables[:1], seen[:0])
        got = attend(replace(case, batch=alone, q=case.q[first : first + count].contiguous()))
        assert torch.equal(got, want[first : first + count])


def test_chunks_whose_last_rows_are_wanted_alone_give_them_the_same_bits(place: Place) -> None:
    geometry = (32, 8, 128) if place.real else (4, 2, 16)
    case = make(place, [Span(0, 200 if place.real else 40), Span(0, 20), Span(33, 70)], *geometry)
    wanted = torch.tensor([case.batch.query_starts[1] - 1, case.batch.query_starts[3] - 1])
    plan = build_plan(replace(case.batch, host=(torch.empty(4, 0), wanted)), PAGE)
    assert plan.ends is not None
    assert plan.ends.spans.tolist() == [[row, row + 1, index] for index, row in enumerate(wanted.tolist())]
    rows = wanted.to(place.device)
    alone = paged_attention(case.q, case.cache, plan.last)[rows]
    assert torch.equal(alone, paged_attention(case.q, case.cache, plan)[rows])


def test_programs_that_share_the_splits_change_no_bit(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make(place, [Span(800, 3), Span(300, 1), Span(5, 2)], 4, 2, 16)
    want = attend(case)
    for programs in (1, 2, 64):
        monkeypatch.setattr(tiles, "SPLIT_PROGRAMS", programs)
        assert torch.equal(attend(case), want)


@pytest.mark.parametrize("room", [40, 100], ids=["counted", "too-many-to-count"])
def test_room_for_spans_that_are_not_there_changes_no_bit(
    place: Place, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make(place, [Span(800, 3), Span(300, 1), Span(5, 2)], 4, 2, 16)
    plan = build_plan(case.batch, PAGE)
    assert plan.split is not None
    want = paged_attention(case.q, case.cache, plan)
    empty = plan.split.spans.new_zeros(room, 3)
    tables = plan.split.tables
    roomy = replace(
        plan.split,
        spans=torch.cat([plan.split.spans, empty]),
        tables=torch.cat([tables, tables.new_zeros(room, tables.shape[1])]),
        visible=4 * plan.split.visible,
    )
    for programs in (1, 64, 512):
        monkeypatch.setattr(tiles, "SPLIT_PROGRAMS", programs)
        assert torch.equal(paged_attention(case.q, case.cache, replace(plan, split=roomy)), want)


def test_few_rows_attend_in_lanes_with_the_bits_of_tiles(
    place: Place, relative_error: Callable[..., float], monkeypatch: pytest.MonkeyPatch
) -> None:
    heads, kv_heads = (32, 8) if place.real else (4, 1)
    contexts = (1030, 0, 70, 600) if place.real else (270, 0)
    spans = [Span(context, 3, two_way=context == 70) for context in contexts]
    case = make(place, spans, heads, kv_heads, 128)
    monkeypatch.setattr(lane_attention, "LANE_ROWS", 16)
    want = attend(case)
    assert relative_error(want, twin(case)) < ERROR
    tables, seen = case.batch.page_tables, case.batch.visible
    for programs in (8, 264):
        monkeypatch.setattr(tiles, "LANE_PROGRAMS", programs)
        assert not place.real or torch.equal(attend(case), want)
        # Alone, the row has a tile to itself.
        alone = FlatBatch(seen[1:2], seen[1:2] - 1, seen[1:2] - 1, seen[1:2], (0, 1), tables[:1], seen[:0])
        assert torch.equal(attend(replace(case, batch=alone, q=case.q[1:2].contiguous())), want[1:2])
    monkeypatch.setattr(lane_attention, "LANE_ROWS", 0)
    if place.real:
        assert torch.equal(attend(case), want)
    else:  # The interpreter adds in an order of its own.
        assert relative_error(attend(case), want) < ERROR


def test_pages_past_the_visible_end_are_not_read(place: Place) -> None:
    case = make(place, [Span(20, 1), Span(40, 20)], 2, 1, 16)
    want = attend(case)
    batch = case.batch
    last = case.batch.page_tables[0][-1]
    case.cache[last, :, :, 21 % PAGE :] = float("nan")
    assert torch.equal(attend(Case(batch, case.q, case.cache)), want)


def test_padding_rows_that_see_nothing_are_zero(place: Place) -> None:
    case = make(place, [Span(20, 2)], 2, 1, 16)
    seen = torch.tensor([21, 0], device=place.device)
    padded = FlatBatch(seen, seen, seen, seen, (0, 2), case.batch.page_tables, seen[:0])
    got = attend(Case(padded, case.q, case.cache))
    assert got.isfinite().all()
    assert not got[1].any()


def test_geometries_and_tables_that_do_not_fit_are_refused(place: Place) -> None:
    case = make(place, [Span(20, 1)], 4, 1, 16)
    with pytest.raises(ValueError, match="ratio must be whole"):
        paged_attention(place.randn(1, 17, 16), case.cache, build_plan(case.batch, PAGE))
    seen = case.batch.visible
    short = FlatBatch(seen, seen, seen, seen, (0, 1), ((0,),), seen[:0])
    with pytest.raises(ValueError, match="attends to 21 positions but its table has 1 pages"):
        build_plan(short, PAGE)
