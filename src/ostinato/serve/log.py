"""A log handler that never blocks the server and limits the number of its lines."""

from __future__ import annotations

import logging
import os
import select
import time

_PERIOD_SECONDS = 10.0
_MOST_BYTES = 4096
"""Bytes that a writable pipe always takes without blocking (POSIX's PIPE_BUF on Linux)."""


class Log(logging.Handler):
    """A handler that writes to a file descriptor.  It drops a line if writing would block, or after
    `most` lines in ten seconds; the next line written is preceded by the number dropped."""

    def __init__(self, descriptor: int, most: int = 30) -> None:
        super().__init__(logging.WARNING)
        self._descriptor, self._most = descriptor, most
        self._lost = 0
        self._began, self._count = 0.0, 0

    def emit(self, record: logging.LogRecord) -> None:
        """Writes or drops a record.  Called with the handler's lock held."""
        now = time.monotonic()
        if now - self._began >= _PERIOD_SECONDS:
            self._began, self._count = now, 0
        self._count += 1
        if self._count > self._most or not self.say(self.format(record)):
            self._lost += 1

    def note(self, line: str) -> None:
        """Writes or drops a line that is no record, however many there are."""
        self.acquire()
        try:
            self._lost += not self.say(line)
        finally:
            self.release()

    def say(self, line: str) -> bool:
        """Writes a line, after the number of lines dropped before it.  Returns False if writing
        would block, possibly after a part of the line was written."""
        before = f"{self._lost} log lines were lost\n" if self._lost else ""
        text = f"{before}{line}\n".encode(errors="replace")
        for at in range(0, len(text), _MOST_BYTES):
            try:
                if not select.select([], [self._descriptor], [], 0)[1]:
                    return False
                os.write(self._descriptor, text[at : at + _MOST_BYTES])
            except OSError:  # the reader has closed its end
                return False
        self._lost = 0
        return True
