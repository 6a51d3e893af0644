"""What a step is said to have cost: all the time that the host and the device spend on it, and none of a prompt's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from serve.drafter.prompt_lookup import PromptLookup
from serve.engine.engine import Engine
from serve.engine.outbox import LEAST_SECONDS, HostBuffers, Slot
from serve.protocol import SamplingParams
from tests.serve.engine.graph_engines import hash_engine, use_twins
from tests.serve.engine.hash_model import HashDrafter
from tests.tiny_models import write_tokenizer
from verify.lossless import RandomLengths

GREEDY = SamplingParams(max_tokens=30, ignore_eos=True)
SETTLING, CHOOSING, PROMPT = 0.004, 0.003, 0.5


@dataclass
class Clock:
    """Time passes only where a test says so."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    use_twins(monkeypatch)
    monkeypatch.setattr("time.perf_counter", clock)
    return clock


def slow(owner: Any, name: str, clock: Clock, seconds: float) -> None:
    """``owner``'s method takes so long from now on."""
    call: Callable[..., Any] = getattr(owner, name)

    def timed(*given: Any, **named: Any) -> Any:
        clock.now += seconds
        return call(*given, **named)

    setattr(owner, name, timed)


def slow_engine(folder: Path, clock: Clock, kind: str) -> tuple[Engine, list[float]]:
    """An engine that takes time, and the list of what its decoding steps are said to cost."""
    write_tokenizer(folder)
    engine = hash_engine(folder, drafter=HashDrafter() if kind == "block" else None)
    engine.controller = RandomLengths(engine.controller)
    if kind == "copy":
        engine.lookup = PromptLookup()
    charged: list[float] = []
    observe = engine.controller.observe_cost

    def noted(**costs: Any) -> None:
        charged.append(costs["verify_seconds"] + costs["draft_seconds"])
        observe(**costs)

    engine.controller.observe_cost = noted  # type: ignore[method-assign]
    slow(engine, "_settle_alone", clock, SETTLING)
    slow(engine._drafting, "choose", clock, CHOOSING)
    return engine, charged


@pytest.mark.parametrize("kind", ["plain", "copy", "block"])
def test_no_time_falls_between_the_steps(tmp_path: Path, clock: Clock, kind: str) -> None:
    engine, charged = slow_engine(tmp_path, clock, kind)
    for name, prompt in (("a", [5, 6, 7]), ("b", [8, 9])):
        engine.add(name, prompt, GREEDY)
    while any(sequence.first_token is None for sequence in engine.scheduler.running) or not charged:
        engine.step()
    charged.clear()
    began = clock.now
    while engine.has_work:
        engine.step()
    # The step on its way at the beginning had a part of its time before it.
    assert sum(charged) == pytest.approx(clock.now - began, abs=2 * SETTLING + CHOOSING)
    assert len(charged) > 5


@pytest.mark.parametrize("kind", ["plain", "block"])
def test_launching_and_settling_a_prompt_is_no_part_of_a_step(tmp_path: Path, clock: Clock, kind: str) -> None:
    engine, charged = slow_engine(tmp_path, clock, kind)
    slow(engine.runner, "forward_batch", clock, PROMPT)
    engine.add("a", [5, 6, 7], GREEDY)
    while len(charged) < 4:
        engine.step()
    engine.add("b", [8, 9, 10], GREEDY)
    while engine.has_work:
        engine.step()
    assert max(charged) < 3 * (2 * SETTLING + CHOOSING)


def test_a_pause_is_no_part_of_a_step(tmp_path: Path, clock: Clock) -> None:
    engine, charged = slow_engine(tmp_path, clock, "plain")
    for name in ("a", "b"):
        engine.add(name, [5, 6, 7], GREEDY)
        while engine.has_work:
            engine.step()
        clock.now += 1000.0
    assert max(charged) < 1.0


@pytest.mark.parametrize(
    ("started", "ended", "seconds"), [(5, 5, LEAST_SECONDS), (9, 5, LEAST_SECONDS), (0, 2000000, 0.002)]
)
def test_a_pass_takes_time_whatever_the_cards_clock_says(started: int, ended: int, seconds: float) -> None:
    """Clocks of some cards go in steps longer than a pass; a cost table takes no zeros."""
    nothing = torch.zeros(0, dtype=torch.int32)
    buffers = HostBuffers(nothing, nothing)
    slot = Slot(0, buffers, buffers, nothing, torch.tensor([started, ended]), None)
    assert slot.seconds(0, 1) == pytest.approx(seconds)
