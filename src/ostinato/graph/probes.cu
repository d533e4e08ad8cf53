// Kernels that look at a run of a graph from between its nodes (graph/probes.py).

#define KERNEL extern "C" __global__ void

typedef unsigned long long Word;

// Writes the time to slot `at`, in nanoseconds of a clock of the device.  One thread.
KERNEL ostinato_stamp(Word* slots, const unsigned at) {
    Word now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
    slots[at] = now;
}

__device__ Word mixed(Word x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

// Writes a digest of 64 bits of each piece of `size` bytes, the last of which may be shorter: the
// sum of all words of 8 bytes, each mixed with its place.  One block a piece.
KERNEL ostinato_digest(const unsigned char* memory, const Word nbytes, const Word size, Word* out) {
    __shared__ Word sum;
    if (threadIdx.x == 0) sum = 0;
    __syncthreads();
    const Word begin = blockIdx.x * size;
    const Word length = nbytes - begin < size ? nbytes - begin : size;
    const unsigned char* piece = memory + begin;
    const bool whole = (Word)piece % 8 == 0;
    Word own = 0;
    for (Word i = threadIdx.x; i < (length + 7) / 8; i += blockDim.x) {
        Word word = 0;
        if (whole && 8 * i + 8 <= length)
            word = ((const Word*)piece)[i];
        else
            for (Word k = 8 * i; k < length && k < 8 * i + 8; ++k) word = word << 8 | piece[k];
        own += mixed(word + 0x9e3779b97f4a7c15ull * (i + 1));
    }
    atomicAdd(&sum, own);
    __syncthreads();
    if (threadIdx.x == 0) out[blockIdx.x] = sum;
}

// For words in host memory (explain/crumbs.py): 2, a graph has begun; 1, a node has finished; 3, it
// lets the next one start early.
KERNEL ostinato_begin(unsigned* words, const unsigned n) {
    for (unsigned i = threadIdx.x; i < n; i += blockDim.x) ((volatile unsigned*)words)[i] = 2;
}

// Past the caches; the end of the kernel need not wait until the host has it.
__device__ void set_word(unsigned* word, const unsigned value) {
    asm volatile("st.mmio.relaxed.sys.u32 [%0], %1;" : : "l"(word), "r"(value) : "memory");
}

// Waits for the node before, also if this kernel started early.
__device__ void wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// One thread.
KERNEL ostinato_crumb(unsigned* word) {
    wait();
    set_word(word, 1);
}

// The same behind a programmatic edge: it starts when all blocks of the node let it.  One thread.
KERNEL ostinato_early_crumb(unsigned* word) {
    set_word(word, 3);
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
    wait();
    set_word(word, 1);
}

// Copies pieces of memory: the words of a piece are its source, its target and its bytes.  One block
// a piece.
KERNEL ostinato_copy(const Word* pieces) {
    const Word* piece = pieces + 3 * blockIdx.x;
    const unsigned char* from = (const unsigned char*)piece[0];
    unsigned char* to = (unsigned char*)piece[1];
    const Word nbytes = piece[2];
    const Word wide = ((Word)from | (Word)to) % 16 == 0 ? nbytes / 16 : 0;
    for (Word i = threadIdx.x; i < wide; i += blockDim.x) ((uint4*)to)[i] = ((const uint4*)from)[i];
    for (Word i = 16 * wide + threadIdx.x; i < nbytes; i += blockDim.x) to[i] = from[i];
}
