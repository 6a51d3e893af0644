"""Prefill passes of few rows as CUDA graphs: launching their kernels one by one takes the host longer than the device
needs for a short prompt (10 to 20 ms for 36 layers, where 240 tokens of a 4 B model take 5).

A graph has room for so many rows of up to SEQUENCES chunks; which rows belong to whom is data. Padding rows write to
the scratch page and belong to nobody, and no row's bits depend on another row. Larger passes are launched eagerly:
there the device is the slower one. Each graph is tried at the start against the eager pass, bit by bit, and none is
used if one differs. Off CUDA the same work is run instead of captured. This file knows tensors and flat batches; no
requests.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from serve.drafter.triton_block import TritonBlockDrafter
from serve.kernels.kv_cache import KVCache
from serve.kernels.triton.attention import SPLIT_ROWS, Spans, TritonPlan
from serve.model.batch import FlatBatch
from serve.model.triton_layers import TritonTargetModel

PROMPT_BUCKETS = (64, 128, 256, 384, 512, 768, 1024)
SEQUENCES = 8
SPAN_FIELDS = 3
SPARE_ROWS = 5
"""Padding rows when a graph is tried."""

Record = Callable[[Callable[[], Tensor]], tuple[Callable[[], object], Tensor]]


class PromptGraphs:
    """Graphs for up to ``max_rows`` rows of sequences of up to ``max_length`` positions. The cache (and the drafter's)
    must have one page more than the pool hands out: the last one is the scratch page."""

    def __init__(
        self,
        model: TritonTargetModel,
        cache: KVCache,
        drafter: TritonBlockDrafter | None,
        *,
        max_rows: int,
        max_length: int,
    ) -> None:
        self.model = model
        self.cache = cache
        self.drafter = drafter
        self.max_length = max_length
        small = [bucket for bucket in PROMPT_BUCKETS if bucket < max_rows]
        self.buckets = (*small, *PROMPT_BUCKETS[len(small) : len(small) + 1])
        self._scratch = (cache.num_pages - 1) * cache.page_size
        device, pages = model.device, -(-max_length // cache.page_size)
        self._rows = torch.zeros(4 * self.buckets[-1] + SEQUENCES, dtype=torch.int64, device=device)
        self._spans = torch.zeros(SEQUENCES, SPAN_FIELDS, dtype=torch.int32, device=device)
        self._tables = torch.zeros(SEQUENCES, pages, dtype=torch.int32, device=device)
        self._graphs: dict[int, tuple[Callable[[], object], Tensor]] = {}

    def capture(self, record: Record) -> int:
        """Record the graphs, big ones first; how many there are."""
        for rows in reversed(self.buckets):
            self._rows.zero_()  # the graph before had other numbers where this one has its wanted rows
            self._rows[: 4 * rows].view(4, rows)[2] = self._scratch
            self._graphs[rows] = record(lambda rows=rows: self._pass(rows))  # type: ignore[misc]
        return len(self._graphs)

    @torch.inference_mode()
    def agree(self) -> bool:
        """Whether every graph, some padding in it, gives a chunk or two the logits and the K/V, to the bit, that the
        eager pass gives them. On pages that belong to nobody yet."""
        return all(self._agrees(min(rows - SPARE_ROWS, self._scratch)) for rows in self.buckets)

    def _agrees(self, rows: int) -> bool:
        size = self.cache.page_size
        # Rows of the first of two chunks; where it would be none, all in one.
        first = rows // 2 // size * size if rows // 2 // size * size > SPLIT_ROWS else rows
        starts = (0, first) if first == rows else (0, first, rows)
        if rows <= SPLIT_ROWS:
            return False
        device, place = self.model.device, torch.arange(rows)
        position = torch.where(place < first, place, place - first)
        token_ids = place * 7919 % self.model.config.vocab_size
        fields = torch.stack([token_ids, position, place, position + 1])
        wanted = torch.tensor([stop - 1 for stop in starts[1:]])
        token_ids, position, place, visible = fields.to(device).unbind()
        batch = FlatBatch(
            token_ids=token_ids,
            positions=position,
            slots=place,
            visible=visible,
            query_starts=starts,
            page_tables=tuple(tuple(range(start // size, -(-stop // size))) for start, stop in pairwise(starts)),
            logit_rows=wanted.to(device),
            ends=tuple(stop - start for start, stop in pairwise(starts)),
            host=(fields, wanted),
        )
        got = self.run(batch)
        written = [layer[: -(-rows // size)].clone() for layer in self.cache.layers]
        want = self.model.forward(batch, self.cache).logits
        pairs = zip(written, self.cache.layers, strict=True)
        return torch.equal(got, want) and all(torch.equal(one, layer[: len(one)]) for one, layer in pairs)

    def _pass(self, rows: int) -> Tensor:
        """Logits [SEQUENCES, vocab] float32 of the wanted rows."""
        model = self.model
        taps = self.drafter.taps if self.drafter is not None else ()
        token_ids, positions, slots, visible = self._rows[: 4 * rows].view(4, rows).unbind()
        wanted = self._rows[4 * rows : 4 * rows + SEQUENCES]
        spans = Spans(self._tables, self._spans, wanted[:0], rows, self.max_length)
        hidden, kept = model.stack.run(
            model.embed(token_ids),
            positions,
            slots,
            model.turns,
            TritonPlan(None, spans, visible),
            self.cache,
            taps,
            wanted,
        )
        if self.drafter is not None:
            self.drafter.observe_rows(kept, positions, slots)
        return model.logits(hidden)

    def takes(self, batch: FlatBatch) -> bool:
        """Whether there is a graph for ``batch``: prefill chunks alone, with at most SEQUENCES rows wanted."""
        return (
            batch.host is not None
            and batch.num_rows <= self.buckets[-1]
            and len(batch.page_tables) <= SEQUENCES
            and len(batch.host[1]) <= SEQUENCES
            and max(batch.ends) <= self.max_length
            and all(stop - start > SPLIT_ROWS for start, stop in pairwise(batch.query_starts))
        )

    @torch.inference_mode()
    def run(self, batch: FlatBatch) -> Tensor:
        """Logits [R, vocab] float32 of a batch that ``takes`` it; the drafter has seen its taps. Waits for nothing."""
        assert batch.host is not None
        fields, wanted = batch.host
        count, rows = batch.num_rows, next(bucket for bucket in self.buckets if bucket >= batch.num_rows)
        host = self._host(4 * rows + SEQUENCES, torch.int64)
        numbers = host.numpy()
        grid = numbers[: 4 * rows].reshape(4, rows)
        grid[:, :count] = fields.numpy()
        grid[:, count:] = np.array([[0], [0], [self._scratch], [0]])
        numbers[4 * rows :] = 0
        numbers[4 * rows : 4 * rows + len(wanted)] = wanted.numpy()
        spans = self._host(SEQUENCES * SPAN_FIELDS, torch.int32).view(SEQUENCES, SPAN_FIELDS)
        spans.numpy()[:] = 0
        for line, (start, stop) in zip(spans.numpy(), pairwise(batch.query_starts), strict=False):
            line[:] = start, stop, start
        width = max(map(len, batch.page_tables))
        tables = self._host(len(batch.page_tables) * width, torch.int32).view(-1, width)
        for line, table in zip(tables.numpy(), batch.page_tables, strict=True):
            line[: len(table)] = table
            line[len(table) :] = 0
        self._rows[: len(host)].copy_(host, non_blocking=True)
        self._spans.copy_(spans, non_blocking=True)
        self._tables[: len(tables), :width].copy_(tables, non_blocking=True)
        replay, logits = self._graphs[rows]
        replay()
        return logits[: len(wanted)].clone()

    def _host(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, pin_memory=self.model.device.type == "cuda")
