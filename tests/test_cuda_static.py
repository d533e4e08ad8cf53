"""What can be known of the CUDA driver without a GPU: its shape, its structures, its refusals."""

from __future__ import annotations

import ctypes
import inspect
import os
import re
import shutil
import struct
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import pytest

from ostinato.driver import api
from ostinato.driver.api import (
    BatchMemOpNodeParams,
    Edge,
    FunctionHandle,
    KernelArguments,
    KernelNodeParams,
    LaunchConfig,
    MemcpyNodeParams,
    MemOp,
    MemOpKind,
    MemsetNodeParams,
    NodeHandle,
    OpaqueNodeParams,
    ParameterSlot,
)
from ostinato.driver.cuda import driver as cuda_driver
from ostinato.driver.cuda import launch as cuda_kernel
from ostinato.driver.cuda import libcuda as cu
from ostinato.driver.cuda.driver import CudaDriver
from ostinato.driver.cuda.libcuda import Libcuda, parse_prototypes
from ostinato.driver.cuda.nodes import (
    ELEMENT_SIZES,
    fill_memcpy,
    fill_memset,
    has_cycle,
    mem_op_array,
    read_batch,
    read_memcpy,
    read_memset,
    unsigned,
)
from ostinato.errors import DriverError, NoCudaError

INSTALL_LINE = 'pip install "ostinato[cuda13]"'

# Ours to the header's, where the header nests deeper than we need.
RENAMED = {"deviceUpdatable": "deviceUpdatableKernelNode.deviceUpdatable"}
OURS_ONLY = {"words"}


def _has_libcuda() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


# ------------------------------------------------------------------------------- nothing at import


def test_import_takes_nothing() -> None:
    script = (
        "import sys\n"
        "before = set(sys.modules)\n"  # cuda-bindings 12.9 puts itself there at startup
        "import ostinato.driver.cuda.driver\n"
        "new = set(sys.modules) - before\n"
        "assert not [m for m in new if m == 'cuda' or m.startswith('cuda.')]\n"
        "assert 'libcuda' not in open('/proc/self/maps').read()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, env=os.environ)


@pytest.mark.skipif(_has_libcuda(), reason="this machine has libcuda")
def test_no_driver_says_what_to_install() -> None:
    pytest.importorskip("cuda.core")
    with pytest.raises(NoCudaError, match=re.escape(INSTALL_LINE)) as caught:
        CudaDriver()
    assert "libcuda" in str(caught.value)


@pytest.mark.skipif(_has_libcuda(), reason="this machine has libcuda")
def test_without_a_driver_cuda_core_is_not_imported() -> None:
    """That would be 35 MB and half a second in every process on a machine with no GPU."""
    script = (
        "import sys, ostinato\n"
        "with ostinato.open_device() as device: assert device.name == 'host'\n"
        "assert not [m for m in sys.modules if m == 'cuda' or m.startswith('cuda.')]\n"
    )
    environment = {n: v for n, v in os.environ.items() if n != "OSTINATO_DEVICE"}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment)


def test_no_library_says_what_to_install() -> None:
    with pytest.raises(NoCudaError, match=re.escape(INSTALL_LINE)):
        Libcuda("libcuda-of-no-machine.so.1")


def test_no_cuda_core_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "Libcuda", dict)
    monkeypatch.setattr(cuda_driver, "_start", lambda lib, ordinal: None)
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    with pytest.raises(NoCudaError, match=re.escape(INSTALL_LINE)) as caught:
        CudaDriver()
    assert "cuda.core" in str(caught.value)


# ----------------------------------------------------------------------------------- the protocol


def _drivers() -> list[Any]:
    return ["cuda", "host"]


def _driver_class(name: str) -> type:
    if name == "cuda":
        return CudaDriver
    module = pytest.importorskip("ostinato.driver.host.driver")
    return typing.cast(type, module.HostDriver)


MEMBERS = sorted(
    name
    for name, value in vars(api.Driver).items()
    if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, property))
)


@pytest.mark.parametrize("driver", _drivers())
@pytest.mark.parametrize("member", MEMBERS)
def test_driver_has_the_protocol(driver: str, member: str) -> None:
    wanted = inspect.getattr_static(api.Driver, member)
    found = inspect.getattr_static(_driver_class(driver), member)
    if isinstance(wanted, property):
        assert isinstance(found, property)
        return
    expected = inspect.signature(wanted).parameters
    actual = inspect.signature(found).parameters
    assert [(p.name, p.kind, p.default) for p in actual.values()] == [
        (p.name, p.kind, p.default) for p in expected.values()
    ]


# ------------------------------------------------------------------------------ against cuda.h


def _header() -> Path | None:
    roots = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    roots += sorted(Path("/usr/local").glob("cuda*"), reverse=True)
    found = [root / "include" / "cuda.h" for root in roots]
    for folder in sys.path:
        found += Path(folder).glob("nvidia/*/include/cuda.h")
    return next((path for path in found if path.is_file()), None)


@pytest.fixture(scope="module")
def compile_with_header(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A call that has a C compiler check a piece of C behind `#include <cuda.h>`."""
    header, compiler = _header(), shutil.which("gcc") or shutil.which("cc")
    if header is None or compiler is None:
        pytest.skip("needs a C compiler and cuda.h")
    folder = tmp_path_factory.mktemp("abi")

    def check(code: str) -> tuple[int, str]:
        source = folder / "check.c"
        source.write_text(f"#include <stddef.h>\n#include <cuda.h>\n{code}")
        done = subprocess.run(
            [compiler, "-fsyntax-only", "-Werror", f"-I{header.parent}", str(source)],
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stderr

    check.text = header.read_text()  # type: ignore[attr-defined]
    return check


def _offsets(kind: Any, prefix: str = "", base: int = 0) -> list[tuple[str, int]]:
    """Every field by the header's name, and where it lies."""
    found: list[tuple[str, int]] = []
    anonymous = set(getattr(kind, "_anonymous_", ()))
    for name, field_type in kind._fields_:
        if name in OURS_ONLY:
            continue
        offset = base + getattr(kind, name).offset
        nested = isinstance(field_type, type) and issubclass(
            field_type, ctypes.Structure | ctypes.Union
        )
        if name in anonymous:
            found += _offsets(field_type, prefix, offset)
            continue
        found.append((prefix + RENAMED.get(name, name), offset))
        if nested:
            found += _offsets(field_type, f"{prefix}{name}.", offset)
    return found


@pytest.mark.parametrize("name", cu.STRUCTURES)
def test_structures_are_the_headers(name: str, compile_with_header: Any) -> None:
    kind = cu.STRUCTURES[name]
    lines = [f'_Static_assert(sizeof({name}) == {ctypes.sizeof(kind)}, "size");']
    lines += [
        f'_Static_assert(offsetof({name}, {field}) == {offset}, "{field}");'
        for field, offset in _offsets(kind)
    ]
    status, words = compile_with_header("\n".join(lines))
    assert status == 0, words


def test_prototypes_are_the_headers(compile_with_header: Any) -> None:
    lines: list[str] = []
    declared = set(re.findall(r"\bcu[A-Z]\w+", compile_with_header.text))
    for symbol, parameters in parse_prototypes().items():
        if symbol in declared:  # a header may be older than a call we can do without
            types = ", ".join(parameters) or "void"
            lines.append(f"CUresult (CUDAAPI *check_{symbol})({types}) = &{symbol};")
    assert len(lines) > 90
    status, words = compile_with_header("\n".join(lines))
    assert status == 0, words


def test_the_compiler_would_notice(compile_with_header: Any) -> None:
    status, _ = compile_with_header("CUresult (CUDAAPI *wrong)(int) = &cuGraphDestroy;")
    assert status != 0
    status, _ = compile_with_header('_Static_assert(sizeof(CUgraphEdgeData) == 9, "size");')
    assert status != 0


def test_sizes_without_a_compiler() -> None:
    """The header's sizes (CUDA 13.0, 64 bit), for machines that cannot ask it."""
    sizes = {name: ctypes.sizeof(kind) for name, kind in cu.STRUCTURES.items()}
    assert sizes["CUgraphNodeParams"] == 256
    assert sizes["CUlaunchConfig"] == 56 == struct.calcsize(cuda_kernel.LAUNCH_HEAD)
    assert sizes["CUlaunchAttribute"] == 72
    assert sizes["CUDA_KERNEL_NODE_PARAMS_v2"] == 72 == struct.calcsize(cuda_kernel.NODE_HEAD)
    assert sizes["CUDA_MEMCPY3D"] == 200
    assert sizes["CUstreamBatchMemOpParams"] == 48


# --------------------------------------------------------------------------------- pure conversions

LAYOUT = (ParameterSlot(0, 8), ParameterSlot(8, 4), ParameterSlot(16, 24))
ARGUMENTS = KernelArguments(bytes(range(40)), LAYOUT)
CONFIG = LaunchConfig((3, 2, 1), (32, 4), 1024)


def test_launch_block_is_a_launch_config() -> None:
    made = cuda_kernel.launch_block(CONFIG, 0xABC0, None, ARGUMENTS)
    raw = cu.LaunchConfigStruct.from_buffer(made.memory)
    assert (raw.gridDimX, raw.gridDimY, raw.gridDimZ) == (3, 2, 1)
    assert (raw.blockDimX, raw.blockDimY, raw.blockDimZ) == (32, 4, 1)
    assert (raw.sharedMemBytes, raw.hStream, raw.attrs, raw.numAttrs) == (1024, 0xABC0, None, 0)
    assert made.extra is None
    back = cuda_kernel.read_arguments(made.params, made.extra, LAYOUT)
    assert [back.raw(i) for i in range(3)] == [ARGUMENTS.raw(i) for i in range(3)]


def test_launch_block_holds_attributes() -> None:
    config = LaunchConfig(8, 32, cluster=2, cooperative=True, programmatic=True, priority=-3)
    attributes = cuda_kernel.Attributes(config)
    made = cuda_kernel.launch_block(config, 1, attributes, KernelArguments(b"", ()))
    assert made.extra is None
    assert cuda_kernel.read_arguments(made.params, made.extra, ()).data == b""
    raw = cu.LaunchConfigStruct.from_buffer(made.memory)
    array = (cu.LaunchAttribute * raw.numAttrs).from_address(raw.attrs)
    found = {slot.id: slot.value for slot in array}
    cluster = found[cu.ATTRIBUTE_CLUSTER_DIMENSION].clusterDim
    assert (cluster.x, cluster.y, cluster.z) == (2, 1, 1)
    assert found[cu.ATTRIBUTE_COOPERATIVE].cooperative == 1
    assert found[cu.ATTRIBUTE_PRIORITY].priority == -3
    assert len(found) == 4


@pytest.mark.parametrize("packed", [False, True])
def test_node_block_is_node_params(packed: bool) -> None:
    arguments = KernelArguments(ARGUMENTS.data, LAYOUT, packed=packed)
    block = cuda_kernel.node_block(
        KernelNodeParams(FunctionHandle(0x77), CONFIG, arguments), context=0x88
    )
    raw = cu.KernelParams.from_buffer(block)
    assert (raw.func, raw.ctx, raw.kern, raw.sharedMemBytes) == (0x77, 0x88, None, 1024)
    assert (raw.gridDimX, raw.gridDimY, raw.blockDimX, raw.blockDimY) == (3, 2, 32, 4)
    assert (raw.kernelParams is None) is packed
    assert (raw.extra is None) is not packed
    back = cuda_kernel.read_arguments(raw.kernelParams, raw.extra, LAYOUT)
    assert back.packed is packed
    assert [back.raw(i) for i in range(3)] == [ARGUMENTS.raw(i) for i in range(3)]


def test_packed_arguments_without_a_layout() -> None:
    arguments = KernelArguments(bytes(range(50)), (), packed=True)
    made = cuda_kernel.launch_block(CONFIG, 1, None, arguments)
    assert made.params is None
    # A layout that does not fit the buffer is not believed.
    assert cuda_kernel.read_arguments(None, made.extra, (ParameterSlot(48, 8),)) == arguments
    assert len(made.memory) > 50


def test_too_large_a_grid_is_not_cut_off() -> None:
    with pytest.raises(struct.error):
        cuda_kernel.launch_block(LaunchConfig(1 << 32, 1), 1, None, ARGUMENTS)


@pytest.mark.parametrize(
    "params",
    [
        MemcpyNodeParams(0x1000, 0x2000, 64),
        MemcpyNodeParams(0x1000, 0x2000, 64, 8, dst_pitch=128),
        MemcpyNodeParams(0x1000, 0x2000, 64, 8, 4, src_pitch=256, src_height=10, dst_height=9),
    ],
)
@pytest.mark.parametrize("kinds", [(1, 2), (2, 2), (4, 4)])
def test_memcpy_there_and_back(params: MemcpyNodeParams, kinds: tuple[int, int]) -> None:
    raw = cu.Memcpy3D()
    fill_memcpy(raw, params, *kinds)
    assert read_memcpy(raw) == params


def test_memcpy_offsets_are_folded_and_arrays_are_opaque() -> None:
    raw = cu.Memcpy3D()
    fill_memcpy(raw, MemcpyNodeParams(0x1000, 0x2000, 64, 8), 2, 2)
    raw.srcXInBytes, raw.srcY, raw.srcPitch = 4, 2, 256
    assert read_memcpy(raw).src == 0x2000 + 2 * 256 + 4
    raw.dstMemoryType = cu.MEMORY_ARRAY
    assert read_memcpy(raw).opaque


@pytest.mark.parametrize(
    "params", [MemsetNodeParams(0x1000, 7, 1, 64), MemsetNodeParams(0x1000, 7, 4, 64, 3, 512)]
)
def test_memset_there_and_back(params: MemsetNodeParams) -> None:
    raw = cu.MemsetParams()
    fill_memset(raw, params, 0x99, "test")
    assert read_memset(raw) == params
    assert raw.ctx == 0x99


def test_memset_values_are_checked() -> None:
    assert unsigned(0xFFFF, 2, ELEMENT_SIZES, "memset") == 0xFFFF
    for value, size in ((256, 1), (-1, 1), (1 << 32, 4), (1, 3)):
        with pytest.raises(DriverError, match="memset"):
            unsigned(value, size, ELEMENT_SIZES, "memset")


def test_memory_operations_there_and_back() -> None:
    params = BatchMemOpNodeParams(
        (
            MemOp(MemOpKind.WRITE, 0x1000, 5),
            MemOp(MemOpKind.WAIT_GEQ, 0x1000, 1 << 40, 8),
            MemOp(MemOpKind.WAIT_NOR, 0x1000, 3),
        )
    )
    array = mem_op_array(params, "test")
    raw = cu.BatchMemOpParams()
    raw.count, raw.paramArray = len(array), ctypes.addressof(array)
    assert read_batch(raw) == params
    array[1].operation = 6  # a barrier
    assert isinstance(read_batch(raw), OpaqueNodeParams)
    with pytest.raises(DriverError):
        mem_op_array(BatchMemOpNodeParams((MemOp(MemOpKind.WRITE, 0x1000, 1 << 32),)), "test")


def test_cycles_are_found() -> None:
    a, b, c = NodeHandle(1), NodeHandle(2), NodeHandle(3)
    assert not has_cycle([Edge(a, b), Edge(b, c), Edge(a, c)])
    assert has_cycle([Edge(a, b), Edge(b, c), Edge(c, a)])
    assert has_cycle([Edge(a, a)])
