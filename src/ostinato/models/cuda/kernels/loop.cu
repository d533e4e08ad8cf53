// Several steps in one launch: what decides, on the device, whether another one runs.
//
// In a file of its own, because only a driver that has conditional nodes can load it.
#include "common.cuh"

#ifndef EMULATED
// The device runtime's; the compiler and the driver know it without a header or a library.
extern "C" __device__ __cudart_builtin__ void CUDARTAPI cudaGraphSetConditional(
    cudaGraphConditionalHandle handle, unsigned int value);
#endif

// One block; a thread a row.  With `start` it is launched before the loop and sets the count, else it is
// the last of the loop's body and counts one step.  Rows that are not FROM_STATE stay what they are, so
// only the first step would compute them.
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
            if (row.flags & FROM_STATE) live = load_row(state, row.sequence).flags == 0;  // stopped
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
