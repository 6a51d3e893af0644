"""A decode step as CUDA graphs over static buffers: all layers, best tokens, acceptance; a draft pass before it, and
the drafter's context beside its last layers or behind it. Rows are prepared by small graphs of their own ahead of
these, one for each place where the host may have packed them.

One graph serves every mix of sequences and block lengths with up to so many rows: which rows belong to whom is data.
What a row's sequence looks like (its newest token and where that stands) may be known to the host, or only to the
device, as the last pass left it; so the host can launch a step before it has read the one before. Padding rows write to
a scratch page and see nothing, and no row's bits depend on another row.

Off CUDA the same work is run instead of captured, so all of it can be tested with no card. This file knows tensors,
lanes and pages; no requests, no sampling and no text.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from serve.drafter.triton_block import TritonBlockDrafter
from serve.engine.beside import Beside
from serve.engine.context import DrafterContext
from serve.engine.graph_sizes import GraphSizes
from serve.engine.lanes import Lane, Packer
from serve.engine.outbox import LONGEST_DRAFT, Outbox, Slot
from serve.engine.prompts import PromptGraphs
from serve.engine.step_buffers import StepBuffers
from serve.kernels.kv_cache import KVCache
from serve.kernels.triton.step import DONE, DRAFT, VERIFY, WINDOW_FIELDS, settle_rows
from serve.kernels.triton.tiles import QUERY_TILE
from serve.model.triton_layers import TritonTargetModel
from serve.parallel.mirror import NO_MIRROR, Mirror

log = logging.getLogger(__name__)

WORKSPACE_SHARE = 1 / 64
"""Part of a card's memory that the split attention of one graph may take: bounds the context it has room for."""
CPU_WORKSPACE = 64 << 20
BESIDE_ROWS = 16
"""Verifies of so many rows or fewer have a graph in which the drafter reads beside; of more its reading is a small part
of the time, and not worth a graph each."""


@dataclass(frozen=True)
class Outcome:
    """What a launch came to, by lane: the target's token after each row of the lane up to the first disagreement, or
    before the first logit that was not finite (spoilt). Seconds of the draft pass and of the rest on the device."""

    kept: list[list[int]]
    spoilt: list[bool]
    draft_seconds: float
    verify_seconds: float


@dataclass(frozen=True)
class Launch:
    """A step on its way. rows: of its graph, padding included; hidden: normed states of its rows, good until the next
    launch."""

    lanes: tuple[Lane, ...]
    rows: int
    hidden: Tensor
    slot: Slot
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
        self._cuda = model.device.type == "cuda"
        self.sizes = _sizes(model, drafter, max_rows, max_sequences, max_length)
        pages = -(-max_length // cache.page_size)
        scratch_page = cache.num_pages - 1
        queries = QUERY_TILE // (model.config.num_heads // model.config.num_kv_heads)
        self._outbox = Outbox(
            Packer(queries, self.sizes.block - 1),
            Packer(_draft_queries(drafter) if drafter is not None else queries, self.sizes.block - 1),
            most_rows=self.sizes.most_rows,
            pages=pages,
            page_size=cache.page_size,
            block=self.sizes.block,
            on_cuda=self._cuda,
        )
        self.buffers = StepBuffers(
            self._outbox,
            self.sizes,
            pages=pages,
            page_size=cache.page_size,
            scratch_page=scratch_page,
            device=model.device,
        )
        self.state = self.buffers.state
        self.mirror: Mirror = NO_MIRROR
        self._verify: dict[int, tuple[Callable[[], object], Tensor]] = {}
        self._observing: dict[int, tuple[Callable[[], object], Tensor]] = {}
        self._beside = Beside(model.device)
        self._context: DrafterContext | None = None
        if drafter is not None:
            width = len(drafter.taps) * model.config.hidden_size
            scratch = scratch_page * cache.page_size
            self._context = DrafterContext(drafter, width, self.sizes.rows[-1], scratch, model.device)
        self.prompts: PromptGraphs | None = None
        if prompt_rows:
            self.prompts = PromptGraphs(model, cache, drafter, max_rows=prompt_rows, max_length=max_length)
        self._draft: dict[int, Callable[[], object]] = {}
        self._pool: Any = None

    # -- capture -----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def capture(self) -> int:
        """Record every graph, big ones first, all in one memory pool; how many there are."""
        self.model.reserve(self.max_length)
        if self.drafter is not None:
            self.drafter.reserve(self.max_length)
        self.buffers.record()
        others = self._capture_prompts()
        if self._context is not None:
            others += self._context.capture(self._record)
        for count in reversed(self.sizes.drafts):
            self._draft[count], _ = self._record(lambda count=count: self._run_draft(count))  # type: ignore[misc]
        for rows in reversed(self.sizes.rows):
            if self.drafter is not None and 1 < rows <= BESIDE_ROWS:
                self._observing[rows] = self._record(lambda rows=rows: self._run_verify(rows, True))  # type: ignore[misc]
            self._verify[rows] = self._record(lambda rows=rows: self._run_verify(rows, False))  # type: ignore[misc]
        return others + len(self._draft) + len(self._verify) + len(self._observing)

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

    def _run_verify(self, rows: int, observed: bool) -> Tensor:
        """Everything of a step after its draft pass and its rows; the normed hidden states. observed: the drafter reads
        all rows beside it; else they are to wait."""
        model, drafter = self.model, self.drafter
        taps = drafter.taps if drafter is not None else ()
        fields, out = self.buffers.fields(rows), self.buffers.rows(rows)
        plan = self.buffers.plan(rows, model.config.num_heads, model.config.num_kv_heads)

        def observe(kept: Tensor) -> None:
            if observed and drafter is not None:
                self._beside.run(lambda: drafter.observe_rows(kept, out.positions, out.slots))

        hidden, kept = model.stack.run(
            model.embed(out.token_ids), out.positions, out.slots, model.turns, plan, self.cache, taps, tapped=observe
        )
        best, values = model.best(hidden)
        settle_rows(fields, out, best, values, self.state, self._outbox.answers, LONGEST_DRAFT)
        if observed:
            self._beside.join()
        elif self._context is not None:
            self._context.append(kept, out, self.buffers.window)
        return hidden

    def _run_draft(self, count: int) -> Tensor:
        """A block for each of ``count`` sequences; the best token of each of its rows into the drafts."""
        drafter = self.drafter
        assert drafter is not None
        rows = count * self.sizes.block
        out = self.buffers.rows(rows)
        plan = self.buffers.plan(rows, drafter.config.num_attention_heads, drafter.config.num_key_value_heads)
        best = drafter.best(drafter.hidden(out.token_ids, out.positions, out.slots, plan))
        drafts = self.buffers.drafts[:rows]
        drafts.copy_(best)
        return drafts

    # -- launch ------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def launch(self, lanes: Sequence[Lane]) -> Launch:
        """Start a step; it waits for nothing. The launch before must have been read up to RING - 1 launches ago."""
        slot = self._outbox.next_slot()
        wanting = [lane for lane in lanes if lane.wanted]
        if wanting and self.drafter is not None:
            slot.mark(DRAFT)
            count = self.sizes.drafts_for(len(wanting))
            sent = self._outbox.draft(slot, wanting, count * self.sizes.block, self.drafter.config.mask_token_id)
            with self.mirror.draft(count, sent.fields, sent.tables):
                self.play_draft(count, sent.fields, sent.tables)
        slot.mark(VERIFY)
        used = sum(lane.rows for lane in lanes)
        rows = self.sizes.rows_for(used)
        sent = self._outbox.verify(slot, lanes, rows)
        with self.mirror.verify(rows, used, used == len(lanes), sent.fields, sent.tables):
            hidden = self.play_verify(rows, used, used == len(lanes), sent.fields, sent.tables)
        slot.mark(DONE)
        return Launch(tuple(lanes), rows, hidden, slot, bool(wanting))

    def play_draft(self, count: int, packed: Tensor, tables: Tensor | None) -> None:
        """A draft pass of ``count`` sequences; fields and page tables as packed for sending."""
        self.buffers.fill(DRAFT, count * self.sizes.block, packed, tables)
        if self._context is not None:
            self._context.flush()
        self._draft[count]()

    @torch.inference_mode()
    def play_verify(self, rows: int, used: int, settled: bool, packed: Tensor, tables: Tensor | None) -> Tensor:
        """A verify pass of ``rows`` rows, ``used`` of them no padding; settled: none of them may be rejected. Its
        normed hidden states."""
        context, beside = self._context, not settled and rows in self._observing
        if context is not None and not beside:
            packed.numpy()[-WINDOW_FIELDS:-1] = context.room(used), used
        self.buffers.fill(VERIFY, rows, packed, tables)
        # The next step writes again where rows are rejected: none of these may wait, nor those before them.
        if context is not None and beside:
            context.flush()
        replay, hidden = (self._observing if beside else self._verify)[rows]
        replay()
        if context is not None and not settled and not beside:
            context.flush()
        return hidden

    def observe_waiting(self) -> None:
        """Let the drafter read the rows that wait for it. Called here before a draft; due before anybody else reads or
        writes its context, and before pages that were released are used again."""
        if self._context is not None and self._context.waiting:
            with self.mirror.flush():
                self._context.flush()

    # -- outcome -----------------------------------------------------------------------------------------------------

    def read(self, launch: Launch) -> Outcome:
        """Wait for a launch and say what it came to. Each launch once, in order."""
        slot = launch.slot
        slot.wait()
        best, counts, finite = slot.result[: 3 * launch.rows].view(3, launch.rows).tolist()
        kept: list[list[int]] = []
        spoilt: list[bool] = []
        first = 0
        for index, lane in enumerate(launch.lanes):
            usable = finite[first : first + counts[index] + 1]
            spoilt.append(not all(usable))
            kept.append(best[first : first + (usable.index(0) if spoilt[-1] else len(usable))])
            first += lane.rows
        return Outcome(kept, spoilt, slot.seconds(DRAFT, VERIFY) if launch.drafted else 0.0, slot.seconds(VERIFY, DONE))

    def replay(self, rows: int) -> Callable[[], object]:
        """What runs the graph for ``rows`` rows once more on the fields of the latest launch."""
        return self._verify[self.sizes.rows_for(rows)][0]

    def logits(self, launch: Launch) -> Tensor:
        """Logits [rows without padding, vocab] float32 of the latest launch, in the order of its lanes."""
        count = sum(lane.rows for lane in launch.lanes)
        with self.mirror.logits(count):
            return self.model.logits(launch.hidden[:count])


def _draft_queries(drafter: TritonBlockDrafter) -> int:
    """Rows of a draft pass that attention takes at once."""
    return QUERY_TILE // (drafter.config.num_attention_heads // drafter.config.num_key_value_heads)


def _sizes(
    model: TritonTargetModel, drafter: TritonBlockDrafter | None, max_rows: int, max_sequences: int, max_length: int
) -> GraphSizes:
    memory = CPU_WORKSPACE
    if model.device.type == "cuda":
        memory = int(torch.cuda.get_device_properties(model.device).total_memory * WORKSPACE_SHARE)
    # A rank's layers have a part of the heads, its drafter has them all.
    heads = max(model.config.num_heads, drafter.config.num_attention_heads if drafter is not None else 0)
    return GraphSizes.up_to(
        max_rows,
        max_sequences,
        drafter.block_size if drafter is not None else 0,
        max_length=max_length,
        workspace=memory,
        row_bytes=heads * (model.config.head_dim + 2) * 4,
    )
