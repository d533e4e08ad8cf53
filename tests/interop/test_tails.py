"""What is proved of the rest of a call, against what the call does with other values.

The functions here get their value from a callable that no Python code implements, as `.item()` is.
"""

from __future__ import annotations

import functools
import random
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest

from ostinato.interop.reading.tails import ResultPlace


class Probe:
    """A source of one value, which asks for its place where it is given.

    Functions under test call `probe.item()`; `get` is a function of Python around it."""

    def __init__(self) -> None:
        self.value: Any = 0.5
        self.function: Callable[..., Any] = abs
        self.place: ResultPlace | None = None
        self.log: list[object] = []
        self.item = functools.partial(self._give)
        self.twice = functools.partial(self._twice)
        self.parts = [self, self]

    def _give(self) -> Any:
        def given(called: Any, count: int) -> tuple[()] | None:
            return () if (called, count) in (("item", 0), (float, 1)) else None

        until = Probe.call.__code__
        self.place = ResultPlace.of(sys._getframe(1), self.function, until, given)
        return self.value

    __float__ = _give

    def _twice(self) -> Any:
        return self.item(), self.item()

    def get(self) -> Any:
        return self.item()

    def note(self, *values: object) -> int:
        self.log.append(values)
        return len(self.log)

    def call(self, function: Callable[..., Any]) -> tuple[Any, list[object]]:
        self.function, self.place, self.log = function, None, []
        return function(self, 3), self.log

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *error: object) -> bool:
        self.note("exit")
        return False


def compiled(source: str) -> Callable[..., Any]:
    names: dict[str, Any] = {}
    exec(textwrap.dedent(source), names)
    found: Callable[..., Any] = names["f"]
    return found


def body(text: str) -> str:
    return f"def f(p, n):\n{textwrap.indent(textwrap.dedent(text).strip(), '    ')}\n"


RETURNED = {
    "itself": ("return p.item()", [()]),
    "in a tuple": ("return n, p.item()", [(1,)]),
    "in a list": ("return [n, p.item(), n]", [(1,)]),
    "in a dict": ("return {'a': n, 'loss': p.item()}", [("loss",)]),
    "deeper": ("return n, {'a': [n, (p.item(), n)]}", [(1, "a", 1, 0)]),
    "by a variable": ("v = p.item()\nw = n + 1\nreturn w, v", [(1,)]),
    "twice": ("v = p.item()\nreturn v, n, v", [(0,), (2,)]),
    "not at all": ("p.item()\nreturn n", []),
    "from a block": ("with p:\n    return n, p.item()", [(1,)]),
    "after a loop": ("v = p.item()\nfor i in range(n):\n    p.note(i)\nreturn v", [()]),
    "whatever follows": ("v = p.item()\nif p.note(n) > 5:\n    n += 1\nreturn n, v", [(1,)]),
    "beside other work": ("return p.item(), p.note(n, n + 1) * 2, [n][0]", [(0,)]),
    "by another function": ("return n, p.get()", [(1,)]),
    "by a callable of C": ("return n, p.twice()", [(1, 1)]),
    "before others": ("return [p.item(), *[n] * 2]", [(0,)]),
    "before others in a tuple": ("return p.item(), *[n] * 2", [(0,)]),
    "over others": ("return {**{'loss': n, 'b': n}, 'loss': p.item()}", [("loss",)]),
    "unpacked": ("v, w = p.item(), n\nreturn w, v", [(1,)]),
    "a finally": ("try:\n    return p.item()\nfinally:\n    p.note(n)", [()]),
    "an attribute's object": ("return p.parts[0].item()", [()]),
    "converted": ("return n, p.item().tolist()", [(1,)]),
}
USED = {
    "added": "return p.item() + 1",
    "compared": "return n if p.item() > 0 else 2",
    "noted": "v = p.item()\np.note(v)\nreturn v",
    "kept": "p.value2 = p.item()\nreturn n",
    "a key": "return {p.item(): n}",
    "in a text": "return f'{p.item()}'",
    "one of two": "v = p.item()\nif p.note() > 5:\n    return n, v\nreturn v, n",
    "in a set": "return {p.item(), n}",
    "by locals": "v = p.item()\nreturn locals()",
    "in a closure": "v = p.item()\ndef g():\n    return v\nreturn g() + 1",
    "negated": "v = p.item()\nreturn -v",
    "tested": "v = p.item()\nreturn n if v else 0",
    "an element": "return [n, n][int(p.item())]",
    "of a caller in C": "return max(p.item(), n)",
    "by a callable in C": "return sum(map(lambda q: q.get(), [p]))",
    "in a comprehension": "return [q.item() for q in p.parts if q.note() < 9]",
    "a generator": "return [*(q.item() for q in p.parts)]",
    "in a list that grows": "v = [n]\nv.append(p.item())\nreturn v",
    "a list that grows": "v = [p.item()]\nv.append(n)\nreturn v",
    "converted in two ways": "v = p.item()\nreturn v, v.tolist()",
    "an argument of a method": "return p.item().tolist(1)",
    "another method": "return p.item().hex()",
    "a global": "global G\nG = p.item()\nreturn n",
    "in a while": "v = p.item()\nwhile v > 0:\n    v -= 1\nreturn v",
    "or": "return p.item() or n",
    "sliced": "return [1, 2, 3][: p.item()]",
    "starred": "return [*[p.item()], n]",
    "behind others": "return [*[n] * 2, p.item()]",
    "under others": "return {'loss': p.item(), **{'loss': n}}",
    "behind, and unpacked": "v, w, x = [p.item(), *[n] * 2]\nreturn x, v",
    "by keyword": "return dict(a=p.item())",
}


class Number(float):
    def tolist(self, count: int = 0) -> float:
        return float(self)

    def __index__(self) -> int:
        return int(self)


@pytest.mark.parametrize("name", RETURNED)
def test_a_value_that_is_only_returned(name: str) -> None:
    probe = Probe()
    probe.value = Number(0.5)
    source, paths = RETURNED[name]
    result, _ = probe.call(compiled(body(source)))
    assert probe.place is not None
    assert [*probe.place.paths] == paths
    if paths:
        expected = probe.place.convert(probe.value)
        assert probe.place.get(result) == expected
        marked = probe.place.put(result, "x")
        assert (probe.place.get(marked) == "x" and type(marked) is type(result)) or paths == [()]


@pytest.mark.parametrize("name", USED)
def test_a_value_that_is_used(name: str) -> None:
    probe = Probe()
    probe.value = Number(0.5)
    function = compiled(body(USED[name]))
    try:
        probe.call(function)
    except TypeError:
        assert name == "sliced"
    assert probe.place is None


def test_a_call_that_the_interpreter_has_specialised() -> None:
    """Python runs other instructions where the same kind of callable was called before."""
    function = compiled(body("return n, float(p)"))
    for _ in range(200):
        probe = Probe()
        probe.call(function)
        assert probe.place == ResultPlace(((1,),), ())


def test_the_function_may_be_called_by_others() -> None:
    """Decorators, methods and objects that are called pass the result on, C code may not."""
    inner = compiled(body("return n, p.item()"))

    @functools.wraps(inner)
    def outer(*args: Any, **kwargs: Any) -> Any:
        with args[0]:
            return inner(*args, **kwargs)

    class Called:
        step = staticmethod(inner)

        def __call__(self, p: Probe, n: int) -> Any:
            return self.step(p, n)

    for function in (outer, functools.partial(outer), Called(), Called().__call__, Called.step):
        probe = Probe()
        probe.call(function)
        assert probe.place is not None and probe.place.paths == ((1,),), function
    for other in (functools.lru_cache(inner), lambda p, n: max([inner(p, n)])):
        probe = Probe()
        probe.call(other)
        assert probe.place is None, other


# ----------------------------------------------------------------------------- random functions
class Writer:
    """A random function that gets a value once, and goes on with it or without."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.names = ["n", "m"]
        self.holders: list[str] = []

    def write(self) -> str:
        lines = ["m = n + 1"]
        got = self.random.choice(["v = p.item()", "v = (n, p.item())", "v = {'a': p.item()}"])
        lines += [*self.statements(1), got]
        self.holders.append("v")
        lines += self.statements(self.random.randint(0, 4))
        lines.append(f"return {self.expression(2)}")
        if self.random.random() < 0.2:
            lines = ["with p:", *["    " + line for line in lines]]
        return body("\n".join(lines))

    def statements(self, count: int) -> list[str]:
        return [line for _ in range(count) for line in self.statement()]

    def statement(self) -> list[str]:
        choice = self.random.random()
        if choice < 0.35:
            name, value = f"x{len(self.names) + len(self.holders)}", self.expression(1)
            held = any(f" {h} " in f" {value} ".replace(",", " ") for h in self.holders)
            (self.holders if held or "(" in value else self.names).append(name)
            return [f"{name} = {value}"]
        if choice < 0.5:
            return [f"if {self.plain()} > {self.random.randint(0, 6)}:", f"    m = {self.plain()}"]
        if choice < 0.6:
            return [f"for i in range({self.random.randint(0, 2)}):", f"    p.note({self.plain()})"]
        if choice < 0.7:
            return ["try:", f"    m = {self.plain()}", "finally:", f"    p.note({self.plain()})"]
        if choice < 0.8:
            return [f"p.note({self.plain()}, m)"]
        if choice < 0.85:
            return [f"p.note({self.anything()})"]
        if choice < 0.9:
            return [f"m = len([i for i in range({self.plain()} % 3)])"]
        return [f"m = {self.plain()} if m > 3 else {self.plain()}"]

    def plain(self) -> str:
        one, other = self.random.choice(self.names), self.random.randint(0, 5)
        return self.random.choice([one, f"{one} + {other}", f"p.note({one})", str(other)])

    def anything(self) -> str:
        return self.random.choice([*self.names, *self.holders])

    def expression(self, depth: int) -> str:
        choice = self.random.random()
        if depth == 0 or choice < 0.3:
            return self.anything()
        if choice < 0.4:
            return self.plain()
        parts = [self.expression(depth - 1) for _ in range(self.random.randint(1, 3))]
        if choice < 0.5:
            return f"({', '.join(parts)}, *[{self.anything()}])"
        if choice < 0.65:
            return f"({', '.join(parts)},)"
        if choice < 0.8:
            return f"[{', '.join(parts)}]"
        if choice < 0.85:
            return f"{{**{{'a': {self.plain()}}}, 'b': {parts[0]}, **{{'b': {self.anything()}}}}}"
        if choice < 0.95:
            return f"{{{', '.join(f'{key!r}: {part}' for key, part in zip('abc', parts))}}}"  # noqa: B905
        return f"str({parts[0]})"


def test_random_functions() -> None:
    """What is proved holds for other values: they are at the places, and all else is equal."""
    proved = 0
    for seed in range(600):
        source = Writer(seed).write()
        function = compiled(source)
        probe = Probe()
        found = []
        for value in (0.5, -7.0, 1e300):
            probe.value = value
            try:
                found.append((value, probe.call(function), probe.place))
            except (NameError, TypeError):
                break
        places = {place for _, _, place in found}
        assert len(places) <= 1, source
        place = places.pop() if places else None
        if place is None:
            continue
        proved += 1
        marked = []
        for value, (result, log), _ in found:
            if place.paths:
                assert place.get(result) == value, source
            marked.append((place.put(result, "mark"), log))
        assert all(each == marked[0] for each in marked), source
    assert proved > 150
