"""Reads untrusted plain data, as parsed from JSON, as values of given types and within bounds.

Each value is read once; keys that were not read are refused.  All errors are GraphFileErrors that
name the place.
"""

from __future__ import annotations

import itertools
import operator
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
import numpy.typing as npt

from ostinato.errors import GraphFileError, InputError

T = TypeVar("T")
MOST = 1 << 46
"""The largest number where no other bound is given: no sum of a few such numbers overflows."""

Column = npt.NDArray[np.int64]

_NO_SUCH_TYPE = {
    str: "no text",
    bool: "neither true nor false",
    dict: "no object",
    list: "no list",
}

_Reader: TypeAlias = Callable[[Any, int, int], Any]
"""Returns a plain value as a type, with each number in it within bounds.  Raises TypeError."""
Field: TypeAlias = tuple[str, _Reader, int, int]
"""A field of a record: its name, its reader, and the bounds of the numbers in it."""


class Plain:
    """One JSON object of the manifest, read key by key; `done` refuses keys that were not read."""

    __slots__ = ("_data", "_read", "_where")

    def __init__(self, data: object, *where: object) -> None:
        """Takes in `where` the parts of the object's place, which are joined only for an error."""
        self._where = where
        self._read: list[str] = []
        if not isinstance(data, dict):
            raise GraphFileError(f"{self.where}: {short(data)} is no object; the file is damaged")
        self._data: Mapping[str, object] = data

    @property
    def where(self) -> str:
        return "".join(str(one.where if isinstance(one, Plain) else one) for one in self._where)

    def wrong(self, key: str, why: str) -> GraphFileError:
        return GraphFileError(
            f"{self.where}, {key}: {why}; the file is damaged or of another release: save it again"
        )

    def get(self, key: str, kind: type[T], low: int = 0, high: int = MOST) -> T:
        """Returns the value of a key as a type: int, str, bool, dict, or a list or tuple of types.

        `low` and `high` are for every number in it.  Each key is read once.
        """
        try:
            value = self._data[key]
        except KeyError:
            raise self.wrong(key, "it is missing") from None
        self._read.append(key)
        try:
            made: T = _reader(kind)(value, low, high)  # type: ignore[arg-type]
        except TypeError as error:
            raise self.wrong(key, str(error)) from None
        return made

    def done(self) -> None:
        if len(self._read) != len(self._data):
            left = set(map(str, self._data)) - set(self._read)
            raise self.wrong(short(min(left)), "this release knows no such entry")

    def record(self, made: Callable[..., T], fields: Sequence[Field], **more: Any) -> T:
        """Reads a record; `fields`: those that are read, `more`: the others."""
        data, name = self._data, ""
        try:
            for name, read, low, high in fields:
                more[name] = read(data[name], low, high)
                self._read.append(name)
        except KeyError:
            raise self.wrong(name, "it is missing") from None
        except TypeError as error:
            raise self.wrong(name, str(error)) from None
        try:
            return made(**more)
        except InputError as error:
            raise self.wrong(name, str(error)) from None

    def columns(self, **most: int) -> list[Column]:
        """Reads lists of numbers, all of one length; `most`: the largest number of each key's
        list."""
        lists: list[list[Any]] = [self.get(key, list) for key in most]
        for key, value in zip(most, lists, strict=True):
            if len(value) != len(lists[0]):
                raise self.wrong(key, f"{len(value)} numbers: another list has more or fewer")
        return self._numbers([*most], lists, [*most.values()])

    def rows(self, key: str, *most: int) -> list[list[int]]:
        """Reads a list of lists of numbers; `most`: the largest of each place in the inner ones."""
        rows = self.get(key, list)
        if not all(type(row) is list and len(row) == len(most) for row in rows):
            raise self.wrong(key, f"it is no list of lists of {len(most)} numbers")
        columns = [[*column] for column in zip(*rows, strict=True)]
        self._numbers([key] * len(most), columns or [[]], most)
        return rows

    def _numbers(
        self, keys: Sequence[str], lists: Sequence[Sequence[Any]], most: Sequence[int]
    ) -> list[Column]:
        try:
            found = np.array(array("q", [*itertools.chain.from_iterable(lists)]), np.int64)
            found = found.reshape(len(lists), -1)
            # Checked all at once, as most files have few numbers; negative ones are large as
            # uint64.
            largest = found.view(np.uint64).max(axis=1, initial=0).tolist()
            sound = not lists[0] or all(map(operator.le, largest, most))
        except (TypeError, OverflowError):
            sound = False
        if not sound:
            for key, numbers, high in zip(keys, lists, most, strict=True):
                for number in numbers:
                    if not isinstance(number, int) or not 0 <= number <= high:
                        why = f"{short(number)} is no whole number from 0 to {high}"
                        raise self.wrong(key, why)
        return list(found)

    def object(self, key: str) -> Plain:
        return Plain(self.get(key, dict), self, f", {key}")

    def each(self, key: str, read: Callable[[Plain], T]) -> tuple[T, ...]:
        """Reads a list of objects, each with `read`."""
        made = []
        for index, item in enumerate(self.get(key, list)):
            one = Plain(item, self, f", {key}[", index, "]")
            made.append(read(one))
            one.done()
        return tuple(made)


def record_fields(
    made: Callable[..., Any], names: Sequence[str], bounds: Mapping[str, tuple[int, int]]
) -> list[Field]:
    """Returns how to read fields of a record, by the types that they have there.

    `bounds`: low and high of fields with others than 0 and `MOST`.
    """
    kinds = get_type_hints(made)
    return [(name, _reader(kinds[name]), *bounds.get(name, (0, MOST))) for name in names]


@cache
def _reader(kind: Any) -> _Reader:
    """Returns a reader of values of a type, with lists for tuples: made once, as a store's restore
    mostly reads short files."""
    inner, outer = get_args(kind), get_origin(kind)
    if kind is int:
        return _whole
    if not inner:
        return partial(_same, kind)
    if outer is tuple and {*inner} <= {int, ...}:
        return partial(_wholes, None if ... in inner else len(inner))
    readers = [_reader(one) for one in inner if one is not ...]
    if outer is list or ... in inner:
        return partial(_all, outer, readers[0])
    return partial(_each if outer is tuple else _or_other, inner, readers)


def _whole(value: Any, low: int, high: int) -> int:
    if type(value) is int and low <= value <= high:
        return value
    raise TypeError(f"{short(value)} is no whole number from {low} to {high}")


def _same(kind: type, value: Any, low: int, high: int) -> Any:
    if type(value) is kind:
        return value
    raise TypeError(f"{short(value)} is {_NO_SUCH_TYPE[kind]}")


def _wholes(count: int | None, value: Any, low: int, high: int) -> tuple[int, ...]:
    if type(value) is not list or (count is not None and len(value) != count):
        raise TypeError(f"{short(value)} is no list of {count or 'numbers'}")
    for number in value:
        if type(number) is not int or not low <= number <= high:
            _whole(number, low, high)
    return tuple(value)


def _all(outer: type, read: _Reader, value: Any, low: int, high: int) -> Any:
    return outer([read(one, low, high) for one in _same(list, value, low, high)])


def _each(inner: Any, readers: Sequence[_Reader], value: Any, low: int, high: int) -> Any:
    if type(value) is list and len(value) == len(readers):
        return tuple([read(one, low, high) for read, one in zip(readers, value, strict=True)])
    raise TypeError(f"{short(value)} is no list of {len(readers)}")


def _or_other(inner: Any, readers: Sequence[_Reader], value: Any, low: int, high: int) -> Any:
    """Reads a value of the first type, or takes one of the others as it is."""
    return value if type(value) in inner[1:] else readers[0](value, low, high)


def short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
