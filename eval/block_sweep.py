"""``python -m eval.block_sweep``: measured speed-up of fixed block lengths per batch size, beside the expected one.

Starts our server once per block length (0 is plain decoding), drives it with bursts of each batch size, and compares
with the speed-up that the first position's acceptance would predict. Lengths are visited in a shuffled order, repeated,
so that slow minutes of the machine do not fall on one length. Choosing a length is the server controller's job.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from eval.bench import Rates, drive
from eval.client import ChatRequest, TokenizerCounter
from eval.json_report import write_report
from eval.options import model_folder, new_file
from eval.prompts import copy_heavy, interactive
from eval.roofline import acceptance_length, speculative_speedup
from eval.servers import ROOT, end_on_sigterm, our_server


def speedups(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Batch size -> block length -> tokens/s over those of block length 0 in the same repeat, averaged over repeats."""
    plain = {(row["batch"], row["repeat"]): row["tokens_per_second"] for row in rows if row["block_length"] == 0}
    found: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        base = plain.get((row["batch"], row["repeat"]))
        if base:
            cell = found.setdefault(str(row["batch"]), {}).setdefault(str(row["block_length"]), [])
            cell.append(row["tokens_per_second"] / base)
    return {batch: {length: fmean(values) for length, values in cells.items()} for batch, cells in found.items()}


def implied_acceptance(tau: float, block_length: int) -> float:
    """Per-token acceptance that gives an acceptance length of ``tau`` at ``block_length`` (independent acceptance)."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if acceptance_length(middle, block_length) < tau else (low, middle)
    return (low + high) / 2


def expected(rows: Sequence[Mapping[str, Any]], draft_cost: float, row_cost: float) -> dict[str, dict[str, float]]:
    """Expected speed-up for the measured cells, from the median implied acceptance of each batch size.

    A verify of k drafts costs 1 + k * ``row_cost`` * batch plain steps.
    """
    result: dict[str, dict[str, float]] = {}
    for batch in sorted({int(row["batch"]) for row in rows}):
        seen = [implied_acceptance(row["tau"], row["block_length"]) for row in rows
                if row["batch"] == batch and row["block_length"] and row["tau"]]  # fmt: skip
        if not seen:
            continue
        share = median(seen)
        cells = {"0": 1.0}
        for length in sorted({int(row["block_length"]) for row in rows} - {0}):
            cost = 1 + length * row_cost * batch
            cells[str(length)] = speculative_speedup(acceptance_length(share, length), draft_cost, cost)
        result[str(batch)] = cells
    return result


def requests_of(kind: str, count: int, seed: int, counter: TokenizerCounter, max_tokens: int) -> list[ChatRequest]:
    """Chats or copy-heavy prompts."""
    if kind == "copy":
        return copy_heavy(count, seed, max_tokens)
    return interactive(count, seed, counter, max_tokens=max_tokens)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.block_sweep", description=__doc__)
    parser.add_argument("--model-dir", type=model_folder, default=str(ROOT / "models" / "smollm2-135m-instruct"))
    parser.add_argument("--drafter-dir", type=Path, help="block drafter; without it prompt lookup drafts")
    parser.add_argument("--block-lengths", type=int, nargs="+", default=[1, 3, 5, 7, 15], help="0 is always measured")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompts", choices=("chat", "copy"), default="chat")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument(
        "--draft-cost", type=float, default=0.12, help="time of a draft in plain steps, for the prediction"
    )
    parser.add_argument("--row-cost", type=float, default=0.1, help="time of a verified row in plain steps")
    parser.add_argument(
        "--serve-arg", action="append", default=[], help="further argument for our servers (repeatable)"
    )
    parser.add_argument("--png", type=Path, help="draw the chart here")
    parser.add_argument("--json", type=new_file, help="write all cells here")
    args = parser.parse_args(argv)
    end_on_sigterm()
    counter = TokenizerCounter(args.model_dir)
    proposer = ["--proposer", "lookup"]
    if args.drafter_dir:
        proposer = ["--proposer", "block", "--drafter-dir", str(args.drafter_dir.resolve())]
    rows: list[dict[str, Any]] = []
    code = 0
    try:
        for repeat in range(args.repeats):
            lengths = sorted({0, *args.block_lengths})
            random.Random(repeat).shuffle(lengths)
            for length in lengths:
                extra = [*proposer, "--block-length", str(length), *args.serve_arg]
                with our_server(args.model_dir, f"block length {length}", *extra) as server:
                    for batch in args.batches:
                        made = requests_of(args.prompts, batch, repeat * 100 + batch, counter, args.max_tokens)
                        result: Rates = drive(server.url, made, counter, at_once=True)
                        rows.append({"repeat": repeat, "block_length": length, "batch": batch, "tau": result.tau,
                                     "tokens_per_second": result.total})  # fmt: skip
                        print(f"[{time.strftime('%H:%M:%S')}] {rows[-1]}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print("interrupted: finished cells are kept", file=sys.stderr)
        code = 130
    measured, predicted = speedups(rows), expected(rows, args.draft_cost, args.row_cost)
    for batch, cells in measured.items():
        said = predicted.get(batch, {})
        text = "  ".join(f"{length}: {cells[length]:.2f} (expected {said.get(length, 1.0):.2f})"
                         for length in sorted(cells, key=int))  # fmt: skip
        print(f"batch {batch:>3}  {text}")
    if args.png:
        from eval.plots import png, speedup_figure

        args.png.write_bytes(png(speedup_figure(predicted or measured, measured)))
    if args.json:
        write_report(args.json, {"rows": rows, "measured": measured, "expected": predicted})
    return code


if __name__ == "__main__":
    sys.exit(main())
