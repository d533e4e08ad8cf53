"""Numbers and arrays arrive as they were given, or are refused."""

from __future__ import annotations

import numpy as np
import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.driver.signature import pack_by_size
from ostinato.errors import CaptureError, InputError, OutOfMemoryError
from tests.footguns.common import N, graph_of, ones
from tests.sources import config, kernel

PAIR = np.dtype([("a", np.int32), ("b", np.int32)])


def assert_refused(device: Device, stream: ost.Stream, zeros: np.ndarray, values: object) -> None:
    """Asserts that no memory of the shape and type of `zeros` takes the values, or is changed."""
    x, state = device.array(zeros), ost.DeviceArray(device, len(zeros), zeros.dtype)
    state.set(zeros, stream)
    for put in (
        lambda: x.copy_from(values, stream),
        lambda: device.array(values, zeros.dtype),
        lambda: state.set(values, stream),
    ):
        with pytest.raises(InputError):
            put()
    np.testing.assert_array_equal(x.to_numpy(stream), zeros)
    np.testing.assert_array_equal(state.read(stream), zeros)


class Copies:
    """The ways to copy one buffer to another, each by its name."""

    def __init__(self, device: Device, stream: ost.Stream) -> None:
        self._stream, self._graph = stream, ost.Graph.create(device)
        self._graph.add_copy(ones(device), ones(device))
        self._run = self._graph.instantiate()

    def __call__(self, way: str, to: ost.Buffer, source: ost.Buffer) -> None:
        match way:
            case "copy":
                ost.copy(self._stream, to, source)
            case "copy_from":
                to.copy_from(source, self._stream)
            case "node":
                self._graph.add_copy(to, source)
            case "set":
                self._run.set(0, dst=to, src=source)


WAYS = pytest.mark.parametrize("way", ["copy", "copy_from", "node", "set"])


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
    value = 5.0  # the graph holds 1.0
    factor.set(3, stream)
    run.launch(stream)
    assert (x.to_numpy(stream) == 1).all()
    assert (y.to_numpy(stream) == 3).all()


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
        run = graph_of(stream, kernel(device, "fill"), 8, x, 2.0, 8).instantiate()
        with pytest.raises(InputError, match="value"):
            run.set(0, "value", value)
    assert (x.to_numpy(stream) == 0).all()


def test_infinity_that_is_meant_is_kept(device: Device, stream: ost.Stream) -> None:
    x = ones(device)
    ost.fill(stream, x, float("-inf"))
    assert (x.to_numpy(stream) == -np.inf).all()
    scalar = ost.DeviceScalar(device, np.float32, initial=np.inf, stream=stream)
    assert scalar.read(stream) == np.inf
    with pytest.raises(InputError):
        ost.DeviceScalar(device, np.int32).set(np.inf, stream)


def test_memory_that_no_address_can_reach_is_an_error(device: Device) -> None:
    """A size of 1 << 80 bytes is 0 in 64 bits."""
    pool = ost.CapturePool(device)
    for empty in (device.empty, device.zeros, device.pinned, pool.empty):
        with pytest.raises((OutOfMemoryError, InputError)):
            empty((1 << 40, 1 << 40), "u1")


def test_a_view_that_begins_behind_the_end_is_refused(device: Device) -> None:
    """Such a view had a negative length, and kernels got the address of other memory."""
    x = ones(device)
    for offset in (4 * N + 1, 4 * N + 4, 8 * N, -4):
        with pytest.raises(InputError, match="reaches outside"):
            x.view(offset)
    assert x.view(4 * N).nbytes == 0


def test_a_view_of_the_last_zero_rows_is_an_argument(device: Device, stream: ost.Stream) -> None:
    x, out = ones(device), device.zeros(N, np.float32)
    add = kernel(device, "add")
    ost.launch(stream, add, config(N), x[N:], x[N:], out[N:], 0)
    run = graph_of(stream, add, N, x[N:], x, out[N:], 0).instantiate()
    run.launch(stream)
    run.set(0, "n", N // 2)
    run.set(0, "a", x)
    run.set(0, "out", out)
    run.launch(stream)
    assert (out.to_numpy(stream) == [2] * (N // 2) + [0] * (N // 2)).all()


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
    assert_refused(device, stream, np.zeros(2, dtype), values)


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
    assert_refused(device, stream, np.zeros(1, PAIR), values)


def test_elements_that_are_arrays_are_refused(device: Device) -> None:
    """Copies of such a buffer had more axes than the buffer, and it took no value."""
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


@WAYS
def test_a_copy_between_buffers_that_overlap_is_refused(
    device: Device, stream: ost.Stream, way: str
) -> None:
    """A GPU copies in any order, so the answer would differ from that of the host driver."""
    x, copy = device.array(np.arange(N, dtype=np.float32)), Copies(device, stream)
    for to, source in ((x[1:], x[:-1]), (x[:-1], x[1:])):
        with pytest.raises(InputError, match="overlap"):
            copy(way, to, source)
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


@WAYS
def test_a_copy_does_not_reinterpret(device: Device, stream: ost.Stream, way: str) -> None:
    x, y = device.array(np.arange(8), "f32"), device.zeros(4, "f64")
    raw, copy = device.zeros(32, "bytes"), Copies(device, stream)
    with pytest.raises(InputError, match="float32 is not converted to float64"):
        copy(way, y, x)
    with pytest.raises(InputError, match="float32 is not converted to uint8"):
        copy(way, device.zeros(32, "uint8"), x)
    for to, source in ((y, x.view(dtype="f64")), (raw, x), (y, raw)):
        copy(way, to, source)
