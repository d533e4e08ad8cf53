"""Known faults of drivers, and a probe for each: `ostinato doctor --faults`.

A probe makes the few calls that show one fault, and reports whether this machine's driver has it.
Some probes end in a lost context, so each runs in a process of its own, which has a deadline
(`survey`).
`docs/driver-faults.md` has the drivers with which a fault was found, the public reports, and the
measures of this library.

Probes use the calls of `CudaDriver` where these pass their arguments on unchanged, and libcuda's
own where `CudaDriver` or code above it may come to refuse the call.
"""

from __future__ import annotations

import ctypes
import enum
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from ctypes import byref
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from ostinato.driver.api import (
    CaptureMode,
    CaptureStatus,
    Edge,
    EdgeData,
    EdgeType,
    EmptyNodeParams,
    ExecHandle,
    GraphHandle,
    Image,
    KernelArguments,
    KernelNodeParams,
    LaunchConfig,
    MemsetNodeParams,
    NodeHandle,
    NodeParams,
    ParameterSlot,
    StreamHandle,
    UpdateVerdict,
)
from ostinato.driver.cuda.driver import CudaDriver
from ostinato.driver.signature import Signature
from ostinato.errors import DriverError, OstinatoError

DEADLINE = 60.0
"""Seconds for one probe, including the opening of the device."""

_LATE_US = 200
_CHAIN = 100
"""The number of kernels in the graphs that are timed."""
_SLOWER = 1.08
"""A ratio of times above the noise of one chain's runs, and below the 1.2 of the fault."""

_PTX = f"""
.version 7.8
.target sm_75
.address_size 64

.visible .entry nothing()
{{
    ret;
}}

// Writes a value after some time.
.visible .entry late(.param .u64 out, .param .u32 value)
{{
    .reg .pred %p<2>;
    .reg .u32 %r<2>;
    .reg .u64 %t<4>;
    ld.param.u64 %t1, [out];
    cvta.to.global.u64 %t1, %t1;
    ld.param.u32 %r1, [value];
    mov.u64 %t2, %globaltimer;
    add.u64 %t2, %t2, {1000 * _LATE_US};
WAITING:
    mov.u64 %t3, %globaltimer;
    setp.lt.u64 %p1, %t3, %t2;
    @%p1 bra WAITING;
    st.global.u32 [%t1], %r1;
    ret;
}}

.visible .entry take(.param .u64 out, .param .u64 source)
{{
    .reg .u32 %r<2>;
    .reg .u64 %t<3>;
    ld.param.u64 %t1, [out];
    cvta.to.global.u64 %t1, %t1;
    ld.param.u64 %t2, [source];
    cvta.to.global.u64 %t2, %t2;
    ld.global.u32 %r1, [%t2];
    st.global.u32 [%t1], %r1;
    ret;
}}

.visible .entry stray()
{{
    .reg .u32 %r<2>;
    .reg .u64 %t<2>;
    mov.u64 %t1, 8;
    mov.u32 %r1, 1;
    st.global.u32 [%t1], %r1;
    ret;
}}
"""

_CLUSTER_PTX = """
.version 7.8
.target sm_90
.address_size 64

// Writes how many blocks its cluster has.
.visible .entry cluster(.param .u64 out)
{
    .reg .u32 %r<2>;
    .reg .u64 %t<2>;
    ld.param.u64 %t1, [out];
    cvta.to.global.u64 %t1, %t1;
    mov.u32 %r1, %cluster_nctaid.x;
    st.global.u32 [%t1], %r1;
    ret;
}
"""
_APPLIED = "the kernel has the new value"
_KEPT = "SUCCESS, and the kernel has the old value"

_SIGNATURES = {
    "nothing": "",
    "late": "out: *u32, value: u32",
    "take": "out: *u32, source: *const u32",
    "stray": "",
}


class Verdict(enum.Enum):
    """The result of a probe, in one word."""

    PRESENT = "present"
    ABSENT = "absent"
    NOT_APPLICABLE = "not applicable"
    FAILED = "failed"
    """The probe itself failed: `ProbeResult.detail` has the reason."""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The result of a probe: the verdict, and the observation as text."""

    verdict: Verdict
    detail: str


@dataclass(frozen=True, slots=True)
class DriverFault:
    """A known fault: its name, its effect in one line, and the probe.

    `dumps`: core dumps are switched on in the probe's process, before there is a context.
    """

    name: str
    what: str
    probe: Callable[[CudaDriver], ProbeResult]
    dumps: bool = False


@dataclass(frozen=True, slots=True)
class FaultReport:
    """The result of `survey`: the device and the driver in words, and a result for each fault."""

    device: str
    driver: str
    results: dict[str, ProbeResult]


_faults: list[DriverFault] = []


_Probe: TypeAlias = Callable[[CudaDriver], ProbeResult]


def _fault(what: str, *, dumps: bool = False) -> Callable[[_Probe], _Probe]:
    """Returns a decorator that adds the fault that a probe shows, and is named after, to the known
    faults."""

    def add(probe: _Probe) -> _Probe:
        name = probe.__name__[1:].replace("_", "-")
        _faults.append(DriverFault(name, what, probe, dumps))
        return probe

    return add


def _either(present: bool, detail: str) -> ProbeResult:
    return ProbeResult(Verdict.PRESENT if present else Verdict.ABSENT, detail)


def _not_applicable(detail: str) -> ProbeResult:
    return ProbeResult(Verdict.NOT_APPLICABLE, detail)


# ------------------------------------------------------------------------------------------ probes


class _Bench:
    """A stream, words of device memory and small kernels.  The end of the process frees them."""

    def __init__(self, driver: CudaDriver) -> None:
        self.driver = driver
        self.stream = driver.stream_create()
        self._module = driver.module_load(Image("ptx", _PTX.encode()))
        self._words = driver.mem_alloc(4096)
        driver.memset(self._words, 0, 4, 1024, self.stream)
        driver.stream_synchronize(self.stream)

    def word(self, index: int) -> int:
        """Returns the address of a word; words are 256 bytes apart."""
        return self._words + 256 * index

    def write(self, index: int, value: int) -> None:
        self.driver.memset(self.word(index), value, 4, 1, self.stream)

    def read(self, index: int) -> int:
        found = bytearray(4)
        self.driver.memcpy_to_host(memoryview(found), self.word(index), self.stream)
        return int.from_bytes(found, "little")

    def kernel(self, name: str, *arguments: object) -> KernelNodeParams:
        function = self.driver.module_function(self._module, name)
        self.driver.function_load(function)
        config = LaunchConfig(1, 1)
        return KernelNodeParams(
            function, config, Signature.parse(_SIGNATURES[name]).pack(arguments)
        )

    def chain(self, *params: NodeParams) -> tuple[GraphHandle, list[NodeHandle]]:
        """Makes a graph of nodes, one after the other."""
        graph, nodes = self.driver.graph_create(), list[NodeHandle]()
        for one in params:
            nodes.append(self.driver.graph_add_node(graph, nodes[-1:], one))
        return graph, nodes

    def run(self, executable: ExecHandle) -> None:
        self.driver.exec_launch(executable, self.stream)
        self.driver.stream_synchronize(self.stream)


@_fault("a whole update reports success and keeps the old launch attributes")
def _update_keeps_attributes(driver: CudaDriver) -> ProbeResult:
    if not driver.capabilities.clusters:
        return _not_applicable("this GPU has no clusters")
    bench = _Bench(driver)
    module = driver.module_load(Image("ptx", _CLUSTER_PTX.encode()))
    function = driver.module_function(module, "cluster")
    driver.function_load(function)
    layout = driver.layout_of(function) or (ParameterSlot(0, 8),)
    data = bench.word(0).to_bytes(8, "little").ljust(layout[-1].offset + layout[-1].size, b"\0")
    two, four = (
        KernelNodeParams(function, LaunchConfig(8, 32, cluster=n), KernelArguments(data, layout))
        for n in (2, 4)
    )
    (graph, (node,)), (other, _) = bench.chain(two), bench.chain(four)

    def update(run: ExecHandle) -> bool:
        return driver.exec_update(run, other).verdict is UpdateVerdict.SUCCESS

    def set_params(run: ExecHandle) -> bool:
        driver.node_set_params(node, four)  # else `CudaDriver` refuses the next call
        with suppress(DriverError):
            driver.exec_set_params(run, node, four)
            return True
        return False

    told = []
    for change in (update, set_params):
        run = driver.graph_instantiate(graph)
        bench.run(run)
        taken = change(run)
        bench.run(run)
        new = bench.read(0) == 4
        told.append((_APPLIED if new else _KEPT) if taken else "refused")
    return _either(
        _KEPT in told,
        "a kernel was launched in clusters of 2, and asked for 4: "
        f"by an update {told[0]}, by the node's parameters {told[1]}",
    )


@_fault("a memset node that is switched off no longer orders the nodes around it")
def _disabled_memset_loses_order(driver: CudaDriver) -> ProbeResult:
    bench = _Bench(driver)
    graph, nodes = bench.chain(
        bench.kernel("late", bench.word(0), 1),
        MemsetNodeParams(bench.word(1), 0, 4, 8),
        bench.kernel("take", bench.word(2), bench.word(0)),
    )
    executable = driver.graph_instantiate(graph)
    driver._call("faults", "cuGraphNodeSetEnabled", executable, nodes[1], 0)
    early, launches = 0, 10
    for _ in range(launches):
        bench.write(0, 0)
        bench.run(executable)
        driver.synchronize()
        early += bench.read(2) == 0
    return _either(
        early > 0,
        f"a memset of 8 words between two kernels, switched off: the second kernel began before "
        f"the first had ended in {early} of {launches} launches",
    )


@_fault("launches with a cooperative kernel node that is switched off end with a lost context")
def _disabled_cooperative_loses_the_context(driver: CudaDriver) -> ProbeResult:
    if not driver.capabilities.cooperative_launch:
        return _not_applicable("this GPU has no cooperative launches")
    bench = _Bench(driver)
    together = replace(bench.kernel("nothing"), config=LaunchConfig(1, 8, cooperative=True))
    graph, (node,) = bench.chain(together)
    executable, launches = driver.graph_instantiate(graph), 2
    driver._call("faults", "cuGraphNodeSetEnabled", executable, node, 0)
    what = f"{launches} launches of a graph of one cooperative kernel that is switched off"
    try:
        for _ in range(launches):
            driver.exec_launch(executable, bench.stream)
        driver.stream_synchronize(bench.stream)
    except DriverError as error:
        return _either(True, f"{what}: status {int(error.status)}")
    return _either(False, f"{what}: done")


@_fault("a new graph or node has the handle of one that was destroyed")
def _handles_are_given_again(driver: CudaDriver) -> ProbeResult:
    graphs, nodes, again = set[int](), set[int](), 0
    for _ in range(16):
        graph = driver.graph_create()
        node = driver.graph_add_node(graph, (), EmptyNodeParams())
        again += graph in graphs or node in nodes
        graphs.add(graph)
        nodes.add(node)
        driver.graph_destroy(graph)
    return _either(
        again > 0, f"of 16 graphs made and destroyed, {again} had the handle of one before"
    )


@_fault("conditions of two graphs have the same handle")
def _conditions_have_equal_handles(driver: CudaDriver) -> ProbeResult:
    first, second = (driver.conditional_create(driver.graph_create()) for _ in range(2))
    return _either(first == second, f"the first conditions of two graphs: {first:#x}, {second:#x}")


@_fault("one call that adds several edges gives all of them the data of the first")
def _first_edge_for_all(driver: CudaDriver) -> ProbeResult:
    if not driver.capabilities.programmatic_launch:
        return _not_applicable("this GPU has no programmatic launch")
    bench = _Bench(driver)
    kernel = bench.kernel("nothing")
    plain, early = EdgeData(), EdgeData(1, 0, EdgeType.PROGRAMMATIC)
    wrong = []
    for first, second in ((early, plain), (plain, early)):
        graph = driver.graph_create()
        a, b, c = (driver.graph_add_node(graph, (), kernel) for _ in range(3))
        edges = [Edge(a, c, first), Edge(b, c, second)]
        driver._change_edges("faults", "cuGraphAddDependencies_v2", graph, edges)
        if set(driver.graph_edges(graph)) != set(edges):
            wrong.append("cuGraphAddDependencies")
        d = driver.graph_add_node(graph, (a, b), kernel, (first, second))
        if not {Edge(a, d, first), Edge(b, d, second)} <= set(driver.graph_edges(graph)):
            wrong.append("cuGraphAddNode")
    told = " and of ".join(dict.fromkeys(wrong))
    return _either(
        bool(wrong),
        f"two edges with different data in one call of {told} got the same"
        if wrong
        else "two edges with different data in one call have their own",
    )


@_fault("a refused call in a capture into an existing graph destroys that graph")
def _broken_capture_destroys_its_graph(driver: CudaDriver) -> ProbeResult:
    bench = _Bench(driver)
    graph, _ = bench.chain(EmptyNodeParams())
    stream = driver.stream_create()
    driver.stream_begin_capture_to_graph(stream, graph, (), CaptureMode.THREAD_LOCAL)
    driver.memset(bench.word(0), 0, 4, 1, stream)
    with suppress(DriverError):
        driver.stream_synchronize(stream)
    with suppress(DriverError):
        driver.stream_end_capture(stream)
    try:
        count = len(driver.graph_nodes(graph))
    except DriverError as error:
        return _either(
            True,
            f"a call that captures forbid, in a capture into a graph: asked for its nodes after "
            f"the capture, the driver gives status {error.status}",
        )
    return _either(False, f"the graph has {count} nodes after the capture broke")


@_fault("an executable that was uploaded and not launched slows the kernels of all replays")
def _waiting_upload_slows_replays(driver: CudaDriver) -> ProbeResult:
    bench = _Bench(driver)
    kernels = [bench.kernel("nothing") for _ in range(_CHAIN)]
    replayed, waiting = (driver.graph_instantiate(bench.chain(*kernels)[0]) for _ in range(2))
    begin, end = driver.event_create(timing=True), driver.event_create(timing=True)

    def microseconds() -> float:
        """Returns the time of one kernel, in the fastest of five rounds."""
        rounds = []
        for _ in range(5):
            bench.run(replayed)
            driver.event_record(begin, bench.stream)
            for _ in range(20):
                driver.exec_launch(replayed, bench.stream)
            driver.event_record(end, bench.stream)
            driver.stream_synchronize(bench.stream)
            rounds.append(1e6 * driver.event_elapsed(begin, end) / (20 * _CHAIN))
        return min(rounds)

    before = microseconds()
    driver.exec_upload(waiting, bench.stream)
    meanwhile = microseconds()
    bench.run(waiting)
    after = microseconds()
    return _either(
        meanwhile > _SLOWER * max(before, after),
        f"a kernel of a replay of {_CHAIN} took {before:.2f} us, {meanwhile:.2f} while another "
        f"executable was uploaded and not launched, {after:.2f} after its launch",
    )


@_fault("work on the legacy default stream runs during a capture and is not in the graph")
def _legacy_work_is_not_captured(driver: CudaDriver) -> ProbeResult:
    bench = _Bench(driver)
    driver.stream_begin_capture(bench.stream, CaptureMode.THREAD_LOCAL)
    status = driver._status("faults", "cuMemsetD32Async", bench.word(0), 7, 1, StreamHandle(0))
    try:
        graph = driver.stream_end_capture(bench.stream)
    except DriverError as error:
        return _either(False, f"the call gave status {status}, and the capture {error.status}")
    driver.synchronize()
    nodes, ran = len(driver.graph_nodes(graph)), bench.read(0) == 7
    return _either(
        not status and not nodes,
        f"a memset on the legacy default stream while a non-blocking stream captured: status "
        f"{status}, it {'ran at once' if ran else 'did not run'}, the graph has {nodes} nodes",
    )


@_fault("a module that is loaded during a capture is refused, or breaks the capture")
def _load_breaks_captures(driver: CudaDriver) -> ProbeResult:
    bench, status = _Bench(driver), 0
    driver.stream_begin_capture(bench.stream, CaptureMode.THREAD_LOCAL)
    try:
        module = driver.module_load(Image("ptx", _PTX.encode()))
        driver.function_load(driver.module_function(module, "nothing"))
    except DriverError as error:
        status = error.status
    broken = driver.stream_capture_info(bench.stream).status is not CaptureStatus.ACTIVE
    with suppress(DriverError):
        driver.stream_end_capture(bench.stream)
    return _either(
        broken or status != 0,
        f"a module loaded during a capture: status {status}, the capture "
        f"{'is broken' if broken else 'goes on'}",
    )


@_fault("PTX with a character outside ASCII, also in a comment, is refused")
def _ptx_is_ascii(driver: CudaDriver) -> ProbeResult:
    _Bench(driver)  # the same without it is loaded
    text = _PTX.replace("// Writes a value", "// Écrit une valeur").encode()
    try:
        driver.module_load(Image("ptx", text))
    except DriverError as error:
        return _either(True, f"PTX with É in a comment: status {error.status}")
    return _either(False, "PTX with É in a comment was loaded")


@_fault("with core dumps asked for by the API, the wait behind a fault reports success", dumps=True)
def _core_dump_hides_the_fault(driver: CudaDriver) -> ProbeResult:
    """Probes a wait after a fault.  `_ask_for_core_dump` ran before the driver was opened."""
    bench = _Bench(driver)
    kernel = bench.kernel("stray")
    driver.launch_kernel(bench.stream, kernel.function, kernel.config, kernel.arguments)
    status = driver._status("faults", "cuStreamSynchronize", bench.stream)
    return _either(
        status == 0,
        f"a kernel wrote to address 8, with core dumps on: the wait gave status {status}",
    )


_CORE_DUMP_ON_EXCEPTION, _CORE_DUMP_OF_HOST, _CORE_DUMP_LIGHT, _CORE_DUMP_FILE = 1, 2, 3, 5


def _ask_for_core_dump(folder: Path) -> str:
    """Has faults of later contexts write a core dump to a folder.  Returns why not, or ""."""
    lib = ctypes.CDLL("libcuda.so.1")
    if not hasattr(lib, "cuCoredumpSetAttributeGlobal"):
        return "this driver has no calls for core dumps"
    path = os.fsencode(folder / "core")
    wanted: list[tuple[int, ctypes.Array[ctypes.c_char] | ctypes.c_bool]] = [
        (_CORE_DUMP_ON_EXCEPTION, ctypes.c_bool(True)),
        (_CORE_DUMP_OF_HOST, ctypes.c_bool(False)),
        (_CORE_DUMP_LIGHT, ctypes.c_bool(True)),
        (_CORE_DUMP_FILE, ctypes.create_string_buffer(path)),
    ]
    lib.cuInit(0)
    for attribute, value in wanted:
        size = ctypes.c_size_t(ctypes.sizeof(value))
        status = lib.cuCoredumpSetAttributeGlobal(attribute, byref(value), byref(size))
        if status:
            return f"core dumps cannot be asked for: status {status}"
    return ""


FAULTS = tuple(_faults)


# -------------------------------------------------------------------------------- their process


def probe(ordinal: int, name: str) -> int:
    """Runs one probe, and prints its result as JSON.  Returns 0."""
    (fault,) = (fault for fault in FAULTS if fault.name == name)
    with tempfile.TemporaryDirectory() as folder:
        why = _ask_for_core_dump(Path(folder)) if fault.dumps else ""
        try:
            found = _not_applicable(why) if why else fault.probe(CudaDriver(ordinal))
        except OstinatoError as error:
            found = ProbeResult(Verdict.FAILED, f"{type(error).__name__}: {error}")
    print(json.dumps({"verdict": found.verdict.value, "detail": found.detail}), flush=True)
    if fault.dumps:
        os._exit(0)  # the driver's exit handler does not return once a context has dumped
    return 0


_PROGRAM = (
    "import sys; from ostinato.driver.cuda.faults import probe; "
    "sys.exit(probe(int(sys.argv[1]), sys.argv[2]))"
)


def survey(device: str = "cuda:0") -> FaultReport:
    """Probes every fault on a device, each in another process.

    Takes about twenty seconds.  Raises nothing for a probe that kills its process or does not end:
    its result is FAILED.  On the device "host", and without a GPU, every fault is not applicable.
    """
    if not device.startswith("cuda"):
        return _nowhere(device, "it is one of CUDA drivers, and this is the CPU driver")
    ordinal = int(device.partition(":")[2] or 0)
    try:
        driver = CudaDriver(ordinal)
    except OstinatoError as error:
        return _nowhere(device, f"there is no GPU here: {error}")
    properties = driver.properties
    driver.close()
    program = [sys.executable, "-P", "-c", _PROGRAM, str(ordinal)]
    results = {fault.name: run_probe([*program, fault.name]) for fault in FAULTS}
    words = f"{_module_version()} (CUDA {properties.driver_version})"
    return FaultReport(properties.name, words, results)


def _nowhere(device: str, why: str) -> FaultReport:
    return FaultReport(device, "none", {fault.name: _not_applicable(why) for fault in FAULTS})


def _module_version() -> str:
    """Returns the version of the kernel's driver, such as 580.159.04."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return "a version that /proc does not tell"
    found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", text)
    return found[0] if found else "a version that /proc does not tell"


def run_probe(command: Sequence[str], deadline: float = DEADLINE) -> ProbeResult:
    """Returns the result of a process that runs `probe`; FAILED if it prints none."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    try:
        ended = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=deadline,
            env=os.environ | {"PYTHONPATH": path},
        )
    except subprocess.TimeoutExpired:
        return ProbeResult(Verdict.FAILED, f"it did not end within {deadline:g} s, and was ended")
    if not ended.stdout:
        said = ended.stderr.decode("utf-8", "replace").strip().splitlines()
        why = f": {said[-1]}" if said else ""
        return ProbeResult(Verdict.FAILED, f"its process ended with status {ended.returncode}{why}")
    told = json.loads(ended.stdout)
    return ProbeResult(Verdict(told["verdict"]), told["detail"])
