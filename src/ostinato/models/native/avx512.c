/* The kernels for AVX-512 F, BW, DQ and VL, which all server processors with AVX-512 have. */

#include "native.h"

#if defined(__x86_64__)

#include <math.h>
#include <string.h>
#include <immintrin.h>

#include "x86.h"

#ifdef __clang__
#pragma clang attribute push(__attribute__((target(                                                \
    "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#endif

#define NAME "avx512"
#include "lanes_avx512.h"
#include "kernels.h"

#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

const kernel_set *
ostinato_avx512(void)
{
    return x86_has(1) ? &kernels : NULL;
}

#endif
