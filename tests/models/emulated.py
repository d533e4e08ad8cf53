"""The CUDA backend itself with no GPU: its kernels run by the emulator, a library's products by
NumPy, all on the host driver."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

import ostinato as ost
from benchmarks.kernels.checks import from_bf16
from ostinato.device import Device
from ostinato.driver.api import LaunchConfig
from ostinato.driver.host.kernel import HostKernel, HostLaunch
from ostinato.driver.signature import Signature
from ostinato.errors import NotAvailableError
from ostinato.models.cuda.backend import CudaBackend
from ostinato.models.cuda.products import MatrixProduct
from ostinato.modules import CompileOptions
from tests.emulator.emulator import Emulator


class EmulatedModules:
    """Kernels in CUDA C++ as host kernels that the emulator runs."""

    def __init__(self, device: Device, threads: bool = False) -> None:
        self._modules, self._emulator = device.modules, Emulator(threads=threads)

    def get_or_compile(
        self, source: ost.Source, name: str, *, options: CompileOptions | None = None
    ) -> Any:
        host = self._emulator.host_kernel(source, name, options)
        return self._modules.get_or_compile(host, name)

    def preload(self, kernels: Iterable[Any]) -> None:
        """They are there."""


class EmulatedGpu:
    """The members of a device that the CUDA backend uses.  `threads`: see `Emulator`; `clusters`:
    whether it has them; `shared`: bytes of shared memory that a block may have, the host's if
    None."""

    def __init__(
        self,
        device: Device,
        *,
        threads: bool = False,
        clusters: bool = False,
        shared: int | None = None,
    ) -> None:
        self.name, self.device = "emulated", device
        self.driver = device.driver  # which has no CUDA context
        self.modules = EmulatedModules(device, threads)
        self.properties = replace(
            device.properties,
            compute_capability=(9, 0),
            multiprocessors=132,
            memory_bandwidth=4_900_000_000_000,
            name="emulated",
        )
        if shared is not None:
            self.properties = replace(self.properties, max_shared_per_block=shared)
        self.capabilities = replace(device.capabilities, source_language="cuda", clusters=clusters)
        self.empty, self.create_stream = device.empty, device.create_stream


def emulate_decoders(
    monkeypatch: pytest.MonkeyPatch, library_rows: int | None = None, **options: Any
) -> None:
    """Makes decoders run the CUDA backend on an `EmulatedGpu` with these options."""

    def backend_for(device: Device, **_: object) -> CudaBackend:
        gpu: Any = EmulatedGpu(device, **options)
        return CudaBackend(gpu, library_rows=library_rows)

    monkeypatch.setattr("ostinato.models.decoder.backend_for", backend_for)


@dataclass
class NumpyProducts:
    """A library whose products are NumPy's.  `broken`: why it has no algorithm, by product."""

    device: Device
    workspace_bytes: int = 256
    broken: Any = None
    asked: list[MatrixProduct] = field(default_factory=list)

    def product(self, product: MatrixProduct) -> NumpyProduct:
        self.asked.append(product)
        if self.broken is not None and self.broken(product):
            raise NotAvailableError(f"no algorithm for {product}")
        return NumpyProduct(self.device, product)


@dataclass
class NumpyProduct:
    device: Device
    product: MatrixProduct

    def operations(
        self,
        name: str,
        *,
        weight: ost.Buffer,
        inputs: ost.Buffer,
        out: ost.Buffer,
        workspace: ost.Buffer,
        weight_is_scratch: bool = False,
    ) -> tuple[ost.Operation, ...]:
        p = self.product

        def run(how: HostLaunch, w: Any, h: Any, y: Any, _: Any) -> None:
            left = from_bf16(h[: p.rows * p.inputs]).reshape(p.rows, p.inputs)
            right = from_bf16(w[: p.outputs * p.inputs]).reshape(p.outputs, p.inputs)
            made = (left @ right.T).reshape(-1)
            into = y[: made.size]
            if p.accumulate:
                into += made
            else:
                into[...] = made

        access = "" if p.accumulate else "out "
        signature = Signature.parse(
            f"weight: *const bf16, inputs: *const bf16, out: *{access}f32, workspace: *u8"
        )
        kernel = self.device.modules.get_or_compile(HostKernel(name, run, signature), name)
        return (ost.prepare(kernel, LaunchConfig(1, 1), weight, inputs, out, workspace),)
