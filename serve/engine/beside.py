"""Work that a graph does beside its main line, in whatever the main line leaves of the card.

On a stream of its own, so that a recorded graph gets a branch; off CUDA at once. This file knows no work.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch


class Beside:
    """One branch at a time: ``run`` starts it from where the current stream is, ``join`` makes that wait for it."""

    def __init__(self, device: torch.device) -> None:
        # Always the same one: memory of a graph's pool belongs to the stream that it was taken on.
        self._stream: Any = None
        if device.type == "cuda" and not os.environ.get("SEAM_SERIAL"):
            self._stream = torch.cuda.Stream(device, priority=int(os.environ.get("SEAM_PRIO", "0")))  # type: ignore[no-untyped-call]

    def run(self, work: Callable[[], object]) -> None:
        """``work`` behind what the current stream has been given so far. What it reads must stay until ``join``."""
        if self._stream is None:
            work()
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            work()

    def join(self) -> None:
        """What the current stream is given from here on comes behind the branch."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
