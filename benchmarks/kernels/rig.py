"""A GPU behind the few driver calls that these measurements need, through ctypes.

It is not the library's own driver, on purpose: only the kernels are measured and checked here.
"""

from __future__ import annotations

import ctypes
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import numpy as np

from ostinato.models.cuda.lowering import CudaLaunch
from ostinato.models.cuda.shapes import has_fast_memory
from ostinato.modules import CompileOptions, Source
from ostinato.modules.compiler import compile_plan, plan_compilation

_CLUSTER, _COOPERATIVE, _PROGRAMMATIC = 4, 2, 6
_MAX_DYNAMIC_SHARED = 8
_THREAD_LOCAL = 1


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16)]


class _Config(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


@dataclass(frozen=True)
class Memory:
    """Device memory with a shape and a dtype; indexing returns a part of it."""

    address: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def __getitem__(self, index: int | slice) -> Memory:
        rest = self.shape[1:]
        size = int(np.prod(rest, dtype=np.int64)) * self.dtype.itemsize
        if isinstance(index, slice):
            start, stop, _ = index.indices(self.shape[0])
            return Memory(self.address + start * size, (max(0, stop - start), *rest), self.dtype)
        return Memory(self.address + index * size, rest, self.dtype)


def _compile_parts(parts: tuple[Any, ...]) -> bytes:
    cuda, signatures, headers, name, defines, capability = parts
    source = Source(cuda, signatures=signatures, headers=headers, name=name)
    return compile_plan(plan_compilation(source, CompileOptions(defines=defines), capability)).data


class Gpu:
    """Device 0.  Every method raises RuntimeError with the driver's status if a call fails."""

    name = "cuda"

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._call("cuInit", 0)
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)
        self.stream = ctypes.c_void_p()
        self._call("cuStreamCreate", ctypes.byref(self.stream), 1)
        self.capability = (self._attribute(75, device), self._attribute(76, device))
        self.multiprocessors = self._attribute(16, device)
        clock, width = 1000 * self._attribute(36, device), self._attribute(37, device)
        self.fast_memory = has_fast_memory(clock * 2 * width // 8, self.multiprocessors)
        name = ctypes.create_string_buffer(100)
        self._call("cuDeviceGetName", name, 100, device)
        self.device_name = name.value.decode()
        self._functions: dict[tuple[Source, CompileOptions, str], ctypes.c_void_p] = {}
        self._images: dict[tuple[Source, CompileOptions], bytes] = {}
        self._modules: dict[tuple[Source, CompileOptions], ctypes.c_void_p] = {}
        self._blocks: list[ctypes.c_void_p] = []

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._cuda, name)(*arguments)
        if status:
            raise RuntimeError(f"{name} gave status {status}")

    def _attribute(self, which: int, device: ctypes.c_int) -> int:
        value = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(value), which, device)
        return value.value

    # --- memory
    def empty(self, shape: Sequence[int], dtype: Any) -> Memory:
        made = Memory(0, tuple(shape), np.dtype(dtype))
        pointer = ctypes.c_void_p()
        size = ctypes.c_size_t(max(16, made.nbytes))
        self._call("cuMemAlloc_v2", ctypes.byref(pointer), size)
        self._blocks.append(pointer)
        return Memory(int(pointer.value or 0), made.shape, made.dtype)

    def array(self, values: np.ndarray) -> Memory:
        made = self.empty(values.shape, values.dtype)
        self.write(made, values)
        return made

    def free_all(self) -> None:
        self.synchronize()
        for block in self._blocks:
            self._call("cuMemFree_v2", block)
        self._blocks.clear()

    def write(self, memory: Memory, values: np.ndarray) -> None:
        data = np.ascontiguousarray(values, memory.dtype)
        assert data.nbytes == memory.nbytes
        self.synchronize()
        self._call(
            "cuMemcpyHtoD_v2",
            ctypes.c_void_p(memory.address),
            ctypes.c_void_p(data.ctypes.data),
            ctypes.c_size_t(data.nbytes),
        )

    def read(self, memory: Memory) -> np.ndarray:
        values = np.empty(memory.shape, memory.dtype)
        self.synchronize()
        self._call(
            "cuMemcpyDtoH_v2",
            ctypes.c_void_p(values.ctypes.data),
            ctypes.c_void_p(memory.address),
            ctypes.c_size_t(values.nbytes),
        )
        return values

    def copy(self, target: int, source: int, nbytes: int) -> None:
        self._call(
            "cuMemcpyDtoD_v2",
            ctypes.c_void_p(target),
            ctypes.c_void_p(source),
            ctypes.c_size_t(nbytes),
        )

    def pinned(self, values: np.ndarray) -> tuple[Memory, np.ndarray]:
        """Makes pinned host memory with these values.  Returns it as device memory, and as an array
        of the host."""
        pointer = ctypes.c_void_p()
        size = ctypes.c_size_t(values.nbytes)
        self._call("cuMemHostAlloc", ctypes.byref(pointer), size, 1)
        address = int(pointer.value or 0)
        raw = (ctypes.c_char * values.nbytes).from_address(address)
        host = np.frombuffer(raw, values.dtype).reshape(values.shape)
        host[...] = values
        return Memory(address, values.shape, values.dtype), host

    # --- kernels
    def preload(self, launches: Sequence[CudaLaunch]) -> None:
        """Compiles on all cores, in processes: NVRTC compiles one program at a time in each."""
        wanted = list({(one.source, one.options): None for one in launches})
        wanted = [key for key in wanted if key not in self._images]
        if not wanted:
            return
        count = min(os.cpu_count() or 1, len(wanted), 32)
        parts = [
            (s.cuda, dict(s.signatures), dict(s.headers), s.name, o.defines, self.capability)
            for s, o in wanted
        ]
        with ProcessPoolExecutor(count, mp_context=get_context("spawn")) as pool:
            self._images |= zip(wanted, pool.map(_compile_parts, parts), strict=True)

    def _compile(self, source: Source, options: CompileOptions) -> bytes:
        return compile_plan(plan_compilation(source, options, self.capability)).data

    def _function(self, launch: CudaLaunch) -> ctypes.c_void_p:
        key = (launch.source, launch.options, launch.kernel)
        function = self._functions.get(key)
        if function is None:
            module_key = key[:2]
            if module_key not in self._modules:
                if module_key not in self._images:
                    self._images[module_key] = self._compile(*module_key)
                module = ctypes.c_void_p()
                image = self._images[module_key]
                self._call("cuModuleLoadData", ctypes.byref(module), image)
                self._modules[module_key] = module
            function = ctypes.c_void_p()
            self._call(
                "cuModuleGetFunction",
                ctypes.byref(function),
                self._modules[module_key],
                launch.kernel.encode(),
            )
            self._functions[key] = function
        if launch.config.shared > 40 * 1024:  # with static shared memory it may exceed 48 KiB
            self._call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED, launch.config.shared)
        return function

    def launch(self, launch: CudaLaunch, values: Mapping[str, Any]) -> None:
        """Launches a kernel.  `values`: `Memory` or numbers, by parameter name."""
        holders: list[Any] = []
        for parameter in launch.signature.parameters:
            value = values[parameter.name]
            if parameter.pointer:  # a number stands for the null pointer
                holders.append(ctypes.c_void_p(getattr(value, "address", value)))
            elif parameter.type == "f32":
                holders.append(ctypes.c_float(value))
            else:
                holders.append(ctypes.c_uint32(value))
        pointers = (ctypes.c_void_p * len(holders))(*[ctypes.addressof(h) for h in holders])
        config, attributes = launch.config, []
        if config.programmatic:
            attributes.append((_PROGRAMMATIC, (1,)))
        if config.cooperative:
            attributes.append((_COOPERATIVE, (1,)))
        if config.cluster is not None:
            attributes.append((_CLUSTER, config.cluster))
        table = (_Attribute * max(1, len(attributes)))()
        for slot, (identity, words) in zip(table, attributes, strict=False):
            slot.id = identity
            for index, word in enumerate(words):
                slot.value[index] = word
        raw = _Config(
            (ctypes.c_uint * 3)(*config.grid),
            (ctypes.c_uint * 3)(*config.block),
            config.shared,
            self.stream,
            table,
            len(attributes),
        )
        function = self._function(launch)
        self._call("cuLaunchKernelEx", ctypes.byref(raw), function, pointers, None)

    def synchronize(self) -> None:
        self._call("cuStreamSynchronize", self.stream)

    # --- graphs and time
    def capture(self, submit: Callable[[], None]) -> ctypes.c_void_p:
        """Captures the launches of `submit` to a graph, and instantiates it."""
        submit()  # loads everything first
        self.synchronize()
        self._call("cuStreamBeginCapture_v2", self.stream, _THREAD_LOCAL)
        try:
            submit()
        finally:
            graph = ctypes.c_void_p()
            self._call("cuStreamEndCapture", self.stream, ctypes.byref(graph))
        executable = ctypes.c_void_p()
        self._call(
            "cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, ctypes.c_ulonglong(0)
        )
        self._call("cuGraphDestroy", graph)
        self._call("cuGraphUpload", executable, self.stream)
        return executable

    def replay(self, executable: ctypes.c_void_p) -> None:
        self._call("cuGraphLaunch", executable, self.stream)

    def destroy(self, executable: ctypes.c_void_p) -> None:
        self.synchronize()
        self._call("cuGraphExecDestroy", executable)

    def time(
        self,
        executable: ctypes.c_void_p,
        *,
        repeats: int = 50,
        rounds: int = 5,
        before: Callable[[], None] | None = None,
    ) -> float:
        """Returns the median over rounds of the µs of one replay; calls `before` before each
        round."""
        start, stop = ctypes.c_void_p(), ctypes.c_void_p()
        for event in (start, stop):
            self._call("cuEventCreate", ctypes.byref(event), 0)
        found = []
        for _ in range(rounds):
            if before is not None:
                before()
            for _ in range(3):
                self.replay(executable)
            self._call("cuEventRecord", start, self.stream)
            for _ in range(repeats):
                self.replay(executable)
            self._call("cuEventRecord", stop, self.stream)
            self.synchronize()
            elapsed = ctypes.c_float()
            self._call("cuEventElapsedTime", ctypes.byref(elapsed), start, stop)
            found.append(elapsed.value * 1e3 / repeats)
        for event in (start, stop):
            self._call("cuEventDestroy_v2", event)
        return statistics.median(found)
