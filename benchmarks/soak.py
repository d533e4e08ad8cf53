"""A million replays with patches in between, then ten thousand graphs made and destroyed.

Lower bound: a replay of one tiny kernel costs the CPU some 2 µs from C, and the GPU no less, so a
million take at least 2 s; making a graph of a few nodes takes the driver some 50 µs.

  replays  One thread replays a counting kernel.  Between replays its number, and the pointer to one
           of two counters, are patched.  The final counts are known, so a replay that is lost,
           doubled, or run with an old argument is detected.
  rounds   Two threads, each on a stream of its own, capture, instantiate, launch, and drop a graph
           over and over, each with a counter of its own.

Memory is read at ten points of each part, on the device and in the process (resident set), after a
part's first tenth, which warms pools up.  Memory is flat if from there to the end the device loses
at most 4 MiB, and the process grows by at most 16 MiB.  At the end no closed object may be left
that is not destroyed.

    python -m benchmarks.soak [--out DIR] [--device cuda:0|host] [--quick]

Exits with 1 if memory is not flat.  The last line is one JSON object.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import ostinato as ost
from benchmarks import common
from benchmarks.common import SOURCE

REPLAYS = 1_000_000
ROUNDS = 10_000
THREADS = 2
PATCH_EVERY = 16
WAIT_EVERY = 512
POINTS = 10
DEVICE_SLACK = 4 << 20
PROCESS_SLACK = 16 << 20


@dataclass(frozen=True, slots=True)
class Sample:
    """Memory at one point."""

    done: int
    device_used: int
    resident: int
    retired: int


@dataclass(slots=True)
class Part:
    """One part of the soak."""

    name: str
    samples: list[Sample] = field(default_factory=list)
    seconds: float = 0.0
    patches: int = 0
    most_retired: int = 0
    """The greatest number of closed objects that were not destroyed yet."""
    left: int = 0
    """The number of closed objects that are not destroyed at the end."""

    def sample(self, device: ost.Device, done: int) -> None:
        gc.collect()
        free, total = device.memory_info()
        self.samples.append(Sample(done, total - free, resident(), device.context.retired))

    def drift(self, name: str) -> int:
        """Returns the growth in bytes from the first tenth to the end."""
        return int(getattr(self.samples[-1], name) - getattr(self.samples[0], name))

    @property
    def flat(self) -> bool:
        return (
            self.drift("device_used") <= DEVICE_SLACK
            and self.drift("resident") <= PROCESS_SLACK
            and self.left == 0
        )

    def row(self) -> dict[str, object]:
        done = self.samples[-1].done
        return {
            "part": self.name,
            "count": done,
            "seconds": round(self.seconds, 2),
            "each_us": round(self.seconds / done * 1e6, 3),
            "patches": self.patches,
            "device_drift_kib": self.drift("device_used") // 1024,
            "process_drift_kib": self.drift("resident") // 1024,
            "most_retired": self.most_retired,
            "left": self.left,
            "flat": self.flat,
        }


def resident() -> int:
    """Returns the resident memory of this process, in bytes."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def replays(device: ost.Device, number: int) -> Part:
    """Launches one executable `number` times, with patches in between."""
    part = Part("replays with patches")
    stream = device.create_stream()
    kernel = device.modules.get_or_compile(SOURCE, "count")
    counters = [device.zeros(1, np.uint64) for _ in range(2)]
    with ost.capture(stream) as capture:
        ost.launch(stream, kernel, ost.LaunchConfig(1, 1), counters[0], 1)
    run = capture.graph.instantiate(upload=stream)
    expected, on, by = [0, 0], 0, 1
    points = _points(number)
    start = time.perf_counter()
    for i in range(1, number + 1):
        run.launch(stream)
        expected[on] += by
        if i % PATCH_EVERY == 0:
            patches = i // PATCH_EVERY
            if patches % 4 == 0:  # every fourth patch is of the pointer, the others of the number
                on = 1 - on
                run.set(0, "counter", counters[on])
            else:
                by = 1 + patches % 97
                run.set(0, "by", by)
            part.patches += 1
        if i % WAIT_EVERY == 0:
            stream.synchronize()
        if i in points:
            stream.synchronize()
            part.sample(device, i)
    stream.synchronize()
    part.seconds = time.perf_counter() - start
    found = [int(c.to_numpy(stream)[0]) for c in counters]
    assert found == expected, f"counted {found}, expected {expected}"
    run.close()
    return _finished(part, device)


def _finished(part: Part, device: ost.Device) -> Part:
    """Notes the number of objects that are still not destroyed after all were dropped."""
    gc.collect()
    device.synchronize()
    part.left = device.context.retired
    return part


def _points(number: int) -> set[int]:
    return {number * (k + 1) // POINTS for k in range(POINTS)}


def rounds(device: ost.Device, number: int) -> Part:
    """Makes, runs and drops `number` graphs, distributed over the threads."""
    part = Part("capture-instantiate-destroy rounds")
    kernel = device.modules.get_or_compile(SOURCE, "count")
    failures: list[BaseException] = []
    each = number // THREADS
    done = [0] * THREADS
    barrier = threading.Barrier(THREADS + 1)
    tenths = [each * (k + 1) // POINTS for k in range(POINTS)]

    def work(index: int) -> None:
        try:
            stream, counter = device.create_stream(), device.zeros(1, np.uint64)
            for tenth in tenths:
                barrier.wait()  # all threads begin a tenth together
                while done[index] < tenth:
                    by = done[index] % 7 + 1
                    with ost.capture(stream) as capture:
                        ost.launch(stream, kernel, ost.LaunchConfig(1, 1), counter, by)
                        ost.launch(stream, kernel, ost.LaunchConfig(1, 1), counter, by)
                    with capture.graph as graph, graph.instantiate() as run:
                        run.launch(stream)
                    done[index] += 1
                    part.most_retired = max(part.most_retired, device.context.retired)
                stream.synchronize()
                barrier.wait()
            barrier.wait()
            expected = sum(2 * (i % 7 + 1) for i in range(each))
            found = int(counter.to_numpy(stream)[0])
            assert found == expected, f"thread {index} counted {found}, expected {expected}"
        except BaseException as error:
            failures.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(POINTS):
            barrier.wait()
            start = time.perf_counter()
            barrier.wait()
            part.seconds += time.perf_counter() - start
            device.synchronize()  # destroys closed graphs while all threads wait
            part.sample(device, sum(done))
        barrier.wait()
    except threading.BrokenBarrierError:
        pass
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return _finished(part, device)


def main(argv: Sequence[str] | None = None) -> int:
    options = common.options(__doc__).parse_args(argv)
    with ost.open_device(options.device) as device:
        parts = [
            replays(device, 2_000 if options.quick else REPLAYS),
            rounds(device, 40 if options.quick else ROUNDS),
        ]
        rows = [part.row() for part in parts]
        title = f"Soak, {device.properties.name}"
        print(common.table(title, rows, list(rows[0])))
        flat = all(part.flat for part in parts)
        common.emit(
            "soak",
            device,
            options.out,
            ceiling={
                "what": "drift of device and process memory that counts as flat, bytes; the least "
                "time of a million launches is 2 s (2 microseconds each from C)",
                "device_bytes": DEVICE_SLACK,
                "process_bytes": PROCESS_SLACK,
                "us": {"replay": 2.0},
            },
            settings={
                "threads": THREADS,
                "patch_every": PATCH_EVERY,
                "wait_every": WAIT_EVERY,
                "quick": options.quick,
            },
            rows=[
                {
                    **row,
                    "samples": [
                        {
                            "done": s.done,
                            "device_used": s.device_used,
                            "resident": s.resident,
                            "retired": s.retired,
                        }
                        for s in part.samples
                    ],
                }
                for row, part in zip(rows, parts, strict=True)
            ],
            skipped={},
            summary={"flat": flat},
        )
    return 0 if flat else 1


if __name__ == "__main__":
    sys.exit(main())
