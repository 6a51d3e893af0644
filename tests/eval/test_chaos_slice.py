"""The chaos run on a tiny model: some faults injected for real, the table, and that a broken promise is seen."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from eval import chaos
from eval.chaos_client import BrokenPromise, Lab, check
from eval.chaos_table import conclude, run
from tests.conftest import ROOT
from tests.serve.drafter.random_drafters import drafter_config, random_drafter, write_drafter
from tests.tiny_models import write_model

SLICE = ("engine-killed", "drafter-raises", "trace-disk-full")


def test_a_fault_is_injected_for_real_and_survived(tmp_path: Path) -> None:
    write_model(tmp_path / "model", num_hidden_layers=5, max_position_embeddings=4096)
    write_drafter(tmp_path / "drafter", random_drafter(drafter_config(max_position_embeddings=4096)))
    command = [sys.executable, "-m", "eval.chaos", "--model-dir", str(tmp_path / "model")]
    command += ["--drafter-dir", str(tmp_path / "drafter"), "--json", str(tmp_path / "found.json"), "--only", *SLICE]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert [finding["fault"] for finding in found] == list(SLICE)
    assert all(finding["kept"] and finding["seen"] for finding in found)
    assert f"{len(SLICE)} faults, 0 promises broken" in ran.stdout


def test_a_broken_promise_is_a_line_and_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(lab: Lab) -> str:
        """Always."""
        check(False, "the stream\nhung")
        return "never"

    monkeypatch.setitem(chaos.FAULTS, "port-in-use", broken)
    monkeypatch.setattr(sys, "argv", ["chaos", "--only", "port-in-use"])
    monkeypatch.setattr(chaos, "end_on_sigterm", lambda: None)
    assert chaos.main() == 1
    out = capsys.readouterr().out
    assert "FAIL port-in-use" in out
    assert "BrokenPromise: the stream hung" in out
    with pytest.raises(BrokenPromise):
        broken(Lab("", ""))


def test_quick_is_a_part_and_every_fault_says_what_it_is() -> None:
    assert 10 <= chaos.QUICK < len(chaos.FAULTS)
    assert all((fault.__doc__ or "").strip().endswith(".") for fault in chaos.FAULTS.values())


def test_ctrl_c_keeps_the_findings_before_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def held(lab: Lab) -> str:
        """Holds."""
        return "seen"

    def stopped(lab: Lab) -> str:
        """Stopped by hand."""
        raise KeyboardInterrupt

    findings = run(["a", "b", "c"], {"a": held, "b": stopped, "c": held}, Lab("", ""), lambda one: one.fault)
    out = tmp_path / "found.json"
    assert conclude(findings, 3, "faults", "promises broken", out) == 130
    assert [row["fault"] for row in json.loads(out.read_text())] == ["a"]
    assert "interrupted in b: 1 of 3 are kept" in capsys.readouterr().err
