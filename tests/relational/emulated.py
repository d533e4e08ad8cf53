"""The join's CUDA kernels as host kernels that the emulator runs on the CPU."""

from __future__ import annotations

import functools
from typing import Any

import ostinato as ost
from benchmarks.kernels.emulator import Emulator
from ostinato.driver.host.kernel import HostKernel, HostLaunch
from ostinato.models.cuda.lowering import CudaLaunch
from ostinato.modules import CompileOptions
from ostinato.relational.chain import KERNELS, source

OPTIONS = CompileOptions()


@functools.cache
def emulated_source() -> ost.Source:
    """In place of `chain.source`."""
    emulator, cuda = Emulator(), source()
    for name in KERNELS:
        emulator.expect(cuda, OPTIONS, name)
    return ost.Source(host=[_kernel(emulator, cuda, name) for name in KERNELS], name="emulated")


def _kernel(emulator: Emulator, cuda: ost.Source, name: str) -> HostKernel:
    signature = cuda.signature(name)
    assert signature is not None
    names = [parameter.name for parameter in signature.parameters]

    def run(how: HostLaunch, *values: Any) -> None:
        config = ost.LaunchConfig(how.grid, how.block, how.shared)
        given = dict(zip(names, values, strict=True))
        emulator.launch(EmulatedLaunch(name, cuda, OPTIONS, config, ()), given)

    return HostKernel(name, run, signature)


class EmulatedLaunch(CudaLaunch):
    """Whose parameters are those of the host kernel of the same name."""

    @property
    def signature(self) -> Any:
        return self.source.signature(self.kernel)
