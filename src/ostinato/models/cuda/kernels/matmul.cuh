// A product for 2 to 64 rows on the tensor cores; weights are read once for all rows.  Inputs are bfloat16;
// the kernels are in rounded.cu.
//
// Physics.  Weights come from memory once, 2 * OUTPUTS * INPUTS bytes.  Inputs come from L2 once for each
// *block*, 2 * ROWS * INPUTS bytes, so with many rows a block must own many outputs (TILES * 16), or L2
// becomes the limit.  Inputs are copied to shared memory without passing through registers, RING - 1 slabs
// before they are used, so that warps wait for the first slab only.  Sums and everything after them are
// float32.  The arithmetic is far from its limit at 64 rows.
//
// A warp computes 8 pairs of outputs (16 rows of the matrix: the `m16` of mma.m16n8k16) for all rows (`n`,
// 8 at a time) over its share of the inputs (`k`).  The order of the inputs in a fragment is free as long as
// both operands agree, so a lane loads 16 adjacent bytes of a weight row from memory into registers as the
// fragments of two instructions:
//
//     lane 4 g + t:  weight rows g and g + 8 (a pair), inputs k + 8 t … k + 8 t + 7 of 32
//
// and 16 bytes of input row g of 8 at the same place, from shared memory.  SPLIT warps share the inputs of
// a slab.  If there are few outputs, BLOCKS_K blocks share the inputs of a product: a cluster adds their
// sums through shared memory, or the last block to finish adds the sums in the workspace.  All orders are
// fixed.
//
// With WARPGROUP (compute capability 9.0; `WarpgroupWeights` below), four warps multiply 64 rows of the
// matrix from shared memory.  A warp by itself reads all inputs of its steps from shared memory for 16 rows
// of the matrix; a warpgroup reads them once for 64, and holds no weights in registers.
//
// A warp always has the loads of DEPTH steps' weights in flight, independently of the slab.  If one warp has
// all inputs of its outputs, a lane has whole sums, and warps need not wait for each other after the inputs
// have arrived.
//
// For a packed matrix (bricks.cuh) a warp takes whole bricks, whose lanes hold the same rows; the weights are
// converted to bfloat16 in registers, with the same bits as in a matrix that is stored in bfloat16.
//
// With PANELS the previous kernel left the inputs in panels (common.cuh), and one thread copies a whole slab;
// otherwise all threads copy the inputs, 16 bytes each.
//
// All rows of the step are multiplied.  Rows that are not wanted (padding; for the head all that do not
// sample) are left out at the end.
#pragma once

#include "bricks.cuh"
#include "linear.cuh"
#include "warpgroups.cuh"

constexpr int ROW_TILES = ceil_div(ROWS, 8), PADDED_ROWS = ROW_TILES * 8;

// The most registers for weights and sums that leave a thread enough of 128 for everything else.
constexpr int MOST_HELD = 84;

// A product with inputs `rounded`, [ROWS, INPUTS] in bfloat16, laid out by `rounded_at`.  If the product norms
// its inputs, they are the residual times the norm's weights, and the sums are scaled by the norm's factor,
// computed from half HALF of `squares` (linear.cuh); the product clears the other half.  FILLS: `fill` writes
// zeros to rows that are not wanted.
template <class PRODUCT, bool FILLS = false, int HALF_ = 0> struct OfRounded : PRODUCT {
    static constexpr int HALF = HALF_;
    const bf16* rounded;
    u64* squares = nullptr;
};

// x += W y, and, unless `next` is null, the inputs of the next product: x times its norm's weights, rounded,
// and the sums of squares.  `finish` returns the bits of a pair's sum of squares.
template <int WIDTH, int HALF> struct CarriedResidual : ResidualProduct<WIDTH> {
    const float* next_norm;
    bf16* next;  // [ROWS, HIDDEN], laid out by `rounded_at`
    u64* next_squares;

    DEVICE u32* next_pair(int index, int pair) const {
        return reinterpret_cast<u32*>(next) + rounded_at(ROWS, HIDDEN, index, pair / 4) * 4 + pair % 4;
    }

    // Prefetches the norm's weights before the wait: `prepare` reads everything else from L2.
    DEVICE void ask_for_norm() const {
        if (threadIdx.x || next == nullptr) return;
        const int block = blockIdx.y * gridDim.x + blockIdx.x, blocks = gridDim.x * gridDim.y;
        for (int i = block * 32; i < HIDDEN; i += blocks * 32)
            prefetch_weights(next_norm + i, smaller(32, HIDDEN - i) * 4);
    }
    DEVICE float4 prepare(const Row& row, int index, int pair) const {
        const float2 old = ResidualProduct<WIDTH>::prepare(row, index, pair);
        if (next == nullptr) return make_float4(old.x, old.y, 0.0f, 0.0f);
        return make_float4(old.x, old.y, __ldg(next_norm + 2 * pair), __ldg(next_norm + 2 * pair + 1));
    }
    DEVICE u64 finish(const Row& row, int index, int pair, float a, float b, float4 old) const {
        ResidualProduct<WIDTH>::finish(row, index, pair, a, b, make_float2(old.x, old.y));
        const float u = old.x + a, v = old.y + b;
        if (next != nullptr) *next_pair(index, pair) = pack_bf16(u * old.z, v * old.w);
        return __float_as_uint(u * u + v * v);
    }
    DEVICE void fill(int index, int pair) const {
        if (next != nullptr) *next_pair(index, pair) = 0;
    }
    DEVICE void add(int index, float square) const {
        if (next != nullptr) add_square(squares_of(next_squares, HALF, ROWS, index), square);
    }
};

#ifdef SUM_SLOTS
// Like CarriedResidual, for a rank that has a part of the inputs; adds the sums of all ranks.  `send` sends this
// rank's sums, `receive` replaces them by those of all ranks, and `finish` gets these.
template <int WIDTH, int HALF> struct CarriedOfRanks : CarriedResidual<WIDTH, HALF> {
    static constexpr bool EXCHANGES = true;
    SumsOfRanks ranks;

    struct Prepared {
        float4 old;
        u32 epoch;
    };
    DEVICE Prepared prepare(const Row& row, int index, int pair) const {
        return {CarriedResidual<WIDTH, HALF>::prepare(row, index, pair), ranks.epoch_of(ranks.slot(index, pair))};
    }
    DEVICE void send(int index, int pair, float2 sums, const Prepared& prepared) const {
        ranks.send(ranks.slot(index, pair), prepared.epoch, sums, ranks.rank);
    }
    // Indices below 0 have no sums.
    template <int COUNT>
    DEVICE void receive(float2 (&sums)[COUNT], const int (&indices)[COUNT], const int (&pairs)[COUNT],
                        const Prepared (&prepared)[COUNT]) const {
        int slots[COUNT];
        u32 epochs[COUNT];
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            slots[i] = indices[i] < 0 ? -1 : ranks.slot(indices[i], pairs[i]);
            epochs[i] = prepared[i].epoch;
        }
        ranks.receive(sums, slots, epochs, ranks.rank);
    }
    DEVICE u64 finish(const Row& row, int index, int pair, float a, float b, const Prepared& prepared) const {
        *ranks.counter(ranks.slot(index, pair)) = prepared.epoch;
        return CarriedResidual<WIDTH, HALF>::finish(row, index, pair, a, b, prepared.old);
    }
};
#endif

// Properties of a product: FILLS, SCALED (by the norm's factor), CARRIES (writes the next product's inputs).
template <class P> struct Rounded;
template <class P, bool FILLS_, int HALF> struct Rounded<OfRounded<P, FILLS_, HALF>> {
    static constexpr bool FILLS = FILLS_, SCALED = P::NORMED, CARRIES = false;
};
template <int WIDTH, int TO, bool FILLS_, int HALF>
struct Rounded<OfRounded<CarriedResidual<WIDTH, TO>, FILLS_, HALF>> {
    static constexpr bool FILLS = FILLS_, SCALED = false, CARRIES = true;
};
#ifdef SUM_SLOTS
template <int WIDTH, int TO, bool FILLS_, int HALF>
struct Rounded<OfRounded<CarriedOfRanks<WIDTH, TO>, FILLS_, HALF>>
    : Rounded<OfRounded<CarriedResidual<WIDTH, TO>, FILLS_, HALF>> {};
#endif

// A launch shape.  TILES: tiles of 8 pairs of a block (one for each warp).  SPLIT: warps that share a tile's
// inputs.  BLOCKS_K: blocks that do.  SLAB: inputs of a slab.  DEPTH: steps whose weights a warp holds (0: of
// a whole slab).  CLUSTER: BLOCKS_K if these blocks are a cluster, else 1.  RING: slabs of inputs in shared
// memory.  WARPGROUP: 1 if warpgroups multiply.
template <int TILES_, int SPLIT_, int BLOCKS_K_, int SLAB_, int DEPTH_, int CLUSTER_, int RING_, int WARPGROUP_>
struct Shape {
    static constexpr bool WARPGROUP = WARPGROUP_;
    static constexpr int TILES = TILES_, SPLIT = SPLIT_, BLOCKS_K = BLOCKS_K_, SLAB = SLAB_;
    static constexpr int CLUSTER = CLUSTER_, RING = RING_;
    static constexpr int WARPS = TILES * SPLIT, THREADS = 32 * WARPS;
    static constexpr int STEPS = SLAB / (32 * SPLIT);     // steps of a warp in a slab
    static constexpr int DEPTH = DEPTH_ ? DEPTH_ : STEPS;
    static constexpr bool WHOLE_SUMS = SPLIT == 1 && BLOCKS_K == 1;  // a warp has whole sums
    static constexpr bool STAGED = !WHOLE_SUMS && (SPLIT > 1 || CLUSTER == 1);  // sums go to shared memory
    // Blocks that a multiprocessor must have registers for: 16 warps of 128 registers each, so that the
    // next kernel's blocks can load their weights while these still compute.
    static constexpr int RESIDENT = WARPGROUP || 8 * DEPTH + 4 * ROW_TILES <= MOST_HELD ? larger(1, 16 / WARPS) : 1;
    static_assert(!WARPGROUP || TILES % 4 == 0, "four warps multiply together");
    static_assert(SLAB % (32 * SPLIT) == 0 && SLAB % 64 == 0 && STEPS % DEPTH == 0, "shape");
    static_assert(CLUSTER == 1 || CLUSTER == BLOCKS_K, "a cluster has all inputs");
    static_assert(RING > 1, "a slab is copied while another is used");
    // The numbers of the block's part of the inputs and of its part of the outputs.  Clusters lie along x.
    DEVICE static int input_block() { return CLUSTER > 1 ? blockIdx.x : blockIdx.y; }
    DEVICE static int output_block() { return CLUSTER > 1 ? blockIdx.y : blockIdx.x; }
};

// The launch shape for a packed matrix, with the matrix's parts.
template <int TILES, int SPLIT, int BLOCKS_K, int SLAB, int DEPTH, int CLUSTER, int RING, int WARPGROUP, class... PARTS>
struct PackedMatrixShape : Shape<TILES, SPLIT, BLOCKS_K, SLAB, DEPTH, CLUSTER, RING, 0> {
    static_assert(SLAB % (BRICK * SPLIT) == 0 && DEPTH % 8 == 0, "a warp takes whole bricks");
    static constexpr int RESIDENT = DEPTH == 8 && ROW_TILES <= 4 ? larger(1, 16 / (TILES * SPLIT)) : 1;
};

// A lane's weights of S::DEPTH steps.  `advance` moves on by DEPTH steps; `refill` loads a step's weights into
// the registers of a used one.  FIRST, PAIRS: the first pair and the number of pairs; `tile` counts from FIRST.
template <class S, class P> struct PlainWeights {
    static constexpr int FIRST = 0, PAIRS = P::PAIRS, K = P::INPUTS;
    static constexpr bool REORDERED = false;  // true: a lane has inputs from 4 t and from 4 t + 16 on
    const bf16 *row0, *row1;  // the lane's inputs of the step that is loaded next
    int part;
    int first;  // the first of these inputs
    uint4 w[S::DEPTH][2];

    DEVICE static constexpr int ring_bytes() { return S::RING * PADDED_ROWS * (S::SLAB + 32) * 2; }
    DEVICE PlainWeights(const bf16* weight, int tile, int part, int first_slab)
        : part(part), first(first_slab * S::SLAB + part * 32 + threadIdx.x % 4 * 8) {
        const int pair = smaller(tile * 8 + static_cast<int>(threadIdx.x % 32 / 4), PAIRS - 1);
        row0 = weight + static_cast<long long>(P::weight_row(pair, 0)) * K + first;
        row1 = weight + static_cast<long long>(P::weight_row(pair, 1)) * K + first;
    }
    // The group of 32 inputs of a slab that a step takes: groups are dealt to the SPLIT warps in turn.
    DEVICE int group(int step) const { return step * S::SPLIT + part; }
    DEVICE void advance() {
        constexpr int MORE = S::DEPTH * S::SPLIT * 32;
        row0 += MORE, row1 += MORE, first += MORE;
    }
    DEVICE void load(int i) {
        const int k = i * S::SPLIT * 32;
        const bool there = K % S::SLAB == 0 || first + k < K;
        w[i][0] = there ? load_weights(row0 + k) : make_uint4(0, 0, 0, 0);
        w[i][1] = there ? load_weights(row1 + k) : make_uint4(0, 0, 0, 0);
    }
    DEVICE void load_all() {
#pragma unroll
        for (int i = 0; i < S::DEPTH; i++) load(i);
    }
    DEVICE void take(uint4& a0, uint4& a1, int i) const { a0 = w[i][0], a1 = w[i][1]; }
    DEVICE void refill(int i) { load(i); }
};

// K inputs in panels of PANEL bytes, copied by one thread to a ring of slabs.  A slab has SLAB_BYTES bytes; its
// inputs begin at byte FIRST.  The counts of arrived bytes lie behind the ring.
template <class S, int K, int SLAB_BYTES, int FIRST, int PANEL> struct InputPanels {
    static constexpr int EACH = S::SLAB / 64;
    static_assert(K % 64 == 0, "whole panels");
    u8* ring;
    int first_slab;  // this block's first slab of the matrix

    DEVICE u64* arrivals(int slab) const {
        return reinterpret_cast<u64*>(ring + S::RING * SLAB_BYTES) + slab % S::RING;
    }
    DEVICE static bool copies() { return threadIdx.x == S::THREADS - 1; }
    DEVICE void begin() const {
        if (copies())
            for (int i = 0; i < S::RING; i++) begin_arrivals(arrivals(i));
    }
    DEVICE u8* at(int slab) const { return ring + slab % S::RING * SLAB_BYTES + FIRST; }
    DEVICE void copy(const bf16* rounded, int slab) const {
        if (!copies()) return;
        constexpr int BYTES = ROWS * PANEL_WIDTH;
        u64* const arrived = arrivals(slab);
        const u8* const from = reinterpret_cast<const u8*>(rounded) + (first_slab + slab) * (EACH * BYTES);
        const int there = K % S::SLAB == 0 ? EACH : smaller(EACH, K / 64 - (first_slab + slab) * EACH);
        expect_bytes(arrived, there * BYTES);
        if constexpr (PANEL == BYTES)
            copy_bytes(at(slab), from, there * BYTES, arrived);
        else
            for (int i = 0; i < there; i++) copy_bytes(at(slab) + i * PANEL, from + i * BYTES, BYTES, arrived);
    }
    DEVICE void wait_for(int slab) const { wait_for_bytes(arrivals(slab), slab / S::RING % 2); }
};

// Weights that a warpgroup multiplies from shared memory: 64 rows of the matrix and all rows of the step in one
// instruction (`multiply_group`).  Both operands are in panels (common.cuh), in one ring of slabs.  All threads
// copy weights, and permute the chunks.
// GROUP_ROWS: rows of inputs.  Rows that the step does not have hold arbitrary data, and so do their sums.
constexpr int GROUP_ROWS = ROWS <= 32 ? 32 : 64;

template <class S, class P> struct WarpgroupWeights {
    static constexpr int FIRST = 0, PAIRS = P::PAIRS, K = P::INPUTS;
    static constexpr bool REORDERED = false;
    static constexpr int MATRIX_ROWS = S::TILES * 16, PANELS_OF_SLAB = S::SLAB / 64, CHUNKS = S::SLAB / 8;
    static constexpr int WEIGHT_PANEL = MATRIX_ROWS * PANEL_WIDTH, INPUT_PANEL = GROUP_ROWS * PANEL_WIDTH;
    static constexpr int SLAB_BYTES = PANELS_OF_SLAB * (WEIGHT_PANEL + INPUT_PANEL);
    static_assert(S::RING > 2, "a slab is copied while two are multiplied");
    static_assert(K % S::SLAB == 0, "whole panels");
    static_assert(static_cast<long long>(PAIRS) * 2 * K < 1ll << 32, "places of 32 bits");
    static constexpr int COPIES = ceil_div(MATRIX_ROWS * CHUNKS, S::THREADS);  // copies of a thread in a slab
    static constexpr bool EVEN = MATRIX_ROWS * CHUNKS % S::THREADS == 0;
    const bf16* weight;
    int group, part;
    InputPanels<S, K, SLAB_BYTES, PANELS_OF_SLAB * WEIGHT_PANEL, INPUT_PANEL> inputs;
    u32 from[COPIES];  // source indices in the first slab of the matrix

    DEVICE WarpgroupWeights(const bf16* weight, int first_pair, int first_slab, int tile, int part, u8* shared)
        : weight(weight), group(tile / 4), part(part), inputs{shared, first_slab} {
#pragma unroll
        for (int j = 0; j < COPIES; j++) {
            const int i = j * S::THREADS + threadIdx.x, r = i / CHUNKS;
            const int pair = smaller(first_pair + r / 16 * 8 + r % 8, PAIRS - 1);
            from[j] = static_cast<u32>(P::weight_row(pair, r / 8 % 2)) * K + i % CHUNKS * 8;
        }
    }
    DEVICE static constexpr int ring_bytes() { return S::RING * (SLAB_BYTES + 8); }
    DEVICE u8* slab_at(int slab) const { return inputs.ring + slab % S::RING * SLAB_BYTES; }
    DEVICE void copy_weights(int slab) const {
        u8* const to = slab_at(slab);
        const bf16* const of_slab = weight + (inputs.first_slab + slab) * S::SLAB;
#pragma unroll
        for (int j = 0; j < COPIES; j++) {
            const int i = j * S::THREADS + threadIdx.x, r = i / CHUNKS, chunk = i % CHUNKS;
            if (EVEN || i < MATRIX_ROWS * CHUNKS)
                copy_async(to + chunk / 8 * WEIGHT_PANEL + panel_at(r, chunk % 8), of_slab + from[j], true);
        }
    }
    DEVICE void multiply(float (&c)[GROUP_ROWS / 8][4], int slab) const {
        const u8* const weights = slab_at(slab) + group * (64 * PANEL_WIDTH);
        const u8* const of_slab = inputs.at(slab);
        start_group();
#pragma unroll
        for (int i = 0; i < PANELS_OF_SLAB * 4 / S::SPLIT; i++) {
            const int step = i * S::SPLIT + part, panel = step / 4, at = step % 4 * 32;
            multiply_group(c, weights + panel * WEIGHT_PANEL + at, of_slab + panel * INPUT_PANEL + at);
        }
        end_group();
    }
};

template <class S, class P, class R, int FIRST_> struct BrickWeights {
    typedef typename R::Format F;
    static constexpr int FIRST = FIRST_, PAIRS = R::PAIRS, K = P::INPUTS, BRICKS = ceil_div(K, BRICK);
    static constexpr int PER_UNIT = Brick<F>::UNIT / 512;
    static constexpr bool REORDERED = true;
    static_assert(K % 4 == 0 && (!F::K_TYPE || K % BRICK == 0), "rows are whole blocks");
    const u8* row;  // the row of bricks
    int part;
    int first;  // the brick that is loaded next
    Held<F> held[S::DEPTH / 8];

    static constexpr int INPUT_PANEL = ROWS * PANEL_WIDTH, SLAB_BYTES = S::SLAB / 64 * INPUT_PANEL;

    DEVICE static constexpr int ring_bytes() {
        return IN_PANELS ? S::RING * (SLAB_BYTES + 8) : S::RING * PADDED_ROWS * (S::SLAB + 16) * 2;
    }
    DEVICE BrickWeights(const u8* bricks, int tile, int part, int first_slab)
        : part(part), first(first_slab * (S::SLAB / BRICK) + part) {
        tile = smaller(tile, ceil_div(PAIRS, 8) - 1);
        row = bricks + static_cast<long long>(tile) * Brick<F>::row_bytes(K);
    }
    DEVICE int group(int step) const { return (step / 8 * S::SPLIT + part) * 8 + step % 8; }
    DEVICE void advance() { first += S::DEPTH / 8 * S::SPLIT; }
    DEVICE int brick(int i) const { return first + i * S::SPLIT; }
    DEVICE static int units(int brick) {
        return K % BRICK == 0 || brick < BRICKS - 1 ? 4 : Brick<F>::units(K % BRICK);
    }
    DEVICE void load(int i) {
        const int at = brick(i);
        if (at < BRICKS)
            held[i].load(row + at * Brick<F>::BYTES, threadIdx.x % 32, units(at));
        else
            held[i] = Held<F>();
    }
    DEVICE void load_all() {
#pragma unroll
        for (int i = 0; i < S::DEPTH / 8; i++) load(i);
    }
    DEVICE void take(uint4& a0, uint4& a1, int step) const {
        const int i = step / 8, j = step % 8;
        u32 a[4];
        part_codes<F>(a, held[i], held[i].codes[PER_UNIT == 2 ? j : j / 2], j);
        a0 = held_weights<F>(held[i], a, j, 0), a1 = held_weights<F>(held[i], a, j, 1);
    }
    // Replaces codes as they are used up, and everything else with the last of them.
    DEVICE void refill(int step) {
        const int i = step / 8, j = step % 8;
        const int at = brick(i), lane = threadIdx.x % 32;
        const u8* const from = row + at * Brick<F>::BYTES;
        if (PER_UNIT == 2 || j % 2) {
            const int load = PER_UNIT == 2 ? j : j / 2;
            if (at < BRICKS)
                held[i].load_codes(from, lane, load, units(at));
            else
                held[i].codes[load] = make_uint4(0, 0, 0, 0);
        }
        if (j == 7) {
            if (at < BRICKS) {
                held[i].load_rest(from, lane, units(at));
            } else {
                held[i].scales[0] = held[i].scales[1] = make_uint4(0, 0, 0, 0);
                held[i].extra[0] = held[i].extra[1] = 0;
            }
        }
    }
};

// The rows of the step, the number of wanted rows, and the scales of the rows' sums.
struct StepRows {
    int wanted;
    Row row[PADDED_ROWS];
    float scale[PADDED_ROWS];
};

DEVICE void find_rows(StepRows& found, const int* live, int flags) {
    const int thread = threadIdx.x;
    if (thread < 32) {
        int count = 0;
#pragma unroll
        for (int start = 0; start < PADDED_ROWS; start += 32) {
            const int index = start + thread;
            Row row{};
            if (index < ROWS) row = load_row(live, index);
            if (index < PADDED_ROWS) found.row[index] = row;
            count += __popc(__ballot_sync(0xffffffffu, (row.flags & flags) == flags));
        }
        if (thread == 0) found.wanted = count;
    }
    __syncthreads();
}

// Computes a block's part of a product with weights W; `block` counts the blocks of these weights.
template <class S, class W, class P, class M, class L>
DEVICE void matmul_part(const P& product, const M* matrix, int block, const int* live,
                        float* workspace, StepRows& rows, L later, u64* bests) {
    constexpr int K = P::INPUTS, TILE_COUNT = ceil_div(W::PAIRS, 8), BLOCK_PAIRS = S::TILES * 8;
    // STRIDE: values of an input row in shared memory, such that a warp's reads have no bank conflicts.
    constexpr int STRIDE = S::SLAB + (W::REORDERED ? 16 : 32), SLAB_VALUES = IN_PANELS ? ROWS * S::SLAB : PADDED_ROWS * STRIDE;
    constexpr int SLABS = ceil_div(K, S::SLAB), BLOCK_SLABS = ceil_div(SLABS, S::BLOCKS_K);
    static_assert(S::BLOCKS_K == 1 || S::CLUSTER > 1 || W::PAIRS == P::PAIRS, "partial sums are of whole matrices");
    static_assert(!Rounded<P>::SCALED || K == HIDDEN, "a norm is of the residual");
    constexpr int OWN_PANELS = S::WARPGROUP ? WARPGROUP_PANELS : W::REORDERED ? BRICK_PANELS : ROWS_OF_INPUTS;
    static_assert(PANELS == OWN_PANELS || (!IN_PANELS && !S::WARPGROUP), "inputs lie as these weights need them");
    // Items: the pairs of the block for all rows, which its threads finish.  The blocks of a cluster share them.
    constexpr int ITEMS = BLOCK_PAIRS * ROWS, NEXT_ITEM = S::CLUSTER * S::THREADS;
    constexpr int BLOCK_ITEMS = smaller(ITEMS, ceil_div(ITEMS, NEXT_ITEM) * S::THREADS);  // at most
    ALIGNED_SHARED(shared, 1024);  // panels need this alignment
    bf16* const inputs = reinterpret_cast<bf16*>(shared);
    // Later in the same memory: sums of the cluster's blocks, [CLUSTER][BLOCK_ITEMS], then the block's own sums.
    float2* const received = reinterpret_cast<float2*>(shared);
    float2* const sums = received + (S::CLUSTER > 1 ? S::CLUSTER * BLOCK_ITEMS : 0);
    constexpr int LATER_BYTES = ((S::CLUSTER > 1 ? S::CLUSTER * BLOCK_ITEMS : 0) +
                                 (S::STAGED ? S::SPLIT * PADDED_ROWS * (BLOCK_PAIRS + 2) : 0)) * 8;
    u64* const arrivals = reinterpret_cast<u64*>(shared + larger(W::ring_bytes(), LATER_BYTES));

    start_next_at<AT_START>();
    const int thread = threadIdx.x, lane = thread % 32;
    const int warp = S::WARPGROUP ? uniform(thread / 32) : thread / 32;
    const int tile = warp % S::TILES, part = S::SPLIT > 1 ? warp / S::TILES : 0, g = lane / 4, t = lane % 4;
    const int first_pair = block * BLOCK_PAIRS;
    const int first_slab = S::input_block() * BLOCK_SLABS;
    const int slabs = smaller(BLOCK_SLABS, SLABS - first_slab);  // 0 or less: nothing to do
    constexpr int AHEAD = S::RING - !S::WARPGROUP;               // slabs of inputs that are copied at the start

    auto weights = [&] {
        if constexpr (S::WARPGROUP)
            return W(matrix, first_pair, first_slab, tile, part, shared);
        else
            return W(matrix, block * S::TILES + tile, part, first_slab);
    }();
    auto panels = [&] {
        if constexpr (S::WARPGROUP)
            return weights.inputs;
        else if constexpr (IN_PANELS)
            return InputPanels<S, K, W::SLAB_BYTES, 0, W::INPUT_PANEL>{shared, first_slab};
        else
            return 0;
    }();
    // Copies a slab of inputs into the ring.  Without PANELS each slab is one group for `wait_copies`.
    auto copy_slab = [&](int slab) {
        if constexpr (IN_PANELS) {
            if (slab < slabs) panels.copy(product.rounded, slab);
            return;
        }
        if (slab < slabs) {
            constexpr int CHUNKS = S::SLAB / 8;
            bf16* const to = inputs + slab % S::RING * SLAB_VALUES;
#pragma unroll 1
            for (int i = thread; i < PADDED_ROWS * CHUNKS; i += S::THREADS) {
                const int n = i / CHUNKS, at = i % CHUNKS * 8, k = (first_slab + slab) * S::SLAB + at;
                const bool there = n < ROWS && (K % S::SLAB == 0 || k < K);
                copy_async(to + n * STRIDE + at, product.rounded + (there ? n * K + k : 0), there);
            }
        }
        end_copies();
    };
    if constexpr (S::CLUSTER > 1) {
        if (thread == 0) {  // the count of the bytes that the cluster's blocks send to this one
            constexpr int REST = ITEMS % NEXT_ITEM;
            const int last = larger(0, smaller(S::THREADS, REST - S::input_block() * S::THREADS));
            begin_arrivals(arrivals);
            expect_bytes(arrivals, S::CLUSTER * (ITEMS / NEXT_ITEM * S::THREADS + last) * 8);
        }
    }
    if constexpr (IN_PANELS) panels.begin();
    if constexpr (S::WARPGROUP) {
#pragma unroll 1
        for (int slab = 0; slab < S::RING; slab++) {
            if (slab < slabs) weights.copy_weights(slab);
            end_copies();
        }
    } else if (slabs > 0) {
        weights.load_all();
    }

    wait_for_previous();
    start_next_at<AFTER_WAIT>();
#pragma unroll 1
    for (int slab = 0; slab < (IN_PANELS ? smaller(AHEAD, slabs) : AHEAD); slab++) {
        if constexpr (IN_PANELS)
            panels.copy(product.rounded, slab);
        else
            copy_slab(slab);
    }
    later.prefetch();
    if constexpr (Rounded<P>::SCALED) {  // by other warps than the first, which finds the rows
        constexpr int FIRST = S::WARPS > 1 ? 32 : 0, MANY = S::THREADS - FIRST;
        const bool clears = blockIdx.x == 0 && blockIdx.y == 0;
        for (int n = thread - FIRST; n < ROWS && thread >= FIRST; n += MANY) {
            const float square = square_at(squares_of(product.squares, P::HALF, ROWS, n));
            rows.scale[n] = rsqrtf(square * (1.0f / HIDDEN) + product.epsilon);
            if (clears) clear_square(squares_of(product.squares, 1 - P::HALF, ROWS, n));
        }
    }
    find_rows(rows, live, P::WANTED);
    if (rows.wanted == 0) {
        wait_copies<0>();
        if constexpr (IN_PANELS)
            for (int slab = 0; slab < smaller(AHEAD, slabs); slab++) panels.wait_for(slab);
        return;
    }
    auto is_wanted = [&](int n) { return n < ROWS && (rows.row[n].flags & P::WANTED) == P::WANTED; };
    auto scale_of = [&](int n) { return Rounded<P>::SCALED ? rows.scale[n] : 1.0f; };

    const int first_item = S::CLUSTER > 1 ? S::input_block() * S::THREADS + thread : thread;
    typedef decltype(product.prepare(rows.row[0], 0, 0)) Prepared;
    auto prepare_item = [&](int item) {
        const int n = item / BLOCK_PAIRS, mine = first_pair + item % BLOCK_PAIRS;
        return item < ITEMS && mine < W::PAIRS && is_wanted(n) ? product.prepare(rows.row[n], n, W::FIRST + mine)
                                                              : Prepared{};
    };
    constexpr int EARLY = S::WARPGROUP && !P::KEYS ? smaller(4, ceil_div(ITEMS, NEXT_ITEM)) : 1;
    Prepared early[EARLY]{};  // for the thread's first items
    if constexpr (!S::WHOLE_SUMS) {
#pragma unroll
        for (int i = 0; i < EARLY; i++) early[i] = prepare_item(first_item + i * NEXT_ITEM);
    }
    float c[S::WARPGROUP ? GROUP_ROWS / 8 : ROW_TILES][4] = {};
    if constexpr (S::WARPGROUP) {
#pragma unroll 1
        for (int slab = 0; slab < slabs; slab++) {
            if (slab == 0)
                wait_copies<S::RING - 1>();
            else if (slab == 1)
                wait_copies<S::RING - 2>();
            else
                wait_copies<S::RING - 3>();
            panels.wait_for(slab);
            publish_copies();
            __syncthreads();  // also: all warps have multiplied the slab that is overwritten next
            if (slab == 0) start_next_at<AFTER_INPUT>();
            weights.multiply(c, slab);
            if (slab > 1) {
                const int next = slab + S::RING - 2;
                if (next < slabs) {
                    panels.copy(product.rounded, next);
                    weights.copy_weights(next);
                }
                end_copies();
            }
            wait_products<1>();
        }
        wait_products<0>();
        settle(c);
        if (S::STAGED) __syncthreads();  // before the sums overwrite the ring
    } else {
        // A lane's inputs of step `i` and of row n * 8 + g: 16 adjacent bytes, or twice 8 in the order of a brick.
        // Panels have the rows of the step only; beyond them other inputs are read, whose sums are unused.
        auto load_inputs = [&](const bf16* slab_inputs, int group, int i, int n) {
            if constexpr (IN_PANELS) {
                const u8* const panel = reinterpret_cast<const u8*>(slab_inputs) + group / 2 * W::INPUT_PANEL + t % 2 * 8;
                const int chunk = i % 2 * 4 + t / 2;  // steps begin with whole bricks
                const int row = ROWS % 8 ? smaller(n * 8 + g, ROWS - 1) : n * 8 + g;
                const uint2 low = *reinterpret_cast<const uint2*>(panel + panel_at(row, chunk));
                const uint2 high = *reinterpret_cast<const uint2*>(panel + panel_at(row, chunk + 2));
                return make_uint4(low.x, low.y, high.x, high.y);
            }
            const bf16* const from = slab_inputs + (n * 8 + g) * STRIDE + group * 32 + t * (W::REORDERED ? 4 : 8);
            if constexpr (W::REORDERED) {
                const uint2 low = *reinterpret_cast<const uint2*>(from);
                const uint2 high = *reinterpret_cast<const uint2*>(from + 16);
                return make_uint4(low.x, low.y, high.x, high.y);
            } else {
                return *reinterpret_cast<const uint4*>(from);
            }
        };
        // `left`: number of inputs from the slab's first one on.  `more`: true to refill; a constant at each call.
        auto multiply_steps = [&](const bf16* slab_inputs, int left, int step, bool more) {
#pragma unroll
            for (int i = 0; i < S::DEPTH; i++) {
                const int group = weights.group(step + i);
                // Inputs beyond the last one are zeros in rows, and arbitrary data in panels.
                const bool there = !IN_PANELS || K % S::SLAB == 0 || group * 32 < left;
                uint4 a0, a1;
                weights.take(a0, a1, i);
#pragma unroll
                for (int n = 0; n < ROW_TILES && there; n++) {
                    const uint4 b = load_inputs(slab_inputs, group, i, n);
                    multiply_tile(c[n], a0.x, a1.x, a0.y, a1.y, b.x, b.y);
                    multiply_tile(c[n], a0.z, a1.z, a0.w, a1.w, b.z, b.w);
                }
                if (more) weights.refill(i);  // into the registers that were just used
            }
        };
#pragma unroll 1
        for (int slab = 0; slab < slabs; slab++) {
            if constexpr (IN_PANELS)
                panels.wait_for(slab);
            else
                wait_copies<S::RING - 2>();
            __syncthreads();  // also: all warps have used the slab that is overwritten next
            copy_slab(slab + S::RING - 1);
            if (slab == 0) start_next_at<AFTER_INPUT>();
            const bf16* const slab_inputs = inputs + slab % S::RING * SLAB_VALUES;
            const int left = K - (first_slab + slab) * S::SLAB;
#pragma unroll 1
            for (int step = 0; step < S::STEPS; step += S::DEPTH) {
                if (step + S::DEPTH < S::STEPS || slab + 1 < slabs) {
                    weights.advance();
                    multiply_steps(slab_inputs, left, step, true);
                } else {
                    multiply_steps(slab_inputs, left, step, false);
                }
            }
            if (S::STAGED && slab + 1 == slabs) __syncthreads();  // before the sums overwrite the ring
        }
    }
    start_next_at<BEFORE_OUTPUT>();

    if constexpr (S::WHOLE_SUMS) {  // a lane has the sums of pair g and of rows 2 t and 2 t + 1 of each tile
        static_assert(!P::EXCHANGES, "a thread has too many sums to wait for together");
        const int mine = first_pair + tile * 8 + g;
#pragma unroll
        for (int n = 0; n < ROW_TILES; n++) {
#pragma unroll
            for (int which = 0; which < 2; which++) {
                const int wanted = n * 8 + t * 2 + which;
                u64 key = 0;
                if (is_wanted(wanted) && mine < W::PAIRS) {
                    const Row row = rows.row[wanted];
                    const float scale = scale_of(wanted);
                    const auto prepared = product.prepare(row, wanted, W::FIRST + mine);
                    key = product.finish(row, wanted, W::FIRST + mine, c[n][which] * scale,
                                         c[n][2 + which] * scale, prepared);
                } else if constexpr (Rounded<P>::FILLS) {
                    if (wanted < ROWS && mine < W::PAIRS) product.fill(wanted, W::FIRST + mine);
                }
                if constexpr (Rounded<P>::CARRIES) {
                    float square = __uint_as_float(static_cast<u32>(key));
#pragma unroll
                    for (int mask = 16; mask > 2; mask /= 2) square += exchange(square, mask);
                    if (g == 0 && is_wanted(wanted)) product.add(wanted, square);
                }
                if constexpr (P::KEYS) {
#pragma unroll
                    for (int mask = 16; mask > 2; mask /= 2) key = largest(key, exchange(key, mask));
                    // A maximum does not depend on the order.
                    if (g == 0 && wanted < ROWS) atomicMax(&bests[wanted], key);
                }
            }
        }
        return;
    }
    if constexpr (S::CLUSTER > 1) arrive_at_cluster<S::CLUSTER>();  // this thread no longer needs the ring
    // Every warp's sums, [part][row][pair][2], so that a thread can finish whole pairs.  Rows are padded so
    // that a warp stores without bank conflicts.
    auto sum_at = [&](int of_part, int n, int p) {
        return sums + (of_part * PADDED_ROWS + n) * (BLOCK_PAIRS + 2) + p;
    };
    if constexpr (S::STAGED) {
#pragma unroll
        for (int n = 0; n < ROW_TILES; n++) {
            *sum_at(part, n * 8 + t * 2, tile * 8 + g) = make_float2(c[n][0], c[n][2]);
            *sum_at(part, n * 8 + t * 2 + 1, tile * 8 + g) = make_float2(c[n][1], c[n][3]);
        }
        __syncthreads();
    }

    auto total_of = [&](int n, int p) {
        float2 total = *sum_at(0, n, p);
#pragma unroll
        for (int i = 1; i < S::SPLIT; i++) {
            const float2 more = *sum_at(i, n, p);
            total = make_float2(total.x + more.x, total.y + more.y);
        }
        return total;
    };
    float2* const partials = reinterpret_cast<float2*>(partials_of(workspace));
    auto partial_at = [&](int block, int n, int p) {
        return partials + (static_cast<long long>(block) * PADDED_ROWS + n) * (TILE_COUNT * 8) + p;
    };
    if constexpr (S::CLUSTER > 1) {
        auto send = [&](int item, float2 sum) {  // sends a sum to the block that finishes the item
            float2* const to = received + S::input_block() * BLOCK_ITEMS;
            send_to_block<S::CLUSTER>(to + item / NEXT_ITEM * S::THREADS + item % S::THREADS, arrivals,
                                      item / S::THREADS % S::CLUSTER, sum);
        };
        wait_for_cluster<S::CLUSTER>();
        if constexpr (S::STAGED) {
            for (int item = thread; item < ITEMS; item += S::THREADS)
                send(item, total_of(item / BLOCK_PAIRS, item % BLOCK_PAIRS));
        } else {
#pragma unroll
            for (int n = 0; n < ROW_TILES; n++) {
#pragma unroll
                for (int which = 0; which < 2; which++) {
                    const int index = n * 8 + t * 2 + which;
                    if (index < ROWS)
                        send(index * BLOCK_PAIRS + tile * 8 + g, make_float2(c[n][which], c[n][2 + which]));
                }
            }
        }
        wait_for_bytes(arrivals);
    } else if constexpr (S::BLOCKS_K > 1) {
        __shared__ bool last;
        for (int item = thread; item < ITEMS; item += S::THREADS) {
            const int n = item / BLOCK_PAIRS, p = item % BLOCK_PAIRS;
            if (first_pair + p < W::PAIRS) *partial_at(blockIdx.y, n, first_pair + p) = total_of(n, p);
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
    constexpr int WHOLE = Rounded<P>::CARRIES ? round_up(ITEMS, 32) : ITEMS;  // whole warps for `sum_lanes`
    auto has_sum = [&](int item) {
        return item < ITEMS && is_wanted(item / BLOCK_PAIRS) && first_pair + item % BLOCK_PAIRS < W::PAIRS;
    };
    // The sum of an item over all inputs of the product.
    auto sum_of = [&](int item) {
        const int n = item / BLOCK_PAIRS, p = item % BLOCK_PAIRS;
        float2 total = make_float2(0.0f, 0.0f);
        if constexpr (S::CLUSTER > 1) {
#pragma unroll
            for (int i = 0; i < S::CLUSTER; i++) {
                const float2 more = received[i * BLOCK_ITEMS + item / NEXT_ITEM * S::THREADS + thread];
                total = make_float2(total.x + more.x, total.y + more.y);
            }
        } else if constexpr (S::BLOCKS_K > 1) {
#pragma unroll
            for (int i = 0; i < S::BLOCKS_K; i++) {
                const float2 more = load_fresh(partial_at(i, n, first_pair + p));
                total = make_float2(total.x + more.x, total.y + more.y);
            }
        } else {
            total = total_of(n, p);
        }
        const float scale = scale_of(n);
        return make_float2(total.x * scale, total.y * scale);
    };
    auto finish = [&](int item, const Prepared& prepared, float2 of_ranks = {}) {
        const int n = item / BLOCK_PAIRS, p = item % BLOCK_PAIRS, mine = first_pair + p;
        u64 key = 0;
        if (!is_wanted(n)) {
            if constexpr (Rounded<P>::FILLS)
                if (n < ROWS && mine < W::PAIRS) product.fill(n, W::FIRST + mine);
        } else if (mine < W::PAIRS) {
            const float2 total = P::EXCHANGES ? of_ranks : sum_of(item);
            key = product.finish(rows.row[n], n, W::FIRST + mine, total.x, total.y, prepared);
        }
        if constexpr (P::KEYS) {
            static_assert(BLOCK_PAIRS % 32 == 0, "a warp's pairs are of one row");
            key = largest_of_warp(key);
            if (lane == 0) atomicMax(&bests[n], key);  // a maximum does not depend on the order
        }
        if constexpr (Rounded<P>::CARRIES) {
            constexpr int LANES = BLOCK_PAIRS % 32 == 0 ? 32 : BLOCK_PAIRS % 16 == 0 ? 16 : 8;  // with one row
            const float square = sum_lanes<LANES>(__uint_as_float(static_cast<u32>(key)));
            if (lane % LANES == 0 && is_wanted(n)) product.add(n, square);
        }
    };
    const int later_item = first_item + EARLY * NEXT_ITEM;  // the thread's first item whose data is not `early`
    if constexpr (P::EXCHANGES) {
        float2 totals[EARLY];
        auto index_of = [&](int item) { return has_sum(item) ? item / BLOCK_PAIRS : -1; };
        auto pair_at = [&](int item) { return W::FIRST + first_pair + item % BLOCK_PAIRS; };
        auto sums_of = [&](int item) { return has_sum(item) ? sum_of(item) : make_float2(0.0f, 0.0f); };
        int indices[EARLY], pairs[EARLY];
#pragma unroll
        for (int i = 0; i < EARLY; i++) {
            const int item = first_item + i * NEXT_ITEM;
            indices[i] = index_of(item), pairs[i] = pair_at(item), totals[i] = sums_of(item);
            if (indices[i] >= 0) product.send(indices[i], pairs[i], totals[i], early[i]);
        }
        for (int item = later_item; item < ITEMS; item += NEXT_ITEM)
            if (has_sum(item)) product.send(index_of(item), pair_at(item), sum_of(item), prepare_item(item));
        product.receive(totals, indices, pairs, early);
#pragma unroll
        for (int i = 0; i < EARLY; i++) {
            const int item = first_item + i * NEXT_ITEM;
            if (item < WHOLE) finish(item, early[i], totals[i]);  // true for all lanes of a warp or for none
        }
        for (int item = later_item; item < WHOLE; item += NEXT_ITEM) {
            const int index[1] = {index_of(item)}, pair[1] = {pair_at(item)};
            const Prepared prepared[1] = {prepare_item(item)};
            float2 total[1] = {sums_of(item)};
            product.receive(total, index, pair, prepared);
            finish(item, prepared[0], total[0]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < EARLY; i++) {
            const int item = first_item + i * NEXT_ITEM;
            if (item < WHOLE) finish(item, early[i]);  // true for all lanes of a warp or for none
        }
        for (int item = later_item; item < WHOLE; item += NEXT_ITEM) finish(item, prepare_item(item));
    }
}

// Computes a product.  `bests` (head only): the largest key of each wanted row in this block, in shared memory.
template <int... N, class P, class L>
DEVICE void matmul(Shape<N...>, const P& product, const int* live, float* workspace, StepRows& rows,
                   L later, u64* bests = nullptr) {
    typedef Shape<N...> S;
    const int block = S::output_block();
    if constexpr (S::WARPGROUP)
        matmul_part<S, WarpgroupWeights<S, P>>(product, product.weight, block, live, workspace, rows, later, bests);
    else
        matmul_part<S, PlainWeights<S, P>>(product, product.weight, block, live, workspace, rows, later, bests);
}

// Computes a product with a packed matrix.  Each part of the matrix has its own rows of bricks, and a block works
// on one part.
template <class S, int FIRST, class R, class... MORE, class P, class L>
DEVICE void matmul_parts(const P& product, const u8* bricks, int block, const int* live,
                         float* workspace, StepRows& rows, L later, u64* bests) {
    constexpr int BLOCKS = ceil_div(R::PAIRS, S::TILES * 8);
    if constexpr (sizeof...(MORE) > 0) {
        constexpr long long BYTES =
            static_cast<long long>(ceil_div(R::PAIRS, 8)) * Brick<typename R::Format>::row_bytes(P::INPUTS);
        if (block >= BLOCKS)
            return matmul_parts<S, FIRST + R::PAIRS, MORE...>(product, bricks + BYTES, block - BLOCKS,
                                                              live, workspace, rows, later, bests);
    }
    matmul_part<S, BrickWeights<S, P, R, FIRST>>(product, bricks, block, live, workspace, rows, later, bests);
}
template <int TILES, int SPLIT, int BLOCKS_K, int SLAB, int DEPTH, int CLUSTER, int RING, int WARPGROUP,
          class... PARTS, class P, class L>
DEVICE void matmul(PackedMatrixShape<TILES, SPLIT, BLOCKS_K, SLAB, DEPTH, CLUSTER, RING, WARPGROUP, PARTS...>,
                   const P& product, const int* live, float* workspace, StepRows& rows,
                   L later, u64* bests = nullptr) {
    typedef Shape<TILES, SPLIT, BLOCKS_K, SLAB, DEPTH, CLUSTER, RING, 0> S;
    matmul_parts<S, 0, PARTS...>(product, product.weight, S::output_block(), live, workspace, rows, later, bests);
}
