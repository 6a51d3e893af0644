/* Rows of 16-bit or 8-bit codes times a matrix of 4-bit or 8-bit codes in groups of 32, summed in whole numbers inside
   a group.

   With two halves a row x is scale * code, code = 256 * high + low, both bytes signed. With one half (for guesses, at
   half the work) a group of x is a scale of its own times a signed byte. A group of weights is step * code + low (4 bits,
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
#define ROWS 8
#else
#define ROWS 3
#endif

#define FOUR_BYTES (4 * 64 + 64) /* a group of a block */
#define EIGHT_BYTES (8 * 64 + 32)

/* LANES outputs (the part-th of a block's) of count rows, four-bit weights where steps is 4, else eight-bit ones; codes
   of two halves where wide. */
static inline __attribute__((always_inline)) void tile(
    const Step *s, const Matrix *m, const uint8_t *w, int64_t row, int part, float *out, const int count,
    const int steps, const int wide) {
    const int64_t width = m->width, groups = width / GROUP, at = part * LANES, four = steps == 4;
    const int8_t *low = s->codes + row * width, *high = low + s->rows * width;
    const float *sums = s->sums + row * groups;
    const float *scale = s->scale + row * groups;
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
                if (wide) highs[r] = dot(highs[r], bytes, four_codes(h), four);
                if (four) lows[r] = dot(lows[r], upper, four_codes(l + 16), four);
                if (four && wide) highs[r] = dot(highs[r], upper, four_codes(h + 16), four);
            }
        }
        vec step = widen(w + 64 * steps + 2 * at), least = four ? widen(w + 288 + 2 * at) : step * -128.0f;
        for (int r = 0; r < count; r++) {
            vec whole = __builtin_convertvector(wide ? lows[r] + (highs[r] << 8) : lows[r], vec);
            float codes = sums[r * groups + g];
            if (wide) {
                total[r] += step * whole;
                total[r] += least * codes;
            } else {
                vec both = step * whole;
                both += least * codes;
                total[r] += both * scale[r * groups + g];
            }
        }
    }
    for (int r = 0; r < count; r++) store(out + r * BLOCK + at, total[r]);
}

/* Each kind and count is compiled apart, so that its sums live in registers. */
#define TILE(count, steps, wide) \
    case count: tile(s, m, w, row, part, out, count, steps, wide); break;
#if ROWS == 8
#define TILES(steps, wide) \
    TILE(1, steps, wide) TILE(2, steps, wide) TILE(3, steps, wide) TILE(4, steps, wide) TILE(5, steps, wide) \
    TILE(6, steps, wide) TILE(7, steps, wide) TILE(8, steps, wide)
#else
#define TILES(steps, wide) TILE(1, steps, wide) TILE(2, steps, wide) TILE(3, steps, wide)
#endif
#define TILE_KIND(name, steps, wide)                                                                                \
    static void name(const Step *s, const Matrix *m, const uint8_t *w, int64_t row, int part, float *out, int count) { \
        switch (count) { TILES(steps, wide) }                                                                       \
    }
TILE_KIND(four_wide, 4, 1)
TILE_KIND(four_narrow, 4, 0)
TILE_KIND(eight_wide, 8, 1)
TILE_KIND(eight_narrow, 8, 0)

/* One block of outputs of all rows: its weights stay in the nearest cache. */
static void product_block(const Job *job, int64_t block, float *scratch) {
    const Step *s = job->step;
    const Matrix *m = job->matrix;
    const uint8_t *w = m->data + block * (m->width / GROUP) * (m->bits == 4 ? FOUR_BYTES : EIGHT_BYTES);
    int64_t first = block * BLOCK, wide = m->outputs - first < BLOCK ? m->outputs - first : BLOCK;
    for (int64_t row = 0; row < s->rows; row += ROWS) {
        int count = (int)(s->rows - row < ROWS ? s->rows - row : ROWS);
        for (int part = 0; part < PARTS; part++) {
            if (s->halves == 2) (m->bits == 4 ? four_wide : eight_wide)(s, m, w, row, part, scratch, count);
            else (m->bits == 4 ? four_narrow : eight_narrow)(s, m, w, row, part, scratch, count);
        }
        for (int r = 0; r < count; r++) {
            float *to = job->to + (row + r) * m->outputs + first, scale = (float)m->unit;
            if (s->halves == 2) scale *= s->scale[row + r];
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

typedef int8_t bvec __attribute__((vector_size(LANES)));

static inline void store_bytes(int8_t *to, ivec v) {
    bvec bytes = __builtin_convertvector(v, bvec);
    memcpy(to, &bytes, sizeof bytes);
}

static inline float peak_of(const float *source, int64_t width) {
    vec best = splat(0.0f);
    for (int64_t i = 0; i < width; i += LANES) best = larger((vec)((ivec)load(source + i) & 0x7fffffff), best);
    return largest(best);
}

/* A group's codes by ``shrink``; high is null with one half. The sum of the codes is returned. */
static inline float split_group(const float *source, float shrink, int8_t *low, int8_t *high) {
    ivec total = {0};
    for (int64_t i = 0; i < GROUP; i += LANES) {
        ivec code = __builtin_convertvector((load(source + i) * shrink + ROUND) - ROUND, ivec);
        ivec upper = high ? (code + 128) >> 8 : (ivec){0};
        if (high) store_bytes(high + i, upper);
        store_bytes(low + i, code - (upper << 8));
        total += code;
    }
    int32_t whole = 0;
    for (int i = 0; i < LANES; i++) whole += total[i];
    return (float)whole;
}

/* What turns a value into its code. Nothing but zeros, or a NaN or an infinity, gives none: the scale carries it on. */
static inline float shrink_by(float peak, float top) {
    float shrink = peak > 1e-30f ? top / peak : 0.0f;
    return shrink > 0.0f ? shrink : 0.0f;
}

/* source [width] -> a row of the operand. */
static void split(const Step *s, int64_t row, const float *source, int64_t width) {
    int64_t groups = width / GROUP, wide = s->halves == 2;
    int8_t *low = s->codes + row * width, *high = low + s->rows * width;
    float *sums = s->sums + row * groups;
    float top = wide ? 128.0f * 254.0f : 127.0f, peak = wide ? peak_of(source, width) : 0.0f;
    float shrink = shrink_by(peak, top);
    if (wide) s->scale[row] = peak / top;
    for (int64_t g = 0; g < groups; g++) {
        if (!wide) {
            peak = peak_of(source + g * GROUP, GROUP);
            shrink = shrink_by(peak, top);
            s->scale[row * groups + g] = peak / top;
        }
        int8_t *l = low + g * GROUP, *h = wide ? high + g * GROUP : NULL;
        if (shrink > 0.0f) {
            sums[g] = split_group(source + g * GROUP, shrink, l, h);
        } else {
            memset(l, 0, GROUP);
            if (h) memset(h, 0, GROUP);
            sums[g] = 0.0f;
        }
    }
}

#endif
