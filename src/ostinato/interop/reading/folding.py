"""Keys that differ in plain values alone.  A number that is another one at each call (a position)
would make a key of each call and a graph of none: such keys are folded into one."""

from __future__ import annotations

import operator
from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from typing import Any, TypeAlias

from ostinato.interop.reading.records import Line

MOST = 8
"""Keys that differ in the same plain values alone before these are folded."""
_MOST_MET = 128
_MOST_FAMILIES = 64
_MOST_COMPARED = 16
_MOST_CHANGING = 256
Flat: TypeAlias = tuple[Hashable, ...]
"""A key whose tokens are all in one tuple."""


class Fold:
    """Keys that are one line."""

    def __init__(self, places: tuple[int, ...], flat: Flat, line: Line) -> None:
        """`flat`: one of the keys."""
        self.places, self.line = places, line
        """Where the keys differ."""
        self.same = _without(flat, places)
        """What they have in common."""
        self._met: OrderedDict[Hashable, None] = OrderedDict()
        """The values of the last calls, which may come again."""
        self.endless = False
        """Whether more different values came than are remembered."""

    def comes_again(self, flat: Flat) -> bool:
        """Whether a call's values were met before: then it gets a key of its own."""
        values = tuple([flat[place] for place in self.places])
        if values in self._met:
            del self._met[values]
            return True
        self.meet(flat)
        return False

    def meet(self, flat: Flat) -> None:
        self._met[tuple([flat[place] for place in self.places])] = None
        if len(self._met) > _MOST_MET:
            self._met.popitem(last=False)
            self.endless = True


class Folds:
    """The folded keys of one function."""

    def __init__(self) -> None:
        self._recent: deque[tuple[Flat, Hashable]] = deque(maxlen=_MOST_COMPARED)
        """Keys that were new."""
        self._families: OrderedDict[tuple[tuple[int, ...], Flat], list[tuple[Flat, Hashable]]] = (
            OrderedDict()
        )
        """Keys that differ, by where they do and what they have in common."""
        self._folds: dict[tuple[int, ...], dict[Flat, Fold]] = {}

    def find(self, flat: Flat) -> Fold | None:
        """The fold that a key belongs to."""
        for places, folds in self._folds.items():
            fold = folds.get(_without(flat, places))
            if fold is not None and _are_plain(flat, places):
                return fold
        return None

    def family(
        self, flat: Flat, key: Hashable
    ) -> tuple[tuple[int, ...], list[tuple[Flat, Hashable]]]:
        """Notes a new key.  The most keys that differ in the same places alone, itself with them,
        and these places."""
        found: tuple[tuple[int, ...], list[tuple[Flat, Hashable]]] = (), []
        for places in {places for places, _ in self._families}:
            family = self._families.get((places, _without(flat, places)))
            if family is not None and _are_plain(flat, places):
                family.append((flat, key))
                if len(family) > len(found[1]):
                    found = places, family
        for other in () if found[1] else reversed(self._recent):
            places = _differing(flat, other[0])
            if places:
                found = places, [other, (flat, key)]
                self._families[places, _without(flat, places)] = found[1]
                break
        if len(self._families) > _MOST_FAMILIES:
            self._families.popitem(last=False)
        self._recent.append((flat, key))
        return found

    def add(self, fold: Fold) -> None:
        """Its keys are folded from here on."""
        self._families.pop((fold.places, fold.same), None)
        self._folds.setdefault(fold.places, {})[fold.same] = fold

    def drop(self, fold: Fold) -> None:
        """Its keys are new again."""
        folds = self._folds[fold.places]
        del folds[fold.same]
        if not folds:
            del self._folds[fold.places]


def _differing(one: Flat, other: Flat) -> tuple[int, ...]:
    """Where two keys differ, if they do in plain values alone; else nothing."""
    if len(one) != len(other):
        return ()
    places = [place for place, differs in enumerate(map(operator.ne, one, other)) if differs]
    plain = _are_plain(one, places) and _are_plain(other, places)
    return tuple(places) if plain and len(places) <= _MOST_CHANGING else ()


def _without(flat: Flat, places: Sequence[int]) -> Flat:
    """A key without the values at some places, if it is as long as that."""
    if places[-1] >= len(flat):
        return ()
    rest = [*flat]
    for place in places:
        rest[place] = None
    return tuple(rest)


def _are_plain(flat: Flat, places: Sequence[int]) -> bool:
    return all(_is_plain(flat[place]) for place in places)


def _is_plain(token: Any) -> bool:
    """Whether a token is of a value, and not of an array or of how a container is put together."""
    if type(token) is not tuple or len(token) < 2 or not isinstance(token[0], type):
        return False
    if token[0] is tuple:
        return type(token[1]) is tuple
    return token[0] not in (list, dict, OrderedDict)
