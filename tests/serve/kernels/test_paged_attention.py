"""Paged attention against the plain formula, over head layouts, ragged batches, blocks and page placement."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from serve.kernels.attention import PagedAttention, tried
from serve.kernels.attention_plan import AttentionShape
from serve.kernels.kv_cache import KVCache, write_kv, write_rows
from serve.model.batch import FlatBatch

PAGES = 60


@dataclass
class Sequence:
    """K/V of a whole sequence [length, kv_heads, head_dim] each, its pages, and the query rows of this step."""

    keys: Tensor
    values: Tensor
    table: tuple[int, ...]
    queries: Tensor  # [rows, heads, head_dim]
    visible: list[int]


def make(shape: AttentionShape, spans: list[tuple[int, list[int]]], seed: int = 0) -> tuple[list[Sequence], Tensor]:
    """spans: (length, visible of each query row) a sequence. Pages are dealt out in random order."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(PAGES, generator=generator).tolist()
    cache = KVCache(1, PAGES, shape.page_size, shape.kv_heads, shape.head_dim)
    layer = cache.layers[0].fill_(1e20)
    sequences = []
    for length, visible in spans:
        need = -(-length // shape.page_size)
        table, order = tuple(order[:need]), order[need:]
        keys, values = torch.randn(2, length, shape.kv_heads, shape.head_dim, generator=generator).unbind(0)
        slots = torch.tensor(
            [table[i // shape.page_size] * shape.page_size + i % shape.page_size for i in range(length)]
        )
        write_kv(layer, write_rows(slots, shape.kv_heads, shape.page_size), torch.stack((keys, values), 1).flatten(1))
        queries = torch.randn(len(visible), shape.heads, shape.head_dim, generator=generator)
        sequences.append(Sequence(keys, values, table, queries, visible))
    return sequences, layer


def attend(shape: AttentionShape, sequences: list[Sequence], layer: Tensor) -> list[Tensor]:
    attention = PagedAttention(shape)
    counts = [len(sequence.visible) for sequence in sequences]
    visible = torch.tensor([seen for sequence in sequences for seen in sequence.visible])
    starts = tuple(sum(counts[:i]) for i in range(len(counts) + 1))
    tables = tuple(sequence.table for sequence in sequences)
    batch = FlatBatch(visible, visible, visible - 1, visible, starts, tables, visible[:0])
    queries = torch.cat([sequence.queries for sequence in sequences]).flatten(1)
    wide = torch.cat((queries, torch.zeros(len(queries), 8)), 1)[:, :-8]  # rows are strided, as in a packed projection
    return list(torch.split(attention(wide, layer, attention.plan(batch)), counts))


def plain(shape: AttentionShape, sequence: Sequence) -> Tensor:
    rows = []
    for query, seen in zip(sequence.queries, sequence.visible, strict=True):
        keys = sequence.keys[:seen].repeat_interleave(shape.group, 1)
        values = sequence.values[:seen].repeat_interleave(shape.group, 1)
        weights = torch.softmax(torch.einsum("hd,lhd->hl", query, keys) * shape.scale, -1)
        rows.append(torch.einsum("hl,lhd->hd", weights, values).flatten())
    return torch.stack(rows)


SHAPES = {
    "grouped": AttentionShape(6, 2, 16, 16),
    "one query head a kv head": AttentionShape(2, 2, 24, 32),
    "one kv head": AttentionShape(4, 1, 8, 16),
    "default model": AttentionShape(9, 3, 64, 32),
}


@pytest.mark.parametrize("name", SHAPES)
def test_ragged_batch_equals_the_plain_formula(name: str) -> None:
    shape = tried(SHAPES[name])
    spans = [(1, [1]), (100, [100]), (40, list(range(31, 41))), (70, list(range(1, 71))), (33, [32, 33]), (250, [250])]
    sequences, layer = make(shape, spans)
    for got, sequence in zip(attend(shape, sequences, layer), sequences, strict=True):
        torch.testing.assert_close(got, plain(shape, sequence), atol=2e-5, rtol=1e-4)


def test_rows_of_a_block_see_each_other_both_ways() -> None:
    shape = tried(SHAPES["grouped"])
    sequences, layer = make(shape, [(48, [48] * 16), (21, [21] * 5)])
    for got, sequence in zip(attend(shape, sequences, layer), sequences, strict=True):
        torch.testing.assert_close(got, plain(shape, sequence), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("fixed", [False, True])
def test_bits_do_not_depend_on_the_batch(name: str, fixed: bool) -> None:
    shape = replace(SHAPES[name], row_floor=16, fixed_rows=True) if fixed else tried(SHAPES[name])
    spans = [(90, list(range(1, 91))), (200, [200]), (17, [16, 17]), (65, list(range(50, 66)))]
    sequences, layer = make(shape, spans)
    together = attend(shape, sequences, layer)
    for rows, sequence in zip(together, sequences, strict=True):
        for row in range(len(rows)):
            alone = replace_rows(sequence, row, row + 1)
            assert torch.equal(attend(shape, [alone], layer)[0][0], rows[row]), row
    turned = attend(shape, sequences[::-1], layer)[::-1]
    assert all(torch.equal(one, other) for one, other in zip(together, turned, strict=True))


def replace_rows(sequence: Sequence, start: int, stop: int) -> Sequence:
    return replace(sequence, queries=sequence.queries[start:stop], visible=sequence.visible[start:stop])


TRIED = tried(SHAPES["grouped"])
"""On another processor it is another."""


@settings(max_examples=30, deadline=None)
@given(data=st.data(), seed=st.integers(0, 1000))
def test_any_ragged_batch_is_right_and_bit_stable(data: st.DataObject, seed: int) -> None:
    shape = TRIED
    lengths = data.draw(st.lists(st.integers(1, 150), min_size=1, max_size=5))
    spans = []
    for length in lengths:
        rows = data.draw(st.integers(1, min(length, 40)))
        spans.append((length, list(range(length - rows + 1, length + 1))))
    sequences, layer = make(shape, spans, seed)
    for got, sequence in zip(attend(shape, sequences, layer), sequences, strict=True):
        torch.testing.assert_close(got, plain(shape, sequence), atol=2e-5, rtol=1e-4)
        assert torch.equal(attend(shape, [replace_rows(sequence, len(got) - 1, len(got))], layer)[0][0], got[-1])


@pytest.mark.parametrize("page_size", [16, 32, 48])
def test_masked_pages_at_the_end_leave_the_bits(page_size: int) -> None:
    """A row in a group with a far longer sequence, up to many pages of padding."""
    shape = tried(AttentionShape(2, 1, 16, page_size))
    sequences, layer = make(shape, [(page_size + 3, [page_size + 3]), (16 * page_size, [16 * page_size])])
    together = attend(shape, sequences, layer)
    for sequence, rows in zip(sequences, together, strict=True):
        assert torch.equal(attend(shape, [sequence], layer)[0], rows)


def test_a_short_page_table_is_refused() -> None:
    shape = SHAPES["grouped"]
    sequences, layer = make(shape, [(40, [40])])
    sequences[0].table = sequences[0].table[:2]
    with pytest.raises(ValueError, match="attends to 3 pages but its page table has 2"):
        attend(shape, sequences, layer)


def test_a_cache_of_odd_pages_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 16, got 24"):
        KVCache(1, 4, 24, 1, 8)
    with pytest.raises(ValueError, match="at least one page, got 0"):
        KVCache(1, 0, 16, 1, 8)
