"""Device code that turns stored integers into 16-bit floats, exactly: one to two instructions a weight, where a plain
conversion takes a quarter-rate one.

The integer's bits go into the mantissa of a float of known exponent, and that float's offset is taken off again; both
are exact. Stored bytes come one by one [rows, depth] or four to an int32 word [rows, depth / 4]: words stay whole in
the registers that a hand-made prefetch carries. Without ASM (the interpreter) plain arithmetic gives the same values.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from serve.kernels.triton.source.launch import admit_next, await_inputs

# 0x6400 | u is 1024 + u, for u = w + 128; 0xe480 is -1152.
CODES_FP16 = tl.constexpr(
    "{ .reg .b32 u, low, high, one, less; mov.b32 one, 0x3c003c00; mov.b32 less, 0xe480e480; "
    "xor.b32 u, $2, 0x80808080; prmt.b32 low, u, 0x64646464, 0x4140; prmt.b32 high, u, 0x64646464, 0x4342; "
    "fma.rn.f16x2 $0, low, one, less; fma.rn.f16x2 $1, high, one, less; }"
)
# Seven bits of mantissa hold w's low bits: 0x4300 | u is 128 + u. The sign bit makes -128 (0xc300) into -256.
CODES_BF16 = tl.constexpr(
    "{ .reg .b32 low, high, less, more, one; mov.b32 one, 0x3f803f80; "
    "prmt.b32 low, $2, 0, 0x4140; prmt.b32 high, $2, 0, 0x4342; "
    "lop3.b32 less, low, 0x00800080, 0xc300c300, 0xea; lop3.b32 more, high, 0x00800080, 0xc300c300, 0xea; "
    "lop3.b32 low, low, 0x007f007f, 0x43004300, 0xea; lop3.b32 high, high, 0x007f007f, 0x43004300, 0xea; "
    "fma.rn.bf16x2 $0, low, one, less; fma.rn.bf16x2 $1, high, one, more; }"
)

BLOCK_ROWS = tl.constexpr(16)
BLOCK_BYTES = tl.constexpr(64)


@triton.jit
def block_place(row, byte, row_bytes):
    """Where a byte of a row lies if blocks of BLOCK_ROWS rows by BLOCK_BYTES lie one behind another, those of the same
    rows together."""
    block = row // BLOCK_ROWS * row_bytes + byte // BLOCK_BYTES * BLOCK_BYTES
    return block * BLOCK_ROWS + row % BLOCK_ROWS * BLOCK_BYTES + byte % BLOCK_BYTES


@triton.jit
def widen_int8(w, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """int8 codes in -127 .. 127 -> the same numbers in DTYPE (fp16 or bf16), [rows, depth]."""
    if w.dtype == tl.int32:
        if not ASM:
            return unpack_words(w).to(DTYPE)
        else:
            tl.static_assert(DTYPE == tl.float16, "words are for cards without bfloat16")  # noqa: SIM300
            # 0x6400 | u is 1024 + u, for u = w + 128; 0xe480 is -1152.
            a, b, c, d = tl.inline_asm_elementwise(
                """{
                .reg .b32 u, low, high, one, less;
                mov.b32 one, 0x3c003c00;
                mov.b32 less, 0xe480e480;
                xor.b32 u, $4, 0x80808080;
                prmt.b32 low, u, 0x64646464, 0x4140;
                prmt.b32 high, u, 0x64646464, 0x4342;
                fma.rn.f16x2 low, low, one, less;
                fma.rn.f16x2 high, high, one, less;
                mov.b32 {$0, $1}, low;
                mov.b32 {$2, $3}, high;
                }""",
                "=h,=h,=h,=h,r",
                [w],
                dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
                is_pure=True,
                pack=1,
            )
            return in_a_row(a, b, c, d)
    elif not ASM:
        return w.to(DTYPE)
    elif DTYPE == tl.float16:  # noqa: SIM300
        return tl.inline_asm_elementwise(CODES_FP16, "=r,=r,r", [w], dtype=tl.float16, is_pure=True, pack=4)
    else:
        return tl.inline_asm_elementwise(CODES_BF16, "=r,=r,r", [w], dtype=tl.bfloat16, is_pure=True, pack=4)


@triton.jit
def widen_nibbles(w, terms, DTYPE: tl.constexpr, HIGH: tl.constexpr, ASM: tl.constexpr):
    """The low (HIGH: the high) four bits of each byte of w, less the zero, times the scale of their row, in DTYPE
    [rows, depth]. terms [rows] int32: the scale in DTYPE in its low half, minus (offset + zero) in its high half, where
    the offset is the float whose mantissa takes the code: 1024 in fp16, 128 in bf16."""
    scale = (terms & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True)[:, None]
    less = (terms >> 16).to(tl.int16).to(DTYPE, bitcast=True)[:, None]
    if not ASM:
        code = unpack_words(w) if w.dtype == tl.int32 else w
        code = (code >> 4) & 15 if HIGH else code & 15
        offset = 1024.0 if DTYPE == tl.float16 else 128.0  # noqa: SIM300
        return ((code.to(tl.float32) + offset + less.to(tl.float32)) * scale.to(tl.float32)).to(DTYPE)
    elif w.dtype == tl.int32:
        tl.static_assert(DTYPE == tl.float16, "words are for cards without bfloat16")  # noqa: SIM300
        return word_nibbles(w, less, scale, "shr.b32 t, $4, 4;" if HIGH else "mov.b32 t, $4;")
    elif DTYPE == tl.float16:  # noqa: SIM300
        return byte_nibbles(
            w, less, scale, "shr.b32 t, $2, 4;" if HIGH else "mov.b32 t, $2;", "0x64006400", "0x3c003c00", "f16x2"
        )
    else:
        return byte_nibbles(
            w, less, scale, "shr.b32 t, $2, 4;" if HIGH else "mov.b32 t, $2;", "0x43004300", "0x3f803f80", "bf16x2"
        )


@triton.jit
def byte_nibbles(w, less, scale, TAKE: tl.constexpr, MAGIC: tl.constexpr, ONE: tl.constexpr, KIND: tl.constexpr):
    """Four bytes at a time; less and scale are one number a row, in the type of the result. Adding -0.0 makes a fused
    multiply-add a product (bf16 has no other before Hopper)."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 t, low, high, one, none; mov.b32 one, " + ONE + "; mov.b32 none, 0x80008000; " + TAKE + " "
        "prmt.b32 low, t, 0, 0x4140; prmt.b32 high, t, 0, 0x4342; "
        "lop3.b32 low, low, 0x000f000f, " + MAGIC + ", 0xea; lop3.b32 high, high, 0x000f000f, " + MAGIC + ", 0xea; "
        "fma.rn." + KIND + " low, low, one, $3; fma.rn." + KIND + " high, high, one, $4; "
        "fma.rn." + KIND + " $0, low, $5, none; fma.rn." + KIND + " $1, high, $6, none; }",
        "=&r,=&r,r,r,r,r,r",
        [w, less, scale],
        dtype=less.dtype,
        is_pure=True,
        pack=4,
    )


@triton.jit
def word_nibbles(w, less, scale, TAKE: tl.constexpr):
    """One word at a time, in float16."""
    a, b, c, d = tl.inline_asm_elementwise(
        "{ .reg .b32 t, low, high, one, less, scale; mov.b32 one, 0x3c003c00; " + TAKE + " "
        "mov.b32 less, {$5, $5}; mov.b32 scale, {$6, $6}; "
        "prmt.b32 low, t, 0, 0x4140; prmt.b32 high, t, 0, 0x4342; "
        "lop3.b32 low, low, 0x000f000f, 0x64006400, 0xea; lop3.b32 high, high, 0x000f000f, 0x64006400, 0xea; "
        "fma.rn.f16x2 low, low, one, less; fma.rn.f16x2 high, high, one, less; "
        "mul.rn.f16x2 low, low, scale; mul.rn.f16x2 high, high, scale; "
        "mov.b32 {$0, $1}, low; mov.b32 {$2, $3}, high; }",
        "=h,=h,=h,=h,r,h,h",
        [w, less, scale],
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
        is_pure=True,
        pack=1,
    )
    return in_a_row(a, b, c, d)


@triton.jit
def unpack_words(w):
    """The four bytes of each word as int32 in -128 .. 127, lowest first."""
    return in_a_row((w << 24) >> 24, (w << 16) >> 24, (w << 8) >> 24, w >> 24)


@triton.jit
def in_a_row(a, b, c, d):
    """Four [rows, columns] -> [rows, 4 * columns]: a, b, c, d of a column side by side."""
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (a.shape[0], a.shape[1] * 4))


@triton.jit
def pair_of(word, DTYPE: tl.constexpr):
    """The two 16-bit floats of an int32 word."""
    return word.to(tl.int16).to(DTYPE, bitcast=True), (word >> 16).to(tl.int16).to(DTYPE, bitcast=True)


@triton.jit
def word_of(low, high):
    """An int32 word of two 16-bit floats."""
    return (low.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF) | (high.to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def rounded(low, high, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """An int32 word of two float32, rounded to 16 bits: in one instruction where there is one, from Ampere on."""
    if ASM:
        HALVES: tl.constexpr = "{ .reg .b16 l, h; cvt.rn.f16.f32 l, $1; cvt.rn.f16.f32 h, $2; mov.b32 $0, {l, h}; }"
        HOW: tl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if DTYPE == tl.bfloat16 else HALVES  # noqa: SIM300
        return tl.inline_asm_elementwise(HOW, "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1)
    else:
        return word_of(low.to(DTYPE), high.to(DTYPE))


@triton.jit
def codes_of(word, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Four int8 codes in -127 .. 127 -> two words of two numbers in DTYPE, exactly."""
    if not ASM:
        low = word_of(((word << 24) >> 24).to(DTYPE), ((word << 16) >> 24).to(DTYPE))
        return low, word_of(((word << 8) >> 24).to(DTYPE), (word >> 24).to(DTYPE))
    else:
        WIDEN: tl.constexpr = CODES_FP16 if DTYPE == tl.float16 else CODES_BF16  # noqa: SIM300
        low, high = tl.inline_asm_elementwise(
            WIDEN, "=r,=r,r", [word], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
        )
        return low, high


@triton.jit
def nibbles_of(word, less, PART: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """The codes at bits 4 PART and 4 PART + 16 of each word, less their zero, as two numbers in DTYPE, exactly. less:
    twice minus (offset + zero), as ``less_of`` has it for this part: the offset is the float whose mantissa takes a
    code."""
    HALF: tl.constexpr = DTYPE == tl.float16  # noqa: SIM300
    if not ASM:
        low, high = pair_of(less, DTYPE)
        OFFSET: tl.constexpr = (64.0 if PART % 2 else 1024.0) if HALF else 128.0
        first = ((word >> 4 * PART) & 15).to(tl.float32) + OFFSET + low.to(tl.float32)
        second = ((word >> (4 * PART + 16)) & 15).to(tl.float32) + OFFSET + high.to(tl.float32)
        return word_of(first.to(DTYPE), second.to(DTYPE))
    elif HALF:
        # Ten bits of mantissa hold two codes: 0x6400 | u << 4 is 1024 + 16 u, and a sixteenth of it 64 + u.
        TAKE: tl.constexpr = "mov.b32 t, $1; " if PART < 2 else "shr.b32 t, $1, 8; "
        PUT: tl.constexpr = (
            "lop3.b32 t, t, 0x00f000f0, 0x64006400, 0xea; mov.b32 by, 0x2c002c00; "
            if PART % 2
            else "lop3.b32 t, t, 0x000f000f, 0x64006400, 0xea; mov.b32 by, 0x3c003c00; "
        )
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t, by; " + TAKE + PUT + "fma.rn.f16x2 $0, t, by, $2; }",
            "=r,r,r", [word, less], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        SHIFT: tl.constexpr = (
            "mov.b32 t, $1; "
            if PART == 0
            else ("shr.b32 t, $1, 4; " if PART == 1 else ("shr.b32 t, $1, 8; " if PART == 2 else "shr.b32 t, $1, 12; "))
        )
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t, one; " + SHIFT + "lop3.b32 t, t, 0x000f000f, 0x43004300, 0xea; "
            "mov.b32 one, 0x3f803f80; fma.rn.bf16x2 $0, t, one, $2; }",
            "=r,r,r", [word, less], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def less_of(term, PART: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """The high half of a term twice, minus (offset + zero), for the codes of a part: in fp16 every other part's offset
    is 64 instead of 1024."""
    less = twice_high(term, ASM)
    if DTYPE == tl.float16 and PART % 2 == 1:  # noqa: SIM300
        if ASM:
            return tl.inline_asm_elementwise(
                "{ .reg .b32 more; mov.b32 more, 0x63806380; add.rn.f16x2 $0, $1, more; }",
                "=r,r", [less], dtype=tl.int32, is_pure=True, pack=1,
            )  # fmt: skip
        else:
            low, high = pair_of(less, DTYPE)
            return word_of((low + 960.0).to(DTYPE), (high + 960.0).to(DTYPE))
    else:
        return less


@triton.jit
def twice_high(term, ASM: tl.constexpr):
    """The high half of a term in both halves."""
    if ASM:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, 0, 0x3232;", "=r,r", [term], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        high = (term >> 16) & 0xFFFF
        return high | (high << 16)


@triton.jit
def scale_of(term, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """The float in the low half of a term, in float32."""
    if ASM and DTYPE == tl.bfloat16:  # noqa: SIM300
        return (term << 16).to(tl.float32, bitcast=True)
    elif ASM:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 low, high; mov.b32 {low, high}, $1; cvt.f32.f16 $0, low; }",
            "=f,r", [term], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return term.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def widen_matrix(
    w_ptr, scale_ptr, out_ptr, rows, depth,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A stored matrix [rows, depth] (BLOCKS: as ``block_place`` has it) times its scales in the 16-bit type of out. One
    program: BLOCK_N rows of BLOCK_K positions of K (int4: one packed block). Grid: (row tiles, K tiles)."""
    await_inputs(PDL)
    admit_next(PDL)
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.program_id(1) * BLOCK_K
    used = (row < rows)[:, None]
    line = row.to(tl.int64)[:, None]
    if FORMAT == "int4":
        WORDS: tl.constexpr = BLOCK_K // 8
        word = first // 8 + tl.arange(0, WORDS)[None, :]
        place = block_place(line, 4 * word, depth // 2) // 4 if BLOCKS else line * (depth // 8) + word
        words = tl.load(w_ptr.to(tl.pointer_type(tl.int32)) + place, mask=used, other=0)
        for part in tl.static_range(4):
            at = first + part * (BLOCK_K // 4)
            terms = tl.load(scale_ptr + at // GROUP * rows + row, mask=row < rows, other=0)
            low, high = pair_of(nibbles_of(words, less_of(terms, part, DTYPE, ASM)[:, None], part, DTYPE, ASM), DTYPE)
            code = tl.reshape(tl.join(low, high), (BLOCK_N, 2 * WORDS)).to(tl.float32)
            value = (code * scale_of(terms, DTYPE, ASM)[:, None]).to(DTYPE)
            tl.store(out_ptr + line * depth + at + tl.arange(0, 2 * WORDS)[None, :], value, mask=used)
    elif FORMAT == "int4_halves":
        HALF: tl.constexpr = BLOCK_K // 2
        k = tl.arange(0, HALF)[None, :]
        w = tl.load(w_ptr + line * (depth // 2) + first // 2 + k, mask=used, other=0)
        for high in tl.static_range(2):
            group = (first + high * HALF) // GROUP * rows + row
            terms = tl.load(scale_ptr + group, mask=row < rows, other=0)
            code = widen_nibbles(w, terms, DTYPE, high == 1, ASM)
            tl.store(out_ptr + line * depth + first + high * HALF + k, code, mask=used)
    else:
        k = first + tl.arange(0, BLOCK_K)[None, :]
        mask = used & (k < depth)
        place = first // GROUP * rows + row if FORMAT == "int8_group" else row
        scale = tl.load(scale_ptr + place, mask=row < rows, other=0.0)
        at = block_place(line, k, depth) if BLOCKS else line * depth + k
        code = widen_int8(tl.load(w_ptr + at, mask=mask, other=0), DTYPE, ASM).to(tl.float32)
        tl.store(out_ptr + line * depth + k, (code * scale[:, None]).to(DTYPE), mask=mask)
