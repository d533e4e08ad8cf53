"""Where chat templates run: jinja2's sandbox, with a bound on time and on memory.

The sandbox keeps a template from reaching Python; it does not keep it from running for ever or
making a string of 10 GB.  So every loop step, call and value made is paid from a budget, and the
few filters and methods that make long strings out of short ones are left out.
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, cast

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes
from jinja2.parser import Parser

__all__ = ["Budget", "RefusedError", "budget_now", "make_environment", "size_of"]

_MAX_STEPS = 200_000  # loop steps and calls of one rendering
_MAX_SECONDS = 2.0
_MAX_TEXT = 1 << 20  # characters of one string, and of the output, beyond what the messages hold
_MAX_INTEGER_BITS = 256

# Filters that turn a small argument into a long string, or are of no use in a chat.
_DROPPED_FILTERS = (
    "batch", "center", "filesizeformat", "format", "forceescape", "indent", "pprint", "random",
    "slice", "urlize", "wordwrap", "xmlattr", "replace", "join", "tojson",
)  # fmt: skip
_DROPPED_GLOBALS = ("lipsum", "cycler", "joiner")
_STRING_METHODS = frozenset(
    (
        "capitalize", "count", "endswith", "find", "index", "isalnum", "isalpha", "isdigit",
        "islower", "isnumeric", "isspace", "istitle", "isupper", "join", "lower", "lstrip",
        "partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex", "rpartition",
        "rsplit", "rstrip", "split", "splitlines", "startswith", "strip", "swapcase", "title",
        "upper",
    )
)  # fmt: skip


class RefusedError(jinja2.TemplateError):
    """The template asked for more than it may have."""


class Budget:
    """What one rendering may still use."""

    def __init__(self, given: object) -> None:
        size = size_of(given, 1 << 26)
        self.longest = _MAX_TEXT + 8 * size
        self._steps = _MAX_STEPS + size
        self._deadline = time.monotonic() + _MAX_SECONDS

    def spend(self, steps: int = 1) -> None:
        self._steps -= steps
        if self._steps < 0 or time.monotonic() > self._deadline:
            raise RefusedError("it runs too long")

    def text(self, length: int) -> None:
        """A string of this many characters is about to be made."""
        if length > self.longest:
            raise RefusedError(f"it makes a string of {length} characters")
        self.spend(1 + length // 1024)


budget_now: ContextVar[Budget] = ContextVar("ostinato_chatbudget_now")


def size_of(value: object, limit: int) -> int:
    """About how many characters `value` has when it is written out, shared parts as often as they
    are reached; stops counting above `limit`."""
    size, waiting = 0, [value]
    while waiting and size <= limit:
        item = waiting.pop()
        size += 1
        if isinstance(item, str):
            size += len(item)
        elif isinstance(item, Mapping):
            waiting.extend(item.keys())
            waiting.extend(item.values())
        elif isinstance(item, list | tuple | set):
            waiting.extend(item)
    return size


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%", "//", "/", "-"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        budget = budget_now.get()
        sizes = [_charged(v) for v in (left, right) if isinstance(v, str | list | tuple)]
        if operator == "**" or (operator == "%" and sizes):
            raise RefusedError(f"the {operator} operator is not supported on this")
        if operator == "*" and sizes:
            times = [v for v in (left, right) if isinstance(v, int)]
            budget.text(max(sizes) * max(0, *times, 0))
        elif sizes:
            budget.text(sum(sizes))
        else:
            budget.spend()
        for value in (left, right):
            if isinstance(value, int) and value.bit_length() > _MAX_INTEGER_BITS:
                raise RefusedError("it makes a huge number")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        for value in (args, kwargs):
            _charged(value)
        if isinstance(owner, str):
            if name == "join" and len(args) == 1:
                return _join(args[0], owner)
            if name == "replace" and 2 <= len(args) <= 3:
                return _replace(owner, *args)
        return super().call(context, obj, *args, **kwargs)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str) and attr not in _STRING_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> None:
        # The sandbox would let its own str.format through before it asks `is_safe_attribute`;
        # "{:1000000000}" is a long string.
        return None

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        _charge(source)
        return super()._generate(source, *args, **kwargs)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what an assistant said, for training; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 reads this attribute

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _charge(template: nodes.Template) -> None:
    """Send what loops take, what `~` joins and what literals hold through filters that charge.

    Lists are charged where they are written, because `x = [x, x]`, sixty times over, is small until
    something prints or compares it.
    """
    for parent in [template, *template.find_all(nodes.Node)]:
        for field, value in list(parent.iter_fields()):
            if isinstance(value, nodes.Node):
                setattr(parent, field, _charging(value))
            elif isinstance(value, list):
                value[:] = [_charging(v) if isinstance(v, nodes.Node) else v for v in value]
        if isinstance(parent, nodes.For):
            parent.iter = _through("_counted", parent.iter)


def _charging(node: nodes.Node) -> nodes.Node:
    if isinstance(node, nodes.Concat):
        return _through("join", nodes.List(node.nodes, lineno=node.lineno))
    if isinstance(node, nodes.List | nodes.Dict):
        return _through("_made", node)
    if isinstance(node, nodes.Tuple) and node.ctx == "load":
        return _through("_made", node)
    return node


def _through(name: str, node: nodes.Node) -> nodes.Filter:
    value = cast(nodes.Expr, node)  # jinja2 types a loop's iterable as any node
    return nodes.Filter(value, name, [], [], None, None, lineno=node.lineno)


def _charged(value: object) -> int:
    """The size of a value, paid for."""
    budget = budget_now.get()
    size = size_of(value, budget.longest)
    budget.text(size)
    return size


def _made(value: Any) -> Any:
    _charged(value)
    return value


def _counted(items: Iterable[Any]) -> Iterator[Any]:
    budget = budget_now.get()
    for item in items:
        budget.spend()
        yield item


def _join(items: Iterable[Any], separator: str = "", attribute: str | None = None) -> str:
    budget = budget_now.get()
    texts: list[str] = []
    length = 0
    for item in items:
        value = item.get(attribute, "") if attribute and isinstance(item, Mapping) else item
        texts.append(str(value))
        length += len(texts[-1]) + len(separator)
        budget.text(length)
    return str(separator).join(texts)


def _replace(text: str, old: str, new: str, count: int = -1) -> str:
    text, old, new = str(text), str(old), str(new)
    budget = budget_now.get()
    budget.text(len(text))
    times = text.count(old)
    budget.text(len(text) + max(0, len(new) - len(old)) * times)
    return text.replace(old, new, count)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes for HTML, which models were not trained on.
    text = json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=None if indent is None else min(int(indent), 16),
        separators=separators,
        sort_keys=sort_keys,
    )
    budget_now.get().text(len(text))
    return text


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(str(message)[:1000])


def _strftime_now(pattern: str) -> str:
    if len(pattern) > 100 or any(c.isdigit() for c in pattern):  # "%1000000000d" pads, in glibc
        raise RefusedError("strftime_now takes a short pattern without widths")
    return datetime.datetime.now().strftime(pattern)


def make_environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        # Constant folding would run filters while compiling.
        optimized=False,
        extensions=[_Generation, jinja2.ext.loopcontrols],
    )
    for name in _DROPPED_FILTERS:
        environment.filters.pop(name, None)
    for name in _DROPPED_GLOBALS:
        environment.globals.pop(name, None)
    environment.filters.update(
        {
            "_counted": _counted,
            "_made": _made,
            "join": _join,
            "replace": _replace,
            "tojson": _to_json,
        }
    )
    functions: dict[str, Callable[..., Any]] = {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
    }
    environment.globals.update(functions)
    return environment
