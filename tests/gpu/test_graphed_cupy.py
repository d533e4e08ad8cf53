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
from ostinato.errors import ClosedError
from ostinato.interop.reading import records
from tests.gpu.foreign import library, making
from tests.interop import cupy_programs

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


def equal(one: Any, other: Any) -> bool:
    """True if two results are the same bit by bit."""
    if isinstance(one, cupy.ndarray):
        return one.shape == other.shape and same(one, other)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(equal, one, other))
    return type(one) is type(other) and np.asarray(one).tobytes() == np.asarray(other).tobytes()


@pytest.mark.parametrize(
    "line",
    [
        *("x * float(x.sum())", "x[: 1 + int(x.max())] * 2", "x * x.max().item()"),
        *("x + 1 if (x > -1).all() else x - 1", "x * sum((x > 0).tolist())"),
        *("x * len(cupy.asnumpy(x))", "x * float(x.reshape(4, 4).T.get(order='F')[0, 1])"),
        *("x[x > 0] * 2", "x * x[x > 0].sum()", "x.reshape(4, 4)[x.reshape(4, 4) > 0] + 1"),
        *("cupy.nonzero(x > 0)[0] + 1", "cupy.argwhere(x > 0)", "cupy.unique(cupy.rint(x)) * 2"),
        *("cupy.bincount(cupy.rint(abs(x)).astype(int))", "x * 2, float((x + 1).sum())"),
        *("x * bool(cupy.array_equal(x, x + 0))", "(x * 2, (x + 1).get(), x.max().item())"),
        *("x.reshape(4, 4) @ x.reshape(4, 4) * 2", "cupy.einsum('i,j->ij', x, x + 1).sum(axis=0)"),
        *("x * len(x[x > 99].tolist()) + x[x > 99].get().size", "x * str(x[:1] > 0).count('T')"),
        *("x.dot(x + 1) * x", "cupy.linalg.solve(diagonal(x), x[:4]) + 1"),
        *("cupy.linalg.inv(diagonal(x)) * 2", "cupy.linalg.cholesky(diagonal(abs(x))) + 1"),
    ],
)
def test_what_waits_is_a_chain(waiting: Make, line: str) -> None:
    diagonal = lambda x: x.reshape(4, 4) * 0 + cupy.eye(4, dtype=np.float32) * (x[:4] + 9)  # noqa: E731
    space: dict[str, Any] = {"cupy": cupy, "diagonal": diagonal}
    exec(f"def f(x):\n    return {line}", space)
    f = space["f"]
    step = waiting(f)
    for number in range(18):
        x = randn(16) + (number > 12) * number % 2
        assert equal(step(x), f(x)), number
    assert step.statistics().replays >= 4, step.explain()


def test_values_that_are_only_returned_are_fresh(waiting: Make) -> None:
    step = waiting(lambda x: (x * 2, float(x.sum()), x.max().item(), cupy.asnumpy(x)))
    for number in range(12):
        x = cupy.full(4, number, np.float32)
        _, total, most, held = step(x)
        assert (total, most, held[3]) == (4.0 * number, number, number)
    (line,) = [line for line in step.statistics().keys if "waits at" in line.words]
    assert (line.captures, line.replays) == (1, 5), step.explain()


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


@pytest.mark.parametrize("seed", range(12))
def test_random_functions_that_wait(waiting: Make, seed: int) -> None:
    options = [{}, {"verify": "first"}, {"verify": 3}, {"results": "static"}][seed % 4]
    cupy_programs.check(cupy, lambda f: waiting(f, **options), seed, 20)


def test_numbers_are_compared_bit_by_bit_in_one_launch(waiting: Make) -> None:
    def f(x: Any) -> Any:
        y = x * 2
        for place in range(4):
            y = y + (1 if float(x[place]) > 0.5 else 2)
        return y, float(y.sum())

    step = waiting(f)
    for number in range(60):
        x = cupy.ones(8, np.float32)
        x[1] = (1.0, 0.0, -0.0, np.nan)[(number > 11) * number // 2 % 4]
        assert equal(step(x), f(x)), number
    assert "1 graph, waits" in step.explain() and step.statistics().replays >= 8, step.explain()


@pytest.mark.parametrize(
    "how",
    [
        "cupy.cuda.get_current_stream().synchronize()",
        "cupy.cuda.Device().synchronize()",
        "cupy.cuda.runtime.deviceSynchronize()",
        "cupy.cuda.Stream.null.synchronize()",
        "event.synchronize()",
    ],
)
def test_a_synchronisation_is_repeated_with_the_effects_of_the_call_once(
    waiting: Make, how: str
) -> None:
    """The caller may rely on it for work on other streams."""
    event = cupy.cuda.Event()
    event.record()
    space = {"cupy": cupy, "count": cupy.zeros(4, np.float32), "event": event}

    def work(x: Any) -> Any:
        y = x * float(x.sum())
        for _ in range(50):
            y = y * 0.5 + 1
        return y

    space["work"] = work
    exec(
        f"def f(x):\n    global count\n    count += 1\n    {how}\n    y = work(x)\n"
        f"    count += 1\n    {how}\n    return y",
        space,
    )
    step = waiting(space["f"])
    for number in range(18):
        x = cupy.full(1 << 22, 2.0**-20 * (1 + (number > 12) * (number % 2)), np.float32)
        found = step(x)
        if 8 <= number < 13 and how != "event.synchronize()":  # replays
            assert cupy.cuda.get_current_stream().done
        assert same(found, work(x)) and float(space["count"][0]) == 2 * (number + 1), number
    assert step.statistics().replays >= 4, step.explain()


@pytest.mark.parametrize(
    "lines",
    [
        "cupy.cuda.get_current_stream().done",
        "one = cupy.cuda.get_current_stream().record(); one.synchronize()",
        "cupy.cuda.get_current_stream().launch_host_func(told.append, 1)",
        "a, b = cupy.cuda.Event(), cupy.cuda.Event(); a.record(); b.record(); b.synchronize(); "
        "assert cupy.cuda.get_elapsed_time(a, b) >= 0",
    ],
)
def test_what_no_chain_holds_has_its_effects_once(waiting: Make, lines: str) -> None:
    told: list[int] = []
    space = {"cupy": cupy, "count": cupy.zeros(4, np.float32), "told": told}
    exec(
        "def f(x):\n    global count\n    count += 1\n    y = x * float(x.sum())\n"
        f"    count += 1\n    {lines}\n    return y + 1",
        space,
    )
    step = waiting(space["f"], guard=False)
    for number in range(12):
        x = cupy.full(4, 2, np.float32)
        assert same(step(x), x * 8 + 1) and float(space["count"][0]) == 2 * (number + 1)
        assert not told or len(told) == number + 1
    assert "one" in lines or step.statistics().replays == 0, step.explain()


@pytest.mark.parametrize("how", ["with other:", "with here:", "with cupy.cuda.Stream.null:"])
@pytest.mark.parametrize("waits", [False, True])
def test_work_on_a_stream_outside_of_the_capture_runs_once(
    waiting: Make, how: str, waits: bool
) -> None:
    """A blocking stream and the default stream wait for each other."""
    space = {
        "cupy": cupy,
        "count": cupy.zeros(4, np.float32),
        "other": cupy.cuda.Stream(),
        "here": cupy.cuda.Stream(null=True),
    }
    exec(
        f"def f(x):\n    global count\n    y = x * {'float(x.sum())' if waits else '8.0'}\n"
        f"    {how}\n        z = x * 2\n        count += z\n    return y + z",
        space,
    )
    step, total = waiting(space["f"]), 0.0
    for number in range(9):
        x = cupy.full(4, 2 + number % 2, np.float32)
        total += 2 * (2 + number % 2)
        wanted = x * (float(x.sum()) if waits else 8) + 2 * x
        assert same(step(x), wanted) and float(space["count"][0]) == total, number
    assert step.statistics().replays == 0, step.explain()


@pytest.mark.parametrize("waits", [False, True])
def test_an_event_that_outlives_the_call_is_recorded_outside_of_the_capture(
    waiting: Make, waits: bool
) -> None:
    event, other = cupy.cuda.Event(), cupy.cuda.Stream(non_blocking=True)

    def f(x: Any) -> Any:
        y = x * (float(x[:4].sum()) if waits else 8.0)
        for _ in range(20):
            y = y * 0.5 + 1
        x[...] = y
        event.record()
        return y

    step = waiting(f)
    for number in range(9):
        x = cupy.full(1 << 22, 2, np.float32)
        wanted = step(x)
        other.wait_event(event)
        with other:
            seen = x.copy()
        event.synchronize()
        cupy.cuda.Device().synchronize()
        assert same(seen, wanted), number
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


def test_arrays_of_the_host_are_copied_once(waiting: Make) -> None:
    held = np.arange(16, dtype=np.float32)

    def f(x: Any) -> Any:
        y = cupy.asarray(np.full(16, 5, np.float32)) + x
        z = cupy.array(held)
        z += y * float(x.sum())
        return z + cupy.asarray([3.0] * 16)

    step = waiting(f, guard=False)
    for number in range(20):
        held[0] = number // 8
        x = cupy.full(16, number > 12, np.float32)
        found = step(x)
        others = [cupy.asarray(np.full(16, 777, np.float32)) for _ in range(8)]
        assert same(found, f(x)) and len(others) == 8, number
    assert step.statistics().replays >= 6, step.explain()


HOST = (
    *(
        "x[[1, 2, 5]] * 2",
        "x[[]] + 1",
        "x.reshape(4, 4)[[1, 2], [0, 3]] * 2",
        "x[[True, False] * 8]",
    ),
    *(
        "x[np.array([3, 1])] * 2",
        "x.reshape(4, 4)[1, held.astype(int)] + 1",
        "x[range(3)] + 1",
    ),
    *("x.take([1, 2]) + 1", "cupy.take(x, (3, 1)) + 1", "x.reshape(4, 4)[(1, 0), 1:3] * 2"),
    *("put(x, [1, 2], [5.5, 6])", "put(x, [3, 1], 7)", "put(x, x > 0, held[:1])"),
    *("put(x, np.array([0, 2]), held[:2])", "put(x, slice(1, 3), x[[0, 1]])"),
    *(
        "x + cupy.asarray(held)[0]",
        "x * cupy.asarray(np.array(2.0))",
        "x + cupy.array((1, 2)).sum()",
    ),
    *("filled(x, held)", "x + cupy.array([held, held])[1].max()", "x[3] + cupy.asarray(range(4))"),
    *("x[np.int64(2)] + cupy.asarray([1, 2])", "cupy.asarray([x, x])[1] + 1", "x[..., [1]] * 2"),
)


@pytest.mark.parametrize("line", HOST)
def test_copies_from_the_host_are_made_once(waiting: Make, line: str) -> None:
    def put(x: Any, index: Any, value: Any) -> Any:
        y = x + 0
        y[index] = value
        return y

    def filled(x: Any, values: Any) -> Any:
        y = cupy.empty(4, np.float32)
        y.set(values)
        y += x[:4]
        y[...] = y * 2
        return y

    held = np.arange(4, dtype=np.float32) / 2
    space = {"cupy": cupy, "np": np, "held": held, "put": put, "filled": filled}
    exec(f"def f(x):\n    return {line}", space)
    step = waiting(space["f"], guard=len(line) % 2 == 0)
    for number in range(18):
        held[0] = 1 + (number > 12 and number % 2)
        x = randn(16) + number
        found = step(x)
        others = [cupy.asarray(np.full(16, 777, np.float32)) for _ in range(4)]
        assert equal(found, space["f"](x)) and len(others) == 4, number
    assert step.statistics().replays >= 4, step.explain()


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
        assert equal(step(x), space["f"](x)), number


@pytest.mark.parametrize(
    "line", ["float(x.sum())", "float((x @ x).get())", "cupy.asarray(np.ones(4)).get()[0]"]
)
def test_a_refusal_that_the_function_catches_is_in_no_graph(waiting: Make, line: str) -> None:
    space: dict[str, Any] = {"cupy": cupy, "np": np}
    tried = f"try:\n        return x * {line}\n    except Exception:\n        return x * 1000"
    exec(f"def f(x):\n    {tried}", space)
    step = waiting(space["f"])
    for number in range(12):
        x = cupy.full(4, 1 + (number > 8), np.float64)
        assert same(step(x), space["f"](x))


def test_a_failed_capture_frees_no_memory_of_other_graphs(make: Make) -> None:
    def f(x: Any, waits: bool) -> Any:
        for number in range(6):
            x = cupy.sqrt(x * x + number) * x[::-1]
        if waits:
            _ = cupy.cuda.get_current_stream().done
        return x

    step = make(f, writes=False)
    x = cupy.full(1 << 20, 0.3, np.float32)
    wanted = f(x, False)
    for waits in [False] * 3 + [True] * 8:
        assert same(step(x, waits), wanted)
    cupy.get_default_memory_pool().free_all_blocks()
    others = [cupy.zeros(1 << 20, np.float32) for _ in range(64)]
    for _ in range(3):
        assert same(step(x, False), wanted)
    assert not any(float(other.max()) for other in others)


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
