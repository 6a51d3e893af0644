"""Prompts in 8-bit floats: near the eager model, the same bits alone, in company and in parts; decoding as it was."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from serve.engine.memory import MemorySpent
from serve.kernels.triton import turing
from serve.kernels.triton.gemm import SkinnyLinear
from serve.kernels.triton.pack import pack_dense
from serve.model.errors import ModelError
from serve.model.fp8_prompts import copied, fp8_product
from serve.model.loader import Storage, _check_fp8, load_target
from tests.serve.model.prompt_bits import error_of_a_prompt
from tests.serve.model.test_triton_layers import load_triton
from tests.tiny_models import write_model

CARDS = ["cuda"] if os.environ.get("TRITON_OVERRIDE_ARCH", "sm90") >= "sm89" else []


@pytest.fixture(params=["cpu", *(pytest.param(card, marks=pytest.mark.gpu) for card in CARDS)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The interpreter, or a card."""
    if request.param == "cuda":
        turing.install()
    return torch.device(request.param)


def test_prompts_are_near_the_eager_model_and_have_bits_of_their_own(tmp_path: Path, device: torch.device) -> None:
    """Matrices with biases, stored as integers."""
    write_model(
        tmp_path,
        "qwen2",
        scale=1.0,
        intermediate_size=32,
        hidden_size=32,
        head_dim=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    eager = load_target(tmp_path, device=device, weights="fp32")
    plain, model = (load_triton(tmp_path, "int8", device) for _ in range(2))
    model.stack = model.stack.with_fp8()
    assert "fp8 x fp8" in model.kernel_path
    matrices = [linear.weight for linear in model.stack.layers[0].linears]
    assert model.copies_bytes == sum(one.rows * (one.depth + 4) for one in matrices)
    assert 1e-3 < error_of_a_prompt(model, plain, eager) < 0.2


def test_a_card_loads_the_copies_and_counts_them(tmp_path: Path, device: torch.device) -> None:
    write_model(tmp_path, "llama", intermediate_size=128)
    storage = Storage("fp32" if device.type == "cpu" else "bf16", prefill="fp8")
    if device.type == "cpu":
        with pytest.raises(ModelError, match=r"--prefill fp8 needs the Triton kernels of a CUDA card .* 8\.9 or more"):
            load_target(tmp_path, device=device, storage=storage)
        return
    spent = MemorySpent(device)
    model = load_target(tmp_path, device=device, storage=storage)
    spent.note_weights(model.copies_bytes)
    assert "fp8 x fp8" in model.kernel_path
    assert spent.to_json()["copies"] == model.copies_bytes > 0
    assert "memory copies" in spent.describe()


def test_a_bias_is_added_and_leaves_the_type(device: torch.device) -> None:
    """Ranks add their products up, and one of them alone has the bias."""
    weight, bias, x = (torch.randn(*shape).to(device) for shape in ((32, 64), (32,), (20, 64)))
    plain, biased = copied([SkinnyLinear.make(pack_dense(weight, torch.float16), one) for one in (None, bias)])
    first, second = fp8_product(plain, x.half()), fp8_product(biased, x.half())
    assert first.dtype == second.dtype == torch.bfloat16
    assert torch.equal(second, (first + bias).bfloat16())


def test_a_matrix_that_the_product_does_not_take_is_named() -> None:
    odd = SkinnyLinear.make(pack_dense(torch.randn(40, 32), torch.float16))
    with pytest.raises(ModelError, match=r"--prefill fp8 needs matrices of multiples of 16, one is \[40, 32\]"):
        copied([odd])


def test_it_is_refused_by_name_where_the_card_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setenv("TRITON_OVERRIDE_ARCH", "sm80")
    with pytest.raises(ModelError, match=r"8\.9 or more; this one has 8\.0"):
        _check_fp8(cpu, triton_layers=True)
    monkeypatch.setenv("TRITON_OVERRIDE_ARCH", "sm89")
    _check_fp8(cpu, triton_layers=True)
    monkeypatch.setattr("serve.kernels.fp8_rows.fault", lambda device: "RuntimeError: no rowwise scaling")
    with pytest.raises(ModelError, match="has no such product on this card: RuntimeError: no rowwise scaling"):
        _check_fp8(cpu, triton_layers=True)
