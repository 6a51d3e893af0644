"""Work that goes on beside an ``async with`` block and ends with it. It knows an event loop and no work of its own."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import TypeVar

T = TypeVar("T", bound="Beside")


class Beside(ABC):
    """``async with`` starts ``_run`` in the loop, and stops it at the end of the block."""

    _task: asyncio.Task[None] | None = None

    async def __aenter__(self: T) -> T:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._task is not None:
            self._task.cancel()
            # Waiting for the task itself could not tell its cancellation from one of the block's, which is Ctrl-C.
            await asyncio.wait([self._task])
            if not self._task.cancelled():
                self._task.result()

    @abstractmethod
    async def _run(self) -> None:
        """The work, until it is cancelled."""
