"""Finds out whether the rest of a call does nothing with a value but return it.

`return y, loss.item()`: the host needs the value, but nothing that Python does depends on it.  A
chain need not compare such a value, and each of its replays returns a fresh one.

The proof reads the bytecode of the frames that run, from the call that has given the value to the
end of the function (`ResultPlace.of`).  It follows the value through local variables, tuples,
lists, dicts and returns, along every branch.  Whatever else is done with it (arithmetic, a
comparison, a call, an attribute) ends the proof, as does bytecode that is not known here: the value
is compared then.  Exceptions need no proof: which ones are raised depends on what is compared.
"""

from __future__ import annotations

import bisect
import builtins
import dis
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias


@dataclass(frozen=True, slots=True)
class _Value:
    """The value itself, as converted by methods without arguments."""

    methods: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class _Container:
    """A tuple, list or dict of the function's own that holds the value, perhaps with more elements
    behind these, or other keys."""

    kind: type
    keys: tuple[Any, ...]
    children: tuple[Symbol, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Known:
    """An object that is known now: a constant, or what a variable holds."""

    value: Any

    def __repr__(self) -> str:
        return f"_Known({id(self.value)})"  # the text of an array waits for the device


@dataclass(frozen=True, slots=True, eq=False)
class _Attribute:
    """An attribute, of an object or of the value."""

    owner: Symbol
    name: str


Symbol: TypeAlias = _Value | _Container | _Known | _Attribute | None
"""An element of the stack, as far as it is known; None if it does not depend on the value, and
nothing else is known."""
_Stack: TypeAlias = tuple[Symbol, ...]
"""The upper elements of the stack; all below them are None."""


Gives: TypeAlias = Callable[[Any, int], Sequence[str] | None]
"""A function of a callable, or the name of a method, and the number of arguments (-1: unknown).

Returns the methods that make the result of such a call of the value; None if it may be anything."""


class _Lost(Exception):
    """An error: something else may be done with the value."""


_NO_OBJECT = _Known(None)
"""The empty place beside a callable on the stack."""
_POPPED = {
    **dict.fromkeys(("NOP", "RESUME", "EXTENDED_ARG", "NOT_TAKEN", "LOAD_BUILD_CLASS"), 0),
    **dict.fromkeys(("COPY_FREE_VARS", "MAKE_CELL", "KW_NAMES", "LOAD_GLOBAL"), 0),
    **dict.fromkeys(("LOAD_DEREF", "LOAD_CLOSURE", "LOAD_COMMON_CONSTANT"), 0),
    **dict.fromkeys(("LOAD_ATTR", "LOAD_METHOD", "UNARY_NEGATIVE", "UNARY_NOT", "TO_BOOL"), 1),
    **dict.fromkeys(("UNARY_INVERT", "UNARY_POSITIVE", "GET_ITER", "UNPACK_SEQUENCE"), 1),
    **dict.fromkeys(("LIST_TO_TUPLE", "CALL_INTRINSIC_1"), 1),
    **dict.fromkeys(("BINARY_OP", "BINARY_SUBSCR", "COMPARE_OP", "IS_OP", "CONTAINS_OP"), 2),
    **dict.fromkeys(("STORE_GLOBAL", "STORE_DEREF", "POP_TOP"), 1),
    **dict.fromkeys(("BINARY_SLICE", "STORE_SUBSCR"), 3),
    "STORE_ATTR": 2,
    "STORE_SLICE": 4,
}
"""The number of elements that an instruction takes from the stack."""
_ADDING = ("DICT_MERGE", "DICT_UPDATE", "LIST_APPEND", "LIST_EXTEND", "SET_ADD", "SET_UPDATE")
"""Instructions that add the last element to a container further down."""
_CONVERSIONS = ("cpu", "detach", "item", "numpy", "tolist")
"""Methods without arguments of arrays of the host, of which a result is made at once."""
_LOCALS = {"dir", "eval", "exec", "locals", "vars", "_getframe"}
"""Names by which a function may reach its variables otherwise than by loading them."""
_MOST_STEPS = 2000


@dataclass(frozen=True, slots=True)
class ResultPlace:
    """The places of a value in a call's result."""

    paths: tuple[tuple[Any, ...], ...]
    """For each place the indices and keys that lead to it, from the whole result inwards."""
    methods: Sequence[str]
    """Methods that make what is there of the value."""

    @staticmethod
    def of(
        frame: types.FrameType, function: Callable[..., Any], until: types.CodeType, given: Gives
    ) -> ResultPlace | None:
        """Returns where the value that a frame is about to get from a call is in the result of a
        function; None if something else may be done with it.

        `until`: the code that has called the function."""
        try:
            return _place(frame, function, until, given)
        except (_Lost, LookupError, ValueError, RecursionError):  # also for unknown bytecode
            return None

    def __str__(self) -> str:
        """A text as in the source of Python: `[1]['loss']`."""
        return "".join([f"[{key!r}]" for key in self.paths[0]])

    def put(self, result: Any, mark: object) -> Any:
        """Returns a result with a mark at these places, and the same objects elsewhere."""
        return functools.reduce(
            lambda whole, path: _replaced(whole, path, mark), self.paths, result
        )

    def get(self, result: Any) -> Any:
        """Returns what a result has at the first place."""
        return functools.reduce(lambda whole, key: whole[key], self.paths[0], result)

    def convert(self, value: Any) -> Any:
        """Makes what is at these places."""
        return functools.reduce(lambda made, name: getattr(made, name)(), self.methods, value)


def _replaced(whole: Any, path: tuple[Any, ...], mark: object) -> Any:
    if not path:
        return mark
    key, rest = path[0], path[1:]
    if type(whole) is dict:
        return {**whole, key: _replaced(whole[key], rest, mark)}
    return type(whole)(
        [_replaced(each, rest, mark) if i == key else each for i, each in enumerate(whole)]
    )


def _place(
    frame: types.FrameType, function: Callable[..., Any], until: types.CodeType, given: Gives
) -> ResultPlace:
    symbol: Symbol = None
    inner: types.CodeType | None = None
    outer: types.FrameType | None = frame
    while outer is not None and outer.f_code is not until:
        rest = _Rest(outer)
        symbol = rest.given(given) if inner is None else rest.after(symbol, inner)
        if not _holds(symbol):
            return ResultPlace((), ())
        inner, outer = outer.f_code, outer.f_back
    if outer is None or inner is None or _code_of(function) is not inner:
        raise _Lost
    found = [*_paths(symbol)]
    methods = {methods for _, methods in found}
    if len(methods) > 1:
        raise _Lost
    return ResultPlace(tuple([path for path, _ in found]), *methods)


def _holds(symbol: Symbol) -> bool:
    """True if a symbol is the value, or holds it."""
    if isinstance(symbol, _Attribute):
        return _holds(symbol.owner)
    return isinstance(symbol, _Value | _Container)


def _paths(symbol: Symbol) -> Iterator[tuple[tuple[Any, ...], Sequence[str]]]:
    """Yields the paths to the value in a container, and its conversions there."""
    if isinstance(symbol, _Value):
        yield (), symbol.methods
    if isinstance(symbol, _Container):
        for key, child in zip(symbol.keys, symbol.children, strict=True):
            for path, methods in _paths(child):
                yield (key, *path), methods


@functools.lru_cache(256)
def _instructions(code: types.CodeType) -> list[dis.Instruction]:
    return [each for each in dis.get_instructions(code) if each.opname != "CACHE"]


class _Rest:
    """The rest of the code of a frame, which waits for a call."""

    def __init__(self, frame: types.FrameType) -> None:
        self._frame, code = frame, frame.f_code
        self._code = _instructions(code)
        self._index = {each.offset: index for index, each in enumerate(self._code)}
        if _LOCALS.intersection(code.co_names) or code.co_flags & _NO_FUNCTION:
            raise _Lost
        # The offset is that of the instruction, or within the cache that follows it.
        self._at = bisect.bisect([*self._index], frame.f_lasti) - 1
        if self._code[self._at].opname == "PRECALL":  # of Python 3.11, which calls C there at times
            self._at += 1
        self._call = self._code[self._at]
        if self._call.opname not in ("CALL", "CALL_KW", "CALL_FUNCTION_EX"):
            raise _Lost

    def given(self, given: Gives) -> Symbol:
        """Returns what the frame returns if the call that it waits for gives the value."""
        before = self._before()
        callee, count = _callee(self._call, before)
        methods = None
        if isinstance(callee, _Attribute):
            methods = given(callee.name, count)
        elif isinstance(callee, _Known):
            methods = given(callee.value, count)
        if methods is None:
            raise _Lost
        return self._returned(before, _Value(methods))

    def after(self, symbol: Symbol, inner: types.CodeType) -> Symbol:
        """Returns what the frame returns if the call that it waits for, of this code, returns
        `symbol`."""
        before = self._before()
        if _code_of(_object(_callee(self._call, before)[0])) is not inner:
            raise _Lost
        return self._returned(before, symbol)

    def _before(self) -> _Stack:
        """Returns the stack before the call."""
        start = self._at
        while start and not self._code[start].is_jump_target:
            before = self._code[start - 1]
            if before.opcode in _JUMPS or before.opname.startswith(("RETURN", "RAISE", "RERAISE")):
                break
            start -= 1
        stack: _Stack = ()
        variables: dict[str, Symbol] = {}
        held = self._frame.f_locals
        for each in self._code[start : self._at]:
            try:
                stack = self._step(each, stack, variables, held)
            except _Lost:
                stack = ()
        return stack

    def _returned(self, stack: _Stack, symbol: Symbol) -> Symbol:
        """Returns what all ways from the call to a return give.  `symbol`: the call's result."""
        stack = (*_take(stack, _popped_by(self._call))[1], symbol)
        left: list[tuple[int, _Stack, dict[str, Symbol]]] = [(self._at + 1, stack, {})]
        seen: set[Any] = set()
        results: list[Symbol] = []
        for _ in range(_MOST_STEPS):
            if not left:
                break
            at, stack, variables = left.pop()
            stack = stack if any(map(_holds, stack)) else ()
            state = at, _text(stack), tuple([(n, _text((v,))) for n, v in variables.items()])
            if state in seen:
                continue
            seen.add(state)
            each = self._code[at]
            name = each.opname
            if name.startswith("RETURN_VALUE"):
                results.append(stack[-1] if stack else None)
            elif name == "RETURN_CONST":
                results.append(None)
            elif name.startswith(("RAISE", "RERAISE")):
                continue
            elif each.opcode in _JUMPS:
                stack = self._jumped(each, stack)
                if name not in _ALWAYS:
                    left.append((at + 1, stack, variables))
                left.append((self._index[each.argval], stack, variables))
            else:
                variables = dict(variables)
                stack = self._step(each, stack, variables, None)
                left.append((at + 1, stack, variables))
        if left or not results or len({_text((each,)) for each in results}) > 1:
            raise _Lost
        return results[0]

    def _jumped(self, each: dis.Instruction, stack: _Stack) -> _Stack:
        if each.opname in _ALWAYS or not stack:
            return stack
        if not each.opname.startswith("POP_JUMP"):
            raise _Lost  # a loop, with the value on the stack
        if _holds(stack[-1]):
            raise _Lost
        return stack[:-1]

    def _step(
        self, each: dis.Instruction, stack: _Stack, variables: dict[str, Symbol], held: Any
    ) -> _Stack:
        """Returns the stack after an instruction; notes variables that hold the value.

        `held`: the variables of the frame, for the code before the call; None after it."""
        name, count = each.opname, each.arg or 0
        if name.startswith(("LOAD_FAST", "STORE_FAST", "DELETE_FAST")):
            return self._variable(each, stack, variables, held)
        if name in ("LOAD_CONST", "LOAD_SMALL_INT"):
            return (*stack, _Known(each.argval))
        if name == "SWAP":
            return _swapped(stack, count)
        if name == "COPY":
            return (*stack, stack[-count] if len(stack) >= count else None)
        if name in ("BUILD_TUPLE", "BUILD_LIST", "BUILD_MAP", "BUILD_CONST_KEY_MAP"):
            return _built(name, count, stack)
        if name == "UNPACK_SEQUENCE" and stack and isinstance(stack[-1], _Container):
            if stack[-1].kind is dict or len(stack[-1].children) != count:
                raise _Lost
            return (*stack[:-1], *reversed(stack[-1].children))
        if name in ("LOAD_ATTR", "LOAD_METHOD") and stack:
            return self._attribute(each, stack)
        if name in ("CALL", "CALL_KW", "CALL_FUNCTION_EX"):
            return _called(each, stack)
        if name in ("LOAD_GLOBAL", "LOAD_DEREF") and held is not None:
            known = self._known(each, held)
            # A callable may have an empty place beside it, which is no element if `each` has none.
            extra = dis.stack_effect(each.opcode, each.arg) - 1
            return (*stack, *[_NO_OBJECT] * extra, known)
        if name == "PUSH_NULL":
            return (*stack, _NO_OBJECT)
        if not any(map(_holds, stack)) and held is None:
            return ()
        if name == "PRECALL":
            return stack
        if name in _ADDING:
            return _added(name, count, stack)
        to_tuple = name == "LIST_TO_TUPLE" or each.argrepr == "INTRINSIC_LIST_TO_TUPLE"
        if to_tuple and stack and isinstance(stack[-1], _Container):
            return (*stack[:-1], replace(stack[-1], kind=tuple))
        popped = _POPPED.get(name)
        if name in ("BUILD_SLICE", "BUILD_STRING", "BUILD_SET"):
            popped = count
        if popped is None:
            raise _Lost
        taken, rest = _take(stack, popped)
        if any(map(_holds, taken)):
            if name == "POP_TOP":
                return rest
            raise _Lost
        pushed = popped + dis.stack_effect(each.opcode, each.arg, jump=False)
        return (*rest, *[None] * pushed)

    def _variable(
        self, each: dis.Instruction, stack: _Stack, variables: dict[str, Symbol], held: Any
    ) -> _Stack:
        """Loads or stores one or two variables."""
        names = each.argval if isinstance(each.argval, tuple) else (each.argval,)
        acts = each.opname.split("_")
        loads = [act == "LOAD" for act in acts if act in ("LOAD", "STORE", "DELETE")]
        for load, name in zip(loads, names, strict=True):
            if load:
                symbol = variables.get(name)
                if held is not None and name not in variables and name in held:
                    symbol = _Known(held[name])
                stack = (*stack, symbol)
            elif each.opname.startswith("DELETE"):
                variables.pop(name, None)
            else:
                (symbol,), stack = _take(stack, 1)
                variables.pop(name, None)
                if held is not None or _holds(symbol):
                    variables[name] = symbol
        return stack

    def _attribute(self, each: dis.Instruction, stack: _Stack) -> _Stack:
        """Loads an attribute, or a method with its object."""
        found = _Attribute(stack[-1], each.argval)
        if isinstance(found.owner, (_Container, _Attribute)) and _holds(found.owner):
            raise _Lost
        method = dis.stack_effect(each.opcode, each.arg) == 1
        if isinstance(found.owner, _Value) and not method:
            raise _Lost
        return (*stack[:-1], found, *[_NO_OBJECT] * method)

    def _known(self, each: dis.Instruction, held: Any) -> Symbol:
        """Returns what a variable of the module, or of an outer function, holds now."""
        name = each.argval
        if each.opname == "LOAD_DEREF":
            return _Known(held[name]) if name in held else None
        for names in (self._frame.f_globals, vars(builtins)):
            if name in names:
                return _Known(names[name])
        return None


_JUMPS = {*dis.hasjrel, *dis.hasjabs}
_ALWAYS = ("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP_ABSOLUTE")
_NO_FUNCTION = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def _text(symbols: Sequence[Symbol]) -> str:
    """Returns a text that is equal for stacks that say the same of the value."""
    return ",".join([repr(each) if _holds(each) else "" for each in symbols])


def _take(stack: _Stack, count: int) -> tuple[_Stack, _Stack]:
    """Takes elements from a stack, of which some may lie below those that are known."""
    if not count:
        return (), stack
    return ((None,) * count + stack)[-count:], stack[:-count]


def _swapped(stack: _Stack, place: int) -> _Stack:
    full = [*_take(stack, max(place, len(stack)))[0]]
    full[-1], full[-place] = full[-place], full[-1]
    return tuple(full)


def _built(name: str, count: int, stack: _Stack) -> _Stack:
    """Makes a container of the upper elements."""
    keys: Sequence[Any] = range(count)
    if name == "BUILD_MAP":
        taken, rest = _take(stack, 2 * count)
        keys, taken = [*taken[::2]], taken[1::2]
    elif name == "BUILD_CONST_KEY_MAP":
        (*taken, names), rest = _take(stack, count + 1)  # type: ignore[assignment]
        keys = [names] if not isinstance(names, _Known) else [_Known(each) for each in names.value]
    else:
        taken, rest = _take(stack, count)
    if not any(map(_holds, [*taken, *[key for key in keys if not isinstance(key, int)]])):
        return (*rest, None)
    if name in ("BUILD_TUPLE", "BUILD_LIST"):
        kind = tuple if name == "BUILD_TUPLE" else list
        return (*rest, _Container(kind, tuple(keys), tuple(taken)))
    named = [key.value for key in keys if isinstance(key, _Known) and type(key.value) in (str, int)]
    if len(named) != count or len({*named}) != count:
        raise _Lost
    return (*rest, _Container(dict, tuple(named), tuple(taken)))


def _added(name: str, count: int, stack: _Stack) -> _Stack:
    """Adds the last element to the container that is `count` elements below it."""
    (into, *between, new), rest = _take(stack, count + 1)
    if _holds(new):
        # The items that are added last stay; those of the dict before are not known.
        if name != "DICT_UPDATE" or _holds(into) or not isinstance(new, _Container):
            raise _Lost
        into = new
    elif _holds(into) and not name.startswith("LIST"):  # which adds behind what is there
        raise _Lost
    return (*rest, into, *between)


def _called(call: dis.Instruction, stack: _Stack) -> _Stack:
    """Calls something that has no part in the value, or a conversion of it."""
    callee, count = _callee(call, stack)
    taken, rest = _take(stack, _popped_by(call))
    if isinstance(callee, _Attribute) and isinstance(callee.owner, _Value):
        plain = call.opname == "CALL" and count == 0 and callee.name in _CONVERSIONS
        if not plain:
            raise _Lost
        return (*rest, _Value((*callee.owner.methods, callee.name)))
    if any(map(_holds, taken)):
        raise _Lost
    return (*rest, None)


def _popped_by(call: dis.Instruction) -> int:
    """Returns how many elements a call takes: the callable and the place beside it, and the
    arguments."""
    if call.opname == "CALL_FUNCTION_EX":
        return 1 - dis.stack_effect(call.opcode, call.arg)
    return (call.arg or 0) + 2 + (call.opname == "CALL_KW")


def _callee(call: dis.Instruction, stack: _Stack) -> tuple[Symbol, int]:
    """Returns the callable of a call on the stack, and the number of its positional arguments; -1
    if that is not known."""
    count = (call.arg or 0) if call.opname == "CALL" else -1
    taken, _ = _take(stack, _popped_by(call))
    # Which of the two is the empty place depends on Python's version.
    two = [each for each in taken[:2] if each is not _NO_OBJECT]
    return (two[0] if len(two) == 1 else None), count


def _object(symbol: Symbol) -> Any:
    """Returns the object that a symbol is; None if that is not known without running code."""
    if isinstance(symbol, _Known):
        return symbol.value
    if not isinstance(symbol, _Attribute):
        return None
    owner = _object(symbol.owner)
    if owner is None:
        return None
    found = inspect.getattr_static(owner, symbol.name, None)
    if found is None:  # a part of a module of torch
        found = (getattr(owner, "__dict__", {}).get("_modules") or {}).get(symbol.name)
    return None if isinstance(found, property) else found


def _code_of(function: Any) -> types.CodeType | None:
    """Returns the code whose result a call of an object returns; None if that is not known."""
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, types.MethodType | staticmethod | classmethod):
        function = function.__func__
    if not isinstance(function, types.FunctionType):
        function = inspect.getattr_static(type(function), "__call__", None)
    return function.__code__ if isinstance(function, types.FunctionType) else None
