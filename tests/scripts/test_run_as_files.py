"""Scripts whose docstring says ``python scripts/NAME.py`` find the project's packages when they are run so."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.conftest import ROOT

OWN = ("serve", "verify", "eval", "drafter_train", "scripts")
RUN_AS_FILES = [
    path for path in sorted((ROOT / "scripts").glob("*.py")) if f"python scripts/{path.name}" in path.read_text()
]


def test_there_are_some() -> None:
    assert {"check_kernels.py", "prompt_products.py", "sweep_tiles.py"} <= {path.name for path in RUN_AS_FILES}


@pytest.mark.parametrize("path", RUN_AS_FILES, ids=lambda path: path.name)
def test_the_projects_folder_is_on_the_path_before_its_packages_are_imported(path: Path) -> None:
    found = False
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        found |= ast.unparse(node).startswith("sys.path.insert(0, ")
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in OWN:
            assert found, f"line {node.lineno}: {ast.unparse(node)}"
