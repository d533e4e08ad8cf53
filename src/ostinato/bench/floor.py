"""The memory bandwidth, for the floor of a decode step: its bytes over the bandwidth.

The bandwidth is measured in the same run as the numbers compared with it.  On a GPU a kernel reads
2 GiB and writes nothing, and a copy moves as much (bytes read and written); the faster one counts,
so that no step can be below the floor.  On the host NumPy computes matrix-vector products over
matrices like a small model's, of which a decode step there consists; the fastest run counts, since
other processes use the same cores.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

import ostinato as ost

_BYTES = 2 << 30
_ROUNDS = 9
_HOST_ROUNDS = 25
_THREADS = 512

_READ = r"""
extern "C" __global__ void __launch_bounds__(512) read_all(
    const uint4* __restrict__ from, unsigned* seen, unsigned long long count) {
    unsigned long long stride = (unsigned long long)gridDim.x * blockDim.x;
    unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
    unsigned sum = 0;
    for (; i + 7 * stride < count; i += 8 * stride) {
        uint4 v[8];
#pragma unroll
        for (int k = 0; k < 8; ++k) v[k] = __ldcs(from + i + k * stride);
#pragma unroll
        for (int k = 0; k < 8; ++k) sum += v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
    }
    for (; i < count; i += stride) sum += from[i].x;
    if (sum == 0x9e3779b9u) *seen = sum;  // so that nothing is left out as unused
}
"""
SOURCE = ost.Source(
    cuda=_READ,
    signatures={"read_all": "from: *const u32, seen: *u32, count: u64"},
    name="bandwidth.cu",
)


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """A measured bandwidth in bytes a second.  `read`: of reads only; `copy`: bytes read and
    written by a copy, 0 if not measured; `how`: the method in words."""

    read: float
    copy: float
    how: str

    @property
    def best(self) -> float:
        """The bandwidth that the floor is computed with."""
        return max(self.read, self.copy)


def measure_bandwidth(device: ost.Device, nbytes: int = _BYTES) -> Bandwidth:
    """Measures the bandwidth of a device's memory, by several runs.

    On a GPU this allocates twice `nbytes` of memory for a moment; `nbytes` is limited to a quarter
    of the free memory.  All work is launched as graphs: a few launches into a second stream make
    every kernel of later graphs start 0.1 to 0.2 us later, for the life of the process (H100,
    driver 580; docs/log.md, "A step's end, and what a second stream costs").
    """
    if device.capabilities.host_memory_is_device_memory:
        return _host_bandwidth()
    free, _ = device.memory_info()
    nbytes = max(1 << 26, min(nbytes, free // 4) // (1 << 26) * (1 << 26))
    stream = device.create_stream()
    tile = np.random.default_rng(3).integers(0, 255, 1 << 26, np.uint8)
    source, target = device.empty(nbytes, "bytes"), device.empty(nbytes, "bytes")
    seen = device.zeros(1, np.uint32)

    def fill() -> None:
        for start in range(len(tile), nbytes, len(tile)):
            ost.copy(stream, source[start : start + len(tile)], source[: len(tile)])

    try:
        kernel = device.modules.get_or_compile(SOURCE, "read_all")
        shape = ost.LaunchConfig(grid=device.properties.multiprocessors * 4, block=_THREADS)
        launch = ost.prepare(kernel, shape, source, seen, nbytes // 16)
        source[: len(tile)].set(tile, stream)
        with ost.capture_function(stream, fill).instantiate() as filling:
            filling.launch(stream)
        read = _replay_us(device, stream, lambda: stream.submit(launch)) / 1e6
        copy = _replay_us(device, stream, lambda: ost.copy(stream, target, source)) / 1e6
    finally:
        for buffer in (source, target, seen):
            buffer.close()
        stream.close()
    how = f"reading {nbytes >> 20} MiB with a kernel, and copying as much (read and written)"
    return Bandwidth(nbytes / read, 2 * nbytes / copy, how)


def _replay_us(device: ost.Device, stream: ost.Stream, submit: Callable[[], None]) -> float:
    with ost.capture_function(stream, submit).instantiate() as graph:
        return device_us(device, stream, lambda: graph.launch(stream), _ROUNDS)


def device_us(
    device: ost.Device, stream: ost.Stream, work: Callable[[], object], rounds: int
) -> float:
    """Returns the median microseconds on the device of the work that `work` submits to the stream.
    `work` is called twice more, before, to warm up; its result is kept until the work has ended."""
    found = []
    with device.create_event(timing=True) as begin, device.create_event(timing=True) as end:
        for _ in range(rounds + 2):
            stream.record(begin)
            kept = work()
            stream.record(end)
            stream.synchronize()
            del kept
            found.append(end.elapsed_since(begin) * 1e6)
    return statistics.median(found[2:])


def _host_bandwidth() -> Bandwidth:
    rng = np.random.default_rng(3)
    vector, one = rng.standard_normal(576, np.float32), rng.standard_normal((1536, 576), np.float32)
    matrices, found = [one.copy() for _ in range(60)], []  # more bytes than a cache holds
    for _ in range(_HOST_ROUNDS):
        begin = time.perf_counter()
        for matrix in matrices:
            matrix @ vector
        found.append(time.perf_counter() - begin)
    nbytes = sum(matrix.nbytes for matrix in matrices)
    how = "60 matrix-vector products of 1536 by 576 in float32 with NumPy"
    return Bandwidth(nbytes / min(found), 0.0, how)
