// Rope as a kernel of its own, for heads that are normed before it (QK_NORM) and for products of a library.
// Queries go to `q`, rotated keys and values go to the cache.
//
// Physics.  The kernel reads the previous kernel's results from L2 and writes the next one's inputs, some KB
// for each row: its time is a round trip to L2.  A block computes a part of a row.  The code does not depend
// on the number of rows.
#include "common.cuh"

constexpr int HALF = HEAD_SIZE / 2, TURNED = HEADS + KV_HEADS, ALL_HEADS = TURNED + KV_HEADS;
// A thread has four pairs of a head, so the threads of a head lie within a warp, and `sum_lanes` adds them.
constexpr int PARTS = HALF / 4, LANES = power_of_two_above(PARTS);
static_assert(HEAD_SIZE % 8 == 0 && LANES <= 32, "head size");

DEVICE float4 times(const float4& a, const float4& b) {
    return make_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w);
}
DEVICE float4 plus(const float4& a, const float4& b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}
DEVICE float sum_of(const float4& a) { return a.x + a.y + a.z + a.w; }

// blockIdx.y is the row.
KERNEL __launch_bounds__(ROPE_THREADS)
    norm_rope(const int* live, const float* qkv, const float* bias, const float* q_norm,
              const float* k_norm, const float* rope, bf16* cache, float* q, u32 row_count,
              u32 heads, u32 kv_heads, u32 head_size, u32 sequences, u32 context, float epsilon) {
    const int index = blockIdx.y, item = blockIdx.x * ROPE_THREADS + threadIdx.x;
    const int head = item / LANES, i = item % LANES * 4;
    const bool there = head < ALL_HEADS && i < HALF;
    start_next_at<AT_START>();
    float4 added[2] = {}, norms[2] = {};
    if constexpr (QKV_BIAS) {
        if (there) {
            const float* const from = bias + head * HEAD_SIZE + i;
            added[0] = load_norm(reinterpret_cast<const float4*>(from));
            added[1] = load_norm(reinterpret_cast<const float4*>(from + HALF));
        }
    }
    if constexpr (QK_NORM) {
        if (there && head < TURNED) {
            const float* const from = (head < HEADS ? q_norm : k_norm) + i;
            norms[0] = load_norm(reinterpret_cast<const float4*>(from));
            norms[1] = load_norm(reinterpret_cast<const float4*>(from + HALF));
        }
    }
    wait_for_previous();
    start_next_at<AFTER_WAIT>();
    const Row row = load_row(live, index);
    if (!(row.flags & ACTIVE)) return;
    float4 left = make_float4(0, 0, 0, 0), right = left;
    if (there) {
        const float* const from =
            qkv + static_cast<long long>(index) * (ALL_HEADS * HEAD_SIZE) + head * HEAD_SIZE + i;
        left = load_fresh(reinterpret_cast<const float4*>(from));
        right = load_fresh(reinterpret_cast<const float4*>(from + HALF));
    }
    if constexpr (QKV_BIAS) {
        left = plus(left, added[0]);
        right = plus(right, added[1]);
    }
    if constexpr (QK_NORM) {
        const float square =
            sum_lanes<LANES>(sum_of(times(left, left)) + sum_of(times(right, right)));
        const float scale = rsqrtf(square * (1.0f / HEAD_SIZE) + epsilon);
        if (head < TURNED) {
            const float4 all = make_float4(scale, scale, scale, scale);
            left = times(times(left, all), norms[0]);
            right = times(times(right, all), norms[1]);
        }
    }
    if (!there) return;
    if (head < TURNED) {
        const float* const at = rope + static_cast<long long>(row.position) * HEAD_SIZE + i;
        const float4 cosine = load_norm(reinterpret_cast<const float4*>(at));
        const float4 sine = load_norm(reinterpret_cast<const float4*>(at + HALF));
        const float4 a = left, b = right;
        left = make_float4(a.x * cosine.x - b.x * sine.x, a.y * cosine.y - b.y * sine.y,
                           a.z * cosine.z - b.z * sine.z, a.w * cosine.w - b.w * sine.w);
        right = make_float4(b.x * cosine.x + a.x * sine.x, b.y * cosine.y + a.y * sine.y,
                            b.z * cosine.z + a.z * sine.z, b.w * cosine.w + a.w * sine.w);
    }
    start_next_at<AFTER_INPUT>();
    start_next_at<BEFORE_OUTPUT>();
    if (head < HEADS) {
        float* const to = q + (index * HEADS + head) * HEAD_SIZE + i;
        *reinterpret_cast<float4*>(to) = left;
        *reinterpret_cast<float4*>(to + HALF) = right;
        return;
    }
    const int part = head >= TURNED;
    const int kv_head = head - HEADS - part * KV_HEADS;
    const long long line =
        (static_cast<long long>(part) * static_cast<int>(sequences) + row.sequence) * KV_HEADS + kv_head;
    bf16* const to = cache + (line * static_cast<int>(context) + row.position) * HEAD_SIZE + i;
    *reinterpret_cast<int2*>(to) = make_int2(static_cast<int>(pack_bf16(left.x, left.y)),
                                             static_cast<int>(pack_bf16(left.z, left.w)));
    *reinterpret_cast<int2*>(to + HALF) = make_int2(static_cast<int>(pack_bf16(right.x, right.y)),
                                                    static_cast<int>(pack_bf16(right.z, right.w)));
}
