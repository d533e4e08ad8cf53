/* ostinato.models._native: the layer program's host kernels on packed weights.
 *
 * models/host/packed_kernels.py documents the module; models/host/kernels.py implements the same in
 * NumPy, for installations without it.  A kernel checks that all of its accesses lie within its
 * arguments, releases the GIL, and distributes its rows to a pool of threads.
 *
 * The limited API of CPython 3.11 lets one build serve every later version. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <stdlib.h>
#include <string.h>

#include "native.h"
#include "pool.h"

#define ACTIVE 1
#define SAMPLE 2
#define FROM_STATE 4

#define MOST_ARRAYS 9
#define MOST_THREADS 1024

/* The approximate size of a part of a product, in weights for one row: some microseconds, so that
 * taking parts costs little and the wait for the last one is short. */
#define PART_VALUES 32768
/* The most scores of a piece of attention, unless it is a single row. */
#define PIECE_SCORES (1 << 18)
#define PIECE_ROWS 8

typedef struct {
    PyObject_HEAD
    pool *pool;
    const kernel_set *set;
} Kernels;

/* ------------------------------------------------------------------------------------ arguments */

typedef struct {
    const char *kernel;
    PyObject *const *given;
    Py_ssize_t at;
    Py_buffer arrays[MOST_ARRAYS];
    int array_count;
} arguments;

/* Begins to read a kernel's arguments; raises TypeError if their number is wrong.  Returns the object
 * with the kernels, whose threads the first call in a process starts.  After an exception `take_…`
 * returns 0 and reads no argument, and `need…` checks nothing. */
static Kernels *
begin_arguments(arguments *self, PyObject *op, const char *kernel, PyObject *const *given,
                Py_ssize_t count, Py_ssize_t wanted)
{
    Kernels *kernels = (Kernels *)op;
    pool_prepare(kernels->pool);
    self->kernel = kernel;
    self->given = given;
    self->at = 1; /* after the launch, which is not used */
    self->array_count = 0;
    if (count != wanted + 1)
        PyErr_Format(PyExc_TypeError, "%s takes a launch and %zd arguments, and %zd were given",
                     kernel, wanted, count);
    return kernels;
}

static void
end_arguments(arguments *self)
{
    while (self->array_count)
        PyBuffer_Release(&self->arrays[--self->array_count]);
}

static void *
take_array(arguments *self, int writable)
{
    Py_buffer *array = &self->arrays[self->array_count];
    int flags = writable ? PyBUF_WRITABLE : PyBUF_SIMPLE;
    if (PyErr_Occurred() || PyObject_GetBuffer(self->given[self->at++], array, flags) != 0)
        return NULL;
    self->array_count++;
    return array->buf;
}

/* Returns NULL without an error for the null pointer, which the driver passes as None. */
static void *
take_optional(arguments *self)
{
    if (PyErr_Occurred() || self->given[self->at] != Py_None)
        return take_array(self, 0);
    self->at++;
    self->arrays[self->array_count++] = (Py_buffer){0};
    return NULL;
}

static uint32_t
take_number(arguments *self)
{
    if (PyErr_Occurred())
        return 0;
    unsigned long long number = PyLong_AsUnsignedLongLong(self->given[self->at++]);
    if (number > UINT32_MAX && !PyErr_Occurred())
        PyErr_Format(PyExc_OverflowError, "%s: argument %zd does not fit 32 bits", self->kernel,
                     self->at - 1);
    return (uint32_t)number;
}

static float
take_float(arguments *self)
{
    return PyErr_Occurred() ? 0.0f : (float)PyFloat_AsDouble(self->given[self->at++]);
}

/* a * b, or a number larger than any array if that overflows. */
static uint64_t
times(uint64_t a, uint64_t b)
{
    uint64_t result;
    return __builtin_mul_overflow(a, b, &result) ? UINT64_MAX : result;
}

/* Raises IndexError, the host's memory fault, unless array `index` has `nbytes` bytes. */
static void
need(const arguments *self, int index, const char *name, uint64_t nbytes)
{
    if (PyErr_Occurred() || (uint64_t)self->arrays[index].len >= nbytes)
        return;
    PyErr_Format(PyExc_IndexError, "%s: %s has %zd bytes, and %llu are needed", self->kernel, name,
                 self->arrays[index].len, (unsigned long long)nbytes);
}

/* ------------------------------------------------------------------------------------- matrices */

/* The header of a packed matrix; models/packed.py writes it. */
typedef struct {
    char magic[8];
    uint32_t rows, columns, part_count, unused;
    struct {
        uint32_t kind, rows;
        uint64_t offset;
    } parts[MOST_PARTS];
} packed_head;

static int
block_of(uint32_t kind, uint32_t *values, uint32_t *bytes)
{
    switch (kind) {
    case KIND_F32: *values = 1, *bytes = 4; return 1;
    case KIND_F16: *values = 1, *bytes = 2; return 1;
    case KIND_BF16: *values = 1, *bytes = 2; return 1;
    case KIND_Q4_0: *values = 32, *bytes = 18; return 1;
    case KIND_Q4_1: *values = 32, *bytes = 20; return 1;
    case KIND_Q5_0: *values = 32, *bytes = 22; return 1;
    case KIND_Q5_1: *values = 32, *bytes = 24; return 1;
    case KIND_IQ4_NL: *values = 32, *bytes = 18; return 1;
    case KIND_Q8_0: *values = 32, *bytes = 34; return 1;
    case KIND_Q4_K: *values = 256, *bytes = 144; return 1;
    case KIND_Q5_K: *values = 256, *bytes = 176; return 1;
    case KIND_Q6_K: *values = 256, *bytes = 210; return 1;
    default: return 0;
    }
}

/* Raises ValueError if the array is no matrix of these sizes, IndexError if it is too short. */
static void
read_matrix(const arguments *self, int index, uint64_t rows, uint32_t columns, matrix *out)
{
    const Py_buffer *array = &self->arrays[index];
    packed_head head;
    need(self, index, "the weight", sizeof head);
    if (PyErr_Occurred())
        return;
    memcpy(&head, array->buf, sizeof head);
    if (memcmp(head.magic, "ostinato", 8) != 0 || head.part_count > MOST_PARTS) {
        PyErr_Format(PyExc_ValueError, "%s: the weight is no packed matrix", self->kernel);
        return;
    }
    if (head.rows != rows || head.columns != columns) {
        PyErr_Format(PyExc_ValueError, "%s: the weight is [%u, %u], and [%llu, %u] is needed",
                     self->kernel, head.rows, head.columns, (unsigned long long)rows, columns);
        return;
    }
    *out = (matrix){head.rows, head.columns, head.part_count, {{0}}};
    uint64_t found = 0;
    for (uint32_t i = 0; i < head.part_count; i++) {
        uint32_t values, bytes, kind = head.parts[i].kind, part_rows = head.parts[i].rows;
        uint64_t offset = head.parts[i].offset;
        if (!block_of(kind, &values, &bytes) || columns % values != 0 || offset % 4 != 0) {
            PyErr_Format(PyExc_ValueError, "%s: part %u of the weight, of type %u, cannot be read",
                         self->kernel, i, kind);
            return;
        }
        uint64_t row_bytes = (uint64_t)(columns / values) * bytes;
        uint64_t size = times(part_rows, row_bytes), length = (uint64_t)array->len;
        if (offset > length || size > length - offset) {
            PyErr_Format(PyExc_IndexError, "%s: part %u of the weight passes its end", self->kernel,
                         i);
            return;
        }
        out->parts[i] = (part){(enum kind)kind, part_rows, (size_t)row_bytes,
                               (const uint8_t *)array->buf + offset};
        found += part_rows;
    }
    if (found != rows)
        PyErr_Format(PyExc_ValueError, "%s: the weight's parts have %llu rows, and it says %u",
                     self->kernel, (unsigned long long)found, head.rows);
}

/* -------------------------------------------------------------------------------- rows of steps */

typedef struct {
    int32_t token, position, sequence, flags;
} row;

/* The number of rows up to the last active one. */
static uint32_t
used_rows(const row *live, uint32_t count)
{
    while (count && !(live[count - 1].flags & ACTIVE))
        count--;
    return count;
}

/* Raises IndexError for an active row outside the cache. */
static void
require_inside(const arguments *self, const row *live, uint32_t used, uint32_t sequences,
               uint32_t context)
{
    for (uint32_t i = 0; i < used && !PyErr_Occurred(); i++)
        if (live[i].flags & ACTIVE &&
            ((uint32_t)live[i].sequence >= sequences || (uint32_t)live[i].position >= context))
            PyErr_Format(PyExc_IndexError, "%s: row %u is at position %d of sequence %d",
                         self->kernel, i, (int)live[i].position, (int)live[i].sequence);
}

/* ------------------------------------------------------------------------------------- products */

typedef struct {
    const kernel_set *set;
    const matrix *weight;
    const float *x;
    size_t x_stride;
    uint32_t rows;
    uint32_t outputs;  /* number of outputs to compute */
    uint32_t per_part; /* number of outputs of a part */
    float *out;        /* [rows, out_stride] */
    size_t out_stride;
    float *scratch;
    size_t scratch_each;
    /* Each is used by some kernels. */
    float *residual;   /* [rows, outputs] */
    float *inner;      /* [rows, outputs] */
    float **places;    /* the address of each row's outputs */
} product_work;

typedef struct {
    uint32_t first, last;
    float *scratch;
} product_part;

static product_part
part_of(const product_work *work, int index, int thread)
{
    uint32_t first = (uint32_t)index * work->per_part;
    uint32_t last = work->outputs - first > work->per_part ? first + work->per_part : work->outputs;
    return (product_part){first, last, work->scratch + (size_t)thread * work->scratch_each};
}

static void
multiply(const product_work *work, uint32_t first, uint32_t last, float *scratch)
{
    work->set->product(work->weight, first, last, work->x, work->x_stride, work->rows,
                       work->out + first, work->out_stride, scratch);
}

static void
plain_part(void *context, int index, int thread)
{
    const product_work *work = context;
    product_part part = part_of(work, index, thread);
    multiply(work, part.first, part.last, part.scratch);
}

static void
residual_part(void *context, int index, int thread)
{
    const product_work *work = context;
    product_part part = part_of(work, index, thread);
    multiply(work, part.first, part.last, part.scratch);
    for (uint32_t r = 0; r < work->rows; r++)
        work->set->add(work->residual + (size_t)r * work->outputs + part.first,
                       work->out + (size_t)r * work->out_stride + part.first,
                       part.last - part.first);
}

/* The matrix is [gate; up]. */
static void
gate_part(void *context, int index, int thread)
{
    const product_work *work = context;
    product_part part = part_of(work, index, thread);
    uint32_t width = work->outputs, count = part.last - part.first;
    multiply(work, part.first, part.last, part.scratch);
    multiply(work, width + part.first, width + part.last, part.scratch);
    for (uint32_t r = 0; r < work->rows; r++) {
        const float *gates = work->out + (size_t)r * work->out_stride + part.first;
        work->set->gate(gates, gates + width, count,
                        work->inner + (size_t)r * width + part.first);
    }
}

/* Stores each row's outputs at its place, by way of the thread's scratch. */
static void
scattered_part(void *context, int index, int thread)
{
    const product_work *work = context;
    product_part part = part_of(work, index, thread);
    uint32_t count = part.last - part.first;
    float *here = part.scratch;
    work->set->product(work->weight, part.first, part.last, work->x, work->x_stride, work->rows,
                       here, count, here + (size_t)work->rows * work->per_part);
    for (uint32_t r = 0; r < work->rows; r++)
        memcpy(work->places[r] + part.first, here + (size_t)r * count, count * sizeof(float));
}

/* Runs a product in parts; called without the GIL.  Returns -1 without memory. */
static int
share_product(Kernels *self, product_work *work, pool_task task, uint32_t weight_rows_each)
{
    uint64_t each = (uint64_t)work->weight->columns * weight_rows_each * (4 + work->rows) / 4;
    uint64_t count = PART_VALUES / (each ? each : 1);
    count = count < 4 ? 4 : (count + 3) / 4 * 4;
    work->set = self->set;
    work->per_part = count < work->outputs ? (uint32_t)count : work->outputs;
    work->scratch_each = self->set->product_scratch(work->weight->columns) + 16;
    if (task == scattered_part)
        work->scratch_each += (size_t)work->rows * work->per_part;
    work->scratch = malloc(work->scratch_each * sizeof(float) * (size_t)pool_threads(self->pool));
    if (work->scratch == NULL)
        return -1;
    if (work->outputs) {
        uint64_t parts = (work->outputs + (uint64_t)work->per_part - 1) / work->per_part;
        pool_run(self->pool, (int)parts, task, work);
    }
    free(work->scratch);
    return 0;
}

static void
normalise(const kernel_set *set, const float *x, const float *weight, uint32_t rows, uint32_t width,
          float epsilon, float *out)
{
    for (uint32_t r = 0; r < rows; r++)
        set->norm(x + (size_t)r * width, weight, width, epsilon, out + (size_t)r * width);
}

/* -------------------------------------------------------------------------------------- kernels */

/* Releases the arguments, and returns the kernel's result. */
static PyObject *
finish(arguments *given, int status)
{
    end_arguments(given);
    if (PyErr_Occurred())
        return NULL;
    if (status != 0)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

/* Returns the number of rows up to the last active one; 0 with IndexError if `live`, the first
 * array, is too short. */
static uint32_t
need_rows(const arguments *self, const row *live, uint32_t row_count)
{
    need(self, 0, "live", times(row_count, sizeof(row)));
    return PyErr_Occurred() ? 0 : used_rows(live, row_count);
}

/* The first arguments of a product of a normed residual; `weight` is the array after these. */
typedef struct {
    const row *live;
    const float *x, *norm;
} normed_rows;

static normed_rows
take_normed(arguments *self)
{
    normed_rows in;
    in.live = take_array(self, 0);
    in.x = take_array(self, 0);
    in.norm = take_array(self, 0);
    (void)take_array(self, 0);
    return in;
}

/* Like need_rows, and raises IndexError unless `x` has the rows and `norm` its weights. */
static uint32_t
need_normed(const arguments *self, const normed_rows *in, uint32_t row_count, uint32_t hidden)
{
    uint32_t used = need_rows(self, in->live, row_count);
    need(self, 1, "x", times(times(used, hidden), 4));
    if (used)
        need(self, 2, "norm", times(hidden, 4));
    return used;
}

static PyObject *
kernels_embed(PyObject *op, PyObject *const *args, Py_ssize_t count)
{
    arguments a;
    Kernels *self = begin_arguments(&a, op, "embed", args, count, 11);
    const row *rows = take_array(&a, 0);
    const int32_t *state = take_array(&a, 0);
    row *live = take_array(&a, 1);
    (void)take_array(&a, 0);
    float *x = take_array(&a, 1);
    int32_t *history = take_array(&a, 1);
    uint32_t row_count = take_number(&a), hidden = take_number(&a), vocabulary = take_number(&a);
    uint32_t sequences = take_number(&a), context = take_number(&a);
    matrix table;
    need(&a, 0, "rows", times(row_count, sizeof(row)));
    need(&a, 1, "state", times(sequences, 16));
    need(&a, 2, "live", times(row_count, sizeof(row)));
    need(&a, 4, "x", times(times(row_count, hidden), 4));
    need(&a, 5, "history", times(times(sequences, context), 4));
    read_matrix(&a, 3, vocabulary, hidden, &table);
    if (PyErr_Occurred())
        return finish(&a, 0);
    Py_BEGIN_ALLOW_THREADS
    for (uint32_t i = 0; i < row_count; i++) {
        row one = rows[i];
        float *out = x + (size_t)i * hidden;
        if (one.sequence < 0 || (uint32_t)one.sequence >= sequences)
            one.flags &= ~ACTIVE;
        else if (one.flags & FROM_STATE) {
            const int32_t *its = state + 4 * (size_t)one.sequence;
            one.token = its[0];
            one.position = its[1];
            if (its[3])
                one.flags &= ~ACTIVE;
        }
        if (one.token < 0 || (uint32_t)one.token >= vocabulary || one.position < 0 ||
            (uint32_t)one.position >= context)
            one.flags &= ~ACTIVE;
        live[i] = one;
        memset(out, 0, (size_t)hidden * sizeof *out);
        if (!(one.flags & ACTIVE))
            continue;
        history[(size_t)one.sequence * context + (size_t)one.position] = one.token;
        uint32_t at = (uint32_t)one.token;
        for (uint32_t p = 0; p < table.part_count; at -= table.parts[p++].rows)
            if (at < table.parts[p].rows) {
                self->set->unpack(table.parts[p].kind,
                                  table.parts[p].data + at * table.parts[p].row_bytes, hidden, out);
                break;
            }
    }
    Py_END_ALLOW_THREADS
    return finish(&a, 0);
}

/* The destinations of the heads of queries, keys and values. */
typedef struct {
    uint32_t heads, kv_heads, size, sequences, context;
    const float *rope; /* [context, 2, size / 2]: cosines, sines */
    float *cache;      /* [2, sequences, kv_heads, context, size] */
    float *q;          /* [rows, heads, size] */
} head_places;

/* Applies rope, and stores queries in q, keys and values in the cache.  `parts`: the row's heads,
 * [all heads, size]. */
static void
place_heads(const kernel_set *set, const head_places *to, const row *live, uint32_t index,
            const float *parts)
{
    size_t size = to->size, half = size / 2, head_stride = to->context * size;
    size_t sequence_stride = to->kv_heads * head_stride, position = (size_t)live->position;
    const float *cosine = to->rope + position * 2 * half, *sine = cosine + half;
    float *keys = to->cache + (size_t)live->sequence * sequence_stride + position * size;
    float *values = keys + to->sequences * sequence_stride;
    float *q = to->q + (size_t)index * to->heads * size;
    for (uint32_t h = 0; h < to->heads; h++, parts += size)
        set->rotate(parts, cosine, sine, (uint32_t)half, q + h * size);
    for (uint32_t h = 0; h < to->kv_heads; h++, parts += size)
        set->rotate(parts, cosine, sine, (uint32_t)half, keys + h * head_stride);
    for (uint32_t h = 0; h < to->kv_heads; h++, parts += size)
        memcpy(values + h * head_stride, parts, size * sizeof *parts);
}

/* Raises IndexError unless rope, cache and q, the arrays from `index` on, are large enough. */
static void
need_places(const arguments *self, int index, const head_places *to, uint32_t used)
{
    uint64_t positions = times(to->context, to->size);
    need(self, index, "rope", times(positions, 4));
    need(self, index + 1, "cache", times(times(times(to->sequences, to->kv_heads), positions), 8));
    need(self, index + 2, "q", times(times(used, to->heads), times(to->size, 4)));
}

static PyObject *
kernels_norm_qkv_rope(PyObject *op, PyObject *const *args, Py_ssize_t count)
{
    arguments a;
    Kernels *self = begin_arguments(&a, op, "norm_qkv_rope", args, count, 17);
    const kernel_set *set = self->set;
    head_places to;
    normed_rows in = take_normed(&a);
    const float *bias = take_optional(&a);
    to.rope = take_array(&a, 0);
    to.cache = take_array(&a, 1);
    to.q = take_array(&a, 1);
    float *workspace = take_array(&a, 1);
    uint32_t row_count = take_number(&a), hidden = take_number(&a);
    to.heads = take_number(&a);
    to.kv_heads = take_number(&a);
    to.size = take_number(&a);
    to.sequences = take_number(&a);
    to.context = take_number(&a);
    float epsilon = take_float(&a);
    uint32_t used = need_normed(&a, &in, row_count, hidden);
    if (used == 0)
        return finish(&a, 0);
    uint64_t width = times(to.heads + 2 * (uint64_t)to.kv_heads, to.size);
    matrix weight;
    if (bias != NULL)
        need(&a, 4, "bias", times(width, 4));
    need_places(&a, 5, &to, used);
    need(&a, 8, "workspace", times(times(used, width + hidden), 4));
    read_matrix(&a, 3, width, hidden, &weight);
    require_inside(&a, in.live, used, to.sequences, to.context);
    if (PyErr_Occurred())
        return finish(&a, 0);
    int status;
    Py_BEGIN_ALLOW_THREADS
    float *normed = workspace + used * width;
    normalise(set, in.x, in.norm, used, hidden, epsilon, normed);
    product_work work = {.weight = &weight, .x = normed, .x_stride = hidden, .rows = used,
                         .outputs = (uint32_t)width, .out = workspace, .out_stride = width};
    status = share_product(self, &work, plain_part, 1);
    for (uint32_t i = 0; i < used && status == 0; i++) {
        if (!(in.live[i].flags & ACTIVE))
            continue;
        float *parts = workspace + i * width;
        if (bias != NULL)
            set->add(parts, bias, (uint32_t)width);
        place_heads(set, &to, &in.live[i], i, parts);
    }
    Py_END_ALLOW_THREADS
    return finish(&a, status);
}

static PyObject *
kernels_norm_rope(PyObject *op, PyObject *const *args, Py_ssize_t count)
{
    arguments a;
    Kernels *self = begin_arguments(&a, op, "norm_rope", args, count, 15);
    const kernel_set *set = self->set;
    head_places to;
    const row *live = take_array(&a, 0);
    const float *qkv = take_array(&a, 0);
    const float *bias = take_optional(&a);
    const float *q_norm = take_optional(&a), *k_norm = take_optional(&a);
    to.rope = take_array(&a, 0);
    to.cache = take_array(&a, 1);
    to.q = take_array(&a, 1);
    uint32_t row_count = take_number(&a);
    to.heads = take_number(&a);
    to.kv_heads = take_number(&a);
    to.size = take_number(&a);
    to.sequences = take_number(&a);
    to.context = take_number(&a);
    float epsilon = take_float(&a);
    uint32_t used = need_rows(&a, live, row_count);
    if (used == 0)
        return finish(&a, 0);
    uint64_t width = times(to.heads + 2 * (uint64_t)to.kv_heads, to.size);
    need(&a, 1, "qkv", times(times(used, width), 4));
    if (bias != NULL)
        need(&a, 2, "bias", times(width, 4));
    if (q_norm != NULL)
        need(&a, 3, "q_norm", times(to.size, 4));
    if (k_norm != NULL)
        need(&a, 4, "k_norm", times(to.size, 4));
    need_places(&a, 5, &to, used);
    require_inside(&a, live, used, to.sequences, to.context);
    if (PyErr_Occurred())
        return finish(&a, 0);
    float *parts = malloc(times(width, sizeof *parts));
    if (parts == NULL)
        return finish(&a, -1);
    Py_BEGIN_ALLOW_THREADS
    for (uint32_t i = 0; i < used; i++) {
        if (!(live[i].flags & ACTIVE))
            continue;
        memcpy(parts, qkv + i * width, width * sizeof *parts);
        if (bias != NULL)
            set->add(parts, bias, (uint32_t)width);
        for (uint32_t h = 0; h < to.heads + to.kv_heads; h++) {
            const float *weight = h < to.heads ? q_norm : k_norm;
            float *head = parts + (size_t)h * to.size;
            if (weight != NULL)
                set->norm(head, weight, to.size, epsilon, head);
        }
        place_heads(set, &to, &live[i], i, parts);
    }
    Py_END_ALLOW_THREADS
    free(parts);
    return finish(&a, 0);
}

typedef struct {
    const kernel_set *set;
    const attention_piece *pieces;
    float *scratch;
    size_t scratch_each;
} attention_work;

static void
attention_part(void *context, int index, int thread)
{
    const attention_work *work = context;
    work->set->attend(&work->pieces[index], work->scratch + (size_t)thread * work->scratch_each);
}

/* Returns the number of rows of the next piece, which begins with row `start`. */
static uint32_t
rows_of_piece(const row *live, uint32_t start, uint32_t used, uint32_t queries, uint32_t window)
{
    uint64_t positions = (uint64_t)live[start].position;
    positions = PIECE_ROWS + (window && positions > window ? window : positions);
    uint64_t scores = times(queries, positions);
    uint64_t most = scores ? PIECE_SCORES / scores : 1;
    uint32_t rows = 1;
    most = most > PIECE_ROWS ? PIECE_ROWS : most;
    while (rows < most && start + rows < used && live[start + rows].flags & ACTIVE &&
           live[start + rows].sequence == live[start].sequence &&
           live[start + rows].position == live[start].position + (int32_t)rows)
        rows++;
    return rows;
}

static int
share_attention(Kernels *self, const row *live, uint32_t used, const attention_piece *whole,
                const float *cache, uint32_t kv_heads, size_t head_stride, uint32_t sequences)
{
    uint32_t group = whole->queries, splits = 1;
    /* With few rows a piece has one query head, so that all threads have work. */
    if ((uint64_t)used * kv_heads < 2 * (uint64_t)pool_threads(self->pool))
        splits = group;
    attention_piece *pieces = malloc(times(times(used, kv_heads), splits * sizeof *pieces));
    if (pieces == NULL)
        return -1;
    attention_work work = {.set = self->set, .pieces = pieces};
    uint32_t count = 0, rows;
    for (uint32_t start = 0; start < used; start += rows) {
        rows = 1;
        if (!(live[start].flags & ACTIVE))
            continue;
        rows = rows_of_piece(live, start, used, group / splits, whole->window);
        for (uint32_t h = 0; h < kv_heads * splits; h++) {
            attention_piece *piece = &pieces[count++];
            size_t at = start * whole->row_stride + (size_t)h * (group / splits) * whole->head_size;
            *piece = *whole;
            piece->rows = rows;
            piece->queries = group / splits;
            piece->position = (uint32_t)live[start].position;
            piece->q += at;
            piece->out += at;
            piece->keys = cache + ((size_t)live[start].sequence * kv_heads + h / splits) * head_stride;
            piece->values = piece->keys + (size_t)sequences * kv_heads * head_stride;
            size_t scratch = self->set->attend_scratch(piece);
            work.scratch_each = scratch > work.scratch_each ? scratch : work.scratch_each;
        }
    }
    work.scratch = malloc(work.scratch_each * sizeof(float) * (size_t)pool_threads(self->pool));
    if (work.scratch != NULL)
        pool_run(self->pool, (int)count, attention_part, &work);
    free(pieces);
    int status = work.scratch == NULL ? -1 : 0;
    free(work.scratch);
    return status;
}

static PyObject *
kernels_attention(PyObject *op, PyObject *const *args, Py_ssize_t count)
{
    arguments a;
    Kernels *self = begin_arguments(&a, op, "attention", args, count, 13);
    const row *live = take_array(&a, 0);
    const float *q = take_array(&a, 0), *cache = take_array(&a, 0);
    float *attended = take_array(&a, 1);
    (void)take_array(&a, 1);
    uint32_t row_count = take_number(&a), heads = take_number(&a), kv_heads = take_number(&a);
    uint32_t size = take_number(&a), sequences = take_number(&a), context = take_number(&a);
    uint32_t window = take_number(&a);
    float scale = take_float(&a);
    uint32_t used = need_rows(&a, live, row_count);
    if (used == 0)
        return finish(&a, 0);
    need(&a, 1, "q", times(times(used, heads), times(size, 4)));
    need(&a, 2, "cache", times(times(times(sequences, kv_heads), times(context, size)), 8));
    need(&a, 3, "attended", times(times(used, heads), times(size, 4)));
    require_inside(&a, live, used, sequences, context);
    if (!PyErr_Occurred() && (kv_heads == 0 || heads % kv_heads != 0))
        PyErr_Format(PyExc_ValueError, "attention: %u heads in %u groups", heads, kv_heads);
    if (PyErr_Occurred())
        return finish(&a, 0);
    int status;
    Py_BEGIN_ALLOW_THREADS
    attention_piece whole = {.q = q, .out = attended, .row_stride = (size_t)heads * size,
                             .queries = heads / kv_heads, .head_size = size, .scale = scale,
                             .window = window};
    status = share_attention(self, live, used, &whole, cache, kv_heads, (size_t)context * size,
                             sequences);
    Py_END_ALLOW_THREADS
    return finish(&a, status);
}

/* x += source @ weight.T */
static PyObject *
add_product(PyObject *op, const char *name, PyObject *const *args, Py_ssize_t count)
{
    arguments a;
    Kernels *self = begin_arguments(&a, op, name, args, count, 8);
    const row *live = take_array(&a, 0);
    const float *source = take_array(&a, 0);
    (void)take_array(&a, 0);
    float *x = take_array(&a, 1), *workspace = take_array(&a, 1);
    uint32_t row_count = take_number(&a), hidden = take_number(&a), width = take_number(&a);
    uint32_t used = need_rows(&a, live, row_count);
    if (used == 0)
        return finish(&a, 0);
    matrix weight;
    need(&a, 1, "the source", times(times(used, width), 4));
    need(&a, 3, "x", times(times(used, hidden), 4));
    need(&a, 4, "workspace", times(times(used, hidden), 4));
    read_matrix(&a, 2, hidden, width, &weight);
    if (PyErr_Occurred())
        return finish(&a, 0);
    int status;
    Py_BEGIN_ALLOW_THREADS
    product_work work = {.weight = &weight, .x = source, .x_stride = width, .rows = used,
                         .outputs = hidden, .out = workspace, .out_stride = hidden, .residual = x};
    status = share_product(self, &work, residual_part, 1);
    Py_END_ALLOW_THREADS
    return finish(&a, status);
}

static PyObject *
kernels_output_residual(PyObject *op, PyObject *const *args, Py_ssize_t count)
{
    return add_product(op, "output_residual", args, count);
}

static PyObject *
kernels_down_residual(PyObject *op, PyObject *const *args, Py_ssize_t count)
{
    return add_product(op, "down_residual", args, count);
}

/* result = norm(x) @ weight.T; `gated`: silu of its first half times the second. */
static PyObject *
normed_product(PyObject *op, const char *name, PyObject *const *args, Py_ssize_t count, int gated)
{
    arguments a;
    Kernels *self = begin_arguments(&a, op, name, args, count, gated ? 10 : 12);
    normed_rows in = take_normed(&a);
    float *result = take_array(&a, 1), *workspace = take_array(&a, 1);
    uint32_t row_count = take_number(&a), hidden = take_number(&a);
    uint64_t width = take_number(&a); /* or query heads */
    if (!gated) {
        width += 2 * (uint64_t)take_number(&a);
        width = times(width, take_number(&a));
    }
    float epsilon = take_float(&a);
    uint32_t used = need_normed(&a, &in, row_count, hidden);
    if (used == 0)
        return finish(&a, 0);
    uint64_t gates = gated ? 2 * width : 0; /* of a row, in the workspace before its inputs */
    matrix weight;
    need(&a, 4, "the result", times(times(used, width), 4));
    need(&a, 5, "workspace", times(times(used, gates + hidden), 4));
    read_matrix(&a, 3, gated ? gates : width, hidden, &weight);
    if (PyErr_Occurred())
        return finish(&a, 0);
    int status;
    Py_BEGIN_ALLOW_THREADS
    float *normed = workspace + used * gates;
    normalise(self->set, in.x, in.norm, used, hidden, epsilon, normed);
    product_work work = {.weight = &weight, .x = normed, .x_stride = hidden, .rows = used,
                         .outputs = (uint32_t)width, .out = gated ? workspace : result,
                         .out_stride = gated ? gates : width, .inner = result};
    status = share_product(self, &work, gated ? gate_part : plain_part, gated ? 2 : 1);
    Py_END_ALLOW_THREADS
    return finish(&a, status);
}

static PyObject *
kernels_norm_qkv(PyObject *op, PyObject *const *args, Py_ssize_t count)
{
    return normed_product(op, "norm_qkv", args, count, 0);
}

static PyObject *
kernels_norm_gate_up(PyObject *op, PyObject *const *args, Py_ssize_t count)
{
    return normed_product(op, "norm_gate_up", args, count, 1);
}

static int
share_head(Kernels *self, const matrix *weight, const row *live, uint32_t used, const float *x,
           const float *norm, float epsilon, float *logits, float *workspace)
{
    uint32_t hidden = weight->columns, sampled = 0;
    float **places = malloc((size_t)used * sizeof *places);
    if (places == NULL)
        return -1;
    for (uint32_t i = 0; i < used; i++)
        if ((live[i].flags & (ACTIVE | SAMPLE)) == (ACTIVE | SAMPLE)) {
            self->set->norm(x + (size_t)i * hidden, norm, hidden, epsilon,
                            workspace + (size_t)sampled * hidden);
            places[sampled++] = logits + (size_t)live[i].sequence * weight->rows;
        }
    product_work work = {.weight = weight, .x = workspace, .x_stride = hidden, .rows = sampled,
                         .outputs = weight->rows, .out = sampled ? places[0] : NULL,
                         .out_stride = weight->rows, .places = places};
    int status = sampled ? share_product(self, &work, sampled == 1 ? plain_part : scattered_part, 1)
                         : 0;
    free(places);
    return status;
}

static PyObject *
kernels_head(PyObject *op, PyObject *const *args, Py_ssize_t count)
{
    arguments a;
    Kernels *self = begin_arguments(&a, op, "head", args, count, 10);
    normed_rows in = take_normed(&a);
    float *logits = take_array(&a, 1), *workspace = take_array(&a, 1);
    uint32_t row_count = take_number(&a), hidden = take_number(&a), vocabulary = take_number(&a);
    float epsilon = take_float(&a);
    uint32_t used = need_normed(&a, &in, row_count, hidden);
    if (used == 0)
        return finish(&a, 0);
    matrix weight;
    need(&a, 5, "workspace", times(times(used, hidden), 4));
    read_matrix(&a, 3, vocabulary, hidden, &weight);
    uint64_t sequences = vocabulary ? (uint64_t)a.arrays[4].len / 4 / vocabulary : UINT32_MAX;
    sequences = sequences > UINT32_MAX ? UINT32_MAX : sequences;
    require_inside(&a, in.live, used, (uint32_t)sequences, UINT32_MAX);
    if (PyErr_Occurred())
        return finish(&a, 0);
    int status;
    Py_BEGIN_ALLOW_THREADS
    status = share_head(self, &weight, in.live, used, in.x, in.norm, epsilon, logits, workspace);
    Py_END_ALLOW_THREADS
    return finish(&a, status);
}

/* ----------------------------------------------------------------------------------------- type */

typedef const kernel_set *(*kernel_set_of)(void);

static const kernel_set_of SETS[] = {KERNEL_SETS};
#define SET_COUNT (sizeof SETS / sizeof *SETS)

static PyObject *
kernels_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"threads", "instructions", NULL};
    int threads;
    const char *wanted = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "i|z:Kernels", names, &threads, &wanted))
        return NULL;
    if (threads < 1 || threads > MOST_THREADS)
        return PyErr_Format(PyExc_ValueError, "threads is %d; it must be 1 to %d", threads,
                            MOST_THREADS);
    const kernel_set *set = NULL;
    for (size_t i = 0; i < SET_COUNT && set == NULL; i++) {
        const kernel_set *one = SETS[i]();
        if (one != NULL && (wanted == NULL || strcmp(one->name, wanted) == 0))
            set = one;
    }
    if (set == NULL)
        return PyErr_Format(PyExc_ValueError, "this processor has no %s", wanted);
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Kernels *self = (Kernels *)alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->set = set;
    self->pool = pool_create(threads);
    if (self->pool == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    return (PyObject *)self;
}

static void
kernels_dealloc(PyObject *op)
{
    Kernels *self = (Kernels *)op;
    PyTypeObject *type = Py_TYPE(op);
    if (self->pool != NULL)
        pool_destroy(self->pool);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(op);
    Py_DECREF(type);
}

static PyObject *
kernels_threads(PyObject *op, void *unused)
{
    (void)unused;
    return PyLong_FromLong(pool_threads(((Kernels *)op)->pool));
}

#define METHOD(NAME) {#NAME, (PyCFunction)(void (*)(void))kernels_##NAME, METH_FASTCALL, NULL}

static PyMethodDef kernels_methods[] = {
    METHOD(embed),     METHOD(norm_qkv_rope),   METHOD(norm_qkv),     METHOD(norm_rope),
    METHOD(attention), METHOD(output_residual), METHOD(norm_gate_up), METHOD(down_residual),
    METHOD(head),      {NULL, NULL, 0, NULL},
};

static PyGetSetDef kernels_fields[] = {
    {"threads", kernels_threads, NULL, "The number of threads that work, the caller included.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot kernels_slots[] = {
    {Py_tp_doc, "Kernels(threads, instructions=None)\n--\n\n"
                "The kernels of models.host.kernels on packed weights, with threads of their own.\n"
                "\n`instructions`: one of INSTRUCTIONS; the best if None."},
    {Py_tp_new, kernels_new},
    {Py_tp_dealloc, kernels_dealloc},
    {Py_tp_methods, kernels_methods},
    {Py_tp_getset, kernels_fields},
    {0, NULL},
};

static PyType_Spec kernels_spec = {
    .name = "ostinato.models._native.Kernels",
    .basicsize = sizeof(Kernels),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = kernels_slots,
};

/* --------------------------------------------------------------------------------------- module */

static int
module_exec(PyObject *module)
{
    static int set_up = 0; /* handlers for forks cannot be removed: register them once */
    if (!set_up && pool_set_up() != 0) {
        PyErr_SetString(PyExc_ImportError, "no handler for forks can be registered");
        return -1;
    }
    set_up = 1;
    PyObject *names = PyList_New(0);
    if (names == NULL)
        return -1;
    for (size_t i = 0; i < SET_COUNT; i++) {
        const kernel_set *one = SETS[i]();
        PyObject *name = one == NULL ? NULL : PyUnicode_FromString(one->name);
        if (one != NULL && (name == NULL || PyList_Append(names, name) != 0)) {
            Py_XDECREF(name);
            Py_DECREF(names);
            return -1;
        }
        Py_XDECREF(name);
    }
    PyObject *tuple = PyList_AsTuple(names);
    Py_DECREF(names);
    if (tuple == NULL)
        return -1;
    int failed = PyModule_AddObjectRef(module, "INSTRUCTIONS", tuple);
    Py_DECREF(tuple);
    if (failed)
        return failed;
    PyObject *type = PyType_FromModuleAndSpec(module, &kernels_spec, NULL);
    if (type == NULL)
        return -1;
    failed = PyModule_AddType(module, (PyTypeObject *)type);
    Py_DECREF(type);
    return failed;
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
    {0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "ostinato.models._native",
    .m_doc = "Host kernels on packed weights.  INSTRUCTIONS: the instruction sets that this "
             "processor has, the best first.",
    .m_size = 0,
    .m_slots = module_slots,
};

PyMODINIT_FUNC
PyInit__native(void)
{
    return PyModuleDef_Init(&module);
}
