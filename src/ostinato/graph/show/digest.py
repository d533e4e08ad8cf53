"""The digest of a graph's shape, for processes to compare.

It covers the data that are equal in every process that builds the same graph: kinds and names of
nodes, launch shapes, sizes of arguments, copies, fills and allocations, edges with their data, and
the content of child graphs and bodies.  It does not cover addresses, handles, events, the values of
arguments (a rank's number is one), fills and memory operations, and lines of Python.

Nodes count in the driver's order: graphs whose nodes were made in another order differ.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, takewhile
from typing import Any

from ostinato.driver.api import (
    AllocNodeParams,
    BatchMemOpNodeParams,
    ConditionalNodeParams,
    KernelNodeParams,
    MemcpyNodeParams,
    MemsetNodeParams,
)
from ostinato.graph.node import Node
from ostinato.graph.show.outline import Outline

SCHEMA = "ostinato.digest/1"
_SHORTEST_FOLD = 4  # nodes: fewer are not worth it


def digest(outline: Outline) -> str:
    """Returns 64 hexadecimal digits.  The outline must be made with `readable=False`."""
    text = json.dumps([SCHEMA, _body(outline)], separators=(",", ":"))
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=32).hexdigest()


def _body(outline: Outline) -> list[Any]:
    return [
        outline.title,
        [
            described(node, bodies)
            for node, bodies in zip(outline.nodes, outline.inner, strict=True)
        ],
        [
            [e.source, e.target, e.data.from_port, e.data.to_port, int(e.data.type)]
            for e in outline.edges
        ],
    ]


def described(node: Node, bodies: Iterable[Outline]) -> list[Any]:
    """Returns the data that the digest covers of a node and of the bodies inside it."""
    return [node.kind.name, node.name, _shape(node), [_body(body) for body in bodies]]


def _shape(node: Node) -> list[Any]:
    match node.params:
        case KernelNodeParams(_, config, arguments):
            layout = [[slot.offset, slot.size] for slot in arguments.layout]
            return [dataclasses.astuple(config), len(arguments.data), layout]
        case MemcpyNodeParams() as copy:
            return [copy.width, copy.height, copy.depth, copy.opaque]
        case MemsetNodeParams() as fill:
            return [fill.element_size, fill.width, fill.height]
        case AllocNodeParams() as alloc:
            return [alloc.nbytes]
        case BatchMemOpNodeParams() as batch:
            return [[int(op.kind), op.size] for op in batch.operations]
        case ConditionalNodeParams() as conditional:
            return [conditional.kind.name, conditional.size]
        case _:
            return []


def folded(body: Outline, order: Sequence[int]) -> list[list[tuple[int, ...]]]:
    """Returns the nodes in units: a run that repeats is one, with the indices of each repeat; the
    others are [(index,)].  A run repeats if its nodes agree in all that the digest covers, and
    depend on nodes equally far back."""
    at = {index: place for place, index in enumerate(order)}
    keys = []  # equal for nodes of which one may stand for all
    for i in order:
        back = sorted((at[i] - at[e.source], e.programmatic) for e in body.after(i))
        keys.append(repr((described(body.nodes[i], body.inner[i]), back)))
    units: list[list[tuple[int, ...]]] = []
    while keys:
        ends = max(_repetitions(keys), key=lambda found: found[-1])
        units.append([tuple(order[start:end]) for start, end in pairwise(ends)])
        order, keys = order[ends[-1] :], keys[ends[-1] :]
    return units


def _repetitions(keys: Sequence[str]) -> Iterator[range]:
    """Yields, for each run that repeats at the keys' beginning, 0 and the ends of its repeats."""
    yield range(2)  # the first key by itself
    for period in range(1, len(keys) // 2 + 1):
        same = (keys[k] == keys[k + period] for k in range(len(keys) - period))
        times = 1 + sum(takewhile(bool, same)) // period
        if times > 1 and period * times >= _SHORTEST_FOLD:
            yield range(0, period * times + 1, period)
