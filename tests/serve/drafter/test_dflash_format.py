"""The drafter folder other engines read: names, shapes, keys; and what the loader refuses, with both values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from drafter_train.checkpoints import export_drafter
from serve.drafter.checkpoint import DrafterError, TargetFacts, load_drafter, parse_drafter_config, read_drafter_config
from serve.drafter.dflash import DFlashConfig, DFlashModel, default_target_layer_ids, parameter_shapes
from tests.serve.drafter.random_drafters import TARGET_LAYERS, drafter_config, random_drafter, write_drafter

ROOT = Path(__file__).resolve().parents[3]
RELEASE = ROOT / "drafter_train" / "releases" / "smollm2-135m-instruct"
FACTS = TargetFacts(64, TARGET_LAYERS, 320)


def qwen3_4b() -> DFlashConfig:
    return DFlashConfig(2560, 9728, 5, 32, 8, 128, 151_936, 16, 151_669, (1, 9, 17, 25, 33), 36)


def test_names_and_shapes_are_those_of_the_published_qwen3_4b_drafter() -> None:
    shapes = parameter_shapes(qwen3_4b())
    assert len(shapes) == 58
    assert shapes["fc.weight"] == (2560, 12_800)
    assert shapes["hidden_norm.weight"] == shapes["norm.weight"] == (2560,)
    layer = {name.removeprefix("layers.4."): shape for name, shape in shapes.items() if name.startswith("layers.4.")}
    assert layer == {
        "input_layernorm.weight": (2560,),
        "post_attention_layernorm.weight": (2560,),
        "self_attn.q_proj.weight": (4096, 2560),
        "self_attn.k_proj.weight": (1024, 2560),
        "self_attn.v_proj.weight": (1024, 2560),
        "self_attn.o_proj.weight": (2560, 4096),
        "self_attn.q_norm.weight": (128,),
        "self_attn.k_norm.weight": (128,),
        "mlp.gate_proj.weight": (9728, 2560),
        "mlp.up_proj.weight": (9728, 2560),
        "mlp.down_proj.weight": (2560, 9728),
    }
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == pytest.approx(537.4e6, rel=1e-3)


def test_config_has_every_key_that_other_engines_read() -> None:
    data = qwen3_4b().to_json()
    assert data["architectures"] == ["DFlashDraftModel"]
    assert data["model_type"] == "qwen3"
    assert data["dflash_config"] == {
        "block_size": 16,
        "mask_token_id": 151_669,
        "target_layer_ids": [1, 9, 17, 25, 33],
    }
    assert (data["block_size"], data["num_target_layers"]) == (16, 36)
    assert data["layer_types"] == ["full_attention"] * 5
    assert data["rope_theta"] == data["rope_parameters"]["rope_theta"]
    assert data["tie_word_embeddings"] is False
    assert "auto_map" not in data
    assert json.loads(json.dumps(data)) == data


@pytest.mark.parametrize(
    ("target_layers", "count", "ids"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (32, 5, (1, 8, 15, 22, 29)),
        (30, 5, (1, 8, 14, 20, 27)),
        (36, 1, (18,)),
    ],
)
def test_default_layers_follow_the_published_rule(target_layers: int, count: int, ids: tuple[int, ...]) -> None:
    assert default_target_layer_ids(target_layers, count) == ids


def test_a_written_config_reads_back_and_the_model_has_exactly_the_tensors_of_the_layout() -> None:
    config = drafter_config(bos_token_id=0, eos_token_id=2)
    assert parse_drafter_config(json.loads(json.dumps(config.to_json()))) == config
    assert {n: tuple(p.shape) for n, p in DFlashModel(config).named_parameters()} == parameter_shapes(config)


def test_keys_of_dflash_config_win_over_the_top_level() -> None:
    data = drafter_config().to_json()
    data |= {"block_size": 9, "mask_token_id": 8, "target_layer_ids": [2]}
    config = parse_drafter_config(data)
    assert (config.block_size, config.mask_token_id, config.target_layer_ids) == (6, 3, (0, 1, 3))
    del data["dflash_config"]
    config = parse_drafter_config(data)
    assert (config.block_size, config.mask_token_id, config.target_layer_ids) == (9, 8, (2,))


def test_exported_folder_is_one_bf16_file_that_loads(tmp_path: Path) -> None:
    model = random_drafter(drafter_config(dtype="bfloat16"))
    export_drafter(tmp_path / "final", model, {"drafter_eval.json": {"a": 1}})
    files = sorted(path.name for path in (tmp_path / "final").iterdir())
    assert files == ["config.json", "drafter_eval.json", "model.safetensors"]
    config, weights = load_drafter(tmp_path / "final", FACTS)
    assert config == model.config
    for name, parameter in model.named_parameters():
        assert torch.equal(weights[name], parameter.detach().bfloat16())


def test_other_spellings_of_the_same_weights_load_equally(tmp_path: Path) -> None:
    model = random_drafter(drafter_config())
    _, plain = load_drafter(write_drafter(tmp_path / "plain", model), FACTS)
    prefixed = {name: f"model.{name}" for name in plain}
    _, other = load_drafter(write_drafter(tmp_path / "prefix", model, rename=prefixed), FACTS)
    attention = "layers.0.self_attn."
    drop = {f"{attention}{part}_proj.weight": "" for part in "qkv"}
    rename = {name: name.replace("layers.0.", "midlayer.") for name in plain if name.startswith("layers.0.")} | drop
    fused = {"midlayer.self_attn.qkv_proj.weight": torch.cat([plain[f"{attention}{p}_proj.weight"] for p in "qkv"])}
    _, midlayer = load_drafter(write_drafter(tmp_path / "fused", model, rename=rename, extra=fused), FACTS)
    for name, tensor in plain.items():
        assert torch.equal(other[name], tensor)
        assert torch.equal(midlayer[name], tensor)


def _set(data: dict[str, Any], name: str, value: Any) -> None:
    place = data["dflash_config"] if name in data["dflash_config"] else data
    place[name] = value
    if place is not data:
        data.pop(name, None)


@pytest.mark.parametrize(
    ("name", "value", "both"),
    [
        ("target_layer_ids", [0, 5], ("5", "0..4")),
        ("target_layer_ids", [0, -1], ("-1", "0..4")),
        ("target_layer_ids", [1, 1], ("twice", "[1, 1]")),
        ("target_layer_ids", [], ("target_layer_ids", "[]")),
        ("block_size", 1, ("block_size", "between 2 and 64", "1")),
        ("block_size", "8", ("block_size", "'8'")),
        ("mask_token_id", 320, ("mask_token_id", "between 0 and 319", "320")),
        ("num_attention_heads", 3, ("3", "2")),
        ("head_dim", 7, ("head_dim", "7")),
        ("draft_vocab_size", 100, ("100", "320")),
        ("target_hidden_size", 128, ("64", "128")),
        ("rms_norm_eps", 0, ("rms_norm_eps", "0")),
        ("rope_scaling", {"rope_type": "yarn"}, ("rope_scaling", "yarn")),
        ("layer_types", ["full_attention", "sliding_attention"], ("layer_types[1]", "sliding_attention")),
        ("layer_types", ["full_attention"], ("layer_types", "2 layers")),
        ("hidden_act", "gelu", ("hidden_act", "'gelu'", "'silu'")),
        ("is_causal", True, ("is_causal", "True", "False")),
        ("projector_type", "domino", ("projector_type", "'domino'", "'dflash'")),
        ("num_hidden_layers", None, ("num_hidden_layers", "None")),
    ],
)
def test_config_errors_name_both_values(name: str, value: Any, both: tuple[str, ...]) -> None:
    data = drafter_config().to_json()
    _set(data, name, value)
    with pytest.raises(DrafterError) as error:
        parse_drafter_config(data)
    for part in both:
        assert part in str(error.value)


@pytest.mark.parametrize("name", ["hidden_size", "vocab_size", "num_target_layers", "num_attention_heads"])
def test_a_missing_key_is_named(name: str) -> None:
    data = drafter_config().to_json()
    del data[name]
    with pytest.raises(DrafterError, match=name):
        parse_drafter_config(data)


@pytest.mark.parametrize(
    ("facts", "both"),
    [
        (TargetFacts(96, TARGET_LAYERS, 320), ("hidden_size is 64", "96")),
        (TargetFacts(64, TARGET_LAYERS, 321), ("vocab_size is 320", "321")),
        (TargetFacts(64, 6, 320), ("num_target_layers is 5", "6")),
    ],
)
def test_a_drafter_of_another_target_is_refused(tmp_path: Path, facts: TargetFacts, both: tuple[str, str]) -> None:
    folder = write_drafter(tmp_path, random_drafter(drafter_config()))
    with pytest.raises(DrafterError) as error:
        load_drafter(folder, facts)
    for part in both:
        assert part in str(error.value)


def test_tap_count_and_fc_must_agree(tmp_path: Path) -> None:
    folder = write_drafter(tmp_path, random_drafter(drafter_config()))
    data = json.loads((folder / "config.json").read_text())
    data["dflash_config"]["target_layer_ids"] = [0, 1]
    (folder / "config.json").write_text(json.dumps(data))
    with pytest.raises(DrafterError, match=r"fc\.weight has shape \[64, 192\], the config asks for \[64, 128\]"):
        load_drafter(folder, FACTS)


_NAN = torch.full((64,), float("nan"))


@pytest.mark.parametrize(
    ("rename", "extra", "message"),
    [
        ({"norm.weight": ""}, {}, "lacks 1 of 25 tensors, first 'norm.weight'"),
        ({}, {"layers.2.input_layernorm.weight": torch.ones(64)}, "1 tensors plain DFlash does not have"),
        ({}, {"t2d": torch.ones(320)}, "'t2d': a reduced draft vocabulary is not supported"),
        ({}, {"mask_embedding.weight": torch.ones(64)}, "own mask embedding is not supported"),
        ({"norm.weight": ""}, {"norm.weight": torch.ones(63)}, r"norm.weight has shape \[63\].*\[64\]"),
        ({"norm.weight": ""}, {"norm.weight": torch.ones(64, dtype=torch.int8)}, "norm.weight is stored as int8"),
        ({"norm.weight": ""}, {"norm.weight": _NAN}, "norm.weight holds NaN"),
        ({}, {"embed_tokens.weight": torch.ones(320, 64)}, "embed_tokens.weight differs from the target's own"),
        ({}, {"lm_head.weight": torch.ones(319, 64)}, r"lm_head.weight has shape \[319, 64\].*\[320, 64\]"),
        ({}, {"model.norm.weight": torch.ones(64)}, "stored twice"),
    ],
)
def test_tensor_errors_name_the_tensor(
    tmp_path: Path, rename: dict[str, str], extra: dict[str, Tensor], message: str
) -> None:
    folder = write_drafter(tmp_path, random_drafter(drafter_config()), rename=rename, extra=extra)
    facts = TargetFacts(64, TARGET_LAYERS, 320, torch.zeros(320, 64).__getitem__, torch.zeros(320, 64).__getitem__)
    with pytest.raises(DrafterError, match=message):
        load_drafter(folder, facts)


def test_copies_of_the_targets_own_head_are_dropped(tmp_path: Path) -> None:
    head = torch.randn(320, 64, generator=torch.Generator().manual_seed(0))
    folder = write_drafter(tmp_path, random_drafter(drafter_config()), extra={"lm_head.weight": head.bfloat16()})
    _, weights = load_drafter(folder, TargetFacts(64, TARGET_LAYERS, 320, None, head.__getitem__))
    assert "lm_head.weight" not in weights


def test_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DrafterError, match=r"config\.json does not exist"):
        read_drafter_config(tmp_path)
    folder = write_drafter(tmp_path / "cut", random_drafter(drafter_config()))
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DrafterError, match=r"model\.safetensors is not a whole safetensors file"):
        load_drafter(folder, FACTS)
    (folder / "model.safetensors").unlink()
    with pytest.raises(DrafterError, match=r"has no \.safetensors file"):
        load_drafter(folder, FACTS)
    (folder / "config.json").write_text("[1]")
    with pytest.raises(DrafterError, match="must hold a JSON object, got list"):
        load_drafter(folder, FACTS)
    (folder / "config.json").write_text("{")
    with pytest.raises(DrafterError, match="cannot be read as JSON"):
        load_drafter(folder, FACTS)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    folder = write_drafter(tmp_path, random_drafter(drafter_config()))
    save_file({"norm.weight": torch.ones(64)}, folder / "model-2.safetensors")
    with pytest.raises(DrafterError, match=r"'norm\.weight' is in two files"):
        load_drafter(folder, FACTS)


def test_the_shipped_drafter_is_in_the_layout_and_small() -> None:
    config = read_drafter_config(RELEASE)
    with safe_open(RELEASE / "model.safetensors", framework="pt") as handle:
        shapes = {name: tuple(handle.get_slice(name).get_shape()) for name in handle.keys()}  # noqa: SIM118
        dtypes = {handle.get_slice(name).get_dtype() for name in handle.keys()}  # noqa: SIM118
    assert shapes == parameter_shapes(config)
    assert dtypes == {"BF16"}
    assert config.to_json() == json.loads((RELEASE / "config.json").read_text())
    assert sum(path.stat().st_size for path in RELEASE.iterdir()) <= 20_000_000
    report = json.loads((RELEASE / "drafter_eval.json").read_text())
    assert report["block_size"] == config.block_size
    assert report["acceptance_length"] >= 2.2
