"""Finds where a function of torch waits for the device, while it runs as a chain of graphs.

`Segments` is a dispatch mode: it sees each operation of torch.  The operations between two waits
are captured; one that waits ends the capture, whose graph is launched, runs, and is noted, and the
next capture begins.

Most operations that wait are known before they run (`_waits`).  Another one breaks the capture, of
which the GPU has run nothing then: the operations of the capture run once more, eagerly, and so
does the rest of the call.  The answer is right, and the operation is known in the next build.  Work
that the mode does not see (kernels of Triton, CuPy, extensions) is found by the nodes that it adds
to the capture.

Copies of CPU tensors to the GPU wait too.  The content of a CPU tensor that the call has made
depends on its code and on the values that the host has seen, which are the same in each replay: it
is copied once, outside of the captures, and a graph copies from that copy.  Other CPU tensors are
copied in each replay, and compared.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import threading
import types
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import Any, NoReturn

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ostinato import Capture, Graph, Stream
from ostinato.errors import ContextPoisonedError, OstinatoError
from ostinato.interop import captures as rules
from ostinato.interop.reading.chains import (
    ChainBuilder,
    PythonStep,
    Wait,
    as_value,
    error_value,
)
from ostinato.interop.reading.conditions import Scalar, Span, UsedMemory, Works, in_line
from ostinato.interop.reading.library import NoMemory, NotGraphable, WaitsForDevice
from ostinato.interop.reading.slots import words_of_nodes
from ostinato.interop.reading.tails import Gives, ResultPlace
from ostinato.interop.torch import workspaces
from ostinato.interop.torch.adopting import adopt_graph
from ostinato.interop.torch.capturing import (
    NOT_REGISTERED,
    Captures,
    FollowedEvents,
    Kept,
    copies_elsewhere,
    explained,
    hand_over,
    hidden_capture,
    line_outside_torch,
    noted_backward,
    one_at_a_time,
    only_capturable,
    out_of_memory,
    undisturbed,
)
from ostinato.interop.torch.counting import (
    CapturedStep,
    KernelNumbers,
    launched_since,
    tensors_in,
    unchecked,
)
from ostinato.interop.torch.numbers import (
    ERRORS,
    INDEXING,
    REPEAT,
    by_numbers,
    is_harmless,
    key_of,
    places_of,
    read_places,
)
from ostinato.interop.torch.plans import watch
from ostinato.interop.torch.watching import stateful

_log = logging.getLogger(__name__)
_aten = torch.ops.aten
_leaves: Any = torch.utils._pytree.tree_leaves
_map: Any = torch.utils._pytree.tree_map

MOST_HELD = 256 << 20
"""The most bytes that a capture holds to run its operations again; it is ended over them."""
_OTHERWISE = {_aten.prod.default: 0, _aten.prod.dim_int: 0, _aten.masked_fill.Tensor: 2}
"""Operations of whose gradients autograd has two formulas, one of them for modes that see
operations, each with the argument that it is for.  Found by running all operations of torch's own
tests under such a mode."""
_READING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""Tags of operations whose result, or its shape, depends on values."""

_AS_IT_IS = "not by others"
WRITTEN = ("copies of tensors of the CPU are written",)
"""Known of a function that writes such a copy, which a chain then makes anew in each replay."""

Kind = tuple[Hashable, ...]


class Segment(ABC):
    """One capture of a chain, on the side stream of captures."""

    def __init__(self, captures: Captures) -> None:
        self._captures = captures
        self._stream = captures.beside()[1]

    def active(self) -> bool:
        """True while nothing has broken it."""
        return self._stream.capture_info().status.name == "ACTIVE"

    def position(self) -> Hashable:
        """Returns a value that changes when work is captured."""
        return self._stream.capture_info().dependencies

    def count(self) -> int:
        """Returns the number of its nodes."""
        info = self._stream.capture_info()
        return len(self._captures.device.driver.graph_nodes(info.graph))

    @abstractmethod
    def end(self) -> Graph | None:
        """Ends it; returns its graph, or None if nothing was captured.  Raises if it is broken."""

    @abstractmethod
    def abort(self) -> None:
        """Ends it without a graph, also if it is broken."""

    def refused(self, error: Exception) -> bool:
        """True if it cannot hold an operation that raised an error, and another kind of capture
        can."""
        return False

    def place(
        self, before: Any, values: Sequence[float], tensors: Sequence[torch.Tensor]
    ) -> KernelNumbers:
        """Returns the place of numbers in the work since a position, of one operation on tensors.
        Raises ValueError if they are not found."""
        info, driver = self._stream.capture_info(), self._captures.device.driver
        nodes = launched_since(driver, before, info.dependencies, driver.graph_edges(info.graph))
        wide = any(tensor.dtype in (torch.float64, torch.complex128) for tensor in tensors)
        return KernelNumbers(nodes, values, wide=wide)


class _Own(Segment):
    """A capture by ostinato, into the pool of torch's allocator (`Captures`)."""

    def __init__(self, captures: Captures) -> None:
        super().__init__(captures)
        self._owner = Kept()
        self._open = ExitStack()
        self._open.enter_context(captures.allocating(self._owner))
        self._capture = Capture(self._stream)
        try:
            self._capture.begin()
        except BaseException:
            self._open.close()
            raise

    def end(self) -> Graph | None:
        if self.active() and not self.position():
            self.abort()
            return None
        self._captures.note_streams()
        try:
            graph = self._capture.end()
        finally:
            self.abort()
        if copies_elsewhere(graph.nodes()):
            raise NotGraphable("it copies from or to memory of the host")
        return self._captures.adopted(graph, self._owner)

    def abort(self) -> None:
        self._capture.abort()  # nothing to do if it has ended
        self._open.close()

    def refused(self, error: Exception) -> bool:
        if NOT_REGISTERED in str(error):
            self._captures.by_torch = True
            return True
        return False


class _ByTorch(Segment):
    """A capture by torch, for work that draws random numbers."""

    def __init__(self, captures: Captures) -> None:
        super().__init__(captures)
        self._graph = captures.new_graph()
        self._open = ExitStack()
        captures.begin_by_torch(self._graph)
        self._open.enter_context(captures.unseeded())

    def end(self) -> Graph | None:
        if self.active() and not self.position():
            with warnings.catch_warnings():  # torch warns of empty graphs
                warnings.simplefilter("ignore")
                self.abort()
            return None
        captures = self._captures
        captures.note_streams()
        self.abort()
        graph = adopt_graph(captures.device, self._graph, generators=captures.generators)
        if graph.only_to_read:
            raise NotGraphable(f"the graph cannot be replayed here: {graph.only_to_read}")
        captures.owners.add(self._graph)
        return graph

    def abort(self) -> None:
        try:
            self._open.close()
        finally:
            ended = self._captures.end(self._graph)
        if ended is not None:
            raise ended


class Captor:
    """The captures of a chain, and what is done outside of them."""

    def __init__(self, captures: Captures, parts: ChainBuilder) -> None:
        self._captures, self._parts, self._outside = captures, parts, captures.outside
        self.relaxed = captures.device.context.relaxed
        """Lets calls that captures forbid pass in a block."""
        self.settle = captures.settle
        self.graphs: list[Graph] = []
        self._contents: list[bytes] = []
        self._shared = [(each.address, each.end) for each in workspaces.present(captures.index)[0]]

    def begin(self) -> Segment:
        """Begins a capture."""
        kind = _ByTorch if self._captures.by_torch else _Own
        segment = kind(self._captures)
        self._parts.begun(self._captures.beside()[1])
        return segment

    def launch(self, graph: Graph, *, harmless: Works | None) -> None:
        """Launches the graph of a capture (`ChainBuilder.submitted`).  The memory in `harmless` is
        that of tensors alone."""
        self.graphs.append(graph)
        if harmless:
            harmless = self._with_scratch(graph, harmless)
        self._parts.submitted(graph, self._captures.beside()[1], harmless=harmless)

    def _with_scratch(self, graph: Graph, works: Works) -> Works:
        """Adds the memory that operations use besides that of their tensors, which only their
        nodes' words show: workspaces of cuBLAS, and other memory, of which the size is unknown."""
        nodes, start, found = in_line(graph), 0, list[tuple[int, UsedMemory | None]]()
        if nodes is None or len(nodes) != works[-1][0]:
            return ()
        memory_of = self._captures.device.driver.memory_range
        draws: Any = graph.before_launch
        states = [] if draws is None else [(draws.place, draws.place + draws.nbytes)]
        for end, uses in works:
            if uses is not None and _EVERY not in uses.reads:
                known = UsedMemory(writes=uses.reads | uses.writes | {*states})
                for word in words_of_nodes(nodes[start:end]).tolist():
                    if not known.apart(UsedMemory(frozenset([(word, word + 1)]))):
                        continue
                    inside = [each for each in self._shared if each[0] <= word < each[1]]
                    if inside:
                        uses = UsedMemory(uses.reads, uses.writes | {*inside})
                    elif 1 << 32 < word < 1 << 57 and memory_of(word) is not None:
                        uses = None
                        break
            if end > start:
                found.append((end, uses))
            start = end
        return found

    def fixed(self, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Makes a tensor outside of the capture under way, and keeps it with the chain."""
        with self.relaxed(), torch.cuda.stream(self._outside):
            made = make()
            self._contents.append(_bytes(made.cpu()))
        self._parts.constants.append(alias(made))  # the caller may point its own elsewhere
        return made

    def written(self) -> bool:
        """True if a copy of a CPU tensor has another content than at first."""
        pairs = zip(self._parts.constants, self._contents, strict=True)
        return any(_bytes(made.cpu()) != content for made, content in pairs)


class Segments(TorchDispatchMode):  # type: ignore[misc]  # torch has no type for it
    """Cuts a run into captures.  `known`: kinds of operations that have broken captures before,
    to which others are added.  `device`: the device of the captures.  `steps`: objects, each with
    the name of a method that is called in Python, between two captures, and True if it may be in a
    capture (`counting`)."""

    supports_higher_order_operators = True
    """Such operators run as work that is no operation of torch."""

    def __init__(
        self,
        captor: Captor,
        parts: ChainBuilder,
        known: set[Kind],
        device: torch.device,
        steps: Sequence[tuple[Any, str, bool]] = (),
    ) -> None:
        super().__init__()
        self._steps, self._stepping = steps, False
        self._inner: CapturedStep | None = None
        """The step of an optimiser that is being captured."""
        self._inners: list[CapturedStep] = []
        """All that were captured in this run."""
        self._inside = False
        """True while an operation runs by operations of which only `.item()` waits."""
        self._within = False
        """True while one of these reads places from a tensor that lie where it reads and writes."""
        self._numbers: set[int] = set()
        """Addresses of memory from which the host has read a number.  The device may read it while
        the next capture runs, so a capture that writes it is harmful."""
        self._places: dict[int, tuple[torch.Tensor, int]] = {}
        """Tensors that hold places, by address, with the number of places of which these are
        some."""
        self._harmful = False
        """True if an operation of the capture may fail for other content of its tensors."""
        self._works: list[tuple[int, UsedMemory | None]] = []
        """The operations of the capture, with the memory of their tensors."""
        parts.around, parts.copying_out = self._around, self._copy_out
        self._copying = False
        """True if the rest of the capture under way copies the outputs, and does nothing else."""
        self._captor, self._parts, self._known, self._device = captor, parts, known, device
        self._segment: Segment | None = None
        self._failure: NotGraphable | None = None
        """The error that ends the run."""
        self._thread = 0
        """The thread of the capture under way."""
        self._position: Hashable = None
        self._done: list[tuple[Any, Any, Any, list[Any]]] = []
        """The operations of the capture, to run them again if it breaks."""
        self._held = 0
        self._constants: dict[int, torch.Tensor] = {}
        """Tensors that the run has copied from the CPU once, by address.  What writes them makes
        the run start again, with a copy for each replay."""
        self._own: dict[int, Any] = {}
        """Memory that the run has allocated, by address; kept, so that no other takes its place."""
        self._unseen = ""
        self._pending: list[torch.Tensor] = []
        """Tensors over memory from before the run that the capture writes."""
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """The memory from before the run that was written so far, by address, each with a copy of
        its content before."""
        self.why = ""
        """The reason why the run is no chain; empty if it is."""

    # --- captures
    def run(self, work: Callable[[], Any]) -> Any:
        """Runs work in captures.  If the work raises an error, all that it submitted before runs.

        Raises the errors of the work; NotGraphable for an error that a capture has caused, with all
        memory as before."""
        self._modes = _modes()
        try:
            return self._run(work)
        finally:
            # Else what the run allocated would live as long as the chain, and autograd's nodes.
            self._parts.around = nullcontext
            self._own.clear()
            self._constants.clear()
            self._places.clear()
            self._before.clear()
            self._inners.clear()
            self._done, self._pending = [], []
            self._failure = None  # its frames hold arrays

    def _run(self, work: Callable[[], Any]) -> Any:
        self._start()
        try:
            with self:
                result = work()
            self._keep_constants()
            if self._failure is not None:  # the work has caught it
                raise self._failure
        except Exception as error:
            if self._failure is not None:
                self._drop()
                if error is self._failure:
                    raise
                raise self._failure from error
            if not self.why and out_of_memory(error):
                self._drop()
                raise NoMemory(explained(error)) from error
            if rules.of_capture(error):  # also later, of events that the capture recorded
                self._drop()
                kind = WaitsForDevice if self.why else NotGraphable
                raise kind(explained(error)) from error
            with suppress(Exception):  # the first error counts
                self._cut()
            raise
        except BaseException:
            self._drop()
            raise
        self._cut()
        return result

    def _start(self) -> None:
        self._done, self._held, self._thread = [], 0, threading.get_ident()
        self._harmful = False
        self._segment = self._captor.begin()
        self._position = self._segment.position()
        self._works = [(self._segment.count(), None)]

    def _next(self) -> None:
        """Begins another capture, if the one before was sound."""
        self._cut()
        if not self.why:
            self._start()

    def split(self) -> None:
        """Ends the capture under way, if there is one, and begins another."""
        if self._segment is not None:
            self._next()

    def _drop(self) -> None:
        """Ends the capture, of which nothing runs, and puts back what the run has written."""
        segment, self._segment = self._segment, None
        if segment is not None:
            with suppress(RuntimeError, OstinatoError):
                segment.abort()
            self._captor.settle("")
        for inner in self._inners:
            inner.undo()
        for whole, before in self._before.values():
            whole.copy_(before)

    def _keep(self) -> None:
        """Copies memory from before the run, before it is written for the first time."""
        pending, self._pending = self._pending, []
        for tensor in pending:
            if _storage(tensor) not in self._before:
                storage = tensor.untyped_storage()
                with torch.inference_mode(False), torch.no_grad():
                    whole = torch.empty(0, dtype=torch.uint8, device=storage.device)
                    whole.set_(storage, 0, (storage.nbytes(),), (1,))
                    self._before[_storage(tensor)] = whole, whole.clone()

    def _cut(self) -> None:
        """Ends the capture, and launches its graph; runs its operations if it is broken."""
        segment, self._segment = self._segment, None
        if segment is None:
            return
        self._here(segment)
        try:
            harmless = None
            if self._is_harmless(segment):
                harmless, copied = self._works, segment.count()
                if copied > harmless[-1][0]:  # the outputs, into memory that nobody here uses
                    harmless.append((copied, UsedMemory(frozenset([_EVERY]))))
            graph = segment.end()
            self._keep()
            if graph is not None:
                self._captor.launch(graph, harmless=harmless)
        except ContextPoisonedError:
            raise
        except Exception as error:
            self._recover(None, f"a part of the call could not be a graph ({error})")

    def _is_harmless(self, segment: Segment) -> bool:
        """True if a capture has nothing but operations that cannot fail, whatever their tensors
        hold, and writes no memory from before the run.  Gradients lie in the memory of the run."""
        learns = self._modes[0]
        if learns or self._pending or self._harmful:
            return False
        return self._copying or segment.position() == self._position

    def _copy_out(self) -> None:
        """Notes that the copies of the outputs, which nobody sees, end the capture under way."""
        segment = self._segment
        self._copying = segment is not None and segment.position() == self._position

    def _here(self, segment: Segment) -> None:
        """Raises WaitsForDevice in the thread of a backward: a capture must end in the thread where
        it began.  The call runs eagerly, from its start."""
        if threading.get_ident() != self._thread:
            self._segment = segment
            self._fail(
                WaitsForDevice(
                    f"work of a backward at {line_outside_torch()} waits for the GPU, or is "
                    "unknown to torch, and a capture cannot be ended in the thread of a backward"
                )
            )

    def _fail(self, error: NotGraphable) -> NoReturn:
        """Raises an error that ends the run, also if the work catches it: the call runs eagerly,
        from its start."""
        self._failure, self.why = error, str(error)
        raise error

    def _recover(self, segment: Segment | None, why: str) -> None:
        """Runs the operations of a broken capture; the rest of the run is eager."""
        if segment is not None:
            self._here(segment)
            with suppress(RuntimeError, OstinatoError):
                segment.abort()
        self._captor.settle(why)
        self._segment = None
        if any(map(_runs_once, [func for func, *_ in self._done])):
            self._drop()
            self._fail(WaitsForDevice(why))
        self.why = self.why or why
        self._keep()
        with _Plain(torch.is_inference_mode_enabled()):
            for func, args, kwargs, results in self._done:
                new = [each for each in _leaves(func(*args, **kwargs)) if _is_tensor(each)]
                for into, made in zip(results, new, strict=True):
                    if into is not None:
                        into.copy_(made)
        self._done = []

    # --- steps of Python
    @contextmanager
    def _around(self) -> Iterator[None]:
        """Makes the calls of `steps` in the block end the capture under way.

        The methods are replaced on the objects: a scheduler does so too, and keeps a class's."""
        before = []
        for value, name, counts in self._steps:
            held, method = vars(value), getattr(value, name)
            before.append((held, name, held.get(name)))
            step = functools.partial(self._step, value, name, counts, method)
            held[name] = functools.wraps(method)(step)
        try:
            yield
        finally:
            for held, name, method in before:
                if method is None:
                    held.pop(name, None)
                else:
                    held[name] = method

    def _step(
        self, value: Any, name: str, counts: bool, method: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Calls a method between two captures, and notes the call."""
        given = [*args, *kwargs.values()]
        if self._segment is None or any(map(inspect.isroutine, given)):  # a closure may compute all
            return method(*args, **kwargs)
        line = line_outside_torch()
        self._keep_constants()
        kind: Any = (type(value), name)
        if counts and not given and kind not in self._known:
            refuse = functools.partial(self._known.add, kind)
            inner = self._counted(value, method, line, refuse)
            if inner is not None:
                return self._captured_step(inner, method)
        self._cut()
        if self.why:  # the capture was broken
            return method(*args, **kwargs)
        modes = _modes()
        attached = self._parts.attached()
        self._stepping = True
        try:
            result = method(*args, **kwargs)
        except BaseException:
            self.why = f"{line} raised an error"
            raise
        finally:
            self._stepping = False
        if result is not None or modes != self._modes:
            self.why = f"what {line} returns, or the modes of torch there, are not the same later"
            return result
        objects = value, *[each for each in map(stateful, given) if each is not None]
        step = PythonStep(value, name, _map(alias, args), _map(alias, kwargs), attached, objects)
        written = frozenset(self._before)
        self._parts.waited(Wait(line, None, step, None, written, self._unseen, step))
        self._start()
        return None

    def _counted(
        self, value: Any, method: Any, line: str, refuse: Callable[[], object]
    ) -> CapturedStep | None:
        """Returns the step of an optimiser as one that can be captured; None if it cannot."""
        try:
            return CapturedStep(value, method, line, self._is_there, refuse)
        except Exception as error:  # a step need not run with what a dry run gives it
            _log.info("%s is called in Python: %s", line, error)
            refuse()
            return None

    def _captured_step(self, inner: CapturedStep, method: Any) -> Any:
        """Calls the step of an optimiser inside of the capture."""
        self._inners.append(inner)
        self._inner = inner
        try:
            with unchecked(inner.objects[0]):
                result = method()
            if not self.why:
                inner.finished()
        except Exception as error:
            if self._failure is not None or out_of_memory(error) or rules.of_capture(error):
                raise
            inner.refuse()
            self._fail(WaitsForDevice(f"{inner.line} is to be called in Python: {error}"))
        finally:
            self._inner = None
        self._parts.stepped(inner)
        return result

    def _run_noted(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operation outside of the captures, and notes what it writes."""
        old = {_storage(leaf) for leaf in _leaves((args, kwargs)) if _is_tensor(leaf)}
        self._note_written(func, args, kwargs)
        self._keep()
        result = func(*args, **kwargs)
        for leaf in _leaves(result):
            if _is_tensor(leaf) and _storage(leaf) not in old:
                self._own.setdefault(_storage(leaf), leaf)
        return result

    # --- operations
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        if self._inner is not None and self._inner.of_host(tensors_in((args, kwargs))):
            with torch._C._DisableTorchDispatch():
                return func(*args, **kwargs)
        if self._segment is None:
            if self._stepping or self.why:
                return self._run_noted(func, args, kwargs)
            return func(*args, **kwargs)
        if has_parts(func, self._device):  # it may wait in one of them
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        tensors = [leaf for leaf in _leaves((args, kwargs)) if _is_tensor(leaf)]
        if func is _aten._efficientzerotensor.default or any(t._is_zerotensor() for t in tensors):
            self._fail(NotGraphable(f"{func} has to do with a tensor that has no memory"))
        if func in _OTHERWISE and args[_OTHERWISE[func]].requires_grad:
            self._fail(NotGraphable(f"the gradient of {func} is rounded otherwise in a chain"))
        there = [tensor for tensor in tensors if self._is_there(tensor)]
        if not there and not self._makes(kwargs):
            around = self._captor.relaxed() if func is _aten._pin_memory.default else nullcontext()
            with around:
                result = func(*args, **kwargs)
            self._note_host(func, tensors, result)
            return result
        if self._segment.position() != self._position:
            self._note_unseen()
        if len(there) < len(tensors) or not there:
            args, kwargs = self._without_host(func, args, kwargs)
            if func is _aten._to_copy.default and self._is_own(args[0]):
                made = self._captor.fixed(lambda: func(*args, **kwargs))
                if WRITTEN not in self._known:
                    self._constants[_storage(made)] = made
                    return made
                args, func, kwargs = (made,), _aten.clone.default, {}
        if func.namespace != "aten":  # what it writes is not known for sure
            for tensor in tensors:
                self._keep_constant(tensor, func)
            self._places.clear()
        kind = func, *[(tensor.dtype, tensor.device.type) for tensor in tensors]
        waits = self._waits(func, args, kwargs)
        if waits and not self._inside and (func, _AS_IT_IS) not in self._known:
            run = functools.partial(self._wait, func, args, kwargs)
            parts = by_numbers(func, args, kwargs, self._device, run, self._call_within)
            if parts is not None:
                return self._run_by_numbers(func, parts)
        if waits or kind in self._known:
            return self._wait(func, args, kwargs)
        return self._capture(func, args, kwargs, kind)

    def _run_by_numbers(self, func: Any, parts: Callable[[], Any]) -> Any:
        """Runs an operation by others.  If these cannot be captured, the next run knows it."""
        self._inside = True
        try:
            with self:
                return parts()
        except Exception as error:
            if not self.why and rules.of_capture(error):
                self._known.add((func, _AS_IT_IS))
                self._fail(WaitsForDevice(explained(error)))
            raise
        finally:
            self._inside = False

    def _keep_constant(self, tensor: torch.Tensor, why: object) -> None:
        """Fails if a tensor that is copied from the CPU once is written; the next run has copies in
        each replay."""
        if self._constants and _storage(tensor) in self._constants and not self.why:
            self._known.add(WRITTEN)
            self._fail(WaitsForDevice(f"{why} may write a copy of a tensor of the CPU"))

    def _keep_constants(self) -> None:
        """Fails if work that is no operation of torch may have written such tensors."""
        segment = self._segment
        if segment is not None and not (self._copying or segment.position() == self._position):
            for tensor in self._constants.values():
                self._keep_constant(tensor, line_outside_torch())

    def _call_within(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        self._within = True
        try:
            return func(*args, **kwargs)
        finally:
            self._within = False

    def _is_there(self, tensor: torch.Tensor) -> bool:
        return bool(tensor.device.type == self._device.type)

    def _is_own(self, tensor: torch.Tensor) -> bool:
        """True for a CPU tensor whose content only the call's code and the waits decide."""
        return not self._is_there(tensor) and _storage(tensor) in self._own

    def _note_host(self, func: Any, tensors: Sequence[torch.Tensor], result: Any) -> None:
        """Notes the memory of the CPU whose content only the call's code decides."""
        own = func is _aten.lift_fresh.default or all(map(self._is_own, tensors))
        for leaf in _leaves(result):
            if not _is_tensor(leaf):
                continue
            if own:
                self._own[_storage(leaf)] = leaf
            else:
                self._own.pop(_storage(leaf), None)

    def _makes(self, kwargs: dict[str, Any]) -> bool:
        """True if an operation makes tensors of the device."""
        where = kwargs.get("device")
        return where is not None and torch.device(where).type == self._device.type

    def _note_unseen(self) -> None:
        """Ends the capture after work that is no operation of torch: it cannot be run again."""
        self._keep_constants()
        self._places.clear()
        self._unseen = self._unseen or line_outside_torch()
        self._next()

    def _without_host(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Replaces CPU tensors of the call that an operation would copy to the device by such
        copies."""

        def moved(value: Any) -> Any:
            if not _is_tensor(value) or not self._is_own(value):
                return value
            return self._captor.fixed(lambda: value.to(self._device))

        if func is _aten.copy_.default and self._is_there(args[0]):
            return (args[0], moved(args[1]), *args[2:]), kwargs
        if func in INDEXING and self._is_there(args[0]):
            return (args[0], [moved(index) for index in args[1]], *args[2:]), kwargs
        return args, kwargs

    def _waits(self, func: Any, args: Any, kwargs: Any) -> bool:
        """True if an operation is known to wait."""
        if func in INDEXING:
            if any(i is not None and not self._is_there(i) for i in args[1]):
                return True
            masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
            one = len(args) > 2 and args[2].numel() == 1  # it is a masked_fill
            return bool(masks) and not one
        if func is _aten.copy_.default:
            return not (self._is_there(args[0]) and self._is_there(args[1]))
        if func is _aten._to_copy.default:
            where = kwargs.get("device")
            return where is not None and torch.device(where).type != args[0].device.type
        if func is REPEAT and kwargs.get("output_size") is not None:
            return False
        return func in ERRORS or not _READING.isdisjoint(func.tags)

    def _capture(self, func: Any, args: Any, kwargs: Any, kind: Kind) -> Any:
        """Runs an operation inside the capture."""
        given = _map(alias, (args, kwargs))
        segment = self._segment
        assert segment is not None
        said = "the capture was broken"
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            if out_of_memory(error):
                self._fail(NoMemory(explained(error)))
            if segment.refused(error):
                self._recover(segment, explained(error))
                return func(*args, **kwargs)
            if segment.active() and segment.position() == self._position:
                # It may be an error of the call, or of the capture alone: only a real run tells.
                result = self._wait(func, args, kwargs, failed=str(error))
                self._known.add(kind)
                return result
            said = str(error).strip().partition("\n")[0]
        else:
            if segment.active():
                if self._inner is not None:
                    values, which = self._inner.numbers(func, args, kwargs)
                    if values:
                        found = segment.place(self._position, values, tensors_in((args, kwargs)))
                        self._inner.note(found, which)
                self._note(func, given, args, kwargs, result)
                return result
        self._known.add(kind)
        where = line_outside_torch()
        self._recover(segment, f"{func} at {where} was not foreseen to wait for the GPU ({said})")
        return func(*args, **kwargs)

    def _note(self, func: Any, given: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Notes an operation that was captured."""
        assert self._segment is not None
        self._position = self._segment.position()
        self._harmful |= not (self._within or is_harmless(func) or self._reads_within(func, args))
        if not self._harmful:
            self._works.append((self._segment.count(), self._uses(func, args, kwargs, result)))
        self._note_written(func, args, kwargs)
        most = places_of(func, args, kwargs)
        if most:
            self._places[_storage(result)] = alias(result), most
        old = {_storage(leaf) for leaf in _leaves(given) if _is_tensor(leaf)}
        results = []
        for leaf in _leaves(result):
            if _is_tensor(leaf):
                new = _storage(leaf) not in old
                results.append(alias(leaf) if new else None)
                if new:
                    self._held += leaf.untyped_storage().nbytes()
                    self._own[_storage(leaf)] = None
        self._done.append((func, *given, results))
        if self._held > MOST_HELD and threading.get_ident() == self._thread:
            self._next()

    def _reads_within(self, func: Any, args: Any) -> bool:
        """True if an operation reads places that lie in its tensor, whatever the device computes:
        an action's in the table of its probabilities."""
        places, count = read_places(func, args)
        return (
            places is not None and self._places.get(_storage(places), (None, count + 1))[1] <= count
        )

    def _uses(self, func: Any, args: Any, kwargs: Any, result: Any) -> UsedMemory:
        """Returns the memory of an operation's tensors."""
        reads, writes = set[Span](), set[Span]()
        for value, written in _arguments(func, args, kwargs):
            for leaf in _leaves(value):
                if _is_tensor(leaf) and self._is_there(leaf):
                    (writes if written else reads).add(_span(leaf))
        made = {_span(leaf) for leaf in _leaves(result) if _is_tensor(leaf)}
        return UsedMemory(frozenset(reads), frozenset(writes | made - reads))

    def _note_written(self, func: Any, args: Any, kwargs: Any) -> None:
        for value, written in _arguments(func, args, kwargs):
            if written:
                for leaf in _leaves(value):
                    if not (_is_tensor(leaf) and self._is_there(leaf)):
                        continue
                    self._keep_constant(leaf, func)
                    self._places.pop(_storage(leaf), None)
                    self._harmful |= _storage(leaf) in self._numbers
                    if _storage(leaf) not in self._own:
                        self._pending.append(alias(leaf))

    # --- waits
    def _wait(self, func: Any, args: Any, kwargs: Any, *, failed: str = "") -> Any:
        """Runs an operation that waits, between two captures.  `failed`: its error in a capture."""
        line = line_outside_torch()
        gives = None if self._inside else _GIVES.get(func)
        place = None if gives is None else self._parts.place(_calling(sys._getframe(1)), gives)
        self._cut()
        if failed:
            self._captor.settle(failed)
        if self.why:  # the capture was broken
            return func(*args, **kwargs)
        given = _map(alias, (args, kwargs))
        inference = torch.is_inference_mode_enabled()
        self._note_written(func, args, kwargs)
        self._keep()
        before = (*map(_bytes, self._read_on_host(func, *given)),)
        try:
            try:
                result = func(*args, **kwargs)
            except Exception as error:
                failed_so = before, error_value(error)
                self._note_wait(line, failed_so, given, func, inference, [], None)
                raise
            old = {_storage(leaf) for leaf in _leaves(given) if _is_tensor(leaf)}
            results = []
            for leaf in _leaves(result):
                if not _is_tensor(leaf):
                    continue
                if not self._is_there(leaf):
                    self._own[_storage(leaf)] = leaf
                    continue
                new = _storage(leaf) not in old
                self._own.setdefault(_storage(leaf), leaf if new else None)
                results.append(alias(leaf) if new else None)
            value = before, self._value(result)
            self._note_wait(line, value, given, func, inference, results, place)
        finally:
            self._start()
        return result

    def _note_wait(
        self,
        line: str,
        value: Hashable,
        given: Any,
        func: Any,
        inference: bool,
        results: Sequence[Any],
        place: ResultPlace | None,
    ) -> None:
        args, kwargs = given
        host = self._read_on_host(func, args, kwargs)
        copies = [(index, into) for index, into in enumerate(results) if into is not None]

        def again() -> Hashable:
            with _Plain(inference):
                before = (*map(_bytes, host),)
                try:
                    made = func(*args, **kwargs)
                except Exception as error:
                    return before, error_value(error)
                found = before, self._value(made)
                if copies and found == value:
                    new = [leaf for leaf in _flat(made) if _is_tensor(leaf)]
                    new = [leaf for leaf in new if self._is_there(leaf)]
                    for index, into in copies:
                        into.copy_(new[index])
                return found

        def read() -> Any:
            with _Plain(inference):
                made = func(*args, **kwargs)
            if _is_tensor(made) and made.is_pinned():  # the copy may not have waited
                torch.cuda.current_stream().synchronize()
            return made

        scalar = func is _aten._local_scalar_dense.default
        item = args[0].item if scalar else None
        call: Callable[[], Any] = again
        if place is not None:
            call = item or read
        elif item is not None:
            call = lambda: ((), (as_value(item()),))  # noqa: E731
        written = frozenset(self._before)
        tensors = [leaf for leaf in _leaves(given) if _is_tensor(leaf)]
        reads = frozenset([_storage(each) for each in tensors if self._is_there(each)])
        number = None
        if scalar:  # `again` keeps the tensor, so that no other takes its memory
            number = _number(args[0], compared=place is None)
            self._numbers.add(_storage(args[0]))
        self._parts.waited(
            Wait(line, value, call, place, written, self._unseen, reads=reads, scalar=number)
        )

    def _read_on_host(self, func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
        """Returns the CPU tensors that an operation reads."""
        found = []
        for value, written in _arguments(func, args, kwargs):
            if not written:
                found += [leaf for leaf in _leaves(value) if _is_tensor(leaf)]
        return [tensor for tensor in found if not self._is_there(tensor)]

    def _value(self, result: Any) -> Hashable:
        """Returns what the host sees of a result: the shapes of arrays on the device, and the bytes
        of everything else."""
        found: list[Hashable] = []
        for leaf in _flat(result):
            if not _is_tensor(leaf):
                found.append(as_value(leaf))
                continue
            found.append((tuple(leaf.shape), leaf.dtype))
            if not self._is_there(leaf):
                if leaf.is_pinned():  # the copy may not have waited
                    torch.cuda.current_stream().synchronize()
                found.append(_bytes(leaf))
        return tuple(found)


def has_parts(func: Any, device: torch.device) -> bool:
    """True for an operation that runs as others; in inference mode such ones come here.  Some that
    have a kernel of the device have parts too (silu_backward), whose sums differ from its."""
    return bool(func._can_decompose() and not func.has_kernel_for_dispatch_key(key_of(device)))


def _runs_once(func: Any) -> bool:
    """True for an operation that cannot run again outside of a capture on its inputs from inside.
    The random state of attention is on the device in a capture and on the host elsewhere, and
    reading one as the other ends the process; other operations that draw are treated alike."""
    return torch.Tag.nondeterministic_seeded in func.tags or "attention" in func.name()


def _modes() -> tuple[bool, ...]:
    """Returns the modes that a function may change around a call of its own."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cuda"),
        torch.is_autocast_enabled("cpu"),
    )


def _flat(result: Any) -> Sequence[Any]:
    return (result,) if isinstance(result, torch.Tensor | float | None) else _leaves(result)


def _calling(frame: types.FrameType) -> types.FrameType:
    """Returns the frame that has called an operation; torch calls modes by way of its compiler."""
    while frame.f_back is not None and frame.f_globals.get("__name__") in _BETWEEN:
        frame = frame.f_back
    return frame


_BETWEEN = (__name__, "torch._ops", "torch._compile", "torch._dynamo.eval_frame")


def _gives_number(called: Any, count: int) -> Sequence[str] | None:
    if isinstance(called, type):
        return _NUMBERS.get(called) if count == 1 else None
    return () if isinstance(called, str) and called == "item" and count == 0 else None


def _gives_copy(called: Any, count: int) -> Sequence[str] | None:
    if not isinstance(called, str):
        return None
    if called in ("cpu", "to"):
        return ()
    return (called,) if called == "numpy" or (called == "tolist" and count == 0) else None


_GIVES: dict[Any, Gives] = {
    _aten._local_scalar_dense.default: _gives_number,
    _aten._to_copy.default: _gives_copy,
}
"""For operations that wait, which calls return only what the operation returns
(`ResultPlace.of`)."""
_NUMBERS: dict[Any, tuple[str]] = {
    bool: ("__bool__",),
    int: ("__int__",),
    float: ("__float__",),
}
"""Methods that do what calls of these types do with numbers."""


class _Plain:
    """A block that runs operations as a dispatch mode saw them: below autograd and autocast.  It is
    a class, because a generator would cost a replay microseconds."""

    __slots__ = ("_inference", "_open")

    def __init__(self, inference: bool) -> None:
        self._inference = inference
        self._open: ExitStack | None = None

    def __enter__(self) -> None:
        if (
            torch.is_inference_mode_enabled() is not self._inference
            or torch.is_grad_enabled()
            or torch._C._is_any_autocast_enabled()
        ):
            self._open = ExitStack()
            self._open.enter_context(torch.inference_mode(self._inference))
            self._open.enter_context(torch.no_grad())
            self._open.enter_context(torch._C._DisableAutocast())

    def __exit__(self, *error: object) -> None:
        if self._open is not None:
            self._open.close()


def alias(value: Any) -> Any:
    """Returns another tensor over the same memory, whose shape no one else changes; other values as
    they are."""
    return value.detach() if _is_tensor(value) else value


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


_EVERY: Span = (0, 1 << 64)


def _span(tensor: torch.Tensor) -> Span:
    storage = tensor.untyped_storage()
    return int(storage.data_ptr()), int(storage.data_ptr() + storage.nbytes())


def _bytes(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return bytes(plain.view(-1).view(torch.uint8).numpy())


def _number(tensor: torch.Tensor, *, compared: bool) -> Scalar | None:
    """Returns what `.item()` reads of a tensor of one element; None if its memory has another."""
    if tensor.is_neg() or tensor.is_conj():
        return None
    dtype = tensor.dtype

    def seen(content: bytes) -> Any:
        found = torch.frombuffer(bytearray(content), dtype=dtype).item()
        return ((), (as_value(found),)) if compared else found

    return Scalar(tensor.data_ptr(), _bytes(tensor.cpu()), seen, compared)


def _arguments(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, bool]]:
    """Yields the arguments of an operation, each with True if the operation writes it.

    Batch norm writes its statistics in training, against its schema."""
    arguments = func._schema.arguments
    named = {**dict(zip([each.name for each in arguments], args, strict=False)), **kwargs}
    against = ("running_mean", "running_var") if named.get("training", True) else ()
    for each in arguments:
        if each.name in named:
            written = each.alias_info is not None and each.alias_info.is_write
            yield named[each.name], written or each.name in against


def lifted() -> AbstractContextManager[None]:
    """Makes `torch.tensor(…, device=…)` copy by an operation that dispatch modes see, in a block.
    It is a setting of the process, and changes nothing else."""
    return rules.setting(torch._C._only_lift_cpu_tensors, torch._C._set_only_lift_cpu_tensors, True)


def compiled_parts(found: list[str]) -> AbstractContextManager[None]:
    """Notes the lines in a block that call what torch.compile has made, which under a dispatch mode
    runs as it was written, with other kernels."""
    module: Any = sys.modules.get("torch._dynamo.eval_frame")
    question = getattr(module, "is_fx_symbolic_tracing", None)
    if question is None:
        return nullcontext()

    def noted() -> bool:
        found.append(line_outside_torch())
        return bool(question())

    return rules.replaced({(module, "is_fx_symbolic_tracing"): noted})


def run_chain(
    captures: Captures,
    steps: Sequence[tuple[Any, str, bool]],
    work: Callable[[Stream], Any],
    parts: ChainBuilder,
) -> tuple[Any, NotGraphable | None]:
    """Implements `Library.chain`."""
    with one_at_a_time, torch.cuda.device(captures.index), only_capturable():
        captures.open_pool()
        captures.own_workspaces(capturing=True)
        side, stream = captures.beside()
        plans, pool = watch(), captures.pool
        captures.note_unseen()
        current = torch.cuda.current_stream(captures.index)
        captor = Captor(captures, parts)
        compiled: list[str] = []
        events = FollowedEvents()
        where = torch.device("cuda", captures.index)
        mode = Segments(captor, parts, captures.waiting, where, steps)

        def begin_backward() -> None:
            captures.note_backward()
            if not captures.by_torch:
                captures.by_torch = True
                mode.split()

        side.wait_stream(current)
        try:
            with (
                torch.cuda.stream(side),
                undisturbed(),
                hidden_capture(True),
                lifted(),
                compiled_parts(compiled),
                events.following(),
                noted_backward(begin_backward),
            ):
                result = mode.run(lambda: work(stream))
        finally:
            current.wait_stream(side)
        captures.clear_caches(pool)
        why: NotGraphable | None = None
        missing = events.missing_in(*captor.graphs)
        missing = missing or captures.finished(captor.graphs, plans, events)
        if compiled:
            missing = f"torch.compile has made what {compiled[0]} calls, which runs otherwise here"
        if missing:
            why = NotGraphable(missing)
        elif mode.why:
            why = WaitsForDevice(mode.why)
        elif captor.written():  # by an operation that does not say so
            captures.waiting.add(WRITTEN)
            why = WaitsForDevice("a copy of a tensor of the CPU is written")
        if why is not None:
            hand_over(result, current)
        for graph in captor.graphs:
            graph.keep.append(parts.constants)
        return result, why
