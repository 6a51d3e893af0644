"""Launches prefill attention for a long chunk of one sequence on a Hopper card, by tensor descriptors.

Twin, bit by bit: ``attention.prefill_attention`` with the same tiles. It is tried against it at its first use on a
card, and not used where it differs: so nobody has to know which of the two ran. Knows no plans.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from serve.kernels.triton.card import capability, launch_options
from serve.kernels.triton.source.gathered import gather_pages, gathered_prefill
from serve.kernels.triton.tiles import AttentionTile
from serve.kernels.triton.trial import same_bits

log = logging.getLogger(__name__)

LEAST_ROWS = 2048
"""Shorter chunks, and those behind much context, are not worth the copy of their pages."""
HEAD_DIM = 128
_TRIED = (190, 300)
"""Positions before, and rows of, the chunk that the kernel is tried on."""

Prefill = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, int, Tensor], None]
"""q, cache, tables, spans, visible, longest, seen, out: as ``launch`` takes them."""


def fits(q: Tensor, kv: Tensor, sequences: int, longest: int, seen: int) -> bool:
    """Whether the kernel is for q [T, heads, head_dim] over these pages: a Hopper card, 16-bit K/V, one long chunk that
    is at least half of the ``seen`` positions."""
    return (
        sequences == 1
        and longest >= LEAST_ROWS
        and 2 * longest >= seen
        and q.is_cuda
        and q.shape[2] == HEAD_DIM
        and kv.dtype == q.dtype
        and capability(q.device) == 90
    )


def launch(
    q: Tensor,
    kv: Tensor,
    tables: Tensor,
    spans: Tensor,
    visible: Tensor,
    longest: int,
    seen: int,
    out: Tensor,
    scale: float,
    tile: AttentionTile,
) -> None:
    """q and out [T, heads, head_dim] contiguous, kv [pages, kv_heads, 2, page_size, head_dim], tables [1, pages] and
    spans [1, 3] int32, visible [T] int64, longest: rows of the span, seen: most positions a row sees."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    _, heads, head_dim = q.shape
    _, kv_heads, _, page_size, _ = kv.shape
    unit = max(page_size, tile.block_n)
    positions = -(-seen // unit) * unit
    side_by_side = kv.new_empty(2, kv_heads * positions, head_dim)
    gather_pages[(positions // page_size, kv_heads, 2)](
        kv,
        tables,
        side_by_side,
        seen,
        positions,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        PAGE=page_size,
        **launch_options(q.device, 4),
    )
    k_desc, v_desc = (
        TensorDescriptor(half, [kv_heads * positions, head_dim], [head_dim, 1], [tile.block_n, head_dim])
        for half in side_by_side
    )
    gathered_prefill[(heads, -(-longest // tile.block_m))](
        q,
        k_desc,
        v_desc,
        spans,
        visible,
        out,
        positions,
        scale,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        **launch_options(q.device, tile.warps, tile.stages),
    )


@cache
def agrees(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, page_size: int, own: Prefill, twin: Prefill
) -> bool:
    """Tries ``own`` against ``twin`` on a chunk over scattered pages, with NaN where no row may look."""
    return same_bits(
        log,
        "long prompts are attended to page by page",
        "gathered pages give",
        lambda: [_outcomes(device, dtype, heads, kv_heads, page_size, own, twin)],
    )


def _outcomes(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, page_size: int, own: Prefill, twin: Prefill
) -> tuple[Tensor, Tensor]:
    before, rows = _TRIED
    end = before + rows
    pages = -(-end // page_size)
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    kv, q = randn(pages, kv_heads, 2, page_size, HEAD_DIM), randn(rows, heads, HEAD_DIM)
    table = torch.randperm(pages, generator=generator)
    kv[int(table[-1]), :, :, end - (pages - 1) * page_size :] = torch.nan
    tables = table.int().to(device)[None]
    spans = torch.tensor([[0, rows, 0]], dtype=torch.int32, device=device)
    visible = torch.arange(before + 1, end + 1, device=device)
    outs = torch.full_like(q, torch.nan), torch.full_like(q, torch.nan)
    for prefill, out in zip((own, twin), outs, strict=True):
        prefill(q, kv, tables, spans, visible, rows, end, out)
    return outs
