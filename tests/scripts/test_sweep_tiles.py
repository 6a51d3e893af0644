"""Which row widths and tiles the sweep times."""

from __future__ import annotations

import pytest
import torch

from scripts.sweep_tiles import gemm_tiles, row_widths
from serve.kernels.triton.gemm import SkinnyLinear
from serve.kernels.triton.pack import pack_dense
from serve.kernels.triton.tiles import STREAM_UNIT, gemm_plan, shared_limit


@pytest.mark.parametrize(
    ("weights", "kind", "card", "width"),
    [("bf16", "dense", 90, 16), ("int8", "int8", 90, 8), ("int4", "int4", 90, 8), ("int4", "int4_halves", 90, 16),
     ("int8", "int8", 75, 16), ("fp16", "dense", 75, 16)],
)  # fmt: skip
def test_one_row_is_timed_at_the_narrowest_width_that_the_format_has(
    weights: str, kind: str, card: int, width: int
) -> None:
    plan = gemm_plan(kind, 128 if kind == "int4_halves" else 0, 2560, 2560, card, split=True)
    (one,) = row_widths(weights, plan, [1])
    assert one == (1, width)
    assert width in [entry for entry, _ in plan.tiles]


def test_only_row_counts_that_were_asked_for_are_timed() -> None:
    plan = gemm_plan("dense", 0, 2560, 2560, 90, split=True)
    assert row_widths("bf16", plan, [128]) == [(128, 64), (128, 128)]


def test_streams_are_swept_by_ring_and_admission_alone() -> None:
    plan = gemm_plan("dense", 0, 6144, 2560, 90, split=True)
    ((_, width),) = row_widths("bf16", plan, [1])
    linear = SkinnyLinear(pack_dense(torch.empty(6144, 2560, device="meta"), torch.bfloat16), plan)
    tiles = list(gemm_tiles(linear, width, shared_limit(90)))
    assert tiles[0] == plan.tile(1)[1]
    assert len(set(tiles)) == len(tiles) > 1
    assert all(tile.stream and tile.block_k == STREAM_UNIT for tile in tiles)
    assert {(tile.ring, tile.early) for tile in tiles} == {
        (ring, early) for ring in (3, 4, 5) for early in (False, True)
    }
