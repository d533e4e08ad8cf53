// CUDA on one CPU thread, enough of it to run the decoder's kernels: a block's threads are fibers
// that switch at barriers and warp exchanges, blocks run one after the other, but for those of clusters.
// With EMULATED_ORDER in the environment, a number, fibers take turns in a random order, but for those of
// clusters: an access to shared memory that no barrier separates from another thread's comes before it at
// times, and at times behind it.  With an odd number the last block runs first.
//
// Not for speed, and no proof of anything that depends on timing or on memory ordering; it finds
// wrong indices, wrong sums, reads of shared memory that nobody wrote, and barriers that not all
// threads reach.  x86-64 only.
#pragma once

// C's headers, and none of C++ beside <utility>: each kernel that is built reads them all.
#define _GLIBCXX_INCLUDE_NEXT_C_HEADERS
#include <math.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#undef _GLIBCXX_INCLUDE_NEXT_C_HEADERS

#include <utility>

#define DEVICE inline
#define KERNEL static void  // not visible: libc has an `advance` of its own
#ifdef EMULATED_THREADS  // launches on several threads at once: each has the variables of its own
#define PER_THREAD thread_local
#else
#define PER_THREAD
#endif
#define __shared__ static PER_THREAD
#define __launch_bounds__(...)
#define DYNAMIC_SHARED(name) unsigned char* const name = emulated::block_shared()
#define ALIGNED_SHARED(name, bytes) DYNAMIC_SHARED(name)

struct dim3 { unsigned x, y, z; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(8) int2 { int x, y; };
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline int2 make_int2(int x, int y) { return {x, y}; }

namespace emulated {

constexpr size_t STACK = 1 << 18;

struct Barrier {
    int arrived = 0, generation = 0;
};

struct Block;
struct Copies;
struct BlockMemory;

struct Fiber {
    void* stack_pointer = nullptr;
    char* stack = nullptr;
    Block* block = nullptr;
    dim3 thread{}, index{};
    int number = 0;
    bool done = false;
    int cluster_generation = 0;
    int exchanges = 0;  // so far: two that follow each other use different halves of `slots`
    const Barrier* closed = nullptr;  // where it waits, since this generation and so many exits
    int generation = 0;
    long exits = 0;
    Copies* copies = nullptr;  // those under way
};

struct Block {
    unsigned char* shared_start = nullptr;
    Barrier barrier;
    Barrier cluster;  // of the first block: of all threads of its cluster
    Barrier parts[16];  // of some of the threads
    uint64_t* slots = nullptr;     // two a thread, for exchanges in turns
    uint32_t* operands = nullptr;  // twelve a thread, for products in turns
    BlockMemory* memory = nullptr;
    int threads = 0, live = 0;
    int counted = 0;  // by __syncthreads_count
};

extern PER_THREAD Fiber* current;
extern PER_THREAD dim3 grid_size, block_size;
extern PER_THREAD long progress, exits;

void yield();

// Until all of the `live()` threads have arrived; who is the last opens the barrier.
template <class F> void wait_past(Barrier& barrier, int generation, const F& live) {
    while (barrier.generation == generation) {
        if (barrier.arrived >= live()) {
            barrier.arrived = 0;
            barrier.generation++;
            progress++;
            return;
        }
        current->closed = &barrier;
        current->generation = generation;
        current->exits = exits;
        yield();
    }
}
void arrive(Barrier& barrier, const int& live);
void sync_warp();

// A barrier in two halves.
inline void arrive_early(Barrier& barrier) {
    current->cluster_generation = barrier.generation;
    barrier.arrived++;
    progress++;
}
template <class F> void wait_late(Barrier& barrier, const F& live) {
    wait_past(barrier, current->cluster_generation, live);
}

inline unsigned char* block_shared() { return current->block->shared_start; }

// The values of a warp's threads: there until the thread's exchange after the next.
template <class T> const uint64_t* exchanged(T value) {
    static_assert(sizeof(T) <= 8);
    Block& block = *current->block;
    const int number = current->number;
    uint64_t* const slots = block.slots + current->exchanges++ % 2 * block.threads;
    memcpy(&slots[number], &value, sizeof(T));
    sync_warp();
    return slots + number / 32 * 32;
}
// The same of the six operands that a thread gives to a product of the tensor cores.
inline const uint32_t* exchanged_operands(const unsigned (&own)[6]) {
    Block& block = *current->block;
    uint32_t* const all = block.operands + current->exchanges++ % 2 * block.threads * 6;
    memcpy(all + current->number * 6, own, sizeof own);
    sync_warp();
    return all + current->number / 32 * 32 * 6;
}
template <class T> T from_lane(T value, int lane) {
    T other;
    memcpy(&other, exchanged(value) + lane, sizeof(T));
    return other;
}

// `together`: all blocks at once (for kernels whose blocks wait for each other), else one by one.
void launch(void (*kernel)(void** arguments), void** arguments, dim3 grid, dim3 block, int shared,
            bool together);

template <class... A, size_t... I>
void call_with(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
    kernel(*static_cast<A*>(arguments[I])...);
}
template <class... A> void call(void (*kernel)(A...), void** arguments) {
    call_with(kernel, arguments, std::index_sequence_for<A...>{});
}

template <auto kernel>
void launch_kernel(void** arguments, const int* grid, const int* block, int shared, int together) {
    launch([](void** values) { call(kernel, values); }, arguments,
           {unsigned(grid[0]), unsigned(grid[1]), unsigned(grid[2])},
           {unsigned(block[0]), unsigned(block[1]), unsigned(block[2])}, shared, together);
}

}  // namespace emulated

#define threadIdx (emulated::current->thread)
#define blockIdx (emulated::current->index)
#define blockDim (emulated::block_size)
#define gridDim (emulated::grid_size)

inline void __syncthreads() {
    emulated::arrive(emulated::current->block->barrier, emulated::current->block->live);
}
int __syncthreads_count(bool value);
inline void __syncwarp() { emulated::sync_warp(); }
inline void __threadfence() {}
inline void __threadfence_system() {}

template <class T> T exchange(T value, int mask) {
    return emulated::from_lane(value, emulated::current->number % 32 ^ mask);
}
template <class T> T __shfl_sync(unsigned, T value, int lane, int width = 32) {
    return emulated::from_lane(value, emulated::current->number % 32 / width * width + lane);
}
template <class T> T __shfl_up_sync(unsigned, T value, int distance) {
    const int lane = emulated::current->number % 32;
    return emulated::from_lane(value, lane >= distance ? lane - distance : lane);
}
inline unsigned __ballot_sync(unsigned, bool value) {
    const uint64_t* const values = emulated::exchanged<uint64_t>(value);
    unsigned all = 0;
    for (int lane = 0; lane < 32; lane++) all |= static_cast<unsigned>(values[lane]) << lane;
    return all;
}
inline unsigned __match_any_sync(unsigned, unsigned long long value) {
    const uint64_t* const values = emulated::exchanged<unsigned long long>(value);
    unsigned same = 0;
    for (int lane = 0; lane < 32; lane++)
        same |= static_cast<unsigned>(values[lane] == value) << lane;
    return same;
}
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
    const uint64_t* const values = emulated::exchanged(value);
    uint64_t most = 0;
    for (int lane = 0; lane < 32; lane++) {
        const uint64_t one = values[lane] & 0xffffffffu;
        most = one > most ? one : most;
    }
    return static_cast<unsigned>(most);
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const uint64_t both = static_cast<uint64_t>(b) << 32 | a;
    unsigned made = 0;
    for (int i = 0; i < 4; i++)
        made |= static_cast<unsigned>(both >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    return made;
}
inline int __clz(unsigned v) { return v ? __builtin_clz(v) : 32; }
inline int __ffs(unsigned v) { return __builtin_ffs(v); }
inline int __popc(unsigned v) { return __builtin_popcount(v); }

template <class T, class U> T atomicAdd(T* p, U v) {
    const T old = *p;
    *p = old + v;
    return old;
}
template <class T> T atomicCAS(T* p, T expected, T v) {
    const T old = *p;
    if (old == expected) *p = v;
    return old;
}
template <class T, class U> T atomicMax(T* p, U v) {
    const T old = *p;
    *p = old > v ? old : v;
    return old;
}
template <class T> T atomicExch(T* p, T v) {
    const T old = *p;
    *p = v;
    return old;
}
template <class T, class U> T atomicOr(T* p, U v) {
    const T old = *p;
    *p = old | v;
    return old;
}
template <class T> T __ldg(const T* p) { return *p; }

inline float __uint_as_float(unsigned v) { float f; memcpy(&f, &v, 4); return f; }
inline unsigned __float_as_uint(float f) { unsigned v; memcpy(&v, &f, 4); return v; }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline unsigned long long __float2ull_rn(float x) {
    return static_cast<unsigned long long>(nearbyint(static_cast<double>(x)));
}
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
template <class T> T min(T a, T b) { return a < b ? a : b; }
template <class T> T max(T a, T b) { return a > b ? a : b; }
#undef isinf
inline bool isinf(float x) { return __builtin_isinf(x); }

// ------------------------------------------------------------------- the wrappers of common.cuh

void check_aligned(const void* p, size_t bytes);
inline uint4 load_weights(const void* p) {
    check_aligned(p, 16);
    return *static_cast<const uint4*>(p);
}
inline uint2 load_weights8(const void* p) {
    check_aligned(p, 8);
    return *static_cast<const uint2*>(p);
}
inline unsigned load_weights4(const void* p) {
    check_aligned(p, 4);
    return *static_cast<const unsigned*>(p);
}
inline float4 load_norm(const float4* p) { return *p; }
template <class T> T load_fresh(const T* p) {
    check_aligned(p, sizeof(T));
    return *p;
}
// As late as can be: until a thread waits for it the place of a copy holds NaN, so that a read too early
// and a copy into what others still read are both seen.
void copy_async(void* to, const void* from, bool there);
void end_copies();
void wait_copies(int groups);
template <int GROUPS> inline void wait_copies() { wait_copies(GROUPS); }
inline void wait_for_previous() {}
inline void start_next() {}

inline unsigned round_bf16(float f) {
    const unsigned v = __float_as_uint(f);
    if (f != f) return 0x7fff;
    return (v + 0x7fff + (v >> 16 & 1)) >> 16;
}
inline unsigned pack_bf16(float a, float b) { return round_bf16(a) | round_bf16(b) << 16; }

inline float exp2_fast(float x) { return exp2f(x); }

void multiply_tile(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                   unsigned b1);

// Four warps at once: each lane reads what its own sums need.
void multiply_panels(float (*c)[4], int n, const void* a, const void* b);
template <int TILES> void multiply_group(float (&c)[TILES][4], const void* a, const void* b) {
    multiply_panels(c, 8 * TILES, a, b);
}
inline void start_group() {}
inline void end_group() {}
inline void publish_copies() {}

inline void load_turned(unsigned (&v)[4], const void* row) {
    check_aligned(row, 16);
    const uint64_t* const rows = emulated::exchanged(reinterpret_cast<uint64_t>(row));
    const int lane = emulated::current->number % 32, g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; i++) {
        auto value = [&](int r) { return unsigned(reinterpret_cast<const uint16_t*>(rows[8 * i + r])[g]); };
        v[i] = value(2 * t) | value(2 * t + 1) << 16;
    }
}

template <bool SIGNED>
inline void multiply_bytes(int (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                           unsigned b0, unsigned b1) {
    const uint32_t* const operands = emulated::exchanged_operands({a0, a1, a2, a3, b0, b1});
    const int lane = emulated::current->number % 32, g = lane / 4, t = lane % 4;
    auto code = [](unsigned w, int i) {
        const int byte = w >> 8 * i & 0xff;
        return SIGNED ? static_cast<int8_t>(byte) : byte;
    };
    for (int upper = 0; upper < 2; upper++)
        for (int i = 0; i < 2; i++) {
            const int n = 2 * t + i;
            int sum = c[upper * 2 + i];
            for (int k = 0; k < 32; k++) {
                const int quarter = k % 16 / 4, late = k / 16;
                const unsigned a = operands[(g * 4 + quarter) * 6 + upper + 2 * late];
                const unsigned b = operands[(n * 4 + quarter) * 6 + 4 + late];
                sum += code(a, k % 4) * static_cast<int8_t>(b >> k % 4 * 8 & 0xff);
            }
            c[upper * 2 + i] = sum;
        }
}

inline float f16_value(unsigned bits) {
    const unsigned exponent = bits >> 10 & 31, fraction = bits & 1023;
    float v = exponent == 0    ? ldexpf(static_cast<float>(fraction), -24)
              : exponent == 31 ? (fraction ? NAN : INFINITY)
                               : ldexpf(static_cast<float>(fraction | 1024), exponent - 25);
    return bits & 0x8000 ? -v : v;
}
inline float low_f16(unsigned w) { return f16_value(w & 0xffff); }
inline float high_f16(unsigned w) { return f16_value(w >> 16); }

inline unsigned load_of_host(const unsigned* p) { return *p; }
inline void store_for_host(int2* p, int2 v) {
    long long whole;
    memcpy(&whole, &v, sizeof whole);
    __atomic_store_n(reinterpret_cast<long long*>(p), whole, __ATOMIC_RELEASE);
}

namespace emulated {
static PER_THREAD unsigned long long prefetched_bytes;  // of a launch
}

// Reads both ends, so that a range beyond the weights is not passed over.  cp.async.bulk takes no address and
// no size that is not a multiple of 16.
inline void prefetch_weights(const void* p, unsigned bytes) {
    emulated::prefetched_bytes += bytes;
    const volatile char* const at = static_cast<const char*>(p);
    check_aligned(p, 16);
    check_aligned(static_cast<const char*>(p) + bytes, 16);
    at[0], at[bytes - 1];
}

// A cluster's blocks lie beside each other; all blocks run at once.
template <int BLOCKS> inline emulated::Block* block_of_cluster(int rank) {
    return emulated::current->block - emulated::current->index.x % BLOCKS + rank;
}
template <int BLOCKS> inline void arrive_at_cluster() {
    emulated::arrive_early(block_of_cluster<BLOCKS>(0)->cluster);
}
template <int BLOCKS> inline void wait_for_cluster() {
    emulated::Block* const first = block_of_cluster<BLOCKS>(0);
    emulated::wait_late(first->cluster, [first] {
        int live = 0;
        for (int rank = 0; rank < BLOCKS; rank++) live += first[rank].live;
        return live;
    });
}
template <int BLOCKS, class T> inline T* at_block(const T* own, int rank) {
    const auto offset =
        reinterpret_cast<const unsigned char*>(own) - emulated::current->block->shared_start;
    return reinterpret_cast<T*>(block_of_cluster<BLOCKS>(rank)->shared_start + offset);
}
// From above: the arrivals of a phase (8 bits), phases that are over, and of this phase the arrivals (8 bits)
// and the bytes that are still to come.
namespace emulated {
constexpr unsigned ARRIVAL = 1u << 24;
inline void complete(unsigned long long* arrivals) {
    if (static_cast<unsigned>(*arrivals)) return;
    *arrivals += (1ull << 32) + (*arrivals >> 56) * ARRIVAL;
    progress++;
}
inline void count_bytes(unsigned long long* arrivals, unsigned bytes) {
    if (static_cast<unsigned>(*arrivals) % ARRIVAL < bytes) {
        fprintf(stderr, "emulated: more bytes than were expected\n");
        abort();
    }
    *arrivals -= bytes;
    complete(arrivals);
}
}  // namespace emulated
inline void begin_arrivals(unsigned long long* arrivals, unsigned count = 1) {
    check_aligned(arrivals, 8);
    *arrivals = static_cast<unsigned long long>(count) << 56 | count * emulated::ARRIVAL;
}
inline void expect_bytes(unsigned long long* arrivals, unsigned bytes) {
    if (static_cast<unsigned>(*arrivals) < emulated::ARRIVAL) {
        fprintf(stderr, "emulated: an arrival too many: %llx, %u\n", *arrivals, bytes);
        abort();
    }
    *arrivals += bytes;
    *arrivals -= emulated::ARRIVAL;
    emulated::complete(arrivals);
}
inline void arrive(unsigned long long* arrivals) { expect_bytes(arrivals, 0); }
inline int uniform(int value) { return value; }
inline float divide_fast(float a, float b) { return a / b; }
template <int BLOCKS, class T>
inline void send_to_block(T* own, unsigned long long* arrivals, int rank, T v) {
    check_aligned(own, sizeof(T));
    *at_block<BLOCKS>(own, rank) = v;
    auto* const counted = reinterpret_cast<unsigned long long*>(
        at_block<BLOCKS>(reinterpret_cast<const float*>(arrivals), rank));
    emulated::count_bytes(counted, sizeof v);
}
// They come when one waits for them, and not before.
void copy_bytes(void* to, const void* from, unsigned bytes, unsigned long long* arrivals);
void wait_for_bytes(unsigned long long* arrivals, bool odd = false);

// What warpgroups.cuh has.
inline void sync_part(int part, int threads) {
    emulated::Barrier& barrier = emulated::current->block->parts[part];
    const int generation = barrier.generation;
    barrier.arrived++;
    emulated::wait_past(barrier, generation, [threads] { return threads; });
}
inline void arrive_part(int part, int threads) {
    emulated::Barrier& barrier = emulated::current->block->parts[part];
    emulated::progress++;
    if (++barrier.arrived < threads) return;
    barrier.arrived = 0;
    barrier.generation++;
}
inline void wait_for_arrivals(unsigned long long* arrivals, bool odd) { wait_for_bytes(arrivals, odd); }
template <int REGISTERS> inline void take_registers() {}
template <int REGISTERS> inline void give_registers() {}

struct Panels {
    const unsigned char* at;
    unsigned next;
};
inline Panels panels_at(const void* p, unsigned next = 16) { return {static_cast<const unsigned char*>(p), next}; }
inline Panels further(Panels panels, unsigned bytes) { return {panels.at + bytes, panels.next}; }
template <bool ADD, int TILES> inline void multiply_rows(float (&c)[TILES][4], Panels a, Panels b) {
    if (!ADD) memset(c, 0, sizeof c);
    multiply_panels(c, 8 * TILES, a.at, b.at);
}
void multiply_shares(float (*c)[4], int tiles, const unsigned (&a)[4], Panels b);
template <int TILES> inline void multiply_shares(float (&c)[TILES][4], const unsigned (&a)[4], Panels b) {
    multiply_shares(c, TILES, a, b);
}
template <int PENDING> inline void wait_products() { emulated::sync_warp(); }
template <int TILES> inline void settle(float (&)[TILES][4]) {}

struct TensorMap {
    const unsigned char* from;
    unsigned width, rows, tile;
    unsigned long long line, half;
};
inline void make_map(void* map, void*, const void* from, unsigned width, unsigned rows, unsigned tile,
                     unsigned, unsigned long long line, unsigned long long half) {
    check_aligned(map, 128);
    *static_cast<TensorMap*>(map) = {static_cast<const unsigned char*>(from), width, rows, tile, line, half};
    __syncwarp();
}
void copy_box(void* to, const void* map, int column, int row, int line, int half,
              unsigned long long* arrivals);

// What loop.cu needs: the handle is the address where the value goes.
typedef unsigned long long cudaGraphConditionalHandle;
inline void cudaGraphSetConditional(cudaGraphConditionalHandle handle, unsigned value) {
    *reinterpret_cast<unsigned*>(handle) = value;
}

// What join.cu needs.
template <class T> inline T fresh(const T* p) { return *p; }
inline uint4 fresh4(const void* p) { return *static_cast<const uint4*>(p); }
inline void publish(volatile unsigned long long* p, unsigned long long v) { *p = v; }

// What exchange.cu needs: other ranks are other threads of this process.
inline void send_words(unsigned long long* p, unsigned long long one, unsigned long long other) {
    check_aligned(p, 16);
    __atomic_store_n(p, one, __ATOMIC_RELAXED);
    __atomic_store_n(p + 1, other, __ATOMIC_RELAXED);
}
namespace emulated {
inline void wait_for_ranks() {
    progress++;  // to wait for another rank is no standstill of this one
    yield();
    // Now and then a thread is late, so that other ranks get as far ahead as they can.
    static PER_THREAD unsigned turns = 0;
    if (++turns % 257 == 0) usleep(300);
}
}  // namespace emulated
inline void receive_words(const unsigned long long* p, unsigned long long& one,
                          unsigned long long& other) {
    check_aligned(p, 16);
    emulated::wait_for_ranks();
    one = __atomic_load_n(p, __ATOMIC_RELAXED);
    other = __atomic_load_n(p + 1, __ATOMIC_RELAXED);
}
inline void send_word(unsigned long long* p, unsigned long long word) {
    __atomic_store_n(p, word, __ATOMIC_RELAXED);
}
inline unsigned long long receive_word(const unsigned long long* p) {
    emulated::wait_for_ranks();
    return __atomic_load_n(p, __ATOMIC_RELAXED);
}
inline unsigned told_by_host(const unsigned* p) {
    sched_yield();
    return __atomic_load_n(p, __ATOMIC_RELAXED);
}
constexpr unsigned POLLS = 64;
