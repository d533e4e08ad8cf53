"""Plans: the changes of an executable for a request, computed from the content of its nodes.

Pure: from the words of an executable (`words.WordIndex`) and targets to changes and a report, which
`shadow.Shadow` executes; and the reasons for which a change is refused, as text.

Rebinding.  A word counts as a pointer if a signature declares it; without a signature, if it is an
aligned 8-byte word and the driver confirms that its value is in a live allocation.  A word that a
signature declares as a scalar is never changed, even if it looks like an address.  A word moves
only if the bytes used behind it fit into the new range.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ostinato.driver.api import (
    KernelArguments,
    KernelNodeParams,
    LaunchAttributes,
    MemcpyNodeParams,
    MemoryRange,
    MemsetNodeParams,
    NodeHandle,
    NodeParams,
    UpdateVerdict,
    whole_number,
)
from ostinato.driver.signature import Signature, Space, held_by, pack_by_size
from ostinato.errors import (
    ClosedError,
    ContextPoisonedError,
    DriverError,
    InputError,
    UpdateRefusedError,
)
from ostinato.graph.node import Node
from ostinato.graph.words import (
    Find,
    IndexedNode,
    Setting,
    Sort,
    Word,
    WordIndex,
    WordPlace,
    as_word,
)
from ostinato.memory.ranges import KnownRanges, Target, range_of


@dataclass(frozen=True, slots=True)
class NodeChange:
    """A node and its new parameters.

    `owners`: the owners of the memory at which its changed words point.  `whole`: all words were
    replaced, with `signature` for a new function.  `ours`: the nodes of a child graph that this
    library made.
    """

    node: Node
    params: NodeParams
    owners: tuple[tuple[WordPlace, object], ...] = ()
    whole: bool = False
    signature: Signature | None = None
    ours: Container[NodeHandle] | None = None


@dataclass(frozen=True, slots=True)
class ReboundWord:
    """One word that was changed.

    `node_index` is the index of the graph's own node; for a node inside a child graph or a body,
    that of the outermost node around it, and `node_name` is the path inwards.  `place` is text:
    "argument 2 (x)", "argument 0 +16", "dst", "src".  `confirmed_by` is "signature", "allocation"
    or "field".
    """

    node_index: int
    node_name: str
    place: str
    old: int
    new: int
    confirmed_by: str


@dataclass(frozen=True, slots=True)
class LeftWord:
    """A word that looks like an address in the old range and was left, with the reason."""

    node_index: int
    node_name: str
    place: str
    value: int
    why: str


class RebindReport:
    """Every word that `rebind` changed (`words`), and every word that it left (`left`)."""

    __slots__ = ("_later", "_words", "left", "nodes")

    def __init__(
        self,
        words: Callable[[], tuple[ReboundWord, ...]],
        left: tuple[LeftWord, ...],
        *,
        nodes: int,
    ) -> None:
        """`words` is called at the first access to the property."""
        self._words: tuple[ReboundWord, ...] | None = None
        self._later: Callable[[], tuple[ReboundWord, ...]] | None = words
        self.left = left
        self.nodes = nodes
        """The number of the graph's own nodes that were changed, or that contain a changed node."""

    @property
    def words(self) -> tuple[ReboundWord, ...]:
        if self._words is None:
            assert self._later is not None
            self._words, self._later = self._later(), None
        return self._words

    def __repr__(self) -> str:
        return f"<RebindReport: {str(self).splitlines()[0]}>"

    def __str__(self) -> str:
        from ostinato.graph.show.outline import count_text

        pointers, nodes = count_text(len(self.words), "pointer"), count_text(self.nodes, "node")
        lines = [f"{pointers} of {nodes} rebound"]
        if self.left:
            lines[0] += f", {count_text(len(self.left), 'word')} left as they were:"
        for left in self.left:
            place = f"node {left.node_index} ({left.node_name}), {left.place}"
            lines.append(f"  {place}: {left.value:#x}: {left.why}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Move:
    """Moves pointers into `old` to `new`, memory of `target`.

    `holds`: the type of the new memory, if the old memory had none; each pointer must be of that
    type.
    """

    old: MemoryRange
    new: MemoryRange
    target: Target
    holds: np.dtype[Any] | None = None


@dataclass(frozen=True, slots=True)
class Rebinding:
    """A plan: the words of kernel arguments that move, the changes of other nodes, and the report.

    `entries`: the nodes of these words in the index; `counts`: the number of words of each.  For
    all words in a row: their places in the arguments, their new values, and the targets at which
    they then point.
    """

    index: WordIndex
    entries: list[int]
    counts: npt.NDArray[np.uint32]
    places: npt.NDArray[np.uint32]
    values: npt.NDArray[np.uint64]
    targets: list[object]
    changes: list[NodeChange]
    moved: tuple[npt.NDArray[np.intp], npt.NDArray[np.uint64]]
    """The rows of all words in the index, fields too, and their new values."""
    report: RebindReport


def plan_rebind(
    index: WordIndex,
    moves: Sequence[Move],
    find: Find,
    setting_of: Callable[[IndexedNode], Setting],
) -> Rebinding:
    """Plans a rebinding.  `find` confirms words without a signature as pointers.

    Raises InputError for ranges that do not fit, and for copies that would overlap.
    """
    addresses, reach, known = index.addresses, index.reach, KnownRanges(find)
    new, used = addresses.copy(), reach.copy()
    which = np.full(len(addresses), -1, np.intp)
    # Checked one by one: words that may be no pointer, point before a range, or may not fit.
    odd = np.zeros(len(addresses), np.bool_)
    for number, move in enumerate(moves):
        start = as_word(move.old.address)
        ahead = addresses < start
        odd |= ahead & (reach > 0) & (addresses + reach.astype(np.uint64) > start)
        hit = np.flatnonzero(~ahead & (addresses < as_word(move.old.end)))
        if not hit.size:
            continue
        offsets = (addresses[hit] - start).astype(np.int64)
        used[hit] = np.where(reach[hit] < 0, move.old.nbytes - offsets, reach[hit])
        new[hit], which[hit] = offsets.astype(np.uint64) + np.uint64(move.new.address), number
        odd[hit] = (offsets + used[hit] > move.new.nbytes) | (index.sorts[hit] > Sort.UNKNOWN)
        if move.holds is not None:
            odd[hit] |= index.other_type(hit, move.holds)
        loose = hit[index.sorts[hit] == Sort.UNKNOWN]
        if loose.size:
            missing = [known(address) is None for address in addresses[loose].tolist()]
            odd[loose] |= np.array(missing, np.bool_)
    left: list[LeftWord] = []
    for row in np.flatnonzero(odd).tolist():
        entry, word = index.at(row)
        address, to = int(addresses[row]), None if which[row] < 0 else moves[which[row]]
        why = _why_left(entry, word, to, setting_of, known(address) is not None)
        if why:
            which[row] = -1
            left.append(LeftWord(*entry.named, word.label, address, why))
        elif to is not None:
            _require_fitting(entry, word, to, address, int(used[row]))
    rows = np.flatnonzero(which >= 0)
    fields: dict[int, dict[str, tuple[int, object]]] = {}
    for row in rows[index.sorts[rows] == Sort.FIELD].tolist():
        place, target = index.at(row)[1].place, moves[which[row]].target
        fields.setdefault(int(index.owners[row]), {})[place] = int(new[row]), target
    words = rows[index.sorts[rows] != Sort.FIELD] if fields else rows
    entries, counts = np.unique(index.owners[words], return_counts=True)
    later = partial(_rebound, index, rows, addresses[rows], new[rows])
    return Rebinding(
        index,
        entries.tolist(),
        counts.astype(np.uint32),
        index.places[words],
        new[words],
        [moves[number].target for number in which[words].tolist()],
        [_change(index.node(entry), field, setting_of) for entry, field in fields.items()],
        (rows, new[rows]),
        RebindReport(later, tuple(left), nodes=index.count_outermost(index.owners[rows])),
    )


def _why_left(
    entry: IndexedNode,
    word: Word,
    move: Move | None,
    setting_of: Callable[[IndexedNode], Setting],
    confirmed: bool,
) -> str:
    """Returns why a word in an old range, or reaching into one, stays; empty if it moves."""
    fixed = False
    if word.sort is Sort.FIELD:
        params = setting_of(entry).params
        copies = isinstance(params, MemcpyNodeParams) and not params.opaque
        fixed = not copies and not isinstance(params, MemsetNodeParams)
    if move is None:
        return "" if fixed else "it points in front of the old range and reaches into it"
    if fixed:
        return f"a {entry.nodes.frozen.kind(entry.index).name} node cannot be rebound"
    if word.sort is Sort.SCALAR:
        return "its signature says that it is a number, not a pointer"
    if word.sort is Sort.UNKNOWN and not confirmed:
        return "no live allocation holds it, so nothing confirms that it is a pointer"
    return ""


def _require_fitting(entry: IndexedNode, word: Word, move: Move, address: int, nbytes: int) -> None:
    """Raises InputError if the memory used there exceeds the new range or has another type."""
    node, name = entry.named
    where, offset = f"node {node} ({name}) {word.label}", address - move.old.address
    if move.holds is not None and word.holds is not None and move.holds != word.holds:
        raise InputError(
            f"{where} points at {word.holds.name}, and the new target holds {move.holds.name}; "
            "nothing was changed. Give memory of that type, or bytes of no type "
            '(buffer.view(dtype="bytes"))'
        )
    if offset + nbytes > move.new.nbytes:
        raise InputError(
            f"{where} points {offset} bytes into the old range and uses up to {nbytes} bytes from "
            f"there, but the new range has only {move.new.nbytes} bytes; nothing was changed. Give "
            "a range that is as large, or patch the argument and what says how much of it is used"
        )


def _change(
    entry: IndexedNode,
    fields: dict[str, tuple[int, object]],
    setting_of: Callable[[IndexedNode], Setting],
) -> NodeChange:
    """Returns the change of a copy or a fill.  Raises InputError if a copy of one row would overlap
    itself: a GPU copies in any order.  Between the rows of a copy with a pitch there may be room
    for the rows of the other side."""
    addresses: dict[str, Any] = {place: address for place, (address, _) in fields.items()}
    setting = setting_of(entry)
    params = replace(setting.params, **addresses)
    if (
        isinstance(params, MemcpyNodeParams)
        and params.height * params.depth == 1
        and 0 < abs(params.dst - params.src) < params.width
    ):
        node, name = entry.named
        raise InputError(
            f"node {node} ({name}) would copy {params.width} bytes at {params.src:#x} to "
            f"{params.dst:#x}, and they overlap; nothing was changed. Give new ranges that do not "
            "overlap"
        )
    owners = tuple((place, target) for place, (_, target) in fields.items())
    return NodeChange(setting.node, params, owners)


_CONFIRMED = {Sort.POINTER: "signature", Sort.UNKNOWN: "allocation", Sort.FIELD: "field"}


def _rebound(
    index: WordIndex,
    rows: npt.NDArray[np.intp],
    before: npt.NDArray[np.uint64],
    after: npt.NDArray[np.uint64],
) -> tuple[ReboundWord, ...]:
    """Returns the words of a report."""
    made = []
    for row, old, new in zip(rows.tolist(), before.tolist(), after.tolist(), strict=True):
        entry, word = index.at(row)
        made.append(ReboundWord(*entry.named, word.label, old, new, _CONFIRMED[word.sort]))
    return tuple(made)


def moves_of(
    targets: Sequence[tuple[Target, Target]],
    owner_of: Callable[[int], object | None],
    space: Space,
) -> list[Move]:
    """Returns the moves between the targets' ranges, in the order of the old addresses.

    `owner_of` returns the owner of the memory at an address, which a MemoryRange does not have.
    Raises InputError for a value that is no pair, for a new target that holds another type than the
    old one or is of another device, and for old ranges that overlap; ClosedError for a closed new
    target.
    """
    for pair in targets:  # a buffer of two rows would count as a pair of its rows
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise InputError(
                f"rebind: {{old: new}} or (old, new) pairs are needed, not {type(pair).__name__} "
                f"({pair!r})"
            )
    moves = []
    for old, new in targets:
        memory, to = range_of(old, "old target"), range_of(new, "new target")
        owner = owner_of(to.address) if isinstance(new, MemoryRange) else None
        target = new if owner is None else owner
        if getattr(target, "closed", False):
            raise ClosedError("a new target is closed; nothing was changed")
        space.require(new, "the new target", "the executable is of")
        was, holds = held_by(old), held_by(new)
        if was is not None and holds is not None and was != holds:
            raise InputError(
                f"rebind: the old target holds {was.name} and the new one {holds.name}, which "
                "kernels would read as other values; nothing was changed. Give memory of that "
                f'type, or say that its bytes are meant (buffer.view(dtype="{was.name}"))'
            )
        moves.append(Move(memory, to, target, holds if was is None else None))
    ordered = sorted(moves, key=lambda m: m.old.address)
    for left, right in itertools.pairwise(ordered):
        if left.old.end > right.old.address:
            raise InputError("two of the ranges to rebind from overlap; rebind one at a time")
    return ordered


VERDICTS = {
    UpdateVerdict.ERROR: "the driver failed for a reason it does not give",
    UpdateVerdict.TOPOLOGY_CHANGED: "the nodes or the edges are not the same",
    UpdateVerdict.NODE_TYPE_CHANGED: "a node is of another kind",
    UpdateVerdict.FUNCTION_CHANGED: "a kernel node has another function",
    UpdateVerdict.PARAMETERS_CHANGED: "a parameter changed that an update cannot change",
    UpdateVerdict.NOT_SUPPORTED: "a node holds something that updates do not support",
    UpdateVerdict.UNSUPPORTED_FUNCTION_CHANGE: "a kernel's function changed in an unsupported way",
    UpdateVerdict.ATTRIBUTES_CHANGED: "a kernel's launch attributes changed",
}


def refused(node: Node, error: DriverError) -> Exception:
    """Returns the error to raise when the driver refused a change of a node."""
    if isinstance(error, ContextPoisonedError):
        return error
    return UpdateRefusedError(
        f"node {node.index} ({node.name}, {node.kind.name}) cannot be changed so: {error}",
        node_index=node.index,
    )


def keeps(where: str, old: LaunchAttributes, new: LaunchAttributes, index: int) -> Exception:
    """Returns the error to raise if a node would keep its launch attributes instead of new ones.

    `index`: that of the node of the graph itself.
    """
    pairs = [
        (_cluster(old), _cluster(new)),
        (f"cooperative {old.cooperative}", f"cooperative {new.cooperative}"),
        (f"priority {old.priority}", f"priority {new.priority}"),
        (_rest(old, new), _rest(new, old)),
    ]
    differ = [pair for pair in pairs if pair[0] != pair[1]]
    if differ:
        has, asked = (", ".join(words) for words in zip(*differ, strict=True))
        why = (
            f"it has {has}; {asked} cannot be set: an executable keeps the launch attributes that "
            "it was made with, and the driver does not say so"
        )
    else:
        why = (
            "another kernel is asked for. On this device a kernel of another library may have a "
            "preferred cluster size, which the driver does not tell, and which an executable "
            "keeps; so only the same kernel is known to be right"
        )
    return UpdateRefusedError(f"{where}: {why}. Instantiate again.", node_index=index)


def require_kept(
    node: Node, old: KernelNodeParams, new: KernelNodeParams, *, by_function: bool
) -> None:
    """Raises UpdateRefusedError if a kernel node would keep launch attributes that the new
    parameters do not have.  `by_function`: it may have some that the driver does not report."""
    where = f"node {node.index} ({node.name})"
    has, asked = (
        replace(
            LaunchAttributes.of(params.config),
            others=params.extra_attributes,
            function=params.function if by_function else None,
        )
        for params in (old, new)
    )
    if has != asked:
        raise keeps(where, has, asked, node.index)
    programmatic = old.config.programmatic
    if programmatic != new.config.programmatic:
        raise UpdateRefusedError(
            f"{where}: programmatic={programmatic} cannot change in an executable, as the edges "
            "into the node say it; instantiate again",
            node_index=node.index,
        )


def _cluster(attributes: LaunchAttributes) -> str:
    size = attributes.cluster
    return "no cluster" if size is None else f"a cluster of {size[0]} × {size[1]} × {size[2]}"


def _rest(one: LaunchAttributes, other: LaunchAttributes) -> str:
    """Describes attributes without a field in `LaunchConfig` that the other does not have."""
    return ", ".join(word for word in one.others if word not in other.others) or "no such attribute"


def argument_index(
    node: Node,
    signature: Signature | None,
    arguments: KernelArguments,
    argument: int | str,
) -> int:
    """Returns the index of a kernel argument, also by name.  Raises InputError for an unknown name,
    and for an index out of bounds."""
    if isinstance(argument, str):
        if signature is None or signature.layout != arguments.layout:
            raise InputError(
                f"node {node.index} ({node.name}) has no signature, so its arguments have no "
                f"names; use an index below {len(arguments)}"
            )
        return signature.index(argument, f"node {node.index} ({node.name}): ")
    index = whole_number(argument)
    if index is None or not 0 <= index < len(arguments):
        raise InputError(
            f"node {node.index} ({node.name}): argument {argument!r}: a name, or an index below "
            f"{len(arguments)}, is needed"
        )
    return index


def argument_bytes(
    node: Node,
    signature: Signature | None,
    arguments: KernelArguments,
    argument: int | str,
    value: object,
    space: Space,
) -> tuple[int, bytes]:
    """Returns the index of a kernel argument and the bytes of a value for it, on this device.

    Raises InputError for an unknown name, and for a value that does not fit.
    """
    index = argument_index(node, signature, arguments, argument)
    size = arguments.slot(index).size
    if signature is not None and signature.layout == arguments.layout:
        return index, Signature.pack_one(signature.parameters[index], value, space)
    return index, pack_by_size(size, value, index, space)
