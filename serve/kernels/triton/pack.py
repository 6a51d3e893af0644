"""Weights as the GPU kernels read them: 16-bit, int8 (a scale per row or per group) or int4, and back again.

``dequantize`` is the eager twin: y = x W^T over its matrix is what the skinny GEMM approximates by float32 sums.
Packing runs on the weight's own device, one matrix at a time. Knows matrices, not layers; needs no Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from serve.kernels.formats import fitting, stored_format
from serve.kernels.quantize import Factors
from serve.kernels.triton.card import capability
from serve.kernels.triton.tiles import INT4_UNIT, INT8_UNIT, int4_in_lanes, lane_card

INT4_GROUPS = (32, 64, 128)
INT8_GROUP = 128
BLOCK_ROWS, BLOCK_BYTES = 16, 64
SLICE_BYTES = 32 << 20
"""Of a slice of a matrix in float32; packing holds a few such at a time."""
ZERO_OFFSETS = {torch.float16: 1024, torch.bfloat16: 128}
"""The number of each type whose mantissa a four-bit code is put into on its way to a float."""


@dataclass(frozen=True)
class PackedWeight:
    """One matrix W [rows, depth] and how it is stored.

    weight_format  dense, int8, int8_group, int4 or int4_halves
    data           dense: [rows, depth] 16-bit; int8: [rows, depth] int8; int4: [rows, depth / 2] uint8, int32 words of
                   eight codes: word i of a unit of 128 weights has at bits 4 p and 4 p + 16 its weights 32 p + 2 i and
                   the one after; int4_halves: each block of ``pack`` weights is pack / 2 bytes, low nibbles its first
                   half, high nibbles its second
    scale          int8: [rows] float32; int8_group: [depth / group, rows] float32; int4: [depth / group, rows] int32,
                   the scale in compute_dtype in its low half and minus (offset + zero) in its high half, where
                   w = (code - zero) * scale and the offset is ZERO_OFFSETS'
    in_blocks      int8 and int4 may lie in blocks of BLOCK_ROWS rows by BLOCK_BYTES: data is then [rows / BLOCK_ROWS,
                   blocks of a row, BLOCK_ROWS, BLOCK_BYTES]
    group, pack    positions of K that share a scale, and that a tile may not cut (0: none)
    compute_dtype  float16 or bfloat16: what rows of x have
    """

    weight_format: str
    data: Tensor
    scale: Tensor | None
    group: int
    pack: int
    rows: int
    depth: int
    compute_dtype: torch.dtype

    @property
    def kind(self) -> str:
        """What it is to a user, in whichever order its codes lie: "int4 g64"."""
        if self.weight_format == "dense":
            return str(self.compute_dtype).removeprefix("torch.")
        return self.weight_format.removesuffix("_halves") + (f" g{self.group}" if self.group else "")

    @property
    def in_blocks(self) -> bool:
        return self.data.dim() == 4

    @property
    def nbytes(self) -> int:
        """Bytes one pass over the matrix reads."""
        parts = (self.data, self.scale)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)


def pack_dense(weight: Tensor, compute_dtype: torch.dtype) -> PackedWeight:
    """weight [N, K] -> stored in compute_dtype."""
    return _packed("dense", weight.to(compute_dtype).contiguous(), None, 0, 0, weight, compute_dtype)


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
        return _packed("int8", codes, scale[:, 0].contiguous(), 0, 0, weight, compute_dtype)
    return _packed("int8_group", codes, scale.t().contiguous(), group, group, weight, compute_dtype)


def pack_int4(weight: Tensor, compute_dtype: torch.dtype, group: int = 128, *, halves: bool = False) -> PackedWeight:
    """Asymmetric int4 over groups of K from each group's own range. halves: in the order of int4_halves also where
    ``int4_in_lanes`` would have the other. Raises ValueError for a group that does not fit."""
    rows, depth = weight.shape
    if group not in INT4_GROUPS:
        raise ValueError(f"int4 group must be one of {INT4_GROUPS}, got {group}")
    if depth % group:
        raise ValueError(f"int4 groups of {group} do not divide a depth of {depth}")
    halves = halves or not int4_in_lanes(group, depth, capability(weight.device))
    half = next((size for size in (64, 32) if group % size == 0 and depth % (2 * size) == 0), None)
    if half is None:
        raise ValueError(f"int4 needs a depth that is a multiple of 64, got {depth}")
    parts = weight.float().view(rows, depth // group, group)
    low, high = parts.amin(2).clamp_max(0), parts.amax(2).clamp_min(0)
    # Codes are chosen after the scale's rounding to 16 bits, so that rounding costs nothing.
    scale = ((high - low) / 15).to(compute_dtype)
    safe = torch.where(scale == 0, torch.ones_like(scale), scale).float()
    zero = (-low / safe).round_().clamp_(0, 15)
    codes = ((parts / safe[:, :, None]).round_() + zero[:, :, None]).clamp_(0, 15)
    if halves:
        blocks = codes.to(torch.uint8).view(rows, depth // (2 * half), 2, half)
        data = (blocks[:, :, 0] | (blocks[:, :, 1] << 4)).reshape(rows, depth // 2).contiguous()
    else:
        units = codes.to(torch.int32).view(rows, depth // INT4_UNIT, 4, 16, 2)
        data = (units << _places(codes.device)).sum((2, 4), dtype=torch.int32).view(rows, depth // 8).view(torch.uint8)
    less = (-ZERO_OFFSETS[compute_dtype] - zero).to(compute_dtype)
    # Little-endian: the first of two 16-bit numbers is the word's low half.
    terms = torch.stack((scale.t(), less.t()), 2).contiguous().view(torch.int32).squeeze(2)
    kind, pack = ("int4_halves", 2 * half) if halves else ("int4", INT4_UNIT)
    return _packed(kind, data, terms, group, pack, weight, compute_dtype)


def _places(device: torch.device) -> Tensor:
    """[4, 1, 2]: at which bit of its word a weight lies, by quarter of the unit and by number within its pair."""
    quarter = torch.arange(0, 16, 4, dtype=torch.int32, device=device)
    return quarter[:, None, None] + torch.tensor((0, 16), dtype=torch.int32, device=device)


def in_blocks(packed: PackedWeight) -> PackedWeight:
    """The matrix with its codes in blocks, where threads that multiply for themselves take int8 or int4 ones and its
    rows are whole blocks; else itself. A warp then reads 512 bytes in a row instead of 64 of each of eight rows."""
    lanes = packed.weight_format == "int4" or (packed.weight_format == "int8" and packed.depth % INT8_UNIT == 0)
    if not lanes or packed.rows % BLOCK_ROWS or not lane_card(capability(packed.data.device)):
        return packed
    data = packed.data.view(packed.rows // BLOCK_ROWS, BLOCK_ROWS, -1, BLOCK_BYTES)
    return replace(packed, data=data.transpose(1, 2).contiguous())


def pack_in_slices(
    weight: Tensor, device: torch.device, pack: Callable[[Tensor], PackedWeight], factors: Factors | None = None
) -> PackedWeight:
    """``pack(weight)`` on ``device``, the weight times its factors, a slice of rows at a time, so that what packing
    takes beside its result stays small however large the matrix is. Every row is packed by itself, so the result is
    the same."""
    rows, depth = weight.shape
    step = max(1, SLICE_BYTES // (4 * depth) // BLOCK_ROWS) * BLOCK_ROWS
    whole: PackedWeight | None = None
    for start in range(0, rows, step):
        piece = weight[start : start + step].to(device)
        part = pack(piece if factors is None else factors.applied(piece, start))
        if rows <= step:
            return part
        if whole is None:
            scale = part.scale
            if scale is not None:
                scale = scale.new_empty(rows) if scale.dim() == 1 else scale.new_empty(scale.shape[0], rows)
            lines = rows * part.data.shape[0] // part.rows
            whole = replace(part, data=part.data.new_empty(lines, *part.data.shape[1:]), scale=scale, rows=rows)
        line = start * part.data.shape[0] // part.rows
        whole.data[line : line + part.data.shape[0]] = part.data
        if whole.scale is not None and part.scale is not None:
            whole.scale[..., start : start + step] = part.scale
    if whole is None:
        raise ValueError(f"a matrix needs rows, got shape {list(weight.shape)}")
    return whole


def pack_as(
    weights: str,
    weight: Tensor,
    device: torch.device,
    dtype: torch.dtype,
    factors: Factors | None = None,
    *,
    blocks: bool = False,
) -> PackedWeight:
    """The weight times its factors in the format called ``weights``, for rows of ``dtype``; int4 falls to smaller
    groups, then to int8, where the depth is no multiple. blocks: as ``in_blocks`` leaves it. Raises ValueError for a
    name that is none."""
    form = fitting(stored_format(weights), weight.shape[1])
    pack: Callable[[Tensor], PackedWeight]
    if form.integer:
        kind = pack_int4 if form.bits == 4 else pack_int8
        in_rows = partial(kind, compute_dtype=dtype, group=form.group)
        whole = blocks and weight.shape[0] % BLOCK_ROWS == 0
        pack = (lambda part: in_blocks(in_rows(part))) if whole else in_rows
    else:
        pack = partial(pack_dense, compute_dtype=dtype)
    return pack_in_slices(weight, device, pack, factors)


def rows_of(packed: PackedWeight, start: int, stop: int) -> PackedWeight:
    """Rows start .. stop (cut at the end; whole blocks of a matrix that lies in such) of the matrix as views."""
    if packed.in_blocks and (start % BLOCK_ROWS or (stop % BLOCK_ROWS and stop < packed.rows)):
        raise ValueError(f"rows {start} .. {stop} of a matrix in blocks of {BLOCK_ROWS}")
    lines = BLOCK_ROWS if packed.in_blocks else 1
    data = packed.data[start // lines : -(-stop // lines)]
    scale = packed.scale
    if scale is not None:
        scale = scale[start:stop] if scale.dim() == 1 else scale[:, start:stop].contiguous()
    return replace(packed, data=data, scale=scale, rows=data.shape[0] * lines)


def dequantize(packed: PackedWeight) -> Tensor:
    """The float32 matrix [rows, depth] that the stored one stands for."""
    if packed.weight_format == "dense":
        return packed.data.float()
    if packed.in_blocks:
        packed = replace(packed, data=packed.data.transpose(1, 2).reshape(packed.rows, -1))
    assert packed.scale is not None
    if packed.weight_format == "int8":
        return packed.data.float() * packed.scale[:, None]
    if packed.weight_format == "int8_group":
        scale = packed.scale.t()[:, :, None]
        return (packed.data.float().view(packed.rows, -1, packed.group) * scale).view(packed.rows, packed.depth)
    scale, less = packed.scale.unsqueeze(2).view(packed.compute_dtype).float().unbind(2)
    zero = -ZERO_OFFSETS[packed.compute_dtype] - less
    if packed.weight_format == "int4":
        words = packed.data.view(torch.int32).view(packed.rows, -1, 1, INT4_UNIT // 8, 1)
        codes = (words >> _places(words.device)) & 15
    else:
        data = packed.data.view(packed.rows, -1, packed.pack // 2)
        codes = torch.stack((data & 15, data >> 4), 2)
    codes = codes.reshape(packed.rows, -1, packed.group).float()
    return ((codes - zero.t()[:, :, None]) * scale.t()[:, :, None]).view(packed.rows, packed.depth)


def _packed(
    weight_format: str,
    data: Tensor,
    scale: Tensor | None,
    group: int,
    pack: int,
    weight: Tensor,
    compute_dtype: torch.dtype,
) -> PackedWeight:
    if compute_dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"compute dtype must be float16 or bfloat16, got {compute_dtype}")
    rows, depth = weight.shape
    return PackedWeight(weight_format, data, scale, group, pack, rows, depth, compute_dtype)
