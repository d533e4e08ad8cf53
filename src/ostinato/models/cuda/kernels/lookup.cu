// A step that drafts: `draft` is its first kernel, `accept` the first that chooses tokens.  A block for each row;
// that of a sequence's first row works for all rows of the sequence.  `host.kernels` has the reference.
//
// Physics: `draft` reads a sequence's tokens from L2, 4 bytes a position: a round of 0.4 us for each 4,096
// positions.  `accept` reads as many keys as `sample` does for all rows of a sequence, all warps at once.
#include "common.cuh"

constexpr int THREADS = LOOKUP_THREADS, WARPS = THREADS / 32;
static_assert(WARPS <= 32 && ROWS <= THREADS, "one block");

// Returns the number of rows from `first` up to the next one that `ends` them.  A whole warp calls it.
template <class Ends> DEVICE int rows_from(const int* rows, int first, const Ends& ends) {
    for (int start = first + 1; start < ROWS; start += 32) {
        const int index = start + static_cast<int>(threadIdx.x) % 32;
        const u32 found = __ballot_sync(0xffffffffu, index >= ROWS || ends(load_row(rows, index)));
        if (found) return start + __ffs(found) - 1 - first;
    }
    return ROWS - first;
}

#ifdef DRAFT_KEY
// Makes the rows of the step: those of `rows`, and behind each DRAFTS row up to `most` drafts, the tokens that
// followed the place with the most last tokens in common with the sequence's end, and of several places the
// last.
KERNEL __launch_bounds__(THREADS)
    draft(const int* rows, const int* state, const int* history, int* drafted, int* scored,
          u32 row_count, u32 sequences, u32 context, u32 most) {
    __shared__ u64 bests[WARPS];
    const int thread = threadIdx.x, first = blockIdx.x;
    wait_for_previous();
    start_next_at<AFTER_WAIT>();
    const bool given = load_row(rows, first).flags & ACTIVE;
    if (!given && first > 0) return;  // the block of an earlier row writes it
    const int count = rows_from(rows, first, [](const Row& other) { return (other.flags & ACTIVE) != 0; });
    Row row = resolved_row(rows, first, state, sequences);
    row.flags &= ~FROM_STATE;
    const bool drafts = (row.flags & (ACTIVE | DRAFTS)) == (ACTIVE | DRAFTS) &&
                        static_cast<u32>(row.position) < context;
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
    if (thread >= count) return;
    for (int i = 0; i < WARPS; i++) best = largest(best, bests[i]);
    Row own{0, 0, 0, 0};
    if (thread == 0) {
        if (given) own = row;
    } else if (best && thread <= static_cast<int>(most)) {
        // What followed goes on with itself where the sequence ends.
        const int place = static_cast<int>(static_cast<u32>(best)), from = place + (thread - 1) % (end - place + 1);
        own = row;
        own.token = from < end ? load_fresh(tokens + from) : row.token;
        own.position = end + thread;
    }
    // Rows of a sequence that drafts are left by `sample`, and each of their logits has a place of its own.
    Row scores = own;
    if (own.flags & DRAFTS) own.flags &= ~SAMPLE;
    if (own.flags && thread > 0) scores.sequence = static_cast<int>(sequences) + first + thread;
    reinterpret_cast<Row*>(drafted)[first + thread] = own;
    reinterpret_cast<Row*>(scored)[first + thread] = scores;
}
#endif

#ifdef HEAD_BLOCKS
#include "sampled.cuh"

// Chooses the likeliest token of each row of a sequence that drafts in turn, and writes the sequence's new
// state, as long as the next row holds the token chosen.
#ifdef RANKS
// For several ranks: one key of each rank in place of those of `head`'s blocks.
KERNEL __launch_bounds__(THREADS)
    accept_of_ranks(const int* live, const Options* options, const int* stops, int* state, int2* ring,
                    const u64* found, u32 row_count, u32 vocabulary, u32 stop_count, u32 context,
                    u32 ring_size, u32 ranks) {
#else
KERNEL __launch_bounds__(THREADS)
    accept(const int* live, const int* scored, const float* logits, const Options* options, const int* stops,
           int* state, int2* ring, float* workspace, u32 row_count, u32 vocabulary, u32 stop_count,
           u32 context, u32 ring_size) {
    const u64* const found = keys_of(workspace);
#endif
    __shared__ u64 bests[larger(ROWS, WARPS)];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = blockIdx.x;
    wait_for_previous();
    start_next_at<AFTER_WAIT>();
    Row row = load_row(live, first);
    if ((row.flags & (ACTIVE | DRAFTS)) != (ACTIVE | DRAFTS)) return;
    const int sequence = row.sequence;
    auto another = [&](const Row& other) { return !(other.flags & ACTIVE) || other.sequence != sequence; };
    if (first > 0 && !another(load_row(live, first - 1))) return;  // the block of an earlier row does it
    const int count = rows_from(live, first, another), each = larger(1, WARPS / count);  // warps of a row
    for (int at = warp; at < count * each; at += WARPS) {
        const u64* const keys = found + static_cast<long long>(first + at / each) * HEAD_BLOCKS;
        u64 key = 0;
#pragma unroll 8
        for (int i = at % each * 32 + lane; i < HEAD_BLOCKS; i += 32 * each)
            key = largest(key, load_fresh(keys + i));
        key = largest_of_warp(key);
        if (lane == 0) bests[at] = key;
    }
    __syncthreads();
    if (warp > 0) return;
    const Ending ending = ending_of(options[row.sequence].limit, stops);
    bool more = true;
    for (int at = 0; more; at++) {
        u64 key = 0;
        for (int i = 0; i < each; i++) key = largest(key, bests[at * each + i]);
        const Row next = at + 1 < count ? load_row(live, first + at + 1) : Row{0, 0, 0, 0};
        const int token = greedy_token(key);
        const bool agreed = next.flags & ACTIVE && next.token == token;
        more = advance(row, token, ending, state, ring, context, ring_size, agreed);
        row = next;
    }
}
#endif
