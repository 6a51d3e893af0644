"""What the host tells the device about a step and reads back from it, in pinned memory: some steps in turn, so that one
can be written while another is on its way.

Page tables go along only where they say something new. This file knows lanes and buffers; no graphs and no requests.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from serve.engine.lanes import FIELDS, Fields, Lane, Packer, Table, same_tables, write_tables

LONGEST_DRAFT = 63
WINDOW_FIELDS = 2
"""Behind the fields of a pass: how many rows wait for the drafter, and how many come from this pass."""
RING = 3
"""Steps in turn: one being written, one on its way to the device, one being read."""


@dataclass(frozen=True)
class HostBuffers:
    """Pinned memory that one pass's fields and page tables are sent from."""

    packed: Tensor
    tables: Tensor


@dataclass
class Slot:
    """One of the ring's host buffers, and the moments of the launch that uses it: CUDA events, or seconds."""

    draft: HostBuffers
    verify: HostBuffers
    result: Tensor
    on_cuda: bool
    moments: list[Any] = field(default_factory=list)

    def mark(self, index: int) -> None:
        """Moment ``index`` is when the device gets here."""
        if self.on_cuda:
            self.moments[index].record()
        else:
            self.moments[index:] = [time.perf_counter()]

    def wait(self) -> tuple[float, float]:
        """Wait for moment 2; the seconds from 0 to 1 and from 1 to 2."""
        first, second, last = self.moments
        if not self.on_cuda:
            return second - first, last - second
        last.synchronize()
        return first.elapsed_time(second) / 1e3, second.elapsed_time(last) / 1e3


@dataclass(frozen=True)
class Packed:
    """A pass as it is sent: its fields, and page tables unless those sent before still hold."""

    fields: Tensor
    tables: Tensor | None


class Outbox:
    """For passes of up to ``most_rows`` rows over sequences of up to ``pages`` pages of ``page_size`` positions.

    packer, draft_packer: of verify and of draft passes. block: rows of a drafted block.
    """

    def __init__(
        self,
        packer: Packer,
        draft_packer: Packer,
        *,
        most_rows: int,
        pages: int,
        page_size: int,
        block: int,
        on_cuda: bool,
    ) -> None:
        self._packer, self._draft_packer = packer, draft_packer
        self._page_size = page_size
        self._lookahead = max(block, LONGEST_DRAFT)
        self._sent: list[Table] = []
        self._ring = [_slot(most_rows, pages, on_cuda) for _ in range(RING)]
        self._turn = 0

    def next_slot(self) -> Slot:
        """The slot of the next step; what used it RING steps ago must have been read."""
        slot = self._ring[self._turn]
        self._turn = (self._turn + 1) % RING
        return slot

    def draft(self, slot: Slot, lanes: Sequence[Lane], rows: int, mask_token: int) -> Packed:
        """A draft pass of ``rows`` rows, padding included, in host memory."""
        return self._write(slot.draft, self._draft_packer.draft(lanes, mask_token), rows)

    def verify(self, slot: Slot, lanes: Sequence[Lane], rows: int) -> Packed:
        """A verify pass of ``rows`` rows, padding included, in host memory."""
        return self._write(slot.verify, self._packer.verify(lanes), rows)

    def _write(self, host: HostBuffers, fields: Fields, rows: int) -> Packed:
        packed = host.packed[: fields.write(host.packed.numpy(), rows) + WINDOW_FIELDS]
        tables = fields.tables(self._page_size, self._lookahead)
        if same_tables(tables, self._sent):
            return Packed(packed, None)
        self._sent = tables
        count, width = write_tables(tables, host.tables.numpy())
        return Packed(packed, host.tables[: count * width].view(count, width))


def _slot(most_rows: int, pages: int, on_cuda: bool) -> Slot:
    def host(size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int32, pin_memory=on_cuda)

    draft, verify = (HostBuffers(host(most_rows * FIELDS + WINDOW_FIELDS), host(most_rows * pages)) for _ in range(2))
    slot = Slot(draft, verify, host(3 * most_rows), on_cuda)
    if on_cuda:
        slot.moments = [torch.cuda.Event(enable_timing=True) for _ in range(3)]  # type: ignore[no-untyped-call]
    return slot
