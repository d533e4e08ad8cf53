"""Puts faults into a module of the library, one at a time, and lists those that no test finds.

    python -m tools.mutants step.engine tests/step tests/footguns
    python -m tools.mutants step.declared:Declared.accept tests/step --seconds 600

A fault is a statement that is left out, a condition the other way round, or one part of an `and` or
`or` that is left out.  It is put into the function's code in the tests' process, not into the file.
The tests run until the first one fails.  A fault that nothing finds is a missing test, or code that
nothing needs.  Not for every day: each fault takes a run of the tests.
"""

from __future__ import annotations
import __future__

import argparse
import ast
import importlib
import inspect
import os
import random
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType

ROOT = Path(__file__).resolve().parents[1]
VARIABLE = "OSTINATO_MUTANT"
"""The fault of a tests' process: "module:function:number"."""


def functions(module: str, within: str = "") -> dict[str, FunctionType]:
    """The functions that a module defines, methods among them, by their qualified names."""
    found: dict[str, FunctionType] = {}
    thing = importlib.import_module(module)
    for owner in (thing, *(c for c in vars(thing).values() if inspect.isclass(c))):
        for member in vars(owner).values():
            member = getattr(member, "fget", None) or getattr(member, "__func__", member)
            if not inspect.isfunction(member) or member.__module__ != module:
                continue
            function = inspect.unwrap(member)
            name = function.__qualname__
            written = function.__code__.co_filename == inspect.getfile(thing)
            if written and f"{name}.".startswith(f"{within or name}."):
                found[name] = function
    return found


def mutants(function: FunctionType) -> Iterator[tuple[str, CodeType]]:
    """The faults of a function: each in words, and the function's code with it."""
    before = function.__code__
    source = textwrap.dedent(inspect.getsource(function))
    for number in range(len(list(_changes(ast.parse(source))))):
        tree = ast.parse(source)
        holder, name, index, wrong, words = list(_changes(tree))[number]
        line = before.co_firstlineno + wrong.lineno - 1
        if index is None:
            setattr(holder, name, wrong)
        else:
            getattr(holder, name)[index] = wrong
        ast.increment_lineno(ast.fix_missing_locations(tree), before.co_firstlineno - 1)
        flags = __future__.annotations.compiler_flag
        module = compile(tree, before.co_filename, "exec", flags=flags, dont_inherit=True)
        code = next(code for code in _codes(module) if code.co_name == before.co_name)
        if code.co_freevars == before.co_freevars:
            yield f"line {line}: {words}", code


def _changes(tree: ast.AST) -> Iterator[tuple[ast.AST, str, int | None, ast.AST, str]]:
    """Where a syntax tree can be changed: a node, its field, the place in it, what comes there."""
    for node in ast.walk(tree):
        for name, value in ast.iter_fields(node):
            if name in ("body", "orelse", "finalbody") and isinstance(value, list):
                for index, statement in enumerate(value):
                    text = ast.unparse(statement).splitlines()[0]
                    call = isinstance(statement, ast.Expr) and not isinstance(
                        statement.value, ast.Constant | ast.Yield
                    )
                    kept = isinstance(statement, ast.Assign) and isinstance(
                        statement.targets[0], ast.Attribute | ast.Subscript
                    )
                    if call or kept or isinstance(statement, ast.AugAssign | ast.Raise):
                        wrong = ast.copy_location(ast.Pass(), statement)
                        yield node, name, index, wrong, f"without `{text}`"
            elif name == "test" and isinstance(value, ast.expr):
                wrong_test = ast.copy_location(ast.UnaryOp(ast.Not(), value), value)
                yield node, name, None, wrong_test, f"not ({ast.unparse(value)})"
        if isinstance(node, ast.BoolOp):
            for index, part in enumerate(node.values):
                neutral = ast.Constant(isinstance(node.op, ast.And))
                words = f"`{ast.unparse(node)}` without `{ast.unparse(part)}`"
                yield node, "values", index, ast.copy_location(neutral, part), words


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)


def pytest_configure() -> None:
    """Puts the fault into the tests' process, whose plugin this module is."""
    module, name, number = os.environ[VARIABLE].split(":")
    function = functions(module)[name]
    _, function.__code__ = list(mutants(function))[int(number)]


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("module", help="below ostinato; with :Class or :Class.method a part of it")
    parser.add_argument("tests", nargs="+")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="the time for all")
    parser.add_argument("--each", type=float, default=120.0, help="a fault that hangs is found")
    given = parser.parse_args()
    module, _, within = given.module.partition(":")
    module = f"ostinato.{module}"
    every = [
        (f"{module}:{name}:{number}", f"{name}, {words}")
        for name, function in functions(module, within).items()
        for number, (words, _) in enumerate(mutants(function))
    ]
    random.shuffle(every)  # a search that is cut off has seen all parts
    options = ["-q", "-x", "-m", "not gpu and not slow", "-p", "no:cacheprovider"]
    pytest = [sys.executable, "-m", "pytest", *options, "-p", "tools.mutants", *given.tests]
    end, seen, missed = time.monotonic() + given.seconds, 0, 0
    for mutant, words in every:
        if time.monotonic() > end:
            break
        try:
            run = subprocess.run(
                pytest,
                cwd=ROOT,
                env={**os.environ, VARIABLE: mutant},
                timeout=given.each,
                capture_output=True,
                check=False,
            )
        except subprocess.TimeoutExpired:
            run = None
        seen += 1
        if run is not None and run.returncode == 0:
            missed += 1
            print(f"not found: {words}", flush=True)
    print(f"{seen} of {len(every)} faults, {missed} not found")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
