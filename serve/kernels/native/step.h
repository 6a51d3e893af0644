/* What all parts of one forward share, and how work is spread over threads. ops.py holds the structures' twins.

   Threads are borrowed from the OpenMP runtime that torch loaded (``fork``): a second set of threads would fight its
   spinning ones for the cores. Knows no arithmetic. */
#ifndef STEP_H
#define STEP_H

#include <stdint.h>
#include <stdlib.h>

/* Runs body(data) on n threads of torch's own team. */
typedef void (*fork_fn)(void (*body)(void *), void *data, unsigned threads, unsigned flags);

/* One matrix, packed as product.h says: outputs rows of width weights. bias may be null. */
typedef struct {
    const uint8_t *data;
    const float *bias;
    int64_t outputs, width, bits;
    double unit; /* what every scale and minimum is a multiple of */
} Matrix;

typedef struct {
    int64_t rows, hidden, inner, heads, kv_heads, head_dim, page_size, tiles, threads, halves;
    double eps;
    fork_fn fork;
    float *x;       /* [rows, hidden] residual */
    int8_t *codes;  /* [halves, rows, K] operand of the next product: low bytes of all rows, then high bytes */
    float *sums;    /* [rows, K / GROUP] sums of whole codes; below 2^24, so exact */
    float *scale;   /* what the codes are multiples of: [rows], or with one half [rows, K / GROUP] */
    float *y;       /* [rows, outputs] of the product before */
    float *q;       /* [rows, heads * head_dim] */
    float *mixed;   /* [rows, heads * head_dim] */
    const float *turns;                         /* [positions, head_dim] cosine and sine of each pair side by side */
    const int64_t *positions, *slots, *visible; /* [rows] */
    const int64_t *tile;                        /* [tiles, 3] first row, rows, start of the page table in tables */
    const int64_t *tables;
} Step;

/* qk_norm may be null. */
typedef struct {
    const float *input_norm, *mlp_norm, *qk_norm;
    Matrix qkv, output, gate_up, down;
} Layer;

typedef struct Job {
    void (*body)(const struct Job *job, int64_t item, float *scratch);
    const Step *step;
    const Matrix *matrix;
    const float *from, *norm;
    float *to;
    int64_t width;
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

/* width: about how many numbers a row costs; little work is not worth waking a thread. */
static int run_rows(Job *job, int64_t width) {
    job->items = job->step->rows;
    job->chunk = job->items > 64 ? 8 : 1;
    return run(job, job->items * width > 16384);
}

#endif
