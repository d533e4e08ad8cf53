"""The hot path of a replay, in Python and, where it was built, in C (`_launch.c`).

A replay has to find out that nothing speaks against it (closed, captured, listened to) and make
one call of the driver.  Who says that something speaks against it *cools* the launcher; so a
launch has one comparison to make.  In Python the frame, that comparison and a ctypes call cost
0.2 to 0.7 µs; the compiled one makes the same call at a fraction of that.

The extension is optional: without a compiler at installation, everything works as here.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ostinato.driver.stream import Stream

__all__ = [
    "Launcher",
    "PythonLauncher",
    "compiled",
    "description",
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

    def launch(self, stream: Stream, /) -> None:
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
