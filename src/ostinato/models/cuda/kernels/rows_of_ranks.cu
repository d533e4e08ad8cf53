// A sum over ranks whose rows the ranks share, in steps whose products a library computes (library.py): each
// rank adds the partial sums of its rows, adds them to the residual, norms it, and writes the next product's
// inputs into every rank's memory.
//
// Physics.  With R ranks and N bytes of partial sums, a rank reads (R - 1) / R N from the others and writes half
// as much to them, since inputs are rounded; the link carries both at once.  A sum of which every rank gets all
// values, as float32, would write twice as much, and every rank would norm all rows.
//
// `x`, `partial` and `next` lie in this rank's window, at the same place as in the others.  Two meetings of
// blocks (exchange.cuh) are enough:
// * Behind the first, the products before this kernel have ended on all ranks: their partial sums are there,
//   and nobody reads `next` any more, which only products before them read.
// * Behind the second, all ranks have read the partial sums, and written `next`.
#include "norm.cuh"
#include "exchange.cuh"

DEVICE void add(float4& to, const float4& more) {
    to = make_float4(__fadd_rn(to.x, more.x), __fadd_rn(to.y, more.y), __fadd_rn(to.z, more.z),
                     __fadd_rn(to.w, more.w));
}

// In this rank's share of the rows, x += the sum of every rank's `partial`, and next = x / rms(x) * norm on all
// ranks, rounded, and zero in padding rows.  If `norm` is null, x is written on all ranks instead.
KERNEL __launch_bounds__(NORM_THREADS, 2)
    rows_of_ranks(const int* live, float* x, const float* partial, const float* norm, bf16* next,
                  u64* windows, u32 row_count, u32 hidden, u32 rank, float epsilon) {
    __shared__ float warp_squares[NORM_THREADS / 32];
    Meetings ranks(windows, rank);
    wait_for_previous();
    ranks.begin();
    if (!ranks.meet()) return;
    const u32 end = row_count * (rank + 1) / RANKS;
    for (u32 index = row_count * rank / RANKS + blockIdx.x; index < end; index += gridDim.x) {
        const bool active = load_row(live, index).flags & ACTIVE;
        float* const to = x + static_cast<u64>(index) * HIDDEN;
        NormedRow row, parts[RANKS];
#pragma unroll
        for (int i = 0; i < row.EACH; i++) {
            row.load(i, active ? to : nullptr);
            const float* const from = partial + static_cast<u64>(index) * HIDDEN;
#pragma unroll
            for (u32 r = 0; r < RANKS; r++) parts[r].load(i, active ? ranks.in_window(r, from) : nullptr);
        }
#pragma unroll
        for (int i = 0; i < row.EACH; i++) {
#pragma unroll
            for (u32 r = 1; r < RANKS; r++) {
                add(parts[0].u[i], parts[r].u[i]);
                add(parts[0].v[i], parts[r].v[i]);
            }
            add(row.u[i], parts[0].u[i]);
            add(row.v[i], parts[0].v[i]);
#pragma unroll
            for (u32 r = 0; r < RANKS; r++)
                if (active && row.has(i) && (r == rank || norm == nullptr)) {
                    float4* const at = reinterpret_cast<float4*>(ranks.in_window(r, to)) + 2 * row.chunk(i);
                    at[0] = row.u[i];
                    at[1] = row.v[i];
                }
        }
        if (norm == nullptr) continue;
        __syncthreads();  // the squares of the row before are read
        const float scale = row.scale(row.squares(warp_squares), epsilon);
#pragma unroll
        for (int i = 0; i < row.EACH; i++) {
            if (!row.has(i)) continue;
            const uint4 made = row.scaled(i, scale, norm);
            uint4* const at = reinterpret_cast<uint4*>(next + static_cast<u64>(index) * HIDDEN) + row.chunk(i);
#pragma unroll
            for (u32 r = 0; r < RANKS; r++) *ranks.in_window(r, at) = made;
        }
    }
    ranks.meet();
    ranks.end();
}
