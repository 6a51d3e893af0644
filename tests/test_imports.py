"""What the server and the verifier may import and call, read from their source: nothing here runs them."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
THIRD_PARTY = {"torch", "numpy", "tokenizers", "safetensors", "transformers", "fastapi", "starlette", "uvicorn"}
THIRD_PARTY |= {"pydantic", "httpx", "triton"}
OPTIONAL = {"jinja2"}
OWN = {"serve", "verify"}
BANNED_MODULES = {"pickle", "marshal", "shelve", "dbm"}
BANNED_CALLS = {"torch.load", "torch.save", "torch.hub.load", "numpy.load", "np.load", "yaml.load", "eval", "exec"}


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def guarded_lines(tree: ast.AST) -> set[int]:
    """Lines that do not run when a module is imported, or that run in a ``try``: where a package may be missing."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or (isinstance(node, ast.Try) and node.handlers):
            for statement in node.body:
                lines.update(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1))
    return lines


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name.split(".")[0] for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0:
        return [str(node.module).split(".")[0]]
    return []


def faults(source: str) -> Iterator[str]:
    tree = ast.parse(source)
    guarded = guarded_lines(tree)
    for node in ast.walk(tree):
        where = getattr(node, "lineno", 0)
        for name in imported(node):
            standard = name in sys.stdlib_module_names and name not in BANNED_MODULES
            if not standard and name not in THIRD_PARTY | OPTIONAL | OWN:
                yield f"line {where}: imports {name}"
            if name in OPTIONAL and where not in guarded:
                yield f"line {where}: needs {name} at import time"
        if isinstance(node, ast.Call):
            if dotted(node.func) in BANNED_CALLS:
                yield f"line {where}: calls {dotted(node.func)}"
            for keyword in node.keywords:
                allowed = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                if keyword.arg == "trust_remote_code" and not allowed:
                    yield f"line {where}: trust_remote_code"
                if keyword.arg == "allow_pickle" and not allowed:
                    yield f"line {where}: allow_pickle"
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and node.slice.value == "auto_map":
            yield f"line {where}: reads auto_map"


@pytest.mark.parametrize("folder", sorted(OWN))
def test_only_what_a_grading_image_has_is_imported_and_nothing_runs_foreign_code(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    found = [f"{path.relative_to(ROOT)}: {fault}" for path in files for fault in faults(path.read_text("utf-8"))]
    assert found == []


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("import pickle", "line 1: imports pickle"),
        ("from vllm.engine import LLM", "line 1: imports vllm"),
        ("import drafter_train.data", "line 1: imports drafter_train"),
        ("import jinja2", "line 1: needs jinja2 at import time"),
        ("x = torch.load('weights.bin')", "line 1: calls torch.load"),
        ("def f(text):\n    return eval(text)", "line 2: calls eval"),
        ("model(path, trust_remote_code=True)", "line 1: trust_remote_code"),
        ("np.lib.open(path, allow_pickle=flag)", "line 1: allow_pickle"),
        ("code = config['auto_map']", "line 1: reads auto_map"),
    ],
)
def test_each_fault_is_seen(source: str, fault: str) -> None:
    assert list(faults(source)) == [fault]


@pytest.mark.parametrize(
    "source",
    [
        "try:\n    import jinja2\nexcept ImportError:\n    jinja2 = None",
        "from . import base\nmodel.eval()\nimport torch.nn.functional as F",
        "AutoTokenizer.from_pretrained(path, trust_remote_code=False)",
    ],
)
def test_what_is_allowed_is_not_reported(source: str) -> None:
    assert list(faults(source)) == []
