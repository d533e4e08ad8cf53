"""A Numba kernel captured on our stream: its arrays are seven arguments each."""

from __future__ import annotations

import numpy as np
import pytest

import ostinato as ost
from ostinato.device import Device
from tests.gpu.foreign import (
    Area,
    check_inventory,
    check_rebind,
    check_showing,
    clear,
    kernels,
    library,
    read,
)

if not hasattr(np, "row_stack"):
    np.row_stack = np.vstack  # Numba's CUDA target still asks for it; NumPy 2.5 dropped it
library("numba")
cuda = library("numba.cuda")

# Numba warns of grids too small to be fast, and these are.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
N, BLOCK = 5000, 128


@cuda.jit
def numba_blend(x, y, out, factor):
    i = cuda.grid(1)
    if i < out.size:
        out[i] = x[i] * factor + y[i]


class Step:
    """out = 3 x + y, then out = x / 2 + out, on our stream."""

    def __init__(self, device: Device) -> None:
        from ostinato.interop.numba import as_array, external_stream

        self.device, self.stream = device, device.create_stream()
        self.rng = np.random.default_rng(7)
        self.x, self.y = self.random(), self.random()
        self.out = device.zeros(N, np.float32)
        self.as_array, self.theirs = as_array, external_stream(self.stream)
        self.work(self.x)  # compiles and loads
        self.stream.synchronize()
        with ost.capture(self.stream) as capture:
            self.work(self.x)
        self.graph = capture.graph

    def random(self) -> ost.Buffer:
        return self.device.array(self.rng.standard_normal(N).astype(np.float32))

    def work(self, x: ost.Buffer) -> None:
        x_there, y_there, out_there = (self.as_array(b) for b in (x, self.y, self.out))
        launch = numba_blend[-(-N // BLOCK), BLOCK, self.theirs]
        launch(x_there, y_there, out_there, np.float32(3))
        launch(x_there, out_there, out_there, np.float32(0.5))

    @property
    def output(self) -> Area:
        return Area("out", self.out.address, self.out.nbytes)

    def eager_bits(self, x: ost.Buffer) -> bytes:
        self.work(x)
        return read(self.device, self.output)


@pytest.fixture
def step(cuda_device: Device) -> Step:
    return Step(cuda_device)


def test_inventory(step: Step) -> None:
    areas = [Area("x", step.x.address, step.x.nbytes), Area("y", step.y.address, step.y.nbytes)]
    check_inventory(step.graph, [*areas, step.output])
    nodes = kernels(step.graph)
    assert len(nodes) == 2
    for node in nodes:
        assert "numba_blend" in node.name
        assert node.kernel.config.grid == (40, 1, 1) and node.kernel.config.block == (128, 1, 1)
    assert any(a.raw == np.float32(0.5).tobytes() for a in nodes[1].arguments)
    check_showing(step.graph)


def test_replay_is_eager_bit_by_bit(cuda_device: Device, step: Step) -> None:
    wanted = step.eager_bits(step.x)
    run = step.graph.instantiate(upload=step.stream)
    for _ in range(3):
        clear(cuda_device, step.output)
        run.launch(step.stream)
        assert read(cuda_device, step.output) == wanted


def test_rebind_is_eager_on_the_new_input(cuda_device: Device, step: Step) -> None:
    run = step.graph.instantiate(upload=step.stream)
    fresh = step.random()
    check_rebind(
        cuda_device,
        step.stream,
        run,
        step.x,
        fresh,
        lambda: step.eager_bits(fresh),
        step.output,
    )


def test_numbas_streams_and_arrays_come_over(cuda_device: Device) -> None:
    theirs = cuda.stream()
    ours = cuda_device.adopt_stream(theirs)
    array = cuda.to_device(np.zeros(64, np.float32))
    ost.fill(ours, cuda_device.adopt_array(array), 2)
    ours.synchronize()
    assert (array.copy_to_host() == 2).all()
