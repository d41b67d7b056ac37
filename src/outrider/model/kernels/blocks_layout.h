/* How weights in blocks lie in a panel; blocks.c says what for. Every variant of the kernels compiles this for itself,
 * with the instructions that TARGET names.
 */
#ifndef OUTRIDER_BLOCKS_LAYOUT_H
#define OUTRIDER_BLOCKS_LAYOUT_H

#include "blocks.h"

#include <math.h>
#include <string.h>

#ifndef TARGET
#define TARGET
#endif
#define ALWAYS static inline __attribute__((always_inline)) TARGET
#define UNROLL _Pragma("GCC unroll 8")

typedef struct {
    int blocks; /* in a super-block */
    int bits;
    int least;  /* blocks have a least value */
    int halves; /* a scale for every 16 weights */
    int offset; /* subtracted from the stored number */
    int wide;
    int floats; /* stored are 4-bit floats, whose values TWICE lists; a scale is the exponent of a power of two */
} Kind;

/* e2m1 times two, and 12 more, so that none is negative: the number that `offset` is subtracted from. */
#define TWICE 12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0

static const Kind KIND[KINDS] = {
    [Q8_0] = {1, 8, 0, 0, 0, 0},  [Q4_0] = {1, 4, 0, 0, 8, 0}, [Q4_1] = {1, 4, 1, 0, 0, 0},
    [Q5_0] = {1, 5, 0, 0, 16, 0}, [Q5_1] = {1, 5, 1, 0, 0, 0}, [Q4_K] = {8, 4, 1, 0, 0, 0},
    [Q5_K] = {8, 5, 1, 0, 0, 0},  [Q6_K] = {8, 6, 0, 1, 32, 0}, [MXFP4] = {1, 4, 0, 0, 12, 0, 1}, [WIDE] = {1, 8, 0, 0, 0, 1},
    [WIDE_LEAST] = {1, 8, 1, 0, 0, 1}, [WIDE_16] = {1, 8, 0, 1, 0, 1},
};

/* Bytes for 16 outputs. */
ALWAYS int header_bytes(Kind k) { return k.blocks == 1 ? 0 : k.least ? 64 : 32; }
ALWAYS int scale_bytes(Kind k) {
    int two = k.least || k.halves;
    return k.wide ? (two ? 128 : 64) : k.floats ? 16 : k.blocks > 1 ? 32 : two ? 64 : 32;
}
ALWAYS int high_bytes(Kind k) { return k.bits == 5 ? 64 : k.bits == 6 ? 128 : 0; }
ALWAYS int low_bytes(Kind k) { return k.bits == 8 ? 512 : 256; }
ALWAYS int block_bytes(Kind k) { return scale_bytes(k) + high_bytes(k) + low_bytes(k); }

ALWAYS int blocks_of(int K) { return (K + BLOCK - 1) / BLOCK; }

ALWAYS float half_at(const uint8_t *p, int i) {
    uint16_t h;
    memcpy(&h, p + 2 * i, 2);
    uint32_t sign = (uint32_t)(h >> 15) << 31, rest = h & 0x7fff, word;
    if (rest < 0x400) return (sign ? -0x1p-24f : 0x1p-24f) * (float)rest;
    word = sign | (rest < 0x7c00 ? (rest << 13) + 0x38000000u : (rest << 13) | 0x7f800000u);
    float x;
    memcpy(&x, &word, 4);
    return x;
}

/* Half of two to the power of e - 127: weights are stored twice as large. Below 2 it is no normal number. */
ALWAYS float power_at(uint32_t e) {
    uint32_t word = e < 2 ? 0x200000u << e : (e - 1) << 23;
    float x;
    memcpy(&x, &word, 4);
    return x;
}

/* ---- weights one by one -------------------------------------------------------------------------------- */

/* Weight k of output o, from a block's bits. */
ALWAYS int number_at(Kind kind, const uint8_t *block, int o, int k) {
    const uint8_t *high = block + scale_bytes(kind), *low = high + high_bytes(kind);
    int lane = o * 4 + k % 4, group = k / 4;
    if (kind.bits == 8) return (int8_t)low[group * 64 + lane];
    int found = low[group % 4 * 64 + lane] >> (k < 16 ? 0 : 4) & 15;
    if (kind.floats) found = (const uint8_t[]){TWICE}[found];
    if (kind.bits == 5) found |= (high[lane] >> group & 1) << 4;
    if (kind.bits == 6) found |= (high[k / 16 * 64 + lane] >> (2 * (group % 4)) & 3) << 4;
    return found - kind.offset;
}

/* The scales of output o in a block: its halves', and its least value. */
typedef struct {
    float half[2], least;
} Scales;

ALWAYS Scales scales_at(Kind kind, const uint8_t *header, const uint8_t *block, int o) {
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
    float s = kind.floats ? power_at(block[o]) : half_at(block, o);
    return (Scales){{s, s}, kind.least ? half_at(block, 16 + o) : 0};
}

/* The header of super-block `at`, and its blocks. */
ALWAYS const uint8_t *super_block(Kind kind, const void *w, int at) {
    return (const uint8_t *)w + (size_t)at * (header_bytes(kind) + kind.blocks * block_bytes(kind));
}
ALWAYS const uint8_t *block_in(Kind kind, const uint8_t *header, int i) {
    return header + header_bytes(kind) + i * block_bytes(kind);
}

#define EACH_KIND(DO) DO(Q8_0) DO(Q4_0) DO(Q4_1) DO(Q5_0) DO(Q5_1) DO(Q4_K) DO(Q5_K) DO(Q6_K) DO(MXFP4)
#define EACH_WIDE(DO) DO(WIDE) DO(WIDE_LEAST) DO(WIDE_16)

#endif
