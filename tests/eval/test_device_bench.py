"""The device bench's table and goals; what it measures needs a card."""

from __future__ import annotations

import pytest

from eval.device_bench import GOALS, STREAMS, Measured, main, table, verdict, verdicts


def test_every_line_of_the_speed_table_has_a_goal() -> None:
    for name in (
        "plain bf16",
        "plain int8",
        "plain int4",
        "verify",
        "round",
        "prompt",
        "burst 32",
        "burst 128",
        "idle",
    ):
        assert name in GOALS
    assert {f"wrong {streams}" for streams in STREAMS} < set(GOALS)
    for goal in GOALS.values():
        assert goal.aim >= goal.must if goal.more else goal.aim <= goal.must


def test_a_figure_meets_its_goal_in_the_goals_own_direction() -> None:
    for name, value, must in (
        ("plain bf16", 2.9, "met"),
        ("plain bf16", 2.91, "missed"),
        ("burst 32", 7000, "met"),
        ("burst 32", 6999, "missed"),
    ):
        assert verdicts(GOALS[name], Measured(value)) == {"must_is": must, "aim_is": "missed"}
    assert verdicts(GOALS["plain bf16"], Measured(2.4)) == {"must_is": "met", "aim_is": "met"}


def test_a_figure_with_an_interval_is_judged_by_all_of_it() -> None:
    figure = Measured(0.99, low=0.96, high=1.02)
    for limit, more, expected in (
        (0.95, True, "met"),
        (0.97, True, "undecided"),
        (1.03, True, "missed"),
        (1.03, False, "met"),
        (0.97, False, "undecided"),
        (0.95, False, "missed"),
    ):
        assert verdict(limit, figure, more=more) == expected


def test_the_table_marks_what_misses_its_must_and_what_failed() -> None:
    goal = {"title": "a", "unit": "ms", "must": 2.0, "aim": 1.0, "share": "50 % of read", "remark": ""}
    report = {
        "card": "card",
        "read_tb_s": 4.1,
        "matrix_tflops": 790.0,
        "kernels": [],
        "faults": {"http": "ServerFailed: no"},
        "lines": [
            {**goal, "value": 1.5, "must_is": "met", "aim_is": "missed"},
            {**goal, "value": 2.5, "must_is": "missed", "aim_is": "missed"},
            {**goal, "value": 2.0, "must_is": "undecided", "aim_is": "missed"},
        ],
    }
    lines = table(report).splitlines()
    assert [line[0] for line in lines[2:]] == [" ", "!", "?", "!"]
    assert "50 % of read" in lines[2]
    assert "must undecided" in lines[4]
    assert "http" in lines[-1]


def test_bad_options_are_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    for options, words in (
        (["--parts", "steps,nonsense"], "unknown nonsense"),
        (["--parts", "speculation"], "needs --model-dir"),
    ):
        with pytest.raises(SystemExit):
            main(["--tokenizer-dir", "x", *options])
        assert words in capsys.readouterr().err
