"""The short way against the key: whatever the key tells apart, the short way does not take.

Arguments, closures, globals, attributes, nested containers and modes are changed at random.  After
each change `match` must be refused unless the key, read anew, is the one that it was made of.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import random
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable
from types import FunctionType, MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ostinato.interop.graphed import Graphed
from ostinato.interop.reading import recheck
from ostinato.interop.reading.recheck import Checks
from tests.interop.library import Array, Lib, Stateful, SubArray

pytestmark = pytest.mark.skipif(not recheck.compiled(), reason="the extension was not built")

VALUES: list[Any] = [
    *(0, 1, True, False, 0.0, -0.0, 1.0, 2.5, float("nan"), None, "a", "b", b"a", 1 << 80, 1j),
    *((1, 2), (1, 2.0), (True, 2), slice(0, 3), slice(0, None), range(3), frozenset([1]), len, int),
]


def key_of(step: Graphed, args: Any, kwargs: Any) -> tuple[Any, int]:
    """The key of a call, and the number of times that guarded arrays were seen to move."""
    try:
        return step._key(args, kwargs)[0], step._epoch
    except Exception as error:
        return type(error), -1


def agree(step: Graphed, args: Any, kwargs: Any) -> bool:
    """Whether the short way takes a call, which it may only if the key is the one it stands for."""
    (hot,) = step._hot
    taken = hot.match(args, kwargs) is not None
    line = next((k for k, one in step._lines.items() if one is hot.line), None)
    epoch = step._epoch
    key, now = key_of(step, args, kwargs)
    if taken:
        assert key == line and now == epoch, (args, kwargs)
    return taken


class Thing:
    def __init__(self) -> None:
        self.number: Any = 1
        self.name = "a"
        self.inner = SimpleNamespace(value=1)

    def change(self) -> None:
        self.number = 2

    def other(self) -> Any:
        return self.number


class Named(dict):  # type: ignore[type-arg]
    pass


class Listed(list):  # type: ignore[type-arg]
    pass


class Shared:
    number: Any = 1
    extra: Any = 2


SCALE: Any = 2.0


SEEDS = [0, 1, *[pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 8)]]


@pytest.mark.parametrize("seed", SEEDS)
def test_arguments(lib: Lib, make: Any, seed: int) -> None:
    rng = random.Random(seed)

    def array() -> Any:
        kind = rng.choice([Array, Array, Array, SubArray])
        made = kind(lib, (rng.choice([2, 3]),))
        made.place = rng.choice(["device"] * 5 + ["elsewhere"])
        return made

    def value(depth: int = 0) -> Any:
        kind = rng.randrange(8 if depth < 2 else 4)
        if kind < 2:
            return array()
        if kind < 4:
            return rng.choice(VALUES)
        if kind == 4:
            return [value(depth + 1) for _ in range(rng.randrange(3))]
        if kind == 5:
            return tuple(value(depth + 1) for _ in range(rng.randrange(3)))
        if kind == 6:
            return {k: value(depth + 1) for k in rng.sample("xyz", rng.randrange(3))}
        return rng.choice(VALUES)

    def function(x: Any, *rest: Any, **named: Any) -> Any:
        return x.line(2.0)

    taken = refused = heated = 0
    for _ in range(25):
        step = make(function)
        args = (Array(lib, (3,)), *[value() for _ in range(rng.randrange(3))])
        kwargs = {k: value() for k in rng.sample("abc", rng.randrange(3))}
        for _ in range(3):
            step(*args, **kwargs)
        if not step._hot:
            continue
        heated += 1
        assert agree(step, args, kwargs)
        for _ in range(20):
            if not step._hot:
                break
            others, named = list(args), dict(kwargs)
            change = rng.randrange(4)
            if change == 0 and len(others) > 1:
                others[rng.randrange(1, len(others))] = value()
            elif change == 1:
                others[0] = array()
            elif change == 2 and named:
                named[rng.choice([*named])] = value()
            elif change == 3:
                named = dict(rng.sample([*named.items()], rng.randrange(len(named) + 1)))
            if rng.random() < 0.1:
                others = others[: rng.randrange(len(others) + 1)]
            if agree(step, tuple(others), named):
                taken += 1
            else:
                refused += 1
    assert heated > 5 and taken > 5 and refused > 20


@pytest.mark.parametrize("seed", SEEDS)
def test_what_a_function_uses(lib: Lib, make: Any, seed: int) -> None:
    rng = random.Random(seed)
    weight, other = lib.array(np.ones(3)), lib.array(np.ones(3))
    thing = Thing()
    box: list[Any] = [1, {"k": 2, "w": weight}, (3, [4])]
    number: Any = 1
    first, named, listed = weight, Named(k=1, w=weight), Listed([1, weight])
    wrapped, under, shared = UserDict(k=1, w=weight), {"k": 1}, Shared()
    proxy, keyed = MappingProxyType(under), {shared: 1, weight: 2}
    part, space_of = functools.partial(len, k=1), ModuleType("space")
    odd = [named, listed, wrapped, proxy, keyed, part, thing.change]

    def function(x: Any, by: Any = 1, *, plus: Any = 2) -> Any:
        _ = (weight, thing, box, number, SCALE, odd, shared.number, shared.extra)
        _ = (getattr(space_of, "number", 1), lambda: (space_of.number, space_of.extra))
        return x.line(2.0)

    def set_number() -> None:
        nonlocal number
        number = rng.choice(VALUES)

    def set_weight() -> None:
        nonlocal weight
        weight = rng.choice([weight, other])

    def set_box() -> None:
        nonlocal box
        box = [1, {"k": 2, "w": weight}, (3, [4])]

    def delete() -> None:
        vars(thing).pop("name", None)

    def redefine(name: str, value: Any) -> None:
        setattr(function, name, value)

    space = globals()
    changes: list[Callable[[], Any]] = [
        set_number,
        set_weight,
        set_box,
        delete,
        lambda: box.append(rng.choice(VALUES)),
        lambda: box.pop() if len(box) > 2 else None,
        lambda: box[1].__setitem__("k", rng.choice(VALUES)),
        lambda: box[1].__setitem__(rng.choice("kmn"), rng.choice([weight, other])),
        lambda: box[1].__setitem__("w", box[1].pop("w", 1)),
        lambda: box.__setitem__(0, rng.choice([*VALUES, weight, [1]])),
        lambda: setattr(thing, "number", rng.choice([*VALUES, weight, [1]])),
        lambda: setattr(thing, rng.choice(["extra", "inner"]), rng.choice(VALUES)),
        lambda: setattr(thing, "__dict__", dict(vars(thing))),
        lambda: setattr(thing, "__class__", rng.choice([Thing, type("Other", (Thing,), {})])),
        lambda: space.__setitem__("SCALE", rng.choice([*VALUES, thing, box, weight])),
        lambda: setattr(weight, "buffer", rng.choice([weight.buffer, other.buffer])),
        lambda: redefine("__defaults__", (rng.choice(VALUES),)),
        lambda: redefine("__kwdefaults__", {"plus": rng.choice(VALUES)}),
        lambda: (function.__kwdefaults__ or {}).__setitem__("plus", rng.choice(VALUES)),
        lambda: named.__setitem__(rng.choice("kmn"), rng.choice([*VALUES, weight, other, [1]])),
        lambda: named.pop(rng.choice("kmn"), None),
        lambda: dict.update(named, w=rng.choice([weight, other])),
        lambda: setattr(named, "number", rng.choice(VALUES)),
        lambda: listed.__setitem__(0, rng.choice([*VALUES, weight, [1]])),
        lambda: list.append(listed, 1) if len(listed) < 4 else listed.pop(),
        lambda: wrapped.__setitem__(rng.choice("kw"), rng.choice([*VALUES, weight, other])),
        lambda: setattr(wrapped, "data", dict(wrapped.data)),
        lambda: under.__setitem__(rng.choice("km"), rng.choice(VALUES)),
        lambda: keyed.__setitem__(rng.choice([shared, first]), rng.choice(VALUES)),
        lambda: keyed.__setitem__(first, keyed.pop(first)),
        lambda: part.keywords.__setitem__(rng.choice("km"), rng.choice(VALUES)),
        lambda: odd.__setitem__(5, functools.partial(len, k=rng.choice(VALUES))),
        lambda: odd.__setitem__(6, rng.choice([thing.change, thing.other])),
        lambda: setattr(Shared, rng.choice(["number", "extra"]), rng.choice(VALUES)),
        lambda: setattr(shared, rng.choice(["number", "extra"]), rng.choice(VALUES)),
        lambda: vars(shared).clear(),
        lambda: setattr(space_of, rng.choice(["number", "extra"]), rng.choice([*VALUES, weight])),
        lambda: setattr(space_of, "unused", rng.choice(VALUES)),
        lambda: setattr(lib, "mode", rng.choice(["plain", "other"])),
        lambda: setattr(lib, "current", rng.choice(lib.streams[:2])),
        lambda: None,
    ]
    step, x = make(function), lib.array(np.ones(3))
    taken = refused = 0
    for _ in range(80):
        for _ in range(8):
            step(x)
            if step._hot:
                break
        if not step._hot:  # looked for after fewer and fewer replays
            for line in step._lines.values():
                line.unmatched = 0
            rng.choice(changes)()
            continue
        step._hot = step._hot[:1]
        rng.choice(changes)()
        if agree(step, (x,), {}):
            taken += 1
        else:
            refused += 1
    space["SCALE"] = 2.0
    assert taken > 5 and refused > 15


def test_an_ordered_dict_in_another_order(lib: Lib, make: Any) -> None:
    """Tables of hooks are such dicts, also the empty ones of modules."""
    held = OrderedDict(a=2.0, b=5.0)
    step = make(lambda x: x.line(next(iter(held.values()))))
    x = lib.array([1.0])
    for _ in range(4):
        assert step(x).numpy()[0] == 2.0
    assert step._hot, "it has no short way"
    held.move_to_end("a")
    assert [*dict.values(held)] == [2.0, 5.0]
    assert step(x).numpy()[0] == 5.0
    held["a"] = 3.0
    held.move_to_end("b")
    for _ in range(4):
        assert step(x).numpy()[0] == 3.0


def test_items_at_other_places(lib: Lib) -> None:
    values = [object() for _ in range(4)]
    held = dict(zip("abcd", values, strict=True))
    checks = Checks(lib)
    checks.some_items(held, {"b": values[1]})
    checks.size(held, 4)
    checks.some_items(held, {"b": values[1], "d": values[3]})
    match = checks.made(0, ()).match
    assert match((), {}) == []
    held["a"] = held.pop("a")
    assert match((), {}) == []
    held["e"] = held.pop("b")  # at the place where the other one was, or none
    assert match((), {}) is None
    held["b"] = held.pop("e")
    assert match((), {}) == []
    for number in range(100):
        held[f"x{number}"] = number
    assert match((), {}) is None
    for number in range(100):
        del held[f"x{number}"]
    assert match((), {}) == []
    held["b"], held["d"] = held["d"], held["b"]
    assert match((), {}) is None
    held.clear()
    assert match((), {}) is None


def test_one_dict_noted_twice(lib: Lib) -> None:
    held, empty = {"a": 1, "b": None}, [{} for _ in range(3)]  # type: ignore[var-annotated]
    checks = Checks(lib)
    checks.some_items(held, {"a": 1})
    for each in empty:
        checks.size(each, 0)
        checks.size(each, 0)
    checks.size(held, 2)
    for change in (lambda: checks.size(held, 1), lambda: checks.some_items(held, {"a": None})):
        with pytest.raises(recheck.Inexpressible):
            change()
    match = checks.made(0, ()).match
    assert match((), {}) == []
    empty[1]["a"] = 1
    assert match((), {}) is None


class Tape(io.BytesIO):
    pass


@pytest.mark.parametrize("kind", [io.BytesIO, Tape])
def test_numbers_of_a_built_in_method(lib: Lib, kind: Any) -> None:
    tapes = [kind(bytes(9)) for _ in range(3)]
    tapes[1].seek(5)
    checks = Checks(lib)
    assert checks.each(io.BytesIO.tell, tapes) == [0, 5, 0]
    assert checks.each(int.conjugate, [1 << 80, -1, True]) == [1 << 80, -1, 1]
    match = checks.made(0, ()).match
    assert match((), {}) == []
    tapes[2].seek(1)
    assert match((), {}) is None
    tapes[2].seek(0)
    assert match((), {}) == []
    tapes[0].close()
    assert match((), {}) is None


class Held:
    """Its attributes are a dict that is noted."""


WAYS_TO_CHANGE = """
def set_attribute(thing, name, value): thing.a = value
def set_any_attribute(thing, name, value): setattr(thing, name, value)
def set_past_the_class(thing, name, value): object.__setattr__(thing, name, value)
def delete_attribute(thing, name, value): vars(thing).get(name, value) and delattr(thing, name)
def add(thing, name, value): thing.a = thing.a if value is None else thing.a
def set_item(thing, name, value): thing.__dict__[name] = value
def set_item_of_dict(thing, name, value): dict.__setitem__(vars(thing), name, value)
def delete_item(thing, name, value): del vars(thing)[name]
def update(thing, name, value): vars(thing).update({name: value})
def update_by_pairs(thing, name, value): vars(thing).update([(name, value)])
def merge(thing, name, value): held = vars(thing); held |= {name: value}
def begin_anew(thing, name, value): vars(thing).__init__(**{name: value})
def pop(thing, name, value): vars(thing).pop(name)
def pop_item(thing, name, value): vars(thing).popitem()
def set_default(thing, name, value): vars(thing).setdefault(name, value)
def clear(thing, name, value): vars(thing).clear()
def fill(thing, name, value): held = vars(thing); held.clear(); held.update(FULL)
def turn(thing, name, value): held = vars(thing); held[name] = held.pop(name)
def run(thing, name, value): exec(f"{name} = given", {"given": value}, vars(thing))
def run_globally(thing, name, value):
    vars(thing)["given"] = value
    exec(f"def f():\\n global {name}\\n {name} = given\\nf()\\ndel f", vars(thing))
    del vars(thing)["given"], vars(thing)["__builtins__"]
def delegate(thing, name, value): ctypes.pythonapi.PyDict_SetItem(vars(thing), name, value)
def nothing(thing, name, value): pass
"""


@pytest.mark.parametrize("seed", range(6))
def test_dicts_that_change_in_any_way(lib: Lib, seed: int) -> None:
    """Each check is made right after each change, by comparison and by the count of changes."""
    rng = random.Random(seed)
    values = [None, True, 1, 1.0, 0.5 + 0.5, "a", object(), [], {}]
    space: dict[str, Any] = {"ctypes": ctypes, "FULL": dict(zip("abcd", values, strict=False))}
    ctypes.pythonapi.PyDict_SetItem.argtypes = [ctypes.py_object] * 3
    exec(WAYS_TO_CHANGE, space)
    ways = [way for way in space.values() if isinstance(way, FunctionType)]
    agreed = [0, 0]
    for _ in range(30):
        thing = Held()
        vars(thing).update(space["FULL"])
        held = vars(thing)
        whole, some = Checks(lib), Checks(lib)
        whole.items(held, [*held.values()])
        some.some_items(held, {"a": held["a"], "c": held["c"]})
        some.size(held, len(held))
        matches = [checks.made(0, ()).match for checks in (whole, some)]
        before = [*held.items()]
        for _ in range(60):
            with contextlib.suppress(KeyError, AttributeError):
                way = space["fill"] if rng.random() < 0.2 else rng.choice(ways)
                way(thing, rng.choice("abcde"), rng.choice(values))
            assert vars(thing) is held
            same = [
                len(held) == len(before)
                and all(a is c and b is d for (a, b), (c, d) in zip(held.items(), before)),  # noqa: B905
                len(held) == len(before)
                and held.get("a", 0) is None
                and held.get("c") is values[2],
            ]
            for _ in range(2):
                assert [match((), {}) == [] for match in matches] == same, way
            for each in same:
                agreed[each] += 1
    assert min(agreed) > 200, agreed


@pytest.mark.parametrize("seed", SEEDS)
def test_states(lib: Lib, make: Any, seed: int) -> None:
    """Objects all of whose state counts."""
    rng = random.Random(seed)

    def value(depth: int = 0) -> Any:
        kind = rng.randrange(9 if depth < 3 else 3)
        if kind == 0:
            return Array(lib, (rng.choice([2, 3]),))
        if kind < 3:
            return rng.choice(VALUES)
        if kind == 3:
            return [value(depth + 1) for _ in range(rng.randrange(3))]
        if kind == 4:
            return {rng.choice(names): value(depth + 1) for _ in range(rng.randrange(3))}
        if kind == 5:
            return OrderedDict({rng.choice("xy"): value(depth + 1)})
        if kind == 6:
            return SimpleNamespace(**{rng.choice("xyz"): value(depth + 1)})
        if kind == 7:
            return tuple(value(depth + 1) for _ in range(rng.randrange(3)))
        return rng.choice([{1}, deque([1]), np.ones(1), shared])

    names: list[Any] = ["a", "b", 1, Array(lib, (2,))]
    shared = Stateful(x=1)

    def holders(found: Any) -> list[Any]:
        """All that can be changed in it."""
        if isinstance(found, dict):
            return [found, *[each for one in found.values() for each in holders(one)]]
        if isinstance(found, list | tuple | deque):
            inside = [each for one in found for each in holders(one)]
            return inside if isinstance(found, tuple) else [found, *inside]
        if isinstance(found, set | np.ndarray):
            return [found]
        return holders(vars(found)) if isinstance(found, Stateful | SimpleNamespace) else []

    taken = refused = 0
    for _ in range(20):
        state = Stateful(one=value(), two=[value() for _ in range(3)], three={"a": value()})
        step = make(lambda x, state=state: x.line(2.0))
        x = Array(lib, (3,))
        for _ in range(3):
            step(x)
        if not step._hot:
            continue
        assert agree(step, (x,), {})
        for _ in range(15):
            if not step._hot:
                break
            held = rng.choice(holders(state))
            if isinstance(held, dict):
                name = rng.choice([*held, "more"])
                change = rng.randrange(4)
                if change == 0:
                    held.pop(name, None)
                elif change == 1 and name in held:
                    held[name] = held.pop(name)
                elif change == 2:
                    held[name] = value()
            elif isinstance(held, set):
                held ^= {rng.randrange(3)}
            elif isinstance(held, np.ndarray):
                held[0] = rng.randrange(2)
            elif rng.random() < 0.5:
                held.append(value())
            elif held:
                held[rng.randrange(len(held))] = value()
            if agree(step, (x,), {}):
                taken += 1
            else:
                refused += 1
                break
    assert taken > 5 and refused > 5, (taken, refused)
