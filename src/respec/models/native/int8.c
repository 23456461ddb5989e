/* A linear layer with 8-bit weights, for drafts: half the bytes of bfloat16, and exact integer sums, so that a row's result depends on
 * nothing but the row.
 *
 * Weights are int8 with a scale an output, laid out [out / 16, in / 4, 16, 4]: what one dot-product instruction reads is one line. A
 * row of activations is rounded to int8 at its own largest magnitude, and stored with 128 added (the instruction wants one operand
 * unsigned); the weights' sums take that out again. Compiled and bound as the other kernels are.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX512VNNI__
#include <immintrin.h>
#endif

#define LANES 16
#define ROWS 8
#define INLINE static inline __attribute__((always_inline))

typedef int32_t VecI __attribute__((vector_size(64)));

INLINE float load(const void *p, int64_t i, const int bf16) {
    if (!bf16) return ((const float *)p)[i];
    union { uint32_t u; float f; } c;
    c.u = (uint32_t)((const uint16_t *)p)[i] << 16;
    return c.f;
}

INLINE void store(void *p, int64_t i, float x, const int bf16) {
    if (!bf16) {
        ((float *)p)[i] = x;
        return;
    }
    union { uint32_t u; float f; } c;
    c.f = x;
    uint32_t rounded = (c.u + 0x7FFFu + ((c.u >> 16) & 1u)) >> 16;
    ((uint16_t *)p)[i] = (uint16_t)(x != x ? 0x7FC0u : rounded);
}

/* acc[l] += sum of x[0..3] * w[l][0..3] */
INLINE VecI dot4(VecI acc, const uint8_t *x, const int8_t *w) {
#ifdef __AVX512VNNI__
    int32_t four;
    memcpy(&four, x, 4);
    return (VecI)_mm512_dpbusd_epi32((__m512i)acc, _mm512_set1_epi32(four), _mm512_loadu_si512(w));
#else
    for (int l = 0; l < LANES; l++)
        for (int i = 0; i < 4; i++) acc[l] += (int32_t)x[i] * (int32_t)w[4 * l + i];
    return acc;
#endif
}

/* Two tiles of sixteen outputs for `rows` rows: the weights of both stay in the first cache while blocks of rows pass by. */
INLINE void tile(const uint8_t *x, const int8_t *w0, const int8_t *w1, int64_t in, int32_t *out, const int rows) {
    VecI a[ROWS], b[ROWS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) a[r] = b[r] = (VecI){0};
    for (int64_t k = 0; k < in; k += 4) {
        /* the next two tiles, which follow these */
        __builtin_prefetch(w1 + (in + k) * LANES, 0, 2);
        __builtin_prefetch(w1 + (2 * in + k) * LANES, 0, 2);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            a[r] = dot4(a[r], x + r * in + k, w0 + k * LANES);
            b[r] = dot4(b[r], x + r * in + k, w1 + k * LANES);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        memcpy(out + r * 2 * LANES, &a[r], sizeof a[r]);
        memcpy(out + r * 2 * LANES + LANES, &b[r], sizeof b[r]);
    }
}

INLINE void round_row(const void *x, int64_t row, int64_t in, uint8_t *rounded, float *scale, const int bf16) {
    /* without their signs floats are ordered as their bits are, and integers' maxima can be taken side by side */
    union { uint32_t u; float f; } c = {0};
    for (int64_t i = 0; i < in; i++) {
        union { float f; uint32_t u; } size = {load(x, row * in + i, bf16)};
        size.u &= 0x7FFFFFFFu;
        c.u = size.u > c.u ? size.u : c.u;
    }
    float top = c.f;
    float inverse = top > 0.0f ? 127.0f / top : 0.0f;
    *scale = top / 127.0f;
    /* adding and taking off 1.5 * 2^23 rounds to an integer */
    for (int64_t i = 0; i < in; i++)
        rounded[i] = (uint8_t)(int32_t)((load(x, row * in + i, bf16) * inverse + 12582912.0f) - 12582912.0f + 128.0f);
}

INLINE int linear_impl(const void *x, const int8_t *weight, const float *scale, const int32_t *sum, const float *bias,
                       void *y, int64_t rows, int64_t in, int64_t out, int threads, const int bf16) {
    uint8_t *rounded = malloc((size_t)(rows * in) + (size_t)rows * sizeof(float));
    if (!rounded) return 1;
    float *row_scale = (float *)(rounded + rows * in);
    for (int64_t m = 0; m < rows; m++) round_row(x, m, in, rounded + m * in, row_scale + m, bf16);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t pair = 0; pair < out / (2 * LANES); pair++) {
        const int8_t *w0 = weight + pair * 2 * LANES * in, *w1 = w0 + LANES * in;
        for (int64_t m = 0; m < rows; m += ROWS) {
            int32_t block[ROWS * 2 * LANES];
            int count = rows - m < ROWS ? (int)(rows - m) : ROWS;
            switch (count) {
#define CASE(R)                                        \
    case R:                                            \
        tile(rounded + m * in, w0, w1, in, block, R);  \
        break;
                CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
#undef CASE
            }
            for (int r = 0; r < count; r++)
                for (int l = 0; l < 2 * LANES; l++) {
                    int64_t column = pair * 2 * LANES + l;
                    float value = (float)(block[r * 2 * LANES + l] - 128 * sum[column]) * scale[column] * row_scale[m + r];
                    store(y, (m + r) * out + column, bias ? value + bias[column] : value, bf16);
                }
        }
    }
    free(rounded);
    return 0;
}

/* y [rows, out] = x [rows, in] W^T + bias; x and y in float32 or bfloat16. in is a multiple of 4, out of 32. Nonzero: out of memory. */
int int8_linear(const void *x, const int8_t *weight, const float *scale, const int32_t *sum, const float *bias, void *y,
                int64_t rows, int64_t in, int64_t out, int threads, int bf16) {
    return bf16 ? linear_impl(x, weight, scale, sum, bias, y, rows, in, out, threads, 1)
                : linear_impl(x, weight, scale, sum, bias, y, rows, in, out, threads, 0);
}
