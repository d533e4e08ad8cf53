"""Copies inside graphs: the kernels, as host functions and as CUDA by the emulator, and what is
copied by them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ostinato as ost
from ostinato.device import Device
from ostinato.interop.graphed import Graphed
from ostinato.interop.reading import moves
from ostinato.interop.reading.moves import MOST, NAMES, Mover, dense
from ostinato.interop.reading.padding import Padding
from ostinato.step.fills import FILL
from tests.emulator.emulator import Emulator
from tests.interop.library import Array, Lib, graphed


@pytest.fixture(params=["host", "cuda"])
def code(request: pytest.FixtureRequest) -> ost.Source:
    """The kernels' source; in CUDA they run by the emulator."""
    source = moves.source()
    if request.param == "host":
        return source
    if shutil.which("g++") is None:
        pytest.skip("the emulator needs g++")
    emulator = Emulator()
    plain = ost.Source(source.cuda, signatures={n: source.host[n].signature for n in source.host})
    return ost.Source(host=[emulator.host_kernel(plain, name) for name in source.host])


@pytest.fixture
def mover(
    code: ost.Source, host_device: Device, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], Mover]:
    monkeypatch.setattr(moves, "source", lambda: code)
    return lambda: Mover(host_device)


SIZES = [0, 1, 3, 4, 15, 16, 17, 64, 1000, 4096, 70_001]


@pytest.mark.parametrize("seed", range(3))
def test_bytes_go_where_they_belong(mover: Any, host_device: Device, seed: int) -> None:
    rng = np.random.default_rng(seed)
    stream, one = host_device.create_stream(), mover()

    def arrays(count: int) -> list[tuple[ost.Buffer, int, int]]:
        """Memory, and where in it an array begins that ends with it."""
        made = []
        for _ in range(count):
            at, size = int(rng.integers(0, 20)), int(rng.choice(SIZES))
            values = rng.integers(0, 256, at + size, np.uint8)
            made.append(
                (
                    host_device.array(values) if at + size else host_device.zeros(1, "bytes"),
                    at,
                    size,
                )
            )
        return made

    def places(of: list[tuple[ost.Buffer, int, int]]) -> list[tuple[int, int]]:
        return [(buffer.address + at, size) for buffer, at, size in of]

    count, outs = int(rng.integers(0, MOST + 1)), int(rng.integers(1, MOST + 1))
    inputs, outputs, other = arrays(count), arrays(outs), host_device.zeros(4, "bytes")
    with ost.capture(stream) as capture:
        one.begin(stream, places(inputs))
        ost.fill(stream, other, 1)
        one.end(stream, places(outputs))
    found = one.find(capture.graph.nodes(), count, tuple(range(outs)))
    run = capture.graph.instantiate()
    for _ in range(3):
        given = [
            host_device.array(rng.integers(0, 256, size + 20, np.uint8)) for *_, size in inputs
        ]
        made = [host_device.zeros(size + 20, "u1") for *_, size in outputs]
        left_out = rng.random(count) < 0.2
        shifts = rng.choice([0, 4, 3, 16], count + outs).tolist()
        before = [buffer.to_numpy(stream) for buffer, *_ in inputs]
        froms = [
            0 if left else buffer.address + shift
            for buffer, shift, left in zip(given, shifts, left_out, strict=False)
        ]
        tos = [b.address + s for b, s in zip(made, shifts[count:], strict=True)]
        found.change(found.packed(*froms, *tos))(run)
        run.launch(stream)
        for i, (buffer, at, size) in enumerate(inputs):
            wanted = before[i].copy()
            if not left_out[i]:
                wanted[at : at + size] = given[i].to_numpy(stream)[shifts[i] : shifts[i] + size]
            np.testing.assert_array_equal(buffer.to_numpy(stream), wanted)
        for (buffer, at, size), copy, shift in zip(outputs, made, shifts[count:], strict=True):
            wanted = np.zeros(size + 20, np.uint8)
            wanted[shift : shift + size] = buffer.to_numpy(stream)[at : at + size]
            np.testing.assert_array_equal(copy.to_numpy(stream), wanted)
    found.change(found.packed(*[0] * (count + outs)))(run)  # as captured: nothing is copied
    run.launch(stream)
    stream.synchronize()


@settings(max_examples=2 * settings().max_examples, deadline=None)
@given(
    st.lists(st.integers(0, 4), max_size=4),
    st.randoms(use_true_random=False),
    st.booleans(),
    st.sampled_from([1, 4]),
)
def test_what_is_one_piece(shape: list[int], rng: Any, broken: bool, unit: int) -> None:
    order = [*range(len(shape))]
    rng.shuffle(order)
    strides, step = [0] * len(shape), unit
    for axis in order:
        strides[axis] = step
        step *= max(1, shape[axis])
    if broken and shape:
        strides[rng.randrange(len(shape))] = rng.choice([0, unit, 3 * unit, 8 * unit])
    places = {sum(i * s for i, s in zip(at, strides, strict=True)) for at in np.ndindex(*shape)}
    size = int(np.prod(shape))
    wanted = len(places) == size and (not size or places == {unit * i for i in range(size)})
    assert dense(shape, strides, unit) == wanted


@pytest.fixture
def step(mover: Any, host_device: Device) -> Any:
    lib, made = Lib(host_device), []

    def kept(function: Any, **options: Any) -> tuple[Graphed, Lib]:
        made.append(graphed(function, lib, **options))
        return made[-1], lib

    yield kept
    for one in made:
        one.close()


def numbers(start: float) -> Any:
    return np.arange(start, start + 4, dtype=np.float32)


@pytest.mark.parametrize("count", [1, 3, MOST, MOST + 1])
def test_many_arguments_and_results(step: Any, count: int) -> None:
    by, lib = step(lambda *xs: [x.line(2.0 + i) for i, x in enumerate(xs)])
    kept = []
    for start in range(5):
        xs = [lib.array(numbers(10 * i + start)) for i in range(count)]
        kept.append(by(*xs))
    for start, results in enumerate(kept):
        for i, result in enumerate(results):
            np.testing.assert_array_equal(result.numpy(), (2 + i) * numbers(10 * i + start))
    statistics = by.statistics()
    assert statistics.replays == 4 and statistics.captures == 1
    assert (NAMES[0] in by.inspect()) == (count <= MOST)


def test_static_results_are_not_copied(step: Any) -> None:
    by, lib = step(lambda x: x.line(2.0), results="static")
    results = [by(lib.array(numbers(start))) for start in range(4)]
    assert results[1] is results[3] and NAMES[1] not in by.inspect()
    np.testing.assert_array_equal(results[3].numpy(), 2 * numbers(3))


def test_a_result_fed_back(step: Any) -> None:
    by, lib = step(lambda x: x.line(2.0), results="static")
    x = lib.array(numbers(1))
    wanted = numbers(1)
    for _ in range(6):
        x, wanted = by(x), 2 * wanted
        np.testing.assert_array_equal(x.numpy(), wanted)


def test_a_graph_of_copies_alone_is_empty(step: Any) -> None:
    by, lib = step(lambda x: x)
    for start in range(3):
        np.testing.assert_array_equal(by(lib.array(numbers(start))).numpy(), numbers(start))
    assert "the capture is empty" in by.statistics().keys[0].reason


def test_memory_that_an_earlier_call_was_given_may_be_closed(step: Any) -> None:
    by, lib = step(lambda x: x.line(2.0))
    for start in range(6):
        x = lib.array(numbers(start))
        result = by(x)
        np.testing.assert_array_equal(result.numpy(), 2 * numbers(start))
        for array in (x, result):
            array.buffer.storage.close()
    assert by.statistics().replays == 5, by.explain()


class _Owner:
    """An object without arrays."""


@pytest.mark.parametrize("given", [False, True], ids=["arrays", "with an object that was given"])
def test_what_the_graph_copies_is_not_copied_again(
    host_device: Device, monkeypatch: pytest.MonkeyPatch, given: bool
) -> None:
    """Beside a view of static memory, which the graph does not copy."""
    lib, owner = Lib(host_device), _Owner()
    clones: list[Array] = []
    monkeypatch.setattr(Lib, "clone", lambda lib, array: clones.append(array) or array.line(1.0))

    def f(x: Array, c: Array, o: object) -> Any:
        made = x.line(2.0), Array(c.lib, c.shape, c.buffer)
        return (*made, o) if given else made

    with graphed(f, lib, static=("c", "o")) as by:
        state = lib.array(numbers(7))
        for start in range(4):
            clones.clear()
            y, c, *rest = by(lib.array(numbers(start)), state, owner)
            np.testing.assert_array_equal(y.numpy(), 2 * numbers(start))
            np.testing.assert_array_equal(c.numpy(), numbers(7))
            assert c is not state and rest == [owner] * given
        assert by.statistics().replays == 3, by.explain()
        assert clones == []


def test_without_a_compiler_they_are_copied_beside(
    host_device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> Any:
        raise ost.errors.NotAvailableError("no compiler")

    monkeypatch.setattr(moves, "source", fail)
    lib = Lib(host_device)
    with graphed(lambda x: x.line(2.0), lib) as by:
        for start in range(4):
            x: Array = lib.array(numbers(start))
            np.testing.assert_array_equal(by(x).numpy(), 2 * numbers(start))
        assert by.statistics().replays == 3 and NAMES[0] not in by.inspect()


@pytest.mark.parametrize(
    "options",
    [{}, {"results": "static"}, {"padding": Padding({"x": 0}, ost.PowersOfTwo(64))}],
)
def test_a_graphed_function_has_no_memset_nodes(step: Any, options: dict[str, Any]) -> None:
    def filled(x: Array) -> list[Array]:
        zeros, others = x.line(5.0), x.line(7.0)
        ost.fill(x.lib.here.stream, zeros.buffer, 0)
        ost.fill(x.lib.here.stream, others.buffer, 64)
        return [zeros.line(2.0, 3.0), others.line(2.0, 3.0)]

    by, lib = step(filled, **options)
    for _ in range(4):
        zeros, others = by(lib.array(numbers(1)))
        assert (zeros.numpy() == 3).all() and (others.numpy() == 131).all()
    assert by.statistics().replays >= 2
    assert by.inspect().count(FILL) == 2 and "memset" not in by.inspect()
