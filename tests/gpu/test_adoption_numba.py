"""A Numba kernel captured on our stream: its arrays are seven arguments each."""

from __future__ import annotations

import numpy as np
import pytest

import ostinato as ost
from ostinato.device import Device
from tests.gpu.foreign import BlendStep, library, mend_numba

mend_numba()
library("numba")
cuda = library("numba.cuda")

# Numba warns of grids too small to be fast, and these are.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
BLOCK = 128


@cuda.jit
def numba_blend(x, y, out, factor):
    i = cuda.grid(1)
    if i < out.size:
        out[i] = x[i] * factor + y[i]


class Step(BlendStep):
    def warm(self) -> None:
        from ostinato.interop.numba import external_stream

        self.theirs = external_stream(self.stream)
        self.work(self.x)
        self.stream.synchronize()

    def work(self, x: ost.Buffer) -> None:
        from ostinato.interop.numba import as_array

        x_there, y_there, out_there = (as_array(b) for b in (x, self.y, self.out))
        launch = numba_blend[-(-self.SIZE // BLOCK), BLOCK, self.theirs]
        launch(x_there, y_there, out_there, np.float32(3))
        launch(x_there, out_there, out_there, np.float32(0.5))


@pytest.fixture
def step(cuda_device: Device) -> Step:
    return Step(cuda_device)


def test_inventory(step: Step) -> None:
    for node in step.check_inventory():
        assert "numba_blend" in node.name
        assert node.kernel.config.grid == (40, 1, 1) and node.kernel.config.block == (128, 1, 1)


def test_replay_is_eager_bit_by_bit(step: Step) -> None:
    step.check_replay()


def test_rebind_is_eager_on_the_new_input(step: Step) -> None:
    step.check_rebind()


def test_numbas_streams_and_arrays_come_over(cuda_device: Device) -> None:
    theirs = cuda.stream()
    ours = cuda_device.adopt_stream(theirs)
    array = cuda.to_device(np.zeros(64, np.float32))
    ost.fill(ours, cuda_device.adopt_array(array), 2)
    ours.synchronize()
    assert (array.copy_to_host() == 2).all()
