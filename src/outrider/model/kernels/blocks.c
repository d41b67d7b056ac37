/* Products with weights in blocks of 4 to 8 bits: GGUF's formats, repacked so that 16 outputs meet one load.
 *
 * The law of a product, the same bits on every machine, for any number of rows and threads:
 *
 *   activations  by blocks of 32: scale = max |x| / 127, q = x * (127 / max |x|) to the nearest whole number, ties to even
 *   block        the integer sum of weight * q, exact; for Q6_K one of every 16
 *   output       total = fma(sum * weight_scale, scale, total), block by block in order; for formats with a least
 *                value then total = fma(least, scale * sum_of_q, total)
 *
 * No other addition meets a multiplication here, so a compiler that contracts expressions cannot change the bits.
 * reference.py has the same law in torch.
 *
 * A panel is [super-blocks][header][blocks], a block [scales][high bits][low bits], for 16 outputs each. Words of four
 * weights lie output by output: low bits [4][16] words of nibbles, weight k beside weight k + 16 (8 bits: [8][16] words);
 * the fifth bit of both in one word for an output, the fifth and sixth in two.
 */
#include "blocks.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "team.h"

#define ALWAYS static inline __attribute__((always_inline))
#define TINIEST 1e-30f /* blocks whose values are all smaller are zero: 127 / max must stay finite */

typedef struct {
    int blocks; /* in a super-block */
    int bits;
    int least;  /* blocks have a least value */
    int halves; /* a scale for every 16 weights */
    int offset; /* subtracted from the stored number */
    int wide;
} Kind;

static const Kind KIND[KINDS] = {
    [Q8_0] = {1, 8, 0, 0, 0, 0},  [Q4_0] = {1, 4, 0, 0, 8, 0}, [Q4_1] = {1, 4, 1, 0, 0, 0},
    [Q5_0] = {1, 5, 0, 0, 16, 0}, [Q5_1] = {1, 5, 1, 0, 0, 0}, [Q4_K] = {8, 4, 1, 0, 0, 0},
    [Q5_K] = {8, 5, 1, 0, 0, 0},  [Q6_K] = {8, 6, 0, 1, 32, 0}, [WIDE] = {1, 8, 0, 0, 0, 1},
    [WIDE_LEAST] = {1, 8, 1, 0, 0, 1}, [WIDE_16] = {1, 8, 0, 1, 0, 1},
};

/* Bytes for 16 outputs. */
ALWAYS int header_bytes(Kind k) { return k.blocks == 1 ? 0 : k.least ? 64 : 32; }
ALWAYS int scale_bytes(Kind k) {
    int two = k.least || k.halves;
    return k.wide ? (two ? 128 : 64) : k.blocks > 1 ? 32 : two ? 64 : 32;
}
ALWAYS int high_bytes(Kind k) { return k.bits == 5 ? 64 : k.bits == 6 ? 128 : 0; }
ALWAYS int low_bytes(Kind k) { return k.bits == 8 ? 512 : 256; }
ALWAYS int block_bytes(Kind k) { return scale_bytes(k) + high_bytes(k) + low_bytes(k); }

static inline int blocks_of(int K) { return (K + BLOCK - 1) / BLOCK; }

size_t blocks_panel_bytes(int kind, int K) {
    Kind k = KIND[kind];
    return (size_t)(blocks_of(K) / k.blocks) * (header_bytes(k) + k.blocks * block_bytes(k));
}

static inline float half_at(const uint8_t *p, int i) {
    uint16_t h;
    memcpy(&h, p + 2 * i, 2);
    uint32_t sign = (uint32_t)(h >> 15) << 31, rest = h & 0x7fff, word;
    if (rest < 0x400) return (sign ? -0x1p-24f : 0x1p-24f) * (float)rest;
    word = sign | (rest < 0x7c00 ? (rest << 13) + 0x38000000u : (rest << 13) | 0x7f800000u);
    float x;
    memcpy(&x, &word, 4);
    return x;
}

/* ---- activations --------------------------------------------------------------------------------------- */

Rounded rounded_for(int rows, int K) {
    size_t blocks = blocks_of(K), all = rows * blocks;
    int8_t *q = malloc(all * (BLOCK + 4 * sizeof(float)) + 1);
    if (!q) return (Rounded){0};
    float *scale = (float *)(q + all * BLOCK);
    return (Rounded){(int)blocks, q, scale, scale + all, (int32_t *)(scale + 2 * all)};
}

/* Every step is a loop of its own over the whole block: compilers turn these into vectors. */
void round_row(const float *x, int K, const Rounded *to, int row) {
    for (int b = 0; b < to->blocks; b++) {
        float block[BLOCK] = {0}, most = 0;
        int32_t wide[BLOCK];
        int8_t q[BLOCK];
        size_t at = (size_t)row * to->blocks + b;
        if (K - b * BLOCK >= BLOCK) memcpy(block, x + (size_t)b * BLOCK, sizeof block);
        else memcpy(block, x + (size_t)b * BLOCK, (K - b * BLOCK) * sizeof(float));
#pragma omp simd reduction(max : most)
        for (int i = 0; i < BLOCK; i++) most = fabsf(block[i]) > most ? fabsf(block[i]) : most;
        float inverse = most > TINIEST ? 127.0f / most : 0.0f, scale = most > TINIEST ? most / 127.0f : 0.0f;
#pragma omp simd
        for (int i = 0; i < BLOCK; i++) wide[i] = (int32_t)rintf(block[i] * inverse);
#pragma omp simd
        for (int i = 0; i < BLOCK; i++) q[i] = (int8_t)wide[i];
        int32_t first = 0, second = 0;
#pragma omp simd reduction(+ : first, second)
        for (int i = 0; i < BLOCK / 2; i++) first += wide[i], second += wide[BLOCK / 2 + i];
        memcpy(to->q + at * BLOCK, q, BLOCK);
        to->scale[at] = scale, to->sum[at] = scale * (float)(first + second);
        to->halves[2 * at] = first, to->halves[2 * at + 1] = second;
    }
}

/* ---- weights one by one -------------------------------------------------------------------------------- */

/* Weight k of output o, from a block's bits. */
static inline int number_at(Kind kind, const uint8_t *block, int o, int k) {
    const uint8_t *high = block + scale_bytes(kind), *low = high + high_bytes(kind);
    int lane = o * 4 + k % 4, group = k / 4;
    if (kind.bits == 8) return (int8_t)low[group * 64 + lane];
    int found = low[group % 4 * 64 + lane] >> (k < 16 ? 0 : 4) & 15;
    if (kind.bits == 5) found |= (high[lane] >> group & 1) << 4;
    if (kind.bits == 6) found |= (high[k / 16 * 64 + lane] >> (2 * (group % 4)) & 3) << 4;
    return found - kind.offset;
}

/* The scales of output o in a block: its halves', and its least value. */
typedef struct {
    float half[2], least;
} Scales;

static inline Scales scales_at(Kind kind, const uint8_t *header, const uint8_t *block, int o) {
    if (kind.wide) {
        const float *s = (const float *)block;
        return (Scales){{s[o], kind.halves ? s[16 + o] : s[o]}, kind.least ? s[16 + o] : 0};
    }
    if (kind.halves) {
        float d = half_at(header, o);
        return (Scales){{d * (float)(int8_t)block[o], d * (float)(int8_t)block[16 + o]}, 0};
    }
    if (kind.blocks > 1) {
        float s = half_at(header, o) * (float)block[o];
        return (Scales){{s, s}, -(half_at(header, 16 + o) * (float)block[16 + o])};
    }
    float s = half_at(block, o);
    return (Scales){{s, s}, kind.least ? half_at(block, 16 + o) : 0};
}

/* The header of super-block `at`, and its blocks. */
ALWAYS const uint8_t *super_block(Kind kind, const void *w, int at) {
    return (const uint8_t *)w + (size_t)at * (header_bytes(kind) + kind.blocks * block_bytes(kind));
}
ALWAYS const uint8_t *block_in(Kind kind, const uint8_t *header, int i) {
    return header + header_bytes(kind) + i * block_bytes(kind);
}

void blocks_row(int number, const void *w, int o, int K, float *y) {
    Kind kind = KIND[number];
    for (int b = 0; b < blocks_of(K); b++) {
        const uint8_t *header = super_block(kind, w, b / kind.blocks), *block = block_in(kind, header, b % kind.blocks);
        Scales s = scales_at(kind, header, block, o);
        for (int k = 0; k < BLOCK && b * BLOCK + k < K; k++) {
            float q = (float)number_at(kind, block, o, k);
            y[b * BLOCK + k] = kind.least ? fmaf(q, s.half[0], s.least) : q * s.half[k / 16];
        }
    }
}

/* ---- tiles: rows times a panel ------------------------------------------------------------------------- */

#if defined(__ARM_FEATURE_DOTPROD) && !defined(OUTRIDER_PORTABLE)
#include "blocks_neon.h"
#elif defined(__AVX2__) && defined(__FMA__) && !defined(OUTRIDER_PORTABLE)
#include "blocks_avx.h"
#else

ALWAYS void unpack(Kind kind, const uint8_t *header, const uint8_t *block, int8_t *q, float *scales) {
    for (int o = 0; o < PANEL; o++) {
        Scales s = scales_at(kind, header, block, o);
        scales[o] = s.half[0], scales[PANEL + o] = kind.halves ? s.half[1] : s.least;
    }
    for (int k = 0; k < BLOCK; k++)
        for (int o = 0; o < PANEL; o++) q[k / 4 * 64 + o * 4 + k % 4] = (int8_t)number_at(kind, block, o, k);
}

ALWAYS void tile(const int number, const int rows, const void *w, const Rounded *x, int m, float y[][PANEL]) {
    const Kind kind = KIND[number];
    memset(y, 0, rows * sizeof y[0]);
    for (int b = 0; b < x->blocks; b++) {
        const uint8_t *header = super_block(kind, w, b / kind.blocks);
        int8_t q[BLOCK * PANEL];
        float scales[2 * PANEL];
        unpack(kind, header, block_in(kind, header, b % kind.blocks), q, scales);
        for (int r = 0; r < rows; r++) {
            size_t at = (size_t)(m + r) * x->blocks + b;
            for (int h = 0; h < 2; h++) {
                int32_t sum[PANEL] = {0};
                for (int k = kind.halves ? h * 16 : 0; k < (kind.halves ? h * 16 + 16 : BLOCK); k++)
                    for (int o = 0; o < PANEL; o++)
                        sum[o] += q[k / 4 * 64 + o * 4 + k % 4] * x->q[at * BLOCK + k];
                for (int o = 0; o < PANEL; o++)
                    y[r][o] = fmaf((float)sum[o] * scales[kind.halves * h * PANEL + o], x->scale[at], y[r][o]);
                if (!kind.halves) break;
            }
            if (kind.least)
                for (int o = 0; o < PANEL; o++) y[r][o] = fmaf(scales[PANEL + o], x->sum[at], y[r][o]);
        }
    }
}
#endif

/* A panel's next block in wide form. */
ALWAYS void widen_panel(const int number, const void *w, int K, uint8_t *room) {
    const Kind kind = KIND[number], wide = KIND[kind.halves ? WIDE_16 : kind.least ? WIDE_LEAST : WIDE];
    for (int b = 0; b < blocks_of(K); b++, room += block_bytes(wide)) {
        const uint8_t *header = super_block(kind, w, b / kind.blocks);
        float scales[2 * PANEL];
        unpack(kind, header, block_in(kind, header, b % kind.blocks), (int8_t *)room + scale_bytes(wide), scales);
        memcpy(room, scales, scale_bytes(wide));
    }
}

#define EACH_KIND(DO) DO(Q8_0) DO(Q4_0) DO(Q4_1) DO(Q5_0) DO(Q5_1) DO(Q4_K) DO(Q5_K) DO(Q6_K)
#define DEFINE_WIDEN(N) \
    static void widen_##N(const void *w, int K, uint8_t *room) { widen_panel(N, w, K, room); }
EACH_KIND(DEFINE_WIDEN)
#define WIDEN_ROW(N) [N] = widen_##N,
static void (*const WIDENS[KINDS])(const void *, int, uint8_t *) = {EACH_KIND(WIDEN_ROW)};

int blocks_widen(int kind, const void *w, int K, void *room) {
    WIDENS[kind](w, K, room);
    return KIND[kind].halves ? WIDE_16 : KIND[kind].least ? WIDE_LEAST : WIDE;
}

typedef void Tile(const void *, const Rounded *, int, float[][PANEL]);
#define DEFINE_TILE(N, R) \
    static void tile_##N##_##R(const void *w, const Rounded *x, int m, float y[][PANEL]) { tile(N, R, w, x, m, y); }
#define DEFINE_TILES(N) DEFINE_TILE(N, 1) DEFINE_TILE(N, 2) DEFINE_TILE(N, 3) DEFINE_TILE(N, 4)
#define TILES_ROW(N) [N] = {tile_##N##_1, tile_##N##_2, tile_##N##_3, tile_##N##_4},
#define EACH_WIDE(DO) DO(WIDE) DO(WIDE_LEAST) DO(WIDE_16)
EACH_KIND(DEFINE_TILES)
EACH_WIDE(DEFINE_TILES)
static Tile *const TILES[KINDS][TILE] = {EACH_KIND(TILES_ROW) EACH_WIDE(TILES_ROW)};

void blocks_multiply(int kind, int rows, const void *w, const Rounded *x, int m, float y[][PANEL]) {
    TILES[kind][rows - 1](w, x, m, y);
}

/* ---- packing ------------------------------------------------------------------------------------------- */

#define NIBBLES 0x0f0f0f0fu

static inline uint32_t word_at(const uint8_t *p, int i) {
    uint32_t word;
    memcpy(&word, p + 4 * i, 4);
    return word;
}

/* Where the parts of a GGUF super-block lie: bytes of it all, of d, of the low bits and of the high bits. */
static const struct {
    int bytes, d, low, high;
} STORED[KINDS] = {
    [Q8_0] = {34, 0, 2, 0},   [Q4_0] = {18, 0, 2, 0},    [Q4_1] = {20, 0, 4, 0},     [Q5_0] = {22, 0, 6, 2},
    [Q5_1] = {24, 0, 8, 4},   [Q4_K] = {144, 0, 16, 0},  [Q5_K] = {176, 0, 48, 16},  [Q6_K] = {210, 208, 0, 128},
};

/* Nibbles of weights 4g to 4g + 3 of block b. */
ALWAYS uint32_t nibbles(const int kind, const uint8_t *low, int b, int g) {
    if (kind == Q6_K) return word_at(low, b / 4 * 16 + (b & 1) * 8 + g) >> (b & 2) * 2 & NIBBLES;
    if (KIND[kind].blocks > 1) return word_at(low, b / 2 * 8 + g) >> (b & 1) * 4 & NIBBLES;
    return word_at(low, g % 4) >> g / 4 * 4 & NIBBLES;
}

/* The bits above them, each in its byte's lowest bits. */
ALWAYS uint32_t above(const int kind, const uint8_t *high, int b, int g) {
    if (kind == Q6_K) return word_at(high, b / 4 * 8 + g) >> b % 4 * 2 & 0x03030303u;
    if (kind == Q5_K) return word_at(high, g) >> b & 0x01010101u;
    uint32_t four = word_at(high, 0) >> 4 * g;
    return (four & 1) | (four & 2) << 7 | (four & 4) << 14 | (four & 8) << 21;
}

/* Block b of a stored super-block, as output o of a panel's block. */
ALWAYS void pack_block(const int number, const uint8_t *from, int b, int o, uint8_t *block) {
    Kind kind = KIND[number];
    const uint8_t *low = from + STORED[number].low, *high = from + STORED[number].high;
    uint32_t *to_high = (uint32_t *)(block + scale_bytes(kind)), *to_low = to_high + high_bytes(kind) / 4;
    if (kind.bits == 8) {
        for (int g = 0; g < 8; g++) to_low[g * PANEL + o] = word_at(low, g);
        return;
    }
    for (int g = 0; g < 4; g++)
        to_low[g * PANEL + o] = nibbles(number, low, b, g) | nibbles(number, low, b, g + 4) << 4;
    if (kind.bits == 4) return;
    uint32_t words[2] = {0, 0};
    for (int g = 0; g < 8; g++)
        words[kind.bits == 6 && g > 3] |= above(number, high, b, g) << (kind.bits == 5 ? g : g % 4 * 2);
    to_high[o] = words[0];
    if (kind.bits == 6) to_high[PANEL + o] = words[1];
}

/* The scales of block b: of K formats eight bits each, of others as they are. */
ALWAYS void pack_scales(const int number, const uint8_t *from, int b, int o, uint8_t *block) {
    Kind kind = KIND[number];
    if (kind.blocks == 1) {
        for (int i = 0; i <= kind.least; i++) memcpy(block + 32 * i + 2 * o, from + 2 * i, 2);
    } else if (kind.halves) {
        for (int h = 0; h < 2; h++) block[16 * h + o] = from[192 + 2 * b + h];
    } else {
        const uint8_t *six = from + 4; /* four scales, four least values, then four bits of each of the others */
        for (int i = 0; i < 2; i++)
            block[16 * i + o] = b < 4 ? six[4 * i + b] & 63 : (six[4 + b] >> 4 * i & 15) | six[4 * i + b - 4] >> 6 << 4;
    }
}

typedef struct {
    int N, supers;
    const uint8_t *from;
    uint8_t *packed;
    int bad[MOST_MEMBERS];
} PackingBlocks;

static inline int infinite(const uint8_t *half) { return (half[1] & 0x7c) == 0x7c; }

/* Output o of a super-block; returns how many of its scales are not finite. */
ALWAYS int pack_super(const int number, const uint8_t *from, int o, uint8_t *header) {
    const Kind kind = KIND[number];
    const uint8_t *d = from + STORED[number].d;
    int bad = 0;
    for (int i = 0; i <= kind.least; i++) {
        bad += infinite(d + 2 * i);
        if (kind.blocks > 1) memcpy(header + 32 * i + 2 * o, d + 2 * i, 2);
    }
    for (int b = 0; b < kind.blocks; b++) {
        uint8_t *block = (uint8_t *)block_in(kind, header, b);
        pack_scales(number, from, b, o, block);
        pack_block(number, from, b, o, block);
    }
    return bad;
}

ALWAYS void pack_panels(const int number, PackingBlocks *p, int member, int begin, int end) {
    const Kind kind = KIND[number];
    size_t panel = (size_t)p->supers * (header_bytes(kind) + kind.blocks * block_bytes(kind));
    for (int n = begin; n < end; n++) {
        uint8_t *to = p->packed + n * panel;
        int outputs = p->N - n * PANEL < PANEL ? p->N - n * PANEL : PANEL;
        if (outputs < PANEL) memset(to, 0, panel);
        for (int s = 0; s < p->supers; s++)
            for (int o = 0; o < outputs; o++) {
                const uint8_t *from = p->from + ((size_t)(n * PANEL + o) * p->supers + s) * STORED[number].bytes;
                p->bad[member] += pack_super(number, from, o, (uint8_t *)super_block(kind, to, s));
            }
    }
}

/* One function a kind: with the layout known to the compiler, packing takes two thirds of the time. */
#define DEFINE_PACK(N) \
    static void pack_##N(void *job, int member, int begin, int end) { pack_panels(N, job, member, begin, end); }
EACH_KIND(DEFINE_PACK)
#define PACK_ROW(N) [N] = pack_##N,
static Task *const PACKS[KINDS] = {EACH_KIND(PACK_ROW)};

/* Rows of GGUF blocks [N][K / values] -> panels, missing outputs zero. Returns how many scales are not finite. */
int outrider_pack_blocks(int kind, const uint8_t *from, int N, int K, int threads, uint8_t *packed) {
    PackingBlocks job = {N, blocks_of(K) / KIND[kind].blocks, from, packed, {0}};
    int bad = 0;
    team_run(threads, (N + PANEL - 1) / PANEL, PACKS[kind], &job);
    for (int i = 0; i < MOST_MEMBERS; i++) bad += job.bad[i];
    return bad;
}
