"""Input-channel scales that make rounding hurt less, shipped beside a model and applied at load without changing it.

A matrix is stored as W * s, and what writes its input is divided by s: a norm's weight, the up projection's rows, or
the value rows. Before rounding the product is the same; afterwards the channels that matter most have finer steps. The
idea is AWQ's (Lin et al. 2024, arXiv 2306.00978). How such a file is made: ``python -m eval.calibrate``.

    model.layers.N.qkv_proj      [hidden_size]                     into the norm before attention
    model.layers.N.o_proj        [num_key_value_heads * head_dim]  into the value rows
    model.layers.N.gate_up_proj  [hidden_size]                     into the norm before the MLP
    model.layers.N.down_proj     [intermediate_size]               into the up projection's rows

Knows names, shapes and where a scale goes; no rounding.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from serve.json_file import shown
from serve.model.config import ModelConfig
from serve.model.errors import ModelError
from serve.model.weights_map import MATRICES

LARGEST = 1024.0
"""Scales lie between its inverse and it: float16 weights then stay far from their ends."""
_NAME = re.compile(r"model\.layers\.(\d{1,6})\.(\w+)")


@dataclass(frozen=True)
class ChannelScales:
    """By (layer, matrix): a float32 scale of each input channel; what is missing is not scaled. digest: of the file."""

    by_matrix: Mapping[tuple[int, str], Tensor] = field(default_factory=dict)
    digest: str = ""

    def get(self, layer: int, matrix: str) -> Tensor | None:
        return self.by_matrix.get((layer, matrix))


NO_SCALES = ChannelScales()


def channels(config: ModelConfig, matrix: str) -> int:
    """How many scales a matrix of each layer has."""
    return {
        "qkv_proj": config.hidden_size,
        "o_proj": config.num_kv_heads * config.head_dim,
        "gate_up_proj": config.hidden_size,
        "down_proj": config.intermediate_size,
    }[matrix]


def scale_name(layer: int, matrix: str) -> str:
    """A tensor's name in the file."""
    return f"model.layers.{layer}.{matrix}"


def read_channel_scales(path: Path, config: ModelConfig) -> ChannelScales:
    """Raises ModelError naming the file, the tensor and what is wrong with it."""
    found: dict[tuple[int, str], Tensor] = {}
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        with safe_open(path, framework="pt", device="cpu") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a mapping)
                place = _place(path, name, config)
                found[place] = _checked(path, name, opened.get_tensor(name), config)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from None
    except SafetensorError as error:
        raise ModelError(f"{path} is not a readable safetensors file: {error}") from None
    return ChannelScales(found, digest)


def _place(path: Path, name: str, config: ModelConfig) -> tuple[int, str]:
    match = _NAME.fullmatch(name)
    if match is None or match[2] not in MATRICES or int(match[1]) >= config.num_layers:
        raise ModelError(
            f"{path}: tensor {shown(name)} is not model.layers.N.MATRIX with N below {config.num_layers} and MATRIX "
            f"one of {', '.join(MATRICES)}"
        )
    return int(match[1]), match[2]


def _checked(path: Path, name: str, tensor: Tensor, config: ModelConfig) -> Tensor:
    wanted = channels(config, name.rsplit(".", 1)[1])
    if tuple(tensor.shape) != (wanted,) or not tensor.dtype.is_floating_point:
        raise ModelError(f"{path}: {name} is {tensor.dtype} {list(tensor.shape)}, needed: floats [{wanted}]")
    scale = tensor.float()
    if not bool(((scale >= 1 / LARGEST) & (scale <= LARGEST)).all()):
        raise ModelError(f"{path}: {name} has values outside {1 / LARGEST:g} .. {LARGEST:g}")
    return scale


def per_query_head(scale: Tensor, config: ModelConfig) -> Tensor:
    """Scales of value channels [kv_heads * head_dim] -> of the output projection's input [heads * head_dim]: query
    heads that share a value head share its scales."""
    grouped = scale.view(config.num_kv_heads, 1, config.head_dim)
    return grouped.expand(-1, config.num_heads // config.num_kv_heads, -1).reshape(-1)


def with_ones(before: int, scale: Tensor) -> Tensor:
    """What rows are multiplied by where the last of them write the channels of ``scale``: ones, then its inverse."""
    return torch.cat((torch.ones(before), 1 / scale))
