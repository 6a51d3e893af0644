"""A report as JSON that every reader takes: a number JSON does not have (NaN, an infinite end of an interval) is null.

It does not know what a report is about.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def finite(value: Any) -> Any:
    """The same value with None for every float that is not finite, at any depth; tuples become lists, as in JSON."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


def write_report(path: Path, report: Any, indent: int | None = 1) -> None:
    """Writes ``report`` to ``path``, on one line without an ``indent``; OSError where it cannot be written."""
    path.write_text(json.dumps(finite(report), indent=indent, allow_nan=False) + "\n", encoding="utf-8")
