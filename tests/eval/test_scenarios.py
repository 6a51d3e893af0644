from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from eval import paired, scenarios
from eval.prompts import burst, copy_heavy, interactive, long_prompt, sweep_requests
from eval.scenarios import Baseline, Shapes, baseline_wall, load_baseline, run_all, score
from eval.servers import ManagedServer
from tests.eval.strict_json import strict
from tests.eval.stub_server import WordCounter, running_stub

SMALL = Shapes(2, 60, 8, 1, 200, 4, 4, 80, 8)
STUB = str(Path(__file__).with_name("stub_server.py"))


def go(url: str, shapes: Shapes = SMALL, baseline: Baseline | None = None) -> list[scenarios.Scenario]:
    return asyncio.run(run_all(url, shapes, baseline or Baseline(), WordCounter()))


def test_the_three_shapes_have_a_value_a_speedup_and_a_line_each() -> None:
    with running_stub(first_delay=0.03, gap=0.02) as (url, state):
        results = go(url)
    assert [item.status for item in results] == ["ok", "ok", "ok"]
    tpot, ttft, rate = results
    assert tpot.value is not None
    assert tpot.value == pytest.approx(median(tpot.details["tpot"]))
    assert ttft.value is not None
    assert ttft.value >= 0.03
    assert rate.value is not None
    assert rate.speedup == pytest.approx(rate.value / 14)
    assert tpot.speedup == pytest.approx(0.078 / tpot.value)
    assert "[baseline 78.0 ms]" in tpot.line()
    total = score(results)
    assert total is not None
    assert len(state.bodies) == 2 + 1 + 4
    assert {body["max_tokens"] for body in state.bodies} == {8, 4}


def test_passing_the_wall_cap_is_a_timeout_and_leaves_no_score() -> None:
    hurried = Baseline(tpot=0.001, ttft=0.5, throughput=1000.0)
    with running_stub(first_delay=0.3) as (url, _):
        results = go(url, baseline=hurried)
    assert results[0].status == "TIMEOUT"
    assert results[0].value is None
    assert score(results) is None
    assert "TIMEOUT" in results[0].line()


def test_caps_are_twice_the_baselines_time() -> None:
    graded = Shapes()
    assert baseline_wall("S3", graded, Baseline()) == pytest.approx(32 * 128 / 14)
    assert baseline_wall("S1", graded, Baseline()) == pytest.approx(3 * (256 * 0.078 + 8.8 * 120 / 4096))
    with running_stub() as (url, _):
        result = go(url)[2]
    assert result.cap == pytest.approx(2 * 4 * 8 / 14)


@pytest.mark.parametrize("behaviour", [{"failure": 500}, {"chunks": []}, {"finish": "error"}])
def test_a_failed_or_empty_request_fails_the_scenario(behaviour: dict[str, Any]) -> None:
    with running_stub(**behaviour) as (url, _):
        results = go(url)
    assert {item.status for item in results} == {"FAILED"}
    said = {500: "HTTP 500", "error": "engine died"}.get(behaviour.get("failure") or behaviour.get("finish"), "empty")
    assert all(said in item.line() for item in results)


def test_an_answer_that_comes_all_at_once_has_no_time_between_tokens_and_fails_that_scenario() -> None:
    with running_stub(together=True) as (url, _):
        results = go(url)
    assert [item.status for item in results] == ["FAILED", "ok", "ok"]
    assert "not streamed" in results[0].line()
    with pytest.raises(RuntimeError, match="S1 on ours: FAILED no time passed"):
        paired.pair_ratios([*results[1:2], *results[1:]], results)


def test_an_answer_that_was_held_back_has_no_time_between_tokens_in_text_and_in_json() -> None:
    with running_stub(together=True, first_delay=0.02, chunks=["one", *[" two"] * 40]) as (url, _):
        first = go(url)[0]
    assert first.status == "FAILED"
    assert "buffers its stream" in first.line()
    assert first.details["buffered"] == first.details["requests"]


def test_prompts_too_short_for_their_fixed_parts_are_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scenarios, "TokenizerCounter", lambda folder: WordCounter())
    with running_stub() as (url, _):
        assert scenarios.main(["--url", url, "--model-dir", "any", "--only", "S2", "--long-tokens", "5"]) == 1
    assert "5 tokens are too few" in capsys.readouterr().err


def test_command_line_prints_one_line_each_and_writes_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scenarios, "TokenizerCounter", lambda folder: WordCounter())
    out = tmp_path / "out.json"
    with running_stub(first_delay=0.01, gap=0.005) as (url, _):
        code = scenarios.main(
            ["--url", url, "--model-dir", "any", "--quick", "--burst", "3", "--json", str(out), "--ignore-eos"]
        )
    assert code == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[:2] for line in lines[:3]] == ["S1", "S2", "S3"]
    assert "sizes: interactive_prompts=1" in lines[-1]
    assert json.loads(out.read_text())["score"] > 0


def test_paired_servers_are_real_processes_and_leave_none_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(paired, "TokenizerCounter", lambda folder: WordCounter())
    pids: list[int] = []
    start = ManagedServer.__enter__

    def noting(self: ManagedServer) -> ManagedServer:
        entered = start(self)
        pids.append(entered.pid)
        return entered

    monkeypatch.setattr(ManagedServer, "__enter__", noting)
    out = tmp_path / "paired.json"

    def command(**behaviour: Any) -> str:
        return f"{sys.executable} {STUB} --port {{port}} --behaviour '{json.dumps(behaviour)}'"

    slow = command(first_delay=0.04, gap=0.04)
    fast = command(first_delay=0.01, gap=0.01)
    code = paired.main(
        [
            "--naive-command",
            slow,
            "--server-command",
            fast,
            "--pairs",
            "2",
            "--quick",
            "--burst",
            "2",
            "--naive-burst",
            "1",
            "--json",
            str(out),
        ]
    )
    assert code == 0
    text, told = capsys.readouterr()
    order = [line.partition(" of 2: ")[2] for line in told.splitlines() if "] pair " in line]
    assert order == ["naive", "ours", "ours", "naive"]
    assert "geometric mean" in text
    report = json.loads(out.read_text())
    assert report["summary"]["score"]["value"] > 1.2
    assert len(report["pairs"]) == 2
    assert len(pids) == 2
    for pid in pids:
        assert not Path(f"/proc/{pid}").exists()
    assert report["baseline"]["tpot"] >= 0.02
    assert load_baseline(out).tpot == report["baseline"]["tpot"]
    asked = [
        (pair["naive"][2]["details"]["requests"], pair["ours"][2]["details"]["requests"]) for pair in report["raw"]
    ]
    assert asked == [(1, 2), (1, 2)]
    assert "the naive server answered 1 of the burst" in text


def test_no_pair_begins_that_would_end_too_late_and_a_failure_keeps_the_pairs_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(paired, "TokenizerCounter", lambda folder: WordCounter())
    calls: list[int] = []

    def side(url: str, shapes: Shapes, counter: object, seed: int, ignore_eos: bool) -> list[scenarios.Scenario]:
        calls.append(seed)
        time.sleep(0.06)
        status = "FAILED" if seed == 12 else "ok"
        value = None if seed == 12 else 1.0
        return [scenarios.Scenario(name, "s", status, value, 1.0, value, 1.0, 2.0) for name in paired.SCENARIOS]

    monkeypatch.setattr(paired, "measure_side", side)
    monkeypatch.setattr(paired.Pairing, "_warm", lambda self, url, name: None)
    out = tmp_path / "pairs.json"
    stub = f"{sys.executable} {STUB} --port {{port}}"
    common = ["--naive-command", stub, "--server-command", stub, "--pairs", "9", "--json", str(out)]
    assert paired.main([*common, "--seconds", "0.1", "--seed", "1"]) == 0
    assert calls == [1, 1]
    assert "hold no further pair" in capsys.readouterr().err
    assert paired.main([*common, "--seed", "11"]) == 1
    assert calls[2:] == [11, 11, 12, 12]
    assert len(strict(out)["pairs"]) == 1
    assert strict(out)["summary"]["score"]["high"] is None


def test_the_cap_of_a_burst_allows_for_what_the_naive_server_was_spared() -> None:
    def side(wall: float) -> list[scenarios.Scenario]:
        return [scenarios.Scenario(name, "s", "ok", 1.0, 1.0, 1.0, wall, 1e9) for name in paired.SCENARIOS]

    assert paired.over_cap(side(1.0), side(3.0), 2.0) == ["S1", "S2", "S3"]
    assert paired.over_cap(side(1.0), side(3.0), 2.0, burst_share=0.25) == ["S1", "S2"]


def test_pairs_within_three_percent_are_called_a_tie() -> None:
    same = paired.summarise([{"S1": 1.01, "S2": 1.0, "S3": 1.02}, {"S1": 1.0, "S2": 1.01, "S3": 1.0}])
    assert "tie" in paired.table(same, 2)
    apart = paired.summarise([{"S1": 3.0, "S2": 4.0, "S3": 18.0}] * 2)
    assert apart["score"].value == pytest.approx(6.0)
    assert "tie" not in paired.table(apart, 2)


def test_prompts_have_the_asked_length_and_two_seeds_share_no_beginning() -> None:
    counter = WordCounter()
    made = [*interactive(3, 1, counter, 60), *interactive(3, 2, counter, 60), *burst(3, 1, counter, 80)]
    made += [*long_prompt(2, 1, counter, 500), *copy_heavy(6, 1), *copy_heavy(6, 2)]
    texts = [request.messages[0]["content"] for request in made]
    assert len({text[:10] for text in texts}) == len(texts)
    for request, asked in zip(made[:11], [60] * 6 + [80] * 3 + [500] * 2, strict=True):
        assert asked - 2 <= len(counter.ends(request.messages[0]["content"])) <= asked
    assert texts[:3] == [request.messages[0]["content"] for request in interactive(3, 1, counter, 60)]
    with pytest.raises(ValueError, match="too few"):
        interactive(1, 1, counter, 5)


def test_requests_of_a_sweep_are_made_before_it_and_cost_nothing_in_it() -> None:
    class Counting:
        def __init__(self) -> None:
            self.calls, self.inner = 0, WordCounter()

        def ends(self, text: str) -> Sequence[int]:
            self.calls += 1
            return self.inner.ends(text)

    counter = Counting()
    stream = sweep_requests(5, counter, 64, 8, {"temperature": 0.0})
    made = counter.calls
    requests = [next(stream) for _ in range(100)]
    assert counter.calls == made
    assert len({request.messages[0]["content"] for request in requests}) == 100
    assert len({request.messages[1]["content"].split()[0] for request in requests}) == 100
    for request in requests:
        assert abs(len(counter.ends(request.messages[1]["content"])) - 64) <= 4
    with pytest.raises(ValueError, match="4 prompt tokens are too few"):
        sweep_requests(5, counter, 4, 8, {})


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), "fast", None])
def test_a_baseline_without_a_usable_number_is_refused_by_field(value: object, tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    path.write_text(json.dumps({"tpot": 0.05, "ttft": value, "throughput": 10}))
    with pytest.raises(ValueError, match="field 'ttft' must be a number above 0"):
        load_baseline(path)
