"""Every error this library raises, and what each driver status means.

    OstinatoError
    ├── SettingsError               an OSTINATO_* variable has a value that cannot be read
    ├── InputError                  an argument is wrong; nothing was done       (also ValueError)
    ├── ClosedError                 the object was closed before                 (also RuntimeError)
    ├── NotAvailableError           this machine, driver or install lacks something
    │   └── NoCudaError             no GPU, no driver, or no extra cuda13 or cuda12
    ├── DriverError                 a driver call failed; carries the status
    │   ├── OutOfMemoryError        status 2                                     (also MemoryError)
    │   ├── NotReadyError           status 600: the work is not finished yet
    │   ├── ContextPoisonedError    sticky (700, 719, …): nothing on this context works
    │   └── StreamCaptureError      statuses 900 to 908
    ├── CaptureError                a capture could not be begun, or did not give a graph
    │   ├── NotCapturingError       ended, but never begun
    │   ├── CaptureBrokenError      something cannot be captured; names the line
    │   ├── PoolSealedError         a capture would need memory from a sealed pool
    │   └── CaptureLimitError       a cache has captured as much as its limits allow
    ├── GraphError                  a graph could not be built, read, instantiated or changed
    │   ├── NodeKindError           this kind of node does not have what was asked for
    │   ├── UpdateRefusedError      the executable stays as it was; names node and reason
    │   └── GraphFileError          a graph cannot be saved, or a file not be loaded; says why
    ├── VerificationError           a replay gave another answer than the eager run
    ├── StateLostError              a check could not restore the state that it had changed
    ├── EagerRunError               a strict step would have run eagerly; nothing ran
    ├── NotHeldError                no graph can be held: there is none, or a call would do more
    ├── HostFunctionError           a host function of a stream or graph raised
    ├── CompileError                the compiler refused the source; carries its log
    ├── GroupError                  ranks that work together cannot go on; the same on all of them
    │   ├── RankLostError           a rank died, left, raised, or is not heard of any more
    │   ├── DeadlineError           a rank waited for the others for longer than the deadline
    │   └── DisagreementError       ranks were about to do different things
    └── ModelError                  a model cannot be found, read or run
        ├── ModelFormatError        a file is damaged, or not what it says it is
        ├── UnsupportedModelError   a sound file, but of an architecture or type not supported
        ├── DownloadError           a model could not be fetched; nothing was kept
        └── LogitsError             a sequence's logits hold NaN or infinity

An error says what failed, which node or key or file, the driver's status where there is one, and
what to do next.  This file imports nothing of the library.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from ostinato.records import dataclass

__all__ = [
    "CaptureBrokenError",
    "CaptureError",
    "CaptureLimitError",
    "ClosedError",
    "CompileError",
    "ContextPoisonedError",
    "DeadlineError",
    "DisagreementError",
    "DownloadError",
    "DriverError",
    "EagerRunError",
    "GraphError",
    "GraphFileError",
    "GroupError",
    "HostFunctionError",
    "InputError",
    "LogitsError",
    "ModelError",
    "ModelFormatError",
    "NoCudaError",
    "NodeKindError",
    "NotAvailableError",
    "NotCapturingError",
    "NotHeldError",
    "NotReadyError",
    "OstinatoError",
    "OutOfMemoryError",
    "PoolSealedError",
    "RankLostError",
    "SettingsError",
    "StateLostError",
    "Status",
    "StatusMeaning",
    "StreamCaptureError",
    "UnsupportedModelError",
    "UpdateRefusedError",
    "VerificationError",
    "driver_error",
    "explain",
]


class Status(enum.IntEnum):
    """Driver statuses by the driver's numbers (`CUresult` in cuda.h); both drivers use them."""

    SUCCESS = 0
    INVALID_VALUE = 1
    OUT_OF_MEMORY = 2
    NOT_INITIALIZED = 3
    DEINITIALIZED = 4
    NO_DEVICE = 100
    INVALID_DEVICE = 101
    INVALID_IMAGE = 200
    INVALID_CONTEXT = 201
    NO_BINARY_FOR_GPU = 209
    INVALID_PTX = 218
    UNSUPPORTED_PTX_VERSION = 222
    INVALID_SOURCE = 300
    INVALID_HANDLE = 400
    ILLEGAL_STATE = 401
    NOT_FOUND = 500
    NOT_READY = 600
    ILLEGAL_ADDRESS = 700
    LAUNCH_OUT_OF_RESOURCES = 701
    LAUNCH_TIMEOUT = 702
    CONTEXT_IS_DESTROYED = 709
    ASSERT = 710
    HARDWARE_STACK_ERROR = 714
    ILLEGAL_INSTRUCTION = 715
    MISALIGNED_ADDRESS = 716
    INVALID_ADDRESS_SPACE = 717
    INVALID_PC = 718
    LAUNCH_FAILED = 719
    COOPERATIVE_LAUNCH_TOO_LARGE = 720
    NOT_PERMITTED = 800
    NOT_SUPPORTED = 801
    STREAM_CAPTURE_UNSUPPORTED = 900
    STREAM_CAPTURE_INVALIDATED = 901
    STREAM_CAPTURE_MERGE = 902
    STREAM_CAPTURE_UNMATCHED = 903
    STREAM_CAPTURE_UNJOINED = 904
    STREAM_CAPTURE_ISOLATION = 905
    STREAM_CAPTURE_IMPLICIT = 906
    CAPTURED_EVENT = 907
    STREAM_CAPTURE_WRONG_THREAD = 908
    TIMEOUT = 909
    GRAPH_EXEC_UPDATE_FAILURE = 910
    UNKNOWN = 999


@dataclass(frozen=True, slots=True)
class StatusMeaning:
    """A status in words: what happened, and what to do about it."""

    meaning: str
    advice: str


_POISONED = "Every later call on this context fails too: end the process (or reopen a host device)."

_STICKY: dict[int, StatusMeaning] = {
    Status.ILLEGAL_ADDRESS: StatusMeaning(
        "a kernel read or wrote memory it does not own",
        "compute-sanitizer finds the kernel and the access. " + _POISONED,
    ),
    Status.LAUNCH_TIMEOUT: StatusMeaning("a kernel ran too long and was stopped", _POISONED),
    Status.CONTEXT_IS_DESTROYED: StatusMeaning(
        "the device's context was destroyed, perhaps by another library", _POISONED
    ),
    Status.ASSERT: StatusMeaning("a device-side assert failed", _POISONED),
    Status.HARDWARE_STACK_ERROR: StatusMeaning("a kernel overflowed its stack", _POISONED),
    Status.ILLEGAL_INSTRUCTION: StatusMeaning("a kernel met an illegal instruction", _POISONED),
    Status.MISALIGNED_ADDRESS: StatusMeaning(
        "a kernel used an address that is not aligned to its access",
        "Align buffers and offsets to the vector width. " + _POISONED,
    ),
    Status.INVALID_ADDRESS_SPACE: StatusMeaning(
        "a kernel used an address of another memory space", _POISONED
    ),
    Status.INVALID_PC: StatusMeaning("a kernel jumped to an invalid place", _POISONED),
    Status.LAUNCH_FAILED: StatusMeaning("a kernel failed while it ran", _POISONED),
    Status.UNKNOWN: StatusMeaning("an unknown error in the driver", _POISONED),
}
"""The statuses of a lost context."""

_MEANINGS: dict[int, StatusMeaning] = {
    Status.INVALID_VALUE: StatusMeaning(
        "an argument is outside what the call accepts",
        "Check sizes, addresses and launch dimensions.",
    ),
    Status.OUT_OF_MEMORY: StatusMeaning(
        "there is not enough device memory",
        "Free buffers, close or evict graphs, or choose smaller sizes.",
    ),
    Status.NOT_INITIALIZED: StatusMeaning(
        "the driver was not initialised", "Open the device with open_device()."
    ),
    Status.DEINITIALIZED: StatusMeaning(
        "the driver is shutting down", "Close devices before the process ends."
    ),
    Status.NO_DEVICE: StatusMeaning(
        "the driver sees no CUDA device", "Use the host device, or check `ostinato doctor`."
    ),
    Status.INVALID_DEVICE: StatusMeaning(
        "there is no device of that number", "See `ostinato doctor` for the devices there are."
    ),
    Status.INVALID_IMAGE: StatusMeaning(
        "the module image is not one the driver can read",
        "Compile again for this device.",
    ),
    Status.INVALID_CONTEXT: StatusMeaning(
        "no context of this device is current on the thread",
        "Use the device object's own calls; do not pop its context.",
    ),
    Status.NO_BINARY_FOR_GPU: StatusMeaning(
        "the image holds no code for this GPU", "Compile for this device's architecture."
    ),
    Status.INVALID_PTX: StatusMeaning(
        "the PTX does not assemble", "Read the assembler's log in this error."
    ),
    Status.UNSUPPORTED_PTX_VERSION: StatusMeaning(
        "the PTX is that of a newer compiler than this driver takes",
        "Update the driver, or compile with the driver's CUDA.",
    ),
    Status.INVALID_SOURCE: StatusMeaning(
        "the device code is invalid, or does not link",
        "Check the source and what it is linked with.",
    ),
    Status.INVALID_HANDLE: StatusMeaning(
        "a handle is unknown, destroyed, or of another context",
        "Something was used after it was closed, or is of another device.",
    ),
    Status.ILLEGAL_STATE: StatusMeaning(
        "the object is in a state that does not allow this call", "See the call's documentation."
    ),
    Status.NOT_FOUND: StatusMeaning("there is nothing of that name", "Check the name."),
    Status.NOT_READY: StatusMeaning(
        "the work is not finished yet", "Not a failure: wait, or ask again later."
    ),
    Status.LAUNCH_OUT_OF_RESOURCES: StatusMeaning(
        "the launch needs more registers or shared memory than a block can have",
        "Use fewer threads or less shared memory.",
    ),
    Status.COOPERATIVE_LAUNCH_TOO_LARGE: StatusMeaning(
        "a cooperative launch has more blocks than fit on the device at once",
        "Use fewer blocks.",
    ),
    Status.NOT_PERMITTED: StatusMeaning(
        "the operation is not permitted here",
        "During a capture: do this before the capture begins.",
    ),
    Status.NOT_SUPPORTED: StatusMeaning(
        "this device or driver does not support the operation",
        "See device.capabilities.",
    ),
    Status.STREAM_CAPTURE_UNSUPPORTED: StatusMeaning(
        "the operation cannot be captured",
        "Synchronise, allocate, load modules and query before the capture begins: warm up first.",
    ),
    Status.STREAM_CAPTURE_INVALIDATED: StatusMeaning(
        "an earlier call broke this capture (the context is sound)",
        "End the capture, and mend the call that broke it; the stream works again afterwards.",
    ),
    Status.STREAM_CAPTURE_MERGE: StatusMeaning(
        "the call would join two captures that were begun separately",
        "Begin one capture and fork the second stream from it with an event.",
    ),
    Status.STREAM_CAPTURE_UNMATCHED: StatusMeaning(
        "this stream did not begin the capture",
        "End the capture on the stream that began it.",
    ),
    Status.STREAM_CAPTURE_UNJOINED: StatusMeaning(
        "a stream forked from the capture was not joined back",
        "Record an event on the forked stream and make the capturing stream wait for it.",
    ),
    Status.STREAM_CAPTURE_ISOLATION: StatusMeaning(
        "a dependency would cross the capture's border",
        "Wait only for events recorded inside this capture.",
    ),
    Status.STREAM_CAPTURE_IMPLICIT: StatusMeaning(
        "the call would depend on the legacy default stream, which waits for all streams",
        "Give the call a stream of its own (not stream 0): the one that is captured, if it belongs "
        "into the graph.",
    ),
    Status.CAPTURED_EVENT: StatusMeaning(
        "the event was last recorded inside a capture, so it has no time and no state",
        "Query or wait on events that were recorded outside.",
    ),
    Status.STREAM_CAPTURE_WRONG_THREAD: StatusMeaning(
        "a capture not in relaxed mode must end on the thread that began it",
        "End it there, or begin it in relaxed mode.",
    ),
    Status.TIMEOUT: StatusMeaning("the driver waited too long", "Try again."),
    Status.GRAPH_EXEC_UPDATE_FAILURE: StatusMeaning(
        "the graph differs from the executable in a way that an update cannot change",
        "Instantiate the new graph instead.",
    ),
} | _STICKY


def explain(status: int) -> StatusMeaning:
    """Returns the meaning of a driver status and advice; a general text for an unlisted status."""
    return _MEANINGS.get(
        status, StatusMeaning("the driver refused the call", "See CUresult in cuda.h.")
    )


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yields an error and its causes, nearest first."""
    known = set()
    following: BaseException | None = error
    while following is not None and id(following) not in known:
        known.add(id(following))
        yield following
        hidden = following.__suppress_context__
        following = following.__cause__ or (None if hidden else following.__context__)


class OstinatoError(Exception):
    """The base of every error that this library raises on purpose.

    except ost.OstinatoError as error:
        print(error)
    """


class SettingsError(OstinatoError):
    """A setting has a value that cannot be read; names variable, value and valid values."""


class InputError(OstinatoError, ValueError):
    """An argument is wrong; nothing was done."""


class ClosedError(OstinatoError, RuntimeError):
    """The object was closed before this call."""


class NotAvailableError(OstinatoError):
    """This machine, driver or installation lacks a requested feature; says how to get it."""


class NoCudaError(NotAvailableError):
    """There is no GPU or no driver, or the extra cuda13 or cuda12 is missing; says which."""


class DriverError(OstinatoError):
    """A driver call failed.

    `status` is the driver's number, `call` the name of the call in the protocol
    (`driver.api.Driver`), `node` the node handle that the driver named as the cause, or None.
    """

    def __init__(
        self, status: int, call: str, detail: str = "", *, node: int | None = None
    ) -> None:
        self.status = status
        self.call = call
        self.detail = detail
        self.node = node
        super().__init__(status, call, detail)

    def __str__(self) -> str:
        try:
            name = Status(self.status).name
        except ValueError:
            name = "unlisted"
        words = explain(self.status)
        blamed = "" if self.node is None else f" (node {self.node:#x})"
        detail = f": {self.detail}" if self.detail else ""
        return (
            f"{self.call}{blamed} failed with status {int(self.status)} {name}: "
            f"{words.meaning}{detail}. {words.advice}"
        )


class OutOfMemoryError(DriverError, MemoryError):
    """Device memory is exhausted; the context is sound."""


class NotReadyError(DriverError):
    """The work was not finished when it was queried, or at a wait's deadline; not a failure.

    `unfinished`: the nodes that had not finished at the deadline, in words, if a black box was
    armed; else how to arm one.
    """

    unfinished: str = ""

    def __str__(self) -> str:
        more = f"\n{self.unfinished}" if self.unfinished else ""
        return super().__str__() + more


class ReplayWatch(Protocol):
    """An armed black box (`explain.black_box`): it knows how far each watched replay came."""

    def fault(self) -> object | None:
        """Returns the report on the context that failed; None if no watched one has."""

    def unfinished(self) -> str:
        """Describes the nodes of watched replays under way that have not finished."""


_watch: ReplayWatch | None = None
_ARM = (
    "To see the node of a replay, run the program again with OSTINATO_BLACK_BOX=1, or inside of "
    "`with ost.black_box():`."
)


def set_replay_watch(watch: ReplayWatch | None) -> None:
    """Sets the object that later errors ask about faults and unfinished nodes; None for none."""
    global _watch
    _watch = watch


def unfinished_work() -> str:
    """Describes the nodes that have not finished, or says how to have them known."""
    return _ARM if _watch is None else _watch.unfinished()


class ContextPoisonedError(DriverError):
    """A kernel failed: every later call on this context fails.  Not raised for a failed capture.

    `report`: what an armed black box knows of the fault (`explain.BlackBoxReport`), or None.
    """

    def __init__(
        self, status: int, call: str, detail: str = "", *, node: int | None = None
    ) -> None:
        super().__init__(status, call, detail, node=node)
        self.report = None if _watch is None else _watch.fault()

    def __str__(self) -> str:
        more = f" {_ARM}" if self.report is None else f"\n{self.report}"
        return super().__str__() + more


class StreamCaptureError(DriverError):
    """A rule of stream capture was broken (statuses 900 to 908); the context is sound."""


def driver_error(
    status: int, call: str, detail: str = "", *, node: int | None = None
) -> DriverError:
    """Returns an error of the class for this status: DriverError or one of its subclasses."""
    kind: type[DriverError] = DriverError
    if status == Status.OUT_OF_MEMORY:
        kind = OutOfMemoryError
    elif status == Status.NOT_READY:
        kind = NotReadyError
    elif status in _STICKY:
        kind = ContextPoisonedError
    elif Status.STREAM_CAPTURE_UNSUPPORTED <= status <= Status.STREAM_CAPTURE_WRONG_THREAD:
        kind = StreamCaptureError
    return kind(status, call, detail, node=node)


class CaptureError(OstinatoError):
    """A capture could not be begun, or did not give a graph."""


class NotCapturingError(CaptureError):
    """A capture was ended that had not been begun."""


class CaptureBrokenError(CaptureError):
    """The captured code contains a call that cannot be captured.

    `location` is "file:line: source line" of the Python call that broke the capture, if known.
    """

    def __init__(self, message: str, *, location: str | None = None) -> None:
        self.location = location
        super().__init__(message)


class PoolSealedError(CaptureError):
    """A capture would need memory from a sealed pool; says for what."""


class CaptureLimitError(CaptureError):
    """The limits of a cache refuse a capture (`step.CaptureLimits`); nothing was captured."""


class GraphError(OstinatoError):
    """A graph could not be built, read, instantiated or changed."""


class NodeKindError(GraphError):
    """This kind of node does not have the requested attribute."""


class UpdateRefusedError(GraphError):
    """The driver or this library refused a change; the executable is as it was before.

    `node_index` is the index, in the driver's order, of the node that caused it, or None.
    """

    def __init__(self, message: str, *, node_index: int | None = None) -> None:
        self.node_index = node_index
        super().__init__(message)


class GraphFileError(GraphError):
    """A graph cannot be saved to a file, or a file cannot be loaded; nothing was changed.

    The text names the node, the memory or the place in the file, and what to do.
    """


class VerificationError(OstinatoError):
    """A replay gave another answer than the eager run; says key, slot and place."""


class StateLostError(OstinatoError):
    """A check could not restore the state that it had changed; names the slots to write again."""


class EagerRunError(OstinatoError):
    """A strict step cannot replay a graph for this call; says why.  Nothing of the call ran."""


class NotHeldError(OstinatoError):
    """A cache has no graph under a key, or a call of a step would do more than replay.

    `decision`: the `step.Decision` that says what the call would do, and why; None for a cache.
    """

    def __init__(self, message: str, decision: Any = None) -> None:
        super().__init__(message)
        self.decision = decision


class HostFunctionError(OstinatoError):
    """A host function of a stream or graph raised; its exception is the cause (`__cause__`).

    The driver calls the function long after its submission.  So the next call on a stream of the
    device, or the wait under way, raises this once.  Work that the function did not do is missing;
    the work after it ran, and the device is sound.
    """


class CompileError(OstinatoError):
    """The compiler refused the source; `log` holds its messages, with line numbers."""

    def __init__(self, message: str, *, log: str = "") -> None:
        self.log = log
        super().__init__(message)


class GroupError(OstinatoError):
    """Ranks that work together cannot go on: the group has failed, and every rank raises this.

    `rank`: the rank that found the failure, or that had it.  The group cannot be used again: close
    the group and its objects, and end the process with a status that is not 0, or form another.
    """

    def __init__(self, message: str, *, rank: int = -1) -> None:
        self.rank = rank
        super().__init__(message)


class RankLostError(GroupError):
    """A rank died, left the group, raised an exception, or has sent no sign of life for the
    deadline."""


class DeadlineError(GroupError):
    """A rank waited for the others for longer than the group's deadline; names the operation."""


class DisagreementError(GroupError):
    """Ranks were about to do different things; says which, and where they first differ."""


class ModelError(OstinatoError):
    """A model cannot be found, read or run."""


class ModelFormatError(ModelError):
    """A model file is damaged or of another format than it claims; says file and place."""


class UnsupportedModelError(ModelError):
    """The file is sound, but its architecture, tensor type or feature is not supported."""


class DownloadError(ModelError):
    """A model could not be fetched; nothing was kept."""


class LogitsError(ModelError):
    """The logits of one or more sequences hold NaN or infinity, so no token can be chosen.

    `failed`: these sequences, each with the position of the missing token; they are as before the
    step.  `chosen`: the tokens of the call's other sequences, which have them already.
    """

    def __init__(self, failed: Mapping[int, int], chosen: Mapping[int, int]) -> None:
        self.failed = dict(failed)
        self.chosen = dict(chosen)
        super().__init__(self.failed, self.chosen)

    def __str__(self) -> str:
        places = "; ".join(f"sequence {one}, position {at}" for one, at in self.failed.items())
        return (
            f"{places}: the logits hold NaN or infinity, so no token can be chosen; the weights "
            "may be damaged"
        )
