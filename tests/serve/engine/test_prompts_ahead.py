"""Prefill passes launched before the pass before them is read: the host need not know a prompt's first token to go on,
and what goes wrong in a pass ends the request it belongs to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from serve.engine.engine import Engine
from serve.protocol import SamplingParams
from tests.serve.engine.graph_engines import hash_engine, use_twins
from tests.serve.engine.hash_model import HashDrafter, continuation
from tests.serve.engine.test_engine import collect, ids
from verify.lossless import RandomLengths

GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)
PROMPTS = {str(n): [*range(20 + n, 50 + n)] for n in range(4)}
"""Each of them fills a pass of 32 rows."""


@pytest.fixture(autouse=True)
def _quick_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    use_twins(monkeypatch)


def noted(engine: Engine) -> list[str]:
    """What is launched and read from here on, in order: passes and steps."""
    ahead: Any = engine._ahead
    order: list[str] = []

    def note(owner: Any, name: str, word: str) -> None:
        call = getattr(owner, name)

        def inner(*args: Any) -> Any:
            order.append(word)
            return call(*args)

        setattr(owner, name, inner)

    note(ahead._first_tokens, "launch", "pass")
    note(ahead._first_tokens, "read", "read pass")
    note(ahead.graphs, "launch", "step")
    note(ahead.graphs, "read", "read step")
    return order


def test_a_pass_is_launched_before_the_one_before_it_is_read(tiny_model_dir: Path) -> None:
    engine = hash_engine(tiny_model_dir)
    order = noted(engine)
    for name, prompt in PROMPTS.items():
        engine.add(name, prompt, replace(GREEDY, provenance=True))
    outputs = collect(engine)
    for name, prompt in PROMPTS.items():
        assert ids(outputs[name]) == continuation(prompt, 8)
        assert [output.round for output in outputs[name]] == [None, *[("", 0, 0)] * 7]
    # A decoded token does not wait for the pass launched behind it.
    assert order[:9] == ["pass", "pass", "read pass", "step", "pass", "read pass", "read step", "step", "pass"]
    assert order.count("read pass") == order.count("pass") > 3
    assert order.count("read step") == order.count("step")


def test_a_prompt_finds_the_pages_of_one_that_is_on_its_way(tiny_model_dir: Path) -> None:
    engine = hash_engine(tiny_model_dir)
    engine.add("first", PROMPTS["0"], GREEDY)
    assert engine.step() == []
    engine.add("second", PROMPTS["0"], GREEDY)
    outputs = collect(engine)
    assert ids(outputs["first"]) == ids(outputs["second"]) == continuation(PROMPTS["0"], 8)
    final = outputs["second"][-1].final
    assert final is not None
    assert final["cached_tokens"] == 16


@pytest.mark.parametrize("drafted", [False, True])
def test_a_first_token_that_is_no_number_ends_its_request_alone(tiny_model_dir: Path, drafted: bool) -> None:
    engine = hash_engine(tiny_model_dir, drafter=HashDrafter() if drafted else None)
    engine.controller = RandomLengths(engine.controller)
    model: Any = engine.runner.model
    firsts = {name: continuation(prompt, 1)[0] for name, prompt in PROMPTS.items()}
    fine = [name for name in PROMPTS if firsts["1"] not in continuation(PROMPTS[name], 8)]
    assert fine
    model.poisoned = {firsts["1"]}
    for name in ("1", *fine):
        engine.add(name, PROMPTS[name], GREEDY)
    outputs = collect(engine)
    for name in fine:
        assert ids(outputs[name]) == continuation(PROMPTS[name], 8)
    assert [output.finish_reason for output in outputs["1"]] == ["error"]
    assert "NaN" in (outputs["1"][0].error or "")
    model.poisoned = set()
    engine.add("again", PROMPTS["1"], GREEDY)
    outputs = collect(engine)
    assert ids(outputs["again"]) == continuation(PROMPTS["1"], 8)
    final = outputs["again"][-1].final
    assert final is not None
    assert final["cached_tokens"] == 0


def cached_tokens(engine: Engine, name: str, prompt: list[int]) -> int:
    """How many tokens of ``prompt`` a request finds in the prefix cache; its answer is right."""
    engine.add(name, prompt, GREEDY)
    outputs = collect(engine)[name]
    assert ids(outputs) == continuation(prompt, 8)
    final = outputs[-1].final
    assert final is not None
    engine.check()
    return int(final["cached_tokens"])


@pytest.mark.parametrize("drafted", [False, True])
def test_a_spoilt_pass_takes_its_own_pages_from_the_cache_and_nobody_elses(tiny_model_dir: Path, drafted: bool) -> None:
    engine = hash_engine(tiny_model_dir, drafter=HashDrafter() if drafted else None)
    engine.controller = RandomLengths(engine.controller)
    assert cached_tokens(engine, "other", PROMPTS["3"]) == 0
    model: Any = engine.runner.model
    model.poisoned = {continuation(PROMPTS["1"], 1)[0]}
    engine.add("spoilt", PROMPTS["1"], GREEDY)
    longer = [*PROMPTS["1"], *range(60, 80)]
    engine.step()
    model.poisoned = set() if drafted else model.poisoned
    engine.add("behind", longer, GREEDY)  # finds the pages of the pass on its way, and continues them
    engine.step()
    collect(engine)
    model.poisoned = set()
    assert cached_tokens(engine, "again", longer) == 0
    assert cached_tokens(engine, "other again", PROMPTS["3"]) == 16


def test_a_spoilt_pass_of_a_request_that_was_cancelled_leaves_nothing_in_the_cache(tiny_model_dir: Path) -> None:
    engine = hash_engine(tiny_model_dir)
    model: Any = engine.runner.model
    engine.add("mate", PROMPTS["3"], replace(GREEDY, max_tokens=40))
    for _ in range(4):
        engine.step()
    model.poisoned = {continuation(PROMPTS["1"], 1)[0]}
    engine.add("spoilt", PROMPTS["1"], GREEDY)
    while "spoilt" not in {passenger.work.sequence.id for passenger in flight_of(engine).passengers}:
        engine.step()
    engine.cancel("spoilt")
    engine.step()
    model.poisoned = set()
    collect(engine)
    assert cached_tokens(engine, "again", PROMPTS["1"]) == 0
    assert cached_tokens(engine, "mate again", PROMPTS["3"]) == 16


def flight_of(engine: Engine) -> Any:
    assert engine._flight is not None
    return engine._flight


def test_a_prompt_in_parts_that_ends_in_nan_leaves_none_of_its_parts_in_the_cache(tiny_model_dir: Path) -> None:
    for graphs in (True, False):
        engine = hash_engine(tiny_model_dir, graphs=graphs)
        prompt = [*range(20, 100)]  # three passes of 32 rows
        model: Any = engine.runner.model
        model.poisoned = {continuation(prompt, 1)[0]}
        engine.add("spoilt", prompt, GREEDY)
        assert [output.finish_reason for output in collect(engine)["spoilt"]] == ["error"]
        model.poisoned = set()
        assert cached_tokens(engine, "again", prompt) == 0


def test_parts_of_a_cancelled_prompt_that_bring_nan_to_the_next_one_are_not_found_twice(tiny_model_dir: Path) -> None:
    for graphs in (True, False):
        engine = hash_engine(tiny_model_dir, graphs=graphs)
        prompt = [*range(20, 100)]
        engine.add("cancelled", prompt, GREEDY)
        engine.step()
        engine.cancel("cancelled")
        model: Any = engine.runner.model
        model.poisoned = {continuation(prompt, 1)[0]}
        engine.add("next", prompt, GREEDY)
        assert [output.finish_reason for output in collect(engine)["next"]] == ["error"]
        assert engine.scheduler.prefix_hits == 32
        model.poisoned = set()
        assert cached_tokens(engine, "again", prompt) == 0


def test_a_pass_that_fails_ends_its_newest_prompt_and_no_other(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = hash_engine(tiny_model_dir)
    forward = engine.runner.forward_batch

    def failing(batch: Any) -> torch.Tensor:
        if PROMPTS["3"][-1] in batch.token_ids.tolist():
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(batch)

    monkeypatch.setattr(engine.runner, "forward_batch", failing)
    for name in ("0", "1", "3"):
        engine.add(name, PROMPTS[name], replace(GREEDY, max_tokens=30))
    outputs = collect(engine)
    for name in ("0", "1"):
        assert ids(outputs[name]) == continuation(PROMPTS[name], 30)
    assert [output.finish_reason for output in outputs["3"]] == ["error"]
    assert "out of memory" in (outputs["3"][-1].error or "")


def test_prompts_that_the_host_has_to_choose_for_run_beside_others(tiny_model_dir: Path) -> None:
    engine = hash_engine(tiny_model_dir)
    order = noted(engine)
    engine.add("greedy", PROMPTS["0"], GREEDY)
    engine.add("penalised", PROMPTS["1"], replace(GREEDY, repetition_penalty=1.0001))
    engine.add("scored", PROMPTS["2"], replace(GREEDY, prompt_logprobs=0))
    outputs = collect(engine)
    for name, prompt in (("greedy", "0"), ("penalised", "1"), ("scored", "2")):
        assert ids(outputs[name]) == continuation(PROMPTS[prompt], 8)
    assert "pass" in order
    assert any(output.prompt_logprobs for output in outputs["scored"])
