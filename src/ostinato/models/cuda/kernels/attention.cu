// Attention of each row over the positions of its sequence from 0 (with a window: from the window's begin) to
// its own, split over blocks.
//
// Physics.  Keys and values of a head are read once for all query heads of a block: 4 * HEAD_SIZE bytes for
// each position and KV head.  At short contexts that is little, and latency is that of the chain q -> scores
// -> exponentials -> mix -> merge; at long contexts of many rows the reads dominate.  So a warp issues the
// loads of all keys and values of a tile at once, before the wait (except for the newest position, which the
// previous kernel writes), and keeps its own partial softmax.  These are merged once at the end: over the
// warps of the block, then over the blocks of a head.  A warp multiplies on the tensor cores
// (tile_softmax.cuh), or, with ATTENTION_TILED 0, with lanes that hold a part of a position each
// (softmax.cuh).
//
// A row's positions are split evenly over one block for each PASSES tiles, at most SPLITS blocks.  The split,
// and with it every bit of the result, depends on the row's length alone.  The grid is (SPLITS, kv heads *
// parts of their queries, rows), fixed by the longest context, and blocks that a row does not need exit at
// once.  With SHARES_ROWS the grid has as many blocks as the device holds (or one for each row and head, if
// that is more), and these share the work of all rows, so that no block has a long row to itself.
//
// If a single block has all positions, it writes the result.  The CLUSTER blocks of a cluster send their
// partial results to the shared memory of the first of them, which merges them.  If several clusters (or
// blocks, without clusters) worked on a row, the last to finish merges the partial results in the workspace,
// in their order, and resets the counter.  That costs a fence, an atomic and two round trips to L2: 2.1 us a
// layer on an H100, more than everything else.
//
// With ROUND_ATTENDED the result is bfloat16 for the next product, and padding rows are set to zero.
#include "tile_softmax.cuh"

#ifndef ROUND_ATTENDED
#define ROUND_ATTENDED 0
#endif

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
constexpr int CLUSTER = ATTENTION_CLUSTER;              // blocks that merge through shared memory
constexpr int UNITS = SPLITS / CLUSTER;                 // clusters that share a head
constexpr int PASSES = ATTENTION_PASSES;                // tiles of a block before another unit is used
constexpr int RESIDENT = ATTENTION_RESIDENT;            // blocks of a multiprocessor that share all rows
// True if blocks take shares of any row.
#define SHARES_ROWS (ATTENTION_RESIDENT && ATTENTION_SPLITS > 1)
constexpr int BATCH = smaller(SHARES_ROWS ? 4 : 8, UNITS);  // partials that a merge loads at once
// True if `live` and cache entries of earlier steps may be read before the wait: not if the previous kernel
// (norm_qkv_rope) lets this one start before its own wait.
constexpr bool EARLY = PREVIOUS_STARTS != AT_START;
static_assert(HEADS % KV_HEADS == 0 && HEADS / KV_HEADS % QUERIES == 0, "query heads");
static_assert(SPLITS % CLUSTER == 0 && (CLUSTER == 1 || !SHARES_ROWS), "clusters");
static_assert(!SHARES_ROWS || (ATTENTION_TILED && ROWS <= 64), "a list of shares");
static_assert(!ATTENTION_TILED || ROUND_ATTENDED, "tiles are for results that are rounded");

// Like TileMix, without tensor cores.
struct LaneMix {
    static constexpr int POSITIONS = GROUPS * STEPS, STRIDE = WARPS * POSITIONS;

    const bf16 *keys, *values;
    int group, sub, lane;
    uint4 k[STEPS], v[STEPS];
    float query[QUERIES][8];
    Mix mix[QUERIES];

    DEVICE explicit LaneMix(int lane) : group(lane / LANES), sub(lane % LANES), lane(lane) {}

    DEVICE void turn_to(const bf16* of_keys, const bf16* of_values) {
        keys = of_keys + sub * 8;
        values = of_values + sub * 8;
    }
    DEVICE void clear() {
#pragma unroll
        for (int j = 0; j < QUERIES; j++) ::clear(mix[j]);
    }
    DEVICE int position_of(int start, int step) const { return start + step * GROUPS + group; }
    DEVICE void ask(int start, int end) {
        const long long at = static_cast<long long>(start + group) * HEAD_SIZE;
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            k[step] = v[step] = make_uint4(0, 0, 0, 0);
            if (position_of(start, step) < end && sub < CHUNKS) {
                k[step] = load_fresh(reinterpret_cast<const uint4*>(keys + at + step * GROUPS * HEAD_SIZE));
                v[step] = load_fresh(reinterpret_cast<const uint4*>(values + at + step * GROUPS * HEAD_SIZE));
            }
        }
    }
    DEVICE void ask_for(int start, int position) {
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            if (position_of(start, step) == position && sub < CHUNKS) {
                const long long at = static_cast<long long>(position) * HEAD_SIZE;
                k[step] = load_fresh(reinterpret_cast<const uint4*>(keys + at));
                v[step] = load_fresh(reinterpret_cast<const uint4*>(values + at));
            }
        }
    }
    DEVICE void set_queries(const float* q, float factor, bool there) {
#pragma unroll
        for (int j = 0; j < QUERIES; j++) {
            float4 a = make_float4(0, 0, 0, 0), b = a;
            if (there && sub < CHUNKS) {
                const float4* from = reinterpret_cast<const float4*>(q + j * HEAD_SIZE + sub * 8);
                a = load_fresh(from);
                b = load_fresh(from + 1);
            }
            set_query(query[j], a, b, factor);
        }
    }
    DEVICE void over(int start, int, int end) {
        for (int at = start; at < end; at += STRIDE) {
            if (at != start) ask(at, end);
#pragma unroll
            for (int j = 0; j < QUERIES; j++)
                mix_tile<STEPS>(mix[j], query[j], k, v,
                                [&](int step) { return position_of(at, step) < end; });
        }
    }
    DEVICE void leave(float (*partials)[PARTIAL]) const {
#pragma unroll
        for (int j = 0; j < QUERIES; j++) leave_partial(mix[j], lane, partials[j]);
    }
};

#if ATTENTION_TILED
typedef TileMix<QUERIES, STEPS, WARPS> WarpMix;
#else
typedef LaneMix WarpMix;
#endif
constexpr int TILE = WarpMix::STRIDE;  // positions of a block at once

// The split of a row's positions.
struct Spans {
    int first, length;  // the row attends to positions from `first` to `length` - 1
    int span, blocks;   // positions of a block, and the number of blocks that have any

    DEVICE static int length_of(const Row& row) { return row.flags & ACTIVE ? row.position + 1 : 0; }
    // True if more than one block has positions of the row (without clusters).
    DEVICE static bool is_cut(const Row& row, u32 window) {
        const int length = length_of(row);
        return length - first_position(length, window) > PASSES * TILE;
    }
    DEVICE Spans(const Row& row, u32 window) {
        length = length_of(row);
        first = first_position(length, window);
        const int tiles = ceil_div(length - first, TILE);
        // Another unit costs more than some more tiles in the first.
        const int most = CLUSTER * smaller(UNITS, ceil_div(tiles, CLUSTER * PASSES));
        span = ceil_div(tiles, larger(most, 1)) * TILE;
        blocks = length ? ceil_div(length - first, span) : 0;
    }
    DEVICE int units() const { return blocks == 1 ? 1 : ceil_div(blocks, CLUSTER); }
};

// A share: positions from `begin` to `end` of row `index`, for a part of its query heads.  A block computes one
// share at a time.
struct Share {
    int index, part, split, sequence, length, blocks, units, begin, end;

    DEVICE static Share of(const Row& row, u32 window, int index, int part, int split) {
        const Spans spans(row, window);
        const int begin = spans.first + split * spans.span;
        return {index, part, split, row.sequence, spans.length, spans.blocks, spans.units(), begin,
                smaller(begin + spans.span, spans.length)};
    }
    DEVICE int kv_head() const { return part / PARTS; }
    DEVICE int first_head() const { return kv_head() * (HEADS / KV_HEADS) + part % PARTS * QUERIES; }
    DEVICE int unit() const { return split / CLUSTER; }
    // True if the block may exit.  All blocks of a cluster stay for its barrier if the row has several blocks.
    DEVICE bool idle() const { return blocks == 1 ? split > 0 : unit() >= units; }
    // True if the first warp has all positions of the row.
    DEVICE bool of_one_warp() const { return ATTENTION_TILED && blocks == 1 && end - begin <= WarpMix::POSITIONS; }
};

struct Attention {
    const float* q;
    const bf16* cache;
    Attended* attended;
    float* workspace;
    int sequences, context;
    float scale;

    // The address of a value of the result; eight adjacent values are contiguous.
    DEVICE Attended* out(const Share& share, int item) const {
        const int at = share.first_head() * HEAD_SIZE + item;
        return attended + rounded_at(ROWS, HEADS * HEAD_SIZE, share.index, at / 8) * 8 + at % 8;
    }
    DEVICE float* partial_at(const Share& share, int unit, int query) const {
        float* const partials = workspace + COUNTER_BYTES / sizeof(float);  // partials_of compiles to more code
        const long long head = static_cast<long long>(share.index) * HEADS + share.first_head() + query;
        return partials + (head * UNITS + unit) * PARTIAL;
    }

    DEVICE void fill(const Share& share) const {
#if ROUND_ATTENDED
        if (share.length == 0 && share.split == 0)
            for (int item = threadIdx.x; item < QUERIES * HEAD_SIZE; item += 32 * WARPS)
                *out(share, item) = 0;
#endif
    }

    DEVICE void turn_to(WarpMix& mix, const Share& share) const {
        const long long line = static_cast<long long>(share.sequence) * KV_HEADS + share.kv_head();
        const long long values_after = static_cast<long long>(sequences) * KV_HEADS;  // lines
        mix.turn_to(cache + line * context * HEAD_SIZE, cache + (values_after + line) * context * HEAD_SIZE);
    }
    // Called before the wait for the previous kernel, which writes the newest position of each row: issues the
    // loads of the warp's first tile, except for that position.  Rows of a piece of a prompt read each other's
    // newest positions, so nothing is loaded for them; rows of states belong to different sequences.  Returns
    // true if the loads were issued.
    DEVICE bool begin_early(WarpMix& mix, const Share& share, u32 flags) const {
        if (!EARLY || !(ROWS == 1 || flags & FROM_STATE)) return false;
        turn_to(mix, share);
        mix.ask(own_of(share), smaller(share.end, share.length - 1));
        return true;
    }
    // Called after the wait: issues the loads that `begin_early` left out.
    DEVICE void begin(WarpMix& mix, const Share& share, bool early = false) const {
        if (!early) {
            turn_to(mix, share);
            mix.ask(own_of(share), share.end);
        } else if (share.end == share.length) {
            mix.ask_for(own_of(share), share.length - 1);
        }
    }
    // Loads the queries of a share and clears the warp's partial softmax.
    DEVICE void prepare(WarpMix& mix, const Share& share, bool there = true) const {
        // The scale and log2(e), so that the exponentials are powers of two.
        mix.set_queries(q + (share.index * HEADS + share.first_head()) * HEAD_SIZE, scale * 1.44269504f, there);
        start_next_at<AFTER_INPUT>();
        mix.clear();
    }
    DEVICE static int own_of(const Share& share) {
        return share.begin + uniform(threadIdx.x / 32) * WarpMix::POSITIONS;
    }

    // Stores a unit's partial result, or the final result if the row has only one unit.
    DEVICE void deliver(const Share& share, int item, float maximum, float sum, float value) const {
        if (share.units == 1) {
            *out(share, item) = to_attended(value / sum);
            return;
        }
        float* const to = partial_at(share, share.unit(), item / HEAD_SIZE);
        to[2 + item % HEAD_SIZE] = value;
        if (item % HEAD_SIZE == 0) {
            to[0] = maximum;
            to[1] = sum;
        }
    }
    // Stores the result of a warp that had all positions.
    template <class MIX> DEVICE void deliver_whole(const Share& share, const MIX& mix) const {
        mix.deliver([&](int query, int chunk) { return out(share, query * HEAD_SIZE + chunk * 8); });
    }

    // Called by one thread after all threads of the block have delivered.  `arrive` returns the number of units
    // that arrived before; `is_last` is true if these are all others.
    DEVICE u32 arrive(const Share& share) const {
        __threadfence();
        return atomicAdd(counter_of(share), 1u);
    }
    DEVICE bool is_last(const Share& share, u32 arrived) const {
        const bool last = arrived == static_cast<u32>(share.units - 1);
        if (last) *counter_of(share) = 0;  // for the next layer
        __threadfence();
        return last;
    }
    DEVICE u32* counter_of(const Share& share) const {
        return counters_of(workspace) + share.index * (KV_HEADS * PARTS) + share.part;
    }
    // Merges the partial results.  Called by all threads of the block that arrived last, after a barrier.
    DEVICE void merge_units(const Share& share) const {
        const int units = share.units;
        for (int item = threadIdx.x; item < QUERIES * HEAD_SIZE; item += 32 * WARPS) {
            const int j = item / HEAD_SIZE, d = item % HEAD_SIZE;
            float maximum = MINUS_INFINITY, sum = 0.0f, value = 0.0f;
            // Loaded in batches: one by one, each would cost a round trip to L2.
            for (int start = 0; start < units; start += BATCH) {
                float ones[BATCH], sums[BATCH], values[BATCH];
#pragma unroll
                for (int i = 0; i < BATCH; i++) {
                    const float* from = partial_at(share, smaller(start + i, units - 1), j);
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
            *out(share, item) = to_attended(value / sum);
        }
    }
    // Called by all threads, after a barrier that follows `deliver`: merges the units if this one is the last.
    // `last` is in shared memory.
    DEVICE void finish(const Share& share, bool& last) const {
        if (threadIdx.x == 0) last = is_last(share, arrive(share));
        __syncthreads();
        if (last) merge_units(share);
    }
};

#if SHARES_ROWS
#define BOUNDS __launch_bounds__(32 * WARPS, RESIDENT)
#else
#define BOUNDS __launch_bounds__(32 * WARPS)  // with a minimum of 1 block the compiler uses more registers
#endif
KERNEL BOUNDS
    attention(const int* live, const float* q, const bf16* cache, Attended* attended, float* workspace,
              u32 row_count, u32 heads, u32 kv_heads, u32 head_size, u32 sequences, u32 context,
              u32 window, float scale) {
    DYNAMIC_SHARED(dynamic);
    auto shared = reinterpret_cast<float(*)[QUERIES][PARTIAL]>(dynamic);  // partials of the warps
    start_next_at<AT_START>();
    const Attention all{q, cache, attended, workspace, static_cast<int>(sequences),
                        static_cast<int>(context), scale};
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    WarpMix mix(lane);
    if constexpr (!EARLY) wait_for_previous();

#if SHARES_ROWS
    // The first share of each row and head has a block of its own, which does not depend on other rows.  All
    // other shares are in a list, row by row: the blocks with lower numbers take the first of them, and then every
    // block that has done its share takes the next free one.
    constexpr int EACH = KV_HEADS * PARTS, OWN = ROWS * EACH, HALVES = ceil_div(ROWS, 32);
    __shared__ Row rows[ROWS];
    __shared__ int ends[ROWS];   // the end of each row's shares in the list
    __shared__ Share shares[3];  // the previous, the current and the next share
    __shared__ bool more, last;
    const int extra = gridDim.x - OWN;  // blocks without a share of their own
    const int block = static_cast<int>(blockIdx.x) - extra;
    bool early = false;
    if (block >= 0) {
        const Row row = load_row(live, block / EACH);
        const Share first = Share::of(row, window, block / EACH, block % EACH, 0);
        if (thread == 0) shares[0] = first;
        early = all.begin_early(mix, first, row.flags);
    }
    // Computes share `item` of the list.  Called by all lanes of the first warp.
    auto note = [&](Share& share, int item) {
        const int at = item / EACH;
        int index = 0;  // number of rows whose shares all lie before `at`
#pragma unroll
        for (int half = 0; half < HALVES; half++)
            index += __popc(__ballot_sync(0xffffffffu, half * 32 + lane < ROWS && ends[half * 32 + lane] <= at));
        const int first = index > 0 ? ends[index - 1] : 0;
        if (lane == 0) share = Share::of(rows[index], window, index, item % EACH, 1 + at - first);
    };
    if (warp == 0) {
        Row each[HALVES];
        bool cut = false;  // true if a row of this lane has several shares
#pragma unroll
        for (int half = 0; half < HALVES; half++) {
            each[half] = load_row(live, smaller(half * 32 + lane, ROWS - 1));
            cut |= Spans::is_cut(each[half], window);
        }
        int before = 0;
        if (__ballot_sync(0xffffffffu, cut) == 0) {  // common at short contexts: the list is empty
            if (lane == 0) ends[ROWS - 1] = 0;
        } else {
#pragma unroll
            for (int half = 0; half < HALVES; half++) {
                const int index = half * 32 + lane;
                int end = index < ROWS ? larger(0, Spans(each[half], window).blocks - 1) : 0;
#pragma unroll
                for (int distance = 1; distance < 32; distance *= 2) {
                    const int of_others = __shfl_up_sync(0xffffffffu, end, distance);
                    if (lane >= distance) end += of_others;
                }
                end += before;
                before = __shfl_sync(0xffffffffu, end, 31);
                if (index < ROWS) rows[index] = each[half], ends[index] = end;
            }
        }
        __syncwarp();
        if (block < 0 && extra + block < before * EACH) note(shares[0], extra + block);
    }
    __syncthreads();
    // A block that exits makes room for other blocks of this kernel, which can begin before the wait.
    if (block < 0 && extra + block >= ends[ROWS - 1] * EACH) return;
    if constexpr (EARLY) wait_for_previous();
    start_next_at<AFTER_WAIT>();
    all.begin(mix, shares[0], early);
    // Every block that has a share takes from the list until the list is empty; the last to find it empty resets
    // the count.
    auto taken = [&]() { return counters_of(workspace) + COUNTER_BYTES / sizeof(u32) - 1; };
    auto left = [&]() { return ends[ROWS - 1] * EACH - extra; };  // shares left after each block's first
    bool waiting = false;  // true while the previous share has other units to merge with
    int turn = 0, earlier = 2;
    while (true) {
        const Share& share = shares[turn];
        const int following = 3 - turn - earlier;
        // The atomics' results are used after the tiles have been mixed.  A block takes its next share when little
        // of the current one is left; otherwise a block with a long share would hold back another share.
        u32 arrived = 0, have = 0;
        if (waiting && thread == 0) arrived = all.arrive(shares[earlier]);
        all.prepare(mix, share, share.blocks > 0);
        int at = Attention::own_of(share);
#pragma unroll 1
        for (int rest = 2 * TILE; rest >= 0; rest -= 2 * TILE) {
            at = mix.over(at, share.end - rest, share.end);
            if (rest && thread == 0 && left() > 0) have = atomicAdd(taken(), 1u);
        }
        const bool alone = share.blocks == 0 || share.of_one_warp();
        if (!alone) {
            mix.leave(shared[warp]);
        } else if (share.blocks == 0) {
            all.fill(share);
        } else if (warp == 0) {
            all.deliver_whole(share, mix);
        }
        if (waiting && thread == 0) last = all.is_last(shares[earlier], arrived);
        if (warp == 0 && left() > 0) {
            const int next = static_cast<int>(__shfl_sync(0xffffffffu, have, 0));
            if (next < left()) note(shares[following], extra + next);
            if (thread == 0) {
                more = next < left();
                if (next == left() + OWN + extra - 1) *taken() = 0;
            }
        }
        __syncthreads();
        if (waiting && last) all.merge_units(shares[earlier]);
        const bool again = left() > 0 && more;
        if (again) all.begin(mix, shares[following]);
        if (!alone) {
            for (int i = thread; i < QUERIES * HEAD_SIZE; i += 32 * WARPS) {
                const int j = i / HEAD_SIZE, d = i % HEAD_SIZE;
                const Merged found = merge_partials<WARPS>(d, [&](int w) { return shared[w][j]; });
                all.deliver(share, i, found.maximum, found.sum, found.value);
            }
        }
        waiting = share.units > 1;
        if (!again && !waiting) break;
        __syncthreads();
        earlier = turn;
        turn = following;
        if (!again) break;
    }
    start_next_at<BEFORE_OUTPUT>();
    if (waiting) all.finish(shares[earlier], last);
#else
    auto sent = shared + WARPS;  // partials of the cluster's blocks, then the count of their bytes
    auto arrivals = reinterpret_cast<u64*>(sent + CLUSTER);
    __shared__ bool last;
    const Row row = load_row(live, blockIdx.z);
    const Share share = Share::of(row, window, blockIdx.z, blockIdx.y, blockIdx.x);
    const int blocks = share.blocks, rank = share.split % CLUSTER;
    const int workers = smaller(CLUSTER, blocks - share.unit() * CLUSTER);
    if (share.idle()) {
        if (EARLY) wait_for_previous();
        start_next_at<AFTER_WAIT>();
        all.fill(share);
        return;
    }
    if constexpr (CLUSTER > 1) {
        if (blocks > 1) {
            if (thread == 0 && rank == 0) {
                begin_arrivals(arrivals);
                expect_bytes(arrivals, workers * static_cast<u32>(sizeof sent[0]));
            }
            arrive_at_cluster<CLUSTER>();
        }
    }
    const bool early = all.begin_early(mix, share, row.flags);
    if constexpr (EARLY) wait_for_previous();
    start_next_at<AFTER_WAIT>();
    all.begin(mix, share, early);
    all.prepare(mix, share);
    mix.over(Attention::own_of(share), share.end, share.end);
#if ATTENTION_TILED
    if (share.of_one_warp()) {
        start_next_at<BEFORE_OUTPUT>();
        if (warp == 0) all.deliver_whole(share, mix);
        return;
    }
#endif
    mix.leave(shared[warp]);
    __syncthreads();
    start_next_at<BEFORE_OUTPUT>();
    if constexpr (CLUSTER > 1) {
        if (blocks > 1) wait_for_cluster<CLUSTER>();  // until all blocks have begun
    }
    // Merge over the warps, each thread one value.
    for (int item = thread; item < QUERIES * HEAD_SIZE; item += 32 * WARPS) {
        const int j = item / HEAD_SIZE, d = item % HEAD_SIZE;
        const Merged found = merge_partials<WARPS>(d, [&](int i) { return shared[i][j]; });
        if (CLUSTER == 1 || blocks == 1) {
            all.deliver(share, item, found.maximum, found.sum, found.value);
        } else if (rank < workers) {
            float* const to = sent[rank][j];
            send_to_block<CLUSTER>(to + 2 + d, arrivals, 0, found.value);
            if (d > 0) continue;
            send_to_block<CLUSTER>(to, arrivals, 0, found.maximum);
            send_to_block<CLUSTER>(to + 1, arrivals, 0, found.sum);
        }
    }
    if (blocks == 1) return;

    // Merge over the blocks of the cluster in the first of them, each thread one value.
    if constexpr (CLUSTER > 1) {
        if (rank) return;
        wait_for_bytes(arrivals);
        for (int item = thread; item < QUERIES * HEAD_SIZE; item += 32 * WARPS) {
            const int j = item / HEAD_SIZE, d = item % HEAD_SIZE;
            const Merged found = merge_first<CLUSTER>(workers, d, [=](int i) { return sent[i][j]; });
            all.deliver(share, item, found.maximum, found.sum, found.value);
        }
        if (share.units == 1) return;
    }

    __syncthreads();
    all.finish(share, last);
#endif
}
