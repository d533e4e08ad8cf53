/* Thirty-two bytes in a register, and the conversion of a half float, for x86 processors. */

#include <immintrin.h>

typedef __m256i bytes32;

INLINE float scalar_f16(const uint8_t *from)
{
    uint16_t bits;
    memcpy(&bits, from, 2);
    return _cvtsh_ss(bits);
}

INLINE bytes32 bytes_load(const uint8_t *from)
{
    return _mm256_loadu_si256((const __m256i *)from);
}
INLINE bytes32 bytes_bits(bytes32 x, int shift, uint8_t mask)
{
    __m256i moved = _mm256_srl_epi16(x, _mm_cvtsi32_si128(shift));
    return _mm256_and_si256(moved, _mm256_set1_epi8((char)mask));
}
/* Shifts the low bits of each byte up by `shift`, 1 or 4; no set bit may leave its byte. */
INLINE bytes32 bytes_up(bytes32 x, int shift) { return _mm256_slli_epi16(x, shift); }
INLINE bytes32 bytes_or(bytes32 x, bytes32 y) { return _mm256_or_si256(x, y); }
INLINE bytes32 bytes_sub(bytes32 x, uint8_t y)
{
    return _mm256_sub_epi8(x, _mm256_set1_epi8((char)y));
}
