/* Thirty-two bytes in a register, the conversion of a half float, and the sum of eight floats, for x86
 * processors. */

#include <immintrin.h>

typedef __m256i bytes32;

INLINE float scalar_f16(const uint8_t *from)
{
    uint16_t bits;
    memcpy(&bits, from, 2);
    return _cvtsh_ss(bits);
}

INLINE float sum_8(__m256 eight)
{
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_shuffle_ps(four, four, 1)));
}

INLINE bytes32 bytes_load(const uint8_t *from)
{
    return _mm256_loadu_si256((const __m256i *)from);
}
INLINE bytes32 bytes_of_nibbles(const uint8_t *from)
{
    __m128i both = _mm_loadu_si128((const __m128i *)from), mask = _mm_set1_epi8(15);
    return _mm256_set_m128i(_mm_and_si128(_mm_srli_epi16(both, 4), mask),
                            _mm_and_si128(both, mask));
}
INLINE bytes32 bytes_bits(bytes32 x, int shift, uint8_t mask)
{
    __m256i moved = _mm256_srl_epi16(x, _mm_cvtsi32_si128(shift));
    return _mm256_and_si256(moved, _mm256_set1_epi8((char)mask));
}
/* Shifts the low bits of each byte up by `shift`, 1 or 4; no set bit may leave its byte. */
INLINE bytes32 bytes_up(bytes32 x, int shift) { return _mm256_slli_epi16(x, shift); }
INLINE bytes32 bytes_or(bytes32 x, bytes32 y) { return _mm256_or_si256(x, y); }
/* `value` in the bytes whose bit of the word is set, 0 in the others. */
INLINE bytes32 bytes_of_bits(const uint8_t *from, uint8_t value)
{
    int word;
    memcpy(&word, from, 4);
    __m256i places = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202,
                                        0x0303030303030303);
    __m256i bits = _mm256_shuffle_epi8(_mm256_set1_epi32(word), places);
    __m256i own = _mm256_set1_epi64x((long long)0x8040201008040201);
    __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(bits, own), own);
    return _mm256_and_si256(set, _mm256_set1_epi8((char)value));
}
/* The table's bytes at these places, 0 to 15. */
INLINE bytes32 bytes_look_up(const int8_t *table, bytes32 places)
{
    __m128i sixteen = _mm_loadu_si128((const __m128i *)table);
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(sixteen), places);
}
INLINE bytes32 bytes_sub(bytes32 x, uint8_t y)
{
    return _mm256_sub_epi8(x, _mm256_set1_epi8((char)y));
}
