"""Whether the C layers can be trusted on this host: a small random model against its eager twin, and row by row.

A compiler is the host's own, so what it made is tried before it serves. Knows no files.
"""

from __future__ import annotations

import torch
from torch import Tensor

from serve.kernels.linear import Linear, LinearBuilder
from serve.kernels.native.build import NativeUnavailable, build
from serve.kernels.native.ops import NativeLibrary
from serve.kernels.native.pack import quantize_grouped
from serve.model.batch import FlatBatch
from serve.model.config import ModelConfig
from serve.model.native_layers import NativeTargetModel
from serve.model.rope import RopeConfig
from serve.model.target import DecoderLayer, TargetModel, TargetSettings, TargetWeights

_ROWS, _PAGE = 37, 16
_TOLERANCE = 1e-3  # of the largest logit; rounding activations to 16 bits moves it by 1e-4
_CONFIG = ModelConfig(
    family="qwen3",
    hidden_size=96,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=32,
    intermediate_size=160,
    vocab_size=101,
    rms_norm_eps=1e-6,
    rope=RopeConfig(),
    max_position_embeddings=64,
    tie_word_embeddings=False,
    qkv_bias=True,
    output_bias=True,
    mlp_bias=True,
    qk_norm=True,
    eos_token_ids=(0,),
    bos_token_id=None,
    dtype="float32",
)


def checked_library() -> NativeLibrary:
    """The C layers compiled, loaded and tried on this host. Raises NativeUnavailable with the reason."""
    library = NativeLibrary(build())
    for weight_format in ("int4", "int8"):
        _check_format(library, weight_format)
    return library


def _check_format(library: NativeLibrary, weight_format: str) -> None:
    settings = TargetSettings(weight_format, torch.device("cpu"), torch.float32)
    weights, meant = _random_weights(library, weight_format)
    native = NativeTargetModel(_CONFIG, weights, library, settings)
    eager = TargetModel(_CONFIG, meant, settings)
    pages = -(-_ROWS // _PAGE)
    table, other = tuple(range(pages)), tuple(range(2 * pages - 1, pages - 1, -1))
    want = _rows(eager, [(0, _ROWS, table)])
    got = _rows(native, [(0, _ROWS, table)])
    error = float((got - want).abs().max() / want.abs().max())
    if not error <= _TOLERANCE:
        raise NativeUnavailable(f"the compiled layers differ from torch's by {error:.1e} of the largest value")
    apart = torch.cat([_rows(native, [(0, 17, other)]), _rows(native, [(0, _ROWS, table), (0, _ROWS, other)])[-20:]])
    if not torch.equal(apart, got):
        raise NativeUnavailable("the compiled layers give a row other bits in another batch")


def _random_weights(library: NativeLibrary, weight_format: str) -> tuple[TargetWeights, TargetWeights]:
    """A model packed for the C layers, and the matrices its codes stand for, in float32, for torch."""
    generator = torch.Generator().manual_seed(0)
    hidden, inner, dim = _CONFIG.hidden_size, _CONFIG.intermediate_size, _CONFIG.head_dim
    q, kv = _CONFIG.num_heads * dim, _CONFIG.num_kv_heads * dim
    device = torch.device("cpu")
    builder = LinearBuilder(weight_format, device, library)
    plain = LinearBuilder("fp32", device)
    bits = {"int4": 4, "int8": 8}[weight_format]

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def linear(rows: int, columns: int, has_bias: bool = True) -> tuple[Linear, Linear]:
        weight, bias = random(rows, columns) * columns**-0.5, random(rows) if has_bias else None
        return builder.build(weight, bias), plain.build(quantize_grouped(weight, bits).dequantize(), bias)

    layers: list[tuple[DecoderLayer, DecoderLayer]] = []
    for _ in range(_CONFIG.num_layers):
        qkv, output = linear(q + 2 * kv, hidden), linear(hidden, q)
        gate_up, down = linear(2 * inner, hidden), linear(hidden, inner)
        norms = random(hidden), random(hidden), random((q + kv) // dim, dim)
        packed, meant = (
            DecoderLayer(norms[0], qkv[i], norms[2], output[i], norms[1], gate_up[i], down[i]) for i in (0, 1)
        )
        layers.append((packed, meant))
    head, table, norm = linear(_CONFIG.vocab_size, hidden, False), random(_CONFIG.vocab_size, hidden), random(hidden)
    first, second = zip(*layers, strict=True)
    return TargetWeights(table, first, norm, head[0]), TargetWeights(table, second, norm, head[1])


def _rows(model: TargetModel, spans: list[tuple[int, int, tuple[int, ...]]]) -> Tensor:
    """Logits and taps of each span (start, stop, page table) of one sequence, in a fresh cache."""
    positions = torch.cat([torch.arange(start, stop) for start, stop, _ in spans])
    slots = [table[p // _PAGE] * _PAGE + p % _PAGE for start, stop, table in spans for p in range(start, stop)]
    starts = [0]
    for start, stop, _ in spans:
        starts.append(starts[-1] + stop - start)
    batch = FlatBatch(
        token_ids=positions * 7 % _CONFIG.vocab_size,
        positions=positions,
        slots=torch.tensor(slots),
        visible=positions + 1,
        query_starts=tuple(starts),
        page_tables=tuple(table for _, _, table in spans),
        logit_rows=torch.arange(len(positions)),
    )
    cache = model.allocate_cache(1 + max(max(table) for _, _, table in spans), _PAGE)
    output = model.forward(batch, cache, taps=range(_CONFIG.num_layers))
    assert output.taps is not None
    return torch.cat((output.logits, output.taps), 1)
