"""``python -m eval.soak``: many streams for a long time against a real server, and what must hold at the end.

Streams of mixed requests (eval/soak_traffic.py) with cancellations and malformed bodies, on so few KV pages that
sequences are preempted. It must end with no crash, no wrong or unfinished answer, every page free or cached, gauges at
zero, and the memory of both processes where it was after warm-up. It knows the API and /proc, not the engine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import httpx

from eval.client import EventSplitter
from eval.json_report import write_report
from eval.metrics import parse_metrics
from eval.options import at_least, model_folder, new_file, positive
from eval.prompts import sentences
from eval.servers import ROOT, ManagedServer, ServerFailed, end_on_sigterm, our_server, resident_bytes
from eval.soak_traffic import Shot, Traffic

WARM_UP_SHARE = 0.25
WARM_UP_SECONDS = 300.0
"""Shorter runs do not judge memory: until every page and every size of step has been seen, it grows as it should."""
WINDOW_SHARE = 0.2
RSS_GROWTH = 0.01
IDLE_SECONDS = 20.0
LONGEST = 640
WORD_RESERVE = 1.25
GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


@dataclass
class Tally:
    """What the clients saw. ``outcomes`` counts by kind and result; ``faults`` are the first things that were wrong."""

    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    texts: dict[int, str] = field(default_factory=dict)

    def fault(self, shot: Shot, what: str) -> None:
        self.outcomes[f"{shot.kind}: wrong"] += 1
        if len(self.faults) < 20:
            self.faults.append(f"{shot.kind} {shot.route}: {what[:300]}")


@dataclass(frozen=True)
class Memory:
    """Resident bytes of both processes at one moment (seconds since the start)."""

    at: float
    front: int
    engine: int


async def fire(client: httpx.AsyncClient, shot: Shot, tally: Tally) -> None:
    """Send one request and judge what comes back."""
    headers = {"content-type": "application/json"}
    try:
        if shot.stream:
            await _streamed(client, shot, tally, headers)
            return
        response = await client.post(shot.route, content=shot.content, headers=headers)
    except httpx.HTTPError as error:
        tally.fault(shot, f"{type(error).__name__}: {error}")
        return
    if shot.kind == "malformed":
        if 400 <= response.status_code < 500 and response.json()["error"]["message"]:
            tally.outcomes["malformed: refused"] += 1
        else:
            tally.fault(shot, f"HTTP {response.status_code} for {shot.content[:60]!r}")
        return
    if response.status_code != 200:
        tally.fault(shot, f"HTTP {response.status_code}: {response.text}")
        return
    choices = response.json()["choices"]
    if len(choices) != shot.choices or not all(choice["finish_reason"] in ("stop", "length") for choice in choices):
        tally.fault(shot, f"choices that have no end: {choices}")
        return
    _judge_text(shot, "".join(choice.get("text", "") for choice in choices), tally)


async def _streamed(client: httpx.AsyncClient, shot: Shot, tally: Tally, headers: dict[str, str]) -> None:
    splitter = EventSplitter()
    events: list[str] = []
    async with client.stream("POST", shot.route, content=shot.content, headers=headers) as response:
        if response.status_code != 200:
            tally.fault(shot, f"HTTP {response.status_code}: {(await response.aread()).decode('utf-8', 'replace')}")
            return
        pieces = 0
        if shot.kind == "cancel" and shot.leave_after == 0:
            tally.outcomes["cancel: left"] += 1
            return
        async for part in response.aiter_bytes():
            events += splitter.feed(part)
            pieces += 1
            if shot.kind == "cancel" and pieces >= shot.leave_after:
                tally.outcomes["cancel: left"] += 1
                return
    if shot.kind == "cancel":
        tally.outcomes["cancel: ended first"] += 1
        return
    if not events or events[-1] != "[DONE]":
        tally.fault(shot, f"the stream ended with {events[-1:]}")
        return
    chunks = [json.loads(event) for event in events[:-1]]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    ends = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    if len(ends) != shot.choices or not set(ends) <= {"stop", "length"}:
        tally.fault(shot, f"ends {ends} for {shot.choices} choices")
        return
    _judge_text(shot, "".join(choice.get("text", "") for choice in choices), tally)


def _judge_text(shot: Shot, text: str, tally: Tally) -> None:
    if shot.kind != "sentinel":
        tally.outcomes["answer: whole"] += 1
        return
    known = tally.texts.setdefault(shot.key, text)
    if text == known:
        tally.outcomes["sentinel: same text"] += 1
    else:
        tally.fault(shot, f"sentinel {shot.key} was {known!r} and is {text!r}")


async def run(server: ManagedServer, seconds: float, streams: int, seed: int) -> dict[str, Any]:
    """The whole soak; the report as JSON values, with ``passed`` and the reasons when it is false. Ctrl-C ends the load
    and makes it a shorter soak, which is judged as one."""
    tally = Tally()
    memory: list[Memory] = []
    front, engine = server.pid, server.child_pid()
    limits = httpx.Limits(max_connections=streams + 4, max_keepalive_connections=streams + 4)
    async with httpx.AsyncClient(base_url=server.url, timeout=600, limits=limits, trust_env=False) as client:
        context = int((await client.get("/v1/models")).json()["data"][0]["max_model_len"])
        traffic = Traffic(seed, min(context, LONGEST), await _word_tokens(client))
        for shot in traffic.sentinels():
            await fire(client, shot, tally)
        started = time.monotonic()

        def end_now() -> None:
            nonlocal seconds
            seconds = min(seconds, time.monotonic() - started)

        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, end_now)

        async def stream() -> None:
            while time.monotonic() - started < seconds:
                await fire(client, traffic.next(), tally)

        workers = [asyncio.create_task(stream()) for _ in range(streams)]
        try:
            while not all(worker.done() for worker in workers):
                await asyncio.wait(workers, timeout=max(1.0, min(10.0, seconds / 60)))
                memory.append(Memory(time.monotonic() - started, resident_bytes(front), resident_bytes(engine)))
                await _progress(client, tally, memory, seconds)
            await asyncio.gather(*workers)
        finally:
            loop.remove_signal_handler(signal.SIGINT)
            for worker in workers:
                worker.cancel()
        page = await _idle_page(client)
    return _report(server, tally, memory, page, seconds, engine)


async def _word_tokens(client: httpx.AsyncClient) -> float:
    """Tokens of a word of the soak's texts, with a reserve."""
    source = sentences(random.Random(0))
    text = " ".join(next(source) for _ in range(20))
    reply = await client.post("/tokenize", json={"prompt": text})
    reply.raise_for_status()
    return WORD_RESERVE * float(reply.json()["count"]) / len(text.split())


async def _progress(client: httpx.AsyncClient, tally: Tally, memory: list[Memory], seconds: float) -> None:
    if len(memory) % 6 != 1:
        return
    with suppress(httpx.HTTPError):
        page = parse_metrics((await client.get("/metrics")).text)
        now = memory[-1]
        print(
            f"{now.at:6.0f} of {seconds:.0f} s: {sum(tally.outcomes.values())} requests, {len(tally.faults)} faults, "
            f"{page.get('vllm:generation_tokens_total', 0):.0f} tokens, "
            f"{page.get('vllm:num_preemptions_total', 0):.0f} preemptions, "
            f"front {now.front / 2**20:.1f} MiB, engine {now.engine / 2**20:.1f} MiB",
            file=sys.stderr,
            flush=True,
        )


async def _idle_page(client: httpx.AsyncClient) -> dict[str, float]:
    """The metrics once the gauges are at zero, or when that has taken too long."""
    deadline = time.monotonic() + IDLE_SECONDS
    page: dict[str, float] = {}
    while time.monotonic() < deadline:
        with suppress(httpx.HTTPError):
            page = parse_metrics((await client.get("/metrics")).text)
            if all(page.get(name, -1) == 0 for name in GAUGES):
                return page
        await asyncio.sleep(0.5)
    return page


def growth(memory: list[Memory], seconds: float) -> dict[str, float]:
    """Growth of each process: median of the last window over the median of the window after warm-up, minus one.

    Samples taken after ``seconds``, while the last requests end, count to the last window. Empty for a run that is too
    short to be judged.
    """
    warm = max(WARM_UP_SHARE * seconds, WARM_UP_SECONDS)
    first = [m for m in memory if warm <= m.at <= warm + WINDOW_SHARE * seconds]
    last = [m for m in memory if m.at >= (1 - WINDOW_SHARE) * seconds]
    if not first or not last or warm > (1 - WINDOW_SHARE) * seconds:
        return {}
    return {
        "front": median(m.front for m in last) / median(m.front for m in first) - 1,
        "engine": median(m.engine for m in last) / median(m.engine for m in first) - 1,
    }


def _report(
    server: ManagedServer,
    tally: Tally,
    memory: list[Memory],
    page: dict[str, float],
    seconds: float,
    engine: int,
) -> dict[str, Any]:
    grown = growth(memory, seconds)
    errors = [line for line in server.log_tail(1 << 20).splitlines() if line.startswith(("ERROR", "Traceback"))]
    leaked = page.get("foretoken:kv_pages", -1) - page.get("foretoken:kv_pages_free", -2)
    checks = {
        "the engine process is the one that was started": engine == server.child_pid(),
        "no answer was wrong": not tally.faults,
        "no error line in the log": not errors,
        "gauges at zero when idle": all(page.get(name, -1) == 0 for name in GAUGES),
        "free and cached pages are all pages": leaked == 0,
        "sequences were preempted": page.get("vllm:num_preemptions_total", 0) > 0,
        **{f"memory of the {name} grew less than 1 %": grown[name] < RSS_GROWTH for name in grown},
    }
    return {
        "passed": all(checks.values()),
        "checks": checks,
        "seconds": seconds,
        "outcomes": dict(sorted(tally.outcomes.items())),
        "faults": tally.faults,
        "log_errors": errors[:20],
        "generated_tokens": page.get("vllm:generation_tokens_total"),
        "prompt_tokens": page.get("vllm:prompt_tokens_total"),
        "preemptions": page.get("vllm:num_preemptions_total"),
        "prefix_hits": page.get("vllm:prefix_cache_hits_total"),
        "accepted_tokens": page.get("vllm:spec_decode_num_accepted_tokens_total"),
        "kv_pages": page.get("foretoken:kv_pages"),
        "rss_growth": grown,
        "memory": [asdict(m) for m in memory],
    }


def exit_code(report: dict[str, Any], asked: float) -> int:
    """1 for a soak that failed; 130 for one that was cut short of the ``asked`` seconds."""
    return 1 if not report["passed"] else 130 if report["seconds"] < asked else 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.soak", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--minutes", type=at_least(0.01), default=2.0, help="how long new requests are sent (default: 2)"
    )
    parser.add_argument("--streams", type=positive, default=32, help="requests in flight (default: 32)")
    parser.add_argument("--model-dir", type=model_folder, default=ROOT / "models" / "smollm2-135m-instruct")
    parser.add_argument("--drafter-dir", default=str(ROOT / "drafter_train" / "releases" / "smollm2-135m-instruct"))
    parser.add_argument("--threads", type=positive, default=1, help="threads of the engine (default: 1)")
    parser.add_argument("--kv-memory-mib", type=positive, default=36, help="few pages force preemption (default: 36)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=new_file, help="write the report here")
    args = parser.parse_args(argv)
    end_on_sigterm()
    extra = ["--drafter-dir", args.drafter_dir, "--threads", str(args.threads)]
    extra += ["--kv-memory-mib", str(args.kv_memory_mib), "--page-size", "16", "--max-num-seqs", str(args.streams)]
    try:
        with our_server(args.model_dir, "soak", *extra) as server:
            report = asyncio.run(run(server, 60 * args.minutes, args.streams, args.seed))
    except ServerFailed as fault:
        print(fault, file=sys.stderr)
        return 1
    if args.json:
        write_report(args.json, report)
    for name, value in report.items():
        if name not in ("memory", "checks"):
            print(f"{name}: {value}")
    for check, held in report["checks"].items():
        print(f"{'ok  ' if held else 'FAIL'} {check}")
    return exit_code(report, 60 * args.minutes)


if __name__ == "__main__":
    sys.exit(main())
