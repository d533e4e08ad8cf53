// A whole step of one row as one kernel: blocks stay, and hand each other what they computed.
//
// Physics.  A step reads every weight once, and its floor is their bytes over the memory's bandwidth.
// What a chain of kernels takes above that is the start and the end of each: a chip without loads in
// flight.  Here one warp of each block does nothing but copy the block's share of all weights, in the
// order of use, into rings in shared memory, one for each other warp; it never waits for a result,
// only for room.  A hop between phases costs 1,500 cycles at least (store, L2, load: measured alone)
// and 1,900 to 3,300 here; 150 hops are most of a small model's step.  The rings hold 190 KB, which
// is 8 us of bytes: a large model's memory works through a hop, but not through the whole stretch
// from queries to gate and up, which is why attention's latency counts there too.
//
// Phases of a layer, each split over all blocks, with what is handed on between them:
//   1. norm, queries, keys and values, rope      -> q, k, v
//   2. attention of a head's part of positions   -> maximum, sum and mix of each part
//   3. output projection, residual               -> x
//   4. norm, gate and up, silu                   -> inner
//   5. down, residual                            -> x
// and then norm and head -> logits, each block's best -> block 0 samples and advances the slot.
// As in `linear.cuh` outputs are made in pairs, sums go in a fixed order, in float32 after the bfloat16
// loads.  A warp makes a pair: it takes the pair's two rows from its ring, part by part.  What it
// takes first in a phase it takes before the phase's input is there.
//
// When is a word of the exchange (persistent.cuh) written again?  In phases 1 and 4 every block has
// outputs and every reader takes those of all blocks (4 by phase 5's gathering of all of inner; 1 by
// the attention parts together, and these by phase 3's gathering).  So who writes a word again has
// seen, at first or second hand, an output that each block made after its last read of that word.
// Hence GRID is at most the number of pairs of phases 1 and 4.
//
// The exchange's first word counts the steps that ran: with it turns are counted across launches, so
// the exchange is zeroed once and never again.  A step whose row is not active writes nothing in it.
#include "linear.cuh"
#include "persistent.cuh"
#include "sample_row.cuh"

constexpr int GRID = PERSISTENT_BLOCKS, WARPS_ = PERSISTENT_WARPS, TEAM = 32 * WARPS_;
constexpr int ALL = TEAM + 32;  // with the warp that copies
constexpr int COLUMNS = PERSISTENT_COLUMNS, SLOT_BYTES = COLUMNS * 4;  // of a slot of the ring
constexpr int REPLICAS = PERSISTENT_REPLICAS, UNDER_WAY = PERSISTENT_UNDER_WAY;
constexpr int QUERY_SIZE = HEADS * HEAD_SIZE, QKV_SIZE = (HEADS + 2 * KV_HEADS) * HEAD_SIZE;
static_assert(COLUMNS % 64 == 0 && REPLICAS <= 32, "shape");

// ------------------------------------------------------------------------- who computes what

// The input of a product as in matvec.cu: [first or second half of a chunk][chunk], the halves so far
// apart that they lie in other banks.
DEVICE constexpr int half_stride(int k) { return round_up(k / 8, 8) + 4; }

// The pairs of a product that a block makes: a run of them, of equal length but for one.  `TURN`
// moves the longer runs to other blocks.
template <class P, int TURN_> struct Slice {
    typedef P Product;
    static constexpr int K = P::INPUTS, BASE = P::PAIRS / GRID, EXTRA = P::PAIRS % GRID;
    static constexpr int MOST = BASE + (EXTRA > 0);
    // A pair is copied in parts of so many columns, each into a slot.
    static constexpr int PART =
        K <= COLUMNS ? K : round_up(ceil_div(K, ceil_div(K, COLUMNS)), 64);
    static constexpr int PARTS = ceil_div(K, PART);
    // Where pairs are few, their parts go to different warps, and are summed up at the end.
    static constexpr bool SPLIT = PARTS > 1 && MOST < 2 * WARPS_;
    static constexpr int EACH = SPLIT ? PARTS : 1;  // units of a pair, which are what a warp takes
    static constexpr int STEPS = ceil_div(PART / 8, 32), STRIDE = half_stride(K);
    static constexpr bool WHOLE = K % PART == 0;
    DEVICE static constexpr bool filled(int step) { return WHOLE && step * 32 + 32 <= PART / 8; }
    static constexpr int NEXT_TURN = (TURN_ + GRID - EXTRA) % GRID;
    static_assert(PART <= COLUMNS && K % 8 == 0, "columns");

    DEVICE static int place() { return (static_cast<int>(blockIdx.x) + TURN_) % GRID; }
    DEVICE static int first() { return place() * BASE + smaller(place(), EXTRA); }
    DEVICE static int count() { return BASE + (place() < EXTRA); }
};
typedef Slice<QkvProduct, 0> Qkv;
typedef Slice<ResidualProduct<QUERY_SIZE>, Qkv::NEXT_TURN> Output;
typedef Slice<GateUpProduct, Output::NEXT_TURN> GateUp;
typedef Slice<ResidualProduct<INNER>, Qkv::NEXT_TURN> Down;  // the rows of Output: its residual
typedef Slice<HeadProduct, GateUp::NEXT_TURN> Head;
static_assert(Qkv::BASE > 0 && GateUp::BASE > 0, "a block without a part in 1 or 4");

// Attention: a block takes a query head and one split of the positions.
constexpr int CHUNKS = HEAD_SIZE / 8, LANES = power_of_two_above(CHUNKS), LINES = 32 / LANES;
constexpr int STEPS = PERSISTENT_STEPS, SPLITS = PERSISTENT_SPLITS;
constexpr int TILE = WARPS_ * LINES * STEPS;
static_assert(HEADS % KV_HEADS == 0 && HEADS * SPLITS <= GRID && LANES <= 32, "attention");
static_assert(3 * HEAD_SIZE / 4 <= TEAM, "a thread takes four floats of q, k or v");

// ------------------------------------------------------------------------------- the exchange

// In words of 32 bits.  The steps so far; then REPLICAS times all that is handed on, so that blocks
// do not all ask the same places of L2.
constexpr int AT_QKV = 0, AT_MIX = round_up(AT_QKV + QKV_SIZE, 32);
constexpr int AT_WEIGHT = round_up(AT_MIX + SPLITS * QUERY_SIZE, 32);
constexpr int AT_MIDDLE = round_up(AT_WEIGHT + SPLITS * HEADS * 2, 32);
constexpr int AT_INNER = round_up(AT_MIDDLE + HIDDEN, 32);
constexpr int AT_X = round_up(AT_INNER + INNER, 32);
constexpr int SPREAD = PERSISTENT_SPREAD;  // lines of 128 bytes that 128 bytes of words lie in
constexpr int REGION = round_up(AT_X + HIDDEN, 32) * SPREAD;
// Where word `at` of a region lies; pieces of 32 bytes stay together.
DEVICE constexpr int place_of_word(int at) { return at / 8 * (8 * SPREAD) + at % 8; }
constexpr int CONTROL = 32, AT_KEYS = CONTROL + REPLICAS * REGION;
constexpr int EXCHANGE = AT_KEYS + round_up(4 * GRID, 32);
static_assert(EXCHANGE == PERSISTENT_EXCHANGE, "exchange_words in kernels_cuda_persistent.py");

struct Exchange {
    u32* words;

    DEVICE u32* region(int replica) const { return words + CONTROL + replica * REGION; }
    // What this block reads: four words, or two, at a multiple of that.
    DEVICE const uint4* quad(int at) const {
        return reinterpret_cast<const uint4*>(region(static_cast<int>(blockIdx.x) % REPLICAS) +
                                              place_of_word(at));
    }
    DEVICE const uint2* two(int at) const { return reinterpret_cast<const uint2*>(quad(at)); }
    // By the first REPLICAS lanes of a warp.
    DEVICE void put(int lane, int at, float value, u32 tag) const {
        if (lane < REPLICAS) publish(region(lane) + place_of_word(at), tagged(value, tag));
    }
    DEVICE void put(int lane, int at, float a, float b, u32 tag) const {
        if (lane < REPLICAS) publish(region(lane) + place_of_word(at), tagged(a, tag), tagged(b, tag));
    }
    // By one thread.
    DEVICE void put_all(int at, float value, u32 tag) const {
#pragma unroll
        for (int i = 0; i < REPLICAS; i++) publish(region(i) + place_of_word(at), tagged(value, tag));
    }
};

// ------------------------------------------------------------------------------ shared memory

// A product as `feed` sees it.
struct Job {
    const bf16* weight;
    long long layer, other;  // from layer to layer, from a pair's row to its other; in elements
    int first, units, k, part;
    int parts, each;  // parts of a unit, units of a pair

    template <class S>
    DEVICE static Job of(const bf16* weight, long long layer, long long rows_apart) {
        return Job{weight, layer, rows_apart * S::K, S::first(), S::count() * S::EACH, S::K, S::PART,
                   S::PARTS / S::EACH, S::EACH};
    }
};
template <class S> DEVICE constexpr int part_sums() { return S::SPLIT ? S::MOST * S::PARTS : 1; }
constexpr int PART_SUMS = larger(larger(part_sums<Qkv>(), part_sums<Output>()),
                                 larger(larger(part_sums<GateUp>(), part_sums<Down>()),
                                        part_sums<Head>()));
struct Fixed {
    alignas(128) float4 x[2][half_stride(HIDDEN)];  // the input of phases 1, 4 and the head
    union {
        alignas(128) float4 attended[2][half_stride(QUERY_SIZE)];  // of phase 3
        alignas(128) float4 inner[2][half_stride(INNER)];          // of phase 5
    };
    float4 qkv[3][HEAD_SIZE / 4];             // a head's query; key and value of the new position
    float mix[WARPS_][HEAD_SIZE + 2];
    float2 residual[Output::MOST];            // of the block's own rows
    float2 turn[Qkv::MOST];                   // cosine and sine of the block's own pairs
    u64 keys[WARPS_];
    float squares[WARPS_];
    Job jobs[5];
    float4 norm[HIDDEN / 4];                  // of the next phase that norms
    uint4 kv[STEPS][2][TEAM];                 // keys and values of a tile, each thread's own
    float2 parts[PART_SUMS];                  // sums of units, where a pair has several
};
constexpr int SLOTS = smaller((PERSISTENT_SHARED - static_cast<int>(sizeof(Fixed)) - 256) / WARPS_ /
                                  (SLOT_BYTES + 16),
                              31);
static_assert(SLOTS >= 2, "shared memory");
static_assert(PERSISTENT_SHARED >= static_cast<int>(sizeof(Workbench)), "sampling");
struct Shared {
    Fixed fixed;
    alignas(128) unsigned char ring[WARPS_][SLOTS][SLOT_BYTES];
    Counted full[WARPS_][SLOTS], empty[WARPS_][SLOTS];
};
static_assert(sizeof(Shared) <= PERSISTENT_SHARED, "shared memory");

DEVICE void sync_team() { sync_threads_of(1, TEAM); }

// Into which job a pair falls that is counted from the first of job `next.x`.
DEVICE void find_next(const Fixed& fixed, int4& next, int end) {
    while (next.x < end && next.y >= fixed.jobs[next.x].units) {
        next.y -= fixed.jobs[next.x].units;
        if (++next.x == 4 && next.w + 1 < LAYERS) next.x = 0, next.w++;
    }
}

// Copies a part of a pair into a slot of the warp's ring, by one lane, once all of the warp are through
// with what was there; and moves on.  `next`: job, unit, part of the unit, layer.
DEVICE void feed(Shared& shared, int warp, int slot, int4& next, int end, u64 policy) {
    if (next.x >= end) return;
    const Job& job = shared.fixed.jobs[next.x];
    int pair = next.y, part = next.z;
    if (job.each > 1) pair = next.y / job.each, part = next.y % job.each;
    pair += job.first;
    const u32 bytes = 2 * smaller(job.part, job.k - part * job.part);
    long long row = pair, other = job.other;
    if (next.x == 0) row += pair / (HEAD_SIZE / 2) * (HEAD_SIZE / 2);
    if (next.x != 0 && next.x != 2) row *= 2;
    if (VOCAB % 2 && next.x == 4 && pair == Head::Product::PAIRS - 1) other = 0;
    const bf16* const from = job.weight + next.w * job.layer + row * job.k + part * job.part;
    Counted* const full = &shared.full[warp][slot];
    unsigned char* const to = shared.ring[warp][slot];
    counted_expect(full, 2 * bytes);
    bulk_copy(to, from, bytes, full, policy);
    bulk_copy(to + bytes, from + other, bytes, full, policy);
    if (++next.z == job.parts) {
        next.z = 0;
        next.y += WARPS_;
        find_next(shared.fixed, next, end);
    }
}

// One warp of the block: a lane fills the ring of each other warp, as long as there is something.  No
// more than UNDER_WAY slots of a ring are on their way at once: that is enough to draw the memory's
// full rate, and what all blocks ask for beyond that only queues up, with everything that they hand
// to each other waiting behind it.
DEVICE void feed_all(Shared& shared, int lane, int end) {
    const u64 policy = streaming_policy();
    int4 next = make_int4(lane < WARPS_ ? 0 : end, lane, 0, 0);
    find_next(shared.fixed, next, end);
    int slot = 0, oldest = 0, under_way = 0;
    u32 parity = 1, oldest_parity = 0;  // of the round before, which at first finds all slots empty
    u32 turns = 0;
#pragma unroll 1
    while (__any_sync(0xffffffffu, next.x < end)) {
        if (under_way && counted_test(&shared.full[lane][oldest], oldest_parity)) {
            under_way--;
            if (++oldest == SLOTS) oldest = 0, oldest_parity ^= 1;
        }
        if (next.x < end && under_way < UNDER_WAY &&
            counted_test(&shared.empty[lane][slot], parity)) {
            feed(shared, lane, slot, next, end, policy);
            if (++slot == SLOTS) slot = 0, parity ^= 1;
            under_way++;
            turns = 0;
        }
        waiting(turns);
        __syncwarp();
    }
}

// ---------------------------------------------------------------------------- the computing team

DEVICE void dot8(float& even, float& odd, const uint4& w, const float4& a, const float4& b) {
    even = fmaf(low_half(w.x), a.x, even);
    odd = fmaf(high_half(w.x), a.y, odd);
    even = fmaf(low_half(w.y), a.z, even);
    odd = fmaf(high_half(w.y), a.w, odd);
    even = fmaf(low_half(w.z), b.x, even);
    odd = fmaf(high_half(w.z), b.y, odd);
    even = fmaf(low_half(w.w), b.z, even);
    odd = fmaf(high_half(w.w), b.w, odd);
}

// A thread's share of a vector of K floats: every TEAM-th group of four.
template <int K> struct Share {
    static constexpr int QUADS = K / 4, COUNT = ceil_div(QUADS, TEAM);
    float4 quads[COUNT];
    uint4 words[COUNT];
    int thread;

    template <class Visit> DEVICE void each(const Visit& visit) const {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const int quad = i * TEAM + thread;
            if ((i + 1) * TEAM <= QUADS || quad < QUADS) visit(i, quad);
        }
    }
    // From the exchange: asks a first time, with other work behind it.
    DEVICE void ask(const Exchange& exchange, int at) {
        if constexpr (COUNT <= 2)
            each([&](int i, int quad) { words[i] = peek(exchange.quad(at + 4 * quad)); });
    }
    // Until all is there.
    DEVICE void take(const Exchange& exchange, int at, u32 tag) {
        u32 turns = 0;
        while (true) {
            bool there = true;
            each([&](int i, int) { there &= is_of(words[i], tag); });
            if (there) break;
            waiting(turns);
            each([&](int i, int quad) { words[i] = peek(exchange.quad(at + 4 * quad)); });
        }
        __syncwarp();  // or what follows runs once for each group of lanes that left the loop
        each([&](int i, int) { quads[i] = untagged(words[i]); });
    }
    // A long vector, straight into shared memory.  It is asked for as a whole only when its last part
    // is there: asking again and again for all of it would be in the way of the weights.
    template <class I>
    DEVICE static void pass(const Exchange& exchange, int at, u32 tag, I& input, int thread) {
        u32 turns = 0;
        const uint4* const last = exchange.quad(at + 4 * ((COUNT - 2) * TEAM + thread));
        while (!is_of(peek(last), tag)) waiting(turns);
        __syncwarp();
#pragma unroll 1
        for (int quad = thread; quad < QUADS; quad += 2 * TEAM) {
            const bool both = quad + TEAM < QUADS;
            const uint4* const from = exchange.quad(at + 4 * quad);
            const uint4* const further = exchange.quad(at + 4 * (both ? quad + TEAM : quad));
            uint4 a = peek(from), b = peek(further);
            settle(a, from, tag);
            settle(b, further, tag);
            input[quad % 2][quad / 2] = untagged(a);
            if (both) input[(quad + TEAM) % 2][(quad + TEAM) / 2] = untagged(b);
        }
        sync_team();
    }
    // Into shared memory, for all; there is a barrier behind it.
    template <class I> DEVICE void spread(I& input) const {
        each([&](int i, int quad) { input[quad % 2][quad / 2] = quads[i]; });
        sync_team();
    }
    template <class I> DEVICE void spread_normed(I& input, Fixed& fixed) const {
        float square = 0.0f;
        copied();
        each([&](int i, int quad) {
            const float4 v = quads[i], n = fixed.norm[quad];
            square += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
            input[quad % 2][quad / 2] = make_float4(v.x * n.x, v.y * n.y, v.z * n.z, v.w * n.w);
        });
        __syncwarp();
        square = sum_lanes<32>(square);
        if (thread % 32 == 0) fixed.squares[thread / 32] = square;
        sync_team();
    }
};

// A norm's weights, asked for long before they are used: each thread those that it will use.
DEVICE void ask_norm(Fixed& fixed, const float* from, int thread) {
#pragma unroll 1
    for (int quad = thread; quad < HIDDEN / 4; quad += TEAM)
        copy_ahead(fixed.norm + quad, reinterpret_cast<const float4*>(from) + quad);
}

// 1 / root mean square of the vector that was spread last; the order of the sum is fixed.
DEVICE float norm_scale(const Fixed& fixed, float epsilon) {
    // Warps without a part of a short vector are left out.
    constexpr int PARTS = smaller(WARPS_, ceil_div(HIDDEN / 4, 32));
    float even = fixed.squares[0], odd = 0.0f;
#pragma unroll
    for (int i = 1; i < PARTS; i++) (i % 2 ? odd : even) += fixed.squares[i];
    return rsqrtf((even + odd) * (1.0f / HIDDEN) + epsilon);
}

struct Team {
    Shared& shared;
    int thread;
    int unit;       // the warp's next, counted from the phase's first
    int slot = 0;   // of the warp's own ring
    u32 parity = 0;

    // Takes the next part of a pair out of the ring, and has its slot filled again.
    template <class S> DEVICE void load(uint4 (&w)[S::STEPS][2], int chunks) {
        const int warp = thread / 32, lane = thread % 32;
        const uint4* const one = reinterpret_cast<const uint4*>(shared.ring[warp][slot]) + lane;
        const uint4* const two = one + chunks;
        counted_wait(&shared.full[warp][slot], parity);
#pragma unroll
        for (int step = 0; step < S::STEPS; step++) {
            const bool there = S::filled(step) || step * 32 + lane < chunks;
            w[step][0] = there ? one[step * 32] : make_uint4(0, 0, 0, 0);
            w[step][1] = there ? two[step * 32] : make_uint4(0, 0, 0, 0);
        }
        next_slot(warp, lane);
    }
    template <class S> DEVICE static int chunks_of(int part) {
        return S::WHOLE ? S::PART / 8 : smaller(S::PART, S::K - part * S::PART) / 8;
    }
    // The warp's first part of a product, before its input is there.
    template <class S> DEVICE void preload(uint4 (&w)[S::STEPS][2]) {
        if (unit < S::count() * S::EACH) load<S>(w, chunks_of<S>(S::SPLIT ? unit % S::EACH : 0));
    }
    // The block's pairs of one product: finish(pair, place in the block, both sums), by whole warps.
    template <class S, class Finish>
    DEVICE void multiply(uint4 (&w)[S::STEPS][2], const float4 (*input)[S::STRIDE],
                         const Finish& finish) {
        const int warp = thread / 32, lane = thread % 32;
        const int first = S::first(), count = S::count();
        bool loaded = true;
#pragma unroll 1
        for (; unit < count * S::EACH; unit += WARPS_) {
            float sum[2][2] = {};
#pragma unroll 1
            for (int inner = 0; inner < S::PARTS / S::EACH; inner++) {
                const int part = S::SPLIT ? unit % S::EACH : inner, chunks = chunks_of<S>(part);
                if (!loaded) load<S>(w, chunks);
                loaded = false;
                const float4* const low = input[0] + part * (S::PART / 8) + lane;
                const float4* const high = input[1] + part * (S::PART / 8) + lane;
#pragma unroll
                for (int step = 0; step < S::STEPS; step++) {
                    if (S::filled(step) || step * 32 + lane < chunks) {
                        const float4 a = low[step * 32], b = high[step * 32];
                        dot8(sum[0][0], sum[0][1], w[step][0], a, b);
                        dot8(sum[1][0], sum[1][1], w[step][1], a, b);
                    }
                }
            }
            __syncwarp();
            const float a = sum_lanes<32>(sum[0][0] + sum[0][1]);
            const float b = sum_lanes<32>(sum[1][0] + sum[1][1]);
            if constexpr (S::SPLIT) {
                if (lane == 0) shared.fixed.parts[unit] = make_float2(a, b);
            } else {
                finish(first + unit, unit, a, b);
            }
        }
        unit -= count * S::EACH;
        if constexpr (S::SPLIT) {
            sync_team();
#pragma unroll 1
            for (int local = warp; local < count; local += WARPS_) {
                const float2* const parts = shared.fixed.parts + local * S::PARTS;
                float2 sum = parts[0];
#pragma unroll
                for (int i = 1; i < S::PARTS; i++) sum.x += parts[i].x, sum.y += parts[i].y;
                finish(first + local, local, sum.x, sum.y);
            }
        }
    }
    DEVICE void next_slot(int warp, int lane) {
        __syncwarp();
        if (lane == 0) counted_arrive(&shared.empty[warp][slot]);
        if (++slot == SLOTS) slot = 0, parity ^= 1;
    }
};

// -------------------------------------------------------------------------------- attention

#define MINUS_INFINITY __uint_as_float(0xff800000u)

// Factor for what was summed under `from` when the maximum is `to`; both may be minus infinity.
DEVICE float rescale(float from, float to) { return from == to ? 1.0f : exp2_fast(from - to); }

// How many blocks share the positions of a head.
DEVICE int splits_of(int length) {
    return smaller(ceil_div(length, PERSISTENT_POSITIONS), SPLITS);
}

struct Attention {
    int length, begin, end, split, head, kv_head, thread;
    uint4 k[STEPS], v[STEPS];

    DEVICE bool has_part() const { return split < SPLITS; }
    DEVICE bool works() const { return begin < end; }

    DEVICE explicit Attention(int length_) : length(length_) {
        split = static_cast<int>(blockIdx.x) / HEADS;
        head = static_cast<int>(blockIdx.x) % HEADS;
        kv_head = head / (HEADS / KV_HEADS);
        const int parts = splits_of(length), each = ceil_div(length, parts);
        begin = split < parts ? smaller(split * each, length) : length;
        end = split < parts ? smaller(begin + each, length) : length;
    }
    DEVICE int line() const { return thread % 32 / LANES; }
    DEVICE int sub() const { return thread % 32 % LANES; }
    DEVICE int position_of(int start, int step) const {
        return start + (step * WARPS_ + thread / 32) * LINES + line();
    }
    // Asks for the positions of a tile that earlier steps wrote.
    DEVICE void ask(Fixed& fixed, const bf16* keys, const bf16* values, int start) const {
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            const int p = position_of(start, step);
            if (p < smaller(end, length - 1) && sub() < CHUNKS) {
                const long long at = static_cast<long long>(p) * HEAD_SIZE + sub() * 8;
                copy_ahead(&fixed.kv[step][0][thread], keys + at);
                copy_ahead(&fixed.kv[step][1][thread], values + at);
            }
        }
    }
    DEVICE void load(const Fixed& fixed, int start) {
        copied();
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            const int p = position_of(start, step);
            k[step] = v[step] = make_uint4(0, 0, 0, 0);
            if (p < smaller(end, length - 1) && sub() < CHUNKS) {
                k[step] = fixed.kv[step][0][thread];
                v[step] = fixed.kv[step][1][thread];
            }
            if (p == length - 1 && length == end && sub() < CHUNKS) {
                k[step] = rounded(fixed.qkv[1] + sub() * 2);
                v[step] = rounded(fixed.qkv[2] + sub() * 2);
            }
        }
    }
    DEVICE static uint4 rounded(const float4* quads) {
        const float4 a = quads[0], b = quads[1];
        return make_uint4(pack_bf16(a.x, a.y), pack_bf16(a.z, a.w), pack_bf16(b.x, b.y),
                          pack_bf16(b.z, b.w));
    }
    DEVICE void run(Fixed& fixed, const Exchange& exchange, const bf16* keys, const bf16* values,
                    u32 tag, float factor);
};

// The first tile was asked for.  Hands on the block's part, also one that is empty: tags must turn.
DEVICE void Attention::run(Fixed& fixed, const Exchange& exchange, const bf16* keys,
                           const bf16* values, u32 tag, float factor) {
    const int warp = thread / 32, lane = thread % 32;
    float maximum = MINUS_INFINITY, sum = 0.0f, mix[8] = {};
    const int busy = smaller(WARPS_, ceil_div(end - begin, LINES));  // warps with positions
    if (works()) {
        // The query, and with the newest position its key and value: four floats a thread.
        const int kind = thread / (HEAD_SIZE / 4), quad = thread % (HEAD_SIZE / 4);
        if (kind < (length == end ? 3 : 1)) {
            const int at = kind ? HEADS + kv_head + (kind - 1) * KV_HEADS : head;
            const uint4* const from = exchange.quad(AT_QKV + at * HEAD_SIZE + 4 * quad);
            uint4 words = peek(from);
            settle(words, from, tag);
            fixed.qkv[kind][quad] = untagged(words);
        }
        __syncwarp();
        sync_team();
    }
    if (warp < busy) {
        float query[8] = {};
        if (sub() < CHUNKS) {
            const float4 a = fixed.qkv[0][sub() * 2], b = fixed.qkv[0][sub() * 2 + 1];
            query[0] = a.x * factor, query[1] = a.y * factor;
            query[2] = a.z * factor, query[3] = a.w * factor;
            query[4] = b.x * factor, query[5] = b.y * factor;
            query[6] = b.z * factor, query[7] = b.w * factor;
        }
#pragma unroll 1
        for (int start = begin; start < end; start += TILE) {
            load(fixed, start);
            if (start + TILE < end) ask(fixed, keys, values, start + TILE);
            __syncwarp();
            float score[STEPS], above = maximum;
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
                float dot = query[0] * low_half(k[step].x);
                dot = fmaf(query[1], high_half(k[step].x), dot);
                dot = fmaf(query[2], low_half(k[step].y), dot);
                dot = fmaf(query[3], high_half(k[step].y), dot);
                dot = fmaf(query[4], low_half(k[step].z), dot);
                dot = fmaf(query[5], high_half(k[step].z), dot);
                dot = fmaf(query[6], low_half(k[step].w), dot);
                dot = fmaf(query[7], high_half(k[step].w), dot);
                dot = sum_lanes<LANES>(dot);
                score[step] = position_of(start, step) < end ? dot : MINUS_INFINITY;
                above = fmaxf(above, score[step]);
            }
            const float before = rescale(maximum, above);
            maximum = above;
            sum *= before;
#pragma unroll
            for (int d = 0; d < 8; d++) mix[d] *= before;
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
                const float weight =
                    score[step] == MINUS_INFINITY ? 0.0f : exp2_fast(score[step] - above);
                sum += weight;
                mix[0] = fmaf(weight, low_half(v[step].x), mix[0]);
                mix[1] = fmaf(weight, high_half(v[step].x), mix[1]);
                mix[2] = fmaf(weight, low_half(v[step].y), mix[2]);
                mix[3] = fmaf(weight, high_half(v[step].y), mix[3]);
                mix[4] = fmaf(weight, low_half(v[step].z), mix[4]);
                mix[5] = fmaf(weight, high_half(v[step].z), mix[5]);
                mix[6] = fmaf(weight, low_half(v[step].w), mix[6]);
                mix[7] = fmaf(weight, high_half(v[step].w), mix[7]);
            }
        }
        __syncwarp();
        // Over the lines of the warp.
        float above = maximum;
#pragma unroll
        for (int mask = 16; mask >= LANES; mask /= 2) above = fmaxf(above, ::exchange(above, mask));
        const float own = rescale(maximum, above);
        sum *= own;
#pragma unroll
        for (int mask = 16; mask >= LANES; mask /= 2) sum += ::exchange(sum, mask);
#pragma unroll
        for (int d = 0; d < 8; d++) {
            mix[d] *= own;
#pragma unroll
            for (int mask = 16; mask >= LANES; mask /= 2) mix[d] += ::exchange(mix[d], mask);
            if (line() == 0 && sub() < CHUNKS) fixed.mix[warp][2 + sub() * 8 + d] = mix[d];
        }
        if (lane == 0) {
            fixed.mix[warp][0] = above;
            fixed.mix[warp][1] = sum;
        }
    }
    if (works()) sync_team();
    // Over the warps; a thread a value.
#pragma unroll 1
    for (int item = thread; item < HEAD_SIZE; item += TEAM) {
        float above = MINUS_INFINITY, all = 0.0f, value = 0.0f;
#pragma unroll 1
        for (int i = 0; i < busy; i++) above = fmaxf(above, fixed.mix[i][0]);
        above = untagged(__float_as_uint(above));  // as it will be read
#pragma unroll 4
        for (int i = 0; i < busy; i++) {
            const float own = rescale(fixed.mix[i][0], above);
            all = fmaf(own, fixed.mix[i][1], all);
            value = fmaf(own, fixed.mix[i][2 + item], value);
        }
        exchange.put_all(AT_MIX + split * QUERY_SIZE + head * HEAD_SIZE + item, value, tag);
        if (item < 2)
            exchange.put_all(AT_WEIGHT + (split * HEADS + head) * 2 + item, item ? all : above, tag);
    }
}

// What phase 3 multiplies with: the splits of each head, merged in their order.
DEVICE void take_attended(Share<QUERY_SIZE>& share, const Exchange& exchange, int splits, u32 tag) {
    if (splits == 1) {
        constexpr int COUNT = Share<QUERY_SIZE>::COUNT;
        uint4 mix[COUNT];
        uint2 weight[COUNT];
        u32 turns = 0;
        while (true) {
            bool there = true;
            share.each([&](int i, int quad) {
                mix[i] = peek(exchange.quad(AT_MIX + 4 * quad));
                weight[i] = peek(exchange.two(AT_WEIGHT + quad / (HEAD_SIZE / 4) * 2));
            });
            share.each([&](int i, int) { there &= is_of(mix[i], tag) && is_of(weight[i], tag); });
            if (there) break;
            waiting(turns);
        }
        __syncwarp();
        share.each([&](int i, int) {
            const float4 v = untagged(mix[i]);
            const float scale = fast_divide(1.0f, untagged(weight[i].y));
            share.quads[i] = make_float4(v.x * scale, v.y * scale, v.z * scale, v.w * scale);
        });
        return;
    }
    constexpr int AT_ONCE = SPLITS < 4 ? SPLITS : 4;
    share.each([&](int i, int quad) {
        const int head = quad / (HEAD_SIZE / 4);
        float maximum = MINUS_INFINITY, sum = 0.0f;
        float4 value = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
        for (int start = 0; start < splits; start += AT_ONCE) {
            uint4 mix[AT_ONCE];
            uint2 weight[AT_ONCE];
            u32 turns = 0;
            while (true) {
                bool there = true;
#pragma unroll
                for (int s = 0; s < AT_ONCE; s++) {
                    const int split = start + s;
                    mix[s] = make_uint4(tag, tag, tag, tag);
                    weight[s] = make_uint2(tag, tag);
                    if (split >= splits) continue;
                    mix[s] = peek(exchange.quad(AT_MIX + split * QUERY_SIZE + 4 * quad));
                    weight[s] = peek(exchange.two(AT_WEIGHT + (split * HEADS + head) * 2));
                }
#pragma unroll
                for (int s = 0; s < AT_ONCE; s++) there &= is_of(mix[s], tag) && is_of(weight[s], tag);
                if (there) break;
                waiting(turns);
            }
#pragma unroll
            for (int s = 0; s < AT_ONCE; s++) {
                const float one = start + s < splits ? untagged(weight[s].x) : MINUS_INFINITY;
                const float next = fmaxf(maximum, one);
                const float before = rescale(maximum, next);
                const float own = one == MINUS_INFINITY ? 0.0f : rescale(one, next);
                const float4 added = untagged(mix[s]);
                sum = fmaf(sum, before, untagged(weight[s].y) * own);
                value.x = fmaf(value.x, before, added.x * own);
                value.y = fmaf(value.y, before, added.y * own);
                value.z = fmaf(value.z, before, added.z * own);
                value.w = fmaf(value.w, before, added.w * own);
                maximum = next;
            }
        }
        const float scale = fast_divide(1.0f, sum);
        share.quads[i] = make_float4(value.x * scale, value.y * scale, value.z * scale, value.w * scale);
    });
}

// ------------------------------------------------------------------------------------ the end

// A key as four tagged words.
DEVICE void put_key(u32* words, u64 key, u32 tag) {
    publish(words, static_cast<u32>(key >> 33) << 1 | tag,
            (static_cast<u32>(key >> 2) << 1) | tag);
    publish(words + 2, (static_cast<u32>(key) & 3) << 1 | tag, tag);
}
DEVICE u64 take_key(const u32* words, u32 tag) {
    const uint4* const from = reinterpret_cast<const uint4*>(words);
    uint4 v = peek(from);
    settle(v, from, tag);
    return static_cast<u64>(v.x >> 1) << 33 | static_cast<u64>(v.y >> 1) << 2 | v.z >> 1;
}

DEVICE u64 largest_of_team(Fixed& fixed, u64 key) {
    key = largest_of_warp(key);
    if (threadIdx.x % 32 == 0) fixed.keys[threadIdx.x / 32] = key;
    sync_team();
    key = fixed.keys[0];
    for (int i = 1; i < WARPS_; i++) key = largest(key, fixed.keys[i]);
    return key;
}

#ifdef PERSISTENT_PROFILE
#define STAMP(index)                                                                              \
    if (threadIdx.x == 0)                                                                         \
    reinterpret_cast<long long*>(exchange_words + EXCHANGE)[blockIdx.x * PERSISTENT_PROFILE +     \
                                                           (index)] = now()
#else
#define STAMP(index)
#endif

KERNEL __launch_bounds__(ALL, 1)
    decode_step(const int* rows, int* state, int* live, const bf16* table, const float* attn_norm,
                const bf16* wqkv, const bf16* wo, const float* mlp_norm, const bf16* w_gate_up,
                const bf16* w_down, const float* final_norm, const bf16* head, const float* rope,
                bf16* cache, float* x, float* logits, const Options* options, const int* stops,
                int* chosen, int2* ring, u32* exchange_words, u32 slots, u32 context,
                u32 stop_count, u32 ring_size, float epsilon, float scale) {
    DYNAMIC_SHARED(memory);
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    Fixed& fixed = shared.fixed;
    int thread = threadIdx.x;
    const int warp = thread / 32, lane = thread % 32;
    const bool leads = blockIdx.x == 0 && thread == 0;
    STAMP(0);

    // The row, by the rules of `embed`.
    Row row = load_row(rows, 0);
    const u32 steps_before = static_cast<u32>(load_fresh(reinterpret_cast<const int*>(exchange_words)));
    for (int i = thread; i < WARPS_ * SLOTS; i += ALL) {
        counted_init(&shared.full[0][0] + i, 1);
        counted_init(&shared.empty[0][0] + i, 1);
    }
    counted_ready();
    if (thread == 0) {
        fixed.jobs[0] = Job::of<Qkv>(wqkv, QKV_SIZE * HIDDEN, HEAD_SIZE / 2);
        fixed.jobs[1] = Job::of<Output>(wo, HIDDEN * QUERY_SIZE, 1);
        fixed.jobs[2] = Job::of<GateUp>(w_gate_up, 2ll * INNER * HIDDEN, INNER);
        fixed.jobs[3] = Job::of<Down>(w_down, 1ll * INNER * HIDDEN, 1);
        fixed.jobs[4] = Job::of<Head>(head, 0, 1);
    }
    if (static_cast<u32>(row.slot) >= slots) {
        row.flags &= ~ACTIVE;
    } else if (row.flags & FROM_STATE) {
        const Row at = load_row(state, row.slot);  // token, position, length, stopped
        row.token = at.token;
        row.position = at.position;
        if (at.flags) row.flags &= ~ACTIVE;
    }
    if (static_cast<u32>(row.token) >= VOCAB || static_cast<u32>(row.position) >= context)
        row.flags &= ~ACTIVE;
    if (leads) *reinterpret_cast<Row*>(live) = row;
    if (!(row.flags & ACTIVE)) return;
    const bool sampled = row.flags & SAMPLE;
    sync_threads_of(0, ALL);
    if (warp == WARPS_) {
        feed_all(shared, lane, sampled ? 5 : 4);
        return;
    }
    Team team{shared, thread, warp};
    // The turn of what layer l hands on is the number of layers that ever ran before it, and one.
    const u32 turn = steps_before * static_cast<u32>(LAYERS) + 1;
    const Exchange exchange{exchange_words};
    const float factor = scale * 1.44269504f;  // so that exponentials are powers of two
    const double temperature = options[row.slot].temperature;
    Attention attention(row.position + 1);
    const int splits = splits_of(row.position + 1);

    Share<HIDDEN> vector;
    vector.thread = thread;
    ask_norm(fixed, attn_norm, thread);
    const bf16* const embedded = table + static_cast<long long>(row.token) * HIDDEN;
    vector.each([&](int i, int quad) {
        const u32* const from = reinterpret_cast<const u32*>(embedded) + 2 * quad;
        const u32 a = __ldg(from), b = __ldg(from + 1);
        vector.quads[i] = make_float4(low_half(a), high_half(a), low_half(b), high_half(b));
    });
    for (int i = thread; i < Output::count(); i += TEAM) {
        const u32 both = __ldg(reinterpret_cast<const u32*>(embedded) + Output::first() + i);
        fixed.residual[i] = make_float2(low_half(both), high_half(both));
    }
    for (int i = thread; i < Qkv::count(); i += TEAM) {
        const int pair = Qkv::first() + i;
        const float* const at =
            rope + static_cast<long long>(row.position) * HEAD_SIZE + pair % (HEAD_SIZE / 2);
        fixed.turn[i] = pair < (HEADS + KV_HEADS) * (HEAD_SIZE / 2)
                            ? make_float2(__ldg(at), __ldg(at + HEAD_SIZE / 2))
                            : make_float2(1.0f, 0.0f);
    }

    const long long part_of_cache = static_cast<long long>(slots) * KV_HEADS * context * HEAD_SIZE;
    const long long line = static_cast<long long>(row.slot) * KV_HEADS;
    STAMP(1);
    u32* words = exchange_words;
#pragma unroll 1
    for (int layer = 0; layer < LAYERS; layer++) {
        // Or all addresses are worked out before the loop, and registers run out.
        opaque(words);
        opaque(thread);
        const int lane = thread % 32;
        vector.thread = team.thread = attention.thread = thread;
        const Exchange exchange{words};
        const u32 tag = (turn + layer) & 1;
        bf16* const keys = cache + layer * 2 * part_of_cache;
        bf16* const values = keys + part_of_cache;
        const long long own_line = (line + attention.kv_head) * context * HEAD_SIZE;
        // 1.
        {
        uint4 w[Qkv::STEPS][2];
        if (layer) vector.ask(exchange, AT_X);
        team.preload<Qkv>(w);
        if (layer) vector.take(exchange, AT_X, tag ^ 1);
        STAMP(2 + layer * 10);
        vector.spread_normed(fixed.x, fixed);
        if (attention.has_part() && attention.works())
            attention.ask(fixed, keys + own_line, values + own_line, attention.begin);
        {
            const float rms = norm_scale(fixed, epsilon);
            team.multiply<Qkv>(w, fixed.x, [&](int pair, int local, float a, float b) {
                constexpr int HALF = HEAD_SIZE / 2;
                const float2 by = fixed.turn[local];
                const int head_index = pair / HALF, at = QkvProduct::weight_row(pair, 0);
                a *= rms, b *= rms;
                float left = a * by.x - b * by.y, right = b * by.x + a * by.y;
                if (head_index >= HEADS) {  // as the cache will hold it
                    const bf16 l = to_bf16(left), r = to_bf16(right);
                    left = low_half(l), right = low_half(r);
                    const int kv = head_index - HEADS;
                    bf16* const to = (kv < KV_HEADS ? keys : values) +
                                     ((line + kv % KV_HEADS) * context + row.position) * HEAD_SIZE +
                                     pair % HALF;
                    if (lane == 0) to[0] = l;
                    if (lane == 0) to[HALF] = r;
                }
                exchange.put(lane, AT_QKV + at, left, tag);
                exchange.put(lane, AT_QKV + at + HALF, right, tag);
            });
        }
        }
        STAMP(3 + layer * 10);

        // 2.
        if (attention.has_part())
            attention.run(fixed, exchange, keys + own_line, values + own_line, tag, factor);
        STAMP(4 + layer * 10);

        // 3.
        ask_norm(fixed, mlp_norm + layer * HIDDEN, thread);
        {
        Share<QUERY_SIZE> attended;
        attended.thread = thread;
        uint4 w[Output::STEPS][2];
        team.preload<Output>(w);
        take_attended(attended, exchange, splits, tag);
        STAMP(5 + layer * 10);
        attended.spread(fixed.attended);
        team.multiply<Output>(w, fixed.attended, [&](int pair, int local, float a, float b) {
            const float2 before = fixed.residual[local];
            a += before.x, b += before.y;
            exchange.put(lane, AT_MIDDLE + 2 * pair, a, b, tag);
            __syncwarp();
            if (lane == 0) fixed.residual[local] = make_float2(a, b);
        });
        }
        STAMP(6 + layer * 10);

        // 4.
        {
        uint4 w[GateUp::STEPS][2];
        vector.ask(exchange, AT_MIDDLE);
        team.preload<GateUp>(w);
        vector.take(exchange, AT_MIDDLE, tag);
        STAMP(7 + layer * 10);
        vector.spread_normed(fixed.x, fixed);
        {
            const float rms = norm_scale(fixed, epsilon);
            team.multiply<GateUp>(w, fixed.x, [&](int pair, int, float a, float b) {
                exchange.put(lane, AT_INNER + pair, fast_divide(a * rms, 1.0f + exp2_fast(-1.44269504f * rms * a)) * (b * rms), tag);
            });
        }
        }
        STAMP(8 + layer * 10);

        // 5.
        ask_norm(fixed, layer + 1 < LAYERS ? attn_norm + (layer + 1) * HIDDEN : final_norm, thread);
        {
        uint4 w[Down::STEPS][2];
        Share<INNER> inner;
        inner.thread = thread;
        constexpr bool SHORT = Share<INNER>::COUNT <= 2;
        if constexpr (SHORT) inner.ask(exchange, AT_INNER);
        team.preload<Down>(w);
        if constexpr (SHORT) inner.take(exchange, AT_INNER, tag);
        STAMP(9 + layer * 10);
        if constexpr (SHORT) inner.spread(fixed.inner);
        else Share<INNER>::pass(exchange, AT_INNER, tag, fixed.inner, thread);
        team.multiply<Down>(w, fixed.inner, [&](int pair, int local, float a, float b) {
            const float2 before = fixed.residual[local];
            a += before.x, b += before.y;
            exchange.put(lane, AT_X + 2 * pair, a, b, tag);
            __syncwarp();
            if (lane == 0) fixed.residual[local] = make_float2(a, b);
            if (lane == 0 && layer + 1 == LAYERS) reinterpret_cast<float2*>(x)[pair] = make_float2(a, b);
        });
        }
        STAMP(10 + layer * 10);
    }

    // The head, and the block's best.  Keys go to block 0 also when there is none: tags must turn.
    u64 best = 0;
    if (sampled) {
        uint4 w[Head::STEPS][2];
        vector.ask(exchange, AT_X);
        team.preload<Head>(w);
        vector.take(exchange, AT_X, (turn + LAYERS - 1) & 1);
        STAMP(2 + LAYERS * 10);
        vector.spread_normed(fixed.x, fixed);
        const float rms = norm_scale(fixed, epsilon);
        float* const own_logits = logits + static_cast<long long>(row.slot) * VOCAB;
        team.multiply<Head>(w, fixed.x, [&](int pair, int, float a, float b) {
            a *= rms, b *= rms;
            best = largest(best, logit_key(a, 2 * pair));
            if (2 * pair + 1 < VOCAB) best = largest(best, logit_key(b, 2 * pair + 1));
            if (lane == 0) own_logits[2 * pair] = a;
            if (lane == 1 && 2 * pair + 1 < VOCAB) own_logits[2 * pair + 1] = b;
        });
        best = largest_of_team(fixed, best);
    }
    STAMP(3 + LAYERS * 10);
    const u32 tag = (steps_before + 1) & 1;
    if (thread == 0) {
        if (temperature != 0.0) __threadfence();  // the logits, for who sees the key
        put_key(exchange_words + AT_KEYS + 4 * blockIdx.x, best, tag);
    }
    if (blockIdx.x) return;

    // Block 0: the next token.
    best = 0;
    for (int block = thread; block < GRID; block += TEAM)
        best = largest(best, take_key(exchange_words + AT_KEYS + 4 * block, tag));
    sync_team();  // before the keys are written anew
    best = largest_of_team(fixed, best);
    STAMP(4 + LAYERS * 10);
    if (leads) publish(exchange_words, steps_before + 1);  // all blocks have read it
    if (!sampled) return;
    if (temperature != 0.0) {
        __threadfence();
        sync_team();
    }
    if (thread >= SAMPLE_THREADS) return;
    const int token =
        sample_row(*reinterpret_cast<Workbench*>(memory), row, logits, options, best);
    if (leads) {
        chosen[0] = token;
        advance_slot(row, token, options, stops, state, ring, stop_count, context, ring_size);
    }
    STAMP(5 + LAYERS * 10);
}
