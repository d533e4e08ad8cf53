"""Kernel launches as operations: `prepare` once, `launch` now."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from threading import get_ident
from typing import TYPE_CHECKING

import numpy as np

from ostinato.driver.api import (
    KernelArguments,
    KernelNodeParams,
    LaunchConfig,
    MemoryRange,
    ParameterSlot,
)
from ostinato.driver.signature import Access, Signature, address_of, array_interface
from ostinato.driver.stream import Operation, Stream
from ostinato.errors import InputError, driver_error
from ostinato.memory.ranges import range_of
from ostinato.records import dataclass

if TYPE_CHECKING:
    from ostinato.driver.context import Context, Watcher
    from ostinato.modules import Kernel

# Made once: a union expression makes a new object at each evaluation.
_RAW = (bytes, bytearray, memoryview, np.void, np.ndarray)
"""The types of values that are the bytes of a struct, which may hold addresses."""
_PLAIN = (int, float, str, np.number, *_RAW)
_WHOLE = (int, np.integer)
_WORD = 8


def prepare(kernel: Kernel, config: LaunchConfig, *args: object) -> Operation:
    """Returns a launch as a record, to be submitted often or added to a graph.

    Arguments: buffers and other device arrays for pointers, numbers for scalars, bytes for
    structs.  Memory must have the type of its pointer, if both have one ("bytes" fits all;
    `Buffer.view` gives another type), and be of the kernel's device.  Raises InputError, which
    names the parameter that does not fit.

        operation = ost.prepare(kernel, ost.LaunchConfig(grid=8, block=256), x, n)
        stream.submit(operation)
    """
    _require_types("prepare", kernel, config)
    params = KernelNodeParams(kernel.function, config, kernel.arguments(*args))
    reads, writes = _touched(kernel.context, kernel.signature, args)
    keep = _owners(kernel, params.arguments, args)
    return Operation(params, kernel.name, reads, writes, keep, kernel.signature)


def prepare_node(kernel: Kernel, config: LaunchConfig, args: Sequence[object]) -> Operation:
    """Does the work of `prepare` for a node whose dependencies are given, so that the memory which
    it reads and writes need not be known."""
    if not isinstance(config, LaunchConfig) or not hasattr(kernel, "arguments"):
        _require_types("add_kernel", kernel, config)
    return _operation(kernel, config, kernel.arguments(*args), args)


def launch(stream: Stream, kernel: Kernel, config: LaunchConfig, *args: object) -> None:
    """Launches a kernel on a stream, or into the capture or recording under way on it.

    Arguments as for `prepare`.  Raises InputError, also for a kernel of another device than the
    stream; DriverError.

        ost.launch(stream, kernel, ost.LaunchConfig(grid=8, block=256), x, n)
    """
    thread = get_ident()
    try:
        submitting = stream.submitting
        context = stream.context
        call = kernel.call
        plain = config.plain
        _ = stream.submitted  # graphs and events have the other attributes, but not this; 12 ns
    except AttributeError:
        _require_types("launch", kernel, config, stream)
        raise
    if kernel.context is not context:
        context.require_same(kernel.context, f"launch: kernel {kernel.name!r}", "the stream is of")
    try:
        submitting.add(thread)  # before the check of the taps: see `Turn`
        taps = context.taps
        open_ = not (stream.closed or context.closed)
        if not taps and call is not None and plain and open_:
            if call(stream.handle, config.grid, config.block, config.shared, args) == 0:
                stream.submitted += 1
                return
        else:
            for tap in taps:
                if tap.needs_access:
                    stream.submit(prepare(kernel, config, *args))
                    return
        packed = kernel.arguments(*args)
        if taps and call is not None and plain and open_:
            handle = stream.enter(kernel.name)
            status = call(handle, config.grid, config.block, config.shared, packed.data)
            if status == 0:
                stream.submitted += 1
                stream.announce(_operation(kernel, config, packed, args))
                return
            if status is not None:  # not launched again: another launch may give another status
                error = driver_error(status, "launch_kernel", f"kernel {kernel.name} with {config}")
                stream.report(error)
                raise error
        # A tap that needs no access only needs the objects that the launch keeps alive.
        if stream.launch(kernel.name, kernel.function, config, packed):
            stream.announce(_operation(kernel, config, packed, args))
    finally:
        submitting.discard(thread)


def _operation(
    kernel: Kernel, config: LaunchConfig, packed: KernelArguments, args: Sequence[object]
) -> Operation:
    """Returns the operation of a launch, without the memory that it reads and writes."""
    params = KernelNodeParams(kernel.function, config, packed)
    keep = _owners(kernel, packed, args)
    return Operation(params, kernel.name, None, None, keep, kernel.signature)


def _require_types(what: str, kernel: object, config: object, stream: object = None) -> None:
    """Raises InputError for arguments of the wrong type."""
    from ostinato.modules import Kernel

    wanted: list[tuple[str, object, type, str]] = [
        ("stream", stream, Stream, "device.create_stream() makes one"),
        ("kernel", kernel, Kernel, "device.kernel(source, name) makes one"),
        ("config", config, LaunchConfig, "ost.LaunchConfig(grid, block)"),
    ]
    if what != "launch":
        del wanted[0]
    order = ", ".join(name for name, *_ in wanted)
    for name, value, kind, how in wanted:
        if not isinstance(value, kind):
            raise InputError(
                f"{what}({order}, *arguments): {name} must be a {kind.__name__}, not "
                f"{type(value).__name__} ({how})"
            )


def _owners(kernel: Kernel, packed: KernelArguments, args: Sequence[object]) -> tuple[object, ...]:
    """Returns the objects that a graph of the launch must keep alive: the kernel, the arguments
    that are objects, and the owners of the memory at addresses that were given as ranges, as plain
    numbers or in structs."""
    owners: list[object] = [kernel, *(value for value in args if not isinstance(value, _PLAIN))]
    for place, value in enumerate(owners):
        if isinstance(value, MemoryRange):
            owner = kernel.context.owner_of(value.address)
            owners[place] = value if owner is None else Inside(owner, value)
    if len(owners) <= len(args):
        signature = kernel.signature
        for index in range(len(args)) if signature is None else signature.pointers:
            value = args[index]
            if isinstance(value, _WHOLE) and not isinstance(value, bool) and value > 0:
                owner = kernel.context.owner_of(int(value))
                if owner is not None:
                    owners.append(owner)
        for slot, value in zip(packed.layout, args, strict=False):
            if isinstance(value, _RAW) and slot.size >= _WORD:
                owners += _owners_inside(kernel.context, packed.data, slot)
    return tuple(owners)


def _owners_inside(context: Context, data: bytes, slot: ParameterSlot) -> Iterator[Inside]:
    """Yields the owners of the memory at the addresses in a struct."""
    for at in slot.words:
        word = int.from_bytes(data[at : at + _WORD], "little")
        owner = context.owner_of(word) if word else None
        if owner is not None:
            yield Inside(owner)


@dataclass(frozen=True, slots=True)
class Inside:
    """The owner of memory into which a struct or a range points."""

    storage: object
    range: MemoryRange | None = None
    """The part of the memory that is used, if known."""

    @property
    def closed(self) -> bool:
        return getattr(self.storage, "closed", False) is True

    def watch(self, watcher: Watcher) -> None:
        """Does the same as `Buffer.watch`."""
        watch = getattr(self.storage, "watch", None)
        if callable(watch):
            watch(watcher)


def _touched(
    context: Context, signature: Signature | None, args: Sequence[object]
) -> tuple[tuple[MemoryRange, ...] | None, tuple[MemoryRange, ...] | None]:
    """Returns the memory that a launch reads and writes; (None, None) if it cannot be known.

    Without a signature, every device array among the arguments counts as read and written; bytes
    and plain whole numbers may then hide an address, so they make the memory unknown.
    """
    reads: list[MemoryRange] = []
    writes: list[MemoryRange] = []
    for index, value in enumerate(args):
        access = Access.READ | Access.WRITE
        if signature is not None:
            parameter = signature.parameters[index]
            if parameter.type == "bytes" and not parameter.pointer:
                return None, None  # a struct may hold pointers
            if not parameter.pointer:
                continue
            access = parameter.access
        elif isinstance(value, float | np.floating | np.bool_):
            continue
        elif isinstance(value, int) or address_of(value) is None:
            return None, None  # bytes, or a number, which may hold an address
        if not address_of(value):
            continue  # a null pointer
        touched = _range_of(context, value)
        if touched is None:
            return None, None
        if Access.READ in access:
            reads.append(touched)
        if Access.WRITE in access:
            writes.append(touched)
    return tuple(reads), tuple(writes)


def _range_of(context: Context, value: object) -> MemoryRange | None:
    """Returns a value's memory; None for a bare address in no live allocation, such as that of an
    alloc node before a launch: the number of bytes used there is unknown."""
    if hasattr(value, "range") or array_interface(value) is not None:
        return range_of(value)
    # The extent of a bare address is unknown: the whole allocation behind it.
    address = address_of(value)
    return None if address is None else context.driver.memory_range(address)
