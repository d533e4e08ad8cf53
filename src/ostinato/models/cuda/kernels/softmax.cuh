// One row's attention over a tile of positions, as partial softmaxes that are merged later.
//
// LANES lanes hold a position of a head, with 16 bytes of its key and of its value each.  A warp holds
// GROUPS * STEPS positions: GROUPS groups of lanes with STEPS positions each.  Each group of lanes keeps its
// own running maximum, sum and weighted sum of values (*mix*).
#pragma once

#include "common.cuh"

constexpr int CHUNKS = HEAD_SIZE / 8;             // lanes of a position
constexpr int LANES = power_of_two_above(CHUNKS);  // the same, with idle lanes
constexpr int GROUPS = 32 / LANES;                // positions that a warp holds at once
constexpr int PARTIAL = HEAD_SIZE + 2;            // floats: maximum, sum, mix
static_assert(HEAD_SIZE % 8 == 0 && LANES <= 32, "head size");

// A partial softmax: the sum of 2^(score - maximum), and the sum of the values with these weights.
struct Mix {
    float maximum, sum, values[8];
};

// The factor for sums relative to maximum `from` if the maximum becomes `to`; both may be minus infinity.
DEVICE float rescale(float from, float to) { return from == to ? 1.0f : exp2_fast(from - to); }

DEVICE void clear(Mix& mix) {
    mix.maximum = MINUS_INFINITY;
    mix.sum = 0.0f;
#pragma unroll
    for (int d = 0; d < 8; d++) mix.values[d] = 0.0f;
}

// Sets eight floats of a query, times the factor.
DEVICE void set_query(float (&query)[8], const float4& a, const float4& b, float factor) {
    query[0] = a.x * factor, query[1] = a.y * factor;
    query[2] = a.z * factor, query[3] = a.w * factor;
    query[4] = b.x * factor, query[5] = b.y * factor;
    query[6] = b.z * factor, query[7] = b.w * factor;
}

// Adds a tile to the group's mix; `inside(step)` is true for the positions that count.
template <int STEPS, class F>
DEVICE void mix_tile(Mix& mix, const float (&query)[8], const uint4 (&k)[STEPS],
                     const uint4 (&v)[STEPS], const F& inside) {
    float score[STEPS], maximum = mix.maximum;
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        float dot = query[0] * low_half(k[step].x);
        dot = fmaf(query[1], high_half(k[step].x), dot);
        dot = fmaf(query[2], low_half(k[step].y), dot);
        dot = fmaf(query[3], high_half(k[step].y), dot);
        dot = fmaf(query[4], low_half(k[step].z), dot);
        dot = fmaf(query[5], high_half(k[step].z), dot);
        dot = fmaf(query[6], low_half(k[step].w), dot);
        dot = fmaf(query[7], high_half(k[step].w), dot);
        dot = sum_lanes<LANES>(dot);
        score[step] = inside(step) ? dot : MINUS_INFINITY;
        maximum = fmaxf(maximum, score[step]);
    }
    const float before = rescale(mix.maximum, maximum);
    mix.maximum = maximum;
    mix.sum *= before;
#pragma unroll
    for (int d = 0; d < 8; d++) mix.values[d] *= before;
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        // A group whose positions all lie past the end has no maximum: its weights are 0.
        const float weight = score[step] == MINUS_INFINITY ? 0.0f : exp2_fast(score[step] - maximum);
        mix.sum += weight;
        mix.values[0] = fmaf(weight, low_half(v[step].x), mix.values[0]);
        mix.values[1] = fmaf(weight, high_half(v[step].x), mix.values[1]);
        mix.values[2] = fmaf(weight, low_half(v[step].y), mix.values[2]);
        mix.values[3] = fmaf(weight, high_half(v[step].y), mix.values[3]);
        mix.values[4] = fmaf(weight, low_half(v[step].z), mix.values[4]);
        mix.values[5] = fmaf(weight, high_half(v[step].z), mix.values[5]);
        mix.values[6] = fmaf(weight, low_half(v[step].w), mix.values[6]);
        mix.values[7] = fmaf(weight, high_half(v[step].w), mix.values[7]);
    }
}

// Merges the groups of a warp, and stores the warp's partial softmax in shared memory.
DEVICE void leave_partial(const Mix& mix, int lane, float (&partial)[PARTIAL]) {
    const int group = lane / LANES, sub = lane % LANES;
    float maximum = mix.maximum;
#pragma unroll
    for (int mask = 16; mask >= LANES; mask /= 2) maximum = fmaxf(maximum, exchange(maximum, mask));
    const float own = rescale(mix.maximum, maximum);
    float sum = mix.sum * own;
#pragma unroll
    for (int mask = 16; mask >= LANES; mask /= 2) sum += exchange(sum, mask);
#pragma unroll
    for (int d = 0; d < 8; d++) {
        float value = mix.values[d] * own;
#pragma unroll
        for (int mask = 16; mask >= LANES; mask /= 2) value += exchange(value, mask);
        if (group == 0 && sub < CHUNKS) partial[2 + sub * 8 + d] = value;
    }
    if (lane == 0) {
        partial[0] = maximum;
        partial[1] = sum;
    }
}

// One value of a merged partial softmax.
struct Merged {
    float maximum, sum, value;
};

// Merges value `d` of the first `count` partials, MOST at the most; `at(i)` is the i-th.
template <int MOST, class F> DEVICE Merged merge_first(int count, int d, const F& at) {
    Merged all{MINUS_INFINITY, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < MOST; i++)
        if (i < count) all.maximum = fmaxf(all.maximum, at(i)[0]);
#pragma unroll
    for (int i = 0; i < MOST; i++) {
        if (i >= count) continue;
        const float factor = rescale(at(i)[0], all.maximum);
        all.sum = fmaf(factor, at(i)[1], all.sum);
        all.value = fmaf(factor, at(i)[2 + d], all.value);
    }
    return all;
}

// Merges value `d` of COUNT partials; `at(i)` is the i-th.
template <int COUNT, class F> DEVICE Merged merge_partials(int d, const F& at) {
    Merged all;
    all.maximum = at(0)[0];
#pragma unroll
    for (int i = 1; i < COUNT; i++) all.maximum = fmaxf(all.maximum, at(i)[0]);
    all.sum = all.value = 0.0f;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        const float factor = rescale(at(i)[0], all.maximum);
        all.sum = fmaf(factor, at(i)[1], all.sum);
        all.value = fmaf(factor, at(i)[2 + d], all.value);
    }
    return all;
}
