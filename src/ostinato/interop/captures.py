"""Captures on a stream of ostinato, for libraries that need no capture of their own, and texts that
say what broke a capture, with the caller's line."""

from __future__ import annotations

import gc
import linecache
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import ostinato
from ostinato import Capture, Graph, Node, NodeKind, Stream
from ostinato.errors import CaptureError, ContextPoisonedError, OstinatoError, Status
from ostinato.interop.reading.library import (
    CaptureDisturbed,
    NotGraphable,
    WaitsForDevice,
    living_objects,
)
from ostinato.lowlevel import causes, every_node

_PROGRAMS = (
    ("triton.compiler.compiler", "CompiledKernel", "function"),
    ("cupy.cuda.function", "Function", "ptr"),
)
"""Modules and classes of objects whose end unloads the code of a kernel (Triton does so since 3.7),
and the attribute that is the function's handle."""


@contextmanager
def no_collection() -> Iterator[None]:
    """Switches garbage collection off in the block: it may destroy graphs, which breaks a
    capture."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@contextmanager
def replaced(functions: Mapping[tuple[Any, str], Any]) -> Iterator[None]:
    """Replaces attributes in a block, also for compiled code that calls methods."""
    before = {each: vars(each[0])[each[1]] for each in functions if each[1] in vars(each[0])}
    try:
        for (owner, name), function in functions.items():
            setattr(owner, name, function)
        yield
    finally:
        for owner, name in functions:
            if (owner, name) in before:
                setattr(owner, name, before[owner, name])
            elif name in vars(owner):  # it is inherited
                delattr(owner, name)


@contextmanager
def setting(
    read: Callable[[], Any], write: Callable[[Any], object], value: object
) -> Iterator[None]:
    """Gives a setting of the process another value in a block."""
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


def captured(
    stream: Stream, work: Callable[[Stream], Any], explained: Callable[[Exception], str]
) -> tuple[Graph, Any]:
    """Captures work on a stream that the work is given; returns the graph, and the work's result.

    Raises ContextPoisonedError, CaptureDisturbed if another thread broke the capture, and
    NotGraphable for everything else that breaks it.  The cause of these two is the error of the
    work, from which `explained` makes the text.
    """
    capture = Capture(stream)
    capture.begin()
    try:
        result = work(stream)
        return capture.end(), result
    except ContextPoisonedError:
        raise
    except Exception as raised:
        kind: type[NotGraphable] = NotGraphable
        if disturbed(raised):
            kind = CaptureDisturbed
        elif waits(raised):
            kind = WaitsForDevice
        elif not of_capture(raised) and stream.capture_info().status.name == "INVALIDATED":
            kind = WaitsForDevice  # a library's own error need not say that a capture forbids it
        failed = isinstance(raised, CaptureError)
        text = f"the capture failed: {raised}" if failed else explained(raised)
        # The capture keeps an error, and so all that the work held: an array's history remembers
        # the stream of the capture.
        traceback.clear_frames(raised.__traceback__)
        raise kind(text) from raised
    finally:
        capture.abort()  # nothing to do if it has ended


def explained(error: Exception, library: ModuleType, cannot: str) -> str:
    """Describes what broke a capture, and the line of the caller's code where it happened.

    `cannot`: calls of the library that no graph can hold.
    """
    ours = tuple(
        f"{Path(str(module.__file__)).resolve().parent}/" for module in (ostinato, library)
    )
    text = str(error).strip().partition("\n")[0]
    kind = type(error).__name__
    place = ""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        compiled = frame.filename.endswith(".pyx")  # by Cython, as a path in its sources
        if not compiled and not str(Path(frame.filename).resolve()).startswith(ours):
            source = frame.line or linecache.getline(frame.filename, frame.lineno or 0).strip()
            place = f" at {frame.filename}:{frame.lineno}: {source}"
            break
    hint = ""
    if "captur" in text.lower():
        hint = (
            ". The line waits for the GPU, or does something else that no graph can hold "
            f"({cannot})"
        )
    if _status(error) == Status.STREAM_CAPTURE_IMPLICIT:
        hint = (
            ". The line, or a library that it calls, works on the legacy default stream, which no "
            f"graph can hold: give it the stream that is current in {library.__name__}. If the "
            "line is a backward, a result of an earlier eager call is still alive, and with it "
            "autograd's nodes of the weights on that stream: detach it"
        )
    return f"it cannot be captured: {kind}: {text}{place}{hint}"


def line_outside(*libraries: str) -> str:
    """Returns the place that called these packages, or this one: "file:line: source"."""
    frame = sys._getframe(1)
    inside = "contextlib", "ostinato", *libraries
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in inside:
        frame = frame.f_back
    file, number = frame.f_code.co_filename, frame.f_lineno
    return f"{file}:{number}: {linecache.getline(file, number).strip()}"


def disturbed(error: BaseException) -> bool:
    """True if an error of a capture means that something else broke the capture before (status
    901), and none of the capture's own calls was refused."""
    statuses = {*map(_status, causes(error))}
    return statuses - {None} == {Status.STREAM_CAPTURE_INVALIDATED}


def waits(error: BaseException) -> bool:
    """True if an error of a capture means that one of its own calls waits for the device, or does
    something else that no capture takes, but draws no random numbers."""
    if _status(error) != Status.STREAM_CAPTURE_UNSUPPORTED:
        return False
    return not any(word in str(error).lower() for word in ("generator", "seed", "offset"))


def of_capture(error: BaseException) -> bool:
    """True if an error is one of the rules of captures."""
    return _status(error) is not None


def _status(error: BaseException) -> int | None:
    """Returns the status of the capture rule that an error reports, also from CUDA's text, or
    None."""
    status = getattr(error, "status", None)
    if isinstance(status, int):
        rule = Status.STREAM_CAPTURE_UNSUPPORTED <= status <= Status.STREAM_CAPTURE_WRONG_THREAD
        return int(status) if rule else None
    if isinstance(error, OstinatoError):
        return None  # its cause has the status
    text = str(error).lower()
    if "previous error during capture" in text:
        return Status.STREAM_CAPTURE_INVALIDATED
    if "legacy stream depend" in text:
        return Status.STREAM_CAPTURE_IMPLICIT
    return Status.STREAM_CAPTURE_UNSUPPORTED if "captur" in text else None


def kernels_of(nodes: Iterable[Node]) -> list[Node]:
    """Returns the nodes that launch kernels, also inside of other nodes."""
    return [node for node in every_node(nodes) if node.kind is NodeKind.KERNEL]


def clear_caches(made_in_capture: Callable[[object], bool]) -> None:
    """Clears each `functools.lru_cache` that holds a value made in a capture.

    Its memory is that of graphs, also of earlier ones, which write it in each replay; and no kernel
    has computed it yet, for ever if the capture broke."""
    for cache in [*living_objects(type(lru_cache(len)))]:
        values = gc.get_referents(cache)
        for each in [*values]:
            if type(each) is dict:  # of a cache without a limit
                values += each.values()
        if any(map(made_in_capture, values)):
            cache.cache_clear()


def keep_programs(read: Iterable[tuple[Graph, Iterable[Node]]]) -> None:
    """Lets graphs keep the objects of Triton and CuPy whose end would unload what they launch.

    `read`: graphs with their nodes."""
    kept: dict[Any, list[Any]] = {}
    for module, kind, handle in _PROGRAMS:
        if module in sys.modules:
            for each in living_objects(getattr(sys.modules[module], kind)):
                kept.setdefault(getattr(each, handle, None), []).append(each)
    if kept:
        for graph, nodes in read:
            for function in {node.kernel.function for node in kernels_of(nodes)}:
                graph.keep += kept.get(function, ())
