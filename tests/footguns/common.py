"""What several files of this package use: buffers, steps, and objects of other libraries."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

import ostinato as ost
from ostinato.device import Device
from tests.sources import config, kernel

N = 256


def ones(device: Device) -> ost.Buffer:
    return device.array(np.ones(N, np.float32))


def doubling(device: Device, stream: ost.Stream, x: ost.Buffer, out: ost.Buffer) -> ost.GraphExec:
    """One kernel: out = x + x."""
    add = kernel(device, "add")
    return ost.capture_function(
        stream, lambda: ost.launch(stream, add, config(N), x, x, out, N)
    ).instantiate()


def checked_step(
    device: Device,
    work: Callable[..., object],
    slots: list[ost.Slot],
    **options: object,
) -> ost.GraphedStep:
    """A step that is checked as often as can be, unless the options say otherwise."""
    options = {"verify": 1, "warmups": 0, "stream": device.create_stream(), **options}
    cache = ost.GraphCache(device, buckets=ost.PowersOfTwo(16))
    return ost.GraphedStep(work, cache=cache, slots=slots, **options)


def count_step(
    device: Device, counter: ost.Buffer, cache: ost.GraphCache, by: int, **options: object
) -> ost.GraphedStep:
    """counter += by."""
    increment = kernel(device, "increment")
    options.setdefault("stream", device.create_stream())
    return ost.GraphedStep(
        lambda stream, _: ost.launch(stream, increment, config(1), counter, by),
        cache=cache,
        **options,
    )


def in_thread(work: Callable[[], object]) -> BaseException | None:
    """Runs `work` on a thread to its end; what it raised."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "it hangs"
    return raised[0] if raised else None


class DefaultStream:
    """The legacy default stream, as a library uses it that is not given another one."""

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
def summed(launch, both, n):
    """The n f32 at the second address become those at the first, plus one."""
    source, target = (int.from_bytes(both[at : at + 8], "little") for at in (0, 8))
    launch.memory(target, 4 * n).view("f4")[:] = launch.memory(source, 4 * n).view("f4") + 1


_SUMMED = ost.Source(
    """
struct Both { const float* source; float* target; };
extern "C" __global__ void summed(Both both, unsigned n) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) both.target[i] = both.source[i] + 1;
}
""",
    host=[summed],
    name="structs",
)


def both(x: ost.Buffer, out: ost.Buffer) -> bytes:
    return x.address.to_bytes(8, "little") + out.address.to_bytes(8, "little")
