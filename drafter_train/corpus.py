"""Training sequences and the order in which they are read.

Everything random here is a function of (seed, step): which sequences form a batch, which positions become anchors. So
the data position of a run is its step number, and any number of processes sees the same global batch. This file knows
no model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drafter_train.tokens import TokenStore

WIDTH_STEP = 64
ANCHOR_STEP = 8
CLASSES = 8


class NothingToLearn(ValueError):
    """The token store holds no sequence with a token to predict."""


@dataclass(frozen=True)
class Corpus:
    """Prompt and response of every usable sample, end to end in one array.

    ``first`` is the first position whose token may be an anchor: the response's first token, or the last token before
    the greedy part when sampled tokens are not to be learned. ``keys``: (prompt, pass) of each sample. ``visited``,
    like ``ids``: where rounds of speculative decoding began, when the store knows that.
    """

    ids: NDArray[np.uint32]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    prompt_lengths: NDArray[np.int64]
    first: NDArray[np.int64]
    categories: tuple[str, ...]
    dropped: int
    keys: tuple[tuple[int, int], ...] = ()
    visited: NDArray[np.bool_] | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    def row(self, index: int) -> NDArray[np.uint32]:
        start = self.starts[index]
        return self.ids[start : start + self.lengths[index]]

    def sha256(self) -> str:
        """Hash of the sequences in their order: where it is the same, a step has the same batch."""
        digest = hashlib.sha256()
        for part in (self.ids, self.lengths, self.first):
            digest.update(np.ascontiguousarray(part).data)
        return digest.hexdigest()


def load_corpus(store: TokenStore, max_length: int, anchors_in_sampled: bool = True) -> Corpus:
    """Samples whose response has a token after its first one; longer ones are cut at ``max_length`` tokens, and those
    with nothing to learn are dropped and counted, as is a second answer in one pass (of two jobs with other numbers of
    shards). Raises NothingToLearn when none is left."""
    rows: list[NDArray[np.uint32]] = []
    prompt_lengths: list[int] = []
    first: list[int] = []
    categories: list[str] = []
    keys: list[tuple[int, int]] = []
    names = store.meta["categories"]
    dropped = 0
    for item in sorted(store.responses(), key=lambda response: (response.pass_index, response.prompt)):
        key = (item.prompt, item.pass_index)
        prompt = store.prompt(item.prompt)
        row = np.concatenate([prompt, item.ids]).astype(np.uint32)[:max_length]
        start = len(prompt) if anchors_in_sampled else len(prompt) + max(item.greedy_from - 1, 0)
        if start > len(row) - 2 or (keys and keys[-1] == key):
            dropped += 1
            continue
        rows.append(row)
        prompt_lengths.append(len(prompt))
        first.append(start)
        categories.append(names[item.prompt])
        keys.append(key)
    if not rows:
        raise NothingToLearn(f"{store.folder}: none of {dropped} responses has a token to predict")
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    starts = np.zeros(len(rows), dtype=np.int64)
    starts[1:] = np.cumsum(lengths)[:-1]
    visited: NDArray[np.bool_] | None = None
    if replay := store.replay():
        visited = np.zeros(int(lengths.sum()), dtype=np.bool_)
        for place, length, key in zip(starts, lengths, keys, strict=True):
            places = replay.get(key)
            if places is not None:
                visited[place + places[places < length]] = True
    return Corpus(
        np.concatenate(rows),
        starts,
        lengths,
        np.array(prompt_lengths),
        np.array(first),
        tuple(categories),
        dropped,
        tuple(keys),
        visited,
    )


class BatchOrder:
    """Which samples make up the global batch of a step. Each epoch visits every sample once, in batches of similar
    length; the last batch of an epoch may be smaller.

    Sample i sits at a place of the epoch's order that is i modulo CLASSES (but for a few at the epoch's end), so with
    1, 2, 4 or 8 processes and batches that these divide, a sample meets the same process in every epoch.
    """

    def __init__(self, lengths: NDArray[np.int64], batch: int, seed: int) -> None:
        self._lengths, self._batch, self._seed = lengths, batch, seed
        self.steps_per_epoch = -(-len(lengths) // batch)
        self._epoch = -1
        self._batches: list[NDArray[np.int64]] = []

    def __call__(self, step: int) -> NDArray[np.int64]:
        epoch, place = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            rng = np.random.default_rng((self._seed, epoch))
            order = rng.permutation(len(self._lengths))
            pool = -(-64 * self._batch // CLASSES) * CLASSES
            rows: list[NDArray[np.int64]] = []
            left: NDArray[np.int64] = order[:0]
            for start in range(0, len(order), pool):
                near = np.concatenate([left, order[start : start + pool]])
                near = near[np.argsort(self._lengths[near], kind="stable")]
                by_class = [near[near % CLASSES == c] for c in range(CLASSES)]
                count = min(len(one) for one in by_class)
                rows.append(np.stack([one[:count] for one in by_class], axis=1).flatten())
                left = np.concatenate([one[count:] for one in by_class])
            order = np.concatenate([*rows, left])
            batches = [order[i : i + self._batch] for i in range(0, len(order), self._batch)]
            self._batches = [batches[i] for i in rng.permutation(len(batches))]
            self._epoch = epoch
        return self._batches[place]


@dataclass(frozen=True)
class Batch:
    """Sequences with their anchors: ids [S, W] int64 (zeros after a sequence's end), lengths [S], anchors [S, N]
    ascending positions, valid [S, N] False where a sequence had fewer than N positions to offer."""

    ids: Tensor
    lengths: Tensor
    anchors: Tensor
    valid: Tensor

    def to(self, device: torch.device) -> Batch:
        def move(tensor: Tensor) -> Tensor:
            if device.type == "cuda" and tensor.device.type == "cpu":
                tensor = tensor.pin_memory()
            return tensor.to(device, non_blocking=True)

        return Batch(move(self.ids), move(self.lengths), move(self.anchors), move(self.valid))

    def copy_(self, other: Batch) -> None:
        """Overwrite this batch on the device with another of the same shape, from pinned host memory."""
        for mine, new in (
            (self.ids, other.ids),
            (self.lengths, other.lengths),
            (self.anchors, other.anchors),
            (self.valid, other.valid),
        ):
            mine.copy_(new.pin_memory(), non_blocking=True)

    def rows(self, start: int, stop: int) -> Batch:
        """Sequences start .. stop-1."""
        return Batch(self.ids[start:stop], self.lengths[start:stop], self.anchors[start:stop], self.valid[start:stop])

    def __len__(self) -> int:
        return self.ids.shape[0]


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def pad_rows(corpus: Corpus, samples: Sequence[int] | NDArray[np.int64], width: int) -> Tensor:
    """ids [S, width] int64, zeros after each sequence's end."""
    ids = np.zeros((len(samples), width), dtype=np.int64)
    for row, sample in zip(ids, samples, strict=True):
        row[: corpus.lengths[sample]] = corpus.row(int(sample))
    return torch.from_numpy(ids)


def make_batch(
    corpus: Corpus,
    samples: NDArray[np.int64],
    anchors: int,
    seed: int,
    step: int,
    rank: int = 0,
    world: int = 1,
    replay_weight: float = 1.0,
) -> Batch:
    """This rank's share (every ``world``-th sample) of a global batch with random anchors, at most ``anchors`` per
    sequence; places where a round of speculative decoding began are ``replay_weight`` times as likely. Shapes and
    anchors depend on the global batch only, so they are the same for any number of ranks."""
    lengths = torch.from_numpy(corpus.lengths[samples])
    first = torch.from_numpy(corpus.first[samples])
    width = _round_up(int(lengths.max()), WIDTH_STEP)
    count = min(_round_up(min(anchors, int((lengths - 1 - first).max())), ANCHOR_STEP), width)
    generator = torch.Generator().manual_seed((seed * 1_000_003 + step) % (1 << 63))
    keys = torch.rand(len(samples), width, generator=generator)
    if replay_weight != 1.0 and corpus.visited is not None:
        # Weighted draws without replacement: the largest u ** (1 / weight) win (Efraimidis and Spirakis 2006).
        seen = np.zeros((len(samples), width), dtype=np.bool_)
        for row, start, length in zip(seen, corpus.starts[samples], corpus.lengths[samples], strict=True):
            row[:length] = corpus.visited[start : start + length]
        keys = torch.where(torch.from_numpy(seen), keys ** (1 / replay_weight), keys)
    places = torch.arange(width)
    keys = keys.masked_fill((places < first[:, None]) | (places > lengths[:, None] - 2), -1.0)
    best, chosen = keys[rank::world].topk(count, dim=-1)
    chosen = chosen.masked_fill(best < 0, width)  # those without a position sort last
    if count > anchors:
        chosen[:, anchors:] = width
    chosen = chosen.sort(dim=-1).values
    valid = chosen < width
    mine = samples[rank::world]
    return Batch(pad_rows(corpus, mine, width), lengths[rank::world], chosen.masked_fill(~valid, 0), valid)
