"""``python -m eval.referee``: load generators of others against the same server as our client, in turns.

Every run has prompts of its own, drawn in the same way, so that no tool finds another's prompts in the prefix cache.
Agreement is within 3 % on TTFT, TPOT and tokens/s. It does not judge the server, and the tools' options and files are
known elsewhere.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

from eval.client import ChatRequest, Measurement, TokenizerCounter, measure, open_client, served_model
from eval.load import run_closed
from eval.options import new_file, positive
from eval.outside_tools import TOOLS, Load
from eval.prompts import sweep_requests

TOLERANCE = 0.03
NUMBERS = ("ttft", "tpot", "tokens_per_second")


def requests_of(seed: int, counter: TokenizerCounter, load: Load) -> list[ChatRequest]:
    """The chats of one run: a single user message each, which every tool can send."""
    options: dict[str, object] = {"temperature": 0.0, "ignore_eos": True}
    made = islice(sweep_requests(seed, counter, load.prompt, load.output, options), load.requests)
    return [ChatRequest(item.messages[-1:], item.max_tokens, item.temperature, item.options) for item in made]


def our_numbers(items: Sequence[Measurement]) -> dict[str, float]:
    """The three numbers from our client; ValueError when a request failed."""
    bad = [item for item in items if item.outcome != "ok"]
    if bad or not items:
        raise ValueError(f"{len(bad)} of {len(items)} requests failed: {bad[0].error if bad else 'none were sent'}")
    wall = max(item.finished_at for item in items) - min(item.sent_at for item in items)
    return {
        "ttft": fmean(item.ttft for item in items if item.ttft is not None),
        "tpot": fmean(item.tpot for item in items if item.tpot is not None),
        "tokens_per_second": sum(item.tokens for item in items) / wall,
    }


async def our_run(url: str, counter: TokenizerCounter, load: Load, seed: int) -> tuple[str, dict[str, float]]:
    """Our client over one run's chats at a fixed concurrency: the model's name and the numbers."""
    requests = requests_of(seed, counter, load)
    async with open_client(url) as client:
        model = await served_model(client)
        records = await run_closed(client, model, iter(requests), load.concurrency, float("inf"))
    return model, our_numbers([measure(record, counter) for record in records])


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
        result = subprocess.run(command, capture_output=True, text=True)
        (folder / "output.txt").write_text(result.stdout + result.stderr)
        if result.returncode:
            raise RuntimeError(
                f"{name} ended with code {result.returncode}:\n{(result.stdout + result.stderr)[-2000:]}"
            )
        return tool.read(folder)


def compare(ours: dict[str, float], theirs: dict[str, float]) -> list[dict[str, Any]]:
    """Both numbers, their difference, and whether it is within the tolerance."""
    rows = []
    for name, value in ours.items():
        difference = value / theirs[name] - 1
        rows.append({"what": name, "ours": value, "theirs": theirs[name], "difference": difference,
                     "agrees": abs(difference) <= TOLERANCE})  # fmt: skip
    return rows


def one_round(
    args: argparse.Namespace, programs: dict[str, str], load: Load, seed: int, runs: dict[str, list[dict[str, float]]]
) -> None:
    """Our client, then every tool, each on prompts of its own; the numbers go to ``runs``."""
    counter = TokenizerCounter(args.model_dir)
    model, numbers = asyncio.run(our_run(args.url, counter, load, seed))
    runs["ours"].append(numbers)
    for offset, (name, program) in enumerate(programs.items(), 1):
        prompts = [item.messages[0]["content"] for item in requests_of(seed + offset, counter, load)]
        keep = args.keep / f"{name}-{seed}" if args.keep else None
        runs[name].append(tool_run(name, program, args.url, model, args.model_dir, prompts, load, keep))


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
    parser.add_argument("--seed", type=int, default=1000, help="prompts of the first run; every run has its own")
    parser.add_argument("--keep", type=Path, help="folder for the tools' own files and output")
    parser.add_argument("--json", type=new_file, help="write the comparison here")
    args = parser.parse_args(argv)
    programs = {name: getattr(args, name) for name in TOOLS if getattr(args, name)}
    if not programs:
        parser.error("name at least one tool: " + ", ".join(f"--{name}" for name in TOOLS))
    load = Load(args.concurrency, args.requests, args.prompt, args.output)
    runs: dict[str, list[dict[str, float]]] = {"ours": [], **{name: [] for name in programs}}
    try:
        for pair in range(args.pairs):
            one_round(args, programs, load, args.seed + pair * (1 + len(programs)), runs)
    except KeyboardInterrupt:
        print("interrupted: finished rounds are kept", file=sys.stderr)
    except (OSError, RuntimeError, ValueError) as fault:
        print(fault, file=sys.stderr)
        return 1
    done = min(len(column) for column in runs.values())
    if not done:
        return 130
    runs = {name: column[:done] for name, column in runs.items()}
    means = {name: {key: fmean(run[key] for run in done) for key in NUMBERS} for name, done in runs.items()}
    rows = {name: compare(means["ours"], means[name]) for name in programs}
    for name, compared in rows.items():
        for row in compared:
            state = "agrees" if row["agrees"] else "DIFFERS"
            print(f"{row['what']:20}ours {row['ours']:10.5g}   {name} {row['theirs']:10.5g}   "
                  f"{row['difference']:+.2%}  {state}")  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps({"rows": rows, "runs": runs, "load": vars(load)}, indent=1) + "\n")
    return 0 if all(row["agrees"] for compared in rows.values() for row in compared) else 1


if __name__ == "__main__":
    sys.exit(main())
