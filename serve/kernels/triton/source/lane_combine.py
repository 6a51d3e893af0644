"""Device code that joins the splits of attention, a warp a head: nothing to exchange, so no shared memory and no
barrier. Tensors have a last axis of one element a thread (see ``lanes``); plain loads would be given layouts of their
own, so these are assembly. Knows no pages.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from serve.kernels.triton.source.launch import admit_next, await_inputs
from serve.kernels.triton.source.widen import rounded


@triton.jit
def load_pair(at, wanted, ASM: tl.constexpr):
    """Peak and total at each pointer; those of nothing seen where not wanted."""
    if ASM:
        a, b = tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $3, 0; mov.b32 $0, 0xff800000; mov.b32 $1, 0; "
            "@p ld.global.v2.f32 {$0, $1}, [$2]; }",
            "=&f,=&f,l,r", [at.to(tl.int64), wanted], dtype=(tl.float32, tl.float32), is_pure=False, pack=1,
        )  # fmt: skip
        return a, b
    else:
        mask = wanted != 0
        return tl.load(at, mask=mask, other=float("-inf")), tl.load(at + 1, mask=mask, other=0.0)


@triton.jit
def load_four(at, wanted, ASM: tl.constexpr):
    """Four float32 from each pointer, zeros where not wanted."""
    if ASM:
        a, b, c, d = tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; "
            "@p ld.global.v4.f32 {$0, $1, $2, $3}, [$4]; }",
            "=&f,=&f,=&f,=&f,l,r", [at.to(tl.int64), wanted],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=False, pack=1,
        )  # fmt: skip
        return a, b, c, d
    else:
        mask = wanted != 0
        return (
            tl.load(at, mask=mask, other=0.0),
            tl.load(at + 1, mask=mask, other=0.0),
            tl.load(at + 2, mask=mask, other=0.0),
            tl.load(at + 3, mask=mask, other=0.0),
        )


@triton.jit
def store_words(at, a, b, wanted, ASM: tl.constexpr):
    """Two int32 words side by side to each pointer that is wanted."""
    if ASM:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $4, 0; @p st.global.v2.b32 [$1], {$2, $3}; mov.b32 $0, 0; }",
            "=r,l,r,r,r", [at.to(tl.int64), a, b, wanted], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.store(at, a, mask=wanted != 0)
        tl.store(at + 1, b, mask=wanted != 0)


@triton.jit(do_not_specialize=["splits"])
def lane_combine(
    part_ptr, stat_ptr, row_ptr, visible_ptr, out_ptr, splits,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, SPLIT: tl.constexpr, BLOCK_S: tl.constexpr, WARPS: tl.constexpr,
    ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As ``combine_splits``, for heads of 128: one warp a (place, head), four dimensions a thread. Grid: (places,
    heads / WARPS)."""
    tl.static_assert(HEAD_DIM == 128)
    admit_next(PDL)
    thread = tl.arange(0, 32 * WARPS)[None, :]
    s = tl.arange(0, BLOCK_S)[:, None]
    # Where a row stands and what it sees is older than the step's embedding, and need not be waited for.
    row = tl.load(row_ptr + tl.program_id(0), cache_modifier=".cg")
    count = tl.cdiv(tl.load(visible_ptr + row, cache_modifier=".cg").to(tl.int32), SPLIT)
    head = tl.program_id(1) * WARPS + thread // 32
    inside = (head < HEADS).to(tl.int32)
    line = (tl.program_id(0).to(tl.int64) * HEADS + head) * splits
    await_inputs(PDL)
    peak = tl.full((1, 32 * WARPS), float("-inf"), dtype=tl.float32)
    total = tl.zeros((1, 32 * WARPS), dtype=tl.float32)
    s0 = total
    s1 = total
    s2 = total
    s3 = total
    for first in range(0, count, BLOCK_S):
        wanted = (first + s < count).to(tl.int32) * inside
        at = line + first + s
        tops, sums = load_pair(stat_ptr + at * 2, wanted, ASM)
        a, b, c, d = load_four(part_ptr + at * HEAD_DIM + thread % 32 * 4, wanted, ASM)
        top = tl.maximum(peak, tl.max(tops, axis=0)[None, :])
        # Whoever sees a split has seen something; zero stands in for the peak of padding.
        base = tl.where(top == float("-inf"), 0.0, top)
        weight = tl.exp2(tops - base)
        shrink = tl.exp2(peak - base)
        total = total * shrink + tl.sum(sums * weight, axis=0)[None, :]
        s0 = s0 * shrink + tl.sum(a * weight, axis=0)[None, :]
        s1 = s1 * shrink + tl.sum(b * weight, axis=0)[None, :]
        s2 = s2 * shrink + tl.sum(c * weight, axis=0)[None, :]
        s3 = s3 * shrink + tl.sum(d * weight, axis=0)[None, :]
        peak = top
    total = tl.where(total == 0, 1.0, total)
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    low = rounded(s0 / total, s1 / total, DTYPE, ASM)
    high = rounded(s2 / total, s3 / total, DTYPE, ASM)
    place = (row * HEADS + head) * (HEAD_DIM // 2) + thread % 32 * 2
    store_words(out_ptr.to(tl.pointer_type(tl.int32)) + place, low, high, inside, ASM)
