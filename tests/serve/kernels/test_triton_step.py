"""The kernels around a step against their twins in torch, over random steps."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
import torch

from serve.kernels.triton.step import (
    ANCHOR,
    ROW_FIELDS,
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


def empty_rows(count: int, device: torch.device) -> StepRows:
    return StepRows(*(torch.full((count,), -5, device=device) for _ in range(4)))


@pytest.mark.parametrize("seed", range(3))
def test_rows_are_placed_as_the_twin_says(place: Place, seed: int) -> None:
    rng = random.Random(seed)
    rows = []
    for table in range(3):
        state = rng.choice((-1, rng.randrange(4)))
        start = rng.randrange(40)
        for offset in range(rng.randrange(1, 5)):
            token = rng.choice((ANCHOR, drafted_token(rng.randrange(6)), rng.randrange(300)))
            rows.append((state, start, offset, offset + 1, table, rng.choice((0, 20, 64)), token))
    rows.append((-1, 0, 0, 0, 0, 0, 0))
    fields = torch.tensor(rows, dtype=torch.int32, device=place.device)
    assert fields.shape[1] == ROW_FIELDS
    tables = torch.randint(0, 99, (3, 4), dtype=torch.int32, device=place.device)
    state_ = StepState(*(torch.randint(0, 50, (4,), dtype=torch.int32, device=place.device) for _ in range(2)))
    drafts = torch.randint(0, 300, (6,), device=place.device)
    got, want = empty_rows(len(rows), place.device), empty_rows(len(rows), place.device)
    prepare_rows(fields, tables, state_, drafts, got, PAGE, SCRATCH)
    prepare_rows_eager(fields, tables, state_, drafts, want, PAGE, SCRATCH)
    for name in ("token_ids", "positions", "slots", "visible"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    assert got.slots[-1] // PAGE == SCRATCH
    assert got.visible[-1] == 0


@pytest.mark.parametrize("seed", range(3))
def test_kept_counts_and_the_next_state_are_the_twins(place: Place, seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.randrange(5) for _ in range(4)]
    sequences, first = [], 0
    for length in lengths:
        sequences.append((first, length))
        first += length + 1
    total = first + 2
    sequences += [(0, 0)] * (total - len(sequences))
    fields = torch.tensor(sequences, dtype=torch.int32, device=place.device)
    best = torch.randint(0, 3, (total,), device=place.device)
    values = torch.randn(total, device=place.device)
    values[1], values[2] = float("nan"), float("inf")
    rows = empty_rows(total, place.device)
    rows.token_ids.copy_(torch.randint(0, 3, (total,)))
    rows.positions.copy_(torch.randint(0, 50, (total,)))
    states = [StepState(*(torch.zeros(total + 3, dtype=torch.int32, device=place.device) for _ in "xy")) for _ in "xy"]
    results = [torch.zeros(3, total, dtype=torch.int32, device=place.device) for _ in "xy"]
    settle_rows(fields, rows, best, values, states[0], results[0], 4)
    settle_rows_eager(fields, rows, best, values, states[1], results[1], 4)
    assert torch.equal(results[0], results[1])
    assert torch.equal(states[0].anchor, states[1].anchor)
    assert torch.equal(states[0].start, states[1].start)
    kept = results[0][1].tolist()
    for (row, drafted), count in zip(sequences[:4], kept, strict=False):
        agrees = (rows.token_ids[row + 1 : row + 1 + drafted] == best[row : row + drafted]).tolist()
        assert count == [*agrees, False].index(False)
    assert results[0][2, :4].tolist() == [1, 0, 0, 1]


@pytest.mark.parametrize(("waiting", "used"), [(0, 3), (5, 1), (2, 0)])
def test_rows_without_padding_go_behind_those_that_wait(place: Place, waiting: int, used: int) -> None:
    taps = torch.randn(3, 1100, device=place.device)
    rows = StepRows(*(torch.randint(0, 99, (3,), device=place.device) for _ in range(4)))
    window = torch.tensor([waiting, used], dtype=torch.int32, device=place.device)
    kept = [(torch.zeros(8, 1100, device=place.device), torch.zeros(2, 8, dtype=torch.int64, device=place.device))] * 2
    got, want = ((taps_.clone(), places.clone()) for taps_, places in kept)
    append_rows(taps, rows, window, *got)
    append_rows_eager(taps, rows, window, *want)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
