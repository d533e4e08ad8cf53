// Converts GGUF's tensor types to float32 or bfloat16, with the same bits as dequantise.py (and so as
// `gguf`): the same products and sums in the same order, none of them fused.  Bits of NaN may differ.
//
// A block converts a row.
#include "stored.cuh"

DEVICE u32 half_bits(const u8* p) { return p[0] | p[1] << 8; }
DEVICE u32 word_bits(const u8* p) { return half_bits(p) | half_bits(p + 2) << 16; }

DEVICE float half_value(const u8* p) {
    const u32 bits = half_bits(p), exponent = bits >> 10 & 31, fraction = bits & 1023;
    const float small = __fmul_rn(static_cast<float>(fraction), __uint_as_float(0x33800000));
    const u32 large = (exponent == 31 ? 0x7f800000 : (exponent + 112) << 23) | fraction << 13;
    const u32 magnitude = exponent == 0 ? __float_as_uint(small) : large;  // subnormal: units of 2^-24
    return __uint_as_float((bits & 0x8000) << 16 | magnitude);
}

// `value` returns value `i` of a row.

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
// Any packed type: a value is its code, less the type's offset, times the block's scale, plus its minimum.
template <class F> struct Packed {
    static DEVICE float value(const u8* row, u32 i) {
        typedef Stored<F> From;
        const u8* const block = row + i / From::VALUES * From::BYTES;
        const u32 k = i % From::VALUES, code = From::code(block, k);
        if constexpr (F::HALVES) {
            const float q = static_cast<float>(static_cast<int>(code) - F::OFFSET);
            const float scale = static_cast<float>(static_cast<signed char>(block[From::SCALE + k / 16]));
            return __fmul_rn(__fmul_rn(half_value(block + 208), scale), q);
        } else if constexpr (F::K_TYPE) {
            return part_value(block, k / 32, code);
        } else {
            const int q = F::BITS == 8 ? signed_byte_of(code, 0) : static_cast<int>(code) - F::OFFSET;
            const float scaled = __fmul_rn(static_cast<float>(q), half_value(block));
            if constexpr (F::MINIMA) return __fadd_rn(scaled, half_value(block + 2));
            return scaled;
        }
    }
};

DEVICE void put(float* out, float v) { *out = v; }
DEVICE void put(bf16* out, float v) {  // to nearest, ties to even; NaN stays NaN, overflow gives infinity
    const u32 bits = __float_as_uint(v);
    const u32 rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    *out = static_cast<bf16>(v != v ? bits >> 16 | 64 : rounded);
}

// `head`: as for `row_in_order`.
template <class Format, class T>
DEVICE void dequantise(const u8* stored, T* out, u32 row_bytes, u32 columns, u32 head) {
    const u32 row = blockIdx.x;
    const u8* const from = stored + static_cast<u64>(row) * row_bytes;
    T* const to = out + static_cast<u64>(row_in_order(row, head)) * columns;
    for (u32 i = threadIdx.x; i < columns; i += blockDim.x) put(to + i, Format::value(from, i));
}

#define CONVERT(NAME, FORMAT)                                                                    \
    KERNEL NAME##_to_f32(const u8* stored, float* out, u32 row_bytes, u32 columns, u32 head) {   \
        dequantise<FORMAT>(stored, out, row_bytes, columns, head);                               \
    }                                                                                            \
    KERNEL NAME##_to_bf16(const u8* stored, bf16* out, u32 row_bytes, u32 columns, u32 head) {   \
        dequantise<FORMAT>(stored, out, row_bytes, columns, head);                               \
    }
CONVERT(F32, F32)
CONVERT(F16, F16)
CONVERT(BF16, BF16)
CONVERT(Q8_0, Packed<Q8_0>)
CONVERT(Q4_0, Packed<Q4_0>)
CONVERT(Q4_1, Packed<Q4_1>)
CONVERT(Q5_0, Packed<Q5_0>)
CONVERT(Q5_1, Packed<Q5_1>)
CONVERT(IQ4_NL, Packed<IQ4_NL>)
CONVERT(Q4_K, Packed<Q4_K>)
CONVERT(Q5_K, Packed<Q5_K>)
CONVERT(Q6_K, Packed<Q6_K>)
