"""A model's shape with its matrices in the formats of a weights map, as the GPU kernels store them. Computes bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from eval.shapes import ModelShape
from serve.kernels.formats import CARD_FORMATS, stored_bytes
from serve.model.weights_map import MATRICES, WeightsMap, read_weights_map


def matrix_shapes(model: ModelShape, intermediate: int) -> dict[str, tuple[int, int]]:
    """Rows and depth of each matrix of a layer."""
    width, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    shapes = (
        (width + 2 * kv, model.hidden),
        (model.hidden, width),
        (2 * intermediate, model.hidden),
        (model.hidden, intermediate),
    )
    return dict(zip(MATRICES, shapes, strict=True))


def mapped(model: ModelShape, intermediate: int, plan: WeightsMap) -> ModelShape:
    """The same model in the map's formats; norms in float32, an untied embedding in 16 bits."""
    shapes = matrix_shapes(model, intermediate)
    body = sum(
        stored_bytes(plan.layer(layer, name), *shapes[name]) for layer in range(model.layers) for name in MATRICES
    )
    matrices = model.layers * sum(rows * depth for rows, depth in shapes.values())
    vectors = model.active_parameters - model.head_parameters - matrices
    head = stored_bytes(plan.head_format, model.head_parameters // model.hidden, model.hidden)
    lookup = 2.0 * model.lookup_parameters
    return replace(
        model, weight_bytes=body + head + lookup + 4.0 * vectors, lookup_bytes=lookup, head_bytes=float(head)
    )


def read_map(path: Path, layers: int, default: str) -> WeightsMap:
    """A map for any card. Raises ModelError (a ValueError) naming the field."""
    return read_weights_map(path, layers, CARD_FORMATS, default)
