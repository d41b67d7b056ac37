/* Tiles and unpacking in plain C, for processors without dot products of bytes. */
#define NAME "portable"
#define VARIANT blocks_portable
#include "blocks_layout.h"

ALWAYS void unpack(Kind kind, const uint8_t *header, const uint8_t *block, int8_t *q, float *scales) {
    for (int o = 0; o < PANEL; o++) {
        Scales s = scales_at(kind, header, block, o);
        scales[o] = s.half[0], scales[PANEL + o] = kind.halves ? s.half[1] : s.least;
    }
    for (int k = 0; k < BLOCK; k++)
        for (int o = 0; o < PANEL; o++) q[k / 4 * 64 + o * 4 + k % 4] = (int8_t)number_at(kind, block, o, k);
}

ALWAYS void tile(const int number, const int rows, const void *w, const Rounded *x, int m, float y[][PANEL]) {
    const Kind kind = KIND[number];
    memset(y, 0, rows * sizeof y[0]);
    for (int b = 0; b < x->blocks; b++) {
        const uint8_t *header = super_block(kind, w, b / kind.blocks);
        int8_t q[BLOCK * PANEL];
        float scales[2 * PANEL];
        unpack(kind, header, block_in(kind, header, b % kind.blocks), q, scales);
        for (int r = 0; r < rows; r++) {
            size_t at = (size_t)m * x->blocks + (size_t)b * rows + r;
            for (int h = 0; h < 2; h++) {
                int32_t sum[PANEL] = {0};
                for (int k = kind.halves ? h * 16 : 0; k < (kind.halves ? h * 16 + 16 : BLOCK); k++)
                    for (int o = 0; o < PANEL; o++)
                        sum[o] += q[k / 4 * 64 + o * 4 + k % 4] * x->q[at * BLOCK + k];
                for (int o = 0; o < PANEL; o++)
                    y[r][o] = fmaf((float)sum[o] * scales[kind.halves * h * PANEL + o], x->scale[at], y[r][o]);
                if (!kind.halves) break;
            }
            if (kind.least)
                for (int o = 0; o < PANEL; o++) y[r][o] = fmaf(scales[PANEL + o], x->sum[at], y[r][o]);
        }
    }
}

#include "blocks_variant.h"
