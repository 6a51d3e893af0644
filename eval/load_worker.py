"""One of several client processes of a closed loop, and the parent that runs them: one Python process reads some ten
thousand events a second, and beyond that it measures itself.

A worker makes its prompts, says ``ready``, waits for the common start, keeps its share of the streams busy, and writes
its measurements as one JSON line. All clocks are the machine's monotonic one. It knows no server and no judgement.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from eval.client import Measurement, TokenizerCounter, measure, open_client, served_model
from eval.lag import LagMeter
from eval.load import run_closed
from eval.prompts import sweep_requests
from eval.servers import ROOT

STREAMS_EACH = 16
_LISTS = ("icl", "itl_amortised", "token_times")


def processes_for(streams: int, wanted: int = 0) -> int:
    """How many client processes: as wanted, or one for every 16 streams and at most a quarter of the cores."""
    most = wanted or max(1, (os.cpu_count() or 1) // 4)
    return max(1, min(most, streams if wanted else -(-streams // STREAMS_EACH)))


def shares(streams: int, processes: int) -> list[int]:
    """The streams of each process: as equal as whole numbers can be."""
    return [streams // processes + (index < streams % processes) for index in range(processes)]


async def run_shared(
    url: str, model_dir: str, label: dict[str, Any], seconds: float, processes: int
) -> tuple[list[Measurement], float, dict[str, float] | None]:
    """A closed loop over several processes: the measurements, the common start on ``time.perf_counter``, and the worst
    process's lag. RuntimeError with what a worker said when one fails; all of them end with this call."""
    jobs = [
        {"url": url, "model_dir": model_dir, "label": label, "seconds": seconds, "streams": share,
         "seed": label["seed"] * 100 + index}
        for index, share in enumerate(shares(int(label["load"]), processes))
    ]  # fmt: skip
    workers = [await _start(job) for job in jobs]
    try:
        for worker in workers:
            await _line(worker, "ready")
        start = time.perf_counter() + 0.1
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write(f"{start}\n".encode())
            await worker.stdin.drain()
        told = await asyncio.gather(*(_line(worker, "{") for worker in workers))
    finally:
        for worker in workers:
            if worker.returncode is None:
                worker.kill()
            await worker.wait()
    replies = [json.loads(line) for line in told]
    items = [Measurement(**{**row, **{name: tuple(row[name]) for name in _LISTS}}) for reply in replies
             for row in reply["items"]]  # fmt: skip
    lags = [reply["lag"] for reply in replies if reply["lag"]]
    return items, start, max(lags, key=lambda lag: float(lag["p99"]), default=None)


async def _start(job: dict[str, Any]) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    # In a session of its own: Ctrl-C is the parent's, which then ends the workers.
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "eval.load_worker",
        json.dumps(job),
        stdin=pipe,
        stdout=pipe,
        cwd=ROOT,
        limit=1 << 30,
        start_new_session=True,
    )


async def _line(worker: asyncio.subprocess.Process, begins: str) -> str:
    assert worker.stdout is not None
    text = (await worker.stdout.readline()).decode()
    if not text.startswith(begins):
        raise RuntimeError(f"a client process ended early: {text.strip() or 'it said nothing'}")
    return text


async def work(job: dict[str, Any]) -> dict[str, Any]:
    """This process's share; the start comes on stdin once it has said that it is ready."""
    label, counter = job["label"], TokenizerCounter(job["model_dir"])
    requests = sweep_requests(job["seed"], counter, label["prompt"], label["output"], label["options"])
    async with open_client(job["url"], connections=1024) as client:
        model = await served_model(client)
        print("ready", flush=True)
        start = float(await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline))
        await asyncio.sleep(max(0.0, start - time.perf_counter()))
        left = start + job["seconds"] - time.perf_counter()
        async with LagMeter() as lag:
            records = await run_closed(client, model, requests, job["streams"], left)
    # The text is counted already, and would only make the pipe longer.
    rows = [{**asdict(measure(record, counter)), "text": ""} for record in records]
    return {"items": rows, "lag": lag.summary()}


def main(argv: Sequence[str] | None = None) -> int:
    (text,) = sys.argv[1:] if argv is None else argv
    try:
        reply = asyncio.run(work(json.loads(text)))
    except (OSError, ValueError) as fault:
        print(f"failed: {fault}", flush=True)
        return 1
    print(json.dumps(reply), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
