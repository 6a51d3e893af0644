"""Which drafted tokens are kept: the longest prefix the target agrees with, then the target's own token.

``accept`` is the rule for one request; ``accept_lengths`` is the same rule for a batch of tensors with no
synchronisation with the host, and the specification of any kernel that does it. How the target's tokens were sampled is
not known here (see verify/sampling.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def accept(draft: Sequence[int], sampled: Sequence[int]) -> list[int]:
    """Tokens committed by one round: the n matching drafted tokens and ``sampled[n]``.

    ``sampled[j]`` is the target's token after the first j drafted ones. It may end with the first disagreement, as the
    rows after it do not matter; an agreeing list has len(draft) + 1 entries. Raises ValueError when it is too short.
    """
    kept = 0
    while kept < min(len(draft), len(sampled)) and draft[kept] == sampled[kept]:
        kept += 1
    if kept >= len(sampled):
        raise ValueError(f"{len(sampled)} target tokens do not decide a draft of {len(draft)}")
    return list(sampled[: kept + 1])


def accept_lengths(draft: Tensor, sampled: Tensor, lengths: Tensor) -> Tensor:
    """How many drafted tokens of each sequence are kept; the committed ids are ``sampled[s, : result[s] + 1]``.

    draft [S, K] int64, of which the first lengths[s] count; sampled [S, K + 1] int64; lengths [S] int64 in 0..K.
    Returns [S] int64 on the same device.
    """
    columns = torch.arange(draft.shape[1], device=draft.device)
    agrees = (draft == sampled[:, :-1]) & (columns < lengths.unsqueeze(1))
    return agrees.long().cumprod(dim=1).sum(dim=1)
