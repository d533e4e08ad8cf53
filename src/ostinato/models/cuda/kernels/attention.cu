// Attention of each row over positions 0 to its own, of its sequence, split over blocks; with a window
// only over the last ones of these.
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
// One block alone writes the result itself.  The CLUSTER blocks of a cluster send what they found to the
// shared memory of the first of them, which merges it; where more than one cluster (or block, without
// clusters) worked, the last of them merges what all left in the workspace, in their order, and sets the
// counter back.  That costs a fence, an atomic and two ways to L2: 2.1 us a layer on an H100, more than
// all the rest.
//
// With ROUND_ATTENDED the result is bfloat16, for a product that reads it so; padding rows get zeros then.
#include "softmax.cuh"

#if ROUND_ATTENDED
typedef bf16 Attended;
DEVICE bf16 to_attended(float x) { return static_cast<bf16>(pack_bf16(x, 0.0f)); }
#else
typedef float Attended;
DEVICE float to_attended(float x) { return x; }
#endif

constexpr int QUERIES = ATTENTION_QUERIES;              // query heads of a block
constexpr int PARTS = HEADS / KV_HEADS / QUERIES;       // blocks that share a KV head
constexpr int WARPS = ATTENTION_WARPS, STEPS = ATTENTION_STEPS, SPLITS = ATTENTION_SPLITS;
constexpr int CLUSTER = ATTENTION_CLUSTER;              // blocks that merge by themselves
constexpr int TILE = WARPS * GROUPS * STEPS;            // positions of a block at once
constexpr int UNITS = SPLITS / CLUSTER;                 // clusters that share a head
constexpr int PASSES = 4;                               // tiles of a block before a second cluster
constexpr int BATCH = smaller(8, UNITS);                // partials that a merge asks for at once
// Whether `live`, and what earlier steps left in the cache, may be read before the wait: not if the
// previous kernel (norm_qkv_rope) lets this one start before its own wait.
constexpr bool EARLY = PREVIOUS_STARTS != AT_START;
static_assert(HEADS % KV_HEADS == 0 && HEADS / KV_HEADS % QUERIES == 0, "query heads");
static_assert(SPLITS % CLUSTER == 0, "clusters");

KERNEL __launch_bounds__(32 * WARPS)
    attention(const int* live, const float* q, const bf16* cache, Attended* attended, float* workspace,
              u32 row_count, u32 heads, u32 kv_heads, u32 head_size, u32 sequences, u32 context,
              u32 window, float scale) {
    DYNAMIC_SHARED(dynamic);
    auto shared = reinterpret_cast<float(*)[QUERIES][PARTIAL]>(dynamic);  // of warps
    auto sent = shared + WARPS;                                           // of blocks, and their bytes
    auto arrivals = reinterpret_cast<u64*>(sent + CLUSTER);
    __shared__ bool last;
    start_next_at<AT_START>();
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int group = lane / LANES, sub = lane % LANES;
    const int split = blockIdx.x, kv_head = blockIdx.y / PARTS, index = blockIdx.z;
    const int first_head = kv_head * (HEADS / KV_HEADS) + blockIdx.y % PARTS * QUERIES;

    if constexpr (!EARLY) wait_for_previous();
    const Row row = load_row(live, index);
    const int length = row.flags & ACTIVE ? row.position + 1 : 0;
    const int first = first_position(length, window);
    const int tiles = ceil_div(length - first, TILE);
    // A second cluster costs more than some more tiles in the first.
    const int most =
        CLUSTER == 1 ? SPLITS : CLUSTER * smaller(UNITS, ceil_div(tiles, CLUSTER * PASSES));
    const int span = ceil_div(tiles, larger(most, 1)) * TILE;
    const int blocks = length ? ceil_div(length - first, span) : 0;  // with work
    const int units = blocks == 1 ? 1 : ceil_div(blocks, CLUSTER);
    const int unit = split / CLUSTER;
    const int begin = first + split * span, end = smaller(begin + span, length);
    auto out = [&](int item) -> Attended& {
        const int at = first_head * HEAD_SIZE + item;
        return attended[rounded_at(ROWS, HEADS * HEAD_SIZE, index, at / 8) * 8 + at % 8];
    };
    // One block needs no others.  Else all blocks of a cluster stay for its barrier.
    if (blocks == 1 ? split > 0 : unit >= units) {
        if constexpr (EARLY) wait_for_previous();
        start_next_at<AFTER_WAIT>();
#if ROUND_ATTENDED
        if (length == 0 && split == 0)
            for (int item = thread; item < QUERIES * HEAD_SIZE; item += 32 * WARPS) out(item) = 0;
#endif
        return;
    }

    const int rank = split % CLUSTER, workers = smaller(CLUSTER, blocks - unit * CLUSTER);
    if constexpr (CLUSTER > 1) {
        if (blocks > 1) {
            if (thread == 0 && rank == 0) {
                begin_arrivals(arrivals);
                expect_bytes(arrivals, workers * static_cast<u32>(sizeof sent[0]));
            }
            arrive_at_cluster<CLUSTER>();
        }
    }
    const long long line = static_cast<long long>(row.sequence) * KV_HEADS + kv_head;
    const bf16* const keys = cache + line * context * HEAD_SIZE + sub * 8;
    const bf16* const values =
        cache + (static_cast<long long>(sequences) * KV_HEADS + line) * context * HEAD_SIZE + sub * 8;
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
        // other's, and nothing is read early; rows of states are of different sequences.
        const bool early = ROWS == 1 || row.flags & FROM_STATE;
        if (early) load_tile(begin, smaller(end, length - 1));
        wait_for_previous();
        start_next_at<AFTER_WAIT>();
        if (!early) {
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
        set_query(query[j], a, b, factor);
    }
    start_next_at<AFTER_INPUT>();

    Mix mix[QUERIES];
#pragma unroll
    for (int j = 0; j < QUERIES; j++) clear(mix[j]);
    for (int start = begin; start < end; start += TILE) {
        if (start != begin) load_tile(start, end);
#pragma unroll
        for (int j = 0; j < QUERIES; j++) {
            mix_tile<STEPS>(mix[j], query[j], k, v,
                            [&](int step) { return position_of(start, step) < end; });
        }
    }

    // Over the groups of the warp, and one partial a warp into shared memory.
#pragma unroll
    for (int j = 0; j < QUERIES; j++) leave_partial(mix[j], lane, shared[warp][j]);
    __syncthreads();
    start_next_at<BEFORE_OUTPUT>();

    // Over the warps; a thread a value.
    float* const partials = workspace + COUNTER_BYTES / sizeof(float);  // partials_of: more code
    auto partial_at = [&](int of_unit, int j) {
        const long long head = static_cast<long long>(index) * HEADS + first_head + j;
        return partials + (head * UNITS + of_unit) * PARTIAL;
    };
    // What a unit found: the result if it is the only one.
    auto deliver = [&](int item, float maximum, float sum, float value) {
        if (units == 1) {
            out(item) = to_attended(value / sum);
            return;
        }
        float* const to = partial_at(unit, item / HEAD_SIZE);
        to[2 + item % HEAD_SIZE] = value;
        if (item % HEAD_SIZE == 0) {
            to[0] = maximum;
            to[1] = sum;
        }
    };
    if constexpr (CLUSTER > 1) {
        if (blocks > 1) wait_for_cluster<CLUSTER>();  // until all blocks have begun
    }
    for (int item = thread; item < QUERIES * HEAD_SIZE; item += 32 * WARPS) {
        const int j = item / HEAD_SIZE, d = item % HEAD_SIZE;
        const Merged all = merge_partials<WARPS>(d, [&](int i) { return shared[i][j]; });
        if (CLUSTER == 1 || blocks == 1) {
            deliver(item, all.maximum, all.sum, all.value);
        } else if (rank < workers) {
            float* const to = sent[rank][j];
            send_to_block<CLUSTER>(to + 2 + d, arrivals, 0, all.value);
            if (d > 0) continue;
            send_to_block<CLUSTER>(to, arrivals, 0, all.maximum);
            send_to_block<CLUSTER>(to + 1, arrivals, 0, all.sum);
        }
    }
    if (blocks == 1) return;

    // Over the blocks of the cluster, in the first of them; a thread a value.
    if constexpr (CLUSTER > 1) {
        if (rank) return;
        wait_for_bytes(arrivals);
        for (int item = thread; item < QUERIES * HEAD_SIZE; item += 32 * WARPS) {
            const int j = item / HEAD_SIZE, d = item % HEAD_SIZE;
            float maximum = MINUS_INFINITY, sum = 0.0f, value = 0.0f;
#pragma unroll
            for (int i = 0; i < CLUSTER; i++)
                if (i < workers) maximum = fmaxf(maximum, sent[i][j][0]);
#pragma unroll
            for (int i = 0; i < CLUSTER; i++) {
                if (i >= workers) continue;
                const float factor_of = rescale(sent[i][j][0], maximum);
                sum = fmaf(factor_of, sent[i][j][1], sum);
                value = fmaf(factor_of, sent[i][j][2 + d], value);
            }
            deliver(item, maximum, sum, value);
        }
        if (units == 1) return;
    }

    // Over the units: the last one to come here merges.
    __threadfence();
    __syncthreads();
    if (thread == 0) {
        u32* counter = counters_of(workspace) + index * gridDim.y + blockIdx.y;
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
        out(item) = to_attended(value / sum);
    }
}
