"""``python -m eval.chaos``: a real server, real faults, one line for each with what was seen. Linux.

Faults of processes are in eval/chaos_process.py, those inside a running server in eval/chaos_inside.py. The exit code
is 1 when a promise was broken.
"""

from __future__ import annotations

import argparse
import sys

from eval import chaos_inside as inside
from eval import chaos_process as process
from eval.chaos_client import Lab
from eval.chaos_table import Fault, Finding, add_lab_arguments, conclude, run
from eval.servers import end_on_sigterm

FAULTS: dict[str, Fault] = {
    "port-in-use": process.port_in_use,
    "engine-killed": process.engine_killed,
    "engine-stopped": process.engine_stopped,
    "front-killed": process.front_killed,
    "sigterm-short": process.sigterm_short,
    "sigterm-long": process.sigterm_long,
    "sigterm-twice": process.sigterm_twice,
    "client-leaves": inside.client_leaves,
    "out-of-memory": inside.out_of_memory,
    "drafter-raises": inside.drafter_fault("drafter-raises", counted=True),
    "drafter-nan": inside.drafter_fault("drafter-nan", counted=True),
    "drafter-garbage": inside.drafter_fault("drafter-garbage", counted=True),
    "trace-disk-full": inside.trace_disk_full,
    "trace-read-only": inside.trace_folder_read_only,
    "engine-killed-for-good": process.engine_killed_for_good,
    "front-killed-engine-stopped": process.front_killed_engine_stopped,
    "step-hangs": process.step_hangs,
    "step-crashes": process.step_crashes,
    "drafter-wrong": inside.drafter_fault("drafter-wrong", counted=False),
    "observer-raises": inside.drafter_fault("observer-raises", counted=True),
    "drafter-folder-of-nan": inside.drafter_folder_of_nan,
    "log-disk-full": inside.log_disk_full,
}
QUICK = 14
"""``--quick`` takes that many from the front."""


def _line(finding: Finding) -> str:
    return f"{'ok  ' if finding.kept else 'FAIL'} {finding.fault:<28}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.chaos", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help=f"the first {QUICK} faults only")
    parser.add_argument("--only", nargs="+", choices=sorted(FAULTS), metavar="FAULT", help="just these faults")
    add_lab_arguments(parser)
    parser.add_argument("--seconds", type=float, default=120.0, help="what takes longer counts as hung (default: 120)")
    parser.add_argument("--list", action="store_true", help="say what there is, inject nothing")
    args = parser.parse_args()
    names = args.only or list(FAULTS)[: QUICK if args.quick else None]
    if args.list:
        for name in names:
            print(f"{name:<28} {(FAULTS[name].__doc__ or '').splitlines()[0]}")
        return 0
    end_on_sigterm()
    lab = Lab(args.model_dir, args.drafter_dir, args.threads, args.seconds)
    return conclude(run(names, FAULTS, lab, _line), len(names), "faults", "promises broken", args.json)


if __name__ == "__main__":
    sys.exit(main())
