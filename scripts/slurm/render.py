"""Job scripts: an ``#SBATCH`` header and the values of one step, then the templates as they are. Text in, text out.

The templates hold no placeholders; every value reaches them as a quoted shell variable, so what a recipe or a path
holds cannot become code. This file starts nothing and asks Slurm nothing.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from drafter_train.recipe import Recipe
from scripts.slurm.site import NAME, Site, SiteError

ROOT = Path(__file__).resolve().parents[2]
TEMPLATES = Path(__file__).resolve().parent / "templates"
# In the order in which a drafter is made.
STEPS = ("download", "prompts", "generate-eval", "generate", "train", "evaluate", "publish")
NEEDS_HUB = ("download", "prompts", "publish")
USES_GPU = ("generate-eval", "generate", "train", "evaluate")
RESEND_SECONDS = 20


@dataclass(frozen=True)
class Job:
    """One step of one recipe. ``config`` and ``overrides`` are its ``--config`` and ``--set``; ``shards`` is the size
    of the array, of which ``at_once`` tasks run together (0: all); ``extra`` goes to the step's command as it is."""

    step: str
    recipe: Recipe
    config: str
    overrides: tuple[str, ...] = ()
    gpus: int = 1
    nodes: int = 1
    shards: int = 1
    at_once: int = 0
    sources: tuple[str, ...] = ()
    repo: str = ""
    extra: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.step not in STEPS:
            raise SiteError(f"step must be one of {', '.join(STEPS)}, got {self.step!r}")
        for name, top in (("gpus", 64), ("nodes", 1024), ("shards", 1000)):
            if not 1 <= getattr(self, name) <= top:
                raise SiteError(f"{name} must be between 1 and {top}, got {getattr(self, name)}")
        if self.at_once < 0:
            raise SiteError(f"at-once must be 0 or more, got {self.at_once}")
        if not NAME.fullmatch(self.recipe.name):
            raise SiteError(f"the recipe's name names the job, so it must be one word, got {self.recipe.name!r}")
        if self.step == "prompts" and not self.sources:
            raise SiteError("prompts needs at least one source, e.g. --source hub:DATASET or --source file:PATH")
        if self.step == "publish" and not (self.repo or self.recipe.publish.repo):
            raise SiteError("publish needs --repo OWNER/NAME or publish.repo in the recipe")

    @property
    def name(self) -> str:
        return f"{self.recipe.name}-{self.step}"

    def on_gpu(self) -> bool:
        """Prompts need one only when the target writes them itself."""
        return self.step in USES_GPU or (self.step == "prompts" and any(s.startswith("self:") for s in self.sources))


def _arguments(job: Job) -> list[str]:
    """The words behind the step's module."""
    words = ["--config", job.config]
    for override in job.overrides:
        words += ["--set", override]
    if job.step == "prompts":
        words += [*(["--device", "cuda"] if job.on_gpu() else []), *job.sources]
    elif job.step == "generate-eval":
        words += ["--split", "eval"]
    elif job.step == "evaluate":
        words += ["--drafter", f"{job.recipe.train.output}/final"]
    elif job.step == "publish" and job.repo:
        words += ["--repo", job.repo]
    return [*words, *job.extra]


def _header(job: Job, site: Site, log: str) -> list[str]:
    gpu = job.on_gpu()
    per_node = job.gpus if job.step == "train" else 1
    partition = site.partition if gpu else site.cpu_partition or site.partition
    if gpu and not site.gpu:
        raise SiteError(
            f"gpu is missing: {job.step} must name a GPU type (see the doctor), or Slurm gives it any; none is a CPU"
        )
    options = {
        "job-name": job.name,
        "account": site.account,
        "partition": partition,
        "qos": site.qos,
        "nodes": str(job.nodes if job.step == "train" else 1),
        "ntasks-per-node": "1",
        "cpus-per-task": str(site.cpus * per_node),
        "mem": f"{site.memory_gb * per_node}G",
        "gres": f"gpu:{site.gpu}:{per_node}" if gpu and site.gpu != "none" else "",
        "constraint": site.constraint if gpu else "",
        "exclude": site.exclude,
        "time": site.time,
        "signal": "B:USR1@300",
        "open-mode": "append",
        "output": log,
    }
    if job.step == "generate":
        options["array"] = f"0-{job.shards - 1}" + (f"%{job.at_once}" if job.at_once else "")
    lines = [f"#SBATCH --{name}={value}" for name, value in options.items() if value]
    return [*lines, "#SBATCH --requeue"]


def _assign(name: str, value: str | int | Sequence[str]) -> str:
    if isinstance(value, (str, int)):
        return f"{name}={shlex.quote(str(value))}"
    return f"{name}=({' '.join(shlex.quote(word) for word in value)})"


def render(job: Job, site: Site, script: Path, root: Path = ROOT) -> str:
    """The job's script, which will be saved as ``script``; its log lies beside it. Raises SiteError."""
    offline = site.offline and job.step not in NEEDS_HUB
    per_node = job.gpus if job.step == "train" else 1
    cpus = site.cpus * per_node
    python = site.python or str(root / ".venv" / "bin" / "python")
    values: list[tuple[str, str | int | Sequence[str]]] = [
        ("root", str(root)),
        ("script", str(script)),
        ("scratch", site.scratch),
        ("python", [*site.prefix, python]),
        ("arguments", _arguments(job)),
        ("offline", int(offline)),
        ("cpus", cpus),
        ("threads", site.cpus),
        ("resend", RESEND_SECONDS),
    ]
    template = "step"
    if job.step == "generate":
        template = "generate"
        values += [("shards", job.shards), ("output", job.recipe.data.tokens)]
    elif job.step == "generate-eval":
        template = "generate"
        values += [("shards", 1), ("output", job.recipe.data.eval_tokens)]
    elif job.step == "train":
        template = "train"
        values += [("nodes", job.nodes), ("gpus", job.gpus), ("output", job.recipe.train.output)]
    else:
        module = "scripts.slurm.fetch_target" if job.step == "download" else f"drafter_train.{job.step}"
        values.append(("module", module))
    if any(c.isspace() or c in "\"'%" for c in str(script)):
        raise SiteError(f"Slurm does not take {str(script)!r} for a log: no spaces, quotes or % in its folder")
    log = script.with_name(script.stem + ("-%A_%a.log" if job.step == "generate" else "-%j.log"))
    parts = [
        "#!/bin/bash",
        *_header(job, site, str(log)),
        "",
        f"# Made by python -m scripts.slurm.submit {job.step}, each time anew: change the site file instead.",
        *site.setup,
        "set -euo pipefail",
        *(_assign(name, value) for name, value in values),
    ]
    texts = [(TEMPLATES / f"{name}.sh").read_text(encoding="utf-8") for name in ("segment", template)]
    # The dialect line is for checking a template alone.
    bodies = [text.removeprefix("# shellcheck shell=bash\n").strip() for text in texts]
    return "\n".join(parts) + "\n\n" + "\n\n".join(bodies) + "\n"
