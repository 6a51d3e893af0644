"""Named cases tried against a Lab, a line for each when it is known, and how such a command begins and ends.

It knows no case, and no server.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

from eval.chaos_client import BrokenPromise, Lab
from eval.json_report import write_report
from eval.servers import ROOT, ServerFailed

Fault = Callable[[Lab], str]


@dataclass(frozen=True)
class Finding:
    """One line of the table."""

    fault: str
    what: str
    kept: bool
    seen: str
    seconds: float


def try_fault(name: str, fault: Fault, lab: Lab) -> Finding:
    """Inject one fault. Whatever goes wrong is a broken promise and becomes what was seen."""
    started = time.monotonic()
    try:
        kept, seen = True, fault(lab)
    except (
        BrokenPromise,
        TimeoutError,
        subprocess.SubprocessError,
        ServerFailed,
        OSError,
        httpx.HTTPError,
        KeyError,
    ) as error:
        kept, seen = False, f"{type(error).__name__}: {error}"
    what = (fault.__doc__ or "").splitlines()[0]
    return Finding(name, what, kept, " ".join(seen.split()), round(time.monotonic() - started, 1))


def run(names: Sequence[str], faults: Mapping[str, Fault], lab: Lab, line: Callable[[Finding], str]) -> list[Finding]:
    """All of them in order, the ``line`` of each printed when it is known; after Ctrl-C those that are finished."""
    findings: list[Finding] = []
    for name in names:
        try:
            finding = try_fault(name, faults[name], lab)
        except KeyboardInterrupt:
            print(f"interrupted in {name}: {len(findings)} of {len(names)} are kept", file=sys.stderr)
            break
        findings.append(finding)
        print(f"{line(finding)}  {finding.seen}  [{finding.seconds:.0f} s]", flush=True)
    return findings


def add_lab_arguments(parser: argparse.ArgumentParser) -> None:
    """What a Lab is made of, and where the findings go."""
    parser.add_argument("--model-dir", default=str(ROOT / "models" / "smollm2-135m-instruct"))
    parser.add_argument("--drafter-dir", default=str(ROOT / "drafter_train" / "releases" / "smollm2-135m-instruct"))
    parser.add_argument("--threads", type=int, default=1, help="threads of the engine (default: 1)")
    parser.add_argument("--json", type=Path, help="write the findings here")


def conclude(findings: Sequence[Finding], asked: int, cases: str, failures: str, path: Path | None) -> int:
    """The last line, the file where one is wanted, and the exit code: 1 when one failed, 130 when fewer than were asked
    for are finished."""
    failed = sum(1 for finding in findings if not finding.kept)
    print(f"{len(findings)} {cases}, {failed} {failures}")
    if path:
        write_report(path, [asdict(finding) for finding in findings])
    return 1 if failed else 130 if len(findings) < asked else 0
