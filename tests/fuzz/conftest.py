"""Counts what the fuzz tests tried, so that a long run can say so."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable

import pytest

from tests.fuzz.scale import ENVIRONMENT_NAME

TRIED = pytest.StashKey[Counter[str]]()


@pytest.fixture
def tried(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Call it once a case, with a word for what came of it."""
    counts = request.config.stash.setdefault(TRIED, Counter())
    name = request.node.name

    def note(outcome: str) -> None:
        counts[f"{name}: {outcome}"] += 1

    return note


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    counts = config.stash.get(TRIED, Counter())
    if counts and ENVIRONMENT_NAME in os.environ:
        terminalreporter.section(f"fuzz: {sum(counts.values())} cases")
        for line, count in sorted(counts.items()):
            terminalreporter.write_line(f"{count:8d}  {line}")
