/* The kernels for x86 with AVX2. */
#if defined(__x86_64__)
#define NAME "avx2"
#define VARIANT blocks_avx2
#define TARGET __attribute__((target("avx2,fma,f16c")))
#define VNNI 0
#include "blocks_layout.h"

#include "blocks_avx.h"
#include "blocks_variant.h"
#endif
