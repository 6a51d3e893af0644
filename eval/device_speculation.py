"""Speculative over plain decoding of a real model with its drafter, in this process, on real prompts.

Both engines answer the same prompts greedily with so many streams at once, and equal texts are counted: decoded rows
have the same bits in any batch, rows of long prompts (the library's products) only in the same one. Knows the engine;
no HTTP and no report.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from serve.api.chat import load_chat_renderer
from serve.config import ServeConfig
from serve.engine.build import build_engine
from serve.engine.engine import Engine
from serve.protocol import SamplingParams

TOKENS = 160


def speculative_over_plain(
    model_dir: Path, drafter_dir: Path, prompts: Path, streams: Sequence[int], count: int = 96
) -> dict[int, tuple[float, str]]:
    """By number of streams: the ratio of tokens a second, and what was seen beside it."""
    config = ServeConfig(str(model_dir), drafter_dir=str(drafter_dir), device="cuda", max_num_seqs=max(streams))
    texts = [json.loads(line)["prompt"] for line in prompts.read_text("utf-8").splitlines()[:count]]
    rates: dict[tuple[bool, int], float] = {}
    answers: dict[tuple[bool, int], list[list[int]]] = {}
    seen: dict[int, str] = {}
    for speculative in (False, True):
        engine, _ = build_engine(config if speculative else replace(config, proposer="none", drafter_dir=None))
        renderer = load_chat_renderer(model_dir, engine.tokenizer)
        ids = [renderer.encode([{"role": "user", "content": text}]) for text in texts]
        for number in streams:
            share = ids[: max(8, min(len(ids), 8 * number))]
            _answer(engine, share[:number], number, 24)
            before = engine.stats()
            started = time.perf_counter()
            found = _answer(engine, share, number, TOKENS)
            rates[speculative, number] = sum(map(len, found)) / (time.perf_counter() - started)
            answers[speculative, number] = found
            after = engine.stats()
            drafts = after.drafts - before.drafts
            accepted = after.accepted_tokens - before.accepted_tokens
            if speculative:
                length = 1 + accepted / drafts if drafts else 1.0
                seen[number] = f"acceptance length {length:.2f} over {drafts} drafts"
        del engine
        torch.cuda.empty_cache()
    for number in streams:
        pairs = list(zip(answers[True, number], answers[False, number], strict=True))
        seen[number] += f", {sum(one == two for one, two in pairs)} of {len(pairs)} texts equal"
    return {
        number: (
            rates[True, number] / rates[False, number],
            f"{rates[True, number]:.0f} against {rates[False, number]:.0f} tok/s, {seen[number]}",
        )
        for number in streams
    }


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
