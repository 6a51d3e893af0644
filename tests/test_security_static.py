"""What no file of the project may do, read from the source: run foreign code, unpickle, pass text to a shell.

tests/test_imports.py is stricter about the server; this is about everything that is shipped.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.source_rules import BANNED_MODULES, ROOT, Rules, dotted, faults, faults_below, imported

FOLDERS = ("serve", "verify", "eval", "drafter_train", "scripts")
BANNED = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load"}
BANNED |= {"torch.hub.load", "joblib.load", "subprocess.getoutput", "subprocess.getstatusoutput"}
RULES = Rules(
    banned_modules=BANNED_MODULES | {"dill", "cloudpickle"},
    banned_calls=frozenset(BANNED),
    needs={
        "torch.load": ("weights_only", True),
        "np.load": ("allow_pickle", False),
        "numpy.load": ("allow_pickle", False),
    },
    forbidden={"trust_remote_code": True, "shell": True, "allow_pickle": True, "weights_only": False},
)


@pytest.mark.parametrize("folder", FOLDERS)
def test_nothing_unpickles_evaluates_or_runs_foreign_code(folder: str) -> None:
    assert faults_below(folder, RULES) == []


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("from pickle import loads", "line 1: imports pickle"),
        ("torch.load(path)", "line 1: torch.load without weights_only=True"),
        ("torch.load(path, weights_only=flag)", "line 1: torch.load without weights_only=True"),
        ("np.load(path)", "line 1: np.load without allow_pickle=False"),
        ("yaml.load(text, Loader=yaml.Loader)", "line 1: calls yaml.load"),
        ("subprocess.run(line, shell=True)", "line 1: shell=True"),
        ("os.system(line)", "line 1: calls os.system"),
        ("AutoModel.from_pretrained(name, trust_remote_code=True)", "line 1: trust_remote_code=True"),
        ("exec(text)", "line 1: calls exec"),
    ],
)
def test_each_fault_is_seen(source: str, fault: str) -> None:
    assert fault in list(faults(source, RULES))


@pytest.mark.parametrize(
    "source", ["model.eval()", "re.compile(x)", "torch.load(p, weights_only=True)", "yaml.safe_load(t)", "run(a)"]
)
def test_what_is_allowed_is_not_reported(source: str) -> None:
    assert list(faults(source, RULES)) == []


ERROR_ALONE = "from jinja2 import TemplateError"
"""Catching what a template raises runs none."""


def test_templates_run_in_the_sandbox_only_and_come_from_no_client() -> None:
    users = {
        path.relative_to(ROOT).as_posix()
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if "jinja2" in imported(node) and ast.unparse(node) != ERROR_ALONE
    }
    assert users <= {"serve/api/chat.py"}
    source = (ROOT / "serve" / "api" / "chat.py").read_text("utf-8")
    made = [dotted(node.func) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    assert [name for name in made if name.endswith("Environment")] == ["ImmutableSandboxedEnvironment"]


def test_bandit_finds_nothing() -> None:
    command = [sys.executable, "-m", "bandit", "-q", "-c", "pyproject.toml", "-r", *FOLDERS]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == 0, found.stdout


def test_bandit_would_find_something(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("import hashlib, pickle\nhashlib.md5(b'x')\npickle.loads(b'x')\n")
    command = [sys.executable, "-m", "bandit", "-q", "-c", "pyproject.toml", "-r", str(tmp_path)]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, timeout=120, check=False).returncode == 1
