/* Tiles and unpacking with NEON's dot products, and with its products of matrices where I8MM is 1.
 *
 * A sum starts at MAGIC, the bits of 1.5 * 2^23, instead of 0: as a float it is then 1.5 * 2^23 plus the sum, and one
 * subtraction converts it exactly. The processor converts integers at a quarter of that rate. Sums stay below 2^22.
 */
#include <arm_neon.h>

#define MAGIC 0x4B400000
#define AHEAD 512 /* bytes: weights are fetched while those before them are multiplied */

ALWAYS uint8x16_t shifted(uint8x16_t x, const int left) {
    return left == 4 ? vshlq_n_u8(x, 4) : left == 3 ? vshlq_n_u8(x, 3) : left == 2 ? vshlq_n_u8(x, 2)
         : left == 1 ? vshlq_n_u8(x, 1) : left == 0 ? x : left == -1 ? vshrq_n_u8(x, 1)
         : left == -2 ? vshrq_n_u8(x, 2) : vshrq_n_u8(x, 3);
}

/* Weights 4i to 4i + 3, and those 16 further, of outputs 4j to 4j + 3; the offset is not subtracted. */
ALWAYS void quads(const Kind kind, const uint8_t *high, const uint8_t *low, int i, int j, int8x16_t *a, int8x16_t *b) {
    uint8x16_t w = vld1q_u8(low + (i * 4 + j) * 16);
    if (kind.bits == 8) {
        *a = vreinterpretq_s8_u8(w), *b = vreinterpretq_s8_u8(vld1q_u8(low + 256 + (i * 4 + j) * 16));
        return;
    }
    uint8x16_t first = vandq_u8(w, vdupq_n_u8(15)), second = vshrq_n_u8(w, 4);
    if (kind.floats) {
        const uint8x16_t values = {TWICE};
        first = vqtbl1q_u8(values, first), second = vqtbl1q_u8(values, second);
    }
    if (kind.bits == 5) {
        uint8x16_t bits = vld1q_u8(high + j * 16), fifth = vdupq_n_u8(16);
        first = vbslq_u8(fifth, shifted(bits, 4 - i), first);
        second = vbslq_u8(fifth, shifted(bits, -i), second);
    }
    if (kind.bits == 6) {
        uint8x16_t both = vdupq_n_u8(48);
        first = vbslq_u8(both, shifted(vld1q_u8(high + j * 16), 4 - 2 * i), first);
        second = vbslq_u8(both, shifted(vld1q_u8(high + 64 + j * 16), 4 - 2 * i), second);
    }
    *a = vreinterpretq_s8_u8(first), *b = vreinterpretq_s8_u8(second);
}

/* Sixteen halves as floats. */
ALWAYS void halves_at(const uint8_t *p, float32x4_t to[4]) {
    UNROLL for (int j = 0; j < 4; j++) to[j] = vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p + 8 * j)));
}

/* The numbers of a super-block's header: d, and the scale of least values with its sign. */
typedef struct {
    float32x4_t d[4], least[4];
} Header;

ALWAYS Header header_at(const Kind kind, const uint8_t *p) {
    Header found;
    if (kind.blocks == 1) return found;
    halves_at(p, found.d);
    if (kind.least) {
        halves_at(p + 32, found.least);
        UNROLL for (int j = 0; j < 4; j++) found.least[j] = vnegq_f32(found.least[j]);
    }
    return found;
}

/* The scales of a block; `which` 1: of the second half, or the least values. A byte above the exponent of 2^23 is a
 * float from which one subtraction takes the rest: cheaper than conversions. */
ALWAYS void scales_of(const Kind kind, const Header *header, const uint8_t *block, const int which, float32x4_t to[4]) {
    if (kind.wide) {
        UNROLL for (int j = 0; j < 4; j++) to[j] = vld1q_f32((const float *)block + which * 16 + 4 * j);
    } else if (kind.floats) {
        uint8x16_t bytes = vld1q_u8(block);
        UNROLL for (int j = 0; j < 4; j++) {
            const uint8x16_t at = vreinterpretq_u8_u32((uint32x4_t){4 * j, 4 * j + 1, 4 * j + 2, 4 * j + 3} | 0xffffff00u);
            uint32x4_t word = vshlq_n_u32(vreinterpretq_u32_u8(vqtbl1q_u8(bytes, at)), 23);
            to[j] = vmulq_n_f32(vreinterpretq_f32_u32(vmaxq_u32(word, vdupq_n_u32(0x400000))), 0.5f); /* 0 is 2^-127 */
        }
    } else if (kind.blocks == 1) {
        halves_at(block + 32 * which, to);
    } else {
        uint8x16_t bytes = vld1q_u8(block + 16 * which);
        if (kind.halves) bytes = veorq_u8(bytes, vdupq_n_u8(128)); /* these are signed */
        const float32x4_t bias = vdupq_n_f32(kind.halves ? 8388608.0f + 128.0f : 8388608.0f);
        const uint8x16x2_t table = {{bytes, vdupq_n_u8(0x4b)}};
        UNROLL for (int j = 0; j < 4; j++) {
            const uint32x4_t at = {0x10ffff00u + 4 * j, 0x10ffff01u + 4 * j, 0x10ffff02u + 4 * j, 0x10ffff03u + 4 * j};
            float32x4_t number = vreinterpretq_f32_u8(vqtbl2q_u8(table, vreinterpretq_u8_u32(at)));
            to[j] = vmulq_f32(vsubq_f32(number, bias), kind.least && which ? header->least[j] : header->d[j]);
        }
    }
}

ALWAYS void unpack(const Kind kind, const uint8_t *header, const uint8_t *block, int8_t *q, float *scales) {
    const uint8_t *high = block + scale_bytes(kind), *low = high + high_bytes(kind);
    const Header numbers = header_at(kind, header);
    int8x16_t offset = vdupq_n_s8((int8_t)kind.offset), a, b;
    float32x4_t found[4];
    for (int which = 0; which <= (kind.least || kind.halves); which++) {
        scales_of(kind, &numbers, block, which, found);
        UNROLL for (int j = 0; j < 4; j++) vst1q_f32(scales + 16 * which + 4 * j, found[j]);
    }
    UNROLL for (int i = 0; i < 4; i++) UNROLL for (int j = 0; j < 4; j++) {
        quads(kind, high, low, i, j, &a, &b);
        vst1q_s8(q + (i * 4 + j) * 16, vsubq_s8(a, offset));
        vst1q_s8(q + 256 + (i * 4 + j) * 16, vsubq_s8(b, offset));
    }
}

/* dot products with the four numbers of lane i, which the instruction wants as a constant */
#define DOT(SUM, W, X)                                                                                                 \
    (i == 0 ? vdotq_laneq_s32(SUM, W, X, 0) : i == 1 ? vdotq_laneq_s32(SUM, W, X, 1)                                   \
     : i == 2 ? vdotq_laneq_s32(SUM, W, X, 2) : vdotq_laneq_s32(SUM, W, X, 3))

/* The sum that products are added to: MAGIC, less what the formats' offset adds to them. */
ALWAYS int32_t start_of(const Kind kind, const int h, const Rounded *x, size_t here) {
    if (!kind.offset) return MAGIC;
    const int32_t *minus = x->minus + 2 * here;
    return MAGIC + kind.offset * (!kind.halves ? minus[0] : h ? minus[0] - minus[1] : minus[1]);
}

#if I8MM
/* The sums of a block, or of its half h: an instruction takes 8 weights of two outputs and two rows. */
ALWAYS void pair_sums(const Kind kind, const int rows, const int h, const uint8_t *high, const uint8_t *low,
                      const Rounded *x, size_t at, int32x4_t sum[TILE][4]) {
    int8x16_t pairs[TILE / 2][4]; /* 8 numbers of a row, the same of the next */
    UNROLL for (int p = 0; p < (rows + 1) / 2; p++) UNROLL for (int c = 0; c < 4; c++) {
        const int8_t *first = x->q + (at + 2 * p) * BLOCK + 8 * c;
        int8x8_t second = 2 * p + 1 < rows ? vld1_s8(first + BLOCK) : vdup_n_s8(0);
        pairs[p][c] = vcombine_s8(vld1_s8(first), second);
    }
    UNROLL for (int j = 0; j < 4; j++) {
        int32x4_t found[TILE / 2][2];
        UNROLL for (int p = 0; p < (rows + 1) / 2; p++) found[p][0] = found[p][1] = vdupq_n_s32(0);
        UNROLL for (int i = 0; i < 4; i += 2) {
            int8x16_t q[2][2]; /* words 4i and 4i + 4, and those 16 further */
            quads(kind, high, low, i, j, &q[0][0], &q[1][0]);
            quads(kind, high, low, i + 1, j, &q[0][1], &q[1][1]);
            UNROLL for (int f = 0; f < 2; f++) {
                if (kind.halves && f != h) continue;
                int32x4_t a = vreinterpretq_s32_s8(q[f][0]), b = vreinterpretq_s32_s8(q[f][1]);
                int8x16_t w[2] = {vreinterpretq_s8_s32(vzip1q_s32(a, b)), vreinterpretq_s8_s32(vzip2q_s32(a, b))};
                UNROLL for (int p = 0; p < (rows + 1) / 2; p++) UNROLL for (int o = 0; o < 2; o++)
                    found[p][o] = vmmlaq_s32(found[p][o], pairs[p][2 * f + i / 2], w[o]);
            }
        }
        UNROLL for (int p = 0; p < (rows + 1) / 2; p++) {
            int64x2_t a = vreinterpretq_s64_s32(found[p][0]), b = vreinterpretq_s64_s32(found[p][1]);
            sum[2 * p][j] = vaddq_s32(sum[2 * p][j], vreinterpretq_s32_s64(vuzp1q_s64(a, b)));
            if (2 * p + 1 < rows)
                sum[2 * p + 1][j] = vaddq_s32(sum[2 * p + 1][j], vreinterpretq_s32_s64(vuzp2q_s64(a, b)));
        }
    }
}
#endif

/* The same, four weights of an output at a time. */
ALWAYS void row_sums(const Kind kind, const int rows, const int h, const uint8_t *high, const uint8_t *low,
                     const Rounded *x, size_t at, int32x4_t sum[TILE][4]) {
    int8x16_t first[TILE], second[TILE];
    UNROLL for (int r = 0; r < rows; r++) {
        size_t here = at + r;
        first[r] = vld1q_s8(x->q + here * BLOCK), second[r] = vld1q_s8(x->q + here * BLOCK + 16);
    }
    UNROLL for (int i = 0; i < 4; i++) UNROLL for (int j = 0; j < 4; j++) {
        int8x16_t q[2];
        quads(kind, high, low, i, j, &q[0], &q[1]);
        UNROLL for (int r = 0; r < rows; r++) {
            if (!kind.halves || h == 0) sum[r][j] = DOT(sum[r][j], q[0], first[r]);
            if (!kind.halves || h == 1) sum[r][j] = DOT(sum[r][j], q[1], second[r]);
        }
    }
}

/* One block: `at` is where it lies in the first row. */
ALWAYS void add_block(const Kind kind, const int rows, const Header *header, const uint8_t *block, const Rounded *x,
                      size_t at, float32x4_t total[TILE][4]) {
    const uint8_t *high = block + scale_bytes(kind), *low = high + high_bytes(kind);
    const float32x4_t magic = vreinterpretq_f32_s32(vdupq_n_s32(MAGIC));
    UNROLL for (int c = 0; c < block_bytes(kind); c += 64) __builtin_prefetch(block + AHEAD + c);
    UNROLL for (int h = 0; h <= kind.halves; h++) {
        int32x4_t sum[TILE][4];
        float32x4_t scale[4], least[4];
        UNROLL for (int r = 0; r < rows; r++) {
            int32x4_t start = vdupq_n_s32(start_of(kind, h, x, at + r));
            UNROLL for (int j = 0; j < 4; j++) sum[r][j] = start;
        }
#if I8MM
        if (rows > 1) pair_sums(kind, rows, h, high, low, x, at, sum);
        else
#endif
            row_sums(kind, rows, h, high, low, x, at, sum);
        scales_of(kind, header, block, h, scale);
        if (kind.least) scales_of(kind, header, block, 1, least);
        UNROLL for (int j = 0; j < 4; j++) UNROLL for (int r = 0; r < rows; r++) {
            size_t here = at + r;
            float32x4_t part = vmulq_f32(vsubq_f32(vreinterpretq_f32_s32(sum[r][j]), magic), scale[j]);
            total[r][j] = vfmaq_n_f32(total[r][j], part, x->scale[here]);
            if (kind.least) total[r][j] = vfmaq_n_f32(total[r][j], least[j], x->sum[here]);
        }
    }
}

ALWAYS void tile(const int number, const int rows, const void *w, const Rounded *x, int m, float y[][PANEL]) {
    const Kind kind = KIND[number];
    float32x4_t total[TILE][4];
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int j = 0; j < 4; j++) total[r][j] = vdupq_n_f32(0);
    const uint8_t *at = w;
    for (int b = 0; b < x->blocks;) {
        const Header header = header_at(kind, at);
        at += header_bytes(kind);
        for (int s = 0; s < kind.blocks; s++, b++, at += block_bytes(kind))
            add_block(kind, rows, &header, at, x, (size_t)m * x->blocks + (size_t)b * rows, total);
    }
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int j = 0; j < 4; j++) vst1q_f32(y[r] + 4 * j, total[r][j]);
}
