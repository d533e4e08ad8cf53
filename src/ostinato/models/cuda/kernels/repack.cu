// Converts rows of a GGUF file to bricks.
#include "stored.cuh"

DEVICE void put_half(u8* to, const u8* from, bool there = true) {
    to[0] = there ? from[0] : 0, to[1] = there ? from[1] : 0;
}

// Writes rows from `first` on of a matrix to bricks, one block each.  `head`: as for
// `row_in_order`.  `size`: as for `place_of`; or 0 if all rows are the first of
// their pairs, 1 if they are the second.
template <class F>
DEVICE void repack(const u8* stored, u8* bricks, u32 row_bytes, u32 columns, u32 first, u32 head,
                   u32 size) {
    typedef Stored<F> From;
    const int row = row_in_order(first + blockIdx.x, head);
    const Place place = size < 2 ? Place{row, static_cast<int>(size)} : place_of(row, size);
    const int g = place.pair % 8, which = place.which;
    const u8* const from = stored + static_cast<u64>(blockIdx.x) * row_bytes;
    u8* const row_of_bricks = bricks + static_cast<u64>(place.pair / 8) * Brick<F>::row_bytes(columns);
    const int count = ceil_div(columns, BRICK);
    for (int item = threadIdx.x; item < count * 32; item += blockDim.x) {
        const int brick = item / 32, j = item / 4 % 8, t = item % 4, lane = 4 * g + t;
        const int start = brick * BRICK, rest = static_cast<int>(columns) - start;
        const int units = smaller(4, Brick<F>::units(rest));
        u8* const to = row_of_bricks + brick * Brick<F>::BYTES;
        u8* const high = to + units * Brick<F>::UNIT;
        u8* const scales = high + Brick<F>::HIGH_LOADS * 512;
        u8* const extra = scales + 256;
        const bool there = j * 32 < rest;  // rows are whole blocks of at least 32 inputs
        auto code = [&](int group, int second, int i) -> u32 {
            if (group * 32 >= rest) return 0;
            const int k = start + group * 32 + second * 16 + t * 4 + i;
            return From::code(from + k / From::VALUES * From::BYTES, k % From::VALUES);
        };
        auto word = [&](int second) {
            u32 made = 0;
            for (int i = 0; i < 4; i++) made |= code(j, second, i) << (8 * i);
            return made;
        };
        const u32 early = word(0), late = word(1);
        if (j < units * 2) {
            if constexpr (F::BITS == 8) {
                u32* const at = reinterpret_cast<u32*>(to + j * 512 + lane * 16);
                at[which] = early;
                at[2 + which] = late;
            } else {
                *reinterpret_cast<u32*>(to + j / 2 * 512 + lane * 16 + j % 2 * 8 + which * 4) =
                    (early & 0x0f0f0f0fu) | (late & 0x0f0f0f0fu) << 4;
            }
        }
        if constexpr (F::BITS == 5) {
            if (j % 4 == 0) {
                u32 bits = 0;
                for (int n = 0; n < 4; n++)
                    for (int second = 0; second < 2; second++)
                        for (int i = 0; i < 4; i++)
                            bits |= (code(j + n, second, i) >> 4) << (8 * i + 2 * n + second);
                *reinterpret_cast<u32*>(high + lane * 16 + which * 8 + j / 4 * 4) = bits;
            }
        }
        if constexpr (F::BITS == 6) {
            if (j % 2 == 0) {
                u32 bits = 0;
                for (int n = 0; n < 2; n++)
                    for (int second = 0; second < 2; second++)
                        for (int i = 0; i < 4; i++)
                            bits |= (code(j + n, second, i) >> 4) << (8 * i + 4 * n + 2 * second);
                *reinterpret_cast<u32*>(high + which * 512 + lane * 16 + j / 2 * 4) = bits;
            }
        }
        u8* const own = scales + which * 128 + g * 16;
        const u8* const block = from + (start + j * 32) / From::VALUES * From::BYTES;
        if constexpr (F::K_TYPE) {
            if (t < 2) own[j * 2 + t] = block[From::SCALE + j * 2 + t];
            if (F::HALVES && j == 0 && t == 0) put_half(extra + g * 4 + which * 2, block + 208);
        } else if (t == 0) {
            put_half(own + j * 2, block, there);
            if (F::MINIMA)
                put_half(extra + (4 * g + j / 2) * 8 + which * 4 + j % 2 * 2, block + 2, there);
        }
    }
}

#define REPACK(NAME)                                                                              \
    KERNEL NAME##_to_bricks(const u8* stored, u8* bricks, u32 row_bytes, u32 columns, u32 first,  \
                            u32 head, u32 size) {                                                 \
        repack<NAME>(stored, bricks, row_bytes, columns, first, head, size);                      \
    }
REPACK(Q8_0)
REPACK(Q4_0)
REPACK(Q4_1)
REPACK(Q5_0)
REPACK(Q5_1)
REPACK(IQ4_NL)
REPACK(Q4_K)
REPACK(Q5_K)
REPACK(Q6_K)
