"""Collectives of small messages: every rank writes into the other ranks' memory, in one kernel.

A rank's *window* is device memory that the other ranks have opened (`Driver.memory_share`): on CUDA
in processes of one machine whose GPUs reach each other, on the host device in threads of one
process.  A kernel stores this rank's values into every window, waits in its own window for the
others' values, and continues with the sum; `kernels/exchange.cu` explains how, and why it needs no
lock and no signal from the host.

A sum goes to every rank whole, or, where that sends many more bytes, in parts: each rank adds a
part and sends the result to the others (`ExchangeCollectives.scatters`).  Both give the same bits.

Words of 8 bytes have 4 of value, which is the fastest way for few of them; those of sums that
products make themselves (`sums`) have two values.  Kernels whose values lie in the windows (`room`)
read and write those of other ranks without words, between two meetings.

Messages above the windows' limits, and broadcasts, use the backend that always works (NCCL, on the
host the group's channel).  All ranks decide this alike, by bytes.

After a failure of the group every wait in a kernel ends, with NaN, and the windows are never
synchronized again: the group stays failed, and another group has other windows.  A window that
another rank may still write to is kept until the process ends.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

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
from ostinato.distributed.collectives import (
    Collectives,
    ExchangedSum,
    Floats,
    Gathered,
    remembered,
    summed,
)
from ostinato.distributed.group import Group
from ostinato.errors import NotAvailableError, OstinatoError
from ostinato.modules import CompileOptions

THREADS = 128
"""Threads of a block; each handles two values of 4 bytes."""
_BLOCK = 2 * THREADS
_FOLDER = Path(__file__).parent / "kernels"
_BLOCKS_PER_PROCESSOR = 4
"""Blocks of 128 threads: few enough to be resident on any GPU beside other work."""
_MOST_RANKS = 16
_TOTAL = 512 << 10
LARGEST_SUM = 1 << 20
"""The bytes of a rank in the largest sum: 64 rows of 4,096 values."""
_PROCESSORS = 132  # those that the host's kernels are cut for
HOP_BYTES = 224 << 10
"""The bytes that a rank sends to others in the time of a second exchange: 0.65 us at 340 GB/s (two
H200s; docs/scale.md)."""
_PAGE = 2 << 20
_ALIGNED = 1024
_LEAST_SLOTS = 8192  # a row of 16,384 values
_SUM_TABLE = 32
_ACCUMULATE = "order: *u32, target: *f32, partial: *f32, table: *const u64, count: u32, rank: u32"
_REDUCE = _ACCUMULATE.replace("target: *f32, partial: *f32", "source: *const f32, out: *out f32")
_SIGNATURES = {
    **dict.fromkeys(("exchange_accumulate", "scattered_accumulate"), _ACCUMULATE),
    **dict.fromkeys(("exchange_reduce", "scattered_reduce"), _REDUCE),
    "exchange_gather": _REDUCE.replace("f32", "u32").replace(
        "count: u32", "count: u32, width: u32"
    ),
}


def sum_slots(size: int) -> int:
    """Returns the most pairs of values that kernels exchange themselves: where sums in parts would
    send fewer bytes, no more than a rank sends in the time of a second exchange."""
    if size <= 4:  # whole, a rank sends size - 1 times the bytes, in parts 4 (size - 1) / size
        return LARGEST_SUM // 8
    most = HOP_BYTES * size // ((size - 1) * (size - 4) * 8)
    return min(LARGEST_SUM // 8, max(_LEAST_SLOTS, most // 64 * 64))


def sums_macros(size: int) -> dict[str, int]:
    """Returns the macros of `ExchangeCollectives.sums`, for kernels that exchange sums."""
    return {"SUM_SLOTS": sum_slots(size), "SUM_TABLE": _SUM_TABLE}


def limit_for(size: int) -> int:
    """Returns the largest message that goes to every other rank whole, in bytes of a rank."""
    return _TOTAL // max(1, size - 1)


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of a window.  `blocks`: of the largest launch that exchanges words; `meeting`: of
    the largest whose blocks meet; `room`: bytes of other memory that kernels share."""

    ranks: int
    blocks: int
    meeting: int = 0
    room: int = 0

    @property
    def words(self) -> int:
        """Words of 8 bytes that a rank sends in the largest exchange, and in meetings."""
        return self.blocks * _BLOCK + 2 * self.meeting

    @property
    def header(self) -> int:
        """Words of 8 bytes before the data: the blocks' counters, and a mark of each rank."""
        return -(-(self.blocks + self.meeting + self.ranks) // 32) * 16

    @property
    def sums(self) -> int:
        """Offset in bytes of the part in which products exchange their sums (linear.cuh)."""
        return 8 * (self.header + 2 * self.ranks * self.words)

    @property
    def sums_words(self) -> int:
        """Words of 8 bytes in that part."""
        slots = sum_slots(self.ranks)
        return _SUM_TABLE + slots // 2 + 2 * self.ranks * slots

    @property
    def shared(self) -> int:
        """Offset in bytes of the room."""
        return -(-(self.sums + 8 * self.sums_words) // _ALIGNED) * _ALIGNED

    @property
    def nbytes(self) -> int:
        """Bytes of a window: whole pages, so that no other allocation is shared with it."""
        return -(-(self.shared + self.room) // _PAGE) * _PAGE

    def sum_of(self, count: int, *, scattered: bool) -> ExchangedSum:
        """Returns the launch of a sum of `count` values."""
        each = _BLOCK * (self.ranks if scattered else 1)
        return ExchangedSum(self.words, self.header, self.blocks, scattered, -(-count // each))

    def shared_sum(self) -> ExchangedSum:
        """Returns the largest launch of a sum of values in the room."""
        return replace(self.sum_of(0, scattered=False), grid=self.meeting)

    def mark(self, rank: int) -> int:
        """Returns the byte offset of the mark that a rank's writes to this window are over."""
        return 4 * (self.blocks + self.meeting + rank)

    @property
    def macros(self) -> dict[str, str]:
        numbers = {"RANKS": self.ranks, "EXCHANGE_THREADS": THREADS, "EXCHANGE_BLOCKS": self.blocks}
        numbers |= {"EXCHANGE_WORDS": self.words, "EXCHANGE_HEADER": self.header}
        return {name: str(number) for name, number in numbers.items()}


@cache
def kernels() -> Source:
    """Returns the CUDA kernels."""
    code = (_FOLDER / "exchange.cu").read_text(encoding="utf-8")
    return Source(code, signatures=_SIGNATURES, headers=exchange_headers(), name="exchange.cu")


@cache
def exchange_headers() -> Mapping[str, str]:
    """Returns the headers for kernels that store words into other ranks' memory, by their names."""
    return {path.name: path.read_text(encoding="utf-8") for path in sorted(_FOLDER.glob("*.cuh"))}


_kept: list[object] = []
"""Memory that another rank may still write to, kept until the process ends."""


class ExchangeCollectives(Collectives):
    """Small messages through the ranks' windows, others by `beyond`, which is closed with this
    object.

    All ranks make theirs together.  `limit`: largest message of a rank, in bytes; by default 1 MiB
    for sums and `limit_for` of the number of ranks for others.  `hop_bytes`: see `scatters`.
    `room`: bytes of `Collectives.room`.
    Raises NotAvailableError on all ranks if any of them cannot reach the others' memory; `beyond`
    then stays open.
    """

    def __init__(
        self,
        group: Group,
        device: Device,
        beyond: Collectives,
        *,
        limit: int = LARGEST_SUM,
        hop_bytes: int = HOP_BYTES,
        room: int = 0,
    ) -> None:
        super().__init__(group, device)
        self.beyond = beyond
        self._on_host = device.capabilities.runs_host_functions
        size = group.size
        # All blocks of a launch must be resident.
        processors = _PROCESSORS if self._on_host else device.properties.multiprocessors
        told = group.exchange("windows: limit", f"{limit} {processors} {hop_bytes} {room}".encode())
        numbers = [[int(number) for number in one.split()] for one in told]
        limit, processors, self._hop_bytes, least = (
            min(column) for column in zip(*numbers, strict=True)
        )
        # Ranks of different models have no room: the decoder compares these, and says so.
        room = least if all(one[3] == least for one in numbers) else 0
        most = 4 * _BLOCK * _BLOCKS_PER_PROCESSOR * processors
        self._whole: int = min(limit, most, limit_for(size))
        """Bytes of the largest message that goes to every other rank whole."""
        self.limit = min(limit, most * size)
        blocks = -(-max(self._whole, 4) // (4 * _BLOCK))
        blocks = max(blocks, -(-self.limit // (4 * _BLOCK * size)))
        self.layout = Layout(size, blocks, processors, room)
        self._made: dict[tuple[object, ...], tuple[Operation, ...]] = {}
        self._opened: dict[int, int] = {}
        self._window: Buffer | None = None
        self._lost = device.pinned(1, np.uint32)
        self._lost.array[0] = 0
        self._closed = self._known_to_others = False
        self._ending = threading.Lock()
        self.in_windows = self.by_beyond = 0
        group.channel.on_failure(lambda failure: self._end_waits())
        try:
            self._open_windows()
        except NotAvailableError:
            self._give_back()
            super().close()
            raise
        self.in_windows = 0  # trial exchanges are not counted
        self.name = f"peer memory up to {self.limit} bytes, {beyond.name} beyond"

    # --- windows
    def _open_windows(self) -> None:
        """Opens every other rank's window.  Fails on all ranks if it fails on one."""
        group, device, driver = self.group, self.device, self.device.driver
        error, handle = "", b""
        try:
            if group.size > _MOST_RANKS:
                raise NotAvailableError(f"{group.size} ranks are more than {_MOST_RANKS}")
            if not device.capabilities.shares_memory:
                raise NotAvailableError(f"{device.name} cannot share its memory")
            self._window = device.zeros(self.layout.nbytes, "bytes", name="window of the ranks")
            handle = driver.memory_share(self._window.address)
        except OstinatoError as problem:
            error = str(problem)
        place = _place_of(self._on_host)
        told = group.exchange("windows: handles", b"\n".join([place, error.encode(), handle]))
        found = [one.split(b"\n", 2) for one in told]
        self._refuse([one[1].decode() for one in found])
        elsewhere = [rank for rank, one in enumerate(found) if one[0] != found[0][0]]
        if elsewhere:
            where = "process" if self._on_host else "host"
            raise NotAvailableError(f"rank {elsewhere[0]} is in another {where} than rank 0")
        assert self._window is not None
        self._known_to_others = True
        addresses = []
        try:
            for rank, (_, _, handle) in enumerate(found):
                if rank == group.rank:
                    addresses.append(self._window.address)
                    continue
                self._opened[rank] = driver.memory_open_shared(handle)
                addresses.append(self._opened[rank])
        except OstinatoError as problem:
            error = str(problem)
        self._refuse([one.decode() for one in group.exchange("windows: opened", error.encode())])
        sums = [address + self.layout.sums for address in addresses]
        self._sums = self._window.view(self.layout.sums, self.layout.sums_words, np.uint64)
        if self.layout.room:
            self.room = self._window.view(self.layout.shared, self.layout.room, "bytes")
        with device.create_stream() as stream:
            table = np.array([*sums, self._lost.address], np.uint64)
            self._sums[: table.size].set(table, stream)
            stream.synchronize()
        addresses += [self._lost.address, self._window.address]
        self.windows = device.array(np.array(addresses, np.uint64), name="windows of the ranks")
        self._try_out()

    def _refuse(self, errors: list[str]) -> None:
        for rank, error in enumerate(errors):
            if error:
                raise NotAvailableError(f"rank {rank}: {error}")

    def _try_out(self) -> None:
        """Runs sums of both kinds with known values; a window has two halves, so both are used
        again.  Raises NotAvailableError on all ranks if the result is wrong on one."""
        device, group, size = self.device, self.group, self.group.size
        count = self._whole // 4
        line = (np.arange(count) % 251).astype(np.float32)
        problem = ""
        with device.zeros(count, np.float32) as target, device.zeros(count, np.float32) as partial:
            with device.create_stream() as stream:
                for turn in range(3):
                    partial.set(line * (group.rank + 1 + turn), stream)
                    for operation in self._sum("accumulate", turn == 1, target, partial, count):
                        stream.submit(operation)
                with group.watching("the first exchange in peer memory"):
                    found, left = target.to_numpy(stream), partial.to_numpy(stream)
            times = sum(rank + 1 + turn for rank in range(size) for turn in range(3))
            if not (found == line * times).all() or left.any():
                problem = "what other ranks wrote to its memory is not what they sent"
        told = group.exchange("windows: tried out", problem.encode())
        self._refuse([one.decode() for one in told])

    # --- collectives
    def scatters(self, nbytes: int) -> bool:
        """True if a sum of `nbytes` per rank is computed in parts: always above the limit of other
        messages, else if the second exchange takes less time than the `hop_bytes` that it costs.

        Whole, a rank sends (ranks - 1) * nbytes; in parts 2 * (ranks - 1) / ranks of them.  Words
        have twice as many bytes as values.
        """
        size = self.layout.ranks
        saved = 2 * nbytes * (size - 1) * (size - 2) // size
        return nbytes > self._whole or saved > self._hop_bytes

    def _sums_fit(self, nbytes: int) -> bool:
        return nbytes <= self.limit and nbytes % 4 == 0

    def _fits(self, nbytes: int) -> bool:
        return nbytes <= self._whole and nbytes % 4 == 0

    def programmatic(self, nbytes: int, *, gathers: bool = False) -> bool:
        fits = self._fits(nbytes) if gathers else self._sums_fit(nbytes)
        return fits and self.device.capabilities.programmatic_launch

    def all_reduce(self, source: Buffer, out: Buffer) -> tuple[Operation, ...]:
        count = self._same("all_reduce", source, out)
        if not self._sums_fit(4 * count):
            return self._beyond(self.beyond.all_reduce(source, out))
        return self._sum("reduce", self.scatters(4 * count), source, out, count)

    def accumulate(
        self, target: Buffer, partial: Buffer, *, programmatic: bool = False
    ) -> tuple[Operation, ...]:
        count = self._same("accumulate", target, partial)
        if not self._sums_fit(4 * count):
            return self._beyond(self.beyond.accumulate(target, partial))
        scatters = self.scatters(4 * count)
        return self._sum("accumulate", scatters, target, partial, count, programmatic)

    def _sum(
        self,
        kind: str,
        scatters: bool,
        one: Buffer,
        other: Buffer,
        count: int,
        programmatic: bool = False,
    ) -> tuple[Operation, ...]:
        name = f"{'scattered' if scatters else 'exchange'}_{kind}"
        return self._operation(name, count, programmatic, one, other)

    def all_gather(
        self, source: Buffer, out: Buffer, *, programmatic: bool = False
    ) -> tuple[Operation, ...]:
        layout = Gathered.of(source, out, self.group.size)
        if not self._fits(source.nbytes) or layout.nbytes % 4:
            return self._beyond(self.beyond.all_gather(source, out))
        given = source.view(dtype=np.uint32), out.view(dtype=np.uint32)
        return self._operation(
            "exchange_gather", source.nbytes // 4, programmatic, *given, width=layout.nbytes // 4
        )

    def broadcast(self, buffer: Buffer, root: int = 0) -> tuple[Operation, ...]:
        return self._beyond(self.beyond.broadcast(buffer, root))

    def _operation(
        self,
        name: str,
        count: int,
        programmatic: bool,
        one: Buffer,
        other: Buffer,
        width: int | None = None,
    ) -> tuple[Operation, ...]:
        self.group.check()
        key = (name, one.address, other.address, count, width, programmatic)
        found = remembered(self._made, key)
        if found is None:
            options = CompileOptions(defines=tuple(self.layout.macros.items()))
            kernel = self.device.modules.get_or_compile(self._source(), name, options=options)
            grid = self.layout.sum_of(count, scattered=name.startswith("scattered")).grid
            shape = LaunchConfig(grid, THREADS, programmatic=programmatic)
            extra = () if width is None else (width,)
            made = prepare(
                kernel, shape, self.order, one, other, self.windows, count, *extra, self.group.rank
            )
            # The table holds addresses of memory that is no argument.
            kept = replace(made, keep=(*made.keep, self._window, self._lost))
            found = self._made[key] = (kept,)
        self.in_windows += 1
        return found

    def _beyond(self, operations: tuple[Operation, ...]) -> tuple[Operation, ...]:
        self.by_beyond += 1
        return operations

    def sums(self, count: int) -> Buffer | None:
        fits = count % 2 == 0 and count // 2 <= sum_slots(self.layout.ranks)
        return self._sums if fits and self._sums_fit(4 * count) else None

    def exchanged_sum(self, count: int) -> ExchangedSum | None:
        if not self._sums_fit(4 * count):
            return None
        return self.layout.sum_of(count, scattered=self.scatters(4 * count))

    def shared_sum(self) -> ExchangedSum | None:
        return None if self.room is None else self.layout.shared_sum()

    def described(self) -> str:
        return f"{self.name}: {self.in_windows} made in peer memory, {self.by_beyond} beyond"

    def _source(self) -> Source:
        if self._on_host:
            return Source(host=_host_kernels(self), name="exchange")
        return kernels()

    # --- ends
    def abort(self) -> None:
        self._end_waits()
        self.beyond.abort()

    def _end_waits(self) -> None:
        with self._ending:
            # On a closed device nothing waits.
            if not (self._closed or self.device.context.closed):
                self._lost.array[0] = 1

    def close(self) -> None:
        """Implements `Collectives.close`.  Graphs with its collectives must be closed before."""
        if self._closed:
            return
        self._made.clear()
        if not self.device.context.closed:
            self._give_back()
            super().close()
        with self._ending:
            self._closed = True
        self.beyond.close()
        self.group.detach(self)

    def _give_back(self) -> None:
        """Marks in every other window that this rank's writes are over, and frees the own window
        once all others have marked it."""
        device, layout, window = self.device, self.layout, self._window
        mark = np.ones(1, np.uint32)
        if self.group.failure is not None:  # the others, and their memory, may no longer exist
            _kept.append((window, self._lost))
            return
        try:
            device.synchronize()
            with device.create_stream() as stream:
                for address in self._opened.values():
                    where = address + layout.mark(self.group.rank)
                    device.driver.memcpy_from_host(where, mark.data.cast("B"), stream.handle)
                stream.synchronize()
            while self._opened:
                device.driver.memory_end_shared(self._opened.popitem()[1])
            if window is None or not self._known_to_others or self._all_left(window):
                if window is not None:
                    window.close()
                with self._ending:
                    self._closed = True
                    self._lost.close()
                return
        except OstinatoError:
            pass  # the context may be poisoned: the window is kept, not closed
        _kept.append((window, self._lost))

    def _all_left(self, window: Buffer) -> bool:
        """True once no other rank writes to this rank's window.  Waits up to a second for that."""
        layout, others = self.layout, [r for r in range(self.group.size) if r != self.group.rank]
        end = time.monotonic() + min(1.0, self.group.deadline)
        start = layout.mark(0)
        with self.device.create_stream() as stream:
            while True:
                marks = window.view(start, layout.ranks, np.uint32).to_numpy(stream)
                if marks[others].all():
                    return True
                if self.group.failure is not None or time.monotonic() > end:
                    return False
                time.sleep(0.001)


def _place_of(process: bool) -> bytes:
    """Identifies the scope within which memory can be opened: this process, or this host."""
    if process:
        return f"process {os.getpid()} on {socket.gethostname()}".encode()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}".encode()


# ------------------------------------------------------------------------------ the host's kernels

Words = npt.NDArray[np.uint64]
_VALUE = np.uint64(0xFFFFFFFF)
_EPOCH = np.uint64(32)
_NAN = np.uint32(0x7FC00000)


def _host_kernels(made: ExchangeCollectives) -> Mapping[str, HostKernel]:
    """Returns the kernels of `exchange.cu` in NumPy, a grid at once; they wait for threads."""
    layout, group = made.layout, made.group
    size = layout.ranks

    class Windows:
        """The windows, for a launch of `blocks` blocks."""

        def __init__(self, launch: Any, table: Words, blocks: int, rank: int) -> None:
            windows = [launch.memory(int(table[r]), layout.nbytes) for r in range(size)]
            self._halves = [
                window.view(np.uint64)[layout.header :][: 2 * size * layout.words]
                .reshape(2, size, layout.words)[:, :, : layout.blocks * _BLOCK]
                .reshape(2, size, layout.blocks, _BLOCK)
                for window in windows
            ]
            self._rank, self._place = rank, np.arange(blocks)
            self._counters = windows[rank].view(np.uint32)[:blocks]
            self.lost = launch.memory(int(table[size]), 4).view(np.uint32)
            self.epochs = self._counters.copy()

        def swap(self, sent: Any, wanted: int) -> tuple[list[Any], bool]:
            """Sends `sent[r]`, [blocks, _BLOCK] of 4 bytes, to each rank r.  Returns what each
            sent, of which the first `wanted` values have come, and whether all did."""
            self.epochs += np.uint32(1)
            rank, parity = self._rank, self.epochs & 1
            epochs = self.epochs.astype(np.uint64)[:, None]
            for r in range(size):
                words = sent[r].view(np.uint32) | (epochs << _EPOCH)
                if r != rank:
                    self._halves[r][parity, rank, self._place] = words
            found: list[Any] = []
            for r in range(size):
                got, pause = sent[rank].view(np.uint32), 0.00002
                while r != rank:
                    words = self._halves[rank][parity, r, self._place]
                    if ((words >> _EPOCH) == epochs).reshape(-1)[:wanted].all():
                        got = (words & _VALUE).astype(np.uint32)
                        break
                    if self.lost[0]:
                        return [np.full_like(got, _NAN)] * size, False
                    time.sleep(pause)
                    pause = min(2 * pause, 0.001)
                found.append(got)
            return found, True

        def end(self) -> None:
            self._counters[...] = self.epochs
            if not self.lost[0]:
                group.note_progress()

    def exchanged(launch: Any, table: Words, values: Any, rank: int) -> list[Any]:
        """Returns every rank's values of 4 bytes."""
        count = len(values)
        blocks = -(-count // _BLOCK)
        sent = np.zeros((blocks, _BLOCK), values.dtype)
        sent.reshape(-1)[:count] = values
        windows = Windows(launch, table, blocks, rank)
        found, _ = windows.swap([sent] * size, count)
        windows.end()
        return [one.reshape(-1)[:count].view(values.dtype) for one in found]

    def whole_sum(launch: Any, table: Words, values: Floats, rank: int) -> Floats:
        return summed(exchanged(launch, table, values, rank))

    def scattered_sum(launch: Any, table: Words, values: Floats, rank: int) -> Floats:
        count = len(values)
        blocks = -(-count // (size * _BLOCK))
        sent = np.zeros((blocks, size, _BLOCK), np.float32)
        sent.reshape(-1)[:count] = values
        windows = Windows(launch, table, blocks, rank)
        wanted = blocks * _BLOCK
        parts, whole = windows.swap([np.ascontiguousarray(sent[:, r]) for r in range(size)], wanted)
        if whole:
            total = summed([part.view(np.float32) for part in parts])
            parts, _ = windows.swap([total] * size, wanted)
        windows.end()
        return np.stack(parts, 1).reshape(-1)[:count].view(np.float32)

    def sums(kind: str, sum_of: Callable[..., Floats]) -> tuple[HostKernel, HostKernel]:
        def accumulate(
            launch: Any, order: Any, target: Any, partial: Any, table: Words, count: int, rank: int
        ) -> None:
            total = sum_of(launch, table, partial[:count], rank)
            with np.errstate(all="ignore"):
                target[:count] += total
            partial[:count] = 0

        def reduce(
            launch: Any, order: Any, source: Any, out: Any, table: Words, count: int, rank: int
        ) -> None:
            out[:count] = sum_of(launch, table, source[:count], rank)

        accumulate.__name__, reduce.__name__ = f"{kind}_accumulate", f"{kind}_reduce"
        one, other = (host_kernel(_SIGNATURES[f.__name__])(f) for f in (accumulate, reduce))
        return one, other

    @host_kernel(_SIGNATURES["exchange_gather"])
    def exchange_gather(
        launch: Any,
        order: Any,
        source: Any,
        out: Any,
        table: Words,
        count: int,
        width: int,
        rank: int,
    ) -> None:
        into = out[: count * size].reshape(-1, size, width)
        for r, part in enumerate(exchanged(launch, table, source[:count], rank)):
            into[:, r] = part.reshape(-1, width)

    found = (*sums("exchange", whole_sum), *sums("scattered", scattered_sum), exchange_gather)
    return {kernel.name: kernel for kernel in found}
