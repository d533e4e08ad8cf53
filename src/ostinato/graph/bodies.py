"""Bodies of conditional nodes: what they cannot hold, and loops that cannot end."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from ostinato.driver.api import (
    BODY_PARAMS,
    ChildGraphNodeParams,
    ConditionalKind,
    ConditionalNodeParams,
    Driver,
    FrozenGraph,
    GraphHandle,
    KernelNodeParams,
    NodeHandle,
    NodeKind,
    NodeParams,
    OpaqueNodeParams,
)
from ostinato.driver.location import caller_line
from ostinato.errors import DriverError, GraphError
from ostinato.graph.node import Node

__all__ = ["BODY_RULE", "check_loops", "graphs_inside", "wrongly_in_a_body"]

_shown: dict[str | tuple[str, type[Warning], int], int] = {}
"""The warnings shown so far, for the filters that show each place once."""
BODY_RULE = (
    "the body of a conditional node, and a child graph in one, can hold kernels, copies, fills, "
    "empty nodes, child graphs and conditional nodes only; put other nodes before or after the "
    "conditional node"
)


def wrongly_in_a_body(nodes: Iterable[Node], way: str = "", *, inside: bool = False) -> str:
    """The first node that no body can hold, with the nodes around it; empty without one.

    `inside`: the nodes themselves are in a body.
    """
    for node in nodes:
        here = f"{way}node {node.index} ({node.name})"
        if inside and not isinstance(node.params, (*BODY_PARAMS, OpaqueNodeParams)):
            return f"{here} of kind {node.kind.name}"
        conditional = node.kind is NodeKind.CONDITIONAL
        for number, graph in enumerate(node.children):
            inner = f"{here}, body {number}, " if conditional else f"{here}, "
            found = wrongly_in_a_body(graph, inner, inside=inside or conditional)
            if found:
                return found
    return ""


def graphs_inside(params: NodeParams) -> tuple[GraphHandle, ...]:
    """The child graph, or the bodies, that a node with these parameters has."""
    if isinstance(params, ChildGraphNodeParams):
        return (params.graph,)
    return params.bodies if isinstance(params, ConditionalNodeParams) else ()


@dataclass(frozen=True, slots=True)
class _Found:
    """A node of a frozen graph, or of one inside it."""

    node: NodeHandle
    params: NodeParams | None
    """None if they cannot be read."""
    way: str


def check_loops(
    driver: Driver, outer: FrozenGraph, inner: Mapping[GraphHandle, FrozenGraph]
) -> None:
    """Looks at the WHILE nodes of a graph and of the graphs inside it, which are in `inner`.

    Only kernels set a condition.  Raises GraphError for a body without a kernel: a launch whose
    condition is true would never end.  Warns (UserWarning) of a loop that may begin, and none of
    whose kernels has its condition among the arguments.
    """
    if not outer.holders:
        return
    everything = list(_nodes(outer, inner, ""))
    for found in everything:
        params = found.params
        if not isinstance(params, ConditionalNodeParams) or params.kind != ConditionalKind.WHILE:
            continue
        (body,) = params.bodies
        inside = list(_nodes(inner[body], inner, ""))
        if not any(one.params is None or _is_kernel(one) for one in inside):
            what = "nothing" if not inside else f"{len(inside)} nodes and no kernel"
            raise GraphError(
                f"the body of the WHILE at {found.way} holds {what}, so nothing sets its condition "
                "and a launch could never end: fill the body with a kernel that sets the condition "
                "(if a capture into the body broke, capture into it again)"
            )
        if any(_may_set(one, params) for one in inside):
            continue
        defaults = driver.condition_defaults(found.node)
        if (
            defaults is None
            or defaults.default
            or not defaults.reset_at_launch
            or any(_may_set(one, params) for one in everything)
        ):
            file, line = caller_line() or ("ostinato", 0)
            warnings.warn_explicit(
                f"the WHILE at {found.way} may never end: no kernel in its body has the condition "
                f"{params.handle:#x} among its arguments. Give it to a kernel that sets it, unless "
                "one reads it from memory",
                UserWarning,
                file,
                line,
                registry=_shown,
            )


def _nodes(
    frozen: FrozenGraph, inner: Mapping[GraphHandle, FrozenGraph], way: str
) -> Iterator[_Found]:
    """Every node, each followed by those of the graphs inside it."""
    for index, node in enumerate(frozen.nodes):
        try:
            params: NodeParams | None = frozen.params(index)
        except DriverError:
            params = None
        yield _Found(node, params, f"{way}node {index}")
        for handle in () if params is None else graphs_inside(params):
            yield from _nodes(inner[handle], inner, f"{way}node {index}, ")


def _is_kernel(found: _Found) -> bool:
    return isinstance(found.params, KernelNodeParams)


def _may_set(found: _Found, loop: ConditionalNodeParams) -> bool:
    """Whether a node is a kernel with the loop's condition in its arguments, or cannot be read."""
    params = found.params
    if isinstance(params, KernelNodeParams):
        return int(loop.handle).to_bytes(8, "little") in params.arguments.data
    return params is None
