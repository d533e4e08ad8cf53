"""What a function changes and reads of the host: objects whose whole state counts, captures that
fail, numbers that are others at each call, and generators that are given a seed."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.errors import EagerRunError, InputError
from ostinato.interop.graphed import Graphed
from ostinato.interop.reading import recheck
from tests.interop.library import Array, Lib, Stateful, graphed

Make = Callable[..., Graphed]


@pytest.fixture(params=["compiled", "in Python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether calls like the last are found in C or by their keys."""
    found: str = request.param
    if found == "in Python":
        monkeypatch.setattr(recheck, "_extension", None)
    elif not recheck.compiled():
        pytest.skip("the extension was not built")
    return found


def ones(lib: Lib) -> Array:
    return lib.array(np.ones(4))


# ---------------------------------------------------------------- objects whose whole state counts


def test_a_state_as_it_was_before_is_the_key_of_before(lib: Lib, make: Make, way: str) -> None:
    state = Stateful(lr=2.0, of={"scale": 1.0})
    step = make(lambda x: x.line(state.lr * state.of["scale"]))
    for lr in (2.0, 2.0, 2.0, 3.0, 3.0, 3.0) * 3:
        state.lr = float(str(lr))  # another object of the same value
        np.testing.assert_array_equal(step(ones(lib)).numpy(), [lr] * 4)
    statistics = step.statistics()
    assert (statistics.captures, statistics.replays) == (2, 16), step.explain()


def test_states_that_hold_each_other_and_are_gone(lib: Lib, make: Make) -> None:
    class Model:
        part = Stateful(by=2.0)

        def forward(self, x: Array) -> Array:
            return x.line(self.part.by)

    model = Model()
    step = make(model.forward)
    for number in range(300):
        other = Stateful(by=float(number % 2))
        model.part = Stateful(by=float(number % 2), other=other)
        other.other = model.part if number % 3 else None
        np.testing.assert_array_equal(step(ones(lib)).numpy(), [number % 2] * 4)
    assert step._guards is not None and len(step._guards._known) < 100


def test_a_state_that_a_static_argument_holds(lib: Lib, make: Make, way: str) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.weight, self.state = ones(lib), Stateful(lr=2.0)

    trainer = Trainer()
    step = make(lambda x, of: x.line(of.state.lr), static=("of",))
    for lr in (2.0, 2.0, 2.0, 3.0, 3.0, 3.0):
        trainer.state.lr = lr
        np.testing.assert_array_equal(step(ones(lib), trainer).numpy(), [lr] * 4)
    assert step.statistics().captures == 2


def test_a_state_that_the_function_moves_names_what_and_where(lib: Lib, make: Make) -> None:
    schedule = Stateful(steps=0, of={"lr": 2.0})
    rate = Stateful(lr=1.0)

    def f(x: Array) -> Array:
        schedule.steps += 1
        schedule.of["lr"] = rate.lr = 1.0 / schedule.steps
        return x.line(rate.lr)

    step = make(f)
    line = f.__code__.co_firstlineno + 1
    for number in range(1, 30):
        np.testing.assert_array_equal(step(ones(lib)).numpy(), np.full(4, 1 / number, np.float32))
    reason = step.statistics().keys[-1].reason
    assert f"schedule.steps at {__file__}:{line}, {line + 1}" in reason, reason
    assert f"rate.lr, schedule.of['lr'] at {__file__}:{line + 1}, {line + 2}" in reason
    assert len(step.statistics().keys) <= 3, step.explain()


# ---------------------------------------------------------------- captures that fail


def test_an_attached_array_of_a_capture_that_fails(lib: Lib, make: Make) -> None:
    """What else is put back is in test_guards_random.py."""
    weight = ones(lib)

    def f(x: Array) -> Array:
        if weight.attached is not None:
            raise RuntimeError("it was entered twice")
        weight.attached = weight if lib.capturing() else ones(lib)
        by = float(x.numpy()[0])  # waits, which no capture may
        weight.attached = None
        return x.line(by)

    step = make(f)
    for number in range(5):
        x = lib.array(np.full(4, float(number)))
        np.testing.assert_array_equal(step(x).numpy(), [float(number**2)] * 4)
    (line,) = step.statistics().keys
    assert lib.captures == 1 and "900" in line.reason and "could not be" not in line.reason


Foreign: Any = type("Foreign", (), {"__module__": "numpy"})
"""A class of a package, whose numbers no key holds."""


def test_a_static_argument_is_as_it_was_before_a_capture_that_failed(lib: Lib, make: Make) -> None:
    cache = Foreign()
    cache.length, cache.keys, cache.of = 0, ones(lib), [{"more": 0}]

    def f(x: Array, cache: Any) -> Array:
        cache.length += 1
        cache.of[0]["more"] += 1
        return x.line(float(x.numpy()[0]))

    step = make(f, static=("cache",))
    for number in range(1, 5):
        step(ones(lib), cache)
        assert cache.length == cache.of[0]["more"] == number
    assert lib.captures == 1


def test_a_state_that_cannot_be_put_back_is_named(lib: Lib, make: Make) -> None:
    masked = np.ma.masked_array([1.0, 2.0], [False, False])

    def f(x: Array) -> Array:
        by = float(masked.sum())
        if x.lib.capturing():
            masked[0] = np.ma.masked
            x.numpy()
        return x.line(by)

    step = make(f)
    for _ in range(4):
        step(ones(lib))
    reasons = [line.reason for line in step.statistics().keys]  # the second is of what was left
    assert "could not be put back (masked at " in reasons[0], reasons
    assert lib.captures == len(reasons) == 2 and "put back" not in reasons[1]


class Twice(Lib):
    """Captures a second time if the first one fails, as PyTorch's may."""

    def capture(self, work: Callable[[ost.Stream], Any]) -> tuple[ost.Graph, Any]:
        self.fail = "this one cannot"
        with pytest.raises(Exception, match="this one cannot"):
            super().capture(work)
        self.fail = ""
        return super().capture(work)


def test_each_try_of_a_capture_begins_where_the_first_one_did(
    host_device: Device, make: Make
) -> None:
    lib = Twice(host_device)
    counts = Foreign()
    counts.calls = 0

    def f(x: Array, given: Any) -> Array:
        given.calls += 1
        return x.line(float(given.calls))

    with graphed(f, lib, static=("given",)) as step:
        step(ones(lib), counts)
        assert counts.calls == 1
        step(ones(lib), counts)  # captured, by the second try
        assert lib.captures == 2 and counts.calls == 2


def test_what_a_graphed_function_in_the_function_uses_is_put_back(lib: Lib, make: Make) -> None:
    calls = [0]

    def inner(x: Array) -> Array:
        return x.line(float(calls[0]))

    inside = make(inner)

    def f(x: Array) -> Array:
        inside.count(1)
        by = float(x.numpy()[0])
        inside.count(-1)
        return x.line(by)

    def count(by: int) -> None:
        calls[0] += by

    inside.count = count  # type: ignore[attr-defined]
    step = make(f)
    for _ in range(4):
        step(ones(lib))
        assert calls == [0]
    assert lib.captures == 1


def test_what_others_change_during_a_capture_that_fails_stays(lib: Lib, make: Make) -> None:
    shared = types.SimpleNamespace(mine=0, theirs=0)
    capture = lib.capture

    def disturbed(work: Any) -> Any:
        shared.theirs += 1
        try:
            return capture(work)
        finally:
            shared.theirs += 1

    lib.capture = disturbed  # type: ignore[method-assign]

    def f(x: Array) -> Array:
        shared.mine += 1
        by = float(x.numpy()[0]) + 0 * shared.theirs
        shared.mine -= 1
        return x.line(by)

    step = make(f)
    for _ in range(3):
        step(ones(lib))
    assert (shared.mine, shared.theirs) == (0, 2)


# ---------------------------------------------------------------- generators


def test_a_generator_that_is_given_a_seed(lib: Lib, make: Make) -> None:
    def f(x: Array) -> Array:
        if lib.state > 5:
            lib.seed(0)
        lib.state += 1
        return x.line(float(lib.state))

    lib.state = 8
    step = make(f, guard=False)
    np.testing.assert_array_equal(step(ones(lib)).numpy(), [1.0] * 4)
    lib.state = 9
    np.testing.assert_array_equal(step(ones(lib)).numpy(), [1.0] * 4)
    line = f.__code__.co_firstlineno + 2
    assert lib.captures == 0 and f"of the generator at {__file__}:{line})" in step.explain()


# ---------------------------------------------------------------- values that are others each time


def values_of(step: Graphed) -> list[str]:
    return [line.words for line in step.statistics().keys]


def test_a_number_that_is_another_one_at_each_call_is_one_key(
    lib: Lib, make: Make, way: str
) -> None:
    step = make(lambda x, position: x.line(2.0, float(position)))
    for position in range(500):
        found = step(ones(lib), position)
        np.testing.assert_array_equal(found.numpy(), [2.0 + position] * 4)
    statistics = step.statistics()
    assert values_of(step) == ["x=f4[4], position=…"]
    assert (statistics.calls, statistics.eager, lib.captures) == (500, 500, 0)
    (line,) = statistics.keys
    assert "position had another value in each of 8 keys" in line.reason
    assert "give it as an array" in line.reason and len(step.explain().splitlines()) == 2


def test_keys_with_a_graph_stay_when_others_like_them_are_folded(
    lib: Lib, make: Make, way: str
) -> None:
    step = make(lambda x, by: x.line(float(by)))
    for _ in range(4):
        step(ones(lib), 1000)
    for by in range(100):
        np.testing.assert_array_equal(step(ones(lib), by).numpy(), [by] * 4)
        np.testing.assert_array_equal(step(ones(lib), 1000).numpy(), [1000] * 4)
    assert lib.captures == 1 and step.statistics().replays == 103
    assert sorted(values_of(step)) == ["x=f4[4], by=1000", "x=f4[4], by=…"]


@pytest.mark.parametrize("layers", [4, 8, 9, 32])
def test_values_that_come_again_have_graphs(lib: Lib, make: Make, layers: int) -> None:
    """A block that is told which layer it is."""
    step = make(lambda x, layer: x.line(float(layer)))
    for _ in range(5):
        for layer in range(layers):
            np.testing.assert_array_equal(step(ones(lib), layer).numpy(), [layer] * 4)
    assert lib.captures == layers and step.statistics().calls == 5 * layers
    assert step.statistics().replays >= 2 * layers


def test_several_values_that_change_at_once(lib: Lib, make: Make) -> None:
    state = Stateful(groups=[{"lr": 1.0}, {"lr": 2.0}])
    scale = types.SimpleNamespace(by=1.0)

    def f(x: Array, *, position: int) -> Array:
        first, second = state.groups
        return x.line(first["lr"] * second["lr"] * scale.by, position)

    step = make(f)
    for number in range(100):
        state.groups[0]["lr"], state.groups[1]["lr"], scale.by = number / 2, number / 4, number
        found = step(ones(lib), position=number)
        np.testing.assert_array_equal(found.numpy(), np.full(4, number**3 / 8 + number, "f4"))
    (key,) = [key for key in values_of(step) if "…" in key]
    words = ["state.groups[0]['lr']=…", "state.groups[1]['lr']=…", "scale.by=…"]
    assert key.startswith("x=f4[4], position=…, ") and all(word in key for word in words), key
    assert len(values_of(step)) < 9, step.explain()


def test_a_function_without_arguments_whose_numbers_change(lib: Lib, make: Make) -> None:
    x, state = ones(lib), Stateful(lr=1.0)
    step = make(lambda: x.line(state.lr))
    for number in range(100):
        state.lr = float(number)
        np.testing.assert_array_equal(step().numpy(), [number] * 4)
    assert values_of(step) == ["state.lr=…"]


def test_other_arrays_and_other_containers_are_not_folded(lib: Lib, make: Make) -> None:
    step = make(lambda x, more: x.line(2.0))
    for size in range(1, 30):
        step(lib.array(np.ones(size)), [1] * size)
    assert len(values_of(step)) == 29


def test_strict_functions_may_have_many_values_but_not_endlessly_many(lib: Lib, make: Make) -> None:
    step = make(lambda x, layer: x.line(float(layer)), strict=True)
    for _ in range(4):
        for layer in range(40):
            step(ones(lib), layer)
    assert lib.captures == 40
    with pytest.raises(EagerRunError, match="layer had another value"):
        for layer in range(40, 500):
            step(ones(lib), layer)


def test_keys_that_raise_are_not_folded(lib: Lib, make: Make) -> None:
    def f(x: Array, by: int) -> Array:
        out = x.line(float(by))
        out.wanted = True
        return out

    step = make(f)
    for by in range(40):
        with pytest.raises(InputError, match="needs gradients"):
            step(ones(lib), by)


def test_folds_are_dropped_with_the_oldest_keys(
    lib: Lib, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ostinato.interop import graphed

    monkeypatch.setattr(graphed, "_MOST_LINES", 8)
    step = make(lambda x, by: x.line(float(by)))
    for size in range(1, 30):
        for by in range(20):
            found = step(lib.array(np.ones(size)), by)
            np.testing.assert_array_equal(found.numpy(), [by] * size)
    assert len(values_of(step)) <= 9
    assert sum(map(len, step._folds._folds.values())) <= 9


def test_what_was_folded_is_forgotten_with_the_rest(lib: Lib, make: Make) -> None:
    step = make(lambda x, by: x.line(float(by)))
    for by in range(50):
        step(ones(lib), by)
    step.forget()
    for _ in range(3):
        step(ones(lib), 3)
    assert values_of(step) == ["x=f4[4], by=3"] and lib.captures == 1


# ---------------------------------------------------------------- gradients


@pytest.mark.parametrize("adding", [False, True])
def test_what_a_replay_attaches_to_an_array(lib: Lib, make: Make, way: str, adding: bool) -> None:
    """As eager calls leave it, by whatever key, and whatever the caller attached meanwhile."""

    def using(weight: Array) -> Callable[[Array, int], Array]:
        def f(x: Array, by: int) -> Array:
            _ = weight.shape
            if adding and weight.attached is not None:
                weight.attached.shift(float(by))
            else:
                weight.attached = x.line(float(by))
            return x.line(1.0)

        return f

    mine, theirs = ones(lib), ones(lib)
    step, f = make(using(mine)), using(theirs)
    for number in range(40):
        x = lib.array(np.full(4, float(number)))
        by = 2 + number // 4 % 2
        step(x, by)
        f(x, by)
        found, wanted = mine.attached, theirs.attached
        assert found is not None and wanted is not None
        np.testing.assert_array_equal(found.numpy(), wanted.numpy())
        if number in (9, 10, 23):
            mine.attached = theirs.attached = None
        if number == 30:
            mine.attached, theirs.attached = ones(lib), ones(lib)
    statistics = step.statistics()
    assert statistics.replays >= 25 and not statistics.quarantined, step.explain()
    assert statistics.captures == 2 or adding
    if way == "compiled" and not adding:
        assert step._hot
