// Kernels that copy a graph's inputs and outputs, as its first and its last node (moves.py).
//
// `Moves` is set before each replay: the addresses of the caller's arrays and of the new outputs.  The
// first node stores the outputs' addresses in a table in device memory, and the last node reads them
// there.  An address of 0 means that nothing is copied.  `Plan` is fixed at capture.

#ifndef EMULATED
#define DEVICE static __device__ __forceinline__
#define KERNEL extern "C" __global__ void
#endif

typedef unsigned long long Word;

enum { MOST = 16 };

struct Moves {
    Word address[2 * MOST];  // of `Plan::count` inputs, then of the outputs
};

struct Plan {
    Word place[MOST], nbytes[MOST];  // addresses and sizes of the graph's own inputs or outputs
    Word table;
    unsigned count, outs;
};

// Copies with all threads of the blocks that have the same blockIdx.y.
DEVICE void copy_bytes(char* to, const char* from, Word nbytes) {
    const Word step = (Word)gridDim.x * blockDim.x;
    const Word first = (Word)blockIdx.x * blockDim.x + threadIdx.x;
    const Word bits = (Word)to | (Word)from;
    Word done = 0;
    if (bits % 16 == 0) {
        done = nbytes / 16 * 16;
        for (Word i = first; i < nbytes / 16; i += step) ((uint4*)to)[i] = ((const uint4*)from)[i];
    } else if (bits % 4 == 0) {
        done = nbytes / 4 * 4;
        for (Word i = first; i < nbytes / 4; i += step)
            ((unsigned*)to)[i] = ((const unsigned*)from)[i];
    }
    for (Word i = done + first; i < nbytes; i += step) to[i] = from[i];
}

KERNEL ostinato_move_in(const Moves moves, const Plan plan) {
    const unsigned pair = blockIdx.y;
    if (blockIdx.x == 0 && pair == 0 && threadIdx.x < plan.outs)
        ((Word*)plan.table)[threadIdx.x] = moves.address[plan.count + threadIdx.x];
    const Word from = pair < plan.count ? moves.address[pair] : 0;
    if (from) copy_bytes((char*)plan.place[pair], (const char*)from, plan.nbytes[pair]);
}

KERNEL ostinato_move_out(const Plan plan) {
    const unsigned pair = blockIdx.y;
    const Word to = pair < plan.outs ? ((const Word*)plan.table)[pair] : 0;
    if (to) copy_bytes((char*)to, (const char*)plan.place[pair], plan.nbytes[pair]);
}
