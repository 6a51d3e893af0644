"""The best lengths of a step: as good as trying all of them, shared draft cost and staircases included."""

from __future__ import annotations

import math
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verify.costs import CostTable
from verify.goodput import Offer, StepPricer, StepWork, best_lengths, preferred

NO_LIMIT = 10_000
LINEAR = {1: 10.0, 2: 11.0, 64: 73.0}
STAIRS = {1: 3.0, 4: 3.0, 5: 6.0, 8: 6.0, 9: 9.0, 12: 9.0, 100: 80.0}


def offer(rate: float, length: int, drafted: bool = True) -> Offer:
    return Offer([rate ** (k + 1) for k in range(length)], drafted)


def pricer(costs: CostTable, offers: list[Offer], work: StepWork | None = None) -> StepPricer:
    return StepPricer(costs, work or StepWork(0, 0, NO_LIMIT), offers)


@settings(max_examples=120, deadline=None)
@given(
    rates=st.lists(st.tuples(st.floats(0.05, 0.98), st.booleans()), min_size=1, max_size=3),
    others=st.integers(0, 3),
    stairs=st.booleans(),
    draft=st.floats(0.01, 6.0),
)
def test_close_to_the_best_of_all_lengths(
    rates: list[tuple[float, bool]], others: int, stairs: bool, draft: float
) -> None:
    costs = CostTable(STAIRS if stairs else LINEAR, {1: draft, 4: draft * 1.5})
    step = pricer(costs, [offer(rate, 4, drafted) for rate, drafted in rates], StepWork(others, others, NO_LIMIT))
    best = max(step.goodput(lengths) for lengths in product(range(5), repeat=len(rates)))
    found = best_lengths(step)
    assert step.goodput(found) >= 0.97 * best
    assert step.goodput(found) >= step.goodput([0] * len(rates))


def test_a_local_dip_before_a_free_tread_is_crossed() -> None:
    # Four requests fill the first tread. One more row costs a whole tread; three further rows are free then.
    costs = CostTable({1: 3.0, 4: 3.0, 5: 4.0, 8: 4.0, 9: 40.0})
    step = pricer(costs, [offer(0.95, 2, drafted=False) for _ in range(4)])
    assert step.goodput([1, 0, 0, 0]) < step.goodput([0, 0, 0, 0])
    assert best_lengths(step) == [1, 1, 1, 1]


def test_a_draft_pass_too_dear_for_one_is_shared_by_many() -> None:
    costs = CostTable({1: 10.0, 128: 10.0}, {1: 5.0, 64: 5.0})
    assert best_lengths(pricer(costs, [offer(0.8, 4)], StepWork(19, 19, NO_LIMIT))) == [0]
    assert best_lengths(pricer(costs, [offer(0.8, 4)] * 20)) == [4] * 20
    # A copy beside it is worth verifying, and does not make the draft pass worth it.
    copy = offer(0.5, 4, drafted=False)
    assert best_lengths(pricer(costs, [offer(0.8, 4), copy], StepWork(19, 19, NO_LIMIT))) == [0, 4]


def test_bad_drafts_are_left_out_where_each_costs() -> None:
    costs = CostTable(LINEAR, {1: 1.0, 2: 2.0, 8: 8.0})
    lengths = best_lengths(pricer(costs, [offer(0.95, 5), offer(0.05, 5)]))
    assert lengths[0] >= 3
    assert lengths[1] == 0


def test_the_row_limit_holds() -> None:
    costs = CostTable({1: 3.0, 64: 3.0})
    step = pricer(costs, [offer(0.9, 7, drafted=False) for _ in range(3)], StepWork(5, 5, 12))
    assert sum(best_lengths(step)) == 4  # 5 others and 3 own rows leave 4
    tight = pricer(costs, [offer(0.9, 7, drafted=False)], StepWork(20, 20, 12))
    assert best_lengths(tight) == [0]


def test_beside_a_prefill_chunk_rows_are_priced_by_what_they_add() -> None:
    costs = CostTable({1: 10.0, 8: 24.0, 64: 136.0, 256: 520.0})
    offers = [offer(0.8, 6, drafted=False)]
    alone = best_lengths(pricer(costs, offers))
    beside = best_lengths(pricer(costs, offers, StepWork(200, 0, NO_LIMIT)))
    assert beside == alone  # each row adds 2 either way
    assert best_lengths(pricer(costs, offers, StepWork(200, 200, NO_LIMIT))) == [0]


def test_goodput_is_tokens_over_time() -> None:
    step = pricer(CostTable(LINEAR, {1: 1.0}), [offer(0.5, 2)])
    assert step.goodput([0]) == pytest.approx(1 / 10.0)
    assert step.goodput([2]) == pytest.approx((1 + 0.5 + 0.25) / (12.0 + 1.0))


@settings(max_examples=200, deadline=None)
@given(
    chances=st.lists(st.floats(0.02, 0.99), max_size=6),
    others=st.tuples(st.integers(0, 3), st.integers(0, 9)),
    limit=st.integers(1, 14),
    drafted=st.booleans(),
    draft=st.floats(0.01, 6.0),
)
def test_one_offer_alone_gets_what_the_search_over_many_finds(
    chances: list[float], others: tuple[int, int], limit: int, drafted: bool, draft: float
) -> None:
    survival = [math.prod(chances[: k + 1]) for k in range(len(chances))]
    work = StepWork(sum(others), others[0], sum(others) + limit)
    step = pricer(CostTable(STAIRS, {1: draft}), [Offer(survival, drafted)], work)
    plans = [step.best(drafting=False), step.best(drafting=True)]
    # Equal plans may be told apart by rounding alone.
    assert step.goodput([step.best_alone(0)]) == pytest.approx(max(map(step.goodput, plans)), rel=1e-12)


def test_copies_that_make_a_step_wait_are_taken_where_they_share_the_wait() -> None:
    costs = CostTable({1: 10.0, 128: 10.0}, {1: 1.0, 64: 1.0}, copying_waits=True)
    for _ in range(20):
        costs.observe_copying(9.0)
    copy, block = offer(0.9, 7, drafted=False), offer(0.8, 7)
    # One copy beside seven blocks is not worth the wait, alone or instead of its own block; eight copies are.
    assert best_lengths(pricer(costs, [copy, *[block] * 7])) == [0, *[7] * 7]
    ids = [str(n) for n in range(8)]
    picked = preferred(costs, StepWork(0, 0, NO_LIMIT), [ids[0], *ids], [copy, *[block] * 8])
    assert picked == [1, *range(2, 9)]
    assert best_lengths(pricer(costs, [copy] * 8)) == [7] * 8
    # Where nothing waits the better draft is taken.
    free = CostTable({1: 10.0, 128: 10.0}, {1: 1.0, 64: 1.0})
    assert preferred(free, StepWork(0, 0, NO_LIMIT), [ids[0], *ids], [copy, *[block] * 8])[0] == 0
