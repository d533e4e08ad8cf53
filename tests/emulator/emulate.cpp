// What all emulated kernels share, compiled once: fibers, barriers, and how blocks take turns.
#include "emulate.h"

#include <cstdlib>
#include <numeric>
#include <random>

namespace emulated {

PER_THREAD Fiber* current = nullptr;
PER_THREAD dim3 grid_size{}, block_size{};
PER_THREAD long progress = 0, exits = 0;

static PER_THREAD void* scheduler_stack = nullptr;
static PER_THREAD const std::function<void()>* body = nullptr;

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

void arrive(Barrier& barrier, const int& live) {
    const int generation = barrier.generation;
    barrier.arrived++;
    wait_past(barrier, generation, [&live] { return live; });
}

void sync_warp() {
    Block& block = *current->block;
    const int warp = current->number / 32;
    arrive(block.warp_barriers[warp], block.warp_live[warp]);
}

// Whether a fiber has nothing to do yet: who arrives last opens the barrier, but for exits, after
// which each one that waits has to count again.
static bool must_wait(const Fiber& fiber) {
    return fiber.closed && fiber.closed->generation == fiber.generation && fiber.exits == exits;
}

void launch(const std::function<void()>& kernel, dim3 grid, dim3 block, int shared, bool together) {
    body = &kernel;
    grid_size = grid;
    block_size = block;
    const int threads = block.x * block.y * block.z;
    const int blocks = grid.x * grid.y * grid.z, batch = together ? blocks : 1;
    // Blocks that run together have one set of __shared__ variables, which the usual order allows for.
    const char* const order = together ? nullptr : std::getenv("EMULATED_ORDER");
    const bool backwards = order && std::atoi(order) % 2;
    std::vector<Fiber> fibers(static_cast<size_t>(batch) * threads);
    std::vector<Block> made(batch);
    for (int start = 0; start < blocks; start += batch) {
        for (int b = 0; b < batch; b++) {
            Block& one = made[b];
            one.shared.assign(shared + 2048, 0xff);  // NaN, for who reads what nobody wrote
            one.shared_start = reinterpret_cast<unsigned char*>(
                (reinterpret_cast<uintptr_t>(one.shared.data()) + 1023) / 1024 * 1024);
            one.barrier = {};
            one.cluster = {};
            for (Barrier& part : one.parts) part = {};
            one.warp_barriers.assign((threads + 31) / 32, {});
            one.warp_live.assign((threads + 31) / 32, 0);
            one.slots.assign(threads * 2, 0);
            one.operands.assign(threads * 12, 0);
            one.bulk_copies.clear();
            one.live = threads;
            const int index = backwards ? blocks - 1 - start : start + b;
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
        auto run = [&](Fiber& fiber) {  // as far as it comes
            if (fiber.done || must_wait(fiber)) return;
            current = &fiber;
            current->closed = nullptr;
            emulated_switch(&scheduler_stack, current->stack_pointer);
            left -= fiber.done;
            if (fiber.done && !fiber.block->live && !fiber.block->bulk_copies.empty()) {
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
