// A step that drafts tokens of one sequence: `draft` is its first kernel, `accept` its last, each one block.
// `host.kernels` has the reference.
//
// Physics: `draft` reads the sequence's tokens from L2, 4 bytes a position: a round of 0.4 us for each 4,096
// positions.  `accept` reads as many keys as `sample` does for all rows, all warps at once.
#include "common.cuh"

constexpr int THREADS = LOOKUP_THREADS, WARPS = THREADS / 32;
static_assert(WARPS <= 32 && ROWS <= THREADS, "one block");

#ifdef DRAFT_KEY
// Makes the rows of the step: the first of `rows`, and up to `most` drafts, the tokens that followed the place
// with the most last tokens in common with the sequence's end, and of several places the last.
KERNEL __launch_bounds__(THREADS)
    draft(const int* rows, const int* state, const int* history, int* drafted, int* scored,
          u32 row_count, u32 sequences, u32 context, u32 most) {
    __shared__ u64 bests[WARPS];
    const int thread = threadIdx.x;
    wait_for_previous();
    start_next_at<AFTER_WAIT>();
    Row row = resolved_row(rows, 0, state, sequences);
    row.flags &= ~FROM_STATE;
    const bool drafts = row.flags & ACTIVE && static_cast<u32>(row.position) < context;
    const int* const tokens = history + static_cast<long long>(drafts ? row.sequence : 0) * context;
    const int end = drafts ? row.position : 0;
    u64 best = 0;  // the number of tokens in common, then the place + 1
#pragma unroll 4
    for (int place = thread; place < end; place += THREADS) {
        if (load_fresh(tokens + place) != row.token) continue;
        int common = 1;
        while (common < DRAFT_KEY && common <= place &&
               load_fresh(tokens + place - common) == load_fresh(tokens + end - common))
            common++;
        best = largest(best, static_cast<u64>(common) << 32 | (place + 1));
    }
    best = largest_of_warp(best);
    if (thread % 32 == 0) bests[thread / 32] = best;
    __syncthreads();
    if (thread >= ROWS) return;
    for (int i = 0; i < WARPS; i++) best = largest(best, bests[i]);
    Row own{0, 0, 0, 0};
    if (thread == 0) {
        own = row;
    } else if (best && thread <= static_cast<int>(most)) {
        // What followed goes on with itself where the sequence ends.
        const int first = static_cast<int>(static_cast<u32>(best)), from = first + (thread - 1) % (end - first + 1);
        own = row;
        own.token = from < end ? load_fresh(tokens + from) : row.token;
        own.position = end + thread;
    }
    reinterpret_cast<Row*>(drafted)[thread] = own;
    own.sequence = thread;
    reinterpret_cast<Row*>(scored)[thread] = own;
}
#endif

#ifdef HEAD_BLOCKS
#include "sampled.cuh"

constexpr int EACH = larger(1, WARPS / ROWS);  // warps of a row

// Chooses the likeliest token of each row in turn, and writes the sequence's new state, as long as the next
// row holds the token chosen.
KERNEL __launch_bounds__(THREADS)
    accept(const int* live, const float* scores, const Options* options, const int* stops, int* state,
           int2* ring, float* workspace, u32 row_count, u32 vocabulary, u32 stop_count, u32 context,
           u32 ring_size) {
    __shared__ u64 bests[ROWS][EACH];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    wait_for_previous();
    start_next_at<AFTER_WAIT>();
    for (int index = warp / EACH; index < ROWS; index += WARPS / EACH) {
        const u64* const keys = keys_of(workspace) + static_cast<long long>(index) * HEAD_BLOCKS;
        u64 key = 0;
#pragma unroll 8
        for (int i = warp % EACH * 32 + lane; i < HEAD_BLOCKS; i += 32 * EACH)
            key = largest(key, load_fresh(keys + i));
        key = largest_of_warp(key);
        if (lane == 0) bests[index][warp % EACH] = key;
    }
    __syncthreads();
    if (warp > 0) return;
    const SampledRow sampled(live, options);
    const Ending ending = ending_of(sampled, options, stops);
    Row row = sampled.row;
    bool more = sampled.wanted;
    for (int index = 0; more; index++) {
        u64 key = 0;
        for (int i = 0; i < EACH; i++) key = largest(key, bests[index][i]);
        const Row next = index + 1 < ROWS ? load_row(live, index + 1) : Row{0, 0, 0, 0};
        const int token = greedy_token(key);
        const bool agreed = next.flags & ACTIVE && next.token == token;
        more = advance(row, token, ending, state, ring, context, ring_size, agreed);
        row = next;
    }
}
#endif
