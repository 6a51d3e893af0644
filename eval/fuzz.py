"""Long runs of the fuzz tests: ``python -m eval.fuzz openapi --cases 20000`` and so on.

The tests in tests/fuzz are the fuzzers: they try few cases in a test run, and as many as asked for here, at random
instead of always the same. It prints what was tried and what came of it; the exit code is the tests'. It knows their
files and their environment variables, not what they try.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree  # what it reads was just written by pytest  # nosec B405

from eval.json_report import write_report
from eval.options import new_file

ROOT = Path(__file__).resolve().parent.parent
CASES = "FORETOKEN_FUZZ_CASES"
MODEL_DIR = "FORETOKEN_FUZZ_MODEL_DIR"
DRAFTER_DIR = "FORETOKEN_FUZZ_DRAFTER_DIR"
FUZZERS: Mapping[str, tuple[str, str]] = {
    "openapi": ("test_openapi.py", "requests from /openapi.json, for each route"),
    "scheduler": ("test_scheduler_machine.py", "runs of the page and scheduler machine, 50 rules each"),
    "bytes": ("test_http_bytes.py", "damaged bodies and raw bytes on a socket"),
    "drafts": ("test_drafts_change_nothing.py", "random requests with drafts under pressure against plain ones"),
    "folders": ("test_damaged_folders.py", "damaged files, for each file of a model and of a drafter"),
}


def command(
    name: str, cases: int, model_dir: Path | None, drafter_dir: Path | None = None
) -> tuple[list[str], dict[str, str]]:
    """The test command of one fuzzer and what it adds to the environment."""
    arguments = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"tests/fuzz/{FUZZERS[name][0]}"]
    folders = {MODEL_DIR: model_dir, DRAFTER_DIR: drafter_dir}
    given = {variable: str(folder.resolve()) for variable, folder in folders.items() if folder is not None}
    return arguments, {CASES: str(cases), **given}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument(
        "fuzzer", choices=FUZZERS, help="; ".join(f"{name}: {text}" for name, (_, text) in FUZZERS.items())
    )
    parser.add_argument("--cases", type=int, default=5000, help="cases of each test (default: %(default)s)")
    parser.add_argument("--model-dir", type=Path, help="openapi only: serve this model instead of a tiny random one")
    parser.add_argument("--drafter-dir", type=Path, help="openapi with --model-dir only: draft with this")
    parser.add_argument("--json", type=new_file, help="write what each test came to here")
    args = parser.parse_args(argv)
    if args.cases < 1:
        parser.error(f"--cases must be at least 1, got {args.cases}")
    if args.model_dir is not None and args.fuzzer != "openapi":
        parser.error("--model-dir is for openapi only")
    if args.drafter_dir is not None and args.model_dir is None:
        parser.error("--drafter-dir needs the --model-dir it was trained for")
    arguments, environ = command(args.fuzzer, args.cases, args.model_dir, args.drafter_dir)
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        started = time.monotonic()
        arguments.append(f"--junitxml={results}")
        code = subprocess.run(arguments, cwd=ROOT, env={**os.environ, **environ}, check=False).returncode
        if args.json:
            report = {"fuzzer": args.fuzzer, "cases": args.cases, "exit_code": code, "tests": results_of(results),
                      "seconds": round(time.monotonic() - started, 1)}  # fmt: skip
            write_report(args.json, report)
    return code


def results_of(path: Path) -> dict[str, str]:
    """ "passed", or what went wrong, by the test's name, from a JUnit file of pytest; empty where it wrote none."""
    if not path.is_file():
        return {}
    found = {}
    for case in ElementTree.parse(path).iter("testcase"):  # nosec B314
        fault = next((part for part in case if part.tag in ("failure", "error", "skipped")), None)
        found[str(case.get("name"))] = "passed" if fault is None else f"{fault.tag}: {fault.get('message', '')[:500]}"
    return found


if __name__ == "__main__":
    sys.exit(main())
