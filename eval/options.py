"""Types of command-line options: each refuses what is out of its limits and says which they are.

For ``argparse``, which puts the option's name before the message; also files to write. Standard library only.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path


def positive(text: str) -> int:
    """A count of at least one."""
    value = int(_number(text, whole=True))
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def not_negative(text: str) -> int:
    """A whole number from zero on: a seed."""
    value = int(_number(text, whole=True))
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, got {value}")
    return value


def new_file(text: str) -> Path:
    """A file to write, refused before hours of work when there is no folder for it."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"must be a file, {text} is a folder")
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"must lie in a folder that exists, {path.absolute().parent} does not")
    return path


def model_folder(text: str) -> Path:
    """A model's folder, refused before anything is started when there is no tokenizer in it."""
    path = Path(text)
    if not (path / "tokenizer.json").is_file():
        raise argparse.ArgumentTypeError(f"must be a model folder, {text} has no tokenizer.json")
    return path


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
