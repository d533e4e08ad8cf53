"""Functions that wait for the device in the middle: they replay as chains of graphs, and each call
has the answer and the effects of an eager call."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.driver.host.driver import HostDriver
from ostinato.errors import EagerRunError, StateLostError
from ostinato.interop.graphed import Graphed
from ostinato.interop.reading import records
from ostinato.interop.reading.conditions import Record, Scalar, UsedMemory, join
from ostinato.interop.reading.tails import ResultPlace
from tests.interop.library import ONE, SOURCE, Array, Lib

Make = Callable[..., Graphed]


@pytest.fixture(params=["on the host", "on the device"])
def lib(lib: Lib, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Lib:
    """A library whose functions may be chains, however long these take, and where values are
    compared."""
    lib.chains, lib.numbers = True, request.param == "on the device"
    monkeypatch.setattr(records, "_GAIN", float("inf"))
    return lib


def _key(step: Graphed, word: str = ": ") -> Any:
    """The record of the only chain."""
    (found,) = [line for line in step.statistics().keys if word in line.words]
    return found


def test_a_call_that_waits_is_replayed_between_its_waits(lib: Lib, make: Make) -> None:
    def function(x: Array) -> Array:
        lib.notes.append(None)
        y = x.line(2.0)
        if y.numpy().sum() > 0:
            y = y.line(1.0, 10.0)
        return y.line(1.0, 1.0)

    step = make(function)
    for value in range(1, 10):
        x = lib.array([value, 0.0])
        if value > 2:  # what the host sees is no part of the key
            x = lib.array([2.0, 0.0])
        expected = 2 * x.numpy() + 11
        np.testing.assert_array_equal(step(x).numpy(), expected)
    before = len(lib.notes)
    for _ in range(3):
        step(lib.array([2.0, 0.0]))
    assert len(lib.notes) == before, "a replay runs no Python"
    version = x.version
    step(x)
    assert x.version == version, "an argument that is read is not written"
    assert "waits at" in step.explain() and "test_chains.py" in step.explain()
    assert step.inspect().count("\n") > 4


def test_another_value_makes_another_chain_and_both_are_kept(lib: Lib, make: Make) -> None:
    def function(x: Array) -> Array:
        big = x.line(1.0).numpy()[0] > 5
        return x.line(3.0) if big else x.line(1.0, 100.0)

    step = make(function)
    for _ in range(6):
        for value in (1.0, 9.0):
            found = step(lib.array([value])).numpy()[0]
            assert found == (27.0 if value > 5 else 101.0)
    keys = [line for line in step.statistics().keys if "waits" in line.words]
    assert [line.captures for line in keys] == [1, 1]
    assert min(line.replays for line in keys) >= 2
    assert sum(line.calls for line in step.statistics().keys) == 12


def test_what_was_written_before_another_value_is_written_once(lib: Lib, make: Make) -> None:
    count = lib.array([0.0])

    def function(x: Array) -> Array:
        count.shift(1.0)
        seen = x.line(1.0).numpy()[0]
        count.shift(10.0 if seen > 5 else 20.0)
        return x.line(2.0)

    step = make(function)
    expected = 0.0
    for value in [1.0] * 8 + [9.0, 1.0, 9.0, 9.0, 7.0, 1.0] + [1.0, 9.0] * 8:
        hot = bool(step._hot)
        step(lib.array([value]))
        expected += 11.0 if value > 5 else 21.0
        assert count.numpy()[0] == expected
    assert hot, "no call went by a short way"


def test_a_static_result_is_an_argument_of_a_call_with_another_value(lib: Lib, make: Make) -> None:
    """The chain of the last value has written its result before it sees the value of this one."""

    def function(x: Array) -> Array:
        y = x.line(2.0)
        return y.line(1.0 / 1024) if y.numpy()[0] > 100 else y

    step = make(function, results="static")
    x = lib.array([1.0])
    value = 1.0
    for _ in range(60):
        x, value = step(x), value * (2.0 if value <= 50 else 2.0 / 1024)
        assert x.numpy()[0] == value
    assert step.statistics().replays > 30


def test_values_are_compared_bit_for_bit(lib: Lib, make: Make) -> None:
    def function(x: Array) -> Array:
        value = x.numpy()[0]
        return x.line(0.0, float(np.copysign(1.0, value)))

    step = make(function)
    for value in [0.0] * 6 + [-0.0, 0.0, -0.0, float("nan"), float("nan")]:
        found = step(lib.array([value])).numpy()[0]
        # 0 * NaN + 1 is NaN, also eagerly
        np.testing.assert_equal(found, np.float32(0.0 * value + np.copysign(1.0, value)))
    assert {line.captures for line in step.statistics().keys if "waits" in line.words} == {1}


def test_plain_values_in_the_result_are_never_those_of_another_call(lib: Lib, make: Make) -> None:
    """A replay would return those of the run that built it: what reads the clock, say."""
    clock = iter(range(100))
    tick = {"it": clock.__next__}.__getitem__

    def function(x: Array) -> Any:
        seen = float(x.numpy()[0])
        return x.line(2.0), seen, tick("it")()

    step = make(function, guard=False)
    for call in range(16):
        found, seen, now = step(lib.array([float(call % 2)]))
        assert (found.numpy()[0], seen) == (2.0 * (call % 2), call % 2)
        assert now >= call
    assert "plain values that may be other" in step.explain()


def test_values_that_never_repeat_end_the_chains(lib: Lib, make: Make) -> None:
    def function(x: Array) -> Array:
        return x.line(float(x.line(1.0).numpy()[0]))

    step = make(function)
    for value in range(1, 60):
        assert step(lib.array([float(value)])).numpy()[0] == value * value
    assert "is another one in most calls" in step.explain()
    assert step.statistics().cache.graphs == 0


def test_a_chain_that_is_not_faster_is_given_up_with_both_times(
    lib: Lib, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "_GAIN", 0.0)

    def function(x: Array) -> Array:
        x.numpy()
        return x.line(2.0)

    step = make(function)
    for _ in range(24):
        assert step(lib.array([3.0])).numpy()[0] == 6.0
    assert "as a chain (" in step.explain() and "and eagerly" in step.explain()
    assert step.statistics().cache.graphs == 0


def test_an_exception_in_the_run_that_builds_leaves_what_ran(lib: Lib, make: Make) -> None:
    count = lib.array([0.0])

    def function(x: Array) -> Array:
        x.shift(1.0)
        count.shift(1.0)
        if x.numpy()[0] > 5:
            raise KeyError("too big")
        return x.line(2.0)

    step = make(function)
    for call, value in enumerate([1.0] * 7 + [9.0, 1.0, 9.0, 9.0, 1.0]):
        x = lib.array([value])
        if value > 5:
            with pytest.raises(KeyError, match="too big"):
                step(x)
        else:
            assert step(x).numpy()[0] == 2 * (value + 1)
        assert x.numpy()[0] == value + 1
        assert count.numpy()[0] == call + 1


def test_a_chain_that_the_library_cannot_replay_still_gives_the_answer(
    lib: Lib, make: Make
) -> None:
    """The run that builds counts: it is not made again."""

    def function(x: Array) -> Array:
        lib.notes.append(None)
        x.numpy()
        return x.shift(1.0)

    step = make(function)
    for call in range(12):
        lib.unchained = "an operation that waits was not foreseen" if call < 8 else ""
        x, before = lib.array([3.0]), len(lib.notes)
        step(x)
        assert x.numpy()[0] == 4.0
        assert len(lib.notes) - before <= 2  # the capture that failed, and the eager run
    assert _key(step).replays >= 1


def test_work_that_writes_nobody_knows_what_before_a_wait_is_no_chain(lib: Lib, make: Make) -> None:
    lib.foreign = "kernel.py:1"

    def function(x: Array) -> Array:
        assert x.line(1.0).numpy()[0] == 3.0
        return x.line(2.0)

    step = make(function)
    for _ in range(8):
        assert step(lib.array([3.0])).numpy()[0] == 6.0
    assert "what it writes before" in step.explain()


def test_memory_that_is_hidden_and_written_before_a_wait_is_no_chain(lib: Lib, make: Make) -> None:
    hidden = lib.array([0.0])
    found = {"it": [hidden]}.__getitem__

    def function(x: Array) -> Array:
        table: Any = found("it")
        table[0].shift(1.0)
        assert x.line(1.0).numpy()[0] == 3.0
        return x.line(2.0)

    step = make(function, guard=False)
    for call in range(8):
        assert step(lib.array([3.0])).numpy()[0] == 6.0
        assert hidden.numpy()[0] == call + 1


@pytest.mark.parametrize("by_the_wait", [False, True])
def test_state_that_moves_is_read_where_it_is(lib: Lib, make: Make, by_the_wait: bool) -> None:
    """Graphs on both sides of the wait are bound to it; an operation that waits on it is not."""
    held = {"weight": lib.array([2.0])}
    keep = [held["weight"]]

    def function(x: Array) -> Array:
        y = held["weight"].line(1.0, 1.0)
        seen = (held["weight"] if by_the_wait else y).numpy()[0]
        return held["weight"].line(float(seen))

    step = make(function)
    for call in range(24):
        if call % 4 == 3:
            held["weight"] = lib.array([2.0 + call // 12])
            keep.append(held["weight"])
        value = float(held["weight"].numpy()[0])
        assert step(lib.array([1.0])).numpy()[0] == value * (value + (not by_the_wait))
    statistics = step.statistics()
    if by_the_wait:
        assert statistics.rebound == 0 and statistics.captures > 3, step.explain()
    else:
        assert statistics.rebound == 5 and statistics.captures == 2, step.explain()


def test_a_strict_function_may_be_a_chain_but_not_eager(lib: Lib, make: Make) -> None:
    def function(x: Array) -> Array:
        value = x.line(1.0).numpy()[0]
        return x.line(float(value))

    step = make(function, strict=True)
    for _ in range(5):
        assert step(lib.array([3.0])).numpy()[0] == 9.0
    with pytest.raises(EagerRunError, match="is another one"):
        for value in range(40):
            step(lib.array([float(value)]))


def test_a_check_of_a_chain_that_writes_what_the_first_call_did_not(lib: Lib, make: Make) -> None:
    count = lib.array([0.0])

    def function(x: Array) -> Array:
        if x.numpy()[0] > 5:
            count.shift(1.0)
        return x.line(2.0)

    step = make(function, verify=2)
    for _ in range(6):
        step(lib.array([1.0]))
    for call in range(1, 9):
        step(lib.array([9.0]))
        assert count.numpy()[0] == call
    assert step.statistics().verified > 2


def test_an_evicted_chain_is_built_again(lib: Lib, make: Make) -> None:
    def function(x: Array) -> Array:
        x.numpy()
        return x.line(2.0)

    cache = ost.GraphCache(lib.device)
    step = make(function, cache)
    for call in range(12):
        if call == 8:
            cache.evict_all()
        assert step(lib.array([3.0])).numpy()[0] == 6.0
    assert _key(step).captures == 2
    step.forget()
    assert step(lib.array([4.0])).numpy()[0] == 8.0
    cache.close()


def test_graphs_that_are_refused_half_way_leave_the_call_to_an_eager_run(
    lib: Lib, make: Make
) -> None:
    count = lib.array([0.0])

    def function(x: Array) -> Array:
        count.shift(1.0)
        assert x.numpy()[0] == 3.0
        count.shift(1.0)
        return x.line(2.0)

    step = make(function)
    for call in range(12):
        if call == 8 and not lib.numbers:  # else there is no other than the last
            (chain,) = [line for line in step._lines.values() if line.captured()]
            captured = chain.captured()
            assert captured is not None and captured.chain is not None
            executable = captured.chain.links[0].executable
            assert executable is not None
            executable.close()
        if call == 10:
            (chain,) = [line for line in step._lines.values() if line.captured()]
            with step.cache.hold(chain.name) as run:
                run.close()
        assert step(lib.array([3.0])).numpy()[0] == 6.0
        assert count.numpy()[0] == 2.0 * (call + 1)


def test_an_interrupt_while_numbers_are_awaited_leaves_the_next_calls_right(
    lib: Lib, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    lib.numbers = True
    count = lib.array([0.0])

    def function(x: Array) -> Array:
        count.shift(1.0)
        big = x.line(1.0).numpy()[0] > 5
        count.shift(10.0 if big else 20.0)
        return x.line(2.0 if big else 3.0)

    step = make(function)
    for value in [1.0, 9.0] * 10:
        step(lib.array([value]))
    assert "1 graph, waits" in step.explain()
    wait = Record.wait

    def interrupted(self: Record) -> Any:
        monkeypatch.setattr(Record, "wait", wait)
        raise KeyboardInterrupt

    for value in [9.0, 1.0, 1.0, 9.0] * 4:
        expected = count.numpy()[0] + (11.0 if value > 5 else 21.0)
        monkeypatch.setattr(Record, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            step(lib.array([1.0]))
        count.buffer.set([expected - (11.0 if value > 5 else 21.0)], lib.here.stream)
        assert step(lib.array([value])).numpy()[0] == value * (2.0 if value > 5 else 3.0)
        assert count.numpy()[0] == expected


def test_an_interrupt_at_the_last_launch_puts_memory_back(
    lib: Lib, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = lib.array([0.0])

    def function(x: Array) -> Array:
        count.shift(1.0)
        big = x.line(1.0).numpy()[0] > 5
        return x.line(2.0 if big else 3.0)

    step = make(function)
    for _ in range(20):
        step(lib.array([1.0]))
    assert step.statistics().replays >= 10
    before, replay = count.numpy()[0], ost.GraphCache.replay

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(ost.GraphCache, "replay", interrupted)
    with pytest.raises(KeyboardInterrupt):
        step(lib.array([1.0]))
    monkeypatch.setattr(ost.GraphCache, "replay", replay)
    assert count.numpy()[0] == before
    assert step(lib.array([1.0])).numpy()[0] == 3.0
    assert count.numpy()[0] == before + 1


def test_values_that_are_only_returned_are_those_of_their_call(lib: Lib, make: Make) -> None:
    total = lib.array([0.0])

    def function(x: Array) -> Any:
        lib.notes.append(None)
        total.shift(1.0)
        y = x.line(2.0)
        first = y.numpy()
        total.shift(1.0)
        return {"y": y, "first": first, "n": 3}, total.numpy()

    step = make(function)
    results = []
    for value in range(24):
        before = len(lib.notes)
        results.append(step(lib.array([float(value)])))
    assert len(lib.notes) == before, "a replay runs no Python"
    for value, (found, seen) in enumerate(results):
        assert [*found] == ["y", "first", "n"] and found["n"] == 3
        assert (found["y"].numpy()[0], found["first"][0]) == (2.0 * value, 2.0 * value)
        assert seen[0] == 2.0 * (value + 1)
    assert _key(step).replays > 12


@pytest.mark.parametrize("wrong", [False, True])
def test_a_check_compares_the_values_that_are_returned(
    wrong: bool, lib: Lib, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert = ResultPlace.convert
    monkeypatch.setattr(ResultPlace, "convert", lambda self, v: convert(self, v) + wrong)
    step = make(lambda x: (x.line(2.0), x.numpy()), verify=3)
    for value in range(16):
        y, seen = step(lib.array([float(value)]))
        if not wrong:
            assert (y.numpy()[0], seen[0]) == (2.0 * value, value)
    assert ("result[1] differs from the eager run" in step.explain()) is wrong
    assert step.statistics().verified


@pytest.mark.parametrize("place", ["middle", "end"])
@pytest.mark.parametrize("calls", [7, 20])  # by the key; by the short way
def test_a_graph_that_is_refused_after_others_have_written_ends_it(
    place: str, calls: int, lib: Lib, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that is compared follows, so nothing was kept to be put back."""
    lib.numbers = False  # the graphs would be one
    count = lib.array([0.0])

    def function(x: Array) -> Any:
        count.shift(1.0)
        first = x.numpy()
        count.shift(1.0)
        return first, x.line(2.0).numpy(), x.line(3.0)

    step = make(function)
    for _ in range(calls):
        step(lib.array([3.0]))
    (line,) = [line for line in step._lines.values() if line.captured()]
    captured = line.captured()
    assert captured is not None and captured.chain is not None
    if place == "middle":
        executable = captured.chain.links[1].executable
        assert executable is not None
        executable.close()
    else:
        launch = ost.GraphExec.launch

        def refused(self: ost.GraphExec, *args: Any, **options: Any) -> Any:
            if self not in [link.executable for link in captured.chain.links]:  # type: ignore[union-attr]
                raise ost.errors.GraphError("refused")
            return launch(self, *args, **options)

        monkeypatch.setattr(ost.GraphExec, "launch", refused)
    for _ in range(2):
        with pytest.raises(StateLostError, match="cannot be put back"):
            step(lib.array([3.0]))
    assert count.numpy()[0] == 2.0 * calls + 1 + (place == "end")
    monkeypatch.undo()
    step.forget()
    assert step(lib.array([3.0]))[2].numpy()[0] == 9.0


@pytest.mark.parametrize("seed", range(8))
def test_operations_that_cannot_fail_are_ordered_by_their_memory(seed: int) -> None:
    """Graphs in a line, with a number after each: nodes that nothing orders run in any order."""
    draw = random.Random(seed)
    with Device(HostDriver(shuffle=seed)) as device:
        stream = device.create_stream()
        kernels = {n: device.modules.get_or_compile(SOURCE, n) for n in ("line", "shift")}
        # The last four are numbers that the host reads, which nothing writes again.
        held = [device.array(np.full(4, n, "f4")) for n in range(9)]
        spans = [(each.address, each.address + each.nbytes) for each in held]
        plain, parts, harmless = np.arange(9.0), list[Any](), dict[ost.Graph, Any]()
        for at in range(5, 9):
            graph, works, before = ost.Graph.create(device), list[Any](), list[Any]()
            most = draw.randint(2, 9)
            for count in range(1, most):
                to, of, by = draw.randrange(5), draw.randrange(5), draw.randrange(1, 4)
                to = at if count == most - 1 else to
                if to == at or draw.random() < 0.6:
                    given: Any = ("line", held[to], held[of], 4, 0.5, float(by))
                    plain[to], reads = plain[of] / 2 + by, {spans[of]}
                else:
                    given = ("shift", held[to], 4, float(by))
                    plain[to], reads = plain[to] + by, set()
                before = [graph.add_kernel(kernels[given[0]], ONE, *given[1:], after=before)]
                uses = UsedMemory(frozenset(reads), frozenset({spans[to]}))
                works.append((count, uses if draw.random() < 0.9 else None))
            content = np.float32(plain[at]).tobytes()
            parts += [graph, Scalar(spans[at][0], content, bytes, compared=True)]
            harmless[graph] = works if draw.random() < 0.9 else ()
        made = join(device, parts, harmless)
        assert made is not None
        run, numbers = made
        numbers.begin(stream)
        run.launch(stream)
        assert numbers.wait() is None
        for each, value in zip(held, plain, strict=True):
            assert each.to_numpy(stream).tolist() == [value] * 4


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 5))]
)
def test_random_functions_that_wait_are_as_eager_calls(seed: int, lib: Lib, make: Make) -> None:
    """Programs of writes, waits, branches, loops and exceptions, whose state moves: equal to eager
    in every call."""
    draw = random.Random(seed)

    class Stop(Exception):
        pass

    def program(depth: int = 0) -> list[Any]:
        steps: list[Any] = []
        for _ in range(draw.randint(1, 4)):
            kind = draw.choice(["line", "shift", "state", "wait", "branch", "loop", "raise"])
            if kind in ("branch", "loop") and depth < 2:
                steps.append((kind, draw.randint(0, 3), program(depth + 1), program(depth + 1)))
            elif kind == "raise" and depth:
                steps.append(("raise", 0, [], []))
            else:
                steps.append((kind, draw.randint(1, 3), [], []))
        return steps

    def run(steps: list[Any], x: Array, y: Array, state: Array) -> Array:
        for kind, number, first, second in steps:
            if kind == "line":
                y = y.line(1.0, float(number))
            elif kind == "shift":
                x.shift(float(number))
            elif kind == "state":
                state.shift(float(number))
            elif kind == "wait":
                y.numpy()
            elif kind == "branch":
                y = run(first if x.numpy()[0] > number else second, x, y, state)
            elif kind == "loop":
                for _ in range(int(y.numpy()[0]) % 3):
                    y = run(first, x, y, state)
            elif kind == "raise" and int(y.numpy()[0]) % 4 == 3:
                raise Stop
        return y

    rebound = 0
    for _ in range(12):
        steps = program()
        held, theirs = {"state": lib.array([0.0])}, lib.array([0.0])
        before = []

        def function(x: Array, steps: Any = steps, held: Any = held) -> Any:
            y = run(steps, x, x.line(1.0), held["state"])
            if not steps[0][1] % 2:
                return y
            return y, held["state"].numpy(), {"y": y.numpy()}

        step = make(function)
        for _ in range(24):
            if draw.random() < 0.15:
                before.append(held["state"])
                held["state"] = lib.array(held["state"].numpy())
            value = float(draw.choice([0, 0, 0, 1, 2, 3, 5]))
            x, other = lib.array([value]), lib.array([value])
            expected: Any = None
            try:
                expected = run(steps, other, other.line(1.0), theirs).numpy()[0]
            except Stop:
                with pytest.raises(Stop):
                    step(x)
            else:
                found = step(x)
                if isinstance(found, tuple):
                    assert found[1][0] == theirs.numpy()[0], steps
                    assert found[2]["y"][0] == expected, steps
                    found = found[0]
                assert found.numpy()[0] == expected, steps
            assert x.numpy()[0] == other.numpy()[0], steps
            assert held["state"].numpy()[0] == theirs.numpy()[0], steps
        rebound += step.statistics().rebound
        step.close()
    assert rebound
