"""scripts/test.sh and the browser: installed as root where it is missing, else its tests are left out out loud."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT

LEFT_OUT = "BROWSER TESTS LEFT OUT"


class Machine:
    """A project folder whose Python prints its arguments, and a PATH that holds only what a test puts there."""

    def __init__(self, folder: Path, *, root: bool) -> None:
        self.project = folder / "project"
        self.commands = folder / "bin"
        for directory in (self.project / "scripts", self.project / ".venv" / "bin", self.commands):
            directory.mkdir(parents=True)
        shutil.copy(ROOT / "scripts" / "test.sh", self.project / "scripts")
        (self.project / "scripts" / "setup_venv.sh").write_text("exit 0\n")
        self.command(self.project / ".venv" / "bin" / "python", 'printf "<%s>" "$@"')
        self.command(self.commands / "id", f"echo {0 if root else 1000}")
        for name in ("dirname", "sh"):
            (self.commands / name).symlink_to(shutil.which(name) or "")

    @staticmethod
    def command(path: Path, script: str) -> None:
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def has(self, name: str, script: str = "exit 0") -> None:
        self.command(self.commands / name, script)

    def run(self, *arguments: str) -> tuple[str, str]:
        """Standard output (the last call of Python) and standard error."""
        done = subprocess.run(
            ["/bin/sh", "scripts/test.sh", *arguments],
            cwd=self.project,
            env={"PATH": str(self.commands)},
            capture_output=True,
            text=True,
            timeout=20,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.replace("<scripts/fetch_default_model.py>", ""), done.stderr


def test_with_a_browser_every_test_runs_and_nothing_is_installed(tmp_path: Path) -> None:
    machine = Machine(tmp_path, root=True)
    machine.has("chromium")
    machine.has("chromedriver")
    machine.has("apt-get", "exit 1")
    out, err = machine.run("-k", "x")
    assert out == "<-m><pytest><-n><3><--dist><loadfile><-k><x>"
    assert err == ""


def test_root_installs_a_missing_browser(tmp_path: Path) -> None:
    machine = Machine(tmp_path, root=True)
    put = "; ".join(f'printf "#!/bin/sh\\n" > "{machine.commands}/{name}"' for name in ("chromium", "chromedriver"))
    machine.has("apt-get", f'[ "$1" = update ] || {{ {put}; /bin/chmod +x {machine.commands}/chrom*; }}')
    out, err = machine.run()
    assert out == "<-m><pytest><-n><3><--dist><loadfile>"
    assert "installing chromium" in err
    assert LEFT_OUT not in err


@pytest.mark.parametrize("root", [True, False])
def test_without_a_browser_its_tests_are_left_out_with_a_line_that_says_so(tmp_path: Path, root: bool) -> None:
    machine = Machine(tmp_path, root=root)
    machine.has("apt-get", "exit 100")  # no network, or no such package
    out, err = machine.run("tests/serve", "-m", "gpu")
    # The caller's own -m is the last.
    assert out == "<-m><pytest><-n><3><--dist><loadfile><-m><not gpu and not browser><tests/serve><-m><gpu>"
    assert err.count(LEFT_OUT) == 1
    assert machine.run("--setup-only")[0] == ""
