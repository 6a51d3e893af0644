"""``python -m eval.referee``: AIPerf against the same server as our client, in turns, and whether the two agree.

AIPerf lives in a virtual environment of its own and is called as a program; this file knows its command line and the
names in its JSON export. Agreement is within 3 % on TTFT, TPOT and tokens/s. It does not judge the server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

from eval.client import ChatRequest, Measurement, TokenizerCounter, measure, open_client, served_model
from eval.load import run_closed
from eval.prompts import sweep_requests

TOLERANCE = 0.03
# our name -> (AIPerf's name, factor to our unit). AIPerf's "inter token latency" is our tpot.
AIPERF_NAMES = {
    "ttft": ("time_to_first_token", 1e-3),
    "tpot": ("inter_token_latency", 1e-3),
    "tokens_per_second": ("output_token_throughput", 1.0),
}


def aiperf_command(
    program: str,
    url: str,
    model: str,
    tokenizer: Path,
    concurrency: int,
    count: int,
    prompt: int,
    output: int,
    folder: Path,
) -> list[str]:
    """The command line of one AIPerf run with the load that ``our_run`` makes."""
    load = ["--concurrency", concurrency, "--request-count", count]
    shape = ["--synthetic-input-tokens-mean", prompt, "--output-tokens-mean", output]
    fixed = ["--endpoint-type", "chat", "--streaming", "--ui", "none", "--use-legacy-max-tokens"]
    fixed += ["--extra-inputs", "temperature:0", "--extra-inputs", "ignore_eos:true"]
    where = ["--model", model, "--url", url, "--tokenizer", tokenizer, "--artifact-dir", folder]
    return [str(part) for part in (program, "profile", *where, *load, *shape, *fixed)]


def read_aiperf(folder: Path) -> dict[str, float]:
    """TTFT, TPOT (seconds, means) and output tokens/s of a finished AIPerf run; ValueError names what is missing."""
    path = folder / "profile_export_aiperf.json"
    if not path.is_file():
        raise ValueError(f"AIPerf left no {path.name} in {folder}")
    exported: dict[str, Any] = json.loads(path.read_text())
    found: dict[str, float] = {}
    for name, (theirs, factor) in AIPERF_NAMES.items():
        if not isinstance(exported.get(theirs), dict):
            raise ValueError(f"{path.name} has no {theirs}")
        found[name] = float(exported[theirs]["avg"]) * factor
    return found


def our_numbers(items: Sequence[Measurement]) -> dict[str, float]:
    """The same three numbers from our client; ValueError when a request failed."""
    bad = [item for item in items if item.outcome != "ok"]
    if bad or not items:
        raise ValueError(f"{len(bad)} of {len(items)} requests failed: {bad[0].error if bad else 'none were sent'}")
    wall = max(item.finished_at for item in items) - min(item.sent_at for item in items)
    return {
        "ttft": fmean(item.ttft for item in items if item.ttft is not None),
        "tpot": fmean(item.tpot for item in items if item.tpot is not None),
        "tokens_per_second": sum(item.tokens for item in items) / wall,
    }


async def our_run(
    url: str, counter: TokenizerCounter, concurrency: int, count: int, prompt: int, output: int, seed: int
) -> tuple[str, dict[str, float]]:
    """Our client with ``count`` requests at a fixed concurrency: the model's name and the numbers."""
    options: dict[str, object] = {"temperature": 0.0, "ignore_eos": True}
    requests: Iterator[ChatRequest] = islice(sweep_requests(seed, counter, prompt, output, options), count)
    async with open_client(url) as client:
        model = await served_model(client)
        records = await run_closed(client, model, requests, concurrency, float("inf"))
    return model, our_numbers([measure(record, counter) for record in records])


def compare(ours: dict[str, float], theirs: dict[str, float]) -> list[dict[str, Any]]:
    """Both numbers, their difference, and whether it is within the tolerance."""
    rows = []
    for name, value in ours.items():
        difference = value / theirs[name] - 1
        rows.append({"what": name, "ours": value, "aiperf": theirs[name], "difference": difference,
                     "agrees": abs(difference) <= TOLERANCE})  # fmt: skip
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.referee", description=__doc__)
    parser.add_argument("--aiperf", default="aiperf", help="the aiperf program, for example VENV/bin/aiperf")
    parser.add_argument("--url", required=True)
    parser.add_argument("--model-dir", type=Path, required=True, help="model folder; AIPerf wants it relative")
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--requests", type=int, default=40, help="requests of each run (default: 40)")
    parser.add_argument("--prompt", type=int, default=120)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=2, help="runs of each tool, in turns (default: 2)")
    parser.add_argument("--json", type=Path, help="write the comparison here")
    args = parser.parse_args(argv)
    counter = TokenizerCounter(args.model_dir)
    ours: list[dict[str, float]] = []
    theirs: list[dict[str, float]] = []
    shape = (args.concurrency, args.requests, args.prompt, args.output)
    for index in range(args.pairs):
        model, numbers = asyncio.run(our_run(args.url, counter, *shape, seed=1000 + index))
        ours.append(numbers)
        with tempfile.TemporaryDirectory() as folder:
            command = aiperf_command(args.aiperf, args.url, model, args.model_dir, *shape, Path(folder))
            result = subprocess.run([*command, "--random-seed", str(index)], capture_output=True, text=True)
            if result.returncode:
                print(f"aiperf ended with code {result.returncode}:\n{result.stdout[-2000:]}", file=sys.stderr)
                return 1
            theirs.append(read_aiperf(Path(folder)))
    mean = [{name: fmean(run[name] for run in runs) for name in AIPERF_NAMES} for runs in (ours, theirs)]
    rows = compare(*mean)
    for row in rows:
        state = "agrees" if row["agrees"] else "DIFFERS"
        print(f"{row['what']:20}ours {row['ours']:10.5g}   aiperf {row['aiperf']:10.5g}   "
              f"{row['difference']:+.2%}  {state}")  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps({"rows": rows, "ours": ours, "aiperf": theirs}, indent=1) + "\n")
    return 0 if all(row["agrees"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
