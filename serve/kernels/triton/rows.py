"""Launches the row kernels: add + RMS norm, head norm + rotary + K/V write, drafter context write.

Each call names its eager twin. Knows shapes, not models.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from serve.kernels.triton.card import launch_options
from serve.kernels.triton.source import norm as norm_source
from serve.kernels.triton.source import rows as source
from serve.kernels.triton.tiles import EMBED_BLOCK, HEADS_PER_PROGRAM, SILU_BLOCK, NormPlan


def power_of_two(size: int) -> int:
    """The smallest power of two that is >= size (Triton's ranges have such lengths)."""
    return 1 << (size - 1).bit_length()


def add_rms_norm(
    residual: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    eps: float,
    out_dtype: torch.dtype,
    tap: Tensor | None = None,
) -> Tensor:
    """residual [T, D] float32 += delta, in place; returns rms_norm(residual) * weight [T, D] in out_dtype.

    delta [T, D], or [splits, T, D] float32 parts that are added in order, or None. weight [D] float32. tap [T, D]
    (rows may be strided) takes a copy of the new residual. D is a multiple of four, and rows start at multiples of
    16 bytes (of 8 in 16 bits). Twin: ``elementwise.rms_norm(residual + delta.sum(0), weight, eps)``.
    """
    rows, width = residual.shape
    plan = NormPlan.of(width, interpreted=not residual.is_cuda)
    normed = residual.new_empty(rows, width, dtype=out_dtype)
    norm_source.add_rms_norm[(rows,)](
        residual if delta is None else delta,
        residual,
        weight,
        normed,
        residual if tap is None else tap,
        rows * width,
        width if tap is None else tap.stride(0),
        eps,
        WIDTH=width,
        SPLITS=0 if delta is None else 1 if delta.dim() == 2 else delta.shape[0],
        HAS_TAP=tap is not None,
        THREADS=plan.threads,
        CHUNKS=plan.chunks,
        ASM=residual.is_cuda,
        **launch_options(residual.device, plan.threads // 32, registers=plan.registers),
    )
    return normed


def embed_rows(table: Tensor, scale: Tensor | None, token_ids: Tensor) -> Tensor:
    """Rows token_ids [T] int64 of table [N, width] (floats, or int8 with scale [N] float32, also as ``pack.in_blocks``
    leaves it) -> [T, width] float32. Twin: ``table[token_ids].float() * scale[token_ids, None]``."""
    blocks = table.dim() == 4
    rows, width = token_ids.shape[0], table.shape[1] * (table.shape[3] if blocks else 1)
    out = token_ids.new_empty(rows, width, dtype=torch.float32)
    source.embed_rows[(rows, -(-width // EMBED_BLOCK))](
        token_ids,
        table,
        token_ids if scale is None else scale,
        out,
        width,
        SCALED=scale is not None,
        BLOCKS=blocks,
        BLOCK=EMBED_BLOCK,
        **launch_options(out.device, 4),
    )
    return out


def silu_mul(gate_up: Tensor, out_scale: float) -> Tensor:
    """gate_up [T, 2 * I] (gate first) -> silu(gate) * up * out_scale, [T, I] in its dtype, formed in float32 and held
    inside float16's range. Twin: ``elementwise.silu_mul``."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    source.silu_mul[(rows, -(-width // SILU_BLOCK))](
        gate_up, out, width, out_scale, BLOCK=SILU_BLOCK, **launch_options(out.device, 4)
    )
    return out


def qkv_write(
    qkv: Tensor,
    qk_norm: Tensor | None,
    turns: Tensor,
    positions: Tensor,
    slots: Tensor,
    cache: Tensor,
    heads: int,
    eps: float,
    q_dtype: torch.dtype,
    scale: Tensor | None = None,
) -> Tensor:
    """Norms (optional) and rotates q and k of packed qkv, stores k and v in the cache, returns q [T, heads, head_dim].

    qkv [T, (heads + 2 kv_heads) * head_dim], or [splits, ...] float32 parts added in order. qk_norm [heads + kv_heads,
    head_dim] float32. turns [positions, head_dim] float32: cosine and sine of each pair side by side. positions,
    slots [T] int64. cache [pages, kv_heads, 2, page_size, head_dim]; scale [pages, kv_heads, 2, page_size] float32
    of an int8 one. Twin: ``rms_norm``, ``rotate_`` and ``write_kv`` in that order.
    """
    _, kv_heads, _, page_size, head_dim = cache.shape
    rows = qkv.shape[-2]
    every = heads + 2 * kv_heads
    q = qkv.new_empty(rows, heads, head_dim, dtype=q_dtype)
    source.qkv_write[(rows, -(-every // HEADS_PER_PROGRAM))](
        qkv,
        turns if qk_norm is None else qk_norm,
        turns,
        positions,
        slots,
        q,
        cache,
        cache if scale is None else scale,
        rows * every * head_dim,
        eps,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        PAGE=page_size,
        SPLITS=1 if qkv.dim() == 2 else qkv.shape[0],
        HAS_NORM=qk_norm is not None,
        INT8=scale is not None,
        BLOCK_H=HEADS_PER_PROGRAM,
        BLOCK_D=power_of_two(head_dim),
        **launch_options(q.device, 4),
    )
    return q


class ContextWriter:
    """Stores the context K/V of every drafter layer at once: k norm, rotary, write.

    The layers' caches are separate tensors of one shape; their distances from the first are kept on the device.
    """

    def __init__(self, caches: Sequence[Tensor], k_norm: Tensor | None, eps: float) -> None:
        """caches: [pages, kv_heads, 2, page_size, head_dim] a layer, all of one shape and dtype; k_norm [layers,
        head_dim]."""
        first = caches[0]
        if any(cache.shape != first.shape or cache.dtype != first.dtype for cache in caches):
            raise ValueError("the drafter's layers need caches of one shape and dtype")
        distance = [(cache.data_ptr() - first.data_ptr()) // first.element_size() for cache in caches]
        self._caches = tuple(caches)
        self._offsets = torch.tensor(distance, dtype=torch.int64, device=first.device)
        self._k_norm = k_norm
        self._eps = eps

    def __call__(self, kv: Tensor, turns: Tensor, positions: Tensor, slots: Tensor) -> None:
        """kv [T, layers, 2, kv_heads, head_dim] (K then V). Twin, a layer: ``rms_norm`` and ``rotate_`` of K,
        ``write_kv``."""
        cache = self._caches[0]
        _, kv_heads, _, page_size, head_dim = cache.shape
        layers = len(self._caches)
        source.context_write[(kv.shape[0], layers)](
            kv,
            turns if self._k_norm is None else self._k_norm,
            turns,
            positions,
            slots,
            cache,
            self._offsets,
            self._eps,
            LAYERS=layers,
            KV_HEADS=kv_heads,
            HEAD_DIM=head_dim,
            PAGE=page_size,
            HAS_NORM=self._k_norm is not None,
            BLOCK_H=power_of_two(2 * kv_heads),
            BLOCK_D=power_of_two(head_dim),
            **launch_options(kv.device, 4),
        )
