"""The whole library on one page: read this after the first example.

A kernel, its capture, its replay, a change, and a step that does all of it by itself.  Every test
runs on both drivers.
"""

from __future__ import annotations

import numpy as np

import ostinato as ost
from ostinato.device import Device


@ost.host_kernel("x: *f32, n: u32")
def scale(launch, x, n):
    x[:n] *= np.float32(2)


@ost.host_kernel("x: *f32, n: *const u32")
def scale_first(launch, x, n):
    x[: n[0]] *= np.float32(2)


SOURCE = ost.Source(
    cuda=r"""
    extern "C" __global__ void scale(float* x, unsigned n) {
        unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) x[i] *= 2.0f;
    }
    extern "C" __global__ void scale_first(float* x, const unsigned* n) {
        unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < *n) x[i] *= 2.0f;
    }
    """,
    host=[scale, scale_first],
    name="tiny",
)
EIGHT = ost.LaunchConfig(grid=1, block=8)


def test_capture_runs_nothing_and_a_replay_runs_it_all(device: Device) -> None:
    stream = device.create_stream()
    double = device.modules.get_or_compile(SOURCE, "scale")
    x = device.array(np.ones(8, np.float32))

    with ost.capture(stream) as capture:
        ost.launch(stream, double, EIGHT, x, 8)
        ost.launch(stream, double, EIGHT, x, 8)
    assert (x.to_numpy(stream) == 1).all()  # captured, not run

    run = capture.graph.instantiate(upload=stream)
    run.launch(stream)
    assert (x.to_numpy(stream) == 4).all()


def test_a_graph_can_be_read_and_changed(device: Device) -> None:
    stream = device.create_stream()
    double = device.modules.get_or_compile(SOURCE, "scale")
    x, y = device.array(np.ones(8, np.float32)), device.array(np.ones(8, np.float32))
    graph = ost.capture_function(stream, lambda: ost.launch(stream, double, EIGHT, x, 8))

    (node,) = graph.nodes()
    assert (node.name, node.kernel.config.block) == ("scale", (8, 1, 1))
    assert node.arguments[1].value == 8
    assert "scale" in str(graph)

    run = graph.instantiate()
    run.rebind({x: y})  # every pointer into x now points into y
    run.set(node, "n", 4)  # and one number changes
    run.launch(stream)
    assert x.to_numpy(stream).tolist() == [1] * 8
    assert y.to_numpy(stream).tolist() == [2] * 4 + [1] * 4


def test_a_step_captures_itself(device: Device) -> None:
    stream = device.create_stream()
    first = device.modules.get_or_compile(SOURCE, "scale_first")
    x = device.array(np.ones(8, np.float32))
    graphs = ost.GraphCache(device, buckets=ost.PowersOfTwo(8))

    def work(stream: ost.Stream, sizes: ost.Sizes) -> None:
        # sizes.n is 7 eagerly, and 8, its bucket, in the graph
        ost.launch(stream, first, EIGHT, x, sizes.on_device("n"))  # 7, on the device

    step = ost.GraphedStep(work, stream=stream, cache=graphs)
    actions = [step(n=7).action.value for _ in range(3)]
    assert actions == ["eager", "build", "replay"]
    assert x.to_numpy(stream).tolist() == [8] * 7 + [1]
    assert step.statistics().replays == 2
