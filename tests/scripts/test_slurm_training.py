"""The real trainer under a stand-in Slurm: USR1 in the middle, a requeue, and a result equal to an unbroken run."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from scripts.slurm.submit import main
from tests.drafter_train.tiny_runs import Forge, metrics, write_run
from tests.scripts.slurm_stand_in import SlurmStandIn


def test_two_processes_stopped_by_usr1_and_requeued_equal_an_unbroken_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through accelerate, which starts both processes and would itself die of USR1."""
    straight = write_run(tmp_path, name="straight", max_steps=100, save_every_seconds=1000.0)
    forge = Forge()
    try:
        assert forge.run(straight, world=2) == [0, 0]
    finally:
        forge.close()

    broken = write_run(tmp_path, name="broken", max_steps=100, save_every_seconds=1000.0)
    slurm = SlurmStandIn(tmp_path / "slurm")
    slurm.environment["OMP_NUM_THREADS"] = "1"
    for name in ("PATH", "SLURM_STAND_IN"):
        monkeypatch.setenv(name, slurm.environment[name])
    site = tmp_path / "site.yaml"
    site.write_text(f"scratch: {tmp_path}/scratch\npartition: gpu\ngpu: a100\ncpus: 1\npython: {sys.executable}\n")
    where = ["--site", str(site), "--folder", str(tmp_path / "jobs")]
    assert main(["train", "--config", str(broken), *where, "--gpus", "2", "--", "--device", "cpu"]) == 0
    seen = tmp_path / "broken" / "metrics.jsonl"
    slurm.run(warn=lambda: seen.exists() and seen.stat().st_size > 0)
    (job,) = slurm.jobs()
    log = (tmp_path / "jobs" / f"train-{job['id']}.log").read_text()
    assert (job["state"], job["restarts"]) == ("COMPLETED", 1), log
    assert "segment 2 of job" in log
    assert log.index("sending USR1") < log.index("saved in") < log.index("finished at step 100")
    first, second = (int(step) for step in re.findall(r"2 processes, fp32 on \S+, step (\d+)", log))
    assert first == 0
    assert 0 < second < 100
    assert metrics(tmp_path / "broken") == metrics(tmp_path / "straight")
    ours, theirs = (load_file(tmp_path / name / "final" / "model.safetensors") for name in ("broken", "straight"))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name
