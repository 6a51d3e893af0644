"""The frozen target as training needs it: dense, batched, with its hidden states at hand.

Two uses: ``hidden_states`` over whole right-padded sequences (the taps a drafter reads, and the final states a
distillation loss reads), and ``prefill``/``decode`` over a static KV cache (writing the responses to train on). The
server's own forward works over pages and is not imported; both are tested against the same reference.

Covers dense llama, qwen2 and qwen3 checkpoints in safetensors; a bias or a q/k norm is used where the file has one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

from serve.drafter.dflash import apply_rope, rope_tables
from serve.model.checkpoint import weight_files

FAMILIES = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True)
class TargetConfig:
    """The facts of ``config.json`` that the forward needs."""

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tied: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None


class LayerShape(NamedTuple):
    """What a layer needs to know besides its weights."""

    heads: int
    kv_heads: int
    dim: int
    eps: float


class LayerWeights(NamedTuple):
    """Weights of one decoder layer; q, k, v and gate, up stored together."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor


def read_target_config(folder: str | Path) -> TargetConfig:
    """Read ``config.json`` (and end tokens of ``generation_config.json``). Raises ValueError on what is unsupported."""
    folder = Path(folder)
    data: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kind = data.get("model_type")
    if kind not in FAMILIES:
        raise ValueError(f"{folder}: model_type {kind!r} is not one of {', '.join(FAMILIES)}")
    rope: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        rope = data.get(name) or rope
        if rope.get("rope_type", rope.get("type", "default")) != "default":
            raise ValueError(f"{folder}: only default rotary positions are supported, got {name} {rope!r}")
    generation = folder / "generation_config.json"
    ends = [data.get("eos_token_id")]
    if generation.exists():
        ends.append(json.loads(generation.read_text(encoding="utf-8")).get("eos_token_id"))
    flat = [item for end in ends for item in (end if isinstance(end, list) else [end]) if item is not None]
    heads = int(data["num_attention_heads"])
    return TargetConfig(
        model_type=kind,
        hidden_size=int(data["hidden_size"]),
        intermediate_size=int(data["intermediate_size"]),
        num_layers=int(data["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=int(data.get("num_key_value_heads") or heads),
        head_dim=int(data.get("head_dim") or data["hidden_size"] // heads),
        vocab_size=int(data["vocab_size"]),
        rms_norm_eps=float(data["rms_norm_eps"]),
        rope_theta=float(rope.get("rope_theta") or data.get("rope_theta") or 10_000.0),
        max_position_embeddings=int(data["max_position_embeddings"]),
        tied=bool(data.get("tie_word_embeddings", False)),
        eos_token_ids=tuple(dict.fromkeys(int(item) for item in flat)),
        bos_token_id=data.get("bos_token_id"),
    )


def _read_weights(folder: Path) -> dict[str, Tensor]:
    """From the files that the server reads, whatever lies beside them."""
    weights: dict[str, Tensor] = {}
    for path in (folder / name for name in sorted(weight_files(folder))):
        try:
            with safe_open(path, framework="pt", device="cpu") as handle:
                for name in handle.keys():  # noqa: SIM118 - the handle is not a dict
                    weights[name.removeprefix("model.")] = handle.get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"{path} is not a whole safetensors file: {error}") from error
    return weights


class Target:
    """Frozen weights on one device in one dtype. Nothing here has gradients."""

    def __init__(self, config: TargetConfig, weights: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype):
        self.config, self.device, self.dtype = config, device, dtype
        self.shape = LayerShape(config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps)
        if device.type == "cuda":
            # Shapes change from step to step; cuDNN attention plans each one anew and is not always safe to capture.
            torch.backends.cuda.enable_cudnn_sdp(False)
        self.layer: Callable[..., tuple[Tensor, Tensor, Tensor]] = causal_layer

        def take(name: str) -> Tensor:
            if name not in weights:
                raise ValueError(f"the target's weights lack {name}")
            return weights[name].to(device=device, dtype=dtype)

        def maybe(name: str) -> Tensor | None:
            return take(name) if name in weights else None

        self.embedding = take("embed_tokens.weight")
        self.lm_head = self.embedding if config.tied else take("lm_head.weight")
        self.final_norm = take("norm.weight")
        self.layers: list[LayerWeights] = []
        for i in range(config.num_layers):
            prefix = f"layers.{i}."
            attention = prefix + "self_attn."
            has_bias = attention + "q_proj.bias" in weights
            self.layers.append(
                LayerWeights(
                    input_norm=take(prefix + "input_layernorm.weight"),
                    qkv=torch.cat([take(f"{attention}{which}_proj.weight") for which in "qkv"]),
                    qkv_bias=torch.cat([take(f"{attention}{which}_proj.bias") for which in "qkv"])
                    if has_bias
                    else None,
                    q_norm=maybe(attention + "q_norm.weight"),
                    k_norm=maybe(attention + "k_norm.weight"),
                    out=take(attention + "o_proj.weight"),
                    post_norm=take(prefix + "post_attention_layernorm.weight"),
                    gate_up=torch.cat([take(prefix + "mlp.gate_proj.weight"), take(prefix + "mlp.up_proj.weight")]),
                    down=take(prefix + "mlp.down_proj.weight"),
                )
            )

    @classmethod
    def load(cls, folder: str | Path, device: torch.device | str, dtype: torch.dtype) -> Target:
        """Read a Hugging Face folder (config.json, *.safetensors)."""
        folder = Path(folder)
        return cls(read_target_config(folder), _read_weights(folder), torch.device(device), dtype)

    @torch.no_grad()
    def hidden_states(
        self,
        ids: Tensor,
        layer_ids: Sequence[int],
        store: Callable[[int, Tensor, Tensor], None] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run right-padded ids [S, L] causally. Returns taps [S, L, len(layer_ids) * H], the outputs of those layers in
        the order given, and the final normed states [S, L, H] that lm_head reads. ``store(i, k, v)`` sees each layer's
        rotated keys and values [S, L, kv_heads, D]. Rows past a sequence's end are garbage and harmless."""
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        cos, sin = rope_tables(positions, self.config.head_dim, self.config.rope_theta)
        x = F.embedding(ids, self.embedding)
        kept: dict[int, Tensor] = {}
        for i, weights in enumerate(self.layers):
            x, k, v = self.layer(x, cos, sin, *weights, self.shape)
            if store is not None:
                store(i, k, v)
            if i in layer_ids:
                kept[i] = x
        taps = torch.cat([kept[i] for i in layer_ids], dim=-1) if layer_ids else x[..., :0]
        return taps, rms_norm(x, self.final_norm, self.shape)


def rms_norm(x: Tensor, weight: Tensor, shape: LayerShape) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, shape.eps)


def project(
    x: Tensor,
    input_norm: Tensor,
    qkv: Tensor,
    qkv_bias: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    shape: LayerShape,
) -> tuple[Tensor, Tensor, Tensor]:
    """q [S, R, heads, D] and k, v [S, R, kv_heads, D] of a residual stream x [S, R, H], before rotation."""
    num_seqs, rows, _ = x.shape
    sizes = [shape.heads, shape.kv_heads, shape.kv_heads]
    flat = F.linear(rms_norm(x, input_norm, shape), qkv, qkv_bias)
    q, k, v = torch.split(flat.view(num_seqs, rows, sum(sizes), shape.dim), sizes, dim=2)
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, shape), rms_norm(k, k_norm, shape)
    return q, k, v


def finish(
    x: Tensor, attended: Tensor, out: Tensor, post_norm: Tensor, gate_up: Tensor, down: Tensor, shape: LayerShape
) -> Tensor:
    """Residual stream after the layer, from its attention output [S, R, heads * D]."""
    x = x + F.linear(attended, out)
    gate, up = F.linear(rms_norm(x, post_norm, shape), gate_up).chunk(2, dim=-1)
    return x + F.linear(F.silu(gate) * up, down)


def causal_layer(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    input_norm: Tensor,
    qkv: Tensor,
    qkv_bias: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    out: Tensor,
    post_norm: Tensor,
    gate_up: Tensor,
    down: Tensor,
    shape: LayerShape,
) -> tuple[Tensor, Tensor, Tensor]:
    """One decoder layer over whole sequences x [S, L, H]: its output, and its rotated k and v. Weights come one by one
    (``LayerWeights`` order), so that one compiled function serves every layer."""
    q, k, v = project(x, input_norm, qkv, qkv_bias, q_norm, k_norm, shape)
    q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
    groups = shape.heads // shape.kv_heads
    attended = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.repeat_interleave(groups, 2).transpose(1, 2),
        v.repeat_interleave(groups, 2).transpose(1, 2),
        is_causal=True,
    )
    return finish(x, attended.transpose(1, 2).flatten(2), out, post_norm, gate_up, down, shape), k, v


class StaticCache:
    """K/V of a fixed number of slots with ``length`` positions each; rows past a slot's position are stale."""

    def __init__(self, target: Target, slots: int, length: int) -> None:
        config = target.config
        shape = (config.num_layers, slots, config.num_kv_heads, length, config.head_dim)
        self.length = length
        self.keys = torch.zeros(shape, device=target.device, dtype=target.dtype)
        self.values = torch.zeros(shape, device=target.device, dtype=target.dtype)
        positions = torch.arange(length, device=target.device)
        self.positions = positions
        self.cos, self.sin = rope_tables(positions, config.head_dim, config.rope_theta)
        self.rows = torch.arange(slots, device=target.device)


@torch.no_grad()
def prefill(target: Target, cache: StaticCache, slots: Tensor, ids: Tensor) -> None:
    """Fill ``slots`` [n] of the cache with the K/V of right-padded prompts ids [n, L]."""
    width = ids.shape[1]

    def store(i: int, k: Tensor, v: Tensor) -> None:
        cache.keys[i][slots, :, :width] = k.transpose(1, 2)
        cache.values[i][slots, :, :width] = v.transpose(1, 2)

    target.hidden_states(ids, (), store)


@torch.no_grad()
def decode(target: Target, cache: StaticCache, tokens: Tensor, positions: Tensor) -> Tensor:
    """One step of every slot: tokens [S] at positions [S] -> logits [S, V] of the next token. Updates the cache; reads
    no host value, so it can be captured in a CUDA graph."""
    shape = target.shape
    slots = tokens.shape[0]
    cos, sin = cache.cos[positions][:, None], cache.sin[positions][:, None]
    visible = (cache.positions[None] <= positions[:, None])[:, None, None]
    x = F.embedding(tokens, target.embedding)[:, None]
    for i, layer in enumerate(target.layers):
        q, k, v = project(x, *layer[:5], shape)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        _write(cache.keys[i], cache.rows, positions, k[:, 0])
        _write(cache.values[i], cache.rows, positions, v[:, 0])
        # The query heads of one kv head become rows of one attention, so no K/V is repeated.
        grouped = q.view(slots, shape.kv_heads, -1, shape.dim)
        attended = F.scaled_dot_product_attention(grouped, cache.keys[i], cache.values[i], attn_mask=visible)
        x = finish(x, attended.reshape(slots, 1, -1), *layer[5:], shape)
    return F.linear(rms_norm(x[:, 0], target.final_norm, shape), target.lm_head)


def _write(cache: Tensor, rows: Tensor, positions: Tensor, values: Tensor) -> None:
    """cache [S, kv_heads, L, D] at (s, :, positions[s]) = values [S, kv_heads, D]."""
    cache.transpose(1, 2).index_put_((rows, positions), values)
