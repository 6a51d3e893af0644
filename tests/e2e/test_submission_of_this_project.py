"""The tarball of this project through a whole rehearsal, with the default model and its released drafter."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from eval.gate import DATA, Kept, load_questions
from eval.rehearse import parse
from eval.rehearse_reference import Reference, purpose
from eval.scenarios import Baseline, shapes_from
from eval.servers import ROOT

# Letters of the naive reference, the same under three orders of the examples (eval.rehearse --quick --candidates 4).
EXPECTED = {"small-02": "C", "small-03": "A", "small-04": "C"}
# Far slower than any machine: this test is about what works, not about how fast.
PATIENT = Baseline(tpot=10.0, ttft=600.0, throughput=0.1, source="no machine")


@pytest.mark.model
def test_the_archive_of_this_project_passes_a_rehearsal(default_model_dir: Path, tmp_path: Path) -> None:
    archive, out, reference = tmp_path / "submission.tar.gz", tmp_path / "out", tmp_path / "reference.json"
    build = ["sh", str(ROOT / "scripts" / "make_submission.sh"), str(archive)]
    assert subprocess.run(build, capture_output=True).returncode == 0
    given = [str(archive), "--model-dir", str(default_model_dir), "--quick", "--candidates", "4", "--out", str(out)]
    given += ["--reference", str(reference), "--long-tokens", "256", "--burst", "2"]
    args = parse(given)
    questions = load_questions(DATA / "gate_small.jsonl")[:4]
    kept = tuple(Kept(question, EXPECTED[question.id]) for question in questions if question.id in EXPECTED)
    Reference(kept, PATIENT, purpose(args.model_dir, questions, shapes_from(args))).save(reference)
    done = subprocess.run([sys.executable, "-m", "eval.rehearse", *given], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((out / "timeline.json").read_text())
    phases = {phase["name"]: phase for phase in report["phases"]}
    assert phases["gate"]["data"]["agreed"] == len(EXPECTED)
    assert phases["start"]["data"]["engine"]["drafter"]
    assert phases["start"]["data"]["engine"]["warnings"] == []
    assert phases["setup"]["state"] == "ok"
    assert "jinja2" in report["hidden_packages"]
