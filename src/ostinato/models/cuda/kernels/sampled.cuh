// A row that samples: its options, and the state that its token changes.  The host changes options and end
// tokens between steps only, so they may be read before `wait_for_previous` wherever `live` may be.
#pragma once

#include "common.cuh"

struct alignas(16) Options {  // program.OPTIONS
    double temperature, top_p;
    u64 seed;
    int top_k, limit;
    double min_p, repetition_penalty;
    float frequency_penalty, presence_penalty;
    int answer;
    short biased, logprobs;

    DEVICE bool penalises() const {
        return repetition_penalty != 1.0 || frequency_penalty != 0.0f || presence_penalty != 0.0f;
    }
    // True if the model's likeliest token is to be chosen, and nothing else is to be done.
    DEVICE bool plain() const {
        return temperature == 0.0 && !penalises() && biased == 0 && logprobs == 0;
    }
};

// The row of a block.
struct SampledRow {
    Row row;
    bool wanted, plain = true;

    DEVICE SampledRow(const int* live, const Options* options)
        : row(load_row(live, blockIdx.x)),
          wanted((row.flags & (ACTIVE | SAMPLE)) == (ACTIVE | SAMPLE)) {
        if (wanted) plain = !(row.flags & MASKED) && options[row.sequence].plain();
    }
};

// The conditions that end a sequence, held by a warp: the limit, and one end token for each lane.
struct Ending {
    int limit, token;
};
DEVICE Ending ending_of(int limit, const int* stops) {
    static_assert(STOPS <= 32, "a lane each");
    const int lane = threadIdx.x % 32;
    return Ending{limit, lane < STOPS ? load_fresh(stops + lane) : -1};
}
DEVICE Ending ending_of(const SampledRow& sampled, const Options* options, const int* stops) {
    return ending_of(sampled.wanted ? options[sampled.row.sequence].limit : 0, stops);
}

constexpr int MORE = 1 << 30;  // program.MORE

// Returns the token of the largest key of a row's logits; -1 for NaN and infinity.
DEVICE int greedy_token(u64 key) {
    if (key == NAN_KEY || isinf(from_ordered(static_cast<u32>(key >> 32)))) return -1;
    return static_cast<int>(0xffffffffu - static_cast<u32>(key));
}

// Writes the sequence's new state, and its token to the ring that the host reads.  One whole warp calls it.
// Returns whether the step goes on with the next token: if a draft `agreed` and the sequence has not stopped.
DEVICE bool advance(const Row& row, int token, const Ending& ending, int* state, int2* ring, u32 context,
                    u32 ring_size, bool agreed = false) {
    const int next = row.position + 1;
    const bool ends = __ballot_sync(0xffffffffu, ending.token == token) != 0;
    const bool stopped = ends || token < 0 || next >= min(ending.limit, static_cast<int>(context));
    const bool more = agreed && !stopped;
    if (threadIdx.x % 32) return more;
    reinterpret_cast<Row*>(state)[row.sequence] = Row{token, next, next + 1, stopped};
    store_for_host(ring + static_cast<long long>(row.sequence) * ring_size + next % ring_size,
                   make_int2(more ? token | MORE : token, 2 * next + stopped));
    return more;
}
