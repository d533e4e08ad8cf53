"""The end of a command in every case: a message and an exit status, decided here.

0        done
1        it failed
2        a bad option, argument or setting; nothing was done
128 + n  ended by signal n: interrupted (130), terminated (143), hung up (129); 141, without a
         message, if the reader of the output closed it (`| head`)
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, TextIO

import typer

from ostinato.cli.plain import say
from ostinato.errors import InputError, OstinatoError, SettingsError

FAILED = 1
MISUSED = 2
INTERRUPTED = 128 + signal.SIGINT

_READER_LEFT = 128 + 13  # SIGPIPE, which some systems lack
_STDOUT = "standard output"
# Signals that end a process, besides Ctrl-C: from a supervisor, or from a terminal that closes.
_FATAL = {
    number: words
    for name, words in (("SIGTERM", "terminated"), ("SIGHUP", "hung up"))
    if (number := getattr(signal, name, None)) is not None
}


_AT_ONCE_SECONDS = 2.0
_AGAIN_SECONDS = 0.01


class _Signalled(BaseException):
    """Raised in the main thread for a signal, so that everything open is closed."""

    def __init__(self, number: int) -> None:
        self.number = number


@dataclass(frozen=True, slots=True)
class _Ending:
    status: int
    words: str = ""


def ending(command: Callable[[], object]) -> int:
    """Calls `command`, prints a failure to the error stream, and returns the exit status."""
    found = _Ending(0)
    for step in (command, _flush):
        try:
            step()
        except BaseException as error:
            if found.status == 0:  # the first failure is the cause
                found = _ending_of(error)
    if found.words:
        with contextlib.suppress(OSError, ValueError):  # the error stream is closed too
            say(found.words, stream=sys.stderr)
    return found.status


def _flush() -> None:
    """Flushes the output as a part of the command.  Output that cannot be written is dropped: the
    interpreter would try again at its exit, and change the exit status."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)
        raise


def _ending_of(error: BaseException) -> _Ending:
    if isinstance(error, _UsageError):
        return _Ending(MISUSED, _usage(error))
    match error:
        case typer.Exit():
            return _Ending(error.exit_code)
        case SystemExit():
            return _Ending(error.code if isinstance(error.code, int) else FAILED)
        case KeyboardInterrupt():
            return _Ending(INTERRUPTED, _on_a_line("interrupted"))
        case _Signalled():
            return _Ending(128 + error.number, _on_a_line(_FATAL[error.number]))
        case BrokenPipeError() if error.filename == _STDOUT:
            return _Ending(_READER_LEFT)
        case InputError() | SettingsError():
            return _Ending(MISUSED, _words(error))
        case OstinatoError():
            return _Ending(FAILED, _words(error))
        case OSError():
            return _Ending(FAILED, f"error: {_os_words(error)}")
        case MemoryError():
            return _Ending(FAILED, f"error: there is not enough memory: {error or 'no details'}")
    text = "".join(traceback.format_exception(error))
    return _Ending(FAILED, f"{text}error: this is a defect of ostinato; please report these lines")


# Taken from a base class: some versions of typer include their own copy of click.
_UsageError: type[Any] = typer.BadParameter.__mro__[1]


def _usage(error: Any) -> str:
    text = io.StringIO()
    error.show(text)
    return text.getvalue().rstrip("\n")


def _on_a_line(words: str) -> str:
    """Returns the words; on a terminal, on a line of their own below the ^C or partial output."""
    return f"\n{words}" if sys.stderr.isatty() else words


def _words(error: OstinatoError) -> str:
    return "\n  ".join([f"error: {error}", *getattr(error, "__notes__", ())])


def _os_words(error: OSError) -> str:
    if error.filename is None or error.filename2 is not None:
        return str(error) or type(error).__name__
    return f"{error.filename}: {error.strerror}"


# ---------------------------------------------------------------------- the process as a whole


@contextlib.contextmanager
def own_process() -> Iterator[None]:
    """Controls signals and standard streams for the block, which is the whole process.

    SIGTERM and SIGHUP raise in the main thread like Ctrl-C, so that they end the command in the
    same way; where Python drops what a finaliser or a callback raises, it is raised again.
    Characters that a stream's encoding lacks are written as escapes.  A closed standard
    stream is replaced: writing to the output raises an error with its name; the error stream drops
    what it cannot write.
    """
    sys.stdin = sys.stdin or open(_nowhere(os.O_RDONLY), closefd=False)  # noqa: SIM115
    # Opened for reading, so that writing raises an error.
    sys.stdout = _stream(sys.stdout, _Output, os.O_RDONLY)
    sys.stderr = _stream(sys.stderr, _Errors, os.O_WRONLY)
    handlers = {**dict.fromkeys(_FATAL, _raiser()), signal.SIGINT: signal.default_int_handler}
    # A signal that was ignored before, as under `nohup`, stays ignored.
    taken = [number for number in handlers if signal.getsignal(number) is not signal.SIG_IGN]
    for number in taken:
        signal.signal(number, handlers[number])
    try:
        with _raised_again():
            yield
    finally:
        # From here on nothing is open: another signal just ends the process.
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def _raised_again() -> Iterator[None]:
    """Raises a signal's exception again, shortly after, if it came where Python prints exceptions
    and goes on: in a finaliser, a callback of a weak reference or a callback from C."""
    dropped: list[BaseException] = []
    hook, before = sys.unraisablehook, signal.getsignal(signal.SIGALRM)

    def take(unraisable: sys.UnraisableHookArgs) -> None:
        error = unraisable.exc_value
        if not isinstance(error, _Signalled | KeyboardInterrupt):
            hook(unraisable)
            return
        dropped.append(error)
        # A timer, since this is still inside the finaliser, which may run at any line and hold
        # any lock: so no thread is started here.
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECONDS)

    def again(number: int, frame: FrameType | None) -> None:
        raise dropped.pop()

    sys.unraisablehook = take
    signal.signal(signal.SIGALRM, again)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        sys.unraisablehook = hook


def _raiser() -> Callable[[int, FrameType | None], None]:
    """Returns the handler of these signals.  A signal shortly after another is a repetition
    (`timeout` sends two) and is ignored, since it would interrupt the closing; a later one raises
    again."""
    last = -math.inf

    def handler(number: int, frame: FrameType | None) -> None:
        nonlocal last
        before, last = last, time.monotonic()
        if last - before > _AT_ONCE_SECONDS:
            raise _Signalled(number)

    return handler


def _nowhere(flags: int) -> int:
    """Opens the null device at the lowest free descriptor: that of a closed standard stream, which
    the next opened file would get otherwise."""
    descriptor = os.open(os.devnull, flags)
    os.set_inheritable(descriptor, True)
    return descriptor


class _Output(io.FileIO):
    """Standard output; its write errors have its name."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            raise OSError(error.errno, error.strerror, _STDOUT) from None


class _Errors(io.FileIO):
    """The error stream; its write errors are dropped, since messages must not end the work."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def _stream(given: TextIO | None, kind: type[io.FileIO], flags: int) -> TextIO:
    """Returns the same stream (or a new one for None), with errors handled by `kind`."""
    descriptor = _nowhere(flags) if given is None else given.fileno()
    raw = kind(descriptor, "wb", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding="utf-8" if given is None else given.encoding,
        errors="backslashreplace",
        line_buffering=kind is _Errors or raw.isatty(),
        write_through=os.environ.get("PYTHONUNBUFFERED", "") != "",
    )
