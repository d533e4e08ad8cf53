// Attention of a piece of a prompt, rows of one sequence at increasing positions, on the tensor cores.
//
// Physics.  attention.cu reads all earlier keys and values for each row separately.  Here the rows of a block
// and PIECE_QUERIES query heads of a KV head share them, so that arithmetic is the limit: 4 * HEADS *
// HEAD_SIZE operations for a row and a position.  A warp has PIECE_TILES times 16 rows of one query head, and
// each fragment of keys and values that it reads from shared memory is used for all of them.  While one tile's
// scores are converted to weights, the next tile's scores are multiplied, and the tile after that is copied.
//
// Scores are q k^T with q and k in bfloat16; their exponentials are rounded to bfloat16 for the product with
// the values; sums are float32.  Exponentials are relative to a base of the row.  The base is raised to the
// largest score only once that is far above it, so that sums are rarely rescaled; the result does not depend
// on the base.  Fragments: see matmul.cuh; a lane takes 16 adjacent bytes of a row of q or k as the operands of
// two instructions.  The first product leaves the scores in the layout of the second one's operands.
#include "common.cuh"

constexpr int GROUP = HEADS / KV_HEADS, PARTS = GROUP / PIECE_QUERIES;
constexpr int TILES = PIECE_TILES, WARP_ROWS = 16 * TILES;
constexpr int THREADS = PIECE_ROWS / WARP_ROWS * PIECE_QUERIES * 32;
constexpr int TILE = PIECE_POSITIONS;                   // positions of a tile in shared memory
constexpr int CHUNKS = ceil_div(HEAD_SIZE, 32);         // chunks of 32 dimensions; missing ones are zero
constexpr int LINE = round_up(HEAD_SIZE, 64) / 8;       // units of 16 bytes of a position in shared memory
static_assert(GROUP % PIECE_QUERIES == 0 && PIECE_ROWS % WARP_ROWS == 0 && TILE % 16 == 0, "shape");
static_assert(HEAD_SIZE % 8 == 0 && HEAD_SIZE <= 128, "head size");

typedef float Scores[TILES][TILE / 8][4];

// The place of 16 bytes of a position in its tile.  The order within a line depends on the position, so that
// there are no bank conflicts for eight lanes that read four parts of two positions, or one part of eight.
DEVICE int order_of(int position) { return (position & 1) << 2 | (position >> 1 & 3); }
DEVICE int place_of(int position, int part) { return position * LINE + (part ^ order_of(position)); }

KERNEL __launch_bounds__(THREADS)
    piece_attention(const int* live, const float* q, const bf16* cache, bf16* out, u32 row_count,
                    u32 heads, u32 kv_heads, u32 head_size, u32 sequences, u32 context, u32 window,
                    float scale) {
    constexpr int NEVER_SEEN = 1 << 30;
    DYNAMIC_SHARED(shared);
    __shared__ Row rows[PIECE_ROWS];
    uint4* const tiles = reinterpret_cast<uint4*>(shared);  // two tiles of keys, two of values
    start_next_at<AT_START>();
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int g = lane / 4, t = lane % 4;
    const int kv_head = blockIdx.x / PARTS;
    const int head = kv_head * GROUP + blockIdx.x % PARTS * PIECE_QUERIES + warp % PIECE_QUERIES;
    const int first = (gridDim.y - 1 - blockIdx.y) * PIECE_ROWS;  // last rows first: they have most keys
    const int own = warp / PIECE_QUERIES * WARP_ROWS;             // this warp's rows of the block

    wait_for_previous();
    start_next_at<AFTER_WAIT>();
    for (int i = thread; i < PIECE_ROWS; i += THREADS) {
        const int index = first + i;
        rows[i] = index < static_cast<int>(row_count) ? load_row(live, index) : Row{};
    }
    __syncthreads();
    // The block's rows attend to positions in [`begin`, `end`) only; all rows of the warp attend to all
    // positions in [`whole_begin`, `whole_end`).
    int end = 0, sequence = 0, begin = NEVER_SEEN, whole_begin = 0, whole_end = NEVER_SEEN;
#pragma unroll
    for (int i = lane; i < PIECE_ROWS; i += 32) {
        const int row_end = end_of(rows[i]), row_begin = first_position(row_end, window);
        end = larger(end, row_end);
        if (row_end) sequence = rows[i].sequence, begin = smaller(begin, row_begin);
        if (i / WARP_ROWS == own / WARP_ROWS)
            whole_begin = larger(whole_begin, row_begin), whole_end = smaller(whole_end, row_end);
    }
    end = largest_of_lanes(end);
    sequence = largest_of_lanes(sequence);
    whole_end = least_of_lanes(whole_end);
    begin = WINDOWED && end ? least_of_lanes(begin) / TILE * TILE : 0;
    if (WINDOWED) whole_begin = largest_of_lanes(whole_begin);

    const long long line = static_cast<long long>(sequence) * KV_HEADS + kv_head;
    const long long values_after = static_cast<long long>(sequences) * KV_HEADS;  // lines
    auto copy_tile = [&](int place, long long from_line, int start) {
        constexpr int EACH = CHUNKS * 4, ITEMS = TILE * EACH;
        const bf16* const from = cache + (from_line * context + start) * HEAD_SIZE;
#pragma unroll
        for (int i = 0; i < ceil_div(ITEMS, THREADS); i++) {
            const int item = i * THREADS + thread, position = item / EACH, at = item % EACH;
            if (ITEMS % THREADS && item >= ITEMS) break;
            copy_async(tiles + place * (TILE * LINE) + place_of(position, at),
                       from + position * HEAD_SIZE + at * 8,
                       start + position < end && at < HEAD_SIZE / 8);
        }
    };
    auto copy_keys = [&](int start, int place) { copy_tile(place, line, start); };
    auto copy_values = [&](int start, int place) { copy_tile(2 + place, line + values_after, start); };
    copy_keys(begin, 0);
    end_copies();
    copy_keys(begin + TILE, 1);
    copy_values(begin, 0);
    end_copies();

    // Queries, times the scale and log2(e), so that the exponentials are powers of two.
    const float factor = scale * 1.44269504f;
    uint4 query[TILES][2][CHUNKS];
    int ends[TILES][2];
#pragma unroll
    for (int m = 0; m < TILES; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = own + m * 16 + g + 8 * half;
            ends[m][half] = end_of(rows[row]);
#pragma unroll
            for (int c = 0; c < CHUNKS; c++) {
                const int at = c * 32 + t * 8;
                float4 u = make_float4(0, 0, 0, 0), v = u;
                if (ends[m][half] && at < HEAD_SIZE) {
                    const float* const from = q + ((first + row) * HEADS + head) * HEAD_SIZE + at;
                    u = load_fresh(reinterpret_cast<const float4*>(from));
                    v = load_fresh(reinterpret_cast<const float4*>(from) + 1);
                }
                query[m][half][c] = pack_eight(times(u, factor), times(v, factor));
            }
        }
    }
    auto multiply_keys = [&](Scores& score, int place) {
        const uint4* const keys = tiles + place * (TILE * LINE);
#pragma unroll
        for (int m = 0; m < TILES; m++) {
#pragma unroll
            for (int i = 0; i < TILE / 2; i++) score[m][i / 4][i % 4] = 0.0f;
        }
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
#pragma unroll
            for (int n = 0; n < TILE / 8; n += 2) {  // two, so that products do not wait for each other
                const uint4 k[2] = {keys[place_of(n * 8 + g, c * 4 + t)],
                                    keys[place_of(n * 8 + 8 + g, c * 4 + t)]};
#pragma unroll
                for (int i = 0; i < 2 * TILES; i++) {
                    const uint4 a = query[i / 2][0][c], b = query[i / 2][1][c];
                    multiply_tile(score[i / 2][n + i % 2], a.x, b.x, a.y, b.y, k[i % 2].x, k[i % 2].y);
                }
#pragma unroll
                for (int i = 0; i < 2 * TILES; i++) {
                    const uint4 a = query[i / 2][0][c], b = query[i / 2][1][c];
                    multiply_tile(score[i / 2][n + i % 2], a.z, b.z, a.w, b.w, k[i % 2].z, k[i % 2].w);
                }
            }
        }
    };

    float mixed[TILES][HEAD_SIZE / 8][4] = {};
    float base[TILES][2], sum[TILES][2] = {};
#pragma unroll
    for (int m = 0; m < TILES; m++) base[m][0] = base[m][1] = MINUS_INFINITY;
    // Computes the tile from `start` on, whose keys and values are at `place`, and the next tile's scores.
    auto step = [&](Scores& score, Scores& next, int start, int place) {
        wait_copies<0>();
        __syncthreads();  // the tile has arrived, and no warp still reads what is overwritten next
        if (start + TILE < end) {
            copy_keys(start + 2 * TILE, place);
            copy_values(start + TILE, place ^ 1);
            end_copies();
        }
        if (start < whole_begin || start + TILE > whole_end) {
#pragma unroll
            for (int m = 0; m < TILES; m++) {
#pragma unroll
                for (int i = 0; i < TILE / 2; i++) {
                    const int position = start + i / 4 * 8 + t * 2 + i % 2, row_end = ends[m][i / 2 % 2];
                    if (position >= row_end || position < first_position(row_end, window))
                        score[m][i / 4][i % 4] = MINUS_INFINITY;
                }
            }
        }
        multiply_keys(next, place ^ 1);  // unused after the last tile

        float shrinks[TILES][2];
        bool rescaled = false;
#pragma unroll
        for (int m = 0; m < TILES; m++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float old = base[m][half];
                shrinks[m][half] = take_powers(score[m], half, base[m][half], sum[m][half]);
                rescaled |= base[m][half] != old;
            }
        }
        if (__ballot_sync(0xffffffffu, rescaled)) {
#pragma unroll
            for (int m = 0; m < TILES; m++) {
#pragma unroll
                for (int i = 0; i < HEAD_SIZE / 2; i++) mixed[m][i / 4][i % 4] *= shrinks[m][i / 2 % 2];
            }
        }
        const uint4* const values = tiles + (2 + place) * (TILE * LINE);
#pragma unroll
        for (int k = 0; k < TILE / 16; k++) {
            u32 a[TILES][4];
#pragma unroll
            for (int m = 0; m < TILES; m++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float(&s)[4] = score[m][2 * k + i / 2];
                    a[m][i] = pack_bf16(s[i % 2 * 2], s[i % 2 * 2 + 1]);
                }
            }
#pragma unroll
            for (int n = 0; n < HEAD_SIZE / 8; n += 2) {
                // Lanes pass the addresses of positions 0 to 15 of 8 dimensions, then of the next 8.
                const bool two = n + 1 < HEAD_SIZE / 8;
                u32 b[4];
                load_turned(b, values + place_of(k * 16 + lane % 16, two ? n + lane / 16 : n));
#pragma unroll
                for (int m = 0; m < TILES; m++) {
                    multiply_tile(mixed[m][n], a[m][0], a[m][1], a[m][2], a[m][3], b[0], b[1]);
                    if (two) multiply_tile(mixed[m][n + 1], a[m][0], a[m][1], a[m][2], a[m][3], b[2], b[3]);
                }
            }
        }
    };
    Scores even, odd;
    wait_copies<1>();
    __syncthreads();
    multiply_keys(even, 0);
    for (int start = begin; start < end; start += 2 * TILE) {
        step(even, odd, start, 0);
        if (start + TILE < end) step(odd, even, start + TILE, 1);
    }
    wait_copies<0>();
    start_next_at<BEFORE_OUTPUT>();

#pragma unroll
    for (int m = 0; m < TILES; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float total = sum_lanes<4>(sum[m][half]);
            const float share = ends[m][half] ? 1.0f / total : 0.0f;
            const int index = first + own + m * 16 + g + 8 * half;
            if (index >= static_cast<int>(row_count)) continue;
            u32* const to = reinterpret_cast<u32*>(out + (index * HEADS + head) * HEAD_SIZE) + t;
#pragma unroll
            for (int n = 0; n < HEAD_SIZE / 8; n++)
                to[n * 4] = pack_bf16(mixed[m][n][2 * half] * share, mixed[m][n][2 * half + 1] * share);
        }
    }
}
