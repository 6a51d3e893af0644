"""``python -m eval.sweep``: load against throughput and latency, closed loop and open loop, one raw JSON per point.

Every point has its own seed, so its prompts are new to the server's prefix cache; /metrics is scraped on the client's
clock while it runs. Finished points survive an interrupt, and the report can be drawn again from the folder alone
(``--replot``). It does not know which server it drives.
"""

from __future__ import annotations

import argparse
import asyncio
import json
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
from eval.lag import LagMeter
from eval.load import run_closed, run_open
from eval.load_worker import processes_for, run_shared
from eval.metrics import Scraper
from eval.options import at_least, new_file, positive, share
from eval.points import MIN_SECONDS, Window, dollars_per_million, goodput, knees, lint, point_of, summarise
from eval.predict import CONCURRENCY
from eval.prompts import sweep_requests
from eval.score import check_seal, score, score_lines, step_lines

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
        (folder / "run.json").write_text(json.dumps(run, indent=1) + "\n")
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
                (folder / point_name(point)).write_text(json.dumps(point) + "\n")
                found = summarise(point, args.slo_ttft, args.slo_tpot)
                if mode == "closed":
                    # Four digits, so that a file's name says its whole rate.
                    finished = sum(0 <= row["finished"] < args.seconds for row in point["requests"])
                    reached[load] = float(f"{max(finished, 1) / args.seconds:.4g}")
                print(point_line(found), file=sys.stderr, flush=True)
        run["gpu_after"] = gpu_state()
        (folder / "run.json").write_text(json.dumps(run, indent=1) + "\n")


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """Sampling is part of the record: the sampler's path costs time as well."""
    options: dict[str, Any] = {"temperature": args.temperature, "ignore_eos": not args.stop_at_eos}
    if args.temperature > 0:
        options |= {"top_p": args.top_p, "top_k": args.top_k}
    return options


def point_name(point: dict[str, Any]) -> str:
    """File name of a point: sweep_c8.json (closed) or sweep_r2.5.json (open)."""
    return f"sweep_{'c' if point['mode'] == 'closed' else 'r'}{point['load']:g}.json"


def gpu_state() -> str | None:
    """What nvidia-smi says of memory and clocks before the run; None without a card."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = "--query-gpu=name,memory.used,memory.total,clocks.sm,temperature.gpu,power.draw"
    result = subprocess.run(["nvidia-smi", query, "--format=csv"], capture_output=True, text=True, timeout=30)
    return result.stdout if result.returncode == 0 else None


def load_run(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The run record and its points (closed by concurrency, then open by rate); ValueError if there are none."""
    points = [json.loads(path.read_text()) for path in folder.glob("sweep_*.json")]
    if not points:
        raise ValueError(f"no sweep_*.json in {folder}")
    run = json.loads((folder / "run.json").read_text())
    return run, sorted(points, key=lambda point: (point["mode"], point["load"]))


def point_line(item: dict[str, Any]) -> str:
    """One point in one line."""
    ttft, tpot = item.get("ttft"), item.get("tpot")
    ms = [
        f"{value['p50'] * 1000:8.1f}/{value['p99'] * 1000:<8.1f}" if value else f"{'-':>17}" for value in (ttft, tpot)
    ]
    law = item.get("little")
    hit = "-" if item["hit_rate"] is None else f"{item['hit_rate']:.1%}"
    tau = "-" if item["acceptance_length"] is None else f"{item['acceptance_length']:.2f}"
    return (
        f"{item['mode']:>6} {item['load']:>6g} {item['tokens_per_second']:>10.1f} {item['completed']:>6} "
        f"{ms[0]} {ms[1]} {law['product'] if law else 0:>8.2f} {hit:>7} {tau:>6}"
    )


HEADER = (
    f"{'mode':>6} {'load':>6} {'tok/s':>10} {'done':>6} {'TTFT p50/p99 ms':>17} {'TPOT p50/p99 ms':>17} "
    f"{'L = XW':>8} {'cached':>7} {'tau':>6}"
)


def judge(
    run: dict[str, Any],
    points: Sequence[dict[str, Any]],
    slo_ttft: float,
    slo_tpot: float,
    prediction: dict[str, Any] | None = None,
    dollars_per_hour: float | None = None,
) -> dict[str, Any]:
    """Everything that follows from the raw points: summaries, warnings, goodput, knees, score, price."""
    floor = prediction["predictions"]["prefill_floor"] if prediction else None
    summaries = [summarise(point, slo_ttft, slo_tpot) for point in points]
    closed = [item for item in summaries if item["mode"] == "closed"]
    result: dict[str, Any] = {
        "quick": run["quick"],
        "slo": {"ttft": slo_ttft, "tpot": slo_tpot},
        "summaries": summaries,
        "lints": {point_name(point): lint(point, item, floor) for point, item in zip(points, summaries, strict=True)},
        "goodput": [vars(goodput(closed, which, slo_ttft, slo_tpot)) for which in ("p50", "p99")],
        "knees": knees(closed, [point for point in points if point["mode"] == "closed"]),
    }
    if prediction:
        result["prediction_faults"] = check_seal(prediction, run["started"])
        result["score"] = score(prediction, summaries)
        result["step_parts"] = step_lines(prediction, summaries)
    best = max((item["tokens_per_second"] for item in summaries), default=0.0)
    if dollars_per_hour and best:
        result["dollars_per_million_tokens"] = dollars_per_million(best, dollars_per_hour)
    return result


def report_lines(result: dict[str, Any]) -> list[str]:
    """The judged sweep as text."""
    lines = ["QUICK RUN: points are short; use it to find faults, not to quote numbers"] if result["quick"] else []
    lines += [HEADER, *(point_line(item) for item in result["summaries"])]
    lines += conclusion_lines(result)
    for name, faults in result["lints"].items():
        lines += [f"  {name}: {fault}" for fault in faults]
    lines += [f"PREDICTION NOT VALID: {fault}" for fault in result.get("prediction_faults", ())]
    if "score" in result:
        lines += score_lines(result["score"])
    return lines


def conclusion_lines(result: dict[str, Any]) -> list[str]:
    """What follows from the points: gaps, goodput, knees, where a step's time went, the price."""
    gaps = [f"C={item['load']:g} {item['icl_p99'] * 1e3:.1f}" for item in result["summaries"] if item.get("icl_p99")]
    lines = [f"p99 gap between chunks, ms: {', '.join(gaps)}"] if gaps else []
    slo = result["slo"]
    for item in result["goodput"]:
        what = (
            f"goodput, {item['percentile']} of TTFT < {slo['ttft'] * 1000:g} ms and TPOT < {slo['tpot'] * 1000:g} ms: "
        )
        found = item["load"] is not None
        lines.append(what + (f"{item['tokens_per_second']:.1f} tok/s at C={item['load']:g}, raw maximum is "
                             f"{item['gap']:.2f} times that" if found else "no point meets it"))  # fmt: skip
    for item in result["summaries"]:
        if item.get("goodput"):
            good = item["goodput"]
            lines.append(
                f"  {item['mode']} {item['load']:g}: {good['requests_per_second']:.2f} requests/s and "
                f"{good['tokens_per_second']:.1f} tok/s within the SLO ({good['share']:.0%} of the requests)"
            )
    shown = {key: "none" if value is None else f"{value:g}" for key, value in result["knees"].items()}
    lines.append(f"requests wait in the server from C={shown['server_waiting']}; "
                 f"p99 TTFT over twice the median from C={shown['ttft_p99_over_2_p50']}")  # fmt: skip
    lines += result.get("step_parts", ())
    if "dollars_per_million_tokens" in result:
        lines.append(f"${result['dollars_per_million_tokens']:.3f} per million output tokens at the raw maximum")
    return lines


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
    prediction = json.loads(args.prediction.read_text()) if args.prediction else None
    code = 0
    if not args.replot:
        args.out.mkdir(parents=True, exist_ok=True)
        if any(args.out.glob("sweep_*.json")):
            print(f"{args.out} already holds points; give another folder", file=sys.stderr)
            return 2
        # Ctrl-C ends the run; what is finished is on disk and is judged below.
        try:
            asyncio.run(run_sweep(args, TokenizerCounter(args.model_dir), args.out))
        except KeyboardInterrupt:
            code = 130
            print("interrupted: finished points are kept", file=sys.stderr)
        except (OSError, RuntimeError, ValueError) as fault:
            print(fault, file=sys.stderr)
            return 1
    try:
        run, points = load_run(args.out)
    except (ValueError, OSError) as fault:
        print(fault, file=sys.stderr)
        return code or 1
    result = judge(run, points, args.slo_ttft, args.slo_tpot, prediction, args.dollars_per_hour)
    print("\n".join(report_lines(result)))
    (args.out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    from eval.report import write_sweep_report

    print(f"report: {write_sweep_report(args.out, run, points, result, prediction)}")
    return code


if __name__ == "__main__":
    sys.exit(main())
