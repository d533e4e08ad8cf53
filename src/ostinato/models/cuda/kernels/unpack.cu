// Converts bricks to bfloat16, for the products of a library.
#include "bricks.cuh"

// Writes rows from `first` on of a matrix, one block each: the rows of a part whose bricks begin at byte
// `offset`.
template <class F>
DEVICE void unpack(const u8* bricks, bf16* out, u64 offset, u32 columns, u32 first, u32 size) {
    const Place place = place_of(blockIdx.x, size);
    bf16* const row = out + static_cast<u64>(first + blockIdx.x) * columns;
    for (int item = threadIdx.x; item < ceil_div(columns, 32) * 4; item += blockDim.x) {
        const int group = item / 4, t = item % 4;
        float v[8];
        brick_values<F>(v, bricks + offset, columns, place, group / 8, group % 8, t);
        auto* const to = reinterpret_cast<uint2*>(row + group * 32 + t * 4);
        to[0] = make_uint2(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]));
        to[4] = make_uint2(pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
    }
}

#define UNPACK(NAME)                                                                              \
    KERNEL NAME##_to_rows(const u8* bricks, bf16* out, u64 offset, u32 columns, u32 first, u32 size) { \
        unpack<NAME>(bricks, out, offset, columns, first, size);                                  \
    }
UNPACK(Q8_0)
UNPACK(Q4_0)
UNPACK(Q4_1)
UNPACK(Q5_0)
UNPACK(Q5_1)
UNPACK(Q4_K)
UNPACK(Q5_K)
UNPACK(Q6_K)
