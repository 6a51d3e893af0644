"""Speculative over plain decoding of a real model with its drafter, in this process, on real prompts.

Both engines answer the same prompts greedily with so many streams at once, in turns of short runs, for a small model's
step is bound by the host, whose speed swings by half within a minute: the ratio is the median over pairs of runs that
follow each other. Equal texts are counted: decoded rows have the same bits in any batch, rows of long prompts (the
library's products) only in the same one. Knows the engine; no HTTP and no report.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from serve.api.chat import load_chat_renderer
from serve.config import ServeConfig
from serve.engine.build import build_engine
from serve.engine.engine import Engine
from serve.protocol import SamplingParams

TOKENS = 160
PAIRS = 5
KV_MIB = 8192
"""Of each of the two engines, which share the card."""


def speculative_over_plain(
    model_dir: Path, drafter_dir: Path, prompts: Path, streams: Sequence[int], count: int = 96
) -> dict[int, tuple[float, str]]:
    """By number of streams: the median ratio of tokens a second, and what was seen beside it."""
    config = ServeConfig(
        str(model_dir), drafter_dir=str(drafter_dir), device="cuda", max_num_seqs=max(streams), kv_memory_mib=KV_MIB
    )
    texts = [json.loads(line)["prompt"] for line in prompts.read_text("utf-8").splitlines()[:count]]
    plain, _ = build_engine(replace(config, proposer="none", drafter_dir=None))
    speculative, _ = build_engine(config)
    renderer = load_chat_renderer(model_dir, plain.tokenizer)
    ids = [renderer.encode([{"role": "user", "content": text}]) for text in texts]
    found = {}
    for number in streams:
        share = ids[: max(8, min(len(ids), 4 * number))]
        for engine in (plain, speculative):
            _answer(engine, share[:number], number, 24)
        before = speculative.stats()
        runs = [_pair(plain, speculative, share, number, first=turn % 2) for turn in range(PAIRS)]
        after = speculative.stats()
        drafts = after.drafts - before.drafts
        length = 1 + (after.accepted_tokens - before.accepted_tokens) / drafts if drafts else 1.0
        ratios = sorted(fast / slow for slow, fast, _ in runs)
        rates = [round(statistics.median(rate)) for rate in ([run[1] for run in runs], [run[0] for run in runs])]
        found[number] = (
            statistics.median(ratios),
            f"{ratios[0]:.2f} .. {ratios[-1]:.2f} over {PAIRS} pairs, {rates[0]} against {rates[1]} tok/s, acceptance "
            f"length {length:.2f} over {drafts} drafts, {runs[0][2]} of {len(share)} texts equal",
        )
    return found


def _pair(
    plain: Engine, speculative: Engine, prompts: Sequence[Sequence[int]], streams: int, *, first: int
) -> tuple[float, float, int]:
    """Tokens a second of one run each, plain and speculative, and how many texts are equal. first: 1 where the
    speculative run comes first."""
    rates = [0.0, 0.0]
    answers: list[list[list[int]]] = [[], []]
    for turn in (first, 1 - first):
        started = time.perf_counter()
        answers[turn] = _answer((plain, speculative)[turn], prompts, streams, TOKENS)
        rates[turn] = sum(map(len, answers[turn])) / (time.perf_counter() - started)
    return rates[0], rates[1], sum(one == two for one, two in zip(*answers, strict=True))


def _answer(engine: Engine, prompts: Sequence[Sequence[int]], streams: int, tokens: int) -> list[list[int]]:
    """Every prompt's greedy answer, with at most ``streams`` alive at once."""
    engine.scheduler.pool.forget()
    found: list[list[int]] = [[] for _ in prompts]
    waiting = list(range(len(prompts)))[::-1]
    alive = 0
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
    return found
