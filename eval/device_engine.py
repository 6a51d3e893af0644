"""Engines with random weights of the real shapes in this process, and what their steps take on the card.

Speed is that of the real model; acceptance and accuracy mean nothing, and a random drafter is one that is always wrong.
Knows the engine; no HTTP and no report.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scripts.device_kernels import qwen3_4b
from scripts.kernel_timing import random_model
from serve.config import ServeConfig
from serve.drafter.dflash import DFlashConfig, parameter_shapes
from serve.drafter.triton_block import TritonBlockDrafter
from serve.engine.build import assemble
from serve.engine.engine import Engine
from serve.engine.graphs import StepGraphs
from serve.engine.lanes import Lane
from serve.engine.memory import MemorySpent
from serve.model.config import ModelConfig
from serve.model.triton_layers import TritonTargetModel
from serve.parallel.ranks import Ranks
from serve.protocol import SamplingParams
from serve.tokenizer import load_tokenizer

DRAFT_LAYERS = 5
BLOCK = 16
PROMPT_TOKENS = 64
WARM_STEPS = 8


@dataclass(frozen=True)
class Speed:
    """Steady decoding of some streams: ms a step and tokens a second by the clock, with how many tokens a step gave."""

    streams: int
    step_ms: float
    tokens_per_second: float
    tokens_per_step: float


def target(weights: str, layers: int, device: torch.device) -> TritonTargetModel:
    """A 4 B qwen3 with random weights."""
    with torch.inference_mode():
        return random_model(qwen3_4b(layers), weights, device)


def wrong_drafter(model: TritonTargetModel, whole: ModelConfig | None = None) -> TritonBlockDrafter:
    """A block drafter of five layers with random weights. whole: the config where ``model`` is a rank's part."""
    config = whole or model.config
    depth = config.num_layers
    shape = DFlashConfig(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=DRAFT_LAYERS,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        block_size=BLOCK,
        mask_token_id=config.vocab_size - 1,
        target_layer_ids=tuple(1 + i * max(1, depth - 4) // (DRAFT_LAYERS - 1) for i in range(DRAFT_LAYERS)),
        num_target_layers=depth,
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=config.rope.theta,
        max_position_embeddings=config.max_position_embeddings,
        dtype="bfloat16",
    )
    generator = torch.Generator(model.device).manual_seed(7)

    def values(size: tuple[int, ...]) -> Tensor:
        if len(size) == 1:
            return torch.ones(size, device=model.device)
        scale: float = size[1] ** -0.5
        return torch.randn(size, generator=generator, device=model.device, dtype=torch.bfloat16) * scale

    weights = {name: values(size) for name, size in parameter_shapes(shape).items()}
    return TritonBlockDrafter(shape, weights, model, "random")


def engine_of(
    model: TritonTargetModel,
    tokenizer_dir: Path,
    drafter: TritonBlockDrafter | None,
    streams: int,
    ranks: Ranks | None = None,
    **settings: Any,
) -> Engine:
    """An engine without prompt lookup, with room for ``streams`` sequences of some 2,000 tokens. ranks: those that
    share the model, which make theirs of the same ``engine_config``."""
    config = engine_config(model, tokenizer_dir, drafter, streams, **settings)
    return assemble(config, model, load_tokenizer(tokenizer_dir), drafter, MemorySpent(model.device), [], ranks)


def engine_config(
    model: TritonTargetModel, tokenizer_dir: Path, drafter: TritonBlockDrafter | None, streams: int, **settings: Any
) -> ServeConfig:
    """The settings of ``engine_of``."""
    pages = streams * 64 + 512
    size = model.kv_bytes_per_page(32) + (drafter.kv_bytes_per_page(32) if drafter is not None else 0)
    return ServeConfig(
        model_dir=str(tokenizer_dir),
        max_num_seqs=streams,
        proposer="none" if drafter is None else "block",
        drafter_dir=None,
        lookup=False,
        prefix_cache=False,
        kv_memory_mib=(pages * size >> 20) + 1,
        **settings,
    )


def decode(engine: Engine, streams: int, steps: int, prompt_tokens: int = PROMPT_TOKENS) -> Speed:
    """``steps`` steps of so many streams, after their prompts and a few steps for warming up."""
    rng = random.Random(5)
    params = SamplingParams(max_tokens=(steps + WARM_STEPS + 4) * (BLOCK + 1), ignore_eos=True)
    for number in range(streams):
        engine.add(str(number), [rng.randrange(1000, 40_000) for _ in range(prompt_tokens)], params)
    started: dict[str, bool] = {}
    while len(started) < streams:
        started |= {output.id: True for output in engine.step()}
    for _ in range(WARM_STEPS):
        engine.step()
    torch.cuda.synchronize()
    before = time.perf_counter()
    tokens = sum(len(output.token_ids) for _ in range(steps) for output in engine.step())
    torch.cuda.synchronize()
    took = time.perf_counter() - before
    for number in range(streams):
        engine.cancel(str(number))
    engine.step()
    return Speed(streams, took / steps * 1e3, tokens / took, tokens / steps)


def device_ms(graphs: StepGraphs, lanes: Sequence[Lane], repeats: int = 12) -> tuple[float, float]:
    """Milliseconds of a step's draft pass and of the rest between CUDA events, back to back: medians."""
    graphs.read(graphs.launch(lanes))
    drafts, verifies = [], []
    launched = graphs.launch(lanes)
    for _ in range(repeats):
        following = graphs.launch(lanes)
        outcome = graphs.read(launched)
        drafts.append(outcome.draft_seconds * 1e3)
        verifies.append(outcome.verify_seconds * 1e3)
        launched = following
    graphs.read(launched)
    return sorted(drafts)[repeats // 2], sorted(verifies)[repeats // 2]


def lanes_at(graphs: StepGraphs, streams: int, rows: int, context: int, *, drafted: bool = False) -> list[Lane]:
    """``streams`` sequences with ``context`` positions each on pages of their own; ``rows`` rows each."""
    size = graphs.cache.page_size
    pages = -(-(context + 2 * BLOCK) // size)
    return [
        Lane(
            place=-1,
            start=context,
            anchor=100 + s,
            pages=range(s * pages, (s + 1) * pages),
            end=pages * size,
            latest=context,
            draft=() if drafted else (5,) * (rows - 1),
            wanted=rows - 1 if drafted else 0,
        )
        for s in range(streams)
    ]


def replay_ms(replay: Callable[[], object], repeats: int = 20) -> float:
    """Milliseconds of a graph replayed again and again with nothing between."""
    events: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
    start, stop = events
    replay()
    start.record()
    for _ in range(repeats):
        replay()
    stop.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(stop)) / repeats
