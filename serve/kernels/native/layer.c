/* A decoder's layers: norms, products, rotary, K/V write, paged attention, gate, residuals; one call for all of them.

   Every row is computed by the same instructions in the same order whatever rows lie beside it, wherever its pages lie,
   on whatever thread. Sizes of rows and heads are multiples of 16, widths of matrices of 32. Knows no files and no
   allocation of K/V. */
#include "attention.h"
#include "product.h"

static void norm_into(const float *from, const float *weight, int64_t width, double eps, float *to) {
    vec squares = splat(0.0f);
    for (int64_t i = 0; i < width; i += LANES) squares += load(from + i) * load(from + i);
    float scale = 1.0f / sqrtf(sum(squares) / (float)width + (float)eps);
    for (int64_t i = 0; i < width; i += LANES) store(to + i, load(from + i) * scale * load(weight + i));
}

/* x += y's row (job->from, if any); operand = norm(x) (if any). */
static void add_norm_row(const Job *job, int64_t row, float *scratch) {
    const Step *s = job->step;
    int64_t width = s->hidden;
    float *x = s->x + row * width;
    if (job->from)
        for (int64_t i = 0; i < width; i += LANES) store(x + i, load(x + i) + load(job->from + row * width + i));
    if (!job->norm) return;
    norm_into(x, job->norm, width, s->eps, scratch);
    split(s, row, scratch, width);
}

static int add_norm(const Step *s, const float *delta, const float *norm) {
    Job job = {.body = add_norm_row, .step = s, .from = delta, .norm = norm, .scratch = s->hidden};
    return run_rows(&job, s->hidden);
}

/* q, k, v of a row [job->width apart]: head norms, rotary; k and v go to their page, q (scaled) to step->q. */
static void qkv_row(const Job *job, int64_t row, float *scratch) {
    const Step *s = job->step;
    const float *norm = job->norm;
    int64_t dim = s->head_dim, turned = s->heads + s->kv_heads, all = turned + s->kv_heads;
    const float *turn = s->turns + s->positions[row] * dim;
    float shrink = 1.0f / sqrtf((float)dim);
    int64_t page = s->slots[row] / s->page_size, offset = s->slots[row] % s->page_size;
    memcpy(scratch, job->from + row * job->width, all * dim * sizeof(float));
    for (int64_t head = 0; head < all; head++) {
        float *h = scratch + head * dim;
        if (head < turned) {
            if (norm) norm_into(h, norm + head * dim, dim, s->eps, h);
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
            memcpy(job->to + (block * s->page_size + offset) * dim, h, dim * sizeof(float));
        }
    }
}

static void gate_row(const Job *job, int64_t row, float *scratch) {
    const Step *s = job->step;
    const float *gates = s->y + row * 2 * s->inner, *ups = gates + s->inner;
    for (int64_t i = 0; i < s->inner; i += LANES) {
        vec gate = load(gates + i);
        store(scratch + i, gate / (exponential(-gate) + 1.0f) * load(ups + i));
    }
    split(s, row, scratch, s->inner);
}

static void split_row(const Job *job, int64_t row, float *scratch) {
    (void)scratch;
    split(job->step, row, job->from + row * job->width, job->width);
}

static int split_rows(const Step *s, const float *from, int64_t width) {
    Job job = {.body = split_row, .step = s, .from = from, .width = width};
    return run_rows(&job, width);
}

static int write_heads(const Step *s, const float *from, int64_t width, const float *norm, float *cache) {
    int64_t size = (s->heads + 2 * s->kv_heads) * s->head_dim;
    Job job = {.body = qkv_row, .step = s, .from = from, .width = width, .norm = norm, .to = cache, .scratch = size};
    return run_rows(&job, size);
}

/* From the operand that holds norm(x) to y, which is still to be added to x. */
static int one_layer(const Step *s, const Layer *l, float *cache) {
    if (product(s, &l->qkv, s->y)) return 1;
    if (write_heads(s, s->y, l->qkv.outputs, l->qk_norm, cache)) return 1;
    if (attention(s, cache) || split_rows(s, s->mixed, s->heads * s->head_dim)) return 1;
    if (product(s, &l->output, s->y) || add_norm(s, s->y, l->mlp_norm) || product(s, &l->gate_up, s->y)) return 1;
    Job gate = {.body = gate_row, .step = s, .scratch = s->inner};
    if (run_rows(&gate, s->inner * 4)) return 1;
    return product(s, &l->down, s->y);
}

/* ---- what ops.py calls; all return 0, or 1 when memory ran out ---- */

/* x through all layers. caches: each layer's pages. kept[i], where not null, gets x [rows, hidden] as it leaves layer i. */
int layers_forward(const Step *s, const Layer *layers, int64_t count, float *const *caches, float *const *kept) {
    size_t bytes = (size_t)(s->rows * s->hidden) * sizeof(float);
    if (add_norm(s, NULL, layers[0].input_norm)) return 1;
    for (int64_t i = 0; i < count; i++) {
        const float *next = i + 1 < count ? layers[i + 1].input_norm : NULL;
        if (one_layer(s, layers + i, caches[i]) || add_norm(s, s->y, next)) return 1;
        if (kept[i]) memcpy(kept[i], s->x, bytes);
    }
    return 0;
}

/* y [rows, outputs] = the matrix times norm(x). */
int head_forward(const Step *s, const Matrix *head, const float *norm) {
    return add_norm(s, NULL, norm) || product(s, head, s->y);
}

/* best [rows]: which output of the matrix times norm(x) is largest; all outputs are in s->y then. */
int best_forward(const Step *s, const Matrix *head, const float *norm, int64_t *best) {
    if (head_forward(s, head, norm)) return 1;
    for (int64_t row = 0; row < s->rows; row++) best[row] = place_of_largest(s->y + row * head->outputs, head->outputs);
    return 0;
}

/* Keys and values of a drafter's layers (s->heads is 0) from taps [rows, fuse->width]. both: keys, then values, of all
   layers; norms: [kv_heads, head_dim] of each layer's keys. */
int context_forward(const Step *s, const float *taps, const Matrix *fuse, const float *norm, const Matrix *both,
                    const float *const *norms, float *const *caches) {
    int64_t width = 2 * s->kv_heads * s->head_dim;
    if (split_rows(s, taps, fuse->width) || product(s, fuse, s->x) || add_norm(s, NULL, norm)) return 1;
    if (product(s, both, s->y)) return 1;
    for (int64_t i = 0; i * width < both->outputs; i++)
        if (write_heads(s, s->y + i * width, both->outputs, norms[i], caches[i])) return 1;
    return 0;
}

/* y [rows, outputs] = the matrix times x, whose rows are as wide as the matrix. */
int matrix_forward(const Step *s, const Matrix *matrix) {
    return split_rows(s, s->x, matrix->width) || product(s, matrix, s->y);
}
