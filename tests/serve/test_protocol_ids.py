"""Token ids on their way to the engine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.protocol import pack_ids, unpack_ids


@given(st.lists(st.integers(0, 2**31 - 1), max_size=50))
def test_packed_ids_come_back(ids: list[int]) -> None:
    assert unpack_ids(pack_ids(ids)).tolist() == ids


def test_packed_ids_are_little_endian_whatever_the_machine() -> None:
    assert pack_ids([1, 258]) == "AQAAAAIBAAA="


def test_an_id_too_large_for_its_place_is_refused() -> None:
    with pytest.raises(OverflowError):
        pack_ids([2**31])


@pytest.mark.parametrize("text", ["?", "AQAA"])
def test_what_is_no_list_of_ids_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"base64|multiple"):
        unpack_ids(text)
