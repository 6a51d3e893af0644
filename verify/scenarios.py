"""The traffic and the machines that the block-length simulation runs: how often a drafter is right, and what rows cost.

Rates are conditional: the chance that draft token k is right when those before it were. Machine times are typical of a
two-core CPU with a 135M model, and of a data-centre GPU with a 4B model and with a 135M model that its host slows.
Nothing here knows the controller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from verify.costs import CostTable
from verify.estimates import AcceptancePrior


@dataclass(frozen=True)
class Machine:
    """True costs in seconds: of a target pass by rows (straight lines between points, then in steps of ``tile`` rows),
    and of a draft pass by sequences. ``measured_rows`` are the row counts its server measures at the start.
    ``host_per_row``: what the host needs for a row, beside the device; no measurement at the start knows of it."""

    name: str
    verify_points: Mapping[int, float]
    draft_base: float
    draft_per_sequence: float
    measured_rows: tuple[int, ...]
    tile: int = 1
    host_per_row: float = 0.0

    def verify_seconds(self, rows: int) -> float:
        return max(self._device_seconds(rows), rows * self.host_per_row)

    def _device_seconds(self, rows: int) -> float:
        return self._seconds_by_rows[-(-rows // self.tile) * self.tile]

    @cached_property
    def _seconds_by_rows(self) -> list[float]:
        points = sorted(self.verify_points.items())
        table = [points[0][1]] * (points[0][0] + 1)
        for (low, at_low), (high, at_high) in pairwise(points):
            table += [at_low + (at_high - at_low) * (n - low) / (high - low) for n in range(low + 1, high + 1)]
        return table

    def draft_seconds(self, sequences: int) -> float:
        return self.draft_base + self.draft_per_sequence * sequences if sequences else 0.0

    def measured(self) -> CostTable:
        """The table that a server on this machine starts with."""
        return CostTable(
            {rows: self._device_seconds(rows) for rows in self.measured_rows},
            {sequences: self.draft_seconds(sequences) for sequences in (1, 8, 32)},
        )


CPU = Machine(
    "cpu",
    {1: 0.012, 2: 0.013, 4: 0.016, 8: 0.024, 16: 0.041, 32: 0.075, 64: 0.140, 512: 1.05},
    draft_base=0.005,
    draft_per_sequence=0.0003,
    measured_rows=(1, 2, 4, 8, 16, 32, 64),
)
GPU = Machine(
    "gpu",
    {1: 0.0030, 32: 0.0030, 64: 0.0034, 128: 0.0048, 256: 0.0085, 512: 0.0160, 1024: 0.031},
    draft_base=0.0005,
    draft_per_sequence=0.0,
    measured_rows=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512),
    tile=16,
)


SMALL = Machine(
    "small",
    {1: 0.0006, 16: 0.0006, 32: 0.00066, 64: 0.00078, 128: 0.0011, 256: 0.0018, 512: 0.0035},
    draft_base=0.0001,
    draft_per_sequence=0.000006,
    measured_rows=(1, 2, 4, 8, 16, 32, 64, 128, 256),
    tile=16,
    host_per_row=0.00003,
)


@dataclass(frozen=True)
class Scenario:
    """``streams`` places that serve requests of ``request_tokens`` tokens one after another, ``tokens`` in all.

    ``rate(request, position, source)`` is the conditional rate at the first drafted token; each further position loses
    ``decay`` of it. ``source_at(request, position)`` says where a draft would come from ("" for nowhere).
    """

    name: str
    machine: Machine
    streams: int
    tokens: int
    request_tokens: int
    max_length: int
    rate: Callable[[int, int, str], float]
    decay: float = 0.02
    source_at: Callable[[int, int], str] | None = None
    prior: AcceptancePrior | None = None

    def source(self, request: int, position: int) -> str:
        return self.source_at(request, position) if self.source_at else "block"


Rate = Callable[[int, int, str], float]


def _constant(rate: float) -> Rate:
    return lambda request, position, source: rate


def _phases(high: float, low: float, length: int) -> Rate:
    return lambda request, position, source: high if (position // length + request) % 2 == 0 else low


def _whole_requests(high: float, low: float) -> Rate:
    return lambda request, position, source: high if request % 2 == 0 else low


def _trap(request: int, position: int, source: str) -> float:
    return 0.95 if position < 30 else 0.0


def _copying(request: int, position: int) -> str:
    """A third of the text is copied; elsewhere short matches come up now and then."""
    if position % 90 < 30:
        return "lookup:10" if position % 90 > 5 else "lookup:3"
    return "lookup:2" if position % 7 < 2 else ""


def _copied(request: int, position: int, source: str) -> float:
    return 0.95 if position % 90 < 30 else 0.15


_BLOCK_LENGTHS = {"cpu": 7, "gpu": 15, "small": 7}


def all_scenarios() -> Iterator[Scenario]:
    """Every machine with 1, 8 and 32 streams under every kind of traffic."""
    for machine in (CPU, GPU, SMALL):
        for streams in (1, 8, 32):
            rates: dict[str, Rate] = {
                **{f"stationary {rate:.2f}": _constant(rate) for rate in (0.95, 0.85, 0.7, 0.5, 0.3)},
                "phases of 120": _phases(0.92, 0.15, 120),
                "phases of 40": _phases(0.92, 0.15, 40),
                "good and bad requests": _whole_requests(0.92, 0.05),
                "good start then never": _trap,
                "never accepted": _constant(0.0),
            }
            # So many that regret varies by less than a per cent from seed to seed; the small machine has short steps.
            tokens = {1: 7200, 8: 9600, 32: 24000}[streams] * (2 if machine is SMALL else 1)
            common = (machine, streams, tokens, 360, _BLOCK_LENGTHS[machine.name])
            for kind, rate in rates.items():
                yield Scenario(f"{machine.name} x{streams} {kind}", *common, rate)
            sure = AcceptancePrior((0.9,))
            yield Scenario(f"{machine.name} x{streams} never, prior 0.9", *common, _constant(0.0), prior=sure)
            yield Scenario(f"{machine.name} x{streams} copying", *common, _copied, source_at=_copying)
