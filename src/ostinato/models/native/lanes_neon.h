/* Sixteen float32 lanes in four registers. */

#include <arm_neon.h>

#define TILE 2
#define MIX_VECTORS 2

typedef struct {
    float32x4_t v[4];
} lanes;
typedef struct {
    uint8x16_t a, b;
} bytes32;

#define EACH(expression)                                                                           \
    lanes result;                                                                                  \
    for (int i = 0; i < 4; i++)                                                                    \
        result.v[i] = expression;                                                                  \
    return result

INLINE lanes lanes_load(const float *from) { EACH(vld1q_f32(from + 4 * i)); }
INLINE void lanes_store(float *to, lanes x)
{
    for (int i = 0; i < 4; i++)
        vst1q_f32(to + 4 * i, x.v[i]);
}
INLINE lanes lanes_set(float x) { EACH(vdupq_n_f32(x)); }
INLINE lanes lanes_fma(lanes x, lanes y, lanes z) { EACH(vfmaq_f32(z.v[i], x.v[i], y.v[i])); }
INLINE lanes lanes_mul(lanes x, lanes y) { EACH(vmulq_f32(x.v[i], y.v[i])); }
INLINE lanes lanes_div(lanes x, lanes y) { EACH(vdivq_f32(x.v[i], y.v[i])); }
INLINE lanes lanes_add(lanes x, lanes y) { EACH(vaddq_f32(x.v[i], y.v[i])); }
INLINE lanes lanes_sub(lanes x, lanes y) { EACH(vsubq_f32(x.v[i], y.v[i])); }
/* Lanes where either operand is NaN receive NaN. */
INLINE lanes lanes_max(lanes x, lanes y) { EACH(vmaxq_f32(x.v[i], y.v[i])); }
INLINE lanes lanes_min(lanes x, lanes y) { EACH(vminq_f32(x.v[i], y.v[i])); }
INLINE lanes lanes_round(lanes x) { EACH(vrndnq_f32(x.v[i])); }
/* 2 to the power of x, for integers between -126 and 127. */
INLINE lanes lanes_power_of_two(lanes x)
{
    EACH(vreinterpretq_f32_s32(
        vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(x.v[i]), vdupq_n_s32(127)), 23)));
}
INLINE float lanes_sum(lanes x)
{
    float32x4_t first = vaddq_f32(x.v[0], x.v[2]), second = vaddq_f32(x.v[1], x.v[3]);
    float32x4_t four = vaddq_f32(first, second);
    float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}

INLINE lanes f16_lanes(const uint8_t *from)
{
    EACH(vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(from + 8 * i))));
}
INLINE lanes bf16_lanes(const uint8_t *from)
{
    EACH(vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(from + 8 * i)), 16)));
}
INLINE float scalar_f16(const uint8_t *from)
{
    uint16_t bits;
    memcpy(&bits, from, 2);
    return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(bits))), 0);
}

INLINE bytes32 bytes_load(const uint8_t *from)
{
    return (bytes32){vld1q_u8(from), vld1q_u8(from + 16)};
}
INLINE bytes32 bytes_bits(bytes32 x, int shift, uint8_t mask)
{
    int8x16_t down = vdupq_n_s8((int8_t)-shift);
    uint8x16_t wanted = vdupq_n_u8(mask);
    return (bytes32){vandq_u8(vshlq_u8(x.a, down), wanted), vandq_u8(vshlq_u8(x.b, down), wanted)};
}
INLINE bytes32 bytes_up(bytes32 x, int shift)
{
    int8x16_t up = vdupq_n_s8((int8_t)shift);
    return (bytes32){vshlq_u8(x.a, up), vshlq_u8(x.b, up)};
}
INLINE bytes32 bytes_or(bytes32 x, bytes32 y)
{
    return (bytes32){vorrq_u8(x.a, y.a), vorrq_u8(x.b, y.b)};
}
/* `value` in the bytes whose bit of the word is set, 0 in the others. */
INLINE uint8x16_t bytes_of_16_bits(const uint8_t *from, uint8_t value)
{
    uint8x16_t bits = vcombine_u8(vdup_n_u8(from[0]), vdup_n_u8(from[1]));
    uint8x16_t own = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201));
    return vandq_u8(vtstq_u8(bits, own), vdupq_n_u8(value));
}
INLINE bytes32 bytes_of_bits(const uint8_t *from, uint8_t value)
{
    return (bytes32){bytes_of_16_bits(from, value), bytes_of_16_bits(from + 2, value)};
}
/* The table's bytes at these places, 0 to 15. */
INLINE bytes32 bytes_look_up(const int8_t *table, bytes32 places)
{
    uint8x16_t sixteen = vreinterpretq_u8_s8(vld1q_s8(table));
    return (bytes32){vqtbl1q_u8(sixteen, places.a), vqtbl1q_u8(sixteen, places.b)};
}
INLINE bytes32 bytes_sub(bytes32 x, uint8_t y)
{
    uint8x16_t less = vdupq_n_u8(y);
    return (bytes32){vsubq_u8(x.a, less), vsubq_u8(x.b, less)};
}
INLINE lanes floats_16(int8x16_t x)
{
    int16x8_t low = vmovl_s8(vget_low_s8(x)), high = vmovl_s8(vget_high_s8(x));
    return (lanes){{vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))),
                    vcvtq_f32_s32(vmovl_s16(vget_high_s16(low))),
                    vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))),
                    vcvtq_f32_s32(vmovl_s16(vget_high_s16(high)))}};
}
/* Convert the first or the second sixteen signed bytes to float. */
INLINE lanes bytes_first(bytes32 x) { return floats_16(vreinterpretq_s8_u8(x.a)); }
INLINE lanes bytes_second(bytes32 x) { return floats_16(vreinterpretq_s8_u8(x.b)); }
INLINE bytes32 bytes_of_nibbles(const uint8_t *from)
{
    uint8x16_t both = vld1q_u8(from);
    return (bytes32){vandq_u8(both, vdupq_n_u8(15)), vshrq_n_u8(both, 4)};
}

#undef EACH
#include "codes.h"
