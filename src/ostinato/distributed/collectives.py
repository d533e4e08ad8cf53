"""Collectives as operations of the library: submitted, captured, recorded and replayed like
launches.

    collectives = open_collectives(group, device)
    for operation in collectives.all_reduce(source, out):
        stream.submit(operation)

Each kind of device has a backend: on the host the ranks exchange through the group's channel
(here), on CUDA by NCCL (`nccl`) and, for small messages inside one NVLink domain, in each other's
memory (`exchange`).

    all_reduce    out = the sum of every rank's `source`
    accumulate    target += the sum of every rank's `partial`; partial = 0
    all_gather    out = every rank's `source`, joined along the last axis in the order of ranks
    broadcast     buffer = the buffer of rank `root`

Sums have the same bits on all ranks.  Every collective of one `Collectives` also reads and writes
one word of its own, so that recorded graphs, whose edges come from memory accesses, keep
collectives in order: two that swapped places on one rank would wait for each other forever.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ostinato import (
    Buffer,
    Device,
    HostKernel,
    LaunchConfig,
    Operation,
    Source,
    host_kernel,
    prepare,
)
from ostinato.distributed.group import Group, checked_root
from ostinato.errors import GroupError, InputError
from ostinato.lowlevel import Closeable

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Key: TypeAlias = tuple[object, ...]


def remembered(made: Mapping[Key, tuple[Operation, ...]], key: Key) -> tuple[Operation, ...] | None:
    """Returns the operations made for a key of addresses, or None.  None too once memory that they
    use is closed: operations do not keep it alive, so other memory may be at its address."""
    found = made.get(key)
    return found if found is not None and all(one.usable for one in found) else None


@dataclass(frozen=True, slots=True)
class Gathered:
    """The layout of an all-gather: `lines` pieces of `nbytes` from every rank."""

    lines: int
    nbytes: int

    @classmethod
    def of(cls, source: Buffer, out: Buffer, size: int) -> Gathered:
        """Computes the layout.  Raises InputError for buffers that do not fit together."""
        shape = source.shape
        wanted = (*shape[:-1], shape[-1] * size) if shape else ()
        if not shape or out.dtype != source.dtype or out.shape != wanted:
            raise InputError(
                f"all_gather of {source.dtype} {list(shape)} from {size} ranks: out is "
                f"{out.dtype} {list(out.shape)}, must be {source.dtype} {list(wanted)}"
            )
        return cls(math.prod(shape[:-1]), shape[-1] * source.dtype.itemsize)


@dataclass(frozen=True, slots=True)
class ExchangedSum:
    """A sum over ranks that a kernel computes itself, with `Collectives.windows`
    (`kernels/exchange.cuh`).

    `words`, `header`, `blocks`, `scattered`: the macros EXCHANGE_WORDS, EXCHANGE_HEADER, and so on.
    `grid`: the blocks of the launch, of EXCHANGE_THREADS threads; where ranks share rows, the most
    blocks.
    """

    words: int
    header: int
    blocks: int
    scattered: bool
    grid: int


class Collectives(Closeable, ABC):
    """Collectives on one device, for work of one stream at a time.

    `name`: describes the backend.  Methods return operations and run nothing; they may compile,
    load and, the first time, communicate with the other ranks, so call them before a capture.  All
    ranks call them in the same order with the same sizes.  Sums are float32.  Raise InputError,
    GroupError.
    """

    name: str
    windows: Buffer | None = None
    """The addresses of the ranks' memory, for kernels that compute sums themselves.  They belong to
    the collectives: close what uses them first."""
    room: Buffer | None = None
    """This rank's memory that kernels of the other ranks can read and write, at the same place of
    each window (`kernels/exchange.cuh`), as many bytes as were asked for.  It belongs to the
    collectives too."""

    def __init__(self, group: Group, device: Device) -> None:
        self.group = group
        self.device = device
        self.order: Buffer = device.zeros(1, np.uint32, name="collectives in order")

    @abstractmethod
    def all_reduce(self, source: Buffer, out: Buffer) -> tuple[Operation, ...]:
        """Returns operations that set `out` to the sum of every rank's `source`; float32 of one
        shape.  Both may be the same buffer, but must not overlap partly."""

    @abstractmethod
    def accumulate(
        self, target: Buffer, partial: Buffer, *, programmatic: bool = False
    ) -> tuple[Operation, ...]:
        """Returns operations that add the sum of every rank's `partial` to `target` and set
        `partial` to 0: float32 of one shape, in disjoint memory.

        `programmatic`: uses programmatic dependent launch, if `programmatic` allows it: the kernel
        starts before its predecessor on the stream ends, and then waits for it.  That predecessor
        must have waited for its own predecessor.
        """

    @abstractmethod
    def all_gather(
        self, source: Buffer, out: Buffer, *, programmatic: bool = False
    ) -> tuple[Operation, ...]:
        """Returns operations that gather every rank's `source` [..., n] into `out` [..., n *
        ranks].  `programmatic`: see `accumulate`."""

    @abstractmethod
    def broadcast(self, buffer: Buffer, root: int = 0) -> tuple[Operation, ...]:
        """Returns operations that copy the buffer of rank `root` to all ranks."""

    def sums(self, count: int) -> Buffer | None:
        """Returns memory with which kernels can sum up to `count` float32 values over all ranks
        themselves (`kernels/words.cuh`), or None if they cannot.  The memory belongs to the
        collectives: close what uses it first."""
        return None

    def exchanged_sum(self, count: int) -> ExchangedSum | None:
        """Returns how kernels compute a sum of `count` float32 values per rank, or None if they
        cannot themselves."""
        return None

    def shared_sum(self) -> ExchangedSum | None:
        """Returns how kernels compute a sum of values in `room`, of which each rank adds a share;
        None without a room."""
        return None

    def programmatic(self, nbytes: int, *, gathers: bool = False) -> bool:
        """True if a sum (a gather if `gathers`) of `nbytes` per rank is one kernel that can use
        programmatic dependent launch, also for the kernel behind it."""
        return False

    def described(self) -> str:
        """Describes the backend and its use so far."""
        return self.name

    @abstractmethod
    def abort(self) -> None:
        """Ends waits for other ranks on the device, without a result.  Callable from any thread."""

    def close(self) -> None:
        """Frees the memory once no work of it is under way.  Idempotent."""
        self.order.close()

    # --- arguments
    def _same(self, what: str, one: Buffer, other: Buffer) -> int:
        """Returns the number of float32 values in both; raises InputError for unequal buffers."""
        for buffer in (one, other):
            if buffer.dtype != np.float32 or buffer.shape != one.shape or not buffer.nbytes:
                raise InputError(
                    f"{what}: {one.dtype} {list(one.shape)} and {other.dtype} "
                    f"{list(other.shape)}; both must be float32 of one shape"
                )
        first, last = sorted((one.address, other.address))
        if last < first + one.nbytes and (first < last or what == "accumulate"):
            raise InputError(f"{what}: the two buffers share memory")
        return math.prod(one.shape)


def summed(parts: Sequence[Floats]) -> Floats:
    """Returns the sum of the ranks' values, added in the order of ranks."""
    total = parts[0].copy()
    with np.errstate(all="ignore"):
        for part in parts[1:]:
            total += part
    return total


def bytes_of(nbytes: int, kind: int) -> str:
    """Describes bytes of a dtype.  `kind`: the code of the dtype's letter, which may be one that
    NumPy lacks and another library adds (bfloat16 of ml_dtypes is "E")."""
    letter = chr(kind)
    name = np.dtype(letter).name if letter in np.typecodes["All"] else letter
    return f"{nbytes} bytes of {name}"


class HostCollectives(Collectives):
    """Collectives through the group's channel, by kernels that wait for the other ranks' parts.

    Once the group has failed they no longer wait, and write bytes that are NaN as float32.
    """

    name = "the group's channel"

    def __init__(self, group: Group, device: Device) -> None:
        super().__init__(group, device)
        self._lane = group.new_lane(device.name)
        self._source = Source(host=self._kernels(), name="collectives")

    def _operation(self, kernel: str, *arguments: object) -> tuple[Operation, ...]:
        loaded = self.device.modules.get_or_compile(self._source, kernel)
        return (prepare(loaded, LaunchConfig(1, 1), self.order, *arguments),)

    def all_reduce(self, source: Buffer, out: Buffer) -> tuple[Operation, ...]:
        return self._operation("all_reduce", source, out, self._same("all_reduce", source, out))

    def accumulate(
        self, target: Buffer, partial: Buffer, *, programmatic: bool = False
    ) -> tuple[Operation, ...]:
        count = self._same("accumulate", target, partial)
        return self._operation("accumulate", target, partial, count)

    def all_gather(
        self, source: Buffer, out: Buffer, *, programmatic: bool = False
    ) -> tuple[Operation, ...]:
        layout = Gathered.of(source, out, self.group.size)
        flat = source.view(0, source.nbytes, np.uint8), out.view(0, out.nbytes, np.uint8)
        kind = ord(source.dtype.char)
        return self._operation("all_gather", *flat, layout.lines, layout.nbytes, kind)

    def broadcast(self, buffer: Buffer, root: int = 0) -> tuple[Operation, ...]:
        flat = buffer.view(0, buffer.nbytes, np.uint8)
        root, kind = checked_root(root, self.group.size), ord(buffer.dtype.char)
        return self._operation("broadcast", flat, buffer.nbytes, kind, root)

    def abort(self) -> None:
        """Does nothing: a failed channel ends the waits."""

    def close(self) -> None:
        super().close()
        self.group.detach(self)

    # --- kernels
    def _parts(self, label: str, payload: bytes) -> list[bytes] | None:
        """Returns every rank's part; None once the group has failed."""
        group = self.group
        if group.failure is not None:
            return None
        try:
            parts = group.channel.exchange(self._lane, label, payload, group.deadline)
        except GroupError:
            return None
        group.note_progress()
        return parts

    def _sum(self, label: str, values: Floats) -> Floats | None:
        parts = self._parts(f"{label} of {values.size} float32", values.tobytes())
        return None if parts is None else summed([np.frombuffer(p, np.float32) for p in parts])

    def _kernels(self) -> dict[str, HostKernel]:
        """Returns the kernels, bound to this rank's group; they hold no reference to the device."""

        @host_kernel("order: *u32, source: *const f32, out: *out f32, count: u32")
        def all_reduce(launch: Any, order: Any, source: Floats, out: Floats, count: int) -> None:
            total = self._sum("all_reduce", source[:count])
            out[:count] = np.nan if total is None else total

        @host_kernel("order: *u32, target: *f32, partial: *f32, count: u32")
        def accumulate(
            launch: Any, order: Any, target: Floats, partial: Floats, count: int
        ) -> None:
            total = self._sum("accumulate", partial[:count])
            with np.errstate(all="ignore"):
                target[:count] += np.float32(np.nan) if total is None else total
            partial[:count] = 0

        @host_kernel(
            "order: *u32, source: *const u8, out: *out u8, lines: u32, nbytes: u32, kind: u32"
        )
        def all_gather(
            launch: Any, order: Any, source: Bytes, out: Bytes, lines: int, nbytes: int, kind: int
        ) -> None:
            size = self.group.size
            label = f"all_gather of {lines} x {bytes_of(nbytes, kind)}"
            parts = self._parts(label, source[: lines * nbytes].tobytes())
            into = out[: lines * size * nbytes].reshape(lines, size, nbytes)
            if parts is None:
                into[...] = 0xFF
                return
            for rank, part in enumerate(parts):
                into[:, rank] = np.frombuffer(part, np.uint8).reshape(lines, nbytes)

        @host_kernel("order: *u32, buffer: *u8, nbytes: u32, kind: u32, root: u32")
        def broadcast(
            launch: Any, order: Any, buffer: Bytes, nbytes: int, kind: int, root: int
        ) -> None:
            mine = buffer[:nbytes].tobytes() if self.group.rank == root else b""
            parts = self._parts(f"broadcast of {bytes_of(nbytes, kind)} from rank {root}", mine)
            if parts is None:
                buffer[:nbytes] = 0xFF
            else:
                buffer[:nbytes] = np.frombuffer(parts[root], np.uint8)

        return {one.name: one for one in (all_reduce, accumulate, all_gather, broadcast)}
