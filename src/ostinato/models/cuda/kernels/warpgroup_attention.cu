// Attention of a piece of a prompt by warpgroups (compute capability 9.0): what piece_attention.cu computes.
//
// Physics.  A row and a position take 4 * HEAD_SIZE operations of the tensor cores for each query head, and an
// exponential: with heads of 64 both units need the same time, so neither may wait for the other.  A block has
// one warp that copies, and WARPGROUPS warpgroups with 64 query vectors each, whose products come one after the
// other: while one multiplies, the others compute exponentials.  A warpgroup asks for the next tile's scores
// before it mixes this one's values.  The query heads that share a KV head stand side by side: vector v of an
// item is row v / GROUP, head v % GROUP, so that an item has few rows, and few positions that some of them skip.
// Blocks stay, and take items in turns; the next item's keys are copied while the last one ends.
//
// Tiles of positions begin at multiples of TILE, and a row's arithmetic does not depend on the rows beside it:
// its bits are the same in pieces of any size and with any number of warpgroups.
//
// Rounding and bases as in piece_attention.cu.  The base is the largest score of a row's first tile, mostly its
// largest share, which is then 1 and exact in bfloat16: with a base of 0 errors are a tenth larger.
#include "warpgroups.cuh"

constexpr int GROUP = HEADS / KV_HEADS;
constexpr int QUERIES = 64 * WARPGROUPS, SPAN = QUERIES / GROUP;  // query vectors of an item; rows of the step
constexpr int TILE = PIECE_POSITIONS, PANELS_OF_HEAD = HEAD_SIZE / 64;
constexpr int PANEL = TILE * PANEL_WIDTH, PART = PANELS_OF_HEAD * PANEL;  // bytes, of keys or values
constexpr int QUERY_PANEL = QUERIES * PANEL_WIDTH;
constexpr int THREADS = 128 * WARPGROUPS + 128;
// A thread's registers when the block begins, and later, of those that copy and of the others.
constexpr int RESIDENT = WARPGROUPS > 1 ? 1 : 2;  // blocks on a multiprocessor
constexpr int AT_FIRST = 65536 / (THREADS * RESIDENT) / 8 * 8, OF_COPIES = 32;
constexpr int REGISTERS = (AT_FIRST * THREADS - OF_COPIES * 128) / (128 * WARPGROUPS) / 8 * 8;
static_assert(HEAD_SIZE % 64 == 0 && TILE % 16 == 0, "shape");

// An item: SPAN rows of the step and a KV head.
struct Item {
    int first, kv_head, begin, end, count;  // its rows attend to positions in [`begin`, `end`), in `count` tiles

    DEVICE Item(int item, const int* row_ends, u32 row_count, u32 window) {
        constexpr int NEVER_SEEN = 1 << 30;
        const int lane = threadIdx.x % 32, blocks = ceil_div(static_cast<int>(row_count), SPAN);
        first = (blocks - 1 - item / KV_HEADS) * SPAN;  // last rows first: they have most keys
        kv_head = item % KV_HEADS;
        end = 0, begin = NEVER_SEEN;
        for (int row = first + lane; row < smaller(first + SPAN, static_cast<int>(row_count)); row += 32) {
            const int row_end = row_ends[row];
            end = larger(end, row_end);
            if (row_end) begin = smaller(begin, first_position(row_end, window));
        }
        end = uniform(largest_of_lanes(end));
        begin = WINDOWED && end ? uniform(least_of_lanes(begin)) / TILE * TILE : 0;
        count = ceil_div(end - begin, TILE);
    }
};
// Blocks take items in turns, back and forth, so that each has long and short ones.
DEVICE int item_of(int turn) {
    const int at = static_cast<int>(turn % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    return turn * static_cast<int>(gridDim.x) + at;
}

KERNEL __launch_bounds__(THREADS, RESIDENT)
    warpgroup_attention(const int* live, const float* q, const bf16* cache, bf16* out, float* workspace,
                        u32 row_count, u32 heads, u32 kv_heads, u32 head_size, u32 sequences, u32 context,
                        u32 window, float scale) {
    ALIGNED_SHARED(shared, 1024);  // queries, then stages of keys and values, then ends of rows
    __shared__ u64 keys_came[STAGES], values_came[STAGES], keys_read[STAGES], values_read[STAGES];
    alignas(128) __shared__ u32 map_made[32];
    __shared__ int sequences_seen[THREADS / 32];
    u8* const stages = shared + PANELS_OF_HEAD * QUERY_PANEL;
    int* const row_ends = reinterpret_cast<int*>(stages + STAGES * 2 * PART);
    start_next_at<AT_START>();
    const int thread = threadIdx.x, warp = uniform(thread / 32), lane = thread % 32;
    const int g = lane / 4, t = lane % 4;
    const int items = ceil_div(static_cast<int>(row_count), SPAN) * KV_HEADS;

    if (thread == 0) {
        for (int i = 0; i < STAGES; i++) {
            begin_arrivals(keys_came + i);
            begin_arrivals(values_came + i);
            begin_arrivals(keys_read + i, 4 * WARPGROUPS);
            begin_arrivals(values_read + i, 4 * WARPGROUPS);
        }
    }
    wait_for_previous();
    start_next_at<AFTER_WAIT>();
    int sequence = 0;
    for (int i = thread; i < static_cast<int>(row_count); i += THREADS) {
        const Row row = load_row(live, i);
        if ((row_ends[i] = end_of(row))) sequence = row.sequence;
    }
    sequence = largest_of_lanes(sequence);
    if (lane == 0) sequences_seen[warp] = sequence;
    __syncthreads();

    if (warp >= 4 * WARPGROUPS) {
        give_registers<OF_COPIES>();
        if (warp > 4 * WARPGROUPS) return;
        int end = 0;  // of all rows: later positions of the cache may hold anything
        for (int i = lane; i < static_cast<int>(row_count); i += 32) end = larger(end, row_ends[i]);
        end = uniform(largest_of_lanes(end));
        if (!end) return;
        sequence = largest_of_lanes(lane < THREADS / 32 ? sequences_seen[lane] : 0);
        float* const map = partials_of(workspace) + blockIdx.x * 32;
        const long long line = static_cast<long long>(sequence) * KV_HEADS * context;
        make_map(map, map_made, cache + line * HEAD_SIZE, HEAD_SIZE, end, TILE, KV_HEADS,
                 static_cast<u64>(context) * (HEAD_SIZE * 2),
                 static_cast<u64>(sequences) * KV_HEADS * context * (HEAD_SIZE * 2));
        u32 asked = 0;
        for (int turn = 0; item_of(turn) < items; turn++) {
            const Item item(item_of(turn), row_ends, row_count, window);
            auto copy_part = [&](int tile, int part, u64* came, u64* read) {
                const u32 number = asked + tile, stage = number % STAGES;
                wait_for_arrivals(read + stage, number / STAGES % 2 == 0);
                expect_bytes(came + stage, PART);
#pragma unroll
                for (int i = 0; i < PANELS_OF_HEAD; i++) {
                    u8* const to = stages + (stage * 2 + part) * PART + i * PANEL;
                    copy_box(to, map, i * 64, item.begin + tile * TILE, item.kv_head, part, came + stage);
                }
            };
            for (int tile = 0; lane == 0 && item.count && tile <= item.count; tile++) {
                if (tile < item.count) copy_part(tile, 0, keys_came, keys_read);
                if (tile > 0) copy_part(tile - 1, 1, values_came, values_read);
            }
            asked += item.count;
        }
        return;
    }
    take_registers<REGISTERS>();

    const float factor = scale * 1.44269504f;
    const int part = warp / 4, own = part * 64;
    // A warpgroup asks for products when the one before it has: barrier TURN + part.
    constexpr int TURN = 1 + WARPGROUPS;
    if (WARPGROUPS > 1 && part == WARPGROUPS - 1) arrive_part(TURN, 256);
    u32 done = 0;  // tiles of earlier items
    const Panels queries = panels_at(shared + own * PANEL_WIDTH);
    const Panels keys = panels_at(stages), values = panels_at(stages + PART, PANEL);
    for (int turn = 0; item_of(turn) < items; turn++) {
        const Item item(item_of(turn), row_ends, row_count, window);
        const int first = item.first, count = item.count;
        // Queries, times the scale and log2(e), so that the exponentials are powers of two.
        constexpr int CHUNKS = HEAD_SIZE / 8;
        uint4 query[CHUNKS / 2];
#pragma unroll
        for (int i = 0; i < CHUNKS / 2; i++) {
            const int at = i * 128 + thread % 128, chunk = at % CHUNKS, vector = own + at / CHUNKS;
            const int row = first + vector / GROUP, head = item.kv_head * GROUP + vector % GROUP;
            float4 u = make_float4(0, 0, 0, 0), v = u;
            if (vector < SPAN * GROUP && row < static_cast<int>(row_count) && row_ends[row]) {
                const float* const from = q + (row * HEADS + head) * HEAD_SIZE + chunk * 8;
                u = load_fresh(reinterpret_cast<const float4*>(from));
                v = load_fresh(reinterpret_cast<const float4*>(from) + 1);
            }
            query[i] = pack_eight(times(u, factor), times(v, factor));
        }
        sync_part(1 + part, 128);  // no warp still reads the queries of the item before
#pragma unroll
        for (int i = 0; i < CHUNKS / 2; i++) {
            const int at = i * 128 + thread % 128, chunk = at % CHUNKS, vector = own + at / CHUNKS;
            *reinterpret_cast<uint4*>(shared + chunk / 8 * QUERY_PANEL + panel_at(vector, chunk % 8)) = query[i];
        }
        publish_copies();
        sync_part(1 + part, 128);
        // All queries of the warp attend to all positions in [`whole_begin`, `whole_end`).
        int ends[2], whole_end = item.end, whole_begin = 0;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int vector = own + warp % 4 * 16 + g + 8 * half, row = first + vector / GROUP;
            ends[half] = vector < SPAN * GROUP && row < static_cast<int>(row_count) ? row_ends[row] : 0;
            whole_end = smaller(whole_end, ends[half]);
            if (WINDOWED) whole_begin = larger(whole_begin, first_position(ends[half], window));
        }
        whole_end = uniform(least_of_lanes(whole_end));
        if (WINDOWED) whole_begin = uniform(largest_of_lanes(whole_begin));

        float score[TILE / 8][4], mixed[HEAD_SIZE / 8][4] = {};
        u32 share[TILE / 16][4];
        float base[2] = {MINUS_INFINITY, MINUS_INFINITY}, sum[2] = {}, shrinks[2];
        bool rescaled = false;
        auto ask_scores = [&](u32 stage) {
            const Panels of_stage = further(keys, stage * 2 * PART);
            settle(score);
            start_group();
#pragma unroll
            for (int i = 0; i < HEAD_SIZE / 16; i++) {
                const Panels a = further(queries, i / 4 * QUERY_PANEL + i % 4 * 32);
                const Panels b = further(of_stage, i / 4 * PANEL + i % 4 * 32);
                if (i == 0)
                    multiply_rows<false>(score, a, b);
                else
                    multiply_rows<true>(score, a, b);
            }
            end_group();
        };
        auto ask_mix = [&](u32 stage) {
            const Panels of_stage = further(values, stage * 2 * PART);
            settle(mixed);
            start_group();
#pragma unroll
            for (int i = 0; i < TILE / 16; i++)
                multiply_shares(mixed, share[i], further(of_stage, i * 16 * PANEL_WIDTH));
            end_group();
        };
        auto take_exponentials = [&](int start) {
            if (start < whole_begin || start + TILE > whole_end) {
#pragma unroll
                for (int i = 0; i < TILE / 2; i++) {
                    const int position = start + i / 4 * 8 + t * 2 + i % 2, row_end = ends[i / 2 % 2];
                    if (position >= row_end || position < first_position(row_end, window))
                        score[i / 4][i % 4] = MINUS_INFINITY;
                }
            }
            rescaled = false;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float old = base[half];
                shrinks[half] = take_powers(score, half, base[half], sum[half]);
                rescaled |= base[half] != old;
            }
        };
        auto round_shares = [&]() {
#pragma unroll
            for (int i = 0; i < TILE / 4; i++) {
                const float(&s)[4] = score[i / 2];
                share[i / 4][i % 4] = pack_bf16(s[i % 2 * 2], s[i % 2 * 2 + 1]);
            }
        };
        auto mark_read = [&](u64* read) {
            if (lane == 0) arrive(read);
        };

        if (count) {
            u32 before = done % STAGES;
            wait_for_arrivals(keys_came + before, done / STAGES % 2);
            ask_scores(before);
            wait_products<0>();
            settle(score);
            mark_read(keys_read + before);
            take_exponentials(item.begin);
            round_shares();
            for (int tile = 1; tile < count; tile++) {
                const u32 number = done + tile, stage = number % STAGES;
                wait_for_arrivals(keys_came + stage, number / STAGES % 2);
                if (WARPGROUPS > 1) sync_part(TURN + part, 256);
                ask_scores(stage);
                wait_for_arrivals(values_came + before, (number - 1) / STAGES % 2);
                ask_mix(before);
                if (WARPGROUPS > 1) arrive_part(TURN + (part + 1) % WARPGROUPS, 256);
                wait_products<1>();
                settle(score);
                mark_read(keys_read + stage);
                take_exponentials(item.begin + tile * TILE);
                wait_products<0>();
                settle(mixed);
                mark_read(values_read + before);
                if (__ballot_sync(0xffffffffu, rescaled)) {
#pragma unroll
                    for (int i = 0; i < HEAD_SIZE / 2; i++) mixed[i / 4][i % 4] *= shrinks[i / 2 % 2];
                }
                round_shares();
                before = stage;
            }
            done += count;
            wait_for_arrivals(values_came + before, (done - 1) / STAGES % 2);
            ask_mix(before);
            wait_products<0>();
            settle(mixed);
            mark_read(values_read + before);
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float total = sum_lanes<4>(sum[half]);
            const float weight = ends[half] ? 1.0f / total : 0.0f;
            const int vector = own + warp % 4 * 16 + g + 8 * half, row = first + vector / GROUP;
            if (vector >= SPAN * GROUP || row >= static_cast<int>(row_count)) continue;
            const int head = item.kv_head * GROUP + vector % GROUP;
            u32* const to = reinterpret_cast<u32*>(out + (row * HEADS + head) * HEAD_SIZE) + t;
#pragma unroll
            for (int n = 0; n < HEAD_SIZE / 8; n++)
                to[n * 4] = pack_bf16(mixed[n][2 * half] * weight, mixed[n][2 * half + 1] * weight);
        }
    }
    if (WARPGROUPS > 1 && part == 0) sync_part(TURN, 256);  // the last arrival, which nobody waits for
}
