"""Who runs in the next step: budgets, fairness, admission, preemption. No model, no tensors."""

from __future__ import annotations

from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.engine.pages import PagePool
from serve.engine.scheduler import Plan, Scheduler
from serve.engine.sequence import Sequence
from serve.protocol import SamplingParams

PAGE = 4


def sequence(name: str, prompt: list[int] | int, max_tokens: int = 8, **params: Any) -> Sequence:
    ids = [1000 * ord(name[0]) + i for i in range(prompt)] if isinstance(prompt, int) else prompt
    return Sequence(
        id=name,
        prompt_ids=tuple(ids),
        params=SamplingParams(max_tokens=max_tokens, **params),
        sampler=cast(Any, None),
        text=cast(Any, None),
    )


def scheduler(
    pages: int = 32, *, seqs: int = 8, budget: int = 16, lookahead: int = 2, least_chunk: int = 1
) -> Scheduler:
    pool = PagePool(pages, PAGE)
    return Scheduler(pool, max_num_seqs=seqs, max_batch_tokens=budget, lookahead=lookahead, least_chunk=least_chunk)


def run(sched: Scheduler, plan: Plan, token: int = 7) -> list[Sequence]:
    """Pretend the plan ran: each piece of work that reaches the end gains a token. Returns sequences that ended."""
    ended = []
    for work in [*plan.decodes, *plan.prefills]:
        seq = work.sequence
        assert work.start == seq.num_computed
        assert len(seq.pages) * PAGE >= work.start + work.count
        grows = work.reaches_end
        seq.num_computed += work.count
        if grows:
            seq.token_ids.append(token)
        seq.register_full_pages(sched.pool)
        if seq.num_output >= seq.params.max_tokens:
            sched.remove(seq)
            ended.append(seq)
    return ended


def test_a_prompt_is_cut_into_chunks_of_the_budget() -> None:
    sched = scheduler(budget=16)
    sched.add(sequence("a", 40))
    counts = []
    while not sched.running or not sched.running[0].is_decoding:
        plan = sched.plan()
        counts.append(plan.prefills[0].count)
        run(sched, plan)
    assert counts == [16, 16, 8]


def test_decodes_come_before_prefill_and_leave_the_rest_for_drafts() -> None:
    sched = scheduler(budget=16)
    sched.add(sequence("a", 4))
    run(sched, sched.plan())
    sched.add(sequence("b", 6))
    plan = sched.plan()
    assert [w.sequence.id for w in plan.decodes] == ["a"]
    assert [(w.sequence.id, w.count) for w in plan.prefills] == [("b", 6)]
    assert plan.draft_budget == 16 - 1 - 6


def test_a_short_prompt_overtakes_a_long_prefill_that_keeps_half_of_the_budget() -> None:
    sched = scheduler(pages=64, budget=16)
    sched.add(sequence("long", 100))
    run(sched, sched.plan())
    sched.add(sequence("short", 8))
    plan = sched.plan()
    assert [(w.sequence.id, w.count) for w in plan.prefills] == [("long", 8), ("short", 8)]
    assert plan.prefills[1].reaches_end


def test_what_can_never_fit_is_refused_and_not_queued() -> None:
    sched = scheduler(pages=4)
    with pytest.raises(ValueError, match="KV pool holds"):
        sched.add(sequence("big", 14, max_tokens=8))
    assert not sched.waiting


def test_a_prefix_hit_skips_computed_pages_and_keeps_the_last_token() -> None:
    sched = scheduler()
    first = sequence("a", [1] * 8, max_tokens=1)
    sched.add(first)
    assert run(sched, sched.plan()) == [first]
    second = sequence("b", [1] * 8)
    sched.add(second)
    plan = sched.plan()
    assert (second.num_cached, plan.prefills[0].start, plan.prefills[0].count) == (4, 4, 4)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 90), st.booleans()), min_size=1, max_size=6),
    st.integers(8, 40),
    st.integers(1, 4),
    st.integers(0, 30),
)
def test_no_more_rows_are_scored_in_a_step_than_their_logits_have_room(
    requests: list[tuple[int, bool]], budget: int, least: int, more: int
) -> None:
    most = 2 * least + more
    sched = scheduler(pages=400, budget=budget, least_chunk=least)
    sched.max_scored_rows = most
    for number, (length, scored) in enumerate(requests):
        sched.add(sequence(chr(97 + number), length, max_tokens=1, prompt_logprobs=0 if scored else None))
    ended: list[Sequence] = []
    for _ in range(sum(length for length, _ in requests) + 1):
        plan = sched.plan()
        assert sum(work.count for work in plan.prefills if work.sequence.scores_prompt) <= most
        assert sum(work.count for work in plan.prefills) + plan.draft_budget == budget
        ended += run(sched, plan)
    assert len(ended) == len(requests)


def test_a_prompt_that_is_scored_in_small_parts_leaves_the_rest_of_the_step_to_others() -> None:
    sched = scheduler(budget=40)
    sched.max_scored_rows = 6
    sched.add(sequence("a", 50, prompt_logprobs=0))
    sched.add(sequence("b", 30))
    assert [(work.sequence.id, work.count) for work in sched.plan().prefills] == [("a", 6), ("b", 30)]


def test_prompt_logprobs_compute_every_row() -> None:
    sched = scheduler()
    sched.add(sequence("a", [1] * 8, max_tokens=1))
    run(sched, sched.plan())
    sched.add(sequence("b", [1] * 8, prompt_logprobs=0))
    assert sched.plan().prefills[0].count == 8


def test_the_newest_is_preempted_and_comes_back_first() -> None:
    sched = scheduler(pages=7, budget=16, lookahead=1)
    old, new = sequence("old", 8, max_tokens=16), sequence("new", 8, max_tokens=16)
    sched.add(old)
    sched.add(new)
    late = sequence("late", 4)
    for _ in range(12):
        run(sched, sched.plan())
        if sched.num_preemptions:
            break
    assert new.preemptions == 1
    assert old in sched.running
    sched.add(late)
    assert sched.waiting[0] is new
    assert new.pages == []
    assert new.num_output > 0


def test_cancelling_returns_all_pages_at_once() -> None:
    sched = scheduler(pages=8)
    seq = sequence("a", 16, max_tokens=4)
    sched.add(seq)
    sched.plan()
    assert sched.pool.num_available < 8
    sched.remove(seq)
    assert sched.pool.num_available == 8
    assert not sched.plan()


@given(
    st.lists(st.tuples(st.integers(1, 24), st.integers(1, 12), st.integers(0, 4)), min_size=1, max_size=10),
    st.integers(9, 24),
    st.integers(0, 5),
    st.integers(8, 24),
)
@settings(max_examples=150, deadline=None)
def test_everything_ends_within_budget_and_no_page_is_lost(
    requests: list[tuple[int, int, int]], pages: int, lookahead: int, budget: int
) -> None:
    sched = scheduler(pages=pages, seqs=6, budget=budget, lookahead=lookahead)
    pending = [sequence(str(i), [i % 3] * prompt, max_tokens=out) for i, (prompt, out, _) in enumerate(requests)]
    gaps = [gap for _, _, gap in requests]
    alive: list[Sequence] = []
    ended: list[Sequence] = []
    for _ in range(500):
        while pending and gaps[-len(pending)] == 0:
            seq = pending.pop(0)
            sched.add(seq)
            alive.append(seq)
        if pending:
            gaps[-len(pending)] -= 1
        plan = sched.plan()
        rows = sum(w.count for w in [*plan.decodes, *plan.prefills])
        assert rows + plan.draft_budget <= budget
        assert plan or not alive, "nothing runs although requests wait"
        for seq in run(sched, plan):
            alive.remove(seq)
            ended.append(seq)
        sched.pool.check([s.pages for s in alive])
        if not pending and not alive:
            break
    assert len(ended) == len(requests)
    assert all(seq.num_output == seq.params.max_tokens for seq in ended)
    assert sched.pool.num_available == pages


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 6)), min_size=1, max_size=8), st.integers(20, 40))
@settings(max_examples=60, deadline=None)
def test_no_part_of_a_longer_prompt_is_below_the_least_chunk(requests: list[tuple[int, int]], budget: int) -> None:
    """Whoever is beside it, whatever the budget and whatever the prefix cache holds of it."""
    least = 5
    sched = scheduler(pages=400, budget=budget, least_chunk=least)
    waiting = [(sequence(f"{chr(97 + kind)}{i}", size), kind) for i, (size, kind) in enumerate(requests)]
    for step in range(400):
        if waiting and step % 2 == 0:
            sched.add(waiting.pop()[0])
        plan = sched.plan()
        for work in plan.prefills:
            whole = len(work.sequence.token_ids)
            assert work.count >= min(least, whole)
            assert work.sequence.num_uncomputed == work.count or work.sequence.num_uncomputed - work.count >= least
        run(sched, plan)
        if not waiting and not sched.running and not sched.waiting:
            break
    else:
        pytest.fail("some prompt never ran")
