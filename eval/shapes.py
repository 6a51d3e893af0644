"""What the arithmetic needs to know of a model and of a card: a dense decoder's shape, and a data-sheet row.

Shapes come from a ``config.json`` or from ``data/shapes.json``, cards from ``data/cards.json`` (each figure with its
source). Standard library only. It computes sizes, not times.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parent / "data"
FAMILIES = ("llama", "qwen2", "qwen3")
# Bytes per parameter of the matrices. int4: groups of 128 with a 16-bit scale and a 4-bit zero point.
WEIGHT_BYTES = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": (4 + 20 / 128) / 8}
KV_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "int8": 1}


@dataclass(frozen=True)
class ModelShape:
    """A dense decoder. ``parameters`` counts all weights, ``head_parameters`` the output vocabulary matrix.

    ``weight_bytes`` is what is held in memory. ``lookup_parameters`` (an untied input embedding, in
    ``lookup_bytes`` bytes) is held but not read by a decode step, which takes one row of it.
    ``head_bytes`` are the vocabulary matrix's.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    parameters: int
    head_parameters: int
    weight_bytes: float
    kv_element_bytes: int = 2
    lookup_parameters: int = 0
    lookup_bytes: float = 0.0
    head_bytes: float = 0.0

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of one token over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.kv_element_bytes

    @property
    def read_bytes(self) -> float:
        """Weight bytes that one decode step reads."""
        return self.weight_bytes - self.lookup_bytes

    @property
    def embedding_bytes(self) -> float:
        """Bytes of the input embedding, which is the head where the two are tied."""
        return self.lookup_bytes if self.lookup_parameters else self.head_bytes

    @property
    def active_parameters(self) -> int:
        """Parameters that take part in one token's matrix products."""
        return self.parameters - self.lookup_parameters

    def with_weights(self, body: str, head: str | None = None) -> ModelShape:
        """The same model with its matrices in format ``body`` and its vocabulary matrix in ``head`` (fp16 by default
        when the body is quantised below 8 bits, else as the body)."""
        head = head or ("fp16" if body == "int4" else body)
        matrices = self.active_parameters - self.head_parameters
        lookup = self.lookup_parameters * WEIGHT_BYTES[head]
        size = matrices * WEIGHT_BYTES[body] + self.head_parameters * WEIGHT_BYTES[head] + lookup
        vocabulary = self.head_parameters * WEIGHT_BYTES[head]
        return replace(self, weight_bytes=size, lookup_bytes=lookup, head_bytes=vocabulary)

    def with_kv(self, kv_format: str, kv_heads: int | None = None) -> ModelShape:
        """The same model with another KV element size, and optionally another number of KV heads."""
        return replace(self, kv_element_bytes=KV_BYTES[kv_format], kv_heads=kv_heads or self.kv_heads)


def dense(
    name: str, parameters: float, layers: int, kv_heads: int, head_dim: int, hidden: int = 0, heads: int = 0
) -> ModelShape:
    """A shape from the few figures an exercise gives; weights are fp16 and the head is not counted apart."""
    count = round(parameters)
    return ModelShape(name, layers, hidden, heads, kv_heads, head_dim, count, 0, count * 2.0)


def shape_from_config(config: dict[str, Any], name: str = "") -> ModelShape:
    """Counts the parameters of a llama, qwen2 or qwen3 dense model from its config; ValueError on another family."""
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"model_type {family!r} is not one of {', '.join(FAMILIES)}")
    hidden, layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
    heads = int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or hidden // heads)
    queries, keys = heads * head_dim, kv_heads * head_dim
    layer = hidden * (2 * queries + 2 * keys) + 3 * hidden * int(config["intermediate_size"]) + 2 * hidden
    if family == "qwen3":
        layer += 2 * head_dim
    if family == "qwen2":
        layer += queries + 2 * keys
    vocabulary = int(config["vocab_size"]) * hidden
    tied = bool(config.get("tie_word_embeddings"))
    parameters = layers * layer + hidden + vocabulary * (1 if tied else 2)
    lookup = 0 if tied else vocabulary
    shape = ModelShape(
        name or str(family), layers, hidden, heads, kv_heads, head_dim, parameters, vocabulary, parameters * 2.0
    )
    return replace(shape, lookup_parameters=lookup, lookup_bytes=lookup * 2.0, head_bytes=vocabulary * 2.0)


def named_config(name: str) -> dict[str, Any]:
    """The config of a named shape; ValueError with the known names."""
    configs: dict[str, dict[str, Any]] = json.loads((DATA / "shapes.json").read_text())
    if name not in configs:
        raise ValueError(f"no shape {name!r}; known: {', '.join(configs)}")
    return configs[name]


def load_shape(source: str) -> ModelShape:
    """A shape from a model folder, a config.json or a known name."""
    return shape_from_config(*_config(source))


def intermediate_size(source: str) -> int:
    """Width of the gated product of a model folder, a config.json or a known name."""
    return int(_config(source)[0]["intermediate_size"])


def shape_config(source: str) -> dict[str, Any]:
    """The config of a model folder, a config.json or a known name."""
    return _config(source)[0]


def _config(source: str) -> tuple[dict[str, Any], str]:
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    if path.is_file():
        return json.loads(path.read_text()), path.resolve().parent.name
    return named_config(source), source


@dataclass(frozen=True)
class Card:
    """One accelerator. Bandwidth in bytes/s and compute in FLOP/s are data-sheet peaks; memory in bytes."""

    name: str
    title: str
    memory: float
    bandwidth: float
    flops: float
    source: str

    @property
    def ridge(self) -> float:
        """FLOPs per byte above which compute, not memory, sets the time."""
        return self.flops / self.bandwidth


def load_cards(dtype: str = "fp16", gib: bool = False, measured: bool = False) -> dict[str, Card]:
    """Every known card. ``gib`` takes "80 GB" of a data sheet as 80 GiB (what CUDA reports is close to that)."""
    rows: dict[str, Any] = json.loads((DATA / "cards.json").read_text())
    cards: dict[str, Card] = {}
    for name, row in rows.items():
        seen = row.get("measured", {}) if measured else {}
        bandwidth = seen.get("bandwidth_gbs", row["bandwidth_gbs"]) * 1e9
        flops = seen.get("bf16_tflops", row["tflops"].get(dtype, row["tflops"]["fp16"])) * 1e12
        memory = row["visible_gib"] * 2**30 if "visible_gib" in row else row["memory_gb"] * (2**30 if gib else 1e9)
        cards[name] = Card(name, row["title"], memory, bandwidth, flops, row["source"])
    return cards


def load_card(name: str, dtype: str = "fp16", gib: bool = False, measured: bool = False) -> Card:
    """One card by name; ValueError with the known names."""
    cards = load_cards(dtype, gib, measured)
    if name not in cards:
        raise ValueError(f"no card {name!r}; known: {', '.join(cards)}")
    return cards[name]
