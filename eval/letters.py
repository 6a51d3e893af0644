"""How multiple-choice answers fall on letters, and how much of two servers' agreement that alone would bring.

Lists of letters in, figures out; it knows no questions and no server. Kappa is Cohen's (1960).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

BIASED_SHARE = 0.5
"""A set of which one letter makes up more than this says little."""


@dataclass(frozen=True)
class Letters:
    """How answers fall on letters, and what of the agreement that explains.

    ``constant``: what a server would reach that always says the reference's commonest letter. ``kappa``: agreement
    beyond what two servers with these letters reach by chance (Cohen), None where chance explains all. ``balanced``:
    mean over the reference's letters of the share that the server repeated. ``accuracy_p``: probability that guessing
    with the reference's letters gets as many right answers as it has (its questions shuffled).
    """

    reference: dict[str, int]
    served: dict[str, int]
    right: dict[str, int]
    constant: float
    kappa: float | None
    balanced: float
    reference_correct: int
    accuracy_p: float

    @property
    def biased(self) -> bool:
        return self.constant > BIASED_SHARE

    def lines(self) -> list[str]:
        def row(counts: dict[str, int]) -> str:
            return " ".join(f"{letter}:{count}" for letter, count in counts.items())

        beyond = "undefined (one letter only)" if self.kappa is None else f"{self.kappa:.3f}"
        asked = sum(self.reference.values())
        text = [
            f"letters: reference {row(self.reference)} | served {row(self.served)} | right {row(self.right)}",
            f"beyond letters: kappa {beyond}, balanced agreement {self.balanced:.2%}; a server that always says the "
            f"commonest letter would agree with {self.constant:.1%}",
            f"the reference itself is right in {self.reference_correct}/{asked}; guessing with its letters does as "
            f"well with probability {self.accuracy_p:.2g}",
        ]
        if self.biased:
            text.append(f"WARNING: letter bias: over {BIASED_SHARE:.0%} of the set is one letter, so agreement says "
                        "little of the model; build the set with --rotate")  # fmt: skip
        if self.accuracy_p > 0.01:
            text.append("WARNING: the reference does not answer better than its letters by chance: agreement shows "
                        "equal habits, not equal knowledge")  # fmt: skip
        return text


def letters_of(expected: Sequence[str], given: Sequence[str], truth: Sequence[str], draws: int = 2000) -> Letters:
    """The figures of ``Letters`` from the reference's letters, the server's ("-" where it gave none) and the right
    ones, question by question."""
    size = len(expected)
    reference, served, right = (_counted(column) for column in (expected, given, truth))
    agreed = sum(a == b for a, b in zip(expected, given, strict=True)) / size
    by_chance = sum(count * served.get(letter, 0) for letter, count in reference.items()) / size**2
    repeated = [
        sum(answer == letter for answer, want in zip(given, expected, strict=True) if want == letter) / count
        for letter, count in reference.items()
    ]
    correct = sum(a == b for a, b in zip(expected, truth, strict=True))
    rng = random.Random(0)
    lucky = sum(
        sum(a == b for a, b in zip(rng.sample(expected, size), truth, strict=True)) >= correct for _ in range(draws)
    )
    return Letters(
        reference=reference,
        served=served,
        right=right,
        constant=max(reference.values()) / size,
        kappa=(agreed - by_chance) / (1 - by_chance) if by_chance < 1 else None,
        balanced=sum(repeated) / len(repeated),
        reference_correct=correct,
        accuracy_p=(lucky + 1) / (draws + 1),
    )


def _counted(column: Sequence[str]) -> dict[str, int]:
    return {letter: column.count(letter) for letter in sorted(set(column))}
