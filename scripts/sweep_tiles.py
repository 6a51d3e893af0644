#!/usr/bin/env python3
"""Times candidate tiles and K splits of every matrix on the card at hand; serve/kernels/triton/tiles.py is chosen
from it.

    python scripts/sweep_tiles.py [--formats bf16,int8,int4] [--rows 16] [--layers 36]

Compiles all candidates in several processes first, then times each in a CUDA graph over all layers' own weights.
Prints the best few of each matrix beside what the tile table has now; writes sweep_tiles.json into the folder named
by OUT.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.device_kernels import qwen3_4b  # noqa: E402
from scripts.kernel_timing import MATRICES, random_model, read_bandwidth, replay_ms  # noqa: E402
from serve.kernels.triton.card import capability  # noqa: E402
from serve.kernels.triton.gemm import SkinnyLinear  # noqa: E402
from serve.kernels.triton.linear import TritonLinearBuilder  # noqa: E402
from serve.kernels.triton.tiles import GemmTile, shared_limit  # noqa: E402

SHOWN = 4
PROCESSES = 12


def candidates(linear: SkinnyLinear, limit: int) -> Iterator[GemmTile]:
    """Tiles worth trying that fit shared memory at 16 rows, the present one first."""
    yield linear.tile
    kind = linear.weight.weight_format
    depths = {"dense": (64, 128, 256), "int8": (128, 256)}.get(kind, (linear.tile.block_k,))
    bits = {"dense": 16, "int4": 4}.get(kind, 8)
    for block_n, warps in ((64, 4), (128, 4), (128, 8)):
        for block_k in depths:
            for stages in (2, 3, 4, 6, 8):
                stage = block_n * block_k * bits // 8 + 32 * block_k
                tile = GemmTile(block_n, block_k, warps, stages, prefetch=False)
                if stage * stages < limit and stage * stages > 16 << 10 and tile != linear.tile:
                    yield tile


def splits_of(linear: SkinnyLinear, tile: GemmTile) -> tuple[int, ...]:
    """K splits worth trying: none of them leaves a program without a tile."""
    if linear.gated:
        return (1,)
    tiles = -(-linear.weight.depth // tile.block_k)
    wanted = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
    return tuple(n for n in wanted if n <= max(1, tiles // 2) and -(-tiles // -(-tiles // n)) == n)


def compile_share(weights: str, rows: int, tiles: list[tuple[GemmTile, bool]]) -> int:
    """Fills Triton's cache from a worker: the same compilations on a small matrix."""
    builder = TritonLinearBuilder(weights, torch.device("cuda"))
    small = builder.build(torch.zeros(256, 2560, device="cuda")).skinny
    x = torch.zeros(rows, 2560, device="cuda", dtype=small.weight.compute_dtype)
    for tile, gated in tiles:
        try:
            one = replace(small, tile=tile, splits=1, gated=gated)
            one.gated_silu(x) if gated else one.partial(x)
        except Exception as error:  # a tile that does not compile or launch is simply no candidate
            print(f"{weights} {tile}: {str(error).splitlines()[-1][:100]}", flush=True)
    return len(tiles)


def sweep(weights: str, rows: int, layers: int, bandwidth: float, pool: ProcessPoolExecutor) -> list[dict[str, Any]]:
    device = torch.device("cuda")
    model = random_model(qwen3_4b(layers), weights, device)
    limit = shared_limit(capability(device))
    groups = {name: [getattr(layer, name) for layer in model.stack.layers] for name in MATRICES}
    wanted = {(tile, one[0].gated): None for one in groups.values() for tile in candidates(one[0], limit)}
    todo = list(wanted)
    shares = [todo[start::PROCESSES] for start in range(PROCESSES)]
    started = time.monotonic()
    list(pool.map(partial(compile_share, weights, rows), [share for share in shares if share]))
    print(f"{weights}: {len(todo)} tiles compiled in {time.monotonic() - started:.0f} s", flush=True)
    found = []
    for name, matrices in groups.items():
        first = matrices[0]
        x = torch.randn(rows, first.weight.depth, device=device, dtype=first.weight.compute_dtype)
        for tile in candidates(first, limit):
            counts = (first.splits,) if tile == first.tile else ()
            for splits in dict.fromkeys((*counts, *splits_of(first, tile))):
                tried = [replace(one, tile=tile, splits=splits) for one in matrices]
                calls = [partial(one.gated_silu if one.gated else one.partial, x) for one in tried]
                try:
                    took = replay_ms(lambda calls=calls: [call() for call in calls], repeats=3)  # type: ignore[misc]
                except Exception:  # reported when it was compiled
                    continue
                us = took * 1e3 / len(matrices)
                shape = f"n{tile.block_n} k{tile.block_k} warps {tile.warps} stages {tile.stages} splits {splits}"
                now = tile == first.tile and splits == first.splits
                share = first.weight.nbytes / (us / 1e6) / bandwidth
                entry = {"format": weights, "matrix": name, "us": round(us, 2), "share": round(share, 3)}
                found.append({**entry, "tile": shape, "now": now})
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--formats", default="bf16,int8,int4", help="weight formats to sweep")
    parser.add_argument("--rows", type=int, default=16, help="rows of every product")
    parser.add_argument("--layers", type=int, default=36, help="layers whose weights are read in turn")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("sweep_tiles: no CUDA card is visible", file=sys.stderr)
        return 2
    out = Path(os.environ.get("OUT") or ROOT / "runs" / "device_kernels")
    out.mkdir(parents=True, exist_ok=True)
    bandwidth = read_bandwidth(torch.device("cuda"))
    found: list[dict[str, Any]] = []
    with torch.inference_mode(), ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
        for weights in options.formats.split(","):
            found += sweep(weights, options.rows, options.layers, bandwidth, pool)
            (out / "sweep_tiles.json").write_text(json.dumps(found, indent=0), "utf-8")
            torch.cuda.empty_cache()
    for weights in options.formats.split(","):
        for name in MATRICES:
            rows = [row for row in found if (row["format"], row["matrix"]) == (weights, name)]
            rows.sort(key=lambda row: row["us"])
            for row in [*rows[:SHOWN], *[row for row in rows if row["now"]]]:
                mark = "  <- now" if row["now"] else ""
                print(f"{weights} {name:8} {row['us']:7} us  {row['share']:.3f}  {row['tile']}{mark}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
