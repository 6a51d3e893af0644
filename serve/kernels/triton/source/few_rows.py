"""Device code of y = x W^T for few rows where threads take a tensor-core instruction's operands themselves: the product
by ``lanes`` (stored integers) or ``streams`` (16-bit weights), and what is done with its sums where they lie. Knows
fragments, not layers.

A thread has the sums of features g and g + 8 of a tile for rows 2 t and 2 t + 1 of x (lane 4 g + t of its warp), and
stores them from there: a move to another layout would cost barriers that a product of some microseconds feels.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from serve.kernels.triton.source.gemm import weight_rows
from serve.kernels.triton.source.lane_words import kept_sums, meet
from serve.kernels.triton.source.lanes import lane_product, load_term, ring_of, tile_rows
from serve.kernels.triton.source.launch import admit_next
from serve.kernels.triton.source.rows import silu_times, to_half
from serve.kernels.triton.source.streams import copy_rows, stream_product


@triton.jit
def put_four(at, a, b, c, d, wanted):
    """Four float32 numbers to shared memory from each thread that is wanted."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $6, 0; @p st.shared.v4.f32 [$1], {$2, $3, $4, $5}; mov.b32 $0, 0; }",
        "=r,r,f,f,f,f,r", [at, a, b, c, d, wanted], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def of_both(s, LINES: tl.constexpr):
    """The sum over both parts of a program's warps, for each of them."""
    COUNT: tl.constexpr = s.shape[0] * s.shape[1]
    y = tl.sum(tl.reshape(s, (COUNT, 2, 32 * LINES)), axis=1, keep_dims=True)
    return tl.reshape(tl.broadcast_to(y, (COUNT, 2, 32 * LINES)), s.shape)


@triton.jit
def join_parts(s0, s1, s2, s3, LINES: tl.constexpr, ASM: tl.constexpr):
    """Adds the second part's sums over K to the first one's, which is LINES warps; good in those."""
    if ASM:
        MT: tl.constexpr = s0.shape[0]
        NT: tl.constexpr = s0.shape[1]
        thread = tl.arange(0, 64 * LINES)[None, None, :]
        i = tl.arange(0, MT)[:, None, None] * NT + tl.arange(0, NT)[None, :, None]
        at = ring_of(thread, MT * NT * 512 * LINES) + (i * (32 * LINES) + thread % (32 * LINES)) * 16
        put_four(at, s0, s1, s2, s3, (thread // (32 * LINES)).to(tl.int32))
        meet()
        a, b, c, d = kept_sums(at)
        return s0 + a, s1 + b, s2 + c, s3 + d
    else:
        return of_both(s0, LINES), of_both(s1, LINES), of_both(s2, LINES), of_both(s3, LINES)


@triton.jit
def whole_tile(s0, s1, s2, s3, PARTS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr):
    """The sums as [BLOCK_N, BLOCK_R], those of PARTS parts added."""
    MT: tl.constexpr = s0.shape[0]
    NT: tl.constexpr = s0.shape[1]
    LINES: tl.constexpr = s0.shape[2] // (32 * PARTS)
    sums = tl.join(tl.join(s0, s1), tl.join(s2, s3))
    if PARTS == 2:
        sums = tl.sum(tl.reshape(sums, (MT * NT, 2, 128 * LINES)), axis=1)
    sums = tl.reshape(sums, (MT, NT, LINES, 8, 4, 2, 2))
    return tl.reshape(tl.permute(sums, (0, 2, 6, 3, 1, 4, 5)), (BLOCK_N, BLOCK_R))


@triton.jit
def term_of(ptr, place, ASM: tl.constexpr):
    """A float32 number of the weight's, asked for where it is written: behind the wait it would be waited for."""
    bits = load_term(ptr.to(tl.pointer_type(tl.int32)) + place, (place >= 0).to(tl.int32), ASM)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def this_thread(WARPS: tl.constexpr, ASM: tl.constexpr):
    """[1, 1, threads]: each thread's number, asked for anew: what follows from it holds no register before."""
    thread = tl.arange(0, 32 * WARPS)[None, None, :]
    if ASM:
        return tl.inline_asm_elementwise(
            "mov.u32 $0, %tid.x; // $1", "=r,r", [thread], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        return thread


@triton.jit
def leave(at, y, wanted, ADDED: tl.constexpr, ASM: tl.constexpr):
    """y [MT, NT, threads] float32 to where it belongs, in the pointer's type; ADDED: to what is there (float32; nobody
    else adds to the same). Triton's own store would first move it to where addresses lie side by side in a thread."""
    z = y.to(at.dtype.element_ty)
    if not ASM:
        if ADDED:
            z += tl.load(at, mask=wanted, other=0.0)
        tl.store(at, z, mask=wanted)
    elif at.dtype.element_ty == tl.float32:
        HOW: tl.constexpr = "red.global.add.f32" if ADDED else "st.global.f32"
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p " + HOW + " [$1], $2; mov.b32 $0, 0; }",
            "=r,l,f,r", [at.to(tl.int64), z, wanted.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.static_assert(not ADDED)
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.global.b16 [$1], $2; mov.b32 $0, 0; }", "=r,l,h,r",
            [at.to(tl.int64), z.to(tl.int16, bitcast=True), wanted.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "split_tiles"])
def few_rows_gemm(
    x_ptr, w_ptr, scale_ptr, bias_ptr, out_ptr, index_ptr,
    rows, outputs, depth, x_stride, split_tiles, out_scale,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, BLOCKS: tl.constexpr, EPILOGUE: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, PARTS: tl.constexpr, WARPS: tl.constexpr,
    RING: tl.constexpr, SHARED: tl.constexpr, EARLY: tl.constexpr, LEAD: tl.constexpr,
    ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As ``gemm.skinny_gemm`` (same arguments, epilogues and, for 16-bit weights, bits), over FORMAT dense, int8 (a
    scale per output) or int4. BLOCK_K: positions of K in a unit; split_tiles of them make one split. PARTS: of a split
    among WARPS warps; RING: units on their way to registers or to SHARED memory; BLOCKS: how the weight lies. EARLY:
    the next kernel is let in at once; LEAD: so many units before the end. Grid: (row tiles, output tiles, splits of
    K)."""
    GATED: tl.constexpr = EPILOGUE == "silu"
    LINES: tl.constexpr = WARPS // PARTS
    first_row = tl.program_id(0) * BLOCK_R
    tile = tl.program_id(1)
    split = tl.program_id(2)
    begin = split * split_tiles
    end = tl.minimum(begin + split_tiles, tl.cdiv(depth, BLOCK_K))
    if EARLY:
        admit_next(PDL)
    i = tile_rows(tl.arange(0, 32 * WARPS)[None, None, :], BLOCK_N, LINES)
    low = weight_rows(i, tile, outputs, GATED, BLOCK_N)
    high = low + outputs if GATED else weight_rows(i + 8, tile, outputs, GATED, BLOCK_N)
    if HAS_BIAS and EPILOGUE != "argmax":
        low_bias = tl.where(split == 0, term_of(bias_ptr, low, ASM), 0.0)
        high_bias = tl.where(split == 0, term_of(bias_ptr, high, ASM), 0.0)
    if FORMAT == "dense":
        lines = weight_rows(copy_rows(BLOCK_N, WARPS), tile, outputs, GATED, BLOCK_N)
        s0, s1, s2, s3 = stream_product(
            x_ptr, w_ptr, lines, low, high, first_row, rows, depth, x_stride, begin, end,
            BLOCK_N, BLOCK_R, WARPS, RING, LEAD, ASM, PDL,
        )  # fmt: skip
    else:
        if FORMAT == "int8" and EPILOGUE != "argmax":
            low_scale = term_of(scale_ptr, low, ASM)
            high_scale = term_of(scale_ptr, high, ASM)
        s0, s1, s2, s3 = lane_product(
            x_ptr, w_ptr, scale_ptr, low, high, first_row, rows, depth, x_stride, outputs * 2 if GATED else outputs,
            begin, end, FORMAT, GROUP, BLOCKS, BLOCK_N, BLOCK_R, WARPS, PARTS, RING, SHARED, LEAD, ASM, PDL,
        )  # fmt: skip
    if not EARLY:
        admit_next(PDL)
    if EPILOGUE == "argmax":
        acc = whole_tile(s0, s1, s2, s3, PARTS, BLOCK_N, BLOCK_R)
        feature = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        there = (feature < outputs)[:, None]
        if FORMAT == "int8":
            acc *= tl.load(scale_ptr + tl.minimum(feature, outputs - 1))[:, None]
        acc *= out_scale
        if HAS_BIAS:
            acc += tl.load(bias_ptr + tl.minimum(feature, outputs - 1))[:, None]
        value = tl.where(there, acc, float("-inf"))
        best = tl.max(value, axis=0)
        index = tl.min(tl.where(value == best[None, :], feature[:, None], outputs), axis=0)
        row = first_row + tl.arange(0, BLOCK_R)
        tl.store(out_ptr + (tile * rows + row), best, mask=row < rows)
        tl.store(index_ptr + (tile * rows + row), index, mask=row < rows)
    else:
        if PARTS == 2:
            s0, s1, s2, s3 = join_parts(s0, s1, s2, s3, LINES, ASM)
        if FORMAT == "int8":
            s0 *= low_scale
            s1 *= low_scale
            s2 *= high_scale
            s3 *= high_scale
        if not GATED:
            s0 *= out_scale
            s1 *= out_scale
            s2 *= out_scale
            s3 *= out_scale
        if HAS_BIAS:
            s0 += low_bias
            s1 += low_bias
            s2 += high_bias
            s3 += high_bias
        NT: tl.constexpr = BLOCK_R // 8
        thread = this_thread(WARPS, ASM)
        i = tile_rows(thread, BLOCK_N, LINES)
        row = first_row + 8 * tl.arange(0, NT)[None, :, None] + 2 * (thread % 4)
        first = (row < rows) & (thread < 32 * LINES)
        second = (row + 1 < rows) & (thread < 32 * LINES)
        line = (split * rows + row).to(tl.int64) * outputs
        if GATED:
            feature = tile * (BLOCK_N // 2) + i // 16 * 8 + i % 8
            there = feature < outputs
            y0 = silu_times(s0, s2) * out_scale
            y1 = silu_times(s1, s3) * out_scale
            to = out_ptr + line + feature
            leave(to, to_half(y0, out_ptr), first & there, False, ASM)
            leave(to + outputs, to_half(y1, out_ptr), second & there, False, ASM)
        else:
            ADDED: tl.constexpr = EPILOGUE == "residual"
            feature = tile * BLOCK_N + i
            there = feature < outputs
            beyond = feature + 8 < outputs
            to = out_ptr + line + feature
            leave(to, s0, first & there, ADDED, ASM)
            leave(to + outputs, s1, second & there, ADDED, ASM)
            leave(to + 8, s2, first & beyond, ADDED, ASM)
            leave(to + outputs + 8, s3, second & beyond, ADDED, ASM)
