"""The hot paths of a replay and of a launch: in C (`_launch.c`) if that was built, else in Python.

A launcher must take the slow path if its executable or stream is closed, if a capture is under
way, or if there is a tap.  The code that closes, captures or adds a tap calls `cool()` on the
launchers concerned first.  So the hot path needs one comparison and one driver call.  In Python
the frame, the comparison and the ctypes call cost 0.2 to 0.7 µs; in C a fraction of that.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from ostinato.driver.extension import load_extension
from ostinato.driver.forking import new_lock
from ostinato.driver.signature import Element, address_for, end_of
from ostinato.errors import Status

if TYPE_CHECKING:
    from ostinato.driver.api import (
        KernelArguments,
        KernelSetter,
        LaunchConfig,
        Pack,
        ParameterSlot,
        PlainLaunch,
    )
    from ostinato.driver.stream import Stream


def _never() -> int:
    raise AssertionError("a hot call without a hot stream")


# No stream is equal to this object, so a cold launcher needs no check of its own.
_COLD: tuple[object, Callable[[], int]] = (object(), _never)


class PythonLauncher:
    """An object that is launched on a stream again and again; base of `GraphExec`.

    States: cold -> `_heat(stream, call)` -> hot on that stream -> `cool()` -> cold.
    """

    # One tuple, read in one step: a thread must not combine one stream with the call of another.
    _hot = _COLD

    def launch(self, stream: Stream) -> None:
        """Runs the graph once, in stream order; returns without waiting.  Releases the GIL.

        The first launch on a stream prepares the call; later ones only make it.  Raises
        CaptureError on a stream that captures (the capture goes on), DriverError, ClosedError.
        """
        hot, call = self._hot
        if stream is not hot:
            self._launch_slowly(stream)
        elif call():  # a status other than 0: nothing was launched
            self._launch_checked(stream)

    def _heat(self, stream: Stream, call: Callable[[], int], /) -> None:
        """Makes later `launch`es on that stream call `call`, which returns a status."""
        self._hot = (stream, call)

    def cool(self) -> None:
        """Makes the next launch take the slow path, which checks everything again."""
        self._hot = _COLD

    def _launch_slowly(self, stream: Stream) -> None:
        """Launches on a stream that is not the hot one."""
        raise NotImplementedError

    def _launch_checked(self, stream: Stream) -> None:
        """Launches again after the prepared call returned a status: succeeds or raises."""
        raise NotImplementedError


class PythonSeat:
    """The place of an object in a cache: a lease keeps it from being closed during a launch.

        here -> leave() -> leaving, as long as a lease is out -> to be closed

    A caller for which `leave` or `release` returns True must close the object.
    """

    __slots__ = ("_guard", "leases", "leaving", "uses")

    def __init__(self) -> None:
        self._guard = new_lock()
        self.leases = 0
        self.leaving = False
        self.uses = 0
        """The number of leases so far."""

    def lease(self) -> bool:
        """Takes a lease; returns False, without a lease, if the object is leaving."""
        with self._guard:
            if self.leaving:
                return False
            self.leases += 1
            self.uses += 1
            return True

    def release(self) -> bool:
        """Ends a lease.  Returns True if the object is leaving and this was the last lease."""
        with self._guard:
            self.leases -= 1
            return self.leaving and not self.leases

    def leave(self) -> bool:
        """Refuses leases from here on.  Returns True if none is out."""
        with self._guard:
            self.leaving = True
            return not self.leases


class Repeat(Protocol):
    """A call that repeats the last replay, as long as its arguments and guards are unchanged.

    It is made by `repeat`, with a `lock` that is held during the launch, and `guarded`: objects and
    names of their attributes.  `again`, with the sizes of a call by name, launches and returns
    `answer` if the sizes are the armed ones (whole numbers), each attribute still is the armed
    object, and the launcher is hot; else it does nothing and returns None.  It raises the errors of
    the launch.

        cold -> arm() -> hot for `left` launches, or until cool()

    `touch` is called with the seat before the launch if the seat is not the `latest` of the
    `table`; `release` is called with a seat that has left and whose last lease has ended.
    """

    left: int

    def arm(
        self,
        sizes: dict[str, int],
        wanted: tuple[object, ...],
        seat: PythonSeat,
        launcher: PythonLauncher,
        stream: Stream,
        left: int,
        /,
    ) -> None:
        """Makes calls with these sizes launch the launcher on the stream from here on."""

    def cool(self) -> None:
        """Stops all repeats until `arm` is called again."""

    def taken(self) -> int:
        """Returns the number of launches since the last call of this."""

    def again(self, given: dict[str, int], /) -> Any: ...


_extension, _missing = load_extension("ostinato.driver._launch")

if TYPE_CHECKING or _extension is None:
    Launcher = PythonLauncher
    Seat = PythonSeat
else:
    Launcher = _extension.Launcher
    Seat = _extension.Seat


def compiled() -> bool:
    """True if the extension was loaded."""
    return _extension is not None


def description() -> str:
    """Returns the path that replays take, in words; if not compiled, with the reason."""
    return "compiled" if compiled() else f"ctypes; of the compiled one: {_missing or 'left out'}"


def prepare(
    function: Any, executable: int, stream: int, within: tuple[Any, int] | None = None
) -> Callable[[], int]:
    """Returns `function(executable, stream)` as a call without arguments that returns its status.

    `function`: a ctypes function without argument types.  The call releases the GIL, converts
    nothing and looks nothing up.  `within`: cuCtxGetCurrent, as another such function, and a
    context: while another one is current, nothing is called, and the status is INVALID_CONTEXT.
    """
    if _extension is not None:
        address = ctypes.cast(function, ctypes.c_void_p).value
        if within is not None:
            within = ctypes.cast(within[0], ctypes.c_void_p).value, within[1]
        where = () if within is None else (within,)
        made: Callable[[], int] = _extension.Prepared(address, executable, stream, *where)
        return made
    # Two ctypes objects, so that ctypes converts nothing and no Python frame is needed.
    call: Callable[[], int] = partial(
        function, ctypes.c_void_p(executable), ctypes.c_void_p(stream)
    )
    if within is None:
        return call
    get_current, context = within

    def checked() -> int:
        found = ctypes.c_void_p()
        if get_current(ctypes.byref(found)) or found.value != context:
            return Status.INVALID_CONTEXT
        return call()

    return checked


def repeat(
    lock: Any,
    answer: object,
    guarded: tuple[tuple[object, str], ...],
    table: Any,
    touch: Callable[[Any], object],
    release: Callable[[Any], object],
) -> Repeat | None:
    """Makes a `Repeat`.  Returns None without the extension: then no call is repeated so."""
    if _extension is None:
        return None
    made: Repeat = _extension.Repeat(lock, answer, guarded, table, touch, release)
    return made


def packer(codes: str, slots: Sequence[ParameterSlot], elements: Sequence[Element | None]) -> Pack:
    """Returns a function that packs the values of one launch into bytes.

    The function returns None if a value does not have exactly the type of its slot, and always
    without the extension; `Signature.pack` then packs the values or raises the error.  `codes`: one
    of `signature.PLAIN_CODES` for each slot; `elements`: the element that a pointer takes
    (`Signature.elements`), None for other slots.  An address is an int; that of a buffer
    (`Buffer._pointer`) whose element is the slot's or its space's raw one; or the result of
    `signature.address_for`.
    """
    if _extension is not None:
        offsets = tuple(slot.offset for slot in slots)
        size = end_of(slots)
        taken = tuple([None if e is None else (e, e.space.raw) for e in elements])
        pack: Pack = _extension.Packer(codes, offsets, size, taken, address_for).pack
        return pack
    return lambda _: None


KernelTarget: TypeAlias = tuple[int, int, int, int]
"""The target of a C call: the addresses of cuLaunchKernelEx and cuCtxGetCurrent, the context
that must be current, and the function.  Only C reads it."""


def function_call(pack: Pack, target: KernelTarget) -> PlainLaunch | None:
    """Returns one function's launches as one call: `call(stream, grid, block, shared, values)`.

    The call returns the status, or None if nothing was launched: a value does not have exactly the
    type of its slot, a number does not fit, or another context is current.  `pack`: from `packer`.
    Returns None without the extension, and if there are too many arguments for it.
    """
    made = getattr(pack, "__self__", None)
    if _extension is None or type(made) is not _extension.Packer:
        return None
    try:
        call: PlainLaunch = _extension.FunctionCall(made, target).launch
    except ValueError:
        return None
    return call


def kernel_call(
    target: KernelTarget,
    config: LaunchConfig,
    stream: int,
    attributes: tuple[int, int],
    arguments: KernelArguments,
) -> Callable[[], int | None] | None:
    """Returns one kernel launch as a call without arguments.

    The call returns the status, or None, without a launch, if another context is current.
    `attributes`: the address of the launch attributes, which must stay valid, and their number.
    Returns None without the extension, and for arguments that a library packed.
    Raises OverflowError for a number that the driver cannot take.
    """
    data, layout = arguments.data, arguments.layout
    if _extension is None or arguments.packed or (data and not layout):
        return None
    offsets = tuple([slot.offset for slot in layout])
    sizes = (config.grid, config.block, config.shared)
    call: Callable[[], int | None]
    call = _extension.KernelCall(target, *sizes, stream, *attributes, data, offsets).launch
    return call


def kernel_nodes(
    calls: tuple[int, int],
    context: int,
    executable: int,
    nodes: Sequence[int],
    indices: Sequence[int],
    content: tuple[bytes, list[bytes], bytes, dict[int, bytes]],
) -> list[KernelSetter] | None:
    """Returns setters for kernel nodes of an executable that call the driver from C.

    `calls`: the addresses of cuGraphExecKernelNodeSetParams_v2 and cuCtxGetCurrent.  `indices`:
    those of the nodes' contents in what `read_nodes` gave, with the layouts.  Returns None without
    the extension.
    """
    if _extension is None:
        return None
    made: list[KernelSetter] = _extension.kernel_nodes(
        calls, context, executable, list(nodes), list(indices), *content
    )
    return made


def set_nodes(writes: list[tuple[KernelSetter, int, bytes]]) -> tuple[int, int] | None:
    """Makes many writes of `KernelSetter`s of one executable, all or none, in one call of C.

    Adjacent writes of one node take one driver call.  Returns two statuses: that of the writes,
    and that of their rollback after a refusal.  If the first is not 0, nothing was changed, unless
    the second is not 0 either.  Returns None, without any write, if the extension was not built, a
    setter is not the extension's, or another context is current.
    """
    if _extension is None or not all(type(w[0]) is _extension.KernelNode for w in writes):
        return None
    made: tuple[int, int] | None = _extension.set_nodes(writes)
    return made


def set_words(
    setters: list[KernelSetter], counts: bytes, places: bytes, values: bytes
) -> tuple[int, int] | None:
    """Does the work of `set_nodes` for 8-byte words: `counts` has the number of words of each
    setter (32-bit); `places` (32-bit offsets) and `values` follow for all setters in a row."""
    if _extension is None or not all(type(one) is _extension.KernelNode for one in setters):
        return None
    made: tuple[int, int] | None = _extension.set_words(setters, counts, places, values)
    return made


def reader(name: str) -> Callable[..., Any] | None:
    """Returns `read_nodes` or `capture_info` of the extension, or None without it."""
    return getattr(_extension, name, None)
