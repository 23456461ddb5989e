/* What a decoder layer does beside its products and attention: norms, gated activation, rotary positions and the cache's entries. */
#include "lanes.h"

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
