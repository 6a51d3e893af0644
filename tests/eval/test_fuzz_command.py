"""The command for long fuzz runs says what each test came to."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from eval import fuzz

JUNIT = """<testsuites><testsuite name="pytest" tests="3">
<testcase classname="tests.fuzz.a" name="test_whole" time="1.0" />
<testcase classname="tests.fuzz.a" name="test_broken"><failure message="assert 1 == 2">trace</failure></testcase>
<testcase classname="tests.fuzz.a" name="test_stopped" time="0.1"><error message="no server">trace</error></testcase>
</testsuite></testsuites>"""


def test_each_test_has_its_outcome_in_the_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pytest_stands_in(command: list[str], env: dict[str, str], **more: Any) -> subprocess.CompletedProcess[bytes]:
        assert env[fuzz.CASES] == "7"
        Path(command[-1].removeprefix("--junitxml=")).write_text(JUNIT)
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(subprocess, "run", pytest_stands_in)
    out = tmp_path / "found.json"
    assert fuzz.main(["scheduler", "--cases", "7", "--json", str(out)]) == 1
    report = json.loads(out.read_text())
    assert (report["fuzzer"], report["cases"], report["exit_code"]) == ("scheduler", 7, 1)
    assert report["tests"] == {
        "test_whole": "passed", "test_broken": "failure: assert 1 == 2", "test_stopped": "error: no server"
    }  # fmt: skip


def test_a_run_that_wrote_no_results_has_none(tmp_path: Path) -> None:
    assert fuzz.results_of(tmp_path / "none.xml") == {}
