// A row of the residual that a block norms, in the registers of NORM_THREADS threads: a thread has chunks of
// eight values.  All kernels that norm whole rows compute the same bits.
#pragma once
#include "linear.cuh"

static_assert(HIDDEN % 8 == 0, "16 bytes at a time");

struct NormedRow {
    static constexpr int CHUNKS = HIDDEN / 8, EACH = ceil_div(CHUNKS, NORM_THREADS);
    static constexpr int WARPS = NORM_THREADS / 32;
    float4 u[EACH], v[EACH];  // halves of each chunk

    DEVICE static int chunk(int i) { return i * NORM_THREADS + static_cast<int>(threadIdx.x); }
    DEVICE static bool has(int i) { return chunk(i) < CHUNKS; }
    // Zeros if `from` is null.
    DEVICE void load(const float* from) {
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const float4* const at = reinterpret_cast<const float4*>(from) + 2 * chunk(i);
            const bool there = from != nullptr && has(i);
            u[i] = there ? load_fresh(at) : make_float4(0, 0, 0, 0);
            v[i] = there ? load_fresh(at + 1) : make_float4(0, 0, 0, 0);
        }
    }
    DEVICE void store(float* to) const {
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            if (!has(i)) continue;
            float4* const at = reinterpret_cast<float4*>(to) + 2 * chunk(i);
            at[0] = u[i];
            at[1] = v[i];
        }
    }
    // The sum of squares of the row; called by all threads of the block.
    DEVICE float squares(float* warp_squares) const {
        float square = 0.0f;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            square += u[i].x * u[i].x + u[i].y * u[i].y + u[i].z * u[i].z + u[i].w * u[i].w;
            square += v[i].x * v[i].x + v[i].y * v[i].y + v[i].z * v[i].z + v[i].w * v[i].w;
        }
        square = sum_lanes<32>(square);
        if (threadIdx.x % 32 == 0) warp_squares[threadIdx.x / 32] = square;
        __syncthreads();
        float total = 0.0f;
#pragma unroll
        for (int warp = 0; warp < WARPS; warp++) total += warp_squares[warp];
        return total;
    }
    DEVICE static float scale(float squares, float epsilon) {
        return rsqrtf(squares * (1.0f / HIDDEN) + epsilon);
    }
    // Chunk i times scale and norm, rounded.
    DEVICE uint4 scaled(int i, float scale, const float* norm) const {
        const float4* const weights = reinterpret_cast<const float4*>(norm) + 2 * chunk(i);
        const float4 p = load_norm(weights), q = load_norm(weights + 1);
        return pack_eight(make_float4(u[i].x * scale * p.x, u[i].y * scale * p.y, u[i].z * scale * p.z,
                                      u[i].w * scale * p.w),
                          make_float4(v[i].x * scale * q.x, v[i].y * scale * q.y, v[i].z * scale * q.z,
                                      v[i].w * scale * q.w));
    }
};
