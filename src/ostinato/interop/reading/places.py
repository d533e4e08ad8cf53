"""The places from which a function reads what it uses besides its arguments, found in its code."""

from __future__ import annotations

import builtins
import dis
import enum
import functools
import inspect
import sys
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ostinato.interop.reading.objects import Missing, of_standard_library
from ostinato.interop.reading.trees import ATOMS, Itself


@dataclass(frozen=True, slots=True)
class ReadPlace:
    """A place whose value is read again at each call."""

    name: str
    read: Callable[[], Any]
    source: tuple[str, Any, str] = ("constant", None, "")
    """The object that `read` reads, for `recheck.py`: an "attribute" or an "item" of an object,
    with its name, the arguments of a "partial", or a "constant"."""


class Current(ABC):
    """A function that may be replaced between calls; its places are those of the first one."""

    def __init__(self, first: Callable[..., Any]) -> None:
        self.first = self.__wrapped__ = first

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    @abstractmethod
    def now(self) -> Any:
        """Returns the present function."""


_METHODS = (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)


def places_of(
    function: Callable[..., Any], attributes: set[str], functions: list[types.FunctionType]
) -> Iterator[ReadPlace]:
    """Yields the places of any callable; adds the attributes that its code names to `attributes`,
    and the user's functions that it consists of to `functions`."""
    if isinstance(function, Current):
        yield ReadPlace("the function", function.now)
        function = function.first
    while isinstance(function, functools.partial):
        partial = function
        yield ReadPlace(
            "partial arguments",
            lambda p=partial: (p.args, p.keywords),  # type: ignore[misc]
            ("partial", partial, ""),
        )
        function = partial.func
    owner: Any = None
    plain: Any = function
    if isinstance(function, _METHODS):  # proxies may have such attributes of another object
        owner, plain = function.__self__, getattr(function, "__func__", function)
    if owner is not None and not isinstance(owner, types.ModuleType | type):
        yield ReadPlace("self", lambda: owner)
    elif owner is None and not isinstance(plain, types.FunctionType):
        yield ReadPlace(type(function).__name__, lambda: function)
        call = inspect.getattr_static(type(function), "__call__", None)
        wrapped = getattr(function, "__wrapped__", None)  # functools.lru_cache has one, say
        owner, plain = (function, call) if isinstance(call, types.FunctionType) else (None, wrapped)
    met: set[int] = set()
    while isinstance(plain, types.FunctionType) and id(plain) not in met:
        met.add(id(plain))
        if is_own(plain):
            functions.append(plain)
        yield from places_of_one(plain, owner, attributes)
        plain = getattr(plain, "__wrapped__", None)
        plain = getattr(plain, "__func__", plain)


def places_of_one(
    function: types.FunctionType, owner: object, named_attributes: set[str]
) -> Iterator[ReadPlace]:
    """Yields the places of one function; `owner`: the object that it is a method of."""
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        source = "attribute", cell, "cell_contents"
        yield ReadPlace(name, functools.partial(_content, cell), source)
    for name in ("__defaults__", "__kwdefaults__"):
        if getattr(function, name):
            read = functools.partial(getattr, function, name)
            yield ReadPlace("default values", read, ("attribute", function, name))
    space = function.__globals__
    named, attributes, modules = _names(code)
    named_attributes |= attributes
    for name in modules if is_own(function) else ():
        read = functools.partial(sys.modules.get, name, Missing)
        yield ReadPlace(name, read, ("item", sys.modules, name))
    for name in named:
        if name in space or not hasattr(builtins, name):
            read = functools.partial(space.get, name, Missing)
            yield ReadPlace(name, read, ("item", space, name))
    if owner is not None and not isinstance(owner, types.ModuleType):
        kind = owner if isinstance(owner, type) else type(owner)
        for name in attributes:
            named_attributes |= names_in_method(kind, name)
        for each in data_of(kind, named_attributes):
            read = functools.partial(getattr, kind, each, Missing)
            yield ReadPlace(f"{kind.__name__}.{each}", read, ("attribute", kind, each))


def lines_of(function: Callable[..., Any], names: Sequence[str]) -> list[int]:
    """Returns the lines of a function that read the last of `names`; if there are none, those that
    read the name before it, and so on."""
    code = code_of(function)
    for name in reversed(names):
        found = [] if code is None else _lines(code, name)
        if found:
            return found
    return []


def code_of(function: Callable[..., Any]) -> types.CodeType | None:
    """Returns the code of any callable; None if it is not in Python."""
    plain: Any = inspect.unwrap(getattr(function, "__func__", function))
    code = getattr(plain, "__code__", None)
    if code is None:
        code = getattr(vars(type(function)).get("__call__"), "__code__", None)
    return code if isinstance(code, types.CodeType) else None


def _lines(code: types.CodeType, name: str) -> list[int]:
    """Returns the lines on which a name is read."""
    found: set[int] = set()
    for step in dis.get_instructions(code):
        line = None if step.positions is None else step.positions.lineno
        if step.opname.startswith("LOAD_") and line is not None and step.argval == name:
            found.add(line)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found.update(_lines(constant, name))
    return sorted(found)


def data_of(kind: type, names: Collection[str]) -> dict[str, Any]:
    """Returns the attributes with these names of a class of the user's that are data, also those of
    its metaclass."""
    found: dict[str, Any] = {}
    for base in own_bases(kind) + own_bases(type(kind)):
        held = vars(base)
        for name in held.keys() & names:
            value = held[name]
            if name not in found and not hasattr(value, "__get__"):
                found[name] = value
    return found


def descriptors_of(kind: type, names: Collection[str]) -> list[Any]:
    """Returns the descriptors of the user's that make attributes of these names: they may read what
    they hold, and values of the object that are stored under any name."""
    found = [vars(base)[name] for base in own_bases(kind) for name in vars(base).keys() & names]
    getters: list[Any] = [getattr(type(each), "__get__", None) for each in found]
    return [
        each
        for each, getter in zip(found, getters, strict=True)
        if isinstance(each, functools.singledispatchmethod)
        or (isinstance(getter, types.FunctionType) and is_own(getter))
    ]


def data_in(space: types.ModuleType | types.FunctionType | type, names: set[str]) -> dict[str, Any]:
    """Returns the attributes with these names of a function, or of a module or a class of the
    user's; of a class those that are data."""
    if isinstance(space, type):
        return dict(sorted(data_of(space, names).items()))
    held = vars(space)
    return {name: held[name] for name in sorted(held.keys() & (names | _UNNAMED))}


_UNNAMED = frozenset(["__getattr__", "registry"])
"""Names that are read of modules and functions though no code has them: the function that gives the
names that a module lacks, and those that `functools.singledispatch` chooses from."""


_BY_NAME = frozenset(["getattr", "hasattr", "vars", "attrgetter", "__dict__", "__getattribute__"])
"""Names of functions and attributes that take names of attributes as texts, or give all of them."""
_IMPORTING = frozenset(["import_module", "__import__", "sys"])
"""Names of what gives a module that is named by a text."""
_TEXT = ("__str__", "__repr__", "__format__")
_COPY = ("__copy__", "__deepcopy__", "__reduce__", "__reduce_ex__", "__getstate__")
_CALLING = {
    **dict.fromkeys(("count", "index", "remove"), ("__eq__",)),
    **dict.fromkeys(("str", "repr", "format", "join"), _TEXT),
    **dict.fromkeys(("copy", "deepcopy", "replace"), _COPY),
    "hash": ("__hash__",),
    "value": ("_value_",),
    "dir": ("__dir__",),
    "vars": ("__dict__",),
}
"""Names of functions and attributes, each with the special methods and attributes that it reads."""


def texts_in(constants: Iterable[object]) -> set[str]:
    """Returns the identifiers among constants, tuples included."""
    found: set[str] = set()
    for each in constants:
        if isinstance(each, tuple):
            found |= texts_in(each)
        elif isinstance(each, functools.partial):
            found |= texts_in(each.args)
        elif isinstance(each, str):
            found.update(filter(str.isidentifier, each.split(".")))
    return found


def _names(code: types.CodeType) -> tuple[dict[str, None], set[str], dict[str, None]]:
    """Returns the globals that code and the code inside it name, in order; all names of attributes;
    and the modules that it imports by their whole names."""
    named: dict[str, None] = {}
    attributes: set[str] = set()
    modules: dict[str, None] = {}
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            named[str(step.argval)] = None
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM"):
            attributes.add(str(step.argval))
        elif step.opname == "IMPORT_NAME" and step.argval:
            modules[str(step.argval)] = None
        elif step.opname.startswith(("FORMAT_", "CONVERT_")):
            attributes.update(_TEXT)
        elif step.opname == "CONTAINS_OP" or step.argval in ("==", "!="):
            attributes.update(("__eq__", "__ne__", "__hash__"))
        elif step.opname == "MATCH_CLASS":
            attributes.add("__match_args__")
    if any(isinstance(constant, str) and "%" in constant for constant in code.co_consts):
        attributes.update(_TEXT)
    by_name = "__match_args__" in attributes
    for name in _CALLING.keys() & attributes.union(named):
        attributes.update(_CALLING[name])
    if by_name or not _BY_NAME.isdisjoint(attributes.union(named)):
        attributes |= texts_in(code.co_consts)
    if not _IMPORTING.isdisjoint(attributes.union(named)):
        texts = [each for each in code.co_consts if isinstance(each, str)]
        modules |= {each: None for each in texts if each.replace(".", "").isidentifier()}
    if "globals" in named:
        named |= dict.fromkeys(sorted(texts_in(code.co_consts)))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner, more, imported = _names(constant)
            attributes |= more
            named |= inner
            modules |= imported
    return named, attributes, modules


def names_in_method(kind: type, name: str) -> frozenset[str]:
    """Returns the attributes that a method names, with those of methods that it calls."""
    return _method(kind, name)[0]


def functions_in_method(kind: type, name: str) -> tuple[types.FunctionType, ...]:
    """Returns the method and those that it calls, if they are the user's."""
    return _method(kind, name)[1]


@functools.lru_cache(maxsize=4096)
def _method(kind: type, name: str) -> tuple[frozenset[str], tuple[types.FunctionType, ...]]:
    found: set[str] = set()
    left = [name]
    met: dict[types.FunctionType, None] = {}
    while left:
        each = left.pop()
        for base in kind.__mro__:  # all, since a method may call those it overrides by `super()`
            method = vars(base).get(each)
            for inner in ("fget", "func", "__func__"):
                method = getattr(method, inner, method)
            while isinstance(method, types.FunctionType) and method not in met:
                met[method] = None
                _, attributes, _ = _names(method.__code__)
                left += sorted(attributes - found)
                found |= attributes
                method = getattr(method, "__wrapped__", None)
    return frozenset(found), tuple(filter(is_own, met))


def methods_of(kind: type, names: Collection[str]) -> dict[str, Any]:
    """Returns the methods and properties with these names of a class of the user's, as read from
    the class; of other descriptors (class methods), which may be new objects at each read, what
    the class holds, as `Itself`."""
    found: dict[str, Any] = {}
    for base in own_bases(kind):
        for name in (vars(base).keys() & names) - found.keys():
            held = vars(base)[name]
            if isinstance(held, types.FunctionType | staticmethod | property):
                found[name] = getattr(kind, name, Missing)
            elif hasattr(held, "__get__"):
                found[name] = Itself(held)
    return {name: found[name] for name in sorted(found)}


def held_by(name: str, kind: type) -> Any:
    """Returns what a class, or the first of its bases that has the name, holds under it."""
    return next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), Missing)


def forget_methods() -> None:
    """Clears what is cached of methods; for a class whose method was replaced."""
    _method.cache_clear()


def acts(value: Any) -> bool:
    """True if a plain value is or holds what code may call or look into: a function, or a class or
    a member of an enumeration of the user's."""
    kind: Any = type(value)
    if kind is tuple or kind is frozenset:
        return any(type(each) not in ATOMS and acts(each) for each in value)
    if isinstance(value, enum.Enum):
        return of_own_class(value)
    return kind is types.FunctionType or (issubclass(kind, type) and is_own(value))


@functools.lru_cache(maxsize=4096)
def own_bases(kind: type) -> tuple[type, ...]:
    """Returns a class and its bases, without those of installed packages."""
    return tuple([base for base in kind.__mro__ if not _installed(base)])


def of_own_class(value: object) -> bool:
    """True if an object's class, or one that it inherits from, belongs to no installed package."""
    kind: Any = type(value)
    return bool(own_bases(kind))


def of_package(value: object) -> bool:
    """True if an object's class belongs to an installed package, as do those that it inherits
    from; or if it is a module of one."""
    if isinstance(value, types.ModuleType):
        return not is_own(value)
    return not (of_own_class(value) or of_standard_library(type(value)))


def own_names(kind: type) -> set[str]:
    """Returns the names that a class and its bases define, without those of installed packages."""
    return {name for base in own_bases(kind) for name in vars(base)}


@functools.lru_cache(maxsize=4096)
def is_own(space: types.ModuleType | type | types.FunctionType) -> bool:
    """True if a module, a class or a function belongs to no installed package."""
    return not _installed(space)


def _installed(value: Any) -> bool:
    """True if a module, a class or a function belongs to an installed package, to this one, or to
    the standard library."""
    if isinstance(value, type) and value.__module__ == "builtins":
        return of_standard_library(value)
    module = value if isinstance(value, types.ModuleType) else sys.modules.get(value.__module__)
    top = getattr(module, "__name__", "").partition(".")[0]
    file = str(getattr(module, "__file__", None) or "")
    known = (top in sys.stdlib_module_names and top != "__main__") or top == "ostinato"
    return known or "site-packages" in file or "dist-packages" in file


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # deleted, or not assigned yet
        return Missing
