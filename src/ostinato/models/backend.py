"""What differs between devices for a decoder: the kernels, the type of the weights, launch shapes.

Everything above it (program, plan, decoder) is the same for every device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ostinato import Device, LaunchConfig, Source
from ostinato.errors import NotAvailableError
from ostinato.models.program import KernelCall

__all__ = ["Backend", "backend_for"]


@dataclass(frozen=True, slots=True)
class Backend:
    """How one kind of device runs the program.

    `source` holds all kernels by the program's names.  `dtype` is that of matrices and of the KV
    cache: float32, or uint16 for the bits of bfloat16.  `shape` gives a call's launch shape for a
    number of rows.
    """

    name: str
    source: Source
    dtype: np.dtype[Any]
    shape: Callable[[KernelCall, int], LaunchConfig]


def backend_for(device: Device) -> Backend:
    """The backend for a device, by what its kernels are written in.

    Raises NotAvailableError where there are no kernels for it yet.
    """
    language = device.capabilities.source_language
    if language != "host":
        raise NotAvailableError(
            f"the decoder has no kernels in {language!r} yet, which {device.name} needs; "
            'open_device("host") runs it on the CPU'
        )
    from ostinato.models.kernels_host import HOST_KERNELS

    source = Source(host=HOST_KERNELS, name="decoder")
    return Backend("numpy", source, np.dtype(np.float32), _host_shape)


def _host_shape(call: KernelCall, rows: int) -> LaunchConfig:
    """A host kernel does the whole grid in one call; the shape only tells readers how much."""
    return LaunchConfig(grid=rows, block=1)
