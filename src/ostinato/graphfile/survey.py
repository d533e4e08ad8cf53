"""Finds the words of a graph that are addresses and the memory that they reach, for saving.

A word is an address if its signature declares one; if it moved together with its memory between two
captures of the same work (`Twin`); or, without either, if it lies in a live allocation.  Other
words that differ between the two captures cannot be saved, because their values are unknown to
another process, unless they have no effect: structs passed by value have gaps and unused fields
that are never written.  Bytes that may have no effect are `Loose`; the check tests them.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ostinato.driver.api import (
    AllocNodeParams,
    BatchMemOpNodeParams,
    ConditionalNodeParams,
    Edge,
    EventRecordNodeParams,
    EventWaitNodeParams,
    FunctionHandle,
    GraphHandle,
    HostNodeParams,
    KernelNodeParams,
    MemcpyNodeParams,
    MemoryRange,
    MemsetNodeParams,
    NodeParams,
    OpaqueNodeParams,
    ParameterSlot,
)
from ostinato.driver.signature import Access, Parameter
from ostinato.errors import GraphFileError
from ostinato.graph.frozen import graphs_inside
from ostinato.graph.graph import Graph
from ostinato.graph.node import Node, every_node, given_reach
from ostinato.graph.words import Sort, Word, words_of
from ostinato.graphfile.records import ConditionWord, fields_of, with_addresses
from ostinato.memory.ranges import KnownRanges, Target, range_of

_WORD = 8
_COLLECTIVES = ("ncclDevKernel", "ncclKernel", "nvshmem")


@dataclass(frozen=True, slots=True)
class Twin:
    """A second capture of the same work with its memory elsewhere, for `graphfile.save`.

        ost.graphfile.save(graph, path, inputs={"x": x}, outputs={"y": y},
                   twin=ost.graphfile.Twin(other, {"x": x2, "y": y2}))

    `memory`: the named buffers of the second capture; those left out are the same as in the first.
    """

    graph: Graph
    memory: Mapping[str, Target] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Address:
    """An address in a node.  `reach`: bytes used from there on, None if unknown."""

    place: int | str
    value: int
    reach: int | None
    proof: str
    access: Access
    label: str


@dataclass(frozen=True, slots=True)
class Loose:
    """Bytes of a kernel's arguments that differ between the captures and are not an address, or not
    an address of the same place.

    `other`: the second capture's bytes.  `why`: the error text if they have an effect.  `free`:
    True if the file shall declare them to have no effect; False if they stay an address.
    """

    offset: int
    other: bytes
    why: str
    free: bool = True


@dataclass(frozen=True, slots=True)
class Stray:
    """Bytes that a launch wrote before and behind a block."""

    before: int = 0
    behind: int = 0


@dataclass(frozen=True, slots=True)
class SurveyedNode:
    node: Node
    path: str
    """The node's description, as in "node 3 (add)"."""
    addresses: tuple[Address, ...]
    conditions: tuple[ConditionWord, ...]
    inner: tuple[SurveyedGraph, ...]
    loose: tuple[Loose, ...] = ()


@dataclass(frozen=True, slots=True)
class SurveyedGraph:
    nodes: tuple[SurveyedNode, ...]
    edges: tuple[Edge, ...]

    def walk(self) -> Iterable[SurveyedNode]:
        for node in self.nodes:
            yield node
            for inner in node.inner:
                yield from inner.walk()


@dataclass(frozen=True, slots=True)
class Survey:
    """A graph with its addresses.  `allocated`: the memory of alloc nodes, by node index."""

    graph: SurveyedGraph
    conditions: tuple[int, ...]
    """Handles of conditions, in the order of their nodes."""
    events: tuple[int, ...]
    functions: tuple[FunctionHandle, ...]
    allocated: dict[int, MemoryRange]


class _Side:
    """One of the two captures, with its memory and conditions."""

    def __init__(self, graph: Graph, named: Mapping[str, MemoryRange]) -> None:
        self.driver = graph.context.driver
        self.handle = graph.handle
        self.nodes = graph.nodes()
        self.named = named
        self.allocated = {
            node.index: MemoryRange(node.params.address, node.params.nbytes)
            for node in self.nodes
            if isinstance(node.params, AllocNodeParams)
        }
        self._find = KnownRanges(self.driver.memory_range)
        self.conditions: dict[int, int] = {}
        """Index of each condition, by handle."""
        for node in every_node(self.nodes):
            if isinstance(node.params, ConditionalNodeParams):
                self.conditions.setdefault(int(node.params.handle), len(self.conditions))

    def live(self, address: int) -> MemoryRange | None:
        """Returns the memory that holds an address: an alloc node's, or an allocation that is live
        now."""
        for memory in self.allocated.values():
            if memory.holds(address):
                return memory
        return self._find(address) if address else None

    def names_at(self, address: int) -> dict[str, int]:
        """Returns the named buffers that hold an address, with its offset in each."""
        return {
            name: address - memory.address
            for name, memory in self.named.items()
            if memory.holds(address)
        }


def survey(graph: Graph, named: Mapping[str, MemoryRange], twin: Twin | None) -> Survey:
    """Finds all addresses of a graph.  Raises GraphFileError for what a file cannot hold."""
    first = _Side(graph, named)
    second = None
    if twin is not None:
        unknown = set(twin.memory) - set(named)
        if unknown:
            raise GraphFileError(
                f"the second capture names {', '.join(sorted(unknown))}, which is no input, output "
                "or constant; give it the same names"
            )
        elsewhere = {name: range_of(target, name) for name, target in twin.memory.items()}
        second = _Side(twin.graph, {**named, **elsewhere})
    return _Surveyor(first, second).survey()


class _Surveyor:
    def __init__(self, first: _Side, second: _Side | None) -> None:
        self._first = first
        self._second = second
        self._events: dict[int, None] = {}
        self._functions: dict[FunctionHandle, None] = {}

    def survey(self) -> Survey:
        first, second = self._first, self._second
        other = None if second is None else second.nodes
        handles = first.handle, None if second is None else second.handle
        graph = self._graph(first.nodes, other, *handles, "")
        return Survey(
            graph,
            tuple(first.conditions),
            tuple(self._events),
            tuple(self._functions),
            first.allocated,
        )

    def _graph(
        self,
        nodes: Sequence[Node],
        others: Sequence[Node] | None,
        handle: GraphHandle,
        other_handle: GraphHandle | None,
        outer: str,
    ) -> SurveyedGraph:
        edges = self._first.driver.graph_edges(handle)
        if others is not None and self._second is not None and other_handle is not None:
            where = outer or "the graph"
            if len(others) != len(nodes):
                raise _unlike(f"{where} has {len(nodes)} nodes, and {len(others)} in the other")
            theirs = self._second.driver.graph_edges(other_handle)
            if _places(edges, nodes) != _places(theirs, others):
                raise _unlike(f"{where} has other edges in the other")
        made = []
        for index, node in enumerate(nodes):
            other = None if others is None else others[index]
            made.append(self._node(node, other, f"{outer}node {node.index} ({node.name})"))
        return SurveyedGraph(tuple(made), edges)

    def _node(self, node: Node, other: Node | None, path: str) -> SurveyedNode:
        params = node.params
        if other is not None and (other.kind, other.name) != (node.kind, node.name):
            raise _unlike(f"{path} is {other.kind.name} {other.name} in the other")
        self._refuse(params, node, path)
        if isinstance(params, KernelNodeParams):
            self._functions.setdefault(params.function)
            addresses, conditions, loose = self._kernel(node, params, other, path)
            return SurveyedNode(node, path, addresses, conditions, (), loose)
        if isinstance(params, EventRecordNodeParams | EventWaitNodeParams):
            self._events.setdefault(int(params.event))
        handles = graphs_inside(params)
        theirs = () if other is None else graphs_inside(other.params)
        if other is not None and len(theirs) != len(handles):
            raise _unlike(f"{path} has {len(handles)} bodies, and {len(theirs)} in the other")
        inner = []
        for index, handle in enumerate(handles):
            inside, twin = (None, None) if other is None else (other.children[index], theirs[index])
            inner.append(self._graph(node.children[index], inside, handle, twin, f"{path} / "))
        return SurveyedNode(node, path, self._fields(node, other, path), (), tuple(inner))

    def _refuse(self, params: NodeParams, node: Node, path: str) -> None:
        """Raises GraphFileError for nodes that cannot be saved."""
        why = ""
        if isinstance(params, HostNodeParams):
            why = "calls a function of this process; leave it out, and call it after the launch"
        elif isinstance(params, OpaqueNodeParams):
            why = f"can only be shown: {params.why}"
        elif isinstance(params, MemcpyNodeParams) and params.opaque:
            why = "copies to or from a CUDA array, which a file does not have"
        elif isinstance(params, KernelNodeParams) and node.name.startswith(_COLLECTIVES):
            why = "is a collective, whose arguments belong to its communicator; capture it anew"
        if why:
            raise GraphFileError(f"{path} cannot be saved: it {why}")

    # --- kernels
    def _kernel(
        self, node: Node, params: KernelNodeParams, other: Node | None, path: str
    ) -> tuple[tuple[Address, ...], tuple[ConditionWord, ...], tuple[Loose, ...]]:
        arguments, signature = params.arguments, node.signature
        if signature is not None and signature.layout != arguments.layout:
            signature = None
        data = arguments.data
        theirs = None
        if other is not None:
            twin = other.kernel
            theirs = twin.arguments.data
            if twin.config != params.config:
                raise _unlike(f"{path} is launched as {twin.config} in the other")
            if (len(theirs), twin.arguments.layout) != (len(data), arguments.layout):
                raise _unlike(f"{path} has other arguments in the other")
        typed = (
            {}
            if signature is None
            else dict(zip((s.offset for s in arguments.layout), signature.parameters, strict=True))
        )
        reach = given_reach(data, node.keep)
        addresses: list[Address] = []
        conditions: list[ConditionWord] = []
        doubts: list[Loose] = []
        for word in words_of(signature, arguments.layout, len(data)):
            parameter = typed.get(word.offset)
            value = _word(data, word.offset)
            twin_value = None if theirs is None else _word(theirs, word.offset)
            condition = self._condition(word, value, twin_value, parameter, path)
            if condition is not None:
                conditions.append(ConditionWord(word.offset, condition))
                continue
            proof, doubt = self._proof(word, value, twin_value, path)
            if doubt and theirs is not None:
                if word.sort is Sort.POINTER:
                    raise GraphFileError(doubt)
                doubts.append(Loose(word.offset, theirs[word.offset :][:_WORD], doubt, False))
            if proof is not None:
                access = Access.READ | Access.WRITE if parameter is None else parameter.access
                known = reach.get(word.offset)
                addresses.append(Address(word.offset, value, known, proof, access, word.label))
        if theirs is not None:
            skip = {a.place for a in addresses} | {c.offset for c in conditions}
            skip |= {one.offset for one in doubts}
            doubts += _loose(data, theirs, skip, arguments.layout, typed, path)
        return tuple(addresses), tuple(conditions), tuple(doubts)

    def _condition(
        self, word: Word, value: int, twin: int | None, parameter: Any, path: str
    ) -> int | None:
        """Returns the index of the condition whose handle the word is, or None."""
        place = self._first.conditions.get(value)
        if parameter is not None:
            if parameter.type != "cond" or parameter.pointer:
                return None
            if place is None:
                raise GraphFileError(
                    f"{path}, {word.label}: the condition {value:#x} has no conditional node in "
                    "this graph; leave the launch out, or save the graph that has the node"
                )
            return place
        if place is None:
            return None
        if twin is not None and self._second is not None:
            return place if self._second.conditions.get(twin) == place else None
        if value < 1 << 16:
            raise GraphFileError(
                f"{path}, {word.label}: {value} may be the number of a condition or a number; "
                "give a second capture (twin=), or launch the kernel with a signature"
            )
        return place

    def _proof(self, word: Word, value: int, twin: int | None, path: str) -> tuple[str | None, str]:
        """Returns the proof that a word is an address, None if it is not, and an objection in
        words, empty if there is none.  A struct's gap may hold a stale address."""
        if word.sort is Sort.SCALAR:
            return None, ""  # `_loose` finds it if it differs
        if word.sort is Sort.POINTER:
            if not value and not twin:
                return None, ""
            # An empty tail slice points at the end of its buffer.
            ends = [memory.end for memory in self._first.named.values()]
            if not value or not (self._first.live(value) or value in ends):
                raise GraphFileError(
                    f"{path}, {word.label}: {value:#x} is in no live memory; keep what the graph "
                    "points at allocated until it is saved"
                )
        first = self._first.live(value)
        known = None if first is None else "allocation"
        if word.sort is Sort.POINTER:
            known = "signature"
        if twin is None or self._second is None:
            return known, ""
        if value == twin:
            return known, "" if known is None else self._moved_alone(word, value, path)
        second = self._second.live(twin)
        if first is not None and second is not None:
            doubt = self._elsewhere(word, value, twin, path)
            return "allocation" if doubt else "moved", doubt
        if word.sort is Sort.POINTER or (first is None and second is None):
            return known, ""  # if it is not an address, `_loose` finds it
        return known, (
            f"{path}, {word.label}: {value:#x} in one capture and {twin:#x} in the other, and "
            "only one of them is in live memory; keep the memory of both captures allocated "
            "until the graph is saved"
        )

    def _moved_alone(self, word: Word, value: int, path: str) -> str:
        """Returns an objection if both captures have this address, though its buffer was
        elsewhere."""
        assert self._second is not None
        for name in self._first.names_at(value):
            if self._second.named[name] != self._first.named[name]:
                return (
                    f"{path}, {word.label}: {value:#x} lies in {name!r} in both captures, though "
                    f"{name!r} was elsewhere in the second; is it captured with its own memory?"
                )
        return ""

    def _elsewhere(self, word: Word, value: int, twin: int, path: str) -> str:
        """Returns an objection if an address is at different places of named memory."""
        assert self._second is not None
        mine, theirs = self._first.names_at(value), self._second.names_at(twin)
        if mine.items().isdisjoint(theirs.items()) and (mine or theirs):
            return (
                f"{path}, {word.label}: it points {_into(mine)} in the first capture and "
                f"{_into(theirs)} in the second; name the same memory in both"
            )
        return ""

    # --- other nodes
    def _fields(self, node: Node, other: Node | None, path: str) -> tuple[Address, ...]:
        params = node.params
        theirs = {} if other is None else fields_of(other.params)
        if other is not None and _without_addresses(params) != _without_addresses(other.params):
            raise _unlike(f"{path} is {other.params} in the other")
        made = []
        for place, field_ in fields_of(params).items():
            value = field_.address
            word = Word(0, place, Sort.UNKNOWN)
            if self._first.live(value) is None:
                raise GraphFileError(
                    f"{path}, {place}: {value:#x} is in no live memory of the device; memory of "
                    "the process cannot be saved: copy from a named buffer"
                )
            if theirs:
                doubt = self._proof(word, value, theirs[place].address, path)[1]
                if doubt:
                    raise GraphFileError(doubt)
            access = Access.READ if place == "src" else Access.WRITE
            if isinstance(params, BatchMemOpNodeParams):
                access = Access.READ | Access.WRITE
            made.append(Address(place, value, field_.nbytes, "field", access, place))
        return tuple(made)


def _unlike(why: str) -> GraphFileError:
    return GraphFileError(
        f"the two captures are not of the same work: {why}; capture the same function twice"
    )


def _into(names: Mapping[str, int]) -> str:
    if not names:
        return "to memory without a name"
    return " and ".join(f"{offset} bytes into {name!r}" for name, offset in names.items())


def _word(data: bytes, offset: int) -> int:
    value: int = struct.unpack_from("<Q", data, offset)[0]
    return value


def _places(edges: Iterable[Edge], nodes: Sequence[Node]) -> set[tuple[int, int, object]]:
    index = {node.handle: i for i, node in enumerate(nodes)}
    return {(index[e.source], index[e.target], e.data) for e in edges}


def _without_addresses(params: NodeParams) -> object:
    match params:
        case MemcpyNodeParams() | MemsetNodeParams() | BatchMemOpNodeParams():
            return with_addresses(params, {})
        case AllocNodeParams():
            return params.nbytes
        case ConditionalNodeParams():
            return params.kind, params.size
        case _:
            return None


def _loose(
    data: bytes,
    theirs: bytes,
    addresses: set[Any],
    layout: Sequence[ParameterSlot],
    typed: Mapping[int, Parameter],
    path: str,
) -> Iterator[Loose]:
    """Yields the bytes that differ and belong to no address, joined within an aligned word.  Raises
    GraphFileError for bytes that a signature declares as used."""
    starts = [slot.offset for slot in layout]
    at = 0
    while at < len(data):
        word = at - at % _WORD
        if data[at] == theirs[at] or word in addresses:
            at += 1
            continue
        end = at + 1
        while end < min(word + _WORD, len(data)) and data[end] != theirs[end]:
            end += 1
        index = bisect_right(starts, at) - 1
        if not layout:
            where, start, size = f"packed arguments, offset {at}", at - at % 4, 4
        elif index < 0 or at >= layout[index].offset + layout[index].size:
            at += 1
            continue  # padding between two arguments: kernels never read it
        else:
            slot = layout[index]
            end = min(end, slot.offset + slot.size)
            name = f" ({typed[slot.offset].name})" if slot.offset in typed else ""
            start, size = slot.offset, min(slot.size, 8)
            if slot.size > _WORD:
                start, size = at - at % 4, 4
            where = f"argument {index}{name}, offset {at - slot.offset}"
        mine = int.from_bytes(data[start : start + size], "little")
        their = int.from_bytes(theirs[start : start + size], "little")
        why = (
            f"{path}, {where}: {mine:#x} in one capture and {their:#x} in the other, and it is no "
            "address: a seed, a counter or a handle; let both captures have the same, or let the "
            "kernel read it from a named buffer"
        )
        known = typed.get(layout[index].offset) if layout else None
        if known is not None and (known.type != "bytes" or known.pointer):
            raise GraphFileError(why)
        yield Loose(at, theirs[at:end], why)
        at = end
