"""Reads untrusted plain data, as parsed from JSON, within bounds.

Each value is read once, with its type and range; keys that were not read are refused.  All errors
are GraphFileErrors that name the place.
"""

from __future__ import annotations

import itertools
import operator
from array import array
from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from ostinato.errors import GraphFileError

T = TypeVar("T")
MOST_ITEMS = 1 << 20
"""Largest number of items of a list."""
MOST_TEXT = 1 << 16
"""Largest number of characters of a text."""
_MOST_NUMBERS = 1 << 24  # of one column


Column = npt.NDArray[np.int64]


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

    def get(self, key: str) -> object:
        """Returns the value of a key; each key is read once."""
        try:
            value = self._data[key]
        except KeyError:
            raise self.wrong(key, "it is missing") from None
        self._read.append(key)
        return value

    def done(self) -> None:
        if len(self._read) != len(self._data):
            left = set(map(str, self._data)) - set(self._read)
            raise self.wrong(short(min(left)), "this release knows no such entry")

    def text(self, key: str) -> str:
        value = self.get(key)
        if not isinstance(value, str) or len(value) > MOST_TEXT:
            raise self.wrong(key, f"{short(value)} is no text")
        return value

    def flag(self, key: str) -> bool:
        value = self.get(key)
        if not isinstance(value, bool):
            raise self.wrong(key, f"{short(value)} is neither true nor false")
        return value

    def number(self, key: str, low: int, high: int) -> int:
        value = self.get(key)
        if type(value) is not int or not low <= value <= high:
            raise self.wrong(key, f"{short(value)} is no whole number from {low} to {high}")
        return value

    def numbers(self, key: str, low: int, high: int, count: int | None = None) -> tuple[int, ...]:
        return self.list_of(self.get(key), key, low, high, count)

    def list_of(
        self, value: object, key: str, low: int, high: int, count: int | None = None
    ) -> tuple[int, ...]:
        if not isinstance(value, list) or (count is not None and len(value) != count):
            raise self.wrong(key, f"{short(value)} is no list of {count or 'numbers'}")
        for item in value:
            if type(item) is not int or not low <= item <= high:
                raise self.wrong(key, f"{short(item)} is no whole number from {low} to {high}")
        return tuple(value)

    def columns(self, **most: int) -> list[Column]:
        """Reads lists of numbers, all of one length; `most`: the largest number of each key's
        list."""
        lists = [self.get(key) for key in most]
        for key, value in zip(most, lists, strict=True):
            if not isinstance(value, list) or len(value) > _MOST_NUMBERS:
                raise self.wrong(key, f"{short(value)} is no list")
            if len(value) != len(lists[0]):  # type: ignore[arg-type]
                raise self.wrong(key, f"{len(value)} numbers: another list has more or fewer")
        try:
            every = array("q", [*itertools.chain.from_iterable(lists)])  # type: ignore[arg-type]
            found = np.array(every, np.int64).reshape(len(lists), -1)
            # Checked all at once, as most files have few numbers; negative ones are large as
            # uint64.
            largest = found.view(np.uint64).max(axis=1, initial=0).tolist()
            sound = all(map(operator.le, largest, most.values()))
        except (TypeError, OverflowError):
            sound = False
        if not sound and lists[0]:
            for (key, high), value in zip(most.items(), lists, strict=True):
                for number in value:  # type: ignore[attr-defined]
                    if not isinstance(number, int) or not 0 <= number <= high:
                        why = f"{short(number)} is no whole number from 0 to {high}"
                        raise self.wrong(key, why)
        return list(found)

    def rows(self, key: str, low: int, high: int, count: int) -> list[tuple[int, ...]]:
        """Reads a list of lists of `count` numbers each."""
        return [self.list_of(row, key, low, high, count) for row in self.items(key)]

    def items(self, key: str) -> list[object]:
        value = self.get(key)
        if not isinstance(value, list) or len(value) > MOST_ITEMS:
            raise self.wrong(key, f"{short(value)} is no list")
        return value

    def object(self, key: str) -> Plain:
        return Plain(self.get(key), self, f", {key}")

    def each(self, key: str, read: Callable[[Plain], T]) -> tuple[T, ...]:
        """Reads a list of objects, each with `read`."""
        made = []
        for index, item in enumerate(self.items(key)):
            one = Plain(item, key, "[", index, "]")
            made.append(read(one))
            one.done()
        return tuple(made)

    def has(self, key: str) -> bool:
        return key in self._data


def short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
