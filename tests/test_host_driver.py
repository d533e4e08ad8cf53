"""The host driver's own rules: poison, handles after their end, order, and threads that end."""

from __future__ import annotations

import gc
import inspect
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest

from ostinato.driver.api import (
    AllocNodeParams,
    BatchMemOpNodeParams,
    CaptureMode,
    CaptureStatus,
    ChildGraphNodeParams,
    ConditionalKind,
    ConditionalNodeParams,
    Driver,
    Edge,
    EmptyNodeParams,
    EventRecordNodeParams,
    ExecHandle,
    FunctionCode,
    FunctionHandle,
    GraphHandle,
    Image,
    KernelArguments,
    KernelTable,
    LaunchConfig,
    MemcpyNodeParams,
    MemOp,
    MemOpKind,
    MemsetNodeParams,
    NodeHandle,
    NodeKind,
    StreamHandle,
)
from ostinato.driver.host.driver import HostDriver
from ostinato.driver.host.kernel import HostKernel, HostLaunch, host_kernel
from ostinato.driver.host.memory import POISON
from ostinato.errors import ContextPoisonedError, DriverError, InputError, OutOfMemoryError, Status
from ostinato.testing import HeldStream
from tests.contract.kernels import Rig, arguments, refused
from tests.processes import python


@pytest.fixture
def driver() -> Iterator[HostDriver]:
    made = HostDriver()
    yield made
    made.close()


@pytest.fixture
def rig(driver: HostDriver) -> Rig:
    return Rig(driver)


def load(driver: HostDriver, *kernels: HostKernel) -> list[FunctionHandle]:
    module = driver.module_load(Image("host", functions={k.name: k for k in kernels}))
    return [driver.module_function(module, k.name) for k in kernels]


def launch(
    driver: HostDriver, stream: StreamHandle, kernel: HostKernel, *arguments: object
) -> None:
    (function,) = load(driver, kernel)
    driver.launch_kernel(stream, function, LaunchConfig(1, 1), kernel.signature.pack(arguments))


# --- what a kernel gets


def test_a_kernel_gets_views_numbers_and_bytes(driver: HostDriver) -> None:
    got: list[object] = []

    @host_kernel("x: *f32, y: *const u16, none: *i32, n: u32, f: f16, b: bytes[3], c: cond")
    def look(launch: HostLaunch, *arguments: object) -> None:
        got.extend([launch, *arguments])

    stream, address = driver.stream_create(), driver.mem_alloc(10)
    (function,) = load(driver, look)
    arguments = look.signature.pack([address + 4, address, 0, 7, 1.5, b"abc", 99])
    driver.launch_kernel(stream, function, LaunchConfig((2, 3), 64, 256, cluster=2), arguments)
    driver.stream_synchronize(stream)
    how, x, y, none, n, f, b, c = got
    assert isinstance(how, HostLaunch)
    assert (how.grid, how.block, how.shared, how.cluster) == ((2, 3, 1), (64, 1, 1), 256, (2, 1, 1))
    assert isinstance(x, np.ndarray)
    assert isinstance(y, np.ndarray)
    assert (x.dtype, x.shape, x.flags.writeable) == (np.float32, (1,), True)  # 6 bytes: one f32
    assert (y.dtype, y.shape, y.flags.writeable) == (np.uint16, (5,), False)
    assert (none, n, f, b, c) == (None, 7, 1.5, b"abc", 99)


def test_a_kernel_follows_addresses_that_it_reads_in_memory(driver: HostDriver) -> None:
    @host_kernel("box: *const u64")
    def follow(launch: HostLaunch, box: np.ndarray) -> None:
        launch.memory(int(box[0]), 8).view(np.uint32)[:] = 5, 6

    stream, box, target = driver.stream_create(), driver.mem_alloc(8), driver.mem_alloc(12)
    for offset in (4, 8):  # the second reaches outside
        source = np.array([target + offset], np.uint64)
        driver.memcpy_from_host(box, source.view(np.uint8).data, stream)
        launch(driver, stream, follow, box)
        if offset == 4:
            found = np.empty(12, np.uint8)
            driver.memcpy_to_host(found.data, target, stream)
            assert found.view(np.uint32).tolist()[1:] == [5, 6]
    with pytest.raises(
        ContextPoisonedError, match=r"8 bytes at .* are not all in one live"
    ) as caught:
        driver.stream_synchronize(stream)
    assert caught.value.status == Status.ILLEGAL_ADDRESS


def test_fresh_memory_is_poisoned(rig: Rig) -> None:
    address = rig.driver.mem_alloc(100)
    assert (rig.read(address, 100, np.uint8) == POISON).all()


def test_writing_to_a_const_pointer_fails(driver: HostDriver) -> None:
    @host_kernel("x: *const f32")
    def write(launch: HostLaunch, x: np.ndarray) -> None:
        x[0] = 1

    stream = driver.stream_create()
    launch(driver, stream, write, driver.mem_alloc(4))
    with pytest.raises(ContextPoisonedError) as caught:
        driver.stream_synchronize(stream)
    assert isinstance(caught.value.__cause__, ValueError)


def test_decoded_arguments_are_forgotten_with_their_memory(rig: Rig) -> None:
    driver = rig.driver
    x = driver.mem_alloc(1 << 20)
    rig.launch("fill", x, 1.0, 4)
    driver.synchronize()
    allocation = driver._memory.find(x)  # type: ignore[attr-defined]
    data = weakref.ref(allocation.data)
    del allocation
    driver.mem_free(x)
    assert data() is None


def test_a_name_of_its_own() -> None:
    @host_kernel("", name="entry", max_threads=32, static_shared=16)
    def function(launch: HostLaunch) -> None: ...

    assert (function.name, function.max_threads, function.static_shared) == ("entry", 32, 16)
    assert (function.size, function.layout, function.pointers) == (0, (), ())
    with pytest.raises(InputError):
        host_kernel("x: *what")
    with pytest.raises(InputError, match=r"called as f\(launch, a, b\): too many positional"):
        host_kernel("a: u32, b: u32", name="f")(lambda launch, a: None)
    host_kernel("a: u32, b: u32", name="f")(lambda launch, *rest: None)


def test_limits_of_a_kernel(driver: HostDriver) -> None:
    @host_kernel("", max_threads=64, static_shared=1024)
    def small(launch: HostLaunch) -> None: ...

    stream = driver.stream_create()
    (function,) = load(driver, small)
    none = KernelArguments(b"", ())
    info = driver.function_info(function)
    assert (info.max_threads_per_block, info.static_shared) == (64, 1024)
    for config in (
        LaunchConfig(1, 65),
        LaunchConfig(1, 1, 48 * 1024),
        LaunchConfig(4, 1, cluster=3),
        LaunchConfig(16, 1, cluster=16),
    ):
        with refused(Status.INVALID_VALUE):
            driver.launch_kernel(stream, function, config, none)
    assert driver.function_occupancy(function, 65, 0) == 0
    for threads, shared in ((0, 0), (1, -1)):
        with refused(Status.INVALID_VALUE):
            driver.function_occupancy(function, threads, shared)


# --- poison


@host_kernel("x: *f32")
def past_the_end(launch: HostLaunch, x: np.ndarray) -> None:
    x[10_000_000] = 1


@host_kernel("x: *f32")
def raises(launch: HostLaunch, x: np.ndarray) -> None:
    raise RuntimeError("deliberate")


@host_kernel("x: *f32")
def touch(launch: HostLaunch, x: np.ndarray) -> None: ...


@pytest.mark.parametrize(
    ("kernel", "offset", "status", "cause"),
    [
        (past_the_end, 0, Status.ILLEGAL_ADDRESS, IndexError),
        (raises, 0, Status.LAUNCH_FAILED, RuntimeError),
        (touch, 1 << 40, Status.ILLEGAL_ADDRESS, DriverError),
        (touch, 2, Status.MISALIGNED_ADDRESS, DriverError),
    ],
)
def test_a_kernel_that_fails_poisons_the_driver(
    driver: HostDriver, kernel: HostKernel, offset: int, status: Status, cause: type
) -> None:
    stream, other, event = driver.stream_create(), driver.stream_create(), driver.event_create()
    address = driver.mem_alloc(64)
    with HeldStream(driver, stream):
        launch(driver, stream, kernel, address + offset)
        driver.event_record(event, stream)
        driver.stream_wait_event(other, event)
        ran: list[int] = []
        driver.launch_host_function(other, lambda: ran.append(1))
    with pytest.raises(ContextPoisonedError) as caught:
        driver.stream_synchronize(other)
    assert caught.value.status == status
    assert isinstance(caught.value.__cause__, cause)
    assert kernel.name in str(caught.value)
    assert ran == []  # nothing runs on a poisoned context
    calls: list[Callable[[], object]] = [
        lambda: driver.mem_alloc(16),
        lambda: driver.mem_free(address),
        lambda: driver.stream_query(stream),
        lambda: driver.event_query(event),
        lambda: driver.graph_create(),
        lambda: driver.memory_info(),
        lambda: driver.stream_begin_capture(stream, CaptureMode.RELAXED),
        lambda: driver.synchronize(),
    ]
    for call in calls:
        with pytest.raises(ContextPoisonedError) as again:
            call()
        assert again.value.status == status
    driver.close()


def test_a_graph_that_fails_poisons_too(rig: Rig) -> None:
    driver = rig.driver
    graph, x = driver.graph_create(), driver.mem_alloc(64)
    rig.add(graph, (), MemcpyNodeParams(x, x + (1 << 40), 4))
    run = driver.graph_instantiate(graph)
    launch_again = driver.exec_prepare_launch(run, rig.stream)
    driver.exec_launch(run, rig.stream)
    with pytest.raises(ContextPoisonedError, match="memcpy") as caught:
        driver.stream_synchronize(rig.stream)
    assert caught.value.status == Status.ILLEGAL_ADDRESS
    with pytest.raises(ContextPoisonedError):
        launch_again()


def test_memory_freed_under_a_graph_is_an_illegal_address(rig: Rig) -> None:
    driver, graph = rig.driver, rig.driver.graph_create()
    x = driver.mem_alloc(64)
    rig.add(graph, (), "fill", x, 1.0, 4)
    run = driver.graph_instantiate(graph)
    driver.exec_launch(run, rig.stream)
    driver.stream_synchronize(rig.stream)
    driver.mem_free(x)
    driver.exec_launch(run, rig.stream)
    with pytest.raises(ContextPoisonedError) as caught:
        driver.stream_synchronize(rig.stream)
    assert caught.value.status == Status.ILLEGAL_ADDRESS


def test_a_module_unloaded_under_a_graph(driver: HostDriver) -> None:
    @host_kernel("")
    def gone(launch: HostLaunch) -> None: ...

    module = driver.module_load(Image("host", functions={"gone": gone}))
    function = driver.module_function(module, "gone")
    stream, graph = driver.stream_create(), driver.graph_create()
    from ostinato.driver.api import KernelNodeParams

    driver.graph_add_node(
        graph, (), KernelNodeParams(function, LaunchConfig(1, 1), KernelArguments(b"", ()))
    )
    run = driver.graph_instantiate(graph)
    driver.module_unload(module)
    with refused(Status.INVALID_HANDLE):
        driver.graph_instantiate(graph)
    driver.exec_launch(run, stream)
    with pytest.raises(ContextPoisonedError, match="unloaded"):
        driver.stream_synchronize(stream)


def test_setting_a_condition_that_is_not_there(rig: Rig) -> None:
    rig.launch("set_condition", 12345, rig.zeros(1, np.uint32))
    with pytest.raises(ContextPoisonedError, match="set_conditional"):
        rig.driver.stream_synchronize(rig.stream)


# --- handles after their end


def test_every_unknown_handle_is_400(rig: Rig) -> None:
    driver, s, x = rig.driver, rig.stream, rig.zeros(4)
    stream, event, graph = driver.stream_create(), driver.event_create(), driver.graph_create()
    node = rig.add(graph, (), EmptyNodeParams())
    run = driver.graph_instantiate(graph)
    module = driver.module_load(Image("host"))
    prepared = driver.exec_prepare_launch(run, s)
    on_stream = driver.exec_prepare_launch(run, stream)
    driver.stream_destroy(stream)
    with refused(Status.INVALID_HANDLE):
        on_stream()
    driver.exec_destroy(run)
    driver.graph_destroy(graph)
    driver.event_destroy(event)
    driver.module_unload(module)
    live = driver.graph_create()
    live_node = rig.add(live, (), EmptyNodeParams())
    live_run = driver.graph_instantiate(live)
    params = rig.params("fill", x, 1.0, 4)
    table = KernelTable([params.function], [params.config], [()], [False], bytearray(), [0], [0])
    gone: dict[str, int] = {
        "StreamHandle": stream,
        "EventHandle": event,
        "ModuleHandle": module,
        "GraphHandle": graph,
        "NodeHandle": node,
        "ExecHandle": run,
        "FunctionHandle": 1,
    }
    given: dict[str, object] = {
        "StreamHandle": s,
        "EventHandle": driver.event_create(),
        "GraphHandle": live,
        "NodeHandle": live_node,
        "ExecHandle": live_run,
        "FunctionHandle": params.function,
        "ModuleHandle": driver.module_load(Image("host")),
        "str": "x",
        "bool": True,
        "LaunchConfig": params.config,
        "KernelArguments": params.arguments,
        "CaptureMode": CaptureMode.RELAXED,
        "NodeParams": EmptyNodeParams(),
        "Sequence[NodeHandle]": (),
        "list[NodeHandle]": [],
        "Sequence[Edge]": [],
        "KernelTable": table,
        "Sequence[tuple[int, Sequence[int]]]": [(0, ())],
        "memoryview": memoryview(bytearray(4)),
        "Callable[[], object]": print,
        "FunctionCode": FunctionCode("x", "host"),
        "dst": x,
        "src": x,
        "nbytes": 4,
        "value": 0,
        "element_size": 1,
        "count": 4,
        "threads": 1,
        "shared": 0,
    }
    calls: list[Callable[[], object]] = [
        prepared,
        lambda: driver.stream_destroy(StreamHandle(0)),
        lambda: driver.graph_add_node(live, [node], EmptyNodeParams()),
        lambda: driver.graph_add_node(live, (), ChildGraphNodeParams(graph)),
        lambda: driver.graph_add_node(live, (), EventRecordNodeParams(event)),
        lambda: driver.graph_add_edges(live, [Edge(node, live_node)]),
        lambda: driver.exec_launch(ExecHandle(int(live)), s),  # a graph is no executable
        lambda: driver.graph_nodes(GraphHandle(int(live_run))),
        lambda: driver.node_kind(NodeHandle(int(live))),
    ]
    shortcuts = ("function_prepare_launch", "exec_prepare_kernel", "exec_prepare_kernels")
    for call in {*vars(Driver)}.difference(shortcuts):
        taken = getattr(inspect.getattr_static(Driver, call), "__annotations__", {})
        for name in (n for n, kind in taken.items() if kind in gone and n != "return"):
            wrong = arguments(call, given) | {name: gone[taken[name]]}
            calls.append(partial(getattr(driver, call), **wrong))
    assert len(calls) > 60
    for made in calls:
        with refused(Status.INVALID_HANDLE):
            made()


def test_bytes_nobody_owns_are_refused_at_the_call(rig: Rig) -> None:
    driver, s = rig.driver, rig.stream
    x, dead, pinned = driver.mem_alloc(64), driver.mem_alloc(64), driver.mem_alloc_pinned(64)
    driver.mem_free(dead)
    calls: list[Callable[[], object]] = [
        lambda: driver.memcpy(x, dead, 4, s),
        lambda: driver.memcpy(dead, x, 4, s),
        lambda: driver.memcpy(x, x, 65, s),
        lambda: driver.memcpy(x, x, -1, s),
        lambda: driver.memset(x + 60, 0, 4, 2, s),
        lambda: driver.memset(x, 0, 8, 1, s),
        lambda: driver.memset(x, -1, 1, 1, s),
        lambda: driver.memset(x, 256, 1, 1, s),
        lambda: driver.memset(x, 0, 1, -1, s),
        lambda: driver.memcpy_from_host(x + 61, memoryview(b"1234"), s),
        lambda: driver.memcpy_to_host(memoryview(bytearray(4)), dead, s),
        lambda: driver.memcpy_to_host(memoryview(b"1234"), x, s),
        lambda: driver.memcpy_from_host(x, memoryview(b"12345678")[::2], s),
        lambda: driver.mem_free(pinned),
        lambda: driver.mem_free_pinned(x),
    ]
    for call in calls:
        with refused(Status.INVALID_VALUE):
            call()


def test_parameters_that_cannot_be(rig: Rig) -> None:
    driver, x = rig.driver, rig.zeros(16)
    graph = driver.graph_create()
    handle = driver.conditional_create(graph)
    node, _ = rig.add(graph, (), EmptyNodeParams()), None
    bad = [
        MemcpyNodeParams(x, x, 0),
        MemcpyNodeParams(x, x, 4, height=0),
        MemcpyNodeParams(x, x, 4, dst_pitch=-1),
        MemcpyNodeParams(x, x, 4, height=2, src_pitch=3),
        MemsetNodeParams(x, 0, 4, 0),
        MemsetNodeParams(x, 0, 3, 1),
        MemsetNodeParams(x, 0, 4, 2, height=2, pitch=4),
        BatchMemOpNodeParams(()),
        BatchMemOpNodeParams((MemOp(MemOpKind.WRITE, x, 0, size=2),)),
        BatchMemOpNodeParams((MemOp(MemOpKind.WRITE, x + 4, 0, size=8),)),
        AllocNodeParams(0),
        AllocNodeParams(16, address=x),
        ConditionalNodeParams(handle, ConditionalKind.IF, 1, (graph,)),
    ]
    for params in bad:
        with refused(Status.INVALID_VALUE):
            rig.add(graph, (), params)
    with refused(Status.INVALID_VALUE):
        driver.conditional_create(graph, default=-1)
    with refused(Status.INVALID_VALUE):
        driver.graph_add_node(graph, [node], EmptyNodeParams(), [])
    assert driver.graph_nodes(graph) == (node,)


# --- memory


def test_the_device_has_so_much_memory_and_no_more() -> None:
    driver = HostDriver(total_memory=1000)
    assert driver.memory_info() == (1000, 1000)
    first = driver.mem_alloc(600)
    with pytest.raises(OutOfMemoryError, match="400 of 1000 are free"):
        driver.mem_alloc(401)
    driver.mem_alloc_pinned(5000)  # pinned memory is the host's
    driver.mem_alloc(400)
    assert driver.memory_info() == (0, 1000)
    driver.mem_free(first)
    assert driver.memory_info() == (600, 1000)
    driver.close()


def test_alloc_nodes_count_while_they_hold_memory() -> None:
    driver = HostDriver(total_memory=1000)
    stream, graph = driver.stream_create(), driver.graph_create()
    node = driver.graph_add_node(graph, (), AllocNodeParams(900))
    address = driver.node_params(node).address  # type: ignore[union-attr]
    run = driver.graph_instantiate(graph)
    assert driver.memory_range(address) is None
    taken = driver.mem_alloc(200)
    with pytest.raises(OutOfMemoryError):
        driver.exec_launch(run, stream)
    driver.mem_free(taken)
    driver.exec_launch(run, stream)
    driver.memset(address, 0, 1, 900, stream)  # known to be there by stream order
    driver.stream_synchronize(stream)
    assert driver.memory_info() == (100, 1000)
    driver.exec_destroy(run)
    driver.graph_destroy(graph)
    assert driver.memory_range(address) is not None  # it outlives both
    driver.mem_free(address)
    assert driver.memory_info() == (1000, 1000)
    with refused(Status.INVALID_VALUE):
        driver.memset(address, 0, 1, 900, stream)
    driver.close()


def test_freeing_waits_for_the_device(rig: Rig) -> None:
    driver, x = rig.driver, rig.driver.mem_alloc(64)
    with HeldStream(driver, rig.stream) as held:
        rig.launch("fill", x, 1.0, 4)
        held.release_after(0.03)
        began = time.perf_counter()
        driver.mem_free(x)
        assert time.perf_counter() - began > 0.02
    driver.stream_synchronize(rig.stream)


# --- capture


def test_modules_are_loaded_before_a_capture(rig: Rig) -> None:
    driver = rig.driver
    driver.stream_begin_capture(rig.stream, CaptureMode.THREAD_LOCAL)
    with refused(Status.STREAM_CAPTURE_UNSUPPORTED):
        driver.module_load(Image("host"))
    with refused(Status.STREAM_CAPTURE_INVALIDATED):
        driver.stream_end_capture(rig.stream)
    driver.stream_begin_capture(rig.stream, CaptureMode.RELAXED)
    driver.module_load(Image("host"))
    driver.stream_end_capture(rig.stream)


def test_graphs_under_capture_belong_to_it(rig: Rig) -> None:
    driver = rig.driver
    driver.stream_begin_capture(rig.stream, CaptureMode.RELAXED)
    graph = driver.stream_capture_info(rig.stream).graph
    other = driver.stream_create()
    calls: list[Callable[[], object]] = [
        lambda: driver.graph_destroy(graph),
        lambda: driver.graph_instantiate(graph),
        lambda: driver.stream_begin_capture_to_graph(other, graph, (), CaptureMode.RELAXED),
    ]
    for call in calls:
        with refused(Status.INVALID_VALUE):
            call()
    assert driver.stream_capture_info(other).status == CaptureStatus.NONE
    assert driver.stream_end_capture(rig.stream) == graph
    driver.graph_destroy(graph)


def test_broken_captures_leave_no_graph_behind(rig: Rig) -> None:
    driver = rig.driver
    driver.stream_begin_capture(rig.stream, CaptureMode.THREAD_LOCAL)
    graph = driver.stream_capture_info(rig.stream).graph
    rig.launch("nothing")
    with refused(Status.STREAM_CAPTURE_UNSUPPORTED):
        driver.mem_alloc(4)
    with refused(Status.STREAM_CAPTURE_INVALIDATED):
        driver.stream_end_capture(rig.stream)
    with refused(Status.INVALID_HANDLE):
        driver.graph_nodes(graph)


def test_a_graph_inside_itself_is_a_copy_of_what_it_was(rig: Rig) -> None:
    driver = rig.driver
    graph = driver.graph_create()
    first = driver.graph_add_node(graph, [], EmptyNodeParams())
    child = driver.graph_add_node(graph, [first], ChildGraphNodeParams(graph))
    params = driver.node_params(child)
    assert isinstance(params, ChildGraphNodeParams)
    assert params.graph != graph
    (inner,) = driver.graph_nodes(params.graph)
    assert driver.node_kind(inner) == NodeKind.EMPTY
    executable = driver.graph_instantiate(graph)
    stream = driver.stream_create()
    driver.exec_launch(executable, stream)
    driver.stream_synchronize(stream)


# --- order


def orders(seed: int | None, *, disabled: int | None = None) -> list[list[int]]:
    """What 30 executables of one graph note: 0 -> 2 -> 4 and 1 -> 3 -> 5."""
    driver = HostDriver(shuffle=seed)
    rig = Rig(driver)
    notes, cursor, graph = rig.zeros(6, np.uint32), rig.zeros(1, np.uint32), driver.graph_create()
    nodes: list[NodeHandle] = []
    for number in range(6):
        after = nodes[number - 2 : number - 1] if number > 1 else []
        nodes.append(rig.add(graph, after, "note", notes, cursor, number))
    seen = []
    for _ in range(30):
        driver.memset(cursor, 0, 4, 1, rig.stream)
        run = driver.graph_instantiate(graph)
        if disabled is not None:
            driver.exec_set_enabled(run, nodes[disabled], False)
        driver.exec_launch(run, rig.stream)
        (count,) = rig.values(cursor, 1, np.uint32)
        seen.append(rig.values(notes, count, np.uint32))
        driver.exec_destroy(run)
    driver.close()
    return seen


def test_nodes_that_nothing_orders_run_as_made_or_shuffled() -> None:
    assert orders(None) == [[0, 1, 2, 3, 4, 5]] * 30
    shuffled = orders(7)
    assert shuffled == orders(7), "a failure can be repeated"
    assert len({tuple(order) for order in shuffled}) > 5
    for order in shuffled:
        assert [n for n in order if n % 2 == 0] == [0, 2, 4], "edges hold"
        assert [n for n in order if n % 2] == [1, 3, 5]


def test_a_node_that_is_switched_off_still_orders_its_neighbours() -> None:
    """ROCm/rocm-systems#11359."""
    shuffled = orders(7, disabled=2)
    assert len({tuple(order) for order in shuffled}) > 3
    assert all([n for n in order if n % 2 == 0] == [0, 4] for order in shuffled)


# --- waiting


@pytest.mark.parametrize(
    ("kind", "before", "value", "after"),
    [
        (MemOpKind.WAIT_EQ, 0, 3, 3),
        (MemOpKind.WAIT_GEQ, 0xFFFFFFF0, 2, 5),  # cyclic
        (MemOpKind.WAIT_AND, 4, 3, 2),
        (MemOpKind.WAIT_NOR, 0xF0, 0xFFFFFF0F, 0),
    ],
)
def test_a_wait_for_memory_ends_when_it_is_written(
    rig: Rig, kind: MemOpKind, before: int, value: int, after: int
) -> None:
    driver, cell = rig.driver, rig.array([before], np.uint32)
    graph, other = driver.graph_create(), driver.stream_create()
    wait = rig.add(graph, (), BatchMemOpNodeParams((MemOp(kind, cell, value),)))
    rig.add(graph, [wait], "increment", cell)
    run = driver.graph_instantiate(graph)
    driver.exec_launch(run, rig.stream)
    time.sleep(0.01)
    assert not driver.stream_query(rig.stream)
    driver.memset(cell, after, 4, 1, other)
    assert rig.values(cell, 1, np.uint32) == [after + 1]


def test_waiting_forever_ends_with_the_driver() -> None:
    driver = HostDriver()
    rig = Rig(driver)
    cell, graph = rig.zeros(1, np.uint32), driver.graph_create()
    rig.add(graph, (), BatchMemOpNodeParams((MemOp(MemOpKind.WAIT_EQ, cell, 1),)))
    handle = driver.conditional_create(graph, default=1)
    rig.add(graph, (), ConditionalNodeParams(handle, ConditionalKind.WHILE))
    driver.exec_launch(driver.graph_instantiate(graph), rig.stream)
    other = driver.stream_create()
    endless = driver.graph_create()
    handle = driver.conditional_create(endless, default=1)
    rig.add(endless, (), ConditionalNodeParams(handle, ConditionalKind.WHILE))
    driver.exec_launch(driver.graph_instantiate(endless), other)
    time.sleep(0.01)
    began = time.perf_counter()
    driver.close()
    assert time.perf_counter() - began < 30  # it ends at all


# --- calls from kernels and host functions


def test_kernels_and_host_functions_must_not_call_the_driver(driver: HostDriver) -> None:
    stream, statuses = driver.stream_create(), list[int]()

    def calls() -> None:
        for call in (driver.synchronize, lambda: driver.mem_alloc(4), driver.memory_info):
            try:
                call()
            except DriverError as error:
                statuses.append(error.status)

    driver.launch_host_function(stream, calls)
    driver.stream_synchronize(stream)
    assert statuses == [Status.NOT_PERMITTED] * 3


# --- the end


def host_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("ostinato-host")]


def test_threads_start_with_work_and_end_with_the_driver() -> None:
    before = len(host_threads())
    driver = HostDriver()
    streams = [driver.stream_create() for _ in range(3)]
    assert len(host_threads()) == before
    for stream in streams:
        driver.launch_host_function(stream, lambda: None)
        driver.stream_synchronize(stream)
    assert len(host_threads()) == before + 3
    driver.stream_destroy(streams[0])
    _until(lambda: len(host_threads()) == before + 2)
    driver.close()
    assert len(host_threads()) == before
    driver.close()
    with refused(Status.INVALID_CONTEXT):
        driver.mem_alloc(4)
    with refused(Status.INVALID_CONTEXT):
        driver.stream_create()


def test_a_dropped_driver_ends_its_threads() -> None:
    before = len(host_threads())
    driver = HostDriver()
    stream = driver.stream_create()
    driver.launch_host_function(stream, lambda: None)
    driver.stream_synchronize(stream)
    gone = weakref.ref(driver)
    del driver
    gc.collect()
    assert gone() is None
    _until(lambda: len(host_threads()) == before)


def test_closing_while_a_stream_is_held_does_not_hang() -> None:
    driver = HostDriver()
    stream, ran = driver.stream_create(), list[int]()
    with HeldStream(driver, stream) as held:
        driver.launch_host_function(stream, lambda: ran.append(1))
        assert held.wait_until_held()
        held.release_after(0.2)
        driver.close()
    assert ran == []  # what had not begun was dropped


@pytest.mark.parametrize("ending", ["pass", "driver.close()", "raise SystemExit(0)"])
def test_the_interpreter_ends_with_work_under_way(ending: str) -> None:
    program = f"""
    import threading
    from ostinato.driver.host.driver import HostDriver
    driver = HostDriver()
    stream, started = driver.stream_create(), threading.Event()
    def block():
        started.set()
        threading.Event().wait(3600)
    driver.launch_host_function(stream, block)
    started.wait()
    {ending}
    """
    done = python("-c", textwrap.dedent(program))
    assert (done.returncode, done.stderr) == (0, "")


def _until(condition: Callable[[], bool], seconds: float = 300.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_memory_opened_on_another_device_outlives_its_own() -> None:
    one, other = HostDriver("one"), HostDriver("other")
    address = one.mem_alloc(64)
    handle = one.memory_share(address)
    free = other.memory_info()[0]
    assert other.memory_open_shared(handle) == other.memory_open_shared(handle) == address
    assert other.memory_info()[0] == free  # it is the first one's
    stream = other.stream_create()
    other.memcpy_from_host(address, memoryview(bytes(range(64))), stream)
    other.stream_synchronize(stream)
    found = bytearray(64)
    one.memcpy_to_host(memoryview(found), address, one.stream_create())
    assert found == bytes(range(64))
    one.close()
    other.memcpy_to_host(memoryview(found), address, stream)
    assert found == bytes(range(64))
    other.memory_end_shared(address)
    assert other.memory_range(address) is not None  # opened twice
    other.memory_end_shared(address)
    assert other.memory_range(address) is None
    with pytest.raises(DriverError):
        other.memory_open_shared(handle)
    other.close()
