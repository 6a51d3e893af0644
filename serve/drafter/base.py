"""One interface for everything that proposes tokens.

A proposer guesses how a sequence goes on; the target's verify pass decides what is kept, so a bad guess costs time and
never text. This file knows no tensors and no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class DraftRequest:
    """One decoding sequence that wants a draft.

    token_ids: every committed token, prompt included; the last one (the anchor) has not been through the target yet.
    max_length: most tokens worth proposing (>= 1).
    page_table: the sequence's KV pages, enough for len(token_ids) - 1 + the proposer's block size positions.
    """

    id: str
    token_ids: Sequence[int]
    max_length: int
    page_table: tuple[int, ...] = ()


class Proposer(Protocol):
    """Proposes up to ``max_length`` tokens for each request; an empty list means no guess."""

    name: str

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]: ...
