"""Graphs of graphed functions in a folder: the next process restores them."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

import ostinato as ost
from ostinato.errors import InputError
from ostinato.interop.graphed import Graphed
from ostinato.interop.reading import saving, stored
from ostinato.interop.reading.padding import Padding
from ostinato.interop.reading.stored import Stored, Unstable, code_text, text_of
from ostinato.interop.reading.together import Agreement
from tests.interop.library import Array, Lib, graphed
from tests.interop.test_ranks import Texts
from tests.processes import printed_by_all

pytestmark = pytest.mark.usefixtures("checks_here")

Make = Callable[..., Graphed]


@pytest.fixture
def make(make: Make, lib: Lib, tmp_path: Path) -> Make:
    """The same with a store."""

    def kept(function: Any, folder: Path = tmp_path, **options: Any) -> Graphed:
        return make(function, stored=Stored(lib, folder, (code_text(function),)), **options)

    return kept


def numbers(start: float = 0.0, n: int = 4) -> Any:
    return np.arange(start, start + n, dtype=np.float32)


def saved(step: Graphed, *args: Any, check: bool = False) -> None:
    """Captures and saves; `check`: also runs the file in another process."""
    for _ in range(3):
        step(*args)
    assert step.save(check=check) == {} and step.statistics().captures >= 1


def restored(step: Graphed) -> None:
    found = step.statistics()
    assert (found.restored, found.captures, found.eager) == (1, 0, 0), (
        found.not_restored,
        step.explain(),
    )


class Pair(NamedTuple):
    one: Any
    rest: Any


@dataclasses.dataclass
class Record:
    value: Any
    number: int


def scaled(lib: Lib, weight: Array, bias: Array | None = None) -> Callable[[Array], Any]:
    """A function of a weight that it adds: out = 2 x, and the weight's own double."""

    def f(x: Array) -> Any:
        return x.line(2.0), weight.line(3.0)

    return f


def test_the_next_one_restores(lib: Lib, make: Make) -> None:
    saved(make(scaled(lib, lib.array(numbers(1)))), lib.array(numbers()), check=True)
    weight = lib.array(numbers(50))
    step = make(scaled(lib, weight))
    kept = []
    for start in range(5):
        one, two = step(lib.array(numbers(start)))
        kept.append(one)
        np.testing.assert_array_equal(two.numpy(), 3 * numbers(50))
    for start, one in enumerate(kept):
        np.testing.assert_array_equal(one.numpy(), 2 * numbers(start))
    restored(step)
    assert step.statistics().replays == 5


@pytest.mark.parametrize("results", ["clone", "static"])
def test_results_of_all_kinds(lib: Lib, make: Make, results: str) -> None:
    def f(x: Array) -> Any:
        y = x.line(2.0)
        return {
            "pair": Pair(y, [x.line(3.0), None]),
            "record": Record(y, 7),
            "plain": (1, "two", 2.5, True),
        }

    saved(make(f, results=results), lib.array(numbers()), check=True)
    step = make(f, results=results)
    for start in range(4):
        found = step(lib.array(numbers(start)))
        assert type(found["pair"]) is Pair and type(found["record"]) is Record
        np.testing.assert_array_equal(found["pair"].one.numpy(), 2 * numbers(start))
        np.testing.assert_array_equal(found["pair"].rest[0].numpy(), 3 * numbers(start))
        np.testing.assert_array_equal(found["record"].value.numpy(), 2 * numbers(start))
        assert found["plain"] == (1, "two", 2.5, True) and found["record"].number == 7
    restored(step)


def test_classes_in_results(lib: Lib, make: Make) -> None:
    """As the steps of transformers have them, whose results are made again by the caller."""

    def f(x: Array) -> Any:
        return Record, {"value": x.line(2.0)}, True

    saved(make(f), lib.array(numbers()), check=True)
    step = make(f)
    for start in range(3):
        kind, kept, cached = step(lib.array(numbers(start)))
        assert kind is Record and cached is True
        np.testing.assert_array_equal(kept["value"].numpy(), 2 * numbers(start))
    restored(step)

    def other(x: Array) -> Any:
        return int, x.line(2.0)

    step = make(other)
    for _ in range(2):
        assert step(lib.array(numbers()))[0] is int
    (why,) = step.save(check=False).values()
    assert "builtins.type" in why


@pytest.mark.parametrize(
    "data",
    [
        {"type": ["subprocess", "Popen"]},
        {"class": ["subprocess", "Popen"], "names": ["args"], "of": [{"value": "true"}]},
        {"type": ["never.imported", "Record"]},
    ],
)
def test_a_file_names_no_other_classes(data: Any) -> None:
    with pytest.raises((ValueError, LookupError)):
        stored.rebuilt(data, [])


@pytest.mark.parametrize("counted", [True, False])
def test_what_is_written(lib: Lib, make: Make, counted: bool) -> None:
    def counting(total: Array) -> Callable[[Array], Any]:
        def f(x: Array) -> Any:
            total.shift(1.0)
            total.version -= not counted
            return x.shift(1.0).line(2.0)

        return f

    saved(make(counting(lib.array(np.zeros(4)))), lib.array(numbers()), check=True)
    total = lib.array(np.full(4, 100))
    step = make(counting(total))
    for call in range(1, 6):
        x = lib.array(numbers(call))
        np.testing.assert_array_equal(step(x).numpy(), 2 * (numbers(call) + 1))
        np.testing.assert_array_equal(x.numpy(), numbers(call) + 1)
        np.testing.assert_array_equal(total.numpy(), [100 + call] * 4)
    restored(step)


def test_static_arguments_and_views_of_them(lib: Lib, make: Make) -> None:
    def f(x: Array, cache: Array) -> Any:
        cache.shift(1.0)
        return x.line(2.0), cache

    saved(make(f, static=("cache",)), lib.array(numbers()), lib.array(np.zeros(4)))
    step, cache = make(f, static=("cache",)), lib.array(np.full(4, 10))
    for call in range(1, 4):
        one, same = step(lib.array(numbers(call)), cache)
        np.testing.assert_array_equal(one.numpy(), 2 * numbers(call))
        np.testing.assert_array_equal(same.numpy(), [10 + call] * 4)
        np.testing.assert_array_equal(cache.numpy(), [10 + call] * 4)
    restored(step)
    other = lib.array(np.zeros(4))  # it moves: bound anew, or warmed up and captured
    for call in range(1, 4):
        step(lib.array(numbers(call)), other)
        np.testing.assert_array_equal(other.numpy(), [call] * 4)


def test_weights_that_move_afterwards(lib: Lib, make: Make) -> None:
    holder = SimpleNamespace(weight=lib.array(numbers(1)))

    def f(x: Array) -> Any:
        return x.line(2.0), holder.weight.line(1.0)

    saved(make(f), lib.array(numbers()))
    step = make(f)
    for start in (5, 6, 5, 7):
        holder.weight = lib.array(numbers(start))
        for call in range(2):
            one, two = step(lib.array(numbers(call)))
            np.testing.assert_array_equal(one.numpy(), 2 * numbers(call))
            np.testing.assert_array_equal(two.numpy(), numbers(start))
    assert step.statistics().restored == 1


def test_dynamic_sizes(lib: Lib, make: Make) -> None:
    def options() -> dict[str, Any]:
        return {"padding": Padding({"x": 0}, ost.PowersOfTwo(16))}

    def f(x: Array) -> Any:
        return x.line(2.0)

    step = make(f, **options())
    for n in (5, 7, 6):
        step(lib.array(numbers(n=n)))
    assert step.save() == {}, "with padding"
    step = make(f, **options())
    for n in (8, 5, 6, 7, 6):
        np.testing.assert_array_equal(step(lib.array(numbers(n, n))).numpy(), 2 * numbers(n, n))
    found = step.statistics()
    assert (found.restored, found.captures) == (1, 0) and found.eager <= 1, step.explain()


def test_an_evicted_graph_is_restored_again(lib: Lib, make: Make) -> None:
    saved(make(scaled(lib, lib.array(numbers(1)))), lib.array(numbers()))
    step = make(scaled(lib, lib.array(numbers(1))))
    for start in range(4):
        np.testing.assert_array_equal(
            step(lib.array(numbers(start)))[0].numpy(), 2 * numbers(start)
        )
        step.cache.evict_all()
    found = step.statistics()
    assert (found.restored, found.captures, found.eager) == (4, 0, 0)


def test_checks_are_made_of_restored_graphs_too(lib: Lib, make: Make) -> None:
    saved(make(scaled(lib, lib.array(numbers(1)))), lib.array(numbers()))
    step = make(scaled(lib, lib.array(numbers(2))), verify="first")
    for start in range(3):
        step(lib.array(numbers(start)))
    found = step.statistics()
    assert found.verified == 1 and not found.quarantined and found.restored == 1


def helper(x: Array) -> Array:
    return x.line(2.0)


def test_other_code_is_another_key(lib: Lib, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def outer(x: Array) -> Any:
        return helper(x)

    saved(make(outer), lib.array(numbers()))
    step = make(outer)
    step(lib.array(numbers()))
    restored(step)

    def changed(x: Array) -> Array:
        return x.line(5.0)

    monkeypatch.setitem(globals(), "helper", changed)
    step = make(outer)
    for start in range(3):
        np.testing.assert_array_equal(step(lib.array(numbers(start))).numpy(), 5 * numbers(start))
    found = step.statistics()
    assert found.restored == 0 and found.captures == 1
    assert "there is no file" in str(found.not_restored)


def test_other_values_weights_and_settings_are_other_keys(lib: Lib, make: Make) -> None:
    def build(by: float, n: int, deep: int) -> Callable[[Array], Any]:
        weight = lib.array(numbers(n=n))
        config = SimpleNamespace(inner=SimpleNamespace(eps=SimpleNamespace(value=deep)))

        def f(x: Array) -> Any:
            return x.line(by, config.inner.eps.value), weight.line(1.0)

        return f

    saved(make(build(2.0, 4, 1)), lib.array(numbers()))
    for by, n, deep in ((3.0, 4, 1), (2.0, 5, 1), (2.0, 4, 2)):
        step = make(build(by, n, deep))
        for start in range(3):
            one, two = step(lib.array(numbers(start)))
            np.testing.assert_array_equal(one.numpy(), by * numbers(start) + deep)
            np.testing.assert_array_equal(two.numpy(), numbers(n=n))
        assert step.statistics().restored == 0, (by, n, deep)
    step = make(build(2.0, 4, 1))
    step(lib.array(numbers()))
    restored(step)


@pytest.mark.parametrize("how", ["cut", "flipped", "gone", "of another"])
def test_a_file_that_does_not_fit_costs_speed_alone(
    lib: Lib, make: Make, tmp_path: Path, how: str
) -> None:
    saved(make(scaled(lib, lib.array(numbers(1)))), lib.array(numbers()))
    (path,) = (tmp_path / "graphs").glob("*.graph")
    raw = path.read_bytes()
    if how == "cut":
        path.write_bytes(raw[: len(raw) // 2])
    elif how == "flipped":
        at = raw.index(b"output 0")  # in the manifest
        path.write_bytes(raw[: at + 3] + b"X" + raw[at + 4 :])
    elif how == "gone":
        path.unlink()
    else:
        saved(make(lambda x: x.line(7.0)), lib.array(numbers()))
        (other,) = {*(tmp_path / "graphs").glob("*.graph")} - {path}
        path.write_bytes(other.read_bytes())
    step = make(scaled(lib, lib.array(numbers(9))))
    for start in range(4):
        one, two = step(lib.array(numbers(start)))
        np.testing.assert_array_equal(one.numpy(), 2 * numbers(start))
        np.testing.assert_array_equal(two.numpy(), 3 * numbers(9))
    found = step.statistics()
    assert (found.restored, found.captures, found.eager) == (0, 1, 1)
    assert sum(found.not_restored.values()) == 1, found.not_restored


@pytest.mark.parametrize(
    "change",
    [
        {"outputs": [["output 0", [[4], 0]]]},
        {"outputs": [["output 9", [[4], 0]], ["output 1", [[4], 0]]]},
        {"outputs": [["output 0", [[4000], 0]], ["output 1", [[4], 0]]]},
        {"outputs": [["output 0", [[4], -8]], ["output 1", [[4], 0]]]},
        {"result": {"class": ["os", "system"], "names": None, "of": []}},
        {"result": {"class": ["builtins", "int"], "names": None, "of": []}},
        {"result": {"class": ["no.such", "thing"], "names": None, "of": []}},
        {"result": {"leaf": 7}},
        {"result": {"tuple": [{"leaf": 1}, {"leaf": 0}]}},
        {"moved": [0]},
        {"moved": [5, 6]},
        {"written": ["x"]},
        {"outputs": None},
        {"result": 3},
    ],
)
def test_hostile_facts(
    lib: Lib, make: Make, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    dumps = json.dumps
    monkeypatch.setattr(
        saving, "json", SimpleNamespace(loads=json.loads, dumps=lambda f, **k: dumps(f | change))
    )
    saved(make(scaled(lib, lib.array(numbers(1)))), lib.array(numbers()))
    step = make(scaled(lib, lib.array(numbers(9))))
    for start in range(4):
        one, two = step(lib.array(numbers(start)))
        np.testing.assert_array_equal(one.numpy(), 2 * numbers(start))
        np.testing.assert_array_equal(two.numpy(), 3 * numbers(9))
    assert step.statistics().restored == 0 and step.statistics().not_restored


def test_what_cannot_be_saved_says_why(lib: Lib, make: Make) -> None:
    step = make(lambda x: (x.line(2.0), frozenset([1])))
    for _ in range(3):
        step(lib.array(numbers()))
    ((words, why),) = step.save().items()
    assert "x=f4[4]" in words and "frozenset" in why
    step = make(lambda x, y: x.line(y.real))
    for _ in range(3):
        step(lib.array(numbers()), 2.0)
    assert step.save() == {}
    weight = lib.array(numbers())

    def attaching(x: Any) -> Any:
        _ = weight.shape
        weight.attached = x.line(2.0)
        return x.line(3.0)

    step = make(attaching)
    for _ in range(3):
        step(lib.array(numbers()))
    ((_, why),) = step.save().items()
    assert "it gives gradients" in why
    plain = graphed(lambda x: x, lib)
    with pytest.raises(InputError, match="store="):
        plain.save()
    plain.close()


def test_text_of_keys() -> None:
    lib: Any = SimpleNamespace(stable=(np.dtype,))
    values = [0, False, 0.0, -0.0, None, "a", b"a", (1,), (1, 2), ((1,), 2), int, {1: 2}, [1]]
    texts = [text_of(value, lib) for value in values]
    assert len({*texts}) == len(values), texts
    assert text_of(np.dtype("f4"), lib) != text_of(np.dtype("f8"), lib)
    with pytest.raises(Unstable):
        text_of(object(), lib)


PROGRAM = """
import functools
from types import SimpleNamespace
from ostinato.interop.reading.stored import code_text, text_of
from tests.interop import test_stored as t
lib = SimpleNamespace(stable=())
print(code_text(t.scaled), code_text(functools.partial(t.numbers, 1)), code_text(t.Record))
print(text_of((frozenset("abcdef"), {"a", "b"}, t.Pair, len, t.helper), lib))
"""


def test_texts_are_the_same_in_every_process() -> None:
    assert len(printed_by_all(PROGRAM)) > 100


def test_code_that_is_named_counts() -> None:
    def build(number: int) -> Callable[[], int]:
        space: dict[str, Any] = {"__name__": "made"}
        exec(
            f"def inner():\n    return {number}\n"
            "class Base:\n    def m(self):\n        return inner()\n"
            "def outer():\n    return (lambda: Base().m())()\n",
            space,
        )
        made: Callable[[], int] = space["outer"]
        return made

    assert code_text(build(1)) == code_text(build(1)) != code_text(build(2))
    assert code_text(functools.partial(build(1))) != code_text(functools.partial(build(2)))


def made(program: str) -> Callable[..., Any]:
    space: dict[str, Any] = {"__name__": "made", "functools": functools}
    exec(program, space)
    run: Callable[..., Any] = space["run"]
    return run


CALLS_F = "\ndef run(x): return f(x)"


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(
            "a = lambda x: x + 1\nb = lambda x: x * {}\ndef run(x): return b(a(x))",
            id="the second of two lambdas",
        ),
        pytest.param(
            "a = lambda x: x + {}\nb = lambda x: x * 2\ndef run(x): return b(a(x))",
            id="the first of two lambdas",
        ),
        pytest.param(
            "def twice(f):\n @functools.wraps(f)\n def w(x): return {} * f(x)\n return w\n"
            "@twice\ndef run(x): return x",
            id="a decorator",
        ),
        pytest.param(f"def f(x, by={{}}): return x * by{CALLS_F}", id="a default"),
        pytest.param(f"def f(x, *, by={{}}): return x * by{CALLS_F}", id="a named default"),
        pytest.param(f"BY = {{}}\ndef f(x): return x * BY{CALLS_F}", id="a global"),
        pytest.param(
            f"def scaling(by): return lambda x: x * by\nf = scaling({{}}){CALLS_F}", id="a closure"
        ),
        pytest.param(
            f"f = functools.partial(lambda x, by: x * by, by={{}}){CALLS_F}", id="partial"
        ),
        pytest.param(
            f"class F:\n def __call__(self, x): return x * {{}}\nf = F(){CALLS_F}", id="an object"
        ),
        pytest.param(
            "class A:\n @property\n def p(self): return 1\n"
            " @p.setter\n def p(self, x): self.q = x * {}\n"
            "def run(x): A().p = x",
            id="a setter",
        ),
        pytest.param(
            "KNOWN = {{'f': lambda x: x * {}}}\ndef run(x): return KNOWN['f'](x)", id="in a dict"
        ),
    ],
)
def test_an_edit_of_what_a_function_calls_counts(program: str) -> None:
    """A graph of the program before the edit would be replayed."""
    before, after = program.format(2), program.format(3)
    assert code_text(made(before)) == code_text(made(before))
    assert code_text(made(before)) != code_text(made(after))


def test_a_function_in_a_key_is_told_from_another_of_its_code() -> None:
    lib: Any = SimpleNamespace(stable=())
    program = "def scaling(by): return lambda x: x * by\nrun = scaling({})"
    texts = [text_of(made(program.format(by)), lib) for by in (2, 2, 3)]
    assert texts[0] == texts[1] != texts[2]


def test_functions_as_defaults_have_no_address_in_a_text() -> None:
    program = (
        "def g(x): return x\nKNOWN = [g]\nKNOWN.append(KNOWN)\n"
        "def f(x, by=g, all=(g, len, KNOWN.append)): return by(KNOWN[0](x))\n"
        "def run(x): return f(x)"
    )
    one, other = made(program), made(program)
    assert code_text(one) == code_text(other)


def test_what_communicates_with_other_processes_is_not_saved(
    make: Make, lib: Lib, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file holds no connection.  (One rank agrees with itself.)"""

    def heard(function: Any, name: str) -> Any:
        return lambda: Agreement(Texts(), 0, [0], name=name, deadline=1)

    monkeypatch.setattr(lib, "heard", heard, raising=False)
    step = make(lambda x: x.line(2.0))
    for start in range(4):
        assert (step(lib.array(numbers(start))).numpy() == numbers(start) * 2).all()
    assert step.statistics().captures == 1
    ((_, why),) = step.save(check=False).items()
    assert "it communicates with other processes" in why
