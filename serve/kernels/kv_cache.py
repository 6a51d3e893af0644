"""The paged K/V memory of one model: one tensor a layer, pages on the first axis.

The target and a block drafter each have their own cache and use the same page ids. This file does not know who owns a
page, nor how attention reads it.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

_CACHE_LINE = 64


class KVCache:
    """K and V of every layer. layers[i] is [num_pages, kv_heads, 2, page_size, head_dim]; axis 2 is K, then V.

    That order makes the K (or V) of a list of pages one [pages * kv_heads, page_size, head_dim] view for batched matrix
    products. Memory starts as zeros: masked positions are multiplied by zero, and zero times an unwritten NaN is NaN.
    What a page's last owner left is wiped when the page begins anew (``begun_pages``), for the same reason.
    In int8 every head of every position has a scale: scales[i] is [num_pages, kv_heads, 2, page_size] float32.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if num_pages < 1:
            raise ValueError(f"a KV cache needs at least one page, got {num_pages}")
        if page_size < 16 or page_size % 16:
            raise ValueError(f"page_size must be a positive multiple of 16, got {page_size}")
        shape = (num_pages, kv_heads, 2, page_size, head_dim)
        self.layers = [_zeros(shape, dtype, torch.device(device)) for _ in range(num_layers)]
        scaled = num_layers if dtype == torch.int8 else 0
        self.scales = [_zeros(shape[:-1], torch.float32, torch.device(device)) for _ in range(scaled)]
        self.num_pages = num_pages
        self.page_size = page_size
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.dtype = dtype

    @property
    def capacity(self) -> int:
        """Positions that fit, all sequences together."""
        return self.num_pages * self.page_size

    def scale(self, layer: int) -> Tensor | None:
        """The scales of one layer; None where K and V are kept as floats."""
        return self.scales[layer] if self.scales else None

    @staticmethod
    def bytes_per_page(num_layers: int, page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        scale = torch.float32.itemsize if dtype == torch.int8 else 0
        return num_layers * 2 * page_size * kv_heads * (head_dim * dtype.itemsize + scale)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU the memory is only taken as pages are written (calloc), so a large pool starts at once, and
    begins at a cache line: else every vector read takes two."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    memory = torch.from_numpy(np.zeros(size + _CACHE_LINE, dtype=np.uint8))
    start = -memory.data_ptr() % _CACHE_LINE
    return memory[start : start + size].view(dtype).view(shape)


def write_rows(slots: Tensor, kv_heads: int, page_size: int) -> Tensor:
    """Row numbers, in a layer seen as [rows, head_dim], where K and V of each token go.

    slots [T] int64 -> [T * 2 * kv_heads] int64, ordered token, K/V, head: the order of a packed K|V projection.
    Computed once a step and used by every layer.
    """
    page = torch.div(slots, page_size, rounding_mode="floor")
    offset = slots - page * page_size
    head = torch.arange(kv_heads, device=slots.device)
    half = torch.arange(2, device=slots.device)
    block = (page[:, None, None] * kv_heads + head[None, None, :]) * 2 + half[None, :, None]
    return (block * page_size + offset[:, None, None]).reshape(-1)


def begun_pages(slots: Tensor, page_size: int) -> Tensor:
    """[n] int64: the pages whose first position is among ``slots`` [T] int64. Nothing behind it is valid yet."""
    page = torch.div(slots, page_size, rounding_mode="floor")
    return page[slots == page * page_size]


def write_kv(layer: Tensor, rows: Tensor, kv: Tensor, scale: Tensor | None = None, begun: Tensor | None = None) -> None:
    """Stores kv [T, 2 * kv_heads * head_dim] or [T, 2, kv_heads, head_dim] (rows may be strided) in one cache layer.

    rows is what write_rows gave for the tokens' slots; scale that of an int8 layer; begun what begun_pages gave, for
    attention that multiplies masked positions by zero: these pages are wiped first.
    """
    head_dim = layer.shape[-1]
    if begun is not None and begun.numel():
        layer.index_fill_(0, begun, 0)
    heads = kv.reshape(-1, head_dim)
    if scale is None:
        layer.view(-1, head_dim).index_copy_(0, rows, heads.to(layer.dtype))
        return
    codes, steps = quantize_heads(heads)
    layer.view(-1, head_dim).index_copy_(0, rows, codes)
    scale.view(-1).index_copy_(0, rows, steps)


def quantize_heads(heads: Tensor) -> tuple[Tensor, Tensor]:
    """heads [N, head_dim] -> int8 codes [N, head_dim] and scale [N] float32: the largest becomes 127; zeros stay."""
    heads = heads.float()
    scale = heads.abs().amax(1) / 127
    codes = (heads / torch.where(scale == 0, 1.0, scale)[:, None] + 0.5).floor_()
    return codes.to(torch.int8), scale


def dequantized(layer: Tensor, scale: Tensor) -> Tensor:
    """The float32 K and V that an int8 layer stands for."""
    return layer.float() * scale[..., None]
