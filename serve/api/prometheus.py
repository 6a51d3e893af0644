"""Prometheus text exposition (format 0.0.4): counters, gauges, histograms, and nothing else.

A page is rebuilt for every scrape from values that others keep; only histograms keep state here. It does not know what
is measured.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_NO_LABELS: dict[str, str] = {}


class Histogram:
    """Counts of observed values in buckets with the given upper bounds (ascending; +Inf is implied)."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    @classmethod
    def of(cls, bounds: Sequence[float], counts: Sequence[int], total: float) -> Histogram:
        """One that somebody else has kept; missing counts are zero."""
        histogram = cls(bounds)
        for index, count in enumerate(counts[: len(histogram.counts)]):
            histogram.counts[index] = count
        histogram.total = total
        return histogram

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


class Page:
    """Collects samples by metric, all with the page's labels, and renders them."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = dict(labels)
        self._lines: list[str] = []

    def counter(
        self, name: str, help_text: str, value: float, series: Mapping[str, float] | None = None, label: str = ""
    ) -> None:
        """One counter; with ``series``, one sample for each value of ``label`` instead of ``value``."""
        self._head(name, "counter", help_text)
        if series is None:
            self._sample(name, _NO_LABELS, value)
        else:
            for key, amount in series.items():
                self._sample(name, {label: key}, amount)

    def gauge(self, name: str, help_text: str, value: float, labels: Mapping[str, str] = _NO_LABELS) -> None:
        self._head(name, "gauge", help_text)
        self._sample(name, labels, value)

    def histogram(self, name: str, help_text: str, histogram: Histogram) -> None:
        self._head(name, "histogram", help_text)
        running = 0
        for bound, count in zip((*histogram.bounds, math.inf), histogram.counts, strict=True):
            running += count
            self._sample(f"{name}_bucket", {"le": _number(bound)}, running)
        self._sample(f"{name}_sum", _NO_LABELS, histogram.total)
        self._sample(f"{name}_count", _NO_LABELS, running)

    def render(self) -> str:
        return "\n".join(self._lines) + "\n"

    def _head(self, name: str, kind: str, help_text: str) -> None:
        self._lines.append(f"# HELP {name} {help_text}")
        self._lines.append(f"# TYPE {name} {kind}")

    def _sample(self, name: str, labels: Mapping[str, str], value: float) -> None:
        pairs = ",".join(f'{key}="{_escape(text)}"' for key, text in {**self._labels, **labels}.items())
        self._lines.append(f"{name}{{{pairs}}} {_number(value)}")


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(int(value)) if float(value).is_integer() else repr(float(value))
