"""The step loop over a real two-layer model: batching, drafts, endings, preemption and faults."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from serve.config import ServeConfig
from serve.drafter.base import DraftRequest
from serve.engine.build import StartError, build_engine
from serve.engine.engine import Engine
from serve.protocol import Output, SamplingParams
from tests.tiny_models import greedy, write_model
from verify.lossless import RandomLengths, RehearsedDrafts

PROMPTS = [[10, 20, 30], [50, 60] * 9, list(range(40, 110)), [7], [99, 98, 97, 96, 95, 94] * 6, list(range(4, 60))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("engine-model")
    return folder, write_model(folder, "qwen3", seed=3)


@pytest.fixture
def config(model: tuple[Path, Any]) -> ServeConfig:
    return ServeConfig(
        model_dir=str(model[0]), weights="fp32", page_size=16, max_num_seqs=8, max_batch_tokens=32, threads=1
    )


@pytest.fixture(scope="module")
def expected(model: tuple[Path, Any]) -> list[list[int]]:
    return [greedy(model[1], prompt, 24) for prompt in PROMPTS]


def collect(engine: Engine, limit: int = 2000) -> dict[str, list[Output]]:
    """Step until nothing is left; the outputs of each request."""
    outputs: dict[str, list[Output]] = {}
    for _ in range(limit):
        if not engine.has_work:
            engine.check()
            assert engine.scheduler.pool.num_available == engine.scheduler.pool.num_pages
            return outputs
        for output in engine.step():
            outputs.setdefault(output.id, []).append(output)
    raise AssertionError("the engine did not come to an end")


def ids(outputs: Sequence[Output]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def text(outputs: Sequence[Output]) -> str:
    return "".join(output.text for output in outputs)


def run(engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[list[int]]:
    for index, prompt in enumerate(prompts):
        engine.add(str(index), prompt, params)
    outputs = collect(engine)
    return [ids(outputs[str(index)]) for index in range(len(prompts))]


GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)


def test_greedy_ids_equal_transformers(config: ServeConfig, expected: list[list[int]]) -> None:
    engine, _ = build_engine(replace(config, proposer="none"))
    assert run(engine, PROMPTS, GREEDY) == expected


@pytest.mark.parametrize("block_length", [-1, 1, 3, 15])
def test_prompt_lookup_changes_no_id(config: ServeConfig, expected: list[list[int]], block_length: int) -> None:
    engine, _ = build_engine(replace(config, proposer="lookup", block_length=block_length))
    assert run(engine, PROMPTS, GREEDY) == expected
    assert run(engine, PROMPTS, GREEDY) == expected, "warm prefix cache"


@pytest.mark.parametrize("fault", [0.0, 0.3, 1.0])
def test_any_draft_at_any_length_changes_no_id(config: ServeConfig, expected: list[list[int]], fault: float) -> None:
    engine, _ = build_engine(config)
    engine.lookup = None
    engine.controller = RandomLengths(engine.controller)
    known = {tuple(p): tuple(e) for p, e in zip(PROMPTS, expected, strict=True)}
    engine.block = RehearsedDrafts(known, 320, fault=fault)
    assert run(engine, PROMPTS, GREEDY) == expected
    stats = engine.stats()
    assert stats.draft_tokens > 0
    assert stats.generation_tokens == sum(map(len, expected))
    assert sum(stats.accepted_per_position) == stats.accepted_tokens
    if fault == 0.0:
        assert stats.accepted_tokens == stats.draft_tokens
    if fault == 1.0:
        assert stats.accepted_tokens < 0.1 * stats.draft_tokens


@pytest.mark.parametrize("drafts", [False, True])
def test_preemption_loses_and_repeats_nothing(config: ServeConfig, model: tuple[Path, Any], drafts: bool) -> None:
    prompts = [[10 + i, 20, 30] for i in range(6)]
    expected = [greedy(model[1], prompt, 80) for prompt in prompts]
    engine, info = build_engine(replace(config, kv_memory_mib=1, proposer="auto" if drafts else "none"))
    taken = engine.scheduler.pool.allocate(info["kv_pages"] - 12)
    assert taken is not None
    if drafts:
        engine.lookup = None
        engine.controller = RandomLengths(engine.controller)
        known = {tuple(p): tuple(e) for p, e in zip(prompts, expected, strict=True)}
        engine.block = RehearsedDrafts(known, 320, fault=0.3)
    for index, prompt in enumerate(prompts):
        engine.add(str(index), prompt, replace(GREEDY, max_tokens=80))
    got: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            got.setdefault(output.id, []).extend(output.token_ids)
        engine.scheduler.pool.check([taken, *(s.pages for s in engine.scheduler.running)])
    assert [got[str(i)] for i in range(len(prompts))] == expected
    assert engine.stats().preemptions > 0
    assert engine.scheduler.pool.num_available == 12


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0, "seed": 5},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "seed": 6},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4},
        {"logit_bias": ((5, 4.0), (6, -100.0)), "temperature": 0.9, "min_p": 0.05},
        {"min_tokens": 12, "ignore_eos": False, "temperature": 2.0},
    ],
)
def test_sampled_and_penalised_text_is_the_same_with_drafts(config: ServeConfig, params: dict[str, Any]) -> None:
    sampling = SamplingParams(**{"max_tokens": 24, "ignore_eos": True, **params})
    engine, _ = build_engine(replace(config, proposer="none"))
    plain = run(engine, PROMPTS, sampling)
    engine.controller = RandomLengths(type(engine.controller)(engine.controller.costs, 15))
    engine.block = RehearsedDrafts({tuple(p): tuple(e) for p, e in zip(PROMPTS, plain, strict=True)}, 320)
    engine.scheduler.lookahead = 15
    assert run(engine, PROMPTS, sampling) == plain
    assert engine.stats().accepted_tokens > 0


def test_different_seeds_differ_and_equal_seeds_repeat(config: ServeConfig) -> None:
    engine, _ = build_engine(config)
    draws = [run(engine, [PROMPTS[0]], SamplingParams(max_tokens=16, temperature=1.5, seed=seed)) for seed in (1, 2, 1)]
    assert draws[0] == draws[2] != draws[1]


def test_logprobs_are_those_of_every_committed_row(config: ServeConfig, model: tuple[Path, Any]) -> None:
    engine, _ = build_engine(config)
    known = {tuple(PROMPTS[2]): tuple(greedy(model[1], PROMPTS[2], 12))}
    engine.lookup, engine.block = None, RehearsedDrafts(known, 320, fault=0.3)
    engine.controller = RandomLengths(engine.controller)
    engine.add("a", PROMPTS[2], SamplingParams(max_tokens=12, ignore_eos=True, logprobs=3, prompt_logprobs=2))
    outputs = collect(engine)["a"]
    got = [entry for output in outputs for entry in output.logprobs or ()]
    answer = ids(outputs)
    assert [entry.token_id for entry in got] == answer
    with torch.inference_mode():
        reference = torch.log_softmax(model[1](torch.tensor([[*PROMPTS[2], *answer]])).logits[0], -1)
    start = len(PROMPTS[2])
    for offset, entry in enumerate(got):
        row = reference[start + offset - 1]
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-3)
        assert [i for i, _ in entry.top] == row.topk(3).indices.tolist()
    prompt_entries = outputs[0].prompt_logprobs
    assert prompt_entries is not None
    assert prompt_entries[0] is None
    assert [e.token_id for e in prompt_entries if e] == PROMPTS[2][1:]
    for position, told in enumerate(prompt_entries):
        if told:
            assert told.logprob == pytest.approx(float(reference[position - 1][told.token_id]), abs=1e-3)


def test_a_stop_string_ends_the_text_before_it_whatever_the_block(config: ServeConfig) -> None:
    engine, _ = build_engine(replace(config, proposer="none"))
    engine.add("whole", PROMPTS[1], GREEDY)
    outputs = collect(engine)["whole"]
    whole, answer = text(outputs), ids(outputs)
    stop = whole[len(whole) // 2 : len(whole) // 2 + 3]
    engine.controller = RandomLengths(type(engine.controller)(engine.controller.costs, 15))
    engine.block = RehearsedDrafts({tuple(PROMPTS[1]): tuple(answer)}, 320, fault=0.1)
    for run_number in range(4):
        engine.add(str(run_number), PROMPTS[1], replace(GREEDY, stop=(stop,)))
        outputs = collect(engine)[str(run_number)]
        assert text(outputs) == whole[: whole.index(stop)]
        assert outputs[-1].finish_reason == "stop"
        assert outputs[-1].stop_reason == stop
        final = outputs[-1].final
        assert final is not None
        assert final["completion_tokens"] == len(ids(outputs)) <= len(answer)


def test_the_cap_is_exact_even_inside_a_block(config: ServeConfig, expected: list[list[int]]) -> None:
    engine, _ = build_engine(replace(config, block_length=15))
    engine.lookup = None
    engine.block = RehearsedDrafts({tuple(PROMPTS[0]): tuple(expected[0])}, 320, fault=0.0)
    for cap in range(1, 20):
        assert run(engine, [PROMPTS[0]], replace(GREEDY, max_tokens=cap)) == [expected[0][:cap]]


def test_the_context_end_is_reached_and_not_passed(config: ServeConfig) -> None:
    engine, _ = build_engine(replace(config, max_model_len=48))
    for length in range(30, 48):
        outputs = run(engine, [([5, 6] * 30)[:length]], replace(GREEDY, max_tokens=48 - length))
        assert len(outputs[0]) == 48 - length
    with pytest.raises(ValueError, match="context of 48"):
        engine.add("long", [5] * 40, replace(GREEDY, max_tokens=9))


def test_cancelling_frees_pages_within_the_step(config: ServeConfig) -> None:
    engine, _ = build_engine(config)
    for index, prompt in enumerate(PROMPTS):
        engine.add(str(index), prompt, GREEDY)
    engine.step()
    for index in range(len(PROMPTS)):
        engine.cancel(str(index))
    engine.check()
    assert not engine.has_work
    assert engine.scheduler.pool.num_available == engine.scheduler.pool.num_pages


def test_random_arrivals_and_cancellations_leave_the_others_untouched(
    config: ServeConfig, expected: list[list[int]]
) -> None:
    engine, _ = build_engine(config)
    rng = random.Random(1)
    got: dict[str, list[int]] = {}
    names = iter(range(40))
    owner: dict[str, int] = {}
    cancelled: set[str] = set()
    for _ in range(400):
        if rng.random() < 0.4 and (number := next(names, None)) is not None:
            owner[str(number)] = rng.randrange(len(PROMPTS))
            engine.add(str(number), PROMPTS[owner[str(number)]], GREEDY)
        alive = [name for name in owner if engine._requests.get(name)]
        if alive and rng.random() < 0.05:
            unlucky = rng.choice(alive)
            cancelled.add(unlucky)
            engine.cancel(unlucky)
        for output in engine.step():
            got.setdefault(output.id, []).extend(output.token_ids)
        engine.check()
    for name, outputs in collect(engine).items():
        got.setdefault(name, []).extend(ids(outputs))
    assert len(owner) == 40
    assert cancelled
    for name, index in owner.items():
        tokens = got.get(name, [])
        assert tokens == (expected[index][: len(tokens)] if name in cancelled else expected[index])


class Broken:
    """A drafter that fails in a chosen way."""

    name = "block"

    def __init__(self, answers: Iterator[Any]) -> None:
        self.answers = answers

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        answer = next(self.answers)
        if isinstance(answer, Exception):
            raise answer
        return [list(answer) for _ in requests]


def test_a_failing_drafter_costs_speed_and_not_text(config: ServeConfig, expected: list[list[int]]) -> None:
    engine, _ = build_engine(replace(config, block_length=3))
    engine.lookup, engine.block = None, Broken(iter([RuntimeError("boom")] * 10))
    assert run(engine, PROMPTS, GREEDY) == expected
    assert engine.stats().drafter_faults == 3
    assert engine.block is None


def test_broken_logits_fail_one_request_and_no_other(config: ServeConfig, expected: list[list[int]]) -> None:
    engine, _ = build_engine(replace(config, proposer="none"))
    forward = engine.runner.forward

    def poisoned(works: Any) -> Any:
        logits, rows = forward(works)
        logits = logits.clone()
        for (work, _), where in zip(works, rows, strict=True):
            if work.sequence.id == "1" and work.sequence.num_output == 5:
                logits[where.first : where.first + where.count] = float("nan")
        return logits, rows

    engine.runner.forward = poisoned  # type: ignore[method-assign]
    for index, prompt in enumerate(PROMPTS):
        engine.add(str(index), prompt, GREEDY)
    outputs = collect(engine)
    assert outputs["1"][-1].finish_reason == "error"
    for index in (0, 2, 3, 4, 5):
        assert ids(outputs[str(index)]) == expected[index]


def test_running_out_of_memory_ends_the_newest_prefill_only(config: ServeConfig, expected: list[list[int]]) -> None:
    engine, _ = build_engine(replace(config, proposer="none"))
    forward = engine.runner.forward

    def limited(works: Any) -> Any:
        if any(len(work.sequence.prompt_ids) == 200 for work, _ in works):
            raise MemoryError("too long for this machine")
        return forward(works)

    engine.runner.forward = limited  # type: ignore[method-assign]
    engine.add("0", PROMPTS[0], GREEDY)
    engine.step()
    engine.add("big", [5] * 200, GREEDY)
    outputs = collect(engine)
    assert outputs["big"][-1].finish_reason == "error"
    assert "memory" in (outputs["big"][-1].error or "").lower()
    assert len(ids(outputs["0"])) == 23


def test_prefix_hits_are_reported_and_change_nothing(config: ServeConfig, expected: list[list[int]]) -> None:
    engine, _ = build_engine(config)
    for attempt in range(2):
        engine.add("a", PROMPTS[2], GREEDY)
        outputs = collect(engine)["a"]
        assert ids(outputs) == expected[2]
        assert outputs[-1].final is not None
        assert outputs[-1].final["cached_tokens"] == (0 if attempt == 0 else 64)


def test_what_cannot_be_served_is_refused_by_name(config: ServeConfig) -> None:
    engine, _ = build_engine(config)
    for prompt, params, words in (
        ([], GREEDY, "no tokens"),
        ([320], GREEDY, "between 0 and 319"),
        ([-1], GREEDY, "between 0 and 319"),
        ([1], replace(GREEDY, max_tokens=512), "context of 512"),
    ):
        with pytest.raises(ValueError, match=words):
            engine.add("x", prompt, params)
    assert not engine.has_work


def test_settings_that_cannot_work_stop_the_start(config: ServeConfig, tmp_path: Path) -> None:
    for bad, words in (
        (replace(config, max_model_len=4096), "exceeds the model's 512"),
        (replace(config, max_model_len=512, kv_memory_mib=1, page_size=256), "does not fit the KV pool"),
        (replace(config, model_dir=str(tmp_path)), "config.json"),
    ):
        if "KV pool" in words:
            page = build_engine(config)[0].runner.model.kv_bytes_per_page(256)
            if 2 * page < 1 << 20:
                continue
        with pytest.raises(StartError, match=words):
            build_engine(bad)


def test_the_trace_holds_every_round_and_a_bad_folder_costs_nothing(config: ServeConfig, tmp_path: Path) -> None:
    import json

    engine, _ = build_engine(replace(config, trace_dir=str(tmp_path / "trace")))
    run(engine, PROMPTS[:2], GREEDY)
    (file,) = (tmp_path / "trace").iterdir()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(lines) == 2
    for line in lines:
        assert len(line["output_ids"]) == line["completion_tokens"] == 24
        assert sum(accepted + 1 for _, _, accepted in line["rounds"]) >= 23
    (tmp_path / "file").write_text("")
    engine, _ = build_engine(replace(config, trace_dir=str(tmp_path / "file")))
    run(engine, PROMPTS[:1], GREEDY)


def test_a_prompt_preempted_in_the_middle_is_scored_once(config: ServeConfig) -> None:
    params = SamplingParams(max_tokens=2, ignore_eos=True, prompt_logprobs=1)
    engine, _ = build_engine(config)
    engine.add("alone", PROMPTS[2], params)
    (expected,) = [o.prompt_logprobs for o in collect(engine)["alone"] if o.prompt_logprobs is not None]
    engine.add("pressed", PROMPTS[2], params)
    engine.step()
    engine.scheduler.preempt(engine.scheduler.running[0])
    (found,) = [o.prompt_logprobs for o in collect(engine)["pressed"] if o.prompt_logprobs is not None]
    assert found == expected


def test_a_long_prompt_is_scored_in_parts_whose_logits_have_room(
    config: ServeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=2, ignore_eos=True, prompt_logprobs=1)
    config = replace(config, max_batch_tokens=256)
    scores = []
    most_rows = []
    for row_limit in (256, 24):
        monkeypatch.setattr("serve.engine.prepare.SCORED_BYTES", row_limit * 4 * 320)
        engine, _ = build_engine(config)
        forward = engine.runner.forward_batch
        seen: list[int] = []

        def counted(batch: Any, forward: Any = forward, seen: list[int] = seen) -> Any:
            logits = forward(batch)
            seen.append(len(logits))
            return logits

        engine.runner.forward_batch = counted  # type: ignore[method-assign]
        engine.add("a", PROMPTS[2], params)
        scores += [o.prompt_logprobs for o in collect(engine)["a"] if o.prompt_logprobs is not None]
        most_rows.append(max(seen))
    assert most_rows == [len(PROMPTS[2]), 24]
    assert [[entry and entry.token_id for entry in each] for each in scores] == [[None, *PROMPTS[2][1:]]] * 2
    for whole, in_parts in zip(*(each[1:] for each in scores), strict=True):
        assert whole is not None
        assert in_parts is not None
        assert in_parts.logprob == pytest.approx(whole.logprob, abs=1e-4)
