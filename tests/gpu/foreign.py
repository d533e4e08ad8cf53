"""What the tests of other libraries' graphs share: import one, read memory, the checks.

Other libraries' work runs on their streams: `device.synchronize()` stands wherever one library's
work is to be seen by another, so that these tests are about graphs and not about streams.
"""

from __future__ import annotations

import abc
import contextlib
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.graph.node import Pointer


def mend_numba() -> None:
    """Numba's CUDA target asks for a name that NumPy 2.5 dropped."""
    if not hasattr(np, "row_stack"):
        np.row_stack = np.vstack


def library(name: str) -> ModuleType:
    """Another library, or the file is skipped without it.  Its warnings are its own affair."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module: ModuleType = pytest.importorskip(name)
    return module


@contextlib.contextmanager
def making(graphed: Callable[..., Any], device: Device) -> Iterator[Callable[..., Any]]:
    """Makes functions by a library's `graphed` that end with the block, once their work is done."""
    made: list[Any] = []

    def build(function: Any, **options: Any) -> Any:
        made.append(graphed(function, device=device, **options))
        return made[-1]

    yield build
    device.synchronize()
    for one in made:
        one.close()


@dataclass(frozen=True)
class Area:
    """Device memory with a name, whoever owns it."""

    name: str
    address: int
    nbytes: int

    @property
    def range(self) -> ost.MemoryRange:
        return ost.MemoryRange(self.address, self.nbytes)


def read(device: Device, area: Area) -> bytes:
    """The bytes there, after all work of the device."""
    device.synchronize()
    stream = device.create_stream()
    out = bytearray(area.nbytes)
    device.driver.memcpy_to_host(memoryview(out), area.address, stream.handle)
    stream.close()
    return bytes(out)


def clear(device: Device, area: Area, value: int = 0xEE) -> None:
    """Overwrites the bytes there."""
    device.synchronize()
    stream = device.create_stream()
    device.driver.memset(area.address, value, 1, area.nbytes, stream.handle)
    stream.synchronize()
    stream.close()


def kernels(graph: ost.Graph) -> list[ost.Node]:
    """Its kernel nodes."""
    return [node for node in graph.nodes() if node.kind is ost.NodeKind.KERNEL]


def pointers(graph: ost.Graph) -> list[Pointer]:
    """Every word of every kernel's arguments that points into memory."""
    return [p for node in kernels(graph) for a in node.arguments for p in a.pointers]


def check_inventory(graph: ost.Graph, areas: Sequence[Area]) -> None:
    """Names, sizes and arguments are there; every area is pointed at, buffer and offset known."""
    found = kernels(graph)
    assert found
    for node in found:
        config = node.kernel.config
        assert node.name and min(*config.grid, *config.block) >= 1
        assert node.arguments, f"{node.name}: no arguments were read"
        data = node.kernel.arguments.data
        for argument in node.arguments:
            assert argument.raw == data[argument.offset : argument.offset + argument.size]
    seen = {p.address: p for p in pointers(graph)}
    for area in areas:
        assert area.address in seen, f"no argument points at {area.name}"
        pointer = seen[area.address]
        assert pointer.allocation is not None and pointer.into is not None
        assert pointer.allocation.holds(area.address, area.nbytes)
        assert pointer.allocation.address + pointer.into == area.address


def check_showing(graph: ost.Graph) -> None:
    """It can be shown in every form, and differs neither from itself nor from a copy."""
    for name in {node.name for node in kernels(graph)}:
        assert name
    assert str(graph).count("\n") >= len(graph)
    json.dumps(graph.to_dict())
    assert graph.to_svg().lstrip().startswith("<")
    assert graph.diff(graph).empty
    with graph.clone() as copy:
        difference = graph.diff(copy)
        assert difference.empty, str(difference)


def check_replay(
    device: Device,
    stream: ost.Stream,
    graph: ost.Graph,
    owner_replays: Callable[[], object],
    outputs: Sequence[Area],
) -> ost.GraphExec:
    """Our replay leaves the bits that the owner's leaves; the executable, to go on with."""
    device.synchronize()
    owner_replays()
    wanted = [read(device, area) for area in outputs]
    run = graph.instantiate(upload=stream)
    for _ in range(3):
        for area in outputs:
            clear(device, area)
        run.launch(stream)
        for area, bits in zip(outputs, wanted, strict=True):
            assert read(device, area) == bits, f"{area.name} differs from the owner's replay"
    return run


def check_rebind(
    device: Device,
    stream: ost.Stream,
    run: ost.GraphExec,
    old: object,
    new: object,
    eager: Callable[[], bytes],
    output: Area,
) -> None:
    """After `rebind` the replay gives what eager work on the new input gives; and back again."""
    device.synchronize()
    run.launch(stream)
    first = read(device, output)
    wanted = eager()
    clear(device, output)
    report = run.rebind([(old, new)])
    assert report.words and report.nodes >= 1, str(report)
    run.launch(stream)
    assert read(device, output) == wanted, "the rebound replay differs from the eager run"
    assert wanted != first
    clear(device, output)
    assert len(run.rebind([(new, old)]).words) == len(report.words)
    run.launch(stream)
    assert read(device, output) == first


# -------------------------------------------------------- one library's kernel, on a stream of ours


class BlendStep(abc.ABC):
    """`out = 3 x + y`, then `out = x / 2 + out`: another library's kernel, captured on our stream.

    A subclass says how the library launches it (`work`), and what has to come before a capture.
    """

    SIZE = 5000

    def __init__(self, device: Device) -> None:
        self.device, self.stream = device, device.create_stream()
        self.rng = np.random.default_rng(7)
        self.x, self.y = self.random(), self.random()
        self.out = device.zeros(self.SIZE, np.float32)
        self.warm()
        with self.using_stream(), ost.capture(self.stream) as capture:
            self.work(self.x)
        self.graph = capture.graph

    @abc.abstractmethod
    def work(self, x: ost.Buffer) -> None:
        """Both launches, with `x` in the place of the first input."""

    @abc.abstractmethod
    def warm(self) -> None:
        """Compiles and loads, by running `work` once."""

    def using_stream(self) -> contextlib.AbstractContextManager[object]:
        """In which the library launches on our stream, if it must be told beforehand."""
        return contextlib.nullcontext()

    def random(self) -> ost.Buffer:
        return self.device.array(self.rng.standard_normal(self.SIZE).astype(np.float32))

    @property
    def output(self) -> Area:
        return Area("out", self.out.address, self.out.nbytes)

    def eager_bits(self, x: ost.Buffer) -> bytes:
        with self.using_stream():
            self.work(x)
        return read(self.device, self.output)

    # --- what holds for each library
    def check_inventory(self) -> list[ost.Node]:
        """The two kernel nodes, once all buffers were found in their arguments."""
        areas = [Area(n, b.address, b.nbytes) for n, b in (("x", self.x), ("y", self.y))]
        check_inventory(self.graph, [*areas, self.output])
        check_showing(self.graph)
        nodes = kernels(self.graph)
        assert len(nodes) == 2
        assert any(a.raw == np.float32(0.5).tobytes() for a in nodes[1].arguments)
        return nodes

    def check_replay(self) -> None:
        """A replay leaves what an eager run leaves, bit by bit."""
        wanted = self.eager_bits(self.x)
        run = self.graph.instantiate(upload=self.stream)
        for _ in range(3):
            clear(self.device, self.output)
            run.launch(self.stream)
            assert read(self.device, self.output) == wanted

    def check_rebind(self) -> None:
        """Rebound to a new input, it leaves what an eager run on that leaves."""
        run, fresh = self.graph.instantiate(upload=self.stream), self.random()
        check_rebind(
            self.device,
            self.stream,
            run,
            self.x,
            fresh,
            lambda: self.eager_bits(fresh),
            self.output,
        )
