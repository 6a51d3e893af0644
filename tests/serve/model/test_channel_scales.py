"""Input-channel scales leave the model what it was: the same logits without rounding, in every family and rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from serve.kernels.linear import LinearBuilder
from serve.kernels.quantize import Factors
from serve.kernels.triton.linear import TritonLinearBuilder
from serve.kernels.triton.pack import dequantize
from serve.model.batch import FlatBatch
from serve.model.channel_scales import ChannelScales, channels, read_channel_scales, scale_name
from serve.model.checkpoint import Checkpoint
from serve.model.config import ModelConfig, load_model_config
from serve.model.errors import ModelError
from serve.model.loader import Storage, load_target
from serve.model.reader import WeightReader
from serve.model.target import TargetModel, TargetSettings
from serve.model.triton_layers import skinny
from serve.model.weights_map import BESIDE, MATRICES, WeightsMap
from serve.parallel.split import Split
from tests.tiny_models import write_model

CPU = torch.device("cpu")


def random_scales(config: ModelConfig) -> ChannelScales:
    generator = torch.Generator().manual_seed(3)
    return ChannelScales(
        {
            (layer, matrix): torch.exp(torch.randn(channels(config, matrix), generator=generator))
            for layer in range(config.num_layers)
            for matrix in MATRICES
        }
    )


def batch_of_rows(count: int) -> FlatBatch:
    """One sequence from its beginning, in pages of 16."""
    positions = torch.arange(count)
    return FlatBatch(
        token_ids=positions * 37 % 300 + 4,
        positions=positions,
        slots=positions,
        visible=positions + 1,
        query_starts=(0, count),
        page_tables=(tuple(range(-(-count // 16))),),
        logit_rows=positions,
    )


def read(folder: Path, scales: ChannelScales, rank: int = 0, ranks: int = 1) -> TargetModel:
    """In float32, so that nothing is rounded to codes."""
    split = Split(load_model_config(folder), rank, ranks)
    builder = LinearBuilder("fp32", CPU)
    with Checkpoint(folder) as checkpoint:
        parts = WeightReader(checkpoint, split, builder, WeightsMap("fp32"), scales).read()
    return TargetModel(split.local, parts, TargetSettings("fp32", CPU, torch.float32))


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen2", {"num_key_value_heads": 4}),
        ("qwen3", {"tie_word_embeddings": True}),
    ],
)
def test_the_model_stays_what_it_was(tmp_path: Path, family: str, fields: dict[str, Any]) -> None:
    write_model(tmp_path, family, scale=1.0, **fields)
    plain, scaled = (read(tmp_path, scales) for scales in (ChannelScales(), random_scales(load_model_config(tmp_path))))
    for layer, other in zip(plain._parts.layers, scaled._parts.layers, strict=True):
        assert not torch.allclose(layer.input_norm, other.input_norm)
        x = torch.randn(2, layer.down.in_features)
        assert not torch.allclose(layer.down(x), other.down(x), rtol=0.1)
    batch = batch_of_rows(20)
    want, got = (model.forward(batch, model.allocate_cache(2, 16), (1,)) for model in (plain, scaled))
    assert torch.allclose(got.logits, want.logits, rtol=1e-3, atol=1e-4 * float(want.logits.abs().max()))
    assert want.taps is not None
    assert got.taps is not None
    assert torch.allclose(got.taps, want.taps, rtol=1e-3, atol=1e-4 * float(want.taps.abs().max()))


def test_ranks_scale_the_channels_they_have(tmp_path: Path) -> None:
    """Four ranks keep two K/V heads, each twice."""
    write_model(tmp_path, "llama", attention_bias=True, mlp_bias=True)
    config = load_model_config(tmp_path)
    scales = random_scales(config)
    whole = read(tmp_path, scales)._parts.layers[1]
    layers = [read(tmp_path, scales, rank, 4)._parts.layers[1] for rank in range(4)]
    x = torch.randn(3, config.hidden_size)
    gates = torch.cat([one.gate_up(x).chunk(2, 1)[0] for one in layers], 1)
    ups = torch.cat([one.gate_up(x).chunk(2, 1)[1] for one in layers], 1)
    assert torch.allclose(torch.cat((gates, ups), 1), whole.gate_up(x), rtol=1e-4, atol=1e-4)
    for name in ("output", "down"):
        width = getattr(whole, name).in_features
        x = torch.randn(3, width)
        parts = [getattr(one, name)(piece) for one, piece in zip(layers, x.chunk(4, 1), strict=True)]
        assert torch.allclose(torch.stack(parts).sum(0), getattr(whole, name)(x), rtol=1e-3, atol=1e-3)
    dim, x = config.head_dim, torch.randn(3, config.hidden_size)
    values = whole.qkv(x)[:, -2 * dim :].chunk(2, 1)
    for rank, one in enumerate(layers):
        assert torch.allclose(one.qkv(x)[:, -dim:], values[rank // 2], rtol=1e-4, atol=1e-4)


def test_slices_on_a_card_are_scaled_as_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, rows, columns = torch.randn(40, 64), torch.rand(40) + 0.5, torch.rand(64) + 0.5
    builder = TritonLinearBuilder("int8", CPU)
    want = builder.build(weight * columns * rows[:, None])
    monkeypatch.setattr("serve.kernels.triton.pack.SLICE_BYTES", 7 * 64 * 4)
    got = builder.build(weight, factors=Factors(rows, columns))
    assert torch.equal(dequantize(skinny(got).weight), dequantize(skinny(want).weight))


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"model.layers.2.qkv_proj": torch.ones(64)}, "is not model.layers.N.MATRIX with N below 2"),
        ({"model.layers.0.q_proj": torch.ones(64)}, "MATRIX one of qkv_proj"),
        ({scale_name(0, "o_proj"): torch.ones(64)}, r"\[64\], needed: floats \[32\]"),
        ({scale_name(0, "down_proj"): torch.ones(96, dtype=torch.int32)}, "needed: floats"),
        ({scale_name(0, "down_proj"): torch.zeros(96)}, "outside"),
        ({scale_name(0, "down_proj"): torch.full((96,), float("nan"))}, "outside"),
    ],
)
def test_a_wrong_file_is_refused_by_tensor(tmp_path: Path, tensors: dict[str, torch.Tensor], words: str) -> None:
    write_model(tmp_path / "model")
    save_file(tensors, tmp_path / "scales.safetensors")
    with pytest.raises(ModelError, match=words):
        read_channel_scales(tmp_path / "scales.safetensors", load_model_config(tmp_path / "model"))


def test_a_map_names_its_scales(tmp_path: Path) -> None:
    write_model(tmp_path, hidden_size=64, intermediate_size=96)
    config = load_model_config(tmp_path)
    path = tmp_path / BESIDE
    path.write_text('{"default": "int8", "scales": "s.safetensors"}')
    with pytest.raises(ModelError, match=r"s\.safetensors cannot be read"):
        load_target(tmp_path, device=CPU)
    tensors = {scale_name(*place): one for place, one in random_scales(config).by_matrix.items()}
    (tmp_path / "side").mkdir()
    save_file(tensors, tmp_path / "side" / "s.safetensors")
    path.rename(tmp_path / "side" / "map.json")
    model = load_target(tmp_path, device=CPU, storage=Storage(weights_map=tmp_path / "side" / "map.json"))
    plain = load_target(tmp_path, device=CPU, weights="int8")
    norms = [one._parts.layers[0].input_norm for one in (plain, model)]
    assert torch.allclose(norms[1] * tensors[scale_name(0, "qkv_proj")], norms[0])
    assert "channels scaled" in model.kernel_path
