// Decides on the device whether another step of a launch of several steps runs.
//
// This kernel has a file of its own, since only drivers with conditional nodes can load it.
#include "common.cuh"

#ifndef EMULATED
// A function of the device runtime; it needs neither a header nor a library.
extern "C" __device__ __cudart_builtin__ void CUDARTAPI cudaGraphSetConditional(
    cudaGraphConditionalHandle handle, unsigned int value);
#endif

// One block, with a thread for each row.  With `start` above 0 the kernel runs before the loop and sets the
// number of steps; with 0 it is the last node of the loop's body and counts one step.  Rows that are not
// FROM_STATE do not advance, so they count as live before the first step only.
KERNEL __launch_bounds__(64)
    continue_loop(cudaGraphConditionalHandle condition, int* counter, const int* rows,
                  const int* state, u32 row_count, u32 sequences, u32 start) {
    __shared__ bool any;
    const int index = threadIdx.x;
    if (index == 0) any = false;
    wait_for_previous();
    __syncthreads();
    if (index < ROWS) {
        const Row row = load_row(rows, index);
        if ((row.flags & (ACTIVE | SAMPLE)) == (ACTIVE | SAMPLE) &&
            static_cast<u32>(row.sequence) < sequences) {
            bool live = start > 0;
            if (row.flags & FROM_STATE) live = load_row(state, row.sequence).flags == 0;  // not stopped
            if (live) any = true;
        }
    }
    __syncthreads();
    if (index == 0) {
        const int left = start ? static_cast<int>(start) : load_fresh(counter) - 1;
        *counter = left;
        cudaGraphSetConditional(condition, any && left > 0);
    }
}
