/* The kernels for AVX2 with fused multiply-add and half floats: x86 processors since 2013. */

#include "native.h"

#if defined(__x86_64__)

#include <cpuid.h>
#include <immintrin.h>
#include <math.h>
#include <string.h>

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

#define INLINE static inline __attribute__((always_inline))
#define NAME "avx2"
#include "lanes_avx2.h"
#include "kernels.h"

#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

const kernel_set *
ostinato_avx2(void)
{
    unsigned eax, ebx, ecx = 0, edx;
    __builtin_cpu_init();
    /* "f16c" is no name to older compilers' __builtin_cpu_supports. */
    int halves = __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
    return halves && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? &kernels
                                                                                     : NULL;
}

#else

const kernel_set *
ostinato_avx2(void)
{
    return NULL;
}

#endif
