"""Numbers and arrays arrive as they were given, or are refused."""

from __future__ import annotations

import numpy as np
import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.driver.signature import pack_by_size
from ostinato.errors import InputError, OutOfMemoryError
from tests.footguns.common import Borrowed, N, graph_of, ones
from tests.sources import config, kernel

PAIR = np.dtype([("a", np.int32), ("b", np.int32)])


def assert_refused(device: Device, stream: ost.Stream, zeros: np.ndarray, values: object) -> None:
    """Asserts that no memory of the shape and type of `zeros` takes the values, or is changed."""
    x, state = device.array(zeros), ost.DeviceArray(device, len(zeros), zeros.dtype)
    state.set(zeros, stream)
    for put in (
        lambda: x.set(values, stream),
        lambda: device.array(values, zeros.dtype),
        lambda: state.set(values, stream),
    ):
        with pytest.raises(InputError):
            put()
    np.testing.assert_array_equal(x.to_numpy(stream), zeros)
    np.testing.assert_array_equal(state.to_numpy(stream), zeros)


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
            case "node":
                self._graph.add_copy(to, source)
            case "set":
                self._run.set(0, dst=to, src=source)


WAYS = pytest.mark.parametrize("way", ["copy", "node", "set"])


def test_a_host_number_is_frozen_and_device_state_is_not(
    device: Device, stream: ost.Stream
) -> None:
    x, y = ones(device), device.zeros(N, np.float32)
    factor = ost.DeviceScalar(device, np.float32, initial=1, stream=stream)
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
        lambda: device.full(8, value, dtype),
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


def test_numbers_in_bfloat16_are_no_whole_numbers(device: Device, stream: ost.Stream) -> None:
    """NumPy has no such type, and 1.0 became the whole number 1 of 16 bits, which is 9e-41."""
    wanted = np.array([1.0, -2.5, np.inf, 3.0e38])
    bits = [0x3F80, 0xC020, 0x7F80, 0x7F62]
    scalar = ost.DeviceScalar(device, "bf16", initial=1.0, stream=stream)
    state = ost.DeviceArray(device, 4, "bfloat16")
    state.set(wanted, stream)
    x, y = device.array(wanted, "bf16"), device.zeros(4, "bytes").view(dtype="bf16")
    ost.fill(stream, y, -2.5)
    assert x.to_numpy(stream).tolist() == state.to_numpy(stream).tolist() == bits
    assert y.to_numpy(stream).tolist() == [bits[1]] * 2
    assert scalar.to_numpy(stream) == bits[0]
    assert device.ones(3, "bf16").to_numpy(stream).tolist() == bits[:1] * 3
    tied = device.array(np.float32([1 + 1 / 256, 1 + 3 / 256, np.nan]), "bf16").to_numpy(stream)
    assert tied.tolist() == [0x3F80, 0x3F82, 0x7FC0]  # to even
    assert device.array(np.uint16(bits), "bf16").to_numpy(stream).tolist() == bits
    x.set(np.uint16([5] * 4), stream)
    assert x.to_numpy(stream).tolist() == [5] * 4
    pair = device.full(2, (1, 1.0), [("a", "u16"), ("b", "bf16")]).to_numpy(stream)
    assert pair["a"].tolist() == [1, 1]
    assert pair["b"].tolist() == bits[:1] * 2
    adopted = device.adopt_array(Borrowed(device.zeros(2, "u16"), "<V2"))  # torch's
    ost.fill(stream, adopted, 1.0)
    assert adopted.to_numpy(stream).tolist() == bits[:1] * 2
    for plain in (x, y.view(dtype="bytes")):  # which NumPy saves without a warning
        assert plain.to_numpy(stream).dtype.metadata is None
    assert x.reshape(2, 2)[0].dtype is x.dtype
    for refused in (
        lambda: device.array([1, 2], "bf16"),  # the numbers, or their bits?
        lambda: device.full(2, 3.4e38, "bf16"),
        lambda: x.set(np.arange(4), stream),
        lambda: scalar.set(1, stream),
        lambda: ost.fill(stream, x, 1),
        lambda: ost.Slot("x", x, "input", "rows", poison=(0, 1)),
    ):
        with pytest.raises(InputError, match="bfloat16"):
            refused()


def test_a_bfloat16_argument_is_a_number(host_device: Device) -> None:
    """The launch took its bits, so that 1 was 9e-41."""
    seen, stream = list[int](), host_device.create_stream()

    @ost.host_kernel("a: bf16, b: *bf16")
    def note(launch, a, b):
        seen.append(a)
        assert b.dtype.metadata is None

    noted = host_device.kernel(note)
    x, shape = host_device.ones(2, "bf16"), ost.LaunchConfig(1, 1)
    for value in (1.0, np.uint16(0xC020), 0):
        ost.launch(stream, noted, shape, value, x)
    run = ost.capture_function(
        stream, lambda: ost.launch(stream, noted, shape, 1.0, x)
    ).instantiate()
    run.set(0, "a", -2.5)
    for put in (
        lambda: ost.launch(stream, noted, shape, 1, x),
        lambda: ost.launch(stream, noted, shape, 1e39, x),
        lambda: run.set(0, "a", 1),
        lambda: ost.prepare(noted, shape, np.int64(1), x),
    ):
        with pytest.raises(InputError, match=r"'a'.*bfloat16"):
            put()
    run.launch(stream)
    stream.synchronize()
    assert seen == [0x3F80, 0xC020, 0, 0xC020]


def test_words_of_signatures_mean_the_same_in_a_struct(device: Device) -> None:
    """In NumPy "f16" is a float of 128 bits."""
    assert device.empty(1, [("a", "f16"), ("b", "u32", (2,))]).nbytes == 10
    with pytest.raises(InputError, match="8 bits in signatures"):
        device.empty(1, [("a", [("b", "i8")])])


def test_what_is_no_dtype_names_those_that_are(device: Device) -> None:
    for word in ("float33", "f4x", "*f32", [("a",)], {"names": ["a"], "formats": []}, 3.5):
        with pytest.raises(InputError, match=r"u32.*float32"):
            device.empty(1, word)


def test_infinity_that_is_meant_is_kept(device: Device, stream: ost.Stream) -> None:
    x = ones(device)
    ost.fill(stream, x, float("-inf"))
    assert (x.to_numpy(stream) == -np.inf).all()
    scalar = ost.DeviceScalar(device, np.float32, initial=np.inf, stream=stream)
    assert scalar.to_numpy(stream) == np.inf
    with pytest.raises(InputError):
        ost.DeviceScalar(device, np.int32).set(np.inf, stream)


def test_memory_that_no_address_can_reach_is_an_error(device: Device) -> None:
    """A size of 1 << 80 bytes is 0 in 64 bits."""
    pool = device.pool()
    for empty in (device.empty, device.zeros, device.ones, device.pinned, pool.empty):
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
    x = device.zeros(2, dtype)
    x.set(values, stream)
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
    y.set(np.arange(N).astype(foreign), stream)
    assert np.array_equal(y.to_numpy(stream), np.arange(N))
    pool = device.pool()
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
    ost.copy(stream, x[: N // 2], x[N // 2 :])
    assert np.array_equal(x.to_numpy(stream)[: N // 2], np.arange(N // 2, N))


@WAYS
def test_a_copy_does_not_reshape(device: Device, stream: ost.Stream, way: str) -> None:
    """Rows and columns would change places without a word."""
    wanted, copy = np.arange(6, dtype=np.float32).reshape(2, 3), Copies(device, stream)
    x, other = device.zeros((2, 3), "f32"), device.array(wanted.reshape(3, 2))
    for to, source in ((x, other), (other, x), (x[1:].reshape(3, 1), x[0].reshape(1, 3))):
        if to.nbytes == x.nbytes:
            with pytest.raises(InputError, match="reshape"):
                copy(way, to, source)
        else:
            copy(way, to, source)
    for source in (other.reshape(2, 3), other.reshape(1, 2, 3), other.reshape(6)):
        copy(way, x, source)
    copy(way, x, other.view(dtype="bytes"))


def test_values_do_not_take_another_shape(device: Device, stream: ost.Stream) -> None:
    x, wanted = device.zeros((2, 3), np.float32), np.arange(6, dtype=np.float32).reshape(2, 3)
    with pytest.raises(InputError, match="reshape"):
        x.set(wanted.reshape(3, 2), stream)
    assert not x.to_numpy(stream).any()
    for values in (np.arange(6), wanted.reshape(1, 2, 3)):
        x.set(values, stream)
        assert np.array_equal(x.to_numpy(stream), wanted)
        ost.fill(stream, x, 0)


def test_a_buffer_is_no_value(device: Device, stream: ost.Stream) -> None:
    """Where the process reads the memory, its content would be taken before the work under way."""
    x, state = device.zeros(4, "f4"), ost.DeviceArray(device, 4, "f4")
    for given in (x[:], state):
        for take in (
            lambda given=given: x.set(given, stream),
            lambda given=given: state.set(given, stream),
            lambda given=given: device.array(given, "f4"),
            lambda given=given: device.array(given),
            lambda given=given: device.full(4, given, "f4"),
        ):
            with pytest.raises(InputError, match=r"ost\.copy"):
                take()


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
