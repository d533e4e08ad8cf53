"""Kernels of the host driver: Python functions over NumPy views of the driver's memory.

    @host_kernel("x: *f32, factor: f32, n: u32")
    def scale(launch, x, factor, n):
        x[:n] *= factor

    image = Image("host", functions={"scale": scale})

A kernel is called once a launch, not once a thread: it does the work of the whole grid.  Its
arguments are a `HostLaunch` and one value for each parameter of its signature:

* a pointer is a flat NumPy view of the signature's dtype, from the address to the end of its
  allocation (read-only for ``*const``), and None for a null pointer;
* a number is a Python number, ``cond`` too (`HostLaunch.set_conditional` takes it);
* ``bytes[N]`` is `bytes`.

An exception of a kernel poisons the driver like a fault on a GPU: IndexError like an illegal
address (700), any other like a failed launch (719).
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from dataclasses import field
from typing import TYPE_CHECKING, Any

import numpy as np

from ostinato.driver.api import Dim3, ParameterSlot
from ostinato.driver.signature import Access, Signature, buffer_struct, numpys_dtype
from ostinato.errors import InputError
from ostinato.records import dataclass

if TYPE_CHECKING:
    import numpy.typing as npt

DEFAULT_MAX_THREADS = 1024


@dataclass(frozen=True, slots=True, eq=False)
class HostLaunch:
    """The launch of a kernel: sizes in blocks, threads, blocks and bytes."""

    grid: Dim3
    block: Dim3
    cluster: Dim3 | None
    shared: int
    set_conditional: Callable[[int, int], None]
    """Sets the value (32 bits) of a conditional handle of the graph that runs this kernel."""
    memory: Callable[[int, int], npt.NDArray[np.uint8]]
    """Maps (address, bytes) to a writable view of live memory, for kernels that read addresses from
    memory instead of their arguments.  Bytes that are not all in one live allocation are an illegal
    address (700)."""


@dataclass(frozen=True, slots=True)
class PointerParameter:
    """A pointer argument: its index, and the dtype and access of the view that a kernel gets."""

    index: int
    name: str
    dtype: np.dtype[Any]
    writable: bool


@dataclass(frozen=True, slots=True, eq=False)
class _Prepared:
    """The fields of `HostKernel`, and data computed from its signature."""

    name: str
    function: Callable[..., object]
    signature: Signature
    max_threads: int
    static_shared: int
    layout: tuple[ParameterSlot, ...]
    size: int
    """Bytes of the packed parameter buffer."""
    pointers: tuple[PointerParameter, ...]
    unpack: Callable[[bytes], tuple[Any, ...]] = field(repr=False)
    """Unpacks a parameter buffer to one plain value per parameter, pointers as addresses."""


class HostKernel(_Prepared):
    """A Python function that the host driver can launch.

    `max_threads` is the largest number of threads in a block, `static_shared` the bytes of shared
    memory that each block takes besides those of a launch (both are only checked, never used).
    """

    __slots__ = ()

    def __init__(
        self,
        name: str,
        function: Callable[..., object],
        signature: Signature,
        max_threads: int = DEFAULT_MAX_THREADS,
        static_shared: int = 0,
    ) -> None:
        layout = signature.layout
        buffer = buffer_struct([p.code for p in signature.parameters], layout)
        pointers = tuple(
            PointerParameter(i, p.name, numpys_dtype(p.dtype), Access.WRITE in p.access)
            for i, p in enumerate(signature.parameters)
            if p.pointer
        )
        super().__init__(
            *(name, function, signature, max_threads, static_shared),
            *(layout, buffer.size, pointers, buffer.unpack),
        )


def host_kernel(
    signature: str,
    *,
    name: str | None = None,
    max_threads: int = DEFAULT_MAX_THREADS,
    static_shared: int = 0,
) -> Callable[[Callable[..., object]], HostKernel]:
    """Makes a kernel of a function `f(launch, …)`; `name` is its entry name, else the function's.

        @ost.host_kernel("x: *f32, factor: f32, n: u32")
        def scale(launch, x, factor, n): x[:n] *= factor

    `launch` is a `HostLaunch`; docs/signatures.md lists the types of the other arguments.
    `max_threads` and `static_shared` (bytes) as in `HostKernel`.  Raises InputError for a signature
    that cannot be read, and for a function that does not take its parameters.
    """
    parsed = Signature.parse(signature)

    def decorate(function: Callable[..., object]) -> HostKernel:
        entry = name if name is not None else getattr(function, "__name__", "kernel")
        _require_takes(function, entry, parsed)
        return HostKernel(entry, function, parsed, max_threads, static_shared)

    return decorate


def _require_takes(function: Callable[..., object], entry: str, signature: Signature) -> None:
    """Raises InputError for a function that a launch could not call: such a launch would poison the
    context of its device."""
    names = ["launch", *(p.name for p in signature.parameters)]
    try:
        takes = inspect.signature(function)
    except ValueError:  # compiled code need not have a signature
        return
    try:
        takes.bind(*names)
    except TypeError as error:
        raise InputError(
            f"host kernel {entry!r} is called as {entry}({', '.join(names)}): {error}"
        ) from None


_TARGET = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"


def target_of(kernel: HostKernel) -> str:
    """Returns the place at which another process finds the same kernel: "module:name".

    Raises InputError with the reason if another process would not find it there.
    """
    module = getattr(kernel.function, "__module__", None)
    name = getattr(kernel.function, "__qualname__", None)
    target = f"{module}:{name}"
    if not isinstance(module, str):
        raise InputError(
            f"another process could not find the kernel {kernel.name!r}: it is compiled code that "
            "only this process holds, and no function of a module"
        )
    if module == "__main__":
        raise InputError(
            f"the kernel {kernel.name!r} is defined in the program's own file, which another "
            "process does not import; move it to a module"
        )
    try:
        found = kernel_at(target)
    except InputError as error:
        raise InputError(
            f"another process could not find the kernel {kernel.name!r}: {error}; define it at "
            "the top of a module, with @host_kernel"
        ) from None
    if found is not kernel and (found.function, found.name) != (kernel.function, kernel.name):
        raise InputError(f"{target} is another kernel than {kernel.name!r}")
    return target


def kernel_at(target: str) -> HostKernel:
    """Returns the kernel at "module:name"; imports the module.  Raises InputError without one."""
    if not re.fullmatch(_TARGET, target):
        raise InputError(f"{target!r} is no place of a kernel (module:name)")
    module, _, path = target.partition(":")
    try:
        found: object = importlib.import_module(module)
        for name in path.split("."):
            found = getattr(found, name)
    except Exception as error:  # an import runs the module's code, which may raise any error
        missing = isinstance(error, ModuleNotFoundError)
        advice = "; its folder must be on PYTHONPATH" if missing else ""
        raise InputError(
            f"{target} cannot be imported ({type(error).__name__}: {error}){advice}"
        ) from None
    if not isinstance(found, HostKernel):
        raise InputError(f"{target} is no kernel of the host, but {type(found).__name__}")
    return found
