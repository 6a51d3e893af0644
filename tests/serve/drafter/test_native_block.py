"""The drafter in C against the drafter in torch over the same matrices: context, blocks, drafts, and who is served.

In C a drafter's activations have 8 bits, so that its states are near the specification's and not equal to it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from serve.drafter.base import DraftRequest
from serve.drafter.block import BlockDrafter
from serve.drafter.native_block import NativeBlockDrafter
from serve.engine.prepare import drafter_class
from serve.model.batch import FlatBatch
from serve.model.loader import load_target
from serve.model.target import TargetModel
from tests.serve.drafter.random_drafters import drafter_config, random_drafter, write_drafter
from tests.tiny_models import write_model

PAGE = 16
TABLE = (5, 11, 8, 2)
IDS = torch.randint(4, 320, (60,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture
def target(tmp_path: Path) -> TargetModel:
    write_model(tmp_path / "target", "qwen3", num_hidden_layers=5)
    return load_target(tmp_path / "target", device=torch.device("cpu"), weights="int8")


def folder(tmp_path: Path, inner: int = 96) -> Path:
    return write_drafter(tmp_path / "drafter", random_drafter(drafter_config(intermediate_size=inner)))


def span(start: int, stop: int) -> FlatBatch:
    positions = torch.arange(start, stop)
    slots = torch.tensor([TABLE[p // PAGE] * PAGE + p % PAGE for p in range(start, stop)])
    rows = stop - start
    return FlatBatch(
        torch.tensor(IDS[start:stop]), positions, slots, positions + 1, (0, rows), (TABLE,), torch.tensor([rows - 1])
    )


def test_context_blocks_and_drafts_are_those_of_the_torch_layers(target: TargetModel, tmp_path: Path) -> None:
    made = drafter_class(target).load(folder(tmp_path), target)
    spec = BlockDrafter.load(tmp_path / "drafter", target)
    assert isinstance(made, NativeBlockDrafter) == (target.native is not None)
    cache = target.allocate_cache(12, PAGE)
    for drafter in (made, spec):
        drafter.allocate_cache(12, PAGE)
    agreed = 0
    for start, stop in ((0, 21), (21, 22), (22, 30), (30, 47)):
        batch = span(start, stop)
        taps = target.forward(batch, cache, made.taps).taps
        assert taps is not None
        for drafter in (made, spec):
            drafter.observe(batch, taps)
        request = [DraftRequest("x", IDS[: stop + 1], made.block_size - 1, TABLE)]
        blocks, _ = made._blocks(request)
        want = spec.forward(blocks)
        got = made.forward(blocks)
        assert float((got - want).norm() / want.norm()) <= 0.03
        agreed += int((made.best(got) == spec.best(want)).sum())
        assert len(made.propose(request)[0]) == len(spec.propose(request)[0])
    assert agreed >= 0.8 * 4 * made.block_size


def test_sizes_that_c_does_not_serve_stay_in_torch(target: TargetModel, tmp_path: Path) -> None:
    drafter = drafter_class(target).load(folder(tmp_path, inner=72), target)
    drafter.allocate_cache(12, PAGE)
    batch = span(0, 20)
    taps = target.forward(batch, target.allocate_cache(12, PAGE), drafter.taps).taps
    assert taps is not None
    drafter.observe(batch, taps)
    assert len(drafter.propose([DraftRequest("x", IDS[:21], 3, TABLE)])[0]) == 3


def test_rows_that_wait_are_read_in_order_and_the_last_for_a_place_counts(
    target: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row by row, with a rejected draft in between whose places are written again, equals one long prefill."""
    monkeypatch.setattr("serve.drafter.native_block.WAITING_ROWS", 32)
    cache = target.allocate_cache(12, PAGE)
    batch = span(0, 44)
    patient = drafter_class(target).load(folder(tmp_path), target)
    prompt = drafter_class(target).load(tmp_path / "drafter", target)
    taps = target.forward(batch, cache, patient.taps).taps
    assert taps is not None
    for drafter in (patient, prompt):
        drafter.allocate_cache(12, PAGE)
    patient.observe(span(0, 3), taps[:3])
    patient.observe(span(3, 9), torch.randn(6, taps.shape[1], generator=torch.Generator().manual_seed(2)))
    for start in range(3, 44):
        patient.observe(span(start, start + 1), taps[start : start + 1])
    prompt.observe(batch, taps)
    blocks, _ = patient._blocks([DraftRequest("x", IDS[:45], patient.block_size - 1, TABLE)])
    assert torch.equal(patient.forward(blocks), prompt.forward(blocks))
