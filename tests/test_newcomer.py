"""Mistakes of the first hour: each is refused at once, by an error that names what was wrong and
says what to write instead."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import ostinato as ost
from ostinato import errors
from ostinato.device import Device

N = 8


@ost.kernel(
    "x: *f32, by: f32, n: u32",
    r"""
    extern "C" __global__ void scale(float* x, float by, unsigned n) {
        if (threadIdx.x < n) x[threadIdx.x] *= by;
    }""",
)
def scale(launch: ost.lowlevel.HostLaunch, x: Any, by: float, n: int) -> None:
    x[:n] *= by


class Place:
    """What a newcomer has made so far.  Any: a type checker would find most of the mistakes."""

    def __init__(self, device: Device) -> None:
        self.device: Any = device
        self.stream: Any = device.create_stream()
        self.kernel: Any = device.kernel(scale)
        self.config: Any = ost.LaunchConfig(1, N)
        self.x: Any = device.array(np.ones(N, np.float32), name="x")
        with ost.capture(self.stream) as capture:
            self.launch(2.0, N)
        self.graph: Any = capture.graph
        self.run: Any = self.graph.instantiate(upload=self.stream)
        self.cache: Any = ost.GraphCache(device, buckets=ost.PowersOfTwo(N))
        self.slot: Any = ost.Slot("x", self.x, "state", size="rows")
        self.step: Any = self.new_step(lambda stream, sizes: self.launch(2.0, sizes.rows))

    def launch(self, *rest: Any, x: Any = None, stream: Any = None) -> None:
        where = self.stream if stream is None else stream
        ost.launch(where, self.kernel, self.config, self.x if x is None else x, *rest)

    def new_step(self, run: Any, **options: Any) -> Any:
        given = {"stream": self.stream, "cache": self.cache, "slots": [self.slot]}
        return ost.GraphedStep(run, **(given | options))

    def capture(self, work: Callable[[], object]) -> None:
        with ost.capture(self.stream):
            self.launch(2.0, N)
            work()

    def closed(self, thing: Any) -> Any:
        thing.close()
        return thing


@pytest.fixture
def place(device: Device) -> Iterator[Place]:
    yield Place(device)


@dataclass(frozen=True)
class Mistake:
    name: str
    make: Callable[[Place], object]
    error: type[BaseException]
    said: tuple[str, ...]
    """What the error must say: the argument or the name, and the remedy."""


def mistake(
    name: str, make: Callable[[Place], object], error: type[BaseException], *said: str
) -> Mistake:
    return Mistake(name, make, error, said)


Launch: Any = ost.launch
Source: Any = ost.Source
Config: Any = ost.LaunchConfig
Slot: Any = ost.Slot
host_kernel: Any = ost.host_kernel
capture: Any = ost.capture

MISTAKES = [
    # --- launches
    mistake(
        "the stream is forgotten",
        lambda p: Launch(p.kernel, p.config, p.x, 2.0, N),
        *(errors.InputError, "launch(stream, kernel, config, *arguments)", "stream must be"),
        "device.create_stream()",
    ),
    mistake(
        "the device as the stream",
        lambda p: Launch(p.device, p.kernel, p.config, p.x, 2.0, N),
        *(errors.InputError, "stream must be a Stream, not Device", "device.create_stream()"),
    ),
    mistake(
        "the grid as the config",
        lambda p: Launch(p.stream, p.kernel, N, p.x, 2.0, N),
        *(errors.InputError, "config must be a LaunchConfig, not int", "LaunchConfig(grid, block)"),
    ),
    mistake(
        "a source that is not loaded",
        lambda p: Launch(p.stream, scale, p.config, p.x, 2.0, N),
        *(errors.InputError, "kernel must be a Kernel, not Source", "device.kernel(source, name)"),
    ),
    mistake(
        "an argument too few",
        lambda p: p.launch(2.0),
        *(errors.InputError, "3 arguments are needed (x, by, n)", "2 were given"),
    ),
    mistake(
        "an argument too many",
        lambda p: p.launch(2.0, N, N),
        *(errors.InputError, "3 arguments are needed (x, by, n)", "4 were given"),
    ),
    mistake(
        "arguments in another order",
        lambda p: Launch(p.stream, p.kernel, p.config, 2.0, p.x, N),
        *(errors.InputError, "'x' is a pointer; float has no device address", "give a Buffer"),
    ),
    mistake(
        "an array of the host",
        lambda p: p.launch(2.0, N, x=np.ones(N, np.float32)),
        *(errors.InputError, "'x' is a pointer; ndarray has no device address", "give a Buffer"),
    ),
    mistake(
        "a list",
        lambda p: p.launch(2.0, N, x=[1.0] * N),
        *(errors.InputError, "'x' is a pointer; list has no device address", "give a Buffer"),
    ),
    mistake(
        "a fraction as a count",
        lambda p: p.launch(2.0, N / 3),
        *(errors.InputError, "'n' takes a whole number (uint32)", "2.66"),
    ),
    mistake(
        "a negative count",
        lambda p: p.launch(2.0, -1),
        *(errors.InputError, "'n': -1 is outside uint32 (0 to 4294967295)"),
    ),
    mistake(
        "text as a number",
        lambda p: p.launch("2.0", N),
        *(errors.InputError, "'by' takes a number (float32), not str"),
    ),
    mistake(
        "a grid of no blocks",
        lambda p: Config(0, N),
        *(errors.InputError, "grid=0", "1 or more are needed"),
    ),
    mistake(
        "a grid by plain division",
        lambda p: Config(N / 4, N),
        *(errors.InputError, "grid=2.0", "whole numbers"),
    ),
    mistake(
        "a block too large",
        lambda p: Launch(p.stream, p.kernel, Config(1, 4096), p.x, 2.0, N),
        *(errors.DriverError, "scale", "4096", "launch dimensions"),
    ),
    # --- kernels and sources
    mistake(
        "a kernel's name misspelt",
        lambda p: p.device.kernel(scale, "scal"),
        *(errors.InputError, "no kernel 'scal'", "there are: scale", "Did you mean 'scale'?"),
    ),
    mistake(
        "no name for the kernel",
        lambda p: p.device.kernel("__global__ void a() {} __global__ void b() {}"),
        *(errors.InputError, "name the kernel", "device.kernel(source, name)"),
    ),
    mistake(
        "a file's name as the source",
        lambda p: p.device.kernel("scale.cu", "scale"),
        *(errors.InputError, "'scale.cu' is the name of a file", "Source.from_file"),
    ),
    mistake(
        "a cubin as text",
        lambda p: Source(b"\x7fELF"),
        *(errors.InputError, "cuda is text, not bytes", "`data` with its kind"),
    ),
    mistake(
        "C++ types in a signature",
        lambda p: host_kernel("x: float*, n: int"),
        *(errors.InputError, "cannot read 'x: float*'", "like 'x: *f32'"),
    ),
    mistake(
        "C's types in a signature",
        lambda p: host_kernel("x: *float"),
        *(errors.InputError, "'x: *float' has no known type", "f32"),
    ),
    mistake(
        "a decorator without its signature",
        lambda p: host_kernel(lambda launch, x: None),
        *(errors.InputError, "a signature is text", "@host_kernel('x: *f32, n: u32')"),
    ),
    mistake(
        "a host function without the launch",
        lambda p: host_kernel("x: *f32", name="f")(lambda x: None),
        *(errors.InputError, "'f' is called as f(launch, x)"),
    ),
    # --- memory
    mistake(
        "a shape as the offset of a view",
        lambda p: p.x.view((4, 2)),
        *(errors.InputError, "offset=(4, 2)", "view(shape=(4, 2))"),
    ),
    mistake(
        "a shape of other elements",
        lambda p: p.x.reshape(4, 3),
        *(errors.InputError, "8 elements [8]", "[4, 3]", "keeps their number"),
    ),
    mistake("numpy()", lambda p: p.x.numpy(), AttributeError, "'numpy'", "to_numpy(stream)"),
    mistake(
        "an element is assigned",
        lambda p: p.x.__setitem__(0, 1.0),
        *(TypeError, "cannot be assigned", "set(values, stream)", "ost.fill(stream"),
    ),
    mistake(
        "a context for its device",
        lambda p: ost.DeviceScalar(p.device.context, "u4"),  # type: ignore[arg-type]
        *(errors.InputError, "a device is needed", "not its context"),
    ),
    mistake(
        "a dtype that is 8 bits here and 8 bytes there",
        lambda p: p.device.zeros(N, "u8"),
        *(errors.InputError, "8 bits in signatures and 8 bytes in NumPy"),
    ),
    mistake(
        "values of another shape",
        lambda p: p.x.set(np.ones(N + 1, np.float32), p.stream),
        *(errors.InputError, "9 elements cannot be copied into 8"),
    ),
    mistake(
        "values that do not fit the dtype",
        lambda p: p.x.set([1e300] * N, p.stream),
        *(errors.InputError, "1e+300 is outside float32"),
    ),
    mistake(
        "an array of the host is copied by `copy`",
        lambda p: ost.copy(p.stream, p.x, np.ones(N, np.float32)),  # type: ignore[arg-type]
        *(errors.InputError, "src is ndarray", "buffer.set takes values"),
    ),
    mistake(
        "an array of the host is filled",
        lambda p: ost.fill(p.stream, np.ones(N), 1),  # type: ignore[arg-type]
        *(errors.InputError, "dst is ndarray", "a Buffer is needed"),
    ),
    mistake(
        "closed memory",
        lambda p: p.launch(2.0, N, x=p.closed(p.device.zeros(N, np.float32))),
        *(errors.ClosedError, "the buffer at", "is closed", "allocate another"),
    ),
    # --- captures and graphs
    mistake(
        "a launch of the definition",
        lambda p: p.graph.launch(p.stream),
        *(AttributeError, "'launch'", "graph.instantiate(upload=stream)"),
    ),
    mistake(
        "a capture without `with`",
        lambda p: capture(p.stream).graph,
        *(AttributeError, "'graph'", "with ost.capture(stream) as capture"),
    ),
    mistake(
        "a wait inside a capture",
        lambda p: p.capture(p.stream.synchronize),
        *(errors.CaptureBrokenError, "test_newcomer.py", "status 900", "before the capture begins"),
    ),
    mistake(
        "a value is read inside a capture",
        lambda p: p.capture(lambda: p.x.to_numpy(p.stream)),
        *(errors.CaptureBrokenError, "memcpy_to_host", "warm up first"),
    ),
    mistake(
        "captures inside each other",
        lambda p: p.capture(lambda: p.capture(lambda: None)),
        *(errors.CaptureError, "the stream is capturing already", "end that capture first"),
    ),
    mistake(
        "replay(), as torch calls it",
        lambda p: p.run.replay(),
        *(AttributeError, "'replay'", "launch(stream)"),
    ),
    mistake(
        "a launch without a stream",
        lambda p: p.run.launch(),
        *(TypeError, "launch()", "argument", "stream"),  # words of both launchers
    ),
    mistake(
        "a closed executable",
        lambda p: p.closed(p.run).launch(p.stream),
        *(errors.ClosedError, "the executable graph is closed", "instantiate it again"),
    ),
    mistake(
        "a closed stream",
        lambda p: p.run.launch(p.closed(p.stream)),
        *(errors.ClosedError, "the stream is closed", "launch on another"),
    ),
    mistake(
        "a patch of an argument misspelt",
        lambda p: p.run.set(0, "bye", 3.0),
        *(errors.InputError, "no parameter 'bye'", "there are: x, by, n"),
    ),
    mistake(
        "a patch of a node that is not there",
        lambda p: p.run.set(5, "by", 3.0),
        *(errors.InputError, "there is no node 5", "an index below 1"),
    ),
    mistake(
        "memory too small is bound",
        lambda p: p.run.rebind({p.x: p.device.zeros(2, np.float32)}),
        *(errors.InputError, "argument 0 (x)", "only 8 bytes", "Give a range that is as large"),
    ),
    mistake(
        "a stream is waited for as an event",
        lambda p: p.stream.wait(p.device.create_stream()),
        *(errors.InputError, "an Event is needed, not Stream", "side.wait(stream.record())"),
    ),
    mistake("sync()", lambda p: p.stream.sync(), AttributeError, "'sync'", "synchronize()"),
    # --- steps
    mistake(
        "a size without its name",
        lambda p: p.step(3),
        *(TypeError, "takes its sizes by name", "step(rows=…)"),
    ),
    mistake(
        "a size misspelt",
        lambda p: p.step(row=3),
        *(errors.InputError, "slot 'x'", "the size 'rows'", "it gives row"),
    ),
    mistake(
        "a size over the slot",
        lambda p: p.step(rows=N + 1),
        *(errors.InputError, "rows=9", "slot 'x' has only 8 rows"),
    ),
    mistake(
        "a fraction as a size",
        lambda p: p.step(rows=2.5),
        *(errors.InputError, "rows=2.5", "a whole number of 0 or more"),
    ),
    mistake(
        "the size on the device misspelt",
        lambda p: misspelt_size(p),
        *(errors.InputError, "'row'", "rows"),
    ),
    mistake(
        "a role that there is not",
        lambda p: Slot("x", p.x, "inout"),
        *(errors.InputError, "slot 'x': role='inout'", '"input", "output", "state" or "scratch"'),
    ),
    mistake(
        "an array of the host as a slot",
        lambda p: Slot("x", np.ones(N), "input"),
        *(errors.InputError, "slot 'x': a Buffer is needed, not ndarray", "device.adopt_array"),
    ),
    mistake(
        "two slots of one name",
        lambda p: p.new_step(lambda stream, sizes: None, slots=[p.slot, p.slot]),
        *(errors.InputError, "two slots are called 'x'"),
    ),
    mistake(
        "verify=True",
        lambda p: p.new_step(lambda stream, sizes: None, verify=True),
        *(errors.InputError, "verify=True", '"first", or N'),
    ),
    mistake(
        "a budget with an unknown unit",
        lambda p: ost.GraphCache(p.device, budget="512 megs"),
        *(errors.InputError, "'512 megs'", '"512 MiB"'),
    ),
    # --- devices
    mistake(
        "a device's name",
        lambda p: ost.open_device("gpu"),
        *(errors.InputError, "no device 'gpu'", '"host"'),
    ),
    mistake(
        "an object of a closed device",
        lambda p: p.closed(p.device).zeros(4, "f4"),
        *(errors.ClosedError, "is closed; open it again"),
    ),
]


def misspelt_size(place: Place) -> None:
    step = place.new_step(lambda stream, sizes: sizes.on_device("row"))
    step(rows=3)


@pytest.mark.parametrize("case", MISTAKES, ids=lambda case: case.name)
def test_a_mistake_is_named_with_its_remedy(place: Place, case: Mistake) -> None:
    with pytest.raises(case.error) as caught:
        case.make(place)
    for part in case.said:
        assert re.search(re.escape(part), str(caught.value)), str(caught.value)


def test_hints_are_no_attributes(place: Place) -> None:
    """Neither for `hasattr` nor for a shell that completes names."""
    for thing, name in ((place.graph, "launch"), (place.run, "replay"), (place.stream, "sync")):
        assert not hasattr(thing, name) and name not in dir(thing)
    assert "synchronize" in dir(place.stream)
