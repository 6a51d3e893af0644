"""The block drafter on the Triton kernels: the same layers and answers as BlockDrafter, whose arithmetic in torch is
this one's specification, as launches that a CUDA graph can capture.

Knows kernels and the order of operations; no scheduling and no requests.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from serve.drafter.block import DRAFTER_FORMATS, BlockDrafter
from serve.drafter.dflash import DFlashConfig
from serve.kernels.linear import LinearBuilder
from serve.kernels.triton.attention import TritonPlan, build_plan
from serve.kernels.triton.linear import TritonLinearBuilder
from serve.kernels.triton.rows import ContextWriter, add_rms_norm
from serve.kernels.triton.tiles import ROW_TILES
from serve.model.batch import FlatBatch
from serve.model.target import TargetModel
from serve.model.triton_layers import TritonStack, TritonTargetModel, TurnTable, chunk_product, skinny

TAP_SHIFT = 4


class TritonBlockDrafter(BlockDrafter):
    """A block drafter of a TritonTargetModel. Activations and K/V are in the target's 16-bit dtype."""

    def __init__(
        self,
        config: DFlashConfig,
        weights: dict[str, Tensor],
        target: TritonTargetModel,
        source: str,
        head_tokens: Tensor | None = None,
    ) -> None:
        super().__init__(config, weights, target, source, head_tokens)
        self._triton_target = target
        self._dtype = target.cache_dtype
        self.stack = TritonStack.make(
            self._layers, self._norm, config.num_attention_heads, config.rms_norm_eps, self._dtype
        )
        # In float16 the taps, a residual stream, are scaled into range by a power of two, and the product made whole.
        self._tap_scale = 2.0**-TAP_SHIFT if self._dtype == torch.float16 else 1.0
        self._fuse = replace(skinny(self._fc), out_scale=1 / self._tap_scale)
        self._keys_values = skinny(self._context_kv)
        self._turns = TurnTable(self._rotary, config.head_dim, target.device)
        self._writer: ContextWriter | None = None

    def _builder(self, target: TargetModel) -> LinearBuilder:
        return TritonLinearBuilder(DRAFTER_FORMATS.get(target.weights, target.weights), target.device)

    def allocate_cache(self, num_pages: int, page_size: int) -> None:
        """As BlockDrafter's."""
        super().allocate_cache(num_pages, page_size)
        k_norm = torch.stack([layer.k_norm[0] for layer in self._layers]).contiguous()
        self._writer = ContextWriter(self._pages().layers, k_norm, self.config.rms_norm_eps)

    def reserve(self, length: int) -> None:
        """Makes the rotary turns of positions below ``length`` available."""
        self._turns.reserve(length)

    @torch.inference_mode()
    def observe(self, batch: FlatBatch, taps: Tensor) -> None:
        """As BlockDrafter's."""
        self.reserve(max(map(len, batch.page_tables)) * self._pages().page_size)
        self.observe_rows(taps, batch.positions, batch.slots)

    def observe_rows(self, taps: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Context K/V of rows. taps [T, len(self.taps) * hidden] float32, positions and slots [T] int64. Launches only;
        ``reserve`` first."""
        config = self.config
        assert self._writer is not None
        rows = taps.shape[0]
        scaled = taps if self._tap_scale == 1 else taps * self._tap_scale
        many = rows > ROW_TILES[-1]
        if many:
            parts = chunk_product(self._fuse, scaled.to(self._dtype)).float()[None]
        else:
            parts = self._fuse.partial(scaled.to(self._dtype))
        others = parts[1:] if len(parts) > 1 else None
        fused = add_rms_norm(parts[0], others, self._hidden_norm, config.rms_norm_eps, self._dtype)
        kv = chunk_product(self._keys_values, fused) if many else self._keys_values.linear(fused)
        shape = (rows, len(self._layers), 2, config.num_key_value_heads, config.head_dim)
        self._writer(kv.view(shape), self._turns.turns, positions, slots)

    @torch.inference_mode()
    def forward(self, batch: FlatBatch) -> Tensor:
        """As BlockDrafter's, in 16 bits."""
        cache = self._pages()
        self.reserve(max(map(len, batch.page_tables)) * cache.page_size)
        return self.hidden(batch.token_ids, batch.positions, batch.slots, build_plan(batch, cache.page_size))

    def hidden(self, token_ids: Tensor, positions: Tensor, slots: Tensor, plan: TritonPlan) -> Tensor:
        """Hidden states [T, hidden] in 16 bits after the final norm. Launches only; ``reserve`` first."""
        residual = self._target.embed(token_ids)
        return self.stack.run(residual, positions, slots, self._turns.turns, plan, self._pages())[0]

    def best(self, hidden: Tensor) -> Tensor:
        """As BlockDrafter's; no logits are written."""
        if self._head is None:
            return self._triton_target.greedy(hidden)
        return self._token_ids(skinny(self._head).argmax(hidden)[0])
