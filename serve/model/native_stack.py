"""A stack of decoder layers in C, all of them in one call: the target's, or a drafter's.

Knows which tensors the C side reads; no files, no embedding, no head of its own, no scheduling.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
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
from serve.model.rope import RotaryTable
from serve.model.target import DecoderLayer

_MULTIPLE = 16  # widths and head sizes: whole vectors on any processor
_TURN_BLOCK = 4096


@dataclass(frozen=True)
class StackSizes:
    """Of every layer of a stack."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float


@dataclass(frozen=True)
class NativeContext:
    """What turns taps into a drafter's context: a fusing matrix and norm, then keys and values of all layers at once.

    keys_values: [layers * 2 * kv_heads * head_dim, hidden], of each layer keys (in rotary pairs), then values; k_norms:
    [kv_heads, head_dim] of each.
    """

    fuse: GroupedProduct
    norm: Tensor
    keys_values: GroupedProduct
    k_norms: tuple[Tensor, ...]


class NativeStack:
    """Decoder layers that run in C: the target's, or a drafter's.

    ``layers`` is what the C side reads; it points into tensors of the Linear layers and norms it was made from, which
    the owner keeps alive.
    """

    def __init__(
        self,
        config: StackSizes,
        layers: Sequence[DecoderLayer],
        rotary: RotaryTable,
        library: NativeLibrary,
        halves: int = 2,
    ) -> None:
        """halves: bytes of an activation's code; one is for guesses. Raises NativeUnavailable for layers that C does
        not serve."""
        widths = (config.hidden_size, config.intermediate_size, config.head_dim)
        if any(width % _MULTIPLE for width in widths):
            raise NativeUnavailable(f"hidden, inner and head sizes {widths} are not multiples of {_MULTIPLE}")
        self.native = library
        self.config = config
        self.layers = (Layer * len(layers))(*map(_convert, layers))
        self._halves = halves
        self._rotary = rotary
        self._widest = max(config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim)
        heads = config.num_heads + 2 * config.num_kv_heads
        self._longest = max(heads * config.head_dim, 2 * config.intermediate_size, config.hidden_size)
        self._turns = torch.empty(0, config.head_dim)
        self._cache: KVCache | None = None  # whose addresses these are
        self._caches: Any = None

    def forward(self, x: Tensor, batch: FlatBatch, cache: KVCache, taps: Sequence[int] = ()) -> list[Tensor]:
        """x [T, hidden] float32 goes through all layers in place; the taps [T, hidden] in their order. Raises
        ValueError when a page table is shorter than what its rows attend to."""
        count = len(self.layers)
        step, _alive = self.step(x, batch, cache.page_size)
        kept = {i: torch.empty_like(x) for i in taps}
        self.native.layers(
            ctypes.byref(step),
            self.layers,
            count,
            self._addresses(cache),
            pointers([kept.get(i) for i in range(count)]),
        )
        return [kept[i] for i in taps]

    def write_context(self, taps: Tensor, batch: FlatBatch, cache: KVCache, context: NativeContext) -> None:
        """Keys and values of every layer from taps [T, fuse.width] float32, at the rows' slots; see BlockDrafter."""
        taps = taps.contiguous()
        x = taps.new_empty(taps.shape[0], self.config.hidden_size)
        step, _alive = self.step(x, batch, cache.page_size, taps.shape[1], context.keys_values.outputs)
        step.heads = 0
        self.native.context(
            ctypes.byref(step),
            pointer(taps),
            ctypes.byref(context.fuse.matrix),
            pointer(context.norm),
            ctypes.byref(context.keys_values.matrix),
            pointers(context.k_norms),
            self._addresses(cache),
        )

    def product(self, x: Tensor, norm: Tensor, op: GroupedProduct) -> Tensor:
        """Residual rows x [R, hidden] float32 -> op(norm(x)) [R, N] float32."""
        rows = x.shape[0]
        y = x.new_empty(rows, op.outputs)
        if rows:
            operand = Operand(rows, x.shape[1], self._halves)
            step = self._sizes(x, operand, y)
            self.native.head(ctypes.byref(step), ctypes.byref(op.matrix), pointer(norm))
        return y

    def best(self, x: Tensor, norm: Tensor, op: GroupedProduct) -> Tensor:
        """Residual rows x [R, hidden] float32 -> the output of op(norm(x)) that is largest, the first among equals: [R]
        int64."""
        rows = x.shape[0]
        best = torch.zeros(rows, dtype=torch.int64)
        if rows:
            operand, y = Operand(rows, x.shape[1], self._halves), x.new_empty(rows, op.outputs)
            step = self._sizes(x, operand, y)
            self.native.best(ctypes.byref(step), ctypes.byref(op.matrix), pointer(norm), pointer(best, torch.int64))
        return best

    def step(
        self, x: Tensor, batch: FlatBatch, page_size: int, width: int = 0, outputs: int = 0
    ) -> tuple[Step, tuple[Any, ...]]:
        """The C side's view of a step and what it points into; ``width`` and ``outputs``: of a matrix beyond the
        layers'. Raises ValueError when a page table is shorter than what its rows attend to: C reads what it is told.
        """
        config, rows = self.config, x.shape[0]
        self._reserve(max(map(len, batch.page_tables)) * page_size)
        visible = batch.visible.tolist()
        tiles: list[int] = []
        tables: list[int] = []
        for sequence, table in enumerate(batch.page_tables):
            start, stop = batch.query_starts[sequence], batch.query_starts[sequence + 1]
            needed = -(-max(visible[start:stop], default=0) // page_size)
            if needed > len(table):
                raise ValueError(f"sequence {sequence} attends to {needed} pages but its page table has {len(table)}")
            for first in range(start, stop, TILE_ROWS):
                tiles += (first, min(TILE_ROWS, stop - first), len(tables))
            tables += table
        operand = Operand(rows, max(width, self._widest), self._halves)
        y = torch.empty(rows * max(outputs, self._longest))
        q, mixed = torch.empty(2, rows, config.num_heads * config.head_dim).unbind()
        integers = [batch.positions.contiguous(), batch.slots.contiguous(), batch.visible.contiguous()]
        integers += [torch.tensor(tiles), torch.tensor(tables)]
        step = self._sizes(x, operand, y)
        step.page_size, step.tiles = page_size, len(tiles) // 3
        step.q, step.mixed, step.turns = pointer(q), pointer(mixed), pointer(self._turns)
        for name, tensor in zip(("positions", "slots", "visible", "tile", "tables"), integers, strict=True):
            setattr(step, name, pointer(tensor, torch.int64))
        return step, (operand, y, q, mixed, *integers)

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
            fork=self.native.fork,
            x=pointer(x),
            y=pointer(y),
        )
        operand.fill(step)
        return step

    def _addresses(self, cache: KVCache) -> Any:
        """Of the layers' pages; taken once for a cache, which keeps its tensors."""
        if self._cache is not cache:
            self._cache, self._caches = cache, pointers(cache.layers)
        return self._caches

    def _reserve(self, length: int) -> None:
        """Makes the rotary turns of positions below ``length`` available: cosine and sine of a pair side by side."""
        if self._turns.shape[0] < length:
            blocks = -(-length // _TURN_BLOCK) * _TURN_BLOCK
            self._rotary.reserve(blocks)
            turns = torch.view_as_real(self._rotary.rows(torch.arange(blocks)))
            self._turns = turns.reshape(blocks, -1).contiguous()


def grouped(linear: Linear) -> GroupedProduct:
    """The linear layer's product. Raises NativeUnavailable where it is not one that C runs."""
    if not isinstance(linear.op, GroupedProduct) or linear.policy != RowPolicy():
        raise NativeUnavailable(f"a matrix runs as {linear.kind} ({linear.policy.describe()}), not in C")
    return linear.op


def _convert(layer: DecoderLayer) -> Layer:
    return Layer(
        input_norm=pointer(layer.input_norm),
        mlp_norm=pointer(layer.mlp_norm),
        qk_norm=pointer(layer.qk_norm),
        qkv=grouped(layer.qkv).matrix,
        output=grouped(layer.output).matrix,
        gate_up=grouped(layer.gate_up).matrix,
        down=grouped(layer.down).matrix,
    )
