"""Random programs of what a function uses: each call of the graphed function must give what the
plain one gives, whatever was changed between the calls."""

from __future__ import annotations

import random
import sys
import types
from collections.abc import Callable

import numpy as np
import pytest

from ostinato.interop.graphed import Graphed
from tests.interop.library import Lib

Make = Callable[..., Graphed]

HEAD = """
import collections, contextvars, dataclasses, enum, functools, os, string, threading, types
import weakref

class Space: pass

def passing_on(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)
    return wrapper
"""

HOLDERS: dict[str, tuple[str, str, str]] = {
    "a global": ("{n} = 1.0", "{n}", "{n} = {v}"),
    "an object": ("{n} = Space(); {n}.k = 1.0", "{n}.k", "{n}.k = {v}"),
    "a deep object": (
        "{n} = Space(); {n}.a = Space(); {n}.a.b = Space(); {n}.a.b.k = 1.0",
        "{n}.a.b.k",
        "{n}.a.b.k = {v}",
    ),
    "an object that is replaced": (
        "{n} = Space(); {n}.a = Space(); {n}.a.k = 1.0",
        "{n}.a.k",
        "{n}.a = Space(); {n}.a.k = {v}",
    ),
    "a list": ("{n} = [0.0, 1.0]", "{n}[1]", "{n}[1] = {v}"),
    "a dict": ("{n} = {{'k': [1.0]}}", "{n}['k'][0]", "{n}['k'][0] = {v}"),
    "a default dict": (
        "{n} = collections.defaultdict(list); {n}['k'].append(1.0)",
        "{n}['k'][0]",
        "{n}['k'] = [{v}]",
    ),
    "an object of a dict": ("{n} = {{1: Space()}}; {n}[1].k = 1.0", "{n}[1].k", "{n}[1].k = {v}"),
    "a class": ("class {n}: k = 1.0", "{n}.k", "{n}.k = {v}"),
    "a base class": (
        "class Base{n}: k = 1.0\nclass {n}(Base{n}): pass",
        "{n}().k",
        "Base{n}.k = {v}",
    ),
    "slots": (
        "class Slots{n}: __slots__ = ('k',)\n{n} = Slots{n}(); {n}.k = 1.0",
        "{n}.k",
        "{n}.k = {v}",
    ),
    "a record": (
        "@dataclasses.dataclass\nclass Record{n}: k: float\n{n} = Record{n}(1.0)",
        "{n}.k",
        "{n}.k = {v}",
    ),
    "a default": ("def {n}(k=1.0): return k", "{n}()", "{n}.__defaults__ = ({v},)"),
    "a keyword's default": (
        "def {n}(*, k=1.0): return k",
        "{n}()",
        "{n}.__kwdefaults__ = {{'k': {v}}}",
    ),
    "an attribute of a function": (
        "def {n}(): return {n}.k\n{n}.k = 1.0",
        "{n}()",
        "{n}.k = {v}",
    ),
    "code": (
        "def {n}(): return 1.0",
        "{n}()",
        "{n}.__code__ = (lambda: {v}).__code__",
    ),
    "a function that is replaced": ("{n} = lambda: 1.0", "{n}()", "{n} = lambda: {v}"),
    "a method that is replaced": (
        "class Of{n}:\n    def k(self): return 1.0\n{n} = Of{n}()",
        "{n}.k()",
        "Of{n}.k = lambda self: {v}",
    ),
    "a closure": (
        "def make{n}():\n    k = [1.0]\n    return (lambda: k[0]), k\n{n}, cell{n} = make{n}()",
        "{n}()",
        "cell{n}[0] = {v}",
    ),
    "a variable of a closure": (
        "def make{n}():\n    k = 1.0\n    def put(v):\n        nonlocal k\n        k = v\n"
        "    return (lambda: k), put\n{n}, put{n} = make{n}()",
        "{n}()",
        "put{n}({v})",
    ),
    "a module": ("{n} = types.ModuleType('{n}'); {n}.k = 1.0", "{n}.k", "{n}.k = {v}"),
    "a context variable": (
        "{n} = contextvars.ContextVar('{n}'); {n}.set(1.0)",
        "{n}.get()",
        "{n}.set({v})",
    ),
    "the environment": (
        "os.environ['{n}'] = '1.0'",
        "float(os.environ['{n}'])",
        "os.environ['{n}'] = '{v}'",
    ),
    "a weak reference": (
        "strong{n} = Space(); strong{n}.k = 1.0; {n} = weakref.ref(strong{n})",
        "{n}().k",
        "strong{n}.k = {v}",
    ),
    "a weak dictionary": (
        "strong{n} = Space(); {n} = weakref.WeakKeyDictionary(); {n}[strong{n}] = 1.0",
        "{n}[strong{n}]",
        "{n}[strong{n}] = {v}",
    ),
    "a dictionary of weak values": (
        "strong{n} = Space(); strong{n}.k = 1.0\n"
        "{n} = weakref.WeakValueDictionary(); {n}['k'] = strong{n}",
        "{n}['k'].k",
        "strong{n}.k = {v}",
    ),
    "a thread's own": ("{n} = threading.local(); {n}.k = 1.0", "{n}.k", "{n}.k = {v}"),
    "a partial": (
        "{n} = functools.partial(lambda k: k, 1.0)",
        "{n}()",
        "{n} = functools.partial(lambda k: k, {v})",
    ),
    "a chain of maps": (
        "under{n} = {{'k': 1.0}}; {n} = collections.ChainMap({{}}, under{n})",
        "{n}['k']",
        "under{n}['k'] = {v}",
    ),
    "an object in a set": (
        "{n} = {{Space()}}\nfor each in {n}: each.k = 1.0",
        "sum(each.k for each in {n})",
        "for each in {n}: each.k = {v}",
    ),
    "an object in a weak set": (
        "strong{n} = Space(); strong{n}.k = 1.0; {n} = weakref.WeakSet([strong{n}])",
        "sum(each.k for each in {n})",
        "strong{n}.k = {v}",
    ),
    "an object as a key": (
        "{n} = {{Space(): 0}}\nfor each in {n}: each.k = 1.0",
        "sum(each.k for each in {n})",
        "for each in {n}: each.k = {v}",
    ),
    "a class in a tuple": (
        "class Of{n}: k = 1.0\n{n} = ((0, Of{n}),)",
        "{n}[0][1].k",
        "Of{n}.k = {v}",
    ),
    "a member of an enumeration": (
        "class Enum{n}(enum.Enum): A = 1\n{n} = Enum{n}.A; {n}.k = 1.0",
        "{n}.k",
        "{n}.k = {v}",
    ),
    "a list in an enumeration": (
        "class {n}(enum.Enum): A = [1.0]",
        "{n}.A.value[0]",
        "{n}.A.value[0] = {v}",
    ),
    "all attributes of an object": (
        "{n} = Space(); {n}.a = Space(); {n}.a.all{n} = 1.0",
        "sum(vars({n}.a).values())",
        "{n}.a.all{n} = {v}",
    ),
    "an attribute in a pattern": (
        "class Of{n}: __match_args__ = ('m{n}',)\n{n} = Space(); {n}.a = Of{n}()\n"
        "{n}.a.m{n} = 1.0\ndef get{n}():\n    match {n}.a:\n        case Of{n}(k): return k",
        "get{n}()",
        "{n}.a.m{n} = {v}",
    ),
    "what a comparison reads": (
        "class Of{n}:\n    def __eq__(self, other): return self.e{n} == other\n"
        "    __hash__ = None\n{n} = Space(); {n}.a = Of{n}(); {n}.a.e{n} = 1.0",
        "(1.0 if {n}.a == 1.0 else 2.0)",
        "{n}.a.e{n} = {v}",
    ),
    "what a text is made of": (
        "class Of{n}:\n    def __str__(self): return str(self.t{n})\n"
        "{n} = Space(); {n}.a = Of{n}(); {n}.a.t{n} = 1.0",
        "float(f'{{{n}.a}}')",
        "{n}.a.t{n} = {v}",
    ),
    "a descriptor": (
        "class Kept{n}:\n    def __get__(self, value, kind): return self.d{n}\n"
        "class Of{n}: k = Kept{n}()\nvars(Of{n})['k'].d{n} = 1.0\n{n} = [Of{n}()]",
        "{n}[0].k",
        "vars(Of{n})['k'].d{n} = {v}",
    ),
    "which of two equal lists": (
        "one{n}, two{n} = [1.0], [1.0]; {n} = one{n}",
        "(1.0 if {n} is one{n} else 2.0)",
        "{n} = one{n} if {v} == 1.0 else two{n}",
    ),
    "a list by two names": (
        "{n} = [1.0]; two{n} = [{n}]\ndef get{n}():\n    {n}[0] = 2.0\n"
        "    k = two{n}[0][0]\n    {n}[0] = 1.0\n    return k",
        "get{n}()",
        "two{n}[0] = {n} if {v} == 1.0 else [1.0]",
    ),
    "an attribute by its name": (
        "{n} = Space(); {n}.a = Space(); {n}.a.g{n} = 1.0",
        "object.__getattribute__({n}.a, 'g{n}')",
        "{n}.a.g{n} = {v}",
    ),
}
"""How something is made that holds a number, how it is read, and how it is changed."""

ARRAYS: dict[str, tuple[str, str, str]] = {
    "an array": ("{n} = LIB.array([1.0] * 4)", "{n}", "{n} = LIB.array([{v}] * 4)"),
    "an array of an object": (
        "{n} = Space(); {n}.w = LIB.array([1.0] * 4)",
        "{n}.w",
        "{n}.w = LIB.array([{v}] * 4)",
    ),
    "an array that is written": ("{n} = LIB.array([1.0] * 4)", "{n}", "{n}.shift({v})"),
    "an array of layers": (
        "{n} = [Space() for _ in range(2)]\nfor each in {n}: each.w = [LIB.array([1.0] * 4)]",
        "{n}[1].w[0]",
        "{n}[1].w[0] = LIB.array([{v}] * 4)",
    ),
    "an array in a set": (
        "{n} = {{Space()}}\nfor each in {n}: each.w = LIB.array([1.0] * 4)",
        "[*{n}][0].w",
        "for each in {n}: each.w = LIB.array([{v}] * 4)",
    ),
}
"""The same of something that holds an array."""

CALLED: dict[str, tuple[str, str]] = {
    "a function": ("def {n}():\n    return {e}", "{n}()"),
    "a decorated function": ("@passing_on\ndef {n}():\n    return {e}", "{n}()"),
    "a function in a function": (
        "def {n}():\n    def inner():\n        return {e}\n    return inner()",
        "{n}()",
    ),
    "a comprehension": ("def {n}():\n    return [{e} for _ in range(1)][0]", "{n}()"),
    "a generator": ("def {n}():\n    yield {e}", "next({n}())"),
    "a function in a list": ("{n} = [None, lambda: {e}]", "{n}[1]()"),
    "a function in a dict": ("{n} = {{'f': lambda: {e}}}", "{n}['f']()"),
    "a function in a set": ("{n} = {{lambda: {e}}}", "[*{n}][0]()"),
    "a function as a key": ("{n} = {{(lambda: {e}): 0}}", "[*{n}][0]()"),
    "a function in nested tuples": ("{n} = ((0, (lambda: {e})),)", "{n}[0][1]()"),
    "a function in an enumeration": (
        "class {n}(enum.Enum): A = ((lambda: {e}),)",
        "{n}.A.value[0]()",
    ),
    "a method of a record": (
        "@dataclasses.dataclass\nclass Of{n}:\n    k: float = 1.0\n"
        "    def go(self): return {e}\n{n} = [Of{n}()]",
        "{n}[0].go()",
    ),
    "a property of a named tuple": (
        "class Of{n}(collections.namedtuple('Of{n}', 'k')):\n    @property\n"
        "    def go(self): return {e}\n{n} = Of{n}(1)",
        "{n}.go",
    ),
    "a method with a decorator of its own": (
        "class Around{n}:\n    def __init__(self, f): self.f = f\n"
        "    def __get__(self, value, kind): return lambda: self.f(value)\n"
        "class Of{n}:\n    @Around{n}\n    def go(self): return {e}\n{n} = Of{n}()",
        "{n}.go()",
    ),
    "a method of a base class of a package": (
        "class Of{n}(string.Formatter):\n    def get_value(self, *given): return {e}\n"
        "{n} = Of{n}().get_field",
        "{n}('0', (), {{}})[0]",
    ),
    "a method of an enumeration": (
        "class {n}(enum.Enum):\n    A = 1\n    def go(self): return {e}",
        "{n}.A.go()",
    ),
    "a function of an object": ("{n} = Space(); {n}.f = lambda: {e}", "{n}.f()"),
    "a method": (
        "class Of{n}:\n    def go(self): return self.inner()\n    def inner(self): return {e}\n"
        "{n} = Of{n}()",
        "{n}.go()",
    ),
    "a method of a base class": (
        "class Base{n}:\n    def go(self): return {e}\n"
        "class Of{n}(Base{n}):\n    def go(self): return super().go()\n{n} = Of{n}()",
        "{n}.go()",
    ),
    "a static method": (
        "class {n}:\n    @staticmethod\n    def go(): return {e}",
        "{n}.go()",
    ),
    "a class method": ("class {n}:\n    @classmethod\n    def go(cls): return {e}", "{n}.go()"),
    "a property": (
        "class Of{n}:\n    @property\n    def go(self): return {e}\n{n} = Of{n}()",
        "{n}.go",
    ),
    "a new object": (
        "class {n}:\n    def __init__(self): self.k = {e}\n    def go(self): return self.k",
        "{n}().go()",
    ),
    "an object that is called": (
        "class Of{n}:\n    def __call__(self): return {e}\n{n} = Of{n}()",
        "{n}()",
    ),
    "a context manager": (
        "class {n}:\n    def __enter__(self): return {e}\n    def __exit__(self, *error): pass\n"
        "def with{n}():\n    with {n}() as k:\n        return k",
        "with{n}()",
    ),
    "a function of a module": (
        "{n} = types.ModuleType('{n}'); {n}.f = lambda: {e}",
        "{n}.f()",
    ),
    "a bound method": (
        "class Of{n}:\n    def go(self): return {e}\n{n} = Of{n}().go",
        "{n}()",
    ),
}
"""How something is made that is called for an expression, and how."""


def programme(seed: int) -> tuple[str, list[str]]:
    """The source of a module with a function `f`, and statements that change what it uses."""
    chance = random.Random(seed)
    source, changes, known = [HEAD], [], []
    numbers = chance.randint(1, 3)
    for number in range(numbers + 1):  # the last one holds an array
        among = HOLDERS if number < numbers else ARRAYS
        made, read, change = among[chance.choice([*among])]
        source.append(made.format(n=f"H{number}"))
        known.append(read.format(n=f"H{number}"))
        changes += [change.format(n=f"H{number}", v=value) for value in (1.0, 2.0, 3.0)]
    for number in range(chance.randint(0, 4)):
        made, call = CALLED[chance.choice([*CALLED])]
        place = chance.randrange(len(known))
        source.append(made.format(n=f"C{number}", e=f"({known[place]})"))
        known[place] = call.format(n=f"C{number}")
    *scales, array = known
    source.append(f"def f(x):\n    return x.line({' + '.join(scales)}), {array}.line(2.0)")
    return "\n".join(source), changes


def of_one(kind: str) -> tuple[str, list[str]]:
    """The same with one kind alone."""
    made, read, change = (HOLDERS | ARRAYS).get(kind, HOLDERS["an object"])
    source, known = [HEAD, made.format(n="H0")], read.format(n="H0")
    if kind in CALLED:
        around, call = CALLED[kind]
        source.append(around.format(n="C0", e=f"({known})"))
        known = call.format(n="C0")
    line = f"x.line(1.0), {known}.line(2.0)" if kind in ARRAYS else f"[x.line({known})]"
    source.append(f"def f(x):\n    return {line}")
    return "\n".join(source), [change.format(n="H0", v=value) for value in (1.0, 2.0, 3.0)]


def run(lib: Lib, make: Make, seed: int, kind: str | None = None) -> int:
    """Runs a program; how many replays there were."""
    source, changes = programme(seed) if kind is None else of_one(kind)
    chance = random.Random(seed)
    module = types.ModuleType(f"programme_{seed}")
    sys.modules[module.__name__] = module
    vars(module)["LIB"] = lib
    try:
        exec(source, vars(module))
        step = make(module.f)
        x = lib.array(np.ones(4))
        log = []
        for _ in range(14):
            if chance.random() < 0.4:
                log.append(chance.choice(changes))
                exec(log[-1], vars(module))
            log.append("f(x)")
            wanted, found = ([one.numpy() for one in each(x)] for each in (module.f, step))
            assert np.array_equal(wanted, found), "\n".join([source, *log, f"{found}, {wanted}"])
        replays = step.statistics().replays
        step.close()
        return replays
    finally:
        del sys.modules[module.__name__]


def test_random_programs_of_what_a_function_uses(lib: Lib, make: Make) -> None:
    replays = [run(lib, make, seed) for seed in range(20)]
    assert sum(number > 0 for number in replays) > 15, "most programs have something to replay"


@pytest.mark.parametrize("kind", [*HOLDERS, *ARRAYS, *CALLED])
def test_each_kind_alone(kind: str, lib: Lib, make: Make) -> None:
    assert run(lib, make, 2, kind)


@pytest.mark.slow
def test_many_random_programs_of_what_a_function_uses(lib: Lib, make: Make) -> None:
    for seed in range(1000, 6000):
        run(lib, make, seed)


@pytest.mark.parametrize("seeds", [range(6), range(6, 12)])
def test_random_worlds(seeds: range, make_chained: Make, where: str) -> None:
    """Functions of torch over the same modules, weights, hooks and optimisers."""
    pytest.importorskip("torch")
    from tests.interop.worlds import run_world

    assert sum([run_world(seed, where, make_chained) for seed in seeds]) > 20


@pytest.mark.slow
def test_many_random_worlds(make_chained: Make, where: str) -> None:
    pytest.importorskip("torch")
    from tests.interop.worlds import run_world

    for seed in range(1000, 2000):
        run_world(seed, where, make_chained)
