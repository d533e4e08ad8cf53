// CUDA on one CPU thread, enough of it to run the decoder's kernels: a block's threads are fibers
// that switch at barriers and warp exchanges, blocks run one after the other.
//
// Not for speed, and no proof of anything that depends on timing or on memory ordering; it finds
// wrong indices, wrong sums, reads of shared memory that nobody wrote, and barriers that not all
// threads reach.  x86-64 only.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <type_traits>
#include <vector>

#define DEVICE inline
#define KERNEL static void  // not visible: libc has an `advance` of its own
#define __shared__ static
#define __launch_bounds__(...)
#define DYNAMIC_SHARED(name) unsigned char* const name = emulated::block_shared()

struct dim3 { unsigned x, y, z; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(8) int2 { int x, y; };
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline int2 make_int2(int x, int y) { return {x, y}; }

namespace emulated {

constexpr size_t STACK = 1 << 18;

struct Barrier {
    int arrived = 0, generation = 0;
};

struct Block;

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
};

struct Block {
    std::vector<Fiber*> fibers;
    std::vector<unsigned char> shared;
    unsigned char* shared_start = nullptr;
    Barrier barrier;
    Barrier cluster;  // of the first block: of all threads of its cluster
    std::vector<Barrier> warp_barriers;
    std::vector<int> warp_live;
    std::vector<uint64_t> slots;     // two a thread, for exchanges in turns
    std::vector<uint32_t> operands;  // twelve a thread, for multiply_tile in turns
    int live = 0;
    int counted = 0;  // by __syncthreads_count
};

inline Fiber* current = nullptr;
inline void* scheduler_stack = nullptr;
inline const std::function<void()>* body = nullptr;
inline dim3 grid_size{}, block_size{};
inline long progress = 0;
inline long exits = 0;

extern "C" void emulated_switch(void** save, void* to);
asm(R"(
.text
.weak emulated_switch
.type emulated_switch,@function
emulated_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");

// Kept from launch to launch, and never cleared: of a large grid's stacks only what is used is there.
inline char* stack_of(size_t fiber) {
    static std::vector<std::unique_ptr<char[]>> stacks;
    while (stacks.size() <= fiber) stacks.emplace_back(new char[STACK]);
    return stacks[fiber].get();
}

inline void yield() { emulated_switch(&current->stack_pointer, scheduler_stack); }

inline void fiber_main() {
    (*body)();
    Fiber* const self = current;
    self->done = true;
    self->block->live--;
    self->block->warp_live[self->number / 32]--;
    progress++;
    exits++;
    yield();
    abort();
}

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
// Whether a fiber has nothing to do yet: who arrives last opens the barrier, but for exits, after
// which each one that waits has to count again.
inline bool must_wait(const Fiber& fiber) {
    return fiber.closed && fiber.closed->generation == fiber.generation && fiber.exits == exits;
}
inline void arrive(Barrier& barrier, const int& live) {
    const int generation = barrier.generation;
    barrier.arrived++;
    wait_past(barrier, generation, [&live] { return live; });
}

// A barrier in two halves.
inline void arrive_early(Barrier& barrier) {
    current->cluster_generation = barrier.generation;
    barrier.arrived++;
    progress++;
}
template <class F> void wait_late(Barrier& barrier, const F& live) {
    wait_past(barrier, current->cluster_generation, live);
}

inline void sync_warp() {
    Block& block = *current->block;
    const int warp = current->number / 32;
    arrive(block.warp_barriers[warp], block.warp_live[warp]);
}

inline unsigned char* block_shared() { return current->block->shared_start; }

// The values of a warp's threads: there until the thread's exchange after the next.
template <class T> const uint64_t* exchanged(T value) {
    static_assert(sizeof(T) <= 8);
    Block& block = *current->block;
    const int number = current->number;
    uint64_t* const slots = &block.slots[current->exchanges++ % 2 * (block.slots.size() / 2)];
    std::memcpy(&slots[number], &value, sizeof(T));
    sync_warp();
    return slots + number / 32 * 32;
}
template <class T> T from_lane(T value, int lane) {
    T other;
    std::memcpy(&other, exchanged(value) + lane, sizeof(T));
    return other;
}

// `together`: all blocks at once (for kernels whose blocks wait for each other), else one by one.
inline void launch(const std::function<void()>& kernel, dim3 grid, dim3 block, int shared,
                   bool together = false) {
    body = &kernel;
    grid_size = grid;
    block_size = block;
    const int threads = block.x * block.y * block.z;
    const int blocks = grid.x * grid.y * grid.z, batch = together ? blocks : 1;
    std::vector<Fiber> fibers(static_cast<size_t>(batch) * threads);
    std::vector<Block> made(batch);
    for (int start = 0; start < blocks; start += batch) {
        for (int b = 0; b < batch; b++) {
            Block& one = made[b];
            one.shared.assign(shared + 256, 0xff);  // NaN, for who reads what nobody wrote
            one.shared_start = reinterpret_cast<unsigned char*>(
                (reinterpret_cast<uintptr_t>(one.shared.data()) + 127) / 128 * 128);
            one.barrier = {};
            one.cluster = {};
            one.warp_barriers.assign((threads + 31) / 32, {});
            one.warp_live.assign((threads + 31) / 32, 0);
            one.slots.assign(threads * 2, 0);
            one.operands.assign(threads * 12, 0);
            one.live = threads;
            const int index = start + b;
            for (int t = 0; t < threads; t++) {
                Fiber& fiber = fibers[static_cast<size_t>(b) * threads + t];
                fiber.stack = stack_of(static_cast<size_t>(b) * threads + t);
                fiber.block = &one;
                fiber.number = t;
                fiber.done = false;
                fiber.closed = nullptr;
                fiber.exchanges = 0;
                fiber.thread = {t % block.x, t / block.x % block.y, t / (block.x * block.y)};
                fiber.index = {index % grid.x, index / grid.x % grid.y, index / (grid.x * grid.y)};
                one.warp_live[t / 32]++;
                uintptr_t top = reinterpret_cast<uintptr_t>(fiber.stack + STACK) / 16 * 16;
                void** at = reinterpret_cast<void**>(top) - 2;
                *at = reinterpret_cast<void*>(&fiber_main);  // the return address of the switch
                at -= 6;
                std::memset(at, 0, 6 * sizeof(void*));
                fiber.stack_pointer = at;
            }
        }
        size_t left = fibers.size();
        long idle = 0;
        while (left) {
            const long before = progress;
            // A warp as far as it comes, while its stacks are in the cache, then the next.
            for (size_t warp = 0; warp < fibers.size(); warp += 32) {
                const size_t end = std::min(warp + 32, fibers.size());
                for (long so_far = -1; so_far != progress;) {
                    so_far = progress;
                    for (size_t f = warp; f < end; f++) {
                        if (fibers[f].done || must_wait(fibers[f])) continue;
                        current = &fibers[f];
                        current->closed = nullptr;
                        emulated_switch(&scheduler_stack, current->stack_pointer);
                        left -= fibers[f].done;
                    }
                }
            }
            idle = progress == before ? idle + 1 : 0;
            if (idle > 1000 && left) {
                std::fprintf(stderr, "emulated: %zu threads wait for ever\n", left);
                abort();
            }
        }
    }
}

template <class... A, size_t... I>
void launch_with(void (*kernel)(A...), void** arguments, std::index_sequence<I...>, dim3 grid,
                 dim3 block, int shared, bool together) {
    const std::function<void()> call = [=] {
        kernel(*static_cast<std::remove_reference_t<A>*>(arguments[I])...);
    };
    launch(call, grid, block, shared, together);
}

template <class... A>
void launch_kernel(void (*kernel)(A...), void** arguments, const int* grid, const int* block,
                   int shared, int together) {
    launch_with(kernel, arguments, std::index_sequence_for<A...>{},
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
inline int __syncthreads_count(bool value) {
    int& counted = emulated::current->block->counted;
    __syncthreads();  // the count before is read
    counted = 0;
    __syncthreads();
    counted += value;
    __syncthreads();
    return counted;
}
inline void __syncwarp() { emulated::sync_warp(); }
inline void __threadfence() {}
inline void __threadfence_system() {}

template <class T> T exchange(T value, int mask) {
    return emulated::from_lane(value, emulated::current->number % 32 ^ mask);
}
template <class T> T __shfl_sync(unsigned, T value, int lane) {
    return emulated::from_lane(value, lane);
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
template <class T> T __ldg(const T* p) { return *p; }

inline float __uint_as_float(unsigned v) { float f; std::memcpy(&f, &v, 4); return f; }
inline unsigned __float_as_uint(float f) { unsigned v; std::memcpy(&v, &f, 4); return v; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline unsigned long long __float2ull_rn(float x) {
    return static_cast<unsigned long long>(std::nearbyint(static_cast<double>(x)));
}
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
template <class T> T min(T a, T b) { return a < b ? a : b; }
template <class T> T max(T a, T b) { return a > b ? a : b; }
using std::isinf;

// ------------------------------------------------------------------- the wrappers of common.cuh

inline void check_aligned(const void* p, size_t bytes) {
    if (reinterpret_cast<uintptr_t>(p) % bytes) {
        std::fprintf(stderr, "emulated: %zu bytes from %p are not aligned\n", bytes, p);
        abort();
    }
}
inline uint4 load_weights(const void* p) {
    check_aligned(p, 16);
    return *static_cast<const uint4*>(p);
}
inline float4 load_norm(const float4* p) { return *p; }
template <class T> T load_fresh(const T* p) {
    check_aligned(p, sizeof(T));
    return *p;
}
inline void wait_for_previous() {}
inline void start_next() {}

inline unsigned round_bf16(float f) {
    const unsigned v = __float_as_uint(f);
    if (f != f) return 0x7fff;
    return (v + 0x7fff + (v >> 16 & 1)) >> 16;
}
inline unsigned pack_bf16(float a, float b) { return round_bf16(a) | round_bf16(b) << 16; }

inline float exp2_fast(float x) { return std::exp2(x); }

inline void multiply_tile(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                          unsigned b0, unsigned b1) {
    emulated::Block& block = *emulated::current->block;
    const int number = emulated::current->number, lane = number % 32, start = number - lane;
    const unsigned own[6] = {a0, a1, a2, a3, b0, b1};
    const uint32_t* const operands =
        &block.operands[emulated::current->exchanges++ % 2 * (block.operands.size() / 2)];
    std::memcpy(const_cast<uint32_t*>(operands) + number * 6, own, sizeof own);
    emulated::sync_warp();
    const int g = lane / 4, t = lane % 4;
    auto half = [](unsigned w, int i) { return __uint_as_float(i ? w & 0xffff0000u : w << 16); };
    for (int upper = 0; upper < 2; upper++)
        for (int i = 0; i < 2; i++) {
            const int n = 2 * t + i;
            float sum = c[upper * 2 + i];
            for (int k = 0; k < 16; k++) {
                const int quarter = k % 8 / 2, late = k / 8;
                const unsigned a = operands[(start + g * 4 + quarter) * 6 + upper + 2 * late];
                const unsigned b = operands[(start + n * 4 + quarter) * 6 + 4 + late];
                sum += half(a, k % 2) * half(b, k % 2);
            }
            c[upper * 2 + i] = sum;
        }
}

inline void store_for_host(int2* p, int2 v) {
    long long whole;
    std::memcpy(&whole, &v, sizeof whole);
    __atomic_store_n(reinterpret_cast<long long*>(p), whole, __ATOMIC_RELEASE);
}

inline void prefetch_weights(const void*, unsigned) {}

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
template <int BLOCKS> inline void sync_cluster() {
    arrive_at_cluster<BLOCKS>();
    wait_for_cluster<BLOCKS>();
}
template <int BLOCKS> inline float* at_block(const float* own, int rank) {
    const auto offset =
        reinterpret_cast<const unsigned char*>(own) - emulated::current->block->shared_start;
    return reinterpret_cast<float*>(block_of_cluster<BLOCKS>(rank)->shared_start + offset);
}
template <int BLOCKS> inline float load_of_block(const float* own, int rank) {
    return *at_block<BLOCKS>(own, rank);
}
// Bytes that are still to come.
inline void expect_bytes(unsigned long long* arrivals, unsigned bytes) {
    check_aligned(arrivals, 8);
    *arrivals = bytes;
}
template <int BLOCKS>
inline void send_to_block(float* own, unsigned long long* arrivals, int rank, float v) {
    *at_block<BLOCKS>(own, rank) = v;
    auto* const counted = reinterpret_cast<unsigned long long*>(
        at_block<BLOCKS>(reinterpret_cast<const float*>(arrivals), rank));
    if (*counted < sizeof v) {
        std::fprintf(stderr, "emulated: more bytes than were expected\n");
        abort();
    }
    *counted -= sizeof v;
    emulated::progress++;
}
inline void wait_for_bytes(unsigned long long* arrivals) {
    while (*arrivals) emulated::yield();
}

// What loop.cu needs: the handle is the address where the value goes.
typedef unsigned long long cudaGraphConditionalHandle;
inline void cudaGraphSetConditional(cudaGraphConditionalHandle handle, unsigned value) {
    *reinterpret_cast<unsigned*>(handle) = value;
}

// What join.cu needs.
template <class T> inline T fresh(const T* p) { return *p; }
inline uint4 fresh4(const void* p) { return *static_cast<const uint4*>(p); }
inline void publish(volatile unsigned long long* p, unsigned long long v) { *p = v; }
