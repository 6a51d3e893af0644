"""Steps of a real model through graphs: the bits of eager passes, whatever pads the graph and whoever is beside."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from serve.drafter.base import DraftRequest
from serve.drafter.triton_block import TritonBlockDrafter
from serve.engine.graphs import StepGraphs
from serve.engine.lanes import FIELDS, Lane
from serve.engine.runner import ModelRunner
from serve.kernels.triton import turing
from serve.kernels.triton.attention import build_plan
from serve.kernels.triton.step import WINDOW_FIELDS, prepare_rows_eager, settle_rows_eager
from serve.protocol import SamplingParams
from tests.serve.drafter.random_drafters import TARGET_LAYERS, drafter_config, random_drafter, write_drafter
from tests.serve.engine.graph_engines import triton_engine
from tests.serve.engine.test_engine import collect, ids
from tests.serve.model.test_triton_layers import batch_of, load_triton
from tests.tiny_models import write_model

PAGE = 16
GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The interpreter, with the twins of the step kernels (tests/serve/kernels compares them), or a card."""
    if request.param == "cuda":
        turing.install()
    else:
        monkeypatch.setattr("serve.engine.step_buffers.prepare_rows", prepare_rows_eager)
        monkeypatch.setattr("serve.engine.graphs.settle_rows", settle_rows_eager)
    return torch.device(request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where: Path = tmp_path_factory.mktemp("graphs")
    write_model(where, "qwen3", seed=3, num_hidden_layers=1)
    return where


def prefilled(folder: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> tuple[StepGraphs, Any]:
    """Graphs of 4 and 8 rows over a cache in which two sequences have 20 and 5 tokens."""
    monkeypatch.setattr("serve.engine.graph_sizes.ROW_BUCKETS", (4, 8))
    model = load_triton(folder, "fp16", device)
    cache = model.allocate_cache(17, PAGE)
    graphs = StepGraphs(model, cache, None, max_rows=8, max_sequences=4, max_length=128)
    graphs.capture()
    model.forward(batch_of([(0, 20), (0, 5)], device), cache)
    return graphs, model


def lanes_of(batch: Any, known: list[int]) -> list[Lane]:
    """The sequences of ``batch`` as lanes whose drafts are its tokens."""
    lanes = []
    tokens = batch.token_ids.tolist()
    for table, first, stop, start in zip(
        batch.page_tables, batch.query_starts, batch.query_starts[1:], known, strict=False
    ):
        draft = tuple(tokens[first + 1 : stop])
        lanes.append(Lane(-1, start, tokens[first], table, len(table) * PAGE, start, draft))
    return lanes


def test_rows_have_the_bits_of_an_eager_pass(
    folder: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs, model = prefilled(folder, device, monkeypatch)
    for spans in ([(20, 1), (5, 1)], [(20, 3), (5, 2)]):
        batch = batch_of(spans, device)
        with torch.inference_mode():
            want, _ = model.layers(batch, build_plan(batch, PAGE), graphs.cache)
        launch = graphs.launch(lanes_of(batch, [20, 5]))
        assert launch.rows in (4, 8)
        assert torch.equal(launch.hidden[: len(want)], want)
        assert torch.equal(graphs.logits(launch), model.forward(batch, graphs.cache).logits)
        best = model.greedy(want).tolist()
        for start, kept, lane in zip(batch.query_starts, graphs.read(launch).kept, launch.lanes, strict=False):
            assert kept is not None
            count = len(kept)
            assert kept == best[start : start + count]
            assert list(lane.draft[: count - 1]) == kept[:-1]


def test_a_chain_the_host_has_not_read_goes_on_from_the_device(
    folder: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs, _ = prefilled(folder, device, monkeypatch)
    one, two = lanes_of(batch_of([(20, 1), (5, 1)], device), [20, 5])
    expected: list[list[int]] = [[], []]
    lanes = [one, two]
    for _ in range(3):
        kept = graphs.read(graphs.launch(lanes)).kept
        for index, tokens in enumerate(kept):
            assert tokens is not None
            expected[index] += tokens
        lanes = [
            lane._replace(start=lane.start + 1, latest=lane.latest + 1, anchor=expected[index][-1])
            for index, lane in enumerate(lanes)
        ]
    first = graphs.launch([one, two])
    # The order of the lanes changes, and what the host believes of them is wrong.
    second = graphs.launch([two._replace(place=1, start=0, anchor=0, latest=9), one._replace(place=0, latest=30)])
    assert graphs.read(first).kept == [[expected[0][0]], [expected[1][0]]]
    third = graphs.launch([one._replace(place=1, start=3, anchor=1, latest=30), two._replace(place=0, latest=9)])
    assert graphs.read(second).kept == [[expected[1][1]], [expected[0][1]]]
    assert graphs.read(third).kept == [[expected[0][2]], [expected[1][2]]]


@pytest.mark.parametrize("beside_rows", [16, 0])
def test_a_drafter_inside_the_graphs_drafts_as_the_eager_one(
    tmp_path: Path, device: torch.device, beside_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve.engine.graphs.BESIDE_ROWS", beside_rows)
    write_model(tmp_path / "model", "llama", seed=5, num_hidden_layers=2)
    shape = drafter_config(block_size=3, num_hidden_layers=1, target_layer_ids=(0, 1), num_target_layers=2)
    write_drafter(tmp_path / "drafter", random_drafter(shape))
    monkeypatch.setattr("serve.engine.graph_sizes.ROW_BUCKETS", (6,))
    monkeypatch.setattr("serve.engine.graph_sizes.DRAFT_BUCKETS", (2,))
    model = load_triton(tmp_path / "model", "fp16", device)
    drafter = TritonBlockDrafter.load(tmp_path / "drafter", model)
    cache = model.allocate_cache(17, PAGE)
    drafter.allocate_cache(17, PAGE)
    graphs = StepGraphs(model, cache, drafter, max_rows=6, max_sequences=2, max_length=128)
    graphs.capture()
    runner = ModelRunner(model, cache, PAGE, drafter)
    batch = batch_of([(0, 20), (0, 5)], device)
    runner.forward_batch(batch)
    tokens = [batch.token_ids[:20].tolist(), batch.token_ids[20:].tolist()]
    lanes = lanes_of(batch_of([(20, 1), (5, 1)], device), [20, 5])
    for _ in range(2):
        requests = [
            DraftRequest(str(i), [*known, lane.anchor], 2, tuple(lane.pages))
            for i, (known, lane) in enumerate(zip(tokens, lanes, strict=True))
        ]
        want = drafter.propose(requests)
        launch = graphs.launch([lane._replace(wanted=2) for lane in lanes])
        assert graphs.buffers.drafts[:6].view(2, 3)[:, 1:].tolist() == want
        # What the graph observed is the context of the next block.
        for index, kept in enumerate(graphs.read(launch).kept):
            assert kept is not None
            tokens[index] += [lanes[index].anchor, *kept[:-1]]
            start = len(tokens[index])
            lanes[index] = lanes[index]._replace(start=start, latest=start, anchor=kept[-1])
    # Beside the last layers of a verify, or behind it, it reads the rows as it does when they have waited.
    context = drafter._pages().layers[0]
    context.zero_()
    launch = graphs.launch([lane._replace(draft=(7, 8)) for lane in lanes])
    graphs.read(launch)
    assert graphs._context is not None
    waiting = [graphs._context.waiting]
    written = context.clone()
    context.zero_()
    graphs.play_verify(6, 6, True, launch.slot.verify.packed[: 6 * FIELDS + WINDOW_FIELDS], None)
    assert [*waiting, graphs._context.waiting] == [0, 6]
    assert not context.any()
    graphs.observe_waiting()
    assert torch.equal(context, written)
    slots = [lane.pages[(lane.start + i) // PAGE] * PAGE + (lane.start + i) % PAGE for lane in lanes for i in range(3)]
    assert context.transpose(1, 3).flatten(0, 1)[slots].flatten(1).count_nonzero(1).min() > 0


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_an_engine_of_quantised_weights_writes_what_a_forward_pass_chooses(
    tmp_path: Path, device: torch.device, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = {"hidden_size": 128, "intermediate_size": 128, "tie_word_embeddings": True}
    write_model(tmp_path, "llama", seed=5, num_hidden_layers=1, **shape)
    monkeypatch.setattr("serve.engine.graph_sizes.ROW_BUCKETS", (2,))
    engine = triton_engine(tmp_path, device=device, weights=weights, max_num_seqs=1, block_length=0)
    prompt = [10, 20, 30, 40, 50]
    engine.add("a", prompt, SamplingParams(max_tokens=2, ignore_eos=True))
    got = ids(collect(engine)["a"])
    model = load_triton(tmp_path, weights, device)
    tokens = list(prompt)
    for _ in got:
        batch = batch_of([(0, len(tokens))], device)
        batch = replace(batch, token_ids=torch.tensor(tokens, device=device))
        tokens.append(int(model.forward(batch, model.allocate_cache(8, PAGE)).logits[-1].argmax()))
    assert got == tokens[len(prompt) :]
    assert len(got) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
@pytest.mark.parametrize(("weights", "kept"), [("fp16", "auto"), ("int8", "auto"), ("int4", "auto"), ("int8", "int8")])
def test_an_engine_writes_the_same_text_with_graphs_and_without(
    tmp_path: Path, device: torch.device, weights: str, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "model", "llama", seed=5, num_hidden_layers=TARGET_LAYERS)
    write_drafter(tmp_path / "drafter", random_drafter(drafter_config(block_size=4)))
    monkeypatch.setattr("serve.engine.graph_sizes.ROW_BUCKETS", (8,))
    monkeypatch.setattr("serve.engine.graph_sizes.DRAFT_BUCKETS", (2,))
    texts = []
    for graphs in (True, False):
        engine = triton_engine(
            tmp_path / "model",
            tmp_path / "drafter",
            graphs=graphs,
            device=device,
            weights=weights,
            kv_cache_dtype=kept,
            proposer="block",
            max_num_seqs=2,
        )
        engine.lookup = None
        engine.add("a", [10, 20, 30, 40, 50], GREEDY)
        engine.add("b", list(range(60, 80)), GREEDY)
        outputs = collect(engine)
        texts.append((ids(outputs["a"]), ids(outputs["b"])))
        assert engine.stats().drafts > 0
        assert engine.stats().drafter_faults == 0
    assert texts[0] == texts[1]
