"""Reads a model's matrices and vectors from a checkpoint, one layer at a time, each checked and packed for its kernel.

Knows the tensor names of the families, which matrices are stored as one, and where input-channel scales go; no forward
pass and no devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from serve.kernels.elementwise import interleave_halves
from serve.kernels.linear import Linear, LinearBuilder
from serve.kernels.quantize import Factors
from serve.model.channel_scales import NO_SCALES, ChannelScales, per_query_head, with_ones
from serve.model.checkpoint import Checkpoint
from serve.model.config import ModelConfig
from serve.model.errors import ModelError
from serve.model.packed_cache import PackedCache
from serve.model.target import DecoderLayer, TargetWeights
from serve.model.weights_map import HEAD, MATRICES, WeightsMap
from serve.parallel.split import Part, Split

_UNUSED_SUFFIXES = (".rotary_emb.inv_freq",)  # saved by old transformers; follows from config.json
_HEAD_TENSOR = "lm_head.weight"


@dataclass(frozen=True)
class _Piece:
    """One tensor of the checkpoint, in whole or the part of a rank; turned: its rows are to lie in rotary pairs."""

    name: str
    shape: tuple[int, int]
    part: Part | None
    turned: bool = False


@dataclass(frozen=True)
class WeightReader:
    """cache: packed matrices to take instead of the checkpoint's."""

    checkpoint: Checkpoint
    split: Split
    builder: LinearBuilder
    plan: WeightsMap
    scales: ChannelScales = NO_SCALES
    cache: PackedCache | None = None

    def read(self) -> TargetWeights:
        """The whole model. Raises ModelError for a tensor that is missing, misshapen or has no place, and CacheFault
        for a damaged cache."""
        config, rows = self.split.whole, self.split.vocabulary()
        table = (config.vocab_size, config.hidden_size)
        tied = config.tie_word_embeddings
        # A rank's head has a part of the rows, and any row may be looked up.
        shared = tied and self.builder.gives_rows and rows is None
        embedding = None if shared and self.cache is not None else self._take("model.embed_tokens.weight", table)
        if tied and embedding is not None:
            self._check_tied(embedding)
        layers = tuple(self._layer(index) for index in range(config.num_layers))
        norm = self._take("model.norm.weight", (config.hidden_size,))
        name = "model.embed_tokens" if tied else "lm_head"
        weights = TargetWeights(
            # A clone: the map of the file goes away with the checkpoint.
            embedding=None if shared or embedding is None else embedding.clone().to(self.builder.device),
            layers=layers,
            final_norm=self._vector(norm),
            head=self._matrix(HEAD, self.plan.head_format, [_Piece(name, table, rows)]),
        )
        self._refuse_extra(config)
        return weights

    def _layer(self, index: int) -> DecoderLayer:
        config, split = self.split.whole, self.split
        prefix = f"model.layers.{index}."
        hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
        q_rows, kv_rows = config.num_heads * dim, config.num_kv_heads * dim

        def norm(name: str, divided: Tensor | None) -> Tensor:
            weight = self._take(f"{prefix}{name}.weight", (hidden,))
            return self._vector(weight if divided is None else weight.float() / divided)

        def matrix(key: str, pieces: Sequence[_Piece], bias: Tensor | None, factors: Factors) -> Linear:
            named = [_Piece(prefix + one.name, one.shape, one.part, one.turned) for one in pieces]
            return self._matrix(f"{prefix}{key}", self.plan.layer(index, key), named, bias, factors)

        def biases(wanted: bool, *parts: tuple[str, int, Part | None, bool]) -> Tensor | None:
            if not wanted:
                return None
            found = [(self._take(f"{prefix}{name}.bias", (rows,), own), turned) for name, rows, own, turned in parts]
            return torch.cat([interleave_halves(bias, dim) if turned else bias for bias, turned in found])

        def summed(name: str, wanted: bool) -> Tensor | None:
            vector = biases(wanted, (name, hidden, None, False))
            return vector if split.rank == 0 else None  # the sum over ranks has it once

        reads, values, mlp, gated = (self.scales.get(index, name) for name in MATRICES)
        queries, keys, width = split.queries(), split.keys(), split.inner()
        mixed = None if values is None else _part(per_query_head(values, config), queries)
        values, gated = _part(values, keys), _part(gated, width)
        attention = [
            ("self_attn.q_proj", q_rows, queries, True),
            ("self_attn.k_proj", kv_rows, keys, True),
            ("self_attn.v_proj", kv_rows, keys, False),
        ]
        local = split.local
        turned_rows = (local.num_heads + local.num_kv_heads) * dim
        qkv = Factors(None if values is None else with_ones(turned_rows, values), reads)
        gate_up = Factors(None if gated is None else with_ones(local.intermediate_size, gated), mlp)
        halves = [("mlp.gate_proj", inner, width, False), ("mlp.up_proj", inner, width, False)]
        qk_norm = None
        if config.qk_norm:
            parts = [
                interleave_halves(self._take(f"{prefix}self_attn.{name}_norm.weight", (dim,)), dim).expand(heads, dim)
                for name, heads in (("q", local.num_heads), ("k", local.num_kv_heads))
            ]
            qk_norm = self._vector(torch.cat(parts))
        return DecoderLayer(
            input_norm=norm("input_layernorm", reads),
            qkv=matrix(
                "qkv_proj",
                [_Piece(name, (rows, hidden), own, turned) for name, rows, own, turned in attention],
                _scaled(biases(config.qkv_bias, *attention), qkv),
                qkv,
            ),
            qk_norm=qk_norm,
            output=matrix(
                "o_proj",
                [_Piece("self_attn.o_proj", (hidden, q_rows), split.queries(axis=1))],
                summed("self_attn.o_proj", config.output_bias),
                Factors(columns=mixed),
            ),
            mlp_norm=norm("post_attention_layernorm", mlp),
            gate_up=matrix(
                "gate_up_proj",
                [_Piece(name, (rows, hidden), own) for name, rows, own, _ in halves],
                _scaled(biases(config.mlp_bias, *halves), gate_up),
                gate_up,
            ),
            down=matrix(
                "down_proj",
                [_Piece("mlp.down_proj", (hidden, inner), split.inner(axis=1))],
                summed("mlp.down_proj", config.mlp_bias),
                Factors(columns=gated),
            ),
        )

    def _matrix(
        self, key: str, form: str, pieces: Sequence[_Piece], bias: Tensor | None = None, factors: Factors | None = None
    ) -> Linear:
        """One stored matrix: the pieces' rows below each other, times the factors; or the cache's."""
        if self.cache is not None:
            for one in pieces:
                self.checkpoint.pass_over(f"{one.name}.weight", one.shape)
            return self.builder.build_packed(self.cache.take(key), bias)
        taken = [(self._take(f"{one.name}.weight", one.shape, one.part), one) for one in pieces]
        dim = self.split.whole.head_dim
        rows = [interleave_halves(weight, dim) if one.turned else weight for weight, one in taken]
        whole = rows[0] if len(rows) == 1 else torch.cat(rows)
        return self.builder.build(whole, bias, form, factors)

    def _take(self, name: str, shape: tuple[int, ...], part: Part | None = None) -> Tensor:
        return self.checkpoint.take(name, shape, part)

    def _vector(self, tensor: Tensor) -> Tensor:
        return tensor.clone().to(self.builder.device, torch.float32)

    def _check_tied(self, embedding: Tensor) -> None:
        """Raises ModelError for an own head of a tied model. Old libraries tied such a model all the same, newer ones
        take its head: nobody can tell which text its maker meant."""
        if _HEAD_TENSOR not in self.checkpoint:
            return
        head = self._take(_HEAD_TENSOR, tuple(embedding.shape))
        if not torch.equal(head.to(embedding.dtype), embedding):
            raise ModelError(
                f"tensor {_HEAD_TENSOR} differs from model.embed_tokens.weight, but config.json says "
                "tie_word_embeddings; set it to false to use this head, or take the tensor out"
            )

    def _refuse_extra(self, config: ModelConfig) -> None:
        extra = [name for name in self.checkpoint.untaken() if not name.endswith(_UNUSED_SUFFIXES)]
        if config.tie_word_embeddings:
            extra = [name for name in extra if name != _HEAD_TENSOR]
        if extra:
            raise ModelError(
                f"tensor {extra[0]} ({len(extra)} in all) is in the weights, but {config.family} has no place for it"
            )


def _part(scale: Tensor | None, part: Part | None) -> Tensor | None:
    return scale if scale is None or part is None else scale[part.start : part.start + part.count]


def _scaled(bias: Tensor | None, factors: Factors) -> Tensor | None:
    return bias if bias is None or factors.rows is None else bias.float() * factors.rows
