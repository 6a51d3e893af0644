"""``python -m eval.known_failures``: public bug reports whose full size a test run has no time for, one line each.

docs/known_failures.md lists all reports; those that its tests try in reduced form are tried here as they were reported
(eval/known_speculation.py, eval/known_load.py). The exit code is 1 when one fails.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping

from eval import known_load as load
from eval import known_speculation as speculation
from eval.chaos_client import Lab
from eval.chaos_table import Fault, Finding, add_lab_arguments, conclude, run
from eval.servers import end_on_sigterm

CASES: Mapping[str, Fault] = {
    "B20": speculation.ends_inside_blocks,
    "B23": speculation.same_text,
    "B24": speculation.own_words,
    "B29": speculation.sampled,
    "B34": load.long_prompt_beside_streams,
    "B39": load.ended_under_load,
    "B44": load.slow_save,
}


def _line(finding: Finding) -> str:
    return f"{finding.fault}  {'passes' if finding.kept else 'FAILS '}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.known_failures", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=sorted(CASES), metavar="ID", help="just these")
    add_lab_arguments(parser)
    args = parser.parse_args()
    end_on_sigterm()
    lab = Lab(args.model_dir, args.drafter_dir, args.threads, seconds=120)
    names = args.only or list(CASES)
    return conclude(run(names, CASES, lab, _line), len(names), "reports", "fail", args.json)


if __name__ == "__main__":
    sys.exit(main())
