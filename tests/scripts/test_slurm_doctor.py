"""The doctor repeats what Slurm says, finds what would stop a job, and proposes a site file that submit can read."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from eval.servers import free_port
from scripts.slurm.doctor import gpus_of, main, read_partitions, scratch_candidates, seconds_of
from scripts.slurm.site import load_site
from tests.scripts.slurm_stand_in import SlurmStandIn


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("3-00:00:00", 259_200),
        ("12:00:00", 43_200),
        ("30:00", 1800),
        ("45", 2700),
        ("infinite", None),
        ("1-x", None),
    ],
)
def test_limits_as_slurm_prints_them(text: str, seconds: int | None) -> None:
    assert seconds_of(text) == seconds


def test_gpu_types_and_counts() -> None:
    assert gpus_of("gpu:a100:8(S:0-7),nvme:1") == {"a100": 8}
    assert gpus_of("gpu:v100:4,gpu:a40:2") == {"v100": 4, "a40": 2}
    assert gpus_of("gpu:2") == {"": 2}
    assert gpus_of("(null)") == {}


def test_lines_of_one_partition_are_put_together() -> None:
    text = "gpu*|3-00:00:00|18|gpu:a100:8(S:0-1)|a100_80gb\ngpu*|3-00:00:00|12|gpu:a40:8|(null)\n"
    text += "standard|infinite|9|(null)|x\n"
    gpu, standard = read_partitions(text)
    assert (gpu.name, gpu.nodes, gpu.gpus, gpu.default) == ("gpu", 30, {"a100": 8, "a40": 8}, True)
    assert (standard.seconds, standard.gpus, standard.features) == (None, {}, frozenset({"x"}))


def test_scratch_is_what_the_environment_names(tmp_path: Path) -> None:
    assert scratch_candidates({"SCRATCH": str(tmp_path), "WORK": str(tmp_path / "none")}) == [tmp_path]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in Slurm, and a hub that nothing listens for."""
    slurm = SlurmStandIn(tmp_path / "slurm")
    slurm.environment["SLURM_NNODES"] = "1"
    for name in ("PATH", "SLURM_STAND_IN", "SLURM_NNODES"):
        monkeypatch.setenv(name, slurm.environment[name])
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("HF_TOKEN", "hf_secretword")
    return tmp_path


def test_a_report_and_a_site_file_that_submit_reads(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site = here / "site.yaml"
    options = ["--scratch", str(here), "--account", "lab", "--write", "--site", str(site)]
    assert main([*options, "--on", "gpu", "--gpu", "a100"]) == 0
    said = capsys.readouterr().out
    assert "partition gpu: 4 nodes, 72 h, 8 x a100; features a100_80gb, ib" in said
    assert "partition standard: 9 nodes, 168 h, no GPU" in said
    assert "job arrays: up to 1000 tasks" in said
    assert "use offline mode there" in said
    assert f"{socket.gethostname()}: {here} can be written" in said
    assert "HF_TOKEN is set" in said
    assert "secretword" not in said
    read = load_site(site, {})
    assert (read.partition, read.cpu_partition, read.gpu, read.account) == ("gpu", "standard", "a100", "lab")
    assert read.offline
    assert read.scratch == f"{here}/foretoken"
    assert main(options) == 0
    assert "is there and was kept" in capsys.readouterr().out


def test_a_hub_that_answers_is_reached(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("HF_ENDPOINT", f"http://{address}")
        assert main(["--scratch", str(here)]) == 0
    assert f"here: {address} is reached" in capsys.readouterr().out


def test_what_would_stop_a_job_is_a_fault(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--scratch", str(here / "none")]) == 1
    assert f"FAULT scratch {here / 'none'} is not a folder that you may write to" in capsys.readouterr().out


def test_short_limits_and_unnamed_types_are_noted(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "slurm" / "sinfo.txt").write_text("gpu|01:00:00|2|gpu:v100:4|(null)\ngpu|01:00:00|2|gpu:a40:4|(null)\n")
    assert main(["--scratch", str(here)]) == 0
    said = capsys.readouterr().out
    assert "gpu allows 3600 s: shorten the segments with --time" in said
    assert "gpu has 2 types of GPU: a job that names none may get any of them" in said


def test_without_slurm_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/bin-of-nobody")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert main(["--scratch", str(tmp_path)]) == 1
    assert "FAULT sinfo does not answer" in capsys.readouterr().out
