// Converts GGUF's tensor types to float32 or bfloat16, with the same bits as dequantise.py (and so as
// `gguf`): the same products and sums in the same order, none of them fused.  Bits of NaN may differ.
//
// A block converts a row.  Rows are laid out as in the file (ggml-common.h), at any address; halves and
// words are little-endian.
#include "common.cuh"

typedef unsigned char u8;

DEVICE u32 half_bits(const u8* p) { return p[0] | p[1] << 8; }
DEVICE u32 word_bits(const u8* p) { return half_bits(p) | half_bits(p + 2) << 16; }

DEVICE float half_value(const u8* p) {
    const u32 bits = half_bits(p), exponent = bits >> 10 & 31, fraction = bits & 1023;
    const float small = __fmul_rn(static_cast<float>(fraction), __uint_as_float(0x33800000));
    const u32 large = (exponent == 31 ? 0x7f800000 : (exponent + 112) << 23) | fraction << 13;
    const u32 magnitude = exponent == 0 ? __float_as_uint(small) : large;  // subnormal: units of 2^-24
    return __uint_as_float((bits & 0x8000) << 16 | magnitude);
}

// `value` returns value `i` of a row.  Codes of four bits: the low halves of the bytes hold the first half
// of a block, the high halves the second.

struct F32 {
    static DEVICE float value(const u8* row, u32 i) { return __uint_as_float(word_bits(row + 4 * i)); }
};
struct F16 {
    static DEVICE float value(const u8* row, u32 i) { return half_value(row + 2 * i); }
};
struct BF16 {
    static DEVICE float value(const u8* row, u32 i) {
        return __uint_as_float(half_bits(row + 2 * i) << 16);
    }
};
struct Q8_0 {  // scale, 32 signed bytes
    static DEVICE float value(const u8* row, u32 i) {
        const u8* const block = row + i / 32 * 34;
        const float q = static_cast<float>(static_cast<signed char>(block[2 + i % 32]));
        return __fmul_rn(q, half_value(block));
    }
};
DEVICE float four_bits(const u8* packed, u32 i) {  // code i of 32
    return static_cast<float>(packed[i % 16] >> (i / 16 * 4) & 15);
}
struct Q4_0 {  // scale, 32 x 4 bits; a value is (code - 8) * scale
    static DEVICE float value(const u8* row, u32 i) {
        const u8* const block = row + i / 32 * 18;
        return __fmul_rn(four_bits(block + 2, i % 32) - 8.0f, half_value(block));
    }
};
struct Q4_1 {  // scale, minimum, 32 x 4 bits
    static DEVICE float value(const u8* row, u32 i) {
        const u8* const block = row + i / 32 * 20;
        const float scaled = __fmul_rn(four_bits(block + 4, i % 32), half_value(block));
        return __fadd_rn(scaled, half_value(block + 2));
    }
};
DEVICE float five_bits(const u8* packed, u32 i) {  // code i of 32: a word with the fifth bits, 32 x 4 bits
    const u32 high = packed[i / 8] >> (i % 8) & 1;
    return four_bits(packed + 4, i) + static_cast<float>(high << 4);
}
struct Q5_0 {  // scale, codes of five bits; a value is (code - 16) * scale
    static DEVICE float value(const u8* row, u32 i) {
        const u8* const block = row + i / 32 * 22;
        return __fmul_rn(five_bits(block + 2, i % 32) - 16.0f, half_value(block));
    }
};
struct Q5_1 {  // scale, minimum, codes of five bits
    static DEVICE float value(const u8* row, u32 i) {
        const u8* const block = row + i / 32 * 24;
        const float scaled = __fmul_rn(five_bits(block + 4, i % 32), half_value(block));
        return __fadd_rn(scaled, half_value(block + 2));
    }
};
struct IQ4_NL {  // scale, 32 x 4 bits, which number the values of a table
    static DEVICE float value(const u8* row, u32 i) {
        const u8* const block = row + i / 32 * 18;
        const int q = iq4_nl_value(block[2 + i % 16] >> (i % 32 / 16 * 4) & 15);
        return __fmul_rn(static_cast<float>(q), half_value(block));
    }
};
// A block of 256 values in 8 parts of 32: scale, scale of minima, 8 x (6 bits of scale, 6 bits of minimum).
DEVICE float part_value(const u8* block, u32 part, u32 q) {
    const u8* const scales = block + 4;
    const u32 four = part % 4;
    u32 scale = scales[four] & 63, minimum = scales[four + 4] & 63;
    if (part >= 4) {  // the upper two bits lie in the bytes of the first four parts
        scale = (scales[four + 8] & 15) | (scales[four] >> 2 & 48);
        minimum = scales[four + 8] >> 4 | (scales[four + 4] >> 2 & 48);
    }
    const float step = __fmul_rn(half_value(block), static_cast<float>(scale));
    const float least = __fmul_rn(half_value(block + 2), static_cast<float>(minimum));
    return __fadd_rn(__fmul_rn(step, static_cast<float>(q)), -least);
}
struct Q4_K {  // the block's header, 256 x 4 bits
    static DEVICE float value(const u8* row, u32 i) {
        const u8* const block = row + i / 256 * 144;
        const u32 part = i % 256 / 32;
        return part_value(block, part, block[16 + part / 2 * 32 + i % 32] >> (part % 2 * 4) & 15);
    }
};
struct Q5_K {  // the block's header, 256 x the fifth bit, 256 x the lower 4 bits
    static DEVICE float value(const u8* row, u32 i) {
        const u8* const block = row + i / 256 * 176;
        const u32 part = i % 256 / 32;
        const u32 low = block[48 + part / 2 * 32 + i % 32] >> (part % 2 * 4) & 15;
        const u32 high = block[16 + i % 32] >> part & 1;
        return part_value(block, part, low | high << 4);
    }
};
struct Q6_K {  // 256 x lower 4 bits, 256 x upper 2 bits, 16 signed bytes of scale, scale
    static DEVICE float value(const u8* row, u32 i) {
        const u8* const block = row + i / 256 * 210;
        const u32 half = i % 256 / 128, at = i % 128;
        const u32 low = block[half * 64 + at % 64] >> (at / 64 * 4) & 15;
        const u32 high = block[128 + half * 32 + at % 32] >> (at / 32 * 2) & 3;
        const float q = static_cast<float>(static_cast<int>(low | high << 4) - 32);
        const float scale = static_cast<float>(static_cast<signed char>(block[192 + i % 256 / 16]));
        return __fmul_rn(__fmul_rn(half_value(block + 208), scale), q);
    }
};

DEVICE void put(float* out, float v) { *out = v; }
DEVICE void put(bf16* out, float v) {  // to nearest, ties to even; NaN stays NaN, overflow gives infinity
    const u32 bits = __float_as_uint(v);
    const u32 rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    *out = static_cast<bf16>(v != v ? bits >> 16 | 64 : rounded);
}

// `head`: the number of rows of a head whose rows are interleaved in the file (both rows of a rope pair
// adjacent, as in llama.cpp); they are written as the head's first half, then its second.  0: rows keep
// their order.
template <class Format, class T>
DEVICE void dequantise(const u8* stored, T* out, u32 row_bytes, u32 columns, u32 head) {
    const u32 row = blockIdx.x;
    u32 target = row;
    if (head != 0) {
        const u32 in_head = row % head;
        target = row - in_head + in_head % 2 * (head / 2) + in_head / 2;
    }
    const u8* const from = stored + static_cast<u64>(row) * row_bytes;
    T* const to = out + static_cast<u64>(target) * columns;
    for (u32 i = threadIdx.x; i < columns; i += blockDim.x) put(to + i, Format::value(from, i));
}

#define FORMAT(NAME)                                                                             \
    KERNEL NAME##_to_f32(const u8* stored, float* out, u32 row_bytes, u32 columns, u32 head) {   \
        dequantise<NAME>(stored, out, row_bytes, columns, head);                                 \
    }                                                                                            \
    KERNEL NAME##_to_bf16(const u8* stored, bf16* out, u32 row_bytes, u32 columns, u32 head) {   \
        dequantise<NAME>(stored, out, row_bytes, columns, head);                                 \
    }
FORMAT(F32)
FORMAT(F16)
FORMAT(BF16)
FORMAT(Q8_0)
FORMAT(Q4_0)
FORMAT(Q4_1)
FORMAT(Q5_0)
FORMAT(Q5_1)
FORMAT(IQ4_NL)
FORMAT(Q4_K)
FORMAT(Q5_K)
FORMAT(Q6_K)
