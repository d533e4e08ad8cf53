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
// With a penalty, a bias or a mask the logits are copied, minus infinity for tokens that the mask leaves
// out, and those of the sequence's tokens and of the biases are changed in the copy (`change`).  All else,
// including greedy, uses the copy then.
//
// Log probabilities are those of the model's own logits.  The likeliest tokens are found as the top_k are.
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

constexpr int WIDTH = VOCAB % 4 == 0 ? 4 : 1, VECTORS = VOCAB / WIDTH;

DEVICE void load_vector(float (&values)[WIDTH], const float* logits, int at) {
    if constexpr (WIDTH == 4) {
        const float4 v = load_fresh(reinterpret_cast<const float4*>(logits) + at);
        values[0] = v.x, values[1] = v.y, values[2] = v.z, values[3] = v.w;
    } else {
        values[0] = load_fresh(logits + at);
    }
}

// Calls visit(logit, index) for every token, in any order.
template <class Visit> DEVICE void scan_logits(const float* logits, const Visit& visit) {
    constexpr int UNROLL = 2;
    for (int start = threadIdx.x; start < VECTORS; start += UNROLL * THREADS) {
        float values[UNROLL][WIDTH];
#pragma unroll
        for (int i = 0; i < UNROLL; i++)
            if (start + i * THREADS < VECTORS) load_vector(values[i], logits, start + i * THREADS);
#pragma unroll
        for (int i = 0; i < UNROLL; i++) {
            const int at = start + i * THREADS;
            if (at >= VECTORS) continue;
#pragma unroll
            for (int j = 0; j < WIDTH; j++) visit(values[i][j], at * WIDTH + j);
        }
    }
}

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
        scan_logits(logits, [&](float logit, int index) { visit(scaled(logit), index); });
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

// What a row's logits are changed by, and the copy in which they are.
struct Changes {
    const int* history;
    const int2* biases;
    const u32* mask;  // null without
    float* adjusted;
};

// In the copy, a token of the history is a count before it is a logit again: a NaN whose lower bits say how
// often the answer has the token.  No logit is NaN here.
constexpr u32 NONE = 0x7fc00000;
DEVICE bool is_count(u32 word) { return word - NONE < 1u << 22; }

// Changes the logits of the history's tokens in the copy, each once, and then those of the biases.  Each
// operation is rounded separately, as in `sampling.changed`.  Tokens that are left out stay so.
DEVICE void change(const Options& options, const float* logits, const Changes& to, int position) {
    const float penalty = static_cast<float>(options.repetition_penalty);
    const float frequency = options.frequency_penalty, presence = options.presence_penalty;
    u32* const words = reinterpret_cast<u32*>(to.adjusted);
    const int first = static_cast<int>(threadIdx.x), answer = options.answer;
    const int start = penalty != 1.0f ? 0 : answer;
    if (options.penalises()) {
#pragma unroll 4
        for (int i = start + first; i <= position; i += THREADS) {
            const int token = load_fresh(to.history + i);
            if (load_fresh(to.adjusted + token) != MINUS_INFINITY) words[token] = NONE;
        }
        __syncthreads();
#pragma unroll 4
        for (int i = answer + first; i <= position; i += THREADS) {
            const int token = load_fresh(to.history + i);
            if (is_count(load_fresh(words + token))) atomicAdd(words + token, 1u);
        }
        __syncthreads();
#pragma unroll 4
        for (int i = start + first; i <= position; i += THREADS) {
            const int token = load_fresh(to.history + i);
            const u32 word = load_fresh(words + token);
            if (!is_count(word)) continue;  // another thread has the same token
            const float count = static_cast<float>(word - NONE), logit = load_fresh(logits + token);
            float value = logit < 0.0f ? __fmul_rn(logit, penalty) : __fdiv_rn(logit, penalty);
            value = __fsub_rn(value, __fmul_rn(frequency, count));
            if (word != NONE) value = __fsub_rn(value, presence);
            to.adjusted[token] = value;
        }
        __syncthreads();
    }
    for (int i = first; i < options.biased; i += THREADS) {
        const int2 one = to.biases[i];
        to.adjusted[one.x] = __fadd_rn(load_fresh(to.adjusted + one.x), __uint_as_float(one.y));
    }
    __syncthreads();
}

// Copies the logits, and changes them.  Returns the key of the largest.
DEVICE u64 copy_changed(Workbench& bench, const Options& options, const float* logits,
                        const Changes& to, int position) {
    constexpr int UNROLL = 4;  // loads before the first store, which later loads do not pass
    u64 key = 0;
    for (int start = threadIdx.x; start < VECTORS; start += UNROLL * THREADS) {
        float values[UNROLL][WIDTH];
        u32 allowed[UNROLL];
#pragma unroll
        for (int i = 0; i < UNROLL; i++) {
            const int at = start + i * THREADS, first = at * WIDTH;
            if (at >= VECTORS) continue;
            load_vector(values[i], logits, at);
            allowed[i] = to.mask ? load_fresh(to.mask + first / 32) >> first % 32 : ~0u;
        }
#pragma unroll
        for (int i = 0; i < UNROLL; i++) {
            const int at = start + i * THREADS;
            if (at >= VECTORS) continue;
#pragma unroll
            for (int j = 0; j < WIDTH; j++) {
                if (!(allowed[i] >> j & 1)) values[i][j] = MINUS_INFINITY;
                key = largest(key, logit_key(values[i][j], at * WIDTH + j));
            }
            if constexpr (WIDTH == 4)
                reinterpret_cast<float4*>(to.adjusted)[at] =
                    make_float4(values[i][0], values[i][1], values[i][2], values[i][3]);
            else
                to.adjusted[at] = values[i][0];
        }
    }
    __syncthreads();  // before other threads read the copy
    if (options.penalises() || options.biased) {
        change(options, logits, to, position);
        key = 0;
        scan_logits(to.adjusted, [&](float logit, int index) {
            key = largest(key, logit_key(logit, index));
        });
    }
    return largest_of_block(bench, key);
}

struct Logprobs {  // program.LOGPROBS
    float chosen;
    int tokens[MOST_LOGPROBS];
    float top[MOST_LOGPROBS];
};

// Writes the log probabilities of a token and of the `count` likeliest ones.  `best`: the largest logit.
DEVICE void write_logprobs(Workbench& bench, const float* logits, float best, int token, int count,
                           Logprobs& found) {
    Tokens tokens{logits, best, 1.0f, 0};
    fill_bins<false>(bench, tokens);
    find_bin(bench, 1);
    const double mass = log(static_cast<double>(bench.total) / static_cast<double>(1ull << SHIFT));
    auto log_probability = [&](float scaled) {
        return static_cast<float>(static_cast<double>(scaled) - mass);
    };
    if (threadIdx.x == 0) found.chosen = log_probability(tokens.scaled(load_fresh(logits + token)));
    if (count) {
        fill_bins<true>(bench, tokens);
        const Place last = find_token<true>(bench, tokens, count);
        if (threadIdx.x == 0) bench.listed = 0;
        __syncthreads();
        tokens.scan([&](float scaled, int index) {
            const Place place = place_of(scaled, index);
            if (place >= last) bench.list[atomicAdd(&bench.listed, 1)] = place;
        });
        __syncthreads();
        if (threadIdx.x < count) {
            const Place own = bench.list[threadIdx.x];
            int rank = 0;
            for (int i = 0; i < count; i++) rank += bench.list[i] > own;
            found.tokens[rank] = index_of(own);
            found.top[rank] = log_probability(scaled_of(own));
        }
    }
    __threadfence_system();  // before the token, at which the host begins to read
    __syncthreads();
}

// Draws a token by temperature, top_k, top_p and min_p.  `best`: the largest logit.
DEVICE int draw_token(Workbench& bench, const Options& options, const float* logits, float best,
                      int position) {
    Tokens tokens{logits, best, static_cast<float>(options.temperature), 0};
    const int top_k = options.top_k;
    const double top_p = options.top_p;
    if (top_k > 0 && top_k < VOCAB) {
        fill_bins<true>(bench, tokens);
        tokens.last = find_token<true>(bench, tokens, top_k);
    }
    const double min_p = options.min_p;
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
    const u64 u = draw(options.seed, static_cast<u32>(position + 1));
    const u64 drawn = __umul64hi(u << 40, mass);
    return index_of(find_token<false>(bench, tokens, drawn + 1));
}

DEVICE int sample_row(Workbench& bench, const SampledRow& sampled, const float* logits,
                      const Options* options, const u64* keys, const Changes& to, int* logprobs,
                      u32 ring_size) {
    const int thread = threadIdx.x;
    const Row& row = sampled.row;
    u64 key = 0;
#pragma unroll 4
    for (int i = thread; i < HEAD_BLOCKS; i += THREADS) key = largest(key, load_fresh(keys + i));
    key = largest_of_block(bench, key);
    if (key == NAN_KEY) return -1;
    const Options& own = options[row.sequence];
    const float best = from_ordered(static_cast<u32>(key >> 32));  // of the model's own logits
    const float* used = logits;
    if (!sampled.plain && (to.mask || own.penalises() || own.biased)) {
        key = copy_changed(bench, own, logits, to, row.position);
        used = to.adjusted;
    }
    const float logit = from_ordered(static_cast<u32>(key >> 32));
    if (isinf(logit)) return -1;
    int token = static_cast<int>(0xffffffffu - static_cast<u32>(key));
    if (sampled.plain) return token;
    if (own.temperature != 0.0) {
        __syncthreads();  // before the bench is reused
        token = draw_token(bench, own, used, logit, row.position);
    }
    if (own.logprobs && !isinf(best)) {
        Logprobs* const ring = reinterpret_cast<Logprobs*>(logprobs);
        write_logprobs(bench, logits, best, token, own.logprobs - 1, ring[(row.position + 1) % ring_size]);
    }
    return token;
}

#ifdef RANKS
// For several ranks: each rank has all logits, and one key of each rank instead of those of `head`'s blocks.
static_assert(HEAD_BLOCKS == RANKS, "a key a rank");
KERNEL __launch_bounds__(THREADS, 1)
    sample_of_ranks(const int* live, const float* logits, const Options* options, const int* stops,
                    int* state, int2* ring, const int* history, float* adjusted, const int2* biases,
                    const u32* masks, int* logprobs, const u64* keys, u32 row_count, u32 vocabulary,
                    u32 stop_count, u32 context, u32 ring_size, u32 ranks) {
    constexpr bool EARLY = false;  // other ranks' keys are not written by kernels of this step
#else
KERNEL __launch_bounds__(THREADS, 1)
    sample(const int* live, const float* logits, const Options* options, const int* stops, int* state,
           int2* ring, const int* history, float* adjusted, const int2* biases, const u32* masks,
           int* logprobs, float* workspace, u32 row_count, u32 vocabulary, u32 stop_count, u32 context,
           u32 ring_size) {
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
    const bool masked = sampled.row.flags & MASKED;
    const Changes to{history + sequence * context, biases + sequence * MOST_BIASES,
                     masked ? masks + sequence * ceil_div(VOCAB, 32) : nullptr,
                     adjusted + sequence * VOCAB};
    const int token =
        sample_row(bench, sampled, logits + sequence * VOCAB, options,
                   keys + static_cast<long long>(blockIdx.x) * HEAD_BLOCKS, to,
                   logprobs + sequence * ring_size * (sizeof(Logprobs) / sizeof(int)), ring_size);
    if (threadIdx.x < 32)
        advance(sampled.row, token, endings[threadIdx.x], state, ring, context, ring_size);
    start_next_at<BEFORE_OUTPUT>();
}
