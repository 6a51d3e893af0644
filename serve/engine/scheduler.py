"""Which tokens run in the next step, and who must wait or give way.

One token budget covers decode rows, draft rows and prefill chunks. Decoding sequences always get their row. What is
left goes to prefill: half of it, at least, to the oldest prefill, the rest to the shortest ones first, so that a long
prompt neither starves nor is starved. Prompts get all their pages when they are admitted; decoding sequences get pages
ahead for the longest block they could verify, and when there are none the newest sequence is preempted and later
computed again. This file knows no tensors, text or HTTP: it is tested with no model.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from dataclasses import dataclass, field
from operator import attrgetter

from serve.engine.pages import CachedPage, PagePool
from serve.engine.sequence import Sequence

_ORDER = attrgetter("order")


@dataclass(frozen=True)
class Work:
    """Rows of one sequence in a step: ``count`` tokens from ``start``; with a draft, its tokens follow the last one."""

    sequence: Sequence
    start: int
    count: int

    @property
    def reaches_end(self) -> bool:
        """The last row is the newest token: its logits say the next one."""
        return self.start + self.count == len(self.sequence.token_ids)


@dataclass
class Plan:
    """One step. ``decodes`` have one row each before drafts; ``draft_budget`` rows are left for drafts."""

    decodes: list[Work] = field(default_factory=list)
    prefills: list[Work] = field(default_factory=list)
    draft_budget: int = 0

    def __bool__(self) -> bool:
        return bool(self.decodes or self.prefills)


class Scheduler:
    """Waiting and running sequences over one page pool.

    max_batch_tokens: rows of a step at most. max_num_seqs: sequences running at most (<= max_batch_tokens).
    lookahead: positions beyond the newest token that a round may write (the longest block). least_chunk: rows that a
    part of a longer prompt has at least, where the model runs fewer rows in another way, with other bits.
    max_scored_rows: rows of a step at most whose logits are kept to score a prompt; all, if not told.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        max_num_seqs: int,
        max_batch_tokens: int,
        lookahead: int,
        least_chunk: int = 1,
        max_scored_rows: int | None = None,
    ) -> None:
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_batch_tokens = max_batch_tokens
        self.lookahead = lookahead
        self.least_chunk = least_chunk
        self.max_scored_rows = max_scored_rows or max_batch_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._order = itertools.count()
        self.num_preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0

    @property
    def capacity_tokens(self) -> int:
        """Longest sequence that fits when it is alone."""
        return self.pool.num_pages * self.pool.page_size

    def add(self, sequence: Sequence) -> None:
        """Queue a request. ValueError when it could not fit even alone: waiting would be for ever."""
        if sequence.last_position > self.capacity_tokens:
            raise ValueError(
                f"prompt ({sequence.num_prompt}) plus max_tokens ({sequence.params.max_tokens}) needs more than the "
                f"{self.capacity_tokens} tokens that the KV pool holds"
            )
        sequence.order = next(self._order)
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a finished, failed or cancelled sequence and free its pages."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.drop_pages(self.pool)

    def plan(self) -> Plan:
        """Choose the next step and reserve its pages. Empty when nothing can run."""
        plan = Plan()
        preempted = self.num_preemptions
        for sequence in sorted(self.running, key=_ORDER):
            if sequence.ends_in_flight or not sequence.is_decoding:
                continue
            if self.num_preemptions != preempted and sequence not in self.running:
                continue
            if self._reserve_ahead(sequence):
                plan.decodes.append(Work(sequence, sequence.num_computed, 1))
        budget = self.max_batch_tokens - len(plan.decodes)
        self._admit(budget)
        budget -= self._plan_prefills(plan, budget)
        plan.draft_budget = budget
        return plan

    def _reserve_ahead(self, sequence: Sequence) -> bool:
        """Pages for the newest token and the longest block after it; False when the sequence itself was preempted."""
        while True:
            missing = self._missing_ahead(sequence)
            if missing <= 0:
                return True
            pages = self.pool.allocate(missing)
            if pages is not None:
                sequence.pages += pages
                return True
            victim = max(self.running, key=lambda s: s.order)
            self.preempt(victim)
            if victim is sequence:
                return False

    def _missing_ahead(self, sequence: Sequence) -> int:
        """Pages that a decoding sequence lacks for its next round, whatever the steps on their way accept."""
        end = min(len(sequence.token_ids) + sequence.in_flight + self.lookahead, sequence.last_position)
        return self.pool.pages_for(end) - len(sequence.pages)

    def runs_ahead(self) -> bool:
        """Whether the next plan needs nothing that steps on their way will tell: no sequence has to give way."""
        # No round takes more pages than this: a count for each sequence is not worth it where so many are there.
        most = self.pool.pages_for(2 * (self.lookahead + 1)) + 1
        if most * len(self.running) <= self.pool.num_available:
            return True
        missing = 0
        for sequence in self.running:
            if sequence.is_decoding and not sequence.ends_in_flight:
                missing += max(0, self._missing_ahead(sequence))
        return missing <= self.pool.num_available

    def preempt(self, sequence: Sequence) -> None:
        """Send a running sequence back to the front of the queue without its pages; nothing it produced is lost."""
        self.running.remove(sequence)
        sequence.drop_pages(self.pool)
        sequence.preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(sequence)

    def _admit(self, budget: int) -> None:
        """Move waiting sequences to running, in order, while a row and all pages of their tokens are there."""
        spare = budget - sum(1 for s in self.running if not s.is_decoding)
        while self.waiting and spare > 0 and len(self.running) < self.max_num_seqs:
            sequence = self.waiting[0]
            matched = self._match(sequence)
            end = min(len(sequence.token_ids) + self.lookahead, sequence.last_position)
            needed = self.pool.pages_for(end) - len(matched)
            matched_ids = [page.page_id for page in matched]
            self.pool.hold(matched)
            # A page of headroom for each running sequence, or a sequence just preempted would come straight back.
            fresh = self.pool.allocate(needed) if needed + len(self.running) <= self.pool.num_available else None
            if fresh is None:
                self.pool.release(matched_ids)
                return
            self.waiting.popleft()
            sequence.pages = matched_ids + fresh
            sequence.page_hashes = [page.chain_hash for page in matched]
            sequence.findable += zip(matched_ids, sequence.page_hashes, strict=True)
            sequence.num_computed = len(matched) * self.pool.page_size
            if sequence.admitted is None:
                sequence.admitted = time.monotonic()
                sequence.num_cached = sequence.num_computed
                self.prefix_queries += sequence.num_prompt
                self.prefix_hits += sequence.num_computed
            self.running.append(sequence)
            spare -= 1

    def _match(self, sequence: Sequence) -> list[CachedPage]:
        if sequence.scores_prompt:
            return []
        matched = self.pool.match(sequence.token_ids, sequence.salt)
        count = len(sequence.token_ids)
        while matched and count - len(matched) * self.pool.page_size < self.least_chunk <= count:
            matched.pop()
        return matched

    def _chunk(self, wanted: int, room: int) -> int:
        """How many of ``wanted`` rows run where there is room for so many: all, or a part that leaves neither itself
        nor the rest below least_chunk."""
        if wanted <= room:
            return wanted
        part = min(room, wanted - self.least_chunk)
        return part if part >= self.least_chunk else 0

    def _plan_prefills(self, plan: Plan, budget: int) -> int:
        """Share ``budget`` rows among sequences with uncomputed tokens; returns the rows used."""
        decoding = {work.sequence.id for work in plan.decodes}
        # A resumed sequence may have all but its newest token in the prefix cache: one row is its whole prefill.
        pending = [s for s in self.running if s.id not in decoding and not s.ends_in_flight]
        if not pending or budget <= 0:
            return 0
        oldest = min(pending, key=lambda s: s.order)
        others = sorted((s for s in pending if s is not oldest), key=lambda s: (s.num_uncomputed, s.order))
        reserved = min(oldest.num_uncomputed, -(-budget // 2))
        scored = self.max_scored_rows
        if oldest.scores_prompt:
            reserved = min(reserved, scored)
            scored -= reserved
        left = budget - reserved
        chunks: list[tuple[Sequence, int]] = []
        for sequence in others:
            count = self._chunk(sequence.num_uncomputed, min(left, scored) if sequence.scores_prompt else left)
            if count > 0:
                chunks.append((sequence, count))
                left -= count
                scored -= count * sequence.scores_prompt
        room = reserved + (min(left, scored) if oldest.scores_prompt else left)
        first = self._chunk(oldest.num_uncomputed, room)
        if not first and not chunks:
            first = min(oldest.num_uncomputed, room)  # in a budget this small, going on comes first
        if first:
            chunks.insert(0, (oldest, first))
        plan.prefills = [Work(sequence, sequence.num_computed, count) for sequence, count in chunks]
        return sum(count for _, count in chunks)
