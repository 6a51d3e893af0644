"""Speculative over plain decoding of a real model with its drafter, in this process, on real prompts.

    python -m eval.device_speculation --model-dir M --drafter-dir D --prompts FILE [--streams 1,8,32] [--json FILE]

A turn answers the same prompts greedily with so many streams at once: plainly, with the block drafter ("block"), and
with copies before it, as the server does by default ("both"). Each turn has prompts of its own and another order, for a
small model's step is bound by the host, whose speed swings by half within a minute: the figure is the median over turns
of a ratio within the turn, with its exact interval. The clock stops when there is no prompt left to keep every stream
busy. Equal texts are counted. Then a run of each is watched: where its steps' time goes. Knows the engine; no HTTP.
"""

from __future__ import annotations

import argparse
import copy
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from eval.json_report import write_report
from eval.options import at_least, model_folder, new_file, positive
from eval.stats import Interval, median_interval
from eval.step_parts import watched
from serve.api.chat import load_chat_renderer
from serve.config import ServeConfig
from serve.drafter.prompt_lookup import PromptLookup
from serve.engine.build import StartError, assemble, load_models, rank_device
from serve.engine.engine import Engine
from serve.engine.memory import MemorySpent
from serve.parallel.ranks import Ranks
from serve.protocol import SamplingParams
from serve.tokenizer import TokenizerError, load_tokenizer
from verify.lossless import read_prompts

MODES = ("plain", "block", "both")
STREAMS = (1, 8, 32)
TOKENS = 160
TURNS = 15
SECONDS = 60.0
WATCHED_TOKENS = 100
KV_MIB = 1536
"""Of each of the two engines, which share the device."""
DEVICES = ("cuda", "cpu")


@dataclass
class Compared:
    """What was seen at one number of streams, by mode: tokens a second of each turn, drafts and tokens of theirs that
    were kept, answers equal to plain ones; and lines on where the time of a step goes."""

    streams: int
    rates: dict[str, list[float]] = field(default_factory=lambda: {mode: [] for mode in MODES})
    drafts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(MODES, 0))
    kept: dict[str, int] = field(default_factory=lambda: dict.fromkeys(MODES, 0))
    equal: dict[str, int] = field(default_factory=lambda: dict.fromkeys(MODES, 0))
    answers: int = 0
    parts: list[str] = field(default_factory=list)

    def ratio(self, mode: str) -> Interval:
        """Median over turns of the rate over plain's in the same turn."""
        return median_interval([a / b for a, b in zip(self.rates[mode], self.rates["plain"], strict=True)])

    def acceptance_length(self, mode: str) -> float:
        """Tokens a round with a draft gave, the target's own included."""
        return 1 + self.kept[mode] / self.drafts[mode] if self.drafts[mode] else 1.0

    def remark(self, mode: str) -> str:
        """One line beside the ratio."""
        found = self.ratio(mode)
        rates = [statistics.median(self.rates[name]) for name in (mode, "plain")]
        return (
            f"{mode} {found.value:.3f} ({found.low:.3f} .. {found.high:.3f}, {len(self.rates[mode])} turns), "
            f"{rates[0]:.0f} against {rates[1]:.0f} tok/s, acceptance length {self.acceptance_length(mode):.2f} over "
            f"{self.drafts[mode]} drafts, {self.equal[mode]} of {self.answers} texts equal"
        )


class Contest:
    """A plain engine and a speculative one around the same weights, which take turns."""

    def __init__(self, plain: Engine, speculative: Engine, prompts: Sequence[list[int]]) -> None:
        """prompts: token ids, taken in order and again from the first."""
        self.plain = plain
        self.speculative = speculative
        self._prompts = prompts
        self._next = 0
        self._controllers = {mode: copy.deepcopy(speculative.controller) for mode in MODES}

    def learned(self) -> dict[str, Any]:
        """By mode, what steps are believed to cost by now."""
        return {mode: controller.costs.to_json() for mode, controller in self._controllers.items() if mode != "plain"}

    def engine(self, mode: str) -> Engine:
        """The engine that decodes in this mode; what each has learned is its own."""
        if mode == "plain":
            return self.plain
        self.speculative.lookup = PromptLookup() if mode == "both" else None
        self.speculative.controller = self._controllers[mode]
        return self.speculative

    def _share(self, streams: int) -> list[list[int]]:
        """Prompts of the next turn."""
        count = streams * (4 if streams == 1 else 3 if streams <= 8 else 2)
        taken = [self._prompts[(self._next + i) % len(self._prompts)] for i in range(count)]
        self._next += count
        return taken

    def compare(self, streams: int, turns: int, seconds: float, tokens: int = TOKENS) -> Compared:
        """Up to so many turns, for so long."""
        found = Compared(streams)
        for mode in MODES:
            answer(self.engine(mode), self._share(streams), streams, 24)
        deadline = time.perf_counter() + seconds
        for turn in range(turns):
            if turn and time.perf_counter() > deadline:
                break
            share = self._share(streams)
            texts: dict[str, list[list[int]]] = {}
            for place in range(len(MODES)):
                mode = MODES[(turn + place if turn % 2 else turn - place) % len(MODES)]
                engine = self.engine(mode)
                before = engine.stats()
                texts[mode], rate = answer(engine, share, streams, tokens)
                after = engine.stats()
                found.rates[mode].append(rate)
                found.drafts[mode] += after.drafts - before.drafts
                found.kept[mode] += after.accepted_tokens - before.accepted_tokens
            found.answers += len(share)
            for mode in MODES:
                found.equal[mode] += sum(one == two for one, two in zip(texts[mode], texts["plain"], strict=True))
        return found

    def watch(self, streams: int, tokens: int = WATCHED_TOKENS) -> list[str]:
        """A line for each mode: where the time of its steps goes."""
        lines = []
        share = self._share(streams)
        for mode in MODES:
            engine = self.engine(mode)
            with watched(engine) as parts:
                answer(engine, share, streams, tokens)
            lines.append(f"{streams} streams, {mode}: {parts.line()}")
        return lines


def answer(
    engine: Engine, prompts: Sequence[Sequence[int]], streams: int, tokens: int
) -> tuple[list[list[int]], float]:
    """Every prompt's greedy answer with at most ``streams`` alive at once, and tokens a second as long as there were
    prompts to keep them all busy."""
    engine.scheduler.pool.forget()
    found: list[list[int]] = [[] for _ in prompts]
    waiting = list(range(len(prompts)))[::-1]
    alive = 0
    rate = 0.0
    started = time.perf_counter()
    while waiting or alive:
        while waiting and alive < streams:
            index = waiting.pop()
            engine.add(str(index), prompts[index], SamplingParams(max_tokens=tokens))
            alive += 1
        for output in engine.step():
            found[int(output.id)] += output.token_ids
            if output.finish_reason == "error":
                raise RuntimeError(f"prompt {output.id}: {output.error}")
            alive -= output.finish_reason is not None
        if not rate and not waiting and alive < streams:
            rate = sum(map(len, found)) / (time.perf_counter() - started)
    return found, rate


def contest_of(
    model_dir: Path, drafter_dir: Path, prompts: Path, streams: Sequence[int], device: str = "cuda"
) -> Contest:
    """A contest with the server's own settings but for the memory. prompts: JSONL with a "prompt" field, shuffled.
    Raises OSError, ValueError, TokenizerError and StartError for what does not fit."""
    texts = list(read_prompts(prompts))
    if not texts:
        raise ValueError(f"{prompts} holds no prompt")
    random.Random(0).shuffle(texts)
    config = ServeConfig(
        str(model_dir), drafter_dir=str(drafter_dir), device=device, max_num_seqs=max(streams), kv_memory_mib=KV_MIB
    )
    place = rank_device(config, 0)
    tokenizer = load_tokenizer(model_dir)
    model, drafter = load_models(config, place, Ranks().group, MemorySpent(place), [])
    without = replace(config, proposer="none", drafter_dir=None)
    plain = assemble(without, model, tokenizer, None, MemorySpent(place), [])
    speculative = assemble(config, model, tokenizer, drafter, MemorySpent(place), [])
    renderer = load_chat_renderer(model_dir, tokenizer)
    return Contest(plain, speculative, [renderer.encode([{"role": "user", "content": text}]) for text in texts])


def run(
    contest: Contest,
    streams: Sequence[int],
    turns: int,
    seconds: float,
    tokens: int,
    told: Callable[[list[Compared]], None],
) -> list[Compared]:
    """Turns at each number of streams, which share ``seconds``, each followed by the watched runs; ``told`` after each
    number."""
    deadline = time.perf_counter() + seconds
    found: list[Compared] = []
    for done, number in enumerate(streams):
        left = (deadline - time.perf_counter()) / (len(streams) - done)
        found.append(contest.compare(number, turns, left, tokens))
        found[-1].parts += contest.watch(number, min(tokens, WATCHED_TOKENS))
        told(found)
    return found


def lines_of(found: Sequence[Compared]) -> list[str]:
    """All that was found, as text."""
    lines = [f"{each.streams} streams: {each.remark(mode)}" for each in found for mode in MODES[1:]]
    return lines + [line for each in found for line in each.parts]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m eval.device_speculation", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--model-dir", type=model_folder, required=True)
    parser.add_argument("--drafter-dir", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True, help='JSONL with a "prompt" field')
    parser.add_argument("--device", choices=DEVICES, default="cuda")
    parser.add_argument("--streams", type=lambda text: [positive(part) for part in text.split(",")], default=STREAMS)
    parser.add_argument("--turns", type=positive, default=TURNS, help="at each number of streams, at most")
    parser.add_argument("--seconds", type=at_least(0.0), default=SECONDS, help="for all turns together")
    parser.add_argument("--tokens", type=positive, default=TOKENS, help="of an answer, at most")
    parser.add_argument("--json", type=new_file, help="where to write what was found")
    options = parser.parse_args(argv)
    started = time.perf_counter()
    if options.device == "cuda":
        from serve.kernels.triton import turing

        turing.install()
    try:
        contest = contest_of(options.model_dir, options.drafter_dir, options.prompts, options.streams, options.device)
    except (OSError, ValueError, TokenizerError, StartError) as fault:
        parser.error(str(fault))
    costs = contest.speculative.controller.costs.to_json()
    print(f"ready after {time.perf_counter() - started:.1f} s; costs {_milliseconds(costs)}", flush=True)

    def told(found: list[Compared]) -> None:
        print(f"{time.perf_counter() - started:.1f} s", *lines_of(found), sep="\n  ", flush=True)
        if options.json is not None:
            report = {"costs": costs, "learned": contest.learned(), "streams": [asdict(each) for each in found]}
            write_report(options.json, report)

    run(contest, options.streams, options.turns, options.seconds, options.tokens, told)
    return 0


def _milliseconds(costs: dict[str, Any]) -> dict[str, dict[int, float]]:
    curves = {kind: costs[kind] for kind in ("verify", "draft")}
    return {kind: {int(count): round(1e3 * took, 3) for count, took in points} for kind, points in curves.items()}


if __name__ == "__main__":
    sys.exit(main())
