"""The hot paths of a replay and of a launch, in Python and, where it was built, in C (`_launch.c`,
`_kernel_call.c`).

A replay has to find out that nothing speaks against it (closed, captured, listened to) and make
one call of the driver.  Who says that something speaks against it *cools* the launcher; so a
launch has one comparison to make.  In Python the frame, that comparison and a ctypes call cost
0.2 to 0.7 µs; the compiled one makes the same call at a fraction of that.

The extension is optional: without a compiler at installation, everything works as here.
"""

from __future__ import annotations

import ctypes
import importlib
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ostinato.driver.api import KernelArguments, LaunchConfig, Pack, ParameterSlot, PlainLaunch
    from ostinato.driver.stream import Stream

__all__ = [
    "Launcher",
    "PythonLauncher",
    "compiled",
    "description",
    "function_call",
    "kernel_call",
    "packer",
    "prepare",
    "without_extension",
]


def _never() -> int:
    raise AssertionError("a hot call without a hot stream")


_COLD: tuple[object, Callable[[], int]] = (object(), _never)  # no argument is this object


class PythonLauncher:
    """What can be launched on a stream again and again.

    States: cold -> `_heat(stream, call)` -> hot on that stream -> `cool()` -> cold.
    """

    # One pair, read at once: two threads that launch on two streams must not take each other's.
    _hot = _COLD

    def launch(self, stream: Stream) -> None:
        """Runs the graph once, in stream order; returns without waiting.  Lets go of the GIL.

        The first launch on a stream prepares the call; later ones only make it.  Raises
        CaptureError on a stream that captures (the capture goes on), DriverError, ClosedError.
        """
        hot, call = self._hot
        if stream is not hot:
            self._launch_slowly(stream)
        elif call():  # a status: refused, and nothing was launched
            self._launch_checked(stream)

    def _heat(self, stream: Stream, call: Callable[[], int], /) -> None:
        """`launch` on that stream is `call()` from now on."""
        self._hot = (stream, call)

    def cool(self) -> None:
        """The next launch looks again whether anybody listens and everything is open."""
        self._hot = _COLD

    def _launch_slowly(self, stream: Stream) -> None:
        """A launch on another stream than the hot one, if there is one."""
        raise NotImplementedError

    def _launch_checked(self, stream: Stream) -> None:
        """A launch after the prepared call gave a status: raises the error, or succeeds."""
        raise NotImplementedError


_extension: Any = None
_missing = ""
try:
    _extension = importlib.import_module("ostinato.driver._launch")
except ModuleNotFoundError:
    _missing = "it was not built: no C compiler, or no Python.h, at installation"
except ImportError as error:  # built for another processor, or against another libc
    _missing = f"it cannot be loaded: {error}"

if TYPE_CHECKING:
    Launcher = PythonLauncher
else:
    Launcher = PythonLauncher if _extension is None else _extension.Launcher


def compiled() -> bool:
    """Whether replays take the compiled path."""
    return _extension is not None


def description() -> str:
    """Which path replays take and, if it is not the compiled one, why, in words."""
    return "compiled" if compiled() else f"ctypes; of the compiled one: {_missing or 'left out'}"


def prepare(function: Any, executable: int, stream: int) -> Callable[[], int]:
    """`function(executable, stream)` as a call without arguments that gives its status.

    `function`: a ctypes function without argument types.  Either way the GIL is let go of for the
    call, and nothing is converted or looked up in it.
    """
    if _extension is not None:
        address = ctypes.cast(function, ctypes.c_void_p).value
        made: Callable[[], int] = _extension.Prepared(address, executable, stream)
        return made
    # Two ctypes objects, so that ctypes converts nothing, and no frame of Python.
    return partial(function, ctypes.c_void_p(executable), ctypes.c_void_p(stream))


def packer(
    codes: str,
    slots: Sequence[ParameterSlot],
    address_of: Callable[[object], int | None],
) -> Pack:
    """What turns a kernel's arguments into bytes, or answers None if one is not just what its slot
    takes (then somebody more patient is to be asked, who words the error).

    `codes`: a code of `struct` for each slot, P for an address: a number, what has one as its
    `address`, or what `address_of` knows one of.
    """
    offsets = tuple(slot.offset for slot in slots)
    size = max((slot.offset + slot.size for slot in slots), default=0)
    if _extension is not None:
        pack: Pack = _extension.Packer(codes, offsets, size, address_of).pack
        return pack
    text, end = "<", 0
    for code, slot in zip(codes, slots, strict=True):
        text += f"{slot.offset - end}x{'Q' if code == 'P' else code}"
        end = slot.offset + slot.size
    return partial(_pack, struct.Struct(text), codes, address_of)


def _pack(
    packing: struct.Struct,
    codes: str,
    address_of: Callable[[object], int | None],
    values: tuple[object, ...],
) -> bytes | None:
    if len(values) != len(codes):
        return None
    words = list(values)
    for index, code in enumerate(codes):
        kind = type(words[index])
        if kind is int or kind is float:
            if (kind is float) != (code in "fd"):
                return None
        elif code == "P":
            address = getattr(words[index], "address", None)
            if type(address) is not int:
                address = address_of(words[index])
                if type(address) is not int:
                    return None
            words[index] = address
        else:
            return None
    try:
        return packing.pack(*words)
    except (struct.error, OverflowError):
        return None


def function_call(
    pack: Pack, launch: int, current: int, context: int, function: int
) -> PlainLaunch | None:
    """A function's launches in one call each: `call(stream, grid, block, shared, values)`.

    It gives the status, or None if nothing was launched: a value is not just what its slot takes,
    or another context is current.  `pack`: what `packer` gave; `launch`, `current`: addresses of
    cuLaunchKernelEx and cuCtxGetCurrent.  None where the extension was not built, or for arguments
    that are too many for it.
    """
    made = getattr(pack, "__self__", None)
    if _extension is None or type(made) is not _extension.Packer:
        return None
    try:
        call: PlainLaunch = _extension.FunctionCall(made, launch, current, context, function).launch
    except ValueError:
        return None
    return call


def kernel_call(
    launch: int,
    current: int,
    context: int,
    function: int,
    config: LaunchConfig,
    stream: int,
    attributes: tuple[int, int],
    arguments: KernelArguments,
) -> Callable[[], int | None] | None:
    """A kernel launch as a call without arguments that gives its status, or None where another
    context is current.  None where the extension was not built, or for arguments packed as a
    library's are.

    `launch`, `current`: addresses of cuLaunchKernelEx and cuCtxGetCurrent.  `attributes`: their
    address, which must stay good, and number.  Raises OverflowError for a number that the driver
    cannot take.
    """
    data, layout = arguments.data, arguments.layout
    if _extension is None or arguments.packed or (data and not layout):
        return None
    made: Callable[[], int | None] = _extension.KernelCall(
        launch,
        current,
        context,
        function,
        config.grid,
        config.block,
        config.shared,
        stream,
        *attributes,
        data,
        struct.pack(f"={len(layout)}I", *(slot.offset for slot in layout)),
    )
    return made


@contextmanager
def without_extension() -> Iterator[None]:
    """Launches as where the extension was not built: for tests, and to measure what it gains.

    For executables that are made and used inside; not for several threads to enter.
    """
    global _extension
    kept = _extension
    if kept is None:
        yield
        return
    names = ("_hot", "launch", "_heat", "cool")
    compiled = {name: kept.Launcher.__dict__.get(name) for name in names}
    for name in names:
        setattr(kept.Launcher, name, PythonLauncher.__dict__[name])
    _extension = None
    try:
        yield
    finally:
        _extension = kept
        for name, value in compiled.items():
            if value is None:
                delattr(kept.Launcher, name)
            else:
                setattr(kept.Launcher, name, value)
