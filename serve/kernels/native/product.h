/* Rows of 16-bit codes times a matrix of 4-bit or 8-bit codes in groups of 32, summed in whole numbers inside a group.

   A row x is scale * code, code = 256 * high + low, both bytes signed. A group of weights is step * code + low (4 bits,
   codes 0..15) or step * (code - 128) (8 bits). Inside a group every sum is a whole number, so no instruction set can
   change it; the groups are added in float32 in one order, by the same instructions whatever rows lie beside. Packing,
   blocks of 16 outputs, one block's groups one behind the other (pack.py writes it):

     4 bits: 4 x 64 bytes, byte 4 * o + t of the j-th: output o's code 4 * j + t, and code 16 + 4 * j + t in its upper
             half; then 16 steps and 16 minima in float16
     8 bits: 8 x 64 bytes, byte 4 * o + t of the j-th: output o's code 4 * j + t; then 16 steps in float16

   The layout suits instructions that add four products of unsigned and signed bytes to each 32-bit lane (VNNI).
   Integer sums of grouped weights and activations are llama.cpp's way too; two bytes of activations are not. */
#ifndef PRODUCT_H
#define PRODUCT_H

#include "step.h"
#include "vectors.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define GROUP 32
#define BLOCK 16
#define PARTS (BLOCK / LANES)

/* Steps and minima are float16. */
static inline vec widen(const uint8_t *from) {
#if defined(__AVX512F__)
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#elif defined(__F16C__)
    return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
#else
    ivec half;
    for (int i = 0; i < LANES; i++) half[i] = from[2 * i] | from[2 * i + 1] << 8;
    vec size = (vec)((half & 0x7fff) << 13) * 0x1p112f;
    return (vec)((ivec)size | (half & 0x8000) << 16);
#endif
}

/* sum + the products of each lane's four bytes, unsigned, with x's four bytes, signed. Four: the former are < 16. */
static inline ivec dot(ivec sum, ivec bytes, int32_t x, const int four) {
#if defined(__AVX512VNNI__)
    (void)four;
    return (ivec)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)bytes, _mm512_set1_epi32(x));
#elif defined(__AVX512BW__)
    __m512i w = (__m512i)bytes, v = _mm512_set1_epi32(x);
    if (four) return sum + (ivec)_mm512_madd_epi16(_mm512_maddubs_epi16(w, v), _mm512_set1_epi16(1));
    __m512i even = _mm512_madd_epi16(_mm512_and_si512(w, _mm512_set1_epi16(255)),
                                     _mm512_srai_epi16(_mm512_slli_epi16(v, 8), 8));
    return sum + (ivec)even + (ivec)_mm512_madd_epi16(_mm512_srli_epi16(w, 8), _mm512_srai_epi16(v, 8));
#elif defined(__AVXVNNI__) && LANES == 8
    (void)four;
    return (ivec)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)bytes, _mm256_set1_epi32(x));
#elif defined(__AVX2__) && LANES == 8
    __m256i w = (__m256i)bytes, v = _mm256_set1_epi32(x);
    /* Pairs of products stay below 2^15 only for four bits. */
    if (four) return sum + (ivec)_mm256_madd_epi16(_mm256_maddubs_epi16(w, v), _mm256_set1_epi16(1));
    __m256i even = _mm256_madd_epi16(_mm256_and_si256(w, _mm256_set1_epi16(255)),
                                     _mm256_srai_epi16(_mm256_slli_epi16(v, 8), 8));
    return sum + (ivec)even + (ivec)_mm256_madd_epi16(_mm256_srli_epi16(w, 8), _mm256_srai_epi16(v, 8));
#else
    (void)four;
    sum += (bytes & 255) * (int32_t)(int8_t)x + (bytes >> 8 & 255) * (int32_t)(int8_t)(x >> 8);
    return sum + (bytes >> 16 & 255) * (int32_t)(int8_t)(x >> 16) + (bytes >> 24 & 255) * (int32_t)(int8_t)(x >> 24);
#endif
}

static inline ivec load_bytes(const uint8_t *from) {
    ivec v;
    memcpy(&v, from, sizeof v);
    return v;
}

static inline int32_t four_codes(const int8_t *from) {
    int32_t x;
    memcpy(&x, from, sizeof x);
    return x;
}

#define AHEAD 2560 /* bytes: what is read next from memory, so that few rows do not wait for it */

/* As many rows as two sums each leave registers for. */
#if defined(__AVX512F__)
#define ROWS 6
#else
#define ROWS 3
#endif

#define FOUR_BYTES (4 * 64 + 64) /* a group of a block */
#define EIGHT_BYTES (8 * 64 + 32)

/* LANES outputs (the part-th of a block's) of count rows, four-bit weights where steps is 4, else eight-bit ones. */
static inline __attribute__((always_inline)) void tile(
    const Step *s, const Matrix *m, const uint8_t *w, int64_t row, int part, float *out, const int count,
    const int steps) {
    const int64_t width = m->width, groups = width / GROUP, at = part * LANES, four = steps == 4;
    const int8_t *low = s->codes + row * width, *high = low + s->rows * width;
    const int32_t *sums = s->sums + row * groups;
    vec total[ROWS];
    for (int r = 0; r < count; r++) total[r] = splat(0.0f);
    for (int64_t g = 0; g < groups; g++, w += four ? FOUR_BYTES : EIGHT_BYTES, low += GROUP, high += GROUP) {
        ivec lows[ROWS], highs[ROWS];
        for (int r = 0; r < count; r++) lows[r] = highs[r] = (ivec){0};
        for (int j = 0; j < steps; j++) {
            __builtin_prefetch(w + AHEAD + 64 * j);
            ivec bytes = load_bytes(w + 64 * j + 4 * at), upper = bytes >> 4 & 0x0f0f0f0f;
            if (four) bytes &= 0x0f0f0f0f;
            for (int r = 0; r < count; r++) {
                const int8_t *l = low + r * width + 4 * j, *h = high + r * width + 4 * j;
                lows[r] = dot(lows[r], bytes, four_codes(l), four);
                highs[r] = dot(highs[r], bytes, four_codes(h), four);
                if (four) {
                    lows[r] = dot(lows[r], upper, four_codes(l + 16), four);
                    highs[r] = dot(highs[r], upper, four_codes(h + 16), four);
                }
            }
        }
        vec step = widen(w + 64 * steps + 2 * at);
        for (int r = 0; r < count; r++) {
            int32_t codes = sums[r * groups + g];
            ivec whole = lows[r] + (highs[r] << 8);
            if (!four) whole -= 128 * codes;
            total[r] += step * __builtin_convertvector(whole, vec);
            if (four) total[r] += widen(w + 288 + 2 * at) * (float)codes;
        }
    }
    for (int r = 0; r < count; r++) store(out + r * BLOCK + at, total[r]);
}

/* Each count is compiled apart, so that its sums live in registers. */
#define TILE(count, steps) \
    case count: tile(s, m, w, row, part, out, count, steps); break;

static void tile_four(const Step *s, const Matrix *m, const uint8_t *w, int64_t row, int part, float *out, int count) {
    switch (count) {
        TILE(1, 4) TILE(2, 4) TILE(3, 4)
#if ROWS == 6
        TILE(4, 4) TILE(5, 4) TILE(6, 4)
#endif
    }
}

static void tile_eight(const Step *s, const Matrix *m, const uint8_t *w, int64_t row, int part, float *out, int count) {
    switch (count) {
        TILE(1, 8) TILE(2, 8) TILE(3, 8)
#if ROWS == 6
        TILE(4, 8) TILE(5, 8) TILE(6, 8)
#endif
    }
}

/* One block of outputs of all rows: its weights stay in the nearest cache. */
static void product_block(const Job *job, int64_t block, float *scratch) {
    const Step *s = job->step;
    const Matrix *m = job->matrix;
    const uint8_t *w = m->data + block * (m->width / GROUP) * (m->bits == 4 ? FOUR_BYTES : EIGHT_BYTES);
    int64_t first = block * BLOCK, wide = m->outputs - first < BLOCK ? m->outputs - first : BLOCK;
    for (int64_t row = 0; row < s->rows; row += ROWS) {
        int count = (int)(s->rows - row < ROWS ? s->rows - row : ROWS);
        for (int part = 0; part < PARTS; part++) {
            if (m->bits == 4) tile_four(s, m, w, row, part, scratch, count);
            else tile_eight(s, m, w, row, part, scratch, count);
        }
        for (int r = 0; r < count; r++) {
            float *to = job->to + (row + r) * m->outputs + first, scale = s->scale[row + r] * (float)m->unit;
            for (int64_t i = 0; i < wide; i++)
                to[i] = scratch[r * BLOCK + i] * scale + (m->bias ? m->bias[first + i] : 0.0f);
        }
    }
}

/* to [rows, outputs] = the operand in s times the matrix, plus its bias. */
static int product(const Step *s, const Matrix *m, float *to) {
    int64_t blocks = (m->outputs + BLOCK - 1) / BLOCK, share = blocks / (4 * (s->threads > 0 ? s->threads : 1));
    Job job = {.body = product_block, .step = s, .matrix = m, .to = to, .items = blocks, .chunk = share > 1 ? share : 1,
               .scratch = ROWS * BLOCK};
    return run(&job, s->rows * m->outputs * m->width > 65536);
}

/* source [width] -> a row of the operand. */
static void split(const Step *s, int64_t row, const float *source, int64_t width) {
    int8_t *low = s->codes + row * width, *high = low + s->rows * width;
    int32_t *sums = s->sums + row * (width / GROUP);
    vec best = splat(0.0f);
    for (int64_t i = 0; i < width; i += LANES) best = larger((vec)((ivec)load(source + i) & 0x7fffffff), best);
    float peak = largest(best), top = 128.0f * 254.0f;
    float scale = peak > 1e-30f ? top / peak : 0.0f;
    s->scale[row] = peak / top;
    if (!(scale > 0.0f)) { /* nothing but zeros, or a NaN or infinity, which the scale alone carries on */
        memset(low, 0, width);
        memset(high, 0, width);
        memset(sums, 0, width / GROUP * sizeof(int32_t));
        return;
    }
    typedef int8_t bvec __attribute__((vector_size(LANES)));
    for (int64_t g = 0; g < width / GROUP; g++) {
        ivec total = {0};
        for (int64_t i = g * GROUP; i < (g + 1) * GROUP; i += LANES) {
            ivec code = __builtin_convertvector((load(source + i) * scale + ROUND) - ROUND, ivec);
            ivec upper = (code + 128) >> 8;
            bvec upper_bytes = __builtin_convertvector(upper, bvec);
            bvec lower_bytes = __builtin_convertvector(code - (upper << 8), bvec);
            memcpy(high + i, &upper_bytes, sizeof upper_bytes);
            memcpy(low + i, &lower_bytes, sizeof lower_bytes);
            total += code;
        }
        int32_t whole = 0;
        for (int i = 0; i < LANES; i++) whole += total[i];
        sums[g] = whole;
    }
}

#endif
