"""Fidelity is zero for the reference itself, grows as bits go, and says why a format did not run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eval.fidelity import Choice, choices, compare, continue_text, main, next_token_logs
from serve.model.errors import ModelError
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


def test_the_cards_formats_on_a_cpu(folder: Path) -> None:
    """int8 is nearer than int4, prompts in 8 bits cost a little more, and gated rows in one byte more still."""
    reference = load_target(folder, device=CPU, weights="fp32")
    text = continue_text(reference, [5, 6, 7], 30)
    want = next_token_logs(reference, text)
    found = {}
    for one in choices(["int8", "int4-g32"], True, None, ["w8a8", "fp8"]):
        model = one.load(folder, CPU)
        found[one.label] = compare(one.label, "", [want], [next_token_logs(model, text, one.prompt_tokens(text))]).kl
    assert 0 < found["int8"] < found["int4-g32"]
    assert found["int8"] < found["int8, w8a8 all"] < found["int8, w8a8 all, gated rows in int8"]
    assert found["int8"] < found["int8, fp8 all, gated rows in 16 bits"] < found["int8, fp8 all"]
    assert found["int4-g32, w8a8 all"] == found["int4-g32"], "only matrices with a scale a row go there"
    with pytest.raises(ModelError, match="'int3' is none of"):
        Choice("int3", card=True).load(folder, CPU)


def test_the_cards_options_need_the_card(capsys: pytest.CaptureFixture[str]) -> None:
    for options, words in (
        (["--w8a8"], "need --card"),
        (["--fp8"], "need --card"),
        (["--card", "--device", "cuda"], "--card is for a CPU"),
    ):
        with pytest.raises(SystemExit):
            main(options)
        assert words in capsys.readouterr().err
