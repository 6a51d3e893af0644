"""What a pass is taken to cost: what its runs usually take, neither a lucky moment nor a busy one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from serve.engine.costs import COST_REPEATS, COST_ROUNDS, COST_SECONDS, _usual_seconds

# As served: for the other tests tests/conftest.py has each pass timed less often.
SERVED = {"COST_REPEATS": COST_REPEATS, "COST_ROUNDS": COST_ROUNDS}


class Clock:
    """Time that passes only in runs."""

    def __init__(self) -> None:
        self.now = 0.0

    def run(self, seconds: Iterator[float]) -> Callable[[], object]:
        def step() -> None:
            self.now += next(seconds)

        return step


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("serve.engine.costs.time.perf_counter", lambda: made.now)
    for name, value in SERVED.items():
        monkeypatch.setattr(f"serve.engine.costs.{name}", value)
    return made


def test_one_lucky_run_and_busy_ones_do_not_count(clock: Clock) -> None:
    usual = [0.002] * (1 + COST_REPEATS)
    first = [*usual[:3], 0.0001, *usual[4:12], *[0.05] * 5]
    assert _usual_seconds([clock.run(iter(first * COST_ROUNDS))]) == [pytest.approx(0.002)]


def test_the_first_run_of_a_round_does_not_count_and_late_the_second_does(clock: Clock) -> None:
    cold = [0.03, *[0.003] * COST_REPEATS] * COST_ROUNDS
    assert _usual_seconds([clock.run(iter(cold))]) == [pytest.approx(0.003)]
    late = [clock.run(iter([COST_SECONDS + 1.0] * 9)), clock.run(iter([50.0, *[0.5] * 9]))]
    assert _usual_seconds(late)[1] == pytest.approx(0.5)
