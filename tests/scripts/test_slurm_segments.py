"""How segments chain: what a job does after USR1, a cancellation, a failure, and with a requeue that is refused.

The step is a small shell program in the place of python, so that each case takes a moment; the real trainer goes the
same way in test_slurm_training.py.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.slurm.submit import main
from tests.scripts.slurm_stand_in import SlurmStandIn

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "drafter_train" / "configs" / "smoke.yaml"
# Saves and ends on USR1 and TERM, as training does; a second run completes. Its folder gets a line for each call.
TRAINER = """#!{python} -IS
import os, pathlib, signal, sys, time
here, out = pathlib.Path(sys.argv[0]).parent, pathlib.Path(os.environ["OUT"])
with open(here / "calls", "a") as calls:
    calls.write(" ".join(sys.argv[1:]) + "\\n")
(here / "early").touch()
time.sleep(float(os.environ["SLOW"] or 0))

def save(step):
    out.mkdir(exist_ok=True)
    (out / "latest").write_text("step-%d" % step)

def end(number, frame):
    if number == signal.SIGTERM or not os.environ["DEAF"]:
        save(1)
    sys.exit(0)

signal.signal(signal.SIGUSR1, end)
signal.signal(signal.SIGTERM, end)
if (out / "latest").exists() or os.environ["AT_ONCE"]:
    save(2)
    (out / "final").mkdir(exist_ok=True)
    (out / "final" / "config.json").write_text("{{}}")
    sys.exit(0)
if os.environ["FAIL"]:
    sys.exit(9)
(here / "running").touch()
time.sleep(120)
"""
SWITCHES = ("FAIL", "DEAF", "AT_ONCE", "SLOW")


class Cluster:
    """A stand-in Slurm and what ``submit`` is told about it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.output, self._capsys = folder, folder / "out", capsys
        self.python = folder / "python"
        self.python.write_text(TRAINER.format(python=sys.executable))
        self.python.chmod(0o755)
        (folder / "site.yaml").write_text(
            f"scratch: {folder}/scratch\npartition: gpu\ncpu_partition: standard\ngpu: a100\npython: {self.python}\n"
        )
        self.slurm = SlurmStandIn(folder / "slurm")
        self.slurm.environment |= {"OUT": str(self.output), **dict.fromkeys(SWITCHES, "")}
        for name in ("PATH", "SLURM_STAND_IN"):
            monkeypatch.setenv(name, self.slurm.environment[name])

    def submit(self, *words: str) -> list[str]:
        """The ids of the jobs."""
        where = ["--site", str(self.folder / "site.yaml"), "--folder", str(self.folder / "jobs")]
        command = [*words[:1], "--config", str(RECIPE), "--set", f"train.output={self.output}", *where, *words[1:]]
        assert main(command) == 0
        return self._capsys.readouterr().out.split()

    def running(self) -> bool:
        return (self.folder / "running").exists()

    def log(self, job: str) -> str:
        return (self.folder / "jobs" / f"train-{job}.log").read_text()


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cluster:
    return Cluster(tmp_path, monkeypatch, capsys)


def test_usr1_saves_requeues_under_the_same_id_and_the_next_segment_completes(cluster: Cluster) -> None:
    train, evaluate = cluster.submit("all", "--from", "train")
    cluster.slurm.run(warn=cluster.running)
    assert (cluster.slurm.state(train), cluster.slurm.state(evaluate)) == ("COMPLETED", "COMPLETED")
    said = cluster.log(train)
    assert said.index("segment 1 of job") < said.index("time: sending USR1") < said.index("requeued")
    assert said.index("requeued") < said.index("segment 2 of job") < said.index("complete")
    calls = (cluster.folder / "calls").read_text().splitlines()
    assert [call.split()[1] for call in calls] == ["drafter_train.train"] * 2 + ["drafter_train.evaluate"]


def test_a_cancelled_job_saves_and_does_not_come_back(cluster: Cluster) -> None:
    train, evaluate = cluster.submit("all", "--from", "train")
    cluster.slurm.run(warn=cluster.running, number=signal.SIGTERM)
    assert (cluster.slurm.state(train), cluster.slurm.state(evaluate)) == ("FAILED", "PENDING")
    assert (cluster.output / "latest").read_text() == "step-1"
    assert "submit again to go on" in cluster.log(train)
    assert "segment 2" not in cluster.log(train)


@pytest.mark.parametrize(
    ("how", "message"), [("FAIL", "failed with exit status 9; not requeued"), ("DEAF", "saved nothing new")]
)
def test_what_fails_or_saves_nothing_is_not_tried_for_ever(cluster: Cluster, how: str, message: str) -> None:
    cluster.slurm.environment[how] = "1"
    (train,) = cluster.submit("train")
    cluster.slurm.run(warn=cluster.running if how == "DEAF" else lambda: False)
    assert cluster.slurm.state(train) == "FAILED"
    assert message in cluster.log(train)
    assert "segment 2" not in cluster.log(train)


def test_where_requeue_is_refused_the_next_segment_is_a_new_job_and_nothing_starts_early(cluster: Cluster) -> None:
    cluster.slurm.refuse_requeues()
    train, evaluate = cluster.submit("all", "--from", "train")
    cluster.slurm.run(warn=cluster.running)
    follower = cluster.slurm.jobs()[-1]
    assert follower["after"] == f"afterany:{train}"
    assert follower["state"] == "COMPLETED"
    assert (cluster.slurm.state(train), cluster.slurm.state(evaluate)) == ("FAILED", "PENDING")


def test_an_array_runs_every_shard_and_training_waits_for_all(cluster: Cluster) -> None:
    cluster.slurm.environment["AT_ONCE"] = "1"
    ids = cluster.submit("all", "--to", "train", "--shards", "3", "--at-once", "2")
    cluster.slurm.run()
    assert [cluster.slurm.state(job) for job in ids] == ["COMPLETED"] * 3
    options = cluster.slurm.jobs()[1]["options"]
    assert (options["array"], options["gres"]) == ("0-2%2", "gpu:a100:1")
    calls = (cluster.folder / "calls").read_text().splitlines()
    shards = [call.split()[-1] for call in calls if "generate" in call]
    assert shards == ["0/1", "0/3", "1/3", "2/3"]
    assert "--split eval" in calls[0]


def test_every_node_gets_its_rank_and_the_first_one_s_address(cluster: Cluster) -> None:
    from accelerate.commands.launch import launch_command_parser

    cluster.slurm.environment["AT_ONCE"] = "1"
    (train,) = cluster.submit("train", "--nodes", "2", "--gpus", "4", "--set", "publish.data=a b; c")
    cluster.slurm.run()
    assert cluster.slurm.state(train) == "COMPLETED", cluster.log(train)
    calls = sorted((cluster.folder / "calls").read_text().splitlines(), key=lambda line: line.index("machine_rank"))
    assert len(calls) == 2
    ranks = set()
    for call in calls:
        words = call.split()
        assert words[:2] == ["-m", "accelerate.commands.launch"]
        args = launch_command_parser().parse_args(words[2:])
        ranks.add(args.machine_rank)
        assert (args.num_machines, args.num_processes, args.rdzv_backend) == (2, 8, "static")
        assert (args.main_process_ip, args.main_process_port) == ("127.0.0.1", 20000 + int(train))
        assert args.module
        assert args.training_script == "drafter_train.train"
        assert args.training_script_args[:2] == ["--config", str(RECIPE)]
    assert ranks == {0, 1}


def test_without_slurm_the_same_script_runs_here(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"OUT": str(cluster.output), **dict.fromkeys(SWITCHES, ""), "AT_ONCE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_JOB_ID", "77")  # an interactive session is not this job
    assert cluster.submit("all", "--to", "evaluate", "--shards", "2", "--here") == []
    calls = (cluster.folder / "calls").read_text().splitlines()
    assert [call.split()[1].split(".")[1] for call in calls] == [*["generate"] * 3, "train", "evaluate"]
    assert cluster.slurm.jobs() == []


def test_a_warning_that_comes_while_python_starts_is_sent_again(cluster: Cluster) -> None:
    """The step has no handler for its first moments, as a process that is still importing."""
    cluster.slurm.environment["SLOW"] = "0.5"
    (train,) = cluster.submit("train")
    script = Path(cluster.slurm.jobs()[0]["script"])
    assert "resend=20\n" in script.read_text()
    script.write_text(script.read_text().replace("resend=20\n", "resend=0.1\n"))
    cluster.slurm.run(warn=(cluster.folder / "early").exists)
    assert cluster.slurm.state(train) == "COMPLETED", cluster.log(train)
    assert "segment 2" in cluster.log(train)


def test_the_module_runs_as_a_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scripts.slurm.submit", "train", "--config", str(RECIPE), "--dry-run"]
    options = ["--gpu", "a40", "--partition", "p", "--scratch", str(tmp_path), "--site", "/dev/null"]
    result = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert "#SBATCH --gres=gpu:a40:1\n" in result.stdout
