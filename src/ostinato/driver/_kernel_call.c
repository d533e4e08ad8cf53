/* An eager launch, compiled: arguments to bytes (Packer), cuLaunchKernelEx with everything at hand
 * (KernelCall), and both in one for a function (FunctionCall).
 *
 * driver/launcher.py and driver/cuda/launch.py hold the same in Python, which serves where this was
 * not built.
 */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

/* Of _launch.c. */
int ostinato_as_pointer(PyObject *number, void *result);
PyObject *ostinato_new(PyTypeObject *type);
void ostinato_free(PyObject *self);
int ostinato_add_type(PyObject *module, PyType_Spec *spec);

int ostinato_add_kernel_types(PyObject *module);

/* --------------------------------------------------------------------------------------- Packer */

typedef struct {
    char code;
    uint32_t offset;
} Slot;

typedef struct {
    PyObject_HEAD
    PyObject *address;    /* the name of the attribute */
    PyObject *address_of; /* who knows the address of what has no such attribute */
    Slot *slots;
    Py_ssize_t count, size;
} Packer;

static int
width_of(char code)
{
    switch (code) {
    case 'b': case 'B': return 1;
    case 'h': case 'H': return 2;
    case 'i': case 'I': case 'f': return 4;
    case 'q': case 'Q': case 'd': case 'P': return 8;
    default: return 0;
    }
}

static PyObject *
packer_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"codes", "offsets", "size", "address_of", NULL};
    const char *codes;
    Py_ssize_t count, size;
    PyObject *offsets, *address_of;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "s#O!nO:Packer", names, &codes, &count,
                                     &PyTuple_Type, &offsets, &size, &address_of))
        return NULL;
    if (PyTuple_Size(offsets) != count || size < 0) {
        PyErr_SetString(PyExc_ValueError, "an offset for each code, and a size, are needed");
        return NULL;
    }
    Packer *self = (Packer *)ostinato_new(type);
    if (self == NULL)
        return NULL;
    self->count = count;
    self->size = size;
    self->address_of = Py_NewRef(address_of);
    self->address = PyUnicode_InternFromString("address");
    self->slots = PyMem_Malloc((count ? count : 1) * sizeof(Slot));
    if (self->address == NULL || self->slots == NULL) {
        if (self->slots == NULL)
            PyErr_NoMemory();
        Py_DECREF(self);
        return NULL;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        long offset = PyLong_AsLong(PyTuple_GetItem(offsets, i));
        int width = width_of(codes[i]);
        if (offset < 0 || width == 0 || offset + width > size) {
            if (!PyErr_Occurred())
                PyErr_Format(PyExc_ValueError, "slot %zd is unknown or outside the buffer", i);
            Py_DECREF(self);
            return NULL;
        }
        self->slots[i] = (Slot){codes[i], (uint32_t)offset};
    }
    return (PyObject *)self;
}

static void
packer_dealloc(PyObject *op)
{
    Packer *self = (Packer *)op;
    Py_XDECREF(self->address);
    Py_XDECREF(self->address_of);
    PyMem_Free(self->slots);
    ostinato_free(op);
}

/* Whether an exception is set that is no error of a value, such as KeyboardInterrupt. */
static int
interrupted(void)
{
    return PyErr_Occurred() != NULL && !PyErr_ExceptionMatches(PyExc_Exception);
}

/* One value; 0 if it is not just what its slot takes.  An exception may be set then. */
static int
pack_one(Packer *self, char code, PyObject *value, unsigned char *to)
{
    if (code == 'f' || code == 'd') {
        if (!PyFloat_CheckExact(value))
            return 0;
        double number = PyFloat_AsDouble(value);
        float narrow = (float)number;
        if (code == 'f' && isinf(narrow) && !isinf(number))
            return 0;
        memcpy(to, code == 'd' ? (void *)&number : (void *)&narrow, code == 'd' ? 8 : 4);
        return 1;
    }
    if (code == 'P' && !PyLong_CheckExact(value)) {
        PyObject *address = PyObject_GetAttr(value, self->address);
        if (address == NULL || !PyLong_CheckExact(address)) {
            if (interrupted())
                return 0;
            PyErr_Clear();
            Py_XDECREF(address);
            address = PyObject_CallFunctionObjArgs(self->address_of, value, NULL);
            if (address == NULL)
                return 0;
        }
        int packed = PyLong_CheckExact(address) && pack_one(self, code, address, to);
        Py_DECREF(address);
        return packed;
    }
    if (!PyLong_CheckExact(value))
        return 0;
    int width = width_of(code);
    uint64_t bits;
    if (code == 'b' || code == 'h' || code == 'i' || code == 'q') {
        int overflow;
        long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
        long long limit = width == 8 ? INT64_MAX : (1ll << (8 * width - 1)) - 1;
        if (overflow || number > limit || number < -limit - 1)
            return 0;
        bits = (uint64_t)number;
    }
    else {
        bits = PyLong_AsUnsignedLongLong(value);
        if (bits == UINT64_MAX && PyErr_Occurred())
            return 0;
        if (width < 8 && bits >> (8 * width))
            return 0;
    }
    memcpy(to, &bits, width); /* little endian, as every machine with a GPU of NVIDIA's is */
    return 1;
}

/* All values of a tuple; 0 if one is not just what its slot takes, -1 if interrupted. */
static int
pack_all(Packer *self, PyObject *values, unsigned char *bytes)
{
    if (!PyTuple_Check(values) || PyTuple_Size(values) != self->count)
        return 0;
    memset(bytes, 0, self->size);
    for (Py_ssize_t i = 0; i < self->count; i++) {
        Slot slot = self->slots[i];
        if (!pack_one(self, slot.code, PyTuple_GetItem(values, i), bytes + slot.offset)) {
            if (interrupted())
                return -1;
            PyErr_Clear(); /* the careful way asks again, and words it */
            return 0;
        }
    }
    return 1;
}

static PyObject *
packer_pack(PyObject *op, PyObject *values)
{
    Packer *self = (Packer *)op;
    PyObject *made = PyBytes_FromStringAndSize(NULL, self->size);
    if (made == NULL)
        return NULL;
    unsigned char *bytes = (unsigned char *)PyBytes_AsString(made);
    int packed = pack_all(self, values, bytes);
    if (packed > 0)
        return made;
    Py_DECREF(made);
    if (packed < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef packer_methods[] = {
    {"pack", packer_pack, METH_O,
     "pack($self, values, /)\n--\n\nThe values' bytes, or None if one is not just what its slot "
     "takes."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot packer_slots[] = {
    {Py_tp_doc, "Packer(codes, offsets, size, address_of)\n--\n\n"
                "Kernel arguments to bytes.  A code of `struct` for each, P for an address: a "
                "number, what has one as its `address`, or what `address_of` knows one of."},
    {Py_tp_new, packer_new},
    {Py_tp_dealloc, packer_dealloc},
    {Py_tp_methods, packer_methods},
    {0, NULL},
};

static PyType_Spec packer_spec = {
    .name = "ostinato.driver._launch.Packer",
    .basicsize = sizeof(Packer),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = packer_slots,
};

/* ----------------------------------------------------------------------------------- KernelCall */

/* CUlaunchConfig */
typedef struct {
    uint32_t grid[3], block[3], shared;
    void *stream, *attributes;
    uint32_t count;
} LaunchConfig;
_Static_assert(sizeof(LaunchConfig) == 56, "as in cuda.h");

typedef int (*launch_function)(const LaunchConfig *config, void *function, void **params,
                               void **extra);
typedef int (*current_function)(void **context);

/* What is launched, and where. */
typedef struct {
    void *launch, *current; /* the C functions */
    void *context, *function;
} Target;

static int
check_target(const Target *target)
{
    if (target->launch != NULL && target->current != NULL)
        return 1;
    PyErr_SetString(PyExc_ValueError, "the address of a C function is 0");
    return 0;
}

/* The status, or None where another context is current: nothing was launched then. */
static PyObject *
launch_target(const Target *target, const LaunchConfig *config, void **params)
{
    void *context = NULL;
    int status;
    if (((current_function)target->current)(&context) != 0 || context != target->context)
        Py_RETURN_NONE;
    Py_BEGIN_ALLOW_THREADS
    status = ((launch_function)target->launch)(config, target->function, params, NULL);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(status);
}

typedef struct {
    PyObject_HEAD
    Target target;
    LaunchConfig config;
    void **params; /* one allocation: the pointers, then the bytes that they point to */
} KernelCall;

static int
as_u32(PyObject *number, void *result)
{
    unsigned long value = PyLong_AsUnsignedLong(number);
    if (value == (unsigned long)-1 && PyErr_Occurred())
        return 0;
    if (value > UINT32_MAX) {
        PyErr_Format(PyExc_OverflowError, "%lu does not fit into 32 bits", value);
        return 0;
    }
    *(uint32_t *)result = (uint32_t)value;
    return 1;
}

static int
as_dimensions(PyObject *three, void *result)
{
    uint32_t *to = result;
    if (!PyTuple_Check(three) || PyTuple_Size(three) != 3) {
        PyErr_SetString(PyExc_TypeError, "dimensions are a tuple of three");
        return 0;
    }
    for (int i = 0; i < 3; i++)
        if (!as_u32(PyTuple_GetItem(three, i), to + i))
            return 0;
    return 1;
}

static PyObject *
kernel_call_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    Target target;
    LaunchConfig config = {0};
    const char *data, *offsets;
    Py_ssize_t size, offset_bytes;
    if (kwargs != NULL && PyDict_Size(kwargs) != 0) {
        PyErr_SetString(PyExc_TypeError, "KernelCall takes no keywords");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "O&O&O&O&O&O&O&O&O&O&y#y#:KernelCall",
                          ostinato_as_pointer, &target.launch,
                          ostinato_as_pointer, &target.current,
                          ostinato_as_pointer, &target.context,
                          ostinato_as_pointer, &target.function,
                          as_dimensions, config.grid,
                          as_dimensions, config.block,
                          as_u32, &config.shared,
                          ostinato_as_pointer, &config.stream,
                          ostinato_as_pointer, &config.attributes,
                          as_u32, &config.count,
                          &data, &size, &offsets, &offset_bytes))
        return NULL;
    Py_ssize_t count = offset_bytes / (Py_ssize_t)sizeof(uint32_t);
    if (!check_target(&target))
        return NULL;
    KernelCall *self = (KernelCall *)ostinato_new(type);
    if (self == NULL)
        return NULL;
    self->target = target;
    self->config = config;
    self->params = PyMem_Malloc(count * sizeof(void *) + size + 1);
    if (self->params == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    char *copy = (char *)(self->params + count);
    memcpy(copy, data, size);
    for (Py_ssize_t i = 0; i < count; i++) {
        uint32_t offset;
        memcpy(&offset, offsets + i * sizeof offset, sizeof offset);
        if (offset > size) {
            PyErr_Format(PyExc_ValueError, "argument %zd begins behind the last byte", i);
            Py_DECREF(self);
            return NULL;
        }
        self->params[i] = copy + offset;
    }
    return (PyObject *)self;
}

static void
kernel_call_dealloc(PyObject *op)
{
    PyMem_Free(((KernelCall *)op)->params);
    ostinato_free(op);
}

static PyObject *
kernel_call_call(PyObject *op, PyObject *args, PyObject *kwargs)
{
    KernelCall *self = (KernelCall *)op;
    if (PyTuple_Size(args) != 0 || (kwargs != NULL && PyDict_Size(kwargs) != 0)) {
        PyErr_SetString(PyExc_TypeError, "a prepared launch takes no arguments");
        return NULL;
    }
    return launch_target(&self->target, &self->config, self->params);
}

static PyType_Slot kernel_call_slots[] = {
    {Py_tp_doc,
     "KernelCall(launch, current, context, function, grid, block, shared, stream, attributes, "
     "count, data, offsets)\n--\n\n"
     "A launch: called, it gives the status, or None if another context is current, and then "
     "nothing was launched.\n\n"
     "`launch`, `current`: addresses of cuLaunchKernelEx and cuCtxGetCurrent.  `data`: the "
     "arguments' bytes, copied; `offsets`: where each begins, as 32-bit numbers.  `attributes` "
     "must stay good."},
    {Py_tp_new, kernel_call_new},
    {Py_tp_dealloc, kernel_call_dealloc},
    {Py_tp_call, kernel_call_call},
    {0, NULL},
};

static PyType_Spec kernel_call_spec = {
    .name = "ostinato.driver._launch.KernelCall",
    .basicsize = sizeof(KernelCall),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = kernel_call_slots,
};

/* --------------------------------------------------------------------------------- FunctionCall */

#define MOST_BYTES 4096
#define MOST_ARGUMENTS 256

typedef struct {
    PyObject_HEAD
    PyObject *packer;
    Target target;
} FunctionCall;

static PyObject *
function_call_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"pack", "launch", "current", "context", "function", NULL};
    PyObject *packer;
    Target target;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO&O&O&O&:FunctionCall", names, &packer,
                                     ostinato_as_pointer, &target.launch,
                                     ostinato_as_pointer, &target.current,
                                     ostinato_as_pointer, &target.context,
                                     ostinato_as_pointer, &target.function))
        return NULL;
    PyTypeObject *kind = Py_TYPE(packer);
    if (PyType_GetSlot(kind, Py_tp_dealloc) != (void *)packer_dealloc) {
        PyErr_SetString(PyExc_TypeError, "a Packer is needed");
        return NULL;
    }
    if (!check_target(&target))
        return NULL;
    if (((Packer *)packer)->size > MOST_BYTES || ((Packer *)packer)->count > MOST_ARGUMENTS) {
        PyErr_SetString(PyExc_ValueError, "too many arguments for a launch in one call");
        return NULL;
    }
    FunctionCall *self = (FunctionCall *)ostinato_new(type);
    if (self == NULL)
        return NULL;
    self->packer = Py_NewRef(packer);
    self->target = target;
    return (PyObject *)self;
}

static void
function_call_dealloc(PyObject *op)
{
    Py_XDECREF(((FunctionCall *)op)->packer);
    ostinato_free(op);
}

static PyObject *
function_call_launch(PyObject *op, PyObject *const *args, Py_ssize_t count)
{
    FunctionCall *self = (FunctionCall *)op;
    Packer *packer = (Packer *)self->packer;
    LaunchConfig config = {0};
    void *params[MOST_ARGUMENTS];
    _Alignas(16) unsigned char data[MOST_BYTES];
    if (count != 5) {
        PyErr_SetString(PyExc_TypeError, "stream, grid, block, shared and values are needed");
        return NULL;
    }
    if (!ostinato_as_pointer(args[0], &config.stream) || !as_dimensions(args[1], config.grid) ||
        !as_dimensions(args[2], config.block) || !as_u32(args[3], &config.shared)) {
        PyErr_Clear(); /* as above */
        Py_RETURN_NONE;
    }
    int packed = pack_all(packer, args[4], data);
    if (packed < 0)
        return NULL;
    if (packed == 0)
        Py_RETURN_NONE;
    for (Py_ssize_t i = 0; i < packer->count; i++)
        params[i] = data + packer->slots[i].offset;
    return launch_target(&self->target, &config, params);
}

static PyMethodDef function_call_methods[] = {
    {"launch", (PyCFunction)(void (*)(void))function_call_launch, METH_FASTCALL,
     "launch($self, stream, grid, block, shared, values, /)\n--\n\nThe status, or None if nothing "
     "was launched: a value is not just what its slot takes, or another context is current."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot function_call_slots[] = {
    {Py_tp_doc, "FunctionCall(pack, launch, current, context, function)\n--\n\nLaunches of one "
                "function, of arguments that the Packer `pack` takes."},
    {Py_tp_new, function_call_new},
    {Py_tp_dealloc, function_call_dealloc},
    {Py_tp_methods, function_call_methods},
    {0, NULL},
};

static PyType_Spec function_call_spec = {
    .name = "ostinato.driver._launch.FunctionCall",
    .basicsize = sizeof(FunctionCall),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = function_call_slots,
};

/* --------------------------------------------------------------------------------------- module */

int
ostinato_add_kernel_types(PyObject *module)
{
    PyType_Spec *const specs[] = {&packer_spec, &kernel_call_spec, &function_call_spec};
    for (int i = 0; i < 3; i++)
        if (ostinato_add_type(module, specs[i]) < 0)
            return -1;
    return 0;
}
