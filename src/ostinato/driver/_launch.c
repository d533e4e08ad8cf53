/* The hot path of a replay, compiled: one comparison and one C call, without the GIL.
 *
 * driver/launcher.py holds the same in Python, says what it is for, and serves where this was not
 * built.  Only the limited API of CPython 3.11 is used, so that one build serves every later one.
 */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

/* What _kernel_call.c uses as well; it declares them. */
int ostinato_as_pointer(PyObject *number, void *result);
PyObject *ostinato_new(PyTypeObject *type);
void ostinato_free(PyObject *self);
int ostinato_add_type(PyObject *module, PyType_Spec *spec);

int ostinato_add_kernel_types(PyObject *module); /* of _kernel_call.c */

/* Handles and addresses come as non-negative integers. */
int
ostinato_as_pointer(PyObject *number, void *result)
{
    void *pointer = PyLong_AsVoidPtr(number);
    if (pointer == NULL && PyErr_Occurred())
        return 0;
    *(void **)result = pointer;
    return 1;
}

PyObject *
ostinato_new(PyTypeObject *type)
{
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    return alloc(type, 0);
}

/* The end of a deallocation. */
void
ostinato_free(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

int
ostinato_add_type(PyObject *module, PyType_Spec *spec)
{
    PyObject *type = PyType_FromModuleAndSpec(module, spec, NULL);
    if (type == NULL)
        return -1;
    int failed = PyModule_AddType(module, (PyTypeObject *)type);
    Py_DECREF(type);
    return failed;
}

/* cuGraphLaunch(CUgraphExec, CUstream): any C function of two pointers that gives a status. */
typedef int (*launch_function)(void *executable, void *stream);

typedef struct {
    launch_function function;
    void *executable;
    void *stream;
} Call;

static int
call_without_gil(Call call)
{
    int status;
    Py_BEGIN_ALLOW_THREADS
    status = call.function(call.executable, call.stream);
    Py_END_ALLOW_THREADS
    return status;
}

typedef struct {
    PyTypeObject *prepared_type;
} State;

/* ------------------------------------------------------------------------------------- Prepared */

typedef struct {
    PyObject_HEAD
    Call call;
} Prepared;

static PyObject *
prepared_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"function", "executable", "stream", NULL};
    void *function, *executable, *stream;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&O&:Prepared", names,
                                     ostinato_as_pointer, &function,
                                     ostinato_as_pointer, &executable,
                                     ostinato_as_pointer, &stream))
        return NULL;
    if (function == NULL) {
        PyErr_SetString(PyExc_ValueError, "function is 0; it must be the address of a C function");
        return NULL;
    }
    Prepared *self = (Prepared *)ostinato_new(type);
    if (self == NULL)
        return NULL;
    self->call = (Call){(launch_function)function, executable, stream};
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
    {Py_tp_doc, "Prepared(function, executable, stream)\n--\n\n"
                "A C function with its two pointers: called, it gives the status that the function "
                "gave.\n\nAll three are addresses or handles as integers, and must stay good."},
    {Py_tp_new, prepared_new},
    {Py_tp_dealloc, ostinato_free},
    {Py_tp_call, prepared_call},
    {0, NULL},
};

static PyType_Spec prepared_spec = {
    .name = "ostinato.driver._launch.Prepared",
    .basicsize = sizeof(Prepared),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = prepared_slots,
};

/* ------------------------------------------------------------------------------------- Launcher */

/* Cold: `stream` is NULL, which no argument of `launch` is.
 * Hot:  `stream` is the stream of the last launch and `prepared` its call.  If that is a Prepared,
 *       `call` is what it holds, so that the launch itself touches nothing else; otherwise
 *       `call.function` is NULL.
 * All are read and written with the GIL held and no Python code in between: as one. */
typedef struct {
    PyObject_HEAD
    PyObject *stream;
    PyObject *prepared;
    Call call;
} Launcher;

static PyObject *
launcher_launch(PyObject *op, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
    Launcher *self = (Launcher *)op;
    PyObject *stream;
    int status;
    Py_ssize_t named = names == NULL ? 0 : PyTuple_Size(names);
    if (count + named != 1 ||
        (named && PyUnicode_CompareWithASCIIString(PyTuple_GetItem(names, 0), "stream") != 0)) {
        PyErr_SetString(PyExc_TypeError, "launch() takes one argument, the stream");
        return NULL;
    }
    stream = args[0];
    if (stream != self->stream)
        return PyObject_CallMethod(op, "_launch_slowly", "O", stream);
    if (self->call.function != NULL) {
        status = call_without_gil(self->call);
    }
    else {
        PyObject *prepared = Py_NewRef(self->prepared); /* it may be cooled while it is called */
        PyObject *answer = PyObject_CallNoArgs(prepared);
        Py_DECREF(prepared);
        if (answer == NULL)
            return NULL;
        status = PyObject_IsTrue(answer);
        Py_DECREF(answer);
        if (status < 0)
            return NULL;
    }
    if (status != 0)
        return PyObject_CallMethod(op, "_launch_checked", "O", stream);
    Py_RETURN_NONE;
}

static void
set_hot(Launcher *self, PyObject *stream, PyObject *prepared, Call call)
{
    PyObject *old_stream = self->stream, *old_prepared = self->prepared;
    self->stream = Py_XNewRef(stream);
    self->prepared = Py_XNewRef(prepared);
    self->call = call;
    Py_XDECREF(old_stream); /* last: this may run anything */
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
    Call call = {NULL, NULL, NULL};
    if (Py_TYPE(args[1]) == state->prepared_type)
        call = ((Prepared *)args[1])->call;
    set_hot((Launcher *)self, args[0], args[1], call);
    Py_RETURN_NONE;
}

static PyObject *
launcher_cool(PyObject *self, PyObject *Py_UNUSED(none))
{
    set_hot((Launcher *)self, NULL, NULL, (Call){NULL, NULL, NULL});
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
    set_hot((Launcher *)self, NULL, NULL, (Call){NULL, NULL, NULL});
    return 0;
}

static void
launcher_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    launcher_clear(self);
    ostinato_free(self);
}

PyDoc_STRVAR(launch_doc, /* word for word that of PythonLauncher.launch */
"launch($self, stream)\n--\n\n"
"Runs the graph once, in stream order; returns without waiting.  Lets go of the GIL.\n"
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

static PyType_Spec launcher_spec = {
    .name = "ostinato.driver._launch.Launcher",
    .basicsize = sizeof(Launcher),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = launcher_slots,
};

/* --------------------------------------------------------------------------------------- module */

static int
module_exec(PyObject *module)
{
    State *state = PyModule_GetState(module);
    state->prepared_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &prepared_spec, NULL);
    if (state->prepared_type == NULL || PyModule_AddType(module, state->prepared_type) < 0)
        return -1;
    if (ostinato_add_type(module, &launcher_spec) < 0)
        return -1;
    return ostinato_add_kernel_types(module);
}

static int
module_traverse(PyObject *module, visitproc visit, void *arg)
{
    State *state = PyModule_GetState(module);
    if (state != NULL)
        Py_VISIT(state->prepared_type);
    return 0;
}

static int
module_clear(PyObject *module)
{
    State *state = PyModule_GetState(module);
    if (state != NULL)
        Py_CLEAR(state->prepared_type);
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
    .m_doc = "The hot paths of replays and launches, compiled.  See ostinato.driver.launcher.",
    .m_size = sizeof(State),
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
