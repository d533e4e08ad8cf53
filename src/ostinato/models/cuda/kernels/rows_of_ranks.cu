// A sum over ranks whose rows the ranks share, in steps whose products a library computes (library.py): each
// rank gets the others' partial sums of its rows, adds them to the residual, norms it, and writes the next
// product's inputs into every rank's memory.
//
// Physics.  With R ranks and N bytes of partial sums, a rank sends (R - 1) / R N of these, and half as much of
// inputs, since they are rounded.  A sum of which every rank gets all values, as float32, would send (R - 1) / R N
// more, and every rank would norm all rows.  Values are stored without words (words.cuh), which would double them.
//
// `x`, `next` and `arrived` lie in this rank's window, at the same place as in the others; `partial` is local.  Two
// meetings of blocks (exchange.cuh) are enough, since block b of each rank sends the rows that block b of another
// one adds:
// * Behind the first, the partial sums of this block's rows are in `arrived`, and the products before this
//   kernel, which read `next`, have ended on all ranks.
// * Behind the second, `next` is complete, and all ranks have read `arrived`.
#include "norm.cuh"
#include "exchange.cuh"

DEVICE void add(float4& to, const float4& more) {
    to = make_float4(__fadd_rn(to.x, more.x), __fadd_rn(to.y, more.y), __fadd_rn(to.z, more.z),
                     __fadd_rn(to.w, more.w));
}

// In this rank's share of the rows, x += the sum of every rank's `partial`, and next = x / rms(x) * norm on all
// ranks, rounded, and zero in padding rows.  If `norm` is null, x is written on all ranks instead.
// `arrived`: [ranks, rows of a share, hidden].
KERNEL __launch_bounds__(NORM_THREADS, 1)
    rows_of_ranks(const int* live, float* x, const float* partial, float* arrived, const float* norm,
                  bf16* next, u64* windows, u32 row_count, u32 hidden, u32 rank, float epsilon) {
    __shared__ float warp_squares[NORM_THREADS / 32];
    Meetings ranks(windows, rank);
    const u32 share = (row_count + RANKS - 1) / RANKS;
    auto has_row = [&](u32 r, u32 i) {
        const u32 index = r * share + i;
        return index < row_count && load_row(live, index).flags & ACTIVE;
    };
    wait_for_previous();
    ranks.begin();
    for (u32 i = blockIdx.x; i < share; i += gridDim.x) {
#pragma unroll
        for (u32 r = 0; r < RANKS; r++) {
            if (r == rank || !has_row(r, i)) continue;
            NormedRow row;
            row.load(partial + static_cast<u64>(r * share + i) * HIDDEN);
            row.store(ranks.in_window(r, arrived + static_cast<u64>(rank * share + i) * HIDDEN));
        }
    }
    if (!ranks.meet()) return;
    for (u32 i = blockIdx.x; i < share && rank * share + i < row_count; i += gridDim.x) {
        const bool active = has_row(rank, i);
        const u64 place = static_cast<u64>(rank * share + i) * HIDDEN;
        NormedRow row, parts[RANKS];
        row.load(active ? x + place : nullptr);
#pragma unroll
        for (u32 r = 0; r < RANKS; r++) {
            const float* const from =
                r == rank ? partial + place : arrived + static_cast<u64>(r * share + i) * HIDDEN;
            parts[r].load(active ? from : nullptr);
        }
#pragma unroll
        for (int k = 0; k < row.EACH; k++) {
#pragma unroll
            for (u32 r = 1; r < RANKS; r++) {
                add(parts[0].u[k], parts[r].u[k]);
                add(parts[0].v[k], parts[r].v[k]);
            }
            add(row.u[k], parts[0].u[k]);
            add(row.v[k], parts[0].v[k]);
        }
#pragma unroll
        for (u32 r = 0; r < RANKS; r++)
            if (active && (r == rank || norm == nullptr)) row.store(ranks.in_window(r, x + place));
        if (norm == nullptr) continue;
        __syncthreads();  // the squares of the row before are read
        const float scale = row.scale(row.squares(warp_squares), epsilon);
#pragma unroll
        for (int k = 0; k < row.EACH; k++) {
            if (!row.has(k)) continue;
            const uint4 made = row.scaled(k, scale, norm);
            uint4* const at = reinterpret_cast<uint4*>(next + place) + row.chunk(k);
#pragma unroll
            for (u32 r = 0; r < RANKS; r++) *ranks.in_window(r, at) = made;
        }
    }
    ranks.meet();
    ranks.end();
}
