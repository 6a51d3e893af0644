from __future__ import annotations

import math
import random
from collections.abc import Sequence
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.stats import (
    binomial_at_least,
    bootstrap_interval,
    exact_binomial,
    geometric_mean,
    geometric_mean_interval,
    is_tie,
    mean_interval,
    median_interval,
    percentile,
    samples_needed,
    student_t95,
    wilson,
)


def test_percentile_interpolates_between_order_statistics() -> None:
    assert percentile([4, 1, 3, 2], 50) == 2.5
    assert percentile([1, 2, 3, 4, 5], 99) == pytest.approx(4.96)
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.floats(0, 100))
def test_percentile_lies_between_the_extremes(values: list[float], q: float) -> None:
    assert min(values) <= percentile(values, q) <= max(values)


def test_a_p99_needs_a_thousand_samples_and_a_median_twenty() -> None:
    assert samples_needed(99) == 1000
    assert samples_needed(50) == 20


@pytest.mark.parametrize(("degrees", "quantile"), [(1, 12.7062), (2, 4.3027), (4, 2.7764), (9, 2.2622), (30, 2.0423)])
def test_student_quantiles_match_the_tables(degrees: int, quantile: float) -> None:
    assert student_t95(degrees) == pytest.approx(quantile, abs=1e-4)


def test_mean_interval_of_one_value_is_unbounded() -> None:
    assert mean_interval([3.0]).low == -math.inf
    assert mean_interval([1.0, 2.0, 3.0]).high == pytest.approx(2 + 4.30265 / math.sqrt(3), abs=1e-4)


def test_a_median_lies_between_the_innermost_values_that_cover_it_often_enough() -> None:
    for count, low, high in ((6, 1, 6), (8, 1, 8), (9, 2, 8), (12, 3, 10)):
        interval = median_interval([float(n) for n in range(count, 0, -1)])
        assert (interval.low, interval.value, interval.high) == (low, (count + 1) / 2, high)
        missed = 2 * binomial_at_least(count - low + 1, count, 0.5)
        assert missed <= 0.05 < missed + 2 * math.comb(count, low) / 2**count
    assert median_interval([1.0] * 5).high == math.inf


def test_score_vector_of_the_reference_has_geometric_mean_six() -> None:
    assert geometric_mean([78 / 26, 8.8 / 2.2, 252 / 14]) == pytest.approx(6.0)
    interval = geometric_mean_interval([3.0, 4.0, 18.0])
    assert interval.low < 6.0 < interval.high


def test_ties_are_decided_at_three_percent() -> None:
    assert is_tie(5.83, 6.00)
    assert not is_tie(5.81, 6.00)


def test_wilson_and_exact_intervals_match_known_values() -> None:
    score = wilson(8, 10)
    assert [score.low, score.high] == pytest.approx([0.4902, 0.9433], abs=1e-4)
    exact = exact_binomial(195, 200)
    assert [exact.low, exact.high] == pytest.approx([0.9426, 0.9918], abs=1e-4)
    assert exact_binomial(10, 10).high == 1.0
    assert exact_binomial(0, 10).low == 0.0


@pytest.mark.parametrize(("share", "expected"), [(0.975, 0.987), (0.965, 0.905), (0.985, 0.9997)])
def test_chance_to_pass_a_gate_of_200_questions(share: float, expected: float) -> None:
    assert binomial_at_least(190, 200, share) == pytest.approx(expected, abs=0.0006)


@given(st.integers(0, 60), st.integers(1, 60))
def test_exact_interval_holds_the_share_and_contains_wilsons_centre(successes: int, trials: int) -> None:
    successes = min(successes, trials)
    interval = exact_binomial(successes, trials)
    assert interval.low <= successes / trials <= interval.high


def test_bootstrap_resamples_whole_groups() -> None:
    rng = random.Random(1)
    groups = [[rng.random()] * 50 for _ in range(30)]

    def mean(sample: list[Sequence[float]]) -> float:
        return fmean(value for group in sample for value in group)

    interval = bootstrap_interval(groups, mean, seed=1, rounds=400)
    naive_half = 1.96 * 0.29 / math.sqrt(1500)
    assert interval.low <= interval.value <= interval.high
    assert interval.high - interval.low > 4 * naive_half
