"""Describes a graph file as text or plain data; needs no device and loads no code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from ostinato.driver.api import KINDS, ConditionalNodeParams, EdgeType, KernelNodeParams
from ostinato.graph.show.outline import kind_text, shape_text
from ostinato.graphfile.container import open_file
from ostinato.graphfile.format import to_dict
from ostinato.graphfile.records import GraphManifest, GraphRecord, NodeRecord


def file_json(path: Path, code: Path | None = None) -> dict[str, object]:
    """Returns the manifest of a file as plain data.  Raises GraphFileError."""
    with open_file(path, code) as contents:
        return to_dict(contents.manifest)


def file_text(path: Path, code: Path | None = None) -> str:
    """Returns the description of a file, in lines.  Raises GraphFileError."""
    with open_file(path, code) as contents:
        return "\n".join(_lines(contents.manifest))


def _lines(manifest: GraphManifest) -> Iterator[str]:
    machine = manifest.machine
    major, minor = machine.compute_capability
    where = f"saved on {machine.device}"
    if major:
        where += f" (compute capability {major}.{minor}, driver {machine.driver_version})"
    yield f"{where}, ostinato {machine.library}"
    yield (
        "passed its check when it was saved"
        if manifest.checked
        else "saved without a check: nothing says that it does what its graph did"
    )
    if manifest.key:
        yield f"key of its store: {manifest.key}"
    proofs = manifest.proofs()
    words = {
        "moved": "proven by a second capture",
        "signature": "by signatures",
        "field": "fields of copies and fills",
        "allocation": "only because live memory was there",
    }
    told = ", ".join(f"{proofs[kind]} {text}" for kind, text in words.items() if kind in proofs)
    yield f"addresses: {told or 'none'}"
    yield ""
    for buffer in manifest.buffers:
        shape = ", ".join(map(str, buffer.shape))
        stored = ""
        if "constant" in buffer.roles:
            stored = ", stored" if buffer.stored else ", given by name"
        place = f"block {buffer.block}" + (f" + {buffer.into}" if buffer.into else "")
        yield f"{'/'.join(buffer.roles)} {buffer.name}: {buffer.dtype}[{shape}], {place}{stored}"
    named = {buffer.block for buffer in manifest.buffers}
    scratch = [b.nbytes for i, b in enumerate(manifest.blocks) if i not in named and b.node is None]
    if scratch:
        yield f"scratch: {sum(scratch)} bytes in {len(scratch)} blocks"
    for function in manifest.functions:
        source = function.target or f"{function.kind} {function.digest[:12]}"
        yield f"kernel {function.name}: {source}"
    yield ""
    kinds = Counter(_kind(node) for node in manifest.graph.walk())
    yield ", ".join(f"{count} {kind}" for kind, count in kinds.most_common()) or "no nodes"
    yield from _nodes(manifest.graph, "")


def _nodes(graph: GraphRecord, margin: str) -> Iterator[str]:
    after: dict[int, list[str]] = {}
    for edge in graph.edges:
        sign = "*" if edge.data.type is EdgeType.PROGRAMMATIC else ""
        after.setdefault(edge.target, []).append(f"{edge.source}{sign}")
    for index, node in enumerate(graph.nodes):
        words = [f"{index}", node.name]
        params = node.params
        if isinstance(params, KernelNodeParams):
            config = params.config
            words.append(f"grid {shape_text(config.grid)} block {shape_text(config.block)}")
            words += [f"cluster {shape_text(config.cluster)}"] if config.cluster else []
        elif isinstance(params, ConditionalNodeParams):
            words.append(f"condition {int(params.handle)}")
        else:
            words.append(_kind(node) if _kind(node) != node.name.replace("_", " ") else "")
        pointers = [f"{w.place}=block {w.block}+{w.into}" for w in node.pointers]
        words.append(" ".join(pointers))
        unused = [f"+{s.offset}:{s.offset + s.size}" for s in node.unused]
        words.append(f"without effect {', '.join(unused)}" if unused else "")
        words.append(f"after {', '.join(after[index])}" if index in after else "")
        yield margin + "  ".join(word for word in words if word)
        for inner in node.inner:
            yield from _nodes(inner, margin + "    | ")


def _kind(node: NodeRecord) -> str:
    return kind_text(KINDS[type(node.params)])
