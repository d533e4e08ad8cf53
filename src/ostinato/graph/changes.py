"""What is changed in an executable, and what its nodes hold; refusals in words; argument bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from ostinato.driver.api import (
    KernelArguments,
    KernelNodeParams,
    LaunchAttributes,
    NodeParams,
    UpdateVerdict,
    whole_number,
)
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
    "keeps",
    "refused",
    "require_kept",
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


def keeps(where: str, old: LaunchAttributes, new: LaunchAttributes, index: int) -> Exception:
    """The error to raise where a node would keep its launch attributes, and others are asked for.

    `index`: of the node of the graph itself.
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
    parameters do not have.  `by_function`: it may have some that the driver does not tell."""
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
    """Attributes that `LaunchConfig` has no field for, where they are not those of the other."""
    return ", ".join(word for word in one.others if word not in other.others) or "no such attribute"


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
