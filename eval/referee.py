"""``python -m eval.referee``: load generators of others against the same server as our client, in turns.

Every run of a round has the same prompts where the server forgets its prefix cache on request (``--dev-routes``), else
prompts of its own of the same shape, so that no tool finds another's in the cache. Answers have lengths of their own,
the same for every tool, the order turns by one every round, every run has a warm-up that it does not count, and
differences are taken within a round. Beside them stands what the server itself says of TTFT in each run. Agreement is
within 3 % on TTFT, TPOT and tokens/s, means and medians, and on what each says of drafts. Finished rounds are on disk
at once, and Ctrl-C and SIGTERM keep them. It does not judge the server; the tools' options and files, and what
agreement is, are known elsewhere.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx

from eval.agreement import ClientRun, compare, latency_numbers, row_line, server_line
from eval.client import (
    ChatRequest,
    Measurement,
    TokenizerCounter,
    measure,
    open_client,
    reset_prefix_cache,
    served_model,
)
from eval.json_report import write_report
from eval.load import run_closed, run_open
from eval.metrics import parse_metrics
from eval.options import at_least, new_file, not_negative, positive
from eval.outside_tools import TOOLS, Load
from eval.prompts import sweep_requests
from eval.servers import end_on_sigterm

SERVER_TTFT = "vllm:time_to_first_token_seconds"
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
"""Told to be offline, AIPerf looks for a local tokenizer folder in the hub's cache. It needs no network without."""


def requests_of(seed: int, counter: TokenizerCounter, load: Load) -> list[ChatRequest]:
    """The chats of one run, those of its warm-up first: a single user message each, which every tool can send, and a
    length of answer drawn by the seed."""
    options: dict[str, object] = {"temperature": 0.0, "ignore_eos": True}
    made = islice(sweep_requests(seed, counter, load.prompt, load.output, options), load.warmup + load.requests)
    rng = random.Random(f"referee/{seed}/lengths")
    lengths = (load.output + rng.randint(-load.spread, load.spread) for _ in range(load.warmup + load.requests))
    return [replace(item, messages=item.messages[-1:], max_tokens=length, category="")
            for item, length in zip(made, lengths, strict=True)]  # fmt: skip


def our_numbers(items: Sequence[Measurement]) -> ClientRun:
    """The numbers from our client, and the means over requests of what the server says of its drafts; ValueError
    when a request failed."""
    bad = [item for item in items if item.outcome != "ok"]
    if bad or not items:
        raise ValueError(f"{len(bad)} of {len(items)} requests failed: {bad[0].error if bad else 'none were sent'}")
    wall = max(item.finished_at for item in items) - min(item.sent_at for item in items)
    samples = {"ttft": tuple(item.ttft for item in items if item.ttft is not None),
               "tpot": tuple(item.tpot for item in items if item.tpot is not None)}  # fmt: skip
    numbers = {**latency_numbers(samples), "tokens_per_second": sum(item.tokens for item in items) / wall}
    drafted = [item.speculation for item in items if item.speculation]
    if drafted:
        numbers["acceptance_length"] = fmean(row["mean_acceptance_length"] for row in drafted)
        numbers["acceptance_rate"] = fmean(row["draft_acceptance_rate"] for row in drafted)
    return ClientRun(numbers, samples)


async def our_run(url: str, counter: TokenizerCounter, load: Load, seed: int) -> ClientRun:
    """Our client over one run's chats, at a fixed concurrency or a fixed rate."""
    requests, forever = iter(requests_of(seed, counter, load)), float("inf")
    async with open_client(url) as client:
        model = await served_model(client)
        for part in (islice(requests, load.warmup), requests):
            if load.rate:
                records = await run_open(client, model, part, load.rate, forever, seed, spacing="constant")
            else:
                records = await run_closed(client, model, part, load.concurrency, forever)
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


def served_ttft(url: str) -> tuple[float, float]:
    """Sum (seconds) and number of the times to the first token that the server has counted so far; zeros where it does
    not say."""
    with suppress(httpx.HTTPError):
        page = httpx.get(f"{url.rstrip('/')}/metrics", timeout=5.0, trust_env=False)
        if page.status_code == 200:
            sums = parse_metrics(page.text)
            return sums.get(f"{SERVER_TTFT}_sum", 0.0), sums.get(f"{SERVER_TTFT}_count", 0.0)
    return 0.0, 0.0


def tool_run(
    name: str,
    program: str,
    url: str,
    model: str,
    model_dir: Path,
    requests: Sequence[ChatRequest],
    load: Load,
    keep: Path | None = None,
) -> ClientRun:
    """One run of an outside tool; RuntimeError with the end of its output when it fails. ``keep``: a new folder for its
    files and its output, kept whatever comes of the run. The tool and what it started end with this call."""
    tool = TOOLS[name]
    with ExitStack() as stack:
        folder = keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        tool.write(folder, requests)
        command = tool.command(program, url, model, model_dir, load, folder)
        environ = {key: value for key, value in os.environ.items() if key not in OFFLINE}
        with (folder / "output.txt").open("w") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=environ, start_new_session=True
            )
            try:
                code = process.wait()
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if code:
            said = (folder / "output.txt").read_text(errors="replace")
            raise RuntimeError(f"{name} ended with code {code}:\n{said[-2000:]}")
        return tool.read(folder)


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

    def run(self, counter: TokenizerCounter, first: int, number: int) -> dict[str, ClientRun]:
        """One round: every client over the same chats, or over its own of the same shape; what each says."""
        found = {}
        for name, seed in self.seeds(first, number).items():
            if self.resets:
                asyncio.run(forget(self.url))
            seconds, count = served_ttft(self.url)
            run = self._client(name, counter, seed, number)
            more_seconds, more = served_ttft(self.url)
            own = (more_seconds - seconds) / (more - count) if more > count else None
            found[name] = replace(run, server_ttft=own)
        return found

    def _client(self, name: str, counter: TokenizerCounter, seed: int, number: int) -> ClientRun:
        if name == "ours":
            return asyncio.run(our_run(self.url, counter, self.load, seed))
        requests = requests_of(seed, counter, self.load)
        folder = self.keep / f"{name}-{number + 1}" if self.keep else None
        program = self.programs[name]
        return tool_run(name, program, self.url, self.model, self.model_dir, requests, self.load, folder)

    def judge(self, rounds: Sequence[dict[str, ClientRun]]) -> dict[str, Any]:
        """The finished rounds compared, and all of what was measured."""
        ours = [found["ours"] for found in rounds]
        rows = {name: compare(ours, [found[name] for found in rounds]) for name in self.programs}
        told = [{name: run.to_json() for name, run in found.items()} for found in rounds]
        return {"rows": rows, "rounds": told, "load": vars(self.load), "same_prompts": self.resets}

    def lines(self, rounds: Sequence[dict[str, ClientRun]], judged: dict[str, Any]) -> list[str]:
        """The comparison as text."""
        ours = [found["ours"] for found in rounds]
        lines = []
        for name, compared in judged["rows"].items():
            lines += [row_line(row, name, len(rounds)) for row in compared]
            beside = server_line(name, ours, [found[name] for found in rounds])
            lines += [beside] if beside else []
        same = (
            "the same prompts, prefix cache reset before every run" if self.resets else "prompts of its own every run"
        )
        load = self.load
        pace = f"{load.rate:g} a second at even spaces" if load.rate else f"{load.concurrency} at a time"
        shape = f"prompts of {load.prompt} tokens, answers of {load.output}, {load.spread} more or less"
        lines.append(f"{len(rounds)} rounds of {load.requests} requests, {pace}, {shape}; {same}")
        return lines


def write_whole(path: Path, judged: dict[str, Any]) -> None:
    """The file is the old one or the new one at any time."""
    beside = path.with_name(path.name + ".part")
    write_report(beside, judged)
    beside.replace(path)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m eval.referee", description=__doc__)
    for name in TOOLS:
        parser.add_argument(f"--{name}", help=f"the {name} program, for example VENV/bin/{name}")
    parser.add_argument("--url", required=True)
    parser.add_argument("--model-dir", type=Path, required=True, help="model folder; AIPerf wants it relative")
    parser.add_argument("--concurrency", type=positive, default=4)
    parser.add_argument(
        "--rate", type=at_least(1e-6), default=0.0, help="start so many a second at even spaces instead"
    )
    parser.add_argument("--requests", type=positive, default=40, help="requests of each run (default: 40)")
    parser.add_argument("--prompt", type=positive, default=120)
    parser.add_argument("--output", type=positive, default=64)
    parser.add_argument(
        "--spread", type=not_negative, help="answers are up to so many tokens longer or shorter (default: a quarter)"
    )
    parser.add_argument("--pairs", type=positive, default=2, help="runs of each tool, in turns (default: 2)")
    parser.add_argument("--seed", type=int, default=1000, help="prompts of the first round; every round has its own")
    parser.add_argument("--keep", type=Path, help="folder for the tools' own files and output")
    parser.add_argument("--json", type=new_file, help="write the comparison here, after every round")
    args = parser.parse_args(argv)
    args.programs = {name: getattr(args, name) for name in TOOLS if getattr(args, name)}
    if not args.programs:
        parser.error("name at least one tool: " + ", ".join(f"--{name}" for name in TOOLS))
    args.spread = args.output // 4 if args.spread is None else args.spread
    if args.spread >= args.output:
        parser.error(f"--spread {args.spread} must be below --output {args.output}: an answer has at least one token")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    end_on_sigterm()
    warmup = 2 * args.concurrency
    load = Load(args.concurrency, args.requests, args.prompt, args.output, warmup, args.spread, args.rate)
    rounds: list[dict[str, ClientRun]] = []
    judged: dict[str, Any] = {}
    code = 0
    try:
        counter = TokenizerCounter(args.model_dir)
        model, resets = asyncio.run(prepare(args.url, counter, load, args.seed - 1))
        shared = Rounds(args.url, args.model_dir, model, args.programs, load, resets, args.keep)
        for number in range(args.pairs):
            rounds.append(shared.run(counter, args.seed, number))
            judged = shared.judge(rounds)
            if args.json:
                write_whole(args.json, judged)
            print(f"round {number + 1} of {args.pairs} is done", file=sys.stderr, flush=True)
    except (KeyboardInterrupt, SystemExit) as end:
        print("interrupted: finished rounds are kept", file=sys.stderr)
        code = 130 if isinstance(end, KeyboardInterrupt) else int(end.code or 0)
    except (OSError, RuntimeError, ValueError) as fault:
        print(f"{fault}\nfinished rounds are kept: {len(rounds)}", file=sys.stderr)
        code = 1
    if not judged:
        return code
    print("\n".join(shared.lines(rounds, judged)))
    return code or int(not all(row["agrees"] for compared in judged["rows"].values() for row in compared))


if __name__ == "__main__":
    sys.exit(main())
