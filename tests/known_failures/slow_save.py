"""Two ranks, and a save of the first that takes longer than a collective may: run by ``python -m eval.known_failures``.

Not part of a test run, for it waits a minute and a half. As a program it is one rank, whose collectives have a time
limit and which, if it is the first, sleeps in its first save.
"""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from eval.servers import free_port
from tests.conftest import ROOT
from tests.drafter_train.tiny_runs import metrics, write_run


def _ranks(recipe: Path, limit: float, delay: float, *, patient: bool) -> list[int]:
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [
        sys.executable,
        "-m",
        "tests.known_failures.slow_save",
        str(recipe),
        str(limit),
        str(delay),
        str(patient),
    ]
    ranks = [
        subprocess.Popen(command, cwd=ROOT, env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(2)
    ]
    try:
        return [rank.wait(delay + 300) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


@pytest.mark.parametrize("samples", [5, 7])
def test_a_save_longer_than_a_collective_may_take_ends_nothing(tmp_path: Path, samples: int) -> None:
    recipe = write_run(tmp_path, samples=samples, max_steps=6, optimizer="adamw")
    assert _ranks(recipe, 60, 90, patient=True) == [0, 0]
    assert len(metrics(tmp_path / "run")) == 6


def test_ranks_that_waited_with_the_collectives_limit_would_fail(tmp_path: Path) -> None:
    """So that the test above shows something."""
    recipe = write_run(tmp_path, samples=5, max_steps=6, optimizer="adamw")
    assert _ranks(recipe, 8, 20, patient=False) != [0, 0]


def _one_rank(recipe: str, limit: float, delay: float, patient: bool) -> int:
    import torch
    import torch.distributed as dist

    import drafter_train.trainer
    from drafter_train.cluster import Cluster
    from drafter_train.train import main

    torch.set_num_threads(1)
    trainer: Any = drafter_train.trainer
    start_group, save = dist.init_process_group, trainer.save_checkpoint
    slept = False

    def limited(*args: Any, **options: Any) -> None:
        start_group(*args, **{**options, "timeout": datetime.timedelta(seconds=limit)})

    def slow(*args: Any, **options: Any) -> Path:
        nonlocal slept
        if not slept:
            time.sleep(delay)
        slept = True
        saved: Path = save(*args, **options)
        return saved

    dist.init_process_group = limited
    trainer.save_checkpoint = slow
    if not patient:
        Cluster.wait = lambda self: dist.barrier()  # type: ignore[method-assign]
    return main(["--config", recipe, "--device", "cpu"])


if __name__ == "__main__":
    sys.exit(_one_rank(sys.argv[1], float(sys.argv[2]), float(sys.argv[3]), sys.argv[4] == "True"))
