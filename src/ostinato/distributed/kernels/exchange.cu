// Collectives of small messages in the ranks' own memory: each rank stores its values into the
// window of every other rank, and waits for the others' values in its own window (`exchange.py`).
//
// A window begins with a counter for each block (`epochs`); the words of two exchanges follow:
//
//     words[epoch % 2][rank][block][2 * THREADS]        (words.cuh)
//
// Block b of a rank exchanges with block b of every other rank, and with no other block.  Its counter
// is the number of its exchanges.  All ranks launch the same grids in the same order, so the counter is
// the same on all ranks.  The counter is on the device, so that replays, iterations of a loop and single
// launches are counted without the host.
//
// Two halves are enough.  When rank A sends epoch e to rank B, it overwrites the words of e - 2 there.
// A has completed e - 1 (kernels of a rank run one after the other), so A has received all words that
// B's block sent for e - 1.  B sent these after completing e - 2, hence after reading the words that A
// now overwrites.  So a rank can be one exchange ahead of another, but never two.
//
// A block stores all of its words in each exchange, including unused ones, so that no word is older
// than two exchanges of its block: when epochs repeat after 2^32 exchanges, no word of the previous
// round is left.
//
// A wait also ends when the word at `lost` is not 0: the host of this rank sets it if the group fails.
// The results are NaN then, and the group's memory is not used for another exchange.
//
// All blocks of a grid must be resident at once, on all ranks: the caller keeps grids that small.
#include "words.cuh"

#ifndef EMULATED  // tests compile this file as C++ and define these otherwise
#define KERNEL extern "C" __global__ void
DEVICE float load_fresh(const float* p) { return __ldcg(p); }
DEVICE u32 load_fresh(const u32* p) { return __ldcg(p); }
#if __CUDA_ARCH__ >= 900
DEVICE void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE void start_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
#else
DEVICE void wait_for_previous() {}
DEVICE void start_next() {}
#endif
#endif

// Exchanges two values of each thread: those at `first`, 2 * (the thread's number in the grid).
// `table`: addresses of all ranks' windows, of `lost`, and of this rank's window again.  `wanted`: how
// many of the two values are among the first `count`; with 0 the thread only sends.  `values`: the two
// values of every rank.
struct Exchange {
    u64* windows[RANKS];
    u64* own;
    const u32* lost;
    u32 rank, first, wanted, epoch;
    u32 values[RANKS][2];

    // May run before the wait: the table never changes.
    DEVICE Exchange(const u64* table, u32 count, u32 rank)
        : rank(rank),
          first(2 * (blockIdx.x * THREADS + threadIdx.x)),
          wanted(first < count ? min(count - first, 2u) : 0) {
#pragma unroll
        for (u32 r = 0; r < RANKS; r++) windows[r] = reinterpret_cast<u64*>(table[r]);
        lost = reinterpret_cast<const u32*>(table[RANKS]);
        own = reinterpret_cast<u64*>(table[RANKS + 1]);
    }
    DEVICE u32* counter() const { return reinterpret_cast<u32*>(own) + blockIdx.x; }

    DEVICE void run(u32 one, u32 other) {
        epoch = load_fresh(counter()) + 1;
        const u64 half = EPOCH_WORDS + static_cast<u64>(epoch & 1) * RANKS * WORDS + first;
        const u64 mine = half + static_cast<u64>(rank) * WORDS;
        const u64 words[2] = {word_of(one, epoch), word_of(other, epoch)};
#pragma unroll
        for (u32 r = 0; r < RANKS; r++)
            if (r != rank) send_words(windows[r] + mine, words[0], words[1]);
        if (wanted) receive_from_ranks(values, rank, one, other, own + half, WORDS, epoch, lost);
    }
    DEVICE float sum(u32 i) const { return sum_of_ranks(values, i); }
    // Called last, by every thread of the block.
    DEVICE void end() {
        __syncthreads();
        if (threadIdx.x == 0) *counter() = epoch;
    }
};

// target += the sum of every rank's `partial`; partial = 0.
KERNEL __launch_bounds__(THREADS)
    exchange_accumulate(u32* order, float* target, float* partial, const u64* table, u32 count,
                        u32 rank) {
    Exchange exchange(table, count, rank);
    wait_for_previous();
    start_next();
    const u32 first = exchange.first, wanted = exchange.wanted;
    float own[2] = {}, before[2] = {};
#pragma unroll
    for (u32 i = 0; i < 2; i++)
        if (i < wanted) {
            own[i] = load_fresh(partial + first + i);
            before[i] = load_fresh(target + first + i);
        }
    exchange.run(__float_as_uint(own[0]), __float_as_uint(own[1]));
#pragma unroll
    for (u32 i = 0; i < 2; i++)
        if (i < wanted) {
            target[first + i] = __fadd_rn(before[i], exchange.sum(i));
            partial[first + i] = 0.0f;
        }
    exchange.end();
}

// out = the sum of every rank's `source`.
KERNEL __launch_bounds__(THREADS)
    exchange_reduce(u32* order, const float* source, float* out, const u64* table, u32 count,
                    u32 rank) {
    Exchange exchange(table, count, rank);
    wait_for_previous();
    start_next();
    const u32 first = exchange.first, wanted = exchange.wanted;
    float own[2] = {};
#pragma unroll
    for (u32 i = 0; i < 2; i++)
        if (i < wanted) own[i] = load_fresh(source + first + i);
    exchange.run(__float_as_uint(own[0]), __float_as_uint(own[1]));
#pragma unroll
    for (u32 i = 0; i < 2; i++)
        if (i < wanted) out[first + i] = exchange.sum(i);
    exchange.end();
}

// out[line][rank] = source[line] of that rank; `count` values of 4 bytes, `width` in a line.
KERNEL __launch_bounds__(THREADS)
    exchange_gather(u32* order, const u32* source, u32* out, const u64* table, u32 count, u32 width,
                    u32 rank) {
    Exchange exchange(table, count, rank);
    wait_for_previous();
    start_next();
    const u32 first = exchange.first, wanted = exchange.wanted;
    u32 own[2] = {};
#pragma unroll
    for (u32 i = 0; i < 2; i++)
        if (i < wanted) own[i] = load_fresh(source + first + i);
    exchange.run(own[0], own[1]);
#pragma unroll
    for (u32 i = 0; i < 2; i++)
        if (i < wanted) {
            const u32 line = (first + i) / width, place = (first + i) % width;
#pragma unroll
            for (u32 r = 0; r < RANKS; r++)
                out[(static_cast<u64>(line) * RANKS + r) * width + place] = exchange.values[r][i];
        }
    exchange.end();
}
