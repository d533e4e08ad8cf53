"""Kernels of the host driver: Python functions over NumPy views of the driver's memory.

    @host_kernel("x: *f32, factor: f32, n: u32")
    def scale(launch, x, factor, n):
        x[:n] *= factor

    image = Image("host", functions={"scale": scale})

A kernel is called once a launch, not once a thread: it does the work of the whole grid.  It gets a
`HostLaunch` and one value for each parameter of its signature:

* a pointer is a flat NumPy view of the signature's dtype, from the address to the end of its
  allocation (read-only for ``*const``), and None for a null pointer;
* a number is a Python number, ``cond`` too (it is what `HostLaunch.set_conditional` takes);
* ``bytes[N]`` is `bytes`.

An exception of a kernel poisons the driver as a fault on a GPU would: IndexError as an illegal
address (700), any other as a failed launch (719).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ostinato.driver.api import Dim3, ParameterSlot
from ostinato.driver.signature import Access, Signature, buffer_struct

__all__ = ["HostKernel", "HostLaunch", "PointerParameter", "host_kernel"]

DEFAULT_MAX_THREADS = 1024


@dataclass(frozen=True, slots=True, eq=False)
class HostLaunch:
    """How the kernel was launched: sizes in blocks, threads, blocks and bytes."""

    grid: Dim3
    block: Dim3
    cluster: Dim3 | None
    shared: int
    set_conditional: Callable[[int, int], None]
    """Sets the value (32 bits) of a conditional handle of the graph that runs this kernel."""
    memory: Callable[[int, int], npt.NDArray[np.uint8]]
    """(address, bytes) to a writable view of live memory, for kernels that read addresses from
    memory instead of their arguments.  What is not all in one live allocation is an illegal
    address (700)."""


@dataclass(frozen=True, slots=True)
class PointerParameter:
    """A pointer argument: its place, and the view that a kernel gets for it."""

    index: int
    name: str
    dtype: np.dtype[Any]
    writable: bool


@dataclass(frozen=True, slots=True, eq=False)
class _Prepared:
    """`HostKernel`, and what follows from its signature."""

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
    """The packed parameter buffer as one plain value a parameter, pointers as addresses."""


class HostKernel(_Prepared):
    """A Python function that the host driver can launch.

    `max_threads` is the most threads a block may have, `static_shared` the bytes of shared memory
    that each block takes besides what a launch asks for (both only checked, never used).
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
            PointerParameter(i, p.name, p.dtype, Access.WRITE in p.access)
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

    Raises InputError for a signature that cannot be read.
    """
    parsed = Signature.parse(signature)

    def decorate(function: Callable[..., object]) -> HostKernel:
        entry = name if name is not None else getattr(function, "__name__", "kernel")
        return HostKernel(entry, function, parsed, max_threads, static_shared)

    return decorate
