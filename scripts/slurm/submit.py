"""Sends the steps of a drafter to Slurm: ``python -m scripts.slurm.submit STEP --config RECIPE [...]``.

STEP is one of download, prompts, generate-eval, generate, train, evaluate, publish, or ``all`` (from ``--from`` to
``--to``, each waiting for the one before). ``--dry-run`` prints the scripts; ``--here`` runs them now in this shell,
without Slurm (for what needs the network on a login node). What comes behind ``--`` goes to the step's own command.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from drafter_train.recipe import load_recipe
from scripts.slurm.render import NEEDS_HUB, ROOT, STEPS, Job, render
from scripts.slurm.site import Site, SiteError, load_site

SITE_FILE = ROOT / "runs" / "slurm" / "site.yaml"
_SITE_OPTIONS = ("account", "partition", "cpu-partition", "qos", "gpu", "constraint", "exclude", "time", "scratch")


def say(message: str) -> None:
    print(f"submit: {message}", file=sys.stderr, flush=True)


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, argparse.ArgumentParser]:
    words, extra = list(argv), []
    if "--" in words:
        cut = words.index("--")
        words, extra = words[:cut], words[cut + 1 :]
    parser = argparse.ArgumentParser(prog="python -m scripts.slurm.submit", description=__doc__)
    parser.add_argument("step", choices=(*STEPS, "all"))
    parser.add_argument("--config", required=True, help="YAML recipe")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--site", type=Path, help="YAML file of the cluster (default: runs/slurm/site.yaml if there)")
    for name in _SITE_OPTIONS:
        parser.add_argument(f"--{name}", help="in place of the site file's setting")
    parser.add_argument("--cpus", type=int, help="CPUs per GPU, or of a job without one")
    parser.add_argument("--memory-gb", type=int, help="memory per GPU, or of a job without one")
    parser.add_argument("--offline", action="store_true", default=None, help="compute nodes do not reach the hub")
    parser.add_argument("--gpus", type=int, default=1, help="of training: GPUs of each node (default: 1)")
    parser.add_argument("--nodes", type=int, default=1, help="of training (default: 1)")
    parser.add_argument("--shards", type=int, default=8, help="of generation: tasks of the array (default: 8)")
    parser.add_argument("--at-once", type=int, default=0, help="of generation: tasks that run together (0: all)")
    parser.add_argument("--source", dest="sources", action="append", default=[], help="of prompts; may be repeated")
    parser.add_argument("--repo", default="", help="of publish: OWNER/NAME (default: the recipe's)")
    parser.add_argument("--from", dest="first", choices=STEPS, help="of all: first step (default: generate-eval)")
    parser.add_argument("--to", dest="last", choices=STEPS, help="of all: last step (default: evaluate)")
    parser.add_argument("--after", default="", metavar="JOB", help="start when this job has succeeded")
    parser.add_argument("--folder", type=Path, help="for scripts and logs (default: runs/slurm/RECIPE)")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--dry-run", action="store_true", help="print the scripts and the sbatch commands")
    how.add_argument("--here", action="store_true", help="run the steps now, one after the other, without Slurm")
    args = parser.parse_args(words)
    args.extra = extra
    return args, parser


def jobs_of(args: argparse.Namespace) -> list[Job]:
    """The steps that were asked for. Raises SiteError, ValueError or OSError."""
    recipe = load_recipe(args.config, args.overrides)
    if args.step != "all":
        steps: Sequence[str] = (args.step,)
        if args.first or args.last:
            raise SiteError(f"--from and --to belong to all, not to {args.step}")
    else:
        first, last = STEPS.index(args.first or "generate-eval"), STEPS.index(args.last or "evaluate")
        steps = STEPS[first : last + 1]
        if not steps:
            raise SiteError(f"--from {args.first} comes after --to {args.last}")
        if args.extra:
            raise SiteError("options behind -- belong to one step, not to all")
    return [
        Job(
            step=step,
            recipe=recipe,
            config=args.config,
            overrides=tuple(args.overrides),
            gpus=args.gpus,
            nodes=args.nodes,
            shards=args.shards,
            at_once=args.at_once,
            sources=tuple(args.sources),
            repo=args.repo,
            extra=tuple(args.extra),
        )
        for step in steps
    ]


def site_of(args: argparse.Namespace) -> Site:
    """The site file under the options. Raises SiteError or OSError."""
    names = [option.replace("-", "_") for option in _SITE_OPTIONS] + ["cpus", "memory_gb", "offline"]
    path = args.site or (SITE_FILE if SITE_FILE.exists() else None)
    return load_site(path, {name: getattr(args, name) for name in names})


def sbatch(script: Path, after: str) -> str:
    """Submit, and return the job's id. Raises SiteError with what sbatch said."""
    words = ["sbatch", "--parsable", *([f"--dependency=afterok:{after}", "--kill-on-invalid-dep=yes"] if after else [])]
    result = subprocess.run([*words, str(script)], capture_output=True, text=True)
    if result.returncode != 0:
        raise SiteError(f"sbatch refused {script}: {result.stderr.strip()}")
    return result.stdout.strip().split(";")[0]


def carry_out(jobs: Sequence[Job], site: Site, args: argparse.Namespace) -> int:
    """Print, run or submit. Raises SiteError or OSError."""
    folder: Path = (args.folder or ROOT / "runs" / "slurm" / jobs[0].recipe.name).resolve()
    scripts = {job.step: folder / f"{job.step}.sh" for job in jobs}
    texts = {job.step: render(job, site, scripts[job.step]) for job in jobs}
    if args.dry_run:
        for job in jobs:
            print(texts[job.step], end="")
        return 0
    if not args.here and shutil.which("sbatch") is None:
        raise SiteError("there is no sbatch here; --dry-run prints the scripts, --here runs them without Slurm")
    folder.mkdir(parents=True, exist_ok=True)
    for step, text in texts.items():
        scripts[step].write_text(text, encoding="utf-8")
    if args.here:
        for job in jobs:
            count = job.shards if job.step == "generate" else 1
            for task in range(count):
                say(f"{job.step}" + (f", shard {task} of {count}" if count > 1 else ""))
                # In an interactive job the script must not take that job for its own.
                environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
                environment["SLURM_ARRAY_TASK_ID"] = str(task)
                status = subprocess.run(["bash", str(scripts[job.step])], cwd=ROOT, env=environment).returncode
                if status:
                    return status
        return 0
    after = args.after
    for job in jobs:
        if site.offline and job.step in NEEDS_HUB:
            raise SiteError(f"{job.step} needs the hub and the site is offline: run it with --here where there is one")
        after = sbatch(scripts[job.step], after)
        say(f"{job.step} is job {after}; log beside {scripts[job.step]}")
        print(after, flush=True)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    args, parser = parse(sys.argv[1:] if argv is None else argv)
    try:
        return carry_out(jobs_of(args), site_of(args), args)
    except (OSError, ValueError, yaml.YAMLError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
