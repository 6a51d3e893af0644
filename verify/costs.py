"""What a step costs: measured seconds by number of verified rows and by number of drafted sequences.

A curve starts from a few points measured when the server starts, is read between them by straight lines (so a cost that
is flat up to some row count stays flat), never falls as the work grows, and follows what later steps really took. It
does not know what the rows are for.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

_OWN_POINT_UP_TO = 16
_POINTS_PER_DOUBLING = 4
_POINT_STEP = 0.1
_SCALE_STEP = 0.02
_OUTLIER = 0.3
_FEW = 3
"""Measurements of one point, the latest ones, that no single outlier can speak for: where all of them are far off on
one side, the point was wrong and is theirs from then on."""
_DOUBT_STEP = 0.2
"""Part of what a point has become dearer by that is taken off it each time that nothing has visited it."""
_COPYING_STEP = 0.05
"""Weight of a new wait for a copy, and what is taken off the wait as time passes: copies are then tried again."""
_REBUILD_EVERY = 16
_EARLY_REBUILDS = (2, 4, 8)


@dataclass
class _News:
    """Measurements of one count since the curve was last rebuilt: the log of measured over predicted seconds, summed;
    how many; and how many of them say something about other counts."""

    surprise: float = 0.0
    count: int = 0
    shared: int = 0


class CostCurve:
    """Seconds as a function of a whole number >= 0, from measured points (at least one; counts >= 1, seconds > 0)."""

    def __init__(self, points: Mapping[int, float]) -> None:
        if not points:
            raise ValueError("a cost curve needs at least one measured point")
        for count, seconds in points.items():
            if count < 1 or not (math.isfinite(seconds) and seconds > 0.0):
                raise ValueError(f"cost of {count} measured as {seconds} s: counts must be >= 1 and seconds > 0")
        self._log_points = {int(count): math.log(seconds) for count, seconds in points.items()}
        self._log_scale = 0.0  # shared drift, such as growing contexts, that moves points not seen lately too
        self._observations = 0
        self._news: dict[int, _News] = {}
        self._latest: dict[int, deque[tuple[int, float]]] = {}
        self._table: list[float] = []
        self._knots: list[tuple[int, float]] = []
        self._visited: set[int] = set()
        self._doubts: dict[int, float] = {}  # what points that have become dearer are taken off their logarithm
        self._rebuild()
        self._start = tuple(self._knots)

    def seconds(self, count: int) -> float:
        """Predicted seconds for ``count`` units of work."""
        return self.table(count)[count]

    def table(self, count: int) -> list[float]:
        """Predicted seconds for 0 .. ``count`` (and maybe more), to be indexed and not changed."""
        while len(self._table) <= count:
            self._table.append(self._read(len(self._table)))
        return self._table

    def observe(self, count: int, seconds: float, *, alone: bool = False) -> None:
        """Follow one measurement. A single outlier moves its point by a few per cent at most. ``alone``: it says
        nothing about other counts."""
        if count < 1 or not (math.isfinite(seconds) and seconds > 0.0):
            return
        surprise = math.log(seconds / self.seconds(count))
        key = _point(count)
        self._visited.add(key)
        if key in self._doubts and self._resolve(key, surprise):
            return
        latest = self._latest.setdefault(key, deque(maxlen=_FEW))
        latest.append((count, seconds))
        if len(latest) == _FEW:
            surprises = [math.log(took / self.seconds(of)) for of, took in latest]
            if min(surprises) > _OUTLIER or max(surprises) < -_OUTLIER:
                self._move(key, median(surprises))
                return
        news = self._news.setdefault(key, _News())
        news.surprise += max(-_OUTLIER, min(_OUTLIER, surprise))
        news.count += 1
        news.shared += not alone
        self._observations += 1
        if self._observations % _REBUILD_EVERY == 0 or self._observations in _EARLY_REBUILDS:
            self._learn()

    def _move(self, key: int, surprise: float) -> None:
        """One point to where its latest measurements are, which are forgotten with what they were compared with. Points
        of more work that no measurement has visited are believed to take so much longer, or shorter, as well."""
        known = self._known(key)
        extra = math.exp(known + surprise) - math.exp(known)
        for point, log_seconds in self._log_points.items():
            if point > key and point not in self._latest:
                self._log_points[point] = math.log(max(math.exp(log_seconds) + extra, math.exp(known + surprise)))
        self._log_points[key] = known + surprise
        self._latest[key].clear()
        self._news.pop(key, None)
        self._doubts.pop(key, None)
        self._rebuild()

    def age(self) -> None:
        """Time has passed. What looks too dear to be done is not measured either, and may have been dear for a moment
        only: points that nothing has visited since the last time slowly come back to what was measured first."""
        for point, log_seconds in self._log_points.items():
            above = log_seconds - math.log(_between(self._start, point))
            if above > 0.0 and point not in self._visited:
                doubt = self._doubts.get(point, 0.0)
                self._doubts[point] = doubt + _DOUBT_STEP * (above - doubt)
        self._visited.clear()
        self._rebuild()

    def _resolve(self, key: int, surprise: float) -> bool:
        """A point in doubt was measured: True where it is as dear as it was, and all beyond it with it."""
        restored = surprise > self._doubts[key] / 2
        if restored:
            for point in [point for point in self._doubts if point >= key]:
                del self._doubts[point]
        else:
            self._log_points[key] -= self._doubts.pop(key)
        self._rebuild()
        return restored

    def _known(self, key: int) -> float:
        known = self._log_points.get(key)
        return math.log(self.seconds(key)) - self._log_scale if known is None else known

    def _learn(self) -> None:
        """Move every point seen since the last time, as far as so many small steps towards their mean would go."""
        for key, news in self._news.items():
            surprise = news.surprise / news.count
            known = self._known(key)
            shared = surprise * (1.0 - (1.0 - _SCALE_STEP) ** news.shared)
            self._log_points[key] = known + (surprise - shared) * (1.0 - (1.0 - _POINT_STEP) ** news.count)
            self._log_scale += shared
        self._news = {}
        self._rebuild()

    def to_json(self) -> list[list[float]]:
        """Pairs [count, seconds] as they stand now."""
        self._learn()
        return [[count, seconds] for count, seconds in self._knots]

    def _rebuild(self) -> None:
        """Points in order with falls averaged out (pool adjacent violators)."""
        pools: list[list[float]] = []  # [sum of seconds, number of points]
        counts = sorted(self._log_points)
        for count in counts:
            believed = self._log_points[count] - self._doubts.get(count, 0.0)
            pools.append([math.exp(believed + self._log_scale), 1.0])
            while len(pools) > 1 and pools[-2][0] / pools[-2][1] > pools[-1][0] / pools[-1][1]:
                total, members = pools.pop()
                pools[-1][0] += total
                pools[-1][1] += members
        levels = [total / members for total, members in pools for _ in range(int(members))]
        self._knots = list(zip(counts, levels, strict=True))
        self._table = [0.0]

    def _read(self, count: int) -> float:
        knots = self._knots
        if count <= knots[-1][0]:
            return _between(knots, count)
        if len(knots) == 1:
            return knots[0][1] * count / knots[0][0]
        # Past the last point: at least in proportion to the slope between half of it and it, so a short flat end or
        # noise between two near points is not carried on for ever.
        last, at_last = knots[-1]
        half = max(1, last // 2)
        slope = (at_last - self._table[half]) / (last - half) if last > half else at_last / last
        return at_last + slope * (count - last)


def _between(knots: Sequence[tuple[int, float]], count: int) -> float:
    """Straight lines between knots; the first and the last one's value outside."""
    if count <= knots[0][0]:
        return knots[0][1]
    for (low, at_low), (high, at_high) in pairwise(knots):
        if count <= high:
            return at_low + (at_high - at_low) * (count - low) / (high - low)
    return knots[-1][1]


def _point(count: int) -> int:
    """The point that learns from a measurement of ``count``: its own while counts are few; then one for all counts
    within a quarter of a doubling, or a batch whose row counts change with every step would learn about none."""
    spacing = max(1, (1 << (count - 1).bit_length()) // 2 // _POINTS_PER_DOUBLING)
    return count if count <= _OWN_POINT_UP_TO else -(-count // spacing) * spacing


class CostTable:
    """Cost of verifying ``rows`` rows in one target pass and of drafting for ``sequences`` sequences in one draft pass.

    ``draft_points`` is empty when nothing drafted costs time worth counting (prompt lookup alone). ``copying_waits``:
    a step with a copy is launched only when the step before it has been read, so it takes longer whatever its rows.
    """

    def __init__(
        self,
        verify_points: Mapping[int, float],
        draft_points: Mapping[int, float] | None = None,
        *,
        copying_waits: bool = False,
    ) -> None:
        self.verify = CostCurve(verify_points)
        self.draft = CostCurve(draft_points) if draft_points else None
        self.copying_waits = copying_waits
        self.copying_seconds = 0.0
        """What a copy adds to a step beside its rows, where copying waits."""
        self._copying_steps = 0

    def observe_copying(self, extra: float) -> None:
        """A step with a copy took so many seconds more than its rows and drafts do."""
        self._copying_steps += 1
        step = max(_COPYING_STEP, 1.0 / self._copying_steps)
        self.copying_seconds = max(0.0, self.copying_seconds + step * (extra - self.copying_seconds))

    def age(self) -> None:
        """Time has passed: what has not been measured lately is doubted."""
        self.verify.age()
        if self.draft is not None:
            self.draft.age()
        self.copying_seconds *= 1.0 - _COPYING_STEP

    def verify_seconds(self, rows: int) -> float:
        return self.verify.seconds(rows)

    def draft_seconds(self, sequences: int) -> float:
        return self.draft.seconds(sequences) if self.draft and sequences else 0.0

    def draft_table(self, sequences: int) -> list[float]:
        """Seconds for 0 .. ``sequences`` drafted sequences (and maybe more)."""
        return self.draft.table(sequences) if self.draft else [0.0] * (sequences + 1)

    def to_json(self) -> dict[str, Any]:
        return {
            "verify": self.verify.to_json(),
            "draft": self.draft.to_json() if self.draft else [],
            "copying": self.copying_seconds if self.copying_waits else None,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CostTable:
        """The inverse of ``to_json``. Raises ValueError (or KeyError) on anything else."""
        verify = {int(count): float(seconds) for count, seconds in data["verify"]}
        draft = {int(count): float(seconds) for count, seconds in data["draft"]}
        copying = data["copying"]
        table = cls(verify, draft, copying_waits=copying is not None)
        table.copying_seconds = float(copying or 0.0)
        return table
