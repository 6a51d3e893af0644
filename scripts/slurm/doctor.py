"""Looks at a cluster before the first job: ``python -m scripts.slurm.doctor [--write] [--on PARTITION --gpu TYPE]``.

Partitions and GPU types, limits, accounts, space and quota, caches, hub access and token, each as Slurm and the machine
tell it; no cluster is known here. ``--on`` repeats what can differ on a compute node there, through a short srun.
``--write`` proposes ``runs/slurm/site.yaml``. Exit status 1 when something would stop a job. Standard library only, so
that it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parents[2]
SITE_FILE = ROOT / "runs" / "slurm" / "site.yaml"
SEGMENT_SECONDS = 2 * 3600 + 59 * 60
NEEDED_GB = 60


@dataclass
class Report:
    """Lines in order; ``bad`` counts those that would stop a job."""

    lines: list[str] = field(default_factory=list)
    bad: int = 0

    def good(self, text: str) -> None:
        self.lines.append(f"ok    {text}")

    def note(self, text: str) -> None:
        self.lines.append(f"note  {text}")

    def fault(self, text: str) -> None:
        self.lines.append(f"FAULT {text}")
        self.bad += 1


@dataclass(frozen=True)
class Partition:
    """``gpus``: type -> GPUs per node. ``seconds`` is None without a limit."""

    name: str
    seconds: int | None
    nodes: int
    gpus: dict[str, int]
    features: frozenset[str]
    default: bool


def ask(*command: str, timeout: float = 20) -> str | None:
    """What a command prints, or None when it is missing, fails or hangs."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout if result.returncode == 0 else None


def seconds_of(text: str) -> int | None:
    """``[DAYS-]HH:MM:SS``, ``MM:SS`` or ``infinite`` as Slurm prints a limit."""
    days, _, clock = text.rpartition("-")
    parts = clock.split(":")
    if not all(part.isdigit() for part in parts) or (days and not days.isdigit()):
        return None
    total = 0
    for part in parts:
        total = total * 60 + int(part)
    return total * (60 if len(parts) == 1 else 1) + int(days or 0) * 86400


def gpus_of(gres: str) -> dict[str, int]:
    """``gpu:a100:8(S:0-1),gpu:2`` -> {"a100": 8, "": 2}; the type is empty where Slurm names none."""
    found: dict[str, int] = {}
    for item in re.sub(r"\([^)]*\)", "", gres).split(","):
        parts = item.split(":")
        if parts[0] == "gpu" and parts[-1].isdigit():
            kind = parts[1] if len(parts) > 2 else ""
            found[kind] = max(found.get(kind, 0), int(parts[-1]))
    return found


def read_partitions(text: str) -> list[Partition]:
    """From ``sinfo -h -o "%P|%l|%D|%G|%f"``, whose lines are one for each kind of node."""
    found: dict[str, Partition] = {}
    for line in text.splitlines():
        name, limit, nodes, gres, features = (line.strip().split("|") + [""] * 5)[:5]
        key = name.rstrip("*")
        old = found.get(key)
        tags = frozenset(features.replace("(null)", "").split(",")) - {""}
        gpus = gpus_of(gres)
        if old is not None:
            gpus = {**old.gpus, **{kind: max(count, old.gpus.get(kind, 0)) for kind, count in gpus.items()}}
        found[key] = Partition(
            name=key,
            seconds=seconds_of(limit),
            nodes=int(nodes) + (old.nodes if old else 0),
            gpus=gpus,
            features=tags | (old.features if old else frozenset()),
            default=name.endswith("*"),
        )
    return list(found.values())


def look_at_slurm(report: Report) -> list[Partition]:
    version = ask("sinfo", "--version")
    if version is None:
        report.fault("sinfo does not answer: no Slurm here, or its controller is down")
        return []
    report.good(version.strip())
    partitions = read_partitions(ask("sinfo", "-h", "-o", "%P|%l|%D|%G|%f") or "")
    for part in partitions:
        gpus = ", ".join(f"{count} x {kind or 'a GPU without a type'}" for kind, count in sorted(part.gpus.items()))
        limit = "no limit" if part.seconds is None else f"{part.seconds / 3600:g} h"
        text = f"partition {part.name}: {part.nodes} nodes, {limit}, {gpus or 'no GPU'}"
        if part.features:
            text += f"; features {', '.join(sorted(part.features))}"
        report.good(text)
        if part.gpus and part.seconds is not None and part.seconds < SEGMENT_SECONDS:
            report.note(f"{part.name} allows {part.seconds} s: shorten the segments with --time")
        if len(part.gpus) > 1:
            report.note(f"{part.name} has {len(part.gpus)} types of GPU: a job that names none may get any of them")
    if not any(part.gpus for part in partitions):
        report.note("no partition has a GPU in its gres")
    config = dict(re.findall(r"^(\w+)\s*=\s*(.*)$", ask("scontrol", "show", "config") or "", re.MULTILINE))
    if config.get("JobRequeue") == "0":
        report.note("jobs are not requeued by default here; the scripts ask for it with --requeue")
    if (config.get("MaxArraySize") or "").isdigit():
        report.good(
            f"job arrays: up to {int(config['MaxArraySize']) - 1} tasks; requeue: JobRequeue={config.get('JobRequeue')}"
        )
    return partitions


def look_at_accounts(report: Report) -> list[str]:
    user = os.environ.get("USER") or ask("id", "-un") or ""
    text = ask("sacctmgr", "-nP", "show", "assoc", f"user={user.strip()}", "format=account")
    accounts = sorted({line.strip() for line in (text or "").splitlines() if line.strip()})
    if accounts:
        report.good(f"accounts: {', '.join(accounts)}")
    else:
        report.note("no accounts are listed (no accounting, or it may not be asked); --account may still be needed")
    return accounts


def scratch_candidates(environment: Mapping[str, str]) -> list[Path]:
    """Where clusters put a person's scratch: what the environment names, then the usual place if it is there."""
    user = environment.get("USER") or environment.get("LOGNAME") or ""
    named = [environment[name] for name in ("SCRATCH", "SCRATCHDIR", "WORK", "WORKDIR") if environment.get(name)]
    return [path for path in map(Path, [*named, *([f"/scratch/{user}"] if user else [])]) if path.is_dir()]


def look_at_space(report: Report, scratch: Path | None) -> None:
    for label, path in (("home", Path.home()), ("project", ROOT), ("scratch", scratch)):
        if path is None:
            report.fault("no scratch folder was found: name one with --scratch")
            continue
        if not path.is_dir() or not os.access(path, os.W_OK):
            report.fault(f"{label} {path} is not a folder that you may write to")
            continue
        free = shutil.disk_usage(path).free / 1e9
        text = f"{label} {path}: {free:,.0f} GB free on its file system"
        if label == "scratch" and free < NEEDED_GB:
            report.note(f"{text}; a 4B target with its responses and checkpoints wants {NEEDED_GB}")
        else:
            report.good(text)
    quota = ask("quota", "-s")
    if quota and quota.strip():
        report.good("quota:\n" + "\n".join(f"        {line}" for line in quota.strip().splitlines()))
    else:
        report.note("the command quota says nothing here; free space above is the whole file system's, not yours")


def look_at_hub(report: Report, environment: Mapping[str, str], where: str) -> bool:
    """Whether a connection to the hub can be made from here. No token is sent."""
    endpoint = urlsplit(environment.get("HF_ENDPOINT", "https://huggingface.co"))
    port = endpoint.port or (443 if endpoint.scheme == "https" else 80)
    try:
        socket.create_connection((endpoint.hostname or "", port), timeout=5).close()
    except OSError as error:
        proxy = environment.get("HTTPS_PROXY") or environment.get("https_proxy")
        way = f"; there is a proxy, {urlsplit(proxy).hostname}, which may do" if proxy else ""
        report.note(f"{where}: {endpoint.hostname} is not reached directly ({error}): use offline mode there{way}")
        return False
    report.good(f"{where}: {endpoint.hostname}:{port} is reached")
    return True


def look_at_token(report: Report, environment: Mapping[str, str]) -> None:
    home = Path(environment.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    path = Path(environment.get("HF_TOKEN_PATH") or home / "token")
    if environment.get("HF_TOKEN"):
        report.good("HF_TOKEN is set")
    elif path.is_file():
        report.good(f"a hub token is in {path}")
    else:
        report.note("no hub token: publishing will need HF_TOKEN or hf auth login")


def look_at_node(report: Report, partition: str, gpu: str, account: str, scratch: Path | None) -> bool:
    """Hub, GPU and scratch as seen from a node of ``partition``; whether the hub is reached from there."""
    command = ["srun", f"--partition={partition}", "--nodes=1", "--ntasks=1", "--time=00:05:00"]
    command += [*([f"--gres=gpu:{gpu}:1"] if gpu else []), *([f"--account={account}"] if account else [])]
    command += [sys.executable, str(Path(__file__).resolve()), "--probe", str(scratch or "")]
    report.note(f"asking a node of {partition}; this waits in its queue")
    text = ask(*command, timeout=1800)
    if text is None:
        report.fault(f"no job could be run with: {' '.join(command[:-3])}")
        return False
    seen = json.loads(text.strip().splitlines()[-1])
    for line in seen["lines"]:
        report.lines.append(line)
    report.bad += int(seen["bad"])
    return bool(seen["hub"])


def probe(scratch: str) -> int:
    """On the compute node: one JSON line for ``look_at_node``."""
    report = Report()
    node = socket.gethostname()
    hub = look_at_hub(report, os.environ, node)
    cards = ask("nvidia-smi", "--query-gpu=name,memory.total,compute_cap,driver_version", "--format=csv,noheader")
    if cards:
        for card in cards.strip().splitlines():
            report.good(f"{node}: {card}")
    else:
        report.note(f"{node}: nvidia-smi shows no GPU")
    if scratch and os.access(scratch, os.W_OK):
        report.good(f"{node}: {scratch} can be written")
    elif scratch:
        report.fault(f"{node}: {scratch} cannot be written there")
    print(json.dumps({"lines": report.lines, "bad": report.bad, "hub": hub}))
    return 0


def site_text(
    partitions: Sequence[Partition], gpu: str, account: str, scratch: Path | None, offline: bool, wanted: str
) -> str:
    """A site file: the named partition, or the first that has the GPU and allows a segment. Values are JSON texts,
    which YAML reads alike."""
    fitting = [p for p in partitions if p.gpus and (gpu in p.gpus if gpu else True)]
    long_enough = [p for p in fitting if p.seconds is None or p.seconds >= SEGMENT_SECONDS]
    chosen = next((p for p in fitting if p.name == wanted), None) or next(iter(long_enough or fitting), None)
    plain = next((p for p in partitions if not p.gpus), None)
    types = sorted(kind for kind in (chosen.gpus if chosen else {}) if kind)
    values = {
        "scratch": str((scratch or Path("/set/me")) / "foretoken"),
        "account": account,
        "partition": chosen.name if chosen else "",
        "cpu_partition": plain.name if plain else "",
        "gpu": gpu or (types[0] if len(types) == 1 else ""),
    }
    lines = [f"{name}: {json.dumps(value)}" for name, value in values.items()]
    if not values["gpu"] and types:
        lines[-1] += f"   # one of {', '.join(types)}"
    lines += ['time: "02:59:00"', "cpus: 8           # of each GPU", "memory_gb: 64     # of each GPU"]
    lines += [
        f"offline: {str(offline).lower()}   # whether compute nodes reach the hub",
        "setup: []   # shell lines: modules",
    ]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.slurm.doctor", description=__doc__)
    parser.add_argument("--on", default="", metavar="PARTITION", help="also look from a compute node there")
    parser.add_argument("--gpu", default="", help="GPU type to ask for, as in gres")
    parser.add_argument("--account", default="", help="account to charge (default: the only one)")
    parser.add_argument("--scratch", type=Path, help="fast folder (default: the first that the environment names)")
    parser.add_argument("--write", action="store_true", help=f"propose {SITE_FILE.relative_to(ROOT)} (kept if there)")
    parser.add_argument("--site", type=Path, default=SITE_FILE, help="in place of that file")
    parser.add_argument("--probe", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.probe is not None:
        return probe(args.probe)
    report = Report()
    partitions = look_at_slurm(report)
    accounts = look_at_accounts(report)
    account = args.account or (accounts[0] if len(accounts) == 1 else "")
    scratch = args.scratch or next(iter(scratch_candidates(os.environ)), None)
    look_at_space(report, scratch)
    online = look_at_hub(report, os.environ, "here")
    look_at_token(report, os.environ)
    if args.on:
        online = look_at_node(report, args.on, args.gpu, account, scratch)
    print("\n".join(report.lines))
    if args.write and args.site.exists():
        print(f"note  {args.site} is there and was kept")
    elif args.write:
        args.site.parent.mkdir(parents=True, exist_ok=True)
        args.site.write_text(site_text(partitions, args.gpu, account, scratch, not online, args.on), encoding="utf-8")
        print(f"ok    wrote {args.site}: read it before the first job")
    return 1 if report.bad else 0


if __name__ == "__main__":
    sys.exit(main())
