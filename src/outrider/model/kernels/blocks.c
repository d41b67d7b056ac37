/* Products with weights in blocks of 4 to 8 bits: GGUF's formats, repacked so that 16 outputs meet one load.
 *
 * The law of a product, the same bits on every machine, for any number of rows and threads:
 *
 *   activations  by blocks of 32: scale = max |x| / 127, q = x * (127 / max |x|) to the nearest whole number, ties to even
 *   block        the integer sum of weight * q, exact; for Q6_K one of every 16; for MXFP4 of weight * 2, with half the scale
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
#include "blocks_layout.h"

#include <stdlib.h>

#include "cpu_features.h"
#include "team.h"

size_t blocks_panel_bytes(int kind, int K) {
    Kind k = KIND[kind];
    return (size_t)(blocks_of(K) / k.blocks) * (header_bytes(k) + k.blocks * block_bytes(k));
}

Rounded rounded_for(int rows, int K) {
    size_t blocks = blocks_of(K), all = rows * blocks;
    int8_t *q = malloc(all * (BLOCK + 4 * sizeof(float)) + 1);
    if (!q) return (Rounded){0};
    float *scale = (float *)(q + all * BLOCK);
    return (Rounded){(int)blocks, q, scale, scale + all, (int32_t *)(scale + 2 * all)};
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

/* ---- which kernels ------------------------------------------------------------------------------------- */

/* The kernels that this processor can run, the quickest first; the last is portable. */
static const Variant *VARIANTS[] = {
#if defined(__x86_64__)
    &blocks_vnni, &blocks_avx2,
#elif defined(__aarch64__)
    &blocks_i8mm, &blocks_sdot,
#endif
    &blocks_portable,
};
#define COUNT (int)(sizeof VARIANTS / sizeof *VARIANTS)
static const Variant *chosen = &blocks_portable;

static int runs(const Variant *v) {
#if defined(__x86_64__)
    if (v == &blocks_vnni) return has_avx512_vnni();
    if (v == &blocks_avx2) return has_avx2();
#elif defined(__aarch64__)
    if (v == &blocks_i8mm) return has_i8mm();
    if (v == &blocks_sdot) return has_sdot();
#endif
    return v == &blocks_portable;
}

__attribute__((constructor)) static void choose(void) {
    for (int i = COUNT - 1; i >= 0; i--) chosen = runs(VARIANTS[i]) ? VARIANTS[i] : chosen;
}

/* The name of variant i if the processor can run it, else null; from COUNT on an empty name. */
const char *outrider_variant(int i) { return i >= COUNT ? "" : runs(VARIANTS[i]) ? VARIANTS[i]->name : 0; }

/* The variant in use. */
const char *outrider_chosen(void) { return chosen->name; }

/* Uses variant i from now on, for tests; requires that the processor can run it and that no kernel runs. */
void outrider_choose(int i) { chosen = VARIANTS[i]; }

void blocks_round(const float *x, int K, const Rounded *to, int m, int rows, int row) {
    chosen->round(x, K, to, m, rows, row);
}

int blocks_widen(int kind, const void *w, int K, void *room) {
    chosen->widen[kind](w, K, room);
    return KIND[kind].halves ? WIDE_16 : KIND[kind].least ? WIDE_LEAST : WIDE;
}

int blocks_rows(void) { return chosen->rows; }
int blocks_widens(void) { return chosen->widens; }

void blocks_multiply(int kind, int rows, const void *w, const Rounded *x, int m, float y[][PANEL]) {
    chosen->tiles[kind][rows - 1](w, x, m, y);
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
    [MXFP4] = {17, 0, 1, 0},
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
    if (kind.floats) {
        block[o] = from[0];
    } else if (kind.blocks == 1) {
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

/* Whether a scale is no finite number. */
static inline int infinite(Kind kind, const uint8_t *scale) {
    return kind.floats ? *scale == 255 : (scale[1] & 0x7c) == 0x7c;
}

/* Output o of a super-block; returns how many of its scales are not finite. */
ALWAYS int pack_super(const int number, const uint8_t *from, int o, uint8_t *header) {
    const Kind kind = KIND[number];
    const uint8_t *d = from + STORED[number].d;
    int bad = 0;
    for (int i = 0; i <= kind.least; i++) {
        bad += infinite(kind, d + 2 * i);
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
