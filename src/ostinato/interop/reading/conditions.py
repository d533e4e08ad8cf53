"""Graphs of a chain as one graph, with the waits between them as conditions on the device.

Most waits are for one number (`bool(tensor)`, `.item()`).  The host need not see it before the next
graph runs, if the device compares it: a kernel reads the number after the first graph, writes it
into memory of the host, and sets the condition of an IF node, whose body is the next graph.  So the
next graph runs only if the number is that of the chain, bit for bit, and a replay of several waits
is one launch and one wait, for the last of the numbers.

An IF node takes microseconds.  A graph is in none if it is harmless: if it cannot fail, whatever
its memory holds, and writes nothing but memory of the chain's own, and no number that is read
before.  If it runs after another number, nobody sees what it has written; so it runs beside the
kernel that reads the number, and does not wait for it.

A capture makes a line of nodes, though most need not follow each other: a check of an argument and
the model read the same memory, a draw reads none.  Of a harmless graph it is known which memory
each operation uses (`UsedMemory`), so each comes after those alone whose memory it needs, also of
the graphs before.  What uses memory that is not known comes after all before it, and before all
after it.
"""

from __future__ import annotations

import itertools
import logging
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from ostinato import (
    Device,
    Graph,
    GraphExec,
    Kernel,
    LaunchConfig,
    Node,
    Source,
    Stream,
    host_kernel,
)
from ostinato.errors import ContextPoisonedError, OstinatoError, OutOfMemoryError

_log = logging.getLogger(__name__)
_NAME = "ostinato_condition"
_WORDS = struct.Struct("<2Q")
_ONE = LaunchConfig(grid=1, block=1)
_MOST_PIECES = 128
"""The most operations of a graph that are ordered one by one."""
_POLLS = 2000
"""The number of looks for the last number, some 100 us, before the host waits for the stream."""


@dataclass(frozen=True, slots=True, eq=False)
class Scalar:
    """A number in the device's memory that an operation reads for the host."""

    address: int
    content: bytes
    """The number when the chain was built, of at most 16 bytes."""
    seen: Callable[[bytes], Any]
    """Returns what the operation gives the host for other bytes."""
    compared: bool
    """True if the work after it runs for this number alone."""


Span: TypeAlias = tuple[int, int]
"""The addresses of a piece of memory: the first, and the one behind it."""


@dataclass(frozen=True, slots=True, eq=False)
class UsedMemory:
    """The memory that an operation uses."""

    reads: frozenset[Span] = frozenset()
    writes: frozenset[Span] = frozenset()

    def apart(self, other: UsedMemory) -> bool:
        """True if the two operations may run in any order, or at the same time."""
        pairs = itertools.chain(
            itertools.product(self.writes, other.reads | other.writes),
            itertools.product(self.reads, other.writes),
        )
        return not any(a < d and c < b for (a, b), (c, d) in pairs)


Works: TypeAlias = Sequence[tuple[int, UsedMemory | None]]
"""The operations of a graph whose nodes are in a line: for each the number of nodes up to its end,
and the memory that it uses, if that is known.  Empty if they are not known."""

_Part: TypeAlias = Graph | Scalar


def _read(how: Any, address: int, nbytes: int) -> bytes:
    return bytes(how.memory(address, nbytes))


@host_kernel(
    "source: u64, low: u64, high: u64, record: *u64, other: *u64, nbytes: u32, place: u32, "
    "compared: u32, first: u32, passed: u32, condition: cond",
    name=_NAME,
)
def _condition(
    how: Any,
    source: int,
    low: int,
    high: int,
    record: Any,
    other: Any,
    nbytes: int,
    place: int,
    compared: int,
    first: int,
    passed: int,
    condition: int,
) -> None:
    if not first and other[0]:
        return
    found = _WORDS.unpack(_read(how, source, nbytes).ljust(_WORDS.size, b"\0"))
    same = not compared or found == (low, high)
    if first or not same:
        other[0] = not same
    if same and condition:
        how.set_conditional(condition, 1)
    record[place : place + 2] = found
    if passed or not same:
        record[0] = passed if same else place


def source() -> Source:
    """Returns the kernel's source."""
    text = Path(__file__).with_suffix(".cu").read_text(encoding="utf-8")
    return Source(text, host=[_condition], name="conditions.cu")


class Record:
    """The numbers of one executable, in memory of the host."""

    def __init__(self, device: Device, scalars: Sequence[Scalar]) -> None:
        self._scalars = scalars
        self.memory = device.pinned(1 + 2 * len(scalars), "u64", name="numbers for the host")
        self._words = memoryview(self.memory.array.data)
        self._stream: Stream | None = None
        """The stream of the replay under way."""

    def __len__(self) -> int:
        return len(self._scalars)

    def begin(self, stream: Stream) -> None:
        """Must be called before each launch, with its stream."""
        if self._stream is not None:  # an error or an interrupt came before the last `wait`
            self._stream.synchronize()
        self._words[0], self._stream = 0, stream

    def wait(self) -> int | None:
        """Waits until all numbers are there, or one that is another than in the chain; returns the
        index of that one, or None.  Raises the errors of `Stream.synchronize`."""
        words, stream = self._words, self._stream
        assert stream is not None, "begin() was not called"
        for _ in range(_POLLS):
            if words[0]:
                break
        else:
            stream.synchronize()
        self._stream, index = None, words[0] // 2
        return None if index > len(self) else index

    def seen(self, index: int) -> Any:
        """Returns what the operation of a number gives the host in this replay."""
        scalar = self._scalars[index]
        content = _WORDS.pack(*self._words[_place(index) : _place(index) + 2])
        return scalar.seen(content[: len(scalar.content)])


def _place(index: int) -> int:
    """Returns the place of a number in a record: an odd one."""
    return 2 * index + 1


def join(
    device: Device, parts: Sequence[_Part], harmless: Mapping[Graph, Works]
) -> tuple[GraphExec, Record] | None:
    """Makes one graph of several, which runs them one after the other, each only if the numbers
    before it are those of the chain, or if it is `harmless`.  Returns its executable with the
    record of the numbers; None if it cannot be made.  The graphs stay as they are."""
    if not device.driver.capabilities.conditional_nodes:
        return None
    try:
        kernel = device.modules.get_or_compile(source(), _NAME)
        record = Record(device, [part for part in parts if isinstance(part, Scalar)])
        return _joined(device, kernel, record, parts, harmless).instantiate(), record
    except (ContextPoisonedError, OutOfMemoryError):
        raise
    except OstinatoError as error:
        _log.info("graphs of a chain stay apart: %s", error)
        return None


class _Order:
    """The nodes that a graph has so far, to add others after those whose memory they need."""

    def __init__(self) -> None:
        self._nodes: list[tuple[Node, UsedMemory | None, int]] = []
        """Each with its memory, and a bit for each node that it comes after."""

    def after(self, uses: UsedMemory | None) -> tuple[list[Node], int]:
        """Returns the nodes that such an operation must come after, without those before them, and
        a bit for each that it then comes after."""
        found, known = [], 0
        for index in reversed(range(len(self._nodes))):
            node, other, before = self._nodes[index]
            free = known >> index & 1
            if not free and (uses is None or other is None or not uses.apart(other)):
                found.append(node)
                known |= before | 1 << index
        return found, known

    def note(self, node: Node, uses: UsedMemory | None, known: int) -> None:
        """Notes a node that comes after those of `after`."""
        self._nodes.append((node, uses, known))


def _joined(
    device: Device,
    kernel: Kernel,
    record: Record,
    parts: Sequence[_Part],
    harmless: Mapping[Graph, Works],
) -> Graph:
    rest: list[Scalar | _Piece] = []
    for part in parts:
        rest += [part] if isinstance(part, Scalar) else _pieces(device, part, harmless.get(part))
    order = _Order()
    begin = rest[0]
    if isinstance(begin, _Piece):
        root = _copy(device, begin.graph)
        for end in _ends(root):
            order.note(end, None, 0)
        del rest[0]
    else:
        root = Graph.create(device)
    other = device.zeros(1, "u64", name="another number")
    # `told`: the last kernel that reads a number, if nothing waits for it yet.
    here, told, conditional = root, list[Node](), None
    index, first, compared = 0, True, False
    while rest:
        piece = rest.pop(0)
        if isinstance(piece, _Piece):
            before, known = order.after(piece.uses)
            if piece.harmful:
                before, told = [*before, *told], []
            order.note(_add_child(here, piece.graph, before), piece.uses, known)
            continue
        compared |= piece.compared
        follows = itertools.takewhile(lambda each: isinstance(each, _Piece), rest)
        harmed = any(isinstance(each, _Piece) and each.harmful for each in follows)
        condition = root.condition() if compared and harmed else None
        low, high = _WORDS.unpack(piece.content.ljust(_WORDS.size, b"\0"))
        place, index = _place(index), index + 1
        passed = 0 if index < len(record) else _place(index) + 1
        numbers = len(piece.content), place, piece.compared, first, passed, condition or 0
        arguments = piece.address, low, high, record.memory, other, *map(int, numbers)
        number = UsedMemory(frozenset([(piece.address, piece.address + len(piece.content))]))
        before = [*told, *order.after(number)[0]]
        told = [here.add_kernel(kernel, _ONE, *arguments, after=before)]
        first = False
        if condition is not None:
            after = [*told, *order.after(None)[0]] if conditional is None else [conditional.node]
            conditional = root.add_conditional("if", condition, after=after)
            here, order, told, first, compared = conditional.bodies[0], _Order(), [], True, False
    hooks = [p.before_launch for p in parts if isinstance(p, Graph) and p.before_launch is not None]

    def before_launch(stream: Stream) -> None:
        for hook in hooks:
            hook(stream)

    root.before_launch = before_launch if hooks else None
    return root


def in_line(graph: Graph) -> list[Node] | None:
    """Returns the nodes of a graph from first to last; None if they are not in a line."""
    nodes = {node.handle: node for node in graph.nodes()}
    follows = {edge.source: edge.target for edge in graph.edges()}
    firsts = {*nodes} - {*follows.values()}
    found = []
    at = firsts.pop() if len(firsts) == 1 else None
    while at is not None:
        found.append(nodes[at])
        at = follows.get(at)
    return found if len(found) == len(nodes) == len(graph.edges()) + 1 else None


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """A graph, or a part of one."""

    graph: Graph
    uses: UsedMemory | None
    harmful: bool


def _pieces(device: Device, graph: Graph, works: Works | None) -> list[_Piece]:
    """Returns the operations of a harmless graph, or the graph itself."""
    nodes = in_line(graph) if works and len(works) <= _MOST_PIECES else None
    if not works or nodes is None or len(nodes) != works[-1][0]:
        return [_Piece(graph, None, works is None)]
    starts = [0, *[end for end, _ in works]]
    return [
        _Piece(_copy(device, graph, nodes[start:end]), uses, harmful=False)
        for start, (end, uses) in zip(starts, works, strict=False)
    ]


def _copy(device: Device, graph: Graph, nodes: Sequence[Node] | None = None) -> Graph:
    """Returns a copy of a graph, or of some of its nodes.  It is adopted, since it is not known
    what the nodes of libraries point at."""
    copy, driver = graph.clone(), graph.context.driver
    if nodes is not None:
        kept = {driver.node_in_clone(node.handle, copy.handle) for node in nodes}
        for handle in driver.graph_nodes(copy.handle):
            if handle not in kept:
                driver.graph_remove_node(handle)
                copy.labels.pop(handle, None)
    adopted = Graph.adopt(device, int(copy.handle), owner=None)
    adopted.labels.update(copy.labels)
    adopted.keep += [copy, *graph.kept]
    return adopted


def _ends(graph: Graph) -> list[Node]:
    """Returns the nodes after which none comes."""
    followed = {edge.source for edge in graph.edges()}
    return [node for node in graph.nodes() if node.handle not in followed]


def _add_child(here: Graph, graph: Graph, after: Sequence[Node]) -> Node:
    """Adds a graph as one node; what is done before its launches is done before the whole's."""
    hook, graph.before_launch = graph.before_launch, None
    try:
        return here.add_child(graph, after=after)
    finally:
        graph.before_launch = hook
