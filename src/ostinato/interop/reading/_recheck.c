/* Compares all that a call's key was made of with a later call, without making a key.
 *
 * `recheck.py` notes a flat list of checks while it reads the key of a call, and makes a Recheck of
 * them, whose `match` makes the checks for a later call.  A Way makes the whole later call.  Only
 * the limited API of CPython 3.11 is used.
 */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>
#include <time.h>

/* The kinds of checks.  The subject of a check is the value in a slot (slots hold the arguments,
 * then the values unpacked from them), or an object that does not depend on the call. */
enum {
    TYPE,       /* the subject has exactly the type values[0] */
    TYPES,      /* each object in keys has exactly the type in values */
    IS,         /* the subject is values[0] */
    EQUAL,      /* the subject is values[0], or is equal to it and of the same built-in type */
    READS,      /* each key, an attribute's name or a function of the subject, yields its value */
    ATTRIBUTES, /* each attribute named in keys is the same object as its value */
    DICT,       /* the subject's __dict__ is values[0], even if its class overrides reads */
    ITEMS,      /* a dict with exactly these keys and values, in order */
    KINDS,      /* a dict with exactly these keys, in order, and values of these types */
    LOOKUP,     /* a dict of `next` items (-1: any number) that contains these keys and values */
    SEQUENCE,   /* a list of exactly these values */
    SIZE,       /* each dict in keys has `next` items */
    CALLS,      /* each key, a function without arguments, returns its value */
    ADDRESSES,  /* the subject, a function, returns for each key its value */
    WORDS,      /* the subject, a Reader as a tuple, reads for each key its value */
    UNPACK,     /* a tuple or a list of as many values as keys; they go into the next slots */
    UNPACK_DICT, /* a dict with exactly these keys, in order; its values go into the next slots */
    LEAF,       /* always holds; the subject belongs to the result of `match` */
    OPERATIONS
};

/* What a check has: values, one value, keys, keys that are texts or dicts, a slot, slots for
 * further values, a dict or a list as its object, and words. */
enum {
    VALUES = 1,
    ONE = 2 | VALUES,
    KEYS = 4,
    TEXTS = 8 | KEYS,
    DICTS = 16 | KEYS,
    SLOT = 32,
    INTO = 64 | SLOT,
    OF_DICT = 128,
    OF_LIST = 256,
    COUNTED = 512,
};

static const struct {
    const char *name;
    int parts;
} operations[OPERATIONS] = {
    [TYPE] = {"TYPE", ONE | SLOT},
    [TYPES] = {"TYPES", KEYS | VALUES},
    [IS] = {"IS", ONE},
    [EQUAL] = {"EQUAL", ONE},
    [READS] = {"READS", KEYS | VALUES},
    [ATTRIBUTES] = {"ATTRIBUTES", TEXTS | VALUES},
    [DICT] = {"DICT", ONE},
    [ITEMS] = {"ITEMS", KEYS | VALUES},
    [KINDS] = {"KINDS", KEYS | VALUES},
    [LOOKUP] = {"LOOKUP", TEXTS | VALUES | OF_DICT | COUNTED},
    [SEQUENCE] = {"SEQUENCE", VALUES | OF_LIST},
    [SIZE] = {"SIZE", DICTS},
    [CALLS] = {"CALLS", KEYS | VALUES | COUNTED},
    [ADDRESSES] = {"ADDRESSES", KEYS | VALUES},
    [WORDS] = {"WORDS", KEYS | VALUES | COUNTED},
    [UNPACK] = {"UNPACK", KEYS | INTO},
    [UNPACK_DICT] = {"UNPACK_DICT", KEYS | INTO},
    [LEAF] = {"LEAF", SLOT},
};

enum { MOST_SLOTS = 64 };

/* A library's C function that reads the address of an array.  The array's handle lies in the Python
 * object, `offset` bytes from its start; the function returns 0 if it succeeds. */
typedef struct {
    int32_t (*read)(void *handle, void **result);
    Py_ssize_t offset;
} Reader;

typedef struct {
    int operation, slot; /* slot: -1 if the subject is `object` */
    PyObject *object;
    PyObject **key, **value; /* arrays in one allocation, which begins at `key` */
    Py_ssize_t count, next;
    size_t *word;     /* LOOKUP: the position of each item, for PyDict_Next.  WORDS: the values.
                       * CALLS: the C function of each built-in one, or 0 */
    Reader reader;    /* WORDS */
    uint64_t changes; /* ITEMS, KINDS, LOOKUP: the dict's version when the check held, or 0 */
} Check;

typedef struct {
    PyObject_HEAD
    Py_ssize_t positional, slots, leaves, count;
    PyObject *names; /* names of the keyword arguments, in order */
    PyObject *given; /* the tuple of checks, which owns all objects in `checks` */
    Check *checks;
} Recheck;

static int
is_dict(PyObject *value)
{
    return Py_TYPE(value) == &PyDict_Type;
}

/* 1 if the objects are identical or equal, 0 if not, -1 with an exception set. */
static int
equal(PyObject *found, PyObject *value)
{
    if (found == value)
        return 1;
    if (Py_TYPE(found) != Py_TYPE(value))
        return 0;
    return PyObject_RichCompareBool(found, value, Py_EQ);
}

/* Like `equal`, but consumes the reference `found`; -1 if `found` is NULL. */
static int
gives(PyObject *found, PyObject *value)
{
    if (found == NULL)
        return -1;
    int same = equal(found, value);
    Py_DECREF(found);
    return same;
}

/* True if dicts have a version (PEP 509): at each change CPython 3.11 and 3.12 store a number that
 * is unique over all dicts in the dict's fourth word; the third word is its size.  Since 3.13
 * attributes may be stored without a change of their dict. */
static int dicts_count;

static uint64_t
word_of(PyObject *dict, size_t place)
{
    uint64_t word;
    memcpy(&word, (char *)dict + place * sizeof word, sizeof word);
    return word;
}

static uint64_t
changes_of(PyObject *dict)
{
    return word_of(dict, 3);
}

static Py_ssize_t
size_of(PyObject *dict)
{
    return dicts_count ? (Py_ssize_t)word_of(dict, 2) : PyDict_Size(dict);
}

/* Sets `dicts_count` by an experiment.  Returns -1 with an exception set if that fails. */
static int
try_counts(void)
{
    PyObject *dict = PyDict_New();
    if (dict == NULL)
        return -1;
    uint64_t numbers[4];
    int failed = 0, as_said = sizeof(void *) == 8 && Py_Version < 0x030D0000;
    for (int i = 0; as_said && i < 4; i++) {
        PyObject *value = i % 2 ? Py_True : Py_False;
        failed |= i < 3 ? PyDict_SetItemString(dict, "x", value) : PyDict_DelItemString(dict, "x");
        numbers[i] = changes_of(dict);
        as_said = word_of(dict, 2) == (i < 3);
        for (int j = 0; j < i; j++)
            as_said &= numbers[i] != numbers[j];
    }
    Py_DECREF(dict);
    dicts_count = as_said;
    return failed ? -1 : 0;
}

/* Makes a check of a dict with `same`, unless the version of the dict shows that it is unchanged
 * since the check held. */
static int
holds_of_dict(Check *check, PyObject *dict, int (*same)(const Check *, PyObject *))
{
    if (check->slot >= 0 || !dicts_count || !PyDict_Check(dict))
        return same(check, dict);
    uint64_t now = changes_of(dict); /* read first: code that `same` runs may change the dict */
    if (now != 0 && check->changes == now)
        return 1;
    int result = same(check, dict);
    check->changes = result == 1 ? now : 0;
    return result;
}

/* Reads an array's address into `word`.  Returns 0 if that fails. */
static int
read_word(const Reader *reader, PyObject *array, size_t *word)
{
    void *found = NULL;
    int32_t failed = reader->read((char *)array + reader->offset, &found);
    *word = (size_t)found;
    return !failed;
}

/* For ITEMS and KINDS. */
static int
same_items(const Check *check, PyObject *dict)
{
    PyObject *key, *value;
    Py_ssize_t place = 0;
    int kinds = check->operation == KINDS;
    if (!PyDict_Check(dict) || PyDict_Size(dict) != check->count)
        return 0;
    for (Py_ssize_t i = 0; i < check->count; i++)
        if (!PyDict_Next(dict, &place, &key, &value) || key != check->key[i] ||
            (kinds ? (PyObject *)Py_TYPE(value) : value) != check->value[i])
            return 0;
    return 1;
}

static int
some_items(const Check *check, PyObject *dict)
{
    if (check->next >= 0 && PyDict_Size(dict) != check->next)
        return 0;
    for (Py_ssize_t i = 0; i < check->count; i++) {
        /* Try the old position first, without hashing.  Any key and value that PyDict_Next returns
         * are an item of the dict, so a stale position does no harm. */
        PyObject *key, *value;
        Py_ssize_t place = (Py_ssize_t)check->word[i];
        if (PyDict_Next(dict, &place, &key, &value) && key == check->key[i] &&
            value == check->value[i])
            continue;
        if (PyDict_GetItemWithError(dict, check->key[i]) != check->value[i])
            return PyErr_Occurred() ? -1 : 0;
    }
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
        if (i >= check->count || key != check->key[i])
            return 0;
        slots[check->next + i] = Py_NewRef(value);
    }
    return 1;
}

static int
unpack(const Check *check, PyObject *from, PyObject **slots)
{
    int listed = PyList_Check(from);
    if (!(listed || PyTuple_Check(from)) ||
        (listed ? PyList_Size(from) : PyTuple_Size(from)) != check->count)
        return 0;
    for (Py_ssize_t i = 0; i < check->count; i++)
        slots[check->next + i] =
            Py_NewRef(listed ? PyList_GetItem(from, i) : PyTuple_GetItem(from, i));
    return 1;
}

static int
same_words(const Check *check)
{
    size_t word;
    for (Py_ssize_t i = 0; i < check->count; i++)
        if (!read_word(&check->reader, check->key[i], &word) || word != check->word[i])
            return 0;
    return 1;
}

/* Calls a function without arguments; `in_c`: its C function, or 0. */
static PyObject *
call(PyObject *function, size_t in_c)
{
    return in_c ? ((PyCFunction)in_c)(PyCFunction_GetSelf(function), NULL)
                : PyObject_CallNoArgs(function);
}

/* 1 if a check holds, 0 if not, -1 with an exception set. */
static int
holds(Check *check, PyObject **slots)
{
    PyObject *subject = check->slot < 0 ? check->object : slots[check->slot];
    PyObject **keys = check->key, **values = check->value, *found;
    int same = 1;
    if (subject == NULL) /* an empty slot */
        return 0;
    switch (check->operation) {
    case TYPE:
        return (PyObject *)Py_TYPE(subject) == values[0];
    case TYPES:
        for (Py_ssize_t i = 0; i < check->count; i++)
            if ((PyObject *)Py_TYPE(keys[i]) != values[i])
                return 0;
        return 1;
    case IS:
        return subject == values[0];
    case EQUAL:
        return equal(subject, values[0]);
    case READS:
        for (Py_ssize_t i = 0; same == 1 && i < check->count; i++) {
            PyObject *key = keys[i];
            found = PyUnicode_Check(key) ? PyObject_GetAttr(subject, key)
                                         : PyObject_CallFunctionObjArgs(key, subject, NULL);
            same = gives(found, values[i]);
        }
        return same;
    case ATTRIBUTES:
        for (Py_ssize_t i = 0; i < check->count; i++) {
            found = PyObject_GetAttr(subject, keys[i]);
            if (found == NULL)
                return -1;
            same = found == values[i];
            Py_DECREF(found);
            if (!same)
                return 0;
        }
        return 1;
    case DICT:
        found = PyObject_GenericGetDict(subject, NULL);
        same = found == values[0];
        Py_XDECREF(found);
        return found == NULL ? -1 : same;
    case ITEMS:
    case KINDS:
        return holds_of_dict(check, subject, same_items);
    case LOOKUP:
        return holds_of_dict(check, subject, some_items);
    case SEQUENCE:
        if (PyList_Size(subject) != check->count)
            return 0;
        for (Py_ssize_t i = 0; i < check->count; i++)
            if (PyList_GetItem(subject, i) != values[i])
                return 0;
        return 1;
    case SIZE:
        for (Py_ssize_t i = 0; i < check->count; i++)
            if (size_of(keys[i]) != check->next)
                return 0;
        return 1;
    case CALLS:
        for (Py_ssize_t i = 0; same == 1 && i < check->count; i++)
            same = gives(call(keys[i], check->word[i]), values[i]);
        return same;
    case WORDS:
        return same_words(check);
    case ADDRESSES:
        for (Py_ssize_t i = 0; same == 1 && i < check->count; i++)
            same = gives(PyObject_CallFunctionObjArgs(subject, keys[i], NULL), values[i]);
        return same;
    case UNPACK:
        return unpack(check, subject, slots);
    case UNPACK_DICT:
        return unpack_dict(check, subject, slots);
    default: /* LEAF */
        return 1;
    }
}

/* Puts keyword arguments into their slots.  Returns 0 if their names or their order differ. */
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

/* Returns a list of the leaves; None if an object is one twice. */
static PyObject *
leaves_of(Recheck *self, PyObject **slots)
{
    PyObject *leaves = PyList_New(self->leaves);
    if (leaves == NULL)
        return NULL;
    for (Py_ssize_t i = 0, at = 0; i < self->count; i++) {
        if (self->checks[i].operation != LEAF)
            continue;
        PyObject *leaf = slots[self->checks[i].slot];
        for (Py_ssize_t j = 0; j < at; j++)
            if (PyList_GetItem(leaves, j) == leaf) {
                Py_DECREF(leaves);
                Py_RETURN_NONE;
            }
        PyList_SetItem(leaves, at++, Py_NewRef(leaf));
    }
    return leaves;
}

/* True if `args` are a tuple and a dict, the arguments of a call; else sets TypeError. */
static int
are_arguments(PyObject *const *args, Py_ssize_t count)
{
    if (count == 2 && PyTuple_Check(args[0]) && is_dict(args[1]))
        return 1;
    PyErr_SetString(PyExc_TypeError, "the arguments must be a tuple and a dict");
    return 0;
}

/* Returns a list of the call's arrays if all checks hold and no array is given twice, else None. */
static PyObject *
matched(Recheck *self, PyObject *args, PyObject *kwargs)
{
    if (PyTuple_Size(args) != self->positional)
        Py_RETURN_NONE;
    PyObject *slots[MOST_SLOTS];
    memset(slots, 0, (size_t)self->slots * sizeof *slots);
    for (Py_ssize_t i = 0; i < self->positional; i++)
        slots[i] = Py_NewRef(PyTuple_GetItem(args, i));
    int same = take_named(self, kwargs, slots);
    for (Py_ssize_t i = 0; same == 1 && i < self->count; i++)
        same = holds(self->checks + i, slots);
    PyObject *result = same == 1 ? leaves_of(self, slots) : NULL;
    if (same < 0 && PyErr_ExceptionMatches(PyExc_Exception)) {
        PyErr_Clear(); /* a failed read counts as a difference; KeyboardInterrupt propagates */
        same = 0;
    }
    if (same == 0)
        result = Py_NewRef(Py_None);
    PyObject *kind, *value, *trace; /* finalizers must not run with an exception set */
    PyErr_Fetch(&kind, &value, &trace);
    for (Py_ssize_t i = 0; i < self->slots; i++)
        Py_XDECREF(slots[i]);
    PyErr_Restore(kind, value, trace);
    return result;
}

static PyObject *
recheck_match(PyObject *op, PyObject *const *args, Py_ssize_t count)
{
    return are_arguments(args, count) ? matched((Recheck *)op, args[0], args[1]) : NULL;
}

static int
recheck_traverse(PyObject *op, visitproc visit, void *arg)
{
    Recheck *self = (Recheck *)op;
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(self->names);
    Py_VISIT(self->given);
    return 0;
}

static int
recheck_clear(PyObject *op)
{
    Recheck *self = (Recheck *)op;
    Py_ssize_t count = self->count;
    self->count = self->leaves = 0; /* first: a finalizer below may run any code */
    self->positional = -1;          /* so that no call matches */
    for (Py_ssize_t i = 0; i < count; i++)
        PyMem_Free(self->checks[i].key);
    PyMem_Free(self->checks);
    self->checks = NULL;
    Py_CLEAR(self->names);
    Py_CLEAR(self->given);
    return 0;
}

/* Frees an object of any type here. */
static void
dealloc(PyObject *op)
{
    PyTypeObject *type = Py_TYPE(op);
    PyObject_GC_UnTrack(op);
    ((inquiry)PyType_GetSlot(type, Py_tp_clear))(op);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(op);
    Py_DECREF(type);
}

/* True if the numbers and types of a check are such that `holds` cannot read out of bounds. */
static int
is_sound(const Check *check, PyObject *keys, PyObject *values, Py_ssize_t slots)
{
    if (check->operation < 0 || check->operation >= OPERATIONS)
        return 0;
    int parts = operations[check->operation].parts, held = check->slot < 0;
    if (check->slot >= slots || check->slot < (parts & SLOT ? 0 : -1) ||
        PyTuple_Size(keys) != (parts & KEYS ? check->count : 0) ||
        PyTuple_Size(values) != (parts & VALUES ? check->count : 0) ||
        ((parts & ONE) == ONE && check->count != 1) ||
        ((parts & INTO) == INTO && (check->next < 0 || check->count > slots - check->next)) ||
        ((parts & OF_DICT) && !(held && is_dict(check->object))) ||
        ((parts & OF_LIST) && !(held && PyList_Check(check->object))))
        return 0;
    for (Py_ssize_t i = 0; i < PyTuple_Size(keys); i++) {
        PyObject *key = PyTuple_GetItem(keys, i);
        if (((parts & TEXTS) == TEXTS && !PyUnicode_CheckExact(key)) ||
            ((parts & DICTS) == DICTS && !PyDict_Check(key)))
            return 0;
    }
    return 1;
}

/* Fills `word` with the C functions of the built-in functions without arguments. */
static void
find_functions(Check *check)
{
    for (Py_ssize_t i = 0; i < check->count; i++)
        if (Py_TYPE(check->key[i]) == &PyCFunction_Type &&
            PyCFunction_GetFlags(check->key[i]) == METH_NOARGS)
            check->word[i] = (size_t)PyCFunction_GetFunction(check->key[i]);
}

/* Reads a tuple of the address of a C function and an offset.  Returns 0 with an exception set if
 * `given` is no such tuple. */
static int
take_reader(PyObject *given, Reader *reader)
{
    unsigned long long address;
    if (!PyTuple_Check(given)) {
        PyErr_SetString(PyExc_TypeError, "a reader must be a tuple");
        return 0;
    }
    if (!PyArg_ParseTuple(given, "Kn", &address, &reader->offset))
        return 0;
    reader->read = (int32_t(*)(void *, void **))(uintptr_t)address;
    return 1;
}

/* Fills `word` with the positions of the items; an item that is missing keeps 0. */
static void
find_places(Check *check)
{
    PyObject *key, *value;
    Py_ssize_t place = 0, before = 0;
    for (; PyDict_Next(check->object, &place, &key, &value); before = place)
        for (Py_ssize_t i = 0; i < check->count; i++)
            if (key == check->key[i])
                check->word[i] = (size_t)before;
}

/* Fills `word` with the values.  Returns 0 if a value is no int or does not fit a word. */
static int
are_words(Check *check)
{
    for (Py_ssize_t i = 0; i < check->count; i++) {
        if (Py_TYPE(check->value[i]) != &PyLong_Type)
            return 0;
        check->word[i] = PyLong_AsSize_t(check->value[i]);
        if (PyErr_Occurred()) {
            PyErr_Clear();
            return 0;
        }
    }
    return 1;
}

/* Reads a check from its tuple.  Returns 0 with an exception set if it is not sound. */
static int
take_check(Check *check, PyObject *one, Py_ssize_t slots)
{
    PyObject *keys, *values;
    if (!PyTuple_Check(one)) {
        PyErr_SetString(PyExc_TypeError, "a check must be a tuple");
        return 0;
    }
    if (!PyArg_ParseTuple(one, "iiOO!O!n", &check->operation, &check->slot, &check->object,
                          &PyTuple_Type, &keys, &PyTuple_Type, &values, &check->next))
        return 0;
    Py_ssize_t known = PyTuple_Size(keys), found = PyTuple_Size(values);
    check->count = known > found ? known : found;
    if (!is_sound(check, keys, values, slots)) {
        PyErr_SetString(PyExc_ValueError, "a check has wrong numbers or types");
        return 0;
    }
    int counted = operations[check->operation].parts & COUNTED;
    size_t words = (size_t)(known + found + (counted ? known : 0) + 1);
    check->key = PyMem_Calloc(words, sizeof *check->key);
    if (check->key == NULL) {
        PyErr_NoMemory();
        return 0;
    }
    check->value = check->key + known;
    check->word = (size_t *)(check->value + found);
    for (Py_ssize_t i = 0; i < known; i++)
        check->key[i] = PyTuple_GetItem(keys, i);
    for (Py_ssize_t i = 0; i < found; i++)
        check->value[i] = PyTuple_GetItem(values, i);
    if (check->operation == CALLS)
        find_functions(check);
    if (check->operation == LOOKUP)
        find_places(check);
    if (check->operation != WORDS)
        return 1;
    if (!take_reader(check->object, &check->reader))
        return 0;
    if (!are_words(check)) {
        PyErr_SetString(PyExc_ValueError, "an address is not an int of one word");
        return 0;
    }
    return 1;
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
        PyErr_SetString(PyExc_ValueError, "more slots than MOST_SLOTS, or fewer than arguments");
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
    self->given = Py_NewRef(list);
    self->checks = PyMem_Calloc((size_t)count + 1, sizeof(Check));
    if (self->checks == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        self->count = i + 1;
        if (!take_check(self->checks + i, PyTuple_GetItem(list, i), slots)) {
            Py_DECREF(self);
            return NULL;
        }
        self->leaves += self->checks[i].operation == LEAF;
    }
    return (PyObject *)self;
}

static PyMethodDef recheck_methods[] = {
    {"match", (PyCFunction)(void (*)(void))recheck_match, METH_FASTCALL,
     "match($self, args, kwargs, /)\n--\n\nReturns the arrays among the arguments of a call, in "
     "order.  None if a check does not hold or raises an Exception, or if an array comes twice."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot recheck_slots[] = {
    {Py_tp_doc, "Recheck(positional, names, slots, checks)\n--\n\n"
                "The checks of one call, to compare later calls with it.  A check: "
                "(operation, slot, object, keys, values, next slot)."},
    {Py_tp_new, recheck_new},
    {Py_tp_dealloc, dealloc},
    {Py_tp_traverse, recheck_traverse},
    {Py_tp_clear, recheck_clear},
    {Py_tp_methods, recheck_methods},
    {0, NULL},
};

static PyType_Spec recheck_spec = {
    .name = "ostinato.interop.reading._recheck.Recheck",
    .basicsize = sizeof(Recheck),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = recheck_slots,
};

/* ------------------------------------------------------------------------------------------ Way
 *
 * Makes a whole call by the short way.  Way calls only objects that `recheck.py` passed to it, with
 * the lock of the graphed function held. */

enum { MOST_WORDS = 32, TIMED = 16 }; /* MOST_WORDS: of a first node that copies arrays */

typedef struct {
    PyObject_HEAD
    PyObject *recheck;
    PyObject *acquire, *release;   /* methods of the lock */
    PyObject *captured;            /* a weak reference to the graph's Captured */
    PyObject *turns, *stream;      /* `turns.take()` is called unless `turns.last` is the stream */
    PyObject *maker, *address;
    PyObject *reader;              /* a Reader as a tuple, faster than `address`; or None */
    PyObject *node;                /* index of the graph's first node, which copies the arrays; or
                                    * None: `replay` has them copied */
    PyObject *replay, *name;       /* name: None if `replay` takes the arrays */
    PyObject *missed;              /* the result if the call does not match */
    PyObject *timed;               /* called with the seconds of every TIMED-th call */
    PyObject *written;             /* bytes: begin and end address of each range that is written */
    PyObject *further;             /* returns bytes that follow the addresses; or None */
    PyObject *last_word, *recipes_word, *give_word, *set_word, *zero;
    PyObject *bytes;               /* new argument 0 of that node, while `replay` runs */
    Py_ssize_t used;               /* the number of addresses in `bytes` */
    Py_ssize_t count;              /* number of replays */
    Reader read;                   /* `reader`, parsed */
    int ended;
} Way;

enum { WAY_ARGUMENTS = 16, WAY_OBJECTS = 22 };

static PyObject **
way_objects(Way *self)
{
    return &self->recheck;
}

/* Appends the addresses of the arrays in a list.  Returns 0 with an exception set if that fails. */
static int
add_addresses(Way *self, PyObject *arrays, uint64_t *words, Py_ssize_t *used)
{
    Py_ssize_t count = PyList_Size(arrays);
    if (count < 0 || *used + count > (self->node == Py_None ? MOST_SLOTS : MOST_WORDS)) {
        if (count >= 0)
            PyErr_SetString(PyExc_ValueError, "too many arrays");
        return 0;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *array = PyList_GetItem(arrays, i);
        size_t word;
        if (self->read.read != NULL && read_word(&self->read, array, &word)) {
            words[(*used)++] = word;
            continue;
        }
        PyObject *number = PyObject_CallFunctionObjArgs(self->address, array, NULL);
        if (number == NULL)
            return 0;
        words[*used] = PyLong_AsUnsignedLongLong(number);
        Py_DECREF(number);
        if (words[(*used)++] == UINT64_MAX && PyErr_Occurred())
            return 0;
    }
    return 1;
}

/* 1 if no address lies in memory that the function writes, else 0; -1 with an exception set. */
static int
are_apart(Way *self, const uint64_t *words, Py_ssize_t used)
{
    char *ranges;
    Py_ssize_t size;
    uint64_t range[2];
    if (PyBytes_AsStringAndSize(self->written, &ranges, &size) < 0)
        return -1;
    for (; size >= (Py_ssize_t)sizeof range; size -= sizeof range, ranges += sizeof range) {
        memcpy(range, ranges, sizeof range);
        for (Py_ssize_t i = 0; i < used; i++)
            if (range[0] <= words[i] && words[i] < range[1])
                return 0;
    }
    return 1;
}

/* Makes new arrays for the outputs that the graph copies. */
static PyObject *
new_outputs(Way *self, PyObject *captured)
{
    PyObject *recipes = PyObject_GetAttr(captured, self->recipes_word);
    if (recipes == NULL)
        return NULL;
    PyObject *made = NULL;
    if (!PyTuple_Check(recipes))
        PyErr_SetString(PyExc_TypeError, "recipes must be a tuple");
    else
        made = PyList_New(PyTuple_Size(recipes));
    for (Py_ssize_t i = 0; made != NULL && i < PyTuple_Size(recipes); i++) {
        PyObject *recipe = PyTuple_GetItem(recipes, i), *one = NULL;
        if (PyTuple_Check(recipe))
            one = PyObject_Call(self->maker, recipe, NULL);
        else
            PyErr_SetString(PyExc_TypeError, "a recipe must be a tuple");
        if (one == NULL)
            Py_CLEAR(made);
        else
            PyList_SetItem(made, i, one);
    }
    Py_DECREF(recipes);
    return made;
}

/* Launches the graph with the addresses of its inputs and outputs.  Returns the values that the host
 * has read in it, as a list, or None; `missed` if the graph is gone; NULL with an exception set. */
static PyObject *
way_launch(Way *self, const uint64_t *words, Py_ssize_t used, PyObject *captured, PyObject *leaves,
           PyObject *made)
{
    /* Of an outer call: a finalizer may have made this one. */
    PyObject *before = self->bytes;
    Py_ssize_t used_before = self->used;
    PyObject *bytes = PyBytes_FromStringAndSize((char *)words, MOST_WORDS * sizeof *words);
    PyObject *answer = NULL;
    self->bytes = bytes;
    self->used = used;
    if (bytes != NULL)
        answer = self->name == Py_None
                     ? PyObject_CallFunctionObjArgs(self->replay, captured, (PyObject *)self, leaves,
                                                    made, NULL)
                     : PyObject_CallFunctionObjArgs(self->replay, self->name, self->stream,
                                                    (PyObject *)self, NULL);
    self->bytes = before;
    self->used = used_before;
    Py_XDECREF(bytes);
    if (answer == NULL || self->name == Py_None)
        return answer;
    int launched = PyObject_IsTrue(answer);
    Py_DECREF(answer);
    return launched < 0 ? NULL : Py_NewRef(launched ? Py_None : self->missed);
}

/* Puts what `further` returns behind the addresses in `bytes`, which nobody else has seen.  Returns
 * 0 with an exception set if that fails. */
static int
add_further(Way *self)
{
    char *into, *from;
    Py_ssize_t size, whole, place = self->used * (Py_ssize_t)sizeof(uint64_t);
    PyObject *bytes = Py_NewRef(self->bytes), *further = PyObject_CallNoArgs(self->further);
    int added = further != NULL && PyBytes_AsStringAndSize(further, &from, &size) == 0 &&
                PyBytes_AsStringAndSize(bytes, &into, &whole) == 0;
    if (added && size > whole - place) {
        PyErr_SetString(PyExc_ValueError, "too many words");
        added = 0;
    }
    if (added)
        memcpy(into + place, from, (size_t)size);
    Py_XDECREF(further);
    Py_DECREF(bytes);
    return added;
}

/* Patches the executable that `replay` is about to launch: `replay` calls the Way for this. */
static PyObject *
way_change(PyObject *op, PyObject *args, PyObject *kwargs)
{
    Way *self = (Way *)op;
    PyObject *executable;
    if (!PyArg_ParseTuple(args, "O", &executable))
        return NULL;
    if (self->bytes == NULL || (kwargs != NULL && PyDict_Size(kwargs) != 0)) {
        PyErr_SetString(PyExc_TypeError, "only a replay calls it, with an executable");
        return NULL;
    }
    if (self->further != Py_None && !add_further(self))
        return NULL;
    return PyObject_CallMethodObjArgs(executable, self->set_word, self->node, self->zero,
                                      self->bytes, NULL);
}

/* Takes the turn of the stream.  Returns 0 with an exception set if that fails. */
static int
way_turn(Way *self)
{
    PyObject *last = PyObject_GetAttr(self->turns, self->last_word);
    if (last != NULL && last != self->stream) {
        Py_DECREF(last);
        last = PyObject_CallMethod(self->turns, "take", NULL);
    }
    Py_XDECREF(last);
    return last != NULL;
}

static PyObject *
way_run(Way *self, PyObject *args, PyObject *kwargs)
{
    PyObject *made = NULL, *give = NULL, *result = NULL, *captured = NULL, *read = NULL;
    PyObject *leaves = matched((Recheck *)self->recheck, args, kwargs);
    int launched = leaves == NULL ? -1 : leaves != Py_None;
    uint64_t words[MOST_SLOTS] = {0};
    Py_ssize_t used = 0;
    if (launched == 1) {
        launched = add_addresses(self, leaves, words, &used) ? are_apart(self, words, used) : -1;
        if (launched < 0 && PyErr_ExceptionMatches(PyExc_Exception)) {
            PyErr_Clear(); /* an array without memory of its own: its key states the reason */
            launched = 0;
        }
    }
    if (launched == 1) {
        captured = PyObject_CallNoArgs(self->captured);
        launched = captured == NULL ? -1 : captured != Py_None;
    }
    if (launched == 1) {
        made = way_turn(self) ? new_outputs(self, captured) : NULL;
        if (made != NULL && (self->node == Py_None || add_addresses(self, made, words, &used)))
            read = way_launch(self, words, used, captured, leaves, made);
        launched = read == NULL ? -1 : read != self->missed;
    }
    if (launched == 1) {
        self->count++;
        give = PyObject_GetAttr(captured, self->give_word);
        if (give != NULL)
            result = PyObject_CallFunctionObjArgs(give, made, read == Py_None ? NULL : read, NULL);
    }
    else if (launched == 0)
        result = Py_NewRef(self->missed);
    Py_XDECREF(leaves);
    Py_XDECREF(captured);
    Py_XDECREF(made);
    Py_XDECREF(give);
    Py_XDECREF(read);
    return result;
}

/* Runs `way_run`, and reports its time to `timed` if it replayed. */
static PyObject *
way_run_timed(Way *self, PyObject *args, PyObject *kwargs)
{
    struct timespec began, ended;
    timespec_get(&began, TIME_UTC);
    PyObject *result = way_run(self, args, kwargs);
    if (result == NULL || result == self->missed)
        return result;
    timespec_get(&ended, TIME_UTC);
    double seconds = (double)(ended.tv_sec - began.tv_sec) +
                     1e-9 * (double)(ended.tv_nsec - began.tv_nsec);
    /* Negative if the clock was set back. */
    PyObject *number = PyFloat_FromDouble(seconds < 0 ? 0 : seconds);
    PyObject *noted =
        number == NULL ? NULL : PyObject_CallFunctionObjArgs(self->timed, number, NULL);
    Py_XDECREF(number);
    Py_XDECREF(noted);
    if (noted == NULL)
        Py_CLEAR(result);
    return result;
}

static PyObject *
way_call(PyObject *op, PyObject *const *args, Py_ssize_t count)
{
    Way *self = (Way *)op;
    if (!are_arguments(args, count))
        return NULL;
    PyObject *taken = PyObject_CallNoArgs(self->acquire), *result;
    if (taken == NULL)
        return NULL;
    Py_DECREF(taken);
    if (self->ended)
        result = Py_NewRef(self->missed);
    else if (self->count % TIMED == TIMED - 1)
        result = way_run_timed(self, args[0], args[1]);
    else
        result = way_run(self, args[0], args[1]);
    PyObject *kind, *value, *trace;
    PyErr_Fetch(&kind, &value, &trace);
    PyObject *released = PyObject_CallNoArgs(self->release);
    Py_XDECREF(released);
    if (released == NULL)
        PyErr_Clear(); /* the lock is not held: there is nothing to release */
    PyErr_Restore(kind, value, trace);
    return result;
}

static PyObject *
way_end(PyObject *op, PyObject *Py_UNUSED(none))
{
    ((Way *)op)->ended = 1;
    Py_RETURN_NONE;
}

static int
way_traverse(PyObject *op, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(op));
    for (int i = 0; i < WAY_OBJECTS; i++)
        Py_VISIT(way_objects((Way *)op)[i]);
    return 0;
}

static int
way_clear(PyObject *op)
{
    ((Way *)op)->ended = 1;
    for (int i = 0; i < WAY_OBJECTS; i++)
        Py_CLEAR(way_objects((Way *)op)[i]);
    return 0;
}

static PyObject *
way_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    if (PyTuple_Size(args) != WAY_ARGUMENTS || (kwargs != NULL && PyDict_Size(kwargs) != 0)) {
        PyErr_Format(PyExc_TypeError, "Way takes %d positional arguments", WAY_ARGUMENTS);
        return NULL;
    }
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Way *self = (Way *)alloc(type, 0);
    if (self == NULL)
        return NULL;
    for (int i = 0; i < WAY_ARGUMENTS; i++)
        way_objects(self)[i] = Py_NewRef(PyTuple_GetItem(args, i));
    self->last_word = PyUnicode_InternFromString("last");
    self->recipes_word = PyUnicode_InternFromString("recipes");
    self->give_word = PyUnicode_InternFromString("give");
    self->set_word = PyUnicode_InternFromString("set");
    self->zero = PyLong_FromLong(0);
    int failed = !self->last_word || !self->recipes_word || !self->give_word || !self->set_word ||
                 !self->zero;
    if (!failed && self->reader != Py_None)
        failed = !take_reader(self->reader, &self->read);
    if (!failed &&
        PyType_GetSlot(Py_TYPE(self->recheck), Py_tp_traverse) != (void *)recheck_traverse) {
        PyErr_SetString(PyExc_TypeError, "the first argument must be a Recheck");
        failed = 1;
    }
    if (failed)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static PyMethodDef way_methods[] = {
    {"call", (PyCFunction)(void (*)(void))way_call, METH_FASTCALL,
     "call($self, args, kwargs, /)\n--\n\nReturns the result of a replay; `missed` if the call "
     "does not match."},
    {"end", way_end, METH_NOARGS, "end($self, /)\n--\n\nMakes each later call return `missed`."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef way_members[] = {
    {"count", T_PYSSIZET, offsetof(Way, count), READONLY, "The number of replays."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot way_slots[] = {
    {Py_tp_doc, "Way(recheck, acquire, release, captured, turns, stream, maker, address, "
                "reader, node, replay, name, missed, timed, written, further)\n--\n\n"
                "A whole call by the short way; see ostinato.interop.reading.recheck."},
    {Py_tp_new, way_new},
    {Py_tp_dealloc, dealloc},
    {Py_tp_traverse, way_traverse},
    {Py_tp_clear, way_clear},
    {Py_tp_call, way_change},
    {Py_tp_methods, way_methods},
    {Py_tp_members, way_members},
    {0, NULL},
};

static PyType_Spec way_spec = {
    .name = "ostinato.interop.reading._recheck.Way",
    .basicsize = sizeof(Way),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = way_slots,
};

static int
add_type(PyObject *module, PyType_Spec *spec)
{
    PyObject *type = PyType_FromModuleAndSpec(module, spec, NULL);
    int failed = type == NULL || PyModule_AddType(module, (PyTypeObject *)type) < 0;
    Py_XDECREF(type);
    return failed ? -1 : 0;
}

static int
module_exec(PyObject *module)
{
    for (int i = 0; i < OPERATIONS; i++)
        if (PyModule_AddIntConstant(module, operations[i].name, i) < 0)
            return -1;
    if (try_counts() < 0)
        return -1;
    if (PyModule_AddIntConstant(module, "MOST_SLOTS", MOST_SLOTS) < 0)
        return -1;
    return add_type(module, &recheck_spec) < 0 ? -1 : add_type(module, &way_spec);
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
    {0, NULL},
};

static struct PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT,
    .m_name = "ostinato.interop.reading._recheck",
    .m_doc = "Compares calls with earlier ones.  See ostinato.interop.reading.recheck.",
    .m_size = 0,
    .m_slots = module_slots,
};

PyMODINIT_FUNC
PyInit__recheck(void)
{
    return PyModuleDef_Init(&module_def);
}
