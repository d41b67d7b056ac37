/* Which instructions the processor has and the system allows. */
#ifndef OUTRIDER_CPU_FEATURES_H
#define OUTRIDER_CPU_FEATURES_H

#include <stdint.h>

#if defined(__x86_64__)
#include <cpuid.h>

/* Written out: not every compiler's library has what __builtin_cpu_supports needs. */
static inline int has_features(unsigned in_ebx, unsigned in_ecx, unsigned registers) {
    unsigned a, b, c, d, low, high, first = 1u << 12 | 1u << 27 | 1u << 29; /* FMA, OSXSAVE, F16C */
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & first) != first) return 0;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low & registers) != registers || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
    return (b & in_ebx) == in_ebx && (c & in_ecx) == in_ecx;
}

static inline int has_avx2(void) { return has_features(1u << 5, 0, 6); }

static inline int has_avx512_vnni(void) { return has_features(1u << 5 | 1u << 16 | 1u << 30, 1u << 11, 0xe6); }

#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>

static inline int has_sdot(void) { return getauxval(AT_HWCAP) >> 20 & 1; }
static inline int has_i8mm(void) { return has_sdot() && getauxval(AT_HWCAP2) >> 13 & 1; }

#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>

static inline int has_feature(const char *name) {
    int32_t found = 0;
    size_t size = sizeof found;
    return !sysctlbyname(name, &found, &size, 0, 0) && found;
}

static inline int has_sdot(void) { return has_feature("hw.optional.arm.FEAT_DotProd"); }
static inline int has_i8mm(void) { return has_sdot() && has_feature("hw.optional.arm.FEAT_I8MM"); }

#elif defined(__aarch64__)
static inline int has_sdot(void) { return 0; }
static inline int has_i8mm(void) { return 0; }
#endif

#endif
