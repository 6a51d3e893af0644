"""A whole tiny training run in a folder, and trainer processes that start in a moment because they are forked.

``python -m tests.drafter_train.tiny_runs`` reads one JSON line of arguments for each job from stdin, forks a child for
it that trains, and prints the child's exit status. The parent has imported everything and started no thread.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from drafter_train.chat import ChatTokenizer
from drafter_train.tokens import Response, TokenStore
from eval.servers import free_port
from tests.tiny_models import write_model

ROOT = Path(__file__).resolve().parents[2]


def write_store(target: Path, folder: Path, count: int, seed: int = 0, categories: Sequence[str] = ("a", "b")) -> None:
    """Prompts and responses of random ids (the drafter's quality is of no interest here)."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(4, 300, rng.integers(3, 12)).tolist() for _ in range(count)]
    meta = {
        "fingerprint": ChatTokenizer(target).fingerprint.to_json(),
        "passes": [],
        "ids": [str(i) for i in range(count)],
        "categories": [categories[i % len(categories)] for i in range(count)],
    }
    store = TokenStore.create(folder, prompts, meta)
    rows = [Response(i, 0, rng.integers(4, 300, rng.integers(6, 30)), 0, False) for i in range(count)]
    store.append(rows, "000of001")


def write_run(folder: Path, *, samples: int = 23, name: str = "run", target: Path | None = None, **train: Any) -> Path:
    """A recipe with its target and token stores in ``folder``; returns the recipe's path."""
    place = target or folder / "target"
    if not place.exists():
        write_model(place, "llama", hidden_size=32, intermediate_size=48, num_hidden_layers=3, scale=1.0)
    tokens, held_out = folder / f"tokens-{samples}", folder / "eval"
    for store, count in ((tokens, samples), (held_out, 4)):
        if not store.exists():
            write_store(place, store, count, seed=count)
    settings = {
        "output": str(folder / name),
        "batch_sequences": 4,
        "micro_sequences": 2,
        "anchors": 4,
        "max_steps": 12,
        "log_every": 1,
        "save_every_seconds": 0.0,
        "optimizer": "muon",
        "eval_every": 0,
        **train,
    }
    recipe = {
        "name": "tiny",
        "target": str(place),
        "data": {"tokens": str(tokens), "eval_tokens": str(held_out), "max_length": 64},
        "draft": {"layers": 1, "block_size": 4, "mask_token_id": 3, "taps": 2, "target_layer_ids": [0, 1]},
        "train": settings,
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def metrics(output: Path) -> list[dict[str, Any]]:
    """The logged steps without what depends on the clock."""
    lines = (output / "metrics.jsonl").read_text().splitlines()
    timed = ("seconds", "steps_per_second")
    return [{k: v for k, v in json.loads(line).items() if k not in timed} for line in lines]


class Forge:
    """Trainer processes on request. ``run`` waits for one, or for ``world`` of them that train together."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.drafter_train.tiny_runs"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment,
        )

    def run(self, recipe: Path, *options: str, world: int = 1, **when: Any) -> list[int]:
        """Exit statuses by rank; a negative one is the signal that ended it. ``when`` may hold ``signal`` and
        ``after_steps`` (logged beyond the last checkpoint) and ``delay`` (seconds on top): when to send that signal to
        rank 0; and ``folders``, where each rank runs."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        argv = ["--config", str(recipe), "--device", "cpu", *options]
        job = {"argv": argv, "world": world, "log": str(recipe.with_suffix(".log")), **when}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        statuses: list[int] = json.loads(self._process.stdout.readline())
        return statuses

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=120)


def _child(job: dict[str, Any], rank: int, port: int) -> None:
    import torch

    from drafter_train.train import main

    if "folders" in job:
        os.chdir(job["folders"][rank])
    log = os.open(job["log"] if rank == 0 else os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if job["world"] > 1:
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job["world"]), LOCAL_WORLD_SIZE=str(job["world"])
        )
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), ACCELERATE_USE_CPU="true")
    torch.set_num_threads(1)
    status = 70
    try:
        status = main(job["argv"])
    finally:
        os._exit(status)


def _serve() -> None:
    import accelerate  # noqa: F401
    import torch  # noqa: F401
    import transformers.models.auto.tokenization_auto  # noqa: F401
    from transformers import PreTrainedTokenizerFast  # noqa: F401

    import drafter_train.train  # noqa: F401

    answers = os.dup(1)
    for line in sys.stdin:
        job = json.loads(line)
        port = free_port()
        recipe = yaml.safe_load(Path(job["argv"][1]).read_text())
        output = Path(recipe["train"]["output"])
        wanted = _saved_step(output) + int(job.get("after_steps", 0))
        stale = _logged(output)
        children = []
        for rank in range(job["world"]):
            pid = os.fork()
            if pid == 0:
                _child(job, rank, port)
            children.append(pid)
        statuses: dict[int, int] = {}
        deadline = time.monotonic() + 240
        wake = None
        while len(statuses) < len(children):
            done, code = os.waitpid(-1, os.WNOHANG)
            if done:
                statuses[done] = os.waitstatus_to_exitcode(code)
                continue
            now = time.monotonic()
            if now > deadline:
                for pid in set(children) - set(statuses):
                    os.kill(pid, signal.SIGKILL)
            if "signal" in job and wake is None:
                lines = _logged(output)
                if not job.get("after_steps") or (lines != stale and len(lines) >= wanted):
                    wake = now + float(job.get("delay", 0))
            if wake is not None and now >= wake and "signal" in job and children[0] not in statuses:
                os.kill(children[0], job.pop("signal"))
            time.sleep(0.002)
        os.write(answers, (json.dumps([statuses[pid] for pid in children]) + "\n").encode())


def _saved_step(output: Path) -> int:
    latest = output / "latest"
    return int(latest.read_text().removeprefix("step-")) if latest.exists() else 0


def _logged(output: Path) -> list[str]:
    path = output / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def random_moments(count: int, seed: int = 1) -> list[dict[str, Any]]:
    """Some before the first step, most during or after some of them: however slow the machine is, those get on."""
    rng = random.Random(seed)
    return [
        {"after_steps": rng.randint(2, 5) if i % 5 else 0, "delay": rng.uniform(0, 0.02 if i % 5 else 0.4)}
        for i in range(count)
    ]


if __name__ == "__main__":
    _serve()
