/* The hot paths of replays, launches and changes of graphs, compiled.
 *
 * Launcher and Prepared replay a graph: one comparison and one C call without the GIL.  Repeat
 * replays the graph of a Seat in a cache if nothing that decides the replay has changed.
 * Packer packs the arguments of a kernel, KernelCall launches with packed bytes, and FunctionCall
 * packs and launches in one call.  KernelNode sets the arguments of an executable's node, and
 * read_nodes reads a definition.  module_listener returns the callback for CUPTI.
 *
 * driver/launcher.py and driver/cuda/launch.py implement the same in Python, for installations
 * without this module, where nodes are read one by one.  module_listener has no such twin, since the
 * callback must not take the GIL.  The limited API of CPython 3.11 lets one build serve every later
 * version.
 */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <structmember.h>
#include <math.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { PREPARED, LAUNCHER, SEAT, REPEAT, PACKER, KERNEL_CALL, FUNCTION_CALL, KERNEL_NODE, TYPES };

typedef struct {
    PyTypeObject *types[TYPES];
} State;

/* Converts a handle or an address, a non-negative int, for PyArg_Parse ("O&"). */
static int
as_pointer(PyObject *number, void *result)
{
    void *pointer = PyLong_AsVoidPtr(number);
    if (pointer == NULL && PyErr_Occurred())
        return 0;
    *(void **)result = pointer;
    return 1;
}

static PyObject *
new_object(PyTypeObject *type)
{
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    return alloc(type, 0);
}

/* Frees an object whose own fields are released already. */
static void
free_object(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

/* cuGraphLaunch and cuCtxGetCurrent */
typedef int (*graph_function)(void *executable, void *stream);
typedef int (*current_function)(void **context);

static int
is_current(current_function current, void *context)
{
    void *found = NULL;
    return current(&found) == 0 && found == context;
}

typedef struct {
    graph_function function;
    void *executable;
    void *stream;
    current_function current; /* NULL: the stream is of one context, whichever is current */
    void *context;
} Call;

enum { INVALID_CONTEXT = 201 };

static int
call_without_gil(Call call)
{
    int status = INVALID_CONTEXT;
    Py_BEGIN_ALLOW_THREADS
    if (call.current == NULL || is_current(call.current, call.context))
        status = call.function(call.executable, call.stream);
    Py_END_ALLOW_THREADS
    return status;
}

/* ------------------------------------------------------------------------------------- Prepared */

typedef struct {
    PyObject_HEAD
    Call call;
} Prepared;

static PyObject *
prepared_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"function", "executable", "stream", "within", NULL};
    void *function, *executable, *stream, *current = NULL, *context = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&O&|(O&O&):Prepared", names, as_pointer,
                                     &function, as_pointer, &executable, as_pointer, &stream,
                                     as_pointer, &current, as_pointer, &context))
        return NULL;
    if (function == NULL || (current == NULL && context != NULL)) {
        PyErr_SetString(PyExc_ValueError, "a function is 0; it must be the address of a C function");
        return NULL;
    }
    Prepared *self = (Prepared *)new_object(type);
    if (self == NULL)
        return NULL;
    self->call = (Call){(graph_function)function, executable, stream, (current_function)current,
                        context};
    return (PyObject *)self;
}

static PyObject *
prepared_call(PyObject *self, PyObject *args, PyObject *kwargs)
{
    if (PyTuple_Size(args) != 0 || (kwargs != NULL && PyDict_Size(kwargs) != 0)) {
        PyErr_SetString(PyExc_TypeError, "a prepared launch takes no arguments");
        return NULL;
    }
    return PyLong_FromLong(call_without_gil(((Prepared *)self)->call));
}

static PyType_Slot prepared_slots[] = {
    {Py_tp_doc, "Prepared(function, executable, stream, within=None)\n--\n\n"
                "A call of a C function with two pointers, which returns the function's status.\n\n"
                "The arguments are addresses or handles as integers; they must stay valid.  "
                "`within`: the address of cuCtxGetCurrent, and a context: while another one is "
                "current, nothing is called, and the status is 201."},
    {Py_tp_new, prepared_new},
    {Py_tp_dealloc, free_object},
    {Py_tp_call, prepared_call},
    {0, NULL},
};

/* ------------------------------------------------------------------------------------- Launcher */

/* Cold: `stream` is NULL, which equals no argument of `launch`.
 * Hot:  `stream` is the stream of the last launch and `prepared` its prepared call.  If `prepared`
 *       is a Prepared, `call` is a copy of its call, so that a launch reads no other object;
 *       otherwise `call.function` is NULL.
 * The fields change together: the GIL is held, and no Python code runs in between. */
typedef struct {
    PyObject_HEAD
    PyObject *stream;
    PyObject *prepared;
    Call call;
} Launcher;

/* Launches on the hot stream.  Returns 0, or -1 with an exception set. */
static int
launch_hot(Launcher *self, PyObject *stream)
{
    int status;
    if (self->call.function != NULL) {
        status = call_without_gil(self->call);
    }
    else {
        PyObject *prepared = Py_NewRef(self->prepared); /* `cool` may run during the call */
        PyObject *answer = PyObject_CallNoArgs(prepared);
        Py_DECREF(prepared);
        if (answer == NULL)
            return -1;
        status = PyObject_IsTrue(answer);
        Py_DECREF(answer);
        if (status < 0)
            return -1;
    }
    if (status != 0) {
        PyObject *done = PyObject_CallMethod((PyObject *)self, "_launch_checked", "O", stream);
        if (done == NULL)
            return -1;
        Py_DECREF(done);
    }
    return 0;
}

static PyObject *
launcher_launch(PyObject *op, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
    Launcher *self = (Launcher *)op;
    PyObject *stream;
    Py_ssize_t named = names == NULL ? 0 : PyTuple_Size(names);
    if (count + named != 1 ||
        (named && PyUnicode_CompareWithASCIIString(PyTuple_GetItem(names, 0), "stream") != 0)) {
        PyErr_SetString(PyExc_TypeError, "launch() takes one argument, the stream");
        return NULL;
    }
    stream = args[0];
    if (stream != self->stream)
        return PyObject_CallMethod(op, "_launch_slowly", "O", stream);
    if (launch_hot(self, stream) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static void
set_hot(Launcher *self, PyObject *stream, PyObject *prepared, Call call)
{
    PyObject *old_stream = self->stream, *old_prepared = self->prepared;
    self->stream = Py_XNewRef(stream);
    self->prepared = Py_XNewRef(prepared);
    self->call = call;
    Py_XDECREF(old_stream); /* last: a finalizer may run any code */
    Py_XDECREF(old_prepared);
}

static PyObject *
launcher_heat(PyObject *self, PyTypeObject *defined_by, PyObject *const *args, Py_ssize_t count,
              PyObject *names)
{
    if (count != 2 || names != NULL) {
        PyErr_SetString(PyExc_TypeError, "_heat takes a stream and a prepared launch");
        return NULL;
    }
    State *state = PyType_GetModuleState(defined_by);
    if (state == NULL)
        return NULL;
    Call call = {NULL};
    if (Py_TYPE(args[1]) == state->types[PREPARED])
        call = ((Prepared *)args[1])->call;
    set_hot((Launcher *)self, args[0], args[1], call);
    Py_RETURN_NONE;
}

static PyObject *
launcher_cool(PyObject *self, PyObject *Py_UNUSED(none))
{
    set_hot((Launcher *)self, NULL, NULL, (Call){NULL});
    Py_RETURN_NONE;
}

static int
launcher_traverse(PyObject *op, visitproc visit, void *arg)
{
    Launcher *self = (Launcher *)op;
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(self->stream);
    Py_VISIT(self->prepared);
    return 0;
}

static int
launcher_clear(PyObject *self)
{
    set_hot((Launcher *)self, NULL, NULL, (Call){NULL});
    return 0;
}

static void
launcher_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    launcher_clear(self);
    free_object(self);
}

PyDoc_STRVAR(launch_doc, /* the same text as PythonLauncher.launch */
"launch($self, stream)\n--\n\n"
"Runs the graph once, in stream order; returns without waiting.  Releases the GIL.\n"
"\n"
"The first launch on a stream prepares the call; later ones only make it.  Raises\n"
"CaptureError on a stream that captures (the capture goes on), DriverError, ClosedError.");

static PyMethodDef launcher_methods[] = {
    {"launch", (PyCFunction)(void (*)(void))launcher_launch, METH_FASTCALL | METH_KEYWORDS,
     launch_doc},
    {"_heat", (PyCFunction)(void (*)(void))launcher_heat,
     METH_METHOD | METH_FASTCALL | METH_KEYWORDS, "_heat($self, stream, prepared, /)\n--\n\n"},
    {"cool", launcher_cool, METH_NOARGS, "cool($self, /)\n--\n\n"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot launcher_slots[] = {
    {Py_tp_doc, "See PythonLauncher in ostinato.driver.launcher."},
    {Py_tp_methods, launcher_methods},
    {Py_tp_traverse, launcher_traverse},
    {Py_tp_clear, launcher_clear},
    {Py_tp_dealloc, launcher_dealloc},
    {0, NULL},
};

/* ----------------------------------------------------------------------------------------- Seat */

/* Each method is atomic: it holds the GIL and runs no Python code. */
typedef struct {
    PyObject_HEAD
    Py_ssize_t leases, uses;
    char leaving;
} Seat;

static PyObject *
seat_lease(PyObject *op, PyObject *Py_UNUSED(none))
{
    Seat *self = (Seat *)op;
    if (self->leaving)
        Py_RETURN_FALSE;
    self->leases++;
    self->uses++;
    Py_RETURN_TRUE;
}

static PyObject *
seat_release(PyObject *op, PyObject *Py_UNUSED(none))
{
    Seat *self = (Seat *)op;
    self->leases--;
    return PyBool_FromLong(self->leaving && self->leases == 0);
}

static PyObject *
seat_leave(PyObject *op, PyObject *Py_UNUSED(none))
{
    Seat *self = (Seat *)op;
    self->leaving = 1;
    return PyBool_FromLong(self->leases == 0);
}

static PyMethodDef seat_methods[] = {
    {"lease", seat_lease, METH_NOARGS, "lease($self, /)\n--\n\n"},
    {"release", seat_release, METH_NOARGS, "release($self, /)\n--\n\n"},
    {"leave", seat_leave, METH_NOARGS, "leave($self, /)\n--\n\n"},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef seat_members[] = {
    {"leases", T_PYSSIZET, offsetof(Seat, leases), READONLY, NULL},
    {"uses", T_PYSSIZET, offsetof(Seat, uses), READONLY, NULL},
    {"leaving", T_BOOL, offsetof(Seat, leaving), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot seat_slots[] = {
    {Py_tp_doc, "See PythonSeat in ostinato.driver.launcher."},
    {Py_tp_methods, seat_methods},
    {Py_tp_members, seat_members},
    {Py_tp_dealloc, free_object},
    {0, NULL},
};

/* --------------------------------------------------------------------------------------- Repeat */

/* Cold: `sizes` is NULL.  Armed: all objects of the second line are set. */
typedef struct {
    PyObject_HEAD
    PyObject *acquire, *unlock, *answer, *guarded, *table, *latest, *touch, *release;
    PyObject *sizes, *wanted, *seat, *launcher, *stream;
    Py_ssize_t left, count;
} Repeat;

/* The number of objects that it refers to: `acquire` and the fields after it, up to `left`. */
enum { REFERRED = (offsetof(Repeat, left) - offsetof(Repeat, acquire)) / sizeof(PyObject *) };

static PyObject *
repeat_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"lock", "answer", "guarded", "table", "touch", "release", NULL};
    PyObject *lock, *answer, *guarded, *table, *touch, *release;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO!OOO:Repeat", names, &lock, &answer,
                                     &PyTuple_Type, &guarded, &table, &touch, &release))
        return NULL;
    for (Py_ssize_t i = 0; i < PyTuple_Size(guarded); i++) {
        PyObject *pair = PyTuple_GetItem(guarded, i);
        if (!PyTuple_CheckExact(pair) || PyTuple_Size(pair) != 2) {
            PyErr_SetString(PyExc_TypeError, "guarded: pairs of an object and a name are needed");
            return NULL;
        }
    }
    PyObject *acquire = PyObject_GetAttrString(lock, "acquire");
    PyObject *unlock = acquire == NULL ? NULL : PyObject_GetAttrString(lock, "release");
    PyObject *latest = unlock == NULL ? NULL : PyUnicode_InternFromString("latest");
    Repeat *self = latest == NULL ? NULL : (Repeat *)new_object(type);
    if (self == NULL) {
        Py_XDECREF(acquire);
        Py_XDECREF(unlock);
        Py_XDECREF(latest);
        return NULL;
    }
    self->latest = latest;
    self->table = Py_NewRef(table);
    self->touch = Py_NewRef(touch);
    self->acquire = acquire;
    self->unlock = unlock;
    self->answer = Py_NewRef(answer);
    self->guarded = Py_NewRef(guarded);
    self->release = Py_NewRef(release);
    return (PyObject *)self;
}

static void
set_armed(Repeat *self, PyObject *sizes, PyObject *wanted, PyObject *seat, PyObject *launcher,
          PyObject *stream)
{
    PyObject *old[] = {self->sizes, self->wanted, self->seat, self->launcher, self->stream};
    self->sizes = Py_XNewRef(sizes);
    self->wanted = Py_XNewRef(wanted);
    self->seat = Py_XNewRef(seat);
    self->launcher = Py_XNewRef(launcher);
    self->stream = Py_XNewRef(stream);
    for (int i = 0; i < 5; i++)
        Py_XDECREF(old[i]); /* last: a finalizer may run any code */
}

static PyObject *
repeat_arm(PyObject *op, PyTypeObject *defined_by, PyObject *const *args, Py_ssize_t count,
           PyObject *names)
{
    Repeat *self = (Repeat *)op;
    State *state = PyType_GetModuleState(defined_by);
    if (state == NULL)
        return NULL;
    if (count != 6 || names != NULL || !PyDict_CheckExact(args[0]) ||
        !PyTuple_CheckExact(args[1]) || PyTuple_Size(args[1]) != PyTuple_Size(self->guarded) ||
        !PyObject_TypeCheck(args[2], state->types[SEAT]) ||
        !PyObject_TypeCheck(args[3], state->types[LAUNCHER])) {
        PyErr_SetString(PyExc_TypeError, "arm takes sizes, what is wanted of each guarded "
                                         "attribute, a Seat, a Launcher, a stream and a number");
        return NULL;
    }
    Py_ssize_t left = PyLong_AsSsize_t(args[5]);
    if (left == -1 && PyErr_Occurred())
        return NULL;
    self->left = left;
    set_armed(self, args[0], args[1], args[2], args[3], args[4]);
    Py_RETURN_NONE;
}

static PyObject *
repeat_cool(PyObject *self, PyObject *Py_UNUSED(none))
{
    set_armed((Repeat *)self, NULL, NULL, NULL, NULL, NULL);
    Py_RETURN_NONE;
}

static PyObject *
repeat_taken(PyObject *op, PyObject *Py_UNUSED(none))
{
    Repeat *self = (Repeat *)op;
    Py_ssize_t count = self->count;
    self->count = 0;
    return PyLong_FromSsize_t(count);
}

/* 1 if the dicts have equal items, and exact ints in `given`; else 0, or -1 with an exception. */
static int
same_sizes(PyObject *given, PyObject *sizes)
{
    PyObject *name, *value;
    Py_ssize_t at = 0;
    if (PyDict_Size(given) != PyDict_Size(sizes))
        return 0;
    while (PyDict_Next(given, &at, &name, &value)) {
        PyObject *wanted = PyDict_GetItemWithError(sizes, name);
        if (wanted == NULL)
            return PyErr_Occurred() ? -1 : 0;
        if (!PyLong_CheckExact(value))
            return 0;
        int same = value == wanted ? 1 : PyObject_RichCompareBool(value, wanted, Py_EQ);
        if (same != 1)
            return same;
    }
    return 1;
}

/* 1 if each guarded attribute is the object in `wanted`, 0 if not, -1 with an exception set. */
static int
all_guarded(PyObject *guarded, PyObject *wanted)
{
    for (Py_ssize_t i = 0; i < PyTuple_Size(guarded); i++) {
        PyObject *pair = PyTuple_GetItem(guarded, i);
        PyObject *value = PyObject_GetAttr(PyTuple_GetItem(pair, 0), PyTuple_GetItem(pair, 1));
        if (value == NULL)
            return -1;
        int same = value == PyTuple_GetItem(wanted, i);
        Py_DECREF(value);
        if (!same)
            return 0;
    }
    return 1;
}

/* Calls a function, also if an exception is set, which then stays set.  `argument` may be NULL.
 * Returns -1 if the call raised an exception. */
static int
call_at_end(PyObject *function, PyObject *argument)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *done = argument == NULL ? PyObject_CallNoArgs(function)
                                      : PyObject_CallFunctionObjArgs(function, argument, NULL);
    int failed = done == NULL ? -1 : 0;
    Py_XDECREF(done);
    if (type != NULL)
        PyErr_Restore(type, value, trace);
    return failed;
}

/* Launches the armed graph; the caller holds the lock.  Returns 1 if the graph was launched, 0 if
 * not, -1 with an exception set.  Python code that runs in between may cool or re-arm `self`, hence
 * the repeated comparison of `sizes`. */
static int
repeat_launch(Repeat *self, PyObject *sizes)
{
    if (self->sizes != sizes || self->left <= 0)
        return 0; /* another thread re-armed or cooled it before this one had the lock */
    PyObject *wanted = Py_NewRef(self->wanted);
    int made = all_guarded(self->guarded, wanted);
    Py_DECREF(wanted);
    if (made != 1)
        return made;
    if (self->sizes != sizes)
        return 0;
    PyObject *kept = Py_NewRef(self->seat);
    PyObject *latest = PyObject_GetAttr(self->table, self->latest);
    Py_XDECREF(latest); /* from here on only the address is compared */
    if (latest != NULL && latest != kept) {
        latest = PyObject_CallFunctionObjArgs(self->touch, kept, NULL);
        Py_XDECREF(latest);
    }
    Py_DECREF(kept);
    if (latest == NULL)
        return -1;
    if (self->sizes != sizes)
        return 0;
    Seat *seat = (Seat *)self->seat;
    Launcher *launcher = (Launcher *)self->launcher;
    if (launcher->stream != self->stream || seat->leaving)
        return 0;
    PyObject *stream = Py_NewRef(self->stream); /* `cool` may run during the launch */
    Py_INCREF((PyObject *)seat);
    Py_INCREF((PyObject *)launcher);
    seat->leases++;
    seat->uses++;
    if (launch_hot(launcher, stream) < 0) {
        made = -1;
    }
    else {
        self->left--;
        self->count++;
    }
    seat->leases--;
    if (seat->leaving && seat->leases == 0 && call_at_end(self->release, (PyObject *)seat) < 0)
        made = -1;
    Py_DECREF((PyObject *)seat);
    Py_DECREF((PyObject *)launcher);
    Py_DECREF(stream);
    return made;
}

static PyObject *
repeat_again(PyObject *op, PyObject *given)
{
    Repeat *self = (Repeat *)op;
    if (self->sizes == NULL || !PyDict_CheckExact(given))
        Py_RETURN_NONE;
    PyObject *sizes = Py_NewRef(self->sizes);
    int made = same_sizes(given, sizes);
    if (made == 1) {
        PyObject *locked = PyObject_CallNoArgs(self->acquire);
        made = locked == NULL ? -1 : repeat_launch(self, sizes);
        if (locked != NULL && call_at_end(self->unlock, NULL) < 0)
            made = -1;
        Py_XDECREF(locked);
    }
    Py_DECREF(sizes);
    if (made < 0)
        return NULL;
    return Py_NewRef(made ? self->answer : Py_None);
}

static int
repeat_traverse(PyObject *op, visitproc visit, void *arg)
{
    PyObject **referred = &((Repeat *)op)->acquire;
    Py_VISIT(Py_TYPE(op));
    for (size_t i = 0; i < REFERRED; i++)
        Py_VISIT(referred[i]);
    return 0;
}

static int
repeat_clear(PyObject *op)
{
    PyObject **referred = &((Repeat *)op)->acquire;
    set_armed((Repeat *)op, NULL, NULL, NULL, NULL, NULL); /* first: cold before anything is gone */
    for (size_t i = 0; i < REFERRED; i++)
        Py_CLEAR(referred[i]);
    return 0;
}

static void
repeat_dealloc(PyObject *op)
{
    PyObject_GC_UnTrack(op);
    repeat_clear(op);
    free_object(op);
}

static PyMethodDef repeat_methods[] = {
    {"again", repeat_again, METH_O, "again($self, given, /)\n--\n\n"},
    {"arm", (PyCFunction)(void (*)(void))repeat_arm, METH_METHOD | METH_FASTCALL | METH_KEYWORDS,
     "arm($self, sizes, wanted, seat, launcher, stream, left, /)\n--\n\n"},
    {"cool", repeat_cool, METH_NOARGS, "cool($self, /)\n--\n\n"},
    {"taken", repeat_taken, METH_NOARGS, "taken($self, /)\n--\n\n"},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef repeat_members[] = {
    {"left", T_PYSSIZET, offsetof(Repeat, left), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot repeat_slots[] = {
    {Py_tp_members, repeat_members},
    {Py_tp_doc, "See Repeat in ostinato.driver.launcher."},
    {Py_tp_new, repeat_new},
    {Py_tp_methods, repeat_methods},
    {Py_tp_traverse, repeat_traverse},
    {Py_tp_clear, repeat_clear},
    {Py_tp_dealloc, repeat_dealloc},
    {0, NULL},
};

/* --------------------------------------------------------------------------------------- Packer */

/* `element` and `raw`: the element types that a pointer slot accepts; NULL for a pointer to any
 * memory and for all other slots. */
typedef struct {
    char code;
    uint32_t offset;
    PyObject *element, *raw;
} Slot;

typedef struct {
    PyObject_HEAD
    PyObject *pointer;     /* "_pointer", the attribute of a buffer: (address, element) */
    PyObject *address_for; /* (value, element) -> address, for values without that attribute */
    PyObject *elements;    /* owns `element` and `raw` of the slots */
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
    static char *names[] = {"codes", "offsets", "size", "elements", "address_for", NULL};
    const char *codes;
    Py_ssize_t count, size;
    PyObject *offsets, *elements, *address_for;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "s#O!nO!O:Packer", names, &codes, &count,
                                     &PyTuple_Type, &offsets, &size, &PyTuple_Type, &elements,
                                     &address_for))
        return NULL;
    if (PyTuple_Size(offsets) != count || PyTuple_Size(elements) != count || size < 0) {
        PyErr_SetString(PyExc_ValueError,
                        "an offset and an element for each code, and a size, are needed");
        return NULL;
    }
    Packer *self = (Packer *)new_object(type);
    if (self == NULL)
        return NULL;
    self->count = count;
    self->size = size;
    self->address_for = Py_NewRef(address_for);
    self->elements = Py_NewRef(elements);
    self->pointer = PyUnicode_InternFromString("_pointer");
    self->slots = PyMem_Malloc((count ? count : 1) * sizeof(Slot));
    if (self->slots == NULL)
        PyErr_NoMemory();
    if (self->pointer == NULL || self->slots == NULL)
        goto failed;
    for (Py_ssize_t i = 0; i < count; i++) {
        long offset = PyLong_AsLong(PyTuple_GetItem(offsets, i));
        int width = width_of(codes[i]);
        if (offset < 0 || width == 0 || offset + width > size) {
            if (!PyErr_Occurred())
                PyErr_Format(PyExc_ValueError, "slot %zd is unknown or outside the buffer", i);
            goto failed;
        }
        PyObject *pair = PyTuple_GetItem(elements, i), *element = NULL, *raw = NULL;
        if (pair != Py_None && !PyArg_ParseTuple(pair, "OO", &element, &raw))
            goto failed;
        self->slots[i] = (Slot){codes[i], (uint32_t)offset, element, raw};
    }
    return (PyObject *)self;
failed:
    Py_DECREF(self);
    return NULL;
}

static void
packer_dealloc(PyObject *op)
{
    Packer *self = (Packer *)op;
    Py_XDECREF(self->pointer);
    Py_XDECREF(self->address_for);
    Py_XDECREF(self->elements);
    PyMem_Free(self->slots);
    free_object(op);
}

/* True if an exception is set that is no Exception, such as KeyboardInterrupt. */
static int
interrupted(void)
{
    return PyErr_Occurred() != NULL && !PyErr_ExceptionMatches(PyExc_Exception);
}

/* Packs an exact int.  Returns 0 if it does not fit; an exception may be set. */
static int
pack_int(char code, PyObject *value, unsigned char *to)
{
    int width = width_of(code);
    uint64_t bits;
    if (!PyLong_CheckExact(value))
        return 0;
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
    memcpy(to, &bits, width); /* little-endian, as are all hosts that CUDA supports */
    return 1;
}

/* Packs an address.  Returns 0 if the slot does not accept the value; an exception may be set. */
static int
pack_pointer(Packer *self, const Slot *slot, PyObject *value, unsigned char *to)
{
    PyObject *pointer = PyObject_GetAttr(value, self->pointer);
    if (pointer != NULL) {
        PyObject *element = PyTuple_CheckExact(pointer) ? PyTuple_GetItem(pointer, 1) : NULL;
        if (element != NULL && (element == slot->element || element == slot->raw)) {
            int packed = pack_int('P', PyTuple_GetItem(pointer, 0), to);
            Py_DECREF(pointer);
            return packed;
        }
        Py_DECREF(pointer);
    }
    if (interrupted())
        return 0;
    PyErr_Clear();
    PyObject *element = slot->element == NULL ? Py_None : slot->element;
    PyObject *address = PyObject_CallFunctionObjArgs(self->address_for, value, element, NULL);
    if (address == NULL)
        return 0;
    int packed = pack_int('P', address, to);
    Py_DECREF(address);
    return packed;
}

/* Packs one value.  Returns 0 if its type is not exactly the slot's; an exception may be set. */
static int
pack_one(Packer *self, const Slot *slot, PyObject *value, unsigned char *to)
{
    char code = slot->code;
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
    if (code == 'P' && !PyLong_CheckExact(value))
        return pack_pointer(self, slot, value, to);
    return pack_int(code, value, to);
}

/* Packs a tuple of values.  Returns 1; 0 if a value does not fit; -1 if `interrupted`. */
static int
pack_all(Packer *self, PyObject *values, unsigned char *bytes)
{
    if (!PyTuple_Check(values) || PyTuple_Size(values) != self->count)
        return 0;
    memset(bytes, 0, self->size);
    for (Py_ssize_t i = 0; i < self->count; i++) {
        const Slot *slot = self->slots + i;
        if (!pack_one(self, slot, PyTuple_GetItem(values, i), bytes + slot->offset)) {
            if (interrupted())
                return -1;
            PyErr_Clear(); /* Signature.pack checks the values again and raises the error */
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
     "pack($self, values, /)\n--\n\nReturns the bytes of a tuple of values, or None if a value "
     "does not have exactly the type of its slot."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot packer_slots[] = {
    {Py_tp_doc, "Packer(codes, offsets, size, elements, address_for)\n--\n\n"
                "Packs kernel arguments.\n\n"
                "`codes`: a code of the module `struct` for each slot, or P for an address.  "
                "`elements`: the two elements that a pointer slot accepts, or None.  An address is "
                "an int; that of an object whose attribute `_pointer` is (address, element) with "
                "an accepted element; or the result of `address_for(value, element)`."},
    {Py_tp_new, packer_new},
    {Py_tp_dealloc, packer_dealloc},
    {Py_tp_methods, packer_methods},
    {0, NULL},
};

/* ----------------------------------------------------------------------------------- KernelCall */

/* CUlaunchConfig */
typedef struct {
    uint32_t grid[3], block[3], shared;
    void *stream, *attributes;
    uint32_t count;
} LaunchConfig;
_Static_assert(sizeof(LaunchConfig) == 56, "as in cuda.h");

/* cuLaunchKernelEx */
typedef int (*launch_function)(const LaunchConfig *config, void *function, void **params,
                               void **extra);

typedef struct {
    void *launch, *current; /* the C functions */
    void *context, *function;
} Target;

static int
as_target(PyObject *four, void *result)
{
    Target *target = result;
    if (!PyTuple_Check(four)) {
        PyErr_SetString(PyExc_TypeError, "launch, current, context and function come as a tuple");
        return 0;
    }
    if (!PyArg_ParseTuple(four, "O&O&O&O&", as_pointer, &target->launch, as_pointer,
                          &target->current, as_pointer, &target->context, as_pointer,
                          &target->function))
        return 0;
    if (target->launch != NULL && target->current != NULL)
        return 1;
    PyErr_SetString(PyExc_ValueError, "the address of a C function is 0");
    return 0;
}

/* Launches.  Returns the status, or None without a launch if another context is current. */
static PyObject *
launch_target(const Target *target, const LaunchConfig *config, void **params)
{
    int status;
    if (!is_current((current_function)target->current, target->context))
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
    void **params; /* one allocation: the pointers, then the bytes that the pointers address */
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

/* Fills `pointers` with the address of each argument, from a tuple of offsets into `data`.  Returns
 * 0 with an exception set if an offset is wrong. */
static int
point_into(void **pointers, PyObject *offsets, char *data, Py_ssize_t size)
{
    for (Py_ssize_t i = 0, count = PyTuple_Size(offsets); i < count; i++) {
        uint32_t offset;
        if (!as_u32(PyTuple_GetItem(offsets, i), &offset))
            return 0;
        if (offset > size) {
            PyErr_Format(PyExc_ValueError, "argument %zd begins behind the last byte", i);
            return 0;
        }
        pointers[i] = data + offset;
    }
    return 1;
}

static PyObject *
kernel_call_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"target", "grid", "block", "shared", "stream", "attributes", "count",
                            "data", "offsets", NULL};
    Target target;
    LaunchConfig config = {0};
    const char *data;
    Py_ssize_t size;
    PyObject *offsets;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&O&O&O&O&O&y#O!:KernelCall", names,
                                     as_target, &target, as_dimensions, config.grid,
                                     as_dimensions, config.block, as_u32, &config.shared,
                                     as_pointer, &config.stream, as_pointer, &config.attributes,
                                     as_u32, &config.count, &data, &size, &PyTuple_Type, &offsets))
        return NULL;
    KernelCall *self = (KernelCall *)new_object(type);
    if (self == NULL)
        return NULL;
    Py_ssize_t count = PyTuple_Size(offsets);
    self->target = target;
    self->config = config;
    self->params = PyMem_Malloc(count * sizeof(void *) + size + 1);
    if (self->params == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    char *copy = (char *)(self->params + count);
    memcpy(copy, data, size);
    if (!point_into(self->params, offsets, copy, size)) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static void
kernel_call_dealloc(PyObject *op)
{
    PyMem_Free(((KernelCall *)op)->params);
    free_object(op);
}

static PyObject *
kernel_call_launch(PyObject *op, PyObject *Py_UNUSED(none))
{
    KernelCall *self = (KernelCall *)op;
    return launch_target(&self->target, &self->config, self->params);
}

static PyMethodDef kernel_call_methods[] = {
    {"launch", kernel_call_launch, METH_NOARGS,
     "launch($self, /)\n--\n\nReturns the status; None, without a launch, if another context is "
     "current."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot kernel_call_slots[] = {
    {Py_tp_doc,
     "KernelCall(target, grid, block, shared, stream, attributes, count, data, offsets)\n--\n\n"
     "A kernel launch with its arguments.\n\n"
     "`target`: the addresses of cuLaunchKernelEx and cuCtxGetCurrent, the context, the function.  "
     "`data`: the argument bytes, which are copied; `offsets`: the offset of each argument.  "
     "`attributes`: the address of `count` CUlaunchAttribute, which must stay valid."},
    {Py_tp_new, kernel_call_new},
    {Py_tp_dealloc, kernel_call_dealloc},
    {Py_tp_methods, kernel_call_methods},
    {0, NULL},
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
    static char *names[] = {"pack", "target", NULL};
    State *state = PyType_GetModuleState(type);
    PyObject *packer;
    Target target;
    if (state == NULL || !PyArg_ParseTupleAndKeywords(args, kwargs, "O!O&:FunctionCall", names,
                                                      state->types[PACKER], &packer, as_target,
                                                      &target))
        return NULL;
    if (((Packer *)packer)->size > MOST_BYTES || ((Packer *)packer)->count > MOST_ARGUMENTS) {
        PyErr_SetString(PyExc_ValueError, "too many arguments for a launch in one call");
        return NULL;
    }
    FunctionCall *self = (FunctionCall *)new_object(type);
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
    free_object(op);
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
    if (!as_pointer(args[0], &config.stream) || !as_dimensions(args[1], config.grid) ||
        !as_dimensions(args[2], config.block) || !as_u32(args[3], &config.shared)) {
        PyErr_Clear(); /* `launch_kernel` checks the arguments again and raises the error */
        Py_RETURN_NONE;
    }
    unsigned char *from = data;
    if (PyBytes_CheckExact(args[4])) { /* already packed */
        if (PyBytes_Size(args[4]) != packer->size)
            Py_RETURN_NONE;
        from = (unsigned char *)PyBytes_AsString(args[4]); /* the driver copies the bytes */
    } else {
        int packed = pack_all(packer, args[4], data);
        if (packed < 0)
            return NULL;
        if (packed == 0)
            Py_RETURN_NONE;
    }
    for (Py_ssize_t i = 0; i < packer->count; i++)
        params[i] = from + packer->slots[i].offset;
    return launch_target(&self->target, &config, params);
}

static PyMethodDef function_call_methods[] = {
    {"launch", (PyCFunction)(void (*)(void))function_call_launch, METH_FASTCALL,
     "launch($self, stream, grid, block, shared, values, /)\n--\n\nLaunches the function.\n\n"
     "`values`: a tuple, or packed bytes.  Returns the status, or None if nothing was launched: a "
     "value does not have exactly the type of its slot, the number of bytes is wrong, a number "
     "does not fit, or another context is current."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot function_call_slots[] = {
    {Py_tp_doc, "FunctionCall(pack, target)\n--\n\nLaunches of one function.\n\n"
                "`pack`: the Packer of its arguments; `target` as for KernelCall."},
    {Py_tp_new, function_call_new},
    {Py_tp_dealloc, function_call_dealloc},
    {Py_tp_methods, function_call_methods},
    {0, NULL},
};

/* ----------------------------------------------------------------------------------- KernelNode */

/* CUDA_KERNEL_NODE_PARAMS_v2 */
typedef struct {
    void *function;
    uint32_t grid[3], block[3], shared;
    void **params, **extra;
    void *kernel, *context;
} NodeParams;
_Static_assert(sizeof(NodeParams) == 72, "as in cuda.h");

/* cuGraphExecKernelNodeSetParams_v2 */
typedef int (*set_function)(void *executable, void *node, const NodeParams *params);

enum { EXTRA_WORDS = 5 }; /* two pairs of key and value, and the end marker */

typedef struct {
    PyObject_HEAD
    set_function set;
    current_function current;
    void *context, *executable, *node;
    NodeParams params;
    size_t size;
    void **words; /* one allocation: kernelParams or extra, then the argument bytes */
    unsigned char *data;
    int held; /* true if the last call succeeded, so that the executable's arguments equal `data` */
} KernelNode;

/* Makes an object with its own copy of the argument bytes.  The caller fills in the calls, the
 * handles, and the `count` words of arguments that are not packed. */
static KernelNode *
new_kernel_node(PyTypeObject *type, const NodeParams *params, Py_ssize_t count, const char *data,
                size_t size, int packed)
{
    KernelNode *self = (KernelNode *)new_object(type);
    if (self == NULL)
        return NULL;
    self->params = *params;
    self->size = size;
    self->words = PyMem_Malloc((size_t)count * sizeof(void *) + size + 1);
    if (self->words == NULL) {
        Py_DECREF(self);
        PyErr_NoMemory();
        return NULL;
    }
    self->data = (unsigned char *)(self->words + count);
    memcpy(self->data, data, size);
    if (packed) { /* CU_LAUNCH_PARAM_BUFFER_POINTER, _SIZE and _END */
        void *extra[EXTRA_WORDS] = {(void *)1, self->data, (void *)2, &self->size, NULL};
        memcpy(self->words, extra, sizeof extra);
        self->params.extra = size ? self->words : NULL;
    }
    else
        self->params.params = count ? self->words : NULL;
    return self;
}

static void
kernel_node_dealloc(PyObject *op)
{
    PyMem_Free(((KernelNode *)op)->words);
    free_object(op);
}

/* True if `size` bytes at `offset` lie within the arguments; sets ValueError if not. */
static int
inside(const KernelNode *self, Py_ssize_t offset, Py_ssize_t size)
{
    if (offset >= 0 && size <= (Py_ssize_t)self->size && offset <= (Py_ssize_t)self->size - size)
        return 1;
    PyErr_Format(PyExc_ValueError, "%zd bytes at %zd are outside %zu", size, offset, self->size);
    return 0;
}

typedef struct {
    KernelNode *node; /* the caller keeps it alive */
    size_t offset, size, before;
    const char *raw;
} Write;

/* Makes the writes and saves the old bytes in `before`; with `back`, restores the old bytes. */
static void
exchange(const Write *first, const Write *end, unsigned char *before, int back)
{
    /* Restoring runs in reverse order, since two writes may overlap. */
    for (Py_ssize_t i = 0, n = end - first; i < n; i++) {
        const Write *write = back ? end - 1 - i : first + i;
        unsigned char *at = write->node->data + write->offset;
        if (back)
            memcpy(at, before + write->before, write->size);
        else {
            memcpy(before + write->before, at, write->size);
            memcpy(at, write->raw, write->size);
        }
    }
}

static int
set_node(KernelNode *node)
{
    int status = node->set(node->executable, node->node, &node->params);
    node->held = status == 0;
    return status;
}

/* Makes all writes, with one driver call for adjacent writes to a node.  If a call fails, undoes
 * the earlier ones; `undone` is the first status of undoing that is not 0, or 0. */
static int
set_all(const Write *writes, size_t count, unsigned char *before, int *undone)
{
    size_t done = 0, end;
    int status = 0;
    *undone = 0;
    for (; done < count && !status; done = status ? done : end) {
        for (end = done + 1; end < count && writes[end].node == writes[done].node; end++)
            ;
        exchange(writes + done, writes + end, before, 0);
        status = set_node(writes[done].node);
        if (status)
            exchange(writes + done, writes + end, before, 1);
    }
    while (status && done > 0) {
        for (end = done--; done > 0 && writes[done - 1].node == writes[end - 1].node; done--)
            ;
        exchange(writes + done, writes + end, before, 1);
        int back = set_node(writes[done].node);
        *undone = *undone ? *undone : back;
    }
    return status;
}

/* Reads an offset and bytes within the arguments.  Returns 0 with an exception set on failure. */
static int
take_write(KernelNode *self, PyObject *const *args, Py_ssize_t count, Write *write)
{
    char *raw;
    Py_ssize_t size;
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "an offset and bytes are needed");
        return 0;
    }
    Py_ssize_t offset = PyLong_AsSsize_t(args[0]);
    if ((offset == -1 && PyErr_Occurred()) || PyBytes_AsStringAndSize(args[1], &raw, &size) < 0 ||
        !inside(self, offset, size))
        return 0;
    *write = (Write){self, (size_t)offset, (size_t)size, 0, raw};
    return 1;
}

static int
is_held(const Write *write)
{
    return write->node->held &&
           memcmp(write->node->data + write->offset, write->raw, write->size) == 0;
}

static PyObject *
kernel_node_holds(PyObject *op, PyObject *const *args, Py_ssize_t count)
{
    Write write;
    if (!take_write((KernelNode *)op, args, count, &write))
        return NULL;
    return PyBool_FromLong(is_held(&write));
}

static PyObject *
kernel_node_set(PyObject *op, PyObject *const *args, Py_ssize_t count)
{
    KernelNode *self = (KernelNode *)op;
    Write write;
    if (!take_write(self, args, count, &write))
        return NULL;
    if (!is_current(self->current, self->context))
        Py_RETURN_NONE;
    /* A driver call costs as much if it changes nothing, and makes the next launch slower. */
    if (is_held(&write))
        return PyLong_FromLong(0);
    unsigned char small[64], *before = write.size <= 64 ? small : PyMem_Malloc(write.size);
    if (before == NULL)
        return PyErr_NoMemory();
    int status, undone;
    Py_BEGIN_ALLOW_THREADS
    status = set_all(&write, 1, before, &undone);
    Py_END_ALLOW_THREADS
    if (before != small)
        PyMem_Free(before);
    return PyLong_FromLong(status);
}

static PyObject *
kernel_node_data(PyObject *op, void *Py_UNUSED(closure))
{
    KernelNode *self = (KernelNode *)op;
    return PyBytes_FromStringAndSize((char *)self->data, (Py_ssize_t)self->size);
}

static PyMethodDef kernel_node_methods[] = {
    {"holds", (PyCFunction)(void (*)(void))kernel_node_holds, METH_FASTCALL,
     "holds($self, offset, raw, /)\n--\n\nTrue if the executable is known to hold these bytes."},
    {"set", (PyCFunction)(void (*)(void))kernel_node_set, METH_FASTCALL,
     "set($self, offset, raw, /)\n--\n\nSets argument bytes, in the executable too.\n\nReturns the "
     "status, or None if another context is current.  After any result but 0 nothing was changed."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef kernel_node_getset[] = {
    {"data", kernel_node_data, NULL, "The argument bytes that were set last.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot kernel_node_slots[] = {
    {Py_tp_doc, "A kernel node of an executable, with its argument bytes.  Not thread-safe.\n\n"
                "Made by `kernel_nodes`."},
    {Py_tp_dealloc, kernel_node_dealloc},
    {Py_tp_methods, kernel_node_methods},
    {Py_tp_getset, kernel_node_getset},
    {0, NULL},
};

/* Makes writes of `total` bytes: returns (status, status of undoing them), or None if another
 * context is current. */
static PyObject *
make_writes(const Write *writes, size_t count, size_t total)
{
    int status, undone;
    if (count && !is_current(writes->node->current, writes->node->context))
        Py_RETURN_NONE;
    unsigned char *before = PyMem_Malloc(total + 1);
    if (before == NULL)
        return PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS
    status = set_all(writes, count, before, &undone);
    Py_END_ALLOW_THREADS
    PyMem_Free(before);
    return Py_BuildValue("ii", status, undone);
}

static PyObject *
set_nodes(PyObject *module, PyObject *list)
{
    State *state = PyModule_GetState(module);
    if (!PyList_Check(list)) {
        PyErr_SetString(PyExc_TypeError, "a list of writes is needed");
        return NULL;
    }
    Py_ssize_t count = PyList_Size(list);
    size_t total = 0;
    PyObject *result = NULL;
    Write *writes = PyMem_Malloc((size_t)count * sizeof(Write) + 1);
    if (writes == NULL)
        return PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *one = PyList_GetItem(list, i), *node;
        Py_ssize_t offset, size;
        const char *raw;
        if (!PyTuple_Check(one)) {
            PyErr_SetString(PyExc_TypeError, "a write is a tuple");
            goto end;
        }
        if (!PyArg_ParseTuple(one, "O!ny#", state->types[KERNEL_NODE], &node, &offset,
                              &raw, &size) ||
            !inside((KernelNode *)node, offset, size))
            goto end;
        writes[i] = (Write){(KernelNode *)node, (size_t)offset, (size_t)size, total, raw};
        total += (size_t)size;
    }
    result = make_writes(writes, (size_t)count, total);
end:
    PyMem_Free(writes);
    return result;
}

/* Like `set_nodes`, for words of 8 bytes: `counts` holds the number of words of each node. */
static PyObject *
set_words(PyObject *module, PyObject *args)
{
    State *state = PyModule_GetState(module);
    PyObject *list, *result = NULL;
    const char *counts, *places, *values;
    Py_ssize_t counted, placed, valued;
    size_t total = 0, next = 0;
    if (!PyArg_ParseTuple(args, "O!y#y#y#", &PyList_Type, &list, &counts, &counted, &places,
                          &placed, &values, &valued))
        return NULL;
    Py_ssize_t nodes = PyList_Size(list);
    for (Py_ssize_t i = 0; i < counted / 4; i++) {
        uint32_t count;
        memcpy(&count, counts + 4 * i, 4);
        total += count;
    }
    if (counted != 4 * nodes || (size_t)placed != 4 * total || (size_t)valued != 8 * total) {
        PyErr_SetString(PyExc_ValueError, "counts, places and values do not fit together");
        return NULL;
    }
    Write *writes = PyMem_Malloc(total * sizeof(Write) + 1);
    if (writes == NULL)
        return PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < nodes; i++) {
        PyObject *node = PyList_GetItem(list, i);
        uint32_t count, place;
        if (Py_TYPE(node) != state->types[KERNEL_NODE]) {
            PyErr_SetString(PyExc_TypeError, "a node is no KernelNode");
            goto end;
        }
        memcpy(&count, counts + 4 * i, 4);
        for (; count > 0; count--, next++) {
            memcpy(&place, places + 4 * next, 4);
            if (!inside((KernelNode *)node, place, 8))
                goto end;
            writes[next] = (Write){(KernelNode *)node, place, 8, 8 * next, values + 8 * next};
        }
    }
    result = make_writes(writes, total, 8 * total);
end:
    PyMem_Free(writes);
    return result;
}

/* ------------------------------------------------------------------------------ reading kernels */

typedef int (*type_function)(void *node, int *type);
typedef int (*params_function)(void *node, NodeParams *params);
typedef int (*attribute_function)(void *node, int identity, void *value);

enum { MOST_ATTRIBUTES = 16, VALUE_BYTES = 16, LAUNCH_BYTES = 28, MOST_EXTRA = 64 };

/* The launch configuration of a kernel node: grid, block and shared memory, then for each attribute
 * whether it could be read, and its value.  Compared and looked up as bytes. */
typedef struct {
    uint32_t launch[7];
    struct {
        uint32_t has;
        unsigned char value[VALUE_BYTES];
    } attributes[MOST_ATTRIBUTES];
} Shape;

typedef struct {
    int kind;
    NodeParams params;
    Shape shape;
} Raw;

static int
read_raw(type_function type, params_function params, attribute_function attribute,
         const int *identities, Py_ssize_t attributes, void *const *nodes, Py_ssize_t count, Raw *raw)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        int status = type(nodes[i], &raw[i].kind);
        if (status)
            return status;
        if (raw[i].kind != 0)
            continue;
        status = params(nodes[i], &raw[i].params);
        if (status)
            return status;
        memcpy(raw[i].shape.launch, raw[i].params.grid, LAUNCH_BYTES);
        for (Py_ssize_t a = 0; a < attributes; a++) {
            _Alignas(8) unsigned char value[64] = {0}; /* CUlaunchAttributeValue */
            raw[i].shape.attributes[a].has = attribute(nodes[i], identities[a], value) == 0;
            memcpy(raw[i].shape.attributes[a].value, value, VALUE_BYTES);
        }
    }
    return 0;
}

/* One node of a definition as `read_nodes` returns it.  `kind`: CUgraphNodeType, or -1 for a kernel
 * that Python must read.  Of a kernel: the argument bytes begin at `start` of all bytes, and
 * `shape` is an index. */
typedef struct {
    uint64_t function, start;
    uint32_t size, shape;
    int32_t kind;
    uint32_t packed;
} Record;
_Static_assert(sizeof(Record) == 32, "as in driver/cuda/frozen.py");

/* A function's layout: a 32-bit offset and a 32-bit size for each argument. */
typedef struct {
    const char *text;
    Py_ssize_t count;
    uint32_t size; /* the end of the last argument */
} Layout;

/* Finds a function's layout, which `layouts` keeps alive.  Returns 0 with an exception set. */
static int
find_layout(void *function, PyObject *layouts, PyObject *missing, Layout *found)
{
    PyObject *key = PyLong_FromVoidPtr(function), *layout = NULL;
    char *text;
    Py_ssize_t length;
    if (key != NULL)
        layout = Py_XNewRef(PyDict_GetItemWithError(layouts, key));
    if (key != NULL && layout == NULL && missing != NULL && !PyErr_Occurred()) {
        layout = PyObject_CallFunctionObjArgs(missing, key, NULL);
        if (layout != NULL && PyDict_SetItem(layouts, key, layout) < 0)
            Py_CLEAR(layout);
    }
    if (key != NULL && layout == NULL && !PyErr_Occurred())
        PyErr_SetObject(PyExc_KeyError, key);
    Py_XDECREF(key);
    if (layout == NULL)
        return 0;
    int good = PyBytes_AsStringAndSize(layout, &text, &length) == 0;
    Py_DECREF(layout);
    if (!good)
        return 0;
    *found = (Layout){text, length / 8, 0};
    for (Py_ssize_t i = 0; i < found->count; i++) {
        uint32_t pair[2];
        memcpy(pair, text + 8 * i, 8);
        if (pair[0] + pair[1] > found->size)
            found->size = pair[0] + pair[1];
    }
    return 1;
}

/* Finds the argument bytes of a node's `extra`: pairs of key and value up to key 0.  Key 1: the
 * buffer; key 2: the address of its size. */
static const void *
packed_buffer(void *const *extra, uint32_t *size)
{
    const void *buffer = NULL;
    *size = 0;
    for (int i = 0; i < MOST_EXTRA && extra[i] != NULL; i += 2) {
        if ((uintptr_t)extra[i] == 1)
            buffer = extra[i + 1];
        else if ((uintptr_t)extra[i] == 2 && extra[i + 1] != NULL)
            *size = (uint32_t)*(const size_t *)extra[i + 1];
    }
    if (buffer == NULL)
        *size = 0;
    return buffer;
}

/* Appends a shape to the list unless it is one of the last ones, as that of most nodes is.  Returns
 * its index, or -1 with an exception set. */
static Py_ssize_t
shape_index(const Shape *shape, Py_ssize_t size, PyObject *shapes)
{
    enum { RECENT = 8 };
    Py_ssize_t count = PyList_Size(shapes);
    for (Py_ssize_t i = count - 1; i >= 0 && i >= count - RECENT; i--)
        if (memcmp(PyBytes_AsString(PyList_GetItem(shapes, i)), shape, (size_t)size) == 0)
            return i;
    PyObject *made = PyBytes_FromStringAndSize((const char *)shape, size);
    int failed = made == NULL || PyList_Append(shapes, made) < 0;
    Py_XDECREF(made);
    return failed ? -1 : count;
}

/* Fills the records and two lists: shapes, and index and kind of each node that is no raw kernel.
 * Returns all argument bytes, those of each node at a multiple of 8. */
static PyObject *
gather(const Raw *raw, Py_ssize_t count, Py_ssize_t shape_size, PyObject *shapes,
       PyObject *others, PyObject *layouts, PyObject *missing, Record *records)
{
    struct source {
        const void *buffer; /* the bytes of packed arguments */
        Layout layout;
    } *sources = PyMem_Calloc((size_t)count + 1, sizeof(struct source));
    PyObject *made = NULL;
    uint64_t total = 0;
    if (sources == NULL)
        return PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < count; i++) {
        const NodeParams *params = &raw[i].params;
        Record *record = records + i;
        record->start = total;
        record->kind = raw[i].kind == 0 && params->function == NULL ? -1 : raw[i].kind;
        if (record->kind != 0) {
            PyObject *other = Py_BuildValue("ni", i, (int)record->kind);
            int failed = other == NULL || PyList_Append(others, other) < 0;
            Py_XDECREF(other);
            if (failed)
                goto end;
            continue;
        }
        if (i > 0 && records[i - 1].function == (uintptr_t)params->function)
            sources[i].layout = sources[i - 1].layout;
        else if (!find_layout(params->function, layouts, missing, &sources[i].layout))
            goto end;
        record->function = (uintptr_t)params->function;
        if (params->params != NULL && sources[i].layout.count)
            record->size = sources[i].layout.size;
        else if ((record->packed = params->extra != NULL))
            sources[i].buffer = packed_buffer(params->extra, &record->size);
        Py_ssize_t shape = shape_index(&raw[i].shape, shape_size, shapes);
        if (shape < 0)
            goto end;
        record->shape = (uint32_t)shape;
        total += ((uint64_t)record->size + 7) / 8 * 8;
    }
    if ((made = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)total)) == NULL)
        goto end;
    char *data = PyBytes_AsString(made);
    memset(data, 0, total);
    for (Py_ssize_t i = 0; i < count; i++) {
        const Record *record = records + i;
        if (record->packed)
            memcpy(data + record->start, sources[i].buffer, record->size);
        for (Py_ssize_t a = 0; record->size && !record->packed && a < sources[i].layout.count; a++) {
            uint32_t pair[2];
            memcpy(pair, sources[i].layout.text + 8 * a, 8);
            if (raw[i].params.params[a] != NULL)
                memcpy(data + record->start + pair[0], raw[i].params.params[a], pair[1]);
        }
    }
end:
    PyMem_Free(sources);
    return made;
}

static PyObject *
read_nodes(PyObject *Py_UNUSED(module), PyObject *args)
{
    void *type, *params, *attribute, *nodes;
    Py_ssize_t count;
    PyObject *identities, *layouts, *missing, *result = NULL;
    int which[MOST_ATTRIBUTES], status;
    if (!PyArg_ParseTuple(args, "(O&O&O&)O&nO!O!O", as_pointer, &type, as_pointer, &params,
                          as_pointer, &attribute, as_pointer, &nodes, &count, &PyTuple_Type,
                          &identities, &PyDict_Type, &layouts, &missing))
        return NULL;
    Py_ssize_t attributes = PyTuple_Size(identities);
    if (attributes > MOST_ATTRIBUTES || count < 0) {
        PyErr_SetString(PyExc_ValueError, "too many attributes, or fewer nodes than none");
        return NULL;
    }
    for (Py_ssize_t i = 0; i < attributes; i++) {
        which[i] = (int)PyLong_AsLong(PyTuple_GetItem(identities, i));
        if (which[i] == -1 && PyErr_Occurred())
            return NULL;
    }
    Raw *raw = PyMem_Calloc((size_t)count + 1, sizeof(Raw));
    if (raw == NULL)
        return PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS
    status = read_raw((type_function)type, (params_function)params, (attribute_function)attribute,
                      which, attributes, nodes, count, raw);
    Py_END_ALLOW_THREADS
    if (status) {
        PyMem_Free(raw);
        return PyLong_FromLong(status);
    }
    Py_ssize_t shape_size = LAUNCH_BYTES + attributes * (Py_ssize_t)sizeof raw->shape.attributes[0];
    PyObject *records = PyBytes_FromStringAndSize(NULL, count * (Py_ssize_t)sizeof(Record));
    PyObject *shapes = PyList_New(0), *others = PyList_New(0), *data = NULL;
    if (records != NULL && shapes != NULL && others != NULL) {
        Record *first = (Record *)PyBytes_AsString(records);
        memset(first, 0, (size_t)count * sizeof(Record));
        data = gather(raw, count, shape_size, shapes, others, layouts, missing, first);
    }
    PyMem_Free(raw);
    if (data != NULL)
        result = PyTuple_Pack(4, records, shapes, data, others);
    Py_XDECREF(others);
    Py_XDECREF(records);
    Py_XDECREF(shapes);
    Py_XDECREF(data);
    return result;
}

/* Makes a KernelNode of each of some nodes that `read_nodes` has read, for an executable. */
static PyObject *
kernel_nodes(PyObject *module, PyObject *args)
{
    State *state = PyModule_GetState(module);
    void *set, *current, *context, *executable;
    PyObject *handles, *indices, *shapes, *layouts, *list = NULL;
    const char *text, *data;
    Py_ssize_t length, bytes;
    if (!PyArg_ParseTuple(args, "(O&O&)O&O&O!O!y#O!y#O!", as_pointer, &set, as_pointer, &current,
                          as_pointer, &context, as_pointer, &executable, &PyList_Type, &handles,
                          &PyList_Type, &indices, &text, &length, &PyList_Type, &shapes, &data,
                          &bytes, &PyDict_Type, &layouts))
        return NULL;
    Py_ssize_t count = PyList_Size(indices), known = length / (Py_ssize_t)sizeof(Record);
    const Record *records = (const Record *)text;
    list = PyList_Size(handles) == count ? PyList_New(count) : NULL;
    if (list == NULL && !PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "there are not as many handles as indices");
    void *last = NULL; /* the function whose layout was found last */
    Layout layout = {0};
    for (Py_ssize_t i = 0; list != NULL && i < count; i++) {
        Py_ssize_t index = PyLong_AsSsize_t(PyList_GetItem(indices, i));
        const Record *record = records + index;
        void *node = PyLong_AsVoidPtr(PyList_GetItem(handles, i));
        PyObject *shape;
        if (PyErr_Occurred())
            goto fail;
        if (index < 0 || index >= known || record->kind != 0 ||
            record->start + record->size > (uint64_t)bytes ||
            (shape = PyList_GetItem(shapes, record->shape)) == NULL) {
            PyErr_SetString(PyExc_ValueError, "no kernel that was read has this index");
            goto fail;
        }
        NodeParams params = {.function = (void *)(uintptr_t)record->function, .context = context};
        memcpy(params.grid, PyBytes_AsString(shape), LAUNCH_BYTES);
        if (params.function != last && !find_layout(last = params.function, layouts, NULL, &layout))
            goto fail;
        Py_ssize_t words = record->packed ? EXTRA_WORDS : record->size ? layout.count : 0;
        if (words && !record->packed && layout.size > record->size) {
            PyErr_SetString(PyExc_ValueError, "an argument ends behind the last byte");
            goto fail;
        }
        KernelNode *made = new_kernel_node(state->types[KERNEL_NODE], &params, words,
                                           data + record->start, record->size, record->packed);
        if (made == NULL)
            goto fail;
        made->set = (set_function)set;
        made->current = (current_function)current;
        made->context = context;
        made->executable = executable;
        made->node = node;
        for (Py_ssize_t a = 0; !record->packed && a < words; a++) {
            uint32_t offset;
            memcpy(&offset, layout.text + 8 * a, 4);
            made->words[a] = made->data + offset;
        }
        PyList_SetItem(list, i, (PyObject *)made);
    }
    return list;
fail:
    Py_XDECREF(list);
    return NULL;
}

/* ----------------------------------------------------------------------- the state of a capture */

typedef int (*info_function)(void *stream, int *state, uint64_t *number, void **graph,
                             void *const **nodes, const void **edges, size_t *count);

static PyObject *
capture_info(PyObject *Py_UNUSED(module), PyObject *args)
{
    void *info, *current, *context, *stream, *graph = NULL, *const *nodes = NULL;
    const void *edges = NULL; /* the driver fails without it if edges are programmatic */
    int state = 0;
    uint64_t number = 0;
    size_t count = 0;
    if (!PyArg_ParseTuple(args, "(O&O&)O&O&", as_pointer, &info, as_pointer, &current, as_pointer,
                          &context, as_pointer, &stream))
        return NULL;
    if (!is_current((current_function)current, context))
        Py_RETURN_NONE;
    /* The GIL is held: the driver's array of nodes is valid until the next call of any thread. */
    int status = ((info_function)info)(stream, &state, &number, &graph, &nodes, &edges, &count);
    if (status)
        return PyLong_FromLong(status);
    if (nodes == NULL)
        count = 0;
    PyObject *held = PyTuple_New((Py_ssize_t)count);
    for (size_t i = 0; held != NULL && i < count; i++) {
        PyObject *node = PyLong_FromVoidPtr(nodes[i]);
        if (node == NULL || PyTuple_SetItem(held, (Py_ssize_t)i, node) < 0)
            Py_CLEAR(held);
    }
    if (held == NULL)
        return NULL;
    return Py_BuildValue("iKNN", state, (unsigned long long)number, PyLong_FromVoidPtr(graph), held);
}

/* ------------------------------------------------------------------------------------- Collector
 *
 * CUPTI calls `note_module` while the driver loads a module, on any thread and with locks of the
 * driver held.  `note_module` must not take the GIL: it copies the code to a lock-free list of the
 * process, which `drain_modules` returns to Python. */

typedef struct Noted {
    struct Noted *next;
    size_t size;
    char data[];
} Noted;

static _Atomic(Noted *) noted;
static atomic_ullong noted_lost; /* number of modules lost for lack of memory */

/* CUpti_ResourceData and CUpti_ModuleResourceData */
typedef struct {
    void *context, *stream;
    const struct {
        uint32_t id;
        size_t size;
        const char *code;
    } *module;
} ResourceData;

static void
note_module(void *Py_UNUSED(user), int domain, uint32_t kind, const ResourceData *data)
{
    enum { RESOURCE = 3, MODULE_LOADED = 6 };
    if (domain != RESOURCE || kind != MODULE_LOADED || data == NULL || data->module == NULL ||
        data->module->code == NULL || data->module->size == 0)
        return;
    size_t size = data->module->size;
    Noted *made = malloc(sizeof(Noted) + size);
    if (made == NULL) {
        atomic_fetch_add(&noted_lost, 1);
        return;
    }
    made->size = size;
    memcpy(made->data, data->module->code, size);
    made->next = atomic_load(&noted);
    while (!atomic_compare_exchange_weak(&noted, &made->next, made))
        ;
}

static PyObject *
drain_modules(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    PyObject *list = PyList_New(0);
    if (list == NULL)
        return NULL;
    Noted *next = atomic_exchange(&noted, NULL);
    int failed = 0;
    while (next != NULL) {
        Noted *one = next;
        next = one->next;
        PyObject *bytes = failed ? NULL : PyBytes_FromStringAndSize(one->data, (Py_ssize_t)one->size);
        failed |= bytes == NULL || PyList_Append(list, bytes) < 0;
        Py_XDECREF(bytes);
        free(one);
    }
    if (!failed)
        return Py_BuildValue("NK", list, (unsigned long long)atomic_load(&noted_lost));
    Py_DECREF(list);
    return NULL;
}

static PyObject *
module_listener(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    return PyLong_FromVoidPtr((void *)(uintptr_t)note_module);
}

static PyMethodDef module_methods[] = {
    {"drain_modules", drain_modules, METH_NOARGS,
     "drain_modules($module, /)\n--\n\nReturns the code of the modules loaded since the last call, "
     "the newest first, and the number of modules lost for lack of memory."},
    {"module_listener", module_listener, METH_NOARGS,
     "module_listener($module, /)\n--\n\nReturns the address of a CUpti_CallbackFunc that notes the "
     "code of each module that is loaded."},
    {"capture_info", capture_info, METH_VARARGS,
     "capture_info($module, calls, context, stream, /)\n--\n\nCalls cuStreamGetCaptureInfo_v3.\n\n"
     "`calls`: its address and that of cuCtxGetCurrent.  Returns (state, number, graph, nodes), or a "
     "status that is not 0; None, without a call, if another context is current."},
    {"set_nodes", set_nodes, METH_O,
     "set_nodes($module, writes, /)\n--\n\nMakes a list of writes (KernelNode, offset, bytes), all "
     "or none.\n\nAdjacent writes of one node take one driver call.  Returns the status of the "
     "writes and that of their rollback; None if another context is current."},
    {"set_words", set_words, METH_VARARGS,
     "set_words($module, nodes, counts, places, values, /)\n--\n\nDoes the work of set_nodes for "
     "words of 8 bytes.\n\n`nodes`: a list of KernelNode; `counts`: the number of words of each "
     "(32-bit); `places`, `values`: the offsets (32-bit) and the words of all nodes in a row."},
    {"read_nodes", read_nodes, METH_VARARGS,
     "read_nodes($module, calls, nodes, count, attributes, layouts, missing, /)\n--\n\nReads the "
     "nodes of a definition.\n\n`calls`: the addresses of cuGraphNodeGetType, "
     "cuGraphKernelNodeGetParams_v2 and cuGraphKernelNodeGetAttribute; `nodes`: the address of "
     "`count` handles.  `layouts`: by function, 32-bit pairs of offset and size; "
     "`missing(function)` returns a layout that is not there.  Returns a status that is not 0, or "
     "(a `Record` of each node, a list of shapes, the argument bytes of all nodes, and a list of "
     "index and kind of each node that is no kernel, or one that Python must read)."},
    {"kernel_nodes", kernel_nodes, METH_VARARGS,
     "kernel_nodes($module, calls, context, executable, nodes, indices, records, shapes, data, "
     "layouts, /)\n--\n\nReturns a KernelNode of each of the `nodes` (handles) of an executable.\n\n"
     "`calls`: the addresses of cuGraphExecKernelNodeSetParams_v2 and cuCtxGetCurrent; `indices`: "
     "those of their contents in what read_nodes returned."},
    {NULL, NULL, 0, NULL},
};

/* --------------------------------------------------------------------------------------- module */

#define SPEC(Type, more_flags, type_slots) \
    {.name = "ostinato.driver._launch." #Type, \
     .basicsize = sizeof(Type), \
     .flags = Py_TPFLAGS_DEFAULT | (more_flags), \
     .slots = type_slots}

static PyType_Spec specs[TYPES] = {
    [PREPARED] = SPEC(Prepared, 0, prepared_slots),
    [LAUNCHER] = SPEC(Launcher, Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, launcher_slots),
    [SEAT] = SPEC(Seat, Py_TPFLAGS_BASETYPE, seat_slots),
    [REPEAT] = SPEC(Repeat, Py_TPFLAGS_HAVE_GC, repeat_slots),
    [PACKER] = SPEC(Packer, 0, packer_slots),
    [KERNEL_CALL] = SPEC(KernelCall, 0, kernel_call_slots),
    [FUNCTION_CALL] = SPEC(FunctionCall, 0, function_call_slots),
    [KERNEL_NODE] = SPEC(KernelNode, Py_TPFLAGS_DISALLOW_INSTANTIATION, kernel_node_slots),
};

static int
module_exec(PyObject *module)
{
    State *state = PyModule_GetState(module);
    for (int i = 0; i < TYPES; i++) {
        state->types[i] = (PyTypeObject *)PyType_FromModuleAndSpec(module, &specs[i], NULL);
        if (state->types[i] == NULL || PyModule_AddType(module, state->types[i]) < 0)
            return -1;
    }
    return 0;
}

static int
module_traverse(PyObject *module, visitproc visit, void *arg)
{
    State *state = PyModule_GetState(module);
    for (int i = 0; state != NULL && i < TYPES; i++)
        Py_VISIT(state->types[i]);
    return 0;
}

static int
module_clear(PyObject *module)
{
    State *state = PyModule_GetState(module);
    for (int i = 0; state != NULL && i < TYPES; i++)
        Py_CLEAR(state->types[i]);
    return 0;
}

static void
module_free(void *module)
{
    module_clear(module);
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
    {0, NULL},
};

static struct PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT,
    .m_name = "ostinato.driver._launch",
    .m_doc = "The hot paths of replays, launches and changes, compiled.  See ostinato.driver.launcher.",
    .m_size = sizeof(State),
    .m_methods = module_methods,
    .m_slots = module_slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
    .m_free = module_free,
};

PyMODINIT_FUNC
PyInit__launch(void)
{
    return PyModuleDef_Init(&module_def);
}
