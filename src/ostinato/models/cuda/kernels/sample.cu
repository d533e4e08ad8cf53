// Chooses the next token of each row that samples, and writes its sequence's new state; a block for each
// row.  `sampling.sample` is the reference.
//
// Greedy: the token of the largest key that the blocks of `head` left in the workspace; logits are not
// read.  1,000 to 8,000 keys come from L2 in one or a few rounds of 0.4 us.
//
// Otherwise tokens are ordered by logit, largest first, and by index, lowest first.  Three tokens are needed
// in this order: the last of the top_k tokens, the one that reaches top_p of their mass, and the one that
// reaches a drawn mass.  Each is the first token at which the running sum of weights (1 for top_k) reaches a
// target, and is found without sorting the vocabulary:
//   1. a scan of the logits sums the weights into bins of equal width of the scaled logit;
//   2. the bin with the target is found, and a second scan lists its tokens (mostly a few hundred);
//   3. the token in the list is found digit by digit of its 53-bit key (logit, then index).
// If the bin has more tokens than the list holds, step 3 scans all logits instead.
//
// min_p needs no search: it is a lower limit of the scaled logit.
//
// With a repetition penalty the logits are copied, and those of the sequence's tokens are changed in the
// copy, computed from the model's own logits: a token that is in the history twice is penalised once.  All
// else, including greedy, uses the copy then.
//
// Weights are integers, exp(scaled) * 2^SHIFT rounded: sums do not depend on the order of atomics, so a draw
// gives the same token every time.  The reference sums float32 ratios in float64; the sums differ by some
// 1e-7 of the mass, and tokens differ only if a draw is that close to a boundary.
//
// Physics: one multiprocessor reads 513 KB of logits (128,256 tokens) in about 6 us a scan.
#include "sampled.cuh"

constexpr int THREADS = SAMPLE_THREADS, WARPS = THREADS / 32;
constexpr int BINS = 2048, LISTED = 3072;
constexpr float BIN_WIDTH = 1.0f / 64;  // in scaled logits; the last bin has all below -32
constexpr int INDEX_BITS = 21;          // a vocabulary has at most 2^21 tokens (config)
DEVICE constexpr int bits_of(int n) { return n <= 1 ? 0 : 1 + bits_of((n + 1) / 2); }
constexpr int SHIFT = 62 - bits_of(VOCAB);  // so that the sum of all weights fits
static_assert(VOCAB <= 1 << INDEX_BITS && BINS % THREADS == 0, "vocabulary");

// A token's place in the order; a larger place is earlier.
typedef u64 Place;
DEVICE Place place_of(float scaled, int index) {
    return static_cast<u64>(ordered(scaled)) << INDEX_BITS | ((1 << INDEX_BITS) - 1 - index);
}
DEVICE int index_of(Place place) {
    return (1 << INDEX_BITS) - 1 - static_cast<int>(place & ((1 << INDEX_BITS) - 1));
}
DEVICE float scaled_of(Place place) { return from_ordered(static_cast<u32>(place >> INDEX_BITS)); }
DEVICE int bin_of(float scaled) {
    return static_cast<int>(fminf(scaled * (-1.0f / BIN_WIDTH), BINS - 1.0f));  // scaled <= 0
}
DEVICE u64 weight_of(float scaled) {
    return __float2ull_rn(expf(scaled) * static_cast<float>(1ull << SHIFT));
}

// Returns the upper 24 bits of Philox4x32-10's first word: `sampling.uniform` times 2^24.
DEVICE u32 draw(u64 seed, u32 position) {
    u32 c0 = position, c1 = 0, c2 = 0, c3 = 0;
    u32 k0 = static_cast<u32>(seed), k1 = static_cast<u32>(seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; round++) {
        const u64 p0 = static_cast<u64>(0xD2511F53u) * c0, p1 = static_cast<u64>(0xCD9E8D57u) * c2;
        c0 = static_cast<u32>(p1 >> 32) ^ c1 ^ k0;
        c1 = static_cast<u32>(p1);
        c2 = static_cast<u32>(p0 >> 32) ^ c3 ^ k1;
        c3 = static_cast<u32>(p0);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return c0 >> 8;
}

struct Workbench {
    u64 sums[BINS];
    u64 warps[WARPS];
    Place list[LISTED];
    int listed;
    int found;    // the bin or digit in which the target lies
    u64 before;   // the sum of all bins before `found`
    u64 total;    // the sum of all bins
};

// The tokens of one row: their logits, and the prefix of the order that may be chosen.
struct Tokens {
    const float* logits;
    float largest, temperature;
    Place last;  // tokens after this place are left out

    DEVICE float scaled(float logit) const {
        // With a temperature that is 0 in float32 the largest would be 0 / 0.
        return logit == largest ? 0.0f : __fdiv_rn(logit - largest, temperature);
    }

    // Calls visit(scaled logit, index) for every token, in any order.
    template <class Visit> DEVICE void scan(const Visit& visit) const {
        constexpr int WIDTH = VOCAB % 4 == 0 ? 4 : 1, UNROLL = 2;
        constexpr int VECTORS = VOCAB / WIDTH;
        for (int start = threadIdx.x; start < VECTORS; start += UNROLL * THREADS) {
            float values[UNROLL][WIDTH];
#pragma unroll
            for (int i = 0; i < UNROLL; i++) {
                const int at = start + i * THREADS;
                if (at >= VECTORS) continue;
                if constexpr (WIDTH == 4) {
                    const float4 v = load_fresh(reinterpret_cast<const float4*>(logits) + at);
                    values[i][0] = v.x, values[i][1] = v.y, values[i][2] = v.z, values[i][3] = v.w;
                } else {
                    values[i][0] = load_fresh(logits + at);
                }
            }
#pragma unroll
            for (int i = 0; i < UNROLL; i++) {
                const int at = start + i * THREADS;
                if (at >= VECTORS) continue;
#pragma unroll
                for (int j = 0; j < WIDTH; j++) visit(scaled(values[i][j]), at * WIDTH + j);
            }
        }
    }
};

// Finds the bin in which the running sum reaches `target` (1 or more), and the sum before that bin.
DEVICE void find_bin(Workbench& bench, u64 target) {
    constexpr int EACH = BINS / THREADS;
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    __syncthreads();
    u64 own = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) own += bench.sums[thread * EACH + i];
    u64 sum = own;  // running sum within the warp, including this thread's bins
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const u64 other = __shfl_up_sync(0xffffffffu, sum, distance);
        if (lane >= distance) sum += other;
    }
    if (lane == 31) bench.warps[warp] = sum;
    __syncthreads();
    u64 before = sum - own, total = 0;
    for (int i = 0; i < WARPS; i++) {
        if (i < warp) before += bench.warps[i];
        total += bench.warps[i];
    }
    if (thread == 0) bench.total = total;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const u64 here = bench.sums[thread * EACH + i];
        if (before < target && target <= before + here) {
            bench.found = thread * EACH + i;
            bench.before = before;
        }
        before += here;
    }
    __syncthreads();
}

DEVICE void clear_bins(Workbench& bench) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < BINS / THREADS; i++) bench.sums[i * THREADS + threadIdx.x] = 0;
    __syncthreads();
}

// Sums the weights (COUNTED: ones) of the tokens up to `tokens.last` into bins of their scaled logit.
template <bool COUNTED> DEVICE void fill_bins(Workbench& bench, const Tokens& tokens) {
    clear_bins(bench);
    tokens.scan([&](float scaled, int index) {
        if (place_of(scaled, index) < tokens.last) return;
        const u64 weight = COUNTED ? 1 : weight_of(scaled);
        if (weight) atomicAdd(&bench.sums[bin_of(scaled)], weight);
    });
}

// Returns the first token at which the running sum reaches `target`.  The bins must be filled.
template <bool COUNTED>
DEVICE Place find_token(Workbench& bench, const Tokens& tokens, u64 target) {
    const int thread = threadIdx.x;
    find_bin(bench, target);
    const int bin = bench.found;
    target -= bench.before;
    if (thread == 0) bench.listed = 0;
    __syncthreads();
    tokens.scan([&](float scaled, int index) {
        const Place place = place_of(scaled, index);
        if (bin_of(scaled) != bin || place < tokens.last) return;
        const int at = atomicAdd(&bench.listed, 1);
        if (at < LISTED) bench.list[at] = place;
    });
    __syncthreads();
    const int listed = bench.listed;
    const bool complete = listed <= LISTED;
    // Digits of a place, largest first: 11, 11 and 10 bits of the logit, 11 and 10 of the index.
    Place prefix = 0;
    int above = 32 + INDEX_BITS;  // number of bits not found yet
#pragma unroll 1
    for (int round = 0; round < 5; round++) {
        const int digit_bits = round == 2 || round == 4 ? 10 : 11, shift = above - digit_bits;
        const int highest = (1 << digit_bits) - 1;
        clear_bins(bench);
        auto add = [&](Place place, float scaled) {
            if (place >> above != prefix) return;
            const u64 weight = COUNTED ? 1 : weight_of(scaled);
            const int digit = static_cast<int>(place >> shift) & highest;
            if (weight) atomicAdd(&bench.sums[highest - digit], weight);
        };
        if (complete) {
            for (int i = thread; i < listed; i += THREADS)
                add(bench.list[i], scaled_of(bench.list[i]));
        } else {
#pragma unroll 1
            for (int index = thread; index < VOCAB; index += THREADS) {
                const float scaled = tokens.scaled(load_fresh(tokens.logits + index));
                const Place place = place_of(scaled, index);
                if (bin_of(scaled) == bin && place >= tokens.last) add(place, scaled);
            }
        }
        find_bin(bench, target);
        target -= bench.before;
        prefix = prefix << digit_bits | static_cast<u64>(highest - bench.found);
        above = shift;
    }
    return prefix;
}

DEVICE u64 largest_of_block(Workbench& bench, u64 key) {
    const int lane = threadIdx.x % 32;
    key = largest_of_warp(key);
    __syncthreads();
    if (lane == 0) bench.warps[threadIdx.x / 32] = key;
    __syncthreads();
    return largest_of_warp(lane < WARPS ? bench.warps[lane] : 0);
}

// Copies the logits to `adjusted`, those of `count` tokens with the penalty.  Returns the largest one's key.
// Products are rounded separately: contracted with a later subtraction they would differ from
// `sampling.penalised`.
DEVICE u64 penalise(Workbench& bench, const float* logits, const int* tokens, int count,
                    float penalty, float* adjusted) {
#pragma unroll 8
    for (int i = threadIdx.x; i < VOCAB; i += THREADS) adjusted[i] = load_fresh(logits + i);
    __syncthreads();
#pragma unroll 4
    for (int i = threadIdx.x; i < count; i += THREADS) {
        const int token = load_fresh(tokens + i);
        const float logit = load_fresh(logits + token);
        adjusted[token] = logit < 0.0f ? __fmul_rn(logit, penalty) : __fdiv_rn(logit, penalty);
    }
    __syncthreads();
    u64 key = 0;
#pragma unroll 8
    for (int i = threadIdx.x; i < VOCAB; i += THREADS)
        key = largest(key, logit_key(load_fresh(adjusted + i), i));
    return largest_of_block(bench, key);
}

DEVICE int sample_row(Workbench& bench, const SampledRow& sampled, const float* logits,
                      const Options* options, const u64* keys, const int* history, float* adjusted) {
    const int thread = threadIdx.x;
    const Row& row = sampled.row;
    const double temperature = sampled.temperature, penalty = sampled.repetition_penalty;
    u64 key = 0;
#pragma unroll 4
    for (int i = thread; i < HEAD_BLOCKS; i += THREADS) key = largest(key, load_fresh(keys + i));
    key = largest_of_block(bench, key);
    if (key == NAN_KEY) return -1;
    if (penalty != 1.0) {
        key = penalise(bench, logits, history, row.position + 1, static_cast<float>(penalty),
                       adjusted);
        logits = adjusted;
    }
    const int best = static_cast<int>(0xffffffffu - static_cast<u32>(key));
    const float logit = from_ordered(static_cast<u32>(key >> 32));
    if (isinf(logit)) return -1;
    if (temperature == 0.0) return best;
    __syncthreads();  // before the bench is reused

    Tokens tokens{logits, logit, static_cast<float>(temperature), 0};
    const int top_k = options[row.sequence].top_k;
    const double top_p = options[row.sequence].top_p;
    if (top_k > 0 && top_k < VOCAB) {
        fill_bins<true>(bench, tokens);
        tokens.last = find_token<true>(bench, tokens, top_k);
    }
    const double min_p = options[row.sequence].min_p;
    fill_bins<false>(bench, tokens);
    find_bin(bench, 1);
    u64 mass = bench.total;
    if (top_p < 1.0) {
        const u64 wanted = static_cast<u64>(ceil(top_p * static_cast<double>(mass)));
        tokens.last = find_token<false>(bench, tokens, min(max(wanted, 1ull), mass));
    }
    if (min_p > 0.0) {  // keeps all tokens with the least allowed scaled logit, whatever their index
        const Place least = static_cast<u64>(ordered(static_cast<float>(log(min_p)))) << INDEX_BITS;
        tokens.last = largest(tokens.last, least);
    }
    if (top_p < 1.0 || min_p > 0.0) {
        fill_bins<false>(bench, tokens);
        find_bin(bench, 1);
        mass = bench.total;
    }
    // floor(uniform * mass), exactly: 24 bits times 62.
    const u64 u = draw(options[row.sequence].seed, static_cast<u32>(row.position + 1));
    const u64 drawn = __umul64hi(u << 40, mass);
    return index_of(find_token<false>(bench, tokens, drawn + 1));
}

#ifdef RANKS
// For several ranks: each rank has all logits, and one key of each rank instead of those of `head`'s blocks.
static_assert(HEAD_BLOCKS == RANKS, "a key a rank");
KERNEL __launch_bounds__(THREADS, 1)
    sample_of_ranks(const int* live, const float* logits, const Options* options, const int* stops,
                    int* state, int2* ring, const int* history, float* adjusted, const u64* keys,
                    u32 row_count, u32 vocabulary, u32 stop_count, u32 context, u32 ring_size,
                    u32 ranks) {
    constexpr bool EARLY = false;  // other ranks' keys are not written by kernels of this step
#else
KERNEL __launch_bounds__(THREADS, 1)
    sample(const int* live, const float* logits, const Options* options, const int* stops, int* state,
           int2* ring, const int* history, float* adjusted, float* workspace, u32 row_count,
           u32 vocabulary, u32 stop_count, u32 context, u32 ring_size) {
    constexpr bool EARLY = PREVIOUS_STARTS != AT_START;  // then `embed` has ended
    const u64* const keys = keys_of(workspace);
#endif
    __shared__ Workbench bench;
    __shared__ Ending endings[32];  // one for each thread of the first warp, to save registers
    start_next_at<AT_START>();
    if constexpr (!EARLY) wait_for_previous();
    const SampledRow sampled(live, options);
    if (threadIdx.x < 32) endings[threadIdx.x] = ending_of(sampled, options, stops);
    if constexpr (EARLY) wait_for_previous();
    start_next_at<AFTER_WAIT>();
    if (!sampled.wanted) return;
    const long long sequence = sampled.row.sequence;
    const int token = sample_row(bench, sampled, logits + sequence * VOCAB, options,
                                 keys + static_cast<long long>(blockIdx.x) * HEAD_BLOCKS,
                                 history + sequence * context, adjusted + sequence * VOCAB);
    if (threadIdx.x < 32)
        advance(sampled.row, token, endings[threadIdx.x], state, ring, context, ring_size);
    start_next_at<BEFORE_OUTPUT>();
}
