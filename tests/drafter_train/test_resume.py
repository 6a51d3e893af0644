"""A killed or stopped run goes on as if nothing had happened; processes share a batch without changing the result."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

from drafter_train.cluster import Cluster
from drafter_train.recipe import load_recipe
from drafter_train.tokens import Response, TokenStore
from drafter_train.trainer import Clock, Log, TrainingError
from eval.servers import free_port
from tests.drafter_train.tiny_runs import ROOT, Forge, metrics, random_moments, write_run


@pytest.fixture(scope="module")
def forge() -> Iterator[Forge]:
    process = Forge()
    yield process
    process.close()


def state_weights(output: Path) -> dict[str, Tensor]:
    """Float32, from the newest checkpoint."""
    return load_file(output / (output / "latest").read_text() / "model.safetensors")


def test_twenty_kills_at_random_moments_change_nothing(tmp_path: Path, forge: Forge) -> None:
    steps = 150
    straight = write_run(tmp_path, name="straight", max_steps=steps, save_every_seconds=1000.0)
    assert forge.run(straight) == [0]
    killed = write_run(tmp_path, name="killed", max_steps=steps)
    reached: list[int] = []
    for moment in random_moments(20):
        # A quick machine may be done before the last of them.
        if forge.run(killed, signal=int(signal.SIGKILL), **moment) == [0]:
            break
        latest = tmp_path / "killed" / "latest"
        reached.append(int(latest.read_text().removeprefix("step-")) if latest.exists() else 0)
    assert len(reached) > 10
    assert len(set(reached)) > 5, reached
    assert reached == sorted(reached)
    assert forge.run(killed) == [0]
    assert metrics(tmp_path / "killed") == metrics(tmp_path / "straight")
    assert [line["step"] for line in metrics(tmp_path / "killed")] == list(range(1, steps + 1))
    for name, tensor in state_weights(tmp_path / "straight").items():
        assert torch.equal(tensor, state_weights(tmp_path / "killed")[name]), name
    leftovers = {path.name.split("-")[0] for path in (tmp_path / "killed").iterdir()}
    assert leftovers == {"step", "latest", "metrics.jsonl", "final", ".lock"}


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_polite_signal_saves_says_how_to_go_on_and_exits_zero(
    tmp_path: Path, forge: Forge, number: signal.Signals
) -> None:
    recipe = write_run(tmp_path, name="stopped", max_steps=60, save_every_seconds=1000.0)
    assert forge.run(recipe, signal=int(number), after_steps=True) == [0]
    output = tmp_path / "stopped"
    assert 0 < int((output / "latest").read_text().removeprefix("step-")) < 60
    said = recipe.with_suffix(".log").read_text()
    assert f"saved in {output}; to go on run: python -m drafter_train.train --config {recipe}" in said
    assert not (output / "final").exists()
    assert forge.run(recipe) == [0]
    assert [line["step"] for line in metrics(output)] == list(range(1, 61))


def test_stopping_again_at_the_step_of_the_checkpoint_keeps_it(tmp_path: Path, forge: Forge) -> None:
    recipe = write_run(tmp_path, max_steps=20, save_every_seconds=1000.0)
    assert forge.run(recipe, "--stop-after", "3") == [0]
    place = tmp_path / "run" / "step-00000003"
    born = place.stat().st_ino
    assert forge.run(recipe, signal=int(signal.SIGTERM), after_steps=False, delay=0.0) in ([0], [-signal.SIGTERM])
    assert place.stat().st_ino == born


def test_two_processes_equal_one(tmp_path: Path, forge: Forge) -> None:
    one = write_run(tmp_path, name="one", max_steps=8)
    two = write_run(tmp_path, name="two", max_steps=8, micro_sequences=1)
    assert forge.run(one) == [0]
    assert forge.run(two, world=2) == [0, 0]
    for a, b in zip(metrics(tmp_path / "one"), metrics(tmp_path / "two"), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-4)
        assert (b["lr"], b["blocks"], b["step"]) == (a["lr"], a["blocks"], a["step"])
    # Muon's step is made in bfloat16, whose rounding is each processor's own: of single elements it says little. All of
    # the training moves a matrix by 2 per cent and a norm by 0.2.
    for name, tensor in state_weights(tmp_path / "one").items():
        apart = (state_weights(tmp_path / "two")[name] - tensor).norm() / tensor.norm()
        assert apart < (4e-3 if tensor.dim() == 2 else 1e-5), name


def test_accelerate_on_two_nodes_gives_the_drafter_of_one_process(tmp_path: Path, forge: Forge) -> None:
    """Two launchers, as a Slurm job has one on each node, meet at the address of the first; here they share a host."""
    one = write_run(tmp_path, name="one", max_steps=4)
    two = write_run(tmp_path, name="two", max_steps=4)
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines", "2"]
    launch += ["--num_processes", "2", "--rdzv_backend", "static", "--main_process_ip", "127.0.0.1"]
    launch += ["--main_process_port", str(free_port()), "--mixed_precision", "no", "--dynamo_backend", "no"]
    command = ["--module", "drafter_train.train", "--config", str(two), "--device", "cpu"]
    # The launcher of several GPUs is the one of several processes; this makes them take the CPU.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true"}
    nodes = [
        subprocess.Popen(
            [*launch, "--machine_rank", rank, *command], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
        )
        for rank in "01"
    ]
    try:
        assert forge.run(one) == [0]
        said = [node.communicate(timeout=240)[1] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], said[0][-3000:] + said[1][-3000:]
    assert "2 processes" in "".join(said)
    assert "destroy_process_group() was not called" not in "".join(said)
    for a, b in zip(metrics(tmp_path / "one"), metrics(tmp_path / "two"), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-4)
    for name, tensor in load_file(tmp_path / "one" / "final" / "model.safetensors").items():
        other = load_file(tmp_path / "two" / "final" / "model.safetensors")[name]
        torch.testing.assert_close(other, tensor, atol=1e-2, rtol=2e-2)


@pytest.mark.parametrize("samples", [5, 7])
def test_ranks_with_uneven_shares_finish(tmp_path: Path, forge: Forge, samples: int) -> None:
    """A global batch of four: the last one of an epoch gives the second rank nothing, or one sample to two."""
    one = write_run(tmp_path, name="one", samples=samples, max_steps=6, optimizer="adamw")
    two = write_run(tmp_path, name="two", samples=samples, max_steps=6, optimizer="adamw")
    assert forge.run(one) == [0]
    assert forge.run(two, world=2) == [0, 0]
    ours, theirs = metrics(tmp_path / "one"), metrics(tmp_path / "two")
    assert len(ours) == len(theirs) == 6
    for a, b in zip(ours, theirs, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-3)
        assert b["blocks"] == a["blocks"]


def test_a_stop_that_reaches_one_rank_stops_all_and_resumes(tmp_path: Path, forge: Forge) -> None:
    recipe = write_run(tmp_path, max_steps=300, save_every_seconds=1000.0)
    assert forge.run(recipe, world=2, signal=int(signal.SIGUSR1), after_steps=True) == [0, 0]
    step = int((tmp_path / "run" / "latest").read_text().removeprefix("step-"))
    assert 0 < step < 300
    state = json.loads((tmp_path / "run" / f"step-{step:08d}" / "state.json").read_text())
    assert state["step"] == step == metrics(tmp_path / "run")[-1]["step"]


def test_another_recipe_does_not_continue_this_run(tmp_path: Path, forge: Forge) -> None:
    recipe = write_run(tmp_path, max_steps=4)
    assert forge.run(recipe, "--stop-after", "2") == [0]
    assert forge.run(recipe, "--set", "train.lr=0.5") == [1]
    assert "was made by another recipe" in recipe.with_suffix(".log").read_text()
    assert forge.run(recipe, "--set", "train.max_steps=3") == [0]


@pytest.mark.parametrize("lost", ["checkpoint", "sequences"])
def test_processes_that_see_other_files_do_not_train_together(tmp_path: Path, forge: Forge, lost: str) -> None:
    """Two nodes whose folders are not the same one: the second has no checkpoint, or answers that the first lacks."""
    nodes = [tmp_path / "first", tmp_path / "second"]
    nodes[0].mkdir()
    path = write_run(nodes[0], max_steps=4)
    recipe = yaml.safe_load(path.read_text())
    recipe["train"]["output"], recipe["data"]["tokens"] = "run", "tokens-23"
    path.write_text(yaml.safe_dump(recipe))
    shutil.copytree(nodes[0], nodes[1])
    if lost == "checkpoint":
        assert forge.run(path, "--stop-after", "2", folders=[str(nodes[0])]) == [0]
    else:
        TokenStore(nodes[1] / "tokens-23").append([Response(0, 1, np.arange(4, 20), 0, False)], "t")
    assert forge.run(path, world=2, folders=[str(node) for node in nodes]) == [1, 1]
    assert f"process 1 finds another {lost} in " in path.with_suffix(".log").read_text()
    assert not (nodes[0] / "run" / "final").exists()
    assert forge.run(path, world=2, folders=[str(nodes[0])] * 2) == [0, 0]


def test_a_finished_run_goes_on_when_its_limit_of_steps_or_of_time_is_raised(tmp_path: Path, forge: Forge) -> None:
    recipe = write_run(tmp_path, max_steps=3, max_seconds=3600.0)
    assert forge.run(recipe) == [0]
    assert forge.run(recipe, "--set", "train.max_steps=6") == [0]
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]
    longer = load_recipe(recipe, ["train.max_steps=0", "train.max_seconds=7200"])
    assert Clock(longer, 6, seconds=3600.0, progress=1.0).progress(6) < 1
    assert Clock(longer, 6, seconds=7200.0, progress=1.0).progress(6) >= 1


def test_the_command_of_a_finished_run_leaves_what_later_steps_put_beside_the_drafter(
    tmp_path: Path, forge: Forge
) -> None:
    recipe = write_run(tmp_path, max_steps=3)
    assert forge.run(recipe) == [0]
    listed = tmp_path / "run" / "final" / "extras" / "head_tokens.safetensors"
    listed.parent.mkdir()
    listed.write_bytes(b"a list of tokens")
    assert forge.run(recipe) == [0]
    assert listed.exists()
    assert forge.run(recipe, "--set", "train.max_steps=4") == [0]
    assert not listed.exists()
    assert json.loads((listed.parents[1] / "training.json").read_text())["steps"] == 4


def test_a_store_that_changed_between_two_runs_is_said_so(tmp_path: Path, forge: Forge) -> None:
    recipe = write_run(tmp_path, max_steps=6)
    log, changed = recipe.with_suffix(".log"), "tokens-23 has changed since step"
    assert forge.run(recipe, "--stop-after", "2") == [0]
    assert forge.run(recipe, "--stop-after", "2") == [0]
    assert changed not in log.read_text()
    TokenStore(tmp_path / "tokens-23").append([Response(0, 1, np.arange(4, 20), 0, False)], "t")
    assert forge.run(recipe) == [0]
    assert f"{changed} 4 was saved" in log.read_text()


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt"])
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_checkpoint_that_cannot_be_read_is_named_with_the_way_back(
    tmp_path: Path, forge: Forge, name: str, share: float
) -> None:
    recipe = write_run(tmp_path, max_steps=4)
    assert forge.run(recipe, "--stop-after", "3") == [0]
    damaged = tmp_path / "run" / "step-00000003" / name
    damaged.write_bytes(damaged.read_bytes()[: int(share * damaged.stat().st_size)])
    assert forge.run(recipe) == [1]
    said = recipe.with_suffix(".log").read_text()
    assert "Traceback" not in said
    assert f"training stopped: {damaged.parent} cannot be read" in said
    (tmp_path / "run" / "latest").write_text("step-00000002")
    assert forge.run(recipe) == [0]
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2, 3, 4]


@pytest.mark.parametrize("norm", [float("inf"), float("nan")])
def test_a_gradient_that_is_no_number_ends_the_run_by_name_and_is_not_logged(tmp_path: Path, norm: float) -> None:
    log = Log(tmp_path, Cluster(device="cpu"), (), load_recipe(write_run(tmp_path)), None)
    with pytest.raises(TrainingError, match=f"step 3: the loss is 0.0, the gradient's norm {norm}"):
        log.write(3, 0.1, 1e-3, norm, 1.0)
    assert not (tmp_path / "metrics.jsonl").exists()
