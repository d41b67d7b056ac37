/* The kernels for ARM with products of matrices of bytes. */
#if defined(__aarch64__)
#define NAME "i8mm"
#define VARIANT blocks_i8mm
#if defined(__clang__)
#define TARGET __attribute__((target("+dotprod+i8mm")))
#else /* gcc declares these instructions for this version of the architecture, and inlines into no lower one */
#pragma GCC target("arch=armv8.2-a+dotprod+i8mm")
#endif
#define I8MM 1
#include "blocks_layout.h"

#include "blocks_neon.h"
#include "blocks_variant.h"
#endif
