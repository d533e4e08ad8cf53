"""A Triton kernel captured on our stream: read, replayed, rebound, patched."""

# No `from __future__ import annotations`: Triton looks at the annotations of its kernels.

import numpy as np
import pytest

import ostinato as ost
from ostinato.device import Device
from tests.gpu.foreign import BlendStep, kernels, library, read

torch = library("torch")
triton = library("triton")
tl = library("triton.language")

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
BLOCK = 256


@triton.jit
def triton_blend(x, y, out, factor, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    a = tl.load(x + at, mask=inside)
    b = tl.load(y + at, mask=inside)
    tl.store(out + at, a * factor + b, mask=inside)


class Step(BlendStep):
    def warm(self) -> None:
        from ostinato.interop.triton import warm

        warm(self.stream, lambda: self.work(self.x))

    def using_stream(self):
        from ostinato.interop.triton import use_stream

        return use_stream(self.stream)

    def work(self, x: ost.Buffer) -> None:
        from ostinato.interop.triton import as_tensor

        x_there, y_there, out_there = (as_tensor(b) for b in (x, self.y, self.out))
        size, grid = self.SIZE, (triton.cdiv(self.SIZE, BLOCK),)
        triton_blend[grid](x_there, y_there, out_there, 3.0, size, BLOCK=BLOCK)
        triton_blend[grid](x_there, out_there, out_there, 0.5, size, BLOCK=BLOCK)


@pytest.fixture
def step(cuda_device: Device) -> Step:
    return Step(cuda_device)


def test_inventory(step: Step) -> None:
    nodes = step.check_inventory()
    assert [node.name for node in nodes] == ["triton_blend"] * 2
    assert all(node.kernel.config.grid == (20, 1, 1) for node in nodes)
    assert any(a.raw == np.int32(step.SIZE).tobytes() for a in nodes[1].arguments)


def test_replay_is_eager_bit_by_bit(step: Step) -> None:
    step.check_replay()


def test_rebind_is_eager_on_the_new_input(step: Step) -> None:
    step.check_rebind()


def test_patch_by_index(cuda_device: Device, step: Step) -> None:
    run = step.graph.instantiate(upload=step.stream)
    first = kernels(step.graph)[0]
    (factor,) = [a.index for a in first.arguments if a.raw == np.float32(3).tobytes()]
    run.set(0, factor, 0.0)
    run.launch(step.stream)
    x, y = step.x.to_numpy(step.stream), step.y.to_numpy(step.stream)
    np.testing.assert_allclose(step.out.to_numpy(step.stream), 0.5 * x + y, rtol=1e-6)
    run.set(0, factor, 3.0)
    run.launch(step.stream)
    assert read(cuda_device, step.output) == step.eager_bits(step.x)
