"""The numbers that a graph reads are those of its lanes, written out row by row."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.engine.lanes import FIELDS, Fields, Lane, Packer
from serve.kernels.triton.step import ANCHOR, ROW_FIELDS, drafted_token

BLOCK, MASK = 4, 9


@st.composite
def some_lanes(draw: st.DrawFn) -> list[Lane]:
    kinds = draw(st.lists(st.sampled_from(["plain", "copy", "block"]), min_size=1, max_size=6))
    lanes = []
    for kind in kinds:
        place, start, anchor, end = (draw(st.integers(low, 500)) for low in (-1, 0, 0, 1))
        copy = tuple(draw(st.lists(st.integers(0, 300), min_size=1, max_size=7))) if kind == "copy" else ()
        wanted = draw(st.integers(1, BLOCK)) if kind == "block" else 0
        lanes.append(Lane(place, start, anchor, [7, 8], end, start, copy, wanted))
    return lanes


def check(fields: Fields, lanes: list[Lane], queries: int, rows: list[list[tuple[int, int]]]) -> None:
    """rows: by lane, the token and the visible positions beyond the start of each of its rows."""
    expected: list[tuple[int, ...]] = []
    sequences, spans, owners = [], [], []
    for lane, own in zip(lanes, rows, strict=True):
        first = len(expected)
        sequences.append((first, len(own) - 1))
        for offset, (token, seen) in enumerate(own):
            if offset % queries == 0:
                spans.append((first + offset, min(first + offset + queries, first + len(own)), first + offset))
                owners.append(lane)
            expected.append((lane.place, lane.start, offset, seen, len(spans) - 1, lane.end, token))
    assert [tuple(row) for row in fields.rows.tolist()] == expected
    assert [tuple(row) for row in fields.spans.tolist()] == spans
    assert all(one is two for one, two in zip(fields.owners, owners, strict=True))
    assert [tuple(row) for row in fields.sequences.tolist()] == sequences


def newest(lane: Lane) -> int:
    return ANCHOR if lane.place >= 0 else lane.anchor


@settings(deadline=None)
@given(some_lanes(), st.integers(1, 5))
def test_fields_say_of_every_row_what_its_lane_says(lanes: list[Lane], queries: int) -> None:
    rows, blocks = [], 0
    for lane in lanes:
        tokens = [newest(lane), *lane.draft]
        if lane.wanted:
            tokens += [drafted_token(blocks * (BLOCK + 1) + 1 + offset) for offset in range(lane.wanted)]
            blocks += 1
        rows.append([(token, offset + 1) for offset, token in enumerate(tokens)])
    own = [[(newest(lane), BLOCK + 1), *[(MASK, BLOCK + 1)] * BLOCK] for lane in lanes]
    packer = Packer(queries, BLOCK)
    for _ in range(2):  # the second time with what was kept from the first
        check(packer.verify(lanes), lanes, queries, rows)
        check(packer.draft(lanes, MASK), lanes, queries, own)


def test_what_is_written_is_padded_with_rows_of_nobody() -> None:
    fields = Packer(2, BLOCK).verify([Lane(-1, 5, 6, [1], 32, 5, (7, 8)), Lane(0, 9, 1, [2], 32, 9)])
    packed = np.full(6 * FIELDS + 3, 77, dtype=np.int32)
    assert fields.write(packed, 6) == 6 * FIELDS
    rows = packed[: 6 * ROW_FIELDS].reshape(6, ROW_FIELDS)
    assert rows[:4].tolist() == fields.rows.tolist()
    assert rows[4:].tolist() == [[-1, 0, 0, 0, 0, 0, 0]] * 2
    assert packed[6 * ROW_FIELDS : 6 * FIELDS].any()
    assert packed[6 * FIELDS :].tolist() == [77] * 3
