"""Device code of y = x W^T for few rows, over 16-bit, int8 and int4 weights. Knows tiles, not layers.

The weight is the left operand, so that output features fill the large side of the tensor-core tile and a few rows of x
its small side: one row costs no more than eight, and dequantised weights can stay in registers. What fixes a row's
bits is the K tile, its order and the number of K splits, and none of them depends on the rows.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from serve.kernels.triton.source.launch import admit_next, admit_next_when, await_inputs, fetch_ahead
from serve.kernels.triton.source.rows import silu_times, to_half
from serve.kernels.triton.source.widen import widen_int8, widen_nibbles


@triton.jit
def load_rows(x_ptr, x_offset, first, depth, row_mask, COUNT: tl.constexpr, MASK_K: tl.constexpr):
    """[COUNT, BLOCK_R] of x^T from K position ``first``; zeros past the rows and past the depth."""
    k = first + tl.arange(0, COUNT)
    mask = row_mask[None, :]
    if MASK_K:
        mask = mask & (k < depth)[:, None]
    return tl.load(x_ptr + x_offset[None, :] + k[:, None], mask=mask, other=0.0)


@triton.jit
def load_weight(w_ptr, w_offset, first, depth, COUNT: tl.constexpr, MASK_K: tl.constexpr, WORDS: tl.constexpr):
    """[BLOCK_N, COUNT] stored elements of W from stored position ``first`` along K; WORDS: four bytes to an int32
    [BLOCK_N, COUNT / 4]."""
    if WORDS:
        k = first // 4 + tl.arange(0, COUNT // 4)
        place = w_ptr.to(tl.pointer_type(tl.int32)) + w_offset[:, None] // 4 + k[None, :]
        mask = (k < depth // 4)[None, :]
    else:
        k = first + tl.arange(0, COUNT)
        place = w_ptr + w_offset[:, None] + k[None, :]
        mask = (k < depth)[None, :]
    return tl.load(place, mask=mask, other=0) if MASK_K else tl.load(place)


@triton.jit
def load_int4(x_ptr, x_offset, w_ptr, w_offset, terms_ptr, tile, depth, stride, row_mask,
              GROUP: tl.constexpr, BLOCK_K: tl.constexpr, WORDS: tl.constexpr):  # fmt: skip
    """One packed tile: bytes whose low nibbles are its first BLOCK_K / 2 weights along K, high nibbles the others; the
    x of both halves and the terms (scale and zero) of their groups."""
    HALF: tl.constexpr = BLOCK_K // 2
    w = load_weight(w_ptr, w_offset, tile * HALF, depth, HALF, False, WORDS)
    low = load_rows(x_ptr, x_offset, tile * BLOCK_K, depth, row_mask, HALF, False)
    high = load_rows(x_ptr, x_offset, tile * BLOCK_K + HALF, depth, row_mask, HALF, False)
    first = tl.load(terms_ptr + tile * BLOCK_K // GROUP * stride)
    if GROUP % BLOCK_K == 0:
        second = first
    else:
        second = tl.load(terms_ptr + (tile * BLOCK_K + HALF) // GROUP * stride)
    return w, low, high, first, second


@triton.jit
def add_int4(acc, w, low, high, first, second, ASM: tl.constexpr):
    """acc + one tile. The scales are in the weights: then their loads run ahead like those of the weights."""
    acc = tl.dot(widen_nibbles(w, first, low.dtype, False, ASM), low, acc)
    return tl.dot(widen_nibbles(w, second, high.dtype, True, ASM), high, acc)


@triton.jit
def add_group(acc, w, x, scale, ASM: tl.constexpr):
    """acc + one tile that lies in one scale group."""
    return acc + tl.dot(widen_int8(w, x.dtype, ASM), x) * scale.to(tl.float32)[:, None]


@triton.jit
def add_tile(acc, w, x, FORMAT: tl.constexpr, ASM: tl.constexpr):
    """acc + one tile of a matrix with at most a scale a row, which is applied at the end."""
    if FORMAT == "int8":
        return tl.dot(widen_int8(w, x.dtype, ASM), x, acc)
    else:
        return tl.dot(w.to(x.dtype), x, acc)


@triton.jit
def weight_rows(i, tile, outputs, GATED: tl.constexpr, BLOCK_N: tl.constexpr):
    """The weight's rows of rows i of a tile of features. Gate and up of a feature lie eight tile rows apart, where a
    tensor-core accumulator keeps them in one thread."""
    if GATED:
        feature = tile * (BLOCK_N // 2) + (i // 16) * 8 + i % 8
        return tl.minimum(feature, outputs - 1) + (i // 8) % 2 * outputs
    else:
        return tl.minimum(tile * BLOCK_N + i, outputs - 1)


@triton.jit(do_not_specialize=["rows", "split_tiles"])
def skinny_gemm(
    x_ptr, w_ptr, scale_ptr, bias_ptr, out_ptr, index_ptr,
    rows, outputs, depth, x_stride, split_tiles, out_scale,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, EPILOGUE: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
    MASK_K: tl.constexpr, PREFETCH: tl.constexpr, AHEAD: tl.constexpr, LEAD: tl.constexpr,
    ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """FORMAT: dense, int8 (a scale per output), int8_group, int4_halves. EPILOGUE: store, partial (float32 sums
    of one K split), residual (out += y), silu (gate|up in, silu(gate) * up out), argmax (best value and index of this
    tile a row). ``outputs`` counts results: half the weight's rows for silu; ``split_tiles`` K tiles make one split.
    With PDL the first AHEAD bytes of each weight row of the split are on their way before x is there, and where weights
    have 16 bits the next kernel is let in LEAD tiles before the end. ASM: not interpreted.
    Grid: (row tiles, output tiles, splits of K)."""
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    tile_n = tl.program_id(1)
    split = tl.program_id(2)
    row_mask = row < rows
    x_offset = row.to(tl.int64) * x_stride
    GATED: tl.constexpr = EPILOGUE == "silu"
    feature = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    source = weight_rows(tl.arange(0, BLOCK_N), tile_n, outputs, GATED, BLOCK_N)
    stride = outputs * 2 if GATED else outputs

    begin = split * split_tiles
    end = tl.minimum(begin + split_tiles, tl.cdiv(depth, BLOCK_K))
    if PDL and AHEAD > 0:
        PER_BYTE: tl.constexpr = 2 if FORMAT == "int4_halves" else 1
        stored = depth // PER_BYTE
        first = begin * (BLOCK_K // PER_BYTE)
        fetch_ahead(w_ptr, source.to(tl.int64) * stored, first, stored, AHEAD)
    await_inputs(PDL)
    acc = tl.zeros((BLOCK_N, BLOCK_R), dtype=tl.float32)
    if FORMAT == "int4_halves":
        w_offset = source.to(tl.int64) * (depth // 2)
        terms = scale_ptr + source
        if PREFETCH:
            w, low, high, t0, t1 = load_int4(
                x_ptr, x_offset, w_ptr, w_offset, terms, begin, depth, stride, row_mask, GROUP, BLOCK_K, True
            )
            for tile in range(begin + 1, end):
                nw, nlow, nhigh, n0, n1 = load_int4(
                    x_ptr, x_offset, w_ptr, w_offset, terms, tile, depth, stride, row_mask, GROUP, BLOCK_K, True
                )
                acc = add_int4(acc, w, low, high, t0, t1, ASM)
                w, low, high, t0, t1 = nw, nlow, nhigh, n0, n1
            acc = add_int4(acc, w, low, high, t0, t1, ASM)
        else:
            for tile in range(begin, end):
                w, low, high, t0, t1 = load_int4(
                    x_ptr, x_offset, w_ptr, w_offset, terms, tile, depth, stride, row_mask, GROUP, BLOCK_K, False
                )
                acc = add_int4(acc, w, low, high, t0, t1, ASM)
    elif FORMAT == "int8_group":
        w_offset = source.to(tl.int64) * depth
        scales = scale_ptr + source
        if PREFETCH:
            w = load_weight(w_ptr, w_offset, begin * BLOCK_K, depth, BLOCK_K, MASK_K, True)
            x = load_rows(x_ptr, x_offset, begin * BLOCK_K, depth, row_mask, BLOCK_K, MASK_K)
            s = tl.load(scales + begin * BLOCK_K // GROUP * stride)
            for tile in range(begin + 1, end):
                nw = load_weight(w_ptr, w_offset, tile * BLOCK_K, depth, BLOCK_K, MASK_K, True)
                nx = load_rows(x_ptr, x_offset, tile * BLOCK_K, depth, row_mask, BLOCK_K, MASK_K)
                ns = tl.load(scales + tile * BLOCK_K // GROUP * stride)
                acc = add_group(acc, w, x, s, ASM)
                w, x, s = nw, nx, ns
            acc = add_group(acc, w, x, s, ASM)
        else:
            for tile in range(begin, end):
                w = load_weight(w_ptr, w_offset, tile * BLOCK_K, depth, BLOCK_K, MASK_K, False)
                x = load_rows(x_ptr, x_offset, tile * BLOCK_K, depth, row_mask, BLOCK_K, MASK_K)
                s = tl.load(scales + tile * BLOCK_K // GROUP * stride)
                acc = add_group(acc, w, x, s, ASM)
    else:
        w_offset = source.to(tl.int64) * depth
        if PREFETCH:
            w = load_weight(w_ptr, w_offset, begin * BLOCK_K, depth, BLOCK_K, MASK_K, FORMAT == "int8")
            x = load_rows(x_ptr, x_offset, begin * BLOCK_K, depth, row_mask, BLOCK_K, MASK_K)
            for tile in range(begin + 1, end):
                nw = load_weight(w_ptr, w_offset, tile * BLOCK_K, depth, BLOCK_K, MASK_K, FORMAT == "int8")
                nx = load_rows(x_ptr, x_offset, tile * BLOCK_K, depth, row_mask, BLOCK_K, MASK_K)
                acc = add_tile(acc, w, x, FORMAT, ASM)
                w, x = nw, nx
            acc = add_tile(acc, w, x, FORMAT, ASM)
        else:
            for tile in range(begin, end):
                w = load_weight(w_ptr, w_offset, tile * BLOCK_K, depth, BLOCK_K, MASK_K, False)
                x = load_rows(x_ptr, x_offset, tile * BLOCK_K, depth, row_mask, BLOCK_K, MASK_K)
                acc = add_tile(acc, w, x, FORMAT, ASM)
                if LEAD > 0:
                    admit_next_when(tile == end - LEAD, PDL)
        if FORMAT == "int8":
            acc *= tl.load(scale_ptr + source)[:, None]

    admit_next(PDL)
    if EPILOGUE != "silu":
        acc *= out_scale
    if HAS_BIAS:
        bias = tl.load(bias_ptr + source)
        acc += tl.where(split == 0, bias, 0.0)[:, None]

    if EPILOGUE == "silu":
        HALF: tl.constexpr = BLOCK_N // 2
        pairs = tl.permute(tl.reshape(acc, (HALF // 8, 2, 8, BLOCK_R)), (0, 2, 3, 1))
        gate, up = tl.split(pairs)
        gated = silu_times(gate, up) * out_scale
        gated = tl.reshape(gated, (HALF, BLOCK_R))
        feature = tile_n * HALF + tl.arange(0, HALF)
        place = row.to(tl.int64)[None, :] * outputs + feature[:, None]
        mask = row_mask[None, :] & (feature < outputs)[:, None]
        tl.store(out_ptr + place, to_half(gated, out_ptr), mask=mask)
    elif EPILOGUE == "argmax":
        value = tl.where((feature < outputs)[:, None], acc, float("-inf"))
        best = tl.max(value, axis=0)
        index = tl.min(tl.where(value == best[None, :], feature[:, None], outputs), axis=0)
        place = tile_n * rows + row
        tl.store(out_ptr + place, best, mask=row_mask)
        tl.store(index_ptr + place, index, mask=row_mask)
    else:
        place = (split * rows + row).to(tl.int64)[None, :] * outputs + feature[:, None]
        mask = row_mask[None, :] & (feature < outputs)[:, None]
        if EPILOGUE == "residual":
            acc += tl.load(out_ptr + place, mask=mask, other=0.0)
        tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "tiles"])
def argmax_tiles(value_ptr, index_ptr, id_ptr, best_ptr, rows, tiles, outputs, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Second pass of the argmax epilogue: one program a row over [tiles, rows]; ties go to the lowest id."""
    admit_next(PDL)
    await_inputs(PDL)
    row = tl.program_id(0)
    best = float("-inf")
    index = outputs
    for first in range(0, tiles, BLOCK):
        tile = first + tl.arange(0, BLOCK)
        mask = tile < tiles
        value = tl.load(value_ptr + tile * rows + row, mask=mask, other=float("-inf"))
        feature = tl.load(index_ptr + tile * rows + row, mask=mask, other=outputs)
        top = tl.max(value, axis=0)
        lowest = tl.min(tl.where(value == top, feature, outputs), axis=0)
        index = tl.where(top > best, lowest, tl.where(top == best, tl.minimum(index, lowest), index))
        best = tl.maximum(top, best)
    tl.store(id_ptr + row, tl.minimum(index, outputs - 1).to(tl.int64))
    tl.store(best_ptr + row, best)
