"""Paired turns of a plain and a speculative engine, and where their steps' time goes; here on hash models, whose graphs
run on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from eval.device_speculation import MODES, Contest, answer, run
from eval.step_parts import watched
from serve.drafter.prompt_lookup import PromptLookup
from tests.serve.engine.graph_engines import hash_engine, use_twins
from tests.serve.engine.hash_model import HashDrafter, continuation
from tests.tiny_models import write_tokenizer

PROMPTS = [[20 + n, 30, 40] for n in range(7)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(where)
    return where


@pytest.fixture(autouse=True)
def _quick_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    use_twins(monkeypatch)


def test_turns_are_paired_and_every_text_is_compared(folder: Path) -> None:
    contest = Contest(hash_engine(folder), hash_engine(folder, drafter=HashDrafter()), PROMPTS)
    told: list[int] = []
    one, two = run(contest, (1, 2), 2, 60.0, 12, lambda found: told.append(len(found)))
    assert told == [1, 2]
    assert (one.streams, two.streams) == (1, 2)
    for found, answers in ((one, 2 * 4), (two, 2 * 6)):
        assert found.equal == dict.fromkeys(MODES, answers)
        assert {len(rates) for rates in found.rates.values()} == {2}
        assert found.drafts["plain"] == 0 < found.drafts["block"]
        assert 1 < found.acceptance_length("block") <= 1 + HashDrafter.block_size
        assert f"{answers} of {answers} texts equal" in found.remark("block")
        assert [line.partition(":")[0] for line in found.parts] == [f"{found.streams} streams, {m}" for m in MODES]


def test_other_texts_are_counted_as_such(folder: Path) -> None:
    contest = Contest(hash_engine(folder), hash_engine(folder, drafter=HashDrafter()), PROMPTS)
    contest.speculative.tokenizer.end_token_ids = frozenset({continuation(PROMPTS[0], 3)[-1]})
    found = contest.compare(1, 2, 60.0, 12)
    assert found.equal["plain"] == 8 > found.equal["block"]


def test_the_rate_is_of_the_time_in_which_every_stream_was_busy(folder: Path) -> None:
    engine = hash_engine(folder)
    texts, rate = answer(engine, PROMPTS[:5], 2, 6)
    assert texts == [continuation(prompt, 6) for prompt in PROMPTS[:5]]
    assert rate > 0
    assert not engine.has_work


def test_the_parts_of_a_step_are_apart_and_the_engine_is_left_as_it_was(folder: Path) -> None:
    engine = hash_engine(folder, drafter=HashDrafter())
    engine.lookup = PromptLookup()
    with watched(engine) as parts:
        answer(engine, PROMPTS[:4], 2, 12)
    assert {"plan", "choose", "search", "lengths", "launch", "read and wait", "settle", "prefill"} <= set(parts.seconds)
    assert all(spent >= 0 for spent in parts.seconds.values())
    assert parts.launches == parts.calls["launch"] > 0
    assert parts.verify_seconds > 0
    assert "us a step" in parts.line()
    for owner in (engine, engine.scheduler, engine.controller, engine.runner, engine._drafting):
        assert not {"step", "plan", "choose", "forward"} & set(vars(owner))
