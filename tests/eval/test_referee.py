from __future__ import annotations

import json
import stat
import sys
from pathlib import Path

import pytest

from eval import referee
from eval.client import Measurement
from eval.outside_tools import TOOLS, Load, read_aiperf, read_guidellm
from eval.referee import Rounds, compare, our_numbers, requests_of, row_line
from tests.eval.stub_server import WordCounter, running_stub

LOAD = Load(concurrency=4, requests=40, prompt=120, output=64, warmup=8)
# A stand-in for a tool: reads the prompts it is given and writes the result where its options say.
FAKE = """#!{python}
import json, os, sys
words = sys.argv[1:]
assert "HF_HUB_OFFLINE" not in os.environ
row = lambda value: {{"avg": value, "p50": value, "unit": "ms"}}
if words[0] == "profile":
    folder = words[words.index("--artifact-dir") + 1]
    lines = open(words[words.index("--input-file") + 1]).read().splitlines()
    assert all(set(json.loads(line)) == {{"text"}} for line in lines)
    export = {{"time_to_first_token": row({ttft}), "inter_token_latency": row(10.0),
               "output_token_throughput": row(100.0)}}
    json.dump(export, open(folder + "/profile_export_aiperf.json", "w"))
else:
    path = words[words.index("--output") + 1].partition("path=")[2]
    lines = open(words[words.index("--data") + 1].partition("path=")[2]).read().splitlines()
    assert all(json.loads(line)["output_tokens_count"] == 4 for line in lines)
    mean = lambda value: {{"successful": {{"mean": value, "median": value}}}}
    metrics = {{"time_to_first_token_ms": mean({ttft}), "inter_token_latency_ms": mean(10.0),
                "output_tokens_per_second": mean(100.0), "request_totals": {{"errored": 0, "incomplete": 0}}}}
    json.dump({{"benchmarks": [{{"metrics": metrics}}]}}, open(path, "w"))
"""


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("aiperf", ("profile", "--concurrency 4", "--request-count 40", "--warmup-request-count 8", "max_tokens:64",
                    "--streaming", "temperature:0", "ignore_eos:true")),
        ("guidellm", ('{"kind": "concurrent", "streams": 4, "warmup": {"value": 8, "mode": "requests"}}',
                      "kind=max_requests,count=48", '"temperature": 0', "/v1/chat/completions")),
    ],
)  # fmt: skip
def test_every_tool_is_asked_for_the_same_load(name: str, parts: tuple[str, ...], tmp_path: Path) -> None:
    text = " ".join(TOOLS[name].command(name, "http://u", "m", Path("tok"), LOAD, tmp_path))
    for part in (*parts, str(tmp_path / "prompts.jsonl")):
        assert part in text


def test_every_run_has_prompts_of_its_own() -> None:
    first, second = (requests_of(seed, WordCounter(), LOAD) for seed in (1, 2))  # type: ignore[arg-type]
    words = [item.messages[0]["content"].split()[0] for item in (*first, *second)]
    assert len(set(words)) == 2 * (LOAD.warmup + LOAD.requests)
    assert all(len(item.messages) == 1 and item.max_tokens == LOAD.output for item in first)


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
    ours = {"ttft": 1.029, "tpot": 0.01029, "tokens_per_second": 96.9}
    theirs = {"ttft": 1.0, "tpot": 0.01, "tokens_per_second": 100.0}
    assert [row["agrees"] for row in compare([ours], [theirs])] == [True, True, False]


def test_differences_are_taken_within_a_round_and_only_over_what_both_sides_say() -> None:
    ours = [{"ttft": 1.0, "acceptance_length": 3.0}, {"ttft": 4.0, "acceptance_length": 3.1}]
    (row,) = compare(ours, [{"ttft": 1.01}, {"ttft": 4.04}])
    assert row["difference"] == pytest.approx(1 / 1.01 - 1)
    assert row["low"] == pytest.approx(row["high"])
    rows = compare(ours, [{"ttft": 1.0, "acceptance_length": 3.0}, {"ttft": 4.0, "acceptance_length": 3.1}])
    assert [item["what"] for item in rows] == ["ttft", "acceptance_length"]
    assert "acceptance_length   ours       3.05   aiperf       3.05   +0.00%" in row_line(rows[1], "aiperf", 1)


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
    assert read_aiperf(tmp_path) == pytest.approx(ours)


def test_failed_requests_are_no_numbers() -> None:
    with pytest.raises(ValueError, match="1 of 1 requests failed: HTTP 500"):
        our_numbers([Measurement("error", error="HTTP 500")])


@pytest.mark.parametrize("name", list(TOOLS))
def test_a_disagreeing_referee_fails_the_command(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(referee, "TokenizerCounter", lambda folder: WordCounter())
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    program = tmp_path / name
    program.write_text(FAKE.format(python=sys.executable, ttft=9000.0))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    with running_stub(first_delay=0.02, gap=0.01) as (url, _):
        code = referee.main(
            [f"--{name}", str(program), "--url", url, "--model-dir", "any", "--requests", "4", "--concurrency", "2",
             "--prompt", "40", "--output", "4", "--pairs", "1", "--keep", str(tmp_path / "kept"),
             "--json", str(tmp_path / "out.json")]
        )  # fmt: skip
    assert code == 1
    assert (tmp_path / "kept" / f"{name}-1" / "output.txt").is_file()
    text = capsys.readouterr().out
    assert "DIFFERS" in text
    assert text.splitlines()[0].startswith("ttft")
    ttft = json.loads((tmp_path / "out.json").read_text())["rows"][name][0]
    assert (ttft["theirs"], ttft["agrees"]) == (9.0, False)
