"""The block drafter in C: the same layers and answers as BlockDrafter, whose arithmetic in torch is this one's
specification.

Taps of a few rows wait and are read together, before the next draft at the latest: a plain step does not read the
drafter's matrices. Order is kept and of rows for one place the last counts, so what a draft sees is the same.

A drafter whose sizes the C layers do not serve stays in torch. Knows kernels and the order of operations; no scheduling
and no requests.
"""

from __future__ import annotations

import logging

import numpy as np
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
WAITING_ROWS = 64


class NativeBlockDrafter(BlockDrafter):
    """A block drafter of a target that runs in C."""

    def __init__(
        self,
        config: DFlashConfig,
        weights: dict[str, Tensor],
        target: TargetModel,
        source: str,
        head_tokens: Tensor | None = None,
    ) -> None:
        super().__init__(config, weights, target, source, head_tokens)
        self._stack: NativeStack | None = None
        self._waiting: list[tuple[FlatBatch, Tensor]] = []
        assert isinstance(target, NativeTargetModel)
        assert target.native is not None
        self._product = target.head if self._head is None else grouped(self._head)
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
        return self._token_ids(self._product.product(hidden, _HALVES).argmax(-1))

    @torch.inference_mode()
    def draft(self, batch: FlatBatch) -> tuple[Tensor, Tensor]:
        """As BlockDrafter.draft, but for the hidden states: as they leave the layers, of the wanted rows."""
        if self._stack is None:
            return super().draft(batch)
        hidden = self._residual(batch, self._stack).index_select(0, batch.logit_rows)
        return self._token_ids(self._stack.best(hidden, self._norm, self._product)), hidden

    @torch.inference_mode()
    def observe(self, batch: FlatBatch, taps: Tensor) -> None:
        """As BlockDrafter.observe."""
        if self._stack is None:
            super().observe(batch, taps)
            return
        self._waiting.append((batch, taps))
        if sum(waiting.num_rows for waiting, _ in self._waiting) >= WAITING_ROWS:
            self._read_waiting(self._stack)

    @torch.inference_mode()
    def forward(self, batch: FlatBatch) -> Tensor:
        """As BlockDrafter.forward."""
        if self._stack is None:
            return super().forward(batch)
        return rms_norm(self._residual(batch, self._stack), self._norm, self.config.rms_norm_eps)

    def _residual(self, batch: FlatBatch, stack: NativeStack) -> Tensor:
        """Hidden states [T, hidden] as they leave the layers."""
        self._read_waiting(stack)
        x = self._target.embed(batch.token_ids)
        stack.forward(x, batch, self._pages())
        return x

    def _read_waiting(self, stack: NativeStack) -> None:
        waiting, self._waiting = self._waiting, []
        if len(waiting) == 1:
            stack.write_context(waiting[0][1], waiting[0][0], self._pages(), self._context)
        elif waiting:
            stack.write_context(*_together(waiting), self._pages(), self._context)


def _together(waiting: list[tuple[FlatBatch, Tensor]]) -> tuple[Tensor, FlatBatch]:
    """Taps and rows of several batches as those of one sequence; of rows for the same slot the last."""
    slots = torch.cat([batch.slots for batch, _ in waiting])
    _, from_the_end = np.unique(slots.numpy()[::-1], return_index=True)
    last = torch.from_numpy(len(slots) - 1 - from_the_end)
    taps = torch.cat([taps for _, taps in waiting])[last]
    positions = torch.cat([batch.positions for batch, _ in waiting])[last]
    longest = max((table for batch, _ in waiting for table in batch.page_tables), key=len)
    rows = len(last)
    return taps, FlatBatch(positions, positions, slots[last], positions + 1, (0, rows), (longest,), positions[:0])
