"""``python -m eval.paired``: the naive reference and our server in turn on one machine, and how far apart they are.

Alternating pairs (the order flips every pair) put slow minutes of the machine on both sides; ratios are taken within a
pair. Rankings within 3 % are ties. On a GPU with too little memory for both, ``--residency alternate`` starts one
server at a time. It can compare any two servers through ``--naive-command`` and ``--server-command``.

The naive server answers one request at a time, so its rate in a burst does not depend on the burst's size:
``--naive-burst`` measures it on fewer requests where a whole burst would take minutes. The report says so.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from eval.client import TokenCounter, TokenizerCounter
from eval.json_report import write_report
from eval.options import at_least, new_file, positive
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
            failed = base if base.value is None else new
            raise RuntimeError(f"{name} on {side}: {failed.status} {failed.details.get('why', '')}".rstrip())
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


def over_cap(naive: Sequence[Scenario], ours: Sequence[Scenario], factor: float, burst_share: float = 1.0) -> list[str]:
    """Scenarios that the grader would have stopped: ours took longer than ``factor`` times the naive wall.
    ``burst_share``: the part of the burst that the naive server was given."""
    walls = [base.wall / (burst_share if name == "S3" else 1.0) for name, base in zip(SCENARIOS, naive, strict=True)]
    return [name for name, wall, new in zip(SCENARIOS, walls, ours, strict=True) if new.wall > factor * wall]


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
    """Runs the pairs; finished pairs survive an interrupt, and ``on_pair`` is called after each of them."""

    def __init__(
        self, sides: dict[str, Start], args: argparse.Namespace, counter: TokenCounter, on_pair: Callable[[], None]
    ) -> None:
        self._sides = sides
        self._args = args
        self._counter = counter
        self._on_pair = on_pair
        self.shapes = shapes_from(args)
        self.naive_shapes = replace(self.shapes, burst_size=min(args.naive_burst or 10**9, self.shapes.burst_size))
        self.results: list[dict[str, list[Scenario]]] = []
        self.ratios: list[dict[str, float]] = []

    def run(self, stack: ExitStack) -> None:
        """All pairs, or as many as the time allows. With residency "together" both servers live in ``stack`` from the
        start, and start at the same time."""
        begin = time.monotonic()
        alive = self._start_all(stack) if self._args.residency == "together" else {}
        longest = 0.0
        for index in range(self._args.pairs):
            now = time.monotonic()
            if index and self._args.seconds and now - begin + longest > self._args.seconds:
                say(f"{self._args.seconds:g} s hold no further pair of {longest:.0f} s: {index} are kept")
                return
            order = list(self._sides) if index % 2 == 0 else list(self._sides)[::-1]
            pair = {name: self._side(name, index, alive) for name in order}
            longest = max(longest, time.monotonic() - now)
            self.ratios.append(pair_ratios(pair["naive"], pair["ours"]))
            self.results.append(pair)
            self._on_pair()

    def _start_all(self, stack: ExitStack) -> dict[str, ManagedServer]:
        servers = {name: start() for name, start in self._sides.items()}
        for name, server in servers.items():
            say(f"starting {name}")
            stack.callback(server.stop)
            server.launch()
        for name, server in servers.items():
            stack.enter_context(server)
            say(f"{name} is ready")
        return servers

    def _side(self, name: str, index: int, alive: dict[str, ManagedServer]) -> list[Scenario]:
        say(f"pair {index + 1} of {self._args.pairs}: {name}")
        holder: AbstractContextManager[ManagedServer] = nullcontext(alive[name]) if alive else self._sides[name]()
        with holder as server:
            if index == 0 or not alive:
                self._warm(server.url, name)
            shapes = self.naive_shapes if name == "naive" else self.shapes
            seed = self._args.seed + index
            found = measure_side(server.url, shapes, self._counter, seed, self._args.ignore_eos)
        for item in found:
            say(f"  {name}: {item.line()}")
        return found

    def _warm(self, url: str, name: str) -> None:
        """First-use costs (kernels, graphs, allocator) stay out of the pairs; prompts differ from the measured ones.
        The naive server does one thing at a time: after a short request of each kind it has met all it will meet, but
        on a card the long prompt is short too, and its size is new to the allocator."""
        small = Shapes(1, 60, 8, 1, 256, 2, 2, 60, 8, 1e9)
        if name == "ours" or self._args.device == "cuda":
            small = replace(small, long_input=self.shapes.long_input)
        if name == "ours":
            small = replace(small, burst_size=self.shapes.burst_size)
        asyncio.run(run_all(url, small, Baseline(), self._counter, -7, self._args.ignore_eos))

    def sizes(self) -> str:
        """The sizes as text; what the naive server was given instead, where that differs."""
        fewer = self.naive_shapes.burst_size
        note = f"; the naive server answered {fewer} of the burst" if fewer != self.shapes.burst_size else ""
        return self.shapes.label() + note

    def late(self) -> list[str]:
        """Scenarios in which ours passed the cap in any pair."""
        part = self.naive_shapes.burst_size / self.shapes.burst_size
        return sorted({name for pair in self.results
                       for name in over_cap(pair["naive"], pair["ours"], self._args.cap_factor, part)})  # fmt: skip

    def report(self) -> dict[str, Any]:
        """All finished pairs and their summary, for JSON."""
        return {
            "summary": {name: interval.to_json() for name, interval in summarise(self.ratios).items()},
            "pairs": self.ratios,
            "sizes": self.sizes(),
            "baseline": measured_baseline([pair["naive"] for pair in self.results], self.shapes),
            "raw": [{name: [asdict(item) for item in side] for name, side in pair.items()} for pair in self.results],
            "arguments": {key: str(value) for key, value in vars(self._args).items()},
        }


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
    parser.add_argument("--naive-burst", type=positive, help="requests of S3 that the naive server gets (default: all)")
    parser.add_argument("--seconds", type=at_least(0.1), help="no pair begins that would end later than this")
    parser.add_argument("--json", type=new_file, help="pairs and summary, written after every pair")
    add_shape_arguments(parser)
    args = parser.parse_args(argv)
    counts_with = args.tokenizer_dir if args.shape and args.tokenizer_dir else args.model_dir
    if not (counts_with / "tokenizer.json").is_file():
        parser.error(f"--model-dir or --tokenizer-dir: {counts_with} has no tokenizer.json")
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

        def keep() -> None:
            if args.json:
                write_report(args.json, pairing.report())

        pairing = Pairing(sides_of(args, model_dir), args, TokenizerCounter(model_dir), keep)
        code = 0
        try:
            pairing.run(stack)
        except KeyboardInterrupt:
            say("interrupted: finished pairs are kept")
            code = 130
        except (OSError, RuntimeError, ValueError) as fault:
            say(f"{fault}; finished pairs are kept")
            code = 1
    if not pairing.ratios:
        return code
    print(table(summarise(pairing.ratios), len(pairing.ratios)))
    print(f"sizes: {pairing.sizes()}")
    late = pairing.late()
    if late:
        print(f"TIMEOUT: {', '.join(late)} took more than {args.cap_factor:g} times the naive server's time")
    return code or (1 if late else 0)


if __name__ == "__main__":
    sys.exit(main())
