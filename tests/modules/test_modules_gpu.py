"""Kernels on a real GPU: loading, preloading, captures, PTX that the driver refuses."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import numpy as np
import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.errors import CaptureBrokenError, CompileError, InputError
from ostinato.modules import ModuleCache
from tests.processes import python
from tests.sources import SOURCE, config

pytestmark = pytest.mark.gpu
N = 1000

PTX = """
.version 7.0
.target sm_80
.address_size 64
.visible .entry third(.param .u64 x) {
  .reg .f32 %f<3>;
  .reg .b64 %rd<3>;
  ld.param.u64 %rd1, [x];
  cvta.to.global.u64 %rd2, %rd1;
  ld.global.f32 %f1, [%rd2];
  DIVIDE %f2, %f1, 0f40400000;
  st.global.f32 [%rd2], %f2;
  ret;
}
"""


def ptx(text: str) -> ost.Source:
    return ost.Source(data=text, kind="ptx", name="third.ptx")


def fresh_cache(device: Device, folder: Path) -> ModuleCache:
    return ModuleCache(device.context, disk=folder)


def test_compiled_loaded_launched(cuda_device: Device, tmp_path: Path) -> None:
    stream = cuda_device.create_stream()
    x = cuda_device.array(np.arange(N, dtype=np.float32))
    for compiles in (1, 0):  # then from disk
        cache = fresh_cache(cuda_device, tmp_path)
        scale = cache.get_or_compile(SOURCE, "scale")
        ost.launch(stream, scale, config(N), x, N)
        assert cache.statistics().compiles == compiles
    assert (x.to_numpy(stream) == 4 * np.arange(N)).all()


def test_every_signature_fits(cuda_device: Device) -> None:
    for name, function in SOURCE.host.items():
        kernel = cuda_device.modules.get_or_compile(SOURCE, name)
        assert kernel.info.parameters == function.layout
        assert kernel.info.registers > 0 and kernel.occupancy(128) > 0


def test_a_wrong_signature_is_refused(cuda_device: Device) -> None:
    with pytest.raises(InputError, match="mend the signature"):
        cuda_device.modules.get_or_compile(SOURCE, "scale", signature="x: *f32, n: u64")


def test_large_shared_memory_is_allowed(cuda_device: Device) -> None:
    text = (
        'extern "C" __global__ void k(float* x) { extern __shared__ float s[];\n'
        "s[threadIdx.x + 16000] = 3; __syncthreads(); x[threadIdx.x] = s[threadIdx.x + 16000]; }"
    )
    stream = cuda_device.create_stream()
    kernel = cuda_device.modules.get_or_compile(text, "k")
    x = cuda_device.zeros(32, np.float32)
    kernel.allow_shared(65536)
    ost.launch(stream, kernel, ost.LaunchConfig(1, 32, shared=65536), x)
    assert (x.to_numpy(stream) == 3).all()


def test_templates_and_half_precision(cuda_device: Device) -> None:
    text = (
        "#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n"
        "template <class T> __global__ void one(T* x) { *x = T(1.f); }"
    )
    stream = cuda_device.create_stream()
    for name, bits in (("one<__half>", 0x3C00), ("one<__nv_bfloat16>", 0x3F80)):
        x = cuda_device.zeros(1, np.uint16)
        kernel = cuda_device.modules.get_or_compile(text, name)
        ost.launch(stream, kernel, ost.LaunchConfig(1, 1), x)
        assert x.to_numpy(stream)[0] == bits


# --------------------------------------------------------------------------------------- PTX (C5)


def test_ptx_with_a_rounding_mode_runs(cuda_device: Device) -> None:
    stream = cuda_device.create_stream()
    x = cuda_device.array(np.array([3], np.float32))
    kernel = cuda_device.modules.get_or_compile(ptx(PTX.replace("DIVIDE", "div.rn.f32")), "third")
    ost.launch(stream, kernel, ost.LaunchConfig(1, 1), x)
    assert x.to_numpy(stream)[0] == 1


def test_ptx_division_without_a_rounding_mode_shows_the_assemblers_words(
    cuda_device: Device,
) -> None:
    with pytest.raises(CompileError) as caught:
        cuda_device.modules.get_or_compile(ptx(PTX.replace("DIVIDE", "div.f32")), "third")
    assert "line 11" in caught.value.log and "div" in caught.value.log
    assert caught.value.log in str(caught.value)


def test_ptx_that_is_not_ascii_never_reaches_the_driver(cuda_device: Device) -> None:
    with pytest.raises(CompileError, match=r"third.ptx\(2\): column 4: byte 0xc3"):
        cuda_device.modules.get_or_compile(ptx("\n// é\n" + PTX), "third")


# ------------------------------------------------------------------------------ captures (C6, E5)

IN_A_FRESH_PROCESS = """
import sys
import numpy as np
import ostinato as ost
from ostinato.errors import CaptureBrokenError

device = ost.open_device("cuda:0")
stream = device.create_stream()
x = device.zeros(1, np.int32)
sources = [
    ost.Source(f'extern "C" __global__ void k(int* x) {{ atomicAdd(x, {n}); }}', name=f"s{n}")
    for n in range(50)
]
if sys.argv[1] == "preload":
    kept = device.modules.preload([(source, "k") for source in sources])
try:
    with ost.capture(stream) as capture:
        for source in sources:
            kernel = device.modules.get_or_compile(source, "k")
            ost.launch(stream, kernel, ost.LaunchConfig(1, 1), x)
except CaptureBrokenError as error:
    print("broken:", error)
    with ost.capture(stream) as capture:  # the stream works again
        pass
else:
    capture.graph.instantiate().launch(stream)
    print("sum:", x.to_numpy(stream)[0])
"""


def run_fresh(how: str, folder: Path) -> str:
    environ = {"CUDA_MODULE_LOADING": "LAZY", "OSTINATO_CACHE_DIR": str(folder)}
    answer = python("-c", IN_A_FRESH_PROCESS, how, **environ)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout + answer.stderr


def test_fifty_kernels_preloaded_are_captured(cuda_device: Device, tmp_path: Path) -> None:
    assert "sum: 1225" in run_fresh("preload", tmp_path)


def test_without_preload_it_says_preload(cuda_device: Device, tmp_path: Path) -> None:
    # Driver 580 allows the load and gives the right answer; others break the capture.
    said = run_fresh("lazily", tmp_path)
    assert "sum: 1225" in said or said.startswith("broken:")
    assert "preload" in said


def test_loading_in_a_capture_says_where(
    cuda_device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    stream = cuda_device.create_stream()
    x = cuda_device.zeros(4, "bytes")
    said = ""
    try:
        with ost.capture(stream):
            ost.fill(stream, x, 1)
            cuda_device.modules.get_or_compile("__global__ void never_before() {}", "never_before")
    except CaptureBrokenError as error:
        said = str(error) + str(error.location)
    said += caplog.text
    assert "preload" in said
    assert "test_modules_gpu.py" in said
    with ost.capture(stream):  # the stream works either way
        ost.fill(stream, x, 1)


def test_a_graph_keeps_its_kernels_loaded(cuda_device: Device, tmp_path: Path) -> None:
    stream = cuda_device.create_stream()
    x = cuda_device.array(np.ones(N, np.float32))
    cache = ModuleCache(cuda_device.context, disk=tmp_path, max_modules=1)
    scale = cache.get_or_compile(SOURCE, "scale")
    module = weakref.ref(scale.module)
    with ost.capture(stream) as capture:
        ost.launch(stream, scale, config(N), x, N)
    run = capture.graph.instantiate()
    del scale, capture
    cache.get_or_compile('extern "C" __global__ void other() {}', "other")
    cache.close()
    gc.collect()
    cuda_device.synchronize()
    assert module() is not None
    run.launch(stream)
    assert (x.to_numpy(stream) == 2).all()
    run.close()
    del run
    gc.collect()
    cuda_device.synchronize()
    assert module() is None
