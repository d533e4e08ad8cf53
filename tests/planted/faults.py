"""A fault of the library: one line of it that is wrong, put in while the tests run."""

from __future__ import annotations
import __future__

import ast
import importlib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType

__all__ = ["Fault", "apply"]


@dataclass(frozen=True, slots=True)
class Fault:
    """`right` in the function at `where` ("package.module:Class.function") becomes `wrong`.

    `mistake` is one sentence: what goes wrong then.  `caught_by` are tests, each of which has a
    case that fails.  `thread` is where the same was wrong elsewhere, as "owner/repository#number".
    """

    name: str
    mistake: str
    where: str
    right: str
    wrong: str
    caught_by: tuple[str, ...]
    thread: str | None = None


def apply(fault: Fault) -> None:
    """Puts the fault in, also for those who have imported the function by name."""
    function, code = mutated(fault)
    function.__code__ = code


def mutated(fault: Fault) -> tuple[FunctionType, CodeType]:
    """The function and its wrong code.  Raises ValueError unless `right` is there exactly once."""
    function = _function(fault.where)
    source = textwrap.dedent(inspect.getsource(function))
    if source.count(fault.right) != 1:
        raise ValueError(f"{fault.name}: {fault.where} has {source.count(fault.right)} of the text")
    tree = ast.parse(source.replace(fault.right, fault.wrong))
    before = function.__code__
    ast.increment_lineno(tree, before.co_firstlineno - 1)
    flags = __future__.annotations.compiler_flag
    module = compile(tree, before.co_filename, "exec", flags=flags, dont_inherit=True)
    code = next(code for code in _codes(module) if code.co_name == before.co_name)
    return function, code


def _function(where: str) -> FunctionType:
    module, _, path = where.partition(":")
    found: object = importlib.import_module(module)
    for part in path.split("."):
        found = inspect.getattr_static(found, part)
    if isinstance(found, property):
        found = found.fget
    if isinstance(found, staticmethod | classmethod):
        found = found.__func__
    assert isinstance(found, Callable)
    function = inspect.unwrap(found)
    assert isinstance(function, FunctionType)
    return function


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)
