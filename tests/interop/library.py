"""A small array library on the host device, for tests of `interop.reading` without any other.

Its arrays are buffers with a shape, its functions launch kernels on its current stream.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import Any

import numpy as np

import ostinato as ost
from ostinato.interop.graphed import Graphed
from ostinato.interop.reading.chains import Wait
from ostinato.interop.reading.conditions import Scalar
from ostinato.interop.reading.library import GraphedOptions, NotGraphable, WaitsForDevice
from ostinato.interop.reading.objects import Watch
from ostinato.interop.reading.states import StateWatch
from ostinato.interop.reading.stored import Stored, StoringLibrary


@ost.host_kernel("out: *out f32, x: *const f32, n: u32, by: f32, plus: f32", name="line")
def _line(launch: Any, out: Any, x: Any, n: int, by: float, plus: float) -> None:
    out[:n] = x[:n] * np.float32(by) + np.float32(plus)


@ost.host_kernel("x: *f32, n: u32, plus: f32", name="shift")
def _shift(launch: Any, x: Any, n: int, plus: float) -> None:
    x[:n] += np.float32(plus)


SOURCE = ost.Source(host=[_line, _shift])
ONE = ost.LaunchConfig(grid=1, block=1)


class Array:
    """An array of float32 on the library's device; a view if it has a base."""

    def __init__(self, lib: Lib, shape: Sequence[int], buffer: ost.Buffer | None = None) -> None:
        self.lib, self.shape = lib, tuple(shape)
        self.buffer = buffer if buffer is not None else lib.device.zeros(max(1, self.size), "f4")
        self.version = 0
        self.wanted = False
        self.attached: Array | None = None
        self.place = "device"

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))

    def numpy(self) -> Any:
        chain = self.lib.here.chain
        if chain is not None:
            return chain.read(self)
        return self.content()

    def content(self) -> Any:
        assert not self.lib.capturing(), "status 900: a copy to the host inside a capture"
        # Not the device, and not any stream: another thread may be capturing.
        for stream in {*self.lib.streams[:2], self.lib.here.stream}:
            stream.synchronize()
        return self.buffer.to_numpy(stream).reshape(-1)[: self.size].reshape(self.shape)

    def line(self, by: float, plus: float = 0.0) -> Array:
        out = Array(self.lib, self.shape, self.lib.empty(self.size))
        self.lib.launch("line", out.buffer, self.buffer, self.size, by, plus)
        return out

    def shift(self, plus: float) -> Array:
        self.version += 1
        self.lib.launch("shift", self.buffer, self.size, plus)
        return self


class SubArray(Array):
    pass


class Stateful:
    """An object of the library, all of whose state counts: an optimiser."""

    def __init__(self, **held: Any) -> None:
        vars(self).update(held)


class Here(threading.local):
    """What a thread has of its own: its current stream, the capture on it and that one's memory."""

    def __init__(self, stream: ost.Stream) -> None:
        self.stream = stream
        self.capture: ost.Capture | None = None
        self.pool: list[ost.Buffer] = []
        self.chain: Chaining | None = None


class Installed(Watch):
    """The watch of the library itself, of which nothing is read: it stands for an installed
    package, whose state is no function's."""

    def read(self, tokens: list[Hashable], arrays: list[Any]) -> None:
        pass

    def note(self, checks: object, tokens: list[Hashable], arrays: list[Any]) -> None:
        pass


class Chaining:
    """A chain that is being built: a capture from each wait to the next one."""

    def __init__(self, lib: Lib, links: Any) -> None:
        self.lib, self.links = lib, links
        self.pool = [lib.device.zeros(4096, "f4") for _ in range(64)]
        self.own = {buffer.storage.address for buffer in self.pool}
        lib.here.pool = [*self.pool]
        self.written: set[int] = set()

    def begin(self) -> None:
        self.capture = ost.Capture(self.lib.side)
        self.lib.here.capture = self.capture.begin()
        self.links.begun(self.lib.side)

    def end(self) -> None:
        self.lib.here.capture = None
        if not self.lib.side.capture_info().dependencies:
            self.capture.abort()  # nothing was captured
            return
        graph = self.capture.end()
        adopted = ost.Graph.adopt(self.lib.device, int(graph.handle), owner=(graph, self.pool))
        self.links.submitted(adopted, self.lib.side)

    def read(self, array: Array) -> Any:
        """What `array.numpy()` returns: it waits."""
        self.end()
        other = array.lib.alias(array)  # its shape may be changed in place
        frame = sys._getframe(2)
        found = other.content()
        place = self.links.place(frame, lambda name, count: () if name == "numpy" else None)
        content, scalar = found.tobytes(), None
        if self.lib.numbers and len(content) <= 16:

            def seen(content: bytes) -> Any:
                array = np.frombuffer(content, "f4").reshape(other.shape)
                return content if place is None else array

            scalar = Scalar(other.buffer.address, content, seen, place is None)
        self.links.waited(
            Wait(
                f"{frame.f_code.co_filename}:{frame.f_lineno}: ",
                content,
                lambda: other.content() if place is not None else other.content().tobytes(),
                place,
                frozenset(self.written - self.own),
                self.lib.foreign,
                reads=frozenset([self.lib.storage(other).address]),
                scalar=scalar,
            )
        )
        self.begin()
        return found


class Lib(StoringLibrary):
    """The library; also what `Graphed` needs of it (`Library`)."""

    array_type: type = Array
    seeds: tuple[str, ...] = ("seed",)

    def __init__(self, device: ost.Device) -> None:
        self.device = device
        self.streams = [device.create_stream() for _ in range(3)]
        self.here = Here(self.streams[0])
        self.side = self.streams[2]
        self.kernels = {n: device.modules.get_or_compile(SOURCE, n) for n in ("line", "shift")}
        self.mode = "plain"
        self.state = 0
        self.fail = ""
        self.notes: list[Any] = []
        """For tests, of which no guard reads anything."""
        self.captures = 0
        self.waits = 0
        self.trims: list[bool] = []
        self.chains = False
        self.numbers = False
        """True if small arrays that the host reads are compared on the device."""
        self.foreign = ""
        self.unchained = ""
        """For tests: why the next chain cannot be replayed."""

    # --- the library itself
    def seed(self, state: int) -> None:
        self.state = state

    def array(self, values: Any) -> Array:
        found = np.asarray(values, np.float32)
        return Array(self, found.shape, self.device.array(found.reshape(-1)))

    def empty(self, size: int) -> ost.Buffer:
        buffer = self.device.zeros(max(1, size), "f4") if not self.capturing() else None
        if buffer is None:
            buffer = self.here.pool.pop()
            assert buffer.nbytes >= 4 * size
        return buffer

    def launch(self, name: str, *args: Any) -> None:
        kernel, stream = self.kernels[name], self.here.stream
        if self.here.chain is not None:
            self.here.chain.written.add(args[0].storage.address)
        if self.capturing():  # as other libraries do: nobody here knows what it reads
            packed = kernel.arguments(*args)
            kernel.context.driver.launch_kernel(stream.handle, kernel.function, ONE, packed)
        else:
            ost.launch(stream, kernel, ONE, *args)

    @contextlib.contextmanager
    def on(self, stream: ost.Stream) -> Iterator[None]:
        before, self.here.stream = self.here.stream, stream
        try:
            yield
        finally:
            self.here.stream = before

    # --- what Graphed asks for
    def capturing(self) -> bool:
        return self.here.capture is not None

    def modes(self) -> Hashable:
        return self.mode

    def signature(self, array: Array, /) -> tuple[Hashable, ...]:
        return array.shape, "f4", (), array.place

    def address(self, array: Array, /) -> int:
        return array.buffer.address

    def storage(self, array: Array, /) -> ost.MemoryRange:
        return array.buffer.storage.range

    def memory(self, array: Array, /) -> list[tuple[ost.MemoryRange, object]]:
        return [(self.storage(array), array.buffer.storage)]

    def offset(self, array: Array, /) -> int:
        return self.address(array) - self.storage(array).address

    def on_host(self, array: Array, /) -> bool:
        return array.place != "device"

    def refusal(self, array: Array, /) -> str:
        if type(array) is not Array:
            return f"an array of the subclass {type(array).__name__}"
        return "" if array.place == "device" else f"an array on {array.place}"

    def attached(self, arrays: Sequence[Array], /) -> list[tuple[Any, str, Any]]:
        return [(array, "attached", array.attached) for array in arrays]

    def wants_gradient(self, result: Any, /) -> bool:
        return isinstance(result, Array) and result.wanted

    def version(self, array: Array, /) -> int | None:
        return array.version

    def is_array(self, value: object, /) -> bool:
        return isinstance(value, Array)

    def watch(self, value: object, /) -> Watch | None:
        if value is self:
            return Installed()
        return StateWatch(value, self) if isinstance(value, Stateful) else None

    def stream(self) -> ost.Stream:
        return self.here.stream

    def wait(self, stream: ost.Stream, other: ost.Stream) -> None:
        self.waits += 1
        stream.wait(other.record())

    def run_beside(self, work: Callable[[], Any]) -> Any:
        current = self.here.stream
        self.side.wait(current.record())
        try:
            with self.on(self.side):
                return work()
        finally:
            current.wait(self.side.record())

    def capture(self, work: Callable[[ost.Stream], Any]) -> tuple[ost.Graph, Any]:
        self.captures += 1
        pool = [self.device.zeros(4096, "f4") for _ in range(32)]
        self.here.pool = [*pool]
        try:
            with ost.capture(self.side) as capture, self.on(self.side):
                self.here.capture = capture
                try:
                    result = work(self.side)
                    if self.fail:
                        raise RuntimeError(self.fail)
                finally:
                    self.here.capture = None
        except (RuntimeError, AssertionError, ost.OstinatoError) as error:
            kind = WaitsForDevice if "status 900" in str(error) else NotGraphable
            raise kind(f"{type(error).__name__}: {error}") from None
        # Adopted, as other libraries' graphs are: without what their launches said of addresses.
        graph = capture.graph
        return ost.Graph.adopt(self.device, int(graph.handle), owner=(graph, pool)), result

    @property
    def chain(self) -> Any:
        return self._chain if self.chains else None

    def _chain(self, work: Callable[[ost.Stream], Any], links: Any) -> tuple[Any, Any]:
        current, self.here.chain = self.here.stream, Chaining(self, links)
        self.side.wait(current.record())
        chain = self.here.chain
        try:
            with self.on(self.side):
                chain.begin()
                try:
                    result = work(self.side)
                except BaseException:
                    chain.end()  # what ran before it counts
                    raise
                chain.end()
        finally:
            self.here.chain = None
            current.wait(self.side.record())
        why, self.unchained = self.unchained, ""
        return result, WaitsForDevice(why) if why else None

    def out_of_memory(self, error: BaseException, /) -> bool:
        return isinstance(error, MemoryError)

    def trim(self, *, short: bool) -> None:
        self.trims.append(short)

    def buffer(self, array: Array, shape: Sequence[int] | None) -> Array:
        return Array(self, array.shape if shape is None else shape)

    def stager(self, buffers: Sequence[Any]) -> Callable[[Sequence[Any]], None]:
        def stage(arrays: Sequence[Any]) -> None:
            for into, array in zip(buffers, arrays, strict=True):
                self.copy(into, array)

        return stage

    def copy(self, into: Array, array: Array) -> None:
        assert into.shape == array.shape
        self.launch("line", into.buffer, array.buffer, array.size, 1.0, -0.0)

    def clone(self, array: Array, /) -> Array:
        return array.line(1.0, -0.0)

    def alias(self, array: Array, /) -> Array:
        return Array(self, array.shape, array.buffer)

    def extent(self, array: Array, /) -> int | None:
        return 4 * array.size

    def recipe(self, array: Array, /) -> tuple[Any, ...]:
        return (array.shape,)

    def new(self, *recipe: Any) -> Array:
        return Array(self, *recipe)

    stable: tuple[type, ...] = ()

    def release(self) -> Hashable:
        return "1.0"

    def over(self, buffer: ost.Buffer) -> Array:
        return Array(self, (buffer.nbytes // 4,), buffer)

    def span(self, array: Array) -> ost.MemoryRange:
        return ost.MemoryRange(self.address(array), 4 * array.size)

    def layout(self, array: Array, base: int) -> Any:
        return [[*array.shape], self.address(array) - base]

    def view(self, array: Array, layout: Any) -> Array:
        shape, offset = layout
        size = int(np.prod(shape))
        memory = self.storage(array)
        if offset < 0 or offset + 4 * size > memory.nbytes:
            raise ValueError("it does not lie in its memory")
        return Array(self, shape, array.buffer.view(offset=offset, shape=(size,), dtype="f4"))

    def narrow(self, array: Array, axis: int, size: int) -> Array:
        assert axis == 0
        rest = array.shape[1:]
        return Array(self, (size, *rest), array.buffer)

    def rest(self, array: Array, axis: int, size: int) -> Array:
        assert axis == 0
        row = int(np.prod(array.shape[1:]))
        view = array.buffer.view(offset=4 * size * row, shape=((array.shape[0] - size) * row,))
        return Array(self, (array.shape[0] - size, *array.shape[1:]), view)

    def fill(self, array: Array, value: float) -> None:
        if array.size:
            self.launch("line", array.buffer, array.buffer, array.size, 0.0, value)

    def poison(self, rest: Array, front: Array, axis: int) -> None:
        self.fill(rest, float("nan"))

    def difference(self, one: Array, other: Array, tolerance: Any) -> str:
        a, b = one.numpy(), other.numpy()
        if a.shape != b.shape:
            return f"shape {a.shape} against {b.shape}"
        return "" if a.tobytes() == b.tobytes() else f"{a} against {b}"

    def save_random(self) -> Any:
        return self.state

    def restore_random(self, state: Any) -> None:
        self.state = state

    def seeding(self) -> Callable[[Collection[str]], str]:
        before = self.state
        return lambda named: "the state of the generator" if self.state < before else ""

    def same_random(self, state: Any) -> bool:
        return bool(self.state == state)


def graphed(
    function: Any,
    lib: Lib,
    cache: ost.GraphCache | None = None,
    *,
    stored: Stored | None = None,
    unavailable: str = "",
    **options: Any,
) -> Graphed:
    """A graphed function, with a cache of its own unless one is given."""
    return Graphed(
        function,
        lib,
        GraphedOptions(**options),
        cache or ost.GraphCache(lib.device),
        name=getattr(function, "__name__", "f"),
        owns_cache=cache is None,
        stored=stored,
        unavailable=unavailable,
    )
