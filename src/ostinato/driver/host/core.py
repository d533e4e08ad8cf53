"""The base of all parts of the host driver: its tables, its lock, and the checks at each call.

The lock guards the tables and every definition.  It is never held while user code runs: streams
run their work on threads of their own, which never take it.
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from ostinato.driver.api import (
    AllocNodeParams,
    CaptureMode,
    EdgeData,
    EventHandle,
    FunctionHandle,
    GraphHandle,
    NodeHandle,
    NodeParams,
    StreamHandle,
)
from ostinato.driver.forking import new_lock, switch_off_in_children
from ostinato.driver.host.definition import GraphDefinition, Node
from ostinato.driver.host.queue import Event, HostContext, Stream, WorkQueue
from ostinato.driver.host.work import Conditions, LoadedFunction, Step
from ostinato.errors import Status, driver_error

if TYPE_CHECKING:
    from ostinato.driver.host.capture import Capture

__all__ = ["HostCore", "known"]


T = TypeVar("T")


def known(found: T | None, call: str, what: str, handle: int) -> T:
    """The object that was found under a handle.  Raises INVALID_HANDLE if there was none."""
    if found is None:
        raise driver_error(Status.INVALID_HANDLE, call, f"{what} {handle:#x}")
    return found


class HostCore(ABC):
    """Tables of handles.  The parts of the driver inherit it and add their calls."""

    def __init__(self, total_memory: int) -> None:
        self._context = HostContext(total_memory)
        self._memory = self._context.memory
        self._lock = new_lock()
        legacy = Stream(0, WorkQueue(self._context, "ostinato-host-legacy"))
        self._streams: dict[int, Stream] = {0: legacy}
        self._events: dict[int, Event] = {}
        self._modules: dict[int, dict[str, LoadedFunction]] = {}
        self._functions: dict[int, LoadedFunction] = {}
        self._graphs: dict[int, GraphDefinition] = {}
        self._nodes: dict[int, Node] = {}
        self._begun: list[Capture] = []
        """Captures under way, and perhaps one whose begin or end was interrupted."""
        self._thread = threading.local()
        switch_off_in_children(self)

    def after_fork(self) -> None:
        """In a forked child: every later call raises INVALID_CONTEXT with the reason."""
        self._context.after_fork()

    # --- checks at each call

    def _enter(self, call: str) -> None:
        """Refuses every call on a driver that is closed or poisoned, or from its own threads."""
        context = self._context
        if context.closed:
            raise driver_error(Status.INVALID_CONTEXT, call, context.why_closed)
        if threading.get_ident() in context.workers:
            raise driver_error(
                Status.NOT_PERMITTED,
                call,
                "kernels and host functions must not call the driver",
            )
        if context.failure is not None:
            self._raise_failure(call)

    def _raise_failure(self, call: str) -> None:
        failure = self._context.failure
        if failure is not None:
            raise driver_error(failure.status, call, failure.detail) from failure.cause

    @contextlib.contextmanager
    def _entered(self, call: str) -> Iterator[None]:
        """`_enter` and the lock, for calls that need not be fast."""
        self._enter(call)
        with self._lock:
            yield

    def _thread_mode(self) -> CaptureMode:
        """The capture mode of the calling thread; at first the strictest, as in CUDA."""
        mode: CaptureMode = getattr(self._thread, "mode", CaptureMode.GLOBAL)
        return mode

    def _forbid(self, call: str) -> None:
        """Refuses a call that captures under way forbid to this thread, and breaks those captures.

        CUDA calls them potentially unsafe: they may wait for, or change, what a capture needs.
        """
        if not self._begun:
            return
        with self._lock:
            thread, mode = threading.get_ident(), self._thread_mode()
            harmed = [c for c in self._captures if c.forbids(thread, mode)]
            for capture in harmed:
                capture.broken = True
            if harmed:
                raise driver_error(
                    Status.STREAM_CAPTURE_UNSUPPORTED,
                    call,
                    f"stream {harmed[0].origin.handle:#x} captures "
                    f"({harmed[0].mode.name.lower()} mode)",
                )

    @property
    def _captures(self) -> list[Capture]:
        """The captures under way."""
        return [capture for capture in self._begun if capture.under_way]

    # --- by handle

    def _stream(self, call: str, handle: StreamHandle) -> Stream:
        return known(self._streams.get(handle), call, "stream", handle)

    def _event(self, call: str, handle: EventHandle) -> Event:
        return known(self._events.get(handle), call, "event", handle)

    def _function(self, call: str, handle: FunctionHandle) -> LoadedFunction:
        return known(self._functions.get(handle), call, "function", handle)

    def _graph(self, call: str, handle: GraphHandle) -> GraphDefinition:
        return known(self._graphs.get(handle), call, "graph", handle)

    def _node(self, call: str, handle: NodeHandle) -> Node:
        return known(self._nodes.get(handle), call, "node", handle)

    def _nodes_of(
        self, call: str, graph: GraphDefinition, handles: Sequence[NodeHandle]
    ) -> list[Node]:
        """Nodes that must all be of one graph, each named once."""
        nodes = [self._node(call, handle) for handle in handles]
        for node in nodes:
            if node.graph is not graph:
                raise driver_error(
                    Status.INVALID_VALUE,
                    call,
                    f"node {node.handle:#x} is of another graph",
                    node=node.handle,
                )
        if len(set(nodes)) != len(nodes):
            raise driver_error(Status.INVALID_VALUE, call, "a dependency is named twice")
        return nodes

    def _register(self, graph: GraphDefinition) -> None:
        """Makes a definition, and all inside it, known by handle."""
        self._graphs[graph.handle] = graph
        for node in graph.nodes.values():
            self._register_node(node)

    def _register_node(self, node: Node) -> None:
        self._nodes[node.handle] = node
        for inner in node.inner:
            self._register(inner)

    def _release_memory(self, graph: GraphDefinition) -> None:
        """Ends the hold of a definition or an executable on the addresses of its alloc nodes."""
        for node in graph.walk():
            if isinstance(node.params, AllocNodeParams):
                allocation = self._memory.reserved.get(node.params.address)
                if allocation is not None:
                    allocation.holders -= 1
                    self._memory.drop_reserved(allocation)

    def _forget(self, graph: GraphDefinition) -> None:
        self._graphs.pop(graph.handle, None)
        for node in graph.nodes.values():
            self._forget_node(node)

    def _forget_node(self, node: Node) -> None:
        self._nodes.pop(node.handle, None)
        for inner in node.inner:
            self._forget(inner)

    def _wait_for_all(self) -> None:
        """Waits for the work of every stream that was submitted before."""
        with self._lock:
            queues = tuple(self._context.queues)
        for queue in queues:
            queue.wait(queue.submitted)

    # --- by the parts above; declared here so that the parts need not know each other

    @abstractmethod
    def _add_node(
        self,
        call: str,
        graph: GraphDefinition,
        dependencies: Sequence[Node],
        params: NodeParams,
        edge_data: Sequence[EdgeData] | None = None,
    ) -> Node: ...

    @abstractmethod
    def _submit(self, call: str, stream: Stream, params: NodeParams) -> None: ...

    @abstractmethod
    def _check_params(self, call: str, params: NodeParams) -> None: ...

    @abstractmethod
    def _step(
        self, call: str, params: NodeParams, conditions: Conditions | None = None
    ) -> Step: ...

    @abstractmethod
    def _refuse_capturing(self, call: str, stream: Stream) -> None: ...
