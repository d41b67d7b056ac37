/* The CPU kernels: one decoder layer, one projection, one attention. Any number of threads, any vector unit.
 *
 * What makes them worth having: a weight is read from memory once for all rows of a step, and a row's result
 * does not depend on which other rows share the step, to the last bit. Both follow from one choice: weights
 * are packed in panels of 16 outputs, [N/16][K][16], and output n of row m is always the same chain of fused
 * multiply-adds over k = 0..K-1, whatever M is. There is no horizontal sum whose order could change.
 * Weights that are bfloat16 stay so, and are widened in registers: half the memory, the same bits. Weights in blocks of
 * few bits stay so, too; blocks.c multiplies with them.
 *
 * The torch twin of everything here is reference.py; parity and row invariance are tests.
 * Vectors are GCC/Clang vector extensions: the compiler lowers them to NEON, AVX2 or AVX-512.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "blocks.h"
#include "team.h"

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
#define REGS (PANEL / LANES)    /* vector registers a panel row takes */
#define FEW 8                   /* rows whose norms and rotations are too little to share out */
#if LANES == 16
#define MOST 8                  /* rows a panel meets at a time: a chain of additions waits four cycles, two end in each */
#else
#define MOST 6                  /* 24 NEON accumulators, 6 rows and a weight just fit */
#endif

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef float four __attribute__((vector_size(16), aligned(4), may_alias));

/* Packed panels of 16 outputs: WHOLE float32, [N/16][K][16]; HALF bfloat16 in pairs, [N/16][K/2][16], k in the lower half
 * of a word; the other kinds are blocks.c's. */
typedef struct {
    const void *data;
    int32_t kind, outputs;
} Part;

#define PARTS 3
#define MOST_EXPERTS 4096 /* as in load/config.py */

/* A packed matrix: outputs in one format, followed by outputs in another. Parts that are not used have no outputs. */
typedef struct {
    Part parts[PARTS];
} Matrix;

/* What attention of a layer is. */
typedef struct {
    int32_t heads, kv_heads, head_dim, window; /* a window of 0: all that went before */
    int32_t chunk;                             /* positions that see only each other; 0: all */
    int32_t kept;                              /* number format of keys and values, see kv_formats.h */
    float scale, softcap;                      /* of scores; a cap of 0: none */
    const float *sinks;                        /* [heads]: logits that join the sum of weights; may be null */
} Heads;

typedef struct {
    Matrix gate, up, down;
    const float *gate_bias, *up_bias, *down_bias; /* may be null */
} Mlp;

/* What load/config.py says of a layer's experts. A width is this rank's. */
typedef struct {
    Matrix router, shared_gate; /* shared_gate has no outputs where there is none */
    const float *router_bias, *correction; /* may be null */
    const Mlp *each;                       /* [count] */
    int32_t count, per_token, width, all_width, sigmoid, normalise, groups, groups_kept, weighs_input, by_score;
    float floor, scale;
} Experts;

/* Where ranks share a layer, heads and outputs are this rank's; `all_` is what all of them have together. */
typedef struct {
    /* Norms before attention and MLP (attn_norm, mlp_norm) or of what they add (out_norm, down_norm): null where there is
     * none. */
    const float *attn_norm, *qkv_bias, *q_norm, *k_norm, *out_bias, *mlp_norm, *out_norm, *down_norm;
    const float *cos, *sin; /* [context][head_dim / 2]; null: no positions */
    const float *gain;      /* [context], of rotated queries; may be null */
    Matrix qkv, out;
    Mlp mlp;                /* of all rows; layers of experts may have none */
    const Experts *experts; /* may be null */
    Heads heads;
    int32_t intermediate, whole, gelu; /* whole: q_norm and k_norm are over all heads together */
    int32_t all_mixed, all_act;        /* inputs of out and of down */
    float clamp;                       /* of the products with gate and up; 0: none */
} Layer;

typedef struct {
    int32_t hidden, threads;
    int32_t sums;        /* outputs of out and of down that are this rank's */
    float eps, residual; /* residual: times what attention and MLP add */
} Shape;

typedef struct {
    int32_t rows, table_stride;
    const int32_t *positions, *slots, *table_rows, *prefix;
    const int64_t *ancestors;
    const int32_t *table;
} Rows;

typedef struct {
    float *x;      /* [rows][hidden], the residual stream, in place */
    float *normed; /* [rows][hidden] */
    float *qkv;    /* [rows][(heads + 2 kv_heads) head_dim] */
    float *mixed;  /* [rows][heads head_dim] */
    float *act;    /* [rows][intermediate] */
    /* Of experts. A row's choices are in ascending order of the experts; the pairs of row and expert are in the order of
     * the experts, and of the rows of each. */
    float *logits;        /* [rows][experts] */
    float *weights;       /* [rows][per_token] */
    float *shared_weight; /* [rows] */
    int32_t *chosen, *places, *sources; /* [rows][per_token] experts and pairs, [pairs] rows */
    int32_t *touched, *starts;          /* [experts] with rows, and where theirs begin among the pairs; [experts + 1] */
    float *gathered;                    /* [pairs][hidden]: what experts read, then what they give */
    float *expert_act, *all_expert_act; /* [pairs][width], of this rank and of all */
    float *mixture;                     /* [rows][hidden] */
    int32_t *read;                      /* experts with rows, added up over layers */
    float *all_mixed, *all_act, *sums; /* all ranks' mixed and act, and this rank's part of x; alone: mixed, act, x */
    float *scores; /* [threads][score_stride], see attention_rows */
    int32_t score_stride;
} Work;

/* ---- small pieces ------------------------------------------------------------------------------------- */

typedef union {
    float number;
    uint32_t word;
} Bits;

/* yes where the mask is set, else no (C has no vector ?: before GCC 14). */
static inline vec pick(ivec mask, vec yes, vec no) { return (vec)((mask & (ivec)yes) | (~mask & (ivec)no)); }

/* e^x by x = n ln2 + r, a polynomial in r, and n added to the exponent. Good to 2 ulp, same bits everywhere. */
static inline vec exp_vec(vec x) {
    const vec zero = {0};
    x = pick(x < -87.0f, zero - 87.0f, x);
    x = pick(x > 88.0f, zero + 88.0f, x);
    vec shifted = x * 1.44269504f + 12582912.0f; /* adding 1.5 * 2^23 rounds to the nearest whole number */
    vec n = shifted - 12582912.0f;
    vec r = x - n * 0.693145752f;
    r = r - n * 1.42860677e-6f;
    vec p = zero + 1.98756915e-4f;
    p = p * r + 1.39819995e-3f;
    p = p * r + 8.33345205e-3f;
    p = p * r + 4.16657962e-2f;
    p = p * r + 1.66666652e-1f;
    p = p * r + 0.5f;
    p = p * r * r + r + 1.0f;
    ivec exponent = __builtin_convertvector(n, ivec) + 127;
    return p * (vec)(exponent << 23);
}

/* Never inlined: every norm of a row has the same order of sums. */
static __attribute__((noinline)) float inverse_rms(const float *x, int n, float eps) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < n; i++) sum += x[i] * x[i];
    return 1.0f / sqrtf(sum / n + eps);
}

static inline void rms_norm(const float *x, const float *weight, int n, float eps, float *y) {
    float inverse = inverse_rms(x, n, eps);
    for (int i = 0; i < n; i++) y[i] = x[i] * inverse * weight[i];
}

/* cap tanh(x / cap), in place. */
static inline void cap_all(float *x, int n, float cap) {
    for (int i = 0; i < n; i++) x[i] = cap * tanhf(x[i] / cap);
}

/* Rotate the two halves of one head: (a, b) -> (a cos - b sin, b cos + a sin). */
static inline void rotate(float *x, const float *cos, const float *sin, int half) {
    for (int i = 0; i < half; i++) {
        float a = x[i], b = x[i + half];
        x[i] = a * cos[i] - b * sin[i];
        x[i + half] = b * cos[i] + a * sin[i];
    }
}

/* ---- the skinny matmul -------------------------------------------------------------------------------- */

#ifdef __ARM_NEON /* it multiplies by one lane of a register: a row's next four values are loaded at once */
#define STEP 4
#define LOAD_ROWS(R)  \
    vec s[R];         \
    _Pragma("GCC unroll 8") for (int r = 0; r < R; r++) s[r] = *(const vec *)(x + (size_t)r * ldx + k);
#define ADD_PRODUCTS(KIND, R)                                                                          \
    _Pragma("GCC unroll 4") for (int j = 0; j < REGS; j++) {                                           \
        vec q = weight_##KIND(w, k, i, j);                                                             \
        _Pragma("GCC unroll 8") for (int r = 0; r < R; r++) acc[r][j] += q * s[r][i];                  \
    }
#else /* AVX broadcasts one value as it loads it, and has registers for no more than one */
#define STEP 2
#define LOAD_ROWS(R)
#define ADD_PRODUCTS(KIND, R)                                                                          \
    vec q[REGS];                                                                                       \
    _Pragma("GCC unroll 4") for (int j = 0; j < REGS; j++) q[j] = weight_##KIND(w, k, i, j);           \
    _Pragma("GCC unroll 8") for (int r = 0; r < R; r++) {                                              \
        float s = x[(size_t)r * ldx + k + i];                                                          \
        _Pragma("GCC unroll 4") for (int j = 0; j < REGS; j++) acc[r][j] += q[j] * s;                  \
    }
#endif

static inline vec weight_whole(const void *w, int k, int i, int j) {
    return *(const vec *)((const float *)w + (size_t)(k + i) * PANEL + j * LANES);
}

static inline vec weight_half(const void *w, int k, int i, int j) {
    ivec pair = *(const ivec *)((const int32_t *)w + (size_t)(k / 2 + i / 2) * PANEL + j * LANES);
    return i % 2 ? (vec)(pair & -65536) : (vec)(pair << 16);
}

#define AHEAD (128 * PANEL * 4) /* bytes: what takes long is fetched while the weights before it are multiplied */

/* R rows against one panel. The accumulators stay in registers; k runs once over the panel. From four rows on the
 * processor is too busy to look ahead by itself. */
#define DEFINE_PANEL(KIND, R)                                                                                    \
    static void panel_##KIND##_##R(const void *w, const char *next, const float *x, int ldx, int K,              \
                                   float y[][PANEL]) {                                                           \
        vec acc[R][REGS];                                                                                        \
        for (int r = 0; r < R; r++)                                                                              \
            for (int j = 0; j < REGS; j++) acc[r][j] = (vec){0};                                                 \
        int k = 0;                                                                                               \
        for (; k + STEP <= K; k += STEP) {                                                                       \
            LOAD_ROWS(R)                                                                                         \
            _Pragma("GCC unroll 4") for (int i = 0; i < STEP; i++) {                                             \
                if (R > 3) __builtin_prefetch(next + (size_t)(k + i) * PANEL * WIDTH_##KIND);                    \
                ADD_PRODUCTS(KIND, R)                                                                            \
            }                                                                                                    \
        }                                                                                                        \
        for (; k < K; k++)                                                                                       \
            for (int j = 0; j < REGS; j++) {                                                                     \
                vec q = weight_##KIND(w, k & ~1, k & 1, j);                                                      \
                for (int r = 0; r < R; r++) acc[r][j] += q * x[(size_t)r * ldx + k];                             \
            }                                                                                                    \
        for (int r = 0; r < R; r++)                                                                              \
            for (int j = 0; j < REGS; j++) *(vec *)(y[r] + j * LANES) = acc[r][j];                               \
    }
#define WIDTH_whole 4
#define WIDTH_half 2
#define DEFINE_PANELS(KIND)                                                                              \
    DEFINE_PANEL(KIND, 1)                                                                                \
    DEFINE_PANEL(KIND, 2)                                                                                \
    DEFINE_PANEL(KIND, 3)                                                                                \
    DEFINE_PANEL(KIND, 4)                                                                                \
    DEFINE_PANEL(KIND, 5)                                                                                \
    DEFINE_PANEL(KIND, 6)                                                                                \
    DEFINE_PANEL(KIND, 7)                                                                                \
    DEFINE_PANEL(KIND, 8)                                                                                \
    static void (*const panels_##KIND[TILE])(const void *, const char *, const float *, int, int, float[][PANEL]) = { \
        panel_##KIND##_1, panel_##KIND##_2, panel_##KIND##_3, panel_##KIND##_4,                          \
        panel_##KIND##_5, panel_##KIND##_6, panel_##KIND##_7, panel_##KIND##_8};
DEFINE_PANELS(whole)
DEFINE_PANELS(half)

typedef struct {
    const void *data;
    const char *next[2]; /* what to fetch meanwhile: beside the first rows, and beside those that find it in the cache */
    int kind;
} Panel;

/* Most rows that a panel of this kind meets at a time. */
static inline int most_rows(int kind) { return kind > HALF ? blocks_rows() : MOST; }

static inline size_t panel_bytes(int kind, int K) {
    if (kind > HALF) return blocks_panel_bytes(kind, K);
    return (size_t)K * PANEL * (kind == HALF ? WIDTH_half : WIDTH_whole);
}

/* Memory for a panel in wide form, if rows would unpack it several times; null if not, or if there is none. On the heap: a
 * panel of a large model is more than a thread's stack has on some systems. */
static void *room_for(const Matrix *w, int K, int rows) {
    size_t most = 0;
    for (int p = 0; p < PARTS && w->parts[p].outputs; p++) {
        int kind = w->parts[p].kind;
        if (kind == WHOLE || kind == Q8_0 || rows <= most_rows(kind) || (kind > HALF && !blocks_widens())) continue;
        size_t bytes = panel_bytes(kind == HALF ? WHOLE : WIDE_LEAST, K);
        most = bytes > most ? bytes : most;
    }
    return most ? malloc(most) : 0;
}

/* Panel n, unpacked into `room` if there is one. */
static inline Panel panel_of(Part w, int n, int K, void *room) {
    size_t bytes = panel_bytes(w.kind, K);
    const char *own = (const char *)w.data + n * bytes;
    if (!room || w.kind == WHOLE || w.kind == Q8_0) return (Panel){own, {own + AHEAD, own + bytes + AHEAD}, w.kind};
    if (w.kind > HALF) return (Panel){room, {0}, blocks_widen(w.kind, own, K, room)};
    for (int k = 0; k < K; k += 2)
        for (int i = 0; i < 2; i++)
            for (int j = 0; j < REGS; j++)
                *(vec *)((float *)room + (size_t)(k + i) * PANEL + j * LANES) = weight_half(own, k, i, j);
    return (Panel){room, {own + bytes, own + bytes}, WHOLE};
}

/* Rows of activations: as they are, and rounded if some of the weights are in blocks. */
typedef struct {
    const float *x;
    int M, K;
    const int32_t *starts; /* where rows begin that meet the same matrix, and their end; null: all meet one */
    Rounded rounded;
} Inputs;

/* A panel against `rows` rows from row m on. `again`: the rows before them have brought it into the cache. */
static inline void multiply(Panel w, int rows, int m, int again, const Inputs *in, float y[][PANEL]) {
    int K = in->K;
    if (w.kind > HALF) return blocks_multiply(w.kind, rows, w.data, &in->rounded, m, y);
    (w.kind == HALF ? panels_half : panels_whole)[rows - 1](w.data, w.next[again], in->x + (size_t)m * K, K, K, y);
}

static inline int least(int a, int b) { return a < b ? a : b; }
static inline int panels_of(int outputs) { return (outputs + PANEL - 1) / PANEL; }

/* Rows of the next tile: as few tiles as possible, of about equal size. */
static inline int next_rows(int left, int most) {
    int times = (left + most - 1) / most;
    return (left + times - 1) / times;
}

static void round_rows(void *job, int member, int begin, int end) {
    Inputs *in = job;
    (void)member;
    for (int m = 0, rows, group = 0; m < end; m += rows) {
        while (in->starts && m == in->starts[group + 1]) group++;
        rows = next_rows((in->starts ? in->starts[group + 1] : in->M) - m, blocks_rows());
        for (int r = m < begin ? begin : m; r < end && r < m + rows; r++)
            blocks_round(in->x + (size_t)r * in->K, in->K, &in->rounded, m, rows, r - m);
    }
}

static int in_blocks(const Matrix *w) {
    int blocks = 0;
    for (int p = 0; p < PARTS; p++) blocks |= w->parts[p].kind > HALF;
    return blocks;
}

/* `release` them after use. Returns 0 if there is no memory for them. */
static int inputs_for(int threads, const float *x, int M, int K, const int32_t *starts, int blocks, Inputs *in) {
    *in = (Inputs){x, M, K, starts, {0}};
    if (!blocks) return 1;
    in->rounded = rounded_for(M, K);
    if (in->rounded.q) team_run(M > FEW ? threads : 1, M, round_rows, in);
    return in->rounded.q != 0;
}

static void release(Inputs *in) { free(in->rounded.q); }

/* y = x W^T + bias, or y += add times that. */
typedef struct {
    Matrix w;
    const float *bias, *x;
    int M, N, K;
    float *y, add;
    Inputs in;
} Linear;

/* Panel n of a matrix against `count` rows from row `from` on. `room` is that of `room_for`. */
static inline void linear_panel(const Matrix *w, const float *bias, int n, const Inputs *in, int from, int count, int N,
                                float *y, float add, void *room) {
    int own = n, first = 0; /* panel of its part, and the part's first output */
    const Part *part = w->parts;
    for (; own >= panels_of(part->outputs); part++) own -= panels_of(part->outputs), first += part->outputs;
    int width = least(PANEL, part->outputs - own * PANEL);
    if (bias) bias += first + own * PANEL;
    Panel panel = panel_of(*part, own, in->K, room);
    float out[TILE][PANEL];
    for (int m = 0, rows; m < count; m += rows) {
        rows = next_rows(count - m, most_rows(panel.kind));
        multiply(panel, rows, from + m, m > 0, in, out);
        for (int r = 0; r < rows; r++) {
            float *to = y + (size_t)(from + m + r) * N + first + (size_t)own * PANEL;
            for (int i = 0; i < width; i++) {
                float value = bias ? out[r][i] + bias[i] : out[r][i];
                to[i] = add != 0 ? to[i] + add * value : value;
            }
        }
    }
}

static void linear_panels(void *job, int member, int begin, int end) {
    const Linear *l = job;
    void *room = room_for(&l->w, l->K, l->M);
    (void)member;
    for (int n = begin; n < end; n++) linear_panel(&l->w, l->bias, n, &l->in, 0, l->M, l->N, l->y, l->add, room);
    free(room);
}

/* Returns 0 if there is no memory for rounded inputs, as everything does that calls it. */
static int linear(int threads, Linear job) {
    int panels = 0;
    for (int p = 0; p < PARTS; p++) panels += panels_of(job.w.parts[p].outputs);
    if (!inputs_for(threads, job.x, job.M, job.K, 0, in_blocks(&job.w), &job.in)) return 0;
    team_run(threads, panels, linear_panels, &job);
    release(&job.in);
    return 1;
}

/* act = f(x gate^T) * (x up^T), without storing either product. f is silu, x / (1 + e^-x), or the tanh form of gelu, which is
 * x / (1 + e^-z) with z = 2 sqrt(2 / pi) (x + 0.044715 x^3). With a clamp c, which gpt-oss has, it is f(min(g, c)) (u + 1),
 * with u between -c and c, and f(x) = x / (1 + e^-1.702 x). */
typedef struct {
    const Mlp *mlp;
    const float *x;
    int M, N, K, gelu;
    float clamp;
    float *act;
    Inputs in;
} Gated;

/* Panel n of both matrices against `count` rows from row `from` on. */
static inline void gated_panel(const Mlp *w, int n, const Gated *given, int from, int count, void *const rooms[2]) {
    int N = given->N, K = given->K, width = least(PANEL, N - n * PANEL);
    Panel gate = panel_of(w->gate.parts[0], n, K, rooms[0]), up = panel_of(w->up.parts[0], n, K, rooms[1]);
    int most = gate.kind > HALF || up.kind > HALF ? blocks_rows() : MOST; /* rounded rows lie by their tiles */
    float g[TILE][PANEL], u[TILE][PANEL];
    for (int m = 0, rows; m < count; m += rows) {
        rows = next_rows(count - m, most);
        multiply(gate, rows, from + m, m > 0, &given->in, g);
        multiply(up, rows, from + m, m > 0, &given->in, u);
        for (int r = 0; r < rows; r++) {
            for (int i = 0; i < width && w->gate_bias; i++) g[r][i] += w->gate_bias[n * PANEL + i];
            for (int i = 0; i < width && w->up_bias; i++) u[r][i] += w->up_bias[n * PANEL + i];
            for (int i = 0; i < PANEL; i += LANES) {
                vec value = *(vec *)(g[r] + i), other = *(vec *)(u[r] + i), z = value;
                if (given->clamp > 0) {
                    const vec most = (vec){0} + given->clamp;
                    value = pick(value > most, most, value), z = 1.702f * value;
                    other = pick(other > most, most, pick(other < -most, -most, other)) + 1.0f;
                }
                if (given->gelu) z = 1.59576912f * (value + 0.044715f * value * value * value);
                *(vec *)(g[r] + i) = value / (1.0f + exp_vec(-z)) * other;
            }
            float *to = given->act + (size_t)(from + m + r) * N + (size_t)n * PANEL;
            for (int i = 0; i < width; i++) to[i] = g[r][i];
        }
    }
}

static void gated_panels(void *job, int member, int begin, int end) {
    const Gated *given = job;
    void *rooms[2] = {room_for(&given->mlp->gate, given->K, given->M), room_for(&given->mlp->up, given->K, given->M)};
    (void)member;
    for (int n = begin; n < end; n++) gated_panel(given->mlp, n, given, 0, given->M, rooms);
    free(rooms[0]);
    free(rooms[1]);
}

static int gated(int threads, Gated job) {
    int blocks = in_blocks(&job.mlp->gate) || in_blocks(&job.mlp->up);
    if (!inputs_for(threads, job.x, job.M, job.K, 0, blocks, &job.in)) return 0;
    team_run(threads, panels_of(job.N), gated_panels, &job);
    release(&job.in);
    return 1;
}

/* ---- attention ---------------------------------------------------------------------------------------- */

/* Scores to weights in place; returns 1 / sum, which a sink joins last. The order is fixed by n alone. */
static float soften(float *scores, int n, const float *sink) {
    int padded = (n + LANES - 1) / LANES * LANES;
    for (int i = n; i < padded; i++) scores[i] = scores[0];
    vec most = *(vec *)scores;
    for (int i = LANES; i < padded; i += LANES) most = pick(*(vec *)(scores + i) > most, *(vec *)(scores + i), most);
    float top = most[0];
    for (int j = 1; j < LANES; j++) top = most[j] > top ? most[j] : top;
    if (sink) top = *sink > top ? *sink : top;
    for (int i = n; i < padded; i++) scores[i] = top - 100.0f; /* e^-87: lost against a sum of at least 1 */
    vec sum = {0};
    for (int i = 0; i < padded; i += LANES) {
        vec e = exp_vec(*(vec *)(scores + i) - top);
        *(vec *)(scores + i) = e;
        sum += e;
    }
    float total = 0;
    for (int j = 0; j < LANES; j++) total += sum[j];
    if (sink) total += exp_vec((vec){0} + (*sink - top))[0];
    return 1.0f / total;
}

#include "kv_formats.h"

#define LATER 12 /* slots: they lie apart, so the processor does not look ahead by itself */
#define GROUP 4  /* query heads that share a key head are served together, up to this many */
#define TALL 8   /* rows that share a block of keys or values while it is in the nearest cache, up to this many */
#define NEAR 64  /* slots of it */
#define MIXED (LANES == 8 ? 2 : 4) /* vectors of a head's outputs at a time: AVX2 has registers for no more */

/* Four sums over lanes at once, in halves: without it a processor with 16 lanes would add longer than it multiplies. */
static inline void add_lanes(const vec acc[4], float scale, float *sums) {
#if LANES == 4
    vec a = __builtin_shufflevector(acc[0], acc[1], 0, 4, 1, 5), b = __builtin_shufflevector(acc[2], acc[3], 0, 4, 1, 5);
    vec c = __builtin_shufflevector(acc[0], acc[1], 2, 6, 3, 7), d = __builtin_shufflevector(acc[2], acc[3], 2, 6, 3, 7);
    vec sum = {0};
    sum += __builtin_shufflevector(a, b, 0, 1, 4, 5);
    sum += __builtin_shufflevector(a, b, 2, 3, 6, 7);
    sum += __builtin_shufflevector(c, d, 0, 1, 4, 5);
    sum += __builtin_shufflevector(c, d, 2, 3, 6, 7);
    *(vec *)sums = sum * scale;
#elif LANES == 8
    vec pair[2];
    for (int i = 0; i < 2; i++)
        pair[i] = __builtin_shufflevector(acc[2 * i], acc[2 * i + 1], 0, 1, 2, 3, 8, 9, 10, 11) +
                  __builtin_shufflevector(acc[2 * i], acc[2 * i + 1], 4, 5, 6, 7, 12, 13, 14, 15);
    vec two = __builtin_shufflevector(pair[0], pair[1], 0, 1, 4, 5, 8, 9, 12, 13) +
              __builtin_shufflevector(pair[0], pair[1], 2, 3, 6, 7, 10, 11, 14, 15);
    for (int r = 0; r < 4; r++) sums[r] = scale * (two[2 * r] + two[2 * r + 1]);
#else
    vec pair[2];
    for (int i = 0; i < 2; i++)
        pair[i] = __builtin_shufflevector(acc[2 * i], acc[2 * i + 1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
                  __builtin_shufflevector(acc[2 * i], acc[2 * i + 1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    vec all = __builtin_shufflevector(pair[0], pair[1], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
              __builtin_shufflevector(pair[0], pair[1], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    all += __builtin_shufflevector(all, all, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    all += __builtin_shufflevector(all, all, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
    *(four *)sums = __builtin_shufflevector(all, all, 0, 4, 8, 12) * scale;
#endif
}

/* G heads against 4 slots, or the last one to three of them four times. A score is one chain over the head, then its
 * lanes in a fixed order, whatever G is and whichever slots are beside it. */
#define DEFINE_SCORE(G)                                                                                      \
    static inline void score_##G(const float *q, const int32_t *slots, int n, const float *keys, size_t stride, \
                                 int head_dim, float scale, float *scores, size_t width) {                   \
        const float *at[4];                                                                                  \
        vec acc[G][4];                                                                                       \
        for (int r = 0; r < 4; r++) at[r] = keys + slots[r < n ? r : 0] * stride;                            \
        for (int g = 0; g < G; g++)                                                                          \
            for (int r = 0; r < 4; r++) acc[g][r] = (vec){0};                                                \
        for (int d = 0; d < head_dim; d += LANES) {                                                          \
            vec key[4];                                                                                      \
            _Pragma("GCC unroll 4") for (int r = 0; r < 4; r++) key[r] = *(const vec *)(at[r] + d);          \
            _Pragma("GCC unroll 4") for (int g = 0; g < G; g++) {                                            \
                vec part = *(const vec *)(q + (size_t)g * head_dim + d);                                     \
                _Pragma("GCC unroll 4") for (int r = 0; r < 4; r++) acc[g][r] += part * key[r];              \
            }                                                                                                \
        }                                                                                                    \
        for (int g = 0; g < G; g++) add_lanes(acc[g], scale, scores + g * width);                            \
    }

/* Adds to W vectors of a head's outputs for G heads: sum_i weight_i value_i over the listed slots, in order. */
#define DEFINE_MIX(G, W)                                                                                      \
    static inline void mix_##G##_##W(const float *weights, size_t width, const int32_t *slots, int n, int later, \
                                     const float *values, size_t stride, int head_dim, float *out) {          \
        vec acc[G][W];                                                                                        \
        for (int g = 0; g < G; g++)                                                                           \
            for (int j = 0; j < W; j++) acc[g][j] = *(vec *)(out + (size_t)g * head_dim + j * LANES);         \
        for (int i = 0; i < n; i++) {                                                                         \
            const vec *v = (const vec *)(values + slots[i] * stride);                                         \
            if (i + LATER < later)                                                                            \
                for (int j = 0; j < W * LANES; j += PANEL) __builtin_prefetch(values + slots[i + LATER] * stride + j); \
            vec q[W];                                                                                         \
            _Pragma("GCC unroll 4") for (int j = 0; j < W; j++) q[j] = v[j];                                  \
            _Pragma("GCC unroll 4") for (int g = 0; g < G; g++) {                                             \
                float w = weights[g * width + i];                                                             \
                _Pragma("GCC unroll 4") for (int j = 0; j < W; j++) acc[g][j] += q[j] * w;                    \
            }                                                                                                 \
        }                                                                                                     \
        for (int g = 0; g < G; g++)                                                                           \
            for (int j = 0; j < W; j++) *(vec *)(out + (size_t)g * head_dim + j * LANES) = acc[g][j];         \
    }

/* What a row sees: `n` slots of its sequence's table and then `more`, oldest first. */
typedef struct {
    const int32_t *slots, *more;
    int n, extra;
    const float *q;
    float *scores, *out; /* of the first of its query heads */
} Seen;

/* Keys or values of a key head: those of slot s lie at from + s * stride. */
typedef struct {
    const float *from;
    size_t stride, width; /* between slots, between heads' scores */
    int head_dim, kept;
    float scale;
    float *wide; /* [NEAR][head_dim] for numbers that are kept in fewer bits */
} Cached;

/* Some slots of one row, G query heads of one key head: their scores, and their part of the outputs. A sum goes on
 * where the slots before them left it, so that bits do not depend on how slots are cut. */
#define DEFINE_ATTEND(G)                                                                                     \
    DEFINE_SCORE(G)                                                                                          \
    DEFINE_MIX(G, 1)                                                                                         \
    DEFINE_MIX(G, 2)                                                                                         \
    DEFINE_MIX(G, 4)                                                                                         \
    static void scores_##G(const Seen *row, const Cached *c, const int32_t *slots, int n, int later, int at) { \
        for (int i = 0; i < n; i += 4) {                                                                     \
            for (int r = i + LATER; r < i + LATER + 4 && r < later; r++)                                     \
                for (int d = 0; d < c->head_dim; d += 16) __builtin_prefetch(c->from + slots[r] * c->stride + d); \
            score_##G(row->q, slots + i, n - i, c->from, c->stride, c->head_dim, c->scale,                   \
                      row->scores + at + i, c->width);                                                       \
        }                                                                                                    \
    }                                                                                                        \
    static void mixes_##G(const Seen *row, const Cached *c, const int32_t *slots, int n, int later, int at) { \
        int d = 0;                                                                                           \
        for (; d + MIXED * LANES <= c->head_dim; d += MIXED * LANES)                                         \
            (MIXED == 4 ? mix_##G##_4 : mix_##G##_2)(row->scores + at, c->width, slots, n, later, c->from + d, \
                                                     c->stride, c->head_dim, row->out + d);                  \
        for (; d < c->head_dim; d += LANES)                                                                  \
            mix_##G##_1(row->scores + at, c->width, slots, n, later, c->from + d, c->stride, c->head_dim,    \
                        row->out + d);                                                                       \
    }
DEFINE_ATTEND(1)
DEFINE_ATTEND(2)
DEFINE_ATTEND(3)
DEFINE_ATTEND(4)

typedef void Attend(const Seen *, const Cached *, const int32_t *, int, int, int);
static Attend *const SCORES[GROUP + 1] = {0, scores_1, scores_2, scores_3, scores_4};
static Attend *const MIXES[GROUP + 1] = {0, mixes_1, mixes_2, mixes_3, mixes_4};

/* Slots that all of these rows see, from their at-th on, block by block. They are fetched, and widened, for the first row. */
static void attend_block_by_block(Attend *attend, const Seen *rows, int count, const Cached *c, const int32_t *slots, int n, int at) {
    Cached wide = *c;
    int32_t counted[NEAR];
    wide.from = c->wide, wide.stride = c->head_dim;
    for (int i = 0; i < n; i += NEAR) {
        int some = least(NEAR, n - i), later = n - i;
        const int32_t *block = slots + i;
        if (c->kept) {
            for (int j = 0; j < some; j++) {
                const char *from = (const char *)c->from;
                if (j + LATER < later)
                    for (size_t d = 0; d < kept_bytes(c->kept, c->head_dim); d += 64) __builtin_prefetch(from + block[j + LATER] * c->stride + d);
                widen_head(c->kept, from + block[j] * c->stride, c->head_dim, c->wide + (size_t)j * c->head_dim);
                counted[j] = j;
            }
            block = counted, later = 0;
        }
        for (int r = 0; r < count; r++) attend(rows + r, c->kept ? &wide : c, block, some, r ? 0 : later, at + i);
    }
}

/* Rows against all that they see. Rows of one sequence go through the slots that they share together. */
static void go_through(Attend *attend, const Seen *rows, int count, const Cached *c) {
    for (int first = 0, last; first < count; first = last) {
        int common = rows[first].n;
        for (last = first + 1; last < count && rows[last].slots == rows[first].slots; last++)
            common = least(common, rows[last].n);
        attend_block_by_block(attend, rows + first, last - first, c, rows[first].slots, common, 0);
        for (int r = first; r < last; r++) {
            const Seen *row = rows + r;
            attend_block_by_block(attend, row, 1, c, row->slots + common, row->n - common, common);
            attend_block_by_block(attend, row, 1, c, row->more, row->extra, row->n);
        }
    }
}

/* What row r sees: a range of its sequence's table, then the entries its ancestor bits name. A window narrower
 * than the row's depth in the tree begins inside the tree, and a chunk may: its oldest ancestors are out of sight. */
static void look(const Rows *b, int r, const Heads *s, int32_t *more, Seen *row) {
    const int32_t *table = b->table + (size_t)b->table_rows[r] * b->table_stride;
    int first = s->window ? b->positions[r] + 1 - s->window : s->chunk ? b->positions[r] / s->chunk * s->chunk : 0;
    if (first < 0) first = 0;
    int n = b->prefix[r] - first;
    uint64_t mask = (uint64_t)b->ancestors[r];
    for (; n < 0; n++) mask &= mask - 1;
    *row = (Seen){.slots = table + first, .more = more, .n = n};
    for (; mask; mask &= mask - 1) more[row->extra++] = table[b->prefix[r] + __builtin_ctzll(mask)];
}

/* All rows and heads; q is read at q + r * ldq. A thread's scratch is TALL * GROUP rows of scores. */
typedef struct {
    const Heads *s;
    const Rows *b;
    int threads, tall; /* rows that are served together */
    const float *q;
    int ldq;
    const char *keys, *values;
    float *scores;
    int score_stride;
    float *out;
} Attention;

/* How many pieces a key head's query heads are served in. */
static inline int parts_of(const Heads *s) { return (s->heads / s->kv_heads + GROUP - 1) / GROUP; }

static void attention_units(void *job, int member, int begin, int end) {
    const Attention *a = job;
    const Heads *s = a->s;
    int group = s->heads / s->kv_heads, parts = parts_of(s), rows = a->b->rows, tiles = (rows + a->tall - 1) / a->tall;
    size_t width = a->score_stride / (TALL * GROUP), bytes = kept_bytes(s->kept, s->head_dim);
    float wide[s->kept ? NEAR * s->head_dim : 1];
    float *mine = a->scores + (size_t)member * a->score_stride;
    int32_t more[TALL][64];
    Seen seen[TALL];
    for (int unit = begin; unit < end; unit++) {
        int first = unit % tiles * a->tall, count = least(a->tall, rows - first);
        int kv = unit / tiles / parts, part = unit / tiles % parts;
        int h = kv * group + part * GROUP, heads = least(GROUP, group - part * GROUP);
        size_t stride = s->kv_heads * (s->kept ? bytes : s->head_dim);
        Cached keys = {(const float *)(a->keys + kv * bytes), stride, width, s->head_dim, s->kept, s->scale, wide}, values = keys;
        values.from = (const float *)(a->values + kv * bytes);
        for (int r = 0; r < count; r++) {
            look(a->b, first + r, s, more[r], seen + r);
            seen[r].q = a->q + (size_t)(first + r) * a->ldq + h * s->head_dim;
            seen[r].scores = mine + r * GROUP * width;
            seen[r].out = a->out + ((size_t)(first + r) * s->heads + h) * s->head_dim;
        }
        go_through(SCORES[heads], seen, count, &keys);
        for (int r = 0; r < count; r++)
            for (int i = 0; i < heads * s->head_dim; i++) seen[r].out[i] = 0;
        float inverse[TALL][GROUP];
        for (int r = 0; r < count; r++)
            for (int g = 0; g < heads; g++) {
                int n = seen[r].n + seen[r].extra;
                if (s->softcap > 0) cap_all(seen[r].scores + g * width, n, s->softcap);
                inverse[r][g] = soften(seen[r].scores + g * width, n, s->sinks ? s->sinks + h + g : 0);
            }
        go_through(MIXES[heads], seen, count, &values);
        for (int r = 0; r < count; r++)
            for (int g = 0; g < heads; g++)
                for (int d = 0; d < s->head_dim; d += LANES)
                    *(vec *)(seen[r].out + g * s->head_dim + d) *= inverse[r][g];
    }
}

/* Few rows are served one by one, so that every thread has some. */
static void attention(Attention job) {
    int each = job.s->kv_heads * parts_of(job.s), tall = job.b->rows * each / (4 * job.threads);
    job.tall = tall < 1 ? 1 : least(tall, TALL);
    team_run(job.threads, (job.b->rows + job.tall - 1) / job.tall * each, attention_units, &job);
}

/* Norm and rotate every query and key head, and put keys and values in their slots. */
typedef struct {
    const Layer *layer;
    const Shape *s;
    const Rows *b;
    float *qkv;
    char *keys, *values;
} Placing;

static void place_heads(void *job, int member, int begin, int end) {
    const Placing *p = job;
    const Layer *layer = p->layer;
    const Heads *s = &layer->heads;
    const Rows *b = p->b;
    int D = s->head_dim, all = s->heads + 2 * s->kv_heads;
    (void)member;
    for (int unit = begin; unit < end; unit++) {
        int r = unit / all, h = unit % all;
        float *x = p->qkv + ((size_t)r * all + h) * D;
        int kv = h - s->heads;
        const float *norm = kv < 0 ? layer->q_norm : layer->k_norm;
        if (kv < s->kv_heads) {
            size_t at = (size_t)b->positions[r] * (D / 2);
            if (norm && !layer->whole) rms_norm(x, norm, D, p->s->eps, x);
            if (layer->cos) rotate(x, layer->cos + at, layer->sin + at, D / 2);
        }
        for (int i = 0; i < D && kv < 0 && layer->gain; i++) x[i] *= layer->gain[b->positions[r]];
        if (kv < 0) continue;
        char *to = kv < s->kv_heads ? p->keys : p->values;
        keep_head(s->kept, x, D, to + ((size_t)b->slots[r] * s->kv_heads + kv % s->kv_heads) * kept_bytes(s->kept, D));
    }
}

/* Norm all queries of a row together, and all keys. */
static void norm_whole(void *job, int member, int begin, int end) {
    const Placing *p = job;
    const Heads *s = &p->layer->heads;
    int q = s->heads * s->head_dim, kv = s->kv_heads * s->head_dim;
    (void)member;
    for (int r = begin; r < end; r++) {
        float *x = p->qkv + (size_t)r * (q + 2 * kv);
        rms_norm(x, p->layer->q_norm, q, p->s->eps, x);
        rms_norm(x + q, p->layer->k_norm, kv, p->s->eps, x + q);
    }
}

static void place(Placing job) {
    const Heads *s = &job.layer->heads;
    int units = job.b->rows * (s->heads + 2 * s->kv_heads);
    team_run(job.b->rows > FEW ? job.s->threads : 1, units, place_heads, &job);
}

/* ---- the law of sampling ------------------------------------------------------------------------------ */

typedef struct {
    float score;
    int32_t token;
} Best;

#define CHUNKS 16 /* a row of logits is searched in this many pieces, so that one row keeps all threads busy */

/* Four 32-bit words for a group of four tokens; verify/noise.py says what they are. */
static inline void philox(uint32_t group, uint32_t position, uint64_t seed, uint32_t word[4]) {
    uint32_t c0 = group, c1 = position, c2 = 0, c3 = 0, k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)c0 * 0xD2511F53u, b = (uint64_t)c2 * 0xCD9E8D57u;
        c0 = (uint32_t)(b >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)b;
        c2 = (uint32_t)(a >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)a;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    word[0] = c0, word[1] = c1, word[2] = c2, word[3] = c3;
}

static inline float uniform(uint32_t word) {
    float u = (float)((word + 0.5) * 0x1p-32);
    return u < 0x1.fffffep-1f ? u : 0x1.fffffep-1f;
}

static inline float gumbel(float u) { return -logf(-log1pf(-u)); }

static inline void keep(Best *best, float score, int32_t token) {
    if (score > best->score || (score == best->score && token < best->token)) best->score = score, best->token = token;
}

static Best search_greedy(const float *logits, int from, int to) {
    float top = -INFINITY;
#pragma omp simd reduction(max : top)
    for (int v = from; v < to; v++) top = logits[v] > top ? logits[v] : top;
    for (int v = from; v < to; v++)
        if (logits[v] == top) return (Best){top, v};
    return (Best){-INFINITY, from};
}

/* The best of l + G in [from, to), given a score already reached. A token beats score b only if its uniform is
 * under 1 - exp(-exp(l - b)) <= exp(l - b), so the logarithms are taken for a handful of tokens only. */
static Best search_sampled(const float *logits, int from, int to, uint64_t seed, uint32_t position, Best best) {
    for (int v = from; v < to; v += 4) {
        int n = least(4, to - v);
        float chance[4] = {0}, most = 0;
        for (int i = 0; i < n; i++) {
            float gap = logits[v + i] - best.score;
            chance[i] = gap > -24.0f ? expf(gap) * 1.001f : 0.0f; /* e^-24 < 2^-33, the smallest uniform */
            most = chance[i] > most ? chance[i] : most;
        }
        if (most == 0) continue;
        uint32_t word[4];
        philox((uint32_t)v / 4, position, seed, word);
        for (int i = 0; i < n; i++) {
            float u = uniform(word[i]);
            if (u <= chance[i]) keep(&best, logits[v + i] + gumbel(u), v + i);
        }
    }
    return best;
}

/* ---- filters ------------------------------------------------------------------------------------------ */

#define FARTHEST 44.0f       /* as in verify/filters.py, */
#define HALVINGS 24204406.0f /* which says what a mass is */

static inline int64_t mass_of(float logit, float top) {
    float below = top - logit;
    int32_t steps = (int32_t)((below < FARTHEST ? below : FARTHEST) * HALVINGS);
    uint64_t fraction = (uint64_t)(steps & 0xFFFFFF) << 8;
    uint64_t power = 2029165;
    power = 19769301 - (power * fraction >> 32);
    power = 118750173 - (power * fraction >> 32);
    power = 515782929 - (power * fraction >> 32);
    power = 1488514807 - (power * fraction >> 32);
    power = 2147483648 - (power * fraction >> 32);
    return (int64_t)(power << 12 >> (steps >> 24));
}

/* Unsigned numbers in the order of the floats they stand for. */
static inline uint32_t key_of(float x) {
    Bits bits = {x};
    return bits.word >> 31 ? ~bits.word : bits.word | 0x80000000u;
}

static inline float float_of(uint32_t key) {
    Bits bits = {.word = key >> 31 ? key & 0x7FFFFFFFu : ~key};
    return bits.number;
}

/* What every bin holds of the logits from `least` on whose key begins with the `known` bits of `prefix`: tokens, or
 * with a `share` below 1 their mass. Bins are the next BIN bits of the key; returns the sum of all. */
#define BIN 8
static int64_t fill_bins(const float *l, int n, float top, float least, float share, uint32_t prefix, int known,
                         int64_t bins[1 << BIN]) {
    int64_t sum = 0;
    for (int b = 0; b < 1 << BIN; b++) bins[b] = 0;
    for (int v = 0; v < n; v++) {
        uint32_t key = key_of(l[v]);
        if (l[v] < least || (known && (key ^ prefix) >> (32 - known))) continue;
        bins[key >> (32 - BIN - known) & ((1 << BIN) - 1)] += share < 1 ? mass_of(l[v], top) : 1;
    }
    for (int b = 0; b < 1 << BIN; b++) sum += bins[b];
    return sum;
}

/* The largest bound with `count` tokens, or with a `share` below 1 that share of the mass, at or above it. */
static float largest_bound(const float *l, int n, float top, float least, float share, int64_t count) {
    int64_t bins[1 << BIN], need = count;
    uint32_t prefix = 0;
    for (int known = 0; known < 32; known += BIN) {
        int64_t sum = fill_bins(l, n, top, least, share, prefix, known, bins);
        if (!known && share < 1) need = (int64_t)((double)sum * share);
        if (!known && need < 1) need = 1;
        if (sum < need) return -INFINITY;
        int b = (1 << BIN) - 1;
        while (need > bins[b]) need -= bins[b--];
        prefix |= (uint32_t)b << (32 - BIN - known);
    }
    return float_of(prefix);
}

/* ---- what Python calls -------------------------------------------------------------------------------- */

/* y = chosen rows of x, or with none chosen the first ones, normed; or y += add times that. */
typedef struct {
    const float *x;
    const int64_t *chosen;
    const float *weight;
    int n;
    float eps;
    float *y, add;
} Norm;

static void norm_rows(void *job, int member, int begin, int end) {
    const Norm *norm = job;
    (void)member;
    for (int r = begin; r < end; r++) {
        const float *x = norm->x + (norm->chosen ? (size_t)norm->chosen[r] : (size_t)r) * norm->n;
        float *y = norm->y + (size_t)r * norm->n;
        if (norm->add == 0) {
            rms_norm(x, norm->weight, norm->n, norm->eps, y);
            continue;
        }
        float inverse = inverse_rms(x, norm->n, norm->eps);
        for (int i = 0; i < norm->n; i++) y[i] += norm->add * (x[i] * inverse * norm->weight[i]);
    }
}

static void norm(int threads, int rows, Norm job) { team_run(rows > FEW ? threads : 1, rows, norm_rows, &job); }

enum { PROJECT, ATTEND, ADD_MIXED, ACTIVATE, ADD_ACT, STAGES };

static inline int alone(const Work *w) { return w->sums == w->x; }

/* The residual stream as a layer's attention or MLP reads it: normed, unless there is no norm for it. */
static const float *normed_stream(const Shape *s, const Work *w, int M, const float *weight) {
    if (!weight) return w->x;
    norm(s->threads, M, (Norm){w->x, 0, weight, s->hidden, s->eps, w->normed, 0});
    return w->normed;
}

/* Adds a projection of [rows][K] to the residual stream, normed before where there is a norm for it. Ranks add to their part
 * of the stream; what is normed they leave as it is, since a norm needs the outputs of all. */
static int add_to_stream(const Shape *s, const Work *w, int M, Matrix by, const float *bias, const float *x, int K,
                         const float *norm_weight) {
    float *y = norm_weight && alone(w) ? w->normed : w->sums, add = norm_weight ? 0 : s->residual;
    if (!linear(s->threads, (Linear){by, bias, x, M, s->sums, K, y, add, {0}})) return 0;
    if (norm_weight && alone(w)) norm(s->threads, M, (Norm){y, 0, norm_weight, s->hidden, s->eps, w->x, s->residual});
    return 1;
}

#include "experts.h"

/* One stage of a layer. What it leaves (qkv, mixed, sums, act, sums) is all that the next one needs of other ranks. The first
 * begins with the normed inputs [rows][K] that it is given, or norms x. */
int outrider_stage(int stage, const Layer *layer, const Shape *s, const Rows *b, const Work *w, const float *inputs, int K,
                   char *keys, char *values) {
    const Heads *h = &layer->heads;
    int M = b->rows, qkv = (h->heads + 2 * h->kv_heads) * h->head_dim, threads = s->threads;
    Placing placing = {layer, s, b, w->qkv, keys, values};
    switch (stage) {
    case PROJECT:
        if (!inputs) inputs = normed_stream(s, w, M, layer->attn_norm), K = s->hidden;
        if (!linear(threads, (Linear){layer->qkv, layer->qkv_bias, inputs, M, qkv, K, w->qkv, 0, {0}})) return 0;
        if (layer->whole && alone(w)) team_run(M > FEW ? threads : 1, M, norm_whole, &placing);
        return 1;
    case ATTEND:
        place(placing);
        attention((Attention){h, b, threads, 0, w->qkv, qkv, keys, values, w->scores, w->score_stride, w->mixed});
        return 1;
    case ADD_MIXED:
        return add_to_stream(s, w, M, layer->out, layer->out_bias, w->all_mixed, layer->all_mixed, layer->out_norm);
    case ACTIVATE:
        inputs = normed_stream(s, w, M, layer->mlp_norm);
        if (layer->experts && !activate_experts(layer, s, w, M, inputs)) return 0;
        if (!layer->intermediate) return 1;
        return gated(threads, (Gated){&layer->mlp, inputs, M, layer->intermediate, s->hidden, layer->gelu, layer->clamp, w->act, {0}});
    default:
        if (layer->experts) return add_experts(layer, s, w, M);
        return add_to_stream(s, w, M, layer->mlp.down, layer->mlp.down_bias, w->all_act, layer->all_act, layer->down_norm);
    }
}

/* A layer from its normed inputs [rows][K] on, or without any from x. */
int outrider_layer_from(const Layer *layer, const Shape *s, const Rows *b, const Work *w, const float *inputs, int K,
                         char *keys, char *values) {
    int done = 1;
    for (int stage = PROJECT; stage < STAGES && done; stage++)
        done = outrider_stage(stage, layer, s, b, w, inputs, K, keys, values);
    return done;
}

/* The rows of x, kept by slot, for each place of this layer among the taps: features [slots][places][hidden]. */
static void keep_features(int layer, const int32_t *taps, int places, const Shape *s, const Rows *b, const float *x,
                          float *features) {
    size_t H = s->hidden;
    for (int place = 0; place < places; place++)
        for (int r = 0; r < b->rows && taps[place] == layer; r++)
            memcpy(features + (b->slots[r] * (size_t)places + place) * H, x + r * H, H * sizeof(float));
}

/* Layers one after the other, in one call: between two calls of Python the other threads wait. The hidden states that enter
 * the tapped layers are kept; the number of layers stands for those that leave the last one. */
int outrider_layers(const Layer *const *layers, int count, const Shape *s, const Rows *b, const Work *w,
                     char *const *keys, char *const *values, const int32_t *taps, int places, float *features) {
    for (int i = 0; i < count; i++) {
        keep_features(i, taps, places, s, b, w->x, features);
        if (!outrider_layer_from(layers[i], s, b, w, 0, 0, keys[i], values[i])) return 0;
    }
    keep_features(count, taps, places, s, b, w->x, features);
    return 1;
}

void outrider_norm(const float *x, const float *weight, int rows, int n, float eps, float add, int threads, float *y) {
    norm(threads, rows, (Norm){x, 0, weight, n, eps, y, add});
}

typedef struct {
    float *logits, divisor, cap;
    int n;
} Capping;

static void cap_rows(void *job, int member, int begin, int end) {
    const Capping *c = job;
    (void)member;
    for (int r = begin; r < end; r++) {
        float *row = c->logits + (size_t)r * c->n;
        for (int i = 0; i < c->n; i++) row[i] /= c->divisor;
        if (c->cap > 0) cap_all(row, c->n, c->cap);
    }
}

/* Logits of the chosen rows of x: norm, the head, then divided and capped. `normed` is scratch, [count][n]. */
int outrider_head(const float *x, const int64_t *chosen, int count, const float *weight, float eps,
                   const Matrix *w, int N, int K, float divisor, float cap, int threads, float *normed, float *y) {
    norm(threads, count, (Norm){x, chosen, weight, K, eps, normed, 0});
    if (!linear(threads, (Linear){*w, 0, normed, count, N, K, y, 0, {0}})) return 0;
    if (divisor != 1 || cap > 0) team_run(threads, count, cap_rows, &(Capping){y, divisor, cap, N});
    return 1;
}

typedef struct {
    const Matrix *w;
    const int64_t *ids;
    int K;
    float scale, *x;
} Embedding;

static void embed_rows(void *job, int member, int begin, int end) {
    const Embedding *e = job;
    int K = e->K;
    (void)member;
    for (int r = begin; r < end; r++) {
        const Part *part = e->w->parts;
        int64_t id = e->ids[r];
        for (; id >= part->outputs; part++) id -= part->outputs;
        const char *panel = (const char *)part->data + id / PANEL * panel_bytes(part->kind, K);
        int i = id % PANEL;
        float *to = e->x + (size_t)r * K;
        if (part->kind > HALF) blocks_row(part->kind, panel, i, K, to);
        for (int k = 0; k < K && part->kind <= HALF; k++) {
            uint32_t pair = part->kind == HALF ? ((const uint32_t *)panel)[(size_t)(k / 2) * PANEL + i] : 0;
            Bits wide = {.word = k % 2 ? pair & 0xffff0000u : pair << 16};
            to[k] = part->kind == HALF ? wide.number : ((const float *)panel)[(size_t)k * PANEL + i];
        }
        for (int k = 0; k < K && e->scale != 1; k++) to[k] *= e->scale;
    }
}

/* Rows of a packed matrix, times a number: the embedding, when it is the head too. */
void outrider_embed(const Matrix *w, const int64_t *ids, int rows, int K, float scale, int threads, float *x) {
    team_run(rows > FEW ? threads : 1, rows, embed_rows, &(Embedding){w, ids, K, scale, x});
}

int outrider_linear(const Matrix *w, const float *bias, const float *x, int M, int N, int K, int threads, float *y) {
    return linear(threads, (Linear){*w, bias, x, M, N, K, y, 0, {0}});
}

void outrider_attention(const Heads *h, const Rows *b, int threads, const float *q, const char *keys,
                        const char *values, float *scores, int score_stride, float *out) {
    attention((Attention){h, b, threads, 0, q, h->heads * h->head_dim, keys, values, scores, score_stride, out});
}

typedef struct {
    const uint32_t *w; /* [N][words] */
    int N, words;      /* a word is a float, or a pair of neighbouring bfloat16 */
    uint32_t *packed;
} Packing;

static void pack_panels(void *job, int member, int begin, int end) {
    const Packing *p = job;
    (void)member;
    for (int n = begin; n < end; n++)
        for (int k = 0; k < p->words; k++)
            for (int i = 0, row = n * PANEL; i < PANEL; i++, row++)
                p->packed[((size_t)n * p->words + k) * PANEL + i] = row < p->N ? p->w[(size_t)row * p->words + k] : 0;
}

/* [N][words] -> a Part's data, missing outputs zero. */
void outrider_pack(const uint32_t *w, int N, int words, int threads, uint32_t *packed) {
    team_run(threads, panels_of(N), pack_panels, &(Packing){w, N, words, packed});
}

#define STRIDE 4096 /* floats that are read at a time */

typedef struct {
    const float *x;
    float totals[MOST_MEMBERS];
} Reading;

static void read_strides(void *job, int member, int begin, int end) {
    Reading *reading = job;
    for (int block = begin; block < end; block++) {
        const vec *p = (const vec *)(reading->x + (size_t)block * STRIDE);
        vec acc[4] = {{0}, {0}, {0}, {0}};
        for (int i = 0; i < STRIDE / LANES; i += 4)
            for (int j = 0; j < 4; j++) acc[j] += p[i + j];
        for (int j = 0; j < 4; j++) reading->totals[member] += acc[j][0];
    }
}

/* How fast this machine reads memory: a sum over n floats, for a benchmark's share of the limit. */
float outrider_read(const float *x, int64_t n, int threads) {
    Reading reading = {x, {0}};
    team_run(threads, (int)(n / STRIDE), read_strides, &reading);
    float total = 0;
    for (int i = 0; i < MOST_MEMBERS; i++) total += reading.totals[i];
    return total;
}

typedef struct {
    const float *logits;
    int vocab;
    const uint8_t *sampled;
    const int64_t *seeds, *positions;
    Best *scratch; /* [rows][CHUNKS] */
} Drawing;

static inline void chunk_of(int unit, int vocab, int *from, int *to) {
    int chunk = (vocab / CHUNKS + 4) / 4 * 4;
    *from = least(unit % CHUNKS * chunk, vocab);
    *to = least(*from + chunk, vocab);
}

static void greedy_chunks(void *job, int member, int begin, int end) {
    const Drawing *d = job;
    (void)member;
    for (int unit = begin, from, to; unit < end; unit++) {
        chunk_of(unit, d->vocab, &from, &to);
        d->scratch[unit] = search_greedy(d->logits + (size_t)(unit / CHUNKS) * d->vocab, from, to);
    }
}

static void sampled_chunks(void *job, int member, int begin, int end) {
    const Drawing *d = job;
    (void)member;
    for (int unit = begin, from, to; unit < end; unit++) {
        int r = unit / CHUNKS;
        chunk_of(unit, d->vocab, &from, &to);
        if (d->sampled[r])
            d->scratch[unit] = search_sampled(d->logits + (size_t)r * d->vocab, from, to, (uint64_t)d->seeds[r],
                                              (uint32_t)d->positions[r], d->scratch[unit]);
    }
}

static Best best_of(const Best *chunks) {
    Best best = chunks[0];
    for (int c = 1; c < CHUNKS; c++) keep(&best, chunks[c].score, chunks[c].token);
    return best;
}

/* The law at every row: the argmax of the logits, of sampled rows with their noise. `scratch` is [rows][CHUNKS]. */
void outrider_draw(const float *logits, int rows, int vocab, const uint8_t *sampled, const int64_t *seeds,
                   const int64_t *positions, int threads, Best *scratch, int64_t *tokens) {
    Drawing drawing = {logits, vocab, sampled, seeds, positions, scratch};
    int any = 0;
    team_run(threads, rows * CHUNKS, greedy_chunks, &drawing);
    for (int r = 0; r < rows; r++) {
        Best best = best_of(scratch + r * CHUNKS);
        tokens[r] = best.token;
        if (!sampled[r]) continue;
        any = 1; /* a first score to beat: the likeliest token with its own noise */
        uint32_t word[4];
        philox((uint32_t)best.token / 4, (uint32_t)positions[r], (uint64_t)seeds[r], word);
        best.score += gumbel(uniform(word[best.token % 4]));
        for (int c = 0; c < CHUNKS; c++) scratch[r * CHUNKS + c] = best;
    }
    if (!any) return;
    team_run(threads, rows * CHUNKS, sampled_chunks, &drawing);
    for (int r = 0; r < rows; r++)
        if (sampled[r]) tokens[r] = best_of(scratch + r * CHUNKS).token;
}

typedef struct {
    float *logits;
    int vocab;
    const int64_t *top_k;
    const float *top_p, *log_min_p;
} Filtering;

static void filter_rows(void *job, int member, int begin, int end) {
    const Filtering *s = job;
    int vocab = s->vocab;
    (void)member;
    for (int r = begin; r < end; r++) {
        float *l = s->logits + (size_t)r * vocab, bound = -INFINITY;
        float top = search_greedy(l, 0, vocab).score;
        top = top > -INFINITY ? top : 0.0f;
        if (s->top_k[r] > 0 && s->top_k[r] < vocab) bound = largest_bound(l, vocab, top, bound, 1.0f, s->top_k[r]);
        if (s->top_p[r] < 1) bound = largest_bound(l, vocab, top, bound, s->top_p[r], 0);
        bound = top + s->log_min_p[r] > bound ? top + s->log_min_p[r] : bound;
        for (int v = 0; v < vocab; v++) l[v] = l[v] < bound ? -INFINITY : l[v];
    }
}

/* Rules out what top-k, top-p and min-p (its logarithm is `log_min_p`) do not keep, in place. */
void outrider_filter(float *logits, int rows, int vocab, const int64_t *top_k, const float *top_p, const float *log_min_p,
                   int threads) {
    team_run(threads, rows, filter_rows, &(Filtering){logits, vocab, top_k, top_p, log_min_p});
}

#include "eagle.h"
