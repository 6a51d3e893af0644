"""``python -m eval.paired``: the naive reference and our server in turn on one machine, and how far apart they are.

Alternating pairs (the order flips every pair) put slow minutes of the machine on both sides; ratios are taken within a
pair. Rankings within 3 % are ties. On a GPU with too little memory for both, ``--residency alternate`` starts one
server at a time. It can compare any two servers through ``--naive-command`` and ``--server-command``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median

from eval.client import TokenCounter, TokenizerCounter
from eval.options import new_file, positive
from eval.scenarios import Baseline, Scenario, Shapes, add_shape_arguments, run_all, shapes_from
from eval.servers import ROOT, ManagedServer, end_on_sigterm, naive_server, our_server
from eval.stats import Interval, geometric_mean, geometric_mean_interval, is_tie

SCENARIOS = ("S1", "S2", "S3")
Start = Callable[[], ManagedServer]


def measure_side(url: str, shapes: Shapes, counter: TokenCounter, seed: int, ignore_eos: bool) -> list[Scenario]:
    """The three scenarios against one server. No cap here: the baseline of this machine is what is being measured."""
    uncapped = Shapes(**{**asdict(shapes), "cap_factor": 1e9})
    return asyncio.run(run_all(url, uncapped, Baseline(), counter, seed, ignore_eos))


def pair_ratios(naive: Sequence[Scenario], ours: Sequence[Scenario]) -> dict[str, float]:
    """Speed-up of ours over naive for each scenario of one pair; RuntimeError when a side has no result."""
    ratios: dict[str, float] = {}
    for name, base, new in zip(SCENARIOS, naive, ours, strict=True):
        if base.value is None or new.value is None:
            side = "naive" if base.value is None else "ours"
            raise RuntimeError(f"{name} on {side}: {base.status if base.value is None else new.status} "
                               f"{(base if base.value is None else new).details.get('errors')}")  # fmt: skip
        ratios[name] = new.value / base.value if name == "S3" else base.value / new.value
    return ratios


def summarise(pairs: Sequence[dict[str, float]]) -> dict[str, Interval]:
    """Geometric mean and 95 % interval of each speed-up and of the score over the pairs."""
    result = {name: geometric_mean_interval([pair[name] for pair in pairs]) for name in SCENARIOS}
    result["score"] = geometric_mean_interval([geometric_mean(list(pair.values())) for pair in pairs])
    return result


def measured_baseline(runs: Sequence[Sequence[Scenario]], shapes: Shapes) -> dict[str, float | str]:
    """This machine's baseline in the form ``eval.scenarios --baseline`` reads: medians over the pairs."""
    tpot, ttft, throughput = (median(run[index].value or 0.0 for run in runs) for index in range(3))
    ttft *= 4096 / shapes.long_input
    return {"tpot": tpot, "ttft": ttft, "throughput": throughput, "source": f"paired run, {len(runs)} pairs"}


def over_cap(naive: Sequence[Scenario], ours: Sequence[Scenario], factor: float) -> list[str]:
    """Scenarios that the grader would have stopped: ours took longer than ``factor`` times the naive wall."""
    return [name for name, base, new in zip(SCENARIOS, naive, ours, strict=True) if new.wall > factor * base.wall]


def table(summary: dict[str, Interval], pairs: int) -> str:
    """The result as text."""
    lines = [f"{'':28}{'speed-up':>10}{'95 % interval':>22}   ({pairs} pairs)"]
    titles = {"S1": "S1 interactive TPOT", "S2": "S2 long-prompt TTFT", "S3": "S3 burst throughput"}
    for name, interval in summary.items():
        spread = f"{interval.low:.3f} .. {interval.high:.3f}" if pairs > 1 else "(needs 2 pairs)"
        lines.append(f"{titles.get(name, 'geometric mean'):28}{interval.value:10.3f}{spread:>22}")
    if is_tie(summary["score"].value, 1.0):
        lines.append("the two servers tie: within 3 %")
    return "\n".join(lines)


class Pairing:
    """Runs the pairs; finished pairs survive an interrupt."""

    def __init__(self, sides: dict[str, Start], args: argparse.Namespace, counter: TokenCounter) -> None:
        self._sides = sides
        self._args = args
        self._counter = counter
        self.shapes = shapes_from(args)
        self.results: list[dict[str, list[Scenario]]] = []
        self.ratios: list[dict[str, float]] = []

    def run(self, stack: ExitStack) -> None:
        """All pairs. With residency "together" both servers live in ``stack`` from the start."""
        alive: dict[str, ManagedServer] = {}
        if self._args.residency == "together":
            for name, start in self._sides.items():
                say(f"starting {name}")
                alive[name] = stack.enter_context(start())
        for index in range(self._args.pairs):
            order = list(self._sides) if index % 2 == 0 else list(self._sides)[::-1]
            pair: dict[str, list[Scenario]] = {}
            for name in order:
                say(f"pair {index + 1} of {self._args.pairs}: {name}")
                holder: AbstractContextManager[ManagedServer] = (
                    nullcontext(alive[name]) if alive else self._sides[name]()
                )
                with holder as server:
                    if index == 0 or not alive:
                        self._warm(server.url, name)
                    pair[name] = measure_side(
                        server.url, self.shapes, self._counter, self._args.seed + index, self._args.ignore_eos
                    )
                for item in pair[name]:
                    say(f"  {name}: {item.line()}")
            self.ratios.append(pair_ratios(pair["naive"], pair["ours"]))
            self.results.append(pair)

    def _warm(self, url: str, name: str) -> None:
        """First-use costs (kernels, graphs, allocator) stay out of the pairs; prompts differ from the measured ones.
        The naive server does one thing at a time: after a short request of each kind it has met all it will meet."""
        small = Shapes(1, 60, 8, 1, 256, 2, 2, 60, 8, 1e9)
        if name == "ours":
            small = replace(small, long_input=self.shapes.long_input, burst_size=self.shapes.burst_size)
        asyncio.run(run_all(url, small, Baseline(), self._counter, -7, self._args.ignore_eos))


def say(text: str) -> None:
    """Progress goes to stderr, so that stdout holds the result only."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m eval.paired", description=__doc__)
    parser.add_argument("--model-dir", type=Path, default=ROOT / "models" / "smollm2-135m-instruct")
    parser.add_argument("--shape", help="random weights of this shape instead of --model-dir (see data/shapes.json)")
    parser.add_argument("--tokenizer-dir", type=Path, help="tokenizer for --shape (default: that of --model-dir)")
    parser.add_argument("--dtype", choices=("fp32", "fp16", "bf16"), help="default: fp32 on a CPU, fp16 on CUDA")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--pairs", type=positive, default=5, help="pairs of runs (default: 5)")
    parser.add_argument(
        "--residency", choices=("together", "alternate"), help="default: together on a CPU, else alternate"
    )
    parser.add_argument("--ignore-eos", action="store_true", help="ask for full-length answers (default with --shape)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--serve-arg", action="append", default=[], help="further argument for our server (repeatable)")
    parser.add_argument("--naive-command", help="another command for the naive side, {port} is filled in")
    parser.add_argument("--server-command", help="another command for our side, {port} is filled in")
    parser.add_argument("--json", type=new_file, help="write all pairs and the summary here")
    add_shape_arguments(parser)
    args = parser.parse_args(argv)
    args.residency = args.residency or ("together" if args.device == "cpu" else "alternate")
    args.dtype = args.dtype or ("fp32" if args.device == "cpu" else "fp16")
    args.ignore_eos = args.ignore_eos or bool(args.shape)
    return args


def sides_of(args: argparse.Namespace, model_dir: Path) -> dict[str, Start]:
    """How each side is started."""

    def naive() -> ManagedServer:
        if args.naive_command:
            return ManagedServer(shlex.split(args.naive_command), "naive")
        return naive_server(model_dir, "--device", args.device, "--dtype", args.dtype)

    def ours() -> ManagedServer:
        if args.server_command:
            return ManagedServer(shlex.split(args.server_command), "ours")
        return our_server(model_dir, "ours", "--device", args.device, *args.serve_arg)

    return {"naive": naive, "ours": ours}


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    end_on_sigterm()
    with ExitStack() as stack:
        model_dir: Path = args.model_dir
        if args.shape:
            import torch

            from eval.random_model import write_random_model

            say(f"writing random weights of {args.shape}")
            dtypes = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / args.shape
            source = args.tokenizer_dir or args.model_dir
            model_dir = write_random_model(args.shape, source, folder, dtypes[args.dtype], device=args.device)
        pairing = Pairing(sides_of(args, model_dir), args, TokenizerCounter(model_dir))
        try:
            pairing.run(stack)
        except KeyboardInterrupt:
            say("interrupted: finished pairs are kept")
    if not pairing.ratios:
        return 130
    summary = summarise(pairing.ratios)
    print(table(summary, len(pairing.ratios)))
    print(f"sizes: {pairing.shapes.label()}")
    late = {name for pair in pairing.results for name in over_cap(pair["naive"], pair["ours"], args.cap_factor)}
    if late:
        print(f"TIMEOUT: {', '.join(sorted(late))} took more than {args.cap_factor:g} times the naive server's time")
    if args.json:
        report = {
            "summary": {name: interval.to_json() for name, interval in summary.items()},
            "pairs": pairing.ratios,
            "baseline": measured_baseline([pair["naive"] for pair in pairing.results], pairing.shapes),
            "raw": [{name: [asdict(item) for item in side] for name, side in pair.items()} for pair in pairing.results],
            "arguments": {key: str(value) for key, value in vars(args).items()},
        }
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main())
