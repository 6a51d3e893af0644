"""Types of command-line options that are numbers: each refuses what is out of its limits and says which they are.

For ``argparse``, which puts the option's name before the message. Standard library only.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


def positive(text: str) -> int:
    """A count of at least one."""
    value = int(_number(text, whole=True))
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def at_least(low: float, high: float = math.inf) -> Callable[[str], float]:
    """A finite number from ``low`` to ``high``."""

    def parse(text: str) -> float:
        value = _number(text)
        if not (low <= value <= high and math.isfinite(value)):
            limit = f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
            raise argparse.ArgumentTypeError(f"must be {limit} and finite, got {text}")
        return value

    return parse


def share(text: str) -> float:
    """A share of something: above 0, at most 1."""
    value = _number(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, got {text}")
    return value


def _number(text: str, whole: bool = False) -> float:
    try:
        return int(text) if whole else float(text)
    except ValueError as fault:
        raise argparse.ArgumentTypeError(f"must be a {'whole ' if whole else ''}number, got {text!r}") from fault
