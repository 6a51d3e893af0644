"""The target's forward with everything between its integer products in C: five calls a layer, float32 residual, same
weights and same answer as the eager TargetModel, whose forward is this one's specification.

Serves models whose every matrix is an exact integer product on a CPU; its constructor says why not otherwise. Knows
the layer's order of operations; no files, no scheduling.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from serve.kernels.exact_int8 import ExactInt8
from serve.kernels.kv_cache import KVCache
from serve.kernels.linear import Linear
from serve.kernels.native.build import NativeUnavailable
from serve.kernels.native.ops import TILE_ROWS, Layer, NativeLibrary, Step, pointer
from serve.kernels.row_policy import RowPolicy
from serve.model.batch import FlatBatch
from serve.model.config import ModelConfig
from serve.model.target import DecoderLayer, ForwardOutput, TargetModel, TargetWeights

_MULTIPLE = 16  # widths and head sizes: whole vectors on any processor
_WIDE_ATTENTION = 500_000  # multiplications from which a layer's attention is worth two threads
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
        self._library = library
        self._layers = [_convert(layer) for layer in weights.layers]
        self._products = [
            tuple(map(_exact, (layer.qkv, layer.output, layer.gate_up, layer.down))) for layer in weights.layers
        ]
        self._head = _exact(weights.head)
        self._turns = torch.empty(0, config.head_dim)

    @property
    def kernel_path(self) -> str:
        """What runs where, for the ready line."""
        return f"cpu {self._linear_path}; native int8 layer ({self._library.compiler})"

    def allocate_cache(self, num_pages: int, page_size: int) -> KVCache:
        """As TargetModel.allocate_cache; nothing is tried, since the C attention has no row floor."""
        config = self.config
        return KVCache(config.num_layers, num_pages, page_size, config.num_kv_heads, config.head_dim)

    @torch.inference_mode()
    def forward(self, batch: FlatBatch, cache: KVCache, taps: Sequence[int] = ()) -> ForwardOutput:
        """As TargetModel.forward."""
        native, config = self._library, self.config
        x = self.embed(batch.token_ids)
        rows = x.shape[0]
        width = config.num_heads * config.head_dim
        flat = torch.empty(2 * rows * max(config.hidden_size, width, config.intermediate_size))
        hidden, mixed, gated = (
            flat[: 2 * rows * size].view(2 * rows, size)
            for size in (config.hidden_size, width, config.intermediate_size)
        )
        step, _alive = self._step(batch, cache, x, flat)
        shared = ctypes.byref(step)
        kept: dict[int, Tensor] = {}
        y: Tensor | None = None
        before: Any = None
        for index, layer in enumerate(self._layers):
            qkv, output, gate_up, down = self._products[index]
            native.open(shared, layer, before, None if y is None else y.data_ptr())
            if index - 1 in taps:
                kept[index - 1] = x.clone()
            y = qkv.product(hidden, qkv.middle)
            native.attend(shared, layer, y.data_ptr(), cache.layers[index].data_ptr())
            y = output.product(mixed, output.middle)
            native.middle(shared, layer, y.data_ptr())
            y = gate_up.product(hidden, gate_up.middle)
            native.gate(shared, layer, y.data_ptr())
            y = down.product(gated, down.middle)
            before = layer
        assert y is not None
        native.close(shared, before, y.data_ptr())
        kept[len(self._layers) - 1] = x
        logits = self._logits(x.index_select(0, batch.logit_rows))
        return ForwardOutput(logits, torch.cat([kept[i] for i in taps], 1) if taps else None)

    def _logits(self, x: Tensor) -> Tensor:
        """Residual rows [R, hidden] float32 -> logits [R, vocab] float32: final norm, then head."""
        rows, head = x.shape[0], self._head
        if not rows:
            return x.new_empty(0, self.config.vocab_size)
        halves, peak = torch.empty(2 * rows, x.shape[1]), torch.empty(rows)
        step = self._sizes(rows, x, halves, peak)
        shared = ctypes.byref(step)
        self._library.head_open(shared, pointer(self._parts.final_norm), head.bits)
        y = head.product(halves, head.middle)
        self._library.head_close(shared, y.data_ptr(), pointer(head.bias), y.shape[1], head.bits)
        return y[:rows]

    def _sizes(self, rows: int, x: Tensor, halves: Tensor, peak: Tensor) -> Step:
        config = self.config
        return Step(
            rows=rows,
            hidden=config.hidden_size,
            inner=config.intermediate_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            threads=torch.get_num_threads(),
            eps=config.rms_norm_eps,
            fork=self._library.fork,
            x=pointer(x),
            halves=pointer(halves),
            peak=pointer(peak),
        )

    def _step(self, batch: FlatBatch, cache: KVCache, x: Tensor, halves: Tensor) -> tuple[Step, tuple[Tensor, ...]]:
        """The C side's view of the step and the tensors it points into. Raises ValueError when a page table is shorter
        than what its rows attend to: the C side reads what it is told to."""
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
        peak = torch.empty(rows)
        q, mixed = torch.empty(2, rows, config.num_heads * config.head_dim).unbind()
        integers = [batch.positions.contiguous(), batch.slots.contiguous(), batch.visible.contiguous()]
        integers += [torch.tensor(tiles), torch.tensor(tables)]
        step = self._sizes(rows, x, halves, peak)
        step.page_size, step.tiles = page, len(tiles) // 3
        step.wide_attention = sum(visible) * config.num_heads * config.head_dim * 2 > _WIDE_ATTENTION
        step.q, step.mixed, step.turns = pointer(q), pointer(mixed), pointer(self._turns)
        for name, tensor in zip(("positions", "slots", "visible", "tile", "tables"), integers, strict=True):
            setattr(step, name, pointer(tensor, torch.int64))
        return step, (peak, q, mixed, *integers)

    def _reserve(self, length: int) -> None:
        """Makes the rotary turns of positions below ``length`` available: cosine and sine of a pair side by side."""
        if self._turns.shape[0] < length:
            blocks = -(-length // _TURN_BLOCK) * _TURN_BLOCK
            self._rotary.reserve(blocks)
            turns = torch.view_as_real(self._rotary.rows(torch.arange(blocks)))
            self._turns = turns.reshape(blocks, -1).contiguous()


def _exact(linear: Linear) -> ExactInt8:
    if not isinstance(linear.op, ExactInt8) or linear.policy != RowPolicy():
        raise NativeUnavailable(f"a matrix runs as {linear.kind} ({linear.policy.describe()}), not as integer sums")
    return linear.op


def _convert(layer: DecoderLayer) -> Any:
    qkv, output, gate_up, down = map(_exact, (layer.qkv, layer.output, layer.gate_up, layer.down))
    return ctypes.byref(
        Layer(
            input_norm=pointer(layer.input_norm),
            mlp_norm=pointer(layer.mlp_norm),
            qk_norm=pointer(layer.qk_norm),
            qkv_bias=pointer(qkv.bias),
            output_bias=pointer(output.bias),
            gate_up_bias=pointer(gate_up.bias),
            down_bias=pointer(down.bias),
            qkv_bits=qkv.bits,
            output_bits=output.bits,
            gate_up_bits=gate_up.bits,
            down_bits=down.bits,
        )
    )
