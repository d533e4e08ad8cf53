"""Executables of the host driver: a snapshot of a graph, compiled to a flat list of calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ostinato.driver.api import (
    AllocNodeParams,
    ConditionalNodeParams,
    EventRecordNodeParams,
    EventWaitNodeParams,
    FreeNodeParams,
    InstantiateFlags,
    NodeHandle,
    NodeKind,
)
from ostinato.driver.host.definition import SINGLE_KINDS, GraphDefinition, Node
from ostinato.driver.host.memory import Allocation
from ostinato.driver.host.queue import Event, HostContext, Latch, Mark
from ostinato.driver.host.work import Conditions, Step
from ostinato.errors import Status, driver_error

__all__ = ["BODY_KINDS", "EnabledKinds", "Executable", "LaunchState", "check_instantiable"]

# What the body of a conditional node may hold (CUDA programming guide, "Conditional Graph Nodes").
BODY_KINDS = frozenset(
    {
        NodeKind.KERNEL,
        NodeKind.MEMCPY,
        NodeKind.MEMSET,
        NodeKind.CHILD_GRAPH,
        NodeKind.EMPTY,
        NodeKind.CONDITIONAL,
    }
)

EnabledKinds = frozenset({NodeKind.KERNEL, NodeKind.MEMCPY, NodeKind.MEMSET})


@dataclass(slots=True, eq=False)
class LaunchState:
    """What one launch needs for its event nodes."""

    records: Mapping[int, Latch] = field(default_factory=dict)
    waits: Mapping[int, Mark] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Executable:
    """`steps` belong to nodes one by one, in the order of execution, and are never changed in
    place: a launch that was submitted keeps the list that it was submitted with."""

    handle: int
    definition: GraphDefinition
    snapshot: GraphDefinition
    flags: InstantiateFlags
    nodes: dict[NodeHandle, Node]
    """The definition's nodes, those of children and bodies too, to the snapshot's."""
    conditions: Conditions = field(default_factory=Conditions)
    disabled: set[Node] = field(default_factory=set)
    steps: list[Step] = field(default_factory=list)
    positions: dict[Node, int] = field(default_factory=dict)
    task: Callable[[], None] = lambda: None
    last: Mark | None = None
    """The last launch: the next one waits for it, on whichever stream."""
    launching: LaunchState = field(default_factory=LaunchState)
    records: list[int] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)
    """Events that its nodes record, and wait for."""
    allocations: list[Allocation] = field(default_factory=list)
    leaves: list[Allocation] = field(default_factory=list)
    """What it allocates, and the part of that which it does not free itself."""
    frees: list[Allocation] = field(default_factory=list)
    """What it frees that another graph allocated."""
    destroyed: bool = False
    torn: bool = False
    """Whether an update began and did not end."""

    @property
    def plain(self) -> bool:
        """Whether a launch has nothing to do but its steps."""
        return not (self.records or self.waits or self.allocations or self.frees)

    def survey(self, reserved: Mapping[int, Allocation]) -> None:
        """Notes the events and memory that each launch must handle."""
        kinds = [node.params for node in self.snapshot.walk()]
        self.records = [int(p.event) for p in kinds if isinstance(p, EventRecordNodeParams)]
        self.waits = [int(p.event) for p in kinds if isinstance(p, EventWaitNodeParams)]
        freed = {p.address for p in kinds if isinstance(p, FreeNodeParams)}
        made = [p.address for p in kinds if isinstance(p, AllocNodeParams)]
        self.allocations = [reserved[address] for address in made]
        self.leaves = [reserved[address] for address in made if address not in freed]
        self.frees = [reserved[a] for a in freed if a not in made and a in reserved]

    def survey_conditions(self) -> None:
        """Makes the values of conditional handles known; those of running launches stay."""
        values, defaults = self.conditions.values, {}
        for node in self.snapshot.walk():
            if isinstance(node.params, ConditionalNodeParams):
                condition = node.condition
                values.setdefault(condition.handle, 0)
                if condition.reset_at_launch:
                    defaults[int(condition.handle)] = condition.default
        self.conditions.defaults = defaults

    def bind(self) -> None:
        """Makes the task of a launch from the steps as they are now."""
        steps = tuple(self.steps)
        values, defaults = self.conditions.values, self.conditions.defaults
        if defaults:

            def task() -> None:
                values.update(defaults)
                for step in steps:
                    step()

        else:

            def task() -> None:
                for step in steps:
                    step()

        self.task = task

    def outermost(self, node: Node) -> Node:
        """The node of the outermost graph that this one is, or is inside of."""
        while node.graph.owner is not None:
            node = node.graph.owner
        return node

    def replace_step(self, node: Node, step: Step) -> None:
        """Gives a node of the outermost graph another step."""
        steps = self.steps.copy()
        steps[self.positions[node]] = step
        self.steps = steps


def record_step(executable: Executable, event: int) -> Step:
    def step() -> None:
        executable.launching.records[event].stamp()

    return step


def wait_step(executable: Executable, event: int) -> Step:
    def step() -> None:
        mark = executable.launching.waits.get(event)
        if mark is not None:
            mark.wait()

    return step


def launch_task(
    executable: Executable, context: HostContext, records: Mapping[int, Event], number: int
) -> Callable[[], None]:
    """The task of a launch whose nodes record or wait for events, or own memory.

    `number` is the launch's number in its queue; the events' marks are taken now, as CUDA does.
    """
    task, leaves, memory = executable.task, list(executable.leaves), context.memory
    auto_free = bool(executable.flags & InstantiateFlags.AUTO_FREE_ON_LAUNCH)
    assert executable.last is not None
    queue = executable.last.queue
    latches = {handle: Latch(queue, number) for handle in executable.records}
    waits = {
        handle: mark
        for handle in executable.waits
        if handle not in latches and (mark := records[handle].mark) is not None
    }
    for handle, latch in latches.items():
        records[handle].mark = latch
        records[handle].captured = None
    state = LaunchState(latches, waits)

    def run() -> None:
        if auto_free:
            for allocation in leaves:
                memory.remove(allocation)
        executable.launching = state
        task()

    return run


def take_memory(executable: Executable, call: str, free: int) -> None:
    """Accounts for a launch's memory when it is submitted, or refuses the launch."""
    auto_free = executable.flags & InstantiateFlags.AUTO_FREE_ON_LAUNCH
    for allocation in executable.leaves:
        if allocation.outstanding and not auto_free:
            raise driver_error(
                Status.INVALID_VALUE,
                call,
                f"the last launch's memory at {allocation.address:#x} was not freed "
                "(or instantiate with AUTO_FREE_ON_LAUNCH)",
            )
    for allocation in executable.frees:
        if not allocation.outstanding:
            raise driver_error(
                Status.INVALID_VALUE, call, f"nothing is allocated at {allocation.address:#x}"
            )
    wanted = sum(a.nbytes for a in executable.allocations if not a.outstanding)
    if wanted > free:
        raise driver_error(
            Status.OUT_OF_MEMORY, call, f"its alloc nodes want {wanted} bytes, {free} are free"
        )
    for allocation in executable.leaves:
        allocation.outstanding = True
    for allocation in executable.frees:
        allocation.outstanding = False


def check_instantiable(
    graph: GraphDefinition,
    known: Callable[[Node], bool],
    flags: InstantiateFlags,
    *,
    instances: bool,
) -> None:
    """Raises what cuGraphInstantiate refuses, with the node that is at fault.

    `instances`: whether the graph has an executable already.
    """
    call = "graph_instantiate"
    if flags & InstantiateFlags.DEVICE_LAUNCH:
        raise driver_error(Status.NOT_SUPPORTED, call, "launches from kernels")
    if graph.capturing:
        raise driver_error(Status.INVALID_VALUE, call, "the graph is still being captured")
    for node in graph.walk():
        if node.graph.body and node.kind not in BODY_KINDS:
            raise driver_error(
                Status.INVALID_VALUE,
                call,
                f"a {node.kind.name} node in the body of a conditional node",
                node=node.handle,
            )
        if not known(node):
            raise driver_error(
                Status.INVALID_HANDLE,
                call,
                "its function or event is gone",
                node=node.handle,
            )
    for condition in graph.conditions.values():
        if not condition.used:
            raise driver_error(
                Status.INVALID_VALUE,
                call,
                f"conditional handle {condition.handle:#x} has no conditional node",
            )
    if instances and any(node.kind in SINGLE_KINDS for node in graph.walk()):
        raise driver_error(
            Status.NOT_SUPPORTED,
            call,
            "a graph with alloc, free or conditional nodes has one executable at a time",
        )
