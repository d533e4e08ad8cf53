"""The parts of changing an executable: refusals in words, argument bytes, what is kept alive."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ostinato.driver.api import (
    Edge,
    EdgeData,
    KernelArguments,
    NodeHandle,
    UpdateVerdict,
)
from ostinato.driver.signature import Signature, pack_by_size
from ostinato.errors import ContextPoisonedError, DriverError, InputError, UpdateRefusedError
from ostinato.graph.graph import Graph
from ostinato.graph.node import Node
from ostinato.graph.rebind import Change

__all__ = ["VERDICTS", "Keep", "argument_bytes", "links", "refused", "under_handles"]

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


def links(edges: Sequence[Edge], nodes: Sequence[Node]) -> set[tuple[int, int, EdgeData]]:
    """The edges by the places of their nodes."""
    place = {n.handle: i for i, n in enumerate(nodes)}
    return {(place[e.source], place[e.target], e.data) for e in edges}


class Keep:
    """What an executable keeps alive: its graphs, and what single words were set to point at."""

    def __init__(self, graph: Graph) -> None:
        self._graphs: list[object] = [graph]
        self._words: dict[NodeHandle, dict[int | str, object]] = {}

    def renew(self, change: Change) -> list[object]:
        """Keeps what the changed words point at now; gives back what they pointed at before."""
        words = self._words.setdefault(change.node.handle, {})
        old = [words[place] for place, _ in change.owners if place in words]
        words.update(change.owners)
        return old

    def replace(self, node: NodeHandle, owners: Iterable[object]) -> list[object]:
        """All of the node's new owners; gives back the old."""
        old = list(self._words.get(node, {}).values())
        self._words[node] = {f"owner {i}": owner for i, owner in enumerate(owners)}
        return old

    def replace_all(self, graph: Graph) -> list[object]:
        """Everything now comes from `graph`; the first one stays, for its nodes' handles."""
        old = [*self._graphs[1:], *(o for words in self._words.values() for o in words.values())]
        self._graphs[1:] = [graph]
        self._words.clear()
        return old

    def clear(self) -> None:
        self._graphs.clear()
        self._words.clear()


def under_handles(first: Sequence[Node], new: Sequence[Node]) -> tuple[Node, ...]:
    """The new nodes under the first ones' handles and places, also inside."""
    return tuple(
        replace(
            n,
            handle=old.handle,
            index=old.index,
            children=tuple(
                under_handles(a, b) for a, b in zip(old.children, n.children, strict=True)
            ),
        )
        for old, n in zip(first, new, strict=True)
    )


def refused(node: Node, error: DriverError) -> Exception:
    if isinstance(error, ContextPoisonedError):
        return error
    return UpdateRefusedError(
        f"node {node.index} ({node.name}, {node.kind.name}) cannot be changed so: {error}",
        node_index=node.index,
    )


def argument_bytes(
    node: Node, arguments: KernelArguments, argument: int | str, value: object
) -> tuple[int, bytes]:
    signature = node.signature
    typed = signature is not None and signature.layout == arguments.layout
    if isinstance(argument, str):
        if signature is None or not typed:
            raise InputError(
                f"node {node.index} ({node.name}) has no signature, so its arguments have no "
                f"names; use an index below {len(arguments)}"
            )
        argument = signature.index(argument)
    size = arguments.slot(argument).size
    if signature is not None and typed:
        return argument, Signature.pack_one(signature.parameters[argument], value)
    return argument, pack_by_size(size, value, argument)
