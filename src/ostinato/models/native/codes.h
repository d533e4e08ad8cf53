/* Four-bit codes by arithmetic, for processors without a look-up of sixteen values, and loads and
 * stores of fewer than sixteen floats, for processors without masked ones. */

typedef struct {
    lanes scale, offset;
    int centred; /* a constant.  1: (code - offset) * scale; 0: code * scale + offset */
} codebook;

INLINE codebook codes_affine(lanes scale, lanes offset) { return (codebook){scale, offset, 0}; }
INLINE codebook codes_centred(lanes scale, float centre)
{
    return (codebook){scale, lanes_set(centre), 1};
}
INLINE lanes codes_value(codebook book, lanes code)
{
    return book.centred ? lanes_mul(lanes_sub(code, book.offset), book.scale)
                        : lanes_add(lanes_mul(code, book.scale), book.offset);
}
INLINE void codes_of_16_bytes(codebook book, const uint8_t *from, lanes *low, lanes *high)
{
    bytes32 codes = bytes_of_nibbles(from);
    *low = codes_value(book, bytes_first(codes));
    *high = codes_value(book, bytes_second(codes));
}
INLINE void codes_of_32_bytes(codebook book, const uint8_t *from, int high, lanes *a, lanes *b)
{
    bytes32 codes = bytes_bits(bytes_load(from), high ? 4 : 0, 15);
    *a = codes_value(book, bytes_first(codes));
    *b = codes_value(book, bytes_second(codes));
}

INLINE lanes lanes_load_part(const float *from, uint32_t count)
{
    float whole[16] = {0};
    memcpy(whole, from, count * sizeof *from);
    return lanes_load(whole);
}
INLINE void lanes_store_part(float *to, uint32_t count, lanes x)
{
    float whole[16];
    lanes_store(whole, x);
    memcpy(to, whole, count * sizeof *to);
}
