"""Outlines: a graph read once with its child graphs and bodies, and its parts as text.

`render`, `svg` and `diff` read outlines and never a graph.
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import TYPE_CHECKING, NamedTuple

from ostinato.driver.api import (
    AllocNodeParams,
    BatchMemOpNodeParams,
    ChildGraphNodeParams,
    ConditionalKind,
    ConditionalNodeParams,
    Dim3,
    Driver,
    EdgeData,
    EdgeType,
    EventRecordNodeParams,
    EventWaitNodeParams,
    FreeNodeParams,
    GraphHandle,
    HostNodeParams,
    KernelNodeParams,
    LaunchConfig,
    MemcpyNodeParams,
    MemOp,
    MemOpKind,
    MemsetNodeParams,
    NodeKind,
    NodeParams,
    OpaqueNodeParams,
)
from ostinato.graph.frozen import graphs_inside
from ostinato.graph.node import Argument, Node, given_part
from ostinato.graph.show.demangle import demangled
from ostinato.memory import Buffer

if TYPE_CHECKING:
    from ostinato.driver.context import Context


# ------------------------------------------------------------------------------ reading a graph


class OutlineEdge(NamedTuple):
    """A dependency between two nodes of one body, by index."""

    source: int
    target: int
    data: EdgeData

    @property
    def programmatic(self) -> bool:
        return self.data.type is EdgeType.PROGRAMMATIC


@dataclass(frozen=True, slots=True)
class Outline:
    """A graph, child graph or conditional body: its nodes, their edges, and the graphs inside them.

    `inner` has one entry a node: the outlines of its child graph or bodies, mostly none.
    `title` is the role of this in its node ("then", "body", "case 2", "child").
    """

    title: str
    nodes: tuple[Node, ...]
    edges: tuple[OutlineEdge, ...]
    inner: tuple[tuple[Outline, ...], ...]

    def walk(self) -> Iterator[Node]:
        """Yields every node, followed by the nodes inside it."""
        for node, bodies in zip(self.nodes, self.inner, strict=True):
            yield node
            for body in bodies:
                yield from body.walk()

    def walk_edges(self) -> Iterator[OutlineEdge]:
        """Yields every edge, those inside of nodes after the body's own."""
        yield from self.edges
        for body in itertools.chain.from_iterable(self.inner):
            yield from body.walk_edges()

    def after(self, index: int) -> tuple[OutlineEdge, ...]:
        """Returns the edges into one node; `edges` are in the order of their targets."""
        first = bisect_left(self.edges, index, key=lambda e: e.target)
        return self.edges[first : bisect_right(self.edges, index, first, key=lambda e: e.target)]

    def summary(self) -> str:
        """Returns "12 nodes (9 kernel, 3 memcpy), 11 edges", including those inside of nodes."""
        nodes = list(self.walk())
        kinds = Counter(kind_text(n.kind) for n in nodes)
        parts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        edges = sum(1 for _ in self.walk_edges())
        kinds_text = f" ({parts})" if parts else ""
        return f"{count_text(len(nodes), 'node')}{kinds_text}, {count_text(edges, 'edge')}"


def read_outline(
    context: Context, handle: GraphHandle, nodes: tuple[Node, ...], *, readable: bool
) -> Outline:
    """Returns the outline of a graph with these nodes; see `Graph.outline`."""
    return _outline(context.driver, handle, _shown(context, nodes) if readable else nodes, "")


def _shown(context: Context, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """Returns the nodes with readable names of kernels and addresses."""
    return tuple(
        replace(
            node,
            name=demangled(node.name) if node.kind is NodeKind.KERNEL else node.name,
            children=tuple(_shown(context, body) for body in node.children),
            places=named_places(context, node),
        )
        for node in nodes
    )


def named_places(context: Context, node: Node) -> dict[int, str]:
    """Returns a text for each address of a node that is in a named buffer."""
    found = [(p.address, p.allocation) for a in node.arguments for p in a.pointers]
    if isinstance(node.params, MemcpyNodeParams | MemsetNodeParams):
        ends = (node.params.dst, getattr(node.params, "src", 0))
        found += [(end, context.driver.memory_range(end)) for end in ends if end]
    places: dict[int, str] = {}
    for address, allocation in found:
        if allocation is None:
            continue
        owner = given_part(node, address) or context.owners.get(allocation.address)
        name = getattr(owner, "name", None)
        if name:
            memory = owner.range if isinstance(owner, Buffer) else allocation
            into = address - memory.address
            places[address] = f"{name}+{into}" if into else name
    return places


def _outline(driver: Driver, handle: GraphHandle, nodes: tuple[Node, ...], title: str) -> Outline:
    index = {node.handle: node.index for node in nodes}
    edges = [
        OutlineEdge(index[e.source], index[e.target], e.data) for e in driver.graph_edges(handle)
    ]
    # The driver's order of edges has no meaning, and differs between a graph and its clone.
    edges.sort(key=lambda e: (e.target, e.source, e.data.from_port, e.data.to_port, e.data.type))
    return Outline(title, nodes, tuple(edges), tuple(_inner(driver, node) for node in nodes))


def _inner(driver: Driver, node: Node) -> tuple[Outline, ...]:
    graphs = zip(graphs_inside(node.params), node.children, body_titles(node.params), strict=True)
    return tuple(_outline(driver, graph, nodes, title) for graph, nodes, title in graphs)


def body_titles(params: NodeParams) -> tuple[str, ...]:
    """Returns the names of the graphs inside a node."""
    if not isinstance(params, ConditionalNodeParams):
        return ("child",) if isinstance(params, ChildGraphNodeParams) else ()
    if params.kind is ConditionalKind.IF:
        return ("then", "else")[: params.size]
    if params.kind is ConditionalKind.WHILE:
        return ("body",) * params.size
    return tuple(f"case {i}" for i in range(params.size))


# ------------------------------------------------------------------------------ words for things


def count_text(number: int, what: str) -> str:
    """Returns "1 node", "2 nodes"."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def kind_text(kind: NodeKind) -> str:
    return kind.name.lower().replace("_", " ")


def shape_text(shape: Dim3) -> str:
    """Returns "8", "8×2", "8×2×4": without the ones at the end."""
    x, y, z = shape
    return "×".join(str(n) for n in ((x, y, z) if z > 1 else (x, y) if y > 1 else (x,)))


def launch_text(config: LaunchConfig) -> str:
    """Returns "grid 8×2, block 128, 64 bytes shared"."""
    shared = f", {config.shared} bytes shared" if config.shared else ""
    return f"grid {shape_text(config.grid)}, block {shape_text(config.block)}{shared}"


def bytes_text(nbytes: int) -> str:
    """Returns "640 B", "4 KiB", "1.5 MiB"."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if nbytes >= 1024**power:
            return f"{nbytes / 1024**power:.4g} {unit}"
    return f"{nbytes} B"


def printable(text: str) -> str:
    """Replaces characters that move a terminal's cursor or that XML cannot hold."""
    return "".join(c if c.isprintable() else "\ufffd" for c in text)


def shorten(text: str, width: int) -> str:
    """Cuts the middle of a text to `width` characters: names differ at both of their ends."""
    if len(text) <= width:
        return text
    head = (width - 1) * 2 // 3
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"


def line_text(location: str | None) -> str:
    """Returns "decode.py:41" for a location; "" for None."""
    match = re.match(r"(?P<file>.+?):(?P<line>\d+)(:|\Z)", location or "")
    return "" if match is None else f"{PurePath(match['file']).name}:{match['line']}"


def function_text(function: Callable[..., object]) -> str:
    """Returns a host function's name in Python."""
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def memop_text(op: MemOp) -> str:
    """Returns "0x7f00 ← 3", "wait 0x7f00 geq 3"."""
    if op.kind is MemOpKind.WRITE:
        return f"{op.address:#x} ← {op.value}"
    return f"wait {op.address:#x} {op.kind.name.lower().removeprefix('wait_')} {op.value}"


def arguments_text(
    arguments: Sequence[Argument], width: int | None = None, places: Mapping[int, str] | None = None
) -> str:
    """Returns "x=[0x7f00], n=4": as many as fit into `width`, and the number left out."""
    texts = [a.text(places or {}) for a in arguments]
    if width is None or len(", ".join(texts)) <= width:
        return ", ".join(texts)
    ends = itertools.accumulate(len(text) + 2 for text in texts)
    shown = list(itertools.takewhile(lambda end: end <= width - 12, ends))
    # The first is shown in any case.
    head = texts[: max(1, len(shown))]
    left = len(texts) - len(head)
    return shorten(", ".join(head), width) + (f", … {left} more" if left else "")


def details(node: Node, width: int | None = None) -> str:
    """Returns the details of a node besides its kind and name, in one line."""
    params = node.params
    match params:
        case KernelNodeParams():
            return arguments_text(node.arguments, width, node.places)
        case MemcpyNodeParams():
            ends = (node.places.get(end, f"{end:#x}") for end in (params.dst, params.src))
            return f"{' ← '.join(ends)}, {_extent(params)}"
        case MemsetNodeParams():
            to = node.places.get(params.dst, f"{params.dst:#x}")
            return f"{to} ← {params.value}, {_extent(params)}"
        case EventRecordNodeParams() | EventWaitNodeParams():
            return f"event {params.event:#x}"
        case AllocNodeParams():
            return f"{bytes_text(params.nbytes)} at {params.address:#x}"
        case FreeNodeParams():
            return f"{params.address:#x}"
        case BatchMemOpNodeParams():
            text = ", ".join(memop_text(op) for op in params.operations)
            return text if width is None else shorten(text, width)
        case ConditionalNodeParams():
            return f"condition {params.handle}"
        case OpaqueNodeParams():
            return params.why
        case HostNodeParams() if params.function is None:
            return f"{params.pointer:#x}({params.user_data:#x})"
        case _:
            return ""


def _extent(params: MemcpyNodeParams | MemsetNodeParams) -> str:
    """Returns "4 KiB", "128 × 16 B", "1024 × 4 B" (elements of a fill)."""
    if isinstance(params, MemsetNodeParams):
        rows = f"{params.height} × " if params.height > 1 else ""
        return f"{rows}{params.width} × {params.element_size} B"
    rows = "".join(f"{n} × " for n in (params.depth, params.height) if n > 1)
    return rows + bytes_text(params.width) + (" (an array)" if params.opaque else "")
