/* Compares every variant of the block kernels that this processor runs with the portable one, bit by bit: all formats, tiles
 * of all sizes, panels as they are packed and widened. Prints the names of those compared; fails at the first difference.
 * With AVX512_IN_C, the AVX-512 VNNI kernels are compared, made of the instructions as tests/model/avx512 writes them.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "blocks.h"

#if AVX512_IN_C
#define NAME "avx512-vnni in C"
#define VARIANT in_c
#define VNNI 1
#include "blocks_layout.h"

#include "blocks_avx.h"
#include "blocks_variant.h"
#endif

#define INPUTS 512
#define OUTPUTS_PACKED 21 /* the second panel is not full */

const char *outrider_variant(int i);
void outrider_choose(int i);
int outrider_pack_blocks(int kind, const uint8_t *from, int N, int K, int threads, uint8_t *packed);

/* Bytes of a stored block, of how many weights, and where its halves lie. */
static const struct {
    int bytes, weights, halves[2];
} STORED_AS[KINDS] = {
    [Q8_0] = {34, 32, {0, 0}},   [Q4_0] = {18, 32, {0, 0}},    [Q4_1] = {20, 32, {0, 2}},    [Q5_0] = {22, 32, {0, 0}},
    [Q5_1] = {24, 32, {0, 2}},   [Q4_K] = {144, 256, {0, 2}},  [Q5_K] = {176, 256, {0, 2}},  [Q6_K] = {210, 256, {208, 208}},
    [MXFP4] = {17, 32, {-1, -1}},
};

static uint32_t state = 12345;
static uint32_t next(void) { return (state = state * 1664525u + 1013904223u) >> 8; }

/* Packed weights of random bits with finite scales: 0x2400 to 0x27ff are about 2^-6, of either sign. */
static void *packed_weights(int kind) {
    int bytes = STORED_AS[kind].bytes, blocks = OUTPUTS_PACKED * INPUTS / STORED_AS[kind].weights;
    uint8_t *raw = malloc((size_t)blocks * bytes), *packed = malloc(2 * blocks_panel_bytes(kind, INPUTS));
    for (int i = 0; i < blocks * bytes; i++) raw[i] = (uint8_t)next();
    for (int b = 0; b < blocks; b++)
        for (int i = 0; i < 2; i++) {
            if (kind == MXFP4) raw[b * bytes] = (uint8_t)(b % 7 ? 110 + next() % 30 : b / 7 % 251);
            if (kind == MXFP4) continue;
            uint8_t *high = raw + b * bytes + STORED_AS[kind].halves[i] + 1;
            *high = (*high & 0x83) | 0x24;
        }
    if (outrider_pack_blocks(kind, raw, OUTPUTS_PACKED, INPUTS, 1, packed)) exit(3);
    free(raw);
    return packed;
}

/* Rows alone, as the portable kernels round them, and tiles of so many of them from row FIRST on. */
#define FIRST 1
typedef struct {
    Rounded alone[TILE], tile[TILE + 1];
} Given;

static int differs(const Variant *v, int kind, const void *panel, const Given *given, const char *how) {
    for (int rows = 1; rows <= v->rows; rows++) {
        float ours[TILE][PANEL], theirs[1][PANEL];
        v->tiles[kind][rows - 1](panel, given->tile + rows, FIRST, ours);
        for (int r = 0; r < rows; r++) {
            blocks_portable.tiles[kind][0](panel, given->alone + r, 0, theirs);
            if (!memcmp(ours[r], theirs, sizeof theirs)) continue;
            printf("%s: kind %d, %d rows, %s: the bits differ\n", v->name, kind, rows, how);
            return 1;
        }
    }
    return 0;
}

static int rounds_otherwise(const Rounded *a, size_t i, const Rounded *b, size_t j) {
    return memcmp(a->q + i * BLOCK, b->q + j * BLOCK, BLOCK) || a->scale[i] != b->scale[j] || a->sum[i] != b->sum[j] ||
           memcmp(a->minus + 2 * i, b->minus + 2 * j, 8);
}

static int round_all(const Variant *v, Given *given) {
    static float x[TILE][INPUTS];
    for (int r = 0; r < TILE; r++) {
        for (int k = 0; k < INPUTS; k++) x[r][k] = ((int)(next() & 0xffff) - 0x8000) / 4096.0f * (r == 1 ? 1e4f : 1);
        if (r == 2) memset(x[r], 0, 100 * sizeof(float)); /* blocks without a scale */
        given->alone[r] = rounded_for(1, INPUTS);
        blocks_portable.round(x[r], INPUTS, given->alone + r, 0, 1, 0);
    }
    for (int rows = 1; rows <= v->rows; rows++) {
        Rounded *tile = given->tile + rows;
        *tile = rounded_for(FIRST + rows, INPUTS);
        for (int r = 0; r < rows; r++) {
            v->round(x[r], INPUTS, tile, FIRST, rows, r);
            for (int b = 0; b < tile->blocks; b++)
                if (rounds_otherwise(given->alone + r, b, tile, (size_t)FIRST * tile->blocks + b * rows + r))
                    return printf("%s: rounding\n", v->name);
        }
    }
    return 0;
}

static int compare(const Variant *v) {
    Given given;
    if (round_all(v, &given)) return 1;
    for (int kind = Q8_0; kind <= MXFP4; kind++) {
        uint8_t *packed = packed_weights(kind);
        size_t panel = blocks_panel_bytes(kind, INPUTS), wide = blocks_panel_bytes(WIDE_LEAST, INPUTS);
        uint8_t *rooms[2] = {calloc(1, wide), calloc(1, wide)};
        for (int n = 0; n < 2; n++) {
            if (differs(v, kind, packed + n * panel, &given, "as packed")) return 1;
            int wider = blocks_widen(kind, packed + n * panel, INPUTS, rooms[0]);
            v->widen[kind](packed + n * panel, INPUTS, rooms[0]);
            blocks_portable.widen[kind](packed + n * panel, INPUTS, rooms[1]);
            if (memcmp(rooms[0], rooms[1], wide)) return printf("%s: kind %d widened\n", v->name, kind);
            if (differs(v, wider, rooms[0], &given, "widened")) return 1;
        }
        free(packed), free(rooms[0]), free(rooms[1]);
    }
    for (int r = 0; r < TILE; r++) free(given.alone[r].q);
    for (int rows = 1; rows <= v->rows; rows++) free(given.tile[rows].q);
    printf("%s\n", v->name);
    return 0;
}

int main(void) {
#if AVX512_IN_C
    return compare(&in_c) != 0;
#else
    static const Variant *const all[] = {
#if defined(__x86_64__)
        &blocks_vnni, &blocks_avx2,
#elif defined(__aarch64__)
        &blocks_i8mm, &blocks_sdot,
#endif
        &blocks_portable,
    };
    for (int i = 0; i < (int)(sizeof all / sizeof *all); i++)
        if (outrider_variant(i) && compare(all[i])) return 1;
    return 0;
#endif
}
