"""Every optimisation can be switched off from the command line, and the answer stays the same."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from drafter_train.head import write_head_tokens
from serve.config import parse_config
from serve.engine.build import build_engine
from serve.protocol import SamplingParams
from tests.serve.drafter.random_drafters import drafter_config, random_drafter, write_drafter
from tests.tiny_models import write_model

PROMPT = [5, 6, 7, 8, 5, 6, 7, 8, 5, 6, 7]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("switches")
    write_model(folder / "model", num_hidden_layers=5)
    write_drafter(folder / "drafter", random_drafter(drafter_config()))
    return folder / "model", folder / "drafter"


def base(pair: tuple[Path, Path]) -> list[str]:
    """Arguments of every server here."""
    folders = ["--model-dir", str(pair[0]), "--drafter-dir", str(pair[1])]
    return [*folders, "--weights", "fp32", "--threads", "1", "--kv-memory-mib", "8"]


def answer(pair: tuple[Path, Path], *arguments: str) -> tuple[str, tuple[int, ...]]:
    """What proposes, and the tokens of one greedy answer."""
    engine, facts = build_engine(parse_config([*base(pair), *arguments], {}))
    engine.add("a", PROMPT, SamplingParams(max_tokens=12, temperature=0.0))
    tokens: list[int] = []
    while engine.has_work:
        for output in engine.step():
            tokens += output.token_ids
    return str(facts["proposer"]), tuple(tokens)


def test_lookup_and_drafter_can_be_switched_off_each_on_its_own(pair: tuple[Path, Path]) -> None:
    full, tokens = answer(pair)
    assert full == "lookup+block"
    assert len(tokens) == 12
    assert answer(pair, "--no-lookup") == ("block", tokens)
    assert answer(pair, "--proposer", "lookup") == ("lookup", tokens)
    assert answer(pair, "--proposer", "none") == ("none", tokens)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--block-length", "7"],
        ["--no-prefix-cache"],
        ["--max-num-seqs", "1"],
        ["--max-batch-tokens", "512"],
    ],
)
def test_other_switches_change_no_token(pair: tuple[Path, Path], arguments: list[str]) -> None:
    assert answer(pair, *arguments)[1] == answer(pair)[1]


def test_switches_that_contradict_each_other_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_config(["--model-dir", "m", "--proposer", "lookup", "--no-lookup"], {})
    assert "--proposer lookup and --no-lookup contradict each other" in capsys.readouterr().err


def test_frequent_tokens_can_be_switched_off(pair: tuple[Path, Path], tmp_path: Path) -> None:
    model, plain = pair
    shutil.copytree(plain, tmp_path / "drafter")
    write_head_tokens(tmp_path / "drafter", np.arange(0, 320, 2))
    listed = model, tmp_path / "drafter"
    fixed = ("--no-lookup", "--block-length", "5")
    assert answer(listed, *fixed) == answer(listed, *fixed, "--no-frequent-tokens") == answer(pair, *fixed)
    told = [
        str(build_engine(parse_config([*base(listed), *switch], {}))[1]["drafter"])
        for switch in ([], ["--no-frequent-tokens"])
    ]
    assert ["head of 160 tokens" in line for line in told] == [True, False]
