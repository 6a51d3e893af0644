"""Reads a drafter folder in DFlash layout (config.json and safetensors) and refuses, loudly, what does not fit.

A wrong pairing of drafter and target does not crash by itself; it drafts nonsense quietly. So every fact that both
sides state is compared here, and the error names both values. This file does not run the drafter and knows no server.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from serve.drafter.dflash import DFlashConfig, default_target_layer_ids, parameter_shapes
from serve.json_file import JsonFileError, read_object, shown

Rows = Callable[[Tensor], Tensor]
"""Ids [N] int64 on the CPU -> the rows of a matrix for these tokens [N, hidden], on any device."""
# Rows of a stored copy that are compared, and how far they may lie from the target's, which may be kept in 8 bits.
COMPARED_ROWS = 512
COPY_TOLERANCE = 0.1
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_MISSING = object()
# Extensions of the layout that change what the drafter computes. Keys whose value is one of the harmless ones pass.
_EXTENSIONS: dict[str, tuple[Any, ...]] = {
    "causal": (None, False),
    "is_causal": (None, False),
    "use_swa": (None, False),
    "swa_window_size": (None, 0),
    "attention_sink_bias": (None, False),
    "attention_value_scale": (None, 1, 1.0),
    "projector_type": (None, "dflash"),
    "conv_kernel_size": (None, 0),
    "selector_rank": (None, 0),
    "output_multiplier": (None, 1, 1.0),
    "final_logit_softcapping": (None, 0),
    "sample_from_anchor": (None, False),
    "use_aux_hidden_state": (None, True),
    "is_neox_style": (None, True),
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "hidden_act": (None, "silu"),
}


class DrafterError(ValueError):
    """This folder cannot be used as a drafter; the message says which fact disagrees, with both values."""


@dataclass(frozen=True)
class TargetFacts:
    """What a drafter has to agree with. The rows of the two matrices are only asked for where a checkpoint stores a
    copy of one; None leaves its values unchecked."""

    hidden_size: int
    num_layers: int
    vocab_size: int
    embedding: Rows | None = None
    lm_head: Rows | None = None


def read_drafter_config(folder: str | Path) -> DFlashConfig:
    """Parse ``config.json``: the drafter's keys are looked up in ``dflash_config`` first, then at the top level."""
    path = Path(folder) / "config.json"
    try:
        data = read_object(path)
    except JsonFileError as error:
        raise DrafterError(str(error)) from None
    if data is None:
        raise DrafterError(f"{path} does not exist")
    return parse_drafter_config(data)


def parse_drafter_config(data: Mapping[str, Any]) -> DFlashConfig:
    """The same for an already parsed object. Unsupported variants and missing or absurd values raise DrafterError."""
    nested = data.get("dflash_config") or {}
    if not isinstance(nested, Mapping):
        raise DrafterError(f"dflash_config must be an object, got {type(nested).__name__}")

    def find(name: str) -> Any:
        value = nested.get(name, _MISSING)
        return data.get(name, _MISSING) if value is _MISSING or value is None else value

    def integer(name: str, low: int, high: int, default: int | None = None) -> int:
        value = find(name)
        if (value is _MISSING or value is None) and default is not None:
            return default
        if value is _MISSING:
            raise DrafterError(f"config.json has no {name}")
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise DrafterError(f"{name} must be an integer between {low} and {high}, got {shown(value)}")
        return value

    _refuse_extensions(data, nested)
    layers = integer("num_hidden_layers", 1, 64)
    _refuse_layer_types(data, layers)
    hidden = integer("hidden_size", 1, 1 << 16)
    heads = integer("num_attention_heads", 1, 1024)
    kv_heads = integer("num_key_value_heads", 1, 1024, heads)
    if heads % kv_heads:
        raise DrafterError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if hidden % heads and find("head_dim") is _MISSING:
        raise DrafterError(f"config.json has no head_dim and hidden_size {hidden} is not a multiple of {heads} heads")
    head_dim = integer("head_dim", 2, 1024, hidden // heads)
    if head_dim % 2:
        raise DrafterError(f"head_dim must be even for rotary positions, got {head_dim}")
    vocab = integer("vocab_size", 1, 1 << 24)
    draft_vocab = integer("draft_vocab_size", 1, 1 << 24, vocab)
    if draft_vocab != vocab:
        raise DrafterError(
            f"draft_vocab_size {draft_vocab} differs from vocab_size {vocab}: a reduced draft vocabulary "
            "is not supported"
        )
    num_target_layers = integer("num_target_layers", 1, 4096)
    target_hidden = integer("target_hidden_size", 1, 1 << 16, hidden)
    if target_hidden != hidden:
        raise DrafterError(
            f"hidden_size {hidden} differs from target_hidden_size {target_hidden}: the target's "
            "embedding and lm_head are used, so they must be equal"
        )
    eps = find("rms_norm_eps")
    return DFlashConfig(
        hidden_size=hidden,
        intermediate_size=integer("intermediate_size", 1, 1 << 20),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        block_size=integer("block_size", 2, 64),
        mask_token_id=integer("mask_token_id", 0, vocab - 1),
        target_layer_ids=_layer_ids(find("target_layer_ids"), num_target_layers, layers),
        num_target_layers=num_target_layers,
        rms_norm_eps=_positive("rms_norm_eps", 1e-6 if eps is _MISSING else eps),
        rope_theta=_rope_theta(data),
        max_position_embeddings=integer("max_position_embeddings", 1, 1 << 30, 40_960),
        dtype=str(data.get("dtype") or data.get("torch_dtype") or "bfloat16"),
        bos_token_id=data.get("bos_token_id"),
        eos_token_id=data.get("eos_token_id"),
    )


def _positive(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise DrafterError(f"{name} must be a positive number, got {shown(value)}")
    return float(value)


def _rope_theta(data: Mapping[str, Any]) -> float:
    parameters = data.get("rope_parameters") or {}
    scaling = data.get("rope_scaling") or {}
    for name, value in (("rope_parameters", parameters), ("rope_scaling", scaling)):
        if not isinstance(value, Mapping):
            raise DrafterError(f"{name} must be an object or null, got {shown(value)}")
        kind = value.get("rope_type", value.get("type", "default"))
        if kind != "default":
            raise DrafterError(f"{name} asks for {shown(kind)}; only 'default' rotary positions are supported")
    theta = parameters.get("rope_theta", data.get("rope_theta"))
    if theta is None:
        raise DrafterError("config.json has neither rope_theta nor rope_parameters.rope_theta")
    return _positive("rope_theta", theta)


def _refuse_extensions(data: Mapping[str, Any], nested: Mapping[str, Any]) -> None:
    for name, harmless in _EXTENSIONS.items():
        for place, values in (("dflash_config.", nested), ("", data)):
            if name in values and values[name] not in harmless:
                raise DrafterError(
                    f"{place}{name} = {shown(values[name])} is not supported (plain DFlash needs {harmless[-1]!r})"
                )


def _refuse_layer_types(data: Mapping[str, Any], layers: int) -> None:
    types = data.get("layer_types")
    if types is None:
        if data.get("use_sliding_window"):
            raise DrafterError("use_sliding_window = true is not supported: only full_attention layers are")
        return
    if not isinstance(types, list) or len(types) != layers:
        raise DrafterError(f"layer_types must list {layers} layers (num_hidden_layers), got {shown(types)}")
    for i, kind in enumerate(types):
        if kind != "full_attention":
            raise DrafterError(f"layer_types[{i}] is {shown(kind)}: only 'full_attention' is supported")


def _layer_ids(value: Any, num_target_layers: int, layers: int) -> tuple[int, ...]:
    if value is _MISSING or value is None:
        return default_target_layer_ids(num_target_layers, layers)
    if not isinstance(value, list) or not value or len(value) > 64:
        raise DrafterError(f"target_layer_ids must be a list of 1 to 64 layer numbers, got {shown(value)}")
    for item in value:
        if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < num_target_layers:
            raise DrafterError(
                f"target_layer_ids has {shown(item)}, outside the target's layers 0..{num_target_layers - 1}"
            )
    if len(set(value)) != len(value):
        raise DrafterError(f"target_layer_ids names a layer twice: {shown(value)}")
    return tuple(value)


def load_drafter(folder: str | Path, target: TargetFacts) -> tuple[DFlashConfig, dict[str, Tensor]]:
    """Configuration and CPU weights (stored dtype, names of ``parameter_shapes``) of a drafter that fits ``target``.

    Accepts a ``model.`` prefix, ``midlayer.`` for layer 0, fused ``qkv_proj``, and copies of the target's embedding or
    lm_head (checked and dropped). Everything else that differs is a DrafterError naming both values.
    """
    folder = Path(folder)
    config = read_drafter_config(folder)
    for what, ours, theirs in (
        ("hidden_size", config.hidden_size, target.hidden_size),
        ("vocab_size", config.vocab_size, target.vocab_size),
        ("num_target_layers", config.num_target_layers, target.num_layers),
    ):
        if ours != theirs:
            raise DrafterError(
                f"the drafter was made for another target: its {what} is {ours}, the target has {theirs}"
            )
    weights = _normalise(_read_tensors(folder), config, target)
    expected = parameter_shapes(config)
    missing = sorted(expected.keys() - weights.keys())
    if missing:
        raise DrafterError(f"{folder} lacks {len(missing)} of {len(expected)} tensors, first {missing[0]!r}")
    unknown = sorted(weights.keys() - expected.keys())
    if unknown:
        raise DrafterError(f"{folder} holds {len(unknown)} tensors plain DFlash does not have, first {unknown[0]!r}")
    for name, shape in expected.items():
        _check_tensor(name, weights[name], shape, config)
    return config, {name: weights[name] for name in expected}


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise DrafterError(f"{folder} has no .safetensors file")
    tensors: dict[str, Tensor] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt", device="cpu") as handle:
                for name in handle.keys():  # noqa: SIM118 - the handle is not a dict
                    if name in tensors:
                        raise DrafterError(f"tensor {name!r} is in two files of {folder}, the second is {path.name}")
                    tensors[name] = handle.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise DrafterError(f"{path} is not a whole safetensors file: {error}") from None
    return tensors


def _normalise(raw: Mapping[str, Tensor], config: DFlashConfig, target: TargetFacts) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    q_rows = config.num_attention_heads * config.head_dim
    kv_rows = config.num_key_value_heads * config.head_dim
    for stored, tensor in raw.items():
        name = re.sub(r"^midlayer\.", "layers.0.", stored.removeprefix("model."))
        if name in ("embed_tokens.weight", "lm_head.weight"):
            _check_copy(stored, tensor, target.embedding if name.startswith("embed") else target.lm_head, target)
            continue
        if name.split(".")[0] in ("t2d", "d2t"):
            raise DrafterError(f"tensor {stored!r}: a reduced draft vocabulary is not supported")
        if name.split(".")[0] == "mask_embedding":
            raise DrafterError(
                f"tensor {stored!r}: an own mask embedding is not supported; the target's embedding of "
                f"mask_token_id {config.mask_token_id} is used"
            )
        parts = {name: tensor}
        if name.endswith(".qkv_proj.weight"):
            if tensor.dim() != 2 or tensor.shape[0] != q_rows + 2 * kv_rows:
                raise DrafterError(
                    f"{stored} has shape {list(tensor.shape)}, the config asks for "
                    f"[{q_rows + 2 * kv_rows}, {config.hidden_size}]"
                )
            stem = name.removesuffix("qkv_proj.weight")
            split = torch.split(tensor, [q_rows, kv_rows, kv_rows])
            parts = {f"{stem}{which}_proj.weight": part for which, part in zip("qkv", split, strict=True)}
        for part_name, part in parts.items():
            if part_name in weights:
                raise DrafterError(f"tensor {part_name!r} is stored twice, the second time as {stored!r}")
            weights[part_name] = part.contiguous()
    return weights


def _check_copy(name: str, copy: Tensor, original: Rows | None, target: TargetFacts) -> None:
    shape = (target.vocab_size, target.hidden_size)
    if tuple(copy.shape) != shape:
        raise DrafterError(f"{name} has shape {list(copy.shape)}, the target's is {list(shape)}")
    if original is None:
        return
    ids = torch.linspace(0, target.vocab_size - 1, min(COMPARED_ROWS, target.vocab_size)).long()
    rows = original(ids).detach().cpu().float()
    if not (copy[ids].float() - rows).norm() <= COPY_TOLERANCE * rows.norm():
        raise DrafterError(f"{name} differs from the target's own; only drafters that share the target's are supported")


def _check_tensor(name: str, tensor: Tensor, shape: tuple[int, ...], config: DFlashConfig) -> None:
    if tensor.dtype not in _FLOATS:
        wanted = ", ".join(str(dtype).removeprefix("torch.") for dtype in _FLOATS)
        raise DrafterError(f"{name} is stored as {str(tensor.dtype).removeprefix('torch.')}; supported are {wanted}")
    if tuple(tensor.shape) != shape:
        detail = ""
        if name == "fc.weight":
            detail = f" ({len(config.target_layer_ids)} target_layer_ids x hidden_size {config.hidden_size} columns)"
        raise DrafterError(f"{name} has shape {list(tensor.shape)}, the config asks for {list(shape)}{detail}")
    if not bool(torch.isfinite(tensor).all()):
        raise DrafterError(f"{name} holds NaN or infinite values")
