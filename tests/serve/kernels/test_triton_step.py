"""The kernels around a step against their twins in torch, over random steps."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
import torch

from serve.kernels.triton.step import (
    ANCHOR,
    MOMENTS,
    ROW_FIELDS,
    SEQUENCE_FIELDS,
    SPAN_FIELDS,
    WINDOW_FIELDS,
    StepAnswers,
    StepFields,
    StepRows,
    StepState,
    append_rows,
    append_rows_eager,
    drafted_token,
    prepare_rows,
    prepare_rows_eager,
    settle_rows,
    settle_rows_eager,
)

if TYPE_CHECKING:
    from tests.serve.kernels.conftest import Place

PAGE, SCRATCH = 16, 99


def empty_fields(count: int, device: torch.device) -> StepFields:
    sizes = (count * (SEQUENCE_FIELDS + SPAN_FIELDS), WINDOW_FIELDS)
    return StepFields(*(torch.full((size,), -5, dtype=torch.int32, device=device) for size in sizes))


def empty_answers(results: int, device: torch.device, pinned: bool = False) -> StepAnswers:
    """Of three turns."""
    shapes: dict[torch.dtype, int] = {torch.int32: results, torch.int64: MOMENTS}
    lines = [torch.zeros(3, width, dtype=dtype, device="cpu" if pinned else device) for dtype, width in shapes.items()]
    return StepAnswers(*(line.pin_memory() if pinned else line for line in lines))


def empty_rows(count: int, device: torch.device) -> StepRows:
    return StepRows(*(torch.full((count,), -5, device=device) for _ in range(4)))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("where", ["device", "host"])
def test_rows_are_placed_as_the_twin_says(place: Place, seed: int, where: str) -> None:
    """From fields on the device, or in the host's memory (where there is a difference)."""
    rng = random.Random(seed)
    rows = []
    for table in range(3):
        state = rng.choice((-1, rng.randrange(4)))
        start = rng.randrange(40)
        for offset in range(rng.randrange(1, 5)):
            token = rng.choice((ANCHOR, drafted_token(rng.randrange(6)), rng.randrange(300)))
            rows.append((state, start, offset, offset + 1, table, rng.choice((0, 20, 64)), token))
    rows.append((-1, 0, 0, 0, 0, 0, 0))
    count = len(rows)
    behind = [rng.randrange(1000) for _ in range(count * (SEQUENCE_FIELDS + SPAN_FIELDS) + WINDOW_FIELDS - 1)]
    behind.append(seed)
    packed = torch.tensor([*sum(rows, ()), *behind], dtype=torch.int32)
    assert len(packed) - len(behind) == count * ROW_FIELDS
    if place.real:
        packed = packed.pin_memory() if where == "host" else packed.to(place.device)
    tables = torch.randint(0, 99, (3, 4), dtype=torch.int32, device=place.device)
    state_ = StepState(*(torch.randint(0, 50, (4,), dtype=torch.int32, device=place.device) for _ in range(2)))
    drafts = torch.randint(0, 300, (6,), dtype=torch.int32, device=place.device)
    got, want = empty_rows(count, place.device), empty_rows(count, place.device)
    got_fields, want_fields = empty_fields(count, place.device), empty_fields(count, place.device)
    answers = empty_answers(1, place.device, place.real and where == "host")
    prepare_rows(packed, tables, state_, drafts, got, got_fields, answers, 1, PAGE, SCRATCH)
    prepare_rows_eager(packed, tables, state_, drafts, want, want_fields, answers, 1, PAGE, SCRATCH)
    if place.real:
        torch.cuda.synchronize()
    assert answers.times.nonzero().tolist() == [[seed, 1]] * place.real
    assert torch.equal(got_fields.kept, want_fields.kept)
    assert torch.equal(got_fields.window, want_fields.window)
    copied = (want_fields.sequences, want_fields.spans, want_fields.window)
    assert torch.cat([part.flatten() for part in copied]).tolist() == behind
    for name in ("token_ids", "positions", "slots", "visible"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    assert got.slots[-1] // PAGE == SCRATCH
    assert got.visible[-1] == 0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("where", ["device", "host"])
def test_kept_counts_and_the_next_state_are_the_twins(place: Place, seed: int, where: str) -> None:
    """With results on the device, or in the host's memory (where there is a difference)."""
    rng = random.Random(seed)
    lengths = [rng.randrange(5) for _ in range(4)]
    sequences, first = [], 0
    for length in lengths:
        sequences.append((first, length))
        first += length + 1
    total = first + 2
    sequences += [(0, 0)] * (total - len(sequences))
    fields = empty_fields(total, place.device)
    fields.sequences.copy_(torch.tensor(sequences, dtype=torch.int32))
    fields.window[-1] = seed
    best = torch.randint(0, 3, (total,), device=place.device)
    values = torch.randn(total, device=place.device)
    values[1], values[2] = float("nan"), float("inf")
    rows = empty_rows(total, place.device)
    rows.token_ids.copy_(torch.randint(0, 3, (total,)))
    rows.positions.copy_(torch.randint(0, 50, (total,)))
    states = [StepState(*(torch.zeros(total + 3, dtype=torch.int32, device=place.device) for _ in "xy")) for _ in "xy"]
    answers = [empty_answers(3 * total + 2, place.device, pinned) for pinned in (place.real and where == "host", False)]
    settle_rows(fields, rows, best, values, states[0], answers[0], 4)
    settle_rows_eager(fields, rows, best, values, states[1], answers[1], 4)
    results = [answer.results for answer in answers]
    if place.real:
        torch.cuda.synchronize()
    assert torch.equal(results[0].to(place.device), results[1])
    result = results[0][seed, : 3 * total].view(3, total)
    assert not results[0].sum(1)[[turn for turn in range(3) if turn != seed]].any()
    assert answers[0].times.nonzero().tolist() == [[seed, MOMENTS - 1]] * place.real
    assert torch.equal(states[0].anchor, states[1].anchor)
    assert torch.equal(states[0].start, states[1].start)
    kept = result[1].tolist()
    for (row, drafted), count in zip(sequences[:4], kept, strict=False):
        agrees = (rows.token_ids[row + 1 : row + 1 + drafted] == best[row : row + drafted]).tolist()
        assert count == [*agrees, False].index(False)
    assert result[2, :4].tolist() == [1, 0, 0, 1]


@pytest.mark.parametrize(("waiting", "used"), [(0, 3), (5, 1), (2, 0)])
def test_rows_without_padding_go_behind_those_that_wait(place: Place, waiting: int, used: int) -> None:
    taps = torch.randn(3, 1100, device=place.device)
    rows = StepRows(*(torch.randint(0, 99, (3,), device=place.device) for _ in range(4)))
    window = torch.tensor([waiting, used, 7], dtype=torch.int32, device=place.device)
    kept = [(torch.zeros(8, 1100, device=place.device), torch.zeros(2, 8, dtype=torch.int64, device=place.device))] * 2
    got, want = ((taps_.clone(), places.clone()) for taps_, places in kept)
    append_rows(taps, rows, window, *got)
    append_rows_eager(taps, rows, window, *want)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
