"""``python -m eval.sweep``: load against throughput and latency, closed loop and open loop, one raw JSON per point.

Every point has its own seed, so its prompts are new to the server's prefix cache; /metrics is scraped on the client's
clock while it runs. Finished points survive an interrupt, and the report can be drawn again from the folder alone
(``--replot``). It does not know which server it drives.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from eval.client import (
    Record,
    TokenCounter,
    TokenizerCounter,
    measure,
    open_client,
    reset_prefix_cache,
    served_model,
)
from eval.json_report import write_report
from eval.judged import judge, load_run, point_line, point_name, report_lines
from eval.lag import LagMeter
from eval.load import run_closed, run_open
from eval.load_worker import processes_for, run_shared
from eval.metrics import Scraper
from eval.options import at_least, new_file, positive, share
from eval.points import MIN_SECONDS, Window, point_of, summarise
from eval.predict import CONCURRENCY
from eval.prompts import sweep_requests
from eval.score import load_prediction

QUICK_SECONDS = 15.0
WARM_REQUESTS, WARM_TOKENS = 4, 8


async def run_point(
    client: httpx.AsyncClient,
    model: str,
    args: argparse.Namespace,
    label: dict[str, Any],
    counter: TokenCounter,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Runs one point and returns its raw record. ``label`` holds mode, load, seed, prompt, output and options. Many
    streams are shared out over client processes, whose bar does not move until they are done."""
    task = progress.add_task(f"{label['mode']} {label['load']:g}", total=None) if progress else None

    def tick(record: Record) -> None:
        if progress and task is not None:
            progress.advance(task)

    closed = label["mode"] == "closed"
    processes = processes_for(int(label["load"]), args.processes) if closed else 1
    seconds = args.seconds
    if processes > 1:
        async with Scraper(args.url) as scraper:
            items, start, lag = await run_shared(args.url, str(args.model_dir), label, seconds, processes)
    else:
        requests = sweep_requests(label["seed"], counter, label["prompt"], label["output"], label["options"])
        async with Scraper(args.url) as scraper, LagMeter() as meter:
            start = time.perf_counter()
            if closed:
                records = await run_closed(client, model, requests, int(label["load"]), seconds, tick)
            else:
                records = await run_open(
                    client, model, requests, float(label["load"]), seconds, label["seed"], args.max_in_flight, tick
                )
        items, lag = [measure(record, counter) for record in records], meter.summary()
    label = {**label, "client_processes": processes, "client_lag": lag}
    return point_of(label, items, scraper.samples, Window(start, start + seconds))


async def run_sweep(args: argparse.Namespace, counter: TokenCounter, folder: Path) -> None:
    """All points, each written as soon as it is finished."""
    async with open_client(args.url, connections=1024) as client:
        model = await served_model(client)
        run = {"started": time.time(), "url": args.url, "model": model, "quick": args.quick, "seconds": args.seconds,
               "arguments": {key: str(value) for key, value in vars(args).items()},
               "gpu": gpu_state()}  # fmt: skip
        write_report(folder / "run.json", run)
        # First-use costs (kernels, allocator) are no part of any point: a few requests, then the widest wave that
        # comes. No point has a negative seed.
        widest = max([WARM_REQUESTS, *args.concurrency])
        warm = sweep_requests(-1 - args.seed, counter, args.prompt, WARM_TOKENS, options_of(args))
        for count, streams in ((WARM_REQUESTS, WARM_REQUESTS // 2), (widest, widest)):
            await run_closed(client, model, islice(warm, count), streams, float("inf"))
        console = Console(stderr=True)
        columns = (TextColumn("{task.description:>14}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            loads = [("closed", float(load)) for load in args.concurrency]
            loads += [("open", float(rate)) for rate in args.rate]
            loads += [("open like", float(load)) for load in args.open_like]
            reached: dict[float, float] = {}
            for index, (mode, load) in enumerate(loads):
                if mode == "open like":
                    mode, load = "open", reached[load]
                reset = await reset_prefix_cache(client)
                label = {
                    "mode": mode,
                    "load": load,
                    "seed": args.seed * 1000 + index,
                    "prompt": args.prompt,
                    "output": args.output,
                    "options": options_of(args),
                    "quick": args.quick,
                    "cache_reset": reset,
                    "started": time.time(),
                }
                point = await run_point(client, model, args, label, counter, progress)
                write_report(folder / point_name(point), point, indent=None)
                found = summarise(point, args.slo_ttft, args.slo_tpot)
                if mode == "closed":
                    # Four digits, so that a file's name says its whole rate.
                    finished = sum(0 <= row["finished"] < args.seconds for row in point["requests"])
                    reached[load] = float(f"{max(finished, 1) / args.seconds:.4g}")
                print(point_line(found), file=sys.stderr, flush=True)
                if found["errors"]:
                    await _still_there(client)
        run["gpu_after"] = gpu_state()
        write_report(folder / "run.json", run)


async def _still_there(client: httpx.AsyncClient) -> None:
    """ConnectionError when nothing answers any more: every point that is left would be waited out for nothing. A server
    that answers, were it with a fault, may be coming back."""
    try:
        await client.get("/v1/models", timeout=30.0)
    except httpx.TransportError as fault:
        raise ConnectionError(
            f"the server at {client.base_url} is gone ({type(fault).__name__}): the sweep ends with what is measured"
        ) from fault


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """Sampling is part of the record: the sampler's path costs time as well."""
    options: dict[str, Any] = {"temperature": args.temperature, "ignore_eos": not args.stop_at_eos}
    if args.temperature > 0:
        options |= {"top_p": args.top_p, "top_k": args.top_k}
    return options


def gpu_state() -> str | None:
    """What nvidia-smi says of memory and clocks before the run; None without a card."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = "--query-gpu=name,memory.used,memory.total,clocks.sm,temperature.gpu,power.draw"
    result = subprocess.run(["nvidia-smi", query, "--format=csv"], capture_output=True, text=True, timeout=30)
    return result.stdout if result.returncode == 0 else None


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m eval.sweep", description=__doc__)
    parser.add_argument("--url", help="server to drive, for example http://127.0.0.1:8000")
    parser.add_argument("--model-dir", type=Path, help="model folder whose tokenizer counts the tokens")
    parser.add_argument("--out", type=Path, required=True, help="folder of the raw points and the report")
    parser.add_argument("--replot", action="store_true", help="judge and draw --out again without running anything")
    parser.add_argument("--concurrency", type=positive, nargs="*", default=list(CONCURRENCY), help="closed-loop points")
    parser.add_argument("--rate", type=at_least(1e-6), nargs="*", default=[], help="open loop, requests/s (Poisson)")
    parser.add_argument(
        "--processes",
        type=positive,
        default=0,
        help="client processes of a closed-loop point (default: one for 16 streams, at most a quarter of the cores)",
    )
    parser.add_argument(
        "--open-like",
        type=positive,
        nargs="*",
        default=[],
        metavar="C",
        help="closed-loop points to run again as open loops at the rates they reached",
    )
    parser.add_argument("--max-in-flight", type=positive, help="client's limit in the open loop (its wait is reported)")
    parser.add_argument("--seconds", type=at_least(0.1), help=f"length of a point (default: {MIN_SECONDS:.0f})")
    parser.add_argument("--quick", action="store_true", help=f"points of {QUICK_SECONDS:.0f} s, labelled as quick")
    parser.add_argument("--prompt", type=positive, default=1000, help="prompt tokens (default: 1000)")
    parser.add_argument("--output", type=positive, default=1000, help="output tokens (default: 1000)")
    parser.add_argument("--temperature", type=at_least(0, 2), default=0.0)
    parser.add_argument("--top-p", type=share, default=0.95, help="with a temperature above 0 (default: 0.95)")
    parser.add_argument("--top-k", type=positive, default=20, help="with a temperature above 0 (default: 20)")
    parser.add_argument("--stop-at-eos", action="store_true", help="let answers end by themselves")
    parser.add_argument("--seed", type=int, default=1, help="seed of the run; every point gets its own from it")
    parser.add_argument("--slo-ttft", type=at_least(0), default=0.5, help="seconds (default: 0.5)")
    parser.add_argument("--slo-tpot", type=at_least(0), default=0.05, help="seconds (default: 0.05)")
    parser.add_argument("--prediction", type=Path, help="file of eval.predict, written before the run, to be scored")
    parser.add_argument("--dollars-per-hour", type=at_least(0), help="price of the machine, for the cost line")
    parser.add_argument("--json", type=new_file, help="also write the judged result here")
    args = parser.parse_args(argv)
    if not args.replot and (args.url is None or args.model_dir is None):
        parser.error("--url and --model-dir are required (or --replot)")
    missing = set(args.open_like) - set(args.concurrency)
    if missing:
        parser.error(f"--open-like {min(missing)} is not one of the points of --concurrency")
    args.seconds = args.seconds or (QUICK_SECONDS if args.quick else MIN_SECONDS)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    try:
        prediction = load_prediction(args.prediction) if args.prediction else None
    except (OSError, ValueError) as fault:
        print(fault, file=sys.stderr)
        return 2
    code = 0
    if not args.replot:
        args.out.mkdir(parents=True, exist_ok=True)
        if any(args.out.glob("sweep_*.json")):
            print(f"{args.out} already holds points; give another folder", file=sys.stderr)
            return 2
        # Ctrl-C or a fault ends the run; what is finished is on disk and is judged below.
        try:
            asyncio.run(run_sweep(args, TokenizerCounter(args.model_dir), args.out))
        except KeyboardInterrupt:
            code = 130
            print("interrupted: finished points are kept", file=sys.stderr)
        except (OSError, RuntimeError, ValueError) as fault:
            code = 1
            print(fault, file=sys.stderr)
    try:
        run, points = load_run(args.out)
    except (ValueError, OSError) as fault:
        if not code:
            print(fault, file=sys.stderr)
        return code or 1
    result = judge(run, points, args.slo_ttft, args.slo_tpot, prediction, args.dollars_per_hour)
    if not args.replot and any(item["errors"] and not item["completed"] for item in result["summaries"]):
        code = code or 1  # a point of errors alone: the server is gone, or refuses
    print("\n".join(report_lines(result)))
    write_report(args.out / "result.json", result)
    if args.json:
        write_report(args.json, result)
    from eval.report import write_sweep_report

    print(f"report: {write_sweep_report(args.out, run, points, result, prediction)}")
    return code


if __name__ == "__main__":
    sys.exit(main())
