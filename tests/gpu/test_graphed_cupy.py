"""`interop.cupy.graphed` on a GPU."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.interop.reading import records
from tests.gpu.foreign import library, making
from tests.interop.cupy_programs import same

cupy = library("cupy")

pytestmark = pytest.mark.gpu

Make = Callable[..., Any]


@pytest.fixture
def make(cuda_device: Device) -> Iterator[Make]:
    from ostinato.interop.cupy import graphed

    with making(graphed, cuda_device) as build:
        yield build


@pytest.fixture
def waiting(make: Make, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes functions whose chains are kept, however long they take."""
    monkeypatch.setattr(records, "_GAIN", float("inf"))
    return make


def randn(*shape: int) -> Any:
    rng = np.random.default_rng(sum(shape))
    return cupy.asarray(rng.standard_normal(shape, np.float32))


@pytest.mark.parametrize("writes", [True, False])
def test_a_function_is_replayed(make: Make, writes: bool) -> None:
    def f(x: Any, w: Any) -> Any:
        y = cupy.maximum(x[:, :1] * w[:1] + x[:, 1:2], 0)
        return (y - y.max(axis=1, keepdims=True)) * 2, {"sum": y.sum(axis=0)}

    step = make(f, writes=writes)
    kept = []
    for number in range(6):
        x, w = randn(8, 16) + number, randn(16, 32)
        found, wanted = step(x, w), f(x, w)
        assert same(found[0], wanted[0]) and same(found[1]["sum"], wanted[1]["sum"]), number
        kept.append((found[0], wanted[0]))
    assert all(same(one, other) for one, other in kept)
    (line,) = step.statistics().keys
    assert (line.eager, line.captures, line.replays) == (1, 1, 5), step.explain()


def test_shapes_types_and_numbers_are_keys(make: Make) -> None:
    f = lambda x, by: x * by + 1  # noqa: E731
    step = make(f)
    for _ in range(3):
        for x in (randn(4), randn(8), randn(4).astype(np.float16), randn(4, 4).T):
            for by in (2.0, 3.0):
                assert same(step(x, by), f(x, by))
    assert [line.replays for line in step.statistics().keys] == [2] * 8, step.explain()


def test_an_input_is_changed_in_place(make: Make) -> None:
    def f(x: Any, y: Any) -> Any:
        x += y
        return x.sum()

    step = make(f)
    x, y = cupy.zeros(64, np.float32), cupy.zeros(64, np.float32)
    for number in range(6):
        y.fill(number // 3)
        assert float(step(x, y)) == 64 * max(0, number - 2)
        assert float(x[0]) == max(0, number - 2)


def test_static_arrays_are_bound_anew(make: Make) -> None:
    def decode(x: Any, cache: Any) -> Any:
        cache += x
        return cache * 2

    step = make(decode, static=("cache",))
    for _ in range(3):
        cache, mirror = cupy.zeros(64, np.float32), cupy.zeros(64, np.float32)
        for number in range(4):
            x = randn(64) * number
            assert same(step(x, cache), decode(x, mirror)) and same(cache, mirror)
    statistics = step.statistics()
    assert (statistics.captures, statistics.rebound) == (1, 2), statistics.capture_reasons


def test_dynamic_sizes(make: Make) -> None:
    f = lambda tokens: cupy.maximum(tokens, 0) * 2  # noqa: E731
    step = make(f, dynamic={"tokens": 0}, buckets=ost.PowersOfTwo(32), verify="first")
    for n in (5, 6, 8, 7, 5, 3, 4, 3):
        x = randn(n, 16)
        assert same(step(x), f(x))
    statistics = step.statistics()
    assert statistics.replays >= 3 and not statistics.quarantined, step.explain()


def test_temporaries_are_the_graphs_own(make: Make) -> None:
    """Between replays CuPy gives out whatever is free in its own pools."""

    def f(x: Any) -> Any:
        for number in range(8):
            x = cupy.sqrt(x * x + number) * x[::-1]
        return x

    step = make(f, writes=False)
    x = randn(32, 32) / 100
    wanted = f(x)
    for _ in range(6):
        found = step(x)
        junk = [cupy.full((32, 32), np.nan, np.float32) for _ in range(16)]
        assert same(found, wanted)
        del junk
    assert step.statistics().replays == 5, step.explain()


def test_streams(make: Make) -> None:
    w = randn(256, 256)
    f = lambda x: cupy.maximum(x * w, 0) + w.T  # noqa: E731
    step = make(f, writes=False)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
    cupy.cuda.Device().synchronize()
    pairs = []
    for number in range(24):
        with streams[number % 3]:
            x = cupy.full((256, 256), number + 1, np.float32)
            pairs.append((step(x), f(x)))
    cupy.cuda.Device().synchronize()
    assert all(same(one, other) for one, other in pairs)


@pytest.mark.parametrize("last", [False, True])
def test_memory_that_a_helper_alone_owns_lives_as_long_as_the_graph(make: Make, last: bool) -> None:
    """`last`: the capture is the last that uses the helper's table."""

    @functools.lru_cache(maxsize=1)
    def table(size: int) -> Any:
        return cupy.full(size, 3, np.float32)

    def read(x: Any) -> Any:
        out = x + table(x.size)
        stream = cupy.cuda.get_current_stream()
        if last and stream.ptr and stream.is_capturing():
            table.cache_clear()
        return out

    table(48)
    step = make(lambda x: read(x))
    x = cupy.ones(48, np.float32)
    for _ in range(2):
        assert same(step(x), x + 3)
    table(16)
    others = [cupy.full(48, 777, np.float32) for _ in range(256)]
    for _ in range(3):
        assert same(step(x), x + 3)
    assert step.statistics().replays == 4, step.explain()
    assert len(others) == 256


@pytest.mark.parametrize("how", ["cupy.dot(y, y, into)", "cupy.matmul(y, y, out=into)"])
def test_a_product_that_writes_an_array_runs_eagerly(waiting: Make, how: str) -> None:
    space = {"cupy": cupy, "into": cupy.ones((4, 4), np.float32)}
    exec(f"def f(x):\n    y = x + into\n    {how}\n    return y * float(y.sum())", space)
    mirror = {"cupy": cupy, "into": cupy.ones((4, 4), np.float32)}
    exec(f"def f(x):\n    y = x + into\n    {how}\n    return y * float(y.sum())", mirror)
    step = waiting(space["f"])
    for number in range(12):
        x = cupy.full((4, 4), 0.125 * (number % 3), np.float32)
        space["into"] /= 64
        mirror["into"] /= 64
        assert same(step(x), mirror["f"](x)) and same(space["into"], mirror["into"]), number
    assert step.statistics().replays == 0, step.explain()


def test_a_stream_that_has_waited_is_in_the_graph(waiting: Make) -> None:
    other = cupy.cuda.Stream(non_blocking=True)

    def f(x: Any) -> Any:
        here = cupy.cuda.get_current_stream()
        y = x * 2
        other.wait_event(here.record())
        with other:
            z = y + 1
        here.wait_event(other.record())
        return z * 3

    step = waiting(f, guard=False)
    for number in range(9):
        x = cupy.full(4, number, np.float32)
        assert same(step(x), x * 6 + 3), number
    assert step.statistics().replays == 8, step.explain()


def test_memory_that_the_host_reads(waiting: Make) -> None:
    import ctypes

    with cupy.cuda.using_allocator(cupy.cuda.malloc_managed):
        shared = cupy.zeros(4, np.float32)
    host = np.frombuffer((ctypes.c_float * 4).from_address(shared.data.ptr), np.float32)

    def f(x: Any) -> Any:
        nonlocal shared
        shared += x
        cupy.cuda.get_current_stream().synchronize()
        return x * float(host[0])

    step, total = waiting(f), 0.0
    for number in range(9):
        x = cupy.full(4, number, np.float32)
        total += number
        assert same(step(x), x * np.float32(total))


def test_wrong_copies_from_the_host_raise_as_eager(waiting: Make) -> None:
    for line in ("y.set(held[:2])", "y.set(held.astype(int))", "y[0:2] = held[:2]", "y[[0.5]] = 1"):
        space = {"cupy": cupy, "held": np.arange(4, dtype=np.float32)}
        exec(f"def f(x):\n    y = x[[0, 1, 2, 3]]\n    {line}\n    return y", space)
        step = waiting(space["f"])
        for _ in range(6):
            with pytest.raises(Exception) as wanted:
                space["f"](randn(16))
            with pytest.raises(wanted.type) as found:
                step(randn(16))
            assert str(found.value) == str(wanted.value)


@pytest.mark.parametrize(
    "line",
    [
        *("ndimage.median_filter(x, size=3)", "ndimage.gaussian_filter1d(x, 1.5)"),
        *("ndimage.zoom(x, 2.0)", "cupy.percentile(x, [25, 75])", "cupy.histogram(x, bins=4)[0]"),
        *("cupy.interp(x, cupy.arange(4.0), cupy.asarray([0.0, 2.0, 1.0, 3.0]))", "cupy.pad(x, 2)"),
        *("signal.convolve(x, cupy.asarray([0.5, 1.0, 0.5]), method='direct')", "cupy.median(x)"),
        "cupy.apply_along_axis(cupy.sum, 0, x)",
        *("cupy.where(x > 0)[0] + 1", "cupy.concatenate([x, x[:3]] * 5)", "cupy.linalg.norm(x)"),
        *("cupy.gradient(x)", "cupy.roll(x, 3)", "cupy.searchsorted(cupy.sort(x), x)"),
        *(
            "cupy.poly1d([1, 2, 3])(x)",
            "cupy.bincount(abs(x).astype(int))",
        ),
    ],
)
def test_functions_of_cupy(waiting: Make, line: str) -> None:
    """The first two are cupy#9489 and #9513: they cannot be captured by CuPy itself."""
    ndimage = pytest.importorskip("cupyx.scipy.ndimage")
    space = {"cupy": cupy, "ndimage": ndimage, "signal": pytest.importorskip("cupyx.scipy.signal")}
    exec(f"def f(x):\n    return {line}", space)
    step = waiting(space["f"])
    for number in range(9):
        x = randn(16) + 0.25 * (number > 6)
        assert same(step(x), space["f"](x)), number


def test_random_numbers_of_curand_run_eagerly(make: Make) -> None:
    step = make(lambda x: x + cupy.random.rand(64, dtype=np.float32))
    x = cupy.zeros(64, np.float32)
    found = [step(x) for _ in range(5)]
    assert not any(same(one, other) for one, other in itertools.pairwise(found))
    assert step.statistics().replays == 0, step.explain()


def test_a_capture_that_fails_leaves_no_error_of_curand(make: Make) -> None:
    """cuRAND raises an error that is pending in its own CUDA runtime in its next call."""
    f = lambda x: cupy.random.RandomState(3).rand(4) + x[0]  # noqa: E731
    step = make(f)
    for number in range(9):
        x = randn(16) + number
        assert same(step(x), f(x)), number


@pytest.mark.parametrize("size", [1000, 4099])
def test_a_plan_of_cufft_lives_as_long_as_a_graph_that_uses_it(make: Make, size: int) -> None:
    """CuPy keeps the last 16 plans, and the end of one takes what its kernels use."""
    f = lambda x: cupy.abs(cupy.fft.fft(x)) * 2  # noqa: E731
    step = make(f)
    for number in range(8):
        if number == 4:
            cupy.cuda.Device().synchronize()
            cupy.fft.config.get_plan_cache().clear()
            for other in range(16):
                f(randn(8, 100 + 16 * other))
        x = randn(64, size) + number
        found = step(x)
        assert same(found, f(x))
    assert step.statistics().replays == 7, step.explain()
