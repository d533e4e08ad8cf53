"""A capture on a stream of this library, for libraries that can do without their own."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ostinato import Capture, Graph, Stream
from ostinato.errors import CaptureError, ContextPoisonedError
from ostinato.interop.graphing.errors import disturbed
from ostinato.interop.graphing.library import CaptureDisturbed, NotGraphable


@contextmanager
def no_collection() -> Iterator[None]:
    """No garbage collection in the block: it may destroy graphs, which breaks a capture."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def captured(
    stream: Stream, work: Callable[[Stream], Any], explained: Callable[[Exception], str]
) -> tuple[Graph, Any]:
    """Captures work on a stream that it is given; the graph, and what the work returned.

    Raises ContextPoisonedError, CaptureDisturbed if another thread broke the capture, and
    NotGraphable for everything else that breaks it; its cause is what the work raised, which
    `explained` puts into words.
    """
    capture = Capture(stream)
    capture.begin()
    try:
        result = work(stream)
        return capture.end(), result
    except ContextPoisonedError:
        raise
    except Exception as raised:
        kind = CaptureDisturbed if disturbed(raised) else NotGraphable
        if isinstance(raised, CaptureError):
            raise kind(f"the capture failed: {raised}") from raised
        raise kind(explained(raised)) from raised
    finally:
        capture.abort()  # nothing to do if it has ended
