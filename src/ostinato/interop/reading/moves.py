"""Copies of a call's arrays as nodes of its graph, instead of launches around it.

A graph works on buffers of its own.  Its first node copies the caller's arrays into these, and its
last node copies the outputs into new arrays.  One argument of the first node holds the addresses of
all these arrays, and is set before each replay; it may hold further words for nodes after it.  So a
call costs one change of a node and one launch, for any number of arrays.  The library copies arrays
that have gaps, or that are too many, outside the graph.
"""

from __future__ import annotations

import copy
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
    MemoryRange,
    Node,
    Source,
    Stream,
    host_kernel,
    launch,
)
from ostinato.errors import ContextPoisonedError, OstinatoError, OutOfMemoryError
from ostinato.lowlevel import FILL, NotLaunched, fill_kernel

MOST = 16
"""The most arrays that can be copied in, and the most that can be copied out."""
_WORDS = struct.Struct(f"{2 * MOST}Q")
_PLAN = struct.Struct(f"{2 * MOST + 1}Q2I")
_THREADS = 256
_MOST_BLOCKS = 1056
_FIRST, _LAST = "ostinato_move_in", "ostinato_move_out"
NAMES = (_FIRST, _LAST, FILL)
"""Names of the kernels that a graph has in addition to the function's own."""


def dense(shape: Sequence[int], strides: Sequence[int], unit: int = 1) -> bool:
    """True if an array is one run of memory, in any order of its axes.

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
    """Returns the source of the two kernels."""
    return Source(
        Path(__file__).with_name("moves.cu").read_text(encoding="utf-8"),
        host=[_move_in, _move_out],
        name="moves.cu",
    )


class Moves:
    """The copies that the nodes of one graph make.

    `node`: the index of its first node.  `inputs`: the number of arrays that it copies in.
    `outputs`: the indices of the outputs that it copies; all that must be copied, or none.
    `further`: a function that returns the words of the next launch behind those of the outputs, of
    which there are `room` bytes (`Mover.room`)."""

    def __init__(
        self,
        nodes: Sequence[Node],
        inputs: int,
        outputs: tuple[int, ...],
        further: Callable[[], bytes] | None = None,
    ) -> None:
        self.node = [node.name for node in nodes].index(_FIRST)
        self.inputs, self.outputs, self.further = inputs, outputs, further
        words = inputs + len(outputs)
        pack = struct.Struct(
            f"{words}Q{_WORDS.size - 8 * words}{'x' if further is None else 's'}"
        ).pack
        self.packed: Callable[..., bytes] = pack
        """A function that packs the first node's argument: addresses of arrays, then of new
        outputs."""
        if further is not None:
            self.packed = lambda *addresses: pack(*addresses, further())
        self.change: Callable[[bytes], Callable[[GraphExec], None]]
        """A function of the bytes of `packed`; returns a C function that changes an executable."""
        self.change = partial(operator.methodcaller, "set", self.node, 0)

    def stage(
        self, executable: GraphExec, address: Callable[[Any], int], arrays: Sequence[Any]
    ) -> None:
        """Makes the next launch of an executable copy arrays: those of a call in, then outputs into
        these.  Raises NotLaunched if the executable refuses."""
        try:
            self.change(self.packed(*map(address, arrays)))(executable)
        except ContextPoisonedError:
            raise
        except OstinatoError as error:
            raise NotLaunched(str(error)) from error


class Mover:
    """The kernels on a device, and the table that passes addresses from the first to the last.

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
        """Returns the mover of a device; None if kernels cannot be compiled."""
        try:
            return cls(device)
        except OutOfMemoryError:
            raise  # a later try may find memory
        except OstinatoError:
            return None

    def apart(self) -> Mover:
        """Returns one with a table of its own, for a chain: other graphs of the function may run
        between its first node and its last."""
        other = copy.copy(self)
        other.table = self.device.zeros(MOST, "u64")
        return other

    def room(self, outputs: int) -> MemoryRange:
        """Returns the memory of the words that the first node sets behind those of the outputs."""
        return MemoryRange(self.table.address + 8 * outputs, 8 * (MOST - outputs))

    def begin(self, stream: Stream, inputs: Sequence[tuple[int, int]]) -> None:
        """Captures the first node.  `inputs`: addresses and bytes of the graph's own inputs."""
        plan = self._plan(inputs, len(inputs), MOST)
        config = _config([nbytes for _, nbytes in inputs])
        launch(stream, self._first, config, bytes(_WORDS.size), plan)

    def end(self, stream: Stream, outputs: Sequence[tuple[int, int]]) -> None:
        """Captures the last node.  `outputs`: addresses and bytes of the outputs."""
        plan = self._plan(outputs, 0, len(outputs))
        launch(stream, self._last, _config([nbytes for _, nbytes in outputs]), plan)

    def _plan(self, arrays: Sequence[tuple[int, int]], count: int, outs: int) -> bytes:
        rest = (0,) * (MOST - len(arrays))
        places, sizes = [a for a, _ in arrays], [n for _, n in arrays]
        return _PLAN.pack(*places, *rest, *sizes, *rest, self.table.address, count, outs)

    @staticmethod
    def find(nodes: Sequence[Node], inputs: int, outputs: tuple[int, ...]) -> Moves | None:
        """Returns the copies of a graph that `begin` put its node into; None if it has no other
        nodes."""
        if {node.name for node in nodes} <= {_FIRST, _LAST}:
            return None
        return Moves(nodes, inputs, outputs)


def _config(sizes: Sequence[int]) -> LaunchConfig:
    """Returns a launch whose threads copy 64 bytes of the largest array each, or more if it is very
    large."""
    blocks = -(-max(sizes, default=0) // (64 * _THREADS))
    return LaunchConfig(
        grid=(min(max(1, blocks), _MOST_BLOCKS), max(1, len(sizes))), block=_THREADS
    )
