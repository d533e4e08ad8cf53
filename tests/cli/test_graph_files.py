"""`ostinato graph`: files are shown, run, checked and made from the command line."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import numpy as np
import pytest

import ostinato as ost
from tests.cli.commands import here, refused
from tests.cli.terminal import Terminal
from tests.graphfile.file_kernels import ONE, add, affine, kernel, pick
from tests.processes import python

pytestmark = pytest.mark.usefixtures("checks_here")


@pytest.fixture
def path(host_device: ost.Device, tmp_path: Path) -> Path:
    device, stream = host_device, host_device.create_stream()
    x, w, y = (device.array([n] * 3, "i4") for n in (1, 10, 0))
    first, second = kernel(device, affine), kernel(device, add)
    with ost.capture(stream) as under_way:
        ost.launch(stream, first, ONE, y, x, 2, 0, 3)
        ost.launch(stream, second, ONE, w, y, 3)
    made = tmp_path / "one.graph"
    ost.graphfile.save(
        under_way.graph,
        made,
        inputs={"x": x},
        outputs={"y": y},
        constants={"w": w},
        keeping="by name",
    )
    return made


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    from safetensors.numpy import save_file

    made = tmp_path / "w.safetensors"
    save_file({"w": np.array([10, 10, 10], np.int32)}, made)
    return made


def test_show_says_what_a_file_holds(path: Path) -> None:
    answer = here("graph", "show", str(path))
    assert answer.status == 0, answer.err
    for words in (
        "passed its check",
        "addresses: 4 by signatures",
        "kernel affine: tests.graphfile.file_kernels:affine",
        "2 kernel",
        "1  add  grid 1 block 1",
        "after 0",
    ):
        assert words in answer.out, (words, answer.out)
    assert re.search(r"^constant w: <i4\[3\], block \d, given by name$", answer.out, re.M)
    data = json.loads(here("graph", "show", str(path), "--json").out)
    assert data["format"] == "ostinato.graph" and len(data["graph"]["kernels"]["size"]) == 2


def test_diff_shows_two_files_side_by_side(host_device: ost.Device, tmp_path: Path) -> None:
    """Each is of buffers of its own, and has memory without a name and a body."""
    paths = []
    for name, factor, more in (("a", 2, 0), ("same", 2, 0), ("b", 5, 1)):
        device = host_device
        x, y, z = (device.array([n] * 3, "i4") for n in (1, 0, 0))
        first, graph = kernel(device, affine), ost.Graph.create(device)
        inner = ost.Graph.create(device)
        inner.add_kernel(first, ONE, z, y, factor, 0, 3)
        last = graph.add_kernel(first, ONE, y, x, 2, 0, 3)
        last = graph.add_child(inner, after=[last])
        for _ in range(more):
            last = graph.add_copy(x, z, after=[last])
        paths.append(str(tmp_path / f"{name}.graph"))
        out = {"z": z} | ({"x": x} if more else {})
        ost.graphfile.save(graph, paths[-1], inputs={"x": x}, outputs=out, check=False)
    one, same, other = paths
    answer = here("graph", "diff", one, same)
    assert (answer.status, answer.out.strip()) == (0, "no difference")
    answer = here("graph", "diff", one, other)
    assert answer.status == 1
    lines = [re.split(r" *│ *", line[2:]) for line in answer.out.rstrip().splitlines()]
    assert ["1.child.0  kernel affine", "1.child.0  kernel affine"] in lines, answer.out
    assert ["   m: 2", "m: 5"] in lines, answer.out
    for words in ("2  memcpy", "x ← z, 12 B", "edge 1 → 2"):
        assert ["", words] in lines, answer.out
    found = json.loads(here("graph", "diff", one, other, "--json").out)
    assert [len(found[key]) for key in ("added", "removed", "changed")] == [1, 0, 1]


def test_run_takes_inputs_and_gives_outputs(path: Path, weights: Path, tmp_path: Path) -> None:
    given, found = tmp_path / "in.npz", tmp_path / "out.npz"
    np.savez(given, x=np.array([1, 2, 3], np.int32))
    files = ("--constants", str(weights), "--inputs", str(given), "--outputs", str(found))
    answer = here("graph", "run", str(path), *files, "--times", "3")
    assert answer.status == 0, answer.err
    assert "3 launches" in answer.out and "y: [12 14 16]" in answer.out
    assert np.load(found)["y"].tolist() == [12, 14, 16]
    np.savez(given, z=np.zeros(1))
    refused(here("graph", "run", str(path), *files), "the graph has x")
    for wrong in (np.zeros(5, np.int32), np.array(["a", "b", "c"])):
        np.savez(given, x=wrong)
        refused(here("graph", "run", str(path), *files), "Invalid value for --inputs: x:")


def test_autopsy_replays_a_file_and_names_the_node_that_fails(
    host_device: ost.Device, tmp_path: Path
) -> None:
    device, stream = host_device, host_device.create_stream()
    x, at, y = (device.array([n] * 3, "i4") for n in (7, 0, 0))
    first, second, third = (kernel(device, each) for each in (affine, pick, add))
    with ost.capture(stream) as under_way:
        ost.launch(stream, first, ONE, y, at, 1, 0, 3)
        ost.launch(stream, second, ONE, x, at, y, 3)
        ost.launch(stream, third, ONE, x, y, 3)
    path, given = tmp_path / "one.graph", tmp_path / "in.npz"
    ost.graphfile.save(under_way.graph, path, inputs={"x": x, "at": at}, outputs={"y": y})
    command = ("autopsy", str(path), "--device", "host", "--inputs", str(given))
    np.savez(given, at=np.array([0, 1, 2], np.int32))
    answer = here(*command)
    assert answer.status == 0 and "no node failed" in answer.out, answer.err
    np.savez(given, at=np.array([0, 1, 99], np.int32))
    answer = here(*command)
    assert answer.status == 0, answer.err
    assert "node 1 (pick), kernel, grid 1, block 1" in answer.out
    assert "finished: node 0" in answer.out and "waiting        2  kernel       add" in answer.out
    (replay,) = json.loads(here(*command, "--json").out)["replays"]
    assert [node["state"] for node in replay["nodes"]] == ["finished", "running", "waiting"]


def test_damaged_inputs_are_an_option_that_is_wrong(
    path: Path, weights: Path, tmp_path: Path
) -> None:
    file = tmp_path / "in.npz"
    np.savez_compressed(file, x=np.arange(3, dtype=np.int32))
    sound = file.read_bytes()
    middle = sound.index(b"x.npy") + 60
    flipped = bytearray(sound)
    flipped[middle] ^= 0xFF
    single = io.BytesIO()
    np.save(single, np.arange(3, dtype=np.int32))
    for content in (b"", b"PK\x03\x04", sound[:-30], bytes(flipped), single.getvalue()):
        file.write_bytes(content)
        options = ("--constants", str(weights), "--inputs", str(file))
        refused(here("graph", "run", str(path), *options), f"Invalid value for --inputs: {file}: ")
    file.write_text("text")
    refused(here("graph", "run", str(path), *options), f"{file}: it is no .npz file")


def test_names_of_a_file_do_not_command_a_terminal(host_device: ost.Device, tmp_path: Path) -> None:
    """Names in a file are its maker's, and `file` and `allow_pickle` are arguments of savez."""
    device, stream = host_device, host_device.create_stream()
    names = ("file", "allow_pickle", "\x1b]0;title\x07")
    named = {name: device.array([n] * 3, "i4") for n, name in enumerate(names)}
    x, run = device.array([1] * 3, "i4"), kernel(device, add)
    with ost.capture(stream) as under_way:
        for buffer in named.values():
            ost.launch(stream, run, ONE, x, buffer, 3)
    path, found = tmp_path / "a\x1b[2Jb.graph", tmp_path / "out.npz"
    ost.graphfile.save(under_way.graph, path, inputs={"x": x, **named}, outputs={"x": x, **named})
    for command in (("show",), ("run", "--outputs", str(found)), ("check",)):
        with Terminal("graph", *command, str(path)) as terminal:
            assert terminal.end() == 0, terminal.said
            assert "\x1b" not in terminal.said and "\x07" not in terminal.said
    with Terminal("graph", "show", f"{path}2") as terminal:
        assert terminal.end() == 1
        assert "a\N{SYMBOL FOR ESCAPE}[2Jb.graph2: there is no such file" in terminal.said
    loaded = np.load(found)
    assert set(loaded.files) == {"x", *names} and loaded["file"].tolist() == [0, 0, 0]
    assert here("graph", "run", str(path), "--inputs", str(found)).status == 0


def test_check_compares_with_the_stored_results(path: Path, weights: Path) -> None:
    answer = here("graph", "check", str(path), "--constants", str(weights))
    assert answer.status == 0 and "bit by bit" in answer.out, answer.err
    answer = here("graph", "check", str(path))
    assert answer.status == 1 and "takes the constant 'w'" in answer.err
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert here("graph", "check", str(path)).status == 1


def test_save_says_that_it_needs_a_gpu_before_it_fetches_a_model(tmp_path: Path) -> None:
    path = tmp_path / "step.graph"
    answer = here("graph", "save", str(path), "--model", "no-such-model")
    assert answer.status == 1 and not path.exists()
    assert "graph save needs a GPU" in answer.err and "no-such-model" not in answer.err


def test_the_base_install_is_enough_for_what_needs_no_model(path: Path, weights: Path) -> None:
    """Every other command says which extra it needs, and what to install."""
    program = (
        "import sys\n"
        "extras = ('gguf', 'safetensors', 'tokenizers', 'jinja2')\n"
        "extras += ('starlette', 'uvicorn', 'h11', 'prometheus_client')\n"
        "sys.modules.update(dict.fromkeys(extras))  # an import of None fails\n"
        "from ostinato.cli.main import run\n"
        "def ended(status, *words):\n"
        "    print('>', *words, file=sys.stderr)\n"
        "    assert run(words) == status, words\n"
        f"file, weights = {str(path)!r}, {str(weights)!r}\n"
        "for command in ('generate', 'chat', 'serve', 'inspect', 'bench', 'tune', 'model',\n"
        "                'cache', 'graph', 'doctor'):\n"
        "    ended(0, command, '--help')\n"
        "for command in ('--help', '--version', 'doctor', 'doctor --json', 'cache list',\n"
        "                'cache clear', 'cache prune --max-mib 1', 'model list'):\n"
        "    ended(0, *command.split())\n"
        "ended(0, 'graph', 'show', file)\n"
        "ended(0, 'graph', 'run', file, '--constants', weights)\n"
        "for command in ('generate x', 'chat', 'serve', 'inspect', 'bench --shape tiny',\n"
        "                'tune', 'graph save x.graph', 'model show smollm2-135m'):\n"
        "    ended(1, *command.split())\n"
    )
    environment = {"OSTINATO_DEVICE": "host", "OSTINATO_CACHE_DIR": str(path.parent / "cache")}
    done = python("-c", program, **environment)
    assert done.returncode == 0, done.stderr
    said = dict(part.split("\n", 1) for part in done.stderr.split("> ")[1:])
    for command in ("generate x", "chat", "inspect", "bench --shape tiny", "tune"):
        name = command.split()[0]
        words = (
            f"error: `ostinato {name}` needs gguf, safetensors, tokenizers, jinja2, not installed"
        )
        assert words in said[command], said[command]
        assert "pip install 'ostinato[llm]'" in said[command]
    assert "`ostinato graph save` needs gguf" in said["graph save x.graph"]
    assert "`ostinato model show` needs gguf" in said["model show smollm2-135m"]
    assert "pip install 'ostinato[llm,serve]'" in said["serve"]
