// Kernels for steps of several ranks only: the best logit of this rank's part of the vocabulary, and the
// best one of all ranks (`sharding`, `host/shard_kernels.py`), or both in one.  A block computes a row.
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

#ifdef EXCHANGE_WORDS
#include "exchange.cuh"

// Both of the above, and the exchange of the keys between them.  Every lane of the first warp gets them.
KERNEL __launch_bounds__(EXCHANGE_THREADS)
    best_over_ranks(const int* live, const Options* options, const int* stops, int* state, int2* ring,
                    const float* workspace, u64* windows, u32 row_count, u32 context, u32 ring_size,
                    u32 first, u32 rank) {
    __shared__ u64 bests[EXCHANGE_THREADS / 32];
    Exchange exchange(windows, rank);
    start_next_at<AT_START>();
    wait_for_previous();
    start_next_at<AFTER_WAIT>();
    const SampledRow sampled(live, options);
    const Ending ending = ending_of(sampled, options, stops);
    u64 key = 0;
    if (sampled.wanted) {
        const u64* const found =
            keys_of(const_cast<float*>(workspace)) + static_cast<long long>(blockIdx.x) * HEAD_BLOCKS;
#pragma unroll 8
        for (int i = threadIdx.x; i < HEAD_BLOCKS; i += EXCHANGE_THREADS) key = largest(key, load_fresh(found + i));
    }
    key = largest_of_warp(key);
    if (threadIdx.x % 32 == 0) bests[threadIdx.x / 32] = key;
    exchange.begin();
    __syncthreads();
#pragma unroll
    for (int i = 0; i < EXCHANGE_THREADS / 32; i++) key = largest(key, bests[i]);
    if (key != NAN_KEY) key -= first;
    u32 values[RANKS][2];
    // All threads send, so that no word is older than two exchanges.
    exchange.gather(values, static_cast<u32>(key >> 32), static_cast<u32>(key), threadIdx.x < 32);
    if (threadIdx.x < 32 && sampled.wanted) {
#pragma unroll
        for (u32 r = 0; r < RANKS; r++)
            key = largest(key, static_cast<u64>(values[r][0]) << 32 | values[r][1]);
        advance(sampled.row, sampled.plain ? greedy_token(key) : -1, ending, state, ring, context, ring_size);
    }
    exchange.end();
}
#endif
#endif
