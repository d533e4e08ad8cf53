// The first kernel of a step: turns rows and states into embeddings.
//
// Physics: a chain of a few dependent loads (0.3 us each from L2, 0.7 us from memory).
#include "bricks.cuh"

// A block computes a row.  A row whose sequence, token or position is out of range becomes inactive.
KERNEL __launch_bounds__(EMBED_THREADS)
    embed(const int* rows, const int* state, int* live, const Weight* table, float* x, int* history,
          u32 row_count, u32 hidden, u32 vocabulary, u32 sequences, u32 context) {
    start_next_at<AT_START>();
    const int index = blockIdx.x, thread = threadIdx.x;
    wait_for_previous();
    start_next_at<AFTER_WAIT>();
    Row row = resolved_row(rows, index, state, sequences);
    if (static_cast<u32>(row.token) >= VOCAB || static_cast<u32>(row.position) >= context)
        row.flags &= ~ACTIVE;
    if (thread == 0) reinterpret_cast<Row*>(live)[index] = row;
    start_next_at<AFTER_INPUT>();
    const bool active = row.flags & ACTIVE;
    if (active && thread == 0)
        history[static_cast<long long>(row.sequence) * context + row.position] = row.token;
    float4* const to = reinterpret_cast<float4*>(x + index * HIDDEN);
#ifdef EMBED_FORMAT
    const Place place = place_of(active ? row.token : 0, 2);
    for (int item = thread; item < ceil_div(HIDDEN, 32) * 4; item += EMBED_THREADS) {
        const int group = item / 4, t = item % 4;
        float v[8] = {};
        if (active) brick_values<EMBED_FORMAT>(v, table, HIDDEN, place, group / 8, group % 8, t);
        to[group * 8 + t] = make_float4(v[0], v[1], v[2], v[3]);
        to[group * 8 + 4 + t] = make_float4(v[4], v[5], v[6], v[7]);
    }
#else
    const bf16* const from = table + static_cast<long long>(active ? row.token : 0) * HIDDEN;
#pragma unroll
    for (int chunk = thread; chunk < HIDDEN / 8; chunk += EMBED_THREADS) {
        const uint4 v = active ? load_weights(from + chunk * 8) : make_uint4(0, 0, 0, 0);
        to[2 * chunk] = make_float4(low_half(v.x), high_half(v.x), low_half(v.y), high_half(v.y));
        to[2 * chunk + 1] =
            make_float4(low_half(v.z), high_half(v.z), low_half(v.w), high_half(v.w));
    }
#endif
    start_next_at<BEFORE_OUTPUT>();
}
