"""The block drafter in DFlash layout: its configuration and its eager forward, which is the specification.

A small stack of Qwen3-style layers turns one known token and ``block_size - 1`` mask tokens into guesses for the whole
block in one pass. What it knows of the text comes from the target: some of the target's hidden states (the taps) are
concatenated, projected (``fc``) and normed, and enter every layer as extra keys and values before the block's own.

Training uses this module as it is; the server runs the same weights over pages and is tested against it. This file
does not know checkpoints on disk, KV pages, sampling or losses. Layout and semantics: z-lab DFlash, arXiv 2602.06036.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# q [S, heads, Q, D], k and v [S, kv_heads, K, D] -> [S, heads, Q, D]; scale is 1/sqrt(D)
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class DFlashConfig:
    """Shape of one drafter. ``target_layer_ids[i]`` is a 0-based target layer whose *output* residual stream is tapped.

    ``block_size`` counts the known token: a block drafts ``block_size - 1`` tokens. ``hidden_size`` and ``vocab_size``
    are the target's, since the target's embedding and lm_head are used; head counts and ``head_dim`` need not be.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0
    max_position_embeddings: int = 40_960
    dtype: str = "bfloat16"
    bos_token_id: int | None = None
    eos_token_id: int | None = None

    def to_json(self) -> dict[str, Any]:
        """config.json of the published layout; every key another engine reads, in both places where they differ."""
        ids = list(self.target_layer_ids)
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "block_size": self.block_size,
            "num_target_layers": self.num_target_layers,
            "dflash_config": {
                "block_size": self.block_size,
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": ids,
            },
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
            "layer_types": ["full_attention"] * self.num_hidden_layers,
            "use_sliding_window": False,
            "sliding_window": None,
            "max_window_layers": self.num_hidden_layers,
            "max_position_embeddings": self.max_position_embeddings,
            "vocab_size": self.vocab_size,
            "tie_word_embeddings": False,
            "dtype": self.dtype,
            "torch_dtype": self.dtype,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": self.eos_token_id,
            "use_cache": True,
            "initializer_range": 0.02,
        }


def default_target_layer_ids(num_target_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """The layout's rule when a config names no taps: the middle layer for one draft layer, else evenly spaced points
    from 1 to ``num_target_layers - 3``, both ends included, rounded half to even."""
    if num_draft_layers == 1:
        return (num_target_layers // 2,)
    first, last = 1, num_target_layers - 3
    step = (last - first) / (num_draft_layers - 1)
    return tuple(round(first + i * step) for i in range(num_draft_layers))


def parameter_shapes(config: DFlashConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the layout with its shape, in file order: 3 + 11 per layer."""
    hidden, mlp, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_rows, kv_rows = config.num_attention_heads * dim, config.num_key_value_heads * dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(config.target_layer_ids) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for i in range(config.num_hidden_layers):
        prefix = f"layers.{i}."
        shapes |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "post_attention_layernorm.weight": (hidden,),
            prefix + "self_attn.q_proj.weight": (q_rows, hidden),
            prefix + "self_attn.k_proj.weight": (kv_rows, hidden),
            prefix + "self_attn.v_proj.weight": (kv_rows, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, q_rows),
            prefix + "self_attn.q_norm.weight": (dim,),
            prefix + "self_attn.k_norm.weight": (dim,),
            prefix + "mlp.gate_proj.weight": (mlp, hidden),
            prefix + "mlp.up_proj.weight": (mlp, hidden),
            prefix + "mlp.down_proj.weight": (hidden, mlp),
        }
    return shapes


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension; the statistics in float32, the result in x's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (normed * self.weight.float()).to(x.dtype)


def rope_tables(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary angles, float32 [..., head_dim], for integer ``positions`` [...]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angles = positions.float().unsqueeze(-1) * theta**-exponents
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate halves (neox style) of x [S, rows, heads, D] by tables [S, rows, D]; computed in float32."""
    wide = x.float()
    first, second = wide.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (wide * cos.unsqueeze(-2) + turned * sin.unsqueeze(-2)).to(x.dtype)


def masked_attention(mask: Tensor | None) -> Attend:
    """Plain softmax attention. ``mask`` bool, broadcastable to [S, heads, Q, K], True where a query may look;
    None lets every query see everything, which is what a single block with its whole context needs."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return attend


class DFlashAttention(nn.Module):
    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.q_proj = nn.Linear(config.hidden_size, self.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, self.kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, self.kv_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(self.dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.dim, config.rms_norm_eps)

    def forward(self, block: Tensor, context: Tensor, tables: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """block [S, Q, H] (normed), context [S, C, H] (fused, not normed here), tables cover C + Q rows."""
        num_seqs, rows, _ = block.shape
        cos, sin = tables
        source = torch.cat((context, block), dim=1)
        q = self.q_norm(self.q_proj(block).view(num_seqs, rows, self.heads, self.dim))
        k = self.k_norm(self.k_proj(source).view(num_seqs, -1, self.kv_heads, self.dim))
        v = self.v_proj(source).view(num_seqs, -1, self.kv_heads, self.dim)
        q = apply_rope(q, cos[:, -rows:], sin[:, -rows:])
        k = apply_rope(k, cos, sin)
        out = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        projected: Tensor = self.o_proj(out.transpose(1, 2).reshape(num_seqs, rows, self.heads * self.dim))
        return projected


class DFlashMLP(nn.Module):
    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DFlashLayer(nn.Module):
    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = DFlashAttention(config)
        self.mlp = DFlashMLP(config)

    def forward(self, block: Tensor, context: Tensor, tables: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        block = block + self.self_attn(self.input_layernorm(block), context, tables, attend)
        out: Tensor = block + self.mlp(self.post_attention_layernorm(block))
        return out


class DFlashModel(nn.Module):
    """The drafter. Parameter names are the checkpoint's names; embedding and lm_head stay with the target."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DFlashLayer(config) for _ in range(config.num_hidden_layers))

    def fuse(self, taps: Tensor) -> Tensor:
        """Target hidden states of the tapped layers, concatenated in id order [..., taps * H] -> context [..., H]."""
        context: Tensor = self.hidden_norm(self.fc(taps))
        return context

    def forward(
        self,
        block_embeds: Tensor,
        context: Tensor,
        block_positions: Tensor,
        context_positions: Tensor,
        attend: Attend | None = None,
    ) -> Tensor:
        """Hidden states for the target's lm_head, after the drafter's own final norm: [S, Q, H].

        block_embeds [S, Q, H]: target embeddings of the known token and the mask tokens, one or many blocks per
        sequence. context [S, C, H]: ``fuse`` of the taps of committed positions, strictly before each block's first
        position. block_positions [S, Q], context_positions [S, C]: absolute, integer. ``attend`` restricts who sees
        what (rows of K are context first, then block); without it every row sees everything. Row j of a block
        predicts the token *at* its own position; row 0 is known and its output unused.
        """
        attend = attend or masked_attention(None)
        positions = torch.cat((context_positions, block_positions), dim=1)
        tables = rope_tables(positions, self.config.head_dim, self.config.rope_theta)
        hidden: Tensor = block_embeds
        for layer in self.layers:
            hidden = layer(hidden, context, tables, attend)
        normed: Tensor = self.norm(hidden)
        return normed
