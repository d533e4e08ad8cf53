/* Sixteen float32 lanes in plain C, for any processor.  Products and sums are rounded one by one:
 * a fused operation would be a call of the C library where the processor has none. */

#include <math.h>

#define TILE 2
#define MIX_VECTORS 1

typedef struct {
    float v[16];
} lanes;
typedef struct {
    uint8_t v[32];
} bytes32;

#define EACH(expression)                                                                           \
    lanes result;                                                                                  \
    for (int i = 0; i < 16; i++)                                                                   \
        result.v[i] = expression;                                                                  \
    return result
#define EACH_BYTE(expression)                                                                      \
    bytes32 result;                                                                                \
    for (int i = 0; i < 32; i++)                                                                   \
        result.v[i] = (uint8_t)(expression);                                                       \
    return result

INLINE lanes lanes_load(const float *from) { EACH(from[i]); }
INLINE void lanes_store(float *to, lanes x) { memcpy(to, x.v, sizeof x.v); }
INLINE lanes lanes_set(float x) { EACH(x); }
INLINE lanes lanes_fma(lanes x, lanes y, lanes z) { EACH(x.v[i] * y.v[i] + z.v[i]); }
INLINE lanes lanes_mul(lanes x, lanes y) { EACH(x.v[i] * y.v[i]); }
INLINE lanes lanes_div(lanes x, lanes y) { EACH(x.v[i] / y.v[i]); }
INLINE lanes lanes_add(lanes x, lanes y) { EACH(x.v[i] + y.v[i]); }
INLINE lanes lanes_sub(lanes x, lanes y) { EACH(x.v[i] - y.v[i]); }
/* The second operand where either is NaN. */
INLINE lanes lanes_max(lanes x, lanes y) { EACH(x.v[i] > y.v[i] ? x.v[i] : y.v[i]); }
INLINE lanes lanes_min(lanes x, lanes y) { EACH(x.v[i] < y.v[i] ? x.v[i] : y.v[i]); }
INLINE lanes lanes_round(lanes x) { EACH(rintf(x.v[i])); }
/* 2 to the power of whole numbers between -126 and 127. */
INLINE lanes lanes_power_of_two(lanes x)
{
    lanes result;
    for (int i = 0; i < 16; i++) {
        /* A NaN has no whole number; what it gives is multiplied with the NaN. */
        uint32_t bits = x.v[i] == x.v[i] ? (uint32_t)((int32_t)x.v[i] + 127) << 23 : 0;
        memcpy(&result.v[i], &bits, 4);
    }
    return result;
}
INLINE float lanes_sum(lanes x)
{
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; i++)
            x.v[i] += x.v[i + width];
    return x.v[0];
}

INLINE float scalar_f16(const uint8_t *from)
{
    uint16_t half;
    memcpy(&half, from, 2);
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, magnitude = half & 0x7FFF, bits;
    float value;
    if (magnitude < 0x0400) { /* below the normal numbers: whole multiples of 2^-24 */
        value = (float)magnitude * 0x1p-24f;
        memcpy(&bits, &value, 4);
    }
    else if (magnitude < 0x7C00)
        bits = (magnitude + ((127 - 15) << 10)) << 13;
    else
        bits = 0x7F800000 | (magnitude & 0x3FF) << 13;
    bits |= sign;
    memcpy(&value, &bits, 4);
    return value;
}
INLINE lanes f16_lanes(const uint8_t *from) { EACH(scalar_f16(from + 2 * i)); }
INLINE lanes bf16_lanes(const uint8_t *from)
{
    lanes result;
    for (int i = 0; i < 16; i++) {
        uint16_t half;
        memcpy(&half, from + 2 * i, 2);
        uint32_t bits = (uint32_t)half << 16;
        memcpy(&result.v[i], &bits, 4);
    }
    return result;
}

INLINE bytes32 bytes_load(const uint8_t *from) { EACH_BYTE(from[i]); }
INLINE bytes32 bytes_bits(bytes32 x, int shift, uint8_t mask) { EACH_BYTE(x.v[i] >> shift & mask); }
INLINE bytes32 bytes_up(bytes32 x, int shift) { EACH_BYTE(x.v[i] << shift); }
INLINE bytes32 bytes_or(bytes32 x, bytes32 y) { EACH_BYTE(x.v[i] | y.v[i]); }
INLINE bytes32 bytes_sub(bytes32 x, uint8_t y) { EACH_BYTE(x.v[i] - y); }
/* Signed bytes as numbers: the first sixteen, the others. */
INLINE lanes bytes_first(bytes32 x) { EACH((float)(int8_t)x.v[i]); }
INLINE lanes bytes_second(bytes32 x) { EACH((float)(int8_t)x.v[i + 16]); }
INLINE bytes32 bytes_of_nibbles(const uint8_t *from)
{
    EACH_BYTE(i < 16 ? from[i] & 15 : from[i - 16] >> 4);
}

#undef EACH
#undef EACH_BYTE
#include "codes.h"
