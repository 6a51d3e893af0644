"""What a target model is, read from its config.json alone and checked field by field.

Families (llama, qwen2, qwen3) are rows of a table. This file opens no weights and makes no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serve.json_file import JsonFileError, read_object, shown
from serve.model.errors import ModelError
from serve.model.rope import RopeConfig, parse_rope

__all__ = ["FAMILIES", "Family", "ModelConfig", "ModelError", "load_model_config", "read_json"]


@dataclass(frozen=True)
class Family:
    """How a family departs from the common block. A bias of None is what config.json's attention_bias says."""

    qkv_bias: bool | None
    output_bias: bool | None
    qk_norm: bool
    mlp_bias_field: bool
    default_head_dim: int | None = None


FAMILIES: dict[str, Family] = {
    "llama": Family(qkv_bias=None, output_bias=None, qk_norm=False, mlp_bias_field=True),
    "qwen2": Family(qkv_bias=True, output_bias=False, qk_norm=False, mlp_bias_field=False),
    "qwen3": Family(qkv_bias=None, output_bias=None, qk_norm=True, mlp_bias_field=False, default_head_dim=128),
}
_DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class ModelConfig:
    """One dense decoder. dtype is the one the checkpoint says it was saved in."""

    family: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: str


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ModelError naming the file when it is missing or not one."""
    try:
        data = read_object(path)
    except JsonFileError as error:
        raise ModelError(str(error)) from None
    if data is None:
        raise ModelError(f"{path} is missing")
    return data


def load_model_config(model_dir: Path) -> ModelConfig:
    """Reads config.json (and the end tokens of generation_config.json). Raises ModelError for what is not served."""
    model_dir = Path(model_dir)
    if not model_dir.is_dir():
        raise ModelError(f"model folder {model_dir} does not exist")
    config = read_json(model_dir / "config.json")
    name = config.get("model_type")
    family = FAMILIES.get(name) if isinstance(name, str) else None
    if family is None or not isinstance(name, str):
        hint = " (its auto_map names code, which is never run)" if config.get("auto_map") else ""
        raise ModelError(f"config.json: model_type {shown(name)} is not served{hint}; known: {', '.join(FAMILIES)}")
    _refuse_unserved(config)

    hidden = _count(config, "hidden_size")
    heads = _count(config, "num_attention_heads")
    kv_heads = _count(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    head_dim = _count(config, "head_dim", family.default_head_dim or hidden // heads)
    if head_dim % 2:
        raise ModelError(f"config.json: head_dim must be even for rotary positions, got {head_dim}")
    attention_bias = _flag(config, "attention_bias", False)
    vocab = _count(config, "vocab_size")
    return ModelConfig(
        family=name,
        hidden_size=hidden,
        num_layers=_count(config, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=_count(config, "intermediate_size"),
        vocab_size=vocab,
        rms_norm_eps=_eps(config),
        rope=parse_rope(config),
        max_position_embeddings=_count(config, "max_position_embeddings"),
        tie_word_embeddings=_flag(config, "tie_word_embeddings", False),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=attention_bias if family.output_bias is None else family.output_bias,
        mlp_bias=family.mlp_bias_field and _flag(config, "mlp_bias", False),
        qk_norm=family.qk_norm,
        eos_token_ids=_end_tokens(model_dir, config, vocab),
        bos_token_id=_token(config.get("bos_token_id"), "config.json: bos_token_id", vocab),
        dtype=_dtype(config),
    )


def _refuse_unserved(config: dict[str, Any]) -> None:
    if config.get("quantization_config"):
        method = config["quantization_config"]
        method = method.get("quant_method", method) if isinstance(method, dict) else method
        name = shown(method).strip("'")
        raise ModelError(f"config.json: quantization_config ({name}) is not served; use an unquantised checkpoint")
    kinds = config.get("layer_types")
    if kinds is not None and not isinstance(kinds, list):
        raise ModelError(f"config.json: layer_types must be a list, got {shown(kinds)}")
    sliding = [kind for kind in kinds or [] if kind != "full_attention"]
    if sliding:
        raise ModelError(f"config.json: layer_types has {shown(sliding[0])}; only full_attention is served")
    if config.get("use_sliding_window"):
        raise ModelError(
            f"config.json: use_sliding_window with sliding_window {shown(config.get('sliding_window'))} is not served"
        )
    if "use_sliding_window" not in config and config.get("sliding_window") is not None:
        raise ModelError(f"config.json: sliding_window {shown(config['sliding_window'])} is not served")
    if config.get("hidden_act", "silu") != "silu":
        raise ModelError(f"config.json: hidden_act {shown(config['hidden_act'])} is not served, only 'silu'")


def _count(config: dict[str, Any], field: str, default: int | None = None) -> int:
    value = config.get(field)
    if value is None:
        value = default
    if value is None:
        raise ModelError(f"config.json: {field} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 31:
        raise ModelError(f"config.json: {field} must be a positive whole number, got {shown(value)}")
    return value


def _flag(config: dict[str, Any], field: str, default: bool) -> bool:
    value = config.get(field)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ModelError(f"config.json: {field} must be true or false, got {shown(value)}")
    return value


def _eps(config: dict[str, Any]) -> float:
    value = config.get("rms_norm_eps")
    value = 1e-6 if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1:
        raise ModelError(f"config.json: rms_norm_eps must be between 0 and 1, got {shown(value)}")
    return float(value)


def _dtype(config: dict[str, Any]) -> str:
    value = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if value not in _DTYPES:
        raise ModelError(f"config.json: dtype {shown(value)} is not served; known: {', '.join(_DTYPES)}")
    return value


def _token(value: object, field: str, vocab: int) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab:
        raise ModelError(f"{field} must be a token id below vocab_size {vocab}, got {shown(value)}")
    return value


def _end_tokens(model_dir: Path, config: dict[str, Any], vocab: int) -> tuple[int, ...]:
    """End tokens of config.json and generation_config.json together, in that order, once each."""
    found: list[int] = []
    sources = {"config.json": config}
    if (model_dir / "generation_config.json").exists():
        sources["generation_config.json"] = read_json(model_dir / "generation_config.json")
    for file, source in sources.items():
        value = source.get("eos_token_id")
        for item in value if isinstance(value, list) else [value]:
            token = _token(item, f"{file}: eos_token_id", vocab)
            if token is not None and token not in found:
                found.append(token)
    return tuple(found)
