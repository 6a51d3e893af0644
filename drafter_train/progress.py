"""One line per event with the time on it, for logs that are read after the machine is gone."""

from __future__ import annotations

import sys
import time


def say(message: str) -> None:
    """Print ``HH:MM:SS message`` to stderr at once."""
    print(f"{time.strftime('%H:%M:%S')} {message}", file=sys.stderr, flush=True)
