"""The CUDA driver's modules, functions and eager launches.

Modules are CUmodule and not CUlibrary: a module belongs to one context, as a driver here does, its
functions are CUfunction, which every launch and graph call takes, and unloading is immediate.
Lazy loading is the same for both; `function_load` ends it.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from contextlib import suppress
from ctypes import byref
from functools import partial
from typing import TYPE_CHECKING

from ostinato.driver.api import (
    FunctionCode,
    FunctionHandle,
    FunctionInfo,
    Image,
    KernelArguments,
    LaunchConfig,
    ModuleHandle,
    Pack,
    ParameterSlot,
    PlainLaunch,
    StreamHandle,
)
from ostinato.driver.cuda import collecting
from ostinato.driver.cuda.core import CudaCalls
from ostinato.driver.cuda.launch import PreparedLaunch, attributes_of, launch_block
from ostinato.driver.cuda.libcuda import Libcuda, in_words
from ostinato.driver.launcher import KernelTarget, function_call, kernel_call
from ostinato.errors import DriverError, NotAvailableError, Status

if TYPE_CHECKING:
    from ostinato.driver.cuda.variables import ModuleVariable

IMAGE_KINDS = frozenset({"cubin", "ptx", "fatbin"})

# CUjit_option: buffers for the assembler's reasons why a PTX does not assemble.
_JIT_INFO_LOG, _JIT_INFO_LOG_SIZE, _JIT_ERROR_LOG, _JIT_ERROR_LOG_SIZE = 3, 4, 5, 6
_LOG_BYTES = 16 * 1024

# CUfunction_attribute
_MAX_THREADS, _STATIC_SHARED, _LOCAL, _REGISTERS, _MAX_DYNAMIC_SHARED = 0, 1, 3, 4, 8
_CARVEOUT, _WIDE_CLUSTERS = 9, 14
_OF_THE_CODE = (2, 5, 6, 10, 11, 12, 13)
"""Bytes of constants, versions of PTX and of the code, the cluster that the kernel requires."""
_EVERY_FUNCTION_SHARED = 48 * 1024

_MAX_PREPARED = 4096

# Statuses for an image of a compiler that is newer than the driver, among other causes.
_NOT_FOR_THIS_DRIVER = frozenset(
    {Status.INVALID_IMAGE, Status.NO_BINARY_FOR_GPU, Status.UNSUPPORTED_PTX_VERSION}
)


class ModuleCalls(CudaCalls):
    """Modules, functions and launches."""

    def __init__(self, lib: Libcuda, context: int, ordinal: int) -> None:
        super().__init__(lib, context, ordinal)
        self._addresses = lib.address("cuLaunchKernelEx"), lib.address("cuCtxGetCurrent")
        self._functions_of: dict[int, dict[str, FunctionHandle]] = {}
        """The functions, by name, that were looked up in each module loaded here."""
        self._images: dict[int, Image] = {}
        """The images of these modules."""
        self._infos: dict[int, FunctionInfo] = {}
        """Data of functions of these modules only: another library may reuse a handle."""
        self._layouts: dict[int, tuple[ParameterSlot, ...]] = {}
        """Layouts of functions of these modules only."""
        self._prepared: dict[int, PreparedLaunch] = {}
        """The last launch by the identity of its arguments, which the entry keeps alive."""

    def module_load(self, image: Image) -> ModuleHandle:
        seam = "module_load"
        if image.kind not in IMAGE_KINDS:
            detail = f"an image of kind {image.kind!r}; this driver takes cubin, ptx and fatbin"
            raise self._error(Status.INVALID_IMAGE, seam, detail)
        data = ctypes.c_char_p(image.data)  # no copy; it ends with the zero byte that PTX needs
        information = ctypes.create_string_buffer(_LOG_BYTES)
        errors = ctypes.create_string_buffer(_LOG_BYTES)
        options = (ctypes.c_int * 4)(
            _JIT_INFO_LOG, _JIT_INFO_LOG_SIZE, _JIT_ERROR_LOG, _JIT_ERROR_LOG_SIZE
        )
        # The driver takes the sizes by value, in place of pointers.
        values = (ctypes.c_void_p * 4)(
            ctypes.addressof(information), _LOG_BYTES, ctypes.addressof(errors), _LOG_BYTES
        )
        module = ctypes.c_uint64()
        status = self._status(seam, "cuModuleLoadDataEx", byref(module), data, 4, options, values)
        if status:
            detail = errors.value.decode("utf-8", "replace").strip()
            if status in _NOT_FOR_THIS_DRIVER:
                detail += ("; " if detail else "") + (
                    f"this driver is for CUDA {in_words(self._lib.version)}, and loads cubins of "
                    f"compilers up to CUDA {self._lib.version[0]}.x and PTX of compilers up to its "
                    "own version (`ostinato doctor` names the compiler)"
                )
            raise self._error(status, seam, detail)
        self._functions_of[module.value] = {}
        self._images[module.value] = image
        return ModuleHandle(module.value)

    def module_unload(self, module: ModuleHandle) -> None:
        # First: once the handles are free, the driver may give them to another thread's objects.
        functions = self._functions_of.pop(module, {})
        image = self._images.pop(module, None)
        for function in functions.values():
            self._infos.pop(function, None)
            self._layouts.pop(function, None)
        self._prepared.clear()
        try:
            self._call("module_unload", "cuModuleUnload", module)
        except DriverError:
            if image is not None:
                self._functions_of[module], self._images[module] = functions, image
            raise

    def module_functions(self, module: ModuleHandle) -> tuple[str, ...]:
        seam = "module_functions"
        count = ctypes.c_uint()
        self._call(seam, "cuModuleGetFunctionCount", byref(count), module)
        functions = (ctypes.c_uint64 * count.value)()
        if count.value:
            self._call(seam, "cuModuleEnumerateFunctions", functions, count.value, module)
        return tuple(self._function_name(seam, function) for function in functions)

    def module_function(self, module: ModuleHandle, name: str) -> FunctionHandle:
        seam, symbol, function = "module_function", "cuModuleGetFunction", ctypes.c_uint64()
        status = self._status(seam, symbol, byref(function), module, name.encode())
        if status:
            raise self._error(status, seam, f"entry {name!r}")
        handle = FunctionHandle(function.value)
        self._functions_of.setdefault(module, {})[name] = handle
        if handle not in self._layouts:
            self._layouts[handle] = self._parameter_layout(seam, handle)
        return handle

    def function_info(self, function: FunctionHandle) -> FunctionInfo:
        known = self._infos.get(function)
        if known is not None:
            return known
        seam, attribute = "function_info", partial(self._function_attribute, function)
        info = FunctionInfo(
            name=self._function_name(seam, function),
            parameters=self._parameter_layout(seam, function),
            max_threads_per_block=attribute(_MAX_THREADS),
            registers=attribute(_REGISTERS),
            static_shared=attribute(_STATIC_SHARED),
            local=attribute(_LOCAL),
        )
        if function in self._layouts:
            self._infos[function] = info
        return info

    def function_load(self, function: FunctionHandle) -> None:
        self._call("function_load", "cuFuncLoad", function)

    def function_allow_shared(self, function: FunctionHandle, nbytes: int) -> None:
        self._call(
            "function_allow_shared", "cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED, nbytes
        )

    def function_code(self, function: FunctionHandle) -> FunctionCode:
        seam = "function_code"
        name = self._function_name(seam, function)
        image = self._image_of(function, name)
        self._require_first_content(function, name, image)
        shared = self._function_attribute(function, _MAX_DYNAMIC_SHARED)
        return FunctionCode(
            name,
            image.kind,
            image.data,
            shared=shared if shared > _EVERY_FUNCTION_SHARED else 0,
            carveout=self._function_attribute(function, _CARVEOUT),
            wide_clusters=bool(self._function_attribute(function, _WIDE_CLUSTERS)),
        )

    def _require_first_content(self, function: int, name: str, image: Image) -> None:
        """Raises NOT_FOUND if a variable of the function's module was changed: a file has only its
        first content.  Waits for the device."""
        from ostinato.driver.cuda.variables import same_content, variables_of

        try:
            variables = variables_of(image.data) if image.kind == "cubin" else ()
        except (ValueError, IndexError, struct.error):
            variables = ()
        if not variables:
            return
        seam = "function_code"
        module = self._handle(seam, "cuFuncGetModule", function)
        self._call(seam, "cuCtxSynchronize")
        now = self._variables(module, variables)
        differing = [
            v.name for v in variables if not v.content.startswith(now.get(v.name, (0, b""))[1])
        ]
        if not differing:
            return
        # The loader writes addresses into variables: load the same code again, to compare.
        fresh = self.module_load(image)
        try:
            first = self._variables(fresh, variables)
        finally:
            self.module_unload(fresh)
        for variable in differing:
            if not same_content(variable, now, first):
                found = self._in_short(now[variable][1], first.get(variable, (0, b""))[1])
                detail = (
                    f"the module of {name} has a variable, {variable}, that was changed after "
                    "it was loaded, and a file has its first value alone; keep the value in a "
                    f"buffer, and give the kernel its address ({found})"
                )
                raise self._error(Status.NOT_FOUND, seam, detail)

    def _in_short(self, content: bytes, first: bytes) -> str:
        """Describes the content of a changed variable."""
        changed = sum(a != b for a, b in zip(content, first, strict=False))
        words = [content[at : at + 8] for at in range(0, len(content) - 7, 8)]
        live = sum(self.memory_range(int.from_bytes(word, "little")) is not None for word in words)
        return f"{changed} of its {len(content)} bytes; {live} words are addresses of live memory"

    def _variables(
        self, module: int, variables: Sequence[ModuleVariable]
    ) -> dict[str, tuple[int, bytes]]:
        """Returns the addresses and contents of the variables of a loaded module."""
        seam = "function_code"
        found = {}
        for variable in variables:
            address, size = ctypes.c_uint64(), ctypes.c_size_t()
            out = byref(address), byref(size)
            symbol = variable.name.encode()
            if self._status(seam, "cuModuleGetGlobal_v2", *out, module, symbol):
                continue  # the driver does not export it, like the compiler's own variables
            content = bytearray(min(size.value, len(variable.content)))
            if content:
                self.memcpy_to_host(memoryview(content), address.value, StreamHandle(0))
                found[variable.name] = address.value, bytes(content)
        return found

    def _image_of(self, function: int, name: str) -> Image:
        """Returns the image of a function.  Raises NOT_FOUND with the reason."""
        for module, functions in [*self._functions_of.items()]:  # other threads load modules
            if function in functions.values() and module in self._images:
                return self._images[module]
        try:
            found = collecting.cubins_with(name)
        except NotAvailableError as error:
            raise self._error(Status.NOT_FOUND, "function_code", str(error)) from None
        if len(found) > 1:
            # Several modules have a kernel of this name (Triton's do, compiled for other sizes).
            looks = self._looks(function)
            found = [data for data in found if self._looks_in(data, name) == looks]
        if len(found) != 1:
            detail = (
                f"{len(found)} modules have a kernel {name} with the same registers, memory and "
                "parameters, so which of them was captured is not known; capture in a process "
                "that loads only one of them"
            )
            raise self._error(Status.NOT_FOUND, "function_code", detail)
        return Image("cubin", found[0])

    def _looks(self, function: int) -> tuple[object, ...]:
        """Returns the properties by which the driver distinguishes kernels of one name."""
        attributes = (_MAX_THREADS, _STATIC_SHARED, _LOCAL, _REGISTERS, *_OF_THE_CODE)
        values = [self._function_attribute(function, attribute) for attribute in attributes]
        return (*values, self._parameter_layout("function_code", function))

    def _looks_in(self, cubin: bytes, name: str) -> tuple[object, ...]:
        module = self.module_load(Image("cubin", cubin))
        try:
            return self._looks(self.module_function(module, name))
        finally:
            self.module_unload(module)

    def code_image(self, code: FunctionCode) -> Image:
        if code.kind not in IMAGE_KINDS:
            detail = f"this driver takes no {code.kind!r} image"
            raise self._error(Status.INVALID_IMAGE, "code_image", detail)
        return Image(code.kind, code.data)

    def function_restore(self, function: FunctionHandle, code: FunctionCode) -> None:
        # Never below the value that another graph of this function needs.
        values = {_MAX_DYNAMIC_SHARED: code.shared, _WIDE_CLUSTERS: int(code.wide_clusters)}
        wanted = {
            attribute: value
            for attribute, value in values.items()
            if value and value > self._function_attribute(function, attribute)
        }
        if code.carveout >= 0:
            wanted[_CARVEOUT] = code.carveout
        for attribute, value in wanted.items():
            self._call("function_restore", "cuFuncSetAttribute", function, attribute, value)

    def function_occupancy(self, function: FunctionHandle, threads: int, shared: int) -> int:
        blocks, symbol = ctypes.c_int(), "cuOccupancyMaxActiveBlocksPerMultiprocessor"
        self._call("function_occupancy", symbol, byref(blocks), function, threads, shared)
        return blocks.value

    def function_prepare_launch(self, function: FunctionHandle, pack: Pack) -> PlainLaunch | None:
        target = self._target(function)
        return None if target is None else function_call(pack, target)

    def _target(self, function: int) -> KernelTarget | None:
        """Returns None if this libcuda lacks a function that a compiled launch calls."""
        launch, current = self._addresses
        return (launch, current, self._context, function) if launch and current else None

    def launch_kernel(
        self,
        stream: StreamHandle,
        function: FunctionHandle,
        config: LaunchConfig,
        arguments: KernelArguments,
    ) -> None:
        made = self._prepared.get(id(arguments))
        if (
            made is None
            or made.config is not config
            or made.stream != stream
            or made.function != function
        ):
            made = self._prepare_launch(stream, function, config, arguments)
        if self._off is not None:
            self._require_on("launch_kernel")
        status = made.call()
        if status is None:
            status = self._in_context(made.call)
        if status != 0:
            wrong = Status.INVALID_CONTEXT if status is None else status
            raise self._launch_error(wrong, function, config)

    def _prepare_launch(
        self,
        stream: StreamHandle,
        function: FunctionHandle,
        config: LaunchConfig,
        arguments: KernelArguments,
    ) -> PreparedLaunch:
        """Checks the arguments, and keeps the launch for the same arguments."""
        seam = "launch_kernel"
        self._check_sizes(seam, function, len(arguments.layout), len(arguments.data))
        attributes = None if config.plain else attributes_of(config)
        given = (0, 0) if attributes is None else (attributes.address, attributes.count)
        target = self._target(function)
        try:
            call = target and kernel_call(target, config, stream, given, arguments)
            if call is None:
                block = launch_block(config, stream, attributes, arguments)
                taken = (block.memory, function, block.params, block.extra)
                call = partial(self._status, seam, "cuLaunchKernelEx", *taken)
        except (struct.error, OverflowError) as error:
            raise self._error(Status.INVALID_VALUE, seam, f"{config}: {error}") from error
        made = PreparedLaunch(stream, function, config, arguments, attributes, call)
        if len(self._prepared) >= _MAX_PREPARED:
            self._prepared.clear()
        self._prepared[id(arguments)] = made
        return made

    def _check_sizes(
        self, seam: str, function: int, given: int, nbytes: int, node: int | None = None
    ) -> None:
        """Raises INVALID_VALUE for too few arguments: the driver would read beyond them."""
        layout = self._layouts.get(function)
        if not layout:
            return
        count, end = len(layout), layout[-1].offset + layout[-1].size
        if (given and given != count) or nbytes < end:
            detail = f"{given} arguments of {nbytes} bytes; the function takes {count} of {end}"
            raise self._error(Status.INVALID_VALUE, seam, detail, node=node)

    def _launch_error(self, status: int, function: int, config: LaunchConfig) -> Exception:
        name = "?"
        if self._off is None:
            with suppress(Exception):  # only the launch's own status matters
                name = self._function_name("launch_kernel", function)
        return self._error(status, "launch_kernel", f"kernel {name} with {config}")

    def _function_attribute(self, function: int, attribute: int) -> int:
        value = ctypes.c_int()
        self._call("function_info", "cuFuncGetAttribute", byref(value), attribute, function)
        return value.value

    def _function_name(self, seam: str, function: int) -> str:
        name = ctypes.c_void_p()
        self._call(seam, "cuFuncGetName", byref(name), function)
        return ctypes.string_at(name.value).decode("utf-8", "replace") if name.value else ""

    def _parameter_layout(self, seam: str, function: int) -> tuple[ParameterSlot, ...]:
        """Returns the layout; the call after the last parameter gives INVALID_VALUE."""
        slots: list[ParameterSlot] = []
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        symbol, out = "cuFuncGetParamInfo", (byref(offset), byref(size))
        while not (status := self._status(seam, symbol, function, len(slots), *out)):
            slots.append(ParameterSlot(offset.value, size.value))
        if status != Status.INVALID_VALUE:
            raise self._error(status, seam)
        return tuple(slots)
