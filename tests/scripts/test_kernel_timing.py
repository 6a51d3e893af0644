"""The kernel timing runs every kernel of a tiny model in the interpreter and finds its rows' bits independent."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from scripts.device_kernels import qwen3_4b
from scripts.kernel_timing import Bench, random_model, read_bandwidth
from serve.model.rope import RopeConfig

TINY = replace(
    qwen3_4b(layers=1, vocab_size=100),
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=64,
    rope=RopeConfig(),
    max_position_embeddings=512,
    dtype="float16",
)


@pytest.mark.parametrize("weights", ["fp16", "int4"])
def test_every_timing_has_a_row(weights: str) -> None:
    device = torch.device("cpu")
    bench = Bench(random_model(TINY, weights, device), read_bandwidth(device, 1 << 10), context=20)
    kernels = bench.kernels((1,))
    assert [entry["kernel"].split(" /")[0] for entry in kernels] == [
        "qkv",
        "output",
        "gate_up",
        "down",
        "head argmax",
        "add + norm",
        "qkv norm + rope + write",
        "attention 1x1",
    ]
    assert all(entry["us"] > 0 for entry in kernels)
    assert ("cublas_us" in kernels[0]) == (weights == "fp16")
    assert [step["step"] for step in bench.steps(((2, 1),))] == ["2x1 at 20"]
    assert [step["step"] for step in bench.prompt(40)] == ["prompt of 40", "prompt of 40, attention"]
    assert all(bench.invariance((2,)).values())
