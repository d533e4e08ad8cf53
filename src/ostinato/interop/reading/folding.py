"""Folds keys that differ in plain values alone.  A number that is another one at each call (a
position) would make a key for each call and a graph for none."""

from __future__ import annotations

import operator
from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from typing import Any, TypeAlias

from ostinato.interop.reading.records import Line

MOST = 8
"""Keys that differ in the same plain values alone before they are folded."""
_MOST_MET = 128
_MOST_FAMILIES = 64
_MOST_COMPARED = 16
_MOST_CHANGING = 256
Flat: TypeAlias = tuple[Hashable, ...]
"""A key whose tokens are all in one tuple."""


class Fold:
    """Keys that share one line."""

    def __init__(self, places: tuple[int, ...], flat: Flat, line: Line) -> None:
        """`flat`: one of the keys."""
        self.places, self.line = places, line
        """Indices of the tokens in which the keys differ."""
        self.same = _without(flat, places)
        """The tokens that the keys have in common."""
        self._met: OrderedDict[Hashable, None] = OrderedDict()
        """The values of the last calls, which may come again."""
        self.endless = False
        """True if there were more different values than are remembered."""

    def comes_again(self, flat: Flat) -> bool:
        """True if a call's values were met before, so that the call gets a key of its own."""
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
        """The latest new keys."""
        self._families: OrderedDict[tuple[tuple[int, ...], Flat], list[tuple[Flat, Hashable]]] = (
            OrderedDict()
        )
        """Keys that differ in plain values, by the places of these and the tokens in common."""
        self._folds: dict[tuple[int, ...], dict[Flat, Fold]] = {}

    def find(self, flat: Flat) -> Fold | None:
        """Returns the fold that a key belongs to, or None."""
        for places, folds in self._folds.items():
            fold = folds.get(_without(flat, places))
            if fold is not None and _are_plain(flat, places):
                return fold
        return None

    def family(
        self, flat: Flat, key: Hashable
    ) -> tuple[tuple[int, ...], list[tuple[Flat, Hashable]]]:
        """Notes a new key.  Returns the places and the keys of the largest family, itself included,
        whose keys differ in these places alone."""
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
        """Folds the keys of a family from here on."""
        self._families.pop((fold.places, fold.same), None)
        self._folds.setdefault(fold.places, {})[fold.same] = fold

    def drop(self, fold: Fold) -> None:
        """Ends a fold: its keys are new again."""
        folds = self._folds[fold.places]
        del folds[fold.same]
        if not folds:
            del self._folds[fold.places]


def _differing(one: Flat, other: Flat) -> tuple[int, ...]:
    """Returns the places where two keys differ, if they differ in plain values alone; else ()."""
    if len(one) != len(other):
        return ()
    places = [place for place, differs in enumerate(map(operator.ne, one, other)) if differs]
    plain = _are_plain(one, places) and _are_plain(other, places)
    return tuple(places) if plain and len(places) <= _MOST_CHANGING else ()


def _without(flat: Flat, places: Sequence[int]) -> Flat:
    """Returns a key without the values at some places; empty if the key is too short."""
    if places[-1] >= len(flat):
        return ()
    rest = [*flat]
    for place in places:
        rest[place] = None
    return tuple(rest)


def _are_plain(flat: Flat, places: Sequence[int]) -> bool:
    return all(_is_plain(flat[place]) for place in places)


def _is_plain(token: Any) -> bool:
    """True if a token is that of a plain value, not of an array or of a container's kind."""
    if type(token) is not tuple or len(token) < 2 or not isinstance(token[0], type):
        return False
    if token[0] is tuple:
        return type(token[1]) is tuple
    return token[0] not in (list, dict, OrderedDict)
