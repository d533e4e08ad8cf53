"""The modules and kernels of the host driver, and the checks of node parameters."""

from __future__ import annotations

from collections.abc import Callable

from ostinato.driver.api import (
    BatchMemOpNodeParams,
    EventRecordNodeParams,
    EventWaitNodeParams,
    FunctionHandle,
    FunctionInfo,
    HostNodeParams,
    Image,
    KernelArguments,
    KernelNodeParams,
    LaunchConfig,
    MemcpyNodeParams,
    MemsetNodeParams,
    ModuleHandle,
    NodeParams,
    Pack,
    PlainLaunch,
    StreamHandle,
)
from ostinato.driver.host.core import HostCore
from ostinato.driver.host.definition import new_handle, refuse_opaque
from ostinato.driver.host.kernel import HostKernel
from ostinato.driver.host.work import (
    Conditions,
    LoadedFunction,
    Step,
    batch_step,
    host_step,
    kernel_step,
    memcpy_step,
    memset_step,
    nothing,
)
from ostinato.errors import Status, driver_error

__all__ = ["MAX_SHARED", "MAX_THREADS", "ModuleCalls"]

MAX_THREADS = 1024
MAX_SHARED = 227 * 1024  # what an H100 can give a block
_DEFAULT_SHARED = 48 * 1024
_MAX_GRID = (2**31 - 1, 65535, 65535)
_MAX_BLOCK = (1024, 1024, 64)
_MAX_CLUSTER = 8
_THREADS_OF_MULTIPROCESSOR = 2048
_BLOCKS_OF_MULTIPROCESSOR = 32


class ModuleCalls(HostCore):
    def module_load(self, image: Image) -> ModuleHandle:
        call = "module_load"
        self._enter(call)
        self._forbid(call)
        if image.kind != "host":
            raise driver_error(
                Status.INVALID_IMAGE, call, f"the host driver takes no {image.kind!r} image"
            )
        for name, kernel in image.functions.items():
            if not isinstance(kernel, HostKernel):
                raise driver_error(
                    Status.INVALID_IMAGE, call, f"{name!r} is no HostKernel (use @host_kernel)"
                )
        with self._lock:
            module = ModuleHandle(new_handle())
            functions: dict[str, LoadedFunction] = {}
            for name, kernel in image.functions.items():
                assert isinstance(kernel, HostKernel)
                info = FunctionInfo(
                    name, kernel.layout, kernel.max_threads, 0, kernel.static_shared, 0
                )
                handle = new_handle()
                functions[name] = self._functions[handle] = LoadedFunction(
                    handle, kernel, info, kernel.function, _DEFAULT_SHARED, module
                )
            self._modules[module] = functions
            return module

    def _module(self, call: str, module: ModuleHandle) -> dict[str, LoadedFunction]:
        functions = self._modules.get(module)
        if functions is None:
            raise driver_error(Status.INVALID_HANDLE, call, f"module {module:#x}")
        return functions

    def module_unload(self, module: ModuleHandle) -> None:
        call = "module_unload"
        self._enter(call)
        self._module(call, module)
        self._forbid(call)
        self._wait_for_all()
        self._raise_failure(call)
        with self._lock:
            for function in self._module(call, module).values():
                function.unload()
                del self._functions[function.handle]
            del self._modules[module]

    def module_functions(self, module: ModuleHandle) -> tuple[str, ...]:
        call = "module_functions"
        with self._entered(call):
            return tuple(self._module(call, module))

    def module_function(self, module: ModuleHandle, name: str) -> FunctionHandle:
        call = "module_function"
        with self._entered(call):
            functions = self._module(call, module)
            if name not in functions:
                known = ", ".join(functions) or "nothing"
                raise driver_error(
                    Status.NOT_FOUND, call, f"{name!r} is not in the module, which has {known}"
                )
            return FunctionHandle(functions[name].handle)

    def function_info(self, function: FunctionHandle) -> FunctionInfo:
        call = "function_info"
        self._enter(call)
        return self._function(call, function).info

    def function_prepare_launch(self, function: FunctionHandle, pack: Pack) -> PlainLaunch | None:
        return None

    def function_load(self, function: FunctionHandle) -> None:
        call = "function_load"
        self._enter(call)
        self._function(call, function)

    def function_allow_shared(self, function: FunctionHandle, nbytes: int) -> None:
        call = "function_allow_shared"
        with self._entered(call):
            loaded = self._function(call, function)
            if not 0 <= nbytes <= MAX_SHARED - loaded.kernel.static_shared:
                raise driver_error(
                    Status.INVALID_VALUE, call, f"{nbytes} of at most {MAX_SHARED} bytes"
                )
            loaded.allowed_shared = max(nbytes, _DEFAULT_SHARED)

    def function_occupancy(self, function: FunctionHandle, threads: int, shared: int) -> int:
        call = "function_occupancy"
        self._enter(call)
        loaded = self._function(call, function)
        if threads < 1 or shared < 0:
            raise driver_error(
                Status.INVALID_VALUE, call, f"{threads} threads, {shared} bytes of shared memory"
            )
        if threads > loaded.kernel.max_threads:
            return 0
        blocks = min(_BLOCKS_OF_MULTIPROCESSOR, _THREADS_OF_MULTIPROCESSOR // threads)
        wanted = shared + loaded.kernel.static_shared
        return blocks if wanted == 0 else min(blocks, MAX_SHARED // wanted)

    def launch_kernel(
        self,
        stream: StreamHandle,
        function: FunctionHandle,
        config: LaunchConfig,
        arguments: KernelArguments,
    ) -> None:
        call = "launch_kernel"
        self._enter(call)
        target = self._stream(call, stream)
        self._submit(call, target, KernelNodeParams(function, config, arguments))

    # --- parameters

    def _check_params(self, call: str, params: NodeParams) -> None:
        """Raises CUDA's error for parameters that are wrong in every stream and graph."""
        match params:
            case KernelNodeParams():
                self._check_kernel(call, params)
            case MemcpyNodeParams():
                refuse_opaque(params, call)
                if (
                    min(params.width, params.height, params.depth) < 1
                    or min(params.dst_pitch, params.src_pitch, params.dst_height, params.src_height)
                    < 0
                ):
                    raise driver_error(Status.INVALID_VALUE, call, f"{params}")
                rows = (
                    (params.dst_pitch, params.dst_height),
                    (params.src_pitch, params.src_height),
                )
                for pitch, height in rows:
                    if 0 < pitch < params.width or 0 < height < params.height:
                        raise driver_error(Status.INVALID_VALUE, call, f"rows overlap: {params}")
            case MemsetNodeParams():
                self._check_memset(call, params)
            case HostNodeParams(function=None):
                raise driver_error(Status.INVALID_VALUE, call, "a host node needs a function")
            case EventRecordNodeParams() | EventWaitNodeParams():
                self._event(call, params.event)
            case BatchMemOpNodeParams():
                if not params.operations:
                    raise driver_error(Status.INVALID_VALUE, call, "no operations")
                for operation in params.operations:
                    if operation.size not in (4, 8) or operation.address % operation.size:
                        raise driver_error(Status.INVALID_VALUE, call, f"{operation}")
            case _:
                refuse_opaque(params, call)

    def _check_memset(self, call: str, params: MemsetNodeParams) -> None:
        size = params.element_size
        if (
            size not in (1, 2, 4)
            or params.width < 1
            or params.height < 1
            or not 0 <= params.value < 1 << 8 * size
            or params.dst % size
            or (params.height > 1 and (params.pitch < params.width * size or params.pitch % size))
        ):
            raise driver_error(Status.INVALID_VALUE, call, f"{params}")

    def _check_kernel(self, call: str, params: KernelNodeParams) -> None:
        function = self._function(call, params.function)
        arguments, config = params.arguments, params.config
        if arguments.layout is not function.accepted_layout:
            self._check_arguments(call, function, arguments)
        threads = config.threads_per_block
        if threads > function.kernel.max_threads or threads > MAX_THREADS:
            raise driver_error(
                Status.INVALID_VALUE,
                call,
                f"{function.kernel.name}: {threads} threads a block; it takes "
                f"{min(function.kernel.max_threads, MAX_THREADS)}",
            )
        shared = config.shared
        if shared and shared + function.kernel.static_shared > function.allowed_shared:
            raise driver_error(
                Status.INVALID_VALUE,
                call,
                f"{function.kernel.name}: {shared} bytes of shared memory; "
                f"{function.allowed_shared} are allowed (function_allow_shared)",
            )
        if config.block[2] > 64 or config.cluster is not None or max(config.grid) > 65535:
            self._check_sizes(call, function, config)

    def _check_sizes(self, call: str, function: LoadedFunction, config: LaunchConfig) -> None:
        fits = all(size <= most for size, most in zip(config.grid, _MAX_GRID, strict=True))
        fits &= all(size <= most for size, most in zip(config.block, _MAX_BLOCK, strict=True))
        if config.cluster is not None:
            x, y, z = config.cluster
            fits &= x * y * z <= _MAX_CLUSTER
            fits &= not any(
                size % part for size, part in zip(config.grid, config.cluster, strict=True)
            )
        if not fits:
            raise driver_error(
                Status.INVALID_VALUE, call, f"{function.kernel.name}: launched as {config}"
            )

    def _check_arguments(
        self, call: str, function: LoadedFunction, arguments: KernelArguments
    ) -> None:
        kernel = function.kernel
        if arguments.packed and not arguments.layout:
            right = len(arguments.data) == kernel.size
        else:
            right = arguments.layout == kernel.layout and len(arguments.data) == kernel.size
            if right:
                function.accepted_layout = arguments.layout
        if not right:
            raise driver_error(
                Status.INVALID_VALUE,
                call,
                f"{kernel.name} takes {[s.size for s in kernel.layout]} bytes of arguments, "
                f"and {[s.size for s in arguments.layout]} were given",
            )

    def _step(self, call: str, params: NodeParams, conditions: Conditions | None = None) -> Step:
        """The step of work that does not depend on the graph it may be in."""
        context = self._context
        match params:
            case KernelNodeParams():
                function = self._function(call, params.function)
                return kernel_step(context, function, params, conditions)
            case MemcpyNodeParams():
                return memcpy_step(context, params)
            case MemsetNodeParams():
                return memset_step(context, params)
            case HostNodeParams():
                function_: Callable[[], object] | None = params.function
                assert function_ is not None, "checked when it was submitted or added"
                return host_step(function_)
            case BatchMemOpNodeParams():
                return batch_step(context, params.operations)
            case _:
                return nothing
