"""A Slurm of one machine for tests: sbatch, srun, scontrol, sinfo and squeue that do locally what the scripts rely on.

``SlurmStandIn(folder)`` puts the commands in ``folder/bin``; ``run(...)`` then executes what sbatch queued, one task
at a time, with Slurm's variables, array tasks, dependencies, USR1 to the batch shell alone, and requeues under one id.
An srun starts one process for each node and hands signals to every process of every task, as slurmd does. Run as a
command, this file is the command that it is named by its first argument. Standard library only: it starts in a moment.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

COMMANDS = ("sbatch", "srun", "scontrol", "sinfo", "squeue")
SINFO = "gpu*|3-00:00:00|4|gpu:a100:8(S:0-1)|a100_80gb,ib\nstandard|7-00:00:00|9|(null)|(null)\n"


def descendants(root: int) -> list[int]:
    """``root`` and every process below it, from /proc."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                text = (entry / "stat").read_text()
            except OSError:
                continue
            parents[int(entry.name)] = int(text.rsplit(")", 1)[1].split()[1])
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


class SlurmStandIn:
    """The queue. ``jobs`` is what sbatch wrote: id, script, options, tasks, state."""

    def __init__(self, folder: Path, sinfo: str = SINFO) -> None:
        self.folder = folder
        (folder / "bin").mkdir(parents=True)
        (folder / "sinfo.txt").write_text(sinfo)
        for name in COMMANDS:
            program = folder / "bin" / name
            program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "{__file__}" {name} "$@"\n')
            program.chmod(0o755)
        path = f"{folder / 'bin'}:{os.environ['PATH']}"
        self.environment: dict[str, str] = {**os.environ, "PATH": path, "SLURM_STAND_IN": str(folder)}

    def jobs(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob("job-*.json"))]

    def state(self, job: str) -> str:
        return str(json.loads((self.folder / f"job-{job}.json").read_text())["state"])

    def refuse_requeues(self) -> None:
        (self.folder / "no-requeue").touch()

    def run(self, warn: Callable[[], bool] = lambda: False, number: int = signal.SIGUSR1, limit: float = 300) -> None:
        """Run what is queued until nothing can start. Once ``warn`` says so, the running batch shell gets the signal;
        SIGTERM stands for a cancelled job, and goes to its steps as well."""
        deadline = time.monotonic() + limit
        warned = False
        while ready := [job for job in self.jobs() if job["state"] == "PENDING" and self._may_start(job)]:
            job = ready[0]
            states = []
            for task in job["tasks"]:
                while True:
                    process = self._start(job, task)
                    while process.poll() is None:
                        if not warned and warn():
                            warned = True
                            pids = descendants(process.pid) if number == signal.SIGTERM else [process.pid]
                            for pid in pids:
                                os.kill(pid, number)
                        if time.monotonic() > deadline:
                            for pid in descendants(process.pid):
                                os.kill(pid, signal.SIGKILL)
                        time.sleep(0.01)
                    flag = self.folder / f"requeue-{job['id']}"
                    if not flag.exists():
                        break
                    flag.unlink()
                    job["restarts"] += 1
                states.append(process.returncode)
            job["state"] = "FAILED" if any(states) else "COMPLETED"
            self._write(job)

    def _write(self, job: Mapping[str, Any]) -> None:
        (self.folder / f"job-{job['id']}.json").write_text(json.dumps(job))

    def _may_start(self, job: Mapping[str, Any]) -> bool:
        kind, _, other = str(job["after"]).partition(":")
        return not other or self.state(other) in {"afterok": ("COMPLETED",), "afterany": ("COMPLETED", "FAILED")}[kind]

    def _start(self, job: Mapping[str, Any], task: int | None) -> subprocess.Popen[bytes]:
        options: Mapping[str, str] = job["options"]
        nodes = int(options.get("nodes", "1"))
        environment = {
            **self.environment,
            "SLURM_JOB_ID": str(job["id"]),
            "SLURM_JOB_NODELIST": f"node[1-{nodes}]",
            "SLURM_NNODES": str(nodes),
            "SLURM_RESTART_COUNT": str(job["restarts"]),
        }
        log = options["output"].replace("%j", str(job["id"])).replace("%A", str(job["id"])).replace("%a", str(task))
        if task is not None:
            environment["SLURM_ARRAY_TASK_ID"] = str(task)
        with open(log, "ab") as out:  # --open-mode=append
            return subprocess.Popen(
                ["bash", job["script"]], stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=environment
            )


def tasks_of(text: str) -> list[int | None]:
    """``0-7%2`` or ``3``; no array is one task without a number."""
    if not text:
        return [None]
    low, _, high = text.partition("%")[0].partition("-")
    return list(range(int(low), int(high or low) + 1))


def sbatch(folder: Path, words: list[str]) -> int:
    script = Path(words.pop())
    text = script.read_text()
    lines = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]
    options: dict[str, str] = {}
    for word in [*lines, *words]:
        name, _, value = word.removeprefix("--").partition("=")
        options[name] = value
    if not options.get("partition"):
        print("sbatch: error: no partition was named", file=sys.stderr)
        return 1
    number = 1000 + len(list(folder.glob("job-*.json")))
    copy = folder / f"spool-{number}.sh"  # as slurmd runs a copy, and not the file
    copy.write_text(text)
    job = {"id": number, "script": str(copy), "options": options, "tasks": tasks_of(options.get("array", ""))}
    job |= {"after": options.get("dependency", ""), "state": "PENDING", "restarts": 0}
    (folder / f"job-{number}.json").write_text(json.dumps(job))
    print(number if "parsable" in options else f"Submitted batch job {number}")
    return 0


def srun(words: list[str]) -> int:
    while words and words[0].startswith("-"):
        words.pop(0)
    tasks: list[subprocess.Popen[bytes]] = []

    def forward(number: int, _frame: object) -> None:
        for task in tasks:
            for pid in descendants(task.pid) if task.poll() is None else []:
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    continue

    signal.signal(signal.SIGUSR1, forward)
    signal.signal(signal.SIGTERM, forward)
    for i in range(int(os.environ["SLURM_NNODES"])):
        tasks.append(subprocess.Popen(words, env={**os.environ, "SLURM_NODEID": str(i), "SLURM_PROCID": str(i)}))
    codes = [task.wait() for task in tasks]
    return max(128 - code if code < 0 else code for code in codes)


def scontrol(folder: Path, words: list[str]) -> int:
    if words[0] == "requeue":
        if (folder / "no-requeue").exists():
            print("scontrol: error: requeue is not allowed", file=sys.stderr)
            return 1
        (folder / f"requeue-{words[1]}").touch()
        return 0
    if words[:2] == ["show", "hostnames"]:
        stem, low, high = re.fullmatch(r"(\w+)\[(\d+)-(\d+)\]", words[2]).groups()  # type: ignore[union-attr]
        print("\n".join(f"{stem}{i}" for i in range(int(low), int(high) + 1)))
        return 0
    if words[:2] == ["show", "node"]:
        print(f"NodeName={words[2]} Arch=x86_64\n   NodeAddr=127.0.0.1 NodeHostName={words[2]} Version=22.05")
        return 0
    if words[:2] == ["show", "config"]:
        print("Configuration data\nJobRequeue              = 0\nMaxArraySize            = 1001")
        return 0
    return 1


def command(name: str, words: list[str]) -> int:
    folder = Path(os.environ["SLURM_STAND_IN"])
    if name == "sbatch":
        return sbatch(folder, words)
    if name == "srun":
        return srun(words)
    if name == "scontrol":
        return scontrol(folder, words)
    if name == "sinfo":
        print("slurm 22.05.8" if "--version" in words else (folder / "sinfo.txt").read_text(), end="")
        return 0
    for path in sorted(folder.glob("job-*.json")):
        job = json.loads(path.read_text())
        print(job["id"], job["state"])
    return 0


if __name__ == "__main__":
    sys.exit(command(sys.argv[1], sys.argv[2:]))
