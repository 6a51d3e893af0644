"""The drafter's and the target's forward in fused kernels: same parameters, same arithmetic, a fifth of the launches.

``serve.drafter.dflash.DFlashModel`` and ``drafter_train.target.causal_layer`` are the specification; tests compare, and
so does the trainer on the device before it trusts this file. Needs a CUDA device (or Triton's interpreter).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from drafter_train.fused.attention import block_attention
from drafter_train.fused.rows import norm_turn, rms_norm, silu_times, turn
from drafter_train.target import LayerShape
from serve.drafter.dflash import DFlashModel, rope_tables


def fused_draft_hidden(model: DFlashModel, embeds: Tensor, taps: Tensor, positions: Tensor, anchors: Tensor) -> Tensor:
    """embeds [S, N, B, H], taps [S, W, T*H], positions [S, N, B], anchors [S, N] -> [S, N, B, H] in embeds' dtype;
    computes in that dtype from the parameters' (float32) master copies."""
    config, dtype = model.config, embeds.dtype
    num_seqs, width = taps.shape[:2]
    rows, dim = embeds.shape[1] * embeds.shape[2], config.head_dim
    eps = config.rms_norm_eps
    context = rms_norm(F.linear(taps, model.fc.weight.to(dtype)), model.hidden_norm.weight, eps)
    places = torch.arange(width, device=taps.device)[None]
    context_cos, context_sin = rope_tables(places, dim, config.rope_theta)
    cos, sin = rope_tables(positions.flatten(1), dim, config.rope_theta)
    block = embeds.flatten(1, 2)
    kv_rows = config.num_key_value_heads * dim
    layer: Any
    for layer in model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        normed = rms_norm(block, layer.input_layernorm.weight, eps)
        kv = torch.cat((attention.k_proj.weight, attention.v_proj.weight)).to(dtype)
        q = F.linear(normed, attention.q_proj.weight.to(dtype)).view(num_seqs, rows, -1, dim)
        own_k, own_v = _keys_values(F.linear(normed, kv), kv_rows, dim)
        context_k, context_v = _keys_values(F.linear(context, kv), kv_rows, dim)
        q = norm_turn(q, attention.q_norm.weight, cos, sin, eps)
        own_k = norm_turn(own_k, attention.k_norm.weight, cos, sin, eps)
        context_k = norm_turn(context_k, attention.k_norm.weight, context_cos, context_sin, eps)
        attended = block_attention(q, context_k, context_v, own_k, own_v, anchors).flatten(2)
        block = block + F.linear(attended, attention.o_proj.weight.to(dtype))
        normed = rms_norm(block, layer.post_attention_layernorm.weight, eps)
        gate_up = torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)).to(dtype)
        gate, up = F.linear(normed, gate_up).chunk(2, dim=-1)
        block = block + F.linear(silu_times(gate, up), mlp.down_proj.weight.to(dtype))
    return rms_norm(block, model.norm.weight, eps).view(embeds.shape)


def _keys_values(both: Tensor, kv_rows: int, dim: int) -> tuple[Tensor, Tensor]:
    k, v = torch.split(both, kv_rows, dim=-1)
    shape = (*both.shape[:2], -1, dim)
    return k.view(shape), v.view(shape)


def fused_causal_layer(
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
    """``drafter_train.target.causal_layer`` without gradients."""
    num_seqs, rows, _ = x.shape
    flat = F.linear(rms_norm(x, input_norm, shape.eps), qkv, qkv_bias)
    heads = flat.view(num_seqs, rows, shape.heads + 2 * shape.kv_heads, shape.dim)
    q, k, v = torch.split(heads, [shape.heads, shape.kv_heads, shape.kv_heads], dim=2)
    if q_norm is not None and k_norm is not None:
        q, k = norm_turn(q, q_norm, cos, sin, shape.eps), norm_turn(k, k_norm, cos, sin, shape.eps)
    else:
        q, k = turn(q, cos, sin), turn(k, cos, sin)
    attended = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        is_causal=True,
        enable_gqa=shape.heads != shape.kv_heads,
    )
    x = x + F.linear(attended.transpose(1, 2).flatten(2), out)
    gate, up = F.linear(rms_norm(x, post_norm, shape.eps), gate_up).chunk(2, dim=-1)
    return x + F.linear(silu_times(gate, up), down), k, v
