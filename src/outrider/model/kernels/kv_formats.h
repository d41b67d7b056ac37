/* Part of cpu.c: number formats of the KV cache. Twin: cache/formats.py.
 *
 * Attention computes in float32 whatever the format: what is kept in fewer bits is widened block by block, so its bits are
 * those of a float32 cache that holds the rounded numbers. */

enum { KEPT_WHOLE, KEPT_HALF, KEPT_INT8 }; /* float32, bfloat16, and int8 followed by the head's scale */

/* Bytes of a head's keys or values in one slot. */
static inline size_t kept_bytes(int kept, int n) {
    return kept == KEPT_INT8 ? n + sizeof(float) : kept == KEPT_HALF ? 2 * (size_t)n : 4 * (size_t)n;
}

/* Bits of the nearest bfloat16, of two equally near the even one. */
static inline uint16_t half_of(float x) {
    uint32_t word = ((Bits){.number = x}).word;
    if ((word & 0x7fffffff) > 0x7f800000) return (uint16_t)(word >> 16) | 0x40;
    return (uint16_t)((word + 0x7fff + (word >> 16 & 1)) >> 16);
}

/* Puts a head's n numbers into the cache. */
static void keep_head(int kept, const float *x, int n, void *to) {
    if (kept == KEPT_WHOLE) {
        memcpy(to, x, n * sizeof(float));
    } else if (kept == KEPT_HALF) {
        for (int i = 0; i < n; i++) ((uint16_t *)to)[i] = half_of(x[i]);
    } else {
        float top = 0;
        for (int i = 0; i < n; i++) top = fabsf(x[i]) > top ? fabsf(x[i]) : top;
        if (top < 1e-30f) top = 0; /* 127 / top would overflow */
        float scale = top / 127.0f, inverse = 127.0f / (top > 0 ? top : 1);
        for (int i = 0; i < n; i++) ((int8_t *)to)[i] = (int8_t)(int32_t)rintf(x[i] * inverse);
        memcpy((int8_t *)to + n, &scale, sizeof scale);
    }
}

/* A head's n numbers as float32. */
static inline void widen_head(int kept, const char *from, int n, float *restrict to) {
    if (kept == KEPT_HALF) {
        const uint16_t *halves = (const uint16_t *)from;
        for (int i = 0; i < n; i++) to[i] = ((Bits){.word = (uint32_t)halves[i] << 16}).number;
    } else {
        const int8_t *bytes = (const int8_t *)from;
        float scale;
        memcpy(&scale, from + n, sizeof scale);
        for (int i = 0; i < n; i++) to[i] = bytes[i] * scale;
    }
}
