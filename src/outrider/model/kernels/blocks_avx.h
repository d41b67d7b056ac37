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
#define SUB_INTS _mm512_sub_epi32
#define LEFT_INTS(X, N) _mm512_slli_epi32(X, N)
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
#define HALVES(P) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(P)))
#define SIGNED_BYTES(P) _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(P))))
#define BYTES_AS_INTS(P) _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(P)))
#define SAME_BITS(X) _mm512_castsi512_ps(X)
#define TIMES_INTS _mm512_mullo_epi32
#define LARGER_INTS _mm512_max_epi32
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
#define SUB_INTS _mm256_sub_epi32
#define LEFT_INTS(X, N) _mm256_slli_epi32(X, N)
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
#define HALVES(P) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(P)))
#define SIGNED_BYTES(P) _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(P))))
#define BYTES_AS_INTS(P) _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(P)))
#define SAME_BITS(X) _mm256_castsi256_ps(X)
#define TIMES_INTS _mm256_mullo_epi32
#define LARGER_INTS _mm256_max_epi32
#endif
#define AHEAD 4096           /* bytes: the processor does not look ahead beyond a page by itself (log/104) */
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

/* The scales of a block, register v; `which` 1: of its second half, or its least values. */
ALWAYS Floats scales_of(const Kind kind, const uint8_t *header, const uint8_t *block, const int which, const int v) {
    const int o = v * OUTPUTS;
    if (kind.wide) return LOAD_FLOATS((const float *)block + which * PANEL + o);
    if (kind.floats) { /* half of two to the power of e - 127, and 0 stands for 2^-127 */
        Ints power = LEFT_INTS(BYTES_AS_INTS(block + o), 23);
        return TIMES(SAME_BITS(LARGER_INTS(power, EVERY_INT(0x400000))), EVERY_FLOAT(0.5f));
    }
    if (kind.blocks == 1) return HALVES(block + 2 * (which * PANEL + o));
    if (kind.halves) return TIMES(HALVES(header + 2 * o), SIGNED_BYTES(block + which * PANEL + o));
    Floats d = HALVES(header + 2 * (which * PANEL + o)), number = AS_FLOATS(BYTES_AS_INTS(block + which * PANEL + o));
    return TIMES(which ? TIMES(d, EVERY_FLOAT(-1)) : d, number);
}

ALWAYS void unpack(const Kind kind, const uint8_t *header, const uint8_t *block, int8_t *q, float *scales) {
    const uint8_t *high = block + scale_bytes(kind), *low = high + high_bytes(kind);
    for (int which = 0; which <= (kind.least || kind.halves); which++) UNROLL for (int v = 0; v < WIDTH; v++)
        STORE_FLOATS(scales + which * PANEL + v * OUTPUTS, scales_of(kind, header, block, which, v));
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
        size_t at = (size_t)m * x->blocks + (size_t)b * rows;
        UNROLL for (int c = 0; c < block_bytes(kind); c += 64) __builtin_prefetch(block + AHEAD + c);
        UNROLL for (int h = 0; h <= kind.halves; h++) {
            Ints sum[TILE][WIDTH];
            UNROLL for (int r = 0; r < rows; r++) {
                const int32_t *minus = x->minus + 2 * (at + r);
                Ints start = EVERY_INT(!kind.halves || h ? minus[0] : minus[1]);
                if (kind.halves && h) start = SUB_INTS(start, EVERY_INT(minus[1]));
                const int times = excess(kind), power = !(times & (times - 1));
                if (power && times) start = LEFT_INTS(start, __builtin_ctz(times));
                else start = times ? TIMES_INTS(start, EVERY_INT(times)) : EVERY_INT(0);
                UNROLL for (int v = 0; v < WIDTH; v++) sum[r][v] = start;
            }
            UNROLL for (int g = h * each; g < h * each + each; g++) UNROLL for (int v = 0; v < WIDTH; v++) {
                Ints q = group(kind, high, low, g, v);
                UNROLL for (int r = 0; r < rows; r++) {
                    int32_t four;
                    memcpy(&four, x->q + (at + r) * BLOCK + 4 * g, 4);
                    sum[r][v] = dot(kind, sum[r][v], q, EVERY_INT(four));
                }
            }
            UNROLL for (int v = 0; v < WIDTH; v++) {
                Floats scale = scales_of(kind, header, block, h, v), least = scale;
                if (kind.least) least = scales_of(kind, header, block, 1, v);
                UNROLL for (int r = 0; r < rows; r++) {
                    total[r][v] = FMA(TIMES(AS_FLOATS(sum[r][v]), scale), EVERY_FLOAT(x->scale[at + r]), total[r][v]);
                    if (kind.least) total[r][v] = FMA(least, EVERY_FLOAT(x->sum[at + r]), total[r][v]);
                }
            }
        }
    }
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < WIDTH; v++)
        STORE_FLOATS(y[r] + v * OUTPUTS, total[r][v]);
}
