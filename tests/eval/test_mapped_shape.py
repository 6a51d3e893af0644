"""Under a weights map the predictor counts the bytes that the loader keeps, and a map of one format is that format."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from eval.kernel_model import KERNEL_CARDS, KernelTimes, kernel_table
from eval.mapped_shape import mapped, matrix_shapes, read_map
from eval.predict import main
from eval.shapes import intermediate_size, load_shape
from serve.kernels.triton.linear import TritonLinearBuilder
from serve.model.checkpoint import Checkpoint
from serve.model.config import load_model_config
from serve.model.loader import packed_matrices
from serve.model.reader import WeightReader
from serve.model.weights_map import WeightsMap
from serve.parallel.split import Split
from tests.tiny_models import write_model

PLAN = WeightsMap("int4-g64", (("0", 0, 0, None, "int8"), ("*.down_proj", 0, 1, "down_proj", "int8-g128")))


@pytest.mark.parametrize("tied", [True, False])
def test_bytes_are_those_that_are_kept(tmp_path: Path, tied: bool) -> None:
    write_model(tmp_path, "qwen3", hidden_size=128, intermediate_size=256, tie_word_embeddings=tied)
    shape = mapped(load_shape(str(tmp_path)), intermediate_size(str(tmp_path)), PLAN)
    with Checkpoint(tmp_path) as checkpoint:
        builder = TritonLinearBuilder(PLAN.default, torch.device("cpu"))
        weights = WeightReader(checkpoint, Split(load_model_config(tmp_path)), builder, PLAN).read()
    kept = {name: packed.nbytes for name, packed in packed_matrices(weights).items()}
    assert shape.head_bytes == kept["lm_head"]
    vectors = shape.read_bytes - sum(kept.values())
    # Two norms of the hidden width and two of a head in each of two layers, and the last norm.
    assert vectors == 4 * (2 * (2 * 128 + 2 * 32) + 128)
    assert shape.lookup_bytes == (0 if tied else 2 * 320 * 128)


def test_a_map_of_one_format_takes_that_formats_times() -> None:
    model, inner, card = load_shape("qwen3-4b"), intermediate_size("qwen3-4b"), KERNEL_CARDS["t4"]
    for weights in ("int8", "int4"):
        plain = KernelTimes(model, inner, weights, card)
        same = KernelTimes(model, inner, weights, card, plan=WeightsMap(weights))
        assert same.step_ms(1, 16, 1024) == pytest.approx(plain.step_ms(1, 16, 1024))
        assert same.prompt_ms(4096) == pytest.approx(plain.prompt_ms(4096))
    rows = kernel_table(model, inner, card, plan=WeightsMap("int4", (("*", 0, 17, None, "int8"),)))
    steps = {row["weights"]: row["1x1"] for row in rows}
    assert steps["map"] == pytest.approx((steps["int8"] + steps["int4"]) / 2, rel=1e-3)
    # 36 layers of four matrices and one head are all the parameters but the norms.
    matrices = 36 * sum(rows * depth for rows, depth in matrix_shapes(model, inner).values())
    assert model.parameters - matrices - model.head_parameters == 36 * (2 * 2560 + 2 * 128) + 2560


def test_the_predictor_takes_a_map_and_names_its_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "map.json"
    path.write_text(json.dumps({"default": "int4", "layers": {"0-17": "int8", "lm_head": "int8"}}))
    assert read_map(path, 36, "fp16").default == "int4"
    assert main(["--card", "t4", "--weights-map", str(path)]) == 0
    assert "  map " in capsys.readouterr().out
    path.write_text(json.dumps({"default": "int4", "layers": {"40": "int8"}}))
    with pytest.raises(SystemExit):
        main(["--card", "t4", "--weights-map", str(path)])
    assert "layers['40']: the model has layers 0 to 35" in capsys.readouterr().err
