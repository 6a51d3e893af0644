"""Decoded rows that the drafter has yet to read: its context K/V is written for many of them at once.

A plain step of few rows would spend two hundredths of its time on reading the drafter's matrices for them. So the taps
wait on the device, and are read before anybody could miss them: before a draft, before pages change hands, and after
rows that may be rejected, whose places the next step writes again. This file knows rows; no requests.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from serve.drafter.triton_block import TritonBlockDrafter
from serve.kernels.triton.step import StepRows, append_rows

OBSERVE_BUCKETS = (16, 64, 128, 256)
"""Rows of the graphs that read what waits."""

Record = Callable[[Callable[[], Tensor]], tuple[Callable[[], object], Tensor]]


class DrafterContext:
    """Up to ``rows`` rows wait. scratch_slot: where rows that are none may write."""

    def __init__(
        self, drafter: TritonBlockDrafter, width: int, rows: int, scratch_slot: int, device: torch.device
    ) -> None:
        """width: numbers in a row of taps."""
        self._drafter = drafter
        self._buckets = (*(bucket for bucket in OBSERVE_BUCKETS if bucket < rows), rows)
        self._taps = torch.zeros(rows, width, device=device)
        self._places = torch.zeros(2, rows, dtype=torch.int64, device=device)  # positions, slots
        self._places[1] = scratch_slot
        self._scratch_slot = scratch_slot
        self._graphs: dict[int, Callable[[], object]] = {}
        self._waiting = 0

    def capture(self, record: Record) -> int:
        """Record the graphs, big ones first; how many there are."""
        for rows in reversed(self._buckets):
            self._graphs[rows], _ = record(lambda rows=rows: self._read(rows))  # type: ignore[misc]
        return len(self._graphs)

    def _read(self, rows: int) -> Tensor:
        positions, slots = self._places[:, :rows].unbind()
        self._drafter.observe_rows(self._taps[:rows], positions, slots)
        slots.fill_(self._scratch_slot)
        return slots

    def append(self, taps: Tensor, rows: StepRows, window: Tensor) -> None:
        """The rows of a step and their taps [T, width] float32; window [2] int32 on the device: what ``room`` said
        before the step, and how many of the rows are no padding. A launch only."""
        append_rows(taps, rows, window, self._taps, self._places)

    def room(self, rows: int) -> int:
        """How many rows will wait before ``rows`` more, which a step is about to append."""
        if self._waiting + rows > self._taps.shape[0]:
            self.flush()
        before = self._waiting
        self._waiting += rows
        return before

    @property
    def waiting(self) -> int:
        """Rows that wait."""
        return self._waiting

    @torch.inference_mode()
    def flush(self) -> None:
        """Read what waits; launches only."""
        if self._waiting:
            self._graphs[next(bucket for bucket in self._buckets if bucket >= self._waiting)]()
            self._waiting = 0
