"""Decoding sequences as a graph's kernels read them: fields of rows, sequences and spans, and page tables.

Pure functions on the host, numbers in and numbers out. What the fields mean to the device is said in
serve/kernels/triton/source/step.py. This file knows no tensors and no requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from serve.kernels.triton.step import ANCHOR, ROW_FIELDS, SEQUENCE_FIELDS, drafted_token

SPAN_FIELDS = 3
"""First row, end row and the place of the first row among a kernel's rows (see Spans)."""
FIELDS = ROW_FIELDS + SEQUENCE_FIELDS + SPAN_FIELDS
_PADDING = (-1, 0, 0, 0, 0, 0, 0)


class Lane(NamedTuple):
    """One decoding sequence in a step: its newest token and a draft behind it.

    place: where the sequence was in the last launch, whose outcome the host has not read; -1 where ``start`` (position
    of the newest token) and ``anchor`` (that token) are known. end: positions that have pages. latest: the largest
    position that the newest token can have. draft: tokens to verify; wanted: how many of the block drafter's instead.
    """

    place: int
    start: int
    anchor: int
    pages: Sequence[int]
    end: int
    latest: int
    draft: tuple[int, ...] = ()
    wanted: int = 0

    @property
    def rows(self) -> int:
        return 1 + (self.wanted or len(self.draft))


@dataclass(frozen=True)
class Fields:
    """A step in numbers. owners: the lane behind each span, whose page table its rows read."""

    rows: list[tuple[int, ...]]
    sequences: list[tuple[int, int]]
    spans: list[tuple[int, int, int]]
    owners: list[Lane]

    def write(self, packed: NDArray[np.int32], count: int) -> int:
        """Into a flat buffer for a graph of ``count`` rows: row fields, sequence fields, spans, each padded. Returns
        how much of it is used."""
        start = 0
        rows = self.rows + [_PADDING] * (count - len(self.rows))
        for part, width in ((rows, ROW_FIELDS), (self.sequences, SEQUENCE_FIELDS), (self.spans, SPAN_FIELDS)):
            used = len(part) * width
            packed[start : start + used] = np.asarray(part, dtype=np.int32).reshape(-1)
            packed[start + used : start + count * width] = 0
            start += count * width
        return start

    def tables(self, page_size: int, lookahead: int) -> list[Table]:
        """The pages of each span that a step can reach."""
        found = []
        for lane in self.owners:
            pages = lane.pages
            found.append((pages, min(len(pages), -(-(lane.latest + 1 + lookahead) // page_size))))
        return found


Table = tuple[Sequence[int], int]
"""A sequence's list of pages and how many of them count."""


def same_tables(tables: Sequence[Table], before: Sequence[Table]) -> bool:
    """Whether ``tables`` say what those sent before them say: the very same lists, which only ever grow."""
    return len(tables) <= len(before) and all(
        pages is old and count <= sent for (pages, count), (old, sent) in zip(tables, before, strict=False)
    )


def write_tables(tables: Sequence[Table], flat: NDArray[np.int32]) -> tuple[int, int]:
    """Page tables into a flat buffer, as wide as the longest; their count and width."""
    width = max(count for _, count in tables)
    grid = flat[: len(tables) * width].reshape(len(tables), width)
    for line, (pages, count) in zip(grid, tables, strict=True):
        line[:count] = pages[:count]
    return len(tables), width


def verify_fields(lanes: Sequence[Lane], queries: int, block: int) -> Fields:
    """Rows of a verify pass. queries: rows of one span at most; block: tokens that a draft pass makes for a lane."""
    if all(lane.rows == 1 for lane in lanes):
        return Fields(
            [
                (lane.place, lane.start, 0, 1, index, lane.end, ANCHOR if lane.place >= 0 else lane.anchor)
                for index, lane in enumerate(lanes)
            ],
            [(index, 0) for index in range(len(lanes))],
            [(index, index + 1, index) for index in range(len(lanes))],
            list(lanes),
        )
    fields = Fields([], [], [], [])
    drafted = 0
    for lane in lanes:
        first = len(fields.rows)
        fields.sequences.append((first, lane.rows - 1))
        for offset in range(lane.rows):
            if offset == 0:
                token = ANCHOR if lane.place >= 0 else lane.anchor
            elif lane.wanted:
                token = drafted_token(drafted * block + offset - 1)
            else:
                token = lane.draft[offset - 1]
            table = len(fields.owners) + offset // queries
            fields.rows.append((lane.place, lane.start, offset, offset + 1, table, lane.end, token))
        drafted += lane.wanted > 0
        _add_spans(fields, lane, first, queries)
    return fields


def draft_fields(lanes: Sequence[Lane], queries: int, block_size: int, mask_token: int) -> Fields:
    """Rows of a draft pass: [anchor, mask, ...] of each lane, all seeing to the end of their block."""
    fields = Fields([], [], [], [])
    for lane in lanes:
        first = len(fields.rows)
        for offset in range(block_size):
            token = mask_token if offset else ANCHOR if lane.place >= 0 else lane.anchor
            table = len(fields.owners) + offset // queries
            fields.rows.append((lane.place, lane.start, offset, block_size, table, lane.end, token))
        _add_spans(fields, lane, first, queries)
    return fields


def _add_spans(fields: Fields, lane: Lane, first: int, queries: int) -> None:
    stop = len(fields.rows)
    for start in range(first, stop, queries):
        fields.spans.append((start, min(start + queries, stop), start))
        fields.owners.append(lane)
