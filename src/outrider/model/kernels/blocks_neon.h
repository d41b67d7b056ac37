/* Tiles and unpacking with NEON's dot products; part of blocks.c.
 *
 * A sum starts at MAGIC, the bits of 1.5 * 2^23, instead of 0: as a float it is then 1.5 * 2^23 plus the sum, and one
 * subtraction converts it exactly. The processor converts integers at a quarter of that rate. Sums stay below 2^22.
 */
#include <arm_neon.h>

#define MAGIC 0x4B400000
#define AHEAD 2048 /* bytes: weights are fetched while those before them are multiplied */
#define UNROLL _Pragma("GCC unroll 8")

/* Weights 4i to 4i + 3, and those 16 further, of outputs 4j to 4j + 3; the offset is not subtracted. */
ALWAYS void quads(const Kind kind, const uint8_t *high, const uint8_t *low, int i, int j, int8x16_t *a, int8x16_t *b) {
    uint8x16_t w = vld1q_u8(low + (i * 4 + j) * 16);
    if (kind.bits == 8) {
        *a = vreinterpretq_s8_u8(w), *b = vreinterpretq_s8_u8(vld1q_u8(low + 256 + (i * 4 + j) * 16));
        return;
    }
    uint8x16_t first = vandq_u8(w, vdupq_n_u8(15)), second = vshrq_n_u8(w, 4);
    if (kind.bits == 5) {
        uint8x16_t bits = vld1q_u8(high + j * 16), fifth = vdupq_n_u8(16);
        first = vbslq_u8(fifth, vshlq_u8(bits, vdupq_n_s8(4 - i)), first);
        second = vbslq_u8(fifth, vshlq_u8(bits, vdupq_n_s8(-i)), second);
    }
    if (kind.bits == 6) {
        uint8x16_t both = vdupq_n_u8(48);
        first = vbslq_u8(both, vshlq_u8(vld1q_u8(high + j * 16), vdupq_n_s8(4 - 2 * i)), first);
        second = vbslq_u8(both, vshlq_u8(vld1q_u8(high + 64 + j * 16), vdupq_n_s8(4 - 2 * i)), second);
    }
    *a = vreinterpretq_s8_u8(first), *b = vreinterpretq_s8_u8(second);
}

ALWAYS float32x4_t halves_at(const uint8_t *p, int j) {
    return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p + 8 * j)));
}

/* Bytes at p as floats, four of them at 4j. */
ALWAYS float32x4_t bytes_at(const uint8_t *p, int j, const int is_signed) {
    uint32_t word;
    memcpy(&word, p + 4 * j, 4);
    uint8x8_t four = vreinterpret_u8_u32(vdup_n_u32(word));
    if (is_signed) return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(four)))));
    return vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(four))));
}

/* Scales of outputs 4j to 4j + 3; `which` 1: of the second half, or the least values. */
ALWAYS float32x4_t scales_of(const Kind kind, const uint8_t *header, const uint8_t *block, int j, const int which) {
    if (kind.wide) return vld1q_f32((const float *)block + which * 16 + 4 * j);
    if (kind.blocks == 1) return halves_at(block + 32 * which, j);
    if (kind.halves) return vmulq_f32(halves_at(header, j), bytes_at(block + 16 * which, j, 1));
    float32x4_t s = vmulq_f32(halves_at(header + 32 * which, j), bytes_at(block + 16 * which, j, 0));
    return which ? vnegq_f32(s) : s;
}

ALWAYS void unpack(const Kind kind, const uint8_t *header, const uint8_t *block, int8_t *q, float *scales) {
    const uint8_t *high = block + scale_bytes(kind), *low = high + high_bytes(kind);
    int8x16_t offset = vdupq_n_s8((int8_t)kind.offset), a, b;
    UNROLL for (int j = 0; j < 4; j++) {
        vst1q_f32(scales + 4 * j, scales_of(kind, header, block, j, 0));
        if (kind.least || kind.halves) vst1q_f32(scales + 16 + 4 * j, scales_of(kind, header, block, j, 1));
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

ALWAYS void tile(const int number, const int rows, const void *w, const Rounded *x, int m, float y[][PANEL]) {
    const Kind kind = KIND[number];
    const int passes = kind.halves ? 2 : 1;
    const float32x4_t magic = vreinterpretq_f32_s32(vdupq_n_s32(MAGIC));
    float32x4_t total[TILE][4];
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int j = 0; j < 4; j++) total[r][j] = vdupq_n_f32(0);
    const uint8_t *header = w, *block = header + header_bytes(kind);
    for (int b = 0; b < x->blocks; b++, block += block_bytes(kind)) {
        if (kind.blocks > 1 && b && b % kind.blocks == 0) header = block, block += header_bytes(kind);
        const uint8_t *high = block + scale_bytes(kind), *low = high + high_bytes(kind);
        size_t at = (size_t)m * x->blocks + b;
        UNROLL for (int c = 0; c < block_bytes(kind); c += 64) __builtin_prefetch(block + AHEAD + c);
        UNROLL for (int h = 0; h < passes; h++) {
            int8x16_t first[TILE], second[TILE];
            int32x4_t sum[TILE][4];
            UNROLL for (int r = 0; r < rows; r++) {
                size_t here = at + (size_t)r * x->blocks;
                int32_t start = MAGIC;
                first[r] = vld1q_s8(x->q + here * BLOCK), second[r] = vld1q_s8(x->q + here * BLOCK + 16);
                if (kind.halves) start -= kind.offset * x->halves[2 * here + h];
                else if (kind.offset) start -= kind.offset * (x->halves[2 * here] + x->halves[2 * here + 1]);
                UNROLL for (int j = 0; j < 4; j++) sum[r][j] = vdupq_n_s32(start);
            }
            UNROLL for (int i = 0; i < 4; i++) UNROLL for (int j = 0; j < 4; j++) {
                int8x16_t q[2];
                quads(kind, high, low, i, j, &q[0], &q[1]);
                UNROLL for (int r = 0; r < rows; r++) {
                    if (!kind.halves || h == 0) sum[r][j] = DOT(sum[r][j], q[0], first[r]);
                    if (!kind.halves || h == 1) sum[r][j] = DOT(sum[r][j], q[1], second[r]);
                }
            }
            UNROLL for (int j = 0; j < 4; j++) {
                float32x4_t scale = scales_of(kind, header, block, j, h);
                float32x4_t least = kind.least ? scales_of(kind, header, block, j, 1) : scale;
                UNROLL for (int r = 0; r < rows; r++) {
                    size_t here = at + (size_t)r * x->blocks;
                    float32x4_t part = vmulq_f32(vsubq_f32(vreinterpretq_f32_s32(sum[r][j]), magic), scale);
                    total[r][j] = vfmaq_n_f32(total[r][j], part, x->scale[here]);
                    if (kind.least) total[r][j] = vfmaq_n_f32(total[r][j], least, x->sum[here]);
                }
            }
        }
    }
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int j = 0; j < 4; j++) vst1q_f32(y[r] + 4 * j, total[r][j]);
}
