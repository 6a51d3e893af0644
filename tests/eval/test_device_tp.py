"""The bench over two cards: its table, random parts of a model, a rank that fails; what it measures needs cards."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch

from eval.device_tp import Group, PartFailed, main, table
from eval.device_tp_rank import RandomCheckpoint
from serve.parallel.split import Part


def test_parts_of_a_random_matrix_make_the_whole_one() -> None:
    made = RandomCheckpoint(torch.device("cpu"))
    whole = made.take("a", (6, 8))
    for axis, size in ((0, 6), (1, 8)):
        halves = [made.take("a", (6, 8), Part(axis, start, size // 2)) for start in (0, size // 2)]
        assert torch.equal(torch.cat(halves, axis), whole)
    assert not torch.equal(made.take("b", (6, 8)), whole)


def test_the_table_sets_two_cards_beside_one_and_beside_the_prediction() -> None:
    prediction = {"one": {"1x1": 2.0, "round 1x16": 3.0}, "two": {"1x1": 1.0, "whole draft": 2.5}, "exchange": {}}
    report = {
        "shapes": ["small"],
        "one": {"small": {"1x1": 2.2, "whole draft": 3.1}},
        "two": {"small": {"1x1": 1.1, "ranks with the same bits": True}},
        "drafter": {},
        "link": {"small": {"read_tb_s": 4.41234}},
        "predicted": {"small": prediction},
        "faults": {"drafter small": "PartFailed: no"},
    }
    lines = table(report)
    assert lines[1].split() == ["1", "stream", "2.20", "/", "2.00", "1.10", "/", "1.00", "2.00", "/", "2.00"]
    (whole,) = [line for line in lines if "whole drafter" in line]
    assert whole.split()[-9:] == ["3.10", "/", "3.00", "-", "/", "2.50", "-", "/", "1.20"]
    assert any("ranks with the same bits True" in line for line in lines)
    assert "read_tb_s 4.412" in "\n".join(lines)
    assert lines[-1] == "!drafter small: PartFailed: no"


def test_a_rank_that_fails_ends_its_part_with_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eval.device_tp.sys.executable", "false")
    with pytest.raises(PartFailed, match="ranks ended with"):
        Group(argparse.Namespace(device="cpu", weights="fp16"), "link", tmp_path, [0, 1]).found()


def test_an_unknown_part_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--tokenizer-dir", "x", "--parts", "one,nonsense"])
    assert "unknown nonsense" in capsys.readouterr().err
