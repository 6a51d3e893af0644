"""What the engine reaches on the card at hand, as one table beside what it must reach and what it aims at.

    python -m eval.device_bench --tokenizer-dir D [--parts steps,int8,int4,bits,profile,...] [--json FILE]

steps, int8, int4   one stream at 1,024 positions: a plain step, a verify of 16 rows, a round (CUDA events, in process)
bits                prompts whose K/V and logits are, to the bit, those they have alone
profile             where prompts and bursts in the engine, and a step of 32 streams, spend their time: gaps, kernels
wrong, idle         the whole engine with a drafter that is always wrong against none; what the device idles
http                the real server: prompt of 4,096 tokens, bursts of 32 and 128
speculation         a real model with its drafter (--model-dir, --drafter-dir, --prompts): speculative over plain

Weights are random in all parts but the last: qwen3 of 4 B parameters. Shares are of the read bandwidth and the matrix
rate measured on this card in the same run. A line says of its must and of its aim whether they are met; where a figure
has an interval, only if all of it is on one side, else that is not decided. Results are written after every part.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from eval import device_bits, device_http
from eval.device_engine import decode, device_ms, engine_of, lanes_at, replay_ms, target, wrong_drafter
from eval.device_speculation import SECONDS, TOKENS, TURNS, Compared, contest_of, run
from eval.device_timeline import answered, prompts_of, timeline
from eval.json_report import write_report
from eval.random_model import write_random_model
from scripts.kernel_timing import read_bandwidth
from serve.engine.engine import Engine
from serve.engine.graphs import StepGraphs
from serve.kernels.triton import turing
from serve.model.triton_layers import TritonStack, TritonTargetModel

CONTEXT = 1024
BLOCK_ROWS = 16
STREAMS = (1, 8, 32, 128)
PARAMETERS = 4.022e9
"""Of the 4 B model, its head once; and the bytes of one position's K/V in 16 bits."""
KV_BYTES = 147_456
WRONG_STEPS = 300
"""The same for both: contexts grow with the steps."""
COMPANIES = (8, 32)
"""Prompts beside each other whose bits are compared."""
PARTS = ("steps", "int8", "int4", "bits", "profile", "wrong", "idle", "http", "speculation")


@dataclass(frozen=True)
class Goal:
    """A line of the table. more: a larger figure is better."""

    title: str
    unit: str
    must: float
    aim: float
    more: bool = False


GOALS = {
    "plain bf16": Goal("plain decode, one stream, 16-bit", "ms", 2.90, 2.40),
    "plain int8": Goal("plain decode, one stream, int8", "ms", 1.70, 1.3),
    "plain int4": Goal("plain decode, one stream, int4", "ms", 1.30, 1.0),
    "verify": Goal("verify of 16 rows / plain decode", "x", 1.10, 1.05),
    "round": Goal("round of draft 16 and verify 16, one stream", "ms", 3.7, 3.1),
    "bits": Goal("prompts with their own bits in any company", "x", 1, 1, more=True),
    "prompt": Goal("prompt of 4,096, first token over HTTP", "ms", 62, 56),
    "burst 32": Goal("burst 32 x (240 in, 128 out) over HTTP", "tok/s", 7000, 8500, more=True),
    "burst 128": Goal("burst 128 x (1,000 in, 128 out) over HTTP", "tok/s", 5800, 6500, more=True),
    **{f"wrong {n}": Goal(f"always wrong drafter / none, {n} streams", "x", 0.97, 0.99, more=True) for n in STREAMS},
    "idle": Goal("device idle between decode steps, one stream", "%", 3, 1),
    "speculation 1": Goal("speculative / plain, real drafter, 1 stream", "x", 1.5, 1.5, more=True),
    **{
        f"speculation {n}": Goal(f"speculative / plain, real drafter, {n} streams", "x", 0.97, 1.0, more=True)
        for n in (8, 32)
    },
}


@dataclass(frozen=True)
class Measured:
    """share: of the card's read bandwidth or matrix rate, where one bounds the line; remark: what else was seen; low
    and high: the ends of the figure's interval, where it was measured often enough to have one."""

    value: float
    share: str = ""
    remark: str = ""
    low: float | None = None
    high: float | None = None


class Bench:
    """The parts, each giving some lines of the table."""

    def __init__(self, options: argparse.Namespace, layers: int) -> None:
        self.options = options
        self.layers = layers
        self.device = torch.device("cuda")
        self.found: dict[str, Measured] = {}
        self.kernels: list[str] = []
        self.faults: dict[str, str] = {}
        self.bandwidth = read_bandwidth(self.device)
        self.matrix_rate = matrix_rate(self.device)
        self._model: TritonTargetModel | None = None
        self._engines: dict[bool, Engine] = {}

    def _bf16(self, drafter: bool) -> Engine:
        """The engine of the 16-bit model, with or without the wrong drafter, made once."""
        if self._model is None:
            self._model = target("bf16", self.layers, self.device)
            if self.options.prefill == "fp8":
                self._model.stack = self._model.stack.with_fp8()
        if drafter not in self._engines:
            block = wrong_drafter(self._model) if drafter else None
            self._engines[drafter] = engine_of(self._model, self.options.tokenizer_dir, block, STREAMS[-1])
        return self._engines[drafter]

    def steps(self) -> None:
        self._plain("bf16", self._bf16(False))
        graphs = _graphs(self._bf16(True))
        _, plain = device_ms(graphs, lanes_at(graphs, 1, 1, CONTEXT))
        _, verify = device_ms(graphs, lanes_at(graphs, 1, BLOCK_ROWS, CONTEXT))
        draft, drafted = device_ms(graphs, lanes_at(graphs, 1, BLOCK_ROWS, CONTEXT, drafted=True))
        model, drafter = graphs.model, graphs.drafter
        assert drafter is not None
        read = _step_bytes(model)
        both = f"{verify:.2f} against {plain:.2f} ms, context write included"
        self.found["verify"] = Measured(verify / plain, self._share(read, read * BLOCK_ROWS, verify), both)
        # Both passes read the head.
        all_read = read + _stack_bytes(drafter.stack) + model.head_bytes
        self.found["round"] = Measured(
            draft + drafted,
            self._share(all_read, all_read * BLOCK_ROWS, draft + drafted),
            f"draft {draft:.2f}, rest {drafted:.2f}",
        )

    def int8(self) -> None:
        self._quantised("int8")

    def int4(self) -> None:
        self._quantised("int4")

    def _quantised(self, weights: str) -> None:
        model = target(weights, self.layers, self.device)
        self._plain(weights, engine_of(model, self.options.tokenizer_dir, None, 1))

    def _plain(self, weights: str, engine: Engine) -> None:
        model, graphs = engine.runner.model, _graphs(engine)
        assert isinstance(model, TritonTargetModel)
        _, took = device_ms(graphs, lanes_at(graphs, 1, 1, CONTEXT))
        speed = decode(engine, 1, 100, CONTEXT)
        share = self._share(_step_bytes(model), 2 * PARAMETERS, took)
        self.found[f"plain {weights}"] = Measured(speed.step_ms, share, f"on the device {took:.3f}")

    def _share(self, nbytes: float, flops: float, took_ms: float) -> str:
        """Bytes read and operations of something that took so long, as parts of what the card can do."""
        read, matrices = (100 * x / (took_ms / 1e3) for x in (nbytes / self.bandwidth, flops / self.matrix_rate))
        return f"{read:.0f} % of read, {matrices:.0f} % of matrices"

    def bits(self) -> None:
        engine = self._bf16(False)
        model = engine.runner.model
        assert isinstance(model, TritonTargetModel)
        counts = {n: device_bits.equal_prompts(model, engine.runner.cache, device_bits.prompts(n)) for n in COMPANIES}
        shares = [equal / n for n, found in counts.items() for equal in found.values()]
        told = "; ".join(f"{n} beside each other: {found}" for n, found in counts.items())
        least = sorted(set(model.stack.safe_rows.least.items()))
        self.found["bits"] = Measured(min(shares), remark=f"{told}; library rows {least}")

    def profile(self) -> None:
        engine = self._bf16(False)
        graphs = _graphs(engine)
        for count, length, tokens in ((1, device_http.LONG_PROMPT, 1), (1, 240, 1), (32, 240, 16), (32, 1000, 2)):
            prompts = prompts_of(count, length, seed=1)
            answered(engine, prompts, tokens)
            took, steps = answered(engine, prompts, tokens)
            self.kernels += timeline(
                f"{count} x ({length} in, {tokens} out), {took:.2f} ms in the engine, first steps "
                f"{', '.join(f'{step:.1f}' for step in steps[:4])}",
                partial(answered, engine, prompts, tokens),
            )
        device_ms(graphs, lanes_at(graphs, 32, 1, 300))
        self.kernels += kernel_times("a step of 32 streams at 300 positions", graphs.replay(32))

    def wrong(self) -> None:
        for streams in STREAMS:
            plain = decode(self._bf16(False), streams, WRONG_STEPS)
            engine = self._bf16(True)
            before = engine.stats()
            speed = decode(engine, streams, WRONG_STEPS)
            drafted = engine.stats().draft_tokens - before.draft_tokens
            kept = engine.stats().accepted_tokens - before.accepted_tokens
            self.found[f"wrong {streams}"] = Measured(
                speed.tokens_per_second / plain.tokens_per_second,
                remark=f"{speed.tokens_per_second:.0f} against {plain.tokens_per_second:.0f} tok/s, "
                f"{drafted} drafted, {kept} kept",
            )

    def idle(self) -> None:
        remarks, shares = [], []
        engine = self._bf16(False)
        for streams in (1, 32):
            speed = decode(engine, streams, 200)
            busy = replay_ms(_graphs(engine).replay(streams))
            shares.append(100 * (1 - busy / speed.step_ms))
            remarks.append(f"{streams}: {speed.step_ms:.3f} ms a step, {busy:.3f} busy")
        self.found["idle"] = Measured(shares[0], remark=f"{'; '.join(remarks)}: {shares[1]:.1f} %")

    def http(self) -> None:
        self._model = None
        self._engines.clear()
        gc.collect()
        torch.cuda.empty_cache()
        with tempfile.TemporaryDirectory(dir=self.options.scratch) as folder:
            model_dir = write_random_model(
                "qwen3-4b", self.options.tokenizer_dir, Path(folder) / "model", torch.bfloat16, device="cuda"
            )
            torch.cuda.empty_cache()
            given = ("--proposer", "none", "--weights", "bf16", "--prefill", self.options.prefill)
            with device_http.server(model_dir, 128, *given) as server:
                single = device_http.token_ms(server.url, 120, 256)
                took = device_http.first_token_ms(server.url, device_http.LONG_PROMPT)
                share = self._share(2 * PARAMETERS, prompt_flops(device_http.LONG_PROMPT), took)
                self.found["prompt"] = Measured(took, share, f"one stream {single:.2f} ms a token")
                for streams, prompt, answer in ((32, 240, 128), (128, 1000, 128)):
                    rate = device_http.burst_tokens_per_second(server.url, streams, prompt, answer)
                    flops = streams * (prompt_flops(prompt) + 2 * PARAMETERS * answer)
                    held = streams * (prompt + answer / 2) * KV_BYTES
                    share = self._share(answer * (2 * PARAMETERS + held), flops, 1e3 * streams * answer / rate)
                    self.found[f"burst {streams}"] = Measured(rate, share)
                lines = server.log_tail(1 << 20).splitlines()
                print(*(line for line in lines if "memory" in line), sep="\n", flush=True)

    def speculation(self) -> None:
        streams = (1, *COMPANIES)
        contest = contest_of(self.options.model_dir, self.options.drafter_dir, self.options.prompts, streams)
        run(contest, streams, TURNS, SECONDS, TOKENS, self._note_speculation)

    def _note_speculation(self, found: list[Compared]) -> None:
        latest = found[-1]
        ratio = latest.ratio("both")
        remark = f"{latest.remark('both')}; {latest.remark('block')}"
        self.found[f"speculation {latest.streams}"] = Measured(
            ratio.value, remark=remark, low=ratio.low, high=ratio.high
        )
        self.kernels += latest.parts

    def report(self) -> dict[str, Any]:
        return {
            "card": torch.cuda.get_device_name(),
            "read_tb_s": round(self.bandwidth / 1e12, 3),
            "matrix_tflops": round(self.matrix_rate / 1e12, 1),
            "faults": self.faults,
            "kernels": self.kernels,
            "lines": [
                {"name": name, **asdict(GOALS[name]), **asdict(found), **verdicts(GOALS[name], found)}
                for name, found in self.found.items()
            ],
        }


def verdict(limit: float, found: Measured, *, more: bool) -> str:
    """Whether a figure reaches ``limit``: "met" or "missed" where all of its interval says so, else "undecided"."""
    ends = [found.value if end is None else end for end in (found.low, found.high)]
    reached = [end >= limit if more else end <= limit for end in ends]
    return "met" if all(reached) else "undecided" if any(reached) else "missed"


def verdicts(goal: Goal, found: Measured) -> dict[str, str]:
    """What became of the goal's must and aim."""
    return {
        "must_is": verdict(goal.must, found, more=goal.more),
        "aim_is": verdict(goal.aim, found, more=goal.more),
    }


def table(report: dict[str, Any]) -> str:
    """The report as lines of text."""
    lines = [
        f"{report['card']}: reads {report['read_tb_s']} TB/s, {report['matrix_tflops']} TFLOPS bf16",
        f"{'':50} {'must':>8} {'aim':>8} {'measured':>9}",
    ]
    for entry in report["lines"]:
        mark = {"met": " ", "missed": "!", "undecided": "?"}[entry["must_is"]]
        title = f"{entry['title']}, {entry['unit']}"
        judged = f"must {entry['must_is']}, aim {entry['aim_is']}"
        tail = "  ".join(part for part in (judged, entry["share"], entry["remark"]) if part)
        lines.append(f"{mark}{title:49} {entry['must']:8g} {entry['aim']:8g} {entry['value']:9.3f}  {tail}")
    lines += report["kernels"]
    lines += [f"!part {name} failed: {fault}" for name, fault in report["faults"].items()]
    return "\n".join(lines)


def prompt_flops(tokens: int) -> float:
    """Operations of a prompt of the 4 B model: its matrices and causal attention."""
    return 2 * 3.633e9 * tokens + 2 * 36 * 4096 * tokens * tokens


def kernel_times(title: str, work: Callable[[], object], most: int = 8) -> list[str]:
    """What the device spends on each kernel of ``work``, the dearest first, as lines of text."""
    work()
    torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    torch.cuda.synchronize()
    took = (time.perf_counter() - started) * 1e3
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        work()
        torch.cuda.synchronize()
    rows = sorted(recorded.key_averages(), key=lambda row: -row.self_device_time_total)
    busy = sum(row.self_device_time_total for row in rows) / 1e3
    lines = [f"{title}: {took:.2f} ms by the clock, kernels {busy:.2f} ms"]
    lines += [f"  {row.self_device_time_total / 1e3:8.3f} ms {row.count:5} x {row.key[:70]}" for row in rows[:most]]
    return lines


def _stack_bytes(stack: TritonStack) -> int:
    """Bytes of the layers' matrices."""
    matrices = ("qkv", "output", "gate_up", "down")
    return sum(getattr(layer, name).weight.nbytes for layer in stack.layers for name in matrices)


def _step_bytes(model: TritonTargetModel) -> int:
    """Bytes that a step of one stream reads at CONTEXT positions."""
    return _stack_bytes(model.stack) + model.head_bytes + CONTEXT * model.kv_bytes_per_page(32) // 32


def matrix_rate(device: torch.device, size: int = 8192) -> float:
    """Operations a second of one bf16 product of ``size`` cubed."""
    x = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    return 2 * size**3 / (replay_ms(lambda: x @ x, repeats=10) / 1e3)


def _graphs(engine: Engine) -> StepGraphs:
    assert engine.runner.ahead is not None
    return engine.runner.ahead.graphs


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.device_bench", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--parts", default=",".join(PARTS[:-1]), help=f"what to measure (default all but the last of {PARTS})"
    )
    parser.add_argument("--tokenizer-dir", type=Path, required=True, help="folder with a tokenizer.json")
    parser.add_argument("--layers", type=int, default=36, help="layers of the random model in process")
    parser.add_argument(
        "--prefill", choices=("off", "fp8"), default="off", help="prompts of the 16-bit model (default off)"
    )
    parser.add_argument("--model-dir", type=Path, help="real model of the part speculation")
    parser.add_argument("--drafter-dir", type=Path, help="its drafter")
    parser.add_argument("--prompts", type=Path, help='its prompts: JSONL with a "prompt" field')
    parser.add_argument("--scratch", type=Path, help="folder for the random checkpoint of the part http")
    parser.add_argument("--json", type=Path, help="where to write the report")
    options = parser.parse_args(argv)
    parts = options.parts.split(",")
    unknown = sorted(set(parts) - set(PARTS))
    if unknown:
        parser.error(f"--parts: unknown {', '.join(unknown)}; known: {', '.join(PARTS)}")
    if "speculation" in parts and not (options.model_dir and options.drafter_dir and options.prompts):
        parser.error("the part speculation needs --model-dir, --drafter-dir and --prompts")
    if not torch.cuda.is_available():
        print("device_bench: no CUDA card is visible", file=sys.stderr)
        return 2
    turing.install()
    bench = Bench(options, options.layers)
    for part in parts:
        work: Callable[[], None] = getattr(bench, part)
        try:
            work()
        except Exception as error:  # the other parts still tell something
            traceback.print_exc()
            bench.faults[part] = f"{type(error).__name__}: {error}"[:300]
        if options.json is not None:
            write_report(options.json, bench.report())
        print(f"\n{part} done\n{table(bench.report())}", flush=True)
    return 0 if not bench.faults and all(line["must_is"] == "met" for line in bench.report()["lines"]) else 1


if __name__ == "__main__":
    sys.exit(main())
