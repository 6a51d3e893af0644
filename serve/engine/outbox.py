"""What the host tells the device about a step and reads back from it, in pinned memory that kernels read and write
themselves: a copy and its waits on both sides take several times as long. Some steps in turn, so that one can be
written while another is on its way.

Page tables go along only where they say something new. This file knows lanes and buffers; no graphs and no requests.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from serve.engine.lanes import FIELDS, Fields, Lane, Packer, Table, same_tables, write_tables
from serve.kernels.triton.step import DONE, DRAFT, MOMENTS, WINDOW_FIELDS, StepAnswers

LEAST_SECONDS = 1e-6
LONGEST_DRAFT = 63
RING = 3
"""Steps in turn: one being written, one on its way to the device, one being read."""


@dataclass(frozen=True)
class HostBuffers:
    """Pinned memory that one pass's fields are read from, and its page tables sent."""

    packed: Tensor
    tables: Tensor


@dataclass(frozen=True)
class Slot:
    """One of the ring's host buffers and what comes back into it. turn: which of them. done: a CUDA event that tells of
    its launch's end, None off CUDA, where the host writes the times that a card writes itself."""

    turn: int
    draft: HostBuffers
    verify: HostBuffers
    result: Tensor
    times: Tensor
    done: Any

    def mark(self, moment: int) -> None:
        """The host is at one of the moments, and the device will be."""
        if self.done is None:
            self.times[moment] = time.perf_counter_ns()
        elif moment == DONE:
            self.done.record()

    def wait(self) -> None:
        """Until the device is done."""
        if self.done is not None:
            self.done.synchronize()

    def seconds(self, start: int, stop: int) -> float:
        """From one moment to another, both of this turn and past. A card's clock may go in steps that are longer than a
        pass, or be set: then a microsecond."""
        times: list[int] = self.times.tolist()
        return max(LEAST_SECONDS, (times[stop] - times[start]) / 1e9)


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
        self.answers = StepAnswers(
            torch.zeros(RING, 3 * most_rows, dtype=torch.int32, pin_memory=on_cuda),
            torch.zeros(RING, MOMENTS, dtype=torch.int64, pin_memory=on_cuda),
        )
        self._ring = [_slot(turn, most_rows, pages, self.answers, on_cuda) for turn in range(RING)]
        self._turn = 0

    def next_slot(self) -> Slot:
        """The slot of the next step; what used it RING steps ago must have been read."""
        slot = self._ring[self._turn]
        self._turn = (self._turn + 1) % RING
        return slot

    @property
    def turns(self) -> range:
        """As many as there are slots."""
        return range(len(self._ring))

    def packed(self, moment: int, turn: int, rows: int) -> Tensor:
        """Where the fields of a draft or verify pass of ``rows`` rows are, padding included: always the same memory."""
        slot = self._ring[turn]
        return (slot.draft if moment == DRAFT else slot.verify).packed[: rows * FIELDS + WINDOW_FIELDS]

    def draft(self, slot: Slot, lanes: Sequence[Lane], rows: int, mask_token: int) -> Packed:
        """A draft pass of ``rows`` rows, padding included, in host memory."""
        return self._write(slot.draft, self._draft_packer.draft(lanes, mask_token), rows, slot.turn)

    def verify(self, slot: Slot, lanes: Sequence[Lane], rows: int) -> Packed:
        """A verify pass of ``rows`` rows, padding included, in host memory. Of its window the turn alone."""
        return self._write(slot.verify, self._packer.verify(lanes), rows, slot.turn)

    def _write(self, host: HostBuffers, fields: Fields, rows: int, turn: int) -> Packed:
        numbers = host.packed.numpy()
        end = fields.write(numbers, rows) + WINDOW_FIELDS
        numbers[end - 1] = turn
        packed = host.packed[:end]
        tables = fields.tables(self._page_size, self._lookahead)
        if same_tables(tables, self._sent):
            return Packed(packed, None)
        self._sent = tables
        count, width = write_tables(tables, host.tables.numpy())
        return Packed(packed, host.tables[: count * width].view(count, width))


def _slot(turn: int, most_rows: int, pages: int, answers: StepAnswers, on_cuda: bool) -> Slot:
    def host(size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int32, pin_memory=on_cuda)

    draft, verify = (HostBuffers(host(most_rows * FIELDS + WINDOW_FIELDS), host(most_rows * pages)) for _ in range(2))
    # An event that tells the time would cost the device more than a microsecond.
    done = torch.cuda.Event() if on_cuda else None  # type: ignore[no-untyped-call]
    return Slot(turn, draft, verify, answers.results[turn], answers.times[turn], done)
