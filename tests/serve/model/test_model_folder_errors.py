"""A model folder that cannot be served says why: the file, field or tensor, what it has and what was expected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from serve.model.config import load_model_config
from serve.model.errors import ModelError
from serve.model.loader import _check_width, load_target
from serve.model.rope import RopeConfig
from tests.serve.model.random_models import write_random_model

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_random_model(tmp_path, "llama")
    return tmp_path


def edit_config(folder: Path, **fields: Any) -> None:
    """Fields set to None are taken out."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def edit_tensors(folder: Path, **tensors: torch.Tensor | None) -> None:
    path = folder / "model.safetensors"
    held = load_file(path)
    for name, tensor in tensors.items():
        name = name.replace("__", ".")
        if tensor is None:
            del held[name]
        else:
            held[name] = tensor
    save_file(held, path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "mamba"}, r"model_type 'mamba' is not served; known: llama, qwen2, qwen3"),
        ({"model_type": "custom", "auto_map": {"AutoModel": "code.Model"}}, r"auto_map names code, which is never run"),
        ({"model_type": ["llama"]}, r"model_type \['llama'\] is not served"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantization_config \(gptq\)"),
        ({"sliding_window": 128}, r"sliding_window 128"),
        ({"use_sliding_window": True, "sliding_window": 64}, r"use_sliding_window with sliding_window 64"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, r"layer_types has 'sliding_attention'"),
        ({"hidden_act": "gelu"}, r"hidden_act 'gelu'"),
        ({"hidden_size": None}, r"hidden_size is missing"),
        ({"num_hidden_layers": -2}, r"num_hidden_layers must be a positive whole number, got -2"),
        ({"vocab_size": True}, r"vocab_size must be a positive whole number, got True"),
        ({"num_key_value_heads": 3}, r"num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"head_dim": 15}, r"head_dim must be even .* got 15"),
        ({"rms_norm_eps": "small"}, r"rms_norm_eps must be between 0 and 1, got 'small'"),
        ({"attention_bias": 1}, r"attention_bias must be true or false, got 1"),
        ({"eos_token_id": 4000}, r"eos_token_id must be a token id below vocab_size 192, got 4000"),
        ({"dtype": "float8_e4m3fn"}, r"dtype 'float8_e4m3fn'"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, r"type 'dynamic' is not served"),
        ({"rope_parameters": {"rope_type": "linear"}}, r"rope_parameters.factor is missing"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": -1}}, r"rope_parameters.factor must be a positive number"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, r"rope_parameters.low_freq_factor is missing"),
        ({"rope_parameters": "yarn"}, r"rope_parameters must be an object, got 'yarn'"),
        ({"rope_parameters": {"mrope_section": [1, 2]}}, r"mrope_section"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor 0.5 is not served"),
    ],
)
def test_config_that_is_not_served_is_named(fields: dict[str, Any], message: str, folder: Path) -> None:
    edit_config(folder, **fields)
    with pytest.raises(ModelError, match=message):
        load_model_config(folder)


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"a": NaN', "\udcff", "[" * 200_000])
def test_config_that_is_no_json_object_is_named(text: str, folder: Path) -> None:
    (folder / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ModelError, match=r"config\.json"):
        load_model_config(folder)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        load_model_config(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        load_model_config(tmp_path)
    write_random_model(tmp_path, "llama")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        load_target(tmp_path, device=CPU, weights="fp32")


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"model__norm__weight": None}, r"model\.norm\.weight is missing; config\.json asks for it with shape \[64\]"),
        ({"lm_head__weight": None}, r"lm_head\.weight is missing"),
        (
            {"model__layers__1__mlp__down_proj__weight": torch.zeros(64, 159)},
            r"layers\.1\.mlp\.down_proj\.weight has shape \[64, 159\], config\.json asks for \[64, 160\]",
        ),
        (
            {"model__layers__0__self_attn__q_proj__bias": torch.zeros(64)},
            r"layers\.0\.self_attn\.q_proj\.bias \(1 in all\) is in the weights, but llama has no place for it",
        ),
        (
            {"model__norm__weight": torch.full((64,), float("nan"))},
            r"model\.norm\.weight has values that are not finite",
        ),
        (
            {"model__embed_tokens__weight": torch.zeros(192, 64).index_fill_(1, torch.tensor(3), float("-inf"))},
            r"embed_tokens\.weight has values that are not finite",
        ),
        ({"model__norm__weight": torch.zeros(64, dtype=torch.int8)}, r"model\.norm\.weight has dtype torch\.int8"),
    ],
)
def test_wrong_tensors_are_named(tensors: dict[str, Any], message: str, folder: Path) -> None:
    edit_tensors(folder, **tensors)
    with pytest.raises(ModelError, match=message):
        load_target(folder, device=CPU, weights="fp32")


def test_truncated_weights_are_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model\.safetensors is not a readable safetensors file"):
        load_target(folder, device=CPU, weights="fp32")


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({}, "weight_map must be a non-empty object"),
        (
            {"a": "../model.safetensors"},
            r"a points to '\.\./model\.safetensors', not a \.safetensors file of this folder",
        ),
        ({"a": "weights.bin"}, r"a points to 'weights\.bin'"),
        ({"a": "model-2.safetensors"}, r"model-2\.safetensors is missing"),
        ({"a": "model.safetensors"}, r"model\.safetensors lacks tensor a"),
    ],
)
def test_damaged_shard_index_is_named(weight_map: dict[str, str], message: str, folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError, match=message):
        load_target(folder, device=CPU, weights="fp32")


def test_a_tensor_in_two_shards_is_refused(folder: Path) -> None:
    save_file({"model.norm.weight": torch.ones(64)}, folder / "second.safetensors")
    names = [*load_file(folder / "model.safetensors"), "model.norm.weight"]
    weight_map = dict.fromkeys(names, "model.safetensors") | {"lm_head.weight": "model.safetensors"}
    weight_map["model.norm.weight"] = "second.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError, match=r"model\.norm\.weight is in more than one file"):
        load_target(folder, device=CPU, weights="fp32")


def test_old_config_files_read_as_new_ones(folder: Path) -> None:
    scaling = {"type": "linear", "factor": 2.0}
    edit_config(
        folder, rope_parameters=None, rope_theta=777.0, rope_scaling=scaling, dtype=None, torch_dtype="bfloat16"
    )
    config = load_model_config(folder)
    assert config.rope == RopeConfig("linear", 777.0, factor=2.0)
    assert config.dtype == "bfloat16"


def test_rope_scaling_added_to_a_new_config_file_is_not_passed_over(folder: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    edit_config(folder, rope_parameters={"rope_type": "default", "rope_theta": 500.0}, rope_scaling=yarn)
    with pytest.raises(ModelError, match=r"config\.json: rope_scaling differs from rope_parameters"):
        load_model_config(folder)
    edit_config(folder, rope_parameters={**yarn, "rope_theta": 500.0}, rope_theta=500.0)
    assert load_model_config(folder).rope.type == "yarn"


def test_end_tokens_of_both_files_are_kept(folder: Path) -> None:
    edit_config(folder, eos_token_id=[5, 6])
    (folder / "generation_config.json").write_text('{"eos_token_id": [6, 9]}')
    assert load_model_config(folder).eos_token_ids == (5, 6, 9)


def test_an_unused_sliding_window_is_no_obstacle(tmp_path: Path) -> None:
    write_random_model(tmp_path, "qwen2", sliding_window=32, use_sliding_window=False)
    assert load_model_config(tmp_path).qkv_bias


def test_a_stored_copy_of_a_tied_models_head_is_no_obstacle_but_another_head_is(tmp_path: Path) -> None:
    reference = write_random_model(tmp_path, "llama", tie_word_embeddings=True)
    table = reference.lm_head.weight.detach().clone()
    edit_tensors(tmp_path, lm_head__weight=table)
    model = load_target(tmp_path, device=CPU, weights="fp32")
    hidden = torch.randn(2, 64)
    torch.testing.assert_close(model.lm_head(hidden), reference.lm_head(hidden).detach(), atol=1e-4, rtol=1e-4)
    edit_tensors(tmp_path, lm_head__weight=2 * table)
    with pytest.raises(
        ModelError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight, .* tie_word_embed"
    ):
        load_target(tmp_path, device=CPU, weights="fp32")


def test_weight_formats_follow_the_device(folder: Path) -> None:
    with pytest.raises(ModelError, match="weights 'bf16' are not served on cpu; choose from fp32, int8, int4"):
        load_target(folder, device=CPU, weights="bf16")
    with pytest.raises(ModelError, match="device 'meta' is not served"):
        load_target(folder, device=torch.device("meta"), weights="auto")


@pytest.mark.parametrize("width", [2562, 16_384])
def test_rows_that_a_cards_kernels_do_not_norm_are_refused_at_the_start(width: int) -> None:
    with pytest.raises(ModelError, match=f"hidden_size: norms take rows of a multiple of 4 numbers, .* got {width}"):
        _check_width(width)
