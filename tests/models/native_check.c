/* Runs every kernel of every instruction set that the processor has on the same inputs, and prints
 * one line for each: its name and a digest of all bits of the results.
 *
 * test_native_sets.py compiles it with the kernels alone (no Python), also for other processors. */

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "native.h"

#define COLUMNS 512
#define ROWS 11
#define MOST_BYTES (ROWS * COLUMNS * 4)

static uint64_t digest;

static void
take(const float *values, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, &values[i], 4);
        if (values[i] != values[i])
            bits = 0x7FC00000; /* which NaN a NaN is differs */
        digest = (digest ^ bits) * 1099511628211u;
    }
}

static uint32_t state;

static uint32_t
next_number(void)
{
    state = state * 1664525 + 1013904223;
    return state >> 8;
}

static float
next_float(void)
{
    return (float)next_number() / 8388608.0f - 1.0f;
}

static const struct {
    enum kind kind;
    uint32_t values, bytes;
    int halves[2];
} KINDS[] = {
    {KIND_F32, 1, 4, {-1, -1}},      {KIND_F16, 1, 2, {0, -1}},      {KIND_BF16, 1, 2, {-1, -1}},
    {KIND_Q4_0, 32, 18, {0, -1}},    {KIND_Q4_1, 32, 20, {0, 2}},    {KIND_Q8_0, 32, 34, {0, -1}},
    {KIND_Q4_K, 256, 144, {0, 2}},   {KIND_Q5_K, 256, 176, {0, 2}},  {KIND_Q6_K, 256, 210, {208, -1}},
    {KIND_Q5_0, 32, 22, {0, -1}},    {KIND_Q5_1, 32, 24, {0, 2}},    {KIND_IQ4_NL, 32, 18, {0, -1}},
};

/* A half float of moderate size, or now and then one below the normal numbers. */
static uint16_t
next_half(void)
{
    uint32_t number = next_number();
    uint32_t exponent = number % 11 == 0 ? 0 : 8 + number % 7;
    return (uint16_t)((number & 0x8000) | exponent << 10 | (number >> 4 & 0x3FF));
}

static void
run_kind(const kernel_set *set, size_t k, uint32_t columns)
{
    static uint8_t packed[MOST_BYTES];
    static float x[7 * COLUMNS], out[7 * ROWS], values[COLUMNS];
    size_t row_bytes = (size_t)columns / KINDS[k].values * KINDS[k].bytes;
    for (size_t i = 0; i < ROWS * row_bytes; i++)
        packed[i] = (uint8_t)next_number();
    for (size_t at = 0; at < ROWS * row_bytes; at += KINDS[k].bytes)
        if (KINDS[k].kind == KIND_F32) {
            float value = next_float();
            memcpy(packed + at, &value, 4);
        }
        else if (KINDS[k].kind == KIND_BF16) {
            float value = next_float();
            memcpy(packed + at, (char *)&value + 2, 2);
        }
        else
            for (int h = 0; h < 2; h++)
                if (KINDS[k].halves[h] >= 0) {
                    uint16_t half = next_half();
                    memcpy(packed + at + KINDS[k].halves[h], &half, 2);
                }
    for (size_t i = 0; i < 7 * columns; i++)
        x[i] = next_float();
    matrix weight = {ROWS, columns, 1, {{KINDS[k].kind, ROWS, row_bytes, packed}}};
    float *scratch = malloc(set->product_scratch(columns) * sizeof *scratch);
    if (scratch == NULL)
        abort();
    for (int r = 0; r < ROWS; r++) {
        set->unpack(KINDS[k].kind, packed + r * row_bytes, columns, values);
        take(values, columns);
    }
    set->product(&weight, 0, ROWS, x, columns, 1, out, ROWS, scratch);
    take(out, ROWS);
    set->product(&weight, 0, ROWS, x, columns, 7, out, ROWS, scratch);
    take(out, 7 * ROWS);
    set->product(&weight, 2, 9, x, columns, 3, out, ROWS, scratch);
    take(out, 7);
    free(scratch);
}

static void
run_others(const kernel_set *set)
{
    static float a[1000], b[1000], c[1000], keys[60 * 40], values[60 * 40];
    for (int i = 0; i < 1000; i++) {
        a[i] = next_float() * (i % 9 ? 3.0f : 120.0f);
        b[i] = next_float();
    }
    for (int i = 0; i < 60 * 40; i++) {
        keys[i] = next_float();
        values[i] = next_float();
    }
    a[3] = INFINITY, a[17] = -INFINITY, a[40] = NAN;
    set->gate(a, b, 999, c);
    take(c, 999);
    a[3] = a[17] = a[40] = 1.0f;
    set->norm(a, b, 999, 1e-5f, c);
    take(c, 999);
    set->add(c, b, 999);
    take(c, 999);
    set->rotate(a, b, b + 50, 25, c);
    take(c, 50);
    attention_piece piece = {a, c, keys, values, 240, 4, 6, 55, 0, 40, 0.3f};
    float *scratch = malloc(set->attend_scratch(&piece) * sizeof *scratch);
    if (scratch == NULL)
        abort();
    set->attend(&piece, scratch);
    take(c, 4 * 240);
    piece.window = 17; /* less than a vector more than sixteen, and none of the rows' first */
    set->attend(&piece, scratch);
    take(c, 4 * 240);
    free(scratch);
}

int
main(void)
{
    const kernel_set *(*const makers[])(void) = {KERNEL_SETS};
    for (size_t i = 0; i < sizeof makers / sizeof *makers; i++) {
        const kernel_set *set = makers[i]();
        if (set == NULL)
            continue;
        digest = 14695981039346656037u;
        state = 1;
        for (size_t k = 0; k < sizeof KINDS / sizeof *KINDS; k++)
            for (int wide = 0; wide < 2; wide++)
                run_kind(set, k, KINDS[k].values == 1 && wide ? 333 : 256 << wide);
        run_others(set);
        printf("%s %016llx\n", set->name, (unsigned long long)digest);
    }
    return 0;
}
