"""One JSON object from a file that somebody else wrote: a model folder, a drafter folder.

Everything that makes such a file dangerous or ambiguous ends here with one error that names it: size, a device or pipe
in its place, bad UTF-8, deep nesting, numbers that no field could mean. It does not know which fields a file has.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MAX_BYTES = 64 * 1024 * 1024
MAX_NUMBER_CHARACTERS = 40
_SHOWN = 120


class JsonFileError(ValueError):
    """The file cannot be used; the message names it."""


def read_object(path: Path) -> dict[str, Any] | None:
    """The object in ``path``, None when there is no such file. Raises JsonFileError for anything else."""
    try:
        if not path.is_file():
            if path.exists():
                raise JsonFileError(f"{path} is not a file")
            return None
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise JsonFileError(f"{path} has {size} bytes, more than the {MAX_BYTES} that are read")
        value = json.loads(path.read_text(encoding="utf-8"), parse_int=_bounded)
    except JsonFileError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise JsonFileError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise JsonFileError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def _bounded(digits: str) -> int:
    if len(digits) > MAX_NUMBER_CHARACTERS:
        raise ValueError(f"an integer has more than {MAX_NUMBER_CHARACTERS} digits")
    return int(digits)


def shown(value: object) -> str:
    """``repr`` of a value from a file, cut so that an error stays one readable line."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({type(value).__name__})"
