// Packed matrices of GGUF files, reordered for tensor cores into *bricks*.
//
// A *brick* is 16 rows (8 pairs of outputs, the first of each pair above the second) of 256 inputs.
// A row of bricks is contiguous, so a block reads one piece of memory.  In a brick, for
// lane 4 g + t, rows g and g + 8, and inputs 32 j + 4 t + i and 32 j + 16 + 4 t + i of group j (i < 4):
//
//     codes     4 bits: [j / 2][lane][j % 2][row], a word: byte i has the first input's bits below the
//               second's.  8 bits: [j][lane][first, second][row], a word: byte i
//     high      the bits above the lower four.  One: [lane][row][j / 4], a word: bit 2 (j % 4) + second
//               of byte i.  Two: [row][lane][j / 2], a word: bits 4 (j % 2) + 2 second of byte i
//     scales    [row][g], 16 bytes: 8 halves, one for each group; for K types as in the file: scale and
//               scale of minima (halves), 12 bytes of scales and minima; for Q6_K 16 signed bytes
//     extra     Q4_1, Q5_1: minima, [lane][row], 2 halves (groups 2 t and 2 t + 1).  Q6_K: scale, [g][row],
//               a half
//
// If a row's inputs end within a brick, its codes end with the last pair of groups that has inputs.
#pragma once

#include "common.cuh"

constexpr int BRICK = 256;  // inputs

// ---------------------------------------------------------------------------------------- formats

// BITS: bits of a code.  EXTRA: bytes of a brick's extra data.  OFFSET: what a code is larger than its value by.
// K types have integer scales in blocks of 256 inputs.  HALVES: one scale for 16 inputs.
template <int BITS_, int EXTRA_, int OFFSET_, bool K_TYPE_, bool MINIMA_, bool HALVES_ = false> struct FormatOf {
    static constexpr int BITS = BITS_, EXTRA = EXTRA_, OFFSET = OFFSET_;
    static constexpr bool K_TYPE = K_TYPE_, MINIMA = MINIMA_, HALVES = HALVES_;
};
struct Q8_0 : FormatOf<8, 0, 0, false, false> {};
struct Q4_0 : FormatOf<4, 0, 8, false, false> {};
struct Q4_1 : FormatOf<4, 256, 0, false, true> {};
struct Q5_0 : FormatOf<5, 0, 16, false, false> {};
struct Q5_1 : FormatOf<5, 256, 0, false, true> {};
struct Q4_K : FormatOf<4, 0, 0, true, true> {};
struct Q5_K : FormatOf<5, 0, 0, true, true> {};
struct Q6_K : FormatOf<6, 32, 32, true, false, true> {};

template <class F> struct Brick {
    static constexpr int CODE_LOADS = F::BITS == 8 ? 8 : 4, HIGH_LOADS = F::BITS == 8 ? 0 : F::BITS - 4;
    static constexpr int UNIT = F::BITS == 8 ? 1024 : 512;  // bytes of the codes of 64 inputs
    static constexpr int REST = HIGH_LOADS * 512 + 256 + F::EXTRA;
    static constexpr int BYTES = 4 * UNIT + REST;
    static constexpr DEVICE int units(int inputs) { return ceil_div(inputs, 64); }
    static constexpr DEVICE int row_bytes(int inputs) {  // bytes of a row of bricks
        return inputs / BRICK * BYTES + (inputs % BRICK ? units(inputs % BRICK) * UNIT + REST : 0);
    }
};

// Rows of bricks of one format: a matrix, or a part of a matrix whose parts have different formats.
template <class F, int PAIRS_> struct Rows {
    typedef F Format;
    static constexpr int PAIRS = PAIRS_;
};

// ----------------------------------------------------------------------------------------- values

DEVICE int byte_of(u32 w, int i) { return static_cast<int>(w >> (8 * i) & 0xff); }
DEVICE int signed_byte_of(u32 w, int i) { return static_cast<int>(static_cast<signed char>(byte_of(w, i))); }
DEVICE u32 word_of(const uint4& v, int t) { return t & 1 ? (t & 2 ? v.w : v.y) : (t & 2 ? v.z : v.x); }

// The scales and the minima of the 8 groups of a K type's block, one byte each.
DEVICE uint2 k_scales(const uint4& v) {
    return make_uint2(v.y & 0x3f3f3f3fu, (v.w & 0x0f0f0f0fu) | (v.y >> 2 & 0x30303030u));
}
DEVICE uint2 k_minima(const uint4& v) {
    return make_uint2(v.z & 0x3f3f3f3fu, (v.w >> 4 & 0x0f0f0f0fu) | (v.z >> 2 & 0x30303030u));
}

// The place of a matrix row among the pairs.  A pair is two adjacent rows (`size` 2), or a row and the row
// `size` / 2 further on.
struct Place {
    int pair, which;
};
DEVICE Place place_of(int row, int size) {
    const int in = row % size, half = size / 2;
    return {row / size * half + in % half, in / half};
}

// The scales of the two halves of a group's inputs, and what is added to its products (MINIMA).  `own`: the scales
// of the row.  `d`: of Q6_K, the scale of the scales.  `minima()` returns a word with the minima of two groups.
template <class F, class M>
DEVICE void scales_of(float (&scale)[2], float& least, const uint4 own, int group, float d, const M& minima) {
    if constexpr (F::HALVES) {
        const u32 word = word_of(own, group / 2);
        for (int i = 0; i < 2; i++)
            scale[i] = __fmul_rn(d, static_cast<float>(signed_byte_of(word, group % 2 * 2 + i)));
    } else if constexpr (F::K_TYPE) {
        const uint2 by = k_scales(own), least_by = k_minima(own);
        scale[0] = scale[1] =
            __fmul_rn(low_f16(own.x), static_cast<float>(byte_of(group / 4 ? by.y : by.x, group % 4)));
        least = -__fmul_rn(high_f16(own.x),
                           static_cast<float>(byte_of(group / 4 ? least_by.y : least_by.x, group % 4)));
    } else {
        const u32 pair = word_of(own, group / 2);
        scale[0] = scale[1] = group % 2 ? high_f16(pair) : low_f16(pair);
        if constexpr (F::MINIMA) {
            const u32 both = minima();
            least = group % 2 ? high_f16(both) : low_f16(both);
        }
    }
}

// Unpacks 8 weights of a row, with the same bits as dequantise.cu: those of 4 inputs from 32 j + 4 t on, and of
// 4 inputs from 32 j + 4 t + 16 on.
template <class F>
DEVICE void brick_values(float (&v)[8], const u8* bricks, int columns, const Place& place, int brick,
                         int j, int t) {
    const int g = place.pair % 8, which = place.which, lane = 4 * g + t;
    const int units = smaller(4, Brick<F>::units(columns - brick * BRICK));
    const u8* const from = bricks + static_cast<long long>(place.pair / 8) * Brick<F>::row_bytes(columns) +
                           brick * Brick<F>::BYTES;
    const u8* const high = from + units * Brick<F>::UNIT;
    const u8* const scales = high + Brick<F>::HIGH_LOADS * 512;
    const u8* const extra = scales + 256;
    u32 first, second;
    if constexpr (F::BITS == 8) {
        first = load_weights4(from + j * 512 + lane * 16 + which * 4);
        second = load_weights4(from + j * 512 + lane * 16 + 8 + which * 4);
    } else {
        const u32 codes = load_weights4(from + j / 2 * 512 + lane * 16 + j % 2 * 8 + which * 4);
        first = codes & 0x0f0f0f0fu, second = codes >> 4 & 0x0f0f0f0fu;
    }
    if constexpr (F::BITS == 5) {
        const u32 bits = load_weights4(high + lane * 16 + which * 8 + j / 4 * 4) >> (j % 4 * 2);
        first |= (bits & 0x01010101u) << 4, second |= (bits & 0x02020202u) << 3;
    }
    if constexpr (F::BITS == 6) {
        const u32 bits = load_weights4(high + which * 512 + lane * 16 + j / 2 * 4) >> (j % 2 * 4);
        first |= (bits & 0x03030303u) << 4, second |= (bits & 0x0c0c0c0cu) << 2;
    }
    const uint4 own = load_weights(scales + which * 128 + g * 16);
    float scale[2], least = 0.0f, d = 0.0f;
    if constexpr (F::HALVES) {
        const u32 pair = load_weights4(extra + g * 4);
        d = which ? high_f16(pair) : low_f16(pair);
    }
    scales_of<F>(scale, least, own, j, d,
                 [=] { return load_weights4(extra + (4 * g + j / 2) * 8 + which * 4); });
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const u32 w = i < 4 ? first : second;
        const int code = F::BITS == 8 ? signed_byte_of(w, i % 4) : byte_of(w, i % 4) - F::OFFSET;
        v[i] = __fmul_rn(scale[i / 4], static_cast<float>(code));
        if constexpr (F::MINIMA) v[i] = __fadd_rn(v[i], least);
    }
}

// ------------------------------------------------------------------------- what a lane multiplies

// A lane's share of a brick, in registers.
template <class F> struct Held {
    uint4 codes[Brick<F>::CODE_LOADS], high[Brick<F>::HIGH_LOADS ? Brick<F>::HIGH_LOADS : 1], scales[2];
    u32 extra[2];

    // `units`: the number of units of 64 inputs that the brick has.
    DEVICE void load_codes(const u8* brick, int lane, int load, int units) {
        constexpr int PER_UNIT = Brick<F>::UNIT / 512;
        codes[load] = load < units * PER_UNIT ? load_weights(brick + load * 512 + lane * 16)
                                              : make_uint4(0, 0, 0, 0);
    }
    DEVICE void load_rest(const u8* brick, int lane, int units) {
        const u8* at = brick + units * Brick<F>::UNIT;
        if constexpr (F::BITS == 5) high[0] = load_weights(at + lane * 16);
        if constexpr (F::BITS == 6) {
            high[0] = load_weights(at + lane * 16);
            high[1] = load_weights(at + 512 + lane * 16);
        }
        at += Brick<F>::HIGH_LOADS * 512;
        scales[0] = load_weights(at + lane / 4 * 16);
        scales[1] = load_weights(at + 128 + lane / 4 * 16);
        at += 256;
        if constexpr (F::EXTRA == 256) {
            const uint2 v = load_weights8(at + lane * 8);
            extra[0] = v.x, extra[1] = v.y;
        }
        if constexpr (F::EXTRA == 32) extra[0] = load_weights4(at + lane / 4 * 4);
    }
    DEVICE void load(const u8* brick, int lane, int units) {
#pragma unroll
        for (int i = 0; i < Brick<F>::CODE_LOADS; i++) load_codes(brick, lane, i, units);
        load_rest(brick, lane, units);
    }
};

// Unpacks the codes of a group into the four operand words of its product.
template <class F>
DEVICE void part_codes(u32 (&a)[4], const Held<F>& held, const uint4& codes, int group) {
    if constexpr (F::BITS == 8) {
        a[0] = codes.x, a[1] = codes.y, a[2] = codes.z, a[3] = codes.w;
        return;
    }
    const u32 low = group % 2 ? codes.z : codes.x, high = group % 2 ? codes.w : codes.y;
    a[0] = low & 0x0f0f0f0fu, a[1] = high & 0x0f0f0f0fu;
    a[2] = low >> 4 & 0x0f0f0f0fu, a[3] = high >> 4 & 0x0f0f0f0fu;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if constexpr (F::BITS == 5) {
            const uint4& h = held.high[0];
            const u32 bits = i % 2 ? (group / 4 ? h.w : h.z) : (group / 4 ? h.y : h.x);
            const int at = group % 4 * 2 + i / 2;
            a[i] |= (at < 4 ? bits << (4 - at) : bits >> (at - 4)) & 0x10101010u;
        }
        if constexpr (F::BITS == 6) {
            const uint4& h = held.high[i % 2];
            const u32 bits = group / 2 == 0 ? h.x : group / 2 == 1 ? h.y : group / 2 == 2 ? h.z : h.w;
            const int at = group % 2 * 4 + i / 2 * 2;
            a[i] |= (at < 4 ? bits << (4 - at) : bits >> (at - 4)) & 0x30303030u;
        }
    }
}

// Converts code i of a word of four to float, exactly: the byte becomes the low bits of 2^23.
template <class F> DEVICE float code_float(u32 codes, int i) {
    const u32 bytes = F::BITS == 8 ? codes ^ 0x80808080u : codes;
    const float base = 8388608.0f + (F::BITS == 8 ? 128.0f : static_cast<float>(F::OFFSET));
    return __uint_as_float(__byte_perm(bytes, 0x4b000000u, 0x7440u | i)) - base;
}

// Unpacks the 8 weights of a group that a lane holds of row g (`which` 0) or g + 8 (1) to bfloat16, in the
// order of the codes, with the same bits as dequantise.cu.  All lanes of a warp must call it.
template <class F> DEVICE uint4 held_weights(const Held<F>& held, const u32 (&a)[4], int group, int which) {
    float scale[2], least = 0.0f;
    const float d = F::HALVES ? (which ? high_f16(held.extra[0]) : low_f16(held.extra[0])) : 0.0f;
    scales_of<F>(scale, least, held.scales[which], group, d, [&] {  // lane t of 4 holds groups 2 t and 2 t + 1
        return __shfl_sync(0xffffffffu, held.extra[which], group / 2, 4);
    });
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        v[i] = __fmul_rn(scale[i / 4], code_float<F>(a[i / 4 * 2 + which], i % 4));
        if constexpr (F::MINIMA) v[i] = __fadd_rn(v[i], least);
    }
    return pack_eight(v);
}
