"""A closed loop over several client processes against the stub server, and the lag of a client that is too busy."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from eval.lag import LagMeter
from eval.load_worker import processes_for, run_shared, shares
from tests.eval.stub_server import running_stub


@pytest.fixture
def word_model(tmp_path: Path) -> str:
    """A folder with a tokenizer for which every run of letters is a token."""
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path)


def label(**changes: Any) -> dict[str, Any]:
    options = {"temperature": 0.0, "ignore_eos": True}
    return {"mode": "closed", "load": 5.0, "seed": 7, "prompt": 40, "output": 3, "options": options, **changes}


def test_processes_keep_their_shares_of_the_streams_busy_on_one_clock(word_model: str) -> None:
    with running_stub(first_delay=0.02, gap=0.01) as (url, state):
        before = time.perf_counter()
        items, start, lag = asyncio.run(run_shared(url, word_model, label(), 0.4, 2))
    assert {item.outcome for item in items} == {"ok"}
    assert all(item.tokens == 3 for item in items)
    assert before < start <= min(item.sent_at for item in items) < start + 0.2
    assert lag is not None
    assert lag["p50"] <= lag["p99"] <= lag["max"]
    first = [item for item in items if item.sent_at < start + 0.04]
    assert len(first) == 5
    prompts = [json.dumps(body["messages"]) for body in state.bodies]
    assert len(set(prompts)) == len(prompts) == len(items)


def test_a_worker_that_cannot_work_is_an_error_and_none_is_left(word_model: str) -> None:
    with pytest.raises(RuntimeError, match="ended early: failed: no model at"):
        asyncio.run(run_shared("http://127.0.0.1:9", word_model, label(), 0.2, 2))


@given(streams=st.integers(1, 500), processes=st.integers(1, 40))
def test_shares_are_equal_and_complete(streams: int, processes: int) -> None:
    found = shares(streams, min(processes, streams))
    assert sum(found) == streams
    assert max(found) - min(found) <= 1
    assert min(found) >= 1


def test_one_process_for_few_streams_and_never_more_than_a_quarter_of_the_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    assert [processes_for(streams) for streams in (1, 16, 17, 48, 128)] == [1, 1, 2, 3, 4]
    assert (processes_for(4, wanted=3), processes_for(2, wanted=3)) == (3, 2)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert processes_for(128) == 1


def test_a_busy_loop_shows_as_lag() -> None:
    async def held(seconds: float) -> dict[str, float] | None:
        async with LagMeter() as meter:
            await asyncio.sleep(0.05)
            time.sleep(seconds)
            await asyncio.sleep(0.05)
        return meter.summary()

    found = asyncio.run(held(0.2))
    assert found is not None
    assert found["max"] >= 0.15


def test_an_interrupt_ends_the_workers(word_model: str) -> None:
    async def cut_off(url: str) -> None:
        with contextlib.suppress(asyncio.TimeoutError, TimeoutError):
            await asyncio.wait_for(run_shared(url, word_model, label(), 60.0, 2), timeout=2.0)

    with running_stub(first_delay=0.05) as (url, state):
        asyncio.run(cut_off(url))
        time.sleep(0.2)
        sent = len(state.bodies)
        time.sleep(0.3)
        assert len(state.bodies) == sent
