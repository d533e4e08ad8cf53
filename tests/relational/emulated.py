"""The join's CUDA kernels as host kernels that the emulator runs on the CPU."""

from __future__ import annotations

import functools

import ostinato as ost
from ostinato.relational.chain import KERNELS, source
from tests.emulator.emulator import Emulator


@functools.cache
def emulated_source() -> ost.Source:
    """In place of `chain.source`."""
    emulator, cuda = Emulator(), source()
    return ost.Source(host=[emulator.host_kernel(cuda, name) for name in KERNELS], name="emulated")
