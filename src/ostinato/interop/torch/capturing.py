"""Captures of PyTorch work: by ostinato into torch's memory, or by torch itself."""

from __future__ import annotations

import sys
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ostinato import Device, Graph, MemoryRange, Node, NodeKind, Stream
from ostinato.errors import Status
from ostinato.interop import captures
from ostinato.interop.captures import (
    captured,
    disturbed,
    keep_programs,
    line_outside,
    no_collection,
    replaced,
    setting,
)
from ostinato.interop.reading.library import (
    CaptureDisturbed,
    NoMemory,
    NotGraphable,
    WaitsForDevice,
)
from ostinato.interop.torch import workspaces
from ostinato.interop.torch.adopting import adopt_graph, drawing
from ostinato.interop.torch.plans import FULL, ended, transforms, watch
from ostinato.interop.torch.workspaces import unseen_by_modes
from ostinato.lowlevel import causes, every_node
from ostinato.settings import blocking_captures

one_at_a_time = threading.RLock()
"""Held during a capture: torch cannot make two at a time, and what is changed for one (garbage
collection, the answer to transformers) is changed for the whole process."""

_MAGMA = "of several matrices, for which MAGMA allocates memory"
_REFUSED: dict[str, tuple[Callable[[Sequence[Any]], bool], str]] = {
    "_cholesky_solve_helper": (lambda args: args[0].shape[:-2].numel() != 1, _MAGMA),
    "cholesky_inverse": (lambda args: args[0].shape[:-2].numel() != 1, _MAGMA),
    "_cudnn_rnn": (
        lambda args: args[11] and args[12],
        "with dropout, whose random numbers cuDNN draws from a state that a seed starts anew, "
        "which no replay would do",
    ),
}
"""Operations that no capture may hold, with the arguments for which that is so, and why."""

_idle_lock = threading.Lock()

_idle: weakref.WeakKeyDictionary[Any, list[_Side]] = weakref.WeakKeyDictionary()
"""For each context the streams of captures whose function has ended, for later functions."""

NOT_REGISTERED = "generator not in capture mode"
"""Part of torch's error for random numbers in a capture that is not its own."""


_leaves: Any = torch.utils._pytree.tree_leaves

_NO_SEED = 0x6E6F_2073_6565_6421
"""A seed that no user gives a generator."""


class Kept:
    """An object whose life keeps a pool."""


@dataclass(slots=True)
class _Made:
    """The outcome of a capture: a graph and a result, or an error."""

    graph: Graph | None = None
    result: Any = None
    error: str = ""
    kind: type[NotGraphable] = NotGraphable
    """The class of the exception that is raised with `error`."""
    asked: bool = False
    """True if transformers asked if the stream captures, and got the answer that it does not."""


@dataclass(slots=True, eq=False)
class OwnPool:
    """A pool of torch's allocator for some captures alone, once there was one."""

    pool: Any = None
    keeper: Any = None


@dataclass(slots=True, eq=False)
class _Side:
    """A stream of captures, as torch's object and as ostinato's."""

    theirs: Any
    ours: Stream
    blocking: bool
    owners: weakref.WeakSet[Any]
    """The objects that keep the graphs captured on it, which may use its workspaces at any time."""


class Captures:
    """The captures and warm-ups of a graphed function: on a stream beside the caller's, and into a
    pool of torch's allocator that its graphs share."""

    def __init__(self, device: Device, index: int, generators: Sequence[Any]) -> None:
        """`generators`: those that the function draws from, besides the default one."""
        self.device, self.index, self.generators = device, index, generators
        self._side: _Side | None = None
        self._sides: list[_Side] = []
        ended = weakref.finalize(self, _idle.setdefault(device.context, []).extend, self._sides)
        ended.atexit = False
        self.unseen = False
        """True if work on the legacy default stream may be missing from a capture."""
        self.pool: Any = None
        self._keeper: Any = None
        """The owner that keeps the pool: torch ends a pool whose last graph is destroyed, for
        ever."""
        self.owners: weakref.WeakSet[Any] = weakref.WeakSet()
        """The objects that keep the pool for each graph in it."""
        self.waiting: set[tuple[Any, ...]] = set()
        """Kinds of operations that wait, found when they broke a capture (`waits.py`)."""
        self.plans: int | None = None
        """The count of ended plans of cuFFT (`plans.py`) at the first graph that uses some."""
        self._multiplies = False
        """True if a graph uses a workspace of cuBLAS."""
        self._bystanders: list[Stream] = []
        """Streams with a workspace that have taken no part in the captures so far."""
        self.differentiates = False
        """True if autograd has worked, or will, on the side stream."""
        self.by_torch = bool(generators)
        """True if torch captures, because ostinato cannot capture the function
        (`_capture_here`)."""

    def beside(self) -> tuple[Any, Stream]:
        """Returns the stream of warm-ups and captures, as torch's object and as ostinato's.

        It is a stream of ostinato, because torch hands out the same few streams again and again.
        cuBLAS has a workspace for each stream (`own_workspaces`), which a graph uses wherever it is
        replayed, and which no other work may use at that time.

        While the process has one Python thread, the stream waits for the legacy default stream, so
        that work there breaks a capture instead of missing in it.  Other threads that work there
        would get errors.
        """
        blocking = blocking_captures() or len(sys._current_frames()) == 1
        side = self._side
        if side is None or (side.blocking and not blocking):
            idle = _idle.setdefault(self.device.context, [])
            with _idle_lock:
                free = [each for each in idle if each.blocking == blocking and not each.owners]
                if free:
                    side = free[0]
                    idle.remove(side)
                    side.owners = self.owners
                else:
                    ours = self.device.create_stream(blocking=blocking)
                    theirs = torch.cuda.ExternalStream(ours.handle, device=self.index)
                    side = _Side(theirs, ours, blocking, self.owners)
            self._side = side
            self._sides.append(side)
        return side.theirs, side.ours

    @cached_property
    def outside(self) -> Any:
        """A stream that never captures, where torch lets a generator be set during a capture.  Not
        one of torch's 32, to any of which a function may fork."""
        self._outside = self.device.create_stream()
        return torch.cuda.ExternalStream(self._outside.handle, device=self.index)

    def own_workspaces(self, *, capturing: bool = False) -> None:
        """Makes cuBLAS's workspaces for the side stream (`workspaces.py`).  Called before each
        warm-up and each capture.  In a capture autograd's thread cannot have one made."""
        engine = self.differentiates or (capturing and torch.is_grad_enabled())
        workspaces.make(self.index, self.beside()[0], engine=engine)
        if capturing:
            found = workspaces.bystanders(self.index)
            self._bystanders = [*map(self.device.adopt_stream, found)]

    def note_streams(self) -> None:
        """Notes which streams take part in a capture.  Called right before its end: until then the
        driver says of each stream that has joined it that it captures, also after the last join."""
        self._bystanders = [each for each in self._bystanders if not each.is_capturing()]

    def begin_backward(self) -> None:
        """Called before a backward on the side stream, outside of captures: autograd's thread has a
        workspace of its own, which must be there before the thread multiplies."""
        if not self.differentiates:
            self.note_backward()
            self.own_workspaces()

    def note_backward(self) -> None:
        self.differentiates = True

    def note_unseen(self) -> None:
        """Notes whether the next capture may miss work on the legacy default stream."""
        self.unseen |= self._side is not None and not self._side.blocking

    def settle(self, error: str) -> None:
        """Clears an error that a call in a broken capture has left pending, which the next call of
        its library would raise.  cuSOLVER has a CUDA runtime of its own, with errors of its own,
        and no text names it if the captured function has caught the error."""
        like = {"device": f"cuda:{self.index}"}
        with torch.cuda.stream(self.beside()[0]), unseen_by_modes():
            with suppress(RuntimeError):
                torch.zeros(1, **like)
            if "cusolver" in error.lower() or "previous error during capture" in error:
                with suppress(RuntimeError):
                    torch.linalg.eigh(torch.eye(2, **like))

    def run_beside(self, work: Callable[[], Any]) -> Any:
        """Implements `Library.run_beside`."""
        self.own_workspaces()
        (side, _), current = self.beside(), torch.cuda.current_stream(self.index)
        side.wait_stream(current)
        try:
            with (
                torch.cuda.stream(side),
                _no_warning_of_streams(),
                noted_backward(self.begin_backward),
            ):
                result = work()
                if torch.is_grad_enabled() and learns(result):
                    self.begin_backward()  # the caller's, to come
        finally:
            current.wait_stream(side)
        hand_over(result, current)
        return result

    def capture(self, work: Callable[[Stream], Any]) -> tuple[Graph, Any]:
        """Implements `Library.capture`."""
        with one_at_a_time, torch.cuda.device(self.index), only_capturable():
            made = self._captured(work, hidden=True)
            if made.error and made.asked and made.kind in (NotGraphable, WaitsForDevice):
                made = self._captured(work, hidden=False)
        if made.graph is None:
            if "_cudnn_rnn" in made.error:  # its state was made in the capture: let it be made anew
                generator = torch.cuda.default_generators[self.index]
                generator.set_state(generator.get_state())
            self.settle(made.error)
            raise made.kind(made.error)
        if made.graph.only_to_read:
            raise NotGraphable(f"the graph cannot be replayed here: {made.graph.only_to_read}")
        return made.graph, made.result

    def _captured(self, work: Callable[[Stream], Any], *, hidden: bool) -> _Made:
        self.open_pool()
        self.own_workspaces(capturing=True)
        self.note_unseen()
        events = FollowedEvents()

        def followed(stream: Stream) -> Any:
            nonlocal events
            events = FollowedEvents()  # a new one for each capture
            with events.following(), noted_backward(self.note_backward):
                result = work(stream)
            self.note_streams()
            return result

        plans, pool = watch(), self.pool
        with hidden_capture(hidden) as asked:
            made = None if self.by_torch else self._capture_here(followed)
            if made is None:
                self.by_torch = True
                self.clear_caches(pool)
                made = self._capture_by_torch(followed)
        self.clear_caches(pool)
        made.asked = bool(asked)
        if made.graph is not None:
            made.error = events.missing_in(made.graph)
            made.error = made.error or self.finished([made.graph], plans, events)
            made.graph = None if made.error else made.graph
        return made

    def clear_caches(self, pool: Any) -> None:
        """Clears caches of functions with tensors in a pool of captures."""
        ranges: list[MemoryRange] | None = None

        def within(value: object) -> bool:
            nonlocal ranges
            if not isinstance(value, torch.Tensor | tuple | list | dict):
                return False
            tensors = [leaf for leaf in _leaves(value) if isinstance(leaf, torch.Tensor)]
            tensors = [t for t in tensors if t.is_cuda and t.layout is torch.strided]
            if tensors and ranges is None:
                segments = torch.cuda.memory_snapshot()
                segments = [s for s in segments if s.get("segment_pool_id") == pool]
                ranges = [MemoryRange(s["address"], s["total_size"]) for s in segments]
            for tensor in tensors:
                with suppress(RuntimeError):  # a fake tensor of torch.compile
                    if any(memory.holds(tensor.data_ptr()) for memory in ranges or ()):
                        return True
            return False

        captures.clear_caches(within)

    def finished(self, graphs: Sequence[Graph], plans: int, events: FollowedEvents) -> str:
        """Notes of graphs that are whole which code, plans and workspaces they use.  Returns the
        reason why they cannot be replayed; empty if they can.

        `plans`: the count of ended plans before the captures; `events`: those of the captures."""
        read = [(graph, graph.nodes()) for graph in graphs]
        keep_programs(read)
        if any(transforms(nodes) for _, nodes in read):
            since = ended(self.index, plans)
            if since > 0:
                return (
                    "plans of cuFFT end while it runs, which its graph would use: it clears "
                    "torch.backends.cuda.cufft_plan_cache, or makes it smaller"
                )
            self.plans = watch() if self.plans is None else self.plans
            if since < 0:
                return FULL
        every = [node for _, nodes in read for node in nodes]
        idle = {int(stream.handle) for stream in self._bystanders}
        uses = workspaces.used(self.index, every, idle)
        if uses.others:
            line = f" at {events.forked}" if events.forked else ""
            return (
                f"it multiplies on a stream or in a thread of its own{line}, with a workspace of "
                f"cuBLAS that torch may free ({uses.others}), and replays would write memory of "
                "others then; multiply on the stream that is current in the call"
            )
        self._multiplies |= uses.own
        self._give_back()
        return ""

    def _give_back(self) -> None:
        """Lets other functions have the side stream, if no graph of this one uses its workspaces:
        functions without products share one.  Nodes of autograd remember a stream."""
        side = self._side
        if side is not None and not (self._multiplies or self.differentiates):
            self._side = None
            self._sides.remove(side)
            side.owners = weakref.WeakSet()
            with _idle_lock:
                _idle[self.device.context].append(side)

    @contextmanager
    def apart(self, pool: OwnPool) -> Iterator[None]:
        """Makes captures in the block into a pool of their own, whose memory no other graph uses
        between two launches."""
        before = self.pool, self._keeper
        self.pool, self._keeper = pool.pool, pool.keeper
        try:
            yield
        finally:
            pool.pool, pool.keeper = self.pool, self._keeper
            self.pool, self._keeper = before

    def open_pool(self) -> None:
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
            self._keeper = Kept()
            with self.allocating(self._keeper):
                pass

    def trim(self, *, short: bool) -> None:
        """Implements `Library.trim`.

        A capture that failed leaves its memory in the pool, for the next one; torch frees a pool
        that nothing keeps."""
        with one_at_a_time:
            if self._keeper is not None and not self.owners:
                segments = torch.cuda.memory_snapshot()
                left = any(s.get("segment_pool_id") == self.pool for s in segments)
                short |= left or self.pool is None  # None: `_mend` has left the pool to torch
                self.pool = self._keeper = None
            if not short:
                return
            # Another thread may be capturing by torch: this lets memory be freed meanwhile.
            with self.device.context.relaxed(), suppress(RuntimeError):
                torch.cuda.empty_cache()

    @contextmanager
    def allocating(self, owner: object) -> Iterator[None]:
        """Makes this thread's tensors come out of the pool, which lives as long as the owner."""
        torch._C._cuda_beginAllocateCurrentThreadToPool(self.index, self.pool)
        release = weakref.finalize(owner, torch._C._cuda_releasePool, self.index, self.pool)
        release.atexit = False
        try:
            yield
        finally:
            torch._C._cuda_endAllocateToPool(self.index, self.pool)

    def _capture_here(self, work: Callable[[Stream], Any]) -> _Made | None:
        """Captures by ostinato, into the pool of torch's allocator.

        torch's own captures take the default generator, so that other threads which draw random
        numbers meanwhile get an exception; this capture leaves the generators alone.  Returns None
        if torch must capture: the work draws random numbers, runs a backward (`noted_backward`), or
        copies from memory of the host, which torch keeps alive for a graph.
        """
        side, stream = self.beside()
        current, owner = torch.cuda.current_stream(self.index), Kept()
        side.wait_stream(current)
        backwards: list[bool] = []
        try:
            with (
                torch.cuda.stream(side),
                undisturbed(),
                self.allocating(owner),
                noted_backward(lambda: backwards.append(True)),
            ):
                graph, result = captured(stream, work, explained)
        except NotGraphable as broken:
            drew = NOT_REGISTERED in str(broken.__cause__)
            kind = _kind(broken) if type(broken) is NotGraphable else type(broken)
            return None if drew else _Made(error=str(broken), kind=kind)
        finally:
            current.wait_stream(side)
        nodes = graph.nodes()
        drew = any(drawing(nodes, self.device.driver.memory_range))
        if backwards or drew or copies_elsewhere(nodes):
            return None
        return _Made(self.adopted(graph, owner), result)

    def adopted(self, graph: Graph, owner: object) -> Graph:
        """Returns a graph that ostinato captured as an adopted one, since it cannot read what
        torch's kernels point at.  `owner` keeps the pool."""
        self.owners.add(owner)
        return Graph.adopt(self.device, int(graph.handle), owner=(graph, owner))

    def begin_by_torch(self, graph: Any) -> None:
        """Begins a capture by torch on the current stream, into the pool.

        torch counts the graphs of a pool a second time, for pinned memory of the host, and not
        those that others captured: one of its own graphs keeps the pool there too."""
        _ = self.outside  # a stream is made before the capture, not in it
        if type(self._keeper) is Kept:
            self._keeper = self._keeper, self._trivial(self.pool)
        graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")

    def new_graph(self) -> Any:
        """Makes a graph of torch that knows the generators of the function."""
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        for generator in self.generators:
            graph.register_generator_state(generator)
        return graph

    def _capture_by_torch(self, work: Callable[[Stream], Any]) -> _Made:
        side, stream = self.beside()
        current = torch.cuda.current_stream(self.index)
        owner = self.new_graph()
        side.wait_stream(current)
        made = _Made()
        with torch.cuda.stream(side), undisturbed():
            try:
                self.begin_by_torch(owner)
                with self.unseeded():
                    made.result = work(stream)
            except Exception as raised:
                broken = stream.capture_info().status.name == "INVALIDATED"
                made.error, made.kind = explained(raised), _kind(raised)
                traceback.clear_frames(raised.__traceback__)  # see `captures.captured`
                if broken and made.kind is NotGraphable and not captures.of_capture(raised):
                    made.kind = WaitsForDevice
            except BaseException:
                self.end(owner)
                raise
            ended = self.end(owner)
        current.wait_stream(side)
        if not made.error and ended is not None:
            reason = str(ended).strip().partition("\n")[0]
            made.error, made.kind = f"the capture failed: {reason}", _kind(ended)
        if not made.error:
            graph = adopt_graph(self.device, owner, generators=self.generators)
            if len(graph):
                made.graph = graph
                self.owners.add(owner)
            else:
                made.error = "the capture is empty: nothing ran on the caller's current stream"
        return made

    @contextmanager
    def unseeded(self) -> Iterator[None]:
        """Gives the generators, during a capture, a seed that no user gives them.  In a capture
        torch ignores `manual_seed` with the seed that a generator has, and refuses any other one;
        no graph holds a seed.  Other threads cannot draw meanwhile."""
        generators = [torch.cuda.default_generators[self.index], *self.generators]
        with torch.cuda.stream(self.outside):
            # Other generators of the same states: cuDNN starts over with one that gets a seed.
            states = [generator.graphsafe_get_state() for generator in generators]
            saved = [state.get_state() for state in states]
            for state in states:
                state.manual_seed(_NO_SEED)
        try:
            yield
        finally:
            with torch.cuda.stream(self.outside):
                for state, before in zip(states, saved, strict=True):
                    if state.initial_seed() == _NO_SEED:  # else another thread has set a seed
                        state.set_state(before)

    def end(self, owner: Any) -> RuntimeError | None:
        """Ends a capture; returns torch's error if it was broken, after repairing torch's state."""
        try:
            owner.capture_end()
        except RuntimeError as error:
            self._mend()
            return error
        return None

    def _mend(self) -> None:
        """Repairs torch's state after a broken capture, which torch only half ends: its allocator
        goes on filling the pool, and its generators stay in capture mode, so that the next eager
        draw raises.  A capture that succeeds resets the generators; the pool is left to the graphs
        that have it."""
        pool, self.pool = self.pool, None
        for call in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):
            try:
                call(self.index, pool)
            except RuntimeError:
                break  # this version of torch has done it
        # It may still capture: another stream, then.
        if self._side is not None and torch.cuda.is_current_stream_capturing():
            self._sides.remove(self._side)
            self._side = None
        self._trivial(torch.cuda.graph_pool_handle())
        self.beside()[0].synchronize()

    def _trivial(self, pool: Any) -> Any:
        """Captures a graph of one small operation into a pool."""
        with torch.cuda.stream(self.beside()[0]), unseen_by_modes():
            nothing = torch.zeros(1, device=f"cuda:{self.index}")
            owner = self.new_graph()
            owner.capture_begin(pool=pool, capture_error_mode="thread_local")
            nothing.add_(1)
            owner.capture_end()
        return owner


@contextmanager
def only_capturable(
    key: str = "CUDA", capturing: Callable[[], bool] | None = None
) -> Iterator[None]:
    """Lets operations that no capture may hold (`_REFUSED`) raise an error while the current stream
    captures.

    MAGMA allocates memory of the device, which a capture forbids, and ends the process then
    (`magma_queue::setup_ptrArray`, torch 2.11).  Versions of torch without `get_kernel` are left as
    they are.  `key`: the dispatch key of the operations.  `capturing`: by default, what torch says
    of the current stream."""
    get_kernel: Any = getattr(torch.library, "get_kernel", None)
    if get_kernel is None:
        yield
        return
    captures_now = capturing or torch.cuda.is_current_stream_capturing
    library = torch.library.Library("aten", "IMPL")
    try:
        for name, (forbidden, why) in _REFUSED.items():
            if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key):
                continue
            kernel = get_kernel(f"aten::{name}", key)

            def refusing(
                keys: Any,
                *args: Any,
                kernel: Any = kernel,
                forbidden: Callable[[Sequence[Any]], bool] = forbidden,
                what: str = f"aten::{name} {why}",
            ) -> Any:
                if captures_now() and forbidden(args):
                    raise RuntimeError(f"operation not permitted when stream is capturing: {what}")
                return kernel.call_boxed(keys, *args)

            with warnings.catch_warnings():  # torch warns once that a kernel is replaced
                warnings.simplefilter("ignore")
                library.impl(name, refusing, key, with_keyset=True, allow_override=True)
        yield
    finally:
        library._destroy()


class _NotedEngine:
    """An engine of autograd that calls functions before each backward of their threads."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.notes: list[tuple[int, Callable[[], None]]] = []
        """Threads, each with a function."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        for thread, note in [*self.notes]:
            if threading.get_ident() == thread:
                note()
        return self.engine.run_backward(*args, **kwargs)


_engine_lock = threading.Lock()


@contextmanager
def noted_backward(note: Callable[[], None]) -> Iterator[None]:
    """Calls `note` before each backward that this thread begins in the block.

    Autograd runs a backward in a thread of its own.  `Captures.allocating` gives memory of the pool
    to one thread alone; torch's own captures give it to all threads that work in the capture."""
    variable: Any = torch.autograd.Variable
    noted = threading.get_ident(), note
    with _engine_lock:
        if type(variable._execution_engine) is not _NotedEngine:
            variable._execution_engine = _NotedEngine(variable._execution_engine)
        engine = variable._execution_engine
        engine.notes.append(noted)
    try:
        yield
    finally:
        with _engine_lock:
            engine.notes.remove(noted)
            if not engine.notes and variable._execution_engine is engine:
                variable._execution_engine = engine.engine


def _no_warning_of_streams() -> AbstractContextManager[None]:
    """Switches off, in a block, torch's warning of autograd's nodes of weights that belong to
    another stream: results of other calls of a training step, which are still alive, have made them
    there."""
    read = getattr(torch._C, "_warn_on_accumulate_grad_stream_mismatch", None)
    if read is None:  # an older torch
        return nullcontext()
    return setting(read, torch._C._set_warn_on_accumulate_grad_stream_mismatch, False)


def hand_over(result: Any, stream: Any) -> None:
    """Tells torch's allocator that a stream uses the tensors of a result from here on."""
    for leaf in _leaves(result):
        if isinstance(leaf, torch.Tensor) and leaf.is_cuda:
            leaf.record_stream(stream)


def learns(result: Any) -> bool:
    """True if a tensor of a result has gradients."""
    return any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in _leaves(result))


def _kind(error: BaseException) -> type[NotGraphable]:
    """Returns the class of the exception for an error that broke a capture."""
    if any(map(out_of_memory, causes(error))):
        return NoMemory
    if disturbed(error):
        return CaptureDisturbed
    cause = error.__cause__ if isinstance(error, NotGraphable) else error
    return WaitsForDevice if cause is not None and captures.waits(cause) else NotGraphable


def out_of_memory(error: BaseException) -> bool:
    """Implements `Library.out_of_memory`."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return getattr(error, "error_code", None) == Status.OUT_OF_MEMORY  # torch.AcceleratorError


def replaced_here(
    module: Any, name: str, function: Callable[..., Any]
) -> AbstractContextManager[None]:
    """Replaces a function of a module in a block, for calls of this thread; other threads call the
    one before."""
    before, thread = getattr(module, name), threading.get_ident()

    def chosen(*args: Any, **kwargs: Any) -> Any:
        return (function if threading.get_ident() == thread else before)(*args, **kwargs)

    return replaced({(module, name): chosen})


@contextmanager
def hidden_capture(hidden: bool) -> Iterator[list[bool]]:
    """Hides the capture from transformers; adds to the list when transformers asks for it.

    transformers asks whether the stream captures before it looks at data (whether a mask masks
    anything), and runs other kernels than eagerly if so.  While the capture is `hidden`, the answer
    is no and the code runs as it does eagerly: the capture has the same kernels, or fails where the
    code looks at data.
    """
    asked: list[bool] = []
    module: Any = sys.modules.get("transformers.utils.import_utils")
    if not hidden or not hasattr(module, "is_cuda_stream_capturing"):
        yield asked
        return

    def answer() -> bool:
        asked.append(True)
        return False

    with replaced_here(module, "is_cuda_stream_capturing", answer):
        yield asked


@dataclass(slots=True)
class _Record:
    """The last record of an event in a capture: the line, and torch's number of the stream.

    `new`: the event was never recorded before, so the function makes a new event at each call.
    """

    event: Any
    line: str
    stream: int
    new: bool


class FollowedEvents:
    """torch's events that a function records and waits for while it is captured.

    A capture keeps only the order that events give inside of it: no replay records them, or makes a
    stream outside wait.  A wait for an event that was never recorded does nothing.
    """

    def __init__(self) -> None:
        # Not weak references: torch 2.11 frees its events without clearing them.
        self._records: dict[int, _Record] = {}
        """Records by the `id` of the event."""
        self._forks: dict[int, str] = {}
        """Streams that were made to wait for others, and that no stream has waited for since, with
        the lines."""
        self._waited_in_vain = ""
        self.forked = ""
        """The line at which another stream first waited for the captured one."""

    @contextmanager
    def following(self) -> Iterator[None]:
        """Follows the events of this thread in the block.  Every way in Python of recording a
        `torch.cuda.Event` and of waiting for one goes through the two methods that are replaced
        here."""
        kind, thread = torch.cuda.Event, threading.get_ident()
        record, wait = kind.record, kind.wait
        captured = torch.cuda.current_stream().stream_id

        def noted_record(event: Any, stream: Any = None) -> None:
            if threading.get_ident() == thread:
                before = self._records.get(id(event))
                # An event has no handle before its first record.
                new = not event.cuda_event if before is None else before.new
                on = (stream or torch.cuda.current_stream()).stream_id
                self._records[id(event)] = _Record(event, line_outside_torch(), on, new)
            record(event, stream)

        def noted_wait(event: Any, stream: Any = None) -> None:
            if threading.get_ident() == thread:
                if not event.cuda_event:
                    self._waited_in_vain = self._waited_in_vain or line_outside_torch()
                waits = (stream or torch.cuda.current_stream()).stream_id
                found = self._records.get(id(event))
                if found is not None and found.stream != waits:
                    self._forks.pop(found.stream, None)
                    if waits != captured:
                        self._forks[waits] = line_outside_torch()
                        self.forked = self.forked or self._forks[waits]
            wait(event, stream)

        with replaced({(kind, "record"): noted_record, (kind, "wait"): noted_wait}):
            yield

    def missing_in(self, *graphs: Graph) -> str:
        """Describes what replays of graphs would leave out; empty if nothing.  Makes the graphs
        keep the events that their nodes record.  Called after the function has returned."""
        if self._waited_in_vain:
            return (
                f"it waits at {self._waited_in_vain} for an event that was never recorded, and a "
                "replay would not wait for a later record"
            )
        if self._forks:
            return (
                f"it lets a stream wait at {next(iter(self._forks.values()))} that is not joined "
                "again, and a replay would not let it wait; do so after the call"
            )
        if not self._records:
            return ""
        kind = NodeKind.EVENT_RECORD
        every = [node for graph in graphs for node in every_node(graph.nodes())]
        nodes = {node.event_record.event for node in every if node.kind is kind}
        alone = _references(_Record(object(), "", 0, new=False))
        for found in self._records.values():
            has_node = found.event.cuda_event in nodes
            in_use = _references(found) > alone  # garbage in a cycle counts, which costs speed
            if in_use and (found.new or not has_node):
                return (
                    f"the event that it records at {found.line} is in use after it, and a replay "
                    "would not record it; make it once, outside of the function, with "
                    "torch.cuda.Event(external=True), or record it after the call"
                )
            if has_node:
                for graph in graphs:
                    graph.keep.append(found.event)
        return ""


def _references(record: _Record) -> int:
    return sys.getrefcount(record.event)


def line_outside_torch() -> str:
    return line_outside("torch")


def copies_elsewhere(nodes: Sequence[Node]) -> bool:
    """True if a graph copies from or to memory outside of torch's allocator for devices."""
    copies = [n.memcpy for n in every_node(nodes) if n.kind is NodeKind.MEMCPY]
    found = [address for copy in copies for address in (copy.src, copy.dst)]
    if not found:
        return False
    segments = torch.cuda.memory_snapshot()
    ranges = [MemoryRange(s["address"], s["total_size"]) for s in segments]
    return not all(any(r.holds(address) for r in ranges) for address in found)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Switches off garbage collection, which may destroy graphs, and autocast's cache, whose
    tensors would be gone at the replay."""
    caching = torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled
    with setting(*caching, False), no_collection():
        if torch.is_autocast_enabled("cuda"):
            torch.clear_autocast_cache()
        yield


def explained(error: Exception) -> str:
    """Describes what broke a capture, and the line of the caller's code where it happened."""
    return captures.explained(
        error,
        torch,
        ".item(), a print, nonzero, a copy to the CPU, a generator that was not given, or one that "
        "is given a seed",
    )
