"""The device bench's table and goals; what it measures needs a card."""

from __future__ import annotations

import pytest

from eval.device_bench import GOALS, STREAMS, main, meets, table


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
    assert meets(GOALS["plain bf16"], 2.9)
    assert not meets(GOALS["plain bf16"], 2.91)
    assert meets(GOALS["burst 32"], 7000)
    assert not meets(GOALS["burst 32"], 6999)


def test_the_table_marks_what_misses_its_must_and_what_failed() -> None:
    goal = {"title": "a", "unit": "ms", "must": 2.0, "aim": 1.0, "share": "50 % of read", "remark": ""}
    report = {
        "card": "card",
        "read_tb_s": 4.1,
        "matrix_tflops": 790.0,
        "kernels": [],
        "faults": {"http": "ServerFailed: no"},
        "lines": [{**goal, "value": 1.5, "ok": True}, {**goal, "value": 2.5, "ok": False}],
    }
    lines = table(report).splitlines()
    assert [line[0] for line in lines[2:]] == [" ", "!", "!"]
    assert "50 % of read" in lines[2]
    assert "http" in lines[-1]


def test_bad_options_are_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    for options, words in (
        (["--parts", "steps,nonsense"], "unknown nonsense"),
        (["--parts", "speculation"], "needs --model-dir"),
    ):
        with pytest.raises(SystemExit):
            main(["--tokenizer-dir", "x", *options])
        assert words in capsys.readouterr().err
