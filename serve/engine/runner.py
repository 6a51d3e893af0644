"""From planned work to one forward pass: builds the flat batch, runs the target, and keeps the drafter's context fresh.

This file knows tensors and pages; it does not know why these rows were chosen or what becomes of the logits.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate, takewhile
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from serve.engine.scheduler import Work
from serve.kernels.kv_cache import KVCache
from serve.model.batch import ROW_ALIGNMENT, FlatBatch, put
from serve.model.target import TargetModel
from serve.parallel.mirror import NO_MIRROR, Mirror

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
    fails; without one the fault fails the pass. ``mirror``: who tells other ranks what is run here.
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
        self.mirror: Mirror = NO_MIRROR

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
        prompts = None if self.ahead is None or not self.mirror.alone else self.ahead.graphs.prompts
        if prompts is not None and self.observer in (None, prompts.drafter) and prompts.takes(batch):
            return prompts.run(batch)
        taps = self.observer.taps if self.observer else ()
        with self.mirror.forward(batch, self.observer is not None):
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
        """The flat batch of ``works``: made on the host, copied to the device in one piece."""
        size = self.page_size
        counts = [work.count + len(draft) for work, draft in works]
        starts = (0, *accumulate(counts))
        # Token ids, positions, slots, visible.
        padded = np.zeros((4, -(-starts[-1] // ROW_ALIGNMENT) * ROW_ALIGNMENT), dtype=np.int64)
        host = padded[:, : starts[-1]]
        tables: list[tuple[int, ...]] = []
        logit_rows: list[int] = []
        rows: list[Rows] = []
        for (work, draft), count, first in zip(works, counts, starts, strict=False):
            sequence, end = work.sequence, work.start + count
            part = host[:, first : first + count]
            part[0, : work.count] = sequence.token_ids[work.start : work.start + work.count]
            part[0, work.count :] = draft
            part[1] = np.arange(work.start, end)
            table = tuple(sequence.pages[: self.pages_for(end)])
            part[2] = np.array(table)[part[1] // size] * size + part[1] % size
            tables.append(table)
            if sequence.scores_prompt:
                wanted = count
            else:
                wanted = 1 + len(draft) if work.reaches_end else 0
            rows.append(Rows(len(logit_rows), wanted))
            logit_rows += range(first + count - wanted, first + count)
        host[3] = host[1] + 1
        wanted_rows = torch.tensor(logit_rows, dtype=torch.int64)
        device = self.model.device
        token_ids, positions, slots, visible = put(torch.from_numpy(padded), device)[:, : starts[-1]].unbind()
        batch = FlatBatch(
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            visible=visible,
            query_starts=starts,
            page_tables=tuple(tables),
            logit_rows=put(wanted_rows, device),
            ends=tuple(work.start + count for (work, _), count in zip(works, counts, strict=True)),
            host=(torch.from_numpy(host), wanted_rows),
        )
        return batch, rows
