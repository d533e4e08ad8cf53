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
// With a penalty or a bias the logits of the sequence's tokens and of the biases are changed in place, and
// written back when a token is chosen (`Change`); no other logit is read for it.  The largest is then found from the
// keys: those of the changed tokens, those of the head's blocks without one, and of the blocks with one only
// those that could still be larger are read again.  With a mask, so are blocks whose key's token is left out.
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
static_assert(MOST_BIASES <= THREADS, "a bias a thread");

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

constexpr int WIDTH = VOCAB % 4 == 0 ? 4 : 1, VECTORS = VOCAB / WIDTH;

DEVICE void load_vector(float (&values)[WIDTH], const float* logits, int at) {
    if constexpr (WIDTH == 4) {
        const float4 v = load_fresh(reinterpret_cast<const float4*>(logits) + at);
        values[0] = v.x, values[1] = v.y, values[2] = v.z, values[3] = v.w;
    } else {
        values[0] = load_fresh(logits + at);
    }
}

// The logits of a row, minus infinity for tokens that the mask leaves out; in shared memory, to save registers.
struct Logits {
    float* logits;
    const u32* mask;  // null without

    DEVICE u32 allowed(int first) const { return mask ? load_fresh(mask + first / 32) >> first % 32 : ~0u; }

    DEVICE float operator[](int index) const {
        return allowed(index) & 1 ? load_fresh(logits + index) : MINUS_INFINITY;
    }

    // Calls visit(logit, index) for every token, in any order.
    template <class Visit> DEVICE void scan(const Visit& visit) const {
        constexpr int UNROLL = 2;
        for (int start = threadIdx.x; start < VECTORS; start += UNROLL * THREADS) {
            float values[UNROLL][WIDTH];
            u32 bits = ~0u;
#pragma unroll
            for (int i = 0; i < UNROLL; i++)
                if (start + i * THREADS < VECTORS) load_vector(values[i], logits, start + i * THREADS);
            if (mask) {
                bits = 0;
#pragma unroll
                for (int i = 0; i < UNROLL; i++)
                    if (start + i * THREADS < VECTORS)
                        bits |= (allowed((start + i * THREADS) * WIDTH) & ((1 << WIDTH) - 1)) << i * WIDTH;
            }
#pragma unroll
            for (int i = 0; i < UNROLL; i++) {
                const int at = start + i * THREADS;
                if (at >= VECTORS) continue;
#pragma unroll
                for (int j = 0; j < WIDTH; j++)
                    visit(bits >> (i * WIDTH + j) & 1 ? values[i][j] : MINUS_INFINITY, at * WIDTH + j);
            }
        }
    }
};

// The tokens of one row: their logits, and the prefix of the order that may be chosen.
struct Tokens {
    const Logits* logits;
    float largest, temperature;
    Place last;  // tokens after this place are left out

    DEVICE float scaled(float logit) const {
        // With a temperature that is 0 in float32 the largest would be 0 / 0.
        return logit == largest ? 0.0f : __fdiv_rn(logit - largest, temperature);
    }

    // Calls visit(scaled logit, index) for every token, in any order.
    template <class Visit> DEVICE void scan(const Visit& visit) const {
        logits->scan([&](float logit, int index) { visit(scaled(logit), index); });
    }
};

struct Workbench {
    union {
        u64 sums[BINS];
        u32 halves[2 * BINS];   // of the sums
        u32 touched[2 * BINS];  // a bit for each of the head's blocks
    };
    u64 warps[WARPS];
    Place list[LISTED];
    Tokens tokens;  // that a token is drawn from, or has its log probability among
    int listed;
    int found;    // the bin or digit in which the target lies
    u64 before;   // the sum of all bins before `found`
    u64 total;    // the sum of all bins
};

// Adds to a sum, in two halves: an addition of 64 bits in shared memory is a loop.
DEVICE void add_to(Workbench& bench, int bin, u64 v) {
    const u32 low = static_cast<u32>(v), before = atomicAdd(&bench.halves[2 * bin], low);
    const u32 high = static_cast<u32>(v >> 32) + (before + low < before);
    if (high) atomicAdd(&bench.halves[2 * bin + 1], high);
}

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
#pragma unroll 8
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
        if (weight) add_to(bench, bin_of(scaled), weight);
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
            if (weight) add_to(bench, highest - digit, weight);
        };
        if (bench.listed <= LISTED) {
            for (int i = thread; i < bench.listed; i += THREADS)
                add(bench.list[i], scaled_of(bench.list[i]));
        } else {
#pragma unroll 1
            for (int index = thread; index < VOCAB; index += THREADS) {
                const float scaled = tokens.scaled((*tokens.logits)[index]);
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

DEVICE int token_of(u64 key) { return static_cast<int>(0xffffffffu - static_cast<u32>(key)); }

DEVICE u64 largest_of_block(Workbench& bench, u64 key) {
    const int lane = threadIdx.x % 32;
    key = largest_of_warp(key);
    __syncthreads();
    if (lane == 0) bench.warps[threadIdx.x / 32] = key;
    __syncthreads();
    return largest_of_warp(lane < WARPS ? bench.warps[lane] : 0);
}

// In place of its logit, a token of the history has a count for a while: a NaN whose lower bits say how often
// the answer has the token.  No logit is NaN here.
constexpr u32 NONE = 0x7fc00000;
DEVICE bool is_count(u32 word) { return word - NONE < 1u << 22; }

// The head's blocks, whose largest keys are read: of so many tokens each.  Ranks have few of very many.
constexpr int BLOCK_TOKENS = HEAD_TOKENS, BLOCK_WORDS = ceil_div(HEAD_BLOCKS, 32);
constexpr bool FEW_TOKENS = BLOCK_TOKENS <= 512;
constexpr int AGAIN = 2 * WARPS;  // blocks that are read again one by one; more are read all together
static_assert(!FEW_TOKENS || BLOCK_WORDS <= 2 * BINS, "a bit each");

struct Logprobs {  // program.LOGPROBS
    float chosen;
    int tokens[MOST_LOGPROBS];
    float top[MOST_LOGPROBS];
};

// A row's logits, and what changes them by penalties and biases; in shared memory too.  All threads call.
struct Change {
    Row now;
    float most;  // of the model's own logits
    Logprobs* found;
    Logits row;
    const int* history;
    const int2* biases;
    u32* kept;  // for each position its token's own logit; a count if another position has it
    float* unbiased;  // for each bias its token's logit without it
    int start, biased;

    DEVICE bool is_any() const { return start <= now.position || biased; }

    // Calls visit(position, its token) for this thread's positions, always the same ones.
    template <class Visit> DEVICE void each(const Visit& visit) const {
#pragma unroll 1
        for (int i = start + threadIdx.x; i <= now.position; i += THREADS) visit(i, load_fresh(history + i));
    }
    // Calls visit(token, bias) if this thread has a bias.
    template <class Visit> DEVICE void own_bias(const Visit& visit) const {
        if (static_cast<int>(threadIdx.x) >= biased) return;
        const int2 one = biases[threadIdx.x];
        visit(one.x, __uint_as_float(static_cast<u32>(one.y)));
    }

    DEVICE static void touch(Workbench& bench, int token) {
        if constexpr (FEW_TOKENS) {
            const int block = token / BLOCK_TOKENS;
            atomicOr(&bench.touched[block / 32], 1u << block % 32);
        }
    }

    // Changes the logits in place; each operation is rounded separately, as in `sampling.changed`.
    DEVICE void make(Workbench& bench, const Options& options) const {
        u32* const words = reinterpret_cast<u32*>(row.logits);
        each([&](int i, int token) {
            kept[i] = atomicExch(words + token, NONE);  // the first to come has the logit
            touch(bench, token);
        });
        __syncthreads();
        const float frequency = options.frequency_penalty, presence = options.presence_penalty;
        if (frequency != 0.0f || presence != 0.0f) {
            const int answer = options.answer;
            each([&](int i, int token) {
                if (i >= answer) atomicAdd(words + token, 1u);
            });
            __syncthreads();
        }
        const float penalty = static_cast<float>(options.repetition_penalty);
        each([&](int i, int token) {
            const u32 own = kept[i];
            if (is_count(own)) return;
            const float logit = __uint_as_float(own);
            const u32 count = load_fresh(words + token) - NONE;
            float value = logit < 0.0f ? __fmul_rn(logit, penalty) : __fdiv_rn(logit, penalty);
            value = __fsub_rn(value, __fmul_rn(frequency, static_cast<float>(count)));
            if (count) value = __fsub_rn(value, presence);
            row.logits[token] = value;
        });
        __syncthreads();
        own_bias([&](int token, float bias) {
            touch(bench, token);
            const float own = unbiased[threadIdx.x] = load_fresh(row.logits + token);
            row.logits[token] = __fadd_rn(own, bias);
        });
        __syncthreads();
    }

    // Returns the largest key of the row's logits, as they are now.  `keys`: those of the head's blocks, of the
    // model's own.
    DEVICE u64 best(Workbench& bench, const u64* keys) const {
        u64 key = 0;
        auto look = [&](int token) { key = largest(key, logit_key(row[token], token)); };
        if constexpr (FEW_TOKENS) {
            each([&](int, int token) { look(token); });
            own_bias([&](int token, float) { look(token); });
            for (int i = threadIdx.x; i < HEAD_BLOCKS; i += THREADS) {
                const u64 one = load_fresh(keys + i);
                if (row.mask && !(row.allowed(token_of(one)) & 1)) touch(bench, token_of(one));
                else if (!(bench.touched[i / 32] >> i % 32 & 1)) key = largest(key, one);
            }
            if (threadIdx.x == 0) bench.listed = 0;
            key = largest_of_block(bench, key);
            const int lane = threadIdx.x % 32;
            auto again = [&](int word) {
                const int own = word * 32 + lane;
                const bool is = own < HEAD_BLOCKS && (bench.touched[word] >> lane & 1);
                return __ballot_sync(0xffffffffu, is && load_fresh(keys + own) > key);
            };
            int count = 0;
            for (int word = threadIdx.x / 32; word < BLOCK_WORDS; word += WARPS) count += __popc(again(word));
            if (lane == 0 && count) atomicAdd(&bench.listed, count);
            __syncthreads();
            if (bench.listed <= AGAIN) {
                u64 found = key;
                for (int word = threadIdx.x / 32; word < BLOCK_WORDS; word += WARPS) {
                    for (u32 left = again(word); left; left &= left - 1) {
                        const int first = (word * 32 + __ffs(left) - 1) * BLOCK_TOKENS;
                        for (int i = lane; i < BLOCK_TOKENS; i += 32)
                            if (first + i < VOCAB)
                                found = largest(found, logit_key(row[first + i], first + i));
                    }
                }
                return largest_of_block(bench, found);
            }
        }
        row.scan([&](float logit, int index) { key = largest(key, logit_key(logit, index)); });
        return largest_of_block(bench, key);
    }

    // A bias may have been added to a changed logit, so it is taken back first.
    DEVICE void undo() const {
        __syncthreads();
        own_bias([&](int token, float) { row.logits[token] = unbiased[threadIdx.x]; });
        __syncthreads();
        each([&](int i, int token) {
            const u32 own = kept[i];
            if (!is_count(own)) row.logits[token] = __uint_as_float(own);
        });
        __syncthreads();
    }
};

// Writes the log probabilities of a token and of the `count` likeliest ones.
DEVICE void write_logprobs(Workbench& bench, const Change& change, int token, int count) {
    Tokens& tokens = bench.tokens;
    if (threadIdx.x == 0) tokens = {&change.row, change.most, 1.0f, 0};
    fill_bins<false>(bench, tokens);
    find_bin(bench, 1);
    const double mass = log(static_cast<double>(bench.total) / static_cast<double>(1ull << SHIFT));
    auto log_probability = [&](float scaled) {
        return static_cast<float>(static_cast<double>(scaled) - mass);
    };
    if (threadIdx.x == 0) change.found->chosen = log_probability(tokens.scaled(change.row[token]));
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
#pragma unroll 1
            for (int i = 0; i < count; i++) rank += bench.list[i] > own;
            change.found->tokens[rank] = index_of(own);
            change.found->top[rank] = log_probability(scaled_of(own));
        }
    }
    __threadfence_system();  // before the token, at which the host begins to read
    __syncthreads();
}

// Draws a token by temperature, top_k, top_p and min_p.  `best`: the largest logit.
DEVICE int draw_token(Workbench& bench, const Options& options, const Change& change, float best) {
    Tokens& tokens = bench.tokens;
    if (threadIdx.x == 0) tokens = {&change.row, best, static_cast<float>(options.temperature), 0};
    if (options.top_k > 0 && options.top_k < VOCAB) {
        fill_bins<true>(bench, tokens);
        const Place last = find_token<true>(bench, tokens, options.top_k);
        if (threadIdx.x == 0) tokens.last = last;
    }
    fill_bins<false>(bench, tokens);
    find_bin(bench, 1);
    u64 mass = bench.total;
    if (options.top_p < 1.0) {
        const u64 wanted = static_cast<u64>(ceil(options.top_p * static_cast<double>(mass)));
        const Place last = find_token<false>(bench, tokens, min(max(wanted, 1ull), mass));
        if (threadIdx.x == 0) tokens.last = last;
    }
    if (options.min_p > 0.0) {  // keeps all tokens with the least allowed scaled logit, whatever their index
        const Place least = static_cast<u64>(ordered(static_cast<float>(log(options.min_p)))) << INDEX_BITS;
        if (threadIdx.x == 0) tokens.last = largest(tokens.last, least);
    }
    if (options.top_p < 1.0 || options.min_p > 0.0) {
        fill_bins<false>(bench, tokens);
        find_bin(bench, 1);
        mass = bench.total;
    }
    // floor(uniform * mass), exactly: 24 bits times 62.
    const u64 u = draw(options.seed, static_cast<u32>(change.now.position + 1));
    const u64 drawn = __umul64hi(u << 40, mass);
    return index_of(find_token<false>(bench, tokens, drawn + 1));
}

DEVICE int sample_row(Workbench& bench, bool plain, const Options* options, const u64* keys,
                      Change& change) {
    const int thread = threadIdx.x;
    u64 key = 0;
#pragma unroll 4
    for (int i = thread; i < HEAD_BLOCKS; i += THREADS) key = largest(key, load_fresh(keys + i));
    key = largest_of_block(bench, key);
    if (key == NAN_KEY) return -1;
    if (plain) return greedy_token(key);
    const Options& own = options[change.now.sequence];
    if (thread == 0) change.most = from_ordered(static_cast<u32>(key >> 32));
    if (change.is_any() || change.row.mask) {
        clear_bins(bench);  // no block is touched
        if (change.is_any()) change.make(bench, own);
        key = change.best(bench, keys);
    }
    int token = greedy_token(key);
    if (token >= 0 && own.temperature != 0.0) {
        __syncthreads();  // before the bench is reused
        const float most = from_ordered(static_cast<u32>(key >> 32));
        token = draw_token(bench, own, change, most);
    }
    if (change.is_any()) change.undo();
    if (token >= 0 && own.logprobs) {
        __syncthreads();  // all have read the mask, and `most` is written
        if (thread == 0) change.row.mask = nullptr;
        if (!isinf(change.most)) write_logprobs(bench, change, token, own.logprobs - 1);
    }
    return token;
}

#ifdef RANKS
// For several ranks: each rank has all logits, and one key of each rank instead of those of `head`'s blocks.
static_assert(HEAD_BLOCKS == RANKS, "a key a rank");
KERNEL __launch_bounds__(THREADS, 1)
    sample_of_ranks(const int* live, float* logits, const Options* options, const int* stops,
                    int* state, int2* ring, const int* history, u32* kept, const int2* biases,
                    const u32* allowed, u32* masks, int* logprobs, const u64* keys, u32 row_count, u32 vocabulary,
                    u32 stop_count, u32 context, u32 ring_size, u32 ranks) {
    constexpr bool EARLY = false;  // other ranks' keys are not written by kernels of this step
#else
KERNEL __launch_bounds__(THREADS, 1)
    sample(const int* live, float* logits, const Options* options, const int* stops, int* state,
           int2* ring, const int* history, u32* kept, const int2* biases, const u32* allowed,
           u32* masks, int* logprobs, float* workspace, u32 row_count, u32 vocabulary, u32 stop_count, u32 context,
           u32 ring_size) {
    constexpr bool EARLY = PREVIOUS_STARTS != AT_START;  // then `embed` has ended
    const u64* const keys = keys_of(workspace);
#endif
    __shared__ Workbench bench;
    __shared__ Change change;
    __shared__ Ending endings[32];  // one for each thread of the first warp, to save registers
    start_next_at<AT_START>();
    if constexpr (!EARLY) wait_for_previous();
    const SampledRow sampled(live, options);
    if (threadIdx.x < 32) endings[threadIdx.x] = ending_of(sampled, options, stops);
    // The mask comes over the bus, once: the host made it before it launched this kernel.
    constexpr int WORDS = ceil_div(VOCAB, 32);
    u32* const mask = sampled.row.flags & MASKED ? masks + static_cast<long long>(sampled.row.sequence) * WORDS : nullptr;
    if (sampled.wanted && mask)
        for (int i = threadIdx.x; i < WORDS; i += THREADS)
            mask[i] = load_of_host(allowed + (mask - masks) + i);
    if constexpr (EARLY) wait_for_previous();
    start_next_at<AFTER_WAIT>();
    if (!sampled.wanted) return;
    const long long sequence = sampled.row.sequence;
    if (threadIdx.x == 0) {
        u32* const own_kept = kept + sequence * (context + MOST_BIASES);
        const Options& own = options[sequence];
        const int position = sampled.row.position;
        Logprobs* const ring = reinterpret_cast<Logprobs*>(logprobs) + sequence * ring_size;
        change = {sampled.row,
                  0.0f,
                  ring + (position + 1) % ring_size,
                  {logits + sequence * VOCAB, mask},
                  history + sequence * context,
                  biases + sequence * MOST_BIASES,
                  own_kept,
                  reinterpret_cast<float*>(own_kept + context),
                  !own.penalises() ? position + 1 : own.repetition_penalty != 1.0 ? 0 : own.answer,
                  own.biased};
    }
    const int token = sample_row(bench, sampled.plain, options,
                                 keys + static_cast<long long>(blockIdx.x) * HEAD_BLOCKS, change);
    if (threadIdx.x < 32)
        advance(change.now, token, endings[threadIdx.x], state, ring, context, ring_size);
    start_next_at<BEFORE_OUTPUT>();
}
