"""Known ways to get a wrong answer out of a graphed function: what a graph froze and nobody looked
at again, what a replay does not do, and what stands for itself twice."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import gc
import itertools
import pickle
import random
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ostinato as ost
from ostinato.interop.graphed import Graphed
from ostinato.interop.reading.padding import Padding
from ostinato.interop.reading.trees import plain_token
from tests.interop.library import Array, Lib

Make = Callable[..., Graphed]


def ones(lib: Lib) -> Array:
    return lib.array(np.ones(4))


# ---------------------------------------------------------------- what a function uses


def twice(x: Array) -> Array:
    return x.line(2.0)


def threefold(x: Array) -> Array:
    return x.line(3.0)


@dataclasses.dataclass
class Record:
    scale: float
    more: Any = None


def test_its_own_code_is_replaced(lib: Lib, make: Make) -> None:
    """What else a function may use is in test_guards_random.py."""
    codes = {2.0: twice.__code__, 3.0: threefold.__code__}
    f = types.FunctionType(twice.__code__, globals())
    step = make(f)
    for value in (2.0,) * 4 + (3.0,) * 4 + (2.0, 3.0, 3.0):
        f.__code__ = codes[value]
        np.testing.assert_array_equal(step(ones(lib)).numpy(), [value] * 4)
    assert step.statistics().captures == 2 and step.statistics().replays >= 7


RANDOM: dict[str, Callable[[int], Callable[[], float]]] = {
    "Python's": lambda seed: random.seed(seed) or random.random,  # type: ignore[func-returns-value]
    "Python's, by a helper": lambda seed: random.seed(seed) or (lambda: random.choice([1.0, 2.0])),  # type: ignore[func-returns-value]
    "NumPy's": lambda seed: np.random.seed(seed) or np.random.rand,  # type: ignore[func-returns-value]
    "an object of Python": lambda seed: random.Random(seed).random,
    "an object of NumPy": lambda seed: np.random.default_rng(seed).random,
}


@pytest.mark.parametrize("kind", RANDOM)
def test_numbers_that_are_drawn_on_the_host(lib: Lib, make: Make, kind: str) -> None:
    draw = RANDOM[kind](0)
    wanted = [draw() for _ in range(6)]
    draw = RANDOM[kind](0)
    step = make(lambda x: x.line(draw()))
    for value in wanted:
        np.testing.assert_array_equal(step(ones(lib)).numpy(), [np.float32(value)] * 4)
    assert step.statistics().replays == 0, step.explain()


def test_numbers_that_are_drawn_in_the_capture_alone(lib: Lib, make: Make) -> None:
    """They are put back before the call runs eagerly."""
    step = make(lambda x: x.line(random.random() if lib.capturing() else 1.0))
    random.seed(0)
    before = random.getstate()
    for _ in range(4):
        np.testing.assert_array_equal(step(ones(lib)).numpy(), [1.0] * 4)
    assert random.getstate() == before
    assert step.statistics().replays == 0 and "the state of random" in step.explain()


NUMBERS = itertools.count()


class Numbered:
    def __init__(self) -> None:
        self.number = next(NUMBERS)


def test_an_iterator_of_a_class_that_is_named_alone(lib: Lib, make: Make) -> None:
    """Its constructor is not called; a helper that goes on with an iterator is."""
    step = make(lambda x: x.line(3.0 if isinstance(x, Numbered) else 2.0))
    for _ in range(4):
        np.testing.assert_array_equal(step(ones(lib)).numpy(), [2.0] * 4)
    assert step.statistics().replays == 3, step.explain()

    def following() -> float:
        return float(next(NUMBERS))

    step = make(lambda x: x.line(following()))
    answers = [step(ones(lib)).numpy()[0] for _ in range(4)]
    assert np.diff(answers).tolist() == [1.0] * 3 and "an iterator" in step.explain()


def test_objects_that_are_gone_are_not_kept(lib: Lib, make: Make) -> None:
    class Part:
        pass

    class Model:
        part: Any = None

        def forward(self, x: Array) -> Array:
            return x.line(2.0)

    model, parts = Model(), []
    step = make(model.forward)
    for _ in range(30):
        model.part = Part()
        parts.append(weakref.ref(model.part))
        step(ones(lib))
    gc.collect()
    assert sum(part() is not None for part in parts) <= 2


def test_objects_that_are_replaced_are_told_apart(lib: Lib, make: Make) -> None:
    """Also if the new one gets the address of the old one."""

    class Part:
        __slots__ = ("by",)

        def __init__(self, by: float) -> None:
            self.by = by

    part = Part(2.0)

    def f(x: Array) -> Array:
        return x.line(part.by)

    step = make(f)
    for value in (2.0, 2.0, 3.0, 3.0, 2.0, 3.0):
        del part
        part = Part(value)
        np.testing.assert_array_equal(step(ones(lib)).numpy(), [value] * 4)


def test_large_tables_and_rings_take_no_time(lib: Lib, make: Make) -> None:
    class Model:
        def __init__(self) -> None:
            self.words = {str(i): i for i in range(20_000)}
            self.me = self
            self.ring: list[Any] = []
            self.ring.append(self.ring)

        def forward(self, x: Array) -> Array:
            assert self.words and self.me and self.ring
            return x.line(2.0)

    model = Model()
    step = make(model.forward)
    for _ in range(4):
        step(ones(lib))
    assert step.statistics().replays == 3
    assert len(str(step._key((ones(lib),), {})[0])) < 2_000
    model.words["more"] = 1
    step(ones(lib))
    assert len(step.statistics().keys) == 2, "its length is looked at"


def test_state_that_is_made_once_for_each_shape(lib: Lib, make: Make) -> None:
    class Model:
        def __init__(self) -> None:
            self.tables: dict[int, Array] = {}

        def forward(self, x: Array) -> Array:
            if x.size not in self.tables:
                self.tables[x.size] = x.lib.array(np.full(x.size, 3.0))
            return self.tables[x.size].line(2.0)

    step = make(Model().forward)
    for n in (2, 3, 4, 5):
        for _ in range(4):
            np.testing.assert_array_equal(step(lib.array(np.ones(n))).numpy(), [6.0] * n)
    assert step.statistics().replays >= 8, step.explain()


step_of_itself: Any = None


def of_itself(x: Array, n: int) -> Array:
    return x if n == 0 else step_of_itself(x.line(2.0), n - 1)


def test_a_function_that_calls_itself_graphed(lib: Lib, make: Make) -> None:
    global step_of_itself
    step_of_itself = make(of_itself)
    for _ in range(4):
        for n in (0, 1, 2, 3):
            found = step_of_itself(ones(lib), n)
            np.testing.assert_array_equal(found.numpy(), [2.0**n] * 4)


# ---------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        (0j, -0j),
        ((1,), (True,)),
        (frozenset([1]), frozenset([True])),
        (frozenset([0.0]), frozenset([-0.0])),
        (range(1, 1), range(5, 5)),
        (slice(0), slice(False)),
        (np.float32(0.0), np.float32(-0.0)),
        (np.float32(1.0), np.float64(1.0)),
        (((), ((1,),)), ((), ((1.0,),))),
    ],
)
def test_equal_values_that_do_not_do_the_same(one: Any, other: Any) -> None:
    assert plain_token(one) != plain_token(other)
    assert plain_token(copy.deepcopy(one)) == plain_token(one)
    assert hash(plain_token(one)) == hash(plain_token(copy.deepcopy(one)))


def test_nan_is_itself() -> None:
    assert plain_token(np.float32("nan")) == plain_token(np.float32("nan"))
    assert plain_token(float("nan")) == plain_token(float("nan"))


@pytest.mark.parametrize("nested", [False, True])
def test_an_array_that_is_given_twice(lib: Lib, make: Make, nested: bool) -> None:
    """`if key is value` of torch's attention."""

    def f(pair: Any) -> Array:
        a, b = pair
        return a.line(2.0 if a is b else 3.0)

    g = f if nested else lambda a, b: f((a, b))
    step = make(g)
    a, b = ones(lib), ones(lib)
    for x, y in [(a, a)] * 4 + [(a, b)] * 8 + [(a, a), (b, b), (a, b), (b, a)] * 4:
        found = step((x, y)) if nested else step(x, y)
        np.testing.assert_array_equal(found.numpy(), [2.0 if x is y else 3.0] * 4)
    assert step.statistics().captures == 2


def test_an_array_that_is_given_twice_with_dynamic_sizes(lib: Lib, make: Make) -> None:
    step = make(
        lambda x, y: x.line(2.0 if x is y else 3.0),
        padding=Padding({"x": 0, "y": 0}, ost.PowersOfTwo(16)),
    )
    for n in (5, 6, 7, 8, 3, 5):
        x, y = lib.array(np.ones(n)), lib.array(np.ones(n))
        for _ in range(2):
            np.testing.assert_array_equal(step(x, x).numpy(), [2.0] * n)
            np.testing.assert_array_equal(step(x, y).numpy(), [3.0] * n)


def test_containers_that_are_changed(lib: Lib, make: Make) -> None:
    """A replay appends nothing."""

    def appends(x: Array, out: list[Array]) -> Array:
        out.append(x.line(3.0))
        return x.line(2.0)

    def sets(x: Array, held: dict[str, Array]) -> Array:
        held["y"] = x.line(3.0)
        return x.line(2.0)

    one, other = make(appends), make(sets)
    for _ in range(4):
        out: list[Array] = []
        held = {"y": ones(lib)}
        for step, given in ((one, out), (other, held)):
            np.testing.assert_array_equal(step(ones(lib), given).numpy(), [2.0] * 4)
        for made in (out[0], held["y"]):
            np.testing.assert_array_equal(made.numpy(), [3.0] * 4)
    for step in (one, other):
        assert "changes a container" in step.statistics().keys[0].reason


class Cache:
    def __init__(self, keys: Any = None) -> None:
        self.keys = keys


class SlottedCache:
    __slots__ = ("__weakref__", "keys")

    def __init__(self, keys: Any = None) -> None:
        self.keys = keys


@pytest.mark.parametrize("kind", [Cache, SlottedCache])
def test_static_objects_that_make_their_arrays_at_the_first_call(
    lib: Lib, make: Make, kind: Any
) -> None:
    def f(x: Array, cache: Any) -> Array:
        if cache.keys is None:
            cache.keys = x.lib.array(np.zeros(4))
        cache.keys.shift(1.0)
        return cache.keys.line(2.0)

    step = make(f, static=("cache",))
    for _ in range(4):
        cache = kind()
        for count in range(1, 6):
            found = step(ones(lib), cache)
            np.testing.assert_array_equal(found.numpy(), [2.0 * count] * 4)
            np.testing.assert_array_equal(cache.keys.numpy(), [count] * 4)
    assert step.statistics().replays > 10, step.explain()


@pytest.mark.parametrize("kind", ["reference", "set", "values"])
def test_objects_of_weak_references_end(lib: Lib, make: Make, kind: str) -> None:
    """Whoever asks whether the object is there must get the answer of an eager call."""
    kept = [Cache(3.0)]
    made = {
        "reference": weakref.ref,
        "set": lambda one: weakref.WeakSet([one]),
        "values": lambda one: weakref.WeakValueDictionary({"a": one}),
    }
    weak: Any = made[kind](kept[0])

    def f(x: Array) -> Array:
        if kind == "reference":
            there = [one for one in [weak()] if one is not None]
        else:
            there = [*weak.values()] if kind == "values" else [*weak]
        return x.line(sum(one.keys for one in there))

    step = make(f)
    for call in range(12):
        if call == 6:
            kept.clear()
        np.testing.assert_array_equal(step(ones(lib)).numpy(), [3.0 if call < 6 else 0.0] * 4)
    assert step.statistics().replays > 4, step.explain()


class Written:
    """A cache with a number of Python's, which says where the next value goes."""

    def __init__(self, lib: Lib) -> None:
        self.keys, self.place, self.options = [lib.array(np.zeros(4)) for _ in range(3)], 0, [1.0]
        self.adding = Adding()

    def write(self, x: Array) -> None:
        self.keys[self.place].shift(self.options[0])


class Adding:
    def write(self, key: Array) -> None:
        key.shift(7.0)


class AddingMore(Adding):
    def write(self, key: Array) -> None:
        key.shift(9.0)


@pytest.mark.parametrize("guard", [True, False])
@pytest.mark.parametrize(
    "moved", ["by the function", "between calls", "seldom", "in a list", "to another class"]
)
def test_static_objects_with_numbers(lib: Lib, make: Make, moved: str, guard: bool) -> None:
    def f(x: Array, cache: Written) -> Array:
        cache.write(x)
        cache.adding.write(cache.keys[0])
        if moved == "by the function":
            cache.place = (cache.place + 1) % 3
        return x.line(2.0)

    step, x = make(f, static=("cache",), guard=guard), ones(lib)
    caches = Written(lib), Written(lib)
    for call in range(12):
        for function, cache in zip((f, step), caches, strict=True):
            if moved == "between calls" or (moved == "seldom" and call == 6):
                cache.place = (cache.place + 1) % 3
            elif moved == "in a list" and call == 6:
                cache.options[0] = 3.0
            elif moved == "to another class" and call == 6:
                cache.adding = AddingMore()
            function(x, cache)
        places = [[key.numpy() for key in cache.keys] for cache in caches]
        np.testing.assert_array_equal(*places)
        assert caches[0].place == caches[1].place
    if moved in ("seldom", "in a list", "to another class"):
        assert step.statistics().replays > 6, step.explain()


SCALES = {"by": 2.0}


@dataclasses.dataclass
class Batch:
    """An argument with methods, which read what is no argument."""

    x: Array
    own = 2.0

    def scaled(self) -> Array:
        return self.x.line(SCALES["by"] * self.own)


class Scaling(collections.namedtuple("Scaling", ["x", "y"])):
    @property
    def scaled(self) -> Callable[[], Array]:
        return lambda: self.x.line(SCALES["by"])


@pytest.mark.parametrize(
    "place", ["argument", "inside an argument", "static", "inside a static one", "closure"]
)
@pytest.mark.parametrize("kind", [Batch, Scaling])
def test_methods_of_containers(lib: Lib, make: Make, kind: Any, place: str) -> None:
    held = Batch(ones(lib)) if kind is Batch else Scaling(ones(lib), 0)
    function: Any = lambda given: given.scaled()  # noqa: E731
    given: Any = held
    if place == "inside an argument":
        function, given = lambda given: given[0]["a"].scaled(), [{"a": held}]
    elif place == "inside a static one":
        function, given = lambda given: given.keys.scaled(), Cache(held)
    elif place == "closure":
        function, given = lambda x: held.scaled(), held.x
    step = make(function, static=("given",) if "static" in place else ())
    try:
        for by, own in ((2.0, 2.0), (3.0, 2.0), (3.0, 5.0)):
            SCALES["by"], Batch.own = by, own
            for _ in range(4):
                np.testing.assert_array_equal(step(given).numpy(), function(given).numpy())
        assert step.statistics().replays >= 6, step.explain()
    finally:
        SCALES["by"], Batch.own = 2.0, 2.0


def test_static_objects_that_grow(lib: Lib, make: Make) -> None:
    def f(x: Array, cache: Cache) -> Array:
        for one in cache.keys:
            one.shift(1.0)
        return x.line(2.0)

    step, cache = make(f, static=("cache",)), Cache([lib.array(np.zeros(4))])
    for count in range(1, 13):
        step(ones(lib), cache)
        np.testing.assert_array_equal(cache.keys[0].numpy(), [count] * 4)
        if not count % 4:
            cache.keys.append(lib.array(np.zeros(4)))
    np.testing.assert_array_equal(cache.keys[1].numpy(), [8] * 4)


def test_static_objects_are_not_kept(lib: Lib, make: Make) -> None:
    """Each call of transformers' generate makes a cache, which may take gigabytes."""
    step = make(lambda x, cache: (cache.keys.shift(1.0), x.line(2.0))[1], static=("cache",))
    gone = []
    for _ in range(6):
        cache = Cache(lib.array(np.zeros(4)))
        gone.append((weakref.ref(cache), weakref.ref(cache.keys)))
        for _ in range(5):
            step(ones(lib), cache)
        del cache
    gc.collect()
    assert sum(one() is not None or two() is not None for one, two in gone) <= 1


@dataclasses.dataclass
class Doubling:
    value: Any

    def __post_init__(self) -> None:
        self.value = self.value.line(2.0)


class Pair(tuple[Any, ...]):
    def __new__(cls, one: Any, other: Any) -> Pair:
        return super().__new__(cls, (one, other))


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    value: Any
    by: float


def test_constructors_that_do_more(lib: Lib, make: Make) -> None:
    step = make(lambda d: d.value.line(1.0))
    back = make(lambda x: Doubling(x))
    pairs = make(lambda x: Pair(x.line(2.0), x))
    frozen = make(lambda d: Frozen(d.value.line(d.by), d.by))
    for _ in range(4):
        np.testing.assert_array_equal(step(Doubling(ones(lib))).numpy(), [2.0] * 4)
        np.testing.assert_array_equal(back(ones(lib)).value.numpy(), [2.0] * 4)
        found = pairs(ones(lib))
        assert type(found) is Pair
        np.testing.assert_array_equal(found[0].numpy(), [2.0] * 4)
        record = frozen(Frozen(ones(lib), 3.0))
        assert type(record) is Frozen and record.by == 3.0
        np.testing.assert_array_equal(record.value.numpy(), [3.0] * 4)
    assert step.statistics().replays == back.statistics().replays == 3
    assert frozen.statistics().replays == 3 and "Pair" in pairs.statistics().keys[0].reason


def test_records_with_more_than_their_fields(lib: Lib, make: Make) -> None:
    def f(x: Array, record: Any) -> Array:
        return x.line(record.by)

    step = make(f)
    for value in (2.0, 2.0, 2.0, 3.0, 3.0, 2.0):
        record = Record(1.0)
        record.by = value  # type: ignore[attr-defined]
        np.testing.assert_array_equal(step(ones(lib), record).numpy(), [value] * 4)
    assert step.statistics().captures == 2


# ---------------------------------------------------------------- results, and the function itself


def test_results_of_one_call_share_nothing_with_those_of_another(lib: Lib, make: Make) -> None:
    step = make(lambda x: {"a": [x.line(2.0), (x.line(3.0), None)], 7: Record(1.0, x.line(4.0))})
    found = [step(lib.array(np.full(4, start))) for start in range(6)]
    for start, one in enumerate(found):
        assert list(one) == ["a", 7] and one["a"][1][1] is None
        for by, array in ((2, one["a"][0]), (3, one["a"][1][0]), (4, one[7].more)):
            np.testing.assert_array_equal(array.numpy(), [by * start] * 4)
    assert found[4]["a"] is not found[5]["a"] and found[4][7] is not found[5][7]


def test_results_that_are_nested_too_deep_run_eagerly(lib: Lib, make: Make) -> None:
    def f(x: Array) -> Any:
        value: Any = x.line(2.0)
        for _ in range(200):
            value = [value]
        return value

    step = make(f)
    for _ in range(3):
        found = step(ones(lib))
        while isinstance(found, list):
            (found,) = found
        np.testing.assert_array_equal(found.numpy(), [2.0] * 4)
    assert "cannot be built again" in step.statistics().keys[0].reason


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_it_is_not_copied(lib: Lib, make: Make, copied: Callable[[Any], Any]) -> None:
    step = make(twice)
    with pytest.raises(TypeError, match="graphed twice can be neither copied nor pickled"):
        copied(step)
    if copied is not copy.copy:
        with pytest.raises(TypeError, match="graph the copy"):
            copied({"inside": step})


# ---------------------------------------------------------------- memory that only a call saw


@pytest.mark.parametrize("during", [False, True])
def test_memory_that_a_helper_alone_owns_lives_as_long_as_the_graph(
    lib: Lib, make: Make, during: bool
) -> None:
    """`during`: the helper drops it inside of the capture, where the function had it last."""
    made: list[weakref.ref[ost.Buffer]] = lib.notes

    @functools.lru_cache(maxsize=1)
    def table(size: int) -> Array:
        values = lib.array(np.full(size, 3.0))
        lib.notes.append(weakref.ref(values.buffer))
        return values

    def read(size: int) -> Array:
        out = table(size).line(1.0, 1.0)
        if during and lib.capturing():
            table.cache_clear()
        return out

    step = make(lambda x: read(x.size))
    step(ones(lib))
    step(ones(lib))
    table.cache_clear()
    gc.collect()
    for _ in range(2):
        np.testing.assert_array_equal(step(ones(lib)).numpy(), np.full(4, 4.0))
    assert step.statistics().replays == 3, step.explain()
    assert made[0]() is not None
    step.close()
    gc.collect()
    assert made[0]() is None
