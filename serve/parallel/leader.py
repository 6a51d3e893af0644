"""Rank 0's side: every piece of work is sent to the other ranks before it is begun here.

What fails half-way on this rank leaves the others in the middle of a collective that nobody joins; after that no work
is shared any more, and the engine has to end. This file knows sockets; no models.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from torch import Tensor

from serve.model.batch import FlatBatch
from serve.parallel.batches import batch_arrays
from serve.parallel.mirror import Mirror
from serve.parallel.wire import Kind, encode


class RanksError(RuntimeError):
    """A rank is lost or the ranks are out of step."""


class Leader(Mirror):
    """Tells the ranks behind ``sockets``. lost: why one of them is gone, if one is; it may wait a little for that."""

    def __init__(self, sockets: Sequence[socket.socket], lost: Callable[[], str | None]) -> None:
        self._sockets = tuple(sockets)
        self._lost = lost
        self._broken: str | None = None

    @property
    def alone(self) -> bool:
        return False

    def explain(self, error: Exception) -> str:
        return self._lost() or super().explain(error)

    def forward(self, batch: FlatBatch, observed: bool) -> AbstractContextManager[None]:
        return self._told(Kind.FORWARD, (int(observed),), batch_arrays(batch))

    def propose(self, batch: FlatBatch) -> AbstractContextManager[None]:
        return self._told(Kind.PROPOSE, (), batch_arrays(batch))

    def draft(self, count: int, packed: Tensor, tables: Tensor | None) -> AbstractContextManager[None]:
        return self._told(Kind.DRAFT, (count, *_width(tables)), _present(packed, tables))

    def verify(
        self, rows: int, used: int, settled: bool, packed: Tensor, tables: Tensor | None
    ) -> AbstractContextManager[None]:
        return self._told(Kind.VERIFY, (rows, used, int(settled), *_width(tables)), _present(packed, tables))

    def logits(self, count: int) -> AbstractContextManager[None]:
        return self._told(Kind.LOGITS, (count,))

    def flush(self) -> AbstractContextManager[None]:
        return self._told(Kind.FLUSH)

    @contextmanager
    def _told(self, kind: Kind, numbers: Sequence[int] = (), arrays: Sequence[Tensor] = ()) -> Iterator[None]:
        if self._broken is not None:
            raise RanksError(self._broken)
        try:
            message = encode(kind, numbers, arrays)
            for sock in self._sockets:
                sock.sendall(message)
            yield
        except BaseException as error:
            self._broken = f"the ranks are out of step since {type(error).__name__}: {str(error)[:200]}"
            raise


def _width(tables: Tensor | None) -> tuple[int, ...]:
    return () if tables is None else (tables.shape[1],)


def _present(packed: Tensor, tables: Tensor | None) -> tuple[Tensor, ...]:
    return (packed,) if tables is None else (packed, tables)
