"""Every call of the CUDA driver, on a libcuda of our own that does nothing: no GPU needed.

It shows that each call reaches libcuda by a name and with arguments that ctypes takes, and what
becomes of all of them once a status was sticky, the driver was closed, or the process forked.
Those libcudas are of many versions, each with the symbols that its headers have: what an older one
lacks is done in another way, or refused in words.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import itertools
import json
import random
import re
import shutil
import subprocess
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

import ostinato as ost
from ostinato.device import Device, open_device
from ostinato.driver import api
from ostinato.driver.api import (
    AllocNodeParams,
    BatchMemOpNodeParams,
    CaptureMode,
    ChildGraphNodeParams,
    ConditionalHandle,
    ConditionalKind,
    ConditionalNodeParams,
    ConditionDefaults,
    Edge,
    EdgeData,
    EmptyNodeParams,
    EventHandle,
    EventRecordNodeParams,
    EventWaitNodeParams,
    ExecHandle,
    FreeNodeParams,
    FunctionCode,
    FunctionHandle,
    GraphHandle,
    HostNodeParams,
    Image,
    InstantiateFlags,
    KernelArguments,
    KernelNodeParams,
    KernelTable,
    LaunchConfig,
    MemcpyNodeParams,
    MemOp,
    MemOpKind,
    MemsetNodeParams,
    ModuleHandle,
    NodeHandle,
    NodeKind,
    NodeParams,
    OpaqueNodeParams,
    ParameterSlot,
    StreamHandle,
)
from ostinato.driver.cuda import driver as cuda_driver
from ostinato.driver.cuda import faults
from ostinato.driver.cuda.driver import CudaDriver
from ostinato.driver.cuda.faults import FAULTS, DriverFault, Verdict
from ostinato.driver.cuda.libcuda import (
    FEATURES,
    REQUIRED,
    KernelParams,
    Libcuda,
    parse_prototypes,
)
from ostinato.driver.cuda.starting import StartingDriver
from ostinato.errors import (
    ClosedError,
    ContextPoisonedError,
    DriverError,
    GraphFileError,
    NoCudaError,
    NotAvailableError,
    Status,
)
from tests.contract.kernels import arguments
from tests.emulator.stub import core_device
from tools import cuda_versions

CONTEXT = 0x1234
STREAM, EVENT, MODULE = StreamHandle(8), EventHandle(9), ModuleHandle(3)
FUNCTION, GRAPH, NODE, EXEC = FunctionHandle(77), GraphHandle(5), NodeHandle(6), ExecHandle(7)

LAYOUT = (ParameterSlot(0, 8), ParameterSlot(8, 4))
ARGUMENTS = KernelArguments(bytes(range(12)), LAYOUT)
CONFIG = LaunchConfig(3, 64, 128)
SPECIAL = LaunchConfig(3, 64, cluster=2, cooperative=True, programmatic=True, priority=1)

KERNELS = KernelTable(
    [FUNCTION] * 2,
    [CONFIG, SPECIAL],
    [LAYOUT] * 2,
    [False] * 2,
    bytearray(range(24)),
    [0, 12],
    [12] * 2,
)

NODES: dict[str, NodeParams] = {
    "kernel": KernelNodeParams(FUNCTION, CONFIG, ARGUMENTS),
    "memcpy": MemcpyNodeParams(0x1000, 0x2000, 16, 2, dst_pitch=64),
    "memset": MemsetNodeParams(0x1000, 7, 4, 16),
    "host": HostNodeParams(lambda: None),
    "foreign host": HostNodeParams(None, 0x1000, 0x2000),
    "event record": EventRecordNodeParams(EVENT),
    "event wait": EventWaitNodeParams(EVENT),
    "batch": BatchMemOpNodeParams((MemOp(MemOpKind.WRITE, 0x1000, 5),)),
}
FIXED: dict[str, NodeParams] = {
    "kernel with attributes": KernelNodeParams(FUNCTION, SPECIAL, ARGUMENTS),
    "child graph": ChildGraphNodeParams(GRAPH),
    "empty": EmptyNodeParams(),
    "alloc": AllocNodeParams(64),
    "free": FreeNodeParams(0x1000),
    "conditional": ConditionalNodeParams(ConditionalHandle(3), ConditionalKind.WHILE),
    "if": ConditionalNodeParams(ConditionalHandle(3), ConditionalKind.IF),
}
BRANCHES: dict[str, NodeParams] = {
    "else": ConditionalNodeParams(ConditionalHandle(3), ConditionalKind.IF, 2),
    "switch": ConditionalNodeParams(ConditionalHandle(3), ConditionalKind.SWITCH, 1),
}

APART = {
    *("name", "capabilities", "properties", "close", "memory_view"),
    *("exec_prepare_launch", "function_prepare_launch", "exec_prepare_kernel", "cuda_context"),
    *("function_code", "code_image", "condition_defaults", "on_host_failure", "unraised"),
    *("memory_adopt", "memory_end_adopted", "exec_prepare_kernels", "exec_set_params"),
}
"""What calls nothing by itself, or needs more than libcuda; and a call that is below, by kinds."""

GIVEN: dict[str, object] = {
    "StreamHandle": STREAM,
    "EventHandle": EVENT,
    "ModuleHandle": MODULE,
    "GraphHandle": GRAPH,
    "FunctionHandle": FUNCTION,
    "NodeHandle": NODE,
    "ExecHandle": EXEC,
    "LaunchConfig": CONFIG,
    "KernelArguments": ARGUMENTS,
    "KernelTable": KERNELS,
    "CaptureMode": CaptureMode.RELAXED,
    "Sequence[NodeHandle]": (NODE,),
    "list[NodeHandle]": [NODE],
    "bool": False,
    "str": "kernel",
    "Sequence[Edge]": [Edge(NODE, NodeHandle(7))],
    "Sequence[tuple[int, Sequence[int]]]": [(0, [0])],
    "NodeParams": NODES["memset"],
    "Image": Image("cubin", b"code"),
    "FunctionCode": FunctionCode("kernel", "cubin", shared=65536),
    "Callable[[], object]": lambda: None,
    "bytes": bytes(64),
    "memoryview": memoryview(bytearray(8)),
    "address": 0x1000,
    "dst": 0x1000,
    "src": 0x2000,
    "nbytes": 64,
    "value": 7,
    "element_size": 4,
    "count": 16,
    "threads": 64,
    "shared": 0,
}
CALLS: dict[str, Callable[[CudaDriver], object]] = {
    name: lambda d, name=name: getattr(d, name)(**arguments(name, GIVEN))
    for name in vars(api.Driver)
    if not name.startswith("_") and name not in APART
} | {
    "launch with attributes": (
        lambda d: d.launch_kernel(STREAM, FUNCTION, SPECIAL, KernelArguments(bytes(8), (), True))
    ),
    "kernels of the slow kind": lambda d: d.graph_add_kernels(GRAPH, [NODE], KERNELS, [(1, [0])]),
    "a child graph": lambda d: d.exec_set_params(EXEC, NODE, FIXED["child graph"]),
    "upload": lambda d: d.graph_instantiate(GRAPH, InstantiateFlags.UPLOAD),
}
for _name, _params in (NODES | FIXED).items():
    CALLS[f"graph_add_node {_name}"] = lambda d, p=_params: d.graph_add_node(
        GRAPH, (NODE,), p, [EdgeData()]
    )
for _name, _params in NODES.items():
    CALLS[f"node_set_params {_name}"] = lambda d, p=_params: d.node_set_params(NODE, p)
    CALLS[f"exec_set_params {_name}"] = lambda d, p=_params: d.exec_set_params(EXEC, NODE, p)

STUB = r"""
int status, calls, kind;
int cuCtxGetCurrent(void **context) { *context = (void *)0x1234; return 0; }
int cuFuncGetParamInfo() { calls++; return status ? status : 1; }  /* no parameters */
int cuGraphKernelNodeGetParams_v2(void *node, unsigned *params) {
    for (int i = 2; i < 8; i++) params[i] = 1;  /* grid and block */
    calls++;
    return status;
}
int cuGraphGetNodes(void *graph, void **nodes, unsigned long *count) {
    calls++;
    *count = 1;
    if (nodes) *nodes = (void *)6;
    return status;
}
int cuGraphNodeGetType(void *node, int *type) { calls++; *type = kind; return status; }
int cuDriverGetVersion(int *version) { *version = VERSION; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuEventElapsedTime(float *milliseconds) { calls++; *milliseconds = 1; return status; }
int cuEventElapsedTime_v2(float *milliseconds) { calls++; *milliseconds = 2; return status; }
"""

TABLE = json.loads(cuda_versions.TABLE.read_text(encoding="utf-8"))


def number(version: str) -> int:
    """12040 for "12.4", as cuDriverGetVersion gives it."""
    major, minor = version.split(".")
    return 1000 * int(major) + 10 * int(minor)


NEWEST = TABLE["versions"][-1]
SERVED = [v for v in TABLE["versions"] if number(v) >= 1000 * REQUIRED[0] + 10 * REQUIRED[1]]
TOO_OLD = [v for v in TABLE["versions"] if v not in SERVED]

Stubs = Callable[..., Path]


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Stubs:
    """Makes a libcuda of a version, with the calls that it has: they count themselves and return
    `status`.  `without`: calls that it lacks all the same."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("libcuda")

    def make(version: str = NEWEST, without: tuple[str, ...] = ()) -> Path:
        made = folder / f"stub-{'-'.join([version, *without])}.so"
        if made.exists():
            return made
        lines = [f"#define VERSION {number(version)}", *STUB.split("\n")]
        for symbol in parse_prototypes():
            if f"int {symbol}(" not in STUB:
                lines.append(f"int {symbol}() {{ calls++; return status; }}")
        missing = {s for s, e in TABLE["calls"].items() if number(e["since"]) > number(version)}
        # Hidden, not left out: some are written over several lines.
        hidden = [f"-D{symbol}=static_{symbol}" for symbol in missing | set(without)]
        source = made.with_suffix(".c")
        source.write_text("\n".join(lines))
        command = [compiler, "-shared", "-fPIC", "-std=gnu11", *hidden, str(source)]
        subprocess.run([*command, "-o", str(made)], check=True)
        return made

    return make


@pytest.fixture(scope="module")
def stub(stubs: Stubs) -> Path:
    return stubs()


class Rig:
    """The CUDA driver on that libcuda."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._dll = ctypes.CDLL(str(path))
        self.returns(0)
        device = core_device()
        monkeypatch.setattr(cuda_driver, "_import_device", lambda: lambda _: device)
        monkeypatch.setattr(cuda_driver, "Libcuda", lambda: Libcuda(str(path)))
        monkeypatch.setattr(cuda_driver, "require_gpu", lambda lib, ordinal: None)
        monkeypatch.setattr(cuda_driver, "StartingDriver", mock.Mock())
        self.driver = CudaDriver()

    def _number(self, name: str) -> Any:
        return ctypes.c_int.in_dll(self._dll, name)

    def returns(self, status: int, kind: int = 0) -> None:
        self._number("status").value, self._number("kind").value = status, kind

    @property
    def calls(self) -> int:
        return int(self._number("calls").value)


@pytest.fixture
def rig(stub: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    made = Rig(stub, monkeypatch)
    yield made
    made.returns(0)


def test_edges_with_different_data_go_to_libcuda_in_calls_of_their_own(rig: Rig) -> None:
    """Some drivers give all edges of one call the data of the first."""
    early = EdgeData(from_port=1, type=api.EdgeType.PROGRAMMATIC)
    given = [(7, 9, early), (8, 9, EdgeData()), (7, 8, early)]
    taken: list[tuple[int, int, EdgeData]] = []

    def of_the_first(graph: int, sources: Any, targets: Any, data: Any, count: int) -> int:
        first = EdgeData(data[0].from_port, data[0].to_port, api.EdgeType(data[0].type))
        taken.extend((sources[i], targets[i], first) for i in range(count))
        return 0

    rig.driver._calls["cuGraphAddDependencies_v2"] = of_the_first
    edges = [Edge(NodeHandle(a), NodeHandle(b), data) for a, b, data in given]
    rig.driver.graph_add_edges(GRAPH, edges)
    assert sorted(taken, key=str) == sorted(given, key=str)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_probe_of_a_driver_fault_ends_in_a_result(
    rig: Rig, fault: DriverFault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rig.driver, "stream_create", lambda: StreamHandle(7))
    before = rig.calls
    found = fault.probe(rig.driver)
    assert isinstance(found.verdict, Verdict) and found.detail
    assert rig.calls > before


def test_a_core_dump_is_asked_for_before_there_is_a_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, object, int]] = []

    def setter(attribute: int, value: Any, size: Any) -> int:
        asked.append((attribute, value._obj.value, size._obj.value))
        return 0

    lib = SimpleNamespace(cuInit=lambda flags: 0, cuCoredumpSetAttributeGlobal=setter)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: lib)
    path = bytes(tmp_path / "core")
    assert faults._ask_for_core_dump(tmp_path) == ""
    assert asked == [(1, True, 1), (2, False, 1), (3, True, 1), (5, path, len(path) + 1)]
    del lib.cuCoredumpSetAttributeGlobal
    assert "no calls" in faults._ask_for_core_dump(tmp_path)


def raised(driver: CudaDriver) -> dict[str, object]:
    """What each call raises."""
    found: dict[str, object] = {}
    for name, call in CALLS.items():
        try:
            found[name] = call(driver)
        except ost.OstinatoError as error:
            found[name] = error
    return found


def test_a_refused_call_raises_its_status(rig: Rig) -> None:
    rig.returns(Status.INVALID_HANDLE)
    for name, error in raised(rig.driver).items():
        assert isinstance(error, DriverError) and error.status == Status.INVALID_HANDLE, name


@pytest.mark.parametrize("ended", ["nothing was called", "closed", "forked"])
def test_after_the_end_nothing_is_called(rig: Rig, ended: str) -> None:
    """After a sticky status, after `close`, and in a child process."""
    if ended == "closed":
        rig.driver.close()
    elif ended == "forked":
        rig.driver.after_fork()
    else:
        rig.returns(Status.ILLEGAL_ADDRESS)
        with pytest.raises(ContextPoisonedError):
            rig.driver.synchronize()
        rig.returns(0)
    kind = ContextPoisonedError if ended == "nothing was called" else ClosedError
    before = rig.calls
    for name, error in raised(rig.driver).items():
        assert isinstance(error, kind) and ended in str(error), name
    assert rig.calls == before


@pytest.mark.parametrize("kind", NodeKind)
def test_every_kind_of_node_is_read(rig: Rig, kind: NodeKind) -> None:
    rig.returns(0, kind)
    assert rig.driver.node_kind(NODE) is kind
    rig.driver.node_params(NODE)


SEMAPHORES = (NodeKind.SEMAPHORE_SIGNAL, NodeKind.SEMAPHORE_WAIT)


@pytest.mark.usefixtures("launcher")
@pytest.mark.parametrize("kind", SEMAPHORES)
def test_a_graph_with_an_external_semaphore_is_read(
    rig: Rig, kind: NodeKind, tmp_path: Path
) -> None:
    """By the reader in C and the one in Python, for all that is made of a graph.  Such a node comes
    from Vulkan or Direct3D, which a machine for tests does not have."""
    rig.returns(0, kind)
    device = Device(rig.driver)
    graph = ost.Graph.adopt(device, GRAPH, owner=None)
    (node,) = graph.nodes()
    word = kind.name.lower()
    assert (node.handle, node.kind, node.name) == (NODE, kind, word)
    assert node.params == rig.driver.node_params(NODE)
    assert isinstance(node.params, OpaqueNodeParams)
    assert "external semaphore" in node.params.why
    for shown in (str(graph), graph.to_dot(), json.dumps(graph.to_dict()), graph.to_svg()):
        assert word in shown or word.replace("_", " ") in shown
    with pytest.raises(GraphFileError, match=rf"node 0 \({word}\) cannot be saved.*semaphore"):
        ost.graphfile.save(graph, tmp_path / "graph")
    digest = graph.digest()
    assert not graph.diff(graph)
    rig.returns(0, next(other for other in SEMAPHORES if other is not kind))
    assert ost.Graph.adopt(device, GRAPH, owner=None).digest() != digest


@pytest.mark.parametrize("name", [name for name in FIXED if name != "kernel with attributes"])
def test_what_cannot_change_is_refused(rig: Rig, name: str) -> None:
    with pytest.raises(DriverError, match="node_set_params"):
        rig.driver.node_set_params(NODE, FIXED[name])
    if name != "child graph":
        with pytest.raises(DriverError, match="exec_set_params"):
            rig.driver.exec_set_params(EXEC, NODE, FIXED[name])
    with pytest.raises(DriverError, match="can only be shown"):
        rig.driver.graph_add_node(GRAPH, (), OpaqueNodeParams("why"))


def test_arguments_of_an_unloaded_module_are_checked_again(rig: Rig) -> None:
    """The driver may give the same handle to a function that takes more."""
    driver = rig.driver
    driver.launch_kernel(STREAM, FUNCTION, CONFIG, ARGUMENTS)
    driver.module_unload(MODULE)
    driver._layouts[FUNCTION] = (*LAYOUT, ParameterSlot(16, 8))
    with pytest.raises(DriverError, match="takes 3 of 24"):
        driver.launch_kernel(STREAM, FUNCTION, CONFIG, ARGUMENTS)


def give_again(driver: CudaDriver, symbol: str, makes: Callable[[], object]) -> None:
    """The next destroying call frees a handle, and another thread has `makes` get it before that
    call has returned to us."""
    calls: Any = driver._calls
    real = calls[symbol]

    def destroy(*args: object) -> int:
        calls[symbol] = real
        status = int(real(*args))
        if not status:
            makes()
        return status

    calls[symbol] = destroy


WHILE = ConditionalNodeParams(ConditionalHandle(3), ConditionalKind.WHILE)


@pytest.mark.parametrize("removed", ["graph", "node"])
def test_a_conditional_node_with_a_handle_that_was_free(
    opened: Callable[..., Rig], removed: str
) -> None:
    """A driver before 13.2 cannot read it, so what we know of it must not go with the old one."""
    rig = opened("12.8")
    driver = rig.driver
    node = driver.graph_add_node(GRAPH, (), WHILE)
    destroy = (
        partial(driver.graph_destroy, GRAPH)
        if removed == "graph"
        else (partial(driver.graph_remove_node, node))
    )
    rig.returns(Status.INVALID_VALUE, NodeKind.CONDITIONAL)
    with pytest.raises(DriverError):
        destroy()
    rig.returns(0, NodeKind.CONDITIONAL)
    assert isinstance(driver.node_params(node), ConditionalNodeParams), "it is still there"
    symbol = "cuGraphDestroy" if removed == "graph" else "cuGraphDestroyNode"
    give_again(driver, symbol, lambda: driver.graph_add_node(GRAPH, (), WHILE))
    destroy()
    assert isinstance(driver.node_params(node), ConditionalNodeParams)
    destroy()
    assert isinstance(driver.node_params(node), OpaqueNodeParams), "another library's"


def test_a_conditional_node_with_the_handle_of_one_that_was_removed(
    opened: Callable[..., Rig],
) -> None:
    """The graph that had held the removed one took the other with it when it was destroyed."""
    rig = opened("12.8")
    driver, other = rig.driver, GraphHandle(GRAPH + 1)
    driver.graph_remove_node(driver.graph_add_node(GRAPH, (), WHILE))
    node = driver.graph_add_node(other, (), WHILE)
    rig.returns(0, NodeKind.CONDITIONAL)
    driver.graph_destroy(GRAPH)
    assert isinstance(driver.node_params(node), ConditionalNodeParams)
    driver.graph_destroy(other)
    assert isinstance(driver.node_params(node), OpaqueNodeParams)


def test_conditions_of_two_graphs_may_have_one_handle(rig: Rig) -> None:
    """As libcuda gives them: a condition is told by its node, and the graph that this is in."""
    driver, calls = rig.driver, rig.driver._calls
    numbers, bodies = itertools.count(100), []

    def handle(out: Any, *args: object) -> int:
        out._obj.value = 1
        return 0

    def add(out: Any, graph: int, *args: Any) -> int:
        out._obj.value = next(numbers)
        bodies.append((ctypes.c_uint64 * 1)(next(numbers)))
        args[-1]._obj.conditional.phGraph_out = ctypes.addressof(bodies[-1])
        return 0

    calls["cuGraphConditionalHandleCreate"], calls["cuGraphAddNode_v2"] = handle, add
    graphs = [GraphHandle(11), GraphHandle(12)]
    conditions = [driver.conditional_create(g, default=n) for n, g in enumerate(graphs)]
    assert conditions[0] == conditions[1]
    nodes = [
        driver.graph_add_node(g, (), ConditionalNodeParams(c, ConditionalKind.IF))
        for g, c in zip(graphs, conditions, strict=True)
    ]
    made = [driver.condition_defaults(node) for node in nodes]
    assert made == [ConditionDefaults(0, True), ConditionDefaults(1, True)]
    # In a body, with a condition of the graph around it.
    body = GraphHandle(bodies[0][0])
    inner = driver.graph_add_node(
        body, (), ConditionalNodeParams(conditions[0], ConditionalKind.IF)
    )
    assert driver.condition_defaults(inner) == ConditionDefaults(0, True)
    driver.graph_destroy(graphs[0])
    assert [driver.condition_defaults(node) for node in (nodes[0], inner)] == [None, None]
    assert driver.condition_defaults(nodes[1]) == ConditionDefaults(1, True)


def test_host_functions_of_an_executable_with_a_handle_that_was_free(rig: Rig) -> None:
    driver = rig.driver
    kept: list[weakref.ref[object]] = []

    def set_function() -> None:
        def function() -> None: ...

        kept.append(weakref.ref(function))
        driver.exec_set_params(EXEC, NODE, HostNodeParams(function))

    def lives() -> list[bool]:
        driver.synchronize()
        gc.collect()
        return [one() is not None for one in kept]

    set_function()
    rig.returns(Status.INVALID_VALUE)
    with pytest.raises(DriverError):
        driver.exec_destroy(EXEC)
    rig.returns(0)
    assert lives() == [True]
    give_again(driver, "cuGraphExecDestroy", set_function)
    driver.exec_destroy(EXEC)
    assert lives() == [False, True]
    driver.exec_destroy(EXEC)
    assert lives() == [False, False]


def test_a_module_with_a_handle_that_was_free(rig: Rig) -> None:
    driver = rig.driver

    def load(code: bytes) -> FunctionHandle:
        return driver.module_function(driver.module_load(Image("cubin", code)), "f")

    function = load(b"old")
    (module,) = driver._functions_of
    rig.returns(Status.INVALID_VALUE)
    with pytest.raises(DriverError):
        driver.module_unload(ModuleHandle(module))
    rig.returns(0)
    assert driver._image_of(function, "f").data == b"old"
    give_again(driver, "cuModuleUnload", lambda: load(b"new"))
    driver.module_unload(ModuleHandle(module))
    assert driver._image_of(function, "f").data == b"new"
    assert function in driver._layouts


class Recorded:
    """What reaches the calls that add kernel nodes, through ctypes."""

    def __init__(self, driver: CudaDriver) -> None:
        self.driver = driver
        self.seen: list[object] = []
        self._made = 0
        calls: Any = driver._calls
        for symbol, note in (
            ("cuGraphAddKernelNode_v2", self._node),
            ("cuGraphKernelNodeSetAttribute", self._attribute),
        ):
            kind = ctypes.CFUNCTYPE(ctypes.c_int, *calls[symbol].argtypes)
            calls[symbol] = kind(note)

    def begin(self) -> None:
        self.seen, self._made = [], 0

    def _node(self, out: int, graph: int, before: int | None, count: int, params: int) -> int:
        self._made += 1
        ctypes.c_uint64.from_address(out).value = FAR + 8 * self._made
        after = [*(ctypes.c_uint64 * count).from_address(before)] if before else []
        assert len(after) == count
        raw = KernelParams.from_address(params)
        shape = (raw.gridDimX, raw.gridDimY, raw.gridDimZ)
        shape += (raw.blockDimX, raw.blockDimY, raw.blockDimZ, raw.sharedMemBytes)
        data = self._packed(raw.extra) if raw.extra else self._laid(raw.func or 0, raw.kernelParams)
        self.seen.append((graph, after, raw.func, shape, raw.kern, raw.ctx, bool(raw.extra), data))
        return 0

    def _laid(self, function: int, pointers: int | None) -> list[bytes]:
        layout = self.driver._layouts[FunctionHandle(function)] if pointers else ()
        each = (ctypes.c_uint64 * len(layout)).from_address(pointers or 0)
        return [ctypes.string_at(at, slot.size) for at, slot in zip(each, layout, strict=True)]

    @staticmethod
    def _packed(words: int) -> bytes:
        """Of cuda.h: CU_LAUNCH_PARAM_BUFFER_POINTER (1), _BUFFER_SIZE (2), _END (0)."""
        first, data, second, size, end = (ctypes.c_uint64 * 5).from_address(words)
        assert (first, second, end) == (1, 2, 0)
        return ctypes.string_at(data, ctypes.c_uint64.from_address(size).value)

    def _attribute(self, node: int, which: int, value: int) -> int:
        self.seen.append((node, which, ctypes.string_at(value, 16)))
        return 0


FAR = 0x7F12_3456_7000
"""Handles are addresses: wider than 32 bits."""


def drawn_layout(rng: random.Random) -> tuple[ParameterSlot, ...]:
    layout, end = [], 0
    for _ in range(rng.choice((0, 1, 3, 12, 40))):
        size = rng.choice((1, 2, 4, 4, 8, 8, 8, 24, 200))
        align = min(size & -size, 8)
        layout.append(ParameterSlot(-(-end // align) * align, size))
        end = layout[-1].offset + size
    return tuple(layout)


def drawn_table(rng: random.Random, driver: CudaDriver) -> KernelTable:
    """Launches of some functions, in the forms that graphs have them."""
    functions = [FunctionHandle(FAR - 64 * number) for number in range(4)]
    driver._layouts.update({function: drawn_layout(rng) for function in functions})
    configs = [CONFIG, LaunchConfig((7, 5, 3), (32, 2, 2), 1 << 16), LaunchConfig(1, 1), SPECIAL]
    rows: list[tuple[FunctionHandle, LaunchConfig, KernelArguments]] = []
    for _ in range(rng.randrange(1, 30)):
        function = rng.choice(functions)
        layout = driver._layouts[function]
        size = layout[-1].offset + layout[-1].size + rng.choice((0, 0, 5)) if layout else 0
        packed = bool(layout) and rng.random() < 0.3
        given = () if packed and rng.random() < 0.5 else layout
        arguments = KernelArguments(rng.randbytes(size), given, packed)
        config = rng.choice(configs)  # also one that is equal, and another object
        rows.append((function, replace(config) if rng.random() < 0.3 else config, arguments))
    data, starts = bytearray(), []
    for _, _, arguments in rows:
        data += bytes(rng.randrange(9))
        starts.append(len(data))
        data += arguments.data
    table = KernelTable(
        [function for function, _, _ in rows],
        [config for _, config, _ in rows],
        [arguments.layout for _, _, arguments in rows],
        [arguments.packed for _, _, arguments in rows],
        data,
        starts,
        [len(arguments.data) for _, _, arguments in rows],
    )
    for row, given in enumerate(rows):
        assert table.params(row) == KernelNodeParams(*given)
    return table


@pytest.mark.parametrize("seed", range(40))
def test_many_kernels_reach_libcuda_as_each_does(rig: Rig, seed: int) -> None:
    rng, recorded = random.Random(seed), Recorded(rig.driver)
    table = drawn_table(rng, rig.driver)
    order = rng.sample(range(len(table.functions)), len(table.functions))
    first = [NodeHandle(FAR - 8), NodeHandle(FAR - 16)]
    rows = [
        (row, rng.sample(range(count), rng.randrange(min(count, 6) + 1)))
        for count, row in enumerate(order, len(first))
    ]
    graph, nodes = GraphHandle(FAR + 4), [*first]
    for row, before in rows:
        after = [nodes[place] for place in before]
        nodes.append(rig.driver.graph_add_node(graph, after, table.params(row)))
    wanted = recorded.seen
    recorded.begin()
    again = [*first]
    rig.driver.graph_add_kernels(graph, again, table, rows)
    assert again == nodes and len(nodes) == len(first) + len(rows)
    assert recorded.seen == wanted and len(wanted) >= len(rows)


def test_what_is_kept_for_launches_is_bounded(rig: Rig) -> None:
    for number in range(5000):
        arguments = KernelArguments(number.to_bytes(8, "little"), LAYOUT[:1])
        rig.driver.launch_kernel(STREAM, FUNCTION, CONFIG, arguments)
    assert len(rig.driver._prepared) <= 4096


# ------------------------------------------------------------------------------- older drivers


@pytest.fixture
def opened(stubs: Stubs, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Rig]:
    """Opens the driver on the libcuda of a version."""
    return lambda *args, **more: Rig(stubs(*args, **more), monkeypatch)


@pytest.mark.parametrize("version", SERVED)
def test_every_call_is_there_in_every_version(opened: Callable[..., Rig], version: str) -> None:
    rig = opened(version)
    assert rig.driver.properties.driver_version == version
    for name, call in CALLS.items():
        before = rig.calls
        call(rig.driver)
        assert rig.calls > before, name


@pytest.mark.parametrize("version", TOO_OLD)
def test_a_driver_that_is_too_old_is_not_opened(stubs: Stubs, version: str) -> None:
    with pytest.raises(NotAvailableError, match=f"is for CUDA {re.escape(version)};") as caught:
        Libcuda(str(stubs(version)))
    assert "needs 12.4 or later" in str(caught.value)
    assert not isinstance(caught.value, NoCudaError)


def test_a_driver_that_is_too_old_is_not_passed_over(
    stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """open_device() without a name takes the host where there is no GPU, and says so here."""
    monkeypatch.delenv("OSTINATO_DEVICE", raising=False)
    monkeypatch.setattr(cuda_driver, "_import_device", lambda: None)
    monkeypatch.setattr(cuda_driver, "Libcuda", lambda: Libcuda(str(stubs("12.2"))))
    with pytest.raises(NotAvailableError, match=r"CUDA 12\.2"):
        open_device()
    assert cuda_driver.gpu_count() == 0
    monkeypatch.setattr(cuda_driver, "Libcuda", lambda: Libcuda(str(stubs("12.4"))))
    assert cuda_driver.gpu_count() == 1


@pytest.mark.parametrize(("status", "ordinal", "calls"), [(0, 0, 4), (100, 0, 1), (0, 1 << 80, 1)])
def test_a_context_that_is_retained_ahead_is_released(
    stubs: Stubs, status: int, ordinal: int, calls: int
) -> None:
    """And what fails is left to the driver that is opened then."""
    dll = ctypes.CDLL(str(stubs()))
    ctypes.c_int.in_dll(dll, "status").value = status
    counted = ctypes.c_int.in_dll(dll, "calls")
    before = counted.value
    for _ in range(2):
        StartingDriver(ordinal, str(stubs())).release()
    ctypes.c_int.in_dll(dll, "status").value = 0
    assert counted.value - before == 2 * calls
    StartingDriver(0, "libcuda-of-no-machine.so.1").release()


def test_a_library_without_a_version_is_no_driver(stubs: Stubs) -> None:
    with pytest.raises(NoCudaError, match="does not give its version"):
        Libcuda(str(stubs(without=("cuDriverGetVersion",))))


@pytest.mark.parametrize("name", BRANCHES)
@pytest.mark.parametrize("version", SERVED)
def test_branches_are_refused_in_words(opened: Callable[..., Rig], version: str, name: str) -> None:
    rig = opened(version)
    can = rig.driver.capabilities.conditional_branches
    assert can is (number(version) >= 12080)
    before = rig.calls
    if can:
        rig.driver.graph_add_node(GRAPH, (), BRANCHES[name])
        assert rig.calls > before
        return
    with pytest.raises(NotAvailableError) as caught:
        rig.driver.graph_add_node(GRAPH, (), BRANCHES[name])
    assert rig.calls == before
    words = str(caught.value)
    assert "SWITCH" in words
    assert "CUDA 12.8" in words
    assert f"for {version}" in words


def test_capabilities_say_what_is_lacking(opened: Callable[..., Rig]) -> None:
    lacks = {version: opened(version).driver.capabilities.lacks for version in SERVED}
    assert [len(lacks[version]) for version in ("12.4", "12.8", "13.0", "13.2")] == [2, 1, 1, 0]
    assert "(from CUDA 12.8)" in lacks["12.4"][0]
    assert all(feature.words in lacks["12.4"][at] for at, feature in enumerate(FEATURES))


def test_doctor_says_what_is_lacking(
    opened: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    doctor = importlib.import_module("ostinato.cli.doctor")
    library = SimpleNamespace(version=(13, 0))
    toolchain = SimpleNamespace(library=lambda: library)
    monkeypatch.setattr("ostinato.modules.compiler.toolchain", toolchain)
    opened("12.4")  # `doctor` opens the same
    found = doctor.findings()["cuda"]
    assert (found["driver"], found["branches"]) == ("12.4", "no")
    assert "SWITCH node (from CUDA 12.8)" in found["lacks"]
    assert (
        'NVRTC 13.0 compiles (from CUDA 13.0): update the driver, or pip install "ostinato['
        in (found["lacks"])
    )
    library.version = (12, 9)
    assert "NVRTC" not in doctor.findings()["cuda"]["lacks"]
    opened("13.2")
    assert doctor.findings()["cuda"]["lacks"] == "nothing"


def test_elapsed_time_is_asked_in_the_newest_way(opened: Callable[..., Rig]) -> None:
    found = {v: opened(v).driver.event_elapsed(EVENT, EVENT) for v in ("12.4", "12.6", "12.8")}
    assert found == {"12.4": 0.001, "12.6": 0.001, "12.8": 0.002}, "in seconds"


def test_foreign_conditional_nodes_are_read_where_they_can_be(opened: Callable[..., Rig]) -> None:
    rig = opened("12.8")
    rig.returns(0, NodeKind.CONDITIONAL)
    found = rig.driver.node_params(NODE)
    assert isinstance(found, OpaqueNodeParams)
    assert "CUDA 13.2" in found.why
    assert "12.8" in found.why
    rig = opened("13.2")
    rig.returns(0, NodeKind.CONDITIONAL)
    assert isinstance(rig.driver.node_params(NODE), ConditionalNodeParams)


def test_a_call_that_should_be_there_is_named(opened: Callable[..., Rig]) -> None:
    rig = opened("13.0", without=("cuGraphUpload",))
    with pytest.raises(NotAvailableError, match=r"cuGraphUpload is not in this driver.*not whole"):
        rig.driver.exec_upload(EXEC, STREAM)


@pytest.mark.parametrize("status", [Status.INVALID_IMAGE, Status.UNSUPPORTED_PTX_VERSION])
def test_code_of_a_newer_compiler(opened: Callable[..., Rig], status: Status) -> None:
    rig = opened("12.6")
    rig.returns(status)
    with pytest.raises(DriverError, match=r"is for CUDA 12\.6.*up to CUDA 12\.x") as caught:
        rig.driver.module_load(Image("cubin", b"code"))
    assert caught.value.status == status
