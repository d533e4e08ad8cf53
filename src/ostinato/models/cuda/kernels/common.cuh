// Code that all kernels of the decoder share: rows, bfloat16, loads, programmatic launch, reductions.
//
// NVRTC compiles the kernels for one shape (macros; see lowering.py), without headers of the toolkit.
// Tests compile the kernels as C++, with EMULATED and their own definitions in place of the GPU's.
//
// Memory rules for every kernel:
// * Weights, norms and the rope table do not change while a step runs, so they may be read before
//   `wait_for_previous`; but not with ld.global.nc: ptxas (13.0 to 13.5) moves such loads, volatile or
//   not, behind griddepcontrol.wait, and nothing is prefetched.  Weak loads stay where they are: in the
//   disassembly, ACQBULK comes after the LDG.E.NA.128.
// * Everything that a step writes is read after `wait_for_previous`, past L1 (`load_fresh`), and without
//   __restrict__, which would let the compiler assume constant data and move a load before the wait.
//   Results of a kernel before the previous one may be read earlier if the previous one's START_NEXT is
//   not AT_START: all blocks of the previous one have passed their own wait then.
// * Every block waits, even one without work: the next kernel's wait then covers all earlier kernels.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short bf16;  // the bits; no arithmetic in this type
typedef unsigned char u8;
#ifdef PACKED
typedef u8 Weight;  // bricks.cuh
#else
typedef bf16 Weight;
#endif

// Points at which a kernel lets the next one start, in the order of execution.  At AFTER_INPUT the kernel
// has issued all of its loads, so that the next kernel's prefetches are served while this one computes.
#define AT_START 0
#define AFTER_WAIT 1
#define AFTER_INPUT 2
#define BEFORE_OUTPUT 3
#define NEVER 4
#ifndef START_NEXT
#define START_NEXT AFTER_WAIT
#endif

// Additions of model families to Llama's layers (LlamaConfig): a bias on queries, keys and values; a norm
// of each head of queries and keys; layers with a sliding window.
#ifndef QKV_BIAS
#define QKV_BIAS 0
#endif
#ifndef QK_NORM
#define QK_NORM 0
#endif
#ifndef WINDOWED
#define WINDOWED 0
#endif

constexpr int ACTIVE = 1, SAMPLE = 2, FROM_STATE = 4, MASKED = 8, DRAFTS = 16;

struct alignas(16) Row {
    int token, position, sequence, flags;
};

#ifndef EMULATED

#define DEVICE __device__ __forceinline__
#define KERNEL extern "C" __global__ void
#define DYNAMIC_SHARED(name) ALIGNED_SHARED(name, 128)
#define ALIGNED_SHARED(name, bytes) extern __shared__ __align__(bytes) unsigned char name[]

// ---------------------------------------------------------------------------------------- loads

// Defines a load.  CODE: the instruction, in which the address follows the values, which are the other arguments.
#define LOAD(NAME, TYPE, POINTED, CODE, ...)                   \
    DEVICE TYPE NAME(const POINTED* p) {                       \
        TYPE v;                                                \
        asm volatile("ld.global." CODE : __VA_ARGS__ : "l"(p)); \
        return v;                                              \
    }
// Loads weights.  One multiprocessor reads them once, so they are not allocated in L1.
LOAD(load_weights, uint4, void, "L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];", "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w))
LOAD(load_weights8, uint2, void, "L1::no_allocate.v2.u32 {%0, %1}, [%2];", "=r"(v.x), "=r"(v.y))
LOAD(load_weights4, u32, void, "L1::no_allocate.u32 %0, [%1];", "=r"(v))
// Loads 16 bytes of a norm's weights, which every block reads.
LOAD(load_norm, float4, float4, "v4.f32 {%0, %1, %2, %3}, [%4];", "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w))
#undef LOAD

// Prefetches weights (a multiple of 16 bytes) into L2, without waiting.
DEVICE void prefetch_weights(const void* p, u32 bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p), "r"(bytes));
#endif
}

// Load data that another kernel of this step writes, past L1.
#define LOAD_FRESH(TYPE, CODE, ...)                                           \
    DEVICE TYPE load_fresh(const TYPE* p) {                                   \
        TYPE v;                                                               \
        asm volatile("ld.global.cg." CODE : __VA_ARGS__ : "l"(p) : "memory"); \
        return v;                                                             \
    }
LOAD_FRESH(float4, "v4.f32 {%0, %1, %2, %3}, [%4];", "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w))
LOAD_FRESH(float2, "v2.f32 {%0, %1}, [%2];", "=f"(v.x), "=f"(v.y))
LOAD_FRESH(float, "f32 %0, [%1];", "=f"(v))
LOAD_FRESH(uint4, "v4.u32 {%0, %1, %2, %3}, [%4];", "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w))
LOAD_FRESH(u64, "u64 %0, [%1];", "=l"(v))
LOAD_FRESH(int, "s32 %0, [%1];", "=r"(v))
#undef LOAD_FRESH
DEVICE u32 load_fresh(const u32* p) { return load_fresh(reinterpret_cast<const int*>(p)); }

// Copies 16 bytes that another kernel of this step wrote to shared memory, past L1 and without registers;
// writes zeros if not `there`.  `end_copies` ends a group of copies.
DEVICE void copy_async(void* to, const void* from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                     static_cast<u32>(__cvta_generic_to_shared(to))),
                 "l"(from), "r"(there ? 16 : 0)
                 : "memory");
}
DEVICE void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most GROUPS groups of this thread are pending.  Copies of other threads are visible after
// a barrier.
template <int GROUPS> DEVICE void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory");
}

// ------------------------------------------------------------------------- programmatic launch

DEVICE void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEVICE void start_next() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ------------------------------------------------------------------------------------- clusters

// A barrier of all threads of the BLOCKS blocks of a cluster, in two halves.  Of the writes before it, only
// those of `begin_arrivals` and `expect_bytes` are visible after it: a release would wait for all pending
// loads and stores (MEMBAR.ALL.GPU, a microsecond).
template <int BLOCKS> DEVICE void arrive_at_cluster() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
template <int BLOCKS> DEVICE void wait_for_cluster() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Sending values to another block: they are stored in its shared memory, and their bytes are counted there
// (an mbarrier).  The values are visible to a thread that has waited for the expected number of bytes.
//
// One thread initialises a block's count and sets the number of bytes to expect, before it arrives at the
// cluster's barrier.  A block sends only after it has waited for that barrier, and must not exit while bytes
// are sent to it.  When all bytes have arrived, more may be expected in the count's next phase.
DEVICE void begin_arrivals(u64* arrivals, u32 count = 1) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "mbarrier.init.shared::cta.b64 [%0], %1;\n\t"
        "fence.mbarrier_init.release.cluster;" ::"r"(static_cast<u32>(__cvta_generic_to_shared(arrivals))),
        "r"(count)
        : "memory");
#endif
}
DEVICE void expect_bytes(u64* arrivals, u32 bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                     static_cast<u32>(__cvta_generic_to_shared(arrivals))),
                 "r"(bytes)
                 : "memory");
#endif
}
#if __CUDA_ARCH__ >= 900
#define SEND(TYPE, BITS, VALUE, ...)                                                                \
    template <int BLOCKS> DEVICE void send_to_block(TYPE* own, u64* arrivals, int rank, TYPE v) {   \
        const u32 to = static_cast<u32>(__cvta_generic_to_shared(own));                             \
        const u32 at = static_cast<u32>(__cvta_generic_to_shared(arrivals));                        \
        asm volatile(                                                                               \
            "{\n\t.reg .u32 there, counted;\n\tmapa.shared::cluster.u32 there, %0, %2;\n\t"           \
            "mapa.shared::cluster.u32 counted, %1, %2;\n\t"                                         \
            "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes" BITS " [there], " VALUE    \
            ", [counted];\n\t}" ::"r"(to), "r"(at), "r"(rank), __VA_ARGS__                          \
            : "memory");                                                                            \
    }
#else
#define SEND(TYPE, BITS, VALUE, ...) \
    template <int BLOCKS> DEVICE void send_to_block(TYPE*, u64*, int, TYPE) {}
#endif
SEND(float, ".f32", "%3", "f"(v))
SEND(float2, ".v2.f32", "{%3, %4}", "f"(v.x), "f"(v.y))
#undef SEND
// Wait for all expected bytes of a phase; `odd`: of the second, fourth, … phase.
#define WAIT(NAME, ORDER)                                                           \
    DEVICE void NAME(u64* arrivals, bool odd = false) {                             \
        const u32 at = static_cast<u32>(__cvta_generic_to_shared(arrivals));        \
        u32 there = 0;                                                              \
        while (!there) {                                                            \
            asm volatile(                                                           \
                "{\n\t.reg .pred p;\n\t"                                           \
                "mbarrier.try_wait.parity" ORDER ".shared::cta.b64 p, [%1], %2;\n\t" \
                "selp.u32 %0, 1, 0, p;\n\t}"                                        \
                : "=r"(there)                                                       \
                : "r"(at), "r"(static_cast<u32>(odd))                               \
                : "memory");                                                        \
        }                                                                           \
    }
#if __CUDA_ARCH__ >= 900
WAIT(wait_for_bytes, ".acquire.cluster")
WAIT(wait_for_arrivals, "")  // and for arrivals, all from this block
#else
DEVICE void wait_for_bytes(u64*, bool = false) {}
DEVICE void wait_for_arrivals(u64*, bool = false) {}
#endif
#undef WAIT
// Copies `bytes` bytes (a multiple of 16) that another kernel of this step wrote to this block's shared memory,
// and counts them in `arrivals`.  The block must not exit before they have arrived.
DEVICE void copy_bytes(void* to, const void* from, u32 bytes, u64* arrivals) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     static_cast<u32>(__cvta_generic_to_shared(to))),
                 "l"(from), "r"(bytes), "r"(static_cast<u32>(__cvta_generic_to_shared(arrivals)))
                 : "memory");
#endif
}

// ------------------------------------------------------------------------------- arithmetic units

// Rounds two floats to bfloat16, to nearest even; `a` is in the lower half.
DEVICE u32 pack_bf16(float a, float b) {
    u32 v;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(b), "f"(a));
    return v;
}

// c += a b on the tensor cores: a 16x16 (row g = lane / 4), b 16x8, bfloat16; c 16x8, float32.
DEVICE void multiply_tile(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Loads four tiles of 8x8 bfloat16 from shared memory, transposed.  Lane 8 i + r passes the address of row r
// of tile i (16 bytes).  v[i] of lane 4 g + t receives column g of rows 2 t and 2 t + 1 of tile i, the layout
// of b0 and b1 of `multiply_tile`.
DEVICE void load_turned(u32 (&v)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "r"(static_cast<u32>(__cvta_generic_to_shared(row))));
}

// c += a b on the tensor cores, exactly: a 16x32 (row g = lane / 4) of signed or unsigned bytes, b 32x8 of
// signed bytes; c 16x8 of 32 bits.
template <bool SIGNED>
DEVICE void multiply_bytes(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#define MULTIPLY(TYPE)                                                  \
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32." TYPE ".s8.s32 " \
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
                 : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])       \
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1))
    if constexpr (SIGNED)
        MULTIPLY("s8");
    else
        MULTIPLY("u8");
#undef MULTIPLY
}

// Converts the two float16 of a word to floats.
DEVICE float low_f16(u32 w) {
    float v;
    asm("{.reg .f16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(v) : "r"(w));
    return v;
}
DEVICE float high_f16(u32 w) {
    float v;
    asm("{.reg .f16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h;}" : "=f"(v) : "r"(w));
    return v;
}

DEVICE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Marks a value as equal in all lanes of the warp, for the compiler.
DEVICE int uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }

// Divides with an error of up to two units in the last place; the result is 0 if b is above 2^126.
DEVICE float divide_fast(float a, float b) { return __fdividef(a, b); }

template <class T> DEVICE T exchange(T value, int mask) {
    return __shfl_xor_sync(0xffffffffu, value, mask);
}

// Loads from pinned memory what the host wrote before it launched the kernel.
DEVICE u32 load_of_host(const u32* p) {
    u32 v;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

// Stores 8 bytes to pinned memory, atomically for the host.
DEVICE void store_for_host(int2* p, int2 v) {
    asm volatile("st.relaxed.sys.global.v2.s32 [%0], {%1, %2};" ::"l"(p), "r"(v.x), "r"(v.y)
                 : "memory");
}

#endif  // EMULATED

DEVICE constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
DEVICE constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }
DEVICE constexpr int smaller(int a, int b) { return a < b ? a : b; }
DEVICE constexpr int larger(int a, int b) { return a > b ? a : b; }
DEVICE constexpr int power_of_two_above(int n) {
    int p = 1;
    while (p < n) p *= 2;
    return p;
}

// The weights of a product that comes later in the step, or null.  A product prefetches the first BYTES of
// them into L2 after its own first loads, each block a share: memory is mostly idle while this kernel ends
// and the kernels in between run.
template <u32 BYTES> struct Later {
    const u8* weights = nullptr;

    DEVICE void prefetch() const {
        if constexpr (BYTES > 0) {
            constexpr u32 PIECE = 2048;
            static_assert(BYTES % PIECE == 0, "whole pieces");
            const u32 lane = threadIdx.x + 32 - blockDim.x;  // a lane of the last warp if below 32
            if (weights == nullptr || lane >= 32) return;
            const u32 blocks = gridDim.x * gridDim.y * gridDim.z;
            const u32 block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
            for (u32 i = lane * blocks + block; i < BYTES / PIECE; i += 32 * blocks)
                prefetch_weights(weights + i * PIECE, PIECE);
        }
    }
};

// The layout of rounded inputs of products: rows, panels for warpgroups, or panels for bricks.
#define ROWS_OF_INPUTS 0
#define WARPGROUP_PANELS 1
#define BRICK_PANELS 2
#ifndef PANELS
#define PANELS ROWS_OF_INPUTS
#endif
constexpr bool IN_PANELS = PANELS != ROWS_OF_INPUTS;

// A panel has rows of 64 bfloat16, 128 bytes.  The 16-byte chunks of a row are permuted so that chunks read
// together lie in different banks: one chunk of 8 rows by a warpgroup, two chunks of 4 rows by a warp with
// bricks.  A panel for warpgroups begins at a multiple of 1,024 bytes in shared memory.
constexpr int PANEL_WIDTH = 128;
DEVICE constexpr int panel_at(int row, int chunk) {
    return row * PANEL_WIDTH + (chunk ^ (PANELS == BRICK_PANELS ? row % 4 * 2 : row % 8)) * 16;
}

// The position of a chunk of 8 rounded values of a row, in units of 16 bytes: in rows of `width` values, or in
// consecutive panels.
DEVICE int rounded_at(int rows, int width, int row, int chunk) {
    if constexpr (IN_PANELS) return (chunk / 8 * rows * PANEL_WIDTH + panel_at(row, chunk % 8)) / 16;
    return row * (width / 8) + chunk;
}

template <int WHERE> DEVICE void start_next_at() {
    if constexpr (WHERE == START_NEXT) start_next();
}

DEVICE Row load_row(const int* live, int index) {
    const uint4 v = load_fresh(reinterpret_cast<const uint4*>(live) + index);
    return Row{static_cast<int>(v.x), static_cast<int>(v.y), static_cast<int>(v.z),
               static_cast<int>(v.w)};
}

// Returns a row of a step, with token and position of the state where it asks for these; inactive if its
// sequence has stopped or is out of range.
DEVICE Row resolved_row(const int* rows, int index, const int* state, u32 sequences) {
    Row row = load_row(rows, index);
    if (static_cast<u32>(row.sequence) >= sequences) {
        row.flags &= ~ACTIVE;
    } else if (row.flags & FROM_STATE) {
        const Row now = load_row(state, row.sequence);  // token, position, length, stopped
        row.token = now.token;
        row.position = now.position;
        if (now.flags) row.flags &= ~ACTIVE;
    }
    return row;
}

// The workspace: COUNTER_BYTES of counters that are zero between kernels, then partial results of a kernel
// for its own last block or for the next kernel.
constexpr int COUNTER_BYTES = 1 << 16;

DEVICE u32* counters_of(float* workspace) { return reinterpret_cast<u32*>(workspace); }
DEVICE float* partials_of(float* workspace) { return workspace + COUNTER_BYTES / sizeof(float); }
DEVICE u64* keys_of(float* workspace) { return reinterpret_cast<u64*>(partials_of(workspace)); }

#define MINUS_INFINITY __uint_as_float(0xff800000u)

// Converts the two bfloat16 of a word to floats.
DEVICE float low_half(u32 w) { return __uint_as_float(w << 16); }
DEVICE float high_half(u32 w) { return __uint_as_float(w & 0xffff0000u); }

// Returns a value of IQ4_NL's table.  `code`: 0 to 15.
DEVICE int iq4_nl_value(u32 code) {
    static constexpr int VALUES[] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    return VALUES[code];
}

// The positions that a row attends to end here; 0 for a row that is not active.
DEVICE int end_of(const Row& row) { return row.flags & ACTIVE ? row.position + 1 : 0; }

// The first position that a row at position `length` - 1 attends to; `window` is 0 for all positions.
DEVICE int first_position(int length, u32 window) {
    const int most = static_cast<int>(window);
    return WINDOWED && most && length > most ? length - most : 0;
}

// The sum over each group of WIDTH lanes (a power of two), in all of its lanes.  The order is fixed.
template <int WIDTH> DEVICE float sum_lanes(float v) {
#pragma unroll
    for (int mask = WIDTH / 2; mask > 0; mask /= 2) v += exchange(v, mask);
    return v;
}

DEVICE int largest_of_lanes(int v) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) v = larger(v, exchange(v, mask));
    return v;
}
DEVICE int least_of_lanes(int v) { return -largest_of_lanes(-v); }

// Scores are powers of two relative to a base, which is raised to the largest score only once that is above
// base + FAR, so that sums are rarely rescaled.
constexpr float FAR = 8.0f;

// Replaces the scores of row g (`half` 0) or g + 8 (1) of tiles, laid out as by `multiply_tile`, by their powers,
// and adds these to the row's sum in this lane.  Returns the factor of what is relative to the base before.
template <int TILES> DEVICE float take_powers(float (&score)[TILES][4], int half, float& base, float& sum) {
    float most = MINUS_INFINITY;
#pragma unroll
    for (int n = 0; n < TILES; n++) most = fmaxf(most, fmaxf(score[n][half * 2], score[n][half * 2 + 1]));
    most = fmaxf(most, exchange(most, 1));
    most = fmaxf(most, exchange(most, 2));
    // A row without positions so far has no base, and no sum to rescale.
    const float old = base, now = most > old + FAR ? most : old;
    const float zero = now == MINUS_INFINITY ? 0.0f : now;
    const float shrinks = now == old ? 1.0f : exp2_fast(old - now);
    base = now;
    float total = 0.0f;
#pragma unroll
    for (int n = 0; n < TILES; n++) {
#pragma unroll
        for (int i = half * 2; i < half * 2 + 2; i++) total += score[n][i] = exp2_fast(score[n][i] - zero);
    }
    sum = sum * shrinks + total;
    return shrinks;
}

// Rounds eight floats to bfloat16.
DEVICE uint4 pack_eight(const float4& u, const float4& v) {
    return make_uint4(pack_bf16(u.x, u.y), pack_bf16(u.z, u.w), pack_bf16(v.x, v.y), pack_bf16(v.z, v.w));
}
DEVICE uint4 pack_eight(const float (&v)[8]) {
    return pack_eight(make_float4(v[0], v[1], v[2], v[3]), make_float4(v[4], v[5], v[6], v[7]));
}
DEVICE float4 times(const float4& a, float factor) {
    return make_float4(a.x * factor, a.y * factor, a.z * factor, a.w * factor);
}

DEVICE u64 largest(u64 a, u64 b) { return a > b ? a : b; }

DEVICE u64 largest_of_warp(u64 v) {
    const u32 own = static_cast<u32>(v >> 32);
    const u32 high = __reduce_max_sync(0xffffffffu, own);
    const u32 low = __reduce_max_sync(0xffffffffu, own == high ? static_cast<u32>(v) : 0);
    return static_cast<u64>(high) << 32 | low;
}

// Maps a float32 to an integer with the same order.  -0 is mapped as 0; NaN is not allowed.
DEVICE u32 ordered(float x) {
    const u32 bits = __float_as_uint(x + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
DEVICE float from_ordered(u32 key) {
    return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// The key of a logit and its index: larger for a larger logit, and for a lower index on ties.  NaN has the
// largest key, so that a single NaN determines the result.
constexpr u64 NAN_KEY = ~0ull;
DEVICE u64 logit_key(float logit, u32 index) {
    if (logit != logit) return NAN_KEY;
    return static_cast<u64>(ordered(logit)) << 32 | (0xffffffffu - index);
}
