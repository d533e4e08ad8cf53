"""The sizes of a step: checked, put into buckets, and kept on the device for its kernels."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast

from ostinato.device import Device
from ostinato.driver.api import MemoryRange
from ostinato.driver.context import HasContext
from ostinato.driver.forking import new_lock
from ostinato.driver.stream import Stream
from ostinato.errors import CaptureError, InputError
from ostinato.graph import Recording
from ostinato.memory import fill
from ostinato.state.scalar import DeviceScalar
from ostinato.step.buckets import Buckets


@dataclass(frozen=True, slots=True)
class StepKey:
    """The key of a step's graph in a cache: the step, and its sizes in buckets.

    `identity` is the step's own number, or the name under which steps share their graphs.
    """

    step: str = field(compare=False)
    """The step's name, for people; not a part of the key."""
    identity: int | str
    sizes: tuple[tuple[str, int], ...]

    def stable_key(self) -> tuple[object, ...]:
        """Returns the key without the step's own number, which differs between processes."""
        shared = self.identity if isinstance(self.identity, str) else None
        return (self.step, shared, self.sizes)

    def __str__(self) -> str:
        number = f"#{self.identity}" if isinstance(self.identity, int) else ""
        return f"{self.step}{number}({', '.join(f'{n}={size}' for n, size in self.sizes)})"


class Sizes:
    """The sizes that a step passes to its `run` and `builder`: `sizes.rows` is an int.

    In an eager run they are the call's own; where a graph is made they are the buckets, and the
    rows in between are padding.  `on_device` returns the call's own size in both.
    """

    __slots__ = ("_on_device", "_stream", "_values")

    def __init__(self, values: Mapping[str, int], on_device: DeviceSizes, stream: Stream) -> None:
        self._values, self._on_device, self._stream = values, on_device, stream

    def __getattr__(self, name: str) -> int:
        try:
            return self._values[name]
        except KeyError:
            there = ", ".join(self._values) or "none"
            raise AttributeError(
                f"{name!r} is no size of this call; its sizes: {there}", name=name, obj=self
            ) from None

    def __dir__(self) -> list[str]:
        return ["on_device", *self._values]

    def __repr__(self) -> str:
        return f"Sizes({', '.join(f'{name}={size}' for name, size in self._values.items())})"

    def on_device(self, name: str) -> DeviceScalar:
        """Returns the call's own size of that name on the device: one uint32 for kernels to read.

        The size is written before each call, in stream order.  Raises InputError for an unknown
        name, CaptureError if its memory must be allocated, or its value written, in a capture.
        """
        return self._on_device.scalar(name, self._stream)


def checked_sizes(sizes: Mapping[str, object]) -> dict[str, int]:
    """Returns the sizes as whole numbers of 0 or more.  Raises InputError with the wrong name."""
    checked: dict[str, int] = {}
    for name, size in sizes.items():
        if name.startswith("_") or name == "on_device":
            raise InputError(f"a size cannot be called {name!r}: `Sizes` has that name for itself")
        try:
            whole = -1 if isinstance(size, bool) else operator.index(size)  # type: ignore[arg-type]
        except TypeError:
            whole = -1
        if whole < 0:
            raise InputError(f"{name}={size!r}: a whole number of 0 or more is needed")
        checked[name] = whole
    return checked


def bucket_of(schemes: Buckets, name: str, size: int) -> int:
    """Returns the bucket of a size.

    Raises InputError if the bucket is smaller than the size: the caller may have written the
    scheme, and rows beyond the bucket would not be computed.
    """
    bucket = schemes.bucket(size)
    if bucket < size:
        raise InputError(
            f"{name}={size}: the buckets of the cache ({type(schemes).__name__}) give {bucket}; "
            "a bucket must be as large as its sizes"
        )
    return bucket


NONE_READ = object()
"""The value of `DeviceSizes.complete` for a step whose kernels read no size on the device."""


class DeviceSizes:
    """The real sizes of the current or last call, in device memory.

    Memory for a size is allocated at the first call with that size, since a capture cannot
    allocate.  A size that changed is written before the call: until the first run is over every
    size, after that only sizes for which `scalar` was called, and sizes that graphs from files may
    read.  Steps that share their graphs share this object (`sizes_of`), since a graph
    reads each size at one address.

    If a call is captured or recorded into a larger graph, that graph writes the sizes of the call
    at each launch.
    """

    def __init__(self, *, shared: bool = False) -> None:
        self._shared = shared
        self._scalars: dict[str, DeviceScalar] = {}
        self._asked: set[str] = set()
        self._restored: set[str] = set()
        self._known = False
        """True once a run is over, so that `_asked` is complete."""
        self._there: dict[str, int] = {}
        """The values on the device, without those whose last write failed."""
        self._now: Mapping[str, int] = {}
        """The sizes of the call under way."""
        self.running = False
        """True while a step's `run` is under way, outside of calls that the run makes."""
        self._nested = False
        """True while a call that a run made is under way."""
        self._elsewhere = False
        """True if other graphs write the sizes too, so that each call must write them."""
        self._joins = False
        """True if the call under way runs inside a capture that is not the step's own."""
        self.complete: object = None
        """The result of `wanted` for the sizes on the device, for which `set` has nothing to write;
        None if unknown."""

    @property
    def asked(self) -> bool:
        """True if any size may be read, so that each call must write it."""
        return bool(self._asked or self._restored)

    def wanted(self, sizes: Mapping[str, int]) -> object:
        """Returns the value of `complete` that means: these sizes need not be written."""
        return sizes if self._asked or self._restored or not self._known else NONE_READ

    @property
    def ranges(self) -> list[MemoryRange]:
        """The memory of all sizes."""
        return [scalar.range for scalar in self._scalars.values()]

    @property
    def memory(self) -> dict[str, MemoryRange]:
        """The memory of all sizes, by names for graph files."""
        return {f"size.{name}": scalar.range for name, scalar in self._scalars.items()}

    def note_restored(self) -> None:
        """Notes that a graph from a file may read any of the present sizes."""
        self._restored.update(self._scalars)
        self.complete = None

    def scalar(self, name: str, stream: Stream) -> DeviceScalar:
        """Returns the uint32 on the device that holds a size.  This and all later calls write it.

        Raises InputError if the current call has no size of that name, CaptureError if its memory
        must be allocated, or its value written, inside a capture.
        """
        if self._now and name not in self._now:
            raise InputError(f"{name!r} is no size of this step; there are: {', '.join(self._now)}")
        capturing = stream.is_capturing()
        if capturing and name not in self._scalars:
            raise CaptureError(
                f"the size {name!r} has no place on the device yet, and a capture cannot make one: "
                "call the step once before, or ask for the size before the capture"
            )
        if capturing and self._joins and name in self._now and name not in self._asked:
            self._join(name, stream)
        self.complete = None
        self._allocate(name, stream)
        self._asked.add(name)
        # Inside a capture of the step's own the size is written before the replay.
        if name in self._now and not capturing and self._there.get(name) != self._now[name]:
            self._write(name, self._now[name], stream)
        return self._scalars[name]

    def _allocate(self, name: str, stream: Stream) -> None:
        if name not in self._scalars:
            # It needs nothing of a device but its context, which the stream has too.
            self._scalars[name] = DeviceScalar(cast(Device, stream), "uint32")

    def begin(self, sizes: Mapping[str, int], stream: Stream) -> None:
        """Prepares a run outside of captures: allocates memory for the sizes, and writes them."""
        for name in sizes:
            self._allocate(name, stream)
        self.set(sizes, stream)

    def set(self, sizes: Mapping[str, int], stream: Stream) -> None:
        """Writes the sizes that changed, in stream order."""
        self.complete = None  # until all of them are written
        self._now, self._joins = sizes, False
        # Not in a run with these sizes, or in a call of that run: its sizes differ at each replay.
        taps = () if self.running or self._nested else stream.context.taps
        recorded = taps and any(isinstance(t, Recording) for t in taps)
        for name in self._asked | self._restored if self._known else tuple(self._scalars):
            if name in sizes:
                same = self._there.get(name) == sizes[name]
                if same and recorded:
                    self._fill(name, stream)
                elif self._elsewhere or not same:
                    self._write(name, sizes[name], stream)
        self.complete = None if self._elsewhere else self.wanted(sizes)

    @contextmanager
    def nested(self, stream: Stream) -> Iterator[None]:
        """Surrounds a call that a run with these sizes makes; afterwards writes the run's own sizes
        to the device again."""
        sizes, joins, nested = self._now, self._joins, self._nested
        try:
            self.running, self._nested = False, True
            yield
        finally:
            self.running, self._nested = True, nested
            if stream.is_capturing():  # the call has written nothing
                self._now, self._joins = sizes, joins
            else:
                self.set(sizes, stream)
            self.complete = None  # the run that goes on may make other calls

    def begin_in_capture(self, sizes: Mapping[str, int], stream: Stream) -> None:
        """Prepares a run inside a larger capture, where no memory can be allocated.

        Raises CaptureError if a size that the step reads has another value on the device.
        """
        self.complete, self._now = None, sizes
        for name in tuple(self._asked):
            if name in sizes:
                self._join(name, stream)
        self._joins = True

    def _join(self, name: str, stream: Stream) -> None:
        """Makes the graph of a capture write a size before work that reads it.  Raises CaptureError
        if the device has another value."""
        known = not (self._nested and self._elsewhere)
        wanted, there = self._now[name], self._there.get(name) if known else None
        if there != wanted:
            raise CaptureError(
                f"{name} is {there} on the device and {wanted} is wanted, which cannot be written "
                "while a capture is under way: call the step with this size before"
            )
        if not self._nested:
            self._fill(name, stream)

    def _fill(self, name: str, stream: Stream) -> None:
        """Writes a size by an operation that the graph being made repeats."""
        self._elsewhere = True
        fill(stream, self._scalars[name].buffer, self._now[name])

    def end(self) -> None:
        """Ends a run, which has called `scalar` for each size that it reads."""
        self._known, self._joins = True, False

    def _write(self, name: str, value: int, stream: Stream) -> None:
        self._there.pop(name, None)  # until it is written: an interrupt may come in between
        self._scalars[name].set(value, stream)
        self._there[name] = value

    def close(self) -> None:
        """Frees the memory; shared memory lives until no step is left.  Idempotent."""
        if self._shared:
            return
        for scalar in self._scalars.values():
            scalar.close()


_sizes: weakref.WeakKeyDictionary[HasContext, weakref.WeakValueDictionary[str, DeviceSizes]] = (
    weakref.WeakKeyDictionary()
)
_lock = new_lock()


def sizes_of(cache: HasContext, share: str | None) -> DeviceSizes:
    """Returns the sizes for a new step: its own, or those of all steps with this `share`."""
    if share is None:
        return DeviceSizes()
    with _lock:
        known = _sizes.setdefault(cache, weakref.WeakValueDictionary())
        made = known.get(share)
        if made is None:
            made = known[share] = DeviceSizes(shared=True)
        return made
