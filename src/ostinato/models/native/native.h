/* Types that the parts of ostinato.models._native share. */

#ifndef OSTINATO_NATIVE_H
#define OSTINATO_NATIVE_H

#include <stddef.h>
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))

/* Tensor types, with their numbers in GGUF. */
enum kind {
    KIND_F32 = 0,
    KIND_F16 = 1,
    KIND_Q4_0 = 2,
    KIND_Q4_1 = 3,
    KIND_Q5_0 = 6,
    KIND_Q5_1 = 7,
    KIND_Q8_0 = 8,
    KIND_Q4_K = 12,
    KIND_Q5_K = 13,
    KIND_Q6_K = 14,
    KIND_IQ4_NL = 20,
    KIND_BF16 = 30,
};

/* Consecutive rows of one type. */
typedef struct {
    enum kind kind;
    uint32_t rows;
    size_t row_bytes;
    const uint8_t *data;
} part;

#define MOST_PARTS 3 /* queries, keys and values */

/* A matrix, [rows, columns]: the rows of its parts, one part after the other. */
typedef struct {
    uint32_t rows, columns, part_count;
    part parts[MOST_PARTS];
} matrix;

/* A piece of attention: rows of one sequence at increasing positions, and one KV head. */
typedef struct {
    const float *q;          /* queries of the first row and the first query head */
    float *out;              /* the result of the first row and the first query head */
    const float *keys;       /* [positions, head_size] of the sequence and the KV head */
    const float *values;     /* [positions, head_size], likewise */
    size_t row_stride;       /* floats from a row's queries to the next row's */
    uint32_t rows, queries;  /* `queries`: query heads of each row */
    uint32_t position;       /* position of the first row */
    uint32_t window;         /* positions that a row attends to, its own included; 0: all */
    uint32_t head_size;
    float scale;
} attention_piece;

/* The kernels for one instruction set.
 *
 * Every sum runs over sixteen lanes in order of the index, then over the lanes as a tree.  So an
 * output depends on its inputs alone, and not on the number of rows, the thread or the split into
 * pieces.  All instruction sets give the same bits. */
typedef struct {
    const char *name;
    /* Unpacks a row's values. */
    void (*unpack)(enum kind kind, const uint8_t *row, uint32_t columns, float *out);
    /* The number of floats of scratch memory that `product` needs. */
    size_t (*product_scratch)(uint32_t columns);
    /* out[r, n - first] = x[r] . weight[n] for `first` <= n < `last` and `rows` rows of x. */
    void (*product)(const matrix *weight, uint32_t first, uint32_t last, const float *x,
                    size_t x_stride, uint32_t rows, float *out, size_t out_stride,
                    float *scratch);
    /* out = x / root of the mean square * weight */
    void (*norm)(const float *x, const float *weight, uint32_t width, float epsilon, float *out);
    /* out = silu(gate) * up */
    void (*gate)(const float *gate, const float *up, uint32_t count, float *out);
    /* x += y */
    void (*add)(float *x, const float *y, uint32_t count);
    /* Rope in the half-split order; `out` may not overlap `x`. */
    void (*rotate)(const float *x, const float *cosine, const float *sine, uint32_t half,
                   float *out);
    size_t (*attend_scratch)(const attention_piece *piece);
    void (*attend)(const attention_piece *piece, float *scratch);
} kernel_set;

/* The kernels for an instruction set; NULL if the processor does not have its instructions. */
const kernel_set *ostinato_avx512(void);
const kernel_set *ostinato_avx2(void);
const kernel_set *ostinato_neon(void);

/* The kernel sets that are compiled for this architecture, the best first. */
#if defined(__x86_64__)
#define KERNEL_SETS ostinato_avx512, ostinato_avx2
#elif defined(__aarch64__) && defined(__ARM_NEON)
#define KERNEL_SETS ostinato_neon
#else
#error "there are kernels for x86-64 and 64-bit Arm; elsewhere NumPy computes"
#endif

#endif
