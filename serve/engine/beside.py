"""Work that a recorded graph does beside its main line, in what that leaves of the card: on a stream of its own, which
becomes a branch. Off CUDA at once. This file does not know what the work is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Beside:
    """One branch at a time: ``run`` starts it where the current stream is, ``join`` makes that wait for its end."""

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = None
        if device.type == "cuda":
            # One for all graphs: memory of their pool belongs to the stream that it was first taken on.
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def run(self, work: Callable[[], object]) -> None:
        """``work`` behind all that the current stream has been given so far. What it reads must stay until ``join``."""
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
