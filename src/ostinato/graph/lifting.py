"""Lift: turns work that a library put into a capture into operations of this library.

A library (cuBLASLt, say) takes a stream and decides by itself what it launches.  A capture shows
what it launched: functions, shapes, argument bytes.  As operations it runs eagerly, in
captures, in recordings and in the bodies of loops, like any launch of ours, and the library is not
called again.  It is the same work by construction: a replay of the captured graph would run nothing
else.

Not guaranteed: other effects of the library on the host.  It must keep its kernels loaded, so it
must stay loaded itself, and memory that it named in their arguments must stay allocated to it.
"""

from __future__ import annotations

from collections.abc import Sequence

from ostinato.driver.api import KernelNodeParams, MemoryRange, MemsetNodeParams, NodeHandle
from ostinato.driver.stream import Operation
from ostinato.errors import GraphError
from ostinato.graph.graph import Graph


def lift(
    graph: Graph,
    *,
    name: str,
    reads: Sequence[MemoryRange] | None = None,
    writes: Sequence[MemoryRange] | None = None,
    keep: Sequence[object] = (),
) -> tuple[Operation, ...]:
    """The operations of a captured graph, in order; the graph is not needed afterwards.

    `reads` and `writes`: of all of them together; None if it is not known.  Each keeps alive what
    the graph does, and `keep`: what else must live as long as it can run.  Launches have what
    `LaunchConfig` has; hints without a field there (`KernelNodeParams.extra_attributes`) are not
    taken over.
    Raises GraphError if the nodes are no chain, or one is neither a kernel nor a linear fill.
    """
    graph.require_launchable(as_part=True)
    touched = None if reads is None else tuple(reads), None if writes is None else tuple(writes)
    chain, nodes = _chain(graph, name), {node.handle: node for node in graph.nodes()}
    made = []
    for node in map(nodes.__getitem__, chain):
        params = node.params
        if isinstance(params, KernelNodeParams):
            params = KernelNodeParams(params.function, params.config, params.arguments)
        elif not (isinstance(params, MemsetNodeParams) and params.height == 1):
            raise GraphError(
                f"{name}: a {node.kind.name.lower()} node is neither a kernel nor a "
                "linear fill, so it cannot be launched by itself; add the graph as a child graph"
            )
        made.append(Operation(params, name, *touched, (*keep, *graph.kept)))
    return tuple(made)


def _chain(graph: Graph, name: str) -> list[NodeHandle]:
    """The nodes, each after the one before.  Raises GraphError if they are no chain."""
    nodes, edges = graph.context.driver.graph_nodes(graph.handle), graph.edges()
    after = {edge.source: edge.target for edge in edges}
    first = set(nodes) - set(after.values())
    chain = [*first]
    while len(first) == 1 and chain[-1] in after:
        chain.append(after[chain[-1]])
    if len(chain) != len(nodes) or len(edges) != len(nodes) - 1:
        raise GraphError(
            f"{name}: {len(nodes)} nodes with {len(edges)} edges are no chain, and only a chain "
            "can be launched in order; add the graph as a child graph"
        )
    return chain
