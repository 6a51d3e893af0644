"""The target's taps of every training token in device memory, where they fit: the target then runs over each once.

A process keeps the samples that fall to it (``BatchOrder`` sends a sample to the same process in every epoch) and
computes the rest anew. This file knows no model.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drafter_train.corpus import Corpus


class TapCache:
    """Rows of one big tensor [tokens + 1, size]; the last row takes what belongs to no token."""

    def __init__(
        self, corpus: Corpus, rank: int, world: int, size: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        mine = np.arange(rank, len(corpus), world)
        self._starts = np.full(len(corpus), -1, dtype=np.int64)
        ends = np.cumsum(corpus.lengths[mine])
        self._starts[mine] = ends - corpus.lengths[mine]
        self._lengths = corpus.lengths
        self._dump = int(ends[-1]) if len(ends) else 0
        self._taps = torch.empty(self._dump + 1, size, device=device, dtype=dtype)
        self._taps[-1].zero_()
        self._filled = np.zeros(self._dump + 1, dtype=np.bool_)
        self._filled[-1] = True

    @staticmethod
    def gigabytes(corpus: Corpus, rank: int, world: int, size: int, dtype: torch.dtype) -> float:
        return float(corpus.lengths[rank::world].sum()) * size * dtype.itemsize / 1e9

    def rows(self, samples: NDArray[np.int64], width: int) -> Tensor | None:
        """Place of every token of a batch [S, width], or None when one of its samples is not kept here."""
        starts = self._starts[samples]
        if len(samples) == 0 or (starts < 0).any():
            return None
        steps = np.arange(width)
        inside = steps < self._lengths[samples][:, None]
        return torch.from_numpy(np.where(inside, starts[:, None] + steps, self._dump))

    def knows(self, rows: Tensor) -> bool:
        """Whether all these sequences were written (their first tokens tell)."""
        return bool(self._filled[rows[:, 0].numpy()].all())

    def read(self, places: Tensor, out: Tensor) -> None:
        """places [S, W] on the device -> out [S, W, size]."""
        torch.index_select(self._taps, 0, places.flatten(), out=out.view(-1, out.shape[-1]))

    def write(self, rows: Tensor, places: Tensor, taps: Tensor) -> None:
        self._taps.index_copy_(0, places.flatten(), taps.view(-1, taps.shape[-1]))
        self._filled[rows[:, 0].numpy()] = True
