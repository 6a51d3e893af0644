"""How many rows a matrix product must be given so that a row's bits do not depend on the other rows, found by trying.

Libraries pick another kernel for few rows (one row, two rows), and which counts differ depends on the processor. So
each product is tried at start-up on its real shape: the smallest count from which all counts agree is its floor, and
shorter calls are padded up to it. Where no floor is found every call has one fixed row count. This file knows no
formats.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

RowOp = Callable[[Tensor], Tensor]

FLOORS = (1, 2, 3, 4, 8)
FIXED_ROWS = 16
_PROBE_ROWS = 80


@dataclass(frozen=True)
class RowPolicy:
    """floor: fewest rows of a call. fixed: every call has exactly ``floor`` rows (longer inputs are cut up)."""

    floor: int = 1
    fixed: bool = False

    def apply(self, op: RowOp, x: Tensor) -> Tensor:
        """op over x [T, K] -> [T, N], padded or cut as the policy says."""
        rows = x.shape[0]
        if rows < self.floor:
            return op(F.pad(x, (0, 0, 0, self.floor - rows)))[:rows]
        if not self.fixed or rows == self.floor:
            return op(x)
        return torch.cat([self.apply(op, part) for part in torch.split(x, self.floor)])

    def describe(self) -> str:
        return f"{self.floor} rows a call" if self.fixed else f"rows >= {self.floor}"


def find_row_policy(op: RowOp, in_features: int) -> RowPolicy:
    """Tries op [T, in_features] float32 -> [T, N] at many row counts and row positions; costs about ten calls."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_PROBE_ROWS, in_features, generator=generator)
    with torch.inference_mode():
        want = op(x)
        for floor in FLOORS:
            if all(_agrees(op, x, want, count) for count in (floor, floor + 1, floor + 2, 5, 7, 16, 17, 33, 64)):
                return RowPolicy(floor)
    return RowPolicy(FIXED_ROWS, fixed=True)


def _agrees(op: RowOp, x: Tensor, want: Tensor, count: int) -> bool:
    """First rows and last rows, so that a row is met at the start, in the middle and at the end of a call."""
    first = torch.equal(op(x[:count]), want[:count])
    return first and torch.equal(op(x[-count:].contiguous()), want[-count:])
