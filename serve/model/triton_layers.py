"""Decoder layers through the Triton kernels: nine launches a layer, float32 residual; and the target made of them,
whose specification is the eager TargetModel: same weights, same answer. A block drafter is a stack of the same layers.

Sequences with few rows (decode, verify) always take the skinny kernels, apart from prefill chunks in the same batch,
so that a decoded row has the same bits whatever else the step does. Knows the layer's order of operations; no files,
no scheduling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from serve.kernels.kv_cache import KVCache
from serve.kernels.triton.attention import SPLIT_ROWS, TritonPlan, build_plan, paged_attention
from serve.kernels.triton.fp8_rows import Codes, code_norm
from serve.kernels.triton.gemm import SkinnyLinear
from serve.kernels.triton.heads import write_heads
from serve.kernels.triton.linear import TritonLinear
from serve.kernels.triton.rows import add_rms_norm, embed_rows, silu_mul
from serve.kernels.triton.shift import gated_shift
from serve.kernels.triton.tiles import ROW_TILES
from serve.model.batch import FlatBatch, put
from serve.model.config import ModelConfig
from serve.model.fp8_prompts import copied, fp8_mlp, fp8_product
from serve.model.integer_prompts import integer_mlp, integer_product_of
from serve.model.library_rows import LibraryRows
from serve.model.rope import RotaryTable
from serve.model.target import DecoderLayer, ForwardOutput, TargetModel, TargetSettings, TargetWeights
from serve.parallel.group import ALONE, RankGroup

_TURN_BLOCK = 4096


@dataclass(frozen=True)
class TritonLayer:
    """One block's matrices and norms as the kernels take them; gate_up is gated, shifts are in the out_scales."""

    input_norm: Tensor
    qkv: SkinnyLinear
    qk_norm: Tensor | None
    output: SkinnyLinear
    mlp_norm: Tensor
    gate_up: SkinnyLinear
    down: SkinnyLinear

    @property
    def linears(self) -> tuple[SkinnyLinear, ...]:
        """Its matrices, in the order of their use."""
        return self.qkv, self.output, self.gate_up, self.down


class TurnTable:
    """Rotary turns as the kernels read them: cosine and sine of each pair side by side, float32 [positions,
    head_dim], grown in whole blocks. A captured graph keeps the address: reserve its longest context first."""

    def __init__(self, rotary: RotaryTable, head_dim: int, device: torch.device) -> None:
        self._rotary = rotary
        self.turns = torch.empty(0, head_dim, device=device)

    def reserve(self, length: int) -> None:
        """Makes positions below ``length`` available."""
        if self.turns.shape[0] < length:
            blocks = -(-length // _TURN_BLOCK) * _TURN_BLOCK
            self._rotary.reserve(blocks)
            turns = torch.view_as_real(self._rotary.rows(torch.arange(blocks, device=self.turns.device)))
            self.turns = turns.reshape(blocks, -1)


@dataclass(frozen=True)
class TritonStack:
    """Decoder layers and the norm behind them. Launches only, with no host synchronisation, so that a CUDA graph can
    capture a run. safe_rows: what is known of the library's products of prefill chunks; group: the ranks whose layers
    add up to whole ones; integer_prompts: prefill chunks go through whole numbers where their matrices allow it;
    fp8_prompts: they go through the matrices' copies in 8-bit floats."""

    layers: tuple[TritonLayer, ...]
    final_norm: Tensor
    num_heads: int
    eps: float
    dtype: torch.dtype
    safe_rows: LibraryRows = field(default_factory=LibraryRows)
    group: RankGroup = ALONE
    integer_prompts: bool = False
    fp8_prompts: bool = False

    @classmethod
    def make(
        cls, layers: Sequence[DecoderLayer], final_norm: Tensor, num_heads: int, eps: float, dtype: torch.dtype
    ) -> TritonStack:
        """Every Linear must be a TritonLinear (TypeError otherwise). dtype: of activations and K/V."""
        return cls(tuple(_convert(layer, dtype) for layer in layers), final_norm, num_heads, eps, dtype)

    def with_fp8(self) -> TritonStack:
        """The same stack, its matrices with copies for prompts. Raises ModelError."""
        made = iter(copied(linear for layer in self.layers for linear in layer.linears))
        layers = [
            replace(layer, qkv=next(made), output=next(made), gate_up=next(made), down=next(made))
            for layer in self.layers
        ]
        return replace(self, layers=tuple(layers), fp8_prompts=True)

    @property
    def copies_bytes(self) -> int:
        """Bytes of the copies for prompts."""
        return sum(one.fp8.nbytes for layer in self.layers for one in layer.linears if one.fp8 is not None)

    def dense_matrices(self) -> list[Tensor]:
        """Every matrix [N, K] that is stored in 16 bits."""
        matrices = [linear.weight for layer in self.layers for linear in layer.linears]
        return [matrix.data for matrix in matrices if matrix.weight_format == "dense"]

    def run(
        self,
        residual: Tensor,
        positions: Tensor,
        slots: Tensor,
        turns: Tensor,
        plan: TritonPlan,
        cache: KVCache,
        taps: Sequence[int] = (),
        wanted: Tensor | None = None,
        tapped: Callable[[Tensor], object] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """residual [T, hidden] float32 (overwritten), positions and slots [T] int64 -> normed hidden states [T, hidden]
        in 16 bits (or of the rows ``wanted`` [R] int64 alone), taps [T, len(taps) * hidden] float32. tapped: called
        with the taps as soon as all of them are there, before the layers behind."""
        dtype, eps = self.dtype, self.eps
        product: Callable[..., Tensor] = _product if plan.prefill is None else self._prompt_product
        mlp: Callable[..., Tensor] = _mlp if plan.prefill is None else self._chunk_mlp
        norm: Callable[..., Tensor | Codes] = partial(add_rms_norm, out_dtype=dtype)
        if plan.prefill is not None and self.fp8_prompts:
            product, mlp, norm = fp8_product, _fp8_mlp, code_norm
        last = len(self.layers) - 1
        width = residual.shape[1]
        kept = residual.new_empty(residual.shape[0], len(taps) * width)
        columns = [kept[:, start : start + width] for start in range(0, kept.shape[1], width)]
        # The residual after layer i exists once the next norm has added that layer's last product.
        places = dict(zip(taps, columns, strict=True))
        deepest = max(taps, default=None)
        delta: Tensor | None = None
        for index, layer in enumerate(self.layers):
            pages, scale = cache.layers[index], cache.scale(index)
            normed = norm(residual, delta, layer.input_norm, eps, tap=places.get(index - 1))
            if index - 1 == deepest:
                self._all_tapped(taps, columns, places, kept, tapped)
            qkv, heads = product(layer.qkv, normed), self.num_heads
            q = write_heads(qkv, layer.qk_norm, turns, positions, slots, pages, heads, eps, dtype, scale)
            if index == last and wanted is not None and last not in places:
                # All rows have left their K/V; what is behind it is for the wanted ones.
                if not wanted.shape[0]:
                    return residual.new_empty(0, width, dtype=dtype), kept
                attended = paged_attention(q, pages, plan.last, scale).index_select(0, wanted)
                residual, wanted = residual.index_select(0, wanted), None
            else:
                attended = paged_attention(q, pages, plan, scale)
            delta = self.group.sum(product(layer.output, attended))
            normed = norm(residual, delta, layer.mlp_norm, eps)
            delta = self.group.sum(mlp(layer, normed))
        hidden = add_rms_norm(residual, delta, self.final_norm, eps, dtype, places.get(last))
        if deepest == last:
            self._all_tapped(taps, columns, places, kept, tapped)
        return hidden if wanted is None else hidden.index_select(0, wanted), kept

    @staticmethod
    def _all_tapped(
        taps: Sequence[int],
        columns: Sequence[Tensor],
        places: dict[int, Tensor],
        kept: Tensor,
        tapped: Callable[[Tensor], object] | None,
    ) -> None:
        """Fills the columns of layers asked for twice, and tells of them all."""
        for tap, column in zip(taps, columns, strict=True):
            if column is not places[tap]:
                column.copy_(places[tap])
        if tapped is not None:
            tapped(kept)

    def _prompt_product(self, linear: SkinnyLinear, x: Tensor) -> Tensor:
        y = integer_product_of(linear, x) if self.integer_prompts else None
        return self._chunk_product(linear, x) if y is None else y

    def _chunk_mlp(self, layer: TritonLayer, x: Tensor) -> Tensor:
        y = integer_mlp(layer.gate_up, layer.down, x) if self.integer_prompts else None
        return self._chunk_product(layer.down, self._chunk_gated(layer.gate_up, x)) if y is None else y

    def _chunk_product(self, linear: SkinnyLinear, x: Tensor) -> Tensor:
        padded = self._padded(linear, x)
        return chunk_product(linear, x) if padded is None else linear.by_library(padded)[: x.shape[0]]

    def _chunk_gated(self, linear: SkinnyLinear, x: Tensor) -> Tensor:
        padded = self._padded(linear, x)
        if padded is None and x.shape[0] <= ROW_TILES[-1]:
            return linear.gated_silu(x)
        rows = x if padded is None else padded
        return silu_mul(replace(linear, out_scale=1.0).by_library(rows)[: x.shape[0]], linear.out_scale)

    def _padded(self, linear: SkinnyLinear, x: Tensor) -> Tensor | None:
        """x as the library needs it where its bits are known to be a row's own; else None. A stored matrix is widened
        for every product, which small chunks are not worth."""
        return self.safe_rows.padded(x, linear.weight.rows) if linear.weight.weight_format == "dense" else None


class TritonTargetModel(TargetModel):
    """A loaded model on the Triton kernels. A row of a sequence with at most SPLIT_ROWS rows has the same bits in
    whatever batch, order, block length or pages. Every Linear of the weights must be a TritonLinear."""

    def __init__(self, config: ModelConfig, weights: TargetWeights, settings: TargetSettings) -> None:
        super().__init__(config, weights, settings)
        self.stack = TritonStack.make(
            weights.layers, weights.final_norm, config.num_heads, config.rms_norm_eps, self.cache_dtype
        )
        self.stack = replace(self.stack, group=self.group, integer_prompts=settings.integer_prompts)
        if settings.fp8_prompts:
            self.stack = self.stack.with_fp8()
        if self.device.type == "cuda":
            self.stack = replace(self.stack, safe_rows=LibraryRows.tried(self.stack.dense_matrices()))
        self._head = skinny(weights.head)
        head, table = self._head.weight, weights.embedding
        # Heads are 16-bit or int8 with a scale a row (see the loader): rows of both can be looked up.
        self._table = (head.data, head.scale) if table is None else (table, None)
        self._turns = TurnTable(self._rotary, config.head_dim, self.device)

    @property
    def kernels(self) -> str:
        """One word for ``kernel_path``."""
        return "triton"

    @property
    def kernel_path(self) -> str:
        """What runs where, for the ready line."""
        fp8 = "; prompts in fp8 x fp8" if self.stack.fp8_prompts else ""
        prompts = "; prompts in int8 x int8" if self.stack.integer_prompts else fp8
        return f"{self.device.type} {self._linear_path}{prompts}; paged attention, norms and rotary in triton"

    @property
    def copies_bytes(self) -> int:
        return self.stack.copies_bytes

    @torch.inference_mode()
    def forward(self, batch: FlatBatch, cache: KVCache, taps: Sequence[int] = ()) -> ForwardOutput:
        """As TargetModel.forward."""
        parts = _parts(batch)
        if len(parts) == 1:
            hidden, kept = self._run(batch, cache, taps, batch.logit_rows)
        else:
            results = [self._run(part, cache, taps) for part, _ in parts]
            hidden = results[0][0].new_empty(batch.num_rows, results[0][0].shape[1])
            kept = results[0][1].new_empty(batch.num_rows, results[0][1].shape[1])
            for (_, rows), (part_hidden, part_kept) in zip(parts, results, strict=True):
                hidden.index_copy_(0, rows, part_hidden)
                kept.index_copy_(0, rows, part_kept)
            hidden = hidden.index_select(0, batch.logit_rows)
        return ForwardOutput(self.logits(hidden), kept if taps else None)

    def _run(
        self, batch: FlatBatch, cache: KVCache, taps: Sequence[int], wanted: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        self.reserve(max(map(len, batch.page_tables)) * cache.page_size)
        return self.layers(batch, build_plan(batch, cache.page_size), cache, taps, wanted)

    def layers(
        self,
        batch: FlatBatch,
        plan: TritonPlan,
        cache: KVCache,
        taps: Sequence[int] = (),
        wanted: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """All blocks and the final norm -> normed hidden states [T, hidden] in 16 bits (or of the rows ``wanted``
        alone), taps [T, len(taps) * hidden] float32. Launches only; ``reserve`` first."""
        residual = self.embed(batch.token_ids)
        return self.stack.run(residual, batch.positions, batch.slots, self.turns, plan, cache, taps, wanted)

    def embed(self, token_ids: Tensor) -> Tensor:
        """As TargetModel.embed; from the head's own rows where they are tied."""
        return embed_rows(*self._table, token_ids)

    def greedy(self, hidden: Tensor) -> Tensor:
        """Normed hidden states [R, hidden] in 16 bits -> each row's best token [R] int64; no logits are written."""
        return self.best(hidden)[0]

    def best(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Each row's best token [R] int64 and its logit [R] float32, not finite where the row is unusable."""
        return self.group.best(*self._head.argmax(hidden), self._head.weight.rows)

    def logits(self, hidden: Tensor) -> Tensor:
        """Normed hidden states [R, hidden] in 16 bits -> [R, vocab] float32."""
        return self.group.columns(self._head.linear(hidden, torch.float32))

    @property
    def turns(self) -> Tensor:
        """The rotary turns reserved so far."""
        return self._turns.turns

    @property
    def head_bytes(self) -> int:
        """Bytes of the output matrix."""
        return self._head.weight.nbytes

    def reserve(self, length: int) -> None:
        """Makes the rotary turns of positions below ``length`` available."""
        self._turns.reserve(length)


def _convert(layer: DecoderLayer, dtype: torch.dtype) -> TritonLayer:
    gate_up = skinny(layer.gate_up)
    # In float16 the gated product is stored divided by a power of two, and the down projection multiplies it back.
    shift = 2.0 ** (gated_shift(gate_up.weight, gate_up.bias, layer.mlp_norm) if dtype == torch.float16 else 0)
    return TritonLayer(
        input_norm=layer.input_norm,
        qkv=skinny(layer.qkv),
        qk_norm=None if layer.qk_norm is None else layer.qk_norm.contiguous(),
        output=skinny(layer.output),
        mlp_norm=layer.mlp_norm,
        gate_up=gate_up.as_gated(1 / shift),
        down=replace(skinny(layer.down), out_scale=shift),
    )


def skinny(linear: object) -> SkinnyLinear:
    """The packed matrix of a TritonLinear; TypeError for another Linear."""
    if not isinstance(linear, TritonLinear):
        raise TypeError(f"the Triton layers need TritonLinear matrices, got {type(linear).__name__}")
    return linear.skinny


def _product(linear: SkinnyLinear, x: Tensor) -> Tensor:
    """The product's parts over K, [splits, T, N] float32, for the next kernel to add."""
    return linear.partial(x)


def _mlp(layer: TritonLayer, x: Tensor) -> Tensor:
    return _product(layer.down, layer.gate_up.gated_silu(x))


def _fp8_mlp(layer: TritonLayer, x: Tensor | Codes) -> Tensor:
    return fp8_mlp(layer.gate_up, layer.down, x)


def chunk_product(linear: SkinnyLinear, x: Tensor) -> Tensor:
    """The product of a prefill chunk, [T, N] float32 (or the library's dtype). Chunks beyond the widest row tile are
    the library's: they are compute bound."""
    return linear.by_library(x) if x.shape[0] > ROW_TILES[-1] else linear.linear(x, torch.float32)


def _parts(batch: FlatBatch) -> list[tuple[FlatBatch, Tensor]]:
    """The batch itself, or its sequences of few rows and its prefill chunks apart, each with its flat rows."""
    counts = [stop - start for start, stop in zip(batch.query_starts, batch.query_starts[1:], strict=False)]
    few = [s for s, count in enumerate(counts) if count <= SPLIT_ROWS]
    many = [s for s, count in enumerate(counts) if count > SPLIT_ROWS]
    if not few or not many:
        return [(batch, batch.logit_rows)]
    return [_subset(batch, sequences) for sequences in (few, many)]


def _subset(batch: FlatBatch, sequences: list[int]) -> tuple[FlatBatch, Tensor]:
    starts = [0]
    picked: list[int] = []
    for s in sequences:
        picked += range(batch.query_starts[s], batch.query_starts[s + 1])
        starts.append(len(picked))
    rows = put(torch.tensor(picked, dtype=torch.int64), batch.visible.device)
    part = FlatBatch(
        token_ids=batch.token_ids.index_select(0, rows),
        positions=batch.positions.index_select(0, rows),
        slots=batch.slots.index_select(0, rows),
        visible=batch.visible.index_select(0, rows),
        query_starts=tuple(starts),
        page_tables=tuple(batch.page_tables[s] for s in sequences),
        logit_rows=rows[:0],
        ends=tuple(batch.ends[s] for s in sequences) if batch.ends else (),
    )
    return part, rows
