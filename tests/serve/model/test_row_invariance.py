"""A row's logits and taps keep every bit whatever else is in the batch: the rule that lossless verification needs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from serve.kernels.kv_cache import KVCache
from serve.model.loader import load_target
from serve.model.target import TargetModel
from tests.serve.model.random_models import Span, flat_batch, random_ids, write_random_model

LENGTH = 90
PAGES = 40
IDS = random_ids(LENGTH)
OTHERS = [random_ids(LENGTH, seed=seed) for seed in (1, 2, 3)]
TABLE = (7, 3, 20, 1, 30, 11)
OTHER_TABLES = [tuple(range(12, 18)), (2, 4, 6, 8, 10, 0), tuple(range(39, 33, -1))]


@pytest.fixture(scope="module", params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=["fp32", "int8", "int4"])
def model(request: pytest.FixtureRequest, threads: int, tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    """An MLP width that fills no vector, and heads with and without a GQA group of two."""
    folder = tmp_path_factory.mktemp("random")
    write_random_model(folder, "qwen3", head_dim=16, intermediate_size=168, num_key_value_heads=2)
    return load_target(folder, device=torch.device("cpu"), weights=request.param)


def run(model: TargetModel, cache: KVCache, spans: list[Span]) -> list[Tensor]:
    """Logits and taps side by side, for each span."""
    output = model.forward(flat_batch(spans), cache, taps=(0, 1))
    assert output.taps is not None
    both = torch.cat((output.logits, output.taps), 1)
    return list(torch.split(both, [span.stop - span.start for span in spans]))


@pytest.fixture(scope="module")
def whole(model: TargetModel) -> Tensor:
    """The sequence in one chunk, alone, in pages of its own: what every other way must repeat."""
    return run(model, model.allocate_cache(PAGES, 16), [Span(IDS, 0, LENGTH, TABLE)])[0]


def test_token_by_token_equals_one_chunk(model: TargetModel, whole: Tensor) -> None:
    cache = model.allocate_cache(PAGES, 16)
    rows = [run(model, cache, [Span(IDS, i, i + 1, OTHER_TABLES[0])])[0] for i in range(LENGTH)]
    assert torch.equal(torch.cat(rows), whole)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8, 16, 17, 33, 64])
def test_chunks_of_any_size_equal_one_chunk(size: int, model: TargetModel, whole: Tensor) -> None:
    cache = model.allocate_cache(PAGES, 16)
    starts = range(0, LENGTH, size)
    rows = [run(model, cache, [Span(IDS, i, min(i + size, LENGTH), TABLE)])[0] for i in starts]
    assert torch.equal(torch.cat(rows), whole)


def test_a_verified_block_equals_single_steps_even_after_a_rejected_draft(model: TargetModel, whole: Tensor) -> None:
    cache = model.allocate_cache(PAGES, 16)
    run(model, cache, [Span(IDS, 0, 40, TABLE)])
    wrong = IDS.clone()
    wrong[43:] = (wrong[43:] + 1) % 190
    draft = run(model, cache, [Span(wrong, 40, 48, TABLE)])[0]
    assert torch.equal(draft[:3], whole[40:43])
    assert not torch.equal(draft[3], whole[43])
    assert torch.equal(run(model, cache, [Span(IDS, 43, 50, TABLE)])[0], whole[43:50])


def test_unwritten_and_stale_pages_do_not_show(model: TargetModel, whole: Tensor) -> None:
    cache = model.allocate_cache(PAGES, 16)
    for layer in cache.layers:
        layer.fill_(1e30)
    assert torch.equal(run(model, cache, [Span(IDS, 0, LENGTH, TABLE)])[0], whole)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_batch_mates_never_change_a_row(data: st.DataObject, model: TargetModel, whole: Tensor) -> None:
    cache = model.allocate_cache(PAGES, 16)
    spans = []
    start = data.draw(st.integers(0, LENGTH - 1), "start")
    if start:
        run(model, cache, [Span(IDS, 0, start, TABLE)])
    mine = Span(IDS, start, data.draw(st.integers(start + 1, LENGTH), "stop"), TABLE)
    for ids, table in zip(OTHERS, OTHER_TABLES, strict=True):
        if data.draw(st.booleans(), "has mate"):
            first = data.draw(st.integers(0, LENGTH - 1), "mate start")
            if first:
                run(model, cache, [Span(ids, 0, first, table)])
            spans.append(Span(ids, first, data.draw(st.integers(first + 1, LENGTH), "mate stop"), table))
    place = data.draw(st.integers(0, len(spans)), "place")
    spans.insert(place, mine)
    assert torch.equal(run(model, cache, spans)[place], whole[mine.start : mine.stop])


@pytest.mark.model
@pytest.mark.parametrize("weights", ["fp32", "int8", "int4"])
def test_default_model_blocks_equal_single_steps(weights: str, default_model_dir: Path) -> None:
    model = load_target(default_model_dir, device=torch.device("cpu"), weights=weights)
    ids = torch.randint(10, 49000, (150,), generator=torch.Generator().manual_seed(0))
    cache = model.allocate_cache(12, 32)
    table, mate = (5, 1, 9, 0, 7), (2, 3, 4, 6, 8)

    def rows(*spans: Span) -> Tensor:
        return model.forward(flat_batch(spans, 32), cache, taps=(0, 29)).logits

    chunk = rows(Span(ids, 0, 150, table))
    rows(Span(ids, 0, 130, mate))
    singles = torch.cat([rows(Span(ids, i, i + 1, mate)) for i in range(130, 150)])
    assert torch.equal(singles, chunk[130:])
    block = rows(Span(ids, 0, 20, mate), Span(ids, 134, 142, table))
    assert torch.equal(block[20:], chunk[134:142])
    assert torch.equal(block[:20], chunk[:20])
