"""`PointerIndex`: every word of an executable that may hold an address, by its value.

Built when an executable is rebound for the first time, and kept current: nodes that were changed
since are read again, and a rebinding through the index changes it too.  It answers the plain case,
where all words in the old ranges are pointers and fit into the new ones; anything else is for
`rebind.plan_rebind`, which reads every node.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ostinato.driver.api import KernelNodeParams, MemoryRange
from ostinato.graph.changes import Setting
from ostinato.graph.node import Node
from ostinato.graph.rebind import (
    Move,
    RebindReport,
    ReboundWord,
    Sort,
    Word,
    address_fields,
    named,
    words_of,
)
from ostinato.memory.ranges import KnownRanges

__all__ = ["PlainMove", "PointerIndex"]

_WORD = 8


@dataclass(frozen=True, slots=True)
class _Entry:
    """One node: its words are the rows from `start` on."""

    outer: tuple[Node, ...]
    node: Node
    start: int
    words: tuple[Word, ...]
    """Empty for a node that is no kernel; its address fields have rows all the same."""


@dataclass(frozen=True, slots=True)
class PlainMove:
    """A rebinding of kernel arguments alone: for each node, how many words, and for all of them
    where they are, what they become and what they point at then."""

    nodes: list[Node]
    counts: npt.NDArray[np.uint32]
    places: npt.NDArray[np.uint32]
    values: npt.NDArray[np.uint64]
    targets: list[object]
    rows: npt.NDArray[np.intp]
    report: RebindReport


class PointerIndex:
    """See the top of the file.  Not for several threads at once."""

    def __init__(self, settings: Iterable[tuple[tuple[Node, ...], Setting]]) -> None:
        entries: list[_Entry] = []
        addresses: list[int] = []
        reach: list[int] = []
        sorts: list[int] = []
        places: list[int] = []
        owners: list[int] = []
        for outer, setting in settings:
            words = _words(setting)
            entry = _Entry(outer, setting.node, len(addresses), words)
            if words:
                addresses += _values(setting, words)
                reach += [setting.reach.get(word.offset, -1) for word in words]
                sorts += [_SORTS[word.sort] for word in words]
                places += [word.offset for word in words]
            elif not isinstance(setting.params, KernelNodeParams):
                for field in address_fields(setting.params):
                    addresses.append(field.address)
                    reach.append(field.nbytes)
                    sorts.append(_FIELD)
                    places.append(0)
            owners += [len(entries)] * (len(addresses) - entry.start)
            entries.append(entry)
        self._entries = entries
        self._by_handle = {entry.node.handle: entry for entry in entries}
        self._addresses = np.array(addresses, np.uint64)
        self._reach = np.array(reach, np.int64)
        self._sorts = np.array(sorts, np.uint8)
        self._places = np.array(places, np.uint32)
        self._owners = np.array(owners, np.intp)

    def refreshed(self, settings: Iterable[Setting]) -> bool:
        """Reads nodes again that were changed.  False if the index must be built anew."""
        for setting in settings:
            entry = self._by_handle.get(setting.node.handle)
            if entry is None or not entry.words or _words(setting) is not entry.words:
                return False
            rows = slice(entry.start, entry.start + len(entry.words))
            self._addresses[rows] = _values(setting, entry.words)
            self._reach[rows] = [setting.reach.get(word.offset, -1) for word in entry.words]
        return True

    def plain(
        self, moves: Sequence[Move], find: Callable[[int], MemoryRange | None]
    ) -> PlainMove | None:
        """What a rebinding changes, or None if it is not plain."""
        addresses, reach = self._addresses, self._reach
        known = reach >= 0
        new = addresses.copy()
        which = np.full(len(addresses), -1, np.intp)
        for number, move in enumerate(moves):
            start, end = move.old.address, move.old.end
            ahead = addresses < np.uint64(start)
            before = known & ahead & (addresses + reach.astype(np.uint64) > np.uint64(start))
            if before.any():
                return None
            hit = np.flatnonzero(~ahead & (addresses < np.uint64(end)))
            if not hit.size:
                continue
            sorts = self._sorts[hit]
            if (sorts > _SORTS[Sort.UNKNOWN]).any():
                return None
            held = KnownRanges(find)
            unknown = addresses[hit[sorts == _SORTS[Sort.UNKNOWN]]]
            if any(held(int(address)) is None for address in unknown):
                return None
            offsets = addresses[hit] - np.uint64(start)
            used = np.where(known[hit], reach[hit], move.old.nbytes - offsets.astype(np.int64))
            if (offsets.astype(np.int64) + used > move.new.nbytes).any():
                return None
            new[hit] = offsets + np.uint64(move.new.address)
            which[hit] = number
        rows = np.flatnonzero(which >= 0)
        owners, counts = np.unique(self._owners[rows], return_counts=True)
        targets = [moves[number].target for number in which[rows].tolist()]
        chosen = new[rows]
        entries = [self._entries[owner] for owner in owners.tolist()]
        outermost = {(entry.outer[0] if entry.outer else entry.node).index for entry in entries}
        report = RebindReport(_Later(self, rows, addresses[rows], chosen), nodes=len(outermost))
        return PlainMove(
            [entry.node for entry in entries],
            counts.astype(np.uint32),
            self._places[rows],
            chosen,
            targets,
            rows,
            report,
        )

    def moved(self, move: PlainMove) -> None:
        """Notes that a rebinding was made."""
        self._addresses[move.rows] = move.values

    def word(self, row: int, old: int, new: int) -> ReboundWord:
        """One row as a record of the report."""
        entry = self._entries[int(self._owners[row])]
        word = entry.words[row - entry.start]
        by = "signature" if word.sort is Sort.POINTER else "allocation"
        return ReboundWord(*named(entry.outer, entry.node), word.label, old, new, by)


class _Later:
    """The words of a report, made when they are asked for."""

    def __init__(
        self,
        index: PointerIndex,
        rows: npt.NDArray[np.intp],
        old: npt.NDArray[np.uint64],
        new: npt.NDArray[np.uint64],
    ) -> None:
        self._index, self._rows, self._old, self._new = index, rows, old, new

    def __call__(self) -> tuple[ReboundWord, ...]:
        triples: Any = zip(self._rows.tolist(), self._old.tolist(), self._new.tolist(), strict=True)
        return tuple(self._index.word(row, old, new) for row, old, new in triples)


_SORTS = {Sort.POINTER: 0, Sort.UNKNOWN: 1, Sort.SCALAR: 2}
_FIELD = 3
"""An address of a node that is no kernel."""


def _words(setting: Setting) -> tuple[Word, ...]:
    params = setting.params
    if not isinstance(params, KernelNodeParams):
        return ()
    arguments = params.arguments
    return words_of(setting.signature, arguments.layout, len(arguments.data))


def _values(setting: Setting, words: tuple[Word, ...]) -> list[int]:
    params = setting.params
    assert isinstance(params, KernelNodeParams)
    data = params.arguments.data
    all_words = struct.unpack_from(f"<{len(data) // _WORD}Q", data)
    return [all_words[word.offset // _WORD] for word in words]
