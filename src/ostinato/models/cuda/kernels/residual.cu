// A sum over ranks in a step of several rows whose products do not add it themselves (CarriedOfRanks), with what
// rounded_output and rounded_down do on one device: the residual, the inputs of the next product, and their sums
// of squares (matmul.cuh).
//
// Physics.  The exchange takes some microseconds (exchange.cu), in which nothing else runs.  A kernel behind it
// that norms the residual would take another two, and read what is in registers here.
// clang-format off: exchange.cuh needs `load_fresh`
#include "linear.cuh"
#include "exchange.cuh"
// clang-format on

static_assert(HIDDEN % 8 == 0, "a pair is in one row");

// x += the sum of every rank's `partial`; partial = 0.  Unless `next` is null, next = x * norm, rounded, and zero in
// padding rows; `squares` gets the rows' sums of squares, in half `half`, which an earlier product has cleared.
KERNEL __launch_bounds__(EXCHANGE_THREADS)
    residual_of_ranks(const int* live, float* x, float* partial, const float* norm, bf16* next, u64* squares,
                      u64* windows, u32 half, u32 row_count, u32 hidden, u32 rank) {
    Exchange exchange(windows, rank);
    const ExchangedPairs<EXCHANGE_SCATTERED> pairs{row_count * HIDDEN};
    constexpr u32 COUNT = pairs.COUNT;
    start_next_at<AT_START>();
    float2 before[COUNT], weights[COUNT];
    float sums[COUNT][2] = {};
#pragma unroll
    for (u32 p = 0; p < COUNT; p++)
        weights[p] = next != nullptr
                         ? __ldg(reinterpret_cast<const float2*>(norm) + pairs.at(p) / 2 % (HIDDEN / 2))
                         : make_float2(0.0f, 0.0f);
    wait_for_previous();
    start_next_at<AFTER_WAIT>();
#pragma unroll
    for (u32 p = 0; p < COUNT; p++) {
        if (!pairs.wanted(p)) continue;
        const float2 own = load_fresh(reinterpret_cast<const float2*>(partial + pairs.at(p)));
        before[p] = load_fresh(reinterpret_cast<const float2*>(x + pairs.at(p)));
        sums[p][0] = own.x;
        sums[p][1] = own.y;
    }
    exchange.begin();
    pairs.sum(exchange, sums);
#pragma unroll
    for (u32 p = 0; p < COUNT; p++) {
        const int index = pairs.at(p) / HIDDEN, pair = pairs.at(p) % HIDDEN / 2;
        float square = 0.0f;
        if (pairs.wanted(p)) {
            const float u = __fadd_rn(before[p].x, sums[p][0]), v = __fadd_rn(before[p].y, sums[p][1]);
            *reinterpret_cast<float2*>(x + pairs.at(p)) = make_float2(u, v);
            *reinterpret_cast<float2*>(partial + pairs.at(p)) = make_float2(0.0f, 0.0f);
            if (next != nullptr) {
                const bool active = load_row(live, index).flags & ACTIVE;
                square = active ? u * u + v * v : 0.0f;
                u32* const to = reinterpret_cast<u32*>(next);
                to[rounded_at(row_count, HIDDEN, index, pair / 4) * 4 + pair % 4] =
                    active ? pack_bf16(u * weights[p].x, v * weights[p].y) : 0;
            }
        }
        if (next == nullptr) continue;
        bool adds = pairs.wanted(p);
        if constexpr (HIDDEN % 64 == 0) {  // the pairs of a warp are in one row
            square = sum_lanes<32>(square);
            adds = adds && threadIdx.x % 32 == 0;
        }
        if (adds) add_square(squares_of(squares, half, row_count, index), square);
    }
    exchange.end();
}
