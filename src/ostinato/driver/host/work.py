"""The work of the host driver: checks parameters, and compiles them to calls without arguments.

The same steps run eagerly on a stream and as nodes of a graph.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ostinato.driver.api import (
    BatchMemOpNodeParams,
    ConditionalKind,
    EventRecordNodeParams,
    EventWaitNodeParams,
    HostNodeParams,
    KernelNodeParams,
    MemcpyNodeParams,
    MemOp,
    MemOpKind,
    MemsetNodeParams,
    NodeParams,
)
from ostinato.driver.callbacks import run_host_function
from ostinato.driver.host.definition import refuse_opaque
from ostinato.driver.host.handles import HandleTable, invalid
from ostinato.driver.host.kernel import HostLaunch
from ostinato.driver.host.modules import LoadedFunction
from ostinato.driver.host.queue import HostContext
from ostinato.driver.host.streams import HostEvent
from ostinato.records import dataclass

if TYPE_CHECKING:
    import numpy.typing as npt

Step: TypeAlias = Callable[[], object]

_UNSIGNED: dict[int, np.dtype[Any]] = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}


def nothing() -> None:
    """Runs an empty or a disabled node."""


def run_steps(steps: Sequence[Step]) -> None:
    for step in steps:
        step()


@dataclass(slots=True, eq=False)
class Conditions:
    """The values of an executable's conditional handles.  A launch first sets the `defaults`."""

    values: dict[int, int] = field(default_factory=dict)
    defaults: dict[int, int] = field(default_factory=dict)

    def set(self, handle: int, value: int) -> None:
        if handle not in self.values:
            raise invalid(
                "set_conditional",
                f"{handle:#x} is no conditional handle of the graph that is running",
            )
        self.values[handle] = int(value) & 0xFFFF_FFFF


class WorkCompiler:
    """Checks the parameters of work and compiles them to steps.

    `functions` and `events` are the objects that parameters name by handle.
    """

    def __init__(self, context: HostContext) -> None:
        self.context = context
        self.functions: HandleTable[LoadedFunction] = HandleTable("function")
        self.events: HandleTable[HostEvent] = HandleTable("event")

    def check(self, call: str, params: NodeParams) -> None:
        """Raises for invalid parameters, on a stream or in a graph.

        Child graphs, conditions, allocations and frees are checked by the graph they are added to.
        """
        match params:
            case KernelNodeParams():
                function = self.functions.find(call, params.function)
                function.check(call, params.config, params.arguments)
            case MemcpyNodeParams():
                _check_memcpy(call, params)
            case MemsetNodeParams():
                _check_memset(call, params)
            case HostNodeParams(function=None):
                raise invalid(call, "a host node needs a function")
            case EventRecordNodeParams() | EventWaitNodeParams():
                self.events.find(call, params.event)
            case BatchMemOpNodeParams():
                if not params.operations:
                    raise invalid(call, "no operations")
                for operation in params.operations:
                    if operation.size not in (4, 8) or operation.address % operation.size:
                        raise invalid(call, f"{operation}")
            case _:
                refuse_opaque(call, params)

    def knows(self, params: NodeParams) -> bool:
        """True if the function or event that parameters name is alive."""
        match params:
            case KernelNodeParams():
                return params.function in self.functions
            case EventRecordNodeParams() | EventWaitNodeParams():
                return params.event in self.events
            case _:
                return True

    def step(self, call: str, params: NodeParams, conditions: Conditions | None = None) -> Step:
        """Compiles work that is independent of the graph that contains it.

        `conditions` are those that a kernel in a graph may set.
        """
        match params:
            case KernelNodeParams():
                function = self.functions.find(call, params.function)
                return _kernel_step(self.context, function, params, conditions)
            case MemcpyNodeParams():
                return _memcpy_step(self.context, params)
            case MemsetNodeParams():
                return _memset_step(self.context, params)
            case HostNodeParams():
                assert params.function is not None, "checked when it was submitted or added"
                return partial(run_host_function, params.function, self.context.listeners)
            case BatchMemOpNodeParams():
                return _batch_step(self.context, params.operations)
            case _:
                return nothing


def _check_memcpy(call: str, params: MemcpyNodeParams) -> None:
    refuse_opaque(call, params)
    pitches = (params.dst_pitch, params.src_pitch)
    heights = (params.dst_height, params.src_height)
    if min(params.width, params.height, params.depth) < 1 or min(*pitches, *heights) < 0:
        raise invalid(call, f"{params}")
    if any(0 < pitch < params.width for pitch in pitches) or any(
        0 < height < params.height for height in heights
    ):
        raise invalid(call, f"rows overlap: {params}")


def _check_memset(call: str, params: MemsetNodeParams) -> None:
    size = params.element_size
    if (
        size not in (1, 2, 4)
        or params.width < 1
        or params.height < 1
        or not 0 <= params.value < 1 << 8 * size
        or params.dst % size
        or (params.height > 1 and (params.pitch < params.width * size or params.pitch % size))
    ):
        raise invalid(call, f"{params}")


def _kernel_step(
    context: HostContext,
    function: LoadedFunction,
    params: KernelNodeParams,
    conditions: Conditions | None,
) -> Step:
    config = params.config
    setter = _no_conditions if conditions is None else conditions.set
    memory, kernel = context.memory, function.kernel

    def view(address: int, nbytes: int) -> npt.NDArray[np.uint8]:
        return memory.view(address, nbytes, kernel.name)

    launch = HostLaunch(config.grid, config.block, config.cluster, config.shared, setter, view)
    key = (function.handle, params.arguments.data)
    known = memory.decoded

    def step() -> None:
        values = known.get(key)
        if values is None:
            values = memory.decode(key, kernel)
        function.call(launch, *values)

    return step


def _no_conditions(handle: int, value: int) -> None:
    raise invalid(
        "set_conditional", f"{handle:#x} = {value}: this kernel does not run inside a graph"
    )


def _memcpy_step(context: HostContext, params: MemcpyNodeParams) -> Step:
    view = context.memory.view
    dst, src = params.dst, params.src
    width, height, depth = params.width, params.height, params.depth
    if height == 1 and depth == 1:

        def flat() -> None:
            np.copyto(view(dst, width, "memcpy"), view(src, width, "memcpy"))

        return flat

    dst_row, src_row = params.dst_pitch or width, params.src_pitch or width
    dst_slice = dst_row * (params.dst_height or height)
    src_slice = src_row * (params.src_height or height)

    def deep() -> None:
        np.copyto(
            _block(view, dst, width, height, depth, dst_row, dst_slice),
            _block(view, src, width, height, depth, src_row, src_slice),
        )

    return deep


def _block(
    view: Callable[[int, int, str], npt.NDArray[np.uint8]],
    address: int,
    width: int,
    height: int,
    depth: int,
    row: int,
    slice_: int,
) -> npt.NDArray[np.uint8]:
    extent = (depth - 1) * slice_ + (height - 1) * row + width
    flat = view(address, extent, "memcpy")
    return np.lib.stride_tricks.as_strided(flat, (depth, height, width), (slice_, row, 1))


def _memset_step(context: HostContext, params: MemsetNodeParams) -> Step:
    view = context.memory.view
    size, width, height, value = params.element_size, params.width, params.height, params.value
    dst = params.dst
    dtype = _UNSIGNED[size]
    pitch = params.pitch or width * size

    def step() -> None:
        for row in range(height):
            view(dst + row * pitch, width * size, "memset").view(dtype).fill(value)

    return step


def _batch_step(context: HostContext, operations: tuple[MemOp, ...]) -> Step:
    def step() -> None:
        for operation in operations:
            size = operation.size
            cell = context.memory.view(operation.address, size, "batch_mem_op").view(
                _UNSIGNED[size]
            )
            if operation.kind == MemOpKind.WRITE:
                cell[0] = operation.value & ((1 << 8 * size) - 1)
            else:
                _wait_for(context, cell, operation)

    return step


def _wait_for(context: HostContext, cell: npt.NDArray[Any], operation: MemOp) -> None:
    pause = 20e-6
    while not _holds(int(cell[0]), operation):
        if context.stopped:
            return
        time.sleep(pause)
        pause = min(2 * pause, 1e-3)


def _holds(found: int, operation: MemOp) -> bool:
    bits = 8 * operation.size
    mask = (1 << bits) - 1
    wanted = operation.value & mask
    match operation.kind:
        case MemOpKind.WAIT_GEQ:
            # Cyclic, as CUDA defines it: the signed difference is not negative.
            return (found - wanted) & mask < 1 << (bits - 1)
        case MemOpKind.WAIT_EQ:
            return found == wanted
        case MemOpKind.WAIT_AND:
            return found & wanted != 0
        case _:
            return ~(found | wanted) & mask != 0


def conditional_step(
    context: HostContext,
    kind: ConditionalKind,
    handle: int,
    bodies: tuple[tuple[Step, ...], ...],
    conditions: Conditions,
) -> Step:
    values = conditions.values

    def branch() -> None:
        if values[handle]:
            run_steps(bodies[0])
        elif len(bodies) > 1:
            run_steps(bodies[1])

    def loop() -> None:
        body = bodies[0]
        while values[handle] and not context.stopped:
            for step in body:
                step()

    def switch() -> None:
        chosen = values[handle]
        if chosen < len(bodies):
            run_steps(bodies[chosen])

    return {
        ConditionalKind.IF: branch,
        ConditionalKind.WHILE: loop,
        ConditionalKind.SWITCH: switch,
    }[kind]
