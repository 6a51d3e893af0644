"""Which numbers of ranks a model allows, and which rows and columns each gets."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from serve.config import ServeConfig, parse_config
from serve.engine.build import StartError, build_engine, rank_device
from serve.model.config import ModelError, load_model_config
from serve.parallel.split import Split
from serve.parallel.wire import Kind, encode, receive
from tests.tiny_models import write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("split")
    write_model(folder, "llama", num_attention_heads=12, num_key_value_heads=4, hidden_size=48, head_dim=4)
    return folder


def test_ranks_cover_every_row_once_and_neighbours_share_a_head(folder: Path) -> None:
    whole = replace(load_model_config(folder), num_heads=16, num_kv_heads=4)
    for ranks in (1, 2, 4, 8, 16):
        splits = [Split(whole, rank, ranks) for rank in range(ranks)]
        for size, parts in (
            (whole.num_heads * whole.head_dim, [split.queries() for split in splits]),
            (whole.intermediate_size, [split.inner(axis=1) for split in splits]),
            (whole.vocab_size, [split.vocabulary() for split in splits]),
        ):
            if ranks > 1:
                rows = [row for part in parts if part for row in range(part.start, part.start + part.count)]
                assert rows == list(range(size))
        group = whole.num_heads // whole.num_kv_heads
        for split in splits[1:]:
            queries, keys = split.queries(), split.keys()
            assert queries is not None
            assert keys is not None
            first = queries.start // whole.head_dim // group
            assert keys.start == first * whole.head_dim
            assert split.local.num_heads % split.local.num_kv_heads == 0


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (5, "--tensor-parallel 5 does not divide num_attention_heads 12"),
        (3, "--tensor-parallel 3 does not divide vocab_size 320"),
    ],
)
def test_a_number_that_does_not_divide_is_refused_by_the_field(folder: Path, ranks: int, words: str) -> None:
    config = ServeConfig(model_dir=str(folder), tensor_parallel=ranks, threads=1)
    with pytest.raises(StartError, match=words):
        build_engine(config)


def test_kv_heads_that_do_not_go_into_the_ranks_are_refused(folder: Path) -> None:
    whole = replace(load_model_config(folder), vocab_size=300, num_kv_heads=4)
    with pytest.raises(ModelError, match="neither divides num_key_value_heads 4"):
        Split(whole, 0, 6)


def test_more_ranks_than_cards_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(StartError, match="--tensor-parallel 4: this machine has 2 CUDA devices"):
        rank_device(ServeConfig(model_dir=str(folder), tensor_parallel=4, threads=1), 0)


@pytest.mark.parametrize("number", ["0", "65"])
def test_the_option_has_limits(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_config(["--model-dir", "x", "--tensor-parallel", number], {})
    assert "--tensor-parallel must be between 1 and 64" in capsys.readouterr().err


def test_graphs_of_prompts_are_refused_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_config(["--model-dir", "x", "--tensor-parallel", "2", "--prompt-graphs"], {})
    assert "--prompt-graphs is for one card, --tensor-parallel is 2" in capsys.readouterr().err


arrays = st.lists(
    st.tuples(st.sampled_from([torch.int32, torch.int64]), st.lists(st.integers(-(2**31), 2**31 - 1), max_size=40)),
    max_size=6,
)


@given(st.sampled_from(Kind), st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5), arrays)
def test_messages_arrive_as_they_were_sent(
    kind: Kind, numbers: list[int], made: list[tuple[torch.dtype, list[int]]]
) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sent = [torch.tensor(values, dtype=dtype) for dtype, values in made]
        ours.sendall(encode(kind, numbers, sent))
        ours.close()
        message = receive(theirs)
        assert message is not None
        assert (message.kind, message.numbers) == (kind, tuple(numbers))
        assert len(message.arrays) == len(sent)
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(message.arrays, sent, strict=True))
        assert receive(theirs) is None
