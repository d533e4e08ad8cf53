// Attention of each row over positions 0 to its own, of its slot, split over blocks.
//
// Physics.  Keys and values of a head are read once for all query heads that share it: 4 * HEAD_SIZE
// bytes a position and KV head, which at short contexts is nothing; what counts is the chain
// q -> scores -> exponentials -> mix -> merge.  So a position is asked for by HEAD_SIZE / 8 lanes
// with 16 bytes each, all of a tile's keys and values at once and (but for the newest position,
// which the previous kernel writes) before the wait; every group of lanes keeps its own running
// maximum, sum and mix, and these are merged once at the end: over the lanes of a warp, over the
// warps of the block, over the blocks of a head.
//
// The grid is (SPLITS, kv heads * parts of their queries, rows), fixed by the longest context.  The
// live length is cut evenly into tiles over as many blocks as it needs; the others leave at once.
// One block alone writes the result itself.  The CLUSTER blocks of a cluster merge through each
// other's shared memory; where more than one cluster (or block, without clusters) worked, the last of
// them merges what all left in the workspace, in their order, and sets the counter back.  That costs
// a fence, an atomic and two ways to L2: 2.1 us a layer on an H100, more than all the rest.
#include "common.cuh"

constexpr int COUNTER_BYTES = 1 << 16;  // as in linear.cuh

constexpr int CHUNKS = HEAD_SIZE / 8;                   // lanes of a position
constexpr int LANES = power_of_two_above(CHUNKS);       // the same, with idle ones
constexpr int GROUPS = 32 / LANES;                      // positions that a warp reads at once
constexpr int QUERIES = ATTENTION_QUERIES;              // query heads of a block
constexpr int PARTS = HEADS / KV_HEADS / QUERIES;       // blocks that share a KV head
constexpr int WARPS = ATTENTION_WARPS, STEPS = ATTENTION_STEPS, SPLITS = ATTENTION_SPLITS;
constexpr int CLUSTER = ATTENTION_CLUSTER;              // blocks that merge by themselves
constexpr int TILE = WARPS * GROUPS * STEPS;            // positions of a block at once
constexpr int PARTIAL = HEAD_SIZE + 2;                  // floats: maximum, sum, mix
constexpr int UNITS = SPLITS / CLUSTER;                 // clusters that share a head
constexpr int PASSES = 4;                               // tiles of a block before a second cluster
constexpr int BATCH = smaller(8, UNITS);                // partials that a merge asks for at once
// Whether `live`, and what earlier steps left in the cache, may be read before the wait: not if the
// previous kernel (norm_qkv_rope) lets this one start before its own wait.
constexpr bool EARLY = PREVIOUS_STARTS != AT_START;
static_assert(HEADS % KV_HEADS == 0 && HEADS / KV_HEADS % QUERIES == 0, "query heads");
static_assert(HEAD_SIZE % 8 == 0 && LANES <= 32, "head size");
static_assert(SPLITS % CLUSTER == 0, "clusters");

#define MINUS_INFINITY __uint_as_float(0xff800000u)

// A partial softmax: sum of 2^(score - maximum), and that sum over the values.
struct Mix {
    float maximum, sum, values[8];
};

// Factor for what was summed under `from` when the maximum is `to`; both may be minus infinity.
DEVICE float rescale(float from, float to) { return from == to ? 1.0f : exp2_fast(from - to); }

KERNEL __launch_bounds__(32 * WARPS)
    attention(const int* live, const float* q, const bf16* cache, float* attended, float* workspace,
              u32 row_count, u32 heads, u32 kv_heads, u32 head_size, u32 slots, u32 context,
              float scale) {
    DYNAMIC_SHARED(dynamic);
    auto shared = reinterpret_cast<float(*)[QUERIES][PARTIAL]>(dynamic);  // [WARPS + 1]
    float(*const own)[PARTIAL] = shared[WARPS];                           // the block's, merged
    __shared__ bool last;
    start_next_at<AT_START>();
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int group = lane / LANES, sub = lane % LANES;
    const int split = blockIdx.x, kv_head = blockIdx.y / PARTS, index = blockIdx.z;
    const int first_head = kv_head * (HEADS / KV_HEADS) + blockIdx.y % PARTS * QUERIES;

    if constexpr (!EARLY) wait_for_previous();
    const Row row = load_row(live, index);
    const int length = row.flags & ACTIVE ? row.position + 1 : 0;
    const int tiles = ceil_div(length, TILE);
    // A second cluster costs more than some more tiles in the first.
    const int most =
        CLUSTER == 1 ? SPLITS : CLUSTER * smaller(UNITS, ceil_div(tiles, CLUSTER * PASSES));
    const int span = ceil_div(tiles, larger(most, 1)) * TILE;
    const int blocks = length ? ceil_div(length, span) : 0;  // with work
    const int units = blocks == 1 ? 1 : ceil_div(blocks, CLUSTER);
    const int unit = split / CLUSTER;
    const int begin = split * span, end = smaller(begin + span, length);
    // One block needs no others.  Else all blocks of a cluster stay for its barriers.
    if (blocks == 1 ? split > 0 : unit >= units) {
        if constexpr (EARLY) wait_for_previous();
        start_next_at<AFTER_WAIT>();
        return;
    }

    const long long line = static_cast<long long>(row.slot) * KV_HEADS + kv_head;
    const bf16* const keys = cache + line * context * HEAD_SIZE + sub * 8;
    const bf16* const values =
        cache + (static_cast<long long>(slots) * KV_HEADS + line) * context * HEAD_SIZE + sub * 8;
    const bool reads = sub < CHUNKS;
    uint4 k[STEPS], v[STEPS];
    // Positions of a tile go around: step, warp, group.  `newest`: only the row's own position.
    auto position_of = [&](int start, int step) {
        return start + (step * WARPS + warp) * GROUPS + group;
    };
    auto load_tile = [&](int start, int stop) {
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            const int position = position_of(start, step);
            k[step] = v[step] = make_uint4(0, 0, 0, 0);
            if (position < stop && reads) {
                const long long at = static_cast<long long>(position) * HEAD_SIZE;
                k[step] = load_fresh(reinterpret_cast<const uint4*>(keys + at));
                v[step] = load_fresh(reinterpret_cast<const uint4*>(values + at));
            }
        }
    };
    if constexpr (!EARLY) {
        start_next_at<AFTER_WAIT>();
        load_tile(begin, end);
    } else {
        // The newest position of each row is being written.  Rows of one piece of a prompt read each
        // other's: with more than one row nothing is read early.
        if constexpr (ROWS == 1) load_tile(begin, smaller(end, length - 1));
        wait_for_previous();
        start_next_at<AFTER_WAIT>();
        if constexpr (ROWS > 1) {
            load_tile(begin, end);
        } else if (end == length) {
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
                const int p = position_of(begin, step);
                if (p == length - 1 && reads) {
                    const long long at = static_cast<long long>(p) * HEAD_SIZE;
                    k[step] = load_fresh(reinterpret_cast<const uint4*>(keys + at));
                    v[step] = load_fresh(reinterpret_cast<const uint4*>(values + at));
                }
            }
        }
    }

    // Queries, times the scale and log2(e), so that the exponentials are powers of two.
    float query[QUERIES][8];
    const float factor = scale * 1.44269504f;
#pragma unroll
    for (int j = 0; j < QUERIES; j++) {
        float4 a = make_float4(0, 0, 0, 0), b = a;
        if (reads) {
            const float4* from = reinterpret_cast<const float4*>(
                q + (index * HEADS + first_head + j) * HEAD_SIZE + sub * 8);
            a = load_fresh(from);
            b = load_fresh(from + 1);
        }
        query[j][0] = a.x * factor, query[j][1] = a.y * factor;
        query[j][2] = a.z * factor, query[j][3] = a.w * factor;
        query[j][4] = b.x * factor, query[j][5] = b.y * factor;
        query[j][6] = b.z * factor, query[j][7] = b.w * factor;
    }
    start_next_at<AFTER_INPUT>();

    Mix mix[QUERIES];
#pragma unroll
    for (int j = 0; j < QUERIES; j++) {
        mix[j].maximum = MINUS_INFINITY;
        mix[j].sum = 0.0f;
#pragma unroll
        for (int d = 0; d < 8; d++) mix[j].values[d] = 0.0f;
    }
    for (int start = begin; start < end; start += TILE) {
        if (start != begin) load_tile(start, end);
#pragma unroll
        for (int j = 0; j < QUERIES; j++) {
            float score[STEPS], maximum = mix[j].maximum;
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
                float dot = query[j][0] * low_half(k[step].x);
                dot = fmaf(query[j][1], high_half(k[step].x), dot);
                dot = fmaf(query[j][2], low_half(k[step].y), dot);
                dot = fmaf(query[j][3], high_half(k[step].y), dot);
                dot = fmaf(query[j][4], low_half(k[step].z), dot);
                dot = fmaf(query[j][5], high_half(k[step].z), dot);
                dot = fmaf(query[j][6], low_half(k[step].w), dot);
                dot = fmaf(query[j][7], high_half(k[step].w), dot);
                dot = sum_lanes<LANES>(dot);
                score[step] = position_of(start, step) < end ? dot : MINUS_INFINITY;
                maximum = fmaxf(maximum, score[step]);
            }
            const float factor_before = rescale(mix[j].maximum, maximum);
            mix[j].maximum = maximum;
            mix[j].sum *= factor_before;
#pragma unroll
            for (int d = 0; d < 8; d++) mix[j].values[d] *= factor_before;
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
                // A group whose positions all lie past the end has no maximum, and no weight.
                const float weight =
                    score[step] == MINUS_INFINITY ? 0.0f : exp2_fast(score[step] - maximum);
                mix[j].sum += weight;
                mix[j].values[0] = fmaf(weight, low_half(v[step].x), mix[j].values[0]);
                mix[j].values[1] = fmaf(weight, high_half(v[step].x), mix[j].values[1]);
                mix[j].values[2] = fmaf(weight, low_half(v[step].y), mix[j].values[2]);
                mix[j].values[3] = fmaf(weight, high_half(v[step].y), mix[j].values[3]);
                mix[j].values[4] = fmaf(weight, low_half(v[step].z), mix[j].values[4]);
                mix[j].values[5] = fmaf(weight, high_half(v[step].z), mix[j].values[5]);
                mix[j].values[6] = fmaf(weight, low_half(v[step].w), mix[j].values[6]);
                mix[j].values[7] = fmaf(weight, high_half(v[step].w), mix[j].values[7]);
            }
        }
    }

    // Over the groups of the warp, and one partial a warp into shared memory.
#pragma unroll
    for (int j = 0; j < QUERIES; j++) {
        float maximum = mix[j].maximum;
#pragma unroll
        for (int mask = 16; mask >= LANES; mask /= 2) maximum = fmaxf(maximum, exchange(maximum, mask));
        const float own = rescale(mix[j].maximum, maximum);
        float sum = mix[j].sum * own;
#pragma unroll
        for (int mask = 16; mask >= LANES; mask /= 2) sum += exchange(sum, mask);
#pragma unroll
        for (int d = 0; d < 8; d++) {
            float value = mix[j].values[d] * own;
#pragma unroll
            for (int mask = 16; mask >= LANES; mask /= 2) value += exchange(value, mask);
            if (group == 0 && reads) shared[warp][j][2 + sub * 8 + d] = value;
        }
        if (lane == 0) {
            shared[warp][j][0] = maximum;
            shared[warp][j][1] = sum;
        }
    }
    __syncthreads();
    start_next_at<BEFORE_OUTPUT>();

    // Over the warps; a thread a value.
    float* const partials = workspace + COUNTER_BYTES / sizeof(float);
    auto partial_at = [&](int of_unit, int j) {
        const long long head = static_cast<long long>(index) * HEADS + first_head + j;
        return partials + (head * UNITS + of_unit) * PARTIAL;
    };
    float* const out = attended + (index * HEADS + first_head) * HEAD_SIZE;
    // What a unit found: the result if it is the only one.
    auto deliver = [&](int item, float maximum, float sum, float value) {
        if (units == 1) {
            out[item] = value / sum;
            return;
        }
        float* const to = partial_at(unit, item / HEAD_SIZE);
        to[2 + item % HEAD_SIZE] = value;
        if (item % HEAD_SIZE == 0) {
            to[0] = maximum;
            to[1] = sum;
        }
    };
    for (int item = thread; item < QUERIES * HEAD_SIZE; item += 32 * WARPS) {
        const int j = item / HEAD_SIZE, d = item % HEAD_SIZE;
        float maximum = shared[0][j][0];
#pragma unroll
        for (int i = 1; i < WARPS; i++) maximum = fmaxf(maximum, shared[i][j][0]);
        float sum = 0.0f, value = 0.0f;
#pragma unroll
        for (int i = 0; i < WARPS; i++) {
            const float factor_of = rescale(shared[i][j][0], maximum);
            sum = fmaf(factor_of, shared[i][j][1], sum);
            value = fmaf(factor_of, shared[i][j][2 + d], value);
        }
        if (CLUSTER == 1 || blocks == 1) {
            deliver(item, maximum, sum, value);
            continue;
        }
        own[j][2 + d] = value;
        if (d == 0) {
            own[j][0] = maximum;
            own[j][1] = sum;
        }
    }
    if (blocks == 1) return;

    // Over the blocks of the cluster; a thread a value, all blocks' threads share them.
    if constexpr (CLUSTER > 1) {
        sync_cluster<CLUSTER>();
        for (int item = split % CLUSTER * 32 * WARPS + thread; item < QUERIES * HEAD_SIZE;
             item += CLUSTER * 32 * WARPS) {
            const int j = item / HEAD_SIZE, d = item % HEAD_SIZE;
            float ones[CLUSTER], sums[CLUSTER], values[CLUSTER];
#pragma unroll
            for (int i = 0; i < CLUSTER; i++) {
                ones[i] = load_of_block<CLUSTER>(&own[j][0], i);
                sums[i] = load_of_block<CLUSTER>(&own[j][1], i);
                values[i] = load_of_block<CLUSTER>(&own[j][2 + d], i);
            }
            float maximum = ones[0];
#pragma unroll
            for (int i = 1; i < CLUSTER; i++) maximum = fmaxf(maximum, ones[i]);
            float sum = 0.0f, value = 0.0f;
#pragma unroll
            for (int i = 0; i < CLUSTER; i++) {
                const float factor_of = rescale(ones[i], maximum);
                sum = fmaf(factor_of, sums[i], sum);
                value = fmaf(factor_of, values[i], value);
            }
            deliver(item, maximum, sum, value);
        }
        if (units > 1) __threadfence();
        sync_cluster<CLUSTER>();  // nobody leaves while others read its memory
        if (units == 1 || split % CLUSTER) return;
    }

    // Over the units: the last one to come here merges.
    __threadfence();
    __syncthreads();
    if (thread == 0) {
        u32* counter = reinterpret_cast<u32*>(workspace) + index * gridDim.y + blockIdx.y;
        last = atomicAdd(counter, 1u) == static_cast<u32>(units - 1);
        if (last) *counter = 0;  // for the next layer
        __threadfence();
    }
    __syncthreads();
    if (!last) return;
    for (int item = thread; item < QUERIES * HEAD_SIZE; item += 32 * WARPS) {
        const int j = item / HEAD_SIZE, d = item % HEAD_SIZE;
        float maximum = MINUS_INFINITY, sum = 0.0f, value = 0.0f;
        // Asked for in batches: one by one each would cost a way to L2 and back.
        for (int start = 0; start < units; start += BATCH) {
            float ones[BATCH], sums[BATCH], values[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                const float* from = partial_at(smaller(start + i, units - 1), j);
                ones[i] = load_fresh(from);
                sums[i] = load_fresh(from + 1);
                values[i] = load_fresh(from + 2 + d);
            }
            float next = maximum;
#pragma unroll
            for (int i = 0; i < BATCH; i++) next = fmaxf(next, ones[i]);
            const float before = rescale(maximum, next);
            sum *= before;
            value *= before;
            maximum = next;
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                const float own = start + i < units ? rescale(ones[i], next) : 0.0f;
                sum = fmaf(own, sums[i], sum);
                value = fmaf(own, values[i], value);
            }
        }
        out[item] = value / sum;
    }
}
