"""Prefill passes through graphs: the same text, a drafter that sees all of its context, and passes that have none."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from serve.engine.prompts import SEQUENCES, PromptGraphs
from serve.kernels.triton import turing
from serve.kernels.triton.attention import SPLIT_ROWS
from serve.model.batch import FlatBatch
from serve.protocol import SamplingParams
from tests.serve.engine.graph_engines import hash_engine, triton_engine
from tests.serve.engine.hash_model import HashDrafter, continuation
from tests.tiny_models import write_model


@pytest.mark.parametrize("drafted", [False, True])
def test_prompts_through_graphs_have_the_text_of_their_own(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, drafted: bool
) -> None:
    passes: list[int] = []
    run = PromptGraphs.run

    def counted(self: PromptGraphs, batch: FlatBatch) -> torch.Tensor:
        passes.append(len(batch.page_tables))
        return run(self, batch)

    monkeypatch.setattr(PromptGraphs, "run", counted)
    drafter = HashDrafter(spoil=4) if drafted else None
    engine = hash_engine(tiny_model_dir, drafter=drafter, prompt_rows=128, block_length=3 if drafted else 0)
    engine.scheduler.max_batch_tokens = 90
    engine.scheduler.least_chunk = SPLIT_ROWS + 1
    rng = random.Random(1)
    prompts = {str(n): [rng.randrange(4, 300) for _ in range(length)] for n, length in enumerate((20, 33, 64, 17, 50))}
    for name, ids in prompts.items():
        engine.add(name, ids, SamplingParams(max_tokens=12, ignore_eos=True))
    found: dict[str, list[int]] = {name: [] for name in prompts}
    while engine.has_work:
        for output in engine.step():
            found[output.id] += output.token_ids
    assert found == {name: continuation(ids, 12) for name, ids in prompts.items()}
    del passes[:2]  # the trials at the start
    assert passes
    assert max(passes) > 1
    if drafted:
        assert engine.stats().accepted_tokens > 0


def test_passes_that_no_graph_has_room_for_are_left_alone(tiny_model_dir: Path) -> None:
    engine = hash_engine(tiny_model_dir, prompt_rows=64)
    graphs = engine.runner.ahead.graphs.prompts  # type: ignore[union-attr]
    assert graphs is not None
    assert graphs.buckets == (64,)
    for lengths in ((SPLIT_ROWS,), (65,), (17,) * (SEQUENCES + 1), (20, 3)):
        for number, length in enumerate(lengths):
            engine.add(str(number), [5] * length, SamplingParams(max_tokens=4))
        engine.scheduler.max_num_seqs = SEQUENCES + 1
        engine.scheduler.max_batch_tokens = 300
        works = [(work, ()) for work in engine.scheduler.plan().prefills]
        assert len(works) == len(lengths)
        assert not graphs.takes(engine.runner.build_batch(works)[0])
        for number in range(len(lengths)):
            engine.cancel(str(number))


@pytest.mark.gpu
def test_a_prompt_has_the_same_bits_with_and_without_a_graph(tmp_path: Path) -> None:
    turing.install()
    write_model(tmp_path, "qwen3", hidden_size=256, intermediate_size=512)
    engine = triton_engine(
        tmp_path, device=torch.device("cuda"), max_batch_tokens=256, max_num_seqs=6, prompt_graphs=True
    )
    graphs = engine.runner.ahead.graphs.prompts  # type: ignore[union-attr]
    assert graphs is not None
    rng = random.Random(2)
    for number, length in enumerate((40, 21, 130)):
        engine.add(str(number), [rng.randrange(4, 300) for _ in range(length)], SamplingParams(max_tokens=4))
    batch, _ = engine.runner.build_batch([(work, ()) for work in engine.scheduler.plan().prefills])
    assert graphs.takes(batch)
    got = graphs.run(batch)
    assert torch.equal(got, engine.runner.model.forward(batch, engine.runner.cache).logits)


def test_graphs_that_differ_from_the_eager_pass_are_not_used(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = PromptGraphs.run

    def spoilt(self: PromptGraphs, batch: FlatBatch) -> torch.Tensor:
        return run(self, batch) + 1

    monkeypatch.setattr(PromptGraphs, "run", spoilt)
    engine = hash_engine(tiny_model_dir, prompt_rows=64)
    assert engine.runner.ahead is not None
    assert engine.runner.ahead.graphs.prompts is None
    assert "other bits" in caplog.text
