// Kernels for steps of several ranks only: the best logit of this rank's part of the vocabulary, and the
// best one of all ranks (`sharding`, `host/shard_kernels.py`).  A block of one warp computes a row.
//
// A key is `logit_key` of a logit and its token; the largest key is the best logit with the lowest token.
#include "common.cuh"

#ifdef HEAD_BLOCKS
// Reads the keys that the blocks of `head` left in the workspace; their tokens count from 0.
KERNEL __launch_bounds__(32)
    best_of_part(const int* live, const float* logits, u64* keys, float* workspace, u32 row_count,
                 u32 vocabulary, u32 first) {
    start_next_at<AT_START>();
    wait_for_previous();
    start_next_at<AFTER_WAIT>();
    const int index = blockIdx.x;
    const Row row = load_row(live, index);
    if ((row.flags & (ACTIVE | SAMPLE)) != (ACTIVE | SAMPLE)) return;
    const u64* found = keys_of(workspace) + static_cast<long long>(index) * HEAD_BLOCKS;
    u64 key = 0;
#pragma unroll 8
    for (int i = threadIdx.x; i < HEAD_BLOCKS; i += 32) key = largest(key, load_fresh(found + i));
    key = largest_of_warp(key);
    // The lower word is 2^32 - 1 - token, so the subtraction does not borrow from the upper word.
    if (threadIdx.x == 0) keys[index] = key == NAN_KEY ? key : key - first;
}
#endif

#ifdef RANKS
#include "sampled.cuh"

// A row that is not greedy needs more than the best logit: it gets no token (-1), as for NaN and infinity.
KERNEL __launch_bounds__(32)
    best_of_ranks(const int* live, float* logits, const Options* options, const int* stops,
                  int* state, int2* ring, const int* history, u32* kept, const int2* biases,
                  const u32* allowed, u32* masks, int* logprobs, const u64* keys,
                  u32 row_count, u32 vocabulary, u32 stop_count, u32 context, u32 ring_size,
                  u32 ranks) {
    start_next_at<AT_START>();
    wait_for_previous();
    start_next_at<AFTER_WAIT>();
    const SampledRow sampled(live, options);
    const Ending ending = ending_of(sampled, options, stops);
    if (!sampled.wanted) return;
    u64 key = 0;
    for (int i = threadIdx.x; i < RANKS; i += 32)
        key = largest(key, load_fresh(keys + static_cast<long long>(blockIdx.x) * RANKS + i));
    key = largest_of_warp(key);
    const int token = sampled.plain ? greedy_token(key) : -1;
    advance(sampled.row, token, ending, state, ring, context, ring_size);
}
#endif
