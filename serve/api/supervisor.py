"""Starts the engine again after it has failed: so many times in ten minutes, with growing pauses.

It knows when, not what: the engine client starts processes, and whoever gave ``on_ready`` opens the server again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from serve.api.engine_client import EngineClient
from serve.api.generation import EngineError

log = logging.getLogger(__name__)

WINDOW_SECONDS = 600.0
FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 30.0


def pause_before(recent: int) -> float:
    """Seconds to wait before a start when there were ``recent`` others in the window."""
    return min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** min(recent, 16))


async def supervise(engine: EngineClient, limit: int, on_ready: Callable[[dict[str, Any]], None]) -> None:
    """Until cancelled or drained: at most ``limit`` starts in any ``WINDOW_SECONDS``; one too many waits its turn."""
    starts: deque[float] = deque()
    while True:
        await engine.failed.wait()
        now = time.monotonic()
        while starts and now - starts[0] > WINDOW_SECONDS:
            starts.popleft()
        pause = pause_before(len(starts))
        if len(starts) >= limit:
            pause = WINDOW_SECONDS - (now - starts[0])
            log.error("the engine failed %d times in %.0f s: it is left alone for %.0f s", limit, WINDOW_SECONDS, pause)
        await asyncio.sleep(pause)
        if engine.draining:
            return
        starts.append(time.monotonic())
        log.warning("the engine is started again (%d in the last %.0f s)", len(starts), WINDOW_SECONDS)
        try:
            on_ready(await engine.start())
        except EngineError as error:
            log.error("the engine did not start again: %s", error)
            engine.failed.set()
        else:
            log.warning("the engine is ready again")
