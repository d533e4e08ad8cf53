// Kernels around NCCL's collectives: adding a sum to the residual, and ordering gathered lines.
typedef unsigned int u32;
typedef unsigned char u8;

// target += partial; partial = 0.
extern "C" __global__ void add_reduced(float* target, float* partial, u32 count) {
    const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    target[i] += partial[i];
    partial[i] = 0.0f;
}

// out[line][rank] = parts[rank][line], in pieces of `words` words; one block for each piece.
extern "C" __global__ void interleave(const u32* parts, u32* out, u32 lines, u32 ranks, u32 words) {
    const unsigned long long line = blockIdx.x, rank = blockIdx.y;
    const u32* from = parts + (rank * lines + line) * words;
    u32* to = out + (line * ranks + rank) * words;
    for (u32 i = threadIdx.x; i < words; i += blockDim.x) to[i] = from[i];
}
