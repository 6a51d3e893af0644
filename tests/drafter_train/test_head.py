"""The list of frequent tokens: counted over answers, special tokens in it whatever they count, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter_train.head import covered, frequent_tokens, main, token_counts
from drafter_train.tokens import TokenStore
from serve.drafter.head import read_head_tokens
from serve.tokenizer import load_tokenizer
from tests.drafter_train.tiny_runs import write_run
from tests.serve.drafter.random_drafters import drafter_config, random_drafter, write_drafter


@given(st.data())
def test_no_token_left_out_is_more_frequent_than_one_kept(data: st.DataObject) -> None:
    counts = np.array(data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=40)))
    always = data.draw(st.sets(st.integers(0, len(counts) - 1)))
    size = data.draw(st.integers(max(1, len(always)), 50))
    kept = frequent_tokens(counts, size, always)
    assert len(kept) == min(size, len(counts))
    assert (np.diff(kept) > 0).all()
    assert always <= set(kept.tolist())
    chosen, left = sorted(set(kept.tolist()) - always), sorted(set(range(len(counts))) - set(kept.tolist()))
    assert not chosen or not left or counts[chosen].min() >= counts[left].max()


def test_special_tokens_must_fit() -> None:
    with pytest.raises(ValueError, match="2 tokens do not hold the 3 special ones"):
        frequent_tokens(np.ones(9, dtype=np.int64), 2, {0, 1, 2})
    with pytest.raises(ValueError, match="ids below 9, got 9"):
        frequent_tokens(np.ones(9, dtype=np.int64), 5, {9})


def test_the_command_writes_what_the_server_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_run(tmp_path)
    drafter = write_drafter(tmp_path / "drafter", random_drafter(drafter_config()))
    before = {path.name: path.read_bytes() for path in drafter.iterdir()}
    assert main(["--config", str(recipe), "--drafter", str(drafter), "--size", "64"]) == 0
    assert {path.name: path.read_bytes() for path in drafter.iterdir() if path.is_file()} == before
    ids = read_head_tokens(drafter, 320)
    assert ids is not None
    assert len(ids) == 64
    tokenizer = load_tokenizer(tmp_path / "target")
    assert tokenizer.special_ids | tokenizer.end_token_ids <= set(ids.tolist())
    counts = token_counts(TokenStore(tmp_path / "tokens-23"))
    assert f"cover {covered(counts, ids.numpy()):.2%}" in capsys.readouterr().err


def test_a_folder_that_is_no_drafter_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_run(tmp_path)
    for arguments, said in (
        (["--drafter", str(tmp_path)], "no config.json"),
        (["--drafter", "x", "--size", "0"], "1 or"),
    ):
        with pytest.raises(SystemExit):
            main(["--config", str(recipe), *arguments])
        assert said in capsys.readouterr().err
