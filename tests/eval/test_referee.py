from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import stat
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from eval import referee
from eval.agreement import ClientRun, compare, latency_numbers, mean_error, median_error, row_line, server_line
from eval.client import Measurement
from eval.outside_tools import TOOLS, Load, read_aiperf, read_guidellm
from eval.referee import Rounds, our_numbers, our_run, requests_of
from tests.eval.stub_server import WordCounter, running_stub

LOAD = Load(concurrency=4, requests=40, prompt=120, output=64, warmup=8, spread=16)
# A stand-in for a tool: reads the prompts it is given and writes the result where its options say.
FAKE = """#!{python}
import json, os, sys, time
words = sys.argv[1:]
assert "HF_HUB_OFFLINE" not in os.environ
row = lambda value: {{"avg": value, "p50": value, "unit": "ms"}}
if words[0] == "profile":
    folder = words[words.index("--artifact-dir") + 1]
    lines = open(words[words.index("--input-file") + 1]).read().splitlines()
    assert all(3 <= json.loads(line)["output_length"] <= 5 for line in lines)
    if os.environ.get("STUCK", "none") in folder:
        os.kill(os.getppid(), {number})
        time.sleep(60)
    row_of = lambda phase: {{"metadata": {{"benchmark_phase": phase}}, "metrics":
                            {{"time_to_first_token": {{"value": {ttft}}}, "inter_token_latency": {{"value": 10.0}}}}}}
    phases = ["warmup"] * 4 + ["profiling"] * (len(lines) - 4)
    open(folder + "/profile_export.jsonl", "w").write("\\n".join(json.dumps(row_of(phase)) for phase in phases))
    export = {{"time_to_first_token": row({ttft}), "inter_token_latency": row(10.0),
               "output_token_throughput": row(100.0)}}
    json.dump(export, open(folder + "/profile_export_aiperf.json", "w"))
else:
    path = words[words.index("--output") + 1].partition("path=")[2]
    lines = open(words[words.index("--data") + 1].partition("path=")[2]).read().splitlines()
    assert all(3 <= json.loads(line)["output_tokens_count"] <= 5 for line in lines)
    mean = lambda value: {{"successful": {{"mean": value, "median": value}}}}
    metrics = {{"time_to_first_token_ms": mean({ttft}), "inter_token_latency_ms": mean(10.0),
                "output_tokens_per_second": mean(100.0), "request_totals": {{"errored": 0, "incomplete": 0}}}}
    json.dump({{"benchmarks": [{{"metrics": metrics}}]}}, open(path, "w"))
"""


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("aiperf", ("profile", "--concurrency 4", "--request-count 40", "--warmup-request-count 8", "--streaming",
                    "temperature:0", "ignore_eos:true")),
        ("guidellm", ('{"kind": "concurrent", "streams": 4, "warmup": {"value": 8, "mode": "requests"}}',
                      "kind=max_requests,count=48", '"temperature": 0', "/v1/chat/completions")),
    ],
)  # fmt: skip
def test_every_tool_is_asked_for_the_same_load(name: str, parts: tuple[str, ...], tmp_path: Path) -> None:
    text = " ".join(TOOLS[name].command(name, "http://u", "m", Path("tok"), LOAD, tmp_path))
    for part in (*parts, str(tmp_path / "prompts.jsonl")):
        assert part in text


def test_every_tool_is_asked_for_the_same_rate(tmp_path: Path) -> None:
    load = replace(LOAD, rate=25.0)
    aiperf = " ".join(TOOLS["aiperf"].command("a", "http://u", "m", Path("tok"), load, tmp_path))
    assert "--request-rate 25.0 --arrival-pattern constant" in aiperf
    assert "--concurrency" not in aiperf
    guidellm = " ".join(TOOLS["guidellm"].command("g", "http://u", "m", Path("tok"), load, tmp_path))
    assert '{"kind": "constant", "rate": [25.0]' in guidellm


def test_our_client_starts_requests_at_even_spaces() -> None:
    load = Load(concurrency=2, requests=5, prompt=40, output=3, warmup=2, rate=20.0)
    with running_stub() as (url, state):
        run = asyncio.run(our_run(url, WordCounter(), load, seed=1))  # type: ignore[arg-type]
    assert len(run.samples["ttft"]) == 5
    assert len(state.bodies) == 7
    # Four spaces; half of them, should the first start late. As fast as answers come it would take a few milliseconds.
    assert run.numbers["tokens_per_second"] < 3 * 5 / (2 / 20)


def test_every_run_has_prompts_of_its_own() -> None:
    first, second = (requests_of(seed, WordCounter(), LOAD) for seed in (1, 2))  # type: ignore[arg-type]
    words = [item.messages[0]["content"].split()[0] for item in (*first, *second)]
    assert len(set(words)) == 2 * (LOAD.warmup + LOAD.requests)
    assert all(len(item.messages) == 1 for item in first)


def test_answers_differ_in_length_and_every_client_of_a_seed_has_the_same() -> None:
    lengths, again, other = (
        [item.max_tokens for item in requests_of(seed, WordCounter(), LOAD)]  # type: ignore[arg-type]
        for seed in (1, 1, 2)
    )
    assert lengths == again != other
    assert set(lengths) <= set(range(48, 81))
    assert len(set(lengths)) > 10


def test_every_tool_is_told_the_length_of_each_answer(tmp_path: Path) -> None:
    requests = requests_of(1, WordCounter(), LOAD)  # type: ignore[arg-type]
    for name, field in (("aiperf", "output_length"), ("guidellm", "output_tokens_count")):
        TOOLS[name].write(tmp_path, requests)
        told = [json.loads(line)[field] for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
        assert told == [item.max_tokens for item in requests]


def test_results_are_read_in_our_units_and_gaps_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="left no profile_export_aiperf"):
        read_aiperf(tmp_path)
    (tmp_path / "profile_export_aiperf.json").write_text(json.dumps({"time_to_first_token": {"avg": 300.0}}))
    with pytest.raises(ValueError, match="no inter_token_latency"):
        read_aiperf(tmp_path)
    with pytest.raises(ValueError, match=r"left no guidellm\.json"):
        read_guidellm(tmp_path)


def test_a_tool_that_lost_requests_has_no_numbers(tmp_path: Path) -> None:
    metrics = {"request_totals": {"successful": 3, "errored": 1, "incomplete": 0}}
    (tmp_path / "guidellm.json").write_text(json.dumps({"benchmarks": [{"metrics": metrics}]}))
    with pytest.raises(ValueError, match="1 requests failed"):
        read_guidellm(tmp_path)


def test_three_percent_is_the_limit_of_agreement() -> None:
    ours = ClientRun({"ttft": 1.029, "tpot": 0.01029, "tokens_per_second": 96.9})
    theirs = ClientRun({"ttft": 1.0, "tpot": 0.01, "tokens_per_second": 100.0})
    assert [row["agrees"] for row in compare([ours], [theirs])] == [True, True, False]


def test_differences_are_taken_within_a_round_and_only_over_what_both_sides_say() -> None:
    ours = [ClientRun({"ttft": 1.0, "acceptance_length": 3.0}), ClientRun({"ttft": 4.0, "acceptance_length": 3.1})]
    (row,) = compare(ours, [ClientRun({"ttft": 1.01}), ClientRun({"ttft": 4.04})])
    assert row["difference"] == pytest.approx(1 / 1.01 - 1)
    assert row["low"] == pytest.approx(row["high"])
    rows = compare(ours, [ClientRun(dict(run.numbers)) for run in ours])
    assert [item["what"] for item in rows] == ["ttft", "acceptance_length"]
    assert "acceptance_length   ours       3.05   aiperf       3.05   +0.00%" in row_line(rows[1], "aiperf", 1)


def test_the_interval_of_a_difference_covers_chance_as_often_as_it_says() -> None:
    rng, inside = random.Random(5), {"ttft": 0, "ttft_p50": 0}
    for _ in range(250):
        runs = []
        for _ in range(4):
            samples = {"ttft": tuple(rng.lognormvariate(0.0, 0.4) for _ in range(60))}
            runs.append(ClientRun(latency_numbers(samples), samples))
        for row in compare(runs[:2], runs[2:]):
            inside[row["what"]] += row["requests_low"] <= 0 <= row["requests_high"]
    assert all(0.9 <= count / 250 <= 0.99 for count in inside.values())


def test_the_errors_of_a_mean_and_a_median_are_shares_of_them() -> None:
    values = [float(value) for value in range(1, 102)]
    assert mean_error(values) == pytest.approx(29.3 / 101**0.5 / 51, rel=1e-3)
    assert median_error(values) == pytest.approx(20 / (2 * 1.96) / 51, rel=0.1)


def test_the_servers_own_time_to_the_first_token_stands_beside_what_clients_say() -> None:
    ours, theirs = ClientRun({"ttft": 0.019}, server_ttft=0.018), ClientRun({"ttft": 0.02}, server_ttft=0.0185)
    line = server_line("aiperf", [ours], [theirs])
    assert line == "ttft, the server:   ours 18.00 ms and +1.00 beyond it, aiperf 18.50 ms and +1.50 beyond it"
    assert server_line("aiperf", [ours], [ClientRun({"ttft": 0.02})]) is None


@pytest.mark.parametrize("resets", [True, False])
def test_the_order_turns_and_prompts_are_shared_only_where_the_cache_is_reset(resets: bool) -> None:
    shared = Rounds("http://u", Path("m"), "m", {"aiperf": "a", "guidellm": "g"}, LOAD, resets, None)
    rounds = [shared.seeds(1000, number) for number in range(4)]
    assert [next(iter(seeds)) for seeds in rounds] == ["ours", "aiperf", "guidellm", "ours"]
    used = [seed for seeds in rounds for seed in seeds.values()]
    assert len(set(used)) == (4 if resets else 12)
    assert all(len(set(seeds.values())) == (1 if resets else 3) for seeds in rounds)


def test_what_the_server_says_of_drafts_is_compared_as_the_tool_reads_it(tmp_path: Path) -> None:
    told = {"mean_acceptance_length": 2.5, "draft_acceptance_rate": 0.5}
    item = Measurement("ok", tokens=4, ttft=0.1, tpot=0.01, finished_at=1.0, speculation=told)
    plain = Measurement("ok", tokens=4, ttft=0.1, tpot=0.01, finished_at=1.0)
    ours = our_numbers([item, plain])
    means = {"time_to_first_token": 100.0, "inter_token_latency": 10.0, "output_token_throughput": 8.0,
             "spec_decode_acceptance_length": 2.5, "spec_decode_draft_acceptance_rate": 50.0}  # fmt: skip
    exported = {name: {"avg": value, "p50": value} for name, value in means.items()}
    (tmp_path / "profile_export_aiperf.json").write_text(json.dumps(exported))
    assert read_aiperf(tmp_path).numbers == pytest.approx(ours.numbers)


def test_failed_requests_are_no_numbers() -> None:
    with pytest.raises(ValueError, match="1 of 1 requests failed: HTTP 500"):
        our_numbers([Measurement("error", error="HTTP 500")])


def make_program(folder: Path, name: str, number: int = 0) -> Path:
    program = folder / name
    program.write_text(FAKE.format(python=sys.executable, ttft=9000.0, number=number))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return program


def arguments(folder: Path, name: str, program: Path, url: str, pairs: int) -> list[str]:
    return [f"--{name}", str(program), "--url", url, "--model-dir", "any", "--requests", "4", "--concurrency", "2",
            "--prompt", "40", "--output", "4", "--pairs", str(pairs), "--keep", str(folder / "kept"),
            "--json", str(folder / "out.json")]  # fmt: skip


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(referee, "TokenizerCounter", lambda folder: WordCounter())
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    # A test run in the background of a shell ignores Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("name", list(TOOLS))
def test_a_disagreeing_referee_fails_the_command(
    name: str, words: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with running_stub(first_delay=0.02, gap=0.01) as (url, _):
        code = referee.main(arguments(tmp_path, name, make_program(tmp_path, name), url, pairs=1))
    assert code == 1
    assert (tmp_path / "kept" / f"{name}-1" / "output.txt").is_file()
    text = capsys.readouterr().out
    assert "DIFFERS" in text
    assert text.splitlines()[0].startswith("ttft")
    told = json.loads((tmp_path / "out.json").read_text())
    ttft = told["rows"][name][0]
    assert (ttft["theirs"], ttft["agrees"]) == (9.0, False)
    run = told["rounds"][0]["ours"]
    assert run["server_ttft"] == pytest.approx(0.02)
    assert len(run["samples"]["ttft"]) == 4
    if name == "aiperf":
        assert told["rounds"][0][name]["samples"]["ttft"] == [9.0] * 4
        assert ttft["requests_low"] < ttft["difference"] < ttft["requests_high"]


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_an_ended_run_has_its_finished_rounds_on_disk_and_leaves_no_tool_behind(
    number: signal.Signals, expected: int, words: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("STUCK", "aiperf-2")
    program = make_program(tmp_path, "aiperf", int(number))
    with running_stub(first_delay=0.005, gap=0.002) as (url, _):
        code = referee.main(arguments(tmp_path, "aiperf", program, url, pairs=3))
    assert code == expected
    assert len(json.loads((tmp_path / "out.json").read_text())["rounds"]) == 1
    assert "1 rounds of 4 requests" in capsys.readouterr().out
    running = [Path(f"/proc/{pid}/cmdline") for pid in os.listdir("/proc") if pid.isdecimal()]
    assert not any(str(program) in path.read_text() for path in running if path.exists())
