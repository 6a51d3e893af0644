"""Small statistics on plain lists: percentiles, means with intervals, proportions with intervals, bootstrap.

Standard library only, so that it imports in the grading image. It knows nothing about servers, requests or files.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, median, stdev

Z95 = NormalDist().inv_cdf(0.975)


@dataclass(frozen=True)
class Interval:
    """A point estimate with the ends of its confidence interval, all in the unit of the data."""

    value: float
    low: float
    high: float

    def to_json(self) -> dict[str, float]:
        return {"value": self.value, "low": self.low, "high": self.high}


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile (0..100) by linear interpolation between order statistics; ValueError on no data."""
    if not values:
        raise ValueError("percentile of no values")
    if not 0 <= q <= 100:
        raise ValueError(f"q must be in 0..100, got {q}")
    ordered = sorted(values)
    rank = (len(ordered) - 1) * q / 100
    below = math.floor(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


def samples_needed(q: float) -> int:
    """How many samples the q-th percentile needs before at least ten of them lie beyond it (100 / (100 - q) * 10)."""
    if not 50 <= q < 100:
        raise ValueError(f"q must be in 50..100, got {q}")
    return math.ceil(10 * 100 / (100 - q) - 1e-9)


def student_t95(degrees: int) -> float:
    """Two-sided 95 % quantile of Student's t. Exact by bisection on the distribution function, for degrees >= 1."""
    if degrees < 1:
        raise ValueError(f"degrees must be >= 1, got {degrees}")
    low, high = 1.0, 20.0
    for _ in range(80):
        middle = (low + high) / 2
        if _student_cdf(middle, degrees) < 0.975:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _student_cdf(t: float, degrees: int) -> float:
    x = degrees / (degrees + t * t)
    return 1 - 0.5 * beta_cdf(x, degrees / 2, 0.5)


def beta_cdf(x: float, a: float, b: float) -> float:
    """Regularised incomplete beta function I_x(a, b), by the continued fraction of Lentz."""
    if x <= 0:
        return 0.0
    if x >= 1:
        return 1.0
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    if x > (a + 1) / (a + b + 2):
        return 1 - front * _beta_fraction(1 - x, b, a) / b
    return front * _beta_fraction(x, a, b) / a


def _beta_fraction(x: float, a: float, b: float) -> float:
    tiny = 1e-300
    c, d = 1.0, 1 - (a + b) * x / (a + 1)
    d = 1 / (d if abs(d) > tiny else tiny)
    value = d
    for m in range(1, 500):
        for numerator in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 + numerator * d
            d = 1 / (d if abs(d) > tiny else tiny)
            c = 1 + numerator / c
            c = c if abs(c) > tiny else tiny
            value *= c * d
        if abs(c * d - 1) < 1e-14:
            break
    return value


def mean_interval(values: Sequence[float]) -> Interval:
    """Mean with its 95 % Student interval; with one value the interval is unbounded."""
    centre = fmean(values)
    if len(values) < 2:
        return Interval(centre, -math.inf, math.inf)
    half = student_t95(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return Interval(centre, centre - half, centre + half)


def median_interval(values: Sequence[float]) -> Interval:
    """Median with its exact 95 % interval whatever the distribution: the innermost pair of order statistics that has
    the median between them at least so often. With fewer than six values it is unbounded."""
    ordered, count = sorted(values), len(values)
    # With k values cut off at each end the median is missed on a side when at least count - k lie beyond it.
    cut = max((k for k in range(count // 2) if 2 * binomial_at_least(count - k, count, 0.5) <= 0.05), default=-1)
    low, high = (ordered[cut], ordered[-1 - cut]) if cut >= 0 else (-math.inf, math.inf)
    return Interval(median(ordered), low, high)


def geometric_mean(values: Sequence[float]) -> float:
    """Geometric mean of positive numbers."""
    if not values or min(values) <= 0:
        raise ValueError("geometric mean needs positive values")
    return math.exp(fmean([math.log(value) for value in values]))


def geometric_mean_interval(ratios: Sequence[float]) -> Interval:
    """Geometric mean of repeated ratios with a 95 % interval: Student's t on the logarithms."""
    if not ratios or min(ratios) <= 0:
        raise ValueError("geometric mean needs positive values")
    logs = mean_interval([math.log(ratio) for ratio in ratios])
    return Interval(math.exp(logs.value), math.exp(logs.low), math.exp(logs.high) if logs.high < 700 else math.inf)


def is_tie(first: float, second: float, tolerance: float = 0.03) -> bool:
    """Whether two scores share a rank: the larger is at most ``tolerance`` above the smaller."""
    small, large = sorted((first, second))
    return large <= small * (1 + tolerance)


def wilson(successes: int, trials: int) -> Interval:
    """Share of successes with Wilson's 95 % score interval; with no trials the interval is 0..1."""
    if trials == 0:
        return Interval(math.nan, 0.0, 1.0)
    share = successes / trials
    scale = 1 + Z95**2 / trials
    centre = (share + Z95**2 / (2 * trials)) / scale
    half = Z95 / scale * math.sqrt(share * (1 - share) / trials + Z95**2 / (4 * trials**2))
    return Interval(share, max(0.0, centre - half), min(1.0, centre + half))


def exact_binomial(successes: int, trials: int) -> Interval:
    """Share of successes with the Clopper-Pearson 95 % interval (never too narrow, right at 0 and at 100 %)."""
    if not 0 <= successes <= trials or trials == 0:
        raise ValueError(f"need 0 <= successes <= trials and trials > 0, got {successes} of {trials}")
    low = 0.0 if successes == 0 else _beta_quantile(0.025, successes, trials - successes + 1)
    high = 1.0 if successes == trials else _beta_quantile(0.975, successes + 1, trials - successes)
    return Interval(successes / trials, low, high)


def _beta_quantile(p: float, a: float, b: float) -> float:
    low, high = 0.0, 1.0
    for _ in range(100):
        middle = (low + high) / 2
        if beta_cdf(middle, a, b) < p:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def binomial_at_least(successes: int, trials: int, share: float) -> float:
    """Probability of at least ``successes`` of ``trials`` when each succeeds with probability ``share``."""
    if successes <= 0:
        return 1.0
    return beta_cdf(share, successes, trials - successes + 1)


def bootstrap_interval(
    groups: Sequence[Sequence[float]],
    statistic: Callable[[list[Sequence[float]]], float],
    seed: int = 0,
    rounds: int = 1000,
) -> Interval:
    """95 % percentile bootstrap that resamples whole groups (prompts), so that steps of one prompt stay together."""
    if not groups:
        raise ValueError("bootstrap of no groups")
    rng = random.Random(seed)
    draws = [statistic([groups[rng.randrange(len(groups))] for _ in groups]) for _ in range(rounds)]
    return Interval(statistic(list(groups)), percentile(draws, 2.5), percentile(draws, 97.5))
