"""The driver protocol, which separates this library from the drivers.  Read this file first.

A `Driver` is one device context behind flat calls in the driver API's own terms: integer handles
in, integer handles and frozen records out, and an error of `errors.driver_error` with the driver's
status when a call is refused.  Two drivers implement it: `driver.cuda` (libcuda, called through
ctypes) and `driver.host` (the CPU, with CUDA's rules).  Everything above asks a driver for its
`capabilities`, and never which driver it is.

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
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NewType, Protocol, TypeAlias, TypeVar

from ostinato.errors import DriverError, GraphError, InputError

if TYPE_CHECKING:
    import numpy as np

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
    """What a driver can do.  Code above the drivers asks this, never which driver it is."""

    conditional_nodes: bool
    """IF with one body, and WHILE."""
    conditional_branches: bool
    """IF with an ELSE body too, and SWITCH."""
    batch_memory_ops: bool
    memory_nodes: bool
    """Alloc and free nodes."""
    programmatic_launch: bool
    """Programmatic dependent launch: a kernel may start before the one it depends on ends."""
    clusters: bool
    cooperative_launch: bool
    host_memory_is_device_memory: bool
    """The process itself can read and write device memory at its addresses."""
    image_kinds: frozenset[str]
    """What `module_load` takes: "cubin", "ptx", "fatbin", "host"."""
    source_language: str
    """What kernels are written in here: "cuda" (CUDA C++) or "host" (registered functions)."""
    shares_memory: bool = False
    """Other devices, also of other processes, can open its memory (`memory_share`)."""
    lacks: tuple[str, ...] = ()
    """What a newer driver for the same device can do, in words, with the version that it takes."""

    @property
    def compiles_cuda(self) -> bool:
        """Whether kernels in CUDA C++ are compiled for this device."""
        return self.source_language == "cuda"

    @property
    def runs_host_functions(self) -> bool:
        """Whether kernels are Python functions (`driver.host.kernel.HostKernel`)."""
        return self.source_language == "host"


@dataclass(frozen=True, slots=True)
class DeviceProperties:
    """What the device is.  Sizes in bytes; zero where a driver cannot know."""

    name: str
    compute_capability: tuple[int, int]
    multiprocessors: int
    total_memory: int
    l2_cache: int
    max_threads_per_block: int
    max_shared_per_block: int
    memory_bandwidth: int
    """Bytes a second by the memory's clock and width, more than any kernel reads."""
    driver_version: str


@dataclass(frozen=True, slots=True)
class MemoryRange:
    """Memory by its address and its size in bytes: an allocation, or a part of one."""

    address: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.address + self.nbytes

    def holds(self, address: int, nbytes: int = 1) -> bool:
        """Whether `nbytes` bytes from `address` lie wholly inside."""
        return self.address <= address and address + nbytes <= self.end

    def overlaps(self, other: MemoryRange) -> bool:
        """Whether they have a byte in common, or one without bytes lies inside the other."""
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
    """Where one kernel parameter lies in the packed parameter buffer (bytes)."""

    offset: int
    size: int

    @property
    def words(self) -> range:
        """The offsets in the buffer of the aligned words of 8 bytes that lie wholly in it."""
        return range(-(-self.offset // 8) * 8, self.offset + self.size - 7, 8)


@dataclass(frozen=True, slots=True)
class FunctionInfo:
    """What the driver knows of a loaded function.  Bytes; zero where it cannot know."""

    name: str
    parameters: tuple[ParameterSlot, ...]
    max_threads_per_block: int
    registers: int
    static_shared: int
    local: int


@dataclass(frozen=True, slots=True)
class FunctionCode:
    """The code of a loaded function, and what was set on it, for another process to load.

    `kind` is that of an `Image`.  A compiled one has its `data`; a kernel of the host has `target`,
    "module:name", where the process that loads it finds the same Python object.
    """

    name: str
    """The entry name in the image."""
    kind: str
    data: bytes = field(default=b"", repr=False)
    target: str = ""
    shared: int = 0
    """Bytes of dynamic shared memory that its launches may ask for; 0 for what every function may
    have."""
    carveout: int = -1
    """How much of the memory beside the L1 cache it prefers to be shared, in percent; -1: unset."""
    wide_clusters: bool = False
    """Whether clusters of more than 8 blocks are allowed."""


def _dim3(value: int | Sequence[int], what: str) -> Dim3:
    if type(value) is int and value > 0:  # as most are, in code that launches
        return (value, 1, 1)
    parts = value if isinstance(value, Iterable) else (value,)
    sizes = [whole_number(part) or 0 for part in parts]
    if not 1 <= len(sizes) <= 3 or min(sizes) < 1:
        raise InputError(f"{what}={value!r}: one to three whole numbers of 1 or more are needed")
    x, y, z = (*sizes, 1, 1)[:3]
    return (x, y, z)


def _shared_bytes(value: int | str) -> int:
    return value if type(value) is int and value >= 0 else parse_bytes(value, "shared")


def not_null(handle: H, what: str) -> H:
    """A handle as a driver gave it.  Raises GraphError for 0: the driver made nothing, and did not
    say so."""
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
    """A whole number of Python or NumPy as an int; None for anything else, also for a bool."""
    try:
        return None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
}
_SIZE = re.compile(
    r"\s*(?P<number>\d{1,20}(\.\d{1,20})?)\s*(?P<unit>[a-z]*)\s*\Z", re.IGNORECASE | re.ASCII
)


def parse_bytes(value: int | str, what: str, least: int = 0) -> int:
    """A number of bytes from 4096 or from "4 KiB", "512 MiB", "1.5 GB" (MiB 2**20, MB 10**6).

    Raises InputError, with `what` in it, for what cannot be read or is below `least`.
    """
    nbytes = whole_number(value)
    match = _SIZE.match(value) if isinstance(value, str) else None
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
    """`LaunchConfig` as it is kept, every size with three dimensions."""

    grid: Dim3
    block: Dim3
    shared: int
    cluster: Dim3 | None
    cooperative: bool
    programmatic: bool
    priority: int | None


class LaunchConfig(_LaunchFields):
    """How a kernel is launched.

    `grid`, `block` and `cluster` take a number or up to three of them (x, y, z); `shared` is
    dynamic shared memory a block, in bytes or as "48 KiB".  `cooperative`: all blocks are on the
    device at once, so that they can wait for each other (grid-wide barriers).  `programmatic` lets
    the kernel start before the previous one on the stream ends (programmatic stream serialization);
    `priority` is the stream priority kept by a graph's kernel node, None for the stream's own.
    Raises InputError for sizes below 1.  Upper limits are the driver's, checked at launch.
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
        _LaunchFields.__init__(  # and not super(): 0.1 us of every launch with a config of its own
            self,
            _dim3(grid, "grid"),
            _dim3(block, "block"),
            _shared_bytes(shared),
            None if cluster is None else _dim3(cluster, "cluster"),
            bool(cooperative),
            bool(programmatic),
            None if priority is None else _priority(priority),
        )

    @property
    def plain(self) -> bool:
        """Neither cluster, cooperative, programmatic nor a priority."""
        if self.cooperative or self.programmatic:
            return False
        return self.cluster is None and self.priority is None

    @property
    def threads_per_block(self) -> int:
        return self.block[0] * self.block[1] * self.block[2]


HostFailureListener: TypeAlias = Callable[[Callable[[], object], BaseException], object]
"""A host function, and what it raised: see `Driver.on_host_failure`."""

Pack: TypeAlias = Callable[[tuple[object, ...]], bytes | None]
"""Packs a kernel's values into its parameter buffer; returns None if a value does not have exactly
the type of its parameter."""

PlainLaunch: TypeAlias = Callable[[int, Dim3, Dim3, int, tuple[object, ...] | bytes], int | None]
"""Stream, grid, block, shared bytes, values: see `Driver.function_prepare_launch`."""


@dataclass(frozen=True, slots=True)
class KernelArguments:
    """The arguments of one launch: the packed parameter buffer and where each one lies in it.

    The bytes are ours (copied), never the driver's.  `packed` says that the launch gave one
    buffer through `extra` (as cuBLAS does) instead of a pointer each; the layout may then be the
    function's, or empty when the driver cannot tell.
    """

    data: bytes
    layout: tuple[ParameterSlot, ...]
    packed: bool = False

    def __len__(self) -> int:
        return len(self.layout)

    def raw(self, index: int) -> bytes:
        """The bytes of argument `index`.  Raises InputError if there is no such argument."""
        slot = self.slot(index)
        return self.data[slot.offset : slot.offset + slot.size]

    def slot(self, index: int) -> ParameterSlot:
        """Where argument `index` lies.  Raises InputError if there is no such argument."""
        if not 0 <= index < len(self.layout):
            raise InputError(f"argument {index} of {len(self.layout)}: there is no such argument")
        return self.layout[index]

    def with_raw(self, index: int, value: bytes) -> KernelArguments:
        """A copy with other bytes for one argument.  Raises InputError if the size differs."""
        self.require_size(index, value)
        return self.with_bytes(self.slot(index).offset, value)

    def require_size(self, index: int, value: bytes) -> None:
        """Raises InputError unless argument `index` takes as many bytes."""
        size = self.slot(index).size
        if len(value) != size:
            raise InputError(f"argument {index} takes {size} bytes, and {len(value)} were given")

    def with_bytes(self, offset: int, value: bytes) -> KernelArguments:
        """A copy with other bytes at an offset of the packed buffer."""
        if not 0 <= offset <= len(self.data) - len(value):
            raise InputError(f"{len(value)} bytes at offset {offset} are outside {len(self.data)}")
        data = self.data[:offset] + value + self.data[offset + len(value) :]
        return KernelArguments(data, self.layout, self.packed)


# ------------------------------------------------------------------------------------------ capture


class CaptureMode(enum.IntEnum):
    """What other calls a capture forbids while it is under way (CUstreamCaptureMode)."""

    GLOBAL = 0
    """A call that captures forbid breaks this capture, whichever thread makes it."""
    THREAD_LOCAL = 1
    """Only the capturing thread's own forbidden calls break it, and a wait for the whole device by
    any thread.  The default of this library."""
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

    While ACTIVE: `capture_id` tells captures apart, `graph` is the graph being built (owned by
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
    """A kernel launch.  `extra_attributes`: attributes in words that LaunchConfig has no field for
    (shown, and kept by the driver; not settable here)."""

    function: FunctionHandle
    config: LaunchConfig
    arguments: KernelArguments
    extra_attributes: tuple[str, ...] = ()

    def with_data(self, data: bytes) -> KernelNodeParams:
        """A copy with other bytes for all arguments, which lie where they lay."""
        arguments = KernelArguments(data, self.arguments.layout, self.arguments.packed)
        return KernelNodeParams(self.function, self.config, arguments, self.extra_attributes)


@dataclass(frozen=True, slots=True)
class LaunchAttributes:
    """What a kernel node of an executable keeps, whatever it is given later.

    CUDA changes none of these in a whole update or with a node's parameters, and does not refuse
    most of them (libcuda 580.159: another cluster size gives SUCCESS, and once the executable was
    launched the kernel runs with the old one).  `others`: attributes that `LaunchConfig` has no
    field for, in words.  `function`: the kernel, where the node may have attributes that the driver
    does not tell, else None.
    """

    cluster: Dim3 | None
    """None also for a cluster of one block."""
    cooperative: bool
    priority: int
    """0 also for none."""
    others: tuple[str, ...] = ()
    function: FunctionHandle | None = None

    @classmethod
    def of(cls, config: LaunchConfig) -> LaunchAttributes:
        """Those of a config.  Whether it is programmatic is not one: a node's edges say that."""
        cluster = config.cluster
        if cluster is not None and max(cluster) <= 1:
            cluster = None
        return cls(cluster, config.cooperative, config.priority or 0)


@dataclass(frozen=True, slots=True, eq=False)
class KernelTable:
    """Kernel launches as columns, for `Driver.graph_add_kernels`: to make the records of a launch
    takes longer than to add its node."""

    functions: Sequence[FunctionHandle]
    configs: Sequence[LaunchConfig]
    layouts: Sequence[tuple[ParameterSlot, ...]]
    packed: Sequence[bool]
    data: bytearray
    """The arguments of all rows."""
    starts: Sequence[int]
    """Where a row's arguments begin in `data`."""
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
    or pinned host memory.  `opaque` says that one side is a CUDA array: shown, not settable.
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
    """A graph inside a graph.  Added: the child is cloned.  Read: the clone, owned by the node."""

    graph: GraphHandle


@dataclass(frozen=True, slots=True)
class EmptyNodeParams:
    """Does nothing; joins dependencies."""


@dataclass(frozen=True, slots=True)
class EventRecordNodeParams:
    """Records an event when it runs."""

    event: EventHandle


@dataclass(frozen=True, slots=True)
class EventWaitNodeParams:
    """Waits for an event's last record when it runs."""

    event: EventHandle


@dataclass(frozen=True, slots=True)
class AllocNodeParams:
    """Allocates `nbytes` when it runs.  `address` is fixed when the node is added (0 to add)."""

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
    """What a conditional node does with its bodies (CUgraphConditionalNodeType)."""

    IF = 0
    """Runs body 0 if the condition is not zero, else body 1 if there is one."""
    WHILE = 1
    """Runs body 0 again as long as the condition is not zero."""
    SWITCH = 2
    """Runs body number `condition`, or nothing if there is no such body."""


@dataclass(frozen=True, slots=True)
class ConditionalNodeParams:
    """A conditional node over `size` bodies.

    Added with no bodies; read back with the bodies' graphs, which the node owns and which are
    filled by `graph_add_node` or `stream_begin_capture_to_graph`.
    """

    handle: ConditionalHandle
    kind: ConditionalKind
    size: int = 1
    bodies: tuple[GraphHandle, ...] = ()


@dataclass(frozen=True, slots=True)
class ConditionDefaults:
    """How a condition was made: its first value, and whether each launch begins with it."""

    default: int
    reset_at_launch: bool


@dataclass(frozen=True, slots=True)
class OpaqueNodeParams:
    """A node that this library shows but neither makes nor changes; `why` has the reason."""

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
    """What an edge says besides the order: ports by the driver's numbers, and its type.

    `from_port` 0: when the node is done; 1: programmatic launch completion (every block of the
    upstream kernel triggered or ended); 2: launch order.
    """

    from_port: int = 0
    to_port: int = 0
    type: EdgeType = EdgeType.DEFAULT


@dataclass(frozen=True, slots=True)
class Edge:
    """Two nodes, of which `target` waits for `source`."""

    source: NodeHandle
    target: NodeHandle
    data: EdgeData = EdgeData()


# -------------------------------------------------------------------------------------- executables


class InstantiateFlags(enum.IntFlag):
    """How a graph is instantiated (CUgraphInstantiate_flags); combine them with `|`."""

    NONE = 0
    AUTO_FREE_ON_LAUNCH = 1
    """A launch frees what the launch before allocated and left; without this it is refused."""
    UPLOAD = 2
    """Uploads as part of instantiation (on the instantiating call's stream)."""
    DEVICE_LAUNCH = 4
    USE_NODE_PRIORITY = 8


class UpdateVerdict(enum.IntEnum):
    """Why a whole-graph update was refused (CUgraphExecUpdateResult)."""

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

    After anything but SUCCESS the executable is unchanged.  `node` is the node of the *new* graph
    that caused it, if the driver named it.
    """

    verdict: UpdateVerdict
    node: NodeHandle | None = None


# -------------------------------------------------------------------------------------- the driver


Link: TypeAlias = tuple[int, int, tuple[int, ...]]
"""An edge of a `FrozenGraph`."""


class FrozenGraph(Protocol):
    """What a definition held when `Driver.graph_freeze` was called.  Later changes do not show.

    `kind` and `params` are of a node by its index in `nodes`; they raise what `node_kind` and
    `node_params` would have raised then.  `holders`: the nodes with graphs inside; `memory_nodes`:
    alloc and free nodes.  `links`: the edges, as the places of two nodes and their data (from
    port, to port, type), which is empty for a plain edge; `plain`: all edges are.
    `attributes`: of a kernel node, None for another node;
    raises what `params` of a kernel node would raise.  `kinds_of_attributes`: those of all nodes,
    each once.
    """

    @property
    def nodes(self) -> tuple[NodeHandle, ...]: ...

    @property
    def holders(self) -> Sequence[int]: ...

    @property
    def memory_nodes(self) -> Sequence[int]: ...

    def kind(self, index: int) -> NodeKind: ...

    def params(self, index: int) -> NodeParams: ...

    @property
    def plain(self) -> bool: ...

    def links(self) -> frozenset[Link]: ...

    def attributes(self, index: int) -> LaunchAttributes | None: ...

    @property
    def kinds_of_attributes(self) -> frozenset[LaunchAttributes]: ...


class KernelSetter(Protocol):
    """The argument bytes of one kernel node of an executable.  Not for several threads at once."""

    @property
    def data(self) -> bytes:
        """As they were set last."""
        ...

    def holds(self, offset: int, raw: bytes, /) -> bool:
        """Whether the executable is known to have these bytes: then `set` would change nothing."""
        ...

    def set(self, offset: int, raw: bytes, /) -> int | None:
        """Sets bytes.  Anything but 0 means that nothing was changed; `exec_set_params` then says
        why, or succeeds."""
        ...


class CudaContext(Protocol):
    """A CUDA context, for libraries that work in whichever is current on the calling thread."""

    @property
    def context(self) -> int:
        """The primary context (CUcontext)."""
        ...

    def made_current(self) -> AbstractContextManager[None]:
        """Makes the context current on the calling thread for a `with` block."""
        ...


class Driver(Protocol):
    """One device context.  Every call may raise `DriverError`; sizes are bytes unless stated."""

    @property
    def name(self) -> str:
        """ "host", "cuda:0", …"""
        ...

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def properties(self) -> DeviceProperties: ...

    @property
    def cuda_context(self) -> CudaContext | None:
        """The CUDA context that other libraries of the process can work in; None without one."""
        ...

    def close(self) -> None:
        """Gives the context back.  Idempotent; never raises."""
        ...

    def synchronize(self) -> None:
        """Waits for all work of the context.  Status 900 while one of its streams captures."""
        ...

    def memory_info(self) -> tuple[int, int]:
        """(free, total) device memory."""
        ...

    # --- memory
    def mem_alloc(self, nbytes: int) -> int:
        """Device memory, aligned to 256.  Its content is undefined.

        Forbidden (900, and invalidates) on a thread with a capture that is not relaxed.
        """
        ...

    def mem_free(self, address: int) -> None:
        """Frees; waits for the device first, as cuMemFree does.  Forbidden like `mem_alloc`."""
        ...

    def mem_alloc_pinned(self, nbytes: int) -> int:
        """Page-locked host memory, readable by host and device.  Forbidden like `mem_alloc`."""
        ...

    def mem_free_pinned(self, address: int) -> None: ...

    def memory_range(self, address: int) -> MemoryRange | None:
        """The live allocation that holds `address`, also another library's; None without one."""
        ...

    def memory_view(
        self, address: int, shape: tuple[int, ...], dtype: np.dtype[Any], owner: object
    ) -> Any:
        """Device memory as an object with DLPack's two methods, in C order, without a copy.

        It keeps `owner` alive.  Not ordered with any stream.  What it exports raises BufferError
        for a dtype that DLPack does not have.

        With `host_memory_is_device_memory` it is a NumPy array, which keeps the memory itself too,
        also after the memory was freed.  Host functions may call this then.
        """
        ...

    def memory_share(self, address: int) -> bytes:
        """What another device needs to open device memory: `address` is one of `mem_alloc`.

        The memory is to be freed only after all that opened it have ended that.
        """
        ...

    def memory_open_shared(self, handle: bytes) -> int:
        """The address here of another device's memory, for kernels and copies to read and write.

        `handle`: what `memory_share` gave there; on CUDA in another process of this machine, on the
        host device in this process.
        """
        ...

    def memory_end_shared(self, address: int) -> None:
        """Ends `memory_open_shared`.  Work that uses the memory must have ended."""
        ...

    def memory_adopt(self, address: int, nbytes: int, owner: object) -> bool:
        """Makes memory of this process the device's too, at its address, for kernels and copies.

        `owner` is kept until `memory_end_adopted`.  Several calls may give parts of one memory.
        False if the memory is the device's own: then there is nothing to end.  Only with
        `host_memory_is_device_memory`, else NOT_SUPPORTED.
        """
        ...

    def memory_end_adopted(self, address: int) -> None:
        """Ends `memory_adopt` once the device's work under way is done."""
        ...

    def memcpy(self, dst: int, src: int, nbytes: int, stream: StreamHandle) -> None:
        """Copies between device and pinned memory in stream order."""
        ...

    def memcpy_from_host(self, dst: int, src: memoryview, stream: StreamHandle) -> None:
        """Copies pageable host bytes to the device; returns once `src` may be changed again.

        During a capture: status 900, and the capture is broken: a graph would read `src` later.
        """
        ...

    def memcpy_to_host(self, dst: memoryview, src: int, stream: StreamHandle) -> None:
        """Copies device bytes into a writable host buffer; returns once they are there.

        During a capture: 900, and invalidates.
        """
        ...

    def memset(
        self, dst: int, value: int, element_size: int, count: int, stream: StreamHandle
    ) -> None:
        """Fills `count` elements of 1, 2 or 4 bytes."""
        ...

    # --- streams and events
    def stream_create(self, *, priority: int = 0, blocking: bool = False) -> StreamHandle:
        """A stream.  `blocking`: its work and that of the legacy default stream wait for each
        other, in the order of their submission.  While it captures, every use of the legacy stream
        by any thread gets 906 and breaks the capture.  While only others capture, the legacy stream
        works as always, and no graph holds that work.
        """
        ...

    def stream_destroy(self, stream: StreamHandle) -> None:
        """Destroys the stream; submitted work still runs.  A capture on the stream is dropped."""
        ...

    def stream_synchronize(self, stream: StreamHandle) -> None:
        """Waits for the stream.  While it captures: 900, and invalidates."""
        ...

    def stream_query(self, stream: StreamHandle) -> bool:
        """Whether all its work is done.  While it captures: 900, and invalidates."""
        ...

    def stream_wait_event(self, stream: StreamHandle, event: EventHandle) -> None:
        """Makes later work of the stream wait for the event's last record, if there is one.

        An event recorded in a capture pulls this stream into that capture (a fork, or a join).
        """
        ...

    def event_create(self, *, timing: bool = False, blocking: bool = False) -> EventHandle:
        """An event; a thread that waits for a `blocking` one sleeps, where others may poll."""
        ...

    def event_destroy(self, event: EventHandle) -> None: ...

    def event_record(self, event: EventHandle, stream: StreamHandle) -> None:
        """Records an event behind the work that was submitted to the stream.

        While the stream captures, the event marks a place in that capture, and has no state (907)
        until it is recorded again: eagerly, or by a launch of a graph with a node for it.
        """
        ...

    def event_query(self, event: EventHandle) -> bool:
        """Whether the work before its last record is done.  Status 907 if that was in a capture."""
        ...

    def event_synchronize(self, event: EventHandle) -> None: ...

    def event_elapsed(self, start: EventHandle, end: EventHandle) -> float:
        """Seconds between two recorded events made with `timing`."""
        ...

    def launch_host_function(self, stream: StreamHandle, function: Callable[[], object]) -> None:
        """Calls `function` in stream order, on a driver's thread.  It must not call the driver.

        An exception that it raises is logged, and told to the listeners of `on_host_failure`: no
        caller can catch it.
        """
        ...

    def on_host_failure(self, listener: HostFailureListener) -> None:
        """From here on `listener` is called with each host function that raised, of a stream or a
        graph, and with what it raised: on the driver's thread, before the work after it runs."""
        ...

    def unraised(self, patience: float) -> DriverError | None:
        """The failure that has poisoned the context, if no call has raised it yet.

        Waits for work under way, for `patience` seconds at most; a driver that cannot wait for a
        limited time waits only if they are infinite.  With 0 no call is made that a capture could
        forbid.  Raises no failure of work.
        """
        ...

    # --- modules and kernels
    def module_load(self, image: Image) -> ModuleHandle: ...

    def module_unload(self, module: ModuleHandle) -> None: ...

    def module_functions(self, module: ModuleHandle) -> tuple[str, ...]:
        """The entry names in the module, in the module's order."""
        ...

    def module_function(self, module: ModuleHandle, name: str) -> FunctionHandle:
        """A function by its entry name.  Status NOT_FOUND (500) for an unknown one."""
        ...

    def function_info(self, function: FunctionHandle) -> FunctionInfo: ...

    def function_load(self, function: FunctionHandle) -> None:
        """Loads a function onto the device now: loading it lazily would break a capture."""
        ...

    def function_allow_shared(self, function: FunctionHandle, nbytes: int) -> None:
        """Lets launches ask for up to `nbytes` of dynamic shared memory (over 48 KiB)."""
        ...

    def function_code(self, function: FunctionHandle) -> FunctionCode:
        """The code of a function, for another process.  Status NOT_FOUND, with the reason, where
        this process does not have it, or another one could not find it."""
        ...

    def code_image(self, code: FunctionCode) -> Image:
        """What `module_load` takes for such code.  Status INVALID_IMAGE, with the reason, if this
        process cannot have it."""
        ...

    def function_restore(self, function: FunctionHandle, code: FunctionCode) -> None:
        """Sets on a function that was loaded again what had been set on it before, if that is more
        than what it has."""
        ...

    def function_occupancy(self, function: FunctionHandle, threads: int, shared: int) -> int:
        """Blocks of that size that one multiprocessor holds at once."""
        ...

    def launch_kernel(
        self,
        stream: StreamHandle,
        function: FunctionHandle,
        config: LaunchConfig,
        arguments: KernelArguments,
    ) -> None:
        """Launches a kernel; the argument bytes are copied before the call returns."""
        ...

    def function_prepare_launch(self, function: FunctionHandle, pack: Pack) -> PlainLaunch | None:
        """`launch_kernel` for plain configs as one callable, or None if the driver has none.

        `pack` packs the function's arguments (`driver.launcher.packer`).  Invalid once the function
        is gone.  The call returns 0 for a launch.  After anything else nothing was launched, and
        the caller must use `launch_kernel`, which raises the error or succeeds.
        """
        ...

    # --- capture
    def stream_begin_capture(self, stream: StreamHandle, mode: CaptureMode) -> None:
        """Begins a capture.  Status ILLEGAL_STATE (401) if the stream captures already, 906 for the
        legacy stream."""
        ...

    def stream_begin_capture_to_graph(
        self,
        stream: StreamHandle,
        graph: GraphHandle,
        dependencies: Sequence[NodeHandle],
        mode: CaptureMode,
    ) -> None:
        """Captures into an existing graph, such as a conditional body, after `dependencies`."""
        ...

    def stream_end_capture(self, stream: StreamHandle) -> GraphHandle:
        """Ends the capture and returns its graph; after `…_to_graph` that same graph.

        Raises statuses 901 to 908 if it was broken.

        ILLEGAL_STATE (401) if the stream does not capture.  The streams work again afterwards, also
        when this raises; but a fork asked to end (903) only breaks the capture, which its own
        stream must still end.  From another thread (908) the capture ends and is dropped.
        """
        ...

    def stream_capture_info(self, stream: StreamHandle) -> CaptureInfo: ...

    def stream_set_capture_dependencies(
        self, stream: StreamHandle, nodes: Sequence[NodeHandle]
    ) -> None:
        """From here on, what is captured next on the stream depends on these nodes of the graph
        that is being captured, and not on those of before.  ILLEGAL_STATE (401) if the stream does
        not capture, INVALID_VALUE for a node of another graph."""
        ...

    def thread_exchange_capture_mode(self, mode: CaptureMode) -> CaptureMode:
        """Sets which calls of this thread captures forbid; returns the mode before.

        In RELAXED mode a pool may allocate while this thread captures.
        """
        ...

    # --- graphs
    def graph_create(self) -> GraphHandle: ...

    def graph_destroy(self, graph: GraphHandle) -> None: ...

    def graph_clone(self, graph: GraphHandle) -> GraphHandle:
        """A copy.  NOT_SUPPORTED for a graph with alloc, free or conditional nodes, and for the
        body of a conditional node; neither can be a child graph."""
        ...

    def node_in_clone(self, node: NodeHandle, clone: GraphHandle) -> NodeHandle:
        """The clone's node for a node of the original."""
        ...

    def graph_nodes(self, graph: GraphHandle) -> tuple[NodeHandle, ...]:
        """The nodes in the driver's order: usually, but not always, the order of creation."""
        ...

    def graph_edges(self, graph: GraphHandle) -> tuple[Edge, ...]: ...

    def graph_freeze(
        self, graph: GraphHandle, *, ours: Container[NodeHandle] | None = None
    ) -> FrozenGraph:
        """All of a definition, read at once, to be decoded node by node later.

        Child graphs and bodies are frozen by calls of their own.  `ours`: nodes that this library
        made, whose kernels have no attributes but those of `LaunchConfig`.  If they are all of the
        nodes, `KernelNodeParams.extra_attributes` are read from the definition when a node is
        decoded: reading them takes most of the time.
        """
        ...

    def graph_add_node(
        self,
        graph: GraphHandle,
        dependencies: Sequence[NodeHandle],
        params: NodeParams,
        edge_data: Sequence[EdgeData] | None = None,
    ) -> NodeHandle:
        """Adds a node.  `edge_data`: one entry for each dependency, or None for plain edges."""
        ...

    def graph_add_kernels(
        self,
        graph: GraphHandle,
        nodes: list[NodeHandle],
        kernels: KernelTable,
        rows: Sequence[tuple[int, Sequence[int]]],
    ) -> None:
        """As `graph_add_node` for each of these rows, with plain edges from what is at the places
        in `nodes` that a row comes with.  Each new node is appended to `nodes`.

        An error leaves the nodes before it in the graph.
        """
        ...

    def graph_add_edges(self, graph: GraphHandle, edges: Sequence[Edge]) -> None:
        """Adds edges.  Status INVALID_VALUE for an edge that would close a cycle."""
        ...

    def graph_remove_node(self, node: NodeHandle) -> None:
        """Removes a node.  Status 800 for alloc and free nodes, 801 in graphs that have some."""
        ...

    def node_kind(self, node: NodeHandle) -> NodeKind: ...

    def node_params(self, node: NodeHandle) -> NodeParams:
        """The parameters of a node: a copy, never the driver's memory."""
        ...

    def node_set_params(self, node: NodeHandle, params: NodeParams) -> None:
        """Changes a node of the definition; executables made from it before stay as they are."""
        ...

    def conditional_create(
        self, graph: GraphHandle, *, default: int = 0, reset_at_launch: bool = True
    ) -> ConditionalHandle:
        """A condition for one conditional node of `graph` (or of a body inside it)."""
        ...

    def condition_defaults(self, node: NodeHandle) -> ConditionDefaults | None:
        """How a conditional node's condition was made; None if another library made it.

        It is asked by the node: conditions of two graphs may have the same handle.
        """
        ...

    # --- executables
    def graph_instantiate(
        self, graph: GraphHandle, flags: InstantiateFlags = InstantiateFlags.NONE
    ) -> ExecHandle:
        """Makes an executable.  The error carries the node that the driver names as the cause."""
        ...

    def exec_destroy(self, executable: ExecHandle) -> None:
        """Destroys the executable; a launch under way still finishes."""
        ...

    def exec_upload(self, executable: ExecHandle, stream: StreamHandle) -> None: ...

    def exec_launch(self, executable: ExecHandle, stream: StreamHandle) -> None:
        """Launches the executable.  On a stream that captures: status 900, and the capture is
        broken (seen on driver 580).

        Two launches of one executable never overlap: the second waits for the first.
        """
        ...

    def exec_prepare_launch(
        self, executable: ExecHandle, stream: StreamHandle
    ) -> Callable[[], int]:
        """`exec_launch` as a callable without arguments.  Invalid once either handle is destroyed.

        The call returns 0 for a launch.  After another status nothing was launched, and the caller
        must use `exec_launch`, which raises the error, or succeeds if only the thread lacked the
        context.  The call may also raise the error itself.
        """
        ...

    def exec_set_params(self, executable: ExecHandle, node: NodeHandle, params: NodeParams) -> None:
        """Changes one node of the executable; `node` is the definition's.  All or nothing.

        Launches under way keep the old values.  Refused like cuGraphExec*NodeSetParams: another
        kind of node, a memcpy between other memory kinds or with another number of dimensions, …
        """
        ...

    def exec_prepare_kernel(
        self, executable: ExecHandle, node: NodeHandle, params: KernelNodeParams
    ) -> KernelSetter | None:
        """A kernel node whose arguments are to be set often; `params` are what it holds now.

        It is out of date once the node was changed in another way.  None if the driver has nothing
        shorter than `exec_set_params`.
        """
        ...

    def exec_set_enabled(self, executable: ExecHandle, node: NodeHandle, enabled: bool) -> None:
        """Enables or disables a kernel, memcpy or memset node; a disabled one does nothing.

        A disabled memset node may lose its edges.  With libcuda 580.159 and a memset of a few
        elements, the nodes after it do not wait for those before it, and a launch that ends with it
        counts as done before these are.  Launches with a disabled cooperative kernel may end with
        LAUNCH_FAILED (719), and the context is lost.
        """
        ...

    def exec_enabled(self, executable: ExecHandle, node: NodeHandle) -> bool: ...

    def exec_update(self, executable: ExecHandle, graph: GraphHandle) -> UpdateOutcome:
        """Gives the executable the parameters of `graph`, if nothing else differs.  Does not raise
        if the driver refuses: the outcome names the node and the reason."""
        ...
