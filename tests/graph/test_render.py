"""Graphs shown: the table, plain data, DOT and the picture."""

from __future__ import annotations

import itertools
import json
import random
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ostinato as ost
from ostinato.device import Device
from ostinato.driver.api import EdgeData, EdgeType, EmptyNodeParams, HostNodeParams
from ostinato.graph.show.render import rich_table, to_dot, to_table
from ostinato.graph.show.svg import to_svg
from tests.sources import config, kernel, preload

N = 300
NASTY = 'a<b & "c" \\N {x} [bold]\x00\x1b\u202e\nend'
SVG = "{http://www.w3.org/2000/svg}"


def named(text: str) -> HostNodeParams:
    """A host node of that name."""

    def function() -> None:
        pass

    function.__qualname__ = text
    return HostNodeParams(function)


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables do not depend on the terminal that the tests run in."""
    monkeypatch.setenv("COLUMNS", "120")


def everything(device: Device) -> ost.Graph:
    """A graph with most kinds of nodes, a child graph and bodies within bodies."""
    x, y = device.zeros(N, np.float32), device.zeros(N, np.float32)
    graph = ost.Graph.create(device)
    fill = graph.add_fill(x, 7)
    copy = graph.add_copy(y, x, after=(fill,))
    scale = graph.add_kernel(kernel(device, "scale"), config(N), y, N, after=(copy,))
    host = graph.add(named("callback"), after=(copy,))
    condition = graph.condition(1)
    loop = graph.add_conditional("while", condition, after=(scale, host))
    body = loop.bodies[0]
    first = body.add_kernel(kernel(device, "fill"), config(N), x, 2.5, N)
    choice = body.add_conditional("if", body.condition(), size=2, after=(first,))
    choice.bodies[0].add_kernel(kernel(device, "add"), config(N), x, y, y, N)
    child = ost.Graph.create(device)
    one = child.add_fill(x, 0)
    child.add_fill(y, 0, after=(one,))
    inside = graph.add_child(child, after=(loop.node,))
    graph.add_empty(after=(inside, fill))
    return graph


def chain(device: Device, layers: int, *, ends: bool = True) -> ost.Graph:
    """Like a decode step: the same few launches again and again."""
    x = device.zeros(N, np.float32)
    graph = ost.Graph.create(device)
    after: tuple[ost.Node, ...] = ()
    if ends:
        after = (graph.add_fill(x, 0),)
    for layer in range(layers):
        after = (graph.add_kernel(kernel(device, "scale"), config(N), x, N, after=after),)
        after = (graph.add_kernel(kernel(device, "fill"), config(N), x, layer, N, after=after),)
    if ends:
        graph.add_kernel(kernel(device, "add"), config(N), x, x, x, N, after=after)
    return graph


def boxes(svg: str) -> list[str]:
    """The names in a picture."""
    found = ET.fromstring(svg).iter(f"{SVG}text")
    return [t.text or "" for t in found if t.get("class") == "name"]


# --- the table


def test_the_table_has_a_row_for_each_node(device: Device) -> None:
    text = str(everything(device))
    lines = text.splitlines()
    assert lines[0].startswith("graph: 12 nodes (3 memset, 3 kernel, 2 conditional")
    assert all(len(line) <= 120 and line == line.rstrip() for line in lines)
    row = next(line for line in lines if " scale " in line)
    assert row.split()[:5] == ["2", "kernel", "scale", "3", "128"]
    assert f"n={N}" in text and "factor" not in text
    assert "test_render.py:" in row
    # Bodies are indented under titles, the empty one says so.
    assert [t for t in ("body:", "then:", "else: (empty)", "child:") if t not in text] == []
    assert "shared" not in lines[1] and "cluster" not in lines[1]


def test_every_node_goes_into_bodies_and_children(device: Device) -> None:
    graph = everything(device)
    found = [*ost.lowlevel.every_node(graph.nodes())]
    assert len(found) == graph.count() == 12
    assert [n for n in found if n in graph.nodes()] == [*graph.nodes()]
    names = [n.name for n in found]
    assert names.index("fill") < names.index("add"), "a body before what is inside of it"
    kinds = [n.kind for n in found]
    assert kinds.count(ost.NodeKind.MEMSET) == graph.count("memset") == 3


def test_columns_for_what_some_node_has(device: Device) -> None:
    graph = ost.Graph.create(device)
    launch = ost.LaunchConfig(grid=(2, 3), block=(8, 4, 2), shared=1024)
    graph.add_kernel(kernel(device, "scale"), launch, device.zeros(4, np.float32), 4)
    head, _, row = to_table(graph.outline()).splitlines()[1:4]
    assert "shared" in head
    assert "1024" in row and "2×3" in row and "8×4×2" in row


def test_long_argument_lists_are_shortened(host_device: Device) -> None:
    @ost.host_kernel(", ".join(f"parameter_{i}: u32" for i in range(40)))
    def wide(launch, *values):
        pass

    graph = ost.Graph.create(host_device)
    loaded = host_device.modules.get_or_compile(ost.Source(host=[wide], name="wide"), "wide")
    graph.add_kernel(loaded, ost.LaunchConfig(1, 1), *range(40))
    text = re.sub(r"\s+", " ", to_table(graph.outline()))
    assert "parameter_0=0" in text and "parameter_39" not in text
    shown = text.count("parameter_")
    assert f"… {40 - shown} more" in text
    arguments = graph.to_dict()["nodes"][0]["arguments"]  # type: ignore[index]
    assert [a["value"] for a in arguments] == list(range(40))


def test_like_runs_of_a_large_graph_stand_once(device: Device) -> None:
    """Its layers have memory of their own; what is behind them is a row of its own."""
    graph, last = ost.Graph.create(device), list[ost.Node]()
    for number in range(30):
        x = device.zeros(4, np.float32, name=f"layer{number}")
        last = [graph.add_fill(x, 1, after=last)]
        last = [
            graph.add_kernel(kernel(device, "scale"), ost.LaunchConfig(1, 32), x, 4, after=last)
        ]
    assert "layer7" in to_table(graph.outline()), "60 nodes are not many"
    graph.add_copy(x, device.zeros(4, np.float32), after=last)
    text = to_table(graph.outline())
    assert "29 × 2 nodes, to 58:" in text and "layer7" not in text
    rows = [line.split()[0] for line in text.splitlines()[3:]]
    assert rows == ["0", "29", "1", "2", "59", "60"], text  # nothing comes before the first node


def test_addresses_in_a_view_have_its_name(device: Device) -> None:
    """The smallest that the node got: other nodes may know the place by another name."""
    weights = device.zeros(3 * N, np.float32, name="weights")
    bias = weights[N : 2 * N]
    bias.name = "bias"
    graph = ost.Graph.create(device)
    for x in (weights, weights[N : N + 8], bias, bias[1:]):
        graph.add_kernel(kernel(device, "scale"), config(N), x, N)
    graph.add_fill(bias, 1)
    text, into = to_table(graph.outline()), 4 * N
    assert re.findall(r"(?:x=\[|   )((?:weights|bias)[^] ]*)", text) == [
        *("weights", f"weights+{into}", "bias", f"weights+{into + 4}", "bias")
    ]


def test_one_line_of_all_nodes_is_in_the_title(device: Device) -> None:
    def made(graph: ost.Graph) -> ost.Graph:
        for _ in range(2):
            graph.add_fill(device.zeros(N, np.float32), 1)
        return graph

    title, head, *_ = to_table(made(ost.Graph.create(device)).outline()).splitlines()
    assert re.search(r"2 memset\), 0 edges, made at test_render.py:\d+$", title)
    assert "line" not in head
    graph = made(ost.Graph.create(device))
    graph.add_empty()
    title, head, *_ = to_table(graph.outline()).splitlines()
    assert title.endswith("0 edges") and head.split()[-1] == "line"


def test_an_empty_graph_is_shown(device: Device) -> None:
    graph = ost.Graph.create(device)
    assert to_table(graph.outline()).startswith("graph: 0 nodes, 0 edges")
    assert graph.to_dict()["nodes"] == []
    assert "digraph" in to_dot(graph.outline())
    assert "empty graph" in to_svg(graph.outline())


def test_a_terminal_gets_a_table(device: Device) -> None:
    table = rich_table(everything(device).outline())
    assert [c.header for c in table.columns][:3] == ["node", "kind", "name"]


# --- plain data


def test_json_goes_through_json(device: Device) -> None:
    data = everything(device).to_dict()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert data["schema"] == "ostinato.graph/1"


def test_json_has_arguments_edges_and_bodies(device: Device) -> None:
    graph = everything(device)
    data = json.loads(json.dumps(graph.to_dict()))
    nodes = data["nodes"]
    assert [n["index"] for n in nodes] == list(range(len(graph)))
    scale = nodes[2]
    assert (scale["kind"], scale["name"]) == ("kernel", "scale")
    assert scale["params"]["grid"] == [3, 1, 1] and scale["params"]["shared"] == 0
    x, n = scale["arguments"]
    assert (x["index"], x["offset"], x["size"], x["name"], x["type"]) == (0, 0, 8, "x", "*f32")
    assert int.from_bytes(bytes.fromhex(x["bytes"]), "little") == x["pointers"][0]["address"]
    assert x["pointers"][0]["into"] == 0
    assert x["pointers"][0]["allocation"]["nbytes"] >= 4 * N
    assert (n["name"], n["value"], n["pointers"]) == ("n", N, [])
    edges = {(e["source"], e["target"]) for e in data["edges"]}
    assert edges == {(0, 1), (1, 2), (1, 3), (2, 4), (3, 4), (4, 5), (5, 6), (0, 6)}
    assert all(e["type"] == "default" and e["from_port"] == 0 for e in data["edges"])
    (body,) = nodes[4]["children"]
    assert body["title"] == "body" and len(body["edges"]) == 1
    assert [part["title"] for part in body["nodes"][1]["children"]] == ["then", "else"]
    assert "test_render.py" in scale["location"]


def test_json_has_edge_data(host_device: Device) -> None:
    graph = programmatic(host_device)
    assert graph.to_dict()["edges"] == [
        {"source": 0, "target": 1, "from_port": 1, "to_port": 0, "type": "programmatic"}
    ]


def test_numbers_that_json_has_no_words_for(device: Device) -> None:
    graph = ost.Graph.create(device)
    x = device.zeros(N, np.float32)
    for value in (float("nan"), float("inf"), -float("inf")):
        graph.add_kernel(kernel(device, "fill"), config(N), x, value, N)
    data = json.loads(json.dumps(graph.to_dict(), allow_nan=False))
    assert [n["arguments"][1]["value"] for n in data["nodes"]] == ["nan", "inf", "-inf"]


def programmatic(device: Device) -> ost.Graph:
    graph = ost.Graph.create(device)
    x = device.zeros(N, np.float32)
    first = graph.add_kernel(kernel(device, "scale"), config(N), x, N)
    operation = ost.prepare(kernel(device, "scale"), config(N), x, N)
    data = EdgeData(from_port=1, type=EdgeType.PROGRAMMATIC)
    graph.add(operation.params, after=(first,), edge_data=(data,), operation=operation)
    return graph


def test_programmatic_edges_are_dashed(host_device: Device) -> None:
    graph = programmatic(host_device)
    assert "⇢0" in to_table(graph.outline())
    assert "style=dashed" in to_dot(graph.outline())
    svg = to_svg(graph.outline())
    assert "1 programmatic edge<" in svg and 'class="early"' in svg


# --- Graphviz


def outside_quotes(dot: str) -> str:
    """DOT without its quoted strings."""
    bare = re.sub(r'"(?:[^"\\]|\\.)*"', "", dot)
    assert '"' not in bare, "a quoted string does not end"
    return bare


def test_dot_is_balanced_and_has_all_nodes(device: Device) -> None:
    graph = everything(device)
    bare = outside_quotes(to_dot(graph.outline()))
    assert bare.count("{") == bare.count("}") > 4
    assert bare.count("[") == bare.count("]")
    declared = set(re.findall(r"^\s*(n[\d_]+) \[", bare, re.MULTILINE))
    used = {n for pair in re.findall(r"(n[\d_]+) -> (n[\d_]+)", bare) for n in pair}
    assert used <= declared
    assert len(declared) == graph.count() + 1, "every node, and one for the empty body"


@pytest.mark.parametrize("show", [to_table, to_dot, to_svg], ids=["table", "dot", "svg"])
def test_names_are_escaped(device: Device, show) -> None:
    graph = ost.Graph.create(device)
    node = graph.add(named(NASTY))
    graph.add(named("\ud800"), after=(node,))
    graph.add(named("[bold]x[/]"))
    text = show(graph.outline())
    assert not set(text) & set("\x00\x1b\u202e")
    if show is to_table:
        assert "[bold]x[/]" in text  # no markup
    if show is to_dot:
        bare = outside_quotes(text)
        assert bare.count("{") == bare.count("}") == 1
        assert r"\\N" in text and 'a<b &amp; \\"c' in text
    if show is to_svg:
        assert boxes(text)[0].startswith('a<b & "c" \\N')
    text.encode("utf-8")


# --- the picture


def test_the_picture_is_xml_with_a_box_for_each_node(device: Device) -> None:
    graph = everything(device)
    svg = to_svg(graph.outline())
    root = ET.fromstring(svg)
    assert root.tag == f"{SVG}svg"
    # Nodes with something inside are frames with their number.
    assert sorted(boxes(svg)) == sorted(
        [
            "memset",
            "memcpy",
            "scale",
            "callback",
            "while #4",
            "fill",
            "if #1",
            "add",
            "child graph #5",
            "memset",
            "memset",
            "empty",
        ]
    )
    assert "grid 3 · block 128" in svg
    assert "else: empty" in svg
    edges = [p for p in root.iter(f"{SVG}path") if p.get("class") == "edge"]
    assert len(edges) == 1 + 8 + 1 + 1, "one in the legend, and every edge"
    assert svg == to_svg(graph.outline()), "the same graph gives the same text"


def test_hovering_shows_all_arguments(device: Device) -> None:
    graph = ost.Graph.create(device)
    x = device.zeros(N, np.float32)
    graph.add_kernel(kernel(device, "fill"), config(N), x, 2.5, N)
    titles = [t.text or "" for t in ET.fromstring(to_svg(graph.outline())).iter(f"{SVG}title")]
    assert any("value=2.5" in t and f"n={N}" in t and "test_render.py" in t for t in titles)


def size(svg: str) -> tuple[float, float]:
    root = ET.fromstring(svg)
    return float(root.get("width", "0")), float(root.get("height", "0"))


def test_a_long_chain_is_wrapped(device: Device) -> None:
    svg = to_svg(chain(device, 80).outline())
    assert len(boxes(svg)) == 162
    width, height = size(svg)
    assert 0.6 < width / height < 3
    inside(svg)


def test_what_repeats_is_folded(device: Device) -> None:
    svg = to_svg(chain(device, 80).outline(), max_nodes=40)
    assert boxes(svg) == ["memset", "80 times: nodes 1 to 160", "scale", "fill", "add"]
    # A node that differs breaks the run in two.
    graph = chain(device, 10, ends=False)
    x = device.zeros(N, np.float32)
    graph.add_kernel(kernel(device, "scale"), config(2 * N), x, N, after=(graph.nodes()[-1],))
    assert boxes(to_svg(graph.outline(), max_nodes=10))[-1] == "scale"
    inside(svg)


def test_what_is_too_much_is_left_out_and_said(device: Device) -> None:
    graph = ost.Graph.create(device)
    after: tuple[ost.Node, ...] = ()
    for number in range(60):
        after = (graph.add(named(f"step {number}"), after=after),)
    names = boxes(to_svg(graph.outline(), max_nodes=11))
    assert names[:5] == [f"step {n}" for n in range(5)]
    assert names[5] == "… 50 nodes not drawn"
    assert names[6:] == [f"step {n}" for n in range(55, 60)]


def test_a_run_that_repeats_is_shortened_too(device: Device) -> None:
    graph = ost.Graph.create(device)
    after: tuple[ost.Node, ...] = ()
    for number in range(25):
        after = (graph.add(named(f"step {number % 12}"), after=after),)
    names = boxes(to_svg(graph.outline(), max_nodes=8))
    assert names[:2] == ["step 0", "2 times: nodes 1 to 24"]
    assert names[5:8] == ["step 4", "… 4 nodes not drawn", "step 9"]


def test_nodes_without_edges_do_not_make_one_endless_row(device: Device) -> None:
    graph = ost.Graph.create(device)
    for number in range(40):
        graph.add(named(f"alone {number}"))
    width, _ = size(to_svg(graph.outline()))
    assert width < 2000


def test_many_cases_do_not_make_one_endless_row(device: Device) -> None:
    graph = ost.Graph.create(device)
    switch = graph.add_conditional("switch", graph.condition(), size=20)
    for number, body in enumerate(switch.bodies):
        body.add_fill(device.zeros(N, np.float32), number)
    svg = to_svg(graph.outline())
    cases = re.findall(r">(case \d+)</text>", svg)
    assert cases == [f"case {number}" for number in range(20)]
    assert size(svg)[0] < 2000
    inside(svg)


def walk(element: ET.Element, x: float = 0, y: float = 0) -> Iterator[tuple[float, ...]]:
    """Left, top, right, bottom of every rectangle."""
    moved = re.match(r"translate\((\S+) (\S+)\)", element.get("transform", ""))
    if moved:
        x, y = x + float(moved[1]), y + float(moved[2])
    if element.tag == f"{SVG}rect":
        left, top = x + float(element.get("x", 0)), y + float(element.get("y", 0))
        yield (
            left,
            top,
            left + float(element.get("width", 0)),
            top + float(element.get("height", 0)),
        )
    for child in element:
        yield from walk(child, x, y)


def is_box(rectangle: tuple[float, ...]) -> bool:
    return abs(rectangle[3] - rectangle[1] - 40) < 0.01


def inside(svg: str) -> None:
    """Nothing lies outside of the picture, and no box on part of another."""
    width, height = size(svg)
    rectangles = list(walk(ET.fromstring(svg)))
    for left, top, right, bottom in rectangles:
        assert left >= 0 and top >= 0 and right <= width and bottom <= height
    drawn = [r for r in rectangles if is_box(r)]
    for number, a in enumerate(drawn):
        for b in drawn[:number]:
            apart = a[0] >= b[2] or b[0] >= a[2] or a[1] >= b[3] or b[1] >= a[3]
            assert apart, "two boxes lie on each other"


def way(data: str) -> list[tuple[float, float]]:
    """Points along the data of a path."""
    points: list[tuple[float, float]] = []
    for letter, text in re.findall(r"([A-Za-z])([^A-Za-z]*)", data):
        numbers = [float(number) for number in re.findall(r"-?[\d.]+", text)]
        assert letter in "MVHCq"
        if letter == "V":
            numbers.insert(0, points[-1][0])
        if letter == "H":
            numbers.append(points[-1][1])
        ends = list(zip(numbers[::2], numbers[1::2], strict=True))
        if letter == "q":
            ends = [(points[-1][0] + x, points[-1][1] + y) for x, y in ends]
        curve = ends if letter == "M" else [points[-1], *ends]
        for step in range(1, 11):
            t, level = step / 10, curve
            while len(level) > 1:  # de Casteljau
                level = [
                    (a[0] + (b[0] - a[0]) * t, a[1] + (b[1] - a[1]) * t)
                    for a, b in itertools.pairwise(level)
                ]
            points.append(level[0])
    return points


def clear(svg: str) -> None:
    """Each edge leaves a box at its lower border, reaches one at its upper border, and passes
    through none; for a graph with nothing inside its nodes."""
    root = ET.fromstring(svg)
    (drawn,) = (g for g in root if g.tag == f"{SVG}g" and any(c.tag == f"{SVG}g" for c in g))
    rectangles = [r for g in drawn if g.tag == f"{SVG}g" for r in walk(g) if is_box(r)]
    edges = [way(p.get("d", "")) for p in drawn if p.tag == f"{SVG}path"]
    near = 0.11  # numbers have one decimal
    for edge in edges:
        (x, y), (to_x, to_y) = edge[0], edge[-1]
        assert any(abs(r[3] - y) < near and r[0] < x < r[2] for r in rectangles)
        assert any(abs(r[1] - to_y) < near and r[0] < to_x < r[2] for r in rectangles)
        for left, top, right, bottom in rectangles:
            assert not any(
                left + near < px < right - near and top + near < py < bottom - near
                for px, py in edge
            ), "an edge runs through a box"


@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=[pytest.mark.slow] * (n in (5, 10))) for n in range(12)]
)
def test_edges_pass_beside_boxes(host_device: Device, seed: int) -> None:
    rng = random.Random(seed)
    graph, nodes = ost.Graph.create(host_device), list[ost.Node]()
    for number in range(rng.choice([5, 40, 160])):
        after = rng.sample(nodes[-9:], min(len(nodes), rng.randint(0, 1 + seed % 3)))
        nodes.append(graph.add(named(f"step {number}"), after=after))
    svg = to_svg(graph.outline())
    edges = [p for p in ET.fromstring(svg).iter(f"{SVG}path") if p.get("class") == "edge"]
    assert len(edges) == len(graph.edges()) + bool(graph.edges()), "each edge, and the legend's"
    clear(svg)
    inside(svg)


def test_edges_between_columns_pass_beside_boxes(device: Device) -> None:
    clear(to_svg(chain(device, 80).outline()))


@settings(deadline=None, max_examples=settings().max_examples // 2)
@given(st.data())
def test_any_graph_can_be_shown(data: st.DataObject) -> None:
    with ost.open_device("host") as device:
        graph = ost.Graph.create(preload(device))
        nodes: list[ost.Node] = []
        for _ in range(data.draw(st.integers(0, 24))):
            picks = st.sets(st.sampled_from(nodes or [None]).map(nodes.index)) if nodes else None
            after = [nodes[i] for i in sorted(data.draw(picks))][:4] if picks is not None else []
            params = data.draw(
                st.sampled_from([EmptyNodeParams()]) | st.text(max_size=50).map(named)
            )
            nodes.append(graph.add(params, after=after))
        limit = data.draw(st.integers(1, 30))
        inside(to_svg(graph.outline(), max_nodes=limit))
        bare = outside_quotes(to_dot(graph.outline()))
        assert bare.count("{") == bare.count("}")
        plain = graph.to_dict()
        assert json.loads(json.dumps(plain)) == plain
        assert len(plain["edges"]) == len(graph.edges())  # type: ignore[arg-type]
        to_table(graph.outline())
