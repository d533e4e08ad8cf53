"""The black box: which node a replay was in when the context was lost, or when a wait took long.

    with ost.black_box():
        run.launch(stream)
        stream.synchronize()    # the error names node, kernel, line and pointers

While a box is armed, replays run through twins (`crumbs`).  All that a report needs is noted before
or can be read without the driver: after a fault every call of the driver fails.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from ostinato import settings
from ostinato.driver.api import KernelNodeParams, MemoryRange, parse_bytes
from ostinato.driver.context import Context, contexts, members
from ostinato.driver.forking import new_lock
from ostinato.driver.location import describe_line
from ostinato.driver.stream import Stream
from ostinato.errors import (
    CaptureError,
    ContextPoisonedError,
    InputError,
    OstinatoError,
    StreamCaptureError,
    set_replay_watch,
)
from ostinato.explain.crumbs import Area, CrumbTwin
from ostinato.explain.inputs import NotedInputs
from ostinato.explain.report import BlackBoxReport, NodeReport, ReplayReport
from ostinato.files import replace_file
from ostinato.graph import GraphExec, Node, every_node, executable
from ostinato.graph.audit import (
    KnownMemory,
    MemoryMap,
    describe,
    node_pointers,
    of_driver,
    possible_pointers,
)
from ostinato.graph.show.outline import count_text, launch_text
from ostinato.memory import Buffer

_log = logging.getLogger(__name__)
_INPUTS = "1 MiB"
_FREED = 4096
"""The number of freed allocations that a box remembers."""


# --- watching
class _Freed:
    """Remembers the memory that is closed on one context."""

    def __init__(self) -> None:
        self.ranges: deque[MemoryRange] = deque(maxlen=_FREED)

    def memory_closed(self, memory: MemoryRange) -> None:
        self.ranges.append(memory)


@dataclass(slots=True, eq=False)
class _Watched:
    """An executable's twin, or the reason why there is none; and the memory at which its nodes
    point, which the driver does not tell any more after a fault."""

    context: Context
    twin: CrumbTwin | None = None
    graph: str = ""
    """A text by which a person knows the graph again."""
    why_not: str = ""
    noted: dict[MemoryRange, KnownMemory] = field(default_factory=dict)
    inputs: NotedInputs | None = None
    let_go: weakref.finalize[..., GraphExec] | None = None
    """Called when the executable is gone, or needs another twin."""

    @property
    def streams(self) -> tuple[Stream, ...]:
        """The streams on which the twin was launched."""
        return () if self.twin is None else self.twin.executable.streams

    def note(self, nodes: Iterable[Node]) -> None:
        """Notes the memory of these nodes, and what was freed of that noted before."""
        find, owners = self.context.driver.memory_range, self.context.owners
        for at, memory in self.noted.items():
            if memory.of == "driver":
                self.noted[at] = replace(memory, live=find(at.address) == at)
        for node in nodes:
            for _, address, _ in possible_pointers(node):
                found = find(address) if address else None
                if found is not None and found not in self.noted:
                    owner = owners.get(found.address)
                    ours = isinstance(owner, Buffer)
                    self.noted[found] = (
                        KnownMemory(found, describe(owner), of="ours") if ours else of_driver(found)
                    )


class BlackBox:
    """A box that is armed in a `with` block; see `black_box`."""

    def __init__(
        self,
        *runs: GraphExec,
        every: int = 1,
        folder: str | os.PathLike[str] | None = None,
        inputs: int | str = _INPUTS,
    ) -> None:
        if any(not isinstance(run, GraphExec) for run in runs):
            raise InputError("black_box: executables are needed (graph.instantiate()), or nothing")
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise InputError(f"every={every!r}: a mark after every so many nodes, 1 or more")
        self.report: BlackBoxReport | None = None
        """The report on a fault, once there was one."""
        self._runs: weakref.WeakSet[GraphExec] | None = weakref.WeakSet(runs) if runs else None
        self._every = every
        self._folder = folder
        self._inputs = parse_bytes(inputs, "inputs")
        self._lock = new_lock()
        self._watched: weakref.WeakKeyDictionary[GraphExec, _Watched] = weakref.WeakKeyDictionary()
        self._kept: set[_Watched] = set()
        """The same, and those of executables that are gone, until their launches are done."""
        self._freed: weakref.WeakKeyDictionary[Context, _Freed] = weakref.WeakKeyDictionary()
        self._lost: weakref.WeakKeyDictionary[Context, BlackBoxReport] = weakref.WeakKeyDictionary()

    def __repr__(self) -> str:
        state = "armed" if self in _boxes else "not armed"
        return f"<BlackBox of {len(self._watched)} executables, {state}>"

    def __enter__(self) -> Self:
        _boxes.append(self)
        if self._runs is None:
            armed.append(self)
        _switch()
        return self

    def __exit__(self, kind: object, error: BaseException | None, tb: object) -> None:
        try:
            self._look(error)
        finally:
            _boxes.remove(self)
            if self._runs is None:
                armed.remove(self)
            _switch()
            with self._lock:
                for watched in tuple(self._kept):
                    if watched.let_go is not None:
                        watched.let_go.detach()
                    if watched.twin is not None:
                        watched.twin.close()
                self._watched.clear()
                self._kept.clear()

    def _look(self, error: BaseException | None) -> None:
        """Waits for the watched replays, unless an error ends the block, and raises the error of a
        lost context, unless it is the one that ends the block."""
        for context in self.contexts():
            try:
                if error is None:
                    with suppress(CaptureError, StreamCaptureError):
                        context.synchronize()
                elif not isinstance(error, ContextPoisonedError) and _lost(context):
                    context.driver.memory_info()
            except ContextPoisonedError as found:
                raise found from error

    # --- launches
    def watches(self, run: GraphExec) -> bool:
        """True if the box is for this executable."""
        return self._runs is None or run in self._runs

    def in_place_of(self, run: GraphExec, stream: Stream) -> GraphExec:
        """Returns the executable to launch in the place of one: its twin, if there can be one."""
        with self._lock:
            watched = self._watched.get(run)
            if watched is not None and watched.twin is not None:
                revision = watched.twin.revision
                changed = watched.twin.follow(run)
                if changed is not None:
                    watched.note(changed)
                    if watched.twin.revision != revision and watched.inputs is not None:
                        watched.inputs.give_up("it was changed between two launches")
                else:
                    assert watched.let_go is not None
                    watched.let_go()
                    watched = None
            if watched is None:
                if run.context.captures or stream.is_capturing():
                    return run  # this time: nothing can be instantiated now
                watched = self._watched[run] = self._watch(run)
                self._kept.add(watched)
                watched.let_go = weakref.finalize(run, self._let_go, watched)
                watched.let_go.atexit = False
            if watched.twin is None:
                return run
            if watched.inputs is not None:
                watched.inputs.note(stream, watched.streams)
            return watched.twin.executable

    def _watch(self, run: GraphExec) -> _Watched:
        context = run.context
        watched = _Watched(context)
        self._kept -= {each for each in tuple(self._kept) if each.context.closed}
        if context not in self._freed:
            self._freed[context] = _Freed()
            context.watchers.add(self._freed[context])
        try:
            watched.twin = CrumbTwin(run, self._every)
            watched.graph = _named(run)
            watched.note(every_node(run.nodes()))
            if self._inputs:
                watched.inputs = NotedInputs(run, self._inputs, watched.twin.graph.keep)
        except ContextPoisonedError:
            raise
        except OstinatoError as error:
            watched.why_not = f"{run.graph!r}: {error}"
            _log.warning("a replay is not watched: %s", watched.why_not)
        return watched

    def _let_go(self, watched: _Watched) -> None:
        """Forgets a twin once its launches are done.  Safe in finalisers."""
        context = watched.context
        if context.closed:  # which calls nothing any more
            self._kept.discard(watched)
        context.retire(lambda: self._kept.discard(watched), watched.streams)

    # --- faults and hangs
    def contexts(self) -> list[Context]:
        """Returns the contexts of watched executables."""
        return [c for c in {each.context for each in tuple(self._kept)} if not c.closed]

    def fault(self) -> BlackBoxReport | None:
        """Returns the report on a watched context that is lost, or None."""
        for context in self.contexts():
            known = self._lost.get(context)
            if known is None and _lost(context):
                known = self.report = self._lost[context] = self._written(context)
            if known is not None:
                return known
        return None

    def under_way(
        self, context: Context
    ) -> tuple[list[tuple[ReplayReport, NotedInputs | None]], MemoryMap]:
        """Returns the watched replays of a context that have begun and not ended, with their
        inputs, and what is known of its memory."""
        watched = [each for each in tuple(self._kept) if each.context is context]
        noted = {at: memory for each in watched for at, memory in tuple(each.noted.items())}
        for freed in tuple(self._freed[context].ranges):
            noted.setdefault(freed, KnownMemory(freed, "a buffer", live=False, of="ours"))
        memory = MemoryMap(context, ask_driver=False, noted=noted.values())
        replays = []
        for each in watched:
            twin = each.twin
            if twin is not None and twin.area.under_way(words := twin.words()):
                nodes = tuple(_nodes(twin.area, words, memory, ""))
                replays.append((ReplayReport(each.graph, twin.every, nodes), each.inputs))
        return replays, memory

    def notes(self) -> tuple[str, ...]:
        """Returns the graphs that could not be watched, and why."""
        return tuple(each.why_not for each in tuple(self._kept) if each.why_not)

    def _written(self, context: Context) -> BlackBoxReport:
        """Returns the report on a lost context, and writes it to files."""
        found, memory = self.under_way(context)
        replays = [replay for replay, _ in found]
        notes = list(self.notes())
        try:
            folder = settings.cache_dir() / "faults" if self._folder is None else self._folder
            path = Path(folder) / f"fault-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            for number, (replay, inputs) in enumerate(found):
                if inputs is not None:
                    replays[number] = _saved(replay, inputs, path.with_suffix(f".{number}.graph"))
            report = BlackBoxReport(
                context.driver.name, tuple(replays), memory.known, tuple(notes), str(path)
            )
            replace_file(path, json.dumps(report.to_dict(), indent=1).encode(), private=True)
            return report
        except (OSError, OstinatoError) as error:
            notes.append(f"no report file: {error}")
        return BlackBoxReport(context.driver.name, tuple(replays), memory.known, tuple(notes))


def _saved(replay: ReplayReport, inputs: NotedInputs, path: Path) -> ReplayReport:
    """Writes the graph and the inputs of a replay to a file, and returns its report with that."""
    try:
        inputs.write(path)
    except (OSError, OstinatoError) as error:
        return replace(replay, not_saved=str(error))
    return replace(replay, file=str(path))


def _nodes(area: Area, words: Sequence[int], memory: MemoryMap, above: str) -> Iterator[NodeReport]:
    for node, state in zip(area.nodes, area.states(words), strict=True):
        path, params = f"{above}{node.index}", node.params
        launch = launch_text(params.config) if isinstance(params, KernelNodeParams) else ""
        line = "" if node.line is None else describe_line(*node.line)
        pointers = tuple(node_pointers(node, path, memory))
        kind = node.kind.name.lower()
        yield NodeReport(path, node.name, kind, state, launch, line, pointers)
        for number, inner in enumerate(area.inside[node.index] if state == "running" else ()):
            if inner.under_way(words):
                yield from _nodes(inner, words, memory, f"{path}/{number}/")


def _named(run: GraphExec) -> str:
    """Returns a text by which a person knows a graph again."""
    nodes, origin = run.nodes(), run.graph.origin
    lines = [node.line for node in every_node(nodes) if node.line is not None]
    words = [count_text(len(nodes), "node"), *[origin] * bool(origin)]
    words += [f"that begins at {file}:{line}" for file, line in lines[:1]]
    return f"the graph of {' '.join(words)}"


def _lost(context: Context) -> bool:
    """True if the context is lost."""
    try:
        context.driver.memory_info()
    except ContextPoisonedError:
        return True
    except OstinatoError:  # a thread that must not call the driver, say
        pass
    return False


# --- the process
_boxes: list[BlackBox] = []
"""The armed boxes; the last one that is for an executable watches it."""
armed: list[BlackBox] = []
"""The armed boxes that watch all executables; tested before each replay of another library."""


class _ReplayWatch:
    """Asks the armed boxes.  Asking makes errors of its own, for which nobody is asked."""

    def __init__(self) -> None:
        self._asking = threading.local()

    def fault(self) -> BlackBoxReport | None:
        if getattr(self._asking, "now", False):
            return None
        self._asking.now = True
        try:
            return next((r for box in reversed(_boxes) if (r := box.fault()) is not None), None)
        finally:
            self._asking.now = False

    def unfinished(self) -> str:
        lines = [
            f"black box: {replay}"
            for box in _boxes
            for context in box.contexts()
            for replay, _ in box.under_way(context)[0]
        ]
        lines = lines or ["black box: no watched replay is under way"]
        notes = [f"not watched: {note}" for box in _boxes for note in box.notes()]
        return "\n".join([*lines, *notes])


def _in_place(run: GraphExec, stream: Stream) -> GraphExec:
    for box in reversed(_boxes):
        if box.watches(run):
            return box.in_place_of(run, stream)
    return run


def _switch() -> None:
    """Makes launches look for a box if one is armed; drops the shortcuts of all launches."""
    executable.in_place = _in_place if _boxes else None
    set_replay_watch(_ReplayWatch() if _boxes else None)
    for context in members(contexts):
        context.cool()


def watch_process() -> None:
    """Arms a box for the rest of the process, as OSTINATO_BLACK_BOX asks."""
    BlackBox(every=settings.black_box_every()).__enter__()


def black_box(
    *runs: GraphExec,
    every: int = 1,
    folder: str | os.PathLike[str] | None = None,
    inputs: int | str = _INPUTS,
) -> BlackBox:
    """Watches replays in a `with` block: if one fails, the error names the node.

        with ost.black_box():
            run.launch(stream)
            stream.synchronize()

    Watched are all executables of the process that are launched in the block, whenever they were
    made, or only `runs`.  Each is launched as a twin whose nodes leave marks in host memory: after
    every node, or after every `every`-th one, which costs less and says less.  A
    ContextPoisonedError then names the node, or the few that can have run at once, its kernel, the
    line of Python that launched it, each pointer with the memory there or the nearest, and what had
    finished.  `report` of the error and of the box has the same as data (`BlackBoxReport`); a file
    in `folder` (a folder "faults" under `settings.cache_dir()`) is written for `ostinato autopsy`.
    A wait with a deadline (`Stream.synchronize`) names the nodes that have not finished.

    `inputs`: before each launch so many bytes of the memory that its nodes may read are copied to
    the host, the smallest allocations first.  After a fault they are written, with the graph, to a
    graph file beside the report, if the graph can be saved and was not changed between watched
    launches; `ostinato autopsy` replays it.  0: nothing is copied, and there is no such file.

    Leaving the block waits for the device, and raises ContextPoisonedError if the context is lost,
    also if another library's error ends the block.

    OSTINATO_BLACK_BOX=1 does the same for a whole process.

    Not watched, which a warning and the report say: graphs with alloc or free nodes, with
    conditions that another library made, with nodes that cannot be read, or whose definition was
    closed; launches during captures.  Not guaranteed: that a fault comes with the marks, which
    change the timing.  Raises InputError.
    """
    return BlackBox(*runs, every=every, folder=folder, inputs=inputs)
