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
// and the two words from `place` on get a number that the host needs.  A number that is compared with
// `low` and `high` and is another one makes the first word its `place`, and all kernels after this one
// do nothing: `other` is not 0 then, which the `first` kernel of a body sets.  Else the condition, if
// there is one, becomes 1, and the first word `passed`, unless that is 0.
KERNEL ostinato_condition(const char* source, const Word low, const Word high, Word* record,
                          Word* other, const unsigned nbytes, const unsigned place,
                          const unsigned compared, const unsigned first, const unsigned passed,
                          const cudaGraphConditionalHandle condition) {
    const Word done = first ? 0 : *other;  // read at the same time as the number
    Word found = 0, upper = 0;
    for (unsigned i = 0; i < nbytes; i++) {
        const Word byte = (unsigned char)source[i];
        if (i < 8) found |= byte << 8 * i;
        else upper |= byte << 8 * (i - 8);
    }
    if (done) return;
    const bool same = !compared || (found == low && upper == high);
    if (first || !same) *other = !same;
    if (same && condition) cudaGraphSetConditional(condition, 1);
    if (same && compared && !passed) return;
    volatile Word* const host = record;
    host[place] = found;
    host[place + 1] = upper;
    __threadfence_system();
    if (!same)
        host[0] = place;
    else if (passed)
        host[0] = passed;
}
