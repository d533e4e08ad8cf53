"""A change of an executable reaches what it names, all of it or nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.driver.api import ChildGraphNodeParams, MemcpyNodeParams, MemsetNodeParams
from ostinato.driver.host.driver import HostDriver
from ostinato.errors import ClosedError, GraphError, InputError, UpdateRefusedError
from ostinato.testing import FaultyDriver, HeldStream
from tests.footguns.common import N, addresses, doubling, graph_of, ones
from tests.sources import config, kernel, preload


def test_a_change_does_not_reach_the_launch_under_way(device: Device, stream: ost.Stream) -> None:
    counter, other = device.zeros(1, np.int32), device.zeros(1, np.int32)
    run = graph_of(stream, kernel(device, "increment"), 1, counter, 1).instantiate(upload=stream)
    stream.synchronize()
    with HeldStream(stream):
        run.launch(stream)
        run.set(0, "by", 100)
        run.set(0, "counter", other)
    run.launch(stream)
    assert counter.to_numpy(stream)[0] == 1
    assert other.to_numpy(stream)[0] == 100


def test_a_scalar_that_looks_like_an_address_stays(device: Device, stream: ost.Stream) -> None:
    x, y, out = ones(device), ones(device), device.zeros(1, np.uint64)
    run = graph_of(stream, kernel(device, "number"), 1, x.address + 4, out).instantiate()
    report = run.rebind({x: y})
    run.launch(stream)
    assert out.to_numpy(stream)[0] == x.address + 4
    (left,) = report.left
    assert report.words == () and left.value == x.address + 4 and "number" in left.why


def test_a_pointer_is_rebound_from_where_it_points_now(device: Device, stream: ost.Stream) -> None:
    """A second rebind starts from what the first one set."""
    x, y, z, out = (device.array(np.full(N, v, np.float32)) for v in (1, 2, 3, 0))
    run = doubling(device, stream, x, out)
    for old, new, expected in ((x, y, 4), (y, z, 6), (z, x, 2)):
        assert len(run.rebind({old: new}).words) == 2
        assert run.rebind({old: new}).words == (), "nothing points there any more"
        run.launch(stream)
        assert (out.to_numpy(stream) == expected).all()
    run.set(0, "a", z)
    assert len(run.rebind({x: y}).words) == 1
    run.launch(stream)
    assert (out.to_numpy(stream) == 5).all()


def test_a_rebind_that_is_refused_leaves_every_word(device: Device, stream: ost.Stream) -> None:
    x, out = ones(device), device.zeros(N, np.float32)

    def work() -> None:
        ost.launch(stream, kernel(device, "add"), config(N // 2), x, x[: N // 2], out, N // 2)
        ost.copy(stream, out, x)

    run = ost.capture_function(stream, work).instantiate()
    small = device.zeros(N // 2, np.float32)
    with pytest.raises(InputError, match="nothing was changed"):
        run.rebind({x: small})
    run.launch(stream)
    assert (out.to_numpy(stream) == 1).all()


@pytest.mark.parametrize("given", ["buffer", "address"])
def test_a_rebind_to_less_memory_than_a_launch_uses_is_refused(
    device: Device, stream: ost.Stream, given: str
) -> None:
    x, out, tiny = ones(device), device.zeros(N, np.float32), device.zeros(4, np.float32)
    argument = x if given == "buffer" else x.address
    run = graph_of(stream, kernel(device, "add"), N, argument, x, out, N).instantiate()
    with pytest.raises(InputError, match="nothing was changed"):
        run.rebind({x: tiny})
    with pytest.raises(InputError, match="nothing was changed"):
        run.rebind({x[0:4]: tiny})  # the launch was given all of x
    run.launch(stream)
    assert (out.to_numpy(stream) == 2).all()


def test_a_rebind_that_makes_a_copy_overlap_is_refused(device: Device, stream: ost.Stream) -> None:
    """A GPU copies in any order; `copy` and `set` refuse such buffers too."""
    x, y, whole = ones(device), ones(device), device.zeros(2 * N, np.float32)
    graph = ost.capture_function(stream, lambda: ost.copy(stream, x[: N // 2], y[: N // 2]))
    run = graph.instantiate()
    with pytest.raises(InputError, match=r"overlap; nothing was changed"):
        run.rebind({x: whole[4:], y: whole})
    assert run.params(0).dst == x.address
    run.rebind({x: whole[N // 2 :], y: whole})
    assert run.params(0).dst == whole[N // 2 :].address


def test_a_rebind_takes_no_rows_for_pairs(device: Device, stream: ost.Stream) -> None:
    x, y, out = (device.zeros((2, N // 2), np.float32) for _ in range(3))
    run = doubling(device, stream, x, out)
    before = run.params(0)
    for wrong in ((x, y), [x], x.view(0, (2, 2)), [(x, y, y)], [x.address]):
        with pytest.raises(InputError, match="pairs are needed"):
            run.rebind(wrong)
    assert run.params(0) == before
    run.rebind([[x, y]])


def test_a_rebind_says_what_reaches_into_the_range_from_outside(
    device: Device, stream: ost.Stream
) -> None:
    x, y, out = ones(device), ones(device), device.zeros(N, np.float32)
    run = doubling(device, stream, x, out)
    report = run.rebind({x[N // 2 :]: y})
    assert report.words == () and len(report.left) == 2
    assert "reaches into it" in report.left[0].why


def test_a_refused_change_takes_back_all_that_was_made_before_it() -> None:
    """The undo sets what the executable had, and not what its definition has.

    All values differ from each other and from zero, so that half an undo shows."""
    faults = FaultyDriver(HostDriver())
    device = preload(Device(faults))
    stream = device.create_stream()
    a, b, c = (device.array(np.full(N, v, np.float32)) for v in (3, 5, 7))
    outs = [device.zeros(N, np.float32) for _ in range(4)]

    def work() -> None:
        for out in outs:
            ost.launch(stream, kernel(device, "add"), config(N), a, a, out, N)

    run = ost.capture_function(stream, work).instantiate()
    run.set(0, "b", c)
    held = [run.params(i) for i in range(4)]
    for at in range(1, 5):
        faults.fail("exec_set_params", at=at)
        with pytest.raises(UpdateRefusedError, match="add") as caught:
            run.rebind({a: b})
        assert caught.value.node_index == at - 1
        run.launch(stream)
        assert [out.to_numpy(stream)[0] for out in outs] == [10, 6, 6, 6]
        assert [run.params(i) for i in range(4)] == held
    run.rebind({a: b})
    run.launch(stream)
    assert [out.to_numpy(stream)[0] for out in outs] == [12, 10, 10, 10]


def test_an_executable_whose_undo_is_refused_runs_no_more() -> None:
    faults = FaultyDriver(HostDriver())
    device = preload(Device(faults))
    stream = device.create_stream()
    a, b = (device.array(np.full(N, v, np.float32)) for v in (3, 5))
    out = device.zeros(N, np.float32)

    def work() -> None:
        for _ in range(3):
            ost.launch(stream, kernel(device, "add"), config(N), a, a, out, N)

    run = ost.capture_function(stream, work).instantiate(upload=stream)
    run.launch(stream)
    faults.fail("exec_set_params", at=3, times=2)
    with pytest.raises(GraphError, match="instantiate its graph again"):
        run.rebind({a: b})
    assert not run.usable()
    faults.clear()
    faults.fail("exec_set_params", at=3)
    with pytest.raises(UpdateRefusedError):
        run.rebind({a: b})  # a change that is taken back does not mend it
    for _ in range(2):
        with pytest.raises(GraphError, match="instantiate its graph again"):
            run.launch(stream)
    run.graph.instantiate().launch(stream)
    assert (out.to_numpy(stream) == 6).all()


def test_a_refused_patch_by_bytes_leaves_the_argument() -> None:
    """The executable watches all memory, and one of its buffers is closed before the patch."""

    @ost.host_kernel("p: bytes[16], out: *out f32")
    def add_struct(launch: ost.lowlevel.HostLaunch, p: bytes, out: np.ndarray) -> None:
        one, other = (launch.memory(int(word), 4 * N) for word in np.frombuffer(p, np.uint64))
        out[:N] = one.view(np.float32) + other.view(np.float32)

    faults = FaultyDriver(HostDriver())
    device = Device(faults)
    stream = device.create_stream()
    adding = device.modules.get_or_compile(ost.Source(host=[add_struct]), "add_struct")
    x, y, out = ones(device), ones(device), device.zeros(N, np.float32)

    own = graph_of(stream, adding, 1, addresses(x, y), out)
    run = ost.Graph.adopt(device, own.handle, owner=own).instantiate()
    run.launch(stream)
    before = run.params(0)
    y.close()
    faults.fail("exec_set_params")
    with pytest.raises(UpdateRefusedError):
        run.set(0, 0, addresses(x, x))
    assert run.params(0) == before
    with pytest.raises(ClosedError, match="points at memory that was closed"):
        run.launch(stream)
    run.set(0, 0, addresses(x, x))
    run.launch(stream)
    assert (out.to_numpy(stream) == 2).all()


def two_rows(device: Device) -> tuple[ost.GraphExec, ost.Buffer, ost.Buffer]:
    """A graph that copies 2 rows of 4 bytes, 8 bytes apart, and fills two such rows."""
    src, dst = device.array(np.arange(16, dtype=np.uint8)), device.zeros(16, np.uint8)
    graph = ost.Graph.create(device)
    params = MemcpyNodeParams(dst.address, src.address, 4, 2, 1, 8, 8)
    node = graph.add(params, keep=(src, dst))
    graph.add(MemsetNodeParams(dst.address, 1, 1, 4, 2, 8), after=[node], keep=(dst,))
    return graph.instantiate(), src, dst


def test_a_copy_and_a_fill_of_rows_are_not_set_from_buffers(device: Device) -> None:
    run, src, dst = two_rows(device)
    before = [run.params(0), run.params(1)]
    with pytest.raises(UpdateRefusedError, match="2 rows"):
        run.set(0, dst=dst, src=src)
    with pytest.raises(UpdateRefusedError, match="2 rows"):
        run.set(1, dst=dst, value=0)
    assert [run.params(0), run.params(1)] == before


@pytest.mark.parametrize("door", ["set", "add_fill"])
@pytest.mark.parametrize(
    ("dtype", "count", "value"),
    [
        (np.uint8, 10, 256),
        (np.uint8, 10, -1),
        (np.int8, 10, 128),
        (np.uint8, 10, 1.5),
        ("bytes", 10, 256),
        (np.float32, N, 1e39),
        (np.float32, N, "1"),
        (np.float64, N, 1.1),
        (np.uint8, 0, 0),
    ],
)
def test_a_fill_that_does_not_fit_its_memory_is_refused(
    device: Device, stream: ost.Stream, door: str, dtype: Any, count: int, value: Any
) -> None:
    """The value does not fit an element, or there is none."""
    x, graph = device.array(np.ones(max(count, 1)), dtype), ost.Graph.create(device)
    graph.add_fill(x, 0)
    run = graph.instantiate()
    doors = {"set": lambda dst, value: run.set(0, dst=dst, value=value), "add_fill": graph.add_fill}
    with pytest.raises(InputError):
        doors[door](x[:count], value)
    assert len(graph) == 1
    run.launch(stream)
    assert (x.to_numpy(stream) == 0).all()


def test_another_function_does_not_keep_the_old_ones_signature(
    device: Device, stream: ost.Stream
) -> None:
    """The new kernel takes a number where the old one takes a pointer."""
    x, y, out = ones(device), ones(device), device.zeros(N, np.float32)
    big = device.zeros(N, np.uint64)
    run = graph_of(stream, kernel(device, "scale"), 1, x, N).instantiate()
    other = ost.prepare(kernel(device, "axpy"), config(N), x, y, out, 5)
    run.set(0, other.params, keep=other.keep)
    with pytest.raises(InputError, match="no signature"):
        run.set(0, "n", 3)
    run.set(0, other)
    run.set(0, "n", 3)  # an operation brings its signature
    run.launch(stream)
    assert out.to_numpy(stream)[:5].tolist() == [1, 1, 1, 0, 0]
    number = ost.prepare(kernel(device, "number"), config(1), x.address + 4, big)
    run.set(0, number)
    report = run.rebind({x: y})
    assert (len(report.words), len(report.left)) == (0, 1), "a number stays a number"
    run.launch(stream)
    assert big.to_numpy(stream)[0] == x.address + 4
    adding = graph_of(stream, kernel(device, "add"), N, x, y, out, N).instantiate()
    adding.set(0, other.params, keep=other.keep)  # its arguments have the same layout
    with pytest.raises(InputError, match="no signature"):
        adding.set(0, "b", y)


def test_nodes_inside_others_are_patched_where_they_are(device: Device) -> None:
    stream, x = device.create_stream(), device.zeros(1, np.int32)
    increment = kernel(device, "increment")
    inner = graph_of(stream, increment, 1, x, 1)
    graph = ost.Graph.create(device)
    graph.add_child(inner)
    branch = graph.add_conditional("if", graph.condition(default=1))
    with ost.capture(stream, into=branch.bodies[0]):
        ost.launch(stream, increment, config(1), x, 100)
    run = graph.instantiate()
    child, body = run.nodes()[0].children[0][0], run.nodes()[1].children[0][0]
    run.set(child, "by", 5)
    run.set(body, "by", 700)
    run.launch(stream)
    assert x.to_numpy(stream)[0] == 705
    assert (run.params(child), run.params(body)) != (child.params, body.params)
    stranger = graph_of(stream, increment, 1, x, 1).nodes()[0]
    with pytest.raises(InputError, match="not of the graph"):
        run.set(stranger, "by", 1)


@pytest.mark.parametrize("nested", [False, True])
def test_a_child_graph_that_was_set_is_what_later_changes_go_by(
    device: Device, stream: ost.Stream, nested: bool
) -> None:
    w, x, z = (device.array(np.full(N, value, np.float32)) for value in (1, 2, 9))
    out = device.zeros(N, np.float32)

    def adding(source: ost.Buffer) -> ost.Graph:
        graph = graph_of(stream, kernel(device, "add"), N, source, source, out, N)
        if not nested:
            return graph
        around = ost.Graph.create(device)
        around.add_child(graph)
        return around

    outer = ost.Graph.create(device)
    node = outer.add_child(adding(w))
    run, other = outer.instantiate(), adding(x)
    run.set(node, ChildGraphNodeParams(other.handle), keep=(other,))

    def answer() -> float:
        run.launch(stream)
        return float(out.to_numpy(stream)[-1])

    assert answer() == 4
    assert run.touches(x)
    assert not run.touches(w)
    inner = outer.nodes()[0].children[0][0]
    inner = inner.children[0][0] if nested else inner
    assert run.params(inner).arguments.raw(0) == x.address.to_bytes(8, "little")
    assert len(run.rebind({x: z}).words) == 2
    assert answer() == 18
    run.set(inner, 0, x)
    assert answer() == 11
    x.close()
    with pytest.raises(ClosedError, match="closed"):
        run.launch(stream)
    run.set(inner, 0, w)
    assert answer() == 10


def test_a_child_graph_in_another_order_is_refused(device: Device, stream: ost.Stream) -> None:
    x, y, z = ones(device), device.zeros(N, np.float32), ones(device)

    def copies(graph: ost.Graph) -> None:
        graph.add_copy(y, x)

    def fills(graph: ost.Graph) -> None:
        graph.add_fill(z, 7)

    graphs = []
    for order in ((copies, fills), (copies, fills), (fills, copies)):
        graphs.append(ost.Graph.create(device))
        for add in order:  # no edge between the two, which use different memory
            add(graphs[-1])
    outer = ost.Graph.create(device)
    node = outer.add_child(graphs[0])
    run = outer.instantiate()
    run.set(node, ChildGraphNodeParams(graphs[1].handle))
    with pytest.raises(UpdateRefusedError):
        run.set(node, ChildGraphNodeParams(graphs[2].handle))
    run.launch(stream)
    assert (y.to_numpy(stream) == 1).all()
