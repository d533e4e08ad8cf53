"""The executables of the host driver: instantiating, launching, updating."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from ostinato.driver.api import (
    AllocNodeParams,
    ChildGraphNodeParams,
    ConditionalNodeParams,
    EventRecordNodeParams,
    EventWaitNodeParams,
    ExecHandle,
    FreeNodeParams,
    GraphHandle,
    InstantiateFlags,
    KernelNodeParams,
    NodeHandle,
    NodeKind,
    NodeParams,
    StreamHandle,
    UpdateOutcome,
    UpdateVerdict,
)
from ostinato.driver.host.core import known
from ostinato.driver.host.definition import (
    KINDS,
    GraphDefinition,
    Node,
    execution_order,
    new_handle,
)
from ostinato.driver.host.executable import (
    EnabledKinds,
    Executable,
    check_instantiable,
    launch_task,
    record_step,
    take_memory,
    wait_step,
)
from ostinato.driver.host.graphs import GraphCalls
from ostinato.driver.host.memory import Allocation
from ostinato.driver.host.queue import Mark, Stream
from ostinato.driver.host.streams import StreamCalls
from ostinato.driver.host.update import SUCCESS, compare_graphs, may_become
from ostinato.driver.host.work import Step, conditional_step, nothing, run_steps
from ostinato.errors import Status, driver_error

__all__ = ["ExecCalls"]

_SETTABLE = frozenset(
    {
        NodeKind.KERNEL,
        NodeKind.MEMCPY,
        NodeKind.MEMSET,
        NodeKind.HOST,
        NodeKind.CHILD_GRAPH,
        NodeKind.EVENT_RECORD,
        NodeKind.EVENT_WAIT,
        NodeKind.BATCH_MEM_OP,
    }
)


class ExecCalls(GraphCalls, StreamCalls):
    def __init__(self, total_memory: int) -> None:
        super().__init__(total_memory)
        self._executables: dict[int, Executable] = {}
        self._shuffle: Random | None = None

    def _executable(self, call: str, handle: ExecHandle) -> Executable:
        return known(self._executables.get(handle), call, "executable", handle)

    def graph_instantiate(
        self, graph: GraphHandle, flags: InstantiateFlags = InstantiateFlags.NONE
    ) -> ExecHandle:
        call = "graph_instantiate"
        with self._entered(call):
            definition = self._graph(call, graph)
            self._forbid(call)
            instances = any(e.definition is definition for e in self._executables.values())
            check_instantiable(definition, self._still_known, flags, instances=instances)
            snapshot = definition.clone()
            pairs = zip(definition.walk(), snapshot.walk(), strict=True)
            nodes = {node.handle: twin for node, twin in pairs}
            handle = ExecHandle(new_handle())
            executable = Executable(handle, definition, snapshot, flags, nodes)
            executable.survey_conditions()
            self._compile_all(executable)
            for allocation in executable.allocations:
                allocation.holders += 1
            self._executables[handle] = executable
            return handle

    def _still_known(self, node: Node) -> bool:
        match node.params:
            case KernelNodeParams():
                return node.params.function in self._functions
            case EventRecordNodeParams() | EventWaitNodeParams():
                return node.params.event in self._events
            case _:
                return True

    # --- compiling

    def _compile_all(self, executable: Executable) -> None:
        order = execution_order(executable.snapshot, self._shuffle)
        executable.positions = {node: i for i, node in enumerate(order)}
        executable.steps = [self._node_step(executable, node) for node in order]
        executable.survey(self._memory.reserved)
        executable.bind()

    def _compile(self, executable: Executable, graph: GraphDefinition) -> tuple[Step, ...]:
        return tuple(
            self._node_step(executable, node) for node in execution_order(graph, self._shuffle)
        )

    def _node_step(self, executable: Executable, node: Node) -> Step:
        if node in executable.disabled:
            return nothing
        params = node.params
        match params:
            case EventRecordNodeParams():
                return record_step(executable, params.event)
            case EventWaitNodeParams():
                return wait_step(executable, params.event)
            case AllocNodeParams():
                return self._alloc_step(self._memory.reserved[params.address])
            case FreeNodeParams():
                return self._free_step(self._memory.reserved[params.address])
            case ConditionalNodeParams():
                bodies = tuple(self._compile(executable, body) for body in node.bodies)
                return conditional_step(
                    self._context, params.kind, params.handle, bodies, executable.conditions
                )
            case ChildGraphNodeParams():
                assert node.child is not None
                steps = self._compile(executable, node.child)
                return lambda: run_steps(steps)
            case _:
                return self._step("graph_instantiate", params, executable.conditions)

    def _alloc_step(self, allocation: Allocation) -> Step:
        memory = self._memory
        return lambda: memory.add(allocation, "exec_launch")

    def _free_step(self, allocation: Allocation) -> Step:
        memory = self._memory
        return lambda: memory.remove(allocation)

    # --- launching

    def exec_destroy(self, executable: ExecHandle) -> None:
        call = "exec_destroy"
        self._enter(call)
        self._executable(call, executable)
        self._forbid(call)
        with self._lock:
            found = self._executable(call, executable)
            found.destroyed = True
            del self._executables[executable]
            for allocation in found.allocations:
                allocation.holders -= 1
                self._memory.drop_reserved(allocation)

    def exec_upload(self, executable: ExecHandle, stream: StreamHandle) -> None:
        call = "exec_upload"
        with self._entered(call):
            self._executable(call, executable)
            target = self._stream(call, stream)
            self._refuse_capturing(call, target)

    def exec_launch(self, executable: ExecHandle, stream: StreamHandle) -> None:
        call = "exec_launch"
        self._enter(call)
        with self._lock:
            self._launch(self._executable(call, executable), self._stream(call, stream))

    def exec_prepare_launch(
        self, executable: ExecHandle, stream: StreamHandle
    ) -> Callable[[], int]:
        call = "exec_launch"
        with self._entered("exec_prepare_launch"):
            found = self._executable("exec_prepare_launch", executable)
            target = self._stream("exec_prepare_launch", stream)
        enter, lock, launch_ = self._enter, self._lock, self._launch

        def launch() -> int:
            enter(call)
            with lock:
                if found.destroyed or target.destroyed:
                    what = "executable" if found.destroyed else "stream"
                    raise driver_error(
                        Status.INVALID_HANDLE, call, f"the prepared {what} was destroyed"
                    )
                launch_(found, target)
            return 0

        return launch

    def _launch(self, executable: Executable, stream: Stream) -> None:
        call = "exec_launch"
        self._refuse_capturing(call, stream)
        queue = stream.queue
        last = executable.last
        if executable.plain:
            task = executable.task
        else:
            for event in (*executable.records, *executable.waits):
                self._event(call, event)  # type: ignore[arg-type]
            take_memory(executable, call, self._memory.free)
            task = None
        if last is not None and last.queue is not queue and not last.done():
            queue.submit(last.wait)
        # Every submission holds the lock, so the number of the next one is known.
        number = queue.submitted + 1
        executable.last = Mark(queue, number)
        if task is None:
            task = launch_task(executable, self._context, self._events, number)
        queue.submit(task)

    # --- changing

    def _exec_node(self, call: str, executable: Executable, node: NodeHandle) -> Node:
        self._node(call, node)
        found = executable.nodes.get(node)
        if found is None:
            raise driver_error(
                Status.INVALID_VALUE,
                call,
                "the node is not of the graph that the executable was made from",
                node=node,
            )
        return found

    def _recompile(self, executable: Executable, node: Node) -> None:
        outermost = executable.outermost(node)
        executable.replace_step(outermost, self._node_step(executable, outermost))

    def exec_set_params(self, executable: ExecHandle, node: NodeHandle, params: NodeParams) -> None:
        call = "exec_set_params"
        with self._entered(call):
            target = self._executable(call, executable)
            found = self._exec_node(call, target, node)
            kind = KINDS.get(type(params))
            if kind != found.kind:
                asked = "opaque" if kind is None else kind.name
                raise driver_error(
                    Status.INVALID_VALUE,
                    call,
                    f"it is a {found.kind.name} node, not {asked}",
                    node=node,
                )
            if kind == NodeKind.EMPTY:
                return  # there is nothing to set
            if kind not in _SETTABLE:
                raise driver_error(
                    Status.NOT_SUPPORTED, call, f"a {found.kind.name} node is fixed", node=node
                )
            if isinstance(params, ChildGraphNodeParams):
                self._set_child(call, target, found, params, node)
                return
            self._check_params(call, params)
            why = may_become(found.params, params, self._memory.is_pinned)
            if why:
                raise driver_error(Status.INVALID_VALUE, call, why, node=node)
            before, found.params = found.params, params
            try:
                self._recompile(target, found)
            except BaseException:
                found.params = before
                raise
            if isinstance(params, EventRecordNodeParams | EventWaitNodeParams):
                target.survey(self._memory.reserved)
            target.bind()

    def _set_child(
        self,
        call: str,
        executable: Executable,
        found: Node,
        params: ChildGraphNodeParams,
        node: NodeHandle,
    ) -> None:
        new = self._graph(call, params.graph)
        assert found.child is not None
        outcome = compare_graphs(found.child, new, self._memory.is_pinned)
        if outcome is not SUCCESS:
            raise driver_error(
                Status.GRAPH_EXEC_UPDATE_FAILURE,
                call,
                f"the child graph differs ({outcome.verdict.name})",
                node=node,
            )
        self._adopt(found.child, new)
        self._recompile(executable, found)
        executable.survey_conditions()
        executable.survey(self._memory.reserved)
        executable.bind()

    def exec_set_enabled(self, executable: ExecHandle, node: NodeHandle, enabled: bool) -> None:
        call = "exec_set_enabled"
        with self._entered(call):
            target = self._executable(call, executable)
            found = self._exec_node(call, target, node)
            self._check_switchable(call, found, node)
            if enabled:
                target.disabled.discard(found)
            else:
                target.disabled.add(found)
            self._recompile(target, found)
            target.bind()

    def exec_enabled(self, executable: ExecHandle, node: NodeHandle) -> bool:
        call = "exec_enabled"
        with self._entered(call):
            target = self._executable(call, executable)
            found = self._exec_node(call, target, node)
            self._check_switchable(call, found, node)
            return found not in target.disabled

    def _check_switchable(self, call: str, found: Node, node: NodeHandle) -> None:
        if found.kind not in EnabledKinds:
            raise driver_error(
                Status.INVALID_VALUE,
                call,
                f"a {found.kind.name} node cannot be switched off",
                node=node,
            )

    def exec_update(self, executable: ExecHandle, graph: GraphHandle) -> UpdateOutcome:
        call = "exec_update"
        with self._entered(call):
            target = self._executable(call, executable)
            new = self._graph(call, graph)
            outcome = compare_graphs(target.snapshot, new, self._memory.is_pinned)
            if outcome is not SUCCESS:
                return outcome
            for node in new.walk():
                if not self._still_known(node):
                    return UpdateOutcome(UpdateVerdict.ERROR, node.handle)
            # An update that was interrupted may have changed nodes whose steps are still the old.
            torn, target.torn = target.torn, True
            changed = self._adopt(target.snapshot, new)
            if torn:
                changed = list(target.positions)
            target.survey_conditions()
            if changed:
                steps = target.steps.copy()
                for node in changed:
                    steps[target.positions[node]] = self._node_step(target, node)
                target.steps = steps
                target.survey(self._memory.reserved)
            target.bind()
            target.torn = False
            return SUCCESS

    def _adopt(self, old: GraphDefinition, new: GraphDefinition) -> list[Node]:
        """Gives the nodes of `old` the parameters of `new`; the nodes whose steps change."""
        changed: list[Node] = []
        for was, is_ in zip(old.nodes.values(), new.nodes.values(), strict=True):
            differs = was.params != is_.params
            if isinstance(is_.params, ConditionalNodeParams) and differs:
                was.graph.conditions[is_.params.handle] = is_.condition
            if differs:
                was.params = is_.params
            for inner, new_inner in zip(was.inner, is_.inner, strict=True):
                differs = bool(self._adopt(inner, new_inner)) or differs
            if differs:
                changed.append(was)
        return changed
