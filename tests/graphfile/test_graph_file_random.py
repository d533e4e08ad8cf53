"""Random graphs in files: equal to the originals on random inputs, in another process."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.driver.api import MemcpyNodeParams
from tests.graphfile import file_runner
from tests.graphfile.file_kernels import ONE, add, affine, choose, kernel, packed

pytestmark = pytest.mark.usefixtures("checks_here")

N = 6
Values = npt.NDArray[np.int32]


class Drawn:
    """A random graph: inputs, a constant, scratch that is written before it is read, outputs."""

    def __init__(self, device: Device, rng: random.Random) -> None:
        self.device = device
        self._rng = rng
        self.keep: list[ost.Buffer] = []
        arena = self._new(4 * N)
        self.inputs = {f"x{i}": self._new(N) for i in range(rng.randint(1, 3))}
        self.constants = {"w": self._new(N)}
        # An output may be alone, a part of one buffer with others, or state.
        self.outputs = {"y0": arena[:N], "y1": arena[2 * N : 3 * N], "y2": self._new(N)}
        if rng.random() < 0.5:
            self.outputs["x0"] = self.inputs["x0"]
        self.written: list[ost.Buffer] = []
        self.graph = ost.Graph.create(device)
        for _ in range(rng.randint(2, 14)):
            self._step(self.graph, 0)
        for buffer in self.outputs.values():
            self._write(self.graph, buffer)

    def _new(self, n: int) -> ost.Buffer:
        values = [self._rng.randrange(-1000, 1000) for _ in range(n)]
        buffer = self.device.array(values, np.int32)
        self.keep.append(buffer)
        return buffer

    def _source(self) -> ost.Buffer:
        return self._rng.choice([*self.inputs.values(), *self.constants.values(), *self.written])

    def _add(self, graph: ost.Graph, name: str, *args: Any) -> None:
        """In the order of a line, or beside others where nothing that was written is read."""
        nodes = graph.nodes()
        getattr(graph, name)(*args, after=nodes[-1:])

    def _write(self, graph: ost.Graph, target: ost.Buffer) -> None:
        """Writes all of a buffer, in one of several ways."""
        rng, source = self._rng, self._source()
        match rng.randrange(5):
            case 0:
                made = kernel(self.device, affine)
                numbers = rng.randrange(-3, 4), rng.randrange(100)
                self._add(graph, "add_kernel", made, ONE, target, source, *numbers, N)
            case 1:
                self._add(graph, "add_fill", target.view(dtype=np.uint8), rng.randrange(256))
            case 2 if source.address != target.address:
                self._add(graph, "add_copy", target, source)
            case 3 if source.address != target.address:
                half = MemcpyNodeParams(target.address, source.address, 8, N // 2, 1, 8, 8)
                graph.add(half, after=graph.nodes()[-1:], keep=[target, source])
            case _:
                self._add(graph, "add_fill", target.view(dtype=np.uint16), rng.randrange(1 << 16))
                self._accumulate(graph, source, target)

    def _accumulate(self, graph: ost.Graph, source: ost.Buffer, target: ost.Buffer) -> None:
        self._add(graph, "add_kernel", kernel(self.device, add), ONE, source, target, N)
        if self._rng.random() < 0.3:  # addresses inside a struct
            both = source.address.to_bytes(8, "little") + target.address.to_bytes(8, "little")
            made = kernel(self.device, packed)
            self._add(graph, "add_kernel", made, ONE, 1, both, self._rng.randrange(9))

    def _step(self, graph: ost.Graph, depth: int) -> None:
        rng = self._rng
        what = rng.randrange(8)
        if what == 0 and depth < 2:
            child = ost.Graph.create(self.device)
            for _ in range(rng.randint(1, 3)):
                self._step(child, 2)  # a child has no conditional nodes
            graph.add_child(child, after=graph.nodes()[-1:])
        elif what == 1 and depth == 0:
            handle = graph.condition(rng.randrange(2))
            self._add(graph, "add_kernel", kernel(self.device, choose), ONE, self._source(), handle)
            branch = graph.add_conditional("if", handle, size=2, after=graph.nodes()[-1:])
            before = list(self.written)
            for body in branch.bodies:
                for _ in range(rng.randint(1, 2)):
                    self._step(body, 1)
                self.written[:] = before  # what one branch writes, the other does not
        elif what == 2 and self.written:
            self._accumulate(graph, self._source(), rng.choice(self.written))
        else:
            target = self._new(N)
            self._write(graph, target)
            self.written.append(target)

    def values(self) -> dict[str, Values]:
        seed = self._rng.randrange(1 << 30)
        drawn = np.random.default_rng(seed)
        return {n: drawn.integers(-(10**6), 10**6, N, np.int32) for n in self.inputs}

    def run(self, stream: ost.Stream, values: dict[str, Values]) -> dict[str, Values]:
        for name, buffer in self.inputs.items():
            buffer.set(values[name], stream)
        with self.graph.instantiate() as run:
            run.launch(stream)
            return {name: buffer.to_numpy(stream) for name, buffer in self.outputs.items()}

    def save(self, path: Path, **options: Any) -> None:
        named = {"inputs": self.inputs, "outputs": self.outputs, "constants": self.constants}
        ost.graphfile.save(self.graph, path, **named, **options)


def draw(device: Device, seed: int) -> Drawn:
    for made in (add, affine, choose, packed):
        kernel(device, made)
    return Drawn(device, random.Random(seed))


def in_another_process(host_device: Device, folder: Path, seeds: range) -> None:
    stream = host_device.create_stream()
    expected = {}
    for seed in seeds:
        drawn = draw(host_device, seed)
        path = folder / f"{seed}.graph"
        if seed % 2:
            drawn.save(path, check=False)
        else:  # the same draw elsewhere is a second capture
            twin = draw(host_device, seed)
            memory = twin.inputs | twin.outputs | twin.constants
            drawn.save(path, check=False, twin=ost.graphfile.Twin(twin.graph, memory))
        values = drawn.values()
        np.savez(path.with_suffix(".in.npz"), **values)
        expected[seed] = drawn.run(stream, values)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, file_runner.__file__, str(folder), "host"]
    subprocess.run(command, env=environment, check=True)
    for seed in seeds:
        found = np.load(folder / f"{seed}.out.npz")
        for name, values in expected[seed].items():
            assert found[name].tolist() == values.tolist(), (seed, name)


def test_random_graphs_in_another_process(host_device: Device, tmp_path: Path) -> None:
    in_another_process(host_device, tmp_path, range(20))


@pytest.mark.slow
def test_many_random_graphs_in_another_process(host_device: Device, tmp_path: Path) -> None:
    in_another_process(host_device, tmp_path, range(1000, 2500))


@pytest.mark.parametrize("seed", range(4))
def test_random_graphs_pass_their_check(host_device: Device, tmp_path: Path, seed: int) -> None:
    drawn = draw(host_device, seed)
    drawn.save(tmp_path / "one.graph")
    stream = host_device.create_stream()
    loaded = ost.graphfile.load(host_device, tmp_path / "one.graph")
    for _ in range(3):
        values = drawn.values()
        wanted = drawn.run(stream, values)
        for name, buffer in loaded.inputs.items():
            buffer.set(values[name], stream)
        loaded.instantiate().launch(stream)
        for name, expected in wanted.items():
            assert loaded.outputs[name].to_numpy(stream).tolist() == expected.tolist(), name
