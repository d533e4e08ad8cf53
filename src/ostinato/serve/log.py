"""Log lines of a server: they never wait for who reads them, and are never many."""

from __future__ import annotations

import logging
import os
import select
import time

_PERIOD_SECONDS = 10.0
_MOST_BYTES = 4096
"""A pipe that can be written to at all takes so many at once (POSIX's PIPE_BUF on Linux)."""


class Log(logging.Handler):
    """Writes to a file descriptor; a line that would have to wait, or is one of more than `most` in
    ten seconds, is lost.  The next one that is written says how many were."""

    def __init__(self, descriptor: int, most: int = 30) -> None:
        super().__init__(logging.WARNING)
        self._descriptor, self._most = descriptor, most
        self._lost = 0
        self._began, self._count = 0.0, 0

    def emit(self, record: logging.LogRecord) -> None:
        """Called with the handler's lock held."""
        now = time.monotonic()
        if now - self._began >= _PERIOD_SECONDS:
            self._began, self._count = now, 0
        self._count += 1
        if self._count > self._most or not self.say(self.format(record)):
            self._lost += 1

    def say(self, line: str) -> bool:
        """Writes a line, and how many were lost before it.  False if it would have to wait, at its
        beginning or in its middle."""
        before = f"{self._lost} log lines were lost\n" if self._lost else ""
        text = f"{before}{line}\n".encode(errors="replace")
        for at in range(0, len(text), _MOST_BYTES):
            try:
                if not select.select([], [self._descriptor], [], 0)[1]:
                    return False
                os.write(self._descriptor, text[at : at + _MOST_BYTES])
            except OSError:  # nobody has the other end any more
                return False
        self._lost = 0
        return True
