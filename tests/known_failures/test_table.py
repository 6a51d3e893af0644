"""The table of public bug reports in docs/known_failures.md: every case has a row, every row a test that exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "known_failures.md"
RESULTS = {"passes", "passes, reduced", "not run", "fails"}
CASES = [
    *("B01", "B02", "B04", "B06", "B07", "B08", "B09", "B11", "B13", "B14", "B16", "B17", "B18", "B20", "B22", "B23"),
    *("B24", "B26", "B27", "B29", "B30", "B31", "B34", "B35", "B36", "B38", "B39", "B40", "B42", "B43", "B44", "B45"),
    *("B47", "B48"),
]


def rows() -> Iterator[list[str]]:
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if re.fullmatch(r"[BRV]\d\d\d?", cells[0]):
            yield cells


def defined(path: Path) -> set[str]:
    """Names of the test functions in a file, with their class where they have one."""
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            names |= {f"{node.name}::{item.name}" for item in node.body if isinstance(item, ast.FunctionDef)}
    return names


def test_every_case_has_one_row_and_a_result() -> None:
    found = [cells[0] for cells in rows()]
    assert [name for name in found if name.startswith("B")] == CASES
    assert len(set(found)) == len(found)
    for name, what, tests, result in rows():
        assert what
        assert tests
        assert result in RESULTS, f"{name}: {result}"


@pytest.mark.parametrize("cells", list(rows()), ids=lambda cells: cells[0])
def test_every_named_test_exists(cells: list[str]) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::([\w:]+)`", cells[2])
    assert named, f"{cells[0]} names no test"
    for file, test in named:
        path = ROOT / file
        assert path.is_file(), file
        assert test in defined(path), f"{file} has no {test}"


def test_the_totals_above_the_table_are_those_of_its_rows() -> None:
    counts = {result: sum(1 for cells in rows() if cells[3] == result) for result in RESULTS}
    text = TABLE.read_text(encoding="utf-8")
    for result, count in counts.items():
        stated = re.search(rf"(\d+) {result}(?!,)", text)
        assert stated is not None, f"no total of {result!r}"
        assert int(stated[1]) == count, f"{result}: the rows have {count}"
