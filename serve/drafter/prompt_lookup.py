"""Drafts copied from the sequence itself: find where its last tokens stood before and propose what followed.

The idea is prompt lookup decoding (Saxena, 2023), i.e. one step of LZ77. Text that quotes its prompt, edits code or
runs in a loop is drafted well and almost for free. Every pair of neighbouring tokens is indexed by its latest place,
and each place points to the one before it, so a step costs the new tokens plus a short walk. Knows no tensors and no
model.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from serve.drafter.base import DraftRequest

MIN_MATCH = 2
"""Shortest run of tokens that counts as seen before."""

LONGEST_MATCH = 16
"""A match this long is as good as any; the search stops there."""

MAX_PLACES = 48
"""Most earlier places compared in one search, latest first."""

_CHECKED_TOKENS = 16
_BUCKETS = (10, 6, 4, 3, 2)


@dataclass(frozen=True)
class LookupDraft:
    """A copied continuation and how many tokens before it matched (0 with no tokens: nothing was found)."""

    token_ids: tuple[int, ...] = ()
    match_length: int = 0

    @property
    def source(self) -> str:
        """Name under which acceptance is tracked: long matches are kept far more often than short ones."""
        bucket = next((least for least in _BUCKETS if self.match_length >= least), 0)
        return f"lookup:{bucket}"


class _Index:
    """Places of token pairs in one growing sequence. A place is the position just after the pair."""

    def __init__(self) -> None:
        self.length = 0  # tokens seen so far
        self.first: list[int] = []
        self.last: list[int] = []
        self._latest: dict[int, int] = {}
        self._previous = array("i")  # by place: the place before it of the same pair, 0 for none

    def follows(self, tokens: Sequence[int]) -> bool:
        """Whether ``tokens`` looks like a longer (or equal) version of what is indexed: both ends are compared."""
        if len(tokens) < self.length:
            return False
        tail = list(tokens[max(0, self.length - _CHECKED_TOKENS) : self.length])
        return tail == self.last and list(tokens[: len(self.first)]) == self.first

    def extend(self, tokens: Sequence[int]) -> None:
        """Index every pair that has a token after it; the pair at the very end is what will be searched for."""
        for place in range(len(self._previous), len(tokens)):
            if place < MIN_MATCH:
                self._previous.append(0)
                continue
            pair = _pair(tokens, place)
            self._previous.append(self._latest.get(pair, 0))
            self._latest[pair] = place
        self.length = len(tokens)
        self.first = list(tokens[:_CHECKED_TOKENS])
        self.last = list(tokens[max(0, self.length - _CHECKED_TOKENS) :])

    def search(self, tokens: Sequence[int]) -> tuple[int, int]:
        """(place, match length) of the longest match of the sequence's end, the latest among equals; (0, 0) if none."""
        end = len(tokens)
        best_place, best_length = 0, 0
        if end < MIN_MATCH:
            return best_place, best_length
        place = self._latest.get(_pair(tokens, end), 0)
        for _ in range(MAX_PLACES):
            if not place or best_length >= LONGEST_MATCH:
                break
            length = MIN_MATCH
            while length < min(place, LONGEST_MATCH) and tokens[place - length - 1] == tokens[end - length - 1]:
                length += 1
            if length > best_length:
                best_place, best_length = place, length
            place = self._previous[place]
        return best_place, best_length


class PromptLookup:
    """Proposer that needs no model. Deterministic; state per request id, dropped by ``release``."""

    name = "lookup"

    def __init__(self) -> None:
        self._indexes: dict[str, _Index] = {}

    def lookup(self, request: DraftRequest) -> LookupDraft:
        """The best continuation of up to ``max_length`` tokens.

        A match close to the end is copied over itself, as in LZ77: a sequence that repeats with period p is continued
        with period p however short its tail is. A request id whose tokens are not a continuation of those seen before
        is indexed afresh.
        """
        tokens = request.token_ids
        index = self._indexes.get(request.id)
        if index is None or not index.follows(tokens):
            index = self._indexes[request.id] = _Index()
        index.extend(tokens)
        place, match_length = index.search(tokens)
        if not match_length:
            return LookupDraft()
        period = len(tokens) - place
        draft: list[int] = []
        for offset in range(request.max_length):
            draft.append(tokens[place + offset] if offset < period else draft[offset - period])
        return LookupDraft(tuple(draft), match_length)

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """Drafts of exactly ``max_length`` tokens, or empty lists where nothing matched."""
        return [list(self.lookup(request).token_ids) for request in requests]

    def release(self, request_id: str) -> None:
        """Forget a finished request; unknown ids are fine."""
        self._indexes.pop(request_id, None)


def _pair(tokens: Sequence[int], place: int) -> int:
    return tokens[place - 2] << 32 | tokens[place - 1]
