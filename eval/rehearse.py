"""``python -m eval.rehearse OUT.tar.gz``: the grader at home.

Checks the archive, unpacks it into a clean read-only place, runs ``setup.sh`` and ``sh start_server.sh`` there with the
contract's variables alone, no network and only the packages of the grading image, then sends gate, chat, long prompt
and burst through that one server. Exit code 0 when every phase passed. What a phase does is in ``rehearse_phases``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

from eval.gate import DATA, load_questions
from eval.json_report import write_report
from eval.options import at_least, new_file, positive
from eval.rehearse_archive import Archive, check_archive
from eval.rehearse_drafter import DrafterFacts, code_faults, fetch, hub_drafter, local_drafter
from eval.rehearse_isolation import Isolation, adopt_orphans, isolate
from eval.rehearse_phases import SETUP_CAP, START_CAP, Rehearsal, tail
from eval.rehearse_reference import load_reference, measure_reference, purpose
from eval.rehearse_sandbox import end_descendants, open_sandbox
from eval.rehearse_timeline import Phase, Stopped, Timeline
from eval.scenarios import add_shape_arguments, score, shapes_from
from eval.servers import ROOT, end_on_sigterm

T = TypeVar("T")
DEFAULT_MODEL = ROOT / "models" / "smollm2-135m-instruct"
DEFAULT_DRAFTER = ROOT / "drafter_train" / "releases" / "smollm2-135m-instruct"
QUICK_QUESTIONS = 6
BUSY_SHARE = 0.5  # of the cores, as load average before the run


def phases(start_cap: float) -> list[Phase]:
    """The phases in their order, with the grader's caps where they do not depend on the baseline."""
    return [
        Phase("archive", "archive"),
        Phase("drafter", "drafter"),
        Phase("unpack", "unpack"),
        Phase("reference", "reference"),
        Phase("setup", "setup.sh", SETUP_CAP),
        Phase("start", "start", start_cap),
        Phase("gate", "gate"),
        Phase("chat", "chat", times_itself=True),
        Phase("long", "long prompt", times_itself=True),
        Phase("burst", "burst", times_itself=True),
        Phase("stop", "stop"),
    ]


def archive_phase(timeline: Timeline, path: Path) -> Archive:
    with timeline.phase("archive") as phase:
        archive = check_archive(path)
        for fault in archive.faults:
            phase.fail(fault.line())
        total = sum(archive.files.values())
        phase.detail = f"{len(archive.files)} files, {total:,} bytes; no fault found"
    return archive


def drafter_phase(timeline: Timeline, archive: Archive, local: Path | None, target: Path) -> None:
    """Fetch what a grader would mount at DRAFTER_BYO_DIR, if anything. The last use of the network."""
    if archive.manifest is None and local is None:
        timeline.skip("drafter", "no manifest.json in the archive: DRAFTER_BYO_DIR stays unset")
        return
    with timeline.phase("drafter") as phase:
        facts: DrafterFacts
        if local is not None:
            facts = local_drafter(local)
            if archive.manifest is None:
                timeline.note("no manifest.json: a grader would not set DRAFTER_BYO_DIR; here it is set to --drafter")
        else:
            assert archive.manifest is not None
            # In a process of its own: what it leaves behind (threads) would forbid namespaces in this one.
            facts = _apart(hub_drafter, archive.manifest)
        for fault in facts.faults():
            phase.fail(fault.line())
        if not phase.faults:
            _apart(fetch, archive.manifest, local, target)
            for fault in code_faults(target):
                phase.fail(fault.line())
        phase.detail = "; ".join(line.strip() for line in facts.lines())
        phase.data = {"files": facts.files, "weights_sha256": facts.weights_sha256}


def _apart(function: Callable[..., T], *arguments: object) -> T:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def rehearse(args: argparse.Namespace, timeline: Timeline, isolation: Isolation, staging: Path) -> None:
    """Everything after the last use of the network. Raises Stopped."""
    shapes = shapes_from(args)
    examples = load_questions(DATA / "gate_examples.jsonl")
    limit = args.candidates or (QUICK_QUESTIONS if args.quick else None)
    questions = load_questions(args.questions)[:limit]
    with ExitStack() as stack:
        stack.enter_context(timeline.live())
        sandbox = stack.enter_context(open_sandbox(isolation, args.python, args.jinja2, not args.no_home))
        with timeline.phase("unpack") as phase:
            count = sandbox.unpack(args.archive)
            sandbox.mount_model(args.model_dir)
            if (staging / "drafter").is_dir():
                sandbox.mount_drafter(staging / "drafter")
            sandbox.install_guard()
            phase.detail = f"{count} files; {isolation.line()}"
        made_for = purpose(args.model_dir, questions, shapes)
        with timeline.phase("reference") as phase:
            known = args.reference is not None and args.reference.is_file()
            if known:
                reference = load_reference(args.reference, made_for)
            else:
                reference = measure_reference(args.model_dir, questions, examples, shapes, seed=1)
                if args.reference:
                    reference.save(args.reference)
            base = reference.baseline
            how = "read" if known else "measured"
            phase.detail = (
                f"{how}: naive server {base.tpot * 1000:.1f} ms/token, {base.ttft:.2f} s to "
                f"the first token after 4,096, {base.throughput:.1f} tok/s; {len(reference.kept)} questions"
            )
        run = Rehearsal(timeline, sandbox, reference, examples, shapes)
        try:
            if args.skip_setup:
                timeline.skip("setup", "--skip-setup")
            else:
                run.set_up()
            run.serve()
            timeline.facts["score"] = score(run.scenarios)
        finally:
            timeline.facts["isolation"] = isolation.line()
            timeline.facts["sizes"] = shapes.label()
            args.out.mkdir(parents=True, exist_ok=True)
            for log in (run.setup_log, run.server_log):
                if log.exists():
                    shutil.copyfile(log, args.out / log.name)
            if not timeline.passed:
                print(tail(run.server_log), file=sys.stderr)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m eval.rehearse", description=__doc__)
    parser.add_argument("archive", type=Path, help="the tarball, from sh scripts/make_submission.sh")
    parser.add_argument("--model-dir", type=Path, default=DEFAULT_MODEL, help=f"default: {DEFAULT_MODEL.name}")
    parser.add_argument(
        "--drafter", type=Path, help="drafter folder in place of the pinned one (default model: its released drafter)"
    )
    parser.add_argument("--no-drafter", action="store_true", help="leave DRAFTER_BYO_DIR unset without a manifest.json")
    parser.add_argument(
        "--reference", type=Path, help="file with the reference's answers and speed: read if there, else written"
    )
    parser.add_argument("--questions", type=Path, default=DATA / "gate_small.jsonl", help="JSONL (or .gz) for the gate")
    parser.add_argument("--candidates", type=positive, help=f"ask the first N only (--quick: {QUICK_QUESTIONS})")
    parser.add_argument("--python", help="interpreter that stands for the grading image (default: this one)")
    parser.add_argument(
        "--jinja2", action="store_true", help="let the image have jinja2 (default: hidden, the hard case)"
    )
    parser.add_argument("--no-home", action="store_true", help="a sandbox without HOME (default: an empty one)")
    parser.add_argument("--skip-setup", action="store_true", help="start without running setup.sh")
    parser.add_argument("--start-cap", type=at_least(1), default=START_CAP, help=f"seconds to ready ({START_CAP:.0f})")
    parser.add_argument("--no-namespaces", action="store_true", help="do not ask the kernel for network and mounts")
    parser.add_argument("--check-only", action="store_true", help="check the archive and the drafter, start nothing")
    parser.add_argument("--out", type=Path, help="folder for timeline and logs (default: runs/rehearse/TIME)")
    parser.add_argument("--json", type=new_file, help="write the timeline here too")
    add_shape_arguments(parser)
    args = parser.parse_args(argv)
    args.out = args.out or ROOT / "runs" / "rehearse" / time.strftime("%Y%m%d-%H%M%S")
    for name in ("archive", "drafter", "reference", "questions", "out"):
        if getattr(args, name):
            setattr(args, name, getattr(args, name).absolute())
    if not args.archive.is_file():
        parser.error(f"{args.archive} is not a file")
    args.model_dir = args.model_dir.absolute()
    if not (args.model_dir / "config.json").is_file() and not args.check_only:
        parser.error(f"--model-dir {args.model_dir} has no config.json")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    end_on_sigterm()
    adopt_orphans()
    sizes = "quick, " if args.quick else ""
    timeline = Timeline(phases(args.start_cap), f"rehearsal of {args.archive.name} ({sizes}{args.model_dir.name})")
    print(timeline.heading, file=sys.stderr, flush=True)
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > BUSY_SHARE * cores:
        timeline.note(f"load average {load:.1f} on {cores} cores at the start: times and speed-ups mean little")
    code = 1
    with tempfile.TemporaryDirectory(prefix="rehearse-drafter-") as staging:
        try:
            archive = archive_phase(timeline, args.archive)
            local = args.drafter
            if local is None and archive.manifest is None and args.model_dir == DEFAULT_MODEL and not args.no_drafter:
                local = DEFAULT_DRAFTER
            drafter_phase(timeline, archive, local, Path(staging) / "drafter")
            if not args.check_only:
                isolation = Isolation(False, False, "--no-namespaces") if args.no_namespaces else isolate()
                rehearse(args, timeline, isolation, Path(staging))
            code = 0
        except Stopped:
            pass
        except KeyboardInterrupt:
            code = 130
        finally:
            end_descendants()
    timeline.write(args.out)
    if args.json:
        write_report(args.json, timeline.to_json())
    print(timeline.text())
    if timeline.facts.get("score"):
        print(f"score (geometric mean of speed-ups over the naive reference here): {timeline.facts['score']:.3f}")
    print(f"{'passed' if code == 0 else 'FAILED'}; {args.out}/timeline.html")
    return code


if __name__ == "__main__":
    sys.exit(main())
