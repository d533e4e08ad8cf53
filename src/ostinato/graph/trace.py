"""Finds the line of Python, also in other libraries, after which a capture is broken.

After every line that runs on the capturing thread, the stream's capture status is queried: by
`sys.monitoring` on Python 3.12 and later (PEP 669), by `sys.settrace` before.  Either way it is
slow and meant for one run that looks for a fault.
"""

from __future__ import annotations

import sys
import threading
from types import CodeType, FrameType
from typing import Any

from ostinato.driver.api import CaptureStatus
from ostinato.driver.location import describe_line, is_internal
from ostinato.driver.stream import Stream
from ostinato.errors import DriverError


class LineTrace:
    """Traces one capture from `start` to `stop`; `broken_at` is the line, once it is known.

    The line is the one that ran when the status changed: the innermost such line of any file
    outside this package.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._thread = 0
        self._last: tuple[str, int] | None = None
        self._tool: int | None = None
        self._previous: Any = None
        self._running = False
        self.broken_at: str | None = None

    def start(self) -> None:
        self._thread = threading.get_ident()
        self._running = True
        if sys.version_info >= (3, 12):
            self._start_monitoring()
        else:
            self._previous = sys.gettrace()
            sys.settrace(self._on_frame)
            frame: FrameType | None = sys._getframe(1)
            while frame is not None:  # frames that run already need a trace function of their own
                frame.f_trace = self._on_event
                frame = frame.f_back

    def stop(self) -> None:
        """Stops tracing.  The last line counts too: the status is queried once more."""
        if not self._running:
            return
        self._running = False
        if sys.version_info >= (3, 12):
            if self._tool is not None:
                sys.monitoring.set_events(self._tool, 0)
                sys.monitoring.free_tool_id(self._tool)
                self._tool = None
        else:
            sys.settrace(self._previous)
        self._check()

    def _check(self) -> None:
        if self.broken_at is not None:
            return
        try:
            status = self._stream.capture_info().status
        except DriverError:
            return
        if status is not CaptureStatus.ACTIVE and self._last is not None:
            self.broken_at = describe_line(*self._last)

    def _line(self, frame: FrameType, line: int) -> None:
        if is_internal(frame) or threading.get_ident() != self._thread:
            return
        self._check()
        self._last = (frame.f_code.co_filename, line)

    def _leave(self, frame: FrameType) -> None:
        """Handles the end of a function (of a finaliser that the garbage collector called, say),
        after which its caller's line goes on."""
        if is_internal(frame) or threading.get_ident() != self._thread:
            return
        self._check()
        caller = frame.f_back
        while caller is not None and is_internal(caller):
            caller = caller.f_back
        if caller is not None:
            self._last = (caller.f_code.co_filename, caller.f_lineno)

    # --- before 3.12
    def _on_frame(self, frame: FrameType, event: str, argument: object) -> Any:
        return None if is_internal(frame) else self._on_event

    def _on_event(self, frame: FrameType, event: str, argument: object) -> Any:
        if self._running and event == "line":
            self._line(frame, frame.f_lineno)
        if self._running and event == "return":
            self._leave(frame)
        return self._on_event

    # --- 3.12 and later
    if sys.version_info >= (3, 12):

        def _start_monitoring(self) -> None:
            monitoring = sys.monitoring
            for tool in range(5, -1, -1):
                if monitoring.get_tool(tool) is None:
                    monitoring.use_tool_id(tool, "ostinato.capture")
                    self._tool = tool
                    break
            else:
                return  # every tool id is taken: no line can be found, the capture still works
            events = monitoring.events
            monitoring.register_callback(tool, events.LINE, self._on_line)
            for ends in (events.PY_RETURN, events.PY_UNWIND):
                monitoring.register_callback(tool, ends, self._on_end)
            monitoring.set_events(tool, events.LINE | events.PY_RETURN | events.PY_UNWIND)

        def _on_line(self, code: CodeType, line: int) -> Any:
            frame = sys._getframe(1)
            if is_internal(frame):
                return sys.monitoring.DISABLE
            self._line(frame, line)
            return None

        def _on_end(self, code: CodeType, offset: int, value: object) -> None:
            self._leave(sys._getframe(1))
