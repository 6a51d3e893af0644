"""``python -m eval.scenarios``: the three graded shapes against any server, each under its wall cap.

S1 is the TPOT of one chat stream, S2 the TTFT of a 4K-token prompt, S3 the aggregate tokens/s of a burst. A scenario
that passes its cap (twice the baseline's time) is a TIMEOUT and the run has no score. Prompts are this project's own,
of the graded shapes. It knows nothing of how the server was started.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from eval.client import (
    ChatRequest,
    Measurement,
    TokenCounter,
    TokenizerCounter,
    bursts,
    measure,
    open_client,
    served_model,
    was_buffered,
)
from eval.json_report import write_report
from eval.load import run_burst, run_sequential
from eval.options import at_least, new_file, positive
from eval.prompts import burst, interactive, long_prompt
from eval.stats import geometric_mean


@dataclass(frozen=True)
class Baseline:
    """What the naive reference reaches: seconds per token, seconds to first token, tokens/s of the burst."""

    tpot: float = 0.078
    ttft: float = 8.8
    throughput: float = 14.0
    source: str = "naive reference on a T4, Qwen3-4B fp16, burst of 32"


def load_baseline(path: Path) -> Baseline:
    """A baseline from JSON: its fields, or a report of ``eval.paired`` that holds them under "baseline". ValueError
    names the field that is wrong."""
    row = json.loads(path.read_text())
    row = row.get("baseline", row) if isinstance(row, dict) else row
    for name in ("tpot", "ttft", "throughput"):
        value = row.get(name) if isinstance(row, dict) else None
        if not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise ValueError(f"baseline {path}: field {name!r} must be a number above 0, got {value!r}")
    return Baseline(row["tpot"], row["ttft"], row["throughput"], str(row.get("source", path)))


@dataclass(frozen=True)
class Shapes:
    """Sizes of the scenarios, in tokens and requests. The defaults are the graded ones."""

    interactive_prompts: int = 3
    interactive_input: int = 120
    interactive_output: int = 256
    long_prompts: int = 3
    long_input: int = 4096
    long_output: int = 16
    burst_size: int = 32
    burst_input: int = 240
    burst_output: int = 128
    cap_factor: float = 2.0

    def label(self) -> str:
        """ "graded" for the graded sizes, else what differs."""
        usual = asdict(Shapes())
        changed = [f"{key}={value}" for key, value in asdict(self).items() if value != usual[key]]
        return ", ".join(changed) or "graded"


@dataclass(frozen=True)
class Scenario:
    """Outcome of one scenario. ``value`` and ``speedup`` are None unless ``status`` is "ok"; times are seconds."""

    name: str
    unit: str
    status: str
    value: float | None
    baseline: float
    speedup: float | None
    wall: float
    cap: float
    details: dict[str, Any] = field(default_factory=dict)

    def line(self) -> str:
        """One line for people, the baseline in brackets."""
        scale, unit = (1000.0, "ms") if self.unit == "s/token" else (1.0, self.unit)
        base = f"[baseline {self.baseline * scale:.1f} {unit}]"
        if self.value is None or self.speedup is None:
            why = f"   {self.details['why']}" if "why" in self.details else ""
            return f"{self.name}: {self.status} after {self.wall:.1f} s (cap {self.cap:.0f} s)   {base}{why}"
        return f"{self.name}: {self.value * scale:.2f} {unit}   {base}   speed-up {self.speedup:.2f}x"


def requests_for(name: str, shapes: Shapes, seed: int, counter: TokenCounter, ignore_eos: bool) -> list[ChatRequest]:
    """The requests of scenario "S1", "S2" or "S3"."""
    if name == "S1":
        made = interactive(
            shapes.interactive_prompts, seed, counter, shapes.interactive_input, shapes.interactive_output
        )
    elif name == "S2":
        made = long_prompt(shapes.long_prompts, seed, counter, shapes.long_input, shapes.long_output)
    else:
        made = burst(shapes.burst_size, seed, counter, shapes.burst_input, shapes.burst_output)
    options: tuple[tuple[str, Any], ...] = (("ignore_eos", True),) if ignore_eos else ()
    return [replace(request, options=options) for request in made]


def baseline_wall(name: str, shapes: Shapes, baseline: Baseline) -> float:
    """Seconds the baseline would take for a whole scenario."""
    if name == "S1":
        per_request = shapes.interactive_output * baseline.tpot + baseline.ttft * shapes.interactive_input / 4096
        return shapes.interactive_prompts * per_request
    if name == "S2":
        per_request = baseline.ttft * shapes.long_input / 4096 + shapes.long_output * baseline.tpot
        return shapes.long_prompts * per_request
    return shapes.burst_size * shapes.burst_output / baseline.throughput


async def run_scenario(
    client: httpx.AsyncClient,
    model: str,
    name: str,
    shapes: Shapes,
    baseline: Baseline,
    counter: TokenCounter,
    seed: int = 1,
    ignore_eos: bool = False,
) -> Scenario:
    """Runs one scenario. A request that fails or stays empty makes the scenario FAILED, never a number."""
    requests = requests_for(name, shapes, seed, counter, ignore_eos)
    cap = shapes.cap_factor * baseline_wall(name, shapes, baseline)
    unit = {"S1": "s/token", "S2": "s", "S3": "tok/s"}[name]
    base = {"S1": baseline.tpot, "S2": baseline.ttft * shapes.long_input / 4096, "S3": baseline.throughput}[name]
    title = {"S1": "S1 interactive TPOT", "S2": "S2 long-prompt TTFT", "S3": f"S3 burst of {shapes.burst_size}"}[name]
    loop = asyncio.get_running_loop()
    start = loop.time()
    try:
        records = await asyncio.wait_for(
            (run_burst if name == "S3" else run_sequential)(client, model, requests), timeout=cap
        )
    except (asyncio.TimeoutError, TimeoutError):
        return Scenario(title, unit, "TIMEOUT", None, base, None, loop.time() - start, cap)
    wall = loop.time() - start
    items = [measure(record, counter) for record in records]
    details = summary(items)
    bad = [item for item in items if item.outcome != "ok"]
    if bad:
        why = f"{len(bad)} of {len(items)} requests, the first: {bad[0].error or 'an empty answer'}"
        return Scenario(title, unit, "FAILED", None, base, None, wall, cap, {**details, "why": why})
    value = _value(name, items)
    why = _untimed(items) if name == "S1" else ""
    if why or value is None:
        return Scenario(title, unit, "FAILED", None, base, None, wall, cap, {**details, "why": why})
    speedup = value / base if name == "S3" else base / value
    return Scenario(title, unit, "ok", value, base, speedup, wall, cap, details)


def _untimed(items: Sequence[Measurement]) -> str:
    """Why the answers have no time per output token; empty when they have."""
    held = sum(was_buffered(item) for item in items)
    if held:
        return (
            f"{held} of {len(items)} answers came all at once or in large pieces: the server, or a proxy before it, "
            "buffers its stream, and the time between tokens is not its own"
        )
    # One token has no time between tokens, and neither have the tokens of one step.
    if any(item.tpot is None or bursts(item) == 1 for item in items):
        return "no time passed between the tokens of an answer: too short, or not streamed"
    return ""


def _value(name: str, items: Sequence[Measurement]) -> float | None:
    if name == "S1":
        tpots = [item.tpot for item in items if item.tpot is not None]
        return median(tpots) if len(tpots) == len(items) else None
    if name == "S2":
        return median(item.ttft for item in items if item.ttft is not None)
    wall = max(item.finished_at for item in items) - min(item.sent_at for item in items)
    return sum(item.tokens for item in items) / wall


def summary(items: Sequence[Measurement]) -> dict[str, Any]:
    """Counts apart from latencies, and where the server's own count differs from the re-tokenised text."""
    good = [item for item in items if item.outcome == "ok"]
    return {
        "requests": len(items),
        "errors": [item.error for item in items if item.outcome == "error"],
        "empty": sum(item.outcome == "empty" for item in items),
        "tokens": sum(item.tokens for item in good),
        "usage_tokens": sum(item.usage_tokens or 0 for item in good),
        "ttft": [item.ttft for item in good],
        "tpot": [item.tpot for item in good],
        "cached_tokens": sum(item.cached_tokens or 0 for item in items),
        "buffered": sum(was_buffered(item) for item in items),
    }


async def run_all(
    url: str,
    shapes: Shapes,
    baseline: Baseline,
    counter: TokenCounter,
    seed: int = 1,
    ignore_eos: bool = False,
    only: Sequence[str] = ("S1", "S2", "S3"),
) -> list[Scenario]:
    """All three scenarios in the grader's order against one running server."""
    async with open_client(url) as client:
        model = await served_model(client)
        return [await run_scenario(client, model, name, shapes, baseline, counter, seed, ignore_eos) for name in only]


def score(scenarios: Sequence[Scenario]) -> float | None:
    """Geometric mean of the speed-ups; None when a scenario has none."""
    speedups = [item.speedup for item in scenarios if item.speedup is not None]
    return geometric_mean(speedups) if speedups and len(speedups) == len(scenarios) else None


def add_shape_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that change the scenarios' sizes; shared with the paired run."""
    parser.add_argument("--burst", type=positive, default=32, help="requests of S3 (default: 32, as graded)")
    parser.add_argument(
        "--interactive-tokens", type=positive, default=256, help="answer tokens of S1 (default: 256, as graded)"
    )
    parser.add_argument("--long-tokens", type=positive, default=4096, help="prompt tokens of S2 (default: 4096)")
    parser.add_argument("--repeats", type=positive, default=3, help="prompts of S1 and of S2 (default: 3)")
    parser.add_argument("--quick", action="store_true", help="small sizes for a first look; labelled as such")
    parser.add_argument("--cap-factor", type=at_least(0.01), default=2.0, help="wall cap in baselines (default: 2)")


def shapes_from(args: argparse.Namespace) -> Shapes:
    """Sizes from the options of ``add_shape_arguments``."""
    if args.quick:
        return Shapes(1, 60, 48, 1, min(args.long_tokens, 512), 8, min(args.burst, 8), 80, 32, args.cap_factor)
    return Shapes(
        interactive_prompts=args.repeats,
        interactive_output=args.interactive_tokens,
        long_prompts=args.repeats,
        long_input=args.long_tokens,
        burst_size=args.burst,
        cap_factor=args.cap_factor,
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.scenarios", description=__doc__)
    parser.add_argument("--url", required=True, help="server to measure, for example http://127.0.0.1:8000")
    parser.add_argument("--model-dir", type=Path, required=True, help="model folder whose tokenizer counts the tokens")
    parser.add_argument("--baseline", type=Path, help="a baseline, or a report of eval.paired with one (default: T4)")
    parser.add_argument("--only", nargs="+", choices=("S1", "S2", "S3"), default=["S1", "S2", "S3"])
    parser.add_argument("--seed", type=int, default=1, help="draws other prompts of the same shapes (default: 1)")
    parser.add_argument("--ignore-eos", action="store_true", help="ask for full-length answers")
    parser.add_argument("--json", type=new_file, help="write the result here")
    add_shape_arguments(parser)
    args = parser.parse_args(argv)
    try:
        baseline = load_baseline(args.baseline) if args.baseline else Baseline()
        counter = TokenizerCounter(args.model_dir)
    except (OSError, ValueError) as fault:
        parser.error(str(fault))
    shapes = shapes_from(args)
    results: list[Scenario] = []
    interrupted = False
    try:
        for name in args.only:
            results += asyncio.run(run_all(args.url, shapes, baseline, counter, args.seed, args.ignore_eos, [name]))
            print(results[-1].line(), flush=True)
    except KeyboardInterrupt:
        print("interrupted: finished scenarios are kept", file=sys.stderr)
        interrupted = True
    except (ConnectionError, ValueError) as fault:
        print(fault, file=sys.stderr)
        return 1
    total = score(results) if len(results) == len(args.only) else None
    print(f"score (geometric mean): {total:.3f}" if total is not None else "score: none (a scenario has no result)")
    print(f"sizes: {shapes.label()}; baseline: {baseline.source}")
    if args.json:
        report = {"scenarios": [asdict(item) for item in results], "score": total, "sizes": asdict(shapes),
                  "baseline": asdict(baseline)}  # fmt: skip
        write_report(args.json, report)
    if interrupted:
        return 130
    return 0 if total is not None else 1


if __name__ == "__main__":
    sys.exit(main())
