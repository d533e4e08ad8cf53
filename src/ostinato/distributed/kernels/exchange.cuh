// The exchange of a block with the same block of every other rank, through the ranks' windows
// (exchange.cu).  A source that includes this file defines `load_fresh`.
#pragma once
#include "words.cuh"

// `table`: addresses of all ranks' windows, of `lost`, and of this rank's window again.
struct Exchange {
    u64* windows[RANKS];
    u64* own;
    const u32* lost;
    u32 rank, number, place, epoch;

    // May run before the wait: the table never changes.  `number`: of the block's counter; `place`: the
    // offset of the thread's words from a rank's first.
    DEVICE Exchange(const u64* table, u32 rank, u32 number, u32 place)
        : rank(rank), number(number), place(place) {
#pragma unroll
        for (u32 r = 0; r < RANKS; r++) windows[r] = reinterpret_cast<u64*>(table[r]);
        lost = reinterpret_cast<const u32*>(table[RANKS]);
        own = reinterpret_cast<u64*>(table[RANKS + 1]);
    }
    DEVICE Exchange(const u64* table, u32 rank)
        : Exchange(table, rank, blockIdx.x, 2 * (blockIdx.x * EXCHANGE_THREADS + threadIdx.x)) {}
    DEVICE u32* counter() const { return reinterpret_cast<u32*>(own) + number; }
    // Offset of the thread's words from rank 0 of the current epoch.
    DEVICE u64 half() const {
        return EXCHANGE_HEADER + static_cast<u64>(epoch & 1) * RANKS * EXCHANGE_WORDS + place;
    }
    // Sends two values to the rank `to`.
    DEVICE void send(u32 to, u32 one, u32 other) const {
        send_words(windows[to] + half() + static_cast<u64>(rank) * EXCHANGE_WORDS,
                   word_of(one, epoch), word_of(other, epoch));
    }
    DEVICE bool receive(u32 (&values)[RANKS][2], u32 one, u32 other) const {
        return receive_from_ranks(values, rank, one, other, own + half(), EXCHANGE_WORDS, epoch, lost);
    }
    // Called first, after the wait.
    DEVICE void begin() { epoch = load_fresh(counter()); }

    // Sends two values to all ranks, and gets the two values of each of them if any is `wanted`.
    DEVICE bool gather(u32 (&values)[RANKS][2], u32 one, u32 other, bool wanted) {
        epoch++;
#pragma unroll
        for (u32 r = 0; r < RANKS; r++)
            if (r != rank) send(r, one, other);
        return !wanted || receive(values, one, other);
    }
    // Replaces a pair of values by its sum over all ranks, if any of it is `wanted`.
    DEVICE void sum(float (&pairs)[1][2], bool wanted) {
        u32 values[RANKS][2] = {};
        gather(values, __float_as_uint(pairs[0][0]), __float_as_uint(pairs[0][1]), wanted);
#pragma unroll
        for (u32 i = 0; i < 2; i++) pairs[0][i] = sum_of_ranks(values, i);
    }
    // Replaces a pair of values for each rank by their sums over all ranks, in two exchanges: each
    // rank adds the pairs that have its number, and sends the sums to the others.
    DEVICE void sum_scattered(float (&pairs)[RANKS][2]) {
        u32 values[RANKS][2], one = 0, other = 0;
        epoch++;
#pragma unroll
        for (u32 r = 0; r < RANKS; r++) {
            const u32 u = __float_as_uint(pairs[r][0]), v = __float_as_uint(pairs[r][1]);
            if (r != rank) send(r, u, v);
            one = r == rank ? u : one;
            other = r == rank ? v : other;
        }
        const bool whole = receive(values, one, other);
        one = __float_as_uint(sum_of_ranks(values, 0));
        other = __float_as_uint(sum_of_ranks(values, 1));
        epoch++;
        if (whole) {  // others that do not know of the failure yet get no NaN
#pragma unroll
            for (u32 r = 0; r < RANKS; r++)
                if (r != rank) send(r, one, other);
            receive(values, one, other);
        }
#pragma unroll
        for (u32 r = 0; r < RANKS; r++)
#pragma unroll
            for (u32 i = 0; i < 2; i++) pairs[r][i] = __uint_as_float(values[r][i]);
    }
    // Called last, by every thread of the block.
    DEVICE void end() {
        __syncthreads();
        if (threadIdx.x == 0) *counter() = epoch;
    }
};

// The meetings of a block with the same block of every other rank, between which it reads and writes
// their windows.  A meeting is an exchange of words without a value by the first thread.
struct Meetings : Exchange {
    DEVICE Meetings(const u64* table, u32 rank)
        : Exchange(table, rank, EXCHANGE_BLOCKS + blockIdx.x,
                   2 * (EXCHANGE_BLOCKS * EXCHANGE_THREADS + blockIdx.x)) {}
    // The place in rank r's window of `p`, which points into this rank's window.
    template <class T> DEVICE T* in_window(u32 r, T* p) const {
        const long long distance = reinterpret_cast<long long>(p) - reinterpret_cast<long long>(own);
        return reinterpret_cast<T*>(reinterpret_cast<long long>(windows[r]) + distance);
    }
    // Waits for the other ranks.  What their blocks wrote before, and the kernels before them, all threads
    // of this block read behind it.  False once the word at `lost` is not 0.
    DEVICE bool meet() {
        __shared__ bool met;
        __syncthreads();
        if (threadIdx.x == 0) {
            u32 values[RANKS][2];
            __threadfence_system();
            met = gather(values, 0, 0, true);
            __threadfence_system();
        }
        __syncthreads();
        return met;
    }
};

// The pairs of a thread in a sum of `count` values: one for each rank if SCATTERED, else one.
template <bool SCATTERED> struct ExchangedPairs {
    static constexpr u32 COUNT = SCATTERED ? RANKS : 1;
    u32 count;

    // The place of the first value of pair `p`: adjacent threads have adjacent pairs.
    DEVICE u32 at(u32 p) const {
        return 2 * ((blockIdx.x * COUNT + p) * EXCHANGE_THREADS + threadIdx.x);
    }
    // How many values of the pair are among the first `count`.
    DEVICE u32 wanted(u32 p) const { return at(p) < count ? min(count - at(p), 2u) : 0; }
    // Calls `work` with pair, number in the pair, and place, of each value that is wanted.
    template <class F> DEVICE void for_each(const F& work) const {
#pragma unroll
        for (u32 p = 0; p < COUNT; p++)
#pragma unroll
            for (u32 i = 0; i < 2; i++)
                if (i < wanted(p)) work(p, i, at(p) + i);
    }

    DEVICE void sum(Exchange& exchange, float (&pairs)[COUNT][2]) const {
        if constexpr (SCATTERED)
            exchange.sum_scattered(pairs);
        else
            exchange.sum(pairs, wanted(0) > 0);
    }
};
