"""What acceptance length a drafter reaches on given greedy responses, without running a server.

For every response position a block is drafted from the target's taps, as if that position were the last committed
token; then the chain of rounds that greedy speculative decoding would take is read off. This is exact: drafts depend
only on committed tokens. This file knows no training.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drafter_train.blocks import cut_blocks, dense_mask, draft_hidden, embed_blocks
from drafter_train.corpus import Batch, Corpus, pad_rows
from drafter_train.target import Target
from serve.drafter.dflash import DFlashModel

RECALL_AT = 16


@dataclass
class Tally:
    """Counts over chains. ``tried[j]`` rounds had a label at draft position j and had accepted all before it;
    ``kept[j]`` of them accepted position j too; ``offered[j]`` rounds had a label there at all."""

    size: int
    tokens: int = 0
    rounds: int = 0
    tried: NDArray[np.int64] = field(init=False)
    kept: NDArray[np.int64] = field(init=False)
    offered: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        self.tried, self.kept, self.offered = (np.zeros(self.size, dtype=np.int64) for _ in range(3))

    def add_chain(self, leading: Sequence[int] | NDArray[np.int64], first: int, length: int) -> None:
        """Walk one response. ``leading[p]``: how many drafted tokens from anchor position p are right (cut at the
        response's end); the chain starts at anchor ``first`` and must commit tokens up to position length - 1."""
        place = first
        while place < length - 1:
            left = length - 1 - place
            right = min(int(leading[place]), left)
            offered = min(self.size, left)
            self.offered[:offered] += 1
            self.tried[: min(right + 1, offered)] += 1
            self.kept[:right] += 1
            committed = min(right + 1, left)
            self.tokens += committed
            self.rounds += 1
            place += committed

    def report(self) -> dict[str, Any]:
        survival = self.kept / np.maximum(self.offered, 1)
        return {
            "acceptance_length": self.tokens / max(self.rounds, 1),
            "tokens": self.tokens,
            "rounds": self.rounds,
            "conditional_acceptance": [round(float(x), 4) for x in self.kept / np.maximum(self.tried, 1)],
            "survival": [round(float(x), 4) for x in survival],
        }


@torch.no_grad()
def draft_everywhere(
    model: DFlashModel,
    target: Target,
    ids: Tensor,
    anchors: Tensor,
    lengths: Tensor,
    shuffle_taps: bool = False,
    recall: bool = True,
    fused: bool = False,
    head_tokens: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """ids [S, W], anchors [S, N] (0 where unused), lengths [S] -> drafted tokens' correctness, whether the label is in
    the best RECALL_AT (the same as correctness without ``recall``), and whether there is a label, each bool
    [S, N, B-1]. ``fused``: in fused kernels, which the trainer has checked.
    ``head_tokens`` [N]: the only tokens guessed, ascending; all, if not told."""
    config = model.config
    batch = Batch(ids, lengths, anchors, anchors > 0)
    blocks = cut_blocks(batch, config.block_size, config.mask_token_id)
    taps, _ = target.hidden_states(ids, config.target_layer_ids)
    if shuffle_taps:
        taps = taps.roll(1, dims=0) if taps.shape[0] > 1 else taps.flip(1)
    embeds = embed_blocks(blocks, target.embedding)
    if fused:
        from drafter_train.fused.forward import fused_draft_hidden

        hidden = fused_draft_hidden(model, embeds, taps, blocks.positions, anchors)
    else:
        mask = dense_mask(anchors, config.block_size, ids.shape[1])
        with torch.autocast(ids.device.type, dtype=torch.bfloat16, enabled=target.dtype == torch.bfloat16):
            hidden = draft_hidden(model, embeds, taps, blocks.positions, mask, None)
    rows = hidden[:, :, 1:].flatten(0, 2)
    labels = blocks.labels.flatten()
    hit, near = torch.empty_like(labels, dtype=torch.bool), torch.empty_like(labels, dtype=torch.bool)
    head = target.lm_head
    if head_tokens is not None:
        # Labels become places in the list; those outside it are never guessed.
        known = head_tokens.to(head.device)
        places = torch.searchsorted(known, labels).clamp_(max=len(known) - 1)
        labels = torch.where(known[places] == labels, places, -1)
        head = head.index_select(0, known)
    for start in range(0, rows.shape[0], 4096):
        part = slice(start, start + 4096)
        logits = rows[part].to(target.dtype) @ head.T
        if recall:
            match = logits.topk(min(RECALL_AT, head.shape[0]), dim=-1).indices == labels[part, None]
            hit[part], near[part] = match[:, 0], match.any(-1)
        else:
            hit[part] = near[part] = logits.argmax(-1) == labels[part]
    return (hit.view_as(blocks.valid) & blocks.valid), (near.view_as(blocks.valid) & blocks.valid), blocks.valid


@dataclass(frozen=True)
class Drafted:
    """What was drafted from every response position of some samples: correctness, nearness and presence of labels
    bool [S, N, B-1] on the device, and ``leading`` [S, N], how many drafts from there are right."""

    samples: list[int]
    hit: Tensor
    near: Tensor
    valid: Tensor
    leading: NDArray[np.int64]


def draft_all(
    model: DFlashModel,
    target: Target,
    corpus: Corpus,
    samples: Sequence[int],
    shuffle_taps: bool = False,
    recall: bool = True,
    fused: bool = False,
    head_tokens: Tensor | None = None,
) -> Iterator[Drafted]:
    """Draft from every response position of ``samples``, shortest responses first, some sequences at a time."""
    order = sorted(samples, key=lambda i: int(corpus.lengths[i] - corpus.prompt_lengths[i]))
    # About as many drafted rows at a time as a training step has.
    for group in _groups(corpus, order, rows=60_000 // model.config.block_size):
        lengths = torch.from_numpy(corpus.lengths[group])
        width = -(-int(lengths.max()) // 64) * 64
        starts = torch.from_numpy(corpus.prompt_lengths[group])
        count = -(-int((lengths - 1 - starts).max()) // 8) * 8
        places = starts[:, None] + torch.arange(count)
        anchors = places.masked_fill(places > lengths[:, None] - 2, 0)
        device = target.device
        hit, near, valid = draft_everywhere(
            model,
            target,
            pad_rows(corpus, group, width).to(device),
            anchors.to(device),
            lengths.to(device),
            shuffle_taps,
            recall,
            fused,
            head_tokens,
        )
        yield Drafted(group, hit, near, valid, hit.long().cumprod(-1).sum(-1).cpu().numpy())


def simulate(
    model: DFlashModel,
    target: Target,
    corpus: Corpus,
    samples: Sequence[int],
    shuffle_taps: bool = False,
    recall: bool = True,
    fused: bool = False,
    head_tokens: Tensor | None = None,
) -> dict[str, Any]:
    """Chain simulation over ``samples`` of greedy responses. The report: acceptance length (tokens per round, the
    target's own included), survival and conditional rates per position, the same per category, and recall over every
    response position (without ``recall`` only at 1). ``head_tokens``: as in ``draft_everywhere``."""
    size = model.config.block_size - 1
    total = Tally(size)
    by_category: defaultdict[str, Tally] = defaultdict(lambda: Tally(size))
    hits, nears, labels = (np.zeros(size, dtype=np.int64) for _ in range(3))
    for drafted in draft_all(model, target, corpus, samples, shuffle_taps, recall, fused, head_tokens):
        hits += drafted.hit.sum((0, 1)).cpu().numpy()
        nears += drafted.near.sum((0, 1)).cpu().numpy()
        labels += drafted.valid.sum((0, 1)).cpu().numpy()
        for row, sample in enumerate(drafted.samples):
            first, length = int(corpus.prompt_lengths[sample]), int(corpus.lengths[sample])
            by_place = np.zeros(length, dtype=np.int64)
            span = length - 1 - first
            by_place[first : first + span] = drafted.leading[row, :span]
            total.add_chain(by_place, first, length)
            by_category[corpus.categories[sample]].add_chain(by_place, first, length)
    report = total.report()
    report["responses"] = len(samples)
    report["recall"] = {
        "1": [round(float(x), 4) for x in hits / np.maximum(labels, 1)],
    }
    if recall:
        report["recall"][str(RECALL_AT)] = [round(float(x), 4) for x in nears / np.maximum(labels, 1)]
    report["categories"] = {name: tally.report() for name, tally in sorted(by_category.items())}
    return report


def _groups(corpus: Corpus, order: Sequence[int], rows: int) -> list[list[int]]:
    """Cut ``order`` (ascending response length) so that sequences x longest response stays within ``rows``."""
    groups: list[list[int]] = []
    for sample in order:
        need = int(corpus.lengths[sample] - corpus.prompt_lengths[sample])
        if not groups or (len(groups[-1]) + 1) * need > rows:
            groups.append([])
        groups[-1].append(sample)
    return groups
