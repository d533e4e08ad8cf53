"""Graphs that CuPy captured: a raw kernel and elementwise functions, whose arrays are structs."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.errors import InputError
from tests.gpu.foreign import (
    Area,
    check_inventory,
    check_rebind,
    check_replay,
    check_showing,
    clear,
    kernels,
    library,
    pointers,
    read,
)

cupy = library("cupy")

pytestmark = pytest.mark.gpu
N = 1000

RAW = r"""
extern "C" __global__ void axpy(const float* x, float* y, float a, unsigned n) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] += a * x[i];
}
"""


def area(name: str, array: cupy.ndarray) -> Area:
    return Area(name, array.data.ptr, array.nbytes)


class Step:
    """y = (x + z) * 2, then y += 3 x by a raw kernel."""

    def __init__(self, seed: int = 7) -> None:
        self.rng = np.random.default_rng(seed)
        self.axpy = cupy.RawKernel(RAW, "axpy")
        self.x, self.z = self.random(), self.random()
        self.y = cupy.zeros(N, cupy.float32)
        self.stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.Device().synchronize()
        with self.stream:
            self.eager(self.x)  # compiles and loads
            self.stream.synchronize()
            self.stream.begin_capture(cupy.cuda.runtime.streamCaptureModeThreadLocal)
            self.eager(self.x)
            self.graph = self.stream.end_capture()

    def random(self) -> cupy.ndarray:
        return cupy.asarray(self.rng.standard_normal(N).astype(np.float32))

    def eager(self, x: cupy.ndarray) -> None:
        cupy.add(x, self.z, out=self.y)
        cupy.multiply(self.y, np.float32(2), out=self.y)
        self.axpy((-(-N // 128),), (128,), (x, self.y, np.float32(3), np.uint32(N)))

    def eager_bits(self, x: cupy.ndarray) -> bytes:
        with self.stream:
            self.eager(x)
        self.stream.synchronize()
        return self.y.get().tobytes()

    def replay(self) -> None:
        self.graph.launch(self.stream)
        self.stream.synchronize()


def adopted(device: Device, step: Step) -> ost.Graph:
    from ostinato.interop.cupy import adopt_graph

    return adopt_graph(device, step.graph)


def test_inventory(cuda_device: Device) -> None:
    step = Step()
    graph = adopted(cuda_device, step)
    check_inventory(graph, [area("x", step.x), area("y", step.y), area("z", step.z)])
    nodes = kernels(graph)
    assert len(nodes) == len(graph) == 3
    raw = nodes[2]
    assert raw.name == "axpy" and raw.kernel.config.grid == (8, 1, 1)
    assert [a.size for a in raw.arguments] == [8, 8, 4, 4]
    assert raw.arguments[2].raw == np.float32(3).tobytes()
    assert raw.arguments[3].raw == np.uint32(N).tobytes()
    # The elementwise kernels take structs: the pointer is a word inside.
    assert any(a.size > 8 and a.pointers for node in nodes[:2] for a in node.arguments)
    check_showing(graph)


def test_replay_is_the_owners_bit_by_bit(cuda_device: Device, stream: ost.Stream) -> None:
    step = Step()
    check_replay(cuda_device, stream, adopted(cuda_device, step), step.replay, [area("y", step.y)])


def test_rebind_is_eager_on_the_new_input(cuda_device: Device, stream: ost.Stream) -> None:
    step = Step()
    run = adopted(cuda_device, step).instantiate(upload=stream)
    fresh = step.random()
    output = area("y", step.y)
    check_rebind(cuda_device, stream, run, step.x, fresh, lambda: step.eager_bits(fresh), output)
    ours = cuda_device.array(fresh.get())
    report = run.rebind([(step.x, ours)])  # a buffer of ours in the place of theirs
    assert {word.node_index for word in report.words} == {0, 2}
    clear(cuda_device, output)
    run.launch(stream)
    assert read(cuda_device, output) == step.eager_bits(fresh)


def test_patch_by_index(cuda_device: Device, stream: ost.Stream) -> None:
    step = Step()
    run = adopted(cuda_device, step).instantiate(upload=stream)
    run.set(2, 2, 0.0)  # y += 0 x
    run.launch(stream)
    wanted = np.float32(2) * (step.x.get() + step.z.get())
    assert read(cuda_device, area("y", step.y)) == wanted.tobytes()
    run.set(2, 2, 3.0)
    run.launch(stream)
    assert read(cuda_device, area("y", step.y)) == step.eager_bits(step.x)
    with pytest.raises(InputError, match="4 bytes"):
        run.set(2, 2, b"\0" * 8)


def test_the_owner_lives_as_long_as_we_need_it(cuda_device: Device, stream: ost.Stream) -> None:
    step = Step()
    run = adopted(cuda_device, step).instantiate(upload=stream)
    wanted = step.eager_bits(step.x)
    clear(cuda_device, area("y", step.y))
    del step.graph
    gc.collect()
    assert len(run.graph) == 3  # the definition is still there to be read
    run.launch(stream)
    assert read(cuda_device, area("y", step.y)) == wanted


def test_cupys_work_in_our_capture(cuda_device: Device, stream: ost.Stream) -> None:
    from ostinato.interop.cupy import as_array, external_stream

    x, out = cuda_device.array(np.arange(N, dtype=np.float32)), cuda_device.zeros(N, np.float32)
    x_there, out_there = as_array(x), as_array(out)
    assert x_there.data.ptr == x.address
    with external_stream(stream):
        cupy.sqrt(x_there, out=out_there)
        stream.synchronize()
        wanted = out.to_numpy(stream)
        with ost.capture(stream) as capture:
            cupy.sqrt(x_there, out=out_there)
    ost.fill(stream, out, 0)
    assert {p.address for p in pointers(capture.graph)} >= {x.address, out.address}
    capture.graph.instantiate(upload=stream).launch(stream)
    np.testing.assert_array_equal(out.to_numpy(stream), wanted)


def test_streams_and_arrays_come_over(cuda_device: Device) -> None:
    theirs = cupy.cuda.Stream(non_blocking=True)
    ours = cuda_device.adopt_stream(theirs)
    assert ours.handle == theirs.ptr
    array = cupy.zeros(100, cupy.int32)
    cupy.cuda.Device().synchronize()
    ost.fill(ours, cuda_device.adopt_array(array), 7)
    ours.synchronize()
    assert (array.get() == 7).all()
    with pytest.raises(InputError, match="strided"):
        cuda_device.adopt_array(cupy.zeros((4, 4))[:, 1:])
