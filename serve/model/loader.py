"""From a model folder to a TargetModel: reads one layer at a time, checks every tensor, packs it for its kernel.

Knows the tensor names of the families; knows no forward pass.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch import Tensor

from serve.kernels import triton
from serve.kernels.builder import choose_kernels
from serve.kernels.elementwise import interleave_halves
from serve.kernels.linear import LinearBuilder
from serve.kernels.native.build import NativeUnavailable
from serve.kernels.native.ops import NativeLibrary
from serve.kernels.native.pack import GROUP, is_exact
from serve.model.checkpoint import Checkpoint
from serve.model.config import ModelConfig, load_model_config
from serve.model.errors import ModelError
from serve.model.native_check import checked_library
from serve.model.native_layers import NativeTargetModel
from serve.model.target import DecoderLayer, TargetModel, TargetSettings, TargetWeights
from serve.parallel.group import ALONE, RankGroup
from serve.parallel.split import Part, Split

log = logging.getLogger(__name__)

# No 16-bit formats on a CPU: their rounded sums hide from the start-up trial that a row depends on its batch.
_FORMATS = {"cpu": ("fp32", "int8", "int4"), "cuda": ("fp16", "bf16", "fp32", "int8", "int4")}
# Four bits in the head cost far more agreement with float32 than its bytes save: on the default model 86 % of greedy
# tokens agree with a 4-bit head, 98 % with an 8-bit one.
_HEAD_FORMATS = {"int4": "int8"}
_UNUSED_SUFFIXES = (".rotary_emb.inv_freq",)  # saved by old transformers; follows from config.json


def load_target(
    model_dir: Path, *, device: torch.device, weights: str, int8_kv: bool = False, group: RankGroup = ALONE
) -> TargetModel:
    """Loads the model in ``model_dir``, or of its matrices a rank's part; ``weights`` is a format of this device or
    ``auto``; int8_kv: K/V in int8, which the Triton kernels serve. Raises ModelError naming the field, file or tensor
    at fault."""
    model_dir = Path(model_dir)
    split = Split(load_model_config(model_dir), group.rank, group.size)
    config = split.whole
    native = _native_library() if device.type == "cpu" else None
    weights = _resolve_weights(weights, device, config, model_dir, native)
    try:
        kernels = choose_kernels(weights, device, native)
    except ValueError as error:
        raise ModelError(str(error)) from error
    if int8_kv and not kernels.triton:
        raise ModelError(
            "an int8 K/V cache needs the Triton kernels of a CUDA card, in a 16-bit or integer weight format"
        )
    with Checkpoint(model_dir) as checkpoint:
        parts = _read(checkpoint, split, kernels.builder)
        _refuse_extra(checkpoint, config)
    settings = TargetSettings(weights, device, kernels.activation_dtype, kernels.builder.describe(), int8_kv, group)
    config = split.local
    if kernels.triton:
        from serve.model.triton_layers import TritonTargetModel

        return TritonTargetModel(config, parts, settings)
    # The C layers run all of a pass in one call; ranks have to add up in between, so torch runs their layers.
    if native is not None and weights != "fp32" and group.size == 1:
        try:
            return NativeTargetModel(config, parts, native, settings)
        except NativeUnavailable as reason:
            log.info("torch runs the layers, not native code: %s", reason)
    return TargetModel(config, parts, settings)


def _native_library() -> NativeLibrary | None:
    try:
        return checked_library()
    except NativeUnavailable as reason:
        log.info("torch runs the layers, not native code: %s", reason)
        return None


def _resolve_weights(
    weights: str, device: torch.device, config: ModelConfig, model_dir: Path, native: NativeLibrary | None
) -> str:
    """The format ``auto`` stands for, or the given one. Raises ModelError when this device does not serve it.

    On CUDA auto is the checkpoint's 16-bit dtype, but int8 on Turing. On a CPU it is int4, but int8 where
    the C layers run a model whose weights were not 4-bit at their source: four bits would cost agreement with it.
    """
    formats = _FORMATS.get(device.type)
    if formats is None:
        raise ModelError(f"device {device.type!r} is not served; known: {', '.join(_FORMATS)}")
    if weights == "auto":
        if device.type == "cpu":
            return "int4" if native is None or _were_four_bits(model_dir, config) else "int8"
        return _auto_on_cuda(device, config)
    if weights not in formats:
        raise ModelError(f"weights {weights!r} are not served on {device.type}; choose from {', '.join(formats)}")
    return weights


def _auto_on_cuda(device: torch.device, config: ModelConfig) -> str:
    """Turing has some 300 GB/s of memory and no bf16: int8 halves what a step reads, where the kernels for it work."""
    if torch.cuda.get_device_capability(device)[0] < 8:
        return "int8" if triton.self_test(device).ok else "fp16"
    return "fp16" if config.dtype == "float16" else "bf16"


def _were_four_bits(model_dir: Path, config: ModelConfig) -> bool:
    """Whether 4-bit codes stand for the checkpoint's very weights; one matrix is taken for all."""
    shape = (config.hidden_size, config.intermediate_size)
    with Checkpoint(model_dir) as checkpoint:
        weight = checkpoint.take("model.layers.0.mlp.down_proj.weight", shape)
        return config.intermediate_size % GROUP == 0 and is_exact(weight, 4)


def _read(checkpoint: Checkpoint, split: Split, builder: LinearBuilder) -> TargetWeights:
    config, rows = split.whole, split.vocabulary()
    table = (config.vocab_size, config.hidden_size)
    embedding = checkpoint.take("model.embed_tokens.weight", table)
    layers = tuple(_read_layer(checkpoint, split, builder, index) for index in range(config.num_layers))
    norm = checkpoint.take("model.norm.weight", (config.hidden_size,))
    if not config.tie_word_embeddings:
        head = checkpoint.take("lm_head.weight", table, rows)
    else:
        head = embedding if rows is None else embedding[rows.start : rows.start + rows.count]
    # A rank's head has a part of the rows, and any row may be looked up.
    shared = config.tie_word_embeddings and builder.gives_rows and rows is None
    return TargetWeights(
        # A clone: the map of the file goes away with the checkpoint.
        embedding=None if shared else embedding.clone().to(builder.device),
        layers=layers,
        final_norm=_vector(norm, builder),
        head=builder.build(head, weights=_HEAD_FORMATS.get(builder.weights)),
    )


def _read_layer(checkpoint: Checkpoint, split: Split, builder: LinearBuilder, index: int) -> DecoderLayer:
    config = split.whole
    prefix = f"model.layers.{index}."
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_rows, kv_rows = config.num_heads * dim, config.num_kv_heads * dim

    def weight(name: str, *shape: int, part: Part | None = None) -> Tensor:
        return checkpoint.take(f"{prefix}{name}.weight", shape, part)

    def bias(name: str, wanted: bool, rows: int, part: Part | None = None) -> Tensor | None:
        return checkpoint.take(f"{prefix}{name}.bias", (rows,), part) if wanted else None

    def summed(name: str, wanted: bool) -> Tensor | None:
        vector = bias(name, wanted, hidden)
        return vector if split.rank == 0 else None  # the sum over ranks has it once

    def packed(
        names: tuple[tuple[str, int, Part | None], ...], wanted: bool, turned: tuple[str, ...] = ()
    ) -> tuple[Tensor, Tensor | None]:
        weights: list[Tensor] = []
        biases: list[Tensor] = []
        for name, rows, own in names:
            found = ((weights, weight(name, rows, hidden, part=own)), (biases, bias(name, wanted, rows, own)))
            for store, part in found:
                if part is not None:
                    store.append(interleave_halves(part, dim) if name in turned else part)
        return torch.cat(weights), torch.cat(biases) if biases else None

    keys, width = split.keys(), split.inner()
    attention = (
        ("self_attn.q_proj", q_rows, split.queries()),
        ("self_attn.k_proj", kv_rows, keys),
        ("self_attn.v_proj", kv_rows, keys),
    )
    qk_norm = None
    if config.qk_norm:
        parts = [
            interleave_halves(weight(f"self_attn.{name}_norm", dim), dim).expand(heads, dim)
            for name, heads in (("q", split.local.num_heads), ("k", split.local.num_kv_heads))
        ]
        qk_norm = _vector(torch.cat(parts), builder)
    return DecoderLayer(
        input_norm=_vector(weight("input_layernorm", hidden), builder),
        qkv=builder.build(*packed(attention, config.qkv_bias, ("self_attn.q_proj", "self_attn.k_proj"))),
        qk_norm=qk_norm,
        output=builder.build(
            weight("self_attn.o_proj", hidden, q_rows, part=split.queries(axis=1)),
            summed("self_attn.o_proj", config.output_bias),
        ),
        mlp_norm=_vector(weight("post_attention_layernorm", hidden), builder),
        gate_up=builder.build(
            *packed((("mlp.gate_proj", inner, width), ("mlp.up_proj", inner, width)), config.mlp_bias)
        ),
        down=builder.build(
            weight("mlp.down_proj", hidden, inner, part=split.inner(axis=1)), summed("mlp.down_proj", config.mlp_bias)
        ),
    )


def _vector(tensor: Tensor, builder: LinearBuilder) -> Tensor:
    return tensor.clone().to(builder.device, torch.float32)


def _refuse_extra(checkpoint: Checkpoint, config: ModelConfig) -> None:
    extra = [name for name in checkpoint.untaken() if not name.endswith(_UNUSED_SUFFIXES)]
    if config.tie_word_embeddings:
        extra = [name for name in extra if name != "lm_head.weight"]
    if extra:
        raise ModelError(
            f"tensor {extra[0]} ({len(extra)} in all) is in the weights, but {config.family} has no place for it"
        )
