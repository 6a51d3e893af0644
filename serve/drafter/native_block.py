"""The block drafter in C: the same layers and answers as BlockDrafter, whose arithmetic in torch is this one's
specification.

A drafter whose sizes the C layers do not serve stays in torch. Knows kernels and the order of operations; no scheduling
and no requests.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from serve.drafter.block import BlockDrafter
from serve.drafter.dflash import DFlashConfig
from serve.kernels.elementwise import rms_norm
from serve.kernels.native.build import NativeUnavailable
from serve.model.batch import FlatBatch
from serve.model.native_layers import NativeTargetModel
from serve.model.native_stack import NativeContext, NativeStack, StackSizes, grouped
from serve.model.target import TargetModel

log = logging.getLogger(__name__)

_HALVES = 1  # activations of 8 bits: half the work, and a guess needs less precision than the text


class NativeBlockDrafter(BlockDrafter):
    """A block drafter of a target that runs in C."""

    def __init__(self, config: DFlashConfig, weights: dict[str, Tensor], target: TargetModel, source: str) -> None:
        super().__init__(config, weights, target, source)
        self._stack: NativeStack | None = None
        assert isinstance(target, NativeTargetModel)
        assert target.native is not None
        self._head = target.head
        sizes = StackSizes(
            config.hidden_size,
            config.intermediate_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            config.rms_norm_eps,
        )
        try:
            k_norms = tuple(layer.k_norm for layer in self._layers)
            self._context = NativeContext(grouped(self._fc), self._hidden_norm, grouped(self._context_kv), k_norms)
            self._stack = NativeStack(sizes, self._layers, self._rotary, target.native, _HALVES)
        except NativeUnavailable as reason:
            log.info("torch runs the drafter, not native code: %s", reason)

    def best(self, hidden: Tensor) -> Tensor:
        """As BlockDrafter.best."""
        return self._head.product(hidden, _HALVES).argmax(-1)

    @torch.inference_mode()
    def observe(self, batch: FlatBatch, taps: Tensor) -> None:
        """As BlockDrafter.observe."""
        if self._stack is None:
            return super().observe(batch, taps)
        return self._stack.write_context(taps, batch, self._pages(), self._context)

    @torch.inference_mode()
    def forward(self, batch: FlatBatch) -> Tensor:
        """As BlockDrafter.forward."""
        if self._stack is None:
            return super().forward(batch)
        x = self._target.embed(batch.token_ids)
        self._stack.forward(x, batch, self._pages())
        return rms_norm(x, self._norm, self.config.rms_norm_eps)
