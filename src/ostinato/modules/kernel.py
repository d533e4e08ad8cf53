"""Loaded modules, and the kernels in them.

    Kernel ──keeps──> LoadedModule ──owns──> the driver's module

Graphs and recordings keep kernels, kernels keep their module.  Once nothing keeps a module it is
retired: `Context.collect` unloads it outside of captures, after the device has finished.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from functools import cached_property, partial

from ostinato.driver.api import (
    Driver,
    FunctionHandle,
    FunctionInfo,
    Image,
    KernelArguments,
    ModuleHandle,
    Pack,
    ParameterSlot,
    PlainLaunch,
    parse_bytes,
    whole_number,
)
from ostinato.driver.closeable import Closeable
from ostinato.driver.context import Context
from ostinato.driver.forking import new_lock
from ostinato.driver.interrupts import uninterrupted
from ostinato.driver.launcher import packer
from ostinato.driver.signature import Signature, pack_untyped
from ostinato.errors import ClosedError, DriverError, InputError, Status


class LoadedModule(Closeable):
    """Code on the device.  Its kernels keep it alive; so does its cache, within the cache's bounds.

    `keep`: objects that the code needs (host functions).  `lowered`: entry names of C++ name
    expressions.  Raises what the driver's `module_load` raises.
    """

    def __init__(
        self,
        context: Context,
        image: Image,
        *,
        name: str | None = None,
        lowered: Mapping[str, str] | None = None,
        keep: object = None,
        log: str = "",
    ) -> None:
        context.require_open()
        self.context = context
        self.name = "module" if name is None else name
        self.kind = image.kind
        self.nbytes = len(image.data)
        self.log = log
        """The compiler's warnings."""
        self.last_use = 0
        self._lowered = dict(lowered or {})
        self._keep = keep
        self._lock = new_lock()
        self._functions: dict[str, FunctionHandle] = {}
        with uninterrupted:
            self._handle = context.driver.module_load(image)
            unload = partial(_unload, context.driver, self._handle)
            self._finalizer = weakref.finalize(self, context.retire, unload, quiet=True)
            self._finalizer.atexit = False

    def __repr__(self) -> str:
        state = " closed" if self.closed else ""
        return f"<LoadedModule {self.name!r} ({self.kind}) on {self.context.driver.name}{state}>"

    @property
    def closed(self) -> bool:
        return not self._finalizer.alive

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The entry names in the module, in the module's order."""
        self._require_open()
        return self.context.driver.module_functions(self._handle)

    def kernel(self, name: str, signature: Signature | str | None = None) -> Kernel:
        """Returns a kernel of this module, loaded onto the device now, not lazily during a capture.

        C++ entries are found by their plain name if it is unique.  Raises InputError that lists the
        existing names, or that says how the signature differs from the compiled code.
        """
        if isinstance(signature, str):
            signature = Signature.parse(signature)
        with self._lock:
            function = self._functions.get(name)
            if function is None:
                function = self._find(name)
                self.context.driver.function_load(function)
                self._functions[name] = function
        return Kernel(self, name, function, signature)

    def _require_open(self) -> None:
        if self.closed:
            raise ClosedError(f"the module {self.name!r} is unloaded; compile it again")

    def _find(self, name: str) -> FunctionHandle:
        self._require_open()
        driver = self.context.driver
        symbol = self._lowered.get(name, name)
        try:
            return driver.module_function(self._handle, symbol)
        except DriverError as error:
            if error.status != Status.NOT_FOUND:
                raise
        return driver.module_function(self._handle, entry_of(name, self.names, self.name))

    def close(self) -> None:
        """Unloads the module once no capture is under way and the device is done.  Idempotent.

        The caller must know that no graph uses it.  Dropping the last reference does the same.
        """
        self._finalizer()
        self.context.collect()


def _unload(driver: Driver, handle: ModuleHandle) -> None:
    """Unloads a module without references; `Context.collect` calls it.

    Waits for the whole device, because cuModuleUnload does not guarantee to wait for running
    kernels.  Evictions are rare.
    """
    driver.synchronize()
    driver.module_unload(handle)


class Kernel:
    """A function on the device, ready to launch.  Keeps its module loaded.

        scale = device.kernel(SOURCE, "scale")
        ost.launch(stream, scale, ost.LaunchConfig(grid=8, block=256), x, 2.0, n)

    `signature` is None if it is unknown; then arguments are packed by the sizes that the driver
    reports.
    """

    __slots__ = (
        *("__weakref__", "_pack", "call", "context", "function", "info", "module", "name"),
        *("signature", "slots"),
    )

    def __init__(
        self,
        module: LoadedModule,
        name: str,
        function: FunctionHandle,
        signature: Signature | None,
    ) -> None:
        self.module = module
        self.context = module.context
        self.name = name
        self.function = function
        self.info: FunctionInfo = module.context.driver.function_info(function)
        self.signature = signature
        known = self.info.parameters
        # Empty: the kernel has no parameters, or the driver cannot list them.
        if signature is not None and known:
            check_signature(module.name, name, signature, known)
        self.slots = known or (signature.layout if signature is not None else ())
        """The layout of the parameters: the compiled code's own if the driver knows it."""
        codes = _codes(signature, self.slots)
        self._pack: Pack = lambda _: None
        self.call: PlainLaunch | None = None
        """Launches with plain values in a plain config; None if the driver has no such call."""
        if codes is not None and signature is not None:
            self._pack = packer(codes, self.slots, signature.elements(self.context.space))
            self.call = module.context.driver.function_prepare_launch(function, self._pack)

    def __repr__(self) -> str:
        return f"<Kernel {self.name!r} of {self.module.name!r} on {self.context.driver.name}>"

    def arguments(self, *values: object) -> KernelArguments:
        """Packs arguments: buffers and other device arrays, addresses, numbers, bytes.

        Raises InputError that names the parameter that a value does not fit, also for memory of
        another type or device.
        """
        # Exact types only; other values take the checked path below, which also makes the errors.
        data = self._pack(values)
        if data is not None:
            return KernelArguments(data, self.slots)
        if self.signature is None:
            return pack_untyped(self.slots, values, self.context.space)
        return self.signature.pack(values, self.slots, self.context.space)

    def allow_shared(self, nbytes: int | str) -> None:
        """Allows launches with up to `nbytes` of dynamic shared memory per block (over 48 KiB).

        Applies to all handles of this function.  Raises DriverError if the device has less.
        """
        size = parse_bytes(nbytes, f"kernel {self.name}: nbytes")
        self.context.driver.function_allow_shared(self.function, size)

    def occupancy(self, threads: int, shared: int | str = 0) -> int:
        """Returns the blocks of `threads` with `shared` bytes that one multiprocessor holds at
        once."""
        number = whole_number(threads)
        if number is None or number < 1:
            what = f"kernel {self.name}: threads={threads!r}"
            raise InputError(f"{what}: a whole number of 1 or more is needed")
        size = parse_bytes(shared, f"kernel {self.name}: shared")
        return self.context.driver.function_occupancy(self.function, number, size)


def entry_of(name: str, entries: Sequence[str], module: str) -> str:
    """Returns the symbol of a kernel: `name`, or the one C++ entry with this plain name.

    Raises InputError that lists the existing entries.
    """
    if name in entries:
        return name
    # The Itanium mangling of a plain C++ name: _Z, its length, the name, the parameters.
    mangled = [n for n in entries if n.startswith(f"_Z{len(name)}{name}")]
    if len(mangled) == 1:
        return mangled[0]
    if mangled:
        raise InputError(
            f"{module}: {name!r} is overloaded or a template: {', '.join(mangled)}; "
            f"name one of them, or give the C++ name in full (like '{name}<float>')"
        )
    there = ", ".join(entries) or "no kernels at all"
    import difflib

    close = difflib.get_close_matches(name, entries, 1)
    raise InputError(
        f"{module} has no kernel {name!r}; there are: {there}."
        + (f" Did you mean {close[0]!r}?" if close else "")
    )


def check_signature(
    module: str, name: str, signature: Signature, known: Sequence[ParameterSlot]
) -> None:
    """Raises InputError unless the signature has the sizes that the code was compiled with."""
    wanted = signature.parameters
    if len(wanted) != len(known):
        raise InputError(
            f"{module}: kernel {name!r} takes {len(known)} parameters, its signature has "
            f"{len(wanted)} ({', '.join(p.name for p in wanted)})"
        )
    for index, (parameter, slot) in enumerate(zip(wanted, known, strict=True)):
        if parameter.size != slot.size:
            raise InputError(
                f"{module}: kernel {name!r}: parameter {index} has {slot.size} bytes at offset "
                f"{slot.offset}, but the signature's {parameter.name!r} has {parameter.size}; "
                "mend the signature"
            )


def _codes(signature: Signature | None, slots: tuple[object, ...]) -> str | None:
    """Returns the parameters' codes for `packer`; None if it does not support one of them."""
    if signature is None or signature.layout != slots:
        return None
    codes = [parameter.plain for parameter in signature.parameters]
    return "".join(codes) if all(codes) else None
