"""The difference of the graphs in two files; needs no device and loads no code.

Both graphs get addresses in one space that does not exist: a buffer with a name has the same
address in both, and so has other memory, by the order in which the nodes use it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ostinato.driver.api import (
    KINDS,
    FunctionHandle,
    KernelNodeParams,
    MemoryRange,
    NodeHandle,
)
from ostinato.graph.node import Node, decode_arguments
from ostinato.graph.show.diff import FieldChange, GraphDiff, diff
from ostinato.graph.show.outline import Outline, body_titles
from ostinato.graphfile.container import open_file
from ostinato.graphfile.records import (
    GraphManifest,
    GraphRecord,
    NodeRecord,
    PointerWord,
    with_addresses,
)

_FIRST, _STEP = 1 << 60, 1 << 44
_ADDRESS = re.compile(r"\b0x1[0-9a-f]{15}\b")


def file_diff(before: Path, after: Path, code: Path | None = None) -> GraphDiff:
    """Returns the changes that turn the graph of one file into that of the other; `code`: the
    folder that they share with others.  Memory without a name is "memory 0", "memory 1", in the
    order of its first use, so another order shows as changes.  Raises GraphFileError."""
    manifests: list[GraphManifest] = []
    for path in (before, after):
        with open_file(path, code) as contents:
            manifests.append(contents.manifest)
    names: dict[str, int] = {}
    one, two = (_Drawn(manifest, names) for manifest in manifests)

    def same(x: FunctionHandle, y: FunctionHandle) -> bool:
        f, g = manifests[0].functions[x], manifests[1].functions[y]
        return (f.kind, f.digest, f.target) == (g.kind, g.digest, g.target)

    return _named(diff(one.outline, two.outline, same), list(names))


class _Drawn:
    """The outline of a file's graph, with addresses that `names` gives to names."""

    def __init__(self, manifest: GraphManifest, names: dict[str, int]) -> None:
        self._manifest, self._names = manifest, names
        self._unnamed: dict[int, str] = {}
        self.outline = self._body(manifest.graph, "")

    def _body(self, graph: GraphRecord, title: str) -> Outline:
        nodes, inner = [], []
        for index, record in enumerate(graph.nodes):
            bodies = tuple(
                self._body(one, name)
                for one, name in zip(record.inner, body_titles(record.params), strict=True)
            )
            nodes.append(self._node(index, record, bodies))
            inner.append(bodies)
        edges = sorted(graph.edges, key=lambda e: (e.target, e.source))
        return Outline(title, tuple(nodes), tuple(edges), tuple(inner))

    def _node(self, index: int, record: NodeRecord, bodies: tuple[Outline, ...]) -> Node:
        params, kind = record.params, KINDS[type(record.params)]
        at = {str(word.place): self._address(word) for word in record.pointers}
        children = tuple(body.nodes for body in bodies)
        node = Node(index, NodeHandle(index), kind, record.name, params, children=children)
        if not isinstance(params, KernelNodeParams):
            return replace(node, params=with_addresses(params, at))
        data = bytearray(params.arguments.data)
        for condition in record.conditions:
            at[str(condition.offset)] = condition.condition
        for place, value in at.items():
            data[int(place) : int(place) + 8] = value.to_bytes(8, "little")
        signature = self._manifest.functions[params.function].signature
        params = params.with_data(bytes(data))
        held = decode_arguments(params, signature, _memory)
        return replace(node, params=params, held=held, signature=signature)

    def _address(self, word: PointerWord) -> int:
        for buffer in self._manifest.buffers:
            into = word.into - buffer.into
            if buffer.block == word.block and 0 <= into < max(1, buffer.nbytes):
                return self._begin(buffer.name) + into
        name = self._unnamed.setdefault(word.block, f"memory {len(self._unnamed)}")
        return self._begin(name) + word.into

    def _begin(self, name: str) -> int:
        return _FIRST + _STEP * self._names.setdefault(name, len(self._names))


def _memory(address: int) -> MemoryRange | None:
    return MemoryRange(address - address % _STEP, _STEP) if address >= _FIRST else None


def _named(found: GraphDiff, names: Sequence[str]) -> GraphDiff:
    """Returns the difference with names in place of the addresses that do not exist."""

    def name(text: re.Match[str]) -> str:
        number, into = divmod(int(text[0], 16) - _FIRST, _STEP)
        return names[number] + (f"+{into}" if into else "")

    def told(text: str) -> str:
        return _ADDRESS.sub(name, text)

    return replace(
        found,
        nodes=tuple(
            replace(
                node,
                details=told(node.details),
                fields=tuple(
                    FieldChange(f.field, told(f.before), told(f.after)) for f in node.fields
                ),
            )
            for node in found.nodes
        ),
    )
