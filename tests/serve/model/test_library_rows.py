"""Prefill chunks through the library: safe row counts are found by trial, and chunks are padded to them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from serve.model.library_rows import TRIED_ROWS, LibraryRows, Product, least_rows
from tests.serve.model.test_triton_layers import batch_of, load_triton
from tests.tiny_models import write_model


def split_below(threshold: int) -> Product:
    """A library that adds a row's sum in two halves where there are fewer than ``threshold`` rows."""

    def product(x: Tensor, weight: Tensor) -> Tensor:
        x, weight = x.double(), weight.double()  # exact enough that only the last step rounds
        if x.shape[0] >= threshold:
            return (x @ weight.T).float()
        half = x.shape[1] // 2
        return (x[:, :half] @ weight[:, :half].T).half().float() + (x[:, half:] @ weight[:, half:].T).half().float()

    return product


def test_the_least_count_is_where_the_library_stops_splitting_sums() -> None:
    weight = torch.randn(8, 64)
    for threshold, least in ((0, TRIED_ROWS[0]), (250, 256), (256, 256), (257, 320)):
        assert least_rows(weight, split_below(threshold)) == least
    assert least_rows(weight, split_below(1 << 20)) is not None
    assert least_rows(weight, split_below(TRIED_ROWS[-1])) is None


def test_rows_are_padded_to_the_least_count_of_their_shape() -> None:
    rows = LibraryRows({(8, 4): 32})
    x = torch.randn(5, 4)
    padded = rows.padded(x, 8)
    assert padded is not None
    assert padded.shape == (32, 4)
    assert torch.equal(padded[:5], x)
    assert not padded[5:].any()
    many = torch.randn(40, 4)
    assert rows.padded(many, 8) is many
    assert rows.padded(x, 9) is None


def test_the_last_layer_runs_for_the_wanted_rows_alone(tmp_path: Path) -> None:
    write_model(tmp_path, "llama", seed=5, num_hidden_layers=2)
    model = load_triton(tmp_path, "fp16", torch.device("cpu"))
    matrices = model.stack.dense_matrices()
    assert len(matrices) == 8
    # Every chunk goes to the library here, as on a card.
    model.stack = replace(model.stack, safe_rows=LibraryRows({(m.shape[0], m.shape[1]): 64 for m in matrices}))
    batch = batch_of([(0, 18)], torch.device("cpu"))
    cache = model.allocate_cache(9, 16)
    every = model.forward(replace(batch, logit_rows=torch.arange(18)), cache, (0, 1))
    for wanted, taps in (([], (0,)), ([17], (0,)), ([17], (0, 1))):
        other = model.allocate_cache(9, 16)
        some = model.forward(replace(batch, logit_rows=torch.tensor(wanted, dtype=torch.int64)), other, taps)
        assert torch.equal(some.logits, every.logits[wanted])
        assert all(torch.equal(a, b) for a, b in zip(cache.layers, other.layers, strict=True))
        assert some.taps is not None
        assert every.taps is not None
        assert torch.equal(some.taps, every.taps[:, : some.taps.shape[1]])
