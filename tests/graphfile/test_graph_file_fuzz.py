"""Graph files that were damaged, or made to do harm: refused with a typed error, or harmless.

Two kinds of damage: bytes changed anywhere, which digests find, and manifests changed with new
digests written, as somebody would who wants them to be loaded.  Nothing of these is launched.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import random
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.driver.host.driver import HostDriver
from ostinato.errors import ContextPoisonedError, GraphFileError
from ostinato.graphfile.container import open_file
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


def manifest_of(data: bytes, folder: Path) -> dict[str, Any]:
    path = folder / "read.graph"
    path.write_bytes(data)
    with zipfile.ZipFile(path) as archive:
        found: dict[str, Any] = json.loads(archive.read("manifest.json"))
        return found


def signed(data: bytes, manifest: object, folder: Path) -> bytes:
    """The file with another manifest, and its digest."""
    source, path = folder / "from.graph", folder / "to.graph"
    source.write_bytes(data)
    raw = json.dumps(manifest).encode()
    new = {"manifest.json": raw, "manifest.sha256": hashlib.sha256(raw).hexdigest().encode()}
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(path, "w") as archive:
        for name in old.namelist():
            archive.writestr(name, new.get(name, old.read(name)))
    return path.read_bytes()


def outcome(device: Device, data: bytes, folder: Path) -> str:
    """ "loaded", or the error's text.  Any other exception leaves this function."""
    path = folder / "one.graph"
    path.write_bytes(data)
    path.chmod(0o600)
    try:
        loaded = ost.graphfile.load(device, path)
    except GraphFileError as error:
        return str(error)
    try:
        assert str(loaded)
        loaded.instantiate().close()
    except ost.OstinatoError as error:
        assert not isinstance(error, ContextPoisonedError)  # nothing ran
    loaded.close()
    return "loaded"


# ------------------------------------------------------------------------------ changes at random

VALUES: tuple[Any, ...] = (
    *(0, 1, -1, 7, 8, 255, 256, 1 << 20, 1 << 31, 1 << 40, 1 << 63, 1 << 64, 10**30),
    *(None, True, False, 0.5, "", "x", "moved", "kernel", "memcpy", "os:system", [], {}, [[]]),
    *("__import__('os')", "O", "<i4", "a:b", "antigravity", "tests.graphfile.file_kernels:add"),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The place of everything in a manifest."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if _list(value) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def _list(value: Any) -> bool:
    return isinstance(value, list)


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def change(manifest: Any, rng: random.Random) -> None:
    """One change at a random place."""
    every = list(places(manifest))
    path = rng.choice(every)
    holder, key = at(manifest, path[:-1]), path[-1]
    match rng.randrange(6):
        case 0:
            del holder[key]
        case 1:
            holder[key] = rng.choice(VALUES)
        case 2:
            holder[key] = copy.deepcopy(at(manifest, rng.choice(every)))  # from elsewhere
        case 3 if isinstance(holder, list):
            holder.insert(key, copy.deepcopy(holder[key]))
        case 4 if isinstance(holder[key], int):
            holder[key] += rng.choice((-8, -1, 1, 4, 8, 1 << 16))
        case _ if isinstance(holder, dict):
            holder[rng.choice(("node", "kind", "extra", "pointers", "inner"))] = rng.choice(VALUES)


def fuzz(data: bytes, folder: Path, count: int, seed: int) -> dict[str, int]:
    rng = random.Random(seed)
    outcomes = {"loaded": 0, "refused": 0}
    sound = manifest_of(data, folder)
    device = Device(HostDriver(total_memory=MEMORY))
    for _ in range(count):
        if rng.random() < 0.7:
            manifest = json.loads(json.dumps(sound))
            for _ in range(rng.choice((1, 1, 1, 2, 5))):
                change(manifest, rng)
            bad = signed(data, manifest, folder)
        else:
            bad = mangled(data, rng)
        found = outcome(device, bad, folder)
        outcomes["loaded" if found == "loaded" else "refused"] += 1
    free, total = device.memory_info()
    device.synchronize()  # also: the context is sound
    device.close()
    assert total == MEMORY and free > 0
    return outcomes


def mangled(data: bytes, rng: random.Random) -> bytes:
    """Bytes changed, cut out or put in."""
    raw = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        where = rng.randrange(len(raw))
        match rng.randrange(4):
            case 0:
                raw[where] ^= 1 << rng.randrange(8)
            case 1:
                del raw[where : where + rng.randrange(1, 64)]
            case 2:
                raw[where:where] = rng.randbytes(rng.randrange(1, 16))
            case _:
                del raw[where:]
        if not raw:
            break
    return bytes(raw)


def test_damaged_files_are_refused_or_harmless(sound: bytes, tmp_path: Path) -> None:
    outcomes = fuzz(sound, tmp_path, 150, seed=1)
    assert outcomes["refused"] > 75 and outcomes["loaded"] > 1, outcomes


@pytest.mark.slow
def test_ten_thousand_damaged_files(sound: bytes, tmp_path: Path) -> None:
    outcomes = fuzz(sound, tmp_path, 10_000, seed=2)
    assert outcomes["refused"] > 5_000, outcomes


def test_no_byte_of_a_file_can_change_what_it_does(sound: bytes, tmp_path: Path) -> None:
    """A changed byte is refused, or it is one of the zip's that mean nothing here."""
    wanted = manifest_of(sound, tmp_path)
    rng = random.Random(3)
    with Device(HostDriver(total_memory=MEMORY)) as device:
        for where in rng.sample(range(len(sound)), 150):
            raw = bytearray(sound)
            raw[where] ^= 1 << rng.randrange(8)
            if outcome(device, bytes(raw), tmp_path) == "loaded":
                assert manifest_of(bytes(raw), tmp_path) == wanted


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
OTHER_KERNEL = "has no kernel|takes other parameters|takes no|is not in the module|cannot|no kernel"
HOSTILE: dict[str, tuple[Any, str]] = {
    "a newer format": (put("version", 2), "format 2; this release reads 1"),
    "another format": (put("format", "zip"), "no graph file"),
    "an edge out of range": (add_edge(0, 99), "target: 99 is no whole number from 0 to"),
    "a cycle": (add_edge(1, 0), "close a cycle"),
    "an edge to itself": (add_edge(1, 1), "1 is joined to itself"),
    "an edge twice": (add_edge(0, 1), "joined twice"),
    "an edge of half": (more("graph/edges/source", 0), "another list has more or fewer"),
    "data of an edge that is not there": (
        more("graph/edges/data", [99, 0, 0, 0]),
        "there is no edge 99",
    ),
    "an edge of no type": (
        more("graph/edges/data", [0, 0, 0, 9]),
        "ports or a type that are not known",
    ),
    "a word outside its arguments": (pointer("place", 4096), "a word at 4096 is outside the arg"),
    "a word across two arguments": (pointer("place", 12), "a word at 12 is outside"),
    "two words at one place": (twice, "two words are at one place"),
    "a pointer out of its block": (pointer("into", 1 << 30), "points out of its block"),
    "a block that is not there": (pointer("block", 77), "block: 77 is no whole number from 0 to"),
    "a pointer of a kernel that is not there": (
        put(f"{WORDS}/kernel/-1", 77),
        "kernel: 77 is no whole number from 0 to",
    ),
    "pointers in another order": (
        lambda m: kernels(m)["pointers"]["kernel"].reverse(),
        "they are not in order",
    ),
    "a proof that is none": (pointer("proof", 9), "proof: 9 is no whole number from 0 to"),
    "a number below zero": (pointer("into", -1), "into: -1 is no whole number"),
    "a number that fits no word": (pointer("into", 1 << 64), "into: 18446744073709551616 is no"),
    "half a number": (pointer("place", 0.5), "place: 0.5 is"),
    "arguments that are too few": (put(f"{KERNELS}/size/0", 8), "the function takes more bytes"),
    "arguments without bytes": (
        lambda m: kernels(m).update(data=kernels(m)["data"][:-16]),
        "bytes, and .* belong here",
    ),
    "arguments of no digits": (
        lambda m: kernels(m).update(data="x" * len(kernels(m)["data"])),
        "are no hexadecimal digits",
    ),
    "a function that is not there": (
        put(f"{KERNELS}/function/0", 99),
        "function: 99 is no whole number from 0 to",
    ),
    "a condition of no kernel": (
        more(f"{KERNELS}/conditions", [99, 0, 0]),
        "there is no such kernel or condition",
    ),
    "a condition in the place of an address": (
        lambda m: kernels(m)["conditions"].append([0, kernels(m)["pointers"]["place"][0], 0]),
        "two words are at one place",
    ),
    "two names of one kernel": (put(f"{KERNELS}/names", [[0, "a"], [0, "b"]]), "a kernel has two"),
    "two nodes at one place": (
        lambda m: m["graph"]["nodes"][1].update(at=m["graph"]["nodes"][0]["at"]),
        "at: .* is no whole number",
    ),
    "a node behind the last": (put("graph/nodes/-1/at", 99), "at: 99 is no whole number"),
    "a block without bytes": (put("blocks/nbytes/0", 0), "block 0 has none"),
    "an alloc node of two blocks": (
        lambda m: m["blocks"]["alloc"].append([0, m["blocks"]["alloc"][0][1]]),
        "alloc nodes and the blocks|memory of an alloc node",
    ),
    "two buffers of one name": (
        lambda m: m["buffers"]["name"].__setitem__(1, m["buffers"]["name"][0]),
        "two have one name",
    ),
    "a buffer of half": (more("buffers/name", "z"), "more or fewer entries"),
    "a buffer that overlaps the end of its block": (
        put("buffers/into/0", 4),
        "8 bytes at 4 reach out of block",
    ),
    "more memory than there is": (put("blocks/nbytes/0", 1 << 40), "and .* are free"),
    "more nodes than a graph has": (put("graph/nodes", [{}] * 5), "is missing"),
    "graphs inside graphs": (deep, "33 deep"),
    "Python objects": (put("buffers/dtype/0", "O"), "no type of plain numbers"),
    "a huge shape": (put("buffers/shape/0", [1 << 40] * 30), "reach out"),
    "another kernel": (
        put("functions/0/target", "tests.graphfile.file_kernels:add"),
        OTHER_KERNEL,
    ),
    "a function that is no kernel": (
        put("functions/0/target", "os:system"),
        "os:system is no kernel of the host",
    ),
    "an expression": (put("functions/0/target", "os:system('true')"), "no place of a kernel"),
    "a signature of other parameters": (
        put("functions/0/signature", "all: bytes[100000]"),
        "signature: it does not say where the parameters are",
    ),
    "an address without effect": (
        put(f"{KERNELS}/unused", [[0, 12, 2]]),
        "2 bytes at 12 are no free bytes",
    ),
    "bytes without effect beyond the arguments": (
        put(f"{KERNELS}/unused", [[0, 0, 1], [0, 4000, 1]]),
        "1 bytes at 4000 are no free bytes",
    ),
    "bytes without effect of a kernel that is not there": (
        put(f"{KERNELS}/unused", [[99, 0, 1]]),
        "1 bytes at 0 are no free bytes of kernel 99",
    ),
    "what nothing is known of": (
        lambda m: last(m, {"name": "e", "kind": "empty", "unused": [[0, 1]]}),
        "'unused': this release knows no such entry",
    ),
    "code of another driver": (put("functions/0/kind", "cubin"), "does not run its code"),
    "a launch that is not there": (
        put(f"{KERNELS}/launch/0", 99),
        "launch: 99 is no whole number from 0 to",
    ),
    "a launch of no blocks": (put("launches/0/grid", [0, 1, 1]), "0 is no whole number from 1"),
    "a cluster of text": (put("launches/0/cluster", "2"), "cluster: '2' is no list of 3"),
    "a look that is none": (
        put("buffers/look/0", ["<i4", [-1], None]),
        "look: -1 is no whole number",
    ),
    "a type of a look that is code": (
        put("buffers/look/0", ["__import__('os')", [2], None]),
        "is no type of an array",
    ),
    "content of no buffer": (put("tensors", {"inputs/z": "0" * 64}), "'inputs/z' is of no buffer"),
    "content under another's digest": (
        lambda m: m["tensors"].update({"inputs/x": m["tensors"]["constants/w"]}),
        "the content of 'inputs/x' is not what its digest says",
    ),
    "content under no digest": (
        put("tensors", {"inputs/x": "../../secret"}),
        "is no SHA-256 digest",
    ),
    "an input without content": (
        lambda m: m["tensors"].pop("inputs/x"),
        "the content of 'inputs/x' is not in it",
    ),
    "a copy of more than its blocks have": (lambda m: last(m, COPY), "leave block"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_manifests_are_refused_with_the_reason(
    name: str, sound: bytes, tmp_path: Path
) -> None:
    harm, why = HOSTILE[name]
    manifest = manifest_of(sound, tmp_path)
    harm(manifest)
    path = tmp_path / "hostile.graph"
    path.write_bytes(signed(sound, manifest, tmp_path))
    path.chmod(0o600)
    with Device(HostDriver(total_memory=MEMORY)) as device:
        before = device.memory_info()
        with pytest.raises(GraphFileError, match=why) as caught:
            ost.graphfile.load(device, path)
        assert str(path) in str(caught.value)
        del caught
        device.synchronize()
        assert device.memory_info() == before  # nothing is left behind


def test_entries_that_do_not_belong_there(sound: bytes, tmp_path: Path) -> None:
    for name in ("../../evil", "code/short", "manifest.json"):
        path = tmp_path / "more.graph"
        path.write_bytes(sound)
        with zipfile.ZipFile(path, "a") as archive, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of zipfile, for the name that is there already
            archive.writestr(name, b"{}")
        path.chmod(0o600)
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
    manifest = manifest_of(path.read_bytes(), tmp_path)
    harm(kernels(manifest))
    path.write_bytes(signed(path.read_bytes(), manifest, tmp_path))
    path.chmod(0o600)
    with pytest.raises(GraphFileError, match=what):
        ost.graphfile.check(device, path)


def with_code(sound: bytes, folder: Path, code: dict[str, bytes], **machine: Any) -> Path:
    """A file whose first kernel is a cubin, with entries under code/."""
    manifest = manifest_of(sound, folder)
    manifest["machine"].update(machine)
    digest = hashlib.sha256(b"first").hexdigest()
    manifest["functions"][0].update(kind="cubin", digest=digest, target="")
    path = folder / "coded.graph"
    path.write_bytes(signed(sound, manifest, folder))
    with zipfile.ZipFile(path, "a") as archive:
        for name, data in code.items():
            archive.writestr(f"code/{name}", data)
    path.chmod(0o600)
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
