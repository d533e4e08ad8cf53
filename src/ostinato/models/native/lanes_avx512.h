/* Sixteen float32 lanes in one register. */

#include "bytes_x86.h"

#define TILE 4 /* rows of each side whose products are kept in registers */
#define MIX_VECTORS 4

typedef __m512 lanes;
typedef __m512 codebook; /* the sixteen values of a four-bit code */

INLINE lanes lanes_load(const float *from) { return _mm512_loadu_ps(from); }
INLINE void lanes_store(float *to, lanes a) { _mm512_storeu_ps(to, a); }
INLINE lanes lanes_load_part(const float *from, uint32_t count)
{
    return _mm512_maskz_loadu_ps((__mmask16)((1u << count) - 1), from);
}
INLINE void lanes_store_part(float *to, uint32_t count, lanes a)
{
    _mm512_mask_storeu_ps(to, (__mmask16)((1u << count) - 1), a);
}
INLINE lanes lanes_set(float a) { return _mm512_set1_ps(a); }
INLINE lanes lanes_fma(lanes a, lanes b, lanes c) { return _mm512_fmadd_ps(a, b, c); }
INLINE lanes lanes_mul(lanes a, lanes b) { return _mm512_mul_ps(a, b); }
INLINE lanes lanes_div(lanes a, lanes b) { return _mm512_div_ps(a, b); }
INLINE lanes lanes_add(lanes a, lanes b) { return _mm512_add_ps(a, b); }
INLINE lanes lanes_sub(lanes a, lanes b) { return _mm512_sub_ps(a, b); }
/* Lanes where either operand is NaN receive the second operand. */
INLINE lanes lanes_max(lanes a, lanes b) { return _mm512_max_ps(a, b); }
INLINE lanes lanes_min(lanes a, lanes b) { return _mm512_min_ps(a, b); }
INLINE lanes lanes_round(lanes a)
{
    return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
/* 2 to the power of a, for integers between -126 and 127. */
INLINE lanes lanes_power_of_two(lanes a)
{
    __m512i exponent = _mm512_add_epi32(_mm512_cvtps_epi32(a), _mm512_set1_epi32(127));
    return _mm512_castsi512_ps(_mm512_slli_epi32(exponent, 23));
}
INLINE float lanes_sum(lanes a)
{
    return sum_8(_mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1)));
}

INLINE lanes f16_lanes(const uint8_t *from)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
}
INLINE lanes bf16_lanes(const uint8_t *from)
{
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
/* Convert the first or the second sixteen signed bytes to float. */
INLINE lanes bytes_first(bytes32 a)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(a)));
}
INLINE lanes bytes_second(bytes32 a)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(a, 1)));
}

INLINE lanes sixteen_codes(void)
{
    return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}
INLINE codebook codes_affine(lanes scale, lanes offset)
{
    return _mm512_add_ps(_mm512_mul_ps(sixteen_codes(), scale), offset);
}
INLINE codebook codes_centred(lanes scale, float centre)
{
    return _mm512_mul_ps(_mm512_sub_ps(sixteen_codes(), _mm512_set1_ps(centre)), scale);
}
/* The permutation uses only the low four bits of each index. */
INLINE void codes_of_16_bytes(codebook book, const uint8_t *from, lanes *low, lanes *high)
{
    __m512i codes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from));
    *low = _mm512_permutexvar_ps(codes, book);
    *high = _mm512_permutexvar_ps(_mm512_srli_epi32(codes, 4), book);
}
INLINE void codes_of_32_bytes(codebook book, const uint8_t *from, int high, lanes *a, lanes *b)
{
    __m512i first = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from));
    __m512i second = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(from + 16)));
    if (high) {
        first = _mm512_srli_epi32(first, 4);
        second = _mm512_srli_epi32(second, 4);
    }
    *a = _mm512_permutexvar_ps(first, book);
    *b = _mm512_permutexvar_ps(second, book);
}
