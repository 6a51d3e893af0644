"""Real decoding of prompts through the server's own engine, with the block drafter at full block length.

What comes back is the text with its rounds, as a corpus that the chain simulation can walk too: both must count the
same acceptance length. This file knows no HTTP and trains nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from drafter_train.corpus import Corpus
from drafter_train.tokens import Ids
from serve.config import ServeConfig
from serve.engine.build import StartError, build_engine
from serve.engine.engine import Engine
from serve.engine.prepare import GRAPH_ROWS
from serve.protocol import Output, SamplingParams


@dataclass(frozen=True)
class Decoded:
    """One answer: ``ids`` as committed, the rounds it took after its first token, and how many drafts were kept."""

    prompt: int
    ids: tuple[int, ...]
    rounds: int
    accepted: int
    drafted: int


def served_together(asked: int, block_length: int, cuda: bool) -> int:
    """How many of ``asked`` requests may be decoded together at full blocks: a recorded step on CUDA has so many rows,
    and where blocks do not fit the engine shortens them, which is right for serving and wrong for this comparison."""
    return max(1, min(asked, GRAPH_ROWS // (1 + block_length))) if cuda else asked


def open_engine(
    target: str, drafter: str | None, block_length: int, weights: str, device: str, sequences: int
) -> Engine:
    """An engine whose drafts come from the block drafter alone (or from nowhere without one), at ``block_length``.
    Raises ValueError with the engine's own sentence when it cannot start."""
    cuda = device.startswith("cuda")
    sequences = served_together(sequences, block_length, cuda)
    config = ServeConfig(
        model_dir=target,
        drafter_dir=drafter,
        proposer="block" if drafter else "none",
        block_length=block_length if drafter else -1,
        weights=weights,
        device="cuda" if cuda else "cpu",
        threads=torch.get_num_threads(),
        max_num_seqs=sequences,
        # Room for whole prompts beside full blocks: a tight budget would shorten drafts while others prefill.
        max_batch_tokens=2048 * sequences,
        prefix_cache=False,
    )
    try:
        engine, _ = build_engine(config)
    except StartError as error:
        raise ValueError(str(error)) from error
    engine.lookup = None
    return engine


def drive(
    engine: Engine, requests: Sequence[tuple[str, Sequence[int], SamplingParams]], emit: Callable[[str, Decoded], None]
) -> None:
    """Run all requests; ``emit`` gets each as it ends. Raises ValueError for a request the engine refuses, and
    RuntimeError when one fails."""
    ids: dict[str, list[int]] = {}
    waiting = list(reversed(requests))

    def take(output: Output) -> None:
        ids.setdefault(output.id, []).extend(output.token_ids)
        if output.finish_reason == "error":
            raise RuntimeError(f"request {output.id}: {output.error}")
        if output.final is not None:
            spoken: dict[str, Any] = output.final["speculation"]
            row = tuple(ids.pop(output.id))
            emit(output.id, Decoded(-1, row, len(spoken["accepted"]), sum(spoken["accepted"]), sum(spoken["drafted"])))

    while waiting or engine.has_work:
        while waiting and len(engine.scheduler.waiting) < 4:
            name, prompt, params = waiting.pop()
            engine.add(name, prompt, params)
        for output in engine.step():
            take(output)


def decode_greedily(engine: Engine, prompts: Sequence[Ids], max_new: int) -> list[Decoded]:
    """Every prompt's greedy answer, in the order given."""
    found: dict[int, Decoded] = {}

    def keep(name: str, item: Decoded) -> None:
        found[int(name)] = Decoded(int(name), item.ids, item.rounds, item.accepted, item.drafted)

    params = SamplingParams(max_tokens=max_new)
    drive(engine, [(str(i), row.tolist(), params) for i, row in enumerate(prompts)], keep)
    return [found[i] for i in range(len(prompts))]


def served_corpus(prompts: Sequence[Ids], answers: Sequence[Decoded], categories: Sequence[str]) -> Corpus:
    """The answers as a corpus for the simulation; those of one token have no round and are left out."""
    used = [i for i, answer in enumerate(answers) if len(answer.ids) > 1]
    if not used:
        raise ValueError("no served answer has more than one token")
    rows = [np.concatenate([prompts[i], answers[i].ids]).astype(np.uint32) for i in used]
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
    prompt_lengths = np.array([len(prompts[i]) for i in used], dtype=np.int64)
    return Corpus(
        np.concatenate(rows),
        starts,
        lengths,
        prompt_lengths,
        prompt_lengths,
        tuple(categories[i] for i in used),
        len(answers) - len(used),
    )


def served_report(answers: Sequence[Decoded], categories: Sequence[str]) -> dict[str, Any]:
    """Acceptance length of real rounds, over everything and per category; a first token comes without a round."""

    def total(items: Sequence[Decoded]) -> dict[str, Any]:
        tokens, rounds = sum(len(item.ids) - 1 for item in items), sum(item.rounds for item in items)
        drafted = sum(item.drafted for item in items) / max(rounds, 1)
        return {
            "acceptance_length": tokens / max(rounds, 1),
            "tokens": tokens,
            "rounds": rounds,
            "drafted_per_round": round(drafted, 3),
        }

    names = sorted(set(categories))
    by_name = {n: total([a for a, c in zip(answers, categories, strict=True) if c == n]) for n in names}
    return {**total(answers), "responses": len(answers), "categories": by_name}
