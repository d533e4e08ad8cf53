// A kernel that reads a number for the host, and decides whether the work after it runs
// (conditions.py).

#ifndef EMULATED
#define KERNEL extern "C" __global__ void
// A function of the device runtime; it needs neither a header nor a library.
extern "C" __device__ __cudart_builtin__ void CUDARTAPI cudaGraphSetConditional(
    cudaGraphConditionalHandle handle, unsigned int value);
#endif

typedef unsigned long long Word;

// One thread.  `record` is memory of the host: its first word is set when the host need wait no longer,
// and the two words from `place` on get the number.  If it is compared with `low` and `high` and is
// another one, the first word becomes `place`, and the condition stays 0.  Else the condition, if
// there is one, becomes 1, and the first word `passed`, unless that is 0.
KERNEL ostinato_condition(const char* source, const Word low, const Word high, Word* record,
                          const unsigned nbytes, const unsigned place, const unsigned compared,
                          const unsigned passed, const cudaGraphConditionalHandle condition) {
    Word found[2] = {0, 0};
    for (unsigned i = 0; i < nbytes; i++)
        found[i / 8] |= (Word)(unsigned char)source[i] << 8 * (i % 8);
    volatile Word* const host = record;
    host[place] = found[0];
    host[place + 1] = found[1];
    __threadfence_system();
    const bool same = !compared || (found[0] == low && found[1] == high);
    if (!same)
        host[0] = place;
    else if (passed)
        host[0] = passed;
    if (same && condition) cudaGraphSetConditional(condition, 1);
}
