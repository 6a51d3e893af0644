"""Prompts in whole numbers: near the eager model, the same bits alone, in company and in parts; decoding as it was."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from serve.kernels.triton import turing
from serve.kernels.triton.linear import TritonLinearBuilder
from serve.model.checkpoint import Checkpoint
from serve.model.config import load_model_config
from serve.model.integer_prompts import able_layers
from serve.model.loader import _integer_prompts, load_target
from serve.model.reader import WeightReader
from serve.model.target import TargetSettings
from serve.model.triton_layers import TritonTargetModel
from serve.model.weights_map import WeightsMap
from serve.parallel.split import Split
from tests.serve.model.prompt_bits import error_of_a_prompt
from tests.serve.model.test_triton_layers import PAGE, load_triton, relative, run
from tests.tiny_models import write_model


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The interpreter, or a card."""
    if request.param == "cuda":
        turing.install()
    return torch.device(request.param)


def test_prompts_are_near_the_eager_model_and_have_bits_of_their_own(tmp_path: Path, device: torch.device) -> None:
    write_model(tmp_path, "qwen2", scale=1.0, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
    eager = load_target(tmp_path, device=device, weights="fp32")
    plain = load_triton(tmp_path, "int8", device)
    model = load_triton(tmp_path, "int8", device, blocks=False)
    model.stack = replace(model.stack, integer_prompts=True)
    assert "int8 x int8" in model.kernel_path
    assert error_of_a_prompt(model, plain, eager) < 0.1


@pytest.mark.parametrize(("matrix", "able"), [("down_proj", 1), (None, 0)])
def test_a_matrix_without_such_codes_stays_with_the_library(tmp_path: Path, matrix: str | None, able: int) -> None:
    """A mixed model: 4-bit matrices in a layer that has 8-bit ones too."""
    write_model(tmp_path, "llama", intermediate_size=128, scale=1.0, num_hidden_layers=1)
    config, cpu = load_model_config(tmp_path), torch.device("cpu")
    eager = load_target(tmp_path, device=cpu, weights="fp32")
    want, _ = run(eager, eager.allocate_cache(8, PAGE), [(0, 18)])
    plan = WeightsMap("int8", (("*", 0, 0, matrix, "int4"),))
    builder = TritonLinearBuilder("int8", cpu, blocks=False)
    with Checkpoint(tmp_path) as checkpoint:
        parts = WeightReader(checkpoint, Split(config), builder, plan).read()
    assert able_layers(parts.layers) == able
    settings = TargetSettings("int8", cpu, builder.activation_dtype, integer_prompts=True)
    model = TritonTargetModel(config, parts, settings)
    got, _ = run(model, model.allocate_cache(8, PAGE), [(0, 18)])
    assert relative(got, want) < 0.3


@pytest.mark.parametrize(
    ("arch", "scaled", "taken", "told"),
    [
        ("sm75", True, True, "prompts run in int8 x int8"),
        ("sm75", False, False, "prompts stay in 16 bits"),
        ("sm90", True, False, None),
    ],
)
def test_auto_takes_whole_numbers_on_turing_where_the_weights_are_scaled(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    arch: str,
    scaled: bool,
    taken: bool,
    told: str | None,
) -> None:
    write_model(tmp_path, "llama", num_hidden_layers=1)
    config, cpu = load_model_config(tmp_path), torch.device("cpu")
    with Checkpoint(tmp_path) as checkpoint:
        reader = WeightReader(
            checkpoint, Split(config), TritonLinearBuilder("int8", cpu, blocks=False), WeightsMap("int8")
        )
        parts = reader.read()
    monkeypatch.setenv("TRITON_OVERRIDE_ARCH", arch)
    with caplog.at_level(logging.INFO):
        assert _integer_prompts("auto", parts, True, cpu, scaled) == taken
        assert not _integer_prompts("off", parts, True, cpu, scaled)
        assert _integer_prompts("w8a8", parts, True, cpu, scaled)
        assert not _integer_prompts("auto", parts, False, cpu, scaled)
    assert len(caplog.messages) == (told is not None)
    assert told is None or told in caplog.messages[0]
