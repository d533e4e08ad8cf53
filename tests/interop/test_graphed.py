"""`Graphed` without any array library: keys, warm-up, capture, replay, padding, guards, checks."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import ostinato as ost
from ostinato.driver import launcher
from ostinato.errors import ClosedError, EagerRunError, InputError, NotAvailableError
from ostinato.interop.graphed import Graphed
from ostinato.interop.reading import recheck
from ostinato.interop.reading.library import NotGraphable, own_cache
from ostinato.interop.reading.padding import Padding
from tests.interop import library
from tests.interop.library import Array, Lib, SubArray, graphed

Make = Callable[..., Graphed]


def numbers(n: int = 4, start: float = 0.0) -> Any:
    return np.arange(start, start + n, dtype=np.float32)


def test_eager_then_captured_then_replayed(lib: Lib, make: Make) -> None:
    def double(x: Array) -> Array:
        return x.line(2.0, 1.0)

    step = make(double)
    results = [step(lib.array(numbers(4, start))) for start in range(5)]
    for start, result in enumerate(results):
        np.testing.assert_array_equal(result.numpy(), 2 * numbers(4, start) + 1)
    (line,) = step.statistics().keys
    assert (line.calls, line.eager, line.captures, line.replays) == (5, 1, 1, 4)
    assert line.decision == "replayed" and not line.reason
    assert "double" in step.explain() or "x=f4[4]" in step.explain()
    assert "line" in step.inspect()


def called(call: Callable[[], object]) -> list[str]:
    """The functions of this package that a call calls, without those that the library and the host
    driver call."""
    source, names = str(Path(ost.__file__).parent), list[str]()
    apart = library.__file__, str(Path(source, "driver", "host"))
    below = 0

    def note(frame: FrameType, event: str, _: object) -> None:
        nonlocal below
        name = frame.f_code.co_filename
        if event == "return" and below:
            below -= 1
        elif event == "call" and (below or name.startswith(apart)):
            below += 1
        elif event == "call" and name.startswith(source):
            names.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return names


def test_the_way_of_a_call_by_its_key(
    lib: Lib, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without what guards read.  Two functions belong to the host driver's nodes, of which no C
    code compares bytes."""
    step, x = make(lambda x: x.line(2.0), guard=False), lib.array(numbers())
    for _ in range(3):
        out = step(x)
    monkeypatch.setattr(lib, "new", lambda shape: out)  # nothing is set in the node then
    ways = []
    for _ in range(5):  # now and then a short way is looked for
        step._set_hot()
        ways.append(called(lambda: step(x)))
    shortest = min(ways, key=len)
    assert len(shortest) <= (14 if launcher.compiled() else 17), shortest
    assert step.statistics().replays == 7


@pytest.mark.skipif(not recheck.compiled(), reason="the extension was not built")
@pytest.mark.parametrize("graphs", [False, True])
def test_the_way_of_a_call_that_was_given_up(lib: Lib, make: Make, graphs: bool) -> None:
    """`graphs`: it is one key that has no graph, and not all of them."""

    def refused(x: Array) -> Array:
        if x.lib.capturing():
            raise NotGraphable("waits")
        return x.line(2.0)

    step, x = make(refused, graphs=graphs), lib.array(numbers())
    results = [step(x) for _ in range(4)]
    assert called(lambda: results.append(step(x))) == ["Graphed.__call__", "_Eager.call"]


def test_static_results_are_overwritten(lib: Lib, make: Make) -> None:
    step = make(lambda x: x.line(2.0), results="static")
    results = [step(lib.array(numbers(4, start))) for start in range(4)]
    assert results[1] is results[2] is results[3]


def test_another_shape_is_another_key(lib: Lib, make: Make) -> None:
    step = make(lambda x: x.line(3.0))
    for n in (4, 4, 5, 5, 4, 5):
        np.testing.assert_array_equal(step(lib.array(numbers(n))).numpy(), 3 * numbers(n))
    assert [line.captures for line in step.statistics().keys] == [1, 1]


@pytest.mark.parametrize(
    "values", [(1.0, 2.0, 1.0), (0.0, -0.0), (1, True, 1.0), (float("nan"), float("nan"))]
)
def test_plain_values_are_in_the_key(lib: Lib, make: Make, values: tuple[float, ...]) -> None:
    def f(x: Array, by: float) -> Array:
        assert type(by) in (int, bool, float)
        return x.line(float(by))

    step = make(f)
    for value in values * 3:
        with np.errstate(invalid="ignore"):
            wanted = numbers() * np.float32(value) + np.float32(0)
        assert step(lib.array(numbers()), value).numpy().tobytes() == wanted.tobytes()
    distinct = {(type(v), repr(v)) for v in values}
    assert len(step.statistics().keys) == len(distinct)


@dataclasses.dataclass
class Pair:
    one: Array
    rest: dict[str, list[Array]]


def test_nested_arguments_and_results(lib: Lib, make: Make) -> None:
    def f(pair: Pair, *, by: float) -> dict[str, Any]:
        (other,) = pair.rest["more"]
        return {"a": (pair.one.line(by), 7), "b": [other.line(by)], "c": Pair(other.line(1.0), {})}

    step = make(f)
    for start in range(4):
        pair = Pair(lib.array(numbers(3, start)), {"more": [lib.array(numbers(2, start))]})
        found = step(pair, by=2.0)
        np.testing.assert_array_equal(found["a"][0].numpy(), 2 * numbers(3, start))
        assert found["a"][1] == 7 and list(found) == ["a", "b", "c"]
        np.testing.assert_array_equal(found["b"][0].numpy(), 2 * numbers(2, start))
        assert isinstance(found["c"], Pair)
        np.testing.assert_array_equal(found["c"].one.numpy(), numbers(2, start))
    assert step.statistics().replays == 3


def test_modes_are_in_the_key(lib: Lib, make: Make) -> None:
    step = make(lambda x: x.line(2.0 if lib.mode == "plain" else 3.0))
    for mode, by in (("plain", 2), ("plain", 2), ("other", 3), ("other", 3), ("plain", 2)):
        lib.mode = mode
        np.testing.assert_array_equal(step(lib.array(numbers())).numpy(), by * numbers())


def test_an_unknown_argument_runs_eagerly(lib: Lib, make: Make) -> None:
    class Odd:
        by = 2.0

    step = make(lambda x, odd: x.line(odd.by))
    for _ in range(3):
        np.testing.assert_array_equal(step(lib.array(numbers()), Odd()).numpy(), 2 * numbers())
    (line,) = step.statistics().keys
    assert line.eager == 3 and "Odd" in line.reason and "test_graphed.py" in line.reason


def test_subclasses_and_other_places_run_eagerly(lib: Lib, make: Make) -> None:
    step = make(lambda x: x.line(2.0))
    sub = SubArray(lib, (4,))
    far = lib.array(numbers())
    far.place = "the CPU"
    for x in (sub, sub, far, far):
        step(x)
    reasons = [line.reason for line in step.statistics().keys]
    assert "subclass SubArray" in reasons[0] and "the CPU" in reasons[1]
    assert lib.captures == 0


def test_a_capture_that_fails_costs_speed_alone(lib: Lib, make: Make) -> None:
    def f(x: Array) -> Array:
        out = x.line(2.0)
        out.numpy()  # waits
        return out

    step = make(f)
    for start in range(4):
        np.testing.assert_array_equal(
            step(lib.array(numbers(4, start))).numpy(), 2 * numbers(4, start)
        )
    (line,) = step.statistics().keys
    assert line.eager == 4 and "status 900" in line.reason and lib.captures == 1
    assert step.statistics().quarantined


def test_strict_raises_instead(lib: Lib, make: Make) -> None:
    step = make(lambda x: x.line(2.0).numpy(), strict=True)
    with pytest.raises((EagerRunError, ost.OstinatoError)):
        for _ in range(3):
            step(lib.array(numbers()))


def test_graphs_that_are_switched_off(
    lib: Lib, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSTINATO_NO_GRAPHS", "1")
    step = make(lambda x: x.line(2.0), strict=True)
    for _ in range(3):
        np.testing.assert_array_equal(step(lib.array(numbers())).numpy(), 2 * numbers())
    assert lib.captures == 0 and "switched off (OSTINATO_NO_GRAPHS)" in step.explain()


def test_an_exception_of_the_function_comes_through(lib: Lib, make: Make) -> None:
    def f(x: Array, good: bool) -> Array:
        if not good:
            raise KeyError("no")
        return x.line(2.0)

    step = make(f)
    for _ in range(3):
        with pytest.raises(KeyError):
            step(lib.array(numbers()), False)
        np.testing.assert_array_equal(step(lib.array(numbers()), True).numpy(), 2 * numbers())


def test_an_exception_in_the_capture_runs_eagerly(lib: Lib, make: Make) -> None:
    step = make(lambda x: x.line(2.0))
    lib.fail = "in the middle"
    for _ in range(3):
        np.testing.assert_array_equal(step(lib.array(numbers())).numpy(), 2 * numbers())
    assert "in the middle" in step.statistics().keys[0].reason
    lib.fail = ""
    assert step.forget() == 0
    for _ in range(3):
        step(lib.array(numbers()))
    assert step.statistics().replays == 2


def test_written_arguments_are_copied_back(lib: Lib, make: Make) -> None:
    step = make(lambda x, y: (x.shift(1.0), y.line(2.0)))
    x, y = lib.array(numbers()), lib.array(numbers())
    for time in range(1, 5):
        step(x, y)
        np.testing.assert_array_equal(x.numpy(), numbers() + time)
        np.testing.assert_array_equal(y.numpy(), numbers())
    assert step.statistics().replays == 3


# ------------------------------------------------------------------------------ what it uses


class Model:
    def __init__(self, lib: Lib) -> None:
        self.by, self.weight = 2.0, lib.array([10.0])

    def forward(self, x: Array) -> tuple[Array, Array]:
        return x.line(self.by), self.weight.line(1.0)


def test_a_weight_that_moved_is_bound_anew(lib: Lib, make: Make) -> None:
    model = Model(lib)
    step = make(model.forward)
    for value in (10.0, 10.0, 10.0, 20.0, 30.0, 30.0):
        if value != float(model.weight.numpy()[0]):
            model.weight = lib.array([value])
        np.testing.assert_array_equal(step(lib.array(numbers()))[1].numpy(), [value])
    statistics = step.statistics()
    assert (statistics.captures, statistics.rebound) == (1, 2)


def test_static_arguments_are_not_copied(lib: Lib, make: Make) -> None:
    def f(x: Array, cache: dict[str, Array]) -> Array:
        cache["k"].shift(1.0)
        return cache["k"].line(1.0)

    step = make(f, static=("cache",))
    x, one, two = lib.array(numbers()), lib.array(numbers()), lib.array(numbers(4, 100))
    for time in range(1, 4):
        np.testing.assert_array_equal(step(x, {"k": one}).numpy(), numbers() + time)
        np.testing.assert_array_equal(one.numpy(), numbers() + time)
    for time in range(1, 4):  # another cache: bound anew
        np.testing.assert_array_equal(step(x, {"k": two}).numpy(), numbers(4, 100) + time)
    for time in range(4, 6):  # the argument is the cache itself: a copy of it would not be written
        np.testing.assert_array_equal(step(two, {"k": two}).numpy(), numbers(4, 100) + time)
    assert (step.statistics().captures, step.statistics().rebound) == (1, 1)


def test_static_arguments_that_change_places(lib: Lib, make: Make) -> None:
    """Two buffers, one read and the other written, in turns: the graph is bound anew each time."""

    def f(old: Array, new: Array) -> Array:
        old.lib.launch("line", new.buffer, old.buffer, old.size, 1.0, 1.0)
        return new.line(1.0)

    step = make(f, static=("old", "new"))
    pair = [lib.array(numbers()), lib.array(numbers())]
    for time in range(1, 8):
        np.testing.assert_array_equal(step(*pair).numpy(), numbers() + time)
        pair.reverse()
    statistics = step.statistics()
    assert (statistics.captures, statistics.rebound) == (1, 5), step.explain()


def test_a_graph_that_does_not_fit_is_gone_before_another_takes_memory(
    lib: Lib, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = make(lambda x, y: (x.line(1.0), y.line(1.0)), static=("x", "y"))
    a, b = lib.array(numbers()), lib.array(numbers())
    there: list[bool] = []
    capture = lib.capture

    def noted(work: Any) -> Any:
        there.extend([line.captured() is not None for line in step._lines.values()])
        return capture(work)

    monkeypatch.setattr(lib, "capture", noted)
    for arrays in [(a, b), (a, b), (a, a), (b, a)]:  # which of them share memory differs
        step(*arrays)
        lib.device.synchronize()
        lib.device.context.collect()
    assert there == [False] * 3 and step.statistics().captures == 3


def test_views_of_one_memory_are_told_apart(lib: Lib, make: Make) -> None:
    whole = lib.array(numbers(256))
    views = [Array(lib, (4,), whole.buffer.view(offset=256 * i, shape=(4,))) for i in range(3)]
    step = make(lambda x: x.line(1.0), static=("x",))
    for view in views * 3:
        np.testing.assert_array_equal(step(view).numpy(), view.numpy())
    assert step.statistics().replays == 6, step.explain()


def test_arrays_that_share_memory_otherwise_than_before(lib: Lib, make: Make) -> None:
    def f(x: Array, y: Array, z: Array) -> tuple[Array, ...]:
        return x.line(1.0), y.line(1.0), z.line(1.0)

    step = make(f, static=("x", "y", "z"))
    a, b, c, d = (lib.array(numbers(4, 10 * i)) for i in range(4))
    for arrays in [(a, b, a), (a, b, a), (c, c, d), (c, d, d), (d, c, d), (a, b, c)]:
        found = step(*arrays)
        for one, other in zip(found, arrays, strict=True):
            np.testing.assert_array_equal(one.numpy(), other.numpy())
    statistics = step.statistics()
    assert (statistics.captures, statistics.rebound) == (5, 0), step.explain()
    (again,) = [why for why in statistics.capture_reasons if "share" in why]
    assert statistics.capture_reasons[again] == 4 and again in step.explain()


class Cache:
    def __init__(self, lib: Lib) -> None:
        self.layers = [lib.array(numbers()), lib.array(numbers())]


def test_static_objects_and_results_that_are_static(lib: Lib, make: Make) -> None:
    def f(x: Array, cache: Cache) -> tuple[Array, Cache, Array]:
        cache.layers[0].shift(1.0)
        return x.line(2.0), cache, cache.layers[0]

    step = make(f, static=("cache",))
    cache = Cache(lib)
    for time in range(1, 5):
        found = step(lib.array(numbers()), cache)
        assert found[1] is cache and found[2] is cache.layers[0]
        np.testing.assert_array_equal(found[2].numpy(), numbers() + time)
    assert step.statistics().replays == 3


# ------------------------------------------------------------------------------ dynamic sizes


def padded(**axes: int) -> Padding:
    return Padding(axes, ost.PowersOfTwo(64))


def test_dynamic_sizes_share_a_graph(lib: Lib, make: Make) -> None:
    step = make(lambda x, by: x.line(by, 1.0), padding=padded(x=0))
    for n in (5, 6, 7, 8, 5, 3, 4):
        np.testing.assert_array_equal(step(lib.array(numbers(n)), 2.0).numpy(), 2 * numbers(n) + 1)
    assert [line.captures for line in step.statistics().keys] == [1, 1]


def test_a_full_bucket_first(lib: Lib, make: Make) -> None:
    step = make(lambda x: x.line(2.0), padding=padded(x=0))
    for n in (8, 8, 6, 5, 8):
        np.testing.assert_array_equal(step(lib.array(numbers(n))).numpy(), 2 * numbers(n))
    (line,) = step.statistics().keys
    assert line.eager == 2  # the warm-up, and the one that learned


def test_a_size_over_the_limit_runs_eagerly(lib: Lib, make: Make) -> None:
    step = make(lambda x: x.line(2.0), padding=padded(x=0))
    for _ in range(3):
        np.testing.assert_array_equal(step(lib.array(numbers(65))).numpy(), 2 * numbers(65))
    assert "limit" in step.statistics().keys[0].reason


def test_padding_holds_what_the_caller_says(lib: Lib, make: Make) -> None:
    kept: list[Array] = []

    def f(x: Array) -> Array:
        kept.append(x)
        return x.line(1.0)

    step = make(f, padding=padded(x=0), fill={"x": -1.0}, guard=False)
    for n in (7, 7, 6, 5):
        step(lib.array(numbers(n)))
        if lib.captures:
            np.testing.assert_array_equal(kept[-1].numpy()[n:], [-1.0] * (8 - n))


def test_a_check_poisons_the_padding_of_each_argument(lib: Lib, make: Make) -> None:
    def last_first(x: Array, y: Array) -> tuple[Array, Array]:
        """Reads the first element behind the real ones of y into a result of x."""
        out = x.line(1.0)
        view = Array(lib, (1,), y.buffer.view(offset=4 * 5, shape=(1,)))
        out.lib.launch("line", out.buffer, view.buffer, 1, 1.0, 0.0)
        return out, y.line(1.0)

    step = make(last_first, padding=padded(x=0, y=0), verify="first", guard=False)
    for _ in range(4):  # with padding of x
        step(lib.array(numbers(7)), lib.array(numbers(8)))
    assert not any(line.reason for line in step.statistics().keys), step.explain()
    y = lib.array(numbers(5))
    y.buffer = lib.array(numbers(8)).buffer
    for _ in range(3):
        step(lib.array(numbers(7)), y)
    assert any("padding" in line.reason for line in step.statistics().keys), step.explain()


# ------------------------------------------------------------------------------ checks


def test_checks_find_a_wrong_replay(lib: Lib, make: Make) -> None:
    hidden = np.full(4096, 2.0)  # larger than what a guard compares
    f = lambda x: x.line(float(hidden[0]))  # noqa: E731

    step = make(f, verify=2)
    x = lib.array(numbers())
    for _ in range(4):
        np.testing.assert_array_equal(step(x).numpy(), 2 * numbers())
    hidden[:] = 3.0
    answers = [step(x).numpy()[1] for _ in range(4)]
    assert answers[-1] == 3.0
    (line,) = step.statistics().keys
    assert "a check failed" in line.reason and "result differs" in line.reason
    assert "(kernels that point at it: node 1 line)" in line.reason
    node = "the first node to differ is node 1 (line), argument 0 at [1]: 3.0 in a capture made now"
    assert f"{node}, 2.0 in the graph (another argument: " in line.reason


@pytest.mark.parametrize("ranks", [False, True])
def test_a_search_for_the_first_node_leaves_memory_as_the_call_did(
    lib: Lib, make: Make, monkeypatch: pytest.MonkeyPatch, ranks: bool
) -> None:
    """With other processes, which would have to run the same nodes, nothing is searched for."""
    monkeypatch.setattr(Lib, "ranks", ranks)
    hidden = np.full(4096, 2.0)

    def f(x: Array, c: Array) -> Array:
        c.shift(1.0)
        return c.line(float(hidden[0]))

    step = make(f, static=("c",), verify=1)
    x, c = lib.array(numbers()), lib.array(numbers())
    for time in range(1, 6):
        if time == 4:
            hidden[:] = 3.0
        wanted = (2 if time < 4 else 3) * (numbers() + time)
        np.testing.assert_array_equal(step(x, c).numpy(), wanted)
        np.testing.assert_array_equal(c.numpy(), numbers() + time)
        np.testing.assert_array_equal(x.numpy(), numbers())
    (line,) = step.statistics().keys
    assert ("the first node to differ is node 2 (line)" in line.reason) is not ranks


def test_a_failed_check_leaves_the_gradients_of_the_eager_run(lib: Lib, make: Make) -> None:
    """A search for the first node would attach those of its own capture."""
    hidden, weight = np.full(4096, 2.0), lib.array(np.ones(4))

    def f(x: Array) -> Array:
        weight.attached = x.line(float(hidden[0]))
        return x.line(2.0)

    step = make(f, verify=1)
    x = lib.array(numbers())
    for time in range(1, 6):
        if time == 4:
            hidden[:] = 3.0
        weight.attached = None
        step(x)
        assert weight.attached is not None
        wanted = (2 if time < 4 else 3) * numbers()
        np.testing.assert_array_equal(weight.attached.numpy(), wanted)
    (line,) = step.statistics().keys
    assert "the gradient of an array differs" in line.reason and "first node" not in line.reason


# ------------------------------------------------------------------------------ the rest


def test_gradients_are_refused_or_run_eagerly(lib: Lib, make: Make) -> None:
    def f(x: Array) -> Array:
        out = x.line(2.0)
        out.wanted = True
        return out

    with pytest.raises(InputError, match="no_grad"):
        make(f)(lib.array(numbers()))
    step = make(f, gradients="eager")
    for _ in range(3):
        assert step(lib.array(numbers())).wanted
    assert "gradients" in step.statistics().keys[0].reason


def test_inside_a_capture_the_function_runs_plainly(lib: Lib, make: Make) -> None:
    inner = make(lambda x: x.line(2.0))
    outer = make(lambda x: inner(x).line(3.0))
    for start in range(4):
        np.testing.assert_array_equal(
            outer(lib.array(numbers(4, start))).numpy(), 6 * numbers(4, start)
        )
    # The call inside the capture is none of a key: it ran the function without a graph.
    assert inner.statistics().replays == 0 and outer.statistics().replays == 3


def test_another_stream_waits(lib: Lib, make: Make) -> None:
    step = make(lambda x: x.line(2.0))
    x = lib.array(numbers())
    for stream in (0, 0, 1, 1, 0):
        with lib.on(lib.streams[stream]):
            np.testing.assert_array_equal(step(x).numpy(), 2 * numbers())
    assert lib.waits == 2


def test_closed(lib: Lib, make: Make) -> None:
    with make(lambda x: x.line(2.0)) as step:
        for _ in range(3):
            step(lib.array(numbers()))
    assert step.closed and step.cache.closed
    with pytest.raises(ClosedError):
        step(lib.array(numbers()))


def test_options_are_checked(lib: Lib, make: Make) -> None:
    for wrong in (
        {"results": "view"},
        {"gradients": "yes"},
        {"verify": 0},
        {"static": ("nobody",)},
        {"padding": padded(nobody=0)},
    ):
        with pytest.raises(InputError):
            make(lambda x: x, **wrong)


def test_python_state_runs_eagerly_and_the_reason_names_it(lib: Lib, make: Make) -> None:
    counts, factor, weight = [0], 2.0, lib.array(numbers())

    def f(x: Array) -> Array:
        counts[0] += 1
        _ = weight
        return x.line(factor, float(counts[0]))

    step = make(f)
    for time in range(1, 6):
        np.testing.assert_array_equal(step(lib.array(numbers())).numpy(), 2 * numbers() + time)
    statistics = step.statistics()
    assert "changes Python state that it uses itself (counts[0] at " in statistics.keys[-1].reason
    assert statistics.captures == 0


def test_explain_says_what_stays_unseen(
    lib: Lib, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Work on the default stream, unless captures are made so that it breaks them."""
    step, x = make(lambda x: x.line(1.0)), lib.array(numbers())
    step(x)
    assert "default stream" not in step.explain()
    step(x)
    assert "OSTINATO_BLOCKING_CAPTURES=1 finds it" in step.explain()
    monkeypatch.setenv("OSTINATO_BLOCKING_CAPTURES", "1")
    assert "default stream" not in step.explain()


def test_a_function_that_is_given_no_budget_has_a_part_of_the_device(lib: Lib) -> None:
    total = lib.device.properties.total_memory
    for given, budget in ((None, total // 4), ("1 MiB", 1 << 20), (4096, 4096)):
        with own_cache(lib.device, given) as cache:
            assert cache.statistics().budget == budget


def test_without_a_device_every_call_is_eager_and_says_why(lib: Lib) -> None:
    """The library is not asked anything: it may have no stream and no mode to tell."""
    why = "there is no device"

    def made(**options: Any) -> Graphed:
        return graphed(lambda x, by=2.0: x * by, lib, unavailable=why, **options)

    def refused(*_: object) -> Any:
        raise AssertionError("the library was asked")

    step, strict = made(), made(strict=True)
    assert step.unavailable == why and why in step.explain()
    lib.capturing = lib.stream = lib.modes = refused  # type: ignore[method-assign]
    assert [step(x, by=3.0) for x in (1, 2, 3)] == [3, 6, 9]
    assert step.forget() == 0
    assert step(4) == 8
    with pytest.raises(EagerRunError, match=why):
        strict(4)
    (line,) = step.statistics().keys
    assert (line.calls, line.eager, line.captures) == (1, 1, 0)
    assert line.decision == "eager" and line.reason == why and why in step.explain()
    with pytest.raises(NotAvailableError, match=why):
        step.save()
    step.close()
    with pytest.raises(ClosedError, match="call the function itself"):
        step(4)
    strict.close()
