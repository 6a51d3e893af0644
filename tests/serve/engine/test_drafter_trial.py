"""A drafter folder of the right shape that cannot draft is found at the start, before it can fail a request."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from serve.config import ServeConfig
from serve.engine.build import StartError, build_engine
from tests.serve.drafter.random_drafters import drafter_config, random_drafter, write_drafter
from tests.serve.engine.test_engine import GREEDY, PROMPTS, run
from tests.tiny_models import greedy, write_model


def test_a_drafter_of_nan_is_refused_or_left_out_as_the_contract_says(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", num_hidden_layers=5)
    write_drafter(tmp_path / "drafter", random_drafter(drafter_config()))
    for file in (tmp_path / "drafter").glob("*.safetensors"):
        weights = load_file(file)
        name = next(name for name in sorted(weights) if "mlp" in name)
        save_file({**weights, name: torch.full_like(weights[name], float("nan"))}, file)
    config = ServeConfig(
        model_dir=str(tmp_path / "model"),
        drafter_dir=str(tmp_path / "drafter"),
        weights="fp32",
        page_size=16,
        threads=1,
    )
    with pytest.raises(StartError, match=r"drafter.*(NaN|finite)"):
        build_engine(config)
    engine, info = build_engine(replace(config, drafter_optional=True))
    assert info["drafter"] is None
    assert any("WITHOUT" in line for line in info["warnings"])
    assert run(engine, PROMPTS, GREEDY) == [greedy(model, prompt, 24) for prompt in PROMPTS]
