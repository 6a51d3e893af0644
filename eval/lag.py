"""How late a client's own event loop runs: a client that is behind reads answers late and blames the server.

It measures the process it runs in and judges nothing.
"""

from __future__ import annotations

import asyncio
import time
from statistics import median

from eval.beside import Beside
from eval.stats import percentile

EVERY = 0.02


class LagMeter(Beside):
    """While its ``async with`` block runs, wakes up every 20 ms and notes how much later than that it was (seconds)."""

    def __init__(self) -> None:
        self.late: list[float] = []

    async def _run(self) -> None:
        while True:
            due = time.perf_counter() + EVERY
            await asyncio.sleep(EVERY)
            self.late.append(max(0.0, time.perf_counter() - due))

    def summary(self) -> dict[str, float] | None:
        """Median, p99 and maximum in seconds; None when the block was over before the first look."""
        if not self.late:
            return None
        return {"p50": median(self.late), "p99": percentile(self.late, 99), "max": max(self.late)}
