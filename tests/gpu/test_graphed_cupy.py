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
from ostinato.errors import ClosedError, EagerRunError
from tests.gpu.foreign import library, making

cupy = library("cupy")

pytestmark = pytest.mark.gpu

Make = Callable[..., Any]


@pytest.fixture
def make(cuda_device: Device) -> Iterator[Make]:
    from ostinato.interop.cupy import graphed

    with making(graphed, cuda_device) as build:
        yield build


def randn(*shape: int) -> Any:
    rng = np.random.default_rng(sum(shape))
    return cupy.asarray(rng.standard_normal(shape, np.float32))


def same(one: Any, other: Any) -> bool:
    return bool(one.dtype == other.dtype and one.get().tobytes() == other.get().tobytes())


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


def test_a_number_of_the_closure_changes(make: Make) -> None:
    by = 2.0
    step = make(lambda x: x * by)
    x = randn(8)
    for by in (2.0, 2.0, 2.0, 3.0, 3.0, 3.0, 2.0):
        assert same(step(x), x * by)


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


def test_products_run_eagerly(make: Make) -> None:
    """CuPy refuses cuBLAS in a capture, and says so."""
    step = make(lambda x: x @ x)
    x = randn(8, 8)
    for _ in range(3):
        assert same(step(x), x @ x)
    assert "cuBLAS" in str(step.explain()) and step.statistics().replays == 0


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


@pytest.mark.parametrize("line", ["float(x.max())", "x[x > 0].sum()"])
def test_what_waits_for_the_gpu_runs_eagerly(make: Make, line: str) -> None:
    space: dict[str, Any] = {}
    exec(f"def f(x):\n    return x * {line}", space)
    f = space["f"]
    step = make(f)
    for _ in range(3):
        x = randn(16)
        assert same(step(x), f(x))
    statistics = step.statistics()
    assert statistics.replays == 0 and "cannot be captured" in step.explain(), step.explain()
    strict = make(f, strict=True)
    strict(randn(16))
    with pytest.raises(EagerRunError):
        strict(randn(16))


def test_random_numbers_of_curand_run_eagerly(make: Make) -> None:
    step = make(lambda x: x + cupy.random.rand(64, dtype=np.float32))
    x = cupy.zeros(64, np.float32)
    found = [step(x) for _ in range(5)]
    assert not any(same(one, other) for one, other in itertools.pairwise(found))
    assert step.statistics().replays == 0, step.explain()


def test_closed(make: Make) -> None:
    step = make(lambda x: x * 2)
    step.close()
    with pytest.raises(ClosedError):
        step(randn(2))


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
