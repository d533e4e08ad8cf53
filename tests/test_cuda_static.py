"""What can be known of the CUDA driver without a GPU: its shape, its structures, its refusals."""

from __future__ import annotations

import ctypes
import inspect
import json
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ostinato.device import open_device
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
    NodeKind,
    OpaqueNodeParams,
    ParameterSlot,
)
from ostinato.driver.cuda import collecting
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
from ostinato.driver.host.driver import HostDriver
from ostinato.errors import DriverError, NoCudaError, NotAvailableError, Status
from tools import cuda_versions
from tools.cuda_versions import STRUCTURES, fields_of

INSTALL_LINE = 'pip install "ostinato[cuda13]"'


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


@pytest.mark.parametrize(
    ("name", "started"),
    [(None, [0]), ("cuda:3", [3]), (2, [2]), ("host", []), ("cuda:x", []), (1.5, [])],
)
def test_a_driver_starts_before_modules_are_imported(name: object, started: list[int]) -> None:
    """In a process that has imported none; one that has them opens the device at once."""
    script = f"""
import sys
import ostinato
from ostinato.driver.cuda import starting

class Fake:
    def __init__(self, ordinal):
        if "ostinato.driver.cuda.driver" in sys.modules:
            return  # where there is a GPU, its driver makes one too
        assert not {{"numpy", "ostinato.device"}} & {{*sys.modules}}
        made.append(ordinal)

    def release(self):
        assert "ostinato.device" in sys.modules
        released.append(self)

made, released = [], []
starting.StartingDriver = Fake
for _ in range(2):
    try:
        ostinato.open_device({name!r}).close()
    except ostinato.OstinatoError:
        pass
assert made == {started} and len(released) >= {len(started)}
"""
    environment = {n: v for n, v in os.environ.items() if n != "OSTINATO_DEVICE"}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment)


def test_no_library_says_what_to_install() -> None:
    with pytest.raises(NoCudaError, match=re.escape(INSTALL_LINE)):
        Libcuda("libcuda-of-no-machine.so.1")


class _Cupti:
    """A libcupti that refuses."""

    def cuptiSubscribe(self, *_: object) -> int:
        return 999


@pytest.mark.parametrize(
    ("library", "error", "words"),
    [
        (None, NoCudaError, INSTALL_LINE),
        ({"cuInit": Status.NO_DEVICE}, NoCudaError, "cuInit failed with status 100"),
        ({}, NoCudaError, "the driver sees no GPU"),
        ({"count": 1}, NotAvailableError, "cuptiSubscribe failed with status 999"),
    ],
    ids=["no driver", "no device", "no GPU", "a GPU"],
)
def test_libcupti_without_cuda(
    monkeypatch: pytest.MonkeyPatch,
    library: dict[str, int] | None,
    error: type[NotAvailableError],
    words: str,
) -> None:
    """A library that is half there: what is missing is CUDA, whatever it says itself."""

    def libcuda() -> object:
        if library is None:
            return Libcuda("libcuda-of-no-machine.so.1")

        def count(found: Any) -> int:
            found._obj.value = library.get("count", 0)
            return 0

        return {"cuInit": lambda flags: library.get("cuInit", 0), "cuDeviceGetCount": count}

    monkeypatch.setattr(collecting, "_collector", None)
    monkeypatch.setattr(collecting, "Libcuda", libcuda)
    monkeypatch.setattr(collecting, "_find", lambda: (_Cupti(), "libcupti.so.13"))
    with pytest.raises(error, match=re.escape(words)) as caught:
        collecting.collect_modules()
    assert type(caught.value) is error
    assert collecting._collector is None


def test_collecting_without_cuda_leaves_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """open_device() without a name takes the host where there is no CUDA, also then."""
    monkeypatch.setenv("OSTINATO_COLLECT_MODULES", "1")
    monkeypatch.delenv("OSTINATO_DEVICE", raising=False)
    monkeypatch.setattr(collecting, "_collector", None)
    monkeypatch.setattr(collecting, "Libcuda", lambda: Libcuda("libcuda-of-no-machine.so.1"))
    monkeypatch.setattr(collecting, "_find", lambda: (_Cupti(), "libcupti.so.13"))
    with open_device() as device:
        assert device.name == "host"


def test_no_cuda_core_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "Libcuda", dict)
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    with pytest.raises(NoCudaError, match=re.escape(INSTALL_LINE)) as caught:
        CudaDriver()
    assert "cuda.core" in str(caught.value)


# ----------------------------------------------------------------------------------- the protocol


MEMBERS = sorted(
    name
    for name, value in vars(api.Driver).items()
    if not name.startswith("_") and inspect.isfunction(value)
)


@pytest.mark.parametrize("driver", [CudaDriver, HostDriver])
@pytest.mark.parametrize("member", MEMBERS)
def test_driver_has_the_protocol(driver: type, member: str) -> None:
    expected = inspect.signature(getattr(api.Driver, member)).parameters
    actual = inspect.signature(inspect.getattr_static(driver, member)).parameters
    assert [(p.name, p.kind, p.default) for p in actual.values()] == [
        (p.name, p.kind, p.default) for p in expected.values()
    ]


# ---------------------------------------------------------------- against cuda.h, of every version

TABLE = json.loads(cuda_versions.TABLE.read_text(encoding="utf-8"))


def _version(text: str) -> tuple[int, int]:
    major, minor = text.split(".")
    return int(major), int(minor)


VERSIONS = [text for text in TABLE["versions"] if _version(text) >= cu.REQUIRED]


def _layout_in(version: tuple[int, int], name: str) -> dict[str, int]:
    """The fields of a structure as the table has them for a version; "" is the size."""
    found: dict[str, int] = {}
    for since, changed in TABLE["structures"][name].items():
        if _version(since) <= version:
            found |= changed
    return found


# Used inside CUgraphNodeParams alone, whose size is fixed and whose other bytes are zero: CUDA lets
# these grow.
GROWING = {
    "CUDA_CHILD_GRAPH_NODE_PARAMS",  # 12.9
    "CUDA_EVENT_RECORD_NODE_PARAMS",  # 13.4
    "CUDA_HOST_NODE_PARAMS_v2",  # 13.2 and 13.4
}


def _disagreements(layouts: dict[str, dict[str, int]]) -> list[str]:
    """What is wrong with our structures for a driver that has these layouts."""
    wrong: list[str] = []
    for name, kind in STRUCTURES.items():
        layout, ours = layouts.get(name), fields_of(kind)
        if layout is None:
            wrong.append(f"there is no {name}")
            continue
        size = layout[""]
        if (
            name == "CUDA_MEMSET_NODE_PARAMS"
        ):  # the driver writes fewer fields than we have room for
            fits = size <= ctypes.sizeof(kind)
        elif name in GROWING:
            fits = max(size, ctypes.sizeof(kind)) <= ctypes.sizeof(cu.NodeParamsUnion)
        else:
            fits = size == ctypes.sizeof(kind)
        if not fits:
            wrong.append(f"{name} has {size} bytes, ours {ctypes.sizeof(kind)}")
        # `reserved` gives way to new fields; we leave it zero.
        wrong += [
            f"{name}.{field} lies at {at}, ours at {ours[field]}"
            for field, at in layout.items()
            if field and ours[field] != at and not field.endswith("reserved")
        ]
    return wrong


@pytest.mark.parametrize("version", VERSIONS)
def test_structures_are_those_of_every_version(version: str) -> None:
    layouts = {name: _layout_in(_version(version), name) for name in STRUCTURES}
    assert _disagreements({name: layout for name, layout in layouts.items() if layout}) == []


def test_every_field_is_in_some_version() -> None:
    newest = _version(VERSIONS[-1])
    for name, kind in STRUCTURES.items():
        missing = fields_of(kind).keys() - _layout_in(newest, name).keys()
        # What the getter of version 1 does not write.
        assert missing == ({"ctx"} if name == "CUDA_MEMSET_NODE_PARAMS" else set()), name


def test_a_disagreement_would_be_noticed() -> None:
    layouts = {name: _layout_in((13, 0), name) for name in STRUCTURES}
    layouts["CUgraphEdgeData"] = layouts["CUgraphEdgeData"] | {"": 9, "type": 3}
    del layouts["CUDA_MEMCPY3D"]
    assert _disagreements(layouts) == [
        "CUgraphEdgeData has 9 bytes, ours 8",
        "CUgraphEdgeData.type lies at 3, ours at 2",
        "there is no CUDA_MEMCPY3D",
    ]


def test_calls_are_those_of_every_version() -> None:
    """The table's parameters were checked by a compiler against each header that has the call."""
    ours = {symbol: ", ".join(types) for symbol, types in parse_prototypes().items()}
    assert {symbol: entry["parameters"] for symbol, entry in TABLE["calls"].items()} == ours
    since = {symbol: _version(entry["since"]) for symbol, entry in TABLE["calls"].items()}
    assert {symbol: found for symbol, found in since.items() if found > cu.REQUIRED} == cu.SINCE


def test_features_came_with_what_they_need() -> None:
    numbers, calls = TABLE["numbers"], TABLE["calls"]
    assert cu.in_words(cu.BRANCHES.since) == numbers["CU_GRAPH_COND_TYPE_SWITCH"]["since"]
    assert cu.in_words(cu.READ_CONDITIONAL.since) == calls["cuGraphNodeGetParams"]["since"]
    # No earlier one would do: a kernel's parameters can be read since then.
    assert cu.in_words(cu.REQUIRED) == calls["cuFuncGetParamInfo"]["since"]
    later = {name for name, entry in numbers.items() if _version(entry["since"]) > cu.REQUIRED}
    # Attributes that are only shown where a node has them.
    shown = {
        "CU_LAUNCH_ATTRIBUTE_PREFERRED_CLUSTER_DIMENSION",
        "CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT",
    }
    assert later == {"CU_GRAPH_COND_TYPE_SWITCH"} | shown


OUR_NUMBERS = {
    "CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW": cu.ATTRIBUTE_ACCESS_POLICY_WINDOW,
    "CU_LAUNCH_ATTRIBUTE_COOPERATIVE": cu.ATTRIBUTE_COOPERATIVE,
    "CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION": cu.ATTRIBUTE_CLUSTER_DIMENSION,
    "CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE": cu.ATTRIBUTE_CLUSTER_SCHEDULING,
    "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION": (
        cu.ATTRIBUTE_PROGRAMMATIC_SERIALIZATION
    ),
    "CU_LAUNCH_ATTRIBUTE_PRIORITY": cu.ATTRIBUTE_PRIORITY,
    "CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP": cu.ATTRIBUTE_MEM_SYNC_DOMAIN_MAP,
    "CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN": cu.ATTRIBUTE_MEM_SYNC_DOMAIN,
    "CU_LAUNCH_ATTRIBUTE_PREFERRED_CLUSTER_DIMENSION": cu.ATTRIBUTE_PREFERRED_CLUSTER,
    "CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE": cu.ATTRIBUTE_DEVICE_UPDATABLE,
    "CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT": cu.ATTRIBUTE_SHARED_CARVEOUT,
    "CU_GRAPH_NODE_TYPE_KERNEL": NodeKind.KERNEL,
    "CU_GRAPH_NODE_TYPE_MEMCPY": NodeKind.MEMCPY,
    "CU_GRAPH_NODE_TYPE_MEMSET": NodeKind.MEMSET,
    "CU_GRAPH_NODE_TYPE_HOST": NodeKind.HOST,
    "CU_GRAPH_NODE_TYPE_GRAPH": NodeKind.CHILD_GRAPH,
    "CU_GRAPH_NODE_TYPE_EMPTY": NodeKind.EMPTY,
    "CU_GRAPH_NODE_TYPE_WAIT_EVENT": NodeKind.EVENT_WAIT,
    "CU_GRAPH_NODE_TYPE_EVENT_RECORD": NodeKind.EVENT_RECORD,
    "CU_GRAPH_NODE_TYPE_EXT_SEMAS_SIGNAL": NodeKind.SEMAPHORE_SIGNAL,
    "CU_GRAPH_NODE_TYPE_EXT_SEMAS_WAIT": NodeKind.SEMAPHORE_WAIT,
    "CU_GRAPH_NODE_TYPE_MEM_ALLOC": NodeKind.MEM_ALLOC,
    "CU_GRAPH_NODE_TYPE_MEM_FREE": NodeKind.MEM_FREE,
    "CU_GRAPH_NODE_TYPE_BATCH_MEM_OP": NodeKind.BATCH_MEM_OP,
    "CU_GRAPH_NODE_TYPE_CONDITIONAL": NodeKind.CONDITIONAL,
    "CU_GRAPH_COND_TYPE_IF": api.ConditionalKind.IF,
    "CU_GRAPH_COND_TYPE_WHILE": api.ConditionalKind.WHILE,
    "CU_GRAPH_COND_TYPE_SWITCH": api.ConditionalKind.SWITCH,
    "CU_GRAPH_DEPENDENCY_TYPE_DEFAULT": api.EdgeType.DEFAULT,
    "CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC": api.EdgeType.PROGRAMMATIC,
    "CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC": 1,
    "CU_GRAPH_KERNEL_NODE_PORT_LAUNCH_ORDER": 2,
}


def test_numbers_are_those_of_every_version() -> None:
    assert {name: entry["value"] for name, entry in TABLE["numbers"].items()} == OUR_NUMBERS
    assert set(OUR_NUMBERS) == set(cuda_versions.NUMBERS)


# ------------------------------------------------------------------ against this machine's cuda.h


def _header() -> Path | None:
    roots = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    roots += sorted(Path("/usr/local").glob("cuda*"), reverse=True)
    found = [root / "include" / "cuda.h" for root in roots]
    for folder in sys.path:
        found += Path(folder).glob("nvidia/*/include/cuda.h")
    return next((path for path in found if path.is_file()), None)


@pytest.fixture(scope="module")
def header() -> cuda_versions.Header:
    path, compiler = _header(), shutil.which("gcc") or shutil.which("cc")
    if path is None or compiler is None:
        pytest.skip("needs a C compiler and cuda.h")
    return cuda_versions.Header(path, compiler)


def test_structures_are_the_headers(header: cuda_versions.Header) -> None:
    layouts = header.layouts(STRUCTURES)
    if header.version >= cu.REQUIRED:
        assert _disagreements(layouts) == []
    if str(header) in TABLE["versions"]:
        assert layouts == {
            name: layout for name in STRUCTURES if (layout := _layout_in(header.version, name))
        }


def test_prototypes_are_the_headers(header: cuda_versions.Header) -> None:
    assert header.wrong_prototypes(parse_prototypes()) == []
    wrong = {"cuGraphDestroy": ("int",), "cuGraphCreate": ("CUgraph *", "unsigned int")}
    assert [words.split(":")[0] for words in header.wrong_prototypes(wrong)] == ["cuGraphDestroy"]
    if str(header) in TABLE["versions"]:
        since = {symbol: _version(entry["since"]) for symbol, entry in TABLE["calls"].items()}
        for symbol in parse_prototypes():
            assert header.has(symbol) is (since[symbol] <= header.version), symbol


def test_numbers_are_the_headers(header: cuda_versions.Header) -> None:
    found = header.numbers(OUR_NUMBERS)
    assert found == {name: OUR_NUMBERS[name] for name in found}
    if str(header) in TABLE["versions"]:
        entries = TABLE["numbers"].items()
        assert set(found) == {n for n, e in entries if _version(e["since"]) <= header.version}


def test_blocks_begin_with_structures() -> None:
    assert struct.calcsize(cuda_kernel.LAUNCH_HEAD) == ctypes.sizeof(cu.LaunchConfigStruct)
    assert struct.calcsize(cuda_kernel.NODE_HEAD) == ctypes.sizeof(cu.KernelParams)


# --------------------------------------------------------------------------------- pure conversions

LAYOUT = (ParameterSlot(0, 8), ParameterSlot(8, 4), ParameterSlot(16, 24))
ARGUMENTS = KernelArguments(bytes(range(40)), LAYOUT)
CONFIG = LaunchConfig((3, 2, 1), (32, 4), 1024)


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
