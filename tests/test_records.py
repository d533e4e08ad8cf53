"""`ostinato.records.dataclass` against the standard library's, whose place it takes."""

from __future__ import annotations

import copy
import dataclasses
import gc
import inspect
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

import pytest

import ostinato
from ostinato import records
from ostinato.driver.api import MemoryRange
from tests.interrupted import interrupt

T = TypeVar("T")


def define(dataclass: Any) -> Any:
    """Makes classes of all kinds that the library has."""

    @dataclass(frozen=True, slots=True)
    class Point(Generic[T]):
        """A record with defaults."""

        x: int
        y: T
        note: str = field(default="none", compare=False, repr=False)
        tags: list[str] = field(default_factory=lambda: ["new"], hash=False)
        seen: list[int] = field(default_factory=list, init=False, compare=False)
        kind: str = field(default="point", init=False)

        @property
        def sum(self) -> object:
            return self.x + self.y  # type: ignore[operator]

    @dataclass(frozen=True, slots=True, eq=False)
    class Same:
        """A record that equals only itself."""

        x: int

    @dataclass(frozen=True, slots=True, repr=False)
    class Own:
        """A record with methods of its own."""

        x: int
        y: int = 0

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Own) and self.x == other.x

        def __repr__(self) -> str:
            return f"<{self.x}>"

    @dataclass(slots=True)
    class Open:
        """A record that can be written."""

        x: int
        _y: int = 2

    @dataclass(slots=True, eq=False, weakref_slot=True)
    class Referred:
        """A record with weak references."""

        x: int

    @dataclass(frozen=True, slots=True)
    class Empty:
        """A record without fields."""

    class Derived(Point):  # type: ignore[type-arg]
        """A class with a record for its base, and attributes of its own."""

    return SimpleNamespace(
        Point=Point,
        Same=Same,
        Own=Own,
        Open=Open,
        Referred=Referred,
        Empty=Empty,
        Derived=Derived,
    )


def told(call: Callable[[], object]) -> object:
    """What a call returns, or the type and the text of its error."""
    try:
        return call()
    except (TypeError, AttributeError, ValueError) as error:
        return type(error), str(error)


def matched(value: Any, kind: Any) -> object:
    match value:
        case kind(x, y):
            return x, y
    return None


def collected() -> bool:
    return gc.collect() + gc.collect() >= 0


def changed(value: Any, name: str, new: object) -> object:
    setattr(value, name, new)
    return getattr(value, name)


# Each is done with classes that nobody has used yet.
USES: dict[str, Callable[[Any], object]] = {
    "defaults": lambda d: [str(d.Point(1, 2)), d.Point(1, 2).tags, d.Point(1, 2).note],
    "not of __init__": lambda d: [d.Point(1, 2).seen, d.Point(1, 2).kind],
    "a list of its own": lambda d: d.Point(1, 2).tags is d.Point(1, 2).tags,
    "a property": lambda d: d.Point(1, 2).sum,
    "too few": lambda d: d.Point(1),
    "too many": lambda d: d.Point(1, 2, "", [], 5),
    "unknown": lambda d: d.Point(1, 2, other=3),
    "unknown to __init__": lambda d: d.Point(1, 2, seen=[]),
    "equal": lambda d: (d.Point(1, 2) == d.Point(1, 2, "x"), d.Point(1, 2) != d.Point(1, 3)),
    "equal to others": lambda d: (d.Point(1, 2) == (1, 2), d.Point(1, 2) == d.Derived(1, 2)),
    "hash": lambda d: len({d.Point(1, 2), d.Point(1, 2, "x", ["new"]), d.Point(2, 1)}),
    "no hash": lambda d: hash(d.Open(1)),
    "identity": lambda d: (d.Same(1) == d.Same(1), len({d.Same(1), d.Same(1)}), str(d.Same(1))),
    "own": lambda d: (d.Own(1, 2) == d.Own(1, 3), hash(d.Own(1)) == hash(d.Own(1)), str(d.Own(1))),
    "write": lambda d: changed(d.Point(1, 2), "x", 3),
    "delete": lambda d: delattr(d.Point(1, 2), "x"),
    "write a subclass": lambda d: changed(d.Derived(1, 2), "x", 3),
    "write an open one": lambda d: changed(d.Open(1), "x", 5),
    "write what an open one lacks": lambda d: changed(d.Open(1), "z", 5),
    "compare open ones": lambda d: (
        d.Open(1) == d.Open(1, 2),
        d.Open(1) == d.Open(2),
        str(d.Open(1)),
    ),
    "fields": lambda d: [(f.name, f.type, f.init, f.hash) for f in dataclasses.fields(d.Point)],
    "is one": lambda d: [dataclasses.is_dataclass(one) for one in (*vars(d).values(), d.Same(1))],
    "replace": lambda d: str(dataclasses.replace(d.Point(1, 2, "x"), y=5)),
    "as others": lambda d: (dataclasses.asdict(d.Own(1, 2)), dataclasses.astuple(d.Own(1, 2))),
    "match": lambda d: (matched(d.Own(1, 2), d.Own), matched(3, d.Own)),
    "match what was not made": lambda d: matched(object.__new__(d.Own), d.Own),
    "signature": lambda d: [str(inspect.signature(one)) for one in vars(d).values()],
    "copy": lambda d: (str(copy.copy(d.Point(1, 2))), copy.deepcopy(d.Own(1, 2)).y),
    "copy an open one": lambda d: str(copy.copy(d.Open(1, 3))),
    "state": lambda d: d.Point(1, 2).__getstate__(),
    "slots": lambda d: [one.__slots__ for name, one in vars(d).items() if name != "Derived"],
    "weak": lambda d: weakref.ref(d.Referred(1))(),
    "not weak": lambda d: weakref.ref(d.Point(1, 2)),
    "after a collection": lambda d: (dataclasses.fields(d.Empty), collected(), str(d.Empty())),
    "empty": lambda d: (d.Empty() == d.Empty(), len({d.Empty(), d.Empty()}), str(d.Empty())),
    "nothing for an empty one": lambda d: d.Empty(1),
    "derive": lambda d: dataclasses.dataclass(frozen=True)(type("More", (d.Own,), {}))(1, 2).y,
    "where": lambda d: (d.Own.__init__.__qualname__, d.Own.__init__.__module__),
}


@pytest.mark.parametrize("use", USES)
def test_a_record_is_used_as_one_of_the_standard_library(use: str) -> None:
    ours, standard = (
        told(lambda made=made: USES[use](define(made)))  # type: ignore[misc]
        for made in (records.dataclass, dataclasses.dataclass)
    )
    assert ours == standard


def test_a_frozen_record_takes_no_other_attribute() -> None:
    """The standard library's raises a TypeError about `super`, at least in Python 3.11."""
    made = define(records.dataclass)
    for record in (made.Point(1, 2), made.Derived(1, 2)):
        with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'z'"):
            record.z = 3


@pytest.mark.skipif(sys.version_info < (3, 13), reason="copy.replace came with Python 3.13")
def test_copy_replace() -> None:
    assert copy.replace(define(records.dataclass).Own(1, 2), y=3).y == 3  # type: ignore[attr-defined]


def test_a_record_is_unpickled_where_none_was_made() -> None:
    value = MemoryRange(4096, 64)
    code = (
        "import pickle, sys\n"
        f"value = pickle.loads({pickle.dumps(value)!r})\n"
        "print(value, value.end, value == type(value)(4096, 64), len({value}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"{value} 4160 True 1"


def test_threads_make_the_first_record_at_once() -> None:
    for _ in range(30):
        point = define(records.dataclass).Point
        barrier, found = threading.Barrier(4), []

        def make(
            point: Any = point, barrier: threading.Barrier = barrier, found: list[Any] = found
        ) -> None:
            barrier.wait()
            found.append((str(point(1, 2)), hash(point(1, 2)), point(1, 2) == point(1, 2)))

        threads = [threading.Thread(target=make) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 4 and len(set(found)) == 1


def test_the_library_s_records_are_as_the_standard_library_makes_them() -> None:
    """In particular none has what `records.dataclass` does not know."""
    root = Path(ostinato.__file__).parent
    homes = [
        ".".join(("ostinato", *path.relative_to(root).with_suffix("").parts))
        for path in sorted(root.rglob("*.py"))
        if "from ostinato.records import dataclass" in path.read_text()
    ]
    program = f"""
import dataclasses, importlib, inspect, sys
import ostinato.records
if sys.argv[1] == "standard":
    ostinato.records.dataclass = dataclasses.dataclass
for home in {homes}:
    for name, kind in vars(importlib.import_module(home)).items():
        if not (inspect.isclass(kind) and kind.__module__ == home):
            continue
        if "__dataclass_params__" not in vars(kind):
            continue
        own = [getattr(kind, each) is getattr(object, each) for each in
               ("__repr__", "__eq__", "__setattr__", "__delattr__", "__hash__")]
        print(home, name, kind.__dataclass_params__, inspect.signature(kind), kind.__slots__,
              kind.__match_args__, kind.__hash__ is None, own)
        for each in dataclasses.fields(kind):
            make = getattr(each.default_factory, "__qualname__", None)
            default = "none" if each.default is dataclasses.MISSING else each.default
            print(" ", each.name, each.type, default, make, each.init, each.repr, each.hash,
                  each.compare, each.kw_only)
"""
    ours, standard = (
        subprocess.run(
            [sys.executable, "-c", program, which], capture_output=True, text=True, check=True
        ).stdout
        for which in ("ours", "standard")
    )
    assert ours.count("_DataclassParams") > 60
    assert ours == standard


@pytest.mark.parametrize("name", ["equal", "hash", "own", "fields", "match"])
def test_an_interrupted_first_use_raises_and_the_next_one_is_right(name: str) -> None:
    """Ctrl-C got lost where Python looks up the method of an operator: a record could not be
    hashed, or equal records were different."""
    use, at, where = USES[name], 0, ""
    expected = use(define(dataclasses.dataclass))
    while where is not None:
        at += 1
        made = define(records.dataclass)
        where = interrupt(lambda m=made: use(m), at)
        assert use(made) == expected, where
    assert at > 5
