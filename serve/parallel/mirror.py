"""What rank 0 tells the others before each piece of work on the device: the same piece, as numbers.

``Mirror`` says nothing: it is that of a rank which is alone. This file knows no sockets and no processes.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from serve.model.batch import FlatBatch


class Mirror:
    """Each method is entered around the work it names."""

    def forward(self, batch: FlatBatch, observed: bool) -> AbstractContextManager[None]:
        """A pass of the target; observed: the drafter reads its taps."""
        return nullcontext()

    def propose(self, batch: FlatBatch) -> AbstractContextManager[None]:
        """A pass of the drafter over blocks."""
        return nullcontext()

    def draft(self, count: int, packed: Tensor, tables: Tensor | None) -> AbstractContextManager[None]:
        """The draft graph of ``count`` sequences; packed [any] int32, tables [any, pages] int32 where they are new."""
        return nullcontext()

    def verify(
        self, rows: int, used: int, settled: bool, packed: Tensor, tables: Tensor | None
    ) -> AbstractContextManager[None]:
        """The verify graph of ``rows`` rows; see StepGraphs.play_verify."""
        return nullcontext()

    def logits(self, count: int) -> AbstractContextManager[None]:
        """Logits of the first ``count`` rows of the latest verify graph."""
        return nullcontext()

    def flush(self) -> AbstractContextManager[None]:
        """The drafter reads the rows that wait for it."""
        return nullcontext()

    @property
    def alone(self) -> bool:
        return True

    def explain(self, error: Exception) -> str:
        """Why work failed: ``error`` itself, or what lies behind it."""
        return f"{type(error).__name__}: {error}"


NO_MIRROR = Mirror()
