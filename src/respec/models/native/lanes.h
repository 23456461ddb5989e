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
#pragma once

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

/* Each thread keeps its scratch: memory given back after every call would be mapped anew at every call. */
static inline char *thread_scratch(size_t bytes) {
    static _Thread_local char *held = NULL;
    static _Thread_local size_t size = 0;
    if (size < bytes) {
        free(held);
        held = malloc(bytes);
        size = held ? bytes : 0;
    }
    return held;
}
