"""A Triton kernel captured on our stream: read, replayed, rebound, patched."""

# No `from __future__ import annotations`: Triton looks at the annotations of its kernels.

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

torch = library("torch")
triton = library("triton")
tl = library("triton.language")

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
N, BLOCK = 5000, 256


@triton.jit
def triton_blend(x, y, out, factor, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    a = tl.load(x + at, mask=inside)
    b = tl.load(y + at, mask=inside)
    tl.store(out + at, a * factor + b, mask=inside)


class Step:
    """out = 3 x + y, twice over, on our stream."""

    def __init__(self, device: Device) -> None:
        from ostinato.interop.triton import as_tensor, use_stream, warm

        self.device, self.stream = device, device.create_stream()
        self.rng = np.random.default_rng(7)
        self.x, self.y = self.random(), self.random()
        self.out = device.zeros(N, np.float32)
        self.as_tensor, self.use_stream = as_tensor, use_stream
        warm(self.stream, lambda: self.work(self.x))
        with use_stream(self.stream), ost.capture(self.stream) as capture:
            self.work(self.x)
        self.graph = capture.graph

    def random(self) -> ost.Buffer:
        return self.device.array(self.rng.standard_normal(N).astype(np.float32))

    def work(self, x: ost.Buffer) -> None:
        x_there, y_there, out_there = (self.as_tensor(b) for b in (x, self.y, self.out))
        grid = (triton.cdiv(N, BLOCK),)
        triton_blend[grid](x_there, y_there, out_there, 3.0, N, BLOCK=BLOCK)
        triton_blend[grid](x_there, out_there, out_there, 0.5, N, BLOCK=BLOCK)

    @property
    def output(self) -> Area:
        return Area("out", self.out.address, self.out.nbytes)

    def eager_bits(self, x: ost.Buffer) -> bytes:
        with self.use_stream(self.stream):
            self.work(x)
        return read(self.device, self.output)


@pytest.fixture
def step(cuda_device: Device) -> Step:
    return Step(cuda_device)


def test_inventory(step: Step) -> None:
    areas = [Area("x", step.x.address, step.x.nbytes), Area("y", step.y.address, step.y.nbytes)]
    check_inventory(step.graph, [*areas, step.output])
    nodes = kernels(step.graph)
    assert [node.name for node in nodes] == ["triton_blend"] * 2
    assert all(node.kernel.config.grid == (20, 1, 1) for node in nodes)
    assert any(a.raw == np.float32(0.5).tobytes() for a in nodes[1].arguments)
    assert any(a.raw == np.int32(N).tobytes() for a in nodes[1].arguments)
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


def test_patch_by_index(cuda_device: Device, step: Step) -> None:
    run = step.graph.instantiate(upload=step.stream)
    first = kernels(step.graph)[0]
    (factor,) = [a.index for a in first.arguments if a.raw == np.float32(3).tobytes()]
    run.patch(0, factor, 0.0)
    run.launch(step.stream)
    x, y = step.x.to_numpy(step.stream), step.y.to_numpy(step.stream)
    np.testing.assert_allclose(step.out.to_numpy(step.stream), 0.5 * x + y, rtol=1e-6)
    run.patch(0, factor, 3.0)
    run.launch(step.stream)
    assert read(cuda_device, step.output) == step.eager_bits(step.x)
