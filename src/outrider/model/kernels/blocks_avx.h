/* Tiles and unpacking with AVX2, or with the dot products of AVX-512 VNNI where VNNI is 1.
 *
 * The instructions multiply unsigned by signed bytes. Numbers of up to 6 bits are unsigned before their offset is
 * subtracted, and the sum of two products stays below 2^15. Numbers of 8 bits are signed: VNNI gets them with 128 added,
 * AVX2 their absolute values, with the sign on the activation.
 */
#include <immintrin.h>

#if VNNI
#define WIDTH 1 /* registers of 16 outputs */
typedef __m512i Ints;
typedef __m512 Floats;
#define LOAD(P) _mm512_loadu_si512(P)
#define EVERY_BYTE(X) _mm512_set1_epi8((char)(X))
#define EVERY_INT(X) _mm512_set1_epi32(X)
#define AND _mm512_and_si512
#define OR _mm512_or_si512
#define XOR _mm512_xor_si512
#define SUB_BYTES _mm512_sub_epi8
#define STORE(P, X) _mm512_storeu_si512(P, X)
#define EVERY_16(X) _mm512_broadcast_i32x4(X)
#define LOOK_UP _mm512_shuffle_epi8
#define LEFT(X, N) _mm512_slli_epi16(X, N)
#define RIGHT(X, N) _mm512_srli_epi16(X, N)
#define AS_FLOATS(X) _mm512_cvtepi32_ps(X)
#define LOAD_FLOATS(P) _mm512_loadu_ps(P)
#define STORE_FLOATS(P, X) _mm512_storeu_ps(P, X)
#define EVERY_FLOAT(X) _mm512_set1_ps(X)
#define TIMES(A, B) _mm512_mul_ps(A, B)
#define FMA(A, B, C) _mm512_fmadd_ps(A, B, C)
#else
#define WIDTH 2
typedef __m256i Ints;
typedef __m256 Floats;
#define LOAD(P) _mm256_loadu_si256((const __m256i *)(P))
#define EVERY_BYTE(X) _mm256_set1_epi8((char)(X))
#define EVERY_INT(X) _mm256_set1_epi32(X)
#define AND _mm256_and_si256
#define OR _mm256_or_si256
#define XOR _mm256_xor_si256
#define SUB_BYTES _mm256_sub_epi8
#define STORE(P, X) _mm256_storeu_si256((__m256i *)(P), X)
#define EVERY_16(X) _mm256_broadcastsi128_si256(X)
#define LOOK_UP _mm256_shuffle_epi8
#define LEFT(X, N) _mm256_slli_epi16(X, N)
#define RIGHT(X, N) _mm256_srli_epi16(X, N)
#define AS_FLOATS(X) _mm256_cvtepi32_ps(X)
#define LOAD_FLOATS(P) _mm256_loadu_ps(P)
#define STORE_FLOATS(P, X) _mm256_storeu_ps(P, X)
#define EVERY_FLOAT(X) _mm256_set1_ps(X)
#define TIMES(A, B) _mm256_mul_ps(A, B)
#define FMA(A, B, C) _mm256_fmadd_ps(A, B, C)
#endif
#define BYTES (64 / WIDTH)   /* of a register */
#define OUTPUTS (16 / WIDTH) /* in it */

/* Register v of weights 4g to 4g + 3 of all outputs; the offset is not subtracted. */
ALWAYS Ints group(const Kind kind, const uint8_t *high, const uint8_t *low, const int g, const int v) {
    if (kind.bits == 8) return LOAD(low + g * 64 + v * BYTES);
    Ints packed = LOAD(low + g % 4 * 64 + v * BYTES);
    Ints found = AND(g < 4 ? packed : RIGHT(packed, 4), EVERY_BYTE(15));
    if (kind.floats) return LOOK_UP(EVERY_16(_mm_setr_epi8(TWICE)), found);
    if (kind.bits == 5) {
        Ints bits = LOAD(high + v * BYTES);
        found = OR(found, AND(g < 4 ? LEFT(bits, 4 - g) : RIGHT(bits, g - 4), EVERY_BYTE(16)));
    }
    if (kind.bits == 6) {
        Ints bits = LOAD(high + g / 4 * 64 + v * BYTES);
        found = OR(found, AND(g % 4 < 3 ? LEFT(bits, 4 - 2 * (g % 4)) : RIGHT(bits, 2), EVERY_BYTE(48)));
    }
    return found;
}

ALWAYS Ints dot(const Kind kind, Ints sum, Ints w, Ints x) {
#if VNNI
    return _mm512_dpbusd_epi32(sum, kind.bits == 8 ? XOR(w, EVERY_BYTE(128)) : w, x);
#else
    Ints pairs = kind.bits == 8 ? _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w))
                                : _mm256_maddubs_epi16(w, x);
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
}

/* What VNNI's sums have too much, and what formats have, for each unit of the activations' sum. */
ALWAYS int excess(const Kind kind) { return VNNI && kind.bits == 8 ? 128 : kind.offset; }

ALWAYS void scales_into(const Kind kind, const uint8_t *header, const uint8_t *block, float *scales) {
    for (int o = 0; o < PANEL; o++) {
        Scales s = scales_at(kind, header, block, o);
        scales[o] = s.half[0], scales[PANEL + o] = kind.halves ? s.half[1] : s.least;
    }
}

ALWAYS void unpack(const Kind kind, const uint8_t *header, const uint8_t *block, int8_t *q, float *scales) {
    const uint8_t *high = block + scale_bytes(kind), *low = high + high_bytes(kind);
    scales_into(kind, header, block, scales);
    UNROLL for (int g = 0; g < 8; g++) UNROLL for (int v = 0; v < WIDTH; v++)
        STORE(q + g * 64 + v * BYTES, SUB_BYTES(group(kind, high, low, g, v), EVERY_BYTE(kind.offset)));
}

ALWAYS void tile(const int number, const int rows, const void *w, const Rounded *x, int m, float y[][PANEL]) {
    const Kind kind = KIND[number];
    const int each = kind.halves ? 4 : 8; /* groups that share a scale */
    Floats total[TILE][WIDTH];
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < WIDTH; v++) total[r][v] = EVERY_FLOAT(0);
    for (int b = 0; b < x->blocks; b++) {
        const uint8_t *header = super_block(kind, w, b / kind.blocks), *block = block_in(kind, header, b % kind.blocks);
        const uint8_t *high = block + scale_bytes(kind), *low = high + high_bytes(kind);
        size_t at = (size_t)m * x->blocks + b;
        float own[2 * PANEL];
        const float *scales = kind.wide ? (const float *)block : own;
        if (!kind.wide) scales_into(kind, header, block, own);
        UNROLL for (int h = 0; h <= kind.halves; h++) {
            Ints sum[TILE][WIDTH];
            UNROLL for (int r = 0; r < rows; r++) {
                const int32_t *halves = x->halves + 2 * (at + (size_t)r * x->blocks);
                int32_t start = -excess(kind) * (kind.halves ? halves[h] : halves[0] + halves[1]);
                UNROLL for (int v = 0; v < WIDTH; v++) sum[r][v] = EVERY_INT(start);
            }
            UNROLL for (int g = h * each; g < h * each + each; g++) UNROLL for (int v = 0; v < WIDTH; v++) {
                Ints q = group(kind, high, low, g, v);
                UNROLL for (int r = 0; r < rows; r++) {
                    int32_t four;
                    memcpy(&four, x->q + (at + (size_t)r * x->blocks) * BLOCK + 4 * g, 4);
                    sum[r][v] = dot(kind, sum[r][v], q, EVERY_INT(four));
                }
            }
            UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < WIDTH; v++) {
                size_t here = at + (size_t)r * x->blocks;
                Floats part = TIMES(AS_FLOATS(sum[r][v]), LOAD_FLOATS(scales + h * PANEL + v * OUTPUTS));
                total[r][v] = FMA(part, EVERY_FLOAT(x->scale[here]), total[r][v]);
                if (kind.least)
                    total[r][v] = FMA(LOAD_FLOATS(scales + PANEL + v * OUTPUTS), EVERY_FLOAT(x->sum[here]), total[r][v]);
            }
        }
    }
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < WIDTH; v++)
        STORE_FLOATS(y[r] + v * OUTPUTS, total[r][v]);
}
