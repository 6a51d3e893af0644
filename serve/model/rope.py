"""Rotary positions: from config.json's rope fields to a table of unit turns, one complex number a pair and position.

Frequencies follow the published definitions of linear scaling, Llama 3 and YaRN (arXiv 2309.00071) in float32, as the
models were trained. This file knows no heads and no layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from serve.json_file import shown
from serve.model.errors import ModelError

_BLOCK = 4096
_FIELDS = {
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
}


@dataclass(frozen=True)
class RopeConfig:
    """type: default, linear, llama3 or yarn. theta: base wavelength. Other fields only where the type uses them."""

    type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


def parse_rope(config: dict[str, Any]) -> RopeConfig:
    """Reads ``rope_parameters`` (newer files) or ``rope_theta`` and ``rope_scaling`` (older ones) of a config.json.

    A file that has both must mean the same by them: guides add ``rope_scaling`` by hand to whatever file there is, and
    libraries differ in which of the two wins. Raises ModelError."""
    rope = _parse(config, "rope_scaling" if config.get("rope_parameters") in (None, {}) else "rope_parameters")
    if config.get("rope_scaling") and rope != _parse(config, "rope_scaling"):
        raise ModelError(
            "config.json: rope_scaling differs from rope_parameters; keep one, with rope_type and rope_theta in it"
        )
    return rope


def _parse(config: dict[str, Any], name: str) -> RopeConfig:
    given = config.get(name)
    if given is None:
        given = {}
    if not isinstance(given, dict):
        raise ModelError(f"config.json: {name} must be an object, got {shown(given)}")
    kind = given.get("rope_type", given.get("type", "default"))
    if not isinstance(kind, str) or kind not in _FREQUENCIES:
        raise ModelError(f"config.json: {name} type {shown(kind)} is not served; known: {', '.join(_FREQUENCIES)}")
    if given.get("mrope_section") is not None:
        raise ModelError(f"config.json: {name}.mrope_section (multimodal rotary) is not served")
    for source in (config, given):
        if source.get("partial_rotary_factor", 1.0) not in (1, None):
            raise ModelError(
                f"config.json: partial_rotary_factor {shown(source['partial_rotary_factor'])} is not served, only 1"
            )
    theta = given.get("rope_theta")
    theta = config.get("rope_theta", 10000.0) if theta is None else theta
    values: dict[str, Any] = {"type": kind, "theta": _positive("rope_theta", theta)}
    for field in _FIELDS:
        if kind != "default" and given.get(field) is not None:
            values[field] = _positive(f"{name}.{field}", given[field])
    for field in _REQUIRED[kind]:
        if field not in values:
            raise ModelError(f"config.json: {name}.{field} is missing; rope type {kind} needs it")
    if kind in ("llama3", "yarn"):
        original = config.get("original_max_position_embeddings") or values.get("original_max_position_embeddings")
        own = int(_positive("max_position_embeddings", config.get("max_position_embeddings")))
        original = int(_positive("original_max_position_embeddings", original or own))
        values["original_max_position_embeddings"] = max(1, original)
    if kind == "yarn":
        values["truncate"] = bool(given.get("truncate", True))
        if "factor" not in values:
            values["factor"] = own / values["original_max_position_embeddings"]
    return RopeConfig(**values)


def _positive(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ModelError(f"config.json: {name} must be a positive number, got {shown(value)}")
    return float(value)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """-> inv_freq [head_dim / 2] float32 in radians a position, and the factor on every cosine and sine.

    Raises ModelError where the fields, each possible by itself, make no finite frequencies together."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    try:
        frequencies, factor = _FREQUENCIES[rope.type](rope, 1.0 / rope.theta**exponents, head_dim)
    except (ArithmeticError, ValueError):  # the logarithm of theta 1, a range of no length
        frequencies, factor = torch.full((1,), math.nan), 1.0
    if not bool(frequencies.isfinite().all()) or not math.isfinite(factor):
        raise ModelError(f"config.json: its rotary fields give no finite frequencies: {rope}")
    return frequencies, factor


def _default(rope: RopeConfig, frequency: Tensor, head_dim: int) -> tuple[Tensor, float]:
    return frequency, 1.0


def _linear(rope: RopeConfig, frequency: Tensor, head_dim: int) -> tuple[Tensor, float]:
    return frequency / rope.factor, 1.0


def _llama3(rope: RopeConfig, frequency: Tensor, head_dim: int) -> tuple[Tensor, float]:
    """Long waves are slowed by ``factor``, short ones kept, those between blended."""
    length = rope.original_max_position_embeddings
    wavelength = 2 * math.pi / frequency
    blend = (length / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = (1 - blend) * frequency / rope.factor + blend * frequency
    slowed = torch.where(wavelength > length / rope.low_freq_factor, frequency / rope.factor, between)
    return torch.where(wavelength < length / rope.high_freq_factor, frequency, slowed), 1.0


def _yarn(rope: RopeConfig, frequency: Tensor, head_dim: int) -> tuple[Tensor, float]:
    """Dimensions that turn often keep their frequency, those that turn rarely are slowed, a ramp between."""

    def dimension(turns: float) -> float:
        length = rope.original_max_position_embeddings
        return head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    slowed = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp_(0, 1)
    kept = 1 - slowed
    scaled = 1.0 / (rope.factor * (1.0 / frequency))
    return scaled * (1 - kept) + frequency * kept, _yarn_attention_factor(rope)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    def growth(scale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * scale * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return growth(rope.mscale) / growth(rope.mscale_all_dim)
    return growth(1.0)


_FREQUENCIES: dict[str, Callable[[RopeConfig, Tensor, int], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
_REQUIRED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
}


class RotaryTable:
    """Turns of positions 0 .. length - 1. Grown in whole blocks computed alike, so a position's bits never change."""

    def __init__(self, rope: RopeConfig, head_dim: int, device: torch.device) -> None:
        self.inv_freq, self.factor = inverse_frequencies(rope, head_dim)
        self.device = device
        self._table = torch.empty(0, 1, head_dim // 2, dtype=torch.complex64, device=device)

    def reserve(self, length: int) -> None:
        """Makes positions below ``length`` available."""
        while self._table.shape[0] < length:
            start = self._table.shape[0]
            angles = torch.arange(start, start + _BLOCK, dtype=torch.float32)[:, None] * self.inv_freq
            turns = torch.complex(angles.cos() * self.factor, angles.sin() * self.factor)
            self._table = torch.cat((self._table, turns[:, None].to(self.device)))

    def rows(self, positions: Tensor) -> Tensor:
        """positions [T] int64 -> [T, 1, head_dim / 2] complex64."""
        return self._table.index_select(0, positions)
