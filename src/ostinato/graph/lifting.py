"""Lift: turns the work of another library in a capture into operations of this library.

A library (cuBLASLt, say) takes a stream and decides by itself what to launch.  A capture shows the
launches: functions, shapes, argument bytes.  As operations they run eagerly, in captures, in
recordings and in the bodies of loops, like launches of this library, and the other library is not
called again.  The work is the same by construction: a replay of the captured graph would run
nothing else.

Not guaranteed: other effects of the library on the host.  The library must keep its kernels loaded,
so it must stay loaded itself, and the memory in their arguments must stay allocated to it.
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
    """Returns the operations of a captured graph, in order; the graph is not needed afterwards.

    `reads` and `writes`: those of all operations together; None if unknown.  Each operation keeps
    alive the objects of the graph and of `keep`, which must live as long as it can run.  Launches
    have the attributes of `LaunchConfig`; hints without a field there
    (`KernelNodeParams.extra_attributes`) are dropped.
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
    """Returns the nodes in their order.  Raises GraphError if they are no chain."""
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
