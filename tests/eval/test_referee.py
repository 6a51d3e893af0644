from __future__ import annotations

import json
import stat
import sys
from pathlib import Path

import pytest

from eval import referee
from eval.client import Measurement
from eval.referee import aiperf_command, compare, our_numbers, read_aiperf
from tests.eval.stub_server import WordCounter, running_stub

# A stand-in for the aiperf program: writes the export its --artifact-dir names.
FAKE = """#!{python}
import json, sys
folder = sys.argv[sys.argv.index("--artifact-dir") + 1]
row = lambda value: {{"avg": value, "unit": "ms"}}
export = {{"time_to_first_token": row({ttft}), "inter_token_latency": row(10.0), "output_token_throughput": row(100.0)}}
json.dump(export, open(folder + "/profile_export_aiperf.json", "w"))
"""


def test_both_tools_are_asked_for_the_same_load(tmp_path: Path) -> None:
    command = aiperf_command("aiperf", "http://u", "m", Path("tok"), 4, 40, 120, 64, tmp_path)
    text = " ".join(command)
    for part in ("profile", "--concurrency 4", "--request-count 40", "--synthetic-input-tokens-mean 120",
                 "--output-tokens-mean 64", "--streaming", "temperature:0", "ignore_eos:true"):  # fmt: skip
        assert part in text


def test_an_export_is_read_in_our_units_and_gaps_are_named(tmp_path: Path) -> None:
    path = tmp_path / "profile_export_aiperf.json"
    with pytest.raises(ValueError, match="left no profile_export_aiperf"):
        read_aiperf(tmp_path)
    path.write_text(json.dumps({"time_to_first_token": {"avg": 300.0}}))
    with pytest.raises(ValueError, match="no inter_token_latency"):
        read_aiperf(tmp_path)


def test_three_percent_is_the_limit_of_agreement() -> None:
    ours = {"ttft": 1.029, "tpot": 0.01029, "tokens_per_second": 96.9}
    theirs = {"ttft": 1.0, "tpot": 0.01, "tokens_per_second": 100.0}
    assert [row["agrees"] for row in compare(ours, theirs)] == [True, True, False]


def test_failed_requests_are_no_numbers() -> None:
    with pytest.raises(ValueError, match="1 of 1 requests failed: HTTP 500"):
        our_numbers([Measurement("error", error="HTTP 500")])


def test_a_disagreeing_referee_fails_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(referee, "TokenizerCounter", lambda folder: WordCounter())
    program = tmp_path / "aiperf"
    program.write_text(FAKE.format(python=sys.executable, ttft=9000.0))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    with running_stub(first_delay=0.02, gap=0.01) as (url, _):
        code = referee.main(
            ["--aiperf", str(program), "--url", url, "--model-dir", "any", "--requests", "4", "--concurrency", "2",
             "--prompt", "40", "--output", "4", "--pairs", "1"]
        )  # fmt: skip
    assert code == 1
    text = capsys.readouterr().out
    assert "DIFFERS" in text
    assert text.splitlines()[0].startswith("ttft")
