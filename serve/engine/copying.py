"""In which sequences a step looks for copies: all of them, or as many as a small share of the step's time allows.

A search costs the host some tens of microseconds. On a CPU that is nothing beside a step; on a card a step of many
sequences may take no longer than searching in all of them, and finds its copies in few. This file knows no tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

SEARCH_SHARE = 0.05
"""Part of a step's time that searches may take."""
_FIRST_GUESS = 50e-6
_MEMORY = 0.9


class SearchBudget:
    """Chooses sequences by request id: first those that copied last time, then the others in turn.

    limited: whether time counts at all.
    """

    def __init__(self, limited: bool) -> None:
        self._limited = limited
        self._seconds = _FIRST_GUESS
        self._copying: set[str] = set()
        self._turn = 0

    def due(self, ids: Sequence[str], step_seconds: float) -> set[str]:
        """The sequences to search in."""
        count = max(1, int(SEARCH_SHARE * step_seconds / self._seconds))
        if not self._limited or count >= len(ids):
            return set(ids)
        chosen = [name for name in ids if name in self._copying][:count]
        others = [name for name in ids if name not in self._copying]
        start = self._turn % max(1, len(others))
        fresh = (others[start:] + others[:start])[: count - len(chosen)]
        self._turn = start + len(fresh)
        return {*chosen, *fresh}

    def took(self, searches: int, seconds: float) -> None:
        """``searches`` searches took so long together."""
        if searches:
            self._seconds = _MEMORY * self._seconds + (1 - _MEMORY) * seconds / searches

    def copies(self, name: str, copying: bool) -> None:
        """Whether a copy was worth verifying in this sequence."""
        if copying:
            self._copying.add(name)
        else:
            self._copying.discard(name)

    def release(self, name: str) -> None:
        """Forget a finished request."""
        self._copying.discard(name)
