"""Observes the graphs that any code of the process captures with `torch.cuda.CUDAGraph`.

The methods of the class are exchanged, and not the class, so that code which imported it earlier
makes graphs that are known, too.  torch destroys the definition of a graph when the capture ends,
unless it was made with `keep_graph=True`; so all are made with it.  Such graphs are instantiated
with their first replay; those of code that did not ask for it are instantiated here when their
capture ends, as without an observer.
"""

from __future__ import annotations

import itertools
import logging
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from ostinato import Device, Graph, GraphExec, Stream
from ostinato.errors import ContextPoisonedError, InputError, NotAvailableError, OstinatoError
from ostinato.interop.torch.adopting import adopt_graph, definition_of
from ostinato.interop.torch.capturing import line_outside_torch
from ostinato.interop.torch.graphing import devices
from ostinato.lowlevel import Closeable, armed, new_lock

_log = logging.getLogger(__name__)
_NOTE = "_ostinato_note"
"""The attribute with the note of a graph that was made under observation."""


@dataclass(slots=True, eq=False)
class _Note:
    """A CUDAGraph, as far as it is known."""

    number: int
    kept: bool
    """Its maker asked for `keep_graph`."""
    generators: list[Any] = field(default_factory=list)
    index: int = 0
    where: str = ""
    replays: int = 0
    run: GraphExec | None = None
    """Replayed in its place while a black box is armed."""
    unwatched: bool = False
    """There can be no such executable."""


@dataclass(frozen=True, slots=True)
class ObservedGraph:
    """A graph of torch, as it is when `observed` is called.

    `graph`: torch's object.  `device`: it makes the streams for what is adopted.  `where`: the line
    of Python at which the capture began, outside of torch.  `pool_bytes`: the device memory of the
    pool of the capture, which several graphs may share; None with another allocator than torch's
    own.  `replays`: since the capture, by torch's `replay`.
    """

    graph: torch.cuda.CUDAGraph
    number: int
    device: Device
    where: str
    nodes: int
    pool_bytes: int | None
    replays: int

    def adopt(self) -> Graph:
        """Adopts the graph (`adopt_graph`, with the generators that are registered with it)."""
        return _adopt(self.graph, vars(self.graph)[_NOTE])

    def __str__(self) -> str:
        memory = "" if self.pool_bytes is None else f"a pool of {self.pool_bytes} bytes, "
        return (
            f"graph {self.number} on {self.device.name}: {self.nodes} nodes, {memory}"
            f"{self.replays} replays, captured at {self.where}"
        )


# --- the methods of torch.cuda.CUDAGraph, each made of the one that it stands for
def _init(init: Callable[..., None]) -> Callable[..., None]:
    def noted(graph: Any, keep_graph: bool = False) -> None:
        init(graph, True)
        note = vars(graph)[_NOTE] = _Note(next(_numbers), keep_graph)
        _graphs[note.number] = graph

    return noted


def _capture_begin(begin: Callable[..., None]) -> Callable[..., None]:
    def noted(graph: Any, *args: Any, **kwargs: Any) -> None:
        note = getattr(graph, _NOTE, None)
        if note is not None:
            note.index, note.where = torch.cuda.current_device(), line_outside_torch()
            note.replays, note.unwatched = 0, False
        begin(graph, *args, **kwargs)

    return noted


def _capture_end(end: Callable[..., None]) -> Callable[..., None]:
    def ready(graph: Any) -> None:
        end(graph)
        note = getattr(graph, _NOTE, None)
        if note is not None and not note.kept:
            graph.instantiate()

    return ready


def _register(register: Callable[..., None]) -> Callable[..., None]:
    def noted(graph: Any, generator: Any) -> None:
        register(graph, generator)
        note = getattr(graph, _NOTE, None)
        if note is not None:
            note.generators.append(generator)

    return noted


def _renew(method: Callable[..., None]) -> Callable[..., None]:
    """For `instantiate` and `reset`, after which the executable of `_Note.run` is out of date."""

    def noted(graph: Any) -> None:
        note = getattr(graph, _NOTE, None)
        if note is not None:
            note.run = None
        method(graph)

    return noted


def _replay(replay: Callable[..., None]) -> Callable[..., None]:
    def counted(graph: Any) -> None:  # an engine's hot path: no call that is not needed
        try:
            note = graph._ostinato_note
        except AttributeError:  # a bound method that is called after the end of the observation
            note = None
        if note is not None:
            note.replays += 1
            if armed and _watched(graph, note):
                return
        replay(graph)

    return counted


_METHODS: dict[str, Callable[[Callable[..., None]], Callable[..., None]]] = {
    "__init__": _init,
    "capture_begin": _capture_begin,
    "capture_end": _capture_end,
    "instantiate": _renew,
    "register_generator_state": _register,
    "replay": _replay,
    "reset": _renew,
}


def _adopt(graph: Any, note: _Note) -> Graph:
    before = note.replays, note.unwatched
    note.unwatched = True  # a graph that draws random numbers is replayed
    try:
        adopted = adopt_graph(devices.of(note.index), graph, generators=note.generators)
    finally:
        note.replays, note.unwatched = before
    adopted.origin = f"captured at {note.where}"
    return adopted


@lru_cache(maxsize=256)
def _stream(device: Device, index: int, handle: int) -> Stream:
    """Returns torch's current stream; always the same object, for which launches are prepared."""
    return device.adopt_stream(torch.cuda.current_stream(index))


def _watched(graph: Any, note: _Note) -> bool:
    """Launches a graph so that an armed black box sees it; False if torch must replay it."""
    if note.unwatched or torch.cuda.is_current_stream_capturing():
        return False
    try:
        if note.run is None:
            note.run = _adopt(graph, note).instantiate()
    except ContextPoisonedError:
        raise
    except OstinatoError as error:
        note.unwatched = True
        _log.warning("a replay is not watched: the graph captured at %s: %s", note.where, error)
        return False
    handle = torch.cuda.current_stream(note.index).cuda_stream
    note.run.launch(_stream(devices.of(note.index), note.index, handle))
    return True


class GraphObservation(Closeable):
    """An observation that is under way, made by `observe`; `close()` or the end of `with` ends
    it."""

    def __init__(self) -> None:
        kind = torch.cuda.CUDAGraph
        if not hasattr(kind, "register_generator_state"):  # a method in C++
            raise NotAvailableError("torch is built without CUDA here, so there are no graphs")
        self._before = {name: vars(kind).get(name) for name in (_NOTE, *_METHODS)}
        setattr(kind, _NOTE, None)  # of graphs that were made before
        for name, exchange in _METHODS.items():
            setattr(kind, name, exchange(getattr(kind, name)))

    def close(self) -> None:
        """Gives the class its own methods again.  Graphs stay known; replays are not counted."""
        before, self._before = self._before, {}
        for name, method in before.items():
            if method is None:  # of its base class
                delattr(torch.cuda.CUDAGraph, name)
            else:
                setattr(torch.cuda.CUDAGraph, name, method)
        for graph in _living():
            vars(graph)[_NOTE].run = None
        _current[:] = [one for one in _current if one is not self]

    def export(self, path: str | os.PathLike[str]) -> None:
        """Writes a text for a bug report: versions, and of each graph a line, its nodes as `print`
        shows them, and the pointers that an audit suspects.  Nothing is launched.  Raises
        OSError."""
        parts = [f"torch {torch.__version__}, CUDA {torch.version.cuda}"]
        known = observed()
        parts += [f"{one.name}: {one.properties}" for one in {one.device: 0 for one in known}]
        for one in known:
            try:
                graph = definition_of(one.device, one.graph)
                parts.append(f"{one}\n{graph}\n{graph.audit()}")
            except OstinatoError as error:
                parts.append(f"{one}\nnot read: {error}")
        Path(path).write_text("\n\n".join(parts) + "\n", encoding="utf-8")


_current: list[GraphObservation] = []
_lock = new_lock()
_graphs: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""By number, all that were made under observation."""
_numbers = itertools.count()


def _living() -> list[Any]:
    return [graph for one in _graphs.valuerefs() if (graph := one()) is not None]


def observe() -> GraphObservation:
    """Observes each `torch.cuda.CUDAGraph` that any code of the process makes from now on.

        watch = observe()
        ...                                  # an engine that knows nothing of this library
        print(*observed(), sep="\\n")
        watch.export("graphs.txt")
        watch.close()

    `observed()` lists the graphs; what it returns is adopted for `first_difference`, `audit`,
    `profile` and the rest.  While `ost.black_box()` is armed, torch's `replay()` of these graphs is
    watched, too: the graph is adopted and launched on torch's current stream in place of torch's
    own executable, random numbers included.

    A second call returns the observation that is under way; closing it ends it for all.

    What it changes: a definition lives as long as its CUDAGraph, in host memory; `keep_graph=False`
    has no effect, so that `raw_cuda_graph()` and a second `instantiate()` work where torch raises;
    and `replay()` takes a call of Python more.  A graph is instantiated when torch would do it.
    Unknown are graphs made before, and those that C++ code makes.  Raises NotAvailableError if
    torch is built without CUDA.
    """
    with _lock:
        if not _current:
            _current.append(GraphObservation())
        return _current[0]


def observed() -> tuple[ObservedGraph, ...]:
    """Returns the graphs that were captured under observation and are still there, in the order in
    which they were made.  Raises the driver's errors."""
    found: list[ObservedGraph] = []
    try:
        segments = torch.cuda.memory_snapshot() if _graphs else []
    except RuntimeError:  # another allocator than torch's own
        segments = None
    for graph in _living():
        note: _Note = vars(graph)[_NOTE]
        device = devices.of(note.index)
        try:
            nodes = len(definition_of(device, graph))
        except InputError:  # not captured yet, or reset
            continue
        pool = tuple(graph.pool())
        nbytes = None
        if segments is not None:
            own = (s for s in segments if tuple(s.get("segment_pool_id", ())) == pool)
            nbytes = sum(s["total_size"] for s in own if s.get("device") == note.index)
        found.append(
            ObservedGraph(graph, note.number, device, note.where, nodes, nbytes, note.replays)
        )
    return tuple(found)
