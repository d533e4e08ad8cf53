"""Executables of the host driver: snapshots of graphs, compiled, launched and changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ostinato.driver.api import (
    BODY_PARAMS,
    AllocNodeParams,
    ChildGraphNodeParams,
    ConditionalNodeParams,
    EmptyNodeParams,
    EventHandle,
    EventRecordNodeParams,
    EventWaitNodeParams,
    ExecHandle,
    FreeNodeParams,
    InstantiateFlags,
    KernelNodeParams,
    LaunchAttributes,
    MemcpyNodeParams,
    MemsetNodeParams,
    NodeHandle,
    NodeKind,
    NodeParams,
    UpdateOutcome,
    UpdateVerdict,
)
from ostinato.driver.host.definition import (
    MEMORY_KINDS,
    SINGLE_KINDS,
    DefinitionNode,
    GraphDefinition,
    execution_order,
)
from ostinato.driver.host.handles import invalid, new_handle, unsupported
from ostinato.driver.host.queue import Latch, Mark
from ostinato.driver.host.streams import HostStream
from ostinato.driver.host.work import (
    Conditions,
    Step,
    WorkCompiler,
    conditional_step,
    nothing,
    run_steps,
)
from ostinato.errors import DriverError, Status, driver_error

if TYPE_CHECKING:
    from random import Random

_SWITCHABLE = frozenset({NodeKind.KERNEL, NodeKind.MEMCPY, NodeKind.MEMSET})

_SUCCESS = UpdateOutcome(UpdateVerdict.SUCCESS)


def check_instantiable(
    graph: GraphDefinition,
    knows: Callable[[NodeParams], bool],
    *,
    capturing: bool,
    instances: bool,
) -> None:
    """Raises the errors of cuGraphInstantiate, with the node that is the cause.

    `capturing`: a capture fills the graph.  `instances`: the graph has an executable already.
    """
    call = "graph_instantiate"
    if capturing:
        raise invalid(call, "the graph is still being captured")
    for node in graph.walk():
        if node.graph.in_body and not isinstance(node.params, BODY_PARAMS):
            raise invalid(
                call,
                f"a {node.kind.name} node in a conditional node's body, or in a child graph there",
                node=node.handle,
            )
        if not knows(node.params):
            raise driver_error(
                Status.INVALID_HANDLE, call, "its function or event is gone", node=node.handle
            )
    for condition in graph.conditions.values():
        if not condition.used:
            raise invalid(call, f"conditional handle {condition.handle:#x} has no conditional node")
    if instances and any(node.kind in SINGLE_KINDS for node in graph.walk()):
        raise unsupported(
            call, "a graph with alloc, free or conditional nodes has one executable at a time"
        )


class Executable:
    """A snapshot of a graph with one step for each node of the outermost graph.

    Its task runs the steps in an order that the edges allow.  A change makes a new task: launches
    that were submitted before keep the old one.  Callers of methods must hold the driver's lock.
    """

    def __init__(
        self,
        definition: GraphDefinition,
        flags: InstantiateFlags,
        compiler: WorkCompiler,
        shuffle: Random | None,
    ) -> None:
        self.handle = ExecHandle(new_handle())
        self.definition = definition
        self.destroyed = False
        self._compiler = compiler
        self._memory = compiler.context.memory
        self._shuffle = shuffle
        self._auto_free = bool(flags & InstantiateFlags.AUTO_FREE_ON_LAUNCH)
        self._snapshot = definition.clone()
        # The definition's nodes, those of children and bodies too, to the snapshot's.
        pairs = zip(definition.walk(), self._snapshot.walk(), strict=True)
        self._nodes = {node.handle: twin for node, twin in pairs}
        self._disabled: set[DefinitionNode] = set()
        self._last: Mark | None = None  # the last launch, which the next launch waits for
        # The marks that the event nodes of the running launch record and wait for, by event.
        self._latches: dict[EventHandle, Latch] = {}
        self._marks: dict[EventHandle, Mark] = {}
        self._conditions = Conditions()
        self._survey_conditions()
        order = execution_order(self._snapshot, shuffle)
        self._positions = {node: i for i, node in enumerate(order)}
        self._steps = [self._step(node) for node in order]
        self._survey()
        self._bind()
        for allocation in self._allocations:
            allocation.holders += 1

    def release_memory(self) -> None:
        """Releases the addresses of its alloc nodes.  Submitted launches still run."""
        for allocation in self._allocations:
            self._memory.unhold(allocation)

    # --- compiling

    def _compile(self, graph: GraphDefinition) -> tuple[Step, ...]:
        return tuple(self._step(node) for node in execution_order(graph, self._shuffle))

    def _step(self, node: DefinitionNode) -> Step:
        if node in self._disabled:
            return nothing
        memory, params = self._memory, node.params
        match params:
            case EventRecordNodeParams():
                recorded = params.event
                return lambda: self._latches[recorded].stamp()
            case EventWaitNodeParams():
                return self._wait_step(params.event)
            case AllocNodeParams():
                allocated = memory.reserved[params.address]
                return lambda: memory.add(allocated, "exec_launch")
            case FreeNodeParams():
                freed = memory.reserved[params.address]
                return lambda: memory.remove(freed)
            case ConditionalNodeParams():
                bodies = tuple(self._compile(body) for body in node.bodies)
                context, conditions = self._compiler.context, self._conditions
                return conditional_step(context, params.kind, params.handle, bodies, conditions)
            case ChildGraphNodeParams():
                assert node.child is not None
                steps = self._compile(node.child)
                return lambda: run_steps(steps)
            case _:
                return self._compiler.step("graph_instantiate", params, self._conditions)

    def _wait_step(self, event: EventHandle) -> Step:
        def step() -> None:
            mark = self._marks.get(event)
            if mark is not None:
                mark.wait()

        return step

    def _recompile(self, node: DefinitionNode) -> None:
        """Compiles the node of the outermost graph that is, or contains, `node`."""
        while node.graph.owner is not None:
            node = node.graph.owner
        self._steps[self._positions[node]] = self._step(node)

    def _survey(self) -> None:
        """Notes the events and memory that a launch uses."""
        reserved = self._memory.reserved
        params = [node.params for node in self._snapshot.walk()]
        self._records = [p.event for p in params if isinstance(p, EventRecordNodeParams)]
        self._waits = [p.event for p in params if isinstance(p, EventWaitNodeParams)]
        freed = {p.address for p in params if isinstance(p, FreeNodeParams)}
        made = [p.address for p in params if isinstance(p, AllocNodeParams)]
        # Its allocations, those that it does not free, and those of other graphs that it frees.
        self._allocations = [reserved[address] for address in made]
        self._leaves = [reserved[address] for address in made if address not in freed]
        self._frees = [reserved[a] for a in freed if a not in made and a in reserved]
        self._plain = not (self._records or self._waits or self._allocations or self._frees)

    def _survey_conditions(self) -> None:
        """Adds the values of conditional handles; those of running launches stay."""
        values, defaults = self._conditions.values, {}
        for node in self._snapshot.walk():
            if isinstance(node.params, ConditionalNodeParams):
                condition = node.condition
                values.setdefault(condition.handle, 0)
                if condition.defaults.reset_at_launch:
                    defaults[int(condition.handle)] = condition.defaults.default
        self._conditions.defaults = defaults

    def _bind(self) -> None:
        """Makes the task of a launch from the present steps."""
        steps, conditions = tuple(self._steps), self._conditions
        if conditions.defaults:
            steps = (partial(conditions.values.update, conditions.defaults), *steps)
        self._task = partial(run_steps, steps)

    # --- launching

    def launch(self, stream: HostStream) -> None:
        call = "exec_launch"
        stream.refuse_capturing(call)
        queue, last = stream.queue, self._last
        if not self._plain:
            for event in (*self._records, *self._waits):
                self._compiler.events.find(call, event)
            self._take_memory(call)
        if last is not None and last.queue is not queue and not last.done():
            queue.submit(last.wait)
        # Every submission holds the lock, so the number of the next one is known.
        self._last = mark = Mark(queue, queue.submitted + 1)
        queue.submit(self._task if self._plain else self._task_with(mark))

    def launch_prepared(self, stream: HostStream) -> None:
        """Does the work of `launch` without a look-up of handles: raises if one is invalid now."""
        if self.destroyed or stream.destroyed:
            what = "executable" if self.destroyed else "stream"
            raise driver_error(
                Status.INVALID_HANDLE, "exec_launch", f"the prepared {what} was destroyed"
            )
        self.launch(stream)

    def _take_memory(self, call: str) -> None:
        """Accounts for a launch's memory when it is submitted, or refuses the launch."""
        for allocation in self._leaves:
            if allocation.outstanding and not self._auto_free:
                raise invalid(
                    call,
                    f"the last launch's memory at {allocation.address:#x} was not freed "
                    "(or instantiate with AUTO_FREE_ON_LAUNCH)",
                )
        for allocation in self._frees:
            if not allocation.outstanding:
                raise invalid(call, f"nothing is allocated at {allocation.address:#x}")
        wanted = sum(a.nbytes for a in self._allocations if not a.outstanding)
        free = self._memory.free
        if wanted > free:
            raise driver_error(
                Status.OUT_OF_MEMORY, call, f"its alloc nodes want {wanted} bytes, {free} are free"
            )
        for allocation in self._leaves:
            allocation.outstanding = True
        for allocation in self._frees:
            allocation.outstanding = False

    def _task_with(self, launch: Mark) -> Callable[[], None]:
        """Returns the task of a launch whose nodes record or wait for events, or own memory.

        The marks of the events are taken now, as in CUDA, and not when the launch runs.
        """
        task, memory, events = self._task, self._memory, self._compiler.events
        freed = list(self._leaves) if self._auto_free else []
        latches = {
            event: Latch(launch.queue, launch.number, stamps)
            for event, stamps in Counter(self._records).items()
        }
        waits = {
            event: mark
            for event in self._waits
            if event not in latches and (mark := events[event].mark) is not None
        }
        for event, latch in latches.items():
            events[event].mark = latch
            events[event].captured = None

        def run() -> None:
            for allocation in freed:
                memory.remove(allocation)
            self._latches, self._marks = latches, waits
            task()

        return run

    # --- changing

    def node(self, call: str, handle: NodeHandle) -> DefinitionNode:
        """Returns the snapshot's node for a node of the definition."""
        found = self._nodes.get(handle)
        if found is None:
            raise invalid(
                call, "the node is not of the graph that the executable was made from", node=handle
            )
        return found

    def set_params(self, call: str, node: DefinitionNode, params: NodeParams) -> None:
        node.check_settable(call, params, SINGLE_KINDS, node.original)
        if isinstance(params, EmptyNodeParams):
            return
        if isinstance(params, ChildGraphNodeParams):
            self._set_child(call, node, self.definition.tables.graphs.find(call, params.graph))
            return
        self._compiler.check(call, params)
        if params != _with_attributes(node.params, params):
            raise unsupported(
                call, "launch attributes cannot change on an executable", node=node.original
            )
        why = _why_not(node.params, params, self._memory.is_pinned)
        if why:
            raise invalid(call, why, node=node.original)
        before, node.params = node.params, params
        try:
            self._recompile(node)
        except DriverError:
            node.params = before
            raise
        if isinstance(params, EventRecordNodeParams | EventWaitNodeParams):
            self._survey()
        self._bind()

    def _set_child(self, call: str, node: DefinitionNode, new: GraphDefinition) -> None:
        assert node.child is not None
        outcome = _compare(node.child, new, self._memory.is_pinned)
        if outcome is not _SUCCESS:
            failure = Status.GRAPH_EXEC_UPDATE_FAILURE
            detail = f"the child graph differs ({outcome.verdict.name})"
            raise driver_error(failure, call, detail, node=node.original)
        _adopt(node.child, new)
        self._recompile(node)
        self._survey_conditions()
        self._survey()
        self._bind()

    def enabled(self, call: str, node: DefinitionNode) -> bool:
        if node.kind not in _SWITCHABLE:
            raise invalid(
                call, f"a {node.kind.name} node cannot be switched off", node=node.original
            )
        return node not in self._disabled

    def set_enabled(self, call: str, node: DefinitionNode, enabled: bool) -> None:
        self.enabled(call, node)
        (self._disabled.discard if enabled else self._disabled.add)(node)
        self._recompile(node)
        self._bind()

    def update(self, new: GraphDefinition) -> UpdateOutcome:
        outcome = _compare(self._snapshot, new, self._memory.is_pinned)
        if outcome is not _SUCCESS:
            return outcome
        for node in new.walk():
            if not self._compiler.knows(node.params):
                return UpdateOutcome(UpdateVerdict.ERROR, node.handle)
        changed = _adopt(self._snapshot, new)
        self._survey_conditions()
        for node in changed:
            self._recompile(node)
        if changed:
            self._survey()
        self._bind()
        return _SUCCESS


# ------------------------------------------------------------------------- CUDA's rules for updates


def _dimensions(params: MemcpyNodeParams | MemsetNodeParams) -> int:
    if isinstance(params, MemcpyNodeParams) and params.depth > 1:
        return 3
    return 2 if params.height > 1 else 1


def _why_not(old: NodeParams, new: NodeParams, is_pinned: Callable[[int], bool]) -> str:
    """Returns why a node's parameters cannot be replaced by these of the same kind, or ""."""
    match old, new:
        case MemcpyNodeParams(), MemcpyNodeParams():
            if _dimensions(old) != _dimensions(new):
                return f"a {_dimensions(old)}-D copy cannot become {_dimensions(new)}-D"
            if is_pinned(old.dst) != is_pinned(new.dst) or is_pinned(old.src) != is_pinned(new.src):
                return "a copy cannot change between device and pinned memory"
        case MemsetNodeParams(), MemsetNodeParams() if _dimensions(old) != _dimensions(new):
            return f"a {_dimensions(old)}-D fill cannot become {_dimensions(new)}-D"
    return ""


def _with_attributes(old: NodeParams, new: NodeParams) -> NodeParams:
    """Returns the new parameters of a node with the launch attributes of its old ones.

    cuGraphExecUpdate keeps these and returns SUCCESS (cluster sizes, libcuda 580.159).
    """
    if not (isinstance(old, KernelNodeParams) and isinstance(new, KernelNodeParams)):
        return new
    was = old.config
    if LaunchAttributes.of(was) == LaunchAttributes.of(new.config):
        return new
    config = replace(
        new.config, cluster=was.cluster, cooperative=was.cooperative, priority=was.priority
    )
    return replace(new, config=config)


def _compare(
    old: GraphDefinition, new: GraphDefinition, is_pinned: Callable[[int], bool]
) -> UpdateOutcome:
    """Compares the executable's snapshot `old` with `new`, which may replace it.

    Nodes pair by order of creation.  CUDA pairs them along the edges, so it also accepts an equal
    graph whose nodes were created in another order (measured), although its documentation requires
    the same order.
    """
    before, after = list(old.nodes.values()), list(new.nodes.values())
    if len(before) != len(after):
        return UpdateOutcome(UpdateVerdict.TOPOLOGY_CHANGED)
    old_index = {node: i for i, node in enumerate(before)}
    new_index = {node: i for i, node in enumerate(after)}
    for was, is_ in zip(before, after, strict=True):
        if was.kind != is_.kind:
            return UpdateOutcome(UpdateVerdict.NODE_TYPE_CHANGED, is_.handle)
        if len(was.incoming) != len(is_.incoming):
            return UpdateOutcome(UpdateVerdict.TOPOLOGY_CHANGED, is_.handle)
        edges = [(old_index[source], data) for source, data in was.incoming]
        for source, data in is_.incoming:
            if (new_index[source], data) not in edges:
                return UpdateOutcome(UpdateVerdict.TOPOLOGY_CHANGED, is_.handle)
        if was.params == is_.params and not was.inner:
            continue
        outcome = _compare_nodes(was, is_, is_pinned)
        if outcome is not _SUCCESS:
            return outcome
    return _SUCCESS


def _compare_nodes(
    was: DefinitionNode, is_: DefinitionNode, is_pinned: Callable[[int], bool]
) -> UpdateOutcome:
    changed = UpdateOutcome(UpdateVerdict.PARAMETERS_CHANGED, is_.handle)
    if was.kind in MEMORY_KINDS and was.params != is_.params:
        return changed
    if _why_not(was.params, is_.params, is_pinned):
        return changed
    if (
        isinstance(was.params, KernelNodeParams)
        and isinstance(is_.params, KernelNodeParams)
        and was.params.config.cooperative != is_.params.config.cooperative
    ):
        return UpdateOutcome(UpdateVerdict.ATTRIBUTES_CHANGED, is_.handle)
    if isinstance(was.params, ConditionalNodeParams):
        assert isinstance(is_.params, ConditionalNodeParams)
        if was.params.kind != is_.params.kind or was.params.size != is_.params.size:
            return changed
        if was.condition.defaults != is_.condition.defaults:
            return changed
    for inner, new_inner in zip(was.inner, is_.inner, strict=True):
        outcome = _compare(inner, new_inner, is_pinned)
        if outcome is not _SUCCESS:
            # CUDA names no node of an inner graph with missing or additional nodes.
            return UpdateOutcome(outcome.verdict, is_.handle) if outcome.node is None else outcome
    return _SUCCESS


def _adopt(old: GraphDefinition, new: GraphDefinition) -> list[DefinitionNode]:
    """Gives the nodes of `old` the parameters of `new`; returns the nodes whose steps change."""
    changed: list[DefinitionNode] = []
    for was, is_ in zip(old.nodes.values(), new.nodes.values(), strict=True):
        params = _with_attributes(was.params, is_.params)
        differs = was.params != params
        if isinstance(params, ConditionalNodeParams) and differs:
            was.graph.conditions[params.handle] = is_.condition
        if differs:
            was.params = params
        for inner, new_inner in zip(was.inner, is_.inner, strict=True):
            differs = bool(_adopt(inner, new_inner)) or differs
        if differs:
            changed.append(was)
    return changed
