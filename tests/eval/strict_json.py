"""Reads a report as a reader does that takes JSON and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def strict(path: Path) -> Any:
    """The value in ``path``; ValueError for NaN and Infinity, which Python's reader takes by default."""

    def refuse(name: str) -> float:
        raise ValueError(f"{path}: {name} is no JSON")

    return json.loads(path.read_text(), parse_constant=refuse)
