"""Whole rehearsals of small submissions: the server is a stub of the standard library, everything around it is real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from eval.gate import DATA, Kept, load_questions
from eval.rehearse import QUICK_QUESTIONS, parse
from eval.rehearse_reference import Reference, load_reference, purpose
from eval.scenarios import Baseline, shapes_from
from eval.servers import ROOT, descendants
from tests.eval.archives import write

STUB = (ROOT / "tests" / "eval" / "stub_server.py").read_text()
RIGHT = {"first_delay": 0.01, "gap": 0.005, "chunks": [" A", " long", " story", " follows", "."]}


@dataclass
class Outcome:
    code: int
    said: str
    report: dict[str, Any]

    def phase(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = next(phase for phase in self.report["phases"] if phase["name"] == name)
        return found

    def failed(self) -> tuple[str, str]:
        """The phase that failed, and why."""
        (phase,) = (phase for phase in self.report["phases"] if phase["state"] == "FAILED")
        return phase["name"], "\n".join(phase["faults"])


@dataclass
class Grader:
    folder: Path
    model: Path

    def run(self, start: str, *options: str, setup: str | None = None, expect: str = "A") -> Outcome:
        """Rehearse a submission whose start_server.sh ends with ``start`` (``$STUB`` runs the right stub)."""
        stub = f'python3 "$root/stub.py" --port "$PORT" --behaviour \'{json.dumps(RIGHT)}\''
        head = '#!/bin/sh\nset -eu\nroot=$(CDPATH="" cd -- "$(dirname -- "$0")" && pwd)\n'
        files: dict[str, str | bytes] = {"start_server.sh": head + start.replace("$STUB", stub) + "\n", "stub.py": STUB}
        if setup is not None:
            files["setup.sh"] = setup
        archive = write(self.folder / "submission.tar.gz", files)
        out = self.folder / "out"
        given = [str(archive), "--model-dir", str(self.model), "--no-drafter", "--quick", "--out", str(out)]
        given += options
        given += ["--reference", str(self.reference(given, expect))]
        command = [sys.executable, "-m", "eval.rehearse", *given]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        return Outcome(done.returncode, done.stdout + done.stderr, json.loads((out / "timeline.json").read_text()))

    def reference(self, given: list[str], expect: str) -> Path:
        args = parse(given)
        questions = load_questions(args.questions)[:QUICK_QUESTIONS]
        kept = tuple(Kept(question, expect) for question in questions)
        path = self.folder / "reference.json"
        Reference(kept, Baseline(), purpose(args.model_dir, questions, shapes_from(args))).save(path)
        return path


@pytest.fixture
def grader(tmp_path: Path, default_model_dir: Path) -> Grader:
    return Grader(tmp_path, default_model_dir)


@pytest.mark.model
def test_a_right_submission_passes_every_phase_in_one_process(grader: Grader) -> None:
    setup = '#!/bin/sh\nmkdir -p "$HOME/.cache" && echo built >"$HOME/.cache/kernel"\necho "setup: built"\n'
    outcome = grader.run('[ -f "$HOME/.cache/kernel" ]\nexec $STUB', setup=setup)
    assert outcome.code == 0, outcome.said
    assert outcome.report["passed"]
    states = {phase["name"]: phase["state"] for phase in outcome.report["phases"]}
    assert states == {name: "skipped" if name == "drafter" else "ok" for name in states}
    assert list(states) == [
        *("archive", "drafter", "unpack", "reference", "setup", "start", "gate", "chat", "long", "burst", "stop"),
    ]
    assert outcome.phase("setup")["data"]["files_cached"] == 1
    assert outcome.phase("gate")["data"]["agreed"] == QUICK_QUESTIONS
    assert outcome.report["score"] > 1
    starts = [phase["started"] for phase in outcome.report["phases"]]
    assert starts == sorted(starts)
    page = (grader.folder / "out" / "timeline.html").read_text()
    assert "passed" in page
    assert "http" not in page.replace("http://127.0.0.1", "")


@pytest.mark.model
def test_a_server_that_is_not_this_model_is_incorrect(grader: Grader) -> None:
    outcome = grader.run("exec $STUB", expect="B")
    assert outcome.code == 1
    name, fault = outcome.failed()
    assert name == "gate"
    assert "INCORRECT" in fault


@pytest.mark.model
def test_a_server_on_another_port_is_told_where_it_listens(grader: Grader) -> None:
    outcome = grader.run("PORT=48123\nexec $STUB", "--start-cap", "2", "--no-namespaces")
    name, fault = outcome.failed()
    assert name == "start"
    assert "listens on [48123] instead of PORT=" in fault


@pytest.mark.model
def test_what_is_written_left_behind_and_called_is_found(grader: Grader) -> None:
    spoil = (
        'if touch "$MODEL_DIR/written" 2>/dev/null; then echo wrote; fi\n'
        "python3 -c \"from socket import *; socket(AF_INET, SOCK_DGRAM).connect(('192.0.2.7', 9))\" || :\n"
        "setsid sleep 600 &\n"
    )
    outcome = grader.run(spoil + "exec $STUB")
    name, fault = outcome.failed()
    assert name == "stop"
    assert "a connection to 192.0.2.7:9 was tried" in fault
    assert "outlived the server" in fault
    mounted = "read-only mounts" in outcome.report["isolation"]
    assert ("/written is read-only in a graded run, but was changed" in fault) != mounted
    assert not (grader.model / "written").exists() or not mounted
    (grader.model / "written").unlink(missing_ok=True)


@pytest.mark.model
def test_a_start_that_needs_a_package_outside_the_stack_fails_with_its_words(grader: Grader) -> None:
    outcome = grader.run('python3 -c "import pytest"\nexec $STUB')
    name, fault = outcome.failed()
    assert name == "start"
    assert "ended with code 1" in fault
    assert "No module named 'pytest'" in fault


@pytest.mark.model
def test_a_killed_rehearsal_leaves_no_process(grader: Grader) -> None:
    archive = write(grader.folder / "a.tar.gz", {"start_server.sh": "#!/bin/sh\nexec sleep 601\n"})
    given = [str(archive), "--model-dir", str(grader.model), "--no-drafter", "--quick"]
    given += ["--reference", str(grader.reference(given, "A")), "--out", str(grader.folder / "out")]
    with subprocess.Popen([sys.executable, "-m", "eval.rehearse", *given], cwd=ROOT, stderr=subprocess.PIPE) as process:
        deadline = time.monotonic() + 60
        while not (below := sleepers(process.pid)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert below
        process.kill()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in below) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in below)


def sleepers(root: int) -> list[int]:
    found = []
    for pid in descendants(root):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if command[:2] == [b"sleep", b"601"]:
            found.append(pid)
    return found


def test_faults_of_the_archive_end_the_rehearsal_before_anything_runs(tmp_path: Path) -> None:
    archive = write(tmp_path / "a.tar.gz", {"project/start_server.sh": "#!/bin/sh\n"})
    told = tmp_path / "timeline.json"
    command = [sys.executable, "-m", "eval.rehearse", str(archive), "--check-only", "--out", str(tmp_path / "out")]
    done = subprocess.run([*command, "--json", str(told)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1
    assert json.loads(told.read_text())["phases"][0]["state"] == "FAILED"
    assert "nested root: project/start_server.sh" in done.stdout


def test_an_oversized_drafter_ends_the_rehearsal(tmp_path: Path) -> None:
    archive = write(tmp_path / "a.tar.gz", {"start_server.sh": "#!/bin/sh\nexit 0\n"})
    drafter = tmp_path / "drafter"
    drafter.mkdir()
    (drafter / "config.json").write_text("{}")
    (drafter / "model.safetensors").touch()
    os.truncate(drafter / "model.safetensors", 2_600_000_000)
    command = [sys.executable, "-m", "eval.rehearse", str(archive), "--drafter", str(drafter), "--check-only"]
    done = subprocess.run([*command, "--out", str(tmp_path / "out")], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1
    assert "oversized drafter" in done.stdout


def test_a_reference_for_something_else_is_refused(tmp_path: Path) -> None:
    questions = load_questions(DATA / "gate_small.jsonl")[:2]
    made_for = {"model": "a", "questions": "b", "sizes": "graded"}
    saved = Reference(tuple(Kept(question, "A") for question in questions), Baseline(), made_for)
    saved.save(tmp_path / "r.json")
    assert load_reference(tmp_path / "r.json", made_for) == saved
    with pytest.raises(ValueError, match="was made for sizes 'graded', not 'quick'"):
        load_reference(tmp_path / "r.json", {**made_for, "sizes": "quick"})


@pytest.mark.model
def test_a_scenario_over_its_wall_cap_is_a_timeout(grader: Grader) -> None:
    slow = json.dumps({**RIGHT, "gap": 1.0})  # the gate's answers are not streamed
    outcome = grader.run(f'exec python3 "$root/stub.py" --port "$PORT" --behaviour \'{slow}\'', "--cap-factor", "0.2")
    name, fault = outcome.failed()
    assert name == "chat"
    assert "TIMEOUT after" in fault
