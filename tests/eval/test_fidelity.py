"""Fidelity is zero for the reference itself, grows as bits go, and says why a format did not run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eval.fidelity import compare, continue_text, main, next_token_logs
from serve.model.loader import load_target
from tests.tiny_models import write_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where: Path = tmp_path_factory.mktemp("fidelity")
    write_model(where, "llama", hidden_size=128, intermediate_size=192)
    return where


def test_the_reference_agrees_with_itself_and_coarser_weights_less(folder: Path) -> None:
    reference = load_target(folder, device=CPU, weights="fp32")
    text = continue_text(reference, [5, 6, 7], 12)
    assert len(text.ids) == 15
    assert text.question == 3
    want = next_token_logs(reference, text)
    assert want.shape == (12, reference.config.vocab_size)
    assert want.argmax(1).tolist() == list(text.ids[3:])
    same = compare("fp32", "", [want], [want])
    assert (same.positions, same.agreement, same.kl) == (12, 1.0, 0.0)
    divergences = []
    for weights in ("int8", "int4"):
        got = next_token_logs(load_target(folder, device=CPU, weights=weights), text)
        divergences.append(compare(weights, "", [want], [got]).kl)
    assert 0 < divergences[0] < divergences[1]


def test_a_known_divergence() -> None:
    want = torch.tensor([[0.5, 0.5]]).log()
    got = torch.tensor([[0.25, 0.75]]).log()
    found = compare("x", "", [want], [got])
    assert found.kl == pytest.approx(0.5 * torch.tensor(4 / 3).log().item())
    assert found.agreement == 0.0


def test_bad_options_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, words in (
        (["--questions", "0"], "--questions must be"),
        (["--tokens", "0"], "--tokens must be"),
        (["--model", str(folder / "none")], "none"),
    ):
        with pytest.raises(SystemExit):
            main(options)
        assert words in capsys.readouterr().err
