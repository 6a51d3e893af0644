"""How likely drafted tokens are to be kept, learned from what was kept.

The conditional acceptance of position k is the chance that token k of a draft is kept when all before it were. It is
estimated in three levels, each shrunk to the one above:
  prior     a curve per source, for block drafts from the drafter's own evaluation file
  source    counts per position over all requests, plus one odds ratio against the prior for positions rarely reached
  request   one odds ratio against its source: few rounds tell a lot, and the state is small
How much a request's own counts weigh against its source is learned too: whichever of a few weights has predicted the
last rounds best. Where requests are alike it is the source that counts, where they differ or change it is the request.
Counts are discounted, so that both follow changes. After a rejection nothing was learned about later positions, and
nothing is counted for them. This file knows no costs and chooses nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import mul
from typing import Any

_LOWEST, _HIGHEST = 0.002, 0.998
_SOURCE_MEMORY = 0.998
_SOURCE_STEP_MEMORY = 0.99
"""Discounts of a source's counts per round and per step."""
_SOURCE_POSITION_WEIGHT = 6.0
_SOURCE_RATIO_WEIGHT = 2.0
_REQUEST_MEMORY = 0.97
"""Discount per round of a request's counts."""
_VIEWS = ((8.0, 0.985), (2.0, 0.985), (40.0, 0.985), (2.0, 0.9))
"""Ways to see a request: trials that its source counts for, and discount per step in which it is not drafted."""
_VIEW_WEIGHTS = tuple(weight for weight, _ in _VIEWS)
_IDLE_MEMORY = 0.985
_LOSS_MEMORY = 0.995
_LOG_CHANGE = math.log(8.0)
_ALARM = 5.0
_NEGLIGIBLE = 0.01
_LARGEST_UNIT = 1e100

_LOOKUP_CURVES = {"lookup:2": 0.4, "lookup:3": 0.55, "lookup:4": 0.65, "lookup:6": 0.75, "lookup:10": 0.85}
_DEFAULT_CURVE = (0.65, 0.65)


@dataclass(frozen=True)
class AcceptancePrior:
    """Conditional acceptance by position before anything is seen; a curve goes on with its last value.

    ``block`` is for drafts of the block drafter. Other sources have built-in curves.
    """

    block: tuple[float, ...] = _DEFAULT_CURVE

    def __post_init__(self) -> None:
        if not self.block or not all(0.0 <= rate <= 1.0 for rate in self.block):
            raise ValueError(f"conditional_acceptance must be rates in 0..1, at least one, got {list(self.block)}")

    @classmethod
    def from_eval(cls, data: Mapping[str, Any]) -> AcceptancePrior:
        """From a drafter's evaluation file: {"conditional_acceptance": [rates]}. Raises ValueError if it has none."""
        rates = data.get("conditional_acceptance")
        if not isinstance(rates, list) or not all(isinstance(rate, (int, float)) for rate in rates):
            raise ValueError(f"conditional_acceptance must be a list of rates in 0..1, got {rates!r}")
        return cls(tuple(float(rate) for rate in rates))

    def curve(self, source: str, length: int) -> list[float]:
        """Rates of the first ``length`` positions for a source."""
        known = self.block if source == "block" else (_LOOKUP_CURVES.get(source, 0.5),)
        return [known[min(k, len(known) - 1)] for k in range(length)]


class SourceEstimate:
    """Acceptance by position of everything one source drafted, and how much its requests differ."""

    def __init__(self, prior: Sequence[float], step: int) -> None:
        self._last_step = step
        self._prior = [_to_odds(rate) for rate in prior]
        # In units of which the latest round counts _unit: cheaper than discounting every count in every round.
        self._trials = [0.0] * len(self._prior)
        self._hits = [0.0] * len(self._prior)
        self._unit = 1.0
        self._odds = self._prior
        self.chances = _chances(self._odds)
        self._odds_step = step
        self._stale = False
        self._losses = [0.0] * len(_VIEWS)
        self.view = 0

    def observe(self, drafted: int, accepted: int, step: int) -> None:
        """Count one round: ``accepted`` of ``drafted`` tokens were kept; ``step`` never falls."""
        keep = _SOURCE_MEMORY * _SOURCE_STEP_MEMORY ** (step - self._last_step)
        self._unit /= max(keep, 1.0 / _LARGEST_UNIT)  # after very many steps nothing is left, and keep is 0
        self._last_step = step
        if self._unit > _LARGEST_UNIT:
            self._trials, self._hits, self._unit = *self._counts(), 1.0
        for k in range(min(drafted, accepted + 1, len(self._trials))):
            self._trials[k] += self._unit
            if k < accepted:
                self._hits[k] += self._unit
        self._stale = True

    def _counts(self) -> tuple[list[float], list[float]]:
        """Discounted trials and hits by position."""
        return [trials / self._unit for trials in self._trials], [hits / self._unit for hits in self._hits]

    def score(self, losses: Sequence[float]) -> None:
        """Note how badly each of the request weights predicted one round (log loss)."""
        self._losses = [_LOSS_MEMORY * old + new for old, new in zip(self._losses, losses, strict=True)]
        self.view = min(range(len(self._losses)), key=self._losses.__getitem__)

    def odds(self, step: int) -> list[float]:
        """Conditional odds of acceptance by position. Worked out once a step: a round more or less changes little."""
        if self._stale and self._odds_step != step:
            all_trials, all_hits = self._counts()
            weight = _SOURCE_POSITION_WEIGHT
            log_ratio = _log_ratios(sum(all_hits), all_trials, _chances(self._prior), (_SOURCE_RATIO_WEIGHT,))[0]
            ratio = math.exp(log_ratio)
            self._odds = [
                _to_odds((hits + weight * odds * ratio / (1.0 + odds * ratio)) / (trials + weight))
                for hits, trials, odds in zip(all_hits, all_trials, self._prior, strict=True)
            ]
            self.chances = _chances(self._odds)
            self._odds_step, self._stale = step, False
        return self._odds

    def curve(self) -> list[float]:
        """Conditional acceptance by position, as last worked out."""
        return self.chances


class _Counts:
    """Discounted hits, and trials by position."""

    def __init__(self, length: int) -> None:
        self.trials = [0.0] * length
        self.hits = 0.0

    def add(self, drafted: int, accepted: int, keep: float) -> None:
        if keep != 1.0:
            self.trials = [keep * trials for trials in self.trials]
        self.hits = keep * self.hits + min(accepted, len(self.trials))
        for k in range(min(drafted, accepted + 1, len(self.trials))):
            self.trials[k] += 1.0


class RequestEstimate:
    """How one request's drafts fare against their source: a long memory, cut short when the text changes its nature.

    Two CUSUM tests (Page, 1954) watch for odds that became eight times worse or better; on an alarm only what was
    seen since the change remains.
    """

    def __init__(self, length: int, step: int) -> None:
        self._counts = _Counts(length)
        self._since = {log_factor: _Counts(length) for log_factor in (-_LOG_CHANGE, _LOG_CHANGE)}
        self._evidence = dict.fromkeys(self._since, 0.0)
        self._last_step = step
        self._log_ratios = [0.0] * len(_VIEWS)

    def observe(self, drafted: int, accepted: int, step: int, source: SourceEstimate) -> None:
        """Count one round; ``step`` never falls."""
        odds = source.odds(step)
        seen = odds[: min(drafted, accepted + 1)]
        hits = min(accepted, len(seen))
        drifted = self._drifted(step)
        source.score(_losses(seen, drifted, hits))
        self._watch(drafted, hits, seen, drifted[source.view])
        self._counts.add(drafted, accepted, _REQUEST_MEMORY * _IDLE_MEMORY ** self._idle(step))
        self._last_step = step
        self._log_ratios = _log_ratios(self._counts.hits, self._counts.trials, source.chances, _VIEW_WEIGHTS)

    def ratio(self, source: SourceEstimate, step: int) -> float:
        """Odds of this request's drafts being kept, relative to its source; drifts to 1 while nothing is seen."""
        return math.exp(self._drifted(step)[source.view])

    def _watch(self, drafted: int, hits: int, seen: Sequence[float], log_ratio: float) -> None:
        expected, *others = _losses(seen, [log_ratio, *(log_ratio + log_factor for log_factor in self._since)], hits)
        for (factor, since), loss in zip(list(self._since.items()), others, strict=True):
            evidence = self._evidence[factor] + expected - loss
            if evidence >= _ALARM:
                since.add(drafted, hits, 1.0)
                self._counts = since
            if evidence <= 0.0 or evidence >= _ALARM:
                evidence = 0.0
                if since.hits or since.trials[0]:
                    self._since[factor] = _Counts(len(since.trials))
            else:
                since.add(drafted, hits, 1.0)
            self._evidence[factor] = evidence

    def _idle(self, step: int) -> int:
        return max(0, step - self._last_step - 1)

    def _drifted(self, step: int) -> list[float]:
        idle = self._idle(step)
        return [memory**idle * ratio for (_, memory), ratio in zip(_VIEWS, self._log_ratios, strict=True)]


def survival(odds: Sequence[float], ratio: float, length: int) -> list[float]:
    """Chance that positions 1 .. ``length`` of a draft are kept, each with all before it, given conditional odds.

    Ends early where the chance has become too small to matter.
    """
    result = []
    alive = 1.0
    for odd in odds[:length]:
        scaled = odd * ratio
        alive *= scaled / (1.0 + scaled)
        if alive < _NEGLIGIBLE:
            break
        result.append(alive)
    return result


def _log_ratios(
    hits: float, trials: Sequence[float], chances: Sequence[float], weights: Sequence[float]
) -> list[float]:
    """Log of the odds of the hits over those expected at the same positions, for each number of trials added that went
    as expected."""
    total = sum(trials)
    expected = sum(map(mul, trials, chances))
    first = chances[0]
    result = []
    for weight in weights:
        mean = (expected + weight * first) / (total + weight)
        result.append(math.log((hits + weight * mean) / (total - hits + weight * (1.0 - mean)) * (1.0 - mean) / mean))
    return result


def _losses(seen: Sequence[float], log_ratios: Sequence[float], hits: int) -> list[float]:
    """Minus the log-likelihoods of a round that kept ``hits`` of the positions whose odds were seen, the odds scaled by
    each of the ratios."""
    kept = math.log(math.prod(seen[:hits]))
    result = []
    for log_ratio in log_ratios:
        ratio, whole = math.exp(log_ratio), 1.0
        for odd in seen:
            whole *= 1.0 + ratio * odd
        result.append(math.log(whole) - hits * log_ratio - kept)
    return result


def _chances(odds: Sequence[float]) -> list[float]:
    return [odd / (1.0 + odd) for odd in odds]


def _to_odds(rate: float) -> float:
    rate = min(_HIGHEST, max(_LOWEST, rate))
    return rate / (1.0 - rate)
