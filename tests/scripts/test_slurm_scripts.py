"""Rendered job scripts: what their headers ask for, that shellcheck has nothing to say, and what is refused by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from drafter_train.recipe import load_recipe
from scripts.slurm.render import STEPS, Job, render
from scripts.slurm.site import Site, SiteError, load_site
from scripts.slurm.submit import main

ROOT = Path(__file__).resolve().parents[2]
RECIPE = "drafter_train/configs/smoke.yaml"


def job(step: str, **more: Any) -> Job:
    more.setdefault("sources", ("file:prompts.jsonl",))
    return Job(step, load_recipe(ROOT / RECIPE), RECIPE, repo="me/drafter", **more)


def site(**more: Any) -> Site:
    return Site(**{"scratch": "/scratch/me", "partition": "gpu", "cpu_partition": "standard", "gpu": "a100", **more})


def shellcheck(*scripts: Path) -> str:
    program = Path(sys.executable).with_name("shellcheck")
    result = subprocess.run([program, *scripts], capture_output=True, text=True)
    return result.stdout + result.stderr


def test_shellcheck_finds_nothing_in_any_rendered_script(tmp_path: Path) -> None:
    """Also with values that would be code if they were not quoted."""
    scripts = []
    awkward = ("train.output=runs/a b; touch x '\"\\ &", "name=n")
    for step in ("generate", "train", "evaluate", "publish"):  # every template, and one step with and without a GPU
        scripts.append(tmp_path / f"{step}.sh")
        made = job(step, gpus=4, nodes=2, shards=16, at_once=4)
        scripts[-1].write_text(render(made, site(account="lab", offline=True), scripts[-1]))
    recipe = load_recipe(ROOT / RECIPE, awkward)
    scripts.append(tmp_path / "awkward.sh")
    container = site(
        prefix=("apptainer", "exec", "--nv", "my image.sif"), setup=("module purge", "module load apptainer")
    )
    made = Job("train", recipe, RECIPE, awkward, extra=("--device", "cpu; rm -rf ."))
    scripts[-1].write_text(render(made, container, scripts[-1]))
    for path in ("local_cluster.sh", "end_to_end.sh"):
        scripts.append(ROOT / "scripts/slurm" / path)
    scripts.append(ROOT / "scripts/reproduce.sh")
    assert shellcheck(*scripts) == ""


def test_shellcheck_would_find_something(tmp_path: Path) -> None:
    bad = tmp_path / "bad.sh"
    bad.write_text("#!/bin/bash\nrm -rf $1\n")
    assert "SC2086" in shellcheck(bad)


def test_values_reach_the_step_as_they_are(tmp_path: Path) -> None:
    override = 'publish.data=it\'s $HOME `x` "y" \\ z'
    text = render(job("train", overrides=(override,)), site(), tmp_path / "t.sh")
    assignments = text.split("# One segment of a job")[0]
    script = assignments + 'printf "%s\\n" "${arguments[@]}"'
    said = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.splitlines()
    assert said == ["--config", RECIPE, "--set", override]


def test_every_job_can_be_stopped_and_chained(tmp_path: Path) -> None:
    for step in STEPS:
        lines = render(job(step), site(), tmp_path / "x.sh").splitlines()
        for wanted in ("--time=02:59:00", "--signal=B:USR1@300", "--requeue", "--open-mode=append"):
            assert f"#SBATCH {wanted}" in lines, step


@pytest.mark.parametrize("step", ["generate-eval", "generate", "train", "evaluate"])
def test_a_gpu_job_names_its_gpu_or_is_refused(tmp_path: Path, step: str) -> None:
    assert "#SBATCH --gres=gpu:a100:1\n" in render(job(step), site(), tmp_path / "x.sh")
    with pytest.raises(SiteError, match=f"gpu is missing: {step} must name a GPU type"):
        render(job(step), site(gpu=""), tmp_path / "x.sh")
    assert "--gres" not in render(job(step), site(gpu="none"), tmp_path / "x.sh")


def test_training_scales_what_a_node_gives(tmp_path: Path) -> None:
    text = render(job("train", gpus=4, nodes=2), site(cpus=6, memory_gb=50, constraint="a100_80gb"), tmp_path / "x.sh")
    for wanted in ("nodes=2", "cpus-per-task=24", "mem=200G", "gres=gpu:a100:4", "constraint=a100_80gb"):
        assert f"#SBATCH --{wanted}\n" in text
    assert "\nthreads=6\n" in text


def test_only_what_needs_the_hub_is_online_at_an_offline_site(tmp_path: Path) -> None:
    online = {step for step in STEPS if "\noffline=0\n" in render(job(step), site(offline=True), tmp_path / "x.sh")}
    assert online == {"download", "prompts", "publish"}


def test_prompts_that_the_target_writes_run_on_a_gpu(tmp_path: Path) -> None:
    text = render(job("prompts", sources=("self:100",)), site(), tmp_path / "x.sh")
    assert "#SBATCH --partition=gpu\n" in text
    assert "--device cuda self:100)" in text
    assert "#SBATCH --partition=standard\n" in render(job("prompts"), site(), tmp_path / "x.sh")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("partition: 'gpu --wrap=x'", "partition must be a name as Slurm knows it"),
        ('account: "a\\n#SBATCH --exclusive"', "account must be a name"),
        ("time: soon", "time must be"),
        ("cpus: 0", "cpus must be at least 1"),
        ("cpus: many", "cpus must be int, got 'many'"),
        ("setup: module purge", "setup must be a list of texts"),
        ("gpus: 4", "unknown setting gpus; known: scratch"),
        ("scratch: here", "scratch must be an absolute path"),
        ("[1]", "must hold a mapping"),
        ("a: [", "is not YAML"),
    ],
)
def test_a_wrong_site_file_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "site.yaml"
    path.write_text(text + "\n")
    with pytest.raises(SiteError, match=message):
        load_site(path, {"scratch": None if "scratch" in text else "/scratch/me"})


def test_options_win_over_the_site_file_and_a_time_without_quotes_is_a_time(tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    path.write_text("scratch: /s\ntime: 2:59:00\ngpu: a40\n")
    read = load_site(path, {"gpu": "h200", "account": None})
    assert (read.time, read.gpu, read.account) == ("02:59:00", "h200", "")
    with pytest.raises(SiteError, match="scratch is missing"):
        load_site(None, {})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["prompts"], "prompts needs at least one source"),
        (["publish"], "publish needs --repo OWNER/NAME"),
        (["train", "--gpus", "0"], "gpus must be between 1 and 64, got 0"),
        (["generate", "--at-once", "-1"], "at-once must be 0 or more, got -1"),
        (["train", "--from", "train"], "--from and --to belong to all"),
        (["all", "--from", "train", "--to", "prompts"], "--from train comes after --to prompts"),
        (["all", "--", "--device", "cpu"], "belong to one step, not to all"),
        (["train", "--set", "train.typo=1"], "unknown setting train.typo"),
        (["train", "--set", "name=two words"], "names the job, so it must be one word"),
        (["train", "--folder", "/tmp/a b"], "no spaces, quotes or %"),
    ],
)
def test_what_cannot_be_submitted_says_why(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--config", str(ROOT / RECIPE), "--scratch", "/s", "--gpu", "a100", "--partition", "p", "--dry-run"]
    with pytest.raises(SystemExit) as error:
        main([*words[:1], *options, "--site", "/dev/null", *words[1:]])
    assert error.value.code == 2
    assert message in capsys.readouterr().err
