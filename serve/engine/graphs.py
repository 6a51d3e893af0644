"""A decode step as CUDA graphs over static buffers: prepare rows, all layers, best tokens, acceptance; a draft pass
before it, and the drafter's context behind it.

One graph serves every mix of sequences and block lengths with up to so many rows: which rows belong to whom is data.
What a row's sequence looks like (its newest token and where that stands) may be known to the host, or only to the
device, as the last pass left it; so the host can launch a step before it has read the one before. Padding rows write to
a scratch page and see nothing, and no row's bits depend on another row.

Off CUDA the same work is run instead of captured, so all of it can be tested with no card. This file knows tensors,
lanes and pages; no requests, no sampling and no text.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from serve.drafter.triton_block import TritonBlockDrafter
from serve.engine.context import DrafterContext
from serve.engine.lanes import (
    FIELDS,
    SPAN_FIELDS,
    Fields,
    Lane,
    Packer,
    Table,
    same_tables,
    write_tables,
)
from serve.engine.prompts import PromptGraphs
from serve.kernels.kv_cache import KVCache
from serve.kernels.triton.attention import Spans, TritonPlan
from serve.kernels.triton.step import (
    ROW_FIELDS,
    SEQUENCE_FIELDS,
    StepRows,
    StepState,
    prepare_rows,
    settle_rows,
)
from serve.kernels.triton.tiles import KV_SPLIT, QUERY_TILE
from serve.model.triton_layers import TritonTargetModel
from serve.parallel.mirror import NO_MIRROR, Mirror

log = logging.getLogger(__name__)

ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256)
"""Rows of the verify graphs. Between them matrices cost the same; small norms and attention a little more."""
DRAFT_BUCKETS = (1, 2, 4, 8, 16, 32)
"""Sequences of the draft graphs."""
LONGEST_DRAFT = 63
WORKSPACE_SHARE = 1 / 64
"""Part of a card's memory that the split attention of one graph may take: bounds the context it has room for."""
CPU_WORKSPACE = 64 << 20
WINDOW_FIELDS = 2
"""Behind the fields of a pass: how many rows wait for the drafter, and how many come from this pass."""
RING = 3
"""Host buffers in turn: one being written, one on its way to the device, one being read."""


@dataclass(frozen=True)
class Outcome:
    """What a launch came to, by lane: the target's token after each row of the lane up to the first disagreement, or
    None where a logit was not finite. Seconds of the draft pass and of the rest on the device."""

    kept: list[list[int] | None]
    draft_seconds: float
    verify_seconds: float


@dataclass(frozen=True)
class _HostBuffers:
    """Pinned memory that one pass's fields and page tables are sent from."""

    packed: Tensor
    tables: Tensor


@dataclass
class _Slot:
    """One of the ring's host buffers and the events of the launch that uses it."""

    draft: _HostBuffers
    verify: _HostBuffers
    result: Tensor
    events: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Launch:
    """A step on its way. rows: of its graph, padding included; hidden: normed states of its rows, good until the next
    launch."""

    lanes: tuple[Lane, ...]
    rows: int
    hidden: Tensor
    slot: _Slot
    drafted: bool


class StepGraphs:
    """Graphs for up to ``max_rows`` rows of sequences of up to ``max_length`` positions.

    The cache (and the drafter's) must have one page more than the pool hands out: the last one is the scratch page.
    """

    def __init__(
        self,
        model: TritonTargetModel,
        cache: KVCache,
        drafter: TritonBlockDrafter | None,
        *,
        max_rows: int,
        max_sequences: int,
        max_length: int,
        prompt_rows: int = 0,
    ) -> None:
        """prompt_rows: rows of the largest prefill pass that is worth a graph, 0 for none."""
        self.model = model
        self.cache = cache
        self.drafter = drafter
        self.max_length = max_length
        self.row_buckets = _up_to(ROW_BUCKETS, max_rows)
        self.draft_buckets = _up_to(DRAFT_BUCKETS, max_sequences) if drafter is not None else ()
        self._cuda = model.device.type == "cuda"
        self._block = drafter.block_size if drafter is not None else 0
        # A rank's layers have a part of the heads, its drafter has them all.
        self._heads = max(model.config.num_heads, drafter.config.num_attention_heads if drafter is not None else 0)
        most = max(self.row_buckets[-1], self._block * max(self.draft_buckets, default=0))
        pages = -(-max_length // cache.page_size)
        device = model.device

        def ints(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self._packed = ints(most * FIELDS + WINDOW_FIELDS)
        self._tables = ints(most, pages)
        self._order = torch.arange(most, device=device)
        self._rows = StepRows(*ints(4, most, dtype=torch.int64))
        self.state = StepState(ints(most), ints(most))
        self._drafts = ints(max(1, max(self.draft_buckets, default=0) * (self._block - 1)), dtype=torch.int64)
        self._result = ints(3 * most)
        self._sent: list[Table] = []
        self._packer = Packer(QUERY_TILE // (model.config.num_heads // model.config.num_kv_heads), self._block - 1)
        if drafter is not None:
            shared = drafter.config.num_attention_heads // drafter.config.num_key_value_heads
            self._draft_packer = Packer(QUERY_TILE // shared, self._block - 1)
        self._ring = [self._slot(most, pages) for _ in range(RING)]
        self._turn = 0
        self.mirror: Mirror = NO_MIRROR
        self._verify: dict[int, tuple[Callable[[], object], Tensor]] = {}
        self._context: DrafterContext | None = None
        if drafter is not None:
            width = len(drafter.taps) * model.config.hidden_size
            scratch = (cache.num_pages - 1) * cache.page_size
            self._context = DrafterContext(drafter, width, self.row_buckets[-1], scratch, device)
        self.prompts: PromptGraphs | None = None
        if prompt_rows:
            self.prompts = PromptGraphs(model, cache, drafter, max_rows=prompt_rows, max_length=max_length)
        self._draft: dict[int, Callable[[], object]] = {}
        self._pool: Any = None

    def _slot(self, most: int, pages: int) -> _Slot:
        def host(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, pin_memory=self._cuda)

        draft, verify = (_HostBuffers(host(most * FIELDS + WINDOW_FIELDS), host(most * pages)) for _ in range(2))
        slot = _Slot(draft, verify, host(3 * most))
        if self._cuda:
            slot.events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]  # type: ignore[no-untyped-call]
        return slot

    # -- capture -----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def capture(self) -> int:
        """Record every graph, big ones first, all in one memory pool; how many there are."""
        self.model.reserve(self.max_length)
        if self.drafter is not None:
            self.drafter.reserve(self.max_length)
        others = self._capture_prompts()
        if self._context is not None:
            others += self._context.capture(self._record)
        for count in reversed(self.draft_buckets):
            self._draft[count], _ = self._record(lambda count=count: self._run_draft(count))  # type: ignore[misc]
        for rows in reversed(self.row_buckets):
            self._verify[rows] = self._record(lambda rows=rows: self._run_verify(rows))  # type: ignore[misc]
        return others + len(self._draft) + len(self._verify)

    def _capture_prompts(self) -> int:
        """Graphs of prefill passes; none where they cannot be recorded or give other bits."""
        if self.prompts is None:
            return 0
        try:
            count = self.prompts.capture(self._record)
            if self.prompts.agree():
                return count
            log.warning("graphs of prefill passes give other bits than eager passes: not used")
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            log.warning("prefill passes cannot be recorded as graphs: %s", str(error)[:200])
        self.prompts = None
        return 0

    def _record(self, work: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        """``work`` as a graph, and the tensor it returns (the same memory at every replay)."""
        out = work()
        if not self._cuda:
            kept = torch.empty_like(out)
            return lambda: kept.copy_(work()), kept
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads may call CUDA meanwhile: that of NCCL does.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            out = work()
        self._pool = self._pool or graph.pool()
        return graph.replay, out

    def _run_verify(self, rows: int) -> Tensor:
        """Everything of a step after its draft pass; the normed hidden states."""
        model = self.model
        taps = self.drafter.taps if self.drafter is not None else ()
        fields, sequences, plan, out = self._views(rows, model.config.num_heads, model.config.num_kv_heads)
        prepare_rows(
            fields, self._tables, self.state, self._drafts, out, self.cache.page_size, self.cache.num_pages - 1
        )
        hidden, kept = model.stack.run(
            model.embed(out.token_ids), out.positions, out.slots, model.turns, plan, self.cache, taps
        )
        best, values = model.best(hidden)
        settle_rows(sequences, out, best, values, self.state, self._result[: 3 * rows].view(3, rows), LONGEST_DRAFT)
        if self._context is not None:
            self._context.append(kept, out, self._packed[rows * FIELDS : rows * FIELDS + WINDOW_FIELDS])
        return hidden

    def _run_draft(self, count: int) -> Tensor:
        """A block for each of ``count`` sequences; their best tokens into the drafts."""
        drafter = self.drafter
        assert drafter is not None
        rows = count * self._block
        config = drafter.config
        fields, _, plan, out = self._views(rows, config.num_attention_heads, config.num_key_value_heads)
        prepare_rows(
            fields, self._tables, self.state, self._drafts, out, self.cache.page_size, self.cache.num_pages - 1
        )
        best = drafter.best(drafter.hidden(out.token_ids, out.positions, out.slots, plan))
        drafts = best.view(count, self._block)[:, 1:]
        self._drafts[: drafts.numel()].view(count, -1).copy_(drafts)
        return drafts

    def _views(self, rows: int, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, TritonPlan, StepRows]:
        """This graph's part of the static buffers: row fields, sequence fields, attention plan, rows."""
        a, b, c = (rows * part for part in (ROW_FIELDS, ROW_FIELDS + SEQUENCE_FIELDS, FIELDS))
        out = StepRows(*(getattr(self._rows, name)[:rows] for name in ("token_ids", "positions", "slots", "visible")))
        spans = Spans(
            self._tables,
            self._packed[b:c].view(rows, SPAN_FIELDS),
            self._order[:rows],
            QUERY_TILE // (heads // kv_heads),
            min(self.context(rows), self.max_length),
        )
        return (
            self._packed[:a].view(rows, ROW_FIELDS),
            self._packed[a:b].view(rows, SEQUENCE_FIELDS),
            TritonPlan(spans, None, out.visible),
            out,
        )

    # -- what fits ---------------------------------------------------------------------------------------------------

    def context(self, rows: int) -> int:
        """Positions that a graph of ``rows`` rows has room for."""
        config = self.model.config
        memory = CPU_WORKSPACE
        if self._cuda:
            memory = int(torch.cuda.get_device_properties(self.model.device).total_memory * WORKSPACE_SHARE)
        return max(1, memory // (rows * self._heads * (config.head_dim + 2) * 4)) * KV_SPLIT

    def takes(self, sequences: int, longest: int) -> bool:
        """Whether a step of so many sequences, the longest with so many positions, draft included, has a graph."""
        return sequences <= self.row_buckets[-1] and longest <= min(
            self.max_length, self.context(_bucket(self.row_buckets, sequences))
        )

    @property
    def most_sequences(self) -> int:
        """Sequences that one launch can serve."""
        return self.row_buckets[-1]

    @property
    def block_length(self) -> int:
        """Tokens that a draft pass makes for one sequence."""
        return max(0, self._block - 1)

    def draft_room(self, longest: int) -> int:
        """Sequences that one draft pass can serve."""
        return max((count for count in self.draft_buckets if longest <= self.context(count * self._block)), default=0)

    def room(self, sequences: int, longest: int) -> int:
        """Draft rows beside ``sequences`` rows that still have a graph."""
        fitting = [rows for rows in self.row_buckets if longest <= self.context(rows)]
        return max(0, max(fitting, default=0) - sequences)

    # -- launch ------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def launch(self, lanes: Sequence[Lane]) -> Launch:
        """Start a step; it waits for nothing. The launch before must have been read up to RING - 1 launches ago."""
        slot = self._ring[self._turn]
        self._turn = (self._turn + 1) % RING
        drafted = [lane for lane in lanes if lane.wanted]
        self._mark(slot, 0)
        if drafted and self.drafter is not None:
            count = _bucket(self.draft_buckets, len(drafted))
            config = self.drafter.config
            fields = self._draft_packer.draft(drafted, config.mask_token_id)
            packed, tables = self._write(slot.draft, fields, count * self._block)
            with self.mirror.draft(count, packed, tables):
                self.play_draft(count, packed, tables)
        self._mark(slot, 1)
        rows = _bucket(self.row_buckets, sum(lane.rows for lane in lanes))
        packed, tables = self._write(slot.verify, self._packer.verify(lanes), rows)
        used = sum(lane.rows for lane in lanes)
        with self.mirror.verify(rows, used, used == len(lanes), packed, tables):
            hidden = self.play_verify(rows, used, used == len(lanes), packed, tables)
        slot.result[: 3 * rows].copy_(self._result[: 3 * rows], non_blocking=True)
        self._mark(slot, 2)
        return Launch(tuple(lanes), rows, hidden, slot, bool(drafted))

    def play_draft(self, count: int, packed: Tensor, tables: Tensor | None) -> None:
        """A draft pass of ``count`` sequences; packed fields and page tables as ``_write`` left them."""
        if self._context is not None:
            self._context.flush()
        self._put(packed, tables)
        self._draft[count]()

    @torch.inference_mode()
    def play_verify(self, rows: int, used: int, settled: bool, packed: Tensor, tables: Tensor | None) -> Tensor:
        """A verify pass of ``rows`` rows, ``used`` of them no padding; settled: none of them may be rejected. Its
        normed hidden states."""
        replay, hidden = self._verify[rows]
        if self._context is None:
            self._put(packed, tables)
            replay()
            return hidden
        packed.numpy()[-WINDOW_FIELDS:] = self._context.room(used), used
        self._put(packed, tables)
        replay()
        if not settled:
            self._context.flush()
        return hidden

    def observe_waiting(self) -> None:
        """Let the drafter read the rows that wait for it. Called here before a draft; due before anybody else reads or
        writes its context, and before pages that were released are used again."""
        if self._context is not None and self._context.waiting:
            with self.mirror.flush():
                self._context.flush()

    def _mark(self, slot: _Slot, index: int) -> None:
        if self._cuda:
            slot.events[index].record()
        else:
            slot.events[index:] = [time.perf_counter()]

    def _write(self, host: _HostBuffers, fields: Fields, rows: int) -> tuple[Tensor, Tensor | None]:
        """Fill host buffers: what of them is used; page tables only where they say something new."""
        packed = host.packed[: fields.write(host.packed.numpy(), rows) + WINDOW_FIELDS]
        tables = fields.tables(self.cache.page_size, max(self._block, LONGEST_DRAFT))
        if same_tables(tables, self._sent):
            return packed, None
        self._sent = tables
        count, width = write_tables(tables, host.tables.numpy())
        return packed, host.tables[: count * width].view(count, width)

    def _put(self, packed: Tensor, tables: Tensor | None) -> None:
        """Host buffers into the static ones."""
        self._packed[: len(packed)].copy_(packed, non_blocking=True)
        if tables is not None:
            self._tables[: tables.shape[0], : tables.shape[1]].copy_(tables, non_blocking=True)

    # -- outcome -----------------------------------------------------------------------------------------------------

    def read(self, launch: Launch) -> Outcome:
        """Wait for a launch and say what it came to. Each launch once, in order."""
        slot = launch.slot
        if self._cuda:
            slot.events[2].synchronize()
            draft = slot.events[0].elapsed_time(slot.events[1]) / 1e3
            verify = slot.events[1].elapsed_time(slot.events[2]) / 1e3
        else:
            draft, verify = slot.events[1] - slot.events[0], slot.events[2] - slot.events[1]
        best, counts, finite = slot.result[: 3 * launch.rows].view(3, launch.rows).tolist()
        kept: list[list[int] | None] = []
        first = 0
        for index, lane in enumerate(launch.lanes):
            good = all(finite[first : first + counts[index] + 1])
            kept.append(best[first : first + counts[index] + 1] if good else None)
            first += lane.rows
        return Outcome(kept, draft if launch.drafted else 0.0, verify)

    def replay(self, rows: int) -> Callable[[], object]:
        """What runs the graph for ``rows`` rows once more on the fields of the latest launch."""
        return self._verify[_bucket(self.row_buckets, rows)][0]

    def logits(self, launch: Launch) -> Tensor:
        """Logits [rows without padding, vocab] float32 of the latest launch, in the order of its lanes."""
        count = sum(lane.rows for lane in launch.lanes)
        with self.mirror.logits(count):
            return self.model.logits(launch.hidden[:count])


def _up_to(buckets: Sequence[int], most: int) -> tuple[int, ...]:
    """The buckets below ``most`` and the first that holds it, if any does."""
    small = [bucket for bucket in buckets if bucket < most]
    return (*small, *buckets[len(small) : len(small) + 1])


def _bucket(buckets: Sequence[int], count: int) -> int:
    return next(bucket for bucket in buckets if bucket >= count)
