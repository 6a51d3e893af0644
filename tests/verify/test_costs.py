"""Cost curves: exact at measured points, monotone, deaf to outliers, and back from JSON unchanged."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verify.costs import CostCurve, CostTable

FLAT_THEN_STEEP = {1: 3.0, 16: 3.0, 32: 3.0, 64: 5.0}


def test_measured_points_are_returned_and_flat_stays_flat() -> None:
    curve = CostCurve(FLAT_THEN_STEEP)
    assert [curve.seconds(n) for n in (1, 16, 32, 64)] == pytest.approx([3.0, 3.0, 3.0, 5.0])
    assert curve.seconds(20) == pytest.approx(3.0)
    assert curve.seconds(48) == pytest.approx(4.0)
    assert curve.seconds(128) == pytest.approx(9.0)  # the slope of the upper half goes on


def test_one_point_is_taken_as_proportional_beyond_it() -> None:
    curve = CostCurve({4: 2.0})
    assert curve.seconds(1) == pytest.approx(2.0)
    assert curve.seconds(8) == pytest.approx(4.0)


@given(
    st.dictionaries(st.integers(1, 200), st.floats(1e-4, 10.0), min_size=1, max_size=8),
    st.lists(st.tuples(st.integers(1, 300), st.floats(1e-4, 10.0)), max_size=40),
)
def test_never_falls_with_more_work(points: dict[int, float], seen: list[tuple[int, float]]) -> None:
    curve = CostCurve(points)
    for count, seconds in seen:
        curve.observe(count, seconds)
    table = curve.table(400)[1:401]
    assert all(b >= a * (1 - 1e-9) for a, b in pairwise(table))
    assert table[0] > 0.0


def test_follows_a_lasting_change_and_ignores_an_outlier() -> None:
    curve = CostCurve(FLAT_THEN_STEEP)
    curve.observe(8, 300.0)
    for _ in range(15):
        curve.observe(8, 3.0)
    assert curve.seconds(8) == pytest.approx(3.0, rel=0.05)
    for _ in range(160):
        curve.observe(8, 4.5)
    assert curve.seconds(8) == pytest.approx(4.5, rel=0.05)
    assert curve.seconds(64) > 5.5  # what was not seen moved along


def test_a_steady_time_is_approached_and_never_overshot() -> None:
    curve = CostCurve({1: 4.0, 8: 8.0})
    seen = []
    for _ in range(200):
        curve.observe(1, 3.0)
        seen.append(curve.seconds(1))
    assert seen == sorted(seen, reverse=True)
    assert 3.0 - 1e-9 <= seen[-1] < 3.01


def test_a_measurement_that_stands_alone_moves_its_own_point_only() -> None:
    curve = CostCurve({1: 3.0, 4: 5.0})
    for _ in range(64):
        curve.observe(4, 7.0, alone=True)
    assert curve.seconds(1) == pytest.approx(3.0)
    assert curve.seconds(4) == pytest.approx(7.0, rel=0.02)


def test_a_point_that_was_wrong_is_put_right_by_three_measurements_and_not_by_two() -> None:
    curve = CostCurve({1: 1.0, 32: 1.2, 64: 1.4, 128: 2.0})
    curve.observe(32, 3.0, alone=True)
    curve.observe(32, 3.2, alone=True)
    assert curve.seconds(32) < 1.5
    curve.observe(32, 3.1, alone=True)
    assert curve.seconds(32) == pytest.approx(3.1, rel=0.05)
    assert curve.seconds(1) == pytest.approx(1.0)
    # What no measurement has visited takes so much longer too.
    assert curve.seconds(128) == pytest.approx(2.0 + 1.9, rel=0.05)
    for _ in range(3):
        curve.observe(32, 1.3, alone=True)
    assert curve.seconds(32) == pytest.approx(1.3, rel=0.05)


def dear_for_a_moment() -> CostCurve:
    """A curve whose 64 rows were measured at 4 s in a bad moment; 8 rows go on being measured."""
    curve = CostCurve({1: 1.0, 8: 1.0, 64: 1.2, 128: 1.5})
    for _ in range(3):
        curve.observe(64, 4.0, alone=True)
    assert curve.seconds(64) > 3.5
    for _ in range(12):
        curve.observe(8, 1.0)
        curve.age()
    return curve


def test_what_was_dear_and_is_not_done_any_more_comes_back_to_what_it_was() -> None:
    curve = dear_for_a_moment()
    assert curve.seconds(64) == pytest.approx(1.2, rel=0.15)
    assert curve.seconds(8) == pytest.approx(1.0, rel=0.01)
    curve.observe(64, 1.25, alone=True)
    for _ in range(12):
        curve.age()
    assert curve.seconds(64) == pytest.approx(1.25, rel=0.1)


def test_one_measurement_that_is_dear_again_is_enough() -> None:
    curve = dear_for_a_moment()
    curve.observe(64, 3.8, alone=True)
    assert curve.seconds(64) > 3.5
    assert curve.seconds(128) > 3.5


def test_many_row_counts_that_differ_a_little_learn_together() -> None:
    curve = CostCurve({1: 1.0, 128: 1.1})
    for rows in (97, 105, 111, 100, 108, 103):
        curve.observe(rows, 2.2, alone=True)
    assert curve.seconds(104) == pytest.approx(2.1, rel=0.1)


def test_nonsense_measurements_are_ignored_or_refused() -> None:
    curve = CostCurve({1: 1.0})
    for count, seconds in ((0, 1.0), (1, 0.0), (1, -1.0), (1, float("nan")), (1, float("inf"))):
        for _ in range(16):
            curve.observe(count, seconds)
    assert curve.seconds(1) == pytest.approx(1.0)
    for points in ({}, {0: 1.0}, {1: 0.0}, {1: float("nan")}):
        with pytest.raises(ValueError, match="cost"):
            CostCurve(points)


def test_a_table_survives_json() -> None:
    table = CostTable(FLAT_THEN_STEEP, {1: 0.5, 8: 0.9}, copying_waits=True)
    for _ in range(40):
        table.verify.observe(3, 3.3)
        table.observe_copying(0.4)
    again = CostTable.from_json(json.loads(json.dumps(table.to_json())))
    assert [again.verify_seconds(n) for n in range(1, 80)] == pytest.approx(
        [table.verify_seconds(n) for n in range(1, 80)]
    )
    assert again.draft_seconds(4) == pytest.approx(table.draft_seconds(4))
    assert again.copying_waits
    assert again.copying_seconds == pytest.approx(0.4)


def test_without_draft_points_drafting_is_free() -> None:
    table = CostTable({1: 1.0})
    assert table.draft_seconds(5) == 0.0
    assert CostTable({1: 1.0}, {1: 0.5}).draft_seconds(0) == 0.0
    assert CostTable.from_json(table.to_json()).draft is None
