"""The loop of every rank but the first: runs each piece of work that rank 0 announces, on its part of the model.

It decides nothing. What it computes leaves it through the collectives inside the work alone. This file knows no
scheduling, no acceptance and no sampling.
"""

from __future__ import annotations

import logging
import socket
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from serve.drafter.block import BlockDrafter
from serve.engine.runner import ModelRunner
from serve.parallel.batches import batch_from
from serve.parallel.wire import Kind, Message, receive

if TYPE_CHECKING:  # graphs need Triton, which a CPU may not have
    from serve.engine.graphs import StepGraphs

log = logging.getLogger(__name__)


class Follower:
    """Work in, nothing out. drafter and graphs: where rank 0 has them."""

    def __init__(self, runner: ModelRunner, drafter: BlockDrafter | None, graphs: StepGraphs | None) -> None:
        self._runner = runner
        self._drafter = drafter
        self._graphs = graphs
        self._hidden: Tensor | None = None

    def run(self, sock: socket.socket) -> None:
        """Until rank 0 closes. What goes wrong in the work is raised: the ranks are out of step then."""
        while (message := receive(sock)) is not None:
            self.do(message)

    @torch.inference_mode()
    def do(self, message: Message) -> None:
        """One piece of work."""
        numbers, arrays = message.numbers, message.arrays
        if message.kind in (Kind.DRAFT, Kind.VERIFY, Kind.LOGITS, Kind.FLUSH):
            assert self._graphs is not None
            self._play(self._graphs, message)
        elif message.kind is Kind.PROPOSE:
            assert self._drafter is not None
            self._drafter.draft(batch_from(arrays, self._runner.model.device))
        else:
            self._runner.observer = self._drafter if numbers[0] else None
            self._runner.forward_batch(batch_from(arrays, self._runner.model.device))

    def _play(self, graphs: StepGraphs, message: Message) -> None:
        numbers = message.numbers
        packed, tables = None, None
        if message.arrays:
            packed = message.arrays[0]
            tables = message.arrays[1].view(-1, numbers[-1]) if len(message.arrays) > 1 else None
        if message.kind is Kind.FLUSH:
            graphs.observe_waiting()
        elif message.kind is Kind.LOGITS:
            assert self._hidden is not None
            graphs.model.logits(self._hidden[: numbers[0]])
        elif message.kind is Kind.DRAFT:
            assert packed is not None
            graphs.play_draft(numbers[0], packed, tables)
        else:
            assert packed is not None
            self._hidden = graphs.play_verify(numbers[0], numbers[1], bool(numbers[2]), packed, tables)


def follower_of(runner: ModelRunner) -> Follower:
    """The follower that runs work with what was prepared on this rank."""
    drafter = runner.observer
    assert drafter is None or isinstance(drafter, BlockDrafter)
    runner.on_observer_fault = _observe_fault
    return Follower(runner, drafter, runner.ahead.graphs if runner.ahead is not None else None)


def _observe_fault(error: Exception) -> None:
    """A drafter that could not read a pass costs speed, here as on rank 0, which counts."""
    log.warning("drafter failed on this rank: %s: %s", type(error).__name__, str(error)[:200])
