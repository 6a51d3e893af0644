"""``python -m eval.batching_sim``: why batches are formed per step, as a simulation one can read.

The same requests through static batching (admitted and released together, padded to the longest), through
iteration-level batching, and through iteration-level batching that stops to prefill (instead of chunking). Time is
counted in decode steps; a step costs the same at any batch size, as on a memory-bound card. It knows no real server.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from eval.json_report import write_report
from eval.options import new_file


@dataclass(frozen=True)
class Job:
    """A request: arrival in steps, prompt and answer in tokens."""

    arrival: float
    prompt: int
    output: int


@dataclass(frozen=True)
class Outcome:
    """What a policy made of the jobs. ``waste`` is the share of slot-steps that made no token of anybody;
    ``stall`` the share of steps in which running answers stood still for somebody's prefill."""

    policy: str
    steps: float
    tokens_per_step: float
    waste: float
    stall: float
    mean_latency: float
    p99_latency: float


def make_jobs(count: int, rate: float, seed: int, mean_output: int = 100, prompt: int = 200) -> list[Job]:
    """Poisson arrivals at ``rate`` jobs a step, answers of exponential length."""
    rng = random.Random(seed)
    now, jobs = 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate)
        jobs.append(Job(now, prompt, max(1, round(rng.expovariate(1 / mean_output)))))
    return jobs


def static_batching(jobs: Sequence[Job], slots: int, prefill_rate: float) -> Outcome:
    """Takes up to ``slots`` waiting jobs, runs them until the longest is finished, then takes the next."""
    waiting = deque(sorted(jobs, key=lambda job: job.arrival))
    now, used, held, stalled = 0.0, 0, 0.0, 0.0
    latencies: list[float] = []
    while waiting:
        now = max(now, waiting[0].arrival)
        batch: list[Job] = []
        while waiting and len(batch) < slots and waiting[0].arrival <= now:
            batch.append(waiting.popleft())
        prefill = sum(job.prompt for job in batch) / prefill_rate
        length = max(job.output for job in batch)
        stalled += prefill
        # Released together: a short answer is handed out with the longest of its batch.
        now += prefill + length
        held += slots * length
        used += sum(job.output for job in batch)
        latencies += [now - job.arrival for job in batch]
    return _outcome("static", now, used, held, stalled, latencies)


def continuous_batching(jobs: Sequence[Job], slots: int, prefill_rate: float, chunked: bool) -> Outcome:
    """Jobs join and leave between steps. Prefill either stops everybody or rides along (``chunked``), at
    ``prefill_rate`` prompt tokens a step in both."""
    waiting = deque(sorted(jobs, key=lambda job: job.arrival))
    running: list[list[float]] = []  # [prompt tokens left, answer tokens left, arrival]
    now, used, held, stalled = 0.0, 0, 0.0, 0.0
    latencies: list[float] = []
    while waiting or running:
        if not running:
            now = max(now, waiting[0].arrival)
        while waiting and len(running) < slots and waiting[0].arrival <= now:
            job = waiting.popleft()
            running.append([float(job.prompt), float(job.output), job.arrival])
        budget, filling = prefill_rate, False
        for item in running:
            if item[0] > 0 and budget > 0:
                taken = min(item[0], budget)
                item[0] -= taken
                budget -= taken
                filling = True
        blocked = filling and not chunked
        deciding = [] if blocked else [item for item in running if item[0] <= 0]
        now += 1
        stalled += blocked
        held += slots
        used += len(deciding)
        for item in deciding:
            item[1] -= 1
            if item[1] <= 0:
                latencies.append(now - item[2])
        running = [item for item in running if item[1] > 0]
    name = "iteration-level, chunked prefill" if chunked else "iteration-level, prefill stops decoding"
    return _outcome(name, now, used, held, stalled, latencies)


def _outcome(name: str, steps: float, used: int, held: float, stalled: float, latencies: Sequence[float]) -> Outcome:
    ordered = sorted(latencies)
    p99 = ordered[math.ceil(0.99 * len(ordered)) - 1]
    return Outcome(name, steps, used / steps, 1 - used / held, stalled / steps, sum(ordered) / len(ordered), p99)


def compare(jobs: Sequence[Job], slots: int, prefill_rate: float) -> list[Outcome]:
    """All three policies on the same jobs."""
    return [
        static_batching(jobs, slots, prefill_rate),
        continuous_batching(jobs, slots, prefill_rate, chunked=False),
        continuous_batching(jobs, slots, prefill_rate, chunked=True),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.batching_sim", description=__doc__)
    parser.add_argument("--jobs", type=int, default=400)
    parser.add_argument("--rate", type=float, default=0.13, help="jobs that arrive per decode step (default: 0.13)")
    parser.add_argument("--slots", type=int, default=16, help="sequences in a batch (default: 16)")
    parser.add_argument("--prefill-rate", type=float, default=200.0, help="prompt tokens per step (default: 200)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=new_file, help="write the outcomes here")
    args = parser.parse_args(argv)
    outcomes = compare(make_jobs(args.jobs, args.rate, args.seed), args.slots, args.prefill_rate)
    print(f"{'policy':40}{'tokens/step':>12}{'waste':>8}{'stalled':>9}{'mean latency':>14}{'p99':>9}")
    for item in outcomes:
        print(f"{item.policy:40}{item.tokens_per_step:>12.2f}{item.waste:>8.1%}{item.stall:>9.1%}"
              f"{item.mean_latency:>14.1f}{item.p99_latency:>9.1f}")  # fmt: skip
    if args.json:
        write_report(args.json, [asdict(item) for item in outcomes])
    return 0


if __name__ == "__main__":
    sys.exit(main())
