"""The difference of two graphs: nodes added, removed and changed, argument by argument.

Nodes have no stable names, so they are matched by their order: first nodes that are equal in
everything that is compared, then the nodes between them by kind and name, then by kind alone.  So
one inserted launch is one addition, not a change of every launch after it, also between kernels of
the same name.

Not compared, because they differ between equal graphs: handles of functions (their names and
code are), of child graphs and of conditions (their place among the graph's conditions is, and their
first value, if known), and the Python lines.  Addresses and events are compared: another buffer is
a difference.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import numpy as np

from ostinato.driver.api import (
    ChildGraphNodeParams,
    ConditionalNodeParams,
    FunctionHandle,
    HostNodeParams,
    KernelNodeParams,
)
from ostinato.driver.context import Context
from ostinato.errors import DriverError
from ostinato.graph.node import Argument, Node
from ostinato.graph.show.demangle import demangled
from ostinato.graph.show.outline import (
    Outline,
    OutlineEdge,
    details,
    function_text,
    kind_text,
    memop_text,
    shape_text,
)
from ostinato.graph.show.render import plain

SCHEMA = "ostinato.diff/1"
_WORD = 8
_MOST_CELLS = 1 << 27
"""The most bytes of the table that finds what both graphs have in the same order."""
_DOWN, _PAIR = 1, 2


@dataclass(frozen=True, slots=True)
class FieldChange:
    """One changed parameter of a node, or one argument by its name, in words.

    In an argument of more than 8 bytes, each word that differs is a change: "state+16".
    """

    field: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.field}: {self.before} → {self.after}"


@dataclass(frozen=True, slots=True)
class NodeDifference:
    """A node that only one graph has (then `before` or `after` is None), or that changed.

    `before` and `after` are its places: "3", or "3.body.0" for a node inside of node 3.
    """

    kind: str
    name: str
    before: str | None
    after: str | None
    fields: tuple[FieldChange, ...] = ()
    details: str = ""
    """The description of a node that was added or removed."""

    def __str__(self) -> str:
        places = dict.fromkeys(p for p in (self.before, self.after) if p is not None)
        lines = [
            f"{self.sign} node {' → '.join(places)}: {_title(self.kind, demangled(self.name))}"
        ]
        if self.details:
            lines[0] += f" ({self.details})"
        wide = max((len(f.field) for f in self.fields), default=0)
        lines += [f"      {f.field:<{wide}}  {f.before} → {f.after}" for f in self.fields]
        return "\n".join(lines)

    @property
    def sign(self) -> str:
        """ "+" added, "-" removed, "~" changed."""
        return "+" if self.before is None else "-" if self.after is None else "~"


@dataclass(frozen=True, slots=True)
class EdgeDifference:
    """An edge that only one graph has, by its nodes' places in that graph.

    An edge whose type or ports changed is one removed and one added.
    """

    source: str
    target: str
    added: bool
    data: str = ""
    """ "programmatic" or ports; empty for a plain edge."""

    def __str__(self) -> str:
        words = f" ({self.data})" if self.data else ""
        return f"{'+' if self.added else '-'} edge {self.source} → {self.target}{words}"


@dataclass(frozen=True, slots=True)
class GraphDiff:
    """The differences of two graphs.  True if there are any; `str()` gives a text like a diff.

    `nodes` and `edges` are in the graphs' order.
    """

    nodes: tuple[NodeDifference, ...]
    edges: tuple[EdgeDifference, ...]
    before: str = ""
    """The first graph in a few words."""
    after: str = ""
    """The second graph in a few words."""

    @property
    def added(self) -> tuple[NodeDifference, ...]:
        """Nodes that only the second graph has, without the nodes inside of them."""
        return tuple(n for n in self.nodes if n.before is None)

    @property
    def removed(self) -> tuple[NodeDifference, ...]:
        """Nodes that only the first graph has."""
        return tuple(n for n in self.nodes if n.after is None)

    @property
    def changed(self) -> tuple[NodeDifference, ...]:
        """Nodes that both graphs have, and that differ."""
        return tuple(n for n in self.nodes if n.before is not None and n.after is not None)

    @property
    def edges_added(self) -> tuple[EdgeDifference, ...]:
        return tuple(e for e in self.edges if e.added)

    @property
    def edges_removed(self) -> tuple[EdgeDifference, ...]:
        return tuple(e for e in self.edges if not e.added)

    @property
    def empty(self) -> bool:
        """True if the graphs are equal."""
        return not self.nodes and not self.edges

    def __bool__(self) -> bool:
        return not self.empty

    def __str__(self) -> str:
        if self.empty:
            return "no difference"
        head = [f"--- {self.before}", f"+++ {self.after}"]
        return "\n".join([*head, *map(str, self.nodes), *map(str, self.edges)])

    def side_by_side(self) -> str:
        """Returns the same as text in two columns, the first graph on the left."""
        rows = [("", self.before, self.after)]
        for node in self.nodes:
            title = _title(node.kind, demangled(node.name))
            for sign, text in ((node.sign, title), ("", node.details)):
                one, two = (
                    "" if place is None else f"{place}  {text}" if sign else f"   {text}"
                    for place in (node.before, node.after)
                )
                rows += [(sign, one, two)] if text else []
            rows += [
                ("", f"   {f.field}: {f.before}", f"   {f.field}: {f.after}") for f in node.fields
            ]
        for edge in self.edges:
            told = f"edge {edge.source} → {edge.target}"
            rows.append(("+", "", told) if edge.added else ("-", told, ""))
        if self.empty:
            return "no difference"
        wide = max(len(row[1]) for row in rows)
        return "\n".join(f"{sign:1} {one:{wide}} │ {two}".rstrip() for sign, one, two in rows)

    def to_dict(self) -> dict[str, object]:
        """Returns plain data for `json.dumps`, schema "ostinato.diff/1"."""
        names = ("added", "removed", "changed", "edges_added", "edges_removed")
        records = {name: [plain(record) for record in getattr(self, name)] for name in names}
        return {"schema": SCHEMA, "before": self.before, "after": self.after, **records}


SameCode: TypeAlias = Callable[[FunctionHandle, FunctionHandle], bool]


def code_comparison(before: Context, after: Context) -> SameCode:
    """Returns a function that decides whether two functions of one name have the same code.

    Functions of two contexts count as the same, and so do all during a capture, which reading code
    would break.  Two functions whose code cannot be read count as different.
    """

    @cache
    def code(function: FunctionHandle) -> tuple[object, ...] | None:
        try:
            found = before.driver.function_code(function)
        except DriverError:  # the code cannot be read
            return None
        return found.kind, found.data, found.target

    def same(one: FunctionHandle, two: FunctionHandle) -> bool:
        if one == two or before is not after or before.captures:
            return True
        return code(one) is not None and code(one) == code(two)

    return same


def diff(before: Outline, after: Outline, same_code: SameCode) -> GraphDiff:
    """Returns the changes that turn one graph into the other; empty for a graph and its clone.

    Both must be outlines made with `readable=False`.
    """
    pairs = _Pairs(before, after)
    conditions = _Conditions(pairs)
    return GraphDiff(
        tuple(_nodes(pairs, conditions, same_code, "", "")),
        tuple(_edges(pairs, "", "")),
        before.summary(),
        after.summary(),
    )


# ------------------------------------------------------------------------------------- matching


class _Pairs:
    """Two matched bodies: nodes in order, each with its counterpart or None, and inner bodies."""

    def __init__(self, before: Outline, after: Outline) -> None:
        self.before = before
        self.after = after
        self.nodes: list[tuple[Node | None, Node | None]] = list(_match(before, after))
        self.inner: dict[int, list[_Pairs]] = {}
        """The matched inner bodies, by the index of a matched node in `before`."""
        for one, two in self.nodes:
            if one is not None and two is not None:
                bodies = (before.inner[one.index], after.inner[two.index])
                self.inner[one.index] = [
                    _Pairs(x or Outline(y.title, (), (), ()), y or Outline(x.title, (), (), ()))
                    for x, y in itertools.zip_longest(*bodies)
                ]

    def walk(self) -> Iterator[tuple[Node, Node]]:
        """Yields every matched pair, also inside."""
        for one, two in self.nodes:
            if one is not None and two is not None:
                yield one, two
                for body in self.inner[one.index]:
                    yield from body.walk()


def _match(before: Outline, after: Outline) -> Iterator[tuple[Node | None, Node | None]]:
    """Matches nodes that are equal, then nodes of equal kind and name, then of equal kind."""
    a, b = before.nodes, after.nodes
    exact = ([_fingerprint(n) for n in a], [_fingerprint(n) for n in b])
    named = ([(n.kind, n.name) for n in a], [(n.kind, n.name) for n in b])
    for same, i, j in _align(*exact, range(len(a)), range(len(b))):
        if same:
            yield from zip((a[k] for k in i), (b[k] for k in j), strict=True)
            continue
        for alike, ii, jj in _align(*named, i, j):
            # Of equal kinds: another kernel, or another host function, in the same place.
            if alike or [a[k].kind for k in ii] == [b[k].kind for k in jj]:
                yield from zip((a[k] for k in ii), (b[k] for k in jj), strict=True)
            else:
                yield from ((a[k], None) for k in ii)
                yield from ((None, b[k]) for k in jj)


def _align(
    a: Sequence[object], b: Sequence[object], i: range, j: range
) -> Iterator[tuple[bool, range, range]]:
    """Yields equal runs of two ranges, and the ranges between them, in order."""
    keys = numbered([[a[k] for k in i], [b[k] for k in j]])
    x = y = 0
    for m, n in (*common_subsequence(keys), (len(i), len(j))):
        if (m, n) != (x, y):
            yield False, i[x:m], j[y:n]
        if m < len(i):
            yield True, i[m : m + 1], j[n : n + 1]
        x, y = m + 1, n + 1


def numbered(of: Sequence[Sequence[object]]) -> list[list[int]]:
    """Returns equal numbers for what is equal."""
    numbers: dict[object, int] = {}
    return [[numbers.setdefault(one, len(numbers)) for one in each] for each in of]


def common_subsequence(
    numbers: Sequence[Sequence[int]], *rather: Sequence[Sequence[int]]
) -> list[tuple[int, int]]:
    """Returns the places of a longest common subsequence of two sequences, in order; of several
    ones that in which most of the first two of `rather` are equal at these places, too, then most
    of the next two.

    Of very long sequences that differ in the middle, only their equal begin and end.
    """
    levels = [[np.array(of, np.int64) for of in both] for both in (numbers, *rather)]
    shorter = min(map(len, numbers))

    def equal(part: slice) -> int:
        """Returns how many numbers from the begin of a part on are equal on all levels."""
        same = np.logical_and.reduce([x[part] == y[part] for x, y in levels])
        return same.size if same.all() else int(same.argmin())

    head = equal(np.s_[:shorter])
    tail = equal(np.s_[: head - shorter - 1 : -1])
    levels = [[of[head : of.size - tail] for of in both] for both in levels]
    x, y = levels[0]
    found = [(n, n) for n in range(head)]
    if 0 < x.size * y.size <= _MOST_CELLS:
        # From the end: the best that is left from each place on, and the step that begins it.
        steps = np.zeros((x.size, y.size), np.uint8)
        below = np.zeros(y.size + 1, np.int64)
        for i in reversed(range(x.size)):
            worth = np.zeros(y.size, np.int64)
            for p, q in levels:  # one of a level is worth more than all of the next
                worth = (p[i] == q) + worth * (shorter + 1)
            taken = np.where(x[i] == y, below[1:] + worth, 0)
            row = np.zeros_like(below)
            row[:-1] = np.maximum.accumulate(np.maximum(below[:-1], taken)[::-1])[::-1]
            steps[i] = np.where(
                (taken > 0) & (row[:-1] == taken), _PAIR, np.where(row[:-1] == below[:-1], _DOWN, 0)
            )
            below = row
        i = j = 0
        while i < x.size and j < y.size:
            if steps[i, j] == _PAIR:
                found.append((head + i, head + j))
            i, j = i + (steps[i, j] != 0), j + (steps[i, j] != _DOWN)
    ends = len(numbers[0]), len(numbers[1])
    return found + [(ends[0] - n, ends[1] - n) for n in range(tail, 0, -1)]


def _fingerprint(node: Node) -> tuple[object, ...]:
    """Returns nearly all compared data of a node, hashable; only for matching."""
    parameters = tuple(function_text(v) if callable(v) else v for v in _parameters(node).values())
    arguments = tuple(b"" if a.type == "cond" else a.raw for a in node.arguments)
    inner = tuple(tuple(map(_fingerprint, body)) for body in node.children)
    return (node.kind, node.name, parameters, arguments, inner)


class _Conditions:
    """The pairs of conditions in two graphs: those of matched conditional nodes."""

    def __init__(self, pairs: _Pairs) -> None:
        self.stands_for: dict[bytes, bytes] = {}
        for one, two in pairs.walk():
            if isinstance(one.params, ConditionalNodeParams) and isinstance(
                two.params, ConditionalNodeParams
            ):
                handles = (one.params.handle, two.params.handle)
                key, value = (h.to_bytes(_WORD, "little") for h in handles)
                self.stands_for[key] = value
        self._known = {*self.stands_for, *self.stands_for.values()}

    def same(self, one: Argument, two: Argument) -> bool:
        """True if two arguments have the same bytes, or set the same condition."""
        types = {one.type, two.type}
        if types == {"cond"}:
            if one.raw in self.stands_for:
                return self.stands_for[one.raw] == two.raw
            # Conditions that no node tests are equal.
            return one.raw == two.raw or not {one.raw, two.raw} & self._known
        # Without a signature a condition is like any other word.
        untyped = types <= {"cond", ""} and self.stands_for.get(one.raw) == two.raw
        return untyped or one.raw == two.raw


# ------------------------------------------------------------------------------------ comparing


def _nodes(
    pairs: _Pairs, conditions: _Conditions, same_code: SameCode, before: str, after: str
) -> Iterator[NodeDifference]:
    """Yields the differences of a body's nodes; `before` and `after` are the body's place."""
    for one, two in pairs.nodes:
        if one is None or two is None:
            node = one or two
            assert node is not None
            yield NodeDifference(
                kind_text(node.kind),
                node.name,
                None if one is None else f"{before}{one.index}",
                None if two is None else f"{after}{two.index}",
                details=_launch(node),
            )
            continue
        places = (f"{before}{one.index}", f"{after}{two.index}")
        changes = tuple(_changes(one, two, conditions, same_code))
        if changes:
            yield NodeDifference(kind_text(two.kind), two.name, *places, changes)
        for body in pairs.inner[one.index]:
            title = body.before.title.replace(" ", "")
            yield from _nodes(body, conditions, same_code, *(f"{p}.{title}." for p in places))


def _changes(
    one: Node, two: Node, conditions: _Conditions, same_code: SameCode
) -> Iterator[FieldChange]:
    if isinstance(one.params, KernelNodeParams) and isinstance(two.params, KernelNodeParams):
        if one.name != two.name:
            yield FieldChange("kernel", one.name, two.name)
        elif not same_code(one.params.function, two.params.function):
            yield FieldChange("kernel", one.name, f"another {two.name}")
    if one.defaults and two.defaults and one.defaults != two.defaults:
        for name, value in _fields(one.defaults).items():
            now = getattr(two.defaults, name)
            if now != value:
                yield FieldChange(name.replace("_", " "), str(value), str(now))
    a, b = _parameters(one), _parameters(two)
    for name in a:
        if a[name] != b[name]:
            texts = [_field_text(name, values[name]) for values in (a, b)]
            if texts[0] == texts[1]:
                texts[1] = f"another {texts[1]}"
            yield FieldChange(name, *texts)
    for x, y in zip(one.arguments, two.arguments, strict=False):
        if not conditions.same(x, y):
            yield from _argument_changes(x, y)
    if len(one.arguments) != len(two.arguments):
        yield FieldChange("arguments", str(len(one.arguments)), str(len(two.arguments)))


def _argument_changes(x: Argument, y: Argument) -> Iterator[FieldChange]:
    name = y.name or x.name or f"argument {x.index}"
    if x.size != y.size or x.size <= _WORD:
        texts = [str(a._replace(name="")) for a in (x, y)]
        if texts[0] == texts[1]:  # Floats that differ in the last places, or NaNs.
            texts = [f"0x{int.from_bytes(a.raw, 'little'):0{2 * a.size}x}" for a in (x, y)]
        yield FieldChange(name, *texts)
        return
    for at in range(0, x.size, _WORD):
        words = [a.raw[at : at + _WORD] for a in (x, y)]
        if words[0] != words[1]:
            yield FieldChange(
                f"{name}+{at}", *(f"{int.from_bytes(word, 'little'):#x}" for word in words)
            )


def _parameters(node: Node) -> Mapping[str, object]:
    """Returns the compared parameters of a node, by name, without a kernel's arguments."""
    params = node.params
    if isinstance(params, KernelNodeParams):
        return {**_fields(params.config), "attributes": params.extra_attributes}
    if isinstance(params, ChildGraphNodeParams):
        return {}
    if isinstance(params, ConditionalNodeParams):
        return {"kind": params.kind, "bodies": params.size}
    if isinstance(params, HostNodeParams) and params.function is not None:
        return {"function": params.function}
    return _fields(params)


def _fields(record: object) -> dict[str, object]:
    assert dataclasses.is_dataclass(record)
    return {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}


_ADDRESSES = frozenset({"dst", "src", "address", "event", "pointer", "user_data"})


def _field_text(name: str, value: object) -> str:
    match name, value:
        case (("grid" | "block" | "cluster"), (int() as x, int() as y, int() as z)):
            return shape_text((x, y, z))
        case _, int() if name in _ADDRESSES:
            return f"{value:#x}"
        case "operations", tuple():
            return f"[{', '.join(map(memop_text, value))}]"
        case "function", _ if callable(value):
            return function_text(value)
        case "kind", _:
            return str(getattr(value, "name", value)).lower()
        case "attributes", tuple():
            return ", ".join(value) or "none"
        case _:
            return "none" if value is None else str(value)


def _launch(node: Node) -> str:
    """Returns the description of a node, with a kernel's sizes."""
    if not isinstance(node.params, KernelNodeParams):
        return details(node)
    config = node.params.config
    sizes = f"grid={shape_text(config.grid)}, block={shape_text(config.block)}"
    return f"{sizes}, {details(node, 80)}" if node.arguments else sizes


def _title(kind: str, name: str) -> str:
    return kind if name.replace("_", " ") == kind else f"{kind} {name}"


def _edges(pairs: _Pairs, before: str, after: str) -> Iterator[EdgeDifference]:
    """Yields the edges that only one of two bodies has, then those of the bodies inside."""
    index = {two.index: one.index for one, two in pairs.nodes if one and two}
    old = {(e.source, e.target, e.data) for e in pairs.before.edges}
    new = {(index.get(e.source), index.get(e.target), e.data) for e in pairs.after.edges}
    for e in pairs.before.edges:
        if (e.source, e.target, e.data) not in new:
            yield _edge(e, before, added=False)
    for e in pairs.after.edges:
        if (index.get(e.source), index.get(e.target), e.data) not in old:
            yield _edge(e, after, added=True)
    for one, two in pairs.nodes:
        if one is None or two is None:
            continue
        for body in pairs.inner[one.index]:
            title = body.before.title.replace(" ", "")
            yield from _edges(body, f"{before}{one.index}.{title}.", f"{after}{two.index}.{title}.")


def _edge(edge: OutlineEdge, where: str, *, added: bool) -> EdgeDifference:
    ports = (edge.data.from_port, edge.data.to_port)
    words = ["programmatic"] * edge.programmatic + [f"ports {ports[0]} → {ports[1]}"] * any(ports)
    return EdgeDifference(f"{where}{edge.source}", f"{where}{edge.target}", added, ", ".join(words))
