/* Sixteen float32 lanes in vectors of 16 bytes, which GCC and Clang provide for any processor.
 * Products and sums are rounded separately: a fused operation would be a call of the C library on
 * processors without one. */

#define TILE 2
#define MIX_VECTORS 1

typedef float floats __attribute__((vector_size(16)));
typedef int32_t ints __attribute__((vector_size(16)));
typedef uint32_t words __attribute__((vector_size(16)));
typedef uint8_t bytes __attribute__((vector_size(16)));
typedef struct {
    floats v[4];
} lanes;
typedef struct {
    bytes v[2];
} bytes32;

#define EACH(expression)                                                                           \
    lanes result;                                                                                  \
    for (int i = 0; i < 4; i++)                                                                    \
        result.v[i] = expression;                                                                  \
    return result

INLINE floats floats_load(const float *from)
{
    floats result;
    memcpy(&result, from, sizeof result);
    return result;
}
INLINE floats floats_set(float x) { return (floats){x, x, x, x}; }
INLINE floats floats_choose(ints which, floats x, floats y)
{
    return (floats)(((words)x & (words)which) | ((words)y & ~(words)which));
}
INLINE lanes lanes_load(const float *from) { EACH(floats_load(from + 4 * i)); }
INLINE void lanes_store(float *to, lanes x) { memcpy(to, x.v, sizeof x.v); }
INLINE lanes lanes_set(float x) { EACH(floats_set(x)); }
INLINE lanes lanes_fma(lanes x, lanes y, lanes z) { EACH(x.v[i] * y.v[i] + z.v[i]); }
INLINE lanes lanes_mul(lanes x, lanes y) { EACH(x.v[i] * y.v[i]); }
INLINE lanes lanes_div(lanes x, lanes y) { EACH(x.v[i] / y.v[i]); }
INLINE lanes lanes_add(lanes x, lanes y) { EACH(x.v[i] + y.v[i]); }
INLINE lanes lanes_sub(lanes x, lanes y) { EACH(x.v[i] - y.v[i]); }
/* Lanes where either operand is NaN receive the second operand. */
INLINE lanes lanes_max(lanes x, lanes y)
{
    EACH(floats_choose(x.v[i] > y.v[i], x.v[i], y.v[i]));
}
INLINE lanes lanes_min(lanes x, lanes y)
{
    EACH(floats_choose(x.v[i] < y.v[i], x.v[i], y.v[i]));
}
INLINE floats floats_round(floats x)
{
    words sign = (words)x & 0x80000000, magnitude = (words)x ^ sign;
    floats large = (floats)((words)floats_set(0x1p23f) | sign); /* larger floats are integers */
    return floats_choose(magnitude < 0x4B000000, (floats)((words)(x + large - large) | sign), x);
}
INLINE lanes lanes_round(lanes x) { EACH(floats_round(x.v[i])); }
INLINE floats floats_power_of_two(floats x)
{
    /* A NaN cannot be converted to int; its result is multiplied with the NaN later. */
    floats known = floats_choose(x == x, x, floats_set(0));
    return (floats)((__builtin_convertvector(known, ints) + 127) << 23);
}
/* 2 to the power of x, for integers between -126 and 127. */
INLINE lanes lanes_power_of_two(lanes x) { EACH(floats_power_of_two(x.v[i])); }
INLINE float lanes_sum(lanes x)
{
    floats four = (x.v[0] + x.v[2]) + (x.v[1] + x.v[3]);
    return (four[0] + four[2]) + (four[1] + four[3]);
}

INLINE words words_of_halves(const uint8_t *from)
{
    uint16_t half __attribute__((vector_size(8)));
    memcpy(&half, from, sizeof half);
    return __builtin_convertvector(half, words);
}
INLINE floats floats_of_f16(const uint8_t *from)
{
    words half = words_of_halves(from), sign = (half & 0x8000) << 16, magnitude = half & 0x7FFF;
    /* Subnormal numbers are multiples of 2^-24. */
    floats below = __builtin_convertvector((ints)magnitude, floats) * 0x1p-24f;
    floats normal = (floats)((magnitude + ((127 - 15) << 10)) << 13);
    floats above = (floats)(0x7F800000 | (magnitude & 0x3FF) << 13);
    floats value = floats_choose(magnitude < 0x7C00, normal, above);
    return (floats)((words)floats_choose(magnitude < 0x0400, below, value) | sign);
}
INLINE float scalar_f16(const uint8_t *from)
{
    uint8_t four[8] = {from[0], from[1]};
    return floats_of_f16(four)[0];
}
INLINE lanes f16_lanes(const uint8_t *from) { EACH(floats_of_f16(from + 8 * i)); }
INLINE lanes bf16_lanes(const uint8_t *from) { EACH((floats)(words_of_halves(from + 8 * i) << 16)); }

INLINE bytes bytes_load_16(const uint8_t *from)
{
    bytes result;
    memcpy(&result, from, sizeof result);
    return result;
}
INLINE bytes32 bytes_load(const uint8_t *from)
{
    return (bytes32){{bytes_load_16(from), bytes_load_16(from + 16)}};
}
INLINE bytes32 bytes_bits(bytes32 x, int shift, uint8_t mask)
{
    return (bytes32){{x.v[0] >> (uint8_t)shift & mask, x.v[1] >> (uint8_t)shift & mask}};
}
INLINE bytes32 bytes_up(bytes32 x, int shift)
{
    return (bytes32){{x.v[0] << (uint8_t)shift, x.v[1] << (uint8_t)shift}};
}
INLINE bytes32 bytes_or(bytes32 x, bytes32 y)
{
    return (bytes32){{x.v[0] | y.v[0], x.v[1] | y.v[1]}};
}
/* `value` in the bytes whose bit of the word is set, 0 in the others. */
INLINE bytes bytes_of_16_bits(const uint8_t *from, uint8_t value)
{
    const bytes own = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    typedef uint64_t two __attribute__((vector_size(16)));
    bytes bits = (bytes)(two){from[0] * 0x0101010101010101u, from[1] * 0x0101010101010101u};
    return (bytes)((bits & own) != 0) & value;
}
INLINE bytes32 bytes_of_bits(const uint8_t *from, uint8_t value)
{
    return (bytes32){{bytes_of_16_bits(from, value), bytes_of_16_bits(from + 2, value)}};
}
/* The table's bytes at these places, 0 to 15. */
INLINE bytes32 bytes_look_up(const int8_t *table, bytes32 places)
{
    uint8_t found[32];
    memcpy(found, &places, sizeof found);
    for (int i = 0; i < 32; i++)
        found[i] = (uint8_t)table[found[i]];
    return bytes_load(found);
}
INLINE bytes32 bytes_sub(bytes32 x, uint8_t y) { return (bytes32){{x.v[0] - y, x.v[1] - y}}; }
INLINE lanes lanes_of_signed(bytes x)
{
    typedef int8_t signed16 __attribute__((vector_size(16)));
    typedef int16_t shorts16 __attribute__((vector_size(32)));
    typedef int32_t ints16 __attribute__((vector_size(64)));
    ints16 wide = __builtin_convertvector(__builtin_convertvector((signed16)x, shorts16), ints16);
    ints four[4];
    memcpy(four, &wide, sizeof four);
    EACH(__builtin_convertvector(four[i], floats));
}
/* Convert the first or the second sixteen signed bytes to float. */
INLINE lanes bytes_first(bytes32 x) { return lanes_of_signed(x.v[0]); }
INLINE lanes bytes_second(bytes32 x) { return lanes_of_signed(x.v[1]); }
INLINE bytes32 bytes_of_nibbles(const uint8_t *from)
{
    bytes both = bytes_load_16(from);
    return (bytes32){{both & 15, both >> 4}};
}

#undef EACH
#include "codes.h"
