"""`dataclass` for the modules that a program imports until its first launch.

The standard library's compiles up to six methods of a class when the class is defined, half a
millisecond in all; but most of the records that a start defines are never made there.  Here a class
has others in their place (`_Later`, `_method_later`).  `__init__` is compiled when the first record
is made.  All else is taken, at its first use, from a class with the same body of which the standard
library makes a dataclass.

A frozen record is also made in half the time: its `__init__` calls the setters of the slots.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass  # noqa: PLC0414 - for those who import it here
else:

    def dataclass(*, slots, frozen=False, eq=True, repr=True, weakref_slot=False):
        """Makes a record with slots, as `dataclasses.dataclass` does.

        Not for records with a base class that is one, with `__post_init__`, or with fields that are
        ClassVar, InitVar or keyword-only.  A record without a docstring gets none.
        """
        options = {"slots": slots, "frozen": frozen, "eq": eq, "repr": repr}
        options["weakref_slot"] = weakref_slot
        later = ["__match_args__", "__dataclass_fields__", "__dataclass_params__"]
        methods = ["__repr__"] * repr + ["__eq__"] * eq + ["__hash__"] * (eq and frozen)

        def define(cls):
            body = {n: v for n, v in vars(cls).items() if n not in ("__dict__", "__weakref__")}
            body["__qualname__"] = cls.__qualname__
            fields = {name: body.get(name, dataclasses.MISSING) for name in cls.__annotations__}

            @cache
            def standard(home):
                # Without a docstring, the standard library would write a signature.
                twin = type(home)(home.__name__, home.__bases__, body | {"__doc__": "."})
                # Not `vars`: the names of a class are gone once it is collected.
                return dict(vars(dataclasses.dataclass(**options)(twin)))

            made = {name: value for name, value in body.items() if name not in fields}
            made["__slots__"] = (*fields, "__weakref__") if weakref_slot else (*fields,)
            made["__init__"] = _Later(lambda home, _: _init(home, fields, frozen))
            for name in later:
                if made.get(name) is None:
                    made[name] = _Later(lambda home, name: standard(home)[name])
            for name in methods:
                if made.get(name) is None:
                    made[name] = _method_later(lambda: home, name, standard)
            made["__replace__"] = dataclasses.replace
            if frozen:
                made |= {"__getstate__": _get_state, "__setstate__": _set_state}
                made |= {"__setattr__": _refuse, "__delattr__": _refuse}
            home = type(cls)(cls.__name__, cls.__bases__, made)
            return home

        return define


class _Later:
    """An attribute of a class that is made when it is first used."""

    def __init__(self, make: Callable[[type, str], Any]) -> None:
        self._make = make

    def __set_name__(self, home: type, name: str) -> None:
        self._home, self._name = home, name

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        made = self._make(self._home, self._name)  # two threads may both make one
        setattr(self._home, self._name, made)
        return made.__get__(instance, owner) if callable(made) else made


def _method_later(
    home: Callable[[], type], name: str, standard: Callable[[type], dict[str, Any]]
) -> Callable[..., Any]:
    """Returns a method that is made when it is first called.

    Not a `_Later`: where Python looks up a method of an operator it drops what `__get__` raises, so
    that a Ctrl-C would be lost there, and equal records would be different ones.
    """

    def method(self: object, *others: object) -> Any:
        made = standard(home())[name]
        setattr(home(), name, made)
        return made(self, *others)

    return method


class _Unset:
    """The default of a parameter whose field has a factory."""

    def __repr__(self) -> str:
        return "<factory>"  # as the standard library's, in signatures


def _init(home: type, fields: dict[str, Any], frozen: bool) -> Any:
    """Compiles the `__init__` of a record whose fields have these values in its body."""
    # Its module's name is that of the record's: by it `driver.location` knows the library's lines.
    scope: dict[str, Any] = {"__name__": home.__module__, "__unset": _Unset()}
    parameters, lines, hints = ["self"], [], {}
    missing: Any = dataclasses.MISSING
    for name, field in fields.items():
        value, make, taken = field, missing, True
        if isinstance(field, dataclasses.Field):
            value, make, taken = field.default, field.default_factory, field.init
        parameter, given = name, name if taken else f"__default_{name}"
        if value is not missing:
            scope[f"__default_{name}"] = value
            parameter += f"=__default_{name}"
        if make is not missing:
            scope[f"__make_{name}"] = make
            parameter += "=__unset"
            made = f"__make_{name}()"
            given = f"{made} if {name} is __unset else {name}" if taken else made
        if taken:
            parameters.append(parameter)
            hints[name] = home.__annotations__[name]
        if frozen:
            scope[f"__set_{name}"] = vars(home)[name].__set__
            lines.append(f"  __set_{name}(self, {given})")
        else:
            lines.append(f"  self.{name} = {given}")
    exec("\n".join((f"def __init__({', '.join(parameters)}):", *lines, "  pass")), scope)
    init = scope["__init__"]
    init.__qualname__ = f"{home.__qualname__}.__init__"
    init.__annotations__ = {**hints, "return": None}
    return init


def _refuse(self: object, name: str, *value: object) -> None:
    """`__setattr__` and `__delattr__` of a frozen record."""
    verb = "assign to" if value else "delete"
    raise dataclasses.FrozenInstanceError(f"cannot {verb} field {name!r}")


def _get_state(self: Any) -> list[object]:
    return [getattr(self, name) for name in self.__dataclass_fields__]


def _set_state(self: Any, state: list[object]) -> None:
    for name, value in zip(self.__dataclass_fields__, state, strict=True):
        getattr(type(self), name).__set__(self, value)
