"""Integers of a body, however many there are, and those that are too long."""

from __future__ import annotations

import pytest

from serve.api.body import MAX_NUMBER_CHARACTERS, parse_object
from serve.api.errors import ApiError


@pytest.mark.parametrize("beside", ["", "-"])
def test_integers_up_to_the_limit_are_read_and_longer_ones_refused(beside: str) -> None:
    longest = beside + "7" * (MAX_NUMBER_CHARACTERS - len(beside))
    assert parse_object(f'{{"a": [1, {longest}]}}'.encode()) == {"a": [1, int(longest)]}
    with pytest.raises(ApiError, match="digits"):
        parse_object(f'{{"a": [1, {longest}7]}}'.encode())


def test_long_digits_in_a_text_are_no_number() -> None:
    text = "9" * 100
    assert parse_object(f'{{"a": "{text}", "b": 12}}'.encode()) == {"a": text, "b": 12}
