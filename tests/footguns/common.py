"""What several files of this package use: graphs, steps, and objects of other libraries."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import ostinato as ost
from ostinato.device import Device
from tests.sources import config, kernel

N = 256
"""The elements of most buffers here."""


def ones(device: Device) -> ost.Buffer:
    return device.array(np.ones(N, np.float32))


def graph_of(
    stream: ost.Stream, function: ost.Kernel, threads: int, *arguments: object
) -> ost.Graph:
    """A graph of one launch, which is captured on the stream."""
    return ost.capture_function(
        stream, lambda: ost.launch(stream, function, config(threads), *arguments)
    )


def doubling(device: Device, stream: ost.Stream, x: ost.Buffer, out: ost.Buffer) -> ost.GraphExec:
    """An executable of one kernel: out = x + x."""
    return graph_of(stream, kernel(device, "add"), N, x, x, out, N).instantiate()


def count_step(
    device: Device, counter: ost.Buffer, cache: ost.GraphCache, by: int, **options: object
) -> ost.GraphedStep:
    """A step that adds `by` to the counter."""
    increment = kernel(device, "increment")
    options.setdefault("stream", device.create_stream())
    return ost.GraphedStep(
        lambda stream, _: ost.launch(stream, increment, config(1), counter, by),
        cache=cache,
        **options,
    )


def checked_step(
    device: Device,
    work: Callable[..., object],
    slots: list[ost.Slot],
    **options: object,
) -> ost.GraphedStep:
    """A step whose every call is checked, unless the options say otherwise."""
    options = {"verify": 1, "warmups": 0, "stream": device.create_stream(), **options}
    cache = ost.GraphCache(device, buckets=ost.PowersOfTwo(16))
    return ost.GraphedStep(work, cache=cache, slots=slots, **options)


class Rows:
    """A step's work: it adds one to as many of the eight totals as the device says."""

    def __init__(self, device: Device) -> None:
        self.stream, self._axpy = device.create_stream(), kernel(device, "axpy_rows")
        self._one = device.array(np.ones((8, 1), np.float32))
        self._factor = device.array(np.ones(1, np.float32))
        self.totals = device.zeros((8, 1), np.float32)

    def add(self, stream: ost.Stream, sizes: ost.Sizes) -> None:
        rows = sizes.on_device("rows")
        arguments = (self._one, self._factor, self.totals, rows, 1)
        ost.launch(stream, self._axpy, config(sizes.rows), *arguments)

    def seen(self) -> list[float]:
        return self.totals.to_numpy(self.stream)[:, 0].tolist()


class DefaultStream:
    """The legacy default stream, which a library uses that is given no other stream."""

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, 0)


class Borrowed:
    """Another library's array, over memory of ours."""

    def __init__(self, buffer: ost.Buffer, typestr: str) -> None:
        self.buffer = buffer
        self.__cuda_array_interface__ = {
            "shape": buffer.shape,
            "typestr": typestr,
            "data": (buffer.address, False),
            "version": 3,
        }


@ost.host_kernel("both: bytes[16], n: u32")
def add_one(launch, both, n):
    """The n f32 at the second address become those at the first, plus one."""
    source, target = (int.from_bytes(both[at : at + 8], "little") for at in (0, 8))
    launch.memory(target, 4 * n).view("f4")[:] = launch.memory(source, 4 * n).view("f4") + 1


_ADD_ONE = ost.Source(
    """
struct Both { const float* source; float* target; };
extern "C" __global__ void add_one(Both both, unsigned n) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) both.target[i] = both.source[i] + 1;
}
""",
    host=[add_one],
    name="structs",
)


def struct_kernel(device: Device) -> ost.Kernel:
    """A kernel that is given a struct of two addresses: target = source + 1."""
    return device.modules.get_or_compile(_ADD_ONE, "add_one")


def addresses(*buffers: ost.Buffer) -> bytes:
    """A struct of the buffers' addresses."""
    return b"".join(buffer.address.to_bytes(8, "little") for buffer in buffers)
