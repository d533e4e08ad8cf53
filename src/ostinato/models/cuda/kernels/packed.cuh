// Products with packed matrices (bricks.cuh), for one row of inputs.
//
// The sums of a group are exact.  An input is converted to a signed integer of 23 bits, with one power of two
// for 256 adjacent inputs, and written as three digits of 8 bits; the tensor cores multiply codes with digits
// as integers (three of the eight columns that they have anyway).  The rounding error, 2^-23 of the largest
// of 256 inputs, is of the size of that of float32 sums.  A group's sum has at most 19 bits, and is converted
// to float by the accumulator's initial value, the bits of 1.5 2^23, whose last bit has the value 1.
//
// So for 512 weights a lane executes 6 instructions to unpack the codes (none for 8 bits), one product, two
// subtractions, and two fused multiplications with the scales.  Minima and offsets are applied once for each
// brick, from the sums of the inputs.
#pragma once

#include "bricks.cuh"
#include "linear.cuh"

constexpr int WHOLE = 0x4b400000;  // the bits of 1.5 2^23
#define WHOLE_FLOAT 12582912.0f

// The layout of 256 inputs in shared memory: a row of 256 bytes for each digit, then a row of zeros that is
// shifted by 64 bytes to other banks.  A lane reads 16 bytes of one row, [group % 2][first, second] of a unit.
// The sums of 16 inputs each follow, then the unit: the value of the lowest digit's 1.
constexpr int DIGIT_ROWS = 3, ZERO_ROW = DIGIT_ROWS * BRICK + 64, SUM_ROW = ZERO_ROW + BRICK;
constexpr int DIGIT_BYTES = SUM_ROW + 80;

// The offset that a lane reads from.  Columns 0, 2 and 4 of the product are the digits, so that a lane's first
// column is digit t, or zeros.  HALVES: columns 0, 2 and 4 are the digits of the first inputs, columns 1, 3 and
// 5 those of the second inputs; masks set the other inputs of a column to zero.
template <bool HALVES> DEVICE int digits_of(int lane) {
    const int g = lane / 4;
    const bool zero = HALVES ? g >= 6 : g % 2 == 1 || g >= 6;
    return (zero ? ZERO_ROW : g / 2 * BRICK) + lane % 4 * 16;
}

DEVICE u32 magnitude(float v) { return __float_as_uint(v) & 0x7fffffffu; }

// Converts 8 inputs of a lane (4 of a group's first 16, 4 of its second 16) to digits in shared memory.
DEVICE void make_digits(u8* digits, const float4& a, const float4& b, int lane) {
    const float v[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
    u32 most = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) most = larger(most, magnitude(v[i]));
    most = __reduce_max_sync(0xffffffffu, most);
    // The largest input gets 22 bits; if it is below 2^-104, fewer: the least unit is 2^-125.
    const u32 exponent = larger(static_cast<int>(most >> 23), 23);
    const float up = __uint_as_float((275 - exponent) << 23);
    // An input that is not finite makes all sums NaN.
    const float unit = most < 0x7f800000u ? __uint_as_float((exponent - 21) << 23)
                                          : __uint_as_float(0x7fc00000u);
    u32 whole[8];
    int first = 0, second = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        whole[i] = __float_as_uint(fmaf(v[i], up, WHOLE_FLOAT)) - WHOLE;
        (i < 4 ? first : second) += static_cast<int>(whole[i]);
    }
    // Digits are from -128 to 127: after adding 128 to each, the bytes are the digits plus 128.
    u32 words[2][DIGIT_ROWS];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        u32 w[4];
#pragma unroll
        for (int i = 0; i < 4; i++) w[i] = whole[half * 4 + i] + 0x00808080u;
        const u32 low0 = __byte_perm(w[0], w[1], 0x5140), low1 = __byte_perm(w[2], w[3], 0x5140);
        const u32 top0 = __byte_perm(w[0], w[1], 0x0062), top1 = __byte_perm(w[2], w[3], 0x0062);
        words[half][0] = __byte_perm(top0, top1, 0x5410) ^ 0x80808080u;
        words[half][1] = __byte_perm(low0, low1, 0x7632) ^ 0x80808080u;
        words[half][2] = __byte_perm(low0, low1, 0x5410) ^ 0x80808080u;
    }
    const int group = lane / 4, t = lane % 4;
#pragma unroll
    for (int row = 0; row < DIGIT_ROWS; row++) {
        auto* const to = reinterpret_cast<uint2*>(digits + row * BRICK + group / 2 * 64 + t * 16 +
                                                  group % 2 * 8);
        *to = make_uint2(words[0][row], words[1][row]);
    }
    *reinterpret_cast<uint2*>(digits + ZERO_ROW + lane * 8) = make_uint2(0, 0);
#pragma unroll
    for (int mask = 1; mask < 4; mask *= 2) first += exchange(first, mask), second += exchange(second, mask);
    auto* const sums = reinterpret_cast<float2*>(digits + SUM_ROW);
    if (t == 0) sums[group] = make_float2(unit * static_cast<float>(first), unit * static_cast<float>(second));
    if (lane == 0) sums[8].x = unit;
}

// Adds a brick's products with its inputs to a lane's share of the sums of rows g and g + 8.  Calls `next` with
// the index of each load of codes once it is used up, and with -1 at the end for the rest of the brick.
template <class F, class Next>
DEVICE void multiply_brick(float& low, float& high, Held<F>& held, const u8* digits, int lane, int units,
                           const Next& next) {
    const int t = lane % 4;
    // The sums of groups 2 t and 2 t + 1, two each, and the weight of this lane's digit.
    const float4 sums = *reinterpret_cast<const float4*>(digits + SUM_ROW + t * 16);
    const float unit = *reinterpret_cast<const float*>(digits + SUM_ROW + 64);
    const float weight = unit * __uint_as_float((143 - 8 * t) << 23);
    const u8* const own = digits + digits_of<F::HALVES>(lane);
    const u32 first_mask = F::HALVES && lane / 4 % 2 == 0 && lane < 24 ? ~0u : 0;
    const u32 second_mask = F::HALVES && lane / 4 % 2 == 1 && lane < 24 ? ~0u : 0;
    float sum0 = 0.0f, sum1 = 0.0f;  // sums of rows g and g + 8
    int whole0 = 0, whole1 = 0;      // the same for K types, as integers
    const uint4 scales0 = held.scales[0], scales1 = held.scales[1];
    const uint2 k0 = k_scales(scales0), k1 = k_scales(scales1);
    constexpr int PER_UNIT = Brick<F>::UNIT / 512;
#pragma unroll
    for (int unit = 0; unit < 4; unit++) {
        if (unit >= units) break;
        uint4 b = *reinterpret_cast<const uint4*>(own + unit * 64);
        if constexpr (F::HALVES)
            b = make_uint4(b.x & first_mask, b.y & second_mask, b.z & first_mask, b.w & second_mask);
#pragma unroll
        for (int odd = 0; odd < 2; odd++) {
            const int group = unit * 2 + odd, load = PER_UNIT == 2 ? group : unit;
            u32 a[4];
            part_codes<F>(a, held, held.codes[load], group);
            if (PER_UNIT == 2 || odd) next(load);
            const int before = F::K_TYPE ? 0 : WHOLE;
            int c[4] = {before, before, before, before};
            multiply_bytes<F::BITS == 8>(c, a[0], a[1], a[2], a[3], odd ? b.z : b.x, odd ? b.w : b.y);
            if constexpr (F::HALVES) {
                whole0 += signed_byte_of(word_of(scales0, group / 2), group % 2 * 2) * c[0];
                whole0 += signed_byte_of(word_of(scales0, group / 2), group % 2 * 2 + 1) * c[1];
                whole1 += signed_byte_of(word_of(scales1, group / 2), group % 2 * 2) * c[2];
                whole1 += signed_byte_of(word_of(scales1, group / 2), group % 2 * 2 + 1) * c[3];
            } else if constexpr (F::K_TYPE) {
                whole0 += byte_of(group / 4 ? k0.y : k0.x, group % 4) * c[0];
                whole1 += byte_of(group / 4 ? k1.y : k1.x, group % 4) * c[2];
            } else {
                const u32 s0 = word_of(scales0, unit), s1 = word_of(scales1, unit);
                const float scale0 = odd ? high_f16(s0) : low_f16(s0);
                const float scale1 = odd ? high_f16(s1) : low_f16(s1);
                sum0 = fmaf(scale0, __uint_as_float(c[0]) - WHOLE_FLOAT, sum0);
                sum1 = fmaf(scale1, __uint_as_float(c[2]) - WHOLE_FLOAT, sum1);
            }
        }
    }
    if constexpr (F::K_TYPE) {
        sum0 = static_cast<float>(whole0), sum1 = static_cast<float>(whole1);
        if constexpr (!F::HALVES) sum0 *= low_f16(scales0.x), sum1 *= low_f16(scales1.x);
    }
    float least0 = 0.0f, least1 = 0.0f;  // to be subtracted: minima or offsets of this lane's groups
    if constexpr (F::HALVES) {
        const u32 w0 = word_of(scales0, t), w1 = word_of(scales1, t);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float sum = i == 0 ? sums.x : i == 1 ? sums.y : i == 2 ? sums.z : sums.w;
            least0 = fmaf(static_cast<float>(signed_byte_of(w0, i)), sum, least0);
            least1 = fmaf(static_cast<float>(signed_byte_of(w1, i)), sum, least1);
        }
        sum0 = fmaf(sum0, weight, -static_cast<float>(F::OFFSET) * least0);
        sum1 = fmaf(sum1, weight, -static_cast<float>(F::OFFSET) * least1);
        low = fmaf(sum0, low_f16(held.extra[0]), low);
        high = fmaf(sum1, high_f16(held.extra[0]), high);
        next(-1);
        return;
    }
    const float even = sums.x + sums.y, odd = sums.z + sums.w;
    if constexpr (F::K_TYPE) {
        const uint2 m0 = k_minima(scales0), m1 = k_minima(scales1);
        const u32 w0 = (t < 2 ? m0.x : m0.y) >> (t % 2 * 16), w1 = (t < 2 ? m1.x : m1.y) >> (t % 2 * 16);
        least0 = static_cast<float>(byte_of(w0, 0)) * even + static_cast<float>(byte_of(w0, 1)) * odd;
        least1 = static_cast<float>(byte_of(w1, 0)) * even + static_cast<float>(byte_of(w1, 1)) * odd;
        least0 *= high_f16(scales0.x), least1 *= high_f16(scales1.x);
    } else if constexpr (F::MINIMA) {
        least0 = -(low_f16(held.extra[0]) * even + high_f16(held.extra[0]) * odd);
        least1 = -(low_f16(held.extra[1]) * even + high_f16(held.extra[1]) * odd);
    } else if constexpr (F::OFFSET != 0) {
        const u32 w0 = word_of(scales0, t), w1 = word_of(scales1, t);
        least0 = static_cast<float>(F::OFFSET) * (low_f16(w0) * even + high_f16(w0) * odd);
        least1 = static_cast<float>(F::OFFSET) * (low_f16(w1) * even + high_f16(w1) * odd);
    }
    low += fmaf(sum0, weight, -least0);
    high += fmaf(sum1, weight, -least1);
    next(-1);
}

// A launch shape.  SPLIT: warps that share the inputs of a tile (the bricks of 16 rows).  TEAMS: tiles that a
// block computes at once.  TURNS: how often it does.  DEPTH: bricks that a warp loads ahead.  RESIDENT: blocks
// that a multiprocessor must have registers for.  PARTS: the parts of the matrix.
template <int SPLIT_, int TEAMS_, int TURNS_, int DEPTH_, int RESIDENT_, class... PARTS>
struct PackedShape {
    static constexpr int SPLIT = SPLIT_, TEAMS = TEAMS_, TURNS = TURNS_, DEPTH = DEPTH_;
    static constexpr int RESIDENT = RESIDENT_;
    static constexpr int WARPS = SPLIT * TEAMS, THREADS = 32 * WARPS;
    static constexpr int BLOCK_TILES = TEAMS * TURNS, BLOCK_PAIRS = 8 * BLOCK_TILES;
};

// A product of one row with a part of a matrix, whose first pair in the matrix is FIRST; `block` counts the
// blocks of this part.  Each warp computes the digits of its own inputs, so no barrier is needed before the
// products.  One barrier follows all turns of a block, whose threads then finish the pairs.
template <class S, class R, int FIRST, class P, class L>
DEVICE u64 packed_matvec(const P& product, const int* live, const u8* bricks, int block, L later) {
    typedef typename R::Format F;
    constexpr int PAIRS = R::PAIRS, TILES = ceil_div(PAIRS, 8);
    constexpr int K = P::INPUTS, BRICKS = ceil_div(K, BRICK), SPAN = ceil_div(BRICKS, S::SPLIT);
    constexpr int LAST_UNITS = K % BRICK ? Brick<F>::units(K % BRICK) : 4;
    static_assert(P::PARTS == 0, "the residual is in one piece");
    static_assert(K % 4 == 0 && (!F::K_TYPE || K % BRICK == 0), "rows are whole blocks");
    DYNAMIC_SHARED(shared);
    __shared__ float squares[S::WARPS];
    auto const sums = reinterpret_cast<float2(*)[S::SPLIT][8]>(shared);  // [BLOCK_TILES]

    start_next_at<AT_START>();
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int team = warp / S::SPLIT, part = warp % S::SPLIT;
    const int first_tile = block * S::BLOCK_TILES + team;
    const int turns = TILES % S::BLOCK_TILES == 0
                          ? S::TURNS
                          : smaller(S::TURNS, ceil_div(TILES - block * S::BLOCK_TILES, S::TEAMS));
    u8* const digits = shared + S::BLOCK_TILES * S::SPLIT * 64 + warp * SPAN * DIGIT_BYTES;

    auto brick_of = [&](int i) { return i * S::SPLIT + part; };
    auto there = [&](int i) { return BRICKS % S::SPLIT == 0 || brick_of(i) < BRICKS; };
    auto units_of = [&](int i) {
        return LAST_UNITS == 4 || brick_of(i) < BRICKS - 1 ? 4 : LAST_UNITS;
    };
    auto brick_at = [&](int turn, int i) {
        const int tile = smaller(first_tile + turn * S::TEAMS, TILES - 1);
        return bricks + static_cast<long long>(tile) * Brick<F>::row_bytes(K) +
               brick_of(i) * Brick<F>::BYTES;
    };
    // The number of a warp's bricks, in the order of its turns.
    const int count = turns * SPAN;
    auto load = [&](Held<F>& into, int n) {
        if (there(n % SPAN)) into.load(brick_at(n / SPAN, n % SPAN), lane, units_of(n % SPAN));
    };
    Held<F> held[S::DEPTH];
#pragma unroll
    for (int n = 0; n < S::DEPTH; n++)
        if (n < count) load(held[n], n);
    // The inputs of this lane: 4 of a group's first 16, 4 of its second 16.
    auto input_of = [&](int i, int half) {
        return brick_of(i) * BRICK + lane / 4 * 32 + half * 16 + lane % 4 * 4;
    };
    auto has = [&](int i, int half) { return K % BRICK == 0 ? there(i) : input_of(i, half) < K; };
    float4 norms[P::NORMED ? SPAN : 1][2];
    if constexpr (P::NORMED) {
#pragma unroll
        for (int i = 0; i < SPAN; i++) {
#pragma unroll
            for (int half = 0; half < 2; half++)
                if (has(i, half))
                    norms[i][half] =
                        load_norm(reinterpret_cast<const float4*>(product.norm + input_of(i, half)));
        }
    }

    wait_for_previous();
    start_next_at<AFTER_WAIT>();

    // Inputs of BATCH bricks are loaded at once.
    constexpr int BATCH = smaller(4, SPAN);
    float4 x[BATCH][2];
    auto load_inputs = [&](int start) {
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                x[i][half] = make_float4(0, 0, 0, 0);
                if (start + i < SPAN && has(start + i, half)) {
                    const float* const from = product.input + input_of(start + i, half);
                    x[i][half] = load_fresh(reinterpret_cast<const float4*>(from));
                }
            }
        }
    };
    load_inputs(0);
    const Row row = load_row(live, 0);
    const bool wanted = (row.flags & P::WANTED) == P::WANTED;
    auto pair_of = [&](int item) { return block * S::BLOCK_PAIRS + item; };
    decltype(product.prepare(row, 0, 0)) prepared{};
    if (wanted && thread < S::BLOCK_PAIRS && pair_of(thread) < PAIRS)
        prepared = product.prepare(row, 0, FIRST + pair_of(thread));
    later.prefetch();
    float square = 0.0f;
#pragma unroll
    for (int start = 0; start < SPAN; start += BATCH) {
        if (start > 0) load_inputs(start);
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            if (start + i >= SPAN) break;
            if constexpr (P::NORMED) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    float4& v = x[i][half];
                    square += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
                    if (has(start + i, half)) {
                        const float4 n = norms[start + i][half];
                        v = make_float4(v.x * n.x, v.y * n.y, v.z * n.z, v.w * n.w);
                    }
                }
            }
            if (there(start + i))
                make_digits(digits + (start + i) * DIGIT_BYTES, x[i][0], x[i][1], lane);
        }
    }
    if constexpr (P::NORMED) {
        square = sum_lanes<32>(square);
        if (lane == 0) squares[warp] = square;
    }
    __syncwarp();
    if (count <= S::DEPTH) start_next_at<AFTER_INPUT>();

    // The turn and its brick that are multiplied, and those that are loaded meanwhile.  They are counted, since
    // NVRTC 13.0 computed wrong addresses from n / SPAN and n % SPAN (SPAN 6, DEPTH 2, 2 turns).
    int turn = 0, i = 0, then_turn = S::DEPTH / SPAN, then_i = S::DEPTH % SPAN;
    auto step = [](int& to_turn, int& to_i) {
        if (++to_i == SPAN) to_i = 0, to_turn++;
    };
    float low = 0.0f, high = 0.0f;
#pragma unroll 1
    for (int start = 0; start < count; start += S::DEPTH) {
#pragma unroll
        for (int d = 0; d < S::DEPTH; d++) {
            if (S::DEPTH > 1 && start + d >= count) break;
            const int units = units_of(i), then_units = units_of(then_i);
            const bool more = start + d + S::DEPTH < count && there(then_i);
            const u8* const at = brick_at(then_turn, then_i);
            if (there(i)) {
                multiply_brick(low, high, held[d], digits + i * DIGIT_BYTES, lane, units, [&](int load) {
                    if (!more) return;
                    if (load >= 0)
                        held[d].load_codes(at, lane, load, then_units);
                    else
                        held[d].load_rest(at, lane, then_units);
                });
            } else if (more) {
                held[d].load(at, lane, then_units);
            }
            if (i == SPAN - 1) {
                low = sum_lanes<4>(low), high = sum_lanes<4>(high);
                if (lane % 4 == 0)
                    sums[turn * S::TEAMS + team][part][lane / 4] = make_float2(low, high);
                low = high = 0.0f;
            }
            step(turn, i), step(then_turn, then_i);
        }
    }
    start_next_at<BEFORE_OUTPUT>();
    __syncthreads();

    float scale = 1.0f;
    if constexpr (P::NORMED) scale = norm_factor<S::SPLIT, K>(squares, product.epsilon);
    u64 key = 0;
    if (!wanted) return key;
#pragma unroll 1
    for (int item = thread; item < S::BLOCK_PAIRS && pair_of(item) < PAIRS; item += S::THREADS) {
        const int pair = FIRST + pair_of(item);
        float2 total = sums[item / 8][0][item % 8];
#pragma unroll
        for (int i = 1; i < S::SPLIT; i++) {
            const float2 one = sums[item / 8][i][item % 8];
            total = make_float2(total.x + one.x, total.y + one.y);
        }
        if (item >= S::THREADS) prepared = product.prepare(row, 0, pair);
        const u64 one =
            product.finish(row, 0, pair, total.x * scale, total.y * scale, prepared);
        if constexpr (P::KEYS) key = largest(key, one);
    }
    if constexpr (P::EXCHANGES) {
        for (int item = thread; item < S::BLOCK_PAIRS && pair_of(item) < PAIRS; item += S::THREADS)
            product.receive(FIRST + pair_of(item));
    }
    return key;
}

// Computes a product with a matrix of several parts (of queries, keys and values).  Each part has its own rows
// of bricks, and a block works on one part.
template <class S, int FIRST, class R, class... MORE, class P, class L>
DEVICE u64 multiply_parts(const P& product, const int* live, const u8* bricks, int block, L later) {
    constexpr int BLOCKS = ceil_div(R::PAIRS, S::BLOCK_PAIRS);
    if constexpr (sizeof...(MORE) > 0) {
        constexpr long long BYTES =
            static_cast<long long>(ceil_div(R::PAIRS, 8)) * Brick<typename R::Format>::row_bytes(P::INPUTS);
        if (block >= BLOCKS)
            return multiply_parts<S, FIRST + R::PAIRS, MORE...>(product, live, bricks + BYTES,
                                                                block - BLOCKS, later);
    }
    return packed_matvec<S, R, FIRST>(product, live, bricks, block, later);
}
template <int SPLIT, int TEAMS, int TURNS, int DEPTH, int RESIDENT, class... PARTS, class P, class L>
DEVICE u64 multiply(PackedShape<SPLIT, TEAMS, TURNS, DEPTH, RESIDENT, PARTS...> shape, const P& product,
                    const int* live, L later) {
    return multiply_parts<decltype(shape), 0, PARTS...>(product, live, product.weight, blockIdx.x, later);
}
