// A warp's attention on the tensor cores: all query heads of a block, which share a KV head, over 16 * STEPS
// positions at once, as a partial softmax.
//
// Physics.  The instruction multiplies 16 rows of queries, and here there are only QUERIES (8 at most).  So
// each query takes two rows: its value rounded to bfloat16, and the remainder.  The weights for the product
// with the values are split likewise.  The result is exact to some 17 bits, more than the bfloat16 that it is
// rounded to, and a position takes a fraction of the instructions needed without tensor cores.
//
// Keys and values go from memory directly to registers, as operands.  The order of the dimensions in a
// fragment is free as long as both operands agree, and so is the order of the result's columns:
//
//     lane 4 g + t:  keys of positions g and g + 8, 16 bytes: dimensions from 32 c + 8 t on;
//                    values of positions 2 t, 2 t + 1, 2 t + 8 and 2 t + 9: dimensions from 64 e + 8 g on
//
// The first product leaves the scores in the layout of the second one's operands, and a lane ends up with 16
// adjacent dimensions of the mix of query g.  The next tile is loaded while the rest of this one is used:
// keys once the scores are computed, values once they are mixed.
//
// Exponentials are relative to a base of the query.  The base is raised to the largest score only once that is
// far above it, so that sums are rarely rescaled; the result does not depend on the base.
#pragma once

#include "softmax.cuh"

template <int QUERIES, int STEPS, int WARPS> struct TileMix {
    static constexpr int POSITIONS = 16 * STEPS;           // positions of a warp at once
    static constexpr int STRIDE = WARPS * POSITIONS;       // of the block: from a warp's tile to its next
    static constexpr int PARTS = ceil_div(HEAD_SIZE, 32);  // parts of a key; missing dimensions are zero
    static constexpr int SETS = ceil_div(HEAD_SIZE, 64);   // parts of a value
    static_assert(QUERIES <= 8 && HEAD_SIZE % 8 == 0, "two rows a query");

    const bf16 *keys, *values;  // the head's, at the lane's dimensions
    int g, t;
    uint4 k[STEPS][2][PARTS], v[STEPS][4][SETS];
    uint4 query[PARTS][2];  // rounded, and the remainder
    float base, sum, mixed[8 * SETS][4];

    DEVICE explicit TileMix(int lane) : g(lane / 4), t(lane % 4) {}

    // Sets the keys and values to those of another head.
    DEVICE void turn_to(const bf16* of_keys, const bf16* of_values) {
        keys = of_keys + 8 * t;
        values = of_values + 8 * g;
    }
    DEVICE void clear() {
        base = MINUS_INFINITY;
        sum = 0.0f;
#pragma unroll
        for (int j = 0; j < 8 * SETS; j++) {
#pragma unroll
            for (int i = 0; i < 4; i++) mixed[j][i] = 0.0f;
        }
    }

    DEVICE static int value_at(int step, int i) { return 16 * step + i / 2 * 8 + i % 2; }
    DEVICE bool has_key(int part) const { return HEAD_SIZE % 32 == 0 || part * 4 + t < CHUNKS; }
    DEVICE bool has_value(int set) const { return HEAD_SIZE % 64 == 0 || set * 8 + g < CHUNKS; }

    // Issue the loads of the keys or the values of positions from `start` on, up to `end`.
    DEVICE void ask_keys(int start, int end) {
        const bf16* const from = keys + static_cast<long long>(start + g) * HEAD_SIZE;
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
#pragma unroll
            for (int n = 0; n < 2; n++) {
                const int at = 16 * step + 8 * n;
#pragma unroll
                for (int c = 0; c < PARTS; c++) {
                    k[step][n][c] = make_uint4(0, 0, 0, 0);
                    if (start + at + g < end && has_key(c))
                        k[step][n][c] = load_fresh(reinterpret_cast<const uint4*>(from + at * HEAD_SIZE + 32 * c));
                }
            }
        }
    }
    DEVICE void ask_values(int start, int end) {
        const bf16* const from = values + static_cast<long long>(start + 2 * t) * HEAD_SIZE;
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int at = value_at(step, i);
#pragma unroll
                for (int e = 0; e < SETS; e++) {
                    v[step][i][e] = make_uint4(0, 0, 0, 0);
                    if (start + at + 2 * t < end && has_value(e))
                        v[step][i][e] = load_fresh(reinterpret_cast<const uint4*>(from + at * HEAD_SIZE + 64 * e));
                }
            }
        }
    }
    DEVICE void ask(int start, int end) {
        ask_keys(start, end);
        ask_values(start, end);
    }
    // Issues the loads of one position that was left out.
    DEVICE void ask_for(int start, int position) {
        const long long at = static_cast<long long>(position) * HEAD_SIZE;
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
#pragma unroll
            for (int n = 0; n < 2; n++) {
#pragma unroll
                for (int c = 0; c < PARTS; c++) {
                    if (start + 16 * step + 8 * n + g == position && has_key(c))
                        k[step][n][c] = load_fresh(reinterpret_cast<const uint4*>(keys + at + 32 * c));
                }
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
#pragma unroll
                for (int e = 0; e < SETS; e++) {
                    if (start + value_at(step, i) + 2 * t == position && has_value(e))
                        v[step][i][e] = load_fresh(reinterpret_cast<const uint4*>(values + at + 64 * e));
                }
            }
        }
    }

    DEVICE static u32 rest_of(u32 pair, float a, float b) {
        return pack_bf16(a - low_half(pair), b - high_half(pair));
    }

    // Loads queries `q`, [QUERIES, HEAD_SIZE].  `factor` is the scale times log2(e), so that the exponentials are
    // powers of two.
    DEVICE void set_queries(const float* q, float factor, bool there) {
#pragma unroll
        for (int c = 0; c < PARTS; c++) {
            float4 a = make_float4(0, 0, 0, 0), b = a;
            if (there && g < QUERIES && has_key(c)) {
                const float4* from = reinterpret_cast<const float4*>(q + g * HEAD_SIZE + 32 * c + 8 * t);
                a = load_fresh(from);
                b = load_fresh(from + 1);
            }
            float x[8];
            set_query(x, a, b, factor);
            const uint4 near = pack_eight(x);
            query[c][0] = near;
            query[c][1] = make_uint4(rest_of(near.x, x[0], x[1]), rest_of(near.y, x[2], x[3]),
                                     rest_of(near.z, x[4], x[5]), rest_of(near.w, x[6], x[7]));
        }
    }

    // Mixes positions from `start` on, up to `end`, in tiles that begin before `stop`.  The first tile's loads
    // have been issued.  Returns the begin of the next tile.
    DEVICE int over(int start, int stop, int end) {
        for (; start < stop; start += STRIDE) {
            const int next = start + STRIDE;
            float score[2 * STEPS][4] = {};
#pragma unroll
            for (int c = 0; c < PARTS; c++) {
                const uint4 a = query[c][0], b = query[c][1];
#pragma unroll
                for (int n = 0; n < 2 * STEPS; n++)
                    multiply_tile(score[n], a.x, b.x, a.y, b.y, k[n / 2][n % 2][c].x, k[n / 2][n % 2][c].y);
#pragma unroll
                for (int n = 0; n < 2 * STEPS; n++)
                    multiply_tile(score[n], a.z, b.z, a.w, b.w, k[n / 2][n % 2][c].z, k[n / 2][n % 2][c].w);
            }
            if (next < end) ask_keys(next, end);

            float share[2 * STEPS][2], most = MINUS_INFINITY;
#pragma unroll
            for (int n = 0; n < 2 * STEPS; n++) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const int position = start + 8 * n + 2 * t + i;
                    share[n][i] = position < end ? score[n][i] + score[n][2 + i] : MINUS_INFINITY;
                    most = fmaxf(most, share[n][i]);
                }
            }
            most = fmaxf(most, exchange(most, 1));
            most = fmaxf(most, exchange(most, 2));
            if (__ballot_sync(0xffffffffu, most > base + FAR)) {
                const float now = most > base + FAR ? most : base, shrinks = rescale(base, now);
                base = now;
                sum *= shrinks;
#pragma unroll
                for (int j = 0; j < 8 * SETS; j++) {
#pragma unroll
                    for (int i = 0; i < 4; i++) mixed[j][i] *= shrinks;
                }
            }
#pragma unroll
            for (int n = 0; n < 2 * STEPS; n++) {
#pragma unroll
                for (int i = 0; i < 2; i++) sum += share[n][i] = exp2_fast(share[n][i] - base);
            }
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
                const float(&early)[2] = share[2 * step], (&late)[2] = share[2 * step + 1];
                const u32 a0 = pack_bf16(early[0], early[1]), a1 = rest_of(a0, early[0], early[1]);
                const u32 a2 = pack_bf16(late[0], late[1]), a3 = rest_of(a2, late[0], late[1]);
#pragma unroll
                for (int e = 0; e < SETS; e++) {
#pragma unroll
                    for (int j = 0; j < 8; j++) {
                        const u32 which = j % 2 ? 0x7632 : 0x5410;
                        const u32 b0 = __byte_perm(word(v[step][0][e], j / 2), word(v[step][1][e], j / 2), which);
                        const u32 b1 = __byte_perm(word(v[step][2][e], j / 2), word(v[step][3][e], j / 2), which);
                        multiply_tile(mixed[8 * e + j], a0, a1, a2, a3, b0, b1);
                    }
                }
            }
            if (next < end) ask_values(next, end);
        }
        return start;
    }
    DEVICE static u32 word(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

    // Calls f(query, chunk of 8 dimensions, their mix) for all chunks of this lane.
    template <class F> DEVICE void each(const F& f) const {
        if (g >= QUERIES) return;
#pragma unroll
        for (int e = 0; e < SETS; e++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int chunk = 8 * e + 2 * t + i;
                float x[8];
#pragma unroll
                for (int j = 0; j < 8; j++) x[j] = mixed[8 * e + j][i] + mixed[8 * e + j][2 + i];
                if (HEAD_SIZE % 64 == 0 || chunk < CHUNKS) f(g, chunk, x);
            }
        }
    }
    // The sum of a query's weights, in all of its lanes.
    DEVICE float whole_sum() const { return sum_lanes<4>(sum); }

    // Stores the result in bfloat16 at `to(query, chunk)`, if this warp had all positions.
    template <class F> DEVICE void deliver(const F& to) const {
        const float whole = whole_sum();
        each([&](int query, int chunk, const float(&x)[8]) {
            float y[8];
#pragma unroll
            for (int d = 0; d < 8; d++) y[d] = x[d] / whole;
            *reinterpret_cast<uint4*>(to(query, chunk)) = pack_eight(y);
        });
    }
    // Stores the partial softmax of each query: the base, the sum and the mix.
    DEVICE void leave(float (*partials)[PARTIAL]) const {
        const float whole = whole_sum();
        each([&](int query, int chunk, const float(&x)[8]) {
#pragma unroll
            for (int d = 0; d < 8; d++) partials[query][2 + chunk * 8 + d] = x[d];
        });
        if (g < QUERIES && t == 0) {
            partials[g][0] = base;
            partials[g][1] = whole;
        }
    }
};
