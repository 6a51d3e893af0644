/* Attention of a step's rows over the pages of their sequences, float32, one K/V head and a few rows at a time.

   A row's result does not depend on the other rows, on where its pages lie or on the thread. Knows one layer. */
#ifndef ATTENTION_H
#define ATTENTION_H

#include "step.h"
#include "vectors.h"

#define WIDE_ATTENTION 150000 /* multiplications from which it is worth two threads */


/* LANES positions of K, [LANES, dim] -> [dim, LANES]: rounds of zipping the upper half of the rows with the lower.
   ahead: what is read next; pages lie anywhere, so the processor cannot guess it. */
static inline void transpose(const float *k, const float *ahead, int64_t dim, float *turned) {
    for (int64_t column = 0; column < dim; column += LANES) {
        vec a[LANES], b[LANES];
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) a[i] = load(k + i * dim + column);
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) __builtin_prefetch(ahead + i * dim + column);
#pragma GCC unroll 4
        for (int round = 1; round < LANES; round *= 2) {
#pragma GCC unroll 8
            for (int i = 0; i < LANES / 2; i++) {
                b[2 * i] = ZIP(a[i], a[i + LANES / 2], ZIP_LOW);
                b[2 * i + 1] = ZIP(a[i], a[i + LANES / 2], ZIP_HIGH);
            }
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) a[i] = b[i];
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) store(turned + (column + i) * LANES, a[i]);
    }
}

/* Queries that share what is read of K and V, as many as registers hold. */
#if LANES == 16
#define QUERIES 3
#else
#define QUERIES 1
#endif

/* Scores of count queries, [count, dim], at LANES positions; to: [count, stride]. */
static inline __attribute__((always_inline)) void scores(
    const float *q, const float *turned, int64_t dim, float *to, int64_t stride, const int count) {
    vec part[QUERIES][4];
    for (int n = 0; n < count; n++)
        for (int j = 0; j < 4; j++) part[n][j] = splat(0.0f);
    for (int64_t i = 0; i < dim; i += 4)
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            vec k = load(turned + (i + j) * LANES);
            for (int n = 0; n < count; n++) part[n][j] += k * q[n * dim + i + j];
        }
    for (int n = 0; n < count; n++)
        store(to + n * stride, (part[n][0] + part[n][1]) + (part[n][2] + part[n][3]));
}

/* Scores of n visible positions -> unnormalised weights in place (zeros up to a whole vector); returns 1 / their sum. */
static inline float soften(float *score, int64_t n) {
    const ivec lane = {LANE_NUMBERS};
    vec best = splat(-INFINITY), total = splat(0.0f);
    for (int64_t p = 0; p < n; p += LANES) {
        ivec seen = lane < (ivec){0} + (int32_t)(n - p);
        best = larger(pick(seen, load(score + p), splat(-INFINITY)), best);
    }
    float top = largest(best);
    for (int64_t p = 0; p < n; p += LANES) {
        ivec seen = lane < (ivec){0} + (int32_t)(n - p);
        vec away = load(score + p) - top;
        vec weight = pick(seen & ~(away < -80.0f), exponential(away), splat(0.0f)); /* a NaN stays */
        total += weight;
        store(score + p, weight);
    }
    return 1.0f / sum(total);
}

/* out [queries, dim] += weights [queries, stride] of count positions times a page of V, vectors * LANES columns of it;
   even and odd positions apart. */
static inline __attribute__((always_inline)) void mix(
    const float *weight, int64_t stride, const float *v, int64_t count, int64_t dim, float *out, const int vectors,
    const int queries) {
    vec even[QUERIES][4], odd[QUERIES][4];
    int64_t p = 0;
    for (int n = 0; n < queries; n++)
        for (int i = 0; i < vectors; i++) even[n][i] = odd[n][i] = splat(0.0f);
    for (; p + 2 <= count; p += 2)
        for (int i = 0; i < vectors; i++) {
            vec first = load(v + p * dim + i * LANES), second = load(v + (p + 1) * dim + i * LANES);
            for (int n = 0; n < queries; n++) {
                even[n][i] += first * weight[n * stride + p];
                odd[n][i] += second * weight[n * stride + p + 1];
            }
        }
    if (p < count)
        for (int i = 0; i < vectors; i++)
            for (int n = 0; n < queries; n++)
                even[n][i] += load(v + p * dim + i * LANES) * weight[n * stride + p];
    for (int n = 0; n < queries; n++)
        for (int i = 0; i < vectors; i++)
            store(out + n * dim + i * LANES, load(out + n * dim + i * LANES) + (even[n][i] + odd[n][i]));
}

static inline __attribute__((always_inline)) void mix_columns(
    const float *weight, int64_t stride, const float *v, int64_t count, int64_t dim, float *out, const int queries) {
    int64_t c = 0;
    for (; c + 4 * LANES <= dim; c += 4 * LANES) mix(weight, stride, v + c, count, dim, out + c, 4, queries);
    for (; c < dim; c += LANES) mix(weight, stride, v + c, count, dim, out + c, 1, queries);
}

static int64_t longest(const Step *s, const int64_t *tile) {
    int64_t most = 0;
    for (int64_t row = tile[0]; row < tile[0] + tile[1]; row++) most = s->visible[row] > most ? s->visible[row] : most;
    return most;
}

/* One tile of a sequence's rows under one K/V head. scratch: turned K, then scores [rows * group, stride]. */
static void attend_item(const Job *job, int64_t item, float *scratch) {
    const Step *s = job->step;
    const int64_t *tile = s->tile + item / s->kv_heads * 3, *table = s->tables + tile[2];
    int64_t kv_head = item % s->kv_heads, group = s->heads / s->kv_heads, dim = s->head_dim, page = s->page_size;
    int64_t most = longest(s, tile), stride = (most + 15) / 16 * 16, block = page * dim;
    float *turned = scratch, *score = scratch + dim * LANES;
    const float *k = job->to + (table[0] * s->kv_heads + kv_head) * 2 * block;
    for (int64_t position = 0; position < most; position += LANES) {
        int64_t after = position + LANES < most ? position + LANES : position;
        const float *ahead = job->to + (table[after / page] * s->kv_heads + kv_head) * 2 * block + after % page * dim;
        transpose(k, ahead, dim, turned);
        k = ahead;
        for (int64_t row = 0; row < tile[1]; row++) {
            if (position >= s->visible[tile[0] + row]) continue;
            const float *q = s->q + ((tile[0] + row) * s->heads + kv_head * group) * dim;
            float *to = score + row * group * stride + position;
            int64_t g = 0;
            for (; g + QUERIES <= group; g += QUERIES) scores(q + g * dim, turned, dim, to + g * stride, stride, QUERIES);
            for (; g < group; g++) scores(q + g * dim, turned, dim, to + g * stride, stride, 1);
        }
    }
    for (int64_t row = 0; row < tile[1]; row++) {
        float *out = s->mixed + ((tile[0] + row) * s->heads + kv_head * group) * dim;
        memset(out, 0, group * dim * sizeof(float));
    }
    float *inverse = score + tile[1] * group * stride;
    for (int64_t query = 0; query < tile[1] * group; query++)
        inverse[query] = soften(score + query * stride, s->visible[tile[0] + query / group]);
    for (int64_t first = 0; first < most; first += page) {
        const float *v = job->to + ((table[first / page] * s->kv_heads + kv_head) * 2 + 1) * block;
        for (int64_t row = 0; row < tile[1]; row++) {
            int64_t count = s->visible[tile[0] + row] - first;
            if (count <= 0) continue;
            if (count > page) count = page;
            float *out = s->mixed + ((tile[0] + row) * s->heads + kv_head * group) * dim;
            const float *weight = score + row * group * stride + first;
            int64_t g = 0;
            for (; g + QUERIES <= group; g += QUERIES)
                mix_columns(weight + g * stride, stride, v, count, dim, out + g * dim, QUERIES);
            for (; g < group; g++) mix_columns(weight + g * stride, stride, v, count, dim, out + g * dim, 1);
        }
    }
    for (int64_t query = 0; query < tile[1] * group; query++) {
        float *out = s->mixed + ((tile[0] + query / group) * s->heads + kv_head * group + query % group) * dim;
        for (int64_t i = 0; i < dim; i += LANES) store(out + i, load(out + i) * inverse[query]);
    }
}

/* mixed [rows, heads * head_dim] from q and one layer's pages. */
static int attention(const Step *s, float *cache) {
    int64_t group = s->heads / s->kv_heads, scratch = 0, seen = 0;
    for (int64_t i = 0; i < s->tiles; i++) {
        int64_t need = s->tile[3 * i + 1] * group * ((longest(s, s->tile + 3 * i) + 15) / 16 * 16 + 1);
        scratch = need > scratch ? need : scratch;
    }
    for (int64_t row = 0; row < s->rows; row++) seen += s->visible[row];
    Job job = {.body = attend_item, .step = s, .to = cache, .items = s->tiles * s->kv_heads, .chunk = 1,
               .scratch = scratch + s->head_dim * LANES};
    return run(&job, 2 * seen * s->heads * s->head_dim > WIDE_ATTENTION);
}

#endif
