// Collectives of small messages in the ranks' own memory: each rank stores its values into the
// window of every other rank, and waits for the others' values in its own window (`exchange.py`).
//
// A window begins with a counter for each block (`epochs`); the words of two exchanges follow:
//
//     words[epoch % 2][rank][block][2 * EXCHANGE_THREADS]        (words.cuh)
//
// and, as the last words of a rank, two for each block that meets others (`Meetings` in exchange.cuh).
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
// A sum is one exchange, in which every rank sends its values to all others, or two ("scattered"), in
// which it sends each rank a part of them, and then the sum of its own part to all.  With R ranks the
// first sends R - 1 times the values, the second 2 (R - 1) / R times.  The order of additions, hence the
// bits, are the same.  In the first exchange of the two, a thread waits for the words of all ranks, also
// unused ones: only then may it send those of the second.
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

#include "exchange.cuh"

// out = the sum of every rank's `values`; plus `target`, and cleared = 0, unless they are null.
template <bool SCATTERED>
DEVICE void sum(const float* values, const float* target, float* out, float* cleared, const u64* table,
                u32 count, u32 rank) {
    Exchange exchange(table, rank);
    const ExchangedPairs<SCATTERED> pairs{count};
    wait_for_previous();
    start_next();
    float sums[pairs.COUNT][2] = {}, before[pairs.COUNT][2] = {};
    pairs.for_each([&](u32 p, u32 i, u32 at) {
        sums[p][i] = load_fresh(values + at);
        if (target != nullptr) before[p][i] = load_fresh(target + at);
    });
    exchange.begin();
    pairs.sum(exchange, sums);
    pairs.for_each([&](u32 p, u32 i, u32 at) {
        out[at] = target != nullptr ? __fadd_rn(before[p][i], sums[p][i]) : sums[p][i];
        if (cleared != nullptr) cleared[at] = 0.0f;
    });
    exchange.end();
}

// target += the sum of every rank's `partial`; partial = 0.
KERNEL __launch_bounds__(EXCHANGE_THREADS)
    exchange_accumulate(u32* order, float* target, float* partial, const u64* table, u32 count,
                        u32 rank) {
    sum<false>(partial, target, target, partial, table, count, rank);
}
KERNEL __launch_bounds__(EXCHANGE_THREADS)
    scattered_accumulate(u32* order, float* target, float* partial, const u64* table, u32 count,
                         u32 rank) {
    sum<true>(partial, target, target, partial, table, count, rank);
}

// out = the sum of every rank's `source`.
KERNEL __launch_bounds__(EXCHANGE_THREADS)
    exchange_reduce(u32* order, const float* source, float* out, const u64* table, u32 count,
                    u32 rank) {
    sum<false>(source, nullptr, out, nullptr, table, count, rank);
}
KERNEL __launch_bounds__(EXCHANGE_THREADS)
    scattered_reduce(u32* order, const float* source, float* out, const u64* table, u32 count,
                     u32 rank) {
    sum<true>(source, nullptr, out, nullptr, table, count, rank);
}

// out[line][rank] = source[line] of that rank; `count` values of 4 bytes, `width` in a line.
KERNEL __launch_bounds__(EXCHANGE_THREADS)
    exchange_gather(u32* order, const u32* source, u32* out, const u64* table, u32 count, u32 width,
                    u32 rank) {
    Exchange exchange(table, rank);
    const ExchangedPairs<false> pairs{count};
    wait_for_previous();
    start_next();
    const u32 first = pairs.at(0), wanted = pairs.wanted(0);
    u32 own[2] = {}, values[RANKS][2];
#pragma unroll
    for (u32 i = 0; i < 2; i++)
        if (i < wanted) own[i] = load_fresh(source + first + i);
    exchange.begin();
    exchange.gather(values, own[0], own[1], wanted > 0);
#pragma unroll
    for (u32 i = 0; i < 2; i++)
        if (i < wanted) {
            const u32 line = (first + i) / width, place = (first + i) % width;
#pragma unroll
            for (u32 r = 0; r < RANKS; r++)
                out[(static_cast<u64>(line) * RANKS + r) * width + place] = values[r][i];
        }
    exchange.end();
}
