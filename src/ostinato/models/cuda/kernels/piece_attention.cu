// Attention of a piece of a prompt: rows of one sequence at rising positions, on the tensor cores.
//
// Physics.  attention.cu reads all keys and values before a row for that row alone; here PIECE_ROWS
// neighbouring rows and PIECE_QUERIES query heads of a KV head share them, so a step of 512 rows
// moves some 10 MB a layer from L2 instead of 270 (1B shape, empty cache).  What bounds it then is
// the way of one block through its keys, tile by tile, so the blocks with most keys begin first.
//
// A warp has 16 rows of one query head.  Scores are q k^T with q and k in bfloat16, rescaled as they
// come; their exponentials go into the product with the values as bfloat16, sums are float32.
// Fragments: see matmul.cuh; a lane takes 16 neighbouring bytes of a row of q or k as the operands of
// two instructions.  Scores leave the first product where the second one wants them.  Values stand in
// shared memory by dimension, two neighbouring positions in a word.
#include "common.cuh"

constexpr int GROUP = HEADS / KV_HEADS, PARTS = GROUP / PIECE_QUERIES;
constexpr int WARPS = PIECE_ROWS / 16 * PIECE_QUERIES, THREADS = 32 * WARPS;
constexpr int TILE = HEAD_SIZE <= 64 ? 64 : 32;           // positions in shared memory at once
constexpr int WIDE = round_up(HEAD_SIZE, 32);             // what is missing to it counts as zero
constexpr int STRIDE = WIDE % 64 ? WIDE : WIDE + 32;      // of a key: no bank conflicts
constexpr int PAIRS = TILE / 2, VALUE_STRIDE = PAIRS + 4;  // words of a dimension, as well
constexpr int CHUNKS = WIDE / 32;
constexpr int KEY_ITEMS = TILE * (WIDE / 8), KEY_EACH = ceil_div(KEY_ITEMS, THREADS);
constexpr int VALUE_ITEMS = PAIRS * (HEAD_SIZE / 8), VALUE_EACH = ceil_div(VALUE_ITEMS, THREADS);
static_assert(GROUP % PIECE_QUERIES == 0 && PIECE_ROWS % 16 == 0, "shape");
static_assert(HEAD_SIZE % 8 == 0 && HEAD_SIZE <= 128, "head size");

DEVICE int largest_of_lanes(int v) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) v = larger(v, exchange(v, mask));
    return v;
}
DEVICE int end_of(const Row& row) { return row.flags & ACTIVE ? row.position + 1 : 0; }

KERNEL __launch_bounds__(THREADS)
    piece_attention(const int* live, const float* q, const bf16* cache, bf16* out, u32 row_count,
                    u32 heads, u32 kv_heads, u32 head_size, u32 sequences, u32 context, u32 window,
                    float scale) {
    __shared__ Row rows[PIECE_ROWS];
    __shared__ uint4 keys[TILE * STRIDE / 8];
    __shared__ u32 values[HEAD_SIZE * VALUE_STRIDE];
    start_next_at<AT_START>();
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int g = lane / 4, t = lane % 4;
    const int kv_head = blockIdx.y / PARTS;
    const int head = kv_head * GROUP + blockIdx.y % PARTS * PIECE_QUERIES + warp % PIECE_QUERIES;
    const int first = (gridDim.x - 1 - blockIdx.x) * PIECE_ROWS;  // the last rows see most keys
    const int own = warp / PIECE_QUERIES * 16;                    // this warp's rows of the block

    wait_for_previous();
    start_next_at<AFTER_WAIT>();
    if (thread < PIECE_ROWS) {
        const int index = first + thread;
        rows[thread] = index < static_cast<int>(row_count) ? load_row(live, index) : Row{};
    }
    __syncthreads();
    int end = 0, sequence = 0;
#pragma unroll
    for (int i = lane; i < PIECE_ROWS; i += 32) {
        end = larger(end, end_of(rows[i]));
        sequence = larger(sequence, end_of(rows[i]) ? rows[i].sequence : 0);
    }
    end = largest_of_lanes(end);
    sequence = largest_of_lanes(sequence);
    // Windows: no row of the block looks before `begin`, and none of the warp before `own_begin`.
    auto least_begin = [&](const Row& row) {
        return end_of(row) ? -first_position(end_of(row), window) : -(1 << 30);
    };
    int begin = 0, own_begin = 0;
    if constexpr (WINDOWED) {
        int least = -(1 << 30);
#pragma unroll
        for (int i = lane; i < PIECE_ROWS; i += 32) least = larger(least, least_begin(rows[i]));
        begin = end ? -largest_of_lanes(least) / TILE * TILE : 0;
        own_begin = -largest_of_lanes(least_begin(rows[own + lane % 16]));
    }
    const int own_end = largest_of_lanes(end_of(rows[own + lane % 16]));
    const int end0 = end_of(rows[own + g]), end1 = end_of(rows[own + g + 8]);
    const int begin0 = first_position(end0, window), begin1 = first_position(end1, window);

    const long long line = static_cast<long long>(sequence) * KV_HEADS + kv_head;
    const long long part = static_cast<long long>(sequences) * KV_HEADS;
    const bf16* const key_rows = cache + line * context * HEAD_SIZE;
    const bf16* const value_rows = cache + (part + line) * context * HEAD_SIZE;
    uint4 key_ahead[KEY_EACH], value_ahead[VALUE_EACH][2];
    auto load = [&](const bf16* from, int position, int at, bool there) {
        if (!there || position >= end) return make_uint4(0, 0, 0, 0);
        return load_fresh(reinterpret_cast<const uint4*>(
            from + static_cast<long long>(position) * HEAD_SIZE + at));
    };
    auto load_tile = [&](int start) {
#pragma unroll
        for (int i = 0; i < KEY_EACH; i++) {
            const int item = i * THREADS + thread, at = item % (WIDE / 8) * 8;
            const bool there = item < KEY_ITEMS && at < HEAD_SIZE;
            key_ahead[i] = load(key_rows, start + item / (WIDE / 8), at, there);
        }
#pragma unroll
        for (int i = 0; i < VALUE_EACH; i++) {
            const int item = i * THREADS + thread, at = item / PAIRS * 8;
            const int position = start + item % PAIRS * 2;
            value_ahead[i][0] = load(value_rows, position, at, item < VALUE_ITEMS);
            value_ahead[i][1] = load(value_rows, position + 1, at, item < VALUE_ITEMS);
        }
    };
    auto store_tile = [&]() {
#pragma unroll
        for (int i = 0; i < KEY_EACH; i++) {
            const int item = i * THREADS + thread;
            if (item >= KEY_ITEMS) break;
            keys[item / (WIDE / 8) * (STRIDE / 8) + item % (WIDE / 8)] = key_ahead[i];
        }
#pragma unroll
        for (int i = 0; i < VALUE_EACH; i++) {
            const int item = i * THREADS + thread;
            if (item >= VALUE_ITEMS) break;
            u32* const to = values + item / PAIRS * 8 * VALUE_STRIDE + item % PAIRS;
            const uint4 a = value_ahead[i][0], b = value_ahead[i][1];
            auto two = [&](int dimension, u32 left, u32 right) {
                to[dimension * VALUE_STRIDE] = (left & 0xffffu) | right << 16;
                to[(dimension + 1) * VALUE_STRIDE] = left >> 16 | (right & 0xffff0000u);
            };
            two(0, a.x, b.x);
            two(2, a.y, b.y);
            two(4, a.z, b.z);
            two(6, a.w, b.w);
        }
    };

    // Queries, times the scale and log2(e), so that the exponentials are powers of two.
    const float factor = scale * 1.44269504f;
    uint4 query[CHUNKS][2];
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int index = first + own + g + 8 * half, at = c * 32 + t * 8;
            float4 u = make_float4(0, 0, 0, 0), v = u;
            if ((half ? end1 : end0) && at < HEAD_SIZE) {
                const float* from = q + (index * HEADS + head) * HEAD_SIZE + at;
                u = load_fresh(reinterpret_cast<const float4*>(from));
                v = load_fresh(reinterpret_cast<const float4*>(from) + 1);
            }
            query[c][half] =
                make_uint4(pack_bf16(u.x * factor, u.y * factor), pack_bf16(u.z * factor, u.w * factor),
                           pack_bf16(v.x * factor, v.y * factor), pack_bf16(v.z * factor, v.w * factor));
        }
    }

    float mixed[HEAD_SIZE / 8][4] = {};
    float largest0 = MINUS_INFINITY, largest1 = MINUS_INFINITY, sum0 = 0.0f, sum1 = 0.0f;
    if (end) load_tile(begin);
    for (int start = begin; start < end; start += TILE) {
        store_tile();
        __syncthreads();
        if (start + TILE < end) load_tile(start + TILE);  // comes while this one is computed
        if (start < own_end && start + TILE > own_begin) {
            float score[TILE / 8][4] = {};
#pragma unroll
            for (int n = 0; n < TILE / 8; n++) {
#pragma unroll
                for (int c = 0; c < CHUNKS; c++) {
                    const uint4 a = query[c][0], b = query[c][1];
                    const uint4 k = keys[(n * 8 + g) * (STRIDE / 8) + c * 4 + t];
                    multiply_tile(score[n], a.x, b.x, a.y, b.y, k.x, k.y);
                    multiply_tile(score[n], a.z, b.z, a.w, b.w, k.z, k.w);
                }
            }
            float most0 = largest0, most1 = largest1;
#pragma unroll
            for (int n = 0; n < TILE / 8; n++) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const int position = start + n * 8 + t * 2 + i;
                    if (position >= end0 || position < begin0) score[n][i] = MINUS_INFINITY;
                    if (position >= end1 || position < begin1) score[n][2 + i] = MINUS_INFINITY;
                    most0 = fmaxf(most0, score[n][i]);
                    most1 = fmaxf(most1, score[n][2 + i]);
                }
            }
#pragma unroll
            for (int mask = 1; mask < 4; mask *= 2) {
                most0 = fmaxf(most0, exchange(most0, mask));
                most1 = fmaxf(most1, exchange(most1, mask));
            }
            // A row that has seen no position yet has no maximum, and nothing to rescale.
            const float base0 = most0 == MINUS_INFINITY ? 0.0f : most0;
            const float base1 = most1 == MINUS_INFINITY ? 0.0f : most1;
            const float before0 = exp2_fast(largest0 - base0), before1 = exp2_fast(largest1 - base1);
            largest0 = most0;
            largest1 = most1;
            sum0 *= before0;
            sum1 *= before1;
#pragma unroll
            for (int n = 0; n < TILE / 8; n++) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    sum0 += score[n][i] = exp2_fast(score[n][i] - base0);
                    sum1 += score[n][2 + i] = exp2_fast(score[n][2 + i] - base1);
                }
            }
#pragma unroll
            for (int n = 0; n < HEAD_SIZE / 8; n++) {
                mixed[n][0] *= before0, mixed[n][1] *= before0;
                mixed[n][2] *= before1, mixed[n][3] *= before1;
            }
#pragma unroll
            for (int k = 0; k < TILE / 16; k++) {
                const float(&s)[4] = score[2 * k], (&later)[4] = score[2 * k + 1];
                const u32 a0 = pack_bf16(s[0], s[1]), a1 = pack_bf16(s[2], s[3]);
                const u32 a2 = pack_bf16(later[0], later[1]), a3 = pack_bf16(later[2], later[3]);
#pragma unroll
                for (int n = 0; n < HEAD_SIZE / 8; n++) {
                    const u32* const from = values + (n * 8 + g) * VALUE_STRIDE + k * 8 + t;
                    multiply_tile(mixed[n], a0, a1, a2, a3, from[0], from[4]);
                }
            }
        }
        __syncthreads();  // before the next tile takes the place of this one
    }
    start_next_at<BEFORE_OUTPUT>();

    sum0 = sum_lanes<4>(sum0);
    sum1 = sum_lanes<4>(sum1);
    const float share0 = end0 ? 1.0f / sum0 : 0.0f, share1 = end1 ? 1.0f / sum1 : 0.0f;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int index = first + own + g + 8 * half;
        if (index >= static_cast<int>(row_count)) break;
        const float share = half ? share1 : share0;
        u32* const to = reinterpret_cast<u32*>(out + (index * HEADS + head) * HEAD_SIZE) + t;
#pragma unroll
        for (int n = 0; n < HEAD_SIZE / 8; n++)
            to[n * 4] = pack_bf16(mixed[n][2 * half] * share, mixed[n][2 * half + 1] * share);
    }
}
