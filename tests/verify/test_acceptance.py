"""The longest matching prefix plus the target's own token, one by one and as tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verify.acceptance import accept, accept_lengths


def test_accept_keeps_the_prefix_and_the_targets_token() -> None:
    assert accept([], [7]) == [7]
    assert accept([1, 2, 3], [1, 2, 3, 4]) == [1, 2, 3, 4]
    assert accept([1, 9, 3], [1, 2, 3, 4]) == [1, 2]
    assert accept([9, 2], [1, 2, 3]) == [1]
    assert accept([1, 9, 3], [1, 2]) == [1, 2]  # the target's list may end at the disagreement


def test_too_few_target_tokens_are_an_error() -> None:
    with pytest.raises(ValueError, match="do not decide"):
        accept([1, 2], [1, 2])
    with pytest.raises(ValueError, match="do not decide"):
        accept([], [])


@given(
    st.integers(0, 6).flatmap(
        lambda k: st.lists(
            st.tuples(
                st.lists(st.integers(0, 2), min_size=k, max_size=k),
                st.lists(st.integers(0, 2), min_size=k + 1, max_size=k + 1),
                st.integers(0, k),
            ),
            min_size=1,
            max_size=5,
        )
    )
)
def test_the_tensor_form_is_the_same_rule(cases: list[tuple[list[int], list[int], int]]) -> None:
    width = len(cases[0][0])
    draft = torch.tensor([d for d, _, _ in cases], dtype=torch.int64).reshape(len(cases), width)
    sampled = torch.tensor([s for _, s, _ in cases], dtype=torch.int64)
    got = accept_lengths(draft, sampled, torch.tensor([n for _, _, n in cases]))
    assert got.dtype == torch.int64
    for row, (d, s, n) in enumerate(cases):
        assert s[: int(got[row]) + 1] == accept(d[:n], s[: n + 1])
