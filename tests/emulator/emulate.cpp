// What all emulated kernels share, compiled once: fibers, barriers, and how blocks take turns.
#include "emulate.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

namespace emulated {

// An asynchronous copy of 16 bytes, or of zeros.
struct Copy {
    void* to;
    const void* from;
    bool there;
};

struct Copies {
    std::vector<std::vector<Copy>> groups;  // the last is not ended
};

// A copy of many bytes, which are counted.  `row`: of a panel, whose chunks of 16 bytes are permuted, or -1.
struct BulkCopy {
    void* to;
    const void* from;  // null for zeros
    unsigned bytes;
    unsigned long long* arrivals;
    int row;
};

// What a block has by thread or by warp.
struct BlockMemory {
    std::vector<unsigned char> shared;
    std::vector<Barrier> warp_barriers;
    std::vector<int> warp_live;
    std::vector<uint64_t> slots;
    std::vector<uint32_t> operands;
    std::vector<BulkCopy> bulk_copies;  // under way
};

PER_THREAD Fiber* current = nullptr;
PER_THREAD dim3 grid_size{}, block_size{};
PER_THREAD long progress = 0, exits = 0;

static PER_THREAD void* scheduler_stack = nullptr;
static PER_THREAD void (*body)(void**) = nullptr;
static PER_THREAD void** values = nullptr;

extern "C" void emulated_switch(void** save, void* to);
asm(R"(
.text
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
static char* stack_of(size_t fiber) {
    static PER_THREAD std::vector<std::unique_ptr<char[]>> stacks;
    while (stacks.size() <= fiber) stacks.emplace_back(new char[STACK]);
    return stacks[fiber].get();
}

void yield() { emulated_switch(&current->stack_pointer, scheduler_stack); }

static void fiber_main() {
    body(values);
    Fiber* const self = current;
    self->done = true;
    self->block->live--;
    self->block->memory->warp_live[self->number / 32]--;
    progress++;
    exits++;
    yield();
    abort();
}

void arrive(Barrier& barrier, const int& live) {
    const int generation = barrier.generation;
    barrier.arrived++;
    wait_past(barrier, generation, [&live] { return live; });
}

void sync_warp() {
    BlockMemory& memory = *current->block->memory;
    const int warp = current->number / 32;
    arrive(memory.warp_barriers[warp], memory.warp_live[warp]);
}

// Whether a fiber has nothing to do yet: who arrives last opens the barrier, but for exits, after
// which each one that waits has to count again.
static bool must_wait(const Fiber& fiber) {
    return fiber.closed && fiber.closed->generation == fiber.generation && fiber.exits == exits;
}

void launch(void (*kernel)(void**), void** arguments, dim3 grid, dim3 block, int shared,
            bool together) {
    body = kernel;
    values = arguments;
    grid_size = grid;
    block_size = block;
    const int threads = block.x * block.y * block.z;
    const int blocks = grid.x * grid.y * grid.z, batch = together ? blocks : 1;
    // Blocks that run together have one set of __shared__ variables, which the usual order allows for.
    const char* const order = together ? nullptr : std::getenv("EMULATED_ORDER");
    const bool backwards = order && std::atoi(order) % 2;
    std::vector<Fiber> fibers(static_cast<size_t>(batch) * threads);
    std::vector<Copies> copies(fibers.size());
    std::vector<Block> made(batch);
    std::vector<BlockMemory> memories(batch);
    for (int start = 0; start < blocks; start += batch) {
        for (int b = 0; b < batch; b++) {
            Block& one = made[b];
            BlockMemory& memory = memories[b];
            memory.shared.assign(shared + 2048, 0xff);  // NaN, for who reads what nobody wrote
            one.shared_start = reinterpret_cast<unsigned char*>(
                (reinterpret_cast<uintptr_t>(memory.shared.data()) + 1023) / 1024 * 1024);
            one.barrier = {};
            one.cluster = {};
            for (Barrier& part : one.parts) part = {};
            memory.warp_barriers.assign((threads + 31) / 32, {});
            memory.warp_live.assign((threads + 31) / 32, 0);
            memory.slots.assign(threads * 2, 0);
            memory.operands.assign(threads * 12, 0);
            memory.bulk_copies.clear();
            one.slots = memory.slots.data();
            one.operands = memory.operands.data();
            one.memory = &memory;
            one.threads = one.live = threads;
            const int index = backwards ? blocks - 1 - start : start + b;
            for (int t = 0; t < threads; t++) {
                Fiber& fiber = fibers[static_cast<size_t>(b) * threads + t];
                fiber.stack = stack_of(static_cast<size_t>(b) * threads + t);
                fiber.block = &one;
                fiber.copies = &copies[static_cast<size_t>(b) * threads + t];
                fiber.number = t;
                fiber.done = false;
                fiber.closed = nullptr;
                fiber.exchanges = 0;
                fiber.thread = {t % block.x, t / block.x % block.y, t / (block.x * block.y)};
                fiber.index = {index % grid.x, index / grid.x % grid.y, index / (grid.x * grid.y)};
                memory.warp_live[t / 32]++;
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
        auto run = [&](Fiber& fiber) {  // as far as it comes
            if (fiber.done || must_wait(fiber)) return;
            current = &fiber;
            current->closed = nullptr;
            emulated_switch(&scheduler_stack, current->stack_pointer);
            left -= fiber.done;
            if (fiber.done && !fiber.block->live && !fiber.block->memory->bulk_copies.empty()) {
                std::fprintf(stderr, "emulated: a block ends before its copies\n");
                abort();
            }
        };
        std::minstd_rand random(order ? std::atoi(order) : 0);
        std::vector<size_t> shuffled(order ? fibers.size() : 0);
        std::iota(shuffled.begin(), shuffled.end(), size_t{0});
        while (left) {
            const long before = progress;
            if (order) {
                std::shuffle(shuffled.begin(), shuffled.end(), random);
                for (size_t f : shuffled)
                    if (random() >> 16 & 1) run(fibers[f]);  // so that some fall behind
            } else {
                // A warp as far as it comes, while its stacks are in the cache, then the next.
                for (size_t warp = 0; warp < fibers.size(); warp += 32) {
                    const size_t end = std::min(warp + 32, fibers.size());
                    for (long so_far = -1; so_far != progress;) {
                        so_far = progress;
                        for (size_t f = warp; f < end; f++) run(fibers[f]);
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

}  // namespace emulated

int __syncthreads_count(bool value) {
    int& counted = emulated::current->block->counted;
    __syncthreads();  // the count before is read
    counted = 0;
    __syncthreads();
    counted += value;
    __syncthreads();
    return counted;
}

void check_aligned(const void* p, size_t bytes) {
    if (reinterpret_cast<uintptr_t>(p) % bytes) {
        std::fprintf(stderr, "emulated: %zu bytes from %p are not aligned\n", bytes, p);
        abort();
    }
}

void copy_async(void* to, const void* from, bool there) {
    check_aligned(to, 16);
    check_aligned(from, 16);
    std::memset(to, 0xff, 16);
    auto& groups = emulated::current->copies->groups;
    if (groups.empty()) groups.emplace_back();
    groups.back().push_back({to, from, there});
}

void end_copies() {
    auto& groups = emulated::current->copies->groups;
    if (groups.empty()) groups.emplace_back();
    groups.emplace_back();
}

void wait_copies(int most) {
    auto& groups = emulated::current->copies->groups;
    while (static_cast<int>(groups.size()) > most + 1) {
        for (const emulated::Copy& copy : groups.front())
            copy.there ? std::memcpy(copy.to, copy.from, 16) : std::memset(copy.to, 0, 16);
        groups.erase(groups.begin());
    }
}

void copy_bytes(void* to, const void* from, unsigned bytes, unsigned long long* arrivals) {
    for (const void* p : {static_cast<const void*>(to), from}) check_aligned(p, 16);
    if (bytes % 16 || !bytes) {
        std::fprintf(stderr, "emulated: %u bytes are copied\n", bytes);
        abort();
    }
    std::memset(to, 0xff, bytes);
    emulated::current->block->memory->bulk_copies.push_back({to, from, bytes, arrivals, -1});
}

void wait_for_bytes(unsigned long long* arrivals, bool odd) {
    auto& copies = emulated::current->block->memory->bulk_copies;
    while ((*arrivals >> 32 & 1) == odd) {
        bool found = false;
        for (size_t i = 0; i < copies.size() && !found; i++) {
            if (copies[i].arrivals != arrivals) continue;
            const emulated::BulkCopy copy = copies[i];
            copies.erase(copies.begin() + i);
            for (unsigned at = 0; at < copy.bytes; at += 16) {
                auto* const to = static_cast<char*>(copy.to) + (copy.row < 0 ? at : at ^ copy.row % 8 * 16);
                copy.from ? std::memcpy(to, static_cast<const char*>(copy.from) + at, 16) : std::memset(to, 0, 16);
            }
            emulated::count_bytes(arrivals, copy.bytes);
            found = true;
        }
        if (!found) emulated::yield();
    }
}

void copy_box(void* to, const void* map, int column, int row, int line, int half,
              unsigned long long* arrivals) {
    check_aligned(to, 1024);
    const TensorMap& of = *static_cast<const TensorMap*>(map);
    std::memset(to, 0xff, of.tile * 128);
    for (unsigned i = 0; i < of.tile; i++) {
        const unsigned char* const from =
            of.from + half * of.half + line * of.line + ((row + i) * 1ull * of.width + column) * 2;
        emulated::current->block->memory->bulk_copies.push_back(
            {static_cast<char*>(to) + i * 128, row + i < of.rows ? from : nullptr, 128, arrivals, int(i)});
    }
}

void multiply_panels(float (*c)[4], int n, const void* a, const void* b) {
    const int thread = emulated::current->number, lane = thread % 32, g = lane / 4, t = lane % 4;
    // A panel begins at a multiple of 1,024 bytes; `from` is a chunk of its first row.
    auto at = [](const void* from, int row, int k) {
        const auto place = reinterpret_cast<uintptr_t>(from);
        const uintptr_t chunk = place % 128 / 16 + k / 8;
        const auto value = *reinterpret_cast<const uint16_t*>(
            place / 128 * 128 + row * 128 + (chunk ^ row % 8) * 16 + k % 8 * 2);
        return __uint_as_float(unsigned(value) << 16);
    };
    for (const void* from : {a, b})
        check_aligned(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(from) / 128 * 128), 1024);
    for (int tile = 0; tile < n / 8; tile++)
        for (int i = 0; i < 4; i++)
            for (int k = 0; k < 16; k++)
                c[tile][i] += at(a, thread / 32 % 4 * 16 + g + i / 2 * 8, k) * at(b, tile * 8 + 2 * t + i % 2, k);
}

void multiply_shares(float (*c)[4], int tiles, const unsigned (&a)[4], Panels b) {
    check_aligned(b.at, 1024);
    const uint32_t* const operands = emulated::exchanged_operands({a[0], a[1], a[2], a[3], 0, 0});
    const int lane = emulated::current->number % 32, g = lane / 4, t = lane % 4;
    auto half = [](unsigned w, int i) { return __uint_as_float(i ? w & 0xffff0000u : w << 16); };
    for (int tile = 0; tile < tiles; tile++)
        for (int i = 0; i < 4; i++)
            for (int k = 0; k < 16; k++) {
                const unsigned word = operands[(g * 4 + k % 8 / 2) * 6 + i / 2 + k / 8 * 2];
                const int column = tile * 8 + 2 * t + i % 2;
                const auto value = *reinterpret_cast<const uint16_t*>(
                    b.at + column / 64 * b.next + k * 128 + (column % 64 / 8 ^ k % 8) * 16 + column % 8 * 2);
                c[tile][i] += half(word, k % 2) * __uint_as_float(unsigned(value) << 16);
            }
}

void multiply_tile(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                          unsigned b0, unsigned b1) {
    const uint32_t* const operands = emulated::exchanged_operands({a0, a1, a2, a3, b0, b1});
    const int lane = emulated::current->number % 32, g = lane / 4, t = lane % 4;
    auto half = [](unsigned w, int i) { return __uint_as_float(i ? w & 0xffff0000u : w << 16); };
    for (int upper = 0; upper < 2; upper++)
        for (int i = 0; i < 2; i++) {
            const int n = 2 * t + i;
            float sum = c[upper * 2 + i];
            for (int k = 0; k < 16; k++) {
                const int quarter = k % 8 / 2, late = k / 8;
                const unsigned a = operands[(g * 4 + quarter) * 6 + upper + 2 * late];
                const unsigned b = operands[(n * 4 + quarter) * 6 + 4 + late];
                sum += half(a, k % 2) * half(b, k % 2);
            }
            c[upper * 2 + i] = sum;
        }
}
