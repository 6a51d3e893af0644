"""docs/promises.md names tests and faults that exist, and every fault of the chaos run is promised something."""

from __future__ import annotations

import ast
import re

import pytest

from eval.chaos import FAULTS
from tests.source_rules import ROOT

TEXT = (ROOT / "docs" / "promises.md").read_text("utf-8")
ROWS = [line for line in TEXT.splitlines() if line.startswith("| ") and not line.startswith("| promise")]
NAMED = sorted(set(re.findall(r"tests/[\w/]+\.py::\w+", TEXT)))


def test_every_promise_names_what_shows_it() -> None:
    assert len(ROWS) >= 25
    for row in ROWS:
        _, promise, shown, _ = row.split("|")
        assert promise.strip().endswith(".")
        assert "`" in shown, promise


@pytest.mark.parametrize("named", NAMED)
def test_every_named_test_exists(named: str) -> None:
    path, name = named.split("::")
    tree = ast.parse((ROOT / path).read_text("utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_the_promised_faults_are_those_of_the_chaos_run() -> None:
    shown = [part for row in ROWS for part in re.split(r"; ", row.split("|")[2]) if part.strip().startswith("chaos ")]
    promised = {name for part in shown for name in re.findall(r"`([\w-]+)`", part)}
    assert promised <= set(FAULTS)
    assert set(FAULTS) - promised == {"engine-killed-for-good", "drafter-wrong"}
