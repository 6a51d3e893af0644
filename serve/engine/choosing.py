"""The target's own tokens for the works of a pass whose logits the host has. Decides nothing about drafts, and fails
nobody: it names the requests that no token can be chosen for.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from torch import Tensor

from serve.engine.runner import Rows
from serve.engine.scheduler import Work
from serve.engine.sequence import Sequence
from verify.sampling import InvalidLogitsError, RowGroup, sample_rows


def chosen_tokens(
    works: Seq[tuple[Work, Seq[int]]], logits: Tensor, rows: Seq[Rows]
) -> tuple[list[list[int] | None], list[Sequence]]:
    """For each work with its draft: a token after each of its last rows, [] for a chunk that does not reach the end,
    None where none could be chosen; and the sequences of these. logits [R, vocab] float32; rows: those of each work."""
    groups: list[RowGroup] = []
    owners: list[int] = []
    for index, ((work, draft), where) in enumerate(zip(works, rows, strict=True)):
        if work.reaches_end and where.count:
            first = where.first + where.count - 1 - len(draft)
            groups.append(RowGroup(work.sequence.sampler, first, tuple(draft), len(work.sequence.token_ids)))
            owners.append(index)
    results: list[list[int] | None] = [None] * len(works)
    refused: list[Sequence] = []
    while groups:
        try:
            for index, ids in zip(owners, sample_rows(logits, groups), strict=True):
                results[index] = ids
            break
        except InvalidLogitsError as error:
            for group in sorted(error.groups, reverse=True):
                refused.append(works[owners[group]][0].sequence)
                del groups[group], owners[group]
    # A prefill chunk that does not reach the end has no token to choose but still has to be settled.
    return [[] if ids is None and not works[i][0].reaches_end else ids for i, ids in enumerate(results)], refused
