/* Whether all that decided a call is still the same, compiled.
 *
 * A Recheck is made of what `recheck.py` noted while it read the key of a call: a flat list of
 * checks.  `match` makes them for another call, without a key.  Only the limited API of CPython 3.11
 * is used.
 */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>
#include <time.h>

/* Of what is checked: the value in a slot (arguments, then what was unpacked out of them), or an
 * object that does not depend on the call. */
enum {
    TYPE,       /* has exactly the type values[0] */
    TYPES,      /* keys are objects, which have exactly these types */
    IS,         /* is values[0] */
    EQUAL,      /* is values[0], or has the same exact type (a built-in one) and is equal */
    READS,      /* keys are names of attributes, or functions of it; each gives its value */
    ATTRIBUTES, /* keys are names of attributes, which are the very values */
    DICT,       /* its attributes are in the very dict values[0], whatever its class does to reads */
    ITEMS,      /* a dict of exactly these keys and values, in order */
    KINDS,      /* a dict of exactly these keys, in order, whose values have these types */
    LOOKUP,     /* a dict of `next` items, or -1 for any number, with these among them */
    SEQUENCE,   /* a list of exactly these values */
    SIZE,       /* dicts of as many items as `next` */
    CALLS,      /* keys are functions without arguments; each gives its value */
    ADDRESSES,  /* a function that gives its value for each of the keys */
    WORDS,      /* a reader, as a tuple, that gives its value for each of the keys */
    UNPACK,     /* a tuple or a list (values[0]) of `count` values, which go into the next slots */
    UNPACK_DICT, /* a dict of exactly these keys, in order, whose values go into the next slots */
    LEAF,       /* belongs to the result of `match` */
    OPERATIONS
};

enum { MOST_SLOTS = 64 };

/* How a library's C function tells the address of an array: its handle is what lies in the Python
 * object at `offset`, and it gives 0 if it could be read. */
typedef struct {
    int32_t (*read)(void *handle, void **result);
    Py_ssize_t offset;
} Reader;

typedef struct {
    int operation, slot; /* slot: -1 for an object */
    PyObject *object, **key, **value;
    Py_ssize_t count, next;
    size_t *word;        /* LOOKUP: where PyDict_Next found each item.  ADDRESSES, WORDS: the values.
                          * CALLS: each function in C, if it is a built-in one, or 0 */
    PyCFunction address; /* ADDRESSES: the function itself, if it is known and all values are words */
    Reader reader;       /* WORDS */
    uint64_t changes;    /* ITEMS, KINDS, LOOKUP: of the dict, when the check held last; 0: not known */
} Check;

typedef struct {
    PyObject_HEAD
    Py_ssize_t positional, slots, leaves, count;
    PyObject *names; /* of keyword arguments, in order */
    PyObject *given; /* the checks as they were given, which own all that is in `checks` */
    Check *checks;
    void *words;     /* what `key`, `value` and `word` point into, in the order of the checks */
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

/* Whether each dict counts its changes here: CPython 3.11 and 3.12 give it a number after each one
 * that no dict had before (PEP 509), in its fourth word; the third one is its size.  From 3.13 on
 * attributes may be stored past their dict. */
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

/* Finds out whether dicts count their changes; -1 with an exception. */
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

/* Whether a check of a dict holds: it does while the dict is as it was when it held last. */
static int
holds_of_dict(Check *check, PyObject *dict, int (*same)(const Check *, PyObject *))
{
    if (check->slot >= 0 || !dicts_count || !PyDict_Check(dict))
        return same(check, dict);
    uint64_t now = changes_of(dict); /* before: what `same` calls may change it */
    if (now != 0 && check->changes == now)
        return 1;
    int result = same(check, dict);
    check->changes = result == 1 ? now : 0;
    return result;
}

/* One array's address into `word`; 0 if it cannot be read. */
static int
read_word(const Reader *reader, PyObject *array, size_t *word)
{
    void *found = NULL;
    int32_t failed = reader->read((char *)array + reader->offset, &found);
    *word = (size_t)found;
    return !failed;
}

static int
same_items(const Check *check, PyObject *dict)
{
    PyObject *key, *value;
    Py_ssize_t place = 0;
    if (!PyDict_Check(dict) || PyDict_Size(dict) != check->count)
        return 0;
    for (Py_ssize_t i = 0; i < check->count; i++)
        if (!PyDict_Next(dict, &place, &key, &value) || key != check->key[i] ||
            value != check->value[i])
            return 0;
    return 1;
}

static int
same_kinds(const Check *check, PyObject *dict)
{
    PyObject *key, *value;
    Py_ssize_t place = 0;
    if (!is_dict(dict) || PyDict_Size(dict) != check->count)
        return 0;
    for (Py_ssize_t i = 0; i < check->count; i++)
        if (!PyDict_Next(dict, &place, &key, &value) || key != check->key[i] ||
            (PyObject *)Py_TYPE(value) != check->value[i])
            return 0;
    return 1;
}

static int
some_items(const Check *check, PyObject *dict)
{
    if (check->next >= 0 && PyDict_Size(dict) != check->next)
        return 0;
    for (Py_ssize_t i = 0; i < check->count; i++) {
        /* Without hashing, where it was.  Whatever a place means, these are a key and its value. */
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
    if ((PyObject *)Py_TYPE(from) != check->value[0] ||
        (listed ? PyList_Size(from) : PyTuple_Size(from)) != check->count)
        return 0;
    for (Py_ssize_t i = 0; i < check->count; i++)
        slots[check->next + i] =
            Py_NewRef(listed ? PyList_GetItem(from, i) : PyTuple_GetItem(from, i));
    return 1;
}

/* Whether each address is the one that it was; as `gives`, but without comparing objects. */
static int
same_addresses(const Check *check)
{
    for (Py_ssize_t i = 0; i < check->count; i++) {
        PyObject *found = check->address(check->key[i], NULL);
        if (found == NULL)
            return -1;
        int whole = Py_TYPE(found) == &PyLong_Type;
        size_t word = whole ? PyLong_AsSize_t(found) : 0;
        Py_DECREF(found);
        if (word == SIZE_MAX && PyErr_Occurred())
            return -1;
        if (!whole || word != check->word[i])
            return 0;
    }
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

/* What a function without arguments gives. */
static PyObject *
call(PyObject *function, size_t in_c)
{
    return in_c ? ((PyCFunction)in_c)(PyCFunction_GetSelf(function), NULL)
                : PyObject_CallNoArgs(function);
}

/* 1 if a check holds, 0 if not, -1 with an exception. */
static int
holds(Check *check, PyObject **slots)
{
    PyObject *subject = check->slot < 0 ? check->object : slots[check->slot];
    PyObject **keys = check->key, **values = check->value, *found;
    int same = 1;
    if (subject == NULL) /* a slot that nothing was unpacked into */
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
        return holds_of_dict(check, subject, same_items);
    case KINDS:
        return holds_of_dict(check, subject, same_kinds);
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
        if (check->address != NULL)
            return same_addresses(check);
        for (Py_ssize_t i = 0; same == 1 && i < check->count; i++)
            same = gives(PyObject_CallFunctionObjArgs(subject, keys[i], NULL),
                         values[i]);
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

/* Whether no object comes twice. */
static int
are_distinct(Recheck *self, PyObject **slots)
{
    PyObject *found[MOST_SLOTS];
    Py_ssize_t count = 0;
    for (Py_ssize_t i = 0; i < self->count; i++) {
        if (self->checks[i].operation != LEAF)
            continue;
        PyObject *leaf = slots[self->checks[i].slot];
        for (Py_ssize_t j = 0; j < count; j++)
            if (found[j] == leaf)
                return 0;
        if (count < MOST_SLOTS)
            found[count++] = leaf;
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

/* A tuple and a dict: those of a call. */
static int
are_arguments(PyObject *const *args, Py_ssize_t count)
{
    if (count == 2 && PyTuple_Check(args[0]) && is_dict(args[1]))
        return 1;
    PyErr_SetString(PyExc_TypeError, "a tuple and a dict are needed");
    return 0;
}

/* The arrays of a call that is like the one of the checks, None for another call. */
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
    if (same == 1)
        same = are_distinct(self, slots);
    PyObject *result = same == 1 ? leaves_of(self, slots) : NULL;
    if (same < 0 && PyErr_ExceptionMatches(PyExc_Exception)) {
        PyErr_Clear(); /* what cannot be read is not the same; KeyboardInterrupt goes on */
        same = 0;
    }
    if (same == 0)
        result = Py_NewRef(Py_None);
    PyObject *kind, *value, *trace; /* the ends of slots must not meet an exception that is set */
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
    self->count = self->leaves = 0; /* first: what follows may run anything */
    self->positional = -1;          /* no call has as many arguments */
    PyMem_Free(self->checks);
    PyMem_Free(self->words);
    self->checks = NULL;
    self->words = NULL;
    Py_CLEAR(self->names);
    Py_CLEAR(self->given);
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
is_sound(const Check *check, Py_ssize_t keys, Py_ssize_t values, Py_ssize_t slots)
{
    Py_ssize_t count = check->count;
    if (check->slot >= slots || check->slot < -1 || count < 0)
        return 0;
    switch (check->operation) {
    case TYPE:
    case IS:
    case EQUAL:
    case DICT:
        return values == 1;
    case TYPES:
    case READS:
    case ADDRESSES:
    case CALLS:
    case ITEMS:
    case KINDS:
    case WORDS:
        return keys == count && values == count;
    case ATTRIBUTES:
    case LOOKUP:
        for (Py_ssize_t i = 0; i < keys; i++)
            if (!PyUnicode_CheckExact(check->key[i]))
                return 0;
        return keys == count && values == count &&
               (check->operation == ATTRIBUTES || (check->slot < 0 && is_dict(check->object)));
    case SEQUENCE:
        return values == count && check->slot < 0 && PyList_Check(check->object);
    case SIZE:
        for (Py_ssize_t i = 0; i < keys; i++)
            if (!PyDict_Check(check->key[i]))
                return 0;
        return keys == count;
    case UNPACK:
        return values == 1 && check->next >= 0 && count <= slots - check->next &&
               (check->value[0] == (PyObject *)&PyTuple_Type ||
                check->value[0] == (PyObject *)&PyList_Type);
    case UNPACK_DICT:
        return keys == count && check->next >= 0 && count <= slots - check->next;
    default:
        return check->operation == LEAF && check->slot >= 0;
    }
}

/* The C function behind a method of a built-in type without arguments, if each of some objects has
 * it; else NULL. */
static PyCFunction
function_of(PyObject *method, PyObject **objects, Py_ssize_t count)
{
    PyCFunction found = NULL;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *bound = PyObject_CallMethod(method, "__get__", "O", objects[i]);
        PyCFunction one = NULL;
        if (bound == NULL)
            PyErr_Clear();
        else if (Py_TYPE(bound) == &PyCFunction_Type &&
                 PyCFunction_GetFlags(bound) == METH_NOARGS &&
                 PyCFunction_GetSelf(bound) == objects[i])
            one = PyCFunction_GetFunction(bound);
        Py_XDECREF(bound);
        if (one == NULL || (found != NULL && one != found))
            return NULL;
        found = one;
    }
    return found;
}

/* Fills `word` with the functions in C of built-in ones without arguments. */
static void
find_functions(Check *check)
{
    for (Py_ssize_t i = 0; i < check->count; i++)
        if (Py_TYPE(check->key[i]) == &PyCFunction_Type &&
            PyCFunction_GetFlags(check->key[i]) == METH_NOARGS)
            check->word[i] = (size_t)PyCFunction_GetFunction(check->key[i]);
}

/* A tuple of the address of a C function and an offset; 0 with an exception. */
static int
take_reader(PyObject *given, Reader *reader)
{
    unsigned long long address;
    if (!PyTuple_Check(given)) {
        PyErr_SetString(PyExc_TypeError, "a reader is a tuple");
        return 0;
    }
    if (!PyArg_ParseTuple(given, "Kn", &address, &reader->offset))
        return 0;
    reader->read = (int32_t(*)(void *, void **))(uintptr_t)address;
    return 1;
}

/* Fills `word` with places; what is not there has any. */
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

/* Fills `word` with the values; 0 if one is no whole number that fits. */
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

/* A check as it was given; 0 with an exception. */
static int
take_check(Check *check, PyObject *one, PyObject ***words, Py_ssize_t slots)
{
    PyObject *keys, *values;
    if (!PyTuple_Check(one)) {
        PyErr_SetString(PyExc_TypeError, "a check is a tuple");
        return 0;
    }
    if (!PyArg_ParseTuple(one, "iiOO!O!nn", &check->operation, &check->slot, &check->object,
                          &PyTuple_Type, &keys, &PyTuple_Type, &values, &check->count,
                          &check->next))
        return 0;
    Py_ssize_t known = PyTuple_Size(keys), found = PyTuple_Size(values);
    check->key = *words;
    check->value = check->key + known;
    *words = check->value + found;
    for (Py_ssize_t i = 0; i < known; i++)
        check->key[i] = PyTuple_GetItem(keys, i);
    for (Py_ssize_t i = 0; i < found; i++)
        check->value[i] = PyTuple_GetItem(values, i);
    if (!is_sound(check, known, found, slots)) {
        PyErr_SetString(PyExc_ValueError, "a check is none");
        return 0;
    }
    check->word = (size_t *)*words;
    if (check->operation == LOOKUP || check->operation == ADDRESSES || check->operation == CALLS ||
        check->operation == WORDS)
        *words += known;
    if (check->operation == CALLS)
        find_functions(check);
    if (check->operation == WORDS) {
        if (!take_reader(check->object, &check->reader))
            return 0;
        if (!are_words(check)) {
            PyErr_SetString(PyExc_ValueError, "an address is none");
            return 0;
        }
    }
    if (check->operation == LOOKUP)
        find_places(check);
    if (check->operation == ADDRESSES && are_words(check))
        check->address = function_of(check->object, check->key, known);
    return 1;
}

/* How many words `take_check` fills for all checks, at most. */
static Py_ssize_t
words_of(PyObject *list)
{
    Py_ssize_t words = 1;
    for (Py_ssize_t i = 0; i < PyTuple_Size(list); i++) {
        PyObject *one = PyTuple_GetItem(list, i);
        for (Py_ssize_t j = 3; PyTuple_Check(one) && j < 5 && j < PyTuple_Size(one); j++)
            if (PyTuple_Check(PyTuple_GetItem(one, j)))
                words += (5 - j) * PyTuple_Size(PyTuple_GetItem(one, j));
    }
    return words;
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
    self->given = Py_NewRef(list);
    self->checks = PyMem_Calloc((size_t)count + 1, sizeof(Check));
    self->words = PyMem_Calloc((size_t)words_of(list), sizeof(PyObject *));
    if (self->checks == NULL || self->words == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    PyObject **left = self->words;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (!take_check(self->checks + i, PyTuple_GetItem(list, i), &left, slots)) {
            Py_DECREF(self);
            return NULL;
        }
        self->count = i + 1;
        self->leaves += self->checks[i].operation == LEAF;
    }
    return (PyObject *)self;
}

static PyMethodDef recheck_methods[] = {
    {"match", (PyCFunction)(void (*)(void))recheck_match, METH_FASTCALL,
     "match($self, args, kwargs, /)\n--\n\nThe arrays among the arguments of a call, in order, if "
     "every check holds and none comes twice; None if not, or if what a check reads raises an "
     "Exception."},
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
    .name = "ostinato.interop.reading._recheck.Recheck",
    .basicsize = sizeof(Recheck),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = recheck_slots,
};

/* ------------------------------------------------------------------------------------------ Way
 *
 * A whole call by the short way, for a graph that copies its arrays itself.  Every call out of here
 * is one of an object that `recheck.py` gave; the lock of the graphed function is held meanwhile. */

enum { MOST_WORDS = 32, TIMED = 16 };

typedef struct {
    PyObject_HEAD
    PyObject *recheck;
    PyObject *acquire, *release;   /* of the lock */
    PyObject *captured;            /* a weak reference, which owns nothing of the graph */
    PyObject *turns, *stream;      /* `turns.last` is the stream, or `turns.take()` is called */
    PyObject *maker, *address;
    PyObject *reader;              /* as that of WORDS, for what `address` gives; or None */
    PyObject *node;                /* the index of the first node, whose argument 0 is set */
    PyObject *replay, *name;
    PyObject *missed;              /* the result of a call that is not like the one noted */
    PyObject *timed;               /* is given the microseconds of one call in TIMED */
    PyObject *written;             /* bytes: words, where memory begins and ends that is written */
    PyObject *last_word, *recipes_word, *give_word, *set_word, *zero;
    PyObject *bytes;               /* for the first node, while `replay` runs */
    Py_ssize_t count;              /* replays */
    Reader read;                   /* `reader` */
    int ended;
} Way;

enum { WAY_ARGUMENTS = 15, WAY_OBJECTS = 21 };

static PyObject **
way_objects(Way *self)
{
    return &self->recheck;
}

/* Appends the addresses of the arrays in a list; 0 with an exception. */
static int
add_addresses(Way *self, PyObject *arrays, uint64_t *words, Py_ssize_t *used)
{
    Py_ssize_t count = PyList_Size(arrays);
    if (count < 0 || *used + count > MOST_WORDS) {
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

/* Whether no address is in memory that the function writes; -1 with an exception. */
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

/* New arrays for the outputs that the graph copies. */
static PyObject *
new_outputs(Way *self, PyObject *captured)
{
    PyObject *recipes = PyObject_GetAttr(captured, self->recipes_word);
    if (recipes == NULL)
        return NULL;
    PyObject *made = NULL;
    if (!PyTuple_Check(recipes))
        PyErr_SetString(PyExc_TypeError, "recipes is no tuple");
    else
        made = PyList_New(PyTuple_Size(recipes));
    for (Py_ssize_t i = 0; made != NULL && i < PyTuple_Size(recipes); i++) {
        PyObject *recipe = PyTuple_GetItem(recipes, i), *one = NULL;
        if (PyTuple_Check(recipe))
            one = PyObject_Call(self->maker, recipe, NULL);
        else
            PyErr_SetString(PyExc_TypeError, "a recipe is no tuple");
        if (one == NULL)
            Py_CLEAR(made);
        else
            PyList_SetItem(made, i, one);
    }
    Py_DECREF(recipes);
    return made;
}

/* Launches the graph with the addresses of its inputs and outputs: 1, or 0 if it is not there, -1
 * with an exception. */
static int
way_launch(Way *self, const uint64_t *words)
{
    PyObject *before = self->bytes; /* of a call that this one came into: a finalizer may make it */
    PyObject *bytes = PyBytes_FromStringAndSize((char *)words, MOST_WORDS * sizeof *words);
    self->bytes = bytes;
    PyObject *answer = bytes == NULL
                           ? NULL
                           : PyObject_CallFunctionObjArgs(self->replay, self->name, self->stream,
                                                          (PyObject *)self, NULL);
    self->bytes = before;
    Py_XDECREF(bytes);
    int launched = answer == NULL ? -1 : PyObject_IsTrue(answer);
    Py_XDECREF(answer);
    return launched;
}

/* Changes the executable that `replay` is about to launch: a Way is the change of its call. */
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
    return PyObject_CallMethodObjArgs(executable, self->set_word, self->node, self->zero,
                                      self->bytes, NULL);
}

/* The stream's turn; 0 with an exception. */
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
    PyObject *made = NULL, *give = NULL, *result = NULL, *captured = NULL;
    PyObject *leaves = matched((Recheck *)self->recheck, args, kwargs);
    int launched = leaves == NULL ? -1 : leaves != Py_None;
    uint64_t words[MOST_WORDS] = {0};
    Py_ssize_t used = 0;
    if (launched == 1) {
        launched = add_addresses(self, leaves, words, &used) ? are_apart(self, words, used) : -1;
        if (launched < 0 && PyErr_ExceptionMatches(PyExc_Exception)) {
            PyErr_Clear(); /* an array without memory of its own: its key has the reason */
            launched = 0;
        }
    }
    if (launched == 1) {
        captured = PyObject_CallNoArgs(self->captured);
        launched = captured == NULL ? -1 : captured != Py_None;
    }
    if (launched == 1) {
        made = way_turn(self) ? new_outputs(self, captured) : NULL;
        launched = made != NULL && add_addresses(self, made, words, &used)
                       ? way_launch(self, words)
                       : -1;
    }
    if (launched == 1) {
        self->count++;
        give = PyObject_GetAttr(captured, self->give_word);
        result = give == NULL ? NULL : PyObject_CallFunctionObjArgs(give, made, NULL);
    }
    else if (launched == 0)
        result = Py_NewRef(self->missed);
    Py_XDECREF(leaves);
    Py_XDECREF(captured);
    Py_XDECREF(made);
    Py_XDECREF(give);
    return result;
}

/* `way_run`, whose time is noted if it replayed. */
static PyObject *
way_run_timed(Way *self, PyObject *args, PyObject *kwargs)
{
    struct timespec began, ended;
    timespec_get(&began, TIME_UTC);
    PyObject *result = way_run(self, args, kwargs);
    if (result == NULL || result == self->missed)
        return result;
    timespec_get(&ended, TIME_UTC);
    double us = 1e6 * (double)(ended.tv_sec - began.tv_sec) +
                1e-3 * (double)(ended.tv_nsec - began.tv_nsec);
    PyObject *number = PyFloat_FromDouble(us < 0 ? 0 : us); /* the clock may have been set */
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
        PyErr_Clear(); /* it is not held: nothing is to be done */
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

static void
way_dealloc(PyObject *op)
{
    PyTypeObject *type = Py_TYPE(op);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    PyObject_GC_UnTrack(op);
    way_clear(op);
    release(op);
    Py_DECREF(type);
}

static PyObject *
way_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *words[] = {"recheck",    "acquire", "release",  "captured", "turns",
                            "stream",     "maker",   "address",  "reader",   "node",
                            "replay",     "name",    "missed",   "timed",    "written", NULL};
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Way *self = (Way *)alloc(type, 0);
    if (self == NULL)
        return NULL;
    PyObject *found[WAY_ARGUMENTS];
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOOOOOOOOOOOO:Way", words, &found[0],
                                     &found[1], &found[2], &found[3], &found[4], &found[5],
                                     &found[6], &found[7], &found[8], &found[9], &found[10],
                                     &found[11], &found[12], &found[13], &found[14])) {
        Py_DECREF(self);
        return NULL;
    }
    for (int i = 0; i < WAY_ARGUMENTS; i++)
        way_objects(self)[i] = Py_NewRef(found[i]);
    self->last_word = PyUnicode_InternFromString("last");
    self->recipes_word = PyUnicode_InternFromString("recipes");
    self->give_word = PyUnicode_InternFromString("give");
    self->set_word = PyUnicode_InternFromString("set");
    self->zero = PyLong_FromLong(0);
    if (!self->last_word || !self->recipes_word || !self->give_word || !self->set_word ||
        !self->zero) {
        Py_DECREF(self);
        return NULL;
    }
    if (self->reader != Py_None && !take_reader(self->reader, &self->read)) {
        Py_DECREF(self);
        return NULL;
    }
    if (PyType_GetSlot(Py_TYPE(self->recheck), Py_tp_traverse) != (void *)recheck_traverse) {
        PyErr_SetString(PyExc_TypeError, "the first argument is no Recheck");
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static PyMethodDef way_methods[] = {
    {"call", (PyCFunction)(void (*)(void))way_call, METH_FASTCALL,
     "call($self, args, kwargs, /)\n--\n\nThe result of a replay for a call like the one that it "
     "was made of; `missed` for another call."},
    {"end", way_end, METH_NOARGS, "end($self, /)\n--\n\nEvery call is missed from here on."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef way_members[] = {
    {"count", T_PYSSIZET, offsetof(Way, count), READONLY, "Replays so far."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot way_slots[] = {
    {Py_tp_doc, "Way(recheck, acquire, release, captured, turns, stream, maker, address, "
                "reader, node, replay, name, missed, timed, written)\n--\n\n"
                "A whole call by the short way; see ostinato.interop.reading.recheck."},
    {Py_tp_new, way_new},
    {Py_tp_dealloc, way_dealloc},
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
    static const char *const names[OPERATIONS] = {
        "TYPE", "TYPES", "IS", "EQUAL", "READS", "ATTRIBUTES", "DICT", "ITEMS", "KINDS", "LOOKUP", "SEQUENCE",
        "SIZE", "CALLS", "ADDRESSES", "WORDS", "UNPACK", "UNPACK_DICT", "LEAF",
    };
    for (int i = 0; i < OPERATIONS; i++)
        if (PyModule_AddIntConstant(module, names[i], i) < 0)
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
    .m_doc = "Checks that a call is like an earlier one.  See ostinato.interop.reading.recheck.",
    .m_size = 0,
    .m_slots = module_slots,
};

PyMODINIT_FUNC
PyInit__recheck(void)
{
    return PyModuleDef_Init(&module_def);
}
