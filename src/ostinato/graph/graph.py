"""`Graph`: a definition that can be read, built by hand, drawn, compared and instantiated."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, TypeAlias

from ostinato.device import Device
from ostinato.driver.api import (
    BODY_PARAMS,
    AllocNodeParams,
    BatchMemOpNodeParams,
    ChildGraphNodeParams,
    ConditionalHandle,
    ConditionalKind,
    ConditionalNodeParams,
    Edge,
    EdgeData,
    EmptyNodeParams,
    EventRecordNodeParams,
    EventWaitNodeParams,
    FreeNodeParams,
    GraphHandle,
    HostNodeParams,
    InstantiateFlags,
    KernelNodeParams,
    LaunchConfig,
    MemOp,
    NodeHandle,
    NodeKind,
    NodeParams,
    named_choice,
    not_null,
    parse_bytes,
    whole_number,
)
from ostinato.driver.closeable import Closeable, elsewhere
from ostinato.driver.context import Context, Tap, context_of
from ostinato.driver.interrupts import uninterrupted
from ostinato.driver.location import caller_line
from ostinato.driver.stream import Event, Operation, Stream, handle_of, require_callable
from ostinato.errors import ClosedError, DriverError, GraphError, InputError
from ostinato.graph.flat import FlatNode, flat_nodes
from ostinato.graph.frozen import BODY_RULE, wrongly_in_a_body
from ostinato.graph.node import (
    Node,
    NodeLabel,
    NodeReader,
    every_node,
    index_below,
)
from ostinato.graph.order import Recorded, dependencies, edge_data
from ostinato.launching import prepare_node
from ostinato.memory import Buffer
from ostinato.memory.buffer import copy_operation, fill_operation, for_a_node

if TYPE_CHECKING:
    from ostinato.graph.audit import AuditReport
    from ostinato.graph.executable import GraphExec
    from ostinato.graph.show.diff import GraphDiff
    from ostinato.graph.show.outline import Outline
    from ostinato.modules import Kernel

NodeRef = Node | NodeHandle

# fmt: off
KindName: TypeAlias = Literal[
    "kernel", "memcpy", "memset", "host", "child_graph", "empty", "event_wait", "event_record",
    "semaphore_signal", "semaphore_wait", "mem_alloc", "mem_free", "batch_mem_op", "conditional",
]
# fmt: on
"""The names of the members of `NodeKind`, in lower case."""


_DEFINITION = "a graph is a definition: run = graph.instantiate(upload=stream) can be "


@elsewhere(
    **dict.fromkeys(("launch", "replay", "upload"), f"{_DEFINITION}launched"),
    **dict.fromkeys(("set", "set_all", "patcher"), f"{_DEFINITION}changed"),
    rebind=f"{_DEFINITION}rebound",
    update=f"{_DEFINITION}updated",
)
class Graph(Closeable):
    """A graph definition (CUgraph).

    Made by a capture, a recording, `Graph.create`, or `Graph.adopt` for a graph of another library.
    It keeps alive the objects of its nodes, as far as this library added them; an adopted graph
    keeps its `owner`.  Changing a definition does not change executables made before.

    Methods that add a node take `after`, the nodes that the new one waits for (none by default).
    While a capture into the graph is under way, a new node also waits for the work captured so far
    on the stream that began the capture, and the work captured there next waits for the node.
    They raise GraphError with the driver's reason, ClosedError, and InputError for arguments that
    do not fit.

        graph = ost.capture_function(stream, work)
        run = graph.instantiate(upload=stream)
    """

    def __init__(
        self,
        context: Context,
        handle: GraphHandle,
        *,
        owned: bool = True,
        owner: object = None,
        labels: Mapping[NodeHandle, NodeLabel] | None = None,
        keep: Iterable[object] = (),
    ) -> None:
        self.context = context
        self._handle = not_null(handle, "graph")
        self.owner = owner
        self.labels: MutableMapping[NodeHandle, NodeLabel] = dict(labels or {})
        self.keep: list[object] = list(keep)
        self._count: int | None = None
        """The number of nodes; None if unknown."""
        self._foreign = False
        """True if another library may add nodes."""
        self._storages: dict[int, object] = {}
        self._looked_at = 0
        """The number of objects in `keep` that are in `_storages`."""
        self.only_to_read = ""
        """The reason why this library must not launch it; empty if it may."""
        self.origin = ""
        """Words that follow "the graph" in texts: the place at which another library captured it,
        or its key in a cache ("of decode#3(rows=1)"); empty if unknown."""
        self.closed = False
        self.instantiated = False
        """True once it has an executable."""
        self.replaced = False
        """True once a node of it was replaced."""
        self.before_launch: Callable[[Stream], None] | None = None
        """Called with the stream before each launch of later executables: for work that another
        library does before its own replays."""
        self.lost = ""
        """The reason why the driver has no such definition any more; empty if it has."""
        self._finalizer: weakref.finalize[..., Graph] | None = None
        if owned:
            driver = context.driver
            self._finalizer = weakref.finalize(
                self, context.retire, lambda: driver.graph_destroy(handle)
            )
            self._finalizer.atexit = False

    @classmethod
    def create(cls, device: Device) -> Graph:
        """Makes an empty graph to build by hand."""
        return cls._create(context_of(device))

    @classmethod
    @uninterrupted
    def _create(cls, context: Context) -> Graph:
        """Makes an empty graph where only the context is known."""
        context.require_open()
        return cls(context, context.driver.graph_create())

    @classmethod
    def adopt(cls, device: Device, handle: int, *, owner: object, only_to_read: str = "") -> Graph:
        """Returns a graph of another library, by its raw handle.

        This library never destroys it; `owner` is kept alive as long as this object or an
        executable of it.  `only_to_read` is the reason why this library must not launch it;
        instantiating it then raises GraphError.  Raises InputError for a null handle.
        """
        number = whole_number(handle)
        if number is None or not 0 <= number < 1 << 64:
            raise InputError(f"{handle!r} is no handle of a graph; give the driver's, a number")
        if not number:
            raise InputError(
                "a null handle is no graph; keep the owner's graph (not only its exec)"
            )
        graph = cls(context_of(device), GraphHandle(number), owned=False, owner=owner)
        graph.only_to_read = only_to_read
        graph._foreign = True
        return graph

    @property
    def handle(self) -> GraphHandle:
        """The driver's handle.  Raises ClosedError after close(), also of the device, GraphError if
        the driver has no such definition any more."""
        if self.closed:
            raise ClosedError("the graph is closed; capture or build it again")
        self.context.require_open()
        if self.lost:
            raise GraphError(self.lost)
        return self._handle

    def lose(self, why: str) -> None:
        """Makes later uses raise GraphError with `why`: the driver has lost the definition."""
        self.lost = why
        if self._finalizer is not None:
            self._finalizer.detach()

    def spoil(self, why: str) -> None:
        """Forbids launches, with `why`: it holds half of a change, and can only be read."""
        self.only_to_read = why

    @property
    def owned(self) -> bool:
        """True if this object destroys it; False for an adopted graph and a conditional body."""
        return self._finalizer is not None

    @property
    def kept(self) -> tuple[object, ...]:
        """The objects that a copy of this graph must keep alive."""
        return (*self.keep, self.owner)

    @property
    def storages(self) -> tuple[object, ...]:
        """The objects in `keep`, each once, with the root buffer in place of a view."""
        keep = self.keep
        if self._looked_at > len(keep):  # after a node that could not be added
            self._storages, self._looked_at = {}, 0
        if self._looked_at < len(keep):
            for owner in keep[self._looked_at :]:
                storage = getattr(owner, "storage", owner)
                self._storages[id(storage)] = storage
            self._looked_at = len(keep)
        return tuple(self._storages.values())

    def require_launchable(self, *, as_part: bool = False) -> None:
        """Raises GraphError if this library must not launch it, or not `as_part` of another graph;
        ClosedError if memory of a node is closed by now."""
        if self.only_to_read:
            raise GraphError(f"the graph can be read, but not launched here: {self.only_to_read}")
        if as_part and self.before_launch is not None:
            raise GraphError(
                "something must be done before each launch of this graph (it draws random numbers, "
                "whose generator is moved on), so it can be no part of another graph; instantiate "
                "and launch it by itself"
            )
        if _any_closed(self.storages):
            for node in self.nodes():
                if _any_closed(node.keep):
                    raise ClosedError(
                        f"node {node.index} ({node.name}) points at memory that was closed; make "
                        "the graph again with other buffers"
                    )
            raise ClosedError("a node points at memory that was closed; make the graph again")

    # --- reading
    def nodes(self) -> tuple[Node, ...]:
        """All nodes in the driver's order, child graphs and conditional bodies inside."""
        return self.reader.all(self.handle)

    @property
    def reader(self) -> NodeReader:
        """A reader of its nodes, and of the nodes inside them."""
        return NodeReader(self.context.driver, self.labels)

    def node(self, index: int) -> Node:
        """Returns one node by its index in the driver's order.  Raises InputError."""
        handles = self.context.driver.graph_nodes(self.handle)
        place = index_below(len(handles), index)
        return self.reader.one(place, handles[place])

    def __len__(self) -> int:
        """Returns the number of nodes, without those inside child graphs and bodies."""
        return len(self.context.driver.graph_nodes(self.handle))

    def count(self, kind: KindName | None = None) -> int:
        """Returns the number of nodes (of one kind), with those inside child graphs and bodies.

        A kind is the name of a `NodeKind` in lower case, such as "kernel".  Raises InputError for
        another.
        """
        wanted = None if kind is None else named_choice("kind", kind, NodeKind)
        return sum(1 for n in every_node(self.nodes()) if wanted is None or n.kind is wanted)

    def flat_nodes(self) -> tuple[FlatNode, ...]:
        """Returns all nodes, child graphs taken apart, each after those that it waits for.  Raises
        GraphError for a node that no other graph can hold."""
        return flat_nodes(self.context.driver, self.handle, self.nodes())

    def edges(self) -> tuple[Edge, ...]:
        """The dependencies between the graph's own nodes, with their data."""
        return self.context.driver.graph_edges(self.handle)

    # --- building
    @uninterrupted
    def add(
        self,
        params: NodeParams,
        *,
        after: Sequence[NodeRef] = (),
        edge_data: Sequence[EdgeData] | None = None,
        keep: Iterable[object] = (),
        operation: Operation | None = None,
        line: tuple[str, int] | None = None,
    ) -> Node:
        """Adds a node that runs after the given ones.

        `keep` is kept alive with the graph.  Raises GraphError with the driver's reason,
        ClosedError for a child graph that is closed.
        """
        driver = self.context.driver
        dependencies = node_handles(after)
        tap, stream = self._filled_by("adding a node")
        if stream is not None:
            # Its place in the capture: after the work captured so far, and before the next.
            captured = driver.stream_capture_info(stream.handle).dependencies
            others = [node for node in captured if node not in dependencies]
            dependencies += others
            if edge_data is not None:
                edge_data = [*edge_data, *(EdgeData() for _ in others)]
        if operation is not None and operation.once:
            raise GraphError(f"{operation.name} cannot be a node: {operation.once}")
        if operation is not None:
            operation.require_usable(self.context)
        kept = (*keep, *(() if operation is None else operation.keep))
        child = None
        if isinstance(params, ChildGraphNodeParams):
            child = next((graph for graph in kept if isinstance(graph, Graph)), None)
            if child is not None and child.closed:
                raise ClosedError("the graph that is to be a child node was closed before")
        self._require_fitting(params, child)
        try:
            handle = driver.graph_add_node(self.handle, dependencies, params, edge_data)
        except DriverError as error:
            raise GraphError(f"adding a {type(params).__name__} failed: {error}") from error
        before = len(self.keep)
        self.keep.extend(kept)
        count, self._count = self._count, None  # until the node is known to be kept
        label = self.labels[handle] = NodeLabel(operation, line or caller_line())
        try:
            if tap is not None and stream is not None:
                driver.stream_set_capture_dependencies(stream.handle, [handle])
                tap.added(self, handle, label)
            if child is not None:
                self._label_copies(child.labels, child.handle, handle)
            index = self._place_of_last(handle, count)
            if isinstance(params, KernelNodeParams) and params.config.plain and not edge_data:
                # The node has the given parameters: they need not be read back.
                return self.reader.made(index, handle, NodeKind.KERNEL, params)
            return self.reader.one(index, handle)
        except (DriverError, GraphError) as error:
            why = f"adding a {type(params).__name__} failed, as it could not be read: {error}"
            self.recount()
            try:
                driver.graph_remove_node(handle)
                self.labels.pop(handle, None)
                del self.keep[before:]
            except DriverError:
                self.spoil(f"{why}, and could not be taken back; make the graph again")
            raise GraphError(why) from error

    def _filled_by(self, what: str) -> tuple[Tap, Stream] | tuple[None, None]:
        """Returns the capture under way that fills this graph, and its stream; or (None, None)."""
        for tap in self.context.taps:
            stream = tap.fills(self.handle, what)
            if stream is not None:
                return tap, stream
        return None, None

    def _require_fitting(self, params: NodeParams, child: Graph | None) -> None:
        """Raises GraphError for a node that this graph cannot hold.  `child`: the child graph."""

    def _place_of_last(self, node: NodeHandle, count: int | None) -> int:
        """Returns the index of the last added node; `count` is the number of others, if known.

        All known drivers list nodes in the order of their addition, which CUDA does not document.
        Querying the list, or its length, takes longer with more nodes; so nodes are counted here,
        and the list is queried only as the graph doubles.
        """
        if count is not None and count & (count + 1) and not self.context.captures:
            self._count = count + 1
            return count
        nodes = self.context.driver.graph_nodes(self.handle)
        # A driver with another order is queried each time, and each driver during captures: a
        # capture may go into this graph, and add nodes or remove its own again.
        in_order = bool(nodes) and nodes[-1] == node
        known = in_order and not (self._foreign or self.context.captures)
        self._count = len(nodes) if known else None
        return len(nodes) - 1 if in_order else nodes.index(node)

    def recount(self) -> None:
        """Drops the count of nodes.  Call it after nodes were added or removed without `add`."""
        self._count = None

    def _label_copies(
        self, labels: Mapping[NodeHandle, NodeLabel], original: GraphHandle, node: NodeHandle
    ) -> None:
        """Copies the labels of a graph's nodes to their copies in a child graph node."""
        driver = self.context.driver
        params = driver.node_params(node)
        assert isinstance(params, ChildGraphNodeParams)
        copy_of_it = not_null(params.graph, "child graph")
        originals, copies = driver.graph_nodes(original), driver.graph_nodes(copy_of_it)
        kinds = [[driver.node_kind(n) for n in nodes] for nodes in (originals, copies)]
        if kinds[0] != kinds[1]:  # copies keep the order, as far as is known
            return
        for old, copy in zip(originals, copies, strict=True):
            if old in labels:
                self.labels[copy] = labels[old]
            inner = driver.node_params(old)
            if isinstance(inner, ChildGraphNodeParams):
                self._label_copies(labels, inner.graph, copy)

    def add_operation(self, operation: Operation, *, after: Sequence[NodeRef] = ()) -> Node:
        """Adds a node for a prepared operation."""
        return self.add(operation.params, after=after, operation=operation)

    def add_operations(self, operations: Sequence[Operation]) -> list[Node]:
        """Adds operations like a recording of them: with edges by the memory that each accesses.

        There are no edges from nodes that exist already.  Raises GraphError with the driver's
        reason; nodes added before stay.
        """
        return self.add_recorded([Recorded(operation, None) for operation in operations])

    def add_recorded(self, recorded: Sequence[Recorded], *, serial: bool = False) -> list[Node]:
        """Adds recorded operations, with edges between them as in `Recording.build`.

        Raises GraphError with the driver's reason; nodes added before stay.
        """
        if serial:
            after = [[i - 1] if i else [] for i in range(len(recorded))]
        else:
            after = dependencies([r.operation for r in recorded])
        nodes: list[Node] = []
        previous: dict[int, int] = {}  # the index of the last operation on each stream
        for index, entry in enumerate(recorded):
            operation = entry.operation
            before = previous.get(entry.stream)
            nodes.append(
                self.add(
                    operation.params,
                    after=[nodes[i] for i in after[index]],
                    edge_data=edge_data(recorded, index, before, after[index]),
                    operation=operation,
                    line=entry.line,
                )
            )
            previous[entry.stream] = index
        return nodes

    def add_kernel(
        self, kernel: Kernel, config: LaunchConfig, *args: object, after: Sequence[NodeRef] = ()
    ) -> Node:
        """Adds a kernel launch.  Raises InputError if the arguments do not fit."""
        return self.add_operation(prepare_node(kernel, config, args), after=after)

    def add_copy(self, dst: Buffer, src: Buffer, *, after: Sequence[NodeRef] = ()) -> Node:
        """Adds a copy of the bytes of `src` into `dst`, as `ost.copy` does.

        Raises InputError as `ost.copy` does, and for buffers of 0 bytes.
        """
        return self.add_operation(for_a_node(copy_operation(dst, src)), after=after)

    def add_fill(self, dst: Buffer, value: float, *, after: Sequence[NodeRef] = ()) -> Node:
        """Adds a fill of every element of a buffer with `value`, as `ost.fill` does.

        Raises InputError as `ost.fill` does, and for a buffer of 0 bytes.
        """
        return self.add_operation(for_a_node(fill_operation(dst, value)), after=after)

    def add_call(self, function: Callable[[], object], *, after: Sequence[NodeRef] = ()) -> Node:
        """Adds a call of a Python function, as `Stream.call` does.  It must not call the driver."""
        require_callable(function)
        return self.add(HostNodeParams(function), after=after, keep=(function,))

    def add_empty(self, *, after: Sequence[NodeRef] = ()) -> Node:
        """Adds a node without work, which joins dependencies."""
        return self.add(EmptyNodeParams(), after=after)

    def add_child(self, graph: Graph, *, after: Sequence[NodeRef] = ()) -> Node:
        """Adds a copy of another graph as one node; the other may then be closed or changed."""
        if not isinstance(graph, Graph):
            raise InputError(
                f"add_child: a Graph is needed, not {type(graph).__name__} (an executable's and a "
                "capture's is its .graph)"
            )
        self.context.require_same(graph.context, "add_child: the graph", "the one around it is of")
        graph.require_launchable(as_part=True)
        return self.add(ChildGraphNodeParams(graph.handle), after=after, keep=(graph, *graph.kept))

    def add_event_record(self, event: Event, *, after: Sequence[NodeRef] = ()) -> Node:
        """Adds a record of an event, which the graph keeps: each launch records it."""
        return self.add(
            EventRecordNodeParams(handle_of(event, self.context)), after=after, keep=(event.owner,)
        )

    def add_event_wait(self, event: Event, *, after: Sequence[NodeRef] = ()) -> Node:
        """Adds a wait for an event's last record, which the graph keeps."""
        return self.add(
            EventWaitNodeParams(handle_of(event, self.context)), after=after, keep=(event.owner,)
        )

    def add_alloc(self, nbytes: int | str, *, after: Sequence[NodeRef] = ()) -> Node:
        """Adds an allocation of `nbytes` (4096, "4 KiB"); `node.alloc.address` is its address,
        for later nodes.

        Without a free node in this graph the memory stays after a launch, until a graph with a free
        node for it is launched or the executable is closed, which frees it.  Meanwhile the
        executable cannot be launched again, unless it was instantiated with `auto_free_on_launch`.
        """
        return self.add(AllocNodeParams(parse_bytes(nbytes, "nbytes", 1)), after=after)

    def add_free(self, address: int, *, after: Sequence[NodeRef] = ()) -> Node:
        """Adds a node that frees the memory of an alloc node."""
        return self.add(FreeNodeParams(address), after=after)

    def add_batch_mem_op(
        self,
        operations: Sequence[MemOp],
        *,
        after: Sequence[NodeRef] = (),
        keep: Iterable[object] = (),
    ) -> Node:
        """Adds writes to memory, and waits for values there, that run in order.

        `keep` is kept alive with the graph: the memory at the operations' addresses.
        """
        return self.add(BatchMemOpNodeParams(tuple(operations)), after=after, keep=keep)

    def condition(self, default: int = 0, *, reset_at_launch: bool = True) -> ConditionalHandle:
        """Makes a condition that kernels set, for one conditional node of this graph.

        `default`: 32 bits without a sign, set at each launch if `reset_at_launch`.
        """
        value = whole_number(default)
        if value is None or not 0 <= value < 1 << 32:
            raise InputError(f"default={default!r}: a whole number of 32 bits is needed")
        handle = self.context.driver.conditional_create(
            self.handle, default=value, reset_at_launch=reset_at_launch
        )
        return not_null(handle, "condition")

    @uninterrupted
    def add_conditional(
        self,
        kind: Literal["if", "while", "switch"],
        handle: ConditionalHandle,
        *,
        size: int = 1,
        after: Sequence[NodeRef] = (),
    ) -> Conditional:
        """Adds an "if" (size 1, or 2 with an else), "while" (1) or "switch" (any) node.

        If the condition is not 0, an "if" runs its first body, else the second if there is one.  A
        "while" runs its body again as long as the condition is not 0.  A "switch" runs the body of
        that number, or nothing if there is none.

        The bodies are filled as graphs of their own, by hand or with `capture(stream, into=body)`.
        They hold kernels, copies, fills, empty nodes, child graphs of these, and conditional nodes;
        `add` of a body raises GraphError for others.  The body of a "while" needs a kernel that
        sets the condition: without a kernel `instantiate` raises GraphError, and it warns if no
        kernel in the body has `handle` among its arguments.  Raises InputError for another kind.
        """
        choice = named_choice("kind", kind, ConditionalKind)
        node = self.add(ConditionalNodeParams(handle, choice, size), after=after)
        return Conditional(self, node)

    def add_edges(self, edges: Sequence[tuple[NodeRef, NodeRef]]) -> None:
        """Adds plain dependencies (first, then second).  Raises GraphError if that makes a
        cycle."""
        pairs = [node_handles((first, second)) for first, second in edges]
        plain = [Edge(first, second) for first, second in pairs]
        try:
            self.context.driver.graph_add_edges(self.handle, plain)
        except DriverError as error:
            raise GraphError(f"adding edges failed: {error}") from error

    @uninterrupted
    def replace(self, node: NodeRef, operation: Operation) -> Node:
        """Puts an operation in the place of a node, with the node's edges; returns the new node.

        For a small fill, say: with one among its nodes, a launch of a chain takes 3 us more than
        with kernels alone (docs/log.md).  The old node is removed, later nodes get other indices,
        and the new node is the last.  The objects of the old node stay alive with the graph.

            graph.replace(node, ost.prepare(kernel, config, x, n))

        The driver may give the handle of the old node to a later one, so a `Node` of it must not be
        used any more, and GraphError is raised if the graph has an executable, or a capture into it
        is under way.  GraphError is also raised with the driver's reason, and for nodes that cannot
        be replaced: a conditional node, nodes in its bodies, and nodes of a graph with alloc or
        free nodes.  Raises InputError for a node that is not of this graph itself.  The graph is
        then as before; if the driver refuses to remove the new node again, the graph cannot be
        launched any more.
        """
        (new,) = self.replace_all([(node, operation)])
        return new

    @uninterrupted
    def replace_all(self, pairs: Sequence[tuple[NodeRef, Operation]]) -> list[Node]:
        """Replaces nodes, each by an operation, as `replace` does one; all of them or none.

        One call for many nodes reads the graph once, and not once for each."""
        driver = self.context.driver
        olds = [node.handle if isinstance(node, Node) else node for node, _ in pairs]
        nodes, edges = driver.graph_nodes(self.handle), self.edges()
        kinds = {node: driver.node_kind(node) for node in nodes}
        for (node, _), old in zip(pairs, olds, strict=True):
            if old not in kinds:
                raise InputError(f"replace: {node!r} is no node of this graph itself")
        if len({*olds}) < len(olds):
            raise InputError("replace_all: a node is given twice")
        why = ""
        if self.instantiated or isinstance(self, _Body):
            why = "an executable of the graph may have been made; replace nodes before"
        elif self._filled_by("replacing a node")[0] is not None:
            why = "something is captured into the graph; end that capture before"
        elif any(kinds[old] is NodeKind.CONDITIONAL for old in olds):
            why = "it is a conditional node, whose bodies would go with it"
        elif not {NodeKind.MEM_ALLOC, NodeKind.MEM_FREE}.isdisjoint(kinds.values()):
            why = "CUDA removes no node from a graph with alloc or free nodes"
        if why:
            raise GraphError(f"{_named(pairs)} of {self!r} cannot be replaced: {why}")
        before: dict[NodeHandle, list[Edge]] = {old: [] for old in olds}
        for edge in edges:
            if edge.target in before and edge.source not in before:
                before[edge.target].append(edge)
        self.replaced = True
        made: dict[NodeHandle, Node] = {}
        try:
            for old, (_, operation) in zip(olds, pairs, strict=True):
                made[old] = self.add(
                    operation.params,
                    after=[edge.source for edge in before[old]],
                    edge_data=[edge.data for edge in before[old]],
                    operation=operation,
                )
            new = {old: node.handle for old, node in made.items()}
            after = [edge for edge in edges if edge.source in new]
            moved = [
                replace(e, source=new[e.source], target=new.get(e.target, e.target)) for e in after
            ]
            driver.graph_add_edges(self.handle, moved)
            for old in olds:
                driver.graph_remove_node(old)
        except Exception as error:
            why = f"replacing {_named(pairs)} failed: {error}"
            self._take_back(olds, nodes, edges, why)
            if isinstance(error, DriverError):
                raise GraphError(why) from error
            raise
        finally:
            self.recount()
        for old in olds:
            self.labels.pop(old, None)
        rest = len(nodes) - len(olds)
        return [replace(node, index=rest + place) for place, node in enumerate(made.values())]

    def _take_back(
        self,
        olds: Sequence[NodeHandle],
        nodes: Sequence[NodeHandle],
        edges: Sequence[Edge],
        why: str,
    ) -> None:
        """Restores the graph with these nodes and edges, unless all old nodes are gone."""
        driver, whole = self.context.driver, False
        try:
            there = driver.graph_nodes(self.handle)
            left = {*olds} & {*there}
            for added in there if len(left) == len(olds) else ():
                if added not in nodes:
                    driver.graph_remove_node(added)
                    self.labels.pop(added, None)
            whole = not left or {*self.edges()} == {*edges}
        except DriverError:
            pass  # the caller raises the first error
        if not whole:
            self.spoil(f"{why}, and could not be taken back; make the graph again")

    # --- copies and executables
    @uninterrupted
    def clone(self) -> Graph:
        """Returns a copy that can be changed on its own.

        Raises DriverError with the status NOT_SUPPORTED for a graph that has alloc, free or
        conditional nodes, and for the body of a conditional node.
        """
        driver = self.context.driver
        clone = Graph(self.context, driver.graph_clone(self.handle), keep=self.kept)
        clone.only_to_read = self.only_to_read
        clone.before_launch = self.before_launch
        for node in driver.graph_nodes(self.handle):
            copy = driver.node_in_clone(node, clone.handle)
            if node in self.labels:
                clone.labels[copy] = self.labels[node]
            if driver.node_kind(node) is NodeKind.CHILD_GRAPH:
                inner = driver.node_params(node)
                assert isinstance(inner, ChildGraphNodeParams)
                clone._label_copies(self.labels, inner.graph, copy)
        return clone

    @uninterrupted
    def instantiate(
        self,
        *,
        upload: Stream | None = None,
        auto_free_on_launch: bool = False,
        use_node_priority: bool = False,
    ) -> GraphExec:
        """Makes an executable of the present definition; uploads it on a stream if one is given.

        `auto_free_on_launch`: a launch frees what the launch before allocated and left; without it
        such a launch is refused.  `use_node_priority`: its kernels run with the priorities of their
        nodes, not with that of the stream.

        Raises GraphError with the node that the driver named; an upload that fails raises
        DriverError and closes the executable.
        """
        from ostinato.graph.executable import make_executable

        flags = InstantiateFlags.NONE
        if auto_free_on_launch:
            flags |= InstantiateFlags.AUTO_FREE_ON_LAUNCH
        if use_node_priority:
            flags |= InstantiateFlags.USE_NODE_PRIORITY
        return make_executable(self, upload, flags)

    # --- showing (graph.show)
    def outline(self, *, readable: bool = True) -> Outline:
        """Reads the graph once, with everything inside of it.

        `readable`: for people: kernels have their names in the source, which overloads share, and
        addresses the names of their buffers.
        """
        from ostinato.graph.show.outline import read_outline

        return read_outline(self.context, self.handle, self.nodes(), readable=readable)

    def __str__(self) -> str:
        from ostinato.graph.show.render import to_table

        return to_table(self.outline())

    def to_dict(self) -> dict[str, object]:
        """Returns the whole graph as plain data; docs/design.md has the schema."""
        from ostinato.graph.show.render import to_dict

        return to_dict(self.outline(readable=False), self.context.driver.name)

    def to_dot(self) -> str:
        """Returns the graph in Graphviz' language."""
        from ostinato.graph.show.render import to_dot

        return to_dot(self.outline())

    def to_svg(self) -> str:
        """Returns a picture of the graph."""
        from ostinato.graph.show.svg import to_svg

        return to_svg(self.outline())

    def _repr_html_(self) -> str:
        from ostinato.graph.show.render import to_html

        return to_html(self.outline())

    def _repr_svg_(self) -> str:
        return self.to_svg()

    def diff(self, other: Graph) -> GraphDiff:
        """Returns the differences between this graph and another; empty for equal ones.

        Kernels of one name that were loaded twice are compared by their code, which waits for the
        device; code that cannot be read counts as different.  Kernels of two devices, and all
        kernels during a capture, are compared by name alone.
        """
        from ostinato.graph.show.diff import code_comparison, diff

        if not isinstance(other, Graph):
            raise InputError(f"diff: a Graph is needed, not {type(other).__name__}")
        same_code = code_comparison(self.context, other.context)
        return diff(self.outline(readable=False), other.outline(readable=False), same_code)

    def audit(self) -> AuditReport:
        """Returns every pointer of the graph, with what is known of the memory there.

            print(graph.audit())

        Each is live, freed, moved (other memory has its address now), null or unknown.  Known is
        the memory of this library, of others as far as they tell (`explain.add_memory_source`;
        `ostinato.interop.torch` does), and of the driver.  Words of kernels without a signature
        count as pointers if they are in known memory; those of 8 bytes also if they look like an
        address ("unknown", not `typed`).  Not found: pointers in device memory, and how far a
        kernel reaches from a pointer.  Nothing is waited for.  Raises ClosedError, and the driver's
        errors.
        """
        from ostinato.graph.audit import audit

        return audit(self.context, self.nodes())

    def digest(self) -> str:
        """Returns the graph's shape as 64 hexadecimal digits, for processes to compare.

        It covers nodes, launch shapes and edges, and no addresses, handles or values of arguments:
        `graph.show.digest` lists both.  It is that of the definition, without changes of
        executables.
        """
        from ostinato.graph.show.digest import digest

        return digest(self.outline(readable=False))

    # --- lifetime
    def __repr__(self) -> str:
        state = "closed" if self.closed else "lost" if self.lost else "open"
        adopted = "" if self.owned else ", not owned"
        return f"<Graph {self._handle:#x} on {self.context.driver.name}, {state}{adopted}>"

    @uninterrupted
    def close(self) -> None:
        """Destroys the definition; an adopted one is only released.  Idempotent.

        Executables made from it still launch, and `GraphExec.update` works; reading or changing one
        of their nodes raises ClosedError.
        """
        if self.closed:
            return
        self.closed = True
        if self._finalizer is not None:
            self._finalizer()
        self.context.collect()


def node_handles(nodes: Sequence[NodeRef]) -> list[NodeHandle]:
    """Returns the driver's handles.  Raises InputError for a value that is no list of nodes."""
    if isinstance(nodes, Node | Conditional):
        raise InputError("a list of nodes is needed: after=[node]")
    if not isinstance(nodes, Iterable):
        raise InputError(f"after={nodes!r}: a list of nodes is needed")
    handles = []
    for node in nodes:
        number = node.handle if isinstance(node, Node) else whole_number(node)
        if number is None:
            raise InputError(
                f"a Node is needed, not {type(node).__name__} (a conditional's is its .node)"
            )
        handles.append(NodeHandle(number))
    return handles


def _named(pairs: Sequence[tuple[NodeRef, Operation]]) -> str:
    return ", ".join([repr(node) for node, _ in pairs])


class Conditional:
    """A conditional node and its bodies, each a Graph that the node owns."""

    def __init__(self, graph: Graph, node: Node) -> None:
        self.node = node
        self.graph = graph
        self.bodies: tuple[Graph, ...] = tuple(
            _Body(graph, body) for body in node.conditional.bodies
        )

    def __repr__(self) -> str:
        kind = self.node.conditional.kind.name
        return f"<Conditional {kind}, node {self.node.index}, {len(self.bodies)} bodies>"


def _any_closed(owners: Iterable[object]) -> bool:
    """True if memory among the owners is closed; a child's definition may be closed."""
    return any(
        getattr(owner, "closed", False) is True and not isinstance(owner, Graph) for owner in owners
    )


class _Body(Graph):
    """A body's graph.  It shares labels and kept objects with the enclosing graph."""

    def __init__(self, parent: Graph, handle: GraphHandle) -> None:
        super().__init__(parent.context, handle, owned=False, owner=parent)
        self._parent = parent
        self.labels = parent.labels
        self.keep = parent.keep

    def lose(self, why: str) -> None:
        """Loses the enclosing graph too: its node still points at the body, so reading,
        instantiating or destroying the graph would end the process (measured on driver 580).  It is
        never freed."""
        super().lose(why)
        self._parent.lose(why)

    def spoil(self, why: str) -> None:
        super().spoil(why)
        self._parent.spoil(why)

    def _require_fitting(self, params: NodeParams, child: Graph | None) -> None:
        what = "" if isinstance(params, BODY_PARAMS) else f"a {type(params).__name__}"
        if child is not None:
            what = wrongly_in_a_body(child.nodes(), "a child graph with ", inside=True)
        if what:
            raise GraphError(f"adding {what} to a body failed: {BODY_RULE}")

    @property
    def handle(self) -> GraphHandle:
        _ = self._parent.handle  # raises: the body is gone with the enclosing graph
        return super().handle
