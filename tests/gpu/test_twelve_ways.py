"""Twelve ways to break a capture.

Each is one function that does the forbidden thing inside a capture, on a line marked `# breaks it`.
Of each it is shown that the error names that line, that the stream works afterwards, and that fifty
times of it lose no device memory.  Two more break none: garbage that is collected in a capture
(tests/graph/test_capture.py), and other threads' calls in thread-local mode (tests/contract).
"""

from __future__ import annotations

import contextlib
import gc
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.errors import CaptureBrokenError, CaptureError, DriverError
from tests.sources import config, kernel
from tests.threads import in_thread

N = 1000
TIMES = 50
MARK = "# breaks it"

Way = Callable[["Bench"], object]
WAYS: dict[str, Way] = {}


class Bench:
    """A device with a stream to capture on, and what the ways need, all made beforehand."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.stream, self.other = device.create_stream(), device.create_stream()
        self.x = device.array(np.arange(N, dtype=np.float32))
        self.recorded = self.other.record()
        self.other.synchronize()
        self.number = 0

    def legacy(self) -> ost.Stream:
        """The legacy default stream."""
        return self.device.adopt_stream(Legacy())

    def assert_sound(self) -> None:
        """Nothing captures any more, a capture works, and so does eager work."""
        device, stream = self.device, self.stream
        assert not stream.is_capturing() and not self.other.is_capturing()
        assert not device.context.captures and device.context.taps == ()
        scale = kernel(device, "scale")
        before = self.x.to_numpy(stream)
        with ost.capture(stream) as capture:
            ost.launch(stream, scale, config(N), self.x, N)
        with capture.graph as graph, graph.instantiate(upload=stream) as run:
            run.launch(stream)
        np.testing.assert_array_equal(self.x.to_numpy(stream), 2 * before)
        self.x.set(before, stream)
        stream.synchronize()


class Legacy:
    """The legacy default stream, as other libraries hand it out."""

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, 0)


def way(function: Way) -> Way:
    WAYS[function.__name__] = function
    return function


@way
def synchronise(bench: Bench) -> None:
    bench.stream.synchronize()  # breaks it


@way
def synchronise_the_device(bench: Bench) -> None:
    bench.device.synchronize()  # breaks it


@way
def pageable_copy_in(bench: Bench) -> None:
    bench.x.set(np.zeros(N, np.float32), bench.stream)  # breaks it


@way
def pageable_copy_out(bench: Bench) -> None:
    bench.x.to_numpy(bench.stream)  # breaks it


@way
def allocation_outside_the_pool(bench: Bench) -> None:
    bench.device.empty(1 << 20, "bytes")  # breaks it


@way
def lazy_module_load(bench: Bench) -> None:
    bench.device.modules.get_or_compile(NEVER_LOADED, "never_loaded")  # breaks it


@way
def legacy_stream_call(bench: Bench) -> None:
    fork, legacy = bench.stream.record(), bench.legacy()
    legacy.wait(fork)  # breaks it


@way
def unjoined_fork(bench: Bench) -> None:
    fork = bench.stream.record()
    bench.other.wait(fork)  # breaks it
    ost.fill(bench.other, bench.x, 2)  # breaks it (or this: it is what nobody waits for)


@way
def nested_capture(bench: Bench) -> None:
    ost.Capture(bench.stream).begin()  # breaks it


@way
def invalid_kernel_launch(bench: Bench) -> None:
    too_large = ost.LaunchConfig(grid=1, block=4096)
    ost.launch(bench.stream, kernel(bench.device, "scale"), too_large, bench.x, N)  # breaks it


@way
def exception_in_user_code(bench: Bench) -> None:
    raise ZeroDivisionError("the user's own")  # breaks it


@way
def event_query_outside(bench: Bench) -> None:
    _ = bench.recorded.done()  # breaks it


@way
def event_query_inside(bench: Bench) -> None:
    event = bench.stream.record()
    _ = event.done()  # breaks it


NEVER_LOADED = ost.Source(
    cuda='extern "C" __global__ void never_loaded(float* x) { *x = 1; }',
    host=[ost.host_kernel("x: *f32", name="never_loaded")(lambda launch, x: x.fill(1))],
    name="never loaded",
)


HARMLESS_IF_SWALLOWED = {
    "exception_in_user_code",
    "nested_capture",
    "invalid_kernel_launch",
    "event_query_inside",
    "lazy_module_load",  # on the host it breaks the capture, on driver 580 it does not
}


@pytest.fixture
def bench(device: Device) -> Bench:
    return Bench(device)


@pytest.fixture(params=sorted(WAYS))
def breaks(request: pytest.FixtureRequest) -> Way:
    return WAYS[request.param]


def broken(bench: Bench, breaks: Way, **options: Any) -> BaseException | None:
    """Captures, lets it be broken, and gives the error.

    None for a module loaded on CUDA: driver 580 allows that, and only a warning says preload.
    """
    if breaks is lazy_module_load and bench.device.capabilities.source_language == "cuda":
        with ost.capture(bench.stream, **options):
            ost.fill(bench.stream, bench.x, 1)
            breaks(bench)
        return None
    with (
        pytest.raises((CaptureError, ZeroDivisionError)) as caught,
        ost.capture(bench.stream, **options),
    ):
        ost.fill(bench.stream, bench.x, 1)
        breaks(bench)
    return caught.value


def named(error: BaseException) -> str:
    """Where the error says it was: the location that it names, for ours; else its traceback.

    A nested capture breaks nothing, and a user's own exception is raised as it was: they are
    errors like any other, and it is their traceback that says where.
    """
    if isinstance(error, CaptureBrokenError):
        return error.location or ""
    return "".join(traceback.format_exception(error))


@pytest.mark.parametrize("trace", [False, True], ids=["", "trace"])
def test_the_error_names_the_line(
    bench: Bench, breaks: Way, trace: bool, caplog: pytest.LogCaptureFixture
) -> None:
    error = broken(bench, breaks, trace=trace)
    if error is None:
        assert "preload" in caplog.text and MARK in caplog.text
        bench.assert_sound()
        return
    assert MARK in named(error), f"{type(error).__name__}: {error}"
    if isinstance(error, CaptureBrokenError):
        assert "works again" in str(error) or "preload" in str(error)
    bench.assert_sound()


@pytest.mark.parametrize("trace", [False, True], ids=["", "trace"])
@pytest.mark.parametrize("breaks", sorted(set(WAYS) - HARMLESS_IF_SWALLOWED), indirect=True)
def test_the_error_names_the_line_if_it_was_swallowed(
    bench: Bench, breaks: Way, trace: bool
) -> None:

    def swallowed(bench: Bench) -> None:
        with contextlib.suppress(ost.OstinatoError):
            breaks(bench)
        _ = 1 + 1

    with pytest.raises(CaptureError) as caught, ost.capture(bench.stream, trace=trace):
        ost.fill(bench.stream, bench.x, 1)
        swallowed(bench)
    assert MARK in named(caught.value), str(caught.value)
    bench.assert_sound()


@pytest.mark.alone
def test_fifty_times_lose_no_memory(bench: Bench, breaks: Way) -> None:
    device = bench.device

    def free() -> int:
        bench.assert_sound()
        gc.collect()
        device.synchronize()
        assert device.context.retired == 0
        return device.memory_info()[0]

    for _ in range(3):  # pools and logs that grow once
        broken(bench, breaks)
    before = free()
    for _ in range(TIMES):
        broken(bench, breaks)
    assert free() >= before


def test_another_threads_call_breaks_a_global_capture(bench: Bench) -> None:
    raised: list[BaseException | None] = []

    def allocates() -> None:
        bench.device.empty(1 << 20, "bytes")  # breaks it

    for _ in range(TIMES):
        with (
            pytest.raises(CaptureBrokenError) as caught,
            ost.capture(bench.stream, mode="global"),
        ):
            ost.fill(bench.stream, bench.x, 1)
            raised.append(in_thread(allocates))
            ost.fill(bench.stream, bench.x, 2)
        assert MARK in named(caught.value), str(caught.value)
    assert all(isinstance(error, DriverError) for error in raised)
    bench.assert_sound()
