/* Sixteen float32 lanes in two registers. */

#include "bytes_x86.h"

#define TILE 2
#define MIX_VECTORS 2

typedef struct {
    __m256 a, b;
} lanes;

#define EACH(expression_a, expression_b) ((lanes){(expression_a), (expression_b)})

INLINE lanes lanes_load(const float *from)
{
    return EACH(_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8));
}
INLINE void lanes_store(float *to, lanes x)
{
    _mm256_storeu_ps(to, x.a);
    _mm256_storeu_ps(to + 8, x.b);
}
INLINE lanes lanes_set(float x) { return EACH(_mm256_set1_ps(x), _mm256_set1_ps(x)); }
INLINE lanes lanes_fma(lanes x, lanes y, lanes z)
{
    return EACH(_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b));
}
INLINE lanes lanes_mul(lanes x, lanes y)
{
    return EACH(_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b));
}
INLINE lanes lanes_div(lanes x, lanes y)
{
    return EACH(_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b));
}
INLINE lanes lanes_add(lanes x, lanes y)
{
    return EACH(_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b));
}
INLINE lanes lanes_sub(lanes x, lanes y)
{
    return EACH(_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b));
}
/* Lanes where either operand is NaN receive the second operand. */
INLINE lanes lanes_max(lanes x, lanes y)
{
    return EACH(_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b));
}
INLINE lanes lanes_min(lanes x, lanes y)
{
    return EACH(_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b));
}
INLINE __m256 round_8(__m256 x)
{
    return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
INLINE lanes lanes_round(lanes x) { return EACH(round_8(x.a), round_8(x.b)); }
INLINE __m256 power_of_two_8(__m256 x)
{
    __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(x), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
}
/* 2 to the power of x, for integers between -126 and 127. */
INLINE lanes lanes_power_of_two(lanes x)
{
    return EACH(power_of_two_8(x.a), power_of_two_8(x.b));
}
INLINE float lanes_sum(lanes x)
{
    return sum_8(_mm256_add_ps(x.a, x.b));
}

INLINE lanes f16_lanes(const uint8_t *from)
{
    return EACH(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from)),
                _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + 16))));
}
INLINE __m256 bf16_8(const uint8_t *from)
{
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
INLINE lanes bf16_lanes(const uint8_t *from) { return EACH(bf16_8(from), bf16_8(from + 16)); }
INLINE lanes floats_16(__m128i x)
{
    return EACH(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x)),
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(x, x))));
}
/* Convert the first or the second sixteen signed bytes to float. */
INLINE lanes bytes_first(bytes32 x) { return floats_16(_mm256_castsi256_si128(x)); }
INLINE lanes bytes_second(bytes32 x) { return floats_16(_mm256_extracti128_si256(x, 1)); }

#include "codes.h"
