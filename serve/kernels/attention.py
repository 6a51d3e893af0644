"""Paged attention over flat rows of several sequences, each row the same bits in any batch.

What fixes a row's bits: scores are products of one page of K at a time; the softmax runs over a whole number of pages,
and masked positions at its end add exact zeros; the products with V are again one page at a time, summed in page order.
So neither the batch, the length of the other sequences, nor where the pages lie enters a row's arithmetic. Nor does the
number of query rows in one product, from a row floor up that ``tried`` finds on the host at start.

Shared by the target and the block drafter (different head counts, non-causal blocks through ``FlatBatch.visible``).
This file knows no projections, no rotary and no weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from serve.kernels.attention_plan import AttentionPlan, AttentionShape, PlanGroup, build_plan
from serve.model.batch import FlatBatch


@dataclass(frozen=True)
class PagedAttention:
    """Attention of one head geometry over one page size."""

    shape: AttentionShape

    def plan(self, batch: FlatBatch) -> AttentionPlan:
        """What all layers of one step share; build it once a step."""
        return build_plan(batch, self.shape)

    def describe(self) -> str:
        rows = self.shape.row_floor
        return f"{rows} query rows a product" if self.shape.fixed_rows else f"query rows >= {rows}"

    def __call__(self, q: Tensor, layer: Tensor, plan: AttentionPlan) -> Tensor:
        """q [T, heads * head_dim] float32 (rows may be strided), layer a KVCache layer that holds the step's own K/V
        already -> [T, heads * head_dim] in the layer's dtype."""
        parts = [_attend(q, layer, group, self.shape) for group in plan.groups]
        rows = parts[0] if len(parts) == 1 else torch.cat(parts)
        return rows if plan.gather is None else rows.index_select(0, plan.gather)


def _attend(q: Tensor, layer: Tensor, group: PlanGroup, shape: AttentionShape) -> Tensor:
    """One group of entries -> [E * R, heads * head_dim]. Letters: E entries, P pages of the longest entry, n pages of
    all entries, R query rows of an entry, h kv heads, g query heads a kv head, p page size, d head size.

    A decode step runs this once a layer on little data, so what counts is the number of calls: views are few.
    """
    entries, pages, rows, count = group.entries, group.pages, group.rows, group.count
    kv_heads, head_group, head_dim, page = shape.kv_heads, shape.group, shape.head_dim, shape.page_size
    width = rows * head_group
    kv = layer if group.page_ids is None else layer.index_select(0, group.page_ids)
    block = page * head_dim
    start = kv.storage_offset() + group.first_page * kv_heads * 2 * block
    batch = count * kv_heads
    keys = kv.as_strided((batch, head_dim, page), (2 * block, 1, head_dim), start)
    values = kv.as_strided((batch, page, head_dim), (2 * block, head_dim, 1), start + block)

    query = q if group.query_rows is None else q.index_select(0, group.query_rows)  # [E * R, h * g * d]
    if rows > 1:
        query = query.view(entries, rows, kv_heads, head_group * head_dim).transpose(1, 2).flatten(1)
    query = query.expand(count, -1) if group.entry_of_page is None else query.index_select(0, group.entry_of_page)
    query = query.reshape(batch, width, head_dim)
    if query.dtype != layer.dtype:
        query = query.to(layer.dtype)

    scores = torch.bmm(query, keys)  # [n * h, R * g, p]
    if group.to_rectangle is not None:
        scores = scores.view(count, -1).index_select(0, group.to_rectangle)
    scores = scores.view(entries, pages, kv_heads, rows, head_group, page).permute(0, 2, 3, 4, 1, 5)
    masked = torch.empty_like(scores, dtype=torch.float32, memory_format=torch.contiguous_format)
    torch.add(group.mask, scores, alpha=shape.scale, out=masked)
    weights = torch.softmax(masked.view(entries, kv_heads * width, pages * page), -1)

    weights = weights.view(entries, kv_heads * width, pages, page).transpose(1, 2)
    if group.from_rectangle is not None:
        weights = weights.reshape(entries * pages, -1).index_select(0, group.from_rectangle)
    weights = weights.reshape(batch, width, page)
    if weights.dtype != layer.dtype:
        weights = weights.to(layer.dtype)
    partial = torch.bmm(weights, values)
    if group.from_rectangle is not None:
        rectangle = partial.new_zeros(entries * pages, kv_heads * width * head_dim)
        partial = rectangle.index_copy_(0, group.from_rectangle, partial.view(count, -1))
    mixed = partial.view(entries, pages, kv_heads * width * head_dim).sum(1)
    if rows == 1:
        return mixed
    mixed = mixed.view(entries, kv_heads, rows, head_group * head_dim).transpose(1, 2)
    return mixed.reshape(entries * rows, -1)


def tried(shape: AttentionShape) -> AttentionShape:
    """The shape with the row floor that keeps a row's bits on this host, found by attending with random K/V."""
    for floor in (1, 2, 3, 4, 6, 8, 16):
        candidate = replace(shape, row_floor=floor, fixed_rows=False)
        if _invariant(PagedAttention(candidate)):
            return candidate
    return replace(shape, row_floor=16, fixed_rows=True)


def _invariant(attention: PagedAttention) -> bool:
    """Rows of a 40-row chunk against the same rows in shorter calls, alone and beside another sequence."""
    shape = attention.shape
    generator = torch.Generator().manual_seed(0)
    context, long = 5 * shape.page_size - 3, 40
    pages = -(-context // shape.page_size)
    size = (2 * pages, shape.kv_heads, 2, shape.page_size, shape.head_dim)
    layer = torch.randn(size, generator=generator)
    q = torch.randn(long, shape.heads * shape.head_dim, generator=generator)
    first = context - long
    table, other = tuple(range(pages)), tuple(range(2 * pages - 1, pages - 1, -1))

    def attend(spans: list[tuple[int, int, tuple[int, ...]]]) -> Tensor:
        visible = torch.cat([torch.arange(first + start + 1, first + stop + 1) for start, stop, _ in spans])
        starts = [0]
        for start, stop, _ in spans:
            starts.append(starts[-1] + stop - start)
        batch = FlatBatch(
            token_ids=visible,
            positions=visible - 1,
            slots=visible - 1,
            visible=visible,
            query_starts=tuple(starts),
            page_tables=tuple(span[2] for span in spans),
            logit_rows=visible[:0],
        )
        rows = torch.cat([q[start:stop] for start, stop, _ in spans])
        return attention(rows, layer, attention.plan(batch))

    with torch.inference_mode():
        want = attend([(0, long, table)])
        for count in (1, 2, 3, 5, 8, 16, 17):
            if not torch.equal(attend([(0, count, table)]), want[:count]):
                return False
            if not torch.equal(attend([(0, count, other), (long - count, long, table)])[count:], want[-count:]):
                return False
    return True
