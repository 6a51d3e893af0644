"""The ranks of one model and what they say to each other during a pass: sums, gathered logits, the best token.

A sum is formed in the order of the ranks on every one of them: their parts are gathered and added, so that a row has
the same bits in whatever batch it stands (a ring adds each piece of a message in another order). Two ranks may let the
library add: a + b is b + a. All of it is launched without waiting, so that a CUDA graph can capture it. This file knows
tensors; no layers, no processes and no requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class RankGroup:
    """One rank's view. process_group: of torch.distributed, NCCL's on GPUs and gloo's on a CPU; None for one rank.

    Every method is called by all ranks, in the same order, with tensors of the same shape.
    """

    rank: int = 0
    size: int = 1
    process_group: Any = None

    def sum(self, parts: Tensor) -> Tensor:
        """parts [T, D] -> the ranks' sum [T, D]; may be the same memory. parts [S, T, D], the pieces of a product over
        its depth -> [ranks, T, D], still to be added in this order, as the norm that follows does."""
        if self.size == 1:
            return parts
        if parts.dim() == 3:
            own = parts[0] if parts.shape[0] == 1 else parts.sum(0)
            return self.gathered(own)
        if self.size == 2:
            own = parts.contiguous()
            dist.all_reduce(own, group=self.process_group)
            return own
        total, *others = self.gathered(parts).unbind()
        for part in others:
            total = total + part
        return total

    def columns(self, part: Tensor) -> Tensor:
        """part [R, V / ranks] -> the ranks' columns side by side [R, V]."""
        if self.size == 1:
            return part
        return self.gathered(part).transpose(0, 1).reshape(part.shape[0], -1)

    def best(self, ids: Tensor, values: Tensor, outputs: int) -> tuple[Tensor, Tensor]:
        """Each row's best token among this rank's ``outputs`` and its logit, [R] int64 and [R] float32 -> among all
        ranks'. Two numbers a row travel. Ties go to the lowest id; a logit that is not finite stays so."""
        if self.size == 1:
            return ids, values
        # Every id and every float32 is exact in float64.
        own = torch.stack([values.double(), (ids + self.rank * outputs).double()])
        logits, tokens = self.gathered(own).unbind(1)
        best = logits.amax(0)
        last = self.size * outputs - 1
        lowest = torch.where(logits == best, tokens, float(last)).amin(0)
        return lowest.long(), best.float()

    def least(self, value: int, device: torch.device) -> int:
        """The ranks' smallest ``value``. Waits for the device."""
        if self.size == 1:
            return value
        return int(self.gathered(torch.tensor([value], device=device)).min())

    def gathered(self, part: Tensor) -> Tensor:
        """part [...] -> the ranks' parts in their order [ranks, ...]."""
        flat = part.reshape(-1)
        out = flat.new_empty(self.size * flat.shape[0])
        _gather(out, flat, self.process_group)
        return out.view(self.size, *part.shape)


ALONE = RankGroup()
"""One rank: every sum is its own."""


def _gather(out: Tensor, part: Tensor, process_group: Any) -> None:
    """torch has renamed it, and warns about the name before."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(out, part, group=process_group)
