"""Per-request speculation figures under vLLM's names (response root, ``metrics.speculative_decoding``).

It knows how many tokens each round drafted and kept; it does not know what drafted them.
"""

from __future__ import annotations

from typing import Any


def speculation_metrics(final: dict[str, Any] | None, block_length_max: int) -> dict[str, Any] | None:
    """Figures of one finished sequence from ``final["speculation"]``; None when it had no round with a draft.

    Rounds of block length 0 are plain decoding and are not counted. ``acceptance_histogram[i]`` counts rounds that kept
    i drafted tokens; ``mean_acceptance_length`` includes the target's own token of each round.
    """
    record = (final or {}).get("speculation") or {}
    rounds = [(d, a) for d, a in zip(record.get("drafted", ()), record.get("accepted", ()), strict=True) if d > 0]
    if not rounds:
        return None
    drafted, accepted = sum(d for d, _ in rounds), sum(a for _, a in rounds)
    longest = max(block_length_max, *(d for d, _ in rounds))
    histogram = [0] * (longest + 1)
    by_length: dict[int, list[int]] = {}
    for draft, kept in rounds:
        histogram[kept] += 1
        by_length.setdefault(draft, [0] * (draft + 1))[kept] += 1
    return {
        "mean_acceptance_length": 1 + accepted / len(rounds),
        "draft_acceptance_rate": accepted / drafted,
        "acceptance_histogram": histogram,
        "acceptance_histogram_by_draft_length": {str(length): by_length[length] for length in sorted(by_length)},
        "num_spec_steps": len(rounds),
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": longest,
    }
