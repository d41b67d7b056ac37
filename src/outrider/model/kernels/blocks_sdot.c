/* The kernels for ARM with dot products of bytes. */
#if defined(__aarch64__)
#define NAME "sdot"
#define VARIANT blocks_sdot
#if defined(__clang__)
#define TARGET __attribute__((target("+dotprod")))
#else /* gcc declares these instructions for this version of the architecture, and inlines into no lower one */
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif
#define I8MM 0
#include "blocks_layout.h"

#include "blocks_neon.h"
#include "blocks_variant.h"
#endif
