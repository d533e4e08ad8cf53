// The decoder's five products.  Each is a struct that `matvec` (one row) and `matmul` (more rows) are
// specialised with; it defines which weight rows form a pair, and what is done with the sums.
//
// Outputs are computed in *pairs*, because three of five products need two at once: rope rotates
// dimensions i and i + size / 2 of a head, the MLP multiplies gate i with up i, and the residual is read
// and written two floats at a time.  `weight_row(pair, which)` returns the pair's rows in the [out, in]
// matrix; the thread that computes a pair has both sums and calls `finish`.
//
// Traffic: every weight once (2 * OUTPUTS * INPUTS bytes).  All else comes from L2.
#pragma once

#include "common.cuh"

// The number of parts, [HIDDEN] each, that attention_block.cu leaves in the workspace.  The residual after
// a layer's attention is the sum of x and these parts: `norm_gate_up` stores the sum behind the parts, and
// `down_residual` reads it there.  0: the residual is x.
#ifndef RESIDUAL_PARTS
#define RESIDUAL_PARTS 0
#endif

// Adds the products of 8 weights with 8 inputs to two sums: two independent chains of four.
DEVICE void dot8(float& even, float& odd, const uint4& w, const float4& a, const float4& b) {
    even = fmaf(low_half(w.x), a.x, even);
    odd = fmaf(high_half(w.x), a.y, odd);
    even = fmaf(low_half(w.y), a.z, even);
    odd = fmaf(high_half(w.y), a.w, odd);
    even = fmaf(low_half(w.z), b.x, even);
    odd = fmaf(high_half(w.z), b.y, odd);
    even = fmaf(low_half(w.w), b.z, even);
    odd = fmaf(high_half(w.w), b.w, odd);
}

DEVICE float silu(float x) { return x / (1.0f + exp2_fast(-1.44269504f * x)); }

DEVICE bf16 to_bf16(float x) { return static_cast<bf16>(pack_bf16(x, 0.0f)); }

// The sums of squares of the rows of the residual, [2, rows]: two halves are used in turn, since one is read
// while the other is cleared.  A sum is two integers, the whole part and the fraction in units of 2^-40.
// Blocks add to it as they finish; sums of integers do not depend on the order.
DEVICE u64* squares_of(u64* squares, int half, int rows, int index) {
    return squares + 2 * (half * rows + index);
}
DEVICE void clear_square(u64* square) { square[0] = square[1] = 0; }
DEVICE void add_square(u64* square, float more) {
    const float whole = floorf(more < 9e18f ? more : 9e18f);
    atomicAdd(square, static_cast<u64>(whole));
    atomicAdd(square + 1, static_cast<u64>((more - whole) * 1099511627776.0f));
}
DEVICE float square_at(const u64* square) {
    const float whole = static_cast<float>(load_fresh(square));
    return whole + static_cast<float>(load_fresh(square + 1)) * (1.0f / 1099511627776.0f);
}

// The factor of a row's norm, from the sums of squares of its WIDTH values by WARPS warps.
template <int WARPS, int WIDTH> DEVICE float norm_factor(const float* squares, float epsilon) {
    float total = squares[0];
#pragma unroll
    for (int i = 1; i < WARPS; i++) total += squares[i];
    return rsqrtf(total * (1.0f / WIDTH) + epsilon);
}

// What a product has unless it says otherwise.  NORMED: the inputs are the residual, normed.  WANTED: the flags
// of rows that are finished.  KEYS: `finish` returns keys of logits.  EXCHANGES: the sums are those of all
// ranks.  PARTS: parts of the residual that are added to the inputs.
template <int INPUTS_, int OUTPUTS_, bool NORMED_ = true> struct Product {
    static constexpr int INPUTS = INPUTS_, OUTPUTS = OUTPUTS_, PAIRS = ceil_div(OUTPUTS, 2);
    static constexpr bool NORMED = NORMED_, KEYS = false, EXCHANGES = false;
    static constexpr int WANTED = ACTIVE, PARTS = 0;

    const Weight* weight;
    const float* input;    // [rows, INPUTS]
    const float* norm;     // of the inputs
    float epsilon;

    DEVICE static int weight_row(int pair, int which) { return 2 * pair + which; }
    DEVICE float2 prepare(const Row&, int, int) const { return make_float2(0.0f, 0.0f); }
};
typedef Product<HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_SIZE> ProductOfHeads;

// qkv = W_q h, W_k h and W_v h, read by norm_rope.cu; h is the normed residual.
struct PlainQkvProduct : ProductOfHeads {
    float* qkv;  // [rows, OUTPUTS]

    DEVICE u64 finish(const Row&, int index, int pair, float a, float b, float2) const {
        reinterpret_cast<float2*>(qkv + index * OUTPUTS)[pair] = make_float2(a, b);
        return 0;
    }
};

// q = rope(W_q h + b); rope(W_k h + b) and W_v h + b go to the cache.  h is the normed residual; b exists
// with QKV_BIAS only.
struct QkvProduct : ProductOfHeads {
    static constexpr int HALF = HEAD_SIZE / 2;

    const float* bias;  // [OUTPUTS]
    const float* rope;  // [context, 2, head_size / 2]: cosines, sines
    bf16* cache;        // [2, sequences, kv_heads, context, head_size]
    float* q;           // [rows, heads, head_size]
    int sequences, context;

    DEVICE static int weight_row(int pair, int which) {
        return pair + (pair / HALF + which) * HALF;  // head * size + i, plus half a head for `which` 1
    }
    DEVICE float2 turn_of(const Row& row, int pair) const {
        if (pair >= (HEADS + KV_HEADS) * HALF) return make_float2(1.0f, 0.0f);  // values
        const float* at = rope + static_cast<long long>(row.position) * HEAD_SIZE + pair % HALF;
        return make_float2(__ldg(at), __ldg(at + HALF));
    }
#if QKV_BIAS
    typedef float4 Prepared;  // cosine, sine, and the bias of both outputs
    DEVICE float4 prepare(const Row& row, int, int pair) const {
        const float2 turn = turn_of(row, pair);
        return make_float4(turn.x, turn.y, __ldg(bias + weight_row(pair, 0)),
                           __ldg(bias + weight_row(pair, 1)));
    }
#else
    typedef float2 Prepared;  // cosine, sine
    DEVICE float2 prepare(const Row& row, int, int pair) const { return turn_of(row, pair); }
#endif
    // Prefetches the bias before the wait: `prepare` reads everything else from L2.
    DEVICE void ask_for_bias() const {
        if constexpr (QKV_BIAS) {
            if (threadIdx.x) return;
            for (int i = blockIdx.x * 32; i < OUTPUTS; i += gridDim.x * 32)
                prefetch_weights(bias + i, smaller(32, OUTPUTS - i) * 4);
        }
    }
    DEVICE u64 finish(const Row& row, int index, int pair, float a, float b, Prepared turn) const {
        const int head = pair / HALF, i = pair % HALF;
#if QKV_BIAS
        a += turn.z;
        b += turn.w;
#endif
        const float left = a * turn.x - b * turn.y, right = b * turn.x + a * turn.y;
        if (head < HEADS) {
            float* to = q + (index * HEADS + head) * HEAD_SIZE + i;
            to[0] = left;
            to[HALF] = right;
            return 0;
        }
        const int part = head >= HEADS + KV_HEADS;
        const int kv_head = head - HEADS - part * KV_HEADS;
        const long long place = static_cast<long long>(part) * sequences + row.sequence;
        const long long line = place * KV_HEADS + kv_head;
        bf16* to = cache + (line * context + row.position) * HEAD_SIZE + i;
        to[0] = to_bf16(left);
        to[HALF] = to_bf16(right);
        return 0;
    }
};

// inner = silu(W_gate h) * (W_up h); h is the normed residual.
struct GateUpProduct : Product<HIDDEN, 2 * INNER> {
    static constexpr int PARTS = RESIDUAL_PARTS;

    float* inner;
    float* parts = nullptr;  // parts of the residual, [PARTS + 1, HIDDEN]; the last receives the sum

    DEVICE static int weight_row(int pair, int which) { return pair + which * INNER; }  // [gate; up]
    DEVICE u64 finish(const Row&, int index, int pair, float a, float b, float2) const {
        inner[index * INNER + pair] = silu(a) * b;
        return 0;
    }
};

// x += W y: the output projection (y: attended) and the MLP's down projection (y: inner).
template <int WIDTH> struct ResidualProduct : Product<WIDTH, HIDDEN, false> {
    const float* before;  // the residual
    float* x;             // the new residual; may be the same memory

    DEVICE float2 prepare(const Row&, int index, int pair) const {
        return load_fresh(reinterpret_cast<const float2*>(before + index * HIDDEN) + pair);
    }
    DEVICE u64 finish(const Row&, int index, int pair, float a, float b, float2 old) const {
        reinterpret_cast<float2*>(x + index * HIDDEN)[pair] =
            make_float2(old.x + a, old.y + b);
        return 0;
    }
};

#ifdef SUM_SLOTS
#include "words.cuh"

// Sums over ranks of the pairs that a kernel computes (distributed/kernels).  Each rank stores its pairs into
// every rank's window, and waits for the others' pairs.  A pair of a row has a slot.  `sums` is this product's
// part of a window, initially zero:
//
//     table     the addresses of every rank's `sums`, then of `lost`        SUM_TABLE words of 8 bytes
//     epochs    the number of exchanges of each slot                        [SUM_SLOTS], 4 bytes
//     words     of two values, [epoch % 2][rank][SUM_SLOTS]                 8 bytes
//
// Two halves are enough for each slot, as in exchange.cu: a rank that sends epoch e has received all words
// of e - 1, whose senders had read those of e - 2.  So different grids may make a slot's exchanges.
// All blocks must be resident at once, on all ranks, and a block waits only after it has sent all of its pairs.
struct SumsOfRanks {
    u64* sums;
    u32 rank;
    u64* windows[RANKS];

    // May run before the wait: the table never changes.
    DEVICE SumsOfRanks(u64* sums, u32 rank) : sums(sums), rank(rank) {
#pragma unroll
        for (u32 r = 0; r < RANKS; r++) windows[r] = reinterpret_cast<u64*>(sums[r]);
    }
    DEVICE static int slot(int index, int pair) { return index * (HIDDEN / 2) + pair; }
    DEVICE u32* counter(int slot) const { return reinterpret_cast<u32*>(sums + SUM_TABLE) + slot; }
    // The epoch of a slot's exchange that begins now.
    DEVICE u32 epoch_of(int slot) const { return load_fresh(counter(slot)) + 1; }
    // The address of a slot's word of rank 0 in a rank's window.
    DEVICE static u64* word_at(u64* window, int slot, u32 epoch) {
        return window + SUM_TABLE + SUM_SLOTS / 2 + static_cast<u64>(epoch & 1) * RANKS * SUM_SLOTS + slot;
    }
    // Sends a pair to all ranks but `known`.
    DEVICE void send(int slot, u32 epoch, float2 pair, u32 known) const {
#pragma unroll
        for (u32 r = 0; r < RANKS; r++)
            if (r != known)
                send_word(word_at(windows[r], slot, epoch) + rank * SUM_SLOTS, pair_word(pair, epoch));
    }
    // Replaces pairs by their sums over all ranks; see `sum_pairs_of_ranks`.  Slots below 0 have no pair.
    template <int COUNT>
    DEVICE void receive(float2 (&pairs)[COUNT], const int (&slots)[COUNT], const u32 (&epochs)[COUNT],
                        u32 known) const {
        const u64* from[COUNT];
#pragma unroll
        for (int i = 0; i < COUNT; i++) from[i] = slots[i] < 0 ? nullptr : word_at(sums, slots[i], epochs[i]);
        sum_pairs_of_ranks(pairs, known, from, SUM_SLOTS, epochs, reinterpret_cast<const u32*>(sums[RANKS]));
    }
};

// Like ResidualProduct, for a rank that has a part of the inputs; adds the sums of all ranks.  `finish` sends this
// rank's sums, and `receive`, which comes after all `finish` of a block, waits for the others'.
template <int WIDTH> struct ResidualOfRanks : Product<WIDTH, HIDDEN, false> {
    static constexpr bool EXCHANGES = true;

    float* x;
    SumsOfRanks ranks;

    DEVICE u32 prepare(const Row&, int, int pair) const { return ranks.epoch_of(pair); }
    DEVICE u64 finish(const Row&, int, int pair, float a, float b, u32 epoch) const {
        ranks.send(pair, epoch, make_float2(a, b), RANKS);
        return 0;
    }
    DEVICE void receive(int pair) const {
        const float2 old = load_fresh(reinterpret_cast<const float2*>(x) + pair);
        const int slots[1] = {pair};
        const u32 epochs[1] = {ranks.epoch_of(pair)};
        float2 total[1] = {};
        ranks.receive(total, slots, epochs, RANKS);
        reinterpret_cast<float2*>(x)[pair] =
            make_float2(__fadd_rn(old.x, total[0].x), __fadd_rn(old.y, total[0].y));
        *ranks.counter(pair) = epochs[0];
    }
};
#endif

// logits = W h for the rows that sample, stored by sequence.  `finish` returns the pair's larger key.
struct HeadProduct : Product<HIDDEN, VOCAB> {
    static constexpr int WANTED = ACTIVE | SAMPLE;
    static constexpr bool KEYS = true;

    float* logits;  // [sequences, vocabulary]

    DEVICE static int weight_row(int pair, int which) {
        return smaller(2 * pair + which, VOCAB - 1);  // an odd vocabulary's last pair has one row
    }
    DEVICE u64 finish(const Row& row, int, int pair, float a, float b, float2) const {
        float* const to = logits + static_cast<long long>(row.sequence) * VOCAB + 2 * pair;
        const u64 key = logit_key(a, 2 * pair);
        if constexpr (VOCAB % 2 == 0) {
            *reinterpret_cast<float2*>(to) = make_float2(a, b);
        } else {
            to[0] = a;
            if (2 * pair + 1 >= VOCAB) return key;
            to[1] = b;
        }
        return largest(key, logit_key(b, 2 * pair + 1));
    }
};
