"""Where each query row and each page of one step goes in attention's batched products; built once, used by every layer.

Rows of a sequence are cut into entries of at most a tile of rows. Entries of like size form a group: one set of batched
products. K/V pages are listed without padding, so a long sequence does not make its neighbours read its length; only
the scores are laid out as a rectangle. This file does no arithmetic on activations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from serve.kernels.kv_cache import begun_pages, write_rows
from serve.model.batch import FlatBatch

_TILE_ROWS = 64
_SHARED_ROWS = 16
_GROUP_ELEMENTS = 4 << 20  # scores in one group: bounds memory for long contexts and keeps a group near the cache


@dataclass(frozen=True)
class AttentionShape:
    """Head geometry. row_floor: fewest query rows x group in one product; fixed_rows: always exactly that many (rounded
    up to whole rows)."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    row_floor: int = 3
    fixed_rows: bool = False

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    @property
    def min_rows(self) -> int:
        return -(-self.row_floor // self.group)

    @property
    def tile_rows(self) -> int:
        return self.min_rows if self.fixed_rows else _TILE_ROWS


@dataclass(frozen=True)
class PlanGroup:
    """entries E, pages P (of the longest entry), rows R (padded), count n (pages of all entries).

    page_ids        [n] int64 or None   pages to gather, entry by entry; None when they are n consecutive pages,
    first_page                          which are then read in place from this page on (0 otherwise)
    query_rows      [E * R] int64 or None   the flat rows of each entry; None when they are all rows in order
    entry_of_page   [n] int64 or None       which entry each page is read for; None for a single entry
    mask            [E, 1, R, 1, P, page_size] float32, 0 where visible, -inf elsewhere
    to_rectangle    [E * P] int64 or None   position in page_ids of each cell; None when all entries have P pages
    from_rectangle  [n] int64 or None       the cell of each page
    """

    entries: int
    pages: int
    rows: int
    count: int
    page_ids: Tensor | None
    first_page: int
    query_rows: Tensor | None
    entry_of_page: Tensor | None
    mask: Tensor
    to_rectangle: Tensor | None
    from_rectangle: Tensor | None


@dataclass(frozen=True)
class AttentionPlan:
    """groups in order; gather [T] int64 brings their output rows into flat order (None: already so).
    kv_rows, begun: see write_rows and begun_pages."""

    groups: tuple[PlanGroup, ...]
    gather: Tensor | None
    kv_rows: Tensor
    begun: Tensor


@dataclass(frozen=True)
class _Entry:
    first_row: int
    rows: int
    visible: list[int]
    page_ids: tuple[int, ...]


def build_plan(batch: FlatBatch, shape: AttentionShape) -> AttentionPlan:
    """Plan for one step. Raises ValueError when a page table is shorter than what its rows attend to."""
    device = batch.visible.device
    groups: list[PlanGroup] = []
    source = [0] * batch.num_rows
    base = 0
    identity = True
    for entries in _grouped(_entries(batch, shape), shape):
        group = _plan_group(entries, batch.num_rows, shape, device)
        for index, entry in enumerate(entries):
            for row in range(entry.rows):
                place = base + index * group.rows + row
                identity = identity and place == entry.first_row + row
                source[entry.first_row + row] = place
        base += group.entries * group.rows
        groups.append(group)
    gather = None if identity and base == batch.num_rows else torch.tensor(source, device=device)
    rows = write_rows(batch.slots, shape.kv_heads, shape.page_size)
    return AttentionPlan(tuple(groups), gather, rows, begun_pages(batch.slots, shape.page_size))


def _entries(batch: FlatBatch, shape: AttentionShape) -> Iterator[_Entry]:
    visible = batch.visible.tolist()
    for sequence, table in enumerate(batch.page_tables):
        start, stop = batch.query_starts[sequence], batch.query_starts[sequence + 1]
        for first in range(start, stop, shape.tile_rows):
            last = min(first + shape.tile_rows, stop)
            seen = visible[first:last]
            pages = -(-max(seen) // shape.page_size)
            if pages > len(table):
                raise ValueError(f"sequence {sequence} attends to {pages} pages but its page table has {len(table)}")
            yield _Entry(first, last - first, seen, tuple(table[:pages]))


def _grouped(entries: Iterator[_Entry], shape: AttentionShape) -> Iterator[list[_Entry]]:
    """Like with like: rows within a power of two, pages within a factor of two above sixteen. Large entries stay alone:
    they need no rectangle, and copying their scores into one would cost more than the calls it saves."""
    buckets: dict[tuple[int, int], list[_Entry]] = {}
    for entry in entries:
        if entry.rows > _SHARED_ROWS:
            yield [entry]
            continue
        key = ((entry.rows - 1).bit_length(), ((len(entry.page_ids) - 1) // 16).bit_length())
        buckets.setdefault(key, []).append(entry)
    for bucket in buckets.values():
        part: list[_Entry] = []
        elements = 0
        for entry in bucket:
            size = len(entry.page_ids) * shape.page_size * shape.heads * max(entry.rows, shape.min_rows)
            if part and elements + size > _GROUP_ELEMENTS:
                yield part
                part, elements = [], 0
            part.append(entry)
            elements += size
        yield part


def _plan_group(entries: list[_Entry], total_rows: int, shape: AttentionShape, device: torch.device) -> PlanGroup:
    rows = max(shape.min_rows, max(entry.rows for entry in entries))
    pages = max(len(entry.page_ids) for entry in entries)
    page_ids: list[int] = []
    query_rows: list[int] = []
    entry_of_page: list[int] = []
    visible: list[list[int]] = []
    to_rectangle: list[int] = []
    from_rectangle: list[int] = []
    for index, entry in enumerate(entries):
        own = len(entry.page_ids)
        padding = rows - entry.rows  # padded rows repeat the first row: finite, and never read
        picked = [*range(entry.first_row, entry.first_row + entry.rows), *[entry.first_row] * padding]
        visible.append(entry.visible + [entry.visible[0]] * padding)
        first = len(page_ids)
        to_rectangle += [*range(first, first + own), *[first] * (pages - own)]
        from_rectangle += range(index * pages, index * pages + own)
        page_ids += entry.page_ids
        query_rows += picked
        entry_of_page += [index] * own
    count = len(page_ids)
    uniform = count == len(entries) * pages
    consecutive = page_ids == list(range(page_ids[0], page_ids[0] + count))
    seen = torch.tensor(visible, device=device)[:, :, None] > torch.arange(pages * shape.page_size, device=device)
    mask = torch.zeros(seen.shape, device=device).masked_fill_(~seen, float("-inf"))
    return PlanGroup(
        entries=len(entries),
        pages=pages,
        rows=rows,
        count=count,
        page_ids=None if consecutive else torch.tensor(page_ids, device=device),
        first_page=page_ids[0] if consecutive else 0,
        query_rows=None if query_rows == list(range(total_rows)) else torch.tensor(query_rows, device=device),
        entry_of_page=None if len(entries) == 1 else torch.tensor(entry_of_page, device=device),
        mask=mask.view(len(entries), 1, rows, 1, pages, shape.page_size),
        to_rectangle=None if uniform else torch.tensor(to_rectangle, device=device),
        from_rectangle=None if uniform else torch.tensor(from_rectangle, device=device),
    )
