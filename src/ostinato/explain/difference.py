"""Drift: the first launch that differs between two runs of a step, or between graph and run."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import TypeAlias

from ostinato.driver.api import KernelNodeParams, MemcpyNodeParams, MemsetNodeParams
from ostinato.driver.signature import Signature
from ostinato.driver.stream import Operation
from ostinato.graph import Node
from ostinato.graph.node import decode_arguments

_Launch: TypeAlias = Node | Operation


def first_drift(
    before: Sequence[Node | Operation],
    now: Sequence[Node | Operation],
    words: tuple[str, str],
) -> str | None:
    """Describes the first difference between the launches of two runs; None if they are the same.

    Both are in the order of submission.  `words` name the two runs ("in the graph", "now").
    Returns None also if the graph holds child graphs: no run submits their launches one by one.
    """
    if any(isinstance(one, Node) and one.children for one in before):
        return None
    launches = zip_longest(_launches(before), _launches(now))
    for index, (one, other) in enumerate(launches):
        difference = _difference(index, one, other)
        if difference is not None:
            what, was, is_ = difference
            return f"{what} is {was} {words[0]} and {is_} {words[1]}"
    return None


def _launches(items: Sequence[_Launch]) -> list[_Launch]:
    kinds = KernelNodeParams | MemcpyNodeParams | MemsetNodeParams
    return [item for item in items if isinstance(item.params, kinds)]


def _name(launch: _Launch | None) -> str:
    if launch is None:
        return "nothing"
    if isinstance(launch.params, KernelNodeParams):
        return launch.name
    return "copy" if isinstance(launch.params, MemcpyNodeParams) else "fill"


def _difference(
    index: int, one: _Launch | None, other: _Launch | None
) -> tuple[str, str, str] | None:
    """Returns the part that differs, and its two values."""
    if one is None or other is None or _name(one) != _name(other):
        return f"operation {index}", _name(one), _name(other)
    where = f"of operation {index} ({_name(one)})"
    a, b = one.params, other.params
    if isinstance(a, KernelNodeParams) and isinstance(b, KernelNodeParams):
        if a.function != b.function:
            return f"the function {where}", f"{a.function:#x}", f"{b.function:#x}"
        if a.config.grid != b.config.grid:
            return f"the grid {where}", str(a.config.grid), str(b.config.grid)
        return _argument(where, a, b, other.signature or one.signature)
    # Not the extents: a driver may describe the same copy in another way.
    for name in ("dst", "src", "value"):
        was, is_ = getattr(a, name, None), getattr(b, name, None)
        if was != is_:
            return f"{name} {where}", f"{was:#x}", f"{is_:#x}"
    return None


def _argument(
    where: str, a: KernelNodeParams, b: KernelNodeParams, signature: Signature | None
) -> tuple[str, str, str] | None:
    # Addresses show as numbers: the memory may have been freed since.
    held, given = (decode_arguments(params, signature, lambda _: None) for params in (a, b))
    for one, other in zip(held, given, strict=False):
        if one.raw != other.raw:
            return f"argument {one.index} {where}", str(one), str(other)
    return None
