// Packed types as GGUF files store them (ggml-common.h): rows of blocks, at any address, whose halves and words are
// little-endian.
#pragma once

#include "bricks.cuh"

struct IQ4_NL : Q8_0 {};  // the table's values are bytes

// A block has the codes of VALUES inputs in BYTES bytes; `code` returns that of input k, up to 8 bits.  SCALE: the
// place of the scales of a K type.
template <int VALUES_, int BYTES_, int SCALE_ = 0> struct BlockOf {
    static constexpr int VALUES = VALUES_, BYTES = BYTES_, SCALE = SCALE_;
};
template <class F> struct Stored;
template <> struct Stored<Q8_0> : BlockOf<32, 34> {
    static DEVICE u32 code(const u8* block, int k) { return block[2 + k]; }
};
template <> struct Stored<Q4_0> : BlockOf<32, 18> {
    static DEVICE u32 code(const u8* block, int k) { return block[2 + k % 16] >> (k / 16 * 4) & 15; }
};
template <> struct Stored<Q4_1> : BlockOf<32, 20> {
    static DEVICE u32 code(const u8* block, int k) { return block[4 + k % 16] >> (k / 16 * 4) & 15; }
};
template <> struct Stored<Q5_0> : BlockOf<32, 22> {
    static DEVICE u32 code(const u8* block, int k) {
        const u32 low = block[6 + k % 16] >> (k / 16 * 4) & 15;
        return low | (block[2 + k / 8] >> (k % 8) & 1) << 4;
    }
};
template <> struct Stored<Q5_1> : BlockOf<32, 24> {
    static DEVICE u32 code(const u8* block, int k) { return Stored<Q5_0>::code(block + 2, k); }
};
template <> struct Stored<IQ4_NL> : BlockOf<32, 18> {
    static DEVICE u32 code(const u8* block, int k) {
        return static_cast<u8>(iq4_nl_value(Stored<Q4_0>::code(block, k)));
    }
};
template <> struct Stored<Q4_K> : BlockOf<256, 144> {
    static DEVICE u32 code(const u8* block, int k) {
        return block[16 + k / 64 * 32 + k % 32] >> (k / 32 % 2 * 4) & 15;
    }
};
template <> struct Stored<Q5_K> : BlockOf<256, 176> {
    static DEVICE u32 code(const u8* block, int k) {
        const u32 low = block[48 + k / 64 * 32 + k % 32] >> (k / 32 % 2 * 4) & 15;
        return low | (block[16 + k % 32] >> (k / 32) & 1) << 4;
    }
};
template <> struct Stored<Q6_K> : BlockOf<256, 210, 192> {
    static DEVICE u32 code(const u8* block, int k) {
        const int half = k / 128, at = k % 128;
        const u32 low = block[half * 64 + at % 64] >> (at / 64 * 4) & 15;
        return low | (block[128 + half * 32 + at % 32] >> (at / 32 * 2) & 3) << 4;
    }
};

// The place of row `row` of a file.  `head`: the number of rows of a head whose rows are interleaved in the file
// (both rows of a rope pair adjacent, as in llama.cpp), and belong into the head's first half, then its second.
// 0: rows keep their order.
DEVICE u32 row_in_order(u32 row, u32 head) {
    if (head == 0) return row;
    const u32 in_head = row % head;
    return row - in_head + in_head % 2 * (head / 2) + in_head / 2;
}
