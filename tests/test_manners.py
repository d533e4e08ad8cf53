"""What a user tries first: NumPy's and notebooks' manners, and words where something is wrong."""

from __future__ import annotations

import os
import re
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.errors import InputError, NoCudaError, NotAvailableError, Status, explain
from ostinato.graph.show.demangle import demangled
from ostinato.testing import HeldStream
from tests.processes import python
from tests.sources import config, kernel

ROOT = Path(__file__).resolve().parent.parent
VALUES = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables do not depend on the terminal that the tests run in."""
    monkeypatch.setenv("COLUMNS", "120")


# ---------------------------------------------------------------------------------------- arrays


def test_numpy_reads_memory_of_the_host_after_all_work(host_device: Device) -> None:
    x = host_device.array(VALUES)
    ost.fill(host_device.create_stream(), x[0], 7)
    assert np.asarray(x).tolist() == [[7, 7, 7], [3, 4, 5]]
    assert np.shares_memory(np.asarray(x), x.array)
    assert not np.shares_memory(np.array(x), x.array)
    assert np.asarray(x, np.int64).dtype == np.int64
    assert (np.asarray(x) + x).tolist() == [[14, 14, 14], [6, 8, 10]]


PAIR = np.dtype([("a", np.uint8), ("b", np.float64)])


@pytest.mark.parametrize("shape", [(), 0, 5, (3, 7), (3, 0), (90, 101)])
@pytest.mark.parametrize("dtype", ["u1", "bool", "u2", "f2", "i4", "f4", "int64", "f8", "c16"])
def test_filled_arrays_are_those_of_numpy(
    device: Device, stream: ost.Stream, shape: Any, dtype: str
) -> None:
    """Also of elements that no fill of a driver repeats, and of more than the host writes."""
    value = 1 if dtype == "bool" else 100
    for made, wanted in (
        (device.zeros(shape, dtype), np.zeros(shape, dtype)),
        (device.ones(shape, dtype), np.ones(shape, dtype)),
        (device.full(shape, value, dtype, name="x"), np.full(shape, value, dtype)),
    ):
        got = made.to_numpy(stream)
        assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
        assert np.array_equal(got, wanted)


def test_full_takes_one_value(device: Device, stream: ost.Stream) -> None:
    got = device.full((2, 3), (7, 0.1), PAIR).to_numpy(stream)
    assert np.array_equal(got, np.full((2, 3), np.array((7, 0.1), PAIR)))
    assert device.full(2, np.float32(0.5), "f4").to_numpy(stream).tolist() == [0.5, 0.5]
    for value in ([1, 2], np.ones((2, 1)), None, "1", (1, 2)):
        with pytest.raises(InputError):
            device.full(2, value, "f4")
    with pytest.raises(InputError, match="structs"):
        device.ones(2, PAIR)


def test_arrays_are_not_made_in_a_capture(device: Device, stream: ost.Stream) -> None:
    made = (device.zeros, device.ones, lambda n, dtype: device.full(n, 0.1, dtype))
    for make in made:
        with pytest.raises(ost.OstinatoError, match="before the capture"), ost.capture(stream):
            make(4, "f8")
    assert device.full(4, 0.1, "f8").to_numpy(stream).tolist() == [0.1] * 4


def test_a_reshaped_buffer_is_the_same_memory(device: Device, stream: ost.Stream) -> None:
    x = device.array(VALUES)
    for shape in ((6,), (3, 2), (1, 2, 1, 3), (-1,), (3, -1), (-1, 2, 3), ((2, 3),), ([-1, 1],)):
        y = x.reshape(*shape)
        assert y.shape == VALUES.reshape(*shape).shape
        assert (y.address, y.dtype, y.storage) == (x.address, x.dtype, x)
        assert np.array_equal(y.to_numpy(stream), VALUES.reshape(*shape))
    ost.fill(stream, x[1:].reshape(3)[1:], 9)
    assert x.to_numpy(stream).tolist() == [[0, 1, 2], [3, 9, 9]]
    assert device.array(1.0, "f4").reshape(1, 1).shape == (1, 1)
    assert device.zeros((0, 4), "f4").reshape(-1, 2).shape == (0, 2)
    for shape in ((4,), (2, 2), (-1, 4), (-1, -1), (-2, 3), (2.0, 3), (), ("6",), (None,), (0, -1)):
        with pytest.raises(InputError):
            x.reshape(*shape)
    with pytest.raises(InputError):
        device.zeros((0, 4), "f4").reshape(0, -1)  # any size would do
    del x
    y.close()
    with pytest.raises(ost.errors.ClosedError):
        y.reshape(6)


def test_a_view_of_numpy_is_told_how_it_is_written(device: Device) -> None:
    x = device.array(VALUES)
    for given in ("i4", np.int32, np.dtype("i4")):
        with pytest.raises(InputError, match=r"view\(dtype=…\)"):
            x.view(given)
    with pytest.raises(InputError, match=r"view\(shape=\(3, 2\)\)"):
        x.view((3, 2))


def test_rows_are_iterated(device: Device, stream: ost.Stream) -> None:
    x = device.array(VALUES)
    assert [row.to_numpy(stream).tolist() for row in x] == VALUES.tolist()
    with pytest.raises(InputError):
        iter(device.array(1.0))


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int32, np.uint64])
def test_whole_numbers_of_numpy_are_whole_numbers(
    device: Device, stream: ost.Stream, kind: type
) -> None:
    x, out = device.array(np.arange(600, dtype=np.float32).reshape(3, 200)), device.zeros(4, "f4")
    assert x[kind(2)].to_numpy(stream)[0] == 400
    view = x.view(kind(8), kind(4))
    run = ost.capture_function(
        stream,
        lambda: ost.launch(
            *(stream, kernel(device, "add")),
            *(ost.LaunchConfig(kind(1), (kind(4), 1), kind(0)), view, view, out, 4),
        ),
    ).instantiate()
    run.set(kind(0), "n", 3)
    assert run.params(kind(0)) == run.nodes()[0].params
    assert run.graph.node(kind(0)).name == "add"
    run.launch(stream)
    assert out.to_numpy(stream).tolist() == [4, 6, 8, 0]
    device.empty((kind(2), kind(3)), "bytes")


def test_what_is_no_whole_number_is_named(device: Device, stream: ost.Stream) -> None:
    x = device.array(VALUES)
    graph = ost.capture_function(
        stream, lambda: ost.launch(stream, kernel(device, "scale"), config(6), x, 6)
    )
    run = graph.instantiate()
    for call in (
        lambda: x[1.0],
        lambda: x[True],
        lambda: x[0, 1],
        lambda: x[None],
        lambda: x.view(1.5),
        lambda: device.empty(2.5, "f32"),
        lambda: device.empty(None, "f32"),
        lambda: device.empty(2, None),
        lambda: ost.LaunchConfig(1.5, 32),
        lambda: ost.LaunchConfig(None, 32),
        lambda: ost.LaunchConfig(1, 32, shared=1.5),
        lambda: run.params("0"),
        lambda: run.set(1.5, 0, 1),
        lambda: run.set(0, None, 1),
        lambda: run.set(0, 1.0, 1),
        lambda: graph.node("0"),
        lambda: graph.condition(1.5),
        lambda: graph.add_conditional("If", graph.condition()),
        lambda: graph.add_alloc(1.5),
        lambda: graph.add_call(3),
        lambda: stream.call(None),
        lambda: ost.GraphCache(device, max_graphs=1.5),
        lambda: ost.GraphCache(device).install("key", run, nbytes=1.5),
    ):
        with pytest.raises(InputError):
            call()


def test_strides_that_say_nothing_are_not_looked_at(host_device: Device) -> None:
    class Array:
        def __init__(self, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
            self.__cuda_array_interface__ = {
                "shape": shape,
                "strides": strides,
                "typestr": "<f4",
                "data": (4096, False),
                "version": 3,
            }

    for shape, strides in (((1, 5), (4, 4)), ((5, 1), (4, 4000)), ((0, 5), (7, 9)), ((1,), (0,))):
        assert host_device.adopt_array(Array(shape, strides)).shape == shape
    for shape, strides in (((2, 5), (4, 4)), ((5, 2), (4, 20)), ((3,), (-4,)), ((2,), (0,))):
        with pytest.raises(InputError, match="strided"):
            host_device.adopt_array(Array(shape, strides))


def test_dlpack_without_a_copy(device: Device, stream: ost.Stream) -> None:
    x = device.array(VALUES)
    ost.fill(stream, x[1], 9)
    if device.capabilities.host_memory_is_device_memory:
        there = np.from_dlpack(x)
        assert x.__dlpack_device__() == (1, 0)
        there[0, 0] = 5
    else:
        torch = pytest.importorskip("torch")
        there = torch.from_dlpack(x)
        assert x.__dlpack_device__() == (2, 0)
        assert (there.data_ptr(), tuple(there.shape)) == (x.address, x.shape)
        there[0, 0] = 5
        torch.cuda.synchronize()
    assert x.to_numpy(stream).tolist() == [[5, 1, 2], [9, 9, 9]]


def test_dlpack_keeps_the_memory(device: Device) -> None:
    if device.capabilities.host_memory_is_device_memory:
        there = np.from_dlpack(device.array(VALUES))
    else:
        there = pytest.importorskip("torch").from_dlpack(device.array(VALUES))
    others = [device.array(np.full((2, 3), 8, np.float32)) for _ in range(8)]
    assert there.tolist() == VALUES.tolist()
    assert len(others) == 8


def test_the_host_device_adopts_arrays_of_the_cpu(host_device: Device) -> None:
    """Parts of one array in any order: kernels see the whole, as long as one of them is there."""
    stream = host_device.create_stream()
    values = np.arange(12, dtype=np.float32)
    free = host_device.memory_info()[0]
    middle = host_device.adopt_array(values[4:8])
    assert host_device.adopt_array(middle) is middle
    ost.fill(stream, middle, 7)
    first, last = (host_device.adopt_array(values[p]) for p in (slice(6), slice(6, 12)))
    whole = host_device.adopt_array(values.reshape(3, 4))
    assert (whole.shape, whole.dtype, whole.address) == ((3, 4), values.dtype, values.ctypes.data)
    ost.fill(stream, whole[2], 5)
    ost.copy(stream, first[:2], last[4:])
    stream.synchronize()
    assert values.tolist() == [5, 5, 2, 3, 7, 7, 7, 7, 5, 5, 5, 5]
    assert host_device.memory_info()[0] == free  # not the device's
    del whole, first, last
    host_device.context.collect()
    ost.fill(stream, middle, 1)
    stream.synchronize()
    assert values[4:8].tolist() == [1, 1, 1, 1]
    assert host_device.adopt_array(np.empty((0, 3))).shape == (0, 3)


def test_adopted_memory_is_kept_until_work_with_it_is_done(host_device: Device) -> None:
    stream = host_device.create_stream()
    values = np.zeros(1 << 16, np.uint8)
    gone = weakref.ref(values)
    with HeldStream(stream) as held:
        buffer = host_device.adopt_array(values)
        ost.fill(stream, buffer, 1)
        del buffer, values
        assert gone() is not None
        held.release()
    stream.synchronize()
    host_device.context.collect()
    assert gone() is None


def test_a_step_over_arrays_of_the_cpu(host_device: Device) -> None:
    @ost.kernel("x: *const f32, out: *f32, n: u32", "not compiled here")
    def add_to(launch: object, x: Any, out: Any, n: int) -> None:
        out[:n] += x[:n]

    stream, loaded = host_device.create_stream(), host_device.kernel(add_to)
    x, out = np.ones(4, np.float32), np.zeros(4, np.float32)
    given, taken = map(host_device.adopt_array, (x, out))
    step = ost.GraphedStep(
        lambda s, _: ost.launch(s, loaded, ost.LaunchConfig(1, 1), given, taken, 4),
        stream=stream,
        cache=ost.GraphCache(host_device),
        slots=[ost.Slot("x", given, "input"), ost.Slot("out", taken, "state")],
        verify="first",
        strict=True,
    )
    for _ in range(3):
        step()
        stream.synchronize()
        x += 1
    assert out.tolist() == [1 + 2 + 3] * 4


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: np.zeros((4, 4), np.float32)[:, 1:], "strided arrays cannot be adopted; copy"),
        (lambda: np.frombuffer(b"12345678"), "cannot be adopted: .*readonly"),
        (lambda: np.zeros(3, "M8[s]"), "cannot be adopted: "),
        (lambda: [1.0, 2.0], "list has neither"),
    ],
    ids=["strided", "read-only", "dates", "list"],
)
def test_an_array_that_cannot_be_adopted_says_why(
    host_device: Device, make: Callable[[], Any], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        host_device.adopt_array(make())


@pytest.mark.gpu
def test_a_gpu_does_not_adopt_arrays_of_the_cpu(cuda_device: Device) -> None:
    with pytest.raises(InputError, match=r"ndarray is in memory of the CPU.*device.array"):
        cuda_device.adopt_array(np.zeros(4))


def test_pinned_memory_is_the_hosts(device: Device) -> None:
    pinned = device.pinned(4, np.int32)
    pinned.array[:] = 3
    assert np.from_dlpack(pinned).tolist() == np.asarray(pinned).tolist() == [3, 3, 3, 3]


@pytest.mark.gpu
def test_numpy_cannot_read_memory_of_a_gpu(cuda_device: Device) -> None:
    with pytest.raises(NotAvailableError, match="to_numpy"):
        np.asarray(cuda_device.zeros(4, "bytes"))
    cupy = pytest.importorskip("cupy")
    x = cuda_device.array(VALUES)
    assert cupy.from_dlpack(x).data.ptr == x.address


# ------------------------------------------------------------------------------------- devices


def test_cpu_is_the_host() -> None:
    with ost.open_device("cpu") as device:
        assert device.name == "host"


def test_a_number_is_a_gpu() -> None:
    try:
        with ost.open_device(0) as device:
            assert device.name == "cuda:0"
    except NoCudaError:
        with pytest.raises(NoCudaError):
            ost.open_device("cuda:0")


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "cuda:", "host:0", "cpu:1", True, 2.5, -1])
def test_what_is_no_device_names_those_that_are(name: object) -> None:
    with pytest.raises(InputError, match=f'{re.escape(repr(name))}.*"host"'):
        ost.open_device(name)


def test_all_that_is_made_on_a_device_takes_it(device: Device, stream: ost.Stream) -> None:
    pool, graph = device.pool(), ost.Graph.create(device)
    cache, scalar = ost.GraphCache(device), ost.DeviceScalar(device, np.int32)
    scalar.set(3, stream)
    assert scalar.to_numpy(stream) == 3
    assert {one.context for one in (pool, graph, cache)} == {device.context}
    for make in (ost.Graph.create, ost.GraphCache):
        with pytest.raises(InputError, match=r"[Dd]evice"):
            make("host")


# ------------------------------------------------------------------------------------ launches


@pytest.mark.usefixtures("launcher")
def test_what_has_a_handle_is_not_taken_for_a_stream_or_an_event(
    device: Device, stream: ost.Stream
) -> None:
    """A GPU's driver follows any handle."""
    x, event = device.zeros(4, np.float32), stream.record()
    graph = ost.capture_function(stream, lambda: ost.fill(stream, x, 1))
    run = graph.instantiate()
    scale = kernel(device, "scale")
    for other in (event, graph, run, device, x):
        with pytest.raises(InputError, match="stream must be a Stream"):
            ost.launch(other, scale, config(4), x, 4)
        with pytest.raises(InputError, match="a Stream is needed"):
            run.launch(other)
    for other in (stream, graph, run, 5):
        for use in (stream.wait, stream.record, graph.add_event_wait, graph.add_event_record):
            with pytest.raises(InputError, match="an Event is needed"):
                use(other)
    with pytest.raises(InputError, match="priority"):
        ost.LaunchConfig(1, 1, priority=1.5)


def test_a_launch_takes_its_stream_by_name(device: Device, stream: ost.Stream) -> None:
    x = device.zeros(4, np.float32)
    run = ost.capture_function(stream, lambda: ost.fill(stream, x, 5)).instantiate()
    for _ in range(3):
        run.launch(stream=stream)
    assert (x.to_numpy(stream) == 5).all()
    with pytest.raises(InputError, match="a Stream is needed, not int"):
        run.launch(5)
    for wrong in (run.launch, lambda: run.launch(stream, stream), lambda: run.launch(on=stream)):
        with pytest.raises(TypeError):
            wrong()


# --------------------------------------------------------------------------------------- words


def test_buffers_have_their_names_in_tables(device: Device, stream: ost.Stream) -> None:
    x = device.array(VALUES, name="x")
    y, plain = device.zeros((2, 3), np.float32, name="y <of it>"), device.empty((2, 3), np.float32)
    with ost.capture(stream) as capture:
        ost.launch(stream, kernel(device, "scale"), config(3), x[1], 3)
        ost.copy(stream, y, x)
        ost.copy(stream, plain, x)
    text = str(capture.graph)
    assert "[x+12]" in text
    assert "y <of it> ← x" in text
    assert f"{plain.address:#x} ← x" in text
    assert "'x'" in repr(x)
    for picture in (capture.graph.to_svg(), capture.graph._repr_html_()):
        assert "y &lt;of it&gt; ← x" in picture
    assert capture.graph._repr_svg_() == capture.graph.to_svg()


def test_a_table_is_as_wide_as_the_terminal(
    device: Device, stream: ost.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = device.zeros(4, np.float32)
    with ost.capture(stream) as capture:
        for _ in range(2):
            ost.launch(stream, kernel(device, "axpy"), config(3), x, x, x, 3)
    for columns in (80, 200):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert max(map(len, str(capture.graph).splitlines())) <= columns
    wide = str(capture.graph)
    monkeypatch.setenv("COLUMNS", "80")
    assert len(str(capture.graph).splitlines()) > len(wide.splitlines()), "arguments are folded"


def test_reports_are_sentences(device: Device, stream: ost.Stream) -> None:
    x, y = device.zeros(4, np.float32), device.zeros(4, np.float32)
    with ost.capture(stream) as capture:
        ost.launch(stream, kernel(device, "scale"), config(4), x, 4)
        ost.launch(stream, kernel(device, "scale"), config(4), x, 4)
    run = capture.graph.instantiate()
    assert str(run.rebind({x: y})) == "2 pointers of 2 nodes rebound"
    assert str(run.update(capture.graph)) == "2 nodes updated"


@pytest.mark.parametrize(
    ("name", "readable"),
    [
        ("scale", "scale"),
        ("_Z5scaleIfEvPT_j", "scale<float>"),
        ("_Z3fooPfj", "foo"),
        ("_ZN12_GLOBAL__N_13barEi", "(anonymous namespace)::bar"),
        ("_Znonsense", "_Znonsense"),
        ("_Z", "_Z"),
    ],
)
def test_kernels_have_the_names_that_they_were_given(name: str, readable: str) -> None:
    assert demangled(name) in (readable, name)
    if demangled("_Z3fooPfj") == "foo":  # there is a C++ runtime library
        assert demangled(name) == readable


def test_two_kernels_of_one_readable_name_are_two(host_device: Device) -> None:
    """A diff tells foo(float*) from foo(int*)."""
    names = ("_Z3fooPf", "_Z3fooPi")
    kernels = [ost.host_kernel("x: *f32", name=name)(lambda launch, x: None) for name in names]
    source, stream = ost.Source(host=kernels), host_device.create_stream()
    loaded = [host_device.modules.get_or_compile(source, name) for name in names]
    x = host_device.zeros(4, np.float32)
    graphs = [
        ost.capture_function(stream, lambda one=one: ost.launch(stream, one, config(1), x))
        for one in loaded
    ]
    assert graphs[0].diff(graphs[1])
    assert [graph.nodes()[0].name for graph in graphs] == list(names)


# --------------------------------------------------------------------------------- a fresh start


def test_every_status_has_words_of_its_own() -> None:
    unknown = explain(123456)
    for status in set(Status) - {Status.SUCCESS}:
        assert explain(status) != unknown, status.name


@pytest.mark.slow
def test_a_users_mypy_takes_the_readme_and_the_examples(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", readme, flags=re.S)
    (tmp_path / "readme.py").write_text("\n".join(blocks), encoding="utf-8")
    for example in (ROOT / "examples").glob("*.py"):
        (tmp_path / example.name).write_text(example.read_text("utf-8"), encoding="utf-8")
    files = sorted(path.name for path in tmp_path.glob("*.py"))
    path = os.pathsep.join(p for p in sys.path if p and Path(p) != ROOT)  # as if installed
    done = python("-m", "mypy", "--config-file=", *files, cwd=tmp_path, PYTHONPATH=path)
    assert done.returncode == 0, done.stdout + done.stderr
