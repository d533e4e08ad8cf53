"""The oracle: what each piece of work does to memory, in plain NumPy.

Nothing here knows the library.  A `Box` is memory as it should be, a `Ref` a part of one, an
operation a frozen record that changes boxes when it is applied.  Whole numbers of 32 bits, so that
every answer is exact, whatever the order of additions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

SIZE = 32
"""Elements of a whole box."""
BLOCK = 8
"""Elements that one block of a launch reaches."""
PLAIN = (1, False, False, None)
"""The launch attributes of a kernel that is given none: `Seen.attributes`."""

Values: TypeAlias = npt.NDArray[np.int32]
_numbers = count()


class Box:
    """Memory as it should be; `known` is False where anything may be there."""

    def __init__(self, values: Values) -> None:
        self.number = next(_numbers)
        self.values = np.array(values, np.int32)
        self.known = np.ones(self.values.shape, np.bool_)
        self.closed = False

    def __repr__(self) -> str:
        return f"box {self.number}"

    def __len__(self) -> int:
        return len(self.values)

    def forget(self, start: int, stop: int) -> None:
        """Anything may be in these elements from here on."""
        self.known[start:stop] = False

    def write(self, start: int, values: Values) -> None:
        self.values[start : start + len(values)] = values
        self.known[start : start + len(values)] = True


@dataclass(frozen=True, eq=False)
class Ref:
    """A part of a box that an operation was given; `reach` False if it was given as an address."""

    box: Box
    start: int
    stop: int
    reach: bool = True

    def __repr__(self) -> str:
        return f"{self.box}[{self.start}:{self.stop}]"

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def end(self) -> int:
        """Behind the last element that may be used, as far as the library can know."""
        return self.stop if self.reach else len(self.box)

    def part(self, n: int) -> Values:
        return self.box.values[self.start : min(self.stop, self.start + n)]

    def overlaps(self, other: Ref) -> bool:
        return self.box is other.box and self.start < other.end and other.start < self.end


def whole(box: Box) -> Ref:
    return Ref(box, 0, len(box))


@dataclass(frozen=True, eq=False)
class Affine:
    """dst = src * m + c, for as many of n elements as `blocks` blocks reach."""

    dst: Ref
    src: Ref
    m: int
    c: int
    n: int
    blocks: int

    def apply(self) -> None:
        n = min(self.n, self.blocks * BLOCK)
        self.dst.part(n)[:] = self.src.part(n) * np.int32(self.m) + np.int32(self.c)


@dataclass(frozen=True, eq=False)
class Sum:
    """dst = a + b, n elements."""

    dst: Ref
    a: Ref
    b: Ref
    n: int

    def apply(self) -> None:
        self.dst.part(self.n)[:] = self.a.part(self.n) + self.b.part(self.n)


@dataclass(frozen=True, eq=False)
class Copy:
    """dst = src."""

    dst: Ref
    src: Ref

    def apply(self) -> None:
        self.dst.part(SIZE)[:] = self.src.part(SIZE).copy()


@dataclass(frozen=True, eq=False)
class Fill:
    """dst = value."""

    dst: Ref
    value: int

    def apply(self) -> None:
        self.dst.part(SIZE)[:] = self.value


@dataclass(frozen=True, eq=False)
class Seen:
    """dst = what the kernel itself sees of its launch: blocks, and blocks of a cluster.  The other
    attributes change no answer."""

    dst: Ref
    blocks: int
    cluster: int = 1
    cooperative: bool = False
    programmatic: bool = False
    priority: int | None = None

    @property
    def attributes(self) -> tuple[object, ...]:
        """What an executable keeps of a launch for ever."""
        return self.cluster, self.cooperative, self.programmatic, self.priority

    def apply(self) -> None:
        self.dst.part(2)[:] = self.blocks, self.cluster


class Token:
    """Counts the calls of one host function: `expected` by the oracle, `seen` by the function."""

    def __init__(self) -> None:
        self.expected = self.seen = 0

    def __call__(self) -> None:
        self.seen += 1


@dataclass(frozen=True, eq=False)
class Mark:
    """A call of a host function."""

    token: Token

    def apply(self) -> None:
        self.token.expected += 1


@dataclass(frozen=True, eq=False)
class Through:
    """dst = src * m, by way of memory that the graph allocates and frees: four nodes."""

    dst: Ref
    src: Ref
    m: int
    n: int

    def apply(self) -> None:
        self.dst.part(self.n)[:] = self.src.part(self.n) * np.int32(self.m)


@dataclass(frozen=True, eq=False)
class Signal:
    """A record of an event, which changes nothing."""

    event: object

    def apply(self) -> None:
        pass


@dataclass(frozen=True, eq=False)
class Child:
    """A graph inside."""

    ops: tuple[Op, ...]

    def apply(self) -> None:
        apply(self.ops)


@dataclass(frozen=True, eq=False)
class Branch:
    """`then` if the first element of `on` is odd, else `otherwise`."""

    on: Ref
    then: tuple[Op, ...]
    otherwise: tuple[Op, ...]

    def apply(self) -> None:
        apply(self.then if self.on.part(1)[0] & 1 else self.otherwise)


@dataclass(frozen=True, eq=False)
class Switch:
    """The body whose number is the last two bits of `on`; none if there is no such body."""

    on: Ref
    bodies: tuple[tuple[Op, ...], ...]

    def apply(self) -> None:
        which = int(self.on.part(1)[0]) & 3
        if which < len(self.bodies):
            apply(self.bodies[which])


@dataclass(frozen=True, eq=False)
class Loop:
    """`body` as often as the last two bits of `on` say; `on` counts down to zero."""

    on: Ref
    body: tuple[Op, ...]

    def apply(self) -> None:
        for _ in range(int(self.on.part(1)[0]) & 3):
            apply(self.body)
        self.on.part(1)[:] = 0


Op: TypeAlias = (
    Affine | Sum | Copy | Fill | Seen | Mark | Signal | Through | Child | Branch | Switch | Loop
)


def apply(ops: Iterable[Op]) -> None:
    """Does all of it, in order."""
    for op in ops:
        op.apply()


def even(op: Op) -> Op:
    """The same, where parts that begin at one place are as long as the longest of them: more the
    library does not know of a launch."""
    refs = refs_of(op)
    longest: dict[tuple[Box, int], int] = {}
    for ref in refs.values():
        at = ref.box, ref.start
        longest[at] = max(ref.stop, longest.get(at, 0))
    return replace(op, **{k: replace(r, stop=longest[r.box, r.start]) for k, r in refs.items()})


def inner(op: Op) -> tuple[tuple[Op, ...], ...]:
    """The operations inside of one, by graph."""
    if isinstance(op, Child):
        return (op.ops,)
    if isinstance(op, Branch):
        return op.then, op.otherwise
    if isinstance(op, Switch):
        return op.bodies
    if isinstance(op, Loop):
        return (op.body,)
    return ()


def leaves(ops: Iterable[Op]) -> Iterator[Op]:
    """Every operation that has no others inside, and the outsides of those that have."""
    for op in ops:
        yield op
        for body in inner(op):
            yield from leaves(body)


def refs_of(op: Op) -> dict[str, Ref]:
    """What one operation itself points at, by name."""
    return {name: value for name, value in vars(op).items() if isinstance(value, Ref)}


def changed(ops: tuple[Op, ...], old: Op, new: Op) -> tuple[Op, ...]:
    """The same operations with one replaced, wherever it is."""
    return rewritten(ops, lambda op: new if op is old else op)


def rewritten(ops: tuple[Op, ...], by) -> tuple[Op, ...]:  # type: ignore[no-untyped-def]
    """The same operations, each put through `by`, also inside of others."""
    out = []
    for op in ops:
        op = by(op)
        if isinstance(op, Child):
            op = replace(op, ops=rewritten(op.ops, by))
        elif isinstance(op, Branch):
            op = replace(op, then=rewritten(op.then, by), otherwise=rewritten(op.otherwise, by))
        elif isinstance(op, Switch):
            op = replace(op, bodies=tuple(rewritten(body, by) for body in op.bodies))
        elif isinstance(op, Loop):
            op = replace(op, body=rewritten(op.body, by))
        out.append(op)
    return tuple(out)
