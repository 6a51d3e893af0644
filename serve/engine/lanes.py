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

from serve.kernels.triton.step import ANCHOR, ROW_FIELDS, SEQUENCE_FIELDS, SPAN_FIELDS, drafted_token

FIELDS = ROW_FIELDS + SEQUENCE_FIELDS + SPAN_FIELDS
PLACE, START, OFFSET, VISIBLE, TABLE, END, TOKEN = range(ROW_FIELDS)
_PADDING = (-1, 0, 0, 0, 0, 0, 0)
MOST_SHAPES = 512
"""Kept by one packer."""


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
    """A step in numbers: rows [R, ROW_FIELDS], sequences [S, SEQUENCE_FIELDS] and spans [P, SPAN_FIELDS], all int32.
    owners: the lane behind each span, whose page table its rows read."""

    rows: NDArray[np.int32]
    sequences: NDArray[np.int32]
    spans: NDArray[np.int32]
    owners: list[Lane]

    def write(self, packed: NDArray[np.int32], count: int) -> int:
        """Into a flat buffer for a graph of ``count`` rows: row fields, sequence fields, spans, each padded. Returns
        how much of it is used."""
        start = 0
        for part, padding in ((self.rows, _PADDING), (self.sequences, 0), (self.spans, 0)):
            end = start + count * part.shape[1]
            grid = packed[start:end].reshape(count, part.shape[1])
            grid[: len(part)] = part
            grid[len(part) :] = padding
            start = end
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


@dataclass(frozen=True)
class _Shape:
    """What fields owe to the numbers of rows alone. rows [R, ROW_FIELDS]: without what only lanes know; owners [R] and
    span_owners: the lane of each row and span; firsts: each lane's first row."""

    rows: NDArray[np.int32]
    sequences: NDArray[np.int32]
    spans: NDArray[np.int32]
    owners: NDArray[np.int32]
    span_owners: list[int]
    firsts: NDArray[np.int32]


class Packer:
    """Lanes to fields, for spans of at most ``queries`` rows and blocks of ``block`` drafted tokens.

    Steps mostly have the numbers of rows of the step before, so what follows from these alone is kept.
    """

    def __init__(self, queries: int, block: int) -> None:
        self._queries = queries
        self._block = block
        self._shapes: dict[tuple[int, ...], _Shape] = {}

    def verify(self, lanes: Sequence[Lane]) -> Fields:
        """Rows of a verify pass."""
        shape = self._shape(tuple([-lane.wanted or len(lane.draft) for lane in lanes]))
        fields = self._filled(shape, lanes)
        for lane, first in zip(lanes, shape.firsts.tolist(), strict=True):
            if lane.draft and not lane.wanted:
                fields.rows[first + 1 : first + lane.rows, TOKEN] = lane.draft
        return fields

    def draft(self, lanes: Sequence[Lane], mask_token: int) -> Fields:
        """Rows of a draft pass: [anchor, mask, ...] of each lane, all seeing to the end of their block."""
        shape = self._shape((self._block,) * len(lanes))
        fields = self._filled(shape, lanes)
        fields.rows[:, VISIBLE] = self._block + 1
        grid = fields.rows.reshape(len(lanes), self._block + 1, ROW_FIELDS)
        grid[:, 1:, TOKEN] = mask_token
        return fields

    @staticmethod
    def _filled(shape: _Shape, lanes: Sequence[Lane]) -> Fields:
        known = np.array(
            [(lane.place, lane.start, lane.end, ANCHOR if lane.place >= 0 else lane.anchor) for lane in lanes],
            dtype=np.int32,
        )
        rows = shape.rows.copy()
        rows[:, (PLACE, START, END)] = known[shape.owners, :3]
        rows[shape.firsts, TOKEN] = known[:, 3]
        return Fields(rows, shape.sequences, shape.spans, [lanes[index] for index in shape.span_owners])

    def _shape(self, drafts: tuple[int, ...]) -> _Shape:
        """drafts: tokens behind the newest one of each lane, negative where they are the block drafter's."""
        shape = self._shapes.get(drafts)
        if shape is None:
            if len(self._shapes) >= MOST_SHAPES:
                self._shapes.clear()
            shape = self._shapes[drafts] = _shape_of(drafts, self._queries, self._block)
        return shape


def _shape_of(drafts: Sequence[int], queries: int, block: int) -> _Shape:
    """For Packer._shape, which says what ``drafts`` are."""
    rows: list[tuple[int, ...]] = []
    owners: list[int] = []
    sequences: list[tuple[int, int]] = []
    spans: list[tuple[int, int, int]] = []
    span_owners: list[int] = []
    drafted = 0
    for index, count in enumerate(drafts):
        first, total = len(rows), 1 + abs(count)
        sequences.append((first, total - 1))
        for offset in range(total):
            token = drafted_token(drafted * (block + 1) + offset) if count < 0 < offset else 0
            rows.append((0, 0, offset, offset + 1, len(spans) + offset // queries, 0, token))
        for start in range(first, first + total, queries):
            spans.append((start, min(start + queries, first + total), start))
            span_owners.append(index)
        owners += [index] * total
        drafted += count < 0
    firsts = [first for first, _ in sequences]
    arrays = [np.array(part, dtype=np.int32) for part in (rows, sequences, spans, owners, firsts)]
    return _Shape(arrays[0], arrays[1], arrays[2], arrays[3], span_owners, arrays[4])
