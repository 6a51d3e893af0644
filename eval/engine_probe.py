"""Times single forward passes of the engine's own model in this process: what a verify of n rows costs.

It uses the model and the pages as the engine does, one sequence, no scheduler and no HTTP. It changes nothing.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch

from serve.model.batch import FlatBatch
from serve.model.loader import load_target

PAGE = 32
MAX_CONTEXT = 1024
MAX_ROWS = 64


class EngineProbe:
    """A loaded target with one sequence's pages. ``weights`` as of the server's ``--weights``."""

    def __init__(self, model_dir: str, threads: int = 0, weights: str = "auto", device: str = "cpu") -> None:
        if threads:
            torch.set_num_threads(threads)
        self._device = torch.device(device)
        self._model = load_target(Path(model_dir), device=self._device, weights=weights)
        self._pages = tuple(range(-(-(MAX_CONTEXT + MAX_ROWS) // PAGE)))
        self._cache = self._model.allocate_cache(len(self._pages), PAGE)

    def seconds(self, rows: int, context: int) -> float:
        """Wall seconds of a pass over ``rows`` tokens behind ``context`` cached ones, logits of every row included."""
        if rows > MAX_ROWS or context > MAX_CONTEXT:
            raise ValueError(f"at most {MAX_ROWS} rows behind {MAX_CONTEXT} tokens, got {rows} behind {context}")
        positions = torch.arange(context, context + rows, dtype=torch.int64, device=self._device)
        batch = FlatBatch(
            token_ids=positions % 1000 + 100,
            positions=positions,
            slots=positions,
            visible=positions + 1,
            query_starts=(0, rows),
            page_tables=(self._pages[: -(-(context + rows) // PAGE)],),
            logit_rows=torch.arange(rows, device=self._device),
        )
        start = time.perf_counter()
        self._model.forward(batch, self._cache).logits.argmax(1).tolist()
        return time.perf_counter() - start
