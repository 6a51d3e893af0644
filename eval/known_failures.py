"""``python -m eval.known_failures``: public bug reports whose full size a test run has no time for, one line each.

docs/known_failures.md lists all reports; those that its tests try in reduced form are tried here as they were reported
(eval/known_speculation.py, eval/known_load.py). The exit code is 1 when one fails.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from eval import known_load as load
from eval import known_speculation as speculation
from eval.chaos import Fault, Finding, try_fault
from eval.chaos_client import Lab
from eval.servers import ROOT, end_on_sigterm

CASES: Mapping[str, Fault] = {
    "B20": speculation.ends_inside_blocks,
    "B23": speculation.same_text,
    "B24": speculation.own_words,
    "B29": speculation.sampled,
    "B34": load.long_prompt_beside_streams,
    "B39": load.ended_under_load,
    "B44": load.slow_save,
}


def run(names: Sequence[str], lab: Lab) -> list[Finding]:
    """All of them in order, each line printed when it is known."""
    findings = []
    for name in names:
        finding = try_fault(name, CASES[name], lab)
        findings.append(finding)
        mark = "passes" if finding.kept else "FAILS "
        print(f"{name}  {mark}  {finding.seen}  [{finding.seconds:.0f} s]", flush=True)
    return findings


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.known_failures", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=sorted(CASES), metavar="ID", help="just these")
    parser.add_argument("--model-dir", default=str(ROOT / "models" / "smollm2-135m-instruct"))
    parser.add_argument("--drafter-dir", default=str(ROOT / "drafter_train" / "releases" / "smollm2-135m-instruct"))
    parser.add_argument("--threads", type=int, default=1, help="threads of the engine (default: 1)")
    parser.add_argument("--json", type=Path, help="write the findings here")
    args = parser.parse_args()
    end_on_sigterm()
    findings = run(args.only or list(CASES), Lab(args.model_dir, args.drafter_dir, args.threads, seconds=120))
    failed = sum(1 for finding in findings if not finding.kept)
    print(f"{len(findings)} reports, {failed} fail")
    if args.json:
        args.json.write_text(json.dumps([asdict(finding) for finding in findings], indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
