#!/usr/bin/env python3
"""Times candidate tiles on the card at hand; serve/kernels/triton/tiles.py is chosen from it.

    python scripts/sweep_tiles.py [--parts gemm,attention,prefill] [--formats bf16,int8,int4] [--layers 36]

gemm       every matrix of a layer at 1, 16, 64 or 128 rows: tile, K split and bytes fetched ahead
attention  split attention at several batches: tile and split
prefill    attention of a prompt: tile, beside the library's

Compiles all candidates in several processes first, then times each in a CUDA graph over all layers' own weights or
pages. Prints the best few of each; writes sweep_tiles.json into the folder named by OUT.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.device_kernels import qwen3_4b  # noqa: E402
from scripts.kernel_timing import MATRICES, Bench, random_model, read_bandwidth, replay_ms  # noqa: E402
from serve.kernels.triton import attention  # noqa: E402
from serve.kernels.triton.card import capability  # noqa: E402
from serve.kernels.triton.gemm import SkinnyLinear  # noqa: E402
from serve.kernels.triton.linear import TritonLinearBuilder  # noqa: E402
from serve.kernels.triton.tiles import STREAM_UNIT, AttentionTile, GemmPlan, GemmTile, shared_limit  # noqa: E402

SHOWN = 5
PROCESSES = 14
ATTENTION_NAMES = ("split_attention_tile", "KV_SPLIT", "prefill_attention_tile", "in_lanes")
BITS = {"dense": 16, "int4": 4}
SPLITS = (128, 256)
BATCHES = ((1, 1), (1, 16), (8, 1), (64, 1), (128, 1))
SPLIT_TILES = tuple(AttentionTile(16, n, w, s) for n, w, s in product((32, 64), (2, 4), (2, 3, 4)))
PREFILL_TILES = tuple(
    AttentionTile(m, n, w, s, unmasked=True)
    for m, n, w, s in (
        *product((128,), (64, 128), (8,), (2, 3)),
        *product((64,), (64,), (4,), (2, 3)),
        *product((128,), (64,), (4,), (2, 3)),
    )
)


def shared_bytes(kind: str, tile: GemmTile, width: int) -> int:
    return tile.stages * tile.block_k * (tile.block_n * BITS.get(kind, 8) // 8 + width * 2)


def gemm_tiles(linear: SkinnyLinear, width: int, limit: int) -> Iterator[GemmTile]:
    """Tiles worth trying that fit shared memory at this row tile, the present one (with more or less ahead) first."""
    now = linear.plan.tile(width)[1]
    kind = linear.weight.weight_format
    yield now
    if linear.plan.parts:
        yield from (tile for tile in integer_tiles(now, linear.plan.parts, width) if tile != now)
        return
    if now.stream:
        yield from (tile for tile in stream_tiles(now, width) if tile != now)
        return
    if width == 16:
        yield from (replace(now, ahead=ahead) for ahead in (0, 256, 2048) if ahead != now.ahead)
    depths = {"dense": (64, 128), "int8": (128, 256)}.get(kind, (now.block_k,))
    shapes = ((64, 4), (128, 8)) if kind == "dense" else ((64, 4), (64, 8), (128, 8))
    for (block_n, warps), block_k, stages in product(shapes, depths, (3, 4, 6)):
        tile = replace(now, block_n=block_n, block_k=block_k, warps=warps, stages=stages)
        size = shared_bytes(kind, tile, width)
        if (20 << 10) < size < min(limit, 130 << 10) and tile != now:
            yield tile


def integer_tiles(now: GemmTile, parts: int, width: int) -> Iterator[GemmTile]:
    """Tiles of stored integers that keep the plan's parts: weights straight to registers, or through shared memory."""
    if width <= 16:
        for (tiles, warps), ring, registers in product(((1, 2), (1, 4), (2, 4), (1, 8)), (2, 4), (80, 96, 128, 168)):
            block_n = 16 * tiles * warps // parts
            yield GemmTile(block_n, now.block_k, warps, 1, ring=ring, registers=registers)
    if width >= 16:
        for (tiles, warps), ring in product(((1, 2), (1, 4), (2, 4)), (3, 4)):
            yield GemmTile(16 * tiles * warps // parts, now.block_k, warps, 1, ring=ring, shared=True)


def stream_tiles(now: GemmTile, width: int) -> Iterator[GemmTile]:
    """Streams with more or less on their way, whose ring and turned sums a kernel may name, and the next kernel let in
    at once or near the end."""
    for ring, early in product((3, 4, 5, 6), (False, True)):
        if ring * (now.block_n + width) * 2 * STREAM_UNIT + now.block_n * width * 4 <= 48 << 10:
            yield replace(now, ring=ring, early=early)


def row_widths(weights: str, plan: GemmPlan, rows_list: list[int]) -> list[tuple[int, int]]:
    """Row counts to time and the width of the row tile for each; the fewest rows take the narrowest that the plan has,
    which depends on who multiplies."""
    more = ((64, 64), (128, 64), (128, 128)) if weights == "bf16" else ((16, 16), (64, 64))
    every = ((1, plan.tile(1)[0]), *more)
    return [count for count in every if count[0] in rows_list]


def split_depths(linear: SkinnyLinear, tile: GemmTile) -> list[int]:
    """K splits worth trying, as positions of K each, for a tile that is not a variation of the present one."""
    if linear.gated:
        return [linear.weight.depth]
    unit = max(128, tile.block_k) * max(1, linear.plan.parts)
    units = -(-linear.weight.depth // unit)
    depths = {-(-units // count) * unit for count in (1, 2, 3, 4, 5, 6, 8, 10)}
    return sorted(depth for depth in depths if depth >= 2 * unit)


def compile_share(weights: str, todo: list[tuple[GemmTile, int, int, bool]]) -> int:
    """Fills Triton's cache from a worker: the same compilations on a small matrix."""
    builder = TritonLinearBuilder(weights, torch.device("cuda"))
    small = builder.build(torch.zeros(256, 2560, device="cuda")).skinny
    for tile, width, parts, gated in todo:
        x = torch.zeros(width, 2560, device="cuda", dtype=small.weight.compute_dtype)
        one = replace(small, plan=GemmPlan(2560, ((width, tile),), parts), gated=gated)
        attempt(partial(one.gated_silu if gated else one.partial, x))
    return len(todo)


def attempt(work: Callable[[], object], timed: bool = False) -> float | None:
    """Milliseconds (or zero), or None for a tile that does not compile or launch: no candidate."""
    try:
        if timed:
            return replay_ms(work, repeats=3)
        work()
        torch.cuda.synchronize()
        return 0.0
    except Exception as error:
        print(f"no candidate: {str(error).splitlines()[-1][:120]}", flush=True)
        return None


def sweep_gemm(bench: Bench, weights: str, pool: ProcessPoolExecutor, rows_list: list[int]) -> list[dict[str, Any]]:
    limit = shared_limit(capability(bench.model.device))
    groups = {name: [getattr(layer, name) for layer in bench.model.stack.layers] for name in MATRICES}
    wanted: dict[tuple[GemmTile, int, int, bool], None] = {}
    for one in (matrices[0] for matrices in groups.values()):
        for width in dict.fromkeys(width for _, width in row_widths(weights, one.plan, rows_list)):
            wanted |= {(tile, width, one.plan.parts, one.gated): None for tile in gemm_tiles(one, width, limit)}
    todo = list(wanted)
    started = time.monotonic()
    shares = [todo[start::PROCESSES] for start in range(PROCESSES)]
    list(pool.map(partial(compile_share, weights), [share for share in shares if share]))
    print(f"{weights}: {len(todo)} tiles compiled in {time.monotonic() - started:.0f} s", flush=True)
    found = []
    counts = [(name, count) for name in groups for count in row_widths(weights, groups[name][0].plan, rows_list)]
    for name, (rows, width) in counts:
        matrices, first = groups[name], groups[name][0]
        x = torch.randn(rows, first.weight.depth, device=bench.model.device, dtype=first.weight.compute_dtype)
        for tile in gemm_tiles(first, width, limit):
            for depth in dict.fromkeys((first.plan.split_depth, *split_depths(first, tile))):
                if depth % (tile.block_k * max(1, first.plan.parts)):
                    continue
                plan = GemmPlan(depth, ((width, tile),), first.plan.parts)
                tried = [replace(one, plan=plan) for one in matrices]
                calls = [partial(one.gated_silu if one.gated else one.partial, x) for one in tried]
                took = attempt(lambda calls=calls: [call() for call in calls], timed=True)  # type: ignore[misc]
                if took is None:
                    break
                us = took * 1e3 / len(matrices)
                share = first.weight.nbytes / (us / 1e6) / bench.bandwidth
                entry = {
                    "part": f"{weights} {name} x{rows}",
                    "width": width,
                    "us": round(us, 2),
                    "share": round(share, 3),
                }
                found.append({**entry, "split_depth": depth, **asdict(tile)})
    return found


def sweep_attention(bench: Bench) -> list[dict[str, Any]]:
    found = []
    for sequences, rows in BATCHES:
        work = bench.attention_work(sequences, rows)
        for tile, split in product(SPLIT_TILES, SPLITS):
            use(split_attention_tile=partial(_same, tile), KV_SPLIT=split, in_lanes=_never)
            took = attempt(work, timed=True)
            if took is not None:
                us = took * 1e3 / len(bench.model.stack.layers)
                entry = {"part": f"attention {sequences}x{rows}", "us": round(us, 2), "split": split}
                found.append({**entry, **asdict(tile)})
    return found


def sweep_prefill(bench: Bench) -> list[dict[str, Any]]:
    found = []
    for length in (1024, 4096):
        work = bench.attention_work(1, length, context=0)
        for tile in PREFILL_TILES:
            use(prefill_attention_tile=partial(_same, tile))
            took = attempt(work, timed=True)
            if took is not None:
                us = took * 1e3 / len(bench.model.stack.layers)
                found.append({"part": f"prefill {length}", "us": round(us, 2), **asdict(tile)})
    return found


def use(**choices: Any) -> None:
    """Makes the attention's launcher take these instead of its table's."""
    for name, value in choices.items():
        setattr(attention, name, value)


def _same(tile: AttentionTile, *_: object) -> AttentionTile:
    return tile


def _never(*_: object) -> bool:
    return False


def compile_attention(tile: AttentionTile) -> None:
    """Fills Triton's cache with one attention tile from a worker."""
    bench = Bench(random_model(qwen3_4b(1, vocab_size=256), "bf16", torch.device("cuda")), 1.0, context=300)
    if tile.unmasked:
        use(prefill_attention_tile=partial(_same, tile))
        attempt(bench.attention_work(1, 256, context=0))
        return
    for split in SPLITS:
        use(split_attention_tile=partial(_same, tile), KV_SPLIT=split, in_lanes=_never)
        attempt(bench.attention_work(1, 1))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", default="gemm,attention,prefill", help="what to sweep")
    parser.add_argument("--formats", default="bf16,int8,int4", help="weight formats to sweep")
    parser.add_argument("--layers", type=int, default=36, help="layers whose weights are read in turn")
    parser.add_argument("--rows", default="1,64,128", help="row counts of the gemm sweep")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("sweep_tiles: no CUDA card is visible", file=sys.stderr)
        return 2
    out = Path(os.environ.get("OUT") or ROOT / "runs" / "device_kernels")
    out.mkdir(parents=True, exist_ok=True)
    parts = options.parts.split(",")
    bandwidth = read_bandwidth(torch.device("cuda"))
    found: list[dict[str, Any]] = []
    with torch.inference_mode(), ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
        early: list[Any] = []
        if "prefill" in parts:
            early += [pool.submit(compile_attention, tile) for tile in PREFILL_TILES]
        if "attention" in parts:
            early += [pool.submit(compile_attention, tile) for tile in SPLIT_TILES]
        for weights in options.formats.split(","):
            started = time.monotonic()
            bench = Bench(random_model(qwen3_4b(options.layers), weights, torch.device("cuda")), bandwidth)
            if early:
                for one in early:
                    one.result()
                print(f"attention compiled: {time.monotonic() - started:.0f} s", flush=True)
                kept = {name: getattr(attention, name) for name in ATTENTION_NAMES}
                found += sweep_attention(bench) if "attention" in parts else []
                found += sweep_prefill(bench) if "prefill" in parts else []
                use(**kept)
                early = []
            if "gemm" in parts:
                found += sweep_gemm(bench, weights, pool, [int(rows) for rows in options.rows.split(",")])
            (out / "sweep_tiles.json").write_text(json.dumps(found, indent=0), "utf-8")
            print(f"{weights}: {time.monotonic() - started:.0f} s", flush=True)
            del bench
            torch.cuda.empty_cache()
    for part in dict.fromkeys(entry["part"] for entry in found):
        for entry in sorted((one for one in found if one["part"] == part), key=lambda one: float(one["us"]))[:SHOWN]:
            print("  ".join(f"{value}" if key == "part" else f"{key} {value}" for key, value in entry.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
