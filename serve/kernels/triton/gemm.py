"""Launches the skinny GEMM: y = x W^T for a few rows, with the epilogue the next operation wants.

The eager twin of each call is ``F.linear(x, dequantize(weight), bias)`` and the operation its name says. A row's bits
are the same for every number of rows. Knows packed weights and rows, not layers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from serve.kernels.triton.card import capability, launch_options
from serve.kernels.triton.fp8_rows import Fp8Matrix
from serve.kernels.triton.pack import PackedWeight
from serve.kernels.triton.source.few_rows import few_rows_gemm
from serve.kernels.triton.source.gemm import argmax_tiles, skinny_gemm
from serve.kernels.triton.source.widen import widen_matrix
from serve.kernels.triton.tiles import (
    ARGMAX_BLOCK,
    STREAM_ROWS,
    STREAM_TILES,
    WIDEN_BLOCK_K,
    WIDEN_ROWS,
    GemmPlan,
    gemm_plan,
)
from serve.kernels.triton.trial import same_bits

log = logging.getLogger(__name__)

_TRIED = (128, 1024)
"""Rows and depth of the matrix that streams are tried on."""


@dataclass(frozen=True)
class SkinnyLinear:
    """One matrix with its fixed plan. bias [N] float32 or None; out_scale multiplies the product (a power of two that
    undoes a shift of x). gated: the matrix is gate rows, then up rows; fp8: its copy for prompts, where they have
    one."""

    weight: PackedWeight
    plan: GemmPlan
    bias: Tensor | None = None
    out_scale: float = 1.0
    gated: bool = False
    fp8: Fp8Matrix | None = None

    @classmethod
    def make(
        cls, weight: PackedWeight, bias: Tensor | None = None, *, gated: bool = False, out_scale: float = 1.0
    ) -> SkinnyLinear:
        """Chooses the plan for the weight's shape and its card."""
        card = capability(weight.data.device)
        plan = gemm_plan(weight.weight_format, weight.pack, weight.rows, weight.depth, card, split=not gated)
        if weight.data.device.type != "cuda":
            plan = plan.for_interpreter
        elif plan.streams and not streams_agree(weight.data.device, weight.compute_dtype):
            plan = plan.without_streams
        return cls(weight, plan, None if bias is None else bias.float(), out_scale, gated)

    def as_gated(self, out_scale: float) -> SkinnyLinear:
        """The same matrix as gate rows, then up rows."""
        return replace(self.make(self.weight, gated=True, out_scale=out_scale), bias=self.bias)

    @property
    def splits(self) -> int:
        """Parts over K that ``partial`` leaves."""
        return -(-self.weight.depth // self.plan.split_depth)

    def linear(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """x [T, K] -> y [T, N] in out_dtype (x's when None), in one pass whatever ``splits`` says."""
        out = x.new_empty(x.shape[0], self.weight.rows, dtype=out_dtype or x.dtype)
        self._launch(x, out, "store")
        return out

    def by_library(self, x: Tensor) -> Tensor:
        """y through the library's product, for many rows; a stored matrix is widened to 16 bits first. float32 where
        out_scale asks for it."""
        bias = None if self.bias is None else self.bias.to(x.dtype) / self.out_scale
        y = F.linear(x, widened(self.weight), bias)
        return y if self.out_scale == 1 else y.float() * self.out_scale

    def partial(self, x: Tensor) -> Tensor:
        """x [T, K] -> [splits, T, N] float32 whose sum over axis 0, in order, is y. The operation that follows adds
        them."""
        out = x.new_empty(self.splits, x.shape[0], self.weight.rows, dtype=torch.float32)
        self._launch(x, out, "partial")
        return out

    def add_to(self, x: Tensor, residual: Tensor) -> None:
        """residual [T, N] float32 += y, in place."""
        self._launch(x, residual, "residual")

    def gated_silu(self, x: Tensor) -> Tensor:
        """x [T, K] -> silu(gate) * up * out_scale, [T, N / 2] in x's dtype; the product is formed in float32."""
        out = x.new_empty(x.shape[0], self.weight.rows // 2)
        self._launch(x, out, "silu")
        return out

    def argmax(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, K] -> ids [T] int64 and their values [T] float32; ties go to the lowest id. No logits are written."""
        rows, outputs = x.shape[0], self.weight.rows
        tiles = -(-outputs // self.plan.tile(rows)[1].block_n)
        values = x.new_empty(tiles, rows, dtype=torch.float32)
        indices = x.new_empty(tiles, rows, dtype=torch.int32)
        self._launch(x, values, "argmax", indices)
        ids = x.new_empty(rows, dtype=torch.int64)
        best = x.new_empty(rows, dtype=torch.float32)
        argmax_tiles[(rows,)](
            values, indices, ids, best, rows, tiles, outputs, BLOCK=ARGMAX_BLOCK, **launch_options(x.device, 4)
        )
        return ids, best

    def _launch(self, x: Tensor, out: Tensor, epilogue: str, index: Tensor | None = None) -> None:
        weight = self.weight
        if x.dtype != weight.compute_dtype or x.shape[1] != weight.depth or x.stride(1) != 1:
            raise ValueError(
                f"x is {list(x.shape)} {x.dtype} with strides {x.stride()}; "
                f"needed: rows of {weight.depth} contiguous {weight.compute_dtype}"
            )
        width, tile = self.plan.tile(x.shape[0])
        if (self.plan.parts or tile.stream) and (x.stride(0) % 8 or x.data_ptr() % 16):
            raise ValueError(f"x starts at {x.data_ptr()} with a stride of {x.stride(0)}: needed are runs of 16 bytes")
        if self.gated != (epilogue == "silu"):
            raise ValueError(f"a {'gate|up' if self.gated else 'plain'} matrix has no {epilogue} epilogue")
        depth = self.plan.split_depth if epilogue == "partial" else weight.depth
        outputs = weight.rows // 2 if self.gated else weight.rows
        features = tile.block_n // 2 if self.gated else tile.block_n
        grid = (-(-x.shape[0] // width), -(-outputs // features), -(-weight.depth // depth))
        # Unused pointers are given a tensor of the right kind, never read.
        given = (
            x,
            weight.data,
            weight.scale if weight.scale is not None else weight.data,
            self.bias if self.bias is not None else weight.data,
            out,
            index if index is not None else out,
            x.shape[0],
            outputs,
            weight.depth,
            x.stride(0),
            -(-depth // tile.block_k),
            self.out_scale,
        )
        shape = {
            "FORMAT": weight.weight_format,
            "GROUP": weight.group,
            "EPILOGUE": epilogue,
            "HAS_BIAS": self.bias is not None,
            "BLOCK_N": tile.block_n,
            "BLOCK_K": tile.block_k,
            "BLOCK_R": width,
            "ASM": x.device.type == "cuda",
        }
        options = launch_options(x.device, tile.warps, tile.stages, tile.layouts, tile.registers)
        if self.plan.parts or tile.stream:
            few_rows_gemm[grid](
                *given,
                **shape,
                BLOCKS=weight.in_blocks,
                PARTS=max(1, self.plan.parts),
                WARPS=tile.warps,
                RING=tile.ring,
                SHARED=tile.shared and x.device.type == "cuda",
                EARLY=tile.early,
                LEAD=tile.lead,
                **options,
            )
        else:
            skinny_gemm[grid](
                *given,
                **shape,
                MASK_K=weight.depth % tile.block_k != 0,
                PREFETCH=tile.prefetch,
                AHEAD=tile.ahead,
                LEAD=tile.lead,
                **options,
            )


@cache
def streams_agree(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether few rows have the bits of many on this card and with this Triton, tried once on a small matrix with
    numbers of all sizes."""
    return same_bits(log, "16-bit weights are not streamed", "that gives", lambda: _streamed_and_not(device, dtype))


def _streamed_and_not(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """Parts of the same rows by the two ways, of each width that is streamed."""
    generator = torch.Generator().manual_seed(0)
    (rows, depth), count = _TRIED, STREAM_ROWS[-1]

    def wild(*shape: int) -> Tensor:
        powers = torch.randint(-6, 7, shape, generator=generator)
        return (torch.randn(shape, generator=generator) * 2.0**powers).to(device, dtype)

    weight, x = PackedWeight("dense", wild(rows, depth), None, 0, 0, rows, depth, dtype), wild(count, depth)
    plan = gemm_plan("dense", 0, rows, depth, capability(device), split=False)
    want = SkinnyLinear(weight, replace(plan, tiles=plan.without_streams.tiles[1:])).partial(x)
    for width, tile in zip(STREAM_ROWS, STREAM_TILES, strict=True):
        yield SkinnyLinear(weight, replace(plan, tiles=((width, tile),))).partial(x[:width]), want[:, :width]


def widened(weight: PackedWeight) -> Tensor:
    """The matrix [N, K] in its compute dtype: itself where it is dense, else a new tensor. Twin: ``dequantize``."""
    if weight.weight_format == "dense":
        return weight.data
    assert weight.scale is not None
    out = weight.data.new_empty(weight.rows, weight.depth, dtype=weight.compute_dtype)
    block_k = weight.pack or WIDEN_BLOCK_K
    widen_matrix[(-(-weight.rows // WIDEN_ROWS), -(-weight.depth // block_k))](
        weight.data,
        weight.scale,
        out,
        weight.rows,
        weight.depth,
        FORMAT=weight.weight_format,
        GROUP=weight.group,
        BLOCKS=weight.in_blocks,
        BLOCK_N=WIDEN_ROWS,
        BLOCK_K=block_k,
        ASM=out.device.type == "cuda",
        **launch_options(out.device, 4),
    )
    return out
