"""Steps launched before the step before them is read: whatever arrives, ends, is cancelled or gives way meanwhile,
every request gets the text it would get alone."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from serve.drafter.prompt_lookup import PromptLookup
from serve.engine.engine import Engine
from serve.protocol import Output, SamplingParams
from tests.serve.engine.graph_engines import choose_in_every_step, hash_engine, use_twins
from tests.serve.engine.hash_model import HashDrafter, continuation
from tests.serve.engine.test_engine import collect, ids, text
from tests.tiny_models import write_tokenizer
from verify.lossless import RandomLengths, RehearsedDrafts

GREEDY = SamplingParams(max_tokens=30, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(where)
    return where


@pytest.fixture(autouse=True)
def _quick_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    use_twins(monkeypatch)
    choose_in_every_step(monkeypatch)


def prompt_of(rng: random.Random) -> list[int]:
    return [rng.randrange(4, 300) for _ in range(rng.randrange(1, 70))]


def set_proposers(engine: Engine, kind: str, answers: dict[tuple[int, ...], tuple[int, ...]]) -> None:
    """plain; copy: prompt lookup; device: the drafter inside the graphs; host: drafts that only the host knows."""
    engine.controller = RandomLengths(engine.controller)
    if kind in ("copy", "both"):
        engine.lookup = PromptLookup()
    if kind == "host":
        engine.block = RehearsedDrafts(answers, 320, fault=0.3)


@pytest.mark.parametrize("kind", ["plain", "copy", "device", "both", "host"])
@pytest.mark.parametrize("pressure", [False, True], ids=["room", "pressure"])
@pytest.mark.parametrize("seed", range(2))
def test_every_request_gets_its_own_text(folder: Path, kind: str, pressure: bool, seed: int) -> None:
    rng = random.Random(100 * seed + pressure)
    drafter = HashDrafter() if kind in ("device", "both") else None
    engine = hash_engine(folder, drafter=drafter, pages=24 if pressure else 64)
    expected: dict[str, list[int]] = {}
    answers: dict[tuple[int, ...], tuple[int, ...]] = {}
    requests: list[tuple[str, list[int], int]] = []
    for number in range(12):
        prompt, count = prompt_of(rng), rng.randrange(1, 40)
        expected[str(number)] = continuation(prompt, count)
        answers[tuple(prompt)] = tuple(expected[str(number)])
        requests.append((str(number), prompt, count))
    set_proposers(engine, kind, answers)
    got: dict[str, list[int]] = {name: [] for name in expected}
    cancelled: set[str] = set()
    steps = 0
    while requests or engine.has_work:
        steps += 1
        assert steps < 3000
        if requests and rng.random() < 0.3:
            name, prompt, count = requests.pop()
            engine.add(name, prompt, replace(GREEDY, max_tokens=count))
        for output in engine.step():
            assert output.finish_reason in (None, "length"), output.error
            got[output.id] += output.token_ids
        engine.check()
        running = engine.scheduler.running
        if running and rng.random() < 0.03:
            cancelled.add(running[0].id)
            engine.cancel(running[0].id)
        if running and rng.random() < 0.05:
            engine.scheduler.preempt(max(running, key=lambda s: s.order))
        for sequence in running:
            assert sequence.in_flight >= 0
    for name, tokens in got.items():
        assert tokens == (expected[name][: len(tokens)] if name in cancelled else expected[name])
    stats = engine.stats()
    assert stats.kv_pages_free == stats.kv_pages_total
    assert stats.generation_tokens == sum(map(len, got.values()))
    if kind != "plain":
        assert 0 < stats.accepted_tokens < stats.draft_tokens


def test_a_step_is_launched_before_the_one_before_it_is_read(folder: Path) -> None:
    engine = hash_engine(folder)
    graphs: Any = engine._ahead and engine._ahead.graphs
    order: list[str] = []
    launch, read = graphs.launch, graphs.read

    def noted(name: str, call: Any) -> Any:
        def inner(argument: Any) -> Any:
            order.append(name)
            return call(argument)

        return inner

    graphs.launch, graphs.read = noted("launch", launch), noted("read", read)
    engine.add("a", [5, 6, 7], replace(GREEDY, max_tokens=6))
    assert ids(collect(engine)["a"]) == continuation([5, 6, 7], 6)
    # The first token comes from the prefill; the end is known ahead, so nothing is launched for nothing.
    assert order == ["launch", *["launch", "read"] * 4, "read"]


def test_what_is_sampled_or_scored_is_settled_at_once_and_the_same(folder: Path) -> None:
    texts = []
    for graphs in (True, False):
        engine = hash_engine(folder, graphs=graphs, drafter=HashDrafter())
        engine.controller = RandomLengths(engine.controller)
        engine.add("greedy", [9, 8, 7], GREEDY)
        engine.add("sampled", [9, 8], replace(GREEDY, temperature=3.0, seed=4))
        engine.add("scored", [5] * 20, replace(GREEDY, logprobs=2, max_tokens=9, prompt_logprobs=1))
        engine.add("penalised", [6] * 3, replace(GREEDY, repetition_penalty=1.2))
        texts.append(collect(engine))
    for name in texts[0]:
        assert ids(texts[0][name]) == ids(texts[1][name])
    assert any(o.logprobs for o in texts[0]["scored"])
    assert [e for o in texts[0]["scored"] for e in o.logprobs or ()] == [
        e for o in texts[1]["scored"] for e in o.logprobs or ()
    ]


def test_a_stop_string_ends_the_text_and_what_was_launched_behind_it_is_dropped(folder: Path) -> None:
    engine = hash_engine(folder, drafter=HashDrafter())
    engine.controller = RandomLengths(engine.controller)
    engine.add("whole", [40, 50, 60], GREEDY)
    whole = text(collect(engine)["whole"])
    stop = whole[len(whole) // 2 : len(whole) // 2 + 3]
    for number in range(3):
        engine.add(str(number), [40, 50, 60], replace(GREEDY, stop=(stop,)))
        engine.add(f"mate {number}", [60, number + 5], GREEDY)
        outputs = collect(engine)
        assert text(outputs[str(number)]) == whole[: whole.index(stop)]
        assert ids(outputs[f"mate {number}"]) == continuation([60, number + 5], 30)


def test_an_idle_engine_has_nothing_on_its_way(folder: Path) -> None:
    """What is read after a pause would seem to have taken as long."""
    engine = hash_engine(folder)
    engine.add("whole", [40, 50, 60], GREEDY)
    whole = text(collect(engine)["whole"])
    engine.add("stopped", [40, 50, 60], replace(GREEDY, stop=(whole[len(whole) // 2 :][:3],)))
    collect(engine)
    on_its_way = [engine._flight]
    for name in ("a", "b"):
        engine.add(name, [40, 50], GREEDY)
    for _ in range(4):
        engine.step()
    for name in ("a", "b"):
        engine.cancel(name)
        on_its_way.append(engine._flight)
    assert [flight is not None for flight in on_its_way] == [False, True, False]


def test_logits_that_are_not_numbers_end_one_request(folder: Path) -> None:
    engine = hash_engine(folder)
    model: Any = engine.runner.model
    fine, bad = continuation([11, 12], 30), continuation([13], 30)
    model.poisoned = {next(token for token in bad[3:] if token not in fine)}
    engine.add("fine", [11, 12], GREEDY)
    engine.add("bad", [13], GREEDY)
    outputs: dict[str, list[Output]] = collect(engine)
    assert ids(outputs["fine"]) == fine
    assert outputs["bad"][-1].finish_reason == "error"
    assert "NaN" in (outputs["bad"][-1].error or "")


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("stopped", [True, False])
def test_logits_that_are_not_numbers_take_no_token_before_them(folder: Path, graphs: bool, stopped: bool) -> None:
    """In a block of right drafts: an answer that ends before that row is as it is without drafts, and whole."""
    prompt, at = next(
        (prompt, at)
        for prompt in range(4, 260)
        for at in range(7, 28, 4)  # the third token of a round: one comes from the prompt, four from each round
        if len({*continuation([prompt], at + 1)[at - 1 :]} - {*continuation([prompt], at - 1)}) == 2
    )
    answer = continuation([prompt], at)
    engine = hash_engine(folder, drafter=HashDrafter(spoil=10**9), graphs=graphs)
    engine.controller.fixed = 3
    model: Any = engine.runner.model
    model.poisoned = {continuation([prompt], at + 1)[at]}
    engine.add("a", [prompt], replace(GREEDY, stop_token_ids=(answer[-1],) if stopped else ()))
    outputs = collect(engine)["a"]
    assert ids(outputs) == answer
    assert outputs[-1].finish_reason == ("stop" if stopped else "error")
    assert engine.stats().accepted_tokens > 0


def test_more_sequences_than_graphs_hold_decode_eagerly(folder: Path) -> None:
    engine = hash_engine(folder, max_num_seqs=6, max_rows=2)
    for number in range(5):
        engine.add(str(number), [20 + number], replace(GREEDY, max_tokens=5 + number))
    outputs = collect(engine)
    for number in range(5):
        assert ids(outputs[str(number)]) == continuation([20 + number], 5 + number)


def test_a_drafter_that_is_switched_off_leaves_the_steps_alone(folder: Path) -> None:
    engine = hash_engine(folder, drafter=HashDrafter())
    engine.controller = RandomLengths(engine.controller)
    engine.add("a", [5, 9], GREEDY)
    for _ in range(4):
        engine.step()
    engine.block = None
    outputs = collect(engine)["a"]
    full = continuation([5, 9], 30)
    assert ids(outputs) == full[-len(ids(outputs)) :]


def test_no_more_is_wanted_of_the_drafter_than_its_block_has(folder: Path) -> None:
    drafter = HashDrafter(spoil=10**9)
    engine = hash_engine(folder, drafter=drafter, block_length=11)
    engine.controller = RandomLengths(engine.controller)
    engine.lookup = PromptLookup()
    for number in range(4):
        engine.add(str(number), [30 + number, 7], GREEDY)
    outputs = collect(engine)
    for number in range(4):
        assert ids(outputs[str(number)]) == continuation([30 + number, 7], 30)
        final = outputs[str(number)][-1].final
        assert final is not None
        told = final["speculation"]
        blocks = [
            (drafted, accepted)
            for source, drafted, accepted in zip(told["sources"], told["drafted"], told["accepted"], strict=True)
            if source == "block"
        ]
        assert blocks
        assert all(drafted < drafter.block_size for drafted, _ in blocks)
        assert sum(accepted for _, accepted in blocks) >= sum(drafted for drafted, _ in blocks) - drafter.block_size


class EveryNth:
    """A controller that drafts the longest block in every n-th step and nothing between."""

    def __init__(self, inner: Any, n: int) -> None:
        self._inner = inner
        self._n = n
        self._step = 0

    def plan(self, candidates: Any, *_: Any, **__: Any) -> list[int]:
        self._step += 1
        return [0 if self._step % self._n else candidate.max_length for candidate in candidates]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@pytest.mark.parametrize("pressure", [False, True], ids=["room", "pressure"])
def test_rows_of_plain_steps_wait_for_the_drafter_and_none_is_missed(folder: Path, pressure: bool) -> None:
    """Requests come, end and give way while their rows wait: a draft still sees all of its own context and nothing of
    another's. A draft that misses a row is garbage, and so refused."""
    drafter = HashDrafter(spoil=10**9)
    engine = hash_engine(folder, drafter=drafter, pages=20 if pressure else 64)
    assert engine._ahead is not None
    context: Any = engine._ahead.graphs._context
    controller: Any = EveryNth(engine.controller, 7)
    engine.controller = controller
    waited = 0
    for number in range(8):
        engine.add(str(number), [30 + number, 7, *range(40, 40 + 5 * number)], replace(GREEDY, max_tokens=40))
    got: dict[str, list[int]] = {str(number): [] for number in range(8)}
    while engine.has_work:
        for output in engine.step():
            got[output.id] += output.token_ids
        waited = max(waited, context._waiting)
    for number in range(8):
        assert got[str(number)] == continuation([30 + number, 7, *range(40, 40 + 5 * number)], 40)
    stats = engine.stats()
    assert waited > 6
    assert stats.drafts > 10
    # Only what lies behind a request's end is not kept.
    assert stats.accepted_tokens >= stats.draft_tokens - 8 * drafter.block_size
