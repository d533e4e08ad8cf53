// Words of 8 bytes that ranks store into each other's memory: 4 bytes of value, 4 bytes of epoch.
//
// A word is read and written in one access of 8 bytes, so a reader that finds the epoch has its value.
// No fence orders the words, and no word is read with a plain load.
//
// Or two values of 4 bytes, where a place gets a word in each of its exchanges: it then holds the word of this
// epoch or that of two epochs before, so one bit of the epoch is enough (`pair_word`).
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;

#ifndef EMULATED  // tests compile this file as C++ and define these otherwise
#ifndef DEVICE
#define DEVICE __device__ __forceinline__
#endif
// Stores or loads two adjacent words, each of them atomically.
DEVICE void send_words(u64* p, u64 one, u64 other) {
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(p), "l"(one), "l"(other)
                 : "memory");
}
DEVICE void receive_words(const u64* p, u64& one, u64& other) {
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(one), "=l"(other)
                 : "l"(p)
                 : "memory");
}
DEVICE void send_word(u64* p, u64 word) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(word) : "memory");
}
DEVICE u64 receive_word(const u64* p) {
    u64 word;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(word) : "l"(p) : "memory");
    return word;
}
DEVICE u32 told_by_host(const u32* p) {
    u32 v;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
constexpr u32 POLLS = 4096;  // polls between two reads of `lost`, which is in the host's memory
#endif

constexpr u32 NOT_A_NUMBER = 0x7fc00000u;

DEVICE u64 word_of(u32 value, u32 epoch) { return static_cast<u64>(epoch) << 32 | value; }

// Waits for every rank's two words of this epoch at `from` + rank * `stride`, and returns their values.
// The values of rank `known` are `one` and `other` (RANKS: no rank is known).  All values are NaN, and the
// result is false, once the word at `lost` is not 0.
DEVICE bool receive_from_ranks(u32 (&values)[RANKS][2], u32 known, u32 one, u32 other, const u64* from,
                               u64 stride, u32 epoch, const u32* lost) {
    bool all = false;
    for (u32 polls = 1; !all; polls++) {
        u64 found[RANKS][2];
        // All loads are issued before the first result is used.
#pragma unroll
        for (u32 r = 0; r < RANKS; r++) {
            found[r][0] = word_of(one, epoch);
            found[r][1] = word_of(other, epoch);
            if (r != known) receive_words(from + r * stride, found[r][0], found[r][1]);
        }
        all = true;
#pragma unroll
        for (u32 r = 0; r < RANKS; r++)
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                all = all && static_cast<u32>(found[r][i] >> 32) == epoch;
                values[r][i] = static_cast<u32>(found[r][i]);
            }
        if (!all && polls % POLLS == 0 && told_by_host(lost)) {
#pragma unroll
            for (u32 r = 0; r < RANKS; r++) values[r][0] = values[r][1] = NOT_A_NUMBER;
            return false;
        }
    }
    return true;
}

// Adds in the order of ranks, so that all ranks compute the same bits.
DEVICE float sum_of_ranks(const u32 (&values)[RANKS][2], u32 i) {
    float total = __uint_as_float(values[0][i]);
#pragma unroll
    for (u32 r = 1; r < RANKS; r++) total = __fadd_rn(total, __uint_as_float(values[r][i]));
    return total;
}

// A word of two values.  A bit of the epoch takes the place of the second value's last bit, which `pair_of`
// clears.  Epochs begin with 1, and memory with zeros.
DEVICE u32 bit_of(u32 epoch) { return (epoch + 1) >> 1 & 1; }
DEVICE u64 pair_word(float2 pair, u32 epoch) {
    return static_cast<u64>((__float_as_uint(pair.y) & ~1u) | bit_of(epoch)) << 32 | __float_as_uint(pair.x);
}
DEVICE float2 pair_of(u64 word) {
    return make_float2(__uint_as_float(static_cast<u32>(word)),
                       __uint_as_float(static_cast<u32>(word >> 32) & ~1u));
}

// Waits for every rank's words of COUNT pairs, and returns the sums over the ranks, added in the order of ranks.
// The words of pair i are at `from`[i] + rank * `stride`; those of rank `known` are `pairs` (RANKS: no rank is
// known).  Pairs whose `from` is null stay as they are.  All others are NaN once the word at `lost` is not 0.
template <int COUNT>
DEVICE void sum_pairs_of_ranks(float2 (&pairs)[COUNT], u32 known, const u64* const (&from)[COUNT], u64 stride,
                               const u32 (&epochs)[COUNT], const u32* lost) {
    u64 found[COUNT][RANKS];
    bool all = false;
    for (u32 polls = 1; !all; polls++) {
        // All loads are issued before the first result is used.
#pragma unroll
        for (int i = 0; i < COUNT; i++)
#pragma unroll
            for (u32 r = 0; r < RANKS; r++) {
                found[i][r] = pair_word(pairs[i], epochs[i]);
                if (r != known && from[i] != nullptr) found[i][r] = receive_word(from[i] + r * stride);
            }
        all = true;
#pragma unroll
        for (int i = 0; i < COUNT; i++)
#pragma unroll
            for (u32 r = 0; r < RANKS; r++) all = all && (found[i][r] >> 32 & 1) == bit_of(epochs[i]);
        if (!all && polls % POLLS == 0 && told_by_host(lost)) {
#pragma unroll
            for (int i = 0; i < COUNT; i++)
                if (from[i] != nullptr)
                    pairs[i] = make_float2(__uint_as_float(NOT_A_NUMBER), __uint_as_float(NOT_A_NUMBER));
            return;
        }
    }
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        if (from[i] == nullptr) continue;
        pairs[i] = pair_of(found[i][0]);
#pragma unroll
        for (u32 r = 1; r < RANKS; r++) {
            const float2 more = pair_of(found[i][r]);
            pairs[i] = make_float2(__fadd_rn(pairs[i].x, more.x), __fadd_rn(pairs[i].y, more.y));
        }
    }
}
