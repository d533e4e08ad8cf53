"""Captures two kernels once, replays them, prints the graph, and points it at another buffer."""

import numpy as np

import ostinato as ost

CUDA = r"""
extern "C" __global__ void scale(float* x, float factor, unsigned n) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] *= factor;
}
extern "C" __global__ void add(const float* x, float* y, unsigned n) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] += x[i];
}
"""


# The same kernels for machines without a GPU.  Signatures state which memory is read and written.
@ost.host_kernel("x: *f32, factor: f32, n: u32")
def scale(launch, x, factor, n):
    x[:n] *= np.float32(factor)


@ost.host_kernel("x: *const f32, y: *f32, n: u32")
def add(launch, x, y, n):
    y[:n] += x[:n]


SOURCE = ost.Source(cuda=CUDA, host=[scale, add], name="example")


def main() -> None:
    n = 1024
    shape = ost.LaunchConfig(grid=n // 256, block=256)
    with ost.open_device() as device:
        stream = device.create_stream()
        scale_kernel = device.kernel(SOURCE, "scale")
        add_kernel = device.kernel(SOURCE, "add")
        x = device.ones(n, np.float32)
        y = device.zeros(n, np.float32)

        with ost.capture(stream) as capture:  # nothing runs
            ost.launch(stream, scale_kernel, shape, x, 2.0, n)
            ost.launch(stream, add_kernel, shape, x, y, n)
        print(capture.graph)

        run = capture.graph.instantiate(upload=stream)
        for _ in range(3):
            run.launch(stream)
        print("y after three replays:", y.to_numpy(stream)[0])  # 2 + 4 + 8

        other = device.full(n, 10, np.float32)
        report = run.rebind({x: other})
        print(f"{len(report.words)} words in {report.nodes} nodes now point to the other buffer")
        run.launch(stream)
        print("y after one more:", y.to_numpy(stream)[0])  # 14 + 20

        run.set(0, "factor", 0.5)
        run.launch(stream)
        print("y after a change:", y.to_numpy(stream)[0])  # 34 + 10


if __name__ == "__main__":
    main()
