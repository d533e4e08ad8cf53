"""Memory of the host driver: allocations at real addresses of this process.

Fresh memory is filled with `POISON` bytes, so that reads of unwritten memory are noticed.
"""

from __future__ import annotations

import bisect
import itertools
import operator
import os
import struct
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from ostinato.driver.api import MemoryRange
from ostinato.driver.forking import new_lock
from ostinato.driver.host.handles import invalid
from ostinato.driver.host.kernel import HostKernel, PointerParameter
from ostinato.driver.process_memory import as_numpy
from ostinato.errors import Status, driver_error
from ostinato.records import dataclass

if TYPE_CHECKING:
    import numpy.typing as npt

POISON = 0xA5
ALIGNMENT = 256

# The largest number of decoded arguments that are kept: a decoder has some hundred, but an eager
# loop whose scalars change makes new ones without end.
_DECODED_LIMIT = 8192


@dataclass(slots=True, eq=False, weakref_slot=True)
class Allocation:
    """One piece of memory, with its bytes.  A graph's allocation is not always live."""

    address: int
    nbytes: int
    data: npt.NDArray[np.uint8]
    pinned: bool = False
    graph_owned: bool = False
    outstanding: bool = False
    """True for a graph's allocation that a submitted launch allocates and none frees yet."""
    opened: int = 0
    """The number of times that another device's memory was opened here."""
    adopted: int = 0
    """The number of times that memory of other owners, or a part of it, was adopted."""
    holders: int = 0
    """The number of definitions and executables that name a graph's allocation."""

    @property
    def end(self) -> int:
        return self.address + self.nbytes


def _new_allocation(
    nbytes: int, call: str, *, pinned: bool = False, graph_owned: bool = False
) -> Allocation:
    """Reserves address space for an allocation; touches no page yet.  Raises OUT_OF_MEMORY."""
    try:
        # One alignment more than needed, so that two allocations are never adjacent.
        raw = np.empty(nbytes + 2 * ALIGNMENT, dtype=np.uint8)
    except (MemoryError, ValueError) as error:  # NumPy: ValueError from 2**63 bytes on
        raise driver_error(
            Status.OUT_OF_MEMORY, call, f"this process cannot have {nbytes} bytes more"
        ) from error
    start = int(raw.ctypes.data)
    address = -(-start // ALIGNMENT) * ALIGNMENT
    data = raw[address - start : address - start + nbytes]
    return Allocation(address, nbytes, data, pinned, graph_owned)


def bytes_of(call: str, view: memoryview) -> npt.NDArray[np.uint8]:
    """Returns the bytes of a host buffer, without a copy.  Raises INVALID_VALUE if it has gaps."""
    try:
        return np.frombuffer(view, dtype=np.uint8)
    except (BufferError, ValueError) as error:
        raise invalid(call, str(error)) from error


_address = operator.attrgetter("address")

_HANDLE = struct.Struct("<QQ")
_numbers = itertools.count(1)
_shared: weakref.WeakValueDictionary[int, Allocation] = weakref.WeakValueDictionary()
"""The allocations shared in this process, as long as their device has them."""


class MemoryTable:
    """Every live allocation by address, and the decoded arguments that point into them."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.lock = new_lock()  # a collection inside may free memory on this thread
        self._live: list[Allocation] = []
        """The live allocations in order of their addresses."""
        self.used = 0
        """Bytes of live device memory."""
        self._generation = 0
        # Allocations of alloc nodes by address.  Stream order decides whether one is live.
        self.reserved: dict[int, Allocation] = {}
        # (id of a loaded function, argument bytes) to the values of its call.  The views keep their
        # memory alive, so this is emptied whenever memory is freed.
        self.decoded: dict[tuple[int, bytes], tuple[Any, ...]] = {}

    @property
    def free(self) -> int:
        return self.total - self.used

    def allocate(self, call: str, nbytes: int, *, pinned: bool) -> int:
        """Allocates memory; returns its address."""
        if nbytes <= 0:
            raise invalid(call, f"{nbytes} bytes")
        if not pinned:
            self._refuse_more(call, nbytes)
        allocation = _new_allocation(nbytes, call, pinned=pinned)
        self.add(allocation, call)
        return allocation.address

    def release(self, call: str, address: int, *, pinned: bool) -> None:
        """Frees memory of `allocate` or of an alloc node.  Work that uses it must have ended."""
        allocation = self.find(address)
        if (
            allocation is None
            or allocation.address != address
            or allocation.pinned != pinned
            or allocation.adopted
            or not self.remove(allocation)
        ):
            what = "pinned" if pinned else "device"
            raise invalid(call, f"{address:#x} does not begin {what} memory")
        if allocation.graph_owned:
            allocation.outstanding = False
            self._drop_reserved(allocation)

    def _refuse_more(self, call: str, nbytes: int) -> None:
        if nbytes > self.free:
            detail = f"{nbytes} bytes wanted, {self.free} of {self.total} are free"
            raise driver_error(Status.OUT_OF_MEMORY, call, detail)

    def add(self, allocation: Allocation, call: str) -> None:
        """Makes an allocation live, with poisoned content.  Pinned memory is not device memory."""
        allocation.data.fill(POISON)
        with self.lock:
            if not allocation.pinned:
                self._refuse_more(call, allocation.nbytes)
                self.used += allocation.nbytes
            bisect.insort(self._live, allocation, key=_address)

    def remove(self, allocation: Allocation) -> bool:
        """Ends an allocation.  Returns False if it was not live."""
        with self.lock:
            at = self._place(allocation.address)
            if at < 0 or self._live[at] is not allocation:
                return False
            del self._live[at]
            self._forget_decoded()
            if not allocation.pinned:
                self.used -= allocation.nbytes
            return True

    def _place(self, address: int) -> int:
        """Returns the index of the last live allocation up to an address; -1 if there is none."""
        return bisect.bisect_right(self._live, address, key=_address) - 1

    def _forget_decoded(self) -> None:
        """Drops decoded arguments, also those that another thread is decoding."""
        self._generation += 1
        self.decoded.clear()

    # --- memory of other devices

    def share(self, call: str, address: int) -> bytes:
        """Returns a handle with which other host devices of this process open the allocation."""
        allocation = self.find(address)
        if allocation is None or allocation.address != address or allocation.pinned:
            raise invalid(call, f"{address:#x} does not begin device memory")
        number = next(_numbers)
        _shared[number] = allocation
        return _HANDLE.pack(os.getpid(), number)

    def open_shared(self, call: str, handle: bytes) -> int:
        """Adds another device's allocation to this table, until `end_shared` is called here."""
        allocation = None
        if len(handle) == _HANDLE.size:
            process, number = _HANDLE.unpack(handle)
            allocation = _shared.get(number) if process == os.getpid() else None
        if allocation is None:
            raise invalid(call, "no memory of this process is shared by this handle")
        with self.lock:
            at = self._place(allocation.address)
            if at >= 0 and self._live[at] is allocation:
                raise invalid(call, "the memory is this device's own")
            if at < 0 or self._live[at].data is not allocation.data:
                here = Allocation(allocation.address, allocation.nbytes, allocation.data, True)
                bisect.insort(self._live, here, key=_address)
                at += 1
            self._live[at].opened += 1
        return allocation.address

    def end_shared(self, call: str, address: int) -> None:
        """Ends one `open_shared`."""
        allocation = self.find(address)
        if allocation is None or allocation.address != address or not allocation.opened:
            raise invalid(call, f"{address:#x} is not another device's memory")
        allocation.opened -= 1
        if not allocation.opened:
            self.remove(allocation)

    # --- memory that others allocated

    def adopt(self, call: str, address: int, nbytes: int, owner: object) -> bool:
        """Adds memory of this process as an allocation, which keeps `owner` alive.

        Returns False for a range in the driver's own memory.  Ranges that overlap are parts of one
        memory: they become one allocation, until each is ended.
        """
        if nbytes <= 0:
            raise invalid(call, f"{nbytes} bytes")
        start, stop, count = address, address + nbytes, 1
        kept = [owner]
        with self.lock:
            parts = [a for a in self._live if a.address < stop and start < a.end]
            if any(not a.adopted for a in parts):
                if len(parts) == 1 and parts[0].address <= start and stop <= parts[0].end:
                    return False
                raise invalid(call, f"{nbytes} bytes at {address:#x} overlap other memory")
            for part in parts:
                start, stop = min(start, part.address), max(stop, part.end)
                count += part.adopted
                kept.append(part.data)
            data = as_numpy(start, (stop - start,), np.dtype(np.uint8), kept)
            whole = Allocation(start, stop - start, data, pinned=True, adopted=count)
            self._live = [a for a in self._live if a not in parts]
            bisect.insort(self._live, whole, key=_address)
            self._forget_decoded()
        return True

    def end_adopted(self, call: str, address: int) -> None:
        """Ends one `adopt` of a range that holds the address."""
        allocation = self.find(address)
        if allocation is None or not allocation.adopted:
            raise invalid(call, f"{address:#x} was not adopted")
        allocation.adopted -= 1
        if not allocation.adopted:
            self.remove(allocation)

    def clear(self) -> None:
        with self.lock:
            self.reserved.clear()
            self.decoded.clear()
            self.used = 0
            self._live.clear()

    # --- addresses of alloc nodes

    def reserve(self, call: str, nbytes: int) -> Allocation:
        """Reserves an address for an alloc node until the last holder releases it."""
        allocation = _new_allocation(nbytes, call, graph_owned=True)
        allocation.holders = 1
        self.reserved[allocation.address] = allocation
        return allocation

    def unhold(self, allocation: Allocation) -> None:
        """Counts the end of one definition or executable that names the address."""
        allocation.holders -= 1
        self._drop_reserved(allocation)

    def _drop_reserved(self, allocation: Allocation) -> None:
        """Releases a reserved address once nothing can name it any more."""
        if allocation.holders <= 0 and not allocation.outstanding:
            self.reserved.pop(allocation.address, None)

    def _reserved_at(self, address: int) -> Allocation | None:
        for allocation in tuple(self.reserved.values()):
            if allocation.address <= address < allocation.end:
                return allocation
        return None

    # --- look-up by address

    def find(self, address: int) -> Allocation | None:
        """Returns the live allocation that holds the address, or None."""
        with self.lock:  # without `_place` and `end`: running work calls this for each view
            at = bisect.bisect_right(self._live, address, key=_address) - 1
            if at < 0:
                return None
            allocation = self._live[at]
        return allocation if address < allocation.address + allocation.nbytes else None

    def _ending_at(self, address: int) -> Allocation | None:
        """Returns the allocation that ends at an address: a view of its last zero bytes points
        there.  Between two allocations there is always a gap."""
        before = self.find(address - 1)
        return before if before and before.end == address else None

    def range(self, address: int) -> MemoryRange | None:
        allocation = self.find(address)
        return None if allocation is None else MemoryRange(allocation.address, allocation.nbytes)

    def is_pinned(self, address: int) -> bool:
        allocation = self.find(address)
        return allocation is not None and allocation.pinned

    def check(self, address: int, nbytes: int, call: str, what: str) -> None:
        """Raises INVALID_VALUE for bytes outside of all allocations known at the call."""
        allocation = self.find(address) or self._reserved_at(address)
        if allocation is None:
            raise invalid(call, f"{what} {address:#x} is in no live allocation")
        if address + nbytes > allocation.end:
            raise invalid(
                call,
                f"{what}: {nbytes} bytes at {address:#x} pass the end of the allocation "
                f"({allocation.nbytes} bytes at {allocation.address:#x})",
            )

    def view(self, address: int, nbytes: int, what: str) -> npt.NDArray[np.uint8]:
        """Returns bytes for running work.  Raises ILLEGAL_ADDRESS, which poisons the driver."""
        allocation = self.find(address)
        if allocation is None or address + nbytes > allocation.address + allocation.nbytes:
            detail = f"{nbytes} bytes at {address:#x} are not all in one live allocation"
            raise driver_error(Status.ILLEGAL_ADDRESS, what, detail)
        start = address - allocation.address
        return allocation.data[start : start + nbytes]

    def decode(self, key: tuple[int, bytes], kernel: HostKernel) -> tuple[Any, ...]:
        """Returns the values of the kernel's call, which are kept until memory is freed."""
        generation = self._generation
        values = list(kernel.unpack(key[1]))
        for pointer in kernel.pointers:
            values[pointer.index] = self._pointer(kernel, pointer, values[pointer.index])
        result = tuple(values)
        with self.lock:
            if generation == self._generation:
                if len(self.decoded) >= _DECODED_LIMIT:
                    self.decoded.clear()
                self.decoded[key] = result
        return result

    def _pointer(
        self, kernel: HostKernel, pointer: PointerParameter, address: int
    ) -> npt.NDArray[Any] | None:
        if address == 0:
            return None
        allocation = self.find(address) or self._ending_at(address)
        what = f"argument {pointer.name!r} = {address:#x}"
        if allocation is None:
            detail = f"{what} is in no live allocation"
            raise driver_error(Status.ILLEGAL_ADDRESS, kernel.name, detail)
        itemsize = pointer.dtype.itemsize
        if address % itemsize:
            detail = f"{what} is not aligned to {itemsize}"
            raise driver_error(Status.MISALIGNED_ADDRESS, kernel.name, detail)
        start = address - allocation.address
        stop = start + (allocation.nbytes - start) // itemsize * itemsize
        view = allocation.data[start:stop].view(pointer.dtype)
        if not pointer.writable:
            view.setflags(write=False)
        return view
