"""Tile shapes and split counts of every kernel: functions of the layer's shape and the card, never of the batch.

A row's bits follow from these numbers, so nothing here may look at how many rows there are, except for the width of
the row tile, along which results are independent. Static: no autotuning, so a start costs compile time only. Knows no
Triton.
"""

from __future__ import annotations

from dataclasses import dataclass

ROW_TILES = (16, 32, 64)
"""Widths of the row tile; more rows take several tiles. Turing's registers hold the first two."""
KV_SPLIT = 256
"""Positions one program of the split attention reads: fixed, so that a row's sums never depend on the context of
others."""
SPLIT_PROGRAMS = 2048
"""Programs of the split attention that are enough for any card."""
QUERY_TILE = 16
"""Query rows x heads of one K/V group that one program of the split attention handles."""
MAX_REGISTERS = 255
"""Said aloud at every launch: left alone, ptxas spills a few bytes to save registers nobody asked for."""
HEADS_PER_PROGRAM = 8
COMBINE_BLOCK = 16
ARGMAX_BLOCK = 4096
SILU_BLOCK = 1024


@dataclass(frozen=True)
class GemmTile:
    """block_n output features by block_k positions of K; prefetch: load the next tile by hand (no cp.async below
    80)."""

    block_n: int
    block_k: int
    warps: int
    stages: int
    prefetch: bool


@dataclass(frozen=True)
class AttentionTile:
    """block_m query rows (split attention: QUERY_TILE) by block_n positions."""

    block_m: int
    block_n: int
    warps: int
    stages: int


def shared_limit(capability: int) -> int:
    """Bytes of shared memory one block may have."""
    if capability < 80:
        return 64 << 10
    return (163 << 10) if capability in (80, 87) else (227 << 10) if capability in (90, 100, 103) else (99 << 10)


def _roomy(capability: int) -> bool:
    return shared_limit(capability) > 100 << 10


def row_tiles(capability: int) -> tuple[int, ...]:
    return ROW_TILES[:2] if capability < 80 else ROW_TILES


def row_tile(rows: int, capability: int) -> int:
    """The narrowest row tile that holds ``rows``, or the widest."""
    widths = row_tiles(capability)
    return next((width for width in widths if rows <= width), widths[-1])


def gemm_tile(weight_format: str, pack: int, capability: int) -> GemmTile:
    """Tile of one weight format. ``pack``: positions of K in one int4 block or int8 group, 0 for none."""
    if capability < 80:
        # Registers hold two tiles here; int4 tiles are as large as their packing says.
        block_k = pack if weight_format == "int4" else 64
        return GemmTile(block_n=64, block_k=block_k, warps=4, stages=1, prefetch=True)
    block_k = pack if weight_format in ("int4", "int8_group") else 128
    return GemmTile(block_n=64, block_k=block_k, warps=4, stages=4 if _roomy(capability) else 2, prefetch=False)


def split_count(outputs: int, depth: int, tile: GemmTile, capability: int) -> int:
    """K splits that fill the card, each with at least four tiles and none of them empty."""
    wanted = 96 if capability < 80 else 216 if capability < 90 else 264
    tiles = -(-depth // tile.block_k)
    splits = min(-(-wanted // -(-outputs // tile.block_n)), max(1, tiles // 4), 16)
    per_split = -(-tiles // splits)
    return -(-tiles // per_split)


def split_attention_tile(capability: int) -> AttentionTile:
    if capability < 80:
        return AttentionTile(QUERY_TILE, 32, warps=4, stages=1)
    return AttentionTile(QUERY_TILE, 128 if _roomy(capability) else 32, warps=4, stages=2)


def split_programs(splits: int, tiles: int) -> int:
    """Programs that share the splits of one tile: all at once while the card has room. Which program computes a split
    changes none of its bits."""
    return max(1, min(splits, -(-SPLIT_PROGRAMS // tiles)))


def prefill_attention_tile(capability: int, head_dim: int) -> AttentionTile:
    if capability < 80:
        return AttentionTile(64, 32, warps=4, stages=1)
    if capability < 90 or head_dim < 64 or not _roomy(capability):
        return AttentionTile(64, 32, warps=4, stages=2)
    return AttentionTile(128, 64, warps=8, stages=2)


def norm_warps(width: int) -> int:
    return 8 if width > 2048 else 4
