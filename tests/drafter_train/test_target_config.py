"""The trainer reads a target's config.json as the server does, or says what it does not support."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from drafter_train.target import read_target_config

PLAIN = {"rope_type": "default", "rope_theta": 500.0}
YARN = {"type": "yarn", "factor": 4.0}


@pytest.mark.parametrize("fields", [{"rope_scaling": YARN}, {"rope_parameters": PLAIN, "rope_scaling": YARN}])
def test_scaled_rotary_positions_are_refused_wherever_they_stand(fields: dict[str, Any], tmp_path: Path) -> None:
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    config = {"model_type": "llama", **dict.fromkeys(sizes, 8), "rms_norm_eps": 1e-5, "max_position_embeddings": 64}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**config, "rope_parameters": PLAIN}))
    assert read_target_config(tmp_path).rope_theta == 500
    path.write_text(json.dumps({**config, **fields}))
    with pytest.raises(ValueError, match="only default rotary positions are supported, got rope_scaling"):
        read_target_config(tmp_path)
