"""Simulated traffic for the block-length controller.

``python -m verify.simulate [--json] [--scenario NAME] [--seed N]``

Every scenario is served with the controller, with each fixed block length and with none, on the same work: whether the
drafter is right about a token is drawn once per request and token. Prints tokens per second of the best fixed length
in hindsight, of the controller and of plain decoding, and exits 1 when the controller is more than 5 % behind the
best fixed length or below 0.97 of plain decoding anywhere. The same seed gives the same table. No model is run, and
no clock is read.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from verify.block_length import BlockLengthController, Candidate
from verify.scenarios import Scenario, all_scenarios

REGRET_LIMIT = 0.05
PLAIN_FLOOR = 0.97


class Policy(Protocol):
    """What the simulated engine asks; BlockLengthController is one."""

    def plan(self, candidates: Sequence[Candidate], plain_rows: int) -> list[int]: ...

    def observe(self, id: str, source: str, drafted: int, accepted: int) -> None: ...

    def observe_cost(
        self, *, rows: int, drafted_rows: int, drafted_sequences: int, verify_seconds: float, draft_seconds: float
    ) -> None: ...

    def release(self, id: str) -> None: ...


@dataclass(frozen=True)
class Result:
    """Tokens per second of one scenario."""

    scenario: str
    best_fixed_length: int
    best_fixed: float
    ours: float
    plain: float

    @property
    def regret(self) -> float:
        return 1.0 - self.ours / self.best_fixed

    @property
    def over_plain(self) -> float:
        return self.ours / self.plain

    @property
    def ok(self) -> bool:
        return self.regret <= REGRET_LIMIT and self.over_plain >= PLAIN_FLOOR

    def to_json(self) -> dict[str, object]:
        return {
            "scenario": self.scenario,
            "best_fixed_length": self.best_fixed_length,
            "best_fixed_tokens_per_second": round(self.best_fixed, 2),
            "ours_tokens_per_second": round(self.ours, 2),
            "plain_tokens_per_second": round(self.plain, 2),
            "regret": round(self.regret, 4),
            "over_plain": round(self.over_plain, 4),
            "ok": self.ok,
        }


class _Stream:
    """One place of the batch, always busy: its requests follow one another."""

    def __init__(self, scenario: Scenario, slot: int, seed: int) -> None:
        self._scenario = scenario
        self._seed = seed
        self.slot = slot
        self.request = -1
        self._next()

    def _next(self) -> None:
        self.request += 1
        self.id = f"{self.slot}.{self.request}"
        self.position = 0
        luck = Random(f"{self._seed} {self._scenario.name} {self.id}")
        # luck[p] decides whether a draft of token p is right, whoever asks.
        self.luck = [luck.random() for _ in range(self._scenario.request_tokens)]

    def candidate(self) -> Candidate | None:
        source = self._scenario.source(self.slot + self.request, self.position)
        room = min(self._scenario.max_length, self._scenario.request_tokens - self.position - 1)
        return Candidate(self.id, source, room) if source and room else None

    def accepted(self, source: str, length: int) -> int:
        """How many of ``length`` drafted tokens the target agrees with."""
        rate = self._scenario.rate(self.slot + self.request, self.position, source)
        count = 0
        while count < length and self.luck[self.position + count] < rate:
            count += 1
            rate *= 1.0 - self._scenario.decay
        return count

    def advance(self, tokens: int, policy: Policy) -> None:
        self.position += tokens
        if self.position >= self._scenario.request_tokens:
            policy.release(self.id)
            self._next()


def serve(scenario: Scenario, policy: Policy, seed: int) -> float:
    """Tokens per second of a server with this policy, over ``scenario.tokens`` tokens with every stream busy."""
    noise = Random(f"noise {seed}")
    streams = [_Stream(scenario, slot, seed) for slot in range(scenario.streams)]
    seconds, tokens = 0.0, 0
    while tokens < scenario.tokens:
        candidates = [stream.candidate() for stream in streams]
        offered = [candidate for candidate in candidates if candidate is not None]
        lengths = iter(policy.plan(offered, len(streams) - len(offered)))
        chosen = [0 if candidate is None else next(lengths) for candidate in candidates]
        drafted = sum(
            1
            for candidate, length in zip(candidates, chosen, strict=True)
            if candidate is not None and length and candidate.source == "block"
        )
        rows = len(streams) + sum(chosen)
        verify_seconds = scenario.machine.verify_seconds(rows) * noise.uniform(0.97, 1.05)
        draft_seconds = scenario.machine.draft_seconds(drafted) * noise.uniform(0.97, 1.05)
        seconds += verify_seconds + draft_seconds
        policy.observe_cost(
            rows=rows,
            drafted_rows=sum(chosen),
            drafted_sequences=drafted,
            verify_seconds=verify_seconds,
            draft_seconds=draft_seconds,
        )
        for stream, candidate, length in zip(streams, candidates, chosen, strict=True):
            accepted = 0
            if candidate is not None and length:
                accepted = stream.accepted(candidate.source, length)
                policy.observe(candidate.id, candidate.source, length, accepted)
            tokens += accepted + 1
            stream.advance(accepted + 1, policy)
    return tokens / seconds


def run(scenario: Scenario, seed: int = 0) -> Result:
    """The controller against every fixed length on one scenario."""

    def speed(fixed: int | None) -> float:
        policy = BlockLengthController(scenario.machine.measured(), scenario.max_length, scenario.prior, fixed)
        return serve(scenario, policy, seed)

    fixed = [speed(length) for length in range(scenario.max_length + 1)]
    best = max(range(len(fixed)), key=fixed.__getitem__)
    return Result(scenario.name, best, fixed[best], speed(None), fixed[0])


def main(argv: Sequence[str] | None = None) -> int:
    scenarios = {scenario.name: scenario for scenario in all_scenarios()}
    parser = argparse.ArgumentParser(prog="python -m verify.simulate", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON line per scenario instead of a table")
    parser.add_argument("--scenario", action="append", help="only scenarios whose name contains this; may be repeated")
    parser.add_argument("--seed", type=int, default=0, help="of the drawn traffic (default: 0)")
    options = parser.parse_args(argv)
    wanted = [s for s in scenarios.values() if not options.scenario or any(part in s.name for part in options.scenario)]
    if not wanted:
        parser.error(f"no scenario matches; there are: {', '.join(scenarios)}")
    if not options.json:
        print(f"{'scenario':34} {'best fixed':>16} {'ours':>9} {'plain':>9} {'regret':>8} {'/plain':>7}")
    broken = 0
    for scenario in wanted:
        result = run(scenario, options.seed)
        broken += not result.ok
        if options.json:
            print(json.dumps(result.to_json()), flush=True)
            continue
        best = f"{result.best_fixed:9.1f} at {result.best_fixed_length:3}"
        print(
            f"{result.scenario:34} {best:>16} {result.ours:9.1f} {result.plain:9.1f} {result.regret:8.1%} "
            f"{result.over_plain:7.3f}{'' if result.ok else '  BROKEN'}",
            flush=True,
        )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
