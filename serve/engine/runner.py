"""From planned work to one forward pass: builds the flat batch, runs the target, and keeps the drafter's context fresh.

This file knows tensors and pages; it does not know why these rows were chosen or what becomes of the logits.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from serve.engine.scheduler import Work
from serve.kernels.kv_cache import KVCache
from serve.model.batch import FlatBatch
from serve.model.target import TargetModel

if TYPE_CHECKING:
    from serve.engine.ahead import StepsAhead


class Observer(Protocol):
    """Something that reads the target's taps after every pass (the block drafter)."""

    taps: tuple[int, ...]

    def observe(self, batch: FlatBatch, taps: Tensor) -> None: ...


@dataclass(frozen=True)
class Rows:
    """Where the wanted logits of one piece of work are: rows ``first`` .. ``first + count - 1`` of the logits."""

    first: int
    count: int


class ModelRunner:
    """The target with its KV cache. ``observer`` sees the taps of every row, also in prefill and without a draft.

    ``ahead``: graphs of decoding steps, where the device has them. ``on_observer_fault``: who is told when the observer
    fails; without one the fault fails the pass.
    """

    def __init__(
        self,
        model: TargetModel,
        cache: KVCache,
        page_size: int,
        observer: Observer | None = None,
        ahead: StepsAhead | None = None,
    ) -> None:
        self.model = model
        self.cache = cache
        self.page_size = page_size
        self.observer = observer
        self.on_observer_fault: Callable[[Exception], None] | None = None
        self.ahead = ahead

    def forward(self, works: Seq[tuple[Work, Seq[int]]]) -> tuple[Tensor, list[Rows]]:
        """Run ``works`` (each with its draft) in one pass; logits [R, V] float32 and the rows of each work.

        A decode or the end of a prefill wants its last row and its draft rows; prompt log-probabilities want all rows.
        Decoding works come first; where there is a graph for them it is replayed.
        """
        decodes = list(takewhile(lambda item: item[0].sequence.is_decoding, works))
        replayed = self.ahead.logits(decodes) if self.ahead is not None and decodes else None
        if replayed is None:
            batch, rows = self.build_batch(works)
            return self.forward_batch(batch), rows
        first = 0
        rows = []
        for _, draft in decodes:
            rows.append(Rows(first, 1 + len(draft)))
            first += 1 + len(draft)
        if len(decodes) == len(works):
            return replayed, rows
        batch, others = self.build_batch(works[len(decodes) :])
        rows += [Rows(first + where.first, where.count) for where in others]
        return torch.cat([replayed, self.forward_batch(batch)]), rows

    def forward_batch(self, batch: FlatBatch) -> Tensor:
        """Logits [R, V] float32 of one flat batch; the observer has seen its taps when this returns."""
        taps = self.observer.taps if self.observer else ()
        output = self.model.forward(batch, self.cache, taps)
        if self.observer is not None:
            assert output.taps is not None
            try:
                self.observer.observe(batch, output.taps)
            except Exception as error:
                # The logits are good: what the observer missed costs speed, and never a request.
                if self.on_observer_fault is None:
                    raise
                self.on_observer_fault(error)
        return output.logits

    def pages_for(self, positions: int) -> int:
        return -(-positions // self.page_size)

    def build_batch(self, works: Seq[tuple[Work, Seq[int]]]) -> tuple[FlatBatch, list[Rows]]:
        """The flat batch of ``works``; CPU lists first, one copy to the device each."""
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        tables: list[tuple[int, ...]] = []
        logit_rows: list[int] = []
        rows: list[Rows] = []
        size = self.page_size
        for work, draft in works:
            sequence = work.sequence
            count = work.count + len(draft)
            first_row = starts[-1]
            token_ids += sequence.token_ids[work.start : work.start + work.count]
            token_ids += draft
            span = range(work.start, work.start + count)
            positions += span
            slots += [sequence.pages[p // size] * size + p % size for p in span]
            starts.append(first_row + count)
            tables.append(tuple(sequence.pages[: self.pages_for(work.start + count)]))
            if sequence.scores_prompt:
                wanted = count
            else:
                wanted = 1 + len(draft) if work.reaches_end else 0
            rows.append(Rows(len(logit_rows), wanted))
            logit_rows += range(first_row + count - wanted, first_row + count)
        device = self.model.device

        def put(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64).to(device)

        positions_tensor = put(positions)
        batch = FlatBatch(
            token_ids=put(token_ids),
            positions=positions_tensor,
            slots=put(slots),
            visible=positions_tensor + 1,
            query_starts=tuple(starts),
            page_tables=tuple(tables),
            logit_rows=put(logit_rows),
        )
        return batch, rows
