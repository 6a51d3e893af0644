"""The static buffers that the graphs of a step read, and the small graphs that fill them ahead of the others: one for
each place where the host may have packed a pass.

Launched as a kernel, the same takes the host ten times as long. This file knows rows and pages; no layers, no lanes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from serve.engine.graph_sizes import GraphSizes
from serve.engine.outbox import Outbox
from serve.kernels.triton.attention import Spans, TritonPlan
from serve.kernels.triton.step import (
    DRAFT,
    SEQUENCE_FIELDS,
    SPAN_FIELDS,
    VERIFY,
    WINDOW_FIELDS,
    StepFields,
    StepRows,
    StepState,
    prepare_rows,
)
from serve.kernels.triton.tiles import QUERY_TILE


class StepBuffers:
    """For passes of ``sizes`` that ``outbox`` packs, over sequences of up to ``pages`` pages. state: what a pass leaves
    for the next one; drafts [any] int32: best tokens of the rows of the latest draft pass; window [WINDOW_FIELDS]
    int32."""

    def __init__(
        self, outbox: Outbox, sizes: GraphSizes, *, pages: int, page_size: int, scratch_page: int, device: torch.device
    ) -> None:
        self._outbox = outbox
        self._sizes = sizes
        self._page_size = page_size
        self._scratch_page = scratch_page
        self._device = device
        most = sizes.most_rows

        def ints(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self._kept = ints(most * (SEQUENCE_FIELDS + SPAN_FIELDS))
        self._tables = ints(most, pages)
        self._order = torch.arange(most, device=device)
        self._rows = StepRows(*ints(4, most, dtype=torch.int64))
        self.window = ints(WINDOW_FIELDS)
        self.drafts = ints(most)
        self.state = StepState(ints(most), ints(most))
        self._prepared: dict[tuple[int, int, int], Callable[[], object]] = {}

    def rows(self, count: int) -> StepRows:
        """The first ``count``."""
        return StepRows(*(getattr(self._rows, name)[:count] for name in ("token_ids", "positions", "slots", "visible")))

    def fields(self, count: int) -> StepFields:
        """Those of a pass of ``count`` rows."""
        return StepFields(self._kept[: count * (SEQUENCE_FIELDS + SPAN_FIELDS)], self.window)

    def plan(self, count: int, heads: int, kv_heads: int) -> TritonPlan:
        """What attention of so many heads reads of them."""
        longest = min(self._sizes.context(count), self._sizes.max_length)
        queries = min(count, QUERY_TILE // (heads // kv_heads))
        spans = Spans(self._tables, self.fields(count).spans, self._order[:count], queries, longest)
        return TritonPlan(spans, None, self._rows.visible[:count])

    def record(self) -> None:
        """Record the small graphs, on a card. They leave rows that write to the scratch page and see nothing."""
        passes = [(VERIFY, rows) for rows in self._sizes.rows]
        passes += [(DRAFT, count * self._sizes.block) for count in self._sizes.drafts]
        for place in ((moment, turn, rows) for turn in self._outbox.turns for moment, rows in passes):
            work = partial(self._prepare, *place)
            work()
            self._prepared[place] = _recorded(work, self._device) if self._device.type == "cuda" else work

    def _prepare(self, moment: int, turn: int, rows: int) -> None:
        prepare_rows(
            self._outbox.packed(moment, turn, rows),
            self._tables,
            self.state,
            self.drafts,
            self.rows(rows),
            self.fields(rows),
            self._outbox.answers,
            moment,
            self._page_size,
            self._scratch_page,
        )

    def fill(self, moment: int, rows: int, packed: Tensor, tables: Tensor | None) -> None:
        """A pass as it was packed, of which ``rows`` rows with padding; its page tables where they are new."""
        if tables is not None:
            self._tables[: tables.shape[0], : tables.shape[1]].copy_(tables, non_blocking=True)
        turn = int(packed.numpy()[-1])
        place = self._outbox.packed(moment, turn, rows)
        if place.data_ptr() != packed.data_ptr():  # told by another rank, which has read what was there before
            place.copy_(packed)
        self._prepared[moment, turn, rows]()


def _recorded(work: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """A launch that takes no memory, as a graph. What torch.cuda.graph does to find memory takes longer than all else,
    and there are many of these."""
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
        # Other threads may call CUDA meanwhile: that of NCCL does.
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            work()
        finally:
            graph.capture_end()
    return graph.replay
