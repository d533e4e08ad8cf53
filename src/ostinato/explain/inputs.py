"""The inputs of a watched replay, copied to the host before it, and its graph, for a file."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import numpy as np

from ostinato.driver.api import LaunchConfig, MemoryRange, NodeKind
from ostinato.driver.stream import Stream, wait_for_streams
from ostinato.errors import ContextPoisonedError, GraphError, OstinatoError
from ostinato.graph import Graph, GraphExec, every_node
from ostinato.graph.audit import MemoryMap, possible_pointers
from ostinato.graph.probes import probe
from ostinato.graph.words import Sort
from ostinato.graphfile.saving import Draft
from ostinato.launching import launch
from ostinato.memory import Buffer
from ostinato.memory.buffer import allocate
from ostinato.memory.ranges import Target, range_of

_PIECE, _THREADS, _ALIGNED = 1 << 14, 256, 16
"""Bytes that a block copies, its threads, and the bytes that one of them copies at a time."""


class NotedInputs:
    """The memory that an executable may read, at most `limit` bytes of it, the smallest first; and
    the graph, as a draft of a file.

    The copy lies in pinned memory, which can be read after a fault.  One kernel makes it, in stream
    order before each launch, so it is of the last replay that began.  (A copy from pinned memory to
    pinned memory by the driver would wait for all work before it.)  `keep` holds that memory until
    the launches are done.  Raises ContextPoisonedError alone.
    """

    def __init__(self, run: GraphExec, limit: int, keep: list[object]) -> None:
        self.why_not = ""
        """Why there is no file of the last launch."""
        self._host: Buffer | None = None
        self._context = run.context
        self._places: dict[str, tuple[MemoryRange, int]] = {}
        self._tried(partial(self._begin, run, limit, keep))

    def note(self, stream: Stream, streams: Iterable[Stream]) -> None:
        """Copies the memory before a launch on a stream.  `streams`: those of the launches before,
        whose copy is there until they are done."""
        if self._host is not None:
            self.why_not = ""
            self._tried(partial(self._note, stream, streams))

    def give_up(self, why: str) -> None:
        """Notes nothing from here on."""
        if self._host is not None:
            self._host, self.why_not = None, why

    def write(self, path: Path) -> None:
        """Writes a graph file that begins with the copy; no driver is called.  Raises OSError,
        GraphError."""
        if self.why_not:
            raise GraphError(self.why_not)
        places = self._places.items()
        self._draft.write(path, {n: self._array[at : at + m.nbytes] for n, (m, at) in places})

    def _tried(self, step: Callable[[], None]) -> None:
        try:
            step()
        except ContextPoisonedError:
            raise
        except OstinatoError as error:
            self.why_not = str(error)

    def _begin(self, run: GraphExec, limit: int, keep: list[object]) -> None:
        graph = _as_it_is(run) if run.changed() else run.graph
        read, only_read = _memory_of(run)
        inputs: dict[str, Target] = {}
        constants: dict[str, Target] = {}
        size = 0
        for name, target in sorted(read.items(), key=lambda item: range_of(item[1]).nbytes):
            memory = range_of(target)
            if size + memory.nbytes <= limit:
                inputs[name], self._places[name] = target, (memory, size)
                size += -(-memory.nbytes // _ALIGNED) * _ALIGNED
            elif name in only_read:
                constants[name] = target
        self._draft = Draft(graph, inputs, constants)
        self._host = allocate(run.context, max(1, size), np.uint8, pinned=True)
        pieces = [
            (memory.address + at, self._host.address + to + at, min(_PIECE, memory.nbytes - at))
            for memory, to in self._places.values()
            for at in range(0, memory.nbytes, _PIECE)
        ]
        self._pieces = allocate(run.context, (max(1, len(pieces)), 3), np.uint64, pinned=True)
        self._pieces.array[: len(pieces)] = np.array(pieces, np.uint64).reshape(-1, 3)
        self._copy = probe(run.context, "ostinato_copy")
        self._config = LaunchConfig(len(pieces), _THREADS) if pieces else None
        for buffer in (self._host, self._pieces):
            run.context.owners.pop(buffer.address, None)  # not memory of the user's
            keep.append(buffer)
        self._array = self._host.array

    def _note(self, stream: Stream, streams: Iterable[Stream]) -> None:
        if not wait_for_streams(stream, streams):
            raise GraphError("its last launch was during a capture")
        for name, (memory, _) in self._places.items():
            around = self._context.driver.memory_range(memory.address)
            if around is None or around.end < memory.end:
                raise GraphError(f"{name!r} was freed before its last launch")
        if self._config is not None:
            launch(stream, self._copy, self._config, self._pieces)


def _as_it_is(run: GraphExec) -> Graph:
    """Returns a copy of the executable's graph with the changes that were made to it.  Raises
    GraphError if a file cannot hold them, and DriverError if there can be no copy."""
    driver, why = run.context.driver, "it was changed after it was made"
    copy = run.graph.clone()
    for was, now in zip(run.graph.nodes(), run.nodes(), strict=True):
        if now.kind in (NodeKind.KERNEL, NodeKind.MEMCPY) and not run.enabled(now):
            raise GraphError(f"{why}: node {now.index} ({now.name}) is switched off")
        inside = ([n.params for body in of.children for n in every_node(body)] for of in (was, now))
        if next(inside) != next(inside):
            raise GraphError(f"{why}, inside of node {now.index} ({now.name})")
        if now.params != was.params and not now.children:
            driver.node_set_params(driver.node_in_clone(was.handle, copy.handle), now.params)
    return copy


def _memory_of(run: GraphExec) -> tuple[dict[str, Target], set[str]]:
    """Returns the memory that an executable may read, by name, and the names of what it is known
    not to write.

    Memory is what a library knows as one, or an allocation of the driver.
    """
    known = MemoryMap(run.context, ask_driver=True)
    found: dict[MemoryRange, Target] = {}
    read: set[MemoryRange] = set()
    written: set[MemoryRange] = set()
    for node in every_node(run.nodes()):
        for word, address, _ in possible_pointers(node):
            memory = known.at(address) if address else None
            if memory is None or not memory.live:
                continue
            owner = run.context.owner_of(address) if memory.of == "ours" else None
            found[memory.range] = owner if isinstance(owner, Buffer) else memory.range
            field = word.label if word.sort is Sort.FIELD else ""
            if not word.only_written and field != "dst":
                read.add(memory.range)
            if word.written and field != "src":
                written.add(memory.range)
    names: dict[str, MemoryRange] = {}
    for number, (at, target) in enumerate(found.items()):
        name = getattr(target, "name", None) or f"memory.{number}"
        while name in names:
            name += f".{number}"
        names[name] = at
    named = {name: found[at] for name, at in names.items() if at in read}
    return named, {name for name, at in names.items() if at in read - written}
