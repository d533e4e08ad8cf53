// The five products for one row: matrix times vector, all in float32 after the bfloat16 loads.
//
// Physics.  A product reads each weight once, so its minimum time is 2 * OUTPUTS * INPUTS bytes over the
// memory's bandwidth.  A multiprocessor needs about 32 KiB of loads in flight for its share of 3 TB/s at
// 0.8 us latency, and a small product ends before that; its time is that of the chain  x from L2 (0.3 us)
// -> shared memory -> dot -> lanes' sum -> store.  So
// * a thread issues the loads of all of its weights at once, before it waits for the previous kernel, and
//   keeps the weights in registers: STEPS * GROUP_PAIRS * 2 loads of 16 bytes;
// * there is one barrier between x and the dot; the norm's scale is applied to the finished sums, and the
//   sum of squares passes through the same barrier;
// * data for `finish` (residual, cosines) is loaded before the dot.
//
// A product with more weights than the chip's registers hold is computed in TURNS: a block stages its input
// once and computes other pairs in each turn, loading the next turn's weights as it uses up those of the
// current one.  Without turns the input would come from L2 once for every 64 KB of weights: with 8,192
// inputs, half as many bytes as the weights.  AHEAD turns are prefetched into L2 before the wait, so that
// the memory is busy while the previous kernel ends.
//
// LANES lanes of SPLIT warps share a pair of outputs (linear.cuh) and take 8 inputs (16 bytes) each in turn;
// a block has WARPS warps.  All sums have a fixed order.
#include "packed.cuh"

// A launch shape.  LANES: lanes of a pair.  SPLIT: warps of a pair.  GROUP_PAIRS: pairs of a group of lanes.
// WARPS: warps of a block.  TURNS: turns of a block.  AHEAD: turns that are prefetched.
template <int LANES_, int SPLIT_, int GROUP_PAIRS_, int WARPS_, int TURNS_, int AHEAD_>
struct Shape {
    static constexpr int LANES = LANES_, SPLIT = SPLIT_, GROUP_PAIRS = GROUP_PAIRS_, WARPS = WARPS_;
    static constexpr int TURNS = TURNS_, AHEAD = AHEAD_;
    static constexpr int GROUPS = 32 / LANES, TEAMS = WARPS / SPLIT, THREADS = 32 * WARPS;
    static constexpr int TURN_PAIRS = TEAMS * GROUPS * GROUP_PAIRS, BLOCK_PAIRS = TURN_PAIRS * TURNS;
    static constexpr int RESIDENT = 0;  // no limit on registers
    static_assert(AHEAD < TURNS, "the first turn's weights are loaded, not prefetched");
    static_assert(32 % LANES == 0 && WARPS % SPLIT == 0 && 2 * GROUP_PAIRS <= LANES, "shape");
};

// Computes a product.  Returns the largest key of the thread's logits; 0 for products other than the head.
template <class S, class P, class L> DEVICE u64 matvec(const P& product, const int* live, L later) {
    constexpr int CHUNKS = P::INPUTS / 8, QUADS = P::INPUTS / 4;
    constexpr int STRIDE = S::LANES * S::SPLIT, STEPS = ceil_div(CHUNKS, STRIDE);
    constexpr int STAGES = ceil_div(QUADS, S::THREADS);
    // The input as [first or second half of a chunk][chunk], so that adjacent lanes read adjacent 16 bytes;
    // the halves lie 64 bytes apart modulo the 128 bytes of all banks.
    constexpr int HALF_STRIDE = round_up(CHUNKS, 8) + 4;
    DYNAMIC_SHARED(shared);
    auto inputs = reinterpret_cast<float4(*)[HALF_STRIDE]>(shared);
    __shared__ float squares[S::WARPS];
    // Sums of two turns are enough: the warps of a block are at most one barrier apart.
    constexpr int SUMS = S::TURNS > 1 ? 2 : 1;
    __shared__ float sums[SUMS][S::SPLIT > 1 ? S::WARPS : 1][S::GROUPS][S::GROUP_PAIRS][2];

    start_next_at<AT_START>();
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int team = warp / S::SPLIT, part = warp % S::SPLIT;
    const int group = lane / S::LANES, sub = lane % S::LANES;
    const int first =
        blockIdx.x * S::BLOCK_PAIRS + (team * S::GROUPS + group) * S::GROUP_PAIRS;
    const int turns = P::PAIRS % S::BLOCK_PAIRS == 0
                          ? S::TURNS
                          : smaller(S::TURNS, ceil_div(P::PAIRS - blockIdx.x * S::BLOCK_PAIRS,
                                                       S::TURN_PAIRS));

    // The weights of a turn.
    uint4 w[STEPS][S::GROUP_PAIRS][2];
    auto weights_at = [&](int turn, int j, int which) {
        const int pair = smaller(first + turn * S::TURN_PAIRS + j, P::PAIRS - 1);
        return product.weight + static_cast<long long>(P::weight_row(pair, which)) * P::INPUTS;
    };
    auto load_step = [&](int turn, int step, int j, int which) {
        const int chunk = step * STRIDE + part * S::LANES + sub;
        return CHUNKS % STRIDE == 0 || step < STEPS - 1 || chunk < CHUNKS
                   ? load_weights(weights_at(turn, j, which) + chunk * 8)
                   : make_uint4(0, 0, 0, 0);
    };
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
#pragma unroll
        for (int j = 0; j < S::GROUP_PAIRS; j++) {
#pragma unroll
            for (int which = 0; which < 2; which++) w[step][j][which] = load_step(0, step, j, which);
        }
    }
    if constexpr (S::AHEAD > 0) {
        // Each lane prefetches one of the GROUP_PAIRS * 2 rows of its group of lanes.
        if (part == 0 && sub < 2 * S::GROUP_PAIRS) {
            for (int turn = 1; turn <= S::AHEAD && turn < turns; turn++)
                prefetch_weights(weights_at(turn, sub / 2, sub % 2), P::INPUTS * 2);
        }
    }
    float4 norms[P::NORMED ? STAGES : 1];
    if constexpr (P::NORMED) {
#pragma unroll
        for (int i = 0; i < STAGES; i++) {
            const int quad = i * S::THREADS + thread;
            if (quad < QUADS) norms[i] = load_norm(reinterpret_cast<const float4*>(product.norm) + quad);
        }
    }

    wait_for_previous();
    start_next_at<AFTER_WAIT>();

    // Copy the input, times the norm's weights, to shared memory, and add up its squares.
    const Row row = load_row(live, 0);
    float4 x[STAGES];
#pragma unroll
    for (int i = 0; i < STAGES; i++) {
        const int quad = i * S::THREADS + thread;
        if (quad < QUADS) x[i] = load_fresh(reinterpret_cast<const float4*>(product.input) + quad);
    }
    float4 added[P::PARTS > 0 ? STAGES : 1][P::PARTS > 0 ? P::PARTS : 1];
    if constexpr (P::PARTS > 0) {
#pragma unroll
        for (int i = 0; i < STAGES; i++) {
            const int quad = i * S::THREADS + thread;
#pragma unroll
            for (int part = 0; part < P::PARTS; part++) {
                if (quad < QUADS)
                    added[i][part] =
                        load_fresh(reinterpret_cast<const float4*>(product.parts) + part * QUADS + quad);
            }
        }
    }
    const bool wanted = (row.flags & P::WANTED) == P::WANTED;
    // The pair of the first turn that this lane finishes, if any.
    int mine = first + sub;
    const bool finisher = wanted && part == 0 && sub < S::GROUP_PAIRS;
    decltype(product.prepare(row, 0, 0)) prepared{};
    if (finisher && mine < P::PAIRS) prepared = product.prepare(row, 0, mine);
    later.prefetch();
    float square = 0.0f;
#pragma unroll
    for (int i = 0; i < STAGES; i++) {
        const int quad = i * S::THREADS + thread;
        if (quad < QUADS) {
            float4 v = x[i];
            if constexpr (P::PARTS > 0) {
#pragma unroll
                for (int part = 0; part < P::PARTS; part++) {
                    const float4 more = added[i][part];
                    v = make_float4(v.x + more.x, v.y + more.y, v.z + more.z, v.w + more.w);
                }
                if (blockIdx.x == 0)  // for `down_residual`
                    reinterpret_cast<float4*>(product.parts)[P::PARTS * QUADS + quad] = v;
            }
            if constexpr (P::NORMED) {
                square += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
                v = make_float4(v.x * norms[i].x, v.y * norms[i].y, v.z * norms[i].z,
                                v.w * norms[i].w);
            }
            inputs[quad % 2][quad / 2] = v;
        }
    }
    if constexpr (P::NORMED) {
        square = sum_lanes<32>(square);
        if (lane == 0) squares[warp] = square;
    }
    __syncthreads();
    if (S::TURNS == 1 || turns == 1) start_next_at<AFTER_INPUT>();

    float scale = 1.0f;
    if constexpr (P::NORMED) scale = norm_factor<S::WARPS, P::INPUTS>(squares, product.epsilon);
    u64 key = 0;
#pragma unroll 1
    for (int turn = 0; turn < turns; turn++) {
        const bool more = S::TURNS > 1 && turn + 1 < turns;
        float sum[S::GROUP_PAIRS][2][2] = {};
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            const int chunk = step * STRIDE + part * S::LANES + sub;
            const bool there = CHUNKS % STRIDE == 0 || step < STEPS - 1 || chunk < CHUNKS;
            float4 a = make_float4(0, 0, 0, 0), b = a;
            if (there) a = inputs[0][chunk], b = inputs[1][chunk];
#pragma unroll
            for (int j = 0; j < S::GROUP_PAIRS; j++) {
#pragma unroll
                for (int which = 0; which < 2; which++) {
                    const uint4 now = w[step][j][which];
                    if (more) w[step][j][which] = load_step(turn + 1, step, j, which);
                    dot8(sum[j][which][0], sum[j][which][1], now, a, b);
                }
            }
        }
        if (S::TURNS > 1 && turn + 2 == turns) start_next_at<AFTER_INPUT>();
        if (!more) start_next_at<BEFORE_OUTPUT>();

        // Lane `sub` of a group finishes its pair `sub`.
        float mine0 = 0.0f, mine1 = 0.0f;
#pragma unroll
        for (int j = 0; j < S::GROUP_PAIRS; j++) {
            const float s0 = sum_lanes<S::LANES>(sum[j][0][0] + sum[j][0][1]);
            const float s1 = sum_lanes<S::LANES>(sum[j][1][0] + sum[j][1][1]);
            if (sub == j) mine0 = s0, mine1 = s1;
        }
        const bool finishes = finisher && mine < P::PAIRS;
        if constexpr (S::SPLIT > 1) {
            auto& turn_sums = sums[SUMS == 1 ? 0 : turn % 2];
            if (sub < S::GROUP_PAIRS) {
                turn_sums[warp][group][sub][0] = mine0;
                turn_sums[warp][group][sub][1] = mine1;
            }
            __syncthreads();
            if (finishes) {
#pragma unroll
                for (int other = 1; other < S::SPLIT; other++) {
                    mine0 += turn_sums[warp + other][group][sub][0];
                    mine1 += turn_sums[warp + other][group][sub][1];
                }
            }
        }
        if (finishes) {
            const u64 one = product.finish(row, 0, mine, mine0 * scale, mine1 * scale, prepared);
            if constexpr (P::KEYS) key = largest(key, one);
        }
        if constexpr (S::TURNS > 1) {
            mine += S::TURN_PAIRS;
            if (more && finisher && mine < P::PAIRS) prepared = product.prepare(row, 0, mine);
        }
    }
    if constexpr (P::EXCHANGES) {
        int pair = first + sub;
        for (int turn = 0; turn < turns && finisher && pair < P::PAIRS; turn++, pair += S::TURN_PAIRS)
            product.receive(pair);
    }
    return key;
}

template <int... N, class P, class L>
DEVICE u64 multiply(Shape<N...> shape, const P& product, const int* live, L later) {
    return matvec<decltype(shape)>(product, live, later);
}

// A kernel is compiled if its shape is given.
#ifdef QKV_SHAPE
typedef QKV_SHAPE QkvShape;

#if QK_NORM
KERNEL __launch_bounds__(QkvShape::THREADS, QkvShape::RESIDENT)
    norm_qkv(const int* live, const float* x, const float* norm, const Weight* weight, const u8* later, float* qkv,
             float* workspace, u32 row_count, u32 hidden, u32 heads, u32 kv_heads, u32 head_size,
             float epsilon) {
    const PlainQkvProduct product{weight, x, norm, epsilon, qkv};
    multiply(QkvShape(), product, live, Later<QKV_PREFETCH>{later});
}
#else
KERNEL __launch_bounds__(QkvShape::THREADS, QkvShape::RESIDENT)
    norm_qkv_rope(const int* live, const float* x, const float* norm, const Weight* weight, const u8* later,
                  const float* bias, const float* rope, bf16* cache, float* q, float* workspace,
                  u32 row_count, u32 hidden, u32 heads, u32 kv_heads, u32 head_size, u32 sequences,
                  u32 context, float epsilon) {
    const QkvProduct product{weight, x, norm, epsilon, bias, rope, cache, q,
                             static_cast<int>(sequences), static_cast<int>(context)};
    product.ask_for_bias();
    multiply(QkvShape(), product, live, Later<QKV_PREFETCH>{later});
}
#endif
#endif

#ifdef OUTPUT_SHAPE
typedef OUTPUT_SHAPE OutputShape;

KERNEL __launch_bounds__(OutputShape::THREADS, OutputShape::RESIDENT)
    output_residual(const int* live, const float* attended, const Weight* weight, const u8* later, float* x,
                    float* workspace, u32 row_count, u32 hidden, u32 width) {
    const ResidualProduct<HEADS * HEAD_SIZE> product{weight, attended, nullptr, 0.0f, x, x};
    multiply(OutputShape(), product, live, Later<OUTPUT_PREFETCH>{later});
}
#endif

#if defined(OUTPUT_SHAPE) && defined(RANKS)
KERNEL __launch_bounds__(OutputShape::THREADS, larger(RESIDENT_BLOCKS, OutputShape::RESIDENT))
    output_of_ranks(const int* live, const float* attended, const Weight* weight, const u8* later, float* x, u64* sums,
                    u32 row_count, u32 hidden, u32 width, u32 rank) {
    const ResidualOfRanks<HEADS * HEAD_SIZE> product{weight, attended, nullptr, 0.0f, x, SumsOfRanks(sums, rank)};
    multiply(OutputShape(), product, live, Later<OUTPUT_PREFETCH>{later});
}
#endif

#ifdef GATE_UP_SHAPE
typedef GATE_UP_SHAPE GateUpShape;

KERNEL __launch_bounds__(GateUpShape::THREADS, GateUpShape::RESIDENT)
    norm_gate_up(const int* live, const float* x, const float* norm, const Weight* weight, const u8* later,
                 float* inner, float* workspace, u32 row_count, u32 hidden, u32 width,
                 float epsilon) {
    const GateUpProduct product{weight, x, norm, epsilon, inner, partials_of(workspace)};
    multiply(GateUpShape(), product, live, Later<GATE_UP_PREFETCH>{later});
}
#endif

#ifdef DOWN_SHAPE
typedef DOWN_SHAPE DownShape;

KERNEL __launch_bounds__(DownShape::THREADS, DownShape::RESIDENT)
    down_residual(const int* live, const float* inner, const Weight* weight, const u8* later, float* x,
                  float* workspace, u32 row_count, u32 hidden, u32 width) {
    const float* const before = RESIDUAL_PARTS ? partials_of(workspace) + RESIDUAL_PARTS * HIDDEN : x;
    const ResidualProduct<INNER> product{weight, inner, nullptr, 0.0f, before, x};
    multiply(DownShape(), product, live, Later<DOWN_PREFETCH>{later});
}
#endif

#if defined(DOWN_SHAPE) && defined(RANKS)
KERNEL __launch_bounds__(DownShape::THREADS, larger(RESIDENT_BLOCKS, DownShape::RESIDENT))
    down_of_ranks(const int* live, const float* inner, const Weight* weight, const u8* later, float* x, u64* sums,
                  u32 row_count, u32 hidden, u32 width, u32 rank) {
    const ResidualOfRanks<INNER> product{weight, inner, nullptr, 0.0f, x, SumsOfRanks(sums, rank)};
    multiply(DownShape(), product, live, Later<DOWN_PREFETCH>{later});
}
#endif

#ifdef HEAD_SHAPE
typedef HEAD_SHAPE HeadShape;

// Leaves each block's largest key in the workspace, [1][blocks].
KERNEL __launch_bounds__(HeadShape::THREADS, HeadShape::RESIDENT)
    head(const int* live, const float* x, const float* norm, const Weight* weight, float* logits,
         float* workspace, u32 row_count, u32 hidden, u32 vocabulary, float epsilon) {
    __shared__ u64 bests[HeadShape::WARPS];
    const HeadProduct product{weight, x, norm, epsilon, logits};
    const u64 key = largest_of_warp(multiply(HeadShape(), product, live, Later<0>()));
    if (threadIdx.x % 32 == 0) bests[threadIdx.x / 32] = key;
    __syncthreads();
    if (threadIdx.x == 0) {
        u64 best = bests[0];
        for (int i = 1; i < HeadShape::WARPS; i++) best = largest(best, bests[i]);
        keys_of(workspace)[blockIdx.x] = best;
    }
}
#endif
