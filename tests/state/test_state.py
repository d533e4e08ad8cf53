"""Device state: fixed addresses, whole updates in stream order, errors that lose nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ostinato as ost
from ostinato.device import Device
from ostinato.errors import CaptureError, ClosedError, ContextPoisonedError, DriverError, InputError
from ostinato.state.scalar import as_exact
from ostinato.state.staging import StagingRing
from ostinato.testing import FaultyDriver, HeldStream
from tests.sources import config, kernel

STEP = np.dtype([("token", "<i4"), ("position", "<i4"), ("length", "<i4")])


@pytest.mark.parametrize(("depth", "values"), [(4, 3), (2, 6)])
def test_a_replay_in_flight_sees_the_value_of_its_time(
    device: Device, depth: int, values: int
) -> None:
    """Each adds its own value, also if there are more than the ring has entries; writes wait only
    then."""
    stream = device.create_stream()
    factor = ost.DeviceScalar(device, np.float32, initial=0, stream=stream, depth=depth)
    x, y = device.array(np.ones(10, np.float32)), device.zeros(10, np.float32)
    with ost.capture(stream) as capture:
        ost.launch(stream, kernel(device, "axpy"), config(10), x, factor, y, 10)
    run = capture.graph.instantiate(upload=stream)
    stream.synchronize()
    with HeldStream(stream) as held:
        for number in range(values):
            if number == depth:
                held.release_after(0.2)
            factor.set(10.0**number, stream)
            run.launch(stream)
    assert (y.to_numpy(stream) == int("1" * values)).all()


@pytest.mark.parametrize("closed", [False, True])
def test_an_entry_whose_end_was_not_marked_is_waited_for(host_device: Device, closed: bool) -> None:
    """The copy was submitted, and the event behind it was refused."""
    faults = FaultyDriver(host_device.driver)
    device = Device(faults)
    stream = device.create_stream()
    ring = StagingRing(device.context, 8, depth=1)
    x, y = device.zeros(8, "bytes"), device.zeros(8, "bytes")
    with HeldStream(stream) as held:
        faults.fail("event_record")
        with pytest.raises(DriverError):
            ring.write(x, b"11111111", stream)
        ost.copy(stream, y, x)
        if closed:
            stream.close()
            stream = device.create_stream()
        held.release_after(0.2)
        ring.write(x, b"22222222", stream)
    assert y.to_numpy(stream).tobytes() == b"11111111"
    assert x.to_numpy(stream).tobytes() == b"22222222"


def test_token_position_and_length_in_one_copy(device: Device) -> None:
    stream = device.create_stream()
    state = ost.DeviceScalar(device, STEP)
    before = stream.submitted
    state.set({"token": 5, "position": 7, "length": 8}, stream)
    assert stream.submitted - before == 1
    assert state.to_numpy(stream).item() == (5, 7, 8)
    ost.launch(stream, kernel(device, "increment"), config(1), state.field("position"), 1)
    assert state.to_numpy(stream).item() == (5, 8, 8)
    state.set((1, 2, 3), stream)
    assert state.to_numpy(stream).item() == (1, 2, 3)


def test_an_array_of_structs(device: Device) -> None:
    stream = device.create_stream()
    rows = ost.DeviceArray(device, 3, STEP)
    rows.set([(1, 2, 3), {"token": 4, "position": 5, "length": 6}, (7, 8, 9)], stream)
    assert rows.to_numpy(stream).tolist() == [(1, 2, 3), (4, 5, 6), (7, 8, 9)]
    with pytest.raises(InputError, match="one struct"):
        rows.field("token")


def test_structs_are_converted_field_by_field_as_those_of_a_buffer(device: Device) -> None:
    """Other types of the same fields, axes as lists, structs as lists, structs in structs."""
    stream = device.create_stream()
    wide = np.dtype([(name, "<i8") for name in ("token", "position", "length")])
    pairs = ost.DeviceArray(device, (2, 1), STEP)
    pairs.set(np.array([[(1, 2, 3)], [(4, 5, 6)]], wide), stream)
    assert pairs.to_numpy(stream).tolist() == [[(1, 2, 3)], [(4, 5, 6)]]
    pairs.set([[[7, 8, 9]], (np.array((1, 2, 3), wide)[()],)], stream)
    assert pairs.to_numpy(stream).tolist() == [[(7, 8, 9)], [(1, 2, 3)]]
    with pytest.raises(InputError, match="outside int32"):
        pairs.set(np.array([[(1, 2, 3)], [(4, 5, 1 << 40)]], wide), stream)
    with pytest.raises(InputError, match="fields token"):
        pairs.set(
            np.zeros((2, 1), [("length", "<i4"), ("token", "<i4"), ("position", "<i4")]), stream
        )
    nested = ost.DeviceScalar(device, [("step", STEP), ("ids", "<u2", (2,))])
    nested.set({"step": {"token": 1, "position": 2, "length": 3}, "ids": (4, 5)}, stream)
    step, ids = nested.to_numpy(stream).item()
    assert (step, list(ids)) == ((1, 2, 3), [4, 5])
    with pytest.raises(InputError, match="shape"):
        nested.set(((1, 2, 3), [4, 5, 6]), stream)


def test_bad_values_change_nothing(host_device: Device) -> None:
    stream = host_device.create_stream()
    state = ost.DeviceScalar(host_device, STEP, initial=(1, 2, 3), stream=stream)
    for bad in (
        {"token": 1},
        {"token": 1, "position": 2, "length": 3, "more": 4},
        {"token": 1, 2: 3},
        (1, 2),
        (1, 2, 2**31),
        (1, 2, 0.5),
        (1, 2, "x"),
        7,
    ):
        with pytest.raises(InputError):
            state.set(bad, stream)
    assert state.to_numpy(stream).item() == (1, 2, 3)
    with pytest.raises(InputError, match="token, position, length"):
        state.field("nothing")
    plain = ost.DeviceArray(host_device, 3, np.int32)
    plain.set([1, 2, 3], stream)
    for bad in ([4, 5], [4, 5, 6, 7], 4, [[4, 5, 6]]):
        with pytest.raises(InputError, match="shape"):
            plain.set(bad, stream)
    assert plain.to_numpy(stream).tolist() == [1, 2, 3]
    with pytest.raises(InputError, match="there are: none"):
        plain.field("nothing")
    rows = ost.DeviceArray(host_device, 2, STEP)
    with pytest.raises(InputError, match="a sequence of"):
        rows.set({"token": 1, "position": 2, "length": 3}, stream)
    with pytest.raises(InputError, match="needs the stream"):
        ost.DeviceScalar(host_device, np.int32, initial=1)
    with pytest.raises(InputError):
        ost.DeviceArray(host_device, 0, np.int32)
    with pytest.raises(InputError):
        ost.DeviceArray(host_device, 1 << 20, np.int32)


def test_a_staged_write_in_a_capture_is_refused_and_breaks_nothing(device: Device) -> None:
    stream = device.create_stream()
    value = ost.DeviceScalar(device, np.int32, initial=3, stream=stream)
    with ost.capture(stream) as capture:
        with pytest.raises(CaptureError, match="staged write"):
            value.set(4, stream)
        ost.launch(stream, kernel(device, "increment"), config(1), value, 1)
    capture.graph.instantiate().launch(stream)
    assert value.to_numpy(stream) == 4


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_writes_on_another_stream_break_no_capture(device: Device, mode: Any) -> None:
    """Nor does the one that has to wait for the oldest of them."""
    stream, other = device.create_stream(), device.create_stream()
    x, scalar = device.zeros(1, np.uint32), ost.DeviceScalar(device, np.uint32)
    with ost.capture(stream, mode=mode) as capture:
        ost.fill(stream, x, 7)
        for value in range(10):
            scalar.set(value, other)
    assert len(capture.graph) == 1 and scalar.to_numpy(other) == 9


def test_the_ring_waits_only_when_it_is_full(device: Device) -> None:
    stream = device.create_stream()
    ring = StagingRing(device.context, 8, depth=2)
    x = device.zeros(8, "bytes")
    with HeldStream(stream) as held:
        ring.write(x, b"11111111", stream)
        ring.write(x, b"22222222", stream)
        assert ring.waits == 0
        held.release_after(0.05)
        ring.write(x, b"33333333", stream)
        assert ring.waits == 1
    assert x.to_numpy(stream).tobytes() == b"33333333"
    with pytest.raises(InputError):
        ring.write(x, b"123456789", stream)


def test_a_ring_without_entries(device: Device) -> None:
    with pytest.raises(InputError, match="1 or more"):
        ost.DeviceArray(device, 2, "u4", depth=0)


def test_a_closed_ring_takes_nothing_and_keeps_what_is_under_way(device: Device) -> None:
    stream = device.create_stream()
    ring = StagingRing(device.context, 8, depth=2)
    x = device.zeros(8, "bytes")
    with HeldStream(stream):
        ring.write(x, b"11111111", stream)
        ring.close()
        ring.close()
        assert not stream.done()  # the first write is not waited for
        with pytest.raises(ClosedError, match="ring"):
            ring.write(x, b"22222222", stream)
    assert x.to_numpy(stream).tobytes() == b"11111111"


@ost.host_kernel("x: *i32")
def crash(launch: object, x: object) -> None:
    raise ZeroDivisionError


def test_state_can_be_closed_after_a_kernel_failed(host_device: Device) -> None:
    crashing = host_device.modules.get_or_compile(ost.Source(host=[crash], name="crash"), "crash")
    stream = host_device.create_stream()
    value = ost.DeviceScalar(host_device, np.int32, initial=3, stream=stream)
    ost.launch(stream, crashing, config(1), value)
    with pytest.raises(ContextPoisonedError):
        stream.synchronize()
    value.close()


@given(st.integers(-(2**40), 2**40))
def test_exact_integers_only(value: int) -> None:
    kind = np.dtype(np.int32)
    if -(2**31) <= value < 2**31:
        assert as_exact(value, kind, ()) == value
    else:
        with pytest.raises(InputError):
            as_exact(value, kind, ())
