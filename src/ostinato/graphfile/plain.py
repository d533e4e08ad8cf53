"""Reads untrusted plain data, as parsed from JSON, as values of given types and within bounds.

Each value is read once; keys that were not read are refused.  All errors are GraphFileErrors that
name the place.
"""

from __future__ import annotations

import itertools
import operator
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

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
    tuple: "no list",
}


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
            made: T = _fitting(value, kind, low, high)
        except TypeError as error:
            raise self.wrong(key, str(error)) from None
        return made

    def done(self) -> None:
        if len(self._read) != len(self._data):
            left = set(map(str, self._data)) - set(self._read)
            raise self.wrong(short(min(left)), "this release knows no such entry")

    def record(
        self, made: Callable[..., T], names: Sequence[str], bounds: Mapping[str, Any], **more: Any
    ) -> T:
        """Reads the fields of a record by their names and types.

        `bounds`: low and high of fields with others than 0 and `MOST`; `more`: other fields.
        """
        kinds = _kinds(made)
        fields = {name: self.get(name, kinds[name], *bounds.get(name, ())) for name in names}
        try:
            return made(**fields, **more)
        except InputError as error:
            raise self.wrong(names[0], str(error)) from None

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


_kinds = cache(get_type_hints)


def _fitting(value: Any, kind: Any, low: int, high: int) -> Any:
    """Returns a plain value as a type, with lists for tuples.  Raises TypeError."""
    inner, outer = get_args(kind), get_origin(kind)
    if kind is int:
        if type(value) is int and low <= value <= high:
            return value
        raise TypeError(f"{short(value)} is no whole number from {low} to {high}")
    if type(value) is kind:
        return value
    if inner and outer not in (list, tuple):  # `inner[0]`, or a value of the other types as it is
        return value if type(value) in inner[1:] else _fitting(value, inner[0], low, high)
    alike = outer is not tuple or ... in inner
    if inner and type(value) is list and (alike or len(value) == len(inner)):
        kinds = inner[:1] * len(value) if alike else inner
        return outer(_fitting(one, of, low, high) for one, of in zip(value, kinds, strict=True))
    many = "" if alike else f" of {len(inner)}"
    raise TypeError(f"{short(value)} is {_NO_SUCH_TYPE[outer or kind]}{many}")


def short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
