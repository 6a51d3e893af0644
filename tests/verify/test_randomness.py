"""The counter-based generator: published test vectors, uniformity, no correlation between neighbours."""

from __future__ import annotations

from itertools import pairwise

import pytest

from verify.randomness import philox4x32, uniform


# Known answers published with the authors' reference implementation (Random123, kat_vectors).
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_published_test_vectors(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, int, int, int]
) -> None:
    assert philox4x32(counter, key) == expected


def chi_square(values: list[float], bins: int) -> float:
    counts = [0] * bins
    for value in values:
        counts[int(value * bins)] += 1
    expected = len(values) / bins
    return sum((count - expected) ** 2 / expected for count in counts)


def test_uniform_along_positions_and_along_seeds() -> None:
    # 63 degrees of freedom: 99.9 % of true uniforms stay below 103.4
    assert chi_square([uniform(1234, position) for position in range(6400)], 64) < 103.4
    assert chi_square([uniform(seed, 77) for seed in range(6400)], 64) < 103.4


def test_neighbouring_positions_are_independent() -> None:
    numbers = [uniform(99, position) for position in range(12801)]
    pairs = [(int(a * 8) * 8 + int(b * 8) + 0.5) / 64 for a, b in pairwise(numbers)]
    assert chi_square(pairs, 64) < 103.4


def test_every_part_of_the_key_matters() -> None:
    base = uniform(5, 10)
    others = [
        uniform(6, 10),
        uniform(5, 11),
        uniform(5, 10, purpose=1),
        uniform(5 + (1 << 40), 10),
        uniform(5, 1 << 33),
    ]
    assert len({base, *others}) == 6
    assert uniform(5, 10) == base
    assert 0.0 <= uniform(2**63 - 1, 2**40) < 1.0
