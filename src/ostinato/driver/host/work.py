"""What each kind of work does on the host driver: parameters compiled to a call without arguments.

The same steps run eagerly on a stream and as nodes of a graph.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ostinato.driver.api import (
    ConditionalKind,
    FunctionInfo,
    KernelNodeParams,
    MemcpyNodeParams,
    MemOp,
    MemOpKind,
    MemsetNodeParams,
)
from ostinato.driver.host.kernel import HostKernel, HostLaunch
from ostinato.errors import Status, driver_error

if TYPE_CHECKING:
    from ostinato.driver.host.queue import HostContext

__all__ = [
    "Conditions",
    "LoadedFunction",
    "Step",
    "batch_step",
    "conditional_step",
    "host_step",
    "kernel_step",
    "memcpy_step",
    "memset_step",
    "nothing",
    "run_steps",
]

logger = logging.getLogger(__name__)

Step: TypeAlias = Callable[[], object]

_UNSIGNED: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.uint16),
    4: np.dtype(np.uint32),
    8: np.dtype(np.uint64),
}


def nothing() -> None:
    """What an empty or a disabled node does."""


def run_steps(steps: Sequence[Step]) -> None:
    for step in steps:
        step()


@dataclass(slots=True, eq=False)
class LoadedFunction:
    """A kernel of a loaded module.  `call` is replaced when the module is unloaded."""

    handle: int
    kernel: HostKernel
    info: FunctionInfo
    call: Callable[..., object]
    allowed_shared: int
    module: int
    accepted_layout: object = None
    """The layout of the last launch, which was found right, so that it is not checked again."""

    def unload(self) -> None:
        name = self.kernel.name

        def gone(*_: object) -> None:
            raise driver_error(
                Status.ILLEGAL_ADDRESS, name, "the module of this kernel was unloaded before"
            )

        self.call = gone


class Conditions:
    """The values of an executable's conditional handles; some are reset at each launch."""

    __slots__ = ("defaults", "values")

    def __init__(self) -> None:
        self.values: dict[int, int] = {}
        self.defaults: dict[int, int] = {}

    def set(self, handle: int, value: int) -> None:
        if handle not in self.values:
            raise driver_error(
                Status.INVALID_VALUE,
                "set_conditional",
                f"{handle:#x} is no conditional handle of the graph that is running",
            )
        self.values[handle] = int(value) & 0xFFFF_FFFF


def kernel_step(
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
    raise driver_error(
        Status.INVALID_VALUE,
        "set_conditional",
        f"{handle:#x} = {value}: this kernel does not run inside a graph",
    )


def memcpy_step(context: HostContext, params: MemcpyNodeParams) -> Step:
    view = context.memory.view
    dst, src, width, height, depth = (
        params.dst,
        params.src,
        params.width,
        params.height,
        params.depth,
    )
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


def memset_step(context: HostContext, params: MemsetNodeParams) -> Step:
    view = context.memory.view
    size, width, height, value = params.element_size, params.width, params.height, params.value
    dst = params.dst
    dtype = _UNSIGNED[size]
    if height == 1:

        def flat() -> None:
            view(dst, width * size, "memset").view(dtype).fill(value)

        return flat
    pitch = params.pitch or width * size

    def deep() -> None:
        for row in range(height):
            view(dst + row * pitch, width * size, "memset").view(dtype).fill(value)

    return deep


def host_step(function: Callable[[], object]) -> Step:
    def step() -> None:
        try:
            function()
        except BaseException:
            # The caller has gone on and cannot catch it.  CUDA does not report it either.
            logger.exception("a host function raised; the stream goes on")

    return step


def batch_step(context: HostContext, operations: tuple[MemOp, ...]) -> Step:
    def step() -> None:
        for operation in operations:
            dtype = _UNSIGNED[operation.size]
            cell = context.memory.view(operation.address, operation.size, "batch_mem_op").view(
                dtype
            )
            if operation.kind == MemOpKind.WRITE:
                cell[0] = operation.value & ((1 << 8 * operation.size) - 1)
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
