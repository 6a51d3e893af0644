"""``python -m eval.referee``: load generators of others against the same server as our client, in turns.

Every run of a round has the same prompts where the server forgets its prefix cache on request (``--dev-routes``), else
prompts of its own of the same shape, so that no tool finds another's in the cache. The order turns by one every round,
every run has a warm-up that it does not count, and differences are taken within a round. Agreement is within 3 % on
TTFT, TPOT and tokens/s, and on what each says of drafts. It does not judge the server, and the tools' options and files
are known elsewhere.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean, median
from typing import Any

from eval.client import (
    ChatRequest,
    Measurement,
    TokenizerCounter,
    measure,
    open_client,
    reset_prefix_cache,
    served_model,
)
from eval.load import run_closed
from eval.options import new_file, positive
from eval.outside_tools import TOOLS, Load
from eval.prompts import sweep_requests
from eval.stats import geometric_mean_interval

TOLERANCE = 0.03
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
"""Told to be offline, AIPerf looks for a local tokenizer folder in the hub's cache. It needs no network without."""


def requests_of(seed: int, counter: TokenizerCounter, load: Load) -> list[ChatRequest]:
    """The chats of one run, those of its warm-up first: a single user message each, which every tool can send."""
    options: dict[str, object] = {"temperature": 0.0, "ignore_eos": True}
    made = islice(sweep_requests(seed, counter, load.prompt, load.output, options), load.warmup + load.requests)
    return [ChatRequest(item.messages[-1:], item.max_tokens, item.temperature, item.options) for item in made]


def our_numbers(items: Sequence[Measurement]) -> dict[str, float]:
    """The numbers from our client, and the means over requests of what the server says of its drafts; ValueError
    when a request failed."""
    bad = [item for item in items if item.outcome != "ok"]
    if bad or not items:
        raise ValueError(f"{len(bad)} of {len(items)} requests failed: {bad[0].error if bad else 'none were sent'}")
    wall = max(item.finished_at for item in items) - min(item.sent_at for item in items)
    numbers = {
        "ttft": fmean(item.ttft for item in items if item.ttft is not None),
        "tpot": fmean(item.tpot for item in items if item.tpot is not None),
        "tokens_per_second": sum(item.tokens for item in items) / wall,
        "ttft_p50": median(item.ttft for item in items if item.ttft is not None),
        "tpot_p50": median(item.tpot for item in items if item.tpot is not None),
    }
    drafted = [item.speculation for item in items if item.speculation]
    if drafted:
        numbers["acceptance_length"] = fmean(row["mean_acceptance_length"] for row in drafted)
        numbers["acceptance_rate"] = fmean(row["draft_acceptance_rate"] for row in drafted)
    return numbers


async def our_run(url: str, counter: TokenizerCounter, load: Load, seed: int) -> dict[str, float]:
    """Our client over one run's chats at a fixed concurrency."""
    requests = iter(requests_of(seed, counter, load))
    async with open_client(url) as client:
        model = await served_model(client)
        await run_closed(client, model, islice(requests, load.warmup), load.concurrency, float("inf"))
        records = await run_closed(client, model, requests, load.concurrency, float("inf"))
    return our_numbers([measure(record, counter) for record in records])


async def prepare(url: str, counter: TokenizerCounter, load: Load, seed: int) -> tuple[str, bool]:
    """First-use costs out of the way: two rounds of the streams, not measured. The model's name, and whether the server
    forgets its prefix cache on request."""
    requests = requests_of(seed, counter, Load(load.concurrency, 2 * load.concurrency, load.prompt, load.output))
    async with open_client(url) as client:
        model = await served_model(client)
        await run_closed(client, model, iter(requests), load.concurrency, float("inf"))
        return model, await reset_prefix_cache(client)


async def forget(url: str) -> None:
    """The prefix cache as at the start; ConnectionError where the server no longer does that."""
    async with open_client(url) as client:
        if not await reset_prefix_cache(client):
            raise ConnectionError(f"{url} no longer resets its prefix cache")


def tool_run(
    name: str,
    program: str,
    url: str,
    model: str,
    model_dir: Path,
    prompts: Sequence[str],
    load: Load,
    keep: Path | None = None,
) -> dict[str, float]:
    """One run of an outside tool; RuntimeError with the end of its output when it fails. ``keep``: a new folder for its
    files and its output, kept whatever comes of the run."""
    tool = TOOLS[name]
    with ExitStack() as stack:
        folder = keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        tool.write(folder, prompts, load)
        command = tool.command(program, url, model, model_dir, load, folder)
        environ = {key: value for key, value in os.environ.items() if key not in OFFLINE}
        result = subprocess.run(command, capture_output=True, text=True, env=environ)
        (folder / "output.txt").write_text(result.stdout + result.stderr)
        if result.returncode:
            raise RuntimeError(
                f"{name} ended with code {result.returncode}:\n{(result.stdout + result.stderr)[-2000:]}"
            )
        return tool.read(folder)


def compare(ours: Sequence[dict[str, float]], theirs: Sequence[dict[str, float]]) -> list[dict[str, Any]]:
    """Every number above 0 that both sides have in every round: means, mean difference of the rounds (with its 95 %
    interval from two rounds on), and whether it is within the tolerance."""
    rows = []
    for name in ours[0]:
        if not all(row.get(name, 0.0) > 0 for row in (*ours, *theirs)):
            continue
        ratio = geometric_mean_interval([a[name] / b[name] for a, b in zip(ours, theirs, strict=True)])
        means = (fmean(row[name] for row in side) for side in (ours, theirs))
        rows.append({"what": name, **dict(zip(("ours", "theirs"), means, strict=True)), "difference": ratio.value - 1,
                     "low": ratio.low - 1, "high": ratio.high - 1,
                     "agrees": abs(ratio.value - 1) <= TOLERANCE})  # fmt: skip
    return rows


def row_line(row: dict[str, Any], tool: str, rounds: int) -> str:
    """One compared number as text."""
    spread = f" ({row['low']:+.2%} .. {row['high']:+.2%})" if rounds > 1 else ""
    state = "agrees" if row["agrees"] else "DIFFERS"
    return (f"{row['what']:20}ours {row['ours']:10.5g}   {tool} {row['theirs']:10.5g}   "
            f"{row['difference']:+.2%}{spread}  {state}")  # fmt: skip


@dataclass(frozen=True)
class Rounds:
    """What all rounds share. ``resets``: the server forgets its prefix cache, so all runs have the same prompts."""

    url: str
    model_dir: Path
    model: str
    programs: dict[str, str]
    load: Load
    resets: bool
    keep: Path | None

    def seeds(self, first: int, number: int) -> dict[str, int]:
        """The seed of each run of round ``number`` in the order in which they run: it turns by one every round."""
        names = ["ours", *self.programs]
        base = first + number * len(names)
        seeds = {name: base + (0 if self.resets else index) for index, name in enumerate(names)}
        turn = number % len(names)
        return {name: seeds[name] for name in names[turn:] + names[:turn]}

    def run(self, counter: TokenizerCounter, first: int, number: int) -> dict[str, dict[str, float]]:
        """One round: every client over prompts of the same shape; its numbers."""
        found = {}
        for name, seed in self.seeds(first, number).items():
            if self.resets:
                asyncio.run(forget(self.url))
            if name == "ours":
                found[name] = asyncio.run(our_run(self.url, counter, self.load, seed))
                continue
            prompts = [item.messages[0]["content"] for item in requests_of(seed, counter, self.load)]
            folder = self.keep / f"{name}-{number + 1}" if self.keep else None
            found[name] = tool_run(
                name, self.programs[name], self.url, self.model, self.model_dir, prompts, self.load, folder
            )
        return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.referee", description=__doc__)
    for name in TOOLS:
        parser.add_argument(f"--{name}", help=f"the {name} program, for example VENV/bin/{name}")
    parser.add_argument("--url", required=True)
    parser.add_argument("--model-dir", type=Path, required=True, help="model folder; AIPerf wants it relative")
    parser.add_argument("--concurrency", type=positive, default=4)
    parser.add_argument("--requests", type=positive, default=40, help="requests of each run (default: 40)")
    parser.add_argument("--prompt", type=positive, default=120)
    parser.add_argument("--output", type=positive, default=64)
    parser.add_argument("--pairs", type=positive, default=2, help="runs of each tool, in turns (default: 2)")
    parser.add_argument("--seed", type=int, default=1000, help="prompts of the first round; every round has its own")
    parser.add_argument("--keep", type=Path, help="folder for the tools' own files and output")
    parser.add_argument("--json", type=new_file, help="write the comparison here")
    args = parser.parse_args(argv)
    programs = {name: getattr(args, name) for name in TOOLS if getattr(args, name)}
    if not programs:
        parser.error("name at least one tool: " + ", ".join(f"--{name}" for name in TOOLS))
    load = Load(args.concurrency, args.requests, args.prompt, args.output, warmup=2 * args.concurrency)
    rounds: list[dict[str, dict[str, float]]] = []
    code = 0
    try:
        counter = TokenizerCounter(args.model_dir)
        model, resets = asyncio.run(prepare(args.url, counter, load, args.seed - 1))
        shared = Rounds(args.url, args.model_dir, model, programs, load, resets, args.keep)
        for number in range(args.pairs):
            rounds.append(shared.run(counter, args.seed, number))
            print(f"round {number + 1} of {args.pairs} is done", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print("interrupted: finished rounds are kept", file=sys.stderr)
        code = 130
    except (OSError, RuntimeError, ValueError) as fault:
        print(f"{fault}\nfinished rounds are kept: {len(rounds)}", file=sys.stderr)
        code = 1
    if not rounds:
        return code
    ours = [found["ours"] for found in rounds]
    rows = {name: compare(ours, [found[name] for found in rounds]) for name in programs}
    for name, compared in rows.items():
        for row in compared:
            print(row_line(row, name, len(rounds)))
    same = "the same prompts, prefix cache reset before every run" if resets else "prompts of its own for every run"
    print(f"{len(rounds)} rounds of {load.requests} requests, {load.concurrency} at a time; {same}")
    if args.json:
        kept = {"rows": rows, "rounds": rounds, "load": vars(load), "same_prompts": resets}
        args.json.write_text(json.dumps(kept, indent=1) + "\n")
    return code or int(not all(row["agrees"] for compared in rows.values() for row in compared))


if __name__ == "__main__":
    sys.exit(main())
