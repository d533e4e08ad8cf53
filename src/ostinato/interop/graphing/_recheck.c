/* Whether all that decided a call is still the same, compiled.
 *
 * A Recheck is made of what `recheck.py` noted while it read the key of a call: a flat list of
 * checks.  `match` makes them for another call, without a key.  Only the limited API of CPython 3.11
 * is used.
 */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <string.h>

/* Of what is checked: the value in a slot (arguments, then what was unpacked out of them), or an
 * object that does not depend on the call. */
enum {
    TYPE,       /* has exactly the type values[0] */
    IS,         /* is values[0] */
    EQUAL,      /* is values[0], or has the same exact type (a built-in one) and is equal */
    READS,      /* keys are names of attributes, or functions of it; each gives its value */
    ATTRIBUTES, /* keys are names of attributes, which are the very values */
    ITEMS,      /* a dict of exactly these keys and values, in order */
    LOOKUP,     /* a dict with these items among others */
    SEQUENCE,   /* a list of exactly these values */
    SIZE,       /* a dict of as many items as `count` */
    CALLS,      /* keys are functions without arguments; each gives its value */
    ADDRESSES,  /* a function that gives its value for each of the keys */
    UNPACK,     /* a tuple or a list (values[0]) of `count` values, which go into the next slots */
    UNPACK_DICT, /* a dict of exactly these keys, in order, whose values go into the next slots */
    LEAF,       /* belongs to the result of `match` */
    OPERATIONS
};

enum { MOST_SLOTS = 64 };

typedef struct {
    int operation;
    Py_ssize_t slot; /* -1 for an object */
    PyObject *object, *keys, *values; /* the last two: tuples */
    Py_ssize_t count, next;
} Check;

typedef struct {
    PyObject_HEAD
    Py_ssize_t positional, slots, leaves, count;
    PyObject *names; /* of keyword arguments, in order */
    Check *checks;
} Recheck;

static int
is_dict(PyObject *value)
{
    return Py_TYPE(value) == &PyDict_Type;
}

/* 1 if it is the same or equal, 0 if it is not, -1 with an exception. */
static int
equal(PyObject *found, PyObject *value)
{
    if (found == value)
        return 1;
    if (Py_TYPE(found) != Py_TYPE(value))
        return 0;
    return PyObject_RichCompareBool(found, value, Py_EQ);
}

/* The same for a new reference, which is taken; NULL stands for an exception. */
static int
gives(PyObject *found, PyObject *value)
{
    if (found == NULL)
        return -1;
    int same = equal(found, value);
    Py_DECREF(found);
    return same;
}

static int
same_items(const Check *check, PyObject *dict)
{
    PyObject *key, *value;
    Py_ssize_t place = 0;
    if (!is_dict(dict) || PyDict_Size(dict) != check->count)
        return 0;
    for (Py_ssize_t i = 0; PyDict_Next(dict, &place, &key, &value); i++)
        if (i >= check->count || key != PyTuple_GetItem(check->keys, i) ||
            value != PyTuple_GetItem(check->values, i))
            return 0;
    return 1;
}

static int
unpack_dict(const Check *check, PyObject *dict, PyObject **slots)
{
    PyObject *key, *value;
    Py_ssize_t place = 0;
    if (!is_dict(dict) || PyDict_Size(dict) != check->count)
        return 0;
    for (Py_ssize_t i = 0; PyDict_Next(dict, &place, &key, &value); i++) {
        if (i >= check->count || key != PyTuple_GetItem(check->keys, i))
            return 0;
        slots[check->next + i] = Py_NewRef(value);
    }
    return 1;
}

static int
unpack(const Check *check, PyObject *from, PyObject **slots)
{
    int listed = PyList_Check(from);
    if ((PyObject *)Py_TYPE(from) != PyTuple_GetItem(check->values, 0) ||
        (listed ? PyList_Size(from) : PyTuple_Size(from)) != check->count)
        return 0;
    for (Py_ssize_t i = 0; i < check->count; i++)
        slots[check->next + i] =
            Py_NewRef(listed ? PyList_GetItem(from, i) : PyTuple_GetItem(from, i));
    return 1;
}

/* 1 if a check holds, 0 if not, -1 with an exception. */
static int
holds(const Check *check, PyObject **slots)
{
    PyObject *subject = check->slot < 0 ? check->object : slots[check->slot];
    PyObject *keys = check->keys, *values = check->values, *found;
    int same = 1;
    if (subject == NULL) /* a slot that nothing was unpacked into */
        return 0;
    switch (check->operation) {
    case TYPE:
        return (PyObject *)Py_TYPE(subject) == PyTuple_GetItem(values, 0);
    case IS:
        return subject == PyTuple_GetItem(values, 0);
    case EQUAL:
        return equal(subject, PyTuple_GetItem(values, 0));
    case READS:
        for (Py_ssize_t i = 0; same == 1 && i < check->count; i++) {
            PyObject *key = PyTuple_GetItem(keys, i);
            found = PyUnicode_Check(key) ? PyObject_GetAttr(subject, key)
                                         : PyObject_CallFunctionObjArgs(key, subject, NULL);
            same = gives(found, PyTuple_GetItem(values, i));
        }
        return same;
    case ATTRIBUTES:
        for (Py_ssize_t i = 0; i < check->count; i++) {
            found = PyObject_GetAttr(subject, PyTuple_GetItem(keys, i));
            if (found == NULL)
                return -1;
            same = found == PyTuple_GetItem(values, i);
            Py_DECREF(found);
            if (!same)
                return 0;
        }
        return 1;
    case ITEMS:
        return same_items(check, subject);
    case LOOKUP:
        for (Py_ssize_t i = 0; i < check->count; i++) {
            found = PyDict_GetItemWithError(subject, PyTuple_GetItem(keys, i));
            if (found != PyTuple_GetItem(values, i))
                return PyErr_Occurred() ? -1 : 0;
        }
        return 1;
    case SEQUENCE:
        if (PyList_Size(subject) != check->count)
            return 0;
        for (Py_ssize_t i = 0; i < check->count; i++)
            if (PyList_GetItem(subject, i) != PyTuple_GetItem(values, i))
                return 0;
        return 1;
    case SIZE:
        return PyDict_Size(subject) == check->count;
    case CALLS:
        for (Py_ssize_t i = 0; same == 1 && i < check->count; i++)
            same = gives(PyObject_CallNoArgs(PyTuple_GetItem(keys, i)), PyTuple_GetItem(values, i));
        return same;
    case ADDRESSES:
        for (Py_ssize_t i = 0; same == 1 && i < check->count; i++)
            same = gives(PyObject_CallFunctionObjArgs(subject, PyTuple_GetItem(keys, i), NULL),
                         PyTuple_GetItem(values, i));
        return same;
    case UNPACK:
        return unpack(check, subject, slots);
    case UNPACK_DICT:
        return unpack_dict(check, subject, slots);
    default: /* LEAF */
        return 1;
    }
}

/* Keyword arguments into their slots; 0 if they have other names or another order. */
static int
take_named(Recheck *self, PyObject *kwargs, PyObject **slots)
{
    PyObject *key, *value;
    Py_ssize_t place = 0, count = PyTuple_Size(self->names);
    if (PyDict_Size(kwargs) != count)
        return 0;
    for (Py_ssize_t i = 0; PyDict_Next(kwargs, &place, &key, &value); i++) {
        PyObject *name = PyTuple_GetItem(self->names, i);
        if (i >= count || (key != name && PyUnicode_Compare(key, name) != 0))
            return 0;
        slots[self->positional + i] = Py_NewRef(value);
    }
    return 1;
}

static PyObject *
leaves_of(Recheck *self, PyObject **slots)
{
    PyObject *leaves = PyList_New(self->leaves);
    if (leaves == NULL)
        return NULL;
    for (Py_ssize_t i = 0, at = 0; i < self->count; i++)
        if (self->checks[i].operation == LEAF)
            PyList_SetItem(leaves, at++, Py_NewRef(slots[self->checks[i].slot]));
    return leaves;
}

static PyObject *
recheck_match(PyObject *op, PyObject *const *args, Py_ssize_t count)
{
    Recheck *self = (Recheck *)op;
    if (count != 2 || !PyTuple_Check(args[0]) || !is_dict(args[1])) {
        PyErr_SetString(PyExc_TypeError, "a tuple and a dict are needed");
        return NULL;
    }
    if (PyTuple_Size(args[0]) != self->positional)
        Py_RETURN_NONE;
    PyObject *slots[MOST_SLOTS];
    memset(slots, 0, (size_t)self->slots * sizeof *slots);
    for (Py_ssize_t i = 0; i < self->positional; i++)
        slots[i] = Py_NewRef(PyTuple_GetItem(args[0], i));
    int same = take_named(self, args[1], slots);
    for (Py_ssize_t i = 0; same == 1 && i < self->count; i++)
        same = holds(self->checks + i, slots);
    PyObject *result = same == 1 ? leaves_of(self, slots) : NULL;
    if (same < 0 && PyErr_ExceptionMatches(PyExc_Exception)) {
        PyErr_Clear(); /* what cannot be read is not the same; KeyboardInterrupt goes on */
        same = 0;
    }
    if (same == 0)
        result = Py_NewRef(Py_None);
    if (PyErr_Occurred()) { /* the ends of slots must not meet an exception that is set */
        PyObject *kind, *value, *trace;
        PyErr_Fetch(&kind, &value, &trace);
        for (Py_ssize_t i = 0; i < self->slots; i++)
            Py_XDECREF(slots[i]);
        PyErr_Restore(kind, value, trace);
        return result;
    }
    for (Py_ssize_t i = 0; i < self->slots; i++)
        Py_XDECREF(slots[i]);
    return result;
}

static int
recheck_traverse(PyObject *op, visitproc visit, void *arg)
{
    Recheck *self = (Recheck *)op;
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(self->names);
    for (Py_ssize_t i = 0; i < self->count; i++) {
        Py_VISIT(self->checks[i].object);
        Py_VISIT(self->checks[i].keys);
        Py_VISIT(self->checks[i].values);
    }
    return 0;
}

static int
recheck_clear(PyObject *op)
{
    Recheck *self = (Recheck *)op;
    Check *checks = self->checks;
    Py_ssize_t count = self->count;
    self->checks = NULL; /* first: what follows may run anything */
    self->count = self->leaves = 0;
    self->positional = -1; /* no call has as many arguments */
    for (Py_ssize_t i = 0; i < count; i++) {
        Py_XDECREF(checks[i].object);
        Py_XDECREF(checks[i].keys);
        Py_XDECREF(checks[i].values);
    }
    PyMem_Free(checks);
    Py_CLEAR(self->names);
    return 0;
}

static void
recheck_dealloc(PyObject *op)
{
    PyTypeObject *type = Py_TYPE(op);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    PyObject_GC_UnTrack(op);
    recheck_clear(op);
    release(op);
    Py_DECREF(type);
}

/* Whether a check is one that `holds` may make. */
static int
is_sound(const Check *check, Py_ssize_t slots)
{
    Py_ssize_t keys = PyTuple_Size(check->keys), values = PyTuple_Size(check->values);
    Py_ssize_t count = check->count;
    if (check->slot >= slots || check->slot < -1 || count < 0)
        return 0;
    switch (check->operation) {
    case TYPE:
    case IS:
    case EQUAL:
        return values == 1;
    case READS:
    case ADDRESSES:
    case CALLS:
    case ITEMS:
        return keys == count && values == count;
    case ATTRIBUTES:
    case LOOKUP:
        for (Py_ssize_t i = 0; i < keys; i++)
            if (!PyUnicode_CheckExact(PyTuple_GetItem(check->keys, i)))
                return 0;
        return keys == count && values == count &&
               (check->operation == ATTRIBUTES || (check->slot < 0 && is_dict(check->object)));
    case SEQUENCE:
        return values == count && check->slot < 0 && PyList_Check(check->object);
    case SIZE:
        return check->slot < 0 && PyDict_Check(check->object);
    case UNPACK:
        return values == 1 && check->next >= 0 && check->next + count <= slots &&
               (PyTuple_GetItem(check->values, 0) == (PyObject *)&PyTuple_Type ||
                PyTuple_GetItem(check->values, 0) == (PyObject *)&PyList_Type);
    case UNPACK_DICT:
        return keys == count && check->next >= 0 && check->next + count <= slots;
    default:
        return check->operation == LEAF && check->slot >= 0;
    }
}

static PyObject *
recheck_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *words[] = {"positional", "names", "slots", "checks", NULL};
    Py_ssize_t positional, slots;
    PyObject *names, *list;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "nO!nO!:Recheck", words, &positional,
                                     &PyTuple_Type, &names, &slots, &PyTuple_Type, &list))
        return NULL;
    if (positional < 0 || slots > MOST_SLOTS || positional + PyTuple_Size(names) > slots) {
        PyErr_SetString(PyExc_ValueError, "too many slots, or fewer than arguments");
        return NULL;
    }
    Py_ssize_t count = PyTuple_Size(list);
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Recheck *self = (Recheck *)alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->positional = positional;
    self->slots = slots;
    self->names = Py_NewRef(names);
    self->checks = PyMem_Calloc((size_t)count + 1, sizeof(Check));
    if (self->checks == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        Check *check = self->checks + i;
        PyObject *object, *keys, *values, *one = PyTuple_GetItem(list, i);
        int taken = 0;
        if (PyTuple_Check(one))
            taken = PyArg_ParseTuple(one, "inOO!O!nn", &check->operation, &check->slot, &object,
                                     &PyTuple_Type, &keys, &PyTuple_Type, &values, &check->count,
                                     &check->next);
        else
            PyErr_SetString(PyExc_TypeError, "a check is a tuple");
        if (!taken) {
            Py_DECREF(self);
            return NULL;
        }
        check->object = Py_NewRef(object);
        check->keys = Py_NewRef(keys);
        check->values = Py_NewRef(values);
        self->count = i + 1;
        self->leaves += check->operation == LEAF;
        if (!is_sound(check, slots)) {
            PyErr_Format(PyExc_ValueError, "check %zd is none", i);
            Py_DECREF(self);
            return NULL;
        }
    }
    return (PyObject *)self;
}

static PyMethodDef recheck_methods[] = {
    {"match", (PyCFunction)(void (*)(void))recheck_match, METH_FASTCALL,
     "match($self, args, kwargs, /)\n--\n\nThe arrays among the arguments of a call, in order, if "
     "every check holds; None if one does not, or if what it reads raises an Exception."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot recheck_slots[] = {
    {Py_tp_doc, "Recheck(positional, names, slots, checks)\n--\n\n"
                "Checks whether a call is like the one that they were made of.  A check: "
                "(operation, slot, object, keys, values, count, next slot)."},
    {Py_tp_new, recheck_new},
    {Py_tp_dealloc, recheck_dealloc},
    {Py_tp_traverse, recheck_traverse},
    {Py_tp_clear, recheck_clear},
    {Py_tp_methods, recheck_methods},
    {0, NULL},
};

static PyType_Spec recheck_spec = {
    .name = "ostinato.interop.graphing._recheck.Recheck",
    .basicsize = sizeof(Recheck),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = recheck_slots,
};

static int
module_exec(PyObject *module)
{
    static const char *const names[OPERATIONS] = {
        "TYPE", "IS", "EQUAL", "READS", "ATTRIBUTES", "ITEMS", "LOOKUP", "SEQUENCE", "SIZE",
        "CALLS", "ADDRESSES", "UNPACK", "UNPACK_DICT", "LEAF",
    };
    for (int i = 0; i < OPERATIONS; i++)
        if (PyModule_AddIntConstant(module, names[i], i) < 0)
            return -1;
    if (PyModule_AddIntConstant(module, "MOST_SLOTS", MOST_SLOTS) < 0)
        return -1;
    PyObject *type = PyType_FromModuleAndSpec(module, &recheck_spec, NULL);
    int failed = type == NULL || PyModule_AddType(module, (PyTypeObject *)type) < 0;
    Py_XDECREF(type);
    return failed ? -1 : 0;
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
    {0, NULL},
};

static struct PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT,
    .m_name = "ostinato.interop.graphing._recheck",
    .m_doc = "Checks that a call is like an earlier one.  See ostinato.interop.graphing.recheck.",
    .m_size = 0,
    .m_slots = module_slots,
};

PyMODINIT_FUNC
PyInit__recheck(void)
{
    return PyModuleDef_Init(&module_def);
}
