/* Decoding kernels whose result for a row depends on nothing but that row.
 *
 * Exact speculation needs: the same token at the same position, after the same tokens, gives the same bits, whatever else
 * is in the batch. So every reduction here runs over one row, by one thread, in an order fixed by the row's own length:
 * sixteen explicit lanes, folded in a fixed tree. Threads share out rows, never the inside of one. The lanes are plain C
 * loops of constant length, which a compiler turns into vector code of any width without changing the order.
 *
 * Activations and caches are float32 (dtype 0) or bfloat16 (dtype 1); all arithmetic is float32, sums over a vocabulary and
 * races are float64. Built by kernels.py with the system's C compiler; no torch headers, called through ctypes.
 */
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 16
#define INLINE static inline __attribute__((always_inline))

/* Sixteen floats: the compiler's own vectors, lowered to whatever width the processor has; the order never changes. */
typedef float Vec __attribute__((vector_size(64)));
typedef int32_t VecI __attribute__((vector_size(64)));
typedef uint32_t VecU __attribute__((vector_size(64)));
typedef uint16_t VecH __attribute__((vector_size(32)));

INLINE float load(const void *p, int64_t i, const int bf16) {
    if (bf16) {
        union { uint32_t u; float f; } c;
        c.u = (uint32_t)((const uint16_t *)p)[i] << 16;
        return c.f;
    }
    return ((const float *)p)[i];
}

INLINE void store(void *p, int64_t i, float x, const int bf16) {
    if (bf16) {
        union { uint32_t u; float f; } c;
        c.f = x;
        /* round to nearest even; a NaN stays a NaN */
        uint32_t rounded = (c.u + 0x7FFFu + ((c.u >> 16) & 1u)) >> 16;
        ((uint16_t *)p)[i] = (uint16_t)(x != x ? 0x7FC0u : rounded);
    } else {
        ((float *)p)[i] = x;
    }
}

INLINE Vec load_vec(const void *p, int64_t i, const int bf16) {
    if (bf16) {
        VecH h;
        memcpy(&h, (const uint16_t *)p + i, sizeof h);
        return (Vec)(__builtin_convertvector(h, VecU) << 16);
    }
    Vec x;
    memcpy(&x, (const float *)p + i, sizeof x);
    return x;
}

INLINE void store_vec(void *p, int64_t i, Vec x, const int bf16) {
    if (bf16) {
        VecU u = (VecU)x, nan = (VecU)(x != x);
        u = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
        u = (nan & 0x7FC0u) | (~nan & u);
        VecH h = __builtin_convertvector(u, VecH);
        memcpy((uint16_t *)p + i, &h, sizeof h);
    } else {
        memcpy((float *)p + i, &x, sizeof x);
    }
}

INLINE Vec splat(float x) { return (Vec){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }

INLINE Vec pick(VecI mask, Vec yes, Vec no) { return (Vec)((mask & (VecI)yes) | (~mask & (VecI)no)); }

INLINE Vec larger(Vec a, Vec b) { return pick(a > b, a, b); }

/* e^x, relative error below 2e-7; exactly 0 below -87, so that a masked or impossible entry has no mass. */
INLINE Vec exp_vec(Vec x) {
    VecI nonzero = x >= splat(-87.0f);
    x = pick(nonzero, x, splat(-87.0f));
    x = pick(x > splat(88.0f), splat(88.0f), x);
    Vec magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    Vec n = (x * 1.44269504088896341f + magic) - magic;
    Vec r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    Vec y = splat(1.9875691500e-4f);
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    y = y * (Vec)((__builtin_convertvector(n, VecI) + 127) << 23);
    return (Vec)((VecI)y & nonzero);
}

INLINE float exp_one(float x) { return exp_vec(splat(x))[0]; }

INLINE float fold(Vec acc) {
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int l = 0; l < width; l++) acc[l] += acc[l + width];
    return acc[0];
}

INLINE float fold_max(Vec acc) {
    float top = acc[0];
    for (int l = 1; l < LANES; l++) top = acc[l] > top ? acc[l] : top;
    return top;
}

INLINE float sum_of_squares(const float *x, int64_t n) {
    Vec acc = splat(0.0f);
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        Vec v = load_vec(x, i, 0);
        acc += v * v;
    }
    for (int l = 0; i < n; i++, l++) acc[l] += x[i] * x[i];
    return fold(acc);
}

/* residual += x (x may be NULL); out = residual / rms(residual) * weight. */
INLINE void add_rmsnorm_impl(float *residual, const void *x, const float *weight, float eps, void *out, int64_t rows,
                             int64_t width, int threads, const int bf16) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows > 8)
    for (int64_t m = 0; m < rows; m++) {
        float *r = residual + m * width;
        if (x)
            for (int64_t i = 0; i < width; i++) r[i] += load(x, m * width + i, bf16);
        float scale = 1.0f / sqrtf(sum_of_squares(r, width) / (float)width + eps);
        for (int64_t i = 0; i < width; i++) store(out, m * width + i, r[i] * scale * weight[i], bf16);
    }
}

void add_rmsnorm(float *residual, const void *x, const float *weight, float eps, void *out, int64_t rows, int64_t width,
                 int threads, int bf16) {
    if (bf16) add_rmsnorm_impl(residual, x, weight, eps, out, rows, width, threads, 1);
    else add_rmsnorm_impl(residual, x, weight, eps, out, rows, width, threads, 0);
}

/* gate_up is [rows, 2 * width], gate first; out = silu(gate) * up. */
INLINE void silu_mul_impl(const void *gate_up, void *out, int64_t rows, int64_t width, int threads, const int bf16) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows > 4)
    for (int64_t m = 0; m < rows; m++) {
        int64_t base = m * 2 * width;
        int64_t i = 0;
        for (; i + LANES <= width; i += LANES) {
            Vec gate = load_vec(gate_up, base + i, bf16), up = load_vec(gate_up, base + width + i, bf16);
            store_vec(out, m * width + i, gate / (exp_vec(-gate) + 1.0f) * up, bf16);
        }
        for (; i < width; i++) {
            float gate = load(gate_up, base + i, bf16), up = load(gate_up, base + width + i, bf16);
            store(out, m * width + i, gate / (1.0f + exp_one(-gate)) * up, bf16);
        }
    }
}

void silu_mul(const void *gate_up, void *out, int64_t rows, int64_t width, int threads, int bf16) {
    if (bf16) silu_mul_impl(gate_up, out, rows, width, threads, 1);
    else silu_mul_impl(gate_up, out, rows, width, threads, 0);
}

/* One head: optional RMS norm over the head (Qwen3), then the rotation of halves (rotate_half form). */
INLINE void norm_rotate(const void *in, int64_t base, const float *weight, float eps, const float *cos_row,
                        const float *sin_row, float *x, int dim, const int bf16) {
    for (int i = 0; i < dim; i++) x[i] = load(in, base + i, bf16);
    if (weight) {
        float scale = 1.0f / sqrtf(sum_of_squares(x, dim) / (float)dim + eps);
        for (int i = 0; i < dim; i++) x[i] = x[i] * scale * weight[i];
    }
    int half = dim / 2;
    for (int i = 0; i < half; i++) {
        float a = x[i], b = x[i + half];
        x[i] = a * cos_row[i] - b * sin_row[i];
        x[i + half] = b * cos_row[i + half] + a * sin_row[i + half];
    }
}

/* Splits qkv [rows, (heads + 2 * kv_heads) * dim], rotates q and k by their positions, writes k and v into the cache.
 * A row is written at index write[m], which is its position except in a branching draft.
 * q_out is float32 [rows, heads, dim]. Cache layout: keys [slot, kv_head, capacity / 16, dim, 16], so that sixteen
 * neighbouring keys are one vector; values [slot, kv_head, capacity, dim]. */
INLINE void rope_write_impl(const void *qkv, const float *cos_table, const float *sin_table, const int64_t *position,
                            const int64_t *write, const int64_t *slot, const float *q_weight, const float *k_weight, float eps, float *q_out,
                            void *keys, void *values, int64_t rows, int heads, int kv_heads, int dim, int64_t capacity,
                            int threads, const int bf16) {
    int64_t stride = (int64_t)(heads + 2 * kv_heads) * dim;
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows > 4)
    for (int64_t m = 0; m < rows; m++) {
        const float *cos_row = cos_table + position[m] * dim, *sin_row = sin_table + position[m] * dim;
        for (int h = 0; h < heads; h++)
            norm_rotate(qkv, m * stride + (int64_t)h * dim, q_weight, eps, cos_row, sin_row,
                        q_out + (m * heads + h) * dim, dim, bf16);
        float x[512];
        for (int h = 0; h < kv_heads; h++) {
            norm_rotate(qkv, m * stride + (int64_t)(heads + h) * dim, k_weight, eps, cos_row, sin_row, x, dim, bf16);
            int64_t head = slot[m] * kv_heads + h;
            int64_t tile = head * capacity * dim + write[m] / LANES * LANES * dim + write[m] % LANES;
            for (int i = 0; i < dim; i++) store(keys, tile + (int64_t)i * LANES, x[i], bf16);
            int64_t from = m * stride + (int64_t)(heads + kv_heads + h) * dim;
            int64_t to = (head * capacity + write[m]) * dim;
            for (int i = 0; i < dim; i++) store(values, to + i, load(qkv, from + i, bf16), bf16);
        }
    }
}

void rope_write(const void *qkv, const float *cos_table, const float *sin_table, const int64_t *position,
                const int64_t *write, const int64_t *slot, const float *q_weight, const float *k_weight, float eps, float *q_out, void *keys,
                void *values, int64_t rows, int heads, int kv_heads, int dim, int64_t capacity, int threads, int bf16) {
    if (bf16)
        rope_write_impl(qkv, cos_table, sin_table, position, write, slot, q_weight, k_weight, eps, q_out, keys, values, rows,
                        heads, kv_heads, dim, capacity, threads, 1);
    else
        rope_write_impl(qkv, cos_table, sin_table, position, write, slot, q_weight, k_weight, eps, q_out, keys, values, rows,
                        heads, kv_heads, dim, capacity, threads, 0);
}

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

/* Each thread keeps its scratch: memory given back after every call would be mapped anew at every call. */
static char *thread_scratch(size_t bytes) {
    static _Thread_local char *held = NULL;
    static _Thread_local size_t size = 0;
    if (size < bytes) {
        free(held);
        held = malloc(bytes);
        size = held ? bytes : 0;
    }
    return held;
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

/* ---- the race sampler: see rollout/sampling.py, whose numpy form is the definition ---- */

INLINE uint64_t splitmix(uint64_t state) {
    uint64_t z = state;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

INLINE double uniform(uint64_t key, uint64_t index) {
    uint64_t bits = splitmix(key + (index + 1) * 0x9E3779B97F4A7C15ull);
    return ((double)(bits >> 11) + 0.5) * 0x1p-53;
}

#define CHUNK 64

typedef struct { float x; int32_t id; } Candidate;

static int by_mass(const void *a, const void *b) {
    const Candidate *p = a, *q = b;
    if (p->x != q->x) return p->x > q->x ? -1 : 1;
    return (p->id > q->id) - (p->id < q->id);
}

static int descending(const void *a, const void *b) {
    float p = *(const float *)a, q = *(const float *)b;
    return (p < q) - (p > q);
}

/* The m largest of x[0..n-1], largest first, ties to the lower id. Chunk maxima give a bound that at least m entries reach.
 * x is padded with -inf to whole chunks. */
static void largest(const float *x, int64_t n, int64_t m, Candidate *found, float *maxima, float *sorted) {
    int64_t chunk = CHUNK, chunks = (n + chunk - 1) / chunk, count = 0;
    for (int64_t c = 0; c < chunks; c++) {
        Vec top = load_vec(x, c * chunk, 0);
        for (int64_t i = c * chunk + LANES; i < (c + 1) * chunk; i += LANES) top = larger(load_vec(x, i, 0), top);
        maxima[c] = fold_max(top);
    }
    float bound = -INFINITY;
    if (chunks > m) {
        memcpy(sorted, maxima, (size_t)chunks * sizeof(float));
        qsort(sorted, (size_t)chunks, sizeof(float), descending);
        bound = sorted[m - 1];
    }
    for (int64_t c = 0; c < chunks; c++) {
        if (maxima[c] < bound) continue;
        int64_t end = (c + 1) * chunk < n ? (c + 1) * chunk : n;
        for (int64_t i = c * chunk; i < end; i++)
            if (x[i] >= bound) found[count++] = (Candidate){x[i], (int32_t)i};
    }
    qsort(found, (size_t)count, sizeof(Candidate), by_mass);
}

typedef struct {
    int greedy;
    int64_t top_k;
    double top_p, min_p;
    int64_t race; /* how many of the most probable tokens race one by one */
} Law;

/* How many of the m most probable tokens top-k, top-p and min-p keep; m itself when the cut lies beyond. */
static int64_t cut(const Candidate *found, int64_t m, int64_t V, const Law *law, float top, double total, float *kept_logmass) {
    int64_t limit = law->top_k > 0 && law->top_k < m ? law->top_k : m, kept = 0;
    double within = 1.0, mass = 0.0;
    if (law->top_k > 0 && law->top_k < V) {
        within = 0.0;
        for (int64_t i = 0; i < limit; i++) within += exp((double)(found[i].x - top)) / total;
    }
    for (; kept < limit; kept++) {
        double relative = exp((double)(found[kept].x - top));
        /* a token stays while the mass before it has not reached top_p of what top_k left */
        if (kept > 0 && (mass >= law->top_p * within || relative < law->min_p || relative == 0.0)) break;
        mass += relative / total;
    }
    *kept_logmass = mass < 1.0 ? (float)log(mass) : 0.0f;
    return kept;
}

/* Inverse CDF over the tokens that did not race one by one, in order of id; -1 when they have no mass. Overwrites x. */
static int64_t resolve_tail(float *x, int64_t V, const Candidate *raced, int64_t m, float top, double u, float *chunk_mass,
                            float *won) {
    for (int64_t i = 0; i < m; i++) x[raced[i].id] = -INFINITY;
    int64_t chunks = (V + CHUNK - 1) / CHUNK, last = -1;
    double mass = 0.0, before = 0.0;
    for (int64_t c = 0; c < chunks; c++) {
        Vec acc = splat(0.0f);
        for (int64_t i = c * CHUNK; i < (c + 1) * CHUNK; i += LANES) acc += exp_vec(load_vec(x, i, 0) - top);
        chunk_mass[c] = fold(acc);
        mass += (double)chunk_mass[c];
    }
    double target = u * mass;
    for (int64_t c = 0; c < chunks; c++) {
        if (chunk_mass[c] <= 0.0f) continue;
        if (before + (double)chunk_mass[c] < target && c + 1 < chunks) {
            before += (double)chunk_mass[c];
            continue;
        }
        for (int64_t v = c * CHUNK; v < (c + 1) * CHUNK && v < V; v++) {
            double p = (double)exp_one(x[v] - top);
            if (p <= 0.0) continue;
            last = v;
            *won = x[v];
            before += p;
            if (before >= target) return v;
        }
        /* float and double sums of the chunk differ by rounding: its last token takes the difference */
        return last;
    }
    return last;
}

static void draw_row(float *x, int64_t V, const Law *law, uint64_t key, Candidate *found, float *maxima, float *sorted,
                     int32_t *token, float *logprob, float *kept_logmass, float *entropy) {
    int64_t padded = (V + CHUNK - 1) / CHUNK * CHUNK;
    Vec tops = load_vec(x, 0, 0);
    for (int64_t v = LANES; v < padded; v += LANES) tops = larger(load_vec(x, v, 0), tops);
    float top = fold_max(tops);
    double total = 0.0, moment = 0.0;
    VecI bad = {0};
    /* float lanes over 4096 entries at most, then float64 */
    for (int64_t v0 = 0; v0 < padded; v0 += 4096) {
        int64_t end = v0 + 4096 < padded ? v0 + 4096 : padded;
        Vec mass = splat(0.0f), first = splat(0.0f);
        for (int64_t v = v0; v < end; v += LANES) {
            Vec d = load_vec(x, v, 0) - top, e = exp_vec(d);
            bad |= d != d;
            mass += e;
            first += e * pick(e > splat(0.0f), d, splat(0.0f));
        }
        total += (double)fold(mass);
        moment += (double)fold(first);
    }
    int failed = 0;
    for (int l = 0; l < LANES; l++) failed |= bad[l];
    if (failed) {
        /* a comparison would pass a NaN over: it is handed on for the caller to refuse */
        *token = 0;
        *logprob = *entropy = *kept_logmass = NAN;
        return;
    }
    double log_total = log(total);
    *entropy = (float)(log_total - moment / total);
    *kept_logmass = 0.0f;
    if (law->greedy) {
        int64_t best = 0;
        for (int64_t v = 1; v < V; v++) best = x[v] > x[best] ? v : best;
        *token = (int32_t)best;
        *logprob = (float)((double)(x[best] - top) - log_total);
        return;
    }
    int truncated = law->top_k > 0 || law->top_p < 1.0 || law->min_p > 0.0;
    int64_t m = law->race < V ? law->race : V, kept = m;
    if (!truncated && m == V)
        for (int64_t v = 0; v < V; v++) found[v] = (Candidate){x[v], (int32_t)v};
    else if (!truncated)
        largest(x, V, m, found, maxima, sorted);
    else
        /* as many of the most probable as decide where the cut lies */
        for (m = law->top_k > 512 ? law->top_k : 512;; m *= 16) {
            m = m < V ? m : V;
            largest(x, V, m, found, maxima, sorted);
            kept = cut(found, m, V, law, top, total, kept_logmass);
            if (kept < m || m == V) break;
        }
    double best = INFINITY, head = 0.0;
    int64_t winner = found[0].id;
    for (int64_t i = 0; i < kept; i++) {
        double p = exp((double)(found[i].x - top)) / total;
        head += p;
        if (p <= 0.0) continue;
        double arrival = -log(uniform(key, (uint64_t)found[i].id)) / p;
        if (arrival < best || (arrival == best && found[i].id < winner)) best = arrival, winner = found[i].id;
    }
    double tail = 1.0 - head;
    if (!truncated && m < V && tail > 0.0 && -log(uniform(key, (uint64_t)V)) / tail < best) {
        float won = x[winner];
        int64_t tail_winner = resolve_tail(x, V, found, m, top, uniform(key, (uint64_t)V + 1), maxima, &won);
        if (tail_winner >= 0) winner = tail_winner;
        *token = (int32_t)winner;
        *logprob = (float)((double)(won - top) - log_total);
        return;
    }
    *token = (int32_t)winner;
    *logprob = (float)((double)(x[winner] - top) - log_total);
}

INLINE void scale_row(const void *logits, int64_t from, int64_t V, float inverse_temperature, float *x, const int bf16) {
    int64_t v = 0;
    for (; v + LANES <= V; v += LANES) store_vec(x, v, load_vec(logits, from + v, bf16) * inverse_temperature, 0);
    for (; v < V; v++) x[v] = load(logits, from + v, bf16) * inverse_temperature;
}

/* One draw a row of logits [rows, V]. Nonzero: out of memory. */
int draw(const void *logits, int64_t rows, int64_t V, float inverse_temperature, int greedy, int64_t top_k, double top_p,
         double min_p, int64_t race, const uint64_t *key, int32_t *token, float *logprob, float *kept_logmass,
         float *entropy, int threads, int bf16) {
    Law law = {greedy, top_k, top_p, min_p, race};
    int failed = 0;
#pragma omp parallel num_threads(threads) if (threads > 1 && rows > 1)
    {
        int64_t chunks = (V + CHUNK - 1) / CHUNK;
        char *scratch = thread_scratch((size_t)chunks * (CHUNK * (sizeof(float) + sizeof(Candidate)) + 2 * sizeof(float)));
        float *x = (float *)scratch, *maxima = x + chunks * CHUNK;
        Candidate *found = (Candidate *)(maxima + 2 * chunks);
        if (!scratch) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t m = 0; m < rows; m++) {
            if (!scratch) continue;
            if (bf16) scale_row(logits, m * V, V, inverse_temperature, x, 1);
            else scale_row(logits, m * V, V, inverse_temperature, x, 0);
            for (int64_t v = V; v < chunks * CHUNK; v++) x[v] = -INFINITY;
            draw_row(x, V, &law, key[m], found, maxima, maxima + chunks, token + m, logprob + m, kept_logmass + m,
                     entropy + m);
        }
    }
    return failed;
}
