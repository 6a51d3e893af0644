"""Predicted kernel times follow what was measured on one card, and what must be true of any."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eval.kernel_model import KERNEL_CARDS, KernelTimes, calibration, kernel_table
from eval.predict import main
from eval.shapes import intermediate_size, load_shape

MODEL = load_shape("qwen3-4b")
INNER = intermediate_size("qwen3-4b")


def test_every_measured_point_is_met_within_fifteen_percent() -> None:
    for name, predicted, measured in calibration(MODEL, INNER):
        assert predicted == pytest.approx(measured, rel=0.15), name


@pytest.mark.parametrize("card", KERNEL_CARDS)
def test_no_prediction_beats_the_bytes_it_reads(card: str) -> None:
    rates = KERNEL_CARDS[card]
    for weights, size in (("fp16", 2.0), ("int8", 1.0)):
        floor = MODEL.active_parameters * size / rates.bandwidth * 1e3
        assert floor < KernelTimes(MODEL, INNER, weights, rates).step_ms(1, 1, 1024) < 2.5 * floor


def test_more_work_takes_longer() -> None:
    for row in kernel_table(MODEL, INNER, KERNEL_CARDS["t4"]):
        assert row["1x1"] < row["8x1"] < row["32x1"]
        assert row["1x1"] < row["1x16"] < row["round 1x16"] < row["prompt 4096"]


def test_the_command_writes_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--card", "t4", "--json", str(tmp_path / "t4.json")]) == 0
    assert "round 1x16" in capsys.readouterr().out
    kernels = json.loads((tmp_path / "t4.json").read_text())["predictions"]["kernels"]
    assert [row["weights"] for row in kernels] == ["fp16", "int8", "int4"]
