"""Weights as the GPU kernels read them: 16-bit, int8 (a scale per row or per group) or int4, and back again.

``dequantize`` is the eager twin: y = x W^T over its matrix is what the skinny GEMM approximates by float32 sums.
Packing runs on the weight's own device, one matrix at a time. Knows matrices, not layers; needs no Triton.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

INT4_GROUPS = (32, 64, 128)
INT8_GROUP = 128


@dataclass(frozen=True)
class PackedWeight:
    """One matrix W [rows, depth] and how it is stored.

    weight_format  dense, int8, int8_group or int4
    data           dense: [rows, depth] 16-bit; int8: [rows, depth] int8; int4: [rows, depth / 2] uint8, where each
                   block of ``pack`` weights is pack / 2 bytes: low nibbles its first half, high nibbles its second
    scale          int8: [rows] float32; int8_group: [depth / group, rows] float32; int4: the same in float16
    zero           int4: [depth / group, rows] uint8; w = (code - zero) * scale
    group, pack    positions of K that share a scale, and that a tile may not cut (0: none)
    compute_dtype  float16 or bfloat16: what rows of x have
    """

    weight_format: str
    data: Tensor
    scale: Tensor | None
    zero: Tensor | None
    group: int
    pack: int
    rows: int
    depth: int
    compute_dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes one pass over the matrix reads."""
        parts = (self.data, self.scale, self.zero)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)


def pack_dense(weight: Tensor, compute_dtype: torch.dtype) -> PackedWeight:
    """weight [N, K] -> stored in compute_dtype."""
    return _packed("dense", weight.to(compute_dtype).contiguous(), None, None, 0, 0, weight, compute_dtype)


def pack_int8(weight: Tensor, compute_dtype: torch.dtype, group: int = 0) -> PackedWeight:
    """Symmetric int8: one scale a row, or (group 128) a row and group. Raises ValueError for another group."""
    if group not in (0, INT8_GROUP):
        raise ValueError(f"int8 group must be 0 (a scale per row) or {INT8_GROUP}, got {group}")
    rows, depth = weight.shape
    if group and depth % group:
        raise ValueError(f"int8 groups of {group} do not divide a depth of {depth}")
    parts = weight.float().view(rows, -1, group or depth)
    scale = parts.abs().amax(2) / 127
    safe = torch.where(scale == 0, torch.ones_like(scale), scale)
    codes = (parts / safe[:, :, None]).round_().clamp_(-127, 127).to(torch.int8).view(rows, depth)
    if not group:
        return _packed("int8", codes, scale[:, 0].contiguous(), None, 0, 0, weight, compute_dtype)
    return _packed("int8_group", codes, scale.t().contiguous(), None, group, group, weight, compute_dtype)


def pack_int4(weight: Tensor, compute_dtype: torch.dtype, group: int = 128) -> PackedWeight:
    """Asymmetric int4 over groups of K from each group's own range. Raises ValueError for a group that does not
    fit."""
    rows, depth = weight.shape
    if group not in INT4_GROUPS:
        raise ValueError(f"int4 group must be one of {INT4_GROUPS}, got {group}")
    if depth % group:
        raise ValueError(f"int4 groups of {group} do not divide a depth of {depth}")
    half = next((size for size in (64, 32) if group % size == 0 and depth % (2 * size) == 0), None)
    if half is None:
        raise ValueError(f"int4 needs a depth that is a multiple of 64, got {depth}")
    parts = weight.float().view(rows, depth // group, group)
    low, high = parts.amin(2).clamp_max(0), parts.amax(2).clamp_min(0)
    # Codes are chosen after the scale's rounding to float16, so that rounding costs nothing.
    scale = ((high - low) / 15).half()
    safe = torch.where(scale == 0, torch.ones_like(scale), scale).float()
    zero = (-low / safe).round_().clamp_(0, 15)
    codes = ((parts / safe[:, :, None]).round_() + zero[:, :, None]).clamp_(0, 15)
    blocks = codes.to(torch.uint8).view(rows, depth // (2 * half), 2, half)
    data = (blocks[:, :, 0] | (blocks[:, :, 1] << 4)).reshape(rows, depth // 2).contiguous()
    zeros = zero.to(torch.uint8).t().contiguous()
    return _packed("int4", data, scale.t().contiguous(), zeros, group, 2 * half, weight, compute_dtype)


def dequantize(packed: PackedWeight) -> Tensor:
    """The float32 matrix [rows, depth] that the stored one stands for."""
    if packed.weight_format == "dense":
        return packed.data.float()
    assert packed.scale is not None
    if packed.weight_format == "int8":
        return packed.data.float() * packed.scale[:, None]
    scale = packed.scale.float().t()[:, :, None]
    if packed.weight_format == "int8_group":
        return (packed.data.float().view(packed.rows, -1, packed.group) * scale).view(packed.rows, packed.depth)
    assert packed.zero is not None
    data = packed.data.view(packed.rows, -1, packed.pack // 2)
    codes = torch.stack((data & 15, data >> 4), 2).view(packed.rows, -1, packed.group).float()
    return ((codes - packed.zero.float().t()[:, :, None]) * scale).view(packed.rows, packed.depth)


def _packed(
    weight_format: str,
    data: Tensor,
    scale: Tensor | None,
    zero: Tensor | None,
    group: int,
    pack: int,
    weight: Tensor,
    compute_dtype: torch.dtype,
) -> PackedWeight:
    if compute_dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"compute dtype must be float16 or bfloat16, got {compute_dtype}")
    rows, depth = weight.shape
    return PackedWeight(weight_format, data, scale, zero, group, pack, rows, depth, compute_dtype)
