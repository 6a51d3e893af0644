"""The controller: learns, forgets, probes, and never bets more than its stake."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from verify.block_length import STAKE_SHARE, BlockLengthController, Candidate
from verify.costs import CostTable
from verify.estimates import AcceptancePrior, SourceEstimate
from verify.scenarios import CPU, GPU, Scenario, all_scenarios
from verify.simulate import main, run, serve

FLAT = {1: 3.0, 64: 3.0, 128: 6.0}


def controller(prior: float = 0.6, max_length: int = 7, draft: float = 0.5) -> BlockLengthController:
    return BlockLengthController(CostTable(FLAT, {1: draft}), max_length, AcceptancePrior((prior,)))


def rounds(chooser: BlockLengthController, count: int, rate: float, source: str = "block", seed: int = 1) -> list[int]:
    """Lengths of ``count`` rounds of one request whose drafts are right at ``rate``."""
    random = Random(seed)
    lengths = []
    for _ in range(count):
        [length] = chooser.plan([Candidate("a", source, 7)], 0)
        lengths.append(length)
        accepted = 0
        while accepted < length and random.random() < rate:
            accepted += 1
        chooser.observe("a", source, length, accepted)
    return lengths


def test_good_drafts_get_long_blocks_and_useless_ones_none() -> None:
    assert rounds(controller(), 60, 0.95)[-1] == 7
    useless = rounds(controller(), 200, 0.0)
    assert useless[:1] != [0]
    assert sum(1 for length in useless[20:] if length) <= 20


def test_a_change_is_followed_within_a_few_rounds_both_ways() -> None:
    chooser = controller(draft=1.5)
    rounds(chooser, 60, 0.95)
    assert sum(1 for length in rounds(chooser, 40, 0.0)[12:] if length) <= 8
    back = rounds(chooser, 120, 0.95)
    assert min(back[-40:]) >= 3


def _step(chooser: BlockLengthController, rows: int, drafted: int, verify: float, draft: float) -> None:
    chooser.observe_cost(
        rows=rows, drafted_rows=drafted, drafted_sequences=int(draft > 0), verify_seconds=verify, draft_seconds=draft
    )


def test_plain_steps_slowed_by_drafts_do_not_make_plain_decoding_look_dear() -> None:
    chooser = BlockLengthController(CostTable({1: 3.0, 4: 4.5}, {1: 1.5}), 7)
    for _ in range(100):
        _step(chooser, 4, 3, 6.0, 2.0)
        _step(chooser, 1, 0, 5.0, 0.0)  # the draft pushed the target's weights out of the caches
    assert chooser.costs.verify_seconds(1) == pytest.approx(3.0)
    assert chooser.costs.verify_seconds(4) == pytest.approx(6.0, rel=0.02)
    assert chooser.costs.draft_seconds(1) == pytest.approx(2.0, rel=0.02)
    for _ in range(100):
        _step(chooser, 1, 0, 3.6, 0.0)
    assert chooser.costs.verify_seconds(1) == pytest.approx(3.6, rel=0.02)


def test_drafts_that_cost_more_than_their_price_are_stopped_by_the_stake() -> None:
    """Whatever the table believes: what was measured is what is paid."""
    chooser = BlockLengthController(CostTable({1: 3.0, 8: 3.1}, {1: 0.1}), 7, AcceptancePrior((0.6,)))
    random = Random(3)
    spent, plain, tokens = 0.0, 0.0, 0
    for _ in range(300):
        [length] = chooser.plan([Candidate("a", "block", 7)], 0)
        accepted = 0
        while accepted < length and random.random() < 0.4:
            accepted += 1
        verify, draft = (5.0, 0.8) if length else (3.0, 0.0)
        chooser.observe("a", "block", length, accepted)
        _step(chooser, 1 + length, length, verify, draft)
        spent += verify + draft
        tokens += accepted + 1
        plain = 3.0 * tokens
    assert spent < plain * 1.04 + 3 * 3.0


def served(chooser: BlockLengthController, streams: int, steps: int, seconds: float) -> tuple[float, int, int]:
    """Seconds, tokens and drafted steps of ``steps`` steps in which every draft is right by half. A plain step takes
    1 s, a drafted one ``seconds``."""
    spent, tokens, drafted = 0.0, 0, 0
    for _ in range(steps):
        ids = [f"{streams} {i}" for i in range(streams)]
        lengths = chooser.plan([Candidate(id, "block", 7) for id in ids], 0)
        took = seconds if any(lengths) else 1.0
        for id, length in zip(ids, lengths, strict=True):
            chooser.observe(id, "block", length, length // 2)
        chooser.observe_cost(
            rows=streams + sum(lengths),
            drafted_rows=sum(lengths),
            drafted_sequences=sum(map(bool, lengths)),
            verify_seconds=took,
            draft_seconds=0.0,
        )
        spent += took
        tokens += streams + sum(length // 2 for length in lengths)
        drafted += any(lengths)
    return spent, tokens, drafted


def test_what_few_streams_win_is_not_lost_by_many_and_the_other_way_round() -> None:
    chooser = BlockLengthController(CostTable({1: 1.0, 256: 1.1}), 7, AcceptancePrior((0.7,)))
    spent, tokens, drafted = served(chooser, 2, 100, 1.1)
    assert drafted > 90
    assert tokens / spent > 1.5 * 2
    spent, tokens, _ = served(chooser, 32, 200, 6.0)
    assert tokens / spent > 0.9 * 32
    spent, tokens, drafted = served(chooser, 2, 40, 1.1)
    assert drafted > 35
    assert tokens / spent > 1.5 * 2


def test_a_bad_moment_is_got_over_in_time_whether_or_not_it_is_planned_in() -> None:
    chooser = BlockLengthController(CostTable({1: 1.0, 256: 1.1}), 7, AcceptancePrior((0.7,)))
    served(chooser, 2, 100, 1.1)
    for rows in [*range(3, 17)] * 2:
        chooser.observe_cost(
            rows=rows, drafted_rows=rows - 2, drafted_sequences=2, verify_seconds=40.0, draft_seconds=0.0
        )
    for _ in range(1500):  # the caller pauses
        chooser.observe_cost(rows=2, drafted_rows=0, drafted_sequences=0, verify_seconds=1.0, draft_seconds=0.0)
    spent, tokens, drafted = served(chooser, 2, 100, 1.1)
    assert drafted > 90
    assert tokens / spent > 1.5 * 2


@pytest.mark.parametrize("every", [1, 50])
def test_useless_drafts_are_tried_again_after_some_time_however_seldom_lengths_are_chosen(every: int) -> None:
    chooser = BlockLengthController(CostTable({1: 1.0, 256: 1.1}, {1: 0.6}), 7, AcceptancePrior((0.7,)))
    block = [Candidate("a", "block", 7)]
    for _ in range(500):
        chooser.plan(block, 0)
        chooser.observe("a", "block", 7, 0)
    for _ in range(20):
        chooser.observe_cost(rows=8, drafted_rows=7, drafted_sequences=1, verify_seconds=40.0, draft_seconds=0.6)
    for step in range(1, 2000):
        if step % every == 0 and any(chooser.plan(block, 0)):
            break
        chooser.observe_cost(rows=1, drafted_rows=0, drafted_sequences=0, verify_seconds=1.0, draft_seconds=0.0)
    assert 100 < step < 1500


@pytest.mark.parametrize("waits", [True, False])
def test_the_wait_for_a_copy_is_learned_apart_from_the_rows(waits: bool) -> None:
    chooser = BlockLengthController(CostTable({1: 3.0, 16: 3.0}, {1: 0.5}, copying_waits=waits), 7)
    for _ in range(40):
        chooser.observe_cost(
            rows=8, drafted_rows=7, drafted_sequences=0, verify_seconds=5.0, draft_seconds=0.0, copies=True
        )
    assert chooser.costs.copying_seconds == pytest.approx(2.0 if waits else 0.0, rel=0.02)
    assert chooser.costs.verify_seconds(8) == pytest.approx(3.0 if waits else 5.0, rel=0.02)


def test_a_plan_that_is_used_again_is_charged_again_and_ends_with_the_stake() -> None:
    chooser = BlockLengthController(CostTable(FLAT, {1: 1.0}), 7, AcceptancePrior((0.9,)))
    assert not chooser.again()
    [length] = chooser.plan([Candidate("a", "block", 7)], 0)
    if chooser._repeatable is None:  # the first plan may hold a probe
        [length] = chooser.plan([Candidate("a", "block", 7)], 0)
    assert length > 0
    used = 0
    while chooser.again():
        used += 1
        chooser.observe("a", "block", length, 0)
        chooser.observe_cost(rows=8, drafted_rows=7, drafted_sequences=1, verify_seconds=3.0, draft_seconds=1.0)
    assert 1 <= used <= 12
    chooser.plan([], 0)
    assert not chooser.again()


def test_the_drafters_evaluation_decides_the_first_round() -> None:
    costs = {1: 12.0, 2: 13.0, 4: 16.0, 8: 24.0}
    good = BlockLengthController(
        CostTable(costs, {1: 5.0}), 7, AcceptancePrior.from_eval({"conditional_acceptance": [0.9]})
    )
    poor = BlockLengthController(CostTable(costs, {1: 5.0}), 7, AcceptancePrior((0.1, 0.1)))
    assert good.plan([Candidate("a", "block", 7)], 0)[0] >= 4
    assert poor._survival(Candidate("a", "block", 7), 7)[0] < 0.2


@pytest.mark.parametrize(
    "data", [{}, {"conditional_acceptance": []}, {"conditional_acceptance": [1.5]}, {"conditional_acceptance": "x"}]
)
def test_a_broken_evaluation_is_refused(data: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="conditional_acceptance"):
        AcceptancePrior.from_eval(data)


def test_requests_are_told_apart() -> None:
    chooser = BlockLengthController(CostTable({1: 10.0, 64: 73.0}), 6)
    random = Random(3)
    seen = []
    for _ in range(80):
        both = [Candidate("good", "lookup:4", 6), Candidate("bad", "lookup:4", 6)]
        good, bad = chooser.plan(both, 0)
        chooser.observe("good", "lookup:4", good, good if random.random() < 0.95 else 0)
        chooser.observe("bad", "lookup:4", bad, 0)
        seen.append((good, bad))
    assert sum(1 for good, _ in seen[-40:] if good >= 5) >= 36
    assert sum(1 for _, bad in seen[-40:] if bad) <= 6  # probes


def test_a_source_given_up_long_ago_is_found_again() -> None:
    chooser = controller()
    rounds(chooser, 400, 0.0)
    assert rounds(chooser, 150, 0.95)[-1] == 7


def test_a_source_not_seen_for_very_many_steps_is_learned_anew() -> None:
    old, new = SourceEstimate([0.6] * 7, 0), SourceEstimate([0.6] * 7, 0)
    for step in range(1, 30):
        old.observe(7, 0, step)
    for estimate in (old, new):
        estimate.observe(7, 5, 200_000)
        estimate.observe(7, 6, 200_001)
    assert old.odds(200_002) == pytest.approx(new.odds(200_002))


def test_of_two_drafts_for_one_request_the_better_is_taken() -> None:
    chooser = BlockLengthController(CostTable({1: 10.0, 64: 40.0}, {1: 1.0}), 6)
    random = Random(5)
    taken = []
    for _ in range(120):
        both = [Candidate("a", "lookup:2", 6), Candidate("a", "block", 6)]
        copy, block = chooser.plan(both, 0)
        assert not (copy and block)
        chooser.observe("a", "lookup:2", copy, 0)
        chooser.observe("a", "block", block, block if random.random() < 0.9 else 0)
        taken.append(block)
    assert sum(1 for block in taken[-50:] if block >= 4) >= 45
    fixed = BlockLengthController(CostTable(FLAT), 6, fixed=4)
    assert fixed.plan(both, 0) == [4, 0]
    assert fixed.plan([Candidate("a", "lookup:2", 0), both[1]], 0) == [0, 4]


def test_limits_of_candidates_rows_and_controller_hold() -> None:
    chooser = controller(prior=0.98)
    lengths = chooser.plan([Candidate("a", "block", 2), Candidate("b", "block", 50), Candidate("c", "block", 0)], 4)
    assert lengths[0] <= 2
    assert lengths[1] <= 7
    assert lengths[2] == 0
    assert sum(chooser.plan([Candidate(str(i), "block", 7) for i in range(4)], 6, row_limit=14)) <= 4
    assert chooser.plan([], 3) == []
    assert BlockLengthController(CostTable(FLAT), 0).plan([Candidate("a", "block", 7)], 0) == [0]


def test_a_fixed_length_is_kept_to_within_the_limits() -> None:
    fixed = BlockLengthController(CostTable(FLAT), 7, fixed=3)
    candidates = [Candidate("a", "block", 7), Candidate("b", "block", 2)]
    assert fixed.plan(candidates, 0) == [3, 2]
    assert fixed.plan(candidates, 4, row_limit=10) == [3, 1]
    for _ in range(30):
        fixed.observe("a", "block", 3, 0)
    assert fixed.plan(candidates, 0) == [3, 2]
    with pytest.raises(ValueError, match="block lengths"):
        BlockLengthController(CostTable(FLAT), 7, fixed=-1)


class Treacherous:
    """A drafter that is right until the controller trusts it, then never while it does."""

    def __init__(self, costs: CostTable) -> None:
        self.chooser = BlockLengthController(costs, 7, AcceptancePrior((0.9,)))
        self.costs = costs

    def time_and_tokens(self, steps: int) -> tuple[float, int]:
        seconds, tokens = 0.0, 0
        for step in range(steps):
            [length] = self.chooser.plan([Candidate("a", "block", 7)], 0)
            seconds += self.costs.verify_seconds(1 + length) + self.costs.draft_seconds(1 if length else 0)
            accepted = length if step % 50 < 4 else 0
            self.chooser.observe("a", "block", length, accepted)
            tokens += 1 + accepted
        return seconds, tokens


@pytest.mark.parametrize("machine", [CPU, GPU])
def test_no_drafter_costs_more_than_the_stake(machine: object) -> None:
    costs = machine.measured()  # type: ignore[attr-defined]
    plain = costs.verify_seconds(1)
    seconds, tokens = Treacherous(costs).time_and_tokens(3000)
    # What may be lost: the share, the stake at the start, and the one round that overdraws it.
    assert seconds <= tokens * plain * (1 + STAKE_SHARE) + 6 * plain


def test_state_goes_with_the_request() -> None:
    chooser = controller()
    for i in range(50):
        chooser.plan([Candidate(str(i), "block", 7)], 0)
        chooser.observe(str(i), "block", 3, 1)
        chooser.release(str(i))
    assert not chooser._requests
    chooser.release("never seen")
    chooser.observe("gone", "block", 3, 1)  # a late result after the release is no fault
    assert not chooser._requests


def test_equal_histories_give_equal_plans() -> None:
    assert rounds(controller(), 150, 0.6, seed=9) == rounds(controller(), 150, 0.6, seed=9)


def scenario(name: str) -> Scenario:
    return next(s for s in all_scenarios() if s.name == name)


SIMULATED = [
    "cpu x1 stationary 0.85",
    "cpu x1 phases of 120",
    "cpu x1 never accepted",
    "cpu x8 good and bad requests",
    "cpu x32 copying",
    "gpu x1 stationary 0.50",
    "gpu x8 stationary 0.70",
    "gpu x8 never, prior 0.9",
    "gpu x32 good and bad requests",
    "small x8 stationary 0.70",
    "small x32 stationary 0.85",
]


@pytest.mark.parametrize("name", SIMULATED)
def test_simulated_regret_and_floor(name: str) -> None:
    chosen = scenario(name)
    chosen = replace(chosen, tokens=chosen.tokens // (2 if chosen.streams > 1 else 3))
    result = run(chosen, seed=5)
    assert result.regret <= 0.05, result
    assert result.over_plain >= 0.97, result


def test_mixed_requests_beat_every_fixed_length() -> None:
    assert run(replace(scenario("gpu x8 good and bad requests"), tokens=6000), seed=2).regret < -0.05


def test_the_simulation_is_deterministic_by_seed() -> None:
    chosen = replace(scenario("cpu x1 phases of 40"), tokens=500)

    def speed(seed: int) -> float:
        return serve(chosen, BlockLengthController(chosen.machine.measured(), 7), seed)

    assert speed(1) == speed(1)
    assert speed(1) != speed(2)


def test_the_command_reports_and_refuses_unknown_scenarios(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json", "--scenario", "cpu x32 never, prior"]) == 0
    assert '"ok": true' in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--scenario", "no such thing"])
