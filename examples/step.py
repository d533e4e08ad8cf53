"""A step that runs eagerly, then as a captured graph, with sizes in buckets and a check.

Three rows run in the graph for four.  The fourth row is padding, and its state must not change: the
kernel reads the actual number of rows on the device (`sizes.on_device`).
"""

import numpy as np

import ostinato as ost


@ost.host_kernel("x: *const f32, total: *f32, rows: *const u32, width: u32")
def add_rows(launch, x, total, rows, width):
    used = int(rows[0]) * width
    total[:used] += x[:used]


SOURCE = ost.Source(
    cuda=r"""
    extern "C" __global__ void add_rows(const float* x, float* total, const unsigned* rows,
                                        unsigned width) {
        unsigned i = blockIdx.x * width + threadIdx.x;
        if (blockIdx.x < *rows && threadIdx.x < width) total[i] += x[i];
    }
    """,
    host=[add_rows],
)


def main() -> None:
    rows, width = 8, 256
    with ost.open_device() as device:
        stream = device.create_stream()
        kernel = device.kernel(SOURCE, "add_rows")
        x = device.ones((rows, width), np.float32)
        total = device.zeros((rows, width), np.float32)
        graphs = ost.GraphCache(device, buckets=ost.PowersOfTwo(rows), budget="64 MiB")

        def accumulate(stream: ost.Stream, sizes: ost.Sizes) -> None:
            config = ost.LaunchConfig(sizes.batch, width)
            ost.launch(stream, kernel, config, x, total, sizes.on_device("batch"), width)

        step = ost.GraphedStep(
            accumulate,
            stream=stream,
            cache=graphs,
            slots=[
                ost.Slot("x", x, "input", size="batch"),
                ost.Slot("total", total, "state", size="batch"),
            ],
            verify="first",
        )
        for batch in (3, 3, 4, 3, 7, 7):
            print(f"batch {batch}: {step(batch=batch)}")
        print("rows:", total.to_numpy(stream)[:, 0])
        print(step.statistics())
        print(graphs.statistics())


if __name__ == "__main__":
    main()
