/* Vectors of floats and of 32-bit numbers as wide as the processor's, and the few functions of them that layers need.

   They are the compilers' own vector types, so gcc and clang on any processor take them. Knows no model. */
#ifndef VECTORS_H
#define VECTORS_H

#include <math.h>
#include <stdint.h>
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

/* The first place of the largest of n numbers; NaNs count for nothing. */
static inline int64_t place_of_largest(const float *from, int64_t n) {
    const ivec lane = {LANE_NUMBERS};
    vec top = splat(-INFINITY);
    ivec at = lane;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        vec v = load(from + i);
        ivec more = v > top;
        top = pick(more, v, top);
        at = (more & (lane + (int32_t)i)) | (~more & at);
    }
    float tops[LANES], best = -INFINITY;
    int32_t places[LANES];
    int64_t place = 0;
    store(tops, top);
    memcpy(places, &at, sizeof places);
    for (int l = 0; l < LANES && l < n; l++)
        if (tops[l] > best || (tops[l] == best && places[l] < place)) best = tops[l], place = places[l];
    for (; i < n; i++)
        if (from[i] > best) best = from[i], place = i;
    return place;
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

#endif
