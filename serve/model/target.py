"""The target model's forward over flat tokens: prefill chunk, decode and verify are rows through the same code.

The residual stream is float32 in every weight format. This file knows no files, no scheduling and no text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from serve.kernels.attention import PagedAttention, tried
from serve.kernels.attention_plan import AttentionPlan, AttentionShape
from serve.kernels.elementwise import rms_norm, rotate_, silu_mul
from serve.kernels.kv_cache import KVCache, write_kv
from serve.kernels.linear import Linear
from serve.kernels.native.ops import NativeLibrary
from serve.model.batch import FlatBatch
from serve.model.config import ModelConfig
from serve.model.rope import RotaryTable
from serve.parallel.group import ALONE, RankGroup


@dataclass(frozen=True)
class ForwardOutput:
    """logits [R, vocab] float32; taps [T, len(taps) * hidden] float32, or None when none were asked for."""

    logits: Tensor
    taps: Tensor | None


@dataclass(frozen=True)
class DecoderLayer:
    """Weights of one block. Query and key rows are permuted to rotary pairs (see ``rotate_``); q, k, v lie in that
    order in qkv, gate before up in gate_up."""

    input_norm: Tensor
    qkv: Linear
    qk_norm: Tensor | None  # [heads + kv_heads, head_dim]: each head's norm weight, or None
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True)
class TargetWeights:
    """embedding [vocab, hidden] in the checkpoint's dtype, whatever the format of the matrices; None: the head's rows,
    which serve both where they are tied."""

    embedding: Tensor | None
    layers: tuple[DecoderLayer, ...]
    final_norm: Tensor
    head: Linear


@dataclass(frozen=True)
class TargetSettings:
    """How a model's weights are kept and run. cache_dtype: of activations and K/V; linear_path: the matrix kernels, in
    words; int8_kv: K/V are int8 with a scale a head and position instead; group: the ranks that share the model;
    integer_prompts: prompts go through whole numbers where their matrices allow it; fp8_prompts: through 8-bit
    floats."""

    weight_format: str
    device: torch.device
    cache_dtype: torch.dtype
    linear_path: str = ""
    int8_kv: bool = False
    group: RankGroup = ALONE
    integer_prompts: bool = False
    fp8_prompts: bool = False


class TargetModel:
    """A loaded model, or one rank's part of it: config then has that part's heads and gated width. On a CPU a row's
    logits and taps have the same bits in any batch, order, chunking and pages."""

    def __init__(self, config: ModelConfig, weights: TargetWeights, settings: TargetSettings) -> None:
        self.config = config
        self.device = settings.device
        self.group = settings.group
        self.native: NativeLibrary | None = None
        """The C layers' library where they run this model: others may run their matrices on it too."""
        self.weights = settings.weight_format
        self.cache_dtype = settings.cache_dtype
        self.kv_dtype = torch.int8 if settings.int8_kv else settings.cache_dtype
        self._parts = weights
        self._linear_path = settings.linear_path
        self._attentions: dict[int, PagedAttention] = {}
        self._rotary = RotaryTable(config.rope, config.head_dim, self.device)

    @property
    def kernels(self) -> str:
        """One word for ``kernel_path``."""
        return "torch"

    @property
    def kernel_path(self) -> str:
        """What runs where, for the ready line: linear kernels and attention with the row counts found safe."""
        attention = [f"attention over pages of {size}: {one.describe()}" for size, one in self._attentions.items()]
        return "; ".join([f"{self.device.type} {self._linear_path}", *attention])

    def kv_bytes_per_page(self, page_size: int) -> int:
        config = self.config
        return KVCache.bytes_per_page(config.num_layers, page_size, config.num_kv_heads, config.head_dim, self.kv_dtype)

    @property
    def copies_bytes(self) -> int:
        """Bytes of the matrices' copies for prompts."""
        return 0

    def allocate_cache(self, num_pages: int, page_size: int) -> KVCache:
        """Zeroed pages for every layer; page_size a multiple of 16."""
        self.attention(page_size)
        config = self.config
        return KVCache(
            config.num_layers,
            num_pages,
            page_size,
            config.num_kv_heads,
            config.head_dim,
            dtype=self.kv_dtype,
            device=self.device,
        )

    def attention(self, page_size: int) -> PagedAttention:
        """Attention over pages of this size; tried on the host the first time."""
        if page_size not in self._attentions:
            config = self.config
            shape = AttentionShape(config.num_heads, config.num_kv_heads, config.head_dim, page_size)
            self._attentions[page_size] = PagedAttention(tried(shape) if self.device.type == "cpu" else shape)
        return self._attentions[page_size]

    def embed(self, token_ids: Tensor) -> Tensor:
        """token_ids [N] int64 -> [N, hidden] float32."""
        assert self._parts.embedding is not None
        return self._parts.embedding.index_select(0, token_ids).float()

    def lm_head(self, hidden: Tensor) -> Tensor:
        """hidden [N, hidden] float32, already normed -> logits [N, vocab] float32."""
        return self.group.columns(self._parts.head(hidden))

    def greedy(self, hidden: Tensor) -> Tensor:
        """hidden [R, hidden], already normed -> each row's best token [R] int64; ties go to the lowest id."""
        return self.best_of(self._parts.head(hidden))

    def best_of(self, logits: Tensor) -> Tensor:
        """This rank's logits [R, outputs] -> each row's best token among all ranks' [R] int64."""
        ids = logits.argmax(-1)
        if self.group.size == 1:
            return ids
        return self.group.best(ids, logits.gather(1, ids[:, None])[:, 0], logits.shape[1])[0]

    @torch.inference_mode()
    def forward(self, batch: FlatBatch, cache: KVCache, taps: Sequence[int] = ()) -> ForwardOutput:
        """Runs the rows, stores their K/V, returns the logits of batch.logit_rows.

        taps: 0-based decoder layers whose output (the residual stream after the block, before any norm) is wanted for
        every row, concatenated in the order given.
        """
        config, parts = self.config, self._parts
        self._rotary.reserve(max(map(len, batch.page_tables)) * cache.page_size)
        attention = self.attention(cache.page_size)
        plan = attention.plan(batch)
        turn = self._rotary.rows(batch.positions)
        kept: dict[int, Tensor] = {}
        x = self.embed(batch.token_ids)
        for index, layer in enumerate(parts.layers):
            x = x + self.group.sum(self._attend(layer, x, cache.layers[index], attention, plan, turn))
            gated = silu_mul(layer.gate_up(rms_norm(x, layer.mlp_norm, config.rms_norm_eps)))
            x = x + self.group.sum(layer.down(gated))
            if index in taps:
                kept[index] = x
        hidden = rms_norm(x.index_select(0, batch.logit_rows), parts.final_norm, config.rms_norm_eps)
        return ForwardOutput(self.lm_head(hidden), torch.cat([kept[i] for i in taps], 1) if taps else None)

    def _attend(
        self,
        layer: DecoderLayer,
        x: Tensor,
        cache: Tensor,
        attention: PagedAttention,
        plan: AttentionPlan,
        turn: Tensor,
    ) -> Tensor:
        config = self.config
        width = config.num_heads * config.head_dim
        turned = config.num_heads + config.num_kv_heads
        qkv = layer.qkv(rms_norm(x, layer.input_norm, config.rms_norm_eps))
        heads = torch.unflatten(qkv, 1, (turned + config.num_kv_heads, config.head_dim))
        if layer.qk_norm is not None:
            heads[:, :turned] = rms_norm(heads[:, :turned], None, config.rms_norm_eps) * layer.qk_norm
        rotate_(heads[:, :turned], turn)
        write_kv(cache, plan.kv_rows, qkv[:, width:], begun=plan.begun)
        return layer.output(attention(qkv[:, :width], cache, plan))
