"""The first tokens of prompts, chosen on the device: the best token behind each prompt of a prefill pass is left there
for the next launch to go on from, and comes to the host behind the pass.

So the host need not have read a prefill pass to launch the next step. This file knows rows of logits and the state
between two launches; no requests and no pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from serve.kernels.triton.step import StepState
from serve.model.batch import FlatBatch

RING = 3
"""Host buffers in turn: one pass is on its way while another one is read."""


@dataclass(frozen=True)
class FirstTokensLaunch:
    """A prefill pass on its way. result [2, R] int32: the tokens of the R prompts that end in it, and whether their
    logits are finite; event: when both are there, None off CUDA."""

    result: Tensor
    event: Any


class FirstTokens:
    """For up to ``most`` prompts of a pass. state: what launches leave for the next one, by place."""

    def __init__(self, state: StepState, most: int) -> None:
        self.most = most
        self._state = state
        self._cuda = state.anchor.is_cuda
        self._ring = [torch.zeros(2 * most, dtype=torch.int32, pin_memory=self._cuda) for _ in range(RING)]
        self._turn = 0

    @torch.inference_mode()
    def launch(self, batch: FlatBatch, logits: Tensor) -> FirstTokensLaunch:
        """Behind the pass of ``batch`` with its logits [R, vocab] float32, R <= most: row i's best token (the lowest id
        among equals) and the position behind the row become the state at place i. Launches only."""
        count = logits.shape[0]
        # In one piece: a copy into parts of a buffer waits for the device.
        result = self._ring[self._turn][: 2 * count].view(2, count)
        self._turn = (self._turn + 1) % RING
        if count:
            best = logits.argmax(dim=-1)
            finite = logits.gather(1, best[:, None])[:, 0].abs() < torch.inf
            self._state.anchor[:count].copy_(best)
            self._state.start[:count].copy_(batch.positions.index_select(0, batch.logit_rows) + 1)
            result.copy_(torch.stack([best, finite]).int(), non_blocking=True)
        event = None
        if self._cuda:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        return FirstTokensLaunch(result, event)

    def read(self, launch: FirstTokensLaunch) -> list[list[int]]:
        """Wait for a pass: each prompt's token, none where its logits are not finite. Each launch once, in order."""
        if launch.event is not None:
            launch.event.synchronize()
        tokens, finite = launch.result.tolist()
        return [[token] if good else [] for token, good in zip(tokens, finite, strict=True)]
