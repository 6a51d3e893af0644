from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import eval

FOLDER = Path(eval.__file__).parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_thin_and_stripped_with_one_parameters_cell(path: Path) -> None:
    cells = json.loads(path.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert sum("parameters" in cell["metadata"].get("tags", []) for cell in cells) == 1
    assert all(len("".join(cell["source"]).splitlines()) <= 20 for cell in code)


def test_every_notebook_runs_on_the_fixture_without_a_network() -> None:
    assert len(NOTEBOOKS) >= 2
    command = [sys.executable, "-m", "pytest", "--nbmake", "--nbmake-timeout=300", "-q", "-p", "no:cacheprovider"]
    environ = {**os.environ, "https_proxy": "http://127.0.0.1:9", "http_proxy": "http://127.0.0.1:9"}
    result = subprocess.run([*command, str(FOLDER)], capture_output=True, text=True, env=environ, cwd=FOLDER.parents[1])
    assert result.returncode == 0, result.stdout + result.stderr
