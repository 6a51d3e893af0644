"""``python -m eval.bench``: speed ratios of one machine in one run, against transformers and against ourselves.

Every round measures all parties one after the other, so slow and fast minutes of the machine fall on all of them; the
ratios are taken within a round and averaged over rounds. It starts and stops all servers itself. It judges speed only:
whether the text is right is for the lossless audit and the accuracy gate.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from eval.client import (
    ChatRequest,
    Measurement,
    TokenizerCounter,
    measure,
    open_client,
    served_model,
    user_request,
)
from eval.json_report import write_report
from eval.load import run_burst, run_sequential
from eval.options import model_folder, new_file
from eval.prompts import burst, copy_heavy, interactive
from eval.servers import ROOT, ManagedServer, ServerFailed, end_on_sigterm, our_server
from eval.stats import Interval, geometric_mean_interval

BURST = 16
VERIFY_ROWS = 4
GIB = 1024**3
BUSY_SHARE = 0.5  # of the cores, as load average before the run
# ratio -> (what it is, target, whether more is better). The targets are the project's speed promises on two cores.
TARGETS: dict[str, tuple[str, float | None, bool]] = {
    "single_stream": ("one stream, plain decode / transformers generate fp32", 3.0, True),
    "burst": (f"burst of {BURST}, plain / transformers one at a time", 8.0, True),
    "verify": (f"verify of {VERIFY_ROWS} rows / one plain decode step", 1.5, False),
    "lookup_copy": ("copy-heavy prompts, prompt lookup / plain", 1.5, True),
    "lookup_chat": ("chats, prompt lookup / plain", None, True),
    "block_chat": ("chats, block drafter / plain", 1.2, True),
    "both_chat": ("chats, drafter and lookup / plain", None, True),
    # Two rates within 3 % of each other are a tie.
    "both_best": ("chats, drafter and lookup / the better one alone", 0.97, True),
    "block_burst": (f"burst of {BURST}, block drafter / plain", None, True),
    "memory_gib": ("resident memory of the default server, GiB", 3.0, False),
}


class Worker:
    """A measuring child process (``eval.bench_worker``) spoken to in JSON lines; ends with its ``with`` block."""

    def __init__(self, **setup: Any) -> None:
        self._setup = setup
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Worker:
        command = [sys.executable, "-m", "eval.bench_worker"]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            self.ask(**self._setup)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def ask(self, **command: Any) -> dict[str, Any]:
        """Sends one command, waits for its answer; RuntimeError if the child has died."""
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise RuntimeError("the worker is not running")
        process.stdin.write(json.dumps(command) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"the {self._setup.get('role')} worker died with code {process.wait()}")
        return dict(json.loads(line))


@dataclass(frozen=True)
class Rates:
    """Tokens/s of some requests: ``decode`` without each first chunk, ``total`` from the first send to the last end."""

    decode: float
    total: float
    tokens: int
    tau: float | None


def rates(measurements: Sequence[Measurement]) -> Rates:
    """Tokens a second of a batch; a failed or empty request ends the benchmark (ServerFailed)."""
    for item in measurements:
        if item.outcome != "ok":
            raise ServerFailed(f"a benchmark request ended as {item.outcome}: {item.error}")
    decode_tokens = sum(item.tokens - 1 for item in measurements if item.tpot is not None)
    decode_seconds = sum(item.tpot * (item.tokens - 1) for item in measurements if item.tpot is not None)
    wall = max(item.finished_at for item in measurements) - min(item.sent_at for item in measurements)
    tokens = sum(item.tokens for item in measurements)
    accepted = sum(item.speculation.get("num_accepted_draft_tokens", 0) for item in measurements)
    steps = sum(item.speculation.get("num_spec_steps", 0) for item in measurements)
    tau = 1 + accepted / steps if steps else None
    return Rates(decode_tokens / decode_seconds if decode_seconds else 0.0, tokens / wall, tokens, tau)


def drive(url: str, requests: Sequence[ChatRequest], counter: TokenizerCounter, at_once: bool) -> Rates:
    """Sends the requests to a server, all at once or one after the other."""

    async def work() -> list[Measurement]:
        async with open_client(url) as client:
            model = await served_model(client)
            records = await (run_burst if at_once else run_sequential)(client, model, requests)
            return [measure(record, counter) for record in records]

    return rates(asyncio.run(work()))


class Bench:
    """The parties of one run and one method per thing measured; rows of results collect in ``rounds``."""

    def __init__(self, args: argparse.Namespace, stack: ExitStack) -> None:
        self.args = args
        self.counter = TokenizerCounter(args.model_dir)
        self.rounds: list[dict[str, float]] = []
        threads = ("--threads", str(args.threads))
        self.servers: dict[str, ManagedServer] = {}
        names: dict[str, tuple[str, ...]] = {"plain": ("--proposer", "none"), "lookup": ("--proposer", "lookup")}
        if args.drafter_dir:
            drafter = ("--drafter-dir", str(Path(args.drafter_dir).resolve()))
            names["block"] = ("--proposer", "block", *drafter)
            names["both"] = ("--proposer", "auto", *drafter)
        for name, extra in names.items():
            say(f"starting our server: {name}")
            server = our_server(args.model_dir, name, *extra, *threads, *args.serve_arg)
            self.servers[name] = stack.enter_context(server)
        self.default = "both" if args.drafter_dir else "lookup"
        self.chats: list[str] = args.chats
        self.transformers: Worker | None = None
        if not args.no_transformers:
            say("starting transformers")
            worker = Worker(role="transformers", model_dir=str(args.model_dir), threads=args.threads)
            self.transformers = stack.enter_context(worker)
        self.steps: Worker | None = None
        if not args.no_step_cost:
            say("loading the engine's model in-process for step costs")
            setup = {"model_dir": str(args.model_dir), "threads": args.threads, "weights": args.weights}
            self.steps = stack.enter_context(Worker(role="steps", **setup))

    def round(self, seed: int) -> dict[str, float]:
        """One pass over everything. Keys: ``party.measure`` in tokens/s (or seconds, or GiB)."""
        row: dict[str, float] = {}
        length, count = self.args.max_tokens, self.args.prompts
        chats = interactive(count, seed, self.counter, max_tokens=length)
        if self.chats:
            # Spread over the file, others in every round.
            picked = range(seed - 1, len(self.chats), max(1, len(self.chats) // count))
            chats = [user_request(self.chats[i], max_tokens=length) for i in picked][:count]
        crowd = burst(BURST, seed, self.counter, tokens=120, max_tokens=length)
        copies = copy_heavy(self.args.copy_prompts, seed)
        if self.transformers:
            row["transformers.single"] = self._transformers(chats)["decode_tokens_per_second"]
        for name, server in self.servers.items():
            result = drive(server.url, chats, self.counter, at_once=False)
            row[f"{name}.single"] = result.decode
            if result.tau:
                row[f"{name}.single_tau"] = result.tau
        if self.transformers:
            sample = self._transformers(crowd[: self.args.transformers_burst])
            row["transformers.burst"] = sample["tokens"] / sample["seconds"]
        for name in ("plain", "lookup", "block"):
            if name in self.servers:
                row[f"{name}.burst"] = drive(self.servers[name].url, crowd, self.counter, at_once=True).total
        for name in ("plain", "lookup"):
            result = drive(self.servers[name].url, copies, self.counter, at_once=False)
            row[f"{name}.copy"] = result.decode
            if result.tau:
                row[f"{name}.copy_tau"] = result.tau
        if self.steps:
            answer = self.steps.ask(do="step_cost", rows=[1, VERIFY_ROWS, 8, 16], context=256, repeats=15)
            for rows, seconds in answer["seconds"].items():
                row[f"step.rows_{rows}"] = seconds
        if "block.single" in row:
            row["best.single"] = max(row["lookup.single"], row["block.single"])
        row["memory.gib"] = self.servers[self.default].memory_bytes() / GIB
        return row

    def warm_up(self) -> None:
        """Touches every party once, so that first-use costs are not in the first round."""
        chats = interactive(1, -1, self.counter, tokens=60, max_tokens=8)
        for server in self.servers.values():
            drive(server.url, chats, self.counter, at_once=False)
        if self.transformers:
            self._transformers(chats)

    def _transformers(self, requests: Sequence[ChatRequest]) -> dict[str, Any]:
        assert self.transformers is not None
        chats = [list(request.messages) for request in requests]
        return self.transformers.ask(do="generate", chats=chats, max_tokens=requests[0].max_tokens)


# ratio -> (numerator, denominator) of a round's row.
_RATIOS = {
    "single_stream": ("plain.single", "transformers.single"),
    "burst": ("plain.burst", "transformers.burst"),
    "verify": (f"step.rows_{VERIFY_ROWS}", "step.rows_1"),
    "lookup_copy": ("lookup.copy", "plain.copy"),
    "lookup_chat": ("lookup.single", "plain.single"),
    "block_chat": ("block.single", "plain.single"),
    "both_chat": ("both.single", "plain.single"),
    "both_best": ("both.single", "best.single"),
    "block_burst": ("block.burst", "plain.burst"),
}


def summarise(rounds: Sequence[dict[str, float]]) -> dict[str, Interval]:
    """Each ratio as the geometric mean over rounds with a 95 % interval; memory as the largest seen."""
    result: dict[str, Interval] = {}
    for name, (above, below) in _RATIOS.items():
        ratios = [row[above] / row[below] for row in rounds if row.get(above) and row.get(below)]
        if ratios:
            result[name] = geometric_mean_interval(ratios)
    memory = max(row["memory.gib"] for row in rounds)
    result["memory_gib"] = Interval(memory, memory, memory)
    return result


def verdict(name: str, value: float) -> str:
    """ "reached", "MISSED" or "" where the project promises nothing."""
    _, target, more = TARGETS[name]
    if target is None:
        return ""
    return "reached" if (value >= target if more else value <= target) else "MISSED"


def table(rounds: Sequence[dict[str, float]], summary: dict[str, Interval]) -> str:
    """The result as text: ratios against targets, then the rates behind them."""
    lines = [f"{'':62}{'value':>8}{'95 % interval':>20}{'target':>9}"]
    for name, interval in summary.items():
        text, target, more = TARGETS[name]
        bound = "" if target is None else f"{'>=' if more else '<='} {target:g}"
        spread = (
            "" if interval.low == interval.high or len(rounds) < 2 else f"{interval.low:.3g} .. {interval.high:.3g}"
        )
        lines.append(f"{text:62}{interval.value:8.2f}{spread:>20}{bound:>9}  {verdict(name, interval.value)}")
    lines.append("")
    for key in sorted({key for row in rounds for key in row}):
        values = [row[key] for row in rounds if key in row]
        middle = sorted(values)[len(values) // 2]
        unit = "GiB" if key == "memory.gib" else "tokens/round" if key.endswith("tau") else "tok/s"
        shown = f"{middle * 1000:9.2f} ms" if key.startswith("step.") else f"{middle:9.2f} {unit}"
        lines.append(f"  {key:24}{shown}   (median of {len(values)})")
    return "\n".join(lines)


def read_chats(path: Path) -> list[str]:
    """The "prompt" of every line. Raises ValueError naming the line that has none."""
    prompts: list[str] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        prompt = json.loads(line).get("prompt") if line.strip() else None
        if not isinstance(prompt, str) or not prompt.strip():
            raise ValueError(f'{path.name} line {number}: no "prompt"')
        prompts.append(prompt)
    return prompts


def say(text: str) -> None:
    """Progress goes to stderr, so that stdout holds the result only."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m eval.bench", description=__doc__)
    default_model = ROOT / "models" / "smollm2-135m-instruct"
    parser.add_argument(
        "--model-dir", type=model_folder, default=str(default_model), help=f"default: {default_model.name}"
    )
    parser.add_argument("--drafter-dir", type=Path, help="block drafter to measure as well")
    parser.add_argument("--rounds", type=int, default=3, help="passes over everything (default: 3)")
    parser.add_argument("--prompts", type=int, default=2, help="chats per round for one stream (default: 2)")
    parser.add_argument(
        "--chats", type=Path, metavar="FILE", help='JSONL with a "prompt" a line: chats to use instead of our own'
    )
    parser.add_argument("--copy-prompts", type=int, default=6, help="copy-heavy prompts per round (default: 6)")
    parser.add_argument("--max-tokens", type=int, default=96, help="answer length of chats (default: 96)")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads for every party (default: all cores)")
    parser.add_argument("--weights", default="auto", help="weight format for the in-process step cost (default: auto)")
    parser.add_argument(
        "--transformers-burst", type=int, default=4,
        help=f"how many of the {BURST} burst requests transformers serves, one at a time, each round (default: 4: "
        "its throughput does not depend on the count)",
    )  # fmt: skip
    parser.add_argument("--no-transformers", action="store_true", help="skip the comparison with transformers")
    parser.add_argument("--no-step-cost", action="store_true", help="skip the in-process step costs")
    parser.add_argument(
        "--serve-arg", action="append", default=[], help="further argument for our servers (repeatable)"
    )
    parser.add_argument("--json", type=new_file, help="write rounds and summary here")
    args = parser.parse_args(argv)
    try:
        args.chats = read_chats(args.chats) if args.chats else []
    except (OSError, ValueError) as error:
        parser.error(f"argument --chats: {error}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    end_on_sigterm()
    load = os.getloadavg()[0]
    with ExitStack() as stack:
        bench = Bench(args, stack)
        say("warming up")
        bench.warm_up()
        try:
            for index in range(args.rounds):
                say(f"round {index + 1} of {args.rounds}")
                bench.rounds.append(bench.round(seed=index + 1))
        except KeyboardInterrupt:
            say("interrupted: finished rounds are kept")
    if not bench.rounds:
        return 130
    summary = summarise(bench.rounds)
    print(table(bench.rounds, summary))
    if load > BUSY_SHARE * (os.cpu_count() or 1):
        print(
            f"\nWARNING: load average {load:.1f} before the run: other work shared the cores, repeat on a quiet machine"
        )
    if args.json:
        report = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "machine": {
                "platform": platform.platform(),
                "python": platform.python_version(),
                "load_average_before": load,
            },
            "arguments": {key: str(value) for key, value in vars(args).items() if key != "chats"},
            "chats": len(args.chats),
            "rounds": bench.rounds,
            "summary": {
                name: {**value.to_json(), "verdict": verdict(name, value.value)} for name, value in summary.items()
            },
        }
        write_report(args.json, report)
    return 0 if all(verdict(name, value.value) != "MISSED" for name, value in summary.items()) else 1


if __name__ == "__main__":
    sys.exit(main())
