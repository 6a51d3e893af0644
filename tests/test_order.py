"""The table of long and related test files: every entry names files there are."""

from __future__ import annotations

from tests import order
from tests.conftest import ROOT


def test_every_entry_names_a_file_and_related_files_stay_together() -> None:
    files = [str(path.relative_to(ROOT / "tests")) for path in (ROOT / "tests").rglob("test_*.py")]
    assert order.unknown(files) == []
    assert len({order.group(f"tests/{file}::test_x") for file in files if file.startswith("page/")}) == 1
    assert order.group("tests/serve/test_tokenizer.py::test_x[a::b]") == "serve/test_tokenizer.py"
    assert order.place("tests/e2e/test_default_model.py::test_x") < order.place("tests/serve/test_tokenizer.py::test_x")
