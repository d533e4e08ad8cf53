"""One test for each known way to get a silent wrong answer out of graphs."""

from __future__ import annotations

import gc
import itertools
import threading
from dataclasses import replace

import numpy as np
import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.errors import CaptureError, ClosedError, InputError, UpdateRefusedError
from ostinato.testing import HeldStream
from tests.sources import config, kernel

N = 256

pytestmark = pytest.mark.usefixtures("launcher")  # compiled, and in Python


@pytest.fixture
def stream(device: Device) -> ost.Stream:
    return device.create_stream()


def ones(device: Device) -> ost.Buffer:
    return device.array(np.ones(N, np.float32))


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
    run = ost.capture_function(
        stream, lambda: ost.launch(stream, kernel(device, "add"), config(N), x, x, out, N)
    ).instantiate()
    run.rebind({x: device.array(np.full(N, 3, np.float32))})  # nobody else holds it
    gc.collect()
    device.synchronize()
    device.array(np.full(N, 9, np.float32))
    run.launch(stream)
    assert (out.to_numpy(stream) == 6).all()


def test_a_patched_buffer_lives_with_the_executable(device: Device, stream: ost.Stream) -> None:
    x, out = ones(device), device.zeros(N, np.float32)
    run = ost.capture_function(
        stream, lambda: ost.launch(stream, kernel(device, "add"), config(N), x, x, out, N)
    ).instantiate()
    run.patch(0, "a", device.array(np.full(N, 3, np.float32)))
    gc.collect()
    device.synchronize()
    device.array(np.full(N, 9, np.float32))
    run.launch(stream)
    assert (out.to_numpy(stream) == 4).all()


def test_a_step_with_state_advances_once_a_call(device: Device, stream: ost.Stream) -> None:
    counter = device.zeros(1, np.int32)
    cache = ost.GraphCache(device)
    slots = [ost.Slot("counter", counter, ost.Role.STATE)]
    for verify in ("off", "first", 1):
        step = ost.GraphedStep(
            lambda stream: ost.launch(stream, kernel(device, "increment"), config(1), counter, 1),
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

    def work(stream: ost.Stream) -> None:
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
