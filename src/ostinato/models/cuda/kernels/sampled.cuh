// What happens to a chosen token: the state of its sequence, and the ring that the host reads.
#pragma once

#include "common.cuh"

struct alignas(16) Options {  // program.OPTIONS
    double temperature, top_p;
    u64 seed;
    int top_k, limit;
    double min_p, repetition_penalty;
};

DEVICE void advance_sequence(const Row& row, int token, const Options* options, const int* stops,
                         int* state, int2* ring, u32 stop_count, u32 context, u32 ring_size) {
    const int next = row.position + 1;
    const int limit = min(load_fresh(&options[row.sequence].limit), static_cast<int>(context));
    bool stopped = token < 0 || next >= limit;
    for (u32 i = 0; i < stop_count; i++) {
        const int stop = load_fresh(stops + i);
        stopped |= stop >= 0 && stop == token;
    }
    reinterpret_cast<Row*>(state)[row.sequence] = Row{token, next, next + 1, stopped};
    store_for_host(ring + static_cast<long long>(row.sequence) * ring_size + next % ring_size,
                   make_int2(token, 2 * next + stopped));
}
