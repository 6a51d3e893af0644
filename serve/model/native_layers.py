"""The target's forward in C, all layers in one call: float32 residual, same weights and same answer as the eager
TargetModel, whose forward is this one's specification.

Serves models whose every matrix is a grouped integer product on a CPU; its constructor says why not otherwise. Knows
which tensors the C side reads; no files, no scheduling.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from serve.kernels.kv_cache import KVCache
from serve.kernels.linear import Linear
from serve.kernels.native.build import NativeUnavailable
from serve.kernels.native.grouped import GroupedProduct
from serve.kernels.native.ops import TILE_ROWS, Layer, NativeLibrary, Operand, Step, pointer, pointers
from serve.kernels.row_policy import RowPolicy
from serve.model.batch import FlatBatch
from serve.model.config import ModelConfig
from serve.model.target import DecoderLayer, ForwardOutput, TargetModel, TargetWeights

_MULTIPLE = 16  # widths and head sizes: whole vectors on any processor
_TURN_BLOCK = 4096


class NativeTargetModel(TargetModel):
    """A loaded model on the C layers. A row's logits and taps have the same bits in any batch, order, chunking and
    pages."""

    def __init__(
        self,
        config: ModelConfig,
        weights: TargetWeights,
        library: NativeLibrary,
        *,
        weight_format: str,
        device: torch.device,
        cache_dtype: torch.dtype,
        linear_path: str,
    ) -> None:
        """Raises NativeUnavailable for a model that the C layers do not serve."""
        super().__init__(
            config,
            weights,
            weight_format=weight_format,
            device=device,
            cache_dtype=cache_dtype,
            linear_path=linear_path,
        )
        if device.type != "cpu" or cache_dtype != torch.float32:
            raise NativeUnavailable(f"the C layers keep float32 K/V on a CPU, not {cache_dtype} on {device}")
        widths = (config.hidden_size, config.intermediate_size, config.head_dim)
        if any(width % _MULTIPLE for width in widths):
            raise NativeUnavailable(f"hidden, inner and head sizes {widths} are not multiples of {_MULTIPLE}")
        self.native = self._library = library
        self._layers = (Layer * config.num_layers)(*map(_convert, weights.layers))
        self._head = _grouped(weights.head)
        widths = (config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim)
        self._widest = max(widths)
        heads = config.num_heads + 2 * config.num_kv_heads
        self._longest = max(heads * config.head_dim, 2 * config.intermediate_size, config.hidden_size)
        self._turns = torch.empty(0, config.head_dim)

    @property
    def kernel_path(self) -> str:
        """What runs where, for the ready line."""
        return f"cpu {self._linear_path}; layers in C ({self._library.compiler})"

    def allocate_cache(self, num_pages: int, page_size: int) -> KVCache:
        """As TargetModel.allocate_cache; nothing is tried, since the C attention has no row floor."""
        config = self.config
        return KVCache(config.num_layers, num_pages, page_size, config.num_kv_heads, config.head_dim)

    @torch.inference_mode()
    def forward(self, batch: FlatBatch, cache: KVCache, taps: Sequence[int] = ()) -> ForwardOutput:
        """As TargetModel.forward."""
        x = self.embed(batch.token_ids)
        step, _alive = self._step(batch, cache, x)
        kept: list[Tensor | None] = [torch.empty_like(x) if i in taps else None for i in range(len(self._layers))]
        self._library.layers(
            ctypes.byref(step), self._layers, len(self._layers), pointers(cache.layers), pointers(kept)
        )
        logits = self._logits(x.index_select(0, batch.logit_rows))
        wanted = [tap for tap in (kept[i] for i in taps) if tap is not None]
        return ForwardOutput(logits, torch.cat(wanted, 1) if taps else None)

    def _logits(self, x: Tensor) -> Tensor:
        """Residual rows [R, hidden] float32 -> logits [R, vocab] float32: final norm, then head."""
        rows = x.shape[0]
        logits = x.new_empty(rows, self.config.vocab_size)
        if rows:
            operand = Operand(rows, x.shape[1])
            step = self._sizes(x, operand, logits)
            self._library.head(ctypes.byref(step), ctypes.byref(self._head.matrix), pointer(self._parts.final_norm))
        return logits

    def _sizes(self, x: Tensor, operand: Operand, y: Tensor) -> Step:
        config = self.config
        step = Step(
            rows=x.shape[0],
            hidden=config.hidden_size,
            inner=config.intermediate_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            threads=torch.get_num_threads(),
            eps=config.rms_norm_eps,
            fork=self._library.fork,
            x=pointer(x),
            y=pointer(y),
        )
        operand.fill(step)
        return step

    def _step(self, batch: FlatBatch, cache: KVCache, x: Tensor) -> tuple[Step, tuple[Any, ...]]:
        """The C side's view of the step and what it points into. Raises ValueError when a page table is shorter than
        what its rows attend to: the C side reads what it is told to."""
        config, rows, page = self.config, x.shape[0], cache.page_size
        self._reserve(max(map(len, batch.page_tables)) * page)
        visible = batch.visible.tolist()
        tiles: list[int] = []
        tables: list[int] = []
        for sequence, table in enumerate(batch.page_tables):
            start, stop = batch.query_starts[sequence], batch.query_starts[sequence + 1]
            needed = -(-max(visible[start:stop], default=0) // page)
            if needed > len(table):
                raise ValueError(f"sequence {sequence} attends to {needed} pages but its page table has {len(table)}")
            for first in range(start, stop, TILE_ROWS):
                tiles += (first, min(TILE_ROWS, stop - first), len(tables))
            tables += table
        operand, y = Operand(rows, self._widest), torch.empty(rows * self._longest)
        q, mixed = torch.empty(2, rows, config.num_heads * config.head_dim).unbind()
        integers = [batch.positions.contiguous(), batch.slots.contiguous(), batch.visible.contiguous()]
        integers += [torch.tensor(tiles), torch.tensor(tables)]
        step = self._sizes(x, operand, y)
        step.page_size, step.tiles = page, len(tiles) // 3
        step.q, step.mixed, step.turns = pointer(q), pointer(mixed), pointer(self._turns)
        for name, tensor in zip(("positions", "slots", "visible", "tile", "tables"), integers, strict=True):
            setattr(step, name, pointer(tensor, torch.int64))
        return step, (operand, y, q, mixed, *integers)

    def _reserve(self, length: int) -> None:
        """Makes the rotary turns of positions below ``length`` available: cosine and sine of a pair side by side."""
        if self._turns.shape[0] < length:
            blocks = -(-length // _TURN_BLOCK) * _TURN_BLOCK
            self._rotary.reserve(blocks)
            turns = torch.view_as_real(self._rotary.rows(torch.arange(blocks)))
            self._turns = turns.reshape(blocks, -1).contiguous()


def _grouped(linear: Linear) -> GroupedProduct:
    if not isinstance(linear.op, GroupedProduct) or linear.policy != RowPolicy():
        raise NativeUnavailable(f"a matrix runs as {linear.kind} ({linear.policy.describe()}), not in C")
    return linear.op


def _convert(layer: DecoderLayer) -> Layer:
    return Layer(
        input_norm=pointer(layer.input_norm),
        mlp_norm=pointer(layer.mlp_norm),
        qk_norm=pointer(layer.qk_norm),
        qkv=_grouped(layer.qkv).matrix,
        output=_grouped(layer.output).matrix,
        gate_up=_grouped(layer.gate_up).matrix,
        down=_grouped(layer.down).matrix,
    )
