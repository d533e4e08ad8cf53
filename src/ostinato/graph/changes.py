"""The parts of changing an executable: refusals in words, and argument bytes."""

from __future__ import annotations

from ostinato.driver.api import KernelArguments, UpdateVerdict
from ostinato.driver.signature import Signature, pack_by_size
from ostinato.errors import ContextPoisonedError, DriverError, InputError, UpdateRefusedError
from ostinato.graph.node import Node

__all__ = ["VERDICTS", "argument_bytes", "refused"]

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


def argument_bytes(
    node: Node,
    signature: Signature | None,
    arguments: KernelArguments,
    argument: int | str,
    value: object,
) -> tuple[int, bytes]:
    """The index of a kernel argument and the bytes that a value has there.

    Raises InputError for a name that is not known, and a value that does not fit.
    """
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
