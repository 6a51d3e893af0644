"""docs/growing.md says of its table what the command beside it prints; its first row is run."""

from __future__ import annotations

import re

import pytest

from eval.capacity import main
from tests.conftest import ROOT


def test_the_capacity_table_is_what_its_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "growing.md").read_text(encoding="utf-8")
    shared = re.findall(r"python -m eval\.capacity ([^`]*) \.\.\.`", page)
    lengths = re.findall(r"`(--context [^`]*)`", page)
    model, rate, running, tpot, cards = re.findall(
        r"^\| `(--model qwen3-4b)` \| ([\d.]+) a card \| (\d+) \| (\d+) ms \| (\d+) \|$", page, re.MULTILINE
    )[0]
    main([*shared[0].split(), *model.split(), *lengths[0].split()])
    said = capsys.readouterr().out
    assert f": {running} requests, {rate} requests/s of" in said
    assert f"{running} requests; TPOT there about {tpot}." in said
    peak = float(re.findall(r"(\d+) at the peak", page)[0])
    assert float(cards) - 1 < peak / float(rate) <= float(cards)
