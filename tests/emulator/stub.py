"""The CUDA driver on `libcuda.c`, which holds graphs and runs nothing: no GPU needed."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import ostinato as ost
from ostinato.driver.api import Image
from ostinato.driver.cuda import driver as cuda_driver
from ostinato.driver.cuda.libcuda import Libcuda, parse_prototypes
from ostinato.modules import LoadedModule

__all__ = ["Stub", "build", "core_device", "stub_device"]

_SOURCE = Path(__file__).with_name("libcuda.c")
SIGNATURE = "a: *const f32, b: *const f32, out: *out f32, n: u32"
"""Of the one function that it has."""


def build(folder: Path) -> Path | None:
    """Compiles it; None if there is no C compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        return None
    text, made = _SOURCE.read_text(), folder / "libcuda.so"
    others = [symbol for symbol in parse_prototypes() if f"int {symbol}(" not in text]
    code = folder / "libcuda.c"
    code.write_text("\n".join([text, *(f"int {symbol}() {{ return 0; }}" for symbol in others)]))
    flags = ["-O2", "-shared", "-fPIC", "-std=gnu11", "-w"]
    subprocess.run([compiler, *flags, str(code), "-o", str(made)], check=True)
    return made


class Stub:
    """The device, its kernel, and what the library under it holds."""

    def __init__(self, path: Path, device: ost.Device) -> None:
        self.device = device
        self._dll = ctypes.CDLL(str(path))
        module = LoadedModule(device.context, Image("cubin", b"code"))
        self.kernel = module.kernel("blend", SIGNATURE)

    def refuse(self, status: int, *, after: int = 0, node: int = -1) -> None:
        """Changes of executables' nodes, or of one node, give this status, from the one after the
        next `after` on.  0: none does."""
        for name, value in (("", status), ("_after", after), ("_node", node)):
            ctypes.c_int.in_dll(self._dll, f"stub_refused{name}").value = value

    def newest_first(self, on: bool) -> None:
        """Whether graphs list the node that was added last as their first."""
        ctypes.c_int.in_dll(self._dll, "stub_newest_first").value = on

    def holds(self, run: ost.GraphExec, index: int) -> tuple[bytes, tuple[int, ...]]:
        """The argument bytes that a node of the executable would run with, and grid, block and
        shared memory."""
        data, launch = (ctypes.c_ubyte * 32)(), (ctypes.c_uint * 7)()
        executable = ctypes.c_void_p(run.handle)
        self._dll.stub_exec_bytes(executable, ctypes.c_size_t(index), data, launch)
        return bytes(data)[:28], tuple(launch)

    def set_attribute(self, node: int, which: int, value: bytes) -> None:
        """Sets a launch attribute of a definition's node, as other code does by its handle."""
        raw = value.ljust(64, b"\0")
        assert not self._dll.cuGraphKernelNodeSetAttribute(ctypes.c_void_p(node), which, raw)


def core_device(capability: tuple[int, int] = (9, 0)) -> SimpleNamespace:
    """What `cuda.core.Device` gives, as far as the driver asks it."""
    properties = SimpleNamespace(
        multiprocessor_count=1,
        l2_cache_size=1,
        max_threads_per_block=1024,
        max_shared_memory_per_block_optin=1,
        memory_clock_rate=1,
        global_memory_bus_width=1,
        can_use_64_bit_stream_mem_ops=True,
        memory_pools_supported=True,
        cluster_launch=True,
        cooperative_launch=True,
    )
    return SimpleNamespace(
        name="stub", compute_capability=capability, properties=properties, set_current=lambda: None
    )


@contextmanager
def stub_device(path: Path, capability: tuple[int, int] = (9, 0)) -> Iterator[Stub]:
    """A device on the library that `build` made."""
    opened = core_device(capability)
    with (
        mock.patch.object(cuda_driver, "_import_device", lambda: lambda _: opened),
        mock.patch.object(cuda_driver, "Libcuda", lambda: Libcuda(str(path))),
        mock.patch.object(cuda_driver, "require_gpu"),
        mock.patch.object(cuda_driver, "StartingDriver"),
        ost.open_device("cuda:0") as device,
    ):
        yield Stub(path, device)
