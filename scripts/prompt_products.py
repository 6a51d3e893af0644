#!/usr/bin/env python3
"""Times a layer's products of a prompt on a CUDA card: the library's in 16 bits, and in 8 bits with all that needs.

    python scripts/prompt_products.py [--rows 256,1024,4096] [--load]

Shapes are those of a qwen3 of 4 B parameters, weights random int8. The library's products are of weights that are
widened each time, as the engine does, and of weights that lie there in 16 bits. --load adds what packing a matrix costs
at a start, beside copying its packed bytes, which is what a cache of packed weights leaves. Medians of CUDA events.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from serve.kernels.triton import turing
from serve.kernels.triton.card import capability
from serve.kernels.triton.gemm import SkinnyLinear, widened
from serve.kernels.triton.linear import TritonLinearBuilder
from serve.kernels.triton.row_codes import gated_product, product
from serve.kernels.triton.rows import silu_mul
from serve.kernels.triton.tiles import FP8_CARD
from serve.model.fp8_prompts import copied, fp8_mlp, fp8_product

HIDDEN, INNER = 2560, 9728
SHAPES = {"qkv": (6144, HIDDEN), "o": (HIDDEN, 4096), "gate_up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER)}
REPEATS = 20


def milliseconds(call: Callable[[], object]) -> float:
    """Median of REPEATS runs, after two that compile."""
    for _ in range(2):
        call()
    found: list[float] = []
    for _ in range(REPEATS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        call()
        stop.record()
        stop.synchronize()
        found.append(start.elapsed_time(stop))
    return statistics.median(found)


def times(linears: dict[str, SkinnyLinear], rows: int, dtype: torch.dtype) -> dict[str, float]:
    """Milliseconds of a layer's four products, the gated activation included."""
    x = torch.randn(rows, HIDDEN, device="cuda", dtype=dtype)
    mixed = torch.randn(rows, 4096, device="cuda", dtype=dtype)
    dense = {name: widened(linear.weight) for name, linear in linears.items()}

    def library(take: Callable[[str], Tensor]) -> None:
        F.linear(x, take("qkv"))
        F.linear(mixed, take("o"))
        F.linear(silu_mul(F.linear(x, take("gate_up")), 1.0), take("down"))

    def integers() -> None:
        product(linears["qkv"], x)
        product(linears["o"], mixed)
        gated_product(linears["gate_up"], linears["down"], x)

    found = {
        "16 bits": milliseconds(lambda: library(dense.__getitem__)),
        "widened": milliseconds(lambda: library(lambda name: widened(linears[name].weight))),
        "int8 x int8": milliseconds(integers),
        "of it qkv": milliseconds(lambda: product(linears["qkv"], x)),
        "mlp": milliseconds(lambda: gated_product(linears["gate_up"], linears["down"], x)),
    }
    if capability(x.device) >= FP8_CARD:
        copies = dict(zip(linears, copied(linears.values()), strict=True))

        def floats() -> None:
            fp8_product(copies["qkv"], x)
            fp8_product(copies["o"], mixed)
            fp8_mlp(copies["gate_up"], copies["down"], x)

        found["fp8 x fp8"] = milliseconds(floats)
    return found


def host_milliseconds(call: Callable[[], object]) -> float:
    """Median of five runs on the host's clock, the card's work included."""
    found = []
    for _ in range(5):
        torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - started) * 1e3)
    return statistics.median(found)


def load_lines() -> list[str]:
    """What a start spends on one gate_up matrix that lies in the host's memory."""
    weight = torch.randn(SHAPES["gate_up"]).bfloat16()
    lines = ["load of a gate_up matrix, ms of the host's clock: packing from bf16 / copying the packed bytes"]
    cuda = torch.device("cuda")
    for name in ("int8", "int4-g64"):
        builder = TritonLinearBuilder(name, cuda)
        on_host = builder.build(weight).skinny.weight.data.cpu()
        packing = host_milliseconds(partial(builder.build, weight))
        lines.append(f"  {name:10}{packing:>8.2f} / {host_milliseconds(partial(on_host.to, cuda)):.2f}")
    head = torch.randn(151936, HIDDEN).bfloat16()
    torch.cuda.reset_peak_memory_stats(cuda)
    before = torch.cuda.memory_allocated()
    kept = builder.build(head, weights="int8")
    extra = torch.cuda.max_memory_allocated() - before - kept.nbytes
    return [*lines, f"  most beside the result, 151,936 x 2,560 to int8: {extra / 1e9:.3f} GB"]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", default="256,1024,4096", help="rows of the prompt, comma-separated")
    parser.add_argument("--load", action="store_true", help="add what packing costs at a start")
    args = parser.parse_args(argv)
    turing.install()
    builder = TritonLinearBuilder("int8", torch.device("cuda"), blocks=False)
    linears = {
        name: builder.build(torch.randn(shape) * shape[1] ** -0.5).skinny.as_gated(1.0)
        if name == "gate_up"
        else builder.build(torch.randn(shape) * shape[1] ** -0.5).skinny
        for name, shape in SHAPES.items()
    }
    print(f"{torch.cuda.get_device_name()}, {builder.activation_dtype}, one layer's products, ms")
    for rows in map(int, args.rows.split(",")):
        found = times(linears, rows, builder.activation_dtype)
        print(f"  {rows:>5} rows: " + "  ".join(f"{name} {value:.3f}" for name, value in found.items()), flush=True)
    if args.load:
        print("\n".join(load_lines()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
