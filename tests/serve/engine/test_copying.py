"""Searches for copies fit into a share of the step's time, and every sequence has its turn."""

from __future__ import annotations

from serve.engine.copying import SEARCH_SHARE, SearchBudget

IDS = [str(number) for number in range(10)]


def test_without_a_limit_and_with_time_enough_every_sequence_is_searched() -> None:
    assert SearchBudget(limited=False).due(IDS, 1e-9) == set(IDS)
    budget = SearchBudget(limited=True)
    budget.took(10, 10 * 20e-6)
    assert budget.due(IDS, 1.0) == set(IDS)


def test_a_short_step_searches_a_few_in_turn() -> None:
    budget = SearchBudget(limited=True)
    for _ in range(100):
        budget.took(1, 100e-6)
    step = 3.5 * 100e-6 / SEARCH_SHARE
    seen: list[str] = []
    for _ in range(10):
        due = budget.due(IDS, step)
        assert len(due) == 3
        seen += due
    assert all(seen.count(name) == 3 for name in IDS)
    assert len(budget.due(IDS, 1e-9)) == 1


def test_sequences_that_copy_come_first() -> None:
    budget = SearchBudget(limited=True)
    for _ in range(100):
        budget.took(1, 100e-6)
    step = 2.5 * 100e-6 / SEARCH_SHARE
    budget.copies("7", True)
    assert all("7" in budget.due(IDS, step) for _ in range(12))
    budget.copies("7", False)
    assert sum("7" in budget.due(IDS, step) for _ in range(10)) == 2
    budget.copies("3", True)
    budget.release("3")
    assert sum("3" in budget.due(IDS, step) for _ in range(10)) == 2
