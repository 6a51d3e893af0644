"""The one shape in which work reaches a model: flat tokens of several sequences, over pages.

Prefill chunk, decode, verify and resume after preemption are all rows here; only their counts differ. This file knows
no scheduling and no model family.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ROW_ALIGNMENT = 16
"""Fields of rows that lie together are as wide as a multiple of this: a kernel is compiled once more for addresses that
are not aligned, which took two seconds at the first odd count of rows."""


def put(values: Tensor, device: torch.device) -> Tensor:
    """``values`` of the host on ``device``, without waiting for what the device still does."""
    return values if device.type == "cpu" else values.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True)
class FlatBatch:
    """Rows of one forward pass. T rows in all, S sequences, R rows whose logits are wanted.

    token_ids   [T] int64   input token of each row
    positions   [T] int64   absolute position of each row in its sequence (rotary position)
    slots       [T] int64   page_id * page_size + offset: where the row's K/V goes
    visible     [T] int64   how many leading positions of its sequence the row attends to (position + 1 when causal;
                            the end of the block for every row of a drafter's bidirectional block)
    query_starts            S + 1 row offsets; sequence s owns rows query_starts[s] .. query_starts[s+1]-1
    page_tables             S lists of page ids, each covering at least max(visible) positions of its sequence
    logit_rows  [R] int64   rows whose logits are computed, ascending
    ends                    max(visible) of each sequence, where the maker knows it: else it is read from the device
    host                    the four row fields [4, T] and logit_rows on the host, where the maker has them
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    visible: Tensor
    query_starts: tuple[int, ...]
    page_tables: tuple[tuple[int, ...], ...]
    logit_rows: Tensor
    ends: tuple[int, ...] = ()
    host: tuple[Tensor, Tensor] | None = None

    @property
    def num_rows(self) -> int:
        return self.query_starts[-1]
