// For one row: norm, queries, keys and values, rope, attention and the output projection, in one kernel.
// Data that three kernels would pass through L2 goes from block to block of a cluster.
//
// Physics.  In a small model these three kernels take 5 us of a layer's 8 us, while their weights are 2 MB,
// 0.6 us of memory time: the cost is hops (docs/performance.md) of 1.2 us and more each, of which 0.6 us are
// the end of a grid and the start of the next.  Between blocks of a cluster a hop is a store to the other
// block's shared memory, with a count of its bytes: one way, some 200 cycles.  So:
//
//   before the wait   loads all weights of the block to registers; keys and values of earlier positions
//   x -> shared memory, norm and dot -> rope -> q, k, v sent to the blocks that have positions
//   QK_NORM: these blocks apply norm and rope to the received heads, since a norm needs a whole head
//   each such block   attends to its own positions, and sends its partial result to all blocks
//   every block       merges the partial results, and computes its rows of W_o for the cluster's heads
//
// A cluster of CLUSTER blocks computes QUERIES query heads of one KV head.  Its part of the output projection
// is a sum over these heads, stored in the workspace, [UNITS, HIDDEN]; the next kernel that reads the
// residual adds the parts in their order (RESIDUAL_PARTS in linear.cuh).
//
// The previous kernel must be done with `live` when this one starts: in the first layer, where the previous
// kernel is `embed`, this one is launched without programmatic launch.  Cache entries that are read before
// the wait were written by earlier steps.
//
// Clusters need compute capability 9.0.
#include "linear.cuh"
#include "softmax.cuh"

constexpr int CLUSTER = BLOCK_CLUSTER, WARPS = BLOCK_WARPS, THREADS = 32 * WARPS;
constexpr int QUERIES = BLOCK_QUERIES, STEPS = BLOCK_STEPS;
constexpr int GROUP = HEADS / KV_HEADS, UNIT_PARTS = GROUP / QUERIES;
static_assert(GROUP % QUERIES == 0, "query heads");

// The first product: PAIR_LANES lanes share a pair of rows; a block's pairs are consecutive.
constexpr int PAIR_LANES = BLOCK_LANES, PAIR_GROUPS = WARPS * (32 / PAIR_LANES);
constexpr int HALF = HEAD_SIZE / 2, PAIRS = (QUERIES + 2) * HALF;
constexpr int BLOCK_PAIRS = ceil_div(PAIRS, CLUSTER), PAIR_TURNS = ceil_div(BLOCK_PAIRS, PAIR_GROUPS);
constexpr int PAIR_CHUNKS = HIDDEN / 8, PAIR_STEPS = ceil_div(PAIR_CHUNKS, PAIR_LANES);
// The second product: ROW_LANES lanes share a row.
constexpr int WIDTH = QUERIES * HEAD_SIZE, ROW_LANES = BLOCK_OUTPUT_LANES;
constexpr int ROW_GROUPS = WARPS * (32 / ROW_LANES), BLOCK_ROWS = ceil_div(HIDDEN, CLUSTER);
constexpr int ROW_TURNS = ceil_div(BLOCK_ROWS, ROW_GROUPS);
constexpr int ROW_CHUNKS = WIDTH / 8, ROW_STEPS = ceil_div(ROW_CHUNKS, ROW_LANES);
// Vectors in shared memory, as in matvec.cu: [first or second half of a chunk][chunk].
constexpr int QUADS = HIDDEN / 4, STAGES = ceil_div(QUADS, THREADS);
constexpr int INPUT_STRIDE = round_up(PAIR_CHUNKS, 8) + 4, MIXED_STRIDE = round_up(ROW_CHUNKS, 8) + 4;
constexpr int TILE = WARPS * GROUPS * STEPS;  // positions of a block at once

// Dynamic shared memory; shapes.py computes the same size.
struct alignas(16) Shared {
    float4 input[2][INPUT_STRIDE];
    float4 mixed[2][MIXED_STRIDE];                  // the attention's result for the cluster's heads
    float fresh[QUERIES + 2][HEAD_SIZE];            // this position's queries, key and value
    float partials[CLUSTER][QUERIES][PARTIAL];      // partial results of the cluster's blocks
    float of_warps[WARPS][QUERIES][PARTIAL];
    u64 arrivals[2];                                // counts: of q, k and v; of partials or the result
    float squares[WARPS];
};

// The address of value `item` of the attention's result in `mixed`.
DEVICE float* mixed_at(Shared& shared, int item) {
    return reinterpret_cast<float*>(&shared.mixed[item / 4 % 2][item / 8]) + item % 4;
}

KERNEL __launch_bounds__(THREADS)
    attention_block(const int* live, const float* x, const float* norm, const bf16* weight,
                    const float* bias, const float* q_norm, const float* k_norm, const float* rope,
                    bf16* cache, const bf16* output_weight, float* workspace, u32 row_count,
                    u32 hidden, u32 heads, u32 kv_heads, u32 head_size, u32 sequences, u32 context,
                    u32 window, float epsilon, float scale) {
    DYNAMIC_SHARED(dynamic);
    Shared& shared = *reinterpret_cast<Shared*>(dynamic);
    start_next_at<AT_START>();
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int rank = blockIdx.x, unit = blockIdx.y, kv_head = unit / UNIT_PARTS;
    const int first_head = kv_head * GROUP + unit % UNIT_PARTS * QUERIES;

    // Weights of the first product.  A pair is dimensions i and i + HALF of a head.
    const int pair_group = thread / PAIR_LANES, pair_sub = thread % PAIR_LANES;
    auto pair_of = [&](int turn) { return turn * PAIR_GROUPS + pair_group; };  // within the block
    uint4 w[PAIR_TURNS][PAIR_STEPS][2];
    float2 added[QKV_BIAS ? PAIR_TURNS : 1];
#pragma unroll
    for (int turn = 0; turn < PAIR_TURNS; turn++) {
        const int pair = smaller(rank * BLOCK_PAIRS + smaller(pair_of(turn), BLOCK_PAIRS - 1), PAIRS - 1);
        const int local = pair / HALF;
        const int head = local < QUERIES ? first_head + local
                                         : HEADS + (local - QUERIES) * KV_HEADS + kv_head;
        const int output = head * HEAD_SIZE + pair % HALF;
        const bf16* const row = weight + static_cast<long long>(output) * HIDDEN;
        if constexpr (QKV_BIAS)
            added[turn] = make_float2(load_fresh(bias + output), load_fresh(bias + output + HALF));
#pragma unroll
        for (int step = 0; step < PAIR_STEPS; step++) {
            const int chunk = step * PAIR_LANES + pair_sub;
            const bool there = PAIR_CHUNKS % PAIR_LANES == 0 || chunk < PAIR_CHUNKS;
#pragma unroll
            for (int which = 0; which < 2; which++) {
                w[turn][step][which] =
                    there ? load_weights(row + which * HALF * HIDDEN + chunk * 8)
                          : make_uint4(0, 0, 0, 0);
            }
        }
    }
    float4 norms[STAGES];
#pragma unroll
    for (int i = 0; i < STAGES; i++) {
        const int quad = i * THREADS + thread;
        if (quad < QUADS) norms[i] = load_norm(reinterpret_cast<const float4*>(norm) + quad);
    }

    const Row row = load_row(live, 0);
    if (!(row.flags & ACTIVE)) {
        wait_for_previous();
        start_next_at<AFTER_WAIT>();
        return;
    }
    // The row's positions are split evenly, in whole tiles, over as many blocks as they need.
    const int newest = row.position, length = newest + 1;
    const int first = first_position(length, window);
    const int span = ceil_div(ceil_div(length - first, TILE), CLUSTER) * TILE;
    const int blocks = ceil_div(length - first, span);
    const int begin = first + rank * span, end = smaller(begin + span, length);
    if (thread == 0) {
        begin_arrivals(&shared.arrivals[0]);
        begin_arrivals(&shared.arrivals[1]);
        if (rank < blocks) expect_bytes(&shared.arrivals[0], sizeof shared.fresh);
        expect_bytes(&shared.arrivals[1],
                     blocks == 1 ? WIDTH * 4 : blocks * static_cast<u32>(sizeof shared.partials[0]));
    }
    arrive_at_cluster<CLUSTER>();
    const int group = lane / LANES, sub = lane % LANES;
    const long long line = static_cast<long long>(row.sequence) * KV_HEADS + kv_head;
    const long long all_keys = static_cast<long long>(sequences) * KV_HEADS * context * HEAD_SIZE;
    bf16* const keys = cache + line * context * HEAD_SIZE;
    bf16* const values = keys + all_keys;
    uint4 k[STEPS], v[STEPS];
    auto position_of = [&](int start, int step) {
        return start + (step * WARPS + warp) * GROUPS + group;
    };
    auto load_tile = [&](int start) {  // except for the newest position
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            const int position = position_of(start, step);
            k[step] = v[step] = make_uint4(0, 0, 0, 0);
            if (position < end && position < newest && sub < CHUNKS) {
                const long long at = static_cast<long long>(position) * HEAD_SIZE + sub * 8;
                k[step] = load_fresh(reinterpret_cast<const uint4*>(keys + at));
                v[step] = load_fresh(reinterpret_cast<const uint4*>(values + at));
            }
        }
    };
    load_tile(begin);
    float2 turned[PAIR_TURNS];  // cosine and sine; values are not rotated
#pragma unroll
    for (int turn = 0; turn < PAIR_TURNS; turn++) {
        const int pair = rank * BLOCK_PAIRS + pair_of(turn);
        turned[turn] = make_float2(1.0f, 0.0f);
        if (!QK_NORM && pair < (QUERIES + 1) * HALF) {
            const float* at = rope + static_cast<long long>(newest) * HEAD_SIZE + pair % HALF;
            turned[turn] = make_float2(load_fresh(at), load_fresh(at + HALF));  // not moved by the compiler
        }
    }
    // For QK_NORM: a warp has a head, a lane every 32nd pair of it.
    constexpr int LANE_PAIRS = QK_NORM ? ceil_div(HALF, 32) : 1;
    float2 head_turn[LANE_PAIRS], head_norm[2][LANE_PAIRS];  // norms: of queries, of keys
    if constexpr (QK_NORM) {
#pragma unroll
        for (int i = 0; i < LANE_PAIRS; i++) {
            const int pair = smaller(i * 32 + lane, HALF - 1);
            const float* at = rope + static_cast<long long>(newest) * HEAD_SIZE + pair;
            head_turn[i] = make_float2(load_fresh(at), load_fresh(at + HALF));
            head_norm[0][i] = make_float2(load_fresh(q_norm + pair), load_fresh(q_norm + pair + HALF));
            head_norm[1][i] = make_float2(load_fresh(k_norm + pair), load_fresh(k_norm + pair + HALF));
        }
    }
    // Weights of the second product.
    const int row_group = thread / ROW_LANES, row_sub = thread % ROW_LANES;
    auto row_of = [&](int turn) { return turn * ROW_GROUPS + row_group; };  // within the block
    uint4 o[ROW_TURNS][ROW_STEPS];
#pragma unroll
    for (int turn = 0; turn < ROW_TURNS; turn++) {
        const int at =
            smaller(rank * BLOCK_ROWS + smaller(row_of(turn), BLOCK_ROWS - 1), HIDDEN - 1);
        const bf16* const from =
            output_weight + static_cast<long long>(at) * HEADS * HEAD_SIZE + first_head * HEAD_SIZE;
#pragma unroll
        for (int step = 0; step < ROW_STEPS; step++) {
            const int chunk = step * ROW_LANES + row_sub;
            o[turn][step] = ROW_CHUNKS % ROW_LANES == 0 || chunk < ROW_CHUNKS
                                ? load_weights(from + chunk * 8)
                                : make_uint4(0, 0, 0, 0);
        }
    }

    wait_for_previous();
    start_next_at<AFTER_WAIT>();

    // Copy the residual, times the norm's weights, to shared memory, and add up its squares.
    float4 in[STAGES];
#pragma unroll
    for (int i = 0; i < STAGES; i++) {
        const int quad = i * THREADS + thread;
        if (quad < QUADS) in[i] = load_fresh(reinterpret_cast<const float4*>(x) + quad);
    }
    float square = 0.0f;
#pragma unroll
    for (int i = 0; i < STAGES; i++) {
        const int quad = i * THREADS + thread;
        if (quad < QUADS) {
            const float4 a = in[i], n = norms[i];
            square += a.x * a.x + a.y * a.y + a.z * a.z + a.w * a.w;
            shared.input[quad % 2][quad / 2] =
                make_float4(a.x * n.x, a.y * n.y, a.z * n.z, a.w * n.w);
        }
    }
    square = sum_lanes<32>(square);
    if (lane == 0) shared.squares[warp] = square;
    __syncthreads();
    start_next_at<AFTER_INPUT>();
    const float normed = norm_factor<WARPS, HIDDEN>(shared.squares, epsilon);

    wait_for_cluster<CLUSTER>();
#pragma unroll
    for (int turn = 0; turn < PAIR_TURNS; turn++) {
        float sums[2][2] = {};
#pragma unroll
        for (int step = 0; step < PAIR_STEPS; step++) {
            const int chunk = step * PAIR_LANES + pair_sub;
            float4 a = make_float4(0, 0, 0, 0), b = a;
            if (PAIR_CHUNKS % PAIR_LANES == 0 || chunk < PAIR_CHUNKS)
                a = shared.input[0][chunk], b = shared.input[1][chunk];
#pragma unroll
            for (int which = 0; which < 2; which++)
                dot8(sums[which][0], sums[which][1], w[turn][step][which], a, b);
        }
        float s0 = sum_lanes<PAIR_LANES>(sums[0][0] + sums[0][1]) * normed;
        float s1 = sum_lanes<PAIR_LANES>(sums[1][0] + sums[1][1]) * normed;
        if constexpr (QKV_BIAS) {
            s0 += added[turn].x;
            s1 += added[turn].y;
        }
        const int pair = rank * BLOCK_PAIRS + pair_of(turn);
        if (pair_of(turn) >= BLOCK_PAIRS || pair >= PAIRS) continue;
        const float left = s0 * turned[turn].x - s1 * turned[turn].y;
        const float right = s1 * turned[turn].x + s0 * turned[turn].y;
        const int local = pair / HALF, i = pair % HALF;
        for (int to = pair_sub; to < blocks; to += PAIR_LANES) {
            send_to_block<CLUSTER>(&shared.fresh[local][i], &shared.arrivals[0], to, left);
            send_to_block<CLUSTER>(&shared.fresh[local][i + HALF], &shared.arrivals[0], to, right);
        }
        // One cluster of each KV head writes the cache.
        if (!QK_NORM && local >= QUERIES && pair_sub == 0 && unit % UNIT_PARTS == 0) {
            bf16* const to = (local == QUERIES ? keys : values) +
                             static_cast<long long>(newest) * HEAD_SIZE + i;
            to[0] = to_bf16(left);
            to[HALF] = to_bf16(right);
        }
    }

    if (rank < blocks) {
        wait_for_bytes(&shared.arrivals[0]);
        if constexpr (QK_NORM) {
            for (int of = warp; of < QUERIES + 1; of += WARPS) {
                float* const head = shared.fresh[of];
                float a[LANE_PAIRS], b[LANE_PAIRS], square = 0.0f;
#pragma unroll
                for (int i = 0; i < LANE_PAIRS; i++) {
                    const int pair = i * 32 + lane;
                    const bool there = pair < HALF;
                    a[i] = there ? head[pair] : 0.0f;
                    b[i] = there ? head[pair + HALF] : 0.0f;
                    square += a[i] * a[i] + b[i] * b[i];
                }
                const float scale_of = rsqrtf(sum_lanes<32>(square) * (1.0f / HEAD_SIZE) + epsilon);
#pragma unroll
                for (int i = 0; i < LANE_PAIRS; i++) {
                    const float2 turn = head_turn[i];
                    const float2 weights = of == QUERIES ? head_norm[1][i] : head_norm[0][i];
                    const float left = a[i] * scale_of * weights.x;
                    const float right = b[i] * scale_of * weights.y;
                    if (i * 32 + lane >= HALF) break;
                    head[i * 32 + lane] = left * turn.x - right * turn.y;
                    head[i * 32 + lane + HALF] = right * turn.x + left * turn.y;
                }
            }
            __syncthreads();
            if (rank == 0 && unit % UNIT_PARTS == 0) {
                for (int i = thread; i < 2 * HEAD_SIZE; i += THREADS) {
                    const int part = i / HEAD_SIZE, d = i % HEAD_SIZE;
                    bf16* const to = part ? values : keys;
                    to[static_cast<long long>(newest) * HEAD_SIZE + d] =
                        to_bf16(shared.fresh[QUERIES + part][d]);
                }
            }
        }
        float query[QUERIES][8];
        Mix mix[QUERIES];
#pragma unroll
        for (int j = 0; j < QUERIES; j++) {
            float4 a = make_float4(0, 0, 0, 0), b = a;
            if (sub < CHUNKS) {
                const float4* from = reinterpret_cast<const float4*>(shared.fresh[j]) + sub * 2;
                a = from[0], b = from[1];
            }
            set_query(query[j], a, b, scale * 1.44269504f);
            clear(mix[j]);
        }
        for (int start = begin; start < end; start += TILE) {
            if (start != begin) load_tile(start);
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
                // Rounded as in the cache, so that later steps use the same values.
                if (position_of(start, step) == newest && sub < CHUNKS) {
                    auto rounded = [&](int of) {
                        const float4* from =
                            reinterpret_cast<const float4*>(shared.fresh[of]) + sub * 2;
                        return pack_eight(from[0], from[1]);
                    };
                    k[step] = rounded(QUERIES);
                    v[step] = rounded(QUERIES + 1);
                }
            }
#pragma unroll
            for (int j = 0; j < QUERIES; j++) {
                mix_tile<STEPS>(mix[j], query[j], k, v,
                                [&](int step) { return position_of(start, step) < end; });
            }
        }
#pragma unroll
        for (int j = 0; j < QUERIES; j++) leave_partial(mix[j], lane, shared.of_warps[warp][j]);
        __syncthreads();
        for (int item = thread; item < WIDTH; item += THREADS) {
            const int j = item / HEAD_SIZE, d = item % HEAD_SIZE;
            const Merged all = merge_partials<WARPS>(d, [&](int i) { return shared.of_warps[i][j]; });
            if (blocks == 1) {  // this block has all positions
                const float value = all.value / all.sum;
                for (int to = 0; to < CLUSTER; to++)
                    send_to_block<CLUSTER>(mixed_at(shared, item), &shared.arrivals[1], to, value);
                continue;
            }
            float* const own = shared.partials[rank][j];
            for (int to = 0; to < CLUSTER; to++) {
                send_to_block<CLUSTER>(own + 2 + d, &shared.arrivals[1], to, all.value);
                if (d > 0) continue;
                send_to_block<CLUSTER>(own, &shared.arrivals[1], to, all.maximum);
                send_to_block<CLUSTER>(own + 1, &shared.arrivals[1], to, all.sum);
            }
        }
    }
    wait_for_bytes(&shared.arrivals[1]);  // the last bytes that are sent to this block
    if (blocks > 1) {
        for (int item = thread; item < WIDTH; item += THREADS) {
            const int j = item / HEAD_SIZE, d = item % HEAD_SIZE;
            // Blocks without positions are left out; their partials hold arbitrary data.
            const Merged all = merge_first<CLUSTER>(blocks, d, [&](int i) { return shared.partials[i][j]; });
            *mixed_at(shared, item) = all.value / all.sum;
        }
        __syncthreads();
    }
    start_next_at<BEFORE_OUTPUT>();

    float* const out = partials_of(workspace) + unit * HIDDEN;
#pragma unroll
    for (int turn = 0; turn < ROW_TURNS; turn++) {
        float even = 0.0f, odd = 0.0f;
#pragma unroll
        for (int step = 0; step < ROW_STEPS; step++) {
            const int chunk = step * ROW_LANES + row_sub;
            if (ROW_CHUNKS % ROW_LANES == 0 || chunk < ROW_CHUNKS)
                dot8(even, odd, o[turn][step], shared.mixed[0][chunk], shared.mixed[1][chunk]);
        }
        const float sum = sum_lanes<ROW_LANES>(even + odd);
        const int at = rank * BLOCK_ROWS + row_of(turn);
        if (row_sub == 0 && row_of(turn) < BLOCK_ROWS && at < HIDDEN) out[at] = sum;
    }
}
