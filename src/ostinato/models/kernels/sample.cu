// The next token of each row that samples; a block a row.  See sample_row.cuh.
//
// 1,000 to 8,000 keys of the blocks of `head` come from L2 in one or a few rounds of 0.4 us.
#include "sample_row.cuh"

constexpr int COUNTER_BYTES = 1 << 16;  // as in linear.cuh

// The largest of the keys that the blocks of `head` left in the workspace.
DEVICE u64 largest_key(Workbench& bench, const u64* keys) {
    const int thread = threadIdx.x;
    u64 key = 0;
#pragma unroll 4
    for (int i = thread; i < HEAD_BLOCKS; i += THREADS) key = largest(key, load_fresh(keys + i));
    key = largest_of_warp(key);
    if (thread % 32 == 0) bench.warps[thread / 32] = key;
    __syncthreads();
    key = bench.warps[0];
    for (int i = 1; i < WARPS; i++) key = largest(key, bench.warps[i]);
    __syncthreads();  // before the bench is used anew
    return key;
}

KERNEL __launch_bounds__(THREADS, 1)
    sample(const int* live, const float* logits, const Options* options, int* chosen,
           float* workspace, u32 row_count, u32 vocabulary) {
    __shared__ Workbench bench;
    start_next_at<AT_START>();
    wait_for_previous();
    start_next_at<AFTER_WAIT>();
    const int index = blockIdx.x;
    const Row row = load_row(live, index);
    if ((row.flags & (ACTIVE | SAMPLE)) != (ACTIVE | SAMPLE)) return;
    const u64* keys = reinterpret_cast<const u64*>(workspace + COUNTER_BYTES / sizeof(float)) +
                      static_cast<long long>(index) * HEAD_BLOCKS;
    const int token = sample_row(bench, row, logits, options, largest_key(bench, keys));
    if (threadIdx.x == 0) chosen[index] = token;
    start_next_at<BEFORE_OUTPUT>();
}
