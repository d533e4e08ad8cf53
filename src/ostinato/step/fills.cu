// A kernel that fills memory (step/fills.py).

#ifndef EMULATED
#define KERNEL extern "C" __global__ void
#endif

typedef unsigned long long Word;

// Repeats the 4 bytes of `pattern` from the first byte on; the last repetition may be cut.
KERNEL ostinato_fill(char* to, const unsigned pattern, const Word nbytes) {
    const Word step = (Word)gridDim.x * blockDim.x;
    const Word first = (Word)blockIdx.x * blockDim.x + threadIdx.x;
    Word done = 0;
    if ((Word)to % 16 == 0) {
        const uint4 four = {pattern, pattern, pattern, pattern};
        done = nbytes / 16 * 16;
        for (Word i = first; i < nbytes / 16; i += step) ((uint4*)to)[i] = four;
    } else if ((Word)to % 4 == 0) {
        done = nbytes / 4 * 4;
        for (Word i = first; i < nbytes / 4; i += step) ((unsigned*)to)[i] = pattern;
    }
    for (Word i = done + first; i < nbytes; i += step) to[i] = (char)(pattern >> 8 * (i % 4));
}
