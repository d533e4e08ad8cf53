"""One test for each known way to get a silent wrong answer out of graphs."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import pickle
import sys
import threading
import time
import tracemalloc
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.driver.api import (
    ChildGraphNodeParams,
    MemcpyNodeParams,
    MemOp,
    MemOpKind,
    MemsetNodeParams,
)
from ostinato.driver.signature import pack_by_size
from ostinato.errors import (
    CaptureBrokenError,
    CaptureError,
    ClosedError,
    DriverError,
    GraphError,
    GraphFileError,
    HostFunctionError,
    InputError,
    OutOfMemoryError,
    UpdateRefusedError,
    VerificationError,
)
from ostinato.explain.races import unordered
from ostinato.explain.times import run_replay
from ostinato.graph.launching import _touched
from ostinato.step import HeldReplay
from ostinato.testing import FaultyDriver, HeldStream
from tests.interrupted import every, interrupt, lines
from tests.sources import config, kernel, preload

N = 256
AUTO_FREE = ost.lowlevel.InstantiateFlags.AUTO_FREE_ON_LAUNCH

pytestmark = pytest.mark.usefixtures("launcher")  # compiled, and in Python


@pytest.fixture
def stream(device: Device) -> ost.Stream:
    return device.create_stream()


def ones(device: Device) -> ost.Buffer:
    return device.array(np.ones(N, np.float32))


def doubling(device: Device, stream: ost.Stream, x: ost.Buffer, out: ost.Buffer) -> ost.GraphExec:
    """One kernel: out = x + x."""
    add = kernel(device, "add")
    return ost.capture_function(
        stream, lambda: ost.launch(stream, add, config(N), x, x, out, N)
    ).instantiate()


def test_a_host_number_is_frozen_and_device_state_is_not(
    device: Device, stream: ost.Stream
) -> None:
    x, y = ones(device), device.zeros(N, np.float32)
    factor = ost.DeviceScalar(device.context, np.float32, initial=1, stream=stream)
    value = 1.0

    def work() -> None:
        ost.launch(stream, kernel(device, "fill"), config(N), x, value, N)
        ost.launch(stream, kernel(device, "axpy"), config(N), x, factor, y, N)

    run = ost.capture_function(stream, work).instantiate()
    value = 5.0  # too late: the graph holds 1.0
    factor.set(3, stream)
    run.launch(stream)
    assert (x.to_numpy(stream) == 1).all()
    assert (y.to_numpy(stream) == 3).all()


def test_memory_under_a_graph_is_not_given_to_others(device: Device, stream: ost.Stream) -> None:
    out = device.zeros(N, np.float32)

    def captured() -> tuple[ost.GraphExec, int]:
        x = ones(device)
        with ost.capture(stream) as capture:
            ost.launch(stream, kernel(device, "add"), config(N), x, x, out, N)
        return capture.graph.instantiate(), x.address

    run, address = captured()
    gc.collect()
    device.synchronize()
    others = [device.array(np.full(N, 9, np.float32)) for _ in range(8)]
    assert all(other.address != address for other in others)
    run.launch(stream)
    assert (out.to_numpy(stream) == 2).all()


def test_a_rebound_buffer_lives_with_the_executable(device: Device, stream: ost.Stream) -> None:
    x, out = ones(device), device.zeros(N, np.float32)
    run = doubling(device, stream, x, out)
    run.rebind({x: device.array(np.full(N, 3, np.float32))})  # nobody else holds it
    gc.collect()
    device.synchronize()
    device.array(np.full(N, 9, np.float32))
    run.launch(stream)
    assert (out.to_numpy(stream) == 6).all()


def test_a_buffer_that_a_range_stood_for_lives_with_the_executable(
    device: Device, stream: ost.Stream
) -> None:
    x, y, out = ones(device), device.array(np.full(N, 3, np.float32)), device.zeros(N, np.float32)
    run = doubling(device, stream, x, out)
    run.rebind({x: y.range})
    del y
    gc.collect()
    device.synchronize()
    other = device.array(np.full(N, 9, np.float32))
    run.launch(stream)
    assert (out.to_numpy(stream) == 6).all()
    run.rebind([(run.manifest()[0].range, other.range)])
    other.close()
    with pytest.raises(ClosedError):
        run.launch(stream)
    with pytest.raises(ClosedError, match="new target"):
        run.rebind({x: other})


@pytest.mark.parametrize("way", ["captured", "added", "patched", "set", "by patcher"])
def test_a_buffer_lives_whose_range_is_an_argument(
    device: Device, stream: ost.Stream, way: str
) -> None:
    """The range was kept, and not the memory, which others got."""
    x, y, out = ones(device), device.array(np.full(N, 3, np.float32)), device.zeros(N, np.float32)
    add, memory = kernel(device, "add"), y.range

    def launch() -> None:
        ost.launch(stream, add, config(N), memory, memory, out, N)

    graph = ost.Graph.create(device)
    if way == "captured":
        graph = ost.capture_function(stream, launch)
    else:
        first = memory if way == "added" else x
        graph.add_kernel(add, config(N), first, first, out, N)
    run = graph.instantiate()
    match way:
        case "patched":
            run.patch_all([(0, 0, memory), (0, 1, memory)])
        case "set":
            run.set_params(0, ost.prepare(add, config(N), memory, memory, out, N))
        case "by patcher":
            for argument in (0, 1):
                run.patcher(0, argument)(memory)
    del y
    gc.collect()
    device.synchronize()
    others = [device.array(np.full(N, 9, np.float32)) for _ in range(4)]
    run.launch(stream)
    assert (out.to_numpy(stream) == 6).all()
    owner = device.context.owner_of(memory.address)
    assert isinstance(owner, ost.Buffer) and owner not in others
    owner.close()
    with pytest.raises(ClosedError, match="memory that was closed"):
        run.launch(stream)


def test_a_patched_buffer_lives_with_the_executable(device: Device, stream: ost.Stream) -> None:
    x, out = ones(device), device.zeros(N, np.float32)
    run = doubling(device, stream, x, out)
    run.patch(0, "a", device.array(np.full(N, 3, np.float32)))
    gc.collect()
    device.synchronize()
    device.array(np.full(N, 9, np.float32))
    run.launch(stream)
    assert (out.to_numpy(stream) == 4).all()


def test_lifted_work_keeps_what_its_graph_kept(device: Device, stream: ost.Stream) -> None:
    x, out = device.array(np.full(N, 3, np.float32)), device.zeros(N, np.float32)
    with ost.capture(stream) as capture:
        ost.launch(stream, kernel(device, "add"), config(N), x, x, out, N)
    address = x.address
    (operation,) = ost.lift(capture.graph, name="add")
    capture.graph.close()
    del x, capture
    gc.collect()
    device.synchronize()
    assert all(device.array(np.full(N, 9, np.float32)).address != address for _ in range(8))
    stream.submit(operation)
    assert (out.to_numpy(stream) == 6).all()


@pytest.mark.parametrize("how", ["rebound copy", "set copy", "set fill", "set launch", "address"])
def test_what_a_node_was_set_to_lives_with_the_executable(
    device: Device, stream: ost.Stream, how: str
) -> None:
    x, y, out = ones(device), ones(device), device.zeros(N, np.float32)
    add = kernel(device, "add")

    def work() -> None:
        ost.fill(stream, y, 0)
        ost.copy(stream, y, x)
        ost.launch(stream, add, config(N), y, y, out, N)

    run = ost.capture_function(stream, work).instantiate()
    new = device.array(np.full(N, 3, np.float32))
    address = new.address
    if how == "rebound copy":
        run.rebind({x: new})
    elif how == "set copy":
        run.set_memcpy(1, y, new)
    elif how == "set fill":
        run.set_memset(0, new, 0)
    elif how == "set launch":
        run.set_params(2, ost.prepare(add, config(N), new, new, out, N))
    else:
        run.patch(2, "a", address)
    del new
    gc.collect()
    device.synchronize()
    assert all(device.array(np.full(N, 9, np.float32)).address != address for _ in range(8))
    run.launch(stream)
    expected = {"set fill": 2, "address": 4}.get(how, 6)
    assert (out.to_numpy(stream) == expected).all()


def test_what_a_launch_under_way_points_at_is_kept_through_a_change(
    device: Device, stream: ost.Stream
) -> None:
    """Another library frees its memory without waiting, so it must not be let go of early."""

    class Tensor:
        def __init__(self, buffer: ost.Buffer) -> None:
            self.range, self.buffer = buffer.range, buffer

    x, out = ones(device), device.zeros(N, np.float32)
    run = ost.capture_function(
        stream, lambda: ost.launch(stream, kernel(device, "add"), config(N), x, x, out, N)
    ).instantiate(upload=stream)
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


def test_an_operation_that_is_launched_as_a_graph_is_as_any_other(
    device: Device, stream: ost.Stream
) -> None:
    x, out = ones(device), device.zeros(N, np.float32)
    operation = ost.prepare(kernel(device, "add"), config(N), x, x, out, N)

    def seen() -> set[float]:
        return set(out.to_numpy(stream).tolist())

    with HeldStream(stream):  # in stream order
        ost.fill(stream, x, 2)
        stream.submit_as_graph(operation)
        ost.fill(stream, x, 3)
        assert not stream.done
    assert seen() == {4}
    captured = ost.capture_function(stream, lambda: stream.submit_as_graph(operation))
    assert [node.name for node in captured.nodes] == ["add"] and seen() == {4}
    captured.instantiate().launch(stream)
    assert seen() == {6}
    ost.fill(stream, x, 4)
    with ost.record(stream) as recording:
        stream.submit_as_graph(operation)
    assert seen() == {8}
    ost.fill(stream, x, 5)
    recording.build().instantiate().launch(stream)
    assert seen() == {10}
    with (
        pytest.raises(CaptureError),
        ost.capture(device.create_stream(), contained=True),
    ):
        stream.submit_as_graph(operation)
    x.close()
    with pytest.raises(ClosedError):
        stream.submit_as_graph(operation)
    assert seen() == {10}


def test_a_cooperative_kernel_is_not_switched_off(device: Device, stream: ost.Stream) -> None:
    """libcuda 580.159 lost the context: two launches of a graph of one such node."""
    if not device.capabilities.cooperative_launch:
        pytest.skip("no device with cooperative launches")
    x, together = ones(device), ost.LaunchConfig(1, N, cooperative=True)
    graph = ost.capture_function(
        stream, lambda: ost.launch(stream, kernel(device, "scale"), together, x, N)
    )
    outer = ost.Graph.create(device)
    outer.add_child(graph)
    for run in (graph.instantiate(), outer.instantiate()):
        node = (
            run.nodes[0]
            if run.nodes[0].kind is ost.NodeKind.KERNEL
            else run.nodes[0].children[0][0]
        )
        with pytest.raises(UpdateRefusedError, match=r"cooperative.*give it a size of 0"):
            run.set_enabled(node, False)
        for _ in range(2):
            run.launch(stream)
    assert (x.to_numpy(stream) == 16).all()


@pytest.mark.parametrize(
    "change", ["set_config", "set_params", "set_enabled", "enabled", "patch", "patcher", "rebind"]
)
def test_nodes_of_a_closed_definition_cannot_be_changed(
    device: Device, stream: ost.Stream, change: str
) -> None:
    """Nor one that was read before: libcuda crashed over the node of a graph that is gone."""
    x, y, scale = ones(device), ones(device), kernel(device, "scale")
    double = ost.prepare(scale, config(N), x, N)
    graph = ost.capture_function(stream, lambda: stream.submit(double))
    run = graph.instantiate()
    run.set_params(0, double)
    run.patch(0, 1, N)
    patcher = run.patcher(0, 1)
    node = graph.node(0)
    for pair in ({x: y}, {y: x}):
        run.rebind(pair)
    graph.close()
    device.context.collect()
    calls: dict[str, Callable[[], object]] = {
        "set_config": lambda: run.set_config(node, ost.LaunchConfig(2, 32)),
        "set_params": lambda: run.set_params(0, ost.prepare(scale, config(1), x, 1)),
        "set_enabled": lambda: run.set_enabled(0, False),
        "enabled": lambda: run.enabled(0),
        "patch": lambda: run.patch(0, 1, 1),
        "patcher": lambda: patcher(1),
        "rebind": lambda: run.rebind({x: y}),
    }
    with pytest.raises(ClosedError):
        calls[change]()
    run.launch(stream)
    assert (x.to_numpy(stream) == 2).all()
    assert (y.to_numpy(stream) == 1).all()


@pytest.mark.parametrize("then", ["set_params", "set_config", "rebind", "update"])
def test_what_a_patch_pointed_at_is_let_go_of_by_the_next_change(
    device: Device, stream: ost.Stream, then: str
) -> None:
    """The record of the definition kept it for as long as the executable lived."""

    class Tensor:
        def __init__(self, buffer: ost.Buffer) -> None:
            self.range, self.buffer = buffer.range, buffer
            self.__cuda_array_interface__ = Borrowed(buffer, "<f4").__cuda_array_interface__

    x, out, add = ones(device), device.zeros(N, np.float32), kernel(device, "add")
    graph = ost.capture_function(stream, lambda: ost.launch(stream, add, config(N), x, x, out, N))
    run = graph.instantiate()
    tensor = Tensor(ones(device))
    alive = weakref.ref(tensor)
    run.patch(0, 0, tensor)
    run.patch(0, 1, tensor)
    run.launch(stream)
    if then == "set_params":
        run.set_params(0, ost.prepare(add, config(N), x, x, out, N))
    elif then == "set_config":
        run.set_config(0, ost.LaunchConfig(2, 32))
        run.set_params(0, ost.prepare(add, config(N), x, x, out, N))
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
    """Another stream that the executable is uploaded on later has nothing to wait for."""

    class Tensor:
        def __init__(self, buffer: ost.Buffer) -> None:
            self.range, self.buffer = buffer.range, buffer

    first, second = device.create_stream(), device.create_stream()
    x, theirs, out = ones(device), ones(device), device.zeros(N, np.float32)
    run = ost.capture_function(
        first, lambda: ost.launch(first, kernel(device, "add"), config(N), x, x, out, N)
    ).instantiate(upload=first)
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


def test_a_step_with_state_advances_once_a_call(device: Device, stream: ost.Stream) -> None:
    counter = device.zeros(1, np.int32)
    cache = ost.GraphCache(device)
    slots = [ost.Slot("counter", counter, ost.Role.STATE)]
    for verify in ("off", "first", 1):
        step = ost.GraphedStep(
            lambda stream, _: ost.launch(
                stream, kernel(device, "increment"), config(1), counter, 1
            ),
            stream=stream,
            cache=cache,
            name=f"count {verify}",
            slots=slots,
            verify=verify,
        )
        before = counter.to_numpy(stream)[0]
        for calls in range(1, 6):
            step()
            assert counter.to_numpy(stream)[0] == before + calls


def test_a_failed_capture_has_run_nothing(device: Device, stream: ost.Stream) -> None:
    counter = device.zeros(1, np.int32)

    def work(stream: ost.Stream, _: ost.Sizes) -> None:
        ost.launch(stream, kernel(device, "increment"), config(1), counter, 1)
        stream.synchronize()

    step = ost.GraphedStep(work, stream=stream, cache=ost.GraphCache(device), warmups=0)
    for calls in range(1, 4):
        step()
        assert counter.to_numpy(stream)[0] == calls


def test_a_change_does_not_reach_the_launch_under_way(device: Device, stream: ost.Stream) -> None:
    counter, other = device.zeros(1, np.int32), device.zeros(1, np.int32)
    run = ost.capture_function(
        stream, lambda: ost.launch(stream, kernel(device, "increment"), config(1), counter, 1)
    ).instantiate(upload=stream)
    stream.synchronize()
    with HeldStream(stream):
        run.launch(stream)
        run.patch(0, "by", 100)
        run.patch(0, "counter", other)
    run.launch(stream)
    assert counter.to_numpy(stream)[0] == 1
    assert other.to_numpy(stream)[0] == 100


def test_an_executable_closed_under_a_replay_finishes_it(
    device: Device, stream: ost.Stream
) -> None:
    x = ones(device)
    graph = ost.capture_function(
        stream, lambda: ost.launch(stream, kernel(device, "scale"), config(N), x, N)
    )
    run = graph.instantiate(upload=stream)
    stream.synchronize()
    with HeldStream(stream):
        run.launch(stream)
        run.close()
        graph.close()
        assert device.context.retired > 0  # noted, not destroyed
    assert (x.to_numpy(stream) == 2).all()
    assert device.context.collect() == 0


def test_an_evicted_graph_finishes_its_replay(device: Device, stream: ost.Stream) -> None:
    x = ones(device)
    cache = ost.GraphCache(device)
    run = ost.capture_function(
        stream, lambda: ost.launch(stream, kernel(device, "scale"), config(N), x, N)
    ).instantiate(upload=stream)
    cache.install("scale", run)
    stream.synchronize()
    with HeldStream(stream):
        assert cache.replay("scale", stream)
        assert cache.evict("scale")
        assert not cache.replay("scale", stream)
    assert (x.to_numpy(stream) == 2).all()


def test_a_replaced_graph_is_not_replayed(device: Device, stream: ost.Stream) -> None:
    counter = device.zeros(1, np.int32)
    cache = ost.GraphCache(device)
    for by in (1, 10):
        run = ost.capture_function(
            stream,
            lambda by=by: ost.launch(stream, kernel(device, "increment"), config(1), counter, by),
        ).instantiate()
        cache.install("count", run)
    cache.replay("count", stream)
    assert counter.to_numpy(stream)[0] == 10


def test_a_closed_executable_is_not_changed(device: Device, stream: ost.Stream) -> None:
    """Also while its last launch keeps the driver from destroying it."""
    x = ones(device)
    run = ost.capture_function(
        stream, lambda: ost.launch(stream, kernel(device, "scale"), config(N), x, N)
    ).instantiate(upload=stream)
    patch = run.patcher(0, "n")
    patch(1)
    run.launch(stream)  # what it needs for that is there
    with HeldStream(stream) as held:
        run.launch(stream)
        run.close()
        for change in (
            lambda: patch(2),
            lambda: run.patch(0, "n", 2),
            lambda: run.patch_all([(0, "n", 2)]),
            lambda: run.rebind({x: ones(device)}),
            lambda: run.set_enabled(0, False),
        ):
            with pytest.raises(ClosedError):
                change()
        held.release()
    assert (x.to_numpy(stream) == [4] + [1] * (N - 1)).all()


def test_a_closed_executable_says_so(device: Device, stream: ost.Stream) -> None:
    x = ones(device)
    run = ost.capture_function(stream, lambda: ost.fill(stream, x, 5)).instantiate()
    run.launch(stream)
    run.close()
    with pytest.raises(ClosedError):
        run.launch(stream)


def test_a_scalar_that_looks_like_an_address_stays(device: Device, stream: ost.Stream) -> None:
    x, y, out = ones(device), ones(device), device.zeros(1, np.uint64)
    run = ost.capture_function(
        stream,
        lambda: ost.launch(stream, kernel(device, "number"), config(1), x.address + 4, out),
    ).instantiate()
    report = run.rebind({x: y})
    run.launch(stream)
    assert out.to_numpy(stream)[0] == x.address + 4
    assert len(report.left) == 1


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


def test_an_update_that_is_refused_leaves_every_node(device: Device, stream: ost.Stream) -> None:
    x = ones(device)
    run = ost.capture_function(stream, lambda: ost.fill(stream, x, 5)).instantiate()
    other = ost.capture_function(
        stream, lambda: ost.launch(stream, kernel(device, "scale"), config(N), x, N)
    )
    with pytest.raises(UpdateRefusedError):
        run.update(other)
    run.launch(stream)
    assert (x.to_numpy(stream) == 5).all()


def test_recorded_order_holds_between_a_read_and_a_later_write(
    device: Device, stream: ost.Stream
) -> None:
    x, y, z = ones(device), ones(device), device.zeros(N, np.float32)
    with ost.record(stream) as recording:
        ost.launch(stream, kernel(device, "add"), config(N), x, y, z, N)  # reads x
        ost.fill(stream, x, 7)  # must come after
    graph = recording.build()
    assert len(graph.edges) == 1
    run = graph.instantiate()
    for expected in (8, 8):
        run.launch(stream)
        assert (z.to_numpy(stream) == expected).all()


def test_a_pool_never_gives_the_same_bytes_twice(device: Device) -> None:
    pool = device.pool(reserve=4096, slab=4096)
    pieces = [pool.empty(size, np.uint8) for size in (1, 100, 256, 1000, 4096, 9000, 3)]
    gc.collect()
    spans = sorted((p.range.address, p.range.end) for p in pieces)
    for (_, end), (start, _) in itertools.pairwise(spans):
        assert end <= start
    assert all(p.address % 256 == 0 for p in pieces)


def test_a_staged_value_is_not_baked_into_a_graph(device: Device, stream: ost.Stream) -> None:
    value = ost.DeviceScalar(device.context, np.int32, initial=1, stream=stream)
    with ost.capture(stream):
        ost.fill(stream, value.buffer, 0)
        with pytest.raises(CaptureError, match="staged write"):
            value.set(2, stream)


def test_the_same_entry_of_another_source_is_another_kernel(
    device: Device, stream: ost.Stream
) -> None:
    counter = device.zeros(1, np.int32)
    for by in (3, 4):
        text = f'extern "C" __global__ void bump(int* c) {{ *c += {by}; }}'

        @ost.host_kernel("c: *i32")
        def bump(launch, c, by=by):
            c[0] += by

        source = ost.Source(cuda=text, host=[bump], name="bump")
        bump_kernel = device.modules.get_or_compile(source, "bump")
        ost.launch(stream, bump_kernel, ost.LaunchConfig(1, 1), counter)
    assert counter.to_numpy(stream)[0] == 7


def test_closing_what_a_launch_still_uses_waits_for_it(device: Device, stream: ost.Stream) -> None:
    x, out = ones(device), device.zeros(N, np.float32)
    with HeldStream(stream) as held:
        ost.launch(stream, kernel(device, "add"), config(N), x, x, out, N)
        held.release_after(0.05)
        x.close()  # freeing waits for the device
        device.context.collect()
        device.array(np.full(N, 9, np.float32))
    assert (out.to_numpy(stream) == 2).all()


def test_two_threads_on_two_streams_replay_on_their_own(device: Device) -> None:
    counter = device.zeros(1, np.int32)
    first = device.create_stream()
    run = ost.capture_function(
        first, lambda: ost.launch(first, kernel(device, "increment"), config(1), counter, 1)
    ).instantiate(upload=first)
    second = device.create_stream()
    run.launch(second)  # both are prepared now

    def replay(stream: ost.Stream) -> None:
        for _ in range(300):
            run.launch(stream)

    with HeldStream(second):
        thread = threading.Thread(target=replay, args=(first,))
        thread.start()
        thread.join()
        first.synchronize()  # nothing of it went to the held stream
    threads = [threading.Thread(target=replay, args=(s,)) for s in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    device.synchronize()
    assert device.to_numpy(counter)[0] == 901


def test_a_graph_runs_on_the_stream_that_it_is_launched_on(device: Device) -> None:
    counter = device.zeros(1, np.int32)
    first, second = device.create_stream(), device.create_stream()
    run = ost.capture_function(
        first, lambda: ost.launch(first, kernel(device, "increment"), config(1), counter, 1)
    ).instantiate(upload=first)
    run.launch(first)
    run.launch(second)
    device.synchronize()
    for held, free in ((first, second), (second, first)):
        before = device.to_numpy(counter)[0]
        with HeldStream(held):
            run.launch(free)
            assert counter.to_numpy(free)[0] == before + 1
        device.synchronize()


def test_arguments_launched_before_go_where_they_are_launched_now(
    device: Device, stream: ost.Stream
) -> None:
    """What a driver keeps of a launch is for the same function, config and stream alone."""
    x = ones(device)
    scale, half, other = kernel(device, "scale"), config(N // 2), device.create_stream()
    twice = ost.prepare(scale, config(N), x, N)
    packed = twice.params.arguments

    def submit(where: ost.Stream, function: ost.Kernel, shape: ost.LaunchConfig) -> None:
        params = replace(twice.params, function=function.function, config=shape, arguments=packed)
        where.submit(replace(twice, params=params))

    for _ in range(2):
        stream.submit(twice)
    submit(stream, scale, half)
    np.testing.assert_array_equal(x.to_numpy(stream), np.repeat([8, 4], N // 2))
    submit(stream, kernel(device, "halve"), half)
    np.testing.assert_array_equal(x.to_numpy(stream), np.repeat([4, 4], N // 2))
    with ost.capture(other) as capture:
        submit(other, scale, config(N))
        submit(stream, scale, config(N))  # not in the capture
    assert len(capture.graph.nodes) == 1
    np.testing.assert_array_equal(x.to_numpy(stream), np.full(N, 8))
    run = capture.graph.instantiate(upload=other)
    run.launch(other)
    np.testing.assert_array_equal(x.to_numpy(other), np.full(N, 16))


# ---------------------------------------------------------------------------- whose graph it is


def count_step(
    device: Device, counter: ost.Buffer, cache: ost.GraphCache, by: int, **options: object
) -> ost.GraphedStep:
    """counter += by."""
    increment = kernel(device, "increment")
    options.setdefault("stream", device.create_stream())
    return ost.GraphedStep(
        lambda stream, _: ost.launch(stream, increment, config(1), counter, by),
        cache=cache,
        **options,
    )


def test_two_steps_in_one_cache_have_graphs_of_their_own(device: Device) -> None:
    """Two lambdas of one place have one name."""
    x, y, cache = device.zeros(1, np.int32), device.zeros(1, np.int32), ost.GraphCache(device)
    a, b = count_step(device, x, cache, 7), count_step(device, y, cache, 9)
    for _ in range(3):
        a()
        b()
    device.synchronize()
    assert [device.to_numpy(v)[0] for v in (x, y)] == [21, 27]


def test_two_instances_of_one_method_have_graphs_of_their_own(device: Device) -> None:
    class Model:
        def __init__(self, by: int) -> None:
            self.counter, self.by = device.zeros(1, np.int32), by

        def forward(self, stream: ost.Stream, _: ost.Sizes) -> None:
            ost.launch(stream, kernel(device, "increment"), config(1), self.counter, self.by)

    cache, models = ost.GraphCache(device), [Model(2), Model(5)]
    steps = [
        ost.GraphedStep(m.forward, stream=device.create_stream(), cache=cache, name="model")
        for m in models
    ]
    for _ in range(4):
        for step in steps:
            step()
    assert [device.to_numpy(m.counter)[0] for m in models] == [8, 20]


def test_graphs_are_shared_only_if_that_is_asked_for(device: Device) -> None:
    counter, cache = device.zeros(1, np.int32), ost.GraphCache(device)
    first = count_step(device, counter, cache, 1, share="count")
    other = count_step(device, counter, cache, 1, share="count")
    first()
    first()
    other()
    assert other.statistics().replays == 1
    assert len(cache) == 1
    assert device.to_numpy(counter)[0] == 3


def test_graphs_are_not_shared_by_a_number(device: Device) -> None:
    """A layer's number may be that of another step."""
    counter, cache = device.zeros(1, np.int32), ost.GraphCache(device)
    number = count_step(device, counter, cache, 1).key().identity
    with pytest.raises(InputError, match=f"share={number}: a text is needed"):
        count_step(device, counter, cache, 10, share=number)


def test_a_shared_graph_reads_the_size_of_the_call(device: Device) -> None:
    """Whichever step made it, and also when that one is closed."""
    stream, axpy = device.create_stream(), kernel(device, "axpy_rows")
    cache = ost.GraphCache(device, buckets=ost.PowersOfTwo(8, minimum=8))
    x, factor = device.array(np.ones((8, 1), np.float32)), device.array(np.ones(1, np.float32))
    total = device.zeros((8, 1), np.float32)

    def made() -> ost.GraphedStep:
        def run(stream: ost.Stream, sizes: ost.Sizes) -> None:
            ost.launch(
                stream, axpy, config(sizes.rows), x, factor, total, sizes.on_device("rows"), 1
            )

        return ost.GraphedStep(run, stream=stream, cache=cache, share="axpy")

    first, other = made(), made()
    for step, rows in ((first, 8), (first, 8), (other, 3), (first, 2), (other, 5)):
        step(rows=rows)
    assert other.statistics().replays == 2
    assert total.to_numpy(stream)[:, 0].tolist() == [5, 5, 4, 3, 3, 2, 2, 2]
    first.close()
    for rows in (1, 1, 4):
        other(rows=rows)
    assert other.statistics().replays == 4
    assert total.to_numpy(stream)[:, 0].tolist() == [8, 6, 5, 4, 3, 2, 2, 2]


@pytest.mark.parametrize("first", [True, False])
def test_a_step_that_calls_itself_keeps_its_size(device: Device, first: bool) -> None:
    """The inner call's size was on the device for the rest of the outer run."""
    stream, axpy = device.create_stream(), kernel(device, "axpy_rows")
    x, factor = device.array(np.ones((8, 1), np.float32)), device.array(np.ones(1, np.float32))
    total = device.zeros((8, 1), np.float32)

    def run(stream: ost.Stream, sizes: ost.Sizes) -> None:
        if not first:
            sizes.on_device("rows")
        if sizes.rows == 8:
            step(rows=3)
        ost.launch(stream, axpy, config(sizes.rows), x, factor, total, sizes.on_device("rows"), 1)

    cache = ost.GraphCache(device, buckets=ost.PowersOfTwo(8))
    step = ost.GraphedStep(run, stream=stream, cache=cache)
    for calls in (1, 2, 3):
        step(rows=8)
        assert total.to_numpy(stream)[:, 0].tolist() == [2 * calls] * 3 + [calls] * 5


@pytest.mark.parametrize("inner", ["shares", "held", "hold", "prepare"])
def test_a_step_keeps_its_size_whatever_its_run_calls(device: Device, inner: str) -> None:
    """Another step that shares its sizes, a graph of its own that is held, and to make one."""
    stream, axpy = device.create_stream(), kernel(device, "axpy_rows")
    x, factor = device.array(np.ones((8, 1), np.float32)), device.array(np.ones(1, np.float32))
    total = device.zeros((8, 1), np.float32)
    cache = ost.GraphCache(device, buckets=ost.PowersOfTwo(8))
    calls: list[Callable[[], object]] = []

    def add(stream: ost.Stream, sizes: ost.Sizes) -> None:
        ost.launch(stream, axpy, config(sizes.rows), x, factor, total, sizes.on_device("rows"), 1)

    def run(stream: ost.Stream, sizes: ost.Sizes) -> None:
        for call in calls if sizes.rows == 7 else ():
            call()
        add(stream, sizes)

    step = ost.GraphedStep(run, stream=stream, cache=cache, share="rows")
    other = ost.GraphedStep(add, stream=stream, cache=cache, share="rows")
    for _ in range(3):
        step(rows=2)
    held = step.hold(rows=2)
    assert isinstance(held, HeldReplay)
    with held:
        calls += {
            "shares": [lambda: other(rows=2)],
            "held": [held.launch],
            "hold": [lambda: other(rows=2), lambda: step.hold(rows=2)],
            "prepare": [lambda: other(rows=2), lambda: step.prepare(rows=4)],
        }[inner]
        ost.fill(stream, total, 0)
        step(rows=7)
    assert total.to_numpy(stream)[:, 0].tolist() == [2, 2, 1, 1, 1, 1, 1, 0]


@pytest.mark.parametrize("around", ["capture", "recording", "step", "recorded step"])
def test_a_graph_around_a_step_has_the_size_of_its_call(device: Device, around: str) -> None:
    """It read what later calls of the step left on the device."""
    stream, axpy = device.create_stream(), kernel(device, "axpy_rows")
    x, factor = device.array(np.ones((8, 1), np.float32)), device.array(np.ones(1, np.float32))
    total = device.zeros((8, 1), np.float32)

    def run(stream: ost.Stream, sizes: ost.Sizes) -> None:
        ost.launch(stream, axpy, config(sizes.rows), x, factor, total, sizes.on_device("rows"), 1)

    inner = ost.GraphedStep(run, stream=stream, cache=ost.GraphCache(device))
    for _ in range(0 if around == "step" else 3):  # a capture must do what the warm-up did
        inner(rows=4)

    def again(stream: ost.Stream, sizes: ost.Sizes) -> None:
        inner(rows=sizes.rows)

    if around == "capture":
        launch = ost.capture_function(stream, lambda: inner(rows=4)).instantiate().launch
    elif around == "recording":
        with ost.record(stream) as recording:
            inner(rows=4)
        launch = recording.build().instantiate().launch
    else:
        build: Any = "record" if around == "recorded step" else "capture"
        cache = ost.GraphCache(device)
        step = ost.GraphedStep(again, stream=stream, cache=cache, build=build)

        def launch(stream: ost.Stream) -> None:
            step(rows=4)

        launch(stream)
        launch(stream)
    for rows in (2, 4, 3):
        inner(rows=rows)
        for own in (4, rows, 2):
            ost.fill(stream, total, 0)
            launch(stream) if own == 4 else inner(rows=own)
            assert total.to_numpy(stream).sum() == own
    if around in ("step", "recorded step"):
        assert step.statistics().replays >= 3


def test_a_held_launch_has_its_size_whatever_other_threads_call(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, axpy = device.create_stream(), kernel(device, "axpy_rows")
    x, factor = device.array(np.ones((8, 1), np.float32)), device.array(np.ones(1, np.float32))
    total = device.zeros((8, 1), np.float32)

    def run(stream: ost.Stream, sizes: ost.Sizes) -> None:
        ost.launch(stream, axpy, config(sizes.rows), x, factor, total, sizes.on_device("rows"), 1)

    cache = ost.GraphCache(device, buckets=ost.PowersOfTwo(8))
    step = ost.GraphedStep(run, stream=stream, cache=cache)
    for rows in (3, 3, 3, 4):
        step(rows=rows)
    other = threading.Thread(target=step, kwargs={"rows": 4}, daemon=True)

    def late(*arguments: Any) -> None:
        other.start()
        other.join(0.2)
        run_replay(*arguments)

    held = step.hold(rows=3)
    assert isinstance(held, HeldReplay)
    ost.fill(stream, total, 0)
    with held:
        monkeypatch.setattr("ostinato.explain.times.run_replay", late)
        held.launch()
    other.join()
    assert total.to_numpy(stream)[:, 0].tolist() == [2, 2, 2, 1, 0, 0, 0, 0]


def test_a_step_that_is_gone_leaves_no_graph_for_the_next(device: Device) -> None:
    counter, cache = device.zeros(1, np.int32), ost.GraphCache(device)
    for by in (1, 10):
        step = count_step(device, counter, cache, by)
        for _ in range(3):
            step()
        del step
        gc.collect()
        device.synchronize()
        assert len(cache) == 0
    assert device.to_numpy(counter)[0] == 33


def test_an_empty_cache_is_not_false(device: Device) -> None:
    assert ost.GraphCache(device)


# -------------------------------------------------------------------- work that is not in the graph


def test_work_on_another_stream_is_not_lost(device: Device) -> None:
    """Five steps of x += 1, all of them on a stream that is not the step's."""
    counter, side = device.zeros(1, np.int32), device.create_stream()
    increment = kernel(device, "increment")
    for verify in ("off", "first", 1):
        step = ost.GraphedStep(
            lambda stream, _: ost.launch(side, increment, config(1), counter, 1),
            stream=device.create_stream(),
            cache=ost.GraphCache(device),
            slots=[ost.Slot("counter", counter, ost.Role.STATE)],
            verify=verify,
        )
        device.synchronize()
        before = device.to_numpy(counter)[0]
        for _ in range(5):
            step()
            device.synchronize()
        assert device.to_numpy(counter)[0] == before + 5
        (why,) = step.statistics().quarantined.values()
        assert "increment went to" in why and "test_footguns.py" in why


def test_half_the_work_on_another_stream_is_not_lost(device: Device) -> None:
    x, counter = device.zeros(1, np.int32), device.zeros(1, np.int32)
    side, increment = device.create_stream(), kernel(device, "increment")

    def work(stream: ost.Stream, _: ost.Sizes) -> None:
        ost.launch(stream, increment, config(1), x, 1)
        ost.launch(side, increment, config(1), counter, 1)

    step = ost.GraphedStep(work, stream=device.create_stream(), cache=ost.GraphCache(device))
    for _ in range(5):
        step()
    assert [device.to_numpy(v)[0] for v in (x, counter)] == [5, 5]


@pytest.mark.parametrize("call", ["copy", "host copy", "graph", "staged"])
def test_other_kinds_of_work_do_not_escape_either(device: Device, call: str) -> None:
    x, y = device.zeros(1, np.int32), device.zeros(1, np.int32)
    stream, side = device.create_stream(), device.create_stream()
    increment = kernel(device, "increment")
    value = ost.DeviceScalar(device.context, np.int32, initial=0, stream=side)
    run = ost.capture_function(
        side, lambda: ost.launch(side, increment, config(1), y, 1)
    ).instantiate(upload=side)
    calls = {
        "copy": lambda: ost.copy(side, y, x),
        "host copy": lambda: y.copy_from([7], side),
        "graph": lambda: run.launch(side),
        "staged": lambda: value.set(3, side),
    }

    def work(stream: ost.Stream, _: ost.Sizes) -> None:
        ost.launch(stream, increment, config(1), x, 1)
        calls[call]()

    step = ost.GraphedStep(work, stream=stream, cache=ost.GraphCache(device), warmups=0)
    side.synchronize()
    seen = []
    for _ in range(3):
        step()
        device.synchronize()
        seen.append((device.to_numpy(x)[0], device.to_numpy(y)[0]))
    assert [a for a, _ in seen] == [1, 2, 3]
    if call == "graph":
        assert [b for _, b in seen] == [1, 2, 3]  # once a call: not once more for the capture
    assert step.statistics().replays == 0


def test_a_refused_launch_breaks_the_capture_although_its_error_is_caught(device: Device) -> None:
    x, y, side = device.zeros(1, np.int32), device.zeros(1, np.int32), device.create_stream()
    increment = kernel(device, "increment")

    def work(stream: ost.Stream, _: ost.Sizes) -> None:
        ost.launch(stream, increment, config(1), x, 1)
        with contextlib.suppress(CaptureBrokenError):
            ost.launch(side, increment, config(1), y, 1)

    step = ost.GraphedStep(
        work, stream=device.create_stream(), cache=ost.GraphCache(device), warmups=0
    )
    for calls in (1, 2, 3):
        step()
        device.synchronize()
        assert [device.to_numpy(v)[0] for v in (x, y)] == [calls, calls]


def test_an_operation_that_only_the_warm_up_does_is_missed(device: Device) -> None:
    """What is cached on the host by the first run is not in the graph (vLLM PR 42444)."""
    x, plan, out = ones(device), device.zeros(N, np.float32), device.zeros(N, np.float32)
    planned = []

    def work(stream: ost.Stream, _: ost.Sizes) -> None:
        if not planned:
            ost.launch(stream, kernel(device, "add"), config(N), x, x, plan, N)
            planned.append(True)
        ost.launch(stream, kernel(device, "add"), config(N), x, plan, out, N)

    step = ost.GraphedStep(work, stream=device.create_stream(), cache=ost.GraphCache(device))
    for _ in range(3):
        step()
    why = "; ".join(step.statistics().quarantined.values())
    assert "1 operations, the eager run before had 2: add at" in why
    assert "test_footguns.py" in why


def test_a_capture_without_work_is_an_error(device: Device, stream: ost.Stream) -> None:
    with pytest.raises(CaptureError, match="nothing was captured"), ost.capture(stream):
        pass
    assert not stream.is_capturing
    empty = ost.Graph.create(device).instantiate()
    with pytest.raises(InputError, match="no nodes"):
        ost.GraphCache(device).install("nothing", empty)


# ------------------------------------------------------------------------------- recorded graphs


def test_a_forked_stream_is_recorded(device: Device) -> None:
    """Capture gives 5, 10, 15; so does the recording."""
    stream, side = device.create_stream(), device.create_stream()
    x, y = device.zeros(1, np.int32), device.zeros(1, np.int32)
    increment = kernel(device, "increment")

    def work(stream: ost.Stream, _: ost.Sizes) -> None:
        ost.launch(stream, increment, config(1), x, 1)
        side.wait(stream.record())
        ost.launch(side, increment, config(1), y, 5)
        stream.wait(side.record())
        ost.launch(stream, increment, config(1), x, 1)

    step = ost.GraphedStep(work, stream=stream, cache=ost.GraphCache(device), build="record")
    for calls in range(1, 5):
        step()
        device.synchronize()
        assert [device.to_numpy(v)[0] for v in (x, y)] == [2 * calls, 5 * calls]
    assert step.statistics().replays == 3


@pytest.mark.parametrize("kind", ["host copy", "scalar", "side stream", "waits"])
def test_what_cannot_be_recorded_breaks_the_recording(device: Device, kind: str) -> None:
    stream, side = device.create_stream(), device.create_stream()
    x, y = device.zeros(N, np.float32), device.zeros(N, np.float32)
    scalar = ost.DeviceScalar(device.context, np.float32, initial=0, stream=stream)
    values, outside = [], side.record()
    breaks = {
        "host copy": lambda: y.copy_from(np.full(N, values[-1], np.float32), stream),
        "scalar": lambda: scalar.set(values[-1], stream),
        "side stream": lambda: ost.fill(side, y, values[-1]),
        "waits": lambda: stream.wait(outside),
    }

    def work(stream: ost.Stream, _: ost.Sizes) -> None:
        values.append(float(len(values)))
        breaks[kind]()
        ost.launch(stream, kernel(device, "axpy"), config(N), y, scalar, x, N)

    step = ost.GraphedStep(work, stream=stream, cache=ost.GraphCache(device), build="record")
    for _ in range(3):
        step()
    assert len(values) == 3, "each call ran"
    (why,) = step.statistics().quarantined.values()
    assert "the recording was broken at" in why and "test_footguns.py" in why


@pytest.mark.parametrize("how", ["device", "asarray", "event", "event done", "elapsed"])
def test_what_the_host_reads_in_a_recording_is_not_baked_into_its_graph(
    host_device: Device, how: str
) -> None:
    """As in a capture.  The host may read memory of the device here, or pinned memory."""
    device, stream = host_device, host_device.create_stream()
    side, event = device.create_stream(), device.create_event(timing=True)
    x, y = device.zeros(1, np.int32), device.zeros(1, np.int32)
    increment = kernel(device, "increment")

    def read() -> int:
        stream.record(event)
        side.wait(event)
        while how == "event done" and not event.done:
            pass
        if how == "event":
            event.synchronize()
        if how == "device":
            device.synchronize()
        while how == "elapsed":
            with contextlib.suppress(DriverError):  # not reached yet
                event.elapsed_since(event)
                break
        return int(np.asarray(x)[0] if how == "asarray" else x.array[0])

    def work(stream: ost.Stream, _: ost.Sizes) -> None:
        ost.launch(stream, increment, config(1), x, 1)
        ost.launch(stream, increment, config(1), y, read())

    step = ost.GraphedStep(work, stream=stream, cache=ost.GraphCache(device), build="record")
    for expected in (1, 3, 6):
        step()
        assert y.to_numpy(stream)[0] == expected
    (why,) = step.statistics().quarantined.values()
    assert "the recording was broken at" in why and "the host waited for" in why


def test_a_recorded_launch_of_a_changed_graph_is_not_its_definition(device: Device) -> None:
    stream, x = device.create_stream(), device.zeros(1, np.int32)
    increment = kernel(device, "increment")
    run = ost.capture_function(
        stream, lambda: ost.launch(stream, increment, config(1), x, 1)
    ).instantiate(upload=stream)
    run.patch(0, "by", 10)
    step = ost.GraphedStep(
        lambda stream, _: run.launch(stream),
        stream=stream,
        cache=ost.GraphCache(device),
        build="record",
    )
    for calls in range(1, 4):
        step()
        assert x.to_numpy(stream)[0] == 10 * calls


def test_a_recorded_launch_is_not_of_what_its_graph_became(device: Device) -> None:
    stream, x = device.create_stream(), device.zeros(1, np.int32)
    increment = kernel(device, "increment")
    graph = ost.capture_function(stream, lambda: ost.launch(stream, increment, config(1), x, 1))
    run = graph.instantiate()
    with ost.record(stream) as recording:
        run.launch(stream)
    same = recording.build()
    graph.add_kernel(increment, config(1), x, 10)
    with pytest.raises(CaptureBrokenError, match=r"test_footguns.*nodes were added since"):
        recording.build()
    same.instantiate().launch(stream)
    assert x.to_numpy(stream)[0] == 2


@pytest.mark.parametrize("forked", [False, True])
def test_what_is_captured_in_a_recording_did_not_run(device: Device, forked: bool) -> None:
    """As a step does that is called by a recorded one, and captures itself meanwhile."""
    stream, side = device.create_stream(), device.create_stream()
    x, y = device.zeros(1, np.int32), device.zeros(1, np.int32)
    increment = kernel(device, "increment")

    def work(stream: ost.Stream, _: ost.Sizes) -> None:
        ost.launch(stream, increment, config(1), x, 1)
        if forked:
            side.wait(stream.record())
            ost.launch(side, increment, config(1), y, 1)
            stream.wait(side.record())

    inner = ost.GraphedStep(work, stream=stream, cache=ost.GraphCache(device))
    inner()

    def run(stream: ost.Stream, _: ost.Sizes) -> None:
        inner()

    step = ost.GraphedStep(run, stream=stream, cache=ost.GraphCache(device), build="record")
    for calls in (2, 3, 4):
        step()
        assert x.to_numpy(stream)[0] == calls
        assert y.to_numpy(stream)[0] == (calls if forked else 0)
    assert step.statistics().replays == 2


def test_a_recorded_run_that_raises_is_not_tried_again(device: Device) -> None:
    stream, x, fail = device.create_stream(), device.zeros(1, np.int32), [True]

    def work(stream: ost.Stream, _: ost.Sizes) -> None:
        ost.launch(stream, kernel(device, "increment"), config(1), x, 1)
        if fail:
            fail.clear()
            raise ZeroDivisionError("mine")

    step = ost.GraphedStep(work, stream=stream, cache=ost.GraphCache(device), build="record")
    with pytest.raises(ZeroDivisionError):
        step()
    for _ in range(2):
        assert step().action.value == "eager"
    assert x.to_numpy(stream)[0] == 3
    assert "mine" in str(step.statistics().quarantined)


# ------------------------------------------------------------------------------- other threads


def in_thread(work: Callable[[], object]) -> BaseException | None:
    """Runs `work` on a thread to its end; what it raised."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "it hangs"
    return raised[0] if raised else None


def test_another_threads_work_does_not_join_a_capture(device: Device, stream: ost.Stream) -> None:
    x, y = device.zeros(1, np.int32), device.zeros(1, np.int32)
    increment = kernel(device, "increment")
    with ost.capture(stream) as capture:
        ost.launch(stream, increment, config(1), x, 1)
        for call in (
            lambda: ost.launch(stream, increment, config(1), y, 1),
            lambda: ost.fill(stream, y, 3),
            stream.synchronize,
            lambda: y.to_numpy(stream),
            stream.record,
            device.synchronize,  # it would break the capture in any mode
        ):
            error = in_thread(call)
            assert isinstance(error, CaptureError) and "another thread" in str(error)
    assert len(capture.graph) == 1  # neither joined nor broken
    capture.graph.instantiate().launch(stream)
    assert [v.to_numpy(stream)[0] for v in (x, y)] == [1, 0]


def test_two_threads_steps_on_one_stream_take_turns(device: Device) -> None:
    stream, cache = device.create_stream(), ost.GraphCache(device)
    x, y = device.zeros(1, np.int32), device.zeros(1, np.int32)
    inside, increment = threading.Event(), kernel(device, "increment")
    first, joined = [], []

    def slowly(stream: ost.Stream, _: ost.Sizes) -> None:
        ost.launch(stream, increment, config(1), x, 1)
        if first and stream.is_capturing:
            inside.set()
            time.sleep(0.05)  # the other thread's step comes now
            joined.append(len(stream.capture_info.dependencies))
        first.append(True)

    a = ost.GraphedStep(slowly, stream=stream, cache=cache)
    b = count_step(device, y, cache, 1, stream=stream)

    def other() -> None:
        assert inside.wait(30)
        b()

    thread = threading.Thread(target=other)
    thread.start()
    for _ in range(4):
        a()
    thread.join(60)
    assert not thread.is_alive()
    device.synchronize()
    assert [device.to_numpy(v)[0] for v in (x, y)] == [4, 1]
    assert joined == [1]


def test_two_objects_of_one_stream_are_one_stream(device: Device, stream: ost.Stream) -> None:
    """Two adoptions of one foreign stream, say."""
    x, again = ones(device), ost.Stream(device.context, stream.handle, owned=False, owner=stream)
    assert again.turn is stream.turn
    with ost.capture(stream):
        ost.fill(stream, x, 1)
        error = in_thread(lambda: ost.fill(again, x, 2))
        assert isinstance(error, CaptureError)


# ----------------------------------------------------------------------- checks that see everything


def checked_step(
    device: Device,
    work: Callable[..., object],
    slots: list[ost.Slot],
    **options: object,
) -> ost.GraphedStep:
    """A step that is checked as often as can be, unless the options say otherwise."""
    options = {"verify": 1, "warmups": 0, "stream": device.create_stream(), **options}
    cache = ost.GraphCache(device, buckets=ost.PowersOfTwo(16))
    return ost.GraphedStep(work, cache=cache, slots=slots, **options)


@pytest.mark.parametrize("build", ["capture", "record"])
@pytest.mark.parametrize("verify", ["first", 1])
def test_rows_of_a_state_that_padding_writes_are_found(
    device: Device, build: str, verify: object
) -> None:
    """acc[:rows] += 1 with the bucketed rows: batches 3, 3, 3, 4, 4 gave [5 5 5 5]."""
    acc, one = device.zeros(4, np.float32), device.array(np.ones(4, np.float32))
    factor = device.array(np.ones(1, np.float32))

    def work(stream: ost.Stream, sizes: ost.Sizes) -> None:
        ost.launch(stream, kernel(device, "axpy"), config(sizes.rows), one, factor, acc, sizes.rows)

    slots = [ost.Slot("acc", acc, ost.Role.STATE, size="rows")]
    step = checked_step(device, work, slots, build=build, verify=verify)
    decisions = [step(rows=rows) for rows in (3, 3, 3, 4, 4)]
    assert acc.to_numpy(step.stream).tolist() == [5, 5, 5, 2]
    assert "padding rows of a state" in decisions[0].detail
    strict = checked_step(device, work, slots, build=build, verify=verify, strict=True)
    with pytest.raises(VerificationError, match="padding rows of a state"):
        strict(rows=3)
    assert acc.to_numpy(step.stream).tolist() == [5, 5, 5, 2], "an error has changed nothing"
    slots = [ost.Slot("acc", acc, ost.Role.STATE, size="rows", scratch_padding=True)]
    allowed = checked_step(device, work, slots, build=build, verify=verify, strict=True)
    for _ in range(3):
        allowed(rows=3)
    assert acc.to_numpy(allowed.stream).tolist()[:3] == [8, 8, 8]


@pytest.mark.parametrize("made", ["prepared", "recorded", "held"])
def test_a_graph_is_checked_however_it_was_made(device: Device, made: str) -> None:
    x, value = ones(device), [1.0]

    def work(stream: ost.Stream, _: ost.Sizes) -> None:
        ost.launch(stream, kernel(device, "fill"), config(N), x, value[0], N)

    build = "record" if made == "recorded" else "capture"
    slots = [ost.Slot("x", x, ost.Role.OUTPUT)]
    step = checked_step(device, work, slots, verify="first", strict=True, build=build)
    if made == "prepared":
        step.prepare()
    elif made == "held":
        assert not isinstance(step.hold(), HeldReplay)  # a call would do more: it checks
        step.prepare()
        assert not isinstance(step.hold(), HeldReplay)
    else:
        step()
    value[0] = 2.0
    with pytest.raises(VerificationError, match="changed since its capture"):
        step()


def test_a_graph_that_writes_nothing_is_found(device: Device) -> None:
    """The output holds the right answer already: that of the call before."""
    x, out, other = ones(device), device.zeros(N, np.float32), device.zeros(N, np.float32)
    where = [out]

    def work(stream: ost.Stream, _: ost.Sizes) -> None:
        ost.launch(stream, kernel(device, "add"), config(N), x, x, where[0], N)

    slots = [ost.Slot("x", x, ost.Role.INPUT), ost.Slot("out", out, ost.Role.OUTPUT)]
    step = checked_step(device, work, slots, verify="first", strict=True)
    ost.launch(step.stream, kernel(device, "add"), config(N), x, x, out, N)
    where[0] = other
    step.prepare()
    where[0] = out
    with pytest.raises(VerificationError, match="slot 'out'"):
        step()


def test_an_output_that_no_run_writes_is_found(device: Device) -> None:
    x, out = ones(device), device.zeros(N, np.float32)

    def work(stream: ost.Stream, _: ost.Sizes) -> None:
        ost.launch(stream, kernel(device, "scale"), config(N), x, N)

    slots = [ost.Slot("x", x, ost.Role.STATE), ost.Slot("out", out, ost.Role.OUTPUT)]
    step = checked_step(device, work, slots)
    assert "neither run writes it" in step().detail
    assert (x.to_numpy(step.stream) == 2).all()


def test_an_input_that_is_written_is_found(device: Device) -> None:
    x, out = ones(device), device.zeros(N, np.float32)

    def work(stream: ost.Stream, _: ost.Sizes) -> None:
        ost.launch(stream, kernel(device, "add"), config(N), x, x, out, N)
        ost.launch(stream, kernel(device, "scale"), config(N), x, N)

    slots = [ost.Slot("x", x, ost.Role.INPUT), ost.Slot("out", out, ost.Role.OUTPUT)]
    step = checked_step(device, work, slots)
    seen = []
    for _ in range(3):
        decision = step()
        seen.append((x.to_numpy(step.stream)[0], out.to_numpy(step.stream)[0]))
    assert seen == [(2, 2), (4, 4), (8, 8)], "the check takes nothing back"
    assert "changes an input" in decision.detail


def test_slots_that_overlap_are_refused(device: Device) -> None:
    x = ones(device)
    slots = [ost.Slot("all", x, ost.Role.STATE), ost.Slot("part", x[0:2], ost.Role.INPUT)]
    with pytest.raises(InputError, match="overlap"):
        checked_step(device, lambda stream, _: None, slots)


@pytest.mark.parametrize("dtype", [np.int32, np.uint16, np.int8, np.bool_, np.float16])
def test_padding_of_every_type_is_poisoned(device: Device, dtype: type) -> None:
    """Zeros in the padding hide a sum over all rows of the bucket."""
    x = device.zeros(8, dtype)
    out = device.zeros(1, np.float32)

    @ost.host_kernel("x: *const bytes, n: u32, out: *f32")
    def total(launch, x, n, out):
        out[0] = float(x[:n].sum(dtype=np.float64))

    text = """extern "C" __global__ void total(const unsigned char* x, unsigned n, float* out) {
        float s = 0; for (unsigned i = 0; i < n; ++i) s += x[i]; *out = s; }"""
    source = ost.Source(cuda=text, host=[total], name="total")
    summed = device.modules.get_or_compile(source, "total")

    def work(stream: ost.Stream, sizes: ost.Sizes) -> None:
        nbytes = sizes.rows * np.dtype(dtype).itemsize
        ost.launch(stream, summed, ost.LaunchConfig(1, 1), x, nbytes, out)

    slots = [ost.Slot("x", x, ost.Role.INPUT, size="rows"), ost.Slot("out", out, ost.Role.OUTPUT)]
    step = checked_step(device, work, slots)
    x.copy_from(np.array([1, 1, 0, 0, 0, 0, 0, 0], dtype), step.stream)
    expected = float(x.to_numpy(step.stream)[:3].view(np.uint8).sum())
    decision = step(rows=3)
    assert "padding" in decision.detail
    assert out.to_numpy(step.stream)[0] == expected
    assert x.to_numpy(step.stream).tolist() == np.array([1, 1, 0, 0, 0, 0, 0, 0], dtype).tolist()


def test_a_first_check_without_padding_is_repeated_with_some(device: Device) -> None:
    x, out = device.array(np.ones((4, 4), np.float32)), device.zeros(4, np.float32)

    def work(
        stream: ost.Stream, sizes: ost.Sizes
    ) -> None:  # the last row of the bucket reaches row 0
        ost.launch(stream, kernel(device, "add"), config(4), x, x[sizes.rows - 1], out, 4)

    slots = [ost.Slot("x", x, ost.Role.INPUT, size="rows"), ost.Slot("out", out, ost.Role.OUTPUT)]
    step = checked_step(device, work, slots, verify="first")
    assert step(rows=4).action.value == "build"
    assert "padding" in step(rows=3).detail


LEAKS = {
    # By the reduction: its dtype, the rows in use, and the padding that is there.
    "min": (np.float32, [[5, 6, 7]], [9]),
    "max": (np.int32, [[5, 6, 7]], [9]),
    "total": (np.int32, [[0, 1, 1], [1, 0, 1]], [1, 0]),
    "differing": (np.int32, [[0, 1, 1], [1, 0, 1]], [1, 0]),
}


@pytest.mark.parametrize("how", LEAKS)
def test_padding_that_two_poisons_do_not_show_is_found(device: Device, how: str) -> None:
    """A minimum ignores NaN and large numbers, a maximum of whole numbers what rows in use hold,
    and the sum of two inputs stays the same when their poisons change places."""
    dtype, used, behind = LEAKS[how]
    kind = "f32" if dtype is np.float32 else "i32"
    word = {"f32": "float", "i32": "int"}[kind]

    @ost.host_kernel(f"x: *const {kind}, y: *const {kind}, n: u32, out: *out {kind}")
    def reduced(launch, x, y, n, out):
        x, y = x[:n], y[:n]
        match how:
            case "min":
                out[0] = np.fmin.reduce(x)
            case "max":
                out[0] = x.max()
            case "total":
                out[0] = (x + y).sum()
            case "differing":
                out[0] = (x != y).sum()

    first, line = {
        "min": ("x[0]", "s = x[i] < s ? x[i] : s;"),
        "max": ("x[0]", "s = x[i] > s ? x[i] : s;"),
        "total": ("0", "s += x[i] + y[i];"),
        "differing": ("0", "s += x[i] != y[i];"),
    }[how]
    text = f"""extern "C" __global__ void reduced(const {word}* x, const {word}* y, unsigned n,
        {word}* out) {{ {word} s = {first}; for (unsigned i = 0; i < n; ++i) {line} *out = s; }}"""
    source = ost.Source(cuda=text, host=[reduced], name="reduced")
    reduce = device.modules.get_or_compile(source, "reduced")
    rows = [[*values, more] for values, more in zip(used, behind, strict=True)]
    buffers = [device.array(np.array(values, dtype)) for values in rows]
    out = device.zeros(1, dtype)

    def work(stream: ost.Stream, sizes: ost.Sizes) -> None:
        ost.launch(stream, reduce, ost.LaunchConfig(1, 1), buffers[0], buffers[-1], sizes.rows, out)

    slots = [ost.Slot(f"x{i}", x, ost.Role.INPUT, size="rows") for i, x in enumerate(buffers)]
    step = checked_step(device, work, [*slots, ost.Slot("out", out, ost.Role.OUTPUT)])
    assert "padding rows reach the answer" in step(rows=3).detail
    wanted = {"min": 5, "max": 7, "total": 4, "differing": 2}[how]
    assert out.to_numpy(step.stream)[0] == wanted


def test_padding_of_each_size_is_checked(device: Device) -> None:
    """Padding of one size had been checked, so that of the other was believed."""
    x, y = (device.array(np.ones(4, np.float32)) for _ in range(2))
    sums = [device.zeros(1, np.float32) for _ in range(2)]
    most = ost.DeviceScalar(
        device, "u4", initial=1 << 20, stream=(stream := device.create_stream())
    )

    def work(stream: ost.Stream, sizes: ost.Sizes) -> None:
        at = config(1)
        ost.launch(
            stream, kernel(device, "total"), at, x, sizes.rows, sizes.on_device("rows"), sums[0]
        )
        ost.launch(stream, kernel(device, "total"), at, y, sizes.columns, most, sums[1])

    slots = [
        ost.Slot("x", x, ost.Role.INPUT, size="rows"),
        ost.Slot("y", y, ost.Role.INPUT, size="columns"),
        *(ost.Slot(f"sum{i}", out, ost.Role.OUTPUT) for i, out in enumerate(sums)),
    ]
    step = checked_step(device, work, slots, verify="first", stream=stream)
    assert step(rows=3, columns=4).action.value == "build"
    assert "padding" in step(rows=4, columns=3).detail
    assert sums[1].to_numpy(stream).tolist() == [3]


@pytest.mark.parametrize("poison", [None, (0, 1)])
def test_an_answer_that_is_a_poison_hides_no_missing_launch(
    device: Device, poison: tuple[float, float] | None
) -> None:
    """The graph does not write the output, whose poison was what an eager run writes there."""
    value = 0x5A if poison is None else 1
    flag = device.zeros((), np.uint8)
    where = [device.array(np.array([value], np.uint8))]

    def work(stream: ost.Stream, _: ost.Sizes) -> None:
        ost.fill(stream, where[0], value)

    slots = [ost.Slot("flag", flag, ost.Role.OUTPUT, poison=poison)]
    step = checked_step(device, work, slots)
    step.prepare()
    where[0] = flag
    assert "lacks work of the step" in step().detail
    assert flag.to_numpy(step.stream) == value
    right = checked_step(device, work, slots)
    right()
    counts = right.statistics()
    assert (counts.calls, counts.replays, counts.verified) == (1, 1, 1)
    assert counts.quarantined == {}


def test_state_that_no_slot_declares_advances_once_a_call(device: Device) -> None:
    for verify in ("first", 1):
        hidden, x = device.zeros(1, np.int32), ones(device)

        def work(
            stream: ost.Stream, _: ost.Sizes, hidden: ost.Buffer = hidden, x: ost.Buffer = x
        ) -> None:
            ost.launch(stream, kernel(device, "scale"), config(N), x, N)
            ost.launch(stream, kernel(device, "increment"), config(1), hidden, 1)

        step = checked_step(device, work, [ost.Slot("x", x, ost.Role.STATE)], verify=verify)
        for calls in range(1, 6):
            step()
            assert hidden.to_numpy(step.stream)[0] == calls
        assert step.statistics().quarantined == {}
        checked = step.statistics().last_check
        assert checked is not None and (checked.undeclared, checked.skipped) == (4, 0)


def test_memory_over_the_limit_of_a_check_is_said(device: Device) -> None:
    hidden, x = device.zeros(1000, np.float32), ones(device)

    def work(stream: ost.Stream, _: ost.Sizes) -> None:
        ost.launch(stream, kernel(device, "scale"), config(N), x, N)
        ost.launch(stream, kernel(device, "fill"), config(1000), hidden, 3.0, 1000)

    slots = [ost.Slot("x", x, ost.Role.STATE)]
    step = checked_step(device, work, slots, check_limit="1 KiB")
    step()
    checked = step.statistics().last_check
    assert checked is not None and (checked.undeclared, checked.skipped) == (0, 4000)


def test_undeclared_memory_that_differs_is_found(device: Device) -> None:
    """The step writes another buffer than its graph does, and no slot is either."""
    x, buffers = ones(device), [device.zeros(N, np.float32), device.zeros(N, np.float32)]
    which = [0]

    def work(stream: ost.Stream, _: ost.Sizes) -> None:
        ost.launch(stream, kernel(device, "scale"), config(N), x, N)
        ost.launch(stream, kernel(device, "add"), config(N), x, x, buffers[which[0]], N)

    step = checked_step(device, work, [ost.Slot("x", x, ost.Role.STATE)], strict=True)
    step()
    which[0] = 1
    with pytest.raises(VerificationError, match="no slot declares"):
        step()


@pytest.mark.parametrize("strict", [False, True])
def test_state_that_was_moved_since_the_capture_advances_once(device: Device, strict: bool) -> None:
    """No slot and no graph has the new buffer: only the eager runs of the check write it."""
    x, factor = ones(device), device.array(np.ones(1, np.float32))
    state = [device.zeros(N, np.float32)]

    def work(stream: ost.Stream, _: ost.Sizes) -> None:
        ost.launch(stream, kernel(device, "axpy"), config(N), x, factor, state[0], N)

    step = checked_step(device, work, [ost.Slot("state", state[0], ost.Role.STATE)], strict=strict)
    step()
    state[0] = device.array(state[0].to_numpy(step.stream))
    if strict:
        for _ in range(2):  # the second does not run eagerly in silence
            with pytest.raises(VerificationError, match=r"argument 2 of operation 0 .* is y=0x"):
                step()
            assert (state[0].to_numpy(step.stream) == 1).all(), "an error has changed nothing"
        step.strict = False
    for calls in (2, 3, 4):
        step()
        assert (state[0].to_numpy(step.stream) == calls).all()


def test_a_branch_that_touches_no_slot_is_found(device: Device) -> None:
    """What only the step does now, and not its graph, counts too (TensorRT-LLM PR 15216)."""
    x, factor = ones(device), device.array(np.ones(1, np.float32))
    y, counts, counting = device.zeros(N, np.float32), device.zeros(1, np.int32), []

    def work(stream: ost.Stream, _: ost.Sizes) -> None:
        ost.launch(stream, kernel(device, "axpy"), config(N), x, factor, y, N)
        if counting:
            ost.launch(stream, kernel(device, "increment"), config(1), counts, 1)

    step = checked_step(device, work, [ost.Slot("y", y, ost.Role.STATE)], verify=2)
    step()
    counting.append(True)
    decision = step()
    assert "operation 1 is nothing in the graph and increment now" in decision.detail
    for calls in (2, 3, 4):
        assert (y.to_numpy(step.stream) == calls).all()
        assert counts.to_numpy(step.stream)[0] == calls - 1
        step()


def test_a_check_does_not_write_to_what_the_step_closes_in_it(device: Device) -> None:
    """Another buffer may lie there by then."""
    x, out, others = ones(device), device.zeros(N, np.float32), []

    def work(stream: ost.Stream, _: ost.Sizes) -> None:
        if not stream.is_capturing:
            scratch = device.array(np.zeros(N, np.float32))
            ost.launch(stream, kernel(device, "add"), config(N), x, x, scratch, N)
            scratch.close()
            stream.synchronize()
            others.extend(device.array(np.full(N, 9, np.float32)) for _ in range(4))
        ost.launch(stream, kernel(device, "add"), config(N), x, x, out, N)

    slots = [ost.Slot("x", x, ost.Role.INPUT), ost.Slot("out", out, ost.Role.OUTPUT)]
    step = checked_step(device, work, slots)
    for _ in range(3):
        assert step().action.value in ("build", "replay")
        assert (out.to_numpy(step.stream) == 2).all()
    assert all((other.to_numpy(step.stream) == 9).all() for other in others)


def test_a_check_that_raises_leaves_everything_as_it_was(device: Device) -> None:
    x = device.array(np.arange(8, dtype=np.float32))
    acc, fail = device.zeros(8, np.float32), [False]
    factor = device.array(np.ones(1, np.float32))

    def work(stream: ost.Stream, sizes: ost.Sizes) -> None:
        ost.launch(stream, kernel(device, "axpy"), config(sizes.rows), x, factor, acc, 3)
        if fail[0]:
            raise ZeroDivisionError("mine")

    slots = [
        ost.Slot("x", x, ost.Role.INPUT, size="rows"),
        ost.Slot("acc", acc, ost.Role.STATE),
    ]
    step = checked_step(device, work, slots)
    step(rows=3)
    before = [b.to_numpy(step.stream) for b in (x, acc)]
    fail[0] = True
    with pytest.raises(ZeroDivisionError):
        step(rows=3)
    for buffer, values in zip((x, acc), before, strict=True):
        np.testing.assert_array_equal(buffer.to_numpy(step.stream), values)


@pytest.mark.parametrize("kept", [False, True])
def test_two_branches_that_nothing_orders_are_found(device: Device, kept: bool) -> None:
    """The fork is recorded before the producer: right on most days."""
    stream, side = device.create_stream(), device.create_stream()
    event = device.create_event() if kept else None
    x, y, out = ones(device), device.zeros(N, np.float32), device.zeros(N, np.float32)

    def work(stream: ost.Stream, early: bool) -> None:
        fork = stream.record(event)
        ost.launch(stream, kernel(device, "add"), config(N), x, x, y, N)
        if not early:
            fork = stream.record(event)
        side.wait(fork)
        ost.launch(side, kernel(device, "add"), config(N), y, y, out, N)
        stream.wait(side.record())

    slots = [
        ost.Slot("x", x, ost.Role.INPUT),
        ost.Slot("y", y, ost.Role.SCRATCH),
        ost.Slot("out", out, ost.Role.OUTPUT),
    ]
    for early in (False, True):
        step = ost.GraphedStep(
            lambda stream, _, early=early: work(stream, early),
            stream=stream,
            cache=ost.GraphCache(device),
            slots=slots,
            verify="first",
            warmups=0,
        )
        assert ("nothing orders" in step().detail) is early


def test_two_branches_of_a_tree_that_nothing_orders_are_found(device: Device) -> None:
    """As many edges as a chain has, and no chain."""
    stream, side = device.create_stream(), device.create_stream()
    x, y, out = ones(device), device.zeros(N, np.float32), device.zeros(N, np.float32)
    add = kernel(device, "add")

    def work(stream: ost.Stream, _: ost.Sizes) -> None:
        ost.launch(stream, add, config(N), x, x, y, N)
        side.wait(stream.record())
        ost.launch(side, add, config(N), y, y, out, N)
        ost.launch(stream, add, config(N), x, y, out, N)
        stream.wait(side.record())

    slots = [
        ost.Slot("x", x, ost.Role.INPUT),
        ost.Slot("y", y, ost.Role.SCRATCH),
        ost.Slot("out", out, ost.Role.OUTPUT),
    ]
    assert "nothing orders" in checked_step(device, work, slots, stream=stream)().detail


def test_a_graph_that_was_made_again_is_checked_again(device: Device) -> None:
    x, value = ones(device), [1.0]

    def work(stream: ost.Stream, _: ost.Sizes) -> None:
        ost.launch(stream, kernel(device, "fill"), config(N), x, value[0], N)

    slots = [ost.Slot("x", x, ost.Role.OUTPUT)]
    step = checked_step(device, work, slots, verify="first", strict=True)
    step()
    step.cache.evict_all()
    step.prepare()
    value[0] = 2.0
    with pytest.raises(VerificationError, match="changed since its capture"):
        step()


def test_poison_of_two_inputs_is_no_row_in_use(device: Device) -> None:
    """The least token and the least slot are row 0 again, which changes nothing."""
    tokens, at, kv = (device.zeros(8, np.int32) for _ in range(3))
    everything = device.array(np.array([8], np.uint32))

    def work(stream: ost.Stream, sizes: ost.Sizes) -> None:
        ost.launch(
            stream,
            kernel(device, "scatter"),
            config(1),
            tokens.view(dtype="f32"),
            at,
            kv.view(dtype="f32"),
            sizes.rows,
            everything,
        )

    slots = [
        ost.Slot("tokens", tokens, ost.Role.INPUT, size="rows"),
        ost.Slot("at", at, ost.Role.INPUT, size="rows"),
        ost.Slot("kv", kv, ost.Role.STATE),
    ]
    step = checked_step(device, work, slots, verify="first")
    tokens.copy_from([50, 60, 70, 0, 0, 0, 0, 0], step.stream)
    at.copy_from([5, 6, 7, 0, 0, 0, 0, 0], step.stream)
    assert "padding" in step(rows=3).detail
    assert kv.to_numpy(step.stream).tolist() == [0, 0, 0, 0, 0, 50, 60, 70]


# ----------------------------------------------------------------- changes of the wrong extent


def two_rows(device: Device) -> tuple[ost.GraphExec, ost.Buffer, ost.Buffer]:
    """A graph that copies 2 rows of 4 bytes, 8 bytes apart, and fills two such rows."""
    src, dst = device.array(np.arange(16, dtype=np.uint8)), device.zeros(16, np.uint8)
    graph = ost.Graph.create(device)
    params = MemcpyNodeParams(dst.address, src.address, 4, 2, 1, 8, 8)
    node = graph.add(params, keep=(src, dst))
    graph.add(MemsetNodeParams(dst.address, 1, 1, 4, 2, 8), [node], keep=(dst,))
    return graph.instantiate(), src, dst


def test_a_copy_and_a_fill_of_rows_are_not_set_from_buffers(device: Device) -> None:
    run, src, dst = two_rows(device)
    before = [run.params(0), run.params(1)]
    with pytest.raises(UpdateRefusedError, match="2 rows"):
        run.set_memcpy(0, dst, src)
    with pytest.raises(UpdateRefusedError, match="2 rows"):
        run.set_memset(1, dst, 0)
    assert [run.params(0), run.params(1)] == before


@pytest.mark.parametrize(("value", "size"), [(0, 4), (0, 3), (0, 0), (256, 1), (-1, 1)])
def test_a_fill_that_does_not_come_out_even_is_refused(
    device: Device, stream: ost.Stream, value: int, size: int
) -> None:
    ten = device.zeros(10, np.uint8)
    run = ost.capture_function(stream, lambda: ost.fill(stream, ten, 3)).instantiate()
    with pytest.raises(InputError):
        run.set_memset(0, ten, value, size)
    run.launch(stream)
    assert (ten.to_numpy(stream) == 3).all()


@pytest.mark.parametrize("given", ["buffer", "address"])
def test_a_rebind_to_less_memory_than_a_launch_uses_is_refused(
    device: Device, stream: ost.Stream, given: str
) -> None:
    x, out, tiny = ones(device), device.zeros(N, np.float32), device.zeros(4, np.float32)
    argument = x if given == "buffer" else x.address
    run = ost.capture_function(
        stream, lambda: ost.launch(stream, kernel(device, "add"), config(N), argument, x, out, N)
    ).instantiate()
    with pytest.raises(InputError, match="nothing was changed"):
        run.rebind({x: tiny})
    with pytest.raises(InputError, match="nothing was changed"):
        run.rebind({x[0:4]: tiny})  # the launch was given more than that
    run.launch(stream)
    assert (out.to_numpy(stream) == 2).all()


def test_a_rebind_that_makes_a_copy_overlap_is_refused(device: Device, stream: ost.Stream) -> None:
    """A GPU copies in any order; `copy` and `set_memcpy` refuse such buffers too."""
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


def test_what_a_definition_is_changed_to_is_not_what_an_executable_holds(
    device: Device, stream: ost.Stream
) -> None:
    """Its owner may change it by its handle; a patch sets one argument, and the others stay."""
    x, y, out = ones(device), ones(device), device.zeros(N, np.float32)
    graph = ost.capture_function(
        stream, lambda: ost.launch(stream, kernel(device, "axpy"), config(N), x, y, out, N)
    )
    run = graph.instantiate()
    [node] = graph.nodes
    fewer = node.kernel.arguments.with_raw(
        3, (5).to_bytes(node.kernel.arguments.slot(3).size, "little")
    )
    params = type(node.kernel)(node.kernel.function, node.kernel.config, fewer)
    device.driver.node_set_params(node.handle, params)
    run.patch(0, 0, y)
    run.launch(stream)
    assert np.count_nonzero(out.to_numpy(stream)) == N
    assert run.params(0).arguments.raw(3) == node.kernel.arguments.raw(3)


def test_another_function_does_not_keep_the_old_ones_signature(
    device: Device, stream: ost.Stream
) -> None:
    """`number(value: u64, out)` in place of a kernel whose first argument is a pointer."""
    x, y, out = ones(device), ones(device), device.zeros(N, np.float32)
    big = device.zeros(N, np.uint64)
    run = ost.capture_function(
        stream, lambda: ost.launch(stream, kernel(device, "scale"), config(1), x, N)
    ).instantiate()
    other = ost.prepare(kernel(device, "axpy"), config(N), x, y, out, 5)
    run.set_params(0, other.params, keep=other.keep)
    with pytest.raises(InputError, match="no signature"):
        run.patch(0, "n", 3)
    run.set_params(0, other)
    run.patch(0, "n", 3)  # the operation brings its own
    run.launch(stream)
    assert out.to_numpy(stream)[:5].tolist() == [1, 1, 1, 0, 0]
    number = ost.prepare(kernel(device, "number"), config(1), x.address + 4, big)
    run.set_params(0, number)
    report = run.rebind({x: y})
    assert (len(report.words), len(report.left)) == (0, 1), "a number stays a number"
    run.launch(stream)
    assert big.to_numpy(stream)[0] == x.address + 4
    summed = ost.capture_function(
        stream, lambda: ost.launch(stream, kernel(device, "add"), config(N), x, y, out, N)
    ).instantiate()
    summed.set_params(0, other.params, keep=other.keep)  # of the same layout
    with pytest.raises(InputError, match="no signature"):
        summed.patch(0, "b", y)


def test_nodes_inside_others_are_patched_where_they_are(device: Device) -> None:
    stream, x = device.create_stream(), device.zeros(1, np.int32)
    increment = kernel(device, "increment")
    inner = ost.capture_function(stream, lambda: ost.launch(stream, increment, config(1), x, 1))
    graph = ost.Graph.create(device)
    graph.add_child(inner)
    branch = graph.add_conditional(ost.ConditionalKind.IF, graph.condition(default=1))
    with ost.capture(stream, into=branch.bodies[0]):
        ost.launch(stream, increment, config(1), x, 100)
    run = graph.instantiate()
    child, body = run.nodes[0].children[0][0], run.nodes[1].children[0][0]
    run.patch(child, "by", 5)
    run.patch(body, "by", 700)
    run.launch(stream)
    assert x.to_numpy(stream)[0] == 705
    assert (run.params(child), run.params(body)) != (child.params, body.params)
    stranger = ost.capture_function(
        stream, lambda: ost.launch(stream, increment, config(1), x, 1)
    ).nodes[0]
    with pytest.raises(InputError, match="not of the graph"):
        run.patch(stranger, "by", 1)


# ------------------------------------------------------------- memory that is closed under a graph


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_owner_is_not_copied(
    device: Device, stream: ost.Stream, copied: Callable[[object], object]
) -> None:
    """A copy would own the same handle: closing it gave memory that is in use to others."""
    x, out = ones(device), device.zeros(N, np.float32)
    run = doubling(device, stream, x, out)
    scalar = ost.DeviceScalar(device, "u4")
    for owner in (x, x[1:], scalar, stream, stream.record(), run.graph, run, device):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            copied(owner)


def test_what_points_at_closed_memory_does_not_run(device: Device, stream: ost.Stream) -> None:
    x, out = ones(device), device.zeros(N, np.float32)
    add = kernel(device, "add")
    graph = ost.capture_function(stream, lambda: ost.launch(stream, add, config(N), x, x, out, N))
    run = graph.instantiate(upload=stream)
    run.launch(stream)
    stream.synchronize()
    x.close()
    device.synchronize()
    others = [device.array(np.full(N, 9, np.float32)) for _ in range(4)]  # one may have its place
    for _ in range(2):
        with pytest.raises(ClosedError, match=r"node 0 \(add\) argument 0"):
            run.launch(stream)
    with pytest.raises(ClosedError):
        graph.instantiate()
    with pytest.raises(ClosedError):
        ost.launch(stream, add, config(N), x, x, out, N)
    assert (out.to_numpy(stream) == 2).all()
    run.rebind({x: others[0]})
    run.launch(stream)
    assert (out.to_numpy(stream) == 18).all()


@pytest.mark.parametrize("kind", ["view", "pool", "state", "address"])
def test_closed_memory_is_seen_through_what_stands_for_it(
    device: Device, stream: ost.Stream, kind: str
) -> None:
    out, pool = device.zeros(N, np.float32), device.pool(reserve=4096)
    base = ones(device)
    state = ost.DeviceArray(device.context, N, np.float32)
    state.set(np.ones(N, np.float32), stream)
    owner, argument = {
        "view": (base, base[:]),
        "pool": (pool, pool.empty(N, np.float32)),
        "state": (state, state),
        "address": (base, base.address),
    }[kind]
    run = ost.capture_function(
        stream,
        lambda: ost.launch(stream, kernel(device, "add"), config(N), argument, out, out, N),
    ).instantiate()
    run.launch(stream)
    owner.close()
    with pytest.raises(ClosedError):
        run.launch(stream)


def test_closed_memory_is_seen_by_an_adopted_graph(device: Device, stream: ost.Stream) -> None:
    """Nothing is known of its nodes, so no buffer is known to be its own."""
    x, out = ones(device), device.zeros(N, np.float32)
    own = ost.capture_function(
        stream, lambda: ost.launch(stream, kernel(device, "add"), config(N), x, x, out, N)
    )
    run = ost.Graph.adopt(device, own.handle, owner=own).instantiate(upload=stream)
    run.launch(stream)
    ones(device).close()  # not the graph's
    run.launch(stream)
    x.close()
    with pytest.raises(ClosedError):
        run.launch(stream)


@pytest.mark.parametrize("kind", ["view", "adopted"])
def test_memory_that_is_still_there_does_not_stop_an_adopted_graph(
    device: Device, stream: ost.Stream, kind: str
) -> None:
    """Closing a view, or a buffer over another library's memory, gives nothing back."""
    x = ones(device)
    own = ost.capture_function(
        stream, lambda: ost.launch(stream, kernel(device, "scale"), config(N), x, N)
    )
    run = ost.Graph.adopt(device, own.handle, owner=own).instantiate(upload=stream)
    if kind == "view":
        x[:].close()
    else:
        ost.Buffer(device.context, x.address, (N,), np.dtype(np.float32), base=x).close()
    run.launch(stream)
    assert (x.to_numpy(stream) == 2).all()


@pytest.mark.parametrize("change", ["rebind", "patch", "set", "update"])
def test_closed_memory_is_seen_that_a_change_brought(
    device: Device, stream: ost.Stream, change: str
) -> None:
    x, y, out = ones(device), ones(device), device.zeros(N, np.float32)
    add = kernel(device, "add")

    def summing(source: ost.Buffer) -> ost.Graph:
        return ost.capture_function(
            stream, lambda: ost.launch(stream, add, config(N), source, x, out, N)
        )

    run = summing(x).instantiate(upload=stream)
    run.launch(stream)
    if change == "rebind":
        run.rebind({x: y})
    elif change == "patch":
        run.patch(0, "a", y)
    elif change == "set":
        run.set_params(0, ost.prepare(add, config(N), y, x, out, N))
    else:
        run.update(summing(y))
    run.launch(stream)
    y.close()
    with pytest.raises(ClosedError):
        run.launch(stream)


def test_closed_memory_is_seen_that_a_struct_brought(host_device: Device) -> None:
    @ost.host_kernel("at: bytes[8], out: *u32")
    def follow(launch, at, out):
        out[:1] = launch.memory(int.from_bytes(at, "little"), 4).view(np.uint32)

    stream, out = host_device.create_stream(), host_device.zeros(1, np.uint32)
    one, two = (host_device.array(np.full(1, v, np.uint32)) for v in (1, 2))
    source = ost.Source(host=[follow], name="follow")
    found = host_device.modules.get_or_compile(source, "follow")
    launches = [
        ost.prepare(found, config(1), x.address.to_bytes(8, "little"), out) for x in (one, two)
    ]
    graph = ost.Graph.create(host_device)
    graph.add_operation(launches[0])
    run = graph.instantiate()
    run.set_params(0, launches[1])
    run.launch(stream)
    assert out.to_numpy(stream)[0] == 2
    two.close()
    with pytest.raises(ClosedError, match=r"argument 0 points at memory that was closed"):
        run.launch(stream)


@pytest.mark.parametrize("way", ["child", "clone", "recorded"])
def test_closed_memory_is_seen_in_copies_of_graphs(
    device: Device, stream: ost.Stream, way: str
) -> None:
    x, out = ones(device), device.zeros(N, np.float32)
    add = kernel(device, "add")
    inner = ost.capture_function(stream, lambda: ost.launch(stream, add, config(N), x, x, out, N))
    if way == "child":
        outer = ost.Graph.create(device)
        outer.add_child(inner)
    elif way == "clone":
        outer = inner.clone()
    else:
        run = inner.instantiate()
        with ost.record(stream) as recorded:
            run.launch(stream)
        run.close()
        outer = recorded.build()
    inner.close()  # a copy goes on without what it was made from
    copy = outer.instantiate()
    copy.launch(stream)
    assert (out.to_numpy(stream) == 2).all()
    x.close()
    with pytest.raises(ClosedError):
        copy.launch(stream)
    with pytest.raises(ClosedError):
        outer.instantiate()


def test_a_graph_recorded_and_closed_is_no_child(device: Device, stream: ost.Stream) -> None:
    x = ones(device)
    add = kernel(device, "add")
    inner = ost.capture_function(stream, lambda: ost.launch(stream, add, config(N), x, x, x, N))
    run = inner.instantiate()
    with ost.record(stream) as recorded:
        run.launch(stream)
    inner.close()
    with pytest.raises(ClosedError, match="child"):
        recorded.build()
    with ost.record(stream) as recorded:
        run.launch(stream)
    with pytest.raises(CaptureBrokenError, match="definition is closed"):
        recorded.build()
    assert (x.to_numpy(stream) == 4).all()


def test_memory_behind_a_plain_address_lives_with_the_graph(
    device: Device, stream: ost.Stream
) -> None:
    out = device.zeros(N, np.float32)

    def captured() -> tuple[ost.GraphExec, int]:
        x = ones(device)
        with ost.capture(stream) as capture:
            add = kernel(device, "add")
            ost.launch(stream, add, config(N), x.address, x.address, out, N)
        return capture.graph.instantiate(), x.address

    run, address = captured()
    gc.collect()
    device.synchronize()
    assert all(device.array(np.full(N, 9, np.float32)).address != address for _ in range(8))
    run.launch(stream)
    assert (out.to_numpy(stream) == 2).all()


@ost.host_kernel("both: bytes[16], n: u32")
def summed(launch, both, n):
    """The n f32 at the second address become those at the first, plus one."""
    source, target = (int.from_bytes(both[at : at + 8], "little") for at in (0, 8))
    launch.memory(target, 4 * n).view("f4")[:] = launch.memory(source, 4 * n).view("f4") + 1


_SUMMED = ost.Source(
    """
struct Both { const float* source; float* target; };
extern "C" __global__ void summed(Both both, unsigned n) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) both.target[i] = both.source[i] + 1;
}
""",
    host=[summed],
    name="structs",
)


def both(x: ost.Buffer, out: ost.Buffer) -> bytes:
    return x.address.to_bytes(8, "little") + out.address.to_bytes(8, "little")


@pytest.mark.parametrize("given", [bytes, bytearray, memoryview, np.void, np.array])
def test_memory_behind_an_address_in_a_struct_lives_with_the_graph(
    device: Device, stream: ost.Stream, given: type
) -> None:
    out = device.zeros(N, np.float32)
    summing = device.modules.get_or_compile(_SUMMED, "summed")

    def captured() -> tuple[ost.GraphExec, int]:
        x = ones(device)
        with ost.capture(stream) as capture:
            ost.launch(stream, summing, config(N), given(both(x, out)), N)
        return capture.graph.instantiate(), x.address

    run, address = captured()
    gc.collect()
    device.synchronize()
    assert all(device.array(np.full(N, 9, np.float32)).address != address for _ in range(8))
    run.launch(stream)
    assert (out.to_numpy(stream) == 2).all()
    operation = ost.prepare(summing, config(N), given(both(out, out)), N)
    out.close()
    with pytest.raises(ClosedError):
        run.launch(stream)
    with pytest.raises(ClosedError):
        stream.submit(operation)


def test_a_struct_that_is_patched_forgets_what_its_words_pointed_at(
    device: Device, stream: ost.Stream
) -> None:
    x, y, out, new = ones(device), ones(device), device.zeros(N, np.float32), ones(device)
    summing = device.modules.get_or_compile(_SUMMED, "summed")

    def work() -> None:
        ost.launch(stream, summing, config(N), both(x, out), N)
        ost.launch(stream, kernel(device, "scale"), config(N), y, N)

    run = ost.capture_function(stream, work).instantiate()
    run.rebind({out: new})  # notes what the second word points at
    run.patch(0, "both", both(x, y))
    y.close()
    with pytest.raises(ClosedError, match="node 0"):
        run.launch(stream)
    for patch in (
        lambda value: run.patch(0, "both", value),
        lambda value: run.patch_all([(0, "both", value)]),
        lambda value: run.patch(0, "both", np.void(value)),
    ):
        patch(both(x, out))
        with pytest.raises(ClosedError, match="node 1"):
            run.launch(stream)
    run.patch_all([(0, "both", both(x, new)), (1, "x", new)])
    run.launch(stream)
    assert (new.to_numpy(stream) == 4).all()


@pytest.mark.parametrize("given", [int, np.uint64, np.int64])
def test_an_address_of_any_kind_keeps_its_memory(
    device: Device, stream: ost.Stream, given: type
) -> None:
    x, out = ones(device), device.zeros(N, np.float32)
    run = doubling(device, stream, x, out)
    new = device.array(np.full(N, 3, np.float32))
    address = new.address
    run.patch(0, "a", given(address))
    run.patch_all([(0, "b", given(address))])
    del new
    gc.collect()
    device.synchronize()
    assert all(device.array(np.full(N, 9, np.float32)).address != address for _ in range(8))
    run.launch(stream)
    assert (out.to_numpy(stream) == 6).all()


def test_an_operation_of_closed_memory_is_set_to_no_node(
    device: Device, stream: ost.Stream
) -> None:
    x, y, out = ones(device), ones(device), device.zeros(N, np.float32)
    add = kernel(device, "add")
    run = doubling(device, stream, x, out)
    operation = ost.prepare(add, config(N), y, y, out, N)
    params = operation.params
    y.close()
    with pytest.raises(ClosedError, match="add"):
        run.set_params(0, operation)
    run.launch(stream)
    assert (out.to_numpy(stream) == 2).all()
    run.set_params(0, params, keep=(y, out))
    with pytest.raises(ClosedError, match="argument 0"):
        run.launch(stream)


def test_memory_that_is_closed_while_it_is_given_is_seen(
    device: Device, stream: ost.Stream
) -> None:
    """By another thread, say, between the look at the memory and the note that it is used."""
    x, out = ones(device), device.zeros(N, np.float32)
    run = doubling(device, stream, x, out)
    new = ones(device)

    class Closing:
        """A buffer that is closed as soon as its address was read."""

        range = new.range

        @property
        def address(self) -> int:
            address = new.address
            new.close()
            return address

        def watch(self, watcher: object) -> None:
            new.watch(watcher)  # type: ignore[arg-type]

        @property
        def closed(self) -> bool:
            return new.closed

    run.patch(0, "a", Closing())
    with pytest.raises(ClosedError, match="argument 0"):
        run.launch(stream)


def test_new_memory_in_one_word_does_not_stand_for_closed_memory_in_another(
    device: Device, stream: ost.Stream
) -> None:
    x, out = ones(device), device.zeros(N, np.float32)
    run = doubling(device, stream, x, out)
    address = x.address
    x.close()
    device.synchronize()
    # What another library does that gives memory the address that ours had.
    new = ost.Buffer(device.context, address, (N,), np.dtype(np.float32), base=object())
    run.patch(0, "a", new)
    with pytest.raises(ClosedError, match="argument 1"):
        run.launch(stream)


def test_a_step_makes_its_graph_again_once_memory_of_it_is_closed(device: Device) -> None:
    out, stream = device.zeros(N, np.float32), device.create_stream()
    weights = [ones(device)]

    def work(stream: ost.Stream, _: ost.Sizes) -> None:
        ost.launch(stream, kernel(device, "add"), config(N), weights[0], weights[0], out, N)

    step = ost.GraphedStep(work, stream=stream, cache=ost.GraphCache(device))
    for _ in range(3):
        step()
    weights[0].close()
    weights[0] = device.array(np.full(N, 5, np.float32))
    assert step().action.value == "build"
    assert (out.to_numpy(stream) == 10).all()


def test_closing_memory_in_a_host_function_destroys_nothing_there(
    device: Device, stream: ost.Stream
) -> None:
    x = device.zeros(1 << 20, np.uint8)
    device.synchronize()
    free = device.memory_info()[0]
    stream.call(x.close)
    stream.synchronize()
    device.synchronize()
    assert x.closed
    assert device.context.retired == 0
    assert device.memory_info()[0] >= free + (1 << 20) or device.name != "host"


# -------------------------------------------------------------------- what points into a buffer


def test_a_plain_address_reaches_to_the_end_of_its_allocation(
    device: Device, stream: ost.Stream
) -> None:
    x, out = ones(device), device.zeros(N, np.float32)
    cache = ost.GraphCache(device)
    run = ost.capture_function(
        stream,
        lambda: ost.launch(stream, kernel(device, "add"), config(N), x.address, out, out, N),
    ).instantiate()
    cache.install("sum", run)
    assert cache.touching(x[N // 2 :]) == ["sum"]
    assert cache.evict_touching(x[N // 2 :]) == ["sum"]


def test_a_patched_pointer_reaches_as_far_as_what_it_was_patched_to(
    device: Device, stream: ost.Stream
) -> None:
    small, large, out = device.zeros(4, np.float32), ones(device), device.zeros(N, np.float32)
    cache = ost.GraphCache(device)
    run = ost.capture_function(
        stream, lambda: ost.launch(stream, kernel(device, "add"), config(N), small, out, out, 4)
    ).instantiate()
    cache.install("sum", run)
    run.patch(0, "a", large)
    assert cache.touching(large[N - 4 :]) == ["sum"]
    assert cache.touching(small) == []
    run.patch(0, "a", large.address)
    assert cache.touching(large[N - 4 :]) == ["sum"]


def test_an_adopted_graph_is_seen_to_touch_memory(device: Device, stream: ost.Stream) -> None:
    x, out = ones(device), device.zeros(N, np.float32)
    own = ost.capture_function(
        stream, lambda: ost.launch(stream, kernel(device, "add"), config(N), x, out, out, N)
    )
    foreign = ost.Graph.adopt(device, own.handle, owner=own)  # nothing is known of its nodes
    cache = ost.GraphCache(device)
    cache.install("foreign", foreign.instantiate())
    assert cache.touching(x[N // 2 :]) == ["foreign"]
    assert cache.touching(device.zeros(4, "bytes")) == []


# ------------------------------------------------------------------------------ numbers and sizes


@pytest.mark.parametrize(
    ("dtype", "value"),
    [(np.int32, 1.5), (np.uint8, 256), (np.uint8, -1), (np.float32, 1e300), (np.float16, 1e5)],
)
def test_a_number_that_does_not_fit_is_refused_everywhere(
    device: Device, stream: ost.Stream, dtype: type, value: float
) -> None:
    x = device.zeros(8, dtype)
    scalar = ost.DeviceScalar(device, dtype)
    for refused in (
        lambda: ost.fill(stream, x, value),
        lambda: scalar.set(value, stream),
        lambda: ost.DeviceArray(device, 2, dtype).set([0, value], stream),
    ):
        with pytest.raises(InputError):
            refused()
    if np.dtype(dtype) == np.float32:
        with pytest.raises(InputError, match="value"):
            ost.launch(stream, kernel(device, "fill"), config(8), x, value, 8)
        run = ost.capture_function(
            stream, lambda: ost.launch(stream, kernel(device, "fill"), config(8), x, 2.0, 8)
        ).instantiate()
        with pytest.raises(InputError, match="value"):
            run.patch(0, "value", value)
    assert (x.to_numpy(stream) == 0).all()


def test_infinity_that_is_meant_is_kept(device: Device, stream: ost.Stream) -> None:
    x = ones(device)
    ost.fill(stream, x, float("-inf"))
    assert (x.to_numpy(stream) == -np.inf).all()
    scalar = ost.DeviceScalar(device, np.float32, initial=np.inf, stream=stream)
    assert scalar.read(stream) == np.inf
    with pytest.raises(InputError):
        ost.DeviceScalar(device, np.int32).set(np.inf, stream)


@pytest.mark.parametrize("size", [-1, 2.5, "3", None, True, [1]])
def test_what_is_no_size_is_an_error_and_not_over_a_bucket(device: Device, size: object) -> None:
    x = device.zeros(1, np.int32)
    step = count_step(device, x, ost.GraphCache(device), 1)
    step.run = lambda stream, sizes: None
    for call in (step, step.prepare, step.hold, step.key):
        with pytest.raises(InputError, match="n="):
            call(n=size)


@pytest.mark.parametrize("verify", [0, -1, True, False, 2.5, "always"])
def test_what_asks_for_no_checks_or_some_is_said(device: Device, verify: object) -> None:
    x = device.zeros(1, np.int32)
    slots = [ost.Slot("x", x, ost.Role.STATE)]
    with pytest.raises(InputError, match="verify="):
        count_step(device, x, ost.GraphCache(device), 1, slots=slots, verify=verify)


@pytest.mark.parametrize(("size", "value"), [(0, 1), (3, 1), (8, 1), (True, 1), ("4", 1), (1, 1.5)])
def test_a_fill_of_no_elements_is_refused(
    device: Device, stream: ost.Stream, size: object, value: object
) -> None:
    x = ones(device)
    run = ost.capture_function(stream, lambda: ost.fill(stream, x, 5)).instantiate()
    with pytest.raises(InputError):
        run.set_memset(0, x, value, size)
    run.launch(stream)
    assert (x.to_numpy(stream) == 5).all()


def test_memory_that_no_address_can_reach_is_an_error(device: Device) -> None:
    """1 << 80 bytes are 0 in 64 bits."""
    pool = ost.CapturePool(device)
    for empty in (device.empty, device.zeros, device.pinned, pool.empty):
        with pytest.raises((OutOfMemoryError, InputError)):
            empty((1 << 40, 1 << 40), "u1")


def test_more_rows_than_a_slot_has_are_refused(device: Device) -> None:
    x = device.array(np.ones((8, 4), np.float32))

    def work(stream: ost.Stream, sizes: ost.Sizes) -> None:
        ost.launch(stream, kernel(device, "scale"), config(sizes.rows * 4), x, sizes.rows * 4)

    cache = ost.GraphCache(device, buckets=ost.ExplicitBuckets([5, 10]))
    step = ost.GraphedStep(
        work,
        stream=device.create_stream(),
        cache=cache,
        slots=[ost.Slot("x", x, ost.Role.STATE, size="rows")],
        warmups=0,
    )
    with pytest.raises(InputError, match="only 8 rows"):
        step(rows=9)
    step(rows=8)
    assert (x.to_numpy(step.stream) == 2).all()


def test_a_bucket_ends_with_the_rows_of_a_slot(device: Device) -> None:
    """A slot of 6 rows, and powers of two: five rows ran eagerly for ever."""
    whole = device.array(np.ones((8, 4), np.float32))
    x = whole[:6]

    def work(stream: ost.Stream, sizes: ost.Sizes) -> None:
        count = sizes.rows * 4
        ost.launch(stream, kernel(device, "scale"), config(count), x, count)

    step = ost.GraphedStep(
        work,
        stream=device.create_stream(),
        cache=ost.GraphCache(device),
        slots=[ost.Slot("x", x, ost.Role.STATE, size="rows", scratch_padding=True)],
        warmups=0,
    )
    for rows in (5, 6, 5):
        step(rows=rows)
    assert step.key(rows=5) == step.key(rows=6) != step.key(rows=4)
    assert step.statistics().replays == 3
    assert (whole.to_numpy(step.stream)[5] == 8).all(), "a row of padding, within the slot"
    assert (whole.to_numpy(step.stream)[6:] == 1).all(), "and none behind it"


def test_a_bucket_that_is_too_small_for_its_size_is_refused(device: Device) -> None:
    """A scheme of the caller's own, wrong at its border: the last row would never be computed."""

    class Own:
        limit = 16

        def bucket(self, size: int) -> int:
            return 4 if size <= 5 else 16

        def __iter__(self) -> Iterator[int]:
            return iter((4, 16))

    x, work = device.zeros(16, np.float32), []
    step = ost.GraphedStep(
        lambda stream, sizes: work.append(sizes.rows),
        stream=device.create_stream(),
        cache=ost.GraphCache(device, buckets=Own()),
        slots=[ost.Slot("x", x, ost.Role.STATE, size="rows")],
    )
    step(rows=4)
    for call in (step, step.prepare, step.hold, step.key):
        with pytest.raises(InputError, match=r"rows=5: the buckets of the cache \(Own\) give 4"):
            call(rows=5)
    assert work == [4]


def test_other_buckets_are_other_graphs(device: Device) -> None:
    x, cache = device.zeros(1, np.int32), ost.GraphCache(device, buckets=ost.PowersOfTwo(8))
    step = count_step(device, x, cache, 1)
    step.run = lambda stream, sizes: ost.launch(
        stream, kernel(device, "increment"), config(1), x, 1
    )
    before = step.key(n=3)
    cache.buckets = ost.ExplicitBuckets([3, 8])
    assert step.key(n=3) != before


def test_a_step_forgets_sizes_that_it_has_not_seen_for_long(host_device: Device) -> None:
    x = host_device.zeros(1, np.int32)
    step = count_step(host_device, x, ost.GraphCache(host_device), 1, enabled=False)
    step.run = lambda stream, sizes: None
    tracemalloc.start()
    try:
        for n in range(5_000):
            step(n=n)
        first = tracemalloc.get_traced_memory()[0]
        for n in range(5_000, 10_000):
            step(n=n)
        assert tracemalloc.get_traced_memory()[0] < first + (1 << 20)
    finally:
        tracemalloc.stop()


# ------------------------------------------------------------------------- three that no test saw


def test_a_pointer_is_rebound_from_where_it_points_now(device: Device, stream: ost.Stream) -> None:
    """A second rebind works on what the first one set, and undo too."""
    x, y, z, out = (device.array(np.full(N, v, np.float32)) for v in (1, 2, 3, 0))
    run = doubling(device, stream, x, out)
    for old, new, expected in ((x, y, 4), (y, z, 6), (z, x, 2)):
        assert len(run.rebind({old: new}).words) == 2
        assert run.rebind({old: new}).words == (), "nothing points there any more"
        run.launch(stream)
        assert (out.to_numpy(stream) == expected).all()
    run.patch(0, "a", z)
    assert len(run.rebind({x: y}).words) == 1
    run.launch(stream)
    assert (out.to_numpy(stream) == 5).all()


def test_a_graph_that_is_held_outlives_an_eviction_by_budget(
    device: Device, stream: ost.Stream
) -> None:
    counter, cache = device.zeros(1, np.int32), ost.GraphCache(device, budget=1)

    def make(by: int) -> ost.GraphExec:
        return ost.capture_function(
            stream, lambda: ost.launch(stream, kernel(device, "increment"), config(1), counter, by)
        ).instantiate(upload=stream)

    cache.install("first", make(1))
    with cache.hold("first") as run:
        assert run is not None
        cache.install("second", make(10))
        assert "first" not in cache
        run.launch(stream)
    assert counter.to_numpy(stream)[0] == 1
    with pytest.raises(ClosedError):
        run.launch(stream)


def test_a_refused_change_takes_back_all_that_was_made_before_it(host_device: Device) -> None:
    """Values that differ from each other and from zero, so that half an undo shows; and one that
    was set before, which is not the definition's."""
    faults = FaultyDriver(host_device.driver)
    device = preload(Device(faults))
    stream = device.create_stream()
    a, b, c = (device.array(np.full(N, v, np.float32)) for v in (3, 5, 7))
    outs = [device.zeros(N, np.float32) for _ in range(4)]

    def work() -> None:
        for out in outs:
            ost.launch(stream, kernel(device, "add"), config(N), a, a, out, N)

    run = ost.capture_function(stream, work).instantiate()
    run.patch(0, "b", c)
    held = [run.params(i) for i in range(4)]
    for at in range(1, 5):
        faults.fail("exec_set_params", at=at)
        with pytest.raises(UpdateRefusedError):
            run.rebind({a: b})
        run.launch(stream)
        assert [out.to_numpy(stream)[0] for out in outs] == [10, 6, 6, 6]
        assert [run.params(i) for i in range(4)] == held
    run.rebind({a: b})
    run.launch(stream)
    assert [out.to_numpy(stream)[0] for out in outs] == [12, 10, 10, 10]


def test_an_executable_whose_undo_is_refused_runs_no_more(host_device: Device) -> None:
    faults = FaultyDriver(host_device.driver)
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
    with pytest.raises(ost.errors.GraphError, match="instantiate its graph again"):
        run.rebind({a: b})
    for _ in range(2):
        with pytest.raises(ost.errors.GraphError, match="instantiate its graph again"):
            run.launch(stream)
    assert not run.usable
    run.graph.instantiate().launch(stream)
    assert (out.to_numpy(stream) == 6).all()


def test_an_upload_into_a_capture_does_not_break_it(device: Device, stream: ost.Stream) -> None:
    x = ones(device)
    run = ost.capture_function(stream, lambda: ost.fill(stream, x, 5)).instantiate()
    with ost.capture(stream) as capture:
        ost.fill(stream, x, 7)
        with pytest.raises(CaptureError, match="the capture goes on"):
            run.upload(stream)
    capture.graph.instantiate().launch(stream)
    assert (x.to_numpy(stream) == 7).all()


def test_a_capture_that_is_dropped_ends(device: Device, stream: ost.Stream) -> None:
    x = ones(device)
    under_way = ost.Capture(stream).begin()
    ost.fill(stream, x, 5)
    del under_way
    gc.collect()
    ost.fill(stream, x, 7)  # runs: nothing is captured any more
    assert (x.to_numpy(stream) == 7).all()
    assert device.context.captures_under_way == 0


@pytest.mark.parametrize("before", range(5))
@pytest.mark.parametrize("fails", [False, True])
def test_nodes_that_are_added_in_a_capture_shift_no_index(
    device: Device, stream: ost.Stream, before: int, fails: bool
) -> None:
    """An index that is off by some is that of another node, which would be patched."""
    graph, x = ost.Graph.create(device), ones(device)
    for value in range(before):
        graph.add_memset(x, value)
    with contextlib.suppress(ZeroDivisionError), ost.capture(stream, into=graph):
        ost.fill(stream, x, 1)
        graph.add_memset(x, 2)
        ost.fill(stream, x, 3)
        assert not fails or 1 / 0
    added = [graph.add_memset(x, value) for value in range(3)]
    handles = [node.handle for node in graph.nodes]
    assert [node.index for node in added] == [handles.index(node.handle) for node in added]


@pytest.mark.parametrize("kind", ["kernel", "memcpy", "memset"])
@pytest.mark.parametrize("is_last", [False, True])
def test_a_node_that_is_off_keeps_the_order(
    device: Device, stream: ost.Stream, kind: str, is_last: bool
) -> None:
    """libcuda 580 loses the order around a memset node that is off, so that one is refused."""
    x, y = device.zeros(4, np.int32), device.zeros(4, np.int32)
    ran: list[int] = []

    def late() -> None:
        time.sleep(0.02)
        ran.append(1)

    graph = ost.Graph.create(device)
    first = graph.add_host(late)
    off = {
        "kernel": lambda: graph.add_kernel(
            kernel(device, "increment"), config(1), x, 1, after=[first]
        ),
        "memcpy": lambda: graph.add_memcpy(x, y, after=[first]),
        "memset": lambda: graph.add_memset(x, 7, after=[first]),
    }[kind]()
    if not is_last:
        graph.add_host(lambda: ran.append(2), after=[off])
    run = graph.instantiate()
    if kind == "memset":
        with pytest.raises(UpdateRefusedError, match="would not wait for those before it"):
            run.set_enabled(off, False)
        run.set_enabled(off, True)
    else:
        run.set_enabled(off, False)
    run.launch(stream)
    stream.synchronize()
    assert ran == ([1] if is_last else [1, 2])
    assert x.to_numpy(stream)[0] == (0x07070707 if kind == "memset" else 0)


@pytest.mark.parametrize("before", range(5))
def test_a_node_that_could_not_be_added_shifts_no_index(host_device: Device, before: int) -> None:
    """Neither one that the driver refused, nor one that it took and would not show, nor one that an
    interruption left there."""
    faults = FaultyDriver(host_device.driver)
    device = Device(faults)
    x, increment = device.zeros(1, np.int32), kernel(device, "increment")
    child = ost.Graph.create(device)
    child.add_kernel(increment, config(1), x, 1000)

    def added(graph: ost.Graph, kind: str, memory: ost.Buffer) -> None:
        _ = graph.add_child(child) if kind == "child" else graph.add_memset(memory, 0)

    calls = ("graph_add_node", "node_params", "node_kind")
    for call, kind in itertools.product(calls, ("child", "memset")):
        graph, unused = ost.Graph.create(device), device.zeros(1, np.int32)
        for _ in range(before):
            graph.add_kernel(increment, config(1), x, 1)
        faults.fail(call)
        with pytest.raises(GraphError, match=call):
            added(graph, kind, unused)
        unused.close()
        node = graph.add_kernel(increment, config(1), x, 0)
        assert graph.nodes[node.index].handle == node.handle
        assert len(graph) == before + 1, "the graph is as before"
        graph.instantiate().close()

    def work() -> None:
        graph.add_kernel(increment, config(1), x, 0)

    for at in every(lines(work), 1 if before == 2 else 20):
        graph = ost.Graph.create(device)
        for _ in range(before):
            graph.add_kernel(increment, config(1), x, 1)
        where = interrupt(work, at)
        node = graph.add_kernel(increment, config(1), x, 0)
        assert graph.nodes[node.index].handle == node.handle, where


@pytest.mark.parametrize("call", ["launch", "upload", "replay", "record", "synchronize", "save"])
def test_a_capture_that_is_dropped_ends_before_the_next_call(
    device: Device, stream: ost.Stream, call: str, tmp_path: Path
) -> None:
    """Whatever that is: also one that submits no operation to the stream."""
    x = ones(device)
    graph = ost.capture_function(stream, lambda: ost.fill(stream, x, 7))
    run, cache = graph.instantiate(), ost.GraphCache(device)
    cache.install("x", run)

    def recorded() -> None:
        with ost.record(stream):
            ost.fill(stream, x, 6)

    calls: dict[str, Callable[[], object]] = {
        "launch": lambda: run.launch(stream),
        "upload": lambda: run.upload(stream),
        "replay": lambda: cache.replay("x", stream),
        "record": recorded,
        "synchronize": device.synchronize,
        "save": lambda: ost.graphfile.save(
            graph, tmp_path / "x.graph", outputs={"x": x}, check=False
        ),
    }
    under_way = ost.Capture(stream).begin()
    ost.fill(stream, x, 5)
    del under_way
    gc.collect()
    calls[call]()
    assert not stream.is_capturing and device.context.captures_under_way == 0
    run.launch(stream)
    assert (x.to_numpy(stream) == 7).all()


def test_a_closed_device_lets_go_of_what_was_still_alive(device: Device) -> None:
    """What is dropped later is not kept to be destroyed: the driver has destroyed it."""

    def closed_under_all() -> list[weakref.ref[object]]:
        stream, x = device.create_stream(), ones(device)
        graph = ost.capture_function(
            stream, lambda: ost.launch(stream, kernel(device, "fill"), config(N), x, 1.0, N)
        )
        run = graph.instantiate(upload=stream)
        run.launch(stream)
        device.close()
        return [weakref.ref(one) for one in (stream, x, graph, run)]

    left = closed_under_all()
    gc.collect()
    assert [one() for one in left] == [None] * len(left)
    assert device.context.retired == 0


def test_memory_is_given_back_while_graphs_are_adopted(device: Device) -> None:
    """Closing a buffer tells all graphs, also those that another thread adds meanwhile: a set that
    grew ended the call half done, with memory neither freed nor known to be closed."""

    class Graph:
        def __init__(self) -> None:
            self.told = 0

        def memory_closed(self, memory: ost.MemoryRange) -> None:
            self.told += 1

    first, ended, failures = Graph(), threading.Event(), list[BaseException]()
    watchers = device.context.watchers
    watchers.add(first)
    buffers = [device.empty(8, "bytes") for _ in range(800)]

    def adopt() -> None:
        kept: list[Graph] = []
        try:
            while not ended.is_set():
                kept = [*kept[-500:], Graph()]
                watchers.add(kept[-1])
        except BaseException as error:
            failures.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=adopt)
    try:
        thread.start()
        for buffer in buffers:
            buffer.close()
    finally:
        ended.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert not failures
    assert first.told == len(buffers)


# ------------------------------------------------------------------------------ memory and values


def test_a_view_that_begins_behind_the_end_is_refused(device: Device) -> None:
    """Its length was negative then, and kernels got an address of someone else's memory."""
    x = ones(device)
    for offset in (4 * N + 1, 4 * N + 4, 8 * N, -4):
        with pytest.raises(InputError, match="reaches outside"):
            x.view(offset)
    assert x.view(4 * N).nbytes == 0


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        (np.uint8, np.array([300, 1])),
        (np.uint32, np.array([-1, 1])),
        (np.int32, [1.5, 2.0]),
        (np.int32, np.array([np.nan, 0])),
        (np.int64, [float(1 << 63), 0.0]),
        (np.uint64, [float(1 << 64), 0.0]),
        (np.int64, [(1 << 53) + 1, 0.5 + 0.5]),  # NumPy makes floats of such a list
        (np.float32, np.array([1e39, 0])),
        (np.float16, np.array([1 << 17, 0])),
        (np.float32, np.array([1j, 0])),
        (np.float32, np.array([None, 0])),
        (np.float32, [1 << 128, 0]),
        (np.float64, [10**400, 0]),
        (np.bool_, np.array([2, 0])),
        (np.float32, np.ma.masked_array([1.0, 2.0], [False, True])),
        (np.int32, np.ma.masked_array([1, 2], [False, True], np.int32)),
    ],
)
def test_values_that_the_memory_cannot_hold_are_refused(
    device: Device, stream: ost.Stream, dtype: type, values: object
) -> None:
    x, state = device.zeros(2, dtype), ost.DeviceArray(device, 2, dtype)
    state.set(np.zeros(2, dtype), stream)
    for put in (
        lambda: x.copy_from(values, stream),
        lambda: device.array(values, dtype),
        lambda: state.set(values, stream),
    ):
        with pytest.raises(InputError):
            put()
    assert not x.to_numpy(stream).any()
    assert not state.read(stream).any()


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        (np.int32, np.array([-5, 7], np.int64)),
        (np.uint8, [255.0, 0.0]),
        (np.float32, np.array([1 / 3, np.inf])),
        (np.float16, np.array([np.nan, 65504], np.float32)),
        (np.bool_, np.array([1, 0])),
        (np.int64, [True, False]),
        (np.uint64, [(1 << 64) - 1, 0]),
        (np.float32, [1 << 127, 3]),
        (np.float32, np.ma.masked_array([1.0, 2.0], [False, False])),
    ],
)
def test_values_that_fit_are_converted(
    device: Device, stream: ost.Stream, dtype: type, values: object
) -> None:
    wanted = np.array([dtype(value) for value in values])
    assert np.array_equal(device.array(values, dtype).to_numpy(stream), wanted, equal_nan=True)
    x = device.zeros(2, dtype).copy_from(values, stream)
    assert np.array_equal(x.to_numpy(stream), wanted, equal_nan=True)


PAIR = np.dtype([("a", np.int32), ("b", np.int32)])
"""Of the structs below."""


@pytest.mark.parametrize(
    "values",
    [
        [(1.5, 2)],  # NumPy drops the fraction
        [(1, 1 << 31)],
        [(1, np.int64(1 << 40))],
        [(1, 2, 3)],
        [[[1, 2]]],  # NumPy makes two structs of it
        3,
        np.array([(1.5, 2)], [("a", np.float32), ("b", np.int32)]),
        np.array([(1, 2)], [("b", np.int32), ("a", np.int32)]),  # NumPy goes by the order
        np.array([(1, 2)], [("x", np.int32), ("y", np.int32)]),
        np.ma.masked_array([(1, 2)], [(False, True)], PAIR),
    ],
)
def test_structs_that_the_memory_cannot_hold_are_refused(
    device: Device, stream: ost.Stream, values: object
) -> None:
    x, state = device.zeros(1, PAIR), ost.DeviceArray(device, 1, PAIR)
    for put in (
        lambda: x.copy_from(values, stream),
        lambda: device.array(values, PAIR),
        lambda: state.set(values, stream),
    ):
        with pytest.raises(InputError):
            put()
    assert x.to_numpy(stream)[0].tolist() == (0, 0)


def test_elements_that_are_arrays_are_refused(device: Device) -> None:
    """Copies had more axes than the buffer, and no value could be copied in."""
    pairs = np.dtype((np.float32, (2,)))
    for make in (
        lambda: device.empty(3, pairs),
        lambda: device.zeros(6, np.float32).view(0, 3, pairs),
        lambda: ost.DeviceArray(device, 3, pairs),
        lambda: ost.DeviceScalar(device, pairs),
    ):
        with pytest.raises(InputError, match=r"give float32, and the axes \[2\]"):
            make()


def test_structs_that_fit_are_converted(device: Device, stream: ost.Stream) -> None:
    kind = np.dtype([("a", np.uint8), ("b", np.float32, (2,)), ("c", PAIR)], align=True)
    values = [(255, [1, 2.5], (-1, 7)), (0, [3, 4], (5, 6))]
    wide = np.dtype([("a", ">i8"), ("b", np.float64, (2,)), ("c", [("a", "i8"), ("b", "u1")])])
    wanted = np.array(values, kind)
    for given in (values, wanted, [wanted[0], values[1]]):
        assert (device.array(given, kind).to_numpy(stream) == wanted).all()
    wide_values = np.array([(255, [1, 2.5], (-1, 7)), (0, [3, 4], (5, 6))], wide)
    assert (device.array(wide_values, kind).to_numpy(stream) == wanted).all()
    assert device.array([], kind).shape == (0,)


def test_masked_values_of_no_named_type_are_refused(device: Device) -> None:
    with pytest.raises(InputError, match="masked"):
        device.array(np.ma.masked_array([1, 2], [True, False]))


def test_a_view_of_the_last_zero_rows_is_an_argument(device: Device, stream: ost.Stream) -> None:
    x, out = ones(device), device.zeros(N, np.float32)
    add = kernel(device, "add")
    ost.launch(stream, add, config(N), x[N:], x[N:], out[N:], 0)
    run = ost.capture_function(
        stream, lambda: ost.launch(stream, add, config(N), x[N:], x, out[N:], 0)
    ).instantiate()
    run.launch(stream)
    run.patch(0, "n", N // 2)
    run.patch(0, "a", x)
    run.patch(0, "out", out)
    run.launch(stream)
    assert (out.to_numpy(stream) == [2] * (N // 2) + [0] * (N // 2)).all()


@pytest.mark.parametrize("wrong", [True, 1.0])
def test_what_equals_an_index_is_none(device: Device, stream: ost.Stream, wrong: object) -> None:
    """Also where that index was used before."""
    x = ones(device)

    def work() -> None:
        for _ in range(2):
            ost.launch(stream, kernel(device, "scale"), config(N), x, N)

    run = ost.capture_function(stream, work).instantiate()
    for _ in range(2):
        for node, argument in ((1, wrong), (wrong, 1)):
            with pytest.raises(InputError):
                run.patch(node, argument, 0)  # type: ignore[arg-type]
            with pytest.raises(InputError):
                run.patch_all([(node, argument, 0)])  # type: ignore[list-item]
        run.patch(1, 1, N)
        run.patch(1, np.int64(1), N)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="LaunchConfig"):
        run.set_config(0, None)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="Graph"):
        run.update(run)  # type: ignore[arg-type]


def test_numbers_of_another_byte_order_are_the_same_numbers(
    device: Device, stream: ost.Stream
) -> None:
    foreign = np.dtype(np.float32).newbyteorder()
    x, y = device.array(np.arange(N).astype(foreign)), device.zeros(N, np.float32)
    ost.launch(stream, kernel(device, "add"), config(N), x, x, y, N)
    assert np.array_equal(y.to_numpy(stream), 2.0 * np.arange(N))
    y.copy_from(np.arange(N).astype(foreign), stream)
    assert np.array_equal(y.to_numpy(stream), np.arange(N))
    pool = ost.CapturePool(device)
    for make in (
        lambda: device.empty(N, foreign),
        lambda: device.array([1.0], foreign),
        lambda: pool.empty(N, foreign),
        lambda: y.view(dtype=foreign),
        lambda: ost.DeviceScalar(device, foreign),
        lambda: device.empty(N, [("a", foreign)]),
        lambda: device.empty(N, [("a", foreign, (2,))]),
        lambda: device.empty(N, [("a", [("b", foreign, (2,))], (3,))]),
    ):
        with pytest.raises(InputError, match="byte order"):
            make()
    assert pool.statistics().allocated == 0
    pairs = np.array([([1, 2],)], [("a", foreign, (2,))])
    assert device.array(pairs).view(dtype=np.float32).to_numpy(stream).tolist() == [1, 2]
    with pytest.raises(InputError, match="byte order"):
        pack_by_size(8, pairs[0], 0)


def test_what_is_no_stream_no_node_no_slot_or_no_scheme_is_refused(
    device: Device, stream: ost.Stream
) -> None:
    graph = ost.Graph.create(device)
    loop = graph.add_conditional(ost.ConditionalKind.WHILE, graph.condition())
    cache, x, some = ost.GraphCache(device), ones(device), cast(Any, None)
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: ost.capture_function(some, print), "Stream is needed, not NoneType"),
        (lambda: ost.record(some).__enter__(), "Stream is needed, not NoneType"),
        (lambda: ost.Capture(stream, mode=cast(Any, "global")), "a CaptureMode"),
        (lambda: ost.Capture(stream, into=cast(Any, loop)), "one of its .bodies"),
        (lambda: graph.add_empty(after=cast(Any, loop.node)), r"after=\[node\]"),
        (lambda: graph.add_empty(after=[cast(Any, loop)]), "a conditional's is its .node"),
        (lambda: graph.add_edges([(loop.node, cast(Any, "b"))]), "not str"),
        (lambda: ost.GraphCache(device, buckets=cast(Any, [1, 2])), "ExplicitBuckets"),
        (lambda: ost.GraphedStep(print, stream=some, cache=cache), "a Stream"),
        (lambda: ost.GraphedStep(some, stream=stream, cache=cache), "a function"),
        (
            lambda: ost.GraphedStep(print, stream=stream, cache=cache, slots=[cast(Any, x)]),
            "a list of Slots",
        ),
    ]
    for call, words in calls:
        with pytest.raises(InputError, match=words):
            call()
    assert graph.count() == 1


def test_what_is_no_type_no_array_or_no_buffer_is_refused(
    device: Device, stream: ost.Stream
) -> None:
    x = ones(device)
    for make, words in (
        (lambda: device.empty(N, "f99"), "f99"),
        (lambda: device.array([1.0], "f99"), "f99"),
        (lambda: ost.DeviceScalar(device, "f99"), "f99"),
        (lambda: device.array([[1.0], [1.0, 2.0]], "f32"), "cannot read"),
        (lambda: ost.copy(stream, x, np.ones(N, np.float32)), "src is ndarray.*copy_from"),  # type: ignore[arg-type]
        (lambda: ost.copy(stream, np.ones(N, np.float32), x), "dst is ndarray"),  # type: ignore[arg-type]
    ):
        with pytest.raises(InputError, match=words):
            make()


def test_what_is_of_another_type_is_said_and_not_a_missing_attribute(
    device: Device, stream: ost.Stream
) -> None:
    x, wrong = ones(device), cast(Any, object())
    graph = ost.Graph.create(device)
    add = kernel(device, "add")
    run = graph.instantiate()
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: x.copy_from([1.0] * N, cast(Any, device)), "copy_from.*Stream is needed"),
        (lambda: x.to_numpy(wrong), "to_numpy.*a Stream is needed, not object"),
        (lambda: ost.fill(wrong, x, 0), "fill.*a Stream is needed"),
        (lambda: ost.copy(wrong, x, x), "copy.*a Stream is needed"),
        (lambda: run.upload(wrong), "upload.*a Stream is needed"),
        (lambda: ost.DeviceScalar(device, "u4").set(1, wrong), "set.*a Stream is needed"),
        (lambda: ost.fill(stream, cast(Any, np.ones(N)), 0), "dst is ndarray"),
        (lambda: graph.add_memset(cast(Any, np.ones(N)), 0), "dst is ndarray"),
        (lambda: graph.add_child(cast(Any, run)), "a Graph is needed, not GraphExec.*its .graph"),
        (lambda: graph.add_empty(after=cast(Any, 0)), "a list of nodes"),
        (lambda: ost.Graph.adopt(device, cast(Any, 2.5), owner=None), "2.5 is no handle"),
        (lambda: ost.Graph.adopt(device, -1, owner=None), "-1 is no handle"),
        (
            lambda: ost.lowlevel.replace_small_fills(device, cast(Any, run)),
            "not Device and GraphExec",
        ),
        (lambda: add.allow_shared(cast(Any, 2.5)), "nbytes=2.5"),
        (lambda: add.occupancy(cast(Any, float("nan"))), "threads=nan"),
        (lambda: add.occupancy(32, cast(Any, "1")), "shared='1'"),
        (lambda: ost.CapturePool(device, reserve=cast(Any, "1 MiB")), "reserve='1 MiB'"),
        (lambda: ost.CapturePool(device, slab=cast(Any, 1.5)), "slab=1.5"),
        (lambda: ost.DeviceScalar(device, "u4", depth=cast(Any, 2.5)), "depth=2.5"),
        # without its parentheses
        (lambda: ost.host_kernel(cast(Any, print)), "a signature is text.*@host_kernel"),
    ]
    for call, words in calls:
        with pytest.raises(InputError, match=words):
            call()
    assert graph.count() == 0


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
    noise = [np.full(1 << 20, -1, np.int32) for _ in range(4)]  # takes memory that was given back
    assert np.array_equal(seen, np.arange(1 << 20)), noise[0][0]
    with pytest.raises(ClosedError):
        _ = x.array
    device.close()


def test_an_operation_does_not_outlive_its_memory(device: Device, stream: ost.Stream) -> None:
    """The address may be another buffer's by the time that it is submitted."""
    x, y = ones(device), ones(device)
    operation = ost.prepare(kernel(device, "add"), config(N), x, x, y, N)
    y.close()
    device.synchronize()
    others = [device.zeros(N, np.float32) for _ in range(64)]
    with pytest.raises(ClosedError, match="add: <Buffer"):
        stream.submit(operation)
    with pytest.raises(ClosedError), ost.capture(stream):
        stream.submit(operation)
    assert not any(other.to_numpy(stream).any() for other in others)


def test_an_event_of_a_graph_stays_its_own(device: Device, stream: ost.Stream) -> None:
    """The driver would give its handle to another event."""
    event, graph = device.create_event(), ost.Graph.create(device)
    graph.add_event_record(event)
    run = graph.instantiate()
    event.close()
    device.synchronize()
    later = [device.create_event() for _ in range(64)]
    assert graph.nodes[0].event_record.event not in {other.handle for other in later}
    run.launch(stream)
    stream.synchronize()
    for use in (
        lambda: stream.wait(event),
        lambda: stream.record(event),
        lambda: event.done,
        event.synchronize,
        lambda: graph.add_event_wait(event),
    ):
        with pytest.raises(ClosedError, match="the event is closed"):
            use()


@pytest.mark.parametrize("given", [bytearray, memoryview, np.void, np.bytes_])
def test_a_struct_of_any_kind_may_hold_an_address(device: Device, given: type) -> None:
    """Without a signature, nothing says what the launch touches."""
    x = ones(device)
    raw = given(x.address.to_bytes(8, "little"))
    assert _touched(device.context, None, (x, raw)) == (None, None)
    assert _touched(device.context, None, (x, 1.5, np.float32(2))) == ((x.range,), (x.range,))


@pytest.mark.parametrize("nested", [False, True])
def test_a_child_graph_that_was_set_is_what_later_changes_go_by(
    device: Device, stream: ost.Stream, nested: bool
) -> None:
    w, x, z = (device.array(np.full(N, value, np.float32)) for value in (1, 2, 9))
    out = device.zeros(N, np.float32)

    def adding(source: ost.Buffer) -> ost.Graph:
        def work() -> None:
            ost.launch(stream, kernel(device, "add"), config(N), source, source, out, N)

        graph = ost.capture_function(stream, work)
        if nested:
            around = ost.Graph.create(device)
            around.add_child(graph)
            return around
        return graph

    outer = ost.Graph.create(device)
    node = outer.add_child(adding(w))
    run, other = outer.instantiate(), adding(x)
    run.set_params(node, ChildGraphNodeParams(other.handle), keep=(other,))

    def answer() -> float:
        run.launch(stream)
        return float(out.to_numpy(stream)[-1])

    assert answer() == 4
    assert run.touches(x)
    assert not run.touches(w)
    inner = outer.nodes[0].children[0][0]
    inner = inner.children[0][0] if nested else inner
    assert run.params(inner).arguments.raw(0) == x.address.to_bytes(8, "little")
    assert len(run.rebind({x: z}).words) == 2
    assert answer() == 18
    run.patch(inner, 0, x)
    assert answer() == 11
    x.close()
    with pytest.raises(ClosedError, match="closed"):
        run.launch(stream)
    run.patch(inner, 0, w)
    assert answer() == 10


def test_a_child_graph_in_another_order_is_refused(device: Device, stream: ost.Stream) -> None:
    x, y, z = ones(device), device.zeros(N, np.float32), ones(device)
    graphs = [ost.Graph.create(device) for _ in range(3)]
    for graph, first in zip(graphs, (x, x, None), strict=True):  # without edges: of other memory
        if first is None:
            graph.add_memset(z, 7)
            graph.add_memcpy(y, x)
        else:
            graph.add_memcpy(y, x)
            graph.add_memset(z, 7)
    outer = ost.Graph.create(device)
    node = outer.add_child(graphs[0])
    run = outer.instantiate()
    run.set_params(node, ChildGraphNodeParams(graphs[1].handle))
    with pytest.raises(UpdateRefusedError):
        run.set_params(node, ChildGraphNodeParams(graphs[2].handle))
    run.launch(stream)
    assert (y.to_numpy(stream) == 1).all()


@pytest.mark.parametrize("work", ["none", "elsewhere"])
def test_a_body_that_got_no_work_is_an_error(device: Device, stream: ost.Stream, work: str) -> None:
    graph, side, x = ost.Graph.create(device), device.create_stream(), ones(device)
    branch = graph.add_conditional(ost.ConditionalKind.IF, graph.condition(1))
    with (
        pytest.raises(CaptureError, match="nothing was captured"),
        ost.capture(stream, into=branch.bodies[0]),
    ):
        if work == "elsewhere":
            ost.fill(side, x, 5)
    with ost.capture(stream, into=branch.bodies[0]):
        ost.fill(stream, x, 7)
    gc.collect()
    graph.instantiate().launch(stream)
    assert (x.to_numpy(stream) == 7).all()


@pytest.mark.parametrize(
    ("size", "value"), [(0, 1), (3, 1), (True, 1), ("4", 1), (1, 1.5), (1, -1)]
)
def test_a_fill_by_hand_is_checked_as_a_change_of_one(
    device: Device, size: object, value: object
) -> None:
    graph = ost.Graph.create(device)
    with pytest.raises(InputError):
        graph.add_memset(ones(device), value, size)
    with pytest.raises(InputError):
        graph.add_memset(device.zeros(0, "bytes"), 0)
    assert len(graph) == 0


def test_a_refused_patch_by_bytes_leaves_the_argument(host_device: Device) -> None:
    """Also while the executable does not know yet whether it points at memory that was closed."""

    @ost.host_kernel("p: bytes[16], out: *out f32")
    def add_struct(launch: ost.lowlevel.HostLaunch, p: bytes, out: np.ndarray) -> None:
        one, other = (launch.memory(int(word), 4 * N) for word in np.frombuffer(p, np.uint64))
        out[:N] = one.view(np.float32) + other.view(np.float32)

    faults = FaultyDriver(host_device.driver)
    device = Device(faults)
    stream = device.create_stream()
    adding = device.modules.get_or_compile(ost.Source(host=[add_struct]), "add_struct")
    x, y, out = ones(device), ones(device), device.zeros(N, np.float32)

    def struct_of(*buffers: ost.Buffer) -> bytes:
        return b"".join(buffer.address.to_bytes(8, "little") for buffer in buffers)

    def work() -> None:
        ost.launch(stream, adding, config(1), struct_of(x, y), out)

    own = ost.capture_function(stream, work)
    run = ost.Graph.adopt(device, own.handle, owner=own).instantiate()  # which watches all memory
    run.launch(stream)
    before = run.params(0)
    y.close()
    faults.fail("exec_set_params")
    with pytest.raises(UpdateRefusedError):
        run.patch(0, 0, struct_of(x, x))
    assert run.params(0) == before
    with pytest.raises(ClosedError, match="points at memory that was closed"):
        run.launch(stream)
    run.patch(0, 0, struct_of(x, x))
    run.launch(stream)
    assert (out.to_numpy(stream) == 2).all()


def test_a_device_that_is_dropped_is_closed(launcher: str) -> None:
    """Its driver is gone with it; what was made on it must not go on with dead handles."""

    def made() -> tuple[ost.Buffer, ost.Stream, ost.GraphExec]:
        device = ost.open_device("host")
        stream, x = device.create_stream(), device.zeros(N, np.float32)
        run = ost.capture_function(stream, lambda: ost.fill(stream, x, 5)).instantiate()
        run.launch(stream)
        run.launch(stream)
        return x, stream, run

    x, stream, run = made()
    gc.collect()
    for use in (
        lambda: run.launch(stream),
        lambda: x.to_numpy(stream),
        lambda: x.array,
        lambda: ost.fill(stream, x, 1),
        lambda: run.nodes,
        lambda: run.graph.clone(),
    ):
        with pytest.raises(ClosedError, match="nothing refers to its Device any more"):
            use()


@pytest.mark.parametrize("way", ["copy", "copy_from", "node", "set"])
def test_a_copy_between_buffers_that_overlap_is_refused(
    device: Device, stream: ost.Stream, way: str
) -> None:
    """A GPU copies in any order, and this driver in the order that is right."""
    x, y = device.array(np.arange(N, dtype=np.float32)), ones(device)
    graph = ost.Graph.create(device)
    graph.add_memcpy(y[1:], x[:-1])
    run = graph.instantiate()
    for to, come in ((x[1:], x[:-1]), (x[:-1], x[1:])):
        with pytest.raises(InputError, match="overlap"):
            {
                "copy": lambda to, come: ost.copy(stream, to, come),
                "copy_from": lambda to, come: to.copy_from(come, stream),
                "node": graph.add_memcpy,
                "set": lambda to, come: run.set_memcpy(0, to, come),
            }[way](to, come)
    x[: N // 2].copy_from(x[N // 2 :], stream)
    assert np.array_equal(x.to_numpy(stream)[: N // 2], np.arange(N // 2, N))


def test_a_copy_between_types_or_shapes_is_no_conversion(
    device: Device, stream: ost.Stream
) -> None:
    x = device.zeros((2, 3), np.float32)
    for source in (
        device.array(np.arange(6, dtype=np.int32).reshape(2, 3)),
        device.array(np.arange(6, dtype=np.float32).reshape(3, 2)),
        np.arange(6, dtype=np.float32).reshape(3, 2),
    ):
        with pytest.raises(InputError):
            x.copy_from(source, stream)
    assert not x.to_numpy(stream).any()
    wanted = np.arange(6, dtype=np.float32).reshape(2, 3)
    for source in (
        np.arange(6),
        np.arange(6.0).reshape(1, 2, 3),
        device.array(np.arange(6, dtype=np.float32)),
        device.array(wanted).view(dtype="bytes"),
    ):
        assert np.array_equal(x.copy_from(source, stream).to_numpy(stream), wanted)
        ost.fill(stream, x, 0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"mask": object()}, "has a mask"),
        ({"shape": (-1,)}, "not valid"),
        ({"shape": (8.0,)}, "not valid"),
        ({"shape": 8}, "not valid"),
        ({"data": None}, "not valid"),
        ({"data": (-1, False)}, "not valid"),
        ({"typestr": "zz"}, "not valid"),
        ({"strides": (8, 8)}, "not valid"),
        ({"strides": (16,)}, "strided"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_an_array_that_is_not_what_kernels_would_read_is_not_adopted(
    device: Device, change: dict[str, object], said: str
) -> None:
    class Foreign:
        def __init__(self, **changes: object) -> None:
            plain = {"shape": (8,), "typestr": "<i8", "data": (1 << 40, False), "version": 3}
            self.__cuda_array_interface__ = plain | changes

    assert device.adopt_array(Foreign(mask=None, strides=(8,))).shape == (8,)
    with pytest.raises(InputError, match=said):
        device.adopt_array(Foreign(**change))


@pytest.mark.parametrize("handle", [-5, 1 << 64, "5", None, 5.0], ids=repr)
def test_what_is_no_handle_is_no_stream(device: Device, handle: object) -> None:
    class Foreign:
        def __cuda_stream__(self) -> tuple[int, object]:
            return 0, handle

    with pytest.raises(InputError, match="version, handle"):
        device.adopt_stream(Foreign())


class _Between(FaultyDriver):
    """Runs a function in another thread when the driver has begun a capture."""

    function: Callable[[], None] | None = None

    def stream_begin_capture(self, *arguments: Any) -> None:
        self.inner.stream_begin_capture(*arguments)
        if self.function is not None:
            thread = threading.Thread(target=self.function)
            thread.start()
            thread.join()


@pytest.mark.parametrize("call", ["launch", "submit", "fill"])
def test_nothing_joins_a_capture_that_another_thread_begins(host_device: Device, call: str) -> None:
    """It joined between the driver's beginning and this library's: it did not run, and was
    replayed with the others."""
    driver = _Between(host_device.driver)
    device = preload(Device(driver))
    stream = device.create_stream()
    x, y = ones(device), ones(device)
    scale, told = kernel(device, "scale"), []

    def other() -> None:
        calls: dict[str, Callable[[], object]] = {
            "launch": lambda: ost.launch(stream, scale, config(N), x, N),
            "submit": lambda: stream.submit(ost.prepare(scale, config(N), x, N)),
            "fill": lambda: ost.fill(stream, x, 0),
        }
        try:
            calls[call]()
        except CaptureError as error:
            told.append(error)

    driver.function = other
    with ost.capture(stream) as under_way:
        driver.function = None
        ost.launch(stream, scale, config(N), y, N)
    assert len(told) == 1 and len(under_way.graph) == 1
    under_way.graph.instantiate().launch(stream)
    assert (x.to_numpy(stream)[0], y.to_numpy(stream)[0]) == (1, 2)


class _During(FaultyDriver):
    """Calls a function in the middle of a launch, fill or copy."""

    function: Callable[[], object] | None = None

    def _now(self) -> None:
        function, self.function = self.function, None
        if function is not None:
            function()

    def launch_kernel(self, *arguments: Any) -> None:
        self._now()
        self.inner.launch_kernel(*arguments)

    def memset(self, *arguments: Any) -> None:
        self._now()
        self.inner.memset(*arguments)


@pytest.mark.parametrize("call", ["launch", "submit", "fill"])
def test_a_capture_begins_once_others_have_put_their_work_on_the_stream(
    host_device: Device, call: str
) -> None:
    """A launch had seen no capture, and came to the driver when there was one: it joined."""
    driver = _During(host_device.driver)
    device = preload(Device(driver))
    stream = device.create_stream()
    x, y = ones(device), ones(device)
    scale, graphs, begun = kernel(device, "scale"), [], threading.Event()

    def capture() -> None:
        with ost.capture(stream) as under_way:
            begun.set()
            ost.launch(stream, scale, config(N), y, N)
        graphs.append(under_way.graph)

    thread = threading.Thread(target=capture)

    def between() -> None:
        thread.start()
        assert not begun.wait(0.2)

    driver.function = between
    {
        "launch": lambda: ost.launch(stream, scale, config(N), x, N),
        "submit": lambda: stream.submit(ost.prepare(scale, config(N), x, N)),
        "fill": lambda: ost.fill(stream, x, 0),
    }[call]()
    thread.join()
    assert driver.function is None and len(graphs[0]) == 1
    wanted = 0 if call == "fill" else 2
    assert (x.to_numpy(stream)[0], y.to_numpy(stream)[0]) == (wanted, 1)
    graphs[0].instantiate().launch(stream)
    assert (x.to_numpy(stream)[0], y.to_numpy(stream)[0]) == (wanted, 2)


def test_a_held_replay_waits_for_a_run_of_its_step(device: Device) -> None:
    """It went into the middle of another thread's eager run, if the step reads no size."""
    preload(device)
    stream, axpy = device.create_stream(), kernel(device, "add")
    x, other, total = ones(device), device.zeros(N, np.float32), device.zeros(N, np.float32)
    begun, launched = threading.Event(), threading.Event()

    def run(stream: ost.Stream, sizes: ost.Sizes) -> None:
        ost.launch(stream, axpy, config(N), total, x, other, N)  # other = total + 1
        if sizes.rows == 8:
            begun.set()
            launched.wait(0.2)
        ost.copy(stream, total, other)

    cache = ost.GraphCache(device, buckets=ost.PowersOfTwo(8))
    step = ost.GraphedStep(run, stream=stream, cache=cache)
    for _ in range(2):
        step(rows=4)
    held = step.hold(rows=4)
    assert isinstance(held, HeldReplay)
    with held:
        thread = threading.Thread(target=lambda: step(rows=8))
        thread.start()
        begun.wait()
        held.launch()
        launched.set()
        thread.join()
    assert total.to_numpy(stream)[0] == 4


def test_a_step_inside_of_a_step_and_beside_it(device: Device) -> None:
    """One thread had the stream's turn and wanted the inner step, the other had that."""
    preload(device)
    stream, scale, x = device.create_stream(), kernel(device, "add"), ones(device)
    total = device.zeros(N, np.float32)
    cache = ost.GraphCache(device, buckets=ost.PowersOfTwo(8))

    def run(stream: ost.Stream, sizes: ost.Sizes) -> None:
        ost.launch(stream, scale, config(N), total, x, total, N)

    inner = ost.GraphedStep(run, stream=stream, cache=cache, name="inner")
    outer = ost.GraphedStep(
        lambda stream, sizes: inner(rows=sizes.rows), stream=stream, cache=cache
    )
    outer.enabled = False
    calls = 300
    threads = [
        threading.Thread(target=lambda s=step: [s(rows=4) for _ in range(calls)], daemon=True)
        for step in (outer, inner)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "they wait for each other"
    assert total.to_numpy(stream)[0] == 2 * calls


def test_a_held_graph_that_is_dropped_waits_for_no_step(device: Device) -> None:
    """What ends it may run in any thread, also in one that the step waits for."""
    preload(device)
    stream, other = device.create_stream(), device.create_stream()
    scale, x = kernel(device, "scale"), ones(device)
    inside, go_on = threading.Event(), threading.Event()
    go_on.set()

    def met() -> bool:
        inside.set()
        return go_on.wait(60)

    step = ost.GraphedStep(
        lambda stream, sizes: ost.launch(stream, scale, config(N), x, N),
        stream=stream,
        cache=ost.GraphCache(device, buckets=ost.PowersOfTwo(8)),
        preconditions={"met": met},
    )
    for _ in range(2):
        step(rows=4)
    held = step.hold(rows=4)
    assert isinstance(held, HeldReplay)
    held.launch()
    inside.clear()
    go_on.clear()
    calls = threading.Thread(target=lambda: step(rows=4), daemon=True)
    calls.start()
    inside.wait()
    del held
    ends = threading.Thread(target=other.synchronize, daemon=True)
    ends.start()
    ends.join(30)
    waits = ends.is_alive()
    go_on.set()
    calls.join()
    ends.join()
    assert not waits, "the other stream's work waited for the step"
    assert step.statistics().calls == 4


def test_a_slot_of_a_single_value_is_checked(device: Device) -> None:
    preload(device)
    stream, scale = device.create_stream(), kernel(device, "scale")
    count = ost.DeviceScalar(device, "f4", initial=1, stream=stream)
    step = ost.GraphedStep(
        lambda stream, sizes: ost.launch(stream, scale, config(1), count.buffer, 1),
        stream=stream,
        cache=ost.GraphCache(device),
        verify="first",
        slots=[ost.Slot("count", count.buffer, ost.Role.STATE)],
    )
    for _ in range(3):
        step(rows=1)
    assert count.read(stream) == 8
    assert step.statistics().verified == 1


def test_nothing_is_launched_on_a_device_that_was_closed() -> None:
    """A graph that had been launched went to the driver without a look at the device."""
    device = preload(ost.open_device("host"))
    stream = device.create_stream()
    run = doubling(device, stream, ones(device), ones(device))
    run.launch(stream)
    run.launch(stream)
    device.close()
    with pytest.raises(ClosedError, match="closed; open it again"):
        run.launch(stream)


# ------------------------------------------------------------- loops, bodies and memory of graphs


@ost.host_kernel("go_on: cond, counter: *u32, limit: u32")
def count_up(launch, go_on, counter, limit):
    counter[0] += 1
    launch.set_conditional(go_on, int(counter[0] < limit))


LOOPS = ost.Source(
    cuda=r"""
    extern "C" __device__ __cudart_builtin__ void CUDARTAPI cudaGraphSetConditional(
        cudaGraphConditionalHandle handle, unsigned int value);

    extern "C" __global__ void count_up(
        cudaGraphConditionalHandle go_on, unsigned* counter, unsigned limit) {
        *counter += 1;
        cudaGraphSetConditional(go_on, *counter < limit);
    }
    """,
    host=[count_up],
    name="loops",
)


@pytest.fixture
def counting(device: Device) -> ost.Kernel:
    """A kernel that counts, and sets a condition while it has not reached a limit."""
    return device.modules.get_or_compile(LOOPS, "count_up")


def emptied(stream: ost.Stream, body: ost.Graph, x: ost.Buffer) -> None:
    """A capture into the body that an exception ends."""
    with pytest.raises(ZeroDivisionError), ost.capture(stream, into=body):
        ost.fill(stream, x, 1)
        raise ZeroDivisionError


@pytest.mark.parametrize("inside", ["nothing", "a broken capture", "a fill", "a child", "a branch"])
def test_a_loop_that_no_kernel_ends_is_refused(
    device: Device, stream: ost.Stream, inside: str
) -> None:
    """A launch of it hung."""
    graph, x = ost.Graph.create(device), ones(device)
    (body,) = graph.add_conditional(ost.ConditionalKind.WHILE, graph.condition(1)).bodies
    if inside == "a broken capture":
        emptied(stream, body, x)
    elif inside == "a fill":
        body.add_memset(x, 1)
    elif inside == "a child":
        body.add_child(ost.capture_function(stream, lambda: ost.fill(stream, x, 1)))
    elif inside == "a branch":
        body.add_conditional(ost.ConditionalKind.IF, graph.condition(1))
    with pytest.raises(GraphError, match=r"WHILE at node 0 .*could never end.*fill the body"):
        graph.instantiate()


@pytest.mark.parametrize("starts", [True, False])
@pytest.mark.parametrize("deep", [True, False])
def test_a_loop_whose_kernels_lack_its_condition_is_warned_of(
    device: Device, counting: ost.Kernel, starts: bool, deep: bool
) -> None:
    graph, counter = ost.Graph.create(device), device.zeros(1, np.uint32)
    outer = graph
    if deep:
        (outer,) = graph.add_conditional(ost.ConditionalKind.IF, graph.condition(1)).bodies
    mine, others = graph.condition(int(starts)), graph.condition(0)
    (body,) = outer.add_conditional(ost.ConditionalKind.WHILE, mine).bodies
    body.add_kernel(counting, config(1), others, counter, 3)
    outer.add_conditional(ost.ConditionalKind.IF, others)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        graph.instantiate()
    assert [str(w.message).count("may never end") for w in caught] == [1] * starts
    assert all(w.filename == __file__ for w in caught)


def test_loops_that_end_are_not_warned_of(
    device: Device, stream: ost.Stream, counting: ost.Kernel
) -> None:
    """The condition is set in the body, in a child graph in it, or in a branch in it."""
    for way in ("body", "child", "branch"):
        graph, counter = ost.Graph.create(device), device.zeros(1, np.uint32)
        handle = graph.condition(1)
        (body,) = graph.add_conditional(ost.ConditionalKind.WHILE, handle).bodies
        count = partial(ost.launch, stream, counting, ost.LaunchConfig(1, 1), handle, counter, 3)
        if way == "child":
            body.add_child(ost.capture_function(stream, count))
        else:
            if way == "branch":
                (body,) = body.add_conditional(ost.ConditionalKind.IF, graph.condition(1)).bodies
            with ost.capture(stream, into=body):
                count()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run = graph.instantiate()
        run.launch(stream)
        assert counter.to_numpy(stream).tolist() == [3]


@pytest.mark.parametrize("what", ["host", "record", "wait", "write"])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_body_refuses_what_it_cannot_hold_at_once(
    device: Device, stream: ost.Stream, what: str, depth: int
) -> None:
    """CUDA says INVALID_VALUE of all of the graph, when it is instantiated; `depth`: in how many
    child graphs."""

    def add(graph: ost.Graph) -> None:
        if what == "host":
            graph.add_host(print)
        elif what == "write":
            graph.add_batch_mem_op([MemOp(MemOpKind.WRITE, x.address, 1)], keep=(x,))
        else:
            (graph.add_event_record if what == "record" else graph.add_event_wait)(event)

    graph, x, event = ost.Graph.create(device), ones(device), device.create_event()
    (body,) = graph.add_conditional(ost.ConditionalKind.IF, graph.condition(1)).bodies
    inner = body
    for _ in range(depth):
        child = ost.Graph.create(device)
        add(child) if inner is body else child.add_child(inner)
        inner = child
    with pytest.raises(GraphError, match="can hold kernels, copies, fills"):
        add(body) if inner is body else body.add_child(inner)
    assert len(body) == 0


def test_a_host_function_captured_into_a_body_is_named(device: Device, stream: ost.Stream) -> None:
    graph = ost.Graph.create(device)
    (body,) = graph.add_conditional(ost.ConditionalKind.IF, graph.condition(1)).bodies
    with pytest.raises((GraphError, CaptureBrokenError)) as caught:
        with ost.capture(stream, into=body):
            stream.call(print)
        graph.instantiate()
    if isinstance(caught.value, GraphError):
        assert "node 0 (if), body 0, node 0 (print) of kind HOST" in str(caught.value)


@pytest.mark.alone
@pytest.mark.parametrize("flags", [ost.lowlevel.InstantiateFlags.NONE, AUTO_FREE])
def test_memory_of_a_graph_without_a_free_node_is_freed_with_the_executable(
    device: Device, stream: ost.Stream, flags: ost.lowlevel.InstantiateFlags
) -> None:
    """It was gone for good, with each executable."""
    size, left = 64 << 20, []
    for _ in range(4):
        graph = ost.Graph.create(device)
        graph.add_alloc(size)
        with graph.instantiate(flags=flags) as run:
            for _ in range(1 + (flags is AUTO_FREE)):
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
    again = graph.instantiate()  # one at a time: the first is gone
    again.launch(stream)
    again.close()
    device.synchronize()
    assert (ones(device).to_numpy(stream) == 1).all()


# --------------------------------------------------- nodes added by hand to a graph under capture


def is_chain(graph: ost.Graph) -> bool:
    """Whether each of its nodes waits for the one before."""
    handles = [node.handle for node in graph.nodes]
    return {(e.source, e.target) for e in graph.edges} == {*itertools.pairwise(handles)}


@pytest.mark.parametrize("reached", ["into", "adopted"])
@pytest.mark.parametrize(
    "how", ["kernel", "operation", "memset", "memcpy", "host", "empty", "child", "record", "branch"]
)
def test_a_node_added_to_a_graph_under_capture_has_its_place_in_it(
    device: Device, stream: ost.Stream, how: str, reached: str
) -> None:
    """What was captured next did not wait for it: 7 for 12."""
    x, out = ones(device), device.zeros(N, np.float32)
    fours, scale = device.array(np.full(N, 4, np.float32)), kernel(device, "scale")
    double, event = ost.prepare(scale, config(N), x, N), device.create_event()
    child = ost.capture_function(stream, lambda: stream.submit(double))
    graph = into = ost.Graph.create(device) if reached == "into" else None
    bodies: tuple[ost.Graph, ...] = ()
    with ost.capture(stream, into=into) as capture:
        ost.launch(stream, scale, config(N), x, N)
        if graph is None:
            handle = stream.capture_info.graph
            graph = ost.Graph.adopt(device, handle, owner=capture)
        if how == "branch":
            bodies = graph.add_conditional(ost.ConditionalKind.IF, graph.condition(1)).bodies
        else:
            adds: dict[str, Callable[[ost.Graph], object]] = {
                "kernel": lambda graph: graph.add_kernel(scale, config(N), x, N),
                "operation": lambda graph: graph.add_operation(double),
                "memset": lambda graph: graph.add_memset(x, 0x40800000, 4),
                "memcpy": lambda graph: graph.add_memcpy(x, fours),
                "host": lambda graph: graph.add_host(lambda: None),
                "empty": lambda graph: graph.add_empty(),
                "child": lambda graph: graph.add_child(child),
                "record": lambda graph: graph.add_event_record(event),
            }
            adds[how](graph)
        ost.launch(stream, kernel(device, "add"), config(N), x, x, out, N)
    del graph
    for body in bodies:
        body.add_operation(double)
    assert is_chain(capture.graph)
    gc.collect()
    device.synchronize()
    capture.graph.instantiate().launch(stream)
    expected = 4 if how in ("host", "empty", "record") else 8
    assert (out.to_numpy(stream) == expected).all()


def test_a_node_added_under_capture_still_waits_for_what_it_is_told(
    device: Device, stream: ost.Stream
) -> None:
    graph, x, scale = ost.Graph.create(device), ones(device), kernel(device, "scale")
    with ost.capture(stream, into=graph):
        ost.launch(stream, scale, config(N), x, N)
        first = graph.node(0)
        ost.launch(stream, scale, config(N), x, N)
        added = graph.add_empty(after=[first])
        ost.launch(stream, scale, config(N), x, N)
    order = {(e.source, e.target) for e in graph.edges}
    one, two, three, four = (node.handle for node in graph.nodes)
    assert three == added.handle
    assert order == {(one, two), (one, three), (two, three), (three, four)}


def test_another_thread_adds_nothing_to_a_graph_under_capture(
    device: Device, stream: ost.Stream
) -> None:
    graph, x, scale = ost.Graph.create(device), ones(device), kernel(device, "scale")
    raised: list[BaseException] = []

    def add() -> None:
        try:
            graph.add_empty()
        except CaptureError as error:
            raised.append(error)

    with ost.capture(stream, into=graph):
        ost.launch(stream, scale, config(N), x, N)
        other = threading.Thread(target=add)
        other.start()
        other.join()
    assert "another thread is capturing" in str(raised[0])
    assert len(graph) == 1


def test_nodes_added_under_a_capture_that_is_dropped_go_with_it(
    device: Device, stream: ost.Stream
) -> None:
    graph, x = ost.Graph.create(device), ones(device)
    scale = kernel(device, "scale")
    with pytest.raises(ZeroDivisionError), ost.capture(stream, into=graph):
        (body,) = graph.add_conditional(ost.ConditionalKind.IF, graph.condition(1)).bodies
        body.add_kernel(scale, config(N), x, N)
        graph.add_kernel(scale, config(N), x, N)
        raise ZeroDivisionError
    assert len(graph) == 0
    assert not graph.labels  # another node may get the handle


def test_a_node_that_nothing_orders_is_found_whoever_added_it(device: Device) -> None:
    """The names of what was submitted and of the nodes differ then."""
    stream = device.create_stream()
    x, y, out = ones(device), device.zeros(N, np.float32), device.zeros(N, np.float32)
    add = kernel(device, "add")
    middle = ost.prepare(add, config(N), x, x, y, N)

    def work(stream: ost.Stream, ordered: bool) -> None:
        ost.launch(stream, kernel(device, "fill"), config(N), out, 0.0, N)
        info = stream.capture_info
        if info.graph:
            driver = device.driver
            added = driver.graph_add_node(info.graph, info.dependencies, middle.params)
            if ordered:
                driver.stream_set_capture_dependencies(stream.handle, [added])
        else:
            stream.submit(middle)
        ost.launch(stream, add, config(N), y, y, out, N)

    slots = [
        ost.Slot("x", x, ost.Role.INPUT),
        ost.Slot("y", y, ost.Role.SCRATCH),
        ost.Slot("out", out, ost.Role.OUTPUT),
    ]
    for ordered in (True, False):
        step = ost.GraphedStep(
            lambda stream, _, ordered=ordered: work(stream, ordered),
            stream=stream,
            cache=ost.GraphCache(device),
            slots=slots,
            verify="first",
            warmups=0,
        )
        assert ("nothing orders" in step().detail) is not ordered


def test_a_branch_that_nothing_orders_is_found(device: Device, stream: ost.Stream) -> None:
    """A conditional node counts for what its bodies read and write."""
    x, y, out = ones(device), device.zeros(N, np.float32), device.zeros(N, np.float32)
    add, graph = kernel(device, "add"), ost.Graph.create(device)
    reads = ost.prepare(add, config(N), y, y, out, N)
    branch = graph.add_conditional(ost.ConditionalKind.IF, graph.condition(1))
    branch.bodies[0].add_kernel(add, config(N), x, x, y, N)
    late = graph.add_operation(reads)
    assert unordered(graph, [reads]) is not None
    graph.add_edges([(branch.node, late)])
    assert unordered(graph, [reads]) is None
    beside = ost.prepare(add, config(N), x, x, device.zeros(N, np.float32), N)
    graph.add_operation(beside)  # the branch only reads x, too
    assert unordered(graph, [reads, beside]) is None


# ------------------------------------------------------- work on the default stream in a capture


class DefaultStream:
    """The legacy default stream, as a library uses it that is not given another one."""

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, 0)


def test_another_threads_work_on_the_default_stream_goes_on_beside_captures(
    device: Device, stream: ost.Stream
) -> None:
    """With the streams that there are by default: both threads are right."""
    x, y, scale = ones(device), ones(device), kernel(device, "scale")
    default, enough = device.adopt_stream(DefaultStream()), threading.Event()
    begun, raised, turns = threading.Event(), list[BaseException](), 0

    def works() -> None:
        nonlocal turns
        try:
            while not enough.is_set() or turns < 4:
                ost.launch(default, scale, config(N), y, N)
                ost.launch(default, kernel(device, "halve"), config(N), y, N)
                turns += 1
                begun.set()
        except BaseException as error:
            raised.append(error)
            begun.set()

    other = threading.Thread(target=works)
    other.start()
    begun.wait(30)
    for _ in range(8):
        with ost.capture(stream) as capture:
            ost.launch(stream, scale, config(N), x, N)
            at = turns
            while turns < at + 2 and not raised:  # work of the other thread, inside of the capture
                time.sleep(0)
        capture.graph.instantiate().launch(stream)
        stream.synchronize()
    enough.set()
    other.join()
    assert not raised
    assert (x.to_numpy(stream) == 256).all()
    default.synchronize()
    assert (y.to_numpy(stream) == 1).all()


@pytest.mark.parametrize("asked", ["parameter", "environment"])
def test_work_on_the_default_stream_in_a_capture_can_be_found(
    device: Device, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    """Without being asked for it ran once and was missing from each replay."""
    x, scale = ones(device), kernel(device, "scale")
    default = device.adopt_stream(DefaultStream())
    if asked == "environment":
        monkeypatch.setenv("OSTINATO_BLOCKING_CAPTURES", "1")
        stream = device.create_stream()
    else:
        stream = device.create_stream(blocking=True)

    def work() -> None:
        ost.launch(stream, scale, config(N), x, N)
        ost.fill(default, x, 0)

    with pytest.raises(CaptureBrokenError, match=r"906.*legacy default stream") as caught:
        ost.capture_function(stream, work)
    assert "ost.fill(default, x, 0)" in (caught.value.location or "")
    assert "a stream of its own" in str(caught.value)
    run = ost.capture_function(stream, lambda: ost.launch(stream, scale, config(N), x, N))
    run.instantiate().launch(stream)
    assert (x.to_numpy(stream) == 2).all()


# ------------------------------------------------------------- host functions that raise in replays


def fails() -> None:
    raise ZeroDivisionError("in a host function")


@pytest.mark.parametrize("waits", ["stream", "event", "device", "copy", "launch", "replay", "work"])
def test_a_host_function_that_raises_in_a_replay_is_said_by_the_next_call(
    device: Device, stream: ost.Stream, waits: str
) -> None:
    """It was only logged."""
    x, scale = ones(device), kernel(device, "scale")
    graph = ost.capture_function(stream, lambda: ost.launch(stream, scale, config(N), x, N))
    good = graph.instantiate(upload=stream)
    good.launch(stream)
    good.launch(stream)  # the short way of a launch
    recorded = threading.Event()

    def fails_later() -> None:
        recorded.wait(60)
        fails()

    run = ost.capture_function(stream, lambda: stream.call(fails_later)).instantiate()
    done = device.create_event()
    calls: dict[str, Callable[[], object]] = {
        "stream": stream.synchronize,
        "event": done.synchronize,
        "device": device.synchronize,
        "copy": lambda: x.to_numpy(stream),
        "launch": lambda: ost.launch(stream, scale, config(N), x, N),
        "replay": lambda: good.launch(stream),
        "work": lambda: ost.fill(stream, x, 0),
    }
    for _ in range(2):
        recorded.clear()
        run.launch(stream)
        stream.record(done)
        recorded.set()
        if waits in ("launch", "replay", "work"):  # none of these waits for it
            while not device.context.failures:
                time.sleep(0.001)
            while not device.context.taps:
                time.sleep(0.001)
        with pytest.raises(HostFunctionError, match=r"fails_later of .*ZeroDiv") as caught:
            calls[waits]()
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        assert caught.value.__cause__.__traceback__ is not None
        calls[waits]()  # it is said once, and everything works
        assert device.context.taps == ()
    stream.synchronize()


def test_host_functions_that_raise_do_not_break_a_capture(
    device: Device, stream: ost.Stream
) -> None:
    """Nor is a step put aside because of them: what follows the capture says it."""
    x, scale, other = ones(device), kernel(device, "scale"), device.create_stream()
    with ost.capture(stream) as capture:
        other.call(fails)
        while not device.context.failures:
            time.sleep(0.001)
        ost.launch(stream, scale, config(N), x, N)
    run = capture.graph.instantiate()
    with pytest.raises(HostFunctionError):
        run.launch(stream)
    run.launch(stream)
    assert (x.to_numpy(stream) == 2).all()


def test_many_host_functions_that_raise_are_one_error(device: Device, stream: ost.Stream) -> None:
    with HeldStream(stream):  # or the second call would say what the first one raised
        for _ in range(3):
            stream.call(fails)
    with pytest.raises(HostFunctionError, match="and so did 2 calls after it"):
        stream.synchronize()
    stream.synchronize()


class Borrowed:
    """Another library's array, over memory of ours."""

    def __init__(self, buffer: ost.Buffer, typestr: str) -> None:
        self.buffer = buffer
        self.__cuda_array_interface__ = {
            "shape": buffer.shape,
            "typestr": typestr,
            "data": (buffer.address, False),
            "version": 3,
        }


DOORS = {
    "launch": lambda w, x: ost.launch(w.stream, w.scale, config(N), x, N),
    "prepare": lambda w, x: ost.prepare(w.scale, config(N), x, N),
    "node": lambda w, x: w.graph.add_kernel(w.scale, config(N), x, N),
    "capture": lambda w, x: ost.capture_function(
        w.stream, lambda: ost.launch(w.stream, w.scale, config(N), x, N)
    ),
    "record": lambda w, x: w.record(x),
    "patch": lambda w, x: w.run.patch(0, "x", x),
    "patch by index": lambda w, x: w.run.patch(0, 0, x),
    "patcher": lambda w, x: w.run.patcher(0, "x")(x),
    "patch_all": lambda w, x: w.run.patch_all([(0, "n", 1), (0, "x", x)]),
    "set_params": lambda w, x: w.run.set_params(0, ost.prepare(w.scale, config(N), x, N)),
    "rebind": lambda w, x: w.run.rebind({w.x: x}),
    "rebind a range": lambda w, x: w.run.rebind({w.x.range: x}),
}
"""Where memory is given to a kernel."""


class Scaled:
    """A graph of one kernel that doubles `x`, and what else the doors need."""

    def __init__(self, device: Device) -> None:
        self.stream, self.scale = device.create_stream(), kernel(device, "scale")
        self.x = ones(device)
        self.graph = ost.Graph.create(device)
        self.graph.add_kernel(self.scale, config(N), self.x, N)
        self.run = self.graph.instantiate()

    def record(self, x: object) -> None:
        with ost.record(self.stream):
            ost.launch(self.stream, self.scale, config(N), x, N)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("way", ["buffer", "view", "scalar", "foreign"])
def test_memory_of_another_type_is_no_argument(device: Device, door: str, way: str) -> None:
    """[1, 2, 3, 4] are int64: as float32 they are other numbers."""
    world = Scaled(device)
    for dtype in ("int64", "float64", "int32", "uint32", "f16", "bf16", "bool", "uint8"):
        values = device.zeros(2 * N, dtype)
        given: object = values
        if way == "view":
            given = device.zeros(8 * N, "bytes").view(dtype=dtype)
        elif way == "scalar":
            given = ost.DeviceArray(device, 2 * N, dtype)
        elif way == "foreign":
            given = Borrowed(values, values.dtype.str)
        with pytest.raises(InputError, match=r"points at f32|holds float32|points at float32"):
            DOORS[door](world, given)
    world.run.launch(world.stream)  # as it was
    assert (world.x.to_numpy(world.stream) == 2).all()
    assert len(world.graph) == 1


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("way", ["same", "bytes", "view", "foreign", "range", "address"])
def test_memory_of_the_type_or_of_none_is_taken(device: Device, door: str, way: str) -> None:
    world = Scaled(device)
    bytes_, wide = device.zeros(4 * N, "bytes"), device.zeros(N // 2, "f64")
    given = {
        "same": lambda: device.zeros(N, "f32"),
        "bytes": lambda: bytes_,
        "view": lambda: wide.view(dtype="f32"),
        "foreign": lambda: Borrowed(device.zeros(N, "f32"), "<f4"),
        "range": lambda: wide.range,
        "address": lambda: wide.address if "rebind" not in door else wide.range,
    }[way]()
    DOORS[door](world, given)
    world.run.launch(world.stream)
    world.stream.synchronize()


MIXED = np.dtype([("a", "<i4"), ("b", "<f4")])


@pytest.mark.parametrize(
    ("word", "fitting"),
    [
        ("u8", ["uint8", "u1", np.bool_, MIXED]),
        ("i8", ["int8", "i1"]),
        ("u16", ["u16", "bf16", np.uint16]),
        ("bf16", ["bf16", "bfloat16", "u16"]),
        ("f16", ["f16", "f2", "half"]),
        ("float32", ["f32", "f4", np.float32, np.dtype("<f4")]),
        ("bytes", ["f32", "u1", "c8", "?", "i64", "i1", "u2", "f2", MIXED]),
        ("i64", ["i64", np.longlong]),
    ],
)
def test_what_a_pointer_may_point_at(host_device: Device, word: str, fitting: list[Any]) -> None:
    """Flags and structs as their bytes, bfloat16 as its bits: signatures have no other name."""

    @ost.host_kernel(f"x: *{word}", name="takes")
    def takes(launch: object, x: object) -> None: ...

    made = host_device.modules.get_or_compile(ost.Source(host=[takes]), "takes")
    for dtype in [*fitting, "bytes"]:
        made.arguments(host_device.zeros(2, dtype))
    mine = {host_device.zeros(2, dtype).dtype for dtype in fitting}
    for dtype in ("bool", MIXED, "u1", "i1", "u2", "f2", "f4", "i64", "c8"):
        memory = host_device.zeros(2, dtype)
        if memory.dtype not in mine:
            with pytest.raises(InputError, match="'x' points at"):
                made.arguments(memory)


def test_a_dtype_is_asked_for(device: Device) -> None:
    """`zeros(4)` was four bytes, and a kernel that was told n=1024 ran past them."""
    pool = device.pool()
    for make in (device.zeros, device.empty, device.pinned, pool.empty):
        with pytest.raises(TypeError, match="dtype"):
            make(4)  # type: ignore[call-arg]
        with pytest.raises(InputError, match="dtype None"):
            make(4, None)
        for word in ("f32", "float32", "f4", np.float32, np.dtype(np.float32)):
            assert make(4, word).dtype == np.float32
        assert make(4, "f16").dtype == np.float16  # NumPy's "f16" has 128 bits
        assert make(4, "bytes").nbytes == 4
        for word in ("i8", "u8"):  # 8 bits or 8 bytes
            with pytest.raises(InputError, match="8 bits in signatures and 8 bytes in NumPy"):
                make(4, word)
    for values in (1.0, [1, 2], ((1, 2), (3, 4))):
        with pytest.raises(InputError, match="has no dtype"):
            device.array(values)
        assert device.array(values, "u32").dtype == np.uint32
    assert device.array(np.float64(1)).dtype == np.float64


@pytest.mark.parametrize("way", ["copy", "copy_from", "node", "set"])
def test_a_copy_does_not_reinterpret(device: Device, stream: ost.Stream, way: str) -> None:
    x, y = device.array(np.arange(8), "f32"), device.zeros(4, "f64")
    graph = ost.Graph.create(device)
    graph.add_memcpy(ones(device), ones(device))
    run = graph.instantiate()
    call = {
        "copy": lambda to, come: ost.copy(stream, to, come),
        "copy_from": lambda to, come: to.copy_from(come, stream),
        "node": graph.add_memcpy,
        "set": lambda to, come: run.set_memcpy(0, to, come),
    }[way]
    with pytest.raises(InputError, match="float32 is not converted to float64"):
        call(y, x)
    with pytest.raises(InputError, match="float32 is not converted to uint8"):
        call(device.zeros(32, "uint8"), x)
    for to, come in ((y, x.view(dtype="f64")), (device.zeros(32, "bytes"), x)):
        call(to, come)
    call(y, device.zeros(32, "bytes"))


ELSEWHERE = {
    **DOORS,
    "copy to": lambda w, x: ost.copy(w.stream, x, w.x),
    "copy from": lambda w, x: ost.copy(w.stream, w.x, x),
    "copy_from": lambda w, x: w.x.copy_from(x, w.stream),
    "copy in": lambda w, x: x.copy_from(np.zeros(N, np.float32), w.stream),
    "copy out": lambda w, x: x.to_numpy(w.stream),
    "fill": lambda w, x: ost.fill(w.stream, x, 1),
    "memcpy node": lambda w, x: w.graph.add_memcpy(w.x, x),
    "memset node": lambda w, x: w.graph.add_memset(x, 1),
    "set_memcpy": lambda w, x: w.copying.set_memcpy(0, w.x, x),
    "set_memset": lambda w, x: w.filling.set_memset(0, x, 1),
    "slot": lambda w, x: ost.GraphedStep(
        lambda *_: None,
        stream=w.stream,
        cache=ost.GraphCache(w.stream.context),
        slots=[ost.Slot("x", x, ost.Role.STATE)],
    ),
}
"""Where memory of another device could be given."""


@pytest.mark.parametrize("door", ELSEWHERE)
@pytest.mark.parametrize("way", ["buffer", "view", "state"])
def test_memory_of_another_device_is_refused(
    device: Device, other_device: Device, door: str, way: str
) -> None:
    """It poisoned the context, and the advice was to look for a fault in the kernel."""
    world = Scaled(device)
    for name, add in (
        ("copying", lambda g: g.add_memcpy(world.x, ones(device))),
        ("filling", lambda g: g.add_memset(world.x, 0)),
    ):
        graph = ost.Graph.create(device)
        add(graph)
        setattr(world, name, graph.instantiate())
    there = ones(other_device)
    if way == "view":
        there = other_device.zeros(8 * N, "bytes").view(4 * N, N, "f32")
    elif way == "state":
        there = ost.DeviceArray(other_device, N, "f32").buffer
    ours, theirs = device.context.space.name, other_device.context.space.name
    assert ours != theirs
    with pytest.raises(InputError) as caught:
        ELSEWHERE[door](world, there)
    assert ours in str(caught.value) and theirs in str(caught.value)
    world.run.launch(world.stream)  # the context is sound, and the graph as it was
    assert (world.x.to_numpy(world.stream) == 2).all()
    assert len(world.graph) == 1


@pytest.mark.parametrize(
    "call",
    [
        "launch", "submit", "capture", "replay", "upload", "instantiate", "wait", "record",
        "event node", "set", "child", "update", "pool", "into", "node",
    ],
)  # fmt: skip
def test_what_is_of_another_device_is_refused(
    device: Device, other_device: Device, call: str
) -> None:
    """Kernels, graphs, streams and events: each gave a bare status, or the wrong stream."""
    here, there = Scaled(device), Scaled(other_device)
    operation = ost.prepare(here.scale, config(N), here.x, N)
    theirs = there.stream
    event = here.stream.record()
    state = ost.DeviceScalar(device, "u32", initial=1, stream=here.stream)
    calls: dict[str, Callable[[], object]] = {
        "launch": lambda: ost.launch(theirs, here.scale, config(N), there.x, N),
        "submit": lambda: theirs.submit(operation),
        "capture": lambda: ost.capture_function(theirs, lambda: theirs.submit(operation)),
        "replay": lambda: here.run.launch(theirs),
        "upload": lambda: here.run.upload(theirs),
        "instantiate": lambda: here.graph.instantiate(upload=theirs),
        "wait": lambda: theirs.wait(event),
        "record": lambda: theirs.record(event),
        "event node": lambda: there.graph.add_event_wait(event),
        "set": lambda: state.set(2, theirs),
        "child": lambda: there.graph.add_child(here.graph),
        "update": lambda: there.run.update(here.graph),
        "pool": lambda: ost.Capture(theirs, pool=device.pool()),
        "into": lambda: ost.Capture(theirs, into=here.graph),
        "node": lambda: there.graph.add_operation(operation),
    }
    with pytest.raises(InputError) as caught:
        calls[call]()
    for opened in (device, other_device):
        assert opened.context.space.name in str(caught.value)
    for world in (here, there):
        world.run.launch(world.stream)
        assert (world.x.to_numpy(world.stream) == 2).all()


@pytest.mark.gpu
def test_two_devices_on_one_gpu_share_their_memory(cuda_device: Device) -> None:
    with preload(ost.open_device(cuda_device.name)) as second:
        world, x = Scaled(cuda_device), ones(second)
        for give in DOORS.values():
            give(world, x)
        ost.copy(world.stream, world.x, x)
        second.create_stream().wait(world.stream.record())
        cuda_device.synchronize()


# ------------------------------------------------------------------------------ events in a graph


@pytest.mark.parametrize("build", ["capture", "record"])
def test_each_replay_records_the_event_that_its_step_records(device: Device, build: str) -> None:
    """After the eager run of another bucket the event was done before the replay had run."""
    gate, stream, other = (device.create_stream() for _ in range(3))
    x, seen, event = device.zeros(1, np.int32), device.zeros(1, np.int32), device.create_event()

    def work(stream: ost.Stream, sizes: ost.Sizes) -> None:
        ost.launch(stream, kernel(device, "increment"), config(1), x, 1)
        stream.record(event)

    step = ost.GraphedStep(work, stream=stream, cache=ost.GraphCache(device), build=build)
    for calls, rows in enumerate((4, 4, 8, 4, 4, 8, 8), 1):
        with HeldStream(gate) if calls in (4, 5, 7) else contextlib.nullcontext() as held:
            if held is not None:
                stream.wait(gate.record())
            step(rows=rows)
            assert held is None or not event.done
            other.wait(event)
            seen.copy_from(x, other)
        assert seen.to_numpy(other)[0] == calls
        assert event.done
    assert not step.statistics().quarantined


@pytest.mark.parametrize(
    "way",
    ["plain", "definition closed", "clone", "child", "rebound", "patched", "updated", "recorded"],
)
def test_what_is_made_of_a_captured_record_of_an_event_records_it(
    device: Device, stream: ost.Stream, way: str
) -> None:
    gate, other, increment = device.create_stream(), device.create_stream(), "increment"
    x, y, seen = (device.zeros(1, np.int32) for _ in range(3))
    first, second = device.create_event(), device.create_event()

    def work(event: ost.Event, counter: ost.Buffer, by: int) -> None:
        ost.launch(stream, kernel(device, increment), config(1), counter, by)
        stream.record(event)

    event, out = first, x
    by = 5 if way == "patched" else 7
    graph = ost.capture_function(stream, lambda: work(first, y if way == "rebound" else x, by))
    run = graph.instantiate()
    if way == "definition closed":
        graph.close()
    if way == "clone":
        run = graph.clone().instantiate()
    if way == "child":
        around = ost.Graph.create(device)
        around.add_child(graph)
        run = around.instantiate()
    if way == "rebound":
        run.rebind({y: x})
    if way == "patched":
        run.patch(0, "by", 7)
    if way == "updated":
        run.update(ost.capture_function(stream, lambda: work(second, x, 7)))
        event = second
    if way == "recorded":
        with ost.record(stream) as recording:
            work(second, x, 7)
        event, run = second, recording.build().instantiate()
        x.copy_from(y, stream)
    run.upload(stream)
    device.synchronize()
    with HeldStream(gate):
        stream.wait(gate.record())
        run.launch(stream)
        other.wait(event)
        seen.copy_from(out, other)
        assert not event.done
    assert seen.to_numpy(other)[0] == 7


@pytest.mark.parametrize("build", ["capture", "record"])
def test_an_event_may_fork_and_outlive_its_graph(
    device: Device, stream: ost.Stream, build: str
) -> None:
    """Its last record counts, as eagerly.  One that nobody can wait for needs no node."""
    gate, side, other = (device.create_stream() for _ in range(3))
    x, y, seen, event = ones(device), ones(device), ones(device), device.create_event()
    add = kernel(device, "add")

    def work() -> None:
        ost.launch(stream, add, config(N), x, x, x, N)
        stream.record(event)
        side.wait(event)
        ost.launch(side, add, config(N), x, x, y, N)
        joins = side.record()
        stream.wait(joins)
        ost.launch(stream, add, config(N), x, y, x, N)
        stream.record(event)

    if build == "capture":
        graph = ost.capture_function(stream, work)
    else:
        with ost.record(stream) as recording:
            work()
        graph = recording.build()
        x.copy_from(device.array(np.ones(N, np.float32)), stream)
    run = graph.instantiate(upload=stream)
    assert [node.kind.name for node in graph.nodes].count("EVENT_RECORD") == 1
    assert "event_record" in str(graph) and "stream.record(event)" in str(graph.nodes[-1].location)
    device.synchronize()
    for expected in (6, 36):
        with HeldStream(gate):
            stream.wait(gate.record())
            run.launch(stream)
            other.wait(event)
            seen.copy_from(x, other)
        assert (seen.to_numpy(other) == expected).all()


@pytest.mark.parametrize("build", ["capture", "record"])
def test_events_with_timing_have_the_times_of_the_last_replay(
    device: Device, stream: ost.Stream, build: str
) -> None:
    """The start's node is ordered before the work behind it, and the stop's before the rest."""
    start, stop = (device.create_event(timing=True) for _ in range(2))
    seconds, opened, in_time = [0.0], threading.Event(), []
    opened.set()

    def work() -> None:
        stream.record(start)
        stream.record(stop)
        stream.record(start)
        stream.call(lambda: time.sleep(seconds[0]))
        stream.record(stop)
        stream.call(lambda: in_time.append(opened.wait(30)))

    if build == "capture":
        graph = ost.capture_function(stream, work)
    else:
        with ost.record(stream) as recording:
            work()
        stream.synchronize()
        graph = recording.build()
    run = graph.instantiate(upload=stream)
    for seconds[0] in (0.0, 0.2):
        opened.clear()
        run.launch(stream)
        stop.synchronize()
        opened.set()
        stream.synchronize()
        assert in_time.pop()
        assert stop.elapsed_since(start) >= 1e3 * seconds[0]


def test_an_event_with_timing_is_recorded_before_the_work_that_it_forks(
    device: Device, stream: ost.Stream
) -> None:
    side, add = device.create_stream(), kernel(device, "add")
    start, stop = (device.create_event(timing=True) for _ in range(2))
    x, y = ones(device), ones(device)

    def work() -> None:
        ost.launch(stream, add, config(N), x, x, x, N)
        side.wait(stream.record(start))
        side.call(lambda: time.sleep(0.2))
        ost.launch(side, add, config(N), x, x, y, N)
        stream.wait(side.record(stop))
        ost.launch(stream, add, config(N), x, y, x, N)

    run = ost.capture_function(stream, work).instantiate()
    for expected in (6, 36):
        run.launch(stream)
        assert (x.to_numpy(stream) == expected).all()
        assert stop.elapsed_since(start) >= 200


@pytest.mark.parametrize("of", ["nothing", "another stream", "a capture", "a replay"])
def test_a_capture_does_not_wait_for_what_is_not_in_it(
    device: Device, stream: ost.Stream, of: str
) -> None:
    """A wait for an event that was never recorded was left out, and the replays did not wait."""
    other, event, x = device.create_stream(), device.create_event(), ones(device)

    def record() -> None:
        ost.fill(other, x, 2)
        other.record(event)

    if of == "another stream":
        record()
    if of in ("a capture", "a replay"):
        run = ost.capture_function(other, record).instantiate()
    if of == "a replay":
        run.launch(other)
    with pytest.raises(CaptureBrokenError) as caught, ost.capture(stream):
        with contextlib.suppress(CaptureBrokenError):  # raised at the end, too
            stream.wait(event)
        ost.fill(stream, x, 1)
    assert "stream.wait(event)" in (caught.value.location or "")
    device.synchronize()


@pytest.mark.parametrize("what", ["record", "wait"])
def test_a_step_that_orders_another_stream_is_run_eagerly(device: Device, what: str) -> None:
    """The capture ordered it once, and no replay did."""
    gate, stream, other = (device.create_stream() for _ in range(3))
    x, seen, event = device.zeros(1, np.int32), device.zeros(1, np.int32), device.create_event()

    def work(stream: ost.Stream, sizes: ost.Sizes) -> None:
        ost.launch(stream, kernel(device, "increment"), config(1), x, 1)
        if what == "record":
            other.record(event)
        else:
            other.wait(event)

    step = ost.GraphedStep(work, stream=stream, cache=ost.GraphCache(device))
    for _ in range(3):
        step()
    why = " ".join(step.statistics().quarantined.values())
    assert "broken at" in why and f"other.{what}(event)" in why
    device.synchronize()
    with HeldStream(gate):
        (other if what == "record" else gate).wait(gate.record())
        if what == "wait":
            gate.record(event)
        step()
        if what == "record":
            assert not event.done
        else:
            seen.copy_from(x, other)
            assert not other.done


@pytest.mark.parametrize("kept", [True, False])
def test_a_body_records_no_event(device: Device, stream: ost.Stream, kept: bool) -> None:
    """CUDA has no such nodes there.  The fork itself is no node."""
    side, x, y = device.create_stream(), ones(device), ones(device)
    graph = ost.Graph.create(device)
    branch = graph.add_conditional(ost.ConditionalKind.IF, graph.condition(default=1))
    (body,) = branch.bodies
    events = []

    def work() -> None:
        ost.fill(stream, x, 2)
        fork = stream.record()
        side.wait(fork)
        ost.fill(side, y, 3)
        stream.wait(side.record())
        events.extend([fork] * kept)

    def capture() -> None:
        with ost.capture(stream, into=body):
            work()

    if kept:
        with pytest.raises(CaptureBrokenError, match=r"fork = stream.record.*cannot record it"):
            capture()
        assert not len(body)
        events.clear()
        kept = False
    capture()
    assert len(body) == 2
    graph.instantiate().launch(stream)
    assert [int(b.to_numpy(stream)[0]) for b in (x, y)] == [2, 3]


def test_events_alone_are_no_capture(device: Device, stream: ost.Stream) -> None:
    """The work that they were to mark went elsewhere."""
    events = [device.create_event(timing=timing) for timing in (True, False)]
    x, other = ones(device), device.create_stream()
    for into in (None, ost.Graph.create(device)):
        nothing = pytest.raises(CaptureError, match="nothing was captured")
        with nothing, ost.capture(stream, into=into):
            for event in events:
                stream.record(event)
            ost.fill(other, x, 2)
        assert into is None or not len(into)


def test_a_graph_with_events_of_this_process_is_not_kept_for_another(
    host_device: Device, tmp_path: Path
) -> None:
    """A restored one recorded an event of its own, and the step's was not recorded any more."""
    device, event = host_device, host_device.create_event()
    x, stream = ones(device), device.create_stream()

    def work() -> None:
        ost.fill(stream, x, 2)
        stream.record(event)

    store = ost.GraphStore(device, tmp_path, outputs={"x": x})
    with pytest.raises(GraphFileError, match="events of this process"):
        store.save("key", ost.capture_function(stream, work), check=False)
    assert "key" not in store


def test_the_last_of_a_graphs_records_of_an_event_counts(
    device: Device, stream: ost.Stream
) -> None:
    """As where a graph that records it is launched twice in a capture."""
    other, event = device.create_stream(), device.create_event()
    x, seen = device.zeros(1, np.int32), device.zeros(1, np.int32)
    reached, opened = threading.Event(), threading.Event()

    def work() -> None:
        ost.launch(stream, kernel(device, "increment"), config(1), x, 1)
        stream.record(event)

    def hold() -> None:
        reached.set()
        opened.wait(30)

    inner, graph = ost.capture_function(stream, work), ost.Graph.create(device)
    first = graph.add_child(inner)
    held = graph.add_host(hold, [first])
    graph.add_child(inner, [held])
    run = graph.instantiate(upload=stream)
    device.synchronize()
    run.launch(stream)
    other.wait(event)
    seen.copy_from(x, other)
    assert reached.wait(30) and not event.done
    opened.set()
    assert seen.to_numpy(other)[0] == 2


@pytest.mark.parametrize("build", ["capture", "record"])
def test_an_event_that_a_step_makes_and_keeps_is_made_by_each_call(
    device: Device, build: str
) -> None:
    """Each bucket's replays recorded the event of its own capture, and the last one was waited
    for."""
    gate, stream = device.create_stream(), device.create_stream()
    x, last = device.zeros(1, np.int32), []

    def work(stream: ost.Stream, sizes: ost.Sizes) -> None:
        ost.launch(stream, kernel(device, "increment"), config(1), x, 1)
        last[:] = [stream.record()]

    step = ost.GraphedStep(work, stream=stream, cache=ost.GraphCache(device), build=build)
    for rows in (4, 4, 8, 8):
        step(rows=rows)
    device.synchronize()
    with HeldStream(gate):
        stream.wait(gate.record())
        step(rows=4)
        assert not last[0].done
    reasons = step.statistics().quarantined.values()
    assert len(reasons) == 2 and all("last[:] = [stream.record()]" in why for why in reasons)


@pytest.mark.parametrize("build", ["capture", "record"])
def test_a_step_lets_another_stream_wait_for_it_at_each_call(device: Device, build: str) -> None:
    """A fork without work needs no join in CUDA, and no replay made the stream wait."""
    gate, stream, other = (device.create_stream() for _ in range(3))
    x, seen = device.zeros(1, np.int32), device.zeros(1, np.int32)

    def work(stream: ost.Stream, sizes: ost.Sizes) -> None:
        ost.launch(stream, kernel(device, "increment"), config(1), x, 1)
        other.wait(stream.record())

    step = ost.GraphedStep(work, stream=stream, cache=ost.GraphCache(device), build=build)
    for _ in range(3):
        step()
    why = " ".join(step.statistics().quarantined.values())
    assert "other.wait(stream.record())" in why and "not joined" in why
    device.synchronize()
    with HeldStream(gate):
        stream.wait(gate.record())
        step()
        seen.copy_from(x, other)
        assert not other.done
    assert seen.to_numpy(other)[0] == 4
