"""Uniform numbers that depend on a key and a counter and on nothing else.

The counter-based generator Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3",
SC 2011) in plain integers: token t of a request is drawn with the number at (seed, absolute position of t), so neither
the batch, nor the block length, nor what was drafted before can move a draw. This file knows no tokens and no tensors.
"""

from __future__ import annotations

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

PURPOSE_TOKEN = 0
"""Third counter word for the draw that picks a token; other uses take other words, so streams never overlap."""


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Four 32-bit words for a 128-bit counter and a 64-bit key, all given as 32-bit words, lowest first."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        low_product = _MULTIPLIERS[0] * c0
        high_product = _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (high_product >> 32) ^ c1 ^ k0,
            high_product & _MASK,
            (low_product >> 32) ^ c3 ^ k1,
            low_product & _MASK,
        )
        k0 = (k0 + _KEY_STEPS[0]) & _MASK
        k1 = (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, position: int, purpose: int = PURPOSE_TOKEN) -> float:
    """A number in [0, 1) with 53 random bits, keyed by the low 64 bits of ``seed`` and of ``position``."""
    words = philox4x32(
        (position & _MASK, (position >> 32) & _MASK, purpose & _MASK, 0),
        (seed & _MASK, (seed >> 32) & _MASK),
    )
    return float(((words[0] << 32) | words[1]) >> 11) * 2.0**-53
