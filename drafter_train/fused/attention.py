"""Triton attention of many draft blocks: a row sees its sequence's context before its block's anchor, and its block.

Only tiles that hold something visible are read, and the mask is made from the anchors on the way; the dense form
multiplies four times as much and needs a mask per row. Query heads that share a key head are handled by one program,
so nothing is repeated. Scores and sums are float32. This file knows no projections.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 64
LOG2E = 1.4426950408889634


@triton.jit
def _limits(anchors, s, tile, count, B: tl.constexpr, T: tl.constexpr):
    """For the T rows of a tile: how many context rows each sees."""
    block = tile * (T // B) + tl.arange(0, T) // B
    return tl.load(anchors + s * count + block, mask=block < count, other=0).to(tl.int32)


@triton.jit
def _rows_of(anchors, s, tile, count, B: tl.constexpr, T: tl.constexpr):
    """The T block rows of a tile: their numbers, which of them exist, and how many context rows each sees."""
    row = tile * T + tl.arange(0, T)
    return row, row < count * B, _limits(anchors, s, tile, count, B, T)


@triton.jit
def _place(s, rows, row, heads, head, D: tl.constexpr):
    """Where head ``head`` of the given rows of sequence s lies in a tensor [S, rows, heads, D]: [T, D]."""
    return ((s * rows + row[:, None]) * heads + head) * D + tl.arange(0, D)[None]


@triton.jit
def _query_side(q, grad, lse, place, one, there):
    """Of one head of some rows: queries and the output's gradient [T, D], and the log of the softmax's sum [T]."""
    queries = tl.load(q + place, mask=there[:, None], other=0.0)
    slope = tl.load(grad + place, mask=there[:, None], other=0.0)
    return queries, slope, tl.load(lse + one, mask=there, other=0.0)


@triton.jit
def _score_slopes(queries, keys, values, slope, norm, share, seen, scale):
    """Attention weights of rows over keys [T, T], zero where not seen, and the loss's gradient by their scores."""
    weights = tl.where(seen, tl.exp2(tl.dot(queries, tl.trans(keys)) * scale - norm[:, None]), 0.0)
    return weights, weights * (tl.dot(slope, tl.trans(values)) - share[:, None])


@triton.jit
def _forward(
    q,
    k_context,
    v_context,
    k_block,
    v_block,
    anchors,
    out,
    lse,
    width,
    count,
    scale,
    HEADS: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    B: tl.constexpr,
    T: tl.constexpr,
):
    tile, head, s = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    kv = head // (HEADS // KV)
    rows = count * B
    row, exists, limit = _rows_of(anchors, s, tile, count, B, T)
    there = exists[:, None]
    q_place, own_place = _place(s, rows, row, HEADS, head, D), _place(s, rows, row, KV, kv, D)
    queries = tl.load(q + q_place, mask=there, other=0.0)
    keys = tl.load(k_block + own_place, mask=there, other=0.0)
    values = tl.load(v_block + own_place, mask=there, other=0.0)
    same = (row[:, None] // B) == (row[None] // B)
    scores = tl.where(same, tl.dot(queries, tl.trans(keys)) * scale, float("-inf"))
    top = tl.max(scores, axis=1)
    weights = tl.exp2(scores - top[:, None])
    total = tl.sum(weights, axis=1)
    result = tl.dot(weights.to(values.dtype), values)
    for start in range(0, tl.max(limit, axis=0), T):
        column = start + tl.arange(0, T)
        place = _place(s, width, column, KV, kv, D)
        inside = (column < width)[:, None]
        keys = tl.load(k_context + place, mask=inside, other=0.0)
        values = tl.load(v_context + place, mask=inside, other=0.0)
        scores = tl.where(column[None] < limit[:, None], tl.dot(queries, tl.trans(keys)) * scale, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))
        shrink = tl.exp2(top - higher)
        weights = tl.exp2(scores - higher[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        result = result * shrink[:, None] + tl.dot(weights.to(values.dtype), values)
        top = higher
    tl.store(out + q_place, (result / total[:, None]).to(out.dtype.element_ty), mask=there)
    tl.store(lse + (s * rows + row) * HEADS + head, top + tl.log2(total), mask=exists)


@triton.jit
def _backward_rows(
    q,
    k_context,
    v_context,
    k_block,
    v_block,
    anchors,
    out,
    lse,
    grad,
    delta,
    grad_q,
    grad_k_block,
    grad_v_block,
    width,
    count,
    scale,
    natural,
    HEADS: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    B: tl.constexpr,
    T: tl.constexpr,
):
    """Gradients of the queries of one tile and of the same tile's own keys and values."""
    tile, kv, s = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    rows = count * B
    row, exists, limit = _rows_of(anchors, s, tile, count, B, T)
    there = exists[:, None]
    own_place = _place(s, rows, row, KV, kv, D)
    own_keys = tl.load(k_block + own_place, mask=there, other=0.0)
    own_values = tl.load(v_block + own_place, mask=there, other=0.0)
    same = ((row[:, None] // B) == (row[None] // B)) & there
    by_key = tl.zeros((T, D), dtype=tl.float32)
    by_value = tl.zeros((T, D), dtype=tl.float32)
    for group in range(HEADS // KV):
        head = kv * (HEADS // KV) + group
        q_place, one = _place(s, rows, row, HEADS, head, D), (s * rows + row) * HEADS + head
        queries, slope, norm = _query_side(q, grad, lse, q_place, one, exists)
        share = tl.sum(slope.to(tl.float32) * tl.load(out + q_place, mask=there, other=0.0).to(tl.float32), axis=1)
        tl.store(delta + one, share, mask=exists)
        weights, by_score = _score_slopes(queries, own_keys, own_values, slope, norm, share, same, scale)
        by_value += tl.dot(tl.trans(weights.to(slope.dtype)), slope)
        by_key += tl.dot(tl.trans(by_score.to(queries.dtype)), queries)
        by_query = tl.dot(by_score.to(own_keys.dtype), own_keys)
        for start in range(0, tl.max(limit, axis=0), T):
            column = start + tl.arange(0, T)
            place = _place(s, width, column, KV, kv, D)
            inside = (column < width)[:, None]
            keys = tl.load(k_context + place, mask=inside, other=0.0)
            values = tl.load(v_context + place, mask=inside, other=0.0)
            seen = (column[None] < limit[:, None]) & there
            _, by_score = _score_slopes(queries, keys, values, slope, norm, share, seen, scale)
            by_query += tl.dot(by_score.to(keys.dtype), keys)
        tl.store(grad_q + q_place, (by_query * natural).to(grad_q.dtype.element_ty), mask=there)
    tl.store(grad_k_block + own_place, (by_key * natural).to(grad_k_block.dtype.element_ty), mask=there)
    tl.store(grad_v_block + own_place, by_value.to(grad_v_block.dtype.element_ty), mask=there)


@triton.jit
def _backward_context(
    q,
    k_context,
    v_context,
    anchors,
    lse,
    grad,
    delta,
    grad_k_context,
    grad_v_context,
    width,
    count,
    scale,
    natural,
    HEADS: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    B: tl.constexpr,
    T: tl.constexpr,
):
    """Gradients of one tile of context keys and values, over all rows that see it."""
    first, kv, s = tl.program_id(0) * T, tl.program_id(1), tl.program_id(2).to(tl.int64)
    rows = count * B
    column = first + tl.arange(0, T)
    place = _place(s, width, column, KV, kv, D)
    inside = (column < width)[:, None]
    keys = tl.load(k_context + place, mask=inside, other=0.0)
    values = tl.load(v_context + place, mask=inside, other=0.0)
    by_key = tl.zeros((T, D), dtype=tl.float32)
    by_value = tl.zeros((T, D), dtype=tl.float32)
    for tile in range(0, tl.cdiv(rows, T)):
        row, exists, limit = _rows_of(anchors, s, tile, count, B, T)
        if tl.max(limit, axis=0) > first:
            seen = (column[None] < limit[:, None]) & exists[:, None]
            for group in range(HEADS // KV):
                head = kv * (HEADS // KV) + group
                one = (s * rows + row) * HEADS + head
                queries, slope, norm = _query_side(q, grad, lse, _place(s, rows, row, HEADS, head, D), one, exists)
                share = tl.load(delta + one, mask=exists, other=0.0)
                weights, by_score = _score_slopes(queries, keys, values, slope, norm, share, seen, scale)
                by_value += tl.dot(tl.trans(weights.to(slope.dtype)), slope)
                by_key += tl.dot(tl.trans(by_score.to(queries.dtype)), queries)
    tl.store(grad_k_context + place, (by_key * natural).to(grad_k_context.dtype.element_ty), mask=inside)
    tl.store(grad_v_context + place, by_value.to(grad_v_context.dtype.element_ty), mask=inside)


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k_context: Tensor, v_context: Tensor, k_block: Tensor, v_block: Tensor, anchors: Tensor
    ) -> Tensor:
        num_seqs, rows, heads, dim = q.shape
        width, kv_heads = k_context.shape[1:3]
        count = anchors.shape[1]
        size = rows // count
        natural = dim**-0.5
        tensors = [t.contiguous() for t in (q, k_context, v_context, k_block, v_block, anchors)]
        out = torch.empty_like(tensors[0])
        lse = torch.empty(num_seqs, rows, heads, device=q.device, dtype=torch.float32)
        shape = {"HEADS": heads, "KV": kv_heads, "D": dim, "B": size, "T": TILE}
        tiles = triton.cdiv(rows, TILE)
        _forward[(tiles, heads, num_seqs)](*tensors, out, lse, width, count, natural * LOG2E, **shape, num_warps=4)
        ctx.save_for_backward(*tensors, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, k_context, v_context, k_block, v_block, anchors, out, lse = ctx.saved_tensors
        num_seqs, rows, heads, dim = q.shape
        width, kv_heads = k_context.shape[1:3]
        count = anchors.shape[1]
        shape = {"HEADS": heads, "KV": kv_heads, "D": dim, "B": rows // count, "T": TILE}
        natural = dim**-0.5
        grad = grad.contiguous()
        grads = [torch.empty_like(t) for t in (q, k_context, v_context, k_block, v_block)]
        delta = torch.empty_like(lse)
        sizes = (width, count, natural * LOG2E, natural)
        _backward_rows[(triton.cdiv(rows, TILE), kv_heads, num_seqs)](
            q, k_context, v_context, k_block, v_block, anchors, out, lse, grad, delta, grads[0], grads[3], grads[4],
            *sizes, **shape, num_warps=4,
        )  # fmt: skip
        _backward_context[(triton.cdiv(width, TILE), kv_heads, num_seqs)](
            q, k_context, v_context, anchors, lse, grad, delta, grads[1], grads[2], *sizes, **shape, num_warps=4
        )
        return (*grads, None)


def fits(block_size: int, head_dim: int) -> bool:
    """Whether the kernels can take such blocks: whole blocks in a tile, and a head that is a power of two."""
    return TILE % block_size == 0 and head_dim >= 16 and head_dim & (head_dim - 1) == 0


def block_attention(
    q: Tensor, k_context: Tensor, v_context: Tensor, k_block: Tensor, v_block: Tensor, anchors: Tensor
) -> Tensor:
    """q [S, N*B, heads, D], context [S, W, kv_heads, D], own [S, N*B, kv_heads, D], anchors [S, N] -> [S, N*B, heads,
    D]; scale 1/sqrt(D)."""
    out: Tensor = _BlockAttention.apply(q, k_context, v_context, k_block, v_block, anchors)
    return out
