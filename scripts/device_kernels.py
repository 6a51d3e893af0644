#!/usr/bin/env python3
"""Tries and times the Triton kernels on the card at hand, at the shapes of a 4 B qwen3.

    python scripts/device_kernels.py [--parts tests,turing,kernels,decode] [--formats bf16,int8,int4] [--late]

tests    the tests marked gpu; turing: the same with TRITON_OVERRIDE_ARCH=sm75 (Turing's layouts on this card)
kernels  each kernel over all layers' own weights, beside cuBLAS, with its share of the measured read bandwidth
decode   whole steps in one CUDA graph at 1k context (one stream, verify of 16 rows, batches), and a prompt of 4,096

Writes device_kernels.json into the folder named by OUT (else runs/device_kernels) and prints a short table last. Exit
code 1 when a test fails or a row's bits depend on its batch.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.kernel_timing import Bench, random_model, read_bandwidth  # noqa: E402
from serve.kernels.triton import tiles  # noqa: E402
from serve.model.config import ModelConfig  # noqa: E402
from serve.model.rope import RopeConfig  # noqa: E402

TESTS = ("tests/serve/kernels", "tests/serve/model/test_triton_layers.py")
STEPS = ((1, 1), (1, 4), (1, 8), (1, 16), (8, 1), (8, 8), (32, 1), (64, 1), (128, 1))
ROWS = (1, 16, 64)
WORKERS = "12"


def qwen3_4b(layers: int, vocab_size: int = 151_936) -> ModelConfig:
    return ModelConfig(
        family="qwen3",
        hidden_size=2560,
        num_layers=layers,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=9728,
        vocab_size=vocab_size,
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=5e6),
        max_position_embeddings=262_144,
        tie_word_embeddings=True,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=True,
        eos_token_ids=(0,),
        bos_token_id=None,
        dtype="bfloat16",
    )


def run_tests(turing: bool) -> dict[str, Any]:
    """The gpu tests in a fresh process, several at a time where pytest-xdist is there."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    env.pop("TRITON_INTERPRET", None)
    if turing:
        env["TRITON_OVERRIDE_ARCH"] = "sm75"
    xdist = subprocess.run([sys.executable, "-c", "import xdist"], capture_output=True).returncode == 0
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "--maxfail=20", "-p", "no:cacheprovider"]
    command += ["-n", WORKERS] if xdist else []
    started = time.monotonic()
    done = subprocess.run([*command, *TESTS], cwd=ROOT, env=env, capture_output=True, text=True)
    print(done.stdout[-5000:], done.stderr[-1500:], flush=True)
    lines = done.stdout.strip().splitlines() or ["no output"]
    return {"ok": done.returncode == 0, "summary": lines[-1], "seconds": round(time.monotonic() - started, 1)}


def measure(parts: list[str], formats: list[str], layers: int, report: dict[str, Any], out: Path) -> None:
    device = torch.device("cuda")
    bandwidth = read_bandwidth(device)
    report["bandwidth_tb_s"] = round(bandwidth / 1e12, 3)
    for weights in formats:
        started = time.monotonic()
        bench = Bench(random_model(qwen3_4b(layers), weights, device), bandwidth)
        found: dict[str, Any] = {"invariance": bench.invariance(), "kernels": [], "steps": []}
        report["formats"][weights] = found
        if "kernels" in parts:
            found["kernels"] = bench.kernels(ROWS)
        if "decode" in parts:
            found["steps"] = bench.steps(STEPS)
            if weights in ("bf16", "fp16"):
                found["steps"] += bench.prompt(4096)
        print(f"{weights}: {time.monotonic() - started:.0f} s", flush=True)
        (out / "device_kernels.json").write_text(json.dumps(report, indent=1), "utf-8")
        del bench
        torch.cuda.empty_cache()


def print_table(report: dict[str, Any]) -> None:
    print(f"\n{report['card']}, triton {report['triton']}, reads {report.get('bandwidth_tb_s')} TB/s")
    for name in ("tests", "turing"):
        if name in report:
            ran = report[name]
            print(f"{name}: {'ok' if ran['ok'] else 'FAILED'} in {ran['seconds']} s: {ran['summary']}")
    for weights, found in report["formats"].items():
        different = [name for name, same in found["invariance"].items() if not same]
        print(
            f"\n{weights}: rows have the same bits" + (f" EXCEPT {different}" if different else " in every step tried")
        )
        for entry in found["kernels"] + found["steps"]:
            print("  " + "  ".join(v if isinstance(v, str) else f"{k} {v}" for k, v in entry.items()))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", default="tests,turing,kernels,decode", help="what to do, comma-separated")
    parser.add_argument("--formats", default="bf16,int8,int4", help="weight formats to time")
    parser.add_argument("--layers", type=int, default=36, help="layers of the timed model")
    parser.add_argument("--late", action="store_true", help="no kernel starts before its predecessor ends")
    options = parser.parse_args()
    tiles.DEPENDENT_LAUNCH = not options.late
    parts = options.parts.split(",")
    if not torch.cuda.is_available():
        print("device_kernels: no CUDA card is visible", file=sys.stderr)
        return 2
    import triton

    report: dict[str, Any] = {"card": torch.cuda.get_device_name(), "triton": triton.__version__, "formats": {}}
    for name in ("tests", "turing"):
        if name in parts:
            report[name] = run_tests(turing=name == "turing")
    out = Path(os.environ.get("OUT") or ROOT / "runs" / "device_kernels")
    out.mkdir(parents=True, exist_ok=True)
    if {"kernels", "decode"} & set(parts):
        with torch.inference_mode():
            measure(parts, options.formats.split(","), options.layers, report, out)
    (out / "device_kernels.json").write_text(json.dumps(report, indent=1), "utf-8")
    print_table(report)
    good = all(report[name]["ok"] for name in ("tests", "turing") if name in report)
    same = all(all(found["invariance"].values()) for found in report["formats"].values())
    return 0 if good and same else 1


if __name__ == "__main__":
    sys.exit(main())
