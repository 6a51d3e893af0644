"""Whether a quicker kernel has the bits of its twin on this card, and what the log says where it has not. Knows no
kernels."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import torch
from torch import Tensor


def same_bits(
    log: logging.Logger, instead: str, quicker: str, outcomes: Callable[[], Iterable[tuple[Tensor, Tensor]]]
) -> bool:
    """Whether both tensors of every pair of ``outcomes`` are equal. Where they differ, or cannot be had (another Triton
    may not compile the kernel), the log says what is done ``instead``; quicker: what gives other bits, and the verb."""
    try:
        same = all(torch.equal(got, want) for got, want in outcomes())
    except Exception as error:
        log.warning("%s: %s: %s", instead, type(error).__name__, str(error)[:200])
        return False
    if not same:
        log.warning("%s: %s other bits on this card", instead, quicker)
    return same
