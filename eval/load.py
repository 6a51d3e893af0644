"""Load patterns: a burst, a closed loop (fixed concurrency) and an open loop (Poisson arrivals at a rate).

Closed and open loops are different queueing systems: a closed loop slows down with the server, an open loop does not.
Needs httpx only. It knows nothing of what the requests mean or of how the numbers are judged.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import httpx

from eval.client import ChatRequest, Record, send

OnRecord = Callable[[Record], None]


async def run_burst(client: httpx.AsyncClient, model: str, requests: Sequence[ChatRequest]) -> list[Record]:
    """Sends all requests at once; records in request order."""
    planned = time.perf_counter()
    return list(await asyncio.gather(*(send(client, model, request, planned) for request in requests)))


async def run_sequential(client: httpx.AsyncClient, model: str, requests: Sequence[ChatRequest]) -> list[Record]:
    """Sends one request after the other."""
    return [await send(client, model, request) for request in requests]


async def run_closed(
    client: httpx.AsyncClient,
    model: str,
    requests: Iterator[ChatRequest],
    concurrency: int,
    seconds: float,
    on_record: OnRecord | None = None,
) -> list[Record]:
    """Keeps ``concurrency`` requests in flight for ``seconds``, then lets those in flight finish."""
    records: list[Record] = []
    stop_at = time.perf_counter() + seconds

    async def worker() -> None:
        while time.perf_counter() < stop_at:
            request = next(requests, None)
            if request is None:
                return
            record = await send(client, model, request)
            records.append(record)
            if on_record:
                on_record(record)
            if record.error:
                # A server that refuses at once must not be hammered in a tight loop.
                await asyncio.sleep(0.05)

    await _all([asyncio.create_task(worker()) for _ in range(concurrency)])
    return records


async def run_open(
    client: httpx.AsyncClient,
    model: str,
    requests: Iterator[ChatRequest],
    rate: float,
    seconds: float,
    seed: int,
    max_in_flight: int | None = None,
    on_record: OnRecord | None = None,
    max_requests: int | None = None,
    spacing: str = "poisson",
) -> list[Record]:
    """Starts requests at planned times (Poisson by default, or "constant") at ``rate`` a second for ``seconds``.

    With ``max_in_flight`` a request whose time has come may wait in the client; that wait is in the record
    (``sent_at - planned_at``) and belongs to the latency a user sees.
    """
    if spacing not in ("poisson", "constant"):
        raise ValueError(f"spacing must be poisson or constant, got {spacing!r}")
    rng = random.Random(seed)
    gate = asyncio.Semaphore(max_in_flight) if max_in_flight else None
    records: list[Record] = []
    tasks: list[asyncio.Task[None]] = []
    start = time.perf_counter()
    planned = start

    async def one(request: ChatRequest, planned_at: float) -> None:
        if gate is None:
            record = await send(client, model, request, planned_at)
        else:
            async with gate:
                record = await send(client, model, request, planned_at)
        records.append(record)
        if on_record:
            on_record(record)

    while max_requests is None or len(tasks) < max_requests:
        planned += rng.expovariate(rate) if spacing == "poisson" else 1 / rate
        request = next(requests, None)
        if planned - start > seconds or request is None:
            break
        await asyncio.sleep(max(0.0, planned - time.perf_counter()))
        tasks.append(asyncio.create_task(one(request, planned)))
    await _all(tasks)
    return records


async def _all(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Waits for every task; when this is cancelled (Ctrl-C) the tasks are cancelled too, so nothing keeps sending."""
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task
