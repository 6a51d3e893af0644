"""The target's taps of every training token in device memory, where they fit: the target then runs over each once.

What it says after each token (``loss.Teacher``) is kept beside them when a recipe mixes it into the labels.

A process keeps the samples that fall to it (``BatchOrder`` sends a sample to the same process in every epoch) and
computes the rest anew. With eight bits a value each tap of a token is kept as float8 (four bits of exponent, three of
mantissa) with a scale of its own: half the memory for an error of 3 % of a value. This file knows no model.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drafter_train.corpus import Corpus
from drafter_train.loss import Teacher

FLOAT8 = torch.float8_e4m3fn
FLOAT8_MAX = 448.0


class TapCache:
    """Rows of one big tensor [tokens + 1, size]; the last row takes what belongs to no token. ``parts``: with more than
    0 the rows are kept as float8, with a scale for each of so many equal parts of a row. ``best``: how many tokens of
    the target's distribution are kept with each row."""

    def __init__(
        self,
        corpus: Corpus,
        rank: int,
        world: int,
        size: int,
        device: torch.device,
        dtype: torch.dtype,
        parts: int = 0,
        best: int = 0,
    ) -> None:
        mine = np.arange(rank, len(corpus), world)
        self._starts = np.full(len(corpus), -1, dtype=np.int64)
        ends = np.cumsum(corpus.lengths[mine])
        self._starts[mine] = ends - corpus.lengths[mine]
        self._lengths = corpus.lengths
        self._dump = int(ends[-1]) if len(ends) else 0
        # float8 rows are moved as bytes: not every operation knows the type.
        self._taps = torch.empty(self._dump + 1, size, device=device, dtype=torch.uint8 if parts else dtype)
        self._taps[-1].zero_()
        self._scales = torch.ones(self._dump + 1, parts, device=device) if parts else None
        self._teacher: Teacher | None = None
        if best:
            ids = torch.zeros(self._dump + 1, best, device=device, dtype=torch.int32)
            self._teacher = Teacher(ids, torch.zeros(ids.shape, device=device, dtype=dtype))
        self._filled = np.zeros(self._dump + 1, dtype=np.bool_)
        self._filled[-1] = True

    @staticmethod
    def gigabytes(
        corpus: Corpus, rank: int, world: int, size: int, dtype: torch.dtype, parts: int = 0, best: int = 0
    ) -> float:
        row = (size + 4 * parts if parts else size * dtype.itemsize) + best * (4 + dtype.itemsize)
        return float(corpus.lengths[rank::world].sum()) * row / 1e9

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

    def read(self, places: Tensor, out: Tensor, teacher: Teacher | None = None) -> None:
        """places [S, W] on the device -> out [S, W, size], teacher [S, W, best]."""
        flat = places.flatten()
        if teacher is not None and self._teacher is not None:
            for mine, wanted in ((self._teacher.ids, teacher.ids), (self._teacher.probs, teacher.probs)):
                torch.index_select(mine, 0, flat, out=wanted.view(-1, wanted.shape[-1]))
        if self._scales is None:
            torch.index_select(self._taps, 0, flat, out=out.view(-1, out.shape[-1]))
            return
        scales = self._scales[flat]
        kept = self._taps[flat].view(FLOAT8).to(out.dtype).view(*scales.shape, -1)
        torch.mul(kept, scales[..., None].to(out.dtype), out=out.view(kept.shape))

    def write(self, rows: Tensor, places: Tensor, taps: Tensor, teacher: Teacher | None = None) -> None:
        flat = places.flatten()
        if teacher is not None and self._teacher is not None:
            for mine, new in ((self._teacher.ids, teacher.ids), (self._teacher.probs, teacher.probs)):
                mine.index_copy_(0, flat, new.view(-1, new.shape[-1]))
        values = taps.view(-1, taps.shape[-1])
        if self._scales is not None:
            parts = values.view(len(values), self._scales.shape[1], -1)
            scales = parts.abs().amax(-1).float().clamp_(min=1e-12) / FLOAT8_MAX
            # The scale is used in the taps' own type, so it is rounded to that before it divides.
            scales = scales.to(taps.dtype).float()
            values = (parts / scales[..., None]).clamp_(-FLOAT8_MAX, FLOAT8_MAX).to(FLOAT8).view(values.shape)
            values = values.view(torch.uint8)
            self._scales.index_copy_(0, flat, scales)
        self._taps.index_copy_(0, flat, values)
        self._filled[rows[:, 0].numpy()] = True
