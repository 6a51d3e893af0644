"""The fixture that the tests of eval share: a token counter that needs no model."""

from __future__ import annotations

import pytest

from tests.eval.stub_server import WordCounter


@pytest.fixture
def counter() -> WordCounter:
    return WordCounter()
