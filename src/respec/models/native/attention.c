/* Attention of single tokens over the cache, in an order of sums that only the number of keys decides. */
#include "lanes.h"

/* Keys and values from index `from` on, copied together because a branching draft left them scattered. */
typedef struct {
    int64_t from;
    const void *keys, *values;
} Tail;

INLINE void weigh(const float *scores, const void *values, int64_t base, const Tail *tail, int64_t offset, int64_t n,
                  int64_t width, int dim, float *out, const int G, const int parts, const int bf16) {
    Vec acc[G][parts];
    for (int g = 0; g < G; g++)
        for (int p = 0; p < parts; p++) acc[g][p] = splat(0.0f);
    int64_t j = 0, split = tail->from < n ? tail->from : n;
    for (int piece = 0; piece < 2; piece++) {
        for (; j < split; j++) {
#pragma GCC unroll 4
            for (int p = 0; p < parts; p++) {
                Vec value = load_vec(values, base + j * dim + p * LANES, bf16);
#pragma GCC unroll 16
                for (int g = 0; g < G; g++) acc[g][p] += value * scores[g * width + j];
            }
        }
        values = tail->values;
        base = offset - tail->from * dim;
        split = n;
    }
    for (int g = 0; g < G; g++)
        for (int p = 0; p < parts; p++) store_vec(out, g * dim + p * LANES, acc[g][p], 0);
}

/* The G query heads of one key/value head, for one token, over keys 0..n-1 of its slot.
 * scores is scratch of G * (n rounded up to 16) floats. */
INLINE void attend(const float *q, const void *keys, const void *values, const Tail *tail, int64_t head, int64_t n,
                   int64_t capacity, int dim, float scale, float *scores, float *out, const int G, const int bf16) {
    int64_t tiles = (n + LANES - 1) / LANES, width = tiles * LANES;
    for (int64_t t = 0; t < tiles; t++) {
        Vec acc[G];
        for (int g = 0; g < G; g++) acc[g] = splat(0.0f);
        int inside = t * LANES < tail->from;
        const void *tile = inside ? keys : tail->keys;
        int64_t base = (inside ? head * capacity : -tail->from) * dim + t * LANES * dim;
        for (int i = 0; i < dim; i++) {
            Vec key = load_vec(tile, base + (int64_t)i * LANES, bf16);
#pragma GCC unroll 16
            for (int g = 0; g < G; g++) acc[g] += key * q[g * dim + i];
        }
        for (int g = 0; g < G; g++) store_vec(scores, g * width + t * LANES, acc[g] * scale, 0);
    }
    for (int g = 0; g < G; g++) {
        float *s = scores + g * width;
        /* what lies beyond n was never written by this sequence */
        for (int64_t j = n; j < width; j++) s[j] = -INFINITY;
        Vec top = load_vec(s, 0, 0), acc = splat(0.0f);
        for (int64_t j = LANES; j < width; j += LANES) top = larger(load_vec(s, j, 0), top);
        float max = fold_max(top);
        for (int64_t j = 0; j < width; j += LANES) {
            Vec e = exp_vec(load_vec(s, j, 0) - max);
            acc += e;
            store_vec(s, j, e, 0);
        }
        float inverse = 1.0f / fold(acc);
        for (int64_t j = 0; j < width; j += LANES) store_vec(s, j, load_vec(s, j, 0) * inverse, 0);
    }
    /* 64 columns at a time keep the sums of all heads in registers */
    for (int i0 = 0; i0 < dim; i0 += 4 * LANES) {
        int parts = (dim - i0) / LANES < 4 ? (dim - i0) / LANES : 4;
        int64_t base = head * capacity * dim;
        if (parts == 4) weigh(scores, values, base + i0, tail, i0, n, width, dim, out + i0, G, 4, bf16);
        else
            for (int i = i0; i < i0 + parts * LANES; i += LANES)
                weigh(scores, values, base + i, tail, i, n, width, dim, out + i, G, 1, bf16);
    }
}

/* Copies keys and values of indices from..n-1 of one head together: index j < fork lies at j, index fork + d at path[d].
 * The order of what attention then reads is that of a sequence that never branched. */
INLINE void gather(const void *keys, const void *values, int64_t head, int64_t capacity, int dim, int64_t from, int64_t n,
                   int64_t fork, const int64_t *path, void *tail_keys, void *tail_values, const int bf16) {
    size_t bytes = bf16 ? 2 : 4;
    for (int64_t j = from; j < n; j++) {
        int64_t at = j < fork ? j : path[j - fork], to = j - from;
        int64_t source = head * capacity * dim + at / LANES * LANES * dim + at % LANES;
        int64_t target = to / LANES * LANES * dim + to % LANES;
        for (int64_t i = 0; i < (int64_t)dim * LANES; i += LANES)
            if (bf16) ((uint16_t *)tail_keys)[target + i] = ((const uint16_t *)keys)[source + i];
            else ((float *)tail_keys)[target + i] = ((const float *)keys)[source + i];
        memcpy((char *)tail_values + (size_t)(to * dim) * bytes, (const char *)values + (size_t)((head * capacity + at) * dim) * bytes,
               (size_t)dim * bytes);
    }
}

INLINE int attention_impl(const float *q, const void *keys, const void *values, const int64_t *slot,
                          const int64_t *position, const int64_t *fork, const int64_t *path, int64_t deepest, void *out,
                          int64_t rows, int kv_heads, int dim, int64_t capacity, float scale, int threads, const int G,
                          const int bf16) {
    int failed = 0;
    int64_t tail_floats = path ? (deepest + 2 * LANES) * dim : 0;
#pragma omp parallel num_threads(threads) if (threads > 1 && rows * kv_heads > 3)
    {
        float *scores = (float *)thread_scratch(
            ((size_t)G * (size_t)(capacity + LANES + dim) + 2 * (size_t)tail_floats) * sizeof(float));
        float *row = scores + (int64_t)G * (capacity + LANES), *tail_keys = row + G * dim;
        float *tail_values = tail_keys + tail_floats;
        if (!scores) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(dynamic, 2)
        for (int64_t item = 0; item < rows * kv_heads; item++) {
            if (!scores) continue;
            int64_t m = item / kv_heads, h = item % kv_heads;
            int64_t head = slot[m] * kv_heads + h, n = position[m] + 1;
            Tail tail = {capacity + LANES, tail_keys, tail_values};
            if (path) {
                tail.from = fork[m] / LANES * LANES;
                gather(keys, values, head, capacity, dim, tail.from, n, fork[m], path + m * deepest, tail_keys, tail_values,
                       bf16);
            }
            attend(q + (m * kv_heads + h) * G * dim, keys, values, &tail, head, n, capacity, dim, scale, scores, row, G,
                   bf16);
            for (int i = 0; i < G * dim; i++) store(out, (m * kv_heads + h) * G * dim + i, row[i], bf16);
        }
    }
    return failed;
}

/* out [rows, kv_heads * group * dim]; the token of row m sees keys 0..position[m] of its slot. In a branching draft (path not
 * NULL, [rows, deepest]) index fork[m] + d lies at path[m][d]. Nonzero: out of memory. */
int attention(const float *q, const void *keys, const void *values, const int64_t *slot, const int64_t *position,
              const int64_t *fork, const int64_t *path, int64_t deepest, void *out, int64_t rows, int kv_heads, int group,
              int dim, int64_t capacity, float scale, int threads, int bf16) {
#define CASE(G)                                                                                                           \
    case G:                                                                                                               \
        return bf16 ? attention_impl(q, keys, values, slot, position, fork, path, deepest, out, rows, kv_heads, dim,      \
                                     capacity, scale, threads, G, 1)                                                      \
                    : attention_impl(q, keys, values, slot, position, fork, path, deepest, out, rows, kv_heads, dim,      \
                                     capacity, scale, threads, G, 0);
    switch (group) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(16)
    }
    return 2;
#undef CASE
}
