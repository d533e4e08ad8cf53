/* The kernels for AVX2 with FMA and F16C: x86 processors since 2013. */

#include "native.h"

#if defined(__x86_64__)

#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "x86.h"

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

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
    return x86_has(0) ? &kernels : NULL;
}

#endif
