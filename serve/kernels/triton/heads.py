"""Launches what makes a row's heads of the packed q|k|v product: head norm, rotary, K/V write.

Heads of 128 have a warp each (``source/lane_rows.py``), which relies on how Triton lays out a tensor: at its first use
on a card it is tried against ``rows.qkv_write``, which makes all other heads. Knows shapes, not models.
"""

from __future__ import annotations

import logging
from functools import cache

import torch
from torch import Tensor

from serve.kernels.triton import rows
from serve.kernels.triton.card import capability, launch_options
from serve.kernels.triton.source.lane_rows import lane_write
from serve.kernels.triton.tiles import WRITE_WARPS, lane_card

log = logging.getLogger(__name__)

WRITE_ERROR = 0.01
"""Most that the two ways of a row's heads may differ, relative."""


def write_heads(
    qkv: Tensor,
    qk_norm: Tensor | None,
    turns: Tensor,
    positions: Tensor,
    slots: Tensor,
    kv: Tensor,
    heads: int,
    eps: float,
    q_dtype: torch.dtype,
    scale: Tensor | None = None,
) -> Tensor:
    """As ``rows.qkv_write``; of qkv in parts a warp a head, where the card and the heads allow it."""
    given = (qkv, qk_norm, turns, positions, slots, kv, heads, eps, q_dtype, scale)
    return by_warps(*given) if in_warps(qkv, heads, kv, q_dtype, scale is not None) else rows.qkv_write(*given)


def in_warps(qkv: Tensor, heads: int, kv: Tensor, q_dtype: torch.dtype, codes: bool) -> bool:
    """Whether these heads are made a warp each."""
    return (
        qkv.dim() == 3
        and kv.shape[4] == 128
        and lane_card(capability(qkv.device))
        and (not qkv.is_cuda or warps_agree(qkv.device, q_dtype, heads, kv.shape[1], kv.shape[3], codes))
    )


def by_warps(
    qkv: Tensor,
    qk_norm: Tensor | None,
    turns: Tensor,
    positions: Tensor,
    slots: Tensor,
    kv: Tensor,
    heads: int,
    eps: float,
    q_dtype: torch.dtype,
    scale: Tensor | None = None,
) -> Tensor:
    """As ``write_heads``, for heads of 128 and qkv in parts."""
    parts, count, width = qkv.shape
    q = torch.empty(count, heads, kv.shape[4], dtype=q_dtype, device=qkv.device)
    every = heads + 2 * kv.shape[1]
    lane_write[(count, -(-every // WRITE_WARPS))](
        qkv,
        turns if qk_norm is None else qk_norm,
        turns,
        positions,
        slots,
        q,
        kv,
        kv if scale is None else scale,
        count * width,
        eps,
        HEADS=heads,
        KV_HEADS=kv.shape[1],
        PAGE=kv.shape[3],
        PARTS=parts,
        HAS_NORM=qk_norm is not None,
        INT8=scale is not None,
        WARPS=WRITE_WARPS,
        ASM=qkv.is_cuda,
        **launch_options(qkv.device, WRITE_WARPS),
    )
    return q


@cache
def warps_agree(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, page_size: int, codes: bool
) -> bool:
    """Tries ``by_warps`` against ``rows.qkv_write`` on two rows of random numbers."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    qkv, norm = randn(2, 2, (heads + 2 * kv_heads) * 128), randn(heads + kv_heads, 128)
    turns, positions = randn(8, 128), torch.tensor([5, 2], device=device)
    found: list[list[Tensor]] = []
    try:
        for way in (by_warps, rows.qkv_write):
            kv = torch.zeros(1, kv_heads, 2, page_size, 128, dtype=torch.int8 if codes else dtype, device=device)
            scale = torch.zeros(kv.shape[:-1], device=device) if codes else None
            q = way(qkv, norm, turns, positions, positions, kv, heads, 1e-6, dtype, scale)
            found.append([q.float(), kv.float() * (1 if scale is None else scale[..., None])])
        off = [float((got - want).norm() / want.norm()) for got, want in zip(*found, strict=True)]
    except Exception as error:
        log.warning("heads are not made a warp each: %s: %s", type(error).__name__, str(error)[:200])
        return False
    same = all(one < WRITE_ERROR for one in off)
    if not same:
        log.warning("heads are not made a warp each: q is off by %.1e, K and V by %.1e", *off)
    return same
