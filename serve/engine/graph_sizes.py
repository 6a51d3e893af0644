"""Which graphs of decoding steps there are, by rows and by drafted sequences, and what fits into them. Numbers only: no
tensors, no lanes, no requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from serve.kernels.triton.tiles import KV_SPLIT

ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256)
"""Rows of the verify graphs. Between them matrices cost the same; small norms and attention a little more."""
DRAFT_BUCKETS = (1, 2, 4, 8, 16, 32)
"""Sequences of the draft graphs."""


@dataclass(frozen=True)
class GraphSizes:
    """rows: of the verify graphs; drafts: sequences of the draft graphs, none without a drafter; block: rows of a
    drafted block, 0 without one. workspace: bytes that the split attention of one graph may take, of which a row takes
    ``row_bytes`` for every KV_SPLIT positions of the longest sequence; no sequence is longer than ``max_length``."""

    rows: tuple[int, ...]
    drafts: tuple[int, ...]
    block: int
    max_length: int
    workspace: int
    row_bytes: int

    @classmethod
    def up_to(cls, max_rows: int, max_sequences: int, block: int, **limits: int) -> GraphSizes:
        """The buckets that steps of so many rows and so many drafted sequences need."""
        drafts = _up_to(DRAFT_BUCKETS, max_sequences) if block else ()
        return cls(_up_to(ROW_BUCKETS, max_rows), drafts, block, **limits)

    @property
    def most_rows(self) -> int:
        """Rows of the largest pass, of whichever kind."""
        return max(self.rows[-1], self.block * max(self.drafts, default=0))

    def rows_for(self, count: int) -> int:
        """Rows of the smallest verify graph that has ``count``."""
        return _bucket(self.rows, count)

    def drafts_for(self, count: int) -> int:
        """Sequences of the smallest draft graph that has ``count``."""
        return _bucket(self.drafts, count)

    def context(self, rows: int) -> int:
        """Positions that a graph of ``rows`` rows has room for."""
        return max(1, self.workspace // (rows * self.row_bytes)) * KV_SPLIT

    def takes(self, sequences: int, longest: int) -> bool:
        """Whether a step of so many sequences, the longest with so many positions, draft included, has a graph."""
        return sequences <= self.rows[-1] and longest <= min(self.max_length, self.context(self.rows_for(sequences)))

    @property
    def block_length(self) -> int:
        """Tokens that a draft pass makes for one sequence."""
        return max(0, self.block - 1)

    def draft_room(self, longest: int) -> int:
        """Sequences that one draft pass can serve."""
        return max((count for count in self.drafts if longest <= self.context(count * self.block)), default=0)

    def room(self, sequences: int, longest: int) -> int:
        """Draft rows beside ``sequences`` rows that still have a graph."""
        fitting = [rows for rows in self.rows if longest <= self.context(rows)]
        return max(0, max(fitting, default=0) - sequences)


def _up_to(buckets: Sequence[int], most: int) -> tuple[int, ...]:
    """The buckets below ``most`` and the first that holds it, if any does."""
    small = [bucket for bucket in buckets if bucket < most]
    return (*small, *buckets[len(small) : len(small) + 1])


def _bucket(buckets: Sequence[int], count: int) -> int:
    return next(bucket for bucket in buckets if bucket >= count)
