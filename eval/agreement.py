"""Whether two clients agree on what they measured of one server: differences within rounds, their intervals, 3 %.

Requests of one run differ from each other (who shares a pass with whom), so a difference means little without the
interval that their number allows. It knows numbers and requests' times, and no client, tool or server.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median, stdev
from typing import Any

from eval.stats import Z95, geometric_mean_interval

TOLERANCE = 0.03


@dataclass(frozen=True)
class ClientRun:
    """What one client says of one run: ``numbers`` by name (seconds, tokens/s), and of every request in ``samples`` its
    ``ttft`` and ``tpot`` (seconds). ``server_ttft`` is the server's own mean over the same run, warm-up included."""

    numbers: dict[str, float]
    samples: dict[str, tuple[float, ...]] = field(default_factory=dict)
    server_ttft: float | None = None

    def to_json(self) -> dict[str, Any]:
        return {"numbers": self.numbers, "samples": self.samples, "server_ttft": self.server_ttft}


def latency_numbers(samples: dict[str, tuple[float, ...]]) -> dict[str, float]:
    """Mean (the plain name) and median (``_p50``) of every sample; ValueError where one is empty."""
    empty = [name for name, values in samples.items() if not values]
    if empty:
        raise ValueError(f"no request has a {empty[0]}")
    means = {name: fmean(values) for name, values in samples.items()}
    return means | {f"{name}_p50": median(values) for name, values in samples.items()}


def compare(ours: Sequence[ClientRun], theirs: Sequence[ClientRun]) -> list[dict[str, Any]]:
    """Every number above 0 that both sides have in every round: means, mean difference of the rounds, whether it is
    within the tolerance, and the difference's 95 % interval: ``low``, ``high`` from how the rounds vary (two or more),
    ``requests_low``, ``requests_high`` from how requests vary, taken as independent, where both sides list them."""
    rows = []
    for name in ours[0].numbers:
        sides = [[run.numbers.get(name, 0.0) for run in side] for side in (ours, theirs)]
        if not all(value > 0 for side in sides for value in side):
            continue
        ratio = geometric_mean_interval([a / b for a, b in zip(*sides, strict=True)])
        row: dict[str, Any] = {"what": name, "ours": fmean(sides[0]), "theirs": fmean(sides[1]),
                               "difference": ratio.value - 1, "low": ratio.low - 1, "high": ratio.high - 1,
                               "agrees": abs(ratio.value - 1) <= TOLERANCE}  # fmt: skip
        sample = name.removesuffix("_p50")
        both = [run.samples.get(sample, ()) for run in (*ours, *theirs)]
        if all(len(values) > 1 for values in both):
            error = median_error if name.endswith("_p50") else mean_error
            half = Z95 * math.sqrt(sum(error(values) ** 2 for values in both)) / len(ours)
            row["requests_low"] = ratio.value * math.exp(-half) - 1
            row["requests_high"] = ratio.value * math.exp(half) - 1
        rows.append(row)
    return rows


def mean_error(values: Sequence[float]) -> float:
    """The standard error of a mean as a share of the mean."""
    return stdev(values) / math.sqrt(len(values)) / fmean(values)


def median_error(values: Sequence[float]) -> float:
    """The same of a median: from the order statistics between which it lies with 95 %."""
    ordered, count = sorted(values), len(values)
    half = Z95 / 2 * math.sqrt(count)
    low = ordered[max(0, math.floor(count / 2 - half))]
    high = ordered[min(count - 1, math.ceil(count / 2 + half))]
    return (high - low) / (2 * Z95) / median(ordered)


def row_line(row: dict[str, Any], tool: str, rounds: int) -> str:
    """One compared number as text, with the interval over requests, else over rounds."""
    kind = "requests_" if "requests_low" in row else ""
    spread = f" ({row[kind + 'low']:+.2%} .. {row[kind + 'high']:+.2%})" if kind or rounds > 1 else ""
    state = "agrees" if row["agrees"] else "DIFFERS"
    return (f"{row['what']:20}ours {row['ours']:10.5g}   {tool} {row['theirs']:10.5g}   "
            f"{row['difference']:+.2%}{spread}  {state}")  # fmt: skip


def server_line(tool: str, ours: Sequence[ClientRun], theirs: Sequence[ClientRun]) -> str | None:
    """The mean times to the first token again beside what the server says of the same runs: of a difference between two
    clients, what lies in the server's times is a difference of the runs, the rest one of the clients' clocks. None
    where the server does not say."""
    parts = []
    for name, side in (("ours", ours), (tool, theirs)):
        own = [run.server_ttft for run in side if run.server_ttft is not None]
        if len(own) < len(side):
            return None
        seen = fmean(run.numbers["ttft"] for run in side)
        parts.append(f"{name} {fmean(own) * 1e3:.2f} ms and {(seen - fmean(own)) * 1e3:+.2f} beyond it")
    return f"{'ttft, the server:':20}" + ", ".join(parts)
