"""Chains: calls that wait for the device, as several graphs with the waits between them.

An operation waits if the host needs a value that the device computes: `.item()`, a mask as an
index, a check of errors.  No graph can hold it.  A chain is built while the function runs for real
(`Library.chain`): the work before a wait is captured and launched, the operation runs, and the next
capture begins.  So Python runs once, and sees true values.

A replay launches the first graph, runs the operation that waited on the same memory, and compares
what the host would see now with what Python saw.  If the two are equal bit for bit, it launches the
next graph.  Another value ends the replay (`Diverged`), since Python does not run in it: the memory
that the graphs have written is put back, and the call is made in another way from its start.  A
value that Python only returns (`tails.py`) is not compared: a replay returns its own.

Where the host waits for one number, the device compares it, and the graphs before and after it are
one (`conditions.py`).

A call of Python on objects that count and decide there (`optimizer.step()`) is made again by each
replay, between two graphs (`Library.step_in_python`).
"""

from __future__ import annotations

import logging
import struct
import sys
import threading
import types
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from ostinato import Device, Graph, GraphExec, MemoryRange, Stream
from ostinato.errors import ContextPoisonedError, OstinatoError, StateLostError
from ostinato.interop.reading.conditions import Record, Scalar, Works, join
from ostinato.interop.reading.tails import Gives, ResultPlace
from ostinato.lowlevel import NotLaunched, new_lock


@dataclass(frozen=True, slots=True, eq=False)
class PythonStep:
    """A call between two graphs that each replay makes in Python (`optimizer.step()`)."""

    value: Any
    """The object, whose method may be replaced later."""
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    attached: list[tuple[Any, str, Any]]
    """The gradients at the call, as `Library.attached` lists them."""
    objects: tuple[Any, ...]
    """The objects that the call may change: its own, and the optimiser that a scaler is given."""

    def __call__(self) -> None:
        """Makes the call.  Raises Raised, which ends the replay where the call would end."""
        for array, name, value in self.attached:
            if getattr(array, name) is not value:
                setattr(array, name, value)
        try:
            getattr(self.value, self.name)(*self.args, **self.kwargs)
        except Exception as error:
            raise Raised(error) from error


class StepInside(Protocol):
    """A step of an optimiser inside of a graph, with numbers that the host computes: each replay
    sets them before the launch."""

    line: str
    objects: tuple[Any, ...]
    """The objects that it changes on the host."""

    def found_in(self, executables: Sequence[GraphExec | None]) -> int:
        """Finds its numbers in the graphs of a chain; returns the index of the first graph that has
        some.  Raises ValueError if some are in none."""
        ...

    @property
    def refuse(self) -> Callable[[], object]:
        """A function that makes it a PythonStep in later chains."""
        ...

    def begin(self) -> None:
        """Counts, and sets the numbers of the next launch.  Raises NotLaunched."""

    def back(self) -> None:
        """Takes the count of `begin` back."""


class Raised(Exception):
    """An error: the function raised `error` in a run that counts."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(frozen=True, slots=True, eq=False)
class Wait:
    """An operation that waits."""

    line: str
    """The place in the caller's code: "file:line: source"."""
    value: Hashable
    """The value that the host saw when the chain was built, bit for bit (`as_value`)."""
    again: Callable[[], Any]
    """A function that runs the operation again on the memory of the chain, and returns what the
    host sees now.  If that is equal to `value`, later graphs find the operation's results."""
    place: ResultPlace | None = None
    """The places of the value in the call's result, if Python only returns it: then `again` returns
    the value itself, which is not compared.  Else None."""
    written: frozenset[int] = frozenset()
    """Addresses of the memory that the call has written before the wait, without the memory that
    its operations allocated."""
    unseen: str = ""
    """The line of work before the wait of which the library does not know what it writes; or
    empty."""
    step: PythonStep | None = None
    """The call of Python that `again` makes, if that is no operation that waits."""
    reads: frozenset[int] = frozenset()
    """Addresses of the device's memory that `again` uses."""
    scalar: Scalar | None = None
    """The number that `again` reads, if it reads one and does nothing else."""

    @property
    def compared(self) -> bool:
        """True if another value than the chain's ends a replay."""
        return bool(self.line) and self.place is None and self.step is None


class Draws(Protocol):
    """The `before_launch` of a graph that draws random numbers."""

    nbytes: int
    """The bytes that the graph reads in each launch."""

    def next(self) -> bytes:
        """Returns these bytes for the next launch, and advances the generators."""

    def read_at(self, graph: Graph, address: int | None) -> None:
        """Makes a definition read them at an address, where they lie at each launch; at their own
        place for None."""

    def __call__(self, stream: Stream, /) -> None:
        """Puts the next ones at their own place."""


class Diverged(Exception):
    """An error: a wait of a replay gave another value than that of the chain.  All memory is as
    before the call."""

    def __init__(self, values: Sequence[Hashable], line: str) -> None:
        super().__init__(line)
        self.values = tuple(values)
        """The values of this call, up to the one that differs."""
        self.line = line


@dataclass(frozen=True, slots=True, eq=False)
class ChainLink:
    """A graph and the waits after it."""

    executable: GraphExec | None
    """The graph's executable; None if nothing was submitted before the wait, and for the last graph
    of a chain, which the caller launches."""
    wait: Wait | None
    """The operation that waits after the graph; None at the end."""
    numbers: Sequence[Wait] = ()
    """The waits for numbers inside of the graph."""
    record: Record | None = None
    """These numbers; None if there are none."""

    @property
    def waits(self) -> list[Wait]:
        return [*self.numbers, *([] if self.wait is None else [self.wait])]


class KeepingLibrary(Protocol):
    """A library that copies arrays, and puts generators back, if it has any."""

    def clone(self, array: Any, /) -> Any: ...

    def copy(self, into: Any, array: Any) -> None: ...

    def save_random(self) -> Any:
        """Returns the states of the generators."""
        return None

    def restore_random(self, state: Any) -> None:
        return


@dataclass(slots=True, eq=False)
class Chain:
    """The graphs of a call but the last, with the waits after them."""

    links: list[ChainLink]
    last: ChainLink
    """The last graph, with the waits inside of it."""
    saved: tuple[int, ...] = ()
    """Indices in `ReadCall.state` of the arrays that must be put back if a replay diverges."""
    constants: Sequence[Any] = ()
    """Arrays that are made once, and that the graphs read."""
    draws: bool = False
    """True if the call draws random numbers that must be taken back if a replay ends early."""
    complete: bool = True
    """True if putting back `saved` and the generators restores all memory, wherever a replay
    ends."""
    places: list[ResultPlace] = field(init=False)
    """The places in the result of the values that are not compared, in the order of `run`."""
    values: tuple[Hashable, ...] = field(init=False)
    inside: list[tuple[int, StepInside]] = field(default_factory=list)
    """The steps of optimisers inside of graphs, each with the index of its link; that of the last
    graph comes after those of the links."""
    at_end: Callable[[], object] | None = None
    """Called when the call has its result: it waits for the device as the call's own waits do."""
    settled: list[tuple[Any, str, Any]] = field(default_factory=list)
    """The gradients at the end of the call that are others than those at its last step of Python,
    as `Library.attached` lists them."""

    def __post_init__(self) -> None:
        waits = self.waits
        self.values = tuple([wait.value if wait.place is None else _RETURNED for wait in waits])
        self.places = [wait.place for wait in waits if wait.place is not None and wait.place.paths]

    @property
    def waits(self) -> list[Wait]:
        """All waits, in the order in which the host sees their values.  Those that only bound a
        capture are not among them: whether they are there does not depend on the values before."""
        return [w for link in (*self.links, self.last) for w in link.waits if w.line]

    def start(self, library: KeepingLibrary, state: Sequence[Any], stream: Stream) -> ChainReplay:
        """Runs everything before the last graph.  `state`: as `ReadCall.state`.

        Raises Diverged and NotLaunched, with all put back that a replay writes before its last
        compared wait, and the generators; StateLostError if some memory cannot be put back; and
        Raised: nothing is put back after a step of Python."""
        replay = ChainReplay(self, library, state, stream)
        replay.begin()
        return replay

    def stop(self, error: object) -> None:
        """Raises StateLostError if memory cannot be put back after a graph was refused."""
        if not self.complete:
            raise StateLostError(
                f"a graph of a call was refused after others had run ({error}), and what these "
                "have written cannot be put back: write that again, then call forget()"
            )

    @property
    def steps(self) -> list[PythonStep]:
        """The calls of Python between the graphs."""
        return [wait.step for wait in self.waits if wait.step is not None]

    @property
    def stepped(self) -> list[Any]:
        """The objects that replays change in Python."""
        steps: list[PythonStep | StepInside] = [*self.steps, *[step for _, step in self.inside]]
        return [*{id(each): each for step in steps for each in step.objects}.values()]

    @property
    def graphs(self) -> list[Graph]:
        """The graphs before the last one."""
        return [link.executable.graph for link in self.links if link.executable is not None]

    @property
    def words(self) -> str:
        """The number of graphs, and the lines that wait, for tables."""
        waits, steps = dict[str, None](), dict[str, None]()
        for wait in self.waits:
            (waits if wait.step is None else steps)[wait.line.partition(": ")[0]] = None
        graphs = 1 + sum(link.executable is not None for link in self.links)
        text = f"{graphs} graph{'s' * (graphs > 1)}"
        if waits:
            text += f", waits at {', '.join(waits)}"
        text += f", steps of Python at {', '.join(steps)}" * bool(steps)
        inside = dict.fromkeys([step.line.partition(": ")[0] for _, step in self.inside])
        return text + f", numbers of Python for {', '.join(inside)}" * bool(inside)


class ChainReplay:
    """A replay of a chain, whose last graph the caller launches between `begin` and `finish`."""

    __slots__ = ("_begun", "_chain", "_library", "_random", "_saved", "_stream", "fresh")

    def __init__(
        self, chain: Chain, library: KeepingLibrary, state: Sequence[Any], stream: Stream
    ) -> None:
        self.fresh: list[Any] = []
        """The values for `Chain.places`, so far."""
        self._chain, self._library, self._stream = chain, library, stream
        written = [state[i] for i in chain.saved if i < len(state)]
        self._saved = [(array, library.clone(array)) for array in written]
        self._random = library.save_random() if chain.draws else None
        self._begun: list[StepInside] = []

    def begin(self) -> None:
        """Implements `Chain.start`."""
        try:
            self._run()
        except (Raised, StateLostError):
            raise
        except BaseException:
            self.put_back()
            raise

    def _run(self) -> None:
        chain = self._chain
        for index, link in enumerate(chain.links):
            if link.executable is not None:
                try:
                    self._prepare(index, link)
                    link.executable.launch(self._stream)
                except ContextPoisonedError:
                    raise
                except (NotLaunched, OstinatoError) as error:
                    if index:
                        chain.stop(error)
                    raise NotLaunched(str(error)) from error
            self._read(link)
        for array, name, value in chain.settled:
            setattr(array, name, value)
        try:
            self._prepare(len(chain.links), chain.last)
        except NotLaunched as error:
            if chain.links:
                chain.stop(error)
            raise

    def _prepare(self, index: int, link: ChainLink) -> None:
        """Prepares the launch of a link's graph."""
        for at, step in self._chain.inside:
            if at == index:
                step.begin()
                self._begun.append(step)
        if link.record is not None:
            link.record.begin(self._stream)

    def _read(self, link: ChainLink) -> None:
        """Waits for the values after the launch of a link's graph.  Raises Diverged."""
        record, wait = link.record, link.wait
        if record is not None:
            other = record.wait()
            if other is not None:
                raise self._diverged(link.numbers[other], record.seen(other))
            for index, each in enumerate(link.numbers):
                if each.place is not None and each.place.paths:
                    self.fresh.append(each.place.convert(record.seen(index)))
        if wait is None:
            return
        value, place = wait.again(), wait.place
        if place is None:
            if value != wait.value:
                raise self._diverged(wait, value)
        elif place.paths:
            self.fresh.append(place.convert(value))

    def _diverged(self, wait: Wait, value: Hashable) -> Diverged:
        before = self._chain.values[: self._chain.waits.index(wait)]
        return Diverged((*before, value), wait.line)

    def finish(self) -> None:
        """Waits for the numbers of the last graph, after its launch.  Raises Diverged, with all put
        back."""
        try:
            self._read(self._chain.last)
        except BaseException:
            self.put_back()
            raise

    def put_back(self) -> None:
        """Puts back what `Chain.start` says."""
        while self._begun:
            self._begun.pop().back()
        for array, content in self._saved:
            self._library.copy(array, content)
        if self._random is not None:
            self._library.restore_random(self._random)

    def refused(self, error: object) -> None:
        """Must be called if the last graph was not launched.  Raises StateLostError if some memory
        cannot be put back."""
        self.put_back()
        if self._chain.links:
            self._chain.stop(error)


_RETURNED = "returned", "and not compared"


class ChainBuilder:
    """The graphs and waits of a chain, as a library builds it.

    `caller`: the code that calls the function.  `attached`: a function that lists the gradients
    now, as `Library.attached` does.  `copy_in`: captures the copies of the inputs.  `prepare`:
    changes a graph before it is instantiated."""

    def __init__(
        self,
        function: Callable[..., Any],
        caller: types.CodeType,
        attached: Callable[[], list[tuple[Any, str, Any]]],
        copy_in: Callable[[Stream], None],
        prepare: Callable[[Graph], object],
    ) -> None:
        self._function, self._caller, self.attached = function, caller, attached
        self._copy_in, self._prepare = copy_in, prepare
        self._harmless: dict[Graph, Works] = {}
        self.copying_out: Callable[[], None] = _nothing
        """Called before the copies of the outputs are captured; the library sets it."""
        self.around: Callable[[], AbstractContextManager[object]] = nullcontext
        """Returns a block in which the function runs; the library sets it."""
        self.at_end: Callable[[], object] | None = None
        """`Chain.at_end`, if the library sets it."""
        self.graphs: list[Graph] = []
        self.links: list[ChainLink] = []
        self.constants: list[Any] = []
        """Arrays that are made once, and that the graphs read; the library adds them."""
        self.further: Callable[[], bytes] | None = None
        """Returns what the first graph sets for each launch of the whole (`Moves`)."""
        self.last: GraphExec | None = None
        """The executable of the graph after the last wait."""
        self._inside: list[StepInside] = []

    def stepped(self, step: StepInside) -> None:
        """Notes a step of an optimiser that is in the capture under way."""
        self._inside.append(step)

    def begun(self, stream: Stream) -> None:
        """Begins the first graph with the copies of the inputs; the library calls it for each
        capture that has begun on a stream."""
        if not self.graphs:
            self._copy_in(stream)

    def submitted(self, graph: Graph, stream: Stream, *, harmless: Works | None = None) -> None:
        """Launches a graph that was captured on a stream.  `harmless`: its operations, if it cannot
        fail, whatever its memory holds, and writes only memory that operations of the chain have
        allocated."""
        if harmless is not None:
            self._harmless[graph] = harmless
        self._prepare(graph)
        if self.last is not None:
            # A part was ended without a wait, to bound the memory that it holds.
            self.links.append(ChainLink(self.last, Wait("", (), tuple)))
        self.last = graph.instantiate(upload=stream)
        self.graphs.append(graph)
        self.last.launch(stream)

    def waited(self, wait: Wait) -> None:
        """Notes an operation that has just waited."""
        self.links.append(ChainLink(self.last, wait))
        self.last = None

    def joined(self, device: Device, room: MemoryRange | None) -> tuple[Chain, GraphExec]:
        """Makes the chain, in which graphs with waits for numbers between them are one, and returns
        it with the executable of its last graph.  `room`: memory that is set at each launch of the
        whole, for `further`.  Raises ValueError if a step that was captured must be called in
        Python."""
        draws = self._drawn_together(room)
        links: list[ChainLink] = []
        run: list[ChainLink] = []
        for link in [*self.links, ChainLink(self.last, None)]:
            run.append(link)
            wait = link.wait
            if wait is None or (wait.scalar is None and wait.line):
                whole = _join(device, run, self._harmless)
                links += run if whole is None else [whole]
                run = []
        last = links.pop()
        executable = last.executable
        if links:
            for graph, drawn in draws:
                drawn.read_at(graph, None)
                graph.before_launch = drawn
        elif draws:
            self.further = lambda: b"".join([drawn.next() for _, drawn in draws])
        if executable is None:  # the function ends with a wait
            empty = Graph.create(device)
            empty.add_empty()
            executable = empty.instantiate()
        last = replace(last, executable=None)
        chain = Chain(links, last, constants=self.constants, at_end=self.at_end)
        for step in self._inside:
            try:
                at = step.found_in([*[link.executable for link in links], executable])
            except ValueError as error:
                step.refuse()
                raise ValueError(f"{step.line} is to be called in Python: {error}") from None
            chain.inside.append((at, step))
        return chain, executable

    def _drawn_together(self, room: MemoryRange | None) -> list[tuple[Graph, Draws]]:
        """Makes the graphs that draw read in `room` what they draw from, if all graphs can be one;
        returns them.  Else operations between them may draw too, in order."""
        draws: list[tuple[Graph, Any]] = [
            (graph, graph.before_launch) for graph in self.graphs if graph.before_launch is not None
        ]
        nbytes = sum(drawn.nbytes for _, drawn in draws)
        apart = any(wait.scalar is None and wait.line for wait in self.waits)
        if room is None or nbytes > room.nbytes or apart or not self.links:
            return []
        place = room.address
        for graph, drawn in draws:
            drawn.read_at(graph, place)
            graph.before_launch, place = None, place + drawn.nbytes
        return draws

    @property
    def waits(self) -> list[Wait]:
        """All waits so far, and where a part was ended without one."""
        return [wait for link in self.links for wait in link.waits]

    def place(self, frame: types.FrameType, given: Gives) -> ResultPlace | None:
        """Returns where in the call's result is what a frame is about to get (`ResultPlace.of`)."""
        return ResultPlace.of(frame, self._function, self._caller, given)


def _join(
    device: Device, run: Sequence[ChainLink], harmless: Mapping[Graph, Works]
) -> ChainLink | None:
    """Makes one graph of those of some links, if there are numbers between them, and closes their
    executables; returns None if it cannot be made."""
    parts: list[Graph | Scalar] = []
    waits = []
    for link in run:
        if link.executable is not None:
            parts.append(link.executable.graph)
        if link.wait is not None and link.wait.scalar is not None:
            parts.append(link.wait.scalar)
            waits.append(link.wait)
    made = join(device, parts, harmless) if waits else None
    if made is None:
        return None
    for link in run:
        if link.executable is not None:
            link.executable.close()
    executable, record = made
    return ChainLink(executable, run[-1].wait, waits, record)


def _nothing() -> None:
    """There is nothing to do."""


_telling = new_lock()


class _Noting:
    """A text stream that notes who writes."""

    def __init__(self, stream: Any, note: Callable[[], None]) -> None:
        self._stream, self._note = stream, note

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._note()
        return int(self._stream.write(text))


@contextmanager
def output_noted(found: list[str]) -> Iterator[None]:
    """Notes the lines on which this thread prints or logs in the block, which no replay would.

    One thread at a time is in such a block."""
    thread = threading.get_ident()
    kind: Any = logging.Logger

    def note() -> None:
        if threading.get_ident() == thread:
            frame = sys._getframe(2)
            while frame.f_back is not None and frame.f_code.co_filename == logging.__file__:
                frame = frame.f_back
            found.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")

    def noted(logger: logging.Logger, record: logging.LogRecord) -> None:
        if logger.name.partition(".")[0] == "ostinato":  # what the library says of its graphs
            replaced, sys.stderr = sys.stderr, err
            try:
                handle(logger, record)
            finally:
                sys.stderr = replaced
        else:
            note()
            handle(logger, record)

    with _telling:
        handle, out, err = kind.callHandlers, sys.stdout, sys.stderr
        streams = _Noting(out, note), _Noting(err, note)
        kind.callHandlers = noted
        sys.stdout, sys.stderr = streams
        try:
            yield
        finally:
            kind.callHandlers = handle
            if sys.stdout is streams[0]:  # else the function has replaced it
                sys.stdout = out
            if sys.stderr is streams[1]:
                sys.stderr = err


def as_value(value: object) -> Hashable:
    """Returns a plain value bit for bit, to compare it: NaN equals NaN, and 0.0 not -0.0."""
    if type(value) is float:
        return struct.pack("<d", value)
    if type(value) is complex:
        return struct.pack("<dd", value.real, value.imag)
    return type(value), value if isinstance(value, Hashable) else repr(value)


def error_value(error: Exception) -> Hashable:
    """Returns an exception as a value, to compare it."""
    return "raised", type(error), str(error)
