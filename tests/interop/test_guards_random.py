"""Random programs of what a function uses: each call of the graphed function must give what the
plain one gives, whatever was changed between the calls."""

from __future__ import annotations

import ast
import contextlib
import random
import re
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from ostinato.interop.graphed import Graphed
from tests.interop.library import Lib

Make = Callable[..., Graphed]

HEAD = """
import array, collections, concurrent.futures, configparser, contextvars, ctypes, dataclasses, enum
import functools, importlib, operator, os, queue, string, sys, threading, types, weakref
from os import getenv
import numpy as np
from tests.interop.library import Stateful

class Space: pass

class Holding:
    def __init__(self): self.c = Space(); self.c.k = 1.0
    def go(self): return self.c.k

class Keeping:  # under a name that no code has
    def __set_name__(self, kind, name): self.name = f"_{name}"
    def __get__(self, value, kind=None): return getattr(value, self.name)
    def __set__(self, value, given): setattr(value, self.name, given)

def passing_on(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)
    return wrapper
"""

HOLDERS: dict[str, tuple[str, ...]] = {
    "a global": ("{n} = 1.0", "{n}"),
    "an object": ("{n} = Space()", "{n}.k"),
    "a deep object": ("{n} = Space(); {n}.a = Space(); {n}.a.b = Space()", "{n}.a.b.k"),
    "an object that is replaced": (
        "{n} = Space(); {n}.a = Space(); {n}.a.k = 1.0",
        "{n}.a.k",
        "{n}.a = Space(); {n}.a.k = {v}",
    ),
    "a list": ("{n} = [0.0, 1.0]", "{n}[1]"),
    "a dict": ("{n} = {{'k': [1.0]}}", "{n}['k'][0]"),
    "a default dict": (
        "{n} = collections.defaultdict(list); {n}['k'].append(1.0)",
        "{n}['k'][0]",
        "{n}['k'] = [{v}]",
    ),
    "an object of a dict": ("{n} = {{1: Space()}}", "{n}[1].k"),
    "a class": ("class {n}: k = 1.0", "{n}.k"),
    "a base class": ("class Base{n}: k = 1.0\nclass {n}(Base{n}): pass", "{n}().k", "Base{n}.k"),
    "slots": ("class Slots{n}: __slots__ = ('k',)\n{n} = Slots{n}()", "{n}.k"),
    "a record": (
        "@dataclasses.dataclass\nclass Record{n}: k: float\n{n} = Record{n}(1.0)",
        "{n}.k",
    ),
    "a default": ("def {n}(k=1.0): return k", "{n}()", "{n}.__defaults__ = ({v},)"),
    "a keyword's default": (
        "def {n}(*, k=1.0): return k",
        "{n}()",
        "{n}.__kwdefaults__ = {{'k': {v}}}",
    ),
    "an attribute of a function": ("def {n}(): return {n}.k", "{n}()", "{n}.k"),
    "code": ("def {n}(): return 1.0", "{n}()", "{n}.__code__ = (lambda: {v}).__code__"),
    "a function that is replaced": ("{n} = lambda: 1.0", "{n}()", "{n} = lambda: {v}"),
    "a method that is replaced": (
        "class Of{n}:\n    def k(self): return 1.0\n{n} = Of{n}()",
        "{n}.k()",
        "Of{n}.k = lambda self: {v}",
    ),
    "a closure": (
        "def make{n}():\n    k = [1.0]\n    return (lambda: k[0]), k\n{n}, cell{n} = make{n}()",
        "{n}()",
        "cell{n}[0]",
    ),
    "a variable of a closure": (
        "def make{n}():\n    k = 1.0\n    def put(v):\n        nonlocal k\n        k = v\n"
        "    return (lambda: k), put\n{n}, put{n} = make{n}()",
        "{n}()",
        "put{n}({v})",
    ),
    "a module": ("{n} = types.ModuleType('{n}')", "{n}.k"),
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
        "strong{n} = Space(); {n} = weakref.ref(strong{n})",
        "{n}().k",
        "strong{n}.k",
    ),
    "a weak dictionary": (
        "strong{n} = Space(); {n} = weakref.WeakKeyDictionary()",
        "{n}[strong{n}]",
    ),
    "a dictionary of weak values": (
        "strong{n} = Space()\n{n} = weakref.WeakValueDictionary(); {n}['k'] = strong{n}",
        "{n}['k'].k",
        "strong{n}.k",
    ),
    "an event": (
        "{n} = threading.Event()",
        "(1.0 + {n}.is_set())",
        "({n}.clear if {v} == 1.0 else {n}.set)()",
    ),
    "a semaphore": ("{n} = threading.Semaphore(1)", "float({n}._value)", "{n}._value = int({v})"),
    "a queue": (
        "{n} = queue.Queue(); {n}.put(0)",
        "float({n}.qsize())",
        "{n}.queue.clear(); {n}.queue.extend([0] * int({v}))",
    ),
    "a future": (
        "{n} = concurrent.futures.Future(); {n}.set_result(1.0)",
        "{n}.result()",
        "{n}._result = {v}",
    ),
    "a configuration": (
        "{n} = configparser.ConfigParser(); {n}['a'] = {{'k': '1.0'}}",
        "{n}.getfloat('a', 'k')",
        "{n}.set('a', 'k', '{v}')",
    ),
    "a section of a configuration": (
        "under{n} = configparser.ConfigParser(); under{n}['a'] = {{'k': '1.0'}}\n"
        "{n} = under{n}['a']",
        "float({n}['k'])",
        "{n}['k'] = '{v}'",
    ),
    "a user's text": ("{n} = collections.UserString('1.0')", "float({n})", "{n}.data = '{v}'"),
    "a template": (
        "{n} = string.Template('1.0')",
        "float({n}.substitute())",
        "{n}.template = '{v}'",
    ),
    "a thread's own": ("{n} = threading.local()", "{n}.k"),
    "a partial": (
        "{n} = functools.partial(lambda k: k, 1.0)",
        "{n}()",
        "{n} = functools.partial(lambda k: k, {v})",
    ),
    "a chain of maps": (
        "under{n} = {{'k': 1.0}}; {n} = collections.ChainMap({{}}, under{n})",
        "{n}['k']",
        "under{n}['k']",
    ),
    "an object in a set": (
        "{n} = {{Space()}}\nfor each in {n}: each.k = 1.0",
        "sum(each.k for each in {n})",
        "for each in {n}: each.k = {v}",
    ),
    "an object in a weak set": (
        "strong{n} = Space(); {n} = weakref.WeakSet([strong{n}])",
        "sum(each.k for each in {n})",
        "strong{n}.k",
    ),
    "an object as a key": (
        "{n} = {{Space(): 0}}\nfor each in {n}: each.k = 1.0",
        "sum(each.k for each in {n})",
        "for each in {n}: each.k = {v}",
    ),
    "a class in a tuple": ("class Of{n}: k = 1.0\n{n} = ((0, Of{n}),)", "{n}[0][1].k", "Of{n}.k"),
    "a member of an enumeration": ("class Enum{n}(enum.Enum): A = 1\n{n} = Enum{n}.A", "{n}.k"),
    "a list in an enumeration": ("class {n}(enum.Enum): A = [1.0]", "{n}.A.value[0]"),
    "all attributes of an object": (
        "{n} = Space(); {n}.a = Space()",
        "sum(vars({n}.a).values())",
        "{n}.a.all{n}",
    ),
    "an attribute in a pattern": (
        "class Of{n}: __match_args__ = ('m{n}',)\n{n} = Space(); {n}.a = Of{n}()\ndef get{n}():\n"
        "    match {n}.a:\n        case Of{n}(k): return k",
        "get{n}()",
        "{n}.a.m{n}",
    ),
    "what a comparison reads": (
        "class Of{n}:\n    def __eq__(self, other): return self.e{n} == other\n"
        "    __hash__ = None\n{n} = Space(); {n}.a = Of{n}()",
        "(1.0 if {n}.a == 1.0 else 2.0)",
        "{n}.a.e{n}",
    ),
    "what a text is made of": (
        "class Of{n}:\n    def __str__(self): return str(self.t{n})\n"
        "{n} = Space(); {n}.a = Of{n}()",
        "float(f'{{{n}.a}}')",
        "{n}.a.t{n}",
    ),
    "a descriptor": (
        "class Kept{n}:\n    def __get__(self, value, kind): return self.d{n}\n"
        "class Of{n}: k = Kept{n}()\n{n} = [Of{n}()]",
        "{n}[0].k",
        "vars(Of{n})['k'].d{n}",
    ),
    "which of two equal lists": (
        "one{n}, two{n} = [1.0], [1.0]; {n} = one{n}",
        "(1.0 if {n} is one{n} else 2.0)",
        "{n} = one{n} if {v} == 1.0 else two{n}",
    ),
    "a list by two names": (
        "{n} = [1.0]; two{n} = [{n}]\ndef get{n}():\n    {n}[0] = 2.0\n    k = two{n}[0][0]\n"
        "    {n}[0] = 1.0\n    return k",
        "get{n}()",
        "two{n}[0] = {n} if {v} == 1.0 else [1.0]",
    ),
    "an attribute by its name": (
        "{n} = Space(); {n}.a = Space()",
        "object.__getattribute__({n}.a, 'g{n}')",
        "{n}.a.g{n}",
    ),
    "an attribute that is named by a text": (
        "{n} = Space(); {n}.a = Space()",
        "getattr({n}.a, 'b{n}', 1.0)",
        "{n}.a.b{n}",
    ),
    "one of several names": (
        "{n} = Space(); {n}.a = Space()\ndef get{n}():\n    for name in ('r{n}', 's{n}'):\n"
        "        k = getattr({n}.a, name, 1.0)\n    return k",
        "get{n}()",
        "{n}.a.s{n}",
    ),
    "a path of names": (
        "{n} = Space(); {n}.a = Space()",
        "operator.attrgetter('a.p{n}')({n})",
        "{n}.a.p{n}",
    ),
    "an attribute named in a pattern": (
        "{n} = Space(); {n}.a = Space()\ndef get{n}():\n    match {n}.a:\n"
        "        case Space(q{n}=k): return k",
        "get{n}()",
        "{n}.a.q{n}",
    ),
    "seven objects deep": (
        "{n} = end{n} = Space()\nfor _ in range(6): each = Space(); each.a, {n} = {n}, each",
        "{n}.a.a.a.a.a.a.k",
        "end{n}.k",
    ),
    "a number deep in tables": (
        "{n} = {{'m': {{'l': [{{'a': {{'s': [0.0, 1.0]}}}}]}}}}",
        "{n}['m']['l'][0]['a']['s'][1]",
    ),
    "a global that is defined later": (
        "def {n}(): return later{n} if 'later{n}' in globals() else 1.0",
        "{n}()",
        "later{n} = {v}",
    ),
    "a global that is named by a text": ("{n} = 1.0", "globals()['{n}']", "{n}"),
    "the environment, by os.getenv": (
        "os.environ['{n}'] = '1.0'",
        "float(os.getenv('{n}'))",
        "os.environ['{n}'] = '{v}'",
    ),
    "the environment, by getenv": (
        "os.environ['{n}'] = '1.0'",
        "float(getenv('{n}'))",
        "os.environ['{n}'] = '{v}'",
    ),
    "an import in a function": (
        "{n} = types.ModuleType('{n}'); sys.modules['alone{n}'] = {n}\ndef get{n}():\n"
        "    from alone{n} import k\n    return k",
        "get{n}()",
        "{n}.k",
    ),
    "a module that is named by a text": (
        "{n} = types.ModuleType('{n}'); {n}.k = 1.0; sys.modules['text{n}'] = {n}\n"
        "def get{n}(): return importlib.import_module('text{n}').k * sys.modules['text{n}'].k",
        "get{n}()",
        "{n}.k = {v}",
    ),
    "a function with a cache": (
        "k{n} = 1.0\n@functools.lru_cache\ndef {n}(): return k{n}",
        "{n}()",
        "k{n} = {v}; {n}.cache_clear()",
    ),
    "a module in a module": (
        "{n} = types.ModuleType('{n}'); {n}.a = types.ModuleType('a')",
        "{n}.a.k",
    ),
    "a function of a module that is replaced": (
        "{n} = types.ModuleType('{n}'); {n}.f = lambda: 1.0",
        "{n}.f()",
        "{n}.f = lambda: {v}",
    ),
    "a set": ("{n} = {{1.0}}", "float([*{n}][0])", "{n}.clear(); {n}.add({v})"),
    "a deque": ("{n} = collections.deque([1.0])", "{n}[0]"),
    "a counter": ("{n} = collections.Counter(a=1)", "{n}['a']", "{n}['a'] = int({v})"),
    "a user's dict": ("{n} = collections.UserDict(a=1.0)", "{n}['a']"),
    "a proxy": (
        "under{n} = {{'a': 1.0}}; {n} = types.MappingProxyType(under{n})",
        "{n}['a']",
        "under{n}['a']",
    ),
    "a list of another class": ("class Of{n}(list): pass\n{n} = Of{n}([1.0])", "{n}[0]"),
    "a dict with attributes": (
        "class Of{n}(dict): __getattr__ = dict.get\n{n} = Of{n}(k=1.0)",
        "{n}.k",
        "{n}['k']",
    ),
    "keys that are objects": ("{n} = {{Space: {{Space: 1.0}}}}", "{n}[Space][Space]"),
    "an order": (
        "{n} = collections.OrderedDict(a=1.0, b=2.0, c=3.0)",
        "next(iter({n}.values()))",
        "{n}.move_to_end(chr(96 + int({v})), last=False)",
    ),
    "a view of a dict": (
        "under{n} = {{'k': 1.0}}; {n} = under{n}.values()",
        "sum({n})",
        "under{n}['k']",
    ),
    "a method of a dict": (
        "under{n} = {{'k': 1.0}}; {n} = under{n}.get",
        "{n}('k')",
        "under{n}['k']",
    ),
    "a weak proxy": (
        "strong{n} = Holding(); {n} = weakref.proxy(strong{n})",
        "{n}.c.k",
        "strong{n}.c.k",
    ),
    "what an attrgetter reads": (
        "held{n} = Holding(); {n} = operator.attrgetter('c.k')",
        "{n}(held{n})",
        "held{n}.c.k",
    ),
    "what a methodcaller calls": (
        "held{n} = Holding(); {n} = operator.methodcaller('go')",
        "{n}(held{n})",
        "held{n}.c.k",
    ),
    "a keyword of a partial": (
        "{n} = functools.partial(lambda k: k, k=1.0)",
        "{n}()",
        "{n}.keywords.update(k={v})",
    ),
    "a list as a default": ("def {n}(k=[1.0]): return k[0]", "{n}()", "{n}.__defaults__[0][0]"),
    "the object of a bound method": ("of{n} = Holding(); {n} = of{n}.go", "{n}()", "of{n}.c.k"),
    "what a method of a base class reads": (
        "class Of{n}(Holding): pass\n{n} = Of{n}()",
        "{n}.go()",
        "{n}.c.k",
    ),
    "what super() reads": (
        "class Of{n}(Holding):\n    def go(self): return super().go()\n{n} = Of{n}()",
        "{n}.go()",
        "{n}.c.k",
    ),
    "a method that another one overrides": (
        "class Base{n}:\n    def go(self): return 1.0\nclass Of{n}(Base{n}):\n"
        "    def go(self): return super().go()\n{n} = Of{n}()",
        "{n}.go()",
        "Base{n}.go = lambda self: {v}",
    ),
    "a class method that is replaced": (
        "class Of{n}:\n    @classmethod\n    def k(cls): return 1.0\n{n} = Of{n}()",
        "{n}.k()",
        "Of{n}.k = classmethod(lambda cls: {v})",
    ),
    "a partial method that is replaced": (
        "class Of{n}:\n    def go(self, k): return k\n    k = functools.partialmethod(go, 1.0)\n"
        "{n} = Of{n}()",
        "{n}.k()",
        "Of{n}.k = functools.partialmethod(Of{n}.go, {v})",
    ),
    "a descriptor that is replaced": (
        "class Of{n}: k = functools.cached_property(lambda self: 1.0)",
        "Of{n}().k",
        "Of{n}.k = functools.cached_property(lambda self: {v}); Of{n}.k.__set_name__(Of{n}, 'k')",
    ),
    "an attribute of a metaclass": (
        "class Meta{n}(type): k = 1.0\nclass {n}(metaclass=Meta{n}): pass",
        "{n}.k",
        "Meta{n}.k = {v}",
    ),
    "what a module gives for any name": (
        "k{n} = 1.0; {n} = types.ModuleType('{n}'); {n}.__getattr__ = lambda name: k{n}",
        "{n}.anything",
        "k{n} = {v}",
    ),
    "a function that is registered": (
        "@functools.singledispatch\ndef {n}(k): return 1.0",
        "{n}(1)",
        "{n}.register(int, lambda k: {v})",
    ),
    "an attribute of an object's class": (
        "class Of{n}:\n    k = 1.0\n    def go(self): return self.k\n{n} = Of{n}()",
        "{n}.k * {n}.go()",
        "Of{n}.k",
    ),
    "a table of an object's class": (
        "class Of{n}: k = {{'a': 1.0}}\n{n} = Of{n}()",
        "{n}.k['a']",
        "Of{n}.k['a']",
    ),
    "an attribute of a record's class": (
        "@dataclasses.dataclass\nclass Of{n}:\n    a: int\n    k = 1.0\n{n} = Of{n}(0)",
        "{n}.k",
        "Of{n}.k",
    ),
    "another class": ("class {n}: k = 1.0", "{n}.k", "{n} = type('Other', (), {{'k': {v}}})"),
    "a class that was made of a text": (
        "made{n} = {{}}; exec('class Made: pass', made{n}); {n} = made{n}['Made']()",
        "{n}.k",
    ),
    "behind a property": (
        "class Of{n}:\n    def __init__(self): self.inner = {{'k': 1.0}}\n    @property\n"
        "    def k(self): return self.inner['k']\n{n} = Of{n}()",
        "{n}.k",
        "{n}.inner['k']",
    ),
    "behind a mapping": (
        "class Of{n}:\n    def __init__(self): self.held = {{'k': 1.0}}\n"
        "    def __getitem__(self, key): return self.held[key]\n{n} = Of{n}()",
        "{n}['k']",
        "{n}.held['k']",
    ),
    "a private slot": (
        "class Of{n}:\n    __slots__ = ('__k',)\n    def put(self, v): self.__k = v\n"
        "    def get(self): return self.__k\n{n} = Of{n}(); {n}.put(1.0)",
        "{n}.get()",
        "{n}.put({v})",
    ),
    "what a descriptor keeps": (
        "class Of{n}: k = Keeping()\n{n} = Space(); {n}.a = Of{n}()",
        "{n}.a.k",
    ),
    "numbers of NumPy": ("{n} = np.array([1.0])", "float({n}[0])", "{n}[0]"),
    "an array of another class": (
        "class Of{n}(np.ndarray): pass\n{n} = np.array([1.0]).view(Of{n})",
        "float({n}[0])",
        "{n}[0]",
    ),
    "an attribute of an array": (
        "class Of{n}(np.ndarray): pass\n{n} = np.array([1.0]).view(Of{n}); {n}.a = Space()",
        "{n}.a.k",
    ),
    "a masked array": (
        "{n} = np.ma.array([1.0, 1.0, 1.0])",
        "float({n}.sum())",
        "{n}.mask = [i >= {v} for i in range(3)]",
    ),
    "a row of an array": (
        "{n} = np.zeros(1, [('k', np.float32)])[0]",
        "float({n}['k'])",
        "{n}['k']",
    ),
    "an array of numbers": ("{n} = array.array('d', [1.0])", "{n}[0]"),
    "a view of memory": ("{n} = memoryview(array.array('d', [1.0]))", "{n}[0]"),
    "bytes": ("{n} = bytearray(b'\\1')", "float({n}[0])", "{n}[0] = int({v})"),
    "a number of C": ("{n} = ctypes.c_float(1.0)", "{n}.value"),
    "an index of C": (
        "class Of{n}(ctypes.c_int64):\n    def __index__(self): return self.value\n"
        "{n} = Of{n}(1 << 40)",
        "float({n}.value % 7)",
        "{n}.value = int({v})",
    ),
    "a structure of C": (
        "class Of{n}(ctypes.Structure): _fields_ = [('k', ctypes.c_float)]\n{n} = Of{n}(1.0)",
        "{n}.k",
    ),
    "an attribute of a structure of C": (
        "class Of{n}(ctypes.Structure): _fields_ = [('k', ctypes.c_float)]\n"
        "{n} = Of{n}(1.0); {n}.a = Space()",
        "{n}.a.t",
    ),
    "a number in a state": (
        "{n} = Stateful(groups=[{{'lr': 1.0, 'betas': (0.5, 0.25)}}])",
        "{n}.groups[0]['lr']",
    ),
    "a number of another type in a state": (
        "{n} = Stateful(k=1.0)",
        "({n}.k if type({n}.k) is float else 2 * {n}.k)",
        "{n}.k = {{1.0: 1.0, 2.0: True, 3.0: 3.0}}[{v}]",
    ),
    "a tuple in a state": (
        "{n} = Stateful(betas=(0.5, 1.0))",
        "{n}.betas[1]",
        "{n}.betas = (0.5, {v})",
    ),
    "a hidden object in a state": ("{n} = Stateful(_hidden=Space())", "{n}._hidden.k"),
    "another object in a state": (
        "{n} = Stateful(_hidden=Space()); {n}._hidden.k = 1.0",
        "{n}._hidden.k",
        "{n}._hidden = Space(); {n}._hidden.k = {v}",
    ),
    "another list in a state": (
        "{n} = Stateful(groups=[1.0])",
        "{n}.groups[0]",
        "{n}.groups = [{v}]",
    ),
    "a set in a state": (
        "{n} = Stateful(names={{1}})",
        "float([*{n}.names][0])",
        "{n}.names.clear(); {n}.names.add(int({v}))",
    ),
    "hooks in a state": (
        "{n} = Stateful(hooks=collections.OrderedDict(a=len))",
        "float(len({n}.hooks))",
        "{n}.hooks.clear(); {n}.hooks.update(dict.fromkeys('abc'[:int({v})], len))",
    ),
}
"""How something is made that holds a number, how it is read, and the place that is set, to 1.0 at
first; or, with `{v}`, how it is changed.  By default the place that is read is set."""

ARRAYS: dict[str, tuple[str, ...]] = {
    "an array": ("{n} = LIB.array([1.0] * 4)", "{n}"),
    "an array of an object": ("{n} = Space()", "{n}.w"),
    "an array that is written": ("{n} = LIB.array([1.0] * 4)", "{n}", "{n}.shift({v})"),
    "an array of layers": (
        "{n} = [Space() for _ in range(2)]\nfor each in {n}: each.w = [LIB.array([1.0] * 4)]",
        "{n}[1].w[0]",
    ),
    "an array deep in tables": (
        "{n} = {{'m': {{'l': [{{'a': {{'w': LIB.array([1.0] * 4)}}}}]}}}}",
        "{n}['m']['l'][0]['a']['w']",
    ),
    "an array and a number in turns": (
        "{n} = [LIB.array([1.0] * 4), 2.0]",
        "({n}[0] if type({n}[0]) is not float else {n}[1].line(5.0))",
        "{n}.reverse()  # {v}",
    ),
    "an array in another attribute": (
        "class Of{n}: __slots__ = ('one', 'two')\n"
        "{n} = Of{n}(); {n}.one, {n}.two = LIB.array([1.0] * 4), 2.0",
        "({n}.one if type({n}.one) is not float else {n}.two.line(5.0))",
        "{n}.one, {n}.two = {n}.two, {n}.one  # {v}",
    ),
    "an array in a state": (
        "w{n} = LIB.array([1.0] * 4); {n} = Stateful(held=collections.defaultdict(dict))",
        "{n}.held[w{n}]['m']",
    ),
    "a key in a state": (
        "{n} = Stateful(held={{LIB.array([1.0] * 4): 1}})",
        "[*{n}.held][0]",
        "{n}.held = {{LIB.array([{v}] * 4): 1}}",
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
    "a helper of a helper": (
        "def inner{n}():\n    return {e}\ndef {n}():\n    return inner{n}()",
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
    "a property of a metaclass": (
        "class Meta{n}(type):\n    @property\n    def go(cls): return {e}\n"
        "class {n}(metaclass=Meta{n}): pass",
        "{n}.go",
    ),
    "a partial method": (
        "class Of{n}:\n    def inner(self, k): return {e}\n"
        "    go = functools.partialmethod(inner, 1)\n{n} = Of{n}()",
        "{n}.go()",
    ),
    "a function for a type": (
        "@functools.singledispatch\ndef {n}(k): pass\n@{n}.register\n"
        "def int{n}(k: int): return {e}",
        "{n}(1)",
    ),
    "a method for a type": (
        "class Of{n}:\n    @functools.singledispatchmethod\n    def go(self, k): pass\n"
        "    @go.register\n    def _(self, k: int): return {e}\n{n} = Of{n}()",
        "{n}.go(1)",
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


FORMS = [
    "",
    "f = passing_on(f)",
    "f = functools.partial(f)",
    "class Of:\n    def __init__(self, f): self.f = f\n"
    "    def __call__(self, x): return self.f(x)\nf = Of(f)",
    "class Of:\n    def __init__(self, f): self.f = f\n"
    "    def go(self, x): return self.f(x)\nf = Of(f).go",
]
"""What is made of the function before it is graphed."""


def parts_of(kind: str, name: str) -> tuple[str, str, list[str]]:
    """How something of a name is made, and read, and three changes of it."""
    made, read, *rest = (HOLDERS | ARRAYS)[kind]
    change = rest[0] if rest else read
    if "{v}" not in change:
        change += " = LIB.array([{v}] * 4)" if kind in ARRAYS else " = {v}"
        made += f"\n{change}"
    changes = [change.format(n=name, v=value) for value in (1.0, 2.0, 3.0)]
    return made.format(n=name, v=1.0), read.format(n=name), changes


def programme(seed: int) -> tuple[str, list[str]]:
    """The source of a module with a function `f`, and statements that change what it uses."""
    chance = random.Random(seed)
    source, changes, known = [HEAD], [], []
    numbers = chance.randint(1, 3)
    for number in range(numbers + 1):  # the last one holds an array
        among = HOLDERS if number < numbers else ARRAYS
        made, read, further = parts_of(chance.choice([*among]), f"H{number}")
        source.append(made)
        known.append(read)
        changes += further
    for number in range(chance.randint(0, 4)):
        made, call = CALLED[chance.choice([*CALLED])]
        place = chance.randrange(len(known))
        source.append(made.format(n=f"C{number}", e=f"({known[place]})"))
        known[place] = call.format(n=f"C{number}")
    *scales, array = known
    source.append(f"def f(x):\n    return x.line({' + '.join(scales)}), {array}.line(2.0)")
    source.append(chance.choice(FORMS))
    return "\n".join(source), changes


def of_one(kind: str, *, static: bool = False) -> tuple[str, list[str]]:
    """The same with one kind alone; `static`: held by an argument that is passed as it is."""
    made, known, changes = parts_of("an object" if kind in CALLED else kind, "H0")
    source = [HEAD, made]
    if static:
        known = (HOLDERS | ARRAYS)[kind][1].format(n="given.held")
    if kind in CALLED:
        around, call = CALLED[kind]
        source.append(around.format(n="C0", e=f"({known})"))
        known = call.format(n="C0")
    line = f"x.line(1.0), {known}.line(2.0)" if kind in ARRAYS else f"[x.line({known})]"
    if static:
        source.append(f"S = Space(); S.held = H0\ndef f(x, given):\n    return {line}")
        return "\n".join(source), [f"{each}\nS.held = H0" for each in changes]
    source.append(f"def f(x):\n    return {line}")
    return "\n".join(source), changes


@contextlib.contextmanager
def loaded(source: str, lib: Lib) -> Iterator[Any]:
    """A module of a program."""
    module: Any = types.ModuleType("programme")
    sys.modules[module.__name__] = module
    module.LIB = lib
    try:
        exec(source, vars(module))
        yield module
    finally:
        del sys.modules[module.__name__]


def run(lib: Lib, make: Make, seed: int, kind: str | None = None, *, static: bool = False) -> int:
    """Runs a program; how many replays there were."""
    source, changes = programme(seed) if kind is None else of_one(kind, static=static)
    chance = random.Random(seed)
    with loaded(source, lib) as module:
        step = make(module.f, static=("given",)) if static else make(module.f)
        args = [lib.array(np.ones(4)), *([module.S] if static else [])]
        log = []
        for _ in range(14):
            if chance.random() < 0.4:
                log.append(chance.choice(changes))
                exec(log[-1], vars(module))
            log.append("f(x)")
            wanted, found = ([one.numpy() for one in each(*args)] for each in (module.f, step))
            assert np.array_equal(wanted, found), "\n".join([source, *log, f"{found}, {wanted}"])
        replays = step.statistics().replays
        step.close()
        return replays


def test_random_programs_of_what_a_function_uses(lib: Lib, make: Make) -> None:
    replays = [run(lib, make, seed) for seed in range(20)]
    assert sum(number > 0 for number in replays) > 15, "most programs have something to replay"


@pytest.mark.parametrize("kind", [*HOLDERS, *ARRAYS, *CALLED])
def test_each_kind_alone(kind: str, lib: Lib, make: Make) -> None:
    assert run(lib, make, 2, kind)


HELD = [
    kind
    for kind, (_, read, *_) in (HOLDERS | ARRAYS).items()
    if not re.search(r"[\w']\{n\}|\{n\}[\w']", read)
]
"""What is read by one name alone, so that an object can hold it."""


@pytest.mark.parametrize("kind", HELD)
def test_each_kind_in_a_static_argument(kind: str, lib: Lib, make: Make) -> None:
    assert run(lib, make, 2, kind, static=True)


def test_static_arguments_of_the_same_content_share_a_graph(lib: Lib, make: Make) -> None:
    """Identities in them do not count: each request has a cache of its own."""

    class Cache:
        def __init__(self, start: float) -> None:
            self.inner = types.SimpleNamespace(lengths=np.ones(2), keys=[lib.array([start] * 4)])
            self.names = {"a"}

    def f(x: Any, cache: Any) -> Any:
        assert cache.names
        return cache.inner.keys[0].shift(float(cache.inner.lengths[0])).line(2.0)

    step = make(f, static=("cache",))
    for number in range(6):
        cache = Cache(number)
        for call in range(1, 4):
            found = step(lib.array(np.ones(4)), cache).numpy()
            np.testing.assert_array_equal(found, [2.0 * (number + call)] * 4)
    assert step.statistics().captures == 1 and step.statistics().rebound == 5, step.explain()


LEFT = (
    *("code", "a context variable", "a masked array", "a row of an array", "a view of memory"),
    *("the environment", "the environment, by os.getenv", "the environment, by getenv"),
)
"""What cannot be put back."""


@pytest.mark.parametrize("kind", HOLDERS)
def test_a_capture_that_fails_leaves_nothing(kind: str, lib: Lib, make: Make) -> None:
    """The function notes that it was entered, and is left again unless it fails meanwhile; it
    raises if it was not left."""
    made, read, (before, inside, _) = parts_of(kind, "H0")
    names = {
        node.id
        for node in ast.walk(ast.parse(inside))
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    source = f"""{HEAD}
{made}
def f(x):
    global {", ".join(sorted({"_", *names}))}
    if {read} != FIRST: raise RuntimeError("it was entered twice")
    {inside}
    by = float(x.numpy()[0])  # waits, which no capture may
    {before}
    return x.line(by)
"""
    with loaded(source, lib) as module:
        exec(before, vars(module))
        module.FIRST = eval(read, vars(module))
        step = make(module.f)
        for number in range(5):
            x = lib.array(np.full(4, float(number)))
            if kind in LEFT and number:
                with pytest.raises(RuntimeError, match="entered twice"):
                    for _ in range(2):  # the capture, and an eager call
                        step(x)
                break
            np.testing.assert_array_equal(step(x).numpy(), [float(number**2)] * 4)
            assert eval(read, vars(module)) == module.FIRST
    reasons = str([line.reason for line in step.statistics().keys])
    assert lib.captures <= 1 and ("could not be put back" in reasons) == (kind in LEFT), reasons


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
