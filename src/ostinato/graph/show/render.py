"""A graph as text: a table for people, plain data for programs, DOT for Graphviz."""

from __future__ import annotations

import dataclasses
import enum
import html
import io
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from ostinato.driver.api import (
    KernelNodeParams,
    LaunchConfig,
    NodeKind,
    NodeParams,
)
from ostinato.graph.node import Argument, Node
from ostinato.graph.show.digest import folded
from ostinato.graph.show.outline import (
    Outline,
    count_text,
    details,
    function_text,
    kind_text,
    line_text,
    printable,
    shape_text,
    shorten,
)

if TYPE_CHECKING:
    from rich.table import Table

SCHEMA = "ostinato.graph/1"
TABLE_WIDTH = 120
_LEAST_WIDTH = 72
MOST_DRAWN = 100
"""The largest number of drawn nodes: a notebook shows larger graphs as tables alone."""
_ARGUMENTS_WIDTH = 96
_NAME_WIDTH = 28
_MOST_ROWS = 60
"""A body of more nodes is folded."""


# -------------------------------------------------------------------------------------- the table

_STYLES = {
    NodeKind.KERNEL: "cyan",
    NodeKind.MEMCPY: "green",
    NodeKind.MEMSET: "green",
    NodeKind.HOST: "yellow",
    NodeKind.CHILD_GRAPH: "magenta",
    NodeKind.CONDITIONAL: "magenta",
}


def to_table(top: Outline) -> str:
    """Returns the graph as plain text, as wide as the terminal (COLUMNS; 120 columns without one):
    one row a node, in the driver's order.

    Of a graph or body of more than 60 nodes, the first of several like runs of nodes stands for
    all, after a row that says "30 × 5 nodes"; the others may have other memory and other values of
    arguments.  Long argument lists and names are shortened.  `to_dict` has all of it.
    """
    from rich.console import Console

    width = max(shutil.get_terminal_size((TABLE_WIDTH, 0)).columns, _LEAST_WIDTH)
    console = Console(
        file=io.StringIO(), width=width, color_system=None, force_jupyter=False, _environ={}
    )
    with console.capture() as capture:
        console.print(rich_table(top))
    return "\n".join(line.rstrip() for line in capture.get().rstrip().splitlines())


def to_html(top: Outline) -> str:
    """Returns HTML for notebooks: the picture, if it is small enough, and the table."""
    from ostinato.graph.show.svg import to_svg

    picture = to_svg(top) if sum(1 for _ in top.walk()) <= MOST_DRAWN else ""
    return f"<div>{picture}<pre>{html.escape(to_table(top))}</pre></div>"


def rich_table(top: Outline) -> Table:
    """Returns the graph as a table for a terminal: one row a node, in the driver's order.  If one
    line made all nodes, the title has it."""
    from rich import box
    from rich.table import Table

    configs = [n.params.config for n in top.walk() if isinstance(n.params, KernelNodeParams)]
    programmatic = any(e.programmatic for e in top.walk_edges())
    lines = {line_text(node.location) for node in top.walk()}
    one = lines.pop() if len(lines) == 1 else None
    table = Table(
        title=f"graph: {top.summary()}" + (f", made at {one}" if one else ""),
        title_justify="left",
        title_style="bold",
        caption="⇢ programmatic: may start before that node ends" if programmatic else None,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
    )
    optional: list[tuple[str, Callable[[LaunchConfig], str]]] = []
    if any(c.shared for c in configs):
        optional.append(("shared", lambda c: str(c.shared) if c.shared else ""))
    if any(c.cluster for c in configs):
        optional.append(("cluster", lambda c: shape_text(c.cluster) if c.cluster else ""))
    for header in ("node", "kind", "name", "grid", "block", *(header for header, _ in optional)):
        table.add_column(header, no_wrap=True)
    table.add_column("arguments", overflow="fold")
    table.add_column("after", overflow="fold")
    if one is None:
        table.add_column("line", overflow="fold", style="dim")
    _add_rows(table, top, [cell for _, cell in optional], 0)
    return table


def _add_rows(
    table: Table, body: Outline, optional: Sequence[Callable[[LaunchConfig], str]], depth: int
) -> None:
    from rich.text import Text

    indent, order = "  " * depth, range(len(body.nodes))
    units = folded(body, order) if len(order) > _MOST_ROWS else [[(i,)] for i in order]
    shown = {unit[0][0]: unit for unit in units if len(unit) > 1}
    for index in chain.from_iterable(unit[0] for unit in units):
        node, inner = body.nodes[index], body.inner[index]
        if (unit := shown.get(index)) is not None:
            told = f"{len(unit)} × {count_text(len(unit[0]), 'node')}, to {unit[-1][-1]}:"
            table.add_row("", "", Text(f"{indent}{told}", style="dim"))
        config = node.params.config if isinstance(node.params, KernelNodeParams) else None
        after = ", ".join(f"{'⇢' * e.programmatic}{e.source}" for e in body.after(node.index))
        # As Text: brackets in arguments and names are not rich's markup.
        kind = Text(kind_text(node.kind), style=_STYLES.get(node.kind, ""))
        cells = [
            indent + shorten(node.name, _NAME_WIDTH),
            "" if config is None else shape_text(config.grid),
            "" if config is None else shape_text(config.block),
            *("" if config is None else cell(config) for cell in optional),
            details(node, _ARGUMENTS_WIDTH),
            after,
            line_text(node.location),
        ]
        del cells[len(table.columns) - 2 :]  # the line, if the title has it
        table.add_row(Text(f"{indent}{node.index}"), kind, *(Text(printable(c)) for c in cells))
        for part in inner:
            empty = "" if part.nodes else " (empty)"
            table.add_row("", "", Text(f"{indent}  {part.title}:{empty}", style="dim"))
            _add_rows(table, part, optional, depth + 1)


# ------------------------------------------------------------------------------------- plain data


def to_dict(top: Outline, device: str) -> dict[str, object]:
    """Returns the graph as plain data for `json.dumps`.

    Schema "ostinato.graph/1": `device`, `nodes` and `edges`.  A node has `index`, `kind`, `name`,
    `params`, `arguments` (bytes in hex; `value` null if the type is unknown), `children`
    (title, nodes and edges of its child graph or bodies) and `location`.  Addresses and handles
    are numbers, and numbers that JSON cannot hold are "nan", "inf" and "-inf".
    """
    return {"schema": SCHEMA, "device": device, **_body_json(top)}


def _body_json(body: Outline) -> dict[str, object]:
    return {
        "nodes": [_node_json(n, inner) for n, inner in zip(body.nodes, body.inner, strict=True)],
        "edges": [{"source": e.source, "target": e.target, **_record(e.data)} for e in body.edges],
    }


def _node_json(node: Node, inner: tuple[Outline, ...]) -> dict[str, object]:
    return {
        "index": node.index,
        "kind": node.kind.name.lower(),
        "name": node.name,
        "params": _params_json(node.params),
        "arguments": [_argument_json(a) for a in node.arguments],
        "children": [{"title": part.title, **_body_json(part)} for part in inner],
        "location": node.location,
    }


def _argument_json(argument: Argument) -> dict[str, object]:
    return {
        "index": argument.index,
        "offset": argument.offset,
        "size": argument.size,
        "bytes": argument.raw.hex(),
        "name": argument.name,
        "type": argument.type,
        "value": plain(argument.value),
        "pointers": [
            {**{name: plain(value) for name, value in p._asdict().items()}, "into": p.into}
            for p in argument.pointers
        ],
    }


def _params_json(params: NodeParams) -> dict[str, object]:
    """Returns a node's parameters as plain data, without a kernel's arguments."""
    if not isinstance(params, KernelNodeParams):
        return _record(params)
    return {
        "function": int(params.function),
        **_record(params.config),
        "packed": params.arguments.packed,
        "extra_attributes": list(params.extra_attributes),
    }


def _record(value: object) -> dict[str, object]:
    assert dataclasses.is_dataclass(value)
    return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}


def plain(value: object) -> object:
    """Converts a record, or a value in one, to data for `json.dumps`."""
    if isinstance(value, enum.Enum):
        return value.name.lower()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple):
        return [plain(v) for v in value]
    if dataclasses.is_dataclass(value):
        return _record(value)
    return function_text(value) if callable(value) else repr(value)


# --------------------------------------------------------------------------------------- Graphviz

_FILLS = {
    NodeKind.KERNEL: "#dbe7fb",
    NodeKind.MEMCPY: "#d6f0ea",
    NodeKind.MEMSET: "#fbeed3",
    NodeKind.HOST: "#fbdde6",
    NodeKind.CHILD_GRAPH: "#e7defa",
    NodeKind.CONDITIONAL: "#e7defa",
}


def to_dot(top: Outline) -> str:
    """Returns the graph in Graphviz' language: child graphs and bodies as clusters, programmatic
    edges dashed."""
    lines = [
        "digraph ostinato {",
        '  graph [fontname="Helvetica", fontsize=11, compound=true];',
        '  node [shape=box, style="rounded,filled", fillcolor="#eceff3", color="#8a94a3",',
        '        fontname="Helvetica", fontsize=11];',
        '  edge [color="#5b6472", arrowsize=0.7];',
        *_dot_body(top, "n", "  "),
        "}",
    ]
    return "\n".join(lines) + "\n"


def _dot_body(body: Outline, prefix: str, indent: str) -> Iterator[str]:
    for node, inner in zip(body.nodes, body.inner, strict=True):
        name = f"{prefix}{node.index}"
        fill = f', fillcolor="{_FILLS[node.kind]}"' if node.kind in _FILLS else ""
        drawn = f'{name} [label="{_dot_label(node)}"{fill}];'
        if not inner:
            yield indent + drawn
            continue
        yield f'{indent}subgraph "cluster_{name}" {{'
        yield f'{indent}  label=""; style="rounded"; color="#8a6fd1";'
        yield f"{indent}  {drawn}"
        for number, part in enumerate(inner):
            within = f"{name}_{number}_"
            yield f'{indent}  subgraph "cluster_{within}" {{'
            yield f'{indent}    label="{_dot_escape(part.title)}"; style="dashed";'
            yield from _dot_body(part, within, indent + "    ")
            if not part.nodes:  # Graphviz draws no cluster that has no nodes.
                yield f'{indent}    {within}0 [label="(empty)", shape=plaintext, style=""];'
            yield f"{indent}  }}"
            targets = {e.target for e in part.edges}
            for first in sorted({n.index for n in part.nodes} - targets or {0}):
                yield f"{indent}  {name} -> {within}{first} [style=dotted, arrowhead=none];"
        yield f"{indent}}}"
    for edge in body.edges:
        style = f' [style=dashed, label="{edge.data.from_port}"]' if edge.programmatic else ""
        yield f"{indent}{prefix}{edge.source} -> {prefix}{edge.target}{style};"


def _dot_label(node: Node) -> str:
    lines = [f"{node.index}  {node.name}"]
    if isinstance(node.params, KernelNodeParams):
        config = node.params.config
        lines.append(f"{shape_text(config.grid)} blocks of {shape_text(config.block)}")
    else:
        lines.append(details(node, 60) or kind_text(node.kind))
    return "\\n".join(_dot_escape(line) for line in lines)


def _dot_escape(text: str) -> str:
    """Escapes a text for a quoted label: quotes, and a label's own escapes and entities."""
    return printable(text).replace("&", "&amp;").replace("\\", "\\\\").replace('"', '\\"')
