"""`Patcher`: one kernel argument of an executable, prepared to be set repeatedly.

What a patch needs (the node, its signature, the argument's offset, the conversion to bytes) is
determined once.  A call packs the value, sets it in the driver, and notes what it points at.  The
bytes are in a `KernelSetter`, which the shadow reads when it is asked (`shadow.Live`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from ostinato.driver.api import (
    Driver,
    ExecHandle,
    KernelNodeParams,
    KernelSetter,
    MemoryRange,
    NodeHandle,
    ParameterSlot,
)
from ostinato.driver.context import Context
from ostinato.driver.launcher import packer, set_nodes, set_words
from ostinato.driver.signature import PLAIN_CODES, Element, Space
from ostinato.errors import DriverError, InputError
from ostinato.graph.changes import Change, argument_bytes, argument_index, refused
from ostinato.graph.graph import Graph
from ostinato.graph.node import Node
from ostinato.graph.pointers import PlainMove
from ostinato.graph.shadow import Live, Shadow
from ostinato.memory.ranges import range_of

__all__ = ["Argument", "Patcher", "Run", "Write", "kernel_setter", "write_all", "write_words"]


class Run(Protocol):
    """What a change in place needs of its executable, whose `_lock` the caller holds."""

    graph: Graph
    context: Context
    _lock: threading.Lock
    _shadow: Shadow
    _given_back: deque[MemoryRange]

    def _live(self, node: Node) -> Live: ...
    def _watch(self, owners: Iterable[object]) -> None: ...
    def _let_go(self, old: list[object]) -> None: ...
    def _undo(self, nodes: list[Node]) -> None: ...
    def _apply(self, changes: list[Change]) -> None: ...
    def _give_up(self) -> str: ...
    def _settled(self, apart: Sequence[tuple[NodeHandle, range]]) -> list[MemoryRange]: ...


class _PlainSetter:
    """A `KernelSetter` by `exec_set_params`, which raises what the driver refuses."""

    def __init__(
        self, driver: Driver, executable: ExecHandle, node: NodeHandle, params: KernelNodeParams
    ) -> None:
        self._set = partial(driver.exec_set_params, executable, node)
        self._params = params

    @property
    def data(self) -> bytes:
        return self._params.arguments.data

    def holds(self, offset: int, raw: bytes, /) -> bool:
        return self.data[offset : offset + len(raw)] == raw

    def set(self, offset: int, raw: bytes, /) -> int:
        params = self._params.with_data(self._params.arguments.with_bytes(offset, raw).data)
        self._set(params)
        self._params = params
        return 0


def kernel_setter(
    driver: Driver, executable: ExecHandle, node: NodeHandle, params: KernelNodeParams
) -> KernelSetter:
    """The driver's own, or one that sets all of the node."""
    made = driver.exec_prepare_kernel(executable, node, params)
    return _PlainSetter(driver, executable, node, params) if made is None else made


@dataclass(slots=True)  # not frozen: that triples what it costs to make one
class Write:
    """New bytes at one place of a node's arguments.

    `owner` is what they point at, and `nbytes` how many bytes are known to be used there.
    `same_reach`: as many as before.
    """

    live: Live
    place: int
    raw: bytes
    owner: object
    nbytes: int | None = None
    same_reach: bool = False

    def note(self, run: Run) -> None:
        """Notes what the place points at.  May be repeated, after an interruption."""
        reach = _SAME if self.same_reach else self.nbytes
        _note(run, self.live, self.place, self.owner, reach)
        for place in _inner(self.place, len(self.raw)):
            _note(run, self.live, place, None, None)

    @property
    def made(self) -> bool:
        """Whether the node holds these bytes."""
        return self.live.setter.data[self.place : self.place + len(self.raw)] == self.raw


_SAME = -1
"""As many bytes as before are used of what a word points at."""


def _inner(place: int, size: int) -> range:
    """The offsets of the words behind the first in bytes of this size: a struct has several."""
    return range((place + 8) // 8 * 8, place + size, 8)


def _note(run: Run, live: Live, place: int, owner: object, nbytes: int | None) -> None:
    """Notes what a place points at, and how many bytes are known to be used there."""
    old = live.owners.get(place)
    if old is not None and old is not owner:
        run._let_go([old])
    live.owners[place] = owner
    if nbytes is None:
        live.reach.pop(place, None)
    elif nbytes != _SAME:
        live.reach[place] = nbytes


def _write_one(
    run: Run, live: Live, place: int, raw: bytes, owner: object, nbytes: int | None
) -> None:
    """Makes one write, or none.  Raises UpdateRefusedError."""
    settled: Iterable[MemoryRange] = ()
    if owner is not None:
        run._watch((owner,))
    elif run._given_back:
        settled = _settled(run, [Write(live, place, raw, owner)])
    run._shadow.touch(live)
    try:
        if live.setter.set(place, raw) == 0:
            if len(raw) > 8:
                Write(live, place, raw, owner, nbytes).note(run)
            else:
                _note(run, live, place, owner, nbytes)
            _forget(run, settled)
            return
    except DriverError as error:
        raise refused(live.node, error) from error
    except BaseException:
        _keep_made(run, [Write(live, place, raw, owner, nbytes)])
        raise
    run._apply(_changes_of([Write(live, place, raw, owner, nbytes)]))  # it raises the reason


def _settled(run: Run, writes: Iterable[Write]) -> list[MemoryRange]:
    """Memory that was closed by now and that nothing will point at once these are written.

    What is given without an owner may be an address of newer memory, where the closed one was.
    """
    apart = [
        (write.live.node.handle, range(write.place, write.place + len(write.raw)))
        for write in writes
        if write.owner is None
    ]
    return run._settled(apart) if apart else []


def _forget(run: Run, settled: Iterable[MemoryRange]) -> None:
    for memory in settled:
        with suppress(ValueError):  # another launch looked meanwhile
            run._given_back.remove(memory)


def write_all(run: Run, writes: list[Write]) -> None:
    """Makes all writes or none; those of one node must be next to each other.

    Raises UpdateRefusedError, and GraphError if the driver refused to take some of them back.
    """
    if len(writes) == 1 and not writes[0].same_reach:
        one = writes[0]
        _write_one(run, one.live, one.place, one.raw, one.owner, one.nbytes)
        return
    run._watch([write.owner for write in writes])
    settled = _settled(run, writes) if run._given_back else ()
    for write in writes:
        run._shadow.touch(write.live)
    try:
        taken = set_nodes([(w.live.setter, w.place, w.raw) for w in writes])
        if taken is not None and taken[0] == 0:
            for write in writes:
                write.note(run)
            _forget(run, settled)
            return
        if taken is not None and taken[1]:
            run._give_up()
            run._undo(_nodes_of(writes))
    except BaseException:
        _keep_made(run, writes)
        raise
    run._apply(_changes_of(writes))  # it raises the reason, or there is no shorter way
    _forget(run, settled)


def _keep_made(run: Run, writes: list[Write]) -> None:
    """After an interruption: what was written stays, in the shadow too."""
    for write in writes:
        if write.made:
            write.note(run)
    run._undo(_nodes_of(writes))


def _nodes_of(writes: list[Write]) -> list[Node]:
    """Each node once."""
    return list({w.live.node.handle: w.live.node for w in writes}.values())


def write_words(run: Run, move: PlainMove) -> bool:
    """Makes a plain rebinding in one call of C.  False if nothing was changed.

    Raises GraphError if the driver refused to take some of it back.
    """
    lives = [run._live(node) for node in move.nodes]
    counts, places = move.counts.tolist(), move.places.tolist()
    of_words = [live for live, count in zip(lives, counts, strict=True) for _ in range(count)]
    words = list(zip(of_words, places, strict=True))
    run._watch(move.targets)
    for live in lives:
        run._shadow.touch(live)
    values = move.values.tobytes()
    try:
        setters = [live.setter for live in lives]
        done = set_words(setters, move.counts.tobytes(), move.places.tobytes(), values)
        if done is None:
            return False
        if done[0]:
            if done[1]:
                run._give_up()
                run._undo([live.node for live in lives])
            return False
        # As `Write.note` does for each.  No comprehension: from CPython 3.12 on an exception before
        # its first instruction passes the handler below.
        old: list[object] = []
        for live, place in words:
            old.append(live.owners.get(place))
        run._let_go(old)
        for (live, place), target in zip(words, move.targets, strict=True):
            live.owners[place] = target
    except BaseException:
        raws = (values[at : at + 8] for at in range(0, len(values), 8))
        each = zip(words, raws, move.targets, strict=True)
        _keep_made(run, [Write(*word, raw, to, same_reach=True) for word, raw, to in each])
        raise
    return True


def _changes_of(writes: list[Write]) -> list[Change]:
    """The writes as one change for each node."""
    by_node: dict[NodeHandle, list[Write]] = {}
    for write in writes:
        by_node.setdefault(write.live.node.handle, []).append(write)
    changes = []
    for of_node in by_node.values():
        live = of_node[0].live
        data = bytearray(live.setter.data)
        for write in of_node:
            data[write.place : write.place + len(write.raw)] = write.raw
        inner = [place for w in of_node for place in _inner(w.place, len(w.raw))]
        owners = [*((w.place, w.owner) for w in of_node), *((place, None) for place in inner)]
        reach = [(w.place, w.nbytes) for w in of_node if not w.same_reach]
        reach += [(place, None) for place in inner]
        params = live.params.with_data(bytes(data))
        changes.append(Change(live.node, params, tuple(owners), tuple(reach)))
    return changes


class Argument:
    """One kernel argument of one node of an executable, as far as setting it needs to know.

    It does not hold the executable, which keeps it.  The caller of a method holds its lock.
    """

    __slots__ = ("_argument", "_inner", "_live", "_node", "_pack", "_place", "_pointer", "_size")

    def __init__(self, run: Run, node: Node, argument: int | str) -> None:
        self._node, self._argument = node, argument
        self._renew(run)

    def __repr__(self) -> str:
        return f"argument {self._argument!r} of node {self._node.index} ({self._node.name})"

    def _renew(self, run: Run) -> Live:
        """Looks the argument up in what the node holds now.  Raises InputError."""
        live = run._live(self._node)
        slot, code, pointer, element = _found(live, self._argument, run.context.space)
        # Exact types only; whatever is unusual takes the careful way, which also words the errors.
        self._pack: Callable[[tuple[object, ...]], bytes | None] | None = None
        self._size = slot.size
        if code in PLAIN_CODES:  # then even bytes are packed, and not taken as they are
            self._pack, self._size = packer(code, (ParameterSlot(0, slot.size),), (element,)), -1
        self._place, self._pointer, self._live = slot.offset, pointer, live
        self._inner = _inner(slot.offset, slot.size)
        return live

    def _current(self, run: Run) -> Live:
        if run.context.closed or run.graph.closed:
            run.context.require_open()
            _ = run.graph.handle  # raises: the nodes are gone with the definition
        if self._live.gone:
            self._node = run._shadow.node(self._node)
            return self._renew(run)
        return self._live

    def set(self, run: Run, value: object) -> None:
        """What `GraphExec.patch` does."""
        live = self._live
        # Tested here, and not in `_current`: the call would be felt in each patch.
        if live.gone or run.context.closed or run.graph.closed:
            live = self._current(run)
        raw = value if type(value) is bytes and len(value) == self._size else self._packed(value)
        place = self._place
        if (
            raw is None
            or (self._pointer and type(value) is not bytes)
            or live.owners.get(place) is not None
            or place in live.reach
            or (self._inner and (live.owners or live.reach) and self._noted(live))
        ):
            raw = self._raw(run, live, raw, value)
            _write_one(run, live, place, raw, *owner_of(run.context, value, self._pointer))
            return
        settled: Iterable[MemoryRange] = ()
        if run._given_back and type(value) is bytes:
            settled = _settled(run, [Write(live, place, raw, None)])
        if settled or not live.setter.holds(place, raw):
            # A number, or bytes, whose owners are not known: only bytes change.
            run._shadow.touch(live)
            try:
                status = live.setter.set(place, raw)
            except DriverError as error:
                raise refused(live.node, error) from error
            except BaseException:
                run._undo([live.node])
                raise
            if status != 0:
                run._apply(_changes_of([Write(live, place, raw, None)]))
        _forget(run, settled)

    def _noted(self, live: Live) -> bool:
        """Whether anything is known of what a word behind the first points at."""
        owners, reach = live.owners, live.reach
        return any(place in reach or owners.get(place) is not None for place in self._inner)

    def write(self, run: Run, value: object) -> Write:
        """What `set` would write, for `write_all`."""
        live = self._current(run)
        raw = self._raw(run, live, self._packed(value), value)
        return Write(live, self._place, raw, *owner_of(run.context, value, self._pointer))

    def _packed(self, value: object) -> bytes | None:
        """The value's bytes by its exact type: where no signature says what they are, they are
        bytes already.  None for everything else."""
        if self._pack is not None:
            return self._pack((value,))
        return value if type(value) is bytes and len(value) == self._size else None

    def _raw(self, run: Run, live: Live, raw: bytes | None, value: object) -> bytes:
        """The value's bytes, if they were not packed by its exact type."""
        if raw is None:
            arguments = live.params.arguments
            index, raw = argument_bytes(
                self._node, live.signature, arguments, self._argument, value, run.context.space
            )
            arguments.require_size(index, raw)
        return raw


class Patcher:
    """Sets one argument of one kernel node; made by `GraphExec.patcher`.

        patch = run.patcher(node, "n")
        patch(128)
        run.launch(stream)

    A call does what `GraphExec.patch` does, and raises what that raises.  It goes on working after
    other changes of the node, and keeps the executable alive.
    """

    __slots__ = ("_argument", "_lock", "_run", "_set")

    def __init__(self, run: Run, argument: Argument) -> None:
        self._run, self._lock, self._argument, self._set = run, run._lock, argument, argument.set

    def __repr__(self) -> str:
        return f"<Patcher of {self._argument!r}>"

    def __call__(self, value: object) -> None:
        with self._lock:
            self._set(self._run, value)


def _found(
    live: Live, argument: int | str, space: Space
) -> tuple[ParameterSlot, str, bool, Element | None]:
    """Where an argument lies, its code in `struct` if a signature says it, whether it may be a
    pointer, and what it takes then."""
    node, signature, arguments = live.node, live.signature, live.params.arguments
    index = argument_index(node, signature, arguments, argument)
    slot = arguments.slot(index)
    if signature is None:
        return slot, "", True, None
    parameter = signature.parameters[index]
    code = parameter.code if signature.layout == arguments.layout else ""
    element = space.element(parameter.dtype) if parameter.pointer else None
    return slot, code, parameter.pointer, element


_PLAIN = (int, float, bytes, bytearray, memoryview, np.generic, np.ndarray)
_WHOLE = (int, np.integer)


def owner_of(context: Context, value: object, pointer: bool) -> tuple[object, int | None]:
    """What a new argument points at, to be kept alive, and how many bytes that has; None for what
    is not known."""
    if isinstance(value, _PLAIN):
        if isinstance(value, _WHOLE) and pointer and value > 0:
            return context.owner_of(int(value)), None
        return None, None
    if isinstance(value, MemoryRange):  # it keeps nothing
        return context.owner_of(value.address), value.nbytes
    try:
        return value, range_of(value).nbytes
    except InputError:  # a bare address, whose size is not known
        return value, None
