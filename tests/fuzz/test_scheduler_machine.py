"""Page pool, prefix cache and scheduler together, driven at random, against a model of what the pages hold.

Every page slot remembers the whole text it was computed for. So a page that is shared by two writers, reused with other
text behind it, or lost and computed again wrongly is seen by the first sequence that reads it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar, cast

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from serve.engine.pages import PagePool
from serve.engine.scheduler import Scheduler, Work
from serve.engine.sequence import Sequence
from serve.protocol import SamplingParams
from tests.fuzz.scale import fuzz

PAGE = 4
STEPS = 50


def next_token(salt: str, tokens: list[int]) -> int:
    """The model: a token follows from the text before it. Two tokens, so that texts often go on alike."""
    return hashlib.sha256(f"{salt}{tokens}".encode()).digest()[0] % 2


class SchedulerMachine(RuleBasedStateMachine):
    """``counts``: what was done, over all runs."""

    counts: ClassVar[Counter[str]] = Counter()

    @initialize(
        pages=st.integers(6, 20),
        seqs=st.integers(2, 6),
        budget=st.integers(6, 24),
        lookahead=st.integers(0, 5),
        reuse=st.sampled_from([True] * 7 + [False]),
    )
    def start(self, pages: int, seqs: int, budget: int, lookahead: int, reuse: bool) -> None:
        self.pool = PagePool(pages, PAGE, reuse=reuse)
        self.scheduler = Scheduler(
            self.pool, max_num_seqs=min(seqs, budget), max_batch_tokens=budget, lookahead=lookahead
        )
        self.alive: list[Sequence] = []
        self.slots: dict[tuple[int, int], tuple[str, tuple[int, ...]]] = {}
        self.names = 0
        self.ended = 0
        self.served: dict[str, int] = {}

    @rule(
        count=st.integers(1, 3),
        stem=st.sampled_from([[0] * 24, [0, 1] * 12, [1, 0, 0, 1, 1] * 5]),
        length=st.sampled_from([1, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 20, 24]),
        tail=st.lists(st.integers(0, 1), max_size=2),
        max_tokens=st.sampled_from([1, 2, 3, 5, 8, 12, 20]),
        salt=st.sampled_from(["", "", "key"]),
        scored=st.booleans(),
    )
    def arrive(
        self, count: int, stem: list[int], length: int, tail: list[int], max_tokens: int, salt: str, scored: bool
    ) -> None:
        """Prompts begin alike: the prefix cache is what is tried here."""
        for _ in range(count):
            self.arrive_once([*stem[:length], *tail], max_tokens, salt, scored)

    def arrive_once(self, prompt: list[int], max_tokens: int, salt: str, scored: bool) -> None:
        self.names += 1
        sequence = Sequence(
            id=str(self.names),
            prompt_ids=tuple(prompt),
            params=SamplingParams(max_tokens=max_tokens, prompt_logprobs=0 if scored and max_tokens == 8 else None),
            sampler=cast(Any, None),
            text=cast(Any, None),
            salt=salt,
        )
        if len(prompt) + max_tokens > self.scheduler.capacity_tokens:
            with pytest.raises(ValueError, match="KV pool holds"):
                self.scheduler.add(sequence)
        else:
            self.scheduler.add(sequence)
            self.alive.append(sequence)
        self.counts["arrivals"] += 1

    @rule(times=st.integers(1, 6), kept=st.lists(st.integers(0, 5), min_size=8, max_size=8), drafted=st.integers(0, 5))
    def step(self, times: int, kept: list[int], drafted: int) -> None:
        for _ in range(times):
            self.run_step(kept, drafted)
            self.books_balance()

    @precondition(lambda self: self.alive)
    @rule(pick=st.integers(0, 99))
    def cancel(self, pick: int) -> None:
        """A client leaves, or the request fails: its pages are free at once."""
        sequence = self.alive.pop(pick % len(self.alive))
        held = len(sequence.pages)
        before = self.pool.num_available
        self.scheduler.remove(sequence)
        assert sequence.pages == []
        assert before <= self.pool.num_available <= before + held
        self.counts["cancellations"] += 1

    @rule(really=st.sampled_from([False] * 12 + [True]))
    def reset_prefix_cache(self, really: bool) -> None:
        if really:
            self.pool.forget()
            self.counts["resets"] += 1

    def run_step(self, kept: list[int], drafted: int) -> None:
        plan = self.scheduler.plan()
        assert plan or not self.alive, "nothing runs although requests wait"
        works = [*plan.decodes, *plan.prefills]
        assert len({work.sequence.id for work in works}) == len(works)
        assert all(work.sequence in self.alive for work in works)
        rows = sum(work.count for work in works)
        assert rows + plan.draft_budget <= self.scheduler.max_batch_tokens
        assert len(self.scheduler.running) <= self.scheduler.max_num_seqs
        spare = plan.draft_budget
        for index, work in enumerate(works):
            draft = min(drafted, self.scheduler.lookahead, spare) if work in plan.decodes else 0
            draft = max(0, min(draft, work.sequence.last_position - len(work.sequence.token_ids) - 1))
            spare -= draft
            self.compute(work, draft, kept[index % len(kept)])
        self.counts["steps"] += 1

    def compute(self, work: Work, drafted: int, kept: int) -> None:
        """Write the rows of one work as the model would, commit what was accepted, and end what is complete."""
        sequence = work.sequence
        assert work.start == sequence.num_computed
        assert work.count >= 1
        self.check_readable(sequence)
        truth = list(sequence.token_ids)
        reaches_end = work.reaches_end
        gained = 0
        if reaches_end:
            for _ in range(min(kept, drafted) + 1):
                truth.append(next_token(sequence.salt, truth))
                gained += 1
        true_end = work.start + work.count + max(0, gained - 1)
        for position in range(work.start, work.start + work.count + drafted):
            page = sequence.pages[position // PAGE]
            assert self.pool._references[page] == 1, "two sequences hold a page that one of them writes"
            # What a refused draft leaves behind is wrong on purpose.
            text = tuple(truth[: position + 1]) if position < true_end else (-1, position)
            self.slots[page, position % PAGE] = (sequence.salt, text)
        room = sequence.params.max_tokens - sequence.num_output
        committed = truth[len(sequence.token_ids) :][:room]
        sequence.token_ids += committed
        sequence.num_computed += work.count + max(0, min(gained, len(committed)) - 1)
        sequence.register_full_pages(self.pool)
        self.served[sequence.id] = self.served.get(sequence.id, 0) + work.count
        if committed and sequence.first_token is None:
            sequence.first_token = 0.0
        if sequence.num_output == sequence.params.max_tokens:
            self.check_text(sequence)
            self.scheduler.remove(sequence)
            self.alive.remove(sequence)
            self.ended += 1

    def check_readable(self, sequence: Sequence) -> None:
        """Every position that counts as computed holds this very text, under this very salt."""
        for position in range(sequence.num_computed):
            salt, text = self.slots[sequence.pages[position // PAGE], position % PAGE]
            assert text == tuple(sequence.token_ids[: position + 1])
            assert salt == sequence.salt

    def check_text(self, sequence: Sequence) -> None:
        """Nothing lost, nothing repeated, whatever the preemptions."""
        expected = list(sequence.prompt_ids)
        for _ in range(sequence.params.max_tokens):
            expected.append(next_token(sequence.salt, expected))
        assert sequence.token_ids == expected

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check([sequence.pages for sequence in self.alive])
        running, waiting = self.scheduler.running, list(self.scheduler.waiting)
        assert sorted(s.order for s in self.alive) == sorted(s.order for s in [*running, *waiting])
        assert [s.order for s in waiting] == sorted(s.order for s in waiting), "the queue is not in order of arrival"
        assert all(not s.pages for s in waiting)
        assert not self.pool.reuse or len(self.pool._by_hash) == len(self.pool._by_page)

    def teardown(self) -> None:
        """Whatever is left comes to its end: no request waits for ever, and no page stays behind."""
        if not hasattr(self, "pool"):
            return
        work_left = sum(s.last_position for s in self.alive)
        for _ in range(20 * work_left + 20):
            if not self.alive:
                break
            oldest = min(self.alive, key=lambda s: s.order)
            progress = len(oldest.token_ids) + oldest.num_computed
            self.run_step([0, 1], 1)
            # Fair to the oldest: it is never set back by those that came later.
            assert oldest not in self.alive or len(oldest.token_ids) + oldest.num_computed > progress
        assert not self.alive, "a request did not come to its end"
        assert self.pool.num_available == self.pool.num_pages
        self.pool.check([])
        self.counts["preemptions"] += self.scheduler.num_preemptions
        self.counts["pages found"] += self.scheduler.prefix_hits // PAGE


def test_pages_prefix_cache_and_scheduler_keep_every_text_apart(tried: Callable[[str], None]) -> None:
    SchedulerMachine.counts.clear()
    run_state_machine_as_test(SchedulerMachine, settings=fuzz(40, stateful_step_count=STEPS))
    for name, count in SchedulerMachine.counts.items():
        for _ in range(count):
            tried(name)
    assert SchedulerMachine.counts["preemptions"] > 0 < SchedulerMachine.counts["pages found"]
