"""Functions of CuPy that read arrays in the middle, on a stand-in for CuPy: they replay as chains,
and each call has the answer and the effects of an eager call."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from ostinato.device import Device
from ostinato.interop.graphed import Graphed
from ostinato.interop.reading import records
from tests.interop import cupy_on_host, cupy_programs

Make = Callable[..., Graphed]


@pytest.fixture
def cupy(host_device: Device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The stand-in; chains are kept, however long they take."""
    monkeypatch.setattr(records, "_GAIN", float("inf"))
    with cupy_on_host.installed(host_device) as module:
        yield module


@pytest.fixture
def make(cupy: Any, host_device: Device) -> Iterator[Make]:
    made: list[Graphed] = []

    def build(function: Any, **options: Any) -> Graphed:
        made.append(cupy_on_host.graphed(host_device, function, **options))
        return made[-1]

    yield build
    for one in made:
        one.close()


def chains(step: Graphed) -> list[Any]:
    """The records of the chains."""
    return [line for line in step.statistics().keys if "waits at" in line.words]


@pytest.mark.parametrize("first", [0, 8])
def test_random_functions(make: Make, cupy: Any, first: int) -> None:
    """Some raise in each call, and some wait for an event of a capture."""
    options: list[dict[str, Any]] = [{}, {"verify": "first"}, {"verify": 3}, {"results": "static"}]
    replays = 0
    for seed in range(first, first + 8):
        given = options[seed % 4]
        step = cupy_programs.check(cupy, lambda f, given=given: make(f, **given), seed, 20)
        replays += step.statistics().replays
    assert replays >= 40


@pytest.mark.parametrize(
    "read",
    [
        *("float({0})", "int({0})", "{0}.item()", "{0}.tolist()", "float({0}.get())"),
        *("({0} > 6.0).get().item()", "(1 if {0} > 6.0 else 0)"),
    ],
)
def test_each_way_to_read(make: Make, cupy: Any, read: str) -> None:
    space: dict[str, Any] = {}
    exec(f"def f(x):\n    y = x * 2.0\n    return y * {read.format('y.sum()')} + 1.0", space)
    step = make(space["f"])
    for call in range(16):
        value = np.array([1.0, 2.0 + (call > 7) * (call % 2)])
        wanted = space["f"](cupy.asarray(value)).get()
        np.testing.assert_array_equal(step(cupy.asarray(value)).get(), wanted)
    assert [line.captures for line in chains(step)] == [1, 1]
    assert step.statistics().replays >= 8, step.explain()


def test_a_mask_has_a_chain_for_each_count(make: Make, cupy: Any) -> None:
    f = lambda x: x[x > 1.0] * 2.0  # noqa: E731
    step = make(f)
    for call in range(24):
        x = cupy.asarray(np.roll([0.0, 2.0, 3.0, 4.0 * (call % 2)], call))
        np.testing.assert_array_equal(step(x).get(), f(x).get())
    assert [line.captures for line in chains(step)] == [1, 1], step.explain()


def test_an_array_without_elements(make: Make, cupy: Any) -> None:
    f = lambda x: x * (2.0 + len(x[x > 9.0].tolist()))  # noqa: E731
    step = make(f)
    for call in range(16):
        x = cupy.asarray([1.0, 2.0 + 9.0 * (call > 8 and call % 2)])
        np.testing.assert_array_equal(step(x).get(), f(x).get())
    assert [line.captures for line in chains(step)] == [1, 1], step.explain()


def test_values_that_are_only_returned_are_fresh(make: Make, cupy: Any) -> None:
    step = make(lambda x: (x * 2.0, {"all": x.get()}))
    for call in range(14):
        found, held = step(cupy.asarray([call + 0.0, 1.0]))
        assert (found.get()[0], held["all"][0]) == (2.0 * call, call)
    (line,) = chains(step)
    assert (line.captures, line.replays) == (1, 7), step.explain()


def test_the_line_that_waits_is_named(make: Make, cupy: Any) -> None:
    step = make(lambda x: x * float(x.get().sum()))
    for _ in range(7):
        step(cupy.asarray([1.0, 2.0]))
    assert f"waits at {__file__}" in step.explain()


def test_nothing_stays_replaced(make: Make, cupy: Any) -> None:
    step = make(lambda x: x * float(x.sum()))
    for _ in range(8):
        step(cupy.asarray([1.0, 2.0]))
        assert "get" not in vars(cupy.ndarray)


def test_other_threads_read_while_a_chain_is_built(make: Make, cupy: Any) -> None:
    other, seen = cupy.asarray([5.0, 6.0]), []

    def f(x: Any) -> Any:
        y = x * 2.0
        thread = threading.Thread(target=lambda: seen.append(float(other.get().sum())))
        thread.start()
        thread.join()
        return y * float(y.sum())

    step = make(f, guard=False)
    for _ in range(9):
        np.testing.assert_array_equal(step(cupy.asarray([1.0, 2.0])).get(), [12.0, 24.0])
    assert {*seen} == {11.0} and len(seen) < 9
    assert chains(step), step.explain()


@pytest.mark.parametrize(
    ("line", "why", "caught"),
    [
        ("x.refused()", "cuSPARSE API during stream capture", False),
        *[("x.wait()", "cannot be captured", caught) for caught in (False, True)],
        *[("x.get(out=into)", "reads into an array", caught) for caught in (False, True)],
        *[("x.get(stream=other)", "on another stream", caught) for caught in (False, True)],
    ],
)
def test_what_breaks_a_chain_in_the_middle_has_its_effects_once(
    make: Make, cupy: Any, line: str, why: str, caught: bool
) -> None:
    """`caught`: the function goes on after the error of the capture."""
    count, late = cupy.zeros(2), cupy.zeros(2)
    space = {
        "count": count,
        "late": late,
        "into": np.empty(2, np.float32),
        "other": cupy.cuda.Stream(),
    }
    tried = f"try:\n        {line}\n    except Exception: pass" if caught else line
    source = f"""
def f(x):
    global count, late
    count += 1.0
    if x.sum() > 100.0:
        return x
    count += 2.0
    {tried}
    late += x.sum()
    return x * 2.0
"""
    exec(source, space)
    step = make(space["f"])
    for call in range(9):
        np.testing.assert_array_equal(step(cupy.asarray([1.0, 2.0])).get(), [2.0, 4.0])
        for array in (count, late):
            np.testing.assert_array_equal(array.get(), [3.0 * (call + 1)] * 2)
    assert why in step.explain() or caught, step.explain()
    assert step.statistics().replays == 0, step.explain()


@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize("caught", [False, True])
def test_products_run_between_graphs(make: Make, cupy: Any, caught: bool, read: bool) -> None:
    """CuPy refuses them in a capture.  `caught`: the function has another way then."""

    def f(x: Any, w: Any) -> Any:
        y = x * 2.0
        try:
            y = y @ w
        except NotImplementedError:
            if not caught:
                raise
            y = y * 5.0
        if read and float(y.sum()) > 40.0:
            y = y * 3.0
        return y + 1.0

    step, w = make(f), cupy.asarray([1.0, 2.0])
    for call in range(16):
        x = cupy.asarray([1.0, 2.0 + 16.0 * (call > 8 and call % 2)])
        np.testing.assert_array_equal(step(x, w).get(), f(x, w).get())
    assert [line.captures for line in chains(step)] == [1] * (1 + read), step.explain()
    assert step.statistics().replays >= 8


def test_arrays_of_the_host_are_copied_once(make: Make, cupy: Any) -> None:
    """Also one that the function writes later; a graph copies from another copy."""
    held = np.array([1.0, 2.0])
    space = {"cupy": cupy, "np": np, "held": held}
    source = """
def f(x):
    y = cupy.asarray(np.array([3.0, 4.0])) + x
    z = cupy.asarray(held)
    z += y * float(x.sum())
    return z + cupy.asarray([1.0, 2.0])
"""
    exec(source, space)
    step = make(space["f"], guard=False)
    for call in range(20):
        held[0] = 1.0 + (call > 10) + (call > 14)
        x = cupy.asarray([1.0, 2.0])
        found = step(x)
        others = [cupy.asarray([777.0, 777.0]) for _ in range(8)]
        np.testing.assert_array_equal(found.get(), space["f"](x).get())
        assert len(others) == 8
    assert [line.captures for line in chains(step)] == [1, 1, 1], step.explain()


@pytest.mark.parametrize("reads", [False, True])
def test_copies_from_memory_of_the_host_run_eagerly(
    make: Make, cupy: Any, host_device: Device, reads: bool
) -> None:
    """A graph would copy what is there later."""
    pinned = host_device.pinned(2, np.float32)
    address, content = pinned.address, pinned.array

    def f(x: Any) -> Any:
        content[:] = 3.0
        y = cupy.zeros(2)
        y.load(address)
        return y + x * (float(x.sum()) if reads else 1.0)

    step = make(f, guard=False)
    for _ in range(9):
        found = step(cupy.asarray([1.0, 2.0])).get()
        np.testing.assert_array_equal(found, [6.0, 9.0] if reads else [4.0, 5.0])
        content[:] = 777.0
    assert "copies from or to memory that is of no array" in step.explain(), step.explain()


@pytest.mark.parametrize(
    "line",
    [
        *("x[[1, 0]] + 1.0", "x[np.array([1])] * 2.0", "x.take((1, 0)) + 1.0", "x[[]] + 1.0"),
        *("put(x, [1, 0], [2.5, 3.0])", "put(x, [1], held[:1])", "put(x, held.astype(int), x)"),
        *("filled(x, held)", "filled(x, np.ones(2, 'f4'))", "x + cupy.asarray(range(2))"),
        *("x * cupy.asarray(np.array(2.0))", "x + cupy.asarray([held, held]).max()"),
    ],
)
@pytest.mark.parametrize("waits", [False, True])
def test_copies_from_the_host_are_made_once(make: Make, cupy: Any, line: str, waits: bool) -> None:
    def put(x: Any, index: Any, value: Any) -> Any:
        y = x + 0.0
        y[index] = value
        return y

    def filled(x: Any, values: Any) -> Any:
        y = cupy.zeros(2)
        y.set(values)
        y += x
        return y

    held = np.array([0.0, 1.0], "f4")
    space = {"cupy": cupy, "np": np, "held": held, "put": put, "filled": filled}
    exec(f"def f(x):\n    return ({line}) * {'float(x.max())' if waits else '2.0'}", space)
    step = make(space["f"], guard=waits)
    for call in range(24):
        held[0] = call > 15 and call % 2
        x = cupy.asarray([1.0, 2.0 + (not waits) * call])
        found = step(x)
        others = [cupy.asarray([777.0, 777.0]) for _ in range(8)]
        np.testing.assert_array_equal(found.get(), space["f"](x).get())
        assert len(others) == 8
    assert step.statistics().replays >= 8, step.explain()
    assert all("1 graph" in one.words for one in step.statistics().keys if one.captures)


def test_a_copy_from_the_host_on_another_stream_runs_eagerly(make: Make, cupy: Any) -> None:
    other, held = cupy.cuda.Stream(), np.ones(2, "f4")

    def f(x: Any) -> Any:
        y = x + 1.0
        y.set(held, other)
        return x * 2.0

    step = make(f)
    for _ in range(9):
        np.testing.assert_array_equal(step(cupy.asarray([1.0, 2.0])).get(), [2.0, 4.0])


@pytest.mark.parametrize(
    "line",
    [
        *("cupy.cuda.get_current_stream().synchronize()", "cupy.cuda.Device().synchronize()"),
        "cupy.cuda.runtime.deviceSynchronize()",
        *("first.synchronize()", "event.synchronize()"),
        "cupy.cuda.get_current_stream().record().synchronize()",
    ],
)
def test_a_synchronisation_is_repeated(make: Make, cupy: Any, line: str) -> None:
    """The caller may rely on it for work on other streams."""
    here = cupy.cuda.get_current_stream()
    count = cupy.zeros(2)
    space = {"cupy": cupy, "count": count, "first": here, "event": here.record()}
    exec(
        f"def f(x):\n    global count\n    count += 1.0\n    {line}\n    y = x * float(x.sum())"
        f"\n    y.slow(0.02)\n    count += 2.0\n    {line}\n    return y",
        space,
    )
    step = make(space["f"])
    for call in range(16):
        x = cupy.asarray([1.0, 2.0 + (call > 9 and call % 2)])
        found = step(x)
        assert here.stream.done or line.startswith("event") or call < 8
        np.testing.assert_array_equal(found.get(), x.get() * x.get().sum())
        np.testing.assert_array_equal(count.get(), [3.0 * (call + 1)] * 2)
    assert step.statistics().replays >= 6 or "record" in line, step.explain()


def test_what_the_function_keeps_of_a_run_that_was_captured(make: Make, cupy: Any) -> None:
    kept: list[Any] = []

    def f(x: Any) -> Any:
        kept.append(cupy.cuda.Device())
        assert isinstance(kept[-1], cupy.cuda.Device)
        assert isinstance(plain, cupy.cuda.Device) and not isinstance(x, cupy.cuda.Device)
        return x * float(x.sum())

    plain = cupy.cuda.Device()
    step = make(f, guard=False)
    for _ in range(9):
        step(cupy.asarray([1.0, 2.0]))
    for each in kept:
        each.synchronize()
    assert step.statistics().replays, step.explain()


def test_numbers_are_compared_bit_by_bit_in_one_launch(make: Make, cupy: Any) -> None:
    def f(x: Any) -> Any:
        y = x * 2.0
        for place in range(3):
            y = y + (1.0 if float(x[place : place + 1].sum()) > 0.5 else 2.0)
        return y, x[0:1].sum().get()

    step = make(f)
    for call in range(60):
        x = cupy.asarray([1.0, (1.0, 0.0, -0.0, np.nan)[(call > 11) * call // 2 % 4], 1.0])
        found, wanted = step(x), f(x)
        assert found[0].get().tobytes() == wanted[0].get().tobytes(), call
        assert found[1].tobytes() == wanted[1].tobytes() and found[1].flags.writeable, call
    assert any(one.replays and "1 graph" in one.words for one in chains(step)), step.explain()


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("how", ["event.record()", "cupy.cuda.get_current_stream().record(event)"])
def test_an_event_that_outlives_the_call_is_recorded(
    make: Make, cupy: Any, how: str, waits: bool
) -> None:
    event = cupy.cuda.Event()
    space = {"cupy": cupy, "event": event}
    exec(
        f"def f(x):\n    y = x * {'float(x.sum())' if waits else '2.0'}\n    y.slow(0.02)\n"
        f"    {how}\n    return y",
        space,
    )
    step = make(space["f"])
    for _ in range(9):
        x, began = cupy.asarray([1.0, 2.0]), time.perf_counter()
        step(x)
        event.synchronize()
        assert time.perf_counter() - began >= 0.02
    assert "an event that outlives the call" in step.explain(), step.explain()


@pytest.mark.parametrize("lines", ["with other:\n        ", "other.use()\n    "])
@pytest.mark.parametrize("waits", [False, True])
def test_work_on_a_stream_outside_of_the_capture_runs_once(
    make: Make, cupy: Any, lines: str, waits: bool
) -> None:
    space = {"cupy": cupy, "count": cupy.zeros(2), "other": cupy.cuda.Stream()}
    exec(
        f"def f(x):\n    global count\n    y = x * {'float(x.sum())' if waits else '3.0'}\n"
        "    here = cupy.cuda.get_current_stream()\n    here.synchronize()\n"
        f"    {lines}count += 1.0; other.synchronize()\n    here.use()\n    return y + count",
        space,
    )
    step = make(space["f"])
    for call in range(9):
        found = step(cupy.asarray([1.0, 2.0])).get()
        np.testing.assert_array_equal(found, [4.0 + call, 7.0 + call])
    assert "makes a stream current" in step.explain() and not step.statistics().replays


def test_functions_of_the_host_are_called_once_in_each_call(make: Make, cupy: Any) -> None:
    told: list[int] = []

    def f(x: Any) -> Any:
        y = x * float(x.sum())
        cupy.cuda.get_current_stream().launch_host_func(told.append, 1)
        return y

    step = make(f, guard=False)
    for call in range(9):
        np.testing.assert_array_equal(step(cupy.asarray([1.0, 2.0])).get(), [3.0, 6.0])
        assert len(told) == call + 1
    assert "launch_host_func" in step.explain(), step.explain()


@pytest.mark.parametrize(
    "line",
    [
        *("float(x.sum())", "sum((x @ x).get())", "asarray(held).get()[0]"),
        *("x[[1, 0]].get()[0]", "filled(x).get()[0]"),
    ],
)
def test_a_refusal_that_the_function_catches_is_in_no_graph(
    make: Make, cupy: Any, line: str
) -> None:
    """CuPy refuses some calls in a capture without breaking it."""

    def filled(x: Any) -> Any:
        y = x + 1.0
        y.set(np.array([3.0, 4.0], "f4"))
        return y

    space = {"asarray": cupy.asarray, "held": np.array([7.0]), "filled": filled}
    source = f"""
def f(x):
    try:
        return x * {line}
    except Exception:
        return x * 1000.0
"""
    exec(source, space)
    step = make(space["f"])
    for call in range(12):
        x = cupy.asarray([1.0, 2.0 + (call > 8)])
        np.testing.assert_array_equal(step(x).get(), space["f"](x).get())


def test_errors_of_a_product_are_those_of_the_call(make: Make, cupy: Any) -> None:
    count = cupy.zeros(2)

    def f(x: Any) -> Any:
        nonlocal count
        count += 1.0
        return x @ None

    step = make(f)
    for call in range(9):
        with pytest.raises(TypeError):
            step(cupy.asarray([1.0, 2.0]))
        np.testing.assert_array_equal(count.get(), [call + 1.0] * 2)


@pytest.mark.parametrize("joined", [False, True])
def test_another_stream_at_a_read(make: Make, cupy: Any, joined: bool) -> None:
    """`joined`: the stream that reads has waited for the other one.  A capture cannot end
    otherwise, also one that has work of the other stream alone."""
    other = cupy.cuda.Stream()

    def f(x: Any) -> Any:
        y, total = x * 2.0, float(x.sum())
        here = cupy.cuda.get_current_stream()
        other.stream.wait(here.stream.record())
        with other:
            z = y + 1.0
        if joined:
            here.stream.wait(other.stream.record())
        total += float(x.get()[0])
        if not joined:
            other.synchronize()
        return z * total

    step = make(f, guard=False)
    for call in range(12):
        x = cupy.asarray([1.0, 2.0 + (call > 8)])
        np.testing.assert_array_equal(step(x).get(), f(x).get())
    assert bool(step.statistics().replays) is joined, step.explain()
    assert joined or "forked from the capture was not joined" in step.explain()


def test_an_error_of_a_decomposition_that_the_function_catches(make: Make, cupy: Any) -> None:
    count, cholesky = cupy.zeros(2), cupy.linalg

    def f(x: Any) -> Any:
        nonlocal count
        count += 1.0
        try:
            y = cholesky.cholesky(x)
        except np.linalg.LinAlgError:
            y = x * 3.0
        return y + 1.0

    step = make(f)
    for call in range(28):
        bad = (call < 12 and call % 3 == 0) or (call > 20 and call % 2)
        x = cupy.asarray([1.0, -2.0 if bad else 2.0])
        wanted = x.get() * 3.0 + 1.0 if bad else x.get() + 2.0
        np.testing.assert_array_equal(step(x).get(), wanted)
        np.testing.assert_array_equal(count.get(), [call + 1.0] * 2)
    assert step.statistics().replays >= 8, step.explain()


def test_errors_of_the_function_are_raised_with_its_effects(make: Make, cupy: Any) -> None:
    count = cupy.zeros(2)

    def f(x: Any) -> Any:
        nonlocal count
        count += 1.0
        total = float(x.sum())
        count += 2.0
        if total > 10.0:
            raise LookupError(total)
        return x * 2.0

    step, expected = make(f), 0.0
    for value in [1.0] * 8 + [9.0, 1.0, 9.0] + [1.0] * 3:
        x = cupy.asarray([value, 2.0])
        if value > 1.0:
            with pytest.raises(LookupError):
                step(x)
        else:
            np.testing.assert_array_equal(step(x).get(), [2.0, 4.0])
        expected += 3.0
        np.testing.assert_array_equal(count.get(), [expected] * 2)
    assert chains(step)[0].replays >= 4, step.explain()


def test_errors_in_the_run_that_builds(make: Make, cupy: Any) -> None:
    count, fails = cupy.zeros(2), [False]

    def f(x: Any) -> Any:
        nonlocal count
        count += x.sum()
        total = float(x.sum())
        count += 2.0
        if fails[0]:
            raise LookupError(total)
        return x * 2.0

    step = make(f, guard=False)
    for call in range(9):
        fails[0] = call in (2, 5)
        try:
            step(cupy.asarray([1.0, 2.0]))
        except LookupError:
            assert fails[0]
        np.testing.assert_array_equal(count.get(), [5.0 * (call + 1)] * 2)


def test_memory_that_is_unknown_is_not_written_twice(make: Make, cupy: Any) -> None:
    """Without guards nothing says that the function uses it, so no replay could take it back."""
    count = cupy.zeros(2)

    def f(x: Any) -> Any:
        nonlocal count
        count += 1.0
        return x * (2.0 if float(x.sum()) > 5.0 else 3.0)

    step = make(f, guard=False)
    for call in range(20):
        value = 1.0 if call < 9 else 1.0 + 4.0 * (call % 2)
        x = cupy.asarray([value, 2.0])
        wanted = x.get() * (2.0 if value > 1.0 else 3.0)
        np.testing.assert_array_equal(step(x).get(), wanted)
        np.testing.assert_array_equal(count.get(), [call + 1.0] * 2)
    assert "neither an argument nor known to be used" in step.explain(), step.explain()


@pytest.mark.parametrize("written", [False, True])
def test_what_an_operation_of_cupy_only_reads_is_not_written(
    make: Make, cupy: Any, written: bool
) -> None:
    """The inputs of a ufunc; its output is written, also if it is an input."""
    hidden = cupy.asarray([1.0, 2.0])

    def f(x: Any) -> Any:
        nonlocal hidden
        y = x - hidden
        if written:
            hidden -= x
        return y * (2.0 if float(y.sum()) > 5.0 else 3.0)

    step, mirror = make(f, guard=False), np.array([1.0, 2.0])
    for call in range(20):
        value = np.array([1.0 + 9.0 * (call > 8 and call % 2), 2.0])
        y = value - mirror
        mirror -= value * written
        wanted = y * (2.0 if y.sum() > 5.0 else 3.0)
        np.testing.assert_array_equal(step(cupy.asarray(value)).get(), wanted)
        np.testing.assert_array_equal(hidden.get(), mirror)
    assert bool(step.statistics().replays) is not written, step.explain()


def test_memory_of_no_array_ends_the_chain(make: Make, cupy: Any, host_device: Device) -> None:
    hidden = host_device.zeros(2, "f4")

    def f(x: Any) -> Any:
        place = cupy.cuda.MemoryPointer(x.data.mem, 0)
        place.ptr = hidden.address
        counter = cupy.ndarray(2, "f4", place)
        counter += 1.0
        del counter
        return x * (2.0 if float(x.sum()) > 5.0 else 3.0)

    step = make(f, guard=False)
    stream = host_device.create_stream()
    for call in range(12):
        x = cupy.asarray([1.0 + 4.0 * (call > 8), 2.0])
        step(x).get()
        np.testing.assert_array_equal(hidden.to_numpy(stream), [call + 1.0] * 2)
    assert "points at memory that is of no array of CuPy" in step.explain(), step.explain()


def test_arguments_are_written_once(make: Make, cupy: Any) -> None:
    def f(x: Any) -> Any:
        x += 1.0
        if float(x.sum()) > 10.0:
            x += 100.0
        return x

    step = make(f)
    for value in [1.0] * 8 + [9.0, 1.0, 9.0, 12.0, 1.0]:
        x = cupy.asarray([value, 0.0])
        step(x)
        assert x.get()[0] == value + (101.0 if value > 1.0 else 1.0)


def test_a_failed_capture_frees_no_memory_of_other_graphs(make: Make, cupy: Any) -> None:
    """What is free in the pool of captures is what their graphs write in each replay."""

    def f(x: Any, waits: bool) -> Any:
        y = (x * 2.0 + 1.0) * 3.0
        if waits:
            y.wait()
        return y + 1.0

    step = make(f)
    x = cupy.asarray([1.0, 2.0])
    for waits in [False] * 3 + [True] * 8:
        np.testing.assert_array_equal(step(x, waits).get(), [10.0, 16.0])
    others = [cupy.asarray([777.0, 777.0]) for _ in range(64)]
    for _ in range(3):
        np.testing.assert_array_equal(step(x, False).get(), [10.0, 16.0])
    assert {float(value) for other in others for value in other.get()} == {777.0}
    assert step.statistics().replays == 5, step.explain()
