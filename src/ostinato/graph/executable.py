"""`GraphExec`: an executable graph that is launched, and changed without being made again.

The driver has no getters on an executable, so what was set is shadowed here: `params(node)` is
what the next launch will use.  Every change is all or nothing: what the driver refuses is undone,
node by node, before the error is raised.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from ostinato.driver.api import (
    ChildGraphNodeParams,
    ExecHandle,
    InstantiateFlags,
    KernelNodeParams,
    LaunchConfig,
    NodeKind,
    NodeParams,
    UpdateVerdict,
)
from ostinato.driver.closeable import Closeable
from ostinato.driver.launcher import Launcher
from ostinato.driver.stream import Operation, Stream
from ostinato.errors import (
    CaptureError,
    ClosedError,
    ContextPoisonedError,
    DriverError,
    GraphError,
    InputError,
    UpdateRefusedError,
)
from ostinato.graph.changes import VERDICTS, Keep, argument_bytes, refused
from ostinato.graph.graph import Graph
from ostinato.graph.node import Node
from ostinato.graph.rebind import Change, RebindReport, plan_rebind
from ostinato.graph.shadow import Shadow
from ostinato.memory import Buffer
from ostinato.memory.ranges import Target

__all__ = ["GraphExec", "UpdateReport"]


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """What a whole-graph update did: how many nodes have the new graph's parameters now."""

    nodes: int


class GraphExec(Launcher, Closeable):
    """An executable (CUgraphExec), made by `Graph.instantiate`.

    It keeps its graph alive, and with it what the nodes point at, and every buffer it was rebound
    or patched to.  Launches of one executable never overlap.  Changes apply to later launches;
    one under way keeps what it began with.  Thread-safe for changes; `launch` may be called from
    several threads, in an order that is then the caller's affair.
    """

    def __init__(self, graph: Graph, handle: ExecHandle) -> None:
        self.graph = graph
        self.context = graph.context
        self._handle = handle
        self._closed = False
        self._lock = threading.RLock()
        self._prepared: dict[Stream, Callable[[], int]] = {}
        self._shadow = Shadow(graph)
        self._keep = Keep(graph)
        driver, prepared, keep = self.context.driver, self._prepared, self._keep
        context = self.context

        def retire() -> None:
            # The streams it ran on: it is destroyed, and what its nodes point at let go, once its
            # own last launch there is done.
            def destroy() -> None:
                driver.exec_destroy(handle)
                keep.clear()

            context.retire(destroy, tuple(prepared))

        self._finalizer = weakref.finalize(self, retire)
        self._finalizer.atexit = False

    @classmethod
    def instantiate(
        cls, graph: Graph, *, flags: InstantiateFlags, upload: Stream | None
    ) -> GraphExec:
        """See `Graph.instantiate`."""
        context = graph.context
        context.require_open()
        context.collect()
        try:
            handle = context.driver.graph_instantiate(graph.handle, flags)
        except ContextPoisonedError:
            raise
        except DriverError as error:
            blamed = next((n for n in graph.nodes if n.handle == error.node), None)
            what = "" if blamed is None else f" at node {blamed.index} ({blamed.name})"
            raise GraphError(f"instantiating the graph failed{what}: {error}") from error
        executable = cls(graph, handle)
        if upload is not None:
            try:
                executable.upload(upload)
            except BaseException:
                executable.close()
                raise
        return executable

    @property
    def handle(self) -> ExecHandle:
        """The driver's handle.  Raises ClosedError after close()."""
        if self._closed:
            raise ClosedError("the executable graph is closed")
        return self._handle

    # --- running
    def _prepare(self, stream: Stream) -> Callable[[], int]:
        handle = self.handle
        if stream.closed:
            raise ClosedError("the stream is closed; launch on another")
        call = self._prepared.get(stream)
        if call is None:
            call = self.context.driver.exec_prepare_launch(handle, stream.handle)
            with self._lock:
                for old in [s for s in self._prepared if s.closed]:
                    del self._prepared[old]
                self._prepared[stream] = call
        return call

    def _launch_slowly(self, stream: Stream) -> None:
        """A launch on another stream than the last, or one that somebody listens to.

        A recording notes it.  Into a capture it is refused: the driver would refuse it as well
        (status 900, measured on driver 580), but break the capture.
        """
        call = self._prepare(stream)
        if not self.context.taps:
            stays = False
            try:
                self._heat(stream, call)
                # Asked afterwards: who taps or closes meanwhile either cools it or is seen here.
                stays = self.context.keep_hot(self) and not self._closed and not stream.closed
            finally:  # an interruption in between, too: nobody would cool it
                if not stays:
                    self.cool()
            if call():
                self._launch_checked(stream)
            return
        if stream.is_capturing:
            raise CaptureError(
                "an executable cannot be launched into a capture; capture the work itself, or add "
                "its definition to a graph with Graph.add_child (the capture goes on)"
            )
        self._launch_checked(stream)
        child = ChildGraphNodeParams(self.graph.handle)
        stream.announce(Operation(child, "graph", keep=(self,)))

    def _launch_checked(self, stream: Stream) -> None:
        self.context.driver.exec_launch(self.handle, stream.handle)

    def upload(self, stream: Stream) -> None:
        """Puts the executable on the device before its first launch, in stream order."""
        self.context.driver.exec_upload(self.handle, stream.handle)
        self._prepare(stream)

    # --- reading
    @property
    def nodes(self) -> tuple[Node, ...]:
        """The definition's nodes with the parameters that the next launch will use.

        Arguments are decoded as they were in the definition; `params` is current.
        """
        with self._lock:
            return self._shadow.nodes

    def _let_go(self, old: list[object]) -> None:
        """Keeps what is no longer pointed at until the launches under way are done."""
        if any(owner is not None for owner in old):
            self.context.retire(old.clear, tuple(self._prepared))

    def params(self, node: Node | int) -> NodeParams:
        """What the next launch will use for a node."""
        with self._lock:
            return self._shadow.params(self._shadow.node(node))

    # --- changing
    def set_params(
        self, node: Node | int, params: NodeParams, *, keep: Iterable[object] = ()
    ) -> None:
        """Replaces all parameters of a node by others of its kind.

        `keep` lives as long as the executable, or until the node is set again.
        Raises UpdateRefusedError; the executable is then as before.
        """
        with self._lock:
            found = self._shadow.node(node)
            self._apply([Change(found, params)])
            self._let_go(self._keep.replace(found.handle, keep))

    def patch(self, node: Node | int, argument: int | str, value: object) -> None:
        """Sets one kernel argument, by index or, where the signature is known, by name.

        With a signature the value is checked against its type, else against its size.
        Raises NodeKindError, InputError, UpdateRefusedError.
        """
        with self._lock:
            found = self._shadow.node(node)
            kernel = self._kernel(found)
            index, raw = argument_bytes(found, kernel.arguments, argument, value)
            arguments = kernel.arguments.with_raw(index, raw)
            owner = None if isinstance(value, int | float | bytes) else value
            place = arguments.layout[index].offset
            params = KernelNodeParams(
                kernel.function, kernel.config, arguments, kernel.extra_attributes
            )
            change = Change(found, params, ((place, owner),))
            self._apply([change])
            self._let_go(self._keep.renew(change))

    def _kernel(self, node: Node) -> KernelNodeParams:
        params = self._shadow.params(node)
        return params if isinstance(params, KernelNodeParams) else node.kernel

    def set_config(self, node: Node | int, config: LaunchConfig) -> None:
        """Sets a kernel node's grid, block and dynamic shared memory.

        Raises UpdateRefusedError also for launch attributes (cluster, cooperative, programmatic,
        priority) that differ: an executable keeps those it was made with.
        """
        with self._lock:
            found = self._shadow.node(node)
            kernel = self._kernel(found)
            old = kernel.config
            fixed = ("cluster", "cooperative", "programmatic", "priority")
            changed = [name for name in fixed if getattr(old, name) != getattr(config, name)]
            if changed:
                raise UpdateRefusedError(
                    f"node {found.index} ({found.name}): {', '.join(changed)} cannot change in an "
                    "executable; instantiate again",
                    node_index=found.index,
                )
            self._apply([Change(found, replace(kernel, config=config))])

    def set_memset(self, node: Node | int, dst: Buffer, value: int, element_size: int = 1) -> None:
        """Sets what a memset node fills, and with what."""
        with self._lock:
            found = self._shadow.node(node)
            memset = replace(found, params=self.params(found)).memset
            params = replace(
                memset,
                dst=dst.address,
                value=value,
                element_size=element_size,
                width=dst.nbytes // element_size,
                height=1,
            )
            self.set_params(found, params, keep=(dst,))

    def set_memcpy(self, node: Node | int, dst: Buffer, src: Buffer) -> None:
        """Sets what a memcpy node copies.  Raises InputError if the sizes differ."""
        if dst.nbytes != src.nbytes:
            raise InputError(f"{src.nbytes} bytes cannot be copied into {dst.nbytes}")
        with self._lock:
            found = self._shadow.node(node)
            memcpy = replace(found, params=self.params(found)).memcpy
            params = replace(memcpy, dst=dst.address, src=src.address, width=dst.nbytes)
            self.set_params(found, params, keep=(dst, src))

    def set_enabled(self, node: Node | int, enabled: bool) -> None:
        """Switches a kernel, memcpy or memset node on or off; off, it only joins."""
        with self._lock:
            found = self._shadow.node(node)
            if found.kind not in (NodeKind.KERNEL, NodeKind.MEMCPY, NodeKind.MEMSET):
                raise UpdateRefusedError(
                    f"node {found.index} ({found.name}) is of kind {found.kind.name}; only kernel, "
                    "memcpy and memset nodes can be switched on and off",
                    node_index=found.index,
                )
            try:
                self.context.driver.exec_set_enabled(self.handle, found.handle, enabled)
            except DriverError as error:
                raise refused(found, error) from error

    def enabled(self, node: Node | int) -> bool:
        """Whether a node runs."""
        return self.context.driver.exec_enabled(self.handle, self._shadow.node(node).handle)

    def rebind(
        self, targets: Mapping[Target, Target] | Iterable[tuple[Target, Target]]
    ) -> RebindReport:
        """Makes every pointer into one buffer point to the same place in another.

        `targets`: {old: new}, or (old, new) pairs for arrays that cannot be keys; buffers, device
        arrays of any library, or MemoryRange.  Kernel arguments, memcpy and
        memset nodes are changed, and nothing else; the report lists every word, and what was left
        and why.  Raises InputError if a new range is shorter than what is pointed at in the old,
        UpdateRefusedError if the driver refuses; the executable is then as before.
        """
        pairs = list(targets.items() if isinstance(targets, Mapping) else targets)
        with self._lock:
            find = self.context.driver.memory_range
            plan = plan_rebind(self._shadow.definition(), self._shadow.current, pairs, find)
            self._apply(plan.changes)
            self._let_go([o for change in plan.changes for o in self._keep.renew(change)])
            return plan.report

    def update(self, graph: Graph) -> UpdateReport:
        """Takes every parameter from another graph of the same topology.

        Raises UpdateRefusedError with the failing node and the reason; the executable is then as
        before.  It silently keeps launch attributes that the driver cannot read from the graph.
        """
        with self._lock:
            handles = self.context.driver.graph_nodes(graph.handle)
            outcome = self.context.driver.exec_update(self.handle, graph.handle)
            if outcome.verdict is not UpdateVerdict.SUCCESS:
                blamed = next((n for n in graph.nodes if n.handle == outcome.node), None)
                where = "" if blamed is None else f" at node {blamed.index} ({blamed.name})"
                raise UpdateRefusedError(
                    f"the update was refused{where}: {VERDICTS[outcome.verdict]} "
                    f"({outcome.verdict.name}). Instantiate the new graph instead.",
                    node_index=None if blamed is None else blamed.index,
                )
            self._shadow.updated(graph, handles)
            self._let_go(self._keep.replace_all(graph))
            return UpdateReport(len(handles))

    def _apply(self, changes: list[Change]) -> None:
        """Makes changes in order; undoes those made if one is refused."""
        driver, handle = self.context.driver, self.handle
        made: list[Node] = []
        try:
            for change in changes:
                driver.exec_set_params(handle, change.node.handle, change.params)
                made.append(change.node)
        except DriverError as error:
            for node in reversed(made):
                driver.exec_set_params(handle, node.handle, self._shadow.params(node))
            raise refused(changes[len(made)].node, error) from error
        self._shadow.changed(changes)

    # --- lifetime
    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Destroys the executable once its own last launch is done; does not wait.  Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.cool()
        self._finalizer()
        self.context.collect()
