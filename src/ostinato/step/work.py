"""Keys, and the code of functions, as text that is equal in every process: for a store.  Pure."""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import numbers
from collections.abc import Iterator
from types import CodeType, FunctionType

import numpy as np


def stable_text(value: object) -> str | None:
    """Returns a text that is the same for equal keys in every process; None if there is none.

    A key has a text if it is None, a number, a string, bytes, an enumeration, a tuple, frozen set
    or dataclass of these, or if its method `stable_key()` returns such a key.
    """
    stable = getattr(type(value), "stable_key", None)
    if callable(stable):
        return _listed(_type_name(value), [stable(value)])
    if value is None or type(value) in (bool, int, float, complex, str, bytes):
        return f"{type(value).__name__}:{value!r}"
    if isinstance(value, enum.Enum):
        name: str | None = value.name
        if name is None:  # flags without a name of their own
            return _listed(_type_name(value), [value.value])
        return f"{_type_name(value)}.{name}"
    if isinstance(value, tuple):
        return _listed(_type_name(value), value)
    if type(value) is frozenset:
        return _listed("frozenset", value, ordered=False)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        if type(value).__eq__ is object.__eq__:  # equal to nothing but itself
            return None
        compared = [f.name for f in dataclasses.fields(value) if f.compare]
        return _listed(_type_name(value), [getattr(value, name) for name in compared])
    return None


def _type_name(value: object) -> str:
    """Returns a type's name with its module: two modules may have types of one name."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _listed(
    name: str, values: tuple[object, ...] | list[object] | frozenset[object], ordered: bool = True
) -> str | None:
    texts = [stable_text(value) for value in values]
    known = [text for text in texts if text is not None]
    if len(known) < len(texts):
        return None
    # Each text with its length, so that two different lists never give the same text.
    parts = ",".join(f"{len(t)}={t}" for t in (known if ordered else sorted(known)))
    return f"{name}({parts})"


def work_digest(*functions: object) -> str:
    """Returns a digest of the functions' own code and defaults, and of the numbers and texts in
    their closures, also those in tuples, lists, sets and dicts there.

    For a callable object, the code is its class's `__call__`.  Functions that are called,
    attributes and globals are not included.  Another release of Python gives another digest.
    """
    made = hashlib.sha256()
    for word in (word for function in functions for word in _words(function, 0)):
        raw = word.encode("utf-8", "surrogatepass")
        made.update(len(raw).to_bytes(8, "little") + raw)
    return made.hexdigest()


_DEEPEST = 16


def _words(value: object, depth: int) -> Iterator[str]:
    text = stable_text(value)
    yield type(value).__qualname__ if text is None else text
    if depth > _DEEPEST:
        return
    inner: tuple[object, ...] = ()
    match value:
        case _ if callable(value) and isinstance(type(value).__call__, FunctionType):
            inner = (type(value).__call__,)  # a dataclass's text has its fields, but not its code
        case _ if text is not None:
            return
        case functools.partial():
            inner = (value.func, value.args, value.keywords)
        case FunctionType():
            cells = [_content(cell) for cell in value.__closure__ or ()]
            inner = (value.__code__, value.__defaults__, value.__kwdefaults__, cells)
        case CodeType():
            yield value.co_code.hex()
            inner = (value.co_names, value.co_varnames, value.co_consts)
        case tuple() | list():
            inner = tuple(value)
        case dict():
            inner = tuple(value.items())
        case set() | frozenset():
            inner = tuple(sorted(value, key=lambda one: [*_words(one, depth + 1)]))
        case slice():  # a constant of code since Python 3.14
            inner = (value.start, value.stop, value.step)
        case numbers.Number() | str() | bytes() | np.generic():  # others than Python's own
            inner = (repr(value),)
        case type():
            inner = (value.__module__, value.__qualname__)
        case _ if isinstance(getattr(value, "__func__", None), FunctionType):
            inner = (value.__func__,)  # type: ignore[attr-defined]  # a bound method
    yield str(len(inner))  # so that two different lists never give the same words
    for one in inner:
        yield from _words(one, depth + 1)


def _content(cell: object) -> object:
    try:
        return cell.cell_contents  # type: ignore[attr-defined]
    except ValueError:  # the cell is empty
        return None
