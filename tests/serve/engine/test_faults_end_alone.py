"""Faults inside a step: drafters that raise or answer nonsense cost speed, one request's failure costs that request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from serve.config import ServeConfig
from serve.drafter.base import DraftRequest
from serve.engine.build import build_engine
from serve.engine.engine import MAX_FAILED_PASSES, Engine
from serve.protocol import encode_frame
from tests.serve.drafter.random_drafters import drafter_config, random_drafter, write_drafter
from tests.serve.engine.test_engine import GREEDY, PROMPTS, collect, ids, run
from tests.tiny_models import greedy, write_model


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[ServeConfig, list[list[int]]]:
    """Settings of a model with a block drafter that drafts in every round, and the answers of the model alone."""
    folder = tmp_path_factory.mktemp("faults")
    model = write_model(folder / "model", num_hidden_layers=5)
    write_drafter(folder / "drafter", random_drafter(drafter_config()))
    config = ServeConfig(
        model_dir=str(folder / "model"),
        drafter_dir=str(folder / "drafter"),
        weights="fp32",
        page_size=16,
        max_num_seqs=8,
        max_batch_tokens=32,
        threads=1,
        block_length=3,
    )
    return config, [greedy(model, prompt, 24) for prompt in PROMPTS]


def raise_index_error(*_: Any) -> Any:
    raise IndexError("list index out of range")


Drafts = Callable[[Sequence[DraftRequest]], Any]
NONSENSE: dict[str, Drafts] = {
    "raises": raise_index_error,
    "outside the vocabulary": lambda requests: [[10**6]] * len(requests),
    "negative": lambda requests: [[-1]] * len(requests),
    "too long": lambda requests: [[5] * (request.max_length + 1) for request in requests],
    "too many": lambda requests: [[5]] * (len(requests) + 1),
    "too few": lambda requests: [],
    "no ids": lambda requests: ["text"] * len(requests),
    "none": lambda requests: None,
}


@pytest.mark.parametrize("kind", NONSENSE)
def test_nonsense_from_the_drafter_is_counted_and_changes_no_id(
    pair: tuple[ServeConfig, list[list[int]]], kind: str
) -> None:
    config, expected = pair
    engine, _ = build_engine(config)
    engine.lookup = None
    drafter: Any = engine.block
    drafter.propose = NONSENSE[kind]
    assert run(engine, PROMPTS, GREEDY) == expected
    assert engine.stats().drafter_faults == 3
    assert engine.block is None
    assert engine.runner.observer is None


def test_nan_inside_the_drafter_is_a_counted_fault(pair: tuple[ServeConfig, list[list[int]]]) -> None:
    config, expected = pair
    engine, _ = build_engine(config)
    engine.lookup = None
    drafter: Any = engine.block
    forward = drafter.forward
    drafter.forward = lambda batch: forward(batch) * float("nan")
    assert run(engine, PROMPTS, GREEDY) == expected
    assert engine.stats().drafter_faults == 3


def test_a_drafter_that_fails_to_observe_fails_no_request(pair: tuple[ServeConfig, list[list[int]]]) -> None:
    config, expected = pair
    engine, _ = build_engine(config)
    drafter: Any = engine.block
    drafter.observe = raise_index_error
    assert run(engine, PROMPTS, GREEDY) == expected
    assert engine.stats().drafter_faults == 3


def test_a_failing_choice_of_block_lengths_means_plain_decoding(pair: tuple[ServeConfig, list[list[int]]]) -> None:
    config, expected = pair
    engine, _ = build_engine(config)
    engine.controller.plan = raise_index_error  # type: ignore[assignment,method-assign]
    assert run(engine, PROMPTS, GREEDY) == expected
    assert engine.stats().drafter_faults == 3
    assert (engine.block, engine.lookup) == (None, None)


def poison(engine: Engine, fail: Callable[[Any], None]) -> None:
    """Call ``fail`` with the works of every pass before it."""
    forward = engine.runner.forward

    def poisoned(works: Any) -> Any:
        fail(works)
        return forward(works)

    engine.runner.forward = poisoned  # type: ignore[method-assign]


@pytest.mark.parametrize("kind", [IndexError, MemoryError, torch.OutOfMemoryError, TypeError])
def test_a_pass_that_fails_for_one_request_ends_that_one(
    pair: tuple[ServeConfig, list[list[int]]], kind: type[Exception]
) -> None:
    config, expected = pair
    engine, _ = build_engine(replace(config, proposer="none"))

    def fail(works: Any) -> None:
        if any(work.sequence.id == "5" for work, _ in works):
            raise kind("not this one")

    poison(engine, fail)
    for index, prompt in enumerate(PROMPTS):
        engine.add(str(index), prompt, GREEDY)
    outputs = collect(engine)
    assert outputs["5"][-1].finish_reason == "error"
    assert [ids(outputs[str(index)]) for index in range(5)] == expected[:5]


def test_a_request_whose_text_cannot_be_made_ends_alone(pair: tuple[ServeConfig, list[list[int]]]) -> None:
    config, expected = pair
    engine, _ = build_engine(replace(config, proposer="none"))
    for index, prompt in enumerate(PROMPTS):
        engine.add(str(index), prompt, GREEDY)
    sequence = engine._requests.get("2")
    assert sequence is not None
    sequence.text.push = raise_index_error  # type: ignore[assignment,method-assign]
    outputs = collect(engine)
    assert outputs["2"][-1].finish_reason == "error"
    others = [index for index in range(len(PROMPTS)) if index != 2]
    assert [ids(outputs[str(index)]) for index in others] == [expected[index] for index in others]


@pytest.mark.parametrize("position", [3, 40])
def test_a_prompt_with_a_row_that_cannot_be_scored_ends_alone(
    pair: tuple[ServeConfig, list[list[int]]], position: int
) -> None:
    config, expected = pair
    engine, _ = build_engine(replace(config, proposer="none"))
    forward = engine.runner.forward

    def one_bad_row(works: Any) -> Any:
        logits, rows = forward(works)
        for (work, _), where in zip(works, rows, strict=True):
            if work.sequence.id == "scored" and work.start <= position < work.start + work.count:
                logits = logits.clone()
                logits[where.first + position - work.start] = float("nan")
        return logits, rows

    engine.runner.forward = one_bad_row  # type: ignore[method-assign]
    engine.add("scored", PROMPTS[2], replace(GREEDY, prompt_logprobs=1))
    engine.add("0", PROMPTS[0], GREEDY)
    outputs = collect(engine)
    for output in outputs["scored"]:
        encode_frame(output.to_json())  # what it refuses ends the process
    assert outputs["scored"][-1].finish_reason == "error"
    assert "NaN" in (outputs["scored"][-1].error or "")
    assert ids(outputs["0"]) == expected[0]


@pytest.mark.parametrize("weights", ["fp32", "int8"])  # in torch; the layers in C and the drafter in torch
def test_pages_that_a_request_left_full_of_nan_harm_nobody_who_gets_them(
    pair: tuple[ServeConfig, list[list[int]]], weights: str
) -> None:
    config = replace(pair[0], weights=weights)
    untouched, _ = build_engine(config)
    engine, _ = build_engine(config)
    model: Any = engine.runner.model
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "embed", lambda ids: torch.full((len(ids), 64), float("nan")))
        engine.add("bad", [5] * 40, GREEDY)
        assert [output.finish_reason for output in collect(engine)["bad"]] == ["error"]
    for prompt in PROMPTS:  # one at a time: the pages that were freed last are taken first
        assert run(engine, [prompt], GREEDY) == run(untouched, [prompt], GREEDY)
    assert engine.stats().drafter_faults == 0
    assert engine.stats().draft_tokens > 0


def test_an_engine_whose_passes_all_fail_gives_up(pair: tuple[ServeConfig, list[list[int]]]) -> None:
    config, _ = pair
    engine, _ = build_engine(replace(config, proposer="none"))
    poison(engine, raise_index_error)
    for number in range(MAX_FAILED_PASSES):
        engine.add(str(number), [5, 6], GREEDY)
    assert all(output.finish_reason == "error" for outputs in collect(engine).values() for output in outputs)
    engine.add("one more", [5, 6], GREEDY)
    with pytest.raises(IndexError):
        engine.step()


def test_a_lost_device_ends_the_engine_at_once(pair: tuple[ServeConfig, list[list[int]]]) -> None:
    config, _ = pair
    engine, _ = build_engine(replace(config, proposer="none"))

    def fail(works: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    poison(engine, fail)
    engine.add("0", [5, 6], GREEDY)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        engine.step()


def test_a_pass_that_fails_after_refusing_the_newest_request_ends_the_next_newest(
    pair: tuple[ServeConfig, list[list[int]]],
) -> None:
    config, expected = pair
    engine, _ = build_engine(replace(config, proposer="none"))
    for index, prompt in enumerate(PROMPTS[:3]):
        engine.add(str(index), prompt, GREEDY)
    while any(sequence.num_output < 2 for sequence in engine.scheduler.running) or engine.scheduler.waiting:
        engine.step()
    sample = engine._sample

    def refuse_and_fail(works: Any, logits: Any, rows: Any) -> Any:
        engine._sample = sample  # type: ignore[method-assign]
        engine._requests.fail(engine.scheduler.running[2], "no token can be chosen")
        raise RuntimeError("and then the pass failed")

    engine._sample = refuse_and_fail  # type: ignore[method-assign]
    failed = {output.id for output in engine.step() if output.finish_reason == "error"}
    assert failed == {"1", "2"}
    outputs = collect(engine)
    assert set(outputs) == {"0"}
    assert ids(outputs["0"]) == expected[0][-len(ids(outputs["0"])) :]
