"""Memory, streams and events live for as long as a graph or a launch uses them."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import sys
import types
import weakref
from collections.abc import Callable

import numpy as np
import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.errors import ClosedError
from ostinato.interop.captures import keep_programs
from ostinato.launching import _touched
from ostinato.testing import HeldStream
from tests.footguns.common import Borrowed, N, addresses, doubling, graph_of, ones, struct_kernel
from tests.sources import config, kernel


class Tensor(Borrowed):
    """Another library's array that also has a range, for `rebind`."""

    def __init__(self, buffer: ost.Buffer) -> None:
        super().__init__(buffer, "<f4")
        self.range = buffer.range


def assert_kept(device: Device, address: int) -> None:
    """Asserts that no new buffer gets the memory at the address, which no caller holds."""
    gc.collect()
    device.synchronize()
    others = [device.array(np.full(N, 9, np.float32)) for _ in range(8)]
    assert all(other.address != address for other in others)


class Pointing:
    """Executables whose launch gives out = 2 * x, and what is needed to have them read `new`."""

    def __init__(self, device: Device, stream: ost.Stream) -> None:
        self.device, self.stream, self.add = device, stream, kernel(device, "add")
        self.x, self.y, self.out = ones(device), ones(device), device.zeros(N, np.float32)

    def graph(self, given: object) -> ost.Graph:
        return graph_of(self.stream, self.add, N, given, given, self.out, N)

    def launch(self, given: object) -> ost.Operation:
        return ost.prepare(self.add, config(N), given, given, self.out, N)

    def changed(self, *changes: Callable[[ost.GraphExec], object]) -> ost.GraphExec:
        run = self.graph(self.x).instantiate()
        for change in changes:
            change(run)
        return run

    def copying(self, change: Callable[[ost.GraphExec], object]) -> ost.GraphExec:
        """A fill of y, a copy from x to it, and out = 2 * y."""

        def work() -> None:
            ost.fill(self.stream, self.y, 0)
            ost.copy(self.stream, self.y, self.x)
            ost.launch(self.stream, self.add, config(N), self.y, self.y, self.out, N)

        run = ost.capture_function(self.stream, work).instantiate()
        change(run)
        return run

    def added(self, given: object) -> ost.GraphExec:
        graph = ost.Graph.create(self.device)
        graph.add_kernel(self.add, config(N), given, given, self.out, N)
        return graph.instantiate()

    def inside(self, graph: ost.Graph) -> ost.GraphExec:
        outer = ost.Graph.create(self.device)
        outer.add_child(graph)
        graph.close()
        return outer.instantiate()

    def cloned(self, graph: ost.Graph) -> ost.GraphExec:
        clone = graph.clone()
        graph.close()
        return clone.instantiate()

    def recorded(self, run: ost.GraphExec) -> ost.GraphExec:
        with ost.record(self.stream) as recorded:
            run.launch(self.stream)
        run.close()
        return recorded.build().instantiate()

    def of_struct(
        self, given: object, *changes: Callable[[ost.GraphExec], object]
    ) -> ost.GraphExec:
        """One that gives out = given + 1."""
        run = graph_of(self.stream, struct_kernel(self.device), N, given, N).instantiate()
        for change in changes:
            change(run)
        return run


MADE: dict[str, Callable[[Pointing, ost.Buffer], ost.GraphExec]] = {
    "captured": lambda p, new: p.graph(new).instantiate(),
    "captured view": lambda p, new: p.graph(new[:]).instantiate(),
    "captured address": lambda p, new: p.graph(new.address).instantiate(),
    "captured range": lambda p, new: p.graph(new.range).instantiate(),
    "added range": lambda p, new: p.added(new.range),
    "child": lambda p, new: p.inside(p.graph(new)),
    "clone": lambda p, new: p.cloned(p.graph(new)),
    "recorded": lambda p, new: p.recorded(p.graph(new).instantiate()),
} | {
    f"struct as {kind.__name__}": (
        lambda p, new, kind=kind: p.of_struct(kind(addresses(new, p.out)))
    )
    for kind in (bytes, bytearray, memoryview, np.void, np.array)
}
"""The ways in which a definition comes to point at memory."""
SET: dict[str, Callable[[Pointing, ost.Buffer], ost.GraphExec]] = {
    "rebind": lambda p, new: p.changed(lambda run: run.rebind({p.x: new})),
    "rebind to a range": lambda p, new: p.changed(lambda run: run.rebind({p.x: new.range})),
    "launch": lambda p, new: p.changed(lambda run: run.set(0, p.launch(new))),
    "launch of a range": lambda p, new: p.changed(lambda run: run.set(0, p.launch(new.range))),
    "update": lambda p, new: p.changed(lambda run: run.update(p.graph(new))),
    "copy": lambda p, new: p.copying(lambda run: run.set(1, dst=p.y, src=new)),
    "rebound copy": lambda p, new: p.copying(lambda run: run.rebind({p.x: new})),
    "fill": lambda p, new: p.copying(lambda run: run.set(0, dst=new, value=0)),
    "launch with a struct": lambda p, new: p.of_struct(
        addresses(p.x, p.out),
        lambda run: run.set(
            0, ost.prepare(struct_kernel(p.device), config(N), addresses(new, p.out), N)
        ),
    ),
}
GIVEN: dict[str, Callable[[ost.Buffer], object]] = {
    "buffer": lambda new: new,
    "range": lambda new: new.range,
    "int": lambda new: new.address,
    "uint64": lambda new: np.uint64(new.address),
    "int64": lambda new: np.int64(new.address),
}
BY: dict[str, Callable[[ost.GraphExec, object], object]] = {
    "set": lambda run, value: [run.set(0, name, value) for name in "ab"],
    "set_all": lambda run, value: run.set_all([(0, 0, value), (0, "b", value)]),
    "patcher": lambda run, value: [run.patcher(0, index)(value) for index in (0, 1)],
}
SET |= {
    f"{given} by {by}": lambda p, new, by=by, given=given: p.changed(
        lambda run: BY[by](run, GIVEN[given](new))
    )
    for by in BY
    for given in GIVEN
}
"""The ways in which an executable comes to point at memory."""


@pytest.mark.usefixtures("launcher")
@pytest.mark.parametrize("way", MADE | SET)
def test_what_a_node_points_at_lives_and_is_missed_when_it_is_closed(
    device: Device, stream: ost.Stream, way: str
) -> None:
    world = Pointing(device, stream)

    def pointing() -> tuple[ost.GraphExec, ost.MemoryRange]:
        new = device.array(np.full(N, 3, np.float32))
        return (MADE | SET)[way](world, new), new.range

    run, memory = pointing()
    assert_kept(device, memory.address)
    run.launch(stream)
    wanted = 4 if "struct" in way else 2 if way == "fill" else 6
    assert (world.out.to_numpy(stream) == wanted).all()
    owner = device.context.owner_of(memory.address)
    assert isinstance(owner, ost.Buffer) and owner.range == memory
    owner.close()
    for _ in range(2):
        with pytest.raises(ClosedError, match="memory that was closed"):
            run.launch(stream)
    if way in MADE:
        with pytest.raises(ClosedError):
            run.graph.instantiate()


def test_a_range_is_rebound_to_a_range(device: Device, stream: ost.Stream) -> None:
    x, out = ones(device), device.zeros(N, np.float32)
    run, other = doubling(device, stream, x, out), ones(device)
    run.rebind([(run.manifest()[0].range, other.range)])
    other.close()
    with pytest.raises(ClosedError):
        run.launch(stream)
    with pytest.raises(ClosedError, match="new target"):
        run.rebind({x: other})


def test_lifted_work_keeps_what_its_graph_kept(device: Device, stream: ost.Stream) -> None:
    x, out = device.array(np.full(N, 3, np.float32)), device.zeros(N, np.float32)
    with ost.capture(stream) as capture:
        ost.launch(stream, kernel(device, "add"), config(N), x, x, out, N)
    address = x.address
    (operation,) = ost.lift(capture.graph, name="add")
    capture.graph.close()
    del x, capture
    assert_kept(device, address)
    stream.submit(operation)
    assert (out.to_numpy(stream) == 6).all()


@pytest.mark.parametrize("given", [bytearray, memoryview, np.void, np.bytes_])
def test_a_struct_of_any_kind_may_hold_an_address(device: Device, given: type) -> None:
    """Without a signature it is unknown what the launch touches."""
    x = ones(device)
    raw = given(x.address.to_bytes(8, "little"))
    assert _touched(device.context, None, (x, raw)) == (None, None)
    assert _touched(device.context, None, (x, 1.5, np.float32(2))) == ((x.range,), (x.range,))


def test_a_change_keeps_memory_that_a_launch_under_way_reads(
    device: Device, stream: ost.Stream
) -> None:
    """Another library frees its memory without waiting for launches."""
    x, out = ones(device), device.zeros(N, np.float32)
    run = graph_of(stream, kernel(device, "add"), N, x, x, out, N).instantiate(upload=stream)
    tensor = Tensor(ones(device))
    alive = weakref.ref(tensor)
    run.rebind([(x, tensor)])
    stream.synchronize()
    with HeldStream(stream):
        run.launch(stream)
        run.rebind([(tensor, x)])
        del tensor
        gc.collect()
        assert alive() is not None
    device.synchronize()
    assert alive() is None


@pytest.mark.parametrize("then", ["parameters", "config", "rebind", "update"])
def test_what_a_patch_pointed_at_is_let_go_of_by_the_next_change(
    device: Device, stream: ost.Stream, then: str
) -> None:
    """A fault kept the memory for as long as the executable lived."""
    x, out, add = ones(device), device.zeros(N, np.float32), kernel(device, "add")
    graph = graph_of(stream, add, N, x, x, out, N)
    run = graph.instantiate()
    tensor = Tensor(ones(device))
    alive = weakref.ref(tensor)
    run.set(0, 0, tensor)
    run.set(0, 1, tensor)
    run.launch(stream)
    if then == "parameters":
        run.set(0, ost.prepare(add, config(N), x, x, out, N))
    elif then == "config":
        run.set(0, config=ost.LaunchConfig(2, 32))
        run.set(0, ost.prepare(add, config(N), x, x, out, N))
    elif then == "rebind":
        run.rebind([(tensor, x)])
    else:
        run.update(graph)
    del tensor
    device.synchronize()
    gc.collect()
    assert alive() is None
    run.launch(stream)
    assert (out.to_numpy(stream) == 2).all()


@pytest.mark.parametrize("end", ["closed", "rebound"])
def test_a_launch_on_a_closed_stream_is_waited_for(device: Device, end: str) -> None:
    """An upload on a second stream does not end the wait for the first, which is closed."""
    first, second = device.create_stream(), device.create_stream()
    x, theirs, out = ones(device), ones(device), device.zeros(N, np.float32)
    run = graph_of(first, kernel(device, "add"), N, x, x, out, N).instantiate(upload=first)
    tensor = Tensor(theirs)
    alive = weakref.ref(tensor)
    run.rebind([(x, tensor)])
    device.synchronize()
    with HeldStream(first):
        run.launch(first)
        first.close()
        run.upload(second)
        if end == "closed":
            run.close()
        else:
            run.rebind([(tensor, x)])
        del tensor
        gc.collect()
        device.context.collect()
        assert alive() is not None, "the launch under way still reads it"
    device.synchronize()
    assert alive() is None
    assert (out.to_numpy(second) == 2).all()


def test_closed_streams_are_forgotten(device: Device, stream: ost.Stream) -> None:
    run = ost.Graph.create(device).instantiate()
    gone = []
    for _ in range(5):
        other = device.create_stream()
        run.launch(other)
        gone.append(weakref.ref(other))
        other.close()
        del other
        run.launch(stream)
        device.synchronize()
        run.upload(device.create_stream())
    gc.collect()
    device.synchronize()
    assert not any(ref() for ref in gone[:-1])


def test_closing_what_a_launch_still_uses_waits_for_it(device: Device, stream: ost.Stream) -> None:
    x, out = ones(device), device.zeros(N, np.float32)
    with HeldStream(stream) as held:
        ost.launch(stream, kernel(device, "add"), config(N), x, x, out, N)
        held.release_after(0.05)
        x.close()  # freeing waits for the device
        device.context.collect()
        device.array(np.full(N, 9, np.float32))
    assert (out.to_numpy(stream) == 2).all()


@pytest.mark.alone
@pytest.mark.parametrize("auto_free", [False, True])
def test_closing_an_executable_frees_what_its_graph_allocated(
    device: Device, stream: ost.Stream, auto_free: bool
) -> None:
    """A fault lost that memory with each executable, until the process ended."""
    size, left = 64 << 20, []
    for _ in range(4):
        graph = ost.Graph.create(device)
        graph.add_alloc(size)
        with graph.instantiate(auto_free_on_launch=auto_free) as run:
            for _ in range(1 + auto_free):
                run.launch(stream)
            stream.synchronize()
        device.synchronize()
        left.append(device.memory_info()[0])
        graph.close()
    assert left[0] - left[-1] < size, left


@pytest.mark.parametrize("launched", [True, False])
def test_memory_that_another_graph_has_freed_is_not_freed_again(
    device: Device, stream: ost.Stream, launched: bool
) -> None:
    graph, other = ost.Graph.create(device), ost.Graph.create(device)
    alloc = graph.add_alloc(1 << 20)
    run = graph.instantiate()
    if launched:
        other.add_free(alloc.alloc.address)
        run.launch(stream)
        other.instantiate().launch(stream)
        stream.synchronize()
    run.close()
    device.synchronize()
    assert device.context.retired == 0
    again = graph.instantiate()  # such a graph has one executable at a time
    again.launch(stream)
    again.close()
    device.synchronize()
    assert (ones(device).to_numpy(stream) == 1).all()


def test_a_pool_never_gives_the_same_bytes_twice(device: Device) -> None:
    pool = device.pool(reserve=4096, slab=4096)
    pieces = [pool.empty(size, np.uint8) for size in (1, 100, 256, 1000, 4096, 9000, 3)]
    gc.collect()
    spans = sorted((p.range.address, p.range.end) for p in pieces)
    for (_, end), (start, _) in itertools.pairwise(spans):
        assert end <= start
    assert all(p.address % 256 == 0 for p in pieces)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_owner_is_not_copied(
    device: Device, stream: ost.Stream, copied: Callable[[object], object]
) -> None:
    """A copy would own the same handle, and closing it would free memory in use."""
    x, out = ones(device), device.zeros(N, np.float32)
    run = doubling(device, stream, x, out)
    scalar = ost.DeviceScalar(device, "u4")
    for owner in (x, x[1:], scalar, stream, stream.record(), run.graph, run, device):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            copied(owner)


@pytest.mark.parametrize("end", ["buffer", "device"])
@pytest.mark.parametrize("way", ["array", "asarray", "dlpack"])
def test_an_array_over_host_memory_outlives_it(way: str, end: str) -> None:
    device = ost.open_device("host")
    x = device.array(np.arange(1 << 20, dtype=np.int32))
    seen = {"array": lambda: x.array, "asarray": lambda: np.asarray(x)}.get(
        way, lambda: np.from_dlpack(x)
    )()
    (x if end == "buffer" else device).close()
    device.context.collect()
    noise = [np.full(1 << 20, -1, np.int32) for _ in range(4)]  # would take freed memory
    assert np.array_equal(seen, np.arange(1 << 20)), noise[0][0]
    with pytest.raises(ClosedError):
        _ = x.array
    device.close()


def test_an_event_of_a_graph_stays_its_own(device: Device, stream: ost.Stream) -> None:
    """A closed event's handle is not given to another event while a graph has its node."""
    event, graph = device.create_event(), ost.Graph.create(device)
    graph.add_event_record(event)
    run = graph.instantiate()
    event.close()
    device.synchronize()
    later = [device.create_event() for _ in range(64)]
    assert graph.nodes()[0].event_record.event not in {other.handle for other in later}
    run.launch(stream)
    stream.synchronize()
    for use in (
        lambda: stream.wait(event),
        lambda: stream.record(event),
        lambda: event.done(),
        event.synchronize,
        lambda: graph.add_event_wait(event),
    ):
        with pytest.raises(ClosedError, match="the event is closed"):
            use()


@pytest.mark.parametrize(
    ("module", "kind", "handle"),
    [
        ("triton.compiler.compiler", "CompiledKernel", "function"),
        ("cupy.cuda.function", "Function", "ptr"),
    ],
)
def test_the_kernels_of_other_libraries_live_as_long_as_a_graph_that_launches_them(
    device: Device,
    stream: ost.Stream,
    monkeypatch: pytest.MonkeyPatch,
    module: str,
    kind: str,
    handle: str,
) -> None:
    """The end of such an object unloads the kernel's code."""

    class Kernel:
        def __init__(self, function: int) -> None:
            setattr(self, handle, function)

    library = types.ModuleType(module)
    setattr(library, kind, Kernel)
    monkeypatch.setitem(sys.modules, module, library)
    x, out = ones(device), device.zeros(N, np.float32)
    graph = graph_of(stream, kernel(device, "add"), N, x, x, out, N)
    used, other = Kernel(graph.nodes()[0].kernel.function), Kernel(1)
    kept, dropped = weakref.ref(used), weakref.ref(other)
    keep_programs([(graph, graph.nodes())])
    del used, other
    gc.collect()
    assert kept() is not None and dropped() is None
    run = graph.instantiate()
    graph.close()
    del graph
    gc.collect()
    assert kept() is not None
    run.close()
    del run
    device.synchronize()
    gc.collect()
    device.context.collect()
    assert kept() is None
