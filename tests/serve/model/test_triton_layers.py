"""The Triton forward against the eager one on tiny models of each family, and a decoded row's bits beside prefill
chunks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from serve.kernels import triton as kernels
from serve.kernels.kv_cache import KVCache
from serve.kernels.triton import turing
from serve.kernels.triton.attention import build_plan
from serve.kernels.triton.linear import TritonLinear, TritonLinearBuilder
from serve.kernels.triton.pack import dequantize
from serve.model import loader
from serve.model.batch import FlatBatch
from serve.model.checkpoint import Checkpoint
from serve.model.config import load_model_config
from serve.model.errors import ModelError
from serve.model.loader import load_target
from serve.model.reader import WeightReader
from serve.model.target import TargetModel, TargetSettings
from serve.model.triton_layers import TritonTargetModel, skinny
from serve.model.weights_map import WeightsMap
from serve.parallel.split import Split
from tests.tiny_models import write_model

PAGE = 16
CPU = torch.device("cpu")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The interpreter, or a card."""
    if request.param == "cuda":
        turing.install()
    return torch.device(request.param)


def load_triton(
    folder: Path, weights: str, device: torch.device, int8_kv: bool = False, *, blocks: bool = True
) -> TritonTargetModel:
    """What load_target makes on a card, on any device."""
    config = load_model_config(folder)
    builder = TritonLinearBuilder(weights, device, blocks=blocks)
    with Checkpoint(folder) as checkpoint:
        parts = WeightReader(checkpoint, Split(config), builder, WeightsMap(weights)).read()
    settings = TargetSettings(weights, device, builder.activation_dtype, builder.describe(), int8_kv)
    return TritonTargetModel(config, parts, settings)


def batch_of(spans: list[tuple[int, int]], device: torch.device) -> FlatBatch:
    """spans: (context, rows) of each sequence; sequence s owns pages 8 s .. 8 s + 7 and has its own tokens."""
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts = [0]
    tables: list[tuple[int, ...]] = []
    for sequence, (context, rows) in enumerate(spans):
        tables.append(tuple(range(8 * sequence, 8 * sequence + 8)))
        for position in range(context, context + rows):
            ids.append((position * 37 + sequence * 11) % 300 + 4)
            positions.append(position)
            slots.append(8 * sequence * PAGE + position)
        starts.append(starts[-1] + rows)
    where = torch.tensor(positions, device=device)
    return FlatBatch(
        token_ids=torch.tensor(ids, device=device),
        positions=where,
        slots=torch.tensor(slots, device=device),
        visible=where + 1,
        query_starts=tuple(starts),
        page_tables=tuple(tables),
        logit_rows=torch.arange(len(ids), device=device),
    )


def run(model: TargetModel, cache: KVCache, spans: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    out = model.forward(batch_of(spans, model.device), cache, (0, model.config.num_layers - 1))
    assert out.taps is not None
    return out.logits, out.taps


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    where: Path = tmp_path_factory.mktemp(f"triton-{request.param}")
    write_model(where, request.param)
    return where


def relative(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


def test_forward_matches_the_eager_model(folder: Path, device: torch.device) -> None:
    eager = load_target(folder, device=device, weights="fp32")
    model = load_triton(folder, "fp16", device)
    caches = eager.allocate_cache(32, PAGE), model.allocate_cache(32, PAGE)
    for spans in ([(0, 20), (0, 3)], [(20, 1), (3, 4)], [(21, 2), (7, 1), (0, 17)]):
        want, wanted_taps = run(eager, caches[0], spans)
        logits, taps = run(model, caches[1], spans)
        assert logits.dtype == taps.dtype == torch.float32
        assert relative(logits, want) < 0.01
        assert relative(taps, wanted_taps) < 0.01
    for got, want in zip(caches[1].layers, caches[0].layers, strict=True):
        assert relative(got.float(), want) < 0.01


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # exp(-gate) is infinity here, and right
@pytest.mark.parametrize(("scale", "error"), [(300.0, 0.03), (1e4, float("inf"))])
def test_float16_stays_finite_with_large_activations(
    tmp_path: Path, scale: float, error: float, device: torch.device
) -> None:
    """At 300 silu(gate) * up is far beyond float16 and yet right; at 1e4 even the normed row is at its end."""
    write_model(tmp_path, "qwen3", num_hidden_layers=1)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in tensors:
        if "post_attention_layernorm" in name:
            tensors[name] = tensors[name] * scale
        if "down_proj" in name:
            tensors[name] = tensors[name] / scale**2
    save_file(tensors, tmp_path / "model.safetensors")
    eager = load_target(tmp_path, device=device, weights="fp32")
    model = load_triton(tmp_path, "fp16", device)
    for spans in ([(0, 6)], [(0, 70), (0, 70)]):
        want, wanted_taps = run(eager, eager.allocate_cache(16, PAGE), spans)
        got, taps = run(model, model.allocate_cache(16, PAGE), spans)
        assert torch.isfinite(got).all()
        assert torch.isfinite(taps).all()
        assert relative(got, want) < error
        assert relative(taps, wanted_taps) < error


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_quantised_forward_is_near_the_eager_model(tmp_path: Path, weights: str, device: torch.device) -> None:
    write_model(tmp_path, "llama", hidden_size=128, intermediate_size=192, scale=1.0)
    eager = load_target(tmp_path, device=device, weights="fp32")
    model = load_triton(tmp_path, weights, device)
    want, _ = run(eager, eager.allocate_cache(8, PAGE), [(0, 6)])
    got, _ = run(model, model.allocate_cache(8, PAGE), [(0, 6)])
    assert relative(got, want) < {"int8": 0.05, "int4": 0.3}[weights]


def test_k_and_v_in_codes_stay_near_the_eager_model(tmp_path: Path, device: torch.device) -> None:
    write_model(tmp_path, "qwen3", num_hidden_layers=1)
    eager = load_target(tmp_path, device=device, weights="fp32")
    model = load_triton(tmp_path, "fp16", device, int8_kv=True)
    caches = eager.allocate_cache(32, PAGE), model.allocate_cache(32, PAGE)
    assert caches[1].layers[0].dtype == torch.int8
    head = model.config.head_dim
    assert model.kv_bytes_per_page(PAGE) * head * 4 == eager.kv_bytes_per_page(PAGE) * (head + 4)
    for spans in ([(0, 20), (0, 3)], [(20, 1), (3, 4)]):
        want, _ = run(eager, caches[0], spans)
        got, _ = run(model, caches[1], spans)
        assert relative(got, want) < 0.03


def test_codes_for_k_and_v_are_refused_without_the_kernels(tmp_path: Path) -> None:
    write_model(tmp_path, "llama", num_hidden_layers=1)
    with pytest.raises(ModelError, match="needs the Triton kernels"):
        load_target(tmp_path, device=CPU, weights="fp32", int8_kv=True)


@pytest.mark.parametrize("weights", ["fp16", "int8", "int4"])
def test_tied_tables_are_held_once(tmp_path: Path, weights: str, device: torch.device) -> None:
    write_model(tmp_path, "llama", hidden_size=128, num_hidden_layers=1, tie_word_embeddings=True)
    model = load_triton(tmp_path, weights, device)
    assert model.config.tie_word_embeddings
    assert model._parts.embedding is None
    ids = torch.tensor([7, 3, 7], device=device)
    head = skinny(model._parts.head).weight
    assert head.weight_format == ("dense" if weights == "fp16" else "int8")
    assert torch.equal(model.embed(ids), dequantize(head)[ids])


def test_a_decoded_row_has_the_same_bits_beside_a_prefill_chunk(tmp_path: Path, device: torch.device) -> None:
    write_model(tmp_path, "qwen3", num_hidden_layers=1)
    model = load_triton(tmp_path, "fp16", device)
    results = []
    for spans in ([(12, 2)], [(12, 2), (0, 20)], [(12, 2), (0, 3), (0, 70)]):
        cache = model.allocate_cache(32, PAGE)
        run(model, cache, [(0, 12)])
        results.append(run(model, cache, spans))
    for logits, taps in results[1:]:
        assert torch.equal(logits[:2], results[0][0])
        assert torch.equal(taps[:2], results[0][1])


def test_greedy_tokens_are_those_of_the_logits(tmp_path: Path, device: torch.device) -> None:
    write_model(tmp_path, "llama", num_hidden_layers=1)
    model = load_triton(tmp_path, "fp16", device)
    cache = model.allocate_cache(8, PAGE)
    batch = batch_of([(0, 6)], device)
    logits = model.forward(batch, cache).logits
    hidden, _ = model.layers(batch, build_plan(batch, PAGE), cache)
    assert torch.equal(model.greedy(hidden), logits.argmax(1))


@pytest.mark.gpu
def test_a_card_with_working_kernels_gets_the_triton_forward(tmp_path: Path) -> None:
    write_model(tmp_path, "llama")
    model = load_target(tmp_path, device=torch.device("cuda"), weights="fp16")
    assert isinstance(model, TritonTargetModel)
    assert "triton" in model.kernel_path


@pytest.mark.parametrize(
    ("card", "working", "dtype", "weights"),
    [
        ((7, 5), True, "bfloat16", "int8"),
        ((7, 5), False, "bfloat16", "fp16"),
        ((8, 0), True, "bfloat16", "bf16"),
        ((9, 0), True, "float16", "fp16"),
    ],
)
def test_auto_weights_follow_the_card(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    card: tuple[int, int],
    working: bool,
    dtype: str,
    weights: str,
) -> None:
    write_model(tmp_path, "llama")
    config = replace(load_model_config(tmp_path), dtype=dtype)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: card)
    monkeypatch.setattr(kernels, "self_test", lambda device: turing.SelfTest(working, ""))
    assert loader._resolve_weights("auto", torch.device("cuda"), config, tmp_path, None) == weights


def test_integer_products_that_are_wrong_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = TritonLinearBuilder("int4", CPU)
    builder.check()
    monkeypatch.setattr("serve.kernels.triton.linear.dequantize", lambda packed: -dequantize(packed))
    with pytest.raises(ValueError, match="int8 products of 5 rows are off by"):
        builder.check()


def test_shapes_without_four_bit_groups_fall_to_int8() -> None:
    builder = TritonLinearBuilder("int4", CPU)
    assert builder.build(torch.randn(32, 96)).skinny.weight.weight_format == "int8"
    assert builder.build(torch.randn(32, 128)).skinny.weight.weight_format == "int4_halves"
    assert builder.build(torch.randn(32, 256)).skinny.weight.weight_format == "int4"
    assert builder.describe() == "triton int8, triton int4 g64"


def test_a_triton_linear_is_a_linear() -> None:
    linear = TritonLinearBuilder("fp16", CPU).build(torch.eye(64)[:40] * 2, torch.ones(40))
    assert isinstance(linear, TritonLinear)
    assert (linear.in_features, linear.out_features, linear.nbytes) == (64, 40, 40 * 64 * 2)
    x = torch.randn(3, 64)
    assert torch.allclose(linear(x), 2 * x[:, :40].half().float() + 1, atol=1e-5)


def test_weights_of_another_kind_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path, "llama")
    eager = load_target(tmp_path, device=CPU, weights="fp32")
    with pytest.raises(TypeError, match="need TritonLinear"):
        TritonTargetModel(eager.config, eager._parts, TargetSettings("fp32", CPU, torch.float16))
