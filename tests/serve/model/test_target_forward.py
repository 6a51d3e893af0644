"""The flat forward against transformers: logits, taps and greedy ids of every family, head layout and rope type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from serve.kernels.quantize import dequantize_int4, quantize_int4, quantize_int8
from serve.model.loader import load_target
from serve.model.target import TargetModel
from tests.serve.model.random_models import Span, flat_batch, random_ids, write_random_model

CPU = torch.device("cpu")
TABLE = (3, 0, 5, 2, 1, 4)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 1000.0}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, untied, wide heads, all biases": ("llama", {"head_dim": 32, "attention_bias": True, "mlp_bias": True}),
    "llama, one query head a kv head": ("llama", {"num_key_value_heads": 4}),
    "llama, one kv head": ("llama", {"num_key_value_heads": 1}),
    "llama, sharded": ("llama", {"shard": "40KB"}),
    "llama, odd mlp width": ("llama", {"intermediate_size": 100}),
    "llama, linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0}}),
    "llama, llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama, yarn rope": ("llama", {"rope_parameters": YARN}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2, yarn with its own attention factor": ("qwen2", {"rope_parameters": {**YARN, "attention_factor": 1.3}}),
    "qwen3, untied, wide heads": ("qwen3", {"head_dim": 32}),
    "qwen3, tied, biases, yarn with mscale": (
        "qwen3",
        {
            "head_dim": 24,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {**YARN, "mscale": 0.8, "mscale_all_dim": 0.5, "beta_fast": 16.0, "truncate": False},
        },
    ),
}


def greedy(model: TargetModel, prompt: Tensor, count: int) -> list[int]:
    cache = model.allocate_cache(6, 16)
    ids, start = prompt.tolist(), 0
    for _ in range(count):
        span = Span(torch.tensor(ids), start, len(ids), TABLE)
        output = model.forward(flat_batch([span], logit_rows=[len(ids) - start - 1]), cache)
        start = len(ids)
        ids.append(int(output.logits.argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("case", CASES)
def test_logits_taps_and_greedy_ids_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    family, fields = CASES[case]
    reference = write_random_model(tmp_path, family, **fields)
    assert ("shard" in fields) == (tmp_path / "model.safetensors.index.json").exists()
    model = load_target(tmp_path, device=CPU, weights="fp32")
    ids = random_ids(70)
    with torch.no_grad():
        want = reference(ids[None], output_hidden_states=True)
        tap = torch.cat([reference.model.layers[0](want.hidden_states[0], **layer_inputs(reference, ids))], -1)
    output = model.forward(flat_batch([Span(ids, 0, 70, TABLE)]), model.allocate_cache(6, 16), taps=(0,))
    assert want.logits.abs().max() > 1
    torch.testing.assert_close(output.logits, want.logits[0], atol=1e-4, rtol=1e-4)
    assert output.taps is not None
    torch.testing.assert_close(output.taps, want.hidden_states[1][0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(output.taps, tap[0], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(output.taps, want.hidden_states[0][0], atol=1e-2)

    prompt = random_ids(11, seed=1)
    made = reference.generate(prompt[None], max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert greedy(model, prompt, 40) == made[0, 11:].tolist()


def layer_inputs(reference: Any, ids: Tensor) -> dict[str, Any]:
    """What transformers passes to a decoder layer, for a causal run from position 0."""
    positions = torch.arange(len(ids))[None]
    hidden = torch.zeros(1, len(ids), reference.config.hidden_size)
    mask = torch.full((len(ids), len(ids)), float("-inf")).triu(1)[None, None]
    return {
        "attention_mask": mask,
        "position_ids": positions,
        "position_embeddings": reference.model.rotary_emb(hidden, positions),
    }


def test_the_last_tap_is_the_stream_before_the_final_norm(tmp_path: Path) -> None:
    reference = write_random_model(tmp_path, "qwen3", head_dim=16)
    model = load_target(tmp_path, device=CPU, weights="fp32")
    ids = random_ids(20)
    caught: list[Tensor] = []
    reference.model.norm.register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0][0]))
    with torch.no_grad():
        want = reference(ids[None], output_hidden_states=True).hidden_states[1][0]
    taps = model.forward(flat_batch([Span(ids, 0, 20, TABLE)]), model.allocate_cache(6, 16), taps=(1, 0)).taps
    assert taps is not None
    torch.testing.assert_close(taps[:, :64], caught[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(taps[:, 64:], want, atol=1e-4, rtol=1e-4)


def test_no_taps_are_kept_unless_asked_for(tmp_path: Path) -> None:
    write_random_model(tmp_path, "llama")
    model = load_target(tmp_path, device=CPU, weights="fp32")
    output = model.forward(flat_batch([Span(random_ids(3), 0, 3, TABLE)], logit_rows=[2]), model.allocate_cache(6, 16))
    assert output.taps is None
    assert output.logits.shape == (1, 192)
    assert output.logits.dtype == torch.float32


def test_embed_and_lm_head_are_the_models_own(tmp_path: Path) -> None:
    reference = write_random_model(tmp_path, "qwen2")
    model = load_target(tmp_path, device=CPU, weights="fp32")
    ids, hidden = random_ids(5), torch.randn(4, 64)
    torch.testing.assert_close(model.embed(ids), reference.model.embed_tokens.weight[ids].detach())
    torch.testing.assert_close(model.lm_head(hidden), reference.lm_head(hidden).detach(), atol=1e-4, rtol=1e-4)


def test_cache_size_is_what_it_says(tmp_path: Path) -> None:
    write_random_model(tmp_path, "llama")
    model = load_target(tmp_path, device=CPU, weights="fp32")
    cache = model.allocate_cache(3, 32)
    assert sum(layer.numel() * 4 for layer in cache.layers) == 3 * model.kv_bytes_per_page(32)
    assert cache.capacity == 96


def round_trip(weight: Tensor, weights: str) -> Tensor:
    if weights == "int4":
        return dequantize_int4(*quantize_int4(weight))
    codes, scale = quantize_int8(weight)
    return codes * scale[:, None]


@pytest.mark.parametrize(("weights", "limit"), [("int8", 1e-3), ("int4", 0.03)])
def test_quantised_model_is_the_model_of_its_quantised_weights(
    weights: str, limit: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In torch; the C layers' own formats have a test of their own."""
    monkeypatch.setenv("FORETOKEN_NATIVE", "0")
    reference = write_random_model(tmp_path, "qwen3", head_dim=32)
    model = load_target(tmp_path, device=CPU, weights=weights)
    with torch.no_grad():
        for name, module in reference.named_modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.copy_(round_trip(module.weight, "int8" if name == "lm_head" else weights))
        ids = random_ids(60)
        want = reference(ids[None]).logits[0]
    got = model.forward(flat_batch([Span(ids, 0, 60, TABLE)]), model.allocate_cache(6, 16)).logits
    assert (got - want).norm() / want.norm() < limit
    assert model.weights == weights


@pytest.mark.model
def test_default_model_continues_as_transformers_does(default_model_dir: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(default_model_dir)
    reference = AutoModelForCausalLM.from_pretrained(default_model_dir, dtype=torch.float32).eval()
    model = load_target(default_model_dir, device=CPU, weights="fp32")
    prompt = torch.tensor(tokenizer("The three laws of thermodynamics are")["input_ids"])
    made = reference.generate(prompt[None], max_new_tokens=32, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert greedy(model, prompt, 32) == made[0, len(prompt) :].tolist()
