"""Choosing drafts costs little where nothing is worth drafting."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from serve.engine.drafting import LONGEST_PAUSE, NO_DRAFT, Draft, Drafting
from serve.engine.scheduler import Plan, Work
from serve.engine.sequence import Sequence
from serve.engine.tally import Tally
from serve.engine.text import TextStream
from serve.protocol import SamplingParams
from serve.tokenizer import load_tokenizer
from tests.serve.engine.hash_model import HashDrafter
from verify.block_length import BlockLengthController
from verify.costs import CostTable
from verify.sampling import RequestSampler


@dataclass
class Slow:
    """A controller that thinks for 2 ms and says what it is told to."""

    lengths: list[int]
    step_seconds: float
    asked: int = 0

    def controller(self) -> Any:
        controller = BlockLengthController(CostTable({1: self.step_seconds, 8: self.step_seconds}), 3)

        def plan(candidates: Any, *_: Any, **__: Any) -> list[int]:
            self.asked += 1
            time.sleep(0.002)
            return self.lengths * len(candidates)

        controller.plan = plan  # type: ignore[method-assign]
        return controller


@pytest.fixture(scope="module")
def plan(tiny_model_dir: Path) -> Plan:
    params = SamplingParams(max_tokens=50)
    tokenizer = load_tokenizer(tiny_model_dir)
    sampler = RequestSampler(params, [5, 6], (), 320)
    sequence = Sequence("a", (5, 6), params, sampler, TextStream(tokenizer, params, 50, frozenset(), (5, 6)))
    sequence.token_ids.append(7)
    sequence.num_computed = 2
    return Plan(decodes=[Work(sequence, 2, 1)], draft_budget=8)


def choices(slow: Slow, plan: Plan, steps: int, *, graphs: bool = True, repeats: bool = False) -> int:
    block: Any = HashDrafter()
    controller = slow.controller()
    controller.again = lambda: repeats
    drafting = Drafting(controller, None, block, 320, Tally(), lambda: None, graphs=graphs)
    drafts = [drafting.choose(plan) for _ in range(steps)]
    assert drafts == [[Draft("block", wanted=slow.lengths[0]) if slow.lengths[0] else NO_DRAFT]] * steps
    return slow.asked


def test_a_dear_choice_of_nothing_is_made_less_often(plan: Plan) -> None:
    assert choices(Slow([0], step_seconds=0.001), plan, 2 * LONGEST_PAUSE + 2) == 2


def test_a_pause_ends_when_half_of_the_sequences_have_gone(plan: Plan) -> None:
    slow, block = Slow([0], step_seconds=0.001), HashDrafter()
    given: Any = block
    drafting = Drafting(slow.controller(), None, given, 320, Tally(), lambda: None, graphs=True)
    many = Plan(decodes=plan.decodes * 3)
    for _ in range(10):
        drafting.choose(many)
    assert slow.asked == 1
    drafting.choose(Plan(decodes=plan.decodes * 2))
    assert slow.asked == 1
    drafting.choose(plan)
    assert slow.asked == 2


def test_nothing_chosen_beside_a_prompt_does_not_pause(plan: Plan) -> None:
    beside = replace(plan, prefills=[Work(replace(plan.decodes[0].sequence, id="b"), 0, 2)], draft_budget=0)
    assert choices(Slow([0], step_seconds=0.001), beside, 5) == 5


def test_a_choice_is_not_kept_where_its_rows_do_not_fit(plan: Plan) -> None:
    slow, block = Slow([2], step_seconds=0.001), HashDrafter()
    given: Any = block
    controller = slow.controller()
    controller.again = lambda: True
    drafting = Drafting(controller, None, given, 320, Tally(), lambda: None, graphs=True)
    for budget, asked in ((8, 1), (2, 1), (1, 2)):
        drafting.choose(replace(plan, draft_budget=budget))
        assert slow.asked == asked


def test_a_choice_that_a_step_hides_is_made_every_time(plan: Plan) -> None:
    assert choices(Slow([0], step_seconds=100.0), plan, 20) == 20


def test_a_choice_of_something_is_kept_for_some_steps_and_not_without_graphs(plan: Plan) -> None:
    assert choices(Slow([2], step_seconds=0.001), plan, 20, repeats=True) == 3
    assert choices(Slow([2], step_seconds=100.0), plan, 20, repeats=True) == 20
    assert choices(Slow([2], step_seconds=0.001), plan, 20) == 20  # the controller wants to be asked
    assert choices(Slow([2], step_seconds=0.001), plan, 20, graphs=False, repeats=True) == 20
    assert choices(Slow([0], step_seconds=0.001), plan, 20, graphs=False) == 20
