"""The driver protocol, which separates this library from the drivers.  Read this file first.

A `Driver` is one device context behind flat calls in the driver API's own terms: integer handles
in, integer handles and frozen records out, and an error of `errors.driver_error` with the driver's
status when a call is refused.  Two drivers implement it: `driver.cuda` (libcuda, called through
ctypes) and `driver.host` (the CPU, with CUDA's rules).  Code above reads a driver's `capabilities`,
and never tests which driver it has.

Conventions that hold for both drivers:

* Addresses are integers in bytes.  Memory is raw: dtypes and shapes belong to `ostinato.memory`.
* Work is asynchronous in stream order unless a docstring says that the call waits.
* A handle is unknown after its destroy call; using it gives INVALID_HANDLE (400), never a crash.
  (CUDA itself does not promise this for every handle; the objects above this protocol ensure it.)
* Calls may come from any thread.  A capture not in relaxed mode ends on the thread that began it.
* A status in `errors.ContextPoisonedError` is sticky: every later call raises it again.
"""

from __future__ import annotations

import enum
import operator
import re
from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import field
from typing import TYPE_CHECKING, Any, NewType, Protocol, TypeAlias, TypeVar

from ostinato.errors import DriverError, GraphError, InputError
from ostinato.records import dataclass

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = [
    "BODY_PARAMS",
    "AllocNodeParams",
    "BatchMemOpNodeParams",
    "Capabilities",
    "CaptureInfo",
    "CaptureMode",
    "CaptureStatus",
    "ChildGraphNodeParams",
    "ConditionDefaults",
    "ConditionalHandle",
    "ConditionalKind",
    "ConditionalNodeParams",
    "CudaContext",
    "DeviceProperties",
    "Dim3",
    "Driver",
    "Edge",
    "EdgeData",
    "EdgeType",
    "EmptyNodeParams",
    "EventHandle",
    "EventRecordNodeParams",
    "EventWaitNodeParams",
    "ExecHandle",
    "FreeNodeParams",
    "FrozenGraph",
    "FunctionCode",
    "FunctionHandle",
    "FunctionInfo",
    "GraphHandle",
    "HostFailureListener",
    "HostNodeParams",
    "Image",
    "InstantiateFlags",
    "KernelArguments",
    "KernelColumns",
    "KernelNodeParams",
    "KernelSetter",
    "KernelTable",
    "LaunchAttributes",
    "LaunchConfig",
    "Link",
    "MemOp",
    "MemOpKind",
    "MemcpyNodeParams",
    "MemoryRange",
    "MemsetNodeParams",
    "ModuleHandle",
    "NodeHandle",
    "NodeKind",
    "NodeParams",
    "OpaqueNodeParams",
    "ParameterSlot",
    "StreamHandle",
    "UpdateOutcome",
    "UpdateVerdict",
]

# Handles.  Zero is never a handle, except StreamHandle(0): the legacy default stream.
StreamHandle = NewType("StreamHandle", int)
EventHandle = NewType("EventHandle", int)
ModuleHandle = NewType("ModuleHandle", int)
FunctionHandle = NewType("FunctionHandle", int)
GraphHandle = NewType("GraphHandle", int)
NodeHandle = NewType("NodeHandle", int)
ExecHandle = NewType("ExecHandle", int)
ConditionalHandle = NewType("ConditionalHandle", int)
H = TypeVar("H", bound=int)

Dim3: TypeAlias = tuple[int, int, int]


# ------------------------------------------------------------------------------------- the device


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The features of a driver.  Code above the drivers tests these, never which driver it has."""

    conditional_nodes: bool
    """IF with one body, and WHILE."""
    conditional_branches: bool
    """IF with an ELSE body too, and SWITCH."""
    batch_memory_ops: bool
    memory_nodes: bool
    """Alloc and free nodes."""
    programmatic_launch: bool
    """Programmatic dependent launch: a kernel may start before its predecessor ends."""
    clusters: bool
    cooperative_launch: bool
    host_memory_is_device_memory: bool
    """True if the process itself can read and write device memory at its addresses."""
    image_kinds: frozenset[str]
    """The kinds of images that `module_load` takes: "cubin", "ptx", "fatbin", "host"."""
    source_language: str
    """The language of kernels: "cuda" (CUDA C++) or "host" (registered functions)."""
    shares_memory: bool = False
    """True if other devices, also of other processes, can open its memory (`memory_share`)."""
    lacks: tuple[str, ...] = ()
    """Features that a newer driver for the same device has, in words, with the version needed."""

    @property
    def compiles_cuda(self) -> bool:
        """True if kernels in CUDA C++ are compiled for this device."""
        return self.source_language == "cuda"

    @property
    def runs_host_functions(self) -> bool:
        """True if kernels are Python functions (`driver.host.kernel.HostKernel`)."""
        return self.source_language == "host"


@dataclass(frozen=True, slots=True)
class DeviceProperties:
    """The properties of a device.  Sizes in bytes; zero where a driver cannot tell."""

    name: str
    compute_capability: tuple[int, int]
    multiprocessors: int
    total_memory: int
    l2_cache: int
    max_threads_per_block: int
    max_shared_per_block: int
    memory_bandwidth: int
    """Bytes a second, computed from the memory's clock and width; no kernel reaches it."""
    driver_version: str


@dataclass(frozen=True, slots=True)
class MemoryRange:
    """A range of memory in bytes: an allocation, or a part of one."""

    address: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.address + self.nbytes

    def holds(self, address: int, nbytes: int = 1) -> bool:
        """True if `nbytes` bytes from `address` lie wholly inside."""
        return self.address <= address and address + nbytes <= self.end

    def overlaps(self, other: MemoryRange) -> bool:
        """True if both have a byte in common, or if one without bytes lies inside the other."""
        return self.address < other.end and other.address < self.end


# ------------------------------------------------------------------------------ modules and kernels


@dataclass(frozen=True, slots=True)
class Image:
    """Compiled code that `module_load` takes.

    `kind` is "cubin", "ptx" or "fatbin" with `data`, or "host" with `functions`: entry name to
    `driver.host.kernel.HostKernel`.
    """

    kind: str
    data: bytes = b""
    functions: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ParameterSlot:
    """The place of one kernel parameter in the packed parameter buffer, in bytes."""

    offset: int
    size: int

    @property
    def words(self) -> range:
        """The buffer offsets of the aligned 8-byte words that lie wholly in the parameter."""
        return range(-(-self.offset // 8) * 8, self.offset + self.size - 7, 8)


@dataclass(frozen=True, slots=True)
class FunctionInfo:
    """The driver's data on a loaded function.  Bytes; zero where the driver cannot tell."""

    name: str
    parameters: tuple[ParameterSlot, ...]
    max_threads_per_block: int
    registers: int
    static_shared: int
    local: int


@dataclass(frozen=True, slots=True)
class FunctionCode:
    """The code of a loaded function and the attributes set on it, for another process to load.

    `kind` is that of an `Image`.  Compiled code is in `data`; for a kernel of the host, `target` is
    "module:name", under which the loading process finds the same Python object.
    """

    name: str
    """The entry name in the image."""
    kind: str
    data: bytes = field(default=b"", repr=False)
    target: str = ""
    shared: int = 0
    """Bytes of dynamic shared memory that its launches may use; 0: the default limit."""
    carveout: int = -1
    """The preferred percentage of the L1 cache's memory to use as shared memory; -1: unset."""
    wide_clusters: bool = False
    """True if clusters of more than 8 blocks are allowed."""


def _dim3(value: int | Sequence[int], what: str) -> Dim3:
    if type(value) is int and value > 0:  # the common case in code that launches
        return (value, 1, 1)
    parts = value if isinstance(value, Iterable) else (value,)
    sizes = [whole_number(part) or 0 for part in parts]
    if not 1 <= len(sizes) <= 3 or min(sizes) < 1:
        raise InputError(f"{what}={value!r}: one to three whole numbers of 1 or more are needed")
    x, y, z = (*sizes, 1, 1)[:3]
    return (x, y, z)


def not_null(handle: H, what: str) -> H:
    """Returns a driver's handle.  Raises GraphError for 0, returned without an error."""
    if not handle:
        raise GraphError(
            f"the driver gave a null {what} (handle 0) and no error, so nothing was made; close "
            "the device and open it again"
        )
    return handle


def _priority(value: int) -> int:
    number = whole_number(value)
    if number is None:
        raise InputError(f"priority={value!r}: a whole number or None is needed")
    return number


def whole_number(value: object) -> int | None:
    """Returns a whole number of Python or NumPy as an int; None for other values and for a bool."""
    try:
        return None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


_UNITS = {"": 1, "b": 1}
for _power, _prefix in enumerate("kmgt", start=1):
    _UNITS |= {f"{_prefix}b": 1000**_power, f"{_prefix}ib": 1024**_power}
_SIZE = r"(?ia)\s*(?P<number>\d{1,20}(\.\d{1,20})?)\s*(?P<unit>[a-z]*)\s*\Z"


def parse_bytes(value: int | str, what: str, least: int = 0) -> int:
    """A number of bytes from 4096 or from "4 KiB", "512 MiB", "1.5 GB" (MiB 2**20, MB 10**6).

    Raises InputError, with `what` in it, for what cannot be read or is below `least`.
    """
    nbytes = whole_number(value)
    match = re.match(_SIZE, value) if isinstance(value, str) else None
    unit = None if match is None else _UNITS.get(match["unit"].lower())
    if match is not None and unit is not None:
        number = match["number"]
        nbytes = int(float(number) * unit) if "." in number else int(number) * unit
    if nbytes is None or nbytes < least:
        raise InputError(
            f'{what}={value!r}: a number of bytes of {least} or more is needed, such as "512 MiB", '
            '"2 GB" or 4096'
        )
    return nbytes


def require_word(what: str, value: object, words: Iterable[str]) -> str:
    """The value of an option that is one of some words.  Raises InputError, which has the words."""
    words = [*words]
    if not (isinstance(value, str) and value in words):
        *others, last = (f'"{word}"' for word in words)
        raise InputError(f"{what}={value!r}: {', '.join(others)} or {last} is needed")
    return value


_Choice = TypeVar("_Choice", bound=enum.Enum)


def named_choice(what: str, value: object, choices: type[_Choice]) -> _Choice:
    """The member of an enumeration that an option names in lower case.  Raises InputError, which
    has the names."""
    return choices[require_word(what, value, map(str.lower, choices.__members__)).upper()]


@dataclass(frozen=True, slots=True)
class _LaunchFields:
    """The fields of `LaunchConfig`; every size has three dimensions."""

    grid: Dim3
    block: Dim3
    shared: int
    cluster: Dim3 | None
    cooperative: bool
    programmatic: bool
    priority: int | None


class LaunchConfig(_LaunchFields):
    """The launch configuration of a kernel.

    `grid`, `block` and `cluster` take a number or up to three of them (x, y, z); `shared` is
    dynamic shared memory a block, in bytes or as "48 KiB".  `cooperative`: all blocks are on the
    device at once, so that they can wait for each other (grid-wide barriers).  `programmatic` lets
    the kernel start before the previous one on the stream ends (programmatic stream serialization);
    `priority` is the stream priority kept by a graph's kernel node, None for the stream's own.
    Raises InputError for sizes below 1.  The driver checks upper limits at launch.
    """

    __slots__ = ()

    def __init__(
        self,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        shared: int | str = 0,
        *,
        cluster: int | Sequence[int] | None = None,
        cooperative: bool = False,
        programmatic: bool = False,
        priority: int | None = None,
    ) -> None:
        _LaunchFields.__init__(  # not super(): that takes 0.1 us of each launch with its own config
            self,
            _dim3(grid, "grid"),
            _dim3(block, "block"),
            shared if type(shared) is int and shared >= 0 else parse_bytes(shared, "shared"),
            None if cluster is None else _dim3(cluster, "cluster"),
            bool(cooperative),
            bool(programmatic),
            None if priority is None else _priority(priority),
        )

    @property
    def plain(self) -> bool:
        """True without cluster, cooperative, programmatic and priority."""
        if self.cooperative or self.programmatic:
            return False
        return self.cluster is None and self.priority is None

    @property
    def threads_per_block(self) -> int:
        return self.block[0] * self.block[1] * self.block[2]


HostFailureListener: TypeAlias = Callable[[Callable[[], object], BaseException], object]
"""A listener for a host function and the exception that it raised (`Driver.on_host_failure`)."""

Pack: TypeAlias = Callable[[tuple[object, ...]], bytes | None]
"""Packs a kernel's values into its parameter buffer; returns None if a value does not have exactly
the type of its parameter."""

PlainLaunch: TypeAlias = Callable[[int, Dim3, Dim3, int, tuple[object, ...] | bytes], int | None]
"""A launch by stream, grid, block, shared bytes and values (`Driver.function_prepare_launch`)."""


@dataclass(frozen=True, slots=True)
class KernelArguments:
    """The arguments of one launch: the packed parameter buffer and its layout.

    The bytes are a copy, never the driver's memory.  `packed`: the launch gave one buffer through
    `extra` (as cuBLAS does) instead of a pointer for each argument; the layout is then that of the
    function, or empty where the driver cannot tell.
    """

    data: bytes
    layout: tuple[ParameterSlot, ...]
    packed: bool = False

    def __len__(self) -> int:
        return len(self.layout)

    def raw(self, index: int) -> bytes:
        """Returns the bytes of argument `index`.  Raises InputError if there is none."""
        slot = self.slot(index)
        return self.data[slot.offset : slot.offset + slot.size]

    def slot(self, index: int) -> ParameterSlot:
        """Returns the place of argument `index`.  Raises InputError if there is none."""
        if not 0 <= index < len(self.layout):
            raise InputError(f"argument {index} of {len(self.layout)}: there is no such argument")
        return self.layout[index]

    def require_size(self, index: int, value: bytes) -> None:
        """Raises InputError unless argument `index` has the size of `value`."""
        size = self.slot(index).size
        if len(value) != size:
            raise InputError(f"argument {index} takes {size} bytes, and {len(value)} were given")

    def with_bytes(self, offset: int, value: bytes) -> KernelArguments:
        """Returns a copy with other bytes at an offset of the packed buffer."""
        if not 0 <= offset <= len(self.data) - len(value):
            raise InputError(f"{len(value)} bytes at offset {offset} are outside {len(self.data)}")
        data = self.data[:offset] + value + self.data[offset + len(value) :]
        return KernelArguments(data, self.layout, self.packed)


# ------------------------------------------------------------------------------------------ capture


class CaptureMode(enum.IntEnum):
    """The calls that a capture forbids while it is under way (CUstreamCaptureMode)."""

    GLOBAL = 0
    """A forbidden call of any thread breaks this capture."""
    THREAD_LOCAL = 1
    """A forbidden call of the capturing thread breaks it, and a wait for the whole device by any
    thread.  The default of this library."""
    RELAXED = 2
    """Only calls that would have to wait break it; the caller must ensure that others are safe."""


class CaptureStatus(enum.IntEnum):
    """The state of a stream's capture (CUstreamCaptureStatus)."""

    NONE = 0
    ACTIVE = 1
    INVALIDATED = 2


@dataclass(frozen=True, slots=True)
class CaptureInfo:
    """The answer of `stream_capture_info`.

    While ACTIVE: `capture_id` identifies the capture, `graph` is the graph being built (owned by
    the capture), and `dependencies` the nodes that the stream's next node will depend on.
    """

    status: CaptureStatus
    capture_id: int = 0
    graph: GraphHandle = GraphHandle(0)
    dependencies: tuple[NodeHandle, ...] = ()


# -------------------------------------------------------------------------------------------- nodes


class NodeKind(enum.IntEnum):
    """The kinds of graph nodes by the driver's numbers (CUgraphNodeType)."""

    KERNEL = 0
    MEMCPY = 1
    MEMSET = 2
    HOST = 3
    CHILD_GRAPH = 4
    EMPTY = 5
    EVENT_WAIT = 6
    EVENT_RECORD = 7
    SEMAPHORE_SIGNAL = 8
    SEMAPHORE_WAIT = 9
    MEM_ALLOC = 10
    MEM_FREE = 11
    BATCH_MEM_OP = 12
    CONDITIONAL = 13


@dataclass(frozen=True, slots=True)
class KernelNodeParams:
    """A kernel launch.  `extra_attributes`: in words, attributes for which LaunchConfig has no
    field (shown, and kept by the driver; not settable here)."""

    function: FunctionHandle
    config: LaunchConfig
    arguments: KernelArguments
    extra_attributes: tuple[str, ...] = ()

    def with_data(self, data: bytes) -> KernelNodeParams:
        """Returns a copy with other argument bytes in the same layout."""
        arguments = KernelArguments(data, self.arguments.layout, self.arguments.packed)
        return KernelNodeParams(self.function, self.config, arguments, self.extra_attributes)


@dataclass(frozen=True, slots=True)
class LaunchAttributes:
    """The launch attributes of an executable's kernel node, which no later call changes.

    CUDA changes none of these in a whole update or with a node's parameters, and does not refuse
    most of them (libcuda 580.159: another cluster size gives SUCCESS, and once the executable was
    launched the kernel runs with the old one).  `others`: in words, attributes for which
    `LaunchConfig` has no field.  `function`: the kernel, if the node may have attributes that the
    driver does not report, else None.
    """

    cluster: Dim3 | None
    """The cluster's dimensions; None also for a cluster of one block."""
    cooperative: bool
    priority: int
    """The priority; 0 also for none."""
    others: tuple[str, ...] = ()
    function: FunctionHandle | None = None

    @classmethod
    def of(cls, config: LaunchConfig) -> LaunchAttributes:
        """Returns the attributes of a config, without `programmatic`, which a node's edges hold."""
        cluster = config.cluster
        if cluster is not None and max(cluster) <= 1:
            cluster = None
        return cls(cluster, config.cooperative, config.priority or 0)


@dataclass(frozen=True, slots=True, eq=False)
class KernelTable:
    """Kernel launches as columns, for `Driver.graph_add_kernels`: making a record for each launch
    would take longer than adding its node."""

    functions: Sequence[FunctionHandle]
    configs: Sequence[LaunchConfig]
    layouts: Sequence[tuple[ParameterSlot, ...]]
    packed: Sequence[bool]
    data: bytearray
    """The argument bytes of all rows."""
    starts: Sequence[int]
    """The offset in `data` of each row's arguments."""
    sizes: Sequence[int]

    def params(self, row: int) -> KernelNodeParams:
        start = self.starts[row]
        data = bytes(self.data[start : start + self.sizes[row]])
        arguments = KernelArguments(data, self.layouts[row], self.packed[row])
        return KernelNodeParams(self.functions[row], self.configs[row], arguments)


@dataclass(frozen=True, slots=True)
class MemcpyNodeParams:
    """A copy of `width` bytes by `height` rows by `depth` slices between linear memory.

    Pitches are bytes a row, slice heights rows a slice; zero means dense.  Addresses may be device
    or pinned host memory.  `opaque`: one side is a CUDA array; the node is shown, not settable.
    """

    dst: int
    src: int
    width: int
    height: int = 1
    depth: int = 1
    dst_pitch: int = 0
    src_pitch: int = 0
    dst_height: int = 0
    src_height: int = 0
    opaque: bool = False


@dataclass(frozen=True, slots=True)
class MemsetNodeParams:
    """Fills `width` elements of `element_size` (1, 2 or 4) bytes by `height` rows with `value`.

    `pitch` is bytes a row and matters only if `height` is over 1.
    """

    dst: int
    value: int
    element_size: int
    width: int
    height: int = 1
    pitch: int = 0


@dataclass(frozen=True, slots=True)
class HostNodeParams:
    """A host function, called with no arguments on a driver's thread.  It must not call the driver.

    `function` is None if this process did not add it through this library; `pointer` and
    `user_data` are then the raw values.
    """

    function: Callable[[], object] | None
    pointer: int = 0
    user_data: int = 0


@dataclass(frozen=True, slots=True)
class ChildGraphNodeParams:
    """A graph inside a graph.  Adding clones the child; reading returns the node's own clone."""

    graph: GraphHandle


@dataclass(frozen=True, slots=True)
class EmptyNodeParams:
    """A node without work, which joins dependencies."""


@dataclass(frozen=True, slots=True)
class EventRecordNodeParams:
    """Records the event when the node runs."""

    event: EventHandle


@dataclass(frozen=True, slots=True)
class EventWaitNodeParams:
    """Waits, when the node runs, for the event's last record."""

    event: EventHandle


@dataclass(frozen=True, slots=True)
class AllocNodeParams:
    """Allocates `nbytes` when the node runs.  `address` is fixed at adding (pass 0 to add)."""

    nbytes: int
    address: int = 0


@dataclass(frozen=True, slots=True)
class FreeNodeParams:
    """Frees the memory of an alloc node."""

    address: int


class MemOpKind(enum.IntEnum):
    """The operations of a batch memory node (CUstreamBatchMemOpType and its wait flags)."""

    WAIT_GEQ = 0
    WAIT_EQ = 1
    WAIT_AND = 2
    WAIT_NOR = 3
    WRITE = 4


@dataclass(frozen=True, slots=True)
class MemOp:
    """Writes `value` to `address`, or waits until the value there satisfies the comparison `kind`.

    `size` is 4 or 8 bytes.
    """

    kind: MemOpKind
    address: int
    value: int
    size: int = 4


@dataclass(frozen=True, slots=True)
class BatchMemOpNodeParams:
    """Writes of words and waits for their values, in this order."""

    operations: tuple[MemOp, ...]


class ConditionalKind(enum.IntEnum):
    """The use that a conditional node makes of its bodies (CUgraphConditionalNodeType)."""

    IF = 0
    """Runs body 0 if the condition is not zero, else body 1 if there is one."""
    WHILE = 1
    """Runs body 0 again as long as the condition is not zero."""
    SWITCH = 2
    """Runs body number `condition`, or nothing if there is no such body."""


@dataclass(frozen=True, slots=True)
class ConditionalNodeParams:
    """A conditional node over `size` bodies.

    Added without bodies; read back with the bodies' graphs, which the node owns and which
    `graph_add_node` or `stream_begin_capture_to_graph` fill.
    """

    handle: ConditionalHandle
    kind: ConditionalKind
    size: int = 1
    bodies: tuple[GraphHandle, ...] = ()


@dataclass(frozen=True, slots=True)
class ConditionDefaults:
    """The first value of a condition, and whether each launch resets the condition to it."""

    default: int
    reset_at_launch: bool


@dataclass(frozen=True, slots=True)
class OpaqueNodeParams:
    """A node that this library shows but neither makes nor changes; `why` is the reason."""

    why: str


NodeParams: TypeAlias = (
    KernelNodeParams
    | MemcpyNodeParams
    | MemsetNodeParams
    | HostNodeParams
    | ChildGraphNodeParams
    | EmptyNodeParams
    | EventRecordNodeParams
    | EventWaitNodeParams
    | AllocNodeParams
    | FreeNodeParams
    | BatchMemOpNodeParams
    | ConditionalNodeParams
    | OpaqueNodeParams
)

KINDS: dict[type[NodeParams], NodeKind] = {
    KernelNodeParams: NodeKind.KERNEL,
    MemcpyNodeParams: NodeKind.MEMCPY,
    MemsetNodeParams: NodeKind.MEMSET,
    HostNodeParams: NodeKind.HOST,
    ChildGraphNodeParams: NodeKind.CHILD_GRAPH,
    EmptyNodeParams: NodeKind.EMPTY,
    EventWaitNodeParams: NodeKind.EVENT_WAIT,
    EventRecordNodeParams: NodeKind.EVENT_RECORD,
    AllocNodeParams: NodeKind.MEM_ALLOC,
    FreeNodeParams: NodeKind.MEM_FREE,
    BatchMemOpNodeParams: NodeKind.BATCH_MEM_OP,
    ConditionalNodeParams: NodeKind.CONDITIONAL,
}
"""The kinds of the nodes that parameters make; without `OpaqueNodeParams`, which make none."""

BODY_PARAMS = (
    KernelNodeParams,
    MemcpyNodeParams,
    MemsetNodeParams,
    ChildGraphNodeParams,
    EmptyNodeParams,
    ConditionalNodeParams,
)
"""The nodes that the body of a conditional node may hold, also inside its child graphs (CUDA
programming guide, "Conditional Graph Nodes")."""


class EdgeType(enum.IntEnum):
    """The type of an edge (CUgraphDependencyType)."""

    DEFAULT = 0
    PROGRAMMATIC = 1


@dataclass(frozen=True, slots=True)
class EdgeData:
    """The properties of an edge: its ports, by the driver's numbers, and its type.

    `from_port` 0: when the node is done; 1: programmatic launch completion (every block of the
    upstream kernel triggered or ended); 2: launch order (every block has begun).
    """

    from_port: int = 0
    to_port: int = 0
    type: EdgeType = EdgeType.DEFAULT


PROGRAMMATIC = EdgeData(from_port=1, type=EdgeType.PROGRAMMATIC)
"""The target, a kernel, starts when the blocks of the source, a kernel, have triggered or ended."""
LAUNCH_ORDER = EdgeData(from_port=2, type=EdgeType.PROGRAMMATIC)
"""The target, a kernel, starts when the blocks of the source, a kernel, have begun."""


@dataclass(frozen=True, slots=True)
class Edge:
    """An edge: `target` waits for `source`."""

    source: NodeHandle
    target: NodeHandle
    data: EdgeData = EdgeData()


# -------------------------------------------------------------------------------------- executables


class InstantiateFlags(enum.IntFlag):
    """Options of instantiation (CUgraphInstantiate_flags); combine them with `|`."""

    NONE = 0
    AUTO_FREE_ON_LAUNCH = 1
    """A launch frees memory that the launch before allocated and did not free; else refused."""
    UPLOAD = 2
    """Uploads as part of instantiation (on the instantiating call's stream)."""
    USE_NODE_PRIORITY = 8


class UpdateVerdict(enum.IntEnum):
    """The reason why a whole-graph update was refused (CUgraphExecUpdateResult)."""

    SUCCESS = 0
    ERROR = 1
    TOPOLOGY_CHANGED = 2
    NODE_TYPE_CHANGED = 3
    FUNCTION_CHANGED = 4
    PARAMETERS_CHANGED = 5
    NOT_SUPPORTED = 6
    UNSUPPORTED_FUNCTION_CHANGE = 7
    ATTRIBUTES_CHANGED = 8


@dataclass(frozen=True, slots=True)
class UpdateOutcome:
    """The answer of `exec_update`.

    After any verdict but SUCCESS the executable is unchanged.  `node` is the node of the *new*
    graph that caused the refusal, if the driver named it.
    """

    verdict: UpdateVerdict
    node: NodeHandle | None = None


# -------------------------------------------------------------------------------------- the driver


Link: TypeAlias = tuple[int, int, tuple[int, ...]]
"""An edge of a `FrozenGraph`."""


@dataclass(frozen=True, slots=True)
class KernelColumns:
    """The argument bytes of all kernel nodes of a frozen graph, by the index of the node."""

    keys: Sequence[Hashable | None]
    """Equal keys: the same function, and arguments of the same layout and size.  None for a node
    that only `params` reads: no kernel, or one that the driver reads in another way."""
    starts: npt.NDArray[np.integer[Any]]
    """The offset in `data` of each node's argument bytes, a multiple of 8, in ascending order."""
    sizes: npt.NDArray[np.integer[Any]]
    data: bytes


class FrozenGraph(Protocol):
    """The content of a definition at the call of `Driver.graph_freeze`, without later changes.

    `kind` and `params` take the index of a node in `nodes`; they raise the errors that `node_kind`
    and `node_params` would have raised then.  `holders`: the indices of nodes with graphs inside;
    `memory_nodes`: those of alloc and free nodes.  `links`: the edges, each as the indices of two
    nodes and the edge data (from port, to port, type), which is empty for a plain edge; `plain`:
    true if all edges are plain.  `attributes`: those of a kernel node, None for another node;
    raises the errors of `params` for a kernel node.  `kinds_of_attributes`: the different
    attributes of all nodes.  `kernels`: the arguments of all kernels, without a record for each;
    `kernel`: function and arguments of one that has a key there.
    """

    @property
    def nodes(self) -> tuple[NodeHandle, ...]: ...

    @property
    def holders(self) -> Sequence[int]: ...

    @property
    def memory_nodes(self) -> Sequence[int]: ...

    @property
    def kernels(self) -> KernelColumns: ...

    def kernel(self, index: int) -> tuple[FunctionHandle, KernelArguments]: ...

    def kind(self, index: int) -> NodeKind: ...

    def params(self, index: int) -> NodeParams: ...

    @property
    def plain(self) -> bool: ...

    def links(self) -> frozenset[Link]: ...

    def attributes(self, index: int) -> LaunchAttributes | None: ...

    @property
    def kinds_of_attributes(self) -> frozenset[LaunchAttributes]: ...


class KernelSetter(Protocol):
    """The argument bytes of one kernel node of an executable.  Not thread-safe."""

    @property
    def data(self) -> bytes:
        """The bytes that were set last."""

    def holds(self, offset: int, raw: bytes, /) -> bool:
        """True if the executable is known to hold these bytes already."""

    def set(self, offset: int, raw: bytes, /) -> int | None:
        """Sets bytes.  After any result but 0 nothing was changed; call `exec_set_params`, which
        raises the error or succeeds."""


class CudaContext(Protocol):
    """A CUDA context, for libraries that use the context current on the calling thread."""

    @property
    def context(self) -> int:
        """The primary context (CUcontext)."""

    def made_current(self) -> AbstractContextManager[None]:
        """Makes the context current on the calling thread for a `with` block."""


class Driver(Protocol):
    """One device context.  Every call may raise `DriverError`; sizes are bytes unless stated."""

    @property
    def name(self) -> str:
        """ "host", "cuda:0", …"""

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def properties(self) -> DeviceProperties: ...

    @property
    def cuda_context(self) -> CudaContext | None:
        """The CUDA context, in which other libraries of the process can work; None without one."""

    def close(self) -> None:
        """Releases the context.  Idempotent; never raises."""

    def synchronize(self) -> None:
        """Waits for all work of the context.  Status 900 while one of its streams captures."""

    def memory_info(self) -> tuple[int, int]:
        """Returns (free, total) bytes of device memory."""

    # --- memory
    def mem_alloc(self, nbytes: int) -> int:
        """Allocates device memory, aligned to 256 bytes, with undefined content.

        Forbidden (900, and breaks the capture) on a thread with a capture that is not relaxed.
        """

    def mem_free(self, address: int) -> None:
        """Frees; waits for the device first, as cuMemFree does.  Forbidden like `mem_alloc`."""

    def mem_alloc_pinned(self, nbytes: int) -> int:
        """Allocates page-locked memory, for host and device.  Forbidden like `mem_alloc`."""

    def mem_free_pinned(self, address: int) -> None: ...

    def memory_range(self, address: int) -> MemoryRange | None:
        """Returns the live allocation, also another library's, that holds `address`; or None."""

    def memory_view(
        self, address: int, shape: tuple[int, ...], dtype: np.dtype[Any], owner: object
    ) -> Any:
        """Returns device memory as an object with DLPack's two methods, in C order, without a copy.

        The object keeps `owner` alive.  Not ordered with any stream.  Its export raises BufferError
        for a dtype that DLPack does not have.

        With `host_memory_is_device_memory` it is a NumPy array, which keeps the memory itself too,
        also after the memory was freed; host functions may then call this.
        """

    def memory_share(self, address: int) -> bytes:
        """Returns a handle by which other devices open memory of `mem_alloc`.

        Free the memory only after every device that opened it has called `memory_end_shared`.
        """

    def memory_open_shared(self, handle: bytes) -> int:
        """Returns the address here of another device's memory, for kernels and copies.

        `handle`: the result of `memory_share` there; on CUDA in another process of this machine, on
        the host device in this process.
        """

    def memory_end_shared(self, address: int) -> None:
        """Ends `memory_open_shared`.  Work that uses the memory must have ended."""

    def memory_adopt(self, address: int, nbytes: int, owner: object) -> bool:
        """Lets kernels and copies use memory of this process at its address.

        `owner` is kept until `memory_end_adopted`.  Several calls may adopt parts of one memory.
        Returns False if the memory already is the device's: then there is nothing to end.  Only
        with `host_memory_is_device_memory`, else NOT_SUPPORTED.
        """

    def memory_end_adopted(self, address: int) -> None:
        """Ends `memory_adopt` once the device's work under way is done."""

    def memcpy(self, dst: int, src: int, nbytes: int, stream: StreamHandle) -> None:
        """Copies between device and pinned memory in stream order."""

    def memcpy_from_host(self, dst: int, src: memoryview, stream: StreamHandle) -> None:
        """Copies pageable host bytes to the device; returns once `src` may be changed again.

        During a capture: status 900, and the capture is broken: a graph would read `src` later.
        """

    def memcpy_to_host(self, dst: memoryview, src: int, stream: StreamHandle) -> None:
        """Copies device bytes into a writable host buffer; returns once they are there.

        During a capture: status 900, and the capture is broken.
        """

    def memset(
        self, dst: int, value: int, element_size: int, count: int, stream: StreamHandle
    ) -> None:
        """Fills `count` elements of 1, 2 or 4 bytes."""

    # --- streams and events
    def stream_create(self, *, priority: int = 0, blocking: bool = False) -> StreamHandle:
        """Makes a stream.  `blocking`: its work and that of the legacy default stream wait for each
        other, in the order of their submission.  While it captures, every use of the legacy stream
        by any thread fails with 906 and breaks the capture.  While only other streams capture, the
        legacy stream works as always, and no graph holds its work.
        """

    def stream_destroy(self, stream: StreamHandle) -> None:
        """Destroys the stream; submitted work still runs.  A capture on the stream is dropped."""

    def stream_synchronize(self, stream: StreamHandle) -> None:
        """Waits for the stream.  While it captures: status 900, and the capture is broken."""

    def stream_query(self, stream: StreamHandle) -> bool:
        """True if all its work is done.  While it captures: status 900, and breaks the capture."""

    def stream_wait_event(self, stream: StreamHandle, event: EventHandle) -> None:
        """Makes later work of the stream wait for the event's last record, if there is one.

        An event recorded in a capture pulls this stream into that capture (a fork, or a join).
        """

    def event_create(self, *, timing: bool = False, blocking: bool = False) -> EventHandle:
        """Makes an event; a thread that waits for a `blocking` event sleeps instead of polling."""

    def event_destroy(self, event: EventHandle) -> None: ...

    def event_record(self, event: EventHandle, stream: StreamHandle) -> None:
        """Records an event after the work submitted to the stream so far.

        While the stream captures, the event marks a place in that capture, and has no state (907)
        until it is recorded again: eagerly, or by a launch of a graph with a node for it.
        """

    def event_query(self, event: EventHandle) -> bool:
        """True if the work before its last record is done.  Status 907 if that was in a capture."""

    def event_synchronize(self, event: EventHandle) -> None: ...

    def event_elapsed(self, start: EventHandle, end: EventHandle) -> float:
        """Returns seconds between two recorded events made with `timing`."""

    def launch_host_function(self, stream: StreamHandle, function: Callable[[], object]) -> None:
        """Calls `function` in stream order, on a driver's thread.  It must not call the driver.

        No caller can catch an exception of `function`: it is logged and passed to the listeners of
        `on_host_failure`.
        """

    def on_host_failure(self, listener: HostFailureListener) -> None:
        """Calls `listener`, from here on, with each host function of a stream or graph that raises,
        and its exception: on the driver's thread, before the work after it runs."""

    def unraised(self, patience: float) -> DriverError | None:
        """Returns the failure that has poisoned the context, if no call has raised it yet.

        Waits up to `patience` seconds for work under way; a driver without a wait of limited time
        waits only if `patience` is infinite.  With 0, makes no call that a capture could forbid.
        Raises no failure of work.
        """

    # --- modules and kernels
    def module_load(self, image: Image) -> ModuleHandle: ...

    def module_unload(self, module: ModuleHandle) -> None: ...

    def module_functions(self, module: ModuleHandle) -> tuple[str, ...]:
        """Returns the entry names in the module, in the module's order."""

    def module_function(self, module: ModuleHandle, name: str) -> FunctionHandle:
        """Returns a function by its entry name.  Status NOT_FOUND (500) for an unknown name."""

    def function_info(self, function: FunctionHandle) -> FunctionInfo: ...

    def function_load(self, function: FunctionHandle) -> None:
        """Loads a function onto the device now: a lazy load would break a capture."""

    def function_allow_shared(self, function: FunctionHandle, nbytes: int) -> None:
        """Lets launches use up to `nbytes` of dynamic shared memory (over 48 KiB)."""

    def function_code(self, function: FunctionHandle) -> FunctionCode:
        """Returns the code of a function, for another process.  Status NOT_FOUND, with the reason,
        if this process does not have the code, or another process could not find it."""

    def code_image(self, code: FunctionCode) -> Image:
        """Returns the image for such code, as `module_load` takes it.  Status INVALID_IMAGE, with
        the reason, if this process cannot make it."""

    def function_restore(self, function: FunctionHandle, code: FunctionCode) -> None:
        """Sets on a reloaded function the attributes that were set on it before, where they exceed
        its present ones."""

    def function_occupancy(self, function: FunctionHandle, threads: int, shared: int) -> int:
        """Returns how many blocks of that size one multiprocessor holds at once."""

    def launch_kernel(
        self,
        stream: StreamHandle,
        function: FunctionHandle,
        config: LaunchConfig,
        arguments: KernelArguments,
    ) -> None:
        """Launches a kernel; the argument bytes are copied before the call returns."""

    def function_prepare_launch(self, function: FunctionHandle, pack: Pack) -> PlainLaunch | None:
        """Returns `launch_kernel` for plain configs as one callable, or None.

        `pack` packs the function's arguments (`driver.launcher.packer`).  Invalid once the function
        is unloaded.  The callable returns 0 after a launch.  After any other result nothing was
        launched, and the caller must use `launch_kernel`, which raises the error or succeeds.
        """

    # --- capture
    def stream_begin_capture(self, stream: StreamHandle, mode: CaptureMode) -> None:
        """Begins a capture.  Status ILLEGAL_STATE (401) if the stream already captures, 906 for the
        legacy stream."""

    def stream_begin_capture_to_graph(
        self,
        stream: StreamHandle,
        graph: GraphHandle,
        dependencies: Sequence[NodeHandle],
        mode: CaptureMode,
    ) -> None:
        """Captures into an existing graph, such as a conditional body, after `dependencies`."""

    def stream_end_capture(self, stream: StreamHandle) -> GraphHandle:
        """Ends the capture and returns its graph; after `…_to_graph` that same graph.

        Raises statuses 901 to 908 if the capture was broken, ILLEGAL_STATE (401) if the stream does
        not capture.  The streams work again afterwards, also after an error; but ending a fork
        (903) only breaks the capture, which its own stream must still end.  A call from another
        thread (908) ends and drops the capture.
        """

    def stream_capture_info(self, stream: StreamHandle) -> CaptureInfo: ...

    def stream_set_capture_dependencies(
        self, stream: StreamHandle, nodes: Sequence[NodeHandle]
    ) -> None:
        """Makes the stream's next captured work depend on these nodes of the graph being captured,
        instead of on earlier ones.  ILLEGAL_STATE (401) if the stream does not capture,
        INVALID_VALUE for a node of another graph."""

    def thread_exchange_capture_mode(self, mode: CaptureMode) -> CaptureMode:
        """Sets which calls of this thread captures forbid; returns the mode before.

        In RELAXED mode a pool may allocate while this thread captures.
        """

    # --- graphs
    def graph_create(self) -> GraphHandle: ...

    def graph_destroy(self, graph: GraphHandle) -> None: ...

    def graph_clone(self, graph: GraphHandle) -> GraphHandle:
        """Returns a copy.  NOT_SUPPORTED for a graph with alloc, free or conditional nodes, and for
        the body of a conditional node; neither can be a child graph."""

    def node_in_clone(self, node: NodeHandle, clone: GraphHandle) -> NodeHandle:
        """Returns the clone's node for a node of the original."""

    def graph_nodes(self, graph: GraphHandle) -> tuple[NodeHandle, ...]:
        """Returns the nodes in the driver's order: usually, but not always, that of creation."""

    def graph_edges(self, graph: GraphHandle) -> tuple[Edge, ...]: ...

    def graph_freeze(
        self, graph: GraphHandle, *, ours: Container[NodeHandle] | None = None
    ) -> FrozenGraph:
        """Reads all of a definition at once; the result decodes it later, node by node.

        Child graphs and bodies are frozen by calls of their own.  `ours`: nodes that this library
        made, whose kernels have no attributes but those of `LaunchConfig`.  If these are all nodes,
        `KernelNodeParams.extra_attributes` are read from the definition when a node is decoded:
        reading them takes most of the time.
        """

    def graph_add_node(
        self,
        graph: GraphHandle,
        dependencies: Sequence[NodeHandle],
        params: NodeParams,
        edge_data: Sequence[EdgeData] | None = None,
    ) -> NodeHandle:
        """Adds a node.  `edge_data`: one entry for each dependency, or None for plain edges."""

    def graph_add_kernels(
        self,
        graph: GraphHandle,
        nodes: list[NodeHandle],
        kernels: KernelTable,
        rows: Sequence[tuple[int, Sequence[int]]],
    ) -> None:
        """Adds a kernel node for each of these rows, as `graph_add_node` does.

        A row is an index into `kernels`, and the indices in `nodes` of the nodes it depends on, by
        plain edges.  New nodes are appended to `nodes`; an error leaves them in the graph.
        """

    def graph_add_edges(self, graph: GraphHandle, edges: Sequence[Edge]) -> None:
        """Adds edges.  Status INVALID_VALUE for an edge that would close a cycle."""

    def graph_remove_node(self, node: NodeHandle) -> None:
        """Removes a node.  Status 800 for alloc and free nodes, 801 in graphs that have some."""

    def node_kind(self, node: NodeHandle) -> NodeKind: ...

    def node_params(self, node: NodeHandle) -> NodeParams:
        """Returns the parameters of a node: a copy, never the driver's memory."""

    def node_set_params(self, node: NodeHandle, params: NodeParams) -> None:
        """Changes a node of the definition; executables that exist already stay unchanged."""

    def conditional_create(
        self, graph: GraphHandle, *, default: int = 0, reset_at_launch: bool = True
    ) -> ConditionalHandle:
        """Makes a condition for one conditional node of `graph` (or of a body inside it)."""

    def condition_defaults(self, node: NodeHandle) -> ConditionDefaults | None:
        """Returns the defaults of a conditional node's condition; None if another library made it.

        The node identifies it: conditions of two graphs may have the same handle.
        """

    # --- executables
    def graph_instantiate(
        self, graph: GraphHandle, flags: InstantiateFlags = InstantiateFlags.NONE
    ) -> ExecHandle:
        """Makes an executable.  The error carries the node that the driver names as the cause."""

    def exec_destroy(self, executable: ExecHandle) -> None:
        """Destroys the executable; a launch under way still finishes."""

    def exec_upload(self, executable: ExecHandle, stream: StreamHandle) -> None: ...

    def exec_launch(self, executable: ExecHandle, stream: StreamHandle) -> None:
        """Launches the executable.  On a stream that captures: status 900, and the capture is
        broken (seen on driver 580).

        Two launches of one executable never overlap: the second waits for the first.
        """

    def exec_prepare_launch(
        self, executable: ExecHandle, stream: StreamHandle
    ) -> Callable[[], int]:
        """Returns `exec_launch` as a callable.  Invalid once either handle is destroyed.

        The callable returns 0 after a launch.  After another status nothing was launched, and the
        caller must use `exec_launch`, which raises the error, or succeeds if only the thread lacked
        the context.  The callable may also raise the error itself.
        """

    def exec_set_params(self, executable: ExecHandle, node: NodeHandle, params: NodeParams) -> None:
        """Changes one node of the executable; `node` is the definition's.  All or nothing.

        Launches under way keep the old values.  Refused like cuGraphExec*NodeSetParams: another
        kind of node, a memcpy between other memory kinds or with another number of dimensions, …
        """

    def exec_prepare_kernel(
        self, executable: ExecHandle, node: NodeHandle, params: KernelNodeParams
    ) -> KernelSetter | None:
        """Returns a setter for a kernel node's arguments; `params` are the node's present ones.

        Invalid once the node was changed in another way.  None if the driver has no shorter way
        than `exec_set_params`.
        """

    def exec_prepare_kernels(
        self,
        executable: ExecHandle,
        nodes: Sequence[NodeHandle],
        frozen: FrozenGraph,
        indices: Sequence[int],
    ) -> Sequence[KernelSetter] | None:
        """Returns setters for kernel nodes whose present parameters are those of a frozen graph at
        `indices`, where it has `kernels.keys`.  None as for `exec_prepare_kernel`."""

    def exec_set_enabled(self, executable: ExecHandle, node: NodeHandle, enabled: bool) -> None:
        """Enables or disables a kernel, memcpy or memset node; a disabled node does nothing.

        A disabled memset node may lose its edges.  With libcuda 580.159 and a memset of a few
        elements, the nodes after it do not wait for the nodes before it, and a launch that ends
        with it counts as done before these are.  Launches with a disabled cooperative kernel may
        end with LAUNCH_FAILED (719), and the context is lost.
        """

    def exec_enabled(self, executable: ExecHandle, node: NodeHandle) -> bool: ...

    def exec_update(self, executable: ExecHandle, graph: GraphHandle) -> UpdateOutcome:
        """Gives the executable the parameters of `graph`, if nothing else differs.  Does not raise
        if the driver refuses: the outcome has the node and the reason."""
