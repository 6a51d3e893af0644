"""The choices of one client request on their way through the engine, and the places they hold in its queue.

It knows outputs and how they end; the pipe, the process and their failures are the engine client's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from serve.protocol import Output, SamplingParams

if TYPE_CHECKING:
    from serve.api.engine_client import EngineClient

Observer = Callable[[int, Output], None]


class EngineError(Exception):
    """The engine cannot serve; the message says why."""


class EngineFailed(EngineError):
    """A running request ended because of the engine, not because of itself."""


class QueueFull(EngineError):
    """As many requests as allowed are running or waiting."""


class Generation:
    """The choices of one client request: their outputs, merged in the order in which they came.

    It holds ``count`` places of the queue from the start; each is given back when its choice ends. ``close`` gives the
    rest back and cancels what still runs; it may be called at any time and more than once.
    """

    def __init__(self, client: EngineClient, count: int) -> None:
        self._client = client
        self._events: asyncio.Queue[tuple[int, Output] | EngineError] = asyncio.Queue()
        self._observer: Observer | None = None
        self._ids: dict[str, int] = {}
        self._places = count
        self.closed = False

    def start(
        self,
        request_id: str,
        jobs: Sequence[tuple[list[int], SamplingParams]],
        cache_salt: str = "",
        observer: Observer | None = None,
    ) -> None:
        """Send one engine request for each (prompt ids, params), ``count`` at most; outputs carry the job's index."""
        if len(jobs) > self._places:
            raise ValueError(f"{len(jobs)} jobs for {self._places} places")
        self._client.check_available()
        self._observer = observer
        for index, (prompt_ids, params) in enumerate(jobs):
            engine_id = f"{request_id}-{index}"
            self._ids[engine_id] = index
            self._client.submit(self, engine_id, prompt_ids, params, cache_salt)

    async def next(self) -> tuple[int, Output] | None:
        """The next output and its choice; None after the last. Raises EngineError when the generation failed."""
        if self._events.empty() and not self._ids:
            return None
        event = await self._events.get()
        if isinstance(event, EngineError):
            raise event
        return event

    def deliver(self, engine_id: str, output: Output) -> None:
        """Called by the client for every output of one of this generation's ids."""
        index = self._ids[engine_id]
        if output.finish_reason is not None:
            self._end(engine_id)
        if self._observer is not None:
            self._observer(index, output)
        if output.finish_reason in ("error", "cancelled"):
            self._events.put_nowait(EngineFailed(output.error or f"the request was {output.finish_reason}"))
        else:
            self._events.put_nowait((index, output))

    def fail(self, error: EngineError) -> None:
        """End everything that still runs with ``error``."""
        self._cancel_all("error")
        self._events.put_nowait(error)

    def close(self) -> None:
        """Give back every place and cancel what still runs."""
        self.closed = True
        self._cancel_all("cancelled")
        self._client.release(self, self._places)
        self._places = 0

    def _cancel_all(self, finish_reason: str) -> None:
        for engine_id, index in list(self._ids.items()):
            self._client.cancel(engine_id)
            self._end(engine_id)
            if self._observer is not None:
                self._observer(index, Output(engine_id, finish_reason=finish_reason))

    def _end(self, engine_id: str) -> None:
        del self._ids[engine_id]
        self._client.forget(engine_id)
        self._places -= 1
        self._client.release(self, 1)
