"""Launches the kernels of products in 8-bit floats: rows of activations or of a matrix into codes with a scale each.

Each call's eager twin has its name in ``serve.kernels.fp8_rows``, where the product is. Knows rows, not layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from serve.kernels.fp8_rows import FP8, LEAST_SCALE, TOP, product
from serve.kernels.triton.card import launch_options
from serve.kernels.triton.rows import power_of_two
from serve.kernels.triton.source import fp8_rows as source
from serve.kernels.triton.tiles import FP8_BLOCK, FP8_WARPS, norm_warps


@dataclass(frozen=True)
class Codes:
    """Rows as codes [T, K] FP8 with a scale [T] float32 each."""

    codes: Tensor
    scale: Tensor


@dataclass(frozen=True)
class Fp8Matrix:
    """A matrix as rows of codes [N, K]. least: rows that a product has at least, the missing ones zero."""

    rows: Codes
    least: int = 0

    @property
    def nbytes(self) -> int:
        return self.rows.codes.numel() + 4 * self.rows.scale.numel()

    def product(self, x: Codes) -> Tensor:
        """Rows of codes [T, K] -> [T, N] bfloat16."""
        codes, scale = x.codes, x.scale
        rows, missing = codes.shape[0], self.least - codes.shape[0]
        if missing <= 0:
            return product(codes, scale, self.rows.codes, self.rows.scale)
        # As bytes: not every torch pads 8-bit floats.
        codes = F.pad(codes.view(torch.uint8), (0, 0, 0, missing)).view(FP8)
        return product(codes, F.pad(scale, (0, missing)), self.rows.codes, self.rows.scale)[:rows]


def code_rows(x: Tensor) -> Codes:
    """x [T, K] (rows may be strided)."""
    return _launched(x, x.shape[1], gated=False)


def code_gated(gate_up: Tensor) -> Codes:
    """gate_up [T, 2 * I] -> rows of silu(gate) * up, [T, I]."""
    return _launched(gate_up, gate_up.shape[1] // 2, gated=True)


def code_norm(residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float, tap: Tensor | None = None) -> Codes:
    """As ``rows.add_rms_norm``, with delta [T, D] or None; the normed rows as codes."""
    rows, width = residual.shape
    if delta is not None and delta.dim() != 2:
        raise ValueError(f"delta is in parts: {list(delta.shape)}")
    out = _empty(residual, width)
    source.code_norm[(rows,)](
        residual if delta is None else delta,
        residual,
        weight,
        out.codes,
        out.scale,
        residual if tap is None else tap,
        width,
        width if tap is None else tap.stride(0),
        eps,
        TOP=TOP,
        LEAST=LEAST_SCALE,
        HAS_DELTA=delta is not None,
        HAS_TAP=tap is not None,
        BLOCK=power_of_two(width),
        CARD=residual.is_cuda,
        **launch_options(residual.device, norm_warps(width)),
    )
    return out


def _launched(x: Tensor, width: int, *, gated: bool) -> Codes:
    out = _empty(x, width)
    source.code_rows[(x.shape[0],)](
        x,
        out.codes,
        out.scale,
        width,
        x.stride(0),
        TOP=TOP,
        LEAST=LEAST_SCALE,
        GATED=gated,
        BLOCK=FP8_BLOCK,
        CARD=x.is_cuda,
        **launch_options(x.device, FP8_WARPS),
    )
    return out


def _empty(like: Tensor, width: int) -> Codes:
    rows = like.shape[0]
    return Codes(like.new_empty(rows, width, dtype=FP8), like.new_empty(rows, dtype=torch.float32))
