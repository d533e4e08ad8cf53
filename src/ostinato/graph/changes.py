"""What is changed in an executable, and what its nodes hold; refusals in words; argument bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from ostinato.driver.api import KernelArguments, NodeParams, UpdateVerdict, whole_number
from ostinato.driver.signature import Signature, Space, pack_by_size
from ostinato.errors import ContextPoisonedError, DriverError, InputError, UpdateRefusedError
from ostinato.graph.node import Node

__all__ = [
    "VERDICTS",
    "Change",
    "Place",
    "Setting",
    "argument_bytes",
    "argument_index",
    "is_whole",
    "refused",
    "whole_place",
]

Place: TypeAlias = int | str
"""Where a node holds an address: a byte offset in the parameter buffer, "dst" or "src"; or
`whole_place`."""

_WHOLE = "owner "


def whole_place(index: int) -> Place:
    """The place of the `index`-th object that a node was given as a whole, and no single word."""
    return f"{_WHOLE}{index}"


def is_whole(place: Place) -> bool:
    """Whether a place is one of `whole_place`."""
    return isinstance(place, str) and place.startswith(_WHOLE)


@dataclass(frozen=True, slots=True)
class Change:
    """A node and the parameters that it is to have.

    `owners`: what its changed words point at now.  `reach`: how many bytes are known to be used
    from where a changed word points, None if it is not known; words that are not named keep theirs.
    `whole`: all words were replaced, with `signature` for a new function.
    """

    node: Node
    params: NodeParams
    owners: tuple[tuple[Place, object], ...] = ()
    reach: tuple[tuple[int, int | None], ...] = ()
    whole: bool = False
    signature: Signature | None = None


@dataclass(frozen=True, slots=True)
class Setting:
    """What one node holds, as the next launch will use it.

    `reach`: by the offset of a pointer word, how many bytes are known to be used from where it
    points.  `owners`: what the words that were set since point at, None where nothing is known of
    it; a `shadow.Live` node shares it.
    """

    node: Node
    """As it was in the definition."""
    params: NodeParams
    signature: Signature | None
    reach: Mapping[int, int]
    owners: dict[Place, object] = field(default_factory=dict)

    def shown(self) -> Node:
        """The node with what it holds now."""
        return replace(self.node, params=self.params, signature=self.signature)


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
    """The error to raise where the driver refused a change of a node."""
    if isinstance(error, ContextPoisonedError):
        return error
    return UpdateRefusedError(
        f"node {node.index} ({node.name}, {node.kind.name}) cannot be changed so: {error}",
        node_index=node.index,
    )


def argument_index(
    node: Node,
    signature: Signature | None,
    arguments: KernelArguments,
    argument: int | str,
) -> int:
    """The index of a kernel argument, also by name.  Raises InputError for a name that is not
    known, and an index that is out of bounds."""
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
    """The index of a kernel argument and the bytes that a value has there, on this device.

    Raises InputError for a name that is not known, and a value that does not fit.
    """
    index = argument_index(node, signature, arguments, argument)
    size = arguments.slot(index).size
    if signature is not None and signature.layout == arguments.layout:
        return index, Signature.pack_one(signature.parameters[index], value, space)
    return index, pack_by_size(size, value, index, space)
