"""Copies of a call's arrays as nodes of its graph, instead of launches around it.

A graph works on buffers of its own.  Its first node copies the caller's arrays into them, its last
one copies the outputs into arrays that were made for the caller.  Where all of these lie is one
argument of the first node, which is set before each replay.  So a call costs one change of a node
and one launch, however many arrays it has.  Arrays that have gaps, or too many of them, are copied
by the library, beside the graph.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ostinato import (
    Device,
    GraphExec,
    LaunchConfig,
    Node,
    Source,
    Stream,
    host_kernel,
    launch,
)
from ostinato.errors import OstinatoError, OutOfMemoryError
from ostinato.lowlevel import FILL, fill_kernel

MOST = 16
"""Arrays that can be copied in, and out."""
_WORDS = struct.Struct(f"{2 * MOST}Q")
_PLAN = struct.Struct(f"{2 * MOST + 1}Q2I")
_THREADS = 256
_MOST_BLOCKS = 1056
_FIRST, _LAST = "ostinato_move_in", "ostinato_move_out"
NAMES = (_FIRST, _LAST, FILL)
"""Of the kernels that are not the function's own."""


def dense(shape: Sequence[int], strides: Sequence[int], unit: int = 1) -> bool:
    """Whether an array is one piece of memory, in whatever order of its axes.

    `unit`: the stride of neighbours."""
    for stride, size in sorted((s, n) for s, n in zip(strides, shape, strict=True) if n != 1):
        if stride != unit:
            return 0 in shape
        unit *= size
    return True


@host_kernel(f"moves: bytes[{_WORDS.size}], plan: bytes[{_PLAN.size}]", name=_FIRST)
def _move_in(how: Any, moves: bytes, plan: bytes) -> None:
    words, (*numbers, table, count, outs) = _WORDS.unpack(moves), _PLAN.unpack(plan)
    if outs:
        how.memory(table, 8 * outs)[:] = bytearray(moves[8 * count : 8 * (count + outs)])
    for at in range(count):
        _copy(how, numbers[at], words[at], numbers[MOST + at])


@host_kernel(f"plan: bytes[{_PLAN.size}]", name=_LAST)
def _move_out(how: Any, plan: bytes) -> None:
    *numbers, table, _, outs = _PLAN.unpack(plan)
    for at in range(outs):
        to = int.from_bytes(bytes(how.memory(table + 8 * at, 8)), "little")
        _copy(how, to, numbers[at], numbers[MOST + at])


def _copy(how: Any, to: int, source: int, nbytes: int) -> None:
    if to and source and nbytes:
        how.memory(to, nbytes)[:] = how.memory(source, nbytes).copy()


def source() -> Source:
    """The kernels."""
    return Source(
        Path(__file__).with_name("moves.cu").read_text(encoding="utf-8"),
        host=[_move_in, _move_out],
        name="moves.cu",
    )


class Moves:
    """How one graph copies.

    `node` is its first node, by its index; `outputs` which outputs it copies: all that are copied,
    or none."""

    def __init__(self, node: int, inputs: int, outputs: tuple[int, ...]) -> None:
        self.node, self.outputs = node, outputs
        words = inputs + len(outputs)
        self.packed = struct.Struct(f"{words}Q{_WORDS.size - 8 * words}x").pack
        """What the first node is given: addresses of the call's arrays, and of new outputs."""
        self.change: Callable[[bytes], Callable[[GraphExec], None]]
        """For what `packed` gave: how an executable is changed, without a frame of Python."""
        self.change = partial(operator.methodcaller, "set", node, 0)


class Mover:
    """The kernels on a device, and the table through which they pass addresses.

    The graphs that share it must run one after the other.
    """

    def __init__(self, device: Device) -> None:
        code = source()
        self.device = device
        self._first, self._last = [
            device.modules.get_or_compile(code, name) for name in (_FIRST, _LAST)
        ]
        fill_kernel(device)  # compiled now: during a capture a driver may refuse to load code
        self.table = device.zeros(MOST, "u64")

    @classmethod
    def of(cls, device: Device) -> Mover | None:
        """None where kernels cannot be compiled."""
        try:
            return cls(device)
        except OutOfMemoryError:
            raise  # another time there may be some
        except OstinatoError:
            return None

    def begin(self, stream: Stream, inputs: Sequence[tuple[int, int]]) -> None:
        """The first node, into a capture.  `inputs`: addresses and bytes of the graph's own."""
        plan = self._plan(inputs, len(inputs), MOST)
        config = _config([nbytes for _, nbytes in inputs])
        launch(stream, self._first, config, bytes(_WORDS.size), plan)

    def end(self, stream: Stream, outputs: Sequence[tuple[int, int]]) -> None:
        """The last node."""
        plan = self._plan(outputs, 0, len(outputs))
        launch(stream, self._last, _config([nbytes for _, nbytes in outputs]), plan)

    def _plan(self, arrays: Sequence[tuple[int, int]], count: int, outs: int) -> bytes:
        rest = (0,) * (MOST - len(arrays))
        places, sizes = [a for a, _ in arrays], [n for _, n in arrays]
        return _PLAN.pack(*places, *rest, *sizes, *rest, self.table.address, count, outs)

    @staticmethod
    def find(nodes: Sequence[Node], inputs: int, outputs: tuple[int, ...]) -> Moves | None:
        """How a graph copies that `begin` put its node into; None if it holds nothing else."""
        names = [node.name for node in nodes]
        if {*names} <= {_FIRST, _LAST}:
            return None
        return Moves(names.index(_FIRST), inputs, outputs)


def _config(sizes: Sequence[int]) -> LaunchConfig:
    """Each thread copies 64 bytes of the largest array, or more of a very large one."""
    blocks = -(-max(sizes, default=0) // (64 * _THREADS))
    return LaunchConfig(
        grid=(min(max(1, blocks), _MOST_BLOCKS), max(1, len(sizes))), block=_THREADS
    )
