/* All layers of a pass in one call, so that nothing is interpreted between two kernels. Products stay torch's own, called through its
 * C interface (aoti_torch_*): their bits are those of a pass that calls them from Python. */
#include "lanes.h"

typedef void *Handle;

/* torch's functions, whose addresses Python looks up; each returns nonzero for a failure. */
typedef struct {
    int32_t (*linear)(Handle x, Handle weight, Handle *bias, const char *attr, const double **scalars, int64_t count,
                      const char **algorithm, Handle *out);
    int32_t (*from_blob)(void *data, int64_t ndim, const int64_t *sizes, const int64_t *strides, int64_t offset, int32_t dtype,
                         int32_t device, int32_t index, Handle *out);
    int32_t (*data)(Handle, void **);
    int32_t (*drop)(Handle);
    int32_t dtype, device;
} Torch;

/* NULL where a layer has no such weight. */
typedef struct {
    Handle qkv, output, gate_up, down, qkv_bias, output_bias, gate_up_bias, down_bias;
    const float *input_norm, *q_norm, *k_norm, *post_norm;
} Layer;

/* One pass. `residual` comes in as the embedding; `normed`, `mixed`, `active` and `q` are room; `taps` ascend. */
typedef struct {
    int64_t rows, padded, hidden, inner, capacity, deepest, layers, tapped;
    int32_t heads, kv_heads, dim, threads, bf16;
    float eps, scale;
    const int64_t *position, *write, *slot, *fork, *path, *taps;
    const float *cos, *sin, *norm;
    float *residual, *q, *tap;
    void *normed, *mixed, *active, *out;
    void *const *keys, *const *values;
} Pass;

void add_rmsnorm(float *, const void *, const float *, float, void *, int64_t, int64_t, int, int);
void silu_mul(const void *, void *, int64_t, int64_t, int, int);
void rope_write(const void *, const float *, const float *, const int64_t *, const int64_t *, const int64_t *, const float *,
                const float *, float, float *, void *, void *, int64_t, int, int, int, int64_t, int, int);
int attention(const float *, const void *, const void *, const int64_t *, const int64_t *, const int64_t *, const int64_t *,
              int64_t, void *, int64_t, int, int, int, int64_t, float, int, int);

/* The product is kept in `out` until the next one into it; its numbers. NULL for a failure. */
static void *product(const Torch *torch, Handle x, Handle weight, Handle bias, Handle *out) {
    void *numbers = NULL;
    if (*out) torch->drop(*out);
    *out = NULL;
    if (torch->linear(x, weight, bias ? &bias : NULL, "none", NULL, 0, NULL, out)) return NULL;
    return torch->data(*out, &numbers) ? NULL : numbers;
}

static int reads(const Torch *torch, void *data, int64_t rows, int64_t width, Handle *out) {
    int64_t sizes[2] = {rows, width}, strides[2] = {width, 1};
    return torch->from_blob(data, 2, sizes, strides, 0, torch->dtype, torch->device, 0, out);
}

static int layers_of(const Torch *torch, const Layer *layers, const Pass *p, Handle normed, Handle mixed, Handle active, Handle *y) {
    int64_t tapped = 0;
    const void *x = NULL;
    for (int64_t l = 0; l < p->layers; l++) {
        const Layer *w = layers + l;
        void *fused;
        add_rmsnorm(p->residual, x, w->input_norm, p->eps, p->normed, p->padded, p->hidden, p->threads, p->bf16);
        if (tapped < p->tapped && p->taps[tapped] == l)
            memcpy(p->tap + tapped++ * p->rows * p->hidden, p->residual, (size_t)(p->rows * p->hidden) * sizeof(float));
        if (!(fused = product(torch, normed, w->qkv, w->qkv_bias, y))) return 1;
        rope_write(fused, p->cos, p->sin, p->position, p->write, p->slot, w->q_norm, w->k_norm, p->eps, p->q, p->keys[l],
                   p->values[l], p->rows, p->heads, p->kv_heads, p->dim, p->capacity, p->threads, p->bf16);
        if (attention(p->q, p->keys[l], p->values[l], p->slot, p->position, p->fork, p->path, p->deepest, p->mixed, p->rows,
                      p->kv_heads, p->heads / p->kv_heads, p->dim, p->capacity, p->scale, p->threads, p->bf16))
            return 1;
        if (!(x = product(torch, mixed, w->output, w->output_bias, y))) return 1;
        add_rmsnorm(p->residual, x, w->post_norm, p->eps, p->normed, p->padded, p->hidden, p->threads, p->bf16);
        if (!(fused = product(torch, normed, w->gate_up, w->gate_up_bias, y))) return 1;
        silu_mul(fused, p->active, p->padded, p->inner, p->threads, p->bf16);
        if (!(x = product(torch, active, w->down, w->down_bias, y))) return 1;
    }
    add_rmsnorm(p->residual, x, p->norm, p->eps, p->out, p->padded, p->hidden, p->threads, p->bf16);
    return 0;
}

/* Nonzero: out of memory, or a product that torch refused. */
int stack(const Torch *torch, const Layer *layers, const Pass *p) {
    Handle normed = NULL, mixed = NULL, active = NULL, y = NULL;
    int failed = reads(torch, p->normed, p->padded, p->hidden, &normed) ||
                 reads(torch, p->mixed, p->padded, (int64_t)p->heads * p->dim, &mixed) ||
                 reads(torch, p->active, p->padded, p->inner, &active) ||
                 layers_of(torch, layers, p, normed, mixed, active, &y);
    Handle all[4] = {normed, mixed, active, y};
    for (int i = 0; i < 4; i++)
        if (all[i]) torch->drop(all[i]);
    return failed;
}
