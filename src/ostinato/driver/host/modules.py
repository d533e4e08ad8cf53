"""Loaded modules of the host driver: their kernels, and the limits of a launch."""

from __future__ import annotations

import math
from collections.abc import Callable

from ostinato.driver.api import (
    FunctionCode,
    FunctionHandle,
    FunctionInfo,
    Image,
    KernelArguments,
    LaunchConfig,
    ModuleHandle,
)
from ostinato.driver.host.handles import invalid, new_handle
from ostinato.driver.host.kernel import HostKernel, kernel_at, target_of
from ostinato.errors import InputError, Status, driver_error
from ostinato.records import dataclass

MAX_THREADS = 1024
MAX_SHARED = 227 * 1024  # the limit of a block on an H100
_DEFAULT_SHARED = 48 * 1024
_MAX_GRID = (2**31 - 1, 65535, 65535)
_MAX_BLOCK = (1024, 1024, 64)
_MAX_CLUSTER = 8
_THREADS_OF_MULTIPROCESSOR = 2048
_BLOCKS_OF_MULTIPROCESSOR = 32


@dataclass(slots=True, eq=False)
class LoadedFunction:
    """A kernel of a loaded module.  A launch calls `call`; unloading replaces it."""

    handle: FunctionHandle
    kernel: HostKernel
    info: FunctionInfo
    call: Callable[..., object]
    allowed_shared: int = _DEFAULT_SHARED
    accepted_layout: object = None
    """The last argument layout that was found right; the same object is not checked again."""

    def unload(self) -> None:
        """Makes launches that run from now on raise ILLEGAL_ADDRESS, which poisons the driver."""
        name = self.kernel.name

        def gone(*_: object) -> None:
            raise driver_error(
                Status.ILLEGAL_ADDRESS, name, "the module of this kernel was unloaded before"
            )

        self.call = gone

    def allow_shared(self, call: str, nbytes: int) -> None:
        if not 0 <= nbytes <= MAX_SHARED - self.kernel.static_shared:
            raise invalid(call, f"{nbytes} of at most {MAX_SHARED} bytes")
        self.allowed_shared = max(nbytes, _DEFAULT_SHARED)

    def code(self, call: str) -> FunctionCode:
        """Returns the code.  Raises NOT_FOUND if another process could not find the kernel."""
        try:
            target = target_of(self.kernel)
        except InputError as error:
            raise driver_error(Status.NOT_FOUND, call, str(error)) from None
        shared = self.allowed_shared if self.allowed_shared > _DEFAULT_SHARED else 0
        return FunctionCode(self.info.name, "host", target=target, shared=shared)

    def occupancy(self, call: str, threads: int, shared: int) -> int:
        """Returns the number of blocks of `threads` and `shared` bytes in a multiprocessor."""
        if threads < 1 or shared < 0:
            raise invalid(call, f"{threads} threads, {shared} bytes of shared memory")
        if threads > self.kernel.max_threads:
            return 0
        blocks = min(_BLOCKS_OF_MULTIPROCESSOR, _THREADS_OF_MULTIPROCESSOR // threads)
        wanted = shared + self.kernel.static_shared
        return blocks if wanted == 0 else min(blocks, MAX_SHARED // wanted)

    def check(self, call: str, config: LaunchConfig, arguments: KernelArguments) -> None:
        """Raises INVALID_VALUE for a launch that the kernel or the device cannot execute."""
        kernel = self.kernel
        if arguments.layout is not self.accepted_layout:
            self._check_arguments(call, arguments)
        threads = config.threads_per_block
        if threads > kernel.max_threads or threads > MAX_THREADS:
            raise invalid(
                call,
                f"{kernel.name}: {threads} threads a block; it takes "
                f"{min(kernel.max_threads, MAX_THREADS)}",
            )
        shared = config.shared
        if shared and shared + kernel.static_shared > self.allowed_shared:
            raise invalid(
                call,
                f"{kernel.name}: {shared} bytes of shared memory; "
                f"{self.allowed_shared} are allowed (function_allow_shared)",
            )
        if config.block[2] > 64 or config.cluster is not None or max(config.grid) > 65535:
            self._check_sizes(call, config)

    def _check_sizes(self, call: str, config: LaunchConfig) -> None:
        sizes, cluster = (*config.grid, *config.block), config.cluster
        fits = all(size <= most for size, most in zip(sizes, _MAX_GRID + _MAX_BLOCK, strict=True))
        if cluster is not None:
            fits &= math.prod(cluster) <= _MAX_CLUSTER
            fits &= not any(size % part for size, part in zip(config.grid, cluster, strict=True))
        if not fits:
            raise invalid(call, f"{self.kernel.name}: launched as {config}")

    def _check_arguments(self, call: str, arguments: KernelArguments) -> None:
        kernel, layout = self.kernel, arguments.layout
        right = len(arguments.data) == kernel.size
        if layout or not arguments.packed:
            right = right and layout == kernel.layout
            if right:
                self.accepted_layout = layout
        if not right:
            raise invalid(
                call,
                f"{kernel.name} takes {[s.size for s in kernel.layout]} bytes of arguments, "
                f"and {[s.size for s in layout]} were given",
            )


class HostModule:
    """The kernels of an image by name, in the image's order."""

    def __init__(self, call: str, image: Image) -> None:
        """Raises INVALID_IMAGE for an image without kernels of the host."""
        _require_host(call, image.kind)
        self.handle = ModuleHandle(new_handle())
        self.functions: dict[str, LoadedFunction] = {}
        for name, kernel in image.functions.items():
            if not isinstance(kernel, HostKernel):
                detail = f"{name!r} is no HostKernel (use @host_kernel)"
                raise driver_error(Status.INVALID_IMAGE, call, detail)
            info = FunctionInfo(name, kernel.layout, kernel.max_threads, 0, kernel.static_shared, 0)
            handle = FunctionHandle(new_handle())
            self.functions[name] = LoadedFunction(handle, kernel, info, kernel.function)

    def function(self, call: str, name: str) -> LoadedFunction:
        """Returns a function.  Raises NOT_FOUND for a name that is not in the module."""
        found = self.functions.get(name)
        if found is None:
            known = ", ".join(self.functions) or "nothing"
            detail = f"{name!r} is not in the module, which has {known}"
            raise driver_error(Status.NOT_FOUND, call, detail)
        return found

    def unload(self) -> None:
        for function in self.functions.values():
            function.unload()


def _require_host(call: str, kind: str) -> None:
    if kind != "host":
        detail = f"the host driver takes no {kind!r} image"
        raise driver_error(Status.INVALID_IMAGE, call, detail)


def image_of(call: str, code: FunctionCode) -> Image:
    """Returns an image.  Raises INVALID_IMAGE for other code, and for a kernel not found here."""
    _require_host(call, code.kind)
    try:
        return Image("host", functions={code.name: kernel_at(code.target)})
    except InputError as error:
        raise driver_error(Status.INVALID_IMAGE, call, str(error)) from None
