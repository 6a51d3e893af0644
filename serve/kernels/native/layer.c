/* One decoder layer around its four integer products: residuals, norms, rotary, K/V write, paged attention, gate.

   Rows of activations arrive as the two product rows of their low and high code halves and leave split the same way
   (see exact_int8.py). Every row is computed by the same instructions in the same order whatever rows lie beside it,
   wherever its pages lie, on whatever thread. Knows no files, no allocation of K/V, no matrices.

   Vectors are the compilers' own vector types: no intrinsics, so gcc and clang on any processor take it. Sizes of rows
   and heads are multiples of 16. Threads are borrowed from the OpenMP runtime that torch loaded (``fork``): a second
   set of threads would fight its spinning ones for the cores. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#define ZIP_LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define ZIP_HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#define LANE_NUMBERS 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15
#elif defined(__AVX__)
#define LANES 8
#define ZIP_LOW 0, 8, 1, 9, 2, 10, 3, 11
#define ZIP_HIGH 4, 12, 5, 13, 6, 14, 7, 15
#define LANE_NUMBERS 0, 1, 2, 3, 4, 5, 6, 7
#else
#define LANES 4
#define ZIP_LOW 0, 4, 1, 5
#define ZIP_HIGH 2, 6, 3, 7
#define LANE_NUMBERS 0, 1, 2, 3
#endif

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef int32_t ivec __attribute__((vector_size(LANES * 4)));

#ifdef __clang__
#define ZIP(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define ZIP(a, b, ...) __builtin_shuffle(a, b, (ivec){__VA_ARGS__})
#endif

/* Runs body(data) on n threads of torch's own team. */
typedef void (*fork_fn)(void (*body)(void *), void *data, unsigned threads, unsigned flags);

/* What all layers of one step share; ops.py holds its twin. */
typedef struct {
    int64_t rows, hidden, inner, heads, kv_heads, head_dim, page_size, tiles, threads, wide_attention;
    double eps;
    fork_fn fork;
    float *x;      /* [rows, hidden] residual */
    float *halves; /* [2 * rows, K] operand of the next product: low halves, then high halves */
    float *peak;   /* [rows] the operand's scale, what its product is multiplied by */
    float *q;      /* [rows, heads * head_dim] */
    float *mixed;  /* [rows, heads * head_dim] */
    const float *turns;                          /* [positions, head_dim] cosine and sine of each pair side by side */
    const int64_t *positions, *slots, *visible;  /* [rows] */
    const int64_t *tile;                         /* [tiles, 3] first row, rows, start of the page table in tables */
    const int64_t *tables;
} Step;

/* bits: of a code half, for the operand and the product of each matrix. Biases and qk_norm may be null. */
typedef struct {
    const float *input_norm, *mlp_norm, *qk_norm, *qkv_bias, *output_bias, *gate_up_bias, *down_bias;
    int64_t qkv_bits, output_bits, gate_up_bits, down_bits;
} Layer;

static inline vec load(const float *from) {
    vec v;
    memcpy(&v, from, sizeof v);
    return v;
}

static inline void store(float *to, vec v) { memcpy(to, &v, sizeof v); }

static inline vec splat(float value) { return (vec){0} + value; }

static inline vec pick(ivec mask, vec yes, vec no) { return (vec)((mask & (ivec)yes) | (~mask & (ivec)no)); }

static inline float sum(vec v) {
    float lane[LANES];
    store(lane, v);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) lane[i] += lane[i + width];
    return lane[0];
}

/* A NaN wins, so that it reaches the row's result. */
static inline vec larger(vec a, vec b) { return pick((a > b) | (a != a), a, b); }

static inline float largest(vec v) {
    float lane[LANES], best;
    store(lane, v);
    best = lane[0];
    for (int i = 1; i < LANES; i++)
        if (lane[i] > best || lane[i] != lane[i]) best = lane[i];
    return best;
}

/* Adding and taking away 1.5 * 2^23 rounds to whole numbers, halves to even. */
static const float ROUND = 12582912.0f;

/* exp within two units of the last place from -87 to 88, its value there beyond: powers of two times a Taylor series. */
static inline vec exponential(vec x) {
    x = pick(x < splat(-87.0f), splat(-87.0f), x);
    x = pick(x > splat(88.0f), splat(88.0f), x);
    vec n = (x * 1.44269504f + ROUND) - ROUND;
    vec r = (x - n * 0.693145751953125f) - n * 1.428606765330187e-6f;
    vec y = splat(1.0f / 5040) * r + 1.0f / 720;
    y = y * r + 1.0f / 120;
    y = y * r + 1.0f / 24;
    y = y * r + 1.0f / 6;
    y = y * r + 0.5f;
    y = y * r + 1.0f;
    y = y * r + 1.0f;
    ivec power = (__builtin_convertvector(n, ivec) + 127) << 23;
    return y * (vec)power;
}

/* ---- work over threads ---- */

typedef struct Job {
    void (*body)(const struct Job *job, int64_t item, float *scratch);
    const Step *step;
    const Layer *layer;
    const float *y, *bias, *norm;
    float *cache;
    int64_t in_bits, out_bits, columns;
    int64_t items, chunk, next, scratch; /* scratch: floats a thread */
    int failed;
} Job;

static void work(void *data) {
    Job *job = data;
    float *scratch = NULL;
    /* Whole cache lines, from the start of one: else every vector access takes two. */
    if (job->scratch && !(scratch = aligned_alloc(64, (job->scratch + 15) / 16 * 16 * sizeof(float)))) {
        __atomic_store_n(&job->failed, 1, __ATOMIC_RELAXED);
        return;
    }
    for (;;) {
        int64_t first = __atomic_fetch_add(&job->next, job->chunk, __ATOMIC_RELAXED);
        if (first >= job->items) break;
        int64_t last = first + job->chunk < job->items ? first + job->chunk : job->items;
        for (int64_t item = first; item < last; item++) job->body(job, item, scratch);
    }
    free(scratch);
}

static int run(Job *job, int wide) {
    if (wide && job->step->fork && job->step->threads > 1 && job->items > 1)
        job->step->fork(work, job, (unsigned)job->step->threads, 0);
    else
        work(job);
    return job->failed;
}

static int run_rows(Job *job, int64_t width) {
    job->items = job->step->rows;
    job->chunk = job->items > 64 ? 8 : 1;
    return run(job, job->items * width > 16384);
}

/* ---- rows ---- */

static inline vec combined(const float *low, const float *high, float base, float peak, const float *bias, int64_t i) {
    vec v = (load(low + i) + load(high + i) * base) * peak;
    return bias ? v + load(bias + i) : v;
}

/* source [width] (may be the low row itself) -> code halves and the row's peak. */
static void split(const Job *job, int64_t row, const float *source, int64_t width) {
    const Step *s = job->step;
    int shift = (int)job->out_bits;
    float *low = s->halves + row * width, *high = s->halves + (s->rows + row) * width;
    vec best = splat(0.0f);
    for (int64_t i = 0; i < width; i += LANES) best = larger((vec)((ivec)load(source + i) & 0x7fffffff), best);
    float peak = largest(best), top = (float)((1 << (shift - 1)) * ((1 << shift) - 2));
    float scale = peak > 1e-30f ? top / peak : 0.0f;
    s->peak[row] = peak;
    if (!(scale > 0.0f)) { /* nothing but zeros, or a NaN or infinity, which the peak alone carries on */
        memset(low, 0, width * sizeof(float));
        memset(high, 0, width * sizeof(float));
        return;
    }
    for (int64_t i = 0; i < width; i += LANES) {
        ivec code = __builtin_convertvector((load(source + i) * scale + ROUND) - ROUND, ivec);
        ivec upper = (code + (1 << (shift - 1))) >> shift;
        store(high + i, __builtin_convertvector(upper, vec));
        store(low + i, __builtin_convertvector(code - (upper << shift), vec));
    }
}

/* x += the product's row (if any); operand = norm(x) * weight (if any). */
static void add_norm_row(const Job *job, int64_t row, float *scratch) {
    const Step *s = job->step;
    int64_t width = s->hidden;
    float *x = s->x + row * width;
    vec squares = splat(0.0f);
    if (job->y) {
        const float *low = job->y + row * width, *high = job->y + (s->rows + row) * width;
        float base = (float)(1 << job->in_bits), peak = s->peak[row];
        for (int64_t i = 0; i < width; i += LANES) {
            vec v = load(x + i) + combined(low, high, base, peak, job->bias, i);
            store(x + i, v);
        }
    }
    if (!job->norm) return;
    for (int64_t i = 0; i < width; i += LANES) squares += load(x + i) * load(x + i);
    float scale = 1.0f / sqrtf(sum(squares) / (float)width + (float)s->eps);
    float *normed = scratch;
    for (int64_t i = 0; i < width; i += LANES) store(normed + i, load(x + i) * scale * load(job->norm + i));
    split(job, row, normed, width);
}

/* q, k, v of a row from its product: bias, head norms, rotary; k and v go to their page, q (scaled) to step->q. */
static void qkv_row(const Job *job, int64_t row, float *scratch) {
    const Step *s = job->step;
    const Layer *l = job->layer;
    int64_t dim = s->head_dim, turned = s->heads + s->kv_heads, all = turned + s->kv_heads, width = all * dim;
    const float *low = job->y + row * width, *high = job->y + (s->rows + row) * width;
    const float *turn = s->turns + s->positions[row] * dim;
    float base = (float)(1 << job->in_bits), peak = s->peak[row], shrink = 1.0f / sqrtf((float)dim);
    int64_t page = s->slots[row] / s->page_size, offset = s->slots[row] % s->page_size;
    for (int64_t i = 0; i < width; i += LANES) store(scratch + i, combined(low, high, base, peak, l->qkv_bias, i));
    for (int64_t head = 0; head < all; head++) {
        float *h = scratch + head * dim;
        if (head < turned) {
            if (l->qk_norm) {
                vec squares = splat(0.0f);
                for (int64_t i = 0; i < dim; i += LANES) squares += load(h + i) * load(h + i);
                float scale = 1.0f / sqrtf(sum(squares) / (float)dim + (float)s->eps);
                for (int64_t i = 0; i < dim; i += LANES)
                    store(h + i, load(h + i) * scale * load(l->qk_norm + head * dim + i));
            }
            for (int64_t i = 0; i < dim; i += 2) {
                float a = h[i], b = h[i + 1], cosine = turn[i], sine = turn[i + 1];
                h[i] = a * cosine - b * sine;
                h[i + 1] = a * sine + b * cosine;
            }
        }
        if (head < s->heads) {
            float *q = s->q + (row * s->heads + head) * dim;
            for (int64_t i = 0; i < dim; i += LANES) store(q + i, load(h + i) * shrink);
        } else {
            int64_t value = head >= turned, kv_head = value ? head - turned : head - s->heads;
            int64_t block = (page * s->kv_heads + kv_head) * 2 + value;
            memcpy(job->cache + (block * s->page_size + offset) * dim, h, dim * sizeof(float));
        }
    }
}

static void gate_row(const Job *job, int64_t row, float *scratch) {
    const Step *s = job->step;
    int64_t inner = s->inner;
    const float *low = job->y + row * 2 * inner, *high = job->y + (s->rows + row) * 2 * inner;
    const float *bias = job->layer->gate_up_bias, *up_bias = bias ? bias + inner : NULL;
    float base = (float)(1 << job->in_bits), peak = s->peak[row];
    for (int64_t i = 0; i < inner; i += LANES) {
        vec gate = combined(low, high, base, peak, bias, i);
        vec up = combined(low + inner, high + inner, base, peak, up_bias, i);
        store(scratch + i, gate / (exponential(-gate) + 1.0f) * up);
    }
    split(job, row, scratch, inner);
}

static void split_mixed_row(const Job *job, int64_t row, float *scratch) {
    int64_t width = job->step->heads * job->step->head_dim;
    (void)scratch;
    split(job, row, job->step->mixed + row * width, width);
}

static void combine_row(const Job *job, int64_t row, float *scratch) {
    int64_t width = job->columns, i = 0;
    float *low = job->cache + row * width, base = (float)(1 << job->in_bits), peak = job->step->peak[row];
    const float *high = job->y + (job->step->rows + row) * width;
    (void)scratch;
    for (; i + LANES <= width; i += LANES) store(low + i, combined(low, high, base, peak, job->bias, i));
    for (; i < width; i++) low[i] = (low[i] + high[i] * base) * peak + (job->bias ? job->bias[i] : 0.0f);
}

/* ---- attention ---- */

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

static inline vec scores(const float *q, const float *turned, int64_t dim) {
    vec a = splat(0.0f), b = a, c = a, d = a;
    for (int64_t i = 0; i < dim; i += 4) {
        a += load(turned + i * LANES) * q[i];
        b += load(turned + (i + 1) * LANES) * q[i + 1];
        c += load(turned + (i + 2) * LANES) * q[i + 2];
        d += load(turned + (i + 3) * LANES) * q[i + 3];
    }
    return (a + b) + (c + d);
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

/* out [vectors * LANES] += weights of count positions times a page of V; even and odd positions apart. */
static inline __attribute__((always_inline)) void mix(
    const float *weight, const float *v, int64_t count, int64_t dim, float *out, const int vectors) {
    vec even[4], odd[4];
    int64_t p = 0;
    for (int i = 0; i < vectors; i++) even[i] = odd[i] = splat(0.0f);
    for (; p + 2 <= count; p += 2)
        for (int i = 0; i < vectors; i++) {
            even[i] += load(v + p * dim + i * LANES) * weight[p];
            odd[i] += load(v + (p + 1) * dim + i * LANES) * weight[p + 1];
        }
    if (p < count)
        for (int i = 0; i < vectors; i++) even[i] += load(v + p * dim + i * LANES) * weight[p];
    for (int i = 0; i < vectors; i++) store(out + i * LANES, load(out + i * LANES) + (even[i] + odd[i]));
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
    const float *k = job->cache + (table[0] * s->kv_heads + kv_head) * 2 * block;
    for (int64_t position = 0; position < most; position += LANES) {
        int64_t after = position + LANES < most ? position + LANES : position;
        const float *ahead = job->cache + (table[after / page] * s->kv_heads + kv_head) * 2 * block + after % page * dim;
        transpose(k, ahead, dim, turned);
        k = ahead;
        for (int64_t row = 0; row < tile[1]; row++) {
            if (position >= s->visible[tile[0] + row]) continue;
            const float *q = s->q + ((tile[0] + row) * s->heads + kv_head * group) * dim;
            for (int64_t g = 0; g < group; g++)
                store(score + (row * group + g) * stride + position, scores(q + g * dim, turned, dim));
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
        const float *v = job->cache + ((table[first / page] * s->kv_heads + kv_head) * 2 + 1) * block;
        for (int64_t query = 0; query < tile[1] * group; query++) {
            int64_t count = s->visible[tile[0] + query / group] - first;
            if (count <= 0) continue;
            if (count > page) count = page;
            float *out = s->mixed + ((tile[0] + query / group) * s->heads + kv_head * group + query % group) * dim;
            const float *weight = score + query * stride + first;
            int64_t c = 0;
            for (; c + 4 * LANES <= dim; c += 4 * LANES) mix(weight, v + c, count, dim, out + c, 4);
            for (; c < dim; c += LANES) mix(weight, v + c, count, dim, out + c, 1);
        }
    }
    for (int64_t query = 0; query < tile[1] * group; query++) {
        float *out = s->mixed + ((tile[0] + query / group) * s->heads + kv_head * group + query % group) * dim;
        for (int64_t i = 0; i < dim; i += LANES) store(out + i, load(out + i) * inverse[query]);
    }
}

/* ---- what ops.py calls; all return 0, or 1 when memory ran out ---- */

/* x += y (down's product of the layer before; null in the first), then norm and split for qkv. */
int layer_open(const Step *s, const Layer *l, const Layer *before, const float *y) {
    Job job = {.body = add_norm_row, .step = s, .y = y, .norm = l->input_norm, .out_bits = l->qkv_bits,
               .bias = before ? before->down_bias : NULL, .in_bits = before ? before->down_bits : 0,
               .scratch = s->hidden};
    return run_rows(&job, s->hidden);
}

/* y: qkv's product. cache: this layer's pages. */
int layer_attend(const Step *s, const Layer *l, const float *y, float *cache) {
    int64_t width = (s->heads + 2 * s->kv_heads) * s->head_dim, group = s->heads / s->kv_heads, scratch = 0;
    Job rows = {.body = qkv_row, .step = s, .layer = l, .y = y, .cache = cache, .in_bits = l->qkv_bits,
                .scratch = width};
    if (run_rows(&rows, width)) return 1;
    for (int64_t i = 0; i < s->tiles; i++) {
        int64_t need = s->tile[3 * i + 1] * group * ((longest(s, s->tile + 3 * i) + 15) / 16 * 16 + 1);
        scratch = need > scratch ? need : scratch;
    }
    Job attend = {.body = attend_item, .step = s, .cache = cache, .items = s->tiles * s->kv_heads, .chunk = 1,
                  .scratch = scratch + s->head_dim * LANES};
    if (run(&attend, (int)s->wide_attention)) return 1;
    Job parts = {.body = split_mixed_row, .step = s, .out_bits = l->output_bits};
    return run_rows(&parts, s->heads * s->head_dim);
}

/* y: output's product. Then norm and split for gate_up. */
int layer_middle(const Step *s, const Layer *l, const float *y) {
    Job job = {.body = add_norm_row, .step = s, .y = y, .norm = l->mlp_norm, .bias = l->output_bias,
               .in_bits = l->output_bits, .out_bits = l->gate_up_bits, .scratch = s->hidden};
    return run_rows(&job, s->hidden);
}

/* y: gate_up's product. Gate, then split for down. */
int layer_gate(const Step *s, const Layer *l, const float *y) {
    Job job = {.body = gate_row, .step = s, .layer = l, .y = y, .in_bits = l->gate_up_bits, .out_bits = l->down_bits,
               .scratch = s->inner};
    return run_rows(&job, s->inner * 4);
}

/* y: the last down's product. x += y. */
int layer_close(const Step *s, const Layer *l, const float *y) {
    Job job = {.body = add_norm_row, .step = s, .y = y, .bias = l->down_bias, .in_bits = l->down_bits};
    return run_rows(&job, s->hidden);
}

/* Norm and split of x for the head. */
int head_open(const Step *s, const float *norm, int64_t bits) {
    Job job = {.body = add_norm_row, .step = s, .norm = norm, .out_bits = bits, .scratch = s->hidden};
    return run_rows(&job, s->hidden);
}

/* y [2 * rows, columns]: the head's product; its first rows become the logits. */
int head_close(const Step *s, float *y, const float *bias, int64_t columns, int64_t bits) {
    Job job = {.body = combine_row, .step = s, .y = y, .cache = y, .bias = bias, .columns = columns, .in_bits = bits};
    return run_rows(&job, columns);
}
