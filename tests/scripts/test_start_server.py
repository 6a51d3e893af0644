"""start_server.sh and setup_venv.sh, with a stand-in for python3 that writes down how it is called."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHELLS = [shell for shell in ("sh", "dash") if shutil.which(shell)]
SCRIPTS = ("start_server.sh", "scripts/setup_venv.sh", "scripts/test.sh")

# Ready when $STAND_IN_READY is set or when it is the interpreter of .venv; `-m venv` copies it there.
STAND_IN = """#!/bin/sh
{
    printf '%s' "${0##*/}"
    printf '\\037%s' "$@"
    printf '\\036'
} >>"$STAND_IN_LOG"
case "$1 $2" in
    "-m serve")
        env >"$STAND_IN_LOG.env"
        pwd >"$STAND_IN_LOG.cwd"
        (for n in 0 1 2; do readlink "/proc/$$/fd/$n" || echo closed; done) >"$STAND_IN_LOG.fds"
        ;;
    "-m venv") mkdir -p "$4/bin" && cp "$0" "$4/bin/python" && rm -f "$4/unfinished" ;;
    "-m pip") [ "$3" = --version ] || exit "${STAND_IN_PIP:-0}" ;;
    "-c "*version_info*find_spec* | "-c "*find_spec*) [ -n "${STAND_IN_READY:-}" ] || [ "${0##*/}" = python ] ;;
    "-c "*) exit "${STAND_IN_TOO_OLD:-0}" ;;
    *--check) [ -n "${STAND_IN_MODEL:-}" ] ;;
esac
"""


@dataclass
class Project:
    """A copy of the scripts in a temporary folder with the stand-in first on PATH."""

    root: Path
    env: dict[str, str]
    log: Path
    shell: str = "sh"
    cwd: Path | None = None
    calls: list[list[str]] = field(default_factory=list)

    def start(self, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        self.log.write_text("")
        command = [self.shell, str(self.root / "start_server.sh"), *args]
        environment = {**self.env, **env}
        result = subprocess.run(
            command,
            cwd=self.cwd or self.root,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        self.calls = [call.split("\x1f") for call in self.log.read_text().split("\x1e") if call]
        return result

    @property
    def served(self) -> list[str]:
        """The last call: interpreter name and its arguments."""
        return self.calls[-1]

    def server_env(self) -> dict[str, str]:
        text = Path(f"{self.log}.env").read_text()
        return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)

    def pip_installs(self) -> list[list[str]]:
        return [call for call in self.calls if call[1:4] == ["-m", "pip", "install"]]


@pytest.fixture(params=SHELLS)
def project(request: pytest.FixtureRequest, tmp_path: Path) -> Project:
    root = tmp_path / "the project"
    for name in ("start_server.sh", "scripts/setup_venv.sh", "scripts/fetch_default_model.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    shutil.copytree(ROOT / "requirements", root / "requirements")
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    stand_in = bin_dir / "python3"
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)
    log = tmp_path / "log"
    env = {"PATH": f"{bin_dir}:/usr/bin:/bin", "HOME": str(tmp_path), "STAND_IN_LOG": str(log)}
    return Project(root=root, env=env, log=log, shell=request.param)


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "a model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_parse_in_a_posix_shell(shell: str, script: str) -> None:
    assert subprocess.run([shell, "-n", str(ROOT / script)], capture_output=True).returncode == 0


def test_a_ready_python_serves_at_once_and_installs_nothing(project: Project, model_dir: Path) -> None:
    result = project.start("--host", "0.0.0.0", MODEL_DIR=str(model_dir), STAND_IN_READY="1")
    assert result.returncode == 0, result.stderr
    assert len(project.calls) == 2, "one look at the packages, then the server"
    assert project.served == ["python3", "-m", "serve", "--host", "0.0.0.0"]
    assert not (project.root / ".venv").exists()
    assert result.stderr == ""


def test_settings_and_arguments_reach_the_server_unchanged(project: Project, model_dir: Path) -> None:
    settings = {"MODEL_DIR": str(model_dir), "PORT": "8123", "DRAFTER_BYO_DIR": "/some where/drafter"}
    project.start("--served-model-name", "two words", "", STAND_IN_READY="1", PYTHONPATH="/mine", **settings)
    assert project.served[3:] == ["--served-model-name", "two words", ""]
    env = project.server_env()
    assert {name: env[name] for name in settings} == settings
    assert env["PYTHONPATH"] == f"{project.root}:/mine"
    assert env["PYTHONSAFEPATH"] == "1"


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_closed_standard_streams_are_opened_and_others_left_alone(
    project: Project, model_dir: Path, tmp_path: Path, closed: tuple[int, ...]
) -> None:
    project.log.write_text("")
    said = tmp_path / "said"
    said.touch()
    closing = " ".join(f"{n}>&-" for n in closed)
    started = subprocess.run(
        [project.shell, "-c", f'exec {project.shell} "$0" <"$1" >"$1" 2>"$1" {closing}', "start_server.sh", str(said)],
        cwd=project.root,
        env={**project.env, "MODEL_DIR": str(model_dir), "STAND_IN_READY": "1"},
    )
    assert started.returncode == 0
    streams = Path(f"{project.log}.fds").read_text().split("\n")[:3]
    assert streams == ["/dev/null" if n in closed else str(said) for n in range(3)]
    assert said.read_text() == ""


def test_the_callers_folder_stays_the_working_folder(project: Project, tmp_path: Path, model_dir: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    relative = os.path.relpath(model_dir, elsewhere)
    project.cwd = elsewhere
    result = project.start(MODEL_DIR=relative, STAND_IN_READY="1")
    assert result.returncode == 0, result.stderr
    assert Path(f"{project.log}.cwd").read_text().strip() == str(elsewhere)
    assert project.server_env()["MODEL_DIR"] == relative


def test_a_model_folder_without_config_is_refused_before_anything_is_installed(
    project: Project, tmp_path: Path
) -> None:
    result = project.start(MODEL_DIR=str(tmp_path))
    assert result.returncode == 1
    assert result.stderr == f"error: MODEL_DIR={tmp_path} has no config.json\n"
    assert project.calls == []


def test_a_bare_python_gets_a_venv_once(project: Project, model_dir: Path) -> None:
    first = project.start(MODEL_DIR=str(model_dir))
    assert first.returncode == 0, first.stderr
    assert len(project.pip_installs()) == 1
    assert project.served == ["python", "-m", "serve"]
    second = project.start(MODEL_DIR=str(model_dir))
    assert second.stderr == ""
    assert project.pip_installs() == []
    assert project.served == ["python", "-m", "serve"]


def test_changed_pins_are_installed_on_the_next_start(project: Project, model_dir: Path) -> None:
    project.start(MODEL_DIR=str(model_dir))
    with (project.root / "requirements" / "constraints.txt").open("a") as file:
        file.write("added==1\n")
    project.start(MODEL_DIR=str(model_dir))
    assert len(project.pip_installs()) == 1


def test_an_install_that_was_killed_starts_from_a_fresh_venv(project: Project, model_dir: Path) -> None:
    project.start(MODEL_DIR=str(model_dir))
    (project.root / ".venv" / "serve.installed").unlink()
    (project.root / ".venv" / "unfinished").touch()
    project.start(MODEL_DIR=str(model_dir))
    assert ["-m", "venv", "--clear"] in [call[1:4] for call in project.calls]
    assert len(project.pip_installs()) == 1
    assert not (project.root / ".venv" / "unfinished").exists()


def test_a_failed_install_says_what_is_needed_and_is_tried_again(project: Project, model_dir: Path) -> None:
    failed = project.start(MODEL_DIR=str(model_dir), STAND_IN_PIP="1")
    assert failed.returncode == 1
    assert "package index" in failed.stderr
    assert project.start(MODEL_DIR=str(model_dir)).returncode == 0
    assert len(project.pip_installs()) == 1


def test_a_python_that_is_too_old_is_named(project: Project, model_dir: Path) -> None:
    for name in ("python3.13", "python3.12", "python3.11", "python3.10"):
        shutil.copy(project.log.parent / "bin" / "python3", project.log.parent / "bin" / name)
    result = project.start(MODEL_DIR=str(model_dir), STAND_IN_TOO_OLD="1")
    assert result.returncode == 1
    assert "Python 3.10 or newer is needed" in result.stderr


def test_without_a_model_the_default_one_is_built_by_our_own_venv(project: Project) -> None:
    result = project.start(STAND_IN_READY="")
    assert result.returncode == 0, result.stderr
    fetches = [call for call in project.calls if call[1].endswith("fetch_default_model.py")]
    assert [call[0] for call in fetches] == ["python", "python"]
    assert project.server_env()["MODEL_DIR"] == str(project.root / "models" / "smollm2-135m-instruct")


def test_a_default_model_that_is_there_is_served_without_building(project: Project) -> None:
    project.start(STAND_IN_READY="1", STAND_IN_MODEL="1")
    assert [call[2:] for call in project.calls if call[1].endswith("fetch_default_model.py")] == [["--check"]]
    assert not (project.root / ".venv").exists()


@pytest.mark.parametrize(
    ("args", "env", "passed"),
    [
        ([], {}, True),
        (["--port", "1"], {}, True),
        (["--drafter-dir", "d"], {}, False),
        (["--drafter-dir=d"], {}, False),
        (["--proposer", "none"], {}, False),
        (["--model-dir", "m"], {}, False),
        ([], {"DRAFTER_BYO_DIR": "d"}, False),
    ],
)
def test_the_released_drafter_goes_with_the_default_model_only(
    project: Project, args: list[str], env: dict[str, str], passed: bool
) -> None:
    release = project.root / "drafter_train" / "releases" / "smollm2-135m-instruct"
    release.mkdir(parents=True)
    (release / "config.json").write_text("{}")
    project.start(*args, STAND_IN_READY="1", STAND_IN_MODEL="1", **env)
    expected = ["--drafter-dir", str(release)] if passed else []
    assert project.served[3:] == [*expected, *args]


def test_the_server_replaces_the_shell_under_a_real_interpreter(project: Project, model_dir: Path) -> None:
    stand_in = project.log.parent / "bin" / "python3"
    stand_in.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (project.root / "serve").mkdir()
    (project.root / "serve" / "__init__.py").touch()
    (project.root / "serve" / "__main__.py").write_text(
        "import json, os, sys\nprint(json.dumps([os.getpid(), sys.argv[1:], sys.executable]))\n"
    )
    command = [project.shell, str(project.root / "start_server.sh"), "--log-json"]
    environment = {**project.env, "MODEL_DIR": str(model_dir)}
    with subprocess.Popen(command, cwd=project.root, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid, argv, executable = json.loads(process.stdout.read())
    assert pid == process.pid
    assert argv == ["--log-json"]
    assert executable == sys.executable


def test_help_needs_no_packages(project: Project) -> None:
    stand_in = project.log.parent / "bin" / "python3"
    stand_in.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    (project.root / "serve").mkdir()
    for name in ("__init__.py", "config.py"):
        shutil.copy(ROOT / "serve" / name, project.root / "serve" / name)
    result = project.start("--help")
    assert result.returncode == 0, result.stderr
    assert "--model-dir" in result.stdout
    assert not (project.root / ".venv").exists()
