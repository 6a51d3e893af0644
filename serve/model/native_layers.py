"""The target's forward in C: float32 residual, same weights and same answer as the eager TargetModel, whose forward is
this one's specification.

Serves models whose every matrix is a grouped integer product on a CPU; its constructor says why not otherwise. Knows
no files and no scheduling.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from serve.kernels.kv_cache import KVCache
from serve.kernels.native.build import NativeUnavailable
from serve.kernels.native.ops import NativeLibrary
from serve.model.batch import FlatBatch
from serve.model.config import ModelConfig
from serve.model.native_stack import NativeStack, StackSizes, grouped
from serve.model.target import ForwardOutput, TargetModel, TargetSettings, TargetWeights


class NativeTargetModel(TargetModel):
    """A loaded model on the C layers. A row's logits and taps have the same bits in any batch, order, chunking and
    pages."""

    def __init__(
        self,
        config: ModelConfig,
        weights: TargetWeights,
        library: NativeLibrary,
        settings: TargetSettings,
    ) -> None:
        """Raises NativeUnavailable for a model that the C layers do not serve."""
        super().__init__(config, weights, settings)
        if self.device.type != "cpu" or self.cache_dtype != torch.float32:
            raise NativeUnavailable(f"the C layers keep float32 K/V on a CPU, not {self.cache_dtype} on {self.device}")
        self.native = library
        self._stack = NativeStack(
            StackSizes(
                config.hidden_size,
                config.intermediate_size,
                config.num_heads,
                config.num_kv_heads,
                config.head_dim,
                config.rms_norm_eps,
            ),
            weights.layers,
            self._rotary,
            library,
        )
        self.head = grouped(weights.head)

    @property
    def kernels(self) -> str:
        """One word for ``kernel_path``."""
        return "native"

    @property
    def kernel_path(self) -> str:
        """What runs where, for the ready line."""
        return f"cpu {self._linear_path}; layers in C ({self._stack.native.compiler})"

    def allocate_cache(self, num_pages: int, page_size: int) -> KVCache:
        """As TargetModel.allocate_cache; nothing is tried, since the C attention has no row floor."""
        config = self.config
        return KVCache(config.num_layers, num_pages, page_size, config.num_kv_heads, config.head_dim)

    @torch.inference_mode()
    def forward(self, batch: FlatBatch, cache: KVCache, taps: Sequence[int] = ()) -> ForwardOutput:
        """As TargetModel.forward."""
        x = self.embed(batch.token_ids)
        kept = self._stack.forward(x, batch, cache, taps)
        logits = self._stack.product(x.index_select(0, batch.logit_rows), self._parts.final_norm, self.head)
        return ForwardOutput(logits, torch.cat(kept, 1) if taps else None)
