"""Whatever the engine offers, the controller answers with lengths that fit, and never fails."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from verify.block_length import BlockLengthController, Candidate
from verify.costs import CostTable

step = st.tuples(
    st.lists(
        st.tuples(st.integers(0, 5), st.sampled_from(["block", "lookup:2", "lookup:6"]), st.integers(0, 20)), max_size=9
    ),
    st.integers(0, 40),
    st.integers(0, 20),
    st.integers(0, 30),
    st.integers(0, 16),
    st.floats(1e-4, 5.0),
    st.sampled_from([0, 0, 0, 1, 100_000]),
)


@given(st.lists(step, min_size=1, max_size=25), st.integers(1, 15), st.booleans())
@settings(max_examples=300, deadline=None)
def test_lengths_always_fit_the_offer_and_the_row_limit(steps: list, longest: int, fast: bool) -> None:  # type: ignore[type-arg]
    verify = {1: 0.010, 2: 0.011, 4: 0.013, 8: 0.02, 16: 0.04} if fast else {1: 0.05, 8: 0.01, 16: 6.0}
    controller = BlockLengthController(CostTable(verify, {1: 0.004, 4: 0.006}, copying_waits=fast), longest)
    for offered, other_rows, other_tokens, budget, kept, seconds, skipped in steps:
        controller._step += skipped  # as if so many steps had chosen without these sources
        candidates = [Candidate(str(i), source, length) for i, source, length in offered]
        sequences = len({c.id for c in candidates})
        limit = other_rows + sequences + budget
        lengths = controller.plan(candidates, other_rows, plain_tokens=min(other_tokens, other_rows), row_limit=limit)
        assert len(lengths) == len(candidates)
        assert sum(lengths) <= budget
        chosen = [c.id for c, length in zip(candidates, lengths, strict=True) if length]
        assert len(chosen) == len(set(chosen))
        for candidate, length in zip(candidates, lengths, strict=True):
            assert 0 <= length <= min(candidate.max_length, longest)
            if length:
                controller.observe(candidate.id, candidate.source, length, min(kept, length))
        blocks = sum(1 for c, length in zip(candidates, lengths, strict=True) if length and c.source == "block")
        rows = other_rows + sequences + sum(lengths)
        controller.observe_cost(
            rows=rows,
            drafted_rows=sum(lengths),
            drafted_sequences=blocks,
            verify_seconds=seconds,
            draft_seconds=seconds / 3 if blocks else 0.0,
            copies=len(chosen) > blocks,
        )
        controller.again()
        assert all(map(math.isfinite, (*controller._stakes.values(), controller.costs.copying_seconds)))
        if kept == 3 and candidates:
            controller.release(candidates[0].id)
