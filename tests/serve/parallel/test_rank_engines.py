"""An engine of several ranks writes what one rank writes: every family, heads split and replicated, with drafts of all
kinds, through pages, shared prefixes and preemption."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from serve.config import ServeConfig
from serve.engine.build import build_engine
from serve.engine.engine import Engine
from serve.kernels.native.ops import NativeLibrary
from serve.model import loader
from serve.protocol import SamplingParams
from tests.serve.drafter.random_drafters import drafter_config, random_drafter, write_drafter
from tests.serve.parallel.thread_ranks import thread_ranks
from tests.tiny_models import write_model
from verify.lossless import RandomLengths

PROMPTS = [[10, 20, 30], [50, 60] * 9, list(range(40, 110)), [7], [99, 98, 97, 96] * 5]
GREEDY = SamplingParams(max_tokens=10, ignore_eos=True)
SAMPLED = (
    GREEDY,
    replace(GREEDY, temperature=0.9, seed=5, top_p=0.9),
    replace(GREEDY, repetition_penalty=1.3),
)


@pytest.fixture(scope="module")
def library() -> NativeLibrary | None:
    return loader._native_library()


@pytest.fixture(autouse=True)
def quick_starts(library: NativeLibrary | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The matrix kernels are proved once, and not by every rank."""
    monkeypatch.setattr(loader, "_native_library", lambda: library)
    monkeypatch.setattr("serve.engine.costs.COST_SECONDS", 0.0)


def config_of(folder: Path, **changes: Any) -> ServeConfig:
    settings: dict[str, Any] = {
        "weights": "fp32",
        "page_size": 16,
        "max_num_seqs": 8,
        "max_batch_tokens": 32,
        "threads": 1,
        "proposer": "none",
        **changes,
    }
    return ServeConfig(model_dir=str(folder), **settings)


def run(engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    for index, prompt in enumerate(prompts):
        engine.add(str(index), prompt, params)
    got: list[list[int]] = [[] for _ in prompts]
    for _ in range(2000):
        if not engine.has_work:
            engine.check()
            return got
        for output in engine.step():
            assert output.error is None
            got[int(output.id)] += output.token_ids
    raise AssertionError("the engine did not come to an end")


def test_two_and_four_ranks_write_what_one_writes(tmp_path: Path) -> None:
    """Two K/V heads: split between two ranks, each kept twice by four."""
    write_model(tmp_path, "qwen3", seed=3, tie_word_embeddings=True)
    config = config_of(tmp_path)
    engine, _ = build_engine(config)
    expected = run(engine, PROMPTS)
    for ranks in (2, 4):
        with thread_ranks(replace(config, tensor_parallel=ranks)) as (engine, failed):
            assert run(engine, PROMPTS) == expected
            assert run(engine, PROMPTS[:3]) == expected[:3], "warm prefix cache"
            assert engine.stats().prefix_hits > 0
            heads = engine.runner.cache.kv_heads
        assert heads == 1
        assert failed == []


def test_biases_are_added_once_and_sampled_rows_read_the_logits_of_all_ranks(tmp_path: Path) -> None:
    write_model(tmp_path, "llama", seed=3, attention_bias=True, mlp_bias=True)
    engine, _ = build_engine(config_of(tmp_path))
    expected = [run(engine, PROMPTS[:3], params) for params in SAMPLED]
    with thread_ranks(config_of(tmp_path, tensor_parallel=2)) as (engine, failed):
        assert [run(engine, PROMPTS[:3], params) for params in SAMPLED] == expected
    assert failed == []


def test_drafter_lookup_and_preemption_change_no_id_on_two_ranks(tmp_path: Path) -> None:
    folder, drafter = tmp_path / "model", tmp_path / "drafter"
    write_model(folder, "qwen3", seed=3, num_hidden_layers=5)
    write_drafter(drafter, random_drafter(drafter_config()))
    engine, _ = build_engine(config_of(folder))
    prompts = [[10 + i, 20, 30] for i in range(5)] + [[50, 60] * 9]
    params = replace(GREEDY, max_tokens=40)
    expected = run(engine, prompts, params)
    config = config_of(folder, proposer="auto", drafter_dir=str(drafter), kv_memory_mib=2, tensor_parallel=2)
    with thread_ranks(config) as (engine, failed):
        engine.controller = RandomLengths(engine.controller)
        assert engine.lookup is not None
        pool = engine.scheduler.pool
        taken = pool.allocate(pool.num_pages - 9)
        assert taken is not None
        for index, prompt in enumerate(prompts):
            engine.add(str(index), prompt, params)
        got: list[list[int]] = [[] for _ in prompts]
        while engine.has_work:
            for output in engine.step():
                got[int(output.id)] += output.token_ids
        assert got == expected
        stats = engine.stats()
        assert stats.preemptions > 0
        assert stats.draft_tokens > 0
        assert stats.drafter_faults == 0
    assert failed == []


def test_integer_weights_are_served_by_two_ranks(tmp_path: Path) -> None:
    """Not the ids of one rank: activations are rounded in other company. But the same ones in any batch."""
    write_model(tmp_path, "qwen3", seed=3, hidden_size=64, intermediate_size=128)
    with thread_ranks(config_of(tmp_path, tensor_parallel=2, weights="int8")) as (engine, failed):
        together = run(engine, PROMPTS)
        assert [run(engine, [prompt])[0] for prompt in PROMPTS] == together
    assert failed == []


def test_a_drafter_of_nans_is_switched_off_on_all_ranks(tmp_path: Path) -> None:
    folder, drafter = tmp_path / "model", tmp_path / "drafter"
    write_model(folder, "qwen3", seed=3, num_hidden_layers=5)
    write_drafter(drafter, random_drafter(drafter_config()))
    engine, _ = build_engine(config_of(folder))
    expected = run(engine, PROMPTS)
    config = config_of(folder, proposer="block", lookup=False, drafter_dir=str(drafter), tensor_parallel=2)
    with thread_ranks(config) as (engine, failed):
        engine.controller = RandomLengths(engine.controller)
        block: Any = engine.block
        block._norm.fill_(float("nan"))
        assert run(engine, PROMPTS) == expected
        assert engine.block is None
        assert engine.stats().drafter_faults == 3
    assert failed == []
