"""What a function does, as text that is the same in every process, for keys of a store.  Pure."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType

from ostinato.cache.schedule import stable_text

__all__ = ["work_digest"]


def work_digest(*functions: object) -> str:
    """A digest of the functions' own code, defaults, and the numbers and texts in their closures.

    Not of what they call, nor of attributes and globals.  Another release of Python gives another.
    """
    made = hashlib.sha256()
    for word in (word for function in functions for word in _words(function, 0)):
        raw = word.encode("utf-8", "surrogatepass")
        made.update(len(raw).to_bytes(8, "little") + raw)
    return made.hexdigest()


_DEEPEST = 8


def _words(value: object, depth: int) -> Iterator[str]:
    text = stable_text(value)
    if text is not None:
        yield text
        return
    yield type(value).__qualname__
    if depth > _DEEPEST:
        return
    inner: Iterable[object] = ()
    match value:
        case functools.partial():
            inner = (value.func, *value.args, *sorted(value.keywords), *value.keywords.values())
        case FunctionType():
            cells = (_content(cell) for cell in value.__closure__ or ())
            defaults = value.__kwdefaults__ or {}
            inner = (value.__code__, *(value.__defaults__ or ()), *defaults.values(), *cells)
        case CodeType():
            yield value.co_code.hex()
            inner = (*value.co_names, *value.co_varnames, *value.co_consts)
        case _ if isinstance(getattr(value, "__func__", None), FunctionType):
            inner = (value.__func__,)  # type: ignore[attr-defined]  # a bound method
    for one in inner:
        yield from _words(one, depth + 1)


def _content(cell: object) -> object:
    try:
        return cell.cell_contents  # type: ignore[attr-defined]
    except ValueError:  # nothing is in it yet
        return None
