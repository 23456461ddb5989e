/* The race sampler: see rollout/sampling.py, whose numpy form is the definition. */
#include "lanes.h"

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
