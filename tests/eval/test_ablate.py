from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eval.ablate import Ablation, main, parse, ratios, seed_of, table
from eval.ablate_pass import Pass
from eval.ablate_switches import MEASURES, SWITCHES, Facts, acceptance_of, arguments_of, predict
from eval.roofline import acceptance_length
from eval.score import check_seal
from eval.servers import ROOT
from serve.config import parse_config
from tests.tiny_models import write_model
from verify.costs import CostTable

ENGINE = {
    "device": "cpu",
    "weights": "int8",
    "drafter": "2 layers",
    "proposer": "lookup+block",
    "kernel_path": "cpu int8; layers in C (gcc 12.2)",
    "block_length_max": 15,
}


def facts(**engine: Any) -> Facts:
    """A server whose passes cost 10 ms up to 8 rows and 1 ms a row from there; a draft costs 2 ms."""
    return Facts(
        costs=CostTable({1: 0.010, 8: 0.010, 16: 0.016, 32: 0.032, 64: 0.064}, {1: 0.002, 16: 0.004}),
        engine={**ENGINE, **engine},
        values={"chat": 0.006, "copy": 0.002, "long": 1.0, "again": 0.1, "stall": 0.3, "burst": 500.0},
        tau={"chat": 2.0, "copy": 5.0, "burst": 1.0},
        drafted={"chat": 7.0, "copy": 7.0, "burst": 0.0},
        burst=8,
        long_tokens=1024,
        layers=30,
    )


def of(name: str, given: Facts) -> dict[str, float]:
    return predict(next(switch for switch in SWITCHES if switch.name == name), given)


def test_without_speculation_a_token_costs_a_plain_pass() -> None:
    found = of("speculation", facts())
    assert found["chat"] == pytest.approx(0.010 / (0.012 / 2))
    assert found["copy"] == pytest.approx(0.010 / (0.012 / 5))
    assert found["burst"] == pytest.approx(1.0)
    assert found["long"] == found["again"] == 1.0


def test_each_prediction_names_what_the_switch_is_about() -> None:
    given = facts()
    assert of("prompt lookup", given)["copy"] == pytest.approx(2.5)
    assert of("prefix cache", given)["again"] == pytest.approx(10)
    assert of("batching", given)["burst"] == pytest.approx(500 * 0.006)
    assert of("chunked prefill", given)["stall"] == pytest.approx(1.0 / 0.3)
    assert of("quantised weights", given)["chat"] == pytest.approx(4)
    assert of("quantised weights", facts(weights="int4", device="cuda:0"))["long"] == 1.0
    assert of("native layers", given)["chat"] > 1
    # A burst of 8 that drafts 15 tokens each verifies 128 rows for hardly a token more.
    assert of("controller", given)["burst"] > 5


@pytest.mark.parametrize("chance", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("drafted", [1.0, 3.5, 7.0])
def test_acceptance_is_found_again_from_tokens_a_round(chance: float, drafted: float) -> None:
    low, part = int(drafted), drafted - int(drafted)
    tau = acceptance_length(chance, low) * (1 - part) + acceptance_length(chance, low + 1) * part
    assert acceptance_of(tau, drafted) == pytest.approx(chance, abs=1e-6)


def test_no_drafts_mean_no_acceptance() -> None:
    assert acceptance_of(1.0, 0.0) == acceptance_of(1.0, 4.0) == 0.0


@pytest.mark.parametrize("switch", SWITCHES, ids=lambda switch: switch.name)
@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_the_command_line_knows_every_switch_that_applies(switch: Any, device: str) -> None:
    given = facts(device=device)
    if not switch.needs(given):
        base = ["--model-dir", "m", "--drafter-dir", "d"]
        assert parse_config([*base, *arguments_of(switch, given)], {}) != parse_config(base, {}) or switch.environ
    assert set(predict(switch, given)) == set(MEASURES)


def test_switches_that_mean_nothing_here_say_why() -> None:
    bare = facts(drafter=None, proposer="lookup", weights="fp32", kernel_path="torch")
    said = {switch.name: switch.needs(bare) for switch in SWITCHES}
    assert said["block drafter"] == "no block drafter"
    assert said["quantised weights"] == "weights are not quantised"
    assert said["native layers"] == "the C layers are not in use"
    assert said["graphs"] == "graphs exist on CUDA only"
    assert said["prefix cache"] == said["batching"] == ""


def test_no_two_rows_or_pairs_share_their_prompts() -> None:
    seeds = [seed_of(switch, pair) for switch in SWITCHES for pair in range(100)]
    assert len({*seeds, 0, -1, *(-seed - 10_000 for seed in (*seeds, 0, -1))}) == 2 * (len(seeds) + 2)


def test_a_ratio_above_one_always_means_slower_without() -> None:
    full = Pass(dict.fromkeys(MEASURES, 1.0), {}, {})
    without = Pass({**dict.fromkeys(MEASURES, 2.0), "burst": 0.5}, {}, {})
    assert ratios(without, full) == dict.fromkeys(MEASURES, 2.0)


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory, default_model_dir: Path) -> list[str]:
    """A tiny random model with a real tokenizer: prompts of the measured shapes need whole words."""
    folder = tmp_path_factory.mktemp("ablate")
    write_model(folder / "model", max_position_embeddings=4096, vocab_size=49152)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(default_model_dir / name, folder / "model" / name)
    given = ["--model-dir", str(folder / "model"), "--small", "--pairs", "1", "--json", str(folder / "rows.json")]
    return [*given, "--serve-arg=--threads=1", "--serve-arg=--kv-memory-mib=32", "--serve-arg=--weights=fp32"]


@pytest.mark.model
def test_rows_are_measured_on_real_servers_kept_and_not_measured_again(command: list[str]) -> None:
    run = [sys.executable, "-m", "eval.ablate", *command]
    first = subprocess.run([*run, "--only", "prefix cache", "graphs"], capture_output=True, text=True, cwd=ROOT)
    assert first.returncode == 0, first.stderr
    report = json.loads(parse(command).json.read_text())
    assert report["rows"]["graphs"] == {"skipped": "graphs exist on CUDA only"}
    row = report["rows"]["prefix cache"]
    assert row["off"] == "--no-prefix-cache"
    assert set(row["measured"]) == set(MEASURES)
    assert all(value["value"] > 0 for value in row["measured"].values())
    assert check_seal(row["prediction"], run_started=row["prediction"]["time"] + 1) == []
    assert "prefix cache" in first.stdout
    second = subprocess.run([*run, "--only", "prefix cache", "graphs"], capture_output=True, text=True, cwd=ROOT)
    assert second.returncode == 0, second.stderr
    assert "2 rows are done already" in second.stderr
    assert "starting" not in second.stderr
    assert json.loads(parse(command).json.read_text()) == report
    assert table(report) in second.stdout


@pytest.mark.model
def test_rows_of_other_settings_are_not_mixed(tmp_path: Path, command: list[str]) -> None:
    path = tmp_path / "rows.json"
    args = parse([*command, "--json", str(path)])
    report = Ablation(args).report
    path.write_text(json.dumps({**report, "settings": {**report["settings"], "pairs": 9}}))
    with pytest.raises(ValueError, match="holds rows of other settings"):
        Ablation(args)


@pytest.mark.model
def test_an_interrupt_keeps_and_prints_the_rows_that_are_done(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.json"

    def one_row_then_interrupt(self: Ablation) -> None:
        keep(self, SWITCHES[0], {"skipped": "for a test"})
        raise KeyboardInterrupt

    keep = Ablation._keep
    monkeypatch.setattr(Ablation, "run", one_row_then_interrupt)
    monkeypatch.setattr("eval.ablate.end_on_sigterm", lambda: None)
    assert main([*command, "--json", str(path)]) == 130
    assert json.loads(path.read_text())["rows"] == {SWITCHES[0].name: {"skipped": "for a test"}}
    assert f"{SWITCHES[0].name:18}  not measured: for a test" in capsys.readouterr().out
