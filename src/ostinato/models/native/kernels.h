/* The kernels, in terms of sixteen lanes; native.h documents them.  Included once for each
 * instruction set, after the definition of its lanes. */

/* -------------------------------------------------------------------------------- packed values */

INLINE lanes f16_part(const uint8_t *from, uint32_t count)
{
    uint8_t whole[32] = {0};
    memcpy(whole, from, 2 * count);
    return f16_lanes(whole);
}

INLINE lanes bf16_part(const uint8_t *from, uint32_t count)
{
    uint8_t whole[32] = {0};
    memcpy(whole, from, 2 * count);
    return bf16_lanes(whole);
}

INLINE lanes f32_lanes(const uint8_t *from) { return lanes_load((const float *)from); }
INLINE lanes f32_part(const uint8_t *from, uint32_t count)
{
    return lanes_load_part((const float *)from, count);
}

/* Scales are converted for a *group* of blocks at once: 64 blocks of 32 values, or one of 256.
 * Scales are not adjacent in the file, and converted one by one they cost more than the values.
 * They are gathered for all rows first, and then converted, since a wide load is slow right after
 * the small stores that wrote its bytes. */

#define GROUP_SCALES 128

/* Gathers the half floats, `each` of them, at the start of each block. */
INLINE void gather_halves(const uint8_t *block, uint32_t count, size_t size, uint32_t each,
                          uint16_t *halves)
{
    for (uint32_t i = 0; i < count; i++, block += size)
        memcpy(halves + i * each, block, 2 * each);
    for (uint32_t i = count * each; i % 16; i++)
        halves[i] = 0;
}

INLINE void convert_halves(const uint16_t *halves, uint32_t count, float *out)
{
    for (uint32_t i = 0; i < count; i += 16)
        lanes_store(out + i, f16_lanes((const uint8_t *)(halves + i)));
}

/* Converts the eight scales and eight offsets of a block of 256: six bits each, in twelve bytes. */
INLINE void k_scales(const uint8_t *block, float *out)
{
    uint32_t a, b, c, parts[8] = {0};
    memcpy(&a, block + 4, 4);
    memcpy(&b, block + 8, 4);
    memcpy(&c, block + 12, 4);
    parts[0] = a & 0x3F3F3F3F;
    parts[1] = (c & 0x0F0F0F0F) | (a >> 6 & 0x03030303) << 4;
    parts[2] = b & 0x3F3F3F3F;
    parts[3] = (c >> 4 & 0x0F0F0F0F) | (b >> 6 & 0x03030303) << 4;
    lanes_store(out, bytes_first(bytes_load((const uint8_t *)parts)));
    float scale = scalar_f16(block), least = -scalar_f16(block + 2);
    for (int i = 0; i < 8; i++)
        out[i] *= scale;
    for (int i = 8; i < 16; i++)
        out[i] *= least;
}

/* NAME_values unpacks thirty-two values, part `sub` of block `i` of a group, with the same bits as
 * `models.files.dequantise`. */
#define UNUSED __attribute__((unused))
#define VALUES(NAME)                                                                               \
    INLINE void NAME##_values(const uint8_t *block, UNUSED const float *scales, UNUSED uint32_t i, \
                              UNUSED int sub, lanes *a, lanes *b)

INLINE void scaled(bytes32 codes, lanes scale, lanes *a, lanes *b)
{
    *a = lanes_mul(bytes_first(codes), scale);
    *b = lanes_mul(bytes_second(codes), scale);
}
INLINE void scaled_from(bytes32 codes, lanes scale, lanes least, lanes *a, lanes *b)
{
    scaled(codes, scale, a, b);
    *a = lanes_add(*a, least);
    *b = lanes_add(*b, least);
}

/* The scales are read from the block itself. */
#define NOTHING_TO_GATHER(NAME, SET_SCALES)                                                        \
    INLINE void NAME##_gather(const uint8_t *block, uint32_t count, uint16_t *halves)              \
    {                                                                                              \
        (void)block, (void)count, (void)halves;                                                    \
    }                                                                                              \
    INLINE void NAME##_scales(const uint8_t *block, const uint16_t *halves, uint32_t count,        \
                              float *out)                                                          \
    {                                                                                              \
        (void)block, (void)halves, (void)count, (void)out;                                         \
        SET_SCALES;                                                                                \
    }
#define HALVES_TO_GATHER(NAME, BYTES, EACH)                                                        \
    INLINE void NAME##_gather(const uint8_t *block, uint32_t count, uint16_t *halves)              \
    {                                                                                              \
        gather_halves(block, count, BYTES, EACH, halves);                                          \
    }                                                                                              \
    INLINE void NAME##_scales(const uint8_t *block, const uint16_t *halves, uint32_t count,        \
                              float *out)                                                          \
    {                                                                                              \
        (void)block;                                                                               \
        convert_halves(halves, (count) * (EACH), out);                                             \
    }

/* Converting these scales one by one is fast enough: memory is slower. */
NOTHING_TO_GATHER(q8_0, (void)0)
VALUES(q8_0)
{
    scaled(bytes_load(block + 2), lanes_set(scalar_f16(block)), a, b);
}

HALVES_TO_GATHER(q4_0, 18, 1)
VALUES(q4_0)
{
    codes_of_16_bytes(codes_centred(lanes_set(scales[i]), 8.0f), block + 2, a, b);
}

HALVES_TO_GATHER(q4_1, 20, 2)
VALUES(q4_1)
{
    lanes scale = lanes_set(scales[2 * i]), least = lanes_set(scales[2 * i + 1]);
    codes_of_16_bytes(codes_affine(scale, least), block + 4, a, b);
}

/* Unpacks thirty-two codes: a word with the fifth bits, then the lower four of each. */
INLINE bytes32 codes_of_five_bits(const uint8_t *from)
{
    return bytes_or(bytes_of_nibbles(from + 4), bytes_of_bits(from, 16));
}

HALVES_TO_GATHER(q5_0, 22, 1)
VALUES(q5_0)
{
    scaled(bytes_sub(codes_of_five_bits(block + 2), 16), lanes_set(scales[i]), a, b);
}

HALVES_TO_GATHER(q5_1, 24, 2)
VALUES(q5_1)
{
    lanes scale = lanes_set(scales[2 * i]), least = lanes_set(scales[2 * i + 1]);
    scaled_from(codes_of_five_bits(block + 4), scale, least, a, b);
}

HALVES_TO_GATHER(iq4_nl, 18, 1)
VALUES(iq4_nl)
{
    static const int8_t TABLE[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                     1,    13,   25,  38,  53,  69,  89,  113};
    scaled(bytes_look_up(TABLE, bytes_of_nibbles(block + 2)), lanes_set(scales[i]), a, b);
}

NOTHING_TO_GATHER(q4_k, k_scales(block, out))
VALUES(q4_k)
{
    codebook book = codes_affine(lanes_set(scales[sub]), lanes_set(scales[8 + sub]));
    codes_of_32_bytes(book, block + 16 + 32 * (sub / 2), sub % 2, a, b);
}

NOTHING_TO_GATHER(q5_k, k_scales(block, out))
VALUES(q5_k)
{
    lanes scale = lanes_set(scales[sub]), offset = lanes_set(scales[8 + sub]);
    bytes32 low = bytes_bits(bytes_load(block + 48 + 32 * (sub / 2)), 4 * (sub % 2), 15);
    bytes32 high = bytes_up(bytes_bits(bytes_load(block + 16), sub, 1), 4);
    scaled_from(bytes_or(low, high), scale, offset, a, b);
}

NOTHING_TO_GATHER(q6_k, out[0] = scalar_f16(block + 208))
VALUES(q6_k)
{
    const int8_t *its = (const int8_t *)block + 192 + 2 * sub;
    int half = sub / 4, quarter = sub % 4;
    bytes32 low = bytes_load(block + 64 * half + 32 * (quarter % 2));
    bytes32 high = bytes_load(block + 128 + 32 * half);
    low = bytes_bits(low, 4 * (quarter / 2), 15);
    high = bytes_up(bytes_bits(high, 2 * quarter, 3), 4);
    bytes32 codes = bytes_sub(bytes_or(low, high), 32);
    *a = lanes_mul(bytes_first(codes), lanes_set(scales[0] * (float)its[0]));
    *b = lanes_mul(bytes_second(codes), lanes_set(scales[0] * (float)its[1]));
}

/* For each type: NAME_unpack unpacks a row, and NAME_rows computes the products of one row of x
 * with `count` rows of weights, four at a time to hide the latency of additions. */

#define AT_A_TIME 4

/* Weights come from memory.  Processors prefetch one stream of bytes, but not four rows at once: so
 * the rows after these are prefetched by instructions, as one stream. */
#define BLOCKS(NAME, SUBS, BYTES)                                                                  \
    static void NAME##_unpack(const uint8_t *row, uint32_t columns, float *out)                    \
    {                                                                                              \
        const uint32_t group = SUBS == 1 ? 64 : 1;                                                 \
        uint16_t halves[GROUP_SCALES];                                                             \
        float scales[GROUP_SCALES];                                                                \
        for (uint32_t left = columns / (32 * SUBS); left;) {                                       \
            uint32_t count = left < group ? left : group;                                          \
            NAME##_gather(row, count, halves);                                                     \
            NAME##_scales(row, halves, count, scales);                                             \
            for (uint32_t i = 0; i < count; i++, row += BYTES)                                     \
                _Pragma("GCC unroll 8") for (int sub = 0; sub < SUBS; sub++, out += 32)            \
                {                                                                                  \
                    lanes a, b;                                                                    \
                    NAME##_values(row, scales, i, sub, &a, &b);                                    \
                    lanes_store(out, a);                                                           \
                    lanes_store(out + 16, b);                                                      \
                }                                                                                  \
            left -= count;                                                                         \
        }                                                                                          \
    }                                                                                              \
    INLINE void NAME##_some(const uint8_t *row, size_t row_bytes, uint32_t columns,                \
                            const float *x, float *out, const int rows)                            \
    {                                                                                              \
        const uint32_t group = SUBS == 1 ? 64 : 1;                                                 \
        uint16_t halves[AT_A_TIME][GROUP_SCALES];                                                  \
        float scales[AT_A_TIME][GROUP_SCALES];                                                     \
        lanes sums[AT_A_TIME];                                                                     \
        const uint8_t *next = row + (size_t)rows * row_bytes;                                      \
        for (int r = 0; r < rows; r++)                                                             \
            sums[r] = lanes_set(0.0f);                                                             \
        for (uint32_t left = columns / (32 * SUBS); left;) {                                       \
            uint32_t count = left < group ? left : group;                                          \
            for (int r = 0; r < rows; r++)                                                         \
                NAME##_gather(row + (size_t)r * row_bytes, count, halves[r]);                      \
            for (int r = 0; r < rows; r++)                                                         \
                NAME##_scales(row + (size_t)r * row_bytes, halves[r], count, scales[r]);           \
            for (uint32_t i = 0; i < count; i++, row += BYTES) {                                   \
                for (int at = 0; at < rows * BYTES; at += 64)                                      \
                    __builtin_prefetch(next + at);                                                 \
                next += rows * BYTES;                                                              \
                _Pragma("GCC unroll 8") for (int sub = 0; sub < SUBS; sub++, x += 32)              \
                {                                                                                  \
                    lanes first = lanes_load(x), second = lanes_load(x + 16);                      \
                    _Pragma("GCC unroll 4") for (int r = 0; r < rows; r++)                         \
                    {                                                                              \
                        lanes a, b;                                                                \
                        NAME##_values(row + (size_t)r * row_bytes, scales[r], i, sub, &a, &b);     \
                        sums[r] = lanes_fma(a, first, sums[r]);                                    \
                        sums[r] = lanes_fma(b, second, sums[r]);                                   \
                    }                                                                              \
                }                                                                                  \
            }                                                                                      \
            left -= count;                                                                         \
        }                                                                                          \
        for (int r = 0; r < rows; r++)                                                             \
            out[r] = lanes_sum(sums[r]);                                                           \
    }                                                                                              \
    ROWS(NAME)

/* Rows one after the other: one stream, which the processor prefetches; out-of-order execution
 * overlaps several rows. */
#define FLOATS(NAME, BYTES)                                                                        \
    static void NAME##_unpack(const uint8_t *row, uint32_t columns, float *out)                    \
    {                                                                                              \
        uint32_t k = 0;                                                                            \
        for (; k + 16 <= columns; k += 16)                                                         \
            lanes_store(out + k, NAME##_lanes(row + (size_t)k * BYTES));                           \
        if (k < columns)                                                                           \
            lanes_store_part(out + k, columns - k,                                                 \
                             NAME##_part(row + (size_t)k * BYTES, columns - k));                   \
    }                                                                                              \
    static void NAME##_rows(const uint8_t *row, size_t row_bytes, uint32_t columns,                \
                            const float *x, float *out, uint32_t count)                            \
    {                                                                                              \
        for (; count; count--, row += row_bytes) {                                                 \
            lanes sum = lanes_set(0.0f);                                                           \
            uint32_t k = 0;                                                                        \
            for (; k + 16 <= columns; k += 16)                                                     \
                sum = lanes_fma(NAME##_lanes(row + (size_t)k * BYTES), lanes_load(x + k), sum);    \
            if (k < columns)                                                                       \
                sum = lanes_fma(NAME##_part(row + (size_t)k * BYTES, columns - k),                 \
                                lanes_load_part(x + k, columns - k), sum);                         \
            *out++ = lanes_sum(sum);                                                               \
        }                                                                                          \
    }

#define ROWS(NAME)                                                                                 \
    static void NAME##_rows(const uint8_t *row, size_t row_bytes, uint32_t columns,                \
                            const float *x, float *out, uint32_t count)                            \
    {                                                                                              \
        for (; count >= AT_A_TIME; count -= AT_A_TIME) {                                           \
            NAME##_some(row, row_bytes, columns, x, out, AT_A_TIME);                               \
            row += AT_A_TIME * row_bytes;                                                          \
            out += AT_A_TIME;                                                                      \
        }                                                                                          \
        for (; count; count--, row += row_bytes)                                                   \
            NAME##_some(row, row_bytes, columns, x, out++, 1);                                     \
    }

FLOATS(f32, 4)
FLOATS(f16, 2)
FLOATS(bf16, 2)
BLOCKS(q4_0, 1, 18)
BLOCKS(q4_1, 1, 20)
BLOCKS(q5_0, 1, 22)
BLOCKS(q5_1, 1, 24)
BLOCKS(iq4_nl, 1, 18)
BLOCKS(q8_0, 1, 34)
BLOCKS(q4_k, 8, 144)
BLOCKS(q5_k, 8, 176)
BLOCKS(q6_k, 8, 210)

#define BY_KIND(KIND, CALL, ...)                                                                   \
    switch (KIND) {                                                                                \
    case KIND_F32: f32_##CALL(__VA_ARGS__); break;                                                 \
    case KIND_F16: f16_##CALL(__VA_ARGS__); break;                                                 \
    case KIND_BF16: bf16_##CALL(__VA_ARGS__); break;                                               \
    case KIND_Q4_0: q4_0_##CALL(__VA_ARGS__); break;                                               \
    case KIND_Q4_1: q4_1_##CALL(__VA_ARGS__); break;                                               \
    case KIND_Q5_0: q5_0_##CALL(__VA_ARGS__); break;                                               \
    case KIND_Q5_1: q5_1_##CALL(__VA_ARGS__); break;                                               \
    case KIND_IQ4_NL: iq4_nl_##CALL(__VA_ARGS__); break;                                           \
    case KIND_Q8_0: q8_0_##CALL(__VA_ARGS__); break;                                               \
    case KIND_Q4_K: q4_k_##CALL(__VA_ARGS__); break;                                               \
    case KIND_Q5_K: q5_k_##CALL(__VA_ARGS__); break;                                               \
    case KIND_Q6_K: q6_k_##CALL(__VA_ARGS__); break;                                               \
    }

static void unpack(enum kind kind, const uint8_t *row, uint32_t columns, float *out)
{
    BY_KIND(kind, unpack, row, columns, out)
}

/* ------------------------------------------------------------------------------------- products */

/* out[i * out_a + j * out_b] = a[i] . b[j] */
INLINE void tile(const float *a, size_t a_stride, const float *b, size_t b_stride, uint32_t width,
                 float *out, size_t out_a, size_t out_b, const int a_count, const int b_count)
{
    lanes sums[TILE][TILE];
    uint32_t k = 0;
    for (int i = 0; i < a_count; i++)
        for (int j = 0; j < b_count; j++)
            sums[i][j] = lanes_set(0.0f);
    for (; k + 16 <= width; k += 16) {
        lanes right[TILE];
        _Pragma("GCC unroll 4") for (int j = 0; j < b_count; j++)
            right[j] = lanes_load(b + (size_t)j * b_stride + k);
        _Pragma("GCC unroll 4") for (int i = 0; i < a_count; i++)
        {
            lanes left = lanes_load(a + (size_t)i * a_stride + k);
            _Pragma("GCC unroll 4") for (int j = 0; j < b_count; j++)
                sums[i][j] = lanes_fma(left, right[j], sums[i][j]);
        }
    }
    if (k < width) {
        lanes right[TILE];
        for (int j = 0; j < b_count; j++)
            right[j] = lanes_load_part(b + (size_t)j * b_stride + k, width - k);
        for (int i = 0; i < a_count; i++) {
            lanes left = lanes_load_part(a + (size_t)i * a_stride + k, width - k);
            for (int j = 0; j < b_count; j++)
                sums[i][j] = lanes_fma(left, right[j], sums[i][j]);
        }
    }
    _Pragma("GCC unroll 4") for (int i = 0; i < a_count; i++)
        _Pragma("GCC unroll 4") for (int j = 0; j < b_count; j++)
            out[(size_t)i * out_a + (size_t)j * out_b] = lanes_sum(sums[i][j]);
}

static void whole_tile(const float *a, size_t a_stride, const float *b, size_t b_stride,
                       uint32_t width, float *out, size_t out_a, size_t out_b)
{
    tile(a, a_stride, b, b_stride, width, out, out_a, out_b, TILE, TILE);
}

static void thin_tile(const float *a, size_t a_stride, const float *b, size_t b_stride,
                      uint32_t width, float *out, size_t out_a, size_t out_b)
{
    tile(a, a_stride, b, b_stride, width, out, out_a, out_b, 1, TILE);
}

static void single_tile(const float *a, const float *b, uint32_t width, float *out)
{
    tile(a, 0, b, 0, width, out, 0, 0, 1, 1);
}

/* Like `tile`, for any numbers of rows. */
static void tiles(const float *a, size_t a_stride, uint32_t a_count, const float *b,
                  size_t b_stride, uint32_t b_count, uint32_t width, float *out, size_t out_a,
                  size_t out_b)
{
    uint32_t j = 0;
    for (; j + TILE <= b_count; j += TILE) {
        const float *right = b + (size_t)j * b_stride;
        uint32_t i = 0;
        for (; i + TILE <= a_count; i += TILE)
            whole_tile(a + (size_t)i * a_stride, a_stride, right, b_stride, width,
                       out + (size_t)i * out_a + (size_t)j * out_b, out_a, out_b);
        for (; i < a_count; i++)
            thin_tile(a + (size_t)i * a_stride, a_stride, right, b_stride, width,
                      out + (size_t)i * out_a + (size_t)j * out_b, out_a, out_b);
    }
    for (; j < b_count; j++) {
        const float *right = b + (size_t)j * b_stride;
        uint32_t i = 0;
        for (; i + TILE <= a_count; i += TILE) /* with swapped sides: products commute */
            thin_tile(right, b_stride, a + (size_t)i * a_stride, a_stride, width,
                      out + (size_t)i * out_a + (size_t)j * out_b, out_b, out_a);
        for (; i < a_count; i++)
            single_tile(a + (size_t)i * a_stride, right, width,
                        out + (size_t)i * out_a + (size_t)j * out_b);
    }
}

static size_t product_scratch(uint32_t columns)
{
    return (size_t)TILE * (((size_t)columns + 15) / 16 * 16);
}

static void product(const matrix *weight, uint32_t first, uint32_t last, const float *x,
                    size_t x_stride, uint32_t rows, float *out, size_t out_stride, float *scratch)
{
    uint32_t columns = weight->columns, start = 0;
    size_t wide = ((size_t)columns + 15) / 16 * 16;
    for (uint32_t p = 0; p < weight->part_count; p++) {
        const part *one = &weight->parts[p];
        uint32_t from = first > start ? first - start : 0;
        uint32_t to = last > start ? last - start : 0;
        if (to > one->rows)
            to = one->rows;
        float *target = out + (start + from - first);
        start += one->rows;
        if (from >= to)
            continue;
        const uint8_t *row = one->data + from * one->row_bytes;
        if (rows == 1) {
            BY_KIND(one->kind, rows, row, one->row_bytes, columns, x, target, to - from)
            continue;
        }
        for (; from < to; from += TILE, row += TILE * one->row_bytes, target += TILE) {
            uint32_t count = to - from < TILE ? to - from : TILE;
            for (uint32_t i = 0; i < count; i++)
                unpack(one->kind, row + i * one->row_bytes, columns, scratch + i * wide);
            tiles(scratch, wide, count, x, x_stride, rows, columns, target, 1, out_stride);
        }
    }
}

/* ----------------------------------------------------------------------------- between products */

/* The exponential, with an error of up to 2 units in the last place. */
INLINE lanes exponential(lanes x)
{
    /* Beyond these limits the result is infinity or 0.  NaN, the second operand, is kept. */
    x = lanes_max(lanes_set(-104.0f), lanes_min(lanes_set(89.0f), x));
    lanes whole = lanes_round(lanes_mul(x, lanes_set(1.44269504088896341f)));
    lanes rest = lanes_sub(x, lanes_mul(whole, lanes_set(0.693359375f)));
    rest = lanes_sub(rest, lanes_mul(whole, lanes_set(-2.12194440e-4f)));
    lanes sum = lanes_set(1.9875691500e-4f);
    sum = lanes_fma(sum, rest, lanes_set(1.3981999507e-3f));
    sum = lanes_fma(sum, rest, lanes_set(8.3334519073e-3f));
    sum = lanes_fma(sum, rest, lanes_set(4.1665795894e-2f));
    sum = lanes_fma(sum, rest, lanes_set(1.6666665459e-1f));
    sum = lanes_fma(sum, rest, lanes_set(5.0000001201e-1f));
    sum = lanes_add(lanes_fma(sum, lanes_mul(rest, rest), rest), lanes_set(1.0f));
    /* In two steps, since the power itself may be outside the range of a float. */
    lanes half = lanes_round(lanes_mul(whole, lanes_set(0.5f)));
    sum = lanes_mul(sum, lanes_power_of_two(half));
    return lanes_mul(sum, lanes_power_of_two(lanes_sub(whole, half)));
}

static void norm(const float *x, const float *weight, uint32_t width, float epsilon, float *out)
{
    lanes squares = lanes_set(0.0f);
    uint32_t k = 0;
    for (; k + 16 <= width; k += 16) {
        lanes a = lanes_load(x + k);
        squares = lanes_fma(a, a, squares);
    }
    if (k < width) {
        lanes a = lanes_load_part(x + k, width - k);
        squares = lanes_fma(a, a, squares);
    }
    float root = sqrtf(lanes_sum(squares) / (float)width + epsilon);
    lanes scale = lanes_set(1.0f / root);
    for (k = 0; k + 16 <= width; k += 16)
        lanes_store(out + k,
                    lanes_mul(lanes_mul(lanes_load(x + k), scale), lanes_load(weight + k)));
    if (k < width) {
        lanes a = lanes_mul(lanes_load_part(x + k, width - k), scale);
        lanes_store_part(out + k, width - k,
                         lanes_mul(a, lanes_load_part(weight + k, width - k)));
    }
}

INLINE lanes gated(lanes gate, lanes up)
{
    lanes below = lanes_add(exponential(lanes_sub(lanes_set(0.0f), gate)), lanes_set(1.0f));
    return lanes_mul(lanes_div(gate, below), up);
}

static void gate(const float *left, const float *up, uint32_t count, float *out)
{
    uint32_t k = 0;
    for (; k + 16 <= count; k += 16)
        lanes_store(out + k, gated(lanes_load(left + k), lanes_load(up + k)));
    if (k < count)
        lanes_store_part(
            out + k, count - k,
            gated(lanes_load_part(left + k, count - k), lanes_load_part(up + k, count - k)));
}

static void add(float *x, const float *y, uint32_t count)
{
    for (uint32_t k = 0; k < count; k++)
        x[k] += y[k];
}

static void rotate(const float *x, const float *cosine, const float *sine, uint32_t half,
                   float *restrict out)
{
    for (uint32_t i = 0; i < half; i++) {
        float left = x[i], right = x[half + i];
        out[i] = left * cosine[i] - right * sine[i];
        out[half + i] = right * cosine[i] + left * sine[i];
    }
}

/* ------------------------------------------------------------------------------------ attention */

/* out[i] = the sum over positions of scores[i, position] * values[position], divided by totals[i],
 * for `vectors` vectors of sixteen values of each row; each has `last` valid values. */
INLINE void mix(const float *scores, size_t scores_stride, const float *values, uint32_t head_size,
                uint32_t positions, const float *totals, float *out, const int queries,
                const int vectors, const uint32_t last)
{
    lanes sums[TILE][MIX_VECTORS];
    for (int i = 0; i < queries; i++)
        for (int v = 0; v < vectors; v++)
            sums[i][v] = lanes_set(0.0f);
    for (uint32_t t = 0; t < positions; t++, values += head_size) {
        lanes right[MIX_VECTORS];
        _Pragma("GCC unroll 4") for (int v = 0; v < vectors; v++)
            right[v] = last == 16 ? lanes_load(values + 16 * v)
                                  : lanes_load_part(values + 16 * v, last);
        _Pragma("GCC unroll 4") for (int i = 0; i < queries; i++)
        {
            lanes left = lanes_set(scores[(size_t)i * scores_stride + t]);
            _Pragma("GCC unroll 4") for (int v = 0; v < vectors; v++)
                sums[i][v] = lanes_fma(left, right[v], sums[i][v]);
        }
    }
    for (int i = 0; i < queries; i++)
        for (int v = 0; v < vectors; v++) {
            lanes mixed = lanes_div(sums[i][v], lanes_set(totals[i]));
            float *to = out + (size_t)i * head_size + 16 * v;
            if (last == 16)
                lanes_store(to, mixed);
            else
                lanes_store_part(to, last, mixed);
        }
}

/* Replaces scores by their exponentials, relative to the highest.  Returns the sum of these. */
static float weigh(float *scores, uint32_t count)
{
    float highest = -INFINITY;
    uint32_t k = 0;
    if (count >= 16) {
        float each[16];
        lanes most = lanes_load(scores);
        for (k = 16; k + 16 <= count; k += 16)
            most = lanes_max(most, lanes_load(scores + k));
        lanes_store(each, most);
        for (int i = 0; i < 16; i++)
            highest = each[i] > highest ? each[i] : highest;
    }
    for (; k < count; k++)
        highest = scores[k] > highest ? scores[k] : highest;
    lanes total = lanes_set(0.0f), less = lanes_set(highest);
    for (k = 0; k + 16 <= count; k += 16) {
        lanes a = exponential(lanes_sub(lanes_load(scores + k), less));
        lanes_store(scores + k, a);
        total = lanes_add(total, a);
    }
    if (k < count) {
        lanes a = exponential(lanes_sub(lanes_load_part(scores + k, count - k), less));
        lanes_store_part(scores + k, count - k, a);
        total = lanes_add(total, lanes_load_part(scores + k, count - k));
    }
    return lanes_sum(total);
}

/* The first position that a row of the piece attends to. */
static uint32_t begin_of(const attention_piece *piece, uint32_t row)
{
    uint32_t end = piece->position + row + 1;
    return piece->window && end > piece->window ? end - piece->window : 0;
}

static size_t attend_scratch(const attention_piece *piece)
{
    size_t count = (size_t)piece->position + piece->rows - begin_of(piece, 0);
    return (size_t)piece->rows * piece->queries * (piece->head_size + (count + 15) / 16 * 16 + 1);
}

static void attend(const attention_piece *piece, float *scratch)
{
    uint32_t size = piece->head_size, queries = piece->queries;
    uint32_t first = begin_of(piece, 0); /* the first row's; later rows begin there or later */
    uint32_t all = piece->rows * queries, count = piece->position + piece->rows - first;
    size_t stride = ((size_t)count + 15) / 16 * 16;
    float *scaled = scratch, *scores = scaled + (size_t)all * size;
    float *totals = scores + (size_t)all * stride;
    for (uint32_t row = 0; row < piece->rows; row++)
        for (uint32_t k = 0; k < queries * size; k++)
            scaled[(size_t)row * queries * size + k] =
                piece->q[(size_t)row * piece->row_stride + k] * piece->scale;
    tiles(scaled, size, all, piece->keys + (size_t)first * size, size, count, size, scores, stride,
          1);
    for (uint32_t row = 0; row < piece->rows; row++) {
        uint32_t begin = begin_of(piece, row);
        uint32_t positions = piece->position + row + 1 - begin; /* the row attends to these alone */
        float *ours = scores + (size_t)row * queries * stride + (begin - first);
        const float *values = piece->values + (size_t)begin * size;
        float *out = piece->out + (size_t)row * piece->row_stride;
        for (uint32_t i = 0; i < queries; i++)
            totals[i] = weigh(ours + i * stride, positions);
        uint32_t i = 0;
        for (; i < queries;) {
            uint32_t most = queries - i >= TILE ? TILE : 1, at = 0;
            float *to = out + (size_t)i * size;
            const float *from = ours + (size_t)i * stride;
            for (; at + 16 * MIX_VECTORS <= size; at += 16 * MIX_VECTORS) {
                if (most == TILE)
                    mix(from, stride, values + at, size, positions, totals + i, to + at,
                        TILE, MIX_VECTORS, 16);
                else
                    mix(from, stride, values + at, size, positions, totals + i, to + at, 1,
                        MIX_VECTORS, 16);
            }
            for (; at < size; at += 16) {
                uint32_t last = size - at < 16 ? size - at : 16;
                for (uint32_t j = 0; j < most; j++)
                    mix(from + j * stride, stride, values + at, size, positions,
                        totals + i + j, to + (size_t)j * size + at, 1, 1, last);
            }
            i += most;
        }
    }
}

static const kernel_set kernels = {
    .name = NAME,
    .unpack = unpack,
    .product_scratch = product_scratch,
    .product = product,
    .norm = norm,
    .gate = gate,
    .add = add,
    .rotate = rotate,
    .attend_scratch = attend_scratch,
    .attend = attend,
};
