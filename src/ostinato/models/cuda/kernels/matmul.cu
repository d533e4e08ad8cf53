// The five products for 2 to 64 rows, on the tensor cores: weights are read once for all rows.
//
// Physics.  Weights come from memory once, 2 * OUTPUTS * INPUTS bytes; the inputs come from L2 once
// a *block*, 4 * ROWS * INPUTS bytes, so with many rows a block must own many outputs (TILES * 16)
// or L2 becomes the limit: at 64 rows, 64 outputs a block read twice as many bytes of inputs as of
// weights.  Inputs are rounded to bfloat16 (after the norm's weights, before its scale); sums and
// all that follows them are float32.  The arithmetic is far from its limit at 64 rows.
//
// A warp makes 8 pairs of outputs (16 rows of the matrix: the `m16` of mma.m16n8k16) for all rows
// (`n`, 8 at a time) over its share of the inputs (`k`).  Which input stands at which place of a
// fragment is free as long as both operands agree, so a lane takes 16 neighbouring bytes of a
// weight row, straight from memory into registers, as the fragments of two instructions:
//
//     lane 4 g + t:  weight rows g and g + 8 (a pair), inputs k + 8 t … k + 8 t + 7 of 32
//
// and 16 bytes of input row g of 8 at the same place, from shared memory.  SPLIT warps share the
// inputs of a slab; BLOCKS_K blocks share the inputs of a whole product where there are few outputs:
// the last of them to finish adds up what all of them left in the workspace.  Orders are fixed.
//
// Rows that are not wanted (padding; for the head all that do not sample) are left out before
// anything is read: the others get consecutive numbers, and empty tiles of 8 rows are skipped.
#include "linear.cuh"

constexpr int ROW_TILES = ceil_div(ROWS, 8), PADDED_ROWS = ROW_TILES * 8;

// Tiles of 8 pairs of a block (one a warp), warps that share a tile's inputs, blocks that do, and
// inputs that stand in shared memory at once.
template <int TILES_, int SPLIT_, int BLOCKS_K_, int SLAB_> struct Shape {
    static constexpr int TILES = TILES_, SPLIT = SPLIT_, BLOCKS_K = BLOCKS_K_, SLAB = SLAB_;
    static constexpr int WARPS = TILES * SPLIT, THREADS = 32 * WARPS;
    static constexpr int STEPS = SLAB / (32 * SPLIT);     // of a warp in a slab
    static constexpr int STRIDE = SLAB + 32;              // of an input row: no bank conflicts
    static constexpr int INPUT_BYTES = PADDED_ROWS * STRIDE * 2;
    static constexpr int SUM_BYTES = WARPS * 16 * PADDED_ROWS * 4;
    static_assert(SLAB % (32 * SPLIT) == 0 && SLAB % 64 == 0, "shape");
};

// The wanted rows, numbered through.
struct Wanted {
    int count;
    int index[PADDED_ROWS];  // of the step
    Row row[PADDED_ROWS];
    float scale[PADDED_ROWS];
};

DEVICE void find_wanted(Wanted& found, const int* live, int flags) {
    const int thread = threadIdx.x;
    if (thread < 32) {
        int count = 0;
#pragma unroll
        for (int start = 0; start < ROWS; start += 32) {
            const int index = start + thread;
            Row row{};
            if (index < ROWS) row = load_row(live, index);
            const bool wanted = (row.flags & flags) == flags;
            const u32 all = __ballot_sync(0xffffffffu, wanted);
            if (wanted) {
                const int place = count + __popc(all & ((1u << thread) - 1));
                found.index[place] = index;
                found.row[place] = row;
            }
            count += __popc(all);
        }
        if (thread == 0) found.count = count;
    }
    __syncthreads();
}

// `bests`: of the head, the largest key of each wanted row in this block, in shared memory.
template <class S, class P>
DEVICE void matmul(const P& product, const int* live, float* workspace, Wanted& rows,
                   u64* bests = nullptr) {
    constexpr int K = P::INPUTS, TILE_COUNT = ceil_div(P::PAIRS, 8);
    constexpr int SLABS = ceil_div(K, S::SLAB), BLOCK_SLABS = ceil_div(SLABS, S::BLOCKS_K);
    constexpr int WARP_ROWS = ceil_div(PADDED_ROWS, S::WARPS), LANE_CHUNKS = ceil_div(S::SLAB, 256);
    static_assert(!P::NORMED || S::BLOCKS_K == 1, "a norm needs whole rows");
    DYNAMIC_SHARED(shared);
    bf16* const inputs = reinterpret_cast<bf16*>(shared);
    float* const sums = reinterpret_cast<float*>(shared);  // later, in the same place

    start_next_at<AT_START>();
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int tile = warp % S::TILES, part = warp / S::TILES, g = lane / 4, t = lane % 4;
    const int first_pair = blockIdx.x * S::TILES * 8;
    const int pair = smaller(first_pair + tile * 8 + g, P::PAIRS - 1);
    const int first_slab = blockIdx.y * BLOCK_SLABS;
    const int slabs = smaller(BLOCK_SLABS, SLABS - first_slab);  // at most 0: nothing to do

    const bf16* const row0 = product.weight + static_cast<long long>(P::weight_row(pair, 0)) * K;
    const bf16* const row1 = product.weight + static_cast<long long>(P::weight_row(pair, 1)) * K;
    // Where this lane's inputs of a step lie: steps of 32 go around the SPLIT warps.
    auto place = [&](int slab, int step) {
        return (first_slab + slab) * S::SLAB + (step * S::SPLIT + part) * 32 + t * 8;
    };
    uint4 w[S::STEPS][2];
    auto load_step = [&](int slab, int step) {
        const int k = place(slab, step);
        const bool there = K % S::SLAB == 0 || k < K;
        w[step][0] = there ? load_weights(row0 + k) : make_uint4(0, 0, 0, 0);
        w[step][1] = there ? load_weights(row1 + k) : make_uint4(0, 0, 0, 0);
    };
    if (slabs > 0) {
#pragma unroll
        for (int step = 0; step < S::STEPS; step++) load_step(0, step);
    }

    wait_for_previous();
    start_next_at<AFTER_WAIT>();
    find_wanted(rows, live, P::WANTED);
    const int count = rows.count, row_tiles = ceil_div(count, 8);
    if (count == 0) return;

    // What a lane brings in: 8 inputs of one row, at `at` of the slab.
    struct Item {
        int n, at, k;
        bool there;
    };
    constexpr int ITEMS = WARP_ROWS * LANE_CHUNKS, BATCH = smaller(4, ITEMS);
    auto item_of = [&](int i, int slab) {
        const int n = i / LANE_CHUNKS * S::WARPS + warp, at = (i % LANE_CHUNKS * 32 + lane) * 8;
        const int k = (first_slab + slab) * S::SLAB + at;
        return Item{n, at, k, (S::SLAB % 256 == 0 || at < S::SLAB) && (K % S::SLAB == 0 || k < K)};
    };

    float c[ROW_TILES][4] = {};
    float square[P::NORMED ? WARP_ROWS : 1] = {};
    for (int slab = 0; slab < slabs; slab++) {
        // Inputs into shared memory: a warp a row, a lane 8 neighbours; BATCH of these at once.
#pragma unroll
        for (int start = 0; start < ITEMS; start += BATCH) {
            float4 a[BATCH][2];
#pragma unroll
            for (int j = 0; j < BATCH; j++) {
                const Item item = item_of(start + j, slab);
                a[j][0] = a[j][1] = make_float4(0, 0, 0, 0);
                if (start + j < ITEMS && item.there && item.n < count) {
                    const float* from = product.input + rows.index[item.n] * K + item.k;
                    a[j][0] = load_fresh(reinterpret_cast<const float4*>(from));
                    a[j][1] = load_fresh(reinterpret_cast<const float4*>(from) + 1);
                }
            }
#pragma unroll
            for (int j = 0; j < BATCH; j++) {
                const Item item = item_of(start + j, slab);
                if (start + j >= ITEMS || item.n >= row_tiles * 8 || item.at >= S::SLAB) continue;
                float4 u = a[j][0], v = a[j][1];
                if constexpr (P::NORMED) {
                    float& sum = square[(start + j) / LANE_CHUNKS];
                    sum += u.x * u.x + u.y * u.y + u.z * u.z + u.w * u.w;
                    sum += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
                    if (item.there) {
                        const float4* norm = reinterpret_cast<const float4*>(product.norm + item.k);
                        const float4 p = load_norm(norm), q = load_norm(norm + 1);
                        u = make_float4(u.x * p.x, u.y * p.y, u.z * p.z, u.w * p.w);
                        v = make_float4(v.x * q.x, v.y * q.y, v.z * q.z, v.w * q.w);
                    }
                }
                *reinterpret_cast<uint4*>(inputs + item.n * S::STRIDE + item.at) =
                    make_uint4(pack_bf16(u.x, u.y), pack_bf16(u.z, u.w), pack_bf16(v.x, v.y),
                               pack_bf16(v.z, v.w));
            }
        }
        __syncthreads();
        if (slab == 0) start_next_at<AFTER_INPUT>();
#pragma unroll
        for (int step = 0; step < S::STEPS; step++) {
            const bf16* from = inputs + g * S::STRIDE + (step * S::SPLIT + part) * 32 + t * 8;
            const uint4 a0 = w[step][0], a1 = w[step][1];
            if (slab + 1 < slabs) load_step(slab + 1, step);  // in flight during the rest
#pragma unroll
            for (int n = 0; n < ROW_TILES; n++) {
                if (n >= row_tiles) break;
                const uint4 b = *reinterpret_cast<const uint4*>(from + n * 8 * S::STRIDE);
                multiply_tile(c[n], a0.x, a1.x, a0.y, a1.y, b.x, b.y);
                multiply_tile(c[n], a0.z, a1.z, a0.w, a1.w, b.z, b.w);
            }
        }
        __syncthreads();  // before the next slab's inputs, or the sums, take the place of these
    }
    start_next_at<BEFORE_OUTPUT>();

    if constexpr (P::NORMED) {
#pragma unroll
        for (int i = 0; i < WARP_ROWS; i++) {
            const int n = i * S::WARPS + warp;
            const float total = sum_lanes<32>(square[i]);
            if (lane == 0 && n < count)
                rows.scale[n] = rsqrtf(total * (1.0f / K) + product.epsilon);
        }
    }
    // Every warp's sums, [warp][row][pair][2], so that a thread can finish whole pairs.
    auto sum_at = [&](int from_warp, int n, int p) {
        return reinterpret_cast<float2*>(sums) + (from_warp * PADDED_ROWS + n) * 8 + p;
    };
#pragma unroll
    for (int n = 0; n < ROW_TILES; n++) {
        if (n >= row_tiles) break;
        *sum_at(warp, n * 8 + t * 2, g) = make_float2(c[n][0], c[n][2]);
        *sum_at(warp, n * 8 + t * 2 + 1, g) = make_float2(c[n][1], c[n][3]);
    }
    __syncthreads();

    constexpr int BLOCK_PAIRS = S::TILES * 8;
    auto total_of = [&](int n, int p) {
        float2 total = *sum_at(p / 8, n, p % 8);
#pragma unroll
        for (int i = 1; i < S::SPLIT; i++) {
            const float2 more = *sum_at(i * S::TILES + p / 8, n, p % 8);
            total = make_float2(total.x + more.x, total.y + more.y);
        }
        return total;
    };
    float2* const partials = reinterpret_cast<float2*>(partials_of(workspace));
    auto partial_at = [&](int block, int n, int p) {
        return partials + (static_cast<long long>(block) * PADDED_ROWS + n) * (TILE_COUNT * 8) + p;
    };
    if constexpr (S::BLOCKS_K > 1) {
        __shared__ bool last;
        for (int item = thread; item < BLOCK_PAIRS * count; item += S::THREADS) {
            const int n = item / BLOCK_PAIRS, p = item % BLOCK_PAIRS;
            if (first_pair + p < P::PAIRS) *partial_at(blockIdx.y, n, first_pair + p) = total_of(n, p);
        }
        __threadfence();
        __syncthreads();
        if (thread == 0) {
            u32* counter = counters_of(workspace) + blockIdx.x;
            last = atomicAdd(counter, 1u) == S::BLOCKS_K - 1;
            if (last) *counter = 0;  // for the next kernel
            __threadfence();
        }
        __syncthreads();
        if (!last) return;
    }
    for (int item = thread; item < BLOCK_PAIRS * count; item += S::THREADS) {
        const int n = item / BLOCK_PAIRS, p = item % BLOCK_PAIRS, mine = first_pair + p;
        u64 key = 0;
        if (mine < P::PAIRS) {
            const Row row = rows.row[n];
            const int index = rows.index[n];
            const float2 prepared = product.prepare(row, index, mine);
            float2 total;
            if constexpr (S::BLOCKS_K > 1) {
                total = load_fresh(partial_at(0, n, mine));
#pragma unroll
                for (int i = 1; i < S::BLOCKS_K; i++) {
                    const float2 more = load_fresh(partial_at(i, n, mine));
                    total = make_float2(total.x + more.x, total.y + more.y);
                }
            } else {
                total = total_of(n, p);
            }
            if constexpr (P::NORMED) {
                const float scale = rows.scale[n];
                total = make_float2(total.x * scale, total.y * scale);
            }
            key = product.finish(row, index, mine, total.x, total.y, prepared);
        }
        if constexpr (P::KEYS) {
            static_assert(BLOCK_PAIRS % 32 == 0, "a warp's pairs are of one row");
            key = largest_of_warp(key);
            if (lane == 0) atomicMax(&bests[n], key);  // a largest one: no order matters
        }
    }
}

// A kernel is compiled if its shape is given.
#ifdef QKV_TILES
typedef Shape<QKV_TILES, QKV_SPLIT, QKV_BLOCKS_K, QKV_SLAB> QkvShape;

KERNEL __launch_bounds__(QkvShape::THREADS)
    norm_qkv_rope(const int* live, const float* x, const float* norm, const bf16* weight,
                  const float* rope, bf16* cache, float* q, float* workspace, u32 row_count,
                  u32 hidden, u32 heads, u32 kv_heads, u32 head_size, u32 sequences, u32 context,
                  float epsilon) {
    __shared__ Wanted rows;
    const QkvProduct product{weight, x,     norm, epsilon,                 rope,
                             cache,  q, static_cast<int>(sequences), static_cast<int>(context)};
    matmul<QkvShape>(product, live, workspace, rows);
}
#endif

#ifdef OUTPUT_TILES
typedef Shape<OUTPUT_TILES, OUTPUT_SPLIT, OUTPUT_BLOCKS_K, OUTPUT_SLAB> OutputShape;

KERNEL __launch_bounds__(OutputShape::THREADS)
    output_residual(const int* live, const float* attended, const bf16* weight, float* x,
                    float* workspace, u32 row_count, u32 hidden, u32 width) {
    __shared__ Wanted rows;
    const ResidualProduct<HEADS * HEAD_SIZE> product{weight, attended, x, x};
    matmul<OutputShape>(product, live, workspace, rows);
}
#endif

#ifdef GATE_UP_TILES
typedef Shape<GATE_UP_TILES, GATE_UP_SPLIT, GATE_UP_BLOCKS_K, GATE_UP_SLAB> GateUpShape;

KERNEL __launch_bounds__(GateUpShape::THREADS)
    norm_gate_up(const int* live, const float* x, const float* norm, const bf16* weight,
                 float* inner, float* workspace, u32 row_count, u32 hidden, u32 width,
                 float epsilon) {
    __shared__ Wanted rows;
    const GateUpProduct product{weight, x, norm, epsilon, inner};
    matmul<GateUpShape>(product, live, workspace, rows);
}
#endif

#ifdef DOWN_TILES
typedef Shape<DOWN_TILES, DOWN_SPLIT, DOWN_BLOCKS_K, DOWN_SLAB> DownShape;

KERNEL __launch_bounds__(DownShape::THREADS)
    down_residual(const int* live, const float* inner, const bf16* weight, float* x,
                  float* workspace, u32 row_count, u32 hidden, u32 width) {
    __shared__ Wanted rows;
    const ResidualProduct<INNER> product{weight, inner, x, x};
    matmul<DownShape>(product, live, workspace, rows);
}
#endif

#ifdef HEAD_TILES
typedef Shape<HEAD_TILES, HEAD_SPLIT, HEAD_BLOCKS_K, HEAD_SLAB> HeadShape;

// Leaves each block's largest key of each row in the workspace, [rows][blocks].
KERNEL __launch_bounds__(HeadShape::THREADS)
    head(const int* live, const float* x, const float* norm, const bf16* weight, float* logits,
         float* workspace, u32 row_count, u32 hidden, u32 vocabulary, float epsilon) {
    __shared__ Wanted rows;
    __shared__ u64 bests[PADDED_ROWS];
    const HeadProduct product{weight, x, norm, epsilon, logits};
    for (int n = threadIdx.x; n < PADDED_ROWS; n += HeadShape::THREADS) bests[n] = 0;
    matmul<HeadShape>(product, live, workspace, rows, bests);
    __syncthreads();
    for (int n = threadIdx.x; n < rows.count; n += HeadShape::THREADS)
        keys_of(workspace)[static_cast<long long>(rows.index[n]) * gridDim.x + blockIdx.x] = bests[n];
}
#endif
