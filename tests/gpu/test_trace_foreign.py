"""`capture(trace=True)` finds the line of torch or CuPy that breaks a capture."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import numpy as np
import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.errors import CaptureBrokenError
from tests.gpu.foreign import library
from tests.sources import config, kernel

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
N = 256


def found(
    device: Device, stream: ost.Stream, before: Callable[[], object], culprit: Callable[[], object]
) -> list[str]:
    """What is said of where the capture broke: if the error is swallowed, and if it is not."""
    x = device.zeros(N, np.float32)

    def after() -> None:
        _ = 1 + 1

    with pytest.raises(CaptureBrokenError) as swallowed, ost.capture(stream, trace=True):
        ost.fill(stream, x, 1)
        before()
        with contextlib.suppress(Exception):
            culprit()
        after()
    assert_usable(device, stream)
    # Any exception: the library's own error is raised as it was.
    with pytest.raises(Exception) as raised, ost.capture(stream, trace=True):
        ost.fill(stream, x, 1)
        before()
        culprit()
        after()
    assert_usable(device, stream)
    # A note on it says where the capture broke.
    notes = "\n".join(getattr(raised.value, "__notes__", []))
    return [swallowed.value.location or "", notes or str(raised.value)]


def assert_usable(device: Device, stream: ost.Stream) -> None:
    assert not stream.is_capturing()
    x = device.array(np.ones(N, np.float32))
    with ost.capture(stream) as capture:
        ost.launch(stream, kernel(device, "scale"), config(N), x, N)
    capture.graph.instantiate(upload=stream).launch(stream)
    assert (x.to_numpy(stream) == 2).all()


def test_torch_synchronising_in_its_own_python(cuda_device: Device, stream: ost.Stream) -> None:
    torch = library("torch")
    from ostinato.interop.torch import use_stream

    with use_stream(stream):
        x = torch.ones(N, device="cuda")
        x.mul_(1)
        stream.synchronize()
        said = found(
            cuda_device,
            stream,
            lambda: x.mul_(2),
            lambda: torch.cuda.current_stream().synchronize(),
        )
    # The innermost line of Python is torch's own.
    for where in said:
        assert "streams.py" in where and "synchronize" in where, said
    assert bool(torch.isfinite(x).all())


def test_torch_from_a_line_of_ours(cuda_device: Device, stream: ost.Stream) -> None:
    torch = library("torch")
    from ostinato.interop.torch import use_stream

    event = torch.cuda.Event()
    event.record()
    torch.cuda.synchronize()
    base = torch._C._CudaEventBase

    def culprit() -> None:
        base.query(event)  # the culprit

    with use_stream(stream):
        said = found(cuda_device, stream, lambda: None, culprit)
    for where in said:
        assert "the culprit" in where and "test_trace_foreign.py" in where, said


def test_torch_module_that_synchronises_deep_inside(
    cuda_device: Device, stream: ost.Stream
) -> None:
    torch = library("torch")
    from ostinato.interop.torch import use_stream

    class Layer(torch.nn.Module):
        def forward(self, x: object) -> None:
            torch.mul(x, 2, out=x)
            current = torch.cuda.current_stream()
            torch._C._CudaStreamBase.synchronize(current)  # deep inside

    x = torch.ones(N, device="cuda")
    layer = Layer()
    with use_stream(stream):
        layer(x)
        with pytest.raises(CaptureBrokenError) as caught, ost.capture(stream, trace=True):
            with contextlib.suppress(Exception):
                layer(x)
            _ = x.shape
    assert "deep inside" in (caught.value.location or ""), str(caught.value)
    assert_usable(cuda_device, stream)


def test_cupy_synchronising(cuda_device: Device, stream: ost.Stream) -> None:
    cupy = library("cupy")
    x = cupy.ones(N, cupy.float32)
    cupy.cuda.Device().synchronize()

    def culprit() -> None:
        cupy.cuda.runtime.streamSynchronize(stream.handle)  # the culprit

    said = found(cuda_device, stream, lambda: x.size, culprit)
    for where in said:
        assert "the culprit" in where and "test_trace_foreign.py" in where, said


def test_cupy_growing_its_pool(cuda_device: Device, stream: ost.Stream) -> None:
    cupy = library("cupy")

    def culprit() -> None:
        with cupy.cuda.using_allocator(None):  # straight from the driver
            cupy.empty(1 << 20, cupy.uint8)  # the culprit

    said = found(cuda_device, stream, lambda: None, culprit)
    for where in said:  # the innermost line is CuPy's own
        assert "the culprit" in where or "cupy" in where, said


def test_without_trace_the_error_says_how_to_find_it(
    cuda_device: Device, stream: ost.Stream
) -> None:
    cupy = library("cupy")
    x = cuda_device.zeros(N, np.float32)
    with pytest.raises(CaptureBrokenError, match="trace=True"), ost.capture(stream):
        with contextlib.suppress(Exception):
            cupy.cuda.runtime.streamSynchronize(stream.handle)
        with contextlib.suppress(ost.OstinatoError):
            _ = x.nbytes
    assert_usable(cuda_device, stream)
