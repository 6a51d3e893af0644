"""What the engine has counted since its start: steps, tokens, rounds and where their time went. Decides nothing."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

from serve.engine.scheduler import Scheduler
from serve.engine.sequence import Round
from serve.protocol import STEP_TOKEN_BOUNDS, EngineStats


@dataclass
class Tally:
    """Counters by the names of EngineStats; times in seconds."""

    counts: Counter[str] = field(default_factory=Counter)
    accepted_per_position: list[int] = field(default_factory=list)
    block_lengths: Counter[str] = field(default_factory=Counter)
    steps_by_tokens: list[int] = field(default_factory=lambda: [0] * (len(STEP_TOKEN_BOUNDS) + 1))
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0

    def step(self, rows: int, draft_seconds: float, verify_seconds: float) -> None:
        self.counts["steps"] += 1
        self.counts["step_tokens"] += rows
        self.steps_by_tokens[bisect_left(STEP_TOKEN_BOUNDS, rows)] += 1
        self.draft_seconds += draft_seconds
        self.verify_seconds += verify_seconds

    def round(self, round_: Round) -> None:
        """One verify pass of a decoding sequence."""
        self.block_lengths[str(round_.drafted)] += 1
        if not round_.drafted:
            return
        self.counts["drafts"] += 1
        self.counts["draft_tokens"] += round_.drafted
        self.counts["accepted_tokens"] += round_.accepted
        grow = round_.drafted - len(self.accepted_per_position)
        self.accepted_per_position += [0] * grow
        for position in range(round_.accepted):
            self.accepted_per_position[position] += 1

    def stats(self, scheduler: Scheduler) -> EngineStats:
        counts = self.counts
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            kv_pages_total=scheduler.pool.num_pages,
            kv_pages_free=scheduler.pool.num_available,
            steps=counts["steps"],
            step_tokens=counts["step_tokens"],
            steps_by_tokens=tuple(self.steps_by_tokens),
            prompt_tokens=counts["prompt_tokens"],
            generation_tokens=counts["generation_tokens"],
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
            preemptions=scheduler.num_preemptions,
            drafts=counts["drafts"],
            draft_tokens=counts["draft_tokens"],
            accepted_tokens=counts["accepted_tokens"],
            accepted_per_position=tuple(self.accepted_per_position),
            block_lengths=dict(self.block_lengths),
            drafter_faults=counts["drafter_faults"],
            draft_seconds=self.draft_seconds,
            verify_seconds=self.verify_seconds,
        )
