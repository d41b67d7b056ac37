/* The end of a variant of the kernels: what follows from its `tile` and `unpack`, and the table VARIANT of it all.
 * Before it, a variant names itself: NAME, and VARIANT. With ROWS 8 a panel meets eight rows at a time, which pay
 * for unpacking it again (64 rows of Q4_K: 1.8 to 2.3 ms, unpacked once 2.2 to 2.7); else four.
 */
#define TINIEST 1e-30f /* blocks whose values are all smaller are zero: 127 / max must stay finite */

/* Every step is a loop of its own over the whole block: compilers turn these into vectors. */
static TARGET void round_row(const float *x, int K, const Rounded *to, int m, int rows, int row) {
    for (int b = 0; b < to->blocks; b++) {
        float block[BLOCK] = {0}, most = 0;
        int32_t wide[BLOCK];
        int8_t q[BLOCK];
        size_t at = (size_t)m * to->blocks + (size_t)b * rows + row;
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
        to->minus[2 * at] = -first - second, to->minus[2 * at + 1] = -first;
    }
}

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

#define DEFINE_WIDEN(N) \
    static TARGET void widen_##N(const void *w, int K, uint8_t *room) { widen_panel(N, w, K, room); }
EACH_KIND(DEFINE_WIDEN)

#define DEFINE_TILE(N, R) \
    static TARGET void tile_##N##_##R(const void *w, const Rounded *x, int m, float y[][PANEL]) { tile(N, R, w, x, m, y); }
#define DEFINE_FOUR(N) DEFINE_TILE(N, 1) DEFINE_TILE(N, 2) DEFINE_TILE(N, 3) DEFINE_TILE(N, 4)
#if ROWS == 8
#define DEFINE_TILES(N) DEFINE_FOUR(N) DEFINE_TILE(N, 5) DEFINE_TILE(N, 6) DEFINE_TILE(N, 7) DEFINE_TILE(N, 8)
#define FURTHER(N) , tile_##N##_5, tile_##N##_6, tile_##N##_7, tile_##N##_8
#else
#define ROWS 4
#define DEFINE_TILES DEFINE_FOUR
#define FURTHER(N)
#endif
EACH_KIND(DEFINE_TILES)
EACH_WIDE(DEFINE_TILES)

#define WIDEN_ROW(N) [N] = widen_##N,
#define TILES_ROW(N) [N] = {tile_##N##_1, tile_##N##_2, tile_##N##_3, tile_##N##_4 FURTHER(N)},
const Variant VARIANT = {NAME, ROWS, ROWS < 8, round_row, {EACH_KIND(WIDEN_ROW)}, {EACH_KIND(TILES_ROW) EACH_WIDE(TILES_ROW)}};
