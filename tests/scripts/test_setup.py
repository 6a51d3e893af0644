"""setup.sh: what it compiles without a card, and that it never fails a run."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from eval.servers import ROOT
from serve.warm import main as warm

SHELLS = [shell for shell in ("sh", "dash") if shutil.which(shell)]


def run(shell: str, script: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([shell, str(script)], env=environ, capture_output=True, text=True, cwd="/")


def stand_in(folder: Path, text: str) -> str:
    """A PATH whose python3 is ``text``."""
    folder.mkdir()
    path = folder / "python3"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return f"{folder}:/usr/bin:/bin"


def test_without_a_card_the_c_layers_are_compiled_into_the_users_cache(tmp_path: Path) -> None:
    path = f"{os.path.dirname(sys.executable)}:/usr/bin:/bin"
    done = run("sh", ROOT / "setup.sh", PATH=path, HOME=str(tmp_path), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    assert "native layers compiled and tried" in done.stdout
    assert list((tmp_path / ".cache" / "foretoken" / "native").glob("*.so"))


def test_options_the_server_would_refuse_are_refused_without_a_card_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        warm(["--model-dir", "models", "--weights", "int3"])
    assert "--weights" in capsys.readouterr().err


@pytest.mark.parametrize("shell", SHELLS)
def test_a_python_without_torch_has_nothing_to_compile(shell: str, tmp_path: Path) -> None:
    copy = tmp_path / "project"
    copy.mkdir()
    shutil.copy(ROOT / "setup.sh", copy)
    done = run(shell, copy / "setup.sh", PATH=stand_in(tmp_path / "bin", "exit 1"), HOME=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert "nothing to compile" in done.stdout


@pytest.mark.parametrize("shell", SHELLS)
def test_a_python_with_torch_that_start_server_would_not_take_is_not_warmed(shell: str, tmp_path: Path) -> None:
    copy = tmp_path / "project"
    copy.mkdir()
    shutil.copy(ROOT / "setup.sh", copy)
    path = stand_in(
        tmp_path / "bin", 'case $1 in -c) case " $* " in *" fastapi "*) exit 1 ;; esac ;; *) echo warmed ;; esac'
    )
    done = run(shell, copy / "setup.sh", PATH=path, HOME=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert "nothing to compile" in done.stdout
    assert "warmed" not in done.stdout


@pytest.mark.parametrize("shell", SHELLS)
def test_a_failure_is_said_and_does_not_fail_the_run(shell: str, tmp_path: Path) -> None:
    text = "case $1 in -c) exit 0 ;; *) echo broken >&2; exit 1 ;; esac"
    done = run(shell, ROOT / "setup.sh", PATH=stand_in(tmp_path / "bin", text), HOME=str(tmp_path))
    assert done.returncode == 0
    assert "the start will do it" in done.stdout


@pytest.mark.parametrize("script", ["setup.sh", "start_server.sh"])
@pytest.mark.parametrize("shell", SHELLS)
def test_without_a_writable_home_caches_get_a_private_folder(shell: str, script: str, tmp_path: Path) -> None:
    said = tmp_path / "home"
    text = f'case $1 in -c) exit 0 ;; *) printf %s "$HOME" >{said} ;; esac'
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    environ = {"PATH": stand_in(tmp_path / "bin", text), "TMPDIR": str(temporary), "MODEL_DIR": str(model)}
    for home in ({}, {"HOME": "/nonexistent"}):
        assert run(shell, ROOT / script, **environ, **home).returncode == 0
        assert said.read_text() == f"{temporary}/foretoken-{os.getuid()}"
        assert stat.S_IMODE(Path(said.read_text()).stat().st_mode) == 0o700
    assert run(shell, ROOT / script, **environ, HOME=str(tmp_path)).returncode == 0
    assert said.read_text() == str(tmp_path)
