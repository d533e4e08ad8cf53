"""Functions of CuPy that read arrays in the middle: they replay as chains, and each call has the
answer and the effects of an eager call.  On a GPU, and on a stand-in for CuPy on the host driver.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from ostinato.device import Device
from ostinato.interop.graphed import Graphed
from ostinato.interop.reading import records
from tests.gpu.foreign import making
from tests.interop import cupy_on_host, cupy_programs
from tests.interop.cupy_programs import same

Make = Callable[..., Graphed]

ON_HOST = pytest.mark.parametrize("device", ["host"], indirect=True)
"""For what only the stand-in does."""


def lines(*both: str, more: tuple[str, ...] = ()) -> pytest.MarkDecorator:
    """A test for each line; those in `more` are for CuPy alone."""
    on_host = [("host", line) for line in both]
    on_gpu = [pytest.param("cuda", line, marks=pytest.mark.gpu) for line in (*both, *more)]
    return pytest.mark.parametrize(("device", "line"), [*on_host, *on_gpu], indirect=["device"])


@pytest.fixture
def cupy(device: Device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """CuPy or the stand-in; chains are kept, however long they take."""
    monkeypatch.setattr(records, "_GAIN", float("inf"))
    if device.driver.name == "host":
        with cupy_on_host.installed(device) as module:
            yield module
    else:
        yield pytest.importorskip("cupy")


@pytest.fixture
def make(cupy: Any, device: Device) -> Iterator[Make]:
    graphed: Any = cupy_on_host.graphed
    if device.driver.name != "host":
        from ostinato.interop.cupy import graphed
    with making(graphed, device) as build:
        yield build


@pytest.fixture
def arr(cupy: Any) -> Callable[..., Any]:
    """Makes an array of numbers."""
    return lambda *numbers: cupy.asarray(np.array(numbers, "f4"))


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


@lines(
    *("x * float(x.sum())", "x * int(x.sum())", "x * x.sum().item()", "x * x.sum().tolist()"),
    *("x * float(x.sum().get())", "x * (x.sum() > 6.0).get().item()"),
    *("x * (1 if x.sum() > 6.0 else 0)", "x[x > 5.0] * 2.0"),
    "x * (2.0 + len(x[x > 5.0].tolist()))",
    more=(
        *("x * sum((x > 0).tolist())", "x * len(cupy.asnumpy(x))", "x * x[x > 0].sum()"),
        "x * float(x.reshape(2, 2).T.get(order='F')[0, 1])",
        *("x.reshape(2, 2)[x.reshape(2, 2) > 0] + 1", "cupy.nonzero(x > 5)[0] + 1"),
        *("cupy.argwhere(x > 5)", "cupy.unique(cupy.rint(x)) * 2"),
        *("cupy.bincount(cupy.rint(abs(x)).astype(int))", "x * str(x[:1] > 0).count('T')"),
        *("x * bool(cupy.array_equal(x, x + 0))", "x * 2 + x[x > 99].get().size"),
        *("x.reshape(2, 2) @ x.reshape(2, 2) * 2", "cupy.einsum('i,j->ij', x, x + 1).sum(axis=0)"),
        *("x.dot(x + 1) * x", "cupy.linalg.solve(cupy.eye(4, dtype='f4') * (x + 9), x) + 1"),
        *("cupy.linalg.inv(cupy.eye(4, dtype='f4') * (x + 9)) * 2", "x + (x > -1).all()"),
        "cupy.linalg.cholesky(cupy.eye(4, dtype='f4') * (x + 9)) + 1",
    ),
)
def test_each_way_to_wait(make: Make, cupy: Any, arr: Any, line: str) -> None:
    space: dict[str, Any] = {"cupy": cupy}
    exec(f"def f(x):\n    x = x * 2.0\n    return ({line}) + 1.0", space)
    step = make(space["f"])
    for call in range(16):
        x = arr(1.0, 2.0 + (call > 7) * (call % 2), 0.0, -1.0)
        assert same(step(x), space["f"](x)), call
    assert step.statistics().replays >= 4, step.explain()


def test_a_mask_has_a_chain_for_each_count(make: Make, cupy: Any, arr: Any) -> None:
    f = lambda x: x[x > 1.0] * 2.0  # noqa: E731
    step = make(f)
    for call in range(24):
        x = arr(*np.roll([0.0, 2.0, 3.0, 4.0 * (call % 2)], call))
        assert same(step(x), f(x))
    assert [line.captures for line in chains(step)] == [1, 1], step.explain()


@lines(
    "(x * 2.0, {'all': x.get(), 'sum': x.sum().get()})",
    more=("(x * 2.0, float(x.sum()), x.max().item(), cupy.asnumpy(x))",),
)
def test_values_that_are_only_returned_are_fresh(
    make: Make, cupy: Any, arr: Any, line: str
) -> None:
    f = eval(compile(f"lambda x: {line}", __file__, "eval"), {"cupy": cupy})
    step = make(f)
    for call in range(14):
        found, wanted = step(arr(call, 0.5)), f(arr(call, 0.5))
        assert [*map(type, found)] == [*map(type, wanted)]
        assert same(found, wanted), call
        assert "get" not in vars(cupy.ndarray)  # nothing stays replaced
    (chain,) = chains(step)
    assert (chain.captures, chain.replays) == (1, 7), step.explain()
    assert f"waits at {__file__}" in step.explain()


@ON_HOST
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


@pytest.mark.parametrize("caught", [False, True])
@lines(
    *("cupy.cuda.get_current_stream().done", "x.get(out=into)", "x.get(stream=other)"),
    "cupy.cuda.get_current_stream().launch_host_func(told.append, 1)",
    more=(
        "a, b = cupy.cuda.Event(), cupy.cuda.Event(); a.record(); b.record(); b.synchronize(); "
        "assert cupy.cuda.get_elapsed_time(a, b) >= 0",
    ),
)
def test_what_breaks_a_chain_in_the_middle_has_its_effects_once(
    make: Make, cupy: Any, arr: Any, line: str, caught: bool
) -> None:
    """`caught`: the function goes on after the error of the capture."""
    told: list[int] = []
    count, late, other = cupy.zeros(2, "f4"), cupy.zeros(2, "f4"), cupy.cuda.Stream()
    space = {"cupy": cupy, "count": count, "late": late, "told": told, "other": other}
    space["into"] = np.empty(2, np.float32)
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
    step = make(space["f"], guard="told" not in line)
    for call in range(9):
        assert step(arr(1.0, 2.0)).get().tolist() == [2.0, 4.0]
        for array in (count, late):
            assert array.get().tolist() == [3.0 * (call + 1)] * 2
        assert not told or len(told) == call + 1
    assert step.statistics().replays == 0, step.explain()
    why = "launch_host_func" if "told" in line else "reads into" if "get(" in line else "capture"
    assert why in step.explain() or caught, step.explain()


@ON_HOST
def test_a_library_that_refuses_to_be_captured(make: Make, cupy: Any) -> None:
    step = make(lambda x: x.refused() * float(x.sum()))
    for _ in range(9):
        np.testing.assert_array_equal(step(cupy.asarray([1.0, 2.0])).get(), [6.0, 9.0])
    assert "cuSPARSE API during stream capture" in step.explain(), step.explain()


@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize("caught", [False, True])
def test_products_run_between_graphs(
    make: Make, cupy: Any, arr: Any, caught: bool, read: bool
) -> None:
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

    step, w = make(f), arr(1.0, 2.0)
    for call in range(16):
        x = arr(1.0, 2.0 + 16.0 * (call > 8 and call % 2))
        assert same(step(x, w), f(x, w)), call
    made = [line.captures for line in chains(step)]
    # Some releases of CuPy capture this product: the graph is whole then.
    whole = cupy is not sys.modules.get("cupy") or read
    assert made == [1] * (1 + read) or (not whole and not made), step.explain()
    assert step.statistics().replays >= 8


def test_arrays_of_the_host_are_copied_once(make: Make, cupy: Any, arr: Any) -> None:
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
        x = arr(1.0, 2.0)
        found = step(x)
        others = [cupy.asarray([777.0, 777.0]) for _ in range(8)]
        assert same(found, space["f"](x)) and len(others) == 8, call
    assert [line.captures for line in chains(step)] == [1, 1, 1], step.explain()


@ON_HOST
@pytest.mark.parametrize("reads", [False, True])
def test_copies_from_memory_of_the_host_run_eagerly(
    make: Make, cupy: Any, device: Device, reads: bool
) -> None:
    """A graph would copy what is there later."""
    pinned = device.pinned(2, np.float32)
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


@pytest.mark.parametrize("waits", [False, True])
@lines(
    *("x[[1, 0]] + 1.0", "x[np.array([1])] * 2.0", "x.take((1, 0)) + 1.0", "x[[]] + 1.0"),
    *(
        "put(x, [1, 0], [2.5, 3.0])",
        "put(x, [1], held[:1])",
        "put(x, held[:1].astype(int), x[2:3])",
    ),
    *("filled(x, held)", "filled(x, np.ones(4, 'f4'))", "x + cupy.asarray(range(4)).max()"),
    *("x * cupy.asarray(np.array(2.0))", "x + cupy.asarray([held, held]).max()"),
    more=(
        *("x.reshape(2, 2)[[1, 0], [0, 1]] * 2", "x[[True, False] * 2]", "x[range(3)] + 1"),
        *("x.reshape(2, 2)[1, held[2:].astype(int) // 2]", "x.reshape(2, 2)[(1, 0), :1] * 2"),
        *("cupy.take(x, (3, 1)) + 1", "put(x, [3, 1], 7)", "put(x, x > 0, held[:1])"),
        *("put(x, slice(1, 3), x[[0, 1]])", "x + cupy.asarray(held)[0]", "x[..., [1]] * 2"),
        *("x + cupy.array((1, 2)).sum()", "x + cupy.array([held, held])[1].max()"),
        *("x[np.int64(2)] + cupy.asarray([1, 2])", "cupy.asarray([x, x])[1] + 1"),
    ),
)
def test_copies_from_the_host_are_made_once(
    make: Make, cupy: Any, arr: Any, line: str, waits: bool
) -> None:
    def put(x: Any, index: Any, value: Any) -> Any:
        y = x + 0.0
        y[index] = value
        return y

    def filled(x: Any, values: Any) -> Any:
        y = cupy.zeros(4, "f4")
        y.set(values)
        y += x
        return y

    held = np.array([0.0, 1.0, 2.0, 3.0], "f4")
    space = {"cupy": cupy, "np": np, "held": held, "put": put, "filled": filled}
    exec(f"def f(x):\n    return ({line}) * {'float(x.max())' if waits else '2.0'}", space)
    # Without guards, a copy of `held` that the function makes itself is taken as it was.
    step = make(space["f"], guard=waits or "astype" in line)
    for call in range(24):
        held[0] = call > 15 and call % 2
        x = arr(1.0, 2.0 + (not waits) * call, 0.5, 3.0)
        found = step(x)
        others = [cupy.asarray([777.0] * 4) for _ in range(8)]
        assert same(found, space["f"](x)) and len(others) == 8, call
    assert step.statistics().replays >= 8, step.explain()
    assert all("2 graphs" not in one.words for one in step.statistics().keys if one.captures)


@ON_HOST
def test_a_copy_from_the_host_on_another_stream_runs_eagerly(make: Make, cupy: Any) -> None:
    other, held = cupy.cuda.Stream(), np.ones(2, "f4")

    def f(x: Any) -> Any:
        y = x + 1.0
        y.set(held, other)
        return x * 2.0

    step = make(f)
    for _ in range(9):
        np.testing.assert_array_equal(step(cupy.asarray([1.0, 2.0])).get(), [2.0, 4.0])


@lines(
    *("cupy.cuda.get_current_stream().synchronize()", "cupy.cuda.Device().synchronize()"),
    *("cupy.cuda.runtime.deviceSynchronize()", "event.synchronize()"),
    *("first.synchronize()", "cupy.cuda.get_current_stream().record().synchronize()"),
    more=("cupy.cuda.Stream.null.synchronize()",),
)
def test_a_synchronisation_is_repeated(make: Make, cupy: Any, device: Device, line: str) -> None:
    """The caller may rely on it for work on other streams."""
    here, size = cupy.cuda.get_current_stream(), 2 if device.driver.name == "host" else 1 << 22
    count = cupy.zeros(2, "f4")

    def slow(y: Any) -> Any:
        if size == 2:
            y.slow(0.02)
        else:
            for _ in range(50):
                y = y * 0.5 + 1.0
        return y

    space = {"cupy": cupy, "count": count, "first": here, "event": here.record(), "slow": slow}
    exec(
        f"def f(x):\n    global count\n    count += 1.0\n    {line}\n"
        f"    y = slow(x * float(x[0:2].sum()))\n    count += 2.0\n    {line}\n    return y",
        space,
    )
    step = make(space["f"])
    for call in range(16):
        x = cupy.zeros(size, "f4")
        x.fill(1.0 + (call > 9 and call % 2))
        found = step(x)
        assert here.done or line.startswith("event") or call < 8
        assert same(found, slow(x * float(x[0:2].sum())))
        assert count.get().tolist() == [3.0 * (call + 1)] * 2
    assert step.statistics().replays >= 6 or "record" in line, step.explain()


def test_what_the_function_keeps_of_a_run_that_was_captured(
    make: Make, cupy: Any, arr: Any
) -> None:
    kept: list[Any] = []

    def f(x: Any) -> Any:
        kept.append(cupy.cuda.Device())
        assert isinstance(kept[-1], cupy.cuda.Device)
        assert isinstance(plain, cupy.cuda.Device) and not isinstance(x, cupy.cuda.Device)
        return x * float(x.sum())

    plain = cupy.cuda.Device()
    step = make(f, guard=False)
    for _ in range(9):
        step(arr(1.0, 2.0))
    for each in kept:
        each.synchronize()
    assert step.statistics().replays, step.explain()


def test_numbers_are_compared_bit_by_bit_in_one_launch(make: Make, cupy: Any, arr: Any) -> None:
    def f(x: Any) -> Any:
        y = x * 2.0
        for place in range(3):
            y = y + (1.0 if float(x[place : place + 1].sum()) > 0.5 else 2.0)
        return y, x[0:1].sum().get()

    step = make(f)
    for call in range(60):
        x = arr(1.0, (1.0, 0.0, -0.0, np.nan)[(call > 11) * call // 2 % 4], 1.0)
        found = step(x)
        assert same(found, f(x)) and found[1].flags.writeable, call
    assert any(one.replays and "1 graph" in one.words for one in chains(step)), step.explain()


@pytest.mark.parametrize("waits", [False, True])
@lines("event.record()", "cupy.cuda.get_current_stream().record(event)")
def test_an_event_that_outlives_the_call_is_recorded(
    make: Make, cupy: Any, device: Device, line: str, waits: bool
) -> None:
    event, other = cupy.cuda.Event(), cupy.cuda.Stream(non_blocking=True)
    size = 64 if device.driver.name == "host" else 1 << 22
    space = {"cupy": cupy, "event": event, "size": size}
    exec(
        f"def f(x):\n    y = x * {'float(x[0:4].sum())' if waits else '8.0'}\n"
        f"    for _ in range(20):\n        y = y * 0.5 + 1.0\n    x[0:size] = y\n"
        f"    {line}\n    return y",
        space,
    )
    step = make(space["f"])
    for call in range(9):
        x = cupy.zeros(size, "f4")
        x.fill(2.0)
        wanted = step(x)
        other.wait_event(event)
        with other:
            seen = x.copy()
        event.synchronize()
        cupy.cuda.Device().synchronize()
        other.synchronize()
        assert same(seen, wanted), call
    assert "an event that outlives the call" in step.explain(), step.explain()


@pytest.mark.parametrize("waits", [False, True])
@lines(
    *("with other:\n        ", "other.use()\n    "),
    more=("with cupy.cuda.Stream(null=True):\n        ", "with cupy.cuda.Stream.null:\n        "),
)
def test_work_on_a_stream_outside_of_the_capture_runs_once(
    make: Make, cupy: Any, arr: Any, line: str, waits: bool
) -> None:
    space = {"cupy": cupy, "count": cupy.zeros(2, "f4"), "other": cupy.cuda.Stream()}
    exec(
        f"def f(x):\n    global count\n    y = x * {'float(x.sum())' if waits else '3.0'}\n"
        "    here = cupy.cuda.get_current_stream()\n    here.synchronize()\n"
        f"    {line}count += 1.0; other.synchronize()\n    here.use()\n    return y + count",
        space,
    )
    step = make(space["f"])
    for call in range(9):
        assert step(arr(1.0, 2.0)).get().tolist() == [4.0 + call, 7.0 + call]
    assert "makes a stream current" in step.explain() and not step.statistics().replays


@lines(
    *("float(x.sum())", "(x @ x).sum().get()", "asarray(held).get()[0]"),
    *("x[[1, 0]].get()[0]", "filled(x).get()[0]"),
)
def test_a_refusal_that_the_function_catches_is_in_no_graph(
    make: Make, cupy: Any, arr: Any, line: str
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
        x = arr(1.0, 2.0 + (call > 8))
        assert same(step(x), space["f"](x))


def test_errors_of_a_product_are_those_of_the_call(make: Make, cupy: Any, arr: Any) -> None:
    count = cupy.zeros(2, "f4")

    def f(x: Any) -> Any:
        nonlocal count
        count += 1.0
        return x @ None

    step = make(f)
    for call in range(9):
        with pytest.raises(TypeError):
            step(arr(1.0, 2.0))
        assert count.get().tolist() == [call + 1.0] * 2


@pytest.mark.parametrize("joined", [False, True])
def test_another_stream_at_a_read(make: Make, cupy: Any, arr: Any, joined: bool) -> None:
    """`joined`: the stream that reads has waited for the other one.  A capture cannot end
    otherwise, also one that has work of the other stream alone."""
    other = cupy.cuda.Stream(non_blocking=True)

    def f(x: Any) -> Any:
        y, total = x * 2.0, float(x.sum())
        here = cupy.cuda.get_current_stream()
        other.wait_event(here.record())
        with other:
            z = y + 1.0
        if joined:
            here.wait_event(other.record())
        total += float(x.get()[0])
        if not joined:
            other.synchronize()
        return z * total

    step = make(f, guard=False)
    for call in range(12):
        x = arr(1.0, 2.0 + (call > 8))
        assert same(step(x), f(x)), call
    assert bool(step.statistics().replays) is joined, step.explain()
    assert joined or "forked from the capture was not joined" in step.explain()


@ON_HOST
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


def test_memory_that_is_unknown_is_not_written_twice(make: Make, cupy: Any, arr: Any) -> None:
    """Without guards nothing says that the function uses it, so no replay could take it back."""
    count = cupy.zeros(2, "f4")

    def f(x: Any) -> Any:
        nonlocal count
        count += 1.0
        return x * (2.0 if float(x.sum()) > 5.0 else 3.0)

    step = make(f, guard=False)
    for call in range(20):
        value = 1.0 if call < 9 else 1.0 + 4.0 * (call % 2)
        found = step(arr(value, 2.0)).get().tolist()
        factor = 2.0 if value > 1.0 else 3.0
        assert found == [value * factor, 2.0 * factor]
        assert count.get().tolist() == [call + 1.0] * 2
    assert "neither an argument nor known to be used" in step.explain(), step.explain()


@pytest.mark.parametrize("written", [False, True])
def test_what_an_operation_of_cupy_only_reads_is_not_written(
    make: Make, cupy: Any, arr: Any, written: bool
) -> None:
    """The inputs of a ufunc; its output is written, also if it is an input."""
    hidden = arr(1.0, 2.0)

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
        np.testing.assert_array_equal(step(arr(*value)).get(), wanted)
        np.testing.assert_array_equal(hidden.get(), mirror)
    assert bool(step.statistics().replays) is not written, step.explain()


@ON_HOST
def test_memory_of_no_array_ends_the_chain(make: Make, cupy: Any, device: Device) -> None:
    hidden = device.zeros(2, "f4")

    def f(x: Any) -> Any:
        place = cupy.cuda.MemoryPointer(x.data.mem, 0)
        place.ptr = hidden.address
        counter = cupy.ndarray(2, "f4", place)
        counter += 1.0
        del counter
        return x * (2.0 if float(x.sum()) > 5.0 else 3.0)

    step = make(f, guard=False)
    stream = device.create_stream()
    for call in range(12):
        x = cupy.asarray([1.0 + 4.0 * (call > 8), 2.0])
        step(x).get()
        np.testing.assert_array_equal(hidden.to_numpy(stream), [call + 1.0] * 2)
    assert "points at memory that is of no array of CuPy" in step.explain(), step.explain()


def test_a_failed_capture_frees_no_memory_of_other_graphs(make: Make, cupy: Any, arr: Any) -> None:
    """What is free in the pool of captures is what their graphs write in each replay."""

    def f(x: Any, waits: bool) -> Any:
        y = (x * 2.0 + 1.0) * 3.0
        if waits:
            _ = cupy.cuda.get_current_stream().done
        return y + 1.0

    step = make(f)
    x = arr(1.0, 2.0)
    for waits in [False] * 3 + [True] * 8:
        assert step(x, waits).get().tolist() == [10.0, 16.0]
    others = [arr(777.0, 777.0) for _ in range(64)]
    for _ in range(3):
        assert step(x, False).get().tolist() == [10.0, 16.0]
    assert {float(value) for other in others for value in other.get()} == {777.0}
    assert step.statistics().replays == 5, step.explain()
