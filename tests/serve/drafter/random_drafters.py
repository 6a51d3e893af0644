"""Random drafters in DFlash layout for tiny targets, written to a folder as any engine would find them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from serve.drafter.dflash import DFlashConfig, DFlashModel

TARGET_LAYERS = 5


def drafter_config(**changes: Any) -> DFlashConfig:
    """A drafter for ``tests.tiny_models.write_model(..., num_hidden_layers=5)`` whose head shapes are its own."""
    values: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 72,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 320,
        "block_size": 6,
        "mask_token_id": 3,
        "target_layer_ids": (0, 1, 3),
        "num_target_layers": TARGET_LAYERS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 20_000.0,
        "max_position_embeddings": 512,
        "dtype": "float32",
    }
    return DFlashConfig(**{**values, **changes})


def random_drafter(config: DFlashConfig, seed: int = 7) -> DFlashModel:
    """Weights large enough that every part of the forward shows in the result."""
    torch.manual_seed(seed)
    model = DFlashModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 2.0 / parameter.shape[1] ** 0.5)
            else:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def write_drafter(
    folder: Path, model: DFlashModel, *, rename: dict[str, str] | None = None, extra: dict[str, Tensor] | None = None
) -> Path:
    """config.json and model.safetensors, with tensors renamed (to "" drops them) or added for tests of the loader."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model.config.to_json()))
    names = rename or {}
    tensors = {names.get(n, n): p.detach().clone() for n, p in model.named_parameters() if names.get(n, n)}
    save_file({**tensors, **(extra or {})}, folder / "model.safetensors")
    return folder
