"""A stand-in for a GPU's module calls: it "loads" real cubins by reading them.

It has what ModuleCache asks of a driver and nothing else.  A function's identity is the digest of
the code it came from, so a test can tell which kernel it was given.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
from pathlib import Path

import pytest

from ostinato.driver.api import (
    Capabilities,
    DeviceProperties,
    FunctionHandle,
    FunctionInfo,
    Image,
    ModuleHandle,
)
from ostinato.driver.context import Context
from ostinato.errors import InputError, NoCudaError, Status, driver_error
from ostinato.modules import ModuleCache
from ostinato.modules.compiler import toolchain
from ostinato.modules.cubin import KernelResources, kernel_resources


def needs_nvrtc() -> pytest.MarkDecorator:
    """Skips where the compiler is not installed."""
    reason = ""
    try:
        toolchain.file()
    except NoCudaError as error:
        reason = str(error)
    return pytest.mark.skipif(bool(reason), reason=reason)


class CubinLoader:
    name = "stand-in:0"
    cuda_context = None

    def __init__(self, capability: tuple[int, int] = (9, 0)) -> None:
        self.capabilities = Capabilities(
            conditional_nodes=False,
            conditional_branches=False,
            batch_memory_ops=False,
            memory_nodes=False,
            programmatic_launch=False,
            clusters=False,
            cooperative_launch=False,
            host_memory_is_device_memory=False,
            image_kinds=frozenset({"cubin", "ptx"}),
            source_language="cuda",
        )
        self.properties = DeviceProperties("stand-in", capability, 1, 0, 0, 1024, 49152, 0, "0")
        self.lock = threading.Lock()
        self.handles = itertools.count(1)
        self.modules: dict[int, dict[str, KernelResources]] = {}
        self.digests: dict[int, str] = {}
        self.functions: dict[int, FunctionInfo] = {}
        self.loads = 0
        self.forced: list[int] = []
        self.fail_with: list[Exception] = []

    def on_host_failure(self, listener: object) -> None: ...

    def unraised(self, patience: float) -> None: ...

    def synchronize(self) -> None: ...

    def function_prepare_launch(self, function: int, pack: object) -> None:
        """Nothing is launched here."""

    def close(self) -> None: ...

    def module_load(self, image: Image) -> ModuleHandle:
        if self.fail_with:
            raise self.fail_with.pop()
        with self.lock:
            self.loads += 1
            handle = ModuleHandle(next(self.handles))
            if image.kind == "ptx":
                if b".entry" not in image.data:
                    raise driver_error(Status.INVALID_PTX, "module_load", "ptxas: line 1: syntax")
                self.modules[handle] = {}
            else:
                try:
                    self.modules[handle] = {k.name: k for k in kernel_resources(image.data)}
                except InputError as error:
                    raise driver_error(Status.INVALID_IMAGE, "module_load", str(error)) from None
            self.digests[handle] = hashlib.sha256(image.data).hexdigest()
            return handle

    def module_unload(self, module: ModuleHandle) -> None:
        with self.lock:
            del self.modules[module]

    def module_functions(self, module: ModuleHandle) -> tuple[str, ...]:
        return tuple(self.modules[module])

    def module_function(self, module: ModuleHandle, name: str) -> FunctionHandle:
        with self.lock:
            if name not in self.modules[module]:
                raise driver_error(Status.NOT_FOUND, "module_function", name)
            kernel = self.modules[module][name]
            handle = FunctionHandle(next(self.handles))
            self.functions[handle] = FunctionInfo(
                name, kernel.parameters, kernel.max_threads or 1024, kernel.registers, 0, 0
            )
            return handle

    def function_info(self, function: FunctionHandle) -> FunctionInfo:
        return self.functions[function]

    def function_load(self, function: FunctionHandle) -> None:
        self.forced.append(function)


def make_cache(
    folder: Path | bool = False, *, capability: tuple[int, int] = (9, 0), **options: int
) -> tuple[ModuleCache, CubinLoader]:
    loader = CubinLoader(capability)
    return ModuleCache(Context(loader), disk=folder, **options), loader


def kernel_text(number: int, name: str = "k") -> str:
    """A kernel that differs from the others in its code, and by its parameters' number."""
    extra = "".join(f", int p{i}" for i in range(number))
    uses = "".join(f" + p{i}" for i in range(number))
    return f'extern "C" __global__ void {name}(int* x{extra}) {{ x[0] = {number}{uses}; }}\n'
