"""A step that runs eagerly, then as a captured graph, with sizes in buckets and a check."""

import numpy as np

import ostinato as ost
from examples.capture import SOURCE


def main() -> None:
    rows, width = 8, 256
    with ost.open_device() as device:
        stream = device.create_stream()
        add = device.modules.get_or_compile(SOURCE, "add")
        x = device.array(np.ones((rows, width), np.float32))
        total = device.zeros((rows, width), np.float32)
        graphs = ost.GraphCache(device, buckets=ost.PowersOfTwo(rows), budget="64 MiB")

        def accumulate(stream: ost.Stream, batch: int) -> None:
            ost.launch(stream, add, ost.LaunchConfig(batch, width), x, total, batch * width)

        step = ost.GraphedStep(
            accumulate,
            stream=stream,
            cache=graphs,
            slots=[
                ost.Slot("x", x, ost.Role.INPUT, size="batch"),
                ost.Slot("total", total, ost.Role.STATE, size="batch"),
            ],
            verify="first",
        )
        for batch in (3, 3, 4, 3, 7, 7):
            print(f"batch {batch}: {step(batch=batch)}")
        print("row 0:", total.to_numpy(stream)[0, 0])
        print(step.statistics())
        print(graphs.statistics())


if __name__ == "__main__":
    main()
