// The kernels between a layer's products if a library multiplies (library.py): the norms and SiLU, which our
// own products compute inside.  The first norm of a step of several rows is computed here too (rounded.cu).
//
//     norm_rows  [product]  norm_rope  attention  [product]
//     norm_rows  [product]  silu_rows  [product]
//
// Physics.  Each kernel reads the previous kernel's results from L2 and writes the next one's inputs, 4 to
// 24 KB for each row: 2 to 7 us at 512 rows, a round trip to L2 at 16 rows.  A block computes a row or a
// part of one, so that a few rows fill many multiprocessors.  The code does not depend on the number of rows.
//
// A library's kernel does not use programmatic launch.  So the kernels before and after it are launched
// without it (`LaunchConfig.programmatic`), and `wait_for_previous` and `start_next` do nothing then.
//
// Padding rows are set to zero if a product reads them.  They may hold arbitrary data before, and a NaN in
// them would make a check of the memory report rows that no kernel uses.
#include "norm.cuh"

static_assert(INNER % 8 == 0 && HEAD_SIZE % 8 == 0, "16 bytes at a time");

// out = x / rms(x) * norm, in bfloat16.  With `squares`, out = x * norm, and the sum of squares is stored for the
// product that reads `out` and applies the scale.  A block computes a row, which it keeps in registers.
KERNEL __launch_bounds__(NORM_THREADS)
    norm_rows(const int* live, const float* x, const float* norm, bf16* out, u64* squares, u32 half,
              u32 row_count, u32 hidden, float epsilon) {
    __shared__ float warp_squares[NORM_THREADS / 32];
    const int index = blockIdx.x;
    start_next_at<AT_START>();
    wait_for_previous();
    start_next_at<AFTER_WAIT>();
    const bool active = load_row(live, index).flags & ACTIVE;
    NormedRow row;
    row.load(active ? x + index * HIDDEN : nullptr);
    const float total = row.squares(warp_squares);
    if (squares != nullptr && threadIdx.x == 0) {
        u64* const to = squares_of(squares, half, row_count, index);
        clear_square(to);
        add_square(to, total);
    }
    const float scale = squares != nullptr ? 1.0f : row.scale(total, epsilon);
#pragma unroll
    for (int i = 0; i < row.EACH; i++)
        if (row.has(i))
            reinterpret_cast<uint4*>(out)[rounded_at(row_count, HIDDEN, index, row.chunk(i))] =
                row.scaled(i, scale, norm);
}

// out = silu(gate) * up, in bfloat16; `sums` is [rows, gate and up].  A thread computes eight values;
// blockIdx.y is the row.
KERNEL __launch_bounds__(ROW_THREADS)
    silu_rows(const int* live, const float* sums, bf16* out, u32 row_count, u32 width) {
    const int index = blockIdx.y, chunk = blockIdx.x * ROW_THREADS + threadIdx.x;
    start_next_at<AT_START>();
    wait_for_previous();
    start_next_at<AFTER_WAIT>();
    if (chunk >= INNER / 8) return;
    uint4 made = make_uint4(0, 0, 0, 0);
    if (load_row(live, index).flags & ACTIVE) {
        const float4* const from = reinterpret_cast<const float4*>(
            sums + static_cast<long long>(index) * (2 * INNER));
        const float4 g0 = load_fresh(from + 2 * chunk), g1 = load_fresh(from + 2 * chunk + 1);
        const float4 u0 = load_fresh(from + INNER / 4 + 2 * chunk);
        const float4 u1 = load_fresh(from + INNER / 4 + 2 * chunk + 1);
        auto gated = [](const float4& g, const float4& u) {
            return make_float4(silu(g.x) * u.x, silu(g.y) * u.y, silu(g.z) * u.z, silu(g.w) * u.w);
        };
        made = pack_eight(gated(g0, u0), gated(g1, u1));
    }
    reinterpret_cast<uint4*>(out + static_cast<long long>(index) * INNER)[chunk] = made;
}
