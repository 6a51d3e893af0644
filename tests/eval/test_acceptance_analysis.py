from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval import acceptance_report
from eval.acceptance import (
    Costs,
    Round,
    Trace,
    acceptance_rate,
    against,
    by_category,
    by_position,
    calibration,
    calibration_error,
    choice_against_oracle,
    expected_by_block_length,
    length_histogram,
    mean_length,
    read_traces,
    select,
)
from eval.roofline import acceptance_length

FIXTURE = Path(acceptance_report.__file__).parent / "notebooks" / "fixture" / "traces.jsonl"


def line(rounds: list[list[Any]], **changes: Any) -> dict[str, Any]:
    tokens = 1 + sum(accepted + 1 for _, _, accepted in rounds)
    base = {"id": "r", "time": 0.0, "prompt_tokens": 10, "cached_tokens": 0, "completion_tokens": tokens,
            "finish_reason": "stop", "output_ids": [], "temperature": 0.0, "seed": 0, "rounds": rounds,
            "queue_seconds": 0.0, "prefill_seconds": 0.1, "decode_seconds": 1.0}  # fmt: skip
    return {**base, **changes}


def written(tmp_path: Path, *lines: dict[str, Any]) -> Path:
    path = tmp_path / "trace-1.jsonl"
    path.write_text("\n".join(json.dumps(item) for item in lines) + "\n")
    return path


def trace(accepted: list[int], drafted: int = 4, category: str = "all") -> Trace:
    rounds = tuple(Round("block", drafted, kept, 1, 10, False) for kept in accepted)
    return Trace("t", category, 0.0, 10, 5, "stop", 1.0, 0, rounds)


def test_traces_are_read_from_a_file_or_a_folder_with_places_in_the_answer(tmp_path: Path) -> None:
    path = written(tmp_path, line([["block", 4, 2], ["none", 0, 0], ["lookup", 3, 3]], id="a", category="code"))
    (one,) = read_traces(tmp_path)
    assert read_traces(path) == [one]
    assert (one.category, one.plain_rounds) == ("code", 1)
    assert [(r.source, r.answer_position, r.context, r.cut) for r in one.rounds] == [
        ("block", 1, 11, False),
        ("lookup", 5, 15, True),
    ]
    assert read_traces(written(tmp_path, line([["block", 4, 2]], id="b")), {"b": "maths"})[0].category == "maths"


@pytest.mark.parametrize("bad", [{"rounds": [["block", 2, 3]]}, {"rounds": None}, {"prompt_tokens": "x"}])
def test_lines_that_are_no_traces_are_named(bad: dict[str, Any], tmp_path: Path) -> None:
    path = written(tmp_path, line([["block", 4, 2]]), {**line([["block", 4, 2]]), **bad})
    with pytest.raises(ValueError, match=r"trace-1\.jsonl line 2 is not a trace"):
        read_traces(path)


def test_a_line_that_a_kill_cut_short_is_left_out_but_no_other(tmp_path: Path) -> None:
    path = written(tmp_path, line([["block", 4, 2]], id="a"), line([["block", 4, 2]], id="b"))
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    assert [trace.id for trace in read_traces(path)] == ["a"]
    path.write_bytes(whole.rstrip(b"\n"))
    assert [trace.id for trace in read_traces(path)] == ["a", "b"]
    first, _, rest = whole.partition(b"\n")
    path.write_bytes(first[:-9] + b"\n" + rest)
    with pytest.raises(ValueError, match="line 1 is not a trace"):
        read_traces(path)


@pytest.mark.parametrize(
    ("labels", "message"), [(None, "No such file"), ("a,b", "is not JSON"), ("[1]", "must be an object")]
)
def test_bad_labels_and_a_folder_that_is_not_there_are_said_in_one_line(
    labels: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "traces").mkdir()
    path = written(tmp_path / "traces", line([["block", 4, 2], ["block", 4, 1]]))
    if labels is not None:
        (tmp_path / "labels.json").write_text(labels)
    assert acceptance_report.main([str(path), "--categories", str(tmp_path / "labels.json")]) == 1
    assert message in capsys.readouterr().err
    assert acceptance_report.main([str(tmp_path / "nowhere")]) == 1
    assert "nowhere" in capsys.readouterr().err


def test_survival_and_hazard_by_position() -> None:
    rows = by_position([trace([0, 1, 2, 4], drafted=4)])
    assert [row["survival"]["value"] for row in rows] == [0.75, 0.5, 0.25, 0.25]
    assert [row["conditional"]["value"] for row in rows] == pytest.approx([0.75, 2 / 3, 0.5, 1.0])
    assert [row["hazard"]["value"] for row in rows] == pytest.approx([0.25, 1 / 3, 0.5, 0.0])
    assert [row["alive"] for row in rows] == [4, 3, 2, 1]
    for row in rows:
        assert row["survival"]["low"] <= row["survival"]["value"] <= row["survival"]["high"]


def test_a_shorter_draft_does_not_count_as_a_rejection_beyond_its_end() -> None:
    rows = by_position([trace([2], drafted=2), trace([3], drafted=4)])
    assert [row["rounds"] for row in rows] == [2, 2, 1, 1]
    assert rows[2]["survival"]["value"] == 1.0


def test_the_product_of_conditionals_is_not_flattered_by_drafting_far_only_when_sure() -> None:
    sure, unsure = trace([8] * 10, drafted=8), trace([0] * 10, drafted=1)
    rows = by_position([sure, unsure])
    assert rows[7]["survival"]["value"] == 1.0
    assert rows[7]["product"] == pytest.approx(0.5)
    costs = Costs(0.0, (1.0,) * 9)
    assert expected_by_block_length([sure, unsure], costs)[8] == pytest.approx(1 + 8 * 0.5)


def test_both_weightings_are_reported_and_the_bonus_token_is_in_the_length_only() -> None:
    traces = [trace([4] * 9), trace([0])]
    lengths = mean_length(traces)
    assert lengths["per_round"].value == pytest.approx((9 * 5 + 1) / 10)
    assert lengths["per_request"].value == pytest.approx((5 + 1) / 2)
    assert acceptance_rate(traces).value == pytest.approx(36 / 40)
    assert length_histogram(traces) == {1: 1, 5: 9}


def test_cut_rounds_and_other_sources_are_left_out_on_request(tmp_path: Path) -> None:
    path = written(tmp_path, line([["block", 4, 4], ["lookup", 4, 1], ["block", 4, 0]]))
    traces = read_traces(path)
    assert length_histogram(select(traces)) == {2: 1, 5: 1}
    assert length_histogram(select(traces, "block")) == {5: 1}
    assert length_histogram(select(traces, "block", keep_cut=True)) == {1: 1, 5: 1}


def test_intervals_resample_prompts_not_rounds() -> None:
    few = mean_length([trace([4] * 100), trace([0] * 100)])["per_round"]
    assert few.high - few.low > 3
    assert set(by_category([trace([1], category="b"), trace([2], category="a")])) == {"a", "b"}


def test_length_against_place_and_context(tmp_path: Path) -> None:
    path = written(tmp_path, line([["block", 9, 9], ["block", 9, 0], ["block", 9, 0]]))
    found = against(read_traces(path), "answer_position", (1, 5, 20))
    assert {name: value.value for name, value in found.items()} == {"1-4": 10.0, "5-19": 1.0}
    with pytest.raises(ValueError, match="answer_position or context"):
        against([], "temperature", (1,))


def test_calibration_judges_only_tokens_whose_predecessors_were_kept() -> None:
    rounds = tuple(Round("block", 3, 1, 1, 10, False, (0.95, 0.55, 0.05)) for _ in range(10))
    rows = calibration([Trace("t", "all", 0.0, 10, 5, "stop", 1.0, 0, rounds)])
    assert [(row["count"], row["value"]) for row in rows] == [(10, 0.0), (10, 1.0)]
    assert calibration_error(rows) == pytest.approx((0.55 + 0.05) / 2)
    assert calibration([trace([1, 2])]) == []


def test_expected_speedup_uses_the_measured_survival() -> None:
    costs = Costs(0.12, (1.0, 1.02, 1.04, 1.06, 1.08))
    found = expected_by_block_length([trace([0, 1, 2, 4])], costs)
    assert found[0] == 1.0
    assert found[2] == pytest.approx((1 + 0.75 + 0.5) / (0.12 + 1.04))
    assert set(found) == {0, 1, 2, 3, 4}


@given(st.lists(st.integers(0, 4), min_size=1, max_size=30), st.floats(0.0, 1.0), st.floats(0.0, 0.5))
def test_nothing_beats_the_oracle(accepted: list[int], draft: float, slope: float) -> None:
    costs = Costs(draft, tuple(1 + slope * length for length in range(5)))
    found = choice_against_oracle([trace(accepted)], costs)
    assert found["oracle"] >= found["chosen"] - 1e-9
    assert found["oracle"] >= 1 - 1e-9


@given(st.floats(0.05, 0.95), st.integers(1, 15))
def test_mean_length_of_independent_acceptance_has_the_closed_form(share: float, block: int) -> None:
    survival = [share**position for position in range(1, block + 1)]
    assert 1 + sum(survival) == pytest.approx(acceptance_length(share, block))


def test_the_fixture_and_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, numbers = tmp_path / "a.html", tmp_path / "a.json"
    assert acceptance_report.main([str(FIXTURE), "--html", str(page), "--json", str(numbers)]) == 0
    text = capsys.readouterr().out
    assert "acceptance length" in text
    assert "Length counts the target's own token" in text
    assert page.read_text().count("data:image/png") == 5
    assert len(json.loads(numbers.read_text())["by_category"]) >= 3
    assert acceptance_report.main([str(tmp_path)]) == 1


def test_a_category_is_found_by_the_id_of_the_reply(tmp_path: Path) -> None:
    """As a client knows it; a trace's own id ends in the choice."""
    line = json.loads(FIXTURE.read_text().splitlines()[0])
    line.pop("category", None)
    path = tmp_path / "t.jsonl"
    path.write_text(
        "".join(json.dumps({**line, "id": name}) + "\n" for name in ("chatcmpl-7-0", "chatcmpl-8-1", "own"))
    )
    found = read_traces(path, {"chatcmpl-7": "code", "chatcmpl-8-1": "chat"})
    assert [trace.category for trace in found] == ["code", "chat", "all"]
