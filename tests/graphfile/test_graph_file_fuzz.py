"""Graph files that were damaged, or made to do harm: refused with a typed error, or harmless.

Two kinds of damage: bytes changed anywhere, which digests find, and manifests changed with new
digests written, as somebody would who wants them to be loaded.  Nothing of these is launched.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import io
import json
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ostinato as ost
from ostinato.device import Device
from ostinato.driver.host.driver import HostDriver
from ostinato.errors import GraphFileError
from ostinato.graphfile.container import open_file
from ostinato.graphfile.format import parse
from tests.graphfile.file_kernels import ONE, add, affine, choose, kernel, packed

MEMORY = 1 << 20
"""All that the devices of these tests have: no number in a file makes them take more."""


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file with most of what a file can have."""
    path = tmp_path_factory.mktemp("disk") / "sound.graph"
    with Device(HostDriver(total_memory=MEMORY)) as device:
        x, y = device.array([1, 2], "i4"), device.array([0, 0], "i4")
        graph = ost.Graph.create(device)
        words = x.address.to_bytes(8, "little") + y.address.to_bytes(8, "little")
        graph.keep += [x, y]
        first = graph.add_kernel(kernel(device, packed), ONE, 0, words, 1)
        second = graph.add_kernel(kernel(device, affine), ONE, y, x, 3, 0, 2, after=[first])
        condition = graph.condition(1)
        chosen = graph.add_kernel(kernel(device, choose), ONE, x, condition, after=[second])
        branch = graph.add_conditional("if", condition, after=[chosen])
        branch.bodies[0].add_kernel(kernel(device, add), ONE, x, y, 2)
        event = device.create_event()
        record = graph.add_event_record(event, after=[branch.node])
        alloc = graph.add_alloc(8, after=[record])
        fill = ost.Graph.create(device)
        fill.add_fill(x[:1], 3)
        child = graph.add_child(fill, after=[alloc])
        graph.add_free(alloc.alloc.address, after=[child])
        weights = device.array([1.5], "f4")
        named = {"inputs": {"x": x, "y": y}, "outputs": {"x": x, "y": y}}
        ost.graphfile.save(graph, path, **named, constants={"w": weights})
    return path.read_bytes()


def manifest_of(data: bytes) -> dict[str, Any]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        found: dict[str, Any] = json.loads(archive.read("manifest.json"))
        return found


def signed(data: bytes, manifest: object) -> bytes:
    """The file with another manifest, and its digest."""
    raw = json.dumps(manifest).encode()
    new = {"manifest.json": raw, "manifest.sha256": hashlib.sha256(raw).hexdigest().encode()}
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(made, "w") as archive:
        for name in old.namelist():
            archive.writestr(name, new.get(name, old.read(name)))
    return made.getvalue()


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    path.chmod(0o600)
    return path


def manifest_read(data: bytes, folder: Path) -> bytes:
    """What is loaded; empty if it is refused with an error that names the file.  Other exceptions
    leave this function."""
    path = written(folder / "one.graph", data)
    with Device(HostDriver(total_memory=MEMORY)) as device:
        before = device.memory_info()
        try:
            loaded = ost.graphfile.load(device, path)
        except GraphFileError as error:
            assert str(path) in str(error)
        else:
            with suppress(ost.OstinatoError):
                assert str(loaded)
                loaded.instantiate().close()
            device.synchronize()  # nothing ran, so nothing can have ended the context
            return loaded.raw
        device.synchronize()
        assert device.memory_info() == before  # nothing is left behind
        return b""


# -------------------------------------------------------------------------------------- any damage

VALUES = (
    *(0, 1, -1, 7, 8, 255, 256, 1 << 20, 1 << 31, 1 << 40, 1 << 63, 1 << 64, 10**30),
    *(None, True, False, 0.5, "", "x", "moved", "kernel", "memcpy", "os:system", [], {}, [[]]),
    *("__import__('os')", "O", "<i4", "a:b", "antigravity", "tests.graphfile.file_kernels:add"),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The place of everything in a manifest."""
    if path:
        yield path
    is_list = isinstance(value, list)
    items = value.items() if isinstance(value, dict) else enumerate(value) if is_list else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def test_every_value_has_its_type_and_bounds(sound: bytes) -> None:
    """Numbers that no field takes, other types, and a missing or an unknown key: the error names
    the key."""
    manifest = manifest_of(sound)
    for path in places(manifest):
        value, key = at(manifest, path), path[-1]
        named = next(part for part in reversed(path) if isinstance(part, str))
        for bad in (1 << 64, -1 << 64, 0.5, 7 if isinstance(value, str | list | dict) else "x"):
            with replaced(manifest, path, bad), pytest.raises(GraphFileError) as caught:
                parse(manifest)
            assert named.partition("/")[0] in str(caught.value)
        if isinstance(value, dict):
            with replaced(manifest, path, value | {"extra": 0}), pytest.raises(GraphFileError):
                parse(manifest)
        if key == named and path[0] != "tensors":
            holder = at(manifest, path[:-1])
            rest = {name: one for name, one in holder.items() if name != key}
            with replaced(manifest, path[:-1], rest), pytest.raises(GraphFileError, match=key):
                parse(rest if len(path) == 1 else manifest)


@contextmanager
def replaced(manifest: Any, path: tuple[Any, ...], value: object) -> Iterator[None]:
    if not path:
        yield
        return
    holder = at(manifest, path[:-1])
    before, holder[path[-1]] = holder[path[-1]], value
    yield
    holder[path[-1]] = before


@st.composite
def changed(draw: st.DrawFn, sound: dict[str, Any]) -> dict[str, Any]:
    """A manifest with changes at places of any kind."""
    manifest: dict[str, Any] = copy.deepcopy(sound)
    for _ in range(draw(st.sampled_from((1, 1, 1, 2, 5)))):
        every = [*places(manifest)]
        path = draw(st.sampled_from(every))
        holder, key = at(manifest, path[:-1]), path[-1]
        elsewhere = st.sampled_from(every).map(lambda other: at(manifest, other))
        steps = (-8, -1, 1, 4, 8) if type(holder[key]) is int else ()
        values = (*VALUES, *[holder[key] + step for step in steps] * 4)
        new = copy.deepcopy(draw(st.sampled_from(values) | elsewhere))
        match draw(st.sampled_from(("set", "set", "remove", "insert"))):
            case "remove":
                del holder[key]
            case "insert" if isinstance(holder, list):
                holder.insert(key, new)
            case "insert":
                holder[draw(st.sampled_from(("node", "extra", "pointers", "inner")))] = new
            case _:
                holder[key] = new
    return manifest


many = settings(
    max_examples=4 * settings().max_examples,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@many
@given(st.data())
def test_manifests_that_were_changed_are_refused_or_harmless(
    sound: bytes, tmp_path: Path, data: st.DataObject
) -> None:
    manifest_read(signed(sound, data.draw(changed(manifest_of(sound)))), tmp_path)


@many
@given(st.data())
def test_no_byte_of_a_file_can_change_what_it_does(
    sound: bytes, tmp_path: Path, data: st.DataObject
) -> None:
    """Bytes that are changed, cut out or put in are refused, or mean nothing in a zip."""
    raw = bytearray(sound)
    for _ in range(data.draw(st.integers(1, 4))):
        first = data.draw(st.integers(0, len(raw)))
        raw[first : first + data.draw(st.integers(0, 64))] = data.draw(st.binary(max_size=16))
    if read := manifest_read(bytes(raw), tmp_path):
        assert json.loads(read) == manifest_of(sound)


# ---------------------------------------------------------------------------------- one by one


def kernels(manifest: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = manifest["graph"]["kernels"]
    assert found["pointers"]["kernel"][:2] == [0, 0]  # the first one has two
    return found


def put(where: str, value: Any) -> Any:
    """Sets what is at a place ("graph/edges/data", with numbers for places in lists)."""

    def change(m: dict[str, Any]) -> None:
        *path, key = (int(n) if n.lstrip("-").isdecimal() else n for n in where.split("/"))
        at(m, tuple(path))[key] = value

    return change


def more(where: str, *values: Any) -> Any:
    """Adds to the list at a place."""
    return lambda m: at(m, tuple(where.split("/"))).extend(values)


def pointer(key: str, value: Any) -> Any:
    """Changes the first address."""
    return put(f"{WORDS}/{key}/0", value)


def twice(m: dict[str, Any]) -> None:
    """The first address again."""
    for column in kernels(m)["pointers"].values():
        column.insert(0, column[0])


def add_edge(source: int, target: int) -> Any:
    def add(m: dict[str, Any]) -> None:
        more("graph/edges/source", source)(m)
        more("graph/edges/target", target)(m)

    return add


def deep(m: dict[str, Any]) -> None:
    graph = empty(m)
    for _ in range(100):
        inner = {"at": 0, "name": "n", "kind": "child_graph", "inner": [graph]}
        graph = empty(m) | {"nodes": [inner]}
    m["graph"] = graph


def empty(m: dict[str, Any]) -> dict[str, Any]:
    """A graph without nodes."""
    made: dict[str, Any] = copy.deepcopy(m["graph"])
    made["nodes"], made["kernels"]["data"] = [], ""
    columns = (made["edges"], made["kernels"], made["kernels"]["pointers"])
    for column in [column for some in columns for column in some.values()]:
        if isinstance(column, list):
            column.clear()
    return made


def last(m: dict[str, Any], node: dict[str, Any]) -> None:
    """One more node, which is no kernel."""
    graph = m["graph"]
    graph["nodes"].append({"at": len(graph["nodes"]) + len(graph["kernels"]["size"]), **node})


KERNELS, WORDS = "graph/kernels", "graph/kernels/pointers"
COPY = {
    **dict.fromkeys(("depth", "dst_pitch", "src_pitch", "dst_height", "src_height", "height"), 1),
    "name": "copy",
    "kind": "memcpy",
    "width": 1 << 20,
    "pointers": [["dst", 0, 0, "field"], ["src", 0, 0, "field"]],
}
HOSTILE: dict[str, tuple[Any, str]] = {
    "a newer format": (put("version", 2), "format 2; this release reads 1"),
    "another format": (put("format", "zip"), "no graph file"),
    "a cycle": (add_edge(1, 0), "close a cycle"),
    "an edge to itself": (add_edge(1, 1), "1 is joined to itself"),
    "an edge twice": (add_edge(0, 1), "joined twice"),
    "an edge of half": (more("graph/edges/source", 0), "another list has more or fewer"),
    "an edge of no type": (more("graph/edges/data", [0, 0, 0, 9]), "9 is no type of an edge"),
    "a word outside its arguments": (pointer("place", 4096), "a word at 4096 is outside the arg"),
    "a word across two arguments": (pointer("place", 12), "a word at 12 is outside"),
    "two words at one place": (twice, "two words are at one place"),
    "a pointer out of its block": (pointer("into", 1 << 30), "points out of its block"),
    "pointers in another order": (
        lambda m: kernels(m)["pointers"]["kernel"].reverse(),
        "they are not in order",
    ),
    "arguments that are too few": (put(f"{KERNELS}/size/0", 8), "the function takes more bytes"),
    "arguments without bytes": (put(f"{KERNELS}/data", "00" * 8), "bytes, and .* belong here"),
    "arguments of no digits": (put(f"{KERNELS}/data", "x"), "are no hexadecimal digits"),
    "a condition in the place of an address": (
        lambda m: kernels(m)["conditions"].append([0, kernels(m)["pointers"]["place"][0], 0]),
        "two words are at one place",
    ),
    "two names of one kernel": (put(f"{KERNELS}/names", [[0, "a"], [0, "b"]]), "a kernel has two"),
    "two nodes at one place": (
        lambda m: m["graph"]["nodes"][1].update(at=m["graph"]["nodes"][0]["at"]),
        "at: .* is no whole number",
    ),
    "a block without bytes": (put("blocks/nbytes/0", 0), "block 0 has none"),
    "an alloc node of two blocks": (
        lambda m: m["blocks"]["alloc"].append([0, m["blocks"]["alloc"][0][1]]),
        "alloc nodes and the blocks|memory of an alloc node",
    ),
    "a block of a node that does not allocate": (
        put("blocks/alloc/0/1", 4),
        "alloc nodes and the blocks that they allocate differ",
    ),
    "a condition of two nodes": (
        lambda m: last(m, {k: v for k, v in m["graph"]["nodes"][0].items() if k != "at"}),
        "condition: it has a node already",
    ),
    "a name of an alloc node's memory": (put("buffers/block/0", 3), "of an alloc node has no name"),
    "code of no digest": (
        lambda m: m["functions"][0].update(digest="../../secret", target=""),
        "either the digest of an image is needed",
    ),
    "two buffers of one name": (put("buffers/name/1", "x"), "two have one name"),
    "a buffer of half": (more("buffers/name", "z"), "other columns have more or fewer"),
    "a buffer that leaves its block": (put("buffers/into/0", 4), "8 bytes at 4 reach out of block"),
    "more memory than there is": (put("blocks/nbytes/0", 1 << 40), "and .* are free"),
    "graphs inside graphs": (deep, "33 deep"),
    "a node of no kind": (put("graph/nodes/0/kind", "kernel"), "'kernel' is no kind of node"),
    "a free node of other memory": (put("graph/nodes/-1/pointers/0/1", 0), "only the memory of an"),
    "a free node of a part": (put("graph/nodes/-1/pointers/0/2", 1), "only the memory of an alloc"),
    "a branch without a body": (put("graph/nodes/0/inner", []), "inner: 0 graphs"),
    "a branch with three": (
        lambda m: m["graph"]["nodes"][0].update(inner=m["graph"]["nodes"][0]["inner"] * 3),
        "inner: 3 graphs",
    ),
    "an alloc node in a branch": (
        lambda m: m["graph"]["nodes"][0]["inner"][0]["nodes"].append(
            m["graph"]["nodes"][2] | {"at": 1}
        ),
        "alloc and free nodes belong into the outermost graph",
    ),
    "Python objects": (put("buffers/dtype/0", "O"), "no type of plain numbers"),
    "a huge shape": (put("buffers/shape/0", [1 << 40] * 30), "reach out"),
    "a shape of 33 dimensions": (put("buffers/shape/0", [1] * 33), "reach out"),
    "another kernel": (
        put("functions/0/target", "tests.graphfile.file_kernels:add"),
        "has no kernel|takes other parameters|takes no|is not in the module|cannot|no kernel",
    ),
    "no kernel": (put("functions/0/target", "os:system"), "os:system is no kernel of the host"),
    "an expression": (put("functions/0/target", "os:system('true')"), "no place of a kernel"),
    "a signature of other parameters": (
        put("functions/0/signature", "all: bytes[100000]"),
        "signature: it does not say where the parameters are",
    ),
    "an address without effect": (put(f"{KERNELS}/unused", [[0, 12, 2]]), "2 bytes at 12 are no"),
    "bytes without effect beyond the arguments": (
        put(f"{KERNELS}/unused", [[0, 0, 1], [0, 4000, 1]]),
        "1 bytes at 4000 are no free bytes",
    ),
    "code of another driver": (put("functions/0/kind", "cubin"), "does not run its code"),
    "a type of a look that is code": (
        put("buffers/look/0", ["__import__('os')", [2], None]),
        "is no type of an array",
    ),
    "content of no buffer": (put("tensors", {"inputs/z": "0" * 64}), "'inputs/z' is of no buffer"),
    "content of no kind": (put("tensors", {"others/x": "0" * 64}), "'others/x' is of no buffer"),
    "content of something else": (
        lambda m: m["tensors"].update({"inputs/x": m["tensors"]["constants/w"]}),
        "what 'x' is to hold has 4 bytes, and the graph was captured with 8",
    ),
    "content of no digest": (put("tensors", {"inputs/x": "../../secret"}), "no SHA-256 digest"),
    "an input without content": (put("tensors", {}), "the content of 'inputs/x' is not in it"),
    "a copy of more than its blocks have": (lambda m: last(m, COPY), "leave block"),
}


INDICES = [
    *(put(f"{KERNELS}/{where}", 99) for where in ("function/0", "launch/0", "pointers/kernel/-1")),
    *(put(f"{WORDS}/{where}", 99) for where in ("block/0", "proof/0")),
    *(put(f"{KERNELS}/conditions/0/{place}", 99) for place in (0, 2)),
    *(more(f"{KERNELS}/{where}", [99, 0, 1]) for where in ("conditions", "unused")),
    *(more(f"{KERNELS}/{where}", [99, "x"]) for where in ("names", "hints")),
    *(put(f"graph/nodes/{where}", 99) for where in ("0/condition", "1/event", "-1/at")),
    *(put(f"graph/edges/{where}/0", 99) for where in ("source", "target")),
    more("graph/edges/data", [99, 0, 0, 0]),
    *(put(where, 99) for where in ("blocks/alloc/0/0", "buffers/block/0", "buffers/role/0")),
]
"""Each makes one number the index of what is not there."""


@pytest.mark.parametrize("harm", INDICES)
def test_an_index_of_what_is_not_there_is_refused(sound: bytes, harm: Any) -> None:
    manifest = manifest_of(sound)
    harm(manifest)
    with pytest.raises(GraphFileError, match="99 is no whole number from"):
        parse(manifest)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_manifests_are_refused_with_the_reason(
    name: str, sound: bytes, tmp_path: Path
) -> None:
    harm, why = HOSTILE[name]
    manifest = manifest_of(sound)
    harm(manifest)
    path = written(tmp_path / "hostile.graph", signed(sound, manifest))
    with (
        Device(HostDriver(total_memory=MEMORY)) as device,
        pytest.raises(GraphFileError, match=why),
    ):
        ost.graphfile.load(device, path)


def test_entries_that_do_not_belong_there(sound: bytes, tmp_path: Path) -> None:
    for name in ("../../evil", "content/short", "manifest.json"):
        path = written(tmp_path / "more.graph", sound)
        with zipfile.ZipFile(path, "a") as archive, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of zipfile, for the name that is there already
            archive.writestr(name, b"{}")
        why = f"{name}' does not belong there"
        with Device(HostDriver()) as device, pytest.raises(GraphFileError, match=why):
            ost.graphfile.load(device, path)
    path = tmp_path / "bomb.graph"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("manifest.json", b" " * (1 << 20))
    path.chmod(0o600)
    with Device(HostDriver()) as device, pytest.raises(GraphFileError, match="is compressed"):
        ost.graphfile.load(device, path)


@pytest.mark.parametrize(
    ("harm", "what"),
    [
        pytest.param(
            lambda k: k["pointers"]["block"].__setitem__(1, k["pointers"]["block"][0]),
            "differ",
            id="an address into another block",
        ),
        pytest.param(
            lambda k: k.update(unused=[[0, 24, 8]]),
            "differ|Error",
            id="bytes without effect that have one",
        ),
    ],
)
def test_a_manifest_that_was_changed_and_signed_does_not_pass_its_check(
    harm: Any, what: str, host_device: Device, tmp_path: Path
) -> None:
    """Nothing tells such a file from a sound one but its results."""
    path, device = tmp_path / "one.graph", host_device
    x, y = device.array([1], "i4"), device.array([0], "i4")
    words = x.address.to_bytes(8, "little") + y.address.to_bytes(8, "little")
    graph = ost.Graph.create(device)
    graph.keep += [x, y]
    graph.add_kernel(kernel(device, packed), ONE, 0, words, 1)
    ost.graphfile.save(graph, path, inputs={"x": x}, outputs={"y": y})
    manifest = manifest_of(path.read_bytes())
    harm(kernels(manifest))
    written(path, signed(path.read_bytes(), manifest))
    with pytest.raises(GraphFileError, match=what):
        ost.graphfile.check(device, path)


def with_code(sound: bytes, folder: Path, code: dict[str, bytes], **machine: Any) -> Path:
    """A file whose first kernel is a cubin, with entries under content/."""
    manifest = manifest_of(sound)
    manifest["machine"].update(machine)
    digest = hashlib.sha256(b"first").hexdigest()
    manifest["functions"][0].update(kind="cubin", digest=digest, target="")
    path = written(folder / "coded.graph", signed(sound, manifest))
    with zipfile.ZipFile(path, "a") as archive:
        for name, data in code.items():
            archive.writestr(f"content/{name}", data)
    return path


def test_cubins_that_were_swapped_are_refused(sound: bytes, tmp_path: Path) -> None:
    first, second = (hashlib.sha256(name).hexdigest() for name in (b"first", b"second"))
    path = with_code(sound, tmp_path, {first: b"second", second: b"first"})
    with (
        pytest.raises(GraphFileError, match=r"the code \w+… is not what its digest says"),
        open_file(path) as contents,
    ):
        contents.code(first)
    folder = tmp_path / "code"
    folder.mkdir()
    path = with_code(sound, tmp_path, {})
    for data, why in ((None, "is not there"), (b"second", "is not what its digest says")):
        if data is not None:
            (folder / first).write_bytes(data)
            (folder / first).chmod(0o600)
        with (
            pytest.raises(GraphFileError, match=why),
            open_file(path, folder) as contents,
        ):
            contents.code(first)
    (folder / first).write_bytes(b"first")
    with open_file(path, folder) as contents:
        assert contents.code(first) == b"first"
    (folder / first).chmod(0o622)
    with (
        pytest.raises(GraphFileError, match="other users may write to it"),
        open_file(path, folder) as contents,
    ):
        contents.code(first)


def test_a_file_of_another_compute_capability_says_so(
    sound: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = {"device": "NVIDIA B200", "compute_capability": [10, 0]}
    path = with_code(sound, tmp_path, {}, **name)
    takes = dataclasses.replace(HostDriver().capabilities, image_kinds=frozenset({"cubin", "host"}))
    monkeypatch.setattr(HostDriver, "capabilities", takes)
    with (
        Device(HostDriver(total_memory=MEMORY)) as device,
        pytest.raises(GraphFileError, match=r"saved on NVIDIA B200 .*10\.0\), and .*\(0\.0\)"),
    ):
        ost.graphfile.load(device, path)
