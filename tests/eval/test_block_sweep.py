from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval import block_sweep
from eval.block_sweep import expected, implied_acceptance, speedups
from eval.plots import png, speedup_figure
from eval.roofline import acceptance_length


def cell(batch: int, length: int, rate: float, repeat: int = 0, tau: float | None = None) -> dict[str, object]:
    return {"batch": batch, "block_length": length, "tokens_per_second": rate, "repeat": repeat, "tau": tau}


def test_speedups_are_taken_against_plain_decoding_of_the_same_repeat() -> None:
    rows = [cell(1, 0, 10), cell(1, 3, 20), cell(1, 0, 5, 1), cell(1, 3, 12, 1), cell(8, 3, 99)]
    assert speedups(rows) == {"1": {"0": 1.0, "3": pytest.approx(2.2)}}


@given(st.floats(0.02, 0.98), st.integers(1, 15))
def test_implied_acceptance_inverts_the_closed_form(share: float, length: int) -> None:
    assert implied_acceptance(acceptance_length(share, length), length) == pytest.approx(share, abs=1e-6)


def test_expected_speedup_falls_with_the_batch_and_can_be_drawn_beside_the_measured_one() -> None:
    rows = [cell(batch, length, 10, tau=acceptance_length(0.7, length) if length else None)
            for batch in (1, 8) for length in (0, 3, 7)]  # fmt: skip
    found = expected(rows, 0.1, 0.05)
    assert found["1"]["7"] == pytest.approx(acceptance_length(0.7, 7) / (0.1 + 1.35))
    assert found["8"]["7"] < found["1"]["7"]
    assert png(speedup_figure(found, speedups(rows)), dpi=40).startswith(b"\x89PNG")


def test_an_interrupt_keeps_the_finished_cells_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = iter([SimpleNamespace(tau=None, total=10.0)])

    def one_then_interrupt(*_: object, **__: object) -> object:
        if (found := next(cells, None)) is None:
            raise KeyboardInterrupt
        return found

    def no_server(*_: object) -> object:
        return nullcontext(SimpleNamespace(url="u"))

    for name, stand_in in (("our_server", no_server), ("drive", one_then_interrupt), ("TokenizerCounter", Path)):
        monkeypatch.setattr(block_sweep, name, stand_in)
    monkeypatch.setattr(block_sweep, "requests_of", lambda *_: [])
    (tmp_path / "tokenizer.json").touch()
    assert block_sweep.main(["--model-dir", str(tmp_path), "--json", str(tmp_path / "out.json")]) == 130
    assert len(json.loads((tmp_path / "out.json").read_text())["rows"]) == 1
