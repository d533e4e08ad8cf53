"""Graphs of a graphed function in a folder: what a key's file holds, and how a key is found again.

A file (`ostinato.GraphStore`) holds a graph, and names its memory: `input 0`, … are the buffers of
a call's arrays, `output 0`, … the memory of its results; the arrays that the function uses have the
names of their places (`self.layers.0.weight`).  One more input that no node touches, `the call`,
holds what else a replay needs, such as the form of the result.

A key is found again by text that is the same in every process: the call's own key, and all that the
function uses, without identities.  The text is stricter than the key in memory: it covers code and
settings that no guard reads, since these may change from one process to the next.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import hashlib
import importlib.metadata
import inspect
import math
import sys
import types
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from ostinato import Buffer, GraphStore, MemoryRange
from ostinato.errors import InputError
from ostinato.interop.reading.guards import Guarded, Guards, Trail, Walker, in_words
from ostinato.interop.reading.library import Library
from ostinato.interop.reading.objects import Watch
from ostinato.interop.reading.trees import (
    Itself,
    children_of,
    is_plain,
    new_record,
    other_attributes,
)

CALL = "the call"
"""The name of the input that holds what a replay needs and the graph does not hold."""
_VERSION = 1
_DEEPEST = 6
_MOST_CODE = 5000
"""The most functions and classes whose code is digested."""
_ATOMS = (bool, int, float, str, bytes, complex, range, slice, type(None), type(Ellipsis))


class Unstable(Exception):
    """An error: why a value has no text that is the same in every process."""


class StoringLibrary(Library, Protocol):
    """A library whose functions' graphs can be saved."""

    @property
    def stable(self) -> tuple[type, ...]:
        """Types of `plain` whose values have a text that is the same in every process."""
        ...

    def release(self) -> Hashable:
        """Returns the versions of the packages that the kernels of graphs come from."""
        ...

    def over(self, buffer: Buffer) -> Any:
        """Returns an array over a buffer of ostinato, which it keeps alive."""
        ...

    def span(self, array: Any) -> MemoryRange:
        """Returns the memory from an array's first element to its last one."""
        ...

    def layout(self, array: Any, base: int) -> Any:
        """Returns dtype, shape, strides, and offset from the address `base` of an array, as plain
        data; None for an array whose memory holds another value."""
        ...

    def view(self, array: Any, layout: Any) -> Any:
        """Returns an array of a layout in the whole memory of another one.  Raises ValueError."""
        ...


class Stored:
    """The folder of one function's graphs."""

    def __init__(
        self, library: StoringLibrary, folder: str | Path, tag: Sequence[Hashable]
    ) -> None:
        self.library = library
        self._folder = folder
        self._tag = text_of((_VERSION, *tag, library.release()), library)
        self.store = self.opened({})
        """The store for reading."""
        self.reasons: Counter[str] = Counter()
        """Reasons why keys were not restored, besides those that the store counts."""

    def opened(self, constants: Mapping[str, MemoryRange]) -> GraphStore:
        """Opens the folder, to write a graph whose file holds these constants."""
        return GraphStore(self.library.device, self._folder, tag=self._tag, constants=constants)


# ------------------------------------------------------------------------------------------- text


def text_of(value: Any, library: StoringLibrary) -> str:
    """Returns the text of a part of a key.  Raises Unstable."""
    if isinstance(value, Itself):
        value = value.value
    kind: Any = type(value)
    if kind in _ATOMS:
        return f"{kind.__name__} {value!r}"
    if isinstance(value, type):
        return f"type {_name(value)}"
    if isinstance(value, enum.Enum):
        return f"enum {kind.__module__}.{kind.__qualname__}.{value.name}"
    if isinstance(value, tuple | list):
        return f"{kind.__name__}({', '.join([text_of(one, library) for one in value])})"
    if isinstance(value, frozenset | set):
        return f"{{{', '.join(sorted([text_of(one, library) for one in value]))}}}"
    if isinstance(value, dict):
        pairs = [f"{text_of(k, library)}: {text_of(v, library)}" for k, v in value.items()]
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, types.FunctionType | types.MethodType | types.BuiltinFunctionType):
        return code_text(value, inner=True)
    if isinstance(value, library.stable):
        return f"{kind.__module__}.{kind.__qualname__} {value}"
    raise Unstable(f"a {kind.__module__}.{kind.__qualname__} is not the same in another process")


def code_text(function: Any, *, inner: bool = False) -> str:
    """Returns the name of a function or a class, and a digest of its code and of all that the code
    names.

    The digest covers other functions, and the defaults and plain values that these use; for an
    `inner` function also its own, which are in the key of a call otherwise.  For installed packages
    it covers their versions."""
    found: _Found = set()
    _collect(function, found, set(), inner=inner)
    text = "\n".join(f"{name} {digest}" for name, digest in sorted(found))
    return f"code {_name(function)} {hashlib.sha256(text.encode()).hexdigest()}"


def _name(value: Any) -> str:
    value = value if hasattr(value, "__qualname__") else type(value)
    return f"{getattr(value, '__module__', '')}.{value.__qualname__}"


_Found: TypeAlias = set[tuple[str, str]]
"""Names, each with a digest of code, a version or a value.  Several functions may have one name: a
decorator's wrapper has that of the function inside."""


def _collect(value: Any, found: _Found, seen: set[int], *, inner: bool = True) -> None:
    """Adds digests of code, or versions, by name.  `inner`: also plain values, default values and
    arguments of partials that the function uses."""
    while isinstance(value, functools.partial | types.MethodType):
        if isinstance(value, functools.partial):
            if inner:
                given: dict[Any, Any] = {**value.keywords, **dict(enumerate(value.args))}
                _collect_values(f"{_name(value)} of {_name(value.func)}", given, found, seen)
            value = value.func
        else:
            value = value.__func__
    if not isinstance(value, types.FunctionType | type):
        call = inspect.getattr_static(type(value), "__call__", None)
        if not isinstance(call, types.FunctionType):
            found.add((_name(value), ""))  # written in C: its library's version stands for it
            return
        value = type(value)
    if id(value) in seen:
        return
    seen.add(id(value))
    if len(seen) > _MOST_CODE:
        raise Unstable("the function names too much code to tell whether any of it has changed")
    version = _version(str(getattr(value, "__module__", "")))
    found.add((_name(value), version))
    if version:
        return
    if isinstance(value, type):
        for base in value.__mro__:
            if base is value or not _version(base.__module__):
                for name, member in vars(base).items():
                    if isinstance(member, property):
                        methods = [member.fget, member.fset, member.fdel]
                    else:
                        methods = [getattr(member, "__func__", getattr(member, "func", member))]
                    methods = [one for one in methods if isinstance(one, types.FunctionType)]
                    for method in methods:
                        _collect(method, found, seen)
                    if not methods and is_plain(member) and not name.startswith("__"):
                        found.add((f"{_name(base)}.{name}", repr(member)))
            else:
                found.add((_name(base), _version(base.__module__)))
        return
    names: set[str] = set()
    found.add((_name(value), _digest(value.__code__, names)))
    space = value.__globals__
    held: dict[Any, Any] = {name: space[name] for name in names if name in space}
    for module in [*held.values()]:
        if isinstance(module, types.ModuleType) and not _version(module.__name__):
            inside = vars(module)
            held |= {(module.__name__, name): inside[name] for name in names if name in inside}
    for free, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not assigned yet
            held["closure", free] = cell.cell_contents
    held["wrapped"] = getattr(value, "__wrapped__", None)
    if inner:
        held["defaults"] = value.__defaults__
        held |= {("default", name): one for name, one in (value.__kwdefaults__ or {}).items()}
    _collect_values(_name(value), held, found, seen, plain=inner)


def _collect_values(
    owner: str, held: Mapping[Any, Any], found: _Found, seen: set[int], *, plain: bool = True
) -> None:
    """Adds what a function uses, by name: other code, also in containers, and `plain` values."""
    for name, value in held.items():
        place = f"{owner}: {name}"
        if isinstance(value, types.FunctionType | types.MethodType | functools.partial | type):
            _collect(value, found, seen)
        elif isinstance(value, tuple):
            _collect_values(place, dict(enumerate(value)), found, seen, plain=plain)
        elif isinstance(value, list | dict):
            if id(value) not in seen and len(value) <= _MOST_CODE:
                seen.add(id(value))
                # Without plain values, which may change while the process runs.
                inside = dict(value) if isinstance(value, dict) else dict(enumerate(value))
                _collect_values(place, inside, found, seen, plain=False)
        elif isinstance(value, types.BuiltinFunctionType):
            found.add((place, _name(value)))
        elif is_plain(value):
            if plain:
                text = sorted(map(repr, value)) if isinstance(value, frozenset) else repr(value)
                found.add((place, f"{type(value).__name__} {text}"))
        elif callable(value) and isinstance(type(value).__call__, types.FunctionType):
            _collect(type(value), found, seen)


def _digest(code: types.CodeType, names: set[str]) -> str:
    """Returns the digest of code without its line numbers; adds what the code names to `names`."""
    names.update(code.co_names)
    parts = [code.co_code, repr(code.co_names).encode(), repr(code.co_varnames).encode()]
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            parts.append(_digest(constant, names).encode())
        elif isinstance(constant, frozenset):
            parts.append(repr(sorted(map(repr, constant))).encode())
        else:
            parts.append(repr(constant).encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


@functools.cache
def _version(module: str) -> str:
    """Returns the version of the installed package of a module; empty for other code."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names:
        return f"python {sys.version_info[:3]}"
    known = sys.modules.get(top)
    file = str(getattr(known, "__file__", None) or "")
    version = getattr(known, "__version__", None)
    if version is None:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(top)
    installed = "site-packages" in file or "dist-packages" in file
    return f"{top} {version}" if installed and version is not None else ""


class Description(Walker):
    """The values that a function uses, as text, and its arrays with names, as in `Guards.read`."""

    def __init__(self, library: StoringLibrary) -> None:
        self.library = library
        self.parts: list[str] = []
        self.names: list[str] = []
        self.arrays: list[Any] = []
        self._guards: list[Guards] = []

    def add(self, *values: Any) -> None:
        """Adds the texts of values.  Raises Unstable."""
        self.parts += [text_of(value, self.library) for value in values]

    def array(self, path: Trail | str, array: Any) -> None:
        library, name = self.library, path if isinstance(path, str) else in_words(path)
        self.add(name, library.signature(array), library.offset(array))
        self.names.append(name)
        self.arrays.append(array)

    def guards(self, guards: Guards) -> None:
        if guards not in self._guards:  # a function that uses itself
            self._guards.append(guards)
            guards.walk(self)

    # --- a walk (`guards.Walker`)
    def plain(self, path: Trail, value: Any) -> None:
        self.add(in_words(path), value)

    def watched(self, path: Trail, watch: Watch) -> None:
        if isinstance(watch, Guarded):
            if watch.guards is not None:
                self.guards(watch.guards)
            return
        describe: Callable[[str, Description], None] | None
        describe = getattr(watch, "describe", None)
        if describe is None:
            raise Unstable(f"what {in_words(path)} holds is not known by names")
        describe(in_words(path), self)

    def container(self, path: Trail, value: Any, head: Hashable, children: list[Any]) -> None:
        self.add(in_words(path), head)

    def contents(self, path: Trail, value: Any, token: Hashable) -> None:
        self.add(in_words(path), token)

    def other(self, path: Trail, value: Any, inside: dict[str, Any] | None, inner: bool) -> None:
        self.add(in_words(path), type(value))
        self.settings(value)

    def items(self, path: Trail, value: Any, head: Hashable, items: list[Any]) -> None:
        self.add(in_words(path), len(value))

    def settings(self, value: Any, depth: int = 0, seen: frozenset[int] = frozenset()) -> None:
        """Adds the plain values in an object and in what it holds, up to `_DEEPEST` levels deep.

        Numbers whose names begin with _ are left out: they are counts and hashes."""
        library = self.library
        if is_plain(value, library.plain):
            try:
                self.add(value)
            except Unstable:
                self.add(type(value))
            return
        if depth >= _DEEPEST or id(value) in seen or library.is_array(value):
            return
        seen |= {id(value)}
        if isinstance(value, list | tuple | set | frozenset):
            held: dict[Any, Any] = dict(enumerate(value)) if isinstance(value, list | tuple) else {}
        elif isinstance(value, dict):
            held = value
        elif isinstance(value, types.ModuleType | types.MethodType) or library.watch(value):
            return
        else:
            held = getattr(value, "__dict__", {})
            self.add(type(value))
        for key, child in held.items():
            if isinstance(key, str) and key.startswith("_") and type(child) in (int, float):
                continue
            if isinstance(key, str):
                self.add(key)
                self.settings(child, depth + 1, seen)
            elif isinstance(key, int):
                self.settings(child, depth + 1, seen)


# ---------------------------------------------------------------------------------------- results


def described(value: Any, library: Library, leaves: list[Any]) -> Any:
    """Describes the form of a result as plain data; adds its arrays to `leaves`.

    Raises Unstable for values that cannot be built again from such data."""
    if library.is_array(value):
        leaves.append(value)
        return {"leaf": len(leaves) - 1}
    kind = type(value)
    if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
        return {"value": value}
    if isinstance(value, type) and _is_of_results(value):
        return {"type": [value.__module__, value.__qualname__]}
    found = children_of(value, library)
    if found is None:
        raise Unstable(f"a {kind.__module__}.{kind.__qualname__} in the result")
    children = [described(child, library, leaves) for child in found[1]]
    if kind is list or kind is tuple:
        return {kind.__name__: children}
    names: list[Any] | None = None
    if isinstance(value, dict):
        names = [*value]
    elif dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        if other_attributes(value):
            raise Unstable(f"a {kind.__qualname__} with other attributes than its fields")
    if names is not None and not all(type(name) in (str, int) for name in names):
        raise Unstable("a key of a dict in the result")
    if kind is dict:
        return {"dict": names, "of": children}
    return {"class": [kind.__module__, kind.__qualname__], "names": names, "of": children}


def rebuilt(data: Any, leaves: Sequence[Any]) -> Any:
    """Builds the value that `described` has described, with other arrays.  Raises LookupError,
    TypeError, and ValueError for data that `described` never returns."""
    if "leaf" in data:
        return leaves[data["leaf"]]
    if "value" in data:
        return data["value"]
    if "type" in data:
        return _class_of_results(*data["type"])
    for kind in (list, tuple):
        if kind.__name__ in data:
            return kind([rebuilt(child, leaves) for child in data[kind.__name__]])
    children = [rebuilt(child, leaves) for child in data["of"]]
    if "dict" in data:
        return dict(zip(data["dict"], children, strict=True))
    made = _class_of_results(*data["class"])
    if data["names"] is not None:
        named = [*zip(data["names"], children, strict=True)]
        return made(**dict(named)) if issubclass(made, dict) else new_record(made, named)
    return made(*children) if hasattr(made, "_fields") else made(children)


def _class_of_results(module: str, name: str) -> Any:
    """Finds a class by its name.  Raises KeyError for a class that is not imported, and ValueError
    for one whose objects are no results."""
    made: Any = sys.modules[module]
    for part in name.split("."):
        made = vars(made)[part]
    if not isinstance(made, type) or not _is_of_results(made):
        raise ValueError(f"{module}.{name} is no class of results")
    return made


def _is_of_results(kind: type) -> bool:
    return issubclass(kind, tuple | dict) or dataclasses.is_dataclass(kind)


def require_rebuildable(value: Any, data: Any, leaves: Sequence[Any], library: Library) -> None:
    """Raises Unstable unless the data builds a value like the one that it describes."""
    try:
        same = described(rebuilt(data, leaves), library, []) == data
    except (LookupError, TypeError, ValueError, InputError) as error:
        raise Unstable(f"a {type(value).__qualname__} in the result ({error})") from None
    if not same:
        raise Unstable(f"a {type(value).__qualname__} in the result")
