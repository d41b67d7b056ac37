/* The AVX-512 instructions that blocks_avx.h uses, each as its definition says, in plain C: no emulator at hand runs them.
 * The test includes this file instead of the compiler's.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

typedef struct {
    uint8_t at[64];
} __m512i;
typedef struct {
    uint8_t at[16];
} __m128i;
typedef struct {
    float at[16];
} __m512;

#define OF_BYTES(EXPRESSION)                                      \
    __m512i made;                                                 \
    for (int i = 0; i < 64; i++) made.at[i] = (uint8_t)(EXPRESSION); \
    return made;
#define OF_FLOATS(EXPRESSION)                            \
    __m512 made;                                         \
    for (int i = 0; i < 16; i++) made.at[i] = EXPRESSION; \
    return made;

static inline __m512i _mm512_loadu_si512(const void *p) {
    __m512i made;
    memcpy(&made, p, 64);
    return made;
}
static inline void _mm512_storeu_si512(void *p, __m512i x) { memcpy(p, &x, 64); }
static inline __m512i _mm512_set1_epi8(char x) { OF_BYTES(x) }
static inline __m512i _mm512_set1_epi32(int32_t x) { OF_BYTES((uint32_t)x >> i % 4 * 8) }
static inline __m512i _mm512_and_si512(__m512i a, __m512i b) { OF_BYTES(a.at[i] & b.at[i]) }
static inline __m512i _mm512_or_si512(__m512i a, __m512i b) { OF_BYTES(a.at[i] | b.at[i]) }
static inline __m512i _mm512_xor_si512(__m512i a, __m512i b) { OF_BYTES(a.at[i] ^ b.at[i]) }
static inline __m512i _mm512_sub_epi8(__m512i a, __m512i b) { OF_BYTES(a.at[i] - b.at[i]) }

#define _mm_setr_epi8(...) ((__m128i){{__VA_ARGS__}})
static inline __m512i _mm512_broadcast_i32x4(__m128i x) { OF_BYTES(x.at[i % 16]) }
static inline __m512i _mm512_shuffle_epi8(__m512i x, __m512i at) {
    OF_BYTES(at.at[i] & 128 ? 0 : x.at[i / 16 * 16 + at.at[i] % 16])
}

static inline uint16_t sixteen(__m512i x, int i) { return (uint16_t)(x.at[i & ~1] | x.at[i | 1] << 8); }
static inline __m512i _mm512_slli_epi16(__m512i x, unsigned n) {
    OF_BYTES((uint16_t)(sixteen(x, i) << n) >> (i & 1) * 8)
}
static inline __m512i _mm512_srli_epi16(__m512i x, unsigned n) { OF_BYTES(sixteen(x, i) >> n >> (i & 1) * 8) }

static inline int32_t word_of(__m512i x, int i) {
    int32_t word;
    memcpy(&word, x.at + 4 * i, 4);
    return word;
}
static inline __m512i of_words(const int32_t words[16]) { return _mm512_loadu_si512(words); }
#define OF_WORDS(EXPRESSION)                                       \
    int32_t words[16];                                             \
    for (int i = 0; i < 16; i++) words[i] = (int32_t)(EXPRESSION); \
    return of_words(words);
static inline __m512i _mm512_sub_epi32(__m512i a, __m512i b) { OF_WORDS((uint32_t)word_of(a, i) - (uint32_t)word_of(b, i)) }
static inline __m512i _mm512_slli_epi32(__m512i a, unsigned n) { OF_WORDS((uint32_t)word_of(a, i) << n) }
static inline __m512i _mm512_mullo_epi32(__m512i a, __m512i b) { OF_WORDS((uint32_t)word_of(a, i) * (uint32_t)word_of(b, i)) }
static inline __m512i _mm512_max_epi32(__m512i a, __m512i b) { OF_WORDS(word_of(a, i) > word_of(b, i) ? word_of(a, i) : word_of(b, i)) }
static inline __m512 _mm512_castsi512_ps(__m512i x) {
    __m512 made;
    memcpy(&made, &x, 64);
    return made;
}

/* Unsigned bytes times signed ones, four products to a sum that wraps. */
static inline __m512i _mm512_dpbusd_epi32(__m512i sum, __m512i a, __m512i b) {
    for (int i = 0; i < 16; i++) {
        uint32_t total = (uint32_t)word_of(sum, i);
        for (int j = 4 * i; j < 4 * i + 4; j++) total += (uint32_t)((int32_t)a.at[j] * (int8_t)b.at[j]);
        memcpy(sum.at + 4 * i, &total, 4);
    }
    return sum;
}
static inline __m512 _mm512_cvtepi32_ps(__m512i x) { OF_FLOATS((float)word_of(x, i)) }
static inline __m512 _mm512_set1_ps(float x) { OF_FLOATS(x) }
static inline __m512 _mm512_loadu_ps(const float *p) { OF_FLOATS(p[i]) }
static inline void _mm512_storeu_ps(float *p, __m512 x) { memcpy(p, &x, 64); }
static inline __m512 _mm512_mul_ps(__m512 a, __m512 b) { OF_FLOATS(a.at[i] * b.at[i]) }
static inline __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) { OF_FLOATS(fmaf(a.at[i], b.at[i], c.at[i])) }

typedef struct {
    uint16_t at[16];
} __m256i;
static inline __m256i _mm256_loadu_si256(const __m256i *p) {
    __m256i made;
    memcpy(&made, p, 32);
    return made;
}
static inline __m128i _mm_loadu_si128(const __m128i *p) {
    __m128i made;
    memcpy(&made, p, 16);
    return made;
}
static inline __m512i _mm512_cvtepi8_epi32(__m128i x) { OF_WORDS((int8_t)x.at[i]) }
static inline __m512i _mm512_cvtepu8_epi32(__m128i x) { OF_WORDS(x.at[i]) }
static inline float half_as_float(uint16_t h) {
    int exponent = h >> 10 & 31, rest = h & 1023;
    float x = exponent ? ldexpf(1024 + rest, exponent - 25) : ldexpf(rest, -24);
    return h >> 15 ? -x : x;
}
static inline __m512 _mm512_cvtph_ps(__m256i x) { OF_FLOATS(half_as_float(x.at[i])) }
