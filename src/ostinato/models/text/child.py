"""A child process for untrusted programs: chat templates and tokenizers.

Such a program may run for ever, take all memory or abort its process.  The child has hard limits,
and its parent kills it at a deadline.  It is a new process (no fork of the parent's threads or GPU
context), has one socket to its parent, and can open no file and no other socket, nor start a
process unless it runs as root.  It ends when that socket is closed, so it does not outlive its
parent.

A message is its length in 8 bytes, then this many bytes.  A request is passed to `answer` of the
module that `Child` names; the reply is one byte, an index into `_KINDS`, then text.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import struct
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ostinato.errors import (
    InputError,
    ModelError,
    ModelFormatError,
    NotAvailableError,
    OstinatoError,
    UnsupportedModelError,
)
from ostinato.models.arguments import shown

if TYPE_CHECKING:  # imported where a process is started; programs without one save the import
    import socket
    import subprocess

# The outcome of a request by its byte: 0 is success, the others are the error raised.
_KINDS: tuple[type[OstinatoError], ...] = (
    OstinatoError,
    InputError,
    ModelError,
    ModelFormatError,
    UnsupportedModelError,
)
_LENGTH = struct.Struct("<Q")
_START_SECONDS = 60.0
_NO_MEMORY = 97  # an exit status
_CODE = (
    "import json, sys; path, *rest = json.loads(sys.argv[1]); sys.path[:] = path; "
    f"from {__name__} import serve; serve(*rest)"
)
# Variables that Python may need to find its libraries, and the time zone.
_ENVIRONMENT = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TZ")


class Child:
    """A process with limits that runs `answer` of a module.  Thread-safe: one request at a time.

    `seconds`: time limit of one request.  `memory`: bytes of address space, where the platform has
    this limit (Linux).  `opening`: the first request of every new process.  The process starts with
    the first request and is kept; if it was ended, the next request starts another.
    """

    def __init__(
        self, module: str, *, seconds: float, memory: int, opening: bytes | None = None
    ) -> None:
        self._module, self._opening = module, opening
        self._seconds, self._memory = seconds, memory
        self._pid, self._lock = os.getpid(), threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._opened: str | None = None

    def start(self) -> None:
        """Starts the process unless it runs, without waiting until it is ready.  If it cannot be
        started, the first request raises the error."""
        with self._turn(), contextlib.suppress(NotAvailableError):
            self._start()

    def ask(self, request: bytes | None, what: str, *, longest: int = 1 << 28) -> str:
        """Returns the answer to a request, or the answer to `opening` if None.

        Raises the error that `answer` raised; ModelError if it took too much time or memory, if the
        answer has more than `longest` bytes, or if the process ended; NotAvailableError if the
        process cannot be started.  These messages begin with `what`.  An interruption ends the
        process.
        """
        with self._turn():
            try:
                self._start()
                if self._opened is None:
                    self._opened = self._open(what)
                if request is None:
                    return self._opened
                kind, text = self._exchange(request, longest)
            except OstinatoError:
                self._end()
                raise
            except TimeoutError:
                self._end()
                reason = f"it takes longer than {self._seconds:g} s"
                raise ModelError(f"{what} was stopped: {reason}") from None
            except (OSError, EOFError, ValueError) as error:
                reason = self._last_words(error)
                self._end()
                raise ModelError(f"{what} was stopped: {reason}") from None
            except BaseException:
                self._end()
                raise
        if kind:
            raise _KINDS[kind](f"{what} {shown(text)}")
        return text

    def close(self) -> None:
        """Ends the process, if there is one."""
        with self._turn():
            self._end()

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        if self._pid != os.getpid():  # a fork: process and lock are those of its parent
            self._pid, self._lock = os.getpid(), threading.Lock()
            self._end()
        with self._lock:
            yield

    # --- the process; the caller must hold the lock
    def _start(self) -> None:
        if self._process is not None and self._process.poll() is not None:
            self._end()  # another thread ended it
        if self._process is not None:
            return
        if importlib.util.find_spec("resource") is None:
            raise NotAvailableError(f"{sys.platform} has no limits for processes")
        if getattr(sys, "frozen", False) or not sys.executable:
            raise NotAvailableError("this program has no Python that could be started beside it")
        import socket
        import subprocess

        package = Path(__file__).parents[__name__.count(".")]
        path = [*(one for one in sys.path if isinstance(one, str) and one), str(package)]
        argument = json.dumps([path, self._module, self._memory, self._seconds])
        ours = None
        try:
            ours, theirs = socket.socketpair()
            with theirs:
                process = subprocess.Popen(
                    # -I -S: no code from the environment, the current folder or site-packages runs
                    # before the limits are set.
                    [sys.executable, "-I", "-S", "-X", "utf8", "-c", _CODE, argument],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
                    start_new_session=True,  # Ctrl-C is for the parent
                )
        except OSError as error:
            if ours is not None:
                ours.close()
            raise NotAvailableError(f"{sys.executable} cannot be started: {error}") from None
        self._socket, self._opened = ours, None
        self._finish = weakref.finalize(self, _finish, process, ours, self._pid)
        self._process = process

    def _open(self, what: str) -> str:
        """Waits until the process is ready; returns the answer to `opening`, or ""."""
        try:
            _receive(self._socket, 1, time.monotonic() + _START_SECONDS)
        except (OSError, EOFError) as error:
            raise NotAvailableError(
                f"{what} needs a process of its own, which does not start: "
                f"{self._last_words(error)}"
            ) from None
        if self._opening is None:
            return ""
        kind, text = self._exchange(self._opening, 1 << 28)
        if kind:
            raise _KINDS[kind](f"{what} {shown(text)}")
        return text

    def _exchange(self, request: bytes, longest: int) -> tuple[int, str]:
        deadline = time.monotonic() + self._seconds
        _send(self._socket, request, deadline)
        answer = _receive(self._socket, longest, deadline)
        if not answer or answer[0] >= len(_KINDS):
            raise ValueError("its answer has no known kind")
        return answer[0], str(memoryview(answer)[1:], "utf-8", "replace")

    def _last_words(self, error: Exception) -> str:
        """Returns the reason why there is no answer: the process's exit status and last output."""
        import signal
        import subprocess

        assert self._process is not None
        try:
            # The socket closes before the process ends.
            status = self._process.wait(0.0 if isinstance(error, ValueError) else 1.0)
        except subprocess.TimeoutExpired:
            return str(error)
        if status == _NO_MEMORY:
            return f"it needs more than {self._memory >> 20} MiB of memory"
        assert self._process.stderr is not None
        said = self._process.stderr.read().decode("utf-8", "replace").split()
        cause = signal.Signals(-status).name if status < 0 else f"status {status}"
        words = shown(" ".join(said)[-300:])
        return f"its process ended with {cause}: {words or '(no message)'}"

    def _end(self) -> None:
        if self._process is not None:
            self._process = self._opened = None
            self._finish()


def _finish(process: subprocess.Popen[bytes], sock: socket.socket, pid: int) -> None:
    sock.close()
    if os.getpid() == pid:
        process.kill()
        process.wait()
    else:  # after a fork of the parent: the process is not a child of this one
        process.returncode = 0
    assert process.stderr is not None
    process.stderr.close()


# --- the child's side
def serve(module: str, memory: int, seconds: float) -> None:
    """Runs the child: sets limits, then answers requests until the parent closes the socket."""
    import resource
    import socket

    def limit(name: str, soft: int, hard: int | None = None) -> None:
        """Sets a limit if the platform has it and allows it."""
        number = getattr(resource, name, None)
        with contextlib.suppress(OSError, ValueError):
            if number is not None:
                resource.setrlimit(number, (soft, soft if hard is None else hard))

    parent = socket.socket(fileno=0)
    answer = importlib.import_module(module).answer
    os.set_blocking(2, False)  # the parent reads it only at the end
    for name in ("RLIMIT_NOFILE", "RLIMIT_NPROC", "RLIMIT_FSIZE", "RLIMIT_CORE"):
        limit(name, 0)
    limit("RLIMIT_AS", memory)
    _send(parent, b"+")
    try:
        while True:
            request = bytes(_receive(parent, 1 << 40))
            # Ends a request after the parent's death; otherwise the parent's deadline is earlier.
            limit("RLIMIT_CPU", int(time.process_time() + seconds) + 2, resource.RLIM_INFINITY)
            try:
                kind, text = 0, answer(request)
            except OstinatoError as error:
                kind, text = _KINDS.index(type(error)), shown(str(error))
            _send(parent, bytes([kind]) + text.encode("utf-8", "replace"))
    except MemoryError:
        os._exit(_NO_MEMORY)
    except (EOFError, ConnectionError):
        return  # the parent has ended


def _send(to: socket.socket, content: bytes, deadline: float | None = None) -> None:
    import socket

    quietly = getattr(socket, "MSG_NOSIGNAL", 0)  # a program may have switched SIGPIPE on
    to.settimeout(_left(deadline))
    to.sendall(_LENGTH.pack(len(content)) + content, quietly)


def _receive(source: socket.socket, longest: int, deadline: float | None = None) -> bytearray:
    (length,) = _LENGTH.unpack(_take(source, _LENGTH.size, deadline))
    if length > longest:
        raise ValueError(f"its answer has {length} bytes, more than {longest}")
    return _take(source, length, deadline)


def _take(source: socket.socket, size: int, deadline: float | None) -> bytearray:
    data = bytearray(size)
    rest = memoryview(data)
    while rest:
        source.settimeout(_left(deadline))
        if not (count := source.recv_into(rest)):
            raise EOFError("it ended")
        rest = rest[count:]
    return data


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(deadline - time.monotonic(), 1e-3)
