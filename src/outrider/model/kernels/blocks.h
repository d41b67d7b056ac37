/* Products with weights in blocks of few bits, as GGUF stores them. blocks.c says what a product is. */
#ifndef OUTRIDER_BLOCKS_H
#define OUTRIDER_BLOCKS_H

#include <stddef.h>
#include <stdint.h>

#define PANEL 16 /* outputs of a panel */
#define BLOCK 32 /* inputs that share a scale of the activations */
#define TILE 8   /* most rows that a panel meets at a time, in any variant */

/* native.py has the same numbers. The wide kinds are panels unpacked for many rows. */
enum { WHOLE, HALF, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K, MXFP4, WIDE, WIDE_LEAST, WIDE_16, KINDS };

/* Rows of activations rounded to 8 bits: x = scale * q, by blocks of 32. They lie by tiles, [blocks][rows of the tile], so
 * that a kernel finds all rows of a block at fixed distances from one address. */
typedef struct {
    int blocks;
    int8_t *q;      /* 32 each */
    float *scale;
    float *sum;     /* scale times the sum of q */
    int32_t *minus; /* 2 each: less the sum of q, and of its first half */
} Rounded;

/* Memory for `rows` rounded rows of K inputs, in one piece that starts at q; all null if there is none. */
Rounded rounded_for(int rows, int K);
/* Rounds row `row` of a tile of `rows` that begins with row m. */
void blocks_round(const float *x, int K, const Rounded *to, int m, int rows, int row);

size_t blocks_panel_bytes(int kind, int K);
/* Panel `w` unpacked to `room`, which has blocks_panel_bytes(WIDE_LEAST, K) bytes; returns the wide kind. */
int blocks_widen(int kind, const void *w, int K, void *room);
/* Most rows that a panel meets at a time here, and whether more rows want it unpacked first. */
int blocks_rows(void);
int blocks_widens(void);
/* A tile of 1 to so many rows from row m on, times a panel. */
void blocks_multiply(int kind, int rows, const void *w, const Rounded *x, int m, float y[][PANEL]);
/* Output `o` of a panel as K floats. */
void blocks_row(int kind, const void *w, int o, int K, float *y);

/* The kernels for one kind of processor. All give the same bits. */
typedef struct {
    const char *name;
    int rows, widens;
    void (*round)(const float *, int, const Rounded *, int, int, int);
    void (*widen[KINDS])(const void *, int, uint8_t *);
    void (*tiles[KINDS][TILE])(const void *, const Rounded *, int, float[][PANEL]);
} Variant;

extern const Variant blocks_portable, blocks_avx2, blocks_vnni, blocks_sdot, blocks_i8mm;

#endif
