/* The kernels for x86 with AVX-512 VNNI. */
#if defined(__x86_64__)
#define NAME "avx512-vnni"
#define VARIANT blocks_vnni
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vnni,avx2,fma,f16c")))
#define VNNI 1
#define ROWS 8
#include "blocks_layout.h"

#include "blocks_avx.h"
#include "blocks_variant.h"
#endif
